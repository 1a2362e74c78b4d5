//! VMs without an operating system whose disks tests attach and detach. Each write goes through the
//! guest's device.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::hob::binary;
use crate::process::{Output, Process};
use crate::qmp::Monitor;
use crate::{Daemon, MIB, Scratch, Tool};

/// Maximum time of any step on two busy cores.
pub const STEP_MAX: Duration = Duration::from_secs(240);
/// Size of the images, as an argument of qemu-img.
const SIZE: &str = "32M";
/// Size of the images in bytes.
pub const SIZE_BYTES: u64 = 32 * MIB;
/// Name of the image that [`Stage::end`] checks.
pub const IMAGE: &str = "disk.img";
/// QEMU's options of the guest's device `vda`, for the block node or drive `vda`.
pub const VDA: &str = "virtio-blk-pci,drive=vda,id=vda";
/// The guest's device in QEMU.
const DEVICE: &str = "/machine/peripheral/vda/virtio-backend";

/// A daemon of hob with a pool, for VMs with one disk each.
#[derive(Debug)]
pub struct Stage {
    /// The directory of the images and sockets.
    pub scratch: Scratch,
    /// The daemon of hob.
    pub daemon: Daemon,
}

impl Default for Stage {
    fn default() -> Self {
        Self::new()
    }
}

impl Stage {
    /// Starts a daemon.
    #[track_caller]
    pub fn new() -> Stage {
        let scratch = Scratch::new();
        let flash = scratch.path("flash");
        scratch.configure(&format!("[[pool]]\nname = \"fast\"\ndevices = [{flash:?}]\nsize = \"192M\"\n"));
        let daemon = scratch.start_daemon();
        Stage { scratch, daemon }
    }

    /// Creates an image. `options` are options of `qemu-img create`.
    #[track_caller]
    pub fn image(&self, name: &str, format: &str, options: &[&str]) {
        let file = self.scratch.text(name);
        let create = Tool::new("qemu-img").args(["create", "-q", "-f", format]);
        create.args(options).args([file.as_str(), SIZE]).run();
    }

    /// Starts a VM whose disk `vda` has a format node `image` and the file node `image-file` with more
    /// options.
    #[track_caller]
    pub fn start(&self, name: &str, format: &str, more: &str) -> Process {
        let file = self.scratch.text(name);
        let file_node = format!("driver=file,node-name=image-file,filename={file}{more}");
        let node = format!("driver={format},node-name=image,file=image-file");
        let device = "virtio-blk-pci,drive=image,id=vda";
        self.start_with(&["-blockdev", &file_node, "-blockdev", &node, "-device", device])
    }

    /// Starts a VM whose disk `vda` is given by `-drive`. `file` is a path or URI.
    #[track_caller]
    pub fn start_drive(&self, file: &str, format: &str) -> Process {
        let drive = format!("if=none,id=vda,file={file},format={format},discard=unmap");
        self.start_with(&["-drive", &drive, "-device", VDA])
    }

    /// Starts a VM with these options of QEMU.
    #[track_caller]
    pub fn start_with(&self, disk: &[&str]) -> Process {
        let qmp = format!("unix:{},server=on,wait=off", self.scratch.text("qmp.sock"));
        let vm = Tool::new("qemu-system-x86_64").args(["-nodefaults", "-display", "none", "-m", "32"]);
        let vm = vm.args(["-name", "web", "-qmp", &qmp]).args(disk).start();
        drop(self.monitor());
        vm
    }

    /// Connects to the VM.
    #[track_caller]
    pub fn monitor(&self) -> Monitor {
        Monitor::connect(&self.scratch.path("qmp.sock"))
    }

    /// Runs a command of QMP, and returns its result.
    #[track_caller]
    pub fn ask(&self, command: &str, arguments: Value) -> Value {
        self.monitor().ask(command, arguments)
    }

    /// Kills the VM, and removes its socket.
    pub fn kill(&self, mut vm: Process) {
        vm.kill();
        let _ = std::fs::remove_file(self.scratch.path("qmp.sock"));
    }

    /// Ends the VM.
    #[track_caller]
    pub fn quit(&self, mut vm: Process) {
        self.monitor().quit();
        vm.wait(STEP_MAX).expect("QEMU ends");
    }

    /// Runs `hob attach` or `hob detach`.
    #[track_caller]
    pub fn output(&self, verb: &str, more: &[&str]) -> Output {
        let target = format!("qmp:{}", self.scratch.text("qmp.sock"));
        self.output_for(&target, verb, more)
    }

    /// Like [`Stage::output`], for another name of the VM.
    #[track_caller]
    pub fn output_for(&self, target: &str, verb: &str, more: &[&str]) -> Output {
        let start = Instant::now();
        loop {
            let output = self.command(target, verb, more).output();
            if output.success() || !is_too_early(&output.stderr) || start.elapsed() > STEP_MAX {
                return output;
            }
        }
    }

