//! Changes that end write-back while the backing does not answer: they wait, can be cancelled, and
//! leave write-back in effect meanwhile.

use std::time::Duration;

use hob_control::{DrainFor, Task, TaskState};

use super::*;
use crate::api_error::Result;
use crate::hardware::Monitor;
use crate::services::registry::DeviceEntry;

const BLOCK: u64 = 4096;

/// Commands that drain a write-back cache, by the name of their task.
const COMMANDS: [&str; 5] = ["cache set", "cache clear", "cache disable", "disk remove", "drain"];

/// Time after which a drain has begun, and has not yet been checked for failures.
const BEGINNING: Duration = Duration::from_millis(100);

/// Prepares a disk with dirty data in a write-back cache that destages nothing by itself. Every
/// write to its backing fails.
async fn prepare(bench: &Bench) -> Arc<Monitor> {
    prepare_on(bench, &["a"], 2).await
}

/// Prepares the disk like [`prepare`], with a cache of `mib` on these devices.
async fn prepare_on(bench: &Bench, devices: &[&str], mib: u64) -> Arc<Monitor> {
    bench.pool(devices, 8).await;
    bench.disk("vm").await;
    let lazy: CachePatch = serde_json::from_str(r#"{"mode":"write-back","dirty_age_max":0}"#).unwrap();
    let enable = CacheEnable { settings: lazy.settings, ..cache_of(mib) };
    bench.services.pools.cache_enable("vm".into(), enable).await.unwrap();
    write(bench, 3);
    bench.shard.set_backings_fail(true);
    bench.services.registry.inner().disk("vm").unwrap().measure.as_ref().unwrap().monitor.clone()
}

/// Writes a block as a guest, and flushes. Fails if the write or the flush needs the backing.
#[track_caller]
fn write(bench: &Bench, block: u64) {
    let id = bench.services.registry.inner().disks["vm"].id;
    bench.shard.write(id, block * BLOCK, BLOCK).expect("a write that needs flash only");
}

async fn order(bench: &Bench, command: &str) -> Result<DiskChanged> {
    let (pools, disks) = (&bench.services.pools, &bench.services.disks);
    let through = r#"{"mode":"write-through"}"#;
    match command {
        "cache set" => pools.cache_patch("vm".into(), serde_json::from_str(through).unwrap()).await,
        "cache clear" => pools.cache_clear("vm".into()).await,
        "cache disable" => disks.cache_disable("vm".into(), OnDirty::Drain).await,
        "disk remove" => disks.disk_remove("vm".into(), OnDirty::Drain).await,
        _ => pools.drain("vm".into()).await,
    }
}

/// Gives a command, which continues in the background.
async fn begin(bench: &Bench, command: &str) {
    match order(bench, command).await {
        Ok(changed) => assert!(changed.notes[0].contains("the drain waits"), "{:?}", changed.notes),
        Err(error) => assert!(error.to_string().contains("as task "), "{command}: {error}"),
    }
}

async fn mode_in_effect(bench: &Bench) -> String {
    bench.services.observe.stats("vm").await.unwrap().mode
}

#[track_caller]
fn task(bench: &Bench) -> Task {
    let mut tasks = bench.services.pools.tasks_view();
    assert_eq!(tasks.len(), 1, "{tasks:?}");
    tasks.remove(0)
}

#[test]
fn a_change_that_drains_waits_for_a_lost_backing_and_can_be_cancelled() {
    for command in COMMANDS {
        run(async |bench| {
            let monitor = prepare(&bench).await;
            monitor.note_outage(Duration::ZERO, "Connection refused");
            begin(&bench, command).await;
            let waits = task(&bench);
            assert_eq!(
                (waits.what.as_str(), waits.state, waits.can_cancel),
                (command, TaskState::Running, true)
            );
            let why = waits.dirty.and_then(|dirty| dirty.why).unwrap_or_default();
            assert!(why.contains("reconnecting") && why.contains("Connection refused"), "{command}: {why}");
            assert_eq!(mode_in_effect(&bench).await, "write-back", "{command}");
            write(&bench, 5);
            let state = bench.services.observe.disk("vm").unwrap().cache.unwrap().state;
            assert_eq!(state, CacheState::Active, "{command}");
            let other = bench.resize("vm", 1).await.unwrap_err().to_string();
            assert!(other.contains("hob drain vm --stop"), "{command}: {other}");
            bench.services.pools.task_cancel(waits.id).await.unwrap();
            tokio::time::sleep(Duration::from_secs(1)).await;
            assert_eq!(task(&bench).state, TaskState::Cancelled, "{command}");
            let cache = bench.services.observe.disk("vm").unwrap().cache.unwrap();
            assert_eq!((cache.mode.as_str(), cache.mode_in_effect), ("write-back", None), "{command}");
            assert_eq!(mode_in_effect(&bench).await, "write-back", "{command}");
            write(&bench, 6);
        });
    }
}

#[test]
fn a_change_that_waits_is_made_when_the_backing_answers() {
    for command in COMMANDS {
        run(async |bench| {
            let monitor = prepare(&bench).await;
            monitor.note_outage(Duration::ZERO, "Connection refused");
            begin(&bench, command).await;
            write(&bench, 5);
            bench.shard.set_backings_fail(false);
            monitor.note_connected();
            tokio::time::sleep(Duration::from_secs(60)).await;
            assert_eq!(task(&bench).state, TaskState::Done, "{command}");
            match command {
                "disk remove" => assert!(bench.services.observe.disk("vm").is_err()),
                "cache disable" => assert!(bench.services.observe.disk("vm").unwrap().cache.is_none()),
                _ => {
                    let stats = bench.services.observe.stats("vm").await.unwrap();
                    let mode = if command == "cache set" { "write-through" } else { "write-back" };
                    assert_eq!((stats.dirty_bytes, stats.mode.as_str()), (0, mode), "{command}");
                }
            }
        });
    }
}

#[test]
fn a_backing_that_is_lost_during_a_drain_gives_write_back_back_until_it_answers() {
    run(async |bench| {
        let monitor = prepare(&bench).await;
        let change = order(&bench, "cache set");
        tokio::pin!(change);
        assert!(tokio::time::timeout(BEGINNING, &mut change).await.is_err(), "it drains");
        assert_eq!(mode_in_effect(&bench).await, "write-through", "the backing has answered so far");
        monitor.note_outage(Duration::ZERO, "Connection refused");
        assert!(change.await.is_err(), "it continues in the background");
        assert_eq!(mode_in_effect(&bench).await, "write-back");
        write(&bench, 5);
        assert_eq!(task(&bench).state, TaskState::Running);
        bench.shard.set_backings_fail(false);
        monitor.note_connected();
        tokio::time::sleep(Duration::from_secs(60)).await;
        assert_eq!(task(&bench).state, TaskState::Done);
        let stats = bench.services.observe.stats("vm").await.unwrap();
        assert_eq!((stats.dirty_bytes, stats.mode.as_str()), (0, "write-through"));
    });
}

/// The backing answers, but refuses every write. A guest's write would fail if it went there.
#[test]
fn a_backing_that_refuses_writes_keeps_write_back_until_it_takes_them() {
    for command in COMMANDS {
        run(async |bench| {
            prepare(&bench).await;
            // Most of these commands report that they continue in the background.
            let _ = order(&bench, command).await;
            tokio::time::sleep(Duration::from_secs(1)).await;
            let waits = task(&bench);
            assert_eq!((waits.what.as_str(), waits.state), (command, TaskState::Running));
            let why = waits.dirty.and_then(|dirty| dirty.why).unwrap_or_default();
            assert!(why.contains("to the backing failed"), "{command}: {why}");
            for block in 5..25 {
                assert_eq!(mode_in_effect(&bench).await, "write-back", "{command}");
                write(&bench, block);
                tokio::time::sleep(Duration::from_secs(3)).await;
            }
            bench.shard.set_backings_fail(false);
            tokio::time::sleep(Duration::from_secs(60)).await;
            assert_eq!(task(&bench).state, TaskState::Done, "{command}");
        });
    }
}

#[test]
fn a_change_that_waits_for_a_backing_that_refuses_writes_can_be_cancelled() {
    run(async |bench| {
        prepare(&bench).await;
        assert!(order(&bench, "cache set").await.is_err(), "it continues in the background");
        let waits = task(&bench);
        bench.services.pools.task_cancel(waits.id).await.unwrap();
        tokio::time::sleep(Duration::from_secs(1)).await;
        assert_eq!(task(&bench).state, TaskState::Cancelled);
        // The cache again destages nothing by itself.
        bench.shard.set_backings_fail(false);
        let before = bench.services.observe.stats("vm").await.unwrap();
        tokio::time::sleep(Duration::from_secs(60)).await;
        let after = bench.services.observe.stats("vm").await.unwrap();
        assert_eq!((after.mode.as_str(), after.dirty_bytes), ("write-back", before.dirty_bytes));
        assert!(after.dirty_bytes > 0);
    });
}

#[test]
fn dirty_data_is_discarded_although_another_change_waits_for_the_backing() {
    for command in COMMANDS {
        run(async |bench| {
            let monitor = prepare(&bench).await;
            monitor.note_outage(Duration::ZERO, "Connection refused");
            begin(&bench, command).await;
            bench.services.disks.discard_dirty("vm".into()).await.unwrap();
            let stats = bench.services.observe.stats("vm").await.unwrap();
            assert_eq!((stats.dirty_bytes, stats.mode.as_str()), (0, "write-back"), "{command}");
        });
    }
}

#[test]
fn a_disk_without_dirty_data_is_removed_without_its_backing() {
    run(async |bench| {
        let monitor = prepare(&bench).await;
        bench.shard.set_backings_fail(false);
        bench.services.pools.drain("vm".into()).await.unwrap();
        monitor.note_outage(Duration::ZERO, "Connection refused");
        bench.services.disks.disk_remove("vm".into(), OnDirty::Drain).await.unwrap();
    });
}

#[test]
fn a_cache_with_discarded_data_is_removed_without_its_backing() {
    run(async |bench| {
        let monitor = prepare(&bench).await;
        monitor.note_outage(Duration::ZERO, "Connection refused");
        bench.services.disks.cache_disable("vm".into(), OnDirty::Discard).await.unwrap();
        assert!(bench.services.observe.disk("vm").unwrap().cache.is_none());
    });
}

#[test]
fn the_removal_of_a_device_names_the_disk_whose_backing_it_waits_for_and_can_be_cancelled() {
    for devices in [&["a"][..], &["a", "b"]] {
        run(async |bench| {
            let monitor = prepare_on(&bench, devices, 1).await;
            monitor.note_outage(Duration::ZERO, "Connection refused");
            // The device with the only segment of the cache.
            let path = {
                let inner = bench.services.registry.inner();
                let device = inner.disks["vm"].held[0].device;
                let is_it = |entry: &&DeviceEntry| entry.ids.is_some_and(|ids| ids.on_shards == device);
                inner.pool("p").unwrap().devices.iter().find(is_it).unwrap().path.clone()
            };
            let path = path.to_string_lossy().into_owned();
            let error = bench.services.pools.device_remove("p".into(), path.clone()).await.unwrap_err();
            assert!(error.to_string().contains("as task "), "{devices:?}: {error}");
            let waits = task(&bench);
            assert_eq!(
                (waits.what.as_str(), waits.subject.as_str(), waits.state, waits.can_cancel),
                ("pool remove-device", "p", TaskState::Running, true)
            );
            let why = waits.dirty.and_then(|dirty| dirty.why).unwrap_or_default();
            assert!(why.contains("waits for the backing of vm, which does not answer"), "{devices:?}: {why}");
            // A block that is dirty already.
            write(&bench, 3);
            bench.services.pools.task_cancel(waits.id).await.unwrap();
            tokio::time::sleep(Duration::from_secs(1)).await;
            assert_eq!(task(&bench).state, TaskState::Cancelled, "{devices:?}");
            let pool = bench.services.observe.pool("p").unwrap();
            assert_eq!(pool.devices.len(), devices.len(), "the device stays");
            assert_eq!(mode_in_effect(&bench).await, "write-back", "{devices:?}");
            write(&bench, 6);
        });
    }
}

#[test]
fn a_drain_before_another_operation_is_listed_with_it() {
    run(async |bench| {
        let monitor = prepare(&bench).await;
        monitor.note_outage(Duration::ZERO, "Connection refused");
        let operation = DrainFor::CacheDisable;
        bench.services.pools.drain_for("vm".into(), operation).await.unwrap();
        let waits = task(&bench);
        assert_eq!(
            (waits.what.as_str(), waits.state, waits.can_cancel),
            ("drain for cache disable", TaskState::Running, true)
        );
        let dirty = waits.dirty.unwrap();
        assert_eq!((dirty.draining, dirty.eta_seconds), (true, None));
        bench.services.pools.task_cancel(waits.id).await.unwrap();
    });
}
