//! Two hosts, A and B, of a cluster with a real etcd. A keeps replicas of its dirty data on B's
//! flash. When A fails, B takes over the disk with the replica (docs/decisions/0023). The backing
//! is a separate NBD server without locks.

use std::collections::HashSet;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::time::Instant;

use conformance::authority::Files;
use conformance::nbd_client::Client;
use conformance::scratch::wait_for;
use conformance::store::ONE_BY_ONE;
use conformance::{Authority, Etcd, MIB, Plan, Scratch, Store, TestHost, Written};
use serde_json::Value;

/// Size of the disk.
const DISK: u64 = 32 * MIB;

/// Starts a host that lends flash to the other host and has the disk in its configuration.
#[track_caller]
fn start(etcd: &Etcd, authority: &Authority, name: &str, who: &Files, backing: &str) -> TestHost {
    let plan = Plan::new(name).reached(authority).admits("host", "admin").calls_as(who);
    let lend = plan.path("lent");
    plan.says(&format!("[peers]\nlend = {lend:?}\nlend_max = \"128M\"\nwait_seconds = 8"))
        .joins(etcd, "lease_seconds = 5\nsettle_seconds = 1")
        .pool("size = \"128M\"\nsegment_size = \"1M\"")
        .disk("vm", backing, "")
        .start()
}

/// Both hosts, and the disk with its data.
struct Stage {
    a: TestHost,
    b: TestHost,
    written: Written,
    /// Original content of the backing.
    old: Vec<u8>,
    _store: Store,
    _etcd: Etcd,
    scratch: Scratch,
}

impl Stage {
    /// Creates a stage in which A owns the disk and keeps replicas of its dirty data on B. A has
    /// acknowledged flushed writes, and destages nothing by itself.
    #[track_caller]
    fn new() -> Stage {
        let scratch = Scratch::new();
        let written = Written::new(11, DISK);
        let old = written.data().to_vec();
        std::fs::write(scratch.path("disk.img"), &old).unwrap();
        // The backing is so slow that the test can interrupt a fail-over.
        let image = scratch.text("disk.img");
        let args = [&ONE_BY_ONE[..], &["--filter", "delay", "file", &image, "wdelay=20ms"]].concat();
        let store = Store::start(&scratch.path("backing.sock"), &args);
        let (etcd, authority) = (Etcd::start(1), Authority::new("hosts"));
        let who = authority.client(scratch.dir(), "host");
        let start = |name| start(&etcd, &authority, name, &who, &store.backing(""));
        let a = start("a");
        a.wait_until_serving("vm");
        let b = start("b");
        a.tell(&format!("pool add-device fast --peer {} --size 64M", b.address()));
        a.tell(
            "cache enable vm --pool fast --size 24M --block-size 16K --mode write-back --copies peer \
             --dirty-start 90 --dirty-stop 90 --dirty-full 95 --dirty-age-max 0",
        );
        let mut stage = Stage { a, b, written, old, _store: store, _etcd: etcd, scratch };
        let mut guest = stage.a.connect("vm");
        stage.write(&mut guest, 200);
        wait_for("etcd to know of the second copy", || title(&stage.a)["copy"] == "b");
        // Data that becomes dirty later gets a replica too.
        stage.write(&mut guest, 100);
        let title = title(&stage.a);
        assert_eq!((&title["copy"], &title["dirty"]), (&"b".into(), &true.into()), "{title}");
        assert!(stage.scratch.read("disk.img") == stage.old, "it is in flash only");
        stage
    }

    /// Writes and flushes as a guest.
    #[track_caller]
    fn write(&mut self, guest: &mut Client, count: usize) {
        self.written.write_some(guest, count, DISK / 2);
        guest.flush().expect("a flush");
    }

    /// Checks that a guest of this host reads all data.
    #[track_caller]
    fn read_all(&self, side: &TestHost) {
        self.written.read_all(&mut side.connect("vm"), DISK);
    }

