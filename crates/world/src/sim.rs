//! Simulates one history of guests, the cache engine, its devices and the daemon's commands, in
//! virtual time.
//!
//! A history has one or several engine processes ("lives"), separated by crashes (`lives`,
//! `recovery`, `finish`).
//!
//! The simulation loop is the daemon's shard loop with a priority queue instead of io_uring. The
//! loop takes the next event, passes it to the engine, and performs the I/O that the engine
//! requests. The checkers verify:
//!
//! - reads return data that the model of the disk allows and that the backing has (`model`,
//!   `media`);
//! - each accepted request gets one reply, and a refused request has a valid reason (`traffic`);
//! - each buffer is released once, after the reply and with no I/O in flight on it (`traffic`);
//! - an acknowledged write is on the backing, and a FUA or flushed write survives a power cut
//!   (`model`);
//! - flash I/O stays inside the segments of the disk's cache, released segments are not accessed,
//!   and I/Os that must not overlap do not (`pool`, `media`);
//! - statistics count each request once, and misses of the same data read the backing once
//!   (`audit`);
//! - every request and command ends within a limit of virtual time.

mod audit;
mod budgets;
mod clones;
mod commands;
mod crash_log;
mod direct;
mod fills;
mod finish;
mod growth;
mod guest;
mod injection;
mod journal_copies;
mod journal_defects;
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
use crate::media::{Backing, Done, Flash};
use crate::model::{Kind, Model};
use crate::queue::Queue;
use crate::rng::{self, SimRng};
use crate::{Violation, ensure};
use audit::{Fetch, Tally};
use budgets::Budgets;
use clones::Clones;
use direct::Direct;
use fills::Fills;
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
pub use sabotage::Sabotage;
use scenario::{End, Scenario};
use shrinks::Shrinks;
pub use shrinks::shrink_in_outage;
use silent::Silent;
use tracks::{Track, Tracks};
use traffic::{Buffer, InFlight};

/// Maximum duration of a simulated history, nanoseconds of virtual time.
const TIME_MAX: Instant = Instant(3_600_000_000_000);

/// Time that must pass after the last action of a guest or the daemon, nanoseconds. After this
/// time, an engine without requests and commands counts as idle.
const CALM_NS: u64 = 15_000_000_000;

/// Maximum number of daemon commands per guest request of a history.
const COMMANDS_MAX: u64 = 20;

/// Maximum number of simulation steps per guest request of a history.
const STEPS_MAX: u64 = 2000;

/// Maximum number of consecutive engine timeouts without a pause: after each of them, the next
/// timeout is already due. A long search of the engine may need many such timeouts.
const DUE_AGAIN_MAX: u32 = 64;

/// Number combined with the seed to choose which guest reads do not promote data to flash.
const PASSING_SALT: u64 = 0x7061_7373;

