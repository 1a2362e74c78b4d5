//! `hob attach` and `hob detach` for a running VM whose guest writes and checks its disk all the
//! time. The guest sees no error, no write is lost, and the image is complete after every kill -9.
//!
//! With `HOB_QUIET=1`, no other program uses the processors, so the VM's pause is limited more
//! strictly.

#[path = "attach/given.rs"]
mod given;

use std::fs::File;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::Shutdown;
use std::os::unix::net::{UnixListener, UnixStream};
use std::process::ExitStatus;
use std::time::{Duration, Instant};

use conformance::data::empty_file;
use conformance::guest::{COMPLAINTS, Disk, SENTINEL, cores, end_load, loaded};
use conformance::hob::binary;
use conformance::load::{check_image, image};
use conformance::process::{Output, Process};
use conformance::qmp::Monitor;
use conformance::scratch::wait_until;
use conformance::{Daemon, MIB, Scratch, Tool};
use given::{Given, SECOND, SECOND_BYTES, second_disk};
use rustix::process::Signal;
use serde_json::json;
use tempfile::NamedTempFile;

/// Number of blocks of the disk.
const BLOCKS: u64 = 32 << 20 >> 12;
/// Number of blocks of the disk's hot set.
const HOT_BLOCKS: u64 = 8 << 20 >> 12;
/// Maximum time of any step on two busy cores.
const STEP_MAX: Duration = Duration::from_secs(240);
/// Maximum pause of the VM in milliseconds, if nothing else uses the processors.
const PAUSE_MS_MAX: u64 = 100;
/// Maximum of the shortest pause if other programs use the processors, milliseconds. The host may
/// stall in some of the pauses.
const BUSY_PAUSE_MS_MAX: u64 = 2000;

/// The configuration of the VM in Proxmox VE, with a snapshot.
const PROXMOX_VM: &str = "name: web\nvirtio0: local:vm-100-disk-0,iothread=1,size=32M\n\n\
    [before]\nvirtio0: local:vm-100-disk-0,iothread=1,size=32M\n";
/// The storages of Proxmox VE.
const PROXMOX_STORAGES: &str =
    "lvmthin: local\n\tvgname pve\n\nhob: cached\n\thob-base local\n\thob-pool fast\n";

/// The program that continues first after the daemon was killed during a command.
#[derive(Clone, Copy)]
enum First {
    /// The command, which calls the daemon while the daemon does not run.
    Command,
    Daemon,
}

struct Stage {
    scratch: Scratch,
    daemon: Option<Daemon>,
    vm: Process,
    file: String,
    given: Given,
    preset: &'static str,
    _memory: NamedTempFile,
}

impl Drop for Stage {
    fn drop(&mut self) {
        if std::thread::panicking() {
            let console = self.console();
            let lines: Vec<&str> = console.lines().collect();
            let last = &lines[lines.len().saturating_sub(12)..];
            eprintln!("the end of the guest's console:\n{}", last.join("\n"));
        }
    }
}

impl Stage {
    #[track_caller]
    fn new(given: Given, preset: &'static str) -> Stage {
        let scratch = Scratch::new();
        image(&scratch.path("disk.raw"), BLOCKS);
        let (file, volume) = (scratch.text("disk.img"), scratch.text("volume.img"));
        let convert = ["convert", "-f", "raw", "-O", given.format(), &scratch.text("disk.raw"), &volume];
        Tool::new("qemu-img").args(convert).run();
        // QEMU knows the image by a link, like a logical volume.
        std::os::unix::fs::symlink(&volume, &file).unwrap();
        let flash = scratch.path("flash");
        let size = given.pool_size();
        scratch.configure(&format!("[[pool]]\nname = \"fast\"\ndevices = [{flash:?}]\nsize = \"{size}\"\n"));
        let memory =
            tempfile::Builder::new().prefix("hobt").tempfile_in("/dev/shm").expect("a file in memory");
        let files = [
            ("var/run/qemu-server/none", ""),
            ("etc/pve/qemu-server/100.conf", PROXMOX_VM),
            ("etc/pve/storage.cfg", PROXMOX_STORAGES),
        ];
        for (name, text) in files {
            std::fs::create_dir_all(scratch.path(name).parent().expect("a directory")).unwrap();
            std::fs::write(scratch.path(name), text).unwrap();
        }
        let control = format!("unix:{},server=on,wait=off", scratch.text(given.qmp()));
        let program = std::path::Path::new(env!("CARGO_BIN_EXE_guest-load"));
        let mut vm = loaded(&scratch, &Disk::Args(given.args(&file)), memory.path(), program, HOT_BLOCKS)
            .args(["-name", "web", "-qmp", &control]);
        if given == Given::TwoDisks {
            empty_file(&scratch.path(SECOND), SECOND_BYTES);
            vm = vm.args(second_disk(&scratch));
        }
        let vm = vm.limit(Duration::from_secs(900)).start();
        let mut stage = Stage { scratch, daemon: None, vm, file, given, preset, _memory: memory };
        stage.start_daemon();
        wait_until("the guest", STEP_MAX, || stage.console().contains("GUEST-LOAD second=1 "));
        stage
    }

