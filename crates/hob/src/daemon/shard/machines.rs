//! The machines that use a shard's disks through vhost-user: whose queues are looked at when, who is told of what.
//!
//! A queue whose driver is busy is *polled*: looked at whenever anything happens on the shard, and its driver need not
//! tell of new chains. Before the shard sleeps, it asks the drivers of polled queues to tell after all, and looks once more.
//! A queue without anything in flight, and with nothing that waits for room, is then not polled any more, until its driver tells.
//!
//! A driver that was not told of one answer may not want to be told of any later one. So whoever comes to tell it, after a restart or because
//! the machine says so, tells it once for whatever was answered before.

use std::os::fd::OwnedFd;
use std::sync::mpsc;

use hob_engine::Engine;
use hob_engine::io::{Promote, Reply};
use hob_engine::units::{DiskId, Instant, RequestId, SessionId};
use hob_frontends::vhost_user::block::Info;
use hob_frontends::vhost_user::{Budget, Device, Start};
use hob_storage::ring::{Completion, Fd, FdClass, Ring};
use hob_storage::token::Token;

use super::clients::Gate;
use super::recorders::Recorders;

pub(super) const KICK: u16 = Token::CALLER + 3;
pub(super) const SIGNAL: u16 = Token::CALLER + 4;

/// Set in the numbers of machines, to tell them from those of NBD connections.
const MACHINE: u32 = 1 << 31;

/// What a session asks of its shard.
#[derive(Debug)]
pub(crate) enum MachineCall {
    /// A machine uses a disk.
    Open {
        /// Which.
        disk: DiskId,
        /// As the machine is to see it.
        info: Info,
        /// What its reads leave behind in the cache.
        promote: Promote,
        /// Its number from now on; dropped if there is no such disk.
        answer: mpsc::Sender<u16>,
    },
    /// Serve a queue.
    Start {
        /// Whose.
        machine: u16,
        /// All about it.
        start: Box<Start>,
        /// Tells of new chains.
        kick: OwnedFd,
        /// Is told of answers.
        call: Option<OwnedFd>,
    },
    /// Tell a driver of answers in another way.
    SetCall {
        /// Whose.
        machine: u16,
        /// Of which queue.
        queue: u16,
        /// How.
        call: Option<OwnedFd>,
    },
    /// Serve a queue no more.
    Stop {
        /// Whose.
        machine: u16,
        /// Which.
        queue: u16,
        /// Where it is to begin again, when nothing of it is in flight.
        answer: mpsc::Sender<u16>,
    },
    /// The machine is gone, and all its queues are stopped.
    Close {
        /// Which.
        machine: u16,
    },
}

/// The descriptors of a queue in service.
struct QueueEvents {
    kick: Fd,
    call: Option<Fd>,
    /// Tells its operations from those of an earlier kick descriptor of the queue.
    serial: u16,
    polled: bool,
    /// The driver is being told, and there are answers since.
    signalling: bool,
    signal_again: bool,
}

struct Machine {
    device: Device,
    /// By queue.
    queue_events: Vec<Option<QueueEvents>>,
    /// On the list of those with answers to tell of.
    listed: bool,
    /// What its chains may still cost in the turn of that number.
    budget: (u64, Budget),
    /// Its disk was taken away; another one may have the same number.
    gone: bool,
}

/// All machines, by number.
#[derive(Default)]
pub(super) struct Machines {
    machines: Vec<Option<Machine>>,
    free: Vec<u16>,
    /// Sessions that have ended, with their disks.
    pub(super) ended: Vec<(DiskId, SessionId)>,
    /// Machine and queue.
    polled: Vec<(u16, u16)>,
    /// Those with answers.
    answered: Vec<u16>,
    stops: Vec<(u16, u16, mpsc::Sender<u16>)>,
    /// Nothing new is taken.
    resting: bool,
    serial: u16,
    turn: u64,
}