    /// Kills `hob attach` or `hob detach` after this number of steps. Returns false if the command
    /// completes with fewer steps.
    #[track_caller]
    pub fn killed_after(&self, verb: &str, steps: u32) -> bool {
        self.killed_after_with(verb, &[], steps)
    }

    /// Like [`Stage::killed_after`], with more arguments of the command.
    #[track_caller]
    pub fn killed_after_with(&self, verb: &str, more: &[&str], steps: u32) -> bool {
        let target = format!("qmp:{}", self.scratch.text("qmp.sock"));
        let command = || self.command(&target, verb, more).env("HOB_ATTACH_STOP_AFTER", steps.to_string());
        let start = Instant::now();
        let mut process = command().start();
        loop {
            match process.poll() {
                Some(status) if status.success() => return false,
                Some(_) if is_too_early(&process.stderr()) => process = command().start(),
                Some(_) => panic!("hob {verb}: {}", process.stderr()),
                None => {}
            }
            let stat = std::fs::read_to_string(format!("/proc/{}/stat", process.pid())).unwrap_or_default();
            if stat.rsplit(") ").next().is_some_and(|rest| rest.starts_with('T')) {
                process.kill();
                return true;
            }
            assert!(start.elapsed() < STEP_MAX, "hob {verb} neither stops nor ends: {}", process.stderr());
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    #[track_caller]
    fn command(&self, target: &str, verb: &str, more: &[&str]) -> Tool {
        let control = format!("unix:{}", self.scratch.text("ctl.sock"));
        let records = self.scratch.text("records");
        let hob = Tool::new(binary().to_str().expect("a path")).limit(STEP_MAX);
        let hob = hob.args([verb, target, "--records", &records, "--control", &control]).args(more);
        if verb == "attach" { hob.args(["--nbd", &self.scratch.text("nbd.sock")]) } else { hob }
    }

    /// Runs `hob attach` or `hob detach`, which must succeed.
    #[track_caller]
    pub fn run(&self, verb: &str, more: &[&str]) -> Output {
        let output = self.output(verb, more);
        assert!(output.success(), "hob {verb} {more:?}: {}", output.all());
        output
    }

    /// Runs `hob attach` or `hob detach`, which must fail, and returns its messages.
    #[track_caller]
    pub fn refused(&self, verb: &str, more: &[&str]) -> String {
        let output = self.output(verb, more);
        assert!(!output.success(), "hob {verb} {more:?} succeeded: {}", output.all());
        output.stderr
    }

    /// Writes `pattern` to the first mebibyte of the disk, through the guest's device.
    #[track_caller]
    pub fn write(&self, pattern: u8) {
        let line = format!("qemu-io -d {DEVICE} \"write -P {pattern} 0 1M\"");
        let said = self.ask("human-monitor-command", json!({ "command-line": line }));
        assert!(!said.to_string().to_lowercase().contains("error"), "{said}");
    }

    /// Returns the first byte of a raw image.
    #[track_caller]
    pub fn first(&self, name: &str) -> u8 {
        let mut byte = [0];
        let image = File::open(self.scratch.path(name)).expect("the image");
        image.read_exact_at(&mut byte, 0).expect("the image has a byte");
        byte[0]
    }

    /// Returns the length of an image file in bytes.
    pub fn length(&self, name: &str) -> u64 {
        std::fs::metadata(self.scratch.path(name)).expect("the image").len()
    }

    /// Checks that hob has no disk of the VM.
    #[track_caller]
    pub fn assert_has_no_disk(&self) {
        let disks = self.daemon.ctl(&["disk", "list"]);
        assert!(!disks.contains("web-"), "{disks}");
    }

    /// Returns true if the disk `vda` has a record.
    #[must_use]
    pub fn has_record(&self) -> bool {
        self.scratch.path("records/web-vda.json").exists()
    }

    /// Checks that the VM runs with the image [`IMAGE`], and that hob has neither the disk nor a
    /// record. Then writes to the disk, ends the VM, and checks the image.
    #[track_caller]
    pub fn end(&self, vm: Process, format: &str) {
        self.assert_has_no_disk();
        let nodes = self.ask("query-named-block-nodes", json!({ "flat": true })).to_string();
        assert!(nodes.contains(IMAGE) && !nodes.contains("\"drv\":\"nbd\""), "{nodes}");
        assert_eq!(self.ask("query-status", json!({}))["status"], "running");
        self.write(2);
        self.quit(vm);
        let read = ["-f", format, "-c", "read -P 2 0 1M", &self.scratch.text(IMAGE)];
        let said = Tool::new("qemu-io").args(read).run();
        assert!(!said.contains("verification failed"), "{said}");
        assert!(!self.has_record());
    }
}

/// Returns true if a failed command has taken no step because QEMU was too slow. Before the first step,
/// hob waits five seconds for QEMU's greeting. On a busy host, QEMU may need longer.
fn is_too_early(stderr: &str) -> bool {
    stderr.contains("QEMU does not answer at")
}
