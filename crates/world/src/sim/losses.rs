//! Simulates backings that fail flushes and restart. A restarted backing may have lost acknowledged
//! writes that no flush covers.
//!
//! A failed flush loses a random part (none, some or all) of the unflushed writes. Only one flush
//! fails with the error, even if several flushes are in flight. A restart of a backing also loses a
//! random part of the unflushed writes, and the daemon tells the engine about the restart. Each
//! guest has its own session.

use hob_engine::command::{CacheChange, Command};
use hob_engine::units::{DiskId, Instant};

use super::scenario::Scenario;
use super::{Event, Options, Sabotage, Side, Simulation, trace};
use crate::Violation;
use crate::media::Done;
use crate::rng::SimRng;

/// Number that is combined with the seed of a history, to seed separate random numbers for
/// histories in which backings lose data.
const SALT: u64 = 0x6c6f_7373;

const FLASH_SALT: u64 = 0x666c_7573;

const RETURN_SALT: u64 = 0x7265_7475;

/// Pause between two attempts to replace a lost journal, nanoseconds.
const REPLACE_NS: u64 = 2_000_000_000;

/// Chooses flash devices whose failures are only temporary: after the next restart of the engine
/// process, these devices work again.
pub(super) fn draw_returns(scenario: &mut Scenario, seed: u64) {
    let mut rng = SimRng::new(seed ^ RETURN_SALT);
    for plan in &mut scenario.devices {
        plan.returns = rng.chance(500);
    }
}

/// If flash flushes fail in this history, makes working flash devices fail some flushes. The data
/// of these devices stays readable until the power fails, so no flushed data may be lost.
pub(super) fn draw_flash_flushes(scenario: &mut Scenario, seed: u64, options: &Options) {
    let mut rng = SimRng::new(seed ^ FLASH_SALT);
    if scenario.lives.is_none() || !rng.chance(options.flash_flush_permille) {
        return;
    }
    for plan in &mut scenario.devices {
        let rate = rng.pick(&[0, 5, 30, 100]);
        plan.faults.flush_error = if options.sabotage.is_some() { 100 } else { rate };
    }
}

/// Maximum number of backing restarts in a history. Too frequent restarts would prevent dirty data
/// from ever becoming clean.
const RESTARTS_MAX: u64 = 500;

/// Minimum share of backing flushes that fail, per mille.
pub(super) const FLUSH_ERROR: u32 = 60;

/// Backing restarts of a history.
pub(super) struct Losses {
    rng: SimRng,
    /// Mean time between two restarts of backings, nanoseconds.
    mean_ns: u64,
    /// True if the next restart of a backing is in the event queue.
    is_due: bool,
}

impl Losses {
    /// Returns the schedule of backing restarts of this history, or `None` if no backing restarts
    /// in it. `io_ns` is the latency of the slower of flash and backing, nanoseconds. The mean time
    /// between two restarts is 4, 20 or 100 times `io_ns`. Some gaps between restarts are long
    /// enough to destage dirty data and flush the backing.
    pub(super) fn draw(seed: u64, options: &Options, io_ns: u64) -> Option<Losses> {
        let mut rng = SimRng::new(seed ^ SALT);
        let may = options.faults && !options.sound_backings || options.restart_permille == 1000;
        let is_one = rng.chance(options.restart_permille);
        let mean_ns = io_ns * rng.pick(&[4, 20, 100]);
        (may && is_one).then_some(Losses { rng, mean_ns, is_due: false })
    }
}

