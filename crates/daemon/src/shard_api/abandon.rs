//! Calls to a shard about backings that may never answer.

use hob_engine::units::DiskId;

use super::{ShardCall, ShardHandle};

impl ShardHandle {
    /// Fails the requests that wait for a disk's backing now.
    pub(crate) fn expire_requests(&self, id: DiskId) {
        // A shard that has ended has no such requests.
        let _ = self.send(ShardCall::ExpireRequests { id });
    }

    /// Disconnects a disk from its clients and from its backing, before it is removed.
    pub(crate) fn abandon(&self, id: DiskId) {
        // A shard that has ended serves no disk.
        let _ = self.send(ShardCall::Abandon { id });
    }
}
