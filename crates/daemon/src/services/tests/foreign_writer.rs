//! Another client takes over a backing. hob then no longer uses the backing's cached data, however
//! little the other client changes.

use std::os::unix::fs::FileExt;
use std::time::Duration;

use hob_storage::pool::OwnerId;

use super::recovery::{BLOCK, COMMITTED, LAZY, crash, end, prepare, read, reason, sectors, write};
use super::*;
use crate::api_error::ApiError;
use crate::services::disks::has_no_dirty_data;

/// Another host takes the disk over, writes one block, and releases the disk.
async fn lose(bench: &Bench) {
    let id = bench.services.registry.inner().disks["vm"].id;
    bench.services.disks.backing_lost(id, None).await;
    let image = std::fs::File::options().write(true).open(bench.dir.path().join("vm.img")).unwrap();
    image.write_all_at(&[7; BLOCK as usize], 1 << 20).unwrap();
}

/// The other client changes so little that a sample of clean data does not detect it, even after a
/// restart.
#[test]
fn dirty_data_is_not_written_over_what_the_other_wrote() {
    run(async |bench| {
        let bench = prepare(bench, LAZY).await;
        write(&bench, 5..15);
        read(&bench, 1000..1100);
        lose(&bench).await;
        let why = reason(&bench);
        assert!(why.contains("another program has taken") && why.contains("discard-dirty vm"), "{why}");
        let refused = |bench: &Bench| {
            let why = reason(bench);
            assert!(why.contains("another program or host has used the disk meanwhile, and 40 KiB"), "{why}");
            for part in ["hob cache discard-dirty vm", "hob cache export-dirty vm"] {
                assert!(why.contains(part), "{why}");
            }
        };
        bench.services.disks.bring_online("vm").await;
        refused(&bench);
        let bench = crash(bench).await;
        refused(&bench);
        let changed = bench.services.disks.discard_dirty("vm".into()).await.unwrap();
        assert_eq!(changed.disk.unwrap().state, DiskLife::Online);
        assert_eq!((sectors(&bench).await, bench.room("vm")), ((0, 0), 4));
        // The next cache is trusted as usual.
        write(&bench, 0..3);
        let bench = crash(bench).await;
        assert_eq!(sectors(&bench).await.1, 3);
    });
}

/// A disk with dirty data gives way to no migration, also if the owners of the pool do not name its
/// cache, because the cache is newer or a device is missing.
#[test]
fn a_lost_disk_keeps_its_dirty_data_until_that_is_discarded() {
    run(async |bench| {
        let bench = prepare(bench, LAZY).await;
        write(&bench, 5..15);
        lose(&bench).await;
        bench.services.registry.inner().pool_mut("p").unwrap().owners.clear();
        assert!(bench.services.migrations.keeps_dirty("vm"));
        bench.services.disks.discard_dirty("vm".into()).await.unwrap();
        assert_eq!(bench.services.registry.inner().disks["vm"].lost_dirty, None);
    });
}

/// The pool has segments of a clean cache too.
#[test]
fn a_lost_disk_without_dirty_data_keeps_none() {
    run(async |bench| {
        let bench = prepare(bench, LAZY).await;
        read(&bench, 1000..1100);
        tokio::time::sleep(COMMITTED).await;
        lose(&bench).await;
        note_segments(&bench);
        assert!(!bench.services.migrations.keeps_dirty("vm"));
    });
}

/// Records that the pool has segments of the disk's cache, as an examination of flash would.
fn note_segments(bench: &Bench) {
    let mut inner = bench.services.registry.inner();
    let owner = inner.disks["vm"].cache().unwrap().journal.unwrap().owner;
    inner.pool_mut("p").unwrap().owners = vec![(OwnerId(owner.0), 4)];
}

/// Renames the image, so that the disk stays offline, and back.
fn rename_image(dir: &Path, [from, to]: [&str; 2]) {
    std::fs::rename(dir.join(from), dir.join(to)).unwrap();
}

