//! vhost-user-blk: a disk as a virtio block device. The vhost-user client shares the memory that
//! contains the device's queues.
//!
//! # Parts
//! A [`Device`] runs on a shard. The device turns descriptor chains into engine requests, and the
//! engine's replies into entries of the used ring. The device performs no I/O and never blocks. A
//! [`session`] runs the vhost-user protocol over the client's socket, on its own thread, and passes
//! complete queues to the shard. docs/decisions/0011 gives the reasons.
//!
//! # Call order
//! [`Device::start`] starts a queue. Whenever the driver may have made chains available, call
//! [`Device::take`], then [`Device::poll_request`] until it returns nothing. The engine's replies
//! go to [`Device::handle_reply`], and declined reads to [`Device::handle_declined`]. Call
//! [`Device::ask_again`] when there may be buffers for declined reads. Call [`Device::poll_signal`]
//! until it returns nothing: each call returns a queue whose driver wants a notification. Before
//! sleeping, call [`Device::set_wants_kicks`], and then [`Device::has_work`] once more. After
//! sleeping, disable kicks again. A queue for which [`Device::is_quiet`] returns true needs no
//! polling until its driver kicks. [`Device::stop`] stops a queue. Then call
//! [`Device::poll_stopped`] until it returns a value.
//!
//! # Payload
//! The data of a write is copied out of guest memory before the engine sees the write. The data of
//! a read is copied into guest memory after the engine's reply. The guest may change its memory at
//! any time, and flash may be filled from the buffer after the answer. Reads of whole sectors that
//! are likely hits go directly into guest memory ([`Payload::adopt`]). If the engine declines such
//! a read, the device sends it again with a daemon buffer.
//!
//! # Limits
//! A driver's requests in flight are limited by the sizes of its queues, [`queue::SIZE_MAX`] and
//! [`block::QUEUES_MAX`], and by the engine's limits. A malformed chain is answered with an error
//! if it has a status byte. The queue of a malformed chain without a status byte becomes
//! [`Broken`]: the device does not serve it until the client sets it up again. Other queues are not
//! affected.

pub mod block;
mod budget;
pub mod capacity;
mod chain;
mod command;
mod guard;
pub mod inflight;
mod log;
pub mod memory;
pub mod queue;
mod served;
pub mod session;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, VecDeque};

use hob_engine::io::{IoError, Op, PayloadMemory, Promote, Reply, Request};
use hob_engine::outcome::Outcome;
use hob_engine::units::{DiskId, RequestId};

use crate::payload::{Payload, buffer_bytes};
use block::{Features, HEADER_BYTES, Info, RANGE_BYTES, Status, Wanted, understand};
use budget::BUDGET;
pub use budget::Budget;
use chain::{Chain, Fault, gather, scatter, total};
use command::{Command, Table};
use memory::{GuestMap, GuestRun};
use queue::{Broken, Queue};
pub use served::Start;
use served::{Served, State};

/// Maximum number of requests that wait for the engine. Above this number, the device takes no
/// chains from queues.
const REQUESTS_MAX: usize = 256;

/// A virtio block device: a disk as the guest's driver sees it.
#[derive(Debug)]
pub struct Device {
    info: Info,
    disk: DiskId,
    promote: Promote,
    /// Upper half of the request ids of this device.
    number: u32,
    queues: Vec<Option<Served>>,
    commands: Table,
    requests: VecDeque<Request>,
    /// Commands whose reads into guest memory were declined and that wait for a daemon buffer.
    declined: VecDeque<u32>,
    /// True if the disk is being removed from this daemon.
    abandoned: bool,
    /// Queues that could not be started, with their start indexes.
    failed: BTreeMap<u16, u16>,
    /// Queues with replies of which their drivers have not been notified yet.
    told: Vec<u16>,
    held_bytes: usize,
    /// An empty chain, kept to reuse its memory.
    chain: Chain,
}

impl Device {
    /// Creates a device without queues. `number` must be unique among the front ends of one engine.
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

    /// Sets which reads through this device promote data into the cache.
    #[must_use]
    pub fn promoting(self, promote: Promote) -> Device {
        Device { promote, ..self }
    }

    /// Returns the disk that this device serves.
    pub fn disk(&self) -> DiskId {
        self.disk
    }

    /// Sets the size of the disk in bytes.
    pub fn grow(&mut self, size_bytes: u64) {
        self.info.size_bytes = size_bytes;
    }

    /// Returns the total size of the buffers that the device's requests have, bytes.
    pub fn held_bytes(&self) -> usize {
        self.held_bytes
    }

    /// Starts serving a queue. The device first takes again the chains that an earlier daemon took
    /// and did not answer.
    ///
    /// # Errors
    /// Returns an error if the queue is invalid. An invalid queue is not served, and its start
    /// index stays unchanged.
    ///
    /// # Panics
    /// Panics if the queue is served already.
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
            // Requests are answered in any order, so `base` does not tell which chains were taken.
            // The next index is the used index plus the number of requests in flight.
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

