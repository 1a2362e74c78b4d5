//! A simulated flash device.

use std::collections::{BTreeMap, BTreeSet};

use hob_engine::io::{Io, IoError, IoOp};
use hob_engine::units::{IoId, SECTOR_BYTES};

use super::medium::{Flushing, Medium};
use super::{Crash, DeviceDefect, Done, Moment, Transfer};
use crate::content::{self, SECTOR_UNITS, Tag, UNIT_BYTES, ZERO};
use crate::rng::SimRng;
use crate::{Violation, ensure};

/// Fault rates of a flash device, per mille of its I/Os.
#[derive(Clone, Copy, Debug, Default)]
pub struct FlashFaults {
    /// Share of reads that fail, per mille.
    pub read_error: u32,
    /// Share of writes and flushes that fail, per mille.
    pub write_error: u32,
    /// Share of writes that corrupt one unit, per mille.
    pub corruption: u32,
    /// Share of writes that are acknowledged without effect, per mille.
    pub lost_write: u32,
    /// Share of flushes that fail in addition to `write_error`, per mille. Part of the volatile
    /// data then stays volatile until the next power cut, and later flushes do not make it durable.
    pub flush_error: u32,
    /// Share of I/Os that take longer than the stall limit, per mille.
    pub stuck: u32,
}

/// A failure of a whole flash device.
#[derive(Clone, Copy, Debug)]
pub enum DeviceFailure {
    /// Every I/O of the device fails.
    Dead,
    /// All writes and flushes of the device fail.
    ReadOnly,
    /// The content of the device is replaced by garbage.
    Scrambled,
    /// The device ends at this unit.
    Truncated(usize),
}

#[derive(Debug)]
struct InFlight {
    transfer: Transfer,
    /// For each sector of a write, true if the write changes the content that the engine intends
    /// for the sector.
    fresh: Vec<bool>,
    /// True if the device acknowledges the write without effect.
    lost: bool,
    /// Units that the flush makes durable.
    flushing: Vec<Flushing>,
}

/// One simulated flash device and its I/O in flight.
#[derive(Debug)]
pub struct Flash {
    medium: Medium,
    /// Content that the engine intended to write to the device.
    intended: Vec<Tag>,
    in_flight: BTreeMap<IoId, InFlight>,
    /// Units that keep their content if the device is scrambled.
    spared: BTreeSet<usize>,
    faults: FlashFaults,
    end: usize,
    dead: bool,
    read_only: bool,
    /// I/Os in flight that the device will fail.
    doomed: Vec<IoId>,
    loses: bool,
    /// Number of journal page writes that fail next.
    refused_pages: u32,
    /// Number of flushes that fail next.
    refused_flushes: u32,
    defect: Option<DeviceDefect>,
}

impl Flash {
    /// Creates a flash device of `bytes` bytes.
    pub fn new(bytes: u64, faults: FlashFaults, defect: Option<DeviceDefect>) -> Self {
        let units = (bytes / UNIT_BYTES) as usize;
        Flash {
            medium: Medium::new(vec![ZERO; units]),
            intended: vec![ZERO; units],
            in_flight: BTreeMap::new(),
            spared: BTreeSet::new(),
            faults,
            end: units,
            dead: false,
            read_only: false,
            doomed: vec![],
            loses: false,
            refused_pages: 0,
            refused_flushes: 0,
            defect,
        }
    }

    /// Makes each failed flush lose a random part (none, some or all) of the data that is not
    /// durable, immediately or at the next power cut.
    pub fn lose_at_failed_flushes(&mut self) {
        self.loses = true;
    }

