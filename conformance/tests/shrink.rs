//! A write-back cache shrinks, is drained or changed while its backing is unavailable: guests notice
//! nothing, and the change waits.

use std::process::Command;
use std::time::{Duration, Instant};

use conformance::data::{Noise, assert_same};
use conformance::nbd_client::read_mibs;
use conformance::process::Process;
use conformance::scratch::wait_for;
use conformance::{Hob, MIB, Scratch, Serve};
use serde_json::Value;

const SIZE: u64 = 96 * MIB;
const BLOCK: u64 = 64 << 10;
/// Returns blocks in an order that no cache treats as sequential.
fn scattered(blocks: std::ops::Range<u64>) -> impl Iterator<Item = u64> {
    let count = blocks.end - blocks.start;
    assert!(!count.is_multiple_of(13) && count > 13);
    (0..count).map(move |i| blocks.start + i * 13 % count)
}

fn mib(count: u64) -> u64 {
    count * MIB / BLOCK
}

/// hob on nbdkit, with a cache of four segments: one and a half clean, one dirty, the rest free.
struct Stage {
    scratch: Scratch,
    backing: Process,
    hob: Hob,
    image: Vec<u8>,
}

impl Stage {
    #[track_caller]
    fn new() -> Stage {
        let scratch = Scratch::new();
        let image = scratch.noise("disk.img", SIZE, 70);
        let backing = scratch.serve_image("disk.img");
        let serve = Serve::disk(&scratch.backing_uri()).cached(&scratch.path("pool"), "64M", "4K");
        let serve = serve.arg("--mode", "write-back");
        let hob = serve.arg("--dirty-start", "60").arg("--dirty-age-max", "0").start(&scratch);
        let mut client = hob.connect();
        let clean = mib(64)..mib(88);
        wait_for("clean blocks in the cache", || {
            let before = hob.stats().hits();
            for block in scattered(clean.clone()) {
                client.read(block * BLOCK, BLOCK as u32).unwrap();
            }
            hob.stats().hits() - before >= clean.end - clean.start
        });
        let mut stage = Stage { scratch, backing, hob, image };
        stage.write(scattered(0..mib(16)), 71);
        stage
    }

    /// Writes blocks of a seed's noise, and flushes. Returns the longest time of a request.
    #[track_caller]
    fn write(&mut self, blocks: impl Iterator<Item = u64>, seed: u64) -> Duration {
        let mut client = self.hob.connect();
        let mut longest = Duration::ZERO;
        let mut noise = Noise::new(seed);
        for block in blocks {
            let (at, data) = ((block * BLOCK) as usize, noise.bytes(BLOCK as usize));
            let now = Instant::now();
            client.write(at as u64, &data).unwrap_or_else(|e| panic!("write of block {block}: {e}"));
            longest = longest.max(now.elapsed());
            self.image[at..at + data.len()].copy_from_slice(&data);
        }
        let now = Instant::now();
        client.flush().expect("a flush on flash");
        longest.max(now.elapsed())
    }

    /// Compares the disk with its expected content. Requests wait for the backing from now on.
    #[track_caller]
    fn check(&self) {
        // hob refuses the setting until a change of the disk has ended.
        wait_for("the setting", || {
            self.hob.try_ctl(&["disk", "set", "disk", "--backing-timeout", "forever"]).success()
        });
        let mut client = self.hob.connect();
        let disk = read_mibs(&mut client, 0..SIZE);
        assert_same(&disk, &self.image, 0, "the disk and what was written");
    }

    /// Stops hob, and compares the disk and its backing with what was written.
    #[track_caller]
    fn end(self) {
        self.check();
        self.hob.stop();
        let backing = self.scratch.read("disk.img");
        assert_same(&backing, &self.image, 0, "the backing and what was written");
    }

    fn shown(&self) -> Value {
        self.hob.disk()
    }

