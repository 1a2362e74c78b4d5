//! Clock: hand-written cases, and a comparison with its model.

use std::collections::VecDeque;

use super::models::{self, Model};
use super::*;

#[test]
fn spares_a_used_block_once() {
    let mut replay = Replay::new("clock", 3);
    replay.run([1, 2, 3, 1]);
    // The clock hand skips 1 and evicts 2; then it evicts 3, because 4 was inserted behind it.
    replay.access(4);
    assert_eq!(replay.holds(), [1, 3, 4]);
    replay.access(5);
    assert_eq!(replay.holds(), [1, 4, 5]);
    // 1 was not used again.
    replay.access(6);
    assert_eq!(replay.holds(), [4, 5, 6]);
    // If all blocks were used, the clock hand makes a full turn and evicts the oldest block.
    replay.run([4, 5, 6, 7]);
    assert_eq!(replay.holds(), [5, 6, 7]);
    // The full turn cleared all bits.
    replay.run([8]);
    assert_eq!(replay.holds(), [6, 7, 8]);
}

/// Blocks with their bits, oldest first.
struct Clock {
    queue: VecDeque<(u32, bool)>,
    frames: usize,
}

impl Model for Clock {
    fn access(&mut self, block: u32) -> bool {
        if let Some((_, used)) = self.queue.iter_mut().find(|(held, _)| *held == block) {
            *used = true;
            return true;
        }
        while self.queue.len() == self.frames {
            let (oldest, used) = self.queue.pop_front().expect("full");
            if used {
                self.queue.push_back((oldest, false));
            }
        }
        self.queue.push_back((block, false));
        false
    }
}

#[test]
fn is_its_model() {
    let model = |frames| Clock { queue: VecDeque::new(), frames: frames as usize };
    models::compare(super::super::clock::INFO.build, model);
}