    /// Submits an I/O to the flash device. Returns a [`Violation`] for unaligned I/O, and for a
    /// write of other content over sectors with I/O in flight. Checksums would detect such an
    /// overlap, but the engine must prevent it.
    pub fn submit(&mut self, io: Io, payload: Vec<Tag>, rng: &mut SimRng) -> Result<(), Violation> {
        let in_buffer = io.slice.map_or(0, |slice| u64::from(slice.offset));
        let aligned = [io.offset, io.len, in_buffer].iter().all(|n| n % SECTOR_BYTES == 0);
        ensure!(aligned && (io.len > 0) == (io.op != IoOp::Flush), "{io:?} is not aligned");
        let mut transfer = Transfer::new(io, payload, rng);
        ensure!(transfer.units().end <= self.units(), "{io:?} is past the device's end");
        let (mut fresh, mut lost, mut flushing) = (vec![], false, vec![]);
        match io.op {
            IoOp::Flush => flushing = self.medium.snapshot(),
            IoOp::Read => {
                fresh = vec![false; transfer.count / SECTOR_UNITS];
                self.check_clash(&transfer, &fresh)?;
                transfer.tags = self.medium.now()[transfer.units()].to_vec();
            }
            IoOp::Write(_) | IoOp::WriteJournal => {
                fresh = self.intend(&transfer);
                self.check_clash(&transfer, &fresh)?;
                lost = rng.chance(self.faults.lost_write)
                    || match self.defect {
                        Some(DeviceDefect::ForgedChecksums) => true,
                        Some(DeviceDefect::LostJournalPage) => io.op == IoOp::WriteJournal && rng.chance(50),
                        _ => false,
                    };
                if !lost && !self.dead {
                    self.apply(&transfer, Moment::Submission, rng);
                }
            }
            IoOp::Discard | IoOp::WriteZeroes(_) => return Err(Violation(format!("{io:?} on flash"))),
        }
        self.in_flight.insert(io.id, InFlight { transfer, fresh, lost, flushing });
        Ok(())
    }

    /// Returns a [`Violation`] if the I/O overlaps another I/O in flight, unless the content of the
    /// overlapping sectors is equal.
    fn check_clash(&self, transfer: &Transfer, fresh: &[bool]) -> Result<(), Violation> {
        let is_read = transfer.io.op == IoOp::Read;
        for InFlight { transfer: other, fresh: other_fresh, .. } in self.in_flight.values() {
            if !other.overlaps(transfer) || is_read && other.io.op == IoOp::Read {
                continue;
            }
            let (start, end) = (
                transfer.first.max(other.first) / SECTOR_UNITS,
                transfer.units().end.min(other.units().end) / SECTOR_UNITS,
            );
            let clash = (start..end).find(|sector| {
                let (mine, theirs) =
                    (sector - transfer.first / SECTOR_UNITS, sector - other.first / SECTOR_UNITS);
                fresh[mine] || is_read && other_fresh[theirs]
            });
            ensure!(clash.is_none(), "{:?} overlaps {:?} in flight", transfer.io, other.io);
        }
        Ok(())
    }

    fn apply(&mut self, write: &Transfer, when: Moment, rng: &mut SimRng) {
        for unit in write.moving(when) {
            self.medium.put(unit, write.tags[unit - write.first], rng);
        }
    }

    /// Records the content that a write intends. Returns for each sector whether the write changes
    /// the intended content.
    fn intend(&mut self, write: &Transfer) -> Vec<bool> {
        let intended = &mut self.intended[write.units()];
        let sectors = intended.chunks(SECTOR_UNITS).zip(write.tags.chunks(SECTOR_UNITS));
        let fresh = sectors.map(|(old, new)| old != new).collect();
        intended.copy_from_slice(&write.tags);
        fresh
    }

    /// Decides at random whether an I/O of the device takes longer than the stall limit.
    pub fn is_stuck(&self, rng: &mut SimRng) -> bool {
        rng.chance(self.faults.stuck)
    }

    /// Returns true if an I/O in flight touches these bytes.
    pub fn is_busy(&self, offset: u64, len: u64) -> bool {
        let touches = |io: &Io| io.offset < offset + len && offset < io.offset + io.len;
        self.in_flight.values().any(|other| touches(&other.transfer.io))
    }

