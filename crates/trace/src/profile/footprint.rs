//! Set of touched sectors: a bitmap in chunks of 512 sectors, by disk and position.
//!
//! If there are too many chunks, half of them are dropped permanently, chosen by a hash of their
//! position. The sample is halved as often as necessary, and the number of touched sectors is
//! scaled up. The method is spatial sampling as in SHARDS (Waldspurger et al., FAST 2015).

use std::collections::HashMap;

use super::{Footprint, SECTOR_BYTES};

/// Maximum number of chunks in a hash table of 2²¹ entries before the table grows. An entry has 73
/// bytes.
pub(super) const CHUNKS_MAX: usize = (1 << 21) / 8 * 7;
const CHUNK_SECTORS: u64 = 512;
/// Number of bits of a chunk number: disks have up to 2⁶³ bytes, so 2⁴² chunks.
const CHUNK_BITS: u32 = 42;

#[derive(Debug)]
pub(super) struct SectorSet {
    chunks: HashMap<u64, [u64; 8]>,
    chunks_max: usize,
    /// Number of times that the sample was halved. A chunk is in the sample if its hash is below
    /// 2⁶⁴ divided by 2 to the power of `halvings`.
    halvings: u32,
    sectors: u64,
    touches: u64,
}

/// Returns a bijective 64-bit hash of a position (the finalizer of SplitMix64).
fn stirred(place: u64) -> u64 {
    let place = (place ^ place >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let place = (place ^ place >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    place ^ place >> 31
}

impl SectorSet {
    pub(super) fn new(chunks_max: usize) -> SectorSet {
        SectorSet { chunks: HashMap::new(), chunks_max, halvings: 0, sectors: 0, touches: 0 }
    }

    /// Adds the sectors from `first` to `last`, both inclusive, of a disk.
    pub(super) fn touch(&mut self, disk: u16, first: u64, last: u64) {
        self.touches += last - first + 1;
        for chunk in first / CHUNK_SECTORS..=last / CHUNK_SECTORS {
            let place = stirred(u64::from(disk) << CHUNK_BITS | chunk);
            if !self.counts(place) {
                continue;
            }
            let base = chunk * CHUNK_SECTORS;
            let from = first.max(base) - base;
            let to = last.min(base + CHUNK_SECTORS - 1) - base;
            self.sectors += set(self.chunks.entry(place).or_default(), from as usize, to as usize);
            while self.chunks.len() > self.chunks_max {
                self.halve();
            }
        }
    }

    fn counts(&self, place: u64) -> bool {
        // A shift by 64 is impossible: after so many halvings no chunk is left.
        place <= u64::MAX >> self.halvings
    }

    fn halve(&mut self) {
        self.halvings += 1;
        let limit = u64::MAX >> self.halvings;
        self.chunks.retain(|place, _| *place <= limit);
        self.sectors = self.chunks.values().flatten().map(|word| u64::from(word.count_ones())).sum();
    }

    pub(super) fn footprint(&self) -> Footprint {
        let scale = 2_f64.powi(self.halvings as i32);
        let sectors = ((self.sectors as f64 * scale) as u64).min(self.touches);
        Footprint {
            sectors,
            bytes: sectors * SECTOR_BYTES,
            touches: self.touches,
            reuse_percent: super::percent(self.touches - sectors, self.touches),
            estimated: self.halvings > 0,
            sample_rate: 1.0 / scale,
        }
    }
}

/// Sets the bits from `from` to `to`, both inclusive. Returns the number of bits that were not set
/// before.
fn set(words: &mut [u64; 8], from: usize, to: usize) -> u64 {
    let mut new = 0;
    for (n, word) in words.iter_mut().enumerate().take(to / 64 + 1).skip(from / 64) {
        let low = if n == from / 64 { from % 64 } else { 0 };
        let high = if n == to / 64 { to % 64 } else { 63 };
        let mask = u64::MAX << low & u64::MAX >> (63 - high);
        new += u64::from((mask & !*word).count_ones());
        *word |= mask;
    }
    new
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    /// A linear congruential generator (Knuth's MMIX).
    struct Random(u64);

    impl Random {
        fn below(&mut self, bound: u64) -> u64 {
            self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (self.0 >> 33) % bound
        }
    }

    #[test]
    fn it_matches_a_set_of_sectors() {
        let mut rng = Random(7);
        let (mut set, mut model, mut touches) = (SectorSet::new(1 << 20), BTreeSet::new(), 0);
        for _ in 0..3_000 {
            let disk = rng.below(3) as u16;
            let first = rng.below(5_000);
            let longest = if rng.below(10) == 0 { 2_000 } else { 20 };
            let last = first + rng.below(longest);
            set.touch(disk, first, last);
            model.extend((first..=last).map(|sector| (disk, sector)));
            touches += last - first + 1;
        }
        let found = set.footprint();
        assert_eq!((found.sectors, found.touches, found.estimated), (model.len() as u64, touches, false));
        assert_eq!(found.bytes, found.sectors * 4096);
        let reuse = (touches - found.sectors) as f64 / touches as f64 * 100.0;
        assert!((found.reuse_percent - reuse).abs() < 1e-9);
    }

    #[test]
    fn beyond_the_limit_it_estimates_within_a_few_percent() {
        let mut set = SectorSet::new(1_000);
        // The test adds 20,000 chunks with 3 sectors each, twice.
        for _ in 0..2 {
            for chunk in 0..20_000 {
                set.touch(1, chunk * 512 * 7 + 5, chunk * 512 * 7 + 7);
            }
        }
        let found = set.footprint();
        assert!(found.estimated && found.sample_rate <= 1.0 / 16.0);
        assert!(set.chunks.len() <= 1_000);
        let error = found.sectors as f64 / 60_000.0 - 1.0;
        assert!(error.abs() < 0.1, "{error}");
        assert_eq!(found.touches, 120_000);
    }

    #[test]
    fn the_ends_of_the_largest_disk_fit() {
        let mut set = SectorSet::new(10);
        let last = (1 << 51) - 1;
        set.touch(u16::MAX, last, last);
        set.touch(0, 0, 0);
        set.touch(u16::MAX, last - 511, last);
        assert_eq!(set.footprint().sectors, 513);
    }
}
