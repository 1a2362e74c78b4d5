//! The NBD connections of a shard: their socket I/O in the I/O ring, the order in which they are
//! served, and their end.

#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, VecDeque};
use std::os::fd::OwnedFd;

use hob_engine::Engine;
use hob_engine::io::{IoError, Op, Promote, Reply};
use hob_engine::units::{DiskId, Instant, RequestId, SessionId};
use hob_frontends::nbd::{Connection, Receive, Status, StatusQuery};
use hob_frontends::peer_process;
use hob_nbd::Extent;
use hob_nbd::server::handshake::Negotiated;
use hob_nbd::wire::REQUEST_BYTES;
use hob_storage::ring::{Completion, Fd, FdClass, Returned, Ring, RxBuf};
use hob_storage::token::Token;

use super::gate::{Gate, may_have_room, ungated};
use super::maps;
use super::recorders::Recorders;
use crate::api::{ClientAtRest, ConnectionPermit, Transport};

const RECEIVE: u16 = Token::CALLER;
const RECEIVE_PAYLOAD: u16 = Token::CALLER + 1;
const SEND: u16 = Token::CALLER + 2;

/// Size of a receive buffer in bytes: enough for several small writes or a great many reads.
const RECEIVE_BYTES: usize = 64 << 10;

/// Idle time after which a client that holds buffers is disconnected while other clients wait for
/// buffers, in nanoseconds.
const HOARDING_NS_MAX: u64 = 5_000_000_000;

/// Time that clients wait for buffers before the shard looks for idle clients with buffers, in
/// nanoseconds. A client that has been idle for long therefore delays others only for this time.
const WAITING_NS_MAX: u64 = 500_000_000;

/// Time that a client in the middle of sending a request has to complete it while the shard
/// quiesces, in nanoseconds.
const RESTLESS_NS_MAX: u64 = 3_000_000_000;

/// Maximum number of requests of one connection that one turn of the shard's loop starts if they
/// wait for a device. The device works on these requests while the shard takes the next requests.
const REQUESTS_PER_TURN: u32 = 4;

/// A negotiated NBD connection that a shard takes over.
pub(super) struct ClientAttachment {
    pub(super) socket: OwnedFd,
    /// How reads of this connection promote blocks into the cache.
    pub(super) promote: Promote,
    pub(super) transport: Transport,
    /// Connection permit, returned when the connection ends.
    pub(super) permit: ConnectionPermit,
    pub(super) kind: ClientKind,
}

/// Kind of client at the other end of an NBD connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ClientKind {
    /// A guest or another ordinary NBD client.
    Guest,
    /// Another host that migrates the disk to or from this host.
    Peer,
}

struct Client {
    connection: Connection,
    fd: Fd,
    kind: ClientKind,
    transport: Transport,
    /// Process id of the client, if it is known.
    pid: Option<u32>,
    _permit: ConnectionPermit,
    /// Buffer for bytes received from the client; `None` while a receive operation uses it.
    rx: Option<RxBuf>,
    receiving_payload: bool,
    sending: bool,
    shut_down: bool,
    /// True if the connection is on the list of connections with work.
    listed: bool,
    /// True if the connection is on the list of connections that wait for a buffer.
    waiting: bool,
    /// True if the connection waits because the engine accepts no further request of its disk now.
    /// `lacking` is true if the connection waits because the disk has used up its share of buffers.
    refused: bool,
    lacking: bool,
    last_progress: Instant,
}

impl Client {
    /// Disconnects the client, which has this connection number.
    fn disconnect(&mut self, number: u16, ring: &mut Ring, left: &mut Vec<(DiskId, SessionId)>) {
        self.shut_down = true;
        ring.shutdown(self.fd);
        left.push((self.connection.disk(), SessionId(u32::from(number))));
    }

    fn is_idle(&self) -> bool {
        self.rx.is_some() && !self.receiving_payload && !self.sending
    }

    /// Returns true if another process can continue the connection.
    fn is_at_rest(&self) -> bool {
        self.is_idle() && self.connection.is_at_rest()
    }
}

