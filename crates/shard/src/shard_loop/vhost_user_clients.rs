//! The vhost-user clients of a shard's disks: polling of their queues and notification of their
//! drivers.
//!
//! A busy queue is *polled*: the shard checks it in each turn, and the driver need not send
//! notifications. Before the shard sleeps, it enables the notifications of polled queues and checks
//! these queues once more. An idle queue is not polled until the driver notifies the shard.
//!
//! A driver that missed one notification may suppress all later notifications. After a restart, and
//! when a client changes its call descriptor, the shard therefore sends one notification for all
//! earlier replies.

use std::os::fd::OwnedFd;
use std::sync::mpsc;

use hob_engine::Engine;
use hob_engine::io::Reply;
use hob_engine::units::{DiskId, Instant, RequestId, SessionId};
use hob_frontends::vhost_user::{Budget, Device, Start};
use hob_storage::ring::{Completion, Fd, FdClass, Ring};
use hob_storage::token::Token;

use super::gate::Gate;
use super::recorders::Recorders;
use crate::api::VhostUserCall;

pub(super) const KICK: u16 = Token::CALLER + 3;
pub(super) const SIGNAL: u16 = Token::CALLER + 4;

/// Bit that marks the session numbers of vhost-user clients. NBD connections have smaller numbers.
const VHOST_USER: u32 = 1 << 31;

/// The eventfds of a served virtqueue.
struct QueueEvents {
    kick: Fd,
    call: Option<Fd>,
    /// Distinguishes the operations of this kick descriptor from those of an earlier kick
    /// descriptor of the same queue.
    serial: u16,
    polled: bool,
    /// True while a notification is in flight.
    signalling: bool,
    /// True if new replies were added after the notification in flight was started.
    signal_again: bool,
}

struct VhostUserClient {
    device: Device,
    /// Eventfds by queue index.
    queue_events: Vec<Option<QueueEvents>>,
    /// True if the client is on the list of clients with new replies.
    listed: bool,
    /// Number of the latest turn, and the descriptors that may still be handled in that turn.
    budget: (u64, Budget),
    /// True if the disk was removed. A new disk may reuse its id.
    gone: bool,
}

/// All vhost-user clients of a shard, by number.
#[derive(Default)]
pub(super) struct VhostUserClients {
    clients: Vec<Option<VhostUserClient>>,
    free: Vec<u16>,
    /// Ended sessions with their disks, to be reported to the engine.
    pub(super) ended: Vec<(DiskId, SessionId)>,
    /// Polled queues: client number and queue index.
    polled: Vec<(u16, u16)>,
    /// Clients with new replies.
    answered: Vec<u16>,
    stops: Vec<(u16, u16, mpsc::Sender<u16>)>,
    /// True while no new request is accepted.
    resting: bool,
    serial: u16,
    turn: u64,
}

impl VhostUserClients {
    /// Returns true if the request id belongs to a vhost-user client.
    #[inline]
    pub(super) fn owns(id: RequestId) -> bool {
        (id.0 >> 32) as u32 & VHOST_USER != 0
    }

    fn client(&mut self, number: u16) -> &mut VhostUserClient {
        self.clients[usize::from(number)].as_mut().expect("clients outlive their requests and calls")
    }

