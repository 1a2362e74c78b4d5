//! One history: guests, the engine, its devices and the daemon's commands, in virtual time.
//!
//! A history has one life of the engine, or several, with crashes between them (`lives`, `recovery`, `finish`).
//!
//! The loop is the shard loop with a priority queue in place of the ring: take what happens next,
//! tell the engine, carry out what it asks for. What is checked on the way:
//!
//! - reads return what the model of a disk allows, and what the backing holds (`model`, `media`);
//! - each accepted request is answered once, refused for the right reason or not at all, and its
//!   buffer comes back once, after the answer and with no I/O on it (`traffic`);
//! - an acknowledged change is on the backing, a FUA or flushed one survives a power cut (`model`);
//! - flash I/O stays inside the segments of its disk's cache, given-up segments are left alone, and
//!   I/O that must not overlap does not (`pool`, `media`);
//! - statistics count each request once and add up; misses to the same data are fetched once (`audit`);
//! - everything ends, in bounded virtual time, with nothing left over.

mod audit;
mod clones;
mod coming;
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
use crate::dice::{self, Dice};
use crate::media::{Backing, Flash, Lie};
use crate::model::{Kind, Model};
use crate::queue::Queue;
use crate::{Violation, ensure};
use audit::{Fetch, Tally};
use clones::Clones;
use coming::{Coming, Step};
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
pub use report::Report;
use scenario::{End, Scenario};
use shrinks::Shrinks;
pub use shrinks::shrink_in_outage;
use silent::Silent;
use tracks::{Track, Tracks};
use traffic::{Buffer, InFlight};

/// No history takes longer, nanoseconds of virtual time.
const TIME_MAX: Instant = Instant(3_600_000_000_000);

/// An engine to which nothing happens may be left alone after so long, nanoseconds.
const CALM_NS: u64 = 15_000_000_000;

/// No history has more commands for each of its requests.
const COMMANDS_MAX: u64 = 20;

/// No history takes more steps for each of its requests.
const STEPS_MAX: u64 = 2000;

/// Tells the dice for histories with reads that promote nothing from those of everything else.
const PASSING_SALT: u64 = 0x7061_7373;

/// What histories may contain.
#[derive(Clone, Debug)]
pub struct Options {
    /// Guest requests.
    pub requests: u32,
    /// Devices and backings may fail, lie and hang.
    pub faults: bool,
    /// Backings do not fail, even if `faults` are on.
    pub sound_backings: bool,
    /// Caches and disks may change under load.
    pub commands: bool,
    /// Some histories end with a power cut.
    pub power_cuts: bool,
    /// So many of a thousand histories have memory above caches.
    pub memory_permille: u32,
    /// So many of a thousand histories have shares, limits and windows.
    pub qos_permille: u32,
    /// In so many of a thousand histories some reads promote nothing.
    pub passing_permille: u32,
    /// So many of a thousand histories have dirty bitmaps.
    pub bitmap_permille: u32,
    /// In so many of a thousand histories disks get larger.
    pub growth_permille: u32,
    /// In so many of a thousand histories some reads go to guests' own memory.
    pub direct_permille: u32,
    /// In so many of a thousand histories disks are clones, of which another disk keeps what nobody wrote.
    pub clones_permille: u32,
    /// In so many of a thousand histories with faults, backings restart and lose what was not flushed; 1000: in all.
    pub restart_permille: u32,
    /// In so many of a thousand histories of several lives backings change while no engine runs, without a trace in their identity.
    pub silent_permille: u32,
    /// In so many of a thousand histories of several lives caches give segments back, and backings are away for a while.
    pub shrink_permille: u32,
    /// Histories have several lives, and caches may be persistent and write back.
    pub lives: bool,
    /// In some histories guests use disks whose caches are being recovered.
    pub early: bool,
    /// Where devices or backings may fail, guests come before a recovered cache is in service nevertheless. A daemon does not let
    /// them; the engine can do with it as long as that does not fail.
    pub hasty: bool,
    /// The last of several devices takes second copies only, as another host's flash does.
    pub peer: bool,
    /// Something is broken on purpose: the run must fail.
    pub sabotage: Option<Sabotage>,
    /// Hears of everything that crosses the engine's boundary, one line each.
    pub trace: Option<Trace>,
}

