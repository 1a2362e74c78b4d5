//! Virtual-time replay: the engine as it is, with modelled devices instead of storage, and no payload.
//!
//! The loop is the shard loop with a priority queue for a ring: take what happens next, tell the engine, ask the device
//! models when what it wants will be done. Load is *open* ([`Replay::open`]: each request has its time of arrival,
//! whatever becomes of those before it) or *closed* ([`Replay::closed`]: each of N clients asks again after its reply
//! and some thought). A request that the engine has no room for waits outside, in order, and its latency counts
//! from its arrival.
//!
//! Nothing is checked here and nothing fails: contents, faults and crashes are [`sim`](crate::sim)'s part. Memory
//! is the engine's plus a few words for each request in flight; requests are pulled when they are due, never ahead.
//!
//! Units: bytes, and nanoseconds of virtual time.

#[cfg(test)]
mod tests;

use std::collections::VecDeque;
use std::fmt;

use hob_engine::admission::Admission;
use hob_engine::command::{self, CacheChange, CacheConfig, Command, DiskConfig, Event, Segment};
use hob_engine::io::{Io, IoOp, Op, Reply, Request, Target};
use hob_engine::outcome::Outcome;
use hob_engine::policy::PolicyKind;
use hob_engine::stats::DiskStats;
use hob_engine::units::{BufferId, CommandId, DeviceId, DiskId, Instant, IoId, RequestId, SECTOR_BYTES};
use hob_engine::{Engine, Limits, REQUEST_BYTES_MAX};

use crate::disk_model::Access;
use crate::queue::Queue;
use crate::service::ServiceModel;

/// Segments of caches that are large enough to have some.
const SEGMENT_BYTES: u64 = 1 << 20;

/// Every sector has the same checksum: there is no content. One more than the longest aligned request has.
static SUMS: [u32; (REQUEST_BYTES_MAX / SECTOR_BYTES) as usize + 1] =
    [0; (REQUEST_BYTES_MAX / SECTOR_BYTES) as usize + 1];

/// One disk's cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CacheSetup {
    /// Room for blocks; rounded down to whole MiB from 64 MiB on, to whole blocks below.
    pub bytes: u64,
    /// Cache block: a power of two, 4 KiB to 1 MiB.
    pub block_bytes: u32,
    /// Replacement.
    pub policy: PolicyKind,
}

/// One disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DiskSetup {
    /// Its size; a multiple of 512.
    pub size_bytes: u64,
    /// Where it begins on the backing, which all disks share.
    pub backing_offset: u64,
    /// `None`: every request goes to the backing.
    pub cache: Option<CacheSetup>,
}

/// Everything that is fixed when a replay begins.
#[derive(Clone, Debug)]
pub struct Setup {
    /// The disks, numbered from 0.
    pub disks: Vec<DiskSetup>,
    /// The device that all caches share.
    pub flash: ServiceModel,
    /// What all disks lie on.
    pub backing: ServiceModel,
    /// The engine's.
    pub limits: Limits,
}

impl Setup {
    /// One disk from the start of the backing, under the engine's usual limits.
    pub fn one_disk(
        size_bytes: u64,
        cache: Option<CacheSetup>,
        flash: impl Into<ServiceModel>,
        backing: impl Into<ServiceModel>,
    ) -> Self {
        Setup {
            disks: vec![DiskSetup { size_bytes, backing_offset: 0, cache }],
            flash: flash.into(),
            backing: backing.into(),
            limits: Limits::default(),
        }
    }
}

/// Why a set-up cannot work, in a sentence.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SetupError(pub String);

impl fmt::Display for SetupError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for SetupError {}

/// What is asked of a disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ask {
    /// Which disk. One that does not exist refuses.
    pub disk: u32,
    /// What to do.
    pub op: Op,
    /// First byte.
    pub offset: u64,
    /// Bytes. Beyond the disk's end, or longer than the engine's longest request: refused.
    pub len: u64,
    /// The caller's mark; handed back with the answer.
    pub tag: u32,
}

