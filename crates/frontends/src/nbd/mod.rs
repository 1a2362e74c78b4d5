//! One NBD connection in its transmission phase.
//!
//! # Call order
//! [`Connection::poll_receive`] returns where to receive the next bytes. The caller passes received
//! bytes to [`Connection::handle_received`] or [`Connection::handle_payload`].
//! [`Connection::poll_request`] and [`Connection::poll_status`] return requests for the engine and
//! status queries for the backing. The results go to [`Connection::handle_reply`] and
//! [`Connection::handle_status`]. [`Connection::poll_send`] returns one list of bytes to send, and
//! the next list after [`Connection::handle_sent`].
//!
//! # Limits
//! A connection has at most [`COMMANDS_MAX`] commands in flight. The connection receives no further
//! command in four cases: it has this many commands in flight, its last command waits for a free
//! buffer, its client does not read replies, or the connection is quiesced. A malformed command
//! gets an error reply. If the stream can no longer be parsed, only this connection ends.
//!
//! # Buffers
//! The engine has one reference to a payload buffer. The shard loop drops that reference when the
//! engine releases the buffer. The connection has a second reference to the buffer of a read, and
//! drops it when the data was sent.

mod command;
mod reply;
#[cfg(test)]
mod tests;

use std::collections::VecDeque;

use hob_engine::gather::Gather;
use hob_engine::io::{BufferSlice, IoError, Promote, Reply, Request};
use hob_engine::units::{BufferId, DiskId, RequestId};
use hob_nbd::server::handshake::Negotiated;
use hob_nbd::server::request::{Refusal, decode_request, validate};
use hob_nbd::wire::REQUEST_BYTES;
use hob_nbd::{Command, ErrorCode, Extent};

use crate::payload::Payload;
use crate::slots::Slots;
use command::InFlight;

/// Maximum number of commands in flight per connection.
pub const COMMANDS_MAX: usize = 2048;

/// Maximum number of reply pieces that wait for the socket. Above this number, the connection
/// receives nothing until the client reads replies.
const OUTBOX_PIECES_MAX: usize = 4096;

/// Maximum total size of the replies that wait for the socket, without payload, bytes. Replies to
/// commands already in flight may exceed this size.
const OUTBOX_HEAD_BYTES_MAX: usize = 1 << 20;

/// Maximum number of status queries in progress. The reply to a status query can have hundreds of
/// kilobytes.
const QUERIES_MAX: usize = 4;

/// Maximum payload of one receive in bytes. Short receives show that a slow client is still active.
const PAYLOAD_BYTES_MAX: u32 = 1 << 20;

/// Result of `poll_receive`: data that the caller should receive next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Receive {
    /// Receive any number of bytes.
    Bytes,
    /// Receive exactly this payload; more payload may follow it.
    Payload(BufferSlice),
    /// Receive nothing for now: too many commands are in flight, too many replies wait for the
    /// socket, or the connection is quiesced.
    Pause,
    /// Receive nothing until a buffer is free for the command that was received last.
    AwaitBuffer,
    /// Receive nothing more, because the connection is ending.
    Nothing,
}

/// A query for a range's allocation, and for the range's extents in other metadata contexts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StatusQuery {
    /// Id of the status query; its answer has the same id.
    pub id: RequestId,
    /// Offset of the range's first byte, bytes.
    pub offset: u64,
    /// Length in bytes.
    pub len: u64,
    /// True if the backing must report its allocation. If false, the client chose only other
    /// metadata contexts.
    pub allocation: bool,
}

/// The answer to a [`StatusQuery`]: extents from the query's offset on, at least one per context.
#[derive(Clone, Copy, Debug)]
pub struct Status<'a> {
    /// Extents of the backing's allocation; ignored if the query did not request them.
    pub allocation: &'a [Extent],
    /// Extents of each context in [`Connection::contexts`], in the same order.
    pub maps: &'a [Vec<Extent>],
}

