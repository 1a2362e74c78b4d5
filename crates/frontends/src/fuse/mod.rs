//! A disk as a file: one FUSE connection whose file system is a single regular file.
//!
//! # Call order
//! The caller passes each message read from /dev/fuse to [`Session::handle_message`]. If no buffer
//! is free, the caller passes the same message again later. [`Session::poll_request`] returns
//! requests for the engine, and [`Session::handle_reply`] takes the engine's replies.
//! [`Session::poll_answer`] returns answers to write to /dev/fuse. After writing an answer, the
//! caller calls [`Session::handle_written`].
//!
//! # Refused operations
//! The file has the disk's size. Operations that would change the file's size fail with EPERM.
//! Writes beyond the end of the file fail with ENOSPC. When the disk grows ([`Session::grow`]), the
//! kernel is notified to drop its cached size. The file is opened with direct I/O, so that the page
//! cache contains no data of the file. Programs that read the file therefore see changes that are
//! made through other front ends. The session answers a write when the engine has acknowledged the
//! write. Owner and permission bits can be changed, but are lost when the file is unmounted.
//!
//! # Times
//! Programs such as rsync copy a file only if its times have changed. All times of the file are
//! those of the last change of the disk that the session knows of ([`Session::note_changes`]).
//!
//! # Limits
//! At most [`COMMANDS_MAX`] requests wait for the engine's reply. When [`Session::is_full`] returns
//! true, the caller stops reading messages. The kernel is not trusted: a malformed message is
//! answered with EINVAL, an unknown one with ENOSYS.
//!
//! # Buffers
//! The shard loop drops the engine's reference to a buffer when the engine releases the buffer. The
//! session drops its own reference to the buffer of a read when the answer is written.

mod wire;

#[cfg(test)]
mod tests;

use std::collections::VecDeque;

use hob_engine::REQUEST_BYTES_MAX;
use hob_engine::io::{BufferSlice, Durability, IoError, Op, PayloadMemory, Promote, Reply, Request, Zeroing};
use hob_engine::units::{BufferId, DiskId, RequestId, sector_ceil};

use crate::payload::{Payload, alloc_for, slice_for};
use crate::slots::Slots;
pub use wire::{Answer, Attributes, MESSAGE_BYTES_MAX, TRANSFER_BYTES_MAX};
use wire::{Call, Change, Errno, WRITE_HEAD_BYTES};

/// Maximum number of FUSE requests that wait for the engine's reply.
pub const COMMANDS_MAX: usize = 2048;

/// Bit that is set in the session numbers of FUSE connections, so that their request ids differ
/// from those of other front ends.
pub const NUMBER_BIT: u32 = 1 << 30;

/// Result of [`Session::handle_message`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Taken {
    /// The message was answered, or its request waits for the engine.
    Done,
    /// No buffer is free; pass the message again later.
    NoBuffer,
}

/// A kernel request that the engine is working on.
#[derive(Clone, Copy, Debug)]
struct InFlight {
    unique: u64,
    op: Op,
    /// Offset of the piece of the request that the engine executes now, bytes.
    offset: u64,
    len: u64,
    /// Offset of the whole request, bytes.
    begin: u64,
    end: u64,
    /// The engine's reference to the buffer, until `poll_request` returns the request.
    buffer: Option<BufferId>,
    /// The session's reference to the buffer of a read.
    reply_buffer: Option<BufferId>,
    buffer_bytes: usize,
}

/// A whole FUSE command. A trace records the command once, even if the command has several pieces.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Command {
    /// The operation that the command requests.
    pub op: Op,
    /// Offset of the command's first byte, bytes.
    pub offset: u64,
    /// Length in bytes.
    pub len: u64,
}

/// State of one FUSE connection; see the module documentation.
#[derive(Debug)]
pub struct Session {
    disk: DiskId,
    /// Upper half of the request ids of this session.
    number: u32,
    file: Attributes,
    read_only: bool,
    promote: Promote,
    commands: Slots<InFlight>,
    requests: VecDeque<Request>,
    answers: VecDeque<(Answer, Option<BufferSlice>)>,
    held_bytes: usize,
    /// Number of changes of the disk when the times of the file were last determined.
    changes: Option<u64>,
    /// True if the connection has ended. Answers are then dropped.
    dead: bool,
}

impl Session {
    /// Creates a session for `disk`. `number` must be unique among the sessions of one engine, and
    /// below [`NUMBER_BIT`].
    pub fn new(disk: DiskId, number: u32, file: Attributes, read_only: bool) -> Session {
        Session {
            disk,
            number: number | NUMBER_BIT,
            file,
            read_only,
            promote: Promote::Usual,
            commands: Slots::default(),
            requests: VecDeque::new(),
            answers: VecDeque::new(),
            held_bytes: 0,
            changes: None,
            dead: false,
        }
    }

