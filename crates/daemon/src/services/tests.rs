//! The services with real pools and with backings on files, and with simulated shards that move no
//! data.

mod additional_exports;
mod admission;
mod arrivals;
mod bitmaps;
mod closing;
mod config;
mod config_keys;
mod config_problems;
mod devices;
mod failing;
mod fenced_devices;
mod flash_writes;
mod foreign_writer;
mod full_pool;
mod guards;
mod health;
mod journal_lost;
mod kept_disks;
mod life_cycle;
mod many_disks;
mod memory;
mod opening;
mod operation_guard;
mod orphans;
mod parents;
mod persistent;
mod qos;
mod recovering;
mod recovery;
mod remote_flash;
mod resize;
mod sharing;
mod swap;
mod tasks;
mod unreported_failures;
mod waiting_drains;

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use hob_control::{
    Admission, CacheEnable, CachePatch, CacheSettings, CacheState, DeviceAdd, DeviceState, DiskAdd,
    DiskPatch, DiskState as DiskLife, OnDirty, PoolCreate, Qos, Size,
};
use hob_engine::units::{DeviceId, DiskId};
use tempfile::TempDir;

use super::registry::DiskPhase;
use super::*;
use crate::api_error::{ErrorKind, Result};
use crate::config::Config;
use crate::fake_shard::FakeShard;
use crate::shard_api::ShardEvent;
use crate::state::{DiskState, PoolState, State};

const MIB: u64 = 1 << 20;
const SEGMENT: u64 = MIB;

/// The services with one shard, and a directory for files.
pub(super) struct Bench {
    pub(super) dir: TempDir,
    pub(super) services: Arc<Services>,
    pub(super) shard: FakeShard,
}

impl Bench {
    pub(super) fn new() -> Bench {
        let (services, shard) = services(Store::Memory);
        Bench { dir: tempfile::tempdir().unwrap(), services, shard }
    }

    /// Starts other services, which save their state in the directory `state`.
    pub(super) fn with_state(self) -> Bench {
        let (store, _) = Store::open(&self.dir.path().join("state")).unwrap();
        let (services, shard) = services(store);
        Bench { services, shard, ..self }
    }

    pub(super) fn path(&self, name: &str) -> String {
        self.dir.path().join(name).to_string_lossy().into_owned()
    }

    /// Creates a file of `mib` MiB.
    fn image(&self, name: &str, mib: u64) -> String {
        let path = self.path(name);
        std::fs::File::create(&path).unwrap().set_len(mib * MIB).unwrap();
        path
    }

    /// Creates a pool `p` whose devices have `mib` MiB each.
    async fn pool(&self, devices: &[&str], mib: u64) {
        let create = pool_create("p", devices.iter().map(|name| self.path(name)).collect(), mib);
        self.services.pools.pool_create(create, OnDirty::Drain).await.unwrap();
    }

    async fn disk(&self, name: &str) {
        let backing = self.image(&format!("{name}.img"), 64);
        self.services
            .disks
            .disk_add(DiskAdd { name: name.into(), backing, read_only: false, ..DiskAdd::default() })
            .await
            .unwrap();
    }

    async fn cache(&self, disk: &str, mib: u64) -> Result<DiskChanged> {
        self.services.pools.cache_enable(disk.into(), cache_of(mib)).await
    }

    /// Enables a cache with the settings of a request in JSON.
    async fn cache_with(&self, disk: &str, mib: u64, json: &str) -> Result<DiskChanged> {
        let enable = CacheEnable { settings: settings(json), ..cache_of(mib) };
        self.services.pools.cache_enable(disk.into(), enable).await
    }

    async fn resize(&self, disk: &str, mib: u64) -> Result<DiskChanged> {
        let patch = CachePatch { size: Some(Size(mib * MIB)), ..CachePatch::default() };
        self.services.pools.cache_patch(disk.into(), patch).await
    }

    /// Renames a file, as if the file or device was removed.
    fn take_away(&self, name: &str) {
        take_away(self.dir.path(), name);
    }