    #[track_caller]
    fn start_daemon(&mut self) {
        self.daemon = Some(self.scratch.start_daemon());
    }

    #[track_caller]
    fn kill_daemon(&mut self) {
        self.daemon.take().expect("it runs").kill();
    }

    /// Kills and restarts the daemon while a command has stopped after a step, and continues the
    /// command.
    #[track_caller]
    fn kill_daemon_during(&mut self, command: &mut Process, first: First) {
        self.kill_daemon();
        match first {
            First::Command => {
                command.signal(Signal::CONT);
                std::thread::sleep(Duration::from_millis(500));
                self.start_daemon();
            }
            First::Daemon => {
                self.start_daemon();
                command.signal(Signal::CONT);
            }
        }
    }

    fn console(&self) -> String {
        std::fs::read_to_string(self.scratch.path("console")).unwrap_or_default()
    }

    /// Returns a command with the usual options of the cache, except those in `more`.
    fn command(&self, verb: &str, more: &[&str]) -> Tool {
        let usual = [["--size", "16M"], ["--preset", self.preset]];
        let left_out = usual.into_iter().filter(|pair| verb == "attach" && !more.contains(&pair[0]));
        self.command_with_defaults(verb, more).args(left_out.flatten())
    }

    /// Returns a command without options of the cache.
    fn command_with_defaults(&self, verb: &str, more: &[&str]) -> Tool {
        let records = self.scratch.text("records");
        let target = match self.given {
            Given::Proxmox => "pve:100".to_owned(),
            _ => format!("qmp:{}", self.scratch.text("qmp.sock")),
        };
        let mut args = vec![verb.to_owned(), target];
        args.extend(["--records".to_owned(), records]);
        args.extend(["--control".to_owned(), format!("unix:{}", self.scratch.text("ctl.sock"))]);
        if verb == "attach" && !more.contains(&"--nbd") {
            args.extend(["--nbd".to_owned(), self.scratch.text("nbd.sock")]);
        }
        let stubs = concat!(env!("CARGO_MANIFEST_DIR"), "/../packaging/proxmox/test");
        let tool = Tool::new(binary().to_str().expect("a path")).args(args).args(more).limit(STEP_MAX);
        tool.env("HOB_PVE_ROOT", self.scratch.path("")).env("PERL5LIB", stubs)
    }

    /// Runs `hob attach` or `hob detach`, and returns how long the VM was paused, in milliseconds.
    #[track_caller]
    fn run(&self, verb: &str, more: &[&str]) -> u64 {
        pause_ms(&self.succeed(|| self.command(verb, more)).stderr)
    }

    /// Runs a command, which must succeed.
    #[track_caller]
    fn succeed(&self, command: impl Fn() -> Tool) -> Output {
        let output = self.output(command);
        assert!(output.success(), "{}\n{}", output.all(), self.vm.stderr());
        output
    }

    /// Runs a command with any result, and repeats it if QEMU was too slow for it.
    #[track_caller]
    fn output(&self, command: impl Fn() -> Tool) -> Output {
        let start = Instant::now();
        loop {
            let output = command().output();
            if output.success() || !is_too_early(&output.stderr) {
                return output;
            }
            assert!(start.elapsed() < STEP_MAX, "{}\n{}", output.all(), self.vm.stderr());
        }
    }

    /// Runs `hob attach --list`, which must list the VM with this state. The command waits only a short
    /// time for a VM that is slow to answer, and lists it without its state.
    #[track_caller]
    fn list_with(&self, state: &str) -> Output {
        let (records, control) =
            (self.scratch.text("records"), format!("unix:{}", self.scratch.text("ctl.sock")));
        let args = ["attach", "--list", "--records", &records, "--control", &control];
        let start = Instant::now();
        loop {
            let output = Tool::new(binary().to_str().expect("a path")).args(args).limit(STEP_MAX).output();
            assert!(output.success(), "hob attach --list: {}", output.all());
            if output.stdout.contains(state) {
                return output;
            }
            assert!(start.elapsed() < STEP_MAX, "no '{state}': {}", output.all());
        }
    }

