//! One NBD connection in its transmission phase.
//!
//! # Call order
//! When something can be received: [`Connection::poll_receive`] says where to. Received bytes go to
//! [`Connection::handle_received`] or [`Connection::handle_payload`]. Then [`Connection::poll_request`]
//! and [`Connection::poll_status`] yield what the engine and the backing are asked, their answers go to
//! [`Connection::handle_reply`] and [`Connection::handle_status`], and [`Connection::poll_send`] yields
//! what to send, one list at a time, until [`Connection::handle_sent`] says it is gone.
//!
//! # Limits
//! A connection has at most [`COMMANDS_MAX`] commands in flight; it stops receiving at that number, while
//! there is no buffer for the next command, and while its client leaves answers unread. What is malformed
//! is answered with the protocol's error, or, where the stream can no longer be followed, ends this
//! connection alone.
//!
//! # Buffers
//! A payload buffer has one reference for the engine, which the shard loop drops when the engine says
//! so; the buffer of a read has a second one, which the connection drops when the data is sent.

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
use command::{InFlight, Table};

/// Most commands of one connection in flight.
pub const COMMANDS_MAX: usize = 2048;

/// Pieces of replies that may wait for the socket; a client that does not read its answers is not
/// listened to either.
const OUTBOX_PIECES_MAX: usize = 4096;

/// Bytes of such replies besides payload, however few pieces they are. What is in flight by then adds its
/// own: little, but for the answers to status queries.
const OUTBOX_HEAD_BYTES_MAX: usize = 1 << 20;

/// Status queries that are being answered: each may bring hundreds of kilobytes.
const QUERIES_MAX: usize = 4;

/// Payload that is received at once. Of a client that is slow one can tell thereby that it is not silent.
const PAYLOAD_BYTES_MAX: u32 = 1 << 20;

/// What to receive next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Receive {
    /// Bytes, as many as come.
    Bytes,
    /// Exactly this payload; there may be more.
    Payload(BufferSlice),
    /// Nothing before some command in flight has been answered.
    Pause,
    /// Nothing before there is room for a buffer.
    AwaitBuffer,
    /// Nothing any more.
    Nothing,
}

/// A question about a range: what is allocated there, and what do further metadata contexts say of it?
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StatusQuery {
    /// Names it in the answer.
    pub id: RequestId,
    /// First byte.
    pub offset: u64,
    /// Bytes.
    pub len: u64,
    /// The backing is to be asked. Otherwise the client has chosen other contexts only.
    pub allocation: bool,
}

/// The answer to a [`StatusQuery`]: extents from its offset on, one at least of each.
#[derive(Clone, Copy, Debug)]
pub struct Status<'a> {
    /// What is allocated; not looked at where that was not asked.
    pub allocation: &'a [Extent],
    /// What each of [`Connection::contexts`] says, in their order.
    pub maps: &'a [Vec<Extent>],
}

/// See the module's text.
pub struct Connection {
    negotiated: Negotiated,
    disk: DiskId,
    /// Upper half of the request ids of this connection.
    number: u32,
    /// What its reads leave behind in the cache.
    promote: Promote,
    commands: Table,
    input: Input,
    requests: VecDeque<Request>,
    queries: VecDeque<StatusQuery>,
    /// Queries that were handed out and are not answered.
    queries_asked: usize,
    /// Replies that wait for the socket, and the buffers they send from.
    outbox: Gather,
    outbox_buffers: Vec<BufferId>,
    sending_buffers: Vec<BufferId>,
    sending: bool,
    /// Bytes of the buffers of its commands, until their answers are sent.
    held_bytes: usize,
    /// Of these, in `outbox_buffers` and in `sending_buffers`.
    outbox_bytes: usize,
    sending_bytes: usize,
    /// Memory of a list that was sent, for the next one.
    spare: Gather,
    /// No further command is begun.
    resting: bool,
    /// Why the connection ended early, for the log.
    fault: Option<String>,
}

/// What the next received bytes are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Input {
    Header,
    /// A header is decoded and valid, but there was no buffer for it.
    Stuck(hob_nbd::Request),
    /// Payload of a write: what is still missing of it.
    Payload {
        command: u32,
        missing: BufferSlice,
    },
    /// Payload of a refused write: bytes to read past. The refusal is sent behind the last one: clients, libnbd among them, take an
    /// answer that comes while they send for the end of the stream's order.
    Skip {
        left: u32,
        refused: hob_nbd::Request,
        code: ErrorCode,
    },
    /// The client said goodbye: answer what is in flight.
    Finished,
    /// The socket is dead or the stream is out of step: nobody will read an answer.
    Dead,
}

