//! Two daemons on one host, one backing, and a disk that moves from one daemon to the other with
//! its cache.

use std::time::{Duration, Instant};

use conformance::authority::Files;
use conformance::data::Noise;
use conformance::process::Output;
use conformance::scratch::wait_for;
use conformance::{Authority, MIB, Plan, Scratch, TestHost, Tool, Written};
use serde_json::Value;

/// Size of the disk.
const DISK: u64 = 32 * MIB;

/// Starts a host; `role` is the role of other hosts in its API.
#[track_caller]
fn start(authority: &Authority, name: &str, who: &Files, role: &str) -> TestHost {
    let plan = Plan::new(name).reached(authority).admits("host", role).calls_as(who);
    plan.pool("size = \"64M\"\nsegment_size = \"1M\"").start()
}

/// Returns the disk's migration according to this host; null if there is none.
#[track_caller]
fn migration(host: &TestHost) -> Value {
    let output = host.try_ctl(&["migrate", "vm", "-o", "json"]);
    if output.success() { serde_json::from_str(&output.stdout).expect("JSON") } else { Value::Null }
}

/// Both hosts, and the disk with its data.
struct Stage {
    scratch: Scratch,
    /// Format of the backing, by its name in QEMU.
    format: &'static str,
    a: TestHost,
    b: TestHost,
    written: Written,
}

impl Stage {
    #[track_caller]
    fn new(mode: &str, role: &str) -> Stage {
        Stage::on("raw", mode, role)
    }

    #[track_caller]
    fn on(format: &'static str, mode: &str, role: &str) -> Stage {
        let scratch = Scratch::new();
        let authority = Authority::new("hosts");
        let who = authority.client(scratch.dir(), "host");
        let (a, b) = (start(&authority, "a", &who, "admin"), start(&authority, "b", &who, role));
        let written = Written::new(7, DISK);
        std::fs::write(scratch.path("vm.raw"), written.data()).unwrap();
        if format != "raw" {
            convert(&scratch, ["raw", "vm.raw"], [format, &format!("vm.{format}")]);
        }
        a.ctl(&["disk", "add", "vm", "--backing", &scratch.text(&format!("vm.{format}"))]);
        a.tell(&format!("cache enable vm --pool fast --size 24M --block-size 16K --mode {mode}"));
        Stage { scratch, format, a, b, written }
    }

    /// Returns true if the backing has all written data. A daemon may have the backing open
    /// meanwhile.
    #[track_caller]
    fn is_in_backing(&self) -> bool {
        if self.format == "raw" {
            return self.written.is_in(&self.scratch.path("vm.raw"));
        }
        convert(&self.scratch, [self.format, &format!("vm.{}", self.format)], ["raw", "back.raw"]);
        self.written.is_in(&self.scratch.path("back.raw"))
    }

    fn migrate(&self, more: &[&str]) -> Output {
        self.a.try_ctl(&[&["migrate", "vm", "--to", self.b.address()], more].concat())
    }

    #[track_caller]
    fn migrated(&self, more: &[&str]) -> Value {
        let output = self.migrate(&[more, &["-o", "json"]].concat());
        assert!(output.success(), "{}", output.all());
        serde_json::from_str(&output.stdout).expect("JSON")
    }
}

/// Converts an image, which may be open elsewhere, to another image.
#[track_caller]
fn convert(scratch: &Scratch, from: [&str; 2], to: [&str; 2]) {
    let arguments =
        ["convert", "-U", "-f", from[0], "-O", to[0], &scratch.text(from[1]), &scratch.text(to[1])];
    Tool::new("qemu-img").args(arguments).run();
}

/// Returns the share of hits among reads of data that was in the cache before.
fn hit_ratio(host: &TestHost, work: impl FnOnce()) -> f64 {
    let (hits, misses) = counted(host);
    work();
    let (hits_after, misses_after) = counted(host);
    let (hits, misses) = (hits_after - hits, misses_after - misses);
    hits as f64 / (hits + misses).max(1) as f64
}

fn counted(host: &TestHost) -> (u64, u64) {
    let stats = host.daemon().stats("vm");
    (stats.hits(), stats.misses())
}

/// Number of bytes in the cache.
const WARM: u64 = 8 * MIB;

fn bytes(of: &Value, field: &str) -> f64 {
    of[field].as_f64().unwrap_or_else(|| panic!("no {field} in {of}"))
}

