//! Background jobs of the engine: transfers of dirty data from flash to the backing, flushes of the
//! backing, read-ahead, and extra fills.
//!
//! A *transfer* destages one range of dirty sectors. The transfer locks its sectors like a read
//! that fills flash, so that reads from flash continue and changes wait. The transfer reads flash
//! into a destage buffer, compares the checksums, and writes the data to the backing. Guests may
//! overwrite the sectors on flash during the write to the backing. Overwritten sectors stay dirty.
//! Changes that go to the backing wait for the end of the transfer. The sectors become clean only
//! after a flush of the backing (`destage.rs`).

use std::collections::BTreeSet;

use super::destage_buffers::{DestageBuffer, Least};
use super::extra_fill::ExpectedUse;
use super::incomplete::bytes_to_destage;
use super::partial::EdgeSource;
use super::{Engine, Owner, Pending};
use crate::cache::push_run;
use crate::index::parts::ALL_UNITS;
use crate::io::{BufferSlice, Durability, IoError, IoOp, Target};
use crate::range_locks::Range;
use crate::units::{DiskId, FrameNo, Instant, SECTOR_BYTES};

/// Minimum buffer size of a long transfer, bytes. With a smaller buffer, the many short transfers
/// would cost the backing more time than waiting for a larger buffer.
const BUFFER_BYTES_MIN: u64 = 256 << 10;

/// Maximum time for which a transfer waits for a buffer of whole stripes of the backing,
/// nanoseconds. After that time, the transfer takes a shorter buffer, because other disks may keep
/// their buffers for ever. A backing on RAID then gets parts of stripes, and has to read old data
/// to write them.
const STRIPE_WAIT_NS_MAX: u64 = 1_000_000_000;

/// Number of a disk's job slots that are reserved for jobs without a range lock.
const RESERVED: u32 = 4;

/// A background job in progress.
pub(super) struct Job {
    pub(super) disk: DiskId,
    pub(super) kind: JobKind,
    /// Sectors of the disk that the job examines or reads; empty for a flush.
    pub(super) whole: Range,
    /// Sectors that the job transfers.
    pub(super) range: Range,
    pub(super) pending: u32,
    pub(super) step: Step,
    pub(super) buffer: Option<DestageBuffer>,
    pub(super) failed: bool,
    /// Number of the disk's failed flushes and reported losses when the job began to write, read
    /// or flush the backing.
    pub(super) doubts: u64,
    /// If the job reads a single incomplete sector, the 512-byte units of this sector that flash
    /// has. Otherwise all units.
    pub(super) units: u8,
}

/// Kind of a background job.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum JobKind {
    /// Writes dirty sectors to the backing.
    Destage,
    /// Destages a dirty sector that a guest request covers only partly, under the request's range
    /// lock. The number is the request's slot in the engine's request table.
    Edges(u32),
    /// Flushes the backing. The value is the number of completed writes that are durable after the
    /// flush.
    Flush(u64),
    /// Scrubs a frame or makes its second copy (`maintenance.rs`).
    Maintenance(FrameNo),
    /// Reads a sequential reader's next sectors into memory (`ahead.rs`).
    ReadAhead,
    /// Brings uncached sectors that no request has asked for into the cache (`extra_fill.rs`).
    ExtraFill(ExpectedUse),
    /// Compares sectors of a recovered cache with the backing (`verify.rs`).
    Verify,
    /// Sends several writes of guests to the backing as one (`merge.rs`).
    Merged,
    /// Writes the tail of a recovered journal again (`rewrite.rs`).
    Rewrite,
    /// Reads a sector that a request partly covers, under the request's range lock (`partial.rs`).
    ReadEdge(u32, EdgeSource),
    /// Reads an incomplete sector from flash for a read whose other data came from the backing,
    /// under the range lock of that read (`incomplete.rs`).
    ReadUnits(u32),
}

