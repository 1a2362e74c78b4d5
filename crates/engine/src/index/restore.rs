//! Builds an index from journal records that arrive in any order.
//!
//! A [`Restoring`] has first and second copies of blocks in the same table, and has no list of free
//! frames. [`Restoring::finish`] makes an index for use from it: second copies leave the table, and
//! empty frames become free.

use std::collections::BTreeMap;

use super::bitmap::Bitmap;
use super::free::FreeFrames;
use super::parts::ALL_UNITS;
use super::{Index, hash};
use crate::units::{BlockNo, FrameNo};

/// Block number of an empty frame. Blocks of a cache with a journal have smaller numbers.
const NO_BLOCK: u32 = u32::MAX;

/// First or second copy of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Copy {
    First,
    Second,
}

/// An index that is being restored from journal records.
#[derive(Clone, Debug)]
pub(crate) struct Restoring {
    index: Index,
    second: Bitmap,
    /// The last recorded units of each incomplete sector of the disk. Sectors that are not dirty
    /// after the last record are ignored.
    parts: BTreeMap<u64, u8>,
}

impl Restoring {
    /// Creates an index of `frames` empty frames.
    pub(crate) fn new(frames: u32, block_shift: u32) -> Restoring {
        let mut index = Index::new(frames, block_shift);
        index.keep_marks();
        index.block_of.fill(NO_BLOCK);
        index.free = FreeFrames::none();
        Restoring { index, second: Bitmap::new(u64::from(frames)), parts: BTreeMap::new() }
    }

    /// Returns the current state. Only the flags and checksums of its sectors are meaningful.
    pub(crate) fn index(&self) -> &Index {
        &self.index
    }

    /// Returns the block in a frame.
    #[inline]
    pub(crate) fn block(&self, frame: FrameNo) -> Option<BlockNo> {
        Some(self.index.block(frame)).filter(|block| block.0 != NO_BLOCK)
    }

    /// Returns whether a used frame holds the first or the second copy of its block.
    #[inline]
    pub(crate) fn copy(&self, frame: FrameNo) -> Copy {
        if self.second.get(u64::from(frame.0)) { Copy::Second } else { Copy::First }
    }

    /// Reads a word that a lookup of the block will read, so that the CPU caches the word.
    #[inline]
    pub(crate) fn touch_block(&self, block: BlockNo) -> u32 {
        self.index.peek(block)
    }

    /// Reads words of a frame's state, so that the CPU caches them.
    #[inline]
    pub(crate) fn touch_frame(&self, frame: FrameNo) -> u32 {
        let sector = self.index.first_sector(frame);
        let bits = u32::from(self.index.is_valid(sector)) ^ u32::from(self.index.is_dirty(sector));
        self.index.block(frame).0 ^ self.index.sum(sector) ^ bits
    }

    /// Returns the frame of one copy of a block.
    #[inline]
    pub(crate) fn find(&self, block: BlockNo, copy: Copy) -> Option<FrameNo> {
        self.index
            .table
            .find(hash(block), |frame| self.index.block(frame) == block && self.copy(frame) == copy)
    }

    /// Returns the frame of the other copy of this sector's block, and the corresponding sector in
    /// that frame.
    pub(crate) fn twin(&self, sector: u64) -> Option<(FrameNo, u64)> {
        let frame = FrameNo((sector >> self.index.block_shift) as u32);
        let others = if self.copy(frame) == Copy::First { Copy::Second } else { Copy::First };
        let other = self.find(self.block(frame)?, others)?;
        Some((other, self.index.first_sector(other) + (sector - self.index.first_sector(frame))))
    }

    /// Assigns a frame to a copy of a block. If another frame held this copy, that frame becomes
    /// empty. The new frame is also emptied, unless it already held the same copy.
    #[inline]
    pub(crate) fn place(&mut self, frame: FrameNo, block: BlockNo, copy: Copy) {
        if self.block(frame) == Some(block) && self.copy(frame) == copy {
            return;
        }
        self.vacate(frame);
        if let Some(before) = self.find(block, copy) {
            self.vacate(before);
        }
        self.index.place(block, frame);
        if copy == Copy::Second {
            self.second.set(u64::from(frame.0));
        }
    }

