//! Ranges that the new owner may still read from the former owner after a hand-over: the listed
//! ranges, without those that changed since.
//!
//! The list arrives page by page, perhaps mostly after the hand-over, and starts again after a
//! broken connection. A page lists the former owner's flash content and ignores changes by the new
//! owner. So changed ranges stay excluded even if they are listed later. The new owner makes no
//! change before the hand-over, so it suffices to exclude each range just before it is changed.
//!
//! The set takes up to 1 MiB. On a large disk, ranges are extended to whole regions. All regions
//! have equal length, and a disk has at most 2²² regions. So an added range may include
//! neighbouring sectors, which the former owner reports as not cached. A changed range excludes
//! neighbouring sectors.

use crate::units::SECTOR_BYTES;

/// Maximum number of regions per disk.
const REGIONS_MAX: u64 = 1 << 22;

/// Ranges that the new owner may still read from the former owner. The default value stays empty
/// whatever is added.
#[derive(Debug, Default)]
pub struct RemainingRanges {
    /// Base-2 logarithm of the number of sectors in a region.
    shift: u32,
    listed: Vec<u64>,
    changed: Vec<u64>,
}

impl RemainingRanges {
    /// Creates an empty set for a disk of `disk_bytes`. Sectors that a later growth of the disk
    /// adds are never included.
    pub fn new(disk_bytes: u64) -> RemainingRanges {
        let sectors = disk_bytes.div_ceil(SECTOR_BYTES).max(1);
        let shift = sectors.div_ceil(REGIONS_MAX).next_power_of_two().ilog2();
        let words = (sectors >> shift) as usize / 64 + 1;
        RemainingRanges { shift, listed: vec![0; words], changed: vec![0; words] }
    }

    /// Adds the sectors `first..end`, which the former owner has listed.
    pub fn listed(&mut self, first: u64, end: u64) {
        let regions = self.regions(first, end);
        set(&mut self.listed, regions);
    }

    /// Excludes the sectors `first..end` permanently, because this host will change them next.
    pub fn changed(&mut self, first: u64, end: u64) {
        let regions = self.regions(first, end);
        set(&mut self.changed, regions);
    }

    /// Returns true if this host may read all of the sectors `first..end` from the former owner.
    pub fn has_all(&self, first: u64, end: u64) -> bool {
        let is_known = end.div_ceil(1 << self.shift) <= self.listed.len() as u64 * 64;
        let has = |region: u64| {
            let word = (region / 64) as usize;
            (self.listed[word] & !self.changed[word]) >> (region % 64) & 1 == 1
        };
        is_known && self.regions(first, end).all(has)
    }

    fn regions(&self, first: u64, end: u64) -> std::ops::Range<u64> {
        let all = self.listed.len() as u64 * 64;
        (first >> self.shift).min(all)..end.div_ceil(1 << self.shift).min(all)
    }
}

fn set(words: &mut [u64], regions: std::ops::Range<u64>) {
    for region in regions {
        words[(region / 64) as usize] |= 1 << (region % 64);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn changed_ranges_stay_excluded_whatever_is_listed_later() {
        let mut left = RemainingRanges::new(1 << 20);
        left.listed(10, 20);
        left.changed(12, 14);
        left.changed(30, 32);
        left.listed(0, 40);
        let there: Vec<u64> = (0..50).filter(|sector| left.has_all(*sector, sector + 1)).collect();
        assert_eq!(there, [0..12, 14..30, 32..40].into_iter().flatten().collect::<Vec<u64>>());
        assert!(left.has_all(14, 30) && !left.has_all(14, 31) && !left.has_all(13, 15));
    }

    #[test]
    fn a_large_disk_is_rounded_out_in_both_directions_in_bounded_memory() {
        let mut left = RemainingRanges::new(REGIONS_MAX * SECTOR_BYTES * 8);
        assert!((left.listed.len() + left.changed.len()) * 8 <= (1 << 20) + 16);
        left.listed(9, 10);
        assert!(left.has_all(8, 16) && !left.has_all(8, 17) && !left.has_all(7, 9));
        left.listed(0, 64);
        left.changed(31, 33);
        assert!(left.has_all(0, 24) && !left.has_all(24, 25));
        assert!(!left.has_all(39, 40) && left.has_all(40, 64));
        left.listed(u64::MAX - 1, u64::MAX);
        left.changed(u64::MAX - 1, u64::MAX);
        assert!(!left.has_all(u64::MAX - 1, u64::MAX));
    }

    #[test]
    fn of_nothing_nothing_is_there() {
        let mut none = RemainingRanges::default();
        none.listed(0, 1);
        none.changed(0, 1);
        assert!(!none.has_all(0, 1));
    }
}
