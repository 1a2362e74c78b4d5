//! One history: guests, the engine, its devices and the daemon's commands, in virtual time.
//!
//! A history has one or several processes of the engine ("lives"), with crashes between them (`lives`,
//! `recovery`, `finish`).
//!
//! The loop is the shard loop with a priority queue instead of the ring: handle the next event, tell the
//! engine, perform what it requests. The checkers verify:
//!
//! - reads return what the model of a disk allows, and what the backing holds (`model`, `media`);
//! - each accepted request is answered once, refused for the right reason or not at all, and its buffer is
//!   released once, after the answer and with no I/O on it (`traffic`);
//! - an acknowledged change is on the backing, and a FUA or flushed one survives a power cut (`model`);
//! - flash I/O stays inside the segments of its disk's cache, released segments are not accessed, and I/O
//!   that must not overlap does not (`pool`, `media`);
//! - statistics count each request once and add up; misses of the same data are fetched once (`audit`);
//! - everything ends, in bounded virtual time, with nothing left over.

mod audit;
mod clones;
mod commands;
mod direct;
mod finish;
mod growth;
mod guest;
mod injection;
mod lives;
mod losses;
mod owner;
mod pool;
mod qos;
mod ram;
mod recovering;
mod recovery;
mod report;
mod sabotage;
mod scenario;
mod shrinks;
mod silent;
mod tracks;
mod traffic;

use std::collections::{BTreeMap, BTreeSet};

use hob_engine::Engine;
use hob_engine::command::{Access, CacheConfig, Command, CommandError, Segment, Vacate};
use hob_engine::units::{BufferId, CommandId, DeviceId, Instant, IoId, RequestId};

use crate::content::{Tag, UNIT_BYTES, Written, tag};
use crate::media::{Backing, DeviceDefect, Flash};
use crate::model::{Kind, Model};
use crate::queue::Queue;
use crate::rng::{self, SimRng};
use crate::{Violation, ensure};
use audit::{Fetch, Tally};
use clones::Clones;
use direct::Direct;
use growth::Growth;
use injection::Injection;
pub use injection::{Case, Content, Failure, Injected, OPERATIONS, Operation, inject};
use lives::Lent;
use losses::Losses;
use owner::Owner;
use pool::Asked;
use qos::Qos;
use ram::Ram;
use recovering::{Recovering, Step};
pub use report::Report;
use scenario::{End, Scenario};
use shrinks::Shrinks;
pub use shrinks::shrink_in_outage;
use silent::Silent;
use tracks::{Track, Tracks};
use traffic::{Buffer, InFlight};

/// Maximum duration of a history, nanoseconds of virtual time.
const TIME_MAX: Instant = Instant(3_600_000_000_000);

/// An engine without events needs no call for this time, nanoseconds.
const CALM_NS: u64 = 15_000_000_000;

/// Maximum number of commands per request of a history.
const COMMANDS_MAX: u64 = 20;

/// Maximum number of steps per request of a history.
const STEPS_MAX: u64 = 2000;

/// Separates the random numbers for reads that promote nothing from all others.
const PASSING_SALT: u64 = 0x7061_7373;

