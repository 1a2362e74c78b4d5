//! Shared caches: hob chooses their sizes from what their disks read.

use std::time::Duration;

use super::*;
use crate::services::pools::REPARTITION_EVERY;

const REQUEST: u64 = 65536;

fn patch(json: &str) -> CachePatch {
    serde_json::from_str(json).unwrap()
}

impl Bench {
    /// Gives a disk a shared cache with these settings.
    async fn share(&self, disk: &str, json: &str) -> Result<DiskChanged> {
        let enable = CacheEnable { pool: "p".into(), size: None, settings: patch(json).settings };
        self.services.pools.cache_enable(disk.into(), enable).await
    }

    /// Reads the first `mib` MiB of a disk several times.
    fn read_again(&self, disk: &str, mib: u64) {
        let id = self.services.registry.inner().disks[disk].id;
        for _ in 0..4 {
            (0..mib * MIB / REQUEST).for_each(|at| self.shard.read(id, at * REQUEST, REQUEST).unwrap());
        }
    }

    /// Repartitions the pool `count` times. Before each time, the disks read the amounts in
    /// `reads`.
    async fn rounds(&self, count: usize, reads: &[(&str, u64)]) {
        for _ in 0..count {
            reads.iter().for_each(|(disk, mib)| self.read_again(disk, *mib));
            tokio::time::sleep(REPARTITION_EVERY).await;
            self.services.pools.round("p").await.unwrap();
        }
    }
}

#[test]
fn shared_capacity_follows_the_reads() {
    run(async |bench| {
        bench.pool(&["a", "b"], 12).await;
        for disk in ["one", "two"] {
            bench.disk(disk).await;
            bench.share(disk, "{}").await.unwrap();
        }
        assert_eq!((bench.room("one"), bench.room("two"), bench.free()), (1, 1, 22), "one segment each");
        bench.rounds(6, &[("one", 20)]).await;
        assert!(bench.room("one") >= 20, "{}", bench.room("one"));
        // The load changes.
        bench.rounds(40, &[("two", 20)]).await;
        assert!(bench.room("two") >= 20, "{} {}", bench.room("one"), bench.room("two"));
        let shared = bench.services.observe.pool("p").unwrap().shared.unwrap();
        assert_eq!(shared.size, Size(24 * MIB));
        assert!(shared.moved >= Size(16 * MIB), "{:?}", shared);
        assert_eq!(shared.caches.len(), 2);
        let [one, two] = &shared.caches[..] else { unreachable!() };
        assert!(two.reads_per_second > one.reads_per_second && two.hit_permille > 900, "{two:?}");
        // A cache with a size of its own takes what it needs from the shared ones.
        bench.disk("fixed").await;
        bench.cache("fixed", 20).await.unwrap();
        assert_eq!(bench.room("fixed"), 20);
        assert!(bench.room("one") >= 1 && bench.room("two") >= 1);
        // As much as the limits permit.
        let error = bench.resize("fixed", 23).await.unwrap_err();
        assert!(error.to_string().contains("are needed"), "{error}");
        assert_eq!(bench.room("fixed"), 20);
    });
}

#[test]
fn checksum_mismatches_of_an_idle_shared_cache_are_not_counted_again() {
    run(async |bench| {
        bench.pool(&["a"], 8).await;
        bench.disk("one").await;
        bench.share("one", "{}").await.unwrap();
        let calls_to_count = async || {
            bench.services.pools.round("p").await.unwrap();
            tokio::time::sleep(Duration::from_secs(1)).await;
            bench.shard.take_received();
            bench.services.observe.count_mismatches();
            tokio::time::sleep(Duration::from_secs(1)).await;
            bench.shard.take_received()
        };
        bench.read_again("one", 1);
        assert_eq!(calls_to_count().await, 1);
        assert_eq!(calls_to_count().await, 0, "no I/O to flash since the count");
        bench.read_again("one", 1);
        assert_eq!(calls_to_count().await, 1);
    });
}