/// State of one connection; see the module documentation.
pub struct Connection {
    negotiated: Negotiated,
    disk: DiskId,
    /// Upper half of the request ids of this connection.
    number: u32,
    /// Which reads of this connection promote data into the cache.
    promote: Promote,
    commands: Slots<InFlight>,
    input: Input,
    requests: VecDeque<Request>,
    queries: VecDeque<StatusQuery>,
    /// Number of status queries that were polled and are not answered.
    queries_asked: usize,
    /// Replies that wait for the socket, and the buffers that hold their payload.
    outbox: Gather,
    outbox_buffers: Vec<BufferId>,
    sending_buffers: Vec<BufferId>,
    sending: bool,
    /// Total size of the commands' buffers, bytes. A buffer counts until the reply to its command
    /// is sent.
    held_bytes: usize,
    /// Bytes of the buffers in `outbox_buffers` and `sending_buffers`.
    outbox_bytes: usize,
    sending_bytes: usize,
    /// The emptied list of the previous send. The next list reuses its memory.
    spare: Gather,
    /// True if the connection is quiesced: no new command starts.
    resting: bool,
    /// Why the connection ended early, for the log.
    fault: Option<String>,
}

/// Meaning of the next received bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Input {
    Header,
    /// A valid header was decoded, but its command waits for a free buffer.
    Stuck(hob_nbd::Request),
    /// Payload of a write, with the number of missing bytes.
    Payload {
        command: u32,
        missing: BufferSlice,
    },
    /// Payload of a refused write, with the number of bytes to discard. The connection sends the
    /// refusal after the last of these bytes, because clients such as libnbd accept no reply while
    /// they send.
    Skip {
        left: u32,
        refused: hob_nbd::Request,
        code: ErrorCode,
    },
    /// The client sent DISC. The connection ends after the commands in flight are answered.
    Finished,
    /// The socket is closed, or the stream cannot be parsed. No reply can be sent.
    Dead,
}

impl Connection {
    /// Creates a connection to `disk`. `number` must be unique among the connections of one engine.
    pub fn new(negotiated: Negotiated, disk: DiskId, number: u32, promote: Promote) -> Self {
        Connection {
            negotiated,
            disk,
            number,
            promote,
            commands: Slots::default(),
            input: Input::Header,
            requests: VecDeque::new(),
            queries: VecDeque::new(),
            queries_asked: 0,
            outbox: Gather::default(),
            outbox_buffers: Vec::new(),
            sending_buffers: Vec::new(),
            sending: false,
            held_bytes: 0,
            outbox_bytes: 0,
            sending_bytes: 0,
            spare: Gather::default(),
            resting: false,
            fault: None,
        }
    }

    /// Returns the connection number in a request id.
    pub fn number_of(id: RequestId) -> u32 {
        (id.0 >> 32) as u32
    }

    /// Returns the disk that this connection serves.
    pub fn disk(&self) -> DiskId {
        self.disk
    }

    /// Returns the export name that the client asked for; empty for the default export.
    pub fn export(&self) -> &str {
        &self.negotiated.export
    }

    /// Returns the total size of the buffers that the connection's commands have, bytes. A command
    /// has its buffer until its answer is sent.
    pub fn held_bytes(&self) -> usize {
        self.held_bytes
    }

    /// Returns the result of the negotiation.
    pub fn negotiated(&self) -> &Negotiated {
        &self.negotiated
    }

    /// Allows requests up to this size of the disk, which is larger than before.
    pub fn grow(&mut self, size_bytes: u64) {
        self.negotiated.info.size_bytes = size_bytes;
    }

    /// Quiesces the connection, or resumes it. A quiesced connection starts no command, and
    /// completes those in flight.
    pub fn set_resting(&mut self, resting: bool) {
        self.resting = resting;
    }

    /// Returns true if the connection is quiesced. Another object can then take over its socket and
    /// its unconsumed bytes.
    pub fn is_at_rest(&self) -> bool {
        self.resting
            && self.input == Input::Header
            && self.commands.len() == 0
            && self.outbox.is_empty()
            && !self.sending
    }

    /// Returns true if the payload of a command is still being received.
    pub fn awaits_payload(&self) -> bool {
        matches!(self.input, Input::Payload { .. } | Input::Skip { .. })
    }

