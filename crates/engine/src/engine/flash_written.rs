//! The end of a request's writes to flash: records which data flash has now, or may have after a
//! failed write.

use super::{Active, Engine, Pending, Phase};
use crate::index::parts::ALL_UNITS;
use crate::io::{IoError, Target};
use crate::outcome::Outcome;
use crate::units::{DiskId, Instant};

impl Engine {
    /// Handles the end of one flash write of a request.
    pub(super) fn flash_write_done(
        &mut self,
        now: Instant,
        slot: u32,
        io: &Pending,
        result: Result<(), IoError>,
        sums: &[u32],
    ) {
        let Active { request, range, pending, .. } = self.requests[slot];
        let Target::Flash(device) = io.target else { panic!("a flash write has a flash target") };
        let journal = self.journal_mut(request.disk).expect("changes wait for flash I/O");
        journal.wrote(device);
        if result.is_ok() {
            assert_eq!(sums.len() as u64, io.sectors, "one checksum for each sector written");
            self.requests[slot].written.extend((io.sector..).zip(sums.iter().copied()));
        } else {
            self.record_lapsed(now, request.disk, io.sector..io.sector + io.sectors);
            self.forget_part_sums(request.disk, io.sector..io.sector + io.sectors);
            self.requests[slot].failed = true;
        }
        if pending > 0 {
            return;
        }
        self.record_written(now, slot);
        self.end_parts(slot);
        self.note_dirty(now, request.disk, range.first, range.end);
        let disk = self.disk_mut(request.disk);
        disk.flash_writes -= 1;
        disk.has_old_single_writes &= disk.flash_writes > 0;
        if self.requests[slot].failed {
            return self.change_past_cache(now, slot);
        }
        self.keep_recent_edges(slot);
        self.give_back_zeroes(slot);
        self.requests[slot].outcome = Outcome::WriteBack;
        // If the process is killed, a guest that reconnects expects to read the acknowledged write.
        let is_dead = self.disk(request.disk).journal.as_ref().is_some_and(|journal| journal.dead);
        if request.op.is_durable_change() || is_dead || !self.disk_mut(request.disk).save_records() {
            self.requests[slot].phase = Phase::CommitThenReply;
            self.commit(slot);
        } else {
            self.end_written(now, slot, Ok(()));
        }
    }

    /// Handles the end of all flash writes of a request. The journal records of a sector's two
    /// copies are made together, after both writes have ended. If the journal had the record of
    /// only one copy after a crash, this copy might be the damaged one.
    fn record_written(&mut self, now: Instant, slot: u32) {
        let Active { request, failed, .. } = self.requests[slot];
        let mut written = std::mem::take(&mut self.requests[slot].written);
        let Engine { disks, requests, .. } = self;
        let disk = disks[request.disk.0 as usize].as_mut().expect("disks outlive their requests");
        written.iter().for_each(|(sector, _)| _ = disk.lost.remove(sector));
        let (journal, index) = disk.journal_and_index().expect("changes wait for flash I/O");
        journal.urgent = true;
        journal.schedule.wrote();
        let is_second = |frame| index.first_of(frame).is_some();
        written.sort_unstable_by_key(|(sector, _)| {
            let (frame, block, inside) = index.locate(*sector);
            (block, inside, is_second(frame))
        });
        if failed {
            // The write of the other copy failed, so that copy has unknown content. It gets the
            // checksum of the new data, so that its old content counts as damaged.
            let is_written = |sector: u64| written.iter().any(|(other, _)| *other == sector);
            for (sector, sum) in &written {
                let twin = index.second_sector(*sector).or(index.of_second(*sector));
                if let Some(twin) = twin.filter(|twin| index.is_unproven(*twin) && !is_written(*twin)) {
                    index.set_valid(twin, *sum);
                }
            }
        }
        let active = &requests[slot];
        let rewritten = if failed { Vec::new() } else { active.rewritten_units(index, &written) };
        for (sector, sum) in written {
            if index.is_unproven(sector) {
                index.set_valid(sector, sum);
                journal.overwrites.end(now, sector);
            } else if failed {
                journal.record_void(now, index, sector..sector + 1);
            } else {
                index.set_valid(sector, sum);
                index.set_dirty(sector);
                index.set_held(sector, true);
                active.note_units(index, sector);
                journal.record_dirty(now, index, sector);
            }
        }
        for (units, sectors) in rewritten {
            journal.record_units(now, index, units, &sectors);
        }
    }

    /// Records that sectors of a failed flash write have unknown content now, if they were not
    /// valid before the write.
    fn record_lapsed(&mut self, now: Instant, disk: DiskId, sectors: std::ops::Range<u64>) {
        let (journal, index) = self.disk_mut(disk).journal_and_index().expect("changes wait for flash I/O");
        let void = sectors.filter(|sector| !index.is_valid(*sector));
        void.for_each(|sector| journal.record_void(now, index, sector..sector + 1));
    }

    /// Forgets the checksums of incomplete sectors whose overwrite failed, because flash may have
    /// the old or the new content. The bytes of the units that flash had before the overwrite are
    /// the same in both. If an earlier read found wrong content, the sector keeps its checksum and
    /// stays lost.
    fn forget_part_sums(&mut self, disk: DiskId, sectors: std::ops::Range<u64>) {
        let disk = self.disk_mut(disk);
        let lost = std::mem::take(&mut disk.lost);
        let (_, index) = disk.journal_and_index().expect("changes wait for flash I/O");
        let is_part = |sector: &u64| {
            let first = index.of_second(*sector).unwrap_or(*sector);
            index.is_unproven(*sector) && index.units(*sector) != ALL_UNITS && !lost.contains(&first)
        };
        let parts: Vec<u64> = sectors.filter(is_part).collect();
        parts.into_iter().for_each(|sector| index.forget_sum(sector));
        disk.lost = lost;
    }
}