/// Options of a history.
#[derive(Clone, Debug)]
pub struct Options {
    /// Number of guest requests.
    pub requests: u32,
    /// Devices and backings may fail, corrupt data and hang.
    pub faults: bool,
    /// Backings do not fail, even if `faults` are on.
    pub sound_backings: bool,
    /// Caches and disks may change under load.
    pub commands: bool,
    /// Some histories end with a power cut.
    pub power_cuts: bool,
    /// Per mille of the histories with memory tiers.
    pub memory_permille: u32,
    /// Per mille of the histories with shares, limits and windows.
    pub qos_permille: u32,
    /// Per mille of the histories in which some reads promote nothing.
    pub passing_permille: u32,
    /// Per mille of the histories with dirty bitmaps.
    pub bitmap_permille: u32,
    /// Per mille of the histories in which disks grow.
    pub growth_permille: u32,
    /// Per mille of the histories in which some reads go to guests' own memory.
    pub direct_permille: u32,
    /// Per mille of the histories in which disks are clones, whose unwritten data another disk serves.
    pub clones_permille: u32,
    /// Per mille of the histories with faults in which backings restart and lose unflushed data; 1000: all.
    pub restart_permille: u32,
    /// Per mille of the histories of several lives in which sound flash devices fail flushes.
    pub flash_flush_permille: u32,
    /// Per mille of the histories of several lives in which backings change while no engine runs, without a
    /// change of their identity.
    pub silent_permille: u32,
    /// In so many of a thousand histories of several lives caches give segments back, and backings are away for a while.
    pub shrink_permille: u32,
    /// Histories have several lives, and caches may be persistent and write back.
    pub lives: bool,
    /// In some histories guests use disks whose caches are being recovered.
    pub early: bool,
    /// Guests may use a disk before its recovered cache is in service, even if devices or backings may
    /// fail. A daemon does not allow this; the engine supports it as long as the recovery succeeds.
    pub hasty: bool,
    /// The last of several devices is for replicas only, like another host's flash.
    pub peer: bool,
    /// Breaks something on purpose: the run must fail.
    pub sabotage: Option<Sabotage>,
    /// Called with one line for everything that crosses the engine's boundary.
    pub trace: Option<Trace>,
}

/// Prints a line of a trace.
pub type Trace = fn(std::fmt::Arguments<'_>);

/// Calls the trace, if there is one.
macro_rules! trace {
    ($world:expr, $($what:tt)+) => {
        if let Some(trace) = $world.options.trace {
            trace(format_args!("{:>14} {}", $world.now.0, format_args!($($what)+)));
        }
    };
}
use trace;

/// Separates the random number that says from which length on sequential writes are bulk writes.
const BULK_SALT: u64 = 0x6275_6c6b;

impl Default for Options {
    fn default() -> Self {
        Options {
            requests: 80,
            faults: true,
            sound_backings: false,
            commands: true,
            power_cuts: true,
            memory_permille: 250,
            qos_permille: 250,
            passing_permille: 250,
            bitmap_permille: 250,
            growth_permille: 250,
            direct_permille: 500,
            clones_permille: 250,
            restart_permille: 300,
            flash_flush_permille: 0,
            silent_permille: 300,
            shrink_permille: 300,
            lives: false,
            early: true,
            hasty: false,
            peer: false,
            sabotage: None,
            trace: None,
        }
    }
}

impl Options {
    /// Histories of several lives: persistent caches, write-back, crashes and recovery.
    pub fn lives() -> Self {
        Options { requests: 200, lives: true, ..Options::default() }
    }
}

/// Defects of the simulation, to test whether the checkers notice.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sabotage {
    /// A device has a defect.
    Defect(DeviceDefect),
    /// Another writer sometimes changes a backing, so that flash is stale.
    WriteBehind,
    /// Some replies are delivered twice.
    RepeatedReply,
    /// Some replies are lost.
    LostReply,
    /// Some buffers are released twice.
    RepeatedRelease,
    /// Some flash I/O goes to another segment.
    MisroutedIo,
    /// Some requests are not counted.
    Uncounted,
    /// Some completions are lost.
    LostCompletion,
    /// Recovery accepts every sector of a tail without verification.
    UncheckedTail,
    /// Change records of a page are applied in the wrong order.
    ReorderedRecords,
    /// Recovery ignores the newest ring, and old ones are kept.
    IgnoredNewestRing,
    /// Clean data is served although the backing has changed.
    ServedStale,
    /// Clean data of a backing without evidence is served without a comparison.
    TrustedUnproven,
    /// Clean data is compared with earlier content of the backing.
    StaleComparison,
    /// A daemon records evidence that a backing is unchanged before everything in the cache was compared.
    EvidenceTooEarly,
    /// The memory tier misses some writes.
    LostRenewal,
    /// Now and then the rest of a sector is not copied next to what a guest wrote of it.
    LostEdge,
    /// Now and then memory misses a sector that a guest wrote in part.
    OldRecentEdge,
    /// Now and then the buffer from which zeroes are written is not zeroed.
    LostZeroes,
    /// Now and then a bitmap that a crash took begins again empty.
    FreshBitmap,
    /// Rings that were invalidated, because the backing was changed before their cache was recovered, are
    /// used all the same.
    KeptVoidRings,
    /// The engine is not told that a guest writes to the memory that it reads into.
    SecretScribbles,
    /// The engine is not told that another disk serves what it reads.
    UntoldSharing,
    /// The engine is not told that a backing restarted.
    UntoldRestart,
    /// A failed flush of a backing that lost data is reported as a success.
    TrustedFlush,
    /// A failed flush of flash that lost data is reported as a success.
    TrustedFlashFlush,
    /// The tail of a journal is not written again: flash may have it only until the power fails.
    TrustedTail,
    /// The engine is told that the loss of a journal is recorded, and it is not.
    UnrecordedLoss,
    /// All guests of a disk are one session: only the first one gets an error.
    OneSession,
    /// The pool's table gives a segment back when dirty data begins to leave it, and not when none is left.
    EarlyGift,
}