    /// Sets which reads through this session promote data into the cache.
    #[must_use]
    pub fn promoting(self, promote: Promote) -> Session {
        Session { promote, ..self }
    }

    /// Returns the session number in a request id; `None` if the request is not from a FUSE
    /// session.
    #[inline]
    pub fn number_of(id: RequestId) -> Option<u32> {
        let number = (id.0 >> 32) as u32;
        (number & NUMBER_BIT != 0).then_some(number & !NUMBER_BIT)
    }

    /// Returns the disk that this session serves.
    pub fn disk(&self) -> DiskId {
        self.disk
    }

    /// Returns the current attributes of the file.
    pub fn file(&self) -> &Attributes {
        &self.file
    }

    /// Returns true if the answer to `message` has the times of the file. The caller then calls
    /// [`note_changes`](Self::note_changes) before it passes the message.
    pub fn asks_for_times(message: &[u8]) -> bool {
        wire::asks_for_attributes(message)
    }

    /// Sets the times of the file to `now_ns`, nanoseconds since 1970, if `changes` differs from
    /// the last call. `changes` is the number of changes of the disk. The new times are always
    /// later than the previous ones: by 1 ns if the clock has not advanced or was set back.
    pub fn note_changes(&mut self, changes: u64, now_ns: u64) {
        if self.changes.replace(changes) != Some(changes) {
            self.file.time_ns = now_ns.max(self.file.time_ns.saturating_add(1));
        }
    }

    /// Sets the size of the disk, and so of the file, in bytes.
    pub fn grow(&mut self, size: u64) {
        self.file.size = size;
        self.answer(Answer::attributes_changed());
    }

    /// Returns true if the session refuses changes.
    pub fn is_read_only(&self) -> bool {
        self.read_only
    }

    /// Returns the total size of the buffers that this session's commands have, bytes.
    pub fn held_bytes(&self) -> usize {
        self.held_bytes
    }

    /// Returns the number of commands that the engine has not answered.
    pub fn in_flight(&self) -> usize {
        self.commands.len()
    }

    /// Returns true if the session has no work: every accepted message is answered, and
    /// [`poll_answer`](Self::poll_answer) has returned every answer.
    pub fn is_at_rest(&self) -> bool {
        self.in_flight() == 0 && self.requests.is_empty() && self.answers.is_empty()
    }

    /// Returns true if the caller should not read further messages now.
    pub fn is_full(&self) -> bool {
        self.dead || self.in_flight() >= COMMANDS_MAX || !self.requests.is_empty()
    }

    /// Handles one message from the kernel. If no buffer is free, the caller must pass the message
    /// again later.
    pub fn handle_message(&mut self, message: &[u8], payload: &mut impl Payload) -> Taken {
        let Some(header) = wire::decode_header(message) else {
            tracing::warn!(
                bytes = message.len(),
                "a FUSE message has no valid header, so hob cannot answer it"
            );
            return Taken::Done;
        };
        let unique = header.unique;
        let outcome = match wire::decode(header, message) {
            Ok(call) => self.call(unique, call, message, payload),
            Err(errno) => Err(errno),
        };
        match outcome {
            Ok(taken) => taken,
            Err(errno) => {
                self.answer(Answer::error(unique, errno));
                Taken::Done
            }
        }
    }

    fn call(
        &mut self,
        unique: u64,
        call: Call,
        message: &[u8],
        payload: &mut impl Payload,
    ) -> Result<Taken, Errno> {
        match call {
            Call::Read { offset, len } => Ok(self.read(unique, offset, len, payload)),
            Call::Write { offset, len, durable } => {
                let bytes = &message[WRITE_HEAD_BYTES..][..len as usize];
                self.write(unique, offset, durability(durable), bytes, payload)
            }
            Call::Fsync => {
                self.start(self.command(unique, Op::Flush, 0, 0));
                Ok(Taken::Done)
            }
            Call::Zero { offset, len, may_unmap, keeps_size } => {
                let zeroing = if may_unmap { Zeroing::MayUnmap } else { Zeroing::KeepAllocated };
                self.zero(unique, zeroing, offset, len, keeps_size)?;
                Ok(Taken::Done)
            }
            Call::Ignore => Ok(Taken::Done),
            other => {
                let answer = self.answer_at_once(unique, other)?;
                self.answer(answer);
                Ok(Taken::Done)
            }
        }
    }

