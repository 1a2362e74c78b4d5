//! An operator can always remove a disk, and discard dirty data: `hob disk remove --discard-dirty`
//! and `hob cache discard-dirty` end within 10 seconds while the backing hangs or has failed, even
//! with requests that would wait for the backing for ever. The same holds for the drain of a cache
//! without space for a journal, before its disk is served, if the backing is an NBD server.
//!
//! The tests with a hanging filesystem mount and freeze one, and need root and loop devices.

use std::io::{Error, ErrorKind};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use conformance::data::{Noise, noise_file};
use conformance::nbd_client::{CMD_READ, CMD_TRIM, CMD_WRITE_ZEROES, Client, EIO};
use conformance::process::Process;
use conformance::scratch::wait_for;
use conformance::{Daemon, Loop, MIB, Scratch, Tool, Unmount};
use rustix::process::Signal;
use serde_json::Value;

const SIZE: u64 = 16 * MIB;

/// Maximum time of every command: the ten seconds that hob promises, and stalls of the test's host.
/// Without the promise, the commands would wait for ever.
const END_MAX: Duration = Duration::from_secs(20);

/// Time in which the control API must have answered at least once during a command.
const MEANWHILE: Duration = Duration::from_secs(5);

/// Offset of the dirty data.
const DIRTY: u64 = MIB;

struct Stage {
    scratch: Scratch,
}

impl Stage {
    fn new() -> Stage {
        let scratch = Scratch::new();
        scratch.configure("");
        noise_file(&scratch.path("disk.img"), SIZE, 1);
        Stage { scratch }
    }

    /// Starts a daemon with a pool.
    #[track_caller]
    fn start(&self) -> Daemon {
        let daemon = self.scratch.start_daemon();
        let flash = self.scratch.text("flash");
        daemon.ctl(&["pool", "create", "fast", &flash, "--size", "64M", "--segment-size", "1M"]);
        daemon
    }

    /// Serves `backing` as `vm` with a cache that destages nothing by itself.
    #[track_caller]
    fn add(&self, daemon: &Daemon, backing: &str) {
        daemon.ctl(&["disk", "add", "vm", "--backing", backing, "--backing-timeout", "forever"]);
        let lazy = ["--mode", "write-back", "--dirty-age-max", "0", "--dirty-start", "60"];
        let cache = ["cache", "enable", "vm", "--pool", "fast", "--size", "16M", "--block-size", "4K"];
        daemon.ctl(&[&cache[..], &lazy[..]].concat());
    }

    #[track_caller]
    fn connect(&self) -> Client {
        self.scratch.connect("vm")
    }
}

/// Returns the free space of the pool, bytes.
#[track_caller]
fn room(daemon: &Daemon) -> u64 {
    daemon.pool("fast")["free"].as_u64().expect("a number")
}

/// Runs a command, which must end in time while the control API answers other requests.
#[track_caller]
fn ends(daemon: &Daemon, args: &[&str]) {
    let start = Instant::now();
    let mut answered = 0;
    std::thread::scope(|scope| {
        let command = scope.spawn(|| daemon.ctl(args));
        while !command.is_finished() {
            daemon.ctl(&["disk", "list"]);
            answered += u32::from(!command.is_finished());
            std::thread::sleep(Duration::from_millis(50));
        }
        command.join().expect("the command succeeds");
    });
    let took = start.elapsed();
    assert!(took < END_MAX, "{args:?} took {took:?}");
    // A fast command may end before the first answer.
    assert!(answered > 0 || took < MEANWHILE, "the API did not answer while {args:?} took {took:?}");
}

/// Waits until the only disk has this many requests without an answer.
#[track_caller]
fn wait_until_in_flight(stage: &Stage, count: u64) {
    let socket = stage.scratch.text("ctl.sock");
    wait_for("requests in flight", || {
        let load = Tool::new("curl").args(["-s", "--unix-socket", &socket, "http://hob/v1/load"]).run();
        let load: Value = serde_json::from_str(&load).unwrap_or_else(|e| panic!("{e}: {load}"));
        load[0]["in_flight"].as_u64() >= Some(count)
    });
    // The threads that perform the requests may start a little later.
    std::thread::sleep(Duration::from_millis(300));
}