/// Takes a line of a trace.
pub type Trace = fn(std::fmt::Arguments<'_>);

/// Tells the trace, if there is one.
macro_rules! trace {
    ($world:expr, $($what:tt)+) => {
        if let Some(trace) = $world.options.trace {
            trace(format_args!("{:>14} {}", $world.now.0, format_args!($($what)+)));
        }
    };
}
use trace;

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

/// Ways to break the world, to see whether the checkers notice.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sabotage {
    /// A device lies.
    Lie(Lie),
    /// Now and then somebody writes to a backing past the engine, so that flash is stale.
    WriteBehind,
    /// Now and then a reply is delivered twice.
    RepeatedReply,
    /// Now and then a reply is lost.
    LostReply,
    /// Now and then a buffer is given back twice.
    RepeatedRelease,
    /// Now and then flash I/O goes to another segment.
    MisroutedIo,
    /// Now and then a request is not counted.
    Uncounted,
    /// Now and then a completion is lost.
    LostCompletion,
    /// Recovery takes every sector of a tail as proved.
    UncheckedTail,
    /// Change records of a page are applied in the wrong order.
    ReorderedRecords,
    /// Recovery does not look at the newest ring, and old ones are kept.
    IgnoredNewestRing,
    /// Clean data is served although the backing has changed.
    ServedStale,
    /// Clean data of a backing without evidence is not compared before it is served.
    TrustedUnproven,
    /// Clean data is compared with what the backing held earlier.
    StaleComparison,
    /// A daemon records evidence that a backing is unchanged while not everything in the cache was compared.
    EvidenceTooEarly,
    /// Now and then memory does not take over what a write wrote.
    LostRenewal,
    /// Now and then the rest of a sector is not copied next to what a guest wrote of it.
    LostEdge,
    /// Now and then the buffer from which zeroes are written is not zeroed.
    LostZeroes,
    /// Now and then a bitmap that a crash took begins again empty.
    FreshBitmap,
    /// Rings that were made void, because the backing was changed before their cache was recovered, are read all the same.
    KeptVoidRings,
    /// The engine is not told that a guest writes to the memory that it reads into.
    SecretScribbles,
    /// The engine is not told that another disk keeps what it reads.
    UntoldSharing,
    /// The engine is not told that a backing restarted.
    UntoldRestart,
    /// A flush of a backing that failed, and lost something, is called a success.
    TrustedFlush,
    /// A flush of flash that failed, and lost something, is called a success.
    TrustedFlashFlush,
    /// All guests of a disk are one session: who hears of a failure keeps it from the others.
    OneSession,
    /// The pool's table gives a segment back when dirty data begins to leave it, and not when none is left.
    EarlyGift,
}

/// Lives the history of this seed.
pub fn run(seed: u64, options: &Options) -> Result<Report, Violation> {
    let mut world = World::new(seed, options);
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
    Ailment(usize),
    PowerCut,
    /// Of a disk's backing.
    Restart(usize),
    End(End),
    /// Of a disk, and of which of its caches to come.
    Coming(usize, u64, Step),
    /// The backing of a disk is not away any more.
    Back(usize),
    /// A disk's cache is to give segments back.
    GiveBack(usize, Vacate),
}

/// Who performs an I/O.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Side {
    Flash(usize),
    Backing(usize),
}

struct Disk {
    backing: Backing,
    /// Units that the engine serves. The backing may have more, which it has not been told of.
    size: u64,
    model: Model,
    access: Access,
    /// Added and not removed, as far as commands were given.
    present: bool,
    /// Being removed.
    leaving: bool,
    /// Data segments of its cache.
    segments: BTreeSet<Segment>,
    config: Option<CacheConfig>,
    /// What the pool's table says of its cache, if that is persistent.
    owner: Option<Owner>,
    /// Counts changes of its backing by others, where its identity shows them.
    generation: u64,
    /// It was changed so when this was the highest of its cache's rings.
    changed_behind: Option<u32>,
    /// Guests wait for its cache.
    gated: bool,
    /// Its cache is being recovered while guests use it.
    coming: Option<Coming>,
    /// It is being removed, and what waited for its cache is refused.
    refuses_waiting: bool,
    /// Times in a row that its recovered cache did not get into service.
    attempts: u32,
    /// Its cache reported dirty data lost.
    dirty_lost: bool,
    /// Since when writes go to the backing, by `World::clock`, if they do.
    writes_through_since: Option<u64>,
    /// When it had nothing in flight last, by `World::clock`.
    quiet_at: u64,
    /// When its cache changed last, by `World::clock`.
    changed: u64,
    /// The area of its memory.
    memory: Vec<Tag>,
    tally: Tally,
    fetches: Vec<Fetch>,
    tracks: Vec<Track>,
}