/// Options of a simulated history.
#[derive(Clone, Debug)]
pub struct Options {
    /// Number of guest requests in the history.
    pub requests: u32,
    /// True if devices and backings may fail, corrupt data and hang.
    pub faults: bool,
    /// True if backings do not fail, even if [`Options::faults`] is set.
    pub sound_backings: bool,
    /// True if the daemon changes caches and disks while guests send requests.
    pub commands: bool,
    /// True if some histories end with a power cut.
    pub power_cuts: bool,
    /// Share of the histories that have memory tiers, per mille.
    pub memory_permille: u32,
    /// Share of the histories that have QoS shares, limits and throttles, per mille.
    pub qos_permille: u32,
    /// Share of the histories in which some reads do not promote data to flash, per mille.
    pub passing_permille: u32,
    /// Share of the histories that have dirty bitmaps, per mille.
    pub bitmap_permille: u32,
    /// Share of the histories in which disks grow, per mille.
    pub growth_permille: u32,
    /// Share of the histories with extra fills, per mille. In an extra fill, a cache reads more data
    /// from the backing than a guest requested.
    pub fill_permille: u32,
    /// Share of the histories with a flash write budget, per mille.
    pub flash_budget_permille: u32,
    /// Share of the histories in which some reads go directly to guest memory, per mille.
    pub direct_permille: u32,
    /// Share of the histories in which disks are clones, per mille. A parent disk serves the
    /// unwritten data of a clone.
    pub clones_permille: u32,
    /// Share of the histories with faults in which backings restart and lose unflushed data, per
    /// mille.
    pub restart_permille: u32,
    /// Share of the histories in which backings keep unflushed data in the daemon's memory, so that
    /// a kill loses it, per mille.
    pub in_memory_permille: u32,
    /// Share of the histories with restarts in which working flash devices fail flushes, per mille.
    pub flash_flush_permille: u32,
    /// Share of the histories with restarts and faults in which journals lose one of two copies, and
    /// another device fails later, per mille.
    pub copy_loss_permille: u32,
    /// Share of the histories with restarts in which backings change undetectably while no engine
    /// runs, per mille.
    pub silent_permille: u32,
    /// Share of the histories with restarts in which caches return segments and backings are
    /// temporarily unavailable, per mille.
    pub shrink_permille: u32,
    /// If true, histories with restarts differ as follows. Kills and power cuts alternate, and the
    /// power fails while caches are being recovered. Many kills follow the write of a journal page
    /// after data became clean, and there are no crash logs. Silent changes hit the clean sector
    /// that was written to the backing last.
    pub cuts_in_recovery: bool,
    /// True if the engine process restarts during a history. Caches may be persistent and
    /// write-back.
    pub lives: bool,
    /// True if in some histories guests use disks while the disks' caches are being recovered.
    pub early: bool,
    /// True if guests may use a disk before its recovered cache is in service, even if devices or
    /// backings may fail. The engine supports this early use as long as the recovery succeeds. A
    /// daemon does not allow early use.
    pub hasty: bool,
    /// True if the last of several flash devices holds only replicas, like flash of a remote host.
    pub peer: bool,
    /// Deliberate defect of the engine or of its simulated environment, to test the checkers, which
    /// must then report a violation. `None` simulates without a defect.
    pub sabotage: Option<Sabotage>,
    /// Function that receives one line of text for each event that enters or leaves the engine.
    /// `None` prints nothing.
    pub trace: Option<Trace>,
}

/// Function that prints one line of text about an event.
pub type Trace = fn(std::fmt::Arguments<'_>);

/// Formats one line about an event and passes it to the trace function, if the options have one.
macro_rules! trace {
    ($world:expr, $($what:tt)+) => {
        if let Some(trace) = $world.options.trace {
            trace(format_args!("{:>14} {}", $world.now.0, format_args!($($what)+)));
        }
    };
}
use trace;

/// Number combined with the seed to choose the length from which sequential writes are bulk writes.
const BULK_SALT: u64 = 0x6275_6c6b;

/// Number combined with the seed to choose whether backings keep unflushed data in memory.
const IN_MEMORY_SALT: u64 = 0x6d65_6d6f;

/// Number combined with the seed to choose the backings' stripe sizes.
const STRIPE_SALT: u64 = 0x7374_7269_7065;

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
            fill_permille: 250,
            flash_budget_permille: 250,
            direct_permille: 500,
            clones_permille: 250,
            restart_permille: 300,
            in_memory_permille: 250,
            flash_flush_permille: 0,
            copy_loss_permille: 100,
            silent_permille: 300,
            shrink_permille: 300,
            cuts_in_recovery: false,
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
    /// Returns the options of histories with restarts: persistent caches, write-back, crashes and
    /// recovery.
    pub fn lives() -> Self {
        Options { requests: 200, lives: true, ..Options::default() }
    }
}

