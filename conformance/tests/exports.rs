//! Additional exports of a disk, for backups, which read all data once and must not fill the cache
//! with it.

use std::time::{Duration, Instant};

use conformance::data::assert_same;
use conformance::nbd_client::{CMD_WRITE, Client, EPERM, read_mibs};
use conformance::scratch::wait_for;
use conformance::{Daemon, MIB, Scratch, Tool};

const DISK: u64 = 128 * MIB;
const CACHE: u64 = 32 * MIB;

/// A daemon with a disk that has a cache, and an export for backups.
struct Stage {
    scratch: Scratch,
    daemon: Daemon,
    image: Vec<u8>,
}

impl Stage {
    fn new() -> Stage {
        let scratch = Scratch::new();
        scratch.configure("");
        let image = scratch.noise("disk.img", DISK, 91);
        let daemon = start(&scratch);
        daemon.tell(&format!("pool create fast {} --size 64M --segment-size 1M", scratch.text("flash")));
        daemon.ctl(&["disk", "add", "vm", "--backing", &scratch.text("disk.img")]);
        let size = format!("{}M", CACHE / MIB);
        daemon.tell(&format!("cache enable vm --pool fast --size {size} --block-size 4K --policy lru"));
        daemon.ctl(&["export", "add", "vm", "vm-backup", "--read-only", "--no-promote"]);
        Stage { scratch, daemon, image }
    }

    fn connect(&self, export: &str) -> Client {
        Client::connect(&self.scratch.nbd(), export).unwrap_or_else(|error| panic!("{export}: {error}"))
    }

    /// Returns the number of reads that count for the hit ratio, and the hits among them.
    fn reads(&self) -> (f64, f64) {
        let stats = self.daemon.stats("vm");
        let number = |name| stats.number(name).unwrap_or_else(|| panic!("no {name}"));
        let reads = number("reads");
        (reads, (number("hit_percent") * reads / 100.0).round())
    }
}

fn start(scratch: &Scratch) -> Daemon {
    let daemon = scratch.start_daemon();
    wait_for("the NBD socket", || scratch.path("nbd.sock").exists());
    daemon
}

/// Minimum number of reads of one measurement. With fewer, one miss changes the hit ratio by 1 %.
const READS_MIN: u32 = 200;

/// Reads at random positions in the hot part of the disk, which fits the cache, for `period`, and
/// longer on a slow host. Returns the hit ratio.
fn load(stage: &Stage, client: &mut Client, dice: &mut u64, period: Duration) -> f64 {
    let before = stage.reads();
    let began = Instant::now();
    let mut made = 0;
    while began.elapsed() < period || made < READS_MIN {
        made += 1;
        *dice = dice.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let offset = (*dice >> 33) % (CACHE * 3 / 4 / 4096) * 4096;
        let data = client.read(offset, 4096).unwrap();
        assert_same(&data, &stage.image[offset as usize..][..4096], offset, "the load and the image");
    }
    let after = stage.reads();
    let (reads, hits) = (after.0 - before.0, after.1 - before.1);
    assert!(reads >= f64::from(READS_MIN), "not all reads count: {reads} of {made}");
    hits / reads
}

/// A backup through the export without promotion changes the hit ratio of a running load by less
/// than 1 %. A backup through the disk's own export changes it more, which shows that the
/// measurement detects a change.
#[test]
fn a_backup_does_not_wash_the_cache() {
    let stage = Stage::new();
    let mut client = stage.connect("vm");
    let mut dice = 7;
    wait_for("the hot part to be cached", || {
        let before = stage.reads();
        read_mibs(&mut client, 0..CACHE * 3 / 4);
        let after = stage.reads();
        let (reads, hits) = (after.0 - before.0, after.1 - before.1);
        reads - hits < 0.5
    });
    load(&stage, &mut client, &mut dice, Duration::from_secs(1));
    let quiet = load(&stage, &mut client, &mut dice, Duration::from_secs(1));
    let mut during = Vec::new();
    for (export, copy) in [("vm-backup", "one.img"), ("vm", "two.img")] {
        let source = stage.scratch.nbd().uri(export);
        let target = stage.scratch.text(copy);
        std::fs::File::create(&target).unwrap().set_len(DISK).unwrap();
        let backup = std::thread::spawn(move || {
            Tool::new("nbdcopy").args(["--requests=4", "--connections=1", &source, &target]).run()
        });
        let (mut worst, mut ended) = (1.0f64, false);
        while !ended {
            ended = backup.is_finished();
            worst = worst.min(load(&stage, &mut client, &mut dice, Duration::from_millis(300)));
        }
        backup.join().unwrap();
        let copied = std::fs::read(stage.scratch.path(copy)).unwrap();
        assert_same(&copied, &stage.image, 0, "the backup and the image");
        during.push(worst);
    }
    println!(
        "hit ratio {quiet:.4} before, {:.4} beside a backup, {:.4} beside one that promotes",
        during[0], during[1]
    );
    assert!(quiet > 0.99, "the load fits the cache: {quiet}");
    assert!(quiet - during[0] < 0.01, "{quiet} before, {} beside the backup", during[0]);
    assert!(quiet - during[1] > 0.01, "a backup that promotes is none the worse: {}", during[1]);
    let bypassed = stage.daemon.stats("vm").reason("bypass", "no-promote");
    assert!(bypassed > 0, "what was not cached has its own reason");
    stage.daemon.stop();
}

#[test]
fn a_read_only_export_refuses_changes_and_sees_those_of_the_guest() {
    let stage = Stage::new();
    let (mut guest, mut backup) = (stage.connect("vm"), stage.connect("vm-backup"));
    assert_eq!(backup.call(0, CMD_WRITE, 0, 4096, &[1; 4096]).unwrap(), EPERM);
    guest.write(0, &[1; 4096]).unwrap();
    assert_eq!(backup.read(0, 4096).unwrap(), [1; 4096]);
    let info = Tool::new("nbdinfo").args(["--json", &stage.scratch.nbd().uri("vm-backup")]).run();
    assert!(info.contains("\"is_read_only\": true"), "{info}");
    stage.daemon.stop();
}

/// An export exists again after a restart. A removed export is gone with its connections; the
/// guest's connection stays.
#[test]
fn exports_survive_a_restart_and_are_removed_separately() {
    let stage = Stage::new();
    stage.daemon.stop();
    let Stage { scratch, image, .. } = stage;
    let stage = Stage { daemon: start(&scratch), scratch, image };
    let (mut guest, mut backup) = (stage.connect("vm"), stage.connect("vm-backup"));
    backup.read(0, 4096).unwrap();
    let list = stage.daemon.ctl(&["export", "list"]);
    assert!(list.contains("vm-backup") && list.contains("promote nothing"), "{list}");
    stage.daemon.ctl(&["export", "remove", "vm", "vm-backup"]);
    assert!(backup.read(0, 4096).is_err(), "its connections end");
    assert!(Client::connect(&stage.scratch.nbd(), "vm-backup").is_err());
    assert_same(&guest.read(0, 4096).unwrap(), &stage.image[..4096], 0, "the guest's");
    let refused = stage.daemon.try_ctl(&["export", "remove", "vm", "vm-backup"]);
    assert!(refused.status.is_some_and(|status| !status.success()), "{refused:?}");
    assert!(refused.stderr.contains("no additional export 'vm-backup'"), "{}", refused.stderr);
    stage.daemon.stop();
}
