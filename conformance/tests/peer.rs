//! Two daemons on one host: A keeps replicas of its dirty data on B's flash. If either fails, no
//! data is lost.

use std::collections::HashSet;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use conformance::authority::Files;
use conformance::nbd_client::Client;
use conformance::scratch::{text, wait_for};
use conformance::{Authority, MIB, Plan, Scratch, TestHost, Tool, Written};
use rustix::process::Signal;
use serde_json::Value;

/// Size of the disk.
const DISK: u64 = 32 * MIB;

/// Time in seconds for which a host waits for a peer that does not answer, in tests in which the peer is
/// up. A busy host may pause the peer for many seconds.
const PATIENT: u32 = 30;

/// Time in seconds for which a host waits for a peer that does not answer, in tests that wait for the
/// end of this time.
const BRIEF: u32 = 5;

/// Starts a host that lends flash to the other host, and waits this number of seconds for its peers.
#[track_caller]
fn start(authority: &Authority, name: &str, who: &Files, wait_seconds: u32) -> TestHost {
    let plan =
        Plan::new(name).reached(authority).admits("host", "admin").admits("other", "admin").calls_as(who);
    let lend = plan.path("lent");
    let peers = format!(
        "[peers]\nlend = {lend:?}\nlend_max = \"128M\"\nname = {name:?}\nwait_seconds = {wait_seconds}"
    );
    plan.says(&peers).pool("size = \"64M\"\nsegment_size = \"1M\"").start()
}

/// Both hosts, and the disk with its data.
struct Stage {
    scratch: Scratch,
    a: TestHost,
    b: TestHost,
    written: Written,
    authority: Authority,
}

impl Stage {
    /// Creates a stage in which A has a disk with replicas on B, and destages nothing by itself.
    #[track_caller]
    fn new() -> Stage {
        Stage::waiting(PATIENT)
    }

    #[track_caller]
    fn waiting(wait_seconds: u32) -> Stage {
        let scratch = Scratch::new();
        let authority = Authority::new("hosts");
        let who = authority.client(scratch.dir(), "host");
        let start = |name: &str| start(&authority, name, &who, wait_seconds);
        let (a, b) = (start("a"), start("b"));
        let written = Written::new(7, DISK);
        std::fs::write(scratch.path("vm.raw"), written.data()).unwrap();
        a.ctl(&["disk", "add", "vm", "--backing", &scratch.text("vm.raw")]);
        a.tell(&format!("pool add-device fast --peer {} --size 64M", b.address()));
        let enabled = a.tell(
            "cache enable vm --pool fast --size 24M --block-size 16K --mode write-back --copies peer \
             --dirty-start 90 --dirty-stop 90 --dirty-full 95 --dirty-age-max 0",
        );
        eprintln!("{enabled}\n{}", a.tell("peer list"));
        let stage = Stage { scratch, a, b, written, authority };
        stage.wait_until_doubled();
        stage
    }

    /// Returns the first entry of A's borrowed flash.
    fn borrowed(&self) -> Value {
        self.a.json(&["peer", "list"])["borrowed"][0].clone()
    }

    /// Returns the first entry of B's lent flash.
    fn loan(&self) -> Value {
        self.b.json(&["peer", "list"])["lent"][0].clone()
    }

    /// Returns true if the disk has replicas on an available peer.
    fn is_doubled(&self) -> bool {
        let borrowed = self.borrowed();
        borrowed["state"] == "online" && borrowed["disks"][0] == "vm"
    }

    #[track_caller]
    fn wait_until_doubled(&self) {
        wait_for("replicas are created again", || self.is_doubled());
    }

    #[track_caller]
    fn dirty_bytes(&self) -> u64 {
        self.a.json(&["stats", "vm"])["dirty_bytes"].as_u64().expect("a count")
    }

    /// A guest of A writes and flushes.
    #[track_caller]
    fn write(&mut self, guest: &mut Client, count: usize) {
        self.written.write_some(guest, count, DISK / 2);
        guest.flush().expect("a flush");
    }

    #[track_caller]
    fn read_all(&self, guest: &mut Client) {
        self.written.read_all(guest, DISK);
    }

    /// Checks, after a restart of A, that its guest reads all data.
    #[track_caller]
    fn guest_is_back(&self) -> Client {
        wait_for("the disk is back", || self.a.serves("vm"));
        let mut guest = self.a.connect("vm");
        self.read_all(&mut guest);
        guest
    }