    fn bring_back(&self, name: &str) {
        bring_back(self.dir.path(), name);
    }

    fn room(&self, disk: &str) -> u64 {
        self.services.observe.disk(disk).unwrap().cache.map_or(0, |cache| cache.room.bytes() / MIB)
    }

    fn free(&self) -> u64 {
        self.services.observe.pool("p").unwrap().free.bytes() / MIB
    }
}

use hob_control::DiskChanged;

/// Renames a file of a directory, as if the file or device was removed.
fn take_away(dir: &Path, name: &str) {
    std::fs::rename(dir.join(name), dir.join(format!("{name}.away"))).unwrap();
}

fn bring_back(dir: &Path, name: &str) {
    std::fs::rename(dir.join(format!("{name}.away")), dir.join(name)).unwrap();
}

/// Creates services that open backings with these options.
pub(super) fn services_with(options: BackingOptions) -> (Arc<Services>, FakeShard) {
    let (handle, shard) = FakeShard::start();
    let services = Services::new(vec![handle], Exports::default(), options, Store::Memory);
    services.registry.set_restored();
    (services, shard)
}

fn services(store: Store) -> (Arc<Services>, FakeShard) {
    let (services, shard) = not_started(store);
    services.registry.set_restored();
    (services, shard)
}

/// Returns services that have not restored the saved state yet.
fn not_started(store: Store) -> (Arc<Services>, FakeShard) {
    let (handle, shard) = FakeShard::start();
    (Services::new(vec![handle], Exports::default(), BackingOptions::default(), store), shard)
}

fn pool_create(name: &str, devices: Vec<String>, mib: u64) -> PoolCreate {
    let size = hob_storage::pool::device_bytes_for(mib * MIB, SEGMENT);
    PoolCreate {
        name: name.into(),
        devices,
        size: Some(Size(size)),
        segment_size: Some(Size(SEGMENT)),
        force: false,
        flash_writes: None,
    }
}

fn cache_of(mib: u64) -> CacheEnable {
    CacheEnable { pool: "p".into(), size: Some(Size(mib * MIB)), settings: CacheSettings::default() }
}

fn settings(json: &str) -> CacheSettings {
    serde_json::from_str::<CachePatch>(json).unwrap().settings
}

fn run(test: impl AsyncFnOnce(Bench)) {
    crate::background::run_in_virtual_time(async { test(Bench::new()).await });
}

#[test]
fn a_cache_comes_grows_shrinks_and_goes_and_all_room_comes_back() {
    run(async |bench| {
        bench.pool(&["a", "b"], 8).await;
        bench.disk("vm").await;
        assert_eq!(bench.free(), 16);
        let changed = bench.cache("vm", 6).await.unwrap();
        assert!(changed.notes.is_empty());
        let cache = changed.disk.unwrap().cache.unwrap();
        assert_eq!(
            (cache.state, cache.block_size, cache.policy.as_str()),
            (CacheState::Active, Size(4096), "auto")
        );
        assert_eq!((bench.room("vm"), bench.free()), (6, 10));
        bench.resize("vm", 16).await.unwrap();
        assert_eq!((bench.room("vm"), bench.free()), (16, 0));
        bench.resize("vm", 1).await.unwrap();
        assert_eq!((bench.room("vm"), bench.free()), (1, 15));
        bench.services.pools.cache_clear("vm".into()).await.unwrap();
        let stats = bench.services.observe.stats("vm").await.unwrap();
        assert_eq!((stats.blocks, stats.block_size), (256, Size(4096)));
        bench.services.disks.cache_disable("vm".into(), OnDirty::Drain).await.unwrap();
        assert!(bench.services.observe.disk("vm").unwrap().cache.is_none());
        assert_eq!(bench.free(), 16);
        bench.cache("vm", 16).await.unwrap();
        bench.services.disks.disk_remove("vm".into(), OnDirty::Drain).await.unwrap();
        assert_eq!(bench.free(), 16);
        assert!(bench.services.observe.disks().is_empty());
        bench.services.pools.pool_remove("p".into()).await.unwrap();
        assert!(bench.services.observe.pools().is_empty() && bench.shard.devices().is_empty());
    });
}

