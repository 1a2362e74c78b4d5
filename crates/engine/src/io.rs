//! The engine's interface for requests, replies, I/O and completions.
//!
//! # Buffers
//! A request that moves data names one buffer. The buffer's byte 0 corresponds to the request's
//! offset rounded *down* to a sector. The buffer extends to the request's end rounded *up* to a
//! sector, so the payload starts at `offset % SECTOR_BYTES`. The engine holds the buffer from
//! `handle_request` until `poll_release` returns it. For a fill or a copy to flash, the release is
//! later than the reply. Between the reply and the release the engine only *reads* the buffer, so
//! the front end may send from the buffer at the same time.
//!
//! A buffer can also be guest memory ([`PayloadMemory::Guest`]), to which the guest may write at
//! any time. The engine uses guest memory only as the destination of reads from flash.

use crate::outcome::Outcome;
use crate::units::{BufferId, DeviceId, DiskId, IoId, RequestId};

/// Operation of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Op {
    /// Reads into the buffer.
    Read,
    /// Reads data of the backing into flash, and returns no data (NBD_CMD_CACHE).
    Prefetch,
    /// Writes from the buffer.
    Write(Durability),
    /// Makes all acknowledged writes durable.
    Flush,
    /// Discards the content of the range. Later reads return whatever the backing returns.
    Discard(Durability),
    /// Zeroes the range.
    WriteZeroes(Durability, Zeroing),
    /// A request of the daemon during a migration: like `Prefetch`, for data that the other host
    /// has in its cache. Admission accepts all of this data.
    Pull,
    /// A request of the daemon: invalidates the range in the cache of a disk in standby.
    Forget,
    /// A request of the daemon: flushes a frozen disk's backing.
    Settle,
    /// A request of the daemon: makes all acknowledged writes durable, like a guest's `Flush`, and
    /// always flushes the backing too. This flush is background work and does not begin a new
    /// destage epoch.
    DaemonFlush,
    /// A request of another host: reads into the buffer and promotes nothing. If another host owns
    /// the disk, only flash is read.
    ReadForPeer,
}

impl Op {
    /// Returns true if the request has a buffer.
    pub fn has_buffer(self) -> bool {
        matches!(self, Op::Read | Op::Prefetch | Op::Write(_) | Op::Pull | Op::ReadForPeer)
    }

    /// Returns true if the request comes from the daemon itself, or from another host. Guest
    /// statistics do not count such requests.
    #[inline]
    pub fn is_own(self) -> bool {
        matches!(self, Op::Pull | Op::Forget | Op::Settle | Op::DaemonFlush | Op::ReadForPeer)
    }

    /// Returns true if the request changes the disk's content.
    pub fn modifies(self) -> bool {
        matches!(self, Op::Write(_) | Op::Discard(_) | Op::WriteZeroes(..))
    }

    /// Returns true if the request is a change that must be durable when it is acknowledged.
    pub fn is_durable_change(self) -> bool {
        matches!(
            self,
            Op::Write(Durability::Durable)
                | Op::Discard(Durability::Durable)
                | Op::WriteZeroes(Durability::Durable, _)
        )
    }
}

/// Rule for promoting a read's data into the cache.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Promote {
    /// The cache's settings decide whether the data is promoted.
    #[default]
    Usual,
    /// The read promotes nothing, for backups and scans that read everything once. Cached data
    /// serves the read, but the read does not count as a use and triggers no read-ahead or
    /// sampling. This value applies only to reads and prefetches.
    Never,
}

/// Whether a request's buffer memory belongs to the daemon or to the guest.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum PayloadMemory {
    /// The daemon owns the memory. While the engine holds the buffer, only the engine writes to it.
    #[default]
    Daemon,
    /// The guest owns the memory, for reads of whole sectors that are likely hits. A read that
    /// misses or has a wrong checksum is [declined](crate::Engine::poll_declined). The guest may
    /// have overwritten the data in its memory, so a wrong checksum does not show that flash is
    /// faulty.
    Guest,
    /// The daemon owns the memory, for a retry of a declined read. Statistics have already counted
    /// this read.
    DaemonAfterGuest,
}

/// Condition for acknowledging a change.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Durability {
    /// The backing has accepted the change.
    Volatile,
    /// The change is on the backing's media (FUA).
    Durable,
}

/// Permitted ways to write zeroes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Zeroing {
    /// The backing may deallocate the range.
    MayUnmap,
    /// The range must stay allocated (NBD's NO_HOLE).
    KeepAllocated,
    /// The backing may deallocate the range, but only if zeroing is faster than writing. Otherwise
    /// it returns `IoError::Unsupported` (NBD's FAST_ZERO).
    FastMayUnmap,
    /// The range must stay allocated, and zeroing must be faster than writing.
    FastKeepAllocated,
}

