//! What crosses the engine's boundary: requests and completions in, I/O and replies out.
//!
//! # Buffers
//! A request that moves data names one buffer. Its byte 0 stands for the request's offset rounded
//! *down* to a sector, and it reaches to the request's end rounded *up* to a sector; the payload
//! therefore starts at `offset % SECTOR_BYTES`. The engine holds the buffer from `handle_request`
//! until `poll_release` gives it back, which for a fill or a flash copy is later than the reply.
//! Between the reply and the release the engine only *reads* the buffer, so the front end may send
//! from it at the same time.
//!
//! A buffer can also be the guest's own memory ([`PayloadMemory::Guest`]), to which the guest writes whenever it likes.
//! Flash is read into it and nothing else is done with it.

use crate::outcome::Outcome;
use crate::units::{BufferId, DeviceId, DiskId, IoId, RequestId};

/// What a guest asks of a disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Op {
    /// Read into the buffer.
    Read,
    /// Like `Read`, but nobody wants the data: it is only to be in flash afterwards (NBD_CMD_CACHE).
    Prefetch,
    /// Write from the buffer.
    Write(Durability),
    /// Every write acknowledged before this is durable when it is acknowledged.
    Flush,
    /// The range's content is no longer wanted; later reads may return anything the backing returns.
    Discard(Durability),
    /// The range reads as zeroes afterwards.
    WriteZeroes(Durability, Zeroing),
    /// Of the daemon's own: like `Prefetch`, whatever admission thinks of it: the cache of another host had it.
    Pull,
    /// Of the daemon's own: the cache forgets the range, of a disk in standby.
    Forget,
    /// Of the daemon's own: a flush of a frozen disk's backing.
    Settle,
    /// Of another host: read into the buffer and promote nothing; when the disk is away, only what is in flash.
    ReadForPeer,
}

impl Op {
    /// Does the request carry a buffer?
    pub fn has_buffer(self) -> bool {
        matches!(self, Op::Read | Op::Prefetch | Op::Write(_) | Op::Pull | Op::ReadForPeer)
    }

    /// Does it come from the daemon itself, or from another host? No guest's statistics count it.
    #[inline]
    pub fn is_own(self) -> bool {
        matches!(self, Op::Pull | Op::Forget | Op::Settle | Op::ReadForPeer)
    }

    /// Does the request change what the disk holds?
    pub fn modifies(self) -> bool {
        matches!(self, Op::Write(_) | Op::Discard(_) | Op::WriteZeroes(..))
    }
}

/// What a read leaves behind in the cache.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Promote {
    /// What the cache's settings say.
    #[default]
    Usual,
    /// Nothing: what is cached serves it, and nothing comes in, counts as used again, is read ahead or sampled for it. For
    /// backups and scans, which read everything once. Only reads and prefetches heed it; a change is a change.
    Never,
}

/// Whose memory the buffer of a request is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum PayloadMemory {
    /// The daemon's: nobody else writes to it while the engine holds it.
    #[default]
    Daemon,
    /// The guest's: for reads of whole sectors that are likely to be hits. What is not a hit when its turn comes, or does not come as
    /// it was written to flash, is [declined](crate::Engine::poll_declined): the guest may have written over it, so that nothing
    /// follows from it for flash.
    Guest,
    /// The daemon's, for a read that was declined: requests and their sizes have been counted.
    DaemonAfterGuest,
}

/// When a change may be acknowledged.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Durability {
    /// As soon as the backing has it.
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
    /// The front end's name for it, handed back in the reply.
    pub id: RequestId,
    /// Which disk.
    pub disk: DiskId,
    /// What to do.
    pub op: Op,
    /// First byte on the disk. 0 for a flush.
    pub offset: u64,
    /// Bytes. 0 for a flush, 1 to `REQUEST_BYTES_MAX` otherwise.
    pub len: u64,
    /// Payload; see the module's text. `None` exactly when `op.has_buffer()` is false.
    pub buffer: Option<BufferId>,
    /// What it leaves behind.
    pub promote: Promote,
    /// Whose the buffer is.
    pub memory: PayloadMemory,
}

