//! LRU stack of all blocks of a trace, with the depth of each block.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::hash::{BuildHasherDefault, Hasher};

use anyhow::{Result, ensure};
use hob_engine::sizing::Timeline;

use crate::prng::splitmix64;

/// Maximum number of 4 KiB sectors in the blocks of a trace, which is 512 GiB of data. Exact curves
/// then take up to 8 GiB of memory.
pub const SECTORS_MAX: u64 = 1 << 27;

/// A stack distance that no cache size covers.
pub(super) const NEVER: u32 = u32::MAX;

const NO_SLOT: u32 = u32::MAX;
const ROOM_FIRST: u32 = 1024;

/// Hash function for block numbers.
#[derive(Clone, Copy, Debug, Default)]
struct BlockHasher(u64);

impl Hasher for BlockHasher {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        bytes.iter().for_each(|byte| self.write_u64(u64::from(*byte)));
    }

    fn write_u64(&mut self, number: u64) {
        let mut counter = self.0 ^ number;
        self.0 = splitmix64(&mut counter);
    }
}

/// All blocks seen so far, with the most recently used block on top. Blocks are numbered 0, 1, … in
/// the order of their first use.
#[derive(Debug)]
pub(super) struct Stack {
    numbers: HashMap<u64, u32, BuildHasherDefault<BlockHasher>>,
    /// Slot of the last use of each block.
    slots: Vec<u32>,
    timeline: Timeline,
    room: u32,
    blocks_max: u64,
}

impl Stack {
    /// Creates a stack for blocks of `1 << shift` sectors.
    pub(super) fn new(shift: u32) -> Self {
        Stack {
            numbers: HashMap::default(),
            slots: Vec::new(),
            timeline: Timeline::new(ROOM_FIRST),
            room: ROOM_FIRST,
            blocks_max: SECTORS_MAX >> shift,
        }
    }

    /// Returns the number of blocks seen so far.
    pub(super) fn len(&self) -> u64 {
        self.slots.len() as u64
    }

    /// Returns the number of a block, or `None` if the block was never seen.
    pub(super) fn find(&self, block: u64) -> Option<u32> {
        self.numbers.get(&block).copied()
    }

    /// Returns the number of a block, and numbers a new block. The call does not count as a use of
    /// the block.
    pub(super) fn enter(&mut self, block: u64) -> Result<u32> {
        let next = self.slots.len() as u32;
        match self.numbers.entry(block) {
            Entry::Occupied(entry) => Ok(*entry.get()),
            Entry::Vacant(entry) => {
                ensure!(
                    u64::from(next) < self.blocks_max,
                    "the trace's blocks have more than {SECTORS_MAX} sectors: take a sampled curve, or larger blocks"
                );
                entry.insert(next);
                self.slots.push(NO_SLOT);
                Ok(next)
            }
        }
    }

    /// Returns the smallest cache size that still has this block: one more than the number of
    /// distinct other blocks that were used after this block's last use.
    #[inline]
    pub(super) fn distance(&self, number: u32) -> u32 {
        match self.slots[number as usize] {
            NO_SLOT => NEVER,
            slot => self.timeline.younger(slot) + 1,
        }
    }

    /// Marks the block as most recently used.
    #[inline]
    pub(super) fn touch(&mut self, number: u32) {
        let slots = &mut self.slots;
        match slots[number as usize] {
            NO_SLOT if self.timeline.len() == self.room => {
                self.room *= 2;
                self.timeline =
                    self.timeline.with_room(self.room, |number, slot| slots[number as usize] = slot);
            }
            NO_SLOT => {}
            slot => self.timeline.remove(slot),
        }
        slots[number as usize] = self.timeline.push(number, |number, slot| slots[number as usize] = slot);
    }
}