/// Runs the history of this seed.
pub fn run(seed: u64, options: &Options) -> Result<Report, Violation> {
    let mut world = Simulation::new(seed, options);
    for (number, device) in world.scenario.devices.iter().enumerate() {
        trace!(world, "device {number}: {device:?}");
    }
    world.live().map_err(|Violation(what)| Violation(format!("{what} (HOB_SEED={seed})")))?;
    Ok(world.report)
}

#[derive(Debug)]
enum Event {
    Guest(usize),
    Complete(Side, IoId),
    Command,
    DeviceFailure(usize),
    PowerCut,
    /// Of a disk's backing.
    Restart(usize),
    End(End),
    /// Of a disk, with the serial of its recovering cache.
    Recovering(usize, u64, Step),
    /// The backing of a disk is not away any more.
    Back(usize),
    /// The journal of a disk's cache was lost, and another is to be made.
    ReplaceRing(usize),
    /// The daemon has recorded that the journal of a disk's cache was lost.
    RecordLoss(usize),
    /// A disk's cache is to give segments back.
    GiveBack(usize, Vacate),
}

/// The device that performs an I/O.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Side {
    Flash(usize),
    Backing(usize),
}

struct Disk {
    backing: Backing,
    /// Number of units that the engine serves. The backing may have more, unknown to the engine.
    size: u64,
    model: Model,
    access: Access,
    /// Added and not removed, according to the commands given.
    present: bool,
    /// Being removed.
    leaving: bool,
    /// Data segments of its cache.
    segments: BTreeSet<Segment>,
    config: Option<CacheConfig>,
    /// The pool's table of its cache, if that is persistent.
    owner: Option<Owner>,
    /// Number of changes of its backing by others that its identity shows.
    generation: u64,
    /// The highest ring of its cache at the last such change.
    changed_behind: Option<u32>,
    /// Guests wait for its cache.
    gated: bool,
    /// Its cache is being recovered while guests use it.
    recovering: Option<Recovering>,
    /// Its journal was lost on a sound device, and the daemon has not made another yet.
    lost_ring: bool,
    /// The dirty data of its recovered cache is given up when its new ring is complete.
    gives_up: bool,
    /// It is being removed, and requests that waited for its cache are refused.
    refuses_waiting: bool,
    /// Number of successive failures to put its recovered cache into service.
    attempts: u32,
    /// Its cache reported dirty data lost.
    dirty_lost: bool,
    /// Since when writes go to the backing, by `Simulation::clock`, if they do.
    writes_through_since: Option<u64>,
    /// When it last had nothing in flight, by `Simulation::clock`.
    quiet_at: u64,
    /// When its cache last changed, by `Simulation::clock`.
    changed: u64,
    /// Content of its memory tier.
    memory: Vec<Tag>,
    tally: Tally,
    fetches: Vec<Fetch>,
    tracks: Vec<Track>,
}

