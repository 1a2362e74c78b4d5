//! Extra fills: a job brings uncached sectors that no request has asked for into the cache. There
//! are two kinds of such sectors:
//!
//! - The sectors next to a read miss (docs/decisions/0059-fill-granularity.md). The job reads the
//!   backing at the same time as the miss (docs/decisions/0062-shared-extra-reads.md).
//! - Under write-back, the sectors after a sequential run of small writes that cover their last
//!   sector partly. If the job has cached these sectors, the engine need not read them from the
//!   backing for the next write (docs/decisions/0041-partial-writes.md).
//!
//! A job locks one range of sectors, as a read that fills flash does, and reads this range:
//!
//! ```text
//! ExtraRead → ExtraReady → ExtraWrite → end      usual
//!     │            └ the cache may not have the data, or requests use the range → end
//!     ├ error → end
//!     └ too late, or other reads need all of the range → ExtraDropped → end
//! ```
//! While the job reads the backing, a guest's read inside the job's range waits for the job. Other
//! reads that overlap the range do not wait: the job drops the sectors that these reads need
//! (`make_way`). Changes wait until the backing has answered, because hob sends no change of
//! sectors that the backing is reading. Then the job releases its lock. The waiting reads take the
//! data from the job's buffer, and changes proceed. In the same call of the engine, the job locks
//! its sectors again, except sectors for which a change waited or which another request uses. The
//! job then writes flash like an ordinary fill. A sector that is valid, or that the durable journal
//! may record as dirty, is never overwritten.
//!
//! A job that cannot start immediately is dropped. A job is also dropped if the cache must not
//! accept the data when the data arrives from the backing. Errors of a job are not reported to
//! guests.

use super::disk::Disk;
use super::fill::sectors_of;
use super::jobs::{Job, JobKind, Step};
use super::read::may_take_extra;
use super::{Active, Engine, Owner, Pending};
use crate::admission::Run;
use crate::cache::{FlashRun, push_run};
use crate::command::{Layout, Mode, Role};
use crate::directory::{Placed, Refusal};
use crate::granularity::Fill;
use crate::io::{BufferCopy, BufferSlice, CopyEnd, Durability, IoError, IoOp, Target};
use crate::outcome::Outcome;
use crate::range_locks::{Kind, Range};
use crate::units::{DiskId, Instant, SECTOR_BYTES};

/// Maximum number of extra fills in progress in the engine, and maximum number for one disk. The
/// remaining job slots stay available to other jobs, even if backings hang.
const EXTRA_FILLS_MAX: u32 = super::JOBS_MAX / 4;
const DISK_EXTRA_FILLS_MAX: u32 = 16;

/// Maximum time that an extra read may take while requests wait for it: `WAIT_READS_MAX` times the
/// mean latency of backing reads, plus `WAIT_NS_MIN` nanoseconds.
const WAIT_READS_MAX: u64 = 2;
const WAIT_NS_MIN: u64 = 1_000_000;

/// Number of sectors after a run of partial writes that should be in the cache. The engine reads
/// these sectors when fewer than half of them are cached.
const AHEAD_OF_WRITES: u64 = 32;

/// Maximum number of sectors of a write that reads ahead. A run of larger writes covers most
/// sectors completely, so that few of the sectors that are read would be used.
const AHEAD_WRITE_SECTORS_MAX: u64 = 4;

/// Mean latency of backing reads that hob assumes before the first read has ended, nanoseconds.
const READ_NS_DEFAULT: u64 = 20_000_000;
/// Each new read has the weight 1/`READ_WEIGHT` in the mean latency.
const READ_WEIGHT: u64 = 8;

fn expected_use(kind: JobKind) -> ExpectedUse {
    let JobKind::ExtraFill(expected) = kind else { panic!("{kind:?} is no extra fill") };
    expected
}

/// The kind of request that is expected to use the extra sectors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ExpectedUse {
    /// Reads: the sectors are next to a read miss. The sectors have a limited share of the frames.
    Reads,
    /// Partial writes: the sectors follow a run of such writes, and will become dirty.
    Writes,
}