#[test]
fn block_size_and_policy_change_and_sizes_are_rounded_up() {
    run(async |bench| {
        bench.pool(&["a"], 8).await;
        bench.disk("vm").await;
        let enable = CacheEnable { size: Some(Size(2 * MIB + 1)), ..cache_of(0) };
        let changed = bench.services.pools.cache_enable("vm".into(), enable).await.unwrap();
        assert_eq!(changed.notes, ["2097153 is rounded up to 3M, whole segments of 1M"]);
        let settings = CacheSettings {
            block_size: Some(Size(65536)),
            policy: Some("lru".into()),
            ..CacheSettings::default()
        };
        let patch = CachePatch { size: None, settings };
        let changed = bench.services.pools.cache_patch("vm".into(), patch.clone()).await.unwrap();
        let cache = changed.disk.unwrap().cache.unwrap();
        assert_eq!(
            (cache.block_size, cache.policy.as_str(), cache.room),
            (Size(65536), "lru", Size(3 * MIB))
        );
        assert_eq!(bench.services.observe.stats("vm").await.unwrap().blocks, 48);
        let changed = bench.services.pools.cache_patch("vm".into(), patch).await.unwrap();
        assert_eq!(changed.notes, ["the cache already had these settings"]);
    });
}

#[test]
fn what_cannot_be_is_refused_with_a_reason_and_changes_nothing() {
    run(async |bench| {
        bench.pool(&["a"], 4).await;
        bench.disk("vm").await;
        let services = &bench.services;
        let add = |name: &str, backing: String| DiskAdd { name: name.into(), backing, ..DiskAdd::default() };
        let image = bench.image("other.img", 1);
        let is = |result: Result<DiskChanged>, kind: ErrorKind, part: &str| {
            let error = result.unwrap_err();
            assert_eq!(error.kind, kind, "{error}");
            assert!(error.to_string().contains(part), "{error}");
        };
        is(services.disks.disk_add(add("vm", image.clone())).await, ErrorKind::Conflict, "already");
        is(services.disks.disk_add(add("a b", image)).await, ErrorKind::Invalid, "'a b'");
        is(
            services.disks.disk_add(add("new", "/nonexistent/x".into())).await,
            ErrorKind::Invalid,
            "/nonexistent/x",
        );
        is(services.disks.disk_add(add("new", String::new())).await, ErrorKind::Invalid, "backing");
        is(
            services.disks.disk_remove("none".into(), OnDirty::Drain).await,
            ErrorKind::NotFound,
            "hob disk list",
        );
        is(bench.cache("none", 1).await, ErrorKind::NotFound, "'none'");
        is(bench.cache("vm", 0).await, ErrorKind::Invalid, "size 0");
        is(bench.cache("vm", 5).await, ErrorKind::Conflict, "4M free and 5M are needed");
        let enable = |enable: CacheEnable| services.pools.cache_enable("vm".into(), enable);
        is(enable(CacheEnable { pool: "q".into(), ..cache_of(1) }).await, ErrorKind::NotFound, "'q'");
        let with = |settings| CacheEnable { settings, ..cache_of(1) };
        let block = |bytes| CacheSettings { block_size: Some(Size(bytes)), ..CacheSettings::default() };
        is(enable(with(block(5000))).await, ErrorKind::Invalid, "power of two");
        is(enable(with(block(2 * MIB))).await, ErrorKind::Invalid, "4K to 1M");
        let policy = CacheSettings { policy: Some("best".into()), ..CacheSettings::default() };
        is(enable(with(policy)).await, ErrorKind::Invalid, "s3-fifo, lru");
        is(
            enable(CacheEnable { size: Some(Size(u64::MAX)), ..cache_of(1) }).await,
            ErrorKind::Invalid,
            "too large",
        );
        is(bench.resize("vm", 1).await, ErrorKind::Conflict, "no cache");
        is(services.disks.cache_disable("vm".into(), OnDirty::Drain).await, ErrorKind::Conflict, "no cache");
        is(services.pools.cache_clear("vm".into()).await, ErrorKind::Conflict, "no cache");
        assert!(services.observe.disk("vm").unwrap().cache.is_none());
        assert_eq!((services.observe.disks().len(), bench.free()), (1, 4));
        bench.cache("vm", 2).await.unwrap();
        is(bench.cache("vm", 1).await, ErrorKind::Conflict, "cache already");
        is(bench.resize("vm", 5).await, ErrorKind::Conflict, "needed");
        assert_eq!((bench.room("vm"), bench.free()), (2, 2));
        assert_eq!(services.observe.disk("vm").unwrap().cache.unwrap().size, Size(2 * MIB));
    });
}

