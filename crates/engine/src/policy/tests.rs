//! Tests of policies with hand-written sequences, and of rules that apply to all of them. SYSTEMS is
//! the project's description of other systems, outside this repository.

mod any_candidates;
mod arc;
mod clock;
mod clock2q_plus;
mod larc;
mod lfu;
mod lirs;
mod models;
mod sieve;
mod two_level_lru;
mod two_q;
mod wtinylfu;
mod zipf;

use std::collections::{BTreeMap, BTreeSet};

use super::*;

/// A cache of single-sector blocks with only a policy: replays block numbers.
struct Replay {
    policy: Box<dyn Policy>,
    frame_of: BTreeMap<u32, FrameNo>,
    block_in: Vec<Option<u32>>,
    busy: BTreeSet<u32>,
}

impl Replay {
    fn new(name: &str, frames: u32) -> Self {
        let kind = PolicyKind::from_name(name).expect("known");
        Self::with((kind.info().build)(frames), frames)
    }

    fn with(policy: Box<dyn Policy>, frames: u32) -> Self {
        Replay {
            policy,
            frame_of: BTreeMap::new(),
            block_in: vec![None; frames as usize],
            busy: BTreeSet::new(),
        }
    }

    /// Accesses a block; returns true on a hit.
    fn access(&mut self, block: u32) -> bool {
        if let Some(frame) = self.frame_of.get(&block) {
            self.policy.hit(*frame);
            return true;
        }
        if !self.policy.admit(BlockNo(block)) {
            return false;
        }
        let free = self.block_in.iter().position(Option::is_none).map(|i| FrameNo(i as u32));
        let Some(frame) = free.or_else(|| self.evict()) else { return false };
        self.block_in[frame.0 as usize] = Some(block);
        self.frame_of.insert(block, frame);
        self.policy.insert(frame, BlockNo(block));
        false
    }

    /// Accesses a block until it is admitted: some policies admit only at the second miss.
    fn bring(&mut self, block: u32) -> bool {
        (0..2).any(|_| self.access(block) || self.frame_of.contains_key(&block))
    }

    fn evict(&mut self) -> Option<FrameNo> {
        let (block_in, busy) = (&self.block_in, &self.busy);
        let frame = self.policy.evict(&mut |frame| {
            let block = block_in[frame.0 as usize].expect("policies offer frames in use");
            if busy.contains(&block) { Candidate::Busy } else { Candidate::Block(BlockNo(block)) }
        })?;
        let block = self.block_in[frame.0 as usize].take().expect("in use");
        self.frame_of.remove(&block);
        Some(frame)
    }

    fn holds(&self) -> Vec<u32> {
        self.frame_of.keys().copied().collect()
    }

    fn run(&mut self, blocks: impl IntoIterator<Item = u32>) -> usize {
        blocks.into_iter().filter(|block| self.access(*block)).count()
    }
}

#[test]
fn fifo_ignores_hits() {
    let mut replay = Replay::new("fifo", 3);
    replay.run([1, 2, 3, 1, 1, 4]);
    assert_eq!(replay.holds(), [2, 3, 4]);
}

#[test]
fn lru_keeps_the_most_recently_used_blocks() {
    let mut replay = Replay::new("lru", 3);
    replay.run([1, 2, 3, 1, 4, 2, 1]);
    assert_eq!(replay.holds(), [1, 2, 4]);
}

#[test]
fn s3_fifo_by_hand() {
    // 10 frames: the small queue may have 1 block, so every eviction begins there.
    let mut replay = Replay::new("s3-fifo", 10);
    replay.run(1..=10);
    replay.run([1, 1, 2]);
    // 1 was used twice more and moves to main. 2 was used once: it is evicted and remembered.
    replay.access(11);
    assert_eq!(replay.holds(), [1, 3, 4, 5, 6, 7, 8, 9, 10, 11]);
    // 2 returns while it is remembered: it is inserted into main, and 3 is evicted for it.
    replay.access(2);
    assert_eq!(replay.holds(), [1, 2, 4, 5, 6, 7, 8, 9, 10, 11]);
    // A scan of new blocks passes through the small queue and leaves main unchanged.
    replay.run(100..200);
    let holds = replay.holds();
    assert!(holds.contains(&1) && holds.contains(&2), "{holds:?}");
}

/// SYSTEMS §1, "Replacement keeps popular blocks much longer than others".
#[test]
fn s3_fifo_keeps_popular_blocks_through_a_scan_where_lru_does_not() {
    // Hits of the first round over 50 popular blocks after each scan of 300 new blocks.
    let after_scans = |name| {
        let mut replay = Replay::new(name, 100);
        (0..40u32)
            .map(|cycle| {
                let hits = replay.run(0..50);
                (0..3).for_each(|_| _ = replay.run(0..50));
                replay.run((0..300).map(|i| 1000 + cycle * 300 + i));
                hits
            })
            .sum::<usize>()
    };
    assert_eq!(after_scans("s3-fifo"), 39 * 50);
    assert_eq!(after_scans("lru"), 0);
}

/// SYSTEMS §1, "… and adapts when the workload changes".
#[test]
fn s3_fifo_adapts_to_another_hot_set() {
    let mut replay = Replay::new("s3-fifo", 100);
    let load = |base: u32| (0..4000u32).map(move |i| base + i * 7919 % 80);
    replay.run(load(0));
    let hits = replay.run(load(1000));
    assert!(hits > 3500, "{hits} of 4000 after the change");
}

#[test]
fn every_policy_steps_over_busy_frames_and_gives_up_when_all_are_busy() {
    for kind in PolicyKind::all() {
        let name = kind.info().name;
        let mut replay = Replay::new(name, 8);
        assert!((0..8).all(|block| replay.bring(block)), "{name}");
        replay.busy = (0..8).filter(|b| *b != 5).collect();
        assert!(replay.bring(100) && !replay.frame_of.contains_key(&5), "{name}");
        replay.busy = replay.holds().into_iter().collect();
        assert!(!replay.bring(101), "{name}");
        replay.busy.clear();
        assert!(replay.bring(101), "{name}");
    }
}

#[test]
fn every_policy_survives_being_moved_to_another_instance() {
    for kind in PolicyKind::all() {
        let name = kind.info().name;
        let mut replay = Replay::new(name, 20);
        replay.run((0..2000u32).map(|i| i * i % 37));
        let order = replay.policy.order();
        assert_eq!(order.len(), replay.frame_of.len(), "{name}");
        assert!(order.len() > 10, "{name}");
        let mut moved = (kind.info().build)(20);
        order.iter().for_each(|(frame, heat)| moved.restore(*frame, *heat));
        assert_eq!(moved.order(), order, "{name}");
    }
}

#[test]
fn every_policy_has_a_row_of_its_own() {
    let names: BTreeSet<_> = POLICIES.iter().map(|row| row.name).collect();
    assert_eq!(names.len(), POLICIES.len());
    assert_eq!(PolicyKind::default().info().name, "s3-fifo");
    assert_eq!(PolicyKind::from_name("nonsense"), None);
}