/// An extra fill while it reads the backing, or while waiting reads copy its data.
#[derive(Debug)]
pub(super) struct ExtraRead {
    job: u32,
    /// Time until which requests may wait for the data.
    wait_until: Instant,
    /// True if a read or a job waits for the data.
    is_awaited: bool,
    /// From the arrival of the data until the job locks its range again: the sectors for which no
    /// change waits.
    kept: Option<Range>,
    /// Sectors `first..end` that reads took from the buffer, with the runs of these reads.
    taken: Vec<(u64, u64, Run)>,
}

/// Mean latency of the backing reads that serve requests. Older reads lose weight.
#[derive(Debug, Default)]
pub(super) struct ReadTime {
    mean_ns: Option<u64>,
}

impl ReadTime {
    pub(super) fn note(&mut self, ns: u64) {
        let mean = self.mean_ns.map_or(ns, |mean| mean - mean / READ_WEIGHT + ns / READ_WEIGHT);
        self.mean_ns = Some(mean);
    }

    /// Returns the time that an extra read may take while requests wait for it, ns.
    fn wait_ns_max(&self) -> u64 {
        WAIT_READS_MAX.saturating_mul(self.mean_ns.unwrap_or(READ_NS_DEFAULT)).saturating_add(WAIT_NS_MIN)
    }
}

impl Disk {
    /// Returns true if extra data may enter the cache now. Returns false during operations that
    /// empty the cache or move its data, because an extra fill would delay them.
    fn may_fill_extra(&self, expected: ExpectedUse) -> bool {
        let Ok(cache) = self.looked_up() else { return false };
        let is_filled = match expected {
            ExpectedUse::Reads => {
                cache.config.fill != Fill::Sectors
                    && !matches!(cache.config.mode, Mode::ReadOnlyCache | Mode::PassThrough)
            }
            ExpectedUse::Writes => {
                self.mode_in_effect() == Some(Mode::WriteBack) && cache.config.layout == Layout::Unified
            }
        };
        let is_calm = !self.holds
            && self.removing.is_none()
            && self.draining.is_none()
            && self.vacating.is_none()
            && self.ownership.role == Role::Here
            && !self.journal.as_ref().is_some_and(|journal| journal.dead || journal.has_unawaited_marks);
        is_filled && is_calm
    }
}

impl Engine {
    /// Starts the extra fills of a miss whose read of the backing has begun.
    pub(super) fn fill_extra(&mut self, now: Instant, missed: Range, run: Run) {
        let disk = self.disk_mut(missed.disk);
        let may_fill = disk.may_fill_extra(ExpectedUse::Reads) && !disk.is_reading_shared;
        let limit = disk.flash_budget.limit();
        let Some(cache) = disk.cache.as_mut().filter(|_| may_fill) else { return };
        cache.set_limit(limit);
        // A sector that is only partly inside the disk is left out.
        let sectors = disk.config.size_bytes / SECTOR_BYTES;
        for (first, end) in cache.extra_ranges(missed.first, missed.end, run, sectors) {
            self.try_extra_fill(now, Range { disk: missed.disk, first, end }, &missed, ExpectedUse::Reads);
        }
    }

