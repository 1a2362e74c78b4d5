//! Injects one failure at each point of an operation on a persistent cache. In separate runs, the
//! first, second, third … write or flush of flash fails. A removal is also tested with failures of
//! the backing.
//!
//! A [`Case`] is a small fixed workload, an operation with concurrent guest requests, and a
//! failure. [`inject`] runs the case once. The failure hits the `nth` write or flush of flash (data
//! or journal). The caller increments `nth` until the operation has no `nth` write or flush. In
//! addition to the checks of every history, the simulation verifies:
//!
//! - the operation ends, and fails only if flash refuses writes permanently, if a flush of flash
//!   has failed, or if the engine refuses the operation without a failure too;
//! - the disk continues to serve requests with or without its cache, and no data is lost;
//! - after a crash, recovery finds all durable data, and the cache can be drained and removed.
//!
//! The simulated daemon replaces a lost journal with a new journal ring on another device. If no
//! device is left, the daemon drains the cache, marks its journal as invalid and removes the cache.

use hob_engine::Limits;
use hob_engine::admission::Admission;
use hob_engine::command::{
    Access, CacheChange, CacheConfig, Command, CommandError, Copies, Destage, Discard, Enable, Mode, Segment,
};
use hob_engine::io::{Durability, IoOp, Op};
use hob_engine::outcome::Outcome;
use hob_engine::policy::PolicyKind;
use hob_engine::units::{CommandId, DeviceId, DiskId, IoId};

use super::owner::Owner;
use super::scenario::{DevicePlan, DiskPlan, End, Lives, Scenario};
use super::{Options, Simulation, trace};
use crate::content::UNIT_BYTES;
use crate::media::{BackingFaults, DeviceFailure, FlashFaults};
use crate::rng::SimRng;
use crate::{Violation, ensure};

const KIB: u64 = 1024;
const SECOND: u64 = 1_000_000_000;

const SEGMENT_BYTES: u64 = 64 * KIB;
const BLOCK_BYTES: u32 = 8192;
const DISK_BYTES: u64 = 512 * KIB;

/// Number of flash devices. The cache is on the first two devices.
const DEVICES: u16 = 3;

/// An operation on a persistent cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Operation {
    /// Enables the cache.
    Enable,
    /// Disables the cache.
    Disable,
    /// Clears the cache.
    Clear,
    /// Changes the cache's policy.
    Configure,
    /// Grows the cache.
    Grow,
    /// Shrinks the cache.
    Shrink,
    /// Moves the part of the cache that is on one flash device to another device.
    Leave,
    /// Grows the disk.
    GrowDisk,
    /// Changes the cache from write-back to write-through.
    WriteThrough,
    /// Changes the cache from write-through to write-back.
    WriteBack,
    /// Drains the cache.
    Drain,
    /// Starts a drain of the cache and stops it.
    StopDrain,
    /// Discards the cache's dirty data.
    DiscardDirty,
    /// Closes the cache's journal.
    Close,
    /// Scrubs the cache.
    Scrub,
    /// Creates replicas of the cache's dirty data.
    Double,
    /// Removes the disk. The disk's cache stays on flash.
    RemoveDisk,
    /// Recovers the cache after a crash.
    Recover,
}

/// All operations.
pub const OPERATIONS: [Operation; 18] = [
    Operation::Enable,
    Operation::Disable,
    Operation::Clear,
    Operation::Configure,
    Operation::Grow,
    Operation::Shrink,
    Operation::Leave,
    Operation::GrowDisk,
    Operation::WriteThrough,
    Operation::WriteBack,
    Operation::Drain,
    Operation::StopDrain,
    Operation::DiscardDirty,
    Operation::Close,
    Operation::Scrub,
    Operation::Double,
    Operation::RemoveDisk,
    Operation::Recover,
];

/// Content of the cache before the operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Content {
    /// Flushed and unflushed dirty data, and clean data.
    Dirty,
    /// Only clean data.
    Clean,
}

