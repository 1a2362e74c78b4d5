//! The crash log of a write-back cache is missing or damaged when hob is started after a kill: the
//! loss is reported to the guest and to the operator. A log without a cache is removed.

use std::fs::{OpenOptions, Permissions};
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use conformance::data::{Noise, empty_file};
use conformance::hob::binary;
use conformance::nbd_client::Client;
use conformance::scratch::wait_for;
use conformance::{Daemon, MIB, Scratch};

/// Number of flushes before a kill, and the time between them.
const PAGES: u32 = 6;
const PAUSE: Duration = Duration::from_millis(250);

/// Damages the file of a crash log.
type Damage<'a> = &'a dyn Fn(&Path);

/// A daemon with one disk in write-back mode.
struct Stage {
    scratch: Scratch,
}

impl Stage {
    fn new() -> Stage {
        let scratch = Scratch::new();
        empty_file(&scratch.path("disk.img"), 8 * MIB);
        let config = format!(
            "[[pool]]\nname = \"pool\"\ndevices = [{:?}]\nsize = \"48M\"\nsegment_size = \"1M\"\n\
             [[disk]]\nname = \"vm\"\nbacking = {:?}\n\
             [disk.cache]\npool = \"pool\"\nsize = \"8M\"\nmode = \"write-back\"\ndirty_age_max = 600\n",
            scratch.text("flash"),
            scratch.text("disk.img"),
        );
        scratch.configure(&config);
        Stage { scratch }
    }

    /// Starts the daemon in a boot of the host.
    fn start_in(&self, boot: u32) -> Daemon {
        let _ = std::fs::remove_file(self.scratch.path("ctl.sock"));
        let mut command = Command::new(binary());
        command.args(["daemon", "--config", &self.scratch.text("hob.toml")]);
        command.env("HOB_BOOT_ID", format!("{boot:032x}"));
        Daemon::run(command, &self.scratch.path("ctl.sock"))
    }

    fn start(&self) -> Daemon {
        self.start_in(1)
    }

    fn connect(&self) -> Client {
        self.scratch.connect_when_served("vm")
    }

    /// Waits until the disk has its cache.
    fn wait_for_cache(&self, daemon: &Daemon) {
        let shown = || daemon.ctl(&["disk", "show", "vm", "-o", "json"]);
        wait_for("the cache", || shown().contains("\"active\""));
    }

    /// Lets a guest write after its last flush, and kills the daemon when the write is
    /// acknowledged.
    fn kill_with_unflushed_write(&self, daemon: Daemon, content: u8) {
        self.wait_for_cache(&daemon);
        let mut guest = self.connect();
        // A damaged log is noticed once the new journal ring has a page after its first content, which
        // hob writes in the background.
        for _ in 0..PAGES {
            guest.write(MIB, &[1; 4096]).unwrap();
            guest.flush().expect("nothing is lost");
            std::thread::sleep(PAUSE);
        }
        guest.write(0, &[content; 4096]).unwrap();
        daemon.kill();
    }

    fn crash_logs(&self) -> Vec<PathBuf> {
        let files = std::fs::read_dir(self.scratch.dir()).unwrap().map(|entry| entry.unwrap().path());
        files.filter(|path| path.file_name().unwrap().to_string_lossy().starts_with("hob-")).collect()
    }

    fn crash_log(&self) -> PathBuf {
        let logs = self.crash_logs();
        assert_eq!(logs.len(), 1, "{logs:?}");
        logs[0].clone()
    }
}

fn health(daemon: &Daemon) -> String {
    daemon.try_ctl(&["health"]).all()
}

fn noise(path: &Path) {
    let file = OpenOptions::new().write(true).open(path).unwrap();
    let len = file.metadata().unwrap().len();
    file.write_all_at(&Noise::new(3).bytes(len as usize), 0).unwrap();
}