    /// Starts an extra fill of the sectors after a small write of `range`. The last sector of the
    /// write is partial and not in memory. Does nothing unless the write continues a run of writes:
    /// the sector before `range` is dirty.
    pub(super) fn fill_ahead_of_writes(&mut self, now: Instant, range: Range) {
        let is_small = range.end - range.first <= AHEAD_WRITE_SECTORS_MAX;
        let disk = self.disk_mut(range.disk);
        if !is_small || disk.is_reading_shared || !disk.may_fill_extra(ExpectedUse::Writes) {
            return;
        }
        let limit = disk.flash_budget.limit();
        let cache = disk.cache.as_mut().expect("`may_fill_extra` looked at it");
        cache.set_limit(limit);
        if !cache.allows_extra(range.end) || self.has_late_extra_read(now, range.disk) {
            return;
        }
        let disk = self.disk(range.disk);
        let cache = disk.cache.as_ref().expect("`may_fill_extra` looked at it");
        let find = |at: u64| cache.spans(at, at + 1).next().and_then(|span| cache.find(span));
        let before = range.first.checked_sub(1).and_then(find);
        if !before.is_some_and(|sector| cache.index.is_dirty(sector)) {
            return;
        }
        // If this write waited for an extra read, the data of that read has arrived and its job has
        // no range lock now.
        let is_read = |at: u64| {
            let part = Range { first: at, end: at + 1, ..range };
            self.extra_reads.iter().any(|read| self.jobs[read.job].range.overlaps(&part))
        };
        let is_cached =
            |at: &u64| find(*at).is_some_and(|sector| cache.index.is_valid(sector)) || is_read(*at);
        let window_end = (range.end + AHEAD_OF_WRITES).min(disk.config.size_bytes / SECTOR_BYTES);
        let Some(first) = (range.end..window_end).find(|at| !is_cached(at)) else { return };
        if first - range.end >= AHEAD_OF_WRITES / 2 {
            return;
        }
        let end = (first..window_end).find(is_cached).unwrap_or(window_end);
        self.try_extra_fill(now, Range { first, end, ..range }, &range, ExpectedUse::Writes);
    }

    /// Returns true if an extra read of this disk takes longer than requests may wait for it. The
    /// caller then starts no further extra fill for writes. The backing may hang, and changes of
    /// the sectors that an extra read covers wait for it.
    fn has_late_extra_read(&self, now: Instant, disk: DiskId) -> bool {
        let is_late = |read: &ExtraRead| read.kept.is_none() && read.wait_until <= now;
        self.extra_reads.iter().any(|read| is_late(read) && self.jobs[read.job].disk == disk)
    }

    /// Starts an extra fill of the part of `wanted` next to `request` that no other request or job
    /// uses, if the fill can begin at once.
    fn try_extra_fill(&mut self, now: Instant, wanted: Range, request: &Range, expected: ExpectedUse) {
        let range = self.free_part(wanted, request);
        if range.first < range.end && self.may_start_extra_fill(range) {
            self.count_extra_fill(range, 1);
            if !self.transfer(now, JobKind::ExtraFill(expected), range) {
                self.count_extra_fill(range, -1);
            }
        }
    }

    /// Returns the part of a range next to a request that no other request or job has locked.
    fn free_part(&self, mut range: Range, request: &Range) -> Range {
        if range.first >= range.end {
            return range;
        }
        for other in self.range_locks.conflicts(range, Kind::Fill) {
            match range.end <= request.first {
                true => range.first = range.first.max(other.end),
                false => range.end = range.end.min(other.first),
            }
        }
        range
    }

    /// Returns true if an extra fill of `range` could start immediately.
    fn may_start_extra_fill(&mut self, range: Range) -> bool {
        let bytes = (range.end - range.first) * SECTOR_BYTES;
        self.extra_fills < EXTRA_FILLS_MAX
            && self.disk(range.disk).extra_fills < DISK_EXTRA_FILLS_MAX
            && self.destage_buffers.spare() >= bytes
            && self.has_fill_bytes(bytes)
            && self.is_backing_idle(range.disk)
    }

    fn count_extra_fill(&mut self, range: Range, more: i32) {
        let of_disk = &mut self.disk_mut(range.disk).extra_fills;
        *of_disk = of_disk.checked_add_signed(more).expect("each end has a start");
        self.extra_fills = self.extra_fills.checked_add_signed(more).expect("each end has a start");
    }

    /// Returns true if fills of this number of bytes do not exceed
    /// [`Limits::fill_bytes_max`](super::Limits::fill_bytes_max).
    fn has_fill_bytes(&self, bytes: u64) -> bool {
        self.fill_bytes + bytes <= self.limits.fill_bytes_max
    }

