//! Events that a shard reports.

use hob_engine::command::Segment;
use hob_engine::units::{DeviceId, DiskId};

/// Something a shard reports unasked.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum ShardEvent {
    /// A device failed too often; its caches give it up.
    Fenced {
        /// The device.
        device: DeviceId,
        /// Failed I/Os.
        errors: u32,
    },
    /// A cache stopped using segments of a fenced device.
    Lost {
        /// The disk.
        disk: DiskId,
        /// The segments.
        segments: Vec<Segment>,
    },
    /// A device does not answer in time; its caches bypass it.
    Stalled(DeviceId),
    /// A stalled device answers again.
    Resumed(DeviceId),
    /// A device on another host has not answered for long. What it was asked waits until it is given up.
    PeerSilent(DeviceId),
    /// Dirty data cannot be read from flash any more.
    DirtyLost {
        /// The disk.
        disk: DiskId,
        /// Sectors that cannot be read, in all.
        sectors: u64,
    },
    /// A change waits for a cache that is being recovered, and could pass if the rings were made void.
    ChangeWaits(DiskId),
    /// The journal of a cache cannot be written any more.
    JournalLost(DiskId),
    /// A flush of a disk's backing failed, or the backing restarted: acknowledged writes may be lost.
    WritesInDoubt(DiskId),
    /// This many guests of a disk were not told that acknowledged writes may be lost.
    FailuresOwed {
        /// The disk.
        disk: DiskId,
        /// Number of guests.
        count: u32,
    },
    /// Somebody else has taken a disk's backing over. The disk serves nothing any more.
    BackingLost(DiskId),
    /// The backing of a disk that was abandoned and removed is closed: its last request has ended.
    BackingClosed(DiskId),
}

/// Sends the shards' events.
pub(crate) type EventSender = tokio::sync::mpsc::UnboundedSender<ShardEvent>;