/// An answered request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Served {
    /// What was asked.
    pub ask: Ask,
    /// Which client of a closed loop asked; 0 in an open one.
    pub client: u32,
    /// When it arrived, waiting outside the engine included.
    pub at: Instant,
    /// From arrival to answer.
    pub latency_ns: u64,
    /// How it was served.
    pub outcome: Outcome,
}

/// What one run did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Run {
    /// Requests answered.
    pub requests: u64,
    /// Of these, how many had to wait outside because the engine was full.
    pub waited: u64,
    /// When the run began.
    pub began: Instant,
    /// When its last I/O ended, fills included.
    pub ended: Instant,
    /// Most requests unanswered in the engine at a time.
    pub in_flight_max: u32,
}

#[derive(Debug)]
enum Next {
    /// An I/O ends; flash sectors it moved.
    Complete(IoId, u32),
    /// A client has thought enough.
    Client(u32),
}

#[derive(Clone, Copy, Debug)]
struct InFlight {
    ask: Ask,
    client: u32,
    at: Instant,
}

/// The engine, its devices and the clock. Runs may follow each other: time goes on and caches stay warm.
pub struct Replay {
    engine: Engine,
    requests_max: u32,
    disks: Vec<DiskSetup>,
    flash: ServiceModel,
    backing: ServiceModel,
    queue: Queue<Next>,
    now: Instant,
    in_flight: Vec<InFlight>,
    /// Places in `in_flight` to use again.
    free: Vec<u32>,
    run: Run,
}

impl Replay {
    /// Idle disks with empty caches.
    pub fn new(setup: Setup) -> Result<Self, SetupError> {
        let Setup { disks, flash, backing, limits } = setup;
        let mut replay = Replay {
            engine: Engine::new(limits),
            requests_max: limits.requests_max,
            disks,
            flash,
            backing,
            queue: Queue::default(),
            now: Instant(0),
            in_flight: Vec::new(),
            free: Vec::new(),
            run: Run::default(),
        };
        let mut flash_at = 0;
        for index in 0..replay.disks.len() {
            replay.add_disk(index, &mut flash_at)?;
        }
        Ok(replay)
    }

    /// The time.
    pub fn now(&self) -> Instant {
        self.now
    }

    /// The engine's statistics of a disk, `None` when there is no such disk. Their latencies count from the moment the
    /// engine took a request.
    pub fn stats(&self, disk: u32) -> Option<DiskStats> {
        self.engine.stats(self.now, DiskId(disk))
    }

    /// Starts the engine's statistics again, after a warm-up.
    pub fn reset_stats(&mut self) {
        for disk in 0..self.disks.len() as u32 {
            self.engine.handle_command(self.now, CommandId(0), DiskId(disk), Command::ResetStats);
            while self.engine.poll_event().is_some() {}
        }
    }

    /// Serves requests that arrive at their own times, nanoseconds after this call; a time before its predecessor's
    /// counts as the predecessor's. Returns when everything has ended.
    pub fn open(
        &mut self,
        requests: impl IntoIterator<Item = (u64, Ask)>,
        mut served: impl FnMut(&Served),
    ) -> Run {
        let mut requests = requests.into_iter();
        self.begin();
        let began = self.now;
        let mut due = began;
        let mut pull = |due: &mut Instant| {
            let (at, ask) = requests.next()?;
            *due = (*due).max(began + at);
            Some(ask)
        };
        let mut head = pull(&mut due);
        loop {
            match (head, self.next_at()) {
                (Some(ask), next) if self.has_room() && next.is_none_or(|next| self.now.max(due) < next) => {
                    self.now = self.now.max(due);
                    self.submit(InFlight { ask, client: 0, at: due });
                    head = pull(&mut due);
                }
                (_, Some(_)) => {
                    let client = self.step();
                    assert!(client.is_none(), "an open loop has no clients");
                }
                (Some(_), None) => panic!("the engine is full and has nothing to do"),
                (None, None) => return self.end(),
            }
            self.drain(|answer| served(answer));
        }
    }

