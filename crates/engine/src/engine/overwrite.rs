//! Overwrites of dirty data in place (docs/decisions/0066).
//!
//! While the durable journal has the checksum of a dirty sector, that sector must not be
//! overwritten. So a commit first records the sector as *unproven* (checksum unknown). The rest of
//! that commit's last journal page records nearby dirty sectors as unproven too, because they are
//! likely to be overwritten next. Overwrites of these sectors then need no commit. A commit makes
//! all pending records durable.
//!
//! | the sector on flash | its overwrite |
//! |---|---|
//! | no journal record, durable or pending, says that the sector is dirty | starts immediately |
//! | a durable record says that its checksum is unknown | starts immediately |
//! | a pending record says that its checksum is unknown | waits until that record is durable |
//! | a durable record has its checksum | waits until an *unproven* record is durable |
//! | a pending record has its checksum | waits until that record is durable, then as in the previous row |
//!
//! When a sector was not overwritten for [`QUIET_NS`], its checksum is recorded again.

use std::collections::BTreeSet;

use super::Engine;
use super::records::Journal;
use crate::command::Copies;
use crate::index::Index;
use crate::journal::Change;
use crate::units::{DiskId, Instant, SECTOR_BYTES};

/// Minimum time without an overwrite after which a sector's checksum is recorded, nanoseconds. The
/// checksum is recorded at most twice this time after the last overwrite.
const QUIET_NS: u64 = 10_000_000_000;

/// Maximum number of checksums that are recorded in one step for sectors that are not overwritten
/// any more. [`PAUSE_NS`] is the pause between two such steps, nanoseconds.
const PROVED_MAX: usize = 216;
const PAUSE_NS: u64 = 10_000_000;

/// Maximum number of unproven sectors of a cache for which the time of the last overwrite is kept.
/// Additional sectors stay unproven until they are destaged or scrubbed.
const KNOWN_MAX: usize = 1 << 16;

/// Range of the disk around an overwrite in which dirty sectors are recorded as *unproven*
/// (checksum unknown) too: number of sectors after the overwrite, and before it.
const AFTER: u64 = 256;
const BEFORE: u64 = 64;

/// The unproven sectors of one cache: those with an *unproven* record, or without any recorded
/// checksum.
#[derive(Default)]
pub(super) struct Overwrites {
    /// Sectors whose *unproven* record no commit includes yet.
    pending: BTreeSet<u64>,
    /// Sectors that were overwritten in place, and whose new checksum is known but not recorded.
    rewritten: BTreeSet<u64>,
    /// `recent` has the sectors that became unproven or were overwritten since the last `turn`.
    /// `quiet` has the sectors whose last overwrite was before that `turn`. Sectors that are being
    /// overwritten are in neither set.
    recent: BTreeSet<u64>,
    quiet: BTreeSet<u64>,
    /// Time at which the checksums of the `quiet` sectors are recorded, and the `recent` ones
    /// become quiet.
    turn: Option<Instant>,
}

impl Overwrites {
    /// Records the start of an overwrite of a sector whose checksum is unknown.
    pub(super) fn begin(&mut self, sector: u64) {
        self.rewritten.remove(&sector);
        self.recent.remove(&sector);
        self.quiet.remove(&sector);
    }

    /// Records the end of an overwrite of a sector whose checksum is unknown.
    pub(super) fn end(&mut self, now: Instant, sector: u64) {
        self.rewritten.insert(sector);
        self.note(now, sector);
    }

    fn note(&mut self, now: Instant, sector: u64) {
        if self.has_room() {
            self.recent.insert(sector);
            self.turn.get_or_insert(now + QUIET_NS);
        }
    }

    fn has_room(&self) -> bool {
        self.recent.len() + self.quiet.len() < KNOWN_MAX
    }

    /// Returns the sectors whose *unproven* records the next commit makes durable.
    pub(super) fn take_pending(&mut self) -> BTreeSet<u64> {
        std::mem::take(&mut self.pending)
    }

