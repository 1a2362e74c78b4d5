//! ARC: hand-written cases, and a comparison with its paper's case distinction.

use proptest::prelude::*;

use super::models::{Model, agree, stretches, take};
use super::{PolicyKind, Replay};

#[test]
fn by_hand() {
    let mut replay = Replay::new("arc", 3);
    // T1 2 3, T2 1; the target is 0, so a block leaves T1: 2 is remembered in B1.
    replay.run([1, 2, 1, 3, 4]);
    assert_eq!(replay.holds(), [1, 3, 4]);
    // T1 and B1 have their share: 2 is forgotten, and 3 is remembered.
    replay.access(5);
    assert_eq!(replay.holds(), [1, 4, 5]);
    // 3 returns from B1: the target is 1, and 4 leaves. T1 5, T2 1 3, B1 4.
    replay.access(3);
    assert_eq!(replay.holds(), [1, 3, 5]);
    // T1 is at its target, so a block leaves T2. T1 5 6, T2 3, B1 4, B2 1.
    replay.access(6);
    assert_eq!(replay.holds(), [3, 5, 6]);
    // 1 returns from B2: the target is 0 again, and a block leaves T1. T1 6, T2 3 1, B1 4 5.
    replay.access(1);
    assert_eq!(replay.holds(), [1, 3, 6]);
    replay.run([7, 8, 9, 10]);
    assert_eq!(replay.holds(), [1, 3, 10]);
}

#[test]
fn a_resized_cache_keeps_the_balance_it_found() {
    let mut replay = Replay::new("arc", 3);
    // As above: T1 5, T2 1 3, and the target is 1.
    replay.run([1, 2, 1, 3, 4, 5, 3]);
    let order = replay.policy.order();
    replay.policy = (PolicyKind::from_name("arc").expect("known").info().build)(3);
    order.iter().for_each(|(frame, heat)| replay.policy.restore(*frame, *heat));
    replay.access(6);
    assert_eq!(replay.holds(), [3, 5, 6]);
}

/// Returns the hits of each policy for the same requests.
fn hits(requests: impl Iterator<Item = u32> + Clone) -> [usize; 3] {
    ["lru", "arc", "lirs"].map(|name| Replay::new(name, 100).run(requests.clone()))
}

/// ARC and LIRS have more hits than LRU for loops and scans, as their authors say.
#[test]
fn arc_and_lirs_beat_lru_on_scans() {
    // 60 blocks, each used twice, between scans of 300 new blocks.
    let round = |i: u32| (0..60).chain(0..60).chain(1000 + 300 * i..1300 + 300 * i);
    let [lru, arc, lirs] = hits((0..50).flat_map(round));
    assert_eq!(lru, 50 * 60);
    // If all uses except the first two of each block were hits: 49 · 60 more.
    assert!(arc > lru + 40 * 60 && lirs > lru + 40 * 60, "lru {lru}, arc {arc}, lirs {lirs}");
}

#[test]
fn arc_and_lirs_beat_lru_on_loops() {
    // A loop half as long again as the cache, and 50 blocks that are used twice in each round.
    let round = |_| (0..150).flat_map(|i| [1000 + i].into_iter().chain((i % 3 != 2).then_some(i * 7 % 50)));
    let [lru, arc, lirs] = hits((0..50).flat_map(round));
    assert!(arc > lru + lru / 4 && lirs > lru + lru / 4, "lru {lru}, arc {arc}, lirs {lirs}");
    // Only a loop: by its paper's rules, ARC has no reason to prefer any block. LIRS keeps the
    // first blocks.
    let [lru, arc, lirs] = hits((0..150).cycle().take(150 * 50));
    assert_eq!((lru, arc), (0, 0));
    assert!(lirs > 49 * 90, "{lirs}");
}

struct Arc {
    c: usize,
    p: f64,
    t1: Vec<u32>,
    t2: Vec<u32>,
    b1: Vec<u32>,
    b2: Vec<u32>,
}

impl Arc {
    fn replace(&mut self, is_in_b2: bool) {
        let t1 = self.t1.len() as f64;
        if t1 >= 1.0 && ((is_in_b2 && t1 == self.p) || t1 > self.p) {
            self.b1.push(self.t1.remove(0));
        } else {
            self.b2.push(self.t2.remove(0));
        }
    }
}

impl Model for Arc {
    fn access(&mut self, x: u32) -> bool {
        let (b1, b2) = (self.b1.len() as f64, self.b2.len() as f64);
        if take(&mut self.t1, x) || take(&mut self.t2, x) {
            self.t2.push(x);
            return true;
        }
        if self.b1.contains(&x) {
            self.p = (self.p + (b2 / b1).max(1.0)).min(self.c as f64);
            self.replace(false);
            take(&mut self.b1, x);
            self.t2.push(x);
            return false;
        }
        if self.b2.contains(&x) {
            self.p = (self.p - (b1 / b2).max(1.0)).max(0.0);
            self.replace(true);
            take(&mut self.b2, x);
            self.t2.push(x);
            return false;
        }
        let l1 = self.t1.len() + self.b1.len();
        let l2 = self.t2.len() + self.b2.len();
        if l1 == self.c {
            if self.t1.len() < self.c {
                self.b1.remove(0);
                self.replace(false);
            } else {
                self.t1.remove(0);
            }
        } else if l1 + l2 >= self.c {
            if l1 + l2 == 2 * self.c {
                self.b2.remove(0);
            }
            self.replace(false);
        }
        self.t1.push(x);
        false
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(3000))]

    #[test]
    fn like_its_model(frames in 1u32..40, blocks in stretches()) {
        let lists = || (Vec::new(), Vec::new());
        let ((t1, t2), (b1, b2)) = (lists(), lists());
        agree("arc", frames, Arc { c: frames as usize, p: 0.0, t1, t2, b1, b2 }, &blocks)?;
    }
}