impl Machines {
    /// Is it a machine's request?
    #[inline]
    pub(super) fn owns(id: RequestId) -> bool {
        (id.0 >> 32) as u32 & MACHINE != 0
    }

    fn machine(&mut self, number: u16) -> &mut Machine {
        self.machines[usize::from(number)].as_mut().expect("machines outlive their requests and calls")
    }

    /// Carries out what a session wants. A disk that is not served gets no machine. Returns the disk and the session of
    /// requests of a new machine.
    pub(super) fn call(
        &mut self,
        call: MachineCall,
        serves: impl Fn(DiskId) -> bool,
        ring: &mut Ring,
    ) -> Option<(DiskId, SessionId)> {
        match call {
            MachineCall::Open { disk, info, promote, answer } if serves(disk) => {
                let number = self.free.pop().unwrap_or_else(|| {
                    self.machines.push(None);
                    (self.machines.len() - 1) as u16
                });
                let device = Device::new(info, disk, MACHINE | u32::from(number)).promoting(promote);
                let machine = Machine {
                    device,
                    queue_events: Vec::new(),
                    listed: false,
                    budget: Default::default(),
                    gone: false,
                };
                self.machines[usize::from(number)] = Some(machine);
                if answer.send(number).is_err() {
                    self.close(number, ring);
                    return None;
                }
                return Some((disk, SessionId(MACHINE | u32::from(number))));
            }
            MachineCall::Open { .. } => {}
            MachineCall::Start { machine, start, kick, call } => {
                self.start(machine, *start, kick, call, ring);
            }
            MachineCall::SetCall { machine, queue, call } => {
                let events =
                    self.machine(machine).queue_events.get_mut(usize::from(queue)).and_then(Option::as_mut);
                let events = events?;
                let call = call.map(|call| ring.attach(call, FdClass::Event));
                if let Some(old) = std::mem::replace(&mut events.call, call) {
                    ring.detach_event(old);
                }
                tell(machine, queue, events, ring);
            }
            MachineCall::Stop { machine, queue, answer } => {
                self.machine(machine).device.stop(queue);
                self.stops.push((machine, queue, answer));
            }
            MachineCall::Close { machine } => self.close(machine, ring),
        }
        None
    }

    fn start(&mut self, number: u16, start: Start, kick: OwnedFd, call: Option<OwnedFd>, ring: &mut Ring) {
        self.serial = self.serial.wrapping_add(1);
        let serial = self.serial;
        let machine = self.machine(number);
        let queue = start.queue();
        if machine.gone {
            return;
        }
        if let Err(broken) = machine.device.start(start) {
            tracing::warn!(
                disk = machine.device.disk().0,
                queue,
                "cannot serve a queue of a vhost-user client: {broken}"
            );
            return;
        }
        let kick = ring.attach(kick, FdClass::Event);
        let call = call.map(|call| ring.attach(call, FdClass::Event));
        ring.await_event(kick_token(number, queue, serial), kick);
        if machine.queue_events.len() <= usize::from(queue) {
            machine.queue_events.resize_with(usize::from(queue) + 1, || None);
        }
        let mut events =
            QueueEvents { kick, call, serial, polled: true, signalling: false, signal_again: false };
        tell(number, queue, &mut events, ring);
        machine.queue_events[usize::from(queue)] = Some(events);
        // There may be chains in it already.
        self.polled.push((number, queue));
    }

    fn close(&mut self, number: u16, ring: &mut Ring) {
        let machine = self.machine(number);
        assert!(machine.device.is_idle(), "a machine's queues are stopped before it is closed");
        let disk = machine.device.disk();
        for queue in 0..machine.queue_events.len() {
            self.close_queue_events(number, queue as u16, ring);
        }
        self.machines[usize::from(number)] = None;
        self.ended.push((disk, SessionId(MACHINE | u32::from(number))));
        self.answered.retain(|answered| *answered != number);
        self.free.push(number);
    }