/// Sends requests that need the backing. Returns when they wait.
#[track_caller]
fn ask_backing(stage: &Stage, guest: &mut Client) {
    guest.send(0, CMD_READ, 8 * MIB, 65536, &[]).unwrap();
    // More than a quarter of the cache, so the zeroes go to the backing.
    guest.send(0, CMD_WRITE_ZEROES, 9 * MIB, 7 * MIB as u32, &[]).unwrap();
    wait_until_in_flight(stage, 2);
}

/// Checks that a connection with waiting requests ends, with any result of these requests.
fn is_disconnected(guest: &mut Client) {
    let is_silence = |error: &Error| matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut);
    wait_for("the end of the connection", || guest.receive().is_err_and(|error| !is_silence(&error)));
}

#[track_caller]
fn removes(end: impl Fn(&mut Process), with_drain: bool) {
    let stage = Stage::new();
    let daemon = stage.start();
    let free = room(&daemon);
    let mut server = stage.scratch.serve_image("disk.img");
    stage.add(&daemon, &stage.scratch.backing_uri());
    let mut guest = stage.connect();
    guest.write(DIRTY, &Noise::new(2).bytes(MIB as usize)).unwrap();
    guest.flush().unwrap();
    end(&mut server);
    if with_drain {
        daemon.ctl(&["drain", "vm", "--no-wait"]);
    }
    ask_backing(&stage, &mut guest);
    ends(&daemon, &["disk", "remove", "vm", "--discard-dirty", "--force", "--yes"]);
    is_disconnected(&mut guest);
    assert_eq!(daemon.json(&["disk", "list"]), Value::Array(vec![]));
    assert_eq!(room(&daemon), free, "its segments are free");
    server.kill();
    let _server = stage.scratch.serve_image("disk.img");
    stage.add(&daemon, &stage.scratch.backing_uri());
    let mut guest = stage.connect();
    assert!(guest.read(0, SIZE as u32).unwrap() == stage.scratch.read("disk.img"), "the disk is its backing");
    daemon.stop();
}

#[test]
fn a_disk_whose_backing_hangs_is_removed_within_ten_seconds() {
    removes(|server| server.signal(Signal::STOP), false);
}

#[test]
fn a_disk_whose_backing_is_dead_is_removed_within_ten_seconds() {
    removes(Process::kill, false);
}

#[test]
fn a_disk_that_is_drained_to_a_hung_backing_is_removed_within_ten_seconds() {
    removes(|server| server.signal(Signal::STOP), true);
}

/// A program reads the disk's file and would wait for ever. With `--force`, the program gets an
/// error.
#[test]
fn a_disk_whose_file_is_open_is_removed_with_force_while_the_backing_hangs() {
    let stage = Stage::new();
    let path = stage.scratch.path("vm.img");
    let _unmount = Unmount::at(&path);
    let daemon = stage.start();
    let mut server = stage.scratch.serve_image("disk.img");
    let (uri, fuse) = (stage.scratch.backing_uri(), stage.scratch.text("vm.img"));
    let timeout = ["--backing-timeout", "forever"];
    daemon.ctl(&[&["disk", "add", "vm", "--backing", &uri, "--fuse", &fuse], &timeout[..]].concat());
    let file = std::fs::File::open(&path).unwrap();
    server.signal(Signal::STOP);
    std::thread::scope(|scope| {
        let read = scope.spawn(|| file.read_at(&mut [0; 4096], 8 * MIB));
        std::thread::sleep(Duration::from_millis(500));
        let refused = daemon.try_ctl(&["disk", "remove", "vm", "--discard-dirty", "--yes"]);
        assert!(!refused.success() && refused.all().contains("vm.img"), "{}", refused.all());
        assert_eq!(daemon.disk("vm")["state"], "online");
        assert!(!read.is_finished(), "nothing was changed");
        ends(&daemon, &["disk", "remove", "vm", "--discard-dirty", "--force", "--yes"]);
        assert!(read.join().unwrap().is_err());
    });
    assert_eq!(daemon.json(&["disk", "list"]), Value::Array(vec![]));
    assert!(!std::fs::read_to_string("/proc/mounts").unwrap().contains(&fuse), "it is unmounted");
    daemon.stop();
}

