//! A VM moves from one host to another while its guest writes and verifies, and its cache moves
//! too. The hosts are two network namespaces, each with a daemon and a QEMU, and share one backing.
//! `cargo test -p conformance --test live_migration -- --nocapture` prints the costs.
//!
//! Needs root, for the network namespaces.

use std::io::Write;
use std::path::Path;
use std::time::{Duration, Instant};

use conformance::guest::{COMPLAINTS, Disk, SENTINEL, cores, end_load, loaded};
use conformance::load::{BLOCK_BYTES, check_image, image};
use conformance::process::Process;
use conformance::qmp::Monitor;
use conformance::scratch::{is_listening, wait_until};
use conformance::stats::Stats;
use conformance::{Authority, Host, MIB, Plan, Scratch, TestHost, Tool};
use serde_json::{Value, json};
use tempfile::NamedTempFile;

/// Number of blocks of the disk.
const BLOCKS: u64 = 64 << 20 >> 12;
/// Number of blocks of the disk's hot set.
const HOT_BLOCKS: u64 = 16 << 20 >> 12;
/// Size of the cache: the hot set and half of the rest.
const CACHE: &str = "40M";
/// Port of the control API, for `hob migrate`.
const CONTROL_PORT: u16 = 7700;
/// Port of the arriving QEMU.
const MACHINE_PORT: u16 = 7701;
/// Maximum time of any step on two busy cores.
const STEP_MAX: Duration = Duration::from_secs(240);
/// Time without output after which a guest's console gets an empty line.
const SILENCE_MAX: Duration = Duration::from_secs(5);
/// Maximum pause of the guest by the hand-over, milliseconds, if no other program uses the
/// processors (`HOB_QUIET=1`).
const PAUSE_MS_MAX: f64 = 100.0;
/// Maximum pause of the guest by the hand-over, milliseconds, if other programs use the processors
/// and the host may stall. This maximum is shorter than every timeout of a guest.
const BUSY_PAUSE_MS_MAX: f64 = 25_000.0;
/// Minimum number of reads for a hit ratio. With fewer, chance changes the ratio by some percent.
const READS_MIN: u64 = 1000;

/// Returns the period over which the hit ratio is measured. The period is longer for the figures of
/// docs/MIGRATION.md (`HOB_QUIET=1`).
fn window() -> Duration {
    Duration::from_secs(if std::env::var_os("HOB_QUIET").is_some() { 10 } else { 4 })
}

/// A host with its daemon.
struct Side {
    hob: TestHost,
    host: Host,
}

impl Side {
    #[track_caller]
    fn start(host: Host, authority: &Authority, name: &str) -> Side {
        let plan = Plan::new(name)
            .reached_at(authority, name, host.address(), CONTROL_PORT)
            .admits("host-a", "admin")
            .admits("host-b", "admin")
            .pool("size = \"96M\"");
        Side { hob: plan.start_inside(&host), host }
    }

    fn disk(&self, front: Front) -> Disk {
        match front {
            Front::Nbd => Disk::Nbd(format!("nbd+unix:///vm1?socket={}", self.hob.text("nbd.sock"))),
            Front::VhostUser => Disk::VhostUser(self.hob.text("vm.sock")),
        }
    }

    /// Starts the VM; `more` are additional options of QEMU.
    #[track_caller]
    fn machine(&self, front: Front, memory: &Path, more: &[&str]) -> Process {
        let program = Path::new(env!("CARGO_BIN_EXE_guest-load"));
        let control = format!("unix:{},server=on,wait=off", self.hob.text("qmp.sock"));
        loaded(self.hob.scratch(), &self.disk(front), memory, program, HOT_BLOCKS)
            .args(["-qmp", &control])
            .args(more)
            .inside(&self.host)
            .start()
    }

    fn monitor(&self) -> Monitor {
        Monitor::connect(&self.hob.path("qmp.sock"))
    }

    fn console(&self) -> String {
        std::fs::read_to_string(self.hob.path("console")).unwrap_or_default()
    }

    /// Returns the share of hits among the reads within a time, which is longer on a slow host.
    #[track_caller]
    fn hit_ratio(&self, time: Duration) -> f64 {
        let before = self.hob.daemon().stats("vm1");
        std::thread::sleep(time);
        let mut after = before.clone();
        wait_until("reads of the guest", STEP_MAX, || {
            after = self.hob.daemon().stats("vm1");
            reads(&after) - reads(&before) >= READS_MIN
        });
        hit_ratio(&before, &after)
    }

