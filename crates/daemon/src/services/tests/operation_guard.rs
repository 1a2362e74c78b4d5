//! Commands and hob's own work on one disk.

use super::*;
use crate::services::registry::{OPENING, SPREADING};

#[tokio::test(start_paused = true)]
async fn commands_wait_for_hobs_own_work_and_for_nothing_else() {
    let bench = Bench::new();
    bench.disk("vm").await;
    let registry = &bench.services.registry;
    // The disk is online, so that its opening is the recovery of its cache.
    for own in [SPREADING, OPENING] {
        let own = registry.guard_disk("vm", own).unwrap();
        let end = async {
            tokio::time::sleep(std::time::Duration::from_millis(50)).await;
            drop(own);
        };
        let (guard, ()) = tokio::join!(registry.guard_disk_for_command("vm", "changed"), end);
        drop(guard.unwrap());
    }
    let guard = registry.guard_disk("vm", "changed").unwrap();
    let start = tokio::time::Instant::now();
    let refused = registry.guard_disk_for_command("vm", "changed").await.unwrap_err().to_string();
    assert!(refused.contains("vm is being changed"), "{refused}");
    assert!(start.elapsed() < std::time::Duration::from_secs(5), "it does not wait for another command");
    drop(guard);
}

/// A disk whose settings are changed is closed and opened again. An upgrade waits for that, and not
/// for attempts to open a disk.
#[tokio::test(start_paused = true)]
async fn an_upgrade_waits_for_a_disk_that_is_opened_again() {
    let bench = Bench::new();
    bench.disk("vm").await;
    bench.services.registry.inner().disk_mut("vm").unwrap().phase = DiskPhase::Offline("closed".into());
    let guard = bench.services.registry.guard_disk("vm", "changed").unwrap();
    let error = bench.services.shutdown.begin().unwrap_err().to_string();
    assert!(error.contains("vm is being changed"), "{error}");
    drop(guard);
    let _retry = bench.services.registry.guard_disk("vm", OPENING).unwrap();
    bench.services.shutdown.begin().unwrap();
    bench.services.shutdown.cancel();
}

#[tokio::test(start_paused = true)]
async fn commands_wait_while_hob_looks_for_missing_devices() {
    let bench = Bench::new();
    bench.pool(&["a"], 4).await;
    let own = bench.services.registry.guard_pool("p", OPENING).unwrap();
    let end = async {
        tokio::time::sleep(std::time::Duration::from_millis(50)).await;
        drop(own);
    };
    let (guard, ()) = tokio::join!(bench.services.registry.guard_pool_for_command("p", "changed"), end);
    let guard = guard.unwrap();
    let refused =
        bench.services.registry.guard_pool_for_command("p", "changed").await.unwrap_err().to_string();
    assert!(refused.contains("p is being changed"), "{refused}");
    drop(guard);
}
