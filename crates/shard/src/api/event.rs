//! Events that a shard reports to the services.

use hob_engine::command::Segment;
use hob_engine::units::{DeviceId, DiskId};

/// An event that a shard reports to the services.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ShardEvent {
    /// A flash device failed too often. The caches of this shard stop using it.
    Fenced {
        /// The flash device that failed.
        device: DeviceId,
        /// Number of failed I/Os.
        errors: u32,
    },
    /// A cache stopped using segments of a fenced device.
    Lost {
        /// The disk of the cache.
        disk: DiskId,
        /// The segments that the cache stopped using.
        segments: Vec<Segment>,
    },
    /// A flash device does not answer in time. The caches on it send their requests to the
    /// backings.
    Stalled(DeviceId),
    /// A stalled flash device answers again.
    Resumed(DeviceId),
    /// A flash device on another host has not answered for a long time. I/O to the device waits
    /// until the device is abandoned.
    PeerSilent(DeviceId),
    /// Flash has lost dirty data of a disk, which the backing does not have.
    DirtyLost {
        /// The disk of the data.
        disk: DiskId,
        /// Total number of sectors of the disk whose dirty data is lost.
        sectors: u64,
    },
    /// A write waits for a recovering cache. The write could continue if the journal on flash were
    /// invalidated.
    ChangeWaits(DiskId),
    /// The journal of a cache can no longer be written.
    JournalLost(DiskId),
    /// A discard of dirty data waits until the daemon has recorded the discard for the journal ring
    /// with this number, because the journal cannot be written.
    DiscardUnrecorded(DiskId, u32),
    /// A copy of a cache's journal is not written any more.
    JournalCopyLost(DiskId),
    /// A flush of a disk's backing failed, or the backing restarted: acknowledged writes may be
    /// lost.
    WritesInDoubt(DiskId),
    /// An error must still be reported to guests of a disk, because acknowledged writes may be
    /// lost.
    FailuresOwed {
        /// The disk.
        disk: DiskId,
        /// Number of guests that have not got the error yet.
        count: u32,
    },
    /// Another program has taken over a disk's backing. The disk serves no requests any more.
    BackingLost {
        /// The disk.
        disk: DiskId,
        /// Reason why the backing is lost; `None` if another program has opened it.
        why: Option<String>,
    },
    /// The files of a parent may have changed: the shard was paused, or the backing of the parent
    /// or of one of its clones had lost its connection. The clones read the parent's data
    /// themselves until [`ShardHandle::parent_checked`](super::ShardHandle::parent_checked).
    ParentUnchecked {
        /// The parent's disk.
        parent: DiskId,
        /// Number of the required check. Later checks have greater numbers.
        check: u64,
    },
    /// The abandoned backing of a removed disk is closed: its last request has ended.
    BackingClosed(DiskId),
}

/// Sends events of the shards to the services.
pub type EventSender = tokio::sync::mpsc::UnboundedSender<ShardEvent>;
