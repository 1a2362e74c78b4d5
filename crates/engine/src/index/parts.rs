//! Dirty sectors of which flash has only some parts, because guests wrote only these parts and the
//! rest of the sector was not cached (docs/decisions/0072).
//!
//! A *unit* is 512 bytes. A set of a sector's units is a byte: bit *n* is the unit at bytes
//! 512 *n* to 512 *n* + 511. The sector's other bytes on flash have no meaning.

use std::ops::Range;

use super::Index;
use crate::units::{BlockNo, SECTOR_BYTES};

/// Size of a unit in bytes.
pub(crate) const UNIT_BYTES: u64 = SECTOR_BYTES / 8;

/// The set of all units of a sector.
pub(crate) const ALL_UNITS: u8 = u8::MAX;

/// Maximum number of incomplete sectors of a cache. Each journal page lists all of them. After a crash
/// there may be twice as many: some from change records, and others from a newer part of the dump.
pub(crate) const PARTS_MAX: usize = 24;

/// Returns the byte ranges of a sector that these units cover, from the sector's start. Adjacent
/// units form one range.
pub(crate) fn unit_runs(units: u8) -> impl Iterator<Item = Range<u64>> {
    let has = move |unit: u64| units >> unit & 1 == 1;
    let begins = move |unit: &u64| has(*unit) && (*unit == 0 || !has(*unit - 1));
    (0..8).filter(begins).map(move |first| {
        let end = (first..8).find(|unit| !has(*unit)).unwrap_or(8);
        first * UNIT_BYTES..end * UNIT_BYTES
    })
}

impl Index {
    /// Returns the number of the disk sector whose data is in a cache sector of a used frame.
    pub(crate) fn disk_sector(&self, sector: u64) -> u64 {
        let (_, block, inside) = self.locate(sector);
        (u64::from(block.0) << self.block_shift) + u64::from(inside)
    }

    /// Returns the units that flash has of a valid cache sector.
    #[inline]
    pub(crate) fn units(&self, sector: u64) -> u8 {
        match &self.marks {
            Some(marks) if !marks.parts.is_empty() => {
                marks.parts.get(&self.disk_sector(sector)).copied().unwrap_or(ALL_UNITS)
            }
            _ => ALL_UNITS,
        }
    }

    /// Sets the units that flash has of a dirty cache sector, and of its second copy.
    pub(crate) fn set_units(&mut self, sector: u64, units: u8) {
        let at = self.disk_sector(sector);
        let parts = &mut self.marks.as_mut().expect("only a persistent cache has dirty data").parts;
        match units {
            ALL_UNITS => _ = parts.remove(&at),
            _ => _ = parts.insert(at, units),
        }
    }

    /// Returns the incomplete sectors of the disk, in order: for each its number, its first cache
    /// sector, and its units.
    pub(crate) fn parts(&self) -> impl Iterator<Item = (u64, u64, u8)> {
        let parts = self.marks.iter().flat_map(|marks| &marks.parts);
        parts.map(|(at, units)| {
            let frame = self.find(BlockNo((at >> self.block_shift) as u32));
            let first = self.first_sector(frame.expect("an incomplete sector is dirty"));
            (*at, first + (at & ((1 << self.block_shift) - 1)), *units)
        })
    }

    /// Returns the number of incomplete sectors.
    #[inline]
    pub(crate) fn parts_count(&self) -> usize {
        self.marks.as_ref().map_or(0, |marks| marks.parts.len())
    }

    /// Returns the first incomplete sector of the disk in `first..end`.
    #[inline]
    pub(crate) fn part_in(&self, first: u64, end: u64) -> Option<u64> {
        let marks = self.marks.as_ref().filter(|marks| !marks.parts.is_empty())?;
        marks.parts.range(first..end).next().map(|(at, _)| *at)
    }

    /// Forgets the units of cache sectors that are no longer dirty.
    pub(super) fn forget_units(&mut self, first: u64, count: u64) {
        let from = self.disk_sector(first);
        let parts = &mut self.marks.as_mut().expect("only a persistent cache has dirty data").parts;
        (from..from + count).for_each(|at| _ = parts.remove(&at));
    }

    /// Takes over the entries of `parts` whose disk sectors are dirty in this index. Afterwards all
    /// other sectors count as complete.
    pub(super) fn adopt_parts(&mut self, parts: impl Iterator<Item = (u64, u8)>) {
        for (at, units) in parts {
            let Some(frame) = self.find(BlockNo((at >> self.block_shift) as u32)) else { continue };
            let sector = self.first_sector(frame) + (at & ((1 << self.block_shift) - 1));
            if self.is_dirty(sector) {
                self.set_units(sector, units);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_are_whole_units_in_order_and_apart() {
        for units in 0..=ALL_UNITS {
            let runs: Vec<Range<u64>> = unit_runs(units).collect();
            assert!(runs.windows(2).all(|pair| pair[0].end < pair[1].start), "{units:08b}: {runs:?}");
            let has = |unit: u64| runs.iter().any(|run| run.contains(&(unit * UNIT_BYTES)));
            let found = (0..8).filter(|unit| has(*unit)).fold(0, |all, unit| all | 1 << unit);
            assert_eq!(found, units);
            assert!(
                runs.iter()
                    .all(|run| run.start.is_multiple_of(UNIT_BYTES) && run.end.is_multiple_of(UNIT_BYTES))
            );
        }
    }
}
