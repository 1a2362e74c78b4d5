//! Tests of devices on which an operator switches allocation off and on again.

use hob_control::{DevicePatch, PoolChanged};

use super::*;

async fn set(bench: &Bench, device: &str, admission: Admission) -> Result<PoolChanged> {
    bench.services.pools.device_set("p".into(), bench.path(device), DevicePatch { admission }).await
}

/// Returns the admission and the free MiB of a device.
fn device(bench: &Bench, name: &str) -> (Admission, u64) {
    let path = bench.path(name);
    let pool = bench.services.observe.pool("p").unwrap();
    let device = pool.devices.iter().find(|device| device.path == path).unwrap();
    (device.admission, device.free.bytes() / MIB)
}

#[test]
fn a_device_that_is_out_gives_nothing_new_and_keeps_what_is_in_use() {
    run(async |bench| {
        bench.pool(&["a", "b"], 4).await;
        for disk in ["vm", "other"] {
            bench.disk(disk).await;
        }
        bench.cache("vm", 2).await.unwrap();
        assert_eq!((device(&bench, "a"), device(&bench, "b")), ((Admission::In, 3), (Admission::In, 3)));
        assert!(set(&bench, "a", Admission::Out).await.unwrap().notes.is_empty());
        assert_eq!((bench.room("vm"), bench.free()), (2, 3));
        assert_eq!(device(&bench, "a"), (Admission::Out, 3));
        let error = bench.cache("other", 4).await.unwrap_err();
        assert!(error.to_string().contains("3M free and 4M are needed"), "{error}");
        bench.cache("other", 3).await.unwrap();
        assert_eq!((device(&bench, "a").1, device(&bench, "b").1, bench.free()), (3, 0, 0));
        assert_eq!(
            set(&bench, "a", Admission::Out).await.unwrap().notes,
            ["the device already had this setting"]
        );
        set(&bench, "a", Admission::In).await.unwrap();
        assert_eq!((device(&bench, "a"), bench.free()), ((Admission::In, 3), 3));
        bench.resize("other", 6).await.unwrap();
        assert_eq!((bench.room("vm"), bench.room("other"), bench.free()), (2, 6, 0));
    });
}

#[test]
fn a_restart_keeps_a_device_out_until_it_is_opted_in() {
    run(async |bench| {
        let state_dir = bench.dir.path().join("state");
        let mut bench = bench.with_state();
        bench.pool(&["a", "b"], 4).await;
        bench.disk("vm").await;
        bench.cache("vm", 6).await.unwrap();
        set(&bench, "a", Admission::Out).await.unwrap();
        assert_eq!(bench.room("vm"), 6);
        // Once with all devices at the start, and once with the device added later.
        for late in [false, true] {
            bench.shard.stop();
            drop(bench.services);
            if late {
                take_away(bench.dir.path(), "a");
            }
            let (services, shard) = restart(&state_dir, "").await;
            bench = Bench { services, shard, dir: bench.dir };
            if late {
                assert_eq!(device(&bench, "a"), (Admission::Out, 0));
                bench.bring_back("a");
                bench.services.pools.retry_devices("p").await;
            }
            // The caches start empty, without the device.
            assert_eq!((bench.room("vm"), bench.free()), (4, 0));
            assert_eq!(device(&bench, "a"), (Admission::Out, 4));
        }
        set(&bench, "a", Admission::In).await.unwrap();
        assert_eq!((bench.room("vm"), bench.free()), (6, 2));
    });
}

#[test]
fn a_device_that_is_fenced_or_unknown_is_refused() {
    run(async |bench| {
        bench.pool(&["a"], 4).await;
        let error = set(&bench, "b", Admission::Out).await.unwrap_err();
        assert_eq!(error.kind, ErrorKind::NotFound);
        let removal = bench.services.pools.device_remove("p".into(), bench.path("b")).await.unwrap_err();
        assert_eq!(error, removal);
        let sick = bench.shard.devices()[0];
        bench.services.events.handle(ShardEvent::Fenced { device: sick, errors: 16 });
        for admission in [Admission::In, Admission::Out] {
            let error = set(&bench, "a", admission).await.unwrap_err();
            assert_eq!(error.kind, ErrorKind::Conflict);
            assert!(error.to_string().contains("is fenced, so its allocation stays off"), "{error}");
        }
        assert_eq!((device(&bench, "a").0, bench.free()), (Admission::Out, 0));
    });
}