impl Request {
    /// Does it read without leaving a trace in the cache?
    #[inline]
    pub fn passes_by(&self) -> bool {
        match self.op {
            Op::Read | Op::Prefetch => self.promote == Promote::Never,
            Op::ReadForPeer => true,
            _ => false,
        }
    }
}

/// The answer to one request. Every accepted request gets exactly one, unless it is declined.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Reply {
    /// As in the request.
    pub id: RequestId,
    /// As in the request.
    pub disk: DiskId,
    /// What the guest is told.
    pub result: Result<(), IoError>,
    /// How it was classified.
    pub outcome: Outcome,
}

/// Part of a buffer, bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BufferSlice {
    /// Which buffer.
    pub id: BufferId,
    /// First byte in it.
    pub offset: u32,
    /// Bytes.
    pub len: u32,
}

/// Payload to be copied, see [`Engine::poll_copy`](crate::Engine::poll_copy): between memory and a buffer, whole sectors; or from one
/// buffer to another, or zeroes to a buffer. It cannot fail.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BufferCopy {
    /// Where it is.
    pub from: CopyEnd,
    /// Where it is to be, too: not in the same buffer.
    pub to: CopyEnd,
    /// Bytes.
    pub len: u32,
}

/// One end of a [`BufferCopy`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CopyEnd {
    /// The memory area of a disk, from this byte on; a multiple of a sector.
    Memory {
        /// Whose.
        disk: DiskId,
        /// First byte in the area.
        offset: u64,
    },
    /// A buffer, from this byte on.
    Buffer {
        /// Which.
        id: BufferId,
        /// First byte in it.
        offset: u32,
    },
    /// Nothing but zeroes; only to copy from.
    Zeroes,
}

/// Where an I/O goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Target {
    /// The backing of a disk.
    Backing(DiskId),
    /// A flash device; offsets count from the device's first byte, superblock included.
    Flash(DeviceId),
}

/// What an I/O does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum IoOp {
    /// Fill `slice` from the target. A backing read that crosses the disk's end is shortened by
    /// the engine; the buffer's tail must read as zeroes (storage zeroes buffers' tails).
    Read,
    /// Write `slice` to the target.
    Write(Durability),
    /// Make all completed writes durable.
    Flush,
    /// Forget the range.
    Discard,
    /// Zero the range.
    WriteZeroes(Zeroing),
    /// Write the pages that [`Engine::journal_pages`](crate::Engine::journal_pages) shows, for as long as the I/O is in
    /// flight.
    WriteJournal,
}

/// One I/O for storage to perform. It is answered by exactly one `handle_completion`.
///
/// Reads and writes of flash are sector-aligned in offset, length and buffer offset. Backing I/O is
/// sector-aligned for reads, except at the disk's end, and as the guest sent it for writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Io {
    /// Name it in the completion.
    pub id: IoId,
    /// Where.
    pub target: Target,
    /// What.
    pub op: IoOp,
    /// First byte on the target. 0 for a flush.
    pub offset: u64,
    /// Bytes. 0 for a flush. Equals the slice's length when there is one.
    pub len: u64,
    /// Payload of reads and writes.
    pub slice: Option<BufferSlice>,
}

/// Why an I/O, or the request it served, failed. Each variant is one reaction of the guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum IoError {
    /// The device could not: EIO.
    Failed,
    /// No room left on the backing: ENOSPC.
    NoSpace,
    /// The target cannot do this operation: ENOTSUP.
    Unsupported,
    /// The request makes no sense for this disk (range): EINVAL.
    Invalid,
    /// The disk is read-only: EPERM.
    ReadOnly,
    /// The disk is being removed or the daemon ends, or another host owns it: ESHUTDOWN.
    ShuttingDown,
    /// Another host asks for what is not in this one's flash. Guests never see it.
    NotCached,
}
