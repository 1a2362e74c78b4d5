//! Changes in progress, and the results of changes whose client stopped waiting: `hob tasks`.
//!
//! Every change is a task. If the client of a task receives the result, the task is removed. If no
//! client receives the result, the result is kept. The client of a drain waits only for a short
//! time, so the result of a longer drain is kept. A failed task is a health problem until an
//! operator acknowledges it, also after a restart: the state file has all failed tasks. Running,
//! completed and cancelled tasks are not saved, so the list does not have them after a restart.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};

use hob_control::{Task, TaskState};
use tokio::time::Instant;
use tracing::Instrument as _;

use super::registry::{Registry, StatePart};
use crate::api_error::{ApiError, Result, conflict, not_found};
use crate::background::{Boxed, spawn};
use crate::shard_api::{PATIENCE, in_time};
use crate::state::{FailedTask, State};

/// Maximum number of remembered tasks that completed or were cancelled.
const ENDED_MAX: usize = 20;

/// Maximum number of remembered tasks that failed and were not acknowledged.
const FAILED_MAX: usize = 100;

/// Name of tasks that other hosts request. These hosts repeat their requests, so the results of
/// these tasks need no acknowledgement.
const UNACKNOWLEDGED: &str = "peer lend";

/// All tasks of the daemon: changes in progress, and results that no client has received.
#[derive(Clone, Debug, Default)]
pub(crate) struct Tasks {
    list: Arc<Mutex<List>>,
    registry: Arc<OnceLock<Weak<Registry>>>,
}

impl StatePart for Tasks {
    fn add_to(&self, state: &mut State) {
        state.failed_tasks = self.lock().failed();
    }
}

/// Tasks by number.
#[derive(Debug, Default)]
struct List {
    last: u64,
    list: BTreeMap<u64, Entry>,
    /// True if the daemon is closing its disks, which ends the tasks in progress.
    is_closing: bool,
}

#[derive(Debug)]
struct Entry {
    what: Cow<'static, str>,
    subject: String,
    began: Instant,
    ended: Option<Instant>,
    state: TaskState,
    error: Option<String>,
    /// True if an operator has cancelled the task.
    is_cancelled: bool,
}

/// A task in progress. Dropping this value marks the task as failed.
#[derive(Debug)]
pub(super) struct Running {
    tasks: Tasks,
    id: u64,
    is_over: bool,
}

impl Running {
    pub(super) fn id(&self) -> u64 {
        self.id
    }

    /// Removes the task, because its client has received the result.
    pub(super) fn forget(mut self) {
        self.is_over = true;
        self.tasks.lock().list.remove(&self.id);
    }

    /// Records the result of a task whose client is no longer waiting.
    pub(super) fn end(mut self, result: Result<(), String>) {
        self.is_over = true;
        let is_kept = result.is_err();
        self.tasks.lock().end(self.id, result);
        if is_kept {
            self.tasks.save();
        }
    }

    pub(super) fn end_cancelled(mut self) {
        self.is_over = true;
        let mut tasks = self.tasks.lock();
        if let Some(entry) = tasks.list.get_mut(&self.id) {
            entry.is_cancelled = true;
        }
        tasks.end(self.id, Err("the task was stopped".to_owned()));
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        if !self.is_over {
            self.tasks
                .lock()
                .end(self.id, Err("the task ended unexpectedly; see the daemon's log".to_owned()));
        }
    }
}

impl List {
    fn begin(&mut self, what: &'static str, subject: String) -> u64 {
        self.last += 1;
        let entry = Entry {
            what: what.into(),
            subject,
            began: Instant::now(),
            ended: None,
            state: TaskState::Running,
            error: None,
            is_cancelled: false,
        };
        self.list.insert(self.last, entry);
        self.last
    }

    fn end(&mut self, id: u64, result: Result<(), String>) {
        let Some(entry) = self.list.get_mut(&id) else { return };
        if entry.what == UNACKNOWLEDGED || self.is_closing && result.is_err() {
            self.list.remove(&id);
            return;
        }
        entry.ended = Some(Instant::now());
        entry.state = match &result {
            Ok(()) => TaskState::Done,
            Err(_) if entry.is_cancelled => TaskState::Cancelled,
            Err(_) => TaskState::Failed,
        };
        entry.error = result.err();
        self.trim(|state| state == TaskState::Failed, FAILED_MAX);
        self.trim(|state| matches!(state, TaskState::Done | TaskState::Cancelled), ENDED_MAX);
    }

    /// Removes the oldest of the tasks for whose state `is_one` returns true, so that at most
    /// `most` of these tasks remain.
    fn trim(&mut self, is_one: impl Fn(TaskState) -> bool, most: usize) {
        let ids: Vec<u64> =
            self.list.iter().filter(|(_, entry)| is_one(entry.state)).map(|(id, _)| *id).collect();
        for id in ids.iter().take(ids.len().saturating_sub(most)) {
            self.list.remove(id);
        }
    }

    /// Returns the failed tasks for the state file.
    pub(super) fn failed(&self) -> Vec<FailedTask> {
        let failed = self.list.values().filter(|entry| entry.state == TaskState::Failed);
        let keep = |entry: &Entry| FailedTask {
            what: entry.what.to_string(),
            subject: entry.subject.clone(),
            error: entry.error.clone().unwrap_or_default(),
        };
        failed.map(keep).collect()
    }

    /// Restores failed tasks of an earlier process.
    pub(super) fn restore(&mut self, failed: &[FailedTask]) {
        for task in failed.iter().take(FAILED_MAX) {
            let id = self.begin("", task.subject.clone());
            let entry = self.list.get_mut(&id).expect("it has just begun");
            entry.what = task.what.clone().into();
            self.end(id, Err(task.error.clone()));
        }
    }

