//! vhost-user-blk: a disk as a virtio block device, whose queues lie in memory that the guest's machine shares.
//!
//! # Parts
//! A [`Device`] is what a shard serves: it turns descriptor chains into the engine's requests, and replies into answers in the
//! used ring. It does no I/O and waits for nothing. A [`session`] speaks the vhost-user protocol over the machine's socket, on
//! a thread of its own, and hands finished queues to the shard. docs/decisions/0011 says why.
//!
//! # Call order
//! [`Device::start`] a queue. Whenever its driver may have made something available: [`Device::take`], then
//! [`Device::poll_request`] until it yields nothing. The engine's answers go to [`Device::handle_reply`], what it declines to
//! [`Device::handle_declined`], and [`Device::ask_again`] when there may be room for it. [`Device::poll_signal`] says whose driver
//! wants to be told. Before sleeping, [`Device::set_wants_kicks`], and then [`Device::has_work`] once more; and back after it. A queue that [`Device::is_quiet`] need not be
//! looked at before its driver tells. [`Device::stop`], and [`Device::poll_stopped`] until it is so.
//!
//! # Payload
//! A write is copied out of the guest's memory before the engine sees it, and a read is copied into it afterwards: the
//! guest may change its memory at any time, and flash may be filled from the buffer after the answer. Reads of whole sectors that are
//! likely hits go straight into the guest's memory ([`Payload::adopt`]); those that the engine declines take the other way.
//!
//! # Limits
//! What a driver can have in flight is bounded by the sizes of its queues, [`queue::SIZE_MAX`] and [`block::QUEUES_MAX`], and
//! by the engine's. A chain that makes no sense is answered with an error where it has a place for one; otherwise its queue is
//! [`Broken`]: it is served no further until the machine sets it up anew. Neither touches anything else.

pub mod block;
pub mod capacity;
mod chain;
mod command;
mod guard;
pub mod inflight;
mod log;
pub mod memory;
pub mod queue;
pub mod session;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use hob_engine::io::{IoError, Op, PayloadMemory, Promote, Reply, Request};
use hob_engine::outcome::Outcome;
use hob_engine::units::{DiskId, RequestId};

use crate::payload::{Payload, buffer_bytes};
use block::{Features, HEADER_BYTES, Info, RANGE_BYTES, Status, Wanted, understand};
use chain::{Chain, Fault, gather, scatter, total};
use command::{Command, Table};
use inflight::QueueInflight;
use log::ChangeLog;
use memory::{GuestMap, GuestRun};
use queue::{Broken, Layout, Queue};

/// Requests that wait for the engine; no more is taken from queues beyond that.
const REQUESTS_MAX: usize = 256;

/// Descriptors, and pages of payload, that one machine may cost in a turn of its shard's loop: a fraction of a millisecond.
const BUDGET: u32 = 4096;

/// What the chains of one machine may still cost in this turn.
#[derive(Debug)]
pub struct Budget {
    left: u32,
}

impl Default for Budget {
    fn default() -> Budget {
        Budget { left: BUDGET }
    }
}

/// A queue that is ready to be served.
#[derive(Debug)]
pub struct Start {
    /// Which.
    pub(crate) queue: u16,
    pub(crate) map: Arc<GuestMap>,
    pub(crate) layout: Layout,
    /// Where to begin in the available ring.
    pub(crate) base: u16,
    /// What the driver has agreed to.
    pub(crate) features: Features,
    pub(crate) inflight: Option<QueueInflight>,
    /// Where to say what was changed.
    pub(crate) log: Option<Arc<ChangeLog>>,
}

impl Start {
    /// Without memory for what is in flight; for tests.
    pub fn new(queue: u16, map: Arc<GuestMap>, layout: Layout, base: u16, features: Features) -> Start {
        Start { queue, map, layout, base, features, inflight: None, log: None }
    }