impl Disk {
    /// Returns the number of units of its backing.
    fn units(&self) -> u64 {
        self.backing.now().len() as u64
    }

    /// Returns the daemon's identity of the backing.
    fn identity(&self) -> [u8; 32] {
        let mut identity = [7; 32];
        identity[..8].copy_from_slice(&self.generation.to_le_bytes());
        identity
    }
}

struct Simulation<'a> {
    options: &'a Options,
    scenario: Scenario,
    ram: Option<Ram>,
    /// Shares and limits, if this history has them.
    qos: Option<Qos>,
    /// Dirty bitmaps, if this history has them.
    tracks: Option<Tracks>,
    /// Growth of disks, if this history has it.
    growth: Option<Growth>,
    /// One in four requests promotes nothing.
    passing: bool,
    /// Reads into guests' own memory, if this history has them.
    direct: Option<Direct>,
    /// Clones, if this history has them.
    clones: Option<Clones>,
    /// Restarts of backings, if this history has them.
    losses: Option<Losses>,
    /// Session of the next requests.
    session: u32,
    /// Silent changes of backings, if this history has them.
    silent: Option<Silent>,
    /// In this history caches give segments back.
    shrinks: Option<Shrinks>,
    rng: SimRng,
    now: Instant,
    /// Number of steps.
    clock: u64,
    /// When a guest or the daemon was last active.
    busy_until: Instant,
    engine: Engine,
    queue: Queue<Event>,
    flash: Vec<Flash>,
    disks: Vec<Disk>,
    free: BTreeSet<Segment>,
    fenced: BTreeSet<DeviceId>,
    asked: BTreeMap<CommandId, Asked>,
    commands: u64,
    /// Results of commands, in a history of several lives.
    ended: BTreeMap<CommandId, Result<(), CommandError>>,
    /// Number of persistent caches created so far.
    caches: u64,
    /// Number of recovering caches announced so far.
    recoveries: u64,
    /// Number of ring segments among those that a command released.
    ring_segments_released: usize,
    requests: BTreeMap<RequestId, InFlight>,
    /// Requests made so far.
    made: u64,
    /// Requests the guests may still make.
    left: u32,
    buffers: BTreeMap<BufferId, Buffer>,
    spare: Vec<BufferId>,
    /// The engine's own buffers.
    lent: BTreeMap<BufferId, Lent>,
    /// Of these, the one for sectors that guests write in parts.
    edge_buffer: Option<BufferId>,
    /// Contents of journal pages.
    written: Written,
    /// The daemon is ending.
    stopping: bool,
    ios: BTreeSet<IoId>,
    has_power: bool,
    /// The planned failure.
    injection: Option<Injection>,
    report: Report,
}

