//! Maintenance of flash: compares cached data with its checksums (scrubbing), and restores missing
//! second copies.
//!
//! Frames are read one after the other under a lock of their block: a few per second, or all
//! without pauses while second copies are known to be missing. A clean sector with a wrong checksum
//! is dropped, so that the next read repairs it from the backing. A dirty sector with a wrong
//! checksum is destaged from its second copy. A second copy with a wrong checksum is dropped and
//! made again. For a dirty sector whose checksum the journal does not have, the checksum is
//! recorded.

use super::jobs::{Job, JobKind, Step};
use super::{Engine, Owner, Pending};
use crate::cache::{Cache, push_run};
use crate::command::Copies;
use crate::index::parts::ALL_UNITS;
use crate::io::{Durability, IoError, IoOp, Target};
use crate::journal::Change;
use crate::range_locks::{Kind, Range};
use crate::units::{BlockNo, DiskId, FrameNo, Instant, SECTOR_BYTES};

/// Time between bursts of maintenance, nanoseconds.
const PAUSE_NS: u64 = 1_000_000_000;

/// Number of frames that one call checks for missing second copies.
const STRIDE: u32 = 4096;

/// State of the maintenance of one cache.
#[derive(Debug, Default)]
pub(super) struct Maintenance {
    cursor: u32,
    /// Number of frames that remain to be read in the current burst.
    left: u32,
    /// Time at which the next burst begins; `None` before the first check.
    due: Option<Instant>,
    /// Number of frames that must still be checked because second copies may be missing.
    missing: u64,
    /// True if a second copy was missing since the check of all frames began.
    lacked: bool,
    is_busy: bool,
}

impl Maintenance {
    /// Starts a check of all frames for missing second copies.
    pub(super) fn look_for_missing(&mut self, frames: u32) {
        (self.missing, self.lacked) = (u64::from(frames), false);
    }

    /// Returns true if a complete check found no missing second copy. Data that became dirty since
    /// that check has two copies.
    pub(super) fn is_doubled(&self) -> bool {
        self.missing == 0 && !self.lacked && !self.is_busy
    }

    pub(super) fn deadline(&self) -> Option<Instant> {
        if self.is_busy { None } else { self.due }
    }
}

impl Cache {
    /// Returns true if the cache should have a second copy of this sector, and has none.
    fn lacks_second(&self, sector: u64) -> bool {
        let wanted = match self.config.copies {
            Copies::One => false,
            Copies::TwoOfDirty | Copies::Peer => self.index.is_dirty(sector),
            Copies::TwoOfAll => true,
        };
        let has = |second| self.index.is_valid(second) || !self.index.may_overwrite(second);
        let is_copied = self.index.is_valid(sector) && !self.index.is_unverified(sector);
        wanted && is_copied && !self.index.second_sector(sector).is_some_and(has)
    }

    fn sectors_of(&self, frame: FrameNo) -> std::ops::Range<u64> {
        let first = self.index.first_sector(frame);
        first..first + (1 << self.block_shift())
    }
}

impl Engine {
    /// Starts the maintenance of the next frame, if the time for it has come.
    pub(super) fn pump_maintenance(&mut self, now: Instant, id: DiskId) {
        let burst = self.limits.scrub_frames_per_s;
        let disk = self.disk_mut(id);
        let (Some(cache), Some(journal)) = (&disk.cache, &disk.journal) else { return };
        if disk.holds || disk.maintenance.is_busy || journal.dead || burst == 0 {
            return;
        }
        let maintenance = &mut disk.maintenance;
        let due = *maintenance.due.get_or_insert(now + PAUSE_NS);
        if due <= now {
            (maintenance.left, maintenance.due) = (burst, Some(now + PAUSE_NS));
        }
        let frames = cache.index.frames();
        let is_peer = cache.config.copies == Copies::Peer;
        for _ in 0..STRIDE {
            if maintenance.missing == 0 && std::mem::take(&mut maintenance.lacked) && is_peer {
                // The missing copies should exist now; a second check makes sure.
                (maintenance.missing, maintenance.due) = (u64::from(frames), Some(now + PAUSE_NS));
                return;
            }
            if maintenance.left == 0 && maintenance.missing == 0 {
                return;
            }
            maintenance.cursor = if maintenance.cursor + 1 >= frames { 0 } else { maintenance.cursor + 1 };
            let frame = FrameNo(maintenance.cursor);
            maintenance.missing = maintenance.missing.saturating_sub(1);
            let is_first = cache.index.first_of(frame).is_none();
            let lacks = is_first && cache.sectors_of(frame).any(|sector| cache.lacks_second(sector));
            let holds = cache.sectors_of(frame).any(|sector| cache.index.is_valid(sector));
            maintenance.lacked |= lacks;
            let in_burst = maintenance.left > 0;
            maintenance.left = maintenance.left.saturating_sub(1);
            if lacks || holds && in_burst {
                let BlockNo(block) = cache.index.block(frame);
                let shift = cache.block_shift();
                let sectors = disk.config.size_bytes.div_ceil(SECTOR_BYTES);
                let (first, end) = (u64::from(block) << shift, (u64::from(block) + 1) << shift);
                let range = Range { disk: id, first, end: end.min(sectors) };
                if disk.destager.is_writing(range.first, range.end) {
                    // The job would wait for the backing, and later writes of guests would wait for
                    // the job.
                    continue;
                }
                disk.maintenance.is_busy = true;
                if !self.transfer(now, JobKind::Maintenance(frame), range) {
                    self.disk_mut(id).maintenance.is_busy = false;
                }
                return;
            }
        }
        // The search for missing second copies continues soon.
        disk.maintenance.due = Some(now + PAUSE_NS / 100);
    }

