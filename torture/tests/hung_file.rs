//! A file system that stops answering delays only the disks that are on it, for all requests of
//! guests and all commands of the operator. These tests need root and /dev/fuse.

use std::process::Command;
use std::time::{Duration, Instant};

use conformance::data::{assert_same, noise_file};
use conformance::hob::{Daemon, binary};
use conformance::nbd_client::{CMD_FLUSH, CMD_READ, CMD_TRIM, CMD_WRITE, CMD_WRITE_ZEROES, Client};
use conformance::process::Process;
use conformance::scratch::wait_for;
use conformance::{MIB, Scratch, Tool};
use torture::files::Files;
use torture::medium::Medium;

const SIZE: u64 = 8 * MIB;

/// Maximum time of a request of another disk.
const REQUEST_MAX: Duration = Duration::from_secs(1);

/// Maximum number of attempts of a measurement, because a busy host may delay any of them. A request
/// that waits for the hung file system ends in no attempt.
const ATTEMPTS_MAX: u32 = 5;

/// Maximum time of a command once the file system answers.
const WAIT_MAX: Duration = Duration::from_secs(180);

/// Maximum time until a command refuses a path that hangs. The command may wait for one second, but
/// not for two.
const REFUSED_MAX: Duration = Duration::from_millis(1900);

/// Two disks of one shard: `hung` on a test file system, and `well` on another.
struct Stage {
    daemon: Option<Daemon>,
    well: Client,
    image: Vec<u8>,
    next: u64,
    files: Files,
    scratch: Scratch,
}

impl Stage {
    fn new() -> Stage {
        Stage::with_ring("auto")
    }

    fn with_ring(ring: &str) -> Stage {
        let scratch = Scratch::new();
        let files = Files::mount(&scratch.path("mnt"), 1).expect("this test needs root and /dev/fuse");
        files.add("hung.img", Medium::new(SIZE, 1));
        files.add("more.img", Medium::new(SIZE, 1));
        noise_file(&scratch.path("well.img"), SIZE, 5);
        let image = std::fs::read(scratch.path("well.img")).unwrap();
        let disk = |name: &str, path: &str| format!("[[disk]]\nname = \"{name}\"\nbacking = \"{path}\"\n");
        let config = format!(
            "shards = 1\nring = \"{ring}\"\n{}{}{}",
            scratch.daemon_config(),
            disk("hung", &scratch.text("mnt/hung.img")),
            disk("well", &scratch.text("well.img")),
        );
        scratch.write_config(config);
        let daemon = scratch.start_daemon();
        let well = scratch.connect_when_served("well");
        Stage { daemon: Some(daemon), well, image, next: 0, files, scratch }
    }

    /// Checks that the other disk answers in time.
    #[track_caller]
    fn other_disk_is_served(&mut self, what: &str) {
        let is_served = |_| {
            let start = Instant::now();
            let data = self.well.read(0, 4096).unwrap_or_else(|error| panic!("{what}: {error}"));
            assert_same(&data, &self.image[..4096], 0, what);
            start.elapsed() < REQUEST_MAX
        };
        assert!((0..ATTEMPTS_MAX).any(is_served), "{what} delayed another disk");
    }

    /// Stops the daemon.
    fn end(mut self) {
        self.daemon.take().expect("it runs").stop();
    }

    /// Makes the file system hang. Returns the number of requests that hang already.
    fn hang(&self) -> usize {
        self.files.hang();
        self.files.waiting()
    }

    /// Waits until the file system has received more requests than before, and then checks that the
    /// other disk and the control API answer in time.
    #[track_caller]
    fn hangs_alone(&mut self, before: usize, what: &str) {
        wait_for(what, || self.files.waiting() > before);
        let is_served = |_| {
            let start = Instant::now();
            for _ in 0..4 {
                let at = self.next % SIZE;
                self.next += 4096 * 3;
                let data = self.well.read(at, 4096).unwrap_or_else(|error| panic!("{what}: {error}"));
                assert_same(&data, &self.image[at as usize..at as usize + 4096], at, what);
            }
            self.well.write(0, &self.image[..4096]).unwrap();
            self.well.flush().unwrap();
            start.elapsed() < REQUEST_MAX
        };
        assert!((0..ATTEMPTS_MAX).any(is_served), "{what} of a hung disk delayed another disk");
        self.daemon.as_ref().expect("it runs").ctl(&["stats", "well"]);
    }
}