impl<'a> Simulation<'a> {
    fn new(seed: u64, options: &'a Options) -> Self {
        let mut rng = SimRng::new(seed);
        let mut scenario = Scenario::draw(options, &mut rng);
        if let Some(lives) = &mut scenario.lives {
            // Its own random numbers: histories without this option stay as they were.
            lives.early = options.early && SimRng::new(rng::scatter(seed)).chance(400);
        }
        let ram = Ram::draw(seed, options.memory_permille);
        let qos = Qos::draw(seed, options.qos_permille);
        let passing = SimRng::new(seed ^ PASSING_SALT).chance(options.passing_permille);
        let tracks = Tracks::draw(seed, options.bitmap_permille);
        let direct = Direct::draw(seed, options.direct_permille);
        let growth = Growth::draw(seed, options.growth_permille);
        let lives = scenario.lives.is_some();
        scenario.limits.bulk_run_bytes_min =
            SimRng::new(seed ^ BULK_SALT).pick(&[0, 4 << 10, 16 << 10, 64 << 10]);
        let silent_permille = if lives { options.silent_permille } else { 0 };
        let mut silent = Silent::draw(seed, silent_permille, scenario.disks.len());
        if options.sabotage == Some(Sabotage::EvidenceTooEarly) {
            silent.iter_mut().for_each(Silent::leave_unverified);
        }
        if let Some(silent) = &silent {
            scenario.limits.verify_bytes_per_s = silent.verify_bytes_per_s;
        }
        let units = scenario.disks.iter().map(|disk| disk.units);
        let clones = Clones::draw(seed, options.clones_permille, units);
        let losses = Losses::draw(seed, options, scenario.backing_ns.max(scenario.flash_ns));
        let shrinks = Shrinks::draw(seed, options, scenario.backing_ns);
        if losses.is_some() {
            for plan in &mut scenario.disks {
                plan.faults.flush_error = plan.faults.flush_error.max(losses::FLUSH_ERROR);
            }
        }
        losses::draw_flash_flushes(&mut scenario, seed, options);
        losses::draw_returns(&mut scenario, seed);
        let world = Self::of(scenario, rng, options);
        let world = Simulation { ram, qos, passing, tracks, growth, direct, clones, silent, ..world };
        let mut world = Simulation { losses, shrinks, ..world };
        world.disks.iter_mut().for_each(|disk| disk.backing.lose_at_failed_flushes());
        world.flash.iter_mut().for_each(crate::media::Flash::lose_at_failed_flushes);
        world
    }

    fn of(scenario: Scenario, rng: SimRng, options: &'a Options) -> Self {
        let defect = match options.sabotage {
            Some(Sabotage::Defect(defect)) => Some(defect),
            _ => None,
        };
        let flash_bytes = |segments| pool::SEGMENTS_START + segments * scenario.segment_bytes;
        let flash =
            scenario.devices.iter().map(|plan| Flash::new(flash_bytes(plan.segments), plan.faults, defect));
        let flash = flash.collect();
        let disk = |(i, plan): (usize, &scenario::DiskPlan)| Disk {
            backing: Backing::new((0..plan.units).map(|u| tag(1, i as u8, u)).collect(), plan.faults, defect),
            size: u64::from(plan.units),
            model: Model::new(i as u8, plan.units),
            access: plan.access,
            present: false,
            leaving: false,
            segments: BTreeSet::new(),
            config: None,
            owner: None,
            generation: 0,
            changed_behind: None,
            gated: false,
            recovering: None,
            lost_ring: false,
            gives_up: false,
            refuses_waiting: false,
            attempts: 0,
            dirty_lost: false,
            writes_through_since: None,
            quiet_at: 0,
            changed: 0,
            memory: vec![],
            tally: Tally::default(),
            fetches: vec![],
            tracks: vec![],
        };
        let disks = scenario.disks.iter().enumerate().map(disk).collect();
        let mut world = Simulation {
            engine: Engine::new(scenario.limits),
            ram: None,
            qos: None,
            tracks: None,
            growth: None,
            passing: false,
            direct: None,
            clones: None,
            losses: None,
            session: 0,
            silent: None,
            shrinks: None,
            options,
            rng,
            now: Instant(0),
            clock: 0,
            busy_until: Instant(0),
            queue: Queue::default(),
            flash,
            disks,
            free: BTreeSet::new(),
            fenced: BTreeSet::new(),
            asked: BTreeMap::new(),
            commands: 0,
            ended: BTreeMap::new(),
            caches: 0,
            recoveries: 0,
            ring_segments_released: 0,
            requests: BTreeMap::new(),
            made: 0,
            left: options.requests,
            buffers: BTreeMap::new(),
            spare: vec![],
            lent: BTreeMap::new(),
            edge_buffer: None,
            written: Written::default(),
            stopping: false,
            ios: BTreeSet::new(),
            has_power: true,
            injection: None,
            report: Report::default(),
            scenario,
        };
        world.free = world.all_segments();
        world
    }

