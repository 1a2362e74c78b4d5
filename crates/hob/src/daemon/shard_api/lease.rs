//! Calls to a shard about the leases under which disks are served (docs/decisions/0019).

use std::sync::Arc;

use hob_engine::units::DiskId;

use super::{ShardCall, ShardError, ShardHandle};
use crate::daemon::cluster::LeaseClock;

impl ShardHandle {
    /// Serves a disk under this lease from now on; before anything else that is asked later.
    pub(crate) fn set_lease(&self, id: DiskId, clock: Arc<LeaseClock>) -> Result<(), ShardError> {
        self.send(ShardCall::SetLease { id, clock })
    }

    /// Refuses everything of a disk that another host has.
    pub(crate) fn lose(&self, id: DiskId) {
        // Not an error: a shard that has ended serves nothing.
        let _ = self.send(ShardCall::Lose { id });
    }
}
