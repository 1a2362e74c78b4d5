//! Calls to a shard about a migrating disk. A disk is *frozen* just before the hand-over: no
//! request is in flight, and new requests wait.

use std::os::fd::OwnedFd;

use hob_engine::command::Role;
use hob_engine::io::Op;
use hob_engine::regions::Regions;
use hob_engine::units::DiskId;
use hob_nbd::server::handshake::Negotiated;

use super::{Answer, ConnectionPermit, ShardCall, ShardError, ShardHandle};
use hob_storage::backing::Backing;

/// A call to a shard about a migrating disk. Each call that has an answer channel is answered once.
#[derive(Debug)]
pub enum TransferCall {
    /// Set the role of this host for the disk.
    Own(Role, Answer<()>),
    /// Start or stop recording which regions of the disk are written.
    Watch(bool, Answer<()>),
    /// Return the regions of the disk that were written since the last `TakeChanged`, or `None` if
    /// there are none.
    TakeChanged(Answer<Option<Box<Regions>>>),
    /// Return the blocks of the disk's cache, hottest first.
    Hottest(Answer<Vec<u64>>),
    /// Return the valid sector ranges in these cache blocks.
    Extents(Vec<u64>, Answer<Vec<(u64, u64)>>),
    /// Flush the disk: either [`Op::DaemonFlush`] or [`Op::Settle`].
    Flush(Op, Answer<()>),
    /// Invalidate these sector ranges in the cache. Parts that were already pulled are pulled
    /// again.
    Forget(Vec<(u64, u64)>, Answer<()>),
    /// Add sector ranges that the other host has in its cache to the list of data to pull.
    Listed(Vec<(u64, u64)>, Answer<()>),
    /// Start to pull the ranges that earlier `Listed` calls added.
    Pull,
    /// Return the progress of pulling the disk's cached data from another host.
    Progress(Answer<Progress>),
    /// Make this host the owner of the disk. Pulls stop until the next [`TransferCall::Pull`].
    TakeOver(Answer<()>),
    /// Read missing data from another host: the owner of the disk, or its previous owner.
    SetPeer(Backing),
    /// Stop reading from the other host.
    LeavePeer,
    /// Invalidate the whole cache of the disk and clear the list of data to pull.
    Restart(Answer<()>),
    /// Serve the disk to another host through this connection.
    AttachPeer(Box<PeerAttachment>),
}

/// An NBD connection through which another host reads a disk.
#[derive(Debug)]
pub struct PeerAttachment {
    /// The connection to the other host.
    pub socket: OwnedFd,
    /// Result of the NBD negotiation.
    pub negotiated: Negotiated,
    /// Bytes received after the negotiation.
    pub leftover: Vec<u8>,
    /// Connection permit, returned when the connection ends.
    pub permit: ConnectionPermit,
}

/// Progress of pulling a disk's cache from another host.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Progress {
    /// Number of bytes pulled.
    pub pulled_bytes: u64,
    /// Bytes among `pulled_bytes` that are outdated, because their range changed during or after
    /// the pull. Such ranges are pulled again.
    pub again_bytes: u64,
    /// Number of bytes that wait to be pulled.
    pub left_bytes: u64,
    /// Number of ranges that wait to be pulled.
    pub ranges: u64,
    /// True while the disk still reads from its previous owner.
    pub has_peer: bool,
}

impl ShardHandle {
    /// Sets this host's role for a disk. When the role freezes the disk, waits until no guest
    /// request is in flight.
    pub async fn own(&self, id: DiskId, role: Role) -> Result<(), ShardError> {
        self.transfer(id, |answer| TransferCall::Own(role, answer)).await
    }

    /// Starts or stops recording which regions of a disk are written.
    pub async fn watch(&self, id: DiskId, watch: bool) -> Result<(), ShardError> {
        self.transfer(id, |answer| TransferCall::Watch(watch, answer)).await
    }

