//! Blocks of sequential runs that were admitted only because the cache had free frames.
//!
//! Such blocks are often used once. They are evicted before all other blocks, and the policy does
//! not know them, so its decisions are those of a cache without them. A block that is used by a
//! request outside of a sequential run becomes an ordinary block.

use crate::units::FrameNo;

/// Maximum number of these frames that one eviction examines. Frames that are in use or dirty are
/// skipped.
const TRIES: u32 = 8;

/// The frames of these blocks: one bit for each frame of the cache, once there is such a block.
#[derive(Debug, Default)]
pub(super) struct FirstToEvict {
    bits: Vec<u64>,
    count: u32,
    /// The frame at which the next eviction starts. Free frames are allocated in ascending order,
    /// so the oldest block comes first.
    next: u32,
}

impl FirstToEvict {
    /// Adds a frame of a cache of `frames` frames.
    pub(super) fn add(&mut self, frame: FrameNo, frames: u32) {
        if self.bits.is_empty() {
            self.bits.resize(frames.div_ceil(64) as usize, 0);
        }
        let (word, bit) = place(frame);
        self.count += u32::from(self.bits[word] & bit == 0);
        self.bits[word] |= bit;
    }

    /// Removes a frame. Returns true if the frame was one of these.
    #[inline]
    pub(super) fn remove(&mut self, frame: FrameNo) -> bool {
        let had = self.has(frame);
        if had {
            let (word, bit) = place(frame);
            self.bits[word] &= !bit;
            self.count -= 1;
        }
        had
    }

    #[inline]
    pub(super) fn has(&self, frame: FrameNo) -> bool {
        let (word, bit) = place(frame);
        self.count > 0 && self.bits[word] & bit != 0
    }

    /// Returns the number of these frames.
    #[inline]
    pub(super) fn count(&self) -> u32 {
        self.count
    }

    /// Removes and returns the next frame that `may_go` accepts.
    pub(super) fn take(&mut self, may_go: impl Fn(FrameNo) -> bool) -> Option<FrameNo> {
        for _ in 0..self.count.min(TRIES) {
            let frame = self.following(self.next).or_else(|| self.following(0))?;
            self.next = frame.0 + 1;
            if may_go(frame) {
                self.remove(frame);
                return Some(frame);
            }
        }
        None
    }

    /// Returns the first of these frames from `from` on.
    fn following(&self, from: u32) -> Option<FrameNo> {
        let (start, bit) = place(FrameNo(from));
        let words = self.bits.get(start..)?.iter().zip(start..);
        let mut words = words.map(|(word, at)| (if at == start { word & !(bit - 1) } else { *word }, at));
        words.find(|(word, _)| *word != 0).map(|(word, at)| FrameNo(at as u32 * 64 + word.trailing_zeros()))
    }

    /// Returns all of these frames, in ascending order.
    pub(super) fn iter(&self) -> impl Iterator<Item = FrameNo> {
        let mut at = (self.count > 0).then_some(0);
        std::iter::from_fn(move || {
            let frame = self.following(at?);
            at = frame.map(|frame| frame.0 + 1);
            frame
        })
    }

    /// Returns the memory use, bytes.
    pub(super) fn bytes(&self) -> u64 {
        size_of_val(self.bits.as_slice()) as u64
    }
}

fn place(frame: FrameNo) -> (usize, u64) {
    ((frame.0 / 64) as usize, 1 << (frame.0 % 64))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frames_are_taken_in_turn_and_those_in_use_are_skipped() {
        let mut first = FirstToEvict::default();
        assert_eq!(first.take(|_| true), None);
        [3, 70, 64, 199].into_iter().for_each(|frame| first.add(FrameNo(frame), 200));
        assert_eq!(first.iter().map(|frame| frame.0).collect::<Vec<_>>(), [3, 64, 70, 199]);
        assert_eq!(first.take(|frame| frame.0 != 3), Some(FrameNo(64)));
        assert_eq!(first.take(|_| true), Some(FrameNo(70)));
        assert!(first.remove(FrameNo(199)) && !first.remove(FrameNo(199)));
        assert_eq!(first.take(|_| false), None);
        assert_eq!((first.take(|_| true), first.count()), (Some(FrameNo(3)), 0));
    }
}