    /// Returns the time at which checksums of quiet sectors are recorded.
    pub(super) fn turn(&self) -> Option<Instant> {
        self.turn
    }
}

impl Journal {
    /// Returns true if a write may overwrite this sector with new data of the same block now.
    pub(super) fn may_overwrite(&self, index: &Index, sector: u64) -> bool {
        let in_round = self.round.as_ref().is_some_and(|round| round.unproven.contains(&sector));
        index.may_overwrite(sector) && !in_round && !self.overwrites.pending.contains(&sector)
    }

    /// Returns true if the durable journal has the checksum of this dirty sector.
    fn has_durable_sum(&self, index: &Index, sector: u64) -> bool {
        index.is_dirty(sector) && !index.is_unproven(sector) && self.is_committed(index, sector)
    }

    /// Returns the number of copies of a dirty sector, or 0 if the durable journal does not have
    /// the checksums of all copies.
    fn copies_with_durable_sums(&self, index: &Index, first: u64) -> u8 {
        let second = index.second_sector(first).filter(|second| index.is_held(*second));
        match second {
            _ if !self.has_durable_sum(index, first) => 0,
            None => 1,
            Some(second) => {
                if self.has_durable_sum(index, second) {
                    2
                } else {
                    0
                }
            }
        }
    }

    /// Records that the checksums of these dirty sectors of one frame are unknown. From now on
    /// dumps also record them as unknown. The sectors are overwritten only after the record is
    /// durable.
    fn record_unproven(&mut self, now: Instant, index: &mut Index, sectors: std::ops::Range<u64>) {
        let (frame, block, first) = index.locate(sectors.start);
        let count = (sectors.end - sectors.start) as u16;
        self.overwrites.pending.extend(sectors.clone());
        sectors.for_each(|sector| index.set_unproven(sector, true));
        self.record(now, Change::Unproven { frame, block, first, count, after_set: false }, None);
    }

    /// Records the newest checksums of the sectors in `rewritten`. Call this function before each
    /// commit, also if the commit has no other records to write. If two copies differ after a
    /// crash, only the copy with this checksum is correct. The sectors stay unproven, so the next
    /// overwrite needs no commit.
    ///
    /// If this host fails, only the copy on the peer is left, and recovery cannot compare it with
    /// another copy. So sectors of a cache with copies on a peer do not stay unproven.
    pub(super) fn record_rewritten(&mut self, now: Instant, index: &mut Index, copies: Copies) {
        if copies == Copies::One {
            return;
        }
        let proves = copies == Copies::Peer;
        let rewritten = std::mem::take(&mut self.overwrites.rewritten);
        let is_first =
            |sector: &u64| index.of_second(*sector).is_none_or(|first| !rewritten.contains(&first));
        // The records of a sector's two copies must be next to each other, see `Writer`.
        let firsts: Vec<u64> = rewritten.iter().copied().filter(is_first).collect();
        for first in firsts {
            let second = index.second_sector(first).filter(|second| rewritten.contains(second));
            let is_known = |sector: &u64| {
                index.is_dirty(*sector) && index.is_unproven(*sector) && !index.is_sum_unknown(*sector)
            };
            let copies: Vec<u64> = [Some(first), second].into_iter().flatten().filter(is_known).collect();
            copies.iter().for_each(|sector| self.record_dirty(now, index, *sector));
            for sector in copies {
                if proves {
                    index.set_unproven(sector, false);
                    continue;
                }
                let (frame, block, first) = index.locate(sector);
                self.record(now, Change::Unproven { frame, block, first, count: 1, after_set: true }, None);
            }
        }
    }

