//! Counts recent accesses to blocks that are not in the cache. Each remembered block is one entry
//! of a [`Ghost`] list and takes about 5 bytes. The key of the entry is made from the block number
//! and the count.

use crate::policy::ghost::Ghost;
use crate::units::BlockNo;

/// Factor that spreads the access count over all bits of the key. Block numbers differ mostly in
/// their low bits, so without this factor the key would often equal that of a neighbouring block.
const SPREAD: u32 = 0x9e37_79b9;

/// Recently accessed blocks that admission refused, and their numbers of accesses.
#[derive(Debug)]
pub(super) struct Recent(Ghost);

impl Recent {
    /// Creates an empty set, with room for half as many blocks as a cache of `frames` frames has.
    /// Room for twice as many blocks would raise the hit ratio on real traces by 0.1 percentage
    /// points, and cost 2.5 more bytes per frame.
    pub(super) fn new(frames: u32) -> Self {
        Recent(Ghost::new((frames / 2).max(64)))
    }

    /// Counts an access to a block. Returns the block's number of accesses, including this one, at
    /// most `limit`. A block whose count reaches the limit is forgotten, since it is admitted.
    pub(super) fn count(&mut self, block: BlockNo, limit: u8) -> u8 {
        let before = (1..limit).rev().find(|count| self.0.take(marked(block, *count))).unwrap_or(0);
        if before + 1 < limit {
            self.remember(block, before + 1);
        }
        before + 1
    }

    /// Remembers that a block was accessed `count` times.
    pub(super) fn remember(&mut self, block: BlockNo, count: u8) {
        self.0.insert(marked(block, count));
    }

    pub(super) fn bytes(&self) -> u64 {
        self.0.bytes()
    }
}

fn marked(block: BlockNo, count: u8) -> BlockNo {
    BlockNo(block.0 ^ SPREAD.wrapping_mul(u32::from(count)))
}