    /// Exchanges the two copies of a block if the second copy has all dirty sectors of the first.
    /// Clean sectors of the first copy are dropped.
    pub(crate) fn swap(&mut self, first: FrameNo, second: FrameNo) -> bool {
        let (one, two) = (self.index.first_sector(first), self.index.first_sector(second));
        let sectors = 1 << self.index.block_shift;
        if (0..sectors).any(|i| self.index.is_dirty(one + i) && !self.index.is_dirty(two + i)) {
            return false;
        }
        for i in (0..sectors).filter(|i| !self.index.is_dirty(one + i)).collect::<Vec<_>>() {
            self.clear(one + i, 1);
        }
        self.second.set(u64::from(first.0));
        self.second.clear(u64::from(second.0), 1);
        true
    }

    /// Empties a frame.
    #[inline]
    pub(crate) fn vacate(&mut self, frame: FrameNo) {
        let Some(block) = self.block(frame) else { return };
        self.clear(self.index.first_sector(frame), 1 << self.index.block_shift);
        self.index.table.remove(hash(block), frame);
        self.index.block_of[frame.0 as usize] = NO_BLOCK;
        self.index.used -= 1;
        self.second.clear(u64::from(frame.0), 1);
    }

    /// Marks a sector as valid, and as dirty or clean.
    #[inline]
    pub(crate) fn set(&mut self, sector: u64, sum: u32, dirty: bool) {
        self.index.clear_dirty(sector, 1);
        self.index.set_valid(sector, sum);
        if dirty {
            self.index.set_dirty(sector);
        }
    }

    /// Marks the checksum of a dirty sector as unknown.
    pub(crate) fn set_unproven(&mut self, sector: u64) {
        self.index.set_unproven(sector, true);
        self.index.forget_sum(sector);
    }

    /// Stores the last committed checksum of a sector, whose content on flash may be newer.
    pub(crate) fn note_last_sum(&mut self, sector: u64, sum: u32) {
        self.index.set_valid(sector, sum);
    }

    /// Records the units that flash has of a sector of the disk.
    #[inline]
    pub(crate) fn set_units(&mut self, disk_sector: u64, units: u8) {
        match units {
            ALL_UNITS if self.parts.is_empty() => {}
            ALL_UNITS => _ = self.parts.remove(&disk_sector),
            _ => _ = self.parts.insert(disk_sector, units),
        }
    }

    /// Sets the recorded units of a block's sectors. `parts` has the incomplete sectors of the disk
    /// with their units. All other sectors of the block become complete.
    #[inline]
    pub(crate) fn set_parts(&mut self, block: BlockNo, parts: &[(u64, u8)]) {
        if parts.is_empty() && self.parts.is_empty() {
            return;
        }
        let first = u64::from(block.0) << self.index.block_shift;
        let sectors = first..first + (1 << self.index.block_shift);
        self.parts.retain(|at, _| !sectors.contains(at));
        self.parts.extend(parts.iter().copied().filter(|(at, _)| sectors.contains(at)));
    }

    /// Marks sectors of a frame clean.
    pub(crate) fn clean(&mut self, first: u64, count: u64) {
        self.index.clear_dirty(first, count);
    }

    /// Marks sectors of a frame invalid.
    #[inline]
    pub(crate) fn clear(&mut self, first: u64, count: u64) {
        self.index.clear_valid(first, count);
    }

    /// Turns the only copy of a block into its first copy.
    pub(crate) fn promote(&mut self, frame: FrameNo) {
        self.second.clear(u64::from(frame.0), 1);
    }

