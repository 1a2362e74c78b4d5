//! Calls to a shard about the leases under which disks are served (docs/decisions/0019).

use std::sync::Arc;

use hob_engine::units::DiskId;

use super::{ShardCall, ShardError, ShardHandle};
use crate::daemon::cluster::LeaseClock;

impl ShardHandle {
    /// Serves a disk under this lease from now on. The shard applies it before all later calls.
    pub(crate) fn set_lease(&self, id: DiskId, clock: Arc<LeaseClock>) -> Result<(), ShardError> {
        self.send(ShardCall::SetLease { id, clock })
    }

    /// Fails all requests of a disk that another host owns.
    pub(crate) fn lose(&self, id: DiskId) {
        // A shard that has ended serves no disk.
        let _ = self.send(ShardCall::Lose { id });
    }
}