    /// Executes a call of a vhost-user session. Ignores a new client of an unknown disk. Returns
    /// the disk and the session of a new client.
    pub(super) fn call(
        &mut self,
        call: VhostUserCall,
        serves: impl Fn(DiskId) -> bool,
        ring: &mut Ring,
    ) -> Option<(DiskId, SessionId)> {
        match call {
            VhostUserCall::Open { disk, info, promote, answer } if serves(disk) => {
                let number = self.free.pop().unwrap_or_else(|| {
                    self.clients.push(None);
                    (self.clients.len() - 1) as u16
                });
                let device = Device::new(info, disk, VHOST_USER | u32::from(number)).promoting(promote);
                let client = VhostUserClient {
                    device,
                    queue_events: Vec::new(),
                    listed: false,
                    budget: Default::default(),
                    gone: false,
                };
                self.clients[usize::from(number)] = Some(client);
                if answer.send(number).is_err() {
                    self.close(number, ring);
                    return None;
                }
                return Some((disk, SessionId(VHOST_USER | u32::from(number))));
            }
            VhostUserCall::Open { .. } => {}
            VhostUserCall::Start { client, start, kick, call } => {
                self.start(client, *start, kick, call, ring);
            }
            VhostUserCall::SetCall { client, queue, call } => {
                let events =
                    self.client(client).queue_events.get_mut(usize::from(queue)).and_then(Option::as_mut);
                let events = events?;
                let call = call.map(|call| ring.attach(call, FdClass::Event));
                if let Some(old) = std::mem::replace(&mut events.call, call) {
                    ring.detach_event(old);
                }
                tell(client, queue, events, ring);
            }
            VhostUserCall::Stop { client, queue, answer } => {
                self.client(client).device.stop(queue);
                self.stops.push((client, queue, answer));
            }
            VhostUserCall::Close { client } => self.close(client, ring),
        }
        None
    }

    fn start(&mut self, number: u16, start: Start, kick: OwnedFd, call: Option<OwnedFd>, ring: &mut Ring) {
        self.serial = self.serial.wrapping_add(1);
        let serial = self.serial;
        let client = self.client(number);
        let queue = start.queue();
        if client.gone {
            return;
        }
        if let Err(broken) = client.device.start(start) {
            tracing::warn!(disk = client.device.disk().0, queue, "cannot serve a vhost-user queue: {broken}");
            return;
        }
        let kick = ring.attach(kick, FdClass::Event);
        let call = call.map(|call| ring.attach(call, FdClass::Event));
        ring.await_event(kick_token(number, queue, serial), kick);
        if client.queue_events.len() <= usize::from(queue) {
            client.queue_events.resize_with(usize::from(queue) + 1, || None);
        }
        let mut events =
            QueueEvents { kick, call, serial, polled: true, signalling: false, signal_again: false };
        tell(number, queue, &mut events, ring);
        client.queue_events[usize::from(queue)] = Some(events);
        // The queue may already hold requests.
        self.polled.push((number, queue));
    }

    fn close(&mut self, number: u16, ring: &mut Ring) {
        let client = self.client(number);
        assert!(client.device.is_idle(), "the queues of a vhost-user client are stopped before it is closed");
        let disk = client.device.disk();
        for queue in 0..client.queue_events.len() {
            self.close_queue_events(number, queue as u16, ring);
        }
        self.clients[usize::from(number)] = None;
        self.ended.push((disk, SessionId(VHOST_USER | u32::from(number))));
        self.answered.retain(|answered| *answered != number);
        self.free.push(number);
    }

    fn close_queue_events(&mut self, number: u16, queue: u16, ring: &mut Ring) {
        let queue_events = &mut self.client(number).queue_events;
        let Some(events) = queue_events.get_mut(usize::from(queue)).and_then(Option::take) else { return };
        if let (true, Some(call)) = (events.signal_again, events.call) {
            ring.signal(Token::new(SIGNAL, number, 0), call);
        }
        events.call.into_iter().chain([events.kick]).for_each(|fd| ring.detach_event(fd));
        self.polled.retain(|polled| *polled != (number, queue));
    }

    pub(super) fn of(&self, disk: DiskId) -> u64 {
        let is_of = |client: &&VhostUserClient| client.device.disk() == disk && !client.gone;
        self.clients.iter().flatten().filter(is_of).count() as u64
    }

    /// Stops serving the vhost-user clients of a removed disk. Requests that are not started yet
    /// stay in the virtqueues for the daemon that serves the disk next.
    pub(super) fn close_all(&mut self, disk: DiskId, ring: &mut Ring) {
        for client in self.clients.iter_mut().flatten().filter(|client| client.device.disk() == disk) {
            client.gone = true;
            client.device.abandon(&mut Gate::ungated(ring));
        }
    }

