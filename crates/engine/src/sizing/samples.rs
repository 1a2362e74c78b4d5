//! The sampled blocks: a hash table from block number to sample. The table uses open addressing
//! over sample numbers, and is at most half full. A sample keeps its number until samples are
//! removed ([`Samples::retain`]).

use super::buckets::BucketNo;

const EMPTY: u32 = u32::MAX;

/// A sampled block, with `SECTORS` sectors that are tracked individually.
#[derive(Clone, Copy, Debug)]
pub(super) struct Sample<const SECTORS: usize> {
    pub(super) block: u64,
    /// Total weight of the block's accesses.
    pub(super) used: f64,
    /// Slot of the block in the timeline.
    pub(super) slot: u32,
    /// Bucket of the distance of the block's last access; `None` at the first access.
    pub(super) bucket: Option<BucketNo>,
    /// For each sector, the largest distance of the block since the sector became valid; `None` if
    /// the sector is invalid.
    pub(super) valid_from: [Option<BucketNo>; SECTORS],
}

/// Table of all samples.
#[derive(Clone, Debug)]
pub(super) struct Samples<const SECTORS: usize> {
    samples: Vec<Sample<SECTORS>>,
    /// Slots of the hash table: `EMPTY` or a sample's number. The number of slots is a power of
    /// two.
    table: Vec<u32>,
    capacity: u32,
}

impl<const SECTORS: usize> Samples<SECTORS> {
    /// Allocates room for `capacity` samples. The table never grows by itself.
    pub(super) fn new(capacity: u32) -> Self {
        let slots = (capacity as usize * 2).next_power_of_two().max(2);
        Samples { samples: Vec::with_capacity(capacity as usize), table: vec![EMPTY; slots], capacity }
    }

    /// Returns the same samples with the same numbers, with room for more.
    pub(super) fn with_room(&self, capacity: u32) -> Self {
        let mut wide = Samples::new(capacity);
        self.samples.iter().for_each(|sample| {
            wide.add(*sample);
        });
        wide
    }

    pub(super) fn len(&self) -> u32 {
        self.samples.len() as u32
    }

    /// Returns the maximum number of samples.
    pub(super) fn room(&self) -> u32 {
        self.capacity
    }

    pub(super) fn get(&self, number: u32) -> &Sample<SECTORS> {
        &self.samples[number as usize]
    }

    pub(super) fn get_mut(&mut self, number: u32) -> &mut Sample<SECTORS> {
        &mut self.samples[number as usize]
    }

    /// Returns the number of a block's sample; `None` if the block is not sampled.
    #[inline]
    pub(super) fn find(&self, block: u64) -> Option<u32> {
        let mut at = self.home(block);
        loop {
            let number = self.table[at];
            if number == EMPTY {
                return None;
            }
            if self.samples[number as usize].block == block {
                return Some(number);
            }
            at = (at + 1) & (self.table.len() - 1);
        }
    }

    /// Adds a sample, with the next number.
    pub(super) fn add(&mut self, sample: Sample<SECTORS>) -> u32 {
        assert!(self.len() < self.capacity, "samples have their room");
        let number = self.len();
        self.samples.push(sample);
        self.insert(number);
        number
    }

    /// Replaces the sample with this number by a sample of another block.
    pub(super) fn replace(&mut self, number: u32, sample: Sample<SECTORS>) {
        self.leave(number);
        self.samples[number as usize] = sample;
        self.insert(number);
    }

    /// Removes the samples for which `keep` is false. The others get lower numbers in the same
    /// order.
    pub(super) fn retain(&mut self, keep: impl Fn(&Sample<SECTORS>) -> bool) {
        self.samples.retain(keep);
        self.table.fill(EMPTY);
        (0..self.len()).for_each(|number| self.insert(number));
    }

    pub(super) fn bytes(&self) -> u64 {
        (self.samples.capacity() * size_of::<Sample<SECTORS>>() + self.table.capacity() * 4) as u64
    }

    fn insert(&mut self, number: u32) {
        let mut at = self.home(self.samples[number as usize].block);
        while self.table[at] != EMPTY {
            at = (at + 1) & (self.table.len() - 1);
        }
        self.table[at] = number;
    }

    fn leave(&mut self, number: u32) {
        let mask = self.table.len() - 1;
        let mut hole = self.home(self.samples[number as usize].block);
        while self.table[hole] != number {
            hole = (hole + 1) & mask;
        }
        // Backward shift: moves each following entry into the hole if it stays at or after its home
        // slot.
        let mut at = hole;
        loop {
            at = (at + 1) & mask;
            let follower = self.table[at];
            if follower == EMPTY {
                break;
            }
            let home = self.home(self.samples[follower as usize].block);
            if at.wrapping_sub(home) & mask >= at.wrapping_sub(hole) & mask {
                self.table[hole] = follower;
                hole = at;
            }
        }
        self.table[hole] = EMPTY;
    }

    fn home(&self, block: u64) -> usize {
        super::shards::scatter(block) as usize & (self.table.len() - 1)
    }
}