/// Simulates the history of this seed.
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
    /// The backing of this disk restarts.
    Restart(usize),
    End(End),
    /// A step of a cache recovery: disk, serial number of the recovering cache, step.
    Recovering(usize, u64, Step),
    /// The backing of this disk is available again.
    Back(usize),
    /// Creates a new journal for a disk whose journal was lost.
    ReplaceRing(usize),
    /// Creates a new journal for a disk whose journal lost a copy.
    ReplaceCopy(usize),
    /// A device begins to refuse journal pages ([`Scenario::refusals`]).
    Refusal(usize),
    /// The daemon has recorded that the journal of a disk's cache was lost.
    RecordLoss(usize),
    /// The daemon records that the dirty data of a disk's journal ring is discarded, because the
    /// journal is lost.
    RecordDiscard(usize, u32),
    /// Makes the cache of this disk return segments.
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
    /// Size of the disk in the engine, units of 512 bytes. The backing may have more units.
    size: u64,
    model: Model,
    access: Access,
    /// True if the engine has the disk: the last command that added or removed the disk added it.
    present: bool,
    /// True if the removal of the disk is in progress.
    leaving: bool,
    /// Data segments of the disk's cache.
    segments: BTreeSet<Segment>,
    config: Option<CacheConfig>,
    /// The pool's record of the disk's cache, if the cache is persistent.
    owner: Option<Owner>,
    /// Number of changes of the backing by other programs. Each changed the backing's identity.
    generation: u64,
    /// Highest number of a journal ring of the disk's cache when another program last changed the
    /// backing.
    changed_behind: Option<u32>,
    /// True if guest requests to the disk wait until its cache is recovered.
    gated: bool,
    /// The disk's cache, if it is being recovered while guests use the disk.
    recovering: Option<Recovering>,
    /// True if the journal of the disk's cache was lost although no device loses data, and the
    /// daemon has not created another journal yet.
    lost_ring: bool,
    /// True if the daemon is about to replace the disk's journal, which lost a copy.
    replaces_copy: bool,
    /// True if the engine discards the dirty data of the disk's recovered cache when the new
    /// journal ring is complete.
    gives_up: bool,
    /// True if the disk is being removed, and requests that waited for its cache are refused.
    refuses_waiting: bool,
    /// Number of consecutive failures to put the disk's recovered cache into service.
    attempts: u32,
    /// True if the disk's cache reported the loss of dirty data.
    dirty_lost: bool,
    /// Value of `Simulation::clock` from which on all writes of the disk go to the backing.
    writes_through_since: Option<u64>,
    /// Last value of `Simulation::clock` at which the disk had no request in flight.
    quiet_at: u64,
    /// Value of `Simulation::clock` at the last change of the disk's cache.
    changed: u64,
    /// Content of the disk's memory tier.
    memory: Vec<Tag>,
    /// The crash log of the disk's journal; `None` if this history has no crash logs.
    crash_log: Option<crash_log::CrashLog>,
    tally: Tally,
    fetches: Vec<Fetch>,
    tracks: Vec<Track>,
}

impl Disk {
    /// Returns the number of 512-byte units of the disk's backing.
    fn units(&self) -> u64 {
        self.backing.now().len() as u64
    }

    /// Returns the identity that the daemon records for the backing.
    fn identity(&self) -> [u8; 32] {
        let mut identity = [7; 32];
        identity[..8].copy_from_slice(&self.generation.to_le_bytes());
        identity
    }
}

struct Simulation<'a> {
    options: &'a Options,
    /// Seed of the backings' stripe sizes; `None` if the engine does not know the stripe sizes.
    stripe_seed: Option<u64>,
    scenario: Scenario,
    ram: Option<Ram>,
    qos: Option<Qos>,
    tracks: Option<Tracks>,
    growth: Option<Growth>,
    fills: Option<Fills>,
    budgets: Option<Budgets>,
    /// True if every fourth guest request promotes no data to flash.
    passing: bool,
    direct: Option<Direct>,
    clones: Option<Clones>,
    losses: Option<Losses>,
    /// True if backings keep unflushed data in the daemon's memory, so that a kill of the daemon
    /// loses this data.
    backings_in_memory: bool,
    /// True if all flash was flushed when the present run of the engine (its *life*) began.
    is_flash_flushed: bool,
    /// Session to which the next guest requests belong.
    session: u32,
    silent: Option<Silent>,
    /// State of the caches that return segments; `None` if no cache of this history returns
    /// segments.
    shrinks: Option<Shrinks>,
    rng: SimRng,
    now: Instant,
    /// Number of simulation steps so far.
    clock: u64,
    /// Number of consecutive timeouts after which the next timeout was already due.
    due_again: u32,
    /// Time of the last action of a guest or of the daemon.
    busy_until: Instant,
    engine: Engine,
    queue: Queue<Event>,
    flash: Vec<Flash>,
    disks: Vec<Disk>,
    free: BTreeSet<Segment>,
    fenced: BTreeSet<DeviceId>,
    asked: BTreeMap<CommandId, Asked>,
    commands: u64,
    /// Results of completed commands, in a history with restarts.
    ended: BTreeMap<CommandId, Result<(), CommandError>>,
    /// Number of persistent caches created so far.
    caches: u64,
    /// Number of recovering caches announced to the engine so far.
    recoveries: u64,
    /// Number of journal ring segments among the segments that a command released.
    ring_segments_released: usize,
    requests: BTreeMap<RequestId, InFlight>,
    /// Number of guest requests made so far.
    made: u64,
    /// Number of guest requests still to make.
    left: u32,
    buffers: BTreeMap<BufferId, Buffer>,
    spare: Vec<BufferId>,
    /// The engine's own buffers.
    lent: BTreeMap<BufferId, Lent>,
    /// The engine's buffer for sectors that guests write in part.
    edge_buffer: Option<BufferId>,
    /// The bytes of all journal pages that were ever written. Simulated devices store only tags
    /// that refer to these bytes.
    written: Written,
    /// True if the daemon is shutting down.
    stopping: bool,
    ios: BTreeSet<IoId>,
    /// Backing flushes that have failed at the backing, and whose replies have not reached the
    /// engine yet.
    late_failures: BTreeMap<IoId, Done>,
    has_power: bool,
    /// The failure that the simulation will inject.
    injection: Option<Injection>,
    report: Report,
    /// A violation that was found in a function that cannot return an error.
    found: Option<Violation>,
    /// Number of dirty sectors when the last journal page was written.
    dirty_at_page: u64,
}