    /// Which queue.
    pub fn queue(&self) -> u16 {
        self.queue
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Running,
    /// What is in flight ends; nothing new is taken.
    Stopping,
    Broken,
}

/// A queue in service.
#[derive(Debug)]
struct Served {
    queue: Queue,
    map: Arc<GuestMap>,
    features: Features,
    inflight: Option<QueueInflight>,
    log: Option<Arc<ChangeLog>>,
    /// Where the guest has the used ring, and its bytes.
    used: (u64, u64),
    /// Taken by an earlier daemon and not answered.
    again: VecDeque<u16>,
    state: State,
    /// Chains taken and not answered.
    taken: u32,
    /// There was no buffer of so many bytes for the next chain.
    needs_room: Option<usize>,
    /// On the list of those that have answers to tell of.
    listed: bool,
}

impl Served {
    fn may_take(&self) -> bool {
        match self.state {
            State::Running => true,
            State::Stopping => !self.again.is_empty(),
            State::Broken => false,
        }
    }
}

/// A disk as its guest's driver sees it. See the module's text.
#[derive(Debug)]
pub struct Device {
    info: Info,
    disk: DiskId,
    promote: Promote,
    /// Upper half of the request ids.
    number: u32,
    queues: Vec<Option<Served>>,
    commands: Table,
    requests: VecDeque<Request>,
    /// Commands whose reads were declined, and have no buffer.
    declined: VecDeque<u32>,
    /// Its disk is going away.
    abandoned: bool,
    /// Queues that could not be served, and where they begin.
    failed: BTreeMap<u16, u16>,
    /// Queues with answers that their drivers have not been told of.
    told: Vec<u16>,
    held_bytes: usize,
    /// Kept for its memory only.
    chain: Chain,
}

impl Device {
    /// A device without queues. `number` is not that of another front end of the same engine.
    pub fn new(info: Info, disk: DiskId, number: u32) -> Device {
        Device {
            info,
            disk,
            promote: Promote::Usual,
            number,
            queues: Vec::new(),
            commands: Table::default(),
            requests: VecDeque::new(),
            declined: VecDeque::new(),
            abandoned: false,
            failed: BTreeMap::new(),
            told: Vec::new(),
            held_bytes: 0,
            chain: Chain::default(),
        }
    }

    /// The same, whose reads leave that behind in the cache.
    #[must_use]
    pub fn promoting(self, promote: Promote) -> Device {
        Device { promote, ..self }
    }

    /// The disk it is.
    pub fn disk(&self) -> DiskId {
        self.disk
    }

    /// The disk has so many bytes now.
    pub fn grow(&mut self, size_bytes: u64) {
        self.info.size_bytes = size_bytes;
    }

    /// Bytes of buffers that its requests hold.
    pub fn held_bytes(&self) -> usize {
        self.held_bytes
    }

    /// Serves a queue from now on. What an earlier daemon had taken is taken again, first.
    ///
    /// # Errors
    /// The queue makes no sense. It is not served, and begins again where it was to begin.
    ///
    /// # Panics
    /// If it is served already.
    pub fn start(&mut self, start: Start) -> Result<(), Broken> {
        let (number, base) = (start.queue, start.base);
        let started = self.try_start(start);
        match started {
            Ok(()) => self.failed.remove(&number),
            Err(_) => self.failed.insert(number, base),
        };
        started
    }

    fn try_start(&mut self, start: Start) -> Result<(), Broken> {
        let Start { queue: number, map, layout, base, features, mut inflight, log } = start;
        let mut queue = Queue::new(&map, &layout, base, features.contains(Features::EVENT_IDX))?;
        let mut again = VecDeque::new();
        if let Some(inflight) = &mut inflight {
            again.extend(inflight.recover(queue.next_used()));
            // Requests are answered in any order, so the machine knows only how many there were.
            queue.skip_to(queue.next_used().wrapping_add(again.len() as u16));
        }
        let index = usize::from(number);
        if self.queues.len() <= index {
            self.queues.resize_with(index + 1, || None);
        }
        assert!(self.queues[index].is_none(), "a queue is stopped before it is started again");
        let used = (map.guest_address(layout.used).unwrap_or(0), queue.used_bytes());
        let served = Served {
            queue,
            log,
            used,
            map,
            features,
            inflight,
            again,
            state: State::Running,
            taken: 0,
            needs_room: None,
            listed: false,
        };
        served.note(used.0, used.1);
        self.queues[index] = Some(served);
        Ok(())
    }

    /// Takes nothing new from a queue any more. One that is not served is no error.
    pub fn stop(&mut self, queue: u16) {
        if let Some(Some(served)) = self.queues.get_mut(usize::from(queue))
            && served.state == State::Running
        {
            served.state = State::Stopping;
        }
    }