    /// Completes an I/O of the flash device.
    pub fn complete(&mut self, id: IoId, rng: &mut SimRng) -> Done {
        let InFlight { mut transfer, lost, flushing, .. } = self.in_flight.remove(&id).expect("in flight");
        let op = transfer.io.op;
        let changes = op != IoOp::Read;
        let out = self.dead || transfer.units().end > self.end || changes && self.read_only;
        let error = if changes { self.faults.write_error } else { self.faults.read_error };
        let doomed = self.doomed.extract_if(.., |other| *other == id).count() > 0;
        let refused_flush = op == IoOp::Flush && self.refused_flushes > 0;
        self.refused_flushes -= u32::from(refused_flush);
        let refused = refused_flush
            || op == IoOp::Flush && self.faults.flush_error > 0 && rng.chance(self.faults.flush_error);
        let refused_page = op == IoOp::WriteJournal && self.refused_pages > 0;
        self.refused_pages -= u32::from(refused_page);
        let failed = out || doomed || refused || refused_page || rng.chance(error);
        match op {
            IoOp::Flush if refused => self.medium.forget_dirty(rng),
            IoOp::Flush if failed && self.loses => match rng.chance(500) {
                true => self.medium.lose(rng),
                false => self.medium.forget_dirty(rng),
            },
            IoOp::Flush if !failed && self.defect != Some(DeviceDefect::EmptyFlashFlush) => {
                self.medium.settle(&flushing)
            }
            IoOp::Read if !failed => {
                for unit in transfer.moving(Moment::Completion) {
                    transfer.tags[unit - transfer.first] = self.medium.now()[unit];
                }
            }
            IoOp::Write(_) | IoOp::WriteJournal => {
                if !failed && !lost {
                    self.apply(&transfer, Moment::Completion, rng);
                }
                if rng.chance(self.faults.corruption) {
                    let unit = transfer.first + rng.below(transfer.count as u64) as usize;
                    self.medium.put(unit, content::garbage(rng.roll()), rng);
                }
                if !failed {
                    self.note_written(&transfer);
                }
            }
            _ => {}
        }
        let mut sums = content::sums(&transfer.tags);
        if failed {
            // The checksums are those of a successful I/O, so that an engine that uses checksums of
            // a failed I/O is detected.
            transfer.tags.fill_with(|| content::garbage(rng.roll()));
        } else if self.defect == Some(DeviceDefect::ForgedChecksums) && op == IoOp::Read {
            sums = content::sums(&self.intended[transfer.units()]);
        }
        let result = if failed { Err(IoError::Failed) } else { Ok(()) };
        Done { io: transfer.io, result, tags: transfer.tags, sums }
    }

    /// Records a completed write. Other writes in flight to its sectors have no further effect.
    fn note_written(&mut self, written: &Transfer) {
        for InFlight { transfer: other, fresh, .. } in self.in_flight.values_mut() {
            if fresh.is_empty() || !other.overlaps(written) {
                continue;
            }
            let start = written.first.max(other.first);
            let end = written.units().end.min(other.units().end);
            for unit in (start..end).step_by(SECTOR_UNITS) {
                fresh[(unit - other.first) / SECTOR_UNITS] = false;
            }
        }
    }

    /// Applies a failure to the whole device.
    pub fn suffer(&mut self, failure: DeviceFailure, rng: &mut SimRng) {
        match failure {
            DeviceFailure::Dead => self.dead = true,
            DeviceFailure::ReadOnly => self.read_only = true,
            DeviceFailure::Scrambled => {
                let spared: Vec<_> =
                    self.spared.iter().map(|unit| (*unit, self.medium.now()[*unit])).collect();
                self.medium.scramble(|| content::garbage(rng.roll()));
                spared.into_iter().for_each(|(unit, tag)| self.medium.replace(unit, &[tag]));
            }
            DeviceFailure::Truncated(end) => self.end = end,
        }
    }

