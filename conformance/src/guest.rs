//! A guest machine that uses a disk as guests do: Debian's cloud kernel, an initramfs of busybox and
//! e2fsprogs, QEMU without hardware acceleration (so that it runs where KVM does not exist).
//!
//! The script below is the guest's first and only process. It prints [`SENTINEL`] on the serial
//! console when everything it tried went well, and switches the machine off either way.

use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::time::Duration;

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

/// Boots the machine with the export at `uri` as its disk, and returns what the console said.
///
/// # Panics
/// When a needed program or kernel is absent, or the machine does not switch itself off in time.
#[must_use]
#[track_caller]
pub fn boot(scratch: &Scratch, uri: &str) -> String {
    let kernel = newest_kernel();
    let initramfs = initramfs(scratch, &kernel.version);
    let drive = format!("file={uri},format=raw,if=virtio,cache=none,discard=unmap");
    Tool::new("qemu-system-x86_64")
        .args(["-accel", "tcg", "-cpu", "max", "-m", "384", "-nodefaults", "-no-reboot"])
        .args(["-display", "none", "-serial", "stdio", "-monitor", "none"])
        .args(["-kernel", &text(&kernel.image), "-initrd", &text(&initramfs)])
        .args(["-append", "console=ttyS0 panic=-1 quiet mitigations=off"])
        .args(["-drive", &drive])
        .limit(RUN_MAX)
        .run()
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
fn initramfs(scratch: &Scratch, version: &str) -> PathBuf {
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
    fs::write(&init, INIT).expect("write the guest's script");
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