    /// Returns the output of `hob migrate`.
    #[track_caller]
    fn status(&self) -> Value {
        self.hob.json(&["migrate", "vm1"])
    }
}

/// Returns the number of reads that hit or missed.
fn reads(stats: &Stats) -> u64 {
    stats.class("hit") + stats.misses()
}

fn hit_ratio(before: &Stats, after: &Stats) -> f64 {
    let hits = after.class("hit") - before.class("hit");
    hits as f64 / (reads(after) - reads(before)) as f64
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Front {
    Nbd,
    VhostUser,
}

/// The preset of the source's cache.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Preset {
    WriteThrough,
    WriteBack,
}

impl Preset {
    fn name(self) -> &'static str {
        match self {
            Preset::WriteThrough => "vfrc",
            Preset::WriteBack => "auto",
        }
    }
}

struct Stage {
    source: Side,
    target: Side,
    backing: Process,
    // The scratch directory of the backing.
    shared: Scratch,
    front: Front,
    /// The VM's memory file, which both QEMUs have, at a place where vhost-user can share it.
    memory: NamedTempFile,
}

impl Stage {
    #[track_caller]
    fn new(front: Front, preset: Preset) -> Stage {
        let shared = Scratch::new();
        image(&shared.path("disk.img"), BLOCKS);
        let backing = Tool::new("qemu-nbd")
            .args(["--persistent", "--shared=8", "--format=raw", "--cache=writeback", "--export-name=d"])
            .args(["--socket", &shared.text("backing.sock"), &shared.text("disk.img")])
            .start();
        wait_until("the backing", STEP_MAX, || is_listening(&shared.path("backing.sock")));
        let authority = Authority::new("conformance");
        let [here, there] = Host::pair();
        let (source, target) =
            (Side::start(here, &authority, "host-a"), Side::start(there, &authority, "host-b"));
        let memory =
            tempfile::Builder::new().prefix("hobt").tempfile_in("/dev/shm").expect("a file in memory");
        let stage = Stage { source, target, backing, shared, front, memory };
        stage.add_disk(&stage.source, preset);
        stage
    }

    #[track_caller]
    fn add_disk(&self, side: &Side, preset: Preset) {
        let backing = format!("nbd+unix:///d?socket={}", self.shared.text("backing.sock"));
        let socket = side.hob.text("vm.sock");
        let mut add = vec!["disk", "add", "vm1", "--backing", &backing];
        if self.front == Front::VhostUser {
            add.extend(["--vhost-user", &socket]);
        }
        side.hob.ctl(&add);
        let enable = ["cache", "enable", "vm1", "--pool", "fast", "--size", CACHE, "--preset", preset.name()];
        side.hob.ctl(&enable);
    }

    /// Returns the address of the destination's control API.
    fn to(&self) -> String {
        format!("{}:{CONTROL_PORT}", self.target.host.address())
    }

    /// Starts the VM at the source, and returns when its load has settled.
    #[track_caller]
    fn depart(&self) -> Process {
        let machine = self.source.machine(self.front, self.memory.path(), &[]);
        wait_until("the guest", STEP_MAX, || self.source.console().contains("GUEST-LOAD second=2 "));
        machine
    }

    /// Moves the VM. When this returns, the VM runs only at the destination.
    #[track_caller]
    fn move_machine(&self, leaving: Process) -> (Process, Value) {
        let uri = format!("tcp:{}:{MACHINE_PORT}", self.target.host.address());
        let arriving = self.target.machine(self.front, self.memory.path(), &["-incoming", "defer"]);
        let mut awaiting = self.target.monitor();
        awaiting.share_memory();
        awaiting.ask("migrate-incoming", json!({ "uri": uri }));
        let mut monitor = self.source.monitor();
        monitor.share_memory();
        let moved = monitor.migrate(&uri, &arriving, STEP_MAX);
        wait_until("the guest to go on", STEP_MAX, || {
            awaiting.ask("query-status", json!({}))["status"] == "running"
        });
        monitor.quit();
        drop(leaving);
        (arriving, moved)
    }

