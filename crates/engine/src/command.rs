//! What the daemon tells an engine, and what an engine reports.
//!
//! Commands take effect under load: a change to a cache waits until none of that cache's flash I/O
//! is in flight, and meanwhile the disk's requests go to the backing. The change is finished when
//! [`Event::Done`] names its id.

use crate::admission::Admission;
use crate::policy::PolicyKind;
use crate::units::{CommandId, DeviceId, DiskId};

/// A run of flash that belongs to one cache. All segments of one cache have the same length.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Segment {
    /// The device it lies on.
    pub device: DeviceId,
    /// Its first byte on the device; sector-aligned.
    pub offset: u64,
}

/// Settings of one cache that its contents depend on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CacheConfig {
    /// Cache block, bytes: a power of two, 4 KiB to 1 MiB, at most `segment_bytes`.
    pub block_bytes: u32,
    /// Segment, bytes: a power of two.
    pub segment_bytes: u64,
    /// Replacement.
    pub policy: PolicyKind,
    /// What may come in.
    pub admission: Admission,
}

/// A disk as its guest sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DiskConfig {
    /// Bytes; a multiple of 512.
    pub size_bytes: u64,
    /// May guests change it?
    pub access: Access,
}

/// What guests may do to a disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// Everything.
    ReadWrite,
    /// Changes are refused with [`IoError::ReadOnly`](crate::io::IoError::ReadOnly).
    ReadOnly,
}

/// One instruction.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Command {
    /// A disk comes under this engine's care, without a cache.
    AddDisk(DiskConfig),
    /// New requests are refused from now on; done when the last one in flight has been answered.
    /// The cache's segments are released.
    RemoveDisk,
    /// Change its cache.
    Cache(CacheChange),
    /// Start counting from zero.
    ResetStats,
}

/// A change to one disk's cache.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CacheChange {
    /// Give the disk a cache, empty.
    Enable(CacheConfig, Vec<Segment>),
    /// Take the cache away.
    Disable,
    /// More room; contents stay.
    Grow(Vec<Segment>),
    /// Release that many segments, the emptiest first; blocks elsewhere stay.
    Shrink(u32),
    /// Release every segment on a device, and use these in their place.
    Leave(DeviceId, Vec<Segment>),
    /// Another block size or policy: same room, emptied.
    Configure(CacheConfig),
    /// Forget the contents.
    Clear,
}

/// Why a command was not carried out. Nothing was changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CommandError {
    /// There is no such disk.
    NoSuchDisk,
    /// A disk of that id exists.
    DiskExists,
    /// The disk has no cache.
    NoCache,
    /// The disk has a cache already.
    CacheExists,
    /// The disk is being removed.
    Removing,
    /// The cache has no more segments than it is asked to release, or none are given.
    TooSmall,
    /// The configuration cannot work: block size not a power of two in range, segment smaller than
    /// a block, a disk of more than 2³² blocks, or more than 2³² − 2 blocks of cache.
    Unworkable,
}

/// Something the daemon should know.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// A command ended.
    Done {
        /// Which.
        command: CommandId,
        /// For which disk.
        disk: DiskId,
        /// Segments that the cache no longer uses, free to be given away.
        result: Result<Vec<Segment>, CommandError>,
    },
    /// A device failed too often. Caches give its segments up by themselves ([`Event::Lost`]).
    Fenced {
        /// Which.
        device: DeviceId,
        /// Failed I/Os that led to it.
        errors: u32,
    },
    /// A cache stopped using segments of a fenced device.
    Lost {
        /// Whose cache.
        disk: DiskId,
        /// Which segments.
        segments: Vec<Segment>,
    },
    /// A flash device has an I/O outstanding for longer than the limit; its caches bypass it.
    Stalled(DeviceId),
    /// A stalled device answered again.
    Resumed(DeviceId),
}