    fn live(&mut self) -> Result<(), Violation> {
        self.lend_buffers();
        self.prepare_memory();
        self.begin_with_qos();
        for disk in 0..self.disks.len() {
            self.add_disk(disk);
            self.drain()?;
        }
        if self.scenario.lives.is_some() {
            self.begin_with_caches()?;
            self.begin_life();
            self.begin_with_memory()?;
            self.begin_with_bitmaps()?;
        } else {
            for _ in 0..2 * self.disks.len() {
                self.random_command()?;
                self.drain()?;
            }
            self.begin_with_memory()?;
            self.begin_with_bitmaps()?;
            (0..self.scenario.guests.len()).for_each(|guest| self.schedule_guest(guest, self.now));
            self.schedule_command();
            self.schedule_restart();
        }
        for (i, plan) in self.scenario.devices.iter().enumerate() {
            if let Some((at, _)) = plan.failure {
                self.queue.push(at, Event::DeviceFailure(i));
            }
        }
        if let Some(at) = self.scenario.power_cut {
            self.queue.push(at, Event::PowerCut);
        }
        self.run_dry()?;
        if !self.has_power {
            return Ok(());
        }
        if self.scenario.lives.is_some() {
            self.finish()?;
            self.report.took_ns = self.now.0;
            return Ok(());
        }
        self.check_rest()?;
        for disk in (0..self.disks.len()).filter(|&disk| self.disks[disk].present).collect::<Vec<_>>() {
            self.command(disk, Command::RemoveDisk);
            self.drain()?;
        }
        if self.tracks.is_some() {
            // The backings of disks that had bitmaps are flushed.
            self.run_dry()?;
        }
        self.check_empty()?;
        self.report.took_ns = self.now.0;
        Ok(())
    }

    /// Handles events until there are none.
    fn run_dry(&mut self) -> Result<(), Violation> {
        self.run_until(|_| false)
    }

    /// Handles events until there are none, or the condition holds.
    fn run_until(&mut self, is_enough: impl Fn(&Self) -> bool) -> Result<(), Violation> {
        self.busy_until = self.now;
        while self.has_power && !is_enough(self) {
            let next = self.queue.next_at();
            let due = self.engine.poll_timeout().filter(|due| next.is_none_or(|next| *due < next));
            self.clock += 1;
            let rests = self.requests.is_empty() && self.asked.is_empty();
            let calm_ns = if self.ios.is_empty() { CALM_NS } else { 4 * CALM_NS };
            let idle = self.queue.len() == self.ios.len() + self.restarts_due();
            if idle && rests && self.now >= self.busy_until + calm_ns {
                // Scrubbing never ends, and if I/O hangs repeatedly, some is always in flight.
                return Ok(());
            }
            if let Some(due) = due {
                // I/O that a limit delays waits only for time to pass.
                let idle = self.ios.is_empty() && self.scenario.lives.is_none() && self.qos.is_none();
                ensure!(!idle, "a timeout is due with no I/O in flight");
                self.now = self.now.max(due);
                trace!(self, "timeout");
                self.engine.handle_timeout(self.now);
                let again = self.engine.poll_timeout();
                ensure!(again.is_none_or(|again| again > self.now), "timeout {again:?} at {:?}", self.now);
            } else if let Some((at, event)) = self.queue.pop() {
                self.now = at;
                self.happen(event)?;
            } else {
                return Ok(());
            }
            self.drain()?;
            if self.has_stopped() {
                self.next_life(End::Stop)?;
                self.drain()?;
            }
            let steps_max = STEPS_MAX * (20 + u64::from(self.options.requests));
            if self.clock >= steps_max && self.requests.is_empty() && self.any_bad() {
                // The daemon retries a cache whose journal no device accepts for ever, and its disk stays
                // offline.
                self.has_power = false;
                return Ok(());
            }
            ensure!(
                self.now < TIME_MAX && self.clock < steps_max,
                "never answered: {:?}, never ended: {:?}",
                self.requests,
                self.asked
            );
            if self.clock.is_multiple_of(128) {
                self.audit()?;
                self.check_all_bitmaps()?;
            }
        }
        Ok(())
    }

