//! The two-level LRU: hand-written cases, and a comparison with SYSTEMS §4 (see `engine/tests.rs`).

use proptest::prelude::*;

use super::Replay;
use super::models::{Model, agree, stretches};

#[test]
fn by_hand() {
    let mut replay = Replay::new("two-level-lru", 4);
    // 1 and 2 become Active; 3 becomes Active, and for it 1 becomes Inactive, after 4.
    replay.run([1, 2, 3, 4, 1, 2, 3]);
    // The earliest Inactive block is evicted.
    replay.access(5);
    assert_eq!(replay.holds(), [1, 2, 3, 5]);
    // 2 is used three times more. 1 becomes Active with two uses, and 3, with one, becomes
    // Inactive.
    replay.run([2, 2, 2, 1]);
    replay.access(6);
    assert_eq!(replay.holds(), [1, 2, 3, 6]);
    replay.access(7);
    assert_eq!(replay.holds(), [1, 2, 6, 7]);
    // New blocks pass through Inactive.
    replay.run(100..120);
    assert_eq!(replay.holds(), [1, 2, 118, 119]);
    // The 40th and the 80th request halve the counts. Block 1, used twice, then has the count zero
    // and is Inactive again.
    replay.run(120..166);
    assert_eq!(replay.holds(), [1, 2, 164, 165]);
    replay.run(166..169);
    assert_eq!(replay.holds(), [2, 166, 167, 168]);
}

/// SYSTEMS §4, "Inactive (… or not accessed for a while)": popularity decreases with time.
#[test]
fn formerly_popular_blocks_are_evicted() {
    let mut replay = Replay::new("two-level-lru", 100);
    let load = |base: u32| (0..8000u32).map(move |i| base + i * 7919 % 80);
    replay.run(load(0));
    replay.run(load(1000));
    let hits = replay.run(load(1000));
    assert!(hits > 7900, "{hits} of 8000 after the change");
}

struct TwoLevel {
    frames: usize,
    /// Blocks with counts, earliest first.
    inactive: Vec<(u32, u32)>,
    /// Blocks with counts: the least used first, and of equals the least recently used first.
    active: Vec<(u32, u32)>,
    requests: usize,
}

impl TwoLevel {
    /// Removes a block and returns its count.
    fn take(&mut self, block: u32) -> Option<u32> {
        let lists = [&mut self.active, &mut self.inactive];
        lists.into_iter().find_map(|list| {
            let place = list.iter().position(|(held, _)| *held == block)?;
            Some(list.remove(place).1)
        })
    }

    fn age(&mut self) {
        let lists = self.active.iter_mut().chain(&mut self.inactive);
        lists.for_each(|(_, count)| *count /= 2);
        self.inactive.extend(self.active.iter().filter(|(_, count)| *count == 0));
        self.active.retain(|(_, count)| *count > 0);
    }
}

impl Model for TwoLevel {
    fn access(&mut self, block: u32) -> bool {
        let count = self.take(block);
        if let Some(count) = count {
            self.active.push((block, (count + 1).min(15)));
            // The sort is stable: the most recently used block comes after its equals.
            self.active.sort_by_key(|(_, count)| *count);
            while self.active.len() > self.inactive.len() {
                self.inactive.push(self.active.remove(0));
            }
        } else {
            if self.active.len() + self.inactive.len() == self.frames {
                self.inactive.remove(0);
            }
            self.inactive.push((block, 0));
        }
        self.requests += 1;
        if self.requests.is_multiple_of(10 * self.frames) {
            self.age();
        }
        count.is_some()
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(3000))]

    #[test]
    fn like_its_model(frames in 1u32..40, blocks in stretches()) {
        let (inactive, active) = (Vec::new(), Vec::new());
        agree("two-level-lru", frames, TwoLevel { frames: frames as usize, inactive, active, requests: 0 }, &blocks)?;
    }
}
