//! Replay in virtual time: the real engine, with modelled devices instead of storage, and without payload.
//!
//! The loop is the shard loop with a priority queue instead of a ring: handle the next event, tell the
//! engine, and ask the device models when its I/O will be done. Load is *open* ([`Replay::open`]: each
//! request has its time of arrival, independent of earlier ones) or *closed* ([`Replay::closed`]: each of N
//! clients sends its next request after its reply and a think time). A request for which the engine has no
//! room waits outside, in order; its latency counts from its arrival.
//!
//! A persistent cache is simulated completely: journal pages, flushes and destaging take the devices' time,
//! and continue between runs and after the last answer ([`Replay::pass`] lets time pass).
//!
//! There are no checks and no failures: contents, faults and crashes belong to [`sim`](crate::sim). Memory
//! is the engine's plus a few words for each request in flight; requests are fetched when they are due,
//! never ahead.
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

/// Number of the engine's own buffers, and the length of each. Requests name buffer 0.
const LENT: u32 = 4;
const LENT_BYTES: u32 = 1 << 20;

/// Every sector has the same checksum, since there is no content. One more than the longest aligned request
/// has.
static SUMS: [u32; (REQUEST_BYTES_MAX / SECTOR_BYTES) as usize + 1] =
    [0; (REQUEST_BYTES_MAX / SECTOR_BYTES) as usize + 1];

/// A request to a disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ask {
    /// The disk. One that does not exist refuses.
    pub disk: u32,
    /// The operation.
    pub op: Op,
    /// First byte.
    pub offset: u64,
    /// Length in bytes. Beyond the disk's end, or above the engine's maximum: refused.
    pub len: u64,
    /// The caller's mark, repeated in the answer.
    pub tag: u32,
}

/// An answered request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Served {
    /// The request.
    pub ask: Ask,
    /// The client of a closed loop; 0 in an open one.
    pub client: u32,
    /// Time of arrival.
    pub at: Instant,
    /// Time from arrival to answer.
    pub latency_ns: u64,
    /// How it was served.
    pub outcome: Outcome,
}

/// Counts of one run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Run {
    /// Requests answered.
    pub requests: u64,
    /// Number of requests that waited outside because the engine was full.
    pub waited: u64,
    /// When the run began.
    pub began: Instant,
    /// When its last request ended, fills included. Later destaging is not part of it.
    pub ended: Instant,
    /// Maximum number of unanswered requests in the engine.
    pub in_flight_max: u32,
}

/// State of a cache at one moment of a run; see [`Replay::watch`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sample {
    /// When.
    pub at: Instant,
    /// Number of requests that the run had answered.
    pub requests: u64,
    /// Bytes of valid data on flash, without second copies.
    pub valid_bytes: u64,
    /// Bytes of dirty data.
    pub dirty_bytes: u64,
    /// Bytes destaged since statistics were reset.
    pub destaged_bytes: u64,
}

#[derive(Debug)]
enum Next {
    /// An I/O ends; number of flash sectors it moved.
    Complete(IoId, u32),
    /// The think time of a client ends.
    Client(u32),
}

#[derive(Clone, Copy, Debug)]
struct InFlight {
    ask: Ask,
    client: u32,
    at: Instant,
}

/// The engine, its devices and the clock. Runs may follow each other: time continues and caches stay warm.
pub struct Replay {
    engine: Engine,
    disks: Vec<DiskSetup>,
    /// By device number.
    flash: Vec<ServiceModel>,
    backing: ServiceModel,
    queue: Queue<Next>,
    now: Instant,
    in_flight: Vec<InFlight>,
    /// Free entries of `in_flight`.
    free: Vec<u32>,
    run: Run,
    /// Result of the last command.
    done: Option<Result<(), CommandError>>,
    /// The watched disk, the interval of samples in answers, and the next sample.
    watched: Option<(u32, u64, u64)>,
    samples: Vec<Sample>,
}