#[test]
fn pools_refuse_what_is_not_theirs() {
    run(async |bench| {
        bench.pool(&["a"], 4).await;
        bench.disk("vm").await;
        bench.cache("vm", 1).await.unwrap();
        let services = &bench.services;
        std::fs::write(bench.path("precious"), vec![7; 4 << 20]).unwrap();
        let is = |result: Result<hob_control::PoolChanged>, kind: ErrorKind, part: &str| {
            let error = result.unwrap_err();
            assert_eq!(error.kind, kind, "{error}");
            assert!(error.to_string().contains(part), "{error}");
        };
        let create = |name: &str, device: &str| {
            services.pools.pool_create(pool_create(name, vec![bench.path(device)], 4), OnDirty::Drain)
        };
        is(create("p", "b").await, ErrorKind::Conflict, "'p' already");
        is(create("q", "a").await, ErrorKind::Conflict, "belongs to pool p");
        is(create("q", "precious").await, ErrorKind::Conflict, "--force");
        is(create("q/", "b").await, ErrorKind::Invalid, "'q/'");
        let relative = pool_create("q", vec!["b".into()], 4);
        is(services.pools.pool_create(relative, OnDirty::Drain).await, ErrorKind::Invalid, "absolute");
        is(
            services.pools.pool_create(pool_create("q", vec![], 4), OnDirty::Drain).await,
            ErrorKind::Invalid,
            "at least one device",
        );
        is(
            services.pools.device_remove("p".into(), bench.path("b")).await,
            ErrorKind::NotFound,
            "hob pool show p",
        );
        is(services.pools.pool_remove("p".into()).await, ErrorKind::Conflict, "caches of these disks: vm");
        assert_eq!(services.observe.pools().len(), 1);
        assert_eq!(std::fs::read(bench.path("precious")).unwrap(), vec![7; 4 << 20]);
    });
}

#[test]
fn caches_move_off_a_device_that_is_removed_and_grow_back_when_one_is_added() {
    run(async |bench| {
        bench.pool(&["a", "b"], 4).await;
        bench.disk("vm").await;
        bench.cache("vm", 4).await.unwrap();
        let changed = bench.services.pools.device_remove("p".into(), bench.path("a")).await.unwrap();
        assert!(changed.notes.is_empty(), "{:?}", changed.notes);
        assert_eq!((bench.room("vm"), bench.free()), (4, 0));
        bench
            .services
            .pools
            .device_add("p".into(), device_add(bench.path("c"), 2), OnDirty::Drain)
            .await
            .unwrap();
        bench.resize("vm", 6).await.unwrap();
        let changed = bench.services.pools.device_remove("p".into(), bench.path("b")).await.unwrap();
        assert_eq!(changed.notes, ["the cache of vm is 4M smaller until pool p has space again"]);
        assert_eq!((bench.room("vm"), bench.free()), (2, 0));
        let changed = bench.services.pools.device_remove("p".into(), bench.path("c")).await.unwrap();
        assert_eq!(changed.notes.len(), 2, "{:?}", changed.notes);
        let disk = bench.services.observe.disk("vm").unwrap().cache.unwrap();
        assert_eq!((disk.state, disk.size, disk.room), (CacheState::None, Size(6 * MIB), Size(0)));
        assert!(bench.shard.devices().is_empty());
        bench
            .services
            .pools
            .device_add("p".into(), device_add(bench.path("d"), 8), OnDirty::Drain)
            .await
            .unwrap();
        let disk = bench.services.observe.disk("vm").unwrap().cache.unwrap();
        assert_eq!((disk.state, disk.room, disk.reason), (CacheState::Active, Size(6 * MIB), None));
        assert_eq!(bench.free(), 2);
    });
}

