//! Compares Belady's optimum with exhaustive search, and with every policy.

use std::collections::{BTreeSet, HashMap};
use std::ops::Range;

use hob_engine::admission::Admission;
use hob_engine::granularity::Fill;
use hob_engine::policy::PolicyKind;
use hob_engine::{CacheSim, SimConfig};

use super::*;
use crate::prng::Prng;

/// Returns the minimum number of misses with a cache of `size` blocks, by trying every choice.
fn brute_force(blocks: &[u64], size: usize) -> u64 {
    // Possible contents of the cache, and the minimum number of misses for each.
    let mut states: HashMap<BTreeSet<u64>, u64> = HashMap::from([(BTreeSet::new(), 0)]);
    for block in blocks {
        let mut next: HashMap<BTreeSet<u64>, u64> = HashMap::new();
        let mut reach = |held: BTreeSet<u64>, misses: u64| {
            let best = next.entry(held).or_insert(misses);
            *best = misses.min(*best);
        };
        for (held, misses) in states {
            if held.contains(block) {
                reach(held, misses);
                continue;
            }
            let mut with = held.clone();
            with.insert(*block);
            if with.len() <= size {
                reach(with, misses + 1);
            } else {
                with.iter().for_each(|out| {
                    let kept = with.iter().copied().filter(|b| b != out).collect();
                    reach(kept, misses + 1);
                });
            }
            reach(held, misses + 1);
        }
        states = next;
    }
    states.into_values().min().expect("there is always a way")
}

/// Returns the misses of a policy in a cache of that many blocks.
fn misses(policy: PolicyKind, blocks: u32, requests: &[u32]) -> u64 {
    let config =
        SimConfig { blocks, block_bytes: 4096, policy, admission: Admission::default(), fill: Fill::Sectors };
    let mut sim = CacheSim::new(&config).expect("workable");
    requests.iter().for_each(|block| _ = sim.read(u64::from(*block) * 4096, 4096));
    sim.stats().reads - sim.stats().read_hits
}

/// Returns the minimum number of read misses of whole requests with a cache of `size` blocks, by
/// trying every choice. The content at the arrival decides, and a request may add its blocks.
fn brute_force_requests(requests: &[(Range<u64>, bool)], size: usize) -> u64 {
    let mut states: HashMap<BTreeSet<u64>, u64> = HashMap::from([(BTreeSet::new(), 0)]);
    for (blocks, is_read) in requests {
        let mut next: HashMap<BTreeSet<u64>, u64> = HashMap::new();
        for (held, misses) in states {
            let is_hit = blocks.clone().all(|block| held.contains(&block));
            let misses = misses + u64::from(*is_read && !is_hit);
            let all: Vec<u64> =
                held.iter().copied().chain(blocks.clone()).collect::<BTreeSet<_>>().into_iter().collect();
            for choice in 0..1_u32 << all.len() {
                if choice.count_ones() as usize <= size {
                    let kept = (0..all.len()).filter(|at| choice >> at & 1 == 1).map(|at| all[at]).collect();
                    let best = next.entry(kept).or_insert(misses);
                    *best = misses.min(*best);
                }
            }
        }
        states = next;
    }
    states.into_values().min().expect("there is always a way")
}

#[test]
fn read_misses_of_requests_are_at_least_the_bound_and_equal_for_single_blocks() {
    let mut dice = Prng::new(9);
    let (mut equal, mut rounds) = (0, 0);
    for round in 0..150 {
        let width_max = 1 + round % 3;
        let requests: Vec<(Range<u64>, bool)> = (0..1 + dice.below(14))
            .map(|_| (dice.below(5), 1 + dice.below(width_max), dice.below(3) > 0))
            .map(|(start, width, is_read)| (start..start + width, is_read))
            .collect();
        let uses = NextUses::by_request(requests.iter().cloned()).unwrap();
        for size in 0..5 {
            let (bound, exact) = (uses.misses(size), brute_force_requests(&requests, size as usize));
            assert!(bound <= exact, "{bound} above {exact}: {size} of {requests:?}");
            if width_max == 1 {
                assert_eq!(bound, exact, "{size} of {requests:?}");
            }
            (equal, rounds) = (equal + u32::from(bound == exact), rounds + 1);
        }
    }
    assert!(equal * 10 > rounds * 7, "{equal} of {rounds}");
}