    fn close_queue_events(&mut self, number: u16, queue: u16, ring: &mut Ring) {
        let queue_events = &mut self.machine(number).queue_events;
        let Some(events) = queue_events.get_mut(usize::from(queue)).and_then(Option::take) else { return };
        if let (true, Some(call)) = (events.signal_again, events.call) {
            ring.signal(Token::new(SIGNAL, number, 0), call);
        }
        events.call.into_iter().chain([events.kick]).for_each(|fd| ring.detach_event(fd));
        self.polled.retain(|polled| *polled != (number, queue));
    }

    /// Machines that use a disk.
    pub(super) fn of(&self, disk: DiskId) -> u64 {
        let is_of = |machine: &&Machine| machine.device.disk() == disk && !machine.gone;
        self.machines.iter().flatten().filter(is_of).count() as u64
    }

    /// A disk goes away: what its machines want that has not begun is left to whoever serves it next.
    pub(super) fn close_all(&mut self, disk: DiskId, ring: &mut Ring) {
        for machine in self.machines.iter_mut().flatten().filter(|machine| machine.device.disk() == disk) {
            machine.gone = true;
            machine.device.abandon(&mut Gate::ungated(ring));
        }
    }

    /// A disk has that many bytes now. Sessions tell their machines.
    pub(super) fn grow(&mut self, disk: DiskId, size_bytes: u64) {
        let of_it = |machine: &&mut Machine| machine.device.disk() == disk && !machine.gone;
        self.machines.iter_mut().flatten().filter(of_it).for_each(|machine| machine.device.grow(size_bytes));
    }

    /// From now on nothing new is taken, or it is again.
    pub(super) fn set_resting(&mut self, resting: bool) {
        self.resting = resting;
    }

    /// Has everything been answered that was taken?
    pub(super) fn are_at_rest(&self) -> bool {
        self.machines.iter().flatten().all(|machine| machine.device.is_idle())
    }

