//! Virtual-time replay: the engine as it is, with modelled devices instead of storage, and no payload.
//!
//! The loop is the shard loop with a priority queue for a ring: take what happens next, tell the engine, ask the device
//! models when what it wants will be done. Load is *open* ([`Replay::open`]: each request has its time of arrival,
//! whatever becomes of those before it) or *closed* ([`Replay::closed`]: each of N clients asks again after its reply
//! and some thought). A request that the engine has no room for waits outside, in order, and its latency counts
//! from its arrival.
//!
//! A persistent cache is played whole: journal pages, flushes and destaging take the devices' time, and go on between
//! runs and after the last answer ([`Replay::pass`] lets time go by).
//!
//! Nothing is checked here and nothing fails: contents, faults and crashes are [`sim`](crate::sim)'s part. Memory
//! is the engine's plus a few words for each request in flight; requests are pulled when they are due, never ahead.
//!
//! Units: bytes, and nanoseconds of virtual time.

mod setup;
#[cfg(test)]
mod tests;

use std::collections::VecDeque;

use hob_engine::command::{CacheChange, Command, CommandError, Event};
use hob_engine::io::{Io, IoOp, Op, PayloadMemory, Promote, Reply, Request, Target};
use hob_engine::outcome::Outcome;
use hob_engine::sizing::Sizing;
use hob_engine::stats::DiskStats;
use hob_engine::units::{BufferId, CommandId, DiskId, Instant, IoId, RequestId, SECTOR_BYTES};
use hob_engine::vscsi::Histograms;
use hob_engine::{Engine, REQUEST_BYTES_MAX};

use crate::disk_model::Access;
use crate::queue::Queue;
use crate::service::ServiceModel;
pub use setup::{CacheSetup, DiskSetup, Setup, SetupError, segment_bytes};

/// Buffers lent to the engine, and the length of each. Requests name buffer 0.
const LENT: u32 = 4;
const LENT_BYTES: u32 = 1 << 20;

/// Every sector has the same checksum: there is no content. One more than the longest aligned request has.
static SUMS: [u32; (REQUEST_BYTES_MAX / SECTOR_BYTES) as usize + 1] =
    [0; (REQUEST_BYTES_MAX / SECTOR_BYTES) as usize + 1];

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
    /// When its last request ended, fills included. What is destaged later is not part of it.
    pub ended: Instant,
    /// Most requests unanswered in the engine at a time.
    pub in_flight_max: u32,
}

/// What a cache held at one moment of a run; see [`Replay::watch`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sample {
    /// When.
    pub at: Instant,
    /// Requests that the run had answered.
    pub requests: u64,
    /// Bytes of data that flash holds, second copies not counted.
    pub valid_bytes: u64,
    /// Of these, not on the backing yet.
    pub dirty_bytes: u64,
    /// Bytes destaged since statistics were reset.
    pub destaged_bytes: u64,
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
    disks: Vec<DiskSetup>,
    /// By the number of the device.
    flash: Vec<ServiceModel>,
    backing: ServiceModel,
    queue: Queue<Next>,
    now: Instant,
    in_flight: Vec<InFlight>,
    /// Places in `in_flight` to use again.
    free: Vec<u32>,
    run: Run,
    /// How the last command ended.
    done: Option<Result<(), CommandError>>,
    /// The disk that is watched, after how many answers each time, and after how many next.
    watched: Option<(u32, u64, u64)>,
    samples: Vec<Sample>,
}

impl Replay {
    /// The time.
    pub fn now(&self) -> Instant {
        self.now
    }

    /// The engine's statistics of a disk, `None` when there is no such disk. Their latencies count from the moment the
    /// engine took a request.
    pub fn stats(&self, disk: u32) -> Option<DiskStats> {
        self.engine.stats(self.now, DiskId(disk))
    }

    /// The engine's histograms of a disk, `None` when there is no such disk.
    pub fn histograms(&self, disk: u32) -> Option<&Histograms> {
        self.engine.histograms(DiskId(disk))
    }

    /// What the engine knows of other cache sizes for a disk, `None` when there is no such disk.
    pub fn sizing(&self, disk: u32) -> Option<Sizing> {
        self.engine.sizing(self.now, DiskId(disk))
    }

    /// Starts the engine's statistics again, after a warm-up.
    pub fn reset_stats(&mut self) {
        for disk in 0..self.disks.len() as u32 {
            self.command(disk, Command::ResetStats).expect("the disk is there");
        }
    }

    /// Changes a disk's cache, and lets time go by until the change is complete.
    ///
    /// # Errors
    /// As the engine's; nothing was changed.
    pub fn change(&mut self, disk: u32, change: CacheChange) -> Result<(), CommandError> {
        self.command(disk, Command::Cache(change))
    }

    /// Lets time go by without requests: what the engine does by itself goes on.
    pub fn pass(&mut self, ns: u64) {
        let end = self.now + ns;
        while self.next_at().is_some_and(|at| at <= end) {
            self.step();
            self.drain(|_| {});
        }
        self.now = end;
    }

