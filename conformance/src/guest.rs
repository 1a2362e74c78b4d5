//! Guests that use a disk as real guests do. A guest is Debian's cloud kernel in QEMU, and a
//! busybox script as the first process. The script comes from an initramfs or from the disk itself.
//! QEMU runs without hardware acceleration, so no test needs KVM.
//!
//! The scripts are in `guest/`. Each prints [`SENTINEL`] on the serial console if everything
//! succeeded, and powers the VM off in any case. Before the power-off, a script waits until all
//! console output was sent, because the VM loses the rest. For this wait the script calls `stty`,
//! which changes a setting only after all output was sent.

mod tree;

use std::io::Write as _;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use crate::process::Process;
use crate::scratch::{Scratch, text};
use crate::tool::{Tool, find};
use tree::{Kernel, Tree};

/// Console output of a guest that found every byte as written.
pub const SENTINEL: &str = "GUEST-FOUND-EVERYTHING";

/// Console output that shows an error, in addition to any other output.
pub const COMPLAINTS: [&str; 5] =
    ["GUEST-WRITE-FAILED", "GUEST-READ-", "GUEST-HAS-ERRORS", "GUEST-FAILED", "I/O error"];

/// Maximum time of a VM from power-on to power-off, on two slow cores.
const RUN_MAX: Duration = Duration::from_secs(480);

/// Maximum time from power-on to power-off of a VM in which hob starts many times.
const DEVICE_MAX: Duration = Duration::from_secs(900);

/// Creates an ext4 filesystem, fills it, and checks it through two new mounts and a fsck.
const FILES: &str = include_str!("guest/files.sh");

/// In each round, the guest writes new data to four parts of the disk at the same time, with direct
/// I/O. It reads the data back in the next round. The guest prints a line per round, which tests
/// count.
const ROUNDS: &str = include_str!("guest/rounds.sh");

/// Waits until the disk has grown, and writes to the new part.
const GROW: &str = include_str!("guest/grow.sh");

/// Runs hob in the guest, with a disk as a block device of the guest.
const DEVICE: &str = include_str!("guest/device.sh");

/// Runs [`crate::load`] on the disk.
const LOAD: &str = include_str!("guest/load.sh");

/// Continues the boot from the disk.
const BOOT_ROOT: &str = include_str!("guest/boot_root.sh");

/// The script that runs after the boot from the disk: fio with the job [`VERIFY`].
const ROOT: &str = include_str!("guest/root.sh");

/// fio's job in each round.
const VERIFY: &str = include_str!("guest/verify.fio");

/// Lock that a test with an emulated VM holds, so that only one such test runs at a time.
static CORES: Mutex<()> = Mutex::new(());

/// The kernel's command line. If the host stalls, the guest's kernel would report a lockup, and
/// print stacks in which the scripts find words like `timeout`. `nowatchdog` and
/// `rcu_cpu_stall_suppress` prevent these reports. Emulation is slow, so the kernel does not zero
/// memory that it overwrites, nor test its ciphers, and waits only briefly for other CPUs. The kernel trusts the
/// TSC, which all CPUs of the guest share, because reading another clock calls an emulated device.
pub const COMMAND_LINE: &str = "console=ttyS0 panic=-1 quiet no_timer_check mitigations=off nowatchdog \
                                rcupdate.rcu_cpu_stall_suppress=1 rcupdate.rcu_expedited=1 init_on_alloc=0 \
                                cryptomgr.notests tsc=reliable";

/// The files from which a VM boots.
#[derive(Debug)]
pub struct Boot {
    /// The kernel, which needs [`COMMAND_LINE`].
    pub kernel: PathBuf,
    /// The initramfs with the guest's script.
    pub initramfs: PathBuf,
}

/// Size in bytes of a part of the disk that a guest with [`start_rounds`] writes.
pub const PART_BYTES: u64 = 2 << 20;
/// Distance in bytes between the starts of two parts; see [`PART_BYTES`].
pub const PART_STEP: u64 = 32 << 20;

/// Protocol of a guest's disk.
#[derive(Debug, Clone)]
pub enum Disk {
    /// NBD, with QEMU as the client; the URI of the export.
    Nbd(String),
    /// vhost-user-blk, with the guest's own queues; the path of the socket.
    VhostUser(String),
    /// The disk that these arguments of QEMU define.
    Args(Vec<String>),
}

impl Disk {
    /// Like `args`, but the VM's memory is the file `memory`, which another VM may share.
    fn args_in(&self, memory_mib: u32, memory: &Path) -> Vec<String> {
        let object =
            format!("memory-backend-file,id=memory,size={memory_mib}M,mem-path={},share=on", text(memory));
        let mib = memory_mib.to_string();
        let args =
            ["-m", &mib, "-machine", "pc,memory-backend=memory", "-object", &object].map(str::to_owned);
        args.into_iter().chain(self.device_args()).collect()
    }