impl JobKind {
    /// Returns true if a job of this kind needs no range lock.
    fn is_at_once(self) -> bool {
        matches!(
            self,
            JobKind::Edges(_)
                | JobKind::Flush(_)
                | JobKind::ReadEdge(..)
                | JobKind::ReadUnits(_)
                | JobKind::Rewrite
        )
    }

    /// Returns true if a job of this kind transfers this dirty sector. `lost` are the sectors that
    /// flash failed to deliver before. The destager skips these sectors, so that their neighbours
    /// do not wait for ever. A job for a request tries to transfer these sectors again, and the
    /// request fails if flash cannot deliver them this time either.
    pub(super) fn takes(self, lost: &BTreeSet<u64>, sector: u64) -> bool {
        self != JobKind::Destage || !lost.contains(&sector)
    }

    /// Returns the minimum buffer size of a job of this kind.
    fn least(self) -> Least {
        match self {
            // Maintenance needs the whole frame.
            JobKind::Maintenance(_) => Least::All,
            _ => Least::Bytes(BUFFER_BYTES_MIN),
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Step {
    Waiting,
    CareRead,
    MaintenanceWrite,
    FlashRead,
    BackingWrite,
    Flush,
    VerifyRead,
    AheadFlash,
    AheadBacking,
    AheadOverlay,
    ExtraRead,
    /// Waiting reads take the data of an extra read; the job has no range lock.
    ExtraReady,
    /// The data of an extra read is not needed; changes wait for the end of the read.
    ExtraDropped,
    /// The data of an extra read may enter the cache; the job has its range lock again.
    ExtraLocked,
    ExtraWrite,
    MergedWrite,
    Rewrite,
    EdgeDirty,
    EdgeClean,
    EdgeBacking,
    UnitsRead,
}

impl Engine {
    /// Begins a transfer if a buffer and a free job are available.
    ///
    /// A job takes a buffer only after it has its range lock, so that it can always complete and
    /// give the buffer back. For the same reason, some job slots are reserved for jobs without a
    /// range lock. A request whose range lock blocks other requests may depend on a job in a
    /// reserved slot.
    pub(super) fn transfer(&mut self, now: Instant, kind: JobKind, range: Range) -> bool {
        let needs_lock = !kind.is_at_once();
        let has_slot = match needs_lock {
            true => self.has_job_to_spare(range.disk),
            false => self.has_job_at_once(range.disk),
        };
        let bytes = (range.end - range.first) * SECTOR_BYTES;
        if !has_slot {
            return false;
        }
        let least = self.least_buffer(now, kind, range.disk, bytes);
        if !self.destage_buffers.has(range.disk, bytes, least) {
            return false;
        }
        let job = self.insert_job(Job {
            disk: range.disk,
            kind,
            whole: range,
            range,
            pending: 0,
            step: Step::Waiting,
            buffer: None,
            failed: false,
            doubts: 0,
            units: ALL_UNITS,
        });
        if !needs_lock || self.lock_job_range(job, range) {
            self.start_job(now, job);
        }
        true
    }

    /// Returns the minimum buffer size of a transfer of `bytes` bytes. Dirty data is destaged in
    /// whole stripes of the backing if a buffer can hold one. A transfer waits for such a buffer
    /// for at most [`STRIPE_WAIT_NS_MAX`].
    fn least_buffer(&mut self, now: Instant, kind: JobKind, id: DiskId, bytes: u64) -> Least {
        let stripe = u64::from(self.disk(id).stripe_bytes);
        let longest = self.destage_buffers.longest().checked_div(stripe).unwrap_or(0) * stripe;
        if kind != JobKind::Destage || longest == 0 {
            return kind.least();
        }
        let least = BUFFER_BYTES_MIN.next_multiple_of(stripe).min(longest);
        let stripes = Least::Stripes { stripe, least };
        let (has, is_any_used) =
            (self.destage_buffers.has(id, bytes, stripes), self.destage_buffers.is_any_used());
        let destager = &mut self.disk_mut(id).destager;
        if has {
            // A free buffer for a short transfer does not show that a buffer for a long one is
            // free.
            destager.stripe_wait_until.take_if(|_| bytes >= least);
            return stripes;
        }
        let end = *destager.stripe_wait_until.get_or_insert(now + STRIPE_WAIT_NS_MAX);
        if is_any_used && now < end { stripes } else { kind.least() }
    }

    /// Flushes the backing, if a job slot is free.
    pub(super) fn flush_backing(&mut self, now: Instant, disk: DiskId) -> bool {
        if !self.has_job_at_once(disk) {
            return false;
        }
        let backed = &mut self.disk_mut(disk).backed;
        let (kind, doubts) = (JobKind::Flush(backed.begin_flush()), backed.doubts);
        let range = Range { disk, first: 0, end: 0 };
        let job = self.insert_job(Job {
            disk,
            kind,
            whole: range,
            range,
            pending: 0,
            step: Step::Flush,
            buffer: None,
            failed: false,
            doubts,
            units: ALL_UNITS,
        });
        self.disk_mut(disk).jobs += 1;
        self.issue(now, Owner::Job(job), disk, Target::Backing(disk), IoOp::Flush, (0, 0), None, 0);
        true
    }

    /// Returns true if a job with a range lock may start. Such a job leaves [`RESERVED`] slots
    /// free.
    pub(super) fn has_job_to_spare(&self, disk: DiskId) -> bool {
        self.job_slots.may_take(disk, u64::from(1 + RESERVED))
    }

    /// Returns true if a job without a range lock may start. A disk without such a job may start
    /// one even if the disk has used up its job slots. Otherwise a deadlock would be possible: the
    /// jobs in these slots may wait for a range lock that is released only after the new job has
    /// ended.
    fn has_job_at_once(&self, disk: DiskId) -> bool {
        let is_first = self.disk(disk).jobs_at_once == 0;
        self.jobs.len() < super::JOBS_MAX && (is_first || self.job_slots.may_take(disk, 1))
    }

    fn insert_job(&mut self, job: Job) -> u32 {
        self.job_slots.take(job.disk, 1);
        self.disk_mut(job.disk).jobs_at_once += u32::from(job.kind.is_at_once());
        self.jobs.insert(job)
    }

    /// Begins the job of a merged write. The member requests hold the locks of `range`.
    pub(super) fn begin_merged(&mut self, range: Range, buffer: DestageBuffer) -> u32 {
        let job = self.insert_job(Job {
            disk: range.disk,
            kind: JobKind::Merged,
            whole: range,
            range,
            pending: 0,
            step: Step::MergedWrite,
            buffer: Some(buffer),
            failed: false,
            doubts: 0,
            units: ALL_UNITS,
        });
        self.disk_mut(range.disk).jobs += 1;
        job
    }

    /// Starts a job that has its range lock or needs none. A transfer reads the first contiguous
    /// part of its range that is still dirty.
    pub(super) fn start_job(&mut self, now: Instant, job: u32) {
        let Job { disk: disk_id, range, kind, step, .. } = self.jobs[job];
        if step == Step::ExtraReady {
            return self.keep_extra(now, job);
        }
        let bytes = (range.end - range.first) * SECTOR_BYTES;
        let taken = match kind {
            JobKind::ReadAhead | JobKind::Verify | JobKind::ExtraFill(_) => {
                self.destage_buffers.take_spare(disk_id, bytes)
            }
            _ => {
                let least = self.least_buffer(now, kind, disk_id, bytes);
                self.destage_buffers.take(disk_id, bytes, least)
            }
        };
        let Some(mut buffer) = taken else {
            // Other jobs use all buffers. The destager tries this transfer again when one of these
            // jobs ends.
            return self.end_job(now, job, Ok(()));
        };
        self.jobs[job].buffer = Some(buffer);
        let capacity = buffer.sectors();
        let is_shortened = matches!(
            kind,
            JobKind::Maintenance(_) | JobKind::ReadAhead | JobKind::Verify | JobKind::ExtraFill(_)
        );
        if is_shortened {
            self.jobs[job].range.end = range.end.min(range.first + capacity);
        }
        match kind {
            JobKind::Maintenance(frame) => return self.start_maintenance(now, job, frame),
            JobKind::ReadAhead => return self.start_ahead(now, job),
            JobKind::ExtraFill(_) => return self.start_extra_fill(now, job),
            JobKind::Verify => return self.start_verify(now, job),
            JobKind::ReadEdge(..) => return self.start_edge(now, job),
            JobKind::ReadUnits(_) => return self.start_units(now, job),
            JobKind::Rewrite => return self.start_rewrite(now, job),
            _ => {}
        }
        let Engine { disks, runs, .. } = self;
        let disk = disks[disk_id.0 as usize].as_mut().expect("disks outlive their jobs");
        runs.clear();
        let (mut first, mut end) = (range.end, range.end);
        let stripe = u64::from(disk.stripe_bytes) / SECTOR_BYTES;
        if let (Some(cache), Some(journal), false) = (&disk.cache, &disk.journal, disk.holds) {
            let may_go =
                |sector: u64| cache.index.is_dirty(sector) && journal.may_destage(&cache.index, sector);
            'range: for span in cache.spans(range.first, range.end) {
                let start = (u64::from(span.block.0) << cache.block_shift()) + span.first;
                let found = cache.find(span);
                for i in 0..span.count {
                    // An incomplete sector is transferred alone.
                    let is_part = cache.index.part_in(start + i, start + i + 1).is_some();
                    if is_part && first < end {
                        break 'range;
                    }
                    let goes = |sector| may_go(sector) && kind.takes(&disk.lost, sector);
                    let is_dirty =
                        found.is_some_and(|sector| goes(sector + i)) && !disk.destager.is_moved(start + i);
                    match (is_dirty, first < end) {
                        (true, false) => (first, end) = (start + i, start + i + 1),
                        (true, true) if end == end_max(range, first, capacity, stripe) => break 'range,
                        (true, true) => end = start + i + 1,
                        (false, true) if first < range.end => break 'range,
                        (false, _) => continue,
                    }
                    let sector = found.expect("a dirty sector has a frame") + i;
                    push_run(runs, cache.extent(sector, 1), buffer.first_sector() + start + i - first);
                    if is_part {
                        self.jobs[job].units = cache.index.units(sector);
                        break 'range;
                    }
                }
            }
        }
        if runs.is_empty() {
            return self.end_job(now, job, Ok(()));
        }
        self.destage_buffers.shorten(&mut buffer, (end - first) * SECTOR_BYTES);
        let it = &mut self.jobs[job];
        (it.range.first, it.range.end, it.buffer) = (first, end, Some(buffer));
        it.step = Step::FlashRead;
        disk.jobs += 1;
        self.issue_runs_of(now, Owner::Job(job), disk_id, buffer.id, IoOp::Read);
    }

    /// Handles the end of a job's I/O.
    pub(super) fn job_io_done(
        &mut self,
        now: Instant,
        job: u32,
        io: &Pending,
        result: Result<(), IoError>,
        sums: &[u32],
    ) {
        self.jobs[job].pending -= 1;
        let Job { disk, range, step, buffer, kind, .. } = self.jobs[job];
        match (step, kind) {
            (Step::CareRead, JobKind::Maintenance(frame)) => {
                return self.maintenance_read_done(now, job, frame, io, result, sums);
            }
            (Step::MaintenanceWrite, _) => return self.maintenance_write_done(now, job, io, result, sums),
            (_, JobKind::Verify) => return self.verify_read_done(now, job, result, sums),
            (_, JobKind::ReadAhead) => return self.ahead_io_done(now, job, io, result, sums),
            (_, JobKind::ExtraFill(_)) => return self.extra_io_done(now, job, io, result, sums),
            (_, JobKind::Merged) => return self.merged_done(now, job, result),
            (_, JobKind::Rewrite) => return self.rewrite_io_done(now, job, io, result, sums),
            (_, JobKind::ReadEdge(..)) => return self.edge_io_done(now, job, io, result, sums),
            (_, JobKind::ReadUnits(slot)) => return self.units_io_done(now, job, slot, io, result, sums),
            _ => {}
        }
        match step {
            Step::FlashRead => {
                self.jobs[job].failed |= !self.check_dirty(now, disk, io, result, sums);
                if self.jobs[job].pending > 0 {
                    return;
                }
                if self.jobs[job].failed {
                    return self.end_job(now, job, Err(IoError::Failed));
                }
                self.jobs[job].step = Step::BackingWrite;
                self.jobs[job].doubts = self.disk(disk).backed.doubts;
                // Blocks that leave their segment must become clean, so their overwrites wait.
                if kind == JobKind::Destage && self.disk(disk).vacating.is_none() {
                    // The guest may overwrite flash now. Only other writes to the backing wait.
                    let blocks = self.disk(disk).blocks_of(range).expect("changes wait for transfers");
                    self.disk_mut(disk).destager.begin_write(range.first, range.end, blocks);
                    let runnable = &mut self.runnable;
                    let lock = self.limits.requests_max + job;
                    self.range_locks.permit_changes(lock, |granted| runnable.push_back(granted));
                }
                let end = (range.end * SECTOR_BYTES).min(self.disk(disk).config.size_bytes);
                let DestageBuffer { id, offset: start, .. } = buffer.expect("a transfer has a buffer");
                let at = range.first * SECTOR_BYTES;
                for (from, end) in bytes_to_destage(self.jobs[job].units, at, end) {
                    let (len, inside) = (end - from, (from - at) as u32);
                    let slice = Some(BufferSlice { id, offset: start + inside, len: len as u32 });
                    let op = IoOp::Write(Durability::Volatile);
                    self.issue(now, Owner::Job(job), disk, Target::Backing(disk), op, (from, len), slice, 0);
                }
            }
            Step::BackingWrite => {
                self.jobs[job].failed |= result.is_err();
                if self.jobs[job].pending == 0 {
                    let result = if self.jobs[job].failed { Err(IoError::Failed) } else { Ok(()) };
                    self.end_job(now, job, result);
                }
            }
            Step::Flush => self.end_job(now, job, result),
            step => panic!("I/O of a job in {step:?}"),
        }
    }

    pub(super) fn end_job(&mut self, now: Instant, job: u32, result: Result<(), IoError>) {
        let Job { disk, kind, whole, range, step, buffer, doubts, .. } = self.jobs.remove(job);
        let (moved, started) = (step == Step::BackingWrite, step != Step::Waiting);
        self.job_slots.give_back(disk, 1);
        let it = self.disk_mut(disk);
        it.jobs -= u32::from(started);
        it.jobs_at_once -= u32::from(kind.is_at_once());
        // After a failed flush or a reported loss, the backing may have lost data that was written
        // successfully.
        let believed = doubts == it.backed.doubts;
        buffer.iter().for_each(|piece| self.destage_buffers.give_back(piece));
        match kind {
            JobKind::Flush(upto) => self.backing_flushed(now, disk, upto, believed, result),
            JobKind::Destage | JobKind::Edges(_) => {
                self.transferred(now, disk, (range, whole), moved, believed, result)
            }
            JobKind::Maintenance(_) => self.maintenance_done(now, disk, job, result),
            JobKind::ReadAhead => self.ahead_done(job, whole, result),
            JobKind::Verify => self.verify_done(now, job, disk, result),
            JobKind::ExtraFill(_) => self.extra_fill_done(job, range, step),
            JobKind::Merged | JobKind::ReadEdge(..) | JobKind::ReadUnits(_) | JobKind::Rewrite => {}
        }
        match kind {
            JobKind::Destage => {
                self.disk_mut(disk).destager.end_transfer(whole.end - whole.first);
                let runnable = &mut self.runnable;
                self.range_locks.leave(self.limits.requests_max + job, |granted| runnable.push_back(granted));
                // Each waiting change checks again whether a transfer is in its way.
                let waiters = std::mem::take(&mut self.disk_mut(disk).destager.write_waiters);
                self.runnable.extend(waiters);
            }
            JobKind::Edges(slot) => self.edges_destaged(now, slot, moved, result),
            JobKind::ReadEdge(slot, _) => self.edge_done(slot, whole),
            JobKind::ReadUnits(slot) => self.units_read(now, slot, whole.first, result),
            JobKind::Flush(_)
            | JobKind::Maintenance(_)
            | JobKind::ReadAhead
            | JobKind::Verify
            | JobKind::ExtraFill(_)
            | JobKind::Rewrite
            | JobKind::Merged => {}
        }
        self.unsettled.push(disk);
        self.wake_all();
    }

    /// Compares dirty data that was read with its checksums. A wrong sector is read again from its
    /// second copy. Returns false if a wrong sector has no second copy.
    pub(super) fn check_dirty(
        &mut self,
        now: Instant,
        disk_id: DiskId,
        io: &Pending,
        result: Result<(), IoError>,
        sums: &[u32],
    ) -> bool {
        let disk = self.disks[disk_id.0 as usize].as_mut().expect("disks outlive their I/O");
        let cache = disk.cache.as_mut().expect("changes wait for flash I/O");
        let (mut good, mut lost) = (true, false);
        let (mut again, mut found) = (Vec::new(), Vec::new());
        for (i, sector) in (io.sector..io.sector + io.sectors).enumerate() {
            let right = result.is_ok() && cache.index.matches(sector, sums[i]);
            disk.stats.checksum_mismatches += u64::from(!right && result.is_ok());
            let first = cache.index.of_second(sector).unwrap_or(sector);
            let second = cache.index.second_sector(sector).filter(|second| cache.index.is_valid(*second));
            match second {
                _ if right && disk.lost.is_empty() => {}
                _ if right => found.push(first),
                Some(second) => again.push((cache.extent(second, 1), i as u64)),
                None => {
                    good = false;
                    // The sector may have become clean since the job began.
                    if cache.index.is_dirty(first) {
                        disk.lost.insert(first);
                        lost = true;
                    }
                }
            }
        }
        found.into_iter().for_each(|sector| disk.found_again(sector));
        for (extent, i) in again {
            let slice = io.slice.expect("a read has a buffer");
            let offset = slice.offset + (i * SECTOR_BYTES) as u32;
            let slice = Some(BufferSlice { offset, len: SECTOR_BYTES as u32, ..slice });
            let target = Target::Flash(extent.device);
            let at = (extent.offset, SECTOR_BYTES);
            self.issue(now, io.owner, disk_id, target, IoOp::Read, at, slice, extent.sector);
            self.disk_mut(disk_id).flash_in_flight += 1;
        }
        if lost {
            let sectors = self.disk(disk_id).lost.len() as u64;
            self.event_out.push_back(crate::command::Event::DirtyLost { disk: disk_id, sectors });
        }
        good
    }

    /// Wakes all destagers after buffers or job slots became free.
    pub(super) fn wake_all(&mut self) {
        for index in 0..self.disks.len() {
            if self.disks[index].as_ref().is_some_and(|disk| disk.journal.is_some()) {
                self.wake(DiskId(index as u32));
            }
        }
    }
}

/// Returns the end of the longest transfer that may start at `first`: its last sector plus one.
/// `sectors` is the size of the transfer's buffer. If the buffer is too short for the range, the
/// transfer ends at the end of a stripe.
fn end_max(range: Range, first: u64, sectors: u64, stripe: u64) -> u64 {
    let end = first + sectors;
    if end >= range.end {
        return range.end;
    }
    match end.checked_rem(stripe) {
        Some(beyond) if end - beyond > first => end - beyond,
        _ => end,
    }
}