    /// Starts a command that halves the cache, and does not wait for its end.
    #[track_caller]
    fn begin_shrink(&self) -> Process {
        let resize = self.begin(&["cache", "resize", "disk", "32M"]);
        let other = self.hob.try_ctl(&["cache", "set", "disk", "--dirty-start", "50"]).all();
        assert!(other.contains("getting smaller") && other.contains("hob drain disk --stop"), "{other}");
        resize
    }

    /// Starts a command that changes the disk, and does not wait for its end.
    #[track_caller]
    fn begin(&self, args: &[&str]) -> Process {
        let mut command = Command::new(conformance::hob::binary());
        command.args(args).args(["--control", self.hob.control()]);
        let change = Process::start("hob", &mut command).expect("hob starts");
        wait_for("a change that waits", || {
            let tasks: Value = self.hob.json(&["tasks"]);
            tasks.as_array().expect("a list").iter().any(|task| task["can_cancel"] == true)
        });
        change
    }

    /// Makes requests that need the backing fail after 2 s. This is for outages only: a busy host may
    /// pause a healthy backing for longer.
    #[track_caller]
    fn limit_waits(&self) {
        self.hob.ctl(&["disk", "set", "disk", "--backing-timeout", "2s"]);
    }

    /// Kills the backing, and waits until hob has noticed that.
    #[track_caller]
    fn kill_backing(&mut self) {
        self.backing.kill();
        wait_for("the loss of the backing", || self.shown()["backing_state"]["state"] == "reconnecting");
    }

    /// Returns the newest drain in the list of tasks, which may belong to another change; `Null` if
    /// there is none.
    fn drain_task(&self) -> Value {
        let tasks: Value = self.hob.json(&["tasks"]);
        let mut newest_first = tasks.as_array().expect("a list").iter().rev();
        let is_drain = |what: &str| what == "drain" || what.starts_with("drain for ");
        newest_first.find(|task| task["what"].as_str().is_some_and(is_drain)).cloned().unwrap_or_default()
    }

    /// Returns the drain, which must wait for the backing.
    #[track_caller]
    fn waiting_drain(&self) -> Value {
        // On a busy host, a command takes seconds until it has begun.
        wait_for("the drain", || self.drain_task()["state"] == "running");
        let task = self.drain_task();
        assert_eq!(task["can_cancel"], true, "{task}");
        assert!(task["dirty"]["why"].as_str().is_some_and(|why| why.contains("reconnecting")), "{task}");
        task
    }

    /// Writes in rounds for longer than the backing's timeout. Each request must need flash only: a
    /// request that needs the backing fails.
    #[track_caller]
    fn write_in_an_outage(&mut self, seed: u64) {
        let mut quickest = Duration::MAX;
        for round in 0..10 {
            let longest = self.write(scattered(0..40).chain(scattered(mib(40)..mib(40) + 40)), seed + round);
            quickest = quickest.min(longest);
            std::thread::sleep(Duration::from_millis(300));
        }
        assert!(quickest < Duration::from_secs(1), "each round has a request that takes {quickest:?}");
    }

    /// Starts the backing again. Requests may fail after 2 s, before hob's next attempt to connect.
    #[track_caller]
    fn restart_backing(&mut self) {
        self.backing = self.scratch.serve_image("disk.img");
        wait_for("the connection to the backing", || self.shown()["backing_state"]["state"] == "connected");
        // hob refuses this command while a change of the disk is in progress.
        let _ = self.hob.try_ctl(&["disk", "set", "disk", "--backing-timeout", "forever"]);
    }

    fn room(&self) -> u64 {
        self.shown()["cache"]["room"].as_u64().expect("a size")
    }
}

