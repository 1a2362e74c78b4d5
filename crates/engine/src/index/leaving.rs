//! The segments of a cache that are being vacated, because the cache will release them. No blocks
//! are admitted to these segments.

use super::Index;
use crate::units::FrameNo;

/// The segments that are being vacated.
#[derive(Clone, Debug)]
pub(crate) struct Leaving {
    /// For each segment, true if it is being vacated.
    pub(crate) segments: Vec<bool>,
    /// Base-2 logarithm of the number of frames in a segment.
    pub(crate) frame_shift: u32,
    /// True if all segments for first copies are being vacated.
    pub(crate) is_all: bool,
}

impl Leaving {
    /// Returns true if a frame is in a segment that is being vacated.
    #[inline]
    pub(super) fn has(&self, frame: u32) -> bool {
        self.segments[(frame >> self.frame_shift) as usize]
    }
}

impl Index {
    /// Sets the segments that are being vacated. Their free frames are not allocated.
    pub(crate) fn set_leaving(&mut self, leaving: Option<Leaving>) {
        let frames = self.free.drain(&self.block_of);
        self.free.park(leaving.clone());
        self.leaving = leaving;
        frames.into_iter().for_each(|frame| self.free.push_last(&mut self.block_of, frame));
        self.recount_dirty();
    }

    /// Returns true if a frame is in a segment that is being vacated.
    #[inline]
    pub(crate) fn is_leaving(&self, frame: FrameNo) -> bool {
        self.leaving.as_ref().is_some_and(|leaving| leaving.has(frame.0))
    }

    /// Returns true if no block can be admitted, because all segments are being vacated.
    #[inline]
    pub(crate) fn takes_nothing(&self) -> bool {
        self.leaving.as_ref().is_some_and(|leaving| leaving.is_all)
    }

    /// Returns true if a block's frame, or the frame of its second copy, is in a segment that is
    /// being vacated.
    #[inline]
    pub(crate) fn leaves(&self, frame: FrameNo) -> bool {
        self.leaving.is_some()
            && (self.is_leaving(frame) || self.second_of(frame).is_some_and(|second| self.is_leaving(second)))
    }

    /// Returns the number of dirty sectors outside of the segments that are being vacated, not
    /// counting second copies.
    #[inline]
    pub(crate) fn staying_dirty(&self) -> u64 {
        self.marks.as_ref().map_or(0, |marks| marks.dirty_sectors - marks.dirty_leaving)
    }

    /// Allocates a free frame in a segment that is not being vacated.
    pub(crate) fn take_free(&mut self) -> Option<FrameNo> {
        self.free.pop(&self.block_of).map(FrameNo)
    }

    /// Moves a block without valid sectors to another frame, which [`Index::take_free`] returned.
    pub(crate) fn rehome(&mut self, from: FrameNo, to: FrameNo) {
        let block = self.block(from);
        self.remove(from);
        self.place(block, to);
    }
}