#[track_caller]
fn discards(end: impl Fn(&mut Process)) {
    let stage = Stage::new();
    let daemon = stage.start();
    let mut server = stage.scratch.serve_image("disk.img");
    stage.add(&daemon, &stage.scratch.backing_uri());
    let mut guest = stage.connect();
    guest.write(DIRTY, &Noise::new(2).bytes(MIB as usize)).unwrap();
    guest.flush().unwrap();
    end(&mut server);
    ask_backing(&stage, &mut guest);
    ends(&daemon, &["cache", "discard-dirty", "vm", "--yes"]);
    for _ in 0..2 {
        assert_eq!(guest.receive().unwrap().error, EIO, "what waited failed");
    }
    assert_eq!(daemon.stats("vm").number("dirty_bytes"), Some(0.0));
    assert_eq!(daemon.disk("vm")["state"], "online");
    server.kill();
    let _server = stage.scratch.serve_image("disk.img");
    let mut read = Vec::new();
    wait_for("the disk to be back", || guest.read(DIRTY, MIB as u32).map(|bytes| read = bytes).is_ok());
    assert!(
        read == stage.scratch.read("disk.img")[DIRTY as usize..][..MIB as usize],
        "discarded data is not shown"
    );
    assert!(guest.flush().is_err(), "the guest hears that acknowledged writes are lost");
    guest.flush().expect("once");
    guest.write(DIRTY, &Noise::new(3).bytes(4096)).unwrap();
    guest.flush().unwrap();
    assert_eq!(guest.read(DIRTY, 4096).unwrap(), Noise::new(3).bytes(4096));
    daemon.stop();
}

#[test]
fn dirty_data_is_discarded_within_ten_seconds_while_the_backing_hangs() {
    discards(|server| server.signal(Signal::STOP));
}

#[test]
fn dirty_data_is_discarded_within_ten_seconds_while_the_backing_is_dead() {
    discards(Process::kill);
}

/// A frozen filesystem: a call that changes a file on it hangs in the kernel and cannot be
/// cancelled.
struct Frozen(std::path::PathBuf);

impl Frozen {
    #[track_caller]
    fn freeze(at: &Path) -> Frozen {
        Tool::new("fsfreeze").arg("--freeze").arg(at).run();
        Frozen(at.to_owned())
    }
}

impl Drop for Frozen {
    fn drop(&mut self) {
        let _ = Command::new("fsfreeze").arg("--unfreeze").arg(&self.0).status();
    }
}

/// Creates a loop device with an empty filesystem.
fn filesystem(stage: &Stage) -> Loop {
    let path = stage.scratch.path("fs.img");
    std::fs::File::create(&path).unwrap().set_len(64 * MIB).unwrap();
    Tool::new("mkfs.ext4").arg("-q").arg(&path).run();
    Loop::on(&path, false)
}

/// Creates the image of a disk on that filesystem, which is mounted.
fn disk_on_it(stage: &Stage) -> String {
    let image = stage.scratch.text("mnt/vm.img");
    std::fs::write(&image, vec![0; SIZE as usize]).unwrap();
    std::fs::File::open(&image).unwrap().sync_all().unwrap();
    image
}

/// Freezes a filesystem while `vm` is drained to it. `test` receives the daemon, the guest and the
/// earlier free space, and thaws the filesystem.
fn on_frozen(test: impl Fn(&Stage, &Daemon, &mut Client, &u64, Frozen, &str)) {
    let stage = Stage::new();
    let device = filesystem(&stage);
    let mount = device.mount(&stage.scratch.path("mnt"), "rw");
    let image = disk_on_it(&stage);
    let daemon = stage.start();
    let free = room(&daemon);
    stage.add(&daemon, &image);
    let mut guest = stage.connect();
    guest.write(DIRTY, &[2; MIB as usize]).unwrap();
    guest.flush().unwrap();
    let frozen = Frozen::freeze(&stage.scratch.path("mnt"));
    daemon.ctl(&["drain", "vm", "--no-wait"]);
    guest.send(0, CMD_TRIM, 12 * MIB, 65536, &[]).unwrap();
    wait_until_in_flight(&stage, 1);
    test(&stage, &daemon, &mut guest, &free, frozen, &image);
    daemon.stop();
    mount.unmount();
}

