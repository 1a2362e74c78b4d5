//! Disks that grow: docs/decisions/0017.

use std::fs::File;
use std::path::PathBuf;

use hob_control::{BitmapAdd, BitmapRotate, DiskResize};

use super::recovery::{BLOCK, COMMITTED, LAZY, end, prepare, read, sectors, write};
use super::*;

impl Bench {
    async fn resize_disk(&self, disk: &str, size: Option<u64>) -> Result<DiskChanged> {
        self.services.disks.disk_resize(disk.into(), DiskResize { size: size.map(Size) }).await
    }

    fn img(&self, disk: &str) -> PathBuf {
        self.dir.path().join(format!("{disk}.img"))
    }

    /// Returns the size of the disk that all clients receive, MiB.
    fn size(&self, disk: &str) -> u64 {
        let shown = self.services.observe.disk(disk).unwrap().size.bytes();
        let exported = self.services.exports.table().get(disk).unwrap().info.size_bytes;
        assert_eq!(shown, exported);
        shown / MIB
    }

    fn can_write(&self, disk: &str, offset: u64) -> bool {
        let id = self.services.registry.inner().disks[disk].id;
        self.shard.write(id, offset, BLOCK).is_ok()
    }
}

fn truncate(path: &Path, mib: u64) {
    File::options().write(true).open(path).unwrap().set_len(mib * MIB).unwrap();
}

/// Kills the daemon, enlarges the backing of its disk, and starts the daemon again.
async fn crash_and_grow(bench: Bench, mib: u64) -> Bench {
    let Bench { dir, services, shard } = bench;
    shard.stop();
    drop(services);
    truncate(&dir.path().join("vm.img"), mib);
    let (services, shard) = restart(&dir.path().join("state"), "").await;
    Bench { dir, services, shard }
}

#[test]
fn a_disk_is_as_large_as_its_backing_when_somebody_says_so() {
    run(async |bench| {
        bench.pool(&["a"], 8).await;
        bench.disk("vm").await;
        for with_cache in [false, true] {
            if with_cache {
                bench.cache("vm", 2).await.unwrap();
            }
            let before = bench.size("vm");
            truncate(&bench.img("vm"), before + 16);
            assert!(!bench.can_write("vm", before * MIB), "hob does not know the new size yet");
            let changed = bench.resize_disk("vm", None).await.unwrap();
            assert!(changed.notes[0].contains("NBD clients"), "{:?}", changed.notes);
            assert_eq!(changed.disk.unwrap().size, Size((before + 16) * MIB));
            assert_eq!(bench.size("vm"), before + 16);
            assert!(bench.can_write("vm", (before + 16) * MIB - BLOCK));
        }
        let changed = bench.resize_disk("vm", None).await.unwrap();
        assert_eq!(changed.notes, ["the disk already has 96M"]);
        bench.resize_disk("vm", Some(128 * MIB)).await.unwrap();
        assert_eq!((bench.size("vm"), bench.img("vm").metadata().unwrap().len()), (128, 128 * MIB));
        assert!(bench.can_write("vm", 128 * MIB - BLOCK) && !bench.can_write("vm", 128 * MIB));
        bench.resize_disk("vm", Some(128 * MIB)).await.unwrap();
    });
}