fn device_add(path: String, mib: u64) -> DeviceAdd {
    let size = hob_storage::pool::device_bytes_for(mib * MIB, SEGMENT);
    DeviceAdd { path, size: Some(Size(size)), peer: None, force: false }
}

#[test]
fn a_fenced_device_gets_no_more_caches_and_can_be_taken_out() {
    run(async |bench| {
        bench.pool(&["a", "b"], 4).await;
        bench.disk("vm").await;
        bench.cache("vm", 4).await.unwrap();
        let (disk, sick, segments) = {
            let inner = bench.services.registry.inner();
            let disk = &inner.disks["vm"];
            let sick = disk.held[0].device;
            (disk.id, sick, disk.held.iter().copied().filter(|s| s.device == sick).collect::<Vec<_>>())
        };
        assert_eq!(segments.len(), 2);
        bench.services.events.handle(ShardEvent::Fenced { device: sick, errors: 16 });
        bench.services.events.handle(ShardEvent::Lost { disk, segments });
        tokio::time::sleep(std::time::Duration::from_secs(1)).await;
        let pool = bench.services.observe.pool("p").unwrap();
        let fenced: Vec<_> =
            pool.devices.iter().filter(|device| device.state == DeviceState::Fenced).collect();
        assert_eq!(fenced.len(), 1);
        assert!(fenced[0].reason.as_ref().unwrap().contains("16 failed"));
        assert_eq!((bench.room("vm"), bench.free()), (2, 2));
        let cache = bench.services.observe.disk("vm").unwrap().cache.unwrap();
        assert!(cache.reason.unwrap().contains("2 of its 4 segments"));
        bench.disk("other").await;
        assert_eq!(bench.cache("other", 3).await.unwrap_err().kind, ErrorKind::Conflict);
        bench.services.pools.device_remove("p".into(), fenced[0].path.clone()).await.unwrap();
        // The lost device was found at another path.
        assert_eq!((bench.room("vm"), bench.free()), (4, 0));
        assert!(bench.services.observe.disk("vm").unwrap().cache.unwrap().reason.is_none());
    });
}

#[test]
fn a_stalled_device_is_shown_until_it_answers() {
    run(async |bench| {
        bench.pool(&["a"], 4).await;
        bench.disk("vm").await;
        bench.cache("vm", 1).await.unwrap();
        let device = bench.shard.devices()[0];
        bench.services.events.handle(ShardEvent::Stalled(device));
        assert_eq!(bench.services.observe.disk("vm").unwrap().cache.unwrap().state, CacheState::Stalled);
        assert_eq!(bench.services.observe.pool("p").unwrap().devices[0].state, DeviceState::Stalled);
        bench.services.events.handle(ShardEvent::Resumed(device));
        assert_eq!(bench.services.observe.disk("vm").unwrap().cache.unwrap().state, CacheState::Active);
        bench.services.events.handle(ShardEvent::Stalled(DeviceId(999)));
    });
}