    /// Starts a command that stops itself after `steps` steps, and waits until it has stopped.
    /// Returns `None` if the command ended before.
    #[track_caller]
    fn stopped_after(&self, verb: &str, steps: u32) -> Option<Process> {
        self.stopped(verb, &steps.to_string())
    }

    /// Like [`Stage::stopped_after`], where `each` stands for each number of steps.
    #[track_caller]
    fn stopped(&self, verb: &str, steps: &str) -> Option<Process> {
        let start = Instant::now();
        loop {
            let mut process = self.command(verb, &[]).env("HOB_ATTACH_STOP_AFTER", steps).start();
            let Some(status) = end_before_stop(verb, &mut process) else { return Some(process) };
            if status.success() {
                return None;
            }
            let may_repeat = is_too_early(&process.stderr()) && start.elapsed() < STEP_MAX;
            assert!(may_repeat, "hob {verb}: {}\n{}", process.stderr(), self.vm.stderr());
        }
    }

    /// Waits until the guest has completed another request.
    #[track_caller]
    fn guest_continues(&self) {
        let before = self.busy_seconds();
        wait_until("the guest to continue", STEP_MAX, || self.busy_seconds() > before + 1);
        self.guest_has_no_errors();
    }

    /// Returns the number of seconds in which requests of the guest completed.
    fn busy_seconds(&self) -> usize {
        let console = self.console();
        let seconds = console.lines().filter(|line| line.contains("GUEST-LOAD second="));
        seconds.filter(|line| !line.contains(" reads=0 writes=0 ")).count()
    }

    #[track_caller]
    fn guest_has_no_errors(&self) {
        let said = self.console();
        for bad in COMPLAINTS {
            assert!(!said.contains(bad), "{bad}:\n{said}");
        }
    }

    #[track_caller]
    fn daemon(&self) -> &Daemon {
        self.daemon.as_ref().expect("it runs")
    }

    /// Checks that the disk is attached by the name of the image that QEMU has, with a cache that the
    /// guest uses.
    #[track_caller]
    fn assert_attached(&self) {
        let disk = self.given.disk();
        let record = self.scratch.read(&format!("records/{disk}.json"));
        let record: serde_json::Value = serde_json::from_slice(&record).expect("JSON");
        assert_eq!(record["file"], self.file.as_str(), "{record}");
        let before = self.daemon().stats(disk);
        wait_until("requests of the guest", STEP_MAX, || {
            let now = self.daemon().stats(disk);
            now.class("hit") + now.misses() > before.class("hit") + before.misses()
        });
    }

    /// Writes `pattern` to the mebibyte with the number `place` of the second disk, through the guest's
    /// device.
    #[track_caller]
    fn write_second(&self, pattern: u8, place: u64) {
        let line =
            format!("qemu-io -d /machine/peripheral/vdb/virtio-backend \"write -P {pattern} {place}M 1M\"");
        let mut monitor = Monitor::connect(&self.scratch.path(self.given.qmp()));
        let said = monitor.ask("human-monitor-command", json!({ "command-line": line }));
        assert!(!said.to_string().to_lowercase().contains("error"), "{said}");
    }

    /// Checks which disks hob has.
    #[track_caller]
    fn assert_disks(&self, has_first: bool, has_second: bool) {
        let disks = self.daemon().ctl(&["disk", "list"]);
        let has = ["web-vda", "web-vdb"].map(|disk| disks.contains(disk));
        assert_eq!(has, [has_first, has_second], "{disks}");
    }

    /// Ends the load. The guest and this test check the whole disk. The disk is detached.
    #[track_caller]
    fn end(mut self) {
        let _console = end_load(&self.scratch);
        let last = [SENTINEL, "GUEST-FAILED"];
        wait_until("the guest's verdict", STEP_MAX, || last.iter().any(|last| self.console().contains(last)));
        let said = self.console();
        assert!(said.contains(SENTINEL), "the guest has errors:\n{said}");
        self.guest_has_no_errors();
        Monitor::connect(&self.scratch.path(self.given.qmp())).quit();
        self.vm.wait(STEP_MAX).expect("QEMU ends");
        let disks = self.daemon().ctl(&["disk", "list"]);
        assert!(!disks.contains(self.given.disk()), "hob still has the disk:\n{disks}");
        self.daemon.take().expect("it runs").stop();
        let (file, raw) = (self.file.clone(), self.scratch.text("disk.raw"));
        if self.given.format() == "qcow2" {
            Tool::new("qemu-img").args(["check", "-f", "qcow2", &file]).run();
        }
        Tool::new("qemu-img").args(["convert", "-f", self.given.format(), "-O", "raw", &file, &raw]).run();
        check_image(&self.scratch.path("disk.raw"), &said);
    }
}

