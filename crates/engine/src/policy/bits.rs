//! A bit for each frame of a cache.

use crate::units::FrameNo;

#[derive(Debug)]
pub(crate) struct Bits(Vec<u64>);

impl Bits {
    /// Creates bits that are all clear.
    pub(crate) fn new(frames: u32) -> Self {
        Bits(vec![0; (frames as usize).div_ceil(64)])
    }

    fn place(frame: FrameNo) -> (usize, u64) {
        ((frame.0 / 64) as usize, 1 << (frame.0 % 64))
    }

    pub(crate) fn get(&self, frame: FrameNo) -> bool {
        let (word, bit) = Self::place(frame);
        self.0[word] & bit != 0
    }

    pub(crate) fn set(&mut self, frame: FrameNo) {
        let (word, bit) = Self::place(frame);
        self.0[word] |= bit;
    }

    /// Clears a frame's bit. Returns true if the bit was set.
    pub(crate) fn take(&mut self, frame: FrameNo) -> bool {
        let (word, bit) = Self::place(frame);
        let was_set = self.0[word] & bit != 0;
        self.0[word] &= !bit;
        was_set
    }

    pub(crate) fn bytes(&self) -> u64 {
        8 * self.0.capacity() as u64
    }
}