#[test]
fn a_cache_that_gets_smaller_while_the_backing_is_away_takes_writes_and_waits() {
    let mut stage = Stage::new();
    let before = stage.hob.stats().number("dirty_bytes").expect("a count") as u64;
    assert_eq!(before, 16 * MIB);
    stage.limit_waits();
    stage.backing.kill();
    let resize = stage.begin_shrink();
    // Dirty data in segments that leave and in segments that stay, clean data, and uncached data.
    let start = Instant::now();
    let mut rounds = 0;
    let mut quickest = Duration::MAX;
    while start.elapsed() < Duration::from_secs(7) || rounds <= 5 {
        let blocks = [0..40, mib(10)..mib(10) + 40, mib(64)..mib(64) + 20, mib(30)..mib(30) + 20];
        let longest = stage.write(blocks.into_iter().flat_map(scattered), 100 + rounds);
        quickest = quickest.min(longest);
        rounds += 1;
        std::thread::sleep(Duration::from_millis(50));
    }
    assert!(quickest < Duration::from_secs(4), "each round has a request that takes {quickest:?}");
    let shown = stage.shown();
    assert_eq!(shown["cache"]["state"], "active", "{shown}");
    assert_eq!(shown["cache"]["mode_in_effect"], Value::Null, "{shown}");
    assert!(shown["cache"]["dirty"]["why"].as_str().is_some_and(|why| why.contains("backing")), "{shown}");
    assert_eq!(stage.room(), 64 * MIB);
    stage.restart_backing();
    wait_for("the end of the shrink", || stage.room() == 32 * MIB);
    drop(resize);
    assert!(stage.hob.stats().number("dirty_bytes").expect("a count") > 0.0, "what stays is dirty yet");
    stage.check();
    stage.write(scattered(mib(40)..mib(41)), 300);
    stage.hob.ctl(&["drain", "disk"]);
    stage.end();
}

#[test]
fn a_shrink_that_waits_is_a_task_with_progress_that_can_be_cancelled() {
    let mut stage = Stage::new();
    stage.limit_waits();
    stage.backing.kill();
    let resize = stage.begin_shrink();
    let task = |stage: &Stage| {
        let tasks: Value = stage.hob.json(&["tasks"]);
        let mut tasks = tasks.as_array().expect("a list").iter();
        tasks.find(|task| task["what"] == "cache set").cloned().unwrap_or_default()
    };
    // The daemon keeps the result, because the client has disconnected.
    drop(resize);
    wait_for("the progress", || {
        let task = task(&stage);
        task["can_cancel"] == true && task["dirty"]["size"].as_u64().is_some_and(|size| size > 0)
    });
    std::thread::sleep(Duration::from_secs(1));
    stage.hob.ctl(&["tasks", "cancel", &task(&stage)["id"].to_string()]);
    wait_for("the cancellation", || task(&stage)["state"] == "cancelled");
    let health = stage.hob.try_ctl(&["health", "-o", "json"]).all();
    assert!(!health.contains("task-failed"), "{health}");
    assert_eq!(stage.room(), 64 * MIB);
    stage.restart_backing();
    stage.hob.ctl(&["drain", "disk"]);
    let discard = stage.hob.try_ctl(&["cache", "discard-dirty", "disk"]);
    assert!(discard.success() && discard.all().contains("no dirty data"), "{}", discard.all());
    let guest = stage.hob.connect();
    let removed = stage.hob.try_ctl(&["disk", "remove", "disk"]);
    let said = removed.all();
    assert!(!removed.success() && said.contains("1 client would be disconnected"), "{said}");
    assert!(!said.contains("is emptied"), "nothing is announced that does not happen: {said}");
    drop(guest);
    stage.check();
    stage.hob.stop();
}

#[test]
fn a_shrink_that_waits_is_cancelled_with_drain_stop() {
    let mut stage = Stage::new();
    stage.limit_waits();
    stage.backing.kill();
    let resize = stage.begin_shrink();
    stage.hob.ctl(&["drain", "disk", "--stop"]);
    wait_for("the old size", || stage.shown()["cache"]["size"].as_u64() == Some(64 * MIB));
    drop(resize);
    stage.write(scattered(mib(20)..mib(21)), 200);
    stage.restart_backing();
    stage.check();
    stage.hob.ctl(&["drain", "disk"]);
    stage.check();
    stage.hob.stop();
}

