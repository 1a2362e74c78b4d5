//! Migration of disks with their caches between hosts (docs/decisions/0013). This module executes
//! the state machines of `hob_engine::migration`.
//!
//! Each migration has a task that holds the operation guard of its disk. The task of the host that
//! has the disk is in [`source`]. The task of the host that gets the disk is in [`destination`]. A
//! task executes the actions that its state machine requests, and passes their results to the state
//! machine. State that the state machine needs after a crash is saved in the state file before the
//! state machine continues ([`records`]).

mod arrival;
mod calls;
mod data;
mod data_socket;
mod destination;
mod flow;
mod incoming;
mod list;
mod orders;
mod received_calls;
mod records;
mod resume;
mod source;
mod source_actions;
mod status;
mod waiting;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use hob_engine::units::Instant;
use tokio::sync::mpsc;

use super::disks::Disks;
use super::exports::ExportService;
use super::observe::Observe;
use super::ownership::Ownership;
use super::peer_access::PeerAccess;
use super::pools::Pools;
use super::qos::QosService;
use super::registry::Registry;
use super::tasks::Tasks;
use crate::hardware::BackingOptions;
pub(crate) use calls::CHANGED_BYTES_MAX;
pub(crate) use data_socket::DataConnection;
pub(crate) use destination::CallIn;
pub(super) use orders::check_bandwidth;
pub(super) use received_calls::kept_dirty;
use status::Shared;

service! {
    /// The migration service; see the module.
    #[derive(Debug)]
    pub(crate) struct Migrations {
        registry: Arc<Registry>,
        tasks: Tasks,
        exports: ExportService,
        qos: QosService,
        pools: Pools,
        disks: Disks,
        observe: Observe,
        ownership: Arc<Ownership>,
        peers: Arc<PeerAccess>,
        backing_options: BackingOptions,
    } with {
        /// Migrations by disk name.
        handles: Mutex<BTreeMap<String, Handle>>,
        /// True after the tasks were stopped because the daemon ends.
        stopped: AtomicBool,
        /// Lineages of the disks about which this host is asking the destination of a migration
        /// that has not begun yet.
        asking: Mutex<BTreeSet<String>>,
    }
}

/// The migration of a disk that is in progress, or the last one that ended.
#[derive(Debug)]
struct Handle {
    inputs: Inputs,
    shared: Arc<Shared>,
    task: tokio::task::JoinHandle<()>,
}

#[derive(Debug)]
enum Inputs {
    Source(mpsc::UnboundedSender<source::Input>),
    Destination(mpsc::UnboundedSender<destination::Input>, Arc<data_socket::DataConnections>),
}

impl Handle {
    fn is_under_way(&self) -> bool {
        !self.task.is_finished()
    }
}

impl Migrations {
    fn handles(&self) -> MutexGuard<'_, BTreeMap<String, Handle>> {
        self.handles.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn asking(&self) -> MutexGuard<'_, BTreeSet<String>> {
        self.asking.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns true if a disk's migration has a running task.
    pub(super) fn is_migrating(&self, name: &str) -> bool {
        self.handles().get(name).is_some_and(Handle::is_under_way)
    }

    /// Returns true if a disk is leaving this host and can have no dirty data here.
    pub(super) fn is_drained_to_leave(&self, name: &str) -> bool {
        // The result of an earlier migration does not apply to a disk that has returned.
        self.handles().get(name).is_some_and(|handle| handle.is_under_way() && handle.shared.facts().drained)
    }

    /// Stops the tasks of all migrations; their records stay. After this call, this host answers no
    /// call of a source: an answer from a record alone could tell the source that this host does
    /// not await the disk, and the source would cancel the migration.
    pub(super) fn stop(&self) {
        self.stopped.store(true, Ordering::SeqCst);
        self.abort_tasks();
    }

    /// Aborts the tasks of all migrations.
    pub(super) fn abort_tasks(&self) {
        self.handles().values().for_each(|handle| handle.task.abort());
    }
}

/// Clock of a migration task.
#[derive(Clone, Copy, Debug)]
struct Clock(tokio::time::Instant);

impl Clock {
    fn start() -> Clock {
        Clock(tokio::time::Instant::now())
    }

    fn now(self) -> Instant {
        Instant(self.0.elapsed().as_nanos() as u64)
    }

    /// Sleeps until `due`, or forever without a time.
    async fn sleep_until(self, due: Option<Instant>) {
        match due {
            Some(due) => tokio::time::sleep_until(self.0 + std::time::Duration::from_nanos(due.0)).await,
            None => std::future::pending().await,
        }
    }
}
