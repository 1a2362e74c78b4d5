//! A guest machine that uses a disk as guests do: Debian's cloud kernel, an initramfs of busybox and
//! e2fsprogs, QEMU without hardware acceleration (so that it runs where KVM does not exist).
//!
//! The script below is the guest's first and only process. It prints [`SENTINEL`] on the serial
//! console when everything it tried went well, and switches the machine off either way.

use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::process::Process;
use crate::scratch::{Scratch, text};
use crate::tool::{Tool, find};

/// What the serial console says when the guest found every byte where it had put it.
pub const SENTINEL: &str = "GUEST-FOUND-EVERYTHING";

/// How long the machine may take from power-on to power-off, on two slow cores.
const RUN_MAX: Duration = Duration::from_secs(240);

/// Drivers the guest needs before it sees its disk.
const MODULES: [&str; 3] = ["virtio_pci", "virtio_blk", "ext4"];

/// Programs of the host that the guest gets, with their libraries.
const PROGRAMS: [&str; 2] = ["mkfs.ext4", "e2fsck"];

/// Makes an ext4 filesystem, fills it, and looks at it again through two fresh mounts and a check.
const INIT: &str = r#"#!/bin/busybox sh
bb=/bin/busybox
$bb mkdir -p /proc /sys /dev /mnt /tmp
$bb mount -t proc proc /proc
$bb mount -t sysfs sysfs /sys
$bb mount -t devtmpfs devtmpfs /dev
$bb mount -t tmpfs tmpfs /tmp
end() { echo "$1"; $bb sync; $bb poweroff -f; $bb sleep 60; }
try() { "$@" || end "GUEST-FAILED: $*"; }
for m in $($bb cat /modules/order); do try $bb insmod /modules/$m; done
n=0
while [ ! -b /dev/vda ]; do $bb sleep 0.1; n=$((n+1)); [ $n -gt 100 ] && end "GUEST-FAILED: no disk"; done
try /sbin/mkfs.ext4 -q -F -E nodiscard /dev/vda
try $bb mount -t ext4 /dev/vda /mnt
i=0
while [ $i -lt 12 ]; do
  try $bb dd if=/dev/urandom of=/mnt/big$i bs=64k count=$((4+i*3)) 2>/dev/null
  try $bb dd if=/dev/urandom of=/mnt/small$i bs=777 count=$((1+i)) 2>/dev/null
  i=$((i+1))
done
cd /mnt && $bb sha256sum big* small* > /tmp/sums; cd /
try $bb sync
try $bb umount /mnt
for pass in 1 2; do
  echo 3 > /proc/sys/vm/drop_caches
  try $bb mount -t ext4 /dev/vda /mnt
  cd /mnt; $bb sha256sum -s -c /tmp/sums || end "GUEST-FAILED: hashes in pass $pass"; cd /
  try $bb rm /mnt/big$pass
  $bb grep -v big$pass /tmp/sums > /tmp/fewer; $bb mv /tmp/fewer /tmp/sums
  try $bb dd if=/tmp/sums of=/mnt/overwritten conv=fsync 2>/dev/null
  try $bb fstrim /mnt
  try $bb umount /mnt
done
try /sbin/e2fsck -fn /dev/vda
end GUEST-FOUND-EVERYTHING
"#;

