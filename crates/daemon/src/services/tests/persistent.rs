//! Persistent caches: journals use space and free it, and dirty data is drained before it could be
//! lost.

use std::time::Duration;

use hob_control::PlannedChange;
use hob_engine::command::Copies;

use super::*;

/// Size of a block, so that guests' writes do not overlap others.
const BLOCK: u64 = 4096;

impl Bench {
    async fn set(&self, disk: &str, json: &str) -> Result<DiskChanged> {
        self.services.pools.cache_patch(disk.into(), serde_json::from_str(json).unwrap()).await
    }

    fn id(&self, disk: &str) -> DiskId {
        self.services.registry.inner().disks[disk].id
    }

    fn write(&self, disk: &str, block: u64) {
        self.shard.write(self.id(disk), block * BLOCK, BLOCK).unwrap();
    }

    async fn dirty(&self, disk: &str) -> u64 {
        self.services.observe.stats(disk).await.unwrap().dirty_bytes
    }

    /// Returns the disk's current report about its dirty data.
    async fn shown(&self, disk: &str) -> hob_control::Dirty {
        let (shard, id) = self.services.registry.shard_of(disk).unwrap();
        self.services.pools.look(disk, &shard, id).await;
        self.services.observe.disk(disk).unwrap().cache.unwrap().dirty.unwrap()
    }
}

