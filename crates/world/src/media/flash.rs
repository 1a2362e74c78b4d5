//! A flash device.

use std::collections::BTreeMap;

use hob_engine::io::{Io, IoError, IoOp};
use hob_engine::units::{IoId, SECTOR_BYTES};

use super::{Done, Lie, Moment, Transfer};
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

/// One flash device and the I/O it has in flight.
#[derive(Debug)]
pub struct Flash {
    tags: Vec<Tag>,
    /// What the engine asked to be there.
    intended: Vec<Tag>,
    in_flight: BTreeMap<IoId, (Transfer, Vec<bool>, bool)>,
    faults: FlashFaults,
    end: usize,
    dead: bool,
    read_only: bool,
    lie: Option<Lie>,
    /// Writes over sectors with I/O in flight, rewriting what should be there.
    pub repairs_under_reads: u64,
}

impl Flash {
    /// A device of that many bytes.
    pub fn new(bytes: u64, faults: FlashFaults, lie: Option<Lie>) -> Self {
        let units = (bytes / UNIT_BYTES) as usize;
        Flash {
            tags: vec![ZERO; units],
            intended: vec![ZERO; units],
            in_flight: BTreeMap::new(),
            faults,
            end: units,
            dead: false,
            read_only: false,
            lie,
            repairs_under_reads: 0,
        }
    }

    /// Takes an I/O in. Refuses what is not aligned, and a write with other content over sectors that
    /// are being read or written: a checksum could tell, but should not have to.
    pub fn submit(&mut self, io: Io, payload: Vec<Tag>, dice: &mut Dice) -> Result<(), Violation> {
        let slice = io.slice.ok_or_else(|| Violation(format!("{io:?} on flash without payload")))?;
        let aligned = [io.offset, io.len, u64::from(slice.offset)].iter().all(|n| n % SECTOR_BYTES == 0);
        ensure!(aligned && io.len > 0, "{io:?} is not aligned");
        let mut transfer = Transfer::new(io, payload, dice);
        ensure!(transfer.units().end <= self.tags.len(), "{io:?} is past the device's end");
        let is_write = io.op != IoOp::Read;
        let fresh =
            if is_write { self.intend(&transfer) } else { vec![false; transfer.count / SECTOR_UNITS] };
        for (other, other_fresh, _) in self.in_flight.values().filter(|(other, ..)| other.overlaps(&transfer))
        {
            if !is_write && other.io.op == IoOp::Read {
                continue;
            }
            let (start, end) = (
                transfer.first.max(other.first) / SECTOR_UNITS,
                transfer.units().end.min(other.units().end) / SECTOR_UNITS,
            );
            // Rewriting what is being written is harmless; so is reading what is being rewritten.
            let clash = (start..end).find(|sector| {
                let (mine, theirs) =
                    (sector - transfer.first / SECTOR_UNITS, sector - other.first / SECTOR_UNITS);
                fresh[mine] || !is_write && other_fresh[theirs]
            });
            ensure!(clash.is_none(), "{io:?} overlaps {:?} in flight", other.io);
            self.repairs_under_reads += 1;
        }
        let lost =
            is_write && (dice.chance(self.faults.lost_write) || self.lie == Some(Lie::ForgedChecksums));
        if is_write && !lost {
            for unit in transfer.moving(Moment::Submission) {
                self.tags[unit] = transfer.tags[unit - transfer.first];
            }
        } else if !is_write {
            transfer.tags = self.tags[transfer.units()].to_vec();
        }
        self.in_flight.insert(io.id, (transfer, fresh, lost));
        Ok(())
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
        self.in_flight.values().any(|(transfer, ..)| touches(&transfer.io))
    }

    /// Ends an I/O.
    pub fn complete(&mut self, id: IoId, dice: &mut Dice) -> Done {
        let (mut transfer, _, lost) = self.in_flight.remove(&id).expect("in flight");
        let is_write = transfer.io.op != IoOp::Read;
        let out = self.dead || transfer.units().end > self.end || is_write && self.read_only;
        let error = if is_write { self.faults.write_error } else { self.faults.read_error };
        let failed = out || dice.chance(error);
        for unit in transfer.moving(Moment::Completion).filter(|_| !failed && !lost) {
            match is_write {
                true => self.tags[unit] = transfer.tags[unit - transfer.first],
                false => transfer.tags[unit - transfer.first] = self.tags[unit],
            }
        }
        if is_write && dice.chance(self.faults.corruption) {
            let unit = transfer.first + dice.below(transfer.count as u64) as usize;
            self.tags[unit] = content::garbage(dice.roll());
        }
        if is_write && !failed {
            self.note_written(&transfer);
        }
        let mut sums = content::sums(&transfer.tags);
        if failed {
            // The checksums stay as if it had gone well: nobody may look at them.
            transfer.tags.fill_with(|| content::garbage(dice.roll()));
        } else if self.lie == Some(Lie::ForgedChecksums) && !is_write {
            sums = content::sums(&self.intended[transfer.units()]);
        }
        let result = if failed { Err(IoError::Failed) } else { Ok(()) };
        Done { io: transfer.io, result, tags: transfer.tags, sums }
    }

    /// What other writes in flight would leave in these sectors is there now.
    fn note_written(&mut self, written: &Transfer) {
        for (other, fresh, _) in self.in_flight.values_mut().filter(|(other, ..)| other.overlaps(written)) {
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
            Ailment::Scrambled => self.tags.fill_with(|| content::garbage(dice.roll())),
            Ailment::Truncated(end) => self.end = end,
        }
    }

    /// Units.
    pub fn units(&self) -> usize {
        self.tags.len()
    }
}