/// Moves a disk from A by a guest's first write on B. Returns the status, and the hit ratio on B.
fn move_with(mode: &str, cache: &str) -> (Value, f64) {
    move_on("raw", mode, cache)
}

fn move_on(format: &'static str, mode: &str, cache: &str) -> (Value, f64) {
    let mut stage = Stage::on(format, mode, "admin");
    let mut on_a = stage.a.connect("vm");
    stage.written.write_some(&mut on_a, 100, WARM);
    stage.written.read_all(&mut on_a, WARM);
    stage.written.read_all(&mut on_a, WARM);
    let shown = stage.migrated(&["--cache", cache, "--wait", "warm"]);
    assert_eq!(shown["state"], "copying", "{shown}");
    assert_eq!(stage.b.state("vm"), "awaited");
    assert_eq!(stage.a.state("vm"), "online");
    // The guest continues, and its changes are cached too.
    stage.written.write_some(&mut on_a, 20, WARM);
    let mut on_b = stage.b.connect("vm");
    stage.written.read(&mut on_b, 0);
    stage.written.read(&mut on_b, WARM as usize);
    drop(on_a);
    let began = Instant::now();
    stage.written.write(&mut on_b, 3 * Written::PIECE);
    eprintln!("{cache}: the first write waited {:?}", began.elapsed());
    let ratio = hit_ratio(&stage.b, || stage.written.read_all(&mut on_b, WARM));
    stage.written.read_all(&mut on_b, DISK);
    let over = stage.a.json(&["migrate", "vm", "--wait", "over"]);
    assert_eq!(over["state"], "over", "{over}");
    assert_eq!(stage.a.state("vm"), "away");
    wait_for("B has it", || stage.b.state("vm") == "online");
    let cache_mode = stage.b.disk("vm")["cache"]["mode"].clone();
    assert_eq!(cache_mode, mode);
    // A tombstone serves no client and uses no space.
    wait_for("A's pool to be free", || {
        let pool = stage.a.json(&["pool", "show", "fast"]);
        pool["free"] == pool["size"]
    });
    assert!(!stage.a.try_ctl(&["cache", "enable", "vm", "--pool", "fast", "--size", "8M"]).success());
    stage.b.ctl(&["drain", "vm"]);
    drop(on_b);
    if format != "raw" {
        // The image on the source is closed first, so that QEMU writes its cached metadata.
        stage.b.ctl(&["disk", "remove", "vm"]);
        Tool::new("qemu-img").args(["check", "-q", &stage.scratch.text(&format!("vm.{format}"))]).run();
    }
    assert!(stage.is_in_backing(), "the backing has it all");
    eprintln!("{cache}: {over}\nB: {}\nhit ratio {ratio}", migration(&stage.b));
    (over, ratio)
}

#[test]
fn a_disk_migrates_without_its_cache() {
    let (over, ratio) = move_with("write-back", "drop");
    assert_eq!(bytes(&over, "pulled"), 0.0);
    assert!(ratio < 0.2, "{ratio}");
}

#[test]
fn a_copied_cache_serves_at_the_other_host() {
    let (over, ratio) = move_with("write-back", "copy");
    assert!(ratio >= 0.95, "{ratio}");
    let bound = 1.05 * bytes(&over, "valid") + bytes(&over, "resent") + 256.0 * 1024.0;
    assert!(bytes(&over, "sent") <= bound, "{over}");
}

/// Each host reads the image through its own `qemu-nbd`, and only one of them has the image open at
/// a time.
#[test]
fn a_disk_in_a_qcow2_image_moves_with_its_cache() {
    let (_, ratio) = move_on("qcow2", "write-back", "copy");
    assert!(ratio >= 0.95, "{ratio}");
    let (over, _) = move_on("qcow2", "write-through", "remote");
    assert!(bytes(&over, "sent") > 0.0, "{over}");
}

#[test]
fn a_remote_cache_serves_from_the_host_that_had_the_disk() {
    let (over, _) = move_with("write-through", "remote");
    assert!(bytes(&over, "sent") > 0.0, "{over}");
}

#[test]
fn a_heat_map_brings_the_cache_from_the_backing() {
    let mut stage = Stage::new("write-through", "admin");
    let mut on_a = stage.a.connect("vm");
    stage.written.write_some(&mut on_a, 10, WARM);
    stage.written.read_all(&mut on_a, WARM);
    stage.written.read_all(&mut on_a, WARM);
    drop(on_a);
    stage.migrated(&["--cache", "heat-map", "--wait", "warm"]);
    let over = stage.a.json(&["migrate", "vm", "--finish", "--wait", "over"]);
    assert!(bytes(&over, "sent") < 64.0 * 1024.0, "{over}");
    wait_for("the cache is there", || migration(&stage.b)["state"] == "over");
    let mut on_b = stage.b.connect("vm");
    let ratio = hit_ratio(&stage.b, || stage.written.read_all(&mut on_b, WARM));
    assert!(ratio > 0.95, "{ratio}");
}

