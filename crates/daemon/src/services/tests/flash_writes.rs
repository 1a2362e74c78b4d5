//! Flash write budgets: what the caches of a pool write is counted, limited and kept.

use std::time::Duration;

use hob_control::{FlashWritesUsage, PoolPatch};

use super::*;
use crate::services::registry::Inner;

const REQUEST: u64 = 65536;

impl Bench {
    async fn budget(&self, text: &str) {
        let patch = PoolPatch { flash_writes: Some(text.parse().unwrap()) };
        self.services.pools.pool_set("p".into(), patch).await.unwrap();
    }

    fn writes(&self) -> FlashWritesUsage {
        self.services.observe.pool("p").unwrap().flash_writes.unwrap()
    }

    /// Runs a budget round, after two seconds.
    async fn count(&self) {
        tokio::time::sleep(Duration::from_secs(2)).await;
        self.services.pools.count_flash_writes().await;
    }

    /// Reads `mib` MiB of a disk from this offset on.
    fn read_mib(&self, disk: &str, from: u64, mib: u64) {
        let id = self.services.registry.inner().disks[disk].id;
        (0..mib * MIB / REQUEST)
            .for_each(|at| self.shard.read(id, from * MIB + at * REQUEST, REQUEST).unwrap());
    }
}

fn pressure_of(inner: &Inner, disk: &str) -> u8 {
    let entry = &inner.disks[disk];
    entry.view(inner).cache.unwrap().flash_writes.unwrap().pressure_percent
}

#[test]
fn what_caches_write_is_counted_and_limited() {
    run(async |bench| {
        bench.pool(&["a"], 16).await;
        bench.disk("one").await;
        let settings = CacheSettings {
            policy: Some("lru".into()),
            admission: Some("always".into()),
            fill: Some("sectors".into()),
            ..CacheSettings::default()
        };
        let enable = CacheEnable { settings, ..cache_of(8) };
        bench.services.pools.cache_enable("one".into(), enable).await.unwrap();
        bench.count().await;
        assert_eq!(bench.writes().budget, None);
        bench.read_mib("one", 0, 2);
        bench.count().await;
        let counted = bench.writes();
        assert_eq!((counted.written, counted.written_day), (Size(2 * MIB), Size(2 * MIB)));
        assert_eq!((counted.unrefusable, counted.refused), (Size(0), Size(0)));
        bench.budget("1M/day").await;
        let inner = || bench.services.registry.inner();
        assert_eq!(pressure_of(&inner(), "one"), 0);
        bench.count().await;
        // The cache fills beyond the write budget at first. Then blocks need a second access.
        bench.read_mib("one", 2, 10);
        bench.count().await;
        bench.read_mib("one", 12, 4);
        bench.count().await;
        let limited = bench.writes();
        assert!(limited.written <= Size(9 * MIB), "{limited:?}");
        assert!(limited.refused >= Size(4 * MIB) && limited.loan >= Size(5 * MIB), "{limited:?}");
        assert!(pressure_of(&inner(), "one") > 10);
        bench.budget("off").await;
        bench.count().await;
        bench.read_mib("one", 20, 4);
        bench.count().await;
        assert!(bench.writes().written >= Size(limited.written.bytes() + 4 * MIB), "{:?}", bench.writes());
    });
}

#[test]
fn a_budget_is_in_the_state_file() {
    run(async |bench| {
        bench.pool(&["a"], 16).await;
        bench.budget("2 DWPD").await;
        let state = bench.services.registry.inner().state();
        assert_eq!(state.pools[0].flash_writes, Some("2 DWPD".parse().unwrap()));
        assert_eq!(bench.writes().bytes_per_day, Size(32 * MIB));
    });
}