    /// Starts an extra fill that has its range lock and a buffer: reads the backing.
    pub(super) fn start_extra_fill(&mut self, now: Instant, job: u32) {
        let Job { disk: id, range, whole, buffer, .. } = self.jobs[job];
        let mut buffer = buffer.expect("a transfer has a buffer");
        if range != whole {
            // The buffer is shorter than the range.
            let runnable = &mut self.runnable;
            let lock = self.limits.requests_max + job;
            self.range_locks.narrow(lock, range, |granted| runnable.push_back(granted));
        }
        let (offset, len) = (range.first * SECTOR_BYTES, (range.end - range.first) * SECTOR_BYTES);
        self.destage_buffers.shorten(&mut buffer, len);
        let disk = self.disk_mut(id);
        disk.jobs += 1;
        let (doubts, wait_ns_max) = (disk.backed.doubts, disk.backing_read_time.wait_ns_max());
        let it = &mut self.jobs[job];
        (it.buffer, it.step, it.doubts, it.whole) = (Some(buffer), Step::ExtraRead, doubts, range);
        self.extra_reads.push(ExtraRead {
            job,
            wait_until: now + wait_ns_max,
            is_awaited: false,
            kept: None,
            taken: Vec::new(),
        });
        let slice = Some(BufferSlice { id: buffer.id, offset: buffer.offset, len: len as u32 });
        self.issue(now, Owner::Job(job), id, Target::Backing(id), IoOp::Read, (offset, len), slice, 0);
    }

    /// Returns true if extra reads are in progress, and a new lock of `range` and `kind` would have
    /// to wait.
    pub(super) fn is_extra_read(&self, range: Range, kind: Kind) -> bool {
        !self.extra_reads.is_empty() && self.range_locks.conflicts(range, kind).next().is_some()
    }

    /// Prepares for a read that will lock a range. If `takes` is true, the read can take its data
    /// from an extra read, and may wait for it. Otherwise extra reads drop the sectors of the
    /// range, so that the read need not wait.
    pub(super) fn make_way(&mut self, now: Instant, range: Range, takes: bool) {
        for at in (0..self.extra_reads.len()).rev() {
            let ExtraRead { job, wait_until, kept, .. } = self.extra_reads[at];
            let held = self.jobs[job].range;
            if kept.is_some() || !held.overlaps(&range) {
                continue;
            }
            if !takes || !held.contains(&range) {
                self.narrow_extra_read(at, held.larger_part_beside(&range));
            } else if now < wait_until {
                self.extra_reads[at].is_awaited = true;
            } else {
                self.drop_late_extra_read(at);
            }
        }
    }

    /// Records that a job is about to wait for a range, so that a late extra read of the range
    /// makes way.
    pub(super) fn note_waiting_job(&mut self, range: Range) {
        for read in &mut self.extra_reads {
            read.is_awaited |= self.jobs[read.job].range.overlaps(&range);
        }
    }

    /// Returns the time at which the next extra read becomes late.
    pub(super) fn extra_reads_deadline(&self) -> Option<Instant> {
        let awaited = self.extra_reads.iter().filter(|read| read.is_awaited && read.kept.is_none());
        awaited.map(|read| read.wait_until).min()
    }

    /// Resumes requests that wait for an extra read which takes too long.
    pub(super) fn end_late_extra_reads(&mut self, now: Instant) {
        for at in (0..self.extra_reads.len()).rev() {
            let ExtraRead { wait_until, is_awaited, kept, .. } = self.extra_reads[at];
            if is_awaited && kept.is_none() && wait_until <= now {
                self.drop_late_extra_read(at);
            }
        }
    }

    fn drop_late_extra_read(&mut self, at: usize) {
        let Job { range, kind, .. } = self.jobs[self.extra_reads[at].job];
        if expected_use(kind) == ExpectedUse::Reads
            && let Some(cache) = &mut self.disk_mut(range.disk).cache
        {
            cache.note_late_extra(range.first, range.end);
        }
        self.narrow_extra_read(at, Range { end: range.first, ..range });
    }

    /// Reduces an extra read to a part of its range. If the part is empty, the data is dropped.
    fn narrow_extra_read(&mut self, at: usize, part: Range) {
        let job = self.extra_reads[at].job;
        let (lock, runnable) = (self.limits.requests_max + job, &mut self.runnable);
        self.range_locks.narrow(lock, part, |granted| runnable.push_back(granted));
        self.jobs[job].range = part;
        if part.first >= part.end {
            self.jobs[job].step = Step::ExtraDropped;
            self.extra_reads.swap_remove(at);
        }
    }