#[test]
fn a_drain_waits_while_the_backing_is_away_and_the_disk_stays_in_write_back() {
    let mut stage = Stage::new();
    stage.limit_waits();
    stage.kill_backing();
    let said = stage.hob.try_ctl(&["drain", "disk", "--no-wait"]).all();
    assert!(said.contains("the drain waits") && said.contains("reconnecting"), "{said}");
    stage.write_in_an_outage(400);
    let shown = stage.shown();
    assert_eq!(shown["cache"]["mode_in_effect"], Value::Null, "{shown}");
    stage.waiting_drain();
    stage.hob.ctl(&["drain", "disk", "--stop"]);
    wait_for("the end of the drain", || stage.drain_task()["state"] == "cancelled");
    stage.restart_backing();
    stage.hob.ctl(&["drain", "disk"]);
    stage.check();
    stage.hob.stop();
}

#[test]
fn a_backing_that_dies_during_a_drain_returns_the_disk_to_write_back_until_it_is_back() {
    let mut stage = Stage::new();
    stage.limit_waits();
    stage.kill_backing();
    stage.backing = stage.scratch.serve_image_slowly("disk.img", "1");
    wait_for("the connection to the backing", || stage.shown()["backing_state"]["state"] == "connected");
    stage.hob.ctl(&["drain", "disk", "--no-wait"]);
    // During a drain the disk is in write-through, and reports this.
    wait_for("the mode in effect", || {
        let text = stage.hob.ctl(&["disk", "show", "disk"]);
        text.contains("write-back (write-through until the drain ends)")
    });
    stage.kill_backing();
    wait_for("write-back", || stage.shown()["cache"]["mode_in_effect"].is_null());
    let mut quickest = Duration::MAX;
    for round in 0..5 {
        quickest = quickest.min(stage.write(scattered(mib(40)..mib(40) + 40), 500 + round));
        std::thread::sleep(Duration::from_millis(600));
    }
    assert!(quickest < Duration::from_secs(1), "each round has a request that takes {quickest:?}");
    assert_eq!(stage.drain_task()["state"], "running");
    stage.restart_backing();
    wait_for("the end of the drain", || stage.drain_task()["state"] == "done");
    stage.end();
}

#[test]
fn a_change_of_the_mode_waits_while_the_backing_is_away_and_can_be_cancelled() {
    let mut stage = Stage::new();
    let through = ["cache", "set", "disk", "--mode", "write-through"];
    stage.limit_waits();
    stage.kill_backing();
    // The command drains the disk first.
    let change = stage.begin(&through);
    stage.write_in_an_outage(600);
    let shown = stage.shown();
    assert_eq!(shown["cache"]["mode"], "write-back", "{shown}");
    assert_eq!(shown["cache"]["mode_in_effect"], Value::Null, "{shown}");
    let task = stage.waiting_drain();
    assert_eq!(task["what"], "drain for cache set", "{task}");
    let other = stage.hob.try_ctl(&["cache", "set", "disk", "--dirty-start", "50"]).all();
    assert!(other.contains("hob drain disk --stop"), "{other}");
    stage.hob.ctl(&["tasks", "cancel", &task["id"].to_string()]);
    wait_for("the cancellation", || stage.drain_task()["state"] == "cancelled");
    drop(change);
    stage.write_in_an_outage(650);
    let change = stage.begin(&through);
    stage.write_in_an_outage(700);
    stage.restart_backing();
    wait_for("the new mode", || stage.shown()["cache"]["mode"] == "write-through");
    drop(change);
    assert_eq!(stage.hob.stats().number("dirty_bytes").expect("a count") as u64, 0);
    stage.end();
}
