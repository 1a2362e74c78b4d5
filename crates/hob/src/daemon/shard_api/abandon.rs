//! What a shard is told of backings that may never answer.

use hob_engine::units::DiskId;

use super::{ShardCall, ShardHandle};

impl ShardHandle {
    /// Fails what waits for a disk's backing at this moment.
    pub(crate) fn expire_requests(&self, id: DiskId) {
        // A shard that is gone has none.
        let _ = self.send(ShardCall::ExpireRequests { id });
    }

    /// Disconnects a disk from its clients and from its backing, before it is removed.
    pub(crate) fn abandon(&self, id: DiskId) {
        // A shard that is gone serves nothing.
        let _ = self.send(ShardCall::Abandon { id });
    }
}
