//! Changes that continue in the background.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::Dirty;

/// A change that is under way, or that ended after its request was answered.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Task {
    /// Its number; not used again before the daemon restarts.
    pub id: u64,
    /// The command: `disk remove`, `drain`.
    pub what: String,
    /// The subject of the change: the name of a disk, a pool or the like; empty if it concerns the whole daemon.
    pub subject: String,
    /// How far it is.
    pub state: TaskState,
    /// Seconds since it began.
    pub age_seconds: u64,
    /// Seconds since it ended; absent while it runs.
    pub ended_seconds_ago: Option<u64>,
    /// Dirty data that it still has to destage; absent unless it drains a disk.
    pub dirty: Option<Dirty>,
    /// It can be cancelled: it drains a disk.
    pub can_cancel: bool,
    /// Why it failed, or was cancelled.
    pub error: Option<String>,
}

/// How far a task is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum TaskState {
    /// It is under way.
    Running,
    /// It succeeded.
    Done,
    /// It failed; health has it until it is acknowledged.
    Failed,
    /// Somebody stopped it.
    Cancelled,
}
