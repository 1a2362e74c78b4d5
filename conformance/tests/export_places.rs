//! Additional exports of a disk as files and as vhost-user sockets: for backup programs and scans
//! without NBD support.
//!
//! These tests mount filesystems, and so need root and /dev/fuse.

use std::fs::{self, File, OpenOptions};
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::time::Duration;

use conformance::data::assert_same;
use conformance::nbd_client::{Address, Client, read_mibs};
use conformance::scratch::wait_for;
use conformance::vhost_driver::{DATA_BYTES, Driver, Kind};
use conformance::{Daemon, MIB, Scratch, Tool, Unmount};

const DISK: u64 = 64 * MIB;
const CACHE: u64 = 16 * MIB;
/// Size of the hot part, bytes; it fits the cache.
const HOT: u64 = CACHE * 3 / 4;

const EROFS: i32 = 30;
const ENODEV: [i32; 3] = [19, 103, 107];

/// virtio's feature bit of a read-only device, and the status of a refused request.
const READ_ONLY: u64 = 1 << 5;
const IO_ERROR: u8 = 1;

/// A disk with a file and a socket, and with an export for backups that has another file and
/// another socket.
struct Stage {
    daemon: Daemon,
    // Dropped after the daemon and before the directory.
    _unmounts: [Unmount; 2],
    scratch: Scratch,
    image: Vec<u8>,
}

impl Stage {
    #[track_caller]
    fn new() -> Stage {
        let scratch = Scratch::new();
        let at = |name: &str| scratch.text(name);
        let image = scratch.noise("disk.img", DISK, 71);
        scratch.configure("");
        let unmounts = ["vm.img", "backup.img"].map(|name| Unmount::at(&scratch.path(name)));
        let daemon = start(&scratch);
        daemon.ctl(&["pool", "create", "p", &at("flash"), "--size", "64M", "--segment-size", "1M"]);
        let (file, socket) = (at("vm.img"), at("vm.sock"));
        let backing = at("disk.img");
        daemon.ctl(&["disk", "add", "vm", "--backing", &backing, "--fuse", &file, "--vhost-user", &socket]);
        let size = format!("{}M", CACHE / MIB);
        let shape = ["--size", &size, "--block-size", "4K", "--policy", "lru"];
        daemon.ctl(
            &[&["cache", "enable", "vm", "--pool", "p", "--admission", "always"][..], &shape[..]].concat(),
        );
        let (file, socket) = (at("backup.img"), at("backup.sock"));
        let places = ["--fuse", &file, "--vhost-user", &socket];
        daemon.ctl(
            &[&["export", "add", "vm", "backup", "--read-only", "--no-promote"][..], &places[..]].concat(),
        );
        Stage { daemon, _unmounts: unmounts, scratch, image }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.scratch.path(name)
    }

    fn connect(&self, export: &str) -> std::io::Result<Client> {
        Client::connect(&Address::Unix(self.path("nbd.sock")), export)
    }

    /// Reads the hot part until all reads are hits.
    #[track_caller]
    fn warm_up(&self) {
        let mut guest = self.connect("vm").unwrap();
        wait_for("the hot part to be cached", || self.hot_hits(&mut guest) == HOT / MIB);
    }

    /// Reads the hot part in pieces of 1 MiB, and returns the number of hits.
    fn hot_hits(&self, guest: &mut Client) -> u64 {
        let before = self.daemon.stats("vm").hits();
        read_mibs(guest, 0..HOT);
        self.daemon.stats("vm").hits() - before
    }

    fn passed_by(&self) -> u64 {
        self.daemon.stats("vm").reason("bypass", "no-promote")
    }

    /// Checks a full read by `backup`: all data is correct, and the cached data is unchanged.
    #[track_caller]
    fn leaves_the_cache_alone(&self, backup: impl FnOnce() -> Vec<u8>) {
        self.warm_up();
        let (before, passed_by) = (self.daemon.stats("vm"), self.passed_by());
        assert_same(&backup(), &self.image, 0, "the backup and the disk");
        let after = self.daemon.stats("vm");
        assert_eq!(after.evicted_blocks(), before.evicted_blocks(), "{}", after.text());
        assert_eq!(after.misses(), before.misses(), "it counts for the hit ratio: {}", after.text());
        assert!(self.passed_by() > passed_by, "nothing went to the backing: {}", after.text());
        let mut guest = self.connect("vm").unwrap();
        assert_eq!(self.hot_hits(&mut guest), HOT / MIB, "something hot has gone");
    }
}

#[track_caller]
fn start(scratch: &Scratch) -> Daemon {
    let daemon = scratch.start_daemon();
    // The daemon's socket answers when its disks exist.
    daemon.ctl(&["disk", "list"]);
    daemon
}

