//! SIEVE: hand-written cases, and a comparison with its model.

use super::models::{self, Model};
use super::*;

/// Follows figure 1 of the paper: blocks that are not evicted keep their position, and new blocks
/// are inserted at the young end.
#[test]
fn survivors_keep_their_place() {
    let mut replay = Replay::new("sieve", 4);
    replay.run([1, 2, 3, 4, 1, 3]);
    // From the oldest block on: 1 is skipped, 2 is evicted, and the clock hand stops at 3.
    replay.access(5);
    assert_eq!(replay.holds(), [1, 3, 4, 5]);
    // 3 is skipped, 4 is evicted, and the clock hand stops at 5, which is not old.
    replay.access(6);
    assert_eq!(replay.holds(), [1, 3, 5, 6]);
    // Clock would evict 1 now, whose bit is clear; SIEVE's hand has not reached it yet.
    replay.access(7);
    assert_eq!(replay.holds(), [1, 3, 6, 7]);
    replay.run([6, 7, 8]);
    // 6 and 7 were skipped; the hand passed the youngest block and continued at the oldest, 1.
    assert_eq!(replay.holds(), [3, 6, 7, 8]);
}

/// When the hand has passed the youngest block, a new block does not stop it.
#[test]
fn the_clock_hand_continues_at_the_oldest_block() {
    let mut replay = Replay::new("sieve", 3);
    replay.run([1, 2, 3, 1, 2]);
    // 1 and 2 are skipped, and 3 is evicted: it was the youngest.
    replay.access(4);
    assert_eq!(replay.holds(), [1, 2, 4]);
    replay.access(5);
    assert_eq!(replay.holds(), [2, 4, 5]);
}

#[test]
fn a_moved_hand_stays_where_it_was() {
    let mut replay = Replay::new("sieve", 4);
    replay.run([1, 2, 3, 4, 1, 3, 5, 3]);
    // Oldest first: 1, 3 (used), 4, 5; the hand is at 3.
    let mut moved = Replay::new("sieve", 4);
    replay.policy.order().iter().for_each(|(frame, heat)| moved.policy.restore(*frame, *heat));
    (moved.frame_of, moved.block_in) = (replay.frame_of.clone(), replay.block_in.clone());
    for block in [6, 7, 8, 9, 3, 10, 11] {
        replay.access(block);
        moved.access(block);
        assert_eq!(moved.holds(), replay.holds(), "after {block}");
    }
}

/// Blocks with their bits, oldest first. The hand is a block.
struct Sieve {
    queue: Vec<(u32, bool)>,
    hand: Option<u32>,
    frames: usize,
}

impl Model for Sieve {
    fn access(&mut self, block: u32) -> bool {
        if let Some((_, used)) = self.queue.iter_mut().find(|(held, _)| *held == block) {
            *used = true;
            return true;
        }
        if self.queue.len() == self.frames {
            let hand = self.hand.and_then(|hand| self.queue.iter().position(|(held, _)| *held == hand));
            let mut at = hand.unwrap_or(0);
            while self.queue[at].1 {
                self.queue[at].1 = false;
                at = (at + 1) % self.queue.len();
            }
            self.hand = self.queue.get(at + 1).map(|(held, _)| *held);
            self.queue.remove(at);
        }
        self.queue.push((block, false));
        false
    }
}

#[test]
fn is_its_model() {
    let model = |frames| Sieve { queue: Vec::new(), hand: None, frames: frames as usize };
    models::compare(super::super::sieve::INFO.build, model);
}
