//! Guest machines that use a disk as guests do: Debian's cloud kernel, QEMU without hardware acceleration (so that it runs
//! where KVM does not exist), and a script of busybox as the first process, from an initramfs or from the disk itself.
//!
//! The scripts lie in `guest/`. Each prints [`SENTINEL`] on the serial console when everything it tried went well, and switches
//! the machine off either way; later, for what the console has not sent by then is lost with the machine.

mod tree;

use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::process::Process;
use crate::scratch::{Scratch, text};
use crate::tool::{Tool, find};
use tree::{Kernel, Tree};

/// What the serial console says when the guest found every byte where it had put it.
pub const SENTINEL: &str = "GUEST-FOUND-EVERYTHING";

/// What the serial console says when something went wrong, whatever else it says.
pub const COMPLAINTS: [&str; 5] =
    ["GUEST-WRITE-FAILED", "GUEST-READ-", "GUEST-HAS-ERRORS", "GUEST-FAILED", "I/O error"];

/// How long the machine may take from power-on to power-off, on two slow cores.
const RUN_MAX: Duration = Duration::from_secs(240);

/// Makes an ext4 filesystem, fills it, and looks at it again through two fresh mounts and a check.
const FILES: &str = include_str!("guest/files.sh");

/// Writes, with each round, something else to four parts of the disk at the same time, past the page cache, and reads it
/// again in the next one. Says so on the console, for others to count.
const ROUNDS: &str = include_str!("guest/rounds.sh");

/// Waits until the disk is larger, and writes to the new part.
const GROW: &str = include_str!("guest/grow.sh");

/// Runs [`crate::load`] on the disk.
const LOAD: &str = include_str!("guest/load.sh");

/// Goes on from the disk.
const BOOT_ROOT: &str = include_str!("guest/boot_root.sh");

/// What runs there: fio, with [`VERIFY`].
const ROOT: &str = include_str!("guest/root.sh");

/// What fio does in each round.
const VERIFY: &str = include_str!("guest/verify.fio");

/// Bytes of a part of the disk that a guest with [`start_rounds`] writes, and how far apart they begin.
pub const PART_BYTES: u64 = 2 << 20;
/// See [`PART_BYTES`].
pub const PART_STEP: u64 = 32 << 20;

/// How a guest reaches its disk.
#[derive(Debug, Clone)]
pub enum Disk {
    /// QEMU is a client of NBD; the URI of the export.
    Nbd(String),
    /// The guest's own queues; the path of the socket.
    VhostUser(String),
}

impl Disk {
    /// The same with the machine's memory in the file `memory`, which another machine may have too.
    fn args_in(&self, memory_mib: u32, memory: &Path) -> Vec<String> {
        let object =
            format!("memory-backend-file,id=memory,size={memory_mib}M,mem-path={},share=on", text(memory));
        let mib = memory_mib.to_string();
        let args =
            ["-m", &mib, "-machine", "pc,memory-backend=memory", "-object", &object].map(str::to_owned);
        args.into_iter().chain(self.device_args()).collect()
    }

    /// What QEMU is told, for a machine of so much memory.
    fn args(&self, memory_mib: u32) -> Vec<String> {
        let mib = memory_mib.to_string();
        let mut args = vec!["-m".to_owned(), mib.clone()];
        // vhost-user wants memory that is shared.
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
            // Two queues, and a connection that comes back.
            Self::VhostUser(socket) => {
                let chardev = format!("socket,id=disk,path={socket},reconnect=1");
                let device = "vhost-user-blk-pci,chardev=disk,num-queues=2";
                ["-smp", "2", "-chardev", &chardev, "-device", device].map(str::to_owned).into()
            }
        }
    }
}

/// Boots the machine with the export at `uri` as its disk, and returns what the console said.
///
/// # Panics
/// When a needed program or kernel is absent, or the machine does not switch itself off in time.
#[must_use]
#[track_caller]
pub fn boot(scratch: &Scratch, uri: &str) -> String {
    machine(scratch, FILES).args(Disk::Nbd(uri.to_owned()).args(384)).limit(RUN_MAX).run()
}

/// Boots the machine with the disk at a vhost-user socket.
///
/// # Panics
/// As for [`boot`].
#[must_use]
#[track_caller]
pub fn boot_vhost_user(scratch: &Scratch, socket: &str) -> String {
    machine(scratch, FILES).args(Disk::VhostUser(socket.to_owned()).args(384)).limit(RUN_MAX).run()
}

