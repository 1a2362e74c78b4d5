//! SIEVE: a FIFO queue with a clock hand that moves from the old end to the young end. The clock
//! hand spares used blocks and leaves them at their position. Zhang, Yang, Yue, Vigfusson, Rashmi:
//! "SIEVE is simpler than LRU: an efficient turn-key eviction algorithm for web caches", NSDI 2024.
//!
//! New blocks join the young end, ahead of the clock hand. The blocks that the clock hand has
//! spared are behind it, so they stay separate from new blocks. In the policy `clock`, spared and
//! new blocks are mixed, because both become the youngest blocks of the queue. When the clock hand
//! has passed the youngest block, the next eviction starts at the oldest.
//!
//! The queue is linked in one direction only, because frames are removed only at the clock hand,
//! which remembers the frame that it passed last. Memory use is 4⅛ bytes per frame.

use super::bits::Bits;
use super::{BUSY_MAX, Candidate, Policy, PolicyInfo};
use crate::units::{BlockNo, FrameNo};

pub(super) const INFO: PolicyInfo = PolicyInfo {
    name: "sieve",
    summary: "a clock hand evicts blocks that were not used since it last passed; the others keep their position",
    source: "Zhang et al., NSDI 2024",
    serves: true,
    build: |frames| Box::new(Sieve::new(frames)),
};

const NONE: u32 = u32::MAX;
/// Flag in the usage value that `order` returns: the block was used since the clock hand last
/// passed it.
const HEAT_USED: u8 = 1;
/// Flag in the usage value that `order` returns: the clock hand has passed the block since the
/// clock hand was last at the oldest block.
const HEAT_PASSED: u8 = 2;

struct Sieve {
    /// For each frame in the queue, the next younger frame.
    younger: Vec<u32>,
    oldest: u32,
    youngest: u32,
    /// Frame at the clock hand. With `NONE`, the next eviction starts at the oldest frame.
    hand: u32,
    /// The frame just older than the frame at the clock hand, if there is one.
    passed: u32,
    used: Bits,
    len: u32,
}

impl Sieve {
    fn new(frames: u32) -> Self {
        Sieve {
            younger: vec![NONE; frames as usize],
            oldest: NONE,
            youngest: NONE,
            hand: NONE,
            passed: NONE,
            used: Bits::new(frames),
            len: 0,
        }
    }

    /// Adds a frame next to an older one, or as the oldest frame if `older` is `NONE`.
    fn link_after(&mut self, older: u32, frame: FrameNo) {
        let next = match older {
            NONE => &mut self.oldest,
            older => &mut self.younger[older as usize],
        };
        let younger = std::mem::replace(next, frame.0);
        self.younger[frame.0 as usize] = younger;
        if younger == NONE {
            self.youngest = frame.0;
        }
        self.len += 1;
    }

    /// Removes the frame at the clock hand. The clock hand is then at the next younger frame.
    fn unlink_at_hand(&mut self) {
        let younger = self.younger[self.hand as usize];
        match self.passed {
            NONE => self.oldest = younger,
            passed => self.younger[passed as usize] = younger,
        }
        if younger == NONE {
            self.youngest = self.passed;
        }
        self.hand = younger;
        self.len -= 1;
    }

    fn frames_from(&self, first: u32) -> impl Iterator<Item = FrameNo> + '_ {
        let frame = |at: u32| (at != NONE).then_some(at);
        std::iter::successors(frame(first), move |at| frame(self.younger[*at as usize])).map(FrameNo)
    }
}

impl Policy for Sieve {
    fn hit(&mut self, frame: FrameNo) {
        self.used.set(frame);
    }

    fn insert(&mut self, frame: FrameNo, _: BlockNo) {
        self.used.take(frame);
        self.link_after(self.youngest, frame);
    }

    fn evict(&mut self, look: &mut dyn FnMut(FrameNo) -> Candidate) -> Option<FrameNo> {
        let mut busy = 0;
        // Two rounds are needed, because the first may only clear the bit of the only frame that is
        // not busy.
        while busy < BUSY_MAX.min(2 * self.len) {
            if self.hand == NONE {
                (self.hand, self.passed) = (self.oldest, NONE);
            }
            let frame = FrameNo(self.hand);
            match look(frame) {
                Candidate::Busy => busy += 1,
                Candidate::Block(_) if self.used.take(frame) => {}
                Candidate::Block(_) | Candidate::Empty => {
                    self.unlink_at_hand();
                    return Some(frame);
                }
            }
            (self.hand, self.passed) = (self.younger[frame.0 as usize], frame.0);
        }
        None
    }

    /// Frames are returned in the order of the clock hand: first those ahead of it, then those that
    /// it has passed.
    fn order(&self) -> Vec<(FrameNo, u8)> {
        let used = |frame| if self.used.get(frame) { HEAT_USED } else { 0 };
        let heat = |frame, passed| (frame, used(frame) | passed);
        if self.hand == NONE {
            return self.frames_from(self.oldest).map(|frame| heat(frame, 0)).collect();
        }
        let ahead = self.frames_from(self.hand).map(|frame| heat(frame, 0));
        let behind = self.frames_from(self.oldest).take_while(|frame| frame.0 != self.hand);
        ahead.chain(behind.map(|frame| heat(frame, HEAT_PASSED))).collect()
    }

    fn restore(&mut self, frame: FrameNo, heat: u8) {
        if heat & HEAT_PASSED != 0 {
            self.link_after(self.passed, frame);
            self.passed = frame.0;
        } else {
            self.link_after(self.youngest, frame);
            if self.hand == NONE {
                self.hand = frame.0;
            }
        }
        if heat & HEAT_USED != 0 {
            self.used.set(frame);
        }
    }

    fn bytes(&self) -> u64 {
        4 * self.younger.capacity() as u64 + self.used.bytes()
    }
}