#[test]
fn a_shard_that_hangs_holds_up_nobody_and_its_changes_end_later() {
    run(async |bench| {
        bench.pool(&["a"], 4).await;
        bench.disk("vm").await;
        bench.cache("vm", 4).await.unwrap();
        bench.shard.set_hangs(true);
        let error = bench.resize("vm", 1).await.unwrap_err();
        assert_eq!(error.kind, ErrorKind::Busy);
        assert!(error.to_string().contains("in the background"), "{error}");
        assert_eq!(bench.services.observe.disk("vm").unwrap().cache.unwrap().state, CacheState::Changing);
        let error = bench.resize("vm", 2).await.unwrap_err();
        assert_eq!(error.kind, ErrorKind::Conflict);
        assert!(error.to_string().contains("vm is being changed"), "{error}");
        assert_eq!(bench.services.observe.stats("vm").await.unwrap_err().kind, ErrorKind::Busy);
        let explanation = bench.services.observe.explain("vm").await.unwrap();
        assert!(explanation.sentences[0].contains("does not answer"), "{explanation:?}");
        assert_eq!(bench.free(), 0);
        bench.shard.set_hangs(false);
        while bench.room("vm") != 1 || bench.free() != 3 {
            tokio::time::sleep(std::time::Duration::from_millis(1)).await;
        }
        bench.resize("vm", 2).await.unwrap();
    });
}

#[test]
fn what_was_changed_is_there_after_a_restart() {
    run(async |bench| {
        let state_dir = bench.dir.path().join("state");
        let bench = bench.with_state();
        bench.pool(&["a", "b"], 4).await;
        for disk in ["vm", "gone", "plain"] {
            bench.disk(disk).await;
        }
        bench.cache("vm", 6).await.unwrap();
        bench.cache("gone", 1).await.unwrap();
        bench.services.disks.disk_remove("gone".into(), OnDirty::Drain).await.unwrap();
        let before = (bench.services.observe.disks(), bench.services.observe.pools());
        bench.shard.stop();
        drop(bench.services);
        let (services, _shard) = restart(&state_dir, "").await;
        let after = (services.observe.disks(), services.observe.pools());
        assert_eq!(after, before);
        assert_eq!(after.0.len(), 2);
    });
}

#[test]
fn a_daemon_that_ends_before_it_has_restored_its_state_keeps_the_state_file() {
    run(async |bench| {
        let state_dir = bench.dir.path().join("state");
        let bench = bench.with_state();
        bench.pool(&["a", "b"], 4).await;
        bench.disk("vm").await;
        bench.cache("vm", 2).await.unwrap();
        bench.shard.stop();
        drop(bench.services);
        let (store, before) = open_again(&state_dir).await;
        let (services, shard) = not_started(store);
        services.shutdown.close(Ending::Plain).await;
        shard.stop();
        drop(services);
        // A start that fails half-way.
        let (store, after) = open_again(&state_dir).await;
        assert_eq!(after, before);
        let (services, shard) = not_started(store);
        let mut broken = after;
        broken.pools.push(broken.pools[0].clone());
        services.startup.start(broken, &Config::parse("").unwrap()).await.unwrap_err();
        services.shutdown.close(Ending::Plain).await;
        shard.stop();
        drop(services);
        assert_eq!(open_again(&state_dir).await.1, before);
    });
}

/// Opens a state directory when the last task of the previous services has ended.
async fn open_again(state_dir: &Path) -> (Store, State) {
    loop {
        match Store::open_now(state_dir) {
            Ok(opened) => return opened,
            Err(_) => tokio::time::sleep(std::time::Duration::from_millis(1)).await,
        }
    }
}

/// Starts a daemon with this state and this hob.toml, and waits for the recovery of its caches.
async fn restart(state_dir: &Path, toml: &str) -> (Arc<Services>, FakeShard) {
    let (services, shard) = restart_early(state_dir, toml, false).await;
    settled(&services).await;
    (services, shard)
}

/// Waits for caches that are being recovered.
async fn settled(services: &Arc<Services>) {
    while services.registry.inner().disks.values().any(|disk| disk.busy.is_some()) {
        tokio::time::sleep(std::time::Duration::from_millis(1)).await;
    }
}