    /// Returns the answer to a call that does not need the engine, or the errno of its refusal.
    fn answer_at_once(&mut self, unique: u64, call: Call) -> Result<Answer, Errno> {
        Ok(match call {
            Call::Init { minor, flags, readahead } => Answer::init(unique, minor, flags, readahead),
            Call::GetAttributes => Answer::attributes(unique, &self.file),
            Call::SetAttributes(change) => {
                self.change(change)?;
                Answer::attributes(unique, &self.file)
            }
            Call::Open => Answer::opened(unique),
            Call::Statfs => Answer::statfs(unique, self.file.size),
            _ => Answer::ok(unique),
        })
    }

    fn change(&mut self, change: Change) -> Result<(), Errno> {
        if change.size.is_some_and(|size| size != self.file.size) {
            return Err(Errno::PERM);
        }
        self.file.mode = change.mode.map_or(self.file.mode, |mode| mode & 0o7777);
        self.file.uid = change.uid.unwrap_or(self.file.uid);
        self.file.gid = change.gid.unwrap_or(self.file.gid);
        Ok(())
    }

    #[inline]
    fn read(&mut self, unique: u64, offset: u64, len: u32, payload: &mut impl Payload) -> Taken {
        let left = self.file.size.saturating_sub(offset);
        let len = u64::from(len).min(left);
        if len == 0 {
            self.answer(Answer::data(unique, 0));
            return Taken::Done;
        }
        let mut command = self.command(unique, Op::Read, offset, len);
        if !command.alloc(payload) {
            return Taken::NoBuffer;
        }
        let id = command.buffer.expect("it was just got");
        payload.retain(id);
        command.reply_buffer = Some(id);
        self.start(command);
        Taken::Done
    }

    fn write(
        &mut self,
        unique: u64,
        offset: u64,
        durability: Durability,
        bytes: &[u8],
        payload: &mut impl Payload,
    ) -> Result<Taken, Errno> {
        self.check_writable()?;
        let left = self.file.size.saturating_sub(offset);
        let len = (bytes.len() as u64).min(left);
        if bytes.is_empty() {
            self.answer(Answer::written(unique, 0));
            return Ok(Taken::Done);
        }
        if len == 0 {
            return Err(Errno::NOSPC);
        }
        let mut command = self.command(unique, Op::Write(durability), offset, len);
        if !command.alloc(payload) {
            return Ok(Taken::NoBuffer);
        }
        let slice = command.payload_slice(command.buffer.expect("it was just got"));
        payload.bytes_mut(slice).copy_from_slice(&bytes[..len as usize]);
        self.start(command);
        Ok(Taken::Done)
    }

    fn zero(
        &mut self,
        unique: u64,
        zeroing: Zeroing,
        offset: u64,
        len: u64,
        keeps_size: bool,
    ) -> Result<(), Errno> {
        self.check_writable()?;
        let left = self.file.size.saturating_sub(offset);
        if len > left && !keeps_size {
            return Err(Errno::NOSPC);
        }
        let op = Op::WriteZeroes(Durability::Volatile, zeroing);
        match len.min(left) {
            0 => self.answer(Answer::ok(unique)),
            len => self.start(self.command(unique, op, offset, len)),
        }
        Ok(())
    }

    fn check_writable(&self) -> Result<(), Errno> {
        if self.read_only { Err(Errno::ROFS) } else { Ok(()) }
    }

    fn command(&self, unique: u64, op: Op, offset: u64, len: u64) -> InFlight {
        InFlight {
            unique,
            op,
            offset,
            len: len.min(REQUEST_BYTES_MAX),
            begin: offset,
            end: offset + len,
            buffer: None,
            reply_buffer: None,
            buffer_bytes: 0,
        }
    }

    fn start(&mut self, command: InFlight) {
        self.held_bytes += command.buffer_bytes;
        let slot = self.commands.insert(command);
        self.issue(slot);
    }

    /// Queues the engine request for the next piece of a FUSE command.
    fn issue(&mut self, slot: u32) {
        let id = RequestId(u64::from(self.number) << 32 | u64::from(slot));
        let command = self.commands.get_mut(slot);
        let InFlight { op, offset, len, .. } = *command;
        let buffer = command.buffer.take();
        self.requests.push_back(Request {
            id,
            disk: self.disk,
            op,
            offset,
            len,
            buffer,
            promote: self.promote,
            memory: PayloadMemory::Daemon,
        });
    }

    /// Returns the next request for the engine; `None` if there is none.
    #[inline]
    pub fn poll_request(&mut self) -> Option<Request> {
        self.requests.pop_front()
    }

    /// Puts back a request that the engine has no room for.
    pub fn unpoll_request(&mut self, request: Request) {
        self.requests.push_front(request);
    }

