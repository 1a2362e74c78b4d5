//! Changes that continue in the background: their list, their cancellation, and the health problem
//! of a failed change until an operator acknowledges the failure.

use std::time::Duration;

use hob_control::{ProblemKind, Task, TaskState};

use super::super::registry::StatePart as _;
use super::*;
use crate::api_error::ApiError;
use crate::shard_api::{PATIENCE, in_time};
use crate::state::State;

const BLOCK: u64 = 4096;

/// Prepares a disk with dirty data whose backing fails every write.
async fn stuck(bench: &Bench) {
    bench.pool(&["a"], 8).await;
    bench.disk("vm").await;
    let lazy: CachePatch = serde_json::from_str(r#"{"mode":"write-back","dirty_age_max":0}"#).unwrap();
    let enable = CacheEnable { settings: lazy.settings, ..cache_of(2) };
    bench.services.pools.cache_enable("vm".into(), enable).await.unwrap();
    let id = bench.services.registry.inner().disks["vm"].id;
    bench.shard.write(id, 3 * BLOCK, BLOCK).unwrap();
    bench.shard.set_backings_fail(true);
}

fn tasks(bench: &Bench) -> Vec<(String, String, TaskState, bool)> {
    let show = |task: Task| (task.what, task.subject, task.state, task.can_cancel);
    bench.services.pools.tasks_view().into_iter().map(show).collect()
}

fn is(what: &str, state: TaskState, can_cancel: bool) -> (String, String, TaskState, bool) {
    (what.to_owned(), "vm".to_owned(), state, can_cancel)
}

/// Returns the problems in health that come from tasks.
async fn failures(bench: &Bench) -> Vec<(String, String)> {
    let problems = bench.services.observe.health().await.problems.into_iter();
    let failed = problems.filter(|problem| problem.kind == ProblemKind::TaskFailed);
    failed.map(|problem| (problem.subject, problem.reason)).collect()
}

async fn look(bench: &Bench) {
    bench.services.pools.look_at_dirty();
    tokio::time::sleep(Duration::from_millis(500)).await;
}

/// The whole daemon pauses, as in a suspended VM or on a host without a free processor.
#[tokio::test(start_paused = true)]
async fn a_pause_of_the_whole_daemon_is_not_silence() {
    let (answer, result) = tokio::sync::oneshot::channel();
    let waiting = tokio::spawn(in_time(PATIENCE, result));
    tokio::task::yield_now().await;
    tokio::time::advance(6 * PATIENCE).await;
    answer.send(7).unwrap();
    assert_eq!(waiting.await.unwrap(), Some(Ok(7)));
    let (_answer, silent) = tokio::sync::oneshot::channel::<()>();
    let start = tokio::time::Instant::now();
    assert_eq!(in_time(PATIENCE, silent).await, None);
    assert!(start.elapsed() >= PATIENCE);
}

#[test]
fn a_change_whose_asker_hears_how_it_ends_leaves_no_task() {
    run(async |bench| {
        bench.disk("vm").await;
        assert!(bench.services.disks.disk_remove("none".into(), OnDirty::Drain).await.is_err());
        bench.services.disks.disk_remove("vm".into(), OnDirty::Drain).await.unwrap();
        assert_eq!(tasks(&bench), []);
    });
}

#[test]
fn a_removal_that_drains_to_a_failing_backing_is_a_task_that_can_be_cancelled() {
    run(async |bench| {
        stuck(&bench).await;
        let error = bench.services.disks.disk_remove("vm".into(), OnDirty::Drain).await.unwrap_err();
        assert!(error.to_string().contains("as task "), "{error}");
        look(&bench).await;
        assert_eq!(tasks(&bench), [is("disk remove", TaskState::Running, true)]);
        let task = bench.services.pools.tasks_view().remove(0);
        assert_eq!(task.dirty.map(|dirty| dirty.size), Some(Size(BLOCK)));
        assert!(bench.services.pools.task_acknowledge(task.id).is_err(), "it has not ended");
        bench.services.pools.task_cancel(task.id).await.unwrap();
        tokio::time::sleep(Duration::from_secs(1)).await;
        assert_eq!(tasks(&bench), [is("disk remove", TaskState::Cancelled, false)]);
        assert_eq!(failures(&bench).await, [], "it was asked for");
        assert!(bench.services.pools.task_cancel(task.id).await.is_err(), "it has ended");
        bench.services.pools.task_acknowledge(task.id).unwrap();
        assert_eq!(tasks(&bench), []);
        assert_eq!(bench.services.observe.disk("vm").unwrap().state, DiskLife::Online);
    });
}

#[test]
fn a_shrink_that_waits_for_a_failing_backing_is_a_task_that_can_be_cancelled() {
    for by_drain_stop in [false, true] {
        run(async |bench| {
            bench.pool(&["a"], 8).await;
            bench.disk("vm").await;
            let lazy = r#"{"mode":"write-back","dirty_age_max":0,"dirty_start":65,"dirty_stop":60}"#;
            bench.cache_with("vm", 4, lazy).await.unwrap();
            let id = bench.services.registry.inner().disks["vm"].id;
            (0..100).for_each(|block| bench.shard.write(id, block * BLOCK, BLOCK).unwrap());
            bench.shard.set_backings_fail(true);
            let error = bench.resize("vm", 2).await.unwrap_err();
            assert!(error.to_string().contains("as task "), "{error}");
            look(&bench).await;
            assert_eq!(tasks(&bench), [is("cache set", TaskState::Running, true)]);
            let task = bench.services.pools.tasks_view().remove(0);
            assert!(task.dirty.is_some_and(|dirty| dirty.size > Size(0)), "its progress");
            if by_drain_stop {
                bench.services.pools.drain_stop("vm".into()).await.unwrap();
            } else {
                bench.services.pools.task_cancel(task.id).await.unwrap();
            }
            tokio::time::sleep(Duration::from_secs(1)).await;
            assert_eq!(tasks(&bench), [is("cache set", TaskState::Cancelled, false)]);
            assert_eq!(failures(&bench).await, [], "it was asked for");
            assert_eq!(bench.room("vm"), 4, "nothing was changed");
        });
    }
}

#[test]
fn a_drain_is_a_task_that_ends_with_it() {
    run(async |bench| {
        stuck(&bench).await;
        bench.services.pools.drain("vm".into()).await.unwrap();
        assert_eq!(tasks(&bench), [is("drain", TaskState::Running, true)]);
        // A change that discards dirty data does not wait for the drain.
        bench.services.disks.discard_dirty("vm".into()).await.unwrap();
        assert_eq!(tasks(&bench), [is("drain", TaskState::Cancelled, false)]);
    });
}

#[test]
fn a_change_that_fails_unheard_is_a_problem_until_it_is_acknowledged() {
    run(async |bench| {
        bench.disk("vm").await;
        let fails = async {
            tokio::time::sleep(Duration::from_secs(60)).await;
            Err::<(), ApiError>(ApiError::failed("no luck"))
        };
        let asked = bench.services.tasks.run("disk resize", "vm".to_owned(), fails).await;
        assert!(asked.is_err());
        assert_eq!(tasks(&bench), [is("disk resize", TaskState::Running, false)]);
        let id = bench.services.pools.tasks_view()[0].id;
        let error = bench.services.pools.task_cancel(id).await.unwrap_err();
        assert!(error.to_string().contains("cannot be cancelled"), "{error}");
        assert_eq!(failures(&bench).await, []);
        tokio::time::sleep(Duration::from_secs(60)).await;
        assert_eq!(tasks(&bench), [is("disk resize", TaskState::Failed, false)]);
        let [(subject, reason)] = &failures(&bench).await[..] else { panic!("one problem") };
        assert_eq!(subject, "vm");
        assert!(reason.contains("no luck") && reason.contains("hob tasks acknowledge"), "{reason}");
        bench.services.pools.task_acknowledge(id).unwrap();
        assert_eq!((tasks(&bench).len(), failures(&bench).await.len()), (0, 0));
    });
}

#[test]
fn a_change_that_breaks_off_has_failed_and_only_so_many_results_are_kept() {
    run(async |bench| {
        drop(bench.services.tasks.begin("disk set", "vm".to_owned()));
        assert_eq!(tasks(&bench), [is("disk set", TaskState::Failed, false)]);
        for _ in 0..30 {
            bench.services.tasks.begin("disk set", "vm".to_owned()).end(Ok(()));
        }
        let kept = tasks(&bench);
        assert_eq!(kept.iter().filter(|task| task.2 == TaskState::Done).count(), 20);
        assert_eq!(kept.len(), 21, "the failure stays");
    });
}

#[test]
fn failures_are_listed_after_a_restart_until_they_are_acknowledged() {
    run(async |bench| {
        bench.services.tasks.begin("disk resize", "vm".to_owned()).end(Err("no luck".to_owned()));
        bench.services.tasks.begin("disk set", "vm".to_owned()).end(Ok(()));
        let mut kept = State::default();
        bench.services.tasks.add_to(&mut kept);
        assert_eq!(kept.failed_tasks.len(), 1);
        let (services, _shard) = super::services(Store::Memory);
        services.tasks.restore(&kept.failed_tasks);
        let [task] = &services.pools.tasks_view()[..] else { panic!("one task") };
        assert_eq!((task.what.as_str(), task.state), ("disk resize", TaskState::Failed));
        let problems = services.observe.health().await.problems;
        assert!(problems.iter().any(|problem| problem.reason.contains("no luck")), "{problems:?}");
        services.pools.task_acknowledge(task.id).unwrap();
        assert!(services.tasks.failed().is_empty());
    });
}

#[test]
fn a_drain_that_ends_with_the_daemon_is_no_failure() {
    run(async |bench| {
        stuck(&bench).await;
        bench.services.pools.drain("vm".into()).await.unwrap();
        assert_eq!(tasks(&bench), [is("drain", TaskState::Running, true)]);
        bench.services.shutdown.close(Ending::Plain).await;
        tokio::time::sleep(Duration::from_secs(1)).await;
        let mut kept = State::default();
        bench.services.tasks.add_to(&mut kept);
        assert_eq!(kept.failed_tasks.len(), 0, "{:?}", tasks(&bench));
    });
}