/// Writes, with each round, something else to four parts of the disk at the same time, past the page cache, and reads it
/// again in the next one. Says so on the console, for others to count.
const ROUNDS: &str = r#"#!/bin/busybox sh
bb=/bin/busybox
$bb mkdir -p /proc /sys /dev /tmp
$bb mount -t proc proc /proc
$bb mount -t sysfs sysfs /sys
$bb mount -t devtmpfs devtmpfs /dev
$bb mount -t tmpfs tmpfs /tmp
end() { $bb dmesg | $bb grep -i -e 'i/o error' -e 'timeout' -e 'blocked for' && echo GUEST-HAS-ERRORS; echo "$1"; $bb poweroff -f; $bb sleep 60; }
for m in $($bb cat /modules/order); do $bb insmod /modules/$m || end "GUEST-FAILED: $m"; done
n=0
while [ ! -b /dev/vda ]; do $bb sleep 0.1; n=$((n+1)); [ $n -gt 100 ] && end "GUEST-FAILED: no disk"; done
echo "GUEST-SEES serial=$($bb cat /sys/block/vda/serial) sectors=$($bb cat /sys/block/vda/size) queues=$($bb ls /sys/block/vda/mq | $bb wc -l) block=$($bb cat /sys/block/vda/queue/logical_block_size)/$($bb cat /sys/block/vda/queue/physical_block_size) discard=$($bb cat /sys/block/vda/queue/discard_max_bytes) cache=$($bb cat /sys/block/vda/queue/write_cache | $bb tr ' ' -)"
i=0
while [ $i -lt 4 ]; do $bb dd if=/dev/urandom of=/tmp/new$i bs=4k count=512 2>/dev/null; i=$((i+1)); done
part() {
  $bb dd if=/tmp/new$1 of=/dev/vda bs=16k seek=$(($1*2048)) oflag=direct conv=notrunc,fsync 2>/dev/null || echo GUEST-WRITE-FAILED
  $bb dd if=/dev/vda of=/tmp/old$1 bs=16k skip=$(($1*2048)) count=128 iflag=direct 2>/dev/null || echo GUEST-READ-FAILED
  $bb cmp /tmp/new$1 /tmp/old$1 || echo GUEST-READ-SOMETHING-ELSE
}
round=0
while [ $round -lt ROUNDS ]; do
  for i in 0 1 2 3; do part $i & done
  # What the disk holds elsewhere goes into the page cache, from where nobody takes it before the end.
  $bb dd if=/dev/vda of=/dev/null bs=1M skip=$((128+round)) count=1 2>/dev/null
  wait
  echo "GUEST-ROUND $round"
  # Another part's data next time, with a byte of its own.
  $bb mv /tmp/new0 /tmp/spare; $bb mv /tmp/new1 /tmp/new0; $bb mv /tmp/new2 /tmp/new1; $bb mv /tmp/new3 /tmp/new2; $bb mv /tmp/spare /tmp/new3
  echo $round | $bb dd of=/tmp/new3 conv=notrunc 2>/dev/null
  round=$((round+1))
done
kept=$($bb dd if=/dev/vda bs=1M skip=128 count=$round 2>/dev/null | $bb sha256sum)
there=$($bb dd if=/dev/vda bs=1M skip=128 count=$round iflag=direct 2>/dev/null | $bb sha256sum)
[ "$kept" = "$there" ] || echo GUEST-READ-SOMETHING-ELSE into its page cache
i=0
while [ $i -lt 4 ]; do echo "GUEST-PART $i $($bb sha256sum < /tmp/old$i | $bb cut -c1-64)"; i=$((i+1)); done
end GUEST-FOUND-EVERYTHING
"#;

/// Bytes of a part of the disk that a guest with [`start_rounds`] writes, and how far apart they begin.
pub const PART_BYTES: u64 = 2 << 20;
/// See [`PART_BYTES`].
pub const PART_STEP: u64 = 32 << 20;

/// Boots the machine with the export at `uri` as its disk, and returns what the console said.
///
/// # Panics
/// When a needed program or kernel is absent, or the machine does not switch itself off in time.
#[must_use]
#[track_caller]
pub fn boot(scratch: &Scratch, uri: &str) -> String {
    let drive = format!("file={uri},format=raw,if=virtio,cache=none,discard=unmap");
    machine(scratch, INIT).args(["-m", "384", "-drive", &drive]).limit(RUN_MAX).run()
}

/// Boots the machine with the disk at a vhost-user socket.
///
/// # Panics
/// As for [`boot`].
#[must_use]
#[track_caller]
pub fn boot_vhost_user(scratch: &Scratch, socket: &str) -> String {
    machine(scratch, INIT).args(vhost_user(socket)).limit(RUN_MAX).run()
}

/// Starts the machine with the disk at a vhost-user socket and a load that lasts for so many rounds. `more` is for QEMU.
///
/// # Panics
/// When a needed program or kernel is absent.
#[must_use]
#[track_caller]
pub fn start_rounds(scratch: &Scratch, socket: &str, rounds: u32, more: &[&str]) -> Process {
    let script = ROUNDS.replace("-lt ROUNDS", &format!("-lt {rounds}"));
    machine(scratch, &script).args(vhost_user(socket)).args(more).limit(RUN_MAX).start()
}

