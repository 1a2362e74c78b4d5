//! API types for changes that continue in the background.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::Dirty;

/// A change that is in progress, or a change that ended after the daemon had answered its request.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Task {
    /// Number of the task. The number is unique until the daemon restarts.
    pub id: u64,
    /// The command: `disk remove`, `drain`.
    pub what: String,
    /// Subject of the task, such as the name of a disk or pool; empty if it concerns the whole
    /// daemon.
    pub subject: String,
    /// State of the task.
    pub state: TaskState,
    /// Seconds since the task began.
    pub age_seconds: u64,
    /// Seconds since the task ended; absent while it runs.
    pub ended_seconds_ago: Option<u64>,
    /// Dirty data that the task still has to destage. Absent unless the task drains a disk.
    pub dirty: Option<Dirty>,
    /// What the running task waits for, if hob knows it: for example a flash device that does not
    /// answer.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub waits_for: Option<String>,
    /// Whether the task can be cancelled. Only drains, changes that wait for a drain, and caches that
    /// shrink can.
    pub can_cancel: bool,
    /// Why the task failed or was cancelled.
    pub error: Option<String>,
}

/// State of a background task.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum TaskState {
    /// The task is in progress.
    Running,
    /// The task succeeded.
    Done,
    /// The task failed. `hob health` shows the failure until an operator acknowledges it.
    Failed,
    /// An operator or a client of the API stopped the task.
    Cancelled,
}
