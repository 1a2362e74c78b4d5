//! The index of a cache: the frame of each block, the validity of the block's sectors, and their
//! checksums.
//!
//! Memory per 4 KiB block: 4 B block number, 4 B checksum, 1 bit validity, 5.3 B hash table, and 4
//! bits more in a persistent cache. Free frames form a linked list through the unused block
//! numbers.

pub(crate) mod bitmap;
mod free;
mod leaving;
mod marks;
pub(crate) mod parts;
pub(crate) mod restore;
mod second_copies;
mod table;
mod unverified;

use bitmap::Bitmap;
use free::FreeFrames;
pub(crate) use free::SegmentPlaces;
pub(crate) use leaving::Leaving;
use marks::Marks;
use table::Table;
pub(crate) use table::hash;
use unverified::Unverified;

use crate::admission::Room;
use crate::units::{BlockNo, FrameNo};

const NO_FRAME: u32 = u32::MAX;

/// The index of one cache.
#[derive(Clone, Debug)]
pub(crate) struct Index {
    table: Table,
    /// For each frame, its block, or the next free frame.
    block_of: Vec<u32>,
    free: FreeFrames,
    /// Validity of each sector, numbered through all frames.
    valid: Bitmap,
    sums: Vec<u32>,
    /// Flags of the sectors of a persistent cache (dirty, recorded, checksum unknown); `None` in a
    /// volatile cache.
    marks: Option<Box<Marks>>,
    /// Unverified sectors of a cache that was recovered without evidence that its backing is
    /// unchanged.
    unverified: Option<Box<Unverified>>,
    /// Segments that are being vacated.
    leaving: Option<Leaving>,
    /// Base-2 logarithm of the number of sectors in a block.
    block_shift: u32,
    used: u32,
    sectors_valid: u64,
    blocks_holding_data: u64,
}

impl Index {
    /// Creates an empty index of `frames` frames (1 to 2³² − 2), each with `1 << block_shift`
    /// sectors.
    pub(crate) fn new(frames: u32, block_shift: u32) -> Self {
        assert!(frames > 0 && frames < NO_FRAME);
        let sectors = (frames as usize) << block_shift;
        // Low frames are allocated first, so that the data of a cache that fills up stays together.
        let mut free = FreeFrames::none();
        let mut block_of = vec![NO_FRAME; frames as usize];
        (0..frames).for_each(|frame| free.push_last(&mut block_of, frame));
        Index {
            table: Table::new(frames),
            block_of,
            free,
            valid: Bitmap::new(sectors as u64),
            sums: vec![0; sectors],
            marks: None,
            unverified: None,
            leaving: None,
            block_shift,
            used: 0,
            sectors_valid: 0,
            blocks_holding_data: 0,
        }
    }

    pub(crate) fn frames(&self) -> u32 {
        self.block_of.len() as u32
    }

    pub(crate) fn sectors_in_block(&self) -> usize {
        1 << self.block_shift
    }

    /// Returns true if a frame is free.
    #[inline]
    pub(crate) fn has_free(&self) -> bool {
        !self.free.is_empty()
    }

    /// Returns whether a frame is free and how many are in use, for the admission rule.
    #[inline]
    pub(crate) fn room(&self) -> Room {
        Room { has_free: self.has_free(), used: self.used }
    }

    /// Returns the number of frames that are assigned to a block.
    #[cfg(test)]
    pub(crate) fn used(&self) -> u32 {
        self.used
    }

    pub(crate) fn sectors_valid(&self) -> u64 {
        self.sectors_valid
    }

    /// Returns the number of blocks with at least one valid sector.
    pub(crate) fn blocks_holding_data(&self) -> u64 {
        self.blocks_holding_data
    }

    /// Returns the memory used, in bytes.
    pub(crate) fn bytes(&self) -> u64 {
        let words = self.block_of.capacity() + self.sums.capacity();
        self.table.bytes()
            + (words * 4) as u64
            + self.valid.bytes()
            + self.marks.as_ref().map_or(0, |marks| marks.bytes())
            + self.unverified.as_ref().map_or(0, |unverified| unverified.bytes())
    }

    /// Returns the frame of a block.
    #[inline]
    pub(crate) fn find(&self, block: BlockNo) -> Option<FrameNo> {
        self.table.find(hash(block), |frame| self.block(frame) == block)
    }

