//! Replays requests in virtual time on the real cache engine. Modelled devices replace storage, and
//! no payload is moved.
//!
//! The replay loop is the daemon's shard loop with a priority queue instead of io_uring. The loop
//! takes the next event, passes it to the engine, and asks the device models for the completion
//! time of each I/O. In an *open* loop ([`Replay::open`]), each request has an arrival time that
//! does not depend on earlier requests. In a *closed* loop ([`Replay::closed`]), each of N clients
//! sends its next request after the last reply and a think time. If the engine has no room for a
//! request, the request waits in a queue. The latency of a request counts from its arrival.
//!
//! A persistent cache is simulated completely: journal writes, flushes and destaging use the
//! modelled devices. The background I/O of a cache continues between runs and after the last reply
//! ([`Replay::pass`] advances the time).
//!
//! The replay has no checkers and no faults; [`sim`](crate::sim) has both. A replay needs the
//! engine's memory and a few words per request in flight. The next request is fetched from the
//! trace only when it is due.
//!
//! Units: bytes, and nanoseconds of virtual time.

mod setup;
#[cfg(test)]
mod tests;

use std::collections::VecDeque;

use hob_engine::command::{CacheChange, Command, CommandError, Event, MemoryConfig};
use hob_engine::io::{Io, IoOp, Op, PayloadMemory, Promote, Reply, Request, Target};
use hob_engine::outcome::Outcome;
use hob_engine::qos::{Control, DiskQos, Resource};
use hob_engine::sizing::Sizing;
use hob_engine::stats::DiskStats;
use hob_engine::units::{BufferId, CommandId, DatastoreId, DiskId, Instant, IoId, RequestId, SECTOR_BYTES};
use hob_engine::vscsi::Histograms;
use hob_engine::{Engine, REQUEST_BYTES_MAX};

use crate::disk_model::Access;
use crate::queue::Queue;
use crate::service::ServiceModel;
pub use setup::{CacheSetup, DiskSetup, Setup, SetupError, segment_bytes};

/// Number of buffers that the replay lends to the engine: buffers 1 to `LENT`. Guest requests use
/// buffer 0.
const LENT: u32 = 4;

/// Size of each buffer that the replay lends, bytes.
const LENT_BYTES: u32 = 1 << 20;

/// Checksums of all sectors are equal, because the replay has no content. The array has one element
/// more than the number of sectors of the longest aligned request.
static SUMS: [u32; (REQUEST_BYTES_MAX / SECTOR_BYTES) as usize + 1] =
    [0; (REQUEST_BYTES_MAX / SECTOR_BYTES) as usize + 1];

/// A request to a disk in a replay.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ask {
    /// Number of the disk. The engine refuses requests to a disk that does not exist.
    pub disk: u32,
    /// Operation of the request.
    pub op: Op,
    /// Offset of the request on the disk, bytes.
    pub offset: u64,
    /// Length in bytes. The engine refuses requests beyond the disk's end or longer than
    /// `REQUEST_BYTES_MAX`.
    pub len: u64,
    /// The caller's tag of the request, repeated in the reply.
    pub tag: u32,
}

/// An answered request, as the replay reports it to its caller.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Served {
    /// The answered request.
    pub ask: Ask,
    /// Number of the client in a closed loop; 0 in an open loop.
    pub client: u32,
    /// Arrival time of the request.
    pub at: Instant,
    /// Time from arrival to reply, nanoseconds.
    pub latency_ns: u64,
    /// The way in which the engine served the request.
    pub outcome: Outcome,
}

/// Start, end and request counts of one run of a replay.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Run {
    /// Number of answered requests.
    pub requests: u64,
    /// Number of requests that waited because the engine had no room.
    pub waited: u64,
    /// Start time of the run.
    pub began: Instant,
    /// End of the last request of the run, including cache fills. Later destaging is not included.
    pub ended: Instant,
    /// Highest number of unanswered requests that the engine had at a time.
    pub in_flight_max: u32,
}