/// Connections of one disk that wait because the disk's share of requests or buffers is used up.
#[derive(Default)]
struct HeldUp {
    /// Connections whose requests the engine refused.
    refused: Vec<u16>,
    /// Connections that wait for a buffer.
    without_buffer: Vec<u16>,
    /// Size of the smallest buffer that one of these connections needs, in bytes.
    least: usize,
}

/// All NBD connections of a shard, by number.
#[derive(Default)]
pub(super) struct Clients {
    clients: Vec<Option<Client>>,
    free: Vec<u16>,
    /// Sessions of disconnected clients with their disks, to be reported to the engine. Requests of
    /// these sessions may be in flight.
    pub(super) left: Vec<(DiskId, SessionId)>,
    /// Ended sessions with their disks, to be reported to the engine.
    pub(super) ended: Vec<(DiskId, SessionId)>,
    /// Connections with work to do.
    active: VecDeque<u16>,
    /// Connections that wait for a buffer, longest first. No other connection gets a buffer before
    /// them.
    waiting: VecDeque<u16>,
    waiting_since: Instant,
    /// Time since which no new request is accepted; `None` in normal operation.
    resting_since: Option<Instant>,
    /// Connections that wait for their disk's share of requests or buffers. Connections of a hung
    /// disk wait here and do not delay other disks.
    held_up: BTreeMap<DiskId, HeldUp>,
    /// True if buffers or requests were released since the waiting connections were last checked.
    room: bool,
    queries: VecDeque<(DiskId, StatusQuery)>,
    pub(super) recorders: Recorders,
    /// Moving average of the number of requests per receive, in 256ths.
    batch: u32,
}

impl Clients {
    /// Takes over a negotiated connection. Returns its session.
    pub(super) fn attach(
        &mut self,
        now: Instant,
        ring: &mut Ring,
        disk: DiskId,
        attachment: ClientAttachment,
        negotiated: Negotiated,
        leftover: &[u8],
    ) -> SessionId {
        let number = self.free.pop().unwrap_or_else(|| {
            self.clients.push(None);
            (self.clients.len() - 1) as u16
        });
        let mut connection = Connection::new(negotiated, disk, u32::from(number), attachment.promote);
        connection.set_resting(self.resting_since.is_some());
        let rx = RxBuf::with(RECEIVE_BYTES, leftover);
        // The peer of a relay's socket is this process.
        let is_direct = attachment.transport == Transport::Direct;
        let pid = is_direct.then(|| peer_process(&attachment.socket)).flatten();
        self.clients[usize::from(number)] = Some(Client {
            connection,
            fd: ring.attach(attachment.socket, FdClass::Socket),
            kind: attachment.kind,
            transport: attachment.transport,
            pid,
            _permit: attachment.permit,
            rx: Some(rx),
            receiving_payload: false,
            sending: false,
            shut_down: false,
            listed: false,
            waiting: false,
            refused: false,
            lacking: false,
            last_progress: now,
        });
        self.list(number);
        SessionId(u32::from(number))
    }

    pub(super) fn close(&mut self, why: &str, ring: &mut Ring, ends: impl Fn(&Connection) -> bool) {
        self.room = true;
        for number in 0..self.clients.len() {
            if let Some(client) = &mut self.clients[number]
                && ends(&client.connection)
            {
                client.connection.abort(why, &mut ungated(ring));
                self.list(number as u16);
            }
        }
    }

    /// Returns the number of open connections to a disk. Connections of other hosts and of the
    /// kernel do not count.
    pub(super) fn guests(&self, disk: DiskId) -> u64 {
        self.guests_of(disk).count() as u64
    }

    /// Returns the process ids of these connections. A connection over TCP has none.
    pub(super) fn pids(&self, disk: DiskId) -> Vec<u32> {
        self.guests_of(disk).filter_map(|client| client.pid).collect()
    }

    fn guests_of(&self, disk: DiskId) -> impl Iterator<Item = &Client> {
        self.clients.iter().flatten().filter(move |client| {
            client.kind == ClientKind::Guest
                && client.transport != Transport::Kernel
                && client.connection.disk() == disk
                && !client.shut_down
        })
    }

