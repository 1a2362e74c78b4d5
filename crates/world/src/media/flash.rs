//! A flash device.

use std::collections::{BTreeMap, BTreeSet};

use hob_engine::io::{Io, IoError, IoOp};
use hob_engine::units::{IoId, SECTOR_BYTES};

use super::medium::{Flushing, Medium};
use super::{Crash, Done, Lie, Moment, Transfer};
use crate::content::{self, SECTOR_UNITS, Tag, UNIT_BYTES, ZERO};
use crate::dice::Dice;
use crate::{Violation, ensure};

/// How often something goes wrong, per mille of the I/Os.
#[derive(Clone, Copy, Debug, Default)]
pub struct FlashFaults {
    /// A read fails.
    pub read_error: u32,
    /// A write fails.
    pub write_error: u32,
    /// A write leaves one unit wrong.
    pub corruption: u32,
    /// A write is acknowledged and does nothing.
    pub lost_write: u32,
    /// An I/O takes longer than the stall limit.
    pub stuck: u32,
}

/// What happens to a whole device.
#[derive(Clone, Copy, Debug)]
pub enum Ailment {
    /// Every I/O fails.
    Dead,
    /// Writes fail.
    ReadOnly,
    /// Its content is replaced by garbage.
    Scrambled,
    /// It ends at this unit.
    Truncated(usize),
}

#[derive(Debug)]
struct InFlight {
    transfer: Transfer,
    /// Of a write: for each sector, does it change what is meant to be there?
    fresh: Vec<bool>,
    /// A write that is acknowledged and does nothing.
    lost: bool,
    /// What a flush makes durable.
    flushing: Vec<Flushing>,
}

/// One flash device and the I/O it has in flight.
#[derive(Debug)]
pub struct Flash {
    medium: Medium,
    /// What the engine asked to be there.
    intended: Vec<Tag>,
    in_flight: BTreeMap<IoId, InFlight>,
    /// Units that a scrambled device leaves alone.
    spared: BTreeSet<usize>,
    faults: FlashFaults,
    end: usize,
    dead: bool,
    read_only: bool,
    /// I/Os that will fail.
    doomed: Vec<IoId>,
    loses: bool,
    lie: Option<Lie>,
}