#[test]
fn a_migration_is_cancelled_finished_and_reversed() {
    let mut stage = Stage::new("write-back", "admin");
    let mut on_a = stage.a.connect("vm");
    stage.written.write_some(&mut on_a, 50, WARM);
    drop(on_a);
    stage.migrated(&["--switch", "ask", "--wait", "warm"]);
    let kept = stage.a.ctl(&["migrate", "vm", "--cancel", "-o", "json"]);
    assert!(kept.contains("\"kept\""), "{kept}");
    wait_for("B gave it up", || stage.b.state("vm") == "absent");
    let mode = stage.a.disk("vm")["cache"]["mode"].clone();
    assert_eq!(mode, "write-back");
    stage.migrated(&["--wait", "warm"]);
    stage.a.ctl(&["migrate", "vm", "--finish", "--wait", "over"]);
    let mut on_b = stage.b.connect("vm");
    stage.written.write_some(&mut on_b, 50, WARM);
    stage.written.read_all(&mut on_b, WARM);
    drop(on_b);
    // The disk moves back.
    stage.b.ctl(&["migrate", "vm", "--to", stage.a.address(), "--wait", "warm"]);
    stage.b.ctl(&["migrate", "vm", "--finish", "--wait", "over"]);
    let mut on_a = stage.a.connect("vm");
    stage.written.read_all(&mut on_a, DISK);
    stage.written.write_some(&mut on_a, 20, WARM);
    drop(on_a);
    assert_eq!(stage.b.state("vm"), "away");
    // B takes the disk, as if A had failed permanently.
    stage.a.kill();
    assert!(!stage.b.try_ctl(&["migrate", "vm", "--take-back"]).success());
    stage.b.ctl(&["migrate", "vm", "--take-back", "--force", "--yes"]);
    wait_for("B has it", || stage.b.state("vm") == "online");
}

#[test]
fn a_client_without_permission_is_refused_in_one_line() {
    let stage = Stage::new("write-through", "read-only");
    let output = stage.migrate(&[]);
    assert!(!output.success() && output.stderr.contains("has the role read-only"), "{}", output.all());
    assert_eq!(output.stderr.trim().lines().count(), 1, "{}", output.all());
    let other = Authority::new("others");
    let who = other.client(stage.scratch.dir(), "stranger");
    let c = start(&other, "c", &who, "admin");
    let output = stage.a.try_ctl(&["migrate", "vm", "--to", c.address()]);
    assert!(!output.success(), "{}", output.all());
    assert_eq!(output.stderr.trim().lines().count(), 1, "{}", output.all());
    assert_eq!(stage.a.state("vm"), "online");
    assert_eq!(c.state("vm"), "absent");
}

/// The destination's daemon is restarted before the hand-over, and the migration continues.
#[test]
fn a_destination_that_is_restarted_still_gets_the_disk() {
    let mut stage = Stage::new("write-back", "admin");
    let mut on_a = stage.a.connect("vm");
    stage.written.write_some(&mut on_a, 50, WARM);
    stage.migrated(&["--switch", "ask", "--wait", "warm"]);
    stage.b.stop();
    assert_eq!(migration(&stage.a)["state"], "copying");
    stage.b.start();
    stage.written.write_some(&mut on_a, 10, WARM);
    drop(on_a);
    stage.a.ctl(&["migrate", "vm", "--finish", "--wait", "over"]);
    let mut on_b = stage.b.connect("vm");
    stage.written.read_all(&mut on_b, DISK);
}

/// A host that has handed the disk over is not shown as an owner while the destination still reads
/// its cache.
#[test]
fn a_source_whose_cache_is_still_read_is_away() {
    let stage = Stage::new("write-through", "admin");
    let mut on_a = stage.a.connect("vm");
    stage.written.read_all(&mut on_a, WARM);
    stage.written.read_all(&mut on_a, WARM);
    drop(on_a);
    stage.migrated(&["--cache", "remote", "--bandwidth", "512K", "--wait", "warm"]);
    stage.a.ctl(&["migrate", "vm", "--finish", "--wait", "arrived"]);
    let shown = migration(&stage.a);
    assert_eq!(shown["state"], "serving", "{shown}");
    assert_eq!((stage.a.state("vm"), stage.b.state("vm")), ("away".to_owned(), "online".to_owned()));
    assert!(stage.a.reason("vm").contains(stage.b.address()), "{}", stage.a.reason("vm"));
}

