//! Recovers a persistent cache as the daemon does. The recovery reads the journal rings, starting
//! with the highest number, and verifies the sectors of the journal tail. The recovery then
//! compares the backing's identity with the recorded identity, and some clean sectors with the
//! backing. At the end it enables the cache with a new journal ring.
//!
//! The checkers expect that a journal ring on a working device is complete and that a closed
//! journal is found closed. Clean sectors must equal the backing, and a changed backing must be
//! noticed. If every copy of a journal ring is on a device that may corrupt or lose data, the model
//! expects no durability.

use hob_engine::command::{CacheChange, Command, DataSegment, Enable, Mode, Segment};
use hob_engine::journal::{DirtySector, FlashSector, PAGE_BYTES, Recovered, Replay, Ring, Survey};
use hob_engine::units::{DiskId, SECTOR_BYTES};

use super::owner::Owner;
use super::pool::Asked;
use super::{Sabotage, Simulation, trace};
use crate::content::{self, SECTOR_UNITS, Tag, UNIT_BYTES, ZERO, tag};
use crate::media::Flash;
use crate::{Violation, ensure};

/// Maximum number of failed recoveries of one cache. A recovery fails if the new journal ring
/// cannot be allocated or written. If the new ring cannot be written, the daemon releases it and
/// recovers the cache again from the older rings. After one more failure than this number, the disk
/// stays offline until the next restart.
pub(super) const ATTEMPTS_MAX: u32 = 8;

/// Number of clean sectors that are compared with the backing: nearly all sectors of a small cache.
const SAMPLES: usize = 64;

/// Number of compared clean sectors in histories with silent changes: as few as for a large cache.
const SAMPLES_FEW: usize = 2;

/// Result of reading a cache's journal rings.
struct Found {
    recovered: Box<Recovered>,
    segments: Vec<DataSegment>,
    /// Number of the journal ring that was found.
    number: u32,
    /// True if every copy of the journal ring is on an unreliable device.
    doubtful: bool,
}