#[test]
fn a_block_is_not_kept_for_a_write() {
    // Block 1 is read again later than block 2 is written again.
    let uses = [(1, true), (2, true), (2, false), (1, true)];
    assert_eq!(NextUses::counting(uses).unwrap().misses(1), 2);
}

#[test]
fn by_hand() {
    // 1 and 2 stay for their next use, and 3 is not admitted; then 2 is not needed any more.
    let uses = NextUses::new([1, 2, 3, 1, 2, 3, 1]).expect("short");
    assert_eq!((uses.requests(), uses.distinct()), (7, 3));
    assert_eq!(uses.misses(0), 7);
    // 1 stays all the time.
    assert_eq!(uses.misses(1), 5);
    // 1 and 2 stay; 3 misses twice.
    assert_eq!(uses.misses(2), 4);
    assert_eq!(uses.misses(3), 3);
    assert_eq!(uses.misses(1000), 3);
    assert_eq!(uses.miss_ratios(&[1, 3]), [5.0 / 7.0, 3.0 / 7.0]);
}

#[test]
fn nothing_asked_for_is_nothing_missed() {
    let uses = NextUses::new([]).expect("short");
    assert_eq!((uses.misses(0), uses.miss_ratios(&[0, 5])), (0, vec![0.0, 0.0]));
}

#[test]
fn no_choice_misses_less() {
    let mut dice = Prng::new(3);
    for _ in 0..400 {
        let span = 2 + dice.below(6);
        let blocks: Vec<u64> = (0..1 + dice.below(30)).map(|_| dice.below(span) * 1_000_000_007).collect();
        let uses = NextUses::new(blocks.iter().copied()).expect("short");
        for size in 0..6 {
            assert_eq!(uses.misses(size), brute_force(&blocks, size as usize), "{size} of {blocks:?}");
        }
    }
}

/// Tests the set of times with enough times that the set has several levels of bitmaps.
#[test]
fn moments_know_their_last() {
    let mut dice = Prng::new(5);
    let bound = 300_000;
    let (mut moments, mut model) = (Moments::new(bound), BTreeSet::new());
    for step in 0..100_000u32 {
        let moment = dice.below(bound as u64) as u32;
        if step % 3 == 0 {
            assert_eq!(moments.remove(moment), model.remove(&moment));
        } else if step % 7 == 0 {
            let last = model.pop_last();
            assert_eq!(moments.last(), last);
            last.into_iter().for_each(|last| assert!(moments.remove(last)));
        } else {
            moments.insert(moment);
            model.insert(moment);
        }
    }
    while let Some(last) = model.pop_last() {
        assert_eq!(moments.last(), Some(last));
        moments.remove(last);
    }
    assert_eq!(moments.last(), None);
}

#[test]
fn no_policy_misses_less() {
    let mut dice = Prng::new(11);
    for round in 0..12 {
        // Skewed requests, with a loop or a scan in between.
        let mut blocks: Vec<u32> = Vec::new();
        for stretch in 0..10u32 {
            let skewed = |dice: &mut Prng| (dice.unit() * dice.unit() * dice.unit() * 500.0) as u32;
            blocks.extend((0..1000).map(|_| skewed(&mut dice)));
            match round % 3 {
                0 => blocks.extend((0..1200).map(|i| 500 + i % 300)),
                1 => blocks.extend((0..600).map(|i| 1000 + 600 * stretch + i)),
                _ => {}
            }
        }
        let uses = NextUses::new(blocks.iter().map(|b| u64::from(*b))).expect("short");
        for frames in [1, 2, 7, 50, 200, 450] {
            let best = uses.misses(u64::from(frames));
            for kind in PolicyKind::all() {
                let misses = misses(kind, frames, &blocks);
                assert!(best <= misses, "{} with {frames}: {misses}, optimum {best}", kind.info().name);
            }
        }
    }
}
