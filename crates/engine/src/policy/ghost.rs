//! A ghost list: remembers the blocks that were inserted last, by fingerprint, in about 5 bytes for
//! each block. A replacement policy inserts each block that it evicts. Admission inserts blocks
//! that it refuses.
//!
//! The table has sets of 16 entries. Each set is a cache line. An entry is 20 bits of fingerprint
//! and a 12-bit stamp that counts insertions coarsely. An entry is valid for as many insertions as
//! the ghost's capacity. A set that overflows forgets its oldest entry. The probability of a false
//! positive is 16 / 2²⁰.

use crate::index::hash;
use crate::units::BlockNo;

const WAYS: usize = 16;
const STAMP_BITS: u32 = 12;
const STAMP_MASK: u32 = (1 << STAMP_BITS) - 1;
/// Number of stamp values that the list uses during as many insertions as its capacity. This number
/// is a quarter of the stamp's range, so that an entry is overwritten long before its stamp could
/// be mistaken for a recent one.
const SPAN: u32 = 1 << (STAMP_BITS - 2);

#[derive(Debug)]
pub(crate) struct Ghost {
    /// Fingerprint (never 0 in a used entry) in the upper bits, stamp in the lower ones.
    sets: Vec<[u32; WAYS]>,
    insertions: u64,
    insertions_per_stamp: u64,
    /// Maximum age of an entry: how much larger than the entry's stamp the current stamp may be.
    /// The current stamp grows by 1 after every `insertions_per_stamp` insertions.
    life: u32,
}

impl Ghost {
    /// Creates an empty list that remembers the last `capacity` insertions.
    pub(crate) fn new(capacity: u32) -> Self {
        // The table has 5/4 of the capacity, because sets fill unevenly.
        Self::with_sets(capacity, (capacity as usize * 5).div_ceil(4 * WAYS).max(1))
    }

    /// Creates an empty list with a table of `sets` sets. Tests use far more sets than `capacity`
    /// needs, so that no set overflows. With a capacity of at most 1024, the list then has exactly
    /// the last `capacity` blocks, except for false positives, until the stamps wrap after 4096
    /// insertions.
    pub(super) fn with_sets(capacity: u32, sets: usize) -> Self {
        let per_stamp = u64::from(capacity).div_ceil(u64::from(SPAN)).max(1);
        Ghost {
            sets: vec![[0; WAYS]; sets],
            insertions: 0,
            insertions_per_stamp: per_stamp,
            life: u64::from(capacity).div_ceil(per_stamp) as u32,
        }
    }

    fn locate(&self, block: BlockNo) -> (usize, u32) {
        let hash = hash(block);
        let set = ((hash >> 32) * self.sets.len() as u64) >> 32;
        let print = (hash as u32 >> STAMP_BITS).max(1);
        (set as usize, print)
    }

    fn stamp(&self) -> u32 {
        (self.insertions / self.insertions_per_stamp) as u32 & STAMP_MASK
    }

    /// Adds a block as the newest entry, for example a block that was evicted now.
    pub(crate) fn insert(&mut self, block: BlockNo) {
        let (set, print) = self.locate(block);
        let now = self.stamp();
        let age = |entry: u32| match entry {
            0 => u32::MAX,
            entry => now.wrapping_sub(entry) & STAMP_MASK,
        };
        let place = self.sets[set].iter_mut().max_by_key(|entry| age(**entry)).expect("sets have ways");
        *place = print << STAMP_BITS | now;
        self.insertions += 1;
    }

    /// Returns true if the block is in the list, and then removes it.
    pub(crate) fn take(&mut self, block: BlockNo) -> bool {
        let (set, print) = self.locate(block);
        let (now, life) = (self.stamp(), self.life);
        let Some(entry) = self.sets[set].iter_mut().find(|entry| **entry >> STAMP_BITS == print) else {
            return false;
        };
        let age = now.wrapping_sub(*entry) & STAMP_MASK;
        *entry = 0;
        age <= life
    }

    pub(crate) fn bytes(&self) -> u64 {
        (self.sets.capacity() * WAYS * 4) as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn remembers_its_capacity_and_not_much_more() {
        for capacity in [10u32, 1000, 100_000] {
            let mut ghost = Ghost::new(capacity);
            for block in 0..20 * capacity {
                ghost.insert(BlockNo(block));
            }
            let last = 20 * capacity;
            let young = (last - capacity * 9 / 10..last).filter(|b| ghost.take(BlockNo(*b))).count();
            assert!(young as f64 >= 0.85 * f64::from(capacity) * 0.9, "{young} of {capacity}");
            let old = (0..last - capacity * 2).filter(|b| ghost.take(BlockNo(*b))).count();
            assert!(old as f64 <= 0.002 * f64::from(last), "{old} of {last} too old");
        }
    }

    #[test]
    fn takes_once() {
        let mut ghost = Ghost::new(100);
        ghost.insert(BlockNo(7));
        assert!(ghost.take(BlockNo(7)));
        assert!(!ghost.take(BlockNo(7)));
        assert!(!ghost.take(BlockNo(8)));
    }
}