    /// Returns QEMU's arguments for a VM with this much memory.
    fn args(&self, memory_mib: u32) -> Vec<String> {
        let mib = memory_mib.to_string();
        let mut args = vec!["-m".to_owned(), mib.clone()];
        // vhost-user needs shared memory.
        if matches!(self, Self::VhostUser(_)) {
            let object = format!("memory-backend-memfd,id=memory,size={mib}M,share=on");
            args.extend(["-machine", "pc,memory-backend=memory", "-object", &object].map(str::to_owned));
        }
        args.into_iter().chain(self.device_args()).collect()
    }

    fn device_args(&self) -> Vec<String> {
        match self {
            Self::Nbd(uri) => {
                let drive = format!(
                    "file={uri},file.reconnect-delay=300,format=raw,if=virtio,cache=none,discard=unmap"
                );
                vec!["-drive".into(), drive]
            }
            Self::Args(args) => args.clone(),
            // Two queues, and a connection that reconnects.
            Self::VhostUser(socket) => {
                let chardev = format!("socket,id=disk,path={socket},reconnect=1");
                let device = "vhost-user-blk-pci,chardev=disk,num-queues=2";
                ["-smp", "2", "-chardev", &chardev, "-device", device].map(str::to_owned).into()
            }
        }
    }
}

/// Waits until no other test of this test program holds the lock that this function returns. An
/// emulated VM needs a core, and some tests measure its pauses, so only one VM runs at a time.
pub fn cores() -> MutexGuard<'static, ()> {
    CORES.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Boots a VM with the export at `uri` as its disk, and returns the console's output.
///
/// # Panics
/// Panics if a required program or kernel is missing, or the VM does not power off in time.
#[must_use]
#[track_caller]
pub fn boot(scratch: &Scratch, uri: &str) -> String {
    machine(scratch, FILES).args(Disk::Nbd(uri.to_owned()).args(384)).limit(RUN_MAX).run()
}

/// Boots a VM with the disk at a vhost-user socket.
///
/// # Panics
/// Panics in the same cases as [`boot`].
#[must_use]
#[track_caller]
pub fn boot_vhost_user(scratch: &Scratch, socket: &str) -> String {
    machine(scratch, FILES).args(Disk::VhostUser(socket.to_owned()).args(384)).limit(RUN_MAX).run()
}

/// Starts a VM with the disk at a vhost-user socket and a load of `rounds` rounds. `more` are arguments for
/// QEMU.
///
/// # Panics
/// Panics if a required program or kernel is missing.
#[must_use]
#[track_caller]
pub fn start_rounds(scratch: &Scratch, socket: &str, rounds: u32, more: &[&str]) -> Process {
    let script = ROUNDS.replace("-lt ROUNDS", &format!("-lt {rounds}"));
    let disk = Disk::VhostUser(socket.to_owned());
    machine(scratch, &script).args(disk.args(384)).args(more).limit(RUN_MAX).start()
}

/// Like [`start_rounds`], but the disk is the export at `uri`.
///
/// # Panics
/// Panics if a required program or kernel is missing.
#[must_use]
#[track_caller]
pub fn start_rounds_nbd(scratch: &Scratch, uri: &str, rounds: u32) -> Process {
    let script = ROUNDS.replace("-lt ROUNDS", &format!("-lt {rounds}"));
    machine(scratch, &script).args(Disk::Nbd(uri.to_owned()).args(384)).limit(RUN_MAX).start()
}

/// Starts a VM with the disk at a vhost-user socket, which waits for the disk to grow.
///
/// # Panics
/// Panics if a required program or kernel is missing.
#[must_use]
#[track_caller]
pub fn start_growing(scratch: &Scratch, socket: &str) -> Process {
    let disk = Disk::VhostUser(socket.to_owned());
    machine(scratch, GROW).args(disk.args(384)).limit(RUN_MAX).start()
}

/// Creates the file `image` of `size` bytes with a system that [`start_root`] boots: ext4, busybox, fio and
/// its libraries.
///
/// # Panics
/// Panics if a required program is missing.
#[track_caller]
pub fn root_image(scratch: &Scratch, image: &Path, size: u64, rounds: u32) {
    let tree = Tree::new(scratch.path("root")).program(&find("fio"), "bin/fio");
    let tree = ["proc", "sys", "dev", "tmp", "data"].into_iter().fold(tree, Tree::dir);
    tree.script("sbin/init", &ROOT.replace("-lt ROUNDS", &format!("-lt {rounds}")))
        .script("jobs/verify.fio", VERIFY)
        .format(image, size);
}

/// Starts a VM that boots from the disk at a vhost-user socket, which [`root_image`] created.
///
/// # Panics
/// Panics if a required program or kernel is missing.
#[must_use]
#[track_caller]
pub fn start_root(scratch: &Scratch, socket: &str) -> Process {
    let disk = Disk::VhostUser(socket.to_owned());
    machine(scratch, BOOT_ROOT).args(disk.args(512)).limit(RUN_MAX).start()
}

