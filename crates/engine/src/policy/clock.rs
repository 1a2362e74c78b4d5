//! Clock, also known as second chance: a FIFO that spares a used block once. Corbató: "A paging
//! experiment with the Multics system", 1969. Each frame has one bit, which is clear when a block
//! is inserted.
//!
//! The frames form a ring, and the clock hand is at the oldest frame. When the clock hand advances
//! past a spared block, that block becomes the youngest. A new block is inserted just behind the
//! clock hand. Memory use is 4⅛ bytes per frame.

use super::bits::Bits;
use super::{BUSY_MAX, Candidate, Policy, PolicyInfo};
use crate::units::{BlockNo, FrameNo};

pub(super) const INFO: PolicyInfo = PolicyInfo {
    name: "clock",
    summary: "first in, first out, except that a block used since the clock hand last passed is spared once",
    source: "Corbató 1969",
    serves: true,
    build: |frames| Box::new(Clock::new(frames)),
};

struct Clock {
    /// For each frame in the ring, the next younger frame; for the youngest frame, the oldest.
    next: Vec<u32>,
    /// Youngest frame; undefined while the ring is empty.
    youngest: u32,
    len: u32,
    used: Bits,
}

impl Clock {
    fn new(frames: u32) -> Self {
        Clock { next: vec![0; frames as usize], youngest: 0, len: 0, used: Bits::new(frames) }
    }

    fn push(&mut self, frame: FrameNo) {
        let youngest = if self.len == 0 { frame.0 } else { self.youngest };
        let oldest = if self.len == 0 { frame.0 } else { self.next[youngest as usize] };
        self.next[youngest as usize] = frame.0;
        self.next[frame.0 as usize] = oldest;
        self.youngest = frame.0;
        self.len += 1;
    }
}

impl Policy for Clock {
    fn hit(&mut self, frame: FrameNo) {
        self.used.set(frame);
    }

    fn insert(&mut self, frame: FrameNo, _: BlockNo) {
        self.used.take(frame);
        self.push(frame);
    }

    fn evict(&mut self, look: &mut dyn FnMut(FrameNo) -> Candidate) -> Option<FrameNo> {
        let mut busy = 0;
        // Two rounds are needed, because the first may only clear the bit of the only frame that is
        // not busy.
        while busy < BUSY_MAX.min(2 * self.len) {
            let oldest = FrameNo(self.next[self.youngest as usize]);
            match look(oldest) {
                Candidate::Busy => busy += 1,
                Candidate::Block(_) if self.used.take(oldest) => {}
                Candidate::Block(_) | Candidate::Empty => {
                    self.next[self.youngest as usize] = self.next[oldest.0 as usize];
                    self.len -= 1;
                    return Some(oldest);
                }
            }
            self.youngest = oldest.0;
        }
        None
    }

    fn order(&self) -> Vec<(FrameNo, u8)> {
        let mut at = self.youngest;
        (0..self.len)
            .map(|_| {
                at = self.next[at as usize];
                (FrameNo(at), u8::from(self.used.get(FrameNo(at))))
            })
            .collect()
    }

    fn restore(&mut self, frame: FrameNo, heat: u8) {
        self.push(frame);
        if heat != 0 {
            self.used.set(frame);
        }
    }

    fn bytes(&self) -> u64 {
        4 * self.next.capacity() as u64 + self.used.bytes()
    }
}