/// A restarted daemon knows that a lost cache had no dirty data. A cache that is used later may
/// have dirty data again.
#[test]
fn a_restarted_daemon_knows_that_a_lost_disk_had_no_dirty_data() {
    run(async |bench| {
        let bench = prepare(bench, LAZY).await;
        read(&bench, 1000..1100);
        tokio::time::sleep(COMMITTED).await;
        lose(&bench).await;
        rename_image(bench.dir.path(), ["vm.img", "away.img"]);
        let bench = crash(bench).await;
        reason(&bench);
        note_segments(&bench);
        assert!(!bench.services.migrations.keeps_dirty("vm"));
        rename_image(bench.dir.path(), ["away.img", "vm.img"]);
        bench.services.disks.bring_online("vm").await;
        settled(&bench.services).await;
        write(&bench, 0..3);
        bench.services.disks.take_offline("vm", &ApiError::failed("a test took it offline")).await;
        note_segments(&bench);
        assert!(bench.services.migrations.keeps_dirty("vm"));
    });
}

/// A daemon that drained its disks when it ended knows that their caches are clean.
#[test]
fn a_restarted_daemon_knows_that_a_disk_was_drained() {
    for is_drained in [false, true] {
        run(async |bench| {
            let bench = prepare(bench, LAZY).await;
            write(&bench, 5..15);
            let bench = end(bench, is_drained, |dir| rename_image(dir, ["vm.img", "away.img"])).await;
            note_segments(&bench);
            assert_eq!(bench.services.migrations.keeps_dirty("vm"), !is_drained);
        });
    }
}

/// A device with the only copy of dirty data is missing, and may return.
#[test]
fn a_cache_with_dirty_data_on_a_missing_device_is_not_clean() {
    run(async |bench| {
        let bench = prepare(bench, LAZY).await;
        let (shard, id) = bench.services.registry.shard_of("vm").unwrap();
        let mut stats = shard.stats(id).await.unwrap();
        assert!(has_no_dirty_data(&stats));
        stats.sectors_lost = 1;
        assert!(!has_no_dirty_data(&stats));
        (stats.sectors_lost, stats.sectors_dirty) = (0, 1);
        assert!(!has_no_dirty_data(&stats));
    });
}

/// A device that hangs blocks its pool. A disk without dirty data goes offline nevertheless, and is
/// opened again only when its cache is invalid.
#[test]
fn a_lost_disk_without_dirty_data_does_not_wait_for_its_pool() {
    run(async |bench| {
        let bench = prepare(bench, LAZY).await;
        read(&bench, 1000..1100);
        tokio::time::sleep(COMMITTED).await;
        let flash = bench.services.registry.inner().pool("p").unwrap().flash.clone();
        let (begin, begun) = tokio::sync::oneshot::channel();
        let (release, released) = std::sync::mpsc::channel::<()>();
        let hanging = tokio::spawn(async move {
            let hang = flash.with(move |_| {
                let _ = begin.send(());
                // If the disk waits for the pool, the test fails instead of hanging.
                let _ = released.recv_timeout(Duration::from_secs(30));
                Ok(())
            });
            hang.await.map(drop)
        });
        begun.await.unwrap();
        // Virtual time stands still while a thread waits.
        tokio::time::resume();
        lose(&bench).await;
        assert!(!hanging.is_finished(), "the disk waited for its pool");
        assert!(reason(&bench).contains("another program has taken"), "{}", reason(&bench));
        bench.services.disks.bring_online("vm").await;
        assert!(bench.services.registry.inner().disks["vm"].busy.is_some(), "its cache is still valid");
        release.send(()).unwrap();
        hanging.await.unwrap().unwrap();
        settled(&bench.services).await;
        bench.services.disks.bring_online("vm").await;
        settled(&bench.services).await;
        assert_eq!((sectors(&bench).await, bench.room("vm")), ((0, 0), 4));
    });
}

/// A missing device may have the journal and the dirty data of a cache.
#[test]
fn an_offline_disk_may_have_dirty_data_if_a_device_of_its_pool_is_missing() {
    run(async |bench| {
        let bench = prepare(bench, LAZY).await;
        write(&bench, 5..15);
        bench.services.disks.take_offline("vm", &ApiError::failed("a test took it offline")).await;
        let keeps_dirty = || bench.services.migrations.keeps_dirty("vm");
        bench.services.registry.inner().pool_mut("p").unwrap().owners.clear();
        assert!(!keeps_dirty());
        let ids = bench.services.registry.inner().pool_mut("p").unwrap().devices[0].ids.take();
        assert!(keeps_dirty());
        bench.services.registry.inner().pool_mut("p").unwrap().devices[0].ids = ids;
    });
}