    /// Reads a word at the start of the search for a block, so that the CPU caches the word.
    #[inline]
    pub(crate) fn peek(&self, block: BlockNo) -> u32 {
        self.table.peek(hash(block))
    }

    /// Returns the block in a frame that is in use.
    #[inline]
    pub(crate) fn block(&self, frame: FrameNo) -> BlockNo {
        BlockNo(self.block_of[frame.0 as usize])
    }

    /// Assigns a free frame to a block that has none; `None` if no frame is free.
    pub(crate) fn insert(&mut self, block: BlockNo) -> Option<FrameNo> {
        debug_assert!(self.find(block).is_none());
        let frame = FrameNo(self.free.pop(&self.block_of)?);
        self.place(block, frame);
        Some(frame)
    }

    /// Sets the device group of each segment. The second copy of a block is in another device group
    /// than the first.
    pub(crate) fn set_places(&mut self, places: SegmentPlaces) {
        let frames = self.free.drain(&self.block_of);
        self.free = FreeFrames::with_places(places);
        self.free.park(self.leaving.clone());
        frames.into_iter().for_each(|frame| self.free.push_last(&mut self.block_of, frame));
    }

    /// Moves blocks from another index with the same block size into this empty index. Each entry
    /// of `moves` has a frame of the other index, its new frame in this index, and for a second
    /// copy the new frame of the first copy. The new frames are in ascending order.
    pub(crate) fn adopt(
        &mut self,
        other: &Index,
        moves: impl Iterator<Item = (FrameNo, FrameNo, Option<FrameNo>)>,
    ) {
        assert!(self.used == 0 && self.block_shift == other.block_shift);
        let frames = self.frames();
        self.free.drain(&self.block_of);
        let mut next = 0;
        for (from, to, first) in moves {
            (next..to.0).for_each(|frame| self.free.push_last(&mut self.block_of, frame));
            next = to.0 + 1;
            match first {
                None => self.place(other.block(from), to),
                Some(first) => {
                    self.block_of[to.0 as usize] = other.block(from).0;
                    self.pair(first, to);
                }
            }
            for i in 0..1 << self.block_shift {
                let sector = other.first_sector(from) + i;
                if other.is_valid(sector) {
                    let to = self.first_sector(to) + i;
                    self.set_valid(to, other.sum(sector));
                    self.adopt_marks(other, sector, to);
                    self.adopt_unverified(other, sector, to);
                }
            }
        }
        (next..frames).for_each(|frame| self.free.push_last(&mut self.block_of, frame));
        self.recount_dirty();
        if let Some(marks) = other.marks.as_ref().filter(|marks| !marks.parts.is_empty()) {
            self.adopt_parts(marks.parts.iter().map(|(at, units)| (*at, *units)));
        }
    }

    /// Assigns a frame to a block in the table.
    fn place(&mut self, block: BlockNo, frame: FrameNo) {
        self.block_of[frame.0 as usize] = block.0;
        self.table.insert(hash(block), frame);
        self.used += 1;
    }

    /// Frees a frame in use, whose sectors must be invalid.
    pub(crate) fn remove(&mut self, frame: FrameNo) {
        debug_assert_eq!(self.count_valid(self.first_sector(frame), 1 << self.block_shift), 0);
        self.table.remove(hash(self.block(frame)), frame);
        self.free.push(&mut self.block_of, frame.0);
        self.used -= 1;
    }

    /// Returns the first cache sector of a frame.
    #[inline]
    pub(crate) fn first_sector(&self, frame: FrameNo) -> u64 {
        u64::from(frame.0) << self.block_shift
    }

    /// Returns how many of the `count` sectors from `first` on are valid.
    #[inline]
    pub(crate) fn count_valid(&self, first: u64, count: u64) -> u64 {
        self.valid.count(first, count)
    }

    #[inline]
    pub(crate) fn is_valid(&self, sector: u64) -> bool {
        self.valid.get(sector)
    }

    #[inline]
    pub(crate) fn sum(&self, sector: u64) -> u32 {
        self.sums[sector as usize]
    }

