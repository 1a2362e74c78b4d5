//! LARC: hand-written cases, and a comparison with its definition.

use proptest::prelude::*;

use super::Replay;
use super::models::{Model, agree, stretches, take};

#[test]
fn a_block_enters_at_its_second_miss() {
    let mut replay = Replay::new("larc", 10);
    assert!(!replay.access(1) && replay.holds().is_empty());
    assert!(!replay.access(1));
    assert_eq!(replay.holds(), [1]);
    assert!(replay.access(1));
    // A scan changes nothing.
    replay.run(100..200);
    assert_eq!(replay.holds(), [1]);
    // The least recently used block is evicted.
    (2..=10).for_each(|block| assert!(replay.bring(block)));
    replay.access(1);
    assert!(replay.bring(11));
    assert_eq!(replay.holds(), [1, 3, 4, 5, 6, 7, 8, 9, 10, 11]);
}

#[test]
fn hits_shorten_the_memory_and_misses_lengthen_it() {
    // Returns whether a block that was missed once is remembered after `strangers` new blocks, with
    // this number of hits after each.
    let remembers = |strangers: u32, hits: usize| {
        let mut replay = Replay::new("larc", 100);
        replay.bring(0);
        let calm = |replay: &mut Replay| assert_eq!(replay.run(vec![0; hits]), hits);
        calm(&mut replay);
        replay.access(1);
        calm(&mut replay);
        for stranger in 0..strangers {
            replay.access(1000 + stranger);
            calm(&mut replay);
        }
        replay.access(1);
        replay.holds().contains(&1)
    };
    // Hits reduce the target to 10, and a miss raises it to 20: the block and 19 new blocks.
    assert!(remembers(19, 500) && !remembers(20, 500));
    // Without hits it reaches 90: the block and 89 new blocks.
    assert!(remembers(89, 0) && !remembers(90, 0));
}

struct Larc {
    c: f64,
    cr: f64,
    q: Vec<u32>,
    qr: Vec<u32>,
}

impl Model for Larc {
    fn access(&mut self, block: u32) -> bool {
        if take(&mut self.q, block) {
            self.q.push(block);
            self.cr = (self.cr - self.c / (self.c - self.cr)).max(0.1 * self.c).max(1.0);
            return true;
        }
        self.cr = (self.cr + self.c / self.cr).min((0.9 * self.c).max(1.0));
        if take(&mut self.qr, block) {
            self.q.push(block);
            if self.q.len() as f64 > self.c {
                self.q.remove(0);
            }
        } else {
            self.qr.push(block);
            while self.qr.len() as f64 > self.cr {
                self.qr.remove(0);
            }
        }
        false
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(3000))]

    #[test]
    fn like_its_model(frames in 1u32..40, blocks in stretches()) {
        let c = f64::from(frames);
        agree("larc", frames, Larc { c, cr: (0.1 * c).max(1.0), q: Vec::new(), qr: Vec::new() }, &blocks)?;
    }
}