    /// Serves `clients` clients. `next` is asked at the start and after each reply, with the time and the client's
    /// number, for how long the client thinks and what it asks then; `None` ends this client. Returns when all have
    /// ended.
    pub fn closed(
        &mut self,
        clients: u32,
        mut next: impl FnMut(Instant, u32) -> Option<(u64, Ask)>,
        mut served: impl FnMut(&Served),
    ) -> Run {
        self.begin();
        let mut asks: Vec<Option<Ask>> = vec![None; clients as usize];
        // Clients whose request is due, in order, since when.
        let mut ready: VecDeque<(u32, Instant)> = VecDeque::new();
        let mut replied: Vec<u32> = (0..clients).collect();
        loop {
            for client in replied.drain(..) {
                if let Some((think_ns, ask)) = next(self.now, client) {
                    asks[client as usize] = Some(ask);
                    self.queue.push(self.now + think_ns, Next::Client(client));
                }
            }
            while self.has_room()
                && let Some((client, at)) = ready.pop_front()
            {
                let ask = asks[client as usize].take().expect("a client that is ready asks");
                self.submit(InFlight { ask, client, at });
            }
            self.drain(|answer| {
                served(answer);
                replied.push(answer.client);
            });
            if !replied.is_empty() {
                continue;
            }
            if self.next_at().is_none() {
                assert!(ready.is_empty(), "the engine is full and has nothing to do");
                return self.end();
            }
            if let Some(client) = self.step() {
                ready.push_back((client, self.now));
            }
            self.drain(|answer| {
                served(answer);
                replied.push(answer.client);
            });
        }
    }

    fn add_disk(&mut self, index: usize, flash_at: &mut u64) -> Result<(), SetupError> {
        let DiskSetup { size_bytes, backing_offset, cache } = self.disks[index];
        let end = backing_offset.checked_add(size_bytes);
        if end.is_none_or(|end| end > self.backing.capacity_bytes()) {
            return Err(SetupError(format!("disk {index} reaches beyond its backing's end")));
        }
        if !size_bytes.is_multiple_of(512) {
            return Err(SetupError(format!("disk {index}: {size_bytes} bytes are not a multiple of 512")));
        }
        let config = DiskConfig { size_bytes, access: command::Access::ReadWrite };
        self.command(index, Command::AddDisk(config))?;
        let Some(CacheSetup { bytes, block_bytes, policy }) = cache else { return Ok(()) };
        let segment_bytes = if bytes >= 64 * SEGMENT_BYTES { SEGMENT_BYTES } else { u64::from(block_bytes) };
        let count = bytes.checked_div(segment_bytes).unwrap_or(0);
        let segments = (0..count).map(|i| *flash_at + i * segment_bytes);
        let segments = segments.map(|offset| Segment { device: DeviceId(0), offset }).collect();
        *flash_at += count * segment_bytes;
        let admission = Admission::default();
        let config = CacheConfig::write_through(block_bytes, segment_bytes, policy, admission);
        self.command(index, Command::Cache(CacheChange::enable_volatile(config, segments)))
    }

    fn command(&mut self, index: usize, command: Command) -> Result<(), SetupError> {
        self.engine.handle_command(self.now, CommandId(0), DiskId(index as u32), command);
        match self.engine.poll_event() {
            Some(Event::Done { result: Ok(_), .. }) => Ok(()),
            Some(Event::Done { result: Err(why), .. }) => {
                let cache = self.disks[index].cache;
                Err(SetupError(format!("disk {index} cannot be set up ({why:?}) with {cache:?}")))
            }
            other => panic!("an idle engine answers commands at once, not {other:?}"),
        }
    }