impl Flash {
    /// A device of that many bytes.
    pub fn new(bytes: u64, faults: FlashFaults, lie: Option<Lie>) -> Self {
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
            lie,
        }
    }

    /// From now on a flush that fails loses any part of what is not durable, at once or when the power fails.
    pub fn lose_at_failed_flushes(&mut self) {
        self.loses = true;
    }

    /// Takes an I/O in. Refuses what is not aligned, and a write with other content over sectors that
    /// are being read or written: a checksum could tell, but should not have to.
    pub fn submit(&mut self, io: Io, payload: Vec<Tag>, dice: &mut Dice) -> Result<(), Violation> {
        let in_buffer = io.slice.map_or(0, |slice| u64::from(slice.offset));
        let aligned = [io.offset, io.len, in_buffer].iter().all(|n| n % SECTOR_BYTES == 0);
        ensure!(aligned && (io.len > 0) == (io.op != IoOp::Flush), "{io:?} is not aligned");
        let mut transfer = Transfer::new(io, payload, dice);
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
                lost = dice.chance(self.faults.lost_write)
                    || match self.lie {
                        Some(Lie::ForgedChecksums) => true,
                        Some(Lie::LostJournalPage) => io.op == IoOp::WriteJournal && dice.chance(50),
                        _ => false,
                    };
                if !lost {
                    self.apply(&transfer, Moment::Submission, dice);
                }
            }
            IoOp::Discard | IoOp::WriteZeroes(_) => return Err(Violation(format!("{io:?} on flash"))),
        }
        self.in_flight.insert(io.id, InFlight { transfer, fresh, lost, flushing });
        Ok(())
    }

    /// Rewriting what is being written is harmless; so is reading what is being rewritten.
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

    fn apply(&mut self, write: &Transfer, when: Moment, dice: &mut Dice) {
        for unit in write.moving(when) {
            self.medium.put(unit, write.tags[unit - write.first], dice);
        }
    }

    /// Notes what a write means to leave behind. Tells for each sector whether that is new.
    fn intend(&mut self, write: &Transfer) -> Vec<bool> {
        let intended = &mut self.intended[write.units()];
        let sectors = intended.chunks(SECTOR_UNITS).zip(write.tags.chunks(SECTOR_UNITS));
        let fresh = sectors.map(|(old, new)| old != new).collect();
        intended.copy_from_slice(&write.tags);
        fresh
    }

    /// Is the next I/O one of those that hang?
    pub fn is_stuck(&self, dice: &mut Dice) -> bool {
        dice.chance(self.faults.stuck)
    }

    /// Is any I/O in flight that touches these bytes?
    pub fn is_busy(&self, offset: u64, len: u64) -> bool {
        let touches = |io: &Io| io.offset < offset + len && offset < io.offset + io.len;
        self.in_flight.values().any(|other| touches(&other.transfer.io))
    }

    /// Ends an I/O.
    pub fn complete(&mut self, id: IoId, dice: &mut Dice) -> Done {
        let InFlight { mut transfer, lost, flushing, .. } = self.in_flight.remove(&id).expect("in flight");
        let op = transfer.io.op;
        let changes = op != IoOp::Read;
        let out = self.dead || transfer.units().end > self.end || changes && self.read_only;
        let error = if changes { self.faults.write_error } else { self.faults.read_error };
        let doomed = self.doomed.extract_if(.., |other| *other == id).count() > 0;
        let failed = out || doomed || dice.chance(error);
        match op {
            IoOp::Flush if failed && self.loses => match dice.chance(500) {
                true => self.medium.lose(dice),
                false => self.medium.forget_dirty(dice),
            },
            IoOp::Flush if !failed && self.lie != Some(Lie::EmptyFlashFlush) => self.medium.settle(&flushing),
            IoOp::Read if !failed => {
                for unit in transfer.moving(Moment::Completion) {
                    transfer.tags[unit - transfer.first] = self.medium.now()[unit];
                }
            }
            IoOp::Write(_) | IoOp::WriteJournal => {
                if !failed && !lost {
                    self.apply(&transfer, Moment::Completion, dice);
                }
                if dice.chance(self.faults.corruption) {
                    let unit = transfer.first + dice.below(transfer.count as u64) as usize;
                    self.medium.put(unit, content::garbage(dice.roll()), dice);
                }
                if !failed {
                    self.note_written(&transfer);
                }
            }
            _ => {}
        }
        let mut sums = content::sums(&transfer.tags);
        if failed {
            // The checksums stay as if it had gone well: nobody may look at them.
            transfer.tags.fill_with(|| content::garbage(dice.roll()));
        } else if self.lie == Some(Lie::ForgedChecksums) && op == IoOp::Read {
            sums = content::sums(&self.intended[transfer.units()]);
        }
        let result = if failed { Err(IoError::Failed) } else { Ok(()) };
        Done { io: transfer.io, result, tags: transfer.tags, sums }
    }

    /// What other writes in flight would leave in these sectors is there now.
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

    /// Something happens to all of it.
    pub fn suffer(&mut self, ailment: Ailment, dice: &mut Dice) {
        match ailment {
            Ailment::Dead => self.dead = true,
            Ailment::ReadOnly => self.read_only = true,
            Ailment::Scrambled => {
                let spared: Vec<_> =
                    self.spared.iter().map(|unit| (*unit, self.medium.now()[*unit])).collect();
                self.medium.scramble(|| content::garbage(dice.roll()));
                spared.into_iter().for_each(|(unit, tag)| self.medium.replace(unit, &[tag]));
            }
            Ailment::Truncated(end) => self.end = end,
        }
    }

    /// Nobody waits for the I/O in flight any more: its process was killed, or the power failed. Some of it took effect.
    pub fn crash(&mut self, crash: Crash, dice: &mut Dice) {
        for InFlight { transfer, lost, .. } in std::mem::take(&mut self.in_flight).into_values() {
            let reaches = !lost && !self.dead && !self.read_only && transfer.units().end <= self.end;
            if reaches && matches!(transfer.io.op, IoOp::Write(_) | IoOp::WriteJournal) {
                super::abandon(&transfer, &mut self.medium, dice);
            }
        }
        self.doomed.clear();
        if crash == Crash::PowerCut {
            self.medium.cut_power(dice);
        }
    }

    /// An I/O in flight will fail.
    pub fn doom(&mut self, id: IoId) {
        self.doomed.push(id);
    }

    /// It takes writes again.
    pub fn heal(&mut self) {
        self.read_only = false;
    }

    /// What the last writes to these bytes meant to leave there.
    pub fn intended(&self, offset: u64, len: u64) -> &[Tag] {
        &self.intended[(offset / UNIT_BYTES) as usize..((offset + len) / UNIT_BYTES) as usize]
    }

    /// These units hold `tags`, durably, and what happens to the whole device leaves them alone.
    pub fn put_right(&mut self, offset: u64, tags: &[Tag]) {
        let first = (offset / UNIT_BYTES) as usize;
        self.medium.replace(first, tags);
        self.spared.extend(first..first + tags.len());
    }

    /// Makes what it holds durable, if it does what it is told.
    pub fn flush(&mut self) {
        if !self.dead && self.lie != Some(Lie::EmptyFlashFlush) {
            self.medium.secure(0..self.intended.len());
        }
    }

    /// What these bytes hold, for whoever opens a cache; nothing where the device cannot be read.
    pub fn inspect(&self, offset: u64, len: u64) -> Option<&[Tag]> {
        let (first, end) = ((offset / UNIT_BYTES) as usize, ((offset + len) / UNIT_BYTES) as usize);
        (!self.dead && end <= self.end).then(|| &self.medium.now()[first..end])
    }

    /// Does every I/O fail?
    pub fn is_dead(&self) -> bool {
        self.dead
    }

    /// No I/O fails from now on unless the device is ailing, and all of it is remembered.
    pub fn soothe(&mut self) {
        self.faults = FlashFaults::default();
    }

    /// Units.
    pub fn units(&self) -> usize {
        self.intended.len()
    }
}