#[track_caller]
fn refused<T: std::fmt::Debug>(result: std::io::Result<T>) -> i32 {
    result.unwrap_err().raw_os_error().expect("an error of the system")
}

/// A full read through the file of an export without promotion leaves the cached data unchanged. A
/// full read through the disk's own file changes it, which shows that the test detects a change.
#[test]
fn a_backup_through_a_file_does_not_wash_the_cache() {
    let stage = Stage::new();
    stage.leaves_the_cache_alone(|| fs::read(stage.path("backup.img")).unwrap());
    let before = stage.daemon.stats("vm").evicted_blocks();
    assert_same(&fs::read(stage.path("vm.img")).unwrap(), &stage.image, 0, "the file and the disk");
    let mut guest = stage.connect("vm").unwrap();
    assert!(stage.daemon.stats("vm").evicted_blocks() > before && stage.hot_hits(&mut guest) < HOT / MIB);
    drop(guest);
    stage.daemon.stop();
}

#[test]
fn a_backup_through_vhost_user_does_not_wash_the_cache() {
    let stage = Stage::new();
    let read = |socket: &str| {
        let mut machine = Driver::connect(&stage.path(socket)).expect("the daemon takes a machine");
        let mut disk = Vec::with_capacity(DISK as usize);
        for at in (0..DISK).step_by(DATA_BYTES as usize) {
            assert_eq!(machine.run(Kind::Read, at, DATA_BYTES as u32), Some(0), "at {at}");
            disk.extend(machine.data(0, DATA_BYTES as usize));
        }
        disk
    };
    // A VM uses the disk's own socket meanwhile.
    let _guest = Driver::connect(&stage.path("vm.sock")).expect("the daemon takes a machine");
    stage.leaves_the_cache_alone(|| read("backup.sock"));
    stage.daemon.stop();
}

/// Each front end of the export refuses changes, and shows the guest's changes.
#[test]
fn a_read_only_export_refuses_changes_at_all_its_places() {
    let mut stage = Stage::new();
    let (own, backup) = (stage.path("vm.img"), stage.path("backup.img"));
    assert_eq!(refused(OpenOptions::new().write(true).open(&backup)), EROFS);
    assert_eq!(refused(OpenOptions::new().read(true).write(true).open(&backup)), EROFS);
    let mut machine = Driver::connect(&stage.path("backup.sock")).expect("the daemon takes a machine");
    let mut guest = Driver::connect(&stage.path("vm.sock")).expect("the daemon takes a machine");
    let features = |driver: &mut Driver| vhost::VhostBackend::get_features(driver.frontend()).unwrap();
    assert_eq!((features(&mut machine) & READ_ONLY, features(&mut guest) & READ_ONLY), (READ_ONLY, 0));
    assert_eq!(machine.run(Kind::Write, 0, 4096), Some(IO_ERROR));
    let file = File::open(&backup).unwrap();
    for (at, byte) in [(0, 5), (8192, 6)] {
        match byte {
            5 => OpenOptions::new().write(true).open(&own).unwrap().write_all_at(&[5; 4096], at).unwrap(),
            _ => {
                guest.set_data(0, &[6; 4096]);
                assert_eq!(guest.run(Kind::Write, at, 4096), Some(0));
            }
        }
        stage.image[at as usize..][..4096].fill(byte);
        let mut seen = [0; 4096];
        file.read_exact_at(&mut seen, at).unwrap();
        assert_eq!(seen, [byte; 4096]);
        assert_eq!((machine.run(Kind::Read, at, 4096), machine.data(0, 4096)), (Some(0), vec![byte; 4096]));
    }
    assert_same(&fs::read(&backup).unwrap(), &stage.image, 0, "the export and the disk");
    drop(file);
    stage.daemon.stop();
}