    /// Starts the maintenance of a frame whose block is locked: reads the frame's sectors.
    pub(super) fn start_maintenance(&mut self, now: Instant, job: u32, frame: FrameNo) {
        let Job { disk: disk_id, range, buffer, .. } = self.jobs[job];
        let buffer = buffer.expect("a transfer has a buffer");
        let Engine { disks, runs, .. } = self;
        let disk = disks[disk_id.0 as usize].as_mut().expect("disks outlive their jobs");
        runs.clear();
        // While the job waited for its lock, the cache may have been removed and a volatile one
        // created.
        if let (Some(cache), true, false) = (&disk.cache, disk.journal.is_some(), disk.holds) {
            let is_same = frame.0 < cache.index.frames()
                && cache.index.block(frame).0 == (range.first >> cache.block_shift()) as u32
                && range.first.is_multiple_of(1 << cache.block_shift());
            let inside = range.end - range.first;
            for (i, sector) in
                cache.sectors_of(frame).enumerate().take(if is_same { inside as usize } else { 0 })
            {
                if cache.index.is_valid(sector) {
                    push_run(runs, cache.extent(sector, 1), buffer.first_sector() + i as u64);
                }
            }
        }
        if runs.is_empty() {
            return self.end_job(now, job, Ok(()));
        }
        disk.jobs += 1;
        self.jobs[job].step = Step::CareRead;
        self.issue_runs_of(now, Owner::Job(job), disk_id, buffer.id, IoOp::Read);
    }

    /// Handles the end of a read of some sectors of a frame.
    pub(super) fn maintenance_read_done(
        &mut self,
        now: Instant,
        job: u32,
        frame: FrameNo,
        io: &Pending,
        result: Result<(), IoError>,
        sums: &[u32],
    ) {
        let disk = self.disk_mut(io.disk);
        let (Some(cache), Some(journal)) = (&mut disk.cache, &mut disk.journal) else {
            panic!("the cache exists during its I/O")
        };
        disk.stats.scrubbed_bytes += io.bytes;
        let mut lost = false;
        let mut found = Vec::new();
        for (i, sector) in (io.sector..io.sector + io.sectors).enumerate() {
            let right = result.is_ok() && cache.index.matches(sector, sums[i]);
            let is_dirty = cache.index.is_dirty(sector);
            disk.stats.checksum_mismatches += u64::from(!right && result.is_ok());
            if right && disk.lost.contains(&sector) {
                found.push(sector);
            }
            if right && cache.index.is_unproven(sector) {
                journal.prove_sector(now, &mut cache.index, sector);
            } else if !right && (cache.index.of_second(sector).is_some() || !is_dirty) {
                journal.drop_sector(now, &mut cache.index, sector);
                disk.maintenance.look_for_missing(cache.index.frames());
            } else if !right {
                let second = cache.index.second_sector(sector);
                if second.is_some_and(|second| cache.index.is_valid(second)) {
                    disk.destager.hurry(cache.index.block(frame));
                } else {
                    lost |= disk.lost.insert(sector);
                }
            }
        }
        found.into_iter().for_each(|sector| disk.found_again(sector));
        if lost {
            let sectors = disk.lost.len() as u64;
            self.event_out.push_back(crate::command::Event::DirtyLost { disk: io.disk, sectors });
        }
        if self.jobs[job].pending == 0 {
            self.make_second_copies(now, job, frame);
        }
    }

