//! A test guest: a client that uses its own region of a disk. A test guest sends requests, checks
//! every byte that it reads, and reconnects when its connection ends.

use std::collections::{BTreeMap, VecDeque};
use std::io::ErrorKind;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use conformance::data::Noise;

use crate::journal::Journal;
use crate::lateness::TimeLimit;
use crate::link::{Answer, Ask, Endpoint, Link, Operation, Protocol, SILENCE_MAX};
use crate::model::{Checked, Flush, Kind, Model, Read, Write};
use crate::stamp::UNIT;

const DEPTH: usize = 8;
/// Number of 512-byte units in a sector of 4 KiB.
const SECTOR: u64 = 8;
/// Maximum length of a request, units of 512 bytes (64 KiB in total).
const UNITS_MAX: u64 = 128;
/// Number of past requests that a guest remembers as evidence for a violation.
const HISTORY: usize = 4000;
/// Maximum numbers of evidence lines: for requests to the unit, for other requests, and for flushes
/// and connections together.
const EVIDENCE: [usize; 3] = [24, 4, 10];
/// Maximum time without a connection, unless a fault explains a longer time.
pub const CONNECT_MAX: Duration = Duration::from_secs(60);
/// Minimum time after which the daemon fails a request of a backing that does not answer: the
/// daemon's grace time for requests that begin after the backing timeout.
const TIMEOUT_MIN: Duration = Duration::from_secs(1);
/// Time after the end of a fault for which the guest still attributes errors to the fault.
const GRACE: Duration = Duration::from_secs(10);

/// Counters of a test guest.
#[derive(Debug, Default)]
pub struct Counts {
    /// Number of answered requests.
    pub requests: AtomicU64,
    /// Number of answered requests of each [`Protocol`] and [`Operation`].
    pub operations: [[AtomicU64; Operation::NAMES.len()]; Protocol::NAMES.len()],
    /// Number of bytes that were read and compared.
    pub bytes_checked: AtomicU64,
    /// Number of successful flushes.
    pub flushes: AtomicU64,
    /// Number of requests that were answered with an error.
    pub errors: AtomicU64,
    /// Number of flushes that were answered with an error.
    pub flushes_failed: AtomicU64,
    /// Number of connections that the guest made.
    pub connections: AtomicU64,
}

impl Counts {
    /// Counts an answered request.
    fn answered(&self, protocol: Protocol, operation: Operation) {
        self.requests.fetch_add(1, Ordering::Relaxed);
        self.operations[protocol as usize][operation as usize].fetch_add(1, Ordering::Relaxed);
    }
}

/// An order that the test gives a guest.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Order {
    /// Send requests to the disk.
    Load,
    /// Flush until a flush succeeds, read the whole region, and stop.
    Finish,
}

/// State that a test guest shares with the thread that injects faults.
#[derive(Debug)]
pub struct Shared {
    /// Name of the guest: disk and number.
    pub name: String,
    /// Expected content of the guest's region.
    model: Mutex<Model>,
    /// Counters of the guest.
    pub counts: Counts,
    /// Number of the daemon process to which the guest is connected, or 0.
    pub connected_to: AtomicU64,
    finish: AtomicBool,
    abandon: AtomicBool,
    /// Time until which a fault explains errors.
    trouble_until: Mutex<Instant>,
    /// Maximum number of failed flushes that the daemon may still send for earlier connections.
    /// Each failed flush reports a loss of data to one connection that ended during a fault.
    owed: AtomicU32,
}

impl Shared {
    /// Creates the state of a guest with this region.
    #[must_use]
    pub fn new(name: String, model: Model) -> Arc<Self> {
        Arc::new(Self {
            name,
            model: Mutex::new(model),
            counts: Counts::default(),
            connected_to: AtomicU64::new(0),
            finish: AtomicBool::new(false),
            abandon: AtomicBool::new(false),
            trouble_until: Mutex::new(Instant::now()),
            owed: AtomicU32::new(0),
        })
    }

