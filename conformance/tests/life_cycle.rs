//! Life cycle of VMs: snapshots contain all data, and after a revert no later data is read.

use std::os::unix::fs::FileExt;
use std::time::Duration;

use conformance::data::{Noise, assert_same, noise_file};
use conformance::scratch::wait_for;
use conformance::{Hob, MIB, Scratch, Serve};

const DISK: u64 = 16 * MIB;

struct Stage {
    scratch: Scratch,
    hob: Hob,
}

impl Stage {
    /// Creates a disk in write-back that destages nothing by itself.
    fn new() -> Stage {
        let scratch = Scratch::new();
        noise_file(&scratch.path("disk.img"), DISK, 17);
        let hob = Serve::disk(&scratch.text("disk.img"))
            .cached(&scratch.path("pool"), "32M", "4K")
            .arg("--mode", "write-back")
            .arg("--dirty-start", "90")
            .arg("--dirty-stop", "85")
            .arg("--dirty-full", "95")
            .arg("--dirty-age-max", "0")
            .start(&scratch);
        Stage { scratch, hob }
    }

    fn tell(&self, event: &str) -> String {
        self.hob.ctl(&["disk", "event", "disk", event])
    }
}

#[test]
fn a_snapshot_that_was_announced_has_every_write() {
    let stage = Stage::new();
    let data = Noise::new(18).bytes(4 * MIB as usize);
    let mut client = stage.hob.connect();
    client.write(MIB, &data).unwrap();
    assert_ne!(stage.scratch.read("disk.img")[MIB as usize..][..data.len()], data[..], "it is on flash only");
    stage.tell("resume");
    assert_ne!(
        stage.scratch.read("disk.img")[MIB as usize..][..data.len()],
        data[..],
        "a resume drains nothing"
    );
    stage.tell("snapshot-create");
    assert_same(
        &stage.scratch.read("disk.img")[MIB as usize..][..data.len()],
        &data,
        MIB,
        "the snapshot and what was written",
    );
    let before = stage.hob.stats().hits();
    client.read(MIB, MIB as u32).unwrap();
    assert!(stage.hob.stats().hits() > before, "and the cache is still warm");
    stage.hob.stop();
}

/// Promise 2: after a revert, neither cached nor dirty data from before the revert is read, and
/// none of it reaches the backing.
#[test]
fn after_a_revert_the_disk_has_its_earlier_content() {
    let stage = Stage::new();
    let snapshot = stage.scratch.read("disk.img");
    let mut client = stage.hob.connect();
    client.write(0, &Noise::new(19).bytes(4 * MIB as usize)).unwrap();
    client.read(8 * MIB, MIB as u32).unwrap();
    // Other contents than in the snapshot; some are dirty and some were read.
    let other = Noise::new(20).bytes(MIB as usize);
    let file = std::fs::OpenOptions::new().write(true).open(stage.scratch.path("disk.img")).unwrap();
    file.write_all_at(&other, 8 * MIB).unwrap();
    let refused = stage.hob.try_ctl(&["disk", "event", "disk", "snapshot-revert"]);
    assert!(!refused.success(), "dirty data is not lost by default");
    assert!(
        refused.all().contains("4 MiB of dirty data is lost") && refused.all().contains("--yes"),
        "{}",
        refused.all()
    );
    stage.hob.ctl(&["disk", "event", "disk", "snapshot-revert", "--yes"]);
    let mut wanted = snapshot;
    wanted[8 * MIB as usize..][..MIB as usize].copy_from_slice(&other);
    assert_same(&client.read(0, DISK as u32).unwrap(), &wanted, 0, "the disk and the snapshot");
    stage.hob.ctl(&["drain", "disk"]);
    assert_same(&stage.scratch.read("disk.img"), &wanted, 0, "the backing and the snapshot");
    stage.hob.stop();
}

/// Promise 2: a revert in the documented order gives the content of the snapshot, also if dirty
/// data would be destaged between the revert and the event.
#[test]
fn a_disk_that_was_drained_before_a_revert_has_the_content_of_the_snapshot() {
    let scratch = Scratch::new();
    let snapshot = scratch.noise("disk.img", DISK, 22);
    let serve = Serve::disk(&scratch.text("disk.img")).cached(&scratch.path("pool"), "32M", "4K");
    let hob = serve.arg("--mode", "write-back").arg("--dirty-age-max", "1").start(&scratch);
    let mut client = hob.connect();
    client.write(0, &Noise::new(23).bytes(4 * MIB as usize)).unwrap();
    client.flush().unwrap();
    hob.ctl(&["disk", "event", "disk", "suspend"]);
    let file = std::fs::OpenOptions::new().write(true).open(scratch.path("disk.img")).unwrap();
    file.write_all_at(&snapshot, 0).unwrap();
    // Longer than the maximum age of dirty data.
    std::thread::sleep(Duration::from_secs(3));
    hob.ctl(&["disk", "event", "disk", "snapshot-revert"]);
    assert_same(&client.read(0, DISK as u32).unwrap(), &snapshot, 0, "the disk and the snapshot");
    assert_same(&scratch.read("disk.img"), &snapshot, 0, "the backing and the snapshot");
    hob.stop();
}

/// SYSTEMS §1: "The cache is emptied by a cold restart of the machine, by suspend/resume, […] by
/// snapshot consolidation and by snapshot revert."
#[test]
fn a_vfrc_cache_is_emptied_by_the_events_of_its_source() {
    let scratch = Scratch::new();
    noise_file(&scratch.path("disk.img"), DISK, 21);
    let serve = Serve::disk(&scratch.text("disk.img")).cached(&scratch.path("pool"), "32M", "4K");
    let hob = serve.arg("--preset", "vfrc").start(&scratch);
    let mut client = hob.connect();
    let mut is_hit = || {
        let before = hob.stats().hits();
        client.read(MIB, MIB as u32).unwrap();
        hob.stats().hits() > before
    };
    for (event, empties) in [
        ("suspend", false),
        ("resume", true),
        ("snapshot-create", false),
        ("snapshot-consolidate", true),
        ("snapshot-revert", true),
        ("cold-restart", true),
    ] {
        // Flash may get the data after the reply.
        wait_for("a hit", &mut is_hit);
        hob.ctl(&["disk", "event", "disk", event]);
        assert_eq!(is_hit(), !empties, "after {event}");
    }
    hob.stop();
}

#[test]
fn an_event_that_hob_does_not_know_is_refused_with_those_it_knows() {
    let stage = Stage::new();
    let refused = stage.hob.try_ctl(&["disk", "event", "disk", "birth"]);
    assert!(refused.status.is_some_and(|status| !status.success()));
    assert!(refused.stderr.contains("birth"), "{}", refused.stderr);
    stage.hob.stop();
}