    /// Returns where the caller should receive the next bytes.
    pub fn poll_receive(&self) -> Receive {
        match self.input {
            Input::Finished | Input::Dead => Receive::Nothing,
            Input::Stuck(_) => Receive::AwaitBuffer,
            Input::Payload { missing, .. } => Receive::Payload(next_of(missing)),
            Input::Header if self.resting => Receive::Pause,
            _ if self.is_full() => Receive::Pause,
            Input::Header | Input::Skip { .. } => Receive::Bytes,
        }
    }

    /// Handles received bytes and returns how many were consumed. The caller passes unconsumed
    /// bytes again, before newly received ones. Bytes stay unconsumed if they are shorter than a
    /// header, and while `poll_receive` returns `Pause` or `AwaitBuffer`.
    pub fn handle_received(&mut self, bytes: &[u8], payload: &mut impl Payload) -> usize {
        let mut at = 0;
        loop {
            let rest = &bytes[at..];
            match self.input {
                Input::Header if rest.len() >= REQUEST_BYTES && !self.is_full() && !self.resting => {
                    at += REQUEST_BYTES;
                    let header = rest[..REQUEST_BYTES].try_into().expect("the length was checked");
                    self.handle_header(header, payload);
                }
                Input::Skip { left, refused, code } => {
                    let used = rest.len().min(left as usize);
                    at += used;
                    let left = left - used as u32;
                    self.input = Input::Skip { left, refused, code };
                    if left == 0 {
                        self.input = Input::Header;
                        reply::push_error(self, &refused, code);
                    } else {
                        return at;
                    }
                }
                Input::Payload { missing, .. } => {
                    let used = rest.len().min(missing.len as usize);
                    at += used;
                    payload
                        .bytes_mut(BufferSlice { len: used as u32, ..missing })
                        .copy_from_slice(&rest[..used]);
                    self.payload_arrived(used as u32);
                    if used == rest.len() {
                        return at;
                    }
                }
                Input::Dead => return bytes.len(),
                Input::Header | Input::Stuck(_) | Input::Finished => return at,
            }
        }
    }

    /// Handles the payload that `poll_receive` requested. Fewer bytes mean that the client closed
    /// the connection.
    pub fn handle_payload(&mut self, received: usize, payload: &mut impl Payload) {
        match self.input {
            Input::Payload { missing, .. } if received == next_of(missing).len as usize => {
                self.payload_arrived(received as u32);
            }
            _ => self.abort("the client disconnected during a write", payload),
        }
    }

    /// Retries a failed buffer allocation. Returns true if the connection no longer waits for a
    /// buffer.
    pub fn retry_alloc(&mut self, payload: &mut impl Payload) -> bool {
        if let Input::Stuck(request) = self.input {
            self.input = Input::Header;
            self.start(request, payload);
        }
        !matches!(self.input, Input::Stuck(_))
    }

    /// Returns the next request for the engine; `None` if there is none.
    #[inline]
    pub fn poll_request(&mut self) -> Option<Request> {
        self.requests.pop_front()
    }

    /// Returns the client's command that a polled request begins; `None` if the request is a later
    /// piece. Call this function before the request is answered.
    pub fn command_begun_by(&self, request: &Request) -> Option<&hob_nbd::Request> {
        let command = self.commands.get(request.id.0 as u32);
        (command.header.offset == request.offset).then_some(&command.header)
    }

    /// Puts back a request that the engine has no room for.
    pub fn unpoll_request(&mut self, request: Request) {
        self.requests.push_front(request);
    }

    /// Returns the next query of block status, for the backing to answer. Returns `None` if there
    /// is none, while the maximum number of queries (`QUERIES_MAX`) is in progress, and while too
    /// many replies wait for the socket.
    pub fn poll_status(&mut self) -> Option<StatusQuery> {
        if self.queries_asked >= QUERIES_MAX || self.is_outbox_full() {
            return None;
        }
        let query = self.queries.pop_front()?;
        self.queries_asked += 1;
        Some(query)
    }

    /// Handles the engine's reply to a request of this connection.
    pub fn handle_reply(&mut self, reply: &Reply, payload: &mut impl Payload) {
        let slot = reply.id.0 as u32;
        let command = self.commands.get_mut(slot);
        if reply.result.is_ok() && command.advance() {
            // A long command without payload continues with its next piece.
            return self.issue(slot, payload);
        }
        let command = self.commands.remove(slot);
        self.held_bytes -= command.buffer_bytes;
        match self.input {
            Input::Dead => command.reply_buffer.into_iter().for_each(|id| payload.release(id)),
            _ => reply::push(self, &command, reply.result, payload),
        }
    }