    /// Returns the expected content of the guest's region.
    pub fn model(&self) -> MutexGuard<'_, Model> {
        self.model.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Orders the guest to flush, read its whole region, and stop.
    pub fn finish(&self) {
        self.finish.store(true, Ordering::Relaxed);
    }

    /// Orders the guest to stop immediately.
    pub fn abandon(&self) {
        self.abandon.store(true, Ordering::Relaxed);
    }

    /// Records that a fault explains errors and delays during this time.
    pub fn excuse(&self, time: Duration) {
        let mut until = self.trouble_until.lock().unwrap_or_else(PoisonError::into_inner);
        *until = (*until).max(Instant::now() + time + GRACE);
    }

    /// Returns true if the daemon may still send this connection a report of a loss that an earlier
    /// connection did not receive. Each call that returns true uses up one such report.
    fn take_owed(&self) -> bool {
        self.owed.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |owed| owed.checked_sub(1)).is_ok()
    }

    /// Returns true if a fault explains an error of a request that was sent at `since`.
    fn excused(&self, since: Instant) -> bool {
        *self.trouble_until.lock().unwrap_or_else(PoisonError::into_inner) > since
    }
}

enum Flying {
    Read(Read),
    Write { write: Write, fua: bool },
    Flush(Flush),
}

impl Flying {
    /// Returns the operation that the daemon received. A vhost-user link sends zeroes and discards
    /// as writes.
    fn operation(&self, protocol: Protocol) -> Operation {
        match self {
            Flying::Read(_) => Operation::Read,
            Flying::Write { write, .. } => match (write.kind, protocol) {
                (Kind::Zeroes, Protocol::Nbd) => Operation::Zeroes,
                (Kind::Discard, Protocol::Nbd) => Operation::Discard,
                _ => Operation::Write,
            },
            Flying::Flush(_) => Operation::Flush,
        }
    }
}

/// Reason why a guest session ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stop {
    /// The connection was closed.
    Disconnected,
    /// The guest was ordered to stop immediately.
    Abandoned,
}

/// Request mix of a guest, generated from the seed, and properties of the guest's disk.
#[derive(Debug, Clone, Copy)]
pub struct Habits {
    /// Mean number of requests per flush: on average, one of this many requests is a flush.
    pub flush_once_in: u64,
    /// Number of FUA writes per ten data writes.
    pub fua_of_ten: u64,
    /// Number of reads per ten requests that are not flushes.
    pub reads_of_ten: u64,
    /// Longest pause between requests, microseconds.
    pub pause_us_max: u64,
    /// True if the guest sometimes writes an image header to the start of its region.
    pub headers: bool,
    /// True if another guest uses the same disk. After a restart the daemon cannot distinguish the
    /// two guests. If the daemon did not report a loss to one of them, one flush fails on each
    /// connection.
    pub shares_disk: bool,
    /// Time after which the daemon fails requests because the disk's backing does not answer;
    /// `None` if the daemon waits for ever.
    pub backing_timeout: Option<Duration>,
}

/// An event in a guest's recent history, kept as evidence for a violation.
struct Note {
    ms: u64,
    first: u64,
    /// Number of 512-byte units, or 0 for an event without units.
    units: u64,
    /// Versions that a write wrote to consecutive 512-byte units; empty for other events.
    versions: Vec<u32>,
    what: String,
}

/// A test guest; see the module documentation.
pub struct Guest {
    shared: Arc<Shared>,
    endpoint: Endpoint,
    journal: Arc<Journal>,
    life: Arc<AtomicU64>,
    noise: Noise,
    habits: Habits,
    flying: BTreeMap<u64, (Instant, Flying)>,
    history: VecDeque<Note>,
    /// True if a flush has failed on the guest's current connection.
    was_told: bool,
    first: u64,
    units: u64,
}

impl Guest {
    /// Creates a guest of the disk at `endpoint`. `life` counts the daemon's starts.
    #[must_use]
    pub fn new(
        shared: Arc<Shared>,
        endpoint: Endpoint,
        journal: Arc<Journal>,
        life: Arc<AtomicU64>,
        seed: u64,
        habits: Habits,
    ) -> Self {
        let (first, units) = {
            let model = shared.model();
            (model.first(), model.len())
        };
        Self {
            shared,
            endpoint,
            journal,
            life,
            noise: Noise::new(seed),
            habits,
            flying: BTreeMap::new(),
            history: VecDeque::new(),
            was_told: false,
            first,
            units,
        }
    }