    fn find(&mut self, id: u64) -> Result<&mut Entry> {
        self.list
            .get_mut(&id)
            .ok_or_else(|| not_found!("there is no task {id}").hint("'hob tasks' shows all"))
    }
}

impl Tasks {
    /// Sets the registry that saves failed tasks. Later calls have no effect.
    pub(super) fn connect(&self, registry: &Arc<Registry>) {
        let _ = self.registry.set(Arc::downgrade(registry));
    }

    /// Restores failed tasks of an earlier process.
    pub(super) fn restore(&self, failed: &[FailedTask]) {
        self.lock().restore(failed);
    }

    /// Saves the failed tasks in the background.
    fn save(&self) {
        let Some(registry) = self.registry.get().and_then(Weak::upgrade) else { return };
        spawn(async move {
            if let Err(error) = registry.save().await {
                tracing::error!("{error}");
            }
        });
    }

    fn lock(&self) -> MutexGuard<'_, List> {
        self.list.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Records that the daemon is closing its disks. If a task fails from now on, the cause is the
    /// end of the daemon. So the failure is not recorded.
    pub(super) fn close(&self) {
        self.lock().is_closing = true;
    }

    /// Returns true if the daemon is closing its disks.
    pub(super) fn is_closing(&self) -> bool {
        self.lock().is_closing
    }

    /// Registers the start of a change.
    pub(super) fn begin(&self, what: &'static str, subject: String) -> Running {
        let id = self.lock().begin(what, subject);
        Running { tasks: self.clone(), id, is_over: false }
    }

    /// Runs a change to its end as a task, and returns its result. If the change takes longer than
    /// [`PATIENCE`], returns an error; the change continues, and the task keeps the result.
    pub(super) fn run<T: Send + 'static>(
        &self,
        what: &'static str,
        subject: String,
        change: impl Future<Output = Result<T>> + Send + 'static,
    ) -> impl Future<Output = Result<T>> + Send {
        self.run_boxed(what, subject, Box::pin(change))
    }

    async fn run_boxed<T: Send + 'static>(
        &self,
        what: &'static str,
        subject: String,
        change: Boxed<Result<T>>,
    ) -> Result<T> {
        let (done, result) = tokio::sync::oneshot::channel();
        let task = self.begin(what, subject);
        let id = task.id();
        let run = async move {
            let result = change.await;
            match done.send(result) {
                Ok(()) => task.forget(),
                Err(Ok(_)) => task.end(Ok(())),
                Err(Err(error)) => {
                    tracing::warn!("task {id} failed after its client stopped waiting: {error}");
                    task.end(Err(error.to_string()));
                }
            }
        };
        // Log lines of the change keep the id of the request that caused it.
        spawn(run.in_current_span());
        match in_time(PATIENCE, result).await {
            Some(Ok(result)) => result,
            Some(Err(_)) => Err(ApiError::failed("the change ended unexpectedly; see the daemon's log")),
            None => Err(ApiError::busy(format!("the change is not finished after {} s", PATIENCE.as_secs()))
                .hint(format!(
                    "the change continues in the background as task {id}; 'hob tasks' shows its \
                progress and result"
                ))),
        }
    }

    /// Returns the tasks in progress, and those that ended after their client stopped waiting; the
    /// oldest first.
    pub(super) fn all(&self) -> Vec<Task> {
        let now = Instant::now();
        let show = |(id, entry): (&u64, &Entry)| Task {
            id: *id,
            what: entry.what.to_string(),
            subject: entry.subject.clone(),
            state: entry.state,
            age_seconds: now.duration_since(entry.began).as_secs(),
            ended_seconds_ago: entry.ended.map(|ended| now.duration_since(ended).as_secs()),
            dirty: None,
            waits_for: None,
            can_cancel: false,
            error: entry.error.clone(),
        };
        self.lock().list.iter().map(show).collect()
    }

    /// Returns the operation and the subject of a task in progress.
    pub(super) fn running(&self, id: u64) -> Result<(String, String)> {
        let mut tasks = self.lock();
        let entry = tasks.find(id)?;
        if entry.state != TaskState::Running {
            return Err(conflict!("task {id} has ended")
                .hint(format!("'hob tasks acknowledge {id}' removes it from the list")));
        }
        Ok((entry.what.to_string(), entry.subject.clone()))
    }

    /// Records that a task ends because it was cancelled.
    pub(super) fn cancel(&self, id: u64) -> Result<()> {
        self.lock().find(id)?.is_cancelled = true;
        Ok(())
    }

    /// Removes a task that has ended from the list, and its failure from health.
    pub(super) fn acknowledge(&self, id: u64) -> Result<()> {
        let mut tasks = self.lock();
        if tasks.find(id)?.state == TaskState::Running {
            return Err(conflict!("task {id} has not ended")
                .hint(format!("'hob tasks' shows the progress, 'hob tasks cancel {id}' stops a drain")));
        }
        tasks.list.remove(&id);
        drop(tasks);
        self.save();
        Ok(())
    }

    /// Returns the subjects and descriptions of failed tasks that were not acknowledged.
    pub(super) fn failed(&self) -> Vec<(String, String)> {
        let tasks = self.lock();
        let failed = tasks.list.iter().filter(|(_, entry)| entry.state == TaskState::Failed);
        let say = |(id, entry): (&u64, &Entry)| {
            let why = entry.error.as_deref().unwrap_or_default();
            let reason = format!(
                "task {id} ({}) failed: {why}; 'hob tasks acknowledge {id}' removes this problem",
                entry.what
            );
            (entry.subject.clone(), reason)
        };
        failed.map(say).collect()
    }
}
