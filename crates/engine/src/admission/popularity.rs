//! How often blocks that are not in the cache were asked for lately: about 5 bytes for each block
//! remembered, one entry for each count. A block's count is part of what is remembered of it.

use crate::policy::ghost::Ghost;
use crate::units::BlockNo;

/// Block numbers differ in their low bits, the counts mixed in differ in the high ones.
const SPREAD: u32 = 0x9e37_79b9;

/// Accesses to blocks that were refused.
#[derive(Debug)]
pub(super) struct Recent(Ghost);

impl Recent {
    /// Remembers as many blocks as a cache of that many frames holds.
    pub(super) fn new(frames: u32) -> Self {
        Recent(Ghost::new(frames.max(64)))
    }

    /// Counts an access and returns the count, this access included, at most `limit`. A block whose
    /// count reaches the limit is forgotten: it comes in.
    pub(super) fn count(&mut self, block: BlockNo, limit: u8) -> u8 {
        let before = (1..limit).rev().find(|count| self.0.take(marked(block, *count))).unwrap_or(0);
        if before + 1 < limit {
            self.remember(block, before + 1);
        }
        before + 1
    }

    /// Remembers that a block was asked for that many times.
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