/// State of a cache at one time of a run; see [`Replay::watch`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sample {
    /// Time of the sample.
    pub at: Instant,
    /// Number of requests that the run had answered at this time.
    pub requests: u64,
    /// Bytes of valid data on flash, without replicas.
    pub valid_bytes: u64,
    /// Bytes of dirty data on flash.
    pub dirty_bytes: u64,
    /// Bytes destaged since the statistics were reset.
    pub destaged_bytes: u64,
}

#[derive(Debug)]
enum Next {
    /// Completion of an I/O, with the number of flash sectors that it moved.
    Complete(IoId, u32),
    /// End of the think time of a client.
    Client(u32),
}

#[derive(Clone, Copy, Debug)]
struct InFlight {
    ask: Ask,
    client: u32,
    at: Instant,
}

/// A replay: the engine, its modelled devices and the virtual time. After a run, the next run
/// continues with the time and the warm caches.
pub struct Replay {
    engine: Engine,
    disks: Vec<DiskSetup>,
    /// Flash devices by device number.
    flash: Vec<ServiceModel>,
    backing: ServiceModel,
    queue: Queue<Next>,
    now: Instant,
    in_flight: Vec<InFlight>,
    /// Free entries of `in_flight`.
    free: Vec<u32>,
    run: Run,
    /// Result of the last completed command.
    done: Option<Result<(), CommandError>>,
    /// Number of the watched disk, number of replies between samples, and reply count of the next
    /// sample.
    watched: Option<(u32, u64, u64)>,
    samples: Vec<Sample>,
}

/// Returns the engine's next I/O. Buffer copies are dropped, because the replay has no content.
fn next_io(engine: &mut Engine) -> Option<Io> {
    while engine.poll_copy().is_some() {}
    engine.poll_io()
}

impl Replay {
    /// Returns the current virtual time.
    pub fn now(&self) -> Instant {
        self.now
    }

    /// Returns the engine's statistics of a disk, or `None` if the disk does not exist. Latencies
    /// in the statistics count from the time at which the engine accepted a request.
    pub fn stats(&self, disk: u32) -> Option<DiskStats> {
        self.engine.stats(self.now, DiskId(disk))
    }

    /// Returns the engine's histograms of a disk, or `None` if the disk does not exist.
    pub fn histograms(&self, disk: u32) -> Option<&Histograms> {
        self.engine.histograms(DiskId(disk))
    }

    /// Returns the engine's estimates for other cache sizes of a disk, or `None` if the disk does
    /// not exist.
    pub fn sizing(&self, disk: u32) -> Option<Sizing> {
        self.engine.sizing(self.now, DiskId(disk))
    }

    /// Resets the engine's statistics of all disks, usually after a warm-up.
    pub fn reset_stats(&mut self) {
        for disk in 0..self.disks.len() as u32 {
            self.command(disk, Command::ResetStats).expect("the disk is there");
        }
    }

    /// Changes a disk's cache, and advances the virtual time until the change is complete.
    ///
    /// # Errors
    /// Returns the engine's error. The cache is unchanged.
    pub fn change(&mut self, disk: u32, change: CacheChange) -> Result<(), CommandError> {
        self.command(disk, Command::Cache(change))
    }

    /// Sets a disk's shares, limits and reservations.
    ///
    /// # Errors
    /// Returns the engine's error, for example for a disk that does not exist.
    pub fn set_qos(&mut self, disk: u32, qos: DiskQos) -> Result<(), CommandError> {
        self.command(disk, Command::Qos(qos))
    }

    /// Sets the throttling of the datastore, which all disks share.
    pub fn throttle(&mut self, control: Control) {
        self.engine.control(self.now, Resource::Datastore(DatastoreId(0)), control);
    }