    /// Returns the regions of a disk that were written since the last call; `None` if there are
    /// none.
    pub async fn take_changed(&self, id: DiskId) -> Result<Option<Box<Regions>>, ShardError> {
        self.transfer(id, TransferCall::TakeChanged).await
    }

    /// Returns the blocks of a disk's cache, hottest first.
    pub async fn hottest(&self, id: DiskId) -> Result<Vec<u64>, ShardError> {
        self.transfer(id, TransferCall::Hottest).await
    }

    /// Returns the valid sector ranges in these cache blocks.
    pub async fn extents(&self, id: DiskId, blocks: Vec<u64>) -> Result<Vec<(u64, u64)>, ShardError> {
        self.transfer(id, |answer| TransferCall::Extents(blocks, answer)).await
    }

    /// Makes all acknowledged writes of a disk durable, like a guest's flush, and flushes the
    /// backing even if the cache has all of these writes. Statistics of guests do not count this
    /// flush, and the disk's limits do not apply to it.
    pub async fn flush(&self, id: DiskId) -> Result<(), ShardError> {
        self.transfer(id, |answer| TransferCall::Flush(Op::DaemonFlush, answer)).await
    }

    /// Flushes the backing of a frozen disk, so that all acknowledged writes are durable before the
    /// hand-over.
    pub async fn settle(&self, id: DiskId) -> Result<(), ShardError> {
        self.transfer(id, |answer| TransferCall::Flush(Op::Settle, answer)).await
    }

    /// Invalidates sector ranges in a disk's cache. Ranges that were pulled are pulled again.
    pub async fn forget(&self, id: DiskId, ranges: Vec<(u64, u64)>) -> Result<(), ShardError> {
        self.transfer(id, |answer| TransferCall::Forget(ranges, answer)).await
    }

    /// Adds sector ranges that the other host has in its cache to the list of data to pull.
    pub async fn listed(&self, id: DiskId, ranges: Vec<(u64, u64)>) -> Result<(), ShardError> {
        self.transfer(id, |answer| TransferCall::Listed(ranges, answer)).await
    }

    /// Starts to pull the ranges of earlier [`listed`](Self::listed) calls from the other host.
    pub fn pull(&self, id: DiskId) {
        // A shard that has ended pulls nothing.
        let _ = self.send(ShardCall::Transfer { id, call: TransferCall::Pull });
    }

    /// Returns the progress of pulling a disk's cached data from another host.
    pub async fn progress(&self, id: DiskId) -> Result<Progress, ShardError> {
        self.transfer(id, TransferCall::Progress).await
    }

    /// Makes this host the owner of a disk and of its backing.
    pub async fn take_over(&self, id: DiskId) -> Result<(), ShardError> {
        self.transfer(id, TransferCall::TakeOver).await
    }

    /// Reads a disk's missing data from another host from now on.
    pub fn set_peer(&self, id: DiskId, peer: Backing) {
        let _ = self.send(ShardCall::Transfer { id, call: TransferCall::SetPeer(peer) });
    }

    /// Invalidates the cache of a disk in standby, and clears its list of data to pull.
    pub async fn restart(&self, id: DiskId) -> Result<(), ShardError> {
        self.transfer(id, TransferCall::Restart).await
    }

    /// Stops reading a disk's data from its previous owner.
    pub fn leave_peer(&self, id: DiskId) {
        let _ = self.send(ShardCall::Transfer { id, call: TransferCall::LeavePeer });
    }

    /// Serves a disk to another host through this connection.
    pub fn attach_peer(&self, id: DiskId, attachment: PeerAttachment) -> Result<(), ShardError> {
        self.send(ShardCall::Transfer { id, call: TransferCall::AttachPeer(Box::new(attachment)) })
    }

    async fn transfer<T>(
        &self,
        id: DiskId,
        call: impl FnOnce(Answer<T>) -> TransferCall,
    ) -> Result<T, ShardError> {
        self.ask(|answer| ShardCall::Transfer { id, call: call(answer) }).await
    }
}
