//! Disks that arrive from another host, through that host's calls.

use std::time::Duration;

use hob_control::{
    Arrival, BitmapAdd, BitmapRotate, CallAnswer, CallRefusal, CarryMode, CarrySession, MigrationStart,
    Switch,
};
use hob_engine::migration::{Record, Session};

use super::recovery::write;
use super::*;
use crate::api_error::ApiError;
use crate::state::{RecordSpec, ShareSpec};

const LINEAGE: &str = "0123456789abcdef0123456789abcdef";

/// Granularity of the bitmaps, bytes.
const GRANULE: u64 = 64 << 10;

/// The record of a disk that has arrived, in the session that [`Bench::arrive`] names.
const OWNER: Record = Record::Owner { generation: 1, attempts: 0 };

/// Prepares a bench whose daemon has a state directory and the backing of another host's disk `vm`.
async fn prepare(bench: Bench) -> Bench {
    let bench = bench.with_state();
    bench.image("vm.img", 64);
    std::fs::create_dir(bench.sockets()).unwrap();
    bench.may_carry();
    bench
}

/// Kills and restarts the daemon. Does not wait for the incoming disks, because an operation is in
/// progress on them until they arrive.
async fn crash(bench: Bench) -> Bench {
    let Bench { dir, services, shard } = bench;
    services.migrations.stop();
    shard.stop();
    drop(services);
    let (services, shard) = restart_early(&dir.path().join("state"), "", false).await;
    Bench { dir, services, shard }
}

impl Bench {
    fn may_carry(&self) {
        self.services.set_migration_transport(MigrationTransport { tls: None, directory: self.sockets() });
    }

    fn sockets(&self) -> PathBuf {
        self.dir.path().join("sockets")
    }

    fn arrival(&self) -> Arrival {
        Arrival {
            from: "other".into(),
            backing: self.path("vm.img"),
            size_bytes: 64 * MIB,
            mode: CarryMode::Drop,
            ..Arrival::default()
        }
    }

    async fn called(&self, generation: u64, attempt: u32, call: CallIn) -> CallAnswer {
        let session = CarrySession { generation, attempt, lineage: LINEAGE.into() };
        self.services.migrations.call_in("vm".into(), session, call).await.unwrap()
    }

    async fn arrive(&self, arrival: Arrival) -> CallAnswer {
        self.called(0, 1, CallIn::Arrive(Box::new(arrival))).await
    }

    async fn rotate(&self, frozen: &str) {
        let rotate = BitmapRotate { frozen: frozen.into() };
        self.services.exports.bitmap_rotate("vm".into(), "daily".into(), rotate).await.unwrap();
    }

    /// Returns the size of the bitmap's changes, and the reason if everything counts as changed.
    async fn bitmap(&self, name: &str) -> (Option<Size>, Option<String>) {
        let all = self.services.exports.bitmaps("vm".into()).await.unwrap().bitmaps;
        let found = all.into_iter().find(|bitmap| bitmap.name == name).unwrap();
        (found.dirty, found.everything_because)
    }

    /// Makes the disk arrive.
    async fn take(&self) {
        let answer = self.called(0, 1, CallIn::Yours(None)).await;
        assert_eq!(answer.refused, None);
        assert_eq!(self.services.registry.record_of("vm"), Some(OWNER));
    }
}

fn why(answer: &CallAnswer) -> &str {
    match &answer.refused {
        Some(CallRefusal::Failed { why }) => why,
        other => panic!("not a failure: {other:?}"),
    }
}

#[test]
fn a_disk_that_is_served_and_not_on_record_yet_is_recorded_by_the_next_call() {
    run(async |bench| {
        let bench = prepare(bench).await;
        assert_eq!(bench.arrive(bench.arrival()).await.refused, None);
        bench.shard.set_backings_fail(true);
        let answer = bench.called(0, 1, CallIn::Yours(None)).await;
        assert!(why(&answer).contains("the engine refused"), "{answer:?}");
        let awaited = Record::Awaiting(Session { generation: 0, attempt: 1 });
        assert_eq!(bench.services.registry.record_of("vm"), Some(awaited));
        bench.shard.set_backings_fail(false);
        bench.take().await;
    });
}