    /// Records the new size of a disk that grew. The vhost-user sessions notify the guests.
    pub(super) fn grow(&mut self, disk: DiskId, size_bytes: u64) {
        let of_it = |client: &&mut VhostUserClient| client.device.disk() == disk && !client.gone;
        self.clients.iter_mut().flatten().filter(of_it).for_each(|client| client.device.grow(size_bytes));
    }

    /// Stops or resumes accepting new requests.
    pub(super) fn set_resting(&mut self, resting: bool) {
        self.resting = resting;
    }

    /// Returns true if all accepted requests are answered.
    pub(super) fn are_at_rest(&self) -> bool {
        self.clients.iter().flatten().all(|client| client.device.is_idle())
    }

    /// Handles the end of an eventfd operation.
    pub(super) fn handle_completion(&mut self, completion: &Completion, ring: &mut Ring) {
        let (token, number) = (completion.token, completion.token.owner());
        let (queue, serial) = (token.index() as u16, (token.index() >> 16) as u16);
        let Some(Some(client)) = self.clients.get_mut(usize::from(number)) else { return };
        let Some(Some(events)) = client.queue_events.get_mut(usize::from(queue)) else { return };
        if events.serial != serial {
            return;
        }
        if token.kind() == KICK {
            if completion.result < 0 {
                // This failure is unexpected for an eventfd. The queue is still polled while it is
                // busy.
                tracing::warn!(
                    disk = client.device.disk().0,
                    queue,
                    "cannot wait for the eventfd of a vhost-user queue"
                );
                return;
            }
            ring.await_event(token, events.kick);
            if !events.polled {
                events.polled = true;
                self.polled.push((number, queue));
            }
        } else {
            events.signalling = false;
            if std::mem::take(&mut events.signal_again) {
                tell(number, queue, events, ring);
            }
        }
    }

    /// Handles the engine's reply to a request.
    #[inline]
    pub(super) fn handle_reply(&mut self, reply: &Reply, ring: &mut Ring) {
        self.answering(reply.id).handle_reply(reply, &mut Gate::ungated(ring));
    }

    /// Handles a read into guest memory that the engine cannot serve directly. The device retries
    /// it with a daemon buffer.
    pub(super) fn handle_declined(&mut self, id: RequestId, ring: &mut Ring) {
        self.answering(id).handle_declined(id, &mut Gate::ungated(ring));
    }

    /// Returns the device of a request, and lists its client for a notification.
    fn answering(&mut self, id: RequestId) -> &mut Device {
        let number = (id.0 >> 32) as u16;
        if !std::mem::replace(&mut self.client(number).listed, true) {
            self.answered.push(number);
        }
        &mut self.client(number).device
    }

    /// Passes new requests of polled queues to the engine. Returns false if there are none.
    pub(super) fn pump(
        &mut self,
        now: Instant,
        ring: &mut Ring,
        engine: &mut Engine,
        recorders: &mut Recorders,
        nobody_waits: bool,
        is_device_bound: bool,
    ) -> bool {
        let mut progress = false;
        self.turn += 1;
        // Each turn starts with another queue, because the first queues may use up the client's
        // budget.
        let count = self.polled.len();
        for at in (0..count).map(|at| (at as u64 + self.turn) as usize % count) {
            let (number, queue) = self.polled[at];
            let client = self.clients[usize::from(number)].as_mut().expect("polled clients exist");
            if client.budget.0 != self.turn {
                client.budget = (self.turn, Budget::of_turn(is_device_bound));
            }
            let device = &mut client.device;
            // Requests added from now on are found before the next sleep.
            device.set_wants_kicks(queue, false);
            let (disk, held_bytes) = (device.disk(), device.held_bytes());
            let mut gate = Gate::new(ring, disk, held_bytes, nobody_waits).knowing(engine);
            device.room_again(queue, &mut gate);
            device.ask_again(&mut gate);
            if !self.resting && device.has_work(queue) {
                match device.take(queue, &mut client.budget.1, &mut gate) {
                    Ok(taken) => progress |= taken > 0,
                    Err(broken) => {
                        let disk = device.disk().0;
                        tracing::warn!(disk, queue, "a vhost-user queue is no longer served: {broken}");
                    }
                }
                if !client.listed {
                    // The engine answers some requests immediately. So this client is listed now,
                    // for its replies to be sent.
                    client.listed = true;
                    self.answered.push(number);
                }
            }
            progress |= submit(now, &mut client.device, engine, recorders);
        }
        progress
    }

