//! LIRS: hand-written cases, and a comparison with its definition.

use std::collections::BTreeSet;

use proptest::prelude::*;

use super::Replay;
use super::models::{Model, agree, stretches, take};

#[test]
fn by_hand() {
    // Two frames for LIR blocks, and two for HIR blocks. A prime marks blocks that left the cache.
    let mut replay = Replay::new("lirs", 4);
    // LIR: 1 2. S, from its bottom: 1 2 3' 4 5. Q: 4 5.
    replay.run([1, 2, 3, 4, 5]);
    assert_eq!(replay.holds(), [1, 2, 4, 5]);
    // 3 is still in S, so it becomes LIR in place of 1, which moves to Q. S: 2 4' 5 3. Q: 5 1.
    replay.access(3);
    assert_eq!(replay.holds(), [1, 2, 3, 5]);
    // S: 2 4' 5' 3 6, Q: 1 6; then 1, which is not in S, is evicted and forgotten.
    replay.run([6, 7]);
    assert_eq!(replay.holds(), [2, 3, 6, 7]);
    // 2 was the bottom of S: 4 and 5 are removed with it. S: 3 6 7 2. So 4 is unknown again.
    replay.run([2, 4]);
    assert_eq!(replay.holds(), [2, 3, 4, 7]);
    // 6 is still in S, so it becomes LIR in place of 3. S: 7' 4 2 6 loses 7' and 4. Q: 4 3.
    replay.access(6);
    assert_eq!(replay.holds(), [2, 3, 4, 6]);
    // A HIR block outside of S moves to the end of Q, and into S: at its next use it becomes LIR.
    replay.run([4, 8]);
    assert_eq!(replay.holds(), [2, 4, 6, 8]);
    replay.run([4, 9, 10]);
    assert_eq!(replay.holds(), [4, 6, 9, 10]);
}

struct Lirs {
    frames: usize,
    lirs_max: usize,
    /// The stack S, from its bottom to its top.
    s: Vec<u32>,
    q: Vec<u32>,
    lir: BTreeSet<u32>,
    held: BTreeSet<u32>,
    /// Blocks in S that left the cache, in the order in which they left.
    left: Vec<u32>,
}

impl Lirs {
    fn becomes_lir(&mut self, block: u32) {
        take(&mut self.s, block);
        take(&mut self.q, block);
        self.s.push(block);
        self.lir.insert(block);
        if self.lir.len() > self.lirs_max {
            let end = self.s.remove(0);
            assert!(self.lir.remove(&end));
            self.q.push(end);
        }
    }

    fn becomes_hir(&mut self, block: u32) {
        take(&mut self.q, block);
        self.q.push(block);
        self.s.push(block);
    }

    fn tidy(&mut self) {
        while self.s.first().is_some_and(|end| !self.lir.contains(end)) {
            let end = self.s.remove(0);
            take(&mut self.left, end);
        }
        while self.left.len() > self.frames {
            let first = self.left.remove(0);
            take(&mut self.s, first);
        }
    }
}

impl Model for Lirs {
    fn access(&mut self, block: u32) -> bool {
        let hit = self.held.contains(&block);
        if !hit && self.held.len() == self.frames {
            let victim = self.q.remove(0);
            self.held.remove(&victim);
            if self.s.contains(&victim) {
                self.left.push(victim);
            }
        }
        self.held.insert(block);
        take(&mut self.left, block);
        if self.lir.contains(&block) {
            take(&mut self.s, block);
            self.s.push(block);
        } else if self.s.contains(&block) || (!hit && self.lir.len() < self.lirs_max) {
            self.becomes_lir(block);
        } else {
            self.becomes_hir(block);
        }
        self.tidy();
        hit
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(3000))]

    #[test]
    fn like_its_model(frames in 1u32..40, blocks in stretches()) {
        let model = Lirs {
            frames: frames as usize,
            lirs_max: match frames {
                1 => 0,
                2 => 1,
                more => more as usize - 2,
            },
            s: Vec::new(),
            q: Vec::new(),
            lir: BTreeSet::new(),
            held: BTreeSet::new(),
            left: Vec::new(),
        };
        agree("lirs", frames, model, &blocks)?;
    }
}