/// The injected failure. The failure begins at the `nth` write or flush of flash during the
/// operation, or, in the last two variants, at the `nth` I/O of the backing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Failure {
    /// The `nth` I/O fails. Later I/Os succeed.
    Once,
    /// The `nth` I/O fails. If the I/O is a flush, the device also loses some unflushed data.
    OnceWithLoss,
    /// The `nth` I/O and all later writes and flushes of the same device fail.
    Device,
    /// All devices refuse writes and flushes from the `nth` one on.
    Everywhere,
    /// The power fails while the `nth` I/O is in flight.
    PowerCut,
    /// All I/Os of the backing fail from the `nth` one on.
    Backing,
    /// All I/Os of the backing fail from the `nth` one on, and then the daemon reports that another
    /// host owns the disk.
    TakenOver,
}

impl Failure {
    fn is_of_backing(self) -> bool {
        matches!(self, Failure::Backing | Failure::TakenOver)
    }
}

/// One combination of operation, content and failure.
#[derive(Clone, Copy, Debug)]
pub struct Case {
    /// Operation during which an I/O fails.
    pub operation: Operation,
    /// Content of the cache before the operation.
    pub content: Content,
    /// Number of copies of dirty data and journal.
    pub copies: Copies,
    /// The injected failure.
    pub failure: Failure,
    /// Seed of latencies and other random choices.
    pub seed: u64,
}

/// Result of a run of a [`Case`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Injected {
    /// True if the operation had an `nth` I/O, so that the failure was injected.
    pub struck: bool,
    /// Result of the operation's command, or `None` if the power failed before the command ended.
    pub ended: Option<Result<(), CommandError>>,
    /// Number of journals that were lost.
    pub journals_lost: u32,
}

#[derive(Debug)]
pub(super) struct Injection {
    failure: Failure,
    /// True if the operation has begun, so that its I/Os are counted.
    armed: bool,
    /// Number of I/Os that are still to come, up to and including the one that fails.
    left: u32,
    struck: bool,
    /// True if the failure hit a flush of flash, so that the device may have lost unflushed data.
    flush_failed: bool,
    /// Number of reported journal losses that the simulated daemon has not handled yet.
    pub(super) lost_journals: u32,
}

impl Injection {
    /// Returns an injection without a failure, for histories in which no failure is planned.
    pub(super) fn none() -> Injection {
        let failure = Failure::Backing;
        Injection { failure, armed: false, left: 0, struck: false, flush_failed: false, lost_journals: 0 }
    }
}

/// Runs a case. The failure hits the `nth` write or flush of flash, or I/O of the backing, after
/// the operation began. `nth` counts from 1.
///
/// # Errors
/// Returns a [`Violation`] if a guarantee is violated.
pub fn inject(case: &Case, nth: u32, options: &Options) -> Result<Injected, Violation> {
    let options = Options { requests: 1000, lives: true, ..options.clone() };
    let mut world = Simulation::of(scenario(case), SimRng::new(case.seed), &options);
    world.injection = Some(Injection {
        failure: case.failure,
        armed: false,
        left: nth,
        struck: false,
        flush_failed: false,
        lost_journals: 0,
    });
    let ended =
        world.try_case(case).map_err(|Violation(what)| Violation(format!("{case:?} at {nth}: {what}")))?;
    let struck = world.injection.as_ref().is_some_and(|injection| injection.struck);
    Ok(Injected { struck, ended, journals_lost: world.report.journals_lost as u32 })
}

