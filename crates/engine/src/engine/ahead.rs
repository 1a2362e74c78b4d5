//! Reading ahead of sequential readers, into memory.
//!
//! A run's next window is read by a job with a claim like that of a read that fills: guests that want the same wait for it, changes
//! are ordered with it, and the destager stays away. Where flash has all of it, it comes from there; else from the backing, and
//! what is dirty is read over it. What flash does not deliver rightly is not kept: the guest's own read finds out and repairs.

use super::jobs::{Job, JobKind, Step};
use super::{Engine, Owner, Pending, tier};
use crate::cache::push_run;
use crate::io::{BufferSlice, IoError, IoOp, Target};
use crate::memory::{Ahead, PageRange};
use crate::range_locks::Range;
use crate::units::{DiskId, Instant, SECTOR_BYTES};

/// Transfers under way at once, those that wait for their claim included.
const TRANSFERS_MAX: u32 = 4;

impl super::Disk {
    /// While a cache is being recovered or changed, nobody but a request itself is told what it may read.
    fn may_read_ahead(&self) -> bool {
        let at_peace = !self.holds && self.recovering.is_none() && self.removing.is_none();
        at_peace && self.memory_uses().keeps_reads
    }
}

impl Engine {
    /// Begins to read these sectors of a disk ahead, if there is a buffer to spare.
    pub(super) fn read_ahead(&mut self, now: Instant, id: DiskId, what: Ahead) {
        let disk = self.disk(id);
        let sectors = disk.config.size_bytes.div_ceil(SECTOR_BYTES);
        let range = Range { disk: id, first: what.first, end: what.end.min(sectors) };
        if range.first >= range.end || !disk.may_read_ahead() {
            return;
        }
        if self.aheads < TRANSFERS_MAX && self.has_buffer_to_spare() {
            self.aheads += 1;
            if self.transfer(now, JobKind::ReadAhead, range) {
                return;
            }
            self.aheads -= 1;
        }
        self.missed_ahead(id, what);
    }

    /// Read-ahead leaves half of the buffers to those who have to go on.
    pub(super) fn has_buffer_to_spare(&self) -> bool {
        self.destage_buffers.spare() > 0
    }

    /// What was to be read ahead is not in memory: less is, next time.
    pub(super) fn missed_ahead(&mut self, id: DiskId, what: Ahead) {
        if let Some(memory) = &mut self.disk_mut(id).memory {
            memory.missed_ahead(what);
        }
    }

    /// A job has its claim and a buffer: what memory lacks is read.
    pub(super) fn start_ahead(&mut self, now: Instant, job: u32) {
        let Job { disk: id, mut range, buffer, .. } = self.jobs[job];
        let mut buffer = buffer.expect("a transfer has a buffer");
        let Engine { disks, runs, .. } = self;
        let disk = disks[id.0 as usize].as_mut().expect("disks outlive their jobs");
        let may_read = disk.may_read_ahead();
        let Some(memory) = disk.memory.as_ref().filter(|_| may_read) else {
            return self.end_job(now, job, Ok(()));
        };
        while range.first < range.end && memory.holds(range.first, range.first + 1) {
            range.first += 1;
        }
        while range.first < range.end && memory.holds(range.end - 1, range.end) {
            range.end -= 1;
        }
        if range.first == range.end {
            return self.end_job(now, job, Ok(()));
        }
        let mut valid = 0;
        runs.clear();
        if let Ok(cache) = disk.serving() {
            for span in cache.spans(range.first, range.end) {
                let Some(sector) = cache.find(span) else { break };
                valid += cache.index.count_servable(sector, span.count);
                let start = (u64::from(span.block.0) << cache.block_shift()) + span.first;
                let buffer_sector = buffer.first_sector() + start - range.first;
                push_run(runs, cache.extent(sector, span.count), buffer_sector);
            }
        }
        disk.jobs += 1;
        self.destage_buffers.shorten(&mut buffer, (range.end - range.first) * SECTOR_BYTES);
        let it = &mut self.jobs[job];
        (it.range, it.buffer) = (range, Some(buffer));
        if valid == range.end - range.first {
            it.step = Step::AheadFlash;
            return self.issue_runs_of(now, Owner::Job(job), id, buffer.id, IoOp::Read);
        }
        it.step = Step::AheadBacking;
        it.doubts = disk.backed.doubts;
        let offset = range.first * SECTOR_BYTES;
        let len = (range.end * SECTOR_BYTES).min(self.disk(id).config.size_bytes) - offset;
        let slice = Some(BufferSlice { id: buffer.id, offset: buffer.offset, len: len as u32 });
        self.issue(now, Owner::Job(job), id, Target::Backing(id), IoOp::Read, (offset, len), slice, 0);
    }

    /// Part of what is read ahead is there, or is not.
    pub(super) fn ahead_io_done(
        &mut self,
        now: Instant,
        job: u32,
        io: &Pending,
        result: Result<(), IoError>,
        sums: &[u32],
    ) {
        let Job { disk: id, range, step, buffer, doubts, .. } = self.jobs[job];
        let believed = doubts == self.disk(id).backed.doubts;
        if step == Step::AheadBacking && believed && result.is_ok() {
            self.compare_with_backing(now, range, sums);
        }
        let good = match step {
            Step::AheadFlash => {
                let index = &mut self.disk_mut(id).cache.as_mut().expect("changes wait for flash I/O").index;
                let mut sectors = (io.sector..io.sector + io.sectors).zip(sums);
                result.is_ok() && sectors.all(|(sector, sum)| index.matches(sector, *sum))
            }
            Step::AheadOverlay => self.check_dirty(now, id, io, result, sums),
            _ => result.is_ok(),
        };
        self.jobs[job].failed |= !good;
        if self.jobs[job].pending > 0 {
            return;
        }
        let buffer = buffer.expect("a transfer has a buffer");
        if self.jobs[job].failed {
            return self.end_job(now, job, Err(IoError::Failed));
        }
        if step == Step::AheadBacking && self.find_dirty(range, buffer.first_sector()) {
            self.jobs[job].step = Step::AheadOverlay;
            return self.issue_runs_of(now, Owner::Job(job), id, buffer.id, IoOp::Read);
        }
        let Engine { disks, copy_out, .. } = self;
        let disk = disks[id.0 as usize].as_mut().expect("disks outlive their jobs");
        // The backing may have lost what it delivered.
        let believed = step == Step::AheadFlash || doubts == disk.backed.doubts;
        if let (true, Some(memory)) = (disk.may_read_ahead() && believed, &mut disk.memory) {
            disk.stats.read_ahead_bytes += (range.end - range.first) * SECTOR_BYTES;
            let copy = |mut piece: PageRange| {
                piece.at += buffer.first_sector();
                copy_out.push_back(tier::into_memory(id, buffer.id, piece));
            };
            memory.keep_ahead(range.first, range.end, copy);
        }
        self.end_job(now, job, Ok(()));
    }

    /// A transfer of `range` ended, well or not.
    pub(super) fn ahead_done(&mut self, job: u32, range: Range, result: Result<(), IoError>) {
        self.aheads -= 1;
        if result.is_err() {
            self.missed_ahead(range.disk, Ahead { first: range.first, end: range.end });
        }
        let runnable = &mut self.runnable;
        self.range_locks.leave(self.limits.requests_max + job, |granted| runnable.push_back(granted));
    }
}
