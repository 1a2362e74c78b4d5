//! A daemon whose state is older than its flash, or whose flash or backing is not where it was,
//! serves no old data.

use std::fs::OpenOptions;
use std::os::unix::fs::FileExt;
use std::path::Path;

use conformance::data::empty_file;
use conformance::nbd_client::Client;
use conformance::scratch::wait_for;
use conformance::{Daemon, MIB, Scratch};

const SIZE: u64 = 16 * MIB;
/// Offset of the first segment in a pool file, bytes.
const DATA_OFFSET: u64 = 2 * MIB;
const POOL_FILE: u64 = 64 * MIB;

struct Stage {
    scratch: Scratch,
}

impl Stage {
    /// Creates a pool with one device, and a disk with a cache in this mode.
    fn new(mode: &str) -> (Stage, Daemon) {
        let scratch = Scratch::new();
        scratch.configure("");
        empty_file(&scratch.path("disk.img"), SIZE);
        let stage = Stage { scratch };
        let daemon = stage.start();
        daemon.tell(&format!("pool create fast {} --size 64M --segment-size 1M", stage.scratch.text("a")));
        daemon.ctl(&["disk", "add", "vm", "--backing", &stage.scratch.text("disk.img")]);
        let enable =
            ["cache", "enable", "vm", "--pool", "fast", "--size", "16M", "--mode", mode, "--persistent"];
        daemon.ctl(&enable);
        (stage, daemon)
    }

    /// Creates a pool with two devices. Returns the paths of the devices.
    fn with_two_devices() -> (Stage, Daemon, [String; 2]) {
        let (stage, daemon) = Stage::new("write-back");
        let devices = ["a", "b"].map(|name| stage.scratch.text(name));
        daemon.ctl(&["pool", "add-device", "fast", &devices[1], "--size", "64M"]);
        (stage, daemon, devices)
    }

    fn start(&self) -> Daemon {
        let _ = std::fs::remove_file(self.scratch.path("ctl.sock"));
        self.scratch.start_daemon()
    }

    fn connect(&self) -> Client {
        self.scratch.connect_when_served("vm")
    }

    fn write(&self, byte: u8) {
        let mut client = self.connect();
        client.write(0, &vec![byte; MIB as usize]).unwrap();
        client.flush().unwrap();
    }

    #[track_caller]
    fn has(&self, byte: u8) {
        let read = self.connect().read(0, MIB as u32).unwrap();
        assert!(read.iter().all(|found| *found == byte), "{} instead of {byte}", read[0]);
    }

    /// Keeps a copy of the state directory.
    fn keep_state(&self) {
        copy(&self.scratch.path("state"), &self.scratch.path("kept"));
    }

    /// Puts the kept copy in place of the state directory.
    fn restore_state(&self) {
        std::fs::remove_dir_all(self.scratch.path("state")).unwrap();
        std::fs::rename(self.scratch.path("kept"), self.scratch.path("state")).unwrap();
    }
}

fn copy(from: &Path, to: &Path) {
    std::fs::create_dir(to).unwrap();
    for entry in std::fs::read_dir(from).unwrap().map(Result::unwrap) {
        let to = to.join(entry.file_name());
        if entry.file_type().unwrap().is_dir() {
            copy(&entry.path(), &to);
        } else if entry.file_type().unwrap().is_file() {
            std::fs::copy(entry.path(), &to).unwrap();
        }
    }
}

fn shown(daemon: &Daemon) -> String {
    daemon.ctl(&["disk", "show", "vm"])
}

#[test]
fn a_state_from_before_write_back_loses_no_dirty_data() {
    let (stage, daemon) = Stage::new("write-through");
    stage.write(1);
    stage.keep_state();
    daemon.ctl(&["cache", "set", "vm", "--mode", "write-back"]);
    stage.write(2);
    daemon.kill();
    stage.restore_state();
    let _daemon = stage.start();
    stage.has(2);
}

