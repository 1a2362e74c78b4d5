//! Simulates caches that return segments to the pool. The engine first destages the dirty data of
//! these segments, while guest writes continue to go to flash. Meanwhile the backing may become
//! unavailable or the engine process may end. An unavailable backing fails or hangs all I/O.
//! Sometimes a backing shuts down cleanly before its I/O fails, and then it loses no data.
//!
//! A separate random number generator chooses the histories in which caches return segments, so
//! that the feature does not change the random choices of other histories.

use std::collections::BTreeMap;

use hob_engine::command::{CacheChange, Command, CommandError, Copies, Vacate};
use hob_engine::io::{Durability, Op};
use hob_engine::outcome::Outcome;
use hob_engine::units::{DeviceId, Instant};

use super::injection::{self, Case, Content, Failure, Operation};
use super::{Event, Options, Sabotage, Simulation, trace};
use crate::media::BackingFaults;
use crate::rng::SimRng;
use crate::{Violation, ensure};

/// Number that is combined with the seed of a history, to seed separate random numbers for
/// histories in which caches return segments.
const SALT: u64 = 0x7368_7269_6e6b;

const KIB: u64 = 1024;
const SECOND: u64 = 1_000_000_000;

/// Fault rates of an unavailable backing, which fails every I/O.
const AWAY: BackingFaults = BackingFaults { read_error: 1000, write_error: 1000, flush_error: 1000 };

#[derive(Debug)]
pub(super) struct Shrinks {
    rng: SimRng,
    /// Mean time that a backing is unavailable, nanoseconds. `None` if backings do not fail.
    away_ns: Option<u64>,
    /// Backings that hang, with the end of the hang.
    hung: BTreeMap<usize, Instant>,
}

impl Shrinks {
    pub(super) fn draw(seed: u64, options: &Options, backing_ns: u64) -> Option<Shrinks> {
        let mut rng = SimRng::new(seed ^ SALT);
        let is_one = rng.chance(options.shrink_permille) && options.lives;
        let mean_ns = backing_ns * rng.pick(&[10, 100, 1000]);
        let may = options.faults && !options.sound_backings;
        is_one.then_some(Shrinks { rng, away_ns: may.then_some(mean_ns), hung: BTreeMap::new() })
    }
}

impl Simulation<'_> {
    /// Sometimes makes a cache return segments, cancels the return of segments, or makes a backing
    /// unavailable.
    pub(super) fn maybe_shrink(&mut self) -> Result<(), Violation> {
        let disks = self.disks.len() as u64;
        let devices = self.flash.len() as u64;
        let Some(Shrinks { rng, away_ns, hung }) = &mut self.shrinks else { return Ok(()) };
        if !rng.chance(250) {
            return Ok(());
        }
        let disk = rng.below(disks) as usize;
        let (what, count) = (rng.below(10), rng.below(4) as u32);
        let device = DeviceId(rng.below(devices) as u16);
        let away_ns = away_ns.map(|mean| rng.between(1, 2 * mean));
        let state = &self.disks[disk];
        if !state.present || state.leaving || state.recovering.is_some() || state.owner.is_none() {
            return Ok(());
        }
        match (what, away_ns) {
            (0..5, _) => _ = self.command(disk, Command::Cache(CacheChange::Vacate(Vacate::Emptiest(count)))),
            (5, _) => _ = self.command(disk, Command::Cache(CacheChange::Vacate(Vacate::Device(device)))),
            (6, _) => _ = self.command(disk, Command::Cache(CacheChange::StopDrain)),
            (7, Some(ns)) => {
                trace!(self, "the backing of disk {disk} hangs");
                self.report.outages += 1;
                hung.insert(disk, self.now + ns);
            }
            (_, Some(ns)) => {
                trace!(self, "the backing of disk {disk} goes away");
                self.report.outages += 1;
                if what == 8 {
                    self.disks[disk].backing.shut_down();
                }
                self.disks[disk].backing.set_faults(AWAY);
                self.queue.push(self.now + ns, Event::Back(disk));
            }
            (_, None) => {}
        }
        self.drain()
    }

    /// Makes an unavailable backing available again.
    pub(super) fn backing_is_back(&mut self, disk: usize) {
        trace!(self, "the backing of disk {disk} is back");
        self.disks[disk].backing.set_faults(self.scenario.disks[disk].faults);
    }

    /// Returns the additional latency of an I/O of the disk's backing, nanoseconds: the time until
    /// its hang ends, or 0.
    pub(super) fn hangs_for(&self, disk: usize) -> u64 {
        let until = self.shrinks.as_ref().and_then(|shrinks| shrinks.hung.get(&disk).copied());
        until.map_or(0, |until| until.0.saturating_sub(self.now.0))
    }

    /// Makes all backings available again.
    pub(super) fn end_outages(&mut self) {
        self.shrinks.iter_mut().for_each(|shrinks| shrinks.hung.clear());
        if self.shrinks.is_some() {
            (0..self.disks.len()).for_each(|disk| self.backing_is_back(disk));
        }
    }

    /// Returns true if backing flushes can fail because the backing becomes unavailable.
    pub(super) fn has_outages(&self) -> bool {
        self.shrinks.as_ref().is_some_and(|shrinks| shrinks.away_ns.is_some())
    }

    /// Handles the engine's report that some segments have no dirty data any more: schedules their
    /// removal from the cache.
    pub(super) fn is_vacated(&mut self, disk: usize, which: Vacate) {
        self.report.vacated += 1;
        let Some(Shrinks { rng, .. }) = &mut self.shrinks else { return };
        if rng.chance(900) {
            let at = self.now + rng.between(1, 1_000_000);
            self.queue.push(at, Event::GiveBack(disk, which));
        }
    }

    /// Makes a cache return destaged segments.
    pub(super) fn give_back_vacated(&mut self, disk: usize, which: Vacate) -> Result<(), Violation> {
        let state = &self.disks[disk];
        // A daemon that stops has closed the cache, or is closing it.
        let may_change = state.present && !state.leaving && !self.stopping;
        let config = state.owner.as_ref().filter(|_| may_change).map(|owner| owner.config);
        let Some(config) = config else { return Ok(()) };
        let Some(ring) = self.make_ring(disk, &config) else { return Ok(()) };
        let change = match which {
            Vacate::Emptiest(count) => CacheChange::Shrink(count, Some(ring)),
            Vacate::Device(device) => CacheChange::Leave(device, vec![], Some(ring)),
        };
        self.command(disk, Command::Cache(change));
        self.drain()
    }
}