    /// Writes the missing second copies from the buffer, which holds the frame.
    fn make_second_copies(&mut self, now: Instant, job: u32, frame: FrameNo) {
        let Job { disk: disk_id, range, buffer, .. } = self.jobs[job];
        let buffer = buffer.expect("a transfer has a buffer");
        let Engine { disks, runs, range_locks, .. } = self;
        let disk = disks[disk_id.0 as usize].as_mut().expect("disks outlive their jobs");
        let cache = disk.cache.as_mut().expect("the cache exists during its I/O");
        let is_busy = |first, end| range_locks.is_busy(&Range { disk: disk_id, first, end });
        runs.clear();
        if cache.index.first_of(frame).is_none() {
            for (i, sector) in cache.sectors_of(frame).enumerate().take((range.end - range.first) as usize) {
                if cache.lacks_second(sector) && !disk.lost.contains(&sector) {
                    let (Some(second), _) = cache.double(sector, is_busy) else { break };
                    if cache.index.may_overwrite(second) {
                        push_run(runs, cache.extent(second, 1), buffer.first_sector() + i as u64);
                    }
                }
            }
        }
        if let (Some(cache), Some(journal)) = (&mut disk.cache, &mut disk.journal) {
            journal.record_gone(now, cache);
        }
        if runs.is_empty() {
            return self.end_job(now, job, Ok(()));
        }
        self.jobs[job].step = Step::MaintenanceWrite;
        self.issue_runs_of(now, Owner::Job(job), disk_id, buffer.id, IoOp::Write(Durability::Volatile));
    }

    /// Handles the end of a write of some sectors of a frame's second copy.
    pub(super) fn maintenance_write_done(
        &mut self,
        now: Instant,
        job: u32,
        io: &Pending,
        result: Result<(), IoError>,
        sums: &[u32],
    ) {
        let disk = self.disk_mut(io.disk);
        let (Some(cache), Some(journal)) = (&mut disk.cache, &mut disk.journal) else {
            panic!("the cache exists during its I/O")
        };
        let Target::Flash(device) = io.target else { panic!("a flash write has a flash target") };
        journal.wrote(device);
        disk.stats.second_copy_bytes += io.bytes;
        for (i, sector) in (io.sector..io.sector + io.sectors).enumerate().filter(|_| result.is_ok()) {
            let first = cache.index.of_second(sector).expect("the sector is a second copy");
            // The copy of this sector is not usable if its checksum was wrong, or if it was dropped
            // during the read.
            if !cache.index.is_valid(first) || cache.index.sum(first) != sums[i] {
                continue;
            }
            let dirty = cache.index.is_dirty(first);
            let (frame, block, inside) = cache.index.locate(sector);
            cache.index.set_valid(sector, sums[i]);
            if dirty {
                cache.index.set_dirty(sector);
                cache.index.set_held(sector, true);
            }
            let (sum, units) = (sums[i], if dirty { cache.index.units(sector) } else { ALL_UNITS });
            let change = Change::Set { frame, block, sector: inside, sum, dirty, second: true, units };
            journal.record(now, change, None);
        }
        if self.jobs[job].pending == 0 {
            self.end_job(now, job, result);
        }
    }

    /// Handles the end of a frame's maintenance.
    pub(super) fn maintenance_done(
        &mut self,
        now: Instant,
        id: DiskId,
        job: u32,
        result: Result<(), IoError>,
    ) {
        let runnable = &mut self.runnable;
        self.range_locks.leave(self.limits.requests_max + job, |granted| runnable.push_back(granted));
        let maintenance = &mut self.disk_mut(id).maintenance;
        maintenance.is_busy = false;
        if result.is_err() {
            // After an error of flash, maintenance pauses for ten seconds.
            (maintenance.missing, maintenance.lacked) = (0, true);
            maintenance.due = Some(now + 10 * PAUSE_NS);
        }
        self.wake(id);
    }

    /// Locks the range of a job like the range of a read that fills.
    pub(super) fn lock_job_range(&mut self, job: u32, range: Range) -> bool {
        self.note_waiting_job(range);
        self.range_locks.acquire(self.limits.requests_max + job, range, Kind::Fill, Kind::Fill)
    }
}