    fn begin(&mut self) {
        self.run = Run { began: self.now, ..Run::default() };
    }

    fn end(&mut self) -> Run {
        assert_eq!(self.engine.in_flight(), 0, "everything has ended");
        self.run.ended = self.now;
        self.run
    }

    fn has_room(&self) -> bool {
        self.engine.in_flight() < self.requests_max
    }

    /// When something happens by itself.
    fn next_at(&self) -> Option<Instant> {
        match (self.queue.next_at(), self.engine.poll_timeout()) {
            (Some(event), Some(timeout)) => Some(event.min(timeout)),
            (event, timeout) => event.or(timeout),
        }
    }

    /// Lets the next thing happen. Returns the client that has thought enough, if that was it.
    fn step(&mut self) -> Option<u32> {
        let event_at = self.queue.next_at();
        if let Some(timeout) = self.engine.poll_timeout()
            && event_at.is_none_or(|at| timeout < at)
        {
            self.now = self.now.max(timeout);
            self.engine.handle_timeout(self.now);
            return None;
        }
        let (at, next) = self.queue.pop()?;
        self.now = at;
        match next {
            Next::Client(client) => Some(client),
            Next::Complete(id, sectors) => {
                self.engine.handle_completion(at, id, Ok(()), &SUMS[..sectors as usize]);
                None
            }
        }
    }

    /// Hands a request to the engine, which has room. It names the one buffer there is: no payload moves.
    fn submit(&mut self, request: InFlight) {
        let InFlight { ask, at, .. } = request;
        self.run.waited += u64::from(at < self.now);
        let slot = match self.free.pop() {
            Some(slot) => {
                self.in_flight[slot as usize] = request;
                slot
            }
            None => {
                self.in_flight.push(request);
                self.in_flight.len() as u32 - 1
            }
        };
        let buffer = ask.op.has_buffer().then_some(BufferId(0));
        let (offset, len) = if ask.op == Op::Flush { (0, 0) } else { (ask.offset, ask.len) };
        let request =
            Request { id: RequestId(slot.into()), disk: DiskId(ask.disk), op: ask.op, offset, len, buffer };
        self.engine.handle_request(self.now, request).expect("the engine has room");
        let unanswered = (self.in_flight.len() - self.free.len()) as u32;
        self.run.in_flight_max = self.run.in_flight_max.max(unanswered);
    }

    /// Carries out what the engine asks for.
    fn drain(&mut self, mut served: impl FnMut(&Served)) {
        while let Some(io) = self.engine.poll_io() {
            let (at, sectors) = self.serve(&io);
            self.queue.push(Instant(at), Next::Complete(io.id, sectors));
        }
        while let Some(Reply { id, outcome, .. }) = self.engine.poll_reply() {
            let slot = id.0 as u32;
            let InFlight { ask, client, at } = self.in_flight[slot as usize];
            self.free.push(slot);
            self.run.requests += 1;
            served(&Served { ask, client, at, latency_ns: self.now - at, outcome });
        }
        while self.engine.poll_release().is_some() {}
        // Stalls and resumptions of an overloaded device: the outcomes tell of them.
        while self.engine.poll_event().is_some() {}
    }

    /// When an I/O completes, and how many flash sectors it moves.
    fn serve(&mut self, io: &Io) -> (u64, u32) {
        let access = match io.op {
            IoOp::Read => Access::Read,
            IoOp::Write(_) | IoOp::WriteZeroes(_) | IoOp::WriteJournal => Access::Write,
            IoOp::Flush | IoOp::Discard => Access::Flush,
        };
        let now = self.now.0;
        match io.target {
            Target::Flash(_) => {
                (self.flash.submit(now, access, io.offset, io.len), (io.len / SECTOR_BYTES) as u32)
            }
            Target::Backing(disk) => {
                let start = self.disks[disk.0 as usize].backing_offset;
                (self.backing.submit(now, access, start + io.offset, io.len), 0)
            }
        }
    }
}