/// A guest's read at the destination waits for few of the pulls that a bandwidth limit delays.
#[test]
fn a_read_at_the_destination_passes_a_slow_copy() {
    let stage = Stage::new("write-through", "admin");
    let mut on_a = stage.a.connect("vm");
    stage.written.read_all(&mut on_a, WARM);
    stage.written.read_all(&mut on_a, WARM);
    drop(on_a);
    let slow = ["--cache", "copy", "--bandwidth", "512K", "--switch", "ask", "--wait", "awaited"];
    stage.migrated(&slow);
    std::thread::sleep(Duration::from_secs(2));
    let mut on_b = stage.b.connect("vm");
    let began = Instant::now();
    stage.written.read(&mut on_b, WARM as usize);
    // Eight pulls of 512 KiB in flight would take 8 s.
    assert!(began.elapsed() < Duration::from_secs(6), "the read took {:?}", began.elapsed());
}

/// Nothing of the disk changes before the destination has accepted its name.
#[test]
fn a_host_that_cannot_take_the_name_is_refused_at_once() {
    let stage = Stage::new("write-back", "admin");
    let refused = |output: Output, why: &str| {
        assert!(!output.success() && output.stderr.contains(why), "{}", output.all());
        assert_eq!(output.stderr.trim().lines().count(), 1, "{}", output.all());
        assert!(migration(&stage.a).is_null());
    };
    refused(
        stage.a.try_ctl(&["migrate", "vm", "--to", stage.a.address()]),
        "this is the address of the host that has vm now",
    );
    std::fs::write(stage.scratch.path("other.raw"), vec![0; MIB as usize]).unwrap();
    stage.b.ctl(&["disk", "add", "vm", "--backing", &stage.scratch.text("other.raw")]);
    refused(stage.migrate(&[]), "that host has another disk named vm");
    assert_eq!(stage.b.state("vm"), "online");
}

#[test]
fn whichever_host_is_killed_one_has_the_disk_and_all_of_it() {
    let rounds = std::env::var("HOB_MIGRATE_ROUNDS").ok().and_then(|n| n.parse().ok()).unwrap_or(6);
    for round in 0..rounds {
        let format = if round % 3 == 2 { "qcow2" } else { "raw" };
        let mut stage = Stage::on(format, "write-back", "admin");
        let mut noise = Noise::new(round);
        let mut on_a = stage.a.connect("vm");
        stage.written.write_some(&mut on_a, 60, WARM);
        stage.written.read_all(&mut on_a, WARM);
        on_a.flush().expect("a flush");
        drop(on_a);
        let cache = ["copy", "drop", "remote", "heat-map"][noise.below(4) as usize];
        let output =
            stage.migrate(&["--cache", cache, "--switch", "ask", "--bandwidth", "16M", "--wait", "begun"]);
        assert!(output.success(), "{}", output.all());
        std::thread::sleep(Duration::from_millis(noise.below(700)));
        if noise.below(2) == 0 {
            let _ = stage.a.try_ctl(&["migrate", "vm", "--finish", "--wait", "begun"]);
            std::thread::sleep(Duration::from_millis(noise.below(150)));
        }
        let kills_a = noise.below(2) == 0;
        eprintln!("=== round {round}: {format}, {cache}, {} is killed", if kills_a { "a" } else { "b" });
        let victim = if kills_a { &mut stage.a } else { &mut stage.b };
        victim.kill();
        std::thread::sleep(Duration::from_millis(noise.below(500)));
        victim.start();
        // Whatever happened, the hand-over can be completed now.
        wait_for("it has come", || {
            let _ = stage.a.try_ctl(&["migrate", "vm", "--finish", "--wait", "begun"]);
            let (a, b) = (stage.a.state("vm"), stage.b.state("vm"));
            let is_kept = a == "online" && migration(&stage.a)["state"] == "kept";
            (a == "away" && b == "online") || is_kept
        });
        let host = if stage.b.state("vm") == "online" { &stage.b } else { &stage.a };
        let mut client = host.connect("vm");
        stage.written.read_all(&mut client, DISK);
        stage.written.write_some(&mut client, 5, WARM);
    }
}