fn zeroes(path: &Path) {
    let file = OpenOptions::new().write(true).open(path).unwrap();
    let len = file.metadata().unwrap().len();
    file.set_len(0).unwrap();
    file.set_len(len).unwrap();
}

/// hob cannot know what the log described, so it reports a possible loss, once.
#[test]
fn a_lost_or_damaged_crash_log_fails_the_next_flush() {
    let stage = Stage::new();
    let cut = |path: &Path| OpenOptions::new().write(true).open(path).unwrap().set_len(0).unwrap();
    let remove = |path: &Path| std::fs::remove_file(path).unwrap();
    let open = |path: &Path| std::fs::set_permissions(path, Permissions::from_mode(0o666)).unwrap();
    let damages: [(&str, Damage<'_>); 5] = [
        ("removed", &remove),
        ("noise", &noise),
        ("zeroes", &zeroes),
        ("cut", &cut),
        ("writable for others", &open),
    ];
    for (name, damage) in damages {
        stage.kill_with_unflushed_write(stage.start(), 7);
        damage(&stage.crash_log());
        let daemon = stage.start();
        let mut guest = stage.connect();
        assert!(guest.flush().is_err(), "{name}: an acknowledged write may be lost");
        guest.flush().unwrap_or_else(|error| panic!("{name}: the guest was told: {error}"));
        let shown = health(&daemon);
        assert!(shown.contains("task-failed") && shown.contains("crash log"), "{name}: {shown}");
        let id = shown.split("task ").nth(1).and_then(|rest| rest.split(' ').next()).expect("a number");
        daemon.ctl(&["tasks", "acknowledge", id]);
        drop(guest);
        let log = stage.crash_log();
        if name == "writable for others" {
            assert!(health(&daemon).contains("crash-log-missing"), "{}", health(&daemon));
            std::fs::remove_file(log).unwrap();
        } else {
            assert!(!health(&daemon).contains("crash"), "{name}: {}", health(&daemon));
        }
        daemon.stop();
    }
}

/// No flush fails if the log is there, if the cache was closed, or if the host has restarted.
#[test]
fn a_crash_log_that_is_there_or_not_needed_fails_no_flush() {
    let stage = Stage::new();
    stage.kill_with_unflushed_write(stage.start(), 2);
    let daemon = stage.start();
    let mut guest = stage.connect();
    guest.flush().expect("the log is there");
    assert_eq!(guest.read(0, 4096).unwrap(), [2; 4096]);
    guest.write(0, &[3; 4096]).unwrap();
    drop(guest);
    daemon.stop();
    assert_eq!(stage.crash_logs(), [] as [PathBuf; 0], "a closed cache has no log");
    let daemon = stage.start();
    let mut guest = stage.connect();
    guest.flush().expect("the cache was closed");
    assert_eq!(guest.read(0, 4096).unwrap(), [3; 4096]);
    drop(guest);
    stage.kill_with_unflushed_write(daemon, 4);
    std::fs::remove_file(stage.crash_log()).unwrap();
    let daemon = stage.start_in(2);
    stage.connect().flush().expect("the guest has restarted with the host");
    assert!(!health(&daemon).contains("crash"), "{}", health(&daemon));
    // The first kill in this boot is noticed.
    stage.kill_with_unflushed_write(daemon, 5);
    std::fs::remove_file(stage.crash_log()).unwrap();
    let daemon = stage.start_in(2);
    assert!(stage.connect().flush().is_err(), "an acknowledged write may be lost");
    daemon.stop();
}

/// A guest that gets the report only after a second kill gets it once.
#[test]
fn a_lost_crash_log_is_reported_after_a_second_kill() {
    let stage = Stage::new();
    stage.kill_with_unflushed_write(stage.start(), 7);
    std::fs::remove_file(stage.crash_log()).unwrap();
    let daemon = stage.start();
    drop(stage.connect());
    daemon.kill();
    let daemon = stage.start();
    let mut guest = stage.connect();
    assert!(guest.flush().is_err(), "an acknowledged write may be lost");
    guest.flush().expect("the guest was told");
    drop(guest);
    stage.connect().flush().expect("the guest was told");
    daemon.stop();
}

#[test]
fn health_shows_a_crash_log_that_disappears() {
    let stage = Stage::new();
    let daemon = stage.start();
    stage.wait_for_cache(&daemon);
    assert!(!health(&daemon).contains("crash-log-missing"), "{}", health(&daemon));
    std::fs::remove_file(stage.crash_log()).unwrap();
    let shown = health(&daemon);
    assert!(shown.contains("crash-log-missing") && shown.contains("was removed"), "{shown}");
    daemon.ctl(&["cache", "set", "vm", "--mode", "write-through"]);
    assert!(!health(&daemon).contains("crash-log-missing"), "write-through needs none: {}", health(&daemon));
    daemon.stop();
}

#[test]
fn a_discarded_cache_leaves_no_crash_log() {
    let stage = Stage::new();
    for command in [&["cache", "discard-dirty", "vm"][..], &["disk", "remove", "vm", "--discard-dirty"][..]] {
        stage.kill_with_unflushed_write(stage.start(), 7);
        let log = stage.crash_log();
        let (disk, away) = (stage.scratch.path("disk.img"), stage.scratch.path("away"));
        std::fs::rename(&disk, &away).unwrap();
        let daemon = stage.start();
        daemon.ctl(&[command, &["--yes"]].concat());
        assert!(!log.exists(), "{command:?} leaves the log of the cache that it discards");
        std::fs::rename(&away, &disk).unwrap();
        daemon.stop();
    }
    // The disk was removed, so its next cache belongs to no disk.
    let stage = Stage::new();
    stage.kill_with_unflushed_write(stage.start(), 7);
    let log = stage.crash_log();
    std::fs::remove_dir_all(stage.scratch.path("state")).unwrap();
    let config = std::fs::read_to_string(stage.scratch.path("hob.toml")).unwrap();
    let without_disk = config.split("[[disk]]").next().unwrap();
    stage.scratch.write_config(without_disk);
    let daemon = stage.start();
    let pool = daemon.pool("pool");
    let owner = pool["orphans"][0]["owner"].as_str().expect("an orphan");
    daemon.ctl(&["pool", "discard-orphan", "pool", owner, "--yes"]);
    assert!(!log.exists(), "the log of the orphan is left");
    daemon.stop();
}

/// The mark of unflushed changes of a disk in an object store is treated like a crash log.
#[test]
fn a_lost_mark_of_changes_in_memory_fails_the_next_flush() {
    let stage = Stage::new();
    let spec = format!("objects+file://{}", stage.scratch.text("objects"));
    let made = conformance::hob::command(&["objects", "create", &spec, "--size", "8M"]);
    assert!(made.success(), "{}", made.all());
    let config = format!("[[disk]]\nname = \"vm\"\nbacking = {spec:?}\n");
    stage.scratch.configure(&config);
    let killed = |content: u8| {
        let daemon = stage.start();
        stage.connect().write(0, &[content; 4096]).unwrap();
        daemon.kill();
        std::fs::remove_file(stage.crash_log()).unwrap();
    };
    killed(1);
    let daemon = stage.start();
    let mut guest = stage.connect();
    assert!(guest.flush().is_err(), "an acknowledged write may be lost");
    guest.flush().expect("the guest was told");
    drop(guest);
    daemon.stop();
    // A disk that was closed has no mark.
    assert!(stage.crash_logs().is_empty(), "{:?}", stage.crash_logs());
    let daemon = stage.start();
    stage.connect().flush().expect("nothing is lost");
    daemon.stop();
    // After a restart of the host with its guests, a disk has no mark either.
    killed(2);
    let daemon = stage.start_in(2);
    stage.connect().flush().expect("the guest has restarted with the host");
    daemon.stop();
}
