//! Extra fills: after the reply to a read miss, a job brings the uncached sectors next to the
//! request into the cache (docs/decisions/0059-fill-granularity.md).
//!
//! A job reads one range of sectors from the backing under a range lock like that of a read that
//! fills. So changes of the range wait for the job, and requests that want the same data find it in
//! the cache. Then the job writes flash like an ordinary fill. A sector that is valid, or that the
//! durable journal may record as dirty, is never overwritten.
//!
//! No guest waits for an extra fill to begin: a job that cannot start at once is dropped, and so is
//! one whose data may not enter the cache when it has been read. Errors are not reported.

use super::disk::Disk;
use super::jobs::{Job, JobKind, Step};
use super::{Engine, Owner, Pending};
use crate::admission::Run;
use crate::cache::{FlashRun, push_run};
use crate::command::{Mode, Role};
use crate::directory::Placed;
use crate::granularity::Fill;
use crate::io::{BufferSlice, Durability, IoError, IoOp, Target};
use crate::range_locks::{Kind, Range};
use crate::units::{Instant, SECTOR_BYTES};

/// Maximum number of extra fills in progress, and of those of one disk. The job slots beyond it stay
/// available to other jobs even if backings hang.
const EXTRA_FILLS_MAX: u32 = super::JOBS_MAX / 4;
const DISK_EXTRA_FILLS_MAX: u32 = 16;

impl Disk {
    /// Returns true if extra data may enter the cache now. Operations that empty the cache or move
    /// its data get no competition.
    fn may_fill_extra(&self) -> bool {
        let Ok(cache) = self.looked_up() else { return false };
        let is_filled = !matches!(cache.config.mode, Mode::ReadOnlyCache | Mode::PassThrough);
        let is_calm = !self.holds
            && self.removing.is_none()
            && self.draining.is_none()
            && self.vacating.is_none()
            && self.ownership.role == Role::Here
            && !self.journal.as_ref().is_some_and(|journal| journal.dead);
        cache.config.fill != Fill::Sectors && is_filled && is_calm
    }
}

impl Engine {
    /// Starts the extra fills of a miss that was answered.
    pub(super) fn fill_extra(&mut self, now: Instant, missed: Range, run: Run) {
        let disk = self.disk(missed.disk);
        let Some(cache) = disk.cache.as_ref().filter(|_| disk.may_fill_extra()) else { return };
        // A sector that is only partly inside the disk is left out.
        let sectors = disk.config.size_bytes / SECTOR_BYTES;
        for (first, end) in cache.extra_ranges(missed.first, missed.end, run, sectors) {
            let range = Range { disk: missed.disk, first, end };
            if first < end && self.may_start_extra_fill(range) {
                self.count_extra_fill(range, 1);
                if !self.transfer(now, JobKind::ExtraFill, range) {
                    self.count_extra_fill(range, -1);
                }
            }
        }
    }

    /// Returns true if an extra fill could start at once.
    fn may_start_extra_fill(&mut self, range: Range) -> bool {
        let bytes = (range.end - range.first) * SECTOR_BYTES;
        self.extra_fills < EXTRA_FILLS_MAX
            && self.disk(range.disk).extra_fills < DISK_EXTRA_FILLS_MAX
            && self.destage_buffers.spare() >= bytes
            && self.has_fill_bytes(bytes)
            && self.is_backing_idle(range.disk)
            && !self.range_locks.would_wait(range, Kind::Fill)
    }

    fn count_extra_fill(&mut self, range: Range, more: i32) {
        let of_disk = &mut self.disk_mut(range.disk).extra_fills;
        *of_disk = of_disk.checked_add_signed(more).expect("each end has a start");
        self.extra_fills = self.extra_fills.checked_add_signed(more).expect("each end has a start");
    }

    /// Returns true if the limit of data that waits for flash leaves room for this number of bytes.
    fn has_fill_bytes(&self, bytes: u64) -> bool {
        self.fill_bytes + bytes <= self.limits.fill_bytes_max
    }