/// Checks that bytes are the former dirty data or the older content, and never data of another disk
/// that used the same memory.
#[track_caller]
fn is_old_or_new(bytes: &[u8]) {
    let is_whole = |sector: &[u8]| [0_u8, 2].iter().any(|byte| *sector == [*byte; 512]);
    assert!(bytes.chunks(512).all(is_whole), "neither what was there nor what was written");
}

#[test]
fn a_disk_on_a_frozen_filesystem_is_removed_within_ten_seconds() {
    on_frozen(|stage, daemon, guest, free, frozen, image| {
        ends(daemon, &["disk", "remove", "vm", "--discard-dirty", "--force", "--yes"]);
        is_disconnected(guest);
        assert_eq!(room(daemon), *free, "its segments are free");
        // The memory of the hanging requests is not used for other disks. The next disk has other
        // bytes.
        let _server = stage.scratch.serve_image("disk.img");
        stage.add(daemon, &stage.scratch.backing_uri());
        let mut other = stage.connect();
        other.write(DIRTY, &[7; 4 * MIB as usize]).unwrap();
        daemon.ctl(&["drain", "vm"]);
        assert!(other.read(DIRTY, 4 * MIB as u32).unwrap().iter().all(|byte| *byte == 7));
        let refused = daemon.try_ctl(&["disk", "add", "again", "--backing", image]);
        assert!(!refused.success() && refused.all().contains("in use"), "{}", refused.all());
        drop(frozen);
        wait_for("the end of what hung", || {
            daemon.try_ctl(&["disk", "add", "again", "--backing", image]).success()
        });
        let mut again = stage.scratch.connect("again");
        is_old_or_new(&again.read(0, SIZE as u32).unwrap());
    });
}

#[test]
fn a_disk_returns_after_discarding_dirty_data_on_a_frozen_filesystem() {
    on_frozen(|stage, daemon, guest, free, frozen, _| {
        ends(daemon, &["cache", "discard-dirty", "vm", "--yes"]);
        is_disconnected(guest);
        let shown = daemon.disk("vm");
        assert_eq!(shown["state"], "offline", "{shown}");
        assert!(shown["reason"].as_str().is_some_and(|why| why.contains("hang")), "{shown}");
        assert_eq!(room(daemon), *free);
        // hob does not open the disk again while the filesystem is frozen.
        std::thread::sleep(Duration::from_secs(6));
        let again = daemon.disk("vm");
        assert_eq!(again["reason"], shown["reason"]);
        drop(frozen);
        wait_for("the disk to be back", || daemon.disk("vm")["state"] == "online");
        let mut guest = stage.connect();
        is_old_or_new(&guest.read(0, SIZE as u32).unwrap());
        assert!(guest.flush().is_err(), "its connection ended before it was told");
        guest.write(DIRTY, &[5; 4096]).unwrap();
        guest.flush().unwrap();
    });
}

/// The removal of a disk without dirty data continues in the background, and does not wait for ever
/// either.
#[test]
fn a_removal_that_waits_for_a_frozen_filesystem_is_a_task_and_ends() {
    let stage = Stage::new();
    let device = filesystem(&stage);
    let mount = device.mount(&stage.scratch.path("mnt"), "rw");
    let image = disk_on_it(&stage);
    let daemon = stage.start();
    daemon.ctl(&["disk", "add", "vm", "--backing", &image]);
    let mut guest = stage.connect();
    let frozen = Frozen::freeze(&stage.scratch.path("mnt"));
    guest.send(0, CMD_TRIM, 12 * MIB, 65536, &[]).unwrap();
    wait_until_in_flight(&stage, 1);
    let busy = daemon.try_ctl(&["disk", "remove", "vm", "--force", "--yes"]);
    assert!(!busy.success() && busy.all().contains("as task "), "{}", busy.all());
    let task = || daemon.json(&["tasks"])[0].clone();
    assert_eq!((&task()["what"], &task()["state"]), (&"disk remove".into(), &"running".into()));
    let cancel = daemon.try_ctl(&["tasks", "cancel", &task()["id"].to_string()]);
    assert!(!cancel.success() && cancel.all().contains("cannot be cancelled"), "{}", cancel.all());
    wait_for("the end of the removal", || task()["state"] == "done");
    assert_eq!(daemon.json(&["disk", "list"]), Value::Array(vec![]));
    daemon.ctl(&["tasks", "acknowledge", &task()["id"].to_string()]);
    assert_eq!(daemon.json(&["tasks"]), Value::Array(vec![]));
    drop(frozen);
    daemon.stop();
    mount.unmount();
}