    /// An operation on an eventfd ended.
    pub(super) fn handle_completion(&mut self, completion: &Completion, ring: &mut Ring) {
        let (token, number) = (completion.token, completion.token.owner());
        let (queue, serial) = (token.index() as u16, (token.index() >> 16) as u16);
        let Some(Some(machine)) = self.machines.get_mut(usize::from(number)) else { return };
        let Some(Some(events)) = machine.queue_events.get_mut(usize::from(queue)) else { return };
        if events.serial != serial {
            return;
        }
        if token.kind() == KICK {
            if completion.result < 0 {
                // Not to be expected of an eventfd; the queue is looked at for as long as it is busy.
                tracing::warn!(
                    disk = machine.device.disk().0,
                    queue,
                    "cannot poll the eventfd of a vhost-user client"
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

    /// The engine answers.
    #[inline]
    pub(super) fn handle_reply(&mut self, reply: &Reply, ring: &mut Ring) {
        self.answering(reply.id).handle_reply(reply, &mut Gate::ungated(ring));
    }

    /// The engine gives a read into a guest's memory back.
    pub(super) fn handle_declined(&mut self, id: RequestId, ring: &mut Ring) {
        self.answering(id).handle_declined(id, &mut Gate::ungated(ring));
    }

    /// The device of a request, which may have an answer to tell of in a moment.
    fn answering(&mut self, id: RequestId) -> &mut Device {
        let number = (id.0 >> 32) as u16;
        if !std::mem::replace(&mut self.machine(number).listed, true) {
            self.answered.push(number);
        }
        &mut self.machine(number).device
    }

    /// Takes what drivers of polled queues have made available to the engine. False if there is nothing.
    pub(super) fn pump(
        &mut self,
        now: Instant,
        ring: &mut Ring,
        engine: &mut Engine,
        recorders: &mut Recorders,
        nobody_waits: bool,
    ) -> bool {
        let mut progress = false;
        self.turn += 1;
        // Another queue is the first in each turn: a machine's first queues may use up what the machine may cost.
        let count = self.polled.len();
        for at in (0..count).map(|at| (at as u64 + self.turn) as usize % count) {
            let (number, queue) = self.polled[at];
            let machine = self.machines[usize::from(number)].as_mut().expect("polled machines exist");
            if machine.budget.0 != self.turn {
                machine.budget = (self.turn, Budget::default());
            }
            let device = &mut machine.device;
            // Whatever it makes available from now on is seen before the next sleep.
            device.set_wants_kicks(queue, false);
            let (disk, held_bytes) = (device.disk(), device.held_bytes());
            let mut gate = Gate::new(ring, disk, held_bytes, nobody_waits).knowing(engine);
            device.room_again(queue, &mut gate);
            device.ask_again(&mut gate);
            if !self.resting && device.has_work(queue) {
                match device.take(queue, &mut machine.budget.1, &mut gate) {
                    Ok(taken) => progress |= taken > 0,
                    Err(broken) => {
                        let disk = device.disk().0;
                        tracing::warn!(
                            disk,
                            queue,
                            "stopped serving a queue of a vhost-user client: {broken}"
                        );
                    }
                }
                if !machine.listed {
                    // Some are answered at once.
                    machine.listed = true;
                    self.answered.push(number);
                }
            }
            progress |= submit(now, &mut machine.device, engine, recorders);
        }
        progress
    }

    /// Tells drivers of answers, and sessions that queues are at rest.
    pub(super) fn flush(&mut self, ring: &mut Ring) {
        while let Some(number) = self.answered.pop() {
            let machine = self.machines[usize::from(number)].as_mut().expect("machines with answers exist");
            machine.listed = false;
            while let Some(queue) = machine.device.poll_signal() {
                if let Some(Some(events)) = machine.queue_events.get_mut(usize::from(queue)) {
                    tell(number, queue, events, ring);
                }
            }
        }
        let mut at = 0;
        while at < self.stops.len() {
            let (number, queue, _) = self.stops[at];
            match self.machine(number).device.poll_stopped(queue) {
                Some(base) => {
                    let (_, _, answer) = self.stops.swap_remove(at);
                    self.close_queue_events(number, queue, ring);
                    let _ = answer.send(base);
                }
                None => at += 1,
            }
        }
    }

    /// Has a driver made something available that nobody was told of?
    #[inline]
    pub(super) fn has_work(&self) -> bool {
        self.polled.iter().any(|(number, queue)| {
            self.machines[usize::from(*number)]
                .as_ref()
                .is_some_and(|machine| machine.device.has_work(*queue))
        })
    }

    /// Are there queues to look at?
    pub(super) fn are_polled(&self) -> bool {
        !self.polled.is_empty() && !self.resting
    }

    /// Asks all drivers to tell of new chains. False if there are some already.
    pub(super) fn prepare_sleep(&mut self) -> bool {
        let mut at = 0;
        while at < self.polled.len() {
            let (number, queue) = self.polled[at];
            let machine = self.machines[usize::from(number)].as_mut().expect("polled machines exist");
            machine.device.set_wants_kicks(queue, true);
            if machine.device.has_work(queue) {
                return false;
            }
            if machine.device.is_quiet(queue) {
                if let Some(Some(events)) = machine.queue_events.get_mut(usize::from(queue)) {
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

/// Tells a driver of answers, once for all that there are when it looks.
fn tell(number: u16, queue: u16, events: &mut QueueEvents, ring: &mut Ring) {
    let Some(call) = events.call else { return };
    if events.signalling {
        events.signal_again = true;
        return;
    }
    events.signalling = true;
    ring.signal(Token::new(SIGNAL, number, u32::from(events.serial) << 16 | u32::from(queue)), call);
}

/// Gives the engine what a device has for it. False if that is nothing.
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

impl std::fmt::Debug for Machines {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Machines").field("polled", &self.polled).finish_non_exhaustive()
    }
}