    /// Stops taking chains from a queue. Does nothing if the queue is not served.
    pub fn stop(&mut self, queue: u16) {
        if let Some(Some(served)) = self.queues.get_mut(usize::from(queue))
            && served.state == State::Running
        {
            served.state = State::Stopping;
        }
    }

    /// Removes a stopped queue and returns the index at which to start again. Returns `None` while
    /// requests of the queue are in flight.
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

    /// Returns true if no request of the device is in flight.
    pub fn is_idle(&self) -> bool {
        self.commands.len() == 0
    }

    /// Returns true if the driver made chains available that can be taken now.
    pub fn has_work(&self, queue: u16) -> bool {
        let Some(Some(served)) = self.queues.get(usize::from(queue)) else { return false };
        // Requests that wait for the engine come first.
        self.requests.is_empty()
            && served.may_take()
            && served.needs_room.is_none()
            && (!served.again.is_empty() || !matches!(served.queue.peek(), Ok(None)))
    }

    /// Returns true if a queue has nothing in flight and no chain to take, so its driver must kick
    /// for new chains. A queue whose chains wait for a buffer is not quiet, because its driver need
    /// not kick again.
    pub fn is_quiet(&self, queue: u16) -> bool {
        let Some(Some(served)) = self.queues.get(usize::from(queue)) else { return true };
        let is_empty = || served.again.is_empty() && matches!(served.queue.peek(), Ok(None));
        served.taken == 0 && (!served.may_take() || is_empty())
    }

    /// Tells the driver of a queue whether to kick the device when it adds chains.
    pub fn set_wants_kicks(&mut self, queue: u16, wants: bool) {
        if let Some(Some(served)) = self.queues.get_mut(usize::from(queue)) {
            served.queue.set_wants_kicks(wants);
        }
    }

    /// Lets a queue be polled again if its next chain can get its buffer now. Until then the queue
    /// is not polled, because reading the chain costs more than this check.
    pub fn room_again(&mut self, queue: u16, payload: &mut impl Payload) {
        if let Some(Some(served)) = self.queues.get_mut(usize::from(queue)) {
            served.needs_room.take_if(|len| payload.has_room(*len));
        }
    }

    /// Takes chains that a driver has made available, and returns their number. The cost of the
    /// chains is deducted from `budget`, because a driver can offer endless chains that are
    /// answered immediately.
    ///
    /// # Errors
    /// Returns an error if the queue is broken and therefore no longer served.
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

    /// Returns the cost of the last chain: its descriptors, and the payload pages that were copied.
    fn cost_of_last(&self) -> u32 {
        let copied = total(&self.chain.readable) / 4096;
        1 + self.chain.steps + copied.min(BUDGET.into()) as u32
    }

    fn served(&mut self, queue: u16) -> &mut Served {
        self.queues[usize::from(queue)].as_mut().expect("a queue in service")
    }

    /// Starts the request of a chain, or answers the chain.
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

    /// Allocates a command's buffer, and queues its first engine request.
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

    /// Returns the next request for the engine; `None` if there is none.
    #[inline]
    pub fn poll_request(&mut self) -> Option<Request> {
        self.requests.pop_front()
    }

    /// Puts back a request that the engine has no room for.
    pub fn unpoll_request(&mut self, request: Request) {
        self.requests.push_front(request);
    }

    /// Returns operation, offset and total length of the guest's request that an engine request
    /// begins. Returns `None` for later pieces and retries. Call this function before the request
    /// is answered.
    pub fn begun_by(&self, request: &Request) -> Option<(Op, u64, u64)> {
        let command = self.commands.get(request.id.0 as u32);
        let begins = command.offset == request.offset && request.memory != PayloadMemory::DaemonAfterGuest;
        begins.then_some((command.op, command.offset, command.len))
    }

    /// Handles the engine's reply. If the disk is being removed, requests that a later daemon can
    /// execute are not answered.
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

    /// Handles a declined read into guest memory: the read is repeated with a buffer of the daemon.
    pub fn handle_declined(&mut self, id: RequestId, payload: &mut impl Payload) {
        let slot = id.0 as u32;
        let served = self.queues[usize::from(self.commands.get(slot).queue)].as_ref();
        let served = served.expect("queues outlive their commands");
        // Data from flash may already be in guest memory, so the dirty log records it.
        self.commands.segments(slot).iter().for_each(|part| served.note(part.address, u64::from(part.len)));
        if self.abandoned {
            let (result, outcome) = (Err(IoError::ShuttingDown), Outcome::Refused);
            return self.handle_reply(&Reply { id, disk: self.disk, result, outcome }, payload);
        }
        self.declined.push_back(slot);
    }

    /// Allocates daemon buffers for declined reads and queues the reads for the engine, while
    /// buffers are free.
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

    /// Returns the next queue whose driver wants a notification of answers.
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

    /// Drops requests that the engine has not seen, when the device ends. The in-flight memory
    /// still records them.
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

enum Begun {
    Taken,
    /// No buffer of this many bytes is free.
    NoRoom(usize),
}

/// Decodes the request of a descriptor chain. The chain's status byte was removed already.
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
