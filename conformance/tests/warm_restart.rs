//! A daemon with a large persistent cache is killed and restarted: its disk is read and written
//! before the cache is recovered, and is then served from flash.

use std::fs::OpenOptions;
use std::os::unix::fs::FileExt;
use std::time::{Duration, Instant};

use conformance::data::{Noise, assert_same};
use conformance::nbd_client::Client;
use conformance::scratch::wait_for;
use conformance::{Daemon, MIB, Scratch};

/// Size of the first part of the disk, which is read, bytes.
const SIZE: u64 = 8 * MIB;
const DISK: u64 = 1024 * MIB;
const REQUEST: u64 = 65536;
const COUNT: u64 = SIZE / REQUEST;

/// Maximum time until a restarted cache serves, if its backing is unchanged, on a busy host.
const WARM_MAX: Duration = Duration::from_secs(60);

/// A restart may be faster than the test, so the test tries several times.
const TRIES: usize = 8;

struct Stage {
    scratch: Scratch,
    /// Content of the first part of the disk.
    content: Vec<u8>,
}

impl Stage {
    fn new(settings: &[&str]) -> (Stage, Daemon) {
        let scratch = Scratch::new();
        scratch.configure("");
        let content = scratch.noise("disk.img", SIZE, 90);
        OpenOptions::new().write(true).open(scratch.path("disk.img")).unwrap().set_len(DISK).unwrap();
        let stage = Stage { scratch, content };
        let daemon = stage.scratch.start_daemon();
        daemon.ctl(&["pool", "create", "fast", &stage.scratch.text("flash"), "--size", "1200M"]);
        daemon.ctl(&["disk", "add", "vm", "--backing", &stage.scratch.text("disk.img")]);
        let enable = ["cache", "enable", "vm", "--pool", "fast", "--size", "1G", "--block-size", "4K"];
        daemon.ctl(&[&enable[..], settings].concat());
        (stage, daemon)
    }

    /// Kills the daemon with SIGKILL, and starts it again.
    fn kill(&self, mut daemon: Daemon) -> Daemon {
        daemon.process.kill();
        self.scratch.start_daemon()
    }

    /// Connects as soon as the socket answers.
    fn connect(&self) -> Client {
        self.scratch.connect_when_served("vm")
    }

    /// Reads the written data and checks it; returns the number of hits.
    #[track_caller]
    fn pass(&self, daemon: &Daemon, client: &mut Client) -> u64 {
        let before = daemon.stats("vm").hits();
        for at in (0..SIZE).step_by(REQUEST as usize) {
            let data = client.read(at, REQUEST as u32).unwrap();
            assert_same(&data, &self.content[at as usize..(at + REQUEST) as usize], at, "the disk");
        }
        daemon.stats("vm").hits() - before
    }

    /// Reads until the cache has all data, and would have it after a crash.
    #[track_caller]
    fn warm(&self, daemon: &Daemon) {
        let mut client = self.connect();
        wait_for("a pass that consists of hits", || self.pass(daemon, &mut client) == COUNT);
        // A page of the journal is valid when a later page records that it is durable.
        for at in [SIZE, 2 * SIZE] {
            std::thread::sleep(Duration::from_millis(1500));
            client.read(at, REQUEST as u32).unwrap();
        }
        std::thread::sleep(Duration::from_millis(1500));
    }

    fn state(daemon: &Daemon) -> String {
        let shown = daemon.disk("vm");
        shown["cache"]["state"].as_str().unwrap().to_owned()
    }

    /// Returns true if the saved state has the file's present times.
    fn has_evidence(&self) -> bool {
        let state = self.scratch.saved_state();
        !state["disks"][0]["cache"]["journal"]["evidence"].is_null()
    }

    /// Returns true if the daemon has recorded that it serves the disk with its present journal ring.
    fn is_recorded(&self) -> bool {
        let state = self.scratch.saved_state();
        let ring = state["disks"][0]["cache"]["journal"]["ring"].as_u64().expect("a ring").to_string();
        let recorded = std::fs::read_to_string(self.scratch.path("state/last-served")).unwrap_or_default();
        recorded.split_whitespace().nth(1) == Some(ring.as_str())
    }

