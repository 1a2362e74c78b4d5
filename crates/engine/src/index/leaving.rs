//! Segments that a cache is about to give back: no blocks are admitted there any more.

use super::Index;
use crate::units::FrameNo;

/// The leaving segments.
#[derive(Clone, Debug)]
pub(crate) struct Leaving {
    /// For each segment.
    pub(crate) segments: Vec<bool>,
    /// log2 of the frames in a segment.
    pub(crate) frame_shift: u32,
    /// All segments for first copies leave.
    pub(crate) is_all: bool,
}

impl Leaving {
    /// Returns whether a frame lies in a segment that leaves.
    #[inline]
    pub(super) fn has(&self, frame: u32) -> bool {
        self.segments[(frame >> self.frame_shift) as usize]
    }
}

impl Index {
    /// From now on these segments leave, or none. Their free frames are not handed out.
    pub(crate) fn set_leaving(&mut self, leaving: Option<Leaving>) {
        let frames = self.free.drain(&self.block_of);
        self.free.park(leaving.clone());
        self.leaving = leaving;
        frames.into_iter().for_each(|frame| self.free.push_last(&mut self.block_of, frame));
        self.recount_dirty();
    }

    /// Returns whether a frame lies in a segment that leaves.
    #[inline]
    pub(crate) fn is_leaving(&self, frame: FrameNo) -> bool {
        self.leaving.as_ref().is_some_and(|leaving| leaving.has(frame.0))
    }

    /// Returns true if no block can be admitted any more.
    #[inline]
    pub(crate) fn takes_nothing(&self) -> bool {
        self.leaving.as_ref().is_some_and(|leaving| leaving.is_all)
    }

    /// Returns whether a block's frame, or the frame of its second copy, lies in a segment that leaves.
    #[inline]
    pub(crate) fn leaves(&self, frame: FrameNo) -> bool {
        self.leaving.is_some()
            && (self.is_leaving(frame) || self.second_of(frame).is_some_and(|second| self.is_leaving(second)))
    }

    /// Number of dirty sectors outside of the segments that leave, without second copies.
    #[inline]
    pub(crate) fn staying_dirty(&self) -> u64 {
        self.marks.as_ref().map_or(0, |marks| marks.dirty_sectors - marks.dirty_leaving)
    }

    /// Takes a free frame out of the segments that stay.
    pub(crate) fn take_free(&mut self) -> Option<FrameNo> {
        self.free.pop(&self.block_of).map(FrameNo)
    }

    /// Gives a block without valid sectors another frame, which [`Index::take_free`] returned.
    pub(crate) fn rehome(&mut self, from: FrameNo, to: FrameNo) {
        let block = self.block(from);
        self.remove(from);
        self.place(block, to);
    }
}