    /// Notifies drivers of new replies, and sessions of queues that have stopped.
    pub(super) fn flush(&mut self, ring: &mut Ring) {
        while let Some(number) = self.answered.pop() {
            let client = self.clients[usize::from(number)].as_mut().expect("clients with answers exist");
            client.listed = false;
            while let Some(queue) = client.device.poll_signal() {
                if let Some(Some(events)) = client.queue_events.get_mut(usize::from(queue)) {
                    tell(number, queue, events, ring);
                }
            }
        }
        let mut at = 0;
        while at < self.stops.len() {
            let (number, queue, _) = self.stops[at];
            match self.client(number).device.poll_stopped(queue) {
                Some(base) => {
                    let (_, _, answer) = self.stops.swap_remove(at);
                    self.close_queue_events(number, queue, ring);
                    let _ = answer.send(base);
                }
                None => at += 1,
            }
        }
    }

    /// Returns true if a polled queue has new requests.
    #[inline]
    pub(super) fn has_work(&self) -> bool {
        self.polled.iter().any(|(number, queue)| {
            self.clients[usize::from(*number)].as_ref().is_some_and(|client| client.device.has_work(*queue))
        })
    }

    /// Returns true if there are queues to poll.
    pub(super) fn are_polled(&self) -> bool {
        !self.polled.is_empty() && !self.resting
    }

    /// Enables driver notifications for all polled queues. Returns false if a queue already has new
    /// requests.
    pub(super) fn prepare_sleep(&mut self) -> bool {
        let mut at = 0;
        while at < self.polled.len() {
            let (number, queue) = self.polled[at];
            let client = self.clients[usize::from(number)].as_mut().expect("polled clients exist");
            client.device.set_wants_kicks(queue, true);
            if client.device.has_work(queue) {
                return false;
            }
            if client.device.is_quiet(queue) {
                if let Some(Some(events)) = client.queue_events.get_mut(usize::from(queue)) {
                    events.polled = false;
                }
                self.polled.swap_remove(at);
            } else {
                at += 1;
            }
        }
        true
    }
}

fn kick_token(number: u16, queue: u16, serial: u16) -> Token {
    Token::new(KICK, number, u32::from(serial) << 16 | u32::from(queue))
}

/// Notifies a driver of new replies. One notification is enough for all replies that exist when the
/// driver handles it.
fn tell(number: u16, queue: u16, events: &mut QueueEvents, ring: &mut Ring) {
    let Some(call) = events.call else { return };
    if events.signalling {
        events.signal_again = true;
        return;
    }
    events.signalling = true;
    ring.signal(Token::new(SIGNAL, number, u32::from(events.serial) << 16 | u32::from(queue)), call);
}

/// Passes a device's new requests to the engine. Returns false if there are none.
fn submit(now: Instant, device: &mut Device, engine: &mut Engine, recorders: &mut Recorders) -> bool {
    let mut progress = false;
    let mut recording = recorders.of(device.disk());
    while let Some(request) = device.poll_request() {
        if let Err(request) = engine.handle_request(now, request) {
            device.unpoll_request(request);
            break;
        }
        progress = true;
        if let (Some(recording), Some((op, offset, len))) = (&mut recording, device.begun_by(&request)) {
            recording.note_request(op, offset, len);
        }
    }
    progress
}

impl std::fmt::Debug for VhostUserClients {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("VhostUserClients").field("polled", &self.polled).finish_non_exhaustive()
    }
}