    /// Sends requests until the guest has carried out the order to finish, or is ordered to stop
    /// immediately.
    pub fn live(mut self) {
        let mut link = None;
        loop {
            let Some(mut connected) = self.connect(link.take()) else { return };
            let ended = self.session(&mut *connected);
            if ended.is_err() && self.shared.excused(Instant::now()) {
                self.shared.owed.fetch_add(1, Ordering::Relaxed);
            }
            match ended {
                Ok(()) | Err(Stop::Abandoned) => return,
                Err(Stop::Disconnected) => {
                    self.shared.connected_to.store(0, Ordering::Relaxed);
                    link = Some(connected);
                }
            }
        }
    }

    /// Connects to the disk. A vhost-user link keeps its requests in flight across a reconnect.
    /// Returns `None` if the guest was ordered to stop.
    fn connect(&mut self, mut before: Option<Box<dyn Link>>) -> Option<Box<dyn Link>> {
        let start = Instant::now();
        let mut complained = false;
        loop {
            if self.shared.abandon.load(Ordering::Relaxed) {
                return None;
            }
            let life = self.life.load(Ordering::Relaxed);
            match self.connect_once(&mut before) {
                Ok(link) => {
                    self.shared.connected_to.store(life, Ordering::Relaxed);
                    self.shared.counts.connections.fetch_add(1, Ordering::Relaxed);
                    self.was_told = false;
                    self.note(0, 0, "connected");
                    return Some(link);
                }
                Err(error) => {
                    if start.elapsed() > CONNECT_MAX && !complained && !self.shared.excused(start) {
                        complained = true;
                        let what = format!("no connection for {CONNECT_MAX:?}: {error}");
                        let checked = TimeLimit { since: start, limit: CONNECT_MAX };
                        self.timeout("unavailable", &what, Vec::new(), checked);
                    }
                    self.journal.own_lateness().sleep(Duration::from_millis(20));
                }
            }
        }
    }

    fn connect_once(&mut self, before: &mut Option<Box<dyn Link>>) -> std::io::Result<Box<dyn Link>> {
        if let Some(link) = before {
            if link.resume()? {
                return Ok(before.take().expect("it is there"));
            }
            *before = None;
            self.flying.clear();
        }
        self.endpoint.connect()
    }

    fn session(&mut self, link: &mut dyn Link) -> Result<(), Stop> {
        while !self.shared.finish.load(Ordering::Relaxed) {
            if self.shared.abandon.load(Ordering::Relaxed) {
                return Err(Stop::Abandoned);
            }
            while self.flying.len() >= DEPTH {
                self.receive(link)?;
            }
            self.one(link)?;
            let pause = self.noise.below(self.habits.pause_us_max.max(1));
            self.journal.own_lateness().sleep(Duration::from_micros(pause));
        }
        self.drain(link)?;
        self.flush_until_durable(link)?;
        self.read_all(link)
    }

    fn drain(&mut self, link: &mut dyn Link) -> Result<(), Stop> {
        while !self.flying.is_empty() {
            self.receive(link)?;
        }
        Ok(())
    }

    /// Sends flushes until all flushes in flight have succeeded. Reports a violation after 100
    /// attempts.
    fn flush_until_durable(&mut self, link: &mut dyn Link) -> Result<(), Stop> {
        let shared = Arc::clone(&self.shared);
        for _ in 0..100 {
            let before = shared.counts.flushes_failed.load(Ordering::Relaxed);
            self.flush(link)?;
            self.drain(link)?;
            if shared.counts.flushes_failed.load(Ordering::Relaxed) == before {
                return Ok(());
            }
            std::thread::sleep(Duration::from_millis(200));
        }
        let evidence = self.evidence(None);
        self.violation("flush-stuck", "no flush succeeds although nothing is broken any more", evidence);
        Ok(())
    }

