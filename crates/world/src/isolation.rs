//! Simulates datastores that hang. A hanging datastore must not affect disks of other datastores.
//!
//! Many disks share one engine. A datastore may hang at any time: none of its I/Os ends before the
//! end of the history. Guests send as many requests to disks of a hung datastore as the engine
//! accepts. The simulation watches one disk of a healthy datastore. The engine must accept the
//! watched disk's requests immediately, up to the disk's guaranteed number in flight. No reply may
//! take longer than the latency of the watched disk's backing.

use std::collections::{BTreeMap, BTreeSet};

use hob_engine::command::{Access, Command, DiskConfig};
use hob_engine::io::{Durability, Io, Op, PayloadMemory, Promote, Request, Target};
use hob_engine::units::{BufferId, CommandId, DatastoreId, DiskId, Instant, RequestId};
use hob_engine::{Engine, Limits};

use crate::rng::SimRng;

const TAKES_NS: u64 = 1_000_000;

/// Number of simulation steps in one history (one simulated run).
const STEPS: u64 = 200;

const WATCHED: DiskId = DiskId(0);
const DISK_BYTES: u64 = 1 << 20;

/// Deliberate defects of the engine, to test the checks. The simulation must report an error for
/// each defect.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sabotage {
    /// The simulation sends requests for hung disks as requests of the watched disk. The effect is
    /// the same as if the engine did not limit the share of its request slots that each datastore
    /// uses.
    OneShare,
    /// I/Os of the watched disk wait behind I/Os of hung datastores.
    OneQueue,
}

/// Event counts of one simulated history.
#[derive(Clone, Copy, Debug, Default)]
pub struct Report {
    /// Number of datastores that hung.
    pub hung: usize,
    /// Number of unanswered requests of hung disks in the engine at the end.
    pub held: u32,
    /// Number of answered requests of the watched disk.
    pub answered: u64,
}

struct Isolation {
    rng: SimRng,
    engine: Engine,
    now: Instant,
    /// Datastore of each disk, by disk number.
    datastores: Vec<DatastoreId>,
    hung: BTreeSet<DatastoreId>,
    sabotage: Option<Sabotage>,
    /// True if the simulation sends the requests of a hung disk with the watched disk's id.
    is_posing: bool,
    /// I/Os of datastores that do not hang, by completion time.
    due: BTreeMap<(Instant, u32), Io>,
    stuck: Vec<Io>,
    /// Requests of the watched disk that are in flight, with their arrival times.
    watched: BTreeMap<RequestId, Instant>,
    made: u64,
    report: Report,
}

/// Simulates the history of a seed.
///
/// # Errors
/// Returns a description if a hung datastore affects the watched disk.
pub fn run(seed: u64, sabotage: Option<Sabotage>) -> Result<Report, String> {
    let mut rng = SimRng::new(seed);
    let limits = Limits { requests_max: rng.pick(&[64, 256, 4096]), ..Limits::default() };
    let disks = rng.between(2, 12);
    let mut engine = Engine::new(limits);
    let datastores: Vec<DatastoreId> =
        (0..disks).map(|disk| DatastoreId(if disk == 0 { 0 } else { rng.between(1, 4) as u16 })).collect();
    for (disk, datastore) in (0..).zip(&datastores) {
        let config = DiskConfig { size_bytes: DISK_BYTES, access: Access::ReadWrite, datastore: *datastore };
        engine.handle_command(Instant(0), CommandId(u64::from(disk)), DiskId(disk), Command::AddDisk(config));
    }
    let share = (u64::from(limits.guests_max()) / 4 / disks).max(1);
    let mut history = Isolation {
        rng,
        engine,
        now: Instant(0),
        datastores,
        hung: BTreeSet::new(),
        sabotage,
        is_posing: false,
        due: BTreeMap::new(),
        stuck: Vec::new(),
        watched: BTreeMap::new(),
        made: 0,
        report: Report::default(),
    };
    for _ in 0..STEPS {
        history.step(share)?;
    }
    history.end()
}