/// Returns a VM with the load of [`crate::load`], with a hot set of `hot_blocks`. Its console is a socket,
/// because a line sent there ends the load. Console output is kept in the file `console` of the scratch
/// directory. `program` is the test suite's `guest-load`. The VM's memory is the file `memory`.
///
/// # Panics
/// Panics if a required program or kernel is missing.
#[must_use]
#[track_caller]
pub fn loaded(scratch: &Scratch, disk: &Disk, memory: &Path, program: &Path, hot_blocks: u64) -> Tool {
    let vm = loaded_vm(scratch, program, hot_blocks);
    let (socket, log) = (scratch.text("console.sock"), scratch.text("console"));
    let console = format!("socket,id=console,path={socket},server=on,wait=off,logfile={log}");
    qemu(&vm)
        .args(["-chardev", &console, "-serial", "chardev:console"])
        .args(disk.args_in(192, memory))
        .limit(RUN_MAX)
}

/// Like [`loaded`], for a program that starts QEMU itself. The console of its VM must be the socket
/// `console.sock` and the log `console` in the scratch directory.
///
/// # Panics
/// Panics if a required program or kernel is missing.
#[must_use]
#[track_caller]
pub fn loaded_vm(scratch: &Scratch, program: &Path, hot_blocks: u64) -> Boot {
    let kernel = Kernel::newest();
    let initramfs = scratch.path("initramfs.cpio");
    Tree::new(scratch.path("initramfs"))
        .script("init", &LOAD.replace("HOT", &hot_blocks.to_string()))
        .program(program, "bin/guest-load")
        .drivers(&kernel)
        .pack(&initramfs);
    Boot { kernel: kernel.image, initramfs }
}

/// Ends the load of a guest by a line on its console, and returns the console for further input.
///
/// A thread reads the console output from the socket and discards it, because the log file has the
/// same output. Without a reader, the guest's console would stop: QEMU sends each byte as one
/// message, and a socket buffers only a few hundred messages.
///
/// # Panics
/// Panics if the guest's QEMU does not listen.
#[must_use]
#[track_caller]
pub fn end_load(scratch: &Scratch) -> UnixStream {
    let mut console = UnixStream::connect(scratch.path("console.sock")).expect("the console");
    console.write_all(b"end\n").expect("the guest listens");
    let mut output = console.try_clone().expect("a descriptor");
    std::thread::spawn(move || std::io::copy(&mut output, &mut std::io::sink()));
    console
}

/// Boots a VM that runs the program `hob` and uses one of hob's disks as a block device. The VM's
/// files `backing.img` and `pool.img` are in the scratch directory. Returns the console's output.
///
/// # Panics
/// Panics if a required program or kernel is missing, or the VM does not power off in time.
#[must_use]
#[track_caller]
pub fn run_host_device(scratch: &Scratch, hob: &Path) -> String {
    let kernel = Kernel::newest();
    let image = scratch.path("initramfs.cpio");
    let tree = Tree::new(scratch.path("initramfs")).script("init", DEVICE).dir("etc").program(hob, "bin/hob");
    let tree = ["mkfs.ext4", "e2fsck", "resize2fs"]
        .iter()
        .fold(tree, |tree, name| tree.program(&find(name), &format!("sbin/{name}")));
    tree.drivers(&kernel).modules(&kernel, &["nbd", "loop"], "later").pack(&image);
    let drive = |name: &str| format!("file={},format=raw,if=virtio,cache=unsafe", scratch.text(name));
    qemu(&Boot { kernel: kernel.image, initramfs: image })
        .args(["-serial", "stdio", "-m", "1024", "-smp", "2"])
        .args(["-drive", &drive("backing.img"), "-drive", &drive("pool.img")])
        .limit(DEVICE_MAX)
        .run()
}

#[track_caller]
fn machine(scratch: &Scratch, script: &str) -> Tool {
    let kernel = Kernel::newest();
    let image = initramfs(scratch, &kernel, script);
    qemu(&Boot { kernel: kernel.image, initramfs: image }).args(["-serial", "stdio"])
}

fn qemu(boot: &Boot) -> Tool {
    Tool::new("qemu-system-x86_64")
        // QEMU uses one thread for all CPUs of the guest. With one thread for each CPU, the CPUs of
        // the guest stall for minutes if the host's CPUs are busy. QEMU emulates string instructions
        // element by element. Without `erms`, the guest copies eight bytes per element instead of one.
        // The other features that are left out cost time in an emulation: page tables of five levels,
        // changes of the access rights around each copy from or to a process, and protection keys.
        .args(["-accel", "tcg,thread=single", "-cpu", "max,-erms,-la57,-smap,-pku"])
        .args(["-nodefaults", "-no-reboot"])
        .args(["-display", "none", "-monitor", "none"])
        .args(["-kernel", &text(&boot.kernel), "-initrd", &text(&boot.initramfs)])
        .args(["-append", COMMAND_LINE])
}

#[track_caller]
fn initramfs(scratch: &Scratch, kernel: &Kernel, script: &str) -> PathBuf {
    let image = scratch.path("initramfs.cpio");
    let tree = Tree::new(scratch.path("initramfs")).script("init", script).drivers(kernel);
    let programs = ["mkfs.ext4", "e2fsck"];
    let tree = programs.iter().fold(tree, |tree, name| tree.program(&find(name), &format!("sbin/{name}")));
    tree.pack(&image);
    image
}
