//! Incremental backups with dirty bitmaps, made and restored by standard tools: `nbdinfo`,
//! `qemu-img` and `qemu-io`.

use std::time::Duration;

use conformance::data::{Noise, assert_same_file, noise_file};
use conformance::nbd_client::Client;
use conformance::scratch::wait_for;
use conformance::{Daemon, MIB, Scratch, Tool};
use serde_json::Value;

const DISK: u64 = 64 * MIB;
const GRANULE: u64 = 64 << 10;

/// A daemon with a disk in write-back, whose backing has few of the writes, and with an export for
/// backups.
struct Stage {
    scratch: Scratch,
    daemon: Daemon,
    noise: Noise,
}

impl Stage {
    fn new() -> Stage {
        let scratch = Scratch::new();
        scratch.configure("");
        noise_file(&scratch.path("disk.img"), DISK, 31);
        let daemon = start(&scratch);
        let pool =
            ["pool", "create", "fast", &scratch.text("flash"), "--size", "64M", "--segment-size", "1M"];
        daemon.ctl(&pool);
        daemon.ctl(&["disk", "add", "vm", "--backing", &scratch.text("disk.img")]);
        let cache = ["cache", "enable", "vm", "--pool", "fast", "--size", "16M", "--mode", "write-back"];
        daemon.ctl(&cache);
        daemon.ctl(&["export", "add", "vm", "backup", "--read-only", "--no-promote"]);
        Stage { scratch, daemon, noise: Noise::new(32) }
    }

    /// Ends the daemon with `how` and starts it again.
    fn restart(self, how: impl FnOnce(Daemon)) -> Stage {
        let Stage { scratch, daemon, noise } = self;
        how(daemon);
        let daemon = start(&scratch);
        Stage { scratch, daemon, noise }
    }

    fn uri(&self) -> String {
        self.scratch.nbd().uri("backup")
    }

    fn client(&self) -> Client {
        self.scratch.connect("vm")
    }

    /// Writes noise at several places.
    fn write_some(&mut self) {
        let mut client = self.client();
        for _ in 0..20 {
            let len = 512 * (1 + self.noise.below(400));
            let offset = self.noise.below((DISK - len) / 512) * 512;
            let data = self.noise.bytes(len as usize);
            client.write(offset, &data).unwrap();
        }
    }

    /// Returns the changed ranges according to `nbdinfo`: offsets and lengths.
    fn map(&self, bitmap: &str) -> Vec<(u64, u64)> {
        let map = format!("--map=qemu:dirty-bitmap:{bitmap}");
        let text = Tool::new("nbdinfo").args(["--json", &map, &self.uri()]).run();
        let extents: Vec<Value> = serde_json::from_str(&text).expect("nbdinfo prints JSON");
        let number = |extent: &Value, field: &str| extent[field].as_u64().expect("a number");
        let end = extents.last().map(|last| number(last, "offset") + number(last, "length"));
        assert_eq!(end, Some(DISK), "the map is complete: {text}");
        let dirty = extents.iter().filter(|extent| number(extent, "type") == 1);
        dirty.map(|extent| (number(extent, "offset"), number(extent, "length"))).collect()
    }

    fn full(&self, to: &str) {
        let to = self.scratch.text(to);
        Tool::new("qemu-img").args(["convert", "-f", "raw", "-O", "qcow2", &self.uri(), &to]).run();
    }

    /// Makes an incremental backup as in docs/BACKUP.md: creates an image over the disk, copies the
    /// changed parts into the image, and rebases it on the previous backup.
    fn increment(&self, bitmap: &str, to: &str, base: &str) {
        let (to, uri) = (self.scratch.text(to), self.uri());
        Tool::new("qemu-img").args(["create", "-q", "-f", "qcow2", "-F", "raw", "-b", &uri, &to]).run();
        let options = format!(
            "driver=nbd,export=backup,server.type=unix,server.path={},x-dirty-bitmap=qemu:dirty-bitmap:{bitmap}",
            self.scratch.text("nbd.sock")
        );
        let text = Tool::new("qemu-img").args(["map", "--output=json", "--image-opts", &options]).run();
        let map: Vec<Value> = serde_json::from_str(&text).expect("qemu-img prints JSON");
        let mut copy = Tool::new("qemu-io").args(["-C", "-f", "qcow2"]);
        for extent in map.iter().filter(|extent| extent["data"] == false) {
            let read = format!("read {} {}", extent["start"], extent["length"]);
            copy = copy.args(["-c", &read]);
        }
        copy.arg(&to).run();
        Tool::new("qemu-img").args(["rebase", "-u", "-f", "qcow2", "-F", "qcow2", "-b", base, &to]).run();
    }