    /// Is a queue at rest that was stopped? Then it is forgotten, and this is where to begin again. `None` while something
    /// is in flight.
    pub fn poll_stopped(&mut self, queue: u16) -> Option<u16> {
        let slot = self.queues.get_mut(usize::from(queue)).filter(|slot| slot.is_some());
        let Some(slot) = slot else { return Some(self.failed.remove(&queue).unwrap_or(0)) };
        let served = slot.as_ref().expect("just looked at");
        if served.taken > 0 || served.may_take() {
            return None;
        }
        let base = served.queue.next_available();
        self.told.retain(|told| *told != queue);
        *slot = None;
        Some(base)
    }

    /// Is nothing of it in flight?
    pub fn is_idle(&self) -> bool {
        self.commands.len() == 0
    }

    /// Has the driver made something available that can be taken now?
    pub fn has_work(&self, queue: u16) -> bool {
        let Some(Some(served)) = self.queues.get(usize::from(queue)) else { return false };
        // What waits for the engine comes first.
        self.requests.is_empty()
            && served.may_take()
            && served.needs_room.is_none()
            && (!served.again.is_empty() || !matches!(served.queue.peek(), Ok(None)))
    }

    /// Is nothing of a queue in flight, and nothing there to be taken, now or later? Then its driver has to tell of what comes. A queue whose
    /// chains wait for room is not quiet: its driver has told of them, and need not do so again.
    pub fn is_quiet(&self, queue: u16) -> bool {
        let Some(Some(served)) = self.queues.get(usize::from(queue)) else { return true };
        let is_empty = || served.again.is_empty() && matches!(served.queue.peek(), Ok(None));
        served.taken == 0 && (!served.may_take() || is_empty())
    }

    /// Asks a driver to tell of new chains, or not to.
    pub fn set_wants_kicks(&mut self, queue: u16, wants: bool) {
        if let Some(Some(served)) = self.queues.get_mut(usize::from(queue)) {
            served.queue.set_wants_kicks(wants);
        }
    }

    /// There may be room for buffers again. A queue whose next chain has none is not looked at: walking a chain costs more than
    /// asking for the room.
    pub fn room_again(&mut self, queue: u16, payload: &mut impl Payload) {
        if let Some(Some(served)) = self.queues.get_mut(usize::from(queue)) {
            served.needs_room.take_if(|len| payload.has_room(*len));
        }
    }

    /// Takes what a driver has made available, and returns how many chains that were. What it may cost is in `budget`, which is reduced: a
    /// driver may offer without end what is answered at once, in chains of many descriptors.
    ///
    /// # Errors
    /// The queue is broken, and is served no further.
    pub fn take(
        &mut self,
        queue: u16,
        budget: &mut Budget,
        payload: &mut impl Payload,
    ) -> Result<u32, Broken> {
        let mut count = 0;
        while self.requests.len() < REQUESTS_MAX && budget.left > 0 {
            let Some(Some(served)) = self.queues.get_mut(usize::from(queue)) else { break };
            if !served.may_take() || served.needs_room.is_some() {
                break;
            }
            let next = match served.again.front() {
                Some(head) => Ok(Some(*head)),
                None => served.queue.peek(),
            };
            let begun = next.and_then(|next| next.map(|head| self.begin(queue, head, payload)).transpose());
            budget.left = budget.left.saturating_sub(self.cost_of_last());
            match begun {
                Ok(Some(Begun::Taken)) => count += 1,
                Ok(Some(Begun::NoRoom(len))) => {
                    self.served(queue).needs_room = Some(len);
                    break;
                }
                Ok(None) => break,
                Err(broken) => {
                    self.served(queue).state = State::Broken;
                    return Err(broken);
                }
            }
        }
        Ok(count)
    }

    /// What the chain that was begun last has cost: its descriptors, and the pages that were copied.
    fn cost_of_last(&self) -> u32 {
        let copied = total(&self.chain.readable) / 4096;
        1 + self.chain.steps + copied.min(BUDGET.into()) as u32
    }

    fn served(&mut self, queue: u16) -> &mut Served {
        self.queues[usize::from(queue)].as_mut().expect("a queue in service")
    }