    /// Closes the connections of other hosts to a disk.
    pub(super) fn close_peers(&mut self, disk: DiskId, ring: &mut Ring) {
        self.room = true;
        for number in 0..self.clients.len() {
            if let Some(client) = &mut self.clients[number]
                && client.kind == ClientKind::Peer
                && client.connection.disk() == disk
            {
                client.connection.abort("another host owns the disk", &mut ungated(ring));
                self.list(number as u16);
            }
        }
    }

    /// Changes the size up to which the kernel's NBD client may access a disk. The daemon tells the
    /// kernel the new size by netlink. Other clients keep the size that they negotiated.
    pub(super) fn grow(&mut self, disk: DiskId, size_bytes: u64) {
        let is_kernel =
            |client: &&mut Client| client.transport == Transport::Kernel && client.connection.disk() == disk;
        for client in self.clients.iter_mut().flatten().filter(is_kernel) {
            client.connection.grow(size_bytes);
        }
    }

    /// Handles the result of a receive or send of a connection.
    pub(super) fn handle_completion(&mut self, now: Instant, completion: Completion, ring: &mut Ring) {
        let number = completion.token.owner();
        let client = self.clients[usize::from(number)].as_mut().expect("connections outlive their I/O");
        client.last_progress = now;
        self.room = true;
        let payload = &mut ungated(ring);
        match (completion.token.kind(), completion.returned) {
            (RECEIVE, Returned::Rx(rx)) => {
                client.rx = Some(rx);
                // A receive that was cancelled to quiesce the connection did not reach the end of
                // the stream.
                let cancelled = completion.result == -rustix::io::Errno::CANCELED.raw_os_error();
                if completion.result <= 0 && !cancelled {
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
            }
            (kind, returned) => unreachable!("token kind {kind} came back with {returned:?}"),
        }
        self.list(number);
    }

    /// Stops or resumes accepting new requests.
    pub(super) fn set_resting(&mut self, since: Option<Instant>, ring: &mut Ring) {
        self.resting_since = since;
        for number in 0..self.clients.len() {
            let Some(client) = &mut self.clients[number] else { continue };
            client.connection.set_resting(since.is_some());
            self.list(number as u16);
        }
        self.end_receives(ring);
    }

    /// Returns true if every connection is quiesced or about to close.
    pub(super) fn are_at_rest(&self) -> bool {
        self.clients.iter().flatten().all(|client| client.is_at_rest() || client.connection.wants_close())
    }

    /// Hands over the quiesced connections that another process can continue.
    pub(super) fn hand_over(&mut self, ring: &mut Ring) -> Vec<ClientAtRest> {
        let mut all = Vec::new();
        for number in 0..self.clients.len() {
            let at_rest = |client: &Client| client.is_at_rest() && client.transport != Transport::Relayed;
            let Some(client) = self.clients[number].as_ref().filter(|client| at_rest(client)) else {
                continue;
            };
            let socket = match ring.borrow(client.fd).try_clone_to_owned() {
                Ok(socket) => socket,
                Err(error) => {
                    tracing::warn!("cannot hand over an NBD client, which has to reconnect: {error}");
                    continue;
                }
            };
            let client = self.clients[number].take().expect("just looked at");
            let received = client.rx.as_ref().expect("it is idle").filled().to_vec();
            ring.detach(client.fd);
            self.ended.push((client.connection.disk(), SessionId(number as u32)));
            self.forget(number as u16);
            let negotiated = client.connection.negotiated().clone();
            let is_kernel = client.transport == Transport::Kernel;
            all.push(ClientAtRest { socket, negotiated, received, is_kernel });
        }
        all
    }

    /// Cancels receives that wait for the next request.
    fn end_receives(&mut self, ring: &mut Ring) {
        if self.resting_since.is_none() {
            return;
        }
        let waits = |client: &&Client| {
            client.rx.is_none() && client.connection.poll_receive() == Receive::Pause && !client.shut_down
        };
        for client in self.clients.iter().flatten().filter(waits) {
            ring.cancel_recv(client.fd);
        }
    }

    /// Handles the engine's reply to a request.
    #[inline]
    pub(super) fn handle_reply(&mut self, reply: &Reply, ring: &mut Ring) {
        let number = Connection::number_of(reply.id) as u16;
        let client = self.clients[usize::from(number)].as_mut().expect("connections outlive their requests");
        client.connection.handle_reply(reply, &mut ungated(ring));
        self.list(number);
        self.room = true;
    }

    /// Answers a block status query. `allocation` has the allocated extents, if the client
    /// requested them. The content of dirty bitmaps comes from the engine.
    pub(super) fn handle_status(&mut self, id: u64, allocation: Result<&[Extent], IoError>, engine: &Engine) {
        let id = RequestId(id);
        let number = Connection::number_of(id) as u16;
        let client = self.clients[usize::from(number)].as_mut().expect("connections outlive their requests");
        let connection = &mut client.connection;
        let maps = match connection.contexts() {
            [] => Ok(Vec::new()),
            contexts => maps::extents_of(engine, connection.disk(), contexts, connection.status_range(id)),
        };
        let status = match (allocation, &maps) {
            (Ok(allocation), Ok(maps)) => Ok(Status { allocation, maps }),
            (Err(error), _) => Err(error),
            (_, Err(error)) => Err(*error),
        };
        connection.handle_status(id, status);
        self.list(number);
    }

    /// Records that the engine may accept requests again, or that a buffer may be free.
    pub(super) fn retry_refused(&mut self) {
        self.room = true;
    }

    /// Puts the connections of disks whose share has room again on the list of connections with
    /// work. The cost depends on the number of these disks, not on the number of their connections.
    fn retry_held_up(&mut self, ring: &Ring, engine: &Engine) {
        if !std::mem::take(&mut self.room) || self.held_up.is_empty() {
            return;
        }
        let (mut refused, mut lacking) = (Vec::new(), Vec::new());
        for (disk, it) in &mut self.held_up {
            if !it.refused.is_empty() && engine.has_room(*disk) {
                refused.append(&mut it.refused);
            }
            if !it.without_buffer.is_empty() && may_have_room(ring.arena(), *disk, it.least) {
                lacking.append(&mut it.without_buffer);
            }
        }
        self.held_up.retain(|_, it| !(it.refused.is_empty() && it.without_buffer.is_empty()));
        for number in refused {
            self.client_mut(number).refused = false;
            self.list(number);
        }
        for number in lacking {
            self.client_mut(number).lacking = false;
            self.list(number);
        }
    }

    /// Makes a connection wait until its disk's share has room for a buffer of `least` bytes, or
    /// for a request in the engine if `least` is `None`.
    fn hold_up(&mut self, number: u16, least: Option<usize>) {
        let client = self.clients[usize::from(number)].as_mut().expect("only connections are held up");
        if self.waiting.is_empty() && self.held_up.is_empty() {
            self.waiting_since = client.last_progress;
        }
        let it = self.held_up.entry(client.connection.disk()).or_default();
        match least {
            None if std::mem::replace(&mut client.refused, true) => {}
            None => it.refused.push(number),
            Some(_) if std::mem::replace(&mut client.lacking, true) => {}
            Some(least) => {
                it.least = if it.without_buffer.is_empty() { least } else { it.least.min(least) };
                it.without_buffer.push(number);
            }
        }
    }

    /// Returns the next block status query for a backing.
    pub(super) fn poll_status(&mut self) -> Option<(DiskId, StatusQuery)> {
        self.queries.pop_front()
    }

    /// Returns true if no connection waits for a buffer.
    pub(super) fn nobody_waits(&self) -> bool {
        self.waiting.is_empty()
    }

    /// Returns true if clients send requests before earlier ones are answered. A client that waits
    /// for each reply never has two requests in one receive.
    pub(super) fn requests_overlap(&self) -> bool {
        self.batch > 256 + 8
    }

    /// Runs every connection that has work. Returns false if there is none.
    pub(super) fn pump(
        &mut self,
        now: Instant,
        ring: &mut Ring,
        engine: &mut Engine,
        is_device_bound: bool,
    ) -> bool {
        let requests_max = if is_device_bound { REQUESTS_PER_TURN } else { u32::MAX };
        // Replies that were sent and connections that were closed may have released buffers.
        self.serve_waiting(now, ring);
        self.retry_held_up(ring, engine);
        let count = self.active.len();
        for _ in 0..count {
            let Some(number) = self.active.pop_front() else { break };
            self.pump_one(now, number, ring, engine, requests_max);
        }
        count > 0
    }

    fn pump_one(
        &mut self,
        now: Instant,
        number: u16,
        ring: &mut Ring,
        engine: &mut Engine,
        requests_max: u32,
    ) {
        let client = self.clients[usize::from(number)].as_mut().expect("listed connections exist");
        client.listed = false;
        let connection = &mut client.connection;
        let disk = connection.disk();
        let mut gate = Gate::new(ring, disk, connection.held_bytes(), self.waiting.is_empty());
        if !client.waiting {
            connection.retry_alloc(&mut gate);
        }
        if let Some(rx) = &mut client.rx {
            let used = connection.handle_received(rx.filled(), &mut gate);
            rx.consume(used);
        }
        let (greedy, lacking) = (gate.greedy, gate.lacking());
        let mut refused = false;
        let mut requests = 0;
        let mut recording = self.recorders.of(connection.disk());
        while requests < requests_max
            && let Some(mut request) = connection.poll_request()
        {
            requests += 1;
            if client.kind == ClientKind::Peer && request.op == Op::Read {
                request.op = Op::ReadForPeer;
            }
            if let Err(request) = engine.handle_request(now, request) {
                connection.unpoll_request(request);
                refused = true;
                break;
            }
            if let Some(recording) = &mut recording
                && client.kind == ClientKind::Guest
            {
                recording.note(connection.command_begun_by(&request));
            }
        }
        if requests > 0 {
            self.batch = (self.batch * 15 + requests * 256) / 16;
        }
        if let Some(gather) = connection.poll_send() {
            client.sending = true;
            client.last_progress = now;
            ring.send(Token::new(SEND, number, 0), client.fd, gather);
        }
        // There is room for the replies to these queries now.
        while let Some(query) = connection.poll_status() {
            self.queries.push_back((connection.disk(), query));
        }
        if refused {
            self.hold_up(number, None);
        } else if requests == requests_max {
            self.list(number);
        }
        self.receive(now, number, ring, greedy, lacking);
        self.close_ended(number, ring);
    }

    /// Starts the connection's next receive. A connection that used up its own share of buffers
    /// waits only until its own replies are sent.
    fn receive(&mut self, now: Instant, number: u16, ring: &mut Ring, greedy: bool, lacking: Option<usize>) {
        let client = self.clients[usize::from(number)].as_mut().expect("listed connections exist");
        if client.receiving_payload || client.rx.is_none() {
            return;
        }
        match client.connection.poll_receive() {
            // The receive buffer still has requests, because there was no room for their replies.
            // The client may wait for these replies and send nothing more. Then no event would put
            // the connection on the list of connections with work, so it is put there now.
            Receive::Bytes if client.rx.as_ref().is_some_and(|rx| rx.filled().len() >= REQUEST_BYTES) => {
                self.list(number);
            }
            Receive::Bytes => {
                let rx = client.rx.take().expect("checked");
                ring.recv(Token::new(RECEIVE, number, 0), client.fd, rx);
            }
            Receive::Payload(slice) => {
                client.receiving_payload = true;
                client.last_progress = now;
                ring.recv_into(Token::new(RECEIVE_PAYLOAD, number, 0), client.fd, slice);
            }
            Receive::AwaitBuffer if !client.waiting && lacking.is_some() => self.hold_up(number, lacking),
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

    /// Closes a connection that has ended, and removes it when none of its I/O is in flight.
    fn close_ended(&mut self, number: u16, ring: &mut Ring) {
        let slot = &mut self.clients[usize::from(number)];
        let client = slot.as_mut().expect("listed connections exist");
        if !client.connection.wants_close() {
            return;
        }
        if !client.shut_down {
            client.disconnect(number, ring, &mut self.left);
        }
        if client.is_idle() && client.connection.is_over() {
            if let Some(fault) = client.connection.fault() {
                tracing::info!(disk = client.connection.disk().0, "NBD connection ended early: {fault}");
            }
            ring.detach(client.fd);
            self.ended.push((client.connection.disk(), SessionId(u32::from(number))));
            *slot = None;
            self.forget(number);
        }
    }

    /// Removes a connection from all lists, so that its number can be reused.
    fn forget(&mut self, number: u16) {
        self.waiting.retain(|waiting| *waiting != number);
        for it in self.held_up.values_mut() {
            it.refused.retain(|refused| *refused != number);
            it.without_buffer.retain(|without| *without != number);
        }
        self.held_up.retain(|_, it| !(it.refused.is_empty() && it.without_buffer.is_empty()));
        self.active.retain(|active| *active != number);
        self.free.push(number);
    }

    /// Lets connections that wait for a buffer continue, longest wait first, while buffers are
    /// free.
    fn serve_waiting(&mut self, now: Instant, ring: &mut Ring) {
        while let Some(number) = self.waiting.front().copied() {
            let client = self.clients[usize::from(number)].as_mut().expect("waiting connections exist");
            let mut gate = Gate::new(ring, client.connection.disk(), client.connection.held_bytes(), true);
            let has_buffer = client.connection.retry_alloc(&mut gate);
            if !has_buffer && !gate.greedy && gate.lacking().is_none() {
                return;
            }
            client.waiting = false;
            client.last_progress = now;
            self.waiting.pop_front();
            self.waiting_since = now;
            self.list(number);
        }
    }

    /// Returns the time of the next check for clients that hold buffers without progress.
    pub(super) fn poll_timeout(&self) -> Option<Instant> {
        let is_scarce = !self.waiting.is_empty() || !self.held_up.is_empty();
        let hoarding = is_scarce.then(|| self.waiting_since + WAITING_NS_MAX);
        let restless =
            self.resting_since.filter(|_| !self.are_at_rest()).map(|since| since + RESTLESS_NS_MAX);
        hoarding.into_iter().chain(restless).min()
    }

    /// Disconnects clients that hold buffers without moving a byte while other clients wait for
    /// buffers.
    pub(super) fn handle_timeout(&mut self, now: Instant, ring: &mut Ring) {
        self.end_restless(now, ring);
        let is_scarce = !self.waiting.is_empty() || !self.held_up.is_empty();
        if now - self.waiting_since < WAITING_NS_MAX || !is_scarce {
            return;
        }
        self.waiting_since = now;
        for number in 0..self.clients.len() {
            if let Some(client) = &mut self.clients[number]
                && (client.receiving_payload || client.sending)
                && now - client.last_progress >= HOARDING_NS_MAX
                && (!self.waiting.is_empty() || self.held_up.contains_key(&client.connection.disk()))
                && !client.shut_down
            {
                tracing::warn!(
                    "closing an NBD connection: its client holds buffers without progress while other clients wait for buffers"
                );
                client.disconnect(number as u16, ring, &mut self.left);
            }
        }
    }

    /// Disconnects clients that are in the middle of a request or reply 3 s after quiescing began.
    fn end_restless(&mut self, now: Instant, ring: &mut Ring) {
        let Some(since) = self.resting_since.filter(|since| now - *since >= RESTLESS_NS_MAX) else { return };
        self.resting_since = Some(since + RESTLESS_NS_MAX);
        self.end_receives(ring);
        for (number, client) in (0..).zip(&mut self.clients) {
            if let Some(client) = client
                && (client.connection.awaits_payload() || client.sending)
                && !client.shut_down
            {
                tracing::warn!(
                    "closing an NBD connection: hob hands its connections over, and the client did not finish a request or \
                     receive a reply within 3 s"
                );
                client.disconnect(number, ring, &mut self.left);
            }
        }
    }

    fn client_mut(&mut self, number: u16) -> &mut Client {
        self.clients[usize::from(number)].as_mut().expect("only connections are on lists")
    }

    fn list(&mut self, number: u16) {
        let client = self.clients[usize::from(number)].as_mut().expect("only connections are listed");
        if !client.listed {
            client.listed = true;
            self.active.push_back(number);
        }
    }
}
