//! Checks that prevent a call from losing dirty data or disconnecting guests by accident, and their
//! messages.

use hob_control::{LifeEvent, OnClients, PlannedChange, PlannedPoolChange};

use super::journal_lost::prepare;
use super::*;
use crate::api_error::ApiError;
use crate::services::registry::ClusterWait;

#[test]
fn dirty_data_is_not_lost_by_a_call_that_does_not_say_so() {
    run(async |bench| {
        prepare(&bench, &["a"], 20).await;
        let services = &bench.services;
        let revert = PlannedChange::Event { event: LifeEvent::SnapshotRevert };
        for change in [&revert, &PlannedChange::DiscardDirty] {
            let error = services.disks.check_discard("vm", change, false).await.unwrap_err();
            assert_eq!(error.kind, ErrorKind::Conflict);
            let said = error.to_string();
            assert!(said.contains("80 KiB of dirty data is lost") && said.contains("--yes"), "{said}");
            services.disks.check_discard("vm", change, true).await.unwrap();
        }
        let suspend = PlannedChange::Event { event: LifeEvent::Suspend };
        services.disks.check_discard("vm", &suspend, false).await.unwrap();
        services.registry.inner().disk_mut("vm").unwrap().phase = DiskPhase::Offline("no such file".into());
        let error = services.disks.check_discard("vm", &revert, false).await.unwrap_err().to_string();
        assert!(error.contains("is unknown while the disk is offline"), "{error}");
        let missing = services.disks.check_discard("none", &revert, false).await.unwrap_err();
        assert_eq!(missing.kind, ErrorKind::NotFound);
    });
}

