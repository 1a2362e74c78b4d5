//! NBD commands in flight: their state, and the engine requests that they become.

use hob_engine::REQUEST_BYTES_MAX;
use hob_engine::io::{BufferSlice, Durability, Op, PayloadMemory, Promote, Request, Zeroing};
use hob_engine::units::{BufferId, DiskId, RequestId};
use hob_nbd::{Command, CommandFlags};

use crate::payload::{Payload, alloc_for, slice_for};

/// Maximum length of one piece of an NBD prefetch, bytes. The prefetched data is read into a buffer
/// whose contents are not used.
const PREFETCH_BYTES_MAX: u64 = 1 << 20;

/// One NBD command that is not answered yet.
#[derive(Debug)]
pub(super) struct InFlight {
    pub(super) header: hob_nbd::Request,
    /// Offset on the disk of the command's current piece, which the engine executes now or receives
    /// next, bytes.
    offset: u64,
    len: u64,
    /// Size of the command's buffer in bytes.
    pub(super) buffer_bytes: usize,
    /// The engine's reference to the command's buffer, until the engine request is created.
    pub(super) buffer: Option<BufferId>,
    /// The connection's reference to the buffer, for sending the reply.
    pub(super) reply_buffer: Option<BufferId>,
}

impl InFlight {
    pub(super) fn new(header: &hob_nbd::Request) -> Self {
        let mut command = InFlight {
            header: *header,
            offset: header.offset,
            len: 0,
            buffer_bytes: 0,
            buffer: None,
            reply_buffer: None,
        };
        command.len = command.piece_len();
        command
    }

    pub(super) fn needs_buffer(&self) -> bool {
        matches!(self.header.command, Command::Read | Command::Write | Command::Cache)
    }

    /// Allocates the command's buffer. Returns false if no buffer is free.
    pub(super) fn alloc(&mut self, payload: &mut impl Payload) -> bool {
        let Some((id, bytes)) = alloc_for(payload, self.offset, self.len) else { return false };
        if self.header.command == Command::Read {
            payload.retain(id);
            self.reply_buffer = Some(id);
        }
        (self.buffer, self.buffer_bytes) = (Some(id), bytes);
        true
    }

    /// Returns the part of the buffer that holds the command's bytes.
    pub(super) fn payload_slice(&self) -> BufferSlice {
        let id = self.buffer.or(self.reply_buffer).expect("a command with payload has a buffer");
        slice_for(id, self.offset, self.len)
    }

    /// Returns the engine request for the command's current piece. The engine gets one reference to
    /// the buffer.
    pub(super) fn request(&mut self, id: RequestId, disk: DiskId, promote: Promote) -> Request {
        let flags = self.header.flags;
        let durability =
            if flags.contains(CommandFlags::FUA) { Durability::Durable } else { Durability::Volatile };
        let op = match self.header.command {
            Command::Read => Op::Read,
            Command::Write => Op::Write(durability),
            Command::Flush => Op::Flush,
            Command::Trim => Op::Discard(durability),
            Command::Cache => Op::Prefetch,
            Command::WriteZeroes => Op::WriteZeroes(durability, zeroing(flags)),
            other => unreachable!("{other:?} is not the engine's"),
        };
        Request {
            id,
            disk,
            op,
            offset: self.offset,
            len: self.len,
            buffer: self.buffer.take(),
            promote,
            memory: PayloadMemory::Daemon,
        }
    }

    /// Moves to the command's next piece. Returns false if there is none.
    pub(super) fn advance(&mut self) -> bool {
        self.offset += self.len;
        self.len = self.piece_len();
        let more = self.len > 0 && self.header.command != Command::Flush;
        if !more {
            self.offset = self.header.offset;
            self.len = u64::from(self.header.length);
        }
        more
    }

    fn piece_len(&self) -> u64 {
        let left = self.header.offset + u64::from(self.header.length) - self.offset;
        let max = match self.header.command {
            Command::Cache => PREFETCH_BYTES_MAX,
            _ => REQUEST_BYTES_MAX,
        };
        left.min(max)
    }
}

fn zeroing(flags: CommandFlags) -> Zeroing {
    match (flags.contains(CommandFlags::FAST_ZERO), flags.contains(CommandFlags::NO_HOLE)) {
        (false, false) => Zeroing::MayUnmap,
        (false, true) => Zeroing::KeepAllocated,
        (true, false) => Zeroing::FastMayUnmap,
        (true, true) => Zeroing::FastKeepAllocated,
    }
}
