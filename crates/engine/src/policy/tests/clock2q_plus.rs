//! Clock2Q+: hand-written cases, and a comparison with its model.

use std::collections::VecDeque;

use super::super::clock2q_plus::{Clock2QPlus, INFO};
use super::super::ghost::Ghost;
use super::models::{self, Model};
use super::*;

/// The cache has 40 frames: 4 in the small queue, of which 2 are in the window. It remembers 20
/// blocks.
#[test]
fn uses_within_the_window_do_not_count() {
    let mut replay = Replay::new("clock2qplus", 40);
    replay.run(0..38);
    // 38 and 39 are the two newest blocks, in the window. 36 and 37 were in the window before.
    replay.run([38, 38, 38, 39, 38, 37]);
    // All blocks were inserted into the small queue while the cache filled. All except 37 leave it
    // at its end.
    replay.run(100..139);
    let first = replay.holds()[..2].to_vec();
    assert_eq!(first, [37, 100], "38 left though used: it was too new then");
}

#[test]
fn a_block_that_comes_back_enters_the_main_clock() {
    let mut replay = Replay::new("clock2qplus", 40);
    replay.run(0..40);
    // 0 to 9 leave and are remembered.
    replay.run(100..110);
    assert!(!replay.frame_of.contains_key(&9));
    replay.access(9);
    // A scan replaces the small queue, which does not have 9.
    replay.run(200..260);
    assert_eq!(replay.holds()[0], 9);
    let main = |replay: &Replay| replay.policy.order().iter().filter(|(_, heat)| heat & 4 != 0).count();
    assert_eq!(main(&replay), 1);
    // 220 was the last to leave, and 201 was the twentieth before.
    replay.run([210, 1]);
    assert_eq!(main(&replay), 1 + 1, "210 is remembered, 1 left too long ago");
}

#[test]
fn the_main_clock_spares_a_used_block_once() {
    let mut replay = Replay::new("clock2qplus", 10);
    // One block in the small queue, and no window: every block that is used again moves to main.
    replay.run((0..10).chain(0..10));
    // All but the last block of the small queue move on; then the main clock evicts 0.
    replay.access(10);
    assert_eq!(replay.holds(), [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]);
    // 10 is not used and leaves the small queue; it returns to main, and 11 leaves for it.
    replay.run([11, 10]);
    assert_eq!(replay.holds(), [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]);
    // Now the small queue is empty. The clock hand skips 1 and evicts 2.
    replay.run([1, 12]);
    assert_eq!(replay.holds(), [1, 3, 4, 5, 6, 7, 8, 9, 10, 12]);
}

/// The small queue, with the number of each block's insertion, from which positions follow.
struct Model2QPlus {
    frames: usize,
    small: VecDeque<(u32, bool, usize)>,
    main: VecDeque<(u32, bool)>,
    /// The blocks that left the small queue last, at most as many as the ghost remembers; `None`
    /// for a block that returned.
    ghost: VecDeque<Option<u32>>,
    insertions: usize,
}

impl Model2QPlus {
    fn evict(&mut self) {
        while self.small.len() + self.main.len() == self.frames {
            if self.small.len() >= (self.frames / 10).max(1) {
                match self.small.pop_front().expect("not empty") {
                    (block, true, _) => self.main.push_back((block, false)),
                    (block, false, _) => self.ghost.push_back(Some(block)),
                }
            } else if let (block, true) = self.main.pop_front().expect("the rest") {
                self.main.push_back((block, false));
            }
            while self.ghost.len() > self.frames / 2 {
                self.ghost.pop_front();
            }
        }
    }
}

impl Model for Model2QPlus {
    fn access(&mut self, block: u32) -> bool {
        let window = (self.frames / 10).max(1) / 2;
        if let Some((_, used, number)) = self.small.iter_mut().find(|(held, ..)| *held == block) {
            let younger = self.insertions - *number;
            *used |= younger >= window;
            return true;
        }
        if let Some((_, used)) = self.main.iter_mut().find(|(held, _)| *held == block) {
            *used = true;
            return true;
        }
        self.evict();
        match self.ghost.iter_mut().find(|gone| **gone == Some(block)) {
            Some(gone) => {
                *gone = None;
                self.main.push_back((block, false));
            }
            None => {
                self.insertions += 1;
                self.small.push_back((block, false, self.insertions));
            }
        }
        false
    }
}

/// Compares the policy with its model. The ghost is so large that it is exact: the usual ghost
/// forgets some blocks early.
#[test]
fn is_its_model() {
    let policy = |frames| -> Box<dyn Policy> {
        Box::new(Clock2QPlus::new(frames, Ghost::with_sets(frames / 2, 1 << 10)))
    };
    models::compare(policy, |frames| Model2QPlus {
        frames: frames as usize,
        small: VecDeque::new(),
        main: VecDeque::new(),
        ghost: VecDeque::new(),
        insertions: 0,
    });
}

#[test]
fn remembers_half_as_many_blocks_as_it_holds() {
    let bytes = (INFO.build)(1 << 20).bytes() as f64 / f64::from(1 << 20);
    assert!((7.4..7.6).contains(&bytes), "{bytes} bytes a frame");
}