#[test]
fn what_cannot_be_is_refused_and_changes_nothing() {
    run(async |bench| {
        bench.disk("vm").await;
        let backing = bench.image("ro.img", 64);
        let add = DiskAdd { name: "ro".into(), backing, read_only: true, ..DiskAdd::default() };
        bench.services.disks.disk_add(add).await.unwrap();
        let refused = async |disk: &str, size: Option<u64>, kind: ErrorKind, part: &str| {
            let error = bench.resize_disk(disk, size).await.unwrap_err();
            assert_eq!(error.kind, kind, "{error}");
            assert!(error.to_string().contains(part), "{error}");
        };
        refused("none", None, ErrorKind::NotFound, "no disk 'none'").await;
        refused("vm", Some(32 * MIB), ErrorKind::Conflict, "cannot get smaller: it has 67108864 bytes").await;
        refused("vm", Some(0), ErrorKind::Conflict, "cannot get smaller").await;
        refused("vm", Some(64 * MIB + 1), ErrorKind::Invalid, "a multiple of 512 bytes, not 67108865").await;
        refused("vm", Some(1 << 63), ErrorKind::Invalid, "does not support files of 8E").await;
        refused("ro", Some(65 * MIB), ErrorKind::Conflict, "read-only").await;
        truncate(&bench.img("vm"), 80);
        refused("vm", Some(72 * MIB), ErrorKind::Conflict, "has 80M already").await;
        truncate(&bench.img("vm"), 48);
        refused("vm", None, ErrorKind::Conflict, "its backing has 48M, and the disk has 64M").await;
        refused("vm", Some(96 * MIB), ErrorKind::Conflict, "its backing has 48M, and the disk has 64M").await;
        File::options().write(true).open(bench.img("vm")).unwrap().set_len(64 * MIB + 100).unwrap();
        refused("vm", None, ErrorKind::Invalid, "a multiple of 512 bytes").await;
        assert_eq!((bench.size("vm"), bench.size("ro")), (64, 64));
        truncate(&bench.img("ro"), 80);
        bench.resize_disk("ro", None).await.unwrap();
        assert_eq!(bench.size("ro"), 80, "the backing is larger");
    });
    run(async |bench| {
        bench.pool(&["a"], 8).await;
        bench.disk("vm").await;
        bench.cache("vm", 2).await.unwrap();
        let error = bench.resize_disk("vm", Some(1 << 45)).await.unwrap_err();
        assert!(error.to_string().contains("blocks of 4K supports disks of at most"), "{error}");
        assert_eq!(bench.img("vm").metadata().unwrap().len(), 64 * MIB, "the backing keeps its size");
    });
}

/// Promises 1 and 2: flushed data is there, and cached data is trusted, at the new size.
#[test]
fn a_persistent_cache_knows_the_new_size_over_crashes_and_ends() {
    run(async |bench| {
        let bench = prepare(bench, LAZY).await;
        write(&bench, 0..100);
        read(&bench, 1000..1100);
        let free = bench.free();
        bench.resize_disk("vm", Some(96 * MIB)).await.unwrap();
        assert_eq!((bench.free(), sectors(&bench).await), (free, (200, 100)));
        let last = 96 * MIB / BLOCK - 1;
        write(&bench, last..last + 1);
        tokio::time::sleep(COMMITTED).await;
        let bench = super::recovery::crash(bench).await;
        assert_eq!((bench.size("vm"), bench.free()), (96, free));
        assert_eq!(sectors(&bench).await, (201, 101));
        let bench = end(bench, false, |_| ()).await;
        assert_eq!((bench.size("vm"), sectors(&bench).await), (96, (201, 101)));
        bench.services.disks.disk_remove("vm".into(), OnDirty::Drain).await.unwrap();
        assert_eq!(bench.free(), 16);
    });
}

