//! Second copies: blocks with two frames, which lie at different places.

use super::Index;
use crate::units::FrameNo;

impl Index {
    /// Do second copies lie where no other block does? Then no eviction makes room for one.
    pub(crate) fn are_seconds_apart(&self) -> bool {
        self.free.are_seconds_apart()
    }

    /// Gives the block in this frame a second frame, at another place. `None` when none is free there.
    pub(crate) fn insert_second(&mut self, first: FrameNo) -> Option<FrameNo> {
        let second = FrameNo(self.free.pop_apart(&self.block_of, first.0)?);
        self.block_of[second.0 as usize] = self.block_of[first.0 as usize];
        self.pair(first, second);
        Some(second)
    }

    /// One of two frames of a block keeps the second copy.
    pub(crate) fn pair(&mut self, first: FrameNo, second: FrameNo) {
        let marks = self.marks.as_mut().expect("only a persistent cache has second copies");
        assert!(
            marks.second_of.insert(first, second).is_none() && marks.first_of.insert(second, first).is_none()
        );
    }

    /// Frames for second copies.
    pub(crate) fn seconds(&self) -> u64 {
        self.marks.as_ref().map_or(0, |marks| marks.second_of.len() as u64)
    }

    /// Frees the second frame of a block. Its sectors must be invalid.
    pub(crate) fn remove_second(&mut self, second: FrameNo) {
        let marks = self.marks.as_mut().expect("only a persistent cache has second copies");
        let first = marks.first_of.remove(&second).expect("it is a second copy");
        marks.second_of.remove(&first);
        // Second copies are made in the order of their blocks, and go in that order: the next ones find them side by side.
        self.free.push_last(&mut self.block_of, second.0);
    }

    /// Frees the frame of this sector if it is for a second copy and holds nothing.
    pub(crate) fn free_second_if_empty(&mut self, sector: u64) {
        let frame = FrameNo((sector >> self.block_shift) as u32);
        let (first, count) = (self.first_sector(frame), 1 << self.block_shift);
        if self.first_of(frame).is_some()
            && self.count_valid(first, count) == 0
            && !self.any_held(first, count)
        {
            self.remove_second(frame);
        }
    }

    /// The sector of the second copy of this one, if its block has one.
    #[inline]
    pub(crate) fn second_sector(&self, sector: u64) -> Option<u64> {
        let frame = FrameNo((sector >> self.block_shift) as u32);
        let second = self.second_of(frame)?;
        Some(self.first_sector(second) + (sector - self.first_sector(frame)))
    }

    /// The sector of which this one is the second copy.
    pub(crate) fn of_second(&self, sector: u64) -> Option<u64> {
        let frame = FrameNo((sector >> self.block_shift) as u32);
        let first = self.first_of(frame)?;
        Some(self.first_sector(first) + (sector - self.first_sector(frame)))
    }

    /// The frame with the second copy of what this one holds.
    #[inline]
    pub(crate) fn second_of(&self, frame: FrameNo) -> Option<FrameNo> {
        self.marks.as_ref()?.second_of.get(&frame).copied()
    }

    /// The frame of which this one holds the second copy.
    pub(crate) fn first_of(&self, frame: FrameNo) -> Option<FrameNo> {
        self.marks.as_ref()?.first_of.get(&frame).copied()
    }
}
