//! The engine's interface: requests and completions in, I/O and replies out.
//!
//! # Buffers
//! A request that moves data names one buffer. Its byte 0 corresponds to the request's offset rounded
//! *down* to a sector, and it extends to the request's end rounded *up* to a sector. The payload therefore
//! starts at `offset % SECTOR_BYTES`. The engine holds the buffer from `handle_request` until
//! `poll_release` returns it, which for a fill or a flash copy is later than the reply. Between the reply
//! and the release the engine only *reads* the buffer, so the front end may send from it at the same time.
//!
//! A buffer can also be the guest's own memory ([`PayloadMemory::Guest`]), to which the guest writes at any
//! time. The engine only reads flash into it.

use crate::outcome::Outcome;
use crate::units::{BufferId, DeviceId, DiskId, IoId, RequestId};

/// Operation of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Op {
    /// Read into the buffer.
    Read,
    /// Like `Read`, but without a reader: the data only has to be in flash afterwards (NBD_CMD_CACHE).
    Prefetch,
    /// Write from the buffer.
    Write(Durability),
    /// Make every write that was acknowledged before durable.
    Flush,
    /// The range's content is not needed; later reads return whatever the backing returns.
    Discard(Durability),
    /// The range reads as zeroes afterwards.
    WriteZeroes(Durability, Zeroing),
    /// The daemon's own: like `Prefetch` for data from the cache of another host, without admission.
    Pull,
    /// The daemon's own: invalidate the range in the cache of a disk in standby.
    Forget,
    /// The daemon's own: flush a frozen disk's backing.
    Settle,
    /// Another host's: read into the buffer and promote nothing; if the disk is away, only from flash.
    ReadForPeer,
}

impl Op {
    /// Returns true if the request has a buffer.
    pub fn has_buffer(self) -> bool {
        matches!(self, Op::Read | Op::Prefetch | Op::Write(_) | Op::Pull | Op::ReadForPeer)
    }

    /// Returns true if the request comes from the daemon itself, or from another host. Guest statistics do
    /// not count it.
    #[inline]
    pub fn is_own(self) -> bool {
        matches!(self, Op::Pull | Op::Forget | Op::Settle | Op::ReadForPeer)
    }

    /// Returns true if the request changes the disk's content.
    pub fn modifies(self) -> bool {
        matches!(self, Op::Write(_) | Op::Discard(_) | Op::WriteZeroes(..))
    }
}

/// What a read promotes into the cache.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Promote {
    /// According to the cache's settings.
    #[default]
    Usual,
    /// Nothing: cached data serves the read, but the read fills nothing, counts as no use, and triggers no
    /// read-ahead or sampling. For backups and scans, which read everything once. Applies only to reads and
    /// prefetches.
    Never,
}

/// Owner of a request's buffer memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum PayloadMemory {
    /// The daemon: only the engine writes to it while it holds it.
    #[default]
    Daemon,
    /// The guest: for reads of whole sectors that are likely hits. A read that turns out to be a miss, or
    /// whose checksum does not match, is [declined](crate::Engine::poll_declined). The guest may have
    /// overwritten the data, so a mismatch says nothing about flash.
    Guest,
    /// The daemon, for a read that was declined: its statistics have been counted already.
    DaemonAfterGuest,
}

/// When a change may be acknowledged.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Durability {
    /// When the backing has accepted it.
    Volatile,
    /// When it is on the backing's media (FUA).
    Durable,
}

/// How zeroes may be written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Zeroing {
    /// The backing may deallocate the range.
    MayUnmap,
    /// The range must stay allocated (NBD's NO_HOLE).
    KeepAllocated,
    /// Only if it is faster than writing; otherwise `IoError::Unsupported` (NBD's FAST_ZERO).
    FastMayUnmap,
    /// Both of the above.
    FastKeepAllocated,
}

/// One guest request. Lengths and offsets are bytes and need no alignment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Request {
    /// The front end's id of the request, repeated in the reply.
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
    /// Its promotion into the cache.
    pub promote: Promote,
    /// Owner of the buffer's memory.
    pub memory: PayloadMemory,
}

impl Request {
    /// Returns true if it is a read that does not affect the cache.
    #[inline]
    pub fn passes_by(&self) -> bool {
        match self.op {
            Op::Read | Op::Prefetch => self.promote == Promote::Never,
            Op::ReadForPeer => true,
            _ => false,
        }
    }
}

/// The reply to one request. Every accepted request gets exactly one, unless it is declined.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Reply {
    /// The request's id.
    pub id: RequestId,
    /// The request's disk.
    pub disk: DiskId,
    /// The result for the guest.
    pub result: Result<(), IoError>,
    /// The request's outcome class.
    pub outcome: Outcome,
}

/// Part of a buffer, bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BufferSlice {
    /// The buffer.
    pub id: BufferId,
    /// First byte in it.
    pub offset: u32,
    /// Length in bytes.
    pub len: u32,
}

/// Payload to be copied, see [`Engine::poll_copy`](crate::Engine::poll_copy): between memory and a buffer, whole sectors; or from one
/// buffer to another, or zeroes to a buffer. It cannot fail.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BufferCopy {
    /// Source.
    pub from: CopyEnd,
    /// Destination; not in the same buffer.
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
        /// First byte in the area.
        offset: u64,
    },
    /// A buffer, at an offset.
    Buffer {
        /// The buffer.
        id: BufferId,
        /// First byte in it.
        offset: u32,
    },
    /// Nothing but zeroes; only to copy from.
    Zeroes,
}

/// Target of an I/O.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Target {
    /// The backing of a disk.
    Backing(DiskId),
    /// A flash device; offsets count from the device's first byte, superblock included.
    Flash(DeviceId),
}

/// Operation of an I/O.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum IoOp {
    /// Fill `slice` from the target. The engine shortens a backing read that crosses the disk's end; the
    /// buffer's tail must read as zeroes (storage zeroes buffers' tails).
    Read,
    /// Write `slice` to the target.
    Write(Durability),
    /// Make all completed writes durable.
    Flush,
    /// Discard the range.
    Discard,
    /// Zero the range.
    WriteZeroes(Zeroing),
    /// Write the pages that [`Engine::journal_pages`](crate::Engine::journal_pages) returns while the I/O
    /// is in flight.
    WriteJournal,
}

/// One I/O for storage to perform. Exactly one `handle_completion` answers it.
///
/// Reads and writes of flash are sector-aligned in offset, length and buffer offset. Reads of the backing
/// are sector-aligned, except at the disk's end; writes are as the guest sent them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Io {
    /// Id, repeated in the completion.
    pub id: IoId,
    /// The target.
    pub target: Target,
    /// The operation.
    pub op: IoOp,
    /// First byte on the target. 0 for a flush.
    pub offset: u64,
    /// Length in bytes. 0 for a flush. Equals the slice's length if there is one.
    pub len: u64,
    /// Payload of reads and writes.
    pub slice: Option<BufferSlice>,
}

/// Why an I/O, or its request, failed. Each variant has one errno for the guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum IoError {
    /// The device failed: EIO.
    Failed,
    /// No room left on the backing: ENOSPC.
    NoSpace,
    /// The target does not support this operation: ENOTSUP.
    Unsupported,
    /// The range is invalid for this disk: EINVAL.
    Invalid,
    /// The disk is read-only: EPERM.
    ReadOnly,
    /// The disk is being removed, the daemon ends, or another host owns the disk: ESHUTDOWN.
    ShuttingDown,
    /// Another host requested data that is not in this host's flash. Guests never see it.
    NotCached,
}
