//! A set of ranges of a disk that needs little memory: coarse for a large disk, exact for a small
//! one.
//!
//! A disk is divided into at most 2²⁰ regions of equal length, and adding a range adds all regions
//! that it touches. The length of a region is a power of two, and at least one sector. A set takes
//! up to 128 KiB.

use crate::units::SECTOR_BYTES;

/// Maximum number of regions per disk.
const REGIONS_MAX: u64 = 1 << 20;

/// A set of regions of one disk. New sets are empty.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Regions {
    disk_bytes: u64,
    /// Base-2 logarithm of the number of sectors in a region.
    shift: u32,
    words: Vec<u64>,
    is_empty: bool,
}

impl Regions {
    /// Creates an empty set for a disk of `disk_bytes`.
    pub fn new(disk_bytes: u64) -> Regions {
        let sectors = disk_bytes.div_ceil(SECTOR_BYTES);
        let shift = sectors.div_ceil(REGIONS_MAX).max(1).next_power_of_two().ilog2();
        let regions = sectors.div_ceil(1 << shift);
        Regions { disk_bytes, shift, words: vec![0; regions.div_ceil(64) as usize], is_empty: true }
    }

    /// Returns the size of the disk in bytes.
    pub fn disk_bytes(&self) -> u64 {
        self.disk_bytes
    }

    /// Returns true if the set is empty.
    pub fn is_empty(&self) -> bool {
        self.is_empty
    }

    /// Adds the sectors `first..end`. The part beyond the disk's end is ignored.
    pub fn insert(&mut self, first: u64, end: u64) {
        let end = end.min(self.disk_bytes.div_ceil(SECTOR_BYTES));
        if first >= end {
            return;
        }
        self.is_empty = false;
        for region in first >> self.shift..=(end - 1) >> self.shift {
            self.words[(region / 64) as usize] |= 1 << (region % 64);
        }
    }

    /// Adds the whole disk.
    pub fn insert_all(&mut self) {
        self.insert(0, u64::MAX);
    }

    /// Adds all regions of `others`. If `others` is a set of another disk size, adds the whole
    /// disk.
    pub fn insert_those_of(&mut self, others: &Regions) {
        if self.disk_bytes != others.disk_bytes {
            return self.insert_all();
        }
        self.is_empty &= others.is_empty;
        self.words.iter_mut().zip(&others.words).for_each(|(word, more)| *word |= more);
    }

    /// Returns the same ranges for a larger size of the disk, with equal or lower precision.
    pub fn grown(&self, disk_bytes: u64) -> Regions {
        assert!(self.disk_bytes <= disk_bytes, "disks do not shrink");
        let mut grown = Regions::new(disk_bytes);
        self.ranges().for_each(|(first, end)| grown.insert(first, end));
        grown
    }

    /// Returns true if a sector is in the set.
    #[inline]
    pub fn contains(&self, sector: u64) -> bool {
        let region = sector >> self.shift;
        self.words.get((region / 64) as usize).is_some_and(|word| word >> (region % 64) & 1 == 1)
    }

    /// Returns true if any of the sectors `first..end` is in the set.
    pub fn meets(&self, first: u64, end: u64) -> bool {
        let step = 1 << self.shift;
        !self.is_empty
            && first < end
            && (first / step * step..end).step_by(step as usize).any(|at| self.contains(at))
    }

    /// Returns the set as ascending ranges of sectors `first..end` that are not adjacent. The last
    /// range may extend beyond the disk's end by less than a region.
    pub fn ranges(&self) -> impl Iterator<Item = (u64, u64)> + '_ {
        let regions = self.words.len() as u64 * 64;
        let is_in = move |region: u64| region < regions && self.contains(region << self.shift);
        let mut at = 0;
        std::iter::from_fn(move || {
            // Words without set bits are skipped.
            while at < regions && !is_in(at) {
                let word = self.words[(at / 64) as usize] >> (at % 64);
                at += u64::from(word.trailing_zeros()).min(64 - at % 64);
            }
            let first = at;
            while is_in(at) {
                at += 1;
            }
            (first < at).then_some((first << self.shift, at << self.shift))
        })
    }

    /// Returns the share of the disk's regions that are in the set, per mille, rounded up.
    pub fn permille(&self) -> u32 {
        let regions = self.disk_bytes.div_ceil(SECTOR_BYTES).div_ceil(1 << self.shift).max(1);
        let inside: u64 = self.words.iter().map(|word| u64::from(word.count_ones())).sum();
        (inside * 1000).div_ceil(regions) as u32
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_small_disk_is_known_to_the_sector() {
        let mut regions = Regions::new(10 * SECTOR_BYTES - 512);
        assert!(regions.is_empty() && !regions.meets(0, 10));
        regions.insert(3, 5);
        assert_eq!((0..12).filter(|sector| regions.contains(*sector)).collect::<Vec<_>>(), [3, 4]);
        assert!(regions.meets(0, 4) && regions.meets(4, 9) && !regions.meets(0, 3) && !regions.meets(5, 10));
        assert!(!regions.meets(4, 4));
        regions.insert(9, 100);
        assert!(regions.contains(9) && !regions.contains(10));
        assert_eq!(regions.permille(), 300);
        assert_eq!(regions.ranges().collect::<Vec<_>>(), [(3, 5), (9, 10)]);
        let mut both = Regions::new(10 * SECTOR_BYTES - 512);
        both.insert_those_of(&Regions::new(10 * SECTOR_BYTES - 512));
        assert!(both.is_empty());
        both.insert(0, 1);
        both.insert_those_of(&regions);
        assert_eq!((0..12).filter(|sector| both.contains(*sector)).collect::<Vec<_>>(), [0, 3, 4, 9]);
        both.insert_those_of(&Regions::new(1 << 30));
        assert_eq!(both.permille(), 1000, "of another disk");
        regions.insert_all();
        assert_eq!(regions.permille(), 1000);
    }

    #[test]
    fn a_large_disk_takes_no_more_memory_and_forgets_nothing() {
        for tib in [1u64, 3, 1024] {
            let mut regions = Regions::new(tib << 40);
            assert!(regions.words.len() * 8 <= 128 << 10, "{tib} TiB");
            let last = ((tib << 40) / SECTOR_BYTES) - 1;
            regions.insert(last, last + 1);
            assert!(regions.contains(last) && regions.meets(0, last + 1) && !regions.meets(0, last / 2));
            assert_eq!(regions.permille(), 1);
            let (first, end) = regions.ranges().next().unwrap();
            assert!(first <= last && last < end && regions.ranges().count() == 1);
        }
    }
}