    /// Returns the file that B lends.
    fn lent(&self) -> PathBuf {
        let path = self.loan()["path"].as_str().map(PathBuf::from);
        path.unwrap_or_else(|| {
            let mut files = std::fs::read_dir(self.b.path("lent")).unwrap().map(|file| file.unwrap().path());
            files.find(|path| path.extension().is_some_and(|it| it == "dev")).expect("a file is lent")
        })
    }

    /// Returns the number of sectors that the guest wrote and that are not in B's file.
    fn missing_at_b(&self) -> usize {
        let file = std::fs::read(self.lent()).unwrap();
        let there: HashSet<&[u8]> = file.chunks_exact(4096).collect();
        let places = self.written.places().iter();
        let sectors = places.flat_map(|at| self.written.piece(*at).chunks_exact(4096));
        sectors.filter(|sector| !there.contains(sector)).count()
    }

    #[track_caller]
    fn check_backing(&self) {
        self.a.tell("drain vm");
        wait_for("nothing is dirty", || self.dirty_bytes() == 0);
        assert!(self.written.is_in(&self.scratch.path("vm.raw")), "the backing has it all");
    }
}

/// Flushed data is on B. If A's flash is lost, A reads the data from B.
#[test]
fn flushed_data_is_at_the_peer_and_is_read_from_there() {
    let mut stage = Stage::new();
    let mut guest = stage.a.connect("vm");
    stage.write(&mut guest, 300);
    assert_eq!(stage.missing_at_b(), 0);
    assert!(stage.dirty_bytes() > 2 * MIB, "{}", stage.dirty_bytes());
    assert!(!stage.written.is_in(&stage.scratch.path("vm.raw")), "the backing lags");
    assert!(stage.missing_at_b() == 0 && stage.is_doubled());
    // A is killed, and its flash is lost.
    stage.a.kill();
    std::fs::remove_file(stage.a.path("flash")).unwrap();
    stage.a.start();
    let _guest = stage.guest_is_back();
    stage.check_backing();
}

/// Both daemons end at the same time, and no flash is lost. After the restart, A's guest reads all
/// flushed data.
#[test]
fn both_daemons_may_end_at_once() {
    let mut stage = Stage::new();
    let mut guest = stage.a.connect("vm");
    stage.write(&mut guest, 200);
    stage.a.kill();
    stage.b.kill();
    stage.b.start();
    stage.a.start();
    let mut guest = stage.guest_is_back();
    stage.wait_until_doubled();
    stage.write(&mut guest, 50);
    assert_eq!(stage.missing_at_b(), 0);
    stage.check_backing();
}

/// B fails: A's guest waits for the configured time and then continues, and A reports the failure.
/// When B is back, dirty data has a replica again.
#[test]
fn a_lender_that_dies_is_given_up_and_taken_again() {
    let mut stage = Stage::waiting(BRIEF);
    let mut guest = stage.a.connect("vm");
    stage.write(&mut guest, 100);
    stage.b.kill();
    let began = Instant::now();
    stage.write(&mut guest, 1);
    let waited = began.elapsed();
    eprintln!("the first write without the peer waited {waited:?}");
    let began = Instant::now();
    stage.write(&mut guest, 50);
    let each = Duration::from_secs(BRIEF.into());
    assert!(began.elapsed() < 50 * each, "every write waits for the peer: {:?}", began.elapsed());
    stage.read_all(&mut guest);
    let shown = stage.borrowed();
    assert_eq!(shown["state"], "fenced", "{shown}");
    assert!(shown["reason"].as_str().unwrap().contains("does not answer"), "{shown}");
    let health = stage.a.try_ctl(&["health"]).all();
    assert!(health.contains("does not answer"), "{health}");
    // A restarts without B: its own flash is sufficient.
    stage.a.kill();
    stage.a.start();
    let mut guest = stage.guest_is_back();
    stage.b.start();
    stage.wait_until_doubled();
    stage.write(&mut guest, 50);
    stage.read_all(&mut guest);
    stage.check_backing();
}