#[test]
fn a_state_from_before_a_device_was_added_serves_no_old_data() {
    let (stage, daemon) = Stage::new("write-back");
    stage.write(1);
    stage.keep_state();
    let (a, b) = (stage.scratch.text("a"), stage.scratch.text("b"));
    daemon.ctl(&["pool", "add-device", "fast", &b, "--size", "64M"]);
    daemon.ctl(&["pool", "set-device", "fast", &a, "--admission", "out"]);
    daemon.ctl(&["cache", "resize", "vm", "24M"]);
    let mut client = stage.connect();
    (0..SIZE / MIB).for_each(|at| client.write(at * MIB, &vec![2; MIB as usize]).unwrap());
    client.flush().unwrap();
    daemon.kill();
    stage.restore_state();
    let daemon = stage.start();
    wait_for("the disk to be refused", || shown(&daemon).contains("unknown-device-1"));
    let health = daemon.try_ctl(&["health"]).all();
    assert!(health.contains("does not know this device"), "{health}");
    daemon.ctl(&["pool", "add-device", "fast", &b]);
    stage.has(2);
    let pool = daemon.ctl(&["pool", "show", "fast"]);
    assert!(pool.contains(&b) && !pool.contains("unknown-device"), "{pool}");
}

/// The older state says that the cache writes through. It proves nothing about a device that was
/// added later.
#[test]
fn no_disk_is_served_while_a_device_is_unknown() {
    let (stage, daemon) = Stage::new("write-through");
    stage.write(1);
    stage.keep_state();
    let (a, b) = (stage.scratch.text("a"), stage.scratch.text("b"));
    daemon.ctl(&["pool", "add-device", "fast", &b, "--size", "64M"]);
    daemon.ctl(&["pool", "set-device", "fast", &a, "--admission", "out"]);
    daemon.ctl(&["cache", "disable", "vm"]);
    daemon.ctl(&["cache", "enable", "vm", "--pool", "fast", "--size", "16M", "--mode", "write-back"]);
    stage.write(2);
    daemon.kill();
    stage.restore_state();
    let daemon = stage.start();
    wait_for("the disk to be refused", || shown(&daemon).contains("/unknown-device-1"));
    assert!(shown(&daemon).contains("pool remove-device fast /unknown-device-1"), "{}", shown(&daemon));
    daemon.ctl(&["pool", "add-device", "fast", &b]);
    // The newer cache belongs to no disk of the older state.
    wait_for("the cache to be known", || {
        daemon.try_ctl(&["health"]).all().contains("orphan-dirty") && shown(&daemon).contains("cache adopt")
    });
    let shown = shown(&daemon);
    let owner = shown.split("hob cache adopt vm ").nth(1).and_then(|rest| rest.split('\'').next());
    daemon.ctl(&["cache", "adopt", "vm", owner.expect("the owner is named")]);
    stage.has(2);
}

#[test]
fn an_unknown_device_can_be_given_up() {
    let (stage, daemon) = Stage::new("write-back");
    stage.write(1);
    daemon.ctl(&["drain", "vm"]);
    stage.keep_state();
    let b = stage.scratch.text("b");
    daemon.ctl(&["pool", "add-device", "fast", &b, "--size", "64M"]);
    daemon.kill();
    stage.restore_state();
    let daemon = stage.start();
    daemon.ctl(&["pool", "remove-device", "fast", "/unknown-device-1", "--yes"]);
    stage.has(1);
    daemon.stop();
    let daemon = stage.start();
    assert!(!daemon.ctl(&["pool", "show", "fast"]).contains("unknown-device"));
}

/// The disk has dirty data on a device that is missing, so its backing has older data.
#[test]
fn a_backing_is_not_added_again_while_its_disk_waits_for_a_device() {
    let (stage, daemon, [a, b]) = Stage::with_two_devices();
    daemon.ctl(&["pool", "set-device", "fast", &a, "--admission", "out"]);
    daemon.ctl(&["cache", "resize", "vm", "24M"]);
    let mut client = stage.connect();
    (0..SIZE / MIB).for_each(|at| client.write(at * MIB, &vec![2; MIB as usize]).unwrap());
    client.flush().unwrap();
    daemon.kill();
    std::fs::rename(&b, stage.scratch.path("away")).unwrap();
    let daemon = stage.start();
    wait_for("the disk to be refused", || shown(&daemon).contains("missing"));
    let link = stage.scratch.path("link.img");
    std::fs::hard_link(stage.scratch.path("disk.img"), &link).unwrap();
    let link = link.to_str().unwrap().to_owned();
    for path in [&link, &stage.scratch.text("disk.img")] {
        let said = daemon.try_ctl(&["disk", "add", "again", "--backing", path]).all();
        assert!(said.contains("the disk vm, which is offline, may have dirty data"), "{said}");
    }
    std::fs::rename(stage.scratch.path("away"), &b).unwrap();
    stage.has(2);
}

