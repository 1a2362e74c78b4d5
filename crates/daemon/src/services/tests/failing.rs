//! Error injection into the daemon's files. For each command, one write or sync of a segment table,
//! a superblock or the state file fails, once or permanently. The test repeats this for the first,
//! the second and each further write or sync. In each case: the command's error is one line;
//! guests' writes are kept, dirty or not, now and after a crash; the same command succeeds later;
//! and at the end all space is free again.

use std::collections::BTreeSet;
use std::time::Duration;

use hob_engine::command::Segment;
use hob_storage::failing::{Failing, fail};

use super::recovery::crash;
use super::*;

const BLOCK: u64 = 4096;

/// Number of blocks of `vm` that only flash has.
const DIRTY: u64 = 20;

/// Maximum number of changes of files by one command.
const CHANGES_MAX: u32 = 80;

/// Size of the pool, MiB. It has space for all caches of a command, and not more: the memory
/// filesystem allocates and frees all of it for each case, which is half of the test's time.
const ROOM: u64 = 20;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Order {
    EnableVolatile,
    EnablePersistent,
    Grow,
    Shrink,
    Clear,
    BlockSize,
    TwoCopies,
    Volatile,
    Disable,
    RemoveDisk,
    AddDisk,
    AddDevice,
    RemoveDevice,
    MakePool,
}

const ORDERS: [Order; 14] = [
    Order::EnableVolatile,
    Order::EnablePersistent,
    Order::Grow,
    Order::Shrink,
    Order::Clear,
    Order::BlockSize,
    Order::TwoCopies,
    Order::Volatile,
    Order::Disable,
    Order::RemoveDisk,
    Order::AddDisk,
    Order::AddDevice,
    Order::RemoveDevice,
    Order::MakePool,
];

fn patch(json: &str) -> CachePatch {
    serde_json::from_str(json).unwrap()
}

const LAZY: &str =
    r#"{"mode":"write-back","dirty_age_max":0,"dirty_start":90,"dirty_stop":80,"dirty_full":100}"#;

/// Starts a daemon with a state directory, a pool of `a` and `b`, a disk `vm` with dirty data and a
/// disk `plain` without a cache. The test makes thousands of syncs, so its files are in a memory
/// filesystem, if the host has one.
async fn prepare() -> Bench {
    let dir = tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir()).unwrap();
    let (store, _) = Store::open(&dir.path().join("state")).unwrap();
    let (services, shard) = services(store);
    let bench = Bench { dir, services, shard };
    bench.pool(&["a", "b"], ROOM / 2).await;
    bench.disk("vm").await;
    bench.disk("plain").await;
    let enable = CacheEnable { settings: patch(LAZY).settings, ..cache_of(4) };
    bench.services.pools.cache_enable("vm".into(), enable).await.unwrap();
    let id = bench.services.registry.inner().disks["vm"].id;
    (0..DIRTY).for_each(|block| bench.shard.write(id, block * BLOCK, BLOCK).unwrap());
    bench.image("new.img", 16);
    bench
}