    /// Returns the command whose first piece is `request`, for recording traces.
    pub fn command_begun_by(&self, request: &Request) -> Option<Command> {
        let command = self.commands.get(request.id.0 as u32);
        let len = command.end - command.begin;
        (request.offset == command.begin).then_some(Command { op: command.op, offset: command.begin, len })
    }

    /// Handles the engine's reply to a request of this session.
    #[inline]
    pub fn handle_reply(&mut self, reply: &Reply, payload: &mut impl Payload) {
        let slot = reply.id.0 as u32;
        if reply.result.is_ok() && self.commands.get_mut(slot).advance() {
            return self.issue(slot);
        }
        let command = self.commands.remove(slot);
        if self.dead {
            return self.forget(&command, payload);
        }
        match (reply.result, command.op) {
            (Ok(()), Op::Read) => {
                let slice = command.payload_slice(command.reply_buffer.expect("a read has one"));
                self.answers.push_back((Answer::data(command.unique, slice.len), Some(slice)));
                // The buffer stays allocated until the answer is written.
                return;
            }
            (Ok(()), Op::Write(_)) => self.answer(Answer::written(command.unique, command.len as u32)),
            (Ok(()), _) => self.answer(Answer::ok(command.unique)),
            (Err(error), _) => self.answer(Answer::error(command.unique, errno(error))),
        }
        self.forget(&command, payload);
    }

    fn forget(&mut self, command: &InFlight, payload: &mut impl Payload) {
        self.held_bytes -= command.buffer_bytes;
        command.reply_buffer.into_iter().for_each(|id| payload.release(id));
    }

    fn answer(&mut self, answer: Answer) {
        if !self.dead {
            self.answers.push_back((answer, None));
        }
    }

    /// Returns the next answer to write to /dev/fuse, and the payload to write after it; `None` if
    /// there is no answer.
    #[inline]
    pub fn poll_answer(&mut self) -> Option<(Answer, Option<BufferSlice>)> {
        self.answers.pop_front()
    }

    /// Releases the payload of an answer that was written, or that will never be written.
    #[inline]
    pub fn handle_written(&mut self, sent: Option<BufferSlice>, payload: &mut impl Payload) {
        if let Some(slice) = sent {
            self.held_bytes -= buffer_bytes(slice);
            payload.release(slice.id);
        }
    }

    /// Ends the session. The engine's replies to requests in flight must still be passed to this
    /// object.
    pub fn end(&mut self, payload: &mut impl Payload) {
        self.dead = true;
        for (_, slice) in std::mem::take(&mut self.answers) {
            self.handle_written(slice, payload);
        }
        for request in std::mem::take(&mut self.requests) {
            let command = self.commands.remove(request.id.0 as u32);
            request.buffer.into_iter().for_each(|id| payload.release(id));
            self.forget(&command, payload);
        }
    }

    /// Returns true if the session has ended.
    pub fn is_dead(&self) -> bool {
        self.dead
    }
}

impl InFlight {
    /// Allocates the command's buffer. Returns false if no buffer is free.
    #[inline]
    fn alloc(&mut self, payload: &mut impl Payload) -> bool {
        let Some((id, bytes)) = alloc_for(payload, self.offset, self.end - self.offset) else { return false };
        (self.buffer, self.buffer_bytes) = (Some(id), bytes);
        true
    }

    fn payload_slice(&self, id: BufferId) -> BufferSlice {
        slice_for(id, self.offset, self.len)
    }

    /// Moves to the next piece of the command. Returns false if the current piece is the last one.
    /// A piece has at most `REQUEST_BYTES_MAX` bytes.
    fn advance(&mut self) -> bool {
        let next = self.offset + self.len;
        if next >= self.end {
            return false;
        }
        self.offset = next;
        self.len = (self.end - next).min(REQUEST_BYTES_MAX);
        true
    }
}

/// Returns the size in bytes of the buffer that holds this payload.
fn buffer_bytes(payload: BufferSlice) -> usize {
    sector_ceil(u64::from(payload.offset) + u64::from(payload.len)) as usize
}

fn durability(durable: bool) -> Durability {
    if durable { Durability::Durable } else { Durability::Volatile }
}

/// Maps an engine error to an errno.
fn errno(error: IoError) -> Errno {
    match error {
        IoError::Failed | IoError::ShuttingDown | IoError::NotCached => Errno::IO,
        IoError::NoSpace => Errno::NOSPC,
        IoError::Unsupported => Errno::OPNOTSUPP,
        IoError::Invalid => Errno::INVAL,
        IoError::ReadOnly => Errno::ROFS,
    }
}
