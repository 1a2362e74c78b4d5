//! What can be seen of pools and disks: how the API shows them, figures, histograms and curves, recordings, health, metrics, and the
//! snapshots of the dashboard.
//!
//! This service only reads. What it knows of each disk (hits that were expected, checksum mismatches) is in the disk's entry of the
//! registry, because it ends with the disk.

mod backing_state;
mod explain;
mod figures;
mod health;
mod quality;
mod recording;
mod requests;
mod snapshot;
mod view;

use std::sync::{Arc, OnceLock, Weak};

use hob_control::{Cluster as ClusterView, Disk};

use super::peer_access::PeerAccess;
use super::qos::QosService;
use super::registry::Registry;
use super::swap::Swaps;
use super::tasks::Tasks;
pub(super) use quality::{COUNT_EVERY, JUDGE_EVERY, Quality};
pub(crate) use recording::Recording;

/// A service of a higher layer that knows more of a disk than its entry says.
pub(super) trait DiskDetail: std::fmt::Debug + Send + Sync {
    /// Adds that to what is shown.
    fn add_to(&self, disk: &mut Disk);
}

/// See the module.
#[derive(Clone, Debug)]
pub(crate) struct Observe(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    registry: Arc<Registry>,
    tasks: Tasks,
    qos: QosService,
    swap: Swaps,
    peers: Arc<PeerAccess>,
    detail: OnceLock<Weak<dyn DiskDetail>>,
}

impl Observe {
    pub(super) fn new(
        registry: Arc<Registry>,
        tasks: Tasks,
        qos: QosService,
        swap: Swaps,
        peers: Arc<PeerAccess>,
    ) -> Observe {
        Observe(Arc::new(Shared { registry, tasks, qos, swap, peers, detail: OnceLock::new() }))
    }

    /// Sets who knows more of disks. Later calls have no effect.
    pub(super) fn connect(&self, detail: Weak<dyn DiskDetail>) {
        let _ = self.0.detail.set(detail);
    }

    fn add_detail(&self, disk: &mut Disk) {
        if let Some(detail) = self.0.detail.get().and_then(Weak::upgrade) {
            detail.add_to(disk);
        }
    }

    /// How this host is as a member of its cluster, if it is in one.
    fn cluster_view(&self) -> Option<ClusterView> {
        self.0.peers.cluster().map(|cluster| cluster.view())
    }
}