    /// Ends the VM, and checks that the guest and this test read the same disk, and that every
    /// block is complete.
    #[track_caller]
    fn end(mut self, mut machine: Process) {
        let mut console = end_load(self.target.hob.scratch());
        let heard = || self.source.console() + &self.target.console();
        let start = Instant::now();
        let (mut said, mut heard_at) = (heard(), Instant::now());
        while ![SENTINEL, "GUEST-FAILED"].iter().any(|last| said.contains(last)) && start.elapsed() < STEP_MAX
        {
            std::thread::sleep(Duration::from_millis(50));
            let now = heard();
            if now != said {
                (said, heard_at) = (now, Instant::now());
            } else if heard_at.elapsed() > SILENCE_MAX {
                // After a migration the guest may wait for a lost interrupt of its serial port. Input
                // makes it send the rest. The guest may end at this moment.
                let _ = console.write_all(b"\n");
                heard_at = Instant::now();
            }
        }
        machine.kill();
        assert!(said.contains(SENTINEL), "the guest is not content:\n{said}");
        for bad in COMPLAINTS {
            assert!(!said.contains(bad), "{bad}:\n{said}");
        }
        // Writes the dirty data of a write-back cache to the backing.
        self.target.hob.ctl(&["disk", "event", "vm1", "suspend"]);
        self.source.hob.stop();
        self.target.hob.stop();
        drop(self.backing);
        // The guest found the version that it counted in each block, so the backing has the same content.
        check_image(&self.shared.path("disk.img"), &said);
    }
}

/// Returns the longest time that the guest measured for a kind of request, from the lines of
/// `console`, microseconds.
fn slowest_us(console: &str, kind: &str) -> u64 {
    let key = format!("slowest_{kind}_us=");
    let after = console.lines().filter_map(|line| line.split(key.as_str()).nth(1));
    after.filter_map(|rest| rest.split(' ').next()?.parse::<u64>().ok()).max().unwrap_or(0)
}

/// Costs of a migration.
struct Cost {
    before: f64,
    after: f64,
    /// Hit ratio of the guest when the destination needed no more data of the source.
    later: f64,
    source: Value,
    target: Value,
    machine: Value,
    /// Bytes that the source's host sent until the VM had moved, including all headers.
    cable_bytes: u64,
    /// Time from the first command until the VM ran at the destination.
    total: Duration,
    slowest_write_us: u64,
}

impl Cost {
    fn number(value: &Value, key: &str) -> f64 {
        value[key].as_f64().unwrap_or_else(|| panic!("no {key} in {value}"))
    }

    /// Prints one line of the table.
    fn print(&self, name: &str) {
        let mib = |key: &str| Cost::number(&self.source, key) / MIB as f64;
        eprintln!(
            "| cache | valid | sent | of that again | hand-over | first write waits | guest's slowest write | machine stands still | all in all | hits before | in the {} s after | then |",
            window().as_secs()
        );
        eprintln!("|---|---|---|---|---|---|---|---|---|---|---|---|");
        eprintln!(
            "| {name} | {:.1} MiB | {:.1} MiB | {:.1} MiB | {:.0} ms | {:.0} ms | {} ms | {} ms | {:.1} s | {:.1} % | {:.1} % | {:.1} % |",
            mib("valid"),
            mib("sent"),
            mib("resent"),
            Cost::number(&self.source, "pause_ms"),
            Cost::number(&self.target, "waited_ms"),
            self.slowest_write_us / 1000,
            self.machine["downtime"],
            self.total.as_secs_f64(),
            self.before * 100.0,
            self.after * 100.0,
            self.later * 100.0,
        );
        eprintln!("on the cable before the machine moved: {:.1} MiB", self.cable_bytes as f64 / MIB as f64);
    }
}

