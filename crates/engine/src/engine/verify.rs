//! Comparison of a recovered cache with its backing, if there is no evidence that the backing is
//! unchanged (docs/decisions/0033-unverified-blocks.md).
//!
//! Guests' reads of unverified sectors use the backing, and hob compares the data from the backing
//! with the cache's checksums. In the background, a job reads the other unverified sectors from the
//! backing, one range at a time for each disk: first near requests of guests, then in the order of
//! the frames. The job locks its range like a read that fills, so the job, changes and the destager
//! wait for each other. If most of the compared sectors differ, the remaining sectors are dropped
//! without a comparison, because it is cheaper to fill them again on reads.

use std::collections::VecDeque;

use super::jobs::{Job, JobKind, Step};
use super::records::Journal;
use super::{Engine, Owner};
use crate::cache::Cache;
use crate::command::Role;
use crate::io::{BufferSlice, IoError, IoOp, Target};
use crate::range_locks::Range;
use crate::units::{DiskId, Instant, IoId, SECTOR_BYTES};

/// Maximum number of sectors in one verification read.
const PIECE_SECTORS: u64 = 256;

/// Maximum number of verified sectors that one read covers between two unverified sectors.
const GAP_SECTORS: u64 = 16;

/// Maximum number of positions near guests' requests that are queued for verification.
const WANTED_MAX: usize = 64;

/// Time until the next attempt if no buffer or job slot is free, nanoseconds.
const BUSY_NS: u64 = 10_000_000;

/// Time until the next attempt for a disk that is being changed or moved, nanoseconds.
const UNSETTLED_NS: u64 = 100_000_000;

/// Time until the next attempt after an error of the backing, nanoseconds.
const ERROR_NS: u64 = 1_000_000_000;

/// Minimum number of compared sectors before the rest is dropped because most compared sectors
/// differ: the larger of this number and one eighth of all sectors ([`COMPARED_PART`]). Sectors
/// near guests' reads may differ more often than others.
const COMPARED_MIN: u64 = 16;
const COMPARED_PART: u64 = 8;

/// Maximum number of sectors that are dropped at once without a comparison, and the pause between
/// two such steps. The journal has a record for each dropped sector.
const DROPPED_MAX: usize = 1024;
const DROP_NS: u64 = 10_000_000;

/// Factor by which verification slows down while guests wait for the backing.
const YIELD_TIMES: u64 = 4;

/// Progress of the verification of one cache.
#[derive(Debug, Default)]
pub(super) struct Verify {
    /// Cache sector at which the search for the next unverified sector starts.
    cursor: u64,
    /// First disk sectors of ranges near guests' reads, to be verified next.
    wanted: VecDeque<u64>,
    /// Earliest time of the next verification read; `None` means immediately.
    due: Option<Instant>,
    is_busy: bool,
    /// Number of unverified sectors when the verification began.
    total: u64,
    /// Number of compared sectors since the recovery, and how many of them differed.
    compared: u64,
    differing: u64,
    /// True if stale sectors were dropped, and the journal records of these drops may not be
    /// durable.
    has_dropped: bool,
}

impl Verify {
    pub(super) fn deadline(&self) -> Option<Instant> {
        if self.is_busy { None } else { self.due }
    }

    /// Returns the number of unverified sectors when the verification began. `left` is the number
    /// of sectors that are unverified now.
    pub(super) fn total(&self, left: u64) -> u64 {
        if left == 0 { 0 } else { self.total.max(left) }
    }

    /// Returns true if a crash may restore a stale sector that was dropped. Until that is
    /// impossible, the cache is not reported as verified.
    pub(super) fn may_come_back(&self, journal: &Journal) -> bool {
        self.has_dropped && !journal.is_all_durable()
    }

    /// Returns true if most of the compared sectors differ, so that the remaining unverified
    /// sectors should be dropped.
    fn is_in_vain(&self) -> bool {
        let is_enough = self.compared >= COMPARED_MIN && self.compared >= self.total / COMPARED_PART;
        is_enough && 2 * self.differing > self.compared
    }

    /// Returns the next disk sectors to read. The range begins and ends with an unverified sector,
    /// and may contain short runs of verified ones.
    fn next_piece(&mut self, cache: &Cache) -> Option<(u64, u64)> {
        while let Some(first) = self.wanted.pop_front() {
            if let Some(piece) = piece(cache, first, first + PIECE_SECTORS) {
                return Some(piece);
            }
        }
        let index = &cache.index;
        let sector = index.next_unverified(self.cursor).or_else(|| index.next_unverified(0))?;
        self.cursor = sector + 1;
        let (_, block, inside) = index.locate(sector);
        let first = (u64::from(block.0) << cache.block_shift()) + u64::from(inside);
        piece(cache, first, (first / PIECE_SECTORS + 1) * PIECE_SECTORS)
    }
}