/// A daemon that ends still answers on open connections. An answer from the record of an awaited
/// disk would make the source cancel the migration, and the next daemon would await the disk forever.
#[test]
fn a_daemon_that_ends_answers_no_call_about_a_disk_that_it_awaits() {
    run(async |bench| {
        let bench = prepare(bench).await;
        assert_eq!(bench.arrive(bench.arrival()).await.refused, None);
        bench.services.migrations.stop();
        for call in [CallIn::Changed(Vec::new()), CallIn::Look, CallIn::Cancel] {
            let session = CarrySession { generation: 0, attempt: 1, lineage: LINEAGE.into() };
            let answer = bench.services.migrations.call_in("vm".into(), session, call).await;
            assert!(answer.is_err_and(|error| error.kind == ErrorKind::Busy), "the source tries again");
        }
        let bench = crash(bench).await;
        let awaited = Record::Awaiting(Session { generation: 0, attempt: 1 });
        assert_eq!(bench.services.registry.record_of("vm"), Some(awaited));
    });
}

/// A disk is awaited without a task for a moment, for example while the daemon starts or ends.
#[test]
fn a_call_about_an_awaited_disk_without_a_task_is_not_answered_from_the_record() {
    run(async |bench| {
        let bench = prepare(bench).await;
        assert_eq!(bench.arrive(bench.arrival()).await.refused, None);
        bench.services.migrations.abort_tasks();
        while bench.services.migrations.is_migrating("vm") {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        for call in [CallIn::Changed(Vec::new()), CallIn::Look, CallIn::Yours(None), CallIn::Cancel] {
            let session = CarrySession { generation: 0, attempt: 1, lineage: LINEAGE.into() };
            let answer = bench.services.migrations.call_in("vm".into(), session, call).await;
            assert!(answer.is_err_and(|error| error.kind == ErrorKind::Busy), "the source tries again");
        }
    });
}

/// The source asks before it drains the disk.
#[test]
fn a_name_of_another_disk_is_refused_before_the_migration_begins() {
    run(async |bench| {
        let bench = prepare(bench).await;
        let look = bench.called(0, 1, CallIn::Look).await;
        assert_eq!(look.refused, Some(CallRefusal::NotAwaited));
        bench.disk("vm").await;
        for is_online in [true, false] {
            if !is_online {
                bench.services.disks.take_offline("vm", &ApiError::failed("a test took it offline")).await;
            }
            match bench.called(0, 1, CallIn::Look).await.refused {
                Some(CallRefusal::Never { why }) => assert!(why.contains("another disk named vm"), "{why}"),
                other => panic!("{other:?}"),
            }
        }
    });
}

/// A refused command does not stop the pull of the cached data of the migration before, whose task
/// and progress are one entry.
#[test]
fn a_refused_migration_leaves_the_migration_before_as_it_is() {
    run(async |bench| {
        let bench = prepare(bench).await;
        assert_eq!(bench.arrive(bench.arrival()).await.refused, None);
        bench.take().await;
        for _ in 0..600 {
            if bench.services.registry.inner().disk("vm").unwrap().busy.is_none() {
                break;
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        let start = MigrationStart {
            to: "127.0.0.1:1".into(),
            cache: CarryMode::Drop,
            bandwidth: Some(Size(1)),
            switch: Switch::default(),
            backing: None,
            pool: None,
            vhost_user: None,
            fuse: None,
        };
        let error = bench.services.migrations.migrate("vm".into(), start).await.unwrap_err().to_string();
        assert!(error.contains("at least 512K"), "{error}");
        assert!(bench.services.migrations.migration("vm").is_ok());
    });
}

#[test]
fn a_disk_that_was_given_up_before_anybody_called_leaves_its_name_free() {
    run(async |bench| {
        let bench = prepare(bench).await;
        assert_eq!(bench.arrive(bench.arrival()).await.refused, None);
        let bench = crash(bench).await;
        bench.services.disks.disk_remove("vm".into(), OnDirty::Drain).await.unwrap();
        while bench.services.observe.disk("vm").is_ok() {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        bench.disk("vm").await;
        let disk = bench.services.observe.disk("vm").unwrap();
        assert_eq!((disk.state, disk.migration), (DiskLife::Online, None));
    });
}

#[test]
fn a_disk_that_was_given_up_and_is_handed_over_nevertheless_is_taken() {
    run(async |bench| {
        let bench = prepare(bench).await;
        assert_eq!(bench.arrive(bench.arrival()).await.refused, None);
        bench.services.disks.disk_remove("vm".into(), OnDirty::Drain).await.unwrap();
        // Until this is recorded: calls of the source are answered by the attempt that gives the
        // disk up.
        while bench.services.observe.disk("vm").is_ok() || bench.services.migrations.is_migrating("vm") {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        // An older host does not send the identity of the disk.
        let answer = bench.called(0, 1, CallIn::Yours(None)).await;
        assert_eq!(answer.refused, Some(CallRefusal::NotAwaited));
        // Calls of another attempt are refused, too.
        let yours = || CallIn::Yours(Some(Box::new(bench.arrival())));
        assert_eq!(bench.called(0, 2, yours()).await.refused, Some(CallRefusal::NotAwaited));
        assert_eq!(bench.called(0, 1, yours()).await.refused, None);
        assert_eq!(bench.services.registry.record_of("vm"), Some(OWNER));
        assert_eq!(bench.services.observe.disk("vm").unwrap().state, DiskLife::Online);
    });
}

#[test]
fn what_cannot_be_done_for_a_disk_that_was_given_up_may_be_done_later() {
    run(async |bench| {
        let bench = prepare(bench).await;
        assert_eq!(bench.arrive(bench.arrival()).await.refused, None);
        assert_eq!(bench.called(0, 1, CallIn::Cancel).await.refused, None);
        let nowhere = Arrival { backing: String::new(), ..bench.arrival() };
        let answer = bench.called(0, 1, CallIn::Yours(Some(Box::new(nowhere)))).await;
        assert!(why(&answer).contains("needs a backing"), "{answer:?}");
        let answer = bench.called(0, 1, CallIn::Yours(Some(Box::new(bench.arrival())))).await;
        assert_eq!(answer.refused, None);
    });
}

#[test]
fn a_disk_whose_opening_was_interrupted_is_opened_again() {
    run(async |bench| {
        let bench = prepare(bench).await;
        // Writes that its earlier process may have acknowledged cannot be flushed.
        bench.shard.set_backings_fail(true);
        let answer = bench.arrive(bench.arrival()).await;
        assert!(why(&answer).contains("the engine refused"), "{answer:?}");
        bench.shard.set_backings_fail(false);
        assert_eq!(bench.arrive(bench.arrival()).await.refused, None);
        assert!(bench.services.exports.table().get("vm").is_some());
        bench.take().await;
    });
}

#[test]
fn a_disk_that_cannot_be_read_at_its_owner_is_not_ready() {
    run(async |bench| {
        let bench = prepare(bench).await;
        std::fs::remove_dir(bench.sockets()).unwrap();
        for _ in 0..2 {
            let answer = bench.arrive(bench.arrival()).await;
            assert!(why(&answer).contains("no socket at"), "{answer:?}");
        }
        std::fs::create_dir(bench.sockets()).unwrap();
        assert_eq!(bench.arrive(bench.arrival()).await.refused, None);
        assert!(bench.services.exports.table().get("vm").is_some());
        bench.take().await;
    });
}

#[test]
fn a_disk_that_comes_back_finds_what_stayed() {
    run(async |bench| {
        let bench = prepare(bench).await;
        assert_eq!(bench.arrive(bench.arrival()).await.refused, None);
        bench.take().await;
        let add = BitmapAdd { name: "daily".into(), granularity: None };
        bench.services.exports.bitmap_add("vm".into(), add).await.unwrap();
        write(&bench, 0..1);
        bench.rotate("monday").await;
        let share = ShareSpec { cache: Some(Size(MIB)), disk: None };
        let away = RecordSpec::Away { generation: 1, attempt: 1, taken: true };
        {
            let mut inner = bench.services.registry.inner();
            let wanted = &mut inner.disk_mut("vm").unwrap().wanted;
            wanted.share_parent = Some(share.clone());
            wanted.migration.as_mut().unwrap().record = away;
        }
        bench.services.registry.save().await.unwrap();
        let bench = crash(bench).await;
        assert_eq!(bench.services.observe.disk("vm").unwrap().state, DiskLife::Away);

        let arrival = CallIn::Arrive(Box::new(bench.arrival()));
        assert_eq!(bench.called(2, 1, arrival).await.refused, None);
        assert_eq!(bench.called(2, 1, CallIn::Yours(None)).await.refused, None);
        assert_eq!(bench.services.registry.inner().disk("vm").unwrap().wanted.share_parent, Some(share));
        let all = Size(64 * MIB);
        let because = Some("another host owned the disk".to_owned());
        assert_eq!(bench.bitmap("daily").await, (Some(all), because.clone()));
        assert_eq!(bench.bitmap("monday").await, (Some(Size(GRANULE)), None));
        write(&bench, 0..1);
        bench.rotate("tuesday").await;
        assert_eq!(bench.bitmap("tuesday").await, (Some(all), because));
        write(&bench, 40..41);
        assert_eq!(bench.bitmap("daily").await, (Some(Size(GRANULE)), None));
    });
}

#[test]
fn a_disk_that_does_not_come_leaves_no_bitmaps() {
    run(async |bench| {
        let bench = prepare(bench).await;
        assert_eq!(bench.arrive(bench.arrival()).await.refused, None);
        bench.take().await;
        let add = BitmapAdd { name: "daily".into(), granularity: None };
        bench.services.exports.bitmap_add("vm".into(), add).await.unwrap();
        bench.rotate("monday").await;
        let files = bench.dir.path().join("state/bitmaps/vm");
        assert!(files.join("monday").exists());
        let away = RecordSpec::Away { generation: 1, attempt: 1, taken: true };
        bench.services.registry.inner().disk_mut("vm").unwrap().wanted.migration.as_mut().unwrap().record =
            away;
        bench.services.registry.save().await.unwrap();
        let bench = crash(bench).await;
        let arrival = CallIn::Arrive(Box::new(bench.arrival()));
        assert_eq!(bench.called(2, 1, arrival).await.refused, None);
        assert_eq!(bench.called(2, 1, CallIn::Cancel).await.refused, None);
        assert!(bench.services.observe.disk("vm").is_err() && !files.exists());
    });
}

/// Between the record of the source and the confirmation of the destination, no host may serve the
/// disk.
#[test]
fn a_disk_whose_new_host_has_not_confirmed_it_is_not_reported_as_being_there() {
    run(async |bench| {
        let mut bench = prepare(bench).await;
        assert_eq!(bench.arrive(bench.arrival()).await.refused, None);
        bench.take().await;
        for (taken, why) in [(false, "handed over to other, which has not"), (true, "the disk is on other")] {
            {
                let mut inner = bench.services.registry.inner();
                let spec = inner.disk_mut("vm").unwrap().wanted.migration.as_mut().unwrap();
                (spec.peer, spec.record) =
                    ("other".into(), RecordSpec::Away { generation: 1, attempt: 1, taken });
            }
            bench.services.registry.save().await.unwrap();
            bench = crash(bench).await;
            for _ in 0..2 {
                let disk = bench.services.observe.disk("vm").unwrap();
                assert_eq!(disk.state, DiskLife::Away);
                assert!(disk.reason.as_ref().is_some_and(|reason| reason.contains(why)), "{disk:?}");
                // Meanwhile the daemon frees the disk's segments.
                tokio::time::sleep(Duration::from_secs(5)).await;
            }
        }
    });
}

/// Returns the state in which the disk waited for its cluster.
fn waited(bench: &Bench) -> DiskState {
    DiskState::new("vm".into(), bench.path("vm.img"), false)
}

#[test]
fn a_disk_that_gave_way_waits_again_after_a_restart() {
    run(async |bench| {
        let bench = prepare(bench).await;
        assert_eq!(bench.arrive(bench.arrival()).await.refused, None);
        bench.services.registry.inner().waited.insert("vm".into(), waited(&bench));
        bench.services.registry.save().await.unwrap();
        let bench = crash(bench).await;
        assert_eq!(bench.services.observe.disk("vm").unwrap().state, DiskLife::Awaited);
        assert_eq!(bench.called(0, 1, CallIn::Cancel).await.refused, None);
        let inner = bench.services.registry.inner();
        assert!(inner.disk("vm").unwrap().waits_for_cluster() && inner.waited.is_empty());
    });
}

#[test]
fn a_disk_that_gave_way_to_one_that_came_does_not_wait_any_more() {
    run(async |bench| {
        let bench = prepare(bench).await;
        assert_eq!(bench.arrive(bench.arrival()).await.refused, None);
        bench.services.registry.inner().waited.insert("vm".into(), waited(&bench));
        bench.take().await;
        assert!(bench.services.registry.inner().waited.is_empty());
    });
}

#[test]
fn the_number_of_guests_that_were_not_told_of_a_failed_flush_moves_with_the_disk() {
    run(async |bench| {
        let bench = prepare(bench).await;
        let arrival = Arrival { flush_failures_owed: 2, ..bench.arrival() };
        assert_eq!(bench.arrive(arrival).await.refused, None);
        bench.take().await;
        assert_eq!(bench.services.registry.inner().disks["vm"].wanted.flush_failures_owed, 2);
    });
}
