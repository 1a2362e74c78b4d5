//! The NBD connections of a shard: their sockets in the ring, their turns, their ends.

use std::collections::VecDeque;
use std::os::fd::OwnedFd;

use hob_engine::Engine;
use hob_engine::io::{BufferSlice, IoError, Op, Promote, Reply};
use hob_engine::units::{BufferId, DiskId, Instant, RequestId};
use hob_frontends::Payload;
use hob_frontends::nbd::{Connection, Receive, StatusQuery};
use hob_nbd::Extent;
use hob_nbd::server::handshake::Negotiated;
use hob_storage::buffers::Arena;
use hob_storage::ring::{Completion, Fd, FdClass, Returned, Ring, RxBuf};
use hob_storage::token::Token;

use super::recorders::Recorders;
use crate::daemon::listen::Place;

const RECEIVE: u16 = Token::CALLER;
const RECEIVE_PAYLOAD: u16 = Token::CALLER + 1;
const SEND: u16 = Token::CALLER + 2;

/// Room for one receive. Several small writes fit, and a great many reads.
const RECEIVE_BYTES: usize = 64 << 10;

/// A client that holds buffers without moving a byte for that long, while others wait for buffers,
/// is sent away. Nanoseconds.
const HOARDING_NS_MAX: u64 = 5_000_000_000;

/// A negotiated connection on its way in.
pub(super) struct Seat {
    pub(super) socket: OwnedFd,
    /// What its reads leave behind in the cache.
    pub(super) promote: Promote,
    /// Given back when the connection ends.
    pub(super) place: Place,
    /// Who reads.
    pub(super) whose: Whose,
}

/// Who is at the other end of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Whose {
    /// A guest, or another client.
    Guest,
    /// The host to which the disk goes, or went.
    Peer,
}

struct Client {
    connection: Connection,
    fd: Fd,
    whose: Whose,
    _place: Place,
    /// Here while no receive is in flight.
    rx: Option<RxBuf>,
    receiving_payload: bool,
    sending: bool,
    shut_down: bool,
    /// On the list of those to pump.
    listed: bool,
    /// On the list of those that wait for a buffer.
    waiting: bool,
    last_progress: Instant,
}

impl Client {
    fn is_idle(&self) -> bool {
        self.rx.is_some() && !self.receiving_payload && !self.sending
    }
}

/// All connections, by number.
#[derive(Default)]
pub(super) struct Clients {
    clients: Vec<Option<Client>>,
    free: Vec<u16>,
    /// Those with something to do.
    active: VecDeque<u16>,
    /// Those that wait for a buffer, longest first. Nobody else gets one before them.
    waiting: VecDeque<u16>,
    waiting_since: Instant,
    room: bool,
    /// The engine was full: these hold requests.
    refused: Vec<u16>,
    queries: VecDeque<(DiskId, StatusQuery)>,
    /// Who records the requests.
    pub(super) recorders: Recorders,
    /// Requests that one receive brings, a moving average in 256ths.
    batch: u32,
}

impl Clients {
    /// Takes a negotiated connection over.
    pub(super) fn attach(
        &mut self,
        now: Instant,
        ring: &mut Ring,
        disk: DiskId,
        seat: Seat,
        negotiated: Negotiated,
        leftover: &[u8],
    ) {
        let number = self.free.pop().unwrap_or_else(|| {
            self.clients.push(None);
            (self.clients.len() - 1) as u16
        });
        let connection = Connection::new(negotiated, disk, u32::from(number), seat.promote);
        let rx = RxBuf::with(RECEIVE_BYTES, leftover);
        self.clients[usize::from(number)] = Some(Client {
            connection,
            fd: ring.attach(seat.socket, FdClass::Socket),
            whose: seat.whose,
            _place: seat.place,
            rx: Some(rx),
            receiving_payload: false,
            sending: false,
            shut_down: false,
            listed: false,
            waiting: false,
            last_progress: now,
        });
        self.list(number);
    }