/// Returns the first unverified disk sectors in `first..end` that one read can cover.
fn piece(cache: &Cache, first: u64, end: u64) -> Option<(u64, u64)> {
    let mut found: Option<(u64, u64)> = None;
    for span in cache.spans(first, end) {
        let Some(sector) = cache.find(span) else { continue };
        let start = (u64::from(span.block.0) << cache.block_shift()) + span.first;
        for at in (0..span.count).filter(|i| cache.index.is_unverified(sector + i)).map(|i| start + i) {
            match &mut found {
                None => found = Some((at, at + 1)),
                Some((_, end)) if at - *end <= GAP_SECTORS => *end = at + 1,
                Some(_) => return found,
            }
        }
    }
    found
}

impl Engine {
    /// Returns the buffer of a completed backing read, if `handle_completion` needs the checksums
    /// of its sectors.
    pub fn wants_sums(&self, id: IoId) -> Option<BufferSlice> {
        let io = &self.ios[id.0];
        let cache = self.disk(io.disk).cache.as_ref()?;
        let is_read = !io.is_write && matches!(io.target, Target::Backing(_));
        let slice = io.slice.filter(|_| is_read && cache.index.unverified_sectors() > 0)?;
        // The part of the last sector beyond the end of the disk reads as zeroes.
        Some(BufferSlice { len: slice.len.next_multiple_of(SECTOR_BYTES as u32), ..slice })
    }

    /// Queues the sectors near a guest's read of unverified data for verification.
    pub(super) fn verify_soon(&mut self, disk: DiskId, sector: u64) {
        let first = sector / PIECE_SECTORS * PIECE_SECTORS;
        let wanted = &mut self.disk_mut(disk).verify.wanted;
        if wanted.len() < WANTED_MAX && !wanted.contains(&first) {
            wanted.push_back(first);
        }
    }

    /// Starts the comparison of the next unverified range, if it is due.
    pub(super) fn pump_verify(&mut self, now: Instant, id: DiskId) {
        let rate = self.limits.verify_bytes_per_s;
        let has_buffer = self.has_buffer_to_spare();
        let disk = self.disk_mut(id);
        let (Some(cache), Some(journal), verify) = (&disk.cache, &disk.journal, &mut disk.verify) else {
            return;
        };
        let left = cache.index.unverified_sectors();
        if left == 0 {
            if !verify.is_busy {
                *verify = Verify { has_dropped: verify.may_come_back(journal), ..Verify::default() };
            }
            return;
        }
        verify.total = verify.total.max(left);
        let is_settled = !disk.holds && !journal.dead && disk.recovering.is_none() && disk.removing.is_none();
        if rate == 0 || verify.is_busy {
            return;
        }
        if !is_settled || disk.ownership.role != Role::Here {
            verify.due = Some(now + UNSETTLED_NS);
            return;
        }
        if *verify.due.get_or_insert(now) > now {
            return;
        }
        if verify.is_in_vain() {
            verify.due = Some(now + DROP_NS);
            return self.drop_unverified(now, id);
        }
        let Some((first, end)) = verify.next_piece(cache).filter(|_| has_buffer) else {
            verify.due = Some(now + BUSY_NS);
            return;
        };
        let sectors = disk.config.size_bytes.div_ceil(SECTOR_BYTES);
        let range = Range { disk: id, first, end: end.min(sectors) };
        let slow = if disk.backing_in_flight > 0 { YIELD_TIMES } else { 1 };
        let takes = (range.end - range.first) * SECTOR_BYTES * 1_000_000_000 / rate * slow;
        (verify.is_busy, verify.due) = (true, Some(now + takes.max(1)));
        if !self.transfer(now, JobKind::Verify, range) {
            let verify = &mut self.disk_mut(id).verify;
            (verify.is_busy, verify.due) = (false, Some(now + BUSY_NS));
        }
    }

    /// Drops some unverified sectors that are not in use.
    fn drop_unverified(&mut self, now: Instant, id: DiskId) {
        let Engine { disks, range_locks, .. } = self;
        let disk = disks[id.0 as usize].as_mut().expect("looked at");
        let (Some(cache), Some(journal), verify) = (&mut disk.cache, &mut disk.journal, &mut disk.verify)
        else {
            return;
        };
        for _ in 0..DROPPED_MAX {
            let next = cache.index.next_unverified(verify.cursor);
            let Some(sector) = next else {
                verify.cursor = 0;
                break;
            };
            verify.cursor = sector + 1;
            let (_, block, inside) = cache.index.locate(sector);
            let first = (u64::from(block.0) << cache.block_shift()) + u64::from(inside);
            if !range_locks.is_busy(&Range { disk: id, first, end: first + 1 }) {
                journal.drop_sector(now, &mut cache.index, sector);
                verify.has_dropped = true;
            }
        }
        self.wake(id);
    }