    fn extra_read_of(&self, job: u32) -> usize {
        self.extra_reads.iter().position(|read| read.job == job).expect("the job reads the backing")
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
        let Job { disk: id, whole, step, doubts, kind, .. } = self.jobs[job];
        let disk = self.disk_mut(id);
        // The backing may have lost the data that it returned.
        let believed = disk.backed.doubts == doubts && disk.ownership.role == Role::Here;
        if step == Step::ExtraWrite {
            self.note_filled(now, io, result, believed, sums);
        } else if result.is_ok() {
            disk.stats.extra_read_bytes += io.bytes;
        }
        if step == Step::ExtraRead {
            // The read is shorter if another disk has cached the rest of the range, which is then
            // not cached again.
            let is_whole = result.is_ok() && io.bytes == (whole.end - whole.first) * SECTOR_BYTES;
            let is_usable = is_whole && believed && self.disk(id).may_fill_extra(expected_use(kind));
            let at = self.extra_read_of(job);
            if is_usable {
                return self.deliver_extra(job, at);
            }
            self.extra_reads.swap_remove(at);
        }
        if self.jobs[job].pending == 0 {
            self.end_job(now, job, Ok(()));
        }
    }

    /// Resumes the requests that wait for the data of an extra read, and then the job that read it.
    fn deliver_extra(&mut self, job: u32, at: usize) {
        let mut kept = self.jobs[job].range;
        // The changes that wait for the job may begin and end before the job locks its range again.
        for change in self.range_locks.conflicts(kept, Kind::Read) {
            kept = kept.larger_part_beside(&change);
        }
        self.extra_reads[at].kept = Some(kept);
        self.jobs[job].step = Step::ExtraReady;
        let (lock, runnable) = (self.limits.requests_max + job, &mut self.runnable);
        self.range_locks.leave(lock, |granted| runnable.push_back(granted));
        runnable.push_back(lock);
    }

    /// Answers a read from the buffer of an extra read. Returns false if no extra read has all of
    /// the data.
    pub(super) fn take_extra(&mut self, now: Instant, slot: u32) -> bool {
        let Active { request, range, run, .. } = self.requests[slot];
        let jobs = &self.jobs;
        let has_it = |read: &&mut ExtraRead| read.kept.is_some() && jobs[read.job].range.contains(&range);
        let Some(read) = self.extra_reads.iter_mut().find(has_it).filter(|_| may_take_extra(&request)) else {
            return false;
        };
        read.taken.push((range.first, range.end, run));
        let Job { whole, buffer, doubts, .. } = self.jobs[read.job];
        let buffer = buffer.expect("an extra read has a buffer");
        let offset = buffer.offset + ((range.first - whole.first) * SECTOR_BYTES) as u32;
        let to = CopyEnd::Buffer { id: request.buffer.expect("reads have a buffer"), offset: 0 };
        let len = ((range.end - range.first) * SECTOR_BYTES) as u32;
        self.copy_out.push_back(BufferCopy { from: CopyEnd::Buffer { id: buffer.id, offset }, to, len });
        let it = &mut self.requests[slot];
        (it.outcome, it.doubts) = (Outcome::MissFilled, doubts);
        self.reply(now, slot, Ok(()));
        self.finish(slot);
        true
    }

    /// Continues an extra fill after the waiting reads took its data: locks the part of its range
    /// that no other request uses, and writes flash.
    pub(super) fn keep_extra(&mut self, now: Instant, job: u32) {
        let at = self.extra_read_of(job);
        let ExtraRead { taken, kept, .. } = self.extra_reads.swap_remove(at);
        let mut range = kept.expect("the data has arrived");
        for other in self.range_locks.conflicts(range, Kind::Fill) {
            range = range.larger_part_beside(&other);
        }
        self.jobs[job].range = range;
        let has_room = self.has_fill_bytes((range.end - range.first) * SECTOR_BYTES);
        let expected = expected_use(self.jobs[job].kind);
        if range.first >= range.end || !has_room || !self.disk(range.disk).may_fill_extra(expected) {
            return self.end_job(now, job, Ok(()));
        }
        self.jobs[job].step = Step::ExtraLocked;
        let is_granted = self.lock_job_range(job, range);
        assert!(is_granted, "{range:?} was free");
        self.write_extra(now, job, &taken);
        if self.jobs[job].pending == 0 {
            self.end_job(now, job, Ok(()));
        }
    }

