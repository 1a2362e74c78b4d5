//! Calls to a shard about the host's etcd leases under which disks are served
//! (docs/decisions/0019).

use std::sync::Arc;

use hob_engine::units::DiskId;

use super::{ShardCall, ShardError, ShardHandle};
use crate::lease_clock::LeaseClock;

impl ShardHandle {
    /// Makes the shard serve a disk under this etcd lease from now on. The shard applies the lease
    /// before all later calls.
    pub(crate) fn set_lease(&self, id: DiskId, clock: Arc<LeaseClock>) -> Result<(), ShardError> {
        self.send(ShardCall::SetLease { id, clock })
    }

    /// Fails all requests of a disk that another host owns.
    pub(crate) fn lose(&self, id: DiskId) {
        // A shard that has ended serves no disk.
        let _ = self.send(ShardCall::Lose { id });
    }
}