impl Isolation {
    fn step(&mut self, share: u64) -> Result<(), String> {
        let later = self.now + self.rng.below(TAKES_NS);
        while let Some(entry) = self.due.first_entry().filter(|entry| entry.key().0 <= later) {
            let ((at, _), io) = entry.remove_entry();
            self.now = at;
            self.engine.handle_completion(at, io.id, Ok(()), &[]);
            self.drain()?;
        }
        self.now = later;
        let disk = self.rng.below(self.datastores.len() as u64) as usize;
        if disk > 0 && self.rng.chance(50) {
            self.hung.insert(self.datastores[disk]);
        }
        match self.hung.contains(&self.datastores[disk]) {
            true => self.flood(DiskId(disk as u32))?,
            false => drop(self.ask(DiskId(disk as u32))?),
        }
        while (self.watched.len() as u64) < share {
            if !self.ask(WATCHED)? {
                let in_flight = self.engine.in_flight();
                return Err(format!(
                    "a request is refused, with {in_flight} requests in flight, of which {} are the disk's own",
                    self.watched.len()
                ));
            }
        }
        Ok(())
    }

    /// Sends a random number of requests to this disk. Stops earlier if the engine refuses a
    /// request.
    fn flood(&mut self, disk: DiskId) -> Result<(), String> {
        self.is_posing = self.sabotage == Some(Sabotage::OneShare);
        let disk = if self.is_posing { WATCHED } else { disk };
        for _ in 0..self.rng.between(1, 5000) {
            if !self.ask(disk)? {
                break;
            }
        }
        self.is_posing = false;
        Ok(())
    }

    /// Sends a request to this disk. Returns false if the engine does not accept the request.
    fn ask(&mut self, disk: DiskId) -> Result<bool, String> {
        self.made += 1;
        let id = RequestId(self.made);
        // Overlapping requests would wait for each other.
        let offset = self.made * 4096 % DISK_BYTES;
        let op = match (disk == WATCHED, self.rng.below(3)) {
            (true, _) | (_, 0) => Op::Read,
            (_, 1) => Op::Flush,
            _ => Op::Write(Durability::Volatile),
        };
        let (offset, len) = if op == Op::Flush { (0, 0) } else { (offset, 4096) };
        let buffer = op.has_buffer().then_some(BufferId(self.made as u32));
        let (promote, memory) = (Promote::Usual, PayloadMemory::Daemon);
        let request = Request { id, disk, op, offset, len, buffer, promote, memory };
        let taken = self.engine.handle_request(self.now, request).is_ok();
        if taken && disk == WATCHED && !self.is_posing {
            self.watched.insert(id, self.now);
        }
        self.drain()?;
        Ok(taken)
    }

    fn drain(&mut self) -> Result<(), String> {
        while let Some(io) = self.engine.poll_io() {
            let Target::Backing(disk) = io.target else {
                return Err(format!("{io:?} is for flash, but the disk has no cache"));
            };
            let waits = self.sabotage == Some(Sabotage::OneQueue) && !self.stuck.is_empty();
            match self.is_posing || waits || self.hung.contains(&self.datastores[disk.0 as usize]) {
                true => self.stuck.push(io),
                false => drop(self.due.insert((self.now + TAKES_NS, io.id.0), io)),
            }
        }
        while let Some(reply) = self.engine.poll_reply() {
            let Some(arrived) = self.watched.remove(&reply.id) else { continue };
            let took = self.now - arrived;
            if took > TAKES_NS || reply.result.is_err() {
                return Err(format!("{} answered with {:?} after {took} ns", reply.id, reply.result));
            }
            self.report.answered += 1;
        }
        while self.engine.poll_release().is_some() {}
        while self.engine.poll_event().is_some() {}
        let overdue = self.watched.values().find(|arrived| self.now - **arrived > 2 * TAKES_NS);
        overdue.map_or(Ok(()), |arrived| Err(format!("the request of {arrived:?} has no reply yet")))
    }

    /// Completes all hung I/Os and checks that every request is answered.
    fn end(mut self) -> Result<Report, String> {
        self.report.hung = self.hung.len();
        self.report.held = self.engine.in_flight() - self.watched.len() as u32;
        self.hung.clear();
        self.sabotage = None;
        self.watched.clear();
        loop {
            let stuck = std::mem::take(&mut self.stuck);
            let due = std::mem::take(&mut self.due);
            if stuck.is_empty() && due.is_empty() {
                break;
            }
            for io in stuck.into_iter().chain(due.into_values()) {
                self.engine.handle_completion(self.now, io.id, Ok(()), &[]);
                self.drain()?;
            }
        }
        match self.engine.in_flight() {
            0 => Ok(self.report),
            left => Err(format!("{left} requests never end")),
        }
    }
}