    /// Begins what a chain asks for, or answers it.
    fn begin(&mut self, number: u16, head: u16, payload: &mut impl Payload) -> Result<Begun, Broken> {
        let served = self.queues[usize::from(number)].as_mut().expect("a queue in service");
        let chain = &mut self.chain;
        let map = &*served.map;
        chain.walk(map, served.queue.descriptors(), served.queue.size(), head).map_err(Broken::Chain)?;
        let status = chain.take_status(map).map_err(Broken::Chain)?;
        let wanted = wanted(chain, map, &self.info, served.features);
        let command = Command::new(number, head, status);
        match wanted {
            Ok(Wanted::Engine { op, offset, len }) => {
                return self.issue_first(command.wanting(op, offset, len), payload);
            }
            Ok(Wanted::Id) => {
                let id = self.info.id();
                let copied = scatter(map, &chain.writable, &id);
                chain.writable.iter().for_each(|part| served.note(part.address, u64::from(part.len)));
                let status = if copied { Status::Ok } else { Status::IoError };
                served.begin_chain(head);
                self.answer(&command, status, id.len() as u32);
            }
            Err(status) => {
                served.begin_chain(head);
                self.answer(&command, status, 0);
            }
        }
        Ok(Begun::Taken)
    }

    /// Gives a command its buffer, and the engine its first request.
    fn issue_first(&mut self, mut command: Command, payload: &mut impl Payload) -> Result<Begun, Broken> {
        let served = self.queues[usize::from(command.queue)].as_mut().expect("a queue in service");
        if command.op.has_buffer() {
            let run = GuestRun::new(&served.map, &self.chain.writable);
            if !command.adopt(self.disk, &run, payload) && !command.alloc(payload) {
                return Ok(Begun::NoRoom(buffer_bytes(command.offset, command.len) as usize));
            }
            if command.op != Op::Read {
                let bytes = payload.bytes_mut(command.payload_slice());
                let copied = gather(&served.map, &self.chain.readable, bytes);
                assert!(copied, "the chain was found to be in memory");
            }
        }
        served.begin_chain(command.head);
        self.held_bytes += command.buffer_bytes;
        let segments = std::mem::take(&mut self.chain.writable);
        let (slot, spare) = self.commands.insert(command, segments);
        self.chain.writable = spare;
        self.issue(slot);
        Ok(Begun::Taken)
    }

    fn issue(&mut self, slot: u32) {
        let id = RequestId(u64::from(self.number) << 32 | u64::from(slot));
        let request = self.commands.get_mut(slot).request(id, self.disk, self.promote);
        self.requests.push_back(request);
    }

    /// The next request for the engine.
    #[inline]
    pub fn poll_request(&mut self) -> Option<Request> {
        self.requests.pop_front()
    }

    /// Takes back a request that the engine has no room for.
    pub fn unpoll_request(&mut self, request: Request) {
        self.requests.push_front(request);
    }

    /// What the guest asked for whose first request this is, and how long that is in all; `None` if the request is a later
    /// piece, or asked again. To be asked before the request is answered.
    pub fn begun_by(&self, request: &Request) -> Option<(Op, u64, u64)> {
        let command = self.commands.get(request.id.0 as u32);
        let begins = command.offset == request.offset && request.memory != PayloadMemory::DaemonAfterGuest;
        begins.then_some((command.op, command.offset, command.len))
    }

    /// The engine's answer. A disk that is going away answers nothing that a later daemon can carry out.
    pub fn handle_reply(&mut self, reply: &Reply, payload: &mut impl Payload) {
        let slot = reply.id.0 as u32;
        if reply.result.is_ok() && self.commands.get_mut(slot).advance() {
            return self.issue(slot);
        }
        let (command, segments) = self.commands.remove(slot);
        self.held_bytes -= command.buffer_bytes;
        let served = self.queues[usize::from(command.queue)].as_mut().expect("queues outlive their commands");
        if reply.result == Err(IoError::ShuttingDown) && served.inflight.is_some() {
            served.taken -= 1;
            served.state = State::Broken;
        } else {
            let (status, written) = match reply.result {
                Ok(()) if command.op == Op::Read => {
                    let copied = command.memory == PayloadMemory::Guest
                        || scatter(&served.map, &segments, payload.bytes(command.payload_slice()));
                    segments.iter().for_each(|part| served.note(part.address, u64::from(part.len)));
                    match copied {
                        true => (Status::Ok, command.len as u32),
                        false => (Status::IoError, 0),
                    }
                }
                Ok(()) => (Status::Ok, 0),
                Err(error) => (error.into(), 0),
            };
            self.answer(&command, status, written);
        }
        command.reply_buffer.into_iter().for_each(|id| payload.release(id));
        self.commands.give_back(segments);
    }