#[test]
fn a_device_that_is_an_older_copy_of_itself_is_noticed() {
    for has_ring in [false, true] {
        let (stage, daemon) = Stage::new("write-back");
        let (a, copy) = (stage.scratch.path("a"), stage.scratch.path("copy"));
        if !has_ring {
            daemon.ctl(&["cache", "disable", "vm"]);
        }
        stage.write(1);
        daemon.stop();
        std::fs::copy(&a, &copy).unwrap();
        let daemon = stage.start();
        if !has_ring {
            daemon.ctl(&["cache", "enable", "vm", "--pool", "fast", "--size", "16M", "--mode", "write-back"]);
        }
        stage.write(2);
        // The command waits until the recovery has ended, and hob's state has the new ring's number.
        wait_for("the end of the recovery", || {
            daemon
                .try_ctl(&["cache", "set", "vm", "--mode", "write-back"])
                .status
                .is_some_and(|status| status.success())
        });
        daemon.kill();
        std::fs::copy(&copy, &a).unwrap();
        let daemon = stage.start();
        let expected = if has_ring { "only an older journal" } else { "no valid page of the journal" };
        wait_for("the disk to be refused", || shown(&daemon).contains(expected));
        daemon.ctl(&["cache", "discard-dirty", "vm", "--yes"]);
        stage.connect();
    }
}

#[test]
fn a_journal_without_a_valid_page_is_not_an_empty_cache() {
    let (stage, daemon) = Stage::new("write-back");
    stage.write(1);
    daemon.kill();
    let file = OpenOptions::new().write(true).open(stage.scratch.path("a")).unwrap();
    for at in (DATA_OFFSET..POOL_FILE).step_by(MIB as usize) {
        file.write_all_at(&vec![0x55; MIB as usize], at).unwrap();
    }
    let daemon = stage.start();
    wait_for("the disk to be refused", || shown(&daemon).contains("no valid page of the journal"));
    daemon.ctl(&["cache", "discard-dirty", "vm", "--yes"]);
    stage.has(0);
}

#[test]
fn a_moved_backing_is_not_added_while_its_disk_has_dirty_data() {
    let (stage, daemon) = Stage::new("write-back");
    stage.write(1);
    daemon.kill();
    let (image, moved) = (stage.scratch.path("disk.img"), stage.scratch.path("moved.img"));
    std::fs::rename(&image, &moved).unwrap();
    let daemon = stage.start();
    wait_for("the disk to be offline", || shown(&daemon).contains("offline"));
    let added = daemon.try_ctl(&["disk", "add", "other", "--backing", &stage.scratch.text("moved.img")]);
    assert!(!added.success() && added.all().contains("dirty data of this backing"), "{}", added.all());
    std::fs::rename(&moved, &image).unwrap();
    stage.has(1);
}

/// The operator discards only the dirty data of the lost device.
#[test]
fn an_outdated_second_copy_does_not_replace_the_backing() {
    let (stage, daemon, [a, b]) = Stage::with_two_devices();
    let away = |path: &str| format!("{path}.away");
    daemon.ctl(&["cache", "resize", "vm", "32M"]);
    daemon.ctl(&["cache", "set", "vm", "--copies", "2"]);
    stage.write(1);
    daemon.kill();
    std::fs::rename(&b, away(&b)).unwrap();
    let daemon = stage.start();
    stage.write(2);
    daemon.ctl(&["drain", "vm"]);
    daemon.stop();
    std::fs::rename(away(&b), &b).unwrap();
    std::fs::rename(&a, away(&a)).unwrap();
    let daemon = stage.start();
    wait_for("the disk to be refused", || shown(&daemon).contains("is missing"));
    let exported = daemon.ctl(&["cache", "export-dirty", "vm", &stage.scratch.text("dirty")]);
    assert!(exported.contains("of an earlier time"), "{exported}");
    daemon.ctl(&["pool", "remove-device", "fast", &a, "--yes"]);
    stage.has(2);
    daemon.stop();
    let _daemon = stage.start();
    stage.has(2);
}

