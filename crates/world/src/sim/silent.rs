//! Simulates backings that change silently while no engine serves them: the backing's identity does
//! not change. Some backings have a version number that each change changes. The daemon records
//! this number as evidence (docs/decisions/0033). If a backing has no version number, or its number
//! differs from the recorded number, the daemon makes the engine compare clean sectors with the
//! backing.
//!
//! A separate random number generator chooses the histories with silent changes, so that these
//! changes do not affect the random choices of other histories.

use hob_engine::io::{Io, IoOp};
use hob_engine::journal::Recovered;
use hob_engine::units::{DiskId, SECTOR_BYTES};

use super::{Sabotage, Simulation, trace};
use crate::content::{self, SECTOR_UNITS, Tag, UNIT_BYTES, ZERO};
use crate::rng::SimRng;
use crate::{Violation, ensure};

/// Number that is combined with the seed of a history, to seed separate random numbers for
/// histories with silent changes.
const SALT: u64 = 0x7369_6c65_6e74;

/// Maximum number of clean sectors that are sampled in a recovered cache. Most silent changes of
/// the backing begin at one of these sectors, so that the cache often has stale data.
const SAMPLES: usize = 64;

/// Silent changes of backings in a history.
#[derive(Debug)]
pub(super) struct Silent {
    rng: SimRng,
    /// Bandwidth of the background comparison of cache and backing, bytes per second.
    pub(super) verify_bytes_per_s: u64,
    /// For each disk: whether its backing provides evidence of changes, what the daemon has
    /// verified, and whether the simulation changed the backing silently.
    disks: Vec<Observed>,
}

/// The daemon's knowledge of a backing.
#[derive(Debug, Default)]
struct Observed {
    /// True if the backing provides evidence that it is unchanged. A file provides evidence, and an
    /// NBD export does not.
    has_evidence: bool,
    /// Version of the backing's content when the disk was opened.
    opened: u64,
    /// True if all data in the disk's cache was verified when the removal of the disk was
    /// requested.
    was_verified: bool,
    /// True if the backing was changed silently.
    is_changed: bool,
    /// Content of the backing before the last silent change.
    before: Vec<Tag>,
}

impl Silent {
    pub(super) fn draw(seed: u64, permille: u32, disks: usize) -> Option<Silent> {
        let mut rng = SimRng::new(seed ^ SALT);
        if !rng.chance(permille) {
            return None;
        }
        let verify_bytes_per_s = rng.pick(&[0, 4 << 20, 128 << 20]);
        let observed = |_| Observed { has_evidence: rng.chance(600), ..Observed::default() };
        let disks = (0..disks).map(observed).collect();
        Some(Silent { rng, verify_bytes_per_s, disks })
    }

    /// Turns off the background comparison, so that data stays unverified until guests read it, and
    /// makes all backings provide evidence.
    pub(super) fn leave_unverified(&mut self) {
        self.verify_bytes_per_s = 0;
        self.disks.iter_mut().for_each(|disk| disk.has_evidence = true);
    }
}