/// The front ends of an export exist again after a restart and an upgrade, and are removed with the
/// export, which is kept while its file is open.
#[test]
fn places_of_an_export_survive_a_restart_and_end_with_the_export() {
    let stage = Stage::new();
    let list = stage.daemon.ctl(&["export", "list"]);
    for place in ["vm.img", "vm.sock", "backup.img", "backup.sock"] {
        assert!(list.contains(&stage.scratch.text(place)), "no {place}:\n{list}");
    }
    stage.daemon.stop();
    for place in ["backup.img", "backup.sock", "vm.img", "vm.sock"] {
        assert!(!stage.scratch.path(place).exists(), "{place} outlived the daemon");
    }
    let Stage { scratch, image, _unmounts, .. } = stage;
    let mut stage = Stage { daemon: start(&scratch), scratch, image, _unmounts };
    let file = File::open(stage.path("backup.img")).unwrap();
    upgrade(&mut stage);
    // The open descriptor continues to work, with the same permissions and promotion.
    let before = stage.passed_by();
    let mut bytes = vec![0; MIB as usize];
    file.read_exact_at(&mut bytes, 4 * MIB).unwrap();
    assert_same(&bytes, &stage.image[4 * MIB as usize..][..MIB as usize], 4 * MIB, "the export and the disk");
    assert!(stage.passed_by() > before, "it promotes");
    assert_eq!(refused(OpenOptions::new().write(true).open(stage.path("backup.img"))), EROFS);
    let kept = stage.daemon.try_ctl(&["export", "remove", "vm", "backup"]);
    assert!(!kept.success() && kept.all().contains("in use"), "{}", kept.all());
    let kept = stage.daemon.try_ctl(&["disk", "remove", "vm"]);
    assert!(!kept.success() && kept.all().contains("in use"), "{}", kept.all());
    assert_same(
        &fs::read(stage.path("vm.img")).unwrap(),
        &stage.image,
        0,
        "the disk's own file, which stays",
    );
    drop(file);
    let mut machine = Driver::connect(&stage.path("backup.sock")).expect("the daemon takes a machine");
    assert_eq!(machine.run(Kind::Read, 0, 4096), Some(0));
    stage.daemon.ctl_when_unused(&["export", "remove", "vm", "backup"]);
    assert!(!stage.path("backup.img").exists() && !stage.path("backup.sock").exists());
    assert!(stage.connect("backup").is_err());
    machine.submit(0, Kind::Read, 0, 4096);
    machine.kick();
    let is_answered = machine.wait(Duration::from_secs(5));
    let status = if is_answered { machine.reap().map(|(_, status)| status) } else { None };
    assert_ne!(status, Some(0), "its machine is served still");
    let mut guest = Driver::connect(&stage.path("vm.sock")).expect("the disk's own socket stays");
    assert_eq!(guest.run(Kind::Read, 0, 4096), Some(0));
    assert_same(&fs::read(stage.path("vm.img")).unwrap(), &stage.image, 0, "the disk's own file");
    drop((guest, machine));
    stage.daemon.ctl_when_unused(&["disk", "remove", "vm"]);
    assert!(!stage.path("vm.img").exists() && !stage.path("vm.sock").exists());
    stage.daemon.stop();
}

#[track_caller]
fn upgrade(stage: &mut Stage) {
    stage.daemon.upgrade();
    stage.daemon.ctl(&["disk", "list"]);
}

/// Impossible front ends are refused with a message, and leave nothing behind.
#[test]
fn impossible_front_ends_are_refused() {
    let stage = Stage::new();
    let at = |name: &str| stage.scratch.text(name);
    for (option, path, wrong) in [
        ("--fuse", at("backup.img"), "is the file of backup"),
        ("--fuse", at("vm.img"), "is the file of vm"),
        ("--fuse", at("disk.img"), "backing"),
        ("--fuse", at("none/x.img"), "No such file"),
        ("--vhost-user", at("backup.sock"), "cannot open the vhost-user socket"),
        ("--vhost-user", at("none/x.sock"), "cannot open the vhost-user socket"),
        ("--vhost-user", format!("/{}", "x".repeat(200)), "at most 107 bytes"),
    ] {
        let add = stage.daemon.try_ctl(&["export", "add", "vm", "other", option, &path]);
        assert!(!add.success() && add.all().contains(wrong), "{option} {path}: {}", add.all());
        assert!(stage.connect("other").is_err(), "{option} {path}");
        assert!(!stage.daemon.ctl(&["export", "list"]).contains("other"));
    }
    // If only one of the two front ends is possible, it is removed again.
    let (socket, file) = (at("other.sock"), at("none/other.img"));
    let add =
        stage.daemon.try_ctl(&["export", "add", "vm", "other", "--vhost-user", &socket, "--fuse", &file]);
    assert!(!add.success() && !stage.path("other.sock").exists(), "{}", add.all());
    assert_same(&fs::read(stage.path("backup.img")).unwrap(), &stage.image, 0, "what was there before");
    // After a kill of the daemon, open files return errors and do not hang, and the next daemon
    // cleans up.
    let file = File::open(stage.path("backup.img")).unwrap();
    stage.daemon.kill();
    assert!(ENODEV.contains(&refused(file.read_at(&mut [0; 512], 0))));
    let daemon = start(&stage.scratch);
    assert_same(&stage.scratch.read("backup.img"), &stage.image, 0, "after the restart");
    daemon.stop();
    assert!(Tool::new("findmnt").arg(at("backup.img")).run_failing().stdout.is_empty());
}