/// Like `restart`, but returns while caches are being recovered; with `holds`, recovered caches
/// wait until the test continues.
async fn restart_early(state_dir: &Path, toml: &str, holds: bool) -> (Arc<Services>, FakeShard) {
    let (store, state) = open_again(state_dir).await;
    let (services, shard) = not_started(store);
    shard.set_holds_recovered(holds);
    // As in the daemon: before the start, which continues migrations.
    services.set_migration_transport(MigrationTransport {
        tls: None,
        directory: state_dir.with_file_name("sockets"),
    });
    services.startup.start(state, &Config::parse(toml).unwrap()).await.unwrap();
    (services, shard)
}

#[test]
fn what_cannot_be_opened_at_the_start_is_offline_and_comes_back() {
    run(async |bench| {
        let state_dir = bench.dir.path().join("state");
        let bench = bench.with_state();
        bench.pool(&["a", "b"], 4).await;
        bench.disk("vm").await;
        bench.disk("healthy").await;
        bench.cache("vm", 4).await.unwrap();
        bench.cache("healthy", 4).await.unwrap();
        bench.shard.stop();
        drop(bench.services);
        ["vm.img", "a"].iter().for_each(|name| take_away(bench.dir.path(), name));
        let (services, _shard) = restart(&state_dir, "").await;
        let bench = Bench { services, ..bench };
        let vm = bench.services.observe.disk("vm").unwrap();
        assert_eq!(vm.state, DiskLife::Offline);
        assert!(vm.reason.unwrap().contains("vm.img"));
        assert_eq!(bench.services.observe.disk("healthy").unwrap().state, DiskLife::Online);
        let pool = bench.services.observe.pool("p").unwrap();
        assert_eq!(pool.devices.iter().filter(|device| device.state == DeviceState::Offline).count(), 1);
        assert_eq!(pool.size, Size(4 * MIB));
        let (_events, receiver) = tokio::sync::mpsc::unbounded_channel();
        tokio::spawn(bench.services.events.clone().tend(receiver));
        tokio::time::sleep(std::time::Duration::from_secs(30)).await;
        assert_eq!(bench.services.observe.disk("vm").unwrap().state, DiskLife::Offline);
        ["vm.img", "a"].iter().for_each(|name| bench.bring_back(name));
        let mut left = 1000;
        while (bench.room("vm"), bench.room("healthy")) != (4, 4) {
            left -= 1;
            assert!(left > 0, "{:?} {:?}", bench.services.observe.disks(), bench.services.observe.pools());
            tokio::time::sleep(std::time::Duration::from_millis(100)).await;
        }
        assert_eq!(bench.services.observe.disk("vm").unwrap().state, DiskLife::Online);
        assert_eq!(bench.services.observe.pool("p").unwrap().size, Size(8 * MIB));
    });
}

#[test]
fn hob_toml_makes_what_is_not_there_and_commands_have_the_last_word() {
    run(async |bench| {
        let state_dir = bench.dir.path().join("state");
        let image = bench.image("vm.img", 16);
        let toml = format!(
            "[[pool]]\nname = \"p\"\ndevices = [\"{}\"]\nsize = \"9M\"\nsegment_size = \"1M\"\n\
             [[disk]]\nname = \"vm\"\nbacking = \"{image}\"\ncache = {{ pool = \"p\", size = \"2M\" }}\n\
             [[disk]]\nname = \"bad\"\nbacking = \"/nonexistent\"\n",
            bench.path("a")
        );
        let (services, shard) = restart(&state_dir, &toml).await;
        let bench = Bench { services, shard, ..bench };
        assert_eq!(bench.room("vm"), 2);
        assert_eq!(bench.services.observe.disk("bad").unwrap().state, DiskLife::Offline);
        bench.resize("vm", 3).await.unwrap();
        bench.services.disks.disk_remove("bad".into(), OnDirty::Drain).await.unwrap();
        bench.shard.stop();
        drop(bench.services);
        let (services, shard) = restart(&state_dir, &toml).await;
        let bench = Bench { services, shard, ..bench };
        assert_eq!(bench.room("vm"), 3);
        assert_eq!(bench.services.observe.disks().len(), 1);
    });
}