    /// Checks that the chain that ends with an image has the content of the disk.
    fn restores(&self, image: &str) {
        let restored = self.scratch.text("restored.img");
        Tool::new("qemu-img")
            .args(["convert", "-f", "qcow2", "-O", "raw", &self.scratch.text(image), &restored])
            .run();
        Tool::new("nbdcopy").args([&self.uri(), &self.scratch.text("now.img")]).run();
        assert_same_file(&self.scratch.path("restored.img"), &self.scratch.path("now.img"));
    }

    fn bitmaps(&self) -> Vec<Value> {
        self.daemon.json(&["bitmap", "list", "vm"])["bitmaps"].as_array().expect("a list").clone()
    }
}

fn start(scratch: &Scratch) -> Daemon {
    let _ = std::fs::remove_file(scratch.path("nbd.sock"));
    let daemon = scratch.start_daemon();
    wait_for("the NBD socket", || scratch.path("nbd.sock").exists());
    daemon
}

/// Full and incremental backups restore the disk: with writes during a backup, after a failed
/// backup, and after a restart and a crash of the daemon.
#[test]
fn full_and_incremental_backups_restore_the_disk() {
    let mut stage = Stage::new();
    stage.daemon.ctl(&["bitmap", "add", "vm", "daily"]);
    stage.write_some();
    stage.full("full.qcow2");
    stage.write_some();

    stage.daemon.ctl(&["bitmap", "rotate", "vm", "daily", "one"]);
    stage.write_some();
    stage.increment("one", "one.qcow2", "full.qcow2");
    stage.daemon.ctl(&["bitmap", "remove", "vm", "one"]);

    // The next backup fails, and the changes that it was to save remain in the bitmap.
    stage.daemon.ctl(&["bitmap", "rotate", "vm", "daily", "two"]);
    stage.write_some();
    stage.daemon.ctl(&["bitmap", "merge", "vm", "two", "daily"]);
    let mut stage = stage.restart(|daemon| drop(daemon.stop()));
    stage.write_some();
    stage.daemon.ctl(&["bitmap", "rotate", "vm", "daily", "two"]);
    stage.increment("two", "two.qcow2", "one.qcow2");
    stage.restores("two.qcow2");
    let copied: u64 = stage.map("two").iter().map(|(_, len)| len).sum();
    assert!((MIB..DISK / 2).contains(&copied), "an increment is small: {copied} bytes");

    // After a crash the whole disk counts as changed, and frozen bitmaps are as before.
    let frozen = stage.map("two");
    stage.write_some();
    let stage = stage.restart(|mut daemon| daemon.process.kill());
    assert_eq!(stage.map("two"), frozen);
    assert_eq!(stage.map("daily"), [(0, DISK)]);
    let said = &stage.bitmaps()[0];
    assert_eq!(said["everything_because"], "hob ended without closing the disk");
    stage.daemon.ctl(&["bitmap", "rotate", "vm", "daily", "three"]);
    stage.increment("three", "three.qcow2", "two.qcow2");
    stage.restores("three.qcow2");
    assert_eq!(stage.map("daily"), [], "and from here on increments are small again");
    drop(stage.daemon.stop());
}

