//! Fills: data that a read got from the backing, or that a write sent to the backing, is also
//! written to flash.
//!
//! A fill writes only invalid sectors, and reads use only valid sectors. So no flash sector is read
//! while it is written. A sector becomes valid when its flash write has completed.

use super::shared::is_shared;
use super::{Active, Engine, Limits, Pending, Phase};
use crate::admission::AdmissionEffect;
use crate::cache::{FlashRun, push_run};
use crate::command::{Copies, Mode, Role};
use crate::directory::{Placed, Refusal};
use crate::flash_budget::limit::Limit;
use crate::io::{Durability, IoError, IoOp, Op, Target};
use crate::outcome::Outcome;
use crate::range_locks::Range;
use crate::units::{Instant, SECTOR_BYTES};

impl Engine {
    /// Starts the flash writes of a request after its buffer has the disk's current data. If some
    /// of the data is not written to flash, the error gives the reason.
    pub(super) fn fill(&mut self, now: Instant, slot: u32) -> Result<(), Outcome> {
        let Active { request, range, run, not_admitted, .. } = self.requests[slot];
        let (first, end) = match request.op {
            Op::Write(_) => self.requests[slot].held_sectors(),
            _ => (range.first, range.end),
        };
        if request.passes_by() {
            return Err(Outcome::BypassNoPromote);
        }
        if !self.is_believed(slot) {
            return Err(Outcome::MissFlashBusy);
        }
        let effect = match request.op {
            Op::Pull => AdmissionEffect::Pulled,
            Op::Write(_) => AdmissionEffect::CleanWrite,
            _ => AdmissionEffect::Clean,
        };
        let bytes = (range.end - range.first) * SECTOR_BYTES;
        let shared = std::mem::take(&mut self.requests[slot].shared);
        // `at` is a sector number in the buffer.
        let is_elsewhere = |at, count| is_shared(&shared, range.first + at, range.first + at + count);
        let Engine { disks, range_locks, runs, .. } = self;
        let disk = disks[request.disk.0 as usize].as_mut().expect("disks outlive their requests");
        if disk.ownership.role == Role::Standby && request.op != Op::Pull {
            return Err(Outcome::BypassStandby);
        }
        let has_unawaited_marks = disk.journal.as_ref().is_some_and(|journal| journal.has_unawaited_marks);
        let limit = disk.flash_budget.limit();
        let cache = disk.serving()?;
        if has_unawaited_marks {
            return Err(Outcome::MissFlashBusy);
        }
        match (cache.config.mode, request.op) {
            (Mode::ReadOnlyCache | Mode::PassThrough, _) => return Err(Outcome::BypassMode),
            (Mode::WriteAround, Op::Write(_)) => return Err(Outcome::WriteNotCopied),
            _ => {}
        }
        let Limits { fill_bytes_max, requests_max, .. } = self.limits;
        if self.fill_bytes + bytes > fill_bytes_max || self.filling >= requests_max.div_ceil(2) {
            return Err(Outcome::MissFlashBusy);
        }
        let is_busy = |first, end| range_locks.is_busy(&Range { disk: request.disk, first, end });
        let is_doubled = cache.config.copies == Copies::TwoOfAll && cache.index.keeps_marks();
        cache.set_limit(if is_doubled { limit.map(Limit::of_two_copies) } else { limit });
        runs.clear();
        let mut refused = ((first, end) != (range.first, range.end)).then_some(Outcome::WriteNotCopied);
        let mut evicted = 0;
        let mut seconds: Vec<FlashRun> = Vec::new();
        let mut buffer_sector = first - range.first;
        for span in cache.spans(first, end) {
            if is_elsewhere(buffer_sector, span.count) {
                buffer_sector += span.count;
                continue;
            }
            let found = cache.find(span);
            let has_share =
                found.is_some() || cache.keep_to_read_share(is_busy).map(|gone| evicted += gone).is_ok();
            // Once the cache has found no block to evict for this request, it does not search again
            // for the rest of the request.
            let brought = if found.is_none() && not_admitted {
                Err(Refusal::Unproven)
            } else if !has_share || found.is_none() && refused == Some(Outcome::MissNoBlock) {
                Err(Refusal::NoBlock)
            } else {
                cache.bring(span, found, (run, effect), is_busy)
            };
            match brought {
                Ok(Placed { sector, evicted: gone }) => {
                    evicted += gone;
                    let (second, gone) = if is_doubled { cache.double(sector, is_busy) } else { (None, 0) };
                    evicted += gone;
                    let mut filled = 0;
                    for (copy, runs) in [(Some(sector), &mut *runs), (second, &mut seconds)] {
                        let Some(copy) = copy else { continue };
                        let may = |i: &u64| {
                            !cache.index.is_valid(copy + i)
                                && cache.index.may_overwrite(copy + i)
                                && !is_elsewhere(buffer_sector + i, 1)
                        };
                        for i in (0..span.count).filter(may) {
                            push_run(runs, cache.extent(copy + i, 1), buffer_sector + i);
                            filled += 1;
                        }
                    }
                    // Both copies of this block are charged before the budget decides about the
                    // next block.
                    if effect != AdmissionEffect::Pulled {
                        cache.charge(filled);
                    }
                }
                Err(refusal) => refused = Some(refusal.into()),
            }
            buffer_sector += span.count;
        }
        runs.append(&mut seconds);
        let charged = cache.charged();
        if let (Some(cache), Some(journal)) = (&mut disk.cache, &mut disk.journal) {
            journal.record_gone(now, cache);
        }
        // After a wrong checksum or a loss on the backing, a sector may be invalid while another
        // request is still reading it from flash.
        let before = sectors_of(runs);
        runs.retain(|FlashRun { extent, buffer_sector }| {
            let first = range.first + buffer_sector;
            !range_locks.is_shared(slot, &Range { disk: request.disk, first, end: first + extent.count })
        });
        let dropped = before - sectors_of(runs);
        disk.flash_budget.add(charged, dropped);
        if dropped > 0 {
            refused = Some(Outcome::MissFlashBusy);
        }
        if evicted > 0 {
            disk.record_eviction(now, evicted);
        }
        self.requests[slot].phase = Phase::Fill;
        self.requests[slot].fill_bytes = bytes;
        self.fill_bytes += bytes;
        self.filling += 1;
        self.issue_runs(now, slot, IoOp::Write(Durability::Volatile));
        refused.map_or(Ok(()), Err)
    }