impl<'a> Simulation<'a> {
    fn new(seed: u64, options: &'a Options) -> Self {
        let mut rng = SimRng::new(seed);
        let mut scenario = Scenario::draw(options, &mut rng);
        if let Some(lives) = &mut scenario.lives {
            // Separate random numbers keep histories without this option unchanged.
            lives.early = options.early && SimRng::new(rng::scatter(seed)).chance(400);
        }
        let ram = Ram::draw(seed, options.memory_permille);
        let qos = Qos::draw(seed, options.qos_permille);
        let passing = SimRng::new(seed ^ PASSING_SALT).chance(options.passing_permille);
        let tracks = Tracks::draw(seed, options.bitmap_permille);
        let direct = Direct::draw(seed, options.direct_permille);
        let growth = Growth::draw(seed, options.growth_permille);
        let fills = Fills::draw(seed, options.fill_permille, scenario.disks.len());
        let budgets = Budgets::draw(seed, options.flash_budget_permille, scenario.disks.len());
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
        journal_copies::draw(&mut scenario, seed, options);
        let world = Self::of(scenario, rng, options);
        let world = Simulation { ram, qos, passing, tracks, growth, direct, clones, silent, ..world };
        let mut world = Simulation { losses, shrinks, fills, budgets, ..world };
        world.backings_in_memory = SimRng::new(seed ^ IN_MEMORY_SALT).chance(options.in_memory_permille);
        world.disks.iter_mut().for_each(|disk| disk.backing.lose_at_failed_flushes());
        world.draw_crash_logs(seed);
        world.stripe_seed = Some(seed ^ STRIPE_SALT);
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
            replaces_copy: false,
            gives_up: false,
            refuses_waiting: false,
            attempts: 0,
            dirty_lost: false,
            writes_through_since: None,
            quiet_at: 0,
            changed: 0,
            memory: vec![],
            crash_log: None,
            tally: Tally::default(),
            fetches: vec![],
            tracks: vec![],
        };
        let disks = scenario.disks.iter().enumerate().map(disk).collect();
        let mut world = Simulation {
            stripe_seed: None,
            engine: Engine::new(scenario.limits),
            ram: None,
            qos: None,
            tracks: None,
            growth: None,
            fills: None,
            budgets: None,
            passing: false,
            direct: None,
            clones: None,
            losses: None,
            backings_in_memory: false,
            is_flash_flushed: true,
            session: 0,
            silent: None,
            shrinks: None,
            options,
            rng,
            now: Instant(0),
            clock: 0,
            due_again: 0,
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
            late_failures: BTreeMap::new(),
            has_power: true,
            injection: None,
            report: Report::default(),
            found: None,
            dirty_at_page: 0,
            scenario,
        };
        world.free = world.all_segments();
        world
    }

    fn live(&mut self) -> Result<(), Violation> {
        self.lend_buffers();
        self.prepare_memory();
        self.prepare_fills();
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
        self.schedule_refusals();
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
        // The daemon flushes the backing of a disk before it removes the disk.
        self.run_dry()?;
        self.check_empty()?;
        self.report.took_ns = self.now.0;
        Ok(())
    }

    /// Handles events until no event is left.
    fn run_dry(&mut self) -> Result<(), Violation> {
        self.run_until(|_| false)
    }

    /// Handles events until no event is left or the condition is true.
    fn run_until(&mut self, is_enough: impl Fn(&Self) -> bool) -> Result<(), Violation> {
        self.busy_until = self.now;
        while self.has_power && !is_enough(self) {
            self.found.take().map_or(Ok(()), Err)?;
            let next = self.queue.next_at();
            let due = self.engine.poll_timeout().filter(|due| next.is_none_or(|next| *due < next));
            self.clock += 1;
            let rests = self.requests.is_empty() && self.asked.is_empty();
            let calm_ns = if self.ios.is_empty() { CALM_NS } else { 4 * CALM_NS };
            let idle = self.queue.len() == self.ios.len() + self.restarts_due();
            if idle && rests && self.now >= self.busy_until + calm_ns {
                // The history ends here although timeouts and I/Os remain: scrubbing never ends,
                // and some I/Os hang repeatedly.
                return Ok(());
            }
            if let Some(due) = due {
                // With QoS limits, an I/O may wait for a timeout while no I/O is in flight.
                let idle = self.ios.is_empty() && self.scenario.lives.is_none() && self.qos.is_none();
                ensure!(!idle, "a timeout is due with no I/O in flight");
                self.now = self.now.max(due);
                trace!(self, "timeout");
                self.engine.handle_timeout(self.now);
                let is_due_again = self.engine.poll_timeout().is_some_and(|again| again <= self.now);
                self.due_again = if is_due_again { self.due_again + 1 } else { 0 };
                ensure!(self.due_again <= DUE_AGAIN_MAX, "timeouts without a pause at {:?}", self.now);
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
                // If no device accepts a new journal, the daemon retries for ever and the disk
                // stays offline.
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
                    self.maybe_change_fill()?;
                    self.maybe_change_budget();
                    self.maybe_shrink()?;
                    self.maybe_record_evidence();
                }
                self.schedule_command();
                Ok(())
            }
            Event::DeviceFailure(device) => {
                self.device_fails(device);
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
            Event::ReplaceCopy(disk) => {
                self.replace_journal_copy(disk);
                Ok(())
            }
            Event::Refusal(which) => {
                self.refuse_pages(which);
                Ok(())
            }
            Event::RecordLoss(disk) => {
                self.record_loss(disk);
                Ok(())
            }
            Event::RecordDiscard(disk, ring) => {
                self.record_discard(disk, ring);
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
        // If guests wait for a cache whose recovery never ends, their requests never end.
        if let Some(mean) = self.scenario.command_ns
            && self.left > 0
            && self.commands < COMMANDS_MAX * u64::from(self.options.requests)
        {
            let at = self.now + self.rng.between(1, 2 * mean);
            self.queue.push(at, Event::Command);
        }
    }

    /// Changes a backing without the engine, as a foreign writer does.
    fn write_behind(&mut self) -> Result<(), Violation> {
        self.distrust_bitmaps(0);
        let Disk { backing, model, .. } = &mut self.disks[0];
        let unit = self.rng.below(backing.now().len() as u64) as u32;
        let serial = model.begin_change(Kind::Data, unit, 1);
        backing.write_behind(unit as usize, tag(serial, 0, unit), &mut self.rng);
        model.end_change(serial, true, false, backing.now(), backing.durable())
    }

    /// Returns true if the history has this sabotage and a random choice makes it take effect now.
    fn strikes(&mut self, sabotage: Sabotage, permille: u32) -> bool {
        self.options.sabotage == Some(sabotage) && self.rng.chance(permille)
    }

    /// Converts an offset and a length from bytes to units of 512 bytes ([`UNIT_BYTES`]).
    fn units(offset: u64, len: u64) -> (u32, u32) {
        ((offset / UNIT_BYTES) as u32, (len / UNIT_BYTES) as u32)
    }
}