    /// Ends connections.
    pub(super) fn close(&mut self, why: &str, ring: &mut Ring, ends: impl Fn(&Connection) -> bool) {
        for number in 0..self.clients.len() {
            if let Some(client) = &mut self.clients[number]
                && ends(&client.connection)
            {
                client.connection.abort(why, &mut ungated(ring));
                self.list(number as u16);
            }
        }
    }

    /// Ends the connections of another host to a disk.
    pub(super) fn close_peers(&mut self, disk: DiskId, ring: &mut Ring) {
        for number in 0..self.clients.len() {
            if let Some(client) = &mut self.clients[number]
                && client.whose == Whose::Peer
                && client.connection.disk() == disk
            {
                client.connection.abort("the disk is another host's", &mut ungated(ring));
                self.list(number as u16);
            }
        }
    }

    /// A socket operation ended.
    pub(super) fn handle_completion(&mut self, now: Instant, completion: Completion, ring: &mut Ring) {
        let number = completion.token.owner();
        let client = self.clients[usize::from(number)].as_mut().expect("connections outlive their I/O");
        client.last_progress = now;
        let payload = &mut ungated(ring);
        match (completion.token.kind(), completion.returned) {
            (RECEIVE, Returned::Rx(rx)) => {
                client.rx = Some(rx);
                if completion.result <= 0 {
                    client.connection.hang_up(payload);
                }
            }
            (RECEIVE_PAYLOAD, _) => {
                client.receiving_payload = false;
                client.connection.handle_payload(completion.result.max(0) as usize, payload);
            }
            (SEND, Returned::Gather(gather)) => {
                client.sending = false;
                let sent = if completion.result < 0 { Err(()) } else { Ok(()) };
                client.connection.handle_sent(gather, sent, payload);
                self.room = true;
            }
            (kind, returned) => unreachable!("token kind {kind} came back with {returned:?}"),
        }
        self.list(number);
    }

    /// The engine answers.
    #[inline]
    pub(super) fn handle_reply(&mut self, reply: &Reply, ring: &mut Ring) {
        let number = Connection::number_of(reply.id) as u16;
        let client = self.clients[usize::from(number)].as_mut().expect("connections outlive their requests");
        client.connection.handle_reply(reply, &mut ungated(ring));
        self.list(number);
        self.retry_refused();
    }

    /// A backing answers.
    pub(super) fn handle_status(&mut self, id: u64, status: Result<&[Extent], IoError>) {
        let id = RequestId(id);
        let number = Connection::number_of(id) as u16;
        let client = self.clients[usize::from(number)].as_mut().expect("connections outlive their requests");
        client.connection.handle_status(id, status);
        self.list(number);
    }

    /// There may be room for a buffer, and in the engine.
    pub(super) fn buffer_released(&mut self) {
        self.room = true;
        self.retry_refused();
    }

    fn retry_refused(&mut self) {
        while let Some(number) = self.refused.pop() {
            self.list(number);
        }
    }

    /// The next question for a backing.
    pub(super) fn poll_status(&mut self) -> Option<(DiskId, StatusQuery)> {
        self.queries.pop_front()
    }

    /// Does no connection wait for a buffer?
    pub(super) fn nobody_waits(&self) -> bool {
        self.waiting.is_empty()
    }

    /// Do clients send requests before earlier ones are answered? A client that waits for each
    /// answer never has two requests in one receive.
    pub(super) fn requests_overlap(&self) -> bool {
        self.batch > 256 + 8
    }

    /// Lets every connection with something to do go on. False when there is none.
    pub(super) fn pump(&mut self, now: Instant, ring: &mut Ring, engine: &mut Engine) -> bool {
        if std::mem::take(&mut self.room) {
            self.serve_waiting(now, ring);
        }
        let mut progress = false;
        while let Some(number) = self.active.pop_front() {
            progress = true;
            self.pump_one(now, number, ring, engine);
        }
        progress
    }