impl Disk {
    /// Units of its backing.
    fn units(&self) -> u64 {
        self.backing.now().len() as u64
    }

    /// What the daemon knows the backing by.
    fn identity(&self) -> [u8; 32] {
        let mut identity = [7; 32];
        identity[..8].copy_from_slice(&self.generation.to_le_bytes());
        identity
    }
}

struct World<'a> {
    options: &'a Options,
    scenario: Scenario,
    ram: Option<Ram>,
    /// Shares and limits, if this history has them.
    qos: Option<Qos>,
    /// Dirty bitmaps, if this history has them.
    tracks: Option<Tracks>,
    /// Disks get larger, if this history has that.
    growth: Option<Growth>,
    /// One in four requests promotes nothing.
    passing: bool,
    /// In this history some reads go to guests' own memory.
    direct: Option<Direct>,
    /// In this history disks are clones.
    clones: Option<Clones>,
    /// In this history backings restart.
    losses: Option<Losses>,
    /// Of the requests to come.
    session: u32,
    /// In this history backings change silently.
    silent: Option<Silent>,
    /// In this history caches give segments back.
    shrinks: Option<Shrinks>,
    dice: Dice,
    now: Instant,
    /// Counts steps.
    clock: u64,
    /// When a guest or the daemon did something last.
    busy_until: Instant,
    engine: Engine,
    queue: Queue<Event>,
    flash: Vec<Flash>,
    disks: Vec<Disk>,
    free: BTreeSet<Segment>,
    fenced: BTreeSet<DeviceId>,
    asked: BTreeMap<CommandId, Asked>,
    commands: u64,
    /// How commands ended, in a history of several lives.
    ended: BTreeMap<CommandId, Result<(), CommandError>>,
    /// Persistent caches made so far.
    caches: u64,
    /// Caches that were expected so far.
    comings: u64,
    /// Of the segments that a command released, those of rings.
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
    /// Contents of journal pages.
    written: Written,
    /// The daemon is ending.
    stopping: bool,
    ios: BTreeSet<IoId>,
    has_power: bool,
    /// What is to fail on purpose, and when.
    injection: Option<Injection>,
    report: Report,
}

impl<'a> World<'a> {
    fn new(seed: u64, options: &'a Options) -> Self {
        let mut dice = Dice::new(seed);
        let mut scenario = Scenario::draw(options, &mut dice);
        if let Some(lives) = &mut scenario.lives {
            // Dice of its own: the other histories are what they were before there were such.
            lives.early = options.early && Dice::new(dice::scatter(seed)).chance(400);
        }
        let ram = Ram::draw(seed, options.memory_permille);
        let qos = Qos::draw(seed, options.qos_permille);
        let passing = Dice::new(seed ^ PASSING_SALT).chance(options.passing_permille);
        let tracks = Tracks::draw(seed, options.bitmap_permille);
        let direct = Direct::draw(seed, options.direct_permille);
        let growth = Growth::draw(seed, options.growth_permille);
        let lives = scenario.lives.is_some();
        let silent_permille = if lives { options.silent_permille } else { 0 };
        let silent = Silent::draw(seed, silent_permille, scenario.disks.len());
        if let Some(silent) = &silent {
            scenario.limits.verify_bytes_per_s = silent.verify_bytes_per_s;
        }
        let units = scenario.disks.iter().map(|disk| disk.units);
        let clones = Clones::draw(seed, options.clones_permille, units);
        let losses = Losses::draw(seed, options, scenario.backing_ns);
        let shrinks = Shrinks::draw(seed, options, scenario.backing_ns);
        if losses.is_some() {
            for plan in &mut scenario.disks {
                plan.faults.flush_error = plan.faults.flush_error.max(losses::FLUSH_ERROR);
            }
        }
        let world = Self::of(scenario, dice, options);
        let world = World { ram, qos, passing, tracks, growth, direct, clones, silent, ..world };
        let mut world = World { losses, shrinks, ..world };
        world.disks.iter_mut().for_each(|disk| disk.backing.lose_at_failed_flushes());
        world.flash.iter_mut().for_each(crate::media::Flash::lose_at_failed_flushes);
        world
    }