/// B is paused for longer than A waits, and then continues. A does not use B's data any more.
#[test]
fn a_paused_lender_is_replaced_by_a_new_device() {
    let mut stage = Stage::waiting(BRIEF);
    let mut guest = stage.a.connect("vm");
    stage.write(&mut guest, 100);
    stage.b.signal(Signal::STOP);
    stage.write(&mut guest, 50);
    stage.b.signal(Signal::CONT);
    stage.wait_until_doubled();
    stage.write(&mut guest, 50);
    stage.read_all(&mut guest);
    stage.check_backing();
}

/// A short interruption of the link only causes a pause.
#[test]
fn a_short_pause_is_waited_for() {
    let mut stage = Stage::new();
    let mut guest = stage.a.connect("vm");
    stage.written.write_some(&mut guest, 20, DISK / 2);
    stage.b.signal(Signal::STOP);
    let b = stage.b.daemon().process.pid();
    let began = Instant::now();
    let waker = std::thread::spawn(move || {
        std::thread::sleep(Duration::from_millis(400));
        let pid = rustix::process::Pid::from_raw(b as i32).expect("a process");
        rustix::process::kill_process(pid, Signal::CONT).expect("it is there");
    });
    stage.write(&mut guest, 1);
    assert!(began.elapsed() >= Duration::from_millis(300), "{:?}", began.elapsed());
    waker.join().unwrap();
    stage.write(&mut guest, 20);
    assert!(stage.is_doubled(), "{}", stage.borrowed());
    assert_eq!(stage.missing_at_b(), 0);
    stage.read_all(&mut guest);
}

/// B's operator ends the flash lease, and A continues. Then A ends a lease, and B's space is free
/// again.
#[test]
fn loans_end_from_both_sides() {
    let mut stage = Stage::waiting(BRIEF);
    let mut guest = stage.a.connect("vm");
    stage.write(&mut guest, 50);
    let borrower = stage.loan()["borrower"].as_str().unwrap().to_owned();
    let name = stage.loan()["name"].as_str().unwrap().to_owned();
    stage.b.ctl(&["peer", "end", &name]);
    stage.write(&mut guest, 50);
    stage.read_all(&mut guest);
    // A asks for another flash lease repeatedly, and gets none before B's operator permits it. Then
    // A gets one automatically.
    std::thread::sleep(Duration::from_secs(6));
    assert_eq!(stage.borrowed()["state"], "fenced");
    assert_eq!(stage.loan()["state"], "ended");
    stage.b.ctl(&["peer", "end", &borrower, "--forget"]);
    stage.wait_until_doubled();
    stage.write(&mut guest, 50);
    // Before A ends the lease, its cache stops using the device.
    let device = stage.borrowed()["path"].as_str().unwrap().to_owned();
    stage.a.ctl(&["cache", "set", "vm", "--copies", "1"]);
    stage.a.ctl(&["pool", "remove-device", "fast", &device]);
    assert_eq!(stage.b.json(&["peer", "list"])["lent"], serde_json::json!([]));
    stage.written.write_some(&mut guest, 50, DISK / 2);
    stage.read_all(&mut guest);
    stage.check_backing();
}

/// Hosts without permission are refused, and invalid requests are refused with one line.
#[test]
fn invalid_requests_are_refused() {
    let stage = Stage::new();
    let (a, b) = (&stage.a, &stage.b);
    let refused = |args: &[&str], part: &str| {
        let output = a.try_ctl(args);
        assert!(!output.success() && output.stderr.contains(part), "{args:?}: {}", output.all());
    };
    refused(&["pool", "add-device", "fast", "--peer", b.address(), "--size", "64M"], "already");
    refused(&["pool", "add-device", "fast", "--peer", b.address()], "--size");
    refused(&["cache", "set", "vm", "--mode", "write-through"], "write-back");
    // A certificate of another authority.
    let other = stage.authority.client(stage.scratch.dir(), "other");
    let borrower = stage.loan()["borrower"].as_str().unwrap().to_owned();
    let url = format!("https://{}/v1/loans/{borrower}", b.address());
    let asked = Tool::new("curl")
        .args(["-s", "--cacert", &text(&other.ca), "--cert", &text(&other.cert), "--key", &text(&other.key)])
        .args([
            "-X",
            "POST",
            "-H",
            "content-type: application/json",
            "-d",
            r#"{"name":"x","size":"64M"}"#,
            &url,
        ])
        .output();
    let said = asked.all();
    assert!(said.contains("another certificate"), "{said}");
}
