//! Life-cycle events of VMs, and their effects on the caches of their disks.

use hob_control::{EVENTS, Effect, LifeEvent};

use super::recovery::{LAZY, end, prepare, reason, sectors, write};
use super::*;

#[test]
fn every_event_affects_each_kind_of_cache_as_listed() {
    run(async |bench| {
        bench.pool(&["a"], 64).await;
        bench.disk("volatile").await;
        bench.disk("bare").await;
        bench.cache("volatile", 16).await.unwrap();
        bench.disk("kept").await;
        let settings = CacheSettings { mode: Some("write-back".into()), ..CacheSettings::default() };
        let enable = CacheEnable { settings, ..cache_of(16) };
        bench.services.pools.cache_enable("kept".into(), enable).await.unwrap();
        for row in EVENTS {
            for (disk, effect) in
                [("volatile", row.of_volatile), ("kept", row.of_persistent), ("bare", Effect::Nothing)]
            {
                bench.shard.take_changes();
                let changed = bench.services.disks.disk_event(disk.into(), row.event).await.unwrap();
                let did = bench.shard.take_changes();
                let wanted: &[&str] = match effect {
                    Effect::Nothing => &[],
                    Effect::Drain => &["drain"],
                    Effect::Empty => &["clear"],
                    Effect::Discard => &["discard", "clear"],
                };
                assert_eq!(did, wanted, "{}: {disk} {:?}", row.name, changed.notes);
            }
        }
        let error = bench.services.disks.disk_event("absent".into(), LifeEvent::Resume).await.unwrap_err();
        assert!(error.to_string().contains("absent"), "{error}");
    });
}

/// A snapshot revert discards the whole cache of an offline disk, so nothing is left to clear.
#[test]
fn a_snapshot_revert_of_an_offline_disk_discards_its_cache_and_succeeds() {
    run(async |bench| {
        let bench = prepare(bench, LAZY).await;
        write(&bench, 0..10);
        let bench = end(bench, false, |dir| take_away(dir, "vm.img")).await;
        reason(&bench);
        let event = LifeEvent::SnapshotRevert;
        let changed = bench.services.disks.disk_event("vm".into(), event).await.unwrap();
        assert!(changed.notes[0].contains("all dirty data is lost"), "{:?}", changed.notes);
        reason(&bench);
        bench.bring_back("vm.img");
        bench.services.disks.bring_online("vm").await;
        assert_eq!(sectors(&bench).await, (0, 0));
    });
}