    /// Makes the verification continue as if enough sectors were compared and most of them
    /// differed.
    #[cfg(test)]
    pub(super) fn presume_stale(&mut self, id: DiskId) {
        let verify = &mut self.disk_mut(id).verify;
        (verify.compared, verify.differing) = (COMPARED_MIN, COMPARED_MIN);
    }

    /// Starts a verification job that has received its range lock and its buffer: reads the
    /// backing.
    pub(super) fn start_verify(&mut self, now: Instant, job: u32) {
        let Job { disk: id, range, buffer, .. } = self.jobs[job];
        let mut buffer = buffer.expect("a transfer has a buffer");
        self.destage_buffers.shorten(&mut buffer, (range.end - range.first) * SECTOR_BYTES);
        let doubts = self.disk(id).backed.doubts;
        let it = &mut self.jobs[job];
        (it.buffer, it.step, it.doubts) = (Some(buffer), Step::VerifyRead, doubts);
        let disk = self.disk_mut(id);
        disk.jobs += 1;
        let offset = range.first * SECTOR_BYTES;
        let len = (range.end * SECTOR_BYTES).min(disk.config.size_bytes) - offset;
        let slice = Some(BufferSlice { id: buffer.id, offset: buffer.offset, len: len as u32 });
        self.issue(now, Owner::Job(job), id, Target::Backing(id), IoOp::Read, (offset, len), slice, 0);
    }

    pub(super) fn verify_read_done(
        &mut self,
        now: Instant,
        job: u32,
        result: Result<(), IoError>,
        sums: &[u32],
    ) {
        let Job { disk, range, doubts, .. } = self.jobs[job];
        // The backing may have lost the data that it returned.
        if result.is_ok() && doubts == self.disk(disk).backed.doubts {
            self.compare_with_backing(now, range, sums);
        }
        self.end_job(now, job, result);
    }

    /// Handles the end of a verification job.
    pub(super) fn verify_done(&mut self, now: Instant, job: u32, id: DiskId, result: Result<(), IoError>) {
        let runnable = &mut self.runnable;
        self.range_locks.leave(self.limits.requests_max + job, |granted| runnable.push_back(granted));
        let verify = &mut self.disk_mut(id).verify;
        verify.is_busy = false;
        if result.is_err() {
            verify.due = Some(now + ERROR_NS);
        }
        self.wake(id);
    }

    /// Compares unverified sectors of a range with checksums of the backing's data. Equal sectors
    /// become verified, and others are dropped. The range is locked, so the backing's data has not
    /// changed since the read.
    pub(super) fn compare_with_backing(&mut self, now: Instant, range: Range, sums: &[u32]) {
        let disk = self.disk_mut(range.disk);
        let (Some(cache), Some(journal)) = (&mut disk.cache, &mut disk.journal) else { return };
        if cache.index.unverified_sectors() == 0 || sums.is_empty() {
            return;
        }
        let mut sums = sums.iter();
        for span in cache.spans(range.first, range.end) {
            let sums = sums.by_ref().take(span.count as usize);
            let Some(first) = cache.find(span) else {
                sums.for_each(drop);
                continue;
            };
            for (sector, sum) in (first..).zip(sums) {
                if !cache.index.is_unverified(sector) {
                    continue;
                }
                disk.verify.compared += 1;
                if cache.index.is_known_as(sector, *sum) {
                    cache.index.set_verified(sector, 1);
                    disk.stats.sectors_verified += 1;
                } else {
                    journal.drop_sector(now, &mut cache.index, sector);
                    disk.verify.has_dropped = true;
                    disk.verify.differing += 1;
                    disk.stats.sectors_stale += 1;
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_rest_is_given_up_when_most_of_enough_differ() {
        let in_vain = |total, compared, differing| {
            Verify { total, compared, differing, ..Verify::default() }.is_in_vain()
        };
        assert!(!in_vain(100, 15, 15), "too few");
        assert!(!in_vain(1000, 124, 124), "less than an eighth");
        assert!(!in_vain(100, 16, 8), "half");
        assert!(in_vain(100, 16, 9) && in_vain(1000, 125, 63));
    }
}
