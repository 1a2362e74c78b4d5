//! A set of block numbers that a policy remembers exactly although the blocks are not in the cache.
//! Each remembered block has a small number, by which a policy keeps the block in its own lists.
//! Memory use is 12 bytes for each block of the set's capacity.
//!
//! The set is a hash table with chains. A [`Ghost`](super::ghost::Ghost) takes less than half of
//! the memory. But a ghost keeps only the order of insertion, and may forget a block slightly too
//! early or too late.

use super::list::NONE;
use crate::index::hash;
use crate::units::BlockNo;

#[derive(Debug)]
struct Entry {
    block: BlockNo,
    /// Next entry in the chain, or in the list of unused entries.
    next: u32,
}

/// Returns the number of blocks that a policy can remember in addition to `frames` frames, at most
/// `wanted`. Frames and remembered blocks share one numbering, so the result is less than `wanted`
/// for caches near the maximum size.
pub(super) fn room(frames: u32, wanted: u32) -> u32 {
    wanted.min(NONE - 1 - frames)
}

/// A set of blocks, each with a number from 0 to the set's capacity minus 1.
#[derive(Debug)]
pub(super) struct Remembered {
    /// First entry of each chain.
    chains: Vec<u32>,
    entries: Vec<Entry>,
    unused: u32,
    len: u32,
}

impl Remembered {
    pub(super) fn new(capacity: u32) -> Self {
        let next = |i| if i + 1 < capacity { i + 1 } else { NONE };
        Remembered {
            chains: vec![NONE; capacity as usize],
            entries: (0..capacity).map(|i| Entry { block: BlockNo(0), next: next(i) }).collect(),
            unused: if capacity == 0 { NONE } else { 0 },
            len: 0,
        }
    }

    pub(super) fn len(&self) -> u32 {
        self.len
    }

    /// Returns the number of a block in this set; `None` if the block is not remembered.
    #[inline]
    pub(super) fn find(&self, block: BlockNo) -> Option<u32> {
        let mut at = *self.chains.get(self.chain(block))?;
        while at != NONE {
            let entry = &self.entries[at as usize];
            if entry.block == block {
                return Some(at);
            }
            at = entry.next;
        }
        None
    }

    /// Adds a block that is not remembered, and returns its number. Panics if the set is full.
    pub(super) fn insert(&mut self, block: BlockNo) -> u32 {
        debug_assert!(self.find(block).is_none());
        assert!(self.unused != NONE, "policies make room before they remember");
        let number = self.unused;
        let chain = self.chain(block);
        let entry = &mut self.entries[number as usize];
        self.unused = entry.next;
        *entry = Entry { block, next: self.chains[chain] };
        self.chains[chain] = number;
        self.len += 1;
        number
    }

    /// Removes the block that has this number.
    pub(super) fn remove(&mut self, number: u32) {
        let Entry { block, next } = self.entries[number as usize];
        let chain = self.chain(block);
        if self.chains[chain] == number {
            self.chains[chain] = next;
        } else {
            let mut at = self.chains[chain];
            while self.entries[at as usize].next != number {
                at = self.entries[at as usize].next;
            }
            self.entries[at as usize].next = next;
        }
        self.entries[number as usize].next = self.unused;
        self.unused = number;
        self.len -= 1;
    }

    #[inline]
    fn chain(&self, block: BlockNo) -> usize {
        (((hash(block) >> 32) * self.chains.len() as u64) >> 32) as usize
    }

    pub(super) fn bytes(&self) -> u64 {
        4 * self.chains.capacity() as u64 + 8 * self.entries.capacity() as u64
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn remembers_like_a_map(steps in prop::collection::vec(0u32..40, 0..400)) {
            let mut directory = Remembered::new(20);
            let mut model = BTreeMap::new();
            for block in steps {
                match model.remove(&block) {
                    Some(number) => directory.remove(number),
                    None if model.len() < 20 => {
                        model.insert(block, directory.insert(BlockNo(block)));
                    }
                    None => {}
                }
                for block in 0..40 {
                    prop_assert_eq!(directory.find(BlockNo(block)), model.get(&block).copied());
                }
                prop_assert_eq!(directory.len() as usize, model.len());
            }
        }
    }
}
