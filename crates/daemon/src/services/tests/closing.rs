//! The end of a daemon while a backing fails or does not answer.

use std::path::PathBuf;
use std::time::Duration;

use hob_storage::crash_log;
use hob_storage::failing::{self, Failing};

use super::recovery::{LAZY, end, prepare, reason, sectors, write};
use super::*;
use crate::cluster::Release;
use crate::state::{BootId, JournalSpec};

fn with_journal<T>(bench: &Bench, f: impl FnOnce(&mut JournalSpec) -> T) -> T {
    let mut inner = bench.services.registry.inner();
    let spec = inner.disk_mut("vm").unwrap().wanted.cache.as_mut().unwrap();
    f(spec.journal.as_mut().unwrap())
}

/// Value of `settle_seconds` in these tests. This time passes only if a test waits for it.
const SETTLE: Duration = Duration::from_secs(300);

/// Returns when other hosts may acquire the disk, if it is released now.
fn release(bench: &Bench) -> Release {
    bench.services.registry.inner().release_of("vm", SETTLE)
}

/// The backing may still execute unanswered requests of a disk after the disk was opened again, and
/// after it was closed cleanly.
#[test]
fn a_disk_that_is_opened_again_still_has_the_unanswered_requests_of_its_last_use() {
    run(async |bench| {
        bench.disk("vm").await;
        assert_eq!(release(&bench), Release::AtOnce);
        bench.services.registry.inner().disk_mut("vm").unwrap().note_unanswered();
        // Closes the disk and opens it again.
        let patch = DiskPatch { datastore: Some("array".to_owned()), ..DiskPatch::default() };
        bench.services.disks.disk_patch("vm".into(), patch).await.unwrap();
        assert_eq!(release(&bench), Release::AfterSettling);
        tokio::time::sleep(SETTLE).await;
        assert_eq!(release(&bench), Release::AtOnce, "the requests are older than settle_seconds");
    });
}

/// The next daemon must not expect a crash log of a cache that was closed, even if its backing was
/// not flushed: all journal records are on flash.
#[test]
fn a_closed_cache_has_no_crash_log_to_expect_even_if_its_backing_fails() {
    for fails in [false, true] {
        run(async |bench| {
            let bench = prepare(bench, LAZY).await;
            write(&bench, 0..20);
            // Unit tests have no crash logs.
            let boot: BootId = "1".parse().unwrap();
            with_journal(&bench, |journal| journal.note_use(Some(boot)));
            bench.shard.set_backings_fail(fails);
            bench.services.shutdown.close(Ending::Plain).await;
            assert_eq!(with_journal(&bench, |journal| journal.used.is_none()), fails);
            // The backing has answered all requests, with errors or not.
            assert_eq!(release(&bench), Release::AtOnce);
        });
    }
}

/// A daemon may be killed after it has closed a cache, and before the state file records this. Then
/// the crash log must still exist, because the next daemon expects the crash log.
#[test]
fn a_crash_log_stays_until_it_is_saved_that_none_is_expected() {
    for is_saved in [false, true] {
        run(async |bench| {
            let bench = prepare(bench, LAZY).await;
            bench.shard.set_writes_crash_logs();
            bench.services.pools.renew_ring("vm").await.unwrap();
            write(&bench, 0..20);
            let boot: BootId = "1".parse().unwrap();
            let owner = with_journal(&bench, |journal| {
                journal.note_use(Some(boot));
                journal.owner
            });
            let directory = std::env::var_os(crash_log::DIRECTORY_VARIABLE).map(PathBuf::from);
            let file = directory.unwrap_or_else(|| "/dev/shm".into()).join(format!("hob-{owner}"));
            assert!(file.exists(), "{}", file.display());
            bench.services.registry.save().await.unwrap();
            bench.shard.set_backings_fail(true);
            let failure =
                (!is_saved).then(|| failing::fail(&bench.dir.path().join("state"), 1, Failing::FromThenOn));
            bench.services.shutdown.close(Ending::Plain).await;
            assert!(reason(&bench).contains("shutting down"), "{}", reason(&bench));
            assert!(failure.is_none_or(|failure| failure.has_struck()));
            let exists = file.exists();
            crash_log::remove(&owner.0.to_le_bytes());
            let saved = State::read(&bench.dir.path().join("state")).unwrap();
            let spec = saved.disks[0].cache.as_ref().unwrap().journal.unwrap();
            assert_eq!((spec.used.is_none(), exists), (is_saved, !is_saved));
        });
    }
}