impl Simulation<'_> {
    /// Schedules a restart of a backing.
    pub(super) fn schedule_restart(&mut self) {
        let (now, disks) = (self.now, self.disks.len() as u64);
        let goes_on = self.left > 0 && self.report.restarts < RESTARTS_MAX;
        let Some(Losses { rng, mean_ns, is_due }) = self.losses.as_mut().filter(|_| goes_on) else { return };
        *is_due = true;
        let at = Instant(now.0 + rng.between(1, 2 * *mean_ns));
        let disk = rng.below(disks) as usize;
        self.queue.push(at, Event::Restart(disk));
    }

    /// Returns the number of scheduled restarts. The caller ignores these events when it looks for
    /// the end of the history. If guests wait for a disk that is never opened again, scheduled
    /// restarts are the only events left.
    pub(super) fn restarts_due(&self) -> usize {
        usize::from(self.losses.as_ref().is_some_and(|losses| losses.is_due))
    }

    /// Cancels the scheduled restart of a backing when an engine process ends.
    pub(super) fn forget_restarts(&mut self) {
        self.losses.iter_mut().for_each(|losses| losses.is_due = false);
    }

    /// Handles the completion of a backing flush that failed and lost data.
    pub(super) fn flush_failed(&mut self, side: Side, done: &mut Done) {
        if let Side::Backing(disk) = side
            && self.disks[disk].backing.loses()
        {
            self.report.lossy_flushes += 1;
            self.disks[disk].model.lose();
        }
        if let Side::Flash(device) = side {
            self.flash_flush_failed(device);
        }
        let trusted = match side {
            Side::Backing(_) => Sabotage::TrustedFlush,
            Side::Flash(_) => Sabotage::TrustedFlashFlush,
        };
        if self.options.sabotage == Some(trusted) {
            done.result = Ok(());
        }
    }

    /// Handles the report that a cache's journal is lost.
    pub(super) fn journal_is_lost(&mut self, disk: usize) {
        if !self.any_bad() {
            // The old journal ring stays valid up to its durable records; the daemon creates a new
            // journal ring.
            self.disks[disk].lost_ring = true;
            self.queue.push(self.now + self.scenario.flash_ns, Event::RecordLoss(disk));
            self.queue.push(self.now, Event::ReplaceRing(disk));
            return;
        }
        if let Some(owner) = &mut self.disks[disk].owner {
            owner.journal_lost = true;
        }
        self.record_loss(disk);
    }

    /// Durably records that a journal was lost, and tells the engine that the loss is recorded. A
    /// disk that is being removed accepts no command, so the function tries again later, in case
    /// the removal fails.
    pub(super) fn record_loss(&mut self, disk: usize) {
        if self.disks[disk].leaving {
            return self.queue.push(self.now + REPLACE_NS, Event::RecordLoss(disk));
        }
        let state = &mut self.disks[disk];
        let Some(owner) = state.owner.as_mut().filter(|_| state.present) else { return };
        let number = owner.number();
        if self.options.sabotage != Some(Sabotage::UnrecordedLoss) {
            owner.record_loss();
        }
        self.command(disk, Command::Cache(CacheChange::LossRecorded(number)));
    }

    /// Handles the engine's report that a discard of dirty data waits until the daemon has recorded
    /// the discard for this journal ring.
    pub(super) fn discard_is_unrecorded(&mut self, disk: usize, ring: u32) {
        self.queue.push(self.now + self.scenario.flash_ns, Event::RecordDiscard(disk, ring));
    }

    /// Durably records that the dirty data of a lost journal ring is discarded, and tells the engine.
    pub(super) fn record_discard(&mut self, disk: usize, ring: u32) {
        let state = &mut self.disks[disk];
        let has_disk = state.present || state.leaving;
        let Some(owner) = state.owner.as_mut().filter(|_| has_disk) else { return };
        owner.record_discard(ring);
        self.command(disk, Command::Cache(CacheChange::DiscardRecorded(ring)));
    }

    /// Reacts to a lost journal as the daemon does: gives the cache a new journal ring, or disables
    /// the cache if the pool has no room for a ring. In both cases the cache is drained.
    pub(super) fn replace_ring(&mut self, disk: usize) {
        let state = &mut self.disks[disk];
        let is_there = state.config.is_some() && state.owner.is_some() && (state.present || state.leaving);
        state.lost_ring &= is_there;
        if !state.lost_ring {
            return;
        }
        self.queue.push(self.now + REPLACE_NS, Event::ReplaceRing(disk));
        let state = &self.disks[disk];
        if state.leaving || state.recovering.is_some() || self.stopping || self.brings_ring(disk) {
            return;
        }
        let config = state.config.expect("looked at");
        match self.make_ring(disk, &config) {
            Some(ring) => self.command(disk, Command::Cache(CacheChange::Shrink(0, Some(ring)))),
            None => self.command(disk, Command::Cache(CacheChange::Disable)),
        };
        self.command(disk, Command::Cache(CacheChange::Drain));
    }

    /// Restarts a backing.
    pub(super) fn restart(&mut self, disk: usize) -> Result<(), Violation> {
        self.forget_restarts();
        if !self.disks[disk].present {
            self.schedule_restart();
            return Ok(());
        }
        trace!(self, "the backing of {disk} restarts");
        self.report.restarts += 1;
        self.disks[disk].backing.lose(&mut self.rng);
        self.disks[disk].model.lose();
        if self.options.sabotage != Some(Sabotage::UntoldRestart) {
            self.engine.handle_loss(self.now, DiskId(disk as u32));
        }
        self.schedule_restart();
        self.drain()
    }
}