    #[track_caller]
    fn wait_for_verification(daemon: &Daemon) {
        wait_for("the comparison with the backing", || {
            daemon.stats("vm").number("unverified_bytes") == Some(0.0)
        });
    }

    #[track_caller]
    fn wait_for_cache(daemon: &Daemon) {
        wait_for("the cache", || Self::state(daemon) == "active");
    }
}

/// The file's times prove that no program changed the backing. The daemon records these times when it
/// closes the disk, and every two seconds in case it is killed.
#[test]
fn a_cache_over_an_unchanged_file_is_warm_within_seconds_and_without_a_comparison() {
    let (stage, mut daemon) = Stage::new(&["--persistent"]);
    stage.warm(&daemon);
    for kill in [false, true] {
        if kill {
            wait_for("recorded evidence", || stage.has_evidence());
            daemon.kill();
        } else {
            daemon.stop();
        }
        let start = Instant::now();
        daemon = stage.scratch.start_daemon();
        Stage::wait_for_cache(&daemon);
        let mut client = stage.connect();
        assert_eq!(stage.pass(&daemon, &mut client), COUNT, "kill: {kill}: {}", daemon.stats("vm").text());
        let took = start.elapsed();
        assert!(took < WARM_MAX, "kill: {kill}: the cache was warm after {took:?}");
        let stats = daemon.stats("vm");
        for compared in ["unverified_bytes", "to_verify_bytes", "verified_bytes"] {
            assert_eq!(stats.number(compared), Some(0.0), "kill: {kill}: {compared}: {}", stats.text());
        }
    }
    // The same numbers show a comparison if the file may have changed.
    daemon.kill();
    let file = OpenOptions::new().write(true).open(stage.scratch.path("disk.img")).unwrap();
    file.write_all_at(&stage.content[..512], 0).unwrap();
    daemon = stage.scratch.start_daemon();
    Stage::wait_for_cache(&daemon);
    Stage::wait_for_verification(&daemon);
    let stats = daemon.stats("vm");
    assert!(stats.number("verified_bytes") > Some(0.0), "{}", stats.text());
    daemon.stop();
}

#[test]
fn a_killed_daemon_serves_its_disk_before_its_cache_is_there_and_from_it_afterwards() {
    let (stage, mut daemon) = Stage::new(&["--persistent"]);
    stage.warm(&daemon);
    for attempt in 0.. {
        assert!(attempt < TRIES, "the first read always came after the recovery, or the cache was not warm");
        daemon = stage.kill(daemon);
        let mut client = stage.connect();
        let data = client.read(0, REQUEST as u32).unwrap();
        let early = daemon.stats("vm").reason("bypass", "cache-recovering") == 1;
        assert_same(&data, &stage.content[..REQUEST as usize], 0, "the disk");
        Stage::wait_for_cache(&daemon);
        // Without evidence that the backing is unchanged, hob first compares the cached data.
        Stage::wait_for_verification(&daemon);
        let is_warm = stage.pass(&daemon, &mut client) == COUNT;
        if early && is_warm {
            break;
        }
        if !is_warm {
            // On a slow disk, the last page of the journal was not durable before the kill.
            eprintln!("attempt {attempt} is not warm: {}", daemon.stats("vm").text());
            stage.warm(&daemon);
        }
    }
    daemon.stop();
}

/// Data that was written before the cache was recovered is what later reads return, from the cache
/// and after another crash.
#[test]
fn data_written_before_the_cache_is_recovered_is_never_stale() {
    let (mut stage, mut daemon) = Stage::new(&["--persistent"]);
    let mut dice = Noise::new(91);
    let mut early = 0;
    for round in 0..TRIES {
        stage.warm(&daemon);
        daemon = stage.kill(daemon);
        let mut client = stage.connect();
        let at = dice.below(COUNT) * REQUEST;
        let data = dice.bytes(REQUEST as usize);
        client.write(at, &data).unwrap();
        client.flush().unwrap();
        early += u32::from(Stage::state(&daemon) == "recovering");
        stage.content[at as usize..(at + REQUEST) as usize].copy_from_slice(&data);
        match round % 3 {
            0 => daemon = stage.kill(daemon),
            1 => Stage::wait_for_cache(&daemon),
            _ => {
                // The daemon stops normally, also during the recovery.
                daemon.stop();
                daemon = stage.scratch.start_daemon();
            }
        }
        stage.pass(&daemon, &mut stage.connect());
        Stage::wait_for_cache(&daemon);
        stage.pass(&daemon, &mut stage.connect());
        if early > 1 && round > 2 {
            break;
        }
    }
    assert!(early > 0, "the cache was always there before the first write was done");
    daemon.stop();
    let mut image = vec![0; SIZE as usize];
    let file = std::fs::File::open(stage.scratch.path("disk.img")).unwrap();
    file.read_exact_at(&mut image, 0).unwrap();
    assert_same(&image, &stage.content, 0, "the backing");
}