async fn carry_out(bench: &Bench, order: Order) -> Result<()> {
    let services = &bench.services;
    let set = |json: &str| services.pools.cache_patch("vm".into(), patch(json));
    match order {
        Order::EnableVolatile => bench.cache("plain", 6).await.map(drop),
        Order::EnablePersistent => {
            let enable = CacheEnable { settings: patch(LAZY).settings, ..cache_of(6) };
            services.pools.cache_enable("plain".into(), enable).await.map(drop)
        }
        Order::Grow => bench.resize("vm", 9).await.map(drop),
        Order::Shrink => bench.resize("vm", 2).await.map(drop),
        Order::Clear => services.pools.cache_clear("vm".into()).await.map(drop),
        Order::BlockSize => set(r#"{"block_size":16384}"#).await.map(drop),
        Order::TwoCopies => set(r#"{"copies":"2-dirty"}"#).await.map(drop),
        Order::Volatile => set(r#"{"preset":"vfrc"}"#).await.map(drop),
        Order::Disable => services.disks.cache_disable("vm".into(), OnDirty::Drain).await.map(drop),
        Order::RemoveDisk => services.disks.disk_remove("vm".into(), OnDirty::Drain).await.map(drop),
        Order::AddDisk => {
            let backing = bench.path("new.img");
            services
                .disks
                .disk_add(DiskAdd { name: "new".into(), backing, read_only: false, ..DiskAdd::default() })
                .await
                .map(drop)
        }
        Order::AddDevice => {
            let size = hob_storage::pool::device_bytes_for(8 * MIB, SEGMENT);
            let add = DeviceAdd { path: bench.path("c"), size: Some(Size(size)), peer: None, force: false };
            services.pools.device_add("p".into(), add, OnDirty::Drain).await.map(drop)
        }
        Order::RemoveDevice => services.pools.device_remove("p".into(), bench.path("b")).await.map(drop),
        Order::MakePool => services
            .pools
            .pool_create(pool_create("q", vec![bench.path("d")], 8), OnDirty::Drain)
            .await
            .map(drop),
    }
}

/// Returns true if the state is as the command requires.
fn is_done(bench: &Bench, order: Order) -> bool {
    let disk = |name: &str| bench.services.observe.disk(name).ok();
    let cache = |name: &str| disk(name).and_then(|disk| disk.cache);
    let vm = cache("vm");
    match order {
        Order::EnableVolatile => cache("plain").is_some_and(|cache| cache.room == Size(6 * MIB)),
        Order::EnablePersistent => cache("plain").is_some_and(|cache| cache.persistent),
        Order::Grow => vm.is_some_and(|cache| cache.room == Size(9 * MIB)),
        Order::Shrink => vm.is_some_and(|cache| cache.room == Size(2 * MIB)),
        Order::Clear => vm.is_some(),
        Order::BlockSize => vm.is_some_and(|cache| cache.block_size == Size(16384)),
        Order::TwoCopies => vm.is_some_and(|cache| cache.copies == "2-dirty" && cache.reason.is_none()),
        Order::Volatile => vm.is_some_and(|cache| !cache.persistent),
        Order::Disable => vm.is_none(),
        Order::RemoveDisk => disk("vm").is_none(),
        Order::AddDisk => disk("new").is_some_and(|disk| disk.state == DiskLife::Online),
        Order::AddDevice => bench.services.observe.pool("p").unwrap().devices.len() == 3,
        Order::RemoveDevice => bench.services.observe.pool("p").unwrap().devices.len() == 1,
        Order::MakePool => bench.services.observe.pool("q").is_ok(),
    }
}

/// Checks that no segment has two owners.
fn check_owners(bench: &Bench, what: &str) {
    let inner = bench.services.registry.inner();
    let all: Vec<Segment> =
        inner.disks.values().flat_map(|disk| disk.held.iter().chain(&disk.ring)).copied().collect();
    assert_eq!(all.iter().collect::<BTreeSet<_>>().len(), all.len(), "{what}: {all:?}");
}

/// Checks that guests' writes are on flash or have been destaged.
async fn check_data(bench: &Bench, before: u64, what: &str) {
    let Ok(disk) = bench.services.observe.disk("vm") else { return };
    assert_eq!(disk.state, DiskLife::Online, "{what}: {disk:?}");
    let stats = bench.services.observe.stats("vm").await.unwrap();
    // A disk that was removed and added again counts from zero.
    let drained = before == 0 && stats.dirty_bytes == 0;
    assert!(drained || stats.dirty_bytes + stats.destaged_bytes >= before * BLOCK, "{what}: {stats:?}");
}

/// Removes everything: all space must be free again.
async fn take_all(bench: &Bench, what: &str) {
    let services = &bench.services;
    for disk in services.observe.disks() {
        services
            .disks
            .disk_remove(disk.name.clone(), OnDirty::Drain)
            .await
            .unwrap_or_else(|error| panic!("{what}: {}: {error}", disk.name));
    }
    for orphan in services.observe.pool("p").unwrap().orphans {
        services.disks.orphan_discard("p".into(), orphan.owner).await.unwrap();
    }
    let pool = services.observe.pool("p").unwrap();
    assert_eq!(pool.free, pool.size, "{what}: {pool:?}");
}

enum Afterwards {
    Again,
    Crash,
}

/// Returns true if a write or sync failed.
async fn try_one(order: Order, how: Failing, nth: u32, afterwards: Afterwards) -> bool {
    let what = format!("{order:?} {how:?} at {nth}");
    let mut bench = prepare().await;
    let failure = fail(bench.dir.path(), nth, how);
    let result = carry_out(&bench, order).await;
    let struck = failure.has_struck();
    drop(failure);
    if let Err(error) = &result {
        let line = error.to_string();
        let says = ["cannot write", "cannot wipe", "cannot save"].iter().any(|part| line.contains(part));
        assert!(says && !line.contains('\n'), "{what}: {line}");
    }
    check_owners(&bench, &what);
    match afterwards {
        Afterwards::Crash => {
            let stats = bench.services.observe.stats("vm").await;
            let dirty = stats.map_or(0, |stats| stats.dirty_bytes / BLOCK);
            let still = bench.services.observe.disk("vm").is_ok();
            bench = crash(bench).await;
            if still {
                check_data(&bench, dirty, &what).await;
            }
        }
        Afterwards::Again if result.is_err() => {
            check_data(&bench, DIRTY, &what).await;
            let again = carry_out(&bench, order).await;
            assert!(again.is_ok() || is_done(&bench, order), "{what}, again: {}", again.unwrap_err());
        }
        Afterwards::Again => {
            check_data(&bench, DIRTY, &what).await;
            assert!(is_done(&bench, order), "{what}: it was not done and reported no error");
        }
    }
    check_owners(&bench, &what);
    take_all(&bench, &what).await;
    struck
}

fn sweep(how: Failing, again: bool) {
    run(async |_| {
        for order in ORDERS {
            for nth in 1.. {
                assert!(nth < CHANGES_MAX, "{order:?} never ends");
                let afterwards = if again { Afterwards::Again } else { Afterwards::Crash };
                if !try_one(order, how, nth, afterwards).await {
                    assert!(nth > 1, "{order:?} keeps nothing");
                    break;
                }
                tokio::time::sleep(Duration::from_secs(1)).await;
            }
        }
    });
}

#[test]
fn one_failure_and_the_same_command_again() {
    sweep(Failing::Once, true);
}

#[test]
fn failures_for_a_while_and_the_same_command_again() {
    sweep(Failing::FromThenOn, true);
}

#[test]
fn one_failure_and_a_crash() {
    sweep(Failing::Once, false);
}

#[test]
fn failures_for_a_while_and_a_crash() {
    sweep(Failing::FromThenOn, false);
}

/// Caches leave a device on which neither tables nor data can be written. The device can then be
/// removed.
#[test]
fn a_device_that_takes_no_writes_is_left_and_taken_out() {
    run(async |_| {
        let bench = prepare().await;
        let sick = bench.services.registry.inner().disks["vm"].ring[0].device;
        let path = {
            let mut inner = bench.services.registry.inner();
            let (_, entry) = inner.device_on_shards(sick).unwrap();
            entry.path.clone()
        };
        let _failure = fail(&path, 1, Failing::FromThenOn);
        bench.shard.set_sick(sick);
        let removed =
            bench.services.pools.device_remove("p".into(), path.to_string_lossy().into_owned()).await;
        let notes = removed.unwrap().notes;
        let pool = bench.services.observe.pool("p").unwrap();
        assert_eq!(pool.devices.len(), 1, "{notes:?}");
        assert_eq!((bench.room("vm"), pool.free), (4, Size((ROOM / 2 - 4 - 1) * MIB)));
        check_data(&bench, DIRTY, "left").await;
        let id = bench.services.registry.inner().disks["vm"].id;
        bench.shard.write(id, 1 << 20, BLOCK).unwrap();
        let bench = crash(bench).await;
        assert_eq!(bench.services.observe.stats("vm").await.unwrap().dirty_bytes, BLOCK);
        take_all(&bench, "left").await;
    });
}