    /// Allocates frames for the data in a job's buffer, and writes this data to flash. The sectors
    /// that reads have taken count as used.
    fn write_extra(&mut self, now: Instant, job: u32, taken: &[(u64, u64, Run)]) {
        let Job { disk: id, range, whole, buffer, .. } = self.jobs[job];
        let buffer = buffer.expect("a transfer has a buffer");
        let expected = expected_use(self.jobs[job].kind);
        let first_buffer_sector = buffer.first_sector() + range.first - whole.first;
        let Engine { disks, range_locks, runs, .. } = self;
        let disk = disks[id.0 as usize].as_mut().expect("disks outlive their jobs");
        let limit = disk.flash_budget.limit();
        let cache = disk.cache.as_mut().expect("`may_fill_extra` looked at it");
        cache.set_limit(limit);
        let is_busy = |first, end| range_locks.is_busy(&Range { disk: id, first, end });
        let (mut evicted, mut buffer_sector) = (0, first_buffer_sector);
        runs.clear();
        for span in cache.spans(range.first, range.end) {
            let found = cache.find(span);
            let has_share =
                found.is_some() || cache.keep_to_read_share(is_busy).map(|gone| evicted += gone).is_ok();
            let placed = match expected {
                _ if !has_share => Err(Refusal::NoBlock),
                ExpectedUse::Reads => cache.place_extra(span, found, is_busy),
                ExpectedUse::Writes => cache.place_for_writes(span, found, is_busy),
            };
            if let Ok(placed) = placed {
                let Placed { sector, evicted: gone } = placed;
                evicted += gone;
                let may =
                    |i: &u64| !cache.index.is_valid(sector + i) && cache.index.may_overwrite(sector + i);
                let mut filled = 0;
                for i in (0..span.count).filter(may) {
                    push_run(runs, cache.extent(sector + i, 1), buffer_sector + i);
                    filled += 1;
                }
                cache.charge_extra(filled);
            }
            buffer_sector += span.count;
        }
        let charged = cache.charged();
        for (first, end, run) in taken {
            for span in cache.spans(range.first.max(*first), range.end.min(*end)) {
                if let Some(sector) = cache.find(span) {
                    cache.touch(sector, *run);
                }
            }
        }
        if let (Some(cache), Some(journal)) = (&mut disk.cache, &mut disk.journal) {
            journal.record_gone(now, cache);
        }
        if evicted > 0 {
            disk.record_eviction(now, evicted);
        }
        // A request may still be reading a sector from flash although the sector has become
        // invalid.
        let lock = self.limits.requests_max + job;
        let before = sectors_of(runs);
        runs.retain(|FlashRun { extent, buffer_sector }| {
            let first = range.first + buffer_sector - first_buffer_sector;
            !range_locks.is_shared(lock, &Range { disk: id, first, end: first + extent.count })
        });
        disk.flash_budget.add(charged, before - sectors_of(runs));
        if !runs.is_empty() {
            self.jobs[job].step = Step::ExtraWrite;
            self.fill_bytes += (range.end - range.first) * SECTOR_BYTES;
            let op = IoOp::Write(Durability::Volatile);
            self.issue_runs_of(now, Owner::Job(job), id, buffer.id, op);
        }
    }

    /// Ends an extra fill of `range`: updates its counters and releases its range lock. `step` is
    /// the last step of the job.
    pub(super) fn extra_fill_done(&mut self, job: u32, range: Range, step: Step) {
        if step == Step::ExtraWrite {
            self.fill_bytes -= (range.end - range.first) * SECTOR_BYTES;
        }
        self.count_extra_fill(range, -1);
        if step != Step::ExtraReady {
            let runnable = &mut self.runnable;
            self.range_locks.leave(self.limits.requests_max + job, |granted| runnable.push_back(granted));
        }
    }
}