/// Returns true if a failed command has taken no step because QEMU was too slow. Before the first step,
/// hob waits five seconds for QEMU's greeting. On a busy host, an emulated VM may need longer.
fn is_too_early(stderr: &str) -> bool {
    stderr.contains("QEMU does not answer at")
}

/// Waits until a command has stopped itself or ended. Returns false if it has ended, which must be a
/// success.
#[track_caller]
fn has_stopped(verb: &str, process: &mut Process) -> bool {
    let end = end_before_stop(verb, process);
    assert!(end.is_none_or(|status| status.success()), "hob {verb}: {}", process.stderr());
    end.is_none()
}

/// Waits until a command has stopped itself or ended. Returns the status of a command that has ended.
#[track_caller]
fn end_before_stop(verb: &str, process: &mut Process) -> Option<ExitStatus> {
    let start = Instant::now();
    loop {
        if let Some(status) = process.poll() {
            return Some(status);
        }
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", process.pid())).unwrap_or_default();
        if stat.rsplit(") ").next().is_some_and(|rest| rest.starts_with('T')) {
            return None;
        }
        assert!(start.elapsed() < STEP_MAX, "hob {verb} neither stops nor ends: {}", process.stderr());
        std::thread::sleep(Duration::from_millis(5));
    }
}

fn pause_ms(said: &str) -> u64 {
    let rest = said.rsplit_once("was paused for ").unwrap_or_else(|| panic!("no pause in: {said}")).1;
    rest.split(' ').next().and_then(|text| text.parse().ok()).unwrap_or_else(|| panic!("no pause in: {said}"))
}

/// Number of rounds of attaching and detaching: 3, or `HOB_ROUNDS`.
fn rounds() -> u32 {
    std::env::var("HOB_ROUNDS").map_or(3, |rounds| rounds.parse().expect("HOB_ROUNDS is a number"))
}