impl Drop for Stage {
    fn drop(&mut self) {
        // The daemon cannot end while one of its system calls hangs.
        self.files.resume();
    }
}

#[test]
fn requests_of_a_hung_file_delay_no_other_disk() {
    ["io_uring", "threads"].into_iter().for_each(requests_delay_no_other_disk);
}

fn requests_delay_no_other_disk(ring: &str) {
    let mut stage = Stage::with_ring(ring);
    let changes = [
        ("a read", CMD_READ, 4096, &[][..]),
        ("a write", CMD_WRITE, 4096, &[1; 4096]),
        ("a write of a part of a page", CMD_WRITE, 512, &[2; 512]),
        ("zeroing", CMD_WRITE_ZEROES, 65536, &[]),
        ("a discard", CMD_TRIM, 65536, &[]),
        ("a flush", CMD_FLUSH, 0, &[]),
    ];
    let mut client = stage.scratch.connect_when_served("hung");
    client.write(0, &[9; 512]).unwrap();
    for (what, command, length, data) in changes {
        let before = stage.hang();
        client.send(0, command, 0, length, data).unwrap();
        stage.hangs_alone(before, what);
        stage.files.resume();
        assert_eq!(client.receive().unwrap().error, 0, "{what}, after the file system answered");
        client.take(&mut vec![0; if command == CMD_READ { length as usize } else { 0 }]).unwrap();
    }
    // All requests are sent at once. Each connection has its own part of the disk, except that of
    // the flush.
    let before = stage.hang();
    let mut clients: Vec<Client> =
        changes.iter().map(|_| stage.scratch.connect_when_served("hung")).collect();
    for ((n, client), (_, command, length, data)) in (1..).zip(&mut clients).zip(changes) {
        let offset = if command == CMD_FLUSH { 0 } else { n * MIB };
        client.send(0, command, offset, length, data).unwrap();
    }
    stage.hangs_alone(before, "everything");
    stage.files.resume();
    for (client, (what, ..)) in clients.iter_mut().zip(changes) {
        assert_eq!(client.receive().unwrap().error, 0, "{what}, after the file system answered");
    }
    stage.end();
}

/// More reads hang than a file may have threads without io_uring.
#[test]
fn many_reads_of_a_hung_file_delay_no_other_disk() {
    const READS: u32 = 40;
    // With io_uring, the kernel sends fewer requests to the test file system at the same time.
    for (ring, hung_min) in [("io_uring", 8), ("threads", 16)] {
        let mut stage = Stage::with_ring(ring);
        let mut client = stage.scratch.connect_when_served("hung");
        stage.hang();
        for number in 0..READS {
            client.send(0, CMD_READ, u64::from(number) * 65536, 4096, &[]).unwrap();
        }
        wait_for("reads that hang", || stage.files.waiting() >= hung_min);
        stage.hangs_alone(0, "many reads");
        stage.files.resume();
        for _ in 0..READS {
            assert_eq!(client.receive().unwrap().error, 0, "a read after the file system answered");
            client.take(&mut [0; 4096]).unwrap();
        }
        stage.end();
    }
}

#[test]
fn a_query_for_the_holes_of_a_hung_file_delays_no_other_disk() {
    let mut stage = Stage::new();
    stage.scratch.connect_when_served("hung").write(0, &[9; 4096]).unwrap();
    let uri = stage.scratch.nbd().uri("hung");
    let before = stage.hang();
    let mut query = Tool::new("nbdinfo").args(["--map", &uri]).start();
    stage.hangs_alone(before, "a query for holes");
    stage.files.resume();
    let answer = query.finish(WAIT_MAX);
    assert!(answer.success(), "the query after the file system answered: {}", answer.all());
    stage.end();
}

