//! Clean sectors of a recovered cache that were not compared with the backing yet
//! (docs/decisions/0033).
//!
//! Memory use: one bit for each sector while any sector is unverified, and nothing otherwise.

use super::Index;
use super::bitmap::Bitmap;
use crate::units::FrameNo;

/// The unverified sectors of a recovered cache: valid clean sectors that were not compared with the
/// backing yet. `count` is the number of bits that are set, at least one.
#[derive(Clone, Debug)]
pub(super) struct Unverified {
    bits: Bitmap,
    count: u64,
}

impl Unverified {
    pub(super) fn bytes(&self) -> u64 {
        self.bits.bytes()
    }
}

impl Index {
    /// Returns the number of unverified sectors.
    #[inline]
    pub(crate) fn unverified_sectors(&self) -> u64 {
        self.unverified.as_ref().map_or(0, |unverified| unverified.count)
    }

    #[inline]
    pub(crate) fn is_unverified(&self, sector: u64) -> bool {
        self.unverified.as_ref().is_some_and(|unverified| unverified.bits.get(sector))
    }

    /// Returns how many of the `count` sectors from `first` on may be served from flash.
    #[inline]
    pub(crate) fn count_servable(&self, first: u64, count: u64) -> u64 {
        let valid = self.count_valid(first, count);
        match &self.unverified {
            None => valid,
            Some(unverified) => valid - unverified.bits.count(first, count),
        }
    }

    /// Returns the first unverified sector at or after `from`.
    pub(crate) fn next_unverified(&self, from: u64) -> Option<u64> {
        self.unverified.as_ref()?.bits.next_one(from)
    }

    /// Marks sectors as verified, or as invalid.
    #[inline]
    pub(crate) fn set_verified(&mut self, first: u64, count: u64) {
        let Some(unverified) = &mut self.unverified else { return };
        unverified.count -= unverified.bits.count(first, count);
        unverified.bits.clear(first, count);
        if unverified.count == 0 {
            self.unverified = None;
        }
    }

    /// Marks every clean sector unverified, and drops second copies of clean sectors.
    pub(crate) fn distrust_clean(&mut self) {
        self.drop_clean_seconds();
        let mut bits = Bitmap::new(self.sums.len() as u64);
        let mut count = 0;
        for sector in self.valid.ones().filter(|sector| !self.is_dirty(*sector)) {
            bits.set(sector);
            count += 1;
        }
        self.unverified = (count > 0).then(|| Box::new(Unverified { bits, count }));
    }

    fn drop_clean_seconds(&mut self) {
        let sectors = 1 << self.block_shift;
        let seconds = (0..self.frames()).map(FrameNo).filter(|frame| self.first_of(*frame).is_some());
        for frame in seconds.collect::<Vec<_>>() {
            let first = self.first_sector(frame);
            for sector in
                (first..first + sectors).filter(|sector| !self.is_dirty(*sector)).collect::<Vec<_>>()
            {
                self.clear_valid(sector, 1);
            }
            self.free_second_if_empty(first);
        }
    }

    /// Copies the unverified state of a sector from another index.
    pub(super) fn adopt_unverified(&mut self, other: &Index, from: u64, to: u64) {
        if !other.is_unverified(from) {
            return;
        }
        let sectors = self.sums.len() as u64;
        let fresh = || Box::new(Unverified { bits: Bitmap::new(sectors), count: 0 });
        let unverified = self.unverified.get_or_insert_with(fresh);
        unverified.bits.set(to);
        unverified.count += 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::units::BlockNo;

    #[test]
    fn only_clean_sectors_become_unverified_and_each_change_verifies() {
        let mut index = Index::new(8, 2);
        index.keep_marks();
        for block in 0..3 {
            let frame = index.insert(BlockNo(block)).unwrap();
            let first = index.first_sector(frame);
            (first..first + 4).for_each(|sector| index.set_valid(sector, 7));
        }
        index.set_dirty(1);
        index.distrust_clean();
        assert_eq!((index.unverified_sectors(), index.count_servable(0, 4)), (11, 1));
        assert!(!index.is_unverified(1) && index.is_unverified(0) && !index.is_unverified(12));
        assert_eq!([0, 1, 12].map(|from| index.next_unverified(from)), [Some(0), Some(2), None]);
        index.set_valid(0, 8);
        index.clear_valid(4, 4);
        assert_eq!((index.unverified_sectors(), index.count_servable(0, 4)), (6, 2));
        let mut other = Index::new(8, 2);
        other.keep_marks();
        other.adopt(&index, [(FrameNo(0), FrameNo(3), None)].into_iter());
        assert_eq!((other.unverified_sectors(), other.is_unverified(14)), (2, true));
        index.set_verified(0, 12);
        assert_eq!((index.unverified_sectors(), index.count_servable(8, 4)), (0, 4));
        assert!(index.unverified.is_none(), "the bits take no memory any more");
    }

    #[test]
    fn second_copies_of_clean_data_go() {
        let mut index = Index::new(4, 1);
        index.keep_marks();
        let first = index.insert(BlockNo(5)).unwrap();
        let second = FrameNo(3);
        index.set_valid(index.first_sector(first), 1);
        index.pair(first, second);
        index.set_valid(index.first_sector(second), 1);
        index.distrust_clean();
        assert_eq!((index.seconds(), index.unverified_sectors()), (0, 1));
    }
}