/// Moves a VM and its cache, and returns the costs.
#[track_caller]
fn migrate(front: Front, preset: Preset, cache: &str) -> Cost {
    let _cores = cores();
    let stage = Stage::new(front, preset);
    let leaving = stage.depart();
    let before = stage.source.hit_ratio(window());
    let (start, cable) = (Instant::now(), stage.source.host.sent_bytes());
    let (to, socket) = (stage.to(), stage.target.hob.text("vm.sock"));
    let mut command = vec!["migrate", "vm1", "--to", &to, "--cache", cache, "--wait", "warm"];
    if front == Front::VhostUser {
        command.extend(["--vhost-user", &socket]);
    }
    stage.source.hob.ctl(&command);
    let cable_bytes = stage.source.host.sent_bytes() - cable;
    let (machine, moved) = stage.move_machine(leaving);
    let total = start.elapsed();
    let after = stage.target.hit_ratio(window());
    stage.source.hob.ctl(&["migrate", "vm1", "--wait", "over"]);
    let later = stage.target.hit_ratio(window() / 3);
    let (source, target) = (stage.source.status(), stage.target.status());
    let list = stage.source.hob.ctl(&["disk", "list"]);
    assert!(list.contains("away"), "the source still shows:\n{list}");
    let slowest_write_us = slowest_us(&stage.target.console(), "write");
    stage.end(machine);
    let cost =
        Cost { before, after, later, source, target, machine: moved, cable_bytes, total, slowest_write_us };
    cost.print(cache);
    assert!(before > 0.8, "the guest's load is not what it should be: {before}");
    // No guest writes at the source while one waits at the destination: this time is the guest's
    // pause.
    let pause = Cost::number(&cost.target, "waited_ms");
    let is_quiet = std::env::var_os("HOB_QUIET").is_some();
    let most = if is_quiet { PAUSE_MS_MAX } else { BUSY_PAUSE_MS_MAX };
    assert!(pause < most, "the hand-over took {pause} ms");
    cost
}

/// Only the VM moves, and finds a cold cache. This is the baseline for a migration of the cache,
/// and shows that the rest of the test works.
#[test]
fn a_guest_migrates_without_its_cache() {
    let _cores = cores();
    let stage = Stage::new(Front::Nbd, Preset::WriteThrough);
    let leaving = stage.depart();
    let before = stage.source.hit_ratio(window());
    stage.add_disk(&stage.target, Preset::WriteThrough);
    let cold = stage.target.hob.daemon().stats("vm1");
    let (machine, moved) = stage.move_machine(leaving);
    stage.target.hit_ratio(window());
    let after = hit_ratio(&cold, &stage.target.hob.daemon().stats("vm1"));
    let downtime = &moved["downtime"];
    stage.end(machine);
    eprintln!("no migration: hits {before:.3}, then {after:.3}; the machine stood still for {downtime} ms");
    assert!(before > 0.8 && after < before, "nothing was cold: {before}, then {after}");
}

#[test]
fn a_cache_is_copied_while_the_guest_runs() {
    let cost = migrate(Front::Nbd, Preset::WriteBack, "copy");
    copied(&cost);
}

#[test]
fn a_cache_is_copied_of_a_vhost_user_guest() {
    let cost = migrate(Front::VhostUser, Preset::WriteThrough, "copy");
    copied(&cost);
}

#[track_caller]
fn copied(cost: &Cost) {
    let [valid, sent, resent] = ["valid", "sent", "resent"].map(|key| Cost::number(&cost.source, key));
    assert!(sent <= 1.05 * valid + resent, "{sent} of {valid} and {resent} again");
    assert!(
        valid > (HOT_BLOCKS * BLOCK_BYTES as u64 / 2) as f64,
        "there was hardly anything to copy: {valid}"
    );
    // Compares hob's own number with the network's.
    let (cable, all) = (cost.cable_bytes as f64, valid + resent);
    assert!(
        (0.9 * valid..1.1 * all).contains(&cable),
        "{cable} bytes on the cable of {valid} and {resent} again"
    );
    assert!(cost.after >= 0.95 * cost.before, "hits: {} before and {} after", cost.before, cost.after);
}

/// No cached data is sent before the hand-over. After it, the source's flash serves hits as well as
/// the destination's own flash would.
#[test]
fn a_cache_is_read_from_the_other_host() {
    let cost = migrate(Front::Nbd, Preset::WriteThrough, "remote");
    assert!(cost.later >= 0.9 * cost.before, "hits: {} before and {} in the end", cost.before, cost.later);
}

/// The source sends a list of some kilobytes, and the destination reads the listed data from the
/// backing.
#[test]
fn a_cache_is_read_again_from_the_backing() {
    let cost = migrate(Front::Nbd, Preset::WriteBack, "heat-map");
    assert!(cost.cable_bytes < MIB, "a list took {} bytes", cost.cable_bytes);
}

#[test]
fn a_cache_is_dropped() {
    let cost = migrate(Front::Nbd, Preset::WriteBack, "drop");
    assert!(cost.cable_bytes < MIB / 4, "nothing took {} bytes", cost.cable_bytes);
    assert!(cost.after < cost.before, "nothing was cold: {} before and {} after", cost.before, cost.after);
}
