//! What the host that had a disk may still be asked for, after it gave the disk away: what it listed, less what was changed since.
//!
//! The list comes page by page, most of it after the hand-over perhaps, and begins anew when its connection breaks. A page says what the
//! other host has in flash, and not what was changed here meanwhile; so what is changed stays changed, whatever is listed later.
//! Nothing is changed here before the hand-over, so it is enough that each change is noted before it is issued.
//!
//! Takes up to 1 MiB. On a large disk places are rounded out to regions of equal length, 2²² at most: what is put in may bring
//! neighbours with it, which the other host does not have and says so, and what is changed takes neighbours out.

use crate::units::SECTOR_BYTES;

/// Regions of a disk at most.
const REGIONS_MAX: u64 = 1 << 22;

/// See the module's text. The default has nothing, and takes nothing in.
#[derive(Debug, Default)]
pub struct LeftBehind {
    /// log2 of the sectors in a region.
    shift: u32,
    listed: Vec<u64>,
    changed: Vec<u64>,
}

impl LeftBehind {
    /// Nothing is listed yet, of a disk of so many bytes. What the disk grows by is never left behind.
    pub fn new(disk_bytes: u64) -> LeftBehind {
        let sectors = disk_bytes.div_ceil(SECTOR_BYTES).max(1);
        let shift = sectors.div_ceil(REGIONS_MAX).next_power_of_two().ilog2();
        let words = (sectors >> shift) as usize / 64 + 1;
        LeftBehind { shift, listed: vec![0; words], changed: vec![0; words] }
    }

    /// The other host says that it has the sectors from `first` to before `end`.
    pub fn listed(&mut self, first: u64, end: u64) {
        let regions = self.regions(first, end);
        set(&mut self.listed, regions);
    }

    /// They are about to be changed here.
    pub fn changed(&mut self, first: u64, end: u64) {
        let regions = self.regions(first, end);
        set(&mut self.changed, regions);
    }

    /// May the other host be asked for all of them?
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
    fn what_was_changed_is_not_there_whatever_is_listed_later() {
        let mut left = LeftBehind::new(1 << 20);
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
        let mut left = LeftBehind::new(REGIONS_MAX * SECTOR_BYTES * 8);
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
        let mut none = LeftBehind::default();
        none.listed(0, 1);
        none.changed(0, 1);
        assert!(!none.has_all(0, 1));
    }
}