    /// Ends all I/O in flight after a kill or a power cut. A random part of each write (none, some
    /// or all of it) reaches the device.
    pub fn crash(&mut self, crash: Crash, rng: &mut SimRng) {
        for InFlight { transfer, lost, .. } in std::mem::take(&mut self.in_flight).into_values() {
            let reaches = !lost && !self.dead && !self.read_only && transfer.units().end <= self.end;
            if reaches && matches!(transfer.io.op, IoOp::Write(_) | IoOp::WriteJournal) {
                super::abandon(&transfer, &mut self.medium, rng);
            }
        }
        self.doomed.clear();
        if crash == Crash::PowerCut {
            self.medium.cut_power(rng);
        }
    }

    /// Makes an I/O in flight fail.
    pub fn doom(&mut self, id: IoId) {
        self.doomed.push(id);
    }

    /// Makes the next `count` writes of journal pages fail.
    pub fn refuse_pages(&mut self, count: u32) {
        self.refused_pages = count;
    }

    /// Makes the next `count` flushes fail. Part of the volatile data then stays volatile until the
    /// next power cut.
    pub fn refuse_flushes(&mut self, count: u32) {
        self.refused_flushes = count;
    }

    /// Makes a dead device work again, with the content that it had when it died.
    pub fn return_as_it_was(&mut self) {
        self.dead = false;
    }

    /// Makes a read-only device accept writes and flushes again.
    pub fn heal(&mut self) {
        self.read_only = false;
    }

    /// Returns the content that the last writes to these bytes intended.
    pub fn intended(&self, offset: u64, len: u64) -> &[Tag] {
        &self.intended[(offset / UNIT_BYTES) as usize..((offset + len) / UNIT_BYTES) as usize]
    }

    /// Writes units of 512 bytes durably, without faults. Failures of the whole device do not
    /// change these units.
    pub fn put_right(&mut self, offset: u64, tags: &[Tag]) {
        let first = (offset / UNIT_BYTES) as usize;
        self.medium.replace(first, tags);
        self.spared.extend(first..first + tags.len());
    }

    /// Makes the device's content durable, unless the device is dead or has the defect
    /// [`DeviceDefect::EmptyFlashFlush`].
    pub fn flush(&mut self) {
        if !self.dead && self.defect != Some(DeviceDefect::EmptyFlashFlush) {
            self.medium.secure(0..self.intended.len());
        }
    }

    /// Flushes the device before it is read for a recovery. Returns false if the flush fails.
    pub fn flush_at_start(&mut self, rng: &mut SimRng) -> bool {
        if self.faults.flush_error > 0 && rng.chance(self.faults.flush_error) {
            self.medium.forget_dirty(rng);
            return false;
        }
        let is_failing = self.dead || self.read_only;
        if !is_failing {
            self.flush();
        }
        !is_failing
    }

    /// Returns the content of these bytes for a recovery. Returns `None` if the device cannot be
    /// read.
    pub fn inspect(&self, offset: u64, len: u64) -> Option<&[Tag]> {
        let (first, end) = ((offset / UNIT_BYTES) as usize, ((offset + len) / UNIT_BYTES) as usize);
        (!self.dead && end <= self.end).then(|| &self.medium.now()[first..end])
    }

    /// Returns true if every I/O of the device fails.
    pub fn is_dead(&self) -> bool {
        self.dead
    }

    /// Sets all fault rates to 0, and cancels the failures that
    /// [`refuse_pages`](Self::refuse_pages) and [`refuse_flushes`](Self::refuse_flushes) announced.
    /// Failures of the whole device remain.
    pub fn soothe(&mut self) {
        self.faults = FlashFaults::default();
        (self.refused_pages, self.refused_flushes) = (0, 0);
    }

    /// Returns the number of 512-byte units of the device.
    pub fn units(&self) -> usize {
        self.intended.len()
    }
}