/// One guest request. Lengths and offsets are bytes and need no alignment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Request {
    /// The front end's id of the request, which the reply repeats.
    pub id: RequestId,
    /// The disk.
    pub disk: DiskId,
    /// The operation.
    pub op: Op,
    /// First byte on the disk. 0 for a flush.
    pub offset: u64,
    /// Length in bytes. 0 for a flush, 1 to `REQUEST_BYTES_MAX` otherwise.
    pub len: u64,
    /// Payload; see the module documentation. `None` exactly if `op.has_buffer()` is false.
    pub buffer: Option<BufferId>,
    /// Rule for promoting the request's data into the cache.
    pub promote: Promote,
    /// Whether the buffer's memory belongs to the daemon or to the guest.
    pub memory: PayloadMemory,
}

impl Request {
    /// Returns true if the request is a read that does not affect the cache.
    #[inline]
    pub fn passes_by(&self) -> bool {
        match self.op {
            Op::Read | Op::Prefetch => self.promote == Promote::Never,
            Op::ReadForPeer => true,
            _ => false,
        }
    }
}

/// The reply to one request. Every accepted request gets exactly one reply, unless it is declined.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Reply {
    /// Id of the request.
    pub id: RequestId,
    /// Disk of the request.
    pub disk: DiskId,
    /// The result for the guest.
    pub result: Result<(), IoError>,
    /// How the request was served, such as a hit or a miss, for the statistics.
    pub outcome: Outcome,
}

/// A contiguous range of a buffer that storage and engine share.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BufferSlice {
    /// Id of the buffer.
    pub id: BufferId,
    /// Position of the first byte in the buffer.
    pub offset: u32,
    /// Length in bytes.
    pub len: u32,
}

/// A copy of payload, see [`Engine::poll_copy`](crate::Engine::poll_copy). A copy between the
/// memory tier and a buffer consists of whole sectors. Other copies go from one buffer to another,
/// or write zeroes to a buffer. A copy cannot fail.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BufferCopy {
    /// Source.
    pub from: CopyEnd,
    /// Destination, which does not overlap the source.
    pub to: CopyEnd,
    /// Length in bytes.
    pub len: u32,
}

/// One end of a [`BufferCopy`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CopyEnd {
    /// The memory tier of a disk, at an offset that is a multiple of a sector.
    Memory {
        /// The disk.
        disk: DiskId,
        /// First byte in the disk's memory area.
        offset: u64,
    },
    /// A position in a buffer.
    Buffer {
        /// The buffer.
        id: BufferId,
        /// First byte in the buffer.
        offset: u32,
    },
    /// Zeroes, only as a source.
    Zeroes,
}

/// Target of an I/O.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Target {
    /// The backing of a disk.
    Backing(DiskId),
    /// A flash device. Offsets count from the device's first byte, including its superblock.
    Flash(DeviceId),
}

/// Operation of an I/O.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum IoOp {
    /// Fills `slice` from the target. The engine shortens a backing read that crosses the disk's
    /// end. The rest of the buffer must read as zeroes, so storage zeroes it.
    Read,
    /// Writes `slice` to the target.
    Write(Durability),
    /// Makes all completed writes durable.
    Flush,
    /// Discards the range.
    Discard,
    /// Zeroes the range.
    WriteZeroes(Zeroing),
    /// Writes the pages that [`Engine::journal_pages`](crate::Engine::journal_pages) returns while
    /// the I/O is in flight.
    WriteJournal,
}

/// One I/O for storage. Exactly one `handle_completion` reports its end.
///
/// Reads and writes of flash are sector-aligned in offset, length and buffer offset. Reads of the
/// backing are sector-aligned, except at the disk's end. Writes to the backing have the guest's
/// offset and length.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Io {
    /// Id of the I/O, which the completion repeats.
    pub id: IoId,
    /// The target.
    pub target: Target,
    /// The operation.
    pub op: IoOp,
    /// First byte on the target. 0 for a flush.
    pub offset: u64,
    /// Length in bytes. 0 for a flush. Equals the slice's length if there is one.
    pub len: u64,
    /// Payload of a read or write.
    pub slice: Option<BufferSlice>,
}

/// Reason for the failure of an I/O or request. Each variant has one errno for the guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum IoError {
    /// The device failed: EIO.
    Failed,
    /// The backing has no room left: ENOSPC.
    NoSpace,
    /// The target does not support this operation: ENOTSUP.
    Unsupported,
    /// The range is invalid for this disk: EINVAL.
    Invalid,
    /// The disk is read-only: EPERM.
    ReadOnly,
    /// The disk is being removed, the daemon ends, or another host owns the disk: ESHUTDOWN.
    ShuttingDown,
    /// Another host requested data that is not in this host's flash. Guests never receive this
    /// error.
    NotCached,
}