#[test]
fn what_a_change_does_is_said_and_not_done() {
    run(async |bench| {
        prepare(&bench, &["a"], 20).await;
        bench.shard.take_changes();
        let preview =
            async |change: PlannedChange| bench.services.disks.preview("vm", &change).await.unwrap();
        let set = |json: &str| PlannedChange::Set { patch: Box::new(serde_json::from_str(json).unwrap()) };
        for change in [
            PlannedChange::Clear,
            PlannedChange::Remove { discard_dirty: false },
            PlannedChange::Disable { discard_dirty: false },
            set(r#"{"block_size":65536}"#),
        ] {
            let found = preview(change.clone()).await;
            assert_eq!((found.cached, found.loses_dirty()), (Size(20 * 4096), false), "{change:?}");
            assert!(found.effects[0].contains("the cache is emptied; it has 80 KiB"), "{found:?}");
            assert!(
                found.effects[1].contains("80 KiB of dirty data is first written to the backing"),
                "{found:?}"
            );
        }
        for change in
            [PlannedChange::Remove { discard_dirty: true }, PlannedChange::Disable { discard_dirty: true }]
        {
            let found = preview(change).await;
            assert_eq!((found.cached, found.dirty_lost), (Size(20 * 4096), Size(20 * 4096)));
        }
        let smaller = preview(set(r#"{"size":1048576}"#)).await;
        assert!(smaller.effects[0].contains("shrinks from 4M to 1M"), "{smaller:?}");
        assert!(preview(set(r#"{"dirty_full":90}"#)).await.effects.is_empty());
        let wrong = bench.services.disks.preview("vm", &set(r#"{"policy":"best"}"#)).await.unwrap_err();
        assert_eq!(wrong.kind, ErrorKind::Invalid);
        assert!(bench.shard.take_changes().is_empty(), "nothing was changed");
    });
}

/// A dry run shows the refusal of a command that hob would refuse.
#[test]
fn a_preview_is_refused_like_the_command() {
    run(async |bench| {
        prepare(&bench, &["a"], 20).await;
        let (disks, pools) = (&bench.services.disks, &bench.services.pools);
        let said = |error: ApiError| (error.to_string(), error.kind);
        let preview =
            async |disk: &str, change: PlannedChange| said(disks.preview(disk, &change).await.unwrap_err());
        let stripe = |bytes| DiskPatch { stripe: Some(Size(bytes)), ..DiskPatch::default() };
        for (disk, patch) in [("none", stripe(8192)), ("vm", stripe(5120)), ("vm", DiskPatch::default())] {
            let refused = disks.disk_patch(disk.into(), patch.clone()).await.unwrap_err();
            let change = PlannedChange::SetDisk { patch: Box::new(patch) };
            assert_eq!(preview(disk, change).await, said(refused));
        }
        let patch = CachePatch { size: Some(Size(100 * MIB)), ..CachePatch::default() };
        let refused = pools.cache_patch("vm".into(), patch.clone()).await.unwrap_err();
        assert!(refused.to_string().contains("are needed"), "{refused}");
        assert_eq!(preview("vm", PlannedChange::Set { patch: Box::new(patch) }).await, said(refused));
        bench.services.registry.inner().disk_mut("vm").unwrap().phase = DiskPhase::Offline("no file".into());
        let refused = pools.cache_clear("vm".into()).await.unwrap_err();
        assert_eq!(preview("vm", PlannedChange::Clear).await, said(refused));
        let refused = disks.cache_disable("vm".into(), OnDirty::Drain).await.unwrap_err();
        assert_eq!(preview("vm", PlannedChange::Disable { discard_dirty: false }).await, said(refused));
        let refused = disks.disk_remove("vm".into(), OnDirty::Drain).await.unwrap_err();
        assert_eq!(preview("vm", PlannedChange::Remove { discard_dirty: false }).await, said(refused));
        let preview = async |pool: &str, change: PlannedPoolChange| {
            said(disks.pool_preview(pool, &change).await.unwrap_err())
        };
        let create = pool_create("p", vec![bench.path("new")], 8);
        let refused = pools.pool_create(create.clone(), OnDirty::Drain).await.unwrap_err();
        assert_eq!(preview("p", PlannedPoolChange::Create { create: Box::new(create) }).await, said(refused));
        let add = DeviceAdd { path: bench.path("new"), size: None, peer: None, force: false };
        let refused = pools.device_add("none".into(), add.clone(), OnDirty::Drain).await.unwrap_err();
        assert_eq!(preview("none", PlannedPoolChange::AddDevice { add: Box::new(add) }).await, said(refused));
    });
}

#[test]
fn a_disk_with_clients_is_removed_only_if_they_may_be_disconnected() {
    run(async |bench| {
        bench.disk("vm").await;
        let check = async |clients| bench.services.disks.check_unused("vm", clients).await;
        check(OnClients::Refuse).await.unwrap();
        bench.shard.set_users(2);
        let error = check(OnClients::Refuse).await.unwrap_err();
        assert_eq!(error.kind, ErrorKind::Conflict);
        assert!(error.to_string().contains("vm has 2 clients connected"), "{error}");
        check(OnClients::Disconnect).await.unwrap();
        bench.shard.set_hangs(true);
        assert_eq!(check(OnClients::Refuse).await.unwrap_err().kind, ErrorKind::Busy, "they are unknown");
        check(OnClients::Disconnect).await.unwrap();
        bench.shard.set_hangs(false);
        let preview = bench
            .services
            .disks
            .preview("vm", &PlannedChange::Remove { discard_dirty: false })
            .await
            .unwrap();
        assert_eq!(
            (preview.clients, preview.effects.as_slice()),
            (2, &["vm: 2 clients are disconnected".to_owned()][..])
        );
        assert_eq!(preview.client_pids, [std::process::id(); 2]);
    });
}

/// Returns the number of devices with segments of a disk's cache.
fn devices(bench: &Bench) -> usize {
    let inner = bench.services.registry.inner();
    let held = inner.disks["vm"].held.iter().map(|segment| segment.device);
    held.collect::<BTreeSet<_>>().len()
}

#[test]
fn a_cache_with_two_copies_is_spread_again_when_a_device_returns() {
    for (copies, preset) in [("2-dirty", ""), ("2", ""), ("2-dirty", r#""preset":"auto","#)] {
        run(async |bench| {
            bench.pool(&["a", "b"], 16).await;
            bench.disk("vm").await;
            let json = format!(r#"{{{preset}"mode":"write-back","copies":"{copies}","dirty_age_max":0}}"#);
            bench.cache_with("vm", 8, &json).await.unwrap();
            assert_eq!(devices(&bench), 2);
            bench.services.pools.device_remove("p".into(), bench.path("b")).await.unwrap();
            assert_eq!((devices(&bench), bench.room("vm")), (1, 8));
            let reason = bench.services.observe.disk("vm").unwrap().cache.unwrap().reason.unwrap();
            assert!(reason.contains("one copy"), "{reason}");
            let size = Some(Size(hob_storage::pool::device_bytes_for(16 * MIB, SEGMENT)));
            let add = DeviceAdd { path: bench.path("b"), size, peer: None, force: true };
            bench.services.pools.device_add("p".into(), add, OnDirty::Drain).await.unwrap();
            assert_eq!((devices(&bench), bench.room("vm")), (2, 8), "{copies} {preset}");
            assert_eq!(bench.services.observe.disk("vm").unwrap().cache.unwrap().reason, None);
            let id = bench.services.registry.inner().disks["vm"].id;
            (0..100).for_each(|block| bench.shard.write(id, block * 4096, 4096).unwrap());
            let (shard, id) = bench.services.registry.shard_of("vm").unwrap();
            assert!(
                shard.stats(id).await.unwrap().sectors_dirty > 0,
                "writes go to flash again: {copies} {preset}"
            );
        });
    }
}

#[test]
fn what_the_removal_of_a_device_does_to_caches_is_said_and_not_done() {
    run(async |bench| {
        bench.pool(&["a", "b"], 4).await;
        bench.disk("vm").await;
        bench.cache("vm", 3).await.unwrap();
        let first = bench.services.registry.inner().disks["vm"].held[0].device;
        let path = bench.services.registry.inner().device_on_shards(first).unwrap().1.path.clone();
        let change = PlannedPoolChange::RemoveDevice { path: path.to_string_lossy().into_owned() };
        let preview = async || bench.services.disks.pool_preview("p", &change).await.unwrap();
        let moves = preview().await;
        assert_eq!(moves.effects, ["vm: its cache moves to other devices of pool p"]);
        assert_eq!((moves.cached, moves.loses_dirty()), (Size(0), false));
        let patch = CachePatch { size: Some(Size(6 * MIB)), ..CachePatch::default() };
        bench.services.pools.cache_patch("vm".into(), patch).await.unwrap();
        let shrinks = preview().await;
        assert!(shrinks.cached > Size(0) && !shrinks.loses_dirty(), "{shrinks:?}");
        assert!(shrinks.effects[0].contains("vm: the cache shrinks by "), "{shrinks:?}");
        assert_eq!(bench.room("vm"), 6, "nothing was changed");
        // As much as was announced.
        let PlannedPoolChange::RemoveDevice { path } = change.clone() else { unreachable!() };
        bench.services.pools.device_remove("p".into(), path).await.unwrap();
        assert_eq!(Size(6 * MIB - bench.room("vm") * MIB), shrinks.cached);
        let path = if bench.path("a") == bench.services.observe.pool("p").unwrap().devices[0].path {
            bench.path("a")
        } else {
            bench.path("b")
        };
        let last = PlannedPoolChange::RemoveDevice { path };
        let empties = bench.services.disks.pool_preview("p", &last).await.unwrap();
        assert!(empties.effects[0].contains("vm: the cache is emptied"), "{empties:?}");
    });
}

#[test]
fn a_disk_that_another_host_owns_is_not_to_be_repaired() {
    run(async |bench| {
        bench.disk("vm").await;
        let mut inner = bench.services.registry.inner();
        let disk = inner.disk_mut("vm").unwrap();
        disk.phase = DiskPhase::Offline("b has it".to_owned());
        for (wait, hint) in
            [(ClusterWait::No, "repair the backing"), (ClusterWait::Served, "hob cluster disks")]
        {
            disk.cluster_wait = wait;
            let error = disk.shard().err().unwrap();
            assert!(format!("{error:?}").contains(hint), "{error:?}");
        }
    });
}