    /// Ends an answered request, unless flash writes of its fill are in flight.
    pub(super) fn finish_unless_filling(&mut self, slot: u32) {
        if self.requests[slot].pending == 0 {
            self.finish(slot);
        }
    }

    pub(super) fn fill_done(
        &mut self,
        now: Instant,
        slot: u32,
        io: &Pending,
        result: Result<(), IoError>,
        sums: &[u32],
    ) {
        let believed = self.is_believed(slot);
        self.note_filled(now, io, result, believed, sums);
        self.finish_unless_filling(slot);
    }

    /// Handles the end of a flash write of data from the backing. If the backing may have lost this
    /// data, the sectors stay invalid.
    pub(super) fn note_filled(
        &mut self,
        now: Instant,
        io: &Pending,
        result: Result<(), IoError>,
        believed: bool,
        sums: &[u32],
    ) {
        let disk = self.disk_mut(io.disk);
        let index = &mut disk.cache.as_mut().expect("changes wait for flash I/O").index;
        if let (Some(journal), Target::Flash(device)) = (&mut disk.journal, io.target) {
            journal.wrote(device);
        }
        if result.is_ok() && believed {
            assert_eq!(sums.len() as u64, io.sectors, "one checksum for each sector written");
            for (sector, sum) in (io.sector..).zip(sums) {
                index.set_valid(sector, *sum);
            }
            if let Some(journal) = &mut disk.journal {
                journal.record_filled(now, index, io.sector, sums);
            }
            self.wake(io.disk);
        }
    }
}

/// Returns the total number of sectors in `runs`.
pub(super) fn sectors_of(runs: &[FlashRun]) -> u64 {
    runs.iter().map(|run| run.extent.count).sum()
}

impl From<Refusal> for Outcome {
    fn from(refusal: Refusal) -> Outcome {
        match refusal {
            Refusal::Sequential => Outcome::MissSequential,
            Refusal::Unproven => Outcome::MissUnproven,
            Refusal::NoBlock => Outcome::MissNoBlock,
            Refusal::FlashBudget => Outcome::MissFlashBudget,
        }
    }
}