/// The power fails while hob.toml's pool of two devices is created for the first time.
#[test]
fn a_pool_that_was_made_in_part_is_completed_if_nothing_is_in_it() {
    run(async |bench| {
        let (a, b) = (bench.path("a"), bench.path("b"));
        let toml = format!(
            "[[pool]]\nname = \"p\"\ndevices = [\"{a}\", \"{b}\"]\nsize = \"9M\"\nsegment_size = \"1M\"\n"
        );
        let start = async |state: &str| {
            let (services, shard) = restart(&bench.dir.path().join(state), &toml).await;
            let pool = services.observe.pool("p").unwrap();
            // Without a state, ids that the interrupted starts gave out may belong to other devices.
            let is_known = |device: &&hob_control::Device| !device.path.starts_with("/unknown-device-");
            let states: Vec<_> = pool.devices.iter().filter(is_known).map(|device| device.state).collect();
            (services, shard, pool.size, states)
        };
        let both = vec![DeviceState::Online; 2];
        let (services, shard, size, states) = start("first").await;
        assert_eq!(states, both);
        shard.stop();
        drop(services);
        // The first device is formatted, but the second is empty or missing.
        let wipe = |bytes: u64| {
            let file = std::fs::File::options().write(true).open(&b).unwrap();
            file.set_len(0).unwrap();
            file.set_len(bytes).unwrap();
        };
        let bytes = std::fs::metadata(&b).unwrap().len();
        for (state, lose) in [("second", false), ("third", true)] {
            wipe(bytes);
            if lose {
                std::fs::remove_file(&b).unwrap();
            }
            let (services, shard, again, states) = start(state).await;
            assert_eq!((again, states), (size, both.clone()), "{state}");
            shard.stop();
            drop(services);
        }
        // Data of other programs is not overwritten.
        wipe(bytes);
        let file = std::fs::File::options().write(true).open(&b).unwrap();
        std::os::unix::fs::FileExt::write_all_at(&file, b"precious", 0).unwrap();
        let (services, shard, _, states) = start("fourth").await;
        assert_eq!(states.iter().filter(|state| **state == DeviceState::Offline).count(), 1, "{states:?}");
        assert!(std::fs::read(&b).unwrap().starts_with(b"precious"));
        let health = services.observe.health().await;
        assert!(health.problems.iter().any(|it| it.subject.contains(&b)), "{health:?}");
        shard.stop();
    });
}

#[test]
fn a_served_pool_is_made_found_again_and_made_larger() {
    run(async |bench| {
        let image = bench.image("vm.img", 16);
        let disk = DiskAdd { name: "vm".into(), backing: image, read_only: true, ..DiskAdd::default() };
        let device = bench.path("pool");
        for (mib, file_grows) in [(3, true), (1, false), (5, true)] {
            let before = std::fs::metadata(&device).map_or(0, |metadata| metadata.len());
            let (services, shard) = services(Store::Memory);
            let cache = CacheEnable { pool: "default".into(), ..cache_of(mib) };
            services.startup.start_serving(disk.clone(), Some((device.clone(), cache)), false).await.unwrap();
            assert_eq!(services.observe.disk("vm").unwrap().cache.unwrap().room, Size(mib * MIB));
            let after = std::fs::metadata(&device).unwrap().len();
            assert_eq!(after > before, file_grows, "{before} → {after} bytes for {mib} MiB");
            shard.stop();
            drop(services);
            tokio::time::sleep(std::time::Duration::from_millis(10)).await;
        }
        std::fs::write(&device, "precious").unwrap();
        let (services, _shard) = services(Store::Memory);
        let cache = CacheEnable { pool: "default".into(), ..cache_of(1) };
        let error =
            services.startup.start_serving(disk, Some((device.clone(), cache)), false).await.unwrap_err();
        assert_eq!(std::fs::read(&device).unwrap(), b"precious", "{error}");
    });
}
