//! LFU with ageing: hand-written cases, and a comparison with its model.

use super::models::{self, Model};
use super::*;

#[test]
fn the_least_used_leaves_and_of_equals_the_oldest() {
    let mut replay = Replay::new("lfu", 3);
    replay.run([1, 1, 1, 2, 2, 3, 4]);
    // 3 had the value of one use, which is the age now.
    assert_eq!(replay.holds(), [1, 2, 4]);
    // So 4 has the value two, like 2, which is older.
    replay.access(5);
    assert_eq!(replay.holds(), [1, 4, 5]);
}

#[test]
fn formerly_popular_blocks_are_evicted_as_the_cache_ages() {
    let mut replay = Replay::new("lfu", 3);
    // Values 4, 3 and 1.
    replay.run([1, 1, 1, 1, 2, 2, 2, 3]);
    // Age 1: 4 has value 2. Age 2: 5 has value 3, like 2, which is older.
    replay.run([4, 5]);
    assert_eq!(replay.holds(), [1, 2, 5]);
    // Age 3: 6 has value 4, and 5 still has value 3.
    replay.access(6);
    assert_eq!(replay.holds(), [1, 5, 6]);
    replay.access(7);
    assert_eq!(replay.holds(), [1, 6, 7]);
    // 1 was not used for long; it has value 4 and is the oldest.
    replay.access(8);
    assert_eq!(replay.holds(), [6, 7, 8]);
}

#[test]
fn a_use_counts_from_the_age_at_which_it_happens() {
    let mut replay = Replay::new("lfu", 2);
    replay.run([1, 1, 1]);
    // Ages 1 and 2, then 1 is used for the fourth time: value 6.
    replay.run([2, 3, 4, 1]);
    // Four blocks with the values 3 to 6 are inserted and evicted; the block with value 6 is behind
    // 1.
    replay.run([5, 6, 7]);
    assert_eq!(replay.holds(), [1, 7]);
    replay.access(8);
    assert_eq!(replay.holds(), [7, 8]);
}

/// Values as plain numbers. The definition does not say which of the blocks with the lowest value
/// leaves.
struct Lfu {
    /// Block, uses, value.
    held: Vec<(u32, u64, u64)>,
    age: u64,
    frames: usize,
    /// The block that was inserted while the model was full.
    newcomer: Option<u32>,
}

impl Model for Lfu {
    fn access(&mut self, block: u32) -> bool {
        if let Some((_, uses, value)) = self.held.iter_mut().find(|(held, ..)| *held == block) {
            *uses = (*uses + 1).min(255);
            *value = self.age + *uses;
            return true;
        }
        if self.held.len() == self.frames {
            self.newcomer = Some(block);
        } else {
            self.held.push((block, 1, self.age + 1));
        }
        false
    }

    fn learn(&mut self, gone: u32) {
        let least = self.held.iter().map(|(_, _, value)| *value).min().expect("full");
        let at = self.held.iter().position(|(held, ..)| *held == gone).expect("held");
        assert_eq!(self.held[at].2, least, "{gone} was not of the least value");
        self.held.remove(at);
        self.age = least;
        self.held.push((self.newcomer.take().expect("a miss"), 1, self.age + 1));
    }
}

fn model(frames: u32) -> Lfu {
    Lfu { held: Vec::new(), age: 0, frames: frames as usize, newcomer: None }
}

#[test]
fn is_its_model() {
    models::compare(super::super::lfu::INFO.build, model);
}

/// Compares the policy with its model for so long that uses reach their limit, and values exceed
/// 256 many times.
#[test]
fn is_its_model_for_long() {
    let frames = 20;
    let (mut replay, mut model) = (Replay::new("lfu", frames), model(frames));
    for step in 0..60_000u32 {
        let rng = crate::index::hash(BlockNo(step));
        let block = match rng % 10 {
            0 => 1000 + step,
            1..4 => step / 5000 * 7,
            _ => (rng >> 32) as u32 % 30 + step / 20_000 * 10,
        };
        let before = replay.holds();
        let hit = replay.access(block);
        assert_eq!(model.access(block), hit, "step {step}");
        if let Some(gone) = before.iter().find(|block| !replay.frame_of.contains_key(block)) {
            model.learn(*gone);
        }
    }
    assert!(model.age > 1000 && model.held.iter().any(|(_, uses, _)| *uses == 255), "not long enough");
}