    /// Gives a disk an empty memory tier. Reads from memory take no time.
    ///
    /// # Errors
    /// Returns the engine's error, for example for a tier of fewer than four pages.
    pub fn set_memory(&mut self, disk: u32, memory: MemoryConfig) -> Result<(), CommandError> {
        self.command(disk, Command::Memory(Some(memory)))
    }

    /// Returns the valid sectors of a disk's cache as `(first, end)`, hottest blocks first, as a
    /// migration copies them.
    pub fn hottest_extents(&self, disk: u32) -> Vec<(u64, u64)> {
        let disk = DiskId(disk);
        self.engine.valid_extents(disk, &self.engine.hottest_blocks(disk))
    }

    /// Returns the total time that the disks of the backing were busy so far, nanoseconds, and the
    /// number of disks.
    pub fn backing_busy_ns(&self) -> (u64, usize) {
        self.backing.busy_ns()
    }

    /// Advances the virtual time by `ns` nanoseconds without requests. The engine's background work
    /// continues.
    pub fn pass(&mut self, ns: u64) {
        let end = self.now + ns;
        while self.next_at().is_some_and(|at| at <= end) {
            self.step();
            self.drain(|_| {});
        }
        self.now = end;
    }

    /// Takes a sample of a disk's cache after every `requests` replies from now on.
    pub fn watch(&mut self, disk: u32, requests: u64) {
        assert!(requests > 0, "the number of replies between samples must not be 0");
        self.watched = Some((disk, requests, requests));
    }

    /// Returns all samples since [`Replay::watch`] was called, in order. [`Sample::requests`]
    /// counts from the start of the last run.
    pub fn samples(&self) -> &[Sample] {
        &self.samples
    }

    /// Serves requests of an open loop. Each request has an arrival time in nanoseconds after this
    /// call. A time earlier than the previous request's counts as the previous time. Returns when
    /// all requests have ended.
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
                (_, None) => panic!("requests are in flight, but no event is left"),
            }
            self.drain(|answer| served(answer));
        }
        self.end()
    }

    /// Serves the requests of `clients` clients in a closed loop. The function `next` gets the time
    /// and the client's number, at the start and after each reply. `next` returns the think time
    /// and the next request, or `None` to end the client. Returns when all clients have ended.
    pub fn closed(
        &mut self,
        clients: u32,
        mut next: impl FnMut(Instant, u32) -> Option<(u64, Ask)>,
        mut served: impl FnMut(&Served),
    ) -> Run {
        self.begin();
        let mut asks: Vec<Option<Ask>> = vec![None; clients as usize];
        // Clients whose request has arrived, in order, with the arrival time.
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
            assert!(self.next_at().is_some(), "requests are in flight, but no event is left");
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

    /// Sends a command and advances the virtual time until the command has ended.
    fn command(&mut self, disk: u32, command: Command) -> Result<(), CommandError> {
        self.done = None;
        self.engine.handle_command(self.now, CommandId(0), DiskId(disk), command);
        loop {
            self.drain(|_| {});
            if let Some(done) = self.done.take() {
                return done;
            }
            assert!(self.next_at().is_some(), "a command is in progress, but no event is left");
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
        assert_eq!(self.engine.in_flight(), 0, "a request is in flight at the end");
        self.run.ended = self.now;
        self.run
    }

    fn has_room(&self, ask: &Ask) -> bool {
        self.engine.has_room(DiskId(ask.disk))
    }

    fn next_at(&self) -> Option<Instant> {
        match (self.queue.next_at(), self.engine.poll_timeout()) {
            (Some(event), Some(timeout)) => Some(event.min(timeout)),
            (event, timeout) => event.or(timeout),
        }
    }

    /// Handles the next event. Returns the client whose think time ended, if any.
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

    /// Passes a request to the engine, which has room. All requests use the same buffer, because no
    /// payload is moved.
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

    /// Performs the I/Os that the engine requests, and takes its replies and events.
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
        // Other events are ignored. Stalls of an overloaded device are visible in the outcomes.
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

    /// Returns the completion time of an I/O and the number of flash sectors that it moves.
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