impl Simulation<'_> {
    /// Records the version of the disk's backing when the disk is opened.
    pub(super) fn observe_opening(&mut self, index: usize) {
        let version = self.disks[index].backing.version();
        if let Some(silent) = &mut self.silent {
            silent.disks[index].opened = version;
        }
    }

    /// Sometimes changes a backing silently while no daemon serves it. The backing's identity does
    /// not show the change, and the sampled sectors may be unchanged. Sectors that are dirty in the
    /// cache are not changed, because their data on the backing is outdated anyway. The function
    /// changes nothing if a power cut could make more sectors dirty (docs/decisions/0065). A power
    /// cut has this effect if flash could not be flushed before the recovery, or if only the crash
    /// log records that sectors are clean.
    pub(super) fn change_silently(&mut self, index: usize, recovered: Option<&Recovered>) {
        let (units, is_bad) = (self.disks[index].units(), self.any_bad());
        let power_fails = self.scenario.lives.as_ref().is_some_and(|lives| lives.power_fails);
        let is_durable = self.is_flash_flushed && !(power_fails && self.relies_on_crash_log(index));
        let chance = if self.options.cuts_in_recovery { 1000 } else { 400 };
        let newest = recovered.and_then(|recovered| self.newest_clean(index, recovered));
        let Some(Silent { rng, .. }) = &mut self.silent else { return };
        if is_bad || !rng.chance(chance) || !is_durable {
            return;
        }
        let known = recovered.map_or_else(Vec::new, |recovered| recovered.samples(SAMPLES));
        let mut first = rng.below(units);
        if !known.is_empty() && rng.chance(800) {
            first = known[rng.below(known.len() as u64) as usize].0 * SECTOR_UNITS as u64;
        }
        if let Some(sector) = newest {
            first = sector * SECTOR_UNITS as u64;
        }
        let longest = if newest.is_some() { SECTOR_UNITS as u64 } else { 24 };
        let count = rng.between(1, (units - first).min(longest));
        let sectors = first / SECTOR_UNITS as u64..(first + count).div_ceil(SECTOR_UNITS as u64);
        if recovered.is_some_and(|it| it.dirty().any(|dirty| sectors.contains(&dirty.sector))) {
            return;
        }
        let before = self.disks[index].backing.now().to_vec();
        self.write_while_down(index, first as u32, count as u32);
        trace!(self, "disk {index} changed silently: {count} units from {first} on");
        let observed = &mut self.silent.as_mut().expect("looked at").disks[index];
        (observed.is_changed, observed.before) = (true, before);
        self.report.changed_silently += 1;
    }

    /// Returns the clean sector of a recovered cache that was written to the backing last, in
    /// histories in which silent changes hit this sector. The journal record that made the sector
    /// clean may not be durable yet.
    fn newest_clean(&self, index: usize, recovered: &Recovered) -> Option<u64> {
        if !self.options.cuts_in_recovery {
            return None;
        }
        let disk = &self.disks[index];
        let changed_at = |sector: u64| {
            let first = sector * SECTOR_UNITS as u64;
            let units = first..disk.units().min(first + SECTOR_UNITS as u64);
            units.map(|unit| disk.backing.changed_at(unit as usize)).max()
        };
        let clean = recovered.samples(usize::MAX).into_iter().map(|(sector, _)| sector);
        clean.max_by_key(|sector| changed_at(*sector))
    }

    /// Returns true if the disk's backing was ever changed silently.
    pub(super) fn is_changed_silently(&self, index: usize) -> bool {
        self.silent.as_ref().is_some_and(|silent| silent.disks[index].is_changed)
    }

    /// Marks clean sectors of a recovered cache as unverified, unless the daemon has evidence that
    /// the backing is unchanged.
    pub(super) fn judge_evidence(&mut self, index: usize, number: u32, recovered: &mut Recovered) {
        let Some(silent) = &self.silent else { return };
        let owner = self.disks[index].owner.as_mut().expect("the cache has an owner");
        trace!(
            self,
            "disk {index}: evidence {:?}, opened {}, ring {number} of {}",
            owner.evidence,
            silent.disks[index].opened,
            owner.number()
        );
        let is_unchanged = owner.evidence == Some(silent.disks[index].opened) && number == owner.number();
        if is_unchanged || self.options.sabotage == Some(Sabotage::TrustedUnproven) {
            self.report.recoveries_proved += u64::from(is_unchanged);
            return;
        }
        recovered.distrust_clean();
        if recovered.sectors_unverified() > 0 {
            owner.evidence = None;
            self.report.recoveries_unverified += 1;
        }
    }

    /// Sometimes makes the daemon record the version numbers of its disks' backings as evidence.
    pub(super) fn maybe_record_evidence(&mut self) {
        for index in 0..self.disks.len() {
            let Some(silent) = &mut self.silent else { return };
            let is_early = self.options.sabotage == Some(Sabotage::EvidenceTooEarly);
            if silent.rng.chance(500) || is_early {
                self.record_evidence(index);
            }
        }
    }

    /// Records the backing's version as evidence if the whole cache is verified.
    pub(super) fn record_evidence(&mut self, index: usize) {
        let is_verified = self.is_verified(index);
        let state = &mut self.disks[index];
        let is_served = state.present && state.config.is_some() && state.recovering.is_none();
        let has_evidence = self.silent.as_ref().is_some_and(|silent| silent.disks[index].has_evidence);
        if let Some(owner) = state.owner.as_mut().filter(|_| is_served && has_evidence && is_verified) {
            owner.evidence = Some(state.backing.version());
            let (version, ring) = (owner.evidence, owner.number());
            trace!(self, "disk {index}: evidence {version:?} of ring {ring}");
        }
    }

    fn is_verified(&self, index: usize) -> bool {
        let stats = self.engine.stats(self.now, DiskId(index as u32));
        let is_verified = stats.is_some_and(|stats| stats.sectors_unverified == 0);
        is_verified || self.options.sabotage == Some(Sabotage::EvidenceTooEarly)
    }

    /// Records whether all data in the disk's cache is verified, before the disk is removed.
    pub(super) fn observe_removal(&mut self, index: usize) {
        let is_verified = self.is_verified(index);
        if let Some(silent) = &mut self.silent {
            silent.disks[index].was_verified = is_verified;
        }
    }

    /// Records the backing's version as evidence after a disk was removed and its cache was closed.
    pub(super) fn record_evidence_at_end(&mut self, index: usize) {
        let Some(observed) = self.silent.as_ref().map(|silent| &silent.disks[index]) else { return };
        let state = &mut self.disks[index];
        if let Some(owner) = state.owner.as_mut().filter(|_| observed.has_evidence && observed.was_verified) {
            owner.evidence = Some(state.backing.version());
        }
    }

    /// Returns the checksums of data read from a backing, if the engine needs checksums.
    pub(super) fn backing_sums(&self, index: usize, io: &Io, tags: &[Tag]) -> Vec<u32> {
        if io.op != IoOp::Read || self.engine.wants_sums(io.id).is_none() {
            return vec![];
        }
        let mut tags = tags.to_vec();
        if self.options.sabotage == Some(Sabotage::StaleComparison)
            && let Some(silent) = &self.silent
        {
            let first = (io.offset / UNIT_BYTES) as usize;
            let before = silent.disks[index].before.iter().skip(first);
            tags.iter_mut().zip(before).for_each(|(tag, before)| *tag = *before);
        }
        tags.resize((io.len.next_multiple_of(SECTOR_BYTES) / UNIT_BYTES) as usize, ZERO);
        content::sums(&tags)
    }

    /// Checks that no cached sector is unverified after the whole disk has been read.
    pub(super) fn check_verified(&self, index: usize) -> Result<(), Violation> {
        let stats = self.engine.stats(self.now, DiskId(index as u32));
        let left = stats.map_or(0, |stats| stats.sectors_unverified);
        ensure!(left == 0, "disk {index}: {left} sectors are unverified after the whole disk was read");
        Ok(())
    }
}
