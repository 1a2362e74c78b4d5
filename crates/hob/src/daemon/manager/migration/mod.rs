//! Disks that move between hosts with their caches (docs/decisions/0013): what drives the machines of `hob_engine::migration`.
//!
//! Each migration has a task, which holds the operation guard of its disk: [`source`] here where the disk is, [`destination`] where it comes to. A task
//! takes what its machine wants to be done, lets others do it, and tells the machine how that ended. What a machine relies on after a
//! crash is in the state file before the machine hears of it ([`records`]).

mod arrival;
mod awaited;
mod calls;
mod data;
mod destination;
mod flow;
mod heard;
mod hook;
mod list;
mod orders;
mod records;
mod resume;
mod source;
mod source_acts;
mod status;
mod waiting;

use std::sync::Arc;

use hob_engine::units::Instant;
use tokio::sync::mpsc;

use super::Manager;
pub(crate) use calls::CHANGED_BYTES_MAX;
pub(crate) use destination::CallIn;
pub(crate) use hook::DataConnection;
use status::Shared;

/// A migration that is under way, or was the last of its disk.
#[derive(Debug)]
pub(super) struct Handle {
    inputs: Inputs,
    shared: Arc<Shared>,
    task: tokio::task::JoinHandle<()>,
}

#[derive(Debug)]
enum Inputs {
    Source(mpsc::UnboundedSender<source::Input>),
    Destination(mpsc::UnboundedSender<destination::Input>, Arc<hook::Doors>),
}

impl Handle {
    fn is_under_way(&self) -> bool {
        !self.task.is_finished()
    }
}

impl Manager {
    fn handles(&self) -> std::sync::MutexGuard<'_, std::collections::BTreeMap<String, Handle>> {
        self.migrations.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }

    /// Is a task at work for a disk's migration?
    pub(super) fn is_migrating(&self, name: &str) -> bool {
        self.handles().get(name).is_some_and(Handle::is_under_way)
    }

    /// Is a disk on its way to another host, and nothing of it can be dirty here?
    pub(super) fn is_drained_to_leave(&self, name: &str) -> bool {
        // What was so when a migration ended says nothing of the disk as it came back.
        self.handles().get(name).is_some_and(|handle| handle.is_under_way() && handle.shared.facts().drained)
    }

    /// Ends the tasks; what is recorded stands.
    pub(super) fn stop_migrations(&self) {
        self.handles().values().for_each(|handle| handle.task.abort());
    }
}

/// The clock of a task.
#[derive(Clone, Copy, Debug)]
struct Clock(tokio::time::Instant);

impl Clock {
    fn start() -> Clock {
        Clock(tokio::time::Instant::now())
    }

    fn now(self) -> Instant {
        Instant(self.0.elapsed().as_nanos() as u64)
    }

    /// Sleeps until then; for ever without a time.
    async fn sleep_until(self, due: Option<Instant>) {
        match due {
            Some(due) => tokio::time::sleep_until(self.0 + std::time::Duration::from_nanos(due.0)).await,
            None => std::future::pending().await,
        }
    }
}