/// If only the backing's file was renamed, the reason does not name another program.
#[test]
fn the_reason_says_what_happened_to_the_file() {
    run(async |bench| {
        let bench = prepare(bench, LAZY).await;
        let id = bench.services.registry.inner().disks["vm"].id;
        let why = "/srv/golden.qcow2 was renamed, replaced or changed".to_owned();
        bench.services.disks.backing_lost(id, Some(why)).await;
        let shown = reason(&bench);
        assert!(shown.contains("golden.qcow2 was renamed") && !shown.contains("another program"), "{shown}");
    });
}

/// Clean data is dropped without a loss, because the backing has it too.
#[test]
fn clean_data_is_dropped_and_the_disk_comes_back() {
    run(async |bench| {
        let bench = prepare(bench, LAZY).await;
        read(&bench, 1000..1100);
        tokio::time::sleep(COMMITTED).await;
        let free = bench.free();
        lose(&bench).await;
        let bench = crash(bench).await;
        assert_eq!((sectors(&bench).await, bench.room("vm"), bench.free()), ((0, 0), 4, free));
        assert!(bench.services.observe.pool("p").unwrap().orphans.is_empty());
        write(&bench, 0..3);
        let bench = crash(bench).await;
        assert_eq!(sectors(&bench).await.1, 3);
    });
}

/// The daemon process that lost the disk opens the disk again.
#[test]
fn a_disk_that_comes_back_without_a_restart_has_a_cache() {
    run(async |bench| {
        let bench = prepare(bench, LAZY).await;
        read(&bench, 1000..1100);
        tokio::time::sleep(COMMITTED).await;
        let free = bench.free();
        lose(&bench).await;
        bench.services.disks.bring_online("vm").await;
        settled(&bench.services).await;
        assert_eq!((sectors(&bench).await, bench.room("vm"), bench.free()), ((0, 0), 4, free));
        // The whole block is filled.
        read(&bench, 0..16);
        assert_eq!(sectors(&bench).await.0, 16);
    });
}

/// A shard keeps a disk if it cannot close the journal of the disk's cache. Another opening would
/// find the id and the backing in use.
#[test]
fn a_lost_disk_that_its_shard_keeps_is_opened_when_the_shard_has_removed_it() {
    run(async |bench| {
        let bench = prepare(bench, LAZY).await;
        write(&bench, 5..15);
        let id = || bench.services.registry.inner().disks["vm"].id;
        let is_kept = || !bench.services.registry.inner().abandoned.is_empty();
        let before = id();
        bench.shard.set_keeps_disks(true);
        lose(&bench).await;
        assert!(reason(&bench).contains("another program has taken"), "{}", reason(&bench));
        assert!(id() != before && is_kept(), "the shard still has the disk");
        tokio::time::sleep(Duration::from_secs(60)).await;
        assert!(is_kept());
        // The cache is in use, so nothing else may use its segments.
        let disks = &bench.services.disks;
        let export = hob_control::ExportDirty { path: bench.path("exported") };
        // hob tries every 5 s to remove the disk from its shard, and refuses other commands meanwhile.
        let refusal = async |number: u32| loop {
            let result = match number {
                0 => disks.discard_dirty("vm".into()).await,
                1 => disks.cache_disable("vm".into(), OnDirty::Discard).await,
                2 => disks.disk_remove("vm".into(), OnDirty::Discard).await,
                _ => disks.export_dirty("vm".into(), export.clone()).await,
            };
            let error = result.unwrap_err().to_string();
            if !error.contains("is being opened") {
                return error;
            }
            tokio::time::sleep(Duration::from_millis(1)).await;
        };
        for number in 0..4 {
            let error = refusal(number).await;
            assert!(error.contains("its cache is still open"), "{error}");
        }
        bench.shard.set_keeps_disks(false);
        for _ in 0..600 {
            if reason(&bench).contains("has used the disk meanwhile") {
                break;
            }
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
        let why = reason(&bench);
        assert!(why.contains("another program or host has used the disk meanwhile, and 40 KiB"), "{why}");
        assert!(!is_kept());
        let changed = bench.services.disks.discard_dirty("vm".into()).await.unwrap();
        assert_eq!(changed.disk.unwrap().state, DiskLife::Online);
    });
}