pub(super) fn scenario(case: &Case) -> Scenario {
    let ring_reserve = 0;
    Scenario {
        limits: Limits {
            requests_max: 64,
            fill_bytes_max: 1 << 20,
            flash_errors_max: 1000,
            flash_errors_forgive_ms: 60_000,
            flash_stall_ms_max: 1000,
            scrub_frames_per_s: if case.operation == Operation::Scrub { 64 } else { 0 },
            ..Limits::default()
        },
        segment_bytes: SEGMENT_BYTES,
        devices: (0..DEVICES)
            .map(|_| DevicePlan {
                segments: 24,
                faults: FlashFaults::default(),
                failure: None,
                refuses: false,
                returns: false,
            })
            .collect(),
        disks: vec![DiskPlan {
            units: (DISK_BYTES / UNIT_BYTES) as u32,
            access: Access::ReadWrite,
            faults: BackingFaults::default(),
        }],
        guests: vec![],
        flash_ns: 80_000,
        backing_ns: 1_000_000,
        command_ns: None,
        power_cut: None,
        refusals: Vec::new(),
        lives: Some(Lives {
            early: false,
            power_fails: false,
            ends: vec![],
            requests: 0,
            lent: vec![1 << 20; 4],
            ring_reserve,
            behind: 0,
            careful: false,
        }),
    }
}

fn config(case: &Case) -> CacheConfig {
    let mut config =
        CacheConfig::write_through(BLOCK_BYTES, SEGMENT_BYTES, PolicyKind::default(), Admission::default());
    config.mode = match case.operation {
        Operation::WriteBack => Mode::WriteThrough,
        _ => Mode::WriteBack,
    };
    // Dirty data stays on flash until a drain.
    config.destage =
        Destage { start_permille: 900, stop_permille: 800, dirty_age_ms_max: 0, ..Destage::default() };
    config.copies = if case.operation == Operation::Double { Copies::One } else { case.copies };
    config
}