/// `nbdinfo` shows the changed granules exactly, and also the allocated ranges.
#[test]
fn contexts_are_listed_and_show_changed_ranges() {
    let stage = Stage::new();
    let text = Tool::new("nbdinfo").args(["--json", &stage.uri()]).run();
    assert!(!text.contains("qemu:"), "no bitmap yet: {text}");
    stage.daemon.ctl(&["bitmap", "add", "vm", "coarse"]);
    stage.daemon.ctl(&["bitmap", "add", "vm", "fine", "--granularity", "4K"]);
    let text = Tool::new("nbdinfo").args(["--json", &stage.uri()]).run();
    let info: Value = serde_json::from_str(&text).unwrap();
    let contexts = &info["exports"][0]["contexts"];
    let expected = ["base:allocation", "qemu:dirty-bitmap:coarse", "qemu:dirty-bitmap:fine"];
    assert_eq!(contexts.as_array().unwrap(), &expected, "{text}");

    let mut client = stage.client();
    client.write(5 * GRANULE - 512, &[7; 1024]).unwrap();
    client.trim(9 * GRANULE, GRANULE as u32).unwrap();
    assert_eq!(stage.map("coarse"), [(4 * GRANULE, 2 * GRANULE), (9 * GRANULE, GRANULE)]);
    assert_eq!(stage.map("fine"), [(5 * GRANULE - 4096, 8192), (9 * GRANULE, GRANULE)]);
    Tool::new("nbdinfo").args(["--map", &stage.uri()]).run();

    stage.daemon.ctl(&["bitmap", "clear", "vm", "coarse"]);
    assert_eq!(stage.map("coarse"), []);
    stage.daemon.ctl(&["bitmap", "remove", "vm", "coarse"]);
    let gone = Tool::new("nbdinfo").args(["--map=qemu:dirty-bitmap:coarse", &stage.uri()]).run_failing();
    assert!(gone.all().contains("qemu:dirty-bitmap:coarse"), "{}", gone.all());
    drop(stage.daemon.stop());
}

/// The daemon is upgraded while a client writes. Each of the client's writes is recorded: before,
/// during and after the upgrade.
#[test]
fn an_upgrade_keeps_dirty_bitmaps() {
    let mut stage = Stage::new();
    stage.daemon.ctl(&["bitmap", "add", "vm", "b"]);
    let mut client = stage.client();
    let writer = std::thread::spawn(move || {
        for granule in (0..DISK / GRANULE).step_by(2) {
            client.write(granule * GRANULE + 512, &[1; 512]).unwrap();
            std::thread::sleep(Duration::from_millis(5));
        }
    });
    for _ in 0..2 {
        std::thread::sleep(Duration::from_millis(500));
        stage.daemon.upgrade();
    }
    writer.join().expect("the client stays");
    let expected: Vec<_> = (0..DISK / GRANULE).step_by(2).map(|at| (at * GRANULE, GRANULE)).collect();
    assert_eq!(stage.map("b"), expected);
    drop(stage.daemon.stop());
}

/// A bitmap marks the whole disk as changed after another program has written to the backing while
/// hob did not serve it, and after a reported revert to a snapshot.
#[test]
fn changes_that_hob_did_not_see_are_marked_in_bitmaps() {
    let stage = Stage::new();
    stage.daemon.ctl(&["bitmap", "add", "vm", "b"]);
    let stage = stage.restart(|daemon| drop(daemon.stop()));
    assert_eq!(stage.map("b"), []);
    let image = stage.scratch.path("disk.img");
    let stage = stage.restart(|daemon| {
        drop(daemon.stop());
        std::os::unix::fs::FileExt::write_all_at(
            &std::fs::File::options().write(true).open(&image).unwrap(),
            b"somebody else",
            MIB,
        )
        .unwrap();
    });
    assert_eq!(stage.map("b"), [(0, DISK)]);
    stage.daemon.ctl(&["bitmap", "clear", "vm", "b"]);
    stage.daemon.ctl(&["disk", "event", "vm", "snapshot-revert", "--yes"]);
    assert_eq!(stage.map("b"), [(0, DISK)]);
    let said = stage.daemon.ctl(&["bitmap", "list", "vm"]);
    assert!(said.contains("the backing was reverted to a snapshot"), "{said}");
    drop(stage.daemon.stop());
}