    /// Records the checksums of some sectors that were not overwritten for some time.
    pub(super) fn prove_quiet(&mut self, now: Instant, index: &mut Index) {
        if self.overwrites.turn.is_none_or(|turn| turn > now) {
            return;
        }
        let mut left = PROVED_MAX;
        while left > 0
            && let Some(sector) = self.overwrites.quiet.pop_first()
        {
            let first = index.of_second(sector).unwrap_or(sector);
            let copies = [Some(first), index.second_sector(first)];
            let unproven = |at: &u64| index.is_dirty(*at) && index.is_unproven(*at);
            let copies: Vec<u64> = copies.into_iter().flatten().filter(unproven).collect();
            // The records of a sector's two copies must be next to each other, see `Writer`.
            let is_quiet = |at: &u64| *at == sector || self.overwrites.quiet.contains(at);
            if copies.iter().all(|at| is_quiet(at) && !index.is_sum_unknown(*at)) {
                for at in copies {
                    self.overwrites.quiet.remove(&at);
                    self.overwrites.rewritten.remove(&at);
                    self.prove_sector(now, index, at);
                    left = left.saturating_sub(1);
                }
            }
        }
        let Overwrites { recent, quiet, turn, .. } = &mut self.overwrites;
        if quiet.is_empty() {
            std::mem::swap(recent, quiet);
            *turn = (!quiet.is_empty()).then(|| now + QUIET_NS);
        } else {
            *turn = Some(now + PAUSE_NS);
        }
    }
}

impl Engine {
    /// Returns true if the durable journal describes data that `runs` overwrites. In that case,
    /// this function also adds the journal records that recovery needs.
    pub(super) fn must_commit_first(&mut self, now: Instant, slot: u32) -> bool {
        let range = self.requests[slot].range;
        let runs = std::mem::take(&mut self.runs);
        let (journal, index) =
            self.disk_mut(range.disk).journal_and_index().expect("the cache is persistent");
        let (mut must, mut records) = (false, false);
        for extent in runs.iter().map(|run| run.extent) {
            for sector in extent.sector..extent.sector + extent.count {
                must |= !journal.may_overwrite(index, sector);
                // The *set* record of a sector must be durable before an *unproven* record follows.
                if !index.may_overwrite(sector) && journal.has_durable_sum(index, sector) {
                    journal.record_unproven(now, index, sector..sector + 1);
                    records = true;
                }
            }
        }
        self.runs = runs;
        if records {
            self.record_neighbours(now, range.disk, range.first, range.end);
        }
        must
    }

    /// Records that the checksums of dirty sectors near the disk sectors `first..end` are unknown.
    /// Records at most as many sectors as the last page of the next commit has room for.
    fn record_neighbours(&mut self, now: Instant, id: DiskId, first: u64, end: u64) {
        let disk = self.disk_mut(id);
        let sectors = disk.config.size_bytes / SECTOR_BYTES;
        let (Some(cache), Some(journal)) = (&mut disk.cache, &mut disk.journal) else { return };
        if cache.config.copies == Copies::Peer {
            return;
        }
        let after = cache.spans(end, (end + AFTER).min(sectors));
        for span in after.chain(cache.spans(first.saturating_sub(BEFORE), first)) {
            let Some(start) = cache.find(span) else { continue };
            let index = &mut cache.index;
            let mut at = start;
            while at < start + span.count {
                if journal.writer.room_in_page() <= 2 || !journal.overwrites.has_room() {
                    return;
                }
                // Content that flash could not deliver keeps its checksum.
                let copies = |at: &u64| {
                    if disk.lost.contains(at) { 0 } else { journal.copies_with_durable_sums(index, *at) }
                };
                let count = copies(&at);
                let run = (at..start + span.count).take_while(|at| copies(at) == count).count() as u64;
                let second = index.second_sector(at).filter(|_| count == 2);
                for copy in [Some(at).filter(|_| count > 0), second].into_iter().flatten() {
                    journal.record_unproven(now, index, copy..copy + run);
                    (copy..copy + run).for_each(|at| journal.overwrites.note(now, at));
                }
                at += run;
            }
        }
    }
}