/// Starts the machine with the disk at a vhost-user socket and a load that lasts for so many rounds. `more` is for QEMU.
///
/// # Panics
/// When a needed program or kernel is absent.
#[must_use]
#[track_caller]
pub fn start_rounds(scratch: &Scratch, socket: &str, rounds: u32, more: &[&str]) -> Process {
    let script = ROUNDS.replace("-lt ROUNDS", &format!("-lt {rounds}"));
    let disk = Disk::VhostUser(socket.to_owned());
    machine(scratch, &script).args(disk.args(384)).args(more).limit(RUN_MAX).start()
}

/// The same with the export at `uri`.
///
/// # Panics
/// When a needed program or kernel is absent.
#[must_use]
#[track_caller]
pub fn start_rounds_nbd(scratch: &Scratch, uri: &str, rounds: u32) -> Process {
    let script = ROUNDS.replace("-lt ROUNDS", &format!("-lt {rounds}"));
    machine(scratch, &script).args(Disk::Nbd(uri.to_owned()).args(384)).limit(RUN_MAX).start()
}

/// Starts the machine with the disk at a vhost-user socket, which it expects to get larger.
///
/// # Panics
/// When a needed program or kernel is absent.
#[must_use]
#[track_caller]
pub fn start_growing(scratch: &Scratch, socket: &str) -> Process {
    let disk = Disk::VhostUser(socket.to_owned());
    machine(scratch, GROW).args(disk.args(384)).limit(RUN_MAX).start()
}

/// Makes the file `image` of `size` bytes with a system that [`start_root`] boots: ext4, busybox, fio and its libraries.
///
/// # Panics
/// When a needed program is absent.
#[track_caller]
pub fn root_image(scratch: &Scratch, image: &Path, size: u64, rounds: u32) {
    let tree = Tree::new(scratch.path("root")).program(&find("fio"), "bin/fio");
    let tree = ["proc", "sys", "dev", "tmp", "data"].into_iter().fold(tree, Tree::dir);
    tree.script("sbin/init", &ROOT.replace("-lt ROUNDS", &format!("-lt {rounds}")))
        .script("jobs/verify.fio", VERIFY)
        .format(image, size);
}

/// Starts a machine that boots from the disk at a vhost-user socket, which [`root_image`] made.
///
/// # Panics
/// When a needed program or kernel is absent.
#[must_use]
#[track_caller]
pub fn start_root(scratch: &Scratch, socket: &str) -> Process {
    let disk = Disk::VhostUser(socket.to_owned());
    machine(scratch, BOOT_ROOT).args(disk.args(512)).limit(RUN_MAX).start()
}

/// A machine with the load of [`crate::load`], whose hot set is `hot_blocks` large, and whose console is a socket, for the load ends when a
/// line comes in there. What the console says is kept in the file `console` of the scratch directory. `program` is
/// the test suite's `guest-load`. The machine's memory is the file `memory`.
///
/// # Panics
/// When a needed program or kernel is absent.
#[must_use]
#[track_caller]
pub fn loaded(scratch: &Scratch, disk: &Disk, memory: &Path, program: &Path, hot_blocks: u64) -> Tool {
    let kernel = Kernel::newest();
    let image = scratch.path("initramfs.cpio");
    Tree::new(scratch.path("initramfs"))
        .script("init", &LOAD.replace("HOT", &hot_blocks.to_string()))
        .program(program, "bin/guest-load")
        .drivers(&kernel)
        .pack(&image);
    let (socket, log) = (scratch.text("console.sock"), scratch.text("console"));
    let console = format!("socket,id=console,path={socket},server=on,wait=off,logfile={log}");
    qemu(&kernel, &image)
        .args(["-chardev", &console, "-serial", "chardev:console"])
        .args(disk.args_in(192, memory))
        .limit(RUN_MAX)
}

#[track_caller]
fn machine(scratch: &Scratch, script: &str) -> Tool {
    let kernel = Kernel::newest();
    let image = initramfs(scratch, &kernel, script);
    qemu(&kernel, &image).args(["-serial", "stdio"])
}

fn qemu(kernel: &Kernel, initramfs: &Path) -> Tool {
    Tool::new("qemu-system-x86_64")
        // One thread for all CPUs of the guest: with one each they stall for minutes where the host's are busy.
        .args(["-accel", "tcg,thread=single", "-cpu", "max", "-nodefaults", "-no-reboot"])
        .args(["-display", "none", "-monitor", "none"])
        .args(["-kernel", &text(&kernel.image), "-initrd", &text(initramfs)])
        .args(["-append", "console=ttyS0 panic=-1 quiet mitigations=off"])
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