/// Attaches and detaches with each preset the given number of times, and prints the pauses.
#[track_caller]
fn again_and_again(given: Given, presets: &[(&'static str, u32)], more: &[&str]) {
    let _cores = cores();
    let mut stage = Stage::new(given, presets[0].0);
    let mut measured = Vec::new();
    for &(preset, rounds) in presets {
        stage.preset = preset;
        let mut pauses = [Vec::new(), Vec::new()];
        for _ in 0..rounds {
            pauses[0].push(stage.run("attach", more));
            stage.assert_attached();
            pauses[1].push(stage.run("detach", &[]));
            stage.guest_has_no_errors();
        }
        measured.push((preset, pauses));
    }
    stage.guest_continues();
    stage.end();
    for (preset, pauses) in measured {
        eprintln!("{given:?} {preset} {more:?}: pauses in ms: {pauses:?}");
        for pauses in pauses {
            let (longest, shortest) = (pauses.iter().max(), pauses.iter().min());
            let is_quiet = std::env::var_os("HOB_QUIET").is_some();
            let (pause, limit) =
                if is_quiet { (longest, PAUSE_MS_MAX) } else { (shortest, BUSY_PAUSE_MS_MAX) };
            assert!(*pause.expect("there were rounds") <= limit, "the VM was paused for {pauses:?} ms");
        }
    }
}

/// The cache first writes back, and then through.
#[test]
fn a_vm_with_named_nodes_is_attached_and_detached_again_and_again() {
    again_and_again(Given::Nodes, &[("auto", rounds()), ("vfrc", 2)], &[]);
}

#[test]
fn a_vm_with_a_drive_is_attached_and_detached_again_and_again() {
    again_and_again(Given::Drive, &[("auto", rounds())], &["--method", "mirror"]);
}

#[test]
fn qcow2_images_are_attached_and_detached() {
    again_and_again(Given::NodesQcow2, &[("auto", 2)], &[]);
    again_and_again(Given::DriveQcow2, &[("vfrc", 2)], &[]);
}

/// `hob attach TARGET` attaches all disks, each with a write-through cache of a tenth of the disk, or
/// of 64 MiB if that is more. Then one disk is detached, and the other one stays attached.
#[test]
fn all_disks_are_attached_with_default_caches_and_detached_one_by_one() {
    let _cores = cores();
    let stage = Stage::new(Given::TwoDisks, "auto");
    let output = stage.succeed(|| stage.command_with_defaults("attach", &[]));
    for (disk, size) in [("vda", "64 MiB"), ("vdb", "102 MiB")] {
        let line = format!("{disk}: the cache has {size} in pool fast, in the mode write-through");
        assert!(output.stderr.contains(&line), "no '{line}': {}", output.all());
        let shown = stage.daemon().disk(&format!("web-{disk}"));
        assert_eq!(shown["cache"]["mode"], "write-through", "{shown}");
    }
    stage.assert_disks(true, true);
    stage.assert_attached();
    stage.write_second(1, 0);

    stage.run("detach", &["vdb"]);
    stage.assert_disks(true, false);
    stage.assert_attached();
    stage.write_second(2, 1);

    stage.run("attach", &["vdb"]);
    stage.assert_disks(true, true);
    stage.write_second(3, 2);
    stage.run("detach", &["vda"]);
    stage.assert_disks(false, true);
    stage.guest_continues();
    stage.write_second(4, 3);

    stage.run("detach", &[]);
    stage.assert_disks(false, false);
    let mut bytes = vec![0; 4 * MIB as usize];
    File::open(stage.scratch.path(SECOND)).and_then(|mut file| file.read_exact(&mut bytes)).unwrap();
    for (part, pattern) in bytes.chunks(MIB as usize).zip(1..) {
        assert!(part.iter().all(|byte| *byte == pattern), "MiB {pattern} of the second disk is wrong");
    }
    stage.guest_continues();
    stage.end();
}

/// Kills and restarts hob's daemon after every step of both plans. The command continues. The cache
/// is write-back, and its crash log keeps all acknowledged writes.
#[track_caller]
fn daemon_killed_at_every_step(given: Given) {
    let _cores = cores();
    let mut stage = Stage::new(given, "auto");
    for verb in ["attach", "detach"] {
        for step in 1.. {
            let Some(mut process) = stage.stopped_after(verb, step) else { break };
            let first = if step % 2 == 0 { First::Command } else { First::Daemon };
            stage.kill_daemon_during(&mut process, first);
            let output = process.finish(STEP_MAX);
            assert!(output.success(), "hob {verb}, step {step}: {}", output.all());
            stage.guest_continues();
            if verb == "attach" {
                stage.assert_attached();
                stage.run("detach", &[]);
            } else {
                stage.run("attach", &[]);
            }
        }
        // The last command ran to its end, and the next command undoes it.
    }
    stage.end();
}

#[test]
fn a_daemon_that_is_killed_at_any_step_loses_nothing() {
    daemon_killed_at_every_step(Given::Nodes);
}

#[test]
fn a_daemon_that_is_killed_at_any_step_of_a_mirror_loses_nothing() {
    daemon_killed_at_every_step(Given::Drive);
}

/// Kills the daemon after all steps of the same command, for the method `device`.
#[test]
fn a_daemon_that_is_killed_after_each_step_of_one_command_loses_nothing() {
    let _cores = cores();
    let mut stage = Stage::new(Given::DriveQcow2, "auto");
    for verb in ["attach", "detach"] {
        let steps = steps_until(&stage, verb, "continue the VM");
        let mut process = stage.stopped(verb, "each").expect("the command stops");
        let mut step = 0;
        while has_stopped(verb, &mut process) {
            step += 1;
            // A command tolerates five restarts of the daemon that it notices.
            let first = if step % 3 == 1 { First::Command } else { First::Daemon };
            stage.kill_daemon_during(&mut process, first);
        }
        assert!(step > steps, "hob {verb} stopped {step} times: {}", process.stderr());
        stage.guest_continues();
        if verb == "attach" {
            stage.assert_attached();
        }
    }
    stage.end();
}

/// Kills the command itself after every step. Running the command again completes it, and running
/// the opposite command undoes it.
#[test]
fn a_command_that_is_killed_at_any_step_is_continued_or_undone() {
    let _cores = cores();
    let stage = Stage::new(Given::Nodes, "auto");
    let pause = steps_until(&stage, "attach", "pause the VM");
    for (verb, other) in [("attach", "detach"), ("detach", "attach")] {
        for step in 1.. {
            let Some(mut process) = stage.stopped_after(verb, step) else { break };
            process.kill();
            if (verb, step) == ("attach", pause) {
                let _ = stage.list_with("paused by hob");
            }
            let is_recorded = std::fs::read_dir(stage.scratch.path("records")).is_ok_and(|files| {
                files.flatten().any(|file| file.path().extension().is_some_and(|e| e == "json"))
            });
            if step % 2 == 1 {
                // When the record is deleted, the VM counts as detached.
                if verb == "attach" || is_recorded {
                    stage.run(verb, &[]);
                }
                stage.run(other, &[]);
            } else if other == "attach" || is_recorded {
                stage.run(other, &[]);
            }
            stage.guest_continues();
        }
    }
    stage.end();
}

/// Returns the number of steps of a plan up to the step `last`, by a dry run.
#[track_caller]
fn steps_until(stage: &Stage, verb: &str, last: &str) -> u32 {
    let dry = stage.output(|| stage.command(verb, &["--dry-run"]));
    let mut steps = dry.stderr.lines().filter_map(|line| line.trim_start().split_once(". "));
    let found = steps.find(|(_, step)| step.starts_with(last));
    let (number, _) = found.unwrap_or_else(|| panic!("no step '{last}': {}", dry.all()));
    number.parse().expect("a number")
}

/// While a command works on a VM, another command for this VM is refused before its first step. A
/// killed command does not keep its lock.
#[test]
fn a_second_command_for_a_vm_is_refused_until_the_first_one_ends() {
    let _cores = cores();
    let stage = Stage::new(Given::Nodes, "auto");
    let seconds: [(&str, &[&str]); 3] = [("attach", &[]), ("detach", &[]), ("attach", &["--dry-run"])];
    for verb in ["attach", "detach"] {
        // The guest runs after the first step of either plan.
        let mut first = stage.stopped_after(verb, 1).expect("the command stops");
        let holder = format!("'hob {verb} qmp:");
        for (second, more) in seconds {
            let output = stage.command(second, more).output();
            assert!(!output.success(), "hob {second} succeeded during hob {verb}");
            for part in ["another command is working on this VM: ", &holder, "repeat the command when"] {
                assert!(output.stderr.contains(part), "no '{part}': {}", output.all());
            }
            assert_eq!(output.stderr.trim().lines().count(), 1, "{}", output.all());
        }
        first.kill();
        stage.run(verb, &[]);
        stage.guest_continues();
    }
    stage.end();
}

/// A lost SSH connection (SIGHUP) or `kill` (SIGTERM) while the VM is paused: `hob attach` undoes its
/// steps, and `hob detach` completes them.
#[test]
fn a_command_that_is_asked_to_end_leaves_no_vm_paused() {
    let _cores = cores();
    let stage = Stage::new(Given::Nodes, "auto");
    let asked_to_end = |verb: &str, signal| {
        let steps = steps_until(&stage, verb, "pause the VM");
        let mut process = stage.stopped_after(verb, steps).expect("the VM is paused");
        process.signal(signal);
        process.signal(Signal::CONT);
        process.finish(STEP_MAX)
    };
    let output = asked_to_end("attach", Signal::HUP);
    assert!(!output.success() && output.stderr.contains("nothing was changed"), "{}", output.all());
    stage.guest_continues();
    assert!(!stage.daemon().ctl(&["disk", "list"]).contains("web-vda"), "hob still has the disk");
    stage.run("attach", &[]);
    let output = asked_to_end("detach", Signal::TERM);
    assert!(output.success(), "{}", output.all());
    stage.guest_continues();
    stage.end();
}

/// After an external snapshot, hob's disk is the backing file of an overlay. Both commands refuse the
/// disk before any step, until the overlay is committed.
#[track_caller]
fn refused_below_a_snapshot(given: Given, name: &str, value: &str) {
    let _cores = cores();
    let stage = Stage::new(given, "auto");
    stage.run("attach", &[]);
    let listed = stage.list_with("uses hob");
    assert!(!listed.stderr.contains("note: "), "{}", listed.all());
    {
        let mut monitor = Monitor::connect(&stage.scratch.path(given.qmp()));
        let overlay = stage.scratch.text("overlay.qcow2");
        let mut snapshot =
            json!({ "snapshot-node-name": "overlay", "snapshot-file": overlay, "format": "qcow2" });
        snapshot[name] = json!(value);
        monitor.ask("blockdev-snapshot-sync", snapshot);
    }
    for verb in ["attach", "detach"] {
        let output = stage.output(|| stage.command(verb, &[]));
        assert!(!output.success(), "hob {verb} succeeded below a snapshot");
        assert!(output.stderr.contains("below a snapshot"), "{}", output.all());
        assert!(!output.stderr.contains("pause the VM"), "hob {verb} began: {}", output.all());
        stage.guest_continues();
    }
    let listed = stage.list_with("below a snapshot");
    assert!(listed.stderr.contains("Commit the overlay"), "{}", listed.all());
    {
        let mut monitor = Monitor::connect(&stage.scratch.path(given.qmp()));
        monitor.ask("block-commit", json!({ "job-id": "commit", "device": "overlay" }));
        wait_until("the commit", STEP_MAX, || {
            monitor.ask("query-block-jobs", json!({}))[0]["ready"] == json!(true)
        });
        monitor.ask("block-job-complete", json!({ "device": "commit" }));
        wait_until("the end of the commit", STEP_MAX, || {
            monitor.ask("query-block-jobs", json!({})).as_array().is_some_and(Vec::is_empty)
        });
    }
    stage.run("detach", &[]);
    stage.guest_continues();
    stage.end();
}

#[test]
fn a_disk_below_a_snapshot_is_refused_until_the_overlay_is_committed() {
    refused_below_a_snapshot(Given::Nodes, "node-name", "image");
    refused_below_a_snapshot(Given::Drive, "device", "vda");
}

#[test]
fn a_vm_that_is_busy_or_not_suitable_is_refused_with_the_reason() {
    let _cores = cores();
    let stage = Stage::new(Given::Nodes, "auto");
    let refused = |verb: &str, more: &[&str]| {
        let output = stage.output(|| stage.command(verb, more));
        assert!(!output.success(), "hob {verb} {more:?} succeeded");
        output.stderr
    };
    let dry = stage.output(|| stage.command("attach", &["--dry-run"]));
    assert!(dry.success() && dry.stderr.contains("pause the VM"), "{}", dry.all());
    // The pool has one device.
    for part in [
        "16 MiB in pool fast",
        "write-back, with one copy",
        "can be lost: dirty data, if a flash device fails",
    ] {
        assert!(dry.stderr.contains(part), "{part}: {}", dry.stderr);
    }
    assert!(!stage.scratch.path("records/web-vda.json").exists(), "a dry run recorded something");
    let dry = stage.output(|| stage.command("attach", &["--dry-run", "--nbd", "/nowhere.sock"]));
    assert!(!dry.success() && dry.stderr.contains("/nowhere.sock"), "{}", dry.all());
    assert!(refused("attach", &["vdx"]).contains("has no disk vdx; it has: vda"));
    assert!(refused("attach", &["--method", "device"]).contains("possible: reopen"));
    assert!(refused("attach", &["--size", "1T"]).contains("choose a --size"));
    assert!(refused("detach", &[]).contains("no such disk"));
    {
        let mut monitor = Monitor::connect(&stage.scratch.path("qmp.sock"));
        let target = stage.scratch.text("copy.img");
        Tool::new("qemu-img").args(["create", "-q", "-f", "raw", &target, "32M"]).run();
        monitor.ask("blockdev-add", json!({ "driver": "file", "node-name": "copy", "filename": target }));
        let job = json!({ "job-id": "backup1", "device": "image", "target": "copy", "sync": "full", "speed": 4096 });
        monitor.ask("blockdev-backup", job);
    }
    let said = refused("attach", &[]);
    assert!(said.contains("block job is running") && said.contains("backup 'backup1'"), "{said}");
    {
        let mut monitor = Monitor::connect(&stage.scratch.path("qmp.sock"));
        monitor.ask("block-job-cancel", json!({ "device": "backup1", "force": true }));
        wait_until("the end of the backup", STEP_MAX, || {
            monitor.ask("query-block-jobs", json!({})).as_array().is_some_and(Vec::is_empty)
        });
    }
    // A guest that has taken over its QEMU can send any answers.
    std::fs::write(stage.scratch.path("lies.img"), [0; 4096]).unwrap();
    let liar = lying_proxy(&stage.scratch.path("lies.sock"), &stage.scratch.path("qmp.sock"));
    let (records, nbd) = (stage.scratch.text("records"), stage.scratch.text("nbd.sock"));
    let control = format!("unix:{}", stage.scratch.text("ctl.sock"));
    let args = ["attach", &liar, "--records", &records, "--nbd", &nbd, "--control", &control];
    let attach = || Tool::new(binary().to_str().expect("a path")).args(args).limit(STEP_MAX);
    let output = stage.output(attach);
    assert!(!output.success() && output.stderr.contains("lies.img"), "{}", output.all());
    assert!(output.stderr.contains("not have this file open for writing"), "{}", output.stderr);
    assert!(!stage.daemon().ctl(&["disk", "list"]).contains("web-vda"), "the file is served");
    // If a step fails, the earlier steps are undone: QEMU cannot reach hob, or hob refuses the
    // cache's settings.
    for more in [["--nbd", "/nowhere.sock"], ["--block-size", "3K"]] {
        let said = refused("attach", &more);
        assert!(said.contains("nothing was changed"), "{said}");
        assert!(!stage.daemon().ctl(&["disk", "list"]).contains("web-vda"), "the disk is still there");
        assert!(!stage.scratch.path("records/web-vda.json").exists(), "the record is still there");
        stage.guest_continues();
    }
    stage.guest_continues();
    stage.end();
}

/// Forwards connections from a new QMP socket to another one, and replaces the name of the image in
/// QEMU's answers. Returns the target of `hob attach`.
fn lying_proxy(at: &std::path::Path, qmp: &std::path::Path) -> String {
    let (listener, qmp) = (UnixListener::bind(at).expect("a new socket"), qmp.to_owned());
    std::thread::spawn(move || {
        for client in listener.incoming() {
            let mut client = client.expect("a connection");
            let qemu = UnixStream::connect(&qmp).expect("QEMU listens");
            let (mut to_qemu, mut to_client) = (qemu.try_clone().unwrap(), client.try_clone().unwrap());
            std::thread::spawn(move || {
                let _ = std::io::copy(&mut client, &mut to_qemu);
                let _ = to_qemu.shutdown(Shutdown::Both);
            });
            for line in BufReader::new(qemu).lines().map_while(Result::ok) {
                if writeln!(to_client, "{}", line.replace("disk.img", "lies.img")).is_err() {
                    break;
                }
            }
        }
    });
    format!("qmp:{}", at.display())
}

/// A VM with the files and nodes of Proxmox VE. Its Perl modules are stubs.
#[test]
fn a_vm_of_proxmox_ve_starts_with_the_storage_plugin_next_time() {
    let _cores = cores();
    let stage = Stage::new(Given::Proxmox, "auto");
    let file = stage.scratch.path("etc/pve/qemu-server/100.conf");
    let config = || std::fs::read_to_string(&file).expect("the configuration");
    let refused = |command: &dyn Fn() -> Tool| {
        let output = stage.output(command);
        assert!(!output.success(), "it succeeded: {}", output.all());
        output.stderr
    };
    std::fs::write(&file, format!("lock: backup\n{PROXMOX_VM}")).unwrap();
    let said = refused(&|| stage.command("attach", &[]));
    assert!(said.contains("the lock 'backup'"), "{said}");
    std::fs::write(&file, PROXMOX_VM).unwrap();

    // If Proxmox VE refuses the change, the VM gets its image back.
    let said = refused(&|| stage.command("attach", &[]).env("PVE_STUB_FAILS", "1"));
    assert!(said.contains("got timeout") && said.contains("nothing was changed"), "{said}");
    assert_eq!(config(), PROXMOX_VM);
    stage.guest_continues();

    stage.run("attach", &[]);
    stage.assert_attached();
    assert_eq!(config(), PROXMOX_VM.replacen("local:", "cached:", 1), "only the VM's present configuration");
    stage.run("detach", &[]);
    assert_eq!(config(), PROXMOX_VM);

    // Without a storage of the type `hob`, the configuration stays.
    std::fs::write(stage.scratch.path("etc/pve/storage.cfg"), "lvmthin: local\n\tvgname pve\n").unwrap();
    let output = stage.output(|| stage.command("attach", &[]));
    let warning = "no storage of the type 'hob' has local as its base";
    assert!(output.success() && output.stderr.contains(warning), "{}", output.all());
    assert!(stage.daemon().ctl(&["disk", "list"]).contains("web-virtio0"));
    assert_eq!(config(), PROXMOX_VM);
    stage.run("detach", &["virtio0"]);
    stage.guest_continues();
    stage.end();
}