    /// The engine gives a read into the guest's memory back.
    pub fn handle_declined(&mut self, id: RequestId, payload: &mut impl Payload) {
        let slot = id.0 as u32;
        let served = self.queues[usize::from(self.commands.get(slot).queue)].as_ref();
        let served = served.expect("queues outlive their commands");
        // Flash may have been read into it.
        self.commands.segments(slot).iter().for_each(|part| served.note(part.address, u64::from(part.len)));
        if self.abandoned {
            let (result, outcome) = (Err(IoError::ShuttingDown), Outcome::Refused);
            return self.handle_reply(&Reply { id, disk: self.disk, result, outcome }, payload);
        }
        self.declined.push_back(slot);
    }

    /// Gives reads that were declined a buffer, and to the engine again, as far as there is room.
    pub fn ask_again(&mut self, payload: &mut impl Payload) {
        while let Some(slot) = self.declined.front().copied() {
            let command = self.commands.get_mut(slot);
            if !command.alloc(payload) {
                return;
            }
            self.held_bytes += command.buffer_bytes;
            self.declined.pop_front();
            self.issue(slot);
        }
    }

    fn answer(&mut self, command: &Command, status: Status, written: u32) {
        let served = self.queues[usize::from(command.queue)].as_mut().expect("queues outlive their commands");
        let put = served.map.write(command.status, &[status as u8]);
        assert!(put, "the place of the status was found to be in memory");
        if let Some(inflight) = &served.inflight {
            inflight.begin_answer(command.head);
        }
        served.queue.push_used(command.head, written + 1);
        if let Some(inflight) = &served.inflight {
            inflight.end_answer(command.head, served.queue.next_used());
        }
        served.note(command.status, 1);
        served.note(served.used.0, served.used.1);
        served.taken -= 1;
        if !served.listed {
            served.listed = true;
            self.told.push(command.queue);
        }
    }

    /// The next queue whose driver wants to be told of answers.
    pub fn poll_signal(&mut self) -> Option<u16> {
        while let Some(queue) = self.told.pop() {
            let served = self.served(queue);
            served.listed = false;
            if served.queue.wants_telling() {
                return Some(queue);
            }
        }
        None
    }

    /// Gives up requests that the engine has not seen. For the end: what they were is in the memory for what is in flight,
    /// if there is any.
    pub fn abandon(&mut self, payload: &mut impl Payload) {
        for served in self.queues.iter_mut().flatten() {
            served.state = State::Broken;
            served.again.clear();
        }
        self.abandoned = true;
        let requests = std::mem::take(&mut self.requests).into_iter();
        let unseen = requests.map(|request| (request.id.0 as u32, request.buffer));
        let declined = std::mem::take(&mut self.declined).into_iter().map(|slot| (slot, None));
        for (slot, buffer) in unseen.chain(declined) {
            let (command, segments) = self.commands.remove(slot);
            self.held_bytes -= command.buffer_bytes;
            self.served(command.queue).taken -= 1;
            buffer.into_iter().chain(command.reply_buffer).for_each(|id| payload.release(id));
            self.commands.give_back(segments);
        }
    }
}

impl Served {
    /// Some of the guest's memory was written.
    fn note(&self, address: u64, len: u64) {
        if let Some(log) = &self.log {
            log.note(address, len);
        }
    }

    /// A chain is taken: it is in flight from here on.
    fn begin_chain(&mut self, head: u16) {
        if self.again.front() == Some(&head) {
            // It was in flight already.
            self.again.pop_front();
        } else {
            if let Some(inflight) = &mut self.inflight {
                inflight.take(head);
            }
            self.queue.advance();
        }
        self.taken += 1;
    }
}

enum Begun {
    Taken,
    /// For a buffer of so many bytes.
    NoRoom(usize),
}

/// What a chain asks for, whose status byte is taken away already.
fn wanted(chain: &mut Chain, map: &GuestMap, info: &Info, features: Features) -> Result<Wanted, Status> {
    let mut header = [0; HEADER_BYTES];
    if chain.fault.is_some() || !chain.take_header(map, &mut header) {
        return Err(Status::IoError);
    }
    let data = (total(&chain.readable), total(&chain.writable));
    let mut range = [0; RANGE_BYTES];
    let has_range = data.0 == RANGE_BYTES as u64 && gather(map, &chain.readable, &mut range);
    understand(header, data, has_range.then_some(range), info, features)
}

impl From<Fault> for Broken {
    fn from(fault: Fault) -> Broken {
        Broken::Chain(fault)
    }
}
