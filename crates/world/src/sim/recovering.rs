//! Simulates requests to a disk whose cache is being recovered. The simulated daemon tells the
//! engine which regions may have dirty data. If a write that could bypass the cache is waiting, the
//! daemon invalidates the old journal rings.
//!
//! If the cache has no dirty data, a real daemon may know this from its own records, and the
//! simulated daemon asks the model. Otherwise the daemon learns the possibly dirty regions from the
//! first reading of the journal ring. With unreliable devices or careful guests, requests wait
//! until dirty data is recovered, because the disk's content is uncertain until then.

use hob_engine::command::{CacheChange, Command, Expect};
use hob_engine::journal::Ring;
use hob_engine::regions::Regions;

use super::{Event, Sabotage, Simulation};
use crate::Violation;
use crate::content::UNIT_BYTES;

/// A cache that is being recovered while guests use its disk.
#[derive(Debug)]
pub(super) struct Recovering {
    /// Serial number that distinguishes this recovery from other recoveries of the disk.
    serial: u64,
    /// True if the engine is writing the new journal ring of the recovered cache.
    is_enabled: bool,
}

/// The next step of a cache recovery.
#[derive(Clone, Copy, Debug)]
pub(super) enum Step {
    /// The daemon has read the journal ring for the first time, to find the regions that may have
    /// dirty data.
    Surveyed,
    /// The daemon reads the journal ring a second time and recovers the cache. The daemon then
    /// compares a sample of the clean sectors with the backing.
    Recovered,
    /// The pool's table marks the cache's journal rings as invalid.
    Voided,
}

impl Simulation<'_> {
    /// Lets guests use a disk before its cache is recovered, unless the disk's content is uncertain
    /// until the recovery. Returns false if the cache must be recovered first.
    pub(super) fn expect_cache(&mut self, index: usize) -> bool {
        let is_bad = self.any_bad();
        let state = &self.disks[index];
        let Some(lives) = &self.scenario.lives else { return false };
        let is_certain = !lives.careful && !is_bad && lives.behind == 0;
        if !lives.early || state.owner.is_none() || state.model.lags() && !is_certain {
            return false;
        }
        let behind = lives.behind;
        if self.rng.chance(behind) {
            self.write_some_behind(index);
        }
        if !self.disks[index].model.lags() {
            self.change_silently(index, None);
        }
        self.observe_opening(index);
        let state = &self.disks[index];
        let mut doubtful = Regions::new(state.size * UNIT_BYTES);
        if state.model.lags() {
            doubtful.insert_all();
        }
        self.recoveries += 1;
        self.disks[index].recovering = Some(Recovering { serial: self.recoveries, is_enabled: false });
        self.report.early += 1;
        self.tell_expected(index, doubtful, false);
        let mean = self.scenario.backing_ns * self.rng.pick(&[1, 10, 100]);
        self.schedule_coming(index, Step::Surveyed, mean);
        true
    }

    fn tell_expected(&mut self, index: usize, doubtful: Regions, is_void: bool) {
        let doubtful = doubtful.grown(self.disks[index].size * UNIT_BYTES);
        let expect = Some(Box::new(Expect { doubtful, is_void }));
        self.command(index, Command::Cache(CacheChange::Expect(expect)));
    }

    fn schedule_coming(&mut self, index: usize, step: Step, mean_ns: u64) {
        let Some(recovering) = &self.disks[index].recovering else { return };
        let (serial, takes) = (recovering.serial, self.rng.latency(mean_ns));
        self.queue.push(self.now + takes, Event::Recovering(index, serial, step));
    }

    pub(super) fn recovery_proceeds(
        &mut self,
        index: usize,
        serial: u64,
        step: Step,
    ) -> Result<(), Violation> {
        let Some(recovering) =
            self.disks[index].recovering.as_mut().filter(|recovering| recovering.serial == serial)
        else {
            return Ok(());
        };
        match step {
            Step::Surveyed => {
                if self.disks[index].model.lags()
                    && let Some(doubtful) = self.doubtful_of(index)
                {
                    self.tell_expected(index, doubtful, false);
                }
                let mean = self.scenario.backing_ns * self.rng.pick(&[1, 10, 100]);
                self.schedule_coming(index, Step::Recovered, mean);
                Ok(())
            }
            Step::Recovered => {
                recovering.is_enabled = true;
                self.recover(index, 0)
            }
            Step::Voided if recovering.is_enabled => Ok(()),
            Step::Voided => {
                let doubtful = Regions::new(self.disks[index].size * UNIT_BYTES);
                let owner = self.disks[index].owner.as_mut().expect("its cache is being recovered");
                owner.make_void();
                self.report.voided += 1;
                self.tell_expected(index, doubtful, true);
                Ok(())
            }
        }
    }

    /// Handles [`Event::ChangeWaits`]: in nine of ten cases, schedules the invalidation of the
    /// recovering cache's journal rings. The waiting change can then bypass the cache.
    pub(super) fn change_waits(&mut self, index: usize) {
        // The recovery may have failed meanwhile.
        if self.disks[index].recovering.is_some() && self.rng.chance(900) {
            self.schedule_coming(index, Step::Voided, self.scenario.flash_ns);
        }
    }

    /// Reads the newest complete journal ring for the first time, before the reading that recovers
    /// the cache. Returns the regions that may have dirty data according to this ring and its crash
    /// log.
    fn doubtful_of(&mut self, index: usize) -> Option<Regions> {
        let owner = self.disks[index].owner.as_ref()?;
        let rings: Vec<_> =
            owner.rings.iter().rev().map(|(number, copies)| (*number, copies.clone())).collect();
        let cache = owner.cache;
        rings.iter().find_map(|(number, copies)| match self.survey(cache, *number, copies) {
            Ring::Whole(mut plan) => {
                self.continue_with_log(index, &mut plan);
                Some(plan.doubtful)
            }
            Ring::Unfinished | Ring::Damaged { .. } => None,
        })
    }

    /// Tells the engine that the disk will get no recovered cache.
    pub(super) fn expect_no_more(&mut self, index: usize) {
        if self.disks[index].recovering.take().is_some() {
            self.command(index, Command::Cache(CacheChange::Expect(None)));
        }
    }

    /// Drops invalid journal rings when a disk is opened.
    pub(super) fn drop_void_rings(&mut self, index: usize) {
        if self.options.sabotage == Some(Sabotage::KeptVoidRings) {
            return;
        }
        if let Some(owner) = &mut self.disks[index].owner {
            let gone = owner.drop_void();
            self.free.extend(gone);
        }
    }
}