    #[track_caller]
    fn check_backing(&self) {
        assert!(
            self.scratch.read("disk.img") == self.written.data(),
            "the backing has everything, and nothing old"
        );
    }

    /// Checks that etcd records the loss of the replica before the guest continues without the
    /// replica. B's replica is then outdated, so after A is killed, B waits until A's flash is
    /// back.
    #[track_caller]
    fn only_a_has_it(&mut self) {
        let before = title(&self.a);
        assert_eq!((&before["copy"], &before["dirty"]), (&Value::Null, &true.into()), "{before}");
        let mut guest = self.a.connect("vm");
        self.write(&mut guest, 50);
        assert_eq!(title(&self.a)["copy"], Value::Null);
        self.a.kill();
        wait_for("b to know who has its data", || self.b.reason("vm").contains("flash of a"));
        self.a.start();
        self.a.wait_until_serving("vm");
        self.read_all(&self.a);
        self.a.tell("drain vm");
        self.check_backing();
    }

    /// Returns the file that B lends.
    fn lent(&self) -> PathBuf {
        let mut files = std::fs::read_dir(self.b.path("lent")).unwrap().map(|file| file.unwrap().path());
        files.find(|path| path.extension().is_some_and(|it| it == "dev")).expect("a file is lent")
    }
}

/// Returns the ownership record of the disk.
fn title(side: &TestHost) -> Value {
    side.json(&["cluster", "disks"])[0].clone()
}

#[test]
fn a_host_that_is_lost_with_its_flash_loses_nothing_that_its_peer_has() {
    let mut stage = Stage::new();
    stage.a.kill();
    let killed = Instant::now();
    std::fs::remove_file(stage.a.path("flash")).unwrap();
    std::fs::remove_dir_all(stage.a.path("state")).unwrap();
    let mut reasons = HashSet::new();
    wait_for("b to serve the disk", || {
        reasons.insert(stage.b.reason("vm"));
        stage.b.serves("vm")
    });
    println!(
        "{} KiB were adopted and served after {:?}",
        stage.written.places().len() * Written::PIECE / 1024,
        killed.elapsed()
    );
    assert!(
        reasons.iter().any(|it| it.contains("written to the backing") && it.contains('%')),
        "{reasons:?}"
    );
    stage.check_backing();
    stage.read_all(&stage.b);
    let title = title(&stage.b);
    let seen = (&title["host"], &title["generation"], &title["dirty"], &title["state"], &title["copy"]);
    assert_eq!(seen, (&"b".into(), &2.into(), &false.into(), &"held".into(), &Value::Null), "{title}");
    // The adopted disk is like any other disk.
    let mut guest = stage.b.connect("vm");
    stage.write(&mut guest, 20);
    stage.written.read_all(&mut guest, DISK);
}

#[test]
fn a_returning_host_drops_the_data_of_a_failover() {
    let mut stage = Stage::new();
    stage.a.kill();
    stage.b.wait_until_serving("vm");
    let mut guest = stage.b.connect("vm");
    stage.write(&mut guest, 100);
    drop(guest);
    stage.a.start();
    wait_for("a to know who has it", || stage.a.reason("vm").contains("b has it"));
    stage.b.ctl(&["disk", "remove", "vm"]);
    stage.a.wait_until_serving("vm");
    stage.read_all(&stage.a);
    stage.a.tell("drain vm");
    stage.check_backing();
    let said = stage.a.kill();
    assert!(said.contains("outdated and dropped"), "it says so");
}

#[test]
fn a_failover_that_is_killed_halfway_restarts() {
    let mut stage = Stage::new();
    stage.a.kill();
    wait_for("b to have begun", || stage.scratch.read("disk.img") != stage.old);
    stage.b.kill();
    let image = stage.scratch.read("disk.img");
    assert!(image != stage.written.data() && image != stage.old, "it was in the middle");
    // The flash of A is available again, but its data is outdated.
    stage.a.start();
    wait_for("a to know who has its data", || stage.a.reason("vm").contains("flash of b"));
    stage.b.start();
    stage.b.wait_until_serving("vm");
    stage.read_all(&stage.b);
    stage.check_backing();
}