    fn of(scenario: Scenario, dice: Dice, options: &'a Options) -> Self {
        let lie = match options.sabotage {
            Some(Sabotage::Lie(lie)) => Some(lie),
            _ => None,
        };
        let flash_bytes = |segments| pool::SEGMENTS_START + segments * scenario.segment_bytes;
        let flash =
            scenario.devices.iter().map(|plan| Flash::new(flash_bytes(plan.segments), plan.faults, lie));
        let flash = flash.collect();
        let disk = |(i, plan): (usize, &scenario::DiskPlan)| Disk {
            backing: Backing::new((0..plan.units).map(|u| tag(1, i as u8, u)).collect(), plan.faults, lie),
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
            coming: None,
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
        let mut world = World {
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
            dice,
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
            comings: 0,
            ring_segments_released: 0,
            requests: BTreeMap::new(),
            made: 0,
            left: options.requests,
            buffers: BTreeMap::new(),
            spare: vec![],
            lent: BTreeMap::new(),
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
            if let Some((at, _)) = plan.ailment {
                self.queue.push(at, Event::Ailment(i));
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

    /// Lets happen what is to happen, until nothing more is.
    fn run_dry(&mut self) -> Result<(), Violation> {
        self.run_until(|_| false)
    }

    /// The same, or until something is so.
    fn run_until(&mut self, is_enough: impl Fn(&Self) -> bool) -> Result<(), Violation> {
        self.busy_until = self.now;
        while self.has_power && !is_enough(self) {
            let next = self.queue.next_at();
            let due = self.engine.poll_timeout().filter(|due| next.is_none_or(|next| *due < next));
            self.clock += 1;
            let rests = self.requests.is_empty() && self.asked.is_empty();
            let calm_ns = if self.ios.is_empty() { CALM_NS } else { 4 * CALM_NS };
            if self.queue.len() == self.ios.len() && rests && self.now >= self.busy_until + calm_ns {
                // What flash holds is looked after for ever, and where I/O hangs again and again, never without any in flight.
                return Ok(());
            }
            if let Some(due) = due {
                // What a limit holds back waits for nothing but the time.
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
                // A cache whose journal no device takes is tried again for ever, and its disk stays away: nobody waits for it.
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
        if !matches!(event, Event::Complete(..)) {
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
            Event::Ailment(device) => {
                let (_, ailment) = self.scenario.devices[device].ailment.expect("scheduled");
                self.flash[device].suffer(ailment, &mut self.dice);
                Ok(())
            }
            Event::Restart(disk) => self.restart(disk),
            Event::End(end) => self.end(end),
            Event::Back(disk) => {
                self.backing_is_back(disk);
                Ok(())
            }
            Event::GiveBack(disk, which) => self.give_back_vacated(disk, which),
            Event::Coming(disk, serial, step) => self.coming_goes_on(disk, serial, step),
            Event::PowerCut => {
                self.has_power = false;
                self.report.power_cuts += 1;
                for disk in &self.disks {
                    disk.model.check_power_cut(&disk.backing.power_cut(&mut self.dice))?;
                }
                Ok(())
            }
        }
    }

    fn schedule_command(&mut self) {
        // Where guests wait for a cache that does not come back, their requests never run out.
        if let Some(mean) = self.scenario.command_ns
            && self.left > 0
            && self.commands < COMMANDS_MAX * u64::from(self.options.requests)
        {
            let at = self.now + self.dice.between(1, 2 * mean);
            self.queue.push(at, Event::Command);
        }
    }

    /// Somebody writes to a backing past the engine.
    fn write_behind(&mut self) -> Result<(), Violation> {
        self.distrust_bitmaps(0);
        let Disk { backing, model, .. } = &mut self.disks[0];
        let unit = self.dice.below(backing.now().len() as u64) as u32;
        let serial = model.begin_change(Kind::Data, unit, 1);
        backing.write_behind(unit as usize, tag(serial, 0, unit), &mut self.dice);
        model.end_change(serial, true, false, backing.now(), backing.durable())
    }

    /// Are old rings kept on purpose?
    fn keeps_old_rings(&self) -> bool {
        self.options.sabotage == Some(Sabotage::IgnoredNewestRing)
    }

    /// Should the sabotage, if it is this one, strike now?
    fn strikes(&mut self, sabotage: Sabotage, permille: u32) -> bool {
        self.options.sabotage == Some(sabotage) && self.dice.chance(permille)
    }

    /// Bytes to units.
    fn units(offset: u64, len: u64) -> (u32, u32) {
        ((offset / UNIT_BYTES) as u32, (len / UNIT_BYTES) as u32)
    }
}