#[test]
fn a_crash_between_the_backing_and_the_journal_keeps_what_the_cache_holds() {
    run(async |bench| {
        let bench = prepare(bench, LAZY).await;
        write(&bench, 0..100);
        tokio::time::sleep(COMMITTED).await;
        let bench = crash_and_grow(bench, 96).await;
        assert_eq!((bench.size("vm"), sectors(&bench).await), (96, (100, 100)));
        // A different backing, or one whose content does not match the cached data, is not treated
        // as a grown one.
        let bench = crash_and_grow(bench, 80).await;
        let disk = bench.services.observe.disk("vm").unwrap();
        assert_eq!(disk.state, DiskLife::Offline, "it got smaller");
    });
    run(async |bench| {
        let bench = prepare(bench, r#"{"persistent":true}"#).await;
        read(&bench, 0..200);
        // Its ring begins with all data.
        let bench = end(bench, false, |_| ()).await;
        let bench = crash_and_grow(bench, 96).await;
        assert_eq!((bench.size("vm"), sectors(&bench).await), (96, (200, 0)));
        tokio::time::sleep(COMMITTED).await;
        let image = File::options().write(true).open(bench.img("vm")).unwrap();
        std::os::unix::fs::FileExt::write_all_at(&image, &vec![7; 2 << 20], 0).unwrap();
        let bench = crash_and_grow(bench, 128).await;
        assert_eq!((bench.size("vm"), sectors(&bench).await), (128, (0, 0)), "the sample differs");
    });
}

#[test]
fn who_grows_a_backing_while_hob_is_away_may_have_changed_it_too() {
    run(async |bench| {
        let bench = prepare(bench, r#"{"persistent":true}"#).await;
        read(&bench, 0..200);
        let bench = end(bench, false, |dir| truncate(&dir.join("vm.img"), 96)).await;
        assert_eq!((bench.size("vm"), sectors(&bench).await), (96, (0, 0)));
    });
    run(async |bench| {
        let bench = prepare(bench, LAZY).await;
        write(&bench, 0..100);
        let bench = end(bench, false, |dir| truncate(&dir.join("vm.img"), 96)).await;
        let disk = bench.services.observe.disk("vm").unwrap();
        let reason = disk.reason.unwrap();
        assert!(reason.contains("has grown while hob did not serve it"), "{reason}");
    });
}

#[test]
fn bitmaps_count_what_is_new_as_changed_over_a_crash_too() {
    const GRANULE: u64 = 64 << 10;
    run(async |bench| {
        let bench = prepare(bench, LAZY).await;
        let add = BitmapAdd { name: "b".into(), granularity: None };
        bench.services.exports.bitmap_add("vm".into(), add).await.unwrap();
        write(&bench, 0..1);
        let rotate = BitmapRotate { frozen: "b1".into() };
        bench.services.exports.bitmap_rotate("vm".into(), "b".into(), rotate).await.unwrap();
        let dirty = async |bench: &Bench, name: &str| {
            let all = bench.services.exports.bitmaps("vm".into()).await.unwrap().bitmaps;
            let found = all.into_iter().find(|bitmap| bitmap.name == name).unwrap();
            (found.dirty.unwrap().bytes(), found.everything_because.is_some())
        };
        bench.resize_disk("vm", Some(96 * MIB)).await.unwrap();
        let grown = 32 * MIB;
        assert_eq!(dirty(&bench, "b").await, (grown, false));
        assert_eq!(dirty(&bench, "b1").await, (grown + GRANULE, false));
        let bench = end(bench, false, |_| ()).await;
        assert_eq!(dirty(&bench, "b").await, (grown, false));
        assert_eq!(dirty(&bench, "b1").await, (grown + GRANULE, false), "its file is of the old size");
        let bench = crash_and_grow(bench, 128).await;
        assert_eq!(dirty(&bench, "b").await, (128 * MIB, true));
        assert_eq!(dirty(&bench, "b1").await, (grown + 32 * MIB + GRANULE, false));
    });
}

/// hob knows only the size that the backing had at the last connection, and this size may be
/// outdated.
#[test]
fn a_disk_is_not_resized_while_its_backing_does_not_answer() {
    run(async |bench| {
        bench.disk("vm").await;
        let before = bench.size("vm");
        truncate(&bench.img("vm"), before + 16);
        let monitor = {
            let inner = bench.services.registry.inner();
            inner.disk("vm").unwrap().measure.as_ref().unwrap().monitor.clone()
        };
        monitor.note_outage(std::time::Duration::ZERO, "Connection refused");
        for size in [None, Some((before + 16) * MIB)] {
            let error = bench.resize_disk("vm", size).await.unwrap_err();
            assert!(error.to_string().contains("Connection refused"), "{error}");
        }
        assert_eq!(bench.size("vm"), before);
        monitor.note_connected();
        bench.resize_disk("vm", None).await.unwrap();
        assert_eq!(bench.size("vm"), before + 16);
    });
}