#[test]
fn a_copy_that_is_damaged_is_not_used_in_part() {
    let mut stage = Stage::new();
    stage.a.kill();
    // Damages all copies of one sector in B's file.
    let at = *stage.written.places().first().unwrap();
    let sector = &stage.written.piece(at)[..4096];
    let bytes = std::fs::read(stage.lent()).unwrap();
    let places: Vec<usize> =
        (0..bytes.len()).step_by(4096).filter(|it| &bytes[*it..*it + 4096] == sector).collect();
    assert!(!places.is_empty());
    let file = std::fs::OpenOptions::new().write(true).open(stage.lent()).unwrap();
    places.iter().for_each(|place| file.write_all_at(&[0x55; 512], *place as u64 + 1024).unwrap());
    file.sync_all().unwrap();
    wait_for("b to say so", || stage.b.reason("vm").contains("cannot be used"));
    let reason = stage.b.reason("vm");
    assert!(reason.contains("checksum") && reason.contains("--force"), "{reason}");
    assert!(stage.scratch.read("disk.img") == stage.old && !stage.b.serves("vm"), "the backing is as it was");
    // A has all data.
    stage.a.start();
    stage.a.wait_until_serving("vm");
    stage.read_all(&stage.a);
}

/// The resized cache gets a new journal, and B has no space for a copy of this journal. Later
/// acknowledged writes are only in the new journal, so B's old replica must not be used.
#[test]
fn a_journal_without_a_copy_at_the_peer_ends_the_word_of_the_one_before() {
    let mut stage = Stage::new();
    // Other disks can use the space that is left on B.
    for (name, size) in [("x", "40M"), ("y", "1M"), ("z", "1M")] {
        std::fs::File::create(stage.scratch.path(name)).unwrap().set_len(2 * DISK).unwrap();
        stage.a.ctl(&["disk", "add", name, "--backing", &stage.scratch.text(name)]);
        let enable = format!("cache enable {name} --pool fast --size {size} --mode write-back --copies peer");
        eprintln!("{}", stage.a.tell(&enable));
    }
    stage.a.ctl(&["cache", "resize", "vm", "32M"]);
    stage.only_a_has_it();
}

/// A command sets one copy and changes other settings. The record of the replica is removed before
/// the cache continues without the replica.
#[test]
fn a_cache_that_is_to_do_without_its_peer_leaves_it_first() {
    let mut stage = Stage::new();
    stage.a.ctl(&["cache", "set", "vm", "--copies", "1", "--block-size", "8K"]);
    stage.only_a_has_it();
    assert_eq!(stage.a.json(&["peer", "list"])["borrowed"][0]["disks"], serde_json::json!([]));
}

/// B has failed, so the ownership record of the disk `vm` must be changed before its guest
/// continues. B also has a replica of a disk without an ownership record. This replica must not
/// delay the change.
#[test]
fn a_disk_without_owner_keeps_no_other_waiting() {
    let mut stage = Stage::new();
    std::fs::write(stage.scratch.path("ro.img"), vec![0; 8 << 20]).unwrap();
    stage.a.ctl(&["disk", "add", "ro", "--backing", &stage.scratch.text("ro.img"), "--read-only"]);
    stage.a.tell("cache enable ro --pool fast --size 8M --block-size 16K --mode write-back --copies peer");
    let borrowed = stage.a.json(&["peer", "list"])["borrowed"][0].clone();
    assert_eq!(borrowed["disks"], serde_json::json!(["ro", "vm"]), "{borrowed}");
    stage.b.kill();
    let mut guest = stage.a.connect("vm");
    stage.write(&mut guest, 20);
    stage.written.read_all(&mut guest, DISK);
    assert_eq!(title(&stage.a)["copy"], Value::Null);
}