    fn pump_one(&mut self, now: Instant, number: u16, ring: &mut Ring, engine: &mut Engine) {
        let client = self.clients[usize::from(number)].as_mut().expect("listed connections exist");
        client.listed = false;
        let connection = &mut client.connection;
        let mut gate = Gate::new(ring, connection.held_bytes(), self.waiting.is_empty());
        if !client.waiting {
            connection.retry_alloc(&mut gate);
        }
        if let Some(rx) = &mut client.rx {
            let used = connection.handle_received(rx.filled(), &mut gate);
            rx.consume(used);
        }
        let greedy = gate.greedy;
        let mut requests = 0;
        let mut recording = self.recorders.of(connection.disk());
        while let Some(mut request) = connection.poll_request() {
            requests += 1;
            if client.whose == Whose::Peer && request.op == Op::Read {
                request.op = Op::ReadForPeer;
            }
            if let Err(request) = engine.handle_request(now, request) {
                connection.unpoll_request(request);
                self.refused.push(number);
                break;
            }
            if let Some(recording) = &mut recording
                && client.whose == Whose::Guest
            {
                recording.note(connection.command_begun_by(&request));
            }
        }
        while let Some(query) = connection.poll_status() {
            self.queries.push_back((connection.disk(), query));
        }
        if requests > 0 {
            self.batch = (self.batch * 15 + requests * 256) / 16;
        }
        if let Some(gather) = connection.poll_send() {
            client.sending = true;
            ring.send(Token::new(SEND, number, 0), client.fd, gather);
        }
        self.receive(now, number, ring, greedy);
        self.close_ended(number, ring);
    }

    /// Starts what the connection wants to receive. One that has its share of the buffers waits for
    /// its own answers to leave, not for others.
    fn receive(&mut self, now: Instant, number: u16, ring: &mut Ring, greedy: bool) {
        let client = self.clients[usize::from(number)].as_mut().expect("listed connections exist");
        if client.receiving_payload || client.rx.is_none() {
            return;
        }
        match client.connection.poll_receive() {
            // Commands came in while there was no room for their answers.
            Receive::Bytes if client.rx.as_ref().is_some_and(|rx| rx.room() == 0) => self.list(number),
            Receive::Bytes => {
                let rx = client.rx.take().expect("checked");
                ring.recv(Token::new(RECEIVE, number, 0), client.fd, rx);
            }
            Receive::Payload(slice) => {
                client.receiving_payload = true;
                ring.recv_into(Token::new(RECEIVE_PAYLOAD, number, 0), client.fd, slice);
            }
            Receive::AwaitBuffer if !client.waiting && !greedy => {
                client.waiting = true;
                if self.waiting.is_empty() {
                    self.waiting_since = now;
                }
                self.waiting.push_back(number);
            }
            Receive::AwaitBuffer | Receive::Pause | Receive::Nothing => {}
        }
    }

    /// Closes a connection that is at its end, and forgets it when nothing of it is in flight.
    fn close_ended(&mut self, number: u16, ring: &mut Ring) {
        let slot = &mut self.clients[usize::from(number)];
        let client = slot.as_mut().expect("listed connections exist");
        if !client.connection.wants_close() {
            return;
        }
        if !client.shut_down {
            client.shut_down = true;
            ring.shutdown(client.fd);
        }
        if client.is_idle() && client.connection.is_over() {
            if let Some(fault) = client.connection.fault() {
                tracing::info!(disk = client.connection.disk().0, "connection ended early: {fault}");
            }
            ring.detach(client.fd);
            if client.waiting {
                self.waiting.retain(|waiting| *waiting != number);
            }
            self.refused.retain(|refused| *refused != number);
            *slot = None;
            self.free.push(number);
        }
    }