/// Shrinks a cache under load while its backing is unavailable. The power fails after `cut_after`
/// guest writes, or never if `cut_after` is `None`. No request may fail or wait for the backing,
/// and the shrink must end when the backing is available again.
///
/// # Errors
/// Returns a [`Violation`] if a guarantee is violated.
pub fn shrink_in_outage(
    seed: u64,
    copies: Copies,
    cut_after: Option<u32>,
    options: &Options,
) -> Result<(), Violation> {
    let case = Case {
        operation: Operation::Shrink,
        content: Content::Dirty,
        copies,
        failure: Failure::Backing,
        seed,
    };
    let options = Options { requests: 1000, lives: true, ..options.clone() };
    let mut world = Simulation::of(injection::scenario(&case), SimRng::new(seed), &options);
    world.injection = Some(injection::Injection::none());
    let tried = world.try_shrink(&case, cut_after);
    tried.map_err(|Violation(what)| Violation(format!("{case:?} cut after {cut_after:?}: {what}")))
}

impl Simulation<'_> {
    fn try_shrink(&mut self, case: &Case, cut_after: Option<u32>) -> Result<(), Violation> {
        self.lend_buffers();
        self.add_disk(0);
        self.drain()?;
        self.enable_on_two(case)?;
        // With one copy, the cache has a segment of clean blocks, a dirty one, a half dirty one and
        // a free one. The last two are returned.
        let (blocks, leave) = if case.copies == Copies::One { (12, 2) } else { (4, 1) };
        self.ask(Op::Read, 384 * KIB, 64 * KIB)?;
        self.run_for(SECOND / 10)?;
        for block in 0..blocks {
            self.write(block * 16 * KIB, 4 * KIB)?;
        }
        self.ask(Op::Flush, 0, 0)?;
        let on_flash = |world: &Self| world.report.outcomes[Outcome::WriteBack as usize];
        let before = on_flash(self);
        let delay = self.rng.below(3);
        if delay == 0 {
            self.disks[0].backing.set_faults(AWAY);
        }
        let vacate = self.command(0, Command::Cache(CacheChange::Vacate(Vacate::Emptiest(leave))));
        self.drain()?;
        if self.options.sabotage == Some(Sabotage::EarlyGift) {
            let owner = self.disks[0].owner.as_mut().expect("persistent");
            owner.data.remove(&2).expect("a cache of four segments");
        }
        self.run_for(delay * SECOND / 1000)?;
        self.disks[0].backing.set_faults(AWAY);
        let mut writes = 0;
        for round in 0..4 {
            // The first write overwrites dirty data, and the second write goes to a range without
            // dirty data.
            for offset in [round * 16 * KIB, (round * 2 + 1) * 8 * KIB] {
                self.write(offset, 8 * KIB)?;
                writes += 1;
                if cut_after == Some(writes) {
                    self.crash_and_open()?;
                    self.read_all(0)?;
                    return self.finish();
                }
            }
            self.ask(Op::Write(Durability::Durable), round * 16 * KIB, 4 * KIB)?;
            self.ask(Op::Flush, 0, 0)?;
            self.run_for(SECOND / 2)?;
        }
        let taken = on_flash(self) - before;
        ensure!(taken == u64::from(writes) + 4, "{taken} of {} writes stayed on flash", writes + 4);
        let is_done = self.ended.contains_key(&vacate);
        ensure!(delay > 0 || !is_done, "the shrink ended while the backing was unavailable");
        self.backing_is_back(0);
        self.wait_for(vacate)?;
        let ended = self.ended.remove(&vacate);
        ensure!(ended == Some(Ok(())), "the shrink ended with {ended:?}");
        let config = self.disks[0].owner.as_ref().expect("persistent").config;
        let Some(ring) = self.make_ring(0, &config) else { return Err(Violation("no ring".to_owned())) };
        let shrunk = self.command_and_wait(0, Command::Cache(CacheChange::Shrink(leave, Some(ring))))?;
        ensure!(
            shrunk == Ok(()) || shrunk == Err(CommandError::Dirty),
            "the cache was not shrunk: {shrunk:?}"
        );
        ensure!(shrunk == Ok(()), "data became dirty in segments that the cache was to return");
        self.read_all(0)?;
        self.crash_and_open()?;
        self.read_all(0)?;
        self.finish()?;
        let failed = self.report.outcomes[Outcome::BackingError as usize];
        ensure!(failed == 0, "{failed} requests failed");
        Ok(())
    }
}
