//! Second copies of blocks, which are in another frame on another device.

use super::Index;
use crate::units::FrameNo;

impl Index {
    /// Returns true if second copies are only in device groups that have no first copies. In that
    /// case, evicting first copies frees no frames for second copies.
    pub(crate) fn are_seconds_apart(&self) -> bool {
        self.free.are_seconds_apart()
    }

    /// Allocates a second frame, in another device group, for the block in this frame. Returns
    /// `None` if no frame in another device group is free.
    pub(crate) fn insert_second(&mut self, first: FrameNo) -> Option<FrameNo> {
        let second = FrameNo(self.free.pop_apart(&self.block_of, first.0)?);
        self.block_of[second.0 as usize] = self.block_of[first.0 as usize];
        self.pair(first, second);
        Some(second)
    }

    /// Records that `second` holds the second copy of the block in `first`.
    pub(crate) fn pair(&mut self, first: FrameNo, second: FrameNo) {
        let marks = self.marks.as_mut().expect("only a persistent cache has second copies");
        assert!(
            marks.second_of.insert(first, second).is_none() && marks.first_of.insert(second, first).is_none()
        );
    }

    /// Returns the number of frames for second copies.
    pub(crate) fn seconds(&self) -> u64 {
        self.marks.as_ref().map_or(0, |marks| marks.second_of.len() as u64)
    }

    /// Frees the second frame of a block. Its sectors must be invalid.
    pub(crate) fn remove_second(&mut self, second: FrameNo) {
        let marks = self.marks.as_mut().expect("only a persistent cache has second copies");
        let first = marks.first_of.remove(&second).expect("the frame has a second copy");
        marks.second_of.remove(&first);
        // Second copies are created and freed in the order of their blocks. So the next second
        // copies get adjacent frames.
        self.free.push_last(&mut self.block_of, second.0);
    }

    /// Frees the frame of this sector if it is for a second copy and holds no data.
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

    /// Returns the sector of this sector's second copy, if its block has one.
    #[inline]
    pub(crate) fn second_sector(&self, sector: u64) -> Option<u64> {
        let frame = FrameNo((sector >> self.block_shift) as u32);
        let second = self.second_of(frame)?;
        Some(self.first_sector(second) + (sector - self.first_sector(frame)))
    }

    /// Returns the sector of the first copy, if this sector is in a second copy.
    pub(crate) fn of_second(&self, sector: u64) -> Option<u64> {
        let frame = FrameNo((sector >> self.block_shift) as u32);
        let first = self.first_of(frame)?;
        Some(self.first_sector(first) + (sector - self.first_sector(frame)))
    }

    /// Returns the frame with the second copy of the block in this frame.
    #[inline]
    pub(crate) fn second_of(&self, frame: FrameNo) -> Option<FrameNo> {
        self.marks.as_ref()?.second_of.get(&frame).copied()
    }

    /// Returns the frame of the block's first copy, if this frame holds the second copy.
    pub(crate) fn first_of(&self, frame: FrameNo) -> Option<FrameNo> {
        self.marks.as_ref()?.first_of.get(&frame).copied()
    }
}