    /// Gives buffers to those that wait, in their order, as far as there is room.
    fn serve_waiting(&mut self, now: Instant, ring: &mut Ring) {
        while let Some(number) = self.waiting.front().copied() {
            let client = self.clients[usize::from(number)].as_mut().expect("waiting connections exist");
            let mut gate = Gate::new(ring, client.connection.held_bytes(), true);
            if !client.connection.retry_alloc(&mut gate) && !gate.greedy {
                return;
            }
            client.waiting = false;
            client.last_progress = now;
            self.waiting.pop_front();
            self.waiting_since = now;
            self.list(number);
        }
    }

    /// When to look for clients that hoard buffers.
    pub(super) fn poll_timeout(&self) -> Option<Instant> {
        (!self.waiting.is_empty()).then(|| self.waiting_since + HOARDING_NS_MAX)
    }

    /// Sends away clients that hold buffers without moving a byte while others wait.
    pub(super) fn handle_timeout(&mut self, now: Instant, ring: &mut Ring) {
        self.waiting_since = now;
        for number in 0..self.clients.len() {
            if let Some(client) = &mut self.clients[number]
                && (client.receiving_payload || client.sending)
                && now - client.last_progress >= HOARDING_NS_MAX
                && !client.shut_down
            {
                client.shut_down = true;
                tracing::warn!(
                    "a client holds buffers and does not move a byte while others wait: closing it"
                );
                ring.shutdown(client.fd);
            }
        }
    }

    fn list(&mut self, number: u16) {
        let client = self.clients[usize::from(number)].as_mut().expect("only connections are listed");
        if !client.listed {
            client.listed = true;
            self.active.push_back(number);
        }
    }
}

/// A request of at most that many bytes is small: it does not queue behind large ones.
const SMALL_BYTES_MAX: usize = 1 << 20;

/// The part of the arena that large requests must leave to small ones.
const RESERVE_SHARE: usize = 16;

/// The arena as one connection sees it.
///
/// A connection may hold as many bytes as are free beside it, and large requests leave a sixteenth.
/// So whatever greedy clients ask for, there is always something left for who asks for little.
pub(super) struct Gate<'a> {
    arena: &'a mut Arena,
    /// Nobody waits for a large buffer already.
    open: bool,
    held_bytes: usize,
    /// It was refused for what it holds.
    greedy: bool,
}

impl Gate<'_> {
    /// For one who holds so much already.
    pub(super) fn new(ring: &mut Ring, held_bytes: usize, open: bool) -> Gate<'_> {
        Gate { arena: ring.arena_mut(), open, held_bytes, greedy: false }
    }

    /// For giving buffers back.
    pub(super) fn ungated(ring: &mut Ring) -> Gate<'_> {
        ungated(ring)
    }
}

/// For giving buffers back.
pub(super) fn ungated(ring: &mut Ring) -> Gate<'_> {
    Gate { arena: ring.arena_mut(), open: true, held_bytes: 0, greedy: false }
}

impl Payload for Gate<'_> {
    fn alloc(&mut self, len: usize) -> Option<BufferId> {
        let free = self.arena.capacity() - self.arena.used();
        self.greedy = self.held_bytes > 0 && self.held_bytes + len > free;
        let leaves_enough = free >= len + self.arena.capacity() / RESERVE_SHARE;
        let has_turn = len <= SMALL_BYTES_MAX || (self.open && leaves_enough);
        if self.greedy || !has_turn {
            return None;
        }
        let id = self.arena.alloc(len)?;
        self.held_bytes += len;
        Some(id)
    }
    fn retain(&mut self, id: BufferId) {
        self.arena.retain(id);
    }
    fn release(&mut self, id: BufferId) {
        self.arena.release(id);
    }
    fn bytes(&self, slice: BufferSlice) -> &[u8] {
        self.arena.slice(slice)
    }
    fn bytes_mut(&mut self, slice: BufferSlice) -> &mut [u8] {
        self.arena.slice_mut(slice)
    }
}