impl Simulation<'_> {
    /// Counts a submitted write or flush of flash, and injects the failure if this is the `nth`
    /// one.
    pub(super) fn count_change(&mut self, device: usize, io: IoId, op: IoOp) {
        let counts = |injection: &&mut Injection| injection.armed && !injection.failure.is_of_backing();
        let Some(injection) = self.injection.as_mut().filter(counts) else { return };
        injection.left -= 1;
        if injection.left > 0 {
            return;
        }
        (injection.armed, injection.struck) = (false, true);
        injection.flush_failed = op == IoOp::Flush;
        let failure = injection.failure;
        trace!(self, "{failure:?} strikes {io} on device {device}");
        match failure {
            Failure::Once => self.flash[device].doom(io),
            Failure::OnceWithLoss => {
                self.flash[device].lose_at_failed_flushes();
                self.flash[device].doom(io);
            }
            Failure::Device => self.refuse_changes(device),
            Failure::Everywhere => (0..self.flash.len()).for_each(|device| self.refuse_changes(device)),
            Failure::PowerCut => self.has_power = false,
            Failure::Backing | Failure::TakenOver => unreachable!("this failure is one of the backing"),
        }
    }

    /// Counts a submitted I/O of the backing, and injects the failure if this is the `nth` one.
    pub(super) fn count_backing_io(&mut self) {
        let counts = |injection: &&mut Injection| injection.armed && injection.failure.is_of_backing();
        let Some(injection) = self.injection.as_mut().filter(counts) else { return };
        injection.left -= 1;
        if injection.left == 0 {
            (injection.armed, injection.struck) = (false, true);
            let faults = BackingFaults { read_error: 1000, write_error: 1000, flush_error: 1000 };
            self.disks[0].backing.set_faults(faults);
        }
    }

    pub(super) fn failed_a_flush(&self) -> bool {
        self.injection.as_ref().is_some_and(|injection| injection.flush_failed)
    }

    fn has_struck(&self) -> bool {
        self.injection.as_ref().is_some_and(|injection| injection.struck)
    }

    fn refuse_changes(&mut self, device: usize) {
        self.flash[device].suffer(DeviceFailure::ReadOnly, &mut self.rng);
        self.scenario.devices[device].refuses = true;
        // The daemon knows that the device failed, and allocates nothing on it.
        self.fenced.insert(DeviceId(device as u16));
    }

    fn arm(&mut self, armed: bool) {
        let injection = self.injection.as_mut().expect("an injection is in progress");
        injection.armed = armed && !injection.struck;
    }

    fn try_case(&mut self, case: &Case) -> Result<Option<Result<(), CommandError>>, Violation> {
        self.lend_buffers();
        self.add_disk(0);
        self.drain()?;
        if case.operation != Operation::Enable {
            self.enable_on_two(case)?;
            self.prepare(case)?;
        }
        let ended = self.operate(case)?;
        let is_closed = matches!(case.operation, Operation::Close | Operation::RemoveDisk);
        if self.has_power && !(is_closed && ended == Some(Ok(()))) {
            self.serve(case)?;
        }
        self.arm(false);
        self.crash_and_open()?;
        self.read_all(0)?;
        self.finish()?;
        let outcomes = &self.report.outcomes;
        let failed = outcomes[Outcome::BackingError as usize] + outcomes[Outcome::DirtyLost as usize];
        let may_fail = case.operation == Operation::DiscardDirty || case.failure.is_of_backing();
        ensure!(failed == 0 || may_fail, "{failed} requests failed");
        Ok(ended)
    }

    pub(super) fn enable_on_two(&mut self, case: &Case) -> Result<(), Violation> {
        let id = self.give_cache(case);
        self.wait_for(id)?;
        ensure!(
            self.ended.get(&id) == Some(&Ok(())),
            "the cache cannot be created before the operation: {:?}",
            self.ended
        );
        Ok(())
    }

    /// Sends the command that creates the cache.
    fn give_cache(&mut self, case: &Case) -> CommandId {
        let config = config(case);
        self.caches += 1;
        let mut cache = [0x1c; 16];
        cache[..8].copy_from_slice(&self.caches.to_le_bytes());
        self.disks[0].owner = Some(Owner::new(cache, config));
        let places = [self.free_on(0, 2), self.free_on(1, 2)].concat();
        let segments = self.own(0, places);
        let ring = self.make_ring(0, &CacheConfig { copies: case.copies, ..config });
        let enable = Enable { config, segments, journal: ring, recovered: None };
        self.command(0, Command::Cache(CacheChange::Enable(Box::new(enable))))
    }

    /// Takes this number of free segments of a device from the pool.
    fn free_on(&mut self, device: u16, count: usize) -> Vec<Segment> {
        let free = self.free.iter().filter(|segment| segment.device == DeviceId(device)).take(count);
        let taken: Vec<Segment> = free.copied().collect();
        taken.iter().for_each(|segment| _ = self.free.remove(segment));
        taken
    }

    /// Prepares the cache before the operation: writes flushed data, reads clean data, and then
    /// writes unflushed data or, for [`Content::Clean`], drains the cache.
    fn prepare(&mut self, case: &Case) -> Result<(), Violation> {
        for (offset, len) in [(0, 16), (32, 8), (136, 4)] {
            self.write(offset * KIB, len * KIB)?;
        }
        self.ask(Op::Read, 100 * KIB, 16 * KIB)?;
        self.ask(Op::Flush, 0, 0)?;
        // Some of these writes overwrite dirty data, and some bypass the cache.
        self.write(0, 4 * KIB)?;
        self.write(200 * KIB, 512)?;
        self.ask(Op::Read, 300 * KIB, 64 * KIB)?;
        self.ask(Op::Flush, 0, 0)?;
        if case.content == Content::Clean {
            let drained = self.command_and_wait(0, Command::Cache(CacheChange::Drain))?;
            ensure!(drained == Ok(()), "the cache cannot be drained before the operation: {drained:?}");
            return self.run_for(2 * SECOND);
        }
        self.write(48 * KIB, 4 * KIB)?;
        self.write(4 * KIB, 4 * KIB)
    }

    /// Sends the operation's command with guest requests before and after it, and waits for the
    /// result.
    fn operate(&mut self, case: &Case) -> Result<Option<Result<(), CommandError>>, Violation> {
        if case.operation == Operation::Recover {
            self.crash(End::PowerCut)?;
            self.renew_engine();
            self.arm(true);
            self.open_disk(0)?;
            self.drain()?;
            self.run_until(|world| world.asked.is_empty())?;
            return Ok(None);
        }
        self.arm(true);
        if case.content == Content::Dirty {
            self.begin(Op::Write(Durability::Durable), 16 * KIB, 8 * KIB)?;
        }
        self.begin(Op::Read, 400 * KIB, 8 * KIB)?;
        if case.failure.is_of_backing() {
            // This discard bypasses the cache, so only a backing flush makes it durable.
            self.begin(Op::Discard(Durability::Volatile), 440 * KIB, 8 * KIB)?;
        }
        if case.failure == Failure::TakenOver {
            self.drain()?;
            self.run_until(|world| world.has_struck() || world.requests.is_empty())?;
            if self.has_struck() {
                self.engine.revoke(self.now, DiskId(0));
            }
        }
        let Some(command) = self.command_of(case) else {
            self.run_for(4 * SECOND)?;
            return Ok(None);
        };
        let id = match command {
            Some(command) => self.command(0, command),
            None => self.give_cache(case),
        };
        self.drain()?;
        if case.operation == Operation::StopDrain {
            self.command(0, Command::Cache(CacheChange::StopDrain));
            self.drain()?;
        }
        if !matches!(case.operation, Operation::Close | Operation::RemoveDisk) {
            self.begin(Op::Write(Durability::Volatile), 56 * KIB, 4 * KIB)?;
            self.begin(Op::Flush, 0, 0)?;
        }
        self.wait_for(id)?;
        if case.operation == Operation::Double {
            self.run_for(4 * SECOND)?;
        }
        let ended = self.ended.remove(&id);
        if let Some(Err(error)) = ended {
            let dirty = case.content == Content::Dirty;
            let just = match error {
                // The journal ring failed, or no device has room for a new journal ring.
                CommandError::JournalFailed | CommandError::NoJournal => self.any_refuses(),
                CommandError::Dirty => dirty,
                CommandError::Stopped => case.operation == Operation::StopDrain,
                _ => false,
            };
            ensure!(just, "the operation ended with {error:?}");
        }
        Ok(ended)
    }

    /// Returns the command of an operation: `None` if the operation has no command, `Some(None)` if
    /// `give_cache` sends the command.
    #[expect(clippy::option_option, reason = "both are told apart at one place")]
    fn command_of(&mut self, case: &Case) -> Option<Option<Command>> {
        let config = config(case);
        let change = match case.operation {
            Operation::Enable => return Some(None),
            Operation::Scrub | Operation::Recover => return None,
            Operation::RemoveDisk => return Some(Some(Command::RemoveDisk)),
            Operation::Disable => CacheChange::Disable,
            Operation::Clear => CacheChange::Clear(self.make_ring(0, &config)),
            Operation::Configure => {
                let policy = PolicyKind::all().last().expect("there are policies");
                let config = CacheConfig { policy, block_bytes: 2 * BLOCK_BYTES, ..config };
                CacheChange::Configure(config, self.make_ring(0, &config))
            }
            Operation::Grow => {
                let places = [self.free_on(1, 1), self.free_on(2, 1)].concat();
                let segments = self.own(0, places);
                CacheChange::Grow(segments, self.make_ring(0, &config))
            }
            Operation::Shrink => CacheChange::Shrink(1, self.make_ring(0, &config)),
            Operation::Leave => {
                let places = self.free_on(2, 2);
                let segments = self.own(0, places);
                CacheChange::Leave(DeviceId(0), segments, self.make_ring(0, &config))
            }
            Operation::GrowDisk => {
                // The new size of the disk is not a multiple of the sector size.
                self.grow_backing(0, 9);
                CacheChange::GrowDisk(self.disks[0].units() * UNIT_BYTES, self.make_ring(0, &config))
            }
            Operation::WriteThrough => CacheChange::Tune(Mode::WriteThrough, config.destage, config.copies),
            Operation::WriteBack => CacheChange::Tune(Mode::WriteBack, config.destage, config.copies),
            Operation::Double => CacheChange::Tune(config.mode, config.destage, Copies::TwoOfDirty),
            Operation::Drain | Operation::StopDrain => CacheChange::Drain,
            Operation::DiscardDirty => CacheChange::DiscardDirty(Discard::Told),
            Operation::Close => CacheChange::Close,
        };
        Some(Some(Command::Cache(change)))
    }

    /// Checks that the disk continues to serve requests, with or without its cache.
    fn serve(&mut self, case: &Case) -> Result<(), Violation> {
        self.see_to_journal()?;
        self.write(16 * KIB, 8 * KIB)?;
        self.write(0, 8 * KIB)?;
        self.ask(Op::Write(Durability::Durable), 320 * KIB, 8 * KIB)?;
        self.ask(Op::Write(Durability::Durable), 32 * KIB, 4 * KIB)?;
        // One write partly overlaps dirty data, and the discard goes to the backing only.
        self.write(4 * KIB + 512, 512)?;
        self.ask(Op::Discard(Durability::Durable), 40 * KIB, 4 * KIB)?;
        for offset in (0..DISK_BYTES).step_by(64 * KIB as usize) {
            self.ask(Op::Read, offset, 64 * KIB)?;
        }
        self.ask(Op::Flush, 0, 0)?;
        self.run_for(3 * SECOND)?;
        if case.seed.is_multiple_of(2) {
            self.write(0, 4 * KIB)?;
            self.write(56 * KIB, 8 * KIB)?;
        }
        Ok(())
    }

    pub(super) fn write(&mut self, offset: u64, len: u64) -> Result<(), Violation> {
        self.ask(Op::Write(Durability::Volatile), offset, len)
    }

    /// Sends a request unless the power has failed.
    fn begin(&mut self, op: Op, offset: u64, len: u64) -> Result<(), Violation> {
        if !self.has_power {
            return Ok(());
        }
        let request = self.make_request(0, op, offset, len);
        self.hand_in(None, request)
    }

    /// Sends a request and waits until all requests are answered.
    pub(super) fn ask(&mut self, op: Op, offset: u64, len: u64) -> Result<(), Violation> {
        self.begin(op, offset, len)?;
        loop {
            self.run_until(|world| world.requests.is_empty() || world.has_lost_a_journal())?;
            if self.has_lost_a_journal() && self.has_power {
                self.see_to_journal()?;
                continue;
            }
            ensure!(self.requests.is_empty() || !self.has_power, "never answered: {:?}", self.requests);
            return Ok(());
        }
    }

    pub(super) fn run_for(&mut self, ns: u64) -> Result<(), Violation> {
        let end = self.now + ns;
        loop {
            self.run_until(|world| world.now >= end || world.has_lost_a_journal())?;
            if !self.has_lost_a_journal() || !self.has_power {
                self.now = self.now.max(end);
                return Ok(());
            }
            self.see_to_journal()?;
        }
    }

    /// Waits for the end of a command.
    pub(super) fn wait_for(&mut self, id: CommandId) -> Result<(), Violation> {
        self.drain()?;
        loop {
            self.run_until(|world| world.ended.contains_key(&id) || world.has_lost_a_journal())?;
            if self.ended.contains_key(&id) || !self.has_power {
                return Ok(());
            }
            ensure!(self.has_lost_a_journal(), "the command never ends: {:?}", self.asked);
            self.see_to_journal()?;
        }
    }

    /// Returns true if dirty data was discarded in this history. The discard may also have lost
    /// unanswered writes.
    pub(super) fn has_discarded(&self) -> bool {
        self.injection.is_some() && self.report.discards > 0 && self.any_refuses()
    }

    fn has_lost_a_journal(&self) -> bool {
        self.injection.as_ref().is_some_and(|injection| injection.lost_journals > 0)
    }

    /// Replaces or removes a journal that cannot be written any more, as the daemon does.
    fn see_to_journal(&mut self) -> Result<(), Violation> {
        let injection = self.injection.as_mut().expect("an injection is in progress");
        if std::mem::take(&mut injection.lost_journals) == 0 {
            return Ok(());
        }
        // If the running removal cannot close the cache, the disk stays.
        self.run_until(|world| !world.disks[0].leaving)?;
        if !self.disks[0].present {
            return Ok(());
        }
        self.record_loss(0);
        let Some(config) = self.disks[0].owner.as_ref().map(|owner| owner.config) else { return Ok(()) };
        if let Some(ring) = self.make_ring(0, &config) {
            let renew = Command::Cache(CacheChange::Shrink(0, Some(ring)));
            let renewed = self.command_unless_cut(renew)?;
            if renewed.is_none_or(|result| result.is_ok()) {
                return Ok(());
            }
        }
        match self.command_unless_cut(Command::Cache(CacheChange::Drain))? {
            // The disk has no cache any more, a removal of the disk is in progress, or the power
            // has failed.
            None | Some(Err(CommandError::NoCache | CommandError::Removing)) => return Ok(()),
            // The engine stopped this drain because another drain is in progress.
            Some(Err(CommandError::Stopped)) => self.run_until(|world| !world.drains())?,
            Some(result) => ensure!(result == Ok(()), "the cache cannot be drained: {result:?}"),
        }
        self.disks[0].owner.iter_mut().for_each(|owner| owner.journal_lost = true);
        let disabled = self.command_unless_cut(Command::Cache(CacheChange::Disable))?;
        ensure!(disabled.is_none_or(|result| result.is_ok()), "the cache cannot be disabled: {disabled:?}");
        Ok(())
    }

    fn drains(&self) -> bool {
        self.asked.values().any(|asked| matches!(asked.command, Command::Cache(CacheChange::Drain)))
    }

    fn command_unless_cut(
        &mut self,
        command: Command,
    ) -> Result<Option<Result<(), CommandError>>, Violation> {
        let id = self.command(0, command);
        self.drain()?;
        self.run_until(|world| world.ended.contains_key(&id))?;
        let ended = self.ended.remove(&id);
        ensure!(ended.is_some() || !self.has_power, "a command never ended: {:?}", self.asked);
        Ok(ended)
    }

    /// Cuts the power. If the injected failure is a failure of the backing, kills the process
    /// instead. Then repairs all devices and opens the disk again.
    pub(super) fn crash_and_open(&mut self) -> Result<(), Violation> {
        let is_of_backing =
            self.injection.as_ref().is_some_and(|injection| injection.failure.is_of_backing());
        self.crash(if is_of_backing { End::Kill } else { End::PowerCut })?;
        self.disks[0].backing.set_faults(BackingFaults::default());
        self.has_power = true;
        self.injection.iter_mut().for_each(|injection| injection.lost_journals = 0);
        for (flash, plan) in self.flash.iter_mut().zip(&mut self.scenario.devices) {
            flash.heal();
            plan.refuses = false;
        }
        self.renew_engine();
        self.open_disk(0)?;
        self.drain()?;
        self.run_until(|world| world.asked.is_empty())?;
        ensure!(self.asked.is_empty(), "the disk cannot be opened: {:?}", self.asked);
        Ok(())
    }

    fn renew_engine(&mut self) {
        self.engine = hob_engine::Engine::new(self.scenario.limits);
        self.lend_buffers();
    }
}