impl Connection {
    /// A connection to `disk`. `number` is not that of another connection of the same engine.
    pub fn new(negotiated: Negotiated, disk: DiskId, number: u32, promote: Promote) -> Self {
        Connection {
            negotiated,
            disk,
            number,
            promote,
            commands: Table::default(),
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

    /// Whose connection a request is.
    pub fn number_of(id: RequestId) -> u32 {
        (id.0 >> 32) as u32
    }

    /// The disk it serves.
    pub fn disk(&self) -> DiskId {
        self.disk
    }

    /// The export that its client asked for; empty for the default one.
    pub fn export(&self) -> &str {
        &self.negotiated.export
    }

    /// Bytes of buffers that its commands hold, until their answers are sent.
    pub fn held_bytes(&self) -> usize {
        self.held_bytes
    }

    /// What was agreed with its client.
    pub fn negotiated(&self) -> &Negotiated {
        &self.negotiated
    }

    /// From now on begins no command, and ends those that it has begun; or goes on as usual.
    pub fn set_resting(&mut self, resting: bool) {
        self.resting = resting;
    }

    /// Is it at rest, so that whoever goes on with its socket and with the bytes that were received and not used up goes on where it stands?
    pub fn is_at_rest(&self) -> bool {
        self.resting
            && self.input == Input::Header
            && self.commands.len() == 0
            && self.outbox.is_empty()
            && !self.sending
    }

    /// Is the rest of a command on its way from the client?
    pub fn awaits_payload(&self) -> bool {
        matches!(self.input, Input::Payload { .. } | Input::Skip { .. })
    }

    /// Where the next bytes go.
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

    /// Takes received bytes in and returns how many it has used up. The others are to come again, with
    /// what was received behind them: fewer than a header's, or after `poll_receive` said to wait.
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

    /// The payload that `poll_receive` asked for is there. Fewer bytes than asked for mean that the
    /// client is gone.
    pub fn handle_payload(&mut self, received: usize, payload: &mut impl Payload) {
        match self.input {
            Input::Payload { missing, .. } if received == next_of(missing).len as usize => {
                self.payload_arrived(received as u32);
            }
            _ => self.abort("the client left in the middle of a write", payload),
        }
    }

    /// There may be room for a buffer again. True if that got the connection going.
    pub fn retry_alloc(&mut self, payload: &mut impl Payload) -> bool {
        if let Input::Stuck(request) = self.input {
            self.input = Input::Header;
            self.start(request, payload);
        }
        !matches!(self.input, Input::Stuck(_))
    }

    /// The next request for the engine.
    #[inline]
    pub fn poll_request(&mut self) -> Option<Request> {
        self.requests.pop_front()
    }

    /// The client's command that a request of `poll_request` begins; `None` if the request is a
    /// later piece of one. To be asked before the request is answered.
    pub fn command_begun_by(&self, request: &Request) -> Option<&hob_nbd::Request> {
        let command = self.commands.get(request.id.0 as u32);
        (command.header.offset == request.offset).then_some(&command.header)
    }

    /// Takes back a request that the engine has no room for.
    pub fn unpoll_request(&mut self, request: Request) {
        self.requests.push_front(request);
    }

    /// The next question for the backing; none while there is no room for its answer.
    pub fn poll_status(&mut self) -> Option<StatusQuery> {
        if self.queries_asked >= QUERIES_MAX || self.is_outbox_full() {
            return None;
        }
        let query = self.queries.pop_front()?;
        self.queries_asked += 1;
        Some(query)
    }

    /// The engine's answer.
    pub fn handle_reply(&mut self, reply: &Reply, payload: &mut impl Payload) {
        let slot = reply.id.0 as u32;
        let command = self.commands.get_mut(slot);
        if reply.result.is_ok() && command.advance() {
            // A long command without payload goes on piece by piece.
            return self.issue(slot, payload);
        }
        let command = self.commands.remove(slot);
        self.held_bytes -= command.buffer_bytes;
        match self.input {
            Input::Dead => command.reply_buffer.into_iter().for_each(|id| payload.release(id)),
            _ => reply::push(self, &command, reply.result, payload),
        }
    }

    /// The metadata contexts that its client has chosen besides `base:allocation`.
    pub fn contexts(&self) -> &[String] {
        &self.negotiated.contexts
    }

    /// The range that a [`StatusQuery`] asked for which is not answered yet: offset and length.
    pub fn status_range(&self, id: RequestId) -> (u64, u64) {
        let header = &self.commands.get(id.0 as u32).header;
        (header.offset, u64::from(header.length))
    }

    /// The answer to a question, or why there is none.
    pub fn handle_status(&mut self, id: RequestId, status: Result<Status<'_>, IoError>) {
        let command = self.commands.remove(id.0 as u32);
        self.queries_asked -= 1;
        if self.input != Input::Dead {
            reply::push_status(self, &command, status);
        }
    }

    /// What to send next; `None` while the last list is being sent, or when there is nothing.
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

    /// The list is sent, or the socket is dead.
    pub fn handle_sent(&mut self, mut gather: Gather, sent: Result<(), ()>, payload: &mut impl Payload) {
        gather.clear();
        self.spare = gather;
        self.sending = false;
        self.sending_buffers.drain(..).for_each(|id| payload.release(id));
        self.held_bytes -= std::mem::take(&mut self.sending_bytes);
        if sent.is_err() {
            self.abort("the client does not read its answers", payload);
        }
    }

    /// The client is gone, or must go. What is in flight is still to be answered to this object.
    pub fn abort(&mut self, why: &str, payload: &mut impl Payload) {
        if self.input == Input::Dead {
            return;
        }
        self.fault.get_or_insert_with(|| why.to_owned());
        self.die(payload);
    }

    /// The client has closed the connection.
    pub fn hang_up(&mut self, payload: &mut impl Payload) {
        let is_clean = matches!(self.input, Input::Finished | Input::Header) && self.commands.len() == 0;
        if !is_clean {
            self.abort("the client left with commands in flight", payload);
        }
        self.die(payload);
    }

    fn die(&mut self, payload: &mut impl Payload) {
        if let Input::Payload { command, .. } = self.input {
            // It never reached the engine, whose reference is therefore ours.
            let command = self.commands.remove(command);
            payload.release(command.buffer.expect("a write has a buffer"));
            self.held_bytes -= command.buffer_bytes;
        }
        self.input = Input::Dead;
        self.outbox.clear();
        self.outbox_buffers.drain(..).for_each(|id| payload.release(id));
        self.held_bytes -= std::mem::take(&mut self.outbox_bytes);
        // Requests that the engine has not seen yet.
        for request in std::mem::take(&mut self.requests) {
            let command = self.commands.remove(request.id.0 as u32);
            self.held_bytes -= command.buffer_bytes;
            request.buffer.into_iter().chain(command.reply_buffer).for_each(|id| payload.release(id));
        }
        for query in std::mem::take(&mut self.queries) {
            self.commands.remove(query.id.0 as u32);
        }
    }

    /// Should the socket be closed? After a goodbye that is when everything is answered and sent.
    pub fn wants_close(&self) -> bool {
        match self.input {
            Input::Dead => true,
            Input::Finished => self.commands.len() == 0 && self.outbox.is_empty() && !self.sending,
            _ => false,
        }
    }

    /// May the object be dropped, once the socket is closed and no operation on it is in flight?
    pub fn is_over(&self) -> bool {
        self.wants_close() && self.commands.len() == 0 && !self.sending
    }

    /// Why it ended early.
    pub fn fault(&self) -> Option<&str> {
        self.fault.as_deref()
    }

    fn is_full(&self) -> bool {
        self.commands.len() >= COMMANDS_MAX || self.is_outbox_full()
    }

    fn is_outbox_full(&self) -> bool {
        // Replies without payload are one piece together.
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

    /// Begins a valid command: buffer, slot, request.
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

    /// Hands a command, or the next piece of it, to the engine.
    fn issue(&mut self, slot: u32, payload: &mut impl Payload) {
        let id = self.request_id(slot);
        let disk = self.disk;
        let command = self.commands.get_mut(slot);
        if command.needs_buffer() && command.buffer.is_none() {
            // The next piece of a prefetch. It is a hint: without room it may end early.
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

/// How the protocol calls the engine's errors.
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
