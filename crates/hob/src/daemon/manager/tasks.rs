//! Changes that are under way, and the results of those that nobody waited for: `hob tasks`.
//!
//! A change is a task from its beginning. If whoever asked for it hears how it ends, it is forgotten then; otherwise its result is kept. A drain
//! is a task that nobody waits for. A failed task is a problem in health until somebody acknowledges it. Nothing of this is kept over restarts.

use std::collections::BTreeMap;
use std::sync::{Arc, MutexGuard, PoisonError};

use hob_control::{Task, TaskState};
use tokio::time::Instant;

use super::Manager;
use super::api_error::ApiError;

/// So many tasks that are done or cancelled are remembered.
const ENDED_MAX: usize = 20;

/// So many that failed and were not acknowledged.
const FAILED_MAX: usize = 100;

/// Asked for by other hosts, which ask again: nobody is to acknowledge how they end.
const UNACKNOWLEDGED: &str = "peer lend";

/// All tasks, by number.
#[derive(Debug, Default)]
pub(super) struct Tasks {
    last: u64,
    list: BTreeMap<u64, Entry>,
}

#[derive(Debug)]
struct Entry {
    what: &'static str,
    subject: String,
    began: Instant,
    ended: Option<Instant>,
    state: TaskState,
    error: Option<String>,
    /// Somebody has asked for its end.
    is_cancelled: bool,
}

/// A task that is under way. It has failed if this is dropped.
#[derive(Debug)]
pub(super) struct Running {
    manager: Arc<Manager>,
    id: u64,
    is_over: bool,
}

impl Running {
    pub(super) fn id(&self) -> u64 {
        self.id
    }

    /// Whoever asked has heard how it ended.
    pub(super) fn forget(mut self) {
        self.is_over = true;
        self.manager.tasks().list.remove(&self.id);
    }

    /// It ended, and nobody has heard how.
    pub(super) fn end(mut self, result: Result<(), String>) {
        self.is_over = true;
        self.manager.tasks().end(self.id, result);
    }

    /// Somebody stopped it.
    pub(super) fn end_cancelled(mut self) {
        self.is_over = true;
        let mut tasks = self.manager.tasks();
        if let Some(entry) = tasks.list.get_mut(&self.id) {
            entry.is_cancelled = true;
        }
        tasks.end(self.id, Err("it was stopped".to_owned()));
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        if !self.is_over {
            self.manager.tasks().end(self.id, Err("it broke off; the log says why".to_owned()));
        }
    }
}

impl Tasks {
    fn begin(&mut self, what: &'static str, subject: String) -> u64 {
        self.last += 1;
        let entry = Entry {
            what,
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
        if entry.what == UNACKNOWLEDGED {
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

    /// Forgets the oldest of these if there are more than so many.
    fn trim(&mut self, is_one: impl Fn(TaskState) -> bool, most: usize) {
        let ids: Vec<u64> =
            self.list.iter().filter(|(_, entry)| is_one(entry.state)).map(|(id, _)| *id).collect();
        for id in ids.iter().take(ids.len().saturating_sub(most)) {
            self.list.remove(id);
        }
    }

    fn find(&mut self, id: u64) -> Result<&mut Entry, ApiError> {
        self.list.get_mut(&id).ok_or_else(|| {
            ApiError::not_found(format!("there is no task {id}")).hint("'hob tasks' shows all")
        })
    }
}

impl Manager {
    fn tasks(&self) -> MutexGuard<'_, Tasks> {
        self.tasks.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Notes that a change has begun.
    pub(super) fn begin_task(self: &Arc<Self>, what: &'static str, subject: String) -> Running {
        let id = self.tasks().begin(what, subject);
        Running { manager: self.clone(), id, is_over: false }
    }

    /// Returns the tasks in progress, and those that ended after their client stopped waiting; the oldest first.
    pub(crate) fn tasks_view(&self) -> Vec<Task> {
        let now = Instant::now();
        let mut shown: Vec<Task> = {
            let tasks = self.tasks();
            let show = |(id, entry): (&u64, &Entry)| Task {
                id: *id,
                what: entry.what.to_owned(),
                subject: entry.subject.clone(),
                state: entry.state,
                age_seconds: now.duration_since(entry.began).as_secs(),
                ended_seconds_ago: entry.ended.map(|ended| now.duration_since(ended).as_secs()),
                dirty: None,
                can_cancel: false,
                error: entry.error.clone(),
            };
            tasks.list.iter().map(show).collect()
        };
        let inner = self.inner();
        for task in shown.iter_mut().filter(|task| task.state == TaskState::Running) {
            let disk = inner.disks.get(&task.subject).filter(|_| is_of_disk(&task.what));
            task.dirty = disk.and_then(|disk| disk.dirty()).filter(|dirty| dirty.draining);
            task.can_cancel = task.dirty.is_some();
        }
        shown
    }

    /// Ends a task before it is done, if it drains a disk. Others cannot be cancelled.
    pub(crate) async fn task_cancel(self: &Arc<Self>, id: u64) -> Result<Vec<Task>, ApiError> {
        let shown = self.tasks_view().into_iter().find(|task| task.id == id);
        let (what, subject) = {
            let mut tasks = self.tasks();
            let entry = tasks.find(id)?;
            if entry.state != TaskState::Running {
                return Err(ApiError::conflict(format!("task {id} has ended"))
                    .hint(format!("'hob tasks acknowledge {id}' removes it from the list")));
            }
            (entry.what, entry.subject.clone())
        };
        if !shown.is_some_and(|task| task.can_cancel) {
            return Err(ApiError::conflict(format!(
                "task {id} ({what} {subject}) cannot be cancelled: only a drain of dirty data can be stopped"
            ))
            .hint(
                "'hob tasks' shows how it ends; if a disk waits for a dead backing, 'hob disk remove --discard-dirty' does not",
            ));
        }
        self.tasks().find(id)?.is_cancelled = true;
        self.drain_stop(subject).await?;
        Ok(self.tasks_view())
    }

    /// Removes a task that has ended from the list, and its failure from health.
    pub(crate) fn task_acknowledge(&self, id: u64) -> Result<Vec<Task>, ApiError> {
        {
            let mut tasks = self.tasks();
            if tasks.find(id)?.state == TaskState::Running {
                return Err(ApiError::conflict(format!("task {id} has not ended"))
                    .hint(format!("'hob tasks' shows how far it is, 'hob tasks cancel {id}' ends a drain")));
            }
            tasks.list.remove(&id);
        }
        Ok(self.tasks_view())
    }

    /// What failed and was not acknowledged: what it concerns, and in words.
    pub(super) fn failed_tasks(&self) -> Vec<(String, String)> {
        let tasks = self.tasks();
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

/// Is the subject of such a task a disk?
fn is_of_disk(what: &str) -> bool {
    ["disk ", "cache ", "drain", "migrate", "qos "].iter().any(|kind| what.starts_with(kind))
}