impl Simulation<'_> {
    /// Recovers the disk's persistent cache. If the disk has none, guests that waited for the
    /// recovery continue. `attempt` is the number of this attempt to recover the cache.
    pub(super) fn recover(&mut self, index: usize, attempt: u32) -> Result<(), Violation> {
        let found = self.read_rings(index)?;
        let lags = self.disks[index].model.lags();
        let Some(Found { mut recovered, segments, number, doubtful }) = found else {
            let existed = self.disks[index].owner.as_ref().is_some_and(|owner| owner.exists);
            let was_early = self.disks[index].recovering.is_some();
            self.expect_no_more(index);
            self.disown(index);
            self.disks[index].model.set_lags(false);
            if was_early {
                return Ok(());
            }
            if lags && existed {
                // The daemon's last resort is to discard the cache's content.
                self.report.discards += 1;
                self.adopt_backing(index)?;
            }
            if self.disks[index].gated {
                // An earlier attempt to recover the cache made guests wait. The disk has no cache
                // any more, so they need not wait.
                self.open_gate(index);
            }
            return self.change_behind_bare(index);
        };
        let owner = self.disks[index].owner.as_mut().expect("the cache has an owner");
        owner.doubled &= owner.rings[&number].len() == 2;
        if !self.keeps_old_rings() {
            // Rings with higher numbers were never complete.
            let owner = self.disks[index].owner.as_mut().expect("the cache has an owner");
            let gone = owner.drop_rings(|other| other > number);
            self.free.extend(gone);
        }
        if let Some(changed) = self.engine.changed_meanwhile(DiskId(index as u32)) {
            // The daemon neither compares nor trusts data near foreign writes.
            recovered.drop_regions(changed);
        }
        let was_lost = self.disks[index].owner.as_ref().is_some_and(|owner| owner.has_recorded_loss(number));
        if was_lost {
            recovered.drop_clean();
        }
        if doubtful {
            self.disks[index].model.forget_all();
            self.distrust_bitmaps(index);
        }
        if !lags && recovered.summary.sectors_dirty > 0 {
            // The daemon knows that the cache was drained and that the backing was written since. A
            // lost journal cannot record this.
            ensure!(
                doubtful || was_lost,
                "disk {index}: {} sectors are dirty after a drain",
                recovered.summary.sectors_dirty
            );
            recovered.discard_dirty();
            self.report.outdated += 1;
        }
        let summary = recovered.summary;
        let state = &self.disks[index];
        let size = state.size * UNIT_BYTES;
        let has_grown = state.units() > u64::from(self.scenario.disks[index].units);
        ensure!(
            summary.disk_bytes == size || has_grown && summary.disk_bytes < size || doubtful,
            "disk {index}: its cache was recovered for a disk of {} bytes",
            summary.disk_bytes
        );
        self.report.recoveries_larger += u64::from(summary.disk_bytes < size);
        recovered.grow(size);
        let is_early = self.disks[index].recovering.is_some();
        if attempt == 0 && !is_early {
            self.change_behind(index, &recovered);
            if !doubtful && self.disks[index].changed_behind.is_none() {
                self.change_silently(index, Some(&recovered));
            }
            self.observe_opening(index);
        }
        // Rings with higher numbers record the backing's present identity.
        let changed = self.disks[index].changed_behind.is_some_and(|highest| number <= highest);
        let identity = self.disks[index].identity();
        self.excuse_lies(index, &recovered, &segments);
        let silently = self.is_changed_silently(index);
        let differing = self.differing_sample(index, &recovered);
        // A daemon would not have admitted guests before the comparison; the simulated guests see
        // dirty data and no other unverified data.
        let differing = differing.filter(|_| !(silently && is_early && summary.sectors_dirty > 0));
        let noticed = summary.identity != identity || differing.is_some();
        // An empty cache has no data that could be older than the backing.
        let is_empty = summary.sectors_valid + summary.sectors_dirty == 0;
        ensure!(
            noticed || !changed || is_empty,
            "disk {index}: its backing changed, and the recovery did not notice it"
        );
        let clean = if summary.identity == identity { differing } else { None };
        let right = changed || !noticed || doubtful || silently;
        ensure!(right, "disk {index}: a recovered clean sector ({clean:?}) is not the backing's");
        if changed {
            // The new identity differs from all recorded ones, so the next recovery also notices
            // the change, even if the new journal ring fails.
            self.disks[index].generation += 1;
        }
        self.disks[index].gives_up = false;
        let is_served_stale = self.options.sabotage == Some(Sabotage::ServedStale);
        if noticed && !is_served_stale {
            recovered.drop_clean();
        }
        let is_discarded =
            self.disks[index].owner.as_ref().is_some_and(|owner| owner.has_recorded_discard(number));
        if (noticed && !is_served_stale || is_discarded) && summary.sectors_dirty > 0 {
            recovered.discard_dirty();
            self.report.discards += 1;
            if !is_early {
                // The discard is complete only with the new journal ring. After a crash before that,
                // the dirty data is back, and the next recovery may compare other sectors.
                self.distrust_bitmaps(index);
                self.forget(index);
                self.disks[index].gives_up = true;
            }
        }
        self.judge_evidence(index, number, &mut recovered);
        self.count_recovery(&recovered);
        self.enable_recovered(index, recovered, segments, number)
    }

    /// Frees journal rings of the cache that are older than ring `number`, because the pool is
    /// full. All flash is flushed first. Ring `number`, from which the cache was recovered, is then
    /// durable, so the older rings are not needed.
    fn give_up_older_rings(&mut self, index: usize, number: u32) {
        if self.keeps_old_rings() {
            return;
        }
        self.flash.iter_mut().for_each(Flash::flush);
        let owner = self.disks[index].owner.as_mut().expect("the cache has an owner");
        let gone = owner.drop_rings(|other| other < number);
        self.free.extend(gone);
    }

    fn count_recovery(&mut self, recovered: &Recovered) {
        let (summary, report) = (&recovered.summary, &mut self.report);
        report.recoveries += 1;
        report.recoveries_dirty += u64::from(summary.sectors_dirty > 0);
        report.recoveries_undone += u64::from(summary.sectors_undone > 0);
        report.recoveries_distrusting += u64::from(summary.sectors_distrusted > 0);
        report.recoveries_clean += u64::from(summary.clean);
    }

    fn enable_recovered(
        &mut self,
        index: usize,
        recovered: Box<Recovered>,
        segments: Vec<DataSegment>,
        number: u32,
    ) -> Result<(), Violation> {
        let owner = self.disks[index].owner.as_mut().expect("the cache has an owner");
        // The recovered ring may have another block size: its command may have completed the ring
        // without reporting success before the crash.
        owner.config.block_bytes = recovered.summary.block_bytes;
        let mut config = owner.config;
        if self.rng.chance(200) {
            let other = self.draw_config();
            (config.mode, config.destage, config.copies) = (other.mode, other.destage, other.copies);
        }
        let ring = self.make_ring(index, &config).or_else(|| {
            self.give_up_older_rings(index, number);
            self.make_ring(index, &config)
        });
        let Some(ring) = ring else {
            // The pool may never have room for the journal ring. The operator discards a cache
            // whose backing has all its data.
            self.disks[index].attempts += 1;
            let is_given_up =
                self.disks[index].attempts > ATTEMPTS_MAX && recovered.summary.sectors_dirty == 0;
            if is_given_up {
                self.disown(index);
            }
            // The engine refuses changes that wait for the recovery.
            self.command(index, Command::RemoveDisk);
            if is_given_up {
                self.open_gate(index);
            }
            return Ok(());
        };
        let state = &mut self.disks[index];
        let owner = state.owner.as_mut().expect("the cache has an owner");
        owner.doubled &= ring.copies.len() == 2 && config.copies == owner.config.copies;
        if config.mode == Mode::WriteBack {
            // In other modes the model's setting does not change: data may still be dirty, and a
            // crash can reveal dirty data that this recovery did not find.
            state.model.set_lags(true);
        }
        let careful = self.scenario.lives.as_ref().is_some_and(|lives| lives.careful);
        let flushes_fail = self.scenario.devices.iter().any(|plan| plan.faults.flush_error > 0);
        let may_fail = self.any_bad() || (self.options.faults || flushes_fail) && !self.options.hasty;
        self.disks[index].gated = self.disks[index].recovering.is_none() && (careful || may_fail);
        let recovered = Some(*recovered);
        let enable = Enable { config, segments, journal: Some(ring), recovered };
        self.command(index, Command::Cache(CacheChange::Enable(Box::new(enable))));
        Ok(())
    }

    /// Handles a recovered cache whose new journal ring could not be written: the daemon releases
    /// that ring, and recovers the cache again from the older rings.
    pub(super) fn recovery_failed(&mut self, asked: &Asked) -> Result<(), Violation> {
        let index = asked.disk;
        let number = asked.ring().expect("a recovered cache has one");
        let owner = self.disks[index].owner.as_mut().expect("recovered");
        let gone = owner.drop_rings(|other| other == number);
        self.free.extend(gone);
        self.disks[index].attempts += 1;
        if self.disks[index].recovering.is_none() && !self.disks[index].gated {
            // A daemon would not have admitted guests yet. Without its dirty data, the disk differs
            // from what guests have read.
            self.disks[index].model.forget_all();
            self.distrust_bitmaps(index);
        }
        if self.disks[index].leaving || self.disks[index].attempts > ATTEMPTS_MAX {
            self.disks[index].attempts = 0;
            if !self.disks[index].leaving {
                self.command(index, Command::RemoveDisk);
            }
            return Ok(());
        }
        self.recover(index, self.disks[index].attempts)
    }

    /// Lets the guests of a disk send requests again after they waited for the recovery of the
    /// disk's cache.
    pub(super) fn open_gate(&mut self, index: usize) {
        self.disks[index].attempts = 0;
        self.disks[index].recovering = None;
        self.disks[index].gated = false;
        for guest in 0..self.scenario.guests.len() {
            if self.scenario.guests[guest].disk == index {
                self.schedule_guest(guest, self.now);
            }
        }
    }

    /// Tells the model which sectors may be lost, because their only copy is on an unreliable
    /// device. An unreliable device may lose sectors of the journal tail although an earlier
    /// recovery read them. The content of sectors without a checksum is then unknown
    /// (docs/decisions/0006), even if another device has a copy, because recovery may choose the
    /// damaged one. The simulation repairs garbage in these sectors.
    fn excuse_lies(&mut self, index: usize, recovered: &Recovered, segments: &[DataSegment]) {
        trace!(self, "disk {index} recovered: {:?}", recovered.summary);
        let model = &self.disks[index].model;
        let is_loose = |sector: u64| {
            let first = sector as usize * SECTOR_UNITS;
            (first..(first + SECTOR_UNITS).min(model.units())).any(|unit| model.is_loose(unit as u32))
        };
        let singles = recovered.dirty().filter(|dirty| dirty.second.is_none());
        // A write that was in flight to two devices may have reached only one of them.
        let loose: Vec<DirtySector> = singles.filter(|dirty| is_loose(dirty.sector)).collect();
        let is_unknown =
            |dirty: &DirtySector| dirty.place.sum.is_none() || recovered.parted().contains(&dirty.sector);
        let unknown: Vec<_> = recovered.dirty().filter(is_unknown).collect();
        let (parted, undone) = (recovered.summary.sectors_parted > 0, recovered.summary.sectors_undone > 0);
        let unproven = parted || !unknown.is_empty();
        if let Some(owner) = self.disks[index].owner.as_mut().filter(|_| unproven || !loose.is_empty()) {
            // From now on only one copy of these sectors is certainly valid.
            owner.doubled = false;
        }
        if !self.may_lose(index) {
            return;
        }
        if undone || unproven {
            self.disks[index].model.forget_all();
            self.distrust_bitmaps(index);
        }
        for dirty in loose.into_iter().filter(|_| parted).chain(unknown) {
            for place in [Some(dirty.place), dirty.second].into_iter().flatten() {
                self.put_right(index, dirty.sector, place, segments);
            }
        }
    }

    /// Replaces unknown content of a sector without a checksum by the backing's content. The
    /// replacement must precede the first read of the sector, because the read makes the sector's
    /// checksum known.
    fn put_right(&mut self, index: usize, sector: u64, place: FlashSector, segments: &[DataSegment]) {
        let segment = segments[place.segment as usize].place;
        let offset = segment.offset + place.sector * SECTOR_BYTES;
        let (disk, flash) = (&self.disks[index], &mut self.flash[usize::from(segment.device.0)]);
        let Some(found) = flash.inspect(offset, SECTOR_BYTES) else { return };
        let first = sector as usize * SECTOR_UNITS;
        let units = (first..).zip(found).map(|(unit, tag)| {
            let may_be = unit >= disk.model.units() || disk.model.may_hold(*tag, unit as u32);
            if may_be { *tag } else { disk.backing.now()[unit] }
        });
        let units: Vec<Tag> = units.collect();
        flash.put_right(offset, &units);
    }

    /// Reads the cache's journal rings, the highest number first, until one is complete.
    fn read_rings(&mut self, index: usize) -> Result<Option<Found>, Violation> {
        let owner = self.disks[index].owner.as_ref().expect("persistent");
        let (cache, exists, journal_lost) = (owner.cache, owner.exists, owner.journal_lost);
        let mut rings: Vec<(u32, Vec<Vec<Segment>>)> =
            owner.rings.iter().rev().map(|(number, copies)| (*number, copies.clone())).collect();
        if self.options.sabotage == Some(Sabotage::IgnoredNewestRing) && rings.len() > 1 {
            rings.remove(0);
        }
        let mut sound = false;
        let mut doubtful = false;
        for (number, copies) in rings.iter().filter(|_| !journal_lost) {
            let owner = self.disks[index].owner.as_ref().expect("persistent");
            let is_good = self.is_on_sound_device(copies) && !owner.is_doubtful(*number);
            // If any journal ring is complete, the ring with the lowest number is complete.
            sound = is_good;
            doubtful |= !is_good;
            match self.survey(cache, *number, copies) {
                Ring::Unfinished => {}
                Ring::Damaged { missing } => {
                    ensure!(!is_good, "disk {index}: page {missing} of ring {number} is missing");
                    return Ok(None);
                }
                Ring::Whole(mut plan) => {
                    self.continue_with_log(index, &mut plan);
                    self.check_crash_log(index, &plan)?;
                    return self.replay(index, plan, (*number, copies), doubtful);
                }
            }
        }
        ensure!(!exists || !sound || journal_lost, "disk {index}: no ring is whole, of {rings:?}");
        Ok(None)
    }

    /// Reads a journal ring for the first time, to find the regions that may have dirty data.
    pub(super) fn survey(&mut self, cache: [u8; 16], number: u32, copies: &[Vec<Segment>]) -> Ring {
        let pages = copies.iter().map(Vec::len).max().unwrap_or(0) as u64 * self.pages_in_segment();
        // Two surveys share the pages, as in the storage crate.
        let new = || Survey::new(cache, number, copies.len(), pages);
        let [mut one, mut other] = [new(), new()];
        for (i, (copy, page, bytes)) in self.ring_pages(copies, pages).iter().enumerate() {
            let survey = if i % 2 == 0 { &mut one } else { &mut other };
            survey.page(*copy, *page, bytes);
        }
        one.merge(other);
        one.finish()
    }

    fn is_on_sound_device(&self, copies: &[Vec<Segment>]) -> bool {
        let is_good = |segment: &Segment| !self.scenario.devices[usize::from(segment.device.0)].is_bad();
        copies.iter().any(|copy| !copy.is_empty() && copy.iter().all(is_good))
    }

    fn pages_in_segment(&self) -> u64 {
        self.scenario.segment_bytes / PAGE_BYTES as u64
    }

    /// Returns the readable pages of a journal ring in any order.
    fn ring_pages(&mut self, copies: &[Vec<Segment>], pages: u64) -> Vec<(usize, u64, Vec<u8>)> {
        let mut shown = vec![];
        for (copy, segments) in copies.iter().enumerate() {
            for page in 0..pages {
                if let Some(bytes) = self.ring_page(segments, page) {
                    shown.push((copy, page, bytes));
                }
            }
        }
        for last in (1..shown.len()).rev() {
            shown.swap(last, self.rng.below(last as u64 + 1) as usize);
        }
        shown
    }

    fn ring_page(&self, segments: &[Segment], page: u64) -> Option<Vec<u8>> {
        let in_segment = self.pages_in_segment();
        let segment = segments.get((page / in_segment) as usize)?;
        let offset = segment.offset + page % in_segment * PAGE_BYTES as u64;
        let tags = self.flash[usize::from(segment.device.0)].inspect(offset, PAGE_BYTES as u64)?;
        let mut bytes = self.written.bytes(tags);
        if self.options.sabotage == Some(Sabotage::ReorderedRecords) {
            super::journal_defects::reorder_records(&mut bytes);
        }
        if self.options.sabotage == Some(Sabotage::IgnoredOverwrites) {
            super::journal_defects::misplace_overwrites(&mut bytes);
        }
        if self.options.sabotage == Some(Sabotage::ForgottenUnits) {
            super::journal_defects::forget_units(&mut bytes);
        }
        Some(bytes)
    }

    fn replay(
        &mut self,
        index: usize,
        plan: hob_engine::journal::Plan,
        (number, copies): (u32, &[Vec<Segment>]),
        doubtful: bool,
    ) -> Result<Option<Found>, Violation> {
        let (segments, missing) = self.segments_there(index);
        if segments.is_empty() {
            ensure!(self.any_bad(), "disk {index}: a cache without segments");
            return Ok(None);
        }
        let owner = self.disks[index].owner.as_ref().expect("persistent");
        let doubtful = doubtful || missing && !owner.doubled;
        // A journal ring that a command created after the close may be complete already.
        let closed = owner.closed && !owner.left_unclean && number <= owner.closed_at;
        ensure!(plan.clean || !closed || doubtful, "disk {index}: its journal was closed, and found open");
        let present: Vec<_> =
            segments.iter().map(|segment| (segment.ordinal, segment.place.device)).collect();
        let reads: Vec<(usize, u64)> = plan.reads().collect();
        let fail = |error: &dyn std::fmt::Debug| Violation(format!("disk {index}: replay failed: {error:?}"));
        let segment_bytes = self.scenario.segment_bytes;
        let mut replay = Replay::new(plan, segment_bytes, &present).map_err(|error| fail(&error))?;
        for (copy, page) in reads {
            let bytes = self.ring_page(&copies[copy], page).ok_or_else(|| fail(&"unreadable now"))?;
            replay.page(&bytes).map_err(|error| fail(&error))?;
        }
        let sums: Vec<Option<u32>> = replay
            .to_prove()
            .into_iter()
            .map(|(segment, sector)| self.flash_sum(&segments[segment as usize].place, sector))
            .collect();
        let recovered = Box::new(replay.finish(&sums));
        Ok(Some(Found { recovered, segments, number, doubtful }))
    }

    /// Returns the cache's data segments on devices that are present, and true if segments on other
    /// devices are missing. The cache loses missing segments. Segments that a command in progress
    /// adds are left out.
    fn segments_there(&mut self, index: usize) -> (Vec<DataSegment>, bool) {
        let asked = self.asked.values().filter(|asked| asked.disk == index);
        let brought: Vec<Segment> = asked.flat_map(Asked::segments).collect();
        let owner = self.disks[index].owner.as_mut().expect("persistent");
        let (flash, free) = (&self.flash, &mut self.free);
        let before = owner.data.len();
        owner.data.retain(|_, place| {
            if brought.contains(place) {
                return true;
            }
            let is_there = !flash[usize::from(place.device.0)].is_dead();
            if !is_there {
                free.insert(*place);
            }
            is_there
        });
        let missing = owner.data.len() < before;
        let its = owner.data.iter().filter(|(_, place)| !brought.contains(place));
        let mut there: Vec<DataSegment> = its
            .map(|(ordinal, place)| DataSegment { place: *place, ordinal: *ordinal, seconds_only: false })
            .collect();
        for segment in &mut there {
            segment.seconds_only = self.takes_seconds_only(segment.place.device);
        }
        for last in (1..there.len()).rev() {
            there.swap(last, self.rng.below(last as u64 + 1) as usize);
        }
        (there, missing)
    }

    /// Returns the checksum of a sector on flash; `None` if the sector is unreadable.
    fn flash_sum(&self, segment: &Segment, sector: u64) -> Option<u32> {
        let flash = &self.flash[usize::from(segment.device.0)];
        let offset = segment.offset + sector * SECTOR_BYTES;
        let held = flash.inspect(offset, SECTOR_BYTES)?;
        if self.options.sabotage == Some(Sabotage::UncheckedTail) {
            return Some(content::sums(flash.intended(offset, SECTOR_BYTES))[0]);
        }
        Some(content::sums(held)[0])
    }

    /// Returns a sampled clean sector of the cache that differs from the backing, if any.
    fn differing_sample(&self, index: usize, recovered: &Recovered) -> Option<u64> {
        let backing = &self.disks[index].backing.now()[..self.disks[index].size as usize];
        let samples = match self.options.sabotage {
            // Simulates a cache that is so large that the sample contains none of these sectors.
            Some(Sabotage::EvidenceTooEarly) if self.disks[index].changed_behind.is_none() => 0,
            _ if self.silent.is_some() => SAMPLES_FEW,
            _ => SAMPLES,
        };
        let differing = recovered.samples(samples).into_iter().find(|&(sector, sum)| {
            let first = sector as usize * SECTOR_UNITS;
            let mut tags: Vec<Tag> = backing[first..].iter().take(SECTOR_UNITS).copied().collect();
            tags.resize(SECTOR_UNITS, ZERO);
            content::sums(&tags)[0] != sum
        });
        differing.map(|(sector, _)| sector)
    }

    /// Sets the expected content of the disk to the content of its backing.
    fn adopt_backing(&mut self, index: usize) -> Result<(), Violation> {
        self.distrust_bitmaps(index);
        let disk = &mut self.disks[index];
        disk.model.adopt(disk.backing.now(), disk.backing.durable())
    }

    /// Sometimes changes the backing while no daemon serves it. If only a part of the backing
    /// changes, its identity changes too. If all data changes, a comparison of sampled clean
    /// sectors finds the change.
    fn change_behind(&mut self, index: usize, recovered: &Recovered) {
        let behind = self.scenario.lives.as_ref().map_or(0, |lives| lives.behind);
        if !self.rng.chance(behind) {
            return;
        }
        if self.rng.chance(500) && !recovered.samples(1).is_empty() {
            self.write_while_down(index, 0, self.disks[index].units() as u32);
        } else {
            return self.write_some_behind(index);
        }
        let disk = &mut self.disks[index];
        disk.changed_behind = disk.owner.as_ref().map(Owner::number);
    }

    /// Changes a part of the backing, and also its identity.
    pub(super) fn write_some_behind(&mut self, index: usize) {
        self.disks[index].generation += 1;
        self.write_some_while_down(index);
        let disk = &mut self.disks[index];
        disk.changed_behind = disk.owner.as_ref().map(Owner::number);
    }

    /// Sometimes changes the backing of a disk without a cache. The daemon need not notice this
    /// change.
    pub(super) fn change_behind_bare(&mut self, index: usize) -> Result<(), Violation> {
        let behind = self.scenario.lives.as_ref().map_or(0, |lives| lives.behind);
        if self.rng.chance(behind) {
            self.disks[index].generation += 1;
            self.write_some_while_down(index);
        }
        Ok(())
    }

    fn write_some_while_down(&mut self, index: usize) {
        let units = self.disks[index].units();
        let first = self.rng.below(units);
        let count = self.rng.between(1, (units - first).min(64));
        self.write_while_down(index, first as u32, count as u32);
    }

    pub(super) fn write_while_down(&mut self, index: usize, first: u32, count: u32) {
        self.distrust_bitmaps(index);
        let disk = &mut self.disks[index];
        let serial = disk.model.changed_behind(first, count);
        let tags: Vec<Tag> = (first..first + count).map(|unit| tag(serial, index as u8, unit)).collect();
        disk.backing.replace(first as usize, &tags);
        self.report.changed_behind += 1;
    }
}