/// Before an upgrade, nothing is closed while a backing does not answer. The new process could not
/// open the disk.
#[test]
fn an_upgrade_is_refused_with_the_reason_while_a_backing_does_not_answer() {
    run(async |bench| {
        bench.disk("vm").await;
        let wait_max = Duration::from_secs(20);
        assert_eq!(bench.services.shutdown.check_backings(wait_max).await, Ok(()));
        let monitor = {
            let inner = bench.services.registry.inner();
            inner.disk("vm").unwrap().measure.as_ref().unwrap().monitor.clone()
        };
        monitor.note_outage(Duration::ZERO, "Connection refused");
        let refused = bench.services.shutdown.check_backings(wait_max).await.unwrap_err();
        assert!(refused.starts_with("disk vm: its backing did not answer within 20 s"), "{refused}");
        assert!(refused.contains("Connection refused"), "{refused}");
        monitor.note_connected();
        assert_eq!(bench.services.shutdown.check_backings(wait_max).await, Ok(()));
        bench.shard.set_backings_fail(true);
        let refused = bench.services.shutdown.check_backings(wait_max).await.unwrap_err();
        assert!(refused.contains("disk vm: its backing could not be flushed"), "{refused}");
    });
}

/// A stop does not wait until dirty data is on a backing that does not answer: the data stays in
/// the cache, and no guest gets an error.
#[test]
fn a_stop_waits_only_seconds_for_a_backing_that_does_not_answer() {
    run(async |bench| {
        let bench = prepare(bench, LAZY).await;
        write(&bench, 0..20);
        let boot: BootId = "1".parse().unwrap();
        with_journal(&bench, |journal| journal.note_use(Some(boot)));
        let monitor = {
            let inner = bench.services.registry.inner();
            inner.disk("vm").unwrap().measure.as_ref().unwrap().monitor.clone()
        };
        bench.shard.set_backings_fail(true);
        bench.services.pools.drain("vm".into()).await.unwrap();
        // The pauses between failed attempts become long.
        tokio::time::sleep(Duration::from_secs(60)).await;
        monitor.note_outage(Duration::ZERO, "Connection refused");
        let begun = tokio::time::Instant::now();
        bench.services.shutdown.close(Ending::Plain).await;
        assert!(begun.elapsed() < Duration::from_secs(10), "{:?}", begun.elapsed());
        assert!(reason(&bench).contains("shutting down"), "{}", reason(&bench));
        assert!(with_journal(&bench, |journal| journal.used.is_none()));
        // In a cluster, other hosts wait for the requests that the backing may still execute.
        assert_eq!(release(&bench), Release::AfterSettling);
        // The second close of this daemon has nothing to do.
        bench.shard.set_backings_fail(false);
        let bench = end(bench, false, |_| {}).await;
        assert_eq!(sectors(&bench).await.1, 20);
        assert_eq!(bench.services.registry.inner().disks["vm"].wanted.flush_failures_owed, 0);
    });
}

/// `drain_on_shutdown` does not delay the end of a host by minutes because of a dead server.
#[test]
fn a_drain_at_the_end_waits_only_seconds_for_a_backing_that_is_not_connected() {
    run(async |bench| {
        let bench = prepare(bench, LAZY).await;
        write(&bench, 0..20);
        let monitor = {
            let inner = bench.services.registry.inner();
            inner.disk("vm").unwrap().measure.as_ref().unwrap().monitor.clone()
        };
        bench.shard.set_backings_fail(true);
        monitor.note_outage(Duration::ZERO, "Connection refused");
        let begun = tokio::time::Instant::now();
        bench.services.shutdown.close(Ending::Drain).await;
        assert!(begun.elapsed() < Duration::from_secs(20), "{:?}", begun.elapsed());
        assert!(!bench.services.registry.inner().disk("vm").unwrap().drained_at_end);
        bench.shard.set_backings_fail(false);
        let bench = end(bench, false, |_| {}).await;
        assert_eq!(sectors(&bench).await.1, 20, "dirty data stays in the cache");
    });
}