    fn read_all(&mut self, link: &mut dyn Link) -> Result<(), Stop> {
        let end = self.first + self.units;
        for first in (self.first..end).step_by(UNITS_MAX as usize) {
            while self.flying.len() >= DEPTH {
                self.receive(link)?;
            }
            self.read(link, first, UNITS_MAX.min(end - first))?;
        }
        self.drain(link)
    }

    fn one(&mut self, link: &mut dyn Link) -> Result<(), Stop> {
        if self.noise.below(self.habits.flush_once_in) == 0 {
            return self.flush(link);
        }
        let (first, units) = self.somewhere();
        if self.noise.below(10) < self.habits.reads_of_ten {
            if !self.meets(first, units, |flying| matches!(flying, Flying::Write { .. })) {
                self.read(link, first, units)?;
            }
            return Ok(());
        }
        if self.habits.headers && self.noise.below(200) == 0 {
            if !self.meets(self.first, 1, |_| true) {
                self.write(link, self.first, 1, Kind::Header)?;
            }
            return Ok(());
        }
        if self.meets(first, units, |_| true) {
            return Ok(());
        }
        let kind = match self.noise.below(40) {
            0 => Kind::Discard,
            1 | 2 => Kind::Zeroes,
            _ => Kind::Data,
        };
        self.write(link, first, units, kind)
    }

    /// Returns the first unit of a random request, and its number of units of 512 bytes. Half of
    /// the requests go to an eighth of the region.
    fn somewhere(&mut self) -> (u64, u64) {
        let sectors = match self.noise.below(4) {
            0 => 1 + self.noise.below(UNITS_MAX / SECTOR),
            1 => 4,
            _ => 1,
        };
        let room = if self.noise.below(2) == 0 { self.units / 8 } else { self.units };
        let first = self.noise.below(room / SECTOR - sectors.min(room / SECTOR - 1)) * SECTOR;
        let (mut first, mut units) = (first, sectors * SECTOR);
        if self.noise.below(8) == 0 {
            let cut = self.noise.below(SECTOR);
            (first, units) = (first + cut, units - cut);
            units -= self.noise.below(units.min(SECTOR));
        }
        (self.first + first, units)
    }

    fn meets(&self, first: u64, units: u64, concerns: impl Fn(&Flying) -> bool) -> bool {
        let meets = |other: u64, its: u64| other < first + units && first < other + its;
        self.flying.values().filter(|(_, flying)| concerns(flying)).any(|(_, flying)| match flying {
            Flying::Read(read) => meets(read.first, read.units),
            Flying::Write { write, .. } => meets(write.first, write.versions().len() as u64),
            Flying::Flush(_) => false,
        })
    }

    fn read(&mut self, link: &mut dyn Link, first: u64, units: u64) -> Result<(), Stop> {
        let read = self.shared.model().begin_read(first, units);
        let sent = link.send(Ask::Read { units }, first, &[]);
        self.sent(sent, Flying::Read(read))
    }

    fn write(&mut self, link: &mut dyn Link, first: u64, units: u64, kind: Kind) -> Result<(), Stop> {
        let fua = matches!(kind, Kind::Data) && self.noise.below(10) < self.habits.fua_of_ten;
        let (write, data) = {
            let mut model = self.shared.model();
            let write = model.begin_write(first, units, kind);
            let data =
                if matches!(kind, Kind::Data | Kind::Header) { model.bytes(&write) } else { Vec::new() };
            (write, data)
        };
        let ask = match kind {
            Kind::Data | Kind::Header => Ask::Write { fua },
            Kind::Zeroes => Ask::WriteZeroes { units },
            Kind::Discard => Ask::Discard { units },
        };
        self.note_write(&write, &format!("{kind:?} sent"));
        let sent = link.send(ask, first, &data);
        self.sent(sent, Flying::Write { write, fua })
    }

    fn flush(&mut self, link: &mut dyn Link) -> Result<(), Stop> {
        let flush = self.shared.model().begin_flush();
        let sent = link.send(Ask::Flush, 0, &[]);
        self.sent(sent, Flying::Flush(flush))
    }