    /// Returns the metadata contexts that the client chose in addition to `base:allocation`.
    pub fn contexts(&self) -> &[String] {
        &self.negotiated.contexts
    }

    /// Returns offset and length of a [`StatusQuery`] that is in progress.
    pub fn status_range(&self, id: RequestId) -> (u64, u64) {
        let header = &self.commands.get(id.0 as u32).header;
        (header.offset, u64::from(header.length))
    }

    /// Handles the answer to a status query, or its error.
    pub fn handle_status(&mut self, id: RequestId, status: Result<Status<'_>, IoError>) {
        let command = self.commands.remove(id.0 as u32);
        self.queries_asked -= 1;
        if self.input != Input::Dead {
            reply::push_status(self, &command, status);
        }
    }

    /// Returns the next list of bytes to send; `None` while another list is being sent, or if there
    /// is nothing to send.
    #[inline]
    pub fn poll_send(&mut self) -> Option<Gather> {
        if self.sending || self.outbox.is_empty() {
            return None;
        }
        self.sending = true;
        std::mem::swap(&mut self.outbox_buffers, &mut self.sending_buffers);
        self.sending_bytes = std::mem::take(&mut self.outbox_bytes);
        Some(std::mem::replace(&mut self.outbox, std::mem::take(&mut self.spare)))
    }

    /// Handles the end of a send. `sent` is an error if the socket failed.
    pub fn handle_sent(&mut self, mut gather: Gather, sent: Result<(), ()>, payload: &mut impl Payload) {
        gather.clear();
        self.spare = gather;
        self.sending = false;
        self.sending_buffers.drain(..).for_each(|id| payload.release(id));
        self.held_bytes -= std::mem::take(&mut self.sending_bytes);
        if sent.is_err() {
            self.abort("the client does not read its replies", payload);
        }
    }

    /// Ends the connection with a reason for the log. The engine's replies to requests in flight
    /// must still be passed to this object.
    pub fn abort(&mut self, why: &str, payload: &mut impl Payload) {
        if self.input == Input::Dead {
            return;
        }
        self.fault.get_or_insert_with(|| why.to_owned());
        self.die(payload);
    }

    /// Handles the end of the byte stream: the client closed the connection.
    pub fn hang_up(&mut self, payload: &mut impl Payload) {
        let is_clean = matches!(self.input, Input::Finished | Input::Header) && self.commands.len() == 0;
        if !is_clean {
            self.abort("the client disconnected with commands in flight", payload);
        }
        self.die(payload);
    }

    fn die(&mut self, payload: &mut impl Payload) {
        if let Input::Payload { command, .. } = self.input {
            // The engine has not seen the command, so the engine's buffer reference is dropped
            // here.
            let command = self.commands.remove(command);
            payload.release(command.buffer.expect("a write has a buffer"));
            self.held_bytes -= command.buffer_bytes;
        }
        self.input = Input::Dead;
        self.outbox.clear();
        self.outbox_buffers.drain(..).for_each(|id| payload.release(id));
        self.held_bytes -= std::mem::take(&mut self.outbox_bytes);
        // The engine has not received these requests, so their buffers are released here.
        for request in std::mem::take(&mut self.requests) {
            let command = self.commands.remove(request.id.0 as u32);
            self.held_bytes -= command.buffer_bytes;
            request.buffer.into_iter().chain(command.reply_buffer).for_each(|id| payload.release(id));
        }
        for query in std::mem::take(&mut self.queries) {
            self.commands.remove(query.id.0 as u32);
        }
    }

    /// Returns true if the socket should be closed. After DISC, all replies must have been sent.
    pub fn wants_close(&self) -> bool {
        match self.input {
            Input::Dead => true,
            Input::Finished => self.commands.len() == 0 && self.outbox.is_empty() && !self.sending,
            _ => false,
        }
    }

    /// Returns true if the connection object may be dropped, once the socket is closed and has no
    /// operation in flight.
    pub fn is_over(&self) -> bool {
        self.wants_close() && self.commands.len() == 0 && !self.sending
    }

