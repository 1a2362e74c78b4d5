//! Blocks of sequential runs that were admitted only because the cache had free frames.
//!
//! A block of a long run is often used only once. So the blocks of long runs are evicted before all
//! others. The policy does not know these blocks, and decides as in a cache without them. If a
//! request outside of a sequential run uses such a block, the block becomes an ordinary one.

use crate::index::bitmap::Bitmap;
use crate::units::FrameNo;

/// Maximum number of frames of a [`FirstToEvict`] that one eviction examines. An eviction skips
/// frames that are in use or dirty.
const FRAMES_MAX: u32 = 8;

/// Maximum number of bits that one eviction searches. Without a limit, a cache with few frames in
/// the set would search its whole bitmap for each block. The next eviction continues the search.
const BITS_MAX: u64 = 1 << 16;

/// The frames whose blocks are evicted before all others.
#[derive(Debug, Default)]
pub(super) struct FirstToEvict {
    /// One bit for each frame of the cache: 1 if the frame is in this set. `None` until the first
    /// [`add`](Self::add).
    bits: Option<Bitmap>,
    count: u32,
    /// The frame at which the next search starts. Free frames are allocated in ascending order, so
    /// the oldest block comes first.
    next: u64,
}

impl FirstToEvict {
    /// Adds a frame to the set. The cache has `frames` frames.
    pub(super) fn add(&mut self, frame: FrameNo, frames: u32) {
        let bits = self.bits.get_or_insert_with(|| Bitmap::new(frames.into()));
        self.count += u32::from(!bits.get(frame.0.into()));
        bits.set(frame.0.into());
    }

    /// Removes a frame from the set. Returns true if the set had the frame.
    #[inline]
    pub(super) fn remove(&mut self, frame: FrameNo) -> bool {
        let had = self.has(frame);
        if let (true, Some(bits)) = (had, &mut self.bits) {
            bits.clear(frame.0.into(), 1);
            self.count -= 1;
        }
        had
    }

    #[inline]
    pub(super) fn has(&self, frame: FrameNo) -> bool {
        self.count > 0 && self.bits.as_ref().is_some_and(|bits| bits.get(frame.0.into()))
    }

    /// Returns the number of frames in the set.
    #[inline]
    pub(super) fn count(&self) -> u32 {
        self.count
    }

    /// Removes and returns the next frame that `may_go` accepts. Returns `None` if the search reaches
    /// its limit. The cache has `frames` frames.
    #[inline]
    pub(super) fn take(&mut self, frames: u32, may_go: impl Fn(FrameNo) -> bool) -> Option<FrameNo> {
        if self.count == 0 {
            return None;
        }
        let frames = u64::from(frames);
        let (mut frames_left, mut bits_left) = (self.count.min(FRAMES_MAX), frames.min(BITS_MAX));
        while frames_left > 0 && bits_left > 0 {
            let end = frames.min(self.next + bits_left);
            let found = self.bits.as_ref()?.next_one_before(self.next, end);
            let searched_to = found.map_or(end, |bit| bit + 1);
            bits_left -= searched_to - self.next;
            self.next = if searched_to == frames { 0 } else { searched_to };
            let Some(frame) = found.map(|bit| FrameNo(bit as u32)) else { continue };
            if may_go(frame) {
                self.remove(frame);
                return Some(frame);
            }
            frames_left -= 1;
        }
        None
    }

    /// Returns the frames of the set, in ascending order.
    pub(super) fn iter(&self) -> impl Iterator<Item = FrameNo> {
        self.bits.iter().flat_map(Bitmap::ones).map(|bit| FrameNo(bit as u32))
    }

    /// Returns the memory use, bytes.
    pub(super) fn bytes(&self) -> u64 {
        self.bits.as_ref().map_or(0, Bitmap::bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frames_are_taken_in_turn_and_those_in_use_are_skipped() {
        let mut first = FirstToEvict::default();
        assert_eq!(first.take(200, |_| true), None);
        [3, 70, 64, 199].into_iter().for_each(|frame| first.add(FrameNo(frame), 200));
        assert_eq!(first.iter().map(|frame| frame.0).collect::<Vec<_>>(), [3, 64, 70, 199]);
        assert_eq!(first.take(200, |frame| frame.0 != 3), Some(FrameNo(64)));
        assert_eq!(first.take(200, |_| true), Some(FrameNo(70)));
        assert!(first.remove(FrameNo(199)) && !first.remove(FrameNo(199)));
        assert_eq!(first.take(200, |_| false), None);
        assert_eq!((first.take(200, |_| true), first.count()), (Some(FrameNo(3)), 0));
    }

    #[test]
    fn one_eviction_searches_a_limited_number_of_bits() {
        let frames = 3 * BITS_MAX as u32;
        let mut first = FirstToEvict::default();
        first.add(FrameNo(frames - 1), frames);
        let taken: Vec<_> = (0..3).map(|_| first.take(frames, |_| true)).collect();
        assert_eq!(taken, [None, None, Some(FrameNo(frames - 1))]);
    }

    #[test]
    fn one_eviction_examines_a_limited_number_of_frames() {
        let mut first = FirstToEvict::default();
        (0..100).for_each(|frame| first.add(FrameNo(frame), 100));
        let examined = std::cell::Cell::new(0);
        let refuse = |_| {
            examined.set(examined.get() + 1);
            false
        };
        assert_eq!((first.take(100, refuse), examined.get()), (None, FRAMES_MAX));
    }
}
