//! The daemon's actions when a journal cannot be written any more, and its reports when a device
//! does not answer.

use std::time::Duration;

use hob_control::{HealthProblem, ProblemKind, TaskState};
use hob_storage::pool::OwnerId;

use super::*;
use crate::state::JournalSpec;

const BLOCK: u64 = 4096;

/// Prepares a write-back cache `vm` with dirty data on these devices, and returns the device of its
/// journal.
pub(super) async fn prepare(bench: &Bench, devices: &[&str], blocks: u64) -> DeviceId {
    bench.pool(devices, 8).await;
    bench.disk("vm").await;
    bench.cache_with("vm", 4, r#"{"mode":"write-back","dirty_age_max":0}"#).await.unwrap();
    let id = bench.services.registry.inner().disks["vm"].id;
    (0..blocks).for_each(|block| bench.shard.write(id, block * BLOCK, BLOCK).unwrap());
    bench.services.registry.inner().disks["vm"].ring[0].device
}

/// The journal is lost during a write, and the daemon is notified. The device answers slowly and is
/// not fenced yet.
pub(super) async fn lose(bench: &Bench, device: DeviceId) {
    bench.shard.set_sick(device);
    let id = bench.services.registry.inner().disks["vm"].id;
    assert!(bench.shard.write(id, 1 << 20, BLOCK).is_err(), "it waits for another journal");
    let lost = |event: &ShardEvent| matches!(event, ShardEvent::JournalLost(_));
    let events: Vec<ShardEvent> = bench.shard.take_events().into_iter().filter(lost).collect();
    assert_eq!(events.len(), 1);
    events.into_iter().for_each(|event| bench.services.events.handle(event));
}

fn journal_owner(bench: &Bench) -> u128 {
    bench.services.registry.inner().disks["vm"].wanted.cache.as_ref().unwrap().journal.unwrap().owner.0
}

#[test]
fn another_device_takes_the_journal_over_within_seconds() {
    run(async |bench| {
        let sick = prepare(&bench, &["a", "b"], 20).await;
        let owner = journal_owner(&bench);
        lose(&bench, sick).await;
        let shown = bench.services.observe.disk("vm").unwrap().cache.unwrap().reason.unwrap();
        assert!(shown.contains("journal cannot be written"), "{shown}");
        tokio::time::sleep(Duration::from_secs(10)).await;
        let (id, ring) = {
            let inner = bench.services.registry.inner();
            (inner.disks["vm"].id, inner.disks["vm"].ring.clone())
        };
        assert!(!ring.is_empty() && ring.iter().all(|segment| segment.device != sick), "{ring:?}");
        assert_eq!(journal_owner(&bench), owner, "it is the same cache");
        let cache = bench.services.observe.disk("vm").unwrap().cache.unwrap();
        assert_eq!(
            (cache.state, cache.reason, cache.mode.as_str()),
            (CacheState::Active, None, "write-back")
        );
        bench.shard.write(id, 2 << 20, BLOCK).unwrap();
    });
}

/// A journal is lost, and the pool has no other device: the disk continues without a cache, and the
/// old cache's data on flash is never used again.
#[test]
fn without_another_device_the_disk_goes_on_without_a_cache() {
    run(async |bench| {
        let bench = bench.with_state();
        let sick = prepare(&bench, &["a"], 20).await;
        let owner = journal_owner(&bench);
        lose(&bench, sick).await;
        tokio::time::sleep(Duration::from_secs(20)).await;
        let id = bench.services.registry.inner().disks["vm"].id;
        bench.shard.write(id, 2 << 20, BLOCK).unwrap();
        assert_ne!(journal_owner(&bench), owner);
        let cache = bench.services.observe.disk("vm").unwrap().cache.unwrap();
        assert_eq!(cache.state, CacheState::None);
        assert!(cache.reason.unwrap().contains("a new cache could not be created"));
        // With a working device, the disk has its cache again.
        let size = hob_storage::pool::device_bytes_for(8 * MIB, SEGMENT);
        let add = DeviceAdd { path: bench.path("b"), size: Some(Size(size)), peer: None, force: false };
        bench.services.events.handle(ShardEvent::Fenced { device: sick, errors: 16 });
        tokio::time::sleep(Duration::from_secs(5)).await;
        bench.services.pools.device_add("p".into(), add, OnDirty::Drain).await.unwrap();
        assert_eq!(bench.room("vm"), 4);
        bench.shard.write(id, 3 << 20, BLOCK).unwrap();
        assert_eq!(bench.services.observe.stats("vm").await.unwrap().dirty_bytes, BLOCK);
    });
}

/// The lost journal still describes the discarded data as dirty.
#[test]
fn what_was_discarded_without_a_journal_stays_discarded_after_a_kill() {
    run(async |bench| {
        let bench = bench.with_state();
        let device = prepare(&bench, &["a"], 20).await;
        let id = bench.services.registry.inner().disks["vm"].id;
        bench.shard.set_backings_fail(true);
        bench.shard.set_sick(device);
        assert!(bench.shard.write(id, 1 << 20, BLOCK).is_err(), "the journal is lost");
        bench.shard.take_events();
        let services = bench.services.clone();
        let discard = tokio::spawn(async move { services.disks.discard_dirty("vm".into()).await });
        let mut is_asked = false;
        while !discard.is_finished() {
            tokio::time::sleep(Duration::from_millis(10)).await;
            let asks = |event: &ShardEvent| matches!(event, ShardEvent::DiscardUnrecorded(..));
            for event in bench.shard.take_events().into_iter().filter(asks) {
                is_asked = true;
                bench.services.events.handle(event);
            }
        }
        let changed = discard.await.unwrap().unwrap();
        assert!(is_asked && changed.notes.concat().contains("of dirty data is lost"), "{:?}", changed.notes);
        let journal =
            bench.services.registry.inner().disks["vm"].wanted.cache.clone().unwrap().journal.unwrap();
        assert!(journal.ring > 0 && journal.discarded_ring == journal.ring, "{journal:?}");
        let bench = super::recovery::crash(bench).await;
        assert_eq!(bench.services.observe.stats("vm").await.unwrap().dirty_bytes, 0);
    });
}

/// If the last write of a new ring fails, flash may have this ring, with the dirty data that is
/// discarded later. Recovery would use the new ring.
#[test]
fn a_discard_covers_a_newer_ring_that_was_never_in_service() {
    run(async |bench| {
        prepare(&bench, &["a"], 1).await;
        let (id, ring) = {
            let mut inner = bench.services.registry.inner();
            let disk = inner.disk_mut("vm").unwrap();
            let journal = disk.wanted.cache.as_mut().unwrap().journal.as_mut().unwrap();
            journal.ring += 1;
            journal.unused = journal.ring;
            (disk.id, journal.written)
        };
        bench.services.pools.record_discard(id, ring).await;
        let journal =
            bench.services.registry.inner().disks["vm"].wanted.cache.clone().unwrap().journal.unwrap();
        assert_eq!((journal.written, journal.discarded_ring), (ring, ring + 1));
    });
}

/// The removal of a cache can still fail after its journal id was replaced in the saved state. A
/// ring that is made meanwhile must belong to the cache in service. Otherwise the next daemon would
/// not find the dirty data of this cache.
#[test]
fn a_ring_that_is_made_during_a_removal_belongs_to_the_cache_in_service() {
    run(async |bench| {
        prepare(&bench, &["a"], 0).await;
        let pools = &bench.services.pools;
        let journal = || {
            let inner = bench.services.registry.inner();
            inner.disks["vm"].wanted.cache.as_ref().unwrap().journal.unwrap()
        };
        let before = journal();
        let next = JournalSpec::new();
        let mut former = pools.put_journal("vm", Some(next)).unwrap();
        assert_eq!(former.map(|it| it.owner), Some(before.owner));
        pools.renew_ring_of("vm", &mut former).await.unwrap();
        let former = former.unwrap();
        assert_eq!((former.owner, former.ring), (before.owner, before.ring + 1));
        assert_eq!(former.written, former.ring, "the ring is in service");
        assert_eq!((journal().owner, journal().ring), (next.owner, 0), "the state names the next cache");
        let flash = bench.services.registry.inner().pool("p").unwrap().flash.clone();
        assert!(flash.segments_of(OwnerId(next.owner.0)).await.unwrap().is_empty());
        // Without a replaced id, the ring belongs to the configured cache.
        pools.put_journal("vm", Some(former)).unwrap();
        pools.renew_ring_of("vm", &mut None).await.unwrap();
        assert_eq!((journal().owner, journal().ring), (before.owner, before.ring + 2));
    });
}

/// Another change of the disk runs when the journal is lost: hob handles the loss after that
/// change.
#[test]
fn a_busy_disk_gets_its_journal_later() {
    run(async |bench| {
        let sick = prepare(&bench, &["a", "b"], 1).await;
        let guard = bench.services.registry.guard_disk("vm", "looked at").unwrap();
        lose(&bench, sick).await;
        tokio::time::sleep(Duration::from_secs(12)).await;
        drop(guard);
        tokio::time::sleep(Duration::from_secs(5)).await;
        let inner = bench.services.registry.inner();
        let ring = &inner.disks["vm"].ring;
        assert!(!ring.is_empty() && ring.iter().all(|segment| segment.device != sick), "{ring:?}");
    });
}

/// The number of the newest journal ring.
fn ring_number(bench: &Bench) -> u32 {
    bench.services.registry.inner().disks["vm"].wanted.cache.as_ref().unwrap().journal.unwrap().ring
}

/// A copy of a journal is lost, also while its cache is not in service yet: the journal is
/// replaced.
#[test]
fn a_journal_that_lost_a_copy_is_replaced() {
    run(async |bench| {
        bench.pool(&["a", "b"], 16).await;
        bench.disk("vm").await;
        let id = bench.services.registry.inner().disks["vm"].id;
        let json = r#"{"mode":"write-back","copies":"2-dirty"}"#;
        let enable = CacheEnable { settings: settings(json), ..cache_of(4) };
        bench.shard.set_hangs(true);
        let report = async {
            tokio::time::sleep(Duration::from_millis(500)).await;
            assert_eq!(ring_number(&bench), 1, "the cache is being made");
            bench.services.events.handle(ShardEvent::JournalCopyLost(id));
            tokio::time::sleep(Duration::from_millis(500)).await;
            bench.shard.set_hangs(false);
        };
        let (made, ()) = tokio::join!(bench.services.pools.cache_enable("vm".into(), enable), report);
        made.unwrap();
        tokio::time::sleep(Duration::from_secs(10)).await;
        assert_eq!(ring_number(&bench), 2);
        bench.services.events.handle(ShardEvent::JournalCopyLost(id));
        tokio::time::sleep(Duration::from_secs(10)).await;
        assert_eq!(ring_number(&bench), 3);
        let ring = bench.services.registry.inner().disks["vm"].ring.clone();
        assert_eq!(ring.len(), 2, "the earlier rings are free: {ring:?}");
        // Without a cache there is nothing to be replaced.
        bench.services.disks.cache_disable("vm".into(), OnDirty::Drain).await.unwrap();
        bench.services.events.handle(ShardEvent::JournalCopyLost(id));
        tokio::time::sleep(Duration::from_secs(10)).await;
        assert!(bench.services.registry.inner().disks["vm"].wanted.cache.is_none());
    });
}

/// Processes the shard's reports while time passes.
async fn pass(bench: &Bench, seconds: u64) {
    for _ in 0..seconds {
        tokio::time::sleep(Duration::from_secs(1)).await;
        bench.shard.take_events().into_iter().for_each(|event| bench.services.events.handle(event));
    }
}

/// A flash device hangs under a write-back cache: the API answers with the reason, and nothing is
/// abandoned.
#[test]
fn a_device_that_does_not_answer_is_named_and_holds_up_no_command_for_ever() {
    run(async |bench| {
        let silent = prepare(&bench, &["a", "b"], 20).await;
        let (id, path) = {
            let mut inner = bench.services.registry.inner();
            let (_, entry) = inner.device_on_shards(silent).unwrap();
            let path = entry.path.display().to_string();
            (inner.disks["vm"].id, path)
        };
        bench.shard.set_silent(Some(silent));
        assert!(bench.shard.write(id, 1 << 20, BLOCK).is_err(), "its flush is not answered");
        pass(&bench, 10).await;
        let cache = bench.services.observe.disk("vm").unwrap().cache.unwrap();
        assert_eq!(cache.state, CacheState::Stalled);
        let reason = cache.reason.unwrap();
        assert!(reason.contains(&path) && reason.contains("does not answer"), "{reason}");
        // A write that bypasses the cache is first recorded in the journal.
        assert!(reason.contains("writes, discards and zeroes may wait too"), "{reason}");
        let health = bench.services.observe.health().await;
        let stalled = |problem: &&HealthProblem| problem.kind == ProblemKind::DeviceStalled;
        let problem = health.problems.iter().find(stalled).expect("the device is named");
        assert!(problem.reason.contains("requests that need it wait"), "{health:?}");
        let pool = bench.services.observe.pool("p").unwrap();
        assert!(
            pool.devices.iter().any(|device| device.path == path && device.state == DeviceState::Stalled)
        );
        assert!(bench.services.observe.stats("vm").await.unwrap().dirty_bytes >= 20 * BLOCK);
        let drain = bench.services.pools.drain("vm".into()).await.unwrap();
        let dirty = drain.disk.unwrap().cache.unwrap().dirty.unwrap();
        assert!(dirty.draining && dirty.why.unwrap().contains(&path));
        bench.services.pools.drain_stop("vm".into()).await.unwrap();
        tokio::time::sleep(Duration::from_secs(1)).await;
        let error = bench.services.disks.cache_disable("vm".into(), OnDirty::Drain).await.unwrap_err();
        assert_eq!(error.kind, ErrorKind::Busy, "{error}");
        assert!(bench.services.observe.disk("vm").unwrap().cache.is_some(), "it goes on in the background");
        bench.shard.set_silent(None);
        pass(&bench, 30).await;
        assert!(bench.services.observe.disk("vm").unwrap().cache.is_none());
        assert_eq!(bench.free(), 16);
    });
}

/// A discard waits for flash that does not answer, while the backing works: the disk stays online,
/// and hob names the flash device.
#[test]
fn a_discard_waits_for_flash_that_does_not_answer_and_keeps_the_disk_online() {
    run(async |bench| {
        let silent = prepare(&bench, &["a", "b"], 20).await;
        let (id, path) = {
            let mut inner = bench.services.registry.inner();
            let path = inner.device_on_shards(silent).unwrap().1.path.display().to_string();
            (inner.disks["vm"].id, path)
        };
        bench.shard.set_silent(Some(silent));
        assert!(bench.shard.write(id, 1 << 20, BLOCK).is_err(), "its flush is not answered");
        pass(&bench, 10).await;
        let error = bench.services.disks.discard_dirty("vm".into()).await.unwrap_err();
        assert_eq!(error.kind, ErrorKind::Busy, "{error}");
        assert_eq!(bench.services.observe.disk("vm").unwrap().state, DiskLife::Online);
        let tasks = bench.services.pools.tasks_view();
        assert_eq!(tasks.len(), 1, "{tasks:?}");
        assert!(tasks[0].waits_for.as_ref().is_some_and(|what| what.contains(&path)), "{tasks:?}");
        let refused = bench.services.disks.disk_remove("vm".into(), OnDirty::Discard).await.unwrap_err();
        let said = refused.to_string();
        assert!(said.contains(&path) && said.contains("repeat the command when"), "{said}");
        assert_eq!(bench.services.observe.disk("vm").unwrap().state, DiskLife::Online);
        assert!(bench.services.registry.inner().abandoned.is_empty(), "its backing is healthy");
        bench.shard.set_silent(None);
        pass(&bench, 30).await;
        let task = bench.services.pools.tasks_view().remove(0);
        assert_eq!((task.state, task.error), (TaskState::Done, None));
        assert!(bench.services.observe.stats("vm").await.unwrap().dirty_bytes <= BLOCK);
        bench.services.disks.disk_remove("vm".into(), OnDirty::Discard).await.unwrap();
    });
}

#[test]
fn a_device_that_answers_again_leaves_nothing_behind() {
    run(async |bench| {
        let silent = prepare(&bench, &["a", "b"], 20).await;
        let id = bench.services.registry.inner().disks["vm"].id;
        bench.shard.set_silent(Some(silent));
        assert!(bench.shard.write(id, 1 << 20, BLOCK).is_err());
        pass(&bench, 100).await;
        bench.shard.set_silent(None);
        pass(&bench, 2).await;
        let cache = bench.services.observe.disk("vm").unwrap().cache.unwrap();
        assert_eq!((cache.state, cache.reason), (CacheState::Active, None));
        bench.shard.write(id, 2 << 20, BLOCK).unwrap();
        assert_eq!(bench.services.observe.stats("vm").await.unwrap().dirty_bytes, 22 * BLOCK);
    });
}