    /// From now on, takes a sample of a disk's cache each time that so many requests have been answered.
    pub fn watch(&mut self, disk: u32, requests: u64) {
        assert!(requests > 0, "not all the time");
        self.watched = Some((disk, requests, requests));
    }

    /// The samples since [`Replay::watch`] was called, in order; those of the last run count its requests.
    pub fn samples(&self) -> &[Sample] {
        &self.samples
    }

    /// Serves requests that arrive at their own times, nanoseconds after this call; a time before its predecessor's
    /// counts as the predecessor's. Returns when all of them have ended.
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
        while head.is_some() || self.engine.in_flight() > 0 {
            match (head, self.next_at()) {
                (Some(ask), next)
                    if self.has_room(&ask) && next.is_none_or(|next| self.now.max(due) < next) =>
                {
                    self.now = self.now.max(due);
                    self.submit(InFlight { ask, client: 0, at: due });
                    head = pull(&mut due);
                }
                (_, Some(_)) => {
                    let client = self.step();
                    assert!(client.is_none(), "an open loop has no clients");
                }
                (_, None) => panic!("requests are in flight and nothing happens"),
            }
            self.drain(|answer| served(answer));
        }
        self.end()
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
        // Clients that think, wait or are being served.
        let mut busy = 0;
        loop {
            for client in replied.drain(..) {
                if let Some((think_ns, ask)) = next(self.now, client) {
                    busy += 1;
                    asks[client as usize] = Some(ask);
                    self.queue.push(self.now + think_ns, Next::Client(client));
                }
            }
            while let Some((client, at)) = ready.front().copied() {
                let ask = asks[client as usize].as_ref().expect("a client that is ready asks");
                if !self.has_room(ask) {
                    break;
                }
                ready.pop_front();
                let ask = asks[client as usize].take().expect("just looked at");
                self.submit(InFlight { ask, client, at });
            }
            self.drain(|answer| {
                served(answer);
                replied.push(answer.client);
            });
            if !replied.is_empty() {
                busy -= replied.len();
                continue;
            }
            if busy == 0 && self.engine.in_flight() == 0 {
                return self.end();
            }
            assert!(self.next_at().is_some(), "requests are in flight and nothing happens");
            if let Some(client) = self.step() {
                ready.push_back((client, self.now));
            }
            self.drain(|answer| {
                served(answer);
                replied.push(answer.client);
            });
            busy -= replied.len();
        }
    }

    /// Lets time go by until a command has ended.
    fn command(&mut self, disk: u32, command: Command) -> Result<(), CommandError> {
        self.done = None;
        self.engine.handle_command(self.now, CommandId(0), DiskId(disk), command);
        loop {
            self.drain(|_| {});
            if let Some(done) = self.done.take() {
                return done;
            }
            assert!(self.next_at().is_some(), "a command is under way and nothing happens");
            self.step();
        }
    }

    fn begin(&mut self) {
        self.run = Run { began: self.now, ..Run::default() };
        if let Some((_, every, next)) = &mut self.watched {
            *next = *every;
            self.samples.clear();
        }
    }

    fn end(&mut self) -> Run {
        assert_eq!(self.engine.in_flight(), 0, "everything has ended");
        self.run.ended = self.now;
        self.run
    }

    fn has_room(&self, ask: &Ask) -> bool {
        self.engine.has_room(DiskId(ask.disk))
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
        let request = Request {
            id: RequestId(slot.into()),
            disk: DiskId(ask.disk),
            op: ask.op,
            offset,
            len,
            buffer,
            promote: Promote::Usual,
            memory: PayloadMemory::Daemon,
        };
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
        // Of stalls and resumptions of an overloaded device the outcomes tell.
        while let Some(event) = self.engine.poll_event() {
            if let Event::Done { result, .. } = event {
                self.done = Some(result.map(|_| ()));
            }
        }
        if let Some((disk, every, next)) = self.watched
            && self.run.requests >= next
        {
            self.watched = Some((disk, every, self.run.requests + every));
            self.samples.extend(self.sample(disk));
        }
    }

    fn sample(&self, disk: u32) -> Option<Sample> {
        let stats = self.stats(disk)?;
        Some(Sample {
            at: self.now,
            requests: self.run.requests,
            valid_bytes: stats.sectors_valid * SECTOR_BYTES,
            dirty_bytes: stats.sectors_dirty * SECTOR_BYTES,
            destaged_bytes: stats.destaged_bytes,
        })
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
            Target::Flash(device) => {
                let flash = &mut self.flash[usize::from(device.0)];
                (flash.submit(now, access, io.offset, io.len), (io.len / SECTOR_BYTES) as u32)
            }
            Target::Backing(disk) => {
                let start = self.disks[disk.0 as usize].backing_offset;
                (self.backing.submit(now, access, start + io.offset, io.len), 0)
            }
        }
    }
}