#[test]
fn a_journal_takes_room_besides_and_all_of_it_comes_back() {
    run(async |bench| {
        bench.pool(&["a", "b"], 8).await;
        bench.disk("vm").await;
        let changed = bench.cache_with("vm", 6, r#"{"mode":"write-back"}"#).await.unwrap();
        let cache = changed.disk.unwrap().cache.unwrap();
        assert_eq!((cache.journal, cache.room, cache.persistent), (Size(MIB), Size(6 * MIB), true));
        assert!(changed.notes[0].contains("journal takes 1M of pool p"), "{:?}", changed.notes);
        assert_eq!(bench.free(), 9);
        bench.resize("vm", 12).await.unwrap();
        assert_eq!((bench.room("vm"), bench.free()), (12, 3));
        bench.resize("vm", 2).await.unwrap();
        assert_eq!((bench.room("vm"), bench.free()), (2, 13));
        bench.set("vm", r#"{"block_size":65536}"#).await.unwrap();
        bench.services.pools.cache_clear("vm".into()).await.unwrap();
        assert_eq!(bench.free(), 13);
        bench.set("vm", r#"{"copies":"2-dirty"}"#).await.unwrap();
        assert_eq!(bench.free(), 12);
        bench.set("vm", r#"{"copies":"1"}"#).await.unwrap();
        assert_eq!(bench.free(), 13);
        bench.services.disks.cache_disable("vm".into(), OnDirty::Drain).await.unwrap();
        assert_eq!(bench.free(), 16);
        assert!(bench.services.observe.pool("p").unwrap().orphans.is_empty());
    });
}

/// Promise 1: a refused command leaves no unknown writes in a cache. Otherwise recovery could
/// confuse this cache with the disk's next cache, which has another owner.
#[test]
fn a_cache_of_which_the_shard_has_a_part_goes_before_it_is_forgotten() {
    run(async |bench| {
        let bench = bench.with_state();
        bench.pool(&["a"], 32).await;
        bench.disk("new").await;
        bench.shard.set_hangs(true);
        assert_eq!(bench.cache_with("new", 4, recovery::LAZY).await.unwrap_err().kind, ErrorKind::Busy);
        // When the shard has created the cache, the pool for its second copies does not exist.
        let pool = {
            let mut inner = bench.services.registry.inner();
            inner.disk_mut("new").unwrap().wanted.cache.as_mut().unwrap().copies = Copies::Peer;
            inner.pools.remove("p").unwrap()
        };
        bench.shard.set_hangs(false);
        settled(&bench.services).await;
        bench.services.registry.inner().pools.insert("p".into(), pool);
        assert_eq!(bench.services.observe.stats("new").await.unwrap().blocks, 0);
        assert!(bench.services.observe.disk("new").unwrap().cache.is_none());
        bench.cache_with("new", 4, recovery::LAZY).await.unwrap();
        (0..100).for_each(|block| bench.write("new", block));
        let bench = recovery::crash(bench).await;
        assert_eq!(bench.dirty("new").await, 100 * BLOCK);
    });
}

#[test]
fn a_cache_leaves_space_for_its_journal_and_for_the_next_one() {
    run(async |bench| {
        bench.pool(&["a"], 6).await;
        bench.disk("vm").await;
        for mib in [5, 6] {
            let error = bench.cache_with("vm", mib, r#"{"mode":"write-back"}"#).await.unwrap_err();
            let expected =
                format!("the pool has 4M free besides the space for journals and {mib}M are needed");
            assert!(error.to_string().contains(&expected), "{error}");
            assert_eq!((error.kind, bench.free()), (ErrorKind::Conflict, 6));
            assert!(bench.services.observe.disk("vm").unwrap().cache.is_none());
        }
        bench.cache_with("vm", 3, r#"{"mode":"write-back"}"#).await.unwrap();
        bench.resize("vm", 4).await.unwrap();
        let error = bench.resize("vm", 5).await.unwrap_err();
        assert!(error.to_string().contains("0 free besides the space for journals"), "{error}");
        // The space for the next ring is not for other caches either.
        bench.disk("other").await;
        let error = bench.cache("other", 1).await.unwrap_err();
        assert!(error.to_string().contains("besides the space for journals"), "{error}");
        assert_eq!((bench.room("vm"), bench.free()), (4, 1));
        bench.set("vm", r#"{"block_size":8192}"#).await.unwrap();
        assert_eq!((bench.room("vm"), bench.free()), (4, 1));
    });
}

#[test]
fn leaving_write_back_drains_and_a_failing_backing_keeps_it() {
    run(async |bench| {
        bench.pool(&["a"], 8).await;
        bench.disk("vm").await;
        bench.cache_with("vm", 4, r#"{"mode":"write-back","dirty_age_max":0}"#).await.unwrap();
        (0..100).for_each(|block| bench.write("vm", block));
        assert_eq!(bench.dirty("vm").await, 100 * BLOCK);
        bench.set("vm", r#"{"mode":"write-through"}"#).await.unwrap();
        let stats = bench.services.observe.stats("vm").await.unwrap();
        assert_eq!((stats.dirty_bytes, stats.mode.as_str(), stats.draining), (0, "write-through", false));
        assert!(stats.blocks_cached >= 100, "clean data stays");
        bench.set("vm", r#"{"mode":"write-back"}"#).await.unwrap();
        bench.write("vm", 7);
        bench.shard.set_backings_fail(true);
        let error = bench.set("vm", r#"{"mode":"pass-through"}"#).await.unwrap_err();
        assert_eq!(error.kind, ErrorKind::Busy, "{error}");
        assert_eq!(bench.services.observe.disk("vm").unwrap().cache.unwrap().mode, "write-back");
        bench.shard.set_backings_fail(false);
        while bench.services.observe.disk("vm").unwrap().cache.unwrap().mode != "pass-through" {
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
        assert_eq!(bench.dirty("vm").await, 0);
    });
}

#[test]
fn a_drain_is_begun_watched_stopped_and_taken_up_again() {
    run(async |bench| {
        let (_events, receiver) = tokio::sync::mpsc::unbounded_channel();
        tokio::spawn(bench.services.events.clone().tend(receiver));
        bench.pool(&["a"], 8).await;
        bench.disk("vm").await;
        bench.cache_with("vm", 4, r#"{"mode":"write-back","dirty_age_max":0}"#).await.unwrap();
        bench.write("vm", 1);
        bench.shard.set_backings_fail(true);
        let cache = bench.services.pools.drain("vm".into()).await.unwrap().disk.unwrap().cache.unwrap();
        assert_eq!((cache.state, cache.dirty.unwrap().draining), (CacheState::Active, true));
        let again = bench.services.pools.drain("vm".into()).await.unwrap();
        assert_eq!(again.notes, ["the drain continues"]);
        tokio::time::sleep(Duration::from_secs(20)).await;
        let dirty = bench.services.observe.disk("vm").unwrap().cache.unwrap().dirty.unwrap();
        assert!(dirty.why.as_ref().unwrap().contains("writes to the backing failed"), "{dirty:?}");
        assert_eq!((dirty.size, dirty.eta_seconds), (Size(BLOCK), None));
        let error = bench.resize("vm", 2).await.unwrap_err();
        assert!(error.to_string().contains("hob drain vm --stop"), "{error}");
        bench.services.pools.drain_stop("vm".into()).await.unwrap();
        tokio::time::sleep(Duration::from_secs(1)).await;
        let dirty = bench.shown("vm").await;
        assert!(!dirty.draining && dirty.size == Size(BLOCK), "{dirty:?}");
        bench.shard.set_backings_fail(false);
        tokio::time::sleep(Duration::from_secs(120)).await;
        bench.services.pools.drain("vm".into()).await.unwrap();
        tokio::time::sleep(Duration::from_secs(60)).await;
        let dirty = bench.shown("vm").await;
        assert_eq!((dirty.size, dirty.draining, dirty.why), (Size(0), false, None));
    });
}

#[test]
fn a_shrink_waits_for_a_failing_backing_and_writes_stay_on_flash() {
    run(async |bench| {
        let (_events, receiver) = tokio::sync::mpsc::unbounded_channel();
        tokio::spawn(bench.services.events.clone().tend(receiver));
        bench.pool(&["a"], 8).await;
        bench.disk("vm").await;
        bench
            .cache_with(
                "vm",
                4,
                r#"{"mode":"write-back","dirty_age_max":0,"dirty_start":65,"dirty_stop":60}"#,
            )
            .await
            .unwrap();
        (0..100).for_each(|block| bench.write("vm", block));
        bench.shard.set_backings_fail(true);
        for ends in ["stopped", "done"] {
            let error = bench.resize("vm", 2).await.unwrap_err();
            assert_eq!(error.kind, ErrorKind::Busy, "{error}");
            (0..200).for_each(|block| bench.write("vm", block));
            let cache = bench.services.observe.disk("vm").unwrap().cache.unwrap();
            assert_eq!(
                (cache.state, cache.room, cache.mode_in_effect),
                (CacheState::Active, Size(4 * MIB), None)
            );
            assert_eq!(bench.dirty("vm").await, 200 * BLOCK);
            let error = bench.resize("vm", 3).await.unwrap_err();
            assert!(error.to_string().contains("hob drain vm --stop"), "{error}");
            if ends == "stopped" {
                bench.services.pools.drain_stop("vm".into()).await.unwrap();
                settled(&bench.services).await;
                let cache = bench.services.observe.disk("vm").unwrap().cache.unwrap();
                assert_eq!((cache.size, cache.room), (Size(4 * MIB), Size(4 * MIB)));
            }
        }
        bench.shard.set_backings_fail(false);
        settled(&bench.services).await;
        let cache = bench.services.observe.disk("vm").unwrap().cache.unwrap();
        assert_eq!((cache.size, cache.room), (Size(2 * MIB), Size(2 * MIB)));
        assert_eq!(bench.dirty("vm").await, 200 * BLOCK, "what stays is as dirty as it was");
    });
}

/// The regular updates are a second apart, so a command that shows the disk asks the shard again.
#[test]
fn the_dirty_data_of_a_disk_is_read_from_its_shard_when_it_is_shown() {
    run(async |bench| {
        bench.pool(&["a"], 8).await;
        bench.disk("vm").await;
        bench.cache_with("vm", 4, r#"{"mode":"write-back","dirty_age_max":0}"#).await.unwrap();
        let shown = || bench.services.observe.disk("vm").unwrap().cache.unwrap().dirty.unwrap().size;
        bench.services.pools.refresh_dirty("vm").await;
        assert_eq!(shown(), Size(0));
        bench.write("vm", 1);
        bench.services.pools.refresh_dirty("vm").await;
        assert!(shown() > Size(0));
    });
}

#[test]
fn the_mode_in_effect_is_shown_while_a_drain_lets_writes_through() {
    run(async |bench| {
        let (_events, receiver) = tokio::sync::mpsc::unbounded_channel();
        tokio::spawn(bench.services.events.clone().tend(receiver));
        bench.pool(&["a"], 8).await;
        bench.disk("vm").await;
        bench.cache_with("vm", 4, r#"{"mode":"write-back","dirty_age_max":0}"#).await.unwrap();
        bench.write("vm", 1);
        let in_effect = || bench.services.observe.disk("vm").unwrap().cache.unwrap().mode_in_effect;
        assert_eq!(in_effect(), None);
        bench.shard.set_backings_fail(true);
        let drain = bench.services.pools.drain("vm".into());
        tokio::pin!(drain);
        // hob has not noticed yet that the backing refuses writes.
        assert!(tokio::time::timeout(Duration::from_millis(100), &mut drain).await.is_err());
        bench.services.pools.refresh_dirty("vm").await;
        assert_eq!(in_effect().as_deref(), Some("write-through until the drain ends"));
        drain.await.unwrap();
        bench.services.pools.drain_stop("vm".into()).await.unwrap();
        assert_eq!(in_effect(), None);
    });
}

#[test]
fn a_removal_that_discards_no_dirty_data_reports_no_loss() {
    run(async |bench| {
        bench.pool(&["a"], 8).await;
        bench.disk("vm").await;
        bench.cache_with("vm", 4, r#"{"mode":"write-back","dirty_age_max":0}"#).await.unwrap();
        let changed = bench.services.disks.disk_remove("vm".into(), OnDirty::Discard).await.unwrap();
        assert!(changed.notes.is_empty(), "{:?}", changed.notes);
    });
}

#[test]
fn a_volatile_cache_has_nothing_to_drain() {
    run(async |bench| {
        bench.pool(&["a"], 4).await;
        bench.disk("vm").await;
        bench.cache("vm", 2).await.unwrap();
        let changed = bench.services.pools.drain("vm".into()).await.unwrap();
        assert!(changed.notes[0].contains("the backing has all data"), "{:?}", changed.notes);
        assert!(changed.disk.unwrap().cache.unwrap().dirty.is_none());
        assert_eq!(bench.services.pools.drain_stop("vm".into()).await.unwrap().notes.len(), 0);
        let notes = bench.services.disks.discard_dirty("vm".into()).await.unwrap().notes;
        assert!(notes[0].contains("the backing has all data"), "{notes:?}");
    });
}

#[test]
fn a_disk_is_removed_after_its_dirty_data_has_reached_the_backing_or_is_discarded() {
    run(async |bench| {
        bench.pool(&["a"], 8).await;
        for disk in ["vm", "other"] {
            bench.disk(disk).await;
            bench.cache_with(disk, 2, r#"{"mode":"write-back","dirty_age_max":0}"#).await.unwrap();
            bench.write(disk, 3);
        }
        let before = bench.services.observe.stats("vm").await.unwrap();
        assert_eq!((before.dirty_bytes, before.destaged_bytes), (BLOCK, 0));
        assert!(
            bench.services.disks.disk_remove("vm".into(), OnDirty::Drain).await.unwrap().notes.is_empty()
        );
        bench.shard.set_backings_fail(true);
        let changed = bench.services.disks.discard_dirty("other".into()).await.unwrap();
        assert_eq!(changed.notes, ["4 KiB of dirty data is lost"]);
        assert_eq!(bench.dirty("other").await, 0);
        bench.shard.set_backings_fail(false);
        let flushed = bench.shard.write(bench.id("other"), 4 * BLOCK, BLOCK);
        assert!(flushed.is_err(), "the guest hears that acknowledged writes are lost");
        bench.write("other", 4);
        let changed = bench.services.disks.disk_remove("other".into(), OnDirty::Discard).await.unwrap();
        assert_eq!(changed.notes, ["4 KiB of dirty data is lost"]);
        assert_eq!(bench.free(), 8);
        assert!(
            bench.services.observe.disks().is_empty()
                && bench.services.observe.pool("p").unwrap().orphans.is_empty()
        );
    });
}

#[test]
fn dirty_data_leaves_a_device_before_it_is_taken_out() {
    run(async |bench| {
        bench.pool(&["a", "b"], 6).await;
        bench.disk("vm").await;
        bench.cache_with("vm", 4, r#"{"preset":"auto","dirty_age_max":0}"#).await.unwrap();
        (0..200).for_each(|block| bench.write("vm", block));
        assert_eq!(bench.free(), 12 - 4 - 2);
        bench.services.pools.device_remove("p".into(), bench.path("a")).await.unwrap();
        assert_eq!((bench.room("vm"), bench.free()), (4, 1));
        assert_eq!(bench.services.observe.stats("vm").await.unwrap().mode, "write-back");
        let cache = bench.services.observe.disk("vm").unwrap().cache.unwrap();
        assert!(cache.reason.unwrap().contains("dirty data has one copy"));
        bench
            .services
            .pools
            .device_add("p".into(), device_add(bench.path("c"), 6), OnDirty::Drain)
            .await
            .unwrap();
        let cache = bench.services.observe.disk("vm").unwrap().cache.unwrap();
        assert_eq!((cache.reason, cache.journal), (None, Size(2 * MIB)));
    });
}

#[test]
fn a_cache_that_becomes_persistent_or_volatile_begins_anew() {
    run(async |bench| {
        bench.pool(&["a"], 8).await;
        bench.disk("vm").await;
        bench.cache("vm", 2).await.unwrap();
        let changed = bench.set("vm", r#"{"persistent":true}"#).await.unwrap();
        assert!(changed.notes.iter().any(|note| note == "the cache starts empty"), "{:?}", changed.notes);
        assert_eq!((bench.free(), changed.disk.unwrap().cache.unwrap().mode.as_str()), (5, "write-through"));
        bench.set("vm", r#"{"preset":"vfrc"}"#).await.unwrap();
        assert_eq!((bench.room("vm"), bench.free()), (2, 6));
        assert!(bench.services.observe.pool("p").unwrap().orphans.is_empty());
    });
}

#[test]
fn a_disk_whose_cache_left_flash_has_no_amount_of_dirty_data() {
    run(async |bench| {
        bench.pool(&["a"], 8).await;
        bench.disk("vm").await;
        bench.cache_with("vm", 4, recovery::LAZY).await.unwrap();
        (0..100).for_each(|block| bench.write("vm", block));
        assert_eq!(bench.shown("vm").await.size, Size(100 * BLOCK));
        bench.services.pools.device_remove("p".into(), bench.path("a")).await.unwrap();
        let cache = bench.services.observe.disk("vm").unwrap().cache.unwrap();
        assert_eq!((cache.state, cache.dirty.is_none()), (CacheState::None, true));
        let drained = bench.services.pools.drain("vm".into()).await.unwrap();
        assert!(drained.notes[0].contains("no dirty data"), "{:?}", drained.notes);
        assert!(drained.disk.unwrap().cache.unwrap().dirty.is_none());
    });
}

#[test]
fn a_change_of_persistence_without_space_for_the_journal_changes_nothing() {
    run(async |bench| {
        bench.pool(&["a"], 4).await;
        bench.disk("vm").await;
        bench.cache("vm", 4).await.unwrap();
        bench.shard.take_changes();
        for json in [r#"{"mode":"write-back"}"#, r#"{"persistent":true}"#] {
            let error = bench.set("vm", json).await.unwrap_err();
            assert_eq!(error.kind, ErrorKind::Conflict);
            let said = error.to_string();
            assert!(
                said.contains(
                    "2M free besides the space for journals and 4M are needed; nothing was changed"
                ),
                "{said}"
            );
            let change = PlannedChange::Set { patch: Box::new(serde_json::from_str(json).unwrap()) };
            let rehearsed = bench.services.disks.preview("vm", &change).await.unwrap_err();
            assert_eq!(rehearsed.to_string(), said);
        }
        assert!(bench.shard.take_changes().is_empty(), "the cache keeps its contents");
        assert_eq!((bench.room("vm"), bench.free()), (4, 0));
        let cache = bench.services.observe.disk("vm").unwrap().cache.unwrap();
        assert_eq!((cache.mode.as_str(), cache.persistent), ("write-through", false));
    });
}

/// Promise 3 for the journal: its device fails, and a ring on another device replaces it.
#[test]
fn a_journal_whose_device_fails_is_made_anew_on_another_one() {
    run(async |bench| {
        bench.pool(&["a", "b"], 8).await;
        bench.disk("vm").await;
        bench.cache_with("vm", 4, r#"{"mode":"write-back","dirty_age_max":0}"#).await.unwrap();
        (0..20).for_each(|block| bench.write("vm", block));
        let sick = bench.services.registry.inner().disks["vm"].ring[0].device;
        bench.shard.set_sick(sick);
        let id = bench.id("vm");
        let mut lost = 0;
        // Until the device is fenced, its data segments make new journals fail too.
        for round in 0..50 {
            for block in 0..100 {
                // Some of these writes fail, because flash does not accept them.
                let _ = bench.shard.write(id, (1000 + round * 100 + block) * BLOCK, BLOCK);
            }
            tokio::time::sleep(Duration::from_secs(10)).await;
            let events = bench.shard.take_events();
            lost += events.iter().filter(|event| matches!(event, ShardEvent::JournalLost(_))).count();
            events.into_iter().for_each(|event| bench.services.events.handle(event));
            tokio::time::sleep(Duration::from_secs(30)).await;
        }
        assert!(lost > 0, "the journal was never lost");
        {
            let inner = bench.services.registry.inner();
            let disk = &inner.disks["vm"];
            let mut all = disk.held.iter().chain(&disk.ring);
            assert!(all.all(|segment| segment.device != sick), "{:?} {:?}", disk.held, disk.ring);
            assert_eq!((disk.held.len(), disk.ring.len()), (4, 1));
        }
        bench.services.pools.drain("vm".into()).await.unwrap();
        assert_eq!(bench.dirty("vm").await, 0);
        (0..10).for_each(|block| bench.write("vm", 9000 + block));
        assert_eq!(bench.dirty("vm").await, 10 * BLOCK, "the cache takes writes again");
        let cache = bench.services.observe.disk("vm").unwrap().cache.unwrap();
        assert_eq!((cache.state, cache.reason), (CacheState::Active, None));
    });
}

/// A fence moves persistent caches off the device, dirty data first.
#[test]
fn a_persistent_cache_leaves_a_fenced_device() {
    run(async |bench| {
        bench.pool(&["a", "b"], 8).await;
        bench.disk("vm").await;
        bench.cache_with("vm", 4, r#"{"mode":"write-back","dirty_age_max":0}"#).await.unwrap();
        (0..50).for_each(|block| bench.write("vm", block));
        let sick = bench.services.registry.inner().disks["vm"].held[0].device;
        bench.services.events.handle(ShardEvent::Fenced { device: sick, errors: 16 });
        tokio::time::sleep(Duration::from_secs(60)).await;
        {
            let inner = bench.services.registry.inner();
            let disk = &inner.disks["vm"];
            let all = || disk.held.iter().chain(&disk.ring);
            assert!(all().all(|segment| segment.device != sick), "{:?}", disk.held);
            assert_eq!((disk.held.len(), disk.ring.len()), (4, 1));
        }
        let stats = bench.services.observe.stats("vm").await.unwrap();
        assert_eq!(stats.dirty_bytes + stats.destaged_bytes, 50 * BLOCK);
    });
}