    /// Marks one sector valid.
    #[inline]
    pub(crate) fn set_valid(&mut self, sector: u64, sum: u32) {
        self.sums[sector as usize] = sum;
        self.set_verified(sector, 1);
        if let Some(marks) = &mut self.marks
            && !marks.unknown.is_empty()
        {
            marks.unknown.remove(&sector);
        }
        if !self.is_valid(sector) {
            if self.block_is_empty(sector) {
                self.blocks_holding_data += 1;
            }
            self.valid.set(sector);
            self.sectors_valid += 1;
        }
    }

    /// Marks sectors of one frame invalid and clean. Returns how many were valid.
    #[inline]
    pub(crate) fn clear_valid(&mut self, first: u64, count: u64) -> u64 {
        let before = self.count_valid(first, count);
        if before == 0 {
            return 0;
        }
        self.clear_dirty(first, count);
        self.set_verified(first, count);
        self.valid.clear(first, count);
        self.sectors_valid -= before;
        if self.block_is_empty(first) {
            self.blocks_holding_data -= 1;
        }
        before
    }

    /// Returns true if the frame of this sector has no valid sector.
    #[inline]
    pub(crate) fn block_is_empty(&self, sector: u64) -> bool {
        if self.block_shift == 0 {
            return !self.is_valid(sector);
        }
        !self.valid.any(sector >> self.block_shift << self.block_shift, 1 << self.block_shift)
    }

    /// Returns a sector's address in the journal: the frame, its block, and the sector's position
    /// in the block.
    #[inline]
    pub(crate) fn locate(&self, sector: u64) -> (FrameNo, BlockNo, u8) {
        let frame = FrameNo((sector >> self.block_shift) as u32);
        (frame, self.block(frame), (sector - self.first_sector(frame)) as u8)
    }

    /// Returns the first valid sector at or after `from`.
    pub(crate) fn next_valid(&self, from: u64) -> Option<u64> {
        self.valid.next_one(from)
    }

    /// Returns the base-2 logarithm of the number of sectors in a block.
    #[inline]
    pub(crate) fn block_shift(&self) -> u32 {
        self.block_shift
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn behaves_like_a_map(frames in 1u32..40, shift in 0u32..3,
            steps in prop::collection::vec((0u32..60, any::<bool>(), 0u64..4), 0..400)) {
            let mut index = Index::new(frames, shift);
            let mut model: BTreeMap<u32, (FrameNo, BTreeMap<u64, u32>)> = BTreeMap::new();
            for (step, (block, grow, sector)) in steps.into_iter().enumerate() {
                let sector = sector % (1 << shift);
                match (model.contains_key(&block), grow) {
                    (false, _) => match index.insert(BlockNo(block)) {
                        Some(frame) => { model.insert(block, (frame, BTreeMap::new())); }
                        None => prop_assert_eq!(model.len(), frames as usize),
                    },
                    (true, true) => {
                        let (frame, sectors) = model.get_mut(&block).unwrap();
                        index.set_valid(index.first_sector(*frame) + sector, step as u32);
                        sectors.insert(sector, step as u32);
                    }
                    (true, false) => {
                        let (frame, _) = model.remove(&block).unwrap();
                        index.clear_valid(index.first_sector(frame), 1 << shift);
                        index.remove(frame);
                    }
                }
                prop_assert_eq!(index.used() as usize, model.len());
                for block in 0..60 {
                    prop_assert_eq!(index.find(BlockNo(block)), model.get(&block).map(|(frame, _)| *frame));
                }
                let valid: usize = model.values().map(|(_, s)| s.len()).sum();
                prop_assert_eq!(index.sectors_valid(), valid as u64);
                let holding = model.values().filter(|(_, s)| !s.is_empty()).count();
                prop_assert_eq!(index.blocks_holding_data(), holding as u64);
                for (frame, sectors) in model.values() {
                    for (sector, sum) in sectors {
                        prop_assert_eq!(index.sum(index.first_sector(*frame) + sector), *sum);
                    }
                }
            }
        }
    }

    #[test]
    fn low_frames_come_first() {
        let mut index = Index::new(4, 0);
        let frames: Vec<_> = (0..5).map(|b| index.insert(BlockNo(b * 77)).map(|f| f.0)).collect();
        assert_eq!(frames, [Some(0), Some(1), Some(2), Some(3), None]);
    }
}