    fn happen(&mut self, event: Event) -> Result<(), Violation> {
        if !matches!(event, Event::Complete(..) | Event::Restart(_)) {
            self.busy_until = self.now;
        }
        match event {
            Event::Guest(guest) => self.guest_turn(guest),
            Event::Complete(side, id) => self.complete(side, id),
            Event::Command => {
                if !self.stopping {
                    self.random_command()?;
                    self.maybe_change_memory()?;
                    self.maybe_change_qos()?;
                    self.maybe_change_bitmaps()?;
                    self.maybe_grow_disk()?;
                    self.maybe_shrink()?;
                    self.maybe_record_evidence();
                }
                self.schedule_command();
                Ok(())
            }
            Event::DeviceFailure(device) => {
                let (_, failure) = self.scenario.devices[device].failure.expect("scheduled");
                self.flash[device].suffer(failure, &mut self.rng);
                Ok(())
            }
            Event::Restart(disk) => self.restart(disk),
            Event::End(end) => self.end(end),
            Event::Back(disk) => {
                self.backing_is_back(disk);
                Ok(())
            }
            Event::ReplaceRing(disk) => {
                self.replace_ring(disk);
                Ok(())
            }
            Event::RecordLoss(disk) => {
                self.record_loss(disk);
                Ok(())
            }
            Event::GiveBack(disk, which) => self.give_back_vacated(disk, which),
            Event::Recovering(disk, serial, step) => self.recovery_proceeds(disk, serial, step),
            Event::PowerCut => {
                self.has_power = false;
                self.report.power_cuts += 1;
                for disk in &self.disks {
                    disk.model.check_power_cut(&disk.backing.power_cut(&mut self.rng))?;
                }
                Ok(())
            }
        }
    }

    fn schedule_command(&mut self) {
        // If guests wait for a cache that does not come back, their requests never end.
        if let Some(mean) = self.scenario.command_ns
            && self.left > 0
            && self.commands < COMMANDS_MAX * u64::from(self.options.requests)
        {
            let at = self.now + self.rng.between(1, 2 * mean);
            self.queue.push(at, Event::Command);
        }
    }

    /// Changes a backing past the engine.
    fn write_behind(&mut self) -> Result<(), Violation> {
        self.distrust_bitmaps(0);
        let Disk { backing, model, .. } = &mut self.disks[0];
        let unit = self.rng.below(backing.now().len() as u64) as u32;
        let serial = model.begin_change(Kind::Data, unit, 1);
        backing.write_behind(unit as usize, tag(serial, 0, unit), &mut self.rng);
        model.end_change(serial, true, false, backing.now(), backing.durable())
    }

    /// Returns true if old rings are kept as a sabotage.
    fn keeps_old_rings(&self) -> bool {
        self.options.sabotage == Some(Sabotage::IgnoredNewestRing)
    }

    /// Returns true if this sabotage should take effect now.
    fn strikes(&mut self, sabotage: Sabotage, permille: u32) -> bool {
        self.options.sabotage == Some(sabotage) && self.rng.chance(permille)
    }

    /// Converts bytes to units.
    fn units(offset: u64, len: u64) -> (u32, u32) {
        ((offset / UNIT_BYTES) as u32, (len / UNIT_BYTES) as u32)
    }
}