    /// Returns why the connection ended early; `None` if it did not.
    pub fn fault(&self) -> Option<&str> {
        self.fault.as_deref()
    }

    fn is_full(&self) -> bool {
        self.commands.len() >= COMMANDS_MAX || self.is_outbox_full()
    }

    fn is_outbox_full(&self) -> bool {
        // Adjacent replies without payload form one piece, so the total size has a limit too.
        self.outbox.pieces.len() >= OUTBOX_PIECES_MAX || self.outbox.head.len() >= OUTBOX_HEAD_BYTES_MAX
    }

    fn handle_header(&mut self, header: &[u8; REQUEST_BYTES], payload: &mut impl Payload) {
        let request = match decode_request(header) {
            Ok(request) => request,
            Err(error) => return self.abort(&error.to_string(), payload),
        };
        match validate(&request, &self.negotiated) {
            Ok(()) if request.command == Command::Disconnect => self.input = Input::Finished,
            Ok(()) => self.start(request, payload),
            Err(Refusal::Close(error)) => self.abort(&error.to_string(), payload),
            Err(Refusal::Reply(code)) => match request.payload_len() {
                0 => reply::push_error(self, &request, code),
                left => self.input = Input::Skip { left, refused: request, code },
            },
        }
    }

    /// Starts a valid command: allocates its buffer and slot, and queues its engine request.
    fn start(&mut self, request: hob_nbd::Request, payload: &mut impl Payload) {
        let mut command = InFlight::new(&request);
        if command.needs_buffer() && !command.alloc(payload) {
            self.input = Input::Stuck(request);
            return;
        }
        self.held_bytes += command.buffer_bytes;
        let slot = self.commands.insert(command);
        match request.command {
            Command::Write => {
                let missing = self.commands.get_mut(slot).payload_slice();
                self.input = Input::Payload { command: slot, missing };
            }
            Command::BlockStatus => self.queries.push_back(StatusQuery {
                id: self.request_id(slot),
                offset: request.offset,
                len: u64::from(request.length),
                allocation: self.negotiated.base_allocation,
            }),
            _ => self.issue(slot, payload),
        }
    }

    fn payload_arrived(&mut self, bytes: u32) {
        let Input::Payload { command, missing } = &mut self.input else { unreachable!("asked for payload") };
        missing.offset += bytes;
        missing.len -= bytes;
        if missing.len == 0 {
            let slot = *command;
            self.input = Input::Header;
            let id = self.request_id(slot);
            let request = self.commands.get_mut(slot).request(id, self.disk, self.promote);
            self.requests.push_back(request);
        }
    }

    /// Queues the engine request for the next piece of a command.
    fn issue(&mut self, slot: u32, payload: &mut impl Payload) {
        let id = self.request_id(slot);
        let disk = self.disk;
        let command = self.commands.get_mut(slot);
        if command.needs_buffer() && command.buffer.is_none() {
            // A prefetch is a hint and may end early if no buffer is free.
            self.held_bytes -= command.buffer_bytes;
            if !command.alloc(payload) {
                let command = self.commands.remove(slot);
                return reply::push(self, &command, Ok(()), payload);
            }
            self.held_bytes += command.buffer_bytes;
        }
        let request = command.request(id, disk, self.promote);
        self.requests.push_back(request);
    }

    fn request_id(&self, slot: u32) -> RequestId {
        RequestId(u64::from(self.number) << 32 | u64::from(slot))
    }
}

fn next_of(missing: BufferSlice) -> BufferSlice {
    BufferSlice { len: missing.len.min(PAYLOAD_BYTES_MAX), ..missing }
}

/// Maps an engine error to a protocol error.
fn error_code(error: IoError) -> ErrorCode {
    match error {
        IoError::Failed => ErrorCode::Io,
        IoError::NoSpace => ErrorCode::NoSpc,
        IoError::Unsupported | IoError::NotCached => ErrorCode::NotSup,
        IoError::Invalid => ErrorCode::Inval,
        IoError::ReadOnly => ErrorCode::Perm,
        IoError::ShuttingDown => ErrorCode::Shutdown,
    }
}
