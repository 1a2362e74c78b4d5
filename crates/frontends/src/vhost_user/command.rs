//! A driver's requests in flight: their state, and the engine requests that they become.

use hob_engine::REQUEST_BYTES_MAX;
use hob_engine::io::{BufferSlice, Op, PayloadMemory, Promote, Request};
use hob_engine::units::{BufferId, DiskId, RequestId, SECTOR_BYTES};

use super::chain::Segment;
use super::memory::GuestRun;
use crate::payload::{Payload, alloc_for, slice_for};
use crate::slots::Slots;

/// A request from a descriptor chain that was taken from its queue and decoded.
#[derive(Clone, Copy, Debug)]
pub(super) struct Command {
    pub(super) queue: u16,
    pub(super) head: u16,
    /// Guest address of the byte that receives the request's status.
    pub(super) status: u64,
    pub(super) op: Op,
    pub(super) offset: u64,
    pub(super) len: u64,
    /// Start of the request's current piece, which the engine executes now or receives next, as
    /// bytes after `offset`.
    at: u64,
    pub(super) buffer_bytes: usize,
    /// The engine's reference to the command's buffer, until the engine request is created.
    buffer: Option<BufferId>,
    /// The device's reference to the buffer, for copying a read to the guest after the reply.
    pub(super) reply_buffer: Option<BufferId>,
    /// Kind of memory of the buffer: the daemon's or the guest's.
    pub(super) memory: PayloadMemory,
}

impl Command {
    /// Creates a command that has no engine request yet.
    pub(super) fn new(queue: u16, head: u16, status: u64) -> Command {
        Command {
            queue,
            head,
            status,
            op: Op::Flush,
            offset: 0,
            len: 0,
            at: 0,
            buffer_bytes: 0,
            buffer: None,
            reply_buffer: None,
            memory: PayloadMemory::Daemon,
        }
    }

    /// Sets the command's operation and range.
    pub(super) fn wanting(self, op: Op, offset: u64, len: u64) -> Command {
        Command { op, offset, len, ..self }
    }

    /// Uses guest memory as the command's buffer if that is faster. Returns false otherwise.
    pub(super) fn adopt(&mut self, disk: DiskId, run: &GuestRun<'_>, payload: &mut impl Payload) -> bool {
        let is_whole = (self.offset | self.len).is_multiple_of(SECTOR_BYTES) && run.len() == self.len;
        if self.op != Op::Read || !is_whole || self.len > REQUEST_BYTES_MAX {
            return false;
        }
        self.buffer = payload.adopt(disk, self.offset, run);
        if self.buffer.is_some() {
            self.memory = PayloadMemory::Guest;
        }
        self.buffer.is_some()
    }

    /// Allocates the command's buffer in daemon memory. Returns false if no buffer is free.
    pub(super) fn alloc(&mut self, payload: &mut impl Payload) -> bool {
        let Some((id, bytes)) = alloc_for(payload, self.offset, self.len) else { return false };
        if self.memory == PayloadMemory::Guest {
            self.memory = PayloadMemory::DaemonAfterGuest;
        }
        if self.op == Op::Read {
            payload.retain(id);
            self.reply_buffer = Some(id);
        }
        (self.buffer, self.buffer_bytes) = (Some(id), bytes);
        true
    }

    /// Returns the part of the buffer that holds the guest's bytes.
    pub(super) fn payload_slice(&self) -> BufferSlice {
        let id = self.buffer.or(self.reply_buffer).expect("a command with payload has a buffer");
        slice_for(id, self.offset, self.len)
    }

    /// Returns the engine request for the command's current piece. The engine gets one reference to
    /// the buffer.
    pub(super) fn request(&mut self, id: RequestId, disk: DiskId, promote: Promote) -> Request {
        let (offset, len) = (self.offset + self.at, self.piece_len());
        Request {
            id,
            disk,
            op: self.op,
            offset,
            len,
            buffer: self.buffer.take(),
            promote,
            memory: self.memory,
        }
    }

    /// Moves to the command's next piece. Returns false if there is none.
    pub(super) fn advance(&mut self) -> bool {
        self.at += self.piece_len();
        self.at < self.len
    }

    fn piece_len(&self) -> u64 {
        (self.len - self.at).min(REQUEST_BYTES_MAX)
    }
}

/// The commands of a device, by slot, with the guest memory for the data that they read.
#[derive(Debug, Default)]
pub(super) struct Table {
    commands: Slots<(Command, Vec<Segment>)>,
    spare: Vec<Vec<Segment>>,
}

impl Table {
    pub(super) fn len(&self) -> usize {
        self.commands.len()
    }

    /// Stores a command. Returns its slot, and an empty list for reuse.
    pub(super) fn insert(&mut self, command: Command, segments: Vec<Segment>) -> (u32, Vec<Segment>) {
        (self.commands.insert((command, segments)), self.spare.pop().unwrap_or_default())
    }

    pub(super) fn get(&self, slot: u32) -> &Command {
        &self.commands.get(slot).0
    }

    /// Returns the guest memory segments of a command's data.
    pub(super) fn segments(&self, slot: u32) -> &[Segment] {
        &self.commands.get(slot).1
    }

    pub(super) fn get_mut(&mut self, slot: u32) -> &mut Command {
        &mut self.commands.get_mut(slot).0
    }

    pub(super) fn remove(&mut self, slot: u32) -> (Command, Vec<Segment>) {
        self.commands.remove(slot)
    }

    /// Stores an empty list, so that its memory can be reused.
    pub(super) fn give_back(&mut self, mut segments: Vec<Segment>) {
        segments.clear();
        self.spare.push(segments);
    }
}