#[test]
fn a_device_that_was_missing_and_is_back_can_be_removed() {
    let (stage, daemon, [_, b]) = Stage::with_two_devices();
    let away = stage.scratch.path("away");
    daemon.ctl(&["cache", "set", "vm", "--copies", "2-dirty"]);
    stage.write(1);
    daemon.stop();
    std::fs::rename(&b, &away).unwrap();
    let daemon = stage.start();
    stage.write(2);
    std::fs::rename(&away, &b).unwrap();
    let shows = || daemon.ctl(&["pool", "show", "fast"]);
    wait_for("the device to be back", || !shows().contains("offline"));
    daemon.ctl(&["pool", "remove-device", "fast", &b, "--yes"]);
    stage.has(2);
}

#[test]
fn a_device_with_another_path_is_connected_without_force() {
    let (stage, daemon, [a, _]) = Stage::with_two_devices();
    let moved = stage.scratch.text("moved");
    stage.write(1);
    daemon.ctl(&["pool", "set-device", "fast", &a, "--admission", "out"]);
    daemon.kill();
    std::fs::rename(&a, &moved).unwrap();
    let daemon = stage.start();
    wait_for("the disk to be refused", || shown(&daemon).contains("is missing"));
    daemon.ctl(&["pool", "add-device", "fast", &moved]);
    stage.has(1);
    let pool = daemon.ctl(&["pool", "show", "fast"]);
    let row = pool.lines().find(|line| line.starts_with(&moved)).unwrap_or_default();
    assert!(row.contains(" out ") && !pool.contains(&format!("{a} ")), "{pool}");
    daemon.stop();
    let _daemon = stage.start();
    stage.has(1);
}

#[test]
fn a_device_that_may_be_one_of_two_is_not_connected() {
    let (stage, daemon, [a, b]) = Stage::with_two_devices();
    let moved = stage.scratch.text("moved");
    stage.write(1);
    daemon.kill();
    std::fs::rename(&a, &moved).unwrap();
    std::fs::rename(&b, stage.scratch.path("away")).unwrap();
    let daemon = stage.start();
    let said = daemon.try_ctl(&["pool", "add-device", "fast", &moved]).all();
    assert!(said.contains("cannot tell whether it is"), "{said}");
    std::fs::rename(&moved, &a).unwrap();
    std::fs::rename(stage.scratch.path("away"), &b).unwrap();
    stage.has(1);
}

#[test]
fn the_last_device_can_be_given_up() {
    let (stage, daemon) = Stage::new("write-back");
    let a = stage.scratch.text("a");
    stage.write(1);
    daemon.ctl(&["drain", "vm"]);
    daemon.stop();
    std::fs::remove_file(&a).unwrap();
    let daemon = stage.start();
    wait_for("the disk to be refused", || shown(&daemon).contains("offline"));
    daemon.ctl(&["pool", "remove-device", "fast", &a, "--yes"]);
    stage.has(1);
}

#[test]
fn a_cache_with_write_back_is_opened_although_no_device_gives_space() {
    let (stage, daemon, devices) = Stage::with_two_devices();
    daemon.ctl(&["cache", "set", "vm", "--copies", "2", "--dirty-age-max", "0"]);
    stage.write(0xA1);
    for device in &devices {
        daemon.ctl(&["pool", "set-device", "fast", device, "--admission", "out"]);
    }
    daemon.stop();
    let daemon = stage.start();
    stage.has(0xA1);
    assert!(shown(&daemon).contains("write-back"), "{}", shown(&daemon));
}