#[test]
fn a_cache_that_becomes_persistent_takes_space_for_its_journal_from_shared_caches() {
    run(async |bench| {
        bench.pool(&["a"], 12).await;
        bench.disk("one").await;
        bench.share("one", r#"{"min": "8M"}"#).await.unwrap();
        bench.disk("fixed").await;
        bench.cache("fixed", 4).await.unwrap();
        assert_eq!((bench.room("one"), bench.free()), (8, 0));
        let persistent = || patch(r#"{"persistent": true}"#);
        bench.shard.take_changes();
        let error = bench.services.pools.cache_patch("fixed".into(), persistent()).await.unwrap_err();
        assert!(error.to_string().contains("are needed; nothing was changed"), "{error}");
        assert!(bench.shard.take_changes().is_empty());
        bench.services.pools.cache_patch("one".into(), patch(r#"{"min": "1M"}"#)).await.unwrap();
        bench.services.pools.cache_patch("fixed".into(), persistent()).await.unwrap();
        assert_eq!(bench.room("fixed"), 4);
        assert!((1..8).contains(&bench.room("one")), "{}", bench.room("one"));
    });
}

#[test]
fn a_shared_cache_that_becomes_persistent_makes_space_for_its_journal() {
    run(async |bench| {
        bench.pool(&["a"], 8).await;
        bench.disk("one").await;
        bench.share("one", r#"{"min": "8M"}"#).await.unwrap();
        assert_eq!((bench.room("one"), bench.free()), (8, 0));
        let write_back = || patch(r#"{"mode": "write-back"}"#);
        bench.shard.take_changes();
        let error = bench.services.pools.cache_patch("one".into(), write_back()).await.unwrap_err();
        assert!(error.to_string().contains("8M are needed; nothing was changed"), "{error}");
        assert!(bench.shard.take_changes().is_empty());
        bench.services.pools.cache_patch("one".into(), patch(r#"{"min": "1M"}"#)).await.unwrap();
        bench.services.pools.cache_patch("one".into(), write_back()).await.unwrap();
        let cache = bench.services.observe.disk("one").unwrap().cache.unwrap();
        assert_eq!((cache.state, cache.mode.as_str()), (CacheState::Active, "write-back"));
        assert!((1..8).contains(&bench.room("one")), "{}", bench.room("one"));
    });
}

#[test]
fn a_shared_cache_without_space_has_a_reason() {
    run(async |bench| {
        bench.pool(&["a", "b"], 2).await;
        let disks = ["one", "two", "three", "four"];
        for disk in disks {
            bench.disk(disk).await;
            bench.share(disk, "{}").await.unwrap();
        }
        bench.services.pools.device_remove("p".into(), bench.path("b")).await.unwrap();
        bench.rounds(2, &[]).await;
        let without: Vec<&str> = disks.into_iter().filter(|disk| bench.room(disk) == 0).collect();
        assert_eq!(without.len(), 2);
        for disk in without {
            let reason = bench.services.observe.disk(disk).unwrap().cache.unwrap().reason;
            assert!(reason.is_some_and(|reason| reason.contains("pool p has ")), "{disk}");
        }
    });
}

#[test]
fn limits_hold() {
    run(async |bench| {
        bench.pool(&["a", "b"], 16).await;
        for (disk, limits) in [
            ("pinned", r#"{"min": "3M", "pin": true}"#),
            ("small", r#"{"max": "4M"}"#),
            ("large", r#"{"min": "6M"}"#),
        ] {
            bench.disk(disk).await;
            bench.share(disk, limits).await.unwrap();
        }
        let rooms = || (bench.room("pinned"), bench.room("small"), bench.room("large"));
        assert_eq!(rooms(), (3, 1, 6));
        bench.rounds(20, &[("pinned", 20), ("small", 20)]).await;
        let (pinned, small, large) = rooms();
        assert_eq!((pinned, small), (3, 4));
        assert!(large >= 6);
        bench.services.pools.cache_patch("small".into(), patch(r#"{"max": 0}"#)).await.unwrap();
        bench.rounds(20, &[("small", 20)]).await;
        assert!(bench.room("small") >= 20, "{:?}", rooms());
        // A fixed size ends the sharing of the pool, and `shared` begins it again.
        let changed = bench.resize("small", 5).await.unwrap();
        assert!(changed.notes[0].contains("a fixed size of 5M"), "{:?}", changed.notes);
        bench.rounds(10, &[("small", 20)]).await;
        assert_eq!(bench.room("small"), 5);
        bench.services.pools.cache_patch("small".into(), patch(r#"{"shared": true}"#)).await.unwrap();
        bench.rounds(10, &[("small", 20)]).await;
        assert!(bench.room("small") > 5);
    });
}

#[test]
fn dirty_data_is_destaged_before_its_segments_move() {
    run(async |bench| {
        bench.pool(&["a", "b"], 12).await;
        let lazy = r#"{"mode": "write-back", "dirty_start": 90, "dirty_stop": 90, "dirty_full": 95, "dirty_age_max": 0}"#;
        for disk in ["one", "two"] {
            bench.disk(disk).await;
            bench.share(disk, lazy).await.unwrap();
        }
        bench.rounds(6, &[("one", 14)]).await;
        let before = bench.room("one");
        assert!(before >= 14, "{before}");
        let id = bench.services.registry.inner().disks["one"].id;
        (0..14 * 16).for_each(|at| bench.shard.write(id, at * REQUEST, 4096).unwrap());
        assert!(bench.services.observe.stats("one").await.unwrap().dirty_bytes > 0);
        bench.rounds(60, &[("two", 14)]).await;
        assert!(bench.room("two") >= 12, "{} {}", bench.room("one"), bench.room("two"));
        let shared = bench.services.observe.pool("p").unwrap().shared.unwrap();
        assert!(shared.moved >= Size(8 * MIB), "{shared:?}");
        // The rest of the dirty data fits into the cache.
        let dirty = bench.services.observe.stats("one").await.unwrap().dirty_bytes;
        assert!(dirty <= bench.room("one") * MIB, "{dirty}");
    });
}

#[test]
fn a_backing_that_fails_keeps_the_segments_of_its_dirty_data() {
    run(async |bench| {
        bench.pool(&["a", "b"], 12).await;
        let lazy = r#"{"mode": "write-back", "dirty_start": 90, "dirty_stop": 90, "dirty_full": 95, "dirty_age_max": 0}"#;
        bench.disk("one").await;
        bench.share("one", lazy).await.unwrap();
        bench.disk("two").await;
        bench.share("two", "{}").await.unwrap();
        bench.rounds(6, &[("one", 14)]).await;
        let id = bench.services.registry.inner().disks["one"].id;
        (0..14 * 16).for_each(|at| bench.shard.write(id, at * REQUEST, REQUEST).unwrap());
        let dirty = bench.services.observe.stats("one").await.unwrap().dirty_bytes;
        let before = bench.room("one");
        bench.shard.set_backings_fail(true);
        tokio::time::sleep(Duration::from_secs(1)).await;
        // No new data, so that only one cache wants more.
        bench.rounds(3, &[]).await;
        assert_eq!(bench.room("one"), before);
        assert_eq!(bench.services.observe.stats("one").await.unwrap().dirty_bytes, dirty);
        bench.shard.set_backings_fail(false);
    });
}

#[test]
fn wrong_settings_are_refused_in_words() {
    run(async |bench| {
        bench.pool(&["a"], 8).await;
        bench.disk("vm").await;
        for (json, word) in [
            (r#"{"shared": false}"#, "needs a size"),
            (r#"{"preset": "vfrc"}"#, "needs a size"),
            (r#"{"min": "4M", "max": "2M"}"#, "above the maximum"),
            (r#"{"shares": 0}"#, "1 to"),
            (r#"{"min": "2E"}"#, "too large"),
            (r#"{"min": "9M"}"#, "are needed"),
        ] {
            let error = bench.share("vm", json).await.unwrap_err().to_string();
            assert!(error.contains(word), "{json}: {error}");
        }
        bench.cache("vm", 2).await.unwrap();
        let error = bench.services.pools.cache_patch("vm".into(), patch(r#"{"min": "1M"}"#)).await;
        assert!(error.unwrap_err().to_string().contains("shared caches"));
        let both = CachePatch { size: Some(Size(MIB)), ..patch(r#"{"shared": true}"#) };
        let error = bench.services.pools.cache_patch("vm".into(), both).await.unwrap_err();
        assert!(error.to_string().contains("no size of its own"), "{error}");
    });
}
