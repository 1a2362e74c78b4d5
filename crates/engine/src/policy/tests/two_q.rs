//! 2Q: hand-written cases, and a comparison with its definition.

use std::collections::VecDeque;

use proptest::prelude::*;

use super::Replay;
use super::models::{Model, agree, stretches, take};

#[test]
fn by_hand() {
    // A1in has one frame, and A1out remembers three blocks.
    let mut replay = Replay::new("2q", 4);
    replay.run([1, 2, 3, 4]);
    // Uses in A1in have no effect.
    replay.run([1, 1, 5]);
    assert_eq!(replay.holds(), [2, 3, 4, 5]);
    // 1, 2 and 3 are requested again while they are remembered, and move to Am. A1in has only 5.
    replay.run([1, 2, 3]);
    assert_eq!(replay.holds(), [1, 2, 3, 5]);
    // So a block must leave Am now: 1, which is not remembered …
    replay.access(6);
    assert_eq!(replay.holds(), [2, 3, 5, 6]);
    // … and returns as a new block. A1in is above its share, so 5 leaves.
    replay.access(1);
    assert_eq!(replay.holds(), [1, 2, 3, 6]);
    // 5 is requested while it is remembered, and 6 leaves: Am has 2, 3, 5, and A1in has 1.
    replay.run([5, 2]);
    assert_eq!(replay.holds(), [1, 2, 3, 5]);
    // Am is ordered by recency: 3 leaves next, not 2.
    replay.access(7);
    assert_eq!(replay.holds(), [1, 2, 5, 7]);
}

#[test]
fn a_scan_does_not_evict_reused_blocks() {
    let mut replay = Replay::new("2q", 8);
    replay.run([1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 1, 2]);
    replay.run(100..200);
    let holds = replay.holds();
    assert!(holds.contains(&1) && holds.contains(&2), "{holds:?}");
}

struct TwoQ {
    frames: usize,
    a1in: Vec<u32>,
    am: Vec<u32>,
    /// The blocks that left the FIFO A1in last; `None` for a block that returned.
    a1out: VecDeque<Option<u32>>,
}

impl Model for TwoQ {
    fn access(&mut self, block: u32) -> bool {
        if self.a1in.contains(&block) {
            return true;
        }
        if take(&mut self.am, block) {
            self.am.push(block);
            return true;
        }
        if self.a1in.len() + self.am.len() == self.frames {
            if self.a1in.len() > self.frames / 4 || self.am.is_empty() {
                self.a1out.push_back(Some(self.a1in.remove(0)));
            } else {
                self.am.remove(0);
            }
        }
        // The latest one does not count.
        while self.a1out.len() > (self.frames * 48).div_ceil(100) + 1 {
            self.a1out.pop_front();
        }
        match self.a1out.iter_mut().find(|departed| **departed == Some(block)) {
            Some(departed) => {
                *departed = None;
                self.am.push(block);
            }
            None => self.a1in.push(block),
        }
        false
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(3000))]

    // Up to 22 frames: all remembered blocks are in one set of the ghost, which is exact up to
    // there.
    #[test]
    fn like_its_model(frames in 1u32..=22, blocks in stretches()) {
        let model = TwoQ {
            frames: frames as usize,
            a1in: Vec::new(),
            am: Vec::new(),
            a1out: VecDeque::new(),
        };
        agree("2q", frames, model, &blocks)?;
    }
}
