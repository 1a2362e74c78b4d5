//! Read-ahead for sequential readers, into the memory tier.
//!
//! A job reads the next window of a sequential run. The job takes the same kind of range lock as a
//! read that fills flash. So guests' reads of the same data wait for the job, the job and changes
//! wait for each other, and the destager skips the range. If flash has the whole window, the job
//! reads flash. Otherwise the job reads the backing, and then replaces older data of the backing by
//! dirty data from flash. If flash returns an error or wrong data, the job keeps nothing in the
//! memory tier. The guest's own read later detects the same problem and repairs flash.

use super::jobs::{Job, JobKind, Step};
use super::{Engine, Owner, Pending, tier};
use crate::cache::push_run;
use crate::io::{BufferSlice, IoError, IoOp, Target};
use crate::memory::{Ahead, PageRange};
use crate::range_locks::Range;
use crate::units::{DiskId, Instant, SECTOR_BYTES};

/// Maximum number of read-ahead jobs of all disks, including those that wait for their range lock.
const TRANSFERS_MAX: u32 = 4;

impl super::Disk {
    /// Returns false while a cache is being recovered or changed. During that time, hob reads only
    /// the data that guests request, because the source of the data may change at any moment.
    fn may_read_ahead(&self) -> bool {
        let is_stable = !self.holds && self.recovering.is_none() && self.removing.is_none();
        is_stable && self.memory_uses().keeps_reads
    }
}

impl Engine {
    /// Starts a job that reads the sectors `what` of a disk into its memory tier. Without a free
    /// buffer or job slot, shrinks the next window instead.
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

    /// Returns true if a buffer is free for read-ahead, which leaves half of the buffers to other
    /// jobs.
    pub(super) fn has_buffer_to_spare(&self) -> bool {
        self.destage_buffers.spare() > 0
    }

    /// Shrinks the next read-ahead window, because the memory tier did not get the data of the
    /// window `what`.
    pub(super) fn missed_ahead(&mut self, id: DiskId, what: Ahead) {
        if let Some(memory) = &mut self.disk_mut(id).memory {
            memory.missed_ahead(what);
        }
    }

    /// Starts a read-ahead job that has its range lock and a buffer: reads the sectors that the
    /// memory tier lacks.
    pub(super) fn start_ahead(&mut self, now: Instant, job: u32) {
        let Job { disk: id, mut range, buffer, .. } = self.jobs[job];
        let mut buffer = buffer.expect("a transfer has a buffer");
        let Engine { disks, runs, .. } = self;
        let disk = disks[id.0 as usize].as_mut().expect("disks outlive their jobs");
        let may_read = disk.may_read_ahead() && disk.part_in(range).is_none();
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
        let doubts = disk.backed.doubts;
        self.destage_buffers.shorten(&mut buffer, (range.end - range.first) * SECTOR_BYTES);
        let it = &mut self.jobs[job];
        (it.range, it.buffer, it.doubts) = (range, Some(buffer), doubts);
        if valid == range.end - range.first {
            it.step = Step::AheadFlash;
            return self.issue_runs_of(now, Owner::Job(job), id, buffer.id, IoOp::Read);
        }
        it.step = Step::AheadBacking;
        let offset = range.first * SECTOR_BYTES;
        let len = (range.end * SECTOR_BYTES).min(self.disk(id).config.size_bytes) - offset;
        let slice = Some(BufferSlice { id: buffer.id, offset: buffer.offset, len: len as u32 });
        self.issue(now, Owner::Job(job), id, Target::Backing(id), IoOp::Read, (offset, len), slice, 0);
    }

    /// Handles the end of an I/O of a read-ahead.
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
        // If the backing lost data during this read, the data that the backing returned and the
        // copy on flash may both be wrong.
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

    /// Handles the end of a job that read `range` ahead.
    pub(super) fn ahead_done(&mut self, job: u32, range: Range, result: Result<(), IoError>) {
        self.aheads -= 1;
        if result.is_err() {
            self.missed_ahead(range.disk, Ahead { first: range.first, end: range.end });
        }
        let runnable = &mut self.runnable;
        self.range_locks.leave(self.limits.requests_max + job, |granted| runnable.push_back(granted));
    }
}