    /// Starts a job that has its range lock and a buffer: reads the backing.
    pub(super) fn start_extra_fill(&mut self, now: Instant, job: u32) {
        let Job { disk: id, range, buffer, .. } = self.jobs[job];
        let mut buffer = buffer.expect("a transfer has a buffer");
        let (offset, len) = (range.first * SECTOR_BYTES, (range.end - range.first) * SECTOR_BYTES);
        self.destage_buffers.shorten(&mut buffer, len);
        let disk = self.disk_mut(id);
        disk.jobs += 1;
        let doubts = disk.backed.doubts;
        let it = &mut self.jobs[job];
        (it.buffer, it.step, it.doubts) = (Some(buffer), Step::ExtraRead, doubts);
        let slice = Some(BufferSlice { id: buffer.id, offset: buffer.offset, len: len as u32 });
        self.issue(now, Owner::Job(job), id, Target::Backing(id), IoOp::Read, (offset, len), slice, 0);
    }

    /// Handles the end of an I/O of an extra fill.
    pub(super) fn extra_io_done(
        &mut self,
        now: Instant,
        job: u32,
        io: &Pending,
        result: Result<(), IoError>,
        sums: &[u32],
    ) {
        let Job { disk: id, range, step, doubts, .. } = self.jobs[job];
        let disk = self.disk_mut(id);
        // The backing may have lost the data that it returned.
        let believed = disk.backed.doubts == doubts && disk.ownership.role == Role::Here;
        if step == Step::ExtraWrite {
            self.note_filled(now, io, result, believed, sums);
        } else if result.is_ok() {
            disk.stats.extra_read_bytes += io.bytes;
            // A shorter read: another disk has cached the rest, and it is not cached again.
            let is_whole = io.bytes == (range.end - range.first) * SECTOR_BYTES;
            if is_whole && believed && disk.may_fill_extra() && self.has_fill_bytes(io.bytes) {
                self.write_extra(now, job);
            }
        }
        if self.jobs[job].pending == 0 {
            self.end_job(now, job, Ok(()));
        }
    }

    /// Allocates frames for the data in a job's buffer, and writes it to flash.
    fn write_extra(&mut self, now: Instant, job: u32) {
        let Job { disk: id, range, buffer, .. } = self.jobs[job];
        let buffer = buffer.expect("a transfer has a buffer");
        let Engine { disks, range_locks, runs, .. } = self;
        let disk = disks[id.0 as usize].as_mut().expect("disks outlive their jobs");
        let cache = disk.cache.as_mut().expect("`may_fill_extra` looked at it");
        let is_busy = |first, end| range_locks.is_busy(&Range { disk: id, first, end });
        let (mut evicted, mut buffer_sector) = (0, buffer.first_sector());
        runs.clear();
        for span in cache.spans(range.first, range.end) {
            let found = cache.find(span);
            let has_share =
                found.is_some() || cache.keep_to_read_share(is_busy).map(|gone| evicted += gone).is_ok();
            if has_share && let Ok(placed) = cache.place_extra(span, found, is_busy) {
                let Placed { sector, evicted: gone } = placed;
                evicted += gone;
                let may =
                    |i: &u64| !cache.index.is_valid(sector + i) && cache.index.may_overwrite(sector + i);
                for i in (0..span.count).filter(may) {
                    push_run(runs, cache.extent(sector + i, 1), buffer_sector + i);
                }
            }
            buffer_sector += span.count;
        }
        if let (Some(cache), Some(journal)) = (&mut disk.cache, &mut disk.journal) {
            journal.record_gone(now, cache);
        }
        if evicted > 0 {
            disk.record_eviction(now, evicted);
        }
        // A hit may still be reading a sector that has become invalid.
        let lock = self.limits.requests_max + job;
        runs.retain(|FlashRun { extent, buffer_sector }| {
            let first = range.first + buffer_sector - buffer.first_sector();
            !range_locks.is_shared(lock, &Range { disk: id, first, end: first + extent.count })
        });
        if !runs.is_empty() {
            self.jobs[job].step = Step::ExtraWrite;
            self.fill_bytes += (range.end - range.first) * SECTOR_BYTES;
            let op = IoOp::Write(Durability::Volatile);
            self.issue_runs_of(now, Owner::Job(job), id, buffer.id, op);
        }
    }

    /// Handles the end of the extra fill of `range`, which was at this step.
    pub(super) fn extra_fill_done(&mut self, job: u32, range: Range, step: Step) {
        if step == Step::ExtraWrite {
            self.fill_bytes -= (range.end - range.first) * SECTOR_BYTES;
        }
        self.count_extra_fill(range, -1);
        let runnable = &mut self.runnable;
        self.range_locks.leave(self.limits.requests_max + job, |granted| runnable.push_back(granted));
    }
}