/// Starts a client command that may have to wait for the file system.
fn command(scratch: &Scratch, args: &[&str]) -> Process {
    let control = format!("unix:{}", scratch.text("ctl.sock"));
    Process::start("hob", Command::new(binary()).args(args).args(["--control", &control])).expect("start hob")
}

#[test]
fn commands_for_a_hung_file_delay_no_other_disk() {
    let mut stage = Stage::new();
    let before = stage.hang();
    let mut resize = command(&stage.scratch, &["disk", "resize", "hung"]);
    stage.hangs_alone(before, "a measurement of the size");
    let before = stage.files.waiting();
    let more = stage.scratch.text("mnt/more.img");
    let mut add = command(&stage.scratch, &["disk", "add", "more", "--backing", &more]);
    stage.hangs_alone(before, "an opening");
    let refused = add.finish(WAIT_MAX);
    assert!(!refused.success() && refused.all().contains(&more), "{}", refused.all());
    stage.hangs_alone(0, "an opening that was given up");
    stage.files.resume();
    let resized = resize.finish(WAIT_MAX);
    assert!(resized.success(), "the measurement after the file system answered: {}", resized.all());
    stage.end();
}

/// hob reads a raw file several times: it looks for an image header, then for the header of an
/// encrypted volume, and then opens the file. Together, these steps must wait only once.
#[test]
fn a_backing_that_hangs_is_refused_after_one_second() {
    let stage = Stage::new();
    // hob refuses an abandoned file without a wait, so each attempt uses another file.
    let name = |attempt: u32| format!("more{attempt}.img");
    (0..ATTEMPTS_MAX).for_each(|attempt| _ = stage.files.add(&name(attempt), Medium::new(SIZE, 1)));
    stage.hang();
    let is_refused_soon = |attempt| {
        let more = stage.scratch.text(&format!("mnt/{}", name(attempt)));
        let args = ["disk", "add", "more", "--backing", &more, "--format", "raw"];
        let start = Instant::now();
        let refused = command(&stage.scratch, &args).finish(WAIT_MAX);
        assert!(!refused.success() && refused.all().contains("does not respond"), "{}", refused.all());
        start.elapsed() < REFUSED_MAX
    };
    assert!((0..ATTEMPTS_MAX).any(is_refused_soon), "the command waits more than once");
    stage.files.resume();
    stage.end();
}

#[test]
fn the_removal_of_a_hung_disk_delays_no_other_disk() {
    let mut stage = Stage::new();
    stage.scratch.connect_when_served("hung").write(0, &[9; 4096]).unwrap();
    stage.hang();
    let args = ["disk", "remove", "hung", "--discard-dirty", "--force", "--yes"];
    let removed = command(&stage.scratch, &args).finish(WAIT_MAX);
    assert!(removed.success(), "{}", removed.all());
    stage.other_disk_is_served("the removal of a hung disk");
    stage.files.resume();
    stage.end();
}

#[test]
fn disks_are_served_although_a_pool_device_hangs_at_the_start() {
    let mut stage = Stage::new();
    stage.files.add("flash.img", Medium::new(64 * MIB, 1));
    let daemon = stage.daemon.take().expect("it runs");
    daemon.ctl(&["pool", "create", "flash", &stage.scratch.text("mnt/flash.img"), "--segment-size", "1M"]);
    daemon.ctl(&["cache", "enable", "well", "--pool", "flash", "--size", "16M", "--mode", "write-through"]);
    daemon.stop();
    stage.hang();
    stage.daemon = Some(stage.scratch.start_daemon());
    stage.well = stage.scratch.connect_when_served("well");
    stage.other_disk_is_served("a pool device that hangs at the start");
    let health = command(&stage.scratch, &["health"]).finish(WAIT_MAX);
    assert!(!health.success() && health.all().contains("flash.img"), "{}", health.all());
    stage.files.resume();
    let is_well = || command(&stage.scratch, &["health"]).finish(WAIT_MAX).success();
    wait_for("the device's return", is_well);
    stage.other_disk_is_served("the device's return");
    stage.end();
}
