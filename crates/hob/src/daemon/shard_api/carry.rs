//! Calls to a shard about a disk that migrates.

use hob_engine::command::Role;
use hob_engine::io::Op;
use hob_engine::regions::Regions;
use hob_engine::units::DiskId;

use super::{ShardError, ShardHandle};
use crate::daemon::hardware::Backing;
use crate::daemon::shard::{CarryCall, PeerAttachment, Progress};

impl ShardHandle {
    /// Gives a disk another role. Waits until nothing of a guest is in flight where it is frozen.
    pub(crate) async fn own(&self, id: DiskId, role: Role) -> Result<(), ShardError> {
        self.carry(id, |answer| CarryCall::Own(role, answer)).await
    }

    /// Notes where a disk is changed from now on, or no more.
    pub(crate) async fn watch(&self, id: DiskId, watch: bool) -> Result<(), ShardError> {
        self.carry(id, |answer| CarryCall::Watch(watch, answer)).await
    }

    /// The regions changed since the last call.
    pub(crate) async fn take_changed(&self, id: DiskId) -> Result<Option<Box<Regions>>, ShardError> {
        self.carry(id, CarryCall::TakeChanged).await
    }

    /// The blocks of its cache, hottest first.
    pub(crate) async fn hottest(&self, id: DiskId) -> Result<Vec<u64>, ShardError> {
        self.carry(id, CarryCall::Hottest).await
    }

    /// The valid sectors in those blocks.
    pub(crate) async fn extents(&self, id: DiskId, blocks: Vec<u64>) -> Result<Vec<(u64, u64)>, ShardError> {
        self.carry(id, |answer| CarryCall::Extents(blocks, answer)).await
    }

    /// A flush like a guest's.
    pub(crate) async fn flush(&self, id: DiskId) -> Result<(), ShardError> {
        self.carry(id, |answer| CarryCall::Flush(Op::Flush, answer)).await
    }

    /// A flush of the backing of a frozen disk.
    pub(crate) async fn settle(&self, id: DiskId) -> Result<(), ShardError> {
        self.carry(id, |answer| CarryCall::Flush(Op::Settle, answer)).await
    }

    /// Forgets ranges of sectors, which are pulled again if they were pulled.
    pub(crate) async fn forget(&self, id: DiskId, ranges: Vec<(u64, u64)>) -> Result<(), ShardError> {
        self.carry(id, |answer| CarryCall::Forget(ranges, answer)).await
    }

    /// The peer has these sectors in flash.
    pub(crate) async fn listed(&self, id: DiskId, ranges: Vec<(u64, u64)>) -> Result<(), ShardError> {
        self.carry(id, |answer| CarryCall::Listed(ranges, answer)).await
    }

    /// Starts to pull the listed blocks.
    pub(crate) fn pull(&self, id: DiskId) {
        // Not an error: a shard that has ended pulls nothing.
        let _ = self.send(super::ShardCall::Carry(id, CarryCall::Pull));
    }

    /// How pulling gets on.
    pub(crate) async fn progress(&self, id: DiskId) -> Result<Progress, ShardError> {
        self.carry(id, CarryCall::Progress).await
    }

    /// The disk is this host's, and so is its backing.
    pub(crate) async fn take_over(&self, id: DiskId) -> Result<(), ShardError> {
        self.carry(id, CarryCall::TakeOver).await
    }

    /// Reads it at another host from now on.
    pub(crate) fn set_peer(&self, id: DiskId, peer: Backing) {
        // As above.
        let _ = self.send(super::ShardCall::Carry(id, CarryCall::SetPeer(peer)));
    }

    /// Empties a disk in standby, and its list of blocks to pull.
    pub(crate) async fn restart(&self, id: DiskId) -> Result<(), ShardError> {
        self.carry(id, CarryCall::Restart).await
    }

    /// The host that had it is asked no more.
    pub(crate) fn leave_peer(&self, id: DiskId) {
        // As above.
        let _ = self.send(super::ShardCall::Carry(id, CarryCall::LeavePeer));
    }

    /// Another host reads the disk.
    pub(crate) fn attach_peer(&self, id: DiskId, attachment: PeerAttachment) -> Result<(), ShardError> {
        self.send(super::ShardCall::Carry(id, CarryCall::AttachPeer(Box::new(attachment))))
    }

    async fn carry<T>(
        &self,
        id: DiskId,
        call: impl FnOnce(super::Answer<T>) -> CarryCall,
    ) -> Result<T, ShardError> {
        self.ask(|answer| super::ShardCall::Carry(id, call(answer))).await
    }
}