/// Kills hob while `vm` has dirty data and the pool has no space for the next journal, and starts
/// hob again with a backing whose writes take `write_delay` seconds. Returns the dirty data.
#[track_caller]
fn restart_with_full_pool(stage: &Stage, write_delay: &str) -> (Daemon, Process, Vec<u8>) {
    let daemon = stage.start();
    let mut server = stage.scratch.serve_image("disk.img");
    stage.add(&daemon, &stage.scratch.backing_uri());
    let mut guest = stage.connect();
    let written = Noise::new(2).bytes(MIB as usize);
    guest.write(DIRTY, &written).unwrap();
    guest.flush().unwrap();
    let free = format!("{}M", room(&daemon) / MIB);
    daemon.ctl(&["swap", "create", "--pool", "fast", "--size", &free, "--off"]);
    assert_eq!(room(&daemon), 0);
    drop(guest);
    daemon.kill();
    server.kill();
    let server = stage.scratch.serve_image_slowly("disk.img", write_delay);
    (stage.scratch.start_daemon(), server, written)
}

/// Waits until hob writes the dirty data of `vm` to the backing before it serves the disk.
#[track_caller]
fn wait_for_drain_before_service(daemon: &Daemon) {
    wait_for("the drain before service", || {
        let disk = daemon.disk("vm");
        let reason = disk["reason"].as_str().unwrap_or_default();
        disk["state"] == "offline" && reason.contains("is being written to the backing")
    });
}

#[track_caller]
fn wait_until_online(daemon: &Daemon) {
    wait_for("vm to be online", || daemon.disk("vm")["state"] == "online");
}

#[test]
fn without_space_for_a_journal_dirty_data_is_on_the_backing_before_the_disk_is_served() {
    let stage = Stage::new();
    // The drain lasts longer than a busy host needs to see it.
    let (daemon, mut server, written) = restart_with_full_pool(&stage, "600");
    wait_for_drain_before_service(&daemon);
    // The drain is repeated from its start.
    daemon.kill();
    server.kill();
    let _server = stage.scratch.serve_image_slowly("disk.img", "3");
    let daemon = stage.scratch.start_daemon();
    wait_until_online(&daemon);
    assert!(
        stage.scratch.read("disk.img")[DIRTY as usize..][..MIB as usize] == written,
        "the backing has the data"
    );
    assert_eq!(daemon.stats("vm").number("dirty_bytes"), Some(0.0));
    // The new cache leaves space for its next journal.
    let mut guest = stage.connect();
    let newer = Noise::new(3).bytes(65536);
    guest.write(DIRTY, &newer).unwrap();
    guest.flush().unwrap();
    drop(guest);
    daemon.kill();
    let daemon = stage.scratch.start_daemon();
    wait_until_online(&daemon);
    wait_for("the cache", || daemon.stats("vm").number("dirty_bytes") == Some(65536.0));
    let mut guest = stage.connect();
    assert!(guest.read(DIRTY, MIB as u32).unwrap() == [&newer[..], &written[65536..]].concat());
    daemon.stop();
}

#[test]
fn a_drain_before_service_to_a_hung_backing_ends_when_its_data_is_discarded() {
    let stage = Stage::new();
    let before = stage.scratch.read("disk.img");
    let (daemon, mut server, _) = restart_with_full_pool(&stage, "600");
    wait_for_drain_before_service(&daemon);
    ends(&daemon, &["cache", "discard-dirty", "vm", "--yes"]);
    wait_until_online(&daemon);
    assert!(stage.connect().read(DIRTY, MIB as u32).unwrap() == before[DIRTY as usize..][..MIB as usize]);
    assert_eq!(daemon.stats("vm").number("dirty_bytes"), Some(0.0));
    server.kill();
    daemon.stop();
}