/// Memory that is shared, two queues, and a connection that comes back.
fn vhost_user(socket: &str) -> Vec<String> {
    let chardev = format!("socket,id=disk,path={socket},reconnect=1");
    let args = ["-m", "384", "-smp", "2", "-machine", "pc,memory-backend=memory"];
    let more = ["-object", "memory-backend-memfd,id=memory,size=384M,share=on", "-chardev", &chardev];
    let device = ["-device", "vhost-user-blk-pci,chardev=disk,num-queues=2"];
    args.iter().chain(&more).chain(&device).map(|arg| (*arg).to_owned()).collect()
}

#[track_caller]
fn machine(scratch: &Scratch, script: &str) -> Tool {
    let kernel = newest_kernel();
    let initramfs = initramfs(scratch, &kernel.version, script);
    Tool::new("qemu-system-x86_64")
        .args(["-accel", "tcg", "-cpu", "max", "-nodefaults", "-no-reboot"])
        .args(["-display", "none", "-serial", "stdio", "-monitor", "none"])
        .args(["-kernel", &text(&kernel.image), "-initrd", &text(&initramfs)])
        .args(["-append", "console=ttyS0 panic=-1 quiet mitigations=off"])
}

struct Kernel {
    image: PathBuf,
    version: String,
}

#[track_caller]
fn newest_kernel() -> Kernel {
    let mut names: Vec<String> = fs::read_dir("/boot")
        .expect("/boot is readable")
        .filter_map(|entry| entry.ok()?.file_name().into_string().ok())
        .filter(|name| name.starts_with("vmlinuz-") && name.contains("cloud"))
        .collect();
    names.sort();
    let name = names.pop().expect("no cloud kernel in /boot: install linux-image-cloud-amd64");
    let version = name.trim_start_matches("vmlinuz-").to_owned();
    Kernel { image: Path::new("/boot").join(name), version }
}

#[track_caller]
fn initramfs(scratch: &Scratch, version: &str, script: &str) -> PathBuf {
    let root = scratch.path("initramfs");
    for dir in ["bin", "sbin", "modules"] {
        fs::create_dir_all(root.join(dir)).expect("a directory in the scratch directory");
    }
    copy(&find("busybox"), &root.join("bin/busybox"));
    symlink("busybox", root.join("bin/sh")).expect("a link in the scratch directory");
    for program in PROGRAMS {
        let path = find(program);
        copy(&path, &root.join("sbin").join(program));
        for library in libraries(&path) {
            copy(&library, &root.join(library.strip_prefix("/").expect("ldd prints absolute paths")));
        }
    }
    let order = modules(version);
    let names: Vec<_> = order.iter().map(|m| m.file_name().and_then(|n| n.to_str()).unwrap()).collect();
    fs::write(root.join("modules/order"), names.join("\n")).expect("write the order of the modules");
    for module in &order {
        copy(module, &root.join("modules").join(module.file_name().unwrap()));
    }
    let init = root.join("init");
    fs::write(&init, script).expect("write the guest's script");
    fs::set_permissions(&init, fs::Permissions::from_mode(0o755)).expect("make it executable");
    let image = scratch.path("initramfs.cpio");
    let pack = r#"cd "$1" && find . | cpio --quiet -o -H newc > "$2""#;
    let _ = find("cpio");
    Tool::new("sh").args(["-c", pack, "pack", &text(&root), &text(&image)]).run();
    image
}

/// The module files to insert, each after those it needs; drivers built into the kernel need none.
#[track_caller]
fn modules(version: &str) -> Vec<PathBuf> {
    let mut files = Vec::new();
    for module in MODULES {
        let plan = Tool::new("modprobe").args(["-S", version, "--show-depends", module]).run();
        for file in plan.lines().filter_map(|line| line.strip_prefix("insmod ")) {
            let file = PathBuf::from(file.split_whitespace().next().unwrap_or(file));
            if !files.contains(&file) {
                files.push(file);
            }
        }
    }
    files
}

#[track_caller]
fn libraries(program: &Path) -> Vec<PathBuf> {
    let list = Tool::new("ldd").arg(text(program)).run();
    list.split_whitespace().filter(|word| word.starts_with('/')).map(PathBuf::from).collect()
}

#[track_caller]
fn copy(from: &Path, to: &Path) {
    fs::create_dir_all(to.parent().expect("a file lies in a directory")).expect("a scratch directory");
    fs::copy(from, to).unwrap_or_else(|e| panic!("copy {} to {}: {e}", from.display(), to.display()));
}