    fn sent(&mut self, sent: std::io::Result<u64>, flying: Flying) -> Result<(), Stop> {
        let Ok(request) = sent else { return self.lost("send") };
        self.flying.insert(request, (Instant::now(), flying));
        Ok(())
    }

    fn lost(&mut self, what: &str) -> Result<(), Stop> {
        self.note(0, 0, &format!("disconnected at {what}; {} requests unanswered", self.flying.len()));
        Err(Stop::Disconnected)
    }

    /// Handles one reply.
    fn receive(&mut self, link: &mut dyn Link) -> Result<(), Stop> {
        let since = Instant::now();
        let answer = match link.receive() {
            Ok(answer) => answer,
            Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {
                let oldest = self.flying.values().map(|(since, _)| *since).min();
                if !oldest.is_some_and(|since| self.shared.excused(since)) {
                    let checked = TimeLimit { since, limit: SILENCE_MAX };
                    self.timeout("hang", "no answer for a minute", self.evidence(None), checked);
                }
                return self.lost("receive: silence");
            }
            Err(error) => return self.lost(&format!("receive: {error}")),
        };
        let Some((since, flying)) = self.flying.remove(&answer.request) else {
            let what = format!("an answer to request {}, which is not in flight", answer.request);
            self.violation("protocol", &what, Vec::new());
            return self.lost("receive: a strange answer");
        };
        let protocol = self.endpoint.protocol();
        self.shared.counts.answered(protocol, flying.operation(protocol));
        if answer.error != 0 {
            self.failed(&answer, &flying, since);
            return Ok(());
        }
        match flying {
            Flying::Read(read) => self.check(read, &answer.data),
            Flying::Write { write, fua, .. } => {
                let text = format!("{:?} acknowledged{}", write.kind, if fua { ", FUA" } else { "" });
                self.note_write(&write, &text);
                self.shared.model().acknowledge(write, fua);
            }
            Flying::Flush(flush) => {
                self.note(0, 0, "flush succeeded");
                self.shared.model().flushed(flush);
                self.shared.counts.flushes.fetch_add(1, Ordering::Relaxed);
            }
        }
        Ok(())
    }

    fn failed(&mut self, answer: &Answer, flying: &Flying, since: Instant) {
        self.shared.counts.errors.fetch_add(1, Ordering::Relaxed);
        let error = answer.error;
        let (what, explained) = match flying {
            Flying::Read(read) => {
                self.note(read.first, read.units, &format!("read failed ({error})"));
                (format!("a read at unit {}", read.first), false)
            }
            Flying::Write { write, .. } => {
                self.note_write(write, &format!("{:?} failed ({error})", write.kind));
                self.shared.model().fail(write);
                (format!("a write at unit {}", write.first), false)
            }
            Flying::Flush(flush) => {
                self.note(0, 0, &format!("flush failed ({error})"));
                self.shared.counts.flushes_failed.fetch_add(1, Ordering::Relaxed);
                let mut model = self.shared.model();
                let explained = model.loss_unreported();
                model.flush_failed(*flush);
                drop(model);
                let explained = explained || self.shared.excused(since);
                // If the fault itself makes this flush fail, the failure does not report a loss
                // that follows a moment later. The other guest of the disk may receive the report
                // of that loss.
                let told = !(explained && self.habits.shares_disk);
                let is_first = !std::mem::replace(&mut self.was_told, told);
                let is_the_others = self.habits.shares_disk && is_first;
                let is_owed = !explained && is_first && self.shared.take_owed();
                ("a flush".to_owned(), explained || is_the_others || is_owed)
            }
        };
        if !explained && !self.shared.excused(since) {
            let took = since.elapsed();
            let what = format!("{what} failed with error {error} after {took:?}; nothing is broken");
            let timeout = self.habits.backing_timeout.filter(|limit| took >= TIMEOUT_MIN.min(*limit));
            match timeout {
                Some(limit) => {
                    // The backing timeout counts from the start of an outage, which may have begun
                    // before the request.
                    let since = since.checked_sub(limit).unwrap_or(since);
                    let checked = TimeLimit { since, limit };
                    self.timeout("unexpected-error", &what, self.evidence(None), checked);
                }
                None => self.violation("unexpected-error", &what, self.evidence(None)),
            }
        }
    }