    /// Returns an index of the first `frames` frames; all others must be empty. Frames without
    /// valid sectors become free. The durable journal may record the dirty sectors as dirty.
    pub(crate) fn finish(mut self, frames: u32) -> Index {
        if frames < self.index.frames() {
            self = self.shortened(frames);
        }
        for frame in (0..frames).map(FrameNo) {
            if self.index.block_is_empty(self.index.first_sector(frame)) {
                self.vacate(frame);
            }
        }
        self.pair();
        let Restoring { mut index, parts, .. } = self;
        for frame in 0..frames {
            if index.block_of[frame as usize] == NO_BLOCK {
                index.free.push_last(&mut index.block_of, frame);
            }
        }
        index.recount_dirty();
        for sector in index.unproven_sectors() {
            index.forget_sum(sector);
        }
        index.hold_dirty();
        index.adopt_parts(parts.into_iter());
        index
    }

    /// Removes second copies from the table.
    fn pair(&mut self) {
        for second in (0..self.index.frames()).map(FrameNo) {
            let Some(block) = self.block(second).filter(|_| self.copy(second) == Copy::Second) else {
                continue;
            };
            let Some(first) = self.find(block, Copy::First) else {
                self.promote(second);
                continue;
            };
            self.index.table.remove(hash(block), second);
            let marks = self.index.marks.as_mut().expect("made with them");
            marks.second_of.insert(first, second);
            marks.first_of.insert(second, first);
        }
    }

    /// Returns the same index with fewer frames.
    fn shortened(&self, frames: u32) -> Restoring {
        let mut shorter = Restoring::new(frames, self.index.block_shift);
        shorter.parts = self.parts.clone();
        for frame in (0..frames).map(FrameNo) {
            let Some(block) = self.block(frame) else { continue };
            shorter.place(frame, block, self.copy(frame));
            let first = self.index.first_sector(frame);
            for sector in (first..first + (1 << self.index.block_shift)).filter(|s| self.index.is_valid(*s)) {
                shorter.set(sector, self.index.sum(sector), self.index.is_dirty(sector));
                if self.index.is_unproven(sector) {
                    shorter.set_unproven(sector);
                }
            }
        }
        shorter
    }
}

impl Index {
    /// Invalidates every sector of used frames for which `is_wanted` is false. The arguments of
    /// `is_wanted` are the sector on the disk and whether it is dirty. Frames without valid sectors
    /// become free. Afterwards only dirty sectors are marked as recorded dirty in the durable
    /// journal.
    pub(crate) fn retain(&mut self, is_wanted: impl Fn(u64, bool) -> bool) {
        let sectors = 1 << self.block_shift;
        for frame in (0..self.frames()).map(FrameNo) {
            let first = self.first_sector(frame);
            if self.block_is_empty(first) {
                continue;
            }
            let on_disk = u64::from(self.block(frame).0) << self.block_shift;
            for i in 0..sectors {
                if self.is_valid(first + i) && !is_wanted(on_disk + i, self.is_dirty(first + i)) {
                    self.clear_valid(first + i, 1);
                }
            }
            if self.block_is_empty(first) {
                self.give_up(frame);
            }
        }
        self.hold_dirty();
    }

    /// Frees a frame without valid sectors, and separates it from the other copy of its block.
    fn give_up(&mut self, frame: FrameNo) {
        let block = self.block(frame);
        let marks = self.marks.as_mut().expect("a cache with a journal");
        if let Some(first) = marks.first_of.remove(&frame) {
            marks.second_of.remove(&first);
        } else {
            let second = marks.second_of.remove(&frame);
            self.table.remove(hash(block), frame);
            if let Some(second) = second {
                marks.first_of.remove(&second);
                self.table.insert(hash(block), second);
                // The second copy becomes the first one.
                let first = u64::from(second.0) << self.block_shift;
                marks.dirty_sectors += marks.dirty.count(first, 1 << self.block_shift);
            }
        }
        self.free.push(&mut self.block_of, frame.0);
        self.used -= 1;
    }
}
