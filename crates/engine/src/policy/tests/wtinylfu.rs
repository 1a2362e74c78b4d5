//! W-TinyLFU: hand-written cases, and a comparison with its model.

use super::super::sketch::Sketch;
use super::super::wtinylfu::WTinyLfu;
use super::models::{self, Model};
use super::*;

/// The cache has 6 frames: a window of 1 frame, and 5 others, of which up to 4 are protected.
#[test]
fn a_newcomer_must_be_asked_for_more_often() {
    let mut replay = Replay::new("wtinylfu", 6);
    replay.run(1..=6);
    // Window 6, probation 1 to 5. All were requested once: in a tie the new block leaves.
    replay.access(7);
    assert_eq!(replay.holds(), [1, 2, 3, 4, 5, 7]);
    // 6 is requested for the second time: 7 loses to 1, and 6 is in the window with the count two.
    replay.access(6);
    assert_eq!(replay.holds(), [1, 2, 3, 4, 5, 6]);
    // Now 6 displaces 1.
    replay.access(8);
    assert_eq!(replay.holds(), [2, 3, 4, 5, 6, 8]);
}

#[test]
fn a_block_used_on_probation_becomes_protected() {
    let mut replay = Replay::new("wtinylfu", 6);
    replay.run(1..=6);
    // 1 to 4 are protected, only 5 is on probation, and 6 in the window is used twice more.
    replay.run([1, 2, 3, 4, 6, 6]);
    replay.access(7);
    // 6 (three) displaced 5 (one).
    assert_eq!(replay.holds(), [1, 2, 3, 4, 6, 7]);
    // 6 is used again and becomes protected; in exchange 1, the oldest there, is on probation
    // again.
    replay.run([6, 7, 7, 8]);
    // 7 (three) displaced 1 (two).
    assert_eq!(replay.holds(), [2, 3, 4, 6, 7, 8]);
}

#[test]
fn counts_are_halved_after_ten_requests_a_frame_and_then_every_five() {
    let mut replay = Replay::new("wtinylfu", 2);
    let heat = |replay: &Replay| replay.policy.order()[0].1 & 15;
    // The only frame of the main part; 15 is the maximum.
    replay.run([1, 2]);
    replay.run([1; 17]);
    assert_eq!(heat(&replay), 15);
    replay.access(1);
    assert_eq!(heat(&replay), 7, "the twentieth request");
    replay.run([1; 9]);
    assert_eq!(heat(&replay), 15);
    replay.access(1);
    assert_eq!(heat(&replay), 7, "the thirtieth");
}

/// Lists, oldest first, and an exact count for every block.
#[derive(Default)]
struct Lists {
    window: Vec<u32>,
    probation: Vec<u32>,
    protected: Vec<u32>,
    counts: BTreeMap<u32, u8>,
    requests: usize,
    frames: usize,
}

impl Lists {
    fn count(&mut self, block: u32) {
        let count = self.counts.entry(block).or_default();
        *count = (*count + 1).min(15);
        self.requests += 1;
        if self.requests == 10 * self.frames {
            self.requests /= 2;
            self.counts.values_mut().for_each(|count| *count /= 2);
        }
    }

    fn window_max(&self) -> usize {
        (self.frames / 100).max(1)
    }
}

impl Model for Lists {
    fn access(&mut self, block: u32) -> bool {
        self.count(block);
        if let Some(at) = self.window.iter().position(|held| *held == block) {
            self.window.remove(at);
            self.window.push(block);
            return true;
        }
        if let Some(at) = self.protected.iter().position(|held| *held == block) {
            self.protected.remove(at);
            self.protected.push(block);
            return true;
        }
        if let Some(at) = self.probation.iter().position(|held| *held == block) {
            self.probation.remove(at);
            self.protected.push(block);
            if self.protected.len() > (self.frames - self.window_max()) * 4 / 5 {
                self.probation.push(self.protected.remove(0));
            }
            return true;
        }
        self.window.push(block);
        if self.window.len() > self.window_max() {
            let main_max = self.frames - self.window_max();
            let candidate = self.window.remove(0);
            if self.probation.len() + self.protected.len() < main_max {
                self.probation.push(candidate);
            } else if main_max > 0 && self.counts[&candidate] > self.counts[&self.probation[0]] {
                self.probation.remove(0);
                self.probation.push(candidate);
            }
        }
        false
    }
}

/// Compares the policy with its model. The sketch is so large that blocks do not collide.
#[test]
fn is_its_model() {
    let policy = |frames| -> Box<dyn Policy> { Box::new(WTinyLfu::new(frames, Sketch::new(1 << 12))) };
    models::compare(policy, |frames| Lists { frames: frames as usize, ..Lists::default() });
}