    fn check(&mut self, read: Read, data: &[u8]) {
        let Checked { wrong, settled } = self.shared.model().check(read, data);
        if settled > 0 {
            self.note(read.first, read.units, &format!("read whose result makes {settled} units certain"));
        }
        self.shared.counts.bytes_checked.fetch_add(data.len() as u64, Ordering::Relaxed);
        let Some(first) = wrong.first() else { return };
        let what = format!("{} of {} units: {first}", wrong.len(), data.len() / UNIT);
        self.violation("contents", &what, self.evidence(Some(first.unit)));
    }

    fn note(&mut self, first: u64, units: u64, what: &str) {
        self.remember(Note {
            ms: self.journal.now(),
            first,
            units,
            versions: Vec::new(),
            what: what.to_owned(),
        });
    }

    fn note_write(&mut self, write: &Write, what: &str) {
        let versions = write.versions().to_vec();
        let (ms, first, units) = (self.journal.now(), write.first, versions.len() as u64);
        self.remember(Note { ms, first, units, versions, what: what.to_owned() });
    }

    fn remember(&mut self, note: Note) {
        if self.history.len() == HISTORY {
            self.history.pop_front();
        }
        self.history.push_back(note);
    }

    /// Returns the last requests to a unit, and the last other requests.
    fn evidence(&self, unit: Option<u64>) -> Vec<String> {
        let concerns =
            |first: u64, units: u64| unit.is_some_and(|unit| (first..first + units).contains(&unit));
        let mut left = EVIDENCE;
        let mut lines = Vec::new();
        for Note { ms, first, units, versions, what } in self.history.iter().rev() {
            let left = match units {
                0 => &mut left[2],
                _ if concerns(*first, *units) => &mut left[0],
                _ => &mut left[1],
            };
            if *left == 0 {
                continue;
            }
            *left -= 1;
            let version = unit.and_then(|unit| versions.get(unit.checked_sub(*first)? as usize));
            let version = version.map_or_else(String::new, |version| format!(", version {version}"));
            lines.push(match units {
                0 => format!("{ms} ms: {what}"),
                _ => format!("{ms} ms: units {first}..{}: {what}{version}", first + units),
            });
        }
        lines.reverse();
        lines
    }

    fn violation(&self, kind: &'static str, what: &str, evidence: Vec<String>) {
        self.journal.violation(kind, &self.shared.name, what, evidence);
    }

    fn timeout(&self, kind: &'static str, what: &str, evidence: Vec<String>, checked: TimeLimit) {
        self.journal.timeout(kind, &self.shared.name, what, evidence, checked);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::stamp::Origin;

    #[test]
    fn requests_are_counted_as_the_daemon_receives_them() {
        let mut model = Model::new(Origin { run: 1, disk: 1 }, 0, 64);
        let mut write = |kind| Flying::Write { write: model.begin_write(0, 8, kind), fua: false };
        let [data, header, zeroes, discard] =
            [Kind::Data, Kind::Header, Kind::Zeroes, Kind::Discard].map(&mut write);
        let read = Flying::Read(model.begin_read(0, 8));
        let flush = Flying::Flush(model.begin_flush());
        let flying = [&read, &data, &header, &zeroes, &discard, &flush];
        let counts = Counts::default();
        for protocol in [Protocol::Nbd, Protocol::VhostUser] {
            flying.iter().for_each(|it| counts.answered(protocol, it.operation(protocol)));
        }
        let counted =
            counts.operations.each_ref().map(|of| of.each_ref().map(|it| it.load(Ordering::Relaxed)));
        // Reads, writes, zeroes, discards, flushes.
        assert_eq!(counted, [[1, 2, 1, 1, 1], [1, 4, 0, 0, 1]]);
        assert_eq!(counts.requests.load(Ordering::Relaxed), 12);
    }
}
