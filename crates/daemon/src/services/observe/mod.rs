//! The observation service: API views of pools and disks, statistics, histograms and curves,
//! recordings, health, metrics, and the dashboard's snapshots.
//!
//! The service only reads the state of the other services. Its own state of each disk (expected
//! hits, checksum mismatches) is in the disk's registry entry, so that it disappears together with
//! the disk.

mod backing_state;
mod explain;
mod figures;
mod health;
mod open_files;
mod quality;
mod recording;
mod requests;
mod snapshot;
mod state_space;
mod tasks;
mod view;

use std::sync::{Arc, Mutex, OnceLock, Weak};

use hob_control::{Cluster as ClusterView, Disk};

use super::peer_access::PeerAccess;
use super::qos::QosService;
use super::registry::Registry;
use super::swap::Swaps;
use super::tasks::Tasks;
use crate::exports::Exports;
pub(super) use health::{PING_MAX, STATS_MAX, sum};
pub(super) use open_files::FILES_EVERY;
use open_files::OpenFiles;
pub(super) use quality::{COUNT_EVERY, JUDGE_EVERY, Quality};
pub(crate) use recording::Recording;
pub(super) use state_space::SPACE_EVERY;
#[cfg(test)]
pub(super) use state_space::Space;
use state_space::StateSpace;
pub(super) use tasks::REMOVE_DEVICE;

/// Interface to a higher-layer service that adds details to a disk's view.
pub(super) trait DiskDetail: std::fmt::Debug + Send + Sync {
    /// Adds the service's details to a disk's view.
    fn add_to(&self, disk: &mut Disk);
}

service! {
    /// The observation service; see the module.
    #[derive(Clone, Debug)]
    pub(crate) struct Observe {
        registry: Arc<Registry>,
        tasks: Tasks,
        qos: QosService,
        swap: Swaps,
        peers: Arc<PeerAccess>,
        /// The exports and vhost-user sockets.
        export_table: Exports,
    } with {
        detail: Arc<OnceLock<Weak<dyn DiskDetail>>>,
        state_space: Arc<Mutex<StateSpace>>,
        open_files: Arc<Mutex<OpenFiles>>,
    }
}

impl Observe {
    /// Sets the service that adds details to disks. Later calls have no effect.
    pub(super) fn connect(&self, detail: Weak<dyn DiskDetail>) {
        let _ = self.detail.set(detail);
    }

    fn add_detail(&self, disk: &mut Disk) {
        if let Some(detail) = self.detail.get().and_then(Weak::upgrade) {
            detail.add_to(disk);
        }
    }

    /// Returns this host's state as a cluster member, if it is in a cluster.
    fn cluster_view(&self) -> Option<ClusterView> {
        self.peers.cluster().map(|cluster| cluster.view())
    }
}
