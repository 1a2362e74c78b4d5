//! Writes the journal tail of a recovered cache again.
//!
//! After a failed flush, reads of a flash device may return data that no later flush makes durable
//! and that a power failure loses. A process that starts after the failed flush cannot detect this
//! state. The journal records up to the last known commit are durable, and so is their data. The
//! later records are the tail. The data of the tail is readable, but perhaps not durable. So this
//! data is written again, in place, before a new journal ring records it as durable. The commit of
//! the new journal ring flushes the data.

use super::jobs::{Job, JobKind, Step};
use super::{Engine, Owner, Pending};
use crate::cache::push_run;
use crate::io::{BufferSlice, Durability, IoError, IoOp, Target};
use crate::range_locks::Range;
use crate::units::{DiskId, Instant, SECTOR_BYTES};

/// Maximum number of sectors in a job. Each sector may need a separate I/O.
const SECTORS_MAX: u64 = 64;

impl Engine {
    /// Continues to write the tail's data again. Returns true when all of this data has been
    /// written.
    pub(super) fn rewrite_tail(&mut self, now: Instant, id: DiskId) -> bool {
        loop {
            let disk = self.disk_mut(id);
            let (Some(cache), Some(journal)) = (&disk.cache, &mut disk.journal) else { return true };
            journal.rewrite.retain(|sector| cache.index.is_dirty(*sector));
            let count = journal.rewrite.len() as u64;
            if count == 0 || disk.flash_in_flight > 0 {
                return count == 0 && disk.flash_in_flight == 0;
            }
            let range = Range { disk: id, first: 0, end: count.min(SECTORS_MAX) };
            if !self.transfer(now, JobKind::Rewrite, range) {
                return false;
            }
        }
    }

    /// Starts a job that has received its buffer: reads from flash as many sectors of the tail as
    /// the buffer holds.
    pub(super) fn start_rewrite(&mut self, now: Instant, job: u32) {
        let Job { disk: id, range, buffer, .. } = self.jobs[job];
        let buffer = buffer.expect("a transfer has a buffer");
        let Engine { disks, runs, .. } = self;
        let disk = disks[id.0 as usize].as_mut().expect("disks outlive their jobs");
        let (Some(cache), Some(journal)) = (&disk.cache, &mut disk.journal) else {
            panic!("a cache is being opened")
        };
        runs.clear();
        let count = (range.end - range.first).min(buffer.sectors()) as usize;
        for (i, sector) in journal.rewrite.drain(..count).enumerate() {
            push_run(runs, cache.extent(sector, 1), buffer.first_sector() + i as u64);
        }
        disk.jobs += 1;
        self.jobs[job].step = Step::Rewrite;
        self.issue_runs_of(now, Owner::Job(job), id, buffer.id, IoOp::Read);
    }

    /// Handles the end of a read: writes those sectors again whose checksums are right. An unknown
    /// checksum becomes known, so that later reads detect a damaged write. Sectors with a wrong
    /// checksum stay unchanged.
    pub(super) fn rewrite_io_done(
        &mut self,
        now: Instant,
        job: u32,
        io: &Pending,
        result: Result<(), IoError>,
        sums: &[u32],
    ) {
        let Target::Flash(device) = io.target else { panic!("flash is written again") };
        let disk = self.disk_mut(io.disk);
        let (Some(cache), Some(journal)) = (&mut disk.cache, &mut disk.journal) else {
            panic!("a cache is being opened")
        };
        if io.is_write {
            journal.wrote(device);
        } else if result.is_ok() {
            let index = &mut cache.index;
            let right: Vec<bool> =
                (io.sector..).zip(sums).map(|(sector, sum)| index.matches(sector, *sum)).collect();
            self.write_again(now, io, &right);
        }
        if self.jobs[job].pending == 0 {
            self.end_job(now, job, Ok(()));
        }
    }

    /// Writes those sectors of a read again for which `right` is true.
    fn write_again(&mut self, now: Instant, io: &Pending, right: &[bool]) {
        let slice = io.slice.expect("the read had a buffer");
        let mut first = 0;
        for run in right.chunk_by(|a, b| a == b) {
            let (sector, before) = (io.sector + first, (first * SECTOR_BYTES) as u32);
            first += run.len() as u64;
            if !run[0] {
                continue;
            }
            let len = run.len() as u64 * SECTOR_BYTES;
            let disk = self.disk_mut(io.disk);
            let cache = disk.cache.as_ref().expect("a cache is being opened");
            let offset = cache.extent(sector, run.len() as u64).offset;
            disk.flash_in_flight += 1;
            let slice = BufferSlice { offset: slice.offset + before, len: len as u32, ..slice };
            let op = IoOp::Write(Durability::Volatile);
            self.issue(now, io.owner, io.disk, io.target, op, (offset, len), Some(slice), sector);
        }
    }
}
