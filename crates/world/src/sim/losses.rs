//! Backings that fail flushes and restart: acknowledged writes that no flush covers may be lost.
//!
//! A failed flush loses any part of them, and one flush gets the error though others are in flight. A
//! restart loses any part of them too, and the engine is told. Guests have separate sessions.

use hob_engine::units::{DiskId, Instant};

use super::{Event, Options, Sabotage, Side, Simulation, trace};
use crate::Violation;
use crate::media::Done;
use crate::rng::SimRng;

/// Separates these random numbers from all others.
const SALT: u64 = 0x6c6f_7373;

/// Minimum rate of failing flushes, per mille.
pub(super) const FLUSH_ERROR: u32 = 60;

/// State of a history with losses; see the module documentation.
pub(super) struct Losses {
    rng: SimRng,
    /// Mean time between two restarts, nanoseconds.
    mean_ns: u64,
}

impl Losses {
    /// Returns the state if the history of this seed has losses.
    pub(super) fn draw(seed: u64, options: &Options, backing_ns: u64) -> Option<Losses> {
        let mut rng = SimRng::new(seed ^ SALT);
        let may = options.faults && !options.sound_backings || options.restart_permille == 1000;
        let is_one = rng.chance(options.restart_permille);
        let mean_ns = backing_ns * rng.pick(&[4, 20, 100]);
        (may && is_one).then_some(Losses { rng, mean_ns })
    }
}

impl Simulation<'_> {
    /// Schedules a restart of a backing.
    pub(super) fn schedule_restart(&mut self) {
        let (now, disks) = (self.now, self.disks.len() as u64);
        let Some(Losses { rng, mean_ns }) = self.losses.as_mut().filter(|_| self.left > 0) else { return };
        let at = Instant(now.0 + rng.between(1, 2 * *mean_ns));
        let disk = rng.below(disks) as usize;
        self.queue.push(at, Event::Restart(disk));
    }

    /// Handles a failed flush that lost data.
    pub(super) fn flush_failed(&mut self, side: Side, done: &mut Done) {
        if let Side::Backing(disk) = side
            && self.disks[disk].backing.loses()
        {
            self.report.lossy_flushes += 1;
            self.disks[disk].model.lose();
        }
        let trusted = match side {
            Side::Backing(_) => Sabotage::TrustedFlush,
            Side::Flash(_) => Sabotage::TrustedFlashFlush,
        };
        if self.options.sabotage == Some(trusted) {
            done.result = Ok(());
        }
    }

    /// Restarts a backing.
    pub(super) fn restart(&mut self, disk: usize) -> Result<(), Violation> {
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