/// An operator restores a backup in place while hob is dead: dirty data that is newer than the
/// backup must not be mixed with the backup's data.
#[test]
fn dirty_data_stays_in_flash_if_the_file_was_changed_after_a_kill() {
    let lazy = ["--mode", "write-back", "--dirty-age-max", "0", "--dirty-start", "60", "--dirty-stop", "50"];
    let (mut stage, mut daemon) = Stage::new(&lazy);
    let backup = stage.content[..REQUEST as usize].to_vec();
    let data = Noise::new(93).bytes(REQUEST as usize);
    let mut client = stage.connect();
    client.write(0, &data).unwrap();
    client.flush().unwrap();
    stage.content[..REQUEST as usize].copy_from_slice(&data);
    wait_for("a record", || stage.is_recorded());
    // Nothing was changed, so the disk is served.
    daemon = stage.kill(daemon);
    stage.pass(&daemon, &mut stage.connect());
    Stage::wait_for_cache(&daemon);
    wait_for("another record", || stage.is_recorded());
    daemon.kill();
    let path = stage.scratch.path("disk.img");
    let file = OpenOptions::new().read(true).write(true).open(&path).unwrap();
    file.write_all_at(&backup, 0).unwrap();
    file.set_modified(std::time::SystemTime::now() + Duration::from_secs(600)).unwrap();
    daemon = stage.scratch.start_daemon();
    let show = |daemon: &Daemon| daemon.disk("vm");
    let refusal = "its backing was changed by another program at ";
    wait_for("the refusal", || show(&daemon)["reason"].as_str().is_some_and(|why| why.contains(refusal)));
    let shown = show(&daemon);
    assert_eq!(shown["state"], "offline", "{shown}");
    let why = shown["reason"].as_str().unwrap();
    assert!(why.contains("64 KiB") && why.contains("hob cache set vm --verify trust"), "{why}");
    let mut found = vec![0; REQUEST as usize];
    file.read_exact_at(&mut found, 0).unwrap();
    assert_same(&found, &backup, 0, "the backing");
    // hob may be trying to open the disk again.
    wait_for("the setting", || daemon.try_ctl(&["cache", "set", "vm", "--verify", "trust"]).success());
    wait_for("the accepted disk", || show(&daemon)["state"] == "online");
    stage.pass(&daemon, &mut stage.connect());
    daemon.ctl(&["drain", "vm"]);
    file.read_exact_at(&mut found, 0).unwrap();
    assert_same(&found, &data, 0, "the backing after a drain");
    daemon.stop();
}

/// Only flash has the dirty data: a reader waits for the recovery and receives the dirty data.
#[test]
fn dirty_data_is_read_from_the_first_read_after_a_restart() {
    let lazy = ["--mode", "write-back", "--dirty-age-max", "0", "--dirty-start", "60", "--dirty-stop", "50"];
    let (mut stage, mut daemon) = Stage::new(&lazy);
    stage.warm(&daemon);
    let mut dice = Noise::new(92);
    for _ in 0..3 {
        let mut client = stage.connect();
        let at = dice.below(COUNT) * REQUEST;
        let data = dice.bytes(REQUEST as usize);
        client.write(at, &data).unwrap();
        client.flush().unwrap();
        stage.content[at as usize..(at + REQUEST) as usize].copy_from_slice(&data);
        daemon = stage.kill(daemon);
        stage.pass(&daemon, &mut stage.connect());
        Stage::wait_for_cache(&daemon);
        stage.pass(&daemon, &mut stage.connect());
    }
    daemon.stop();
}
