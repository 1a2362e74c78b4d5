//! The LRU stack of all blocks of a trace, and how deep each lies.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::hash::{BuildHasherDefault, Hasher};

use anyhow::{Result, ensure};
use hob_engine::sizing::Timeline;

use crate::prng::splitmix64;

/// Most sectors (4 KiB) in the blocks of a trace: 512 GiB. Exact curves then take up to 8 GiB of memory.
pub const SECTORS_MAX: u64 = 1 << 27;

/// A distance that no cache covers.
pub(super) const NEVER: u32 = u32::MAX;

const NO_SLOT: u32 = u32::MAX;
const ROOM_FIRST: u32 = 1024;

/// Scatters block numbers over the table.
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

/// Every block seen, most recently used on top. Blocks have numbers 0, 1, … in the order they came.
#[derive(Debug)]
pub(super) struct Stack {
    numbers: HashMap<u64, u32, BuildHasherDefault<BlockHasher>>,
    /// Per block: the slot of its last use.
    slots: Vec<u32>,
    timeline: Timeline,
    room: u32,
    blocks_max: u64,
}

impl Stack {
    /// For blocks of `1 << shift` sectors.
    pub(super) fn new(shift: u32) -> Self {
        Stack {
            numbers: HashMap::default(),
            slots: Vec::new(),
            timeline: Timeline::new(ROOM_FIRST),
            room: ROOM_FIRST,
            blocks_max: SECTORS_MAX >> shift,
        }
    }

    /// Blocks seen.
    pub(super) fn len(&self) -> u64 {
        self.slots.len() as u64
    }

    /// The number of a block, if it was seen.
    pub(super) fn find(&self, block: u64) -> Option<u32> {
        self.numbers.get(&block).copied()
    }

    /// The number of a block, a new one if need be. It is not used by that.
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

    /// The size from which on a cache holds this block now: one more than the blocks used since it was.
    #[inline]
    pub(super) fn distance(&self, number: u32) -> u32 {
        match self.slots[number as usize] {
            NO_SLOT => NEVER,
            slot => self.timeline.younger(slot) + 1,
        }
    }

    /// The block is used.
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
