//! Disks that their shard refuses to remove, for example because the journal of the disk's cache
//! cannot be closed. The shard still uses the backing and the cache of such a disk.

use std::time::Duration;

use super::journal_lost;
use super::recovery::{LAZY, prepare, reason, sectors, write};
use super::*;
use crate::api_error::ApiError;
use crate::cluster::Cluster;
use crate::services::registry::JOURNAL_LOST;

fn id(bench: &Bench, disk: &str) -> DiskId {
    bench.services.registry.inner().disks[disk].id
}

/// Returns the owner of the cache's segments.
fn owner(bench: &Bench) -> String {
    let inner = bench.services.registry.inner();
    inner.disks["vm"].cache().unwrap().journal.unwrap().owner.to_string()
}

fn is_kept(bench: &Bench) -> bool {
    !bench.services.registry.inner().kept_by_shard.is_empty()
}

/// Waits until the shard has removed all disks that it kept, and the disk is online.
async fn await_online(bench: &Bench) {
    let is_online = || bench.services.observe.disk("vm").unwrap().state == DiskLife::Online;
    for _ in 0..600 {
        if !is_kept(bench) && is_online() {
            return;
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    panic!("the disk is not online: {:?}", bench.services.observe.disk("vm"));
}

/// Takes the disk offline, although its shard keeps it.
async fn take_offline(bench: &Bench) {
    bench.shard.set_keeps_disks(true);
    bench.services.disks.take_offline("vm", &ApiError::failed("a test took it offline")).await;
    assert!(is_kept(bench) && reason(bench).contains("a test took it offline"));
}

/// The segments of a cache that is in use must not be given to another cache.
#[test]
fn a_disk_that_its_shard_keeps_is_not_removed_with_its_dirty_data() {
    run(async |bench| {
        let bench = prepare(bench, LAZY).await;
        write(&bench, 5..15);
        let (before, free) = (id(&bench, "vm"), bench.free());
        bench.shard.set_keeps_disks(true);
        let disks = &bench.services.disks;
        let error = disks.disk_remove("vm".into(), OnDirty::Discard).await.unwrap_err().to_string();
        assert!(error.contains("its cache is still open"), "{error}");
        assert!(error.contains("or restart the daemon"), "{error}");
        assert!(is_kept(&bench) && !reason(&bench).is_empty());
        assert_eq!(bench.free(), free, "the shard uses these segments");
        bench.disk("other").await;
        assert!(id(&bench, "other") != before && id(&bench, "vm") != before, "the shard uses this id");
        bench.shard.set_keeps_disks(false);
        await_online(&bench).await;
        settled(&bench.services).await;
        disks.disk_remove("vm".into(), OnDirty::Discard).await.unwrap();
        assert_eq!(bench.free(), 16);
    });
}

/// Without the saved end of the cache, its journal could describe discarded data as dirty after a
/// restart.
#[test]
fn a_disk_whose_end_of_the_cache_cannot_be_saved_stays_in_use_with_its_dirty_data() {
    run(async |bench| {
        let bench = prepare(bench, LAZY).await;
        write(&bench, 5..15);
        bench.take_away("state");
        let disks = &bench.services.disks;
        let error = disks.disk_remove("vm".into(), OnDirty::Discard).await.unwrap_err().to_string();
        assert!(error.contains("state.json"), "{error}");
        assert_eq!(bench.services.observe.disk("vm").unwrap().state, DiskLife::Online);
        assert_eq!(sectors(&bench).await.1, 10);
        bench.bring_back("state");
        disks.disk_remove("vm".into(), OnDirty::Discard).await.unwrap();
        assert_eq!(bench.free(), 16);
    });
}

/// If hob stops before the shard removes the disk, the lost journal still describes the discarded
/// data as dirty.
#[test]
fn a_discard_with_a_lost_journal_is_saved_although_the_shard_keeps_the_disk() {
    run(async |bench| {
        let bench = prepare(bench, LAZY).await;
        write(&bench, 5..15);
        bench.services.registry.inner().disk_mut("vm").unwrap().cache_reason = Some(JOURNAL_LOST.to_owned());
        bench.shard.set_keeps_disks(true);
        bench.services.disks.disk_remove("vm".into(), OnDirty::Discard).await.unwrap_err();
        let cache = bench.services.registry.inner().disks["vm"].wanted.cache.clone();
        let journal = cache.unwrap().journal.unwrap();
        assert!(journal.ring > 0 && journal.discarded_ring == journal.ring, "{journal:?}");
    });
}

/// A second opening would use the backing and the cache together with the first.
#[test]
fn a_disk_that_its_shard_keeps_is_not_opened_again() {
    run(async |bench| {
        let bench = prepare(bench, LAZY).await;
        write(&bench, 5..15);
        take_offline(&bench).await;
        bench.services.disks.bring_online("vm").await;
        assert!(reason(&bench).contains("its cache is still open"), "{}", reason(&bench));
        bench.shard.set_keeps_disks(false);
        await_online(&bench).await;
    });
}

/// An orphan can be adopted or discarded, so a cache that a shard still uses must not count as an
/// orphan.
#[test]
fn the_cache_of_a_removed_disk_that_its_shard_keeps_is_no_orphan() {
    run(async |bench| {
        let bench = prepare(bench, LAZY).await;
        write(&bench, 5..15);
        let owner = owner(&bench);
        take_offline(&bench).await;
        bench.services.registry.inner().disks.remove("vm");
        let error = bench.services.registry.inner().orphan("p", &owner).unwrap_err().to_string();
        assert!(error.contains("is the cache of a disk"), "{error}");
        bench.shard.set_keeps_disks(false);
        for _ in 0..600 {
            if !is_kept(&bench) {
                break;
            }
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
        bench.services.pools.refresh_owners("p").await;
        assert_eq!(bench.services.registry.inner().orphan("p", &owner).unwrap().to_string(), owner);
    });
}

/// Another host may acquire the disk as soon as this host has released it.
#[test]
fn the_shard_stops_using_the_backing_of_a_kept_disk_in_a_cluster() {
    for in_cluster in [false, true] {
        run(async |bench| {
            let bench = prepare(bench, LAZY).await;
            write(&bench, 5..15);
            let before = id(&bench, "vm");
            let config = Config::parse("[cluster]\netcd = [\"http://127.0.0.1:1\"]\nhost = \"a\"\n").unwrap();
            let cluster = Cluster::join(config.cluster.as_ref().unwrap(), bench.dir.path(), &[]).unwrap();
            if in_cluster {
                bench.services.set_cluster(cluster.clone());
            }
            take_offline(&bench).await;
            // The shard handles its orders in order.
            tokio::time::sleep(Duration::from_secs(1)).await;
            assert_eq!(bench.shard.is_lost(before), in_cluster);
            cluster.end(false).await;
        });
    }
}

/// The cache of the disk has lost its journal before the disk must be closed. The cache cannot be
/// closed without a journal, and no command can give a new journal to the cache of an offline disk.
#[test]
fn a_kept_disk_whose_journal_is_lost_gets_a_new_one_and_is_opened_with_its_cache() {
    run(async |bench| {
        let sick = journal_lost::prepare(&bench, &["a", "b"], 20).await;
        let before_loss = owner(&bench);
        bench.shard.set_sick(sick);
        let before = id(&bench, "vm");
        assert!(bench.shard.write(before, 1 << 20, 4096).is_err(), "it waits for another journal");
        // The disk is closed before the loss of the journal is handled.
        drop(bench.shard.take_events());
        bench.services.disks.take_offline("vm", &ApiError::failed("a test took it offline")).await;
        assert!(is_kept(&bench), "a cache without a journal cannot be closed");
        bench.shard.set_none_sick();
        await_online(&bench).await;
        settled(&bench.services).await;
        let cache = bench.services.observe.disk("vm").unwrap().cache.unwrap();
        assert_eq!((owner(&bench), cache.state), (before_loss, CacheState::Active), "it is the same cache");
    });
}