/// The next I/O. Copies between buffers come first; nothing here looks at the bytes.
fn next_io(engine: &mut Engine) -> Option<Io> {
    while engine.poll_copy().is_some() {}
    engine.poll_io()
}

impl Replay {
    /// Returns the virtual time.
    pub fn now(&self) -> Instant {
        self.now
    }

    /// Returns the engine's statistics of a disk, `None` if the disk does not exist. Their latencies count
    /// from the moment the engine accepted a request.
    pub fn stats(&self, disk: u32) -> Option<DiskStats> {
        self.engine.stats(self.now, DiskId(disk))
    }

    /// Returns the engine's histograms of a disk, `None` if the disk does not exist.
    pub fn histograms(&self, disk: u32) -> Option<&Histograms> {
        self.engine.histograms(DiskId(disk))
    }

    /// Returns the engine's estimates for other cache sizes, `None` if the disk does not exist.
    pub fn sizing(&self, disk: u32) -> Option<Sizing> {
        self.engine.sizing(self.now, DiskId(disk))
    }

    /// Resets the engine's statistics, after a warm-up.
    pub fn reset_stats(&mut self) {
        for disk in 0..self.disks.len() as u32 {
            self.command(disk, Command::ResetStats).expect("the disk is there");
        }
    }

    /// Changes a disk's cache, and lets time pass until the change is complete.
    ///
    /// # Errors
    /// As the engine's; nothing was changed.
    pub fn change(&mut self, disk: u32, change: CacheChange) -> Result<(), CommandError> {
        self.command(disk, Command::Cache(change))
    }

    /// Lets time pass without requests; the engine's own work continues.
    pub fn pass(&mut self, ns: u64) {
        let end = self.now + ns;
        while self.next_at().is_some_and(|at| at <= end) {
            self.step();
            self.drain(|_| {});
        }
        self.now = end;
    }

    /// From now on, takes a sample of a disk's cache after every `requests` answers.
    pub fn watch(&mut self, disk: u32, requests: u64) {
        assert!(requests > 0, "not all the time");
        self.watched = Some((disk, requests, requests));
    }

    /// Returns the samples since [`Replay::watch`] was called, in order; those of the last run count its
    /// requests.
    pub fn samples(&self) -> &[Sample] {
        &self.samples
    }

    /// Serves requests that arrive at given times, nanoseconds after this call; a time before its
    /// predecessor's counts as the predecessor's. Returns when all of them have ended.
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

    /// Serves `clients` clients. `next` is called at the start and after each reply, with the time and the
    /// client's number. It returns the think time and the next request; `None` ends this client. Returns
    /// when all have ended.
    pub fn closed(
        &mut self,
        clients: u32,
        mut next: impl FnMut(Instant, u32) -> Option<(u64, Ask)>,
        mut served: impl FnMut(&Served),
    ) -> Run {
        self.begin();
        let mut asks: Vec<Option<Ask>> = vec![None; clients as usize];
        // Clients whose request has arrived, in order, with its time.
        let mut ready: VecDeque<(u32, Instant)> = VecDeque::new();
        let mut replied: Vec<u32> = (0..clients).collect();
        // Number of clients that think, wait or are being served.
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

    /// Lets time pass until a command has ended.
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

    /// Returns the time of the next event.
    fn next_at(&self) -> Option<Instant> {
        match (self.queue.next_at(), self.engine.poll_timeout()) {
            (Some(event), Some(timeout)) => Some(event.min(timeout)),
            (event, timeout) => event.or(timeout),
        }
    }

    /// Handles the next event. Returns the client whose think time has ended, if that was the event.
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

    /// Passes a request to the engine, which has room. All requests use one buffer: no payload moves.
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

    /// Performs the engine's outputs.
    fn drain(&mut self, mut served: impl FnMut(&Served)) {
        while let Some(io) = next_io(&mut self.engine) {
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
        // The outcomes show stalls and resumptions of an overloaded device.
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

    /// Returns when an I/O completes, and how many flash sectors it moves.
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
