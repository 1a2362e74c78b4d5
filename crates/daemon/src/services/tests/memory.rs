//! Memory tiers above caches.

use super::*;

fn ram(text: &str) -> CacheSettings {
    CacheSettings { ram: Some(text.parse().unwrap()), ..CacheSettings::default() }
}

async fn set(bench: &Bench, settings: CacheSettings) -> Result<DiskChanged> {
    bench.services.pools.cache_patch("vm".into(), CachePatch { size: None, settings }).await
}

/// Returns the memory that the shard has for the disk, and the size that the disk reports, bytes.
async fn memory(bench: &Bench) -> (u64, u64) {
    let id = bench.services.registry.inner().disk("vm").unwrap().id;
    (bench.shard.area_bytes(id), bench.services.observe.stats("vm").await.unwrap().memory_bytes)
}

#[test]
fn memory_comes_changes_and_goes_with_the_cache() {
    run(async |bench| {
        bench.pool(&["a"], 8).await;
        bench.disk("vm").await;
        bench.cache("vm", 4).await.unwrap();
        assert_eq!(memory(&bench).await, (0, 0));
        let changed = set(&bench, ram("2M")).await.unwrap();
        assert_eq!(changed.notes, [""; 0]);
        let cache = changed.disk.unwrap().cache.unwrap();
        assert_eq!(
            (cache.ram, cache.preset.as_deref()),
            (Size(2 * MIB), Some("vfrc")),
            "no part of a preset"
        );
        assert_eq!(memory(&bench).await, (2 * MIB, 2 * MIB));
        set(&bench, ram("1M")).await.unwrap();
        assert_eq!(memory(&bench).await, (MIB, MIB));
        // A change to a preset keeps the memory tier.
        let preset = CacheSettings { preset: Some("vsan".into()), ..CacheSettings::default() };
        set(&bench, preset).await.unwrap();
        assert_eq!(memory(&bench).await, (MIB, MIB));
        set(&bench, ram("0")).await.unwrap();
        assert_eq!(memory(&bench).await, (0, 0));
        set(&bench, ram("1M")).await.unwrap();
        bench.services.disks.cache_disable("vm".into(), OnDirty::Drain).await.unwrap();
        assert_eq!(memory(&bench).await, (0, 0), "it goes with the cache");
    });
}

#[test]
fn a_cache_can_begin_with_memory_and_a_disk_takes_it_along() {
    run(async |bench| {
        bench.pool(&["a"], 8).await;
        bench.disk("vm").await;
        let enable = CacheEnable { settings: ram("1M"), ..cache_of(4) };
        bench.services.pools.cache_enable("vm".into(), enable).await.unwrap();
        assert_eq!(memory(&bench).await, (MIB, MIB));
        let id = bench.services.registry.inner().disk("vm").unwrap().id;
        bench.services.disks.disk_remove("vm".into(), OnDirty::Drain).await.unwrap();
        assert_eq!(bench.shard.area_bytes(id), 0);
    });
}

#[test]
fn what_makes_no_sense_is_refused_and_nothing_changes() {
    run(async |bench| {
        bench.pool(&["a"], 8).await;
        bench.disk("vm").await;
        let enable = |text| CacheEnable { settings: ram(text), ..cache_of(4) };
        let error = bench.services.pools.cache_enable("vm".into(), enable("1000T")).await.unwrap_err();
        assert!(error.to_string().contains("more than half"), "{error}");
        assert!(bench.services.observe.disk("vm").unwrap().cache.is_none());
        bench.services.pools.cache_enable("vm".into(), enable("1M")).await.unwrap();
        let error = set(&bench, ram("4K")).await.unwrap_err();
        assert!(error.to_string().contains("0 or at least 1 MiB"), "{error}");
        assert_eq!(memory(&bench).await, (MIB, MIB));
    });
}

#[test]
fn a_cache_whose_index_no_host_can_hold_is_refused_and_nothing_changes() {
    run(async |bench| {
        bench.pool(&["a"], 8).await;
        bench.disk("vm").await;
        let size = Some(Size(1 << 59));
        let enable = CacheEnable { size, ..cache_of(4) };
        let error = bench.services.pools.cache_enable("vm".into(), enable).await.unwrap_err();
        assert!(error.to_string().contains("the index of a cache of"), "{error}");
        assert!(error.to_string().contains("and this host allows"), "{error}");
        assert!(bench.services.observe.disk("vm").unwrap().cache.is_none());
        assert_eq!(bench.free(), 8);
        bench.cache("vm", 4).await.unwrap();
        let patch = CachePatch { size, ..CachePatch::default() };
        let error = bench.services.pools.cache_patch("vm".into(), patch).await.unwrap_err();
        assert!(error.to_string().contains("the index of a cache of"), "{error}");
        assert_eq!((bench.room("vm"), bench.free()), (4, 4));
        assert_eq!(bench.services.observe.disk("vm").unwrap().cache.unwrap().size, Size(4 * MIB));
    });
}

#[test]
fn a_restart_brings_it_back_empty() {
    run(async |bench| {
        let state_dir = bench.dir.path().join("state");
        let bench = bench.with_state();
        bench.pool(&["a"], 8).await;
        bench.disk("vm").await;
        bench
            .services
            .pools
            .cache_enable("vm".into(), CacheEnable { settings: ram("1M"), ..cache_of(4) })
            .await
            .unwrap();
        bench.shard.stop();
        drop(bench.services);
        let (store, kept) = Store::open(&state_dir).unwrap();
        let (services, shard) = super::services(store);
        services.startup.start(kept, &Config::parse("").unwrap()).await.unwrap();
        let bench = Bench { services, shard, dir: bench.dir };
        assert_eq!(memory(&bench).await, (MIB, MIB));
        assert_eq!(bench.services.observe.stats("vm").await.unwrap().memory_held_bytes, 0);
    });
}
