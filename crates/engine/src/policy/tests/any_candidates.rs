//! Tests of all replacement policies with random requests, in which the candidates for eviction
//! have any state: evictable, busy (with I/O in flight), or empty (without valid data). If all
//! candidates are busy, the policy evicts and inserts nothing.

use std::collections::{BTreeMap, BTreeSet};

use proptest::prelude::*;

use super::*;

/// Policies that try every frame while fewer than `BUSY_MAX` frames are busy. The others may
/// encounter only busy frames.
const THOROUGH: &[&str] = &["lru", "2q", "arc", "lirs", "larc", "two-level-lru"];

/// Runs requests in which some blocks are busy and some frames have no valid data, by turns. The
/// cache is resized half-way.
fn run(kind: PolicyKind, sizes: [u32; 2], blocks: &[u32], rng: &[u32]) -> Result<(), TestCaseError> {
    let name = kind.info().name;
    let mut frames = sizes[0];
    let mut policy = (kind.info().build)(frames);
    let mut block_in: BTreeMap<u32, u32> = BTreeMap::new();
    for (i, &block) in blocks.iter().enumerate() {
        if i == blocks.len() / 2 {
            frames = sizes[1];
            let order = policy.order();
            policy = (kind.info().build)(frames);
            let stay = order.iter().filter(|(frame, _)| frame.0 < frames);
            stay.for_each(|(frame, heat)| policy.restore(*frame, *heat));
            block_in.retain(|frame, _| *frame < frames);
        }
        let die = rng[i % rng.len()];
        let state = |block: u32| match (block ^ die) % 7 {
            0..=2 if die.is_multiple_of(3) => Candidate::Busy,
            3 => Candidate::Empty,
            // Sometimes all blocks are busy.
            _ if die.is_multiple_of(11) => Candidate::Busy,
            _ => Candidate::Block(BlockNo(block)),
        };
        if let Some((frame, _)) = block_in.iter().find(|(_, held)| **held == block) {
            policy.hit(FrameNo(*frame));
            continue;
        }
        if !policy.admit(BlockNo(block)) {
            continue;
        }
        let free = (0..frames).find(|frame| !block_in.contains_key(frame));
        let frame = free.or_else(|| {
            let victim = policy.evict(&mut |frame| state(block_in[&frame.0]))?;
            let left = block_in.remove(&victim.0).expect("policies choose frames in use");
            assert_ne!(state(left), Candidate::Busy, "{name}");
            Some(victim.0)
        });
        match frame {
            Some(frame) => {
                policy.insert(FrameNo(frame), BlockNo(block));
                block_in.insert(frame, block);
            }
            None if !THOROUGH.contains(&name) => {}
            None => {
                let busy = block_in.values().filter(|held| state(**held) == Candidate::Busy);
                prop_assert_eq!(busy.count(), frames as usize, "{} gave up", name);
            }
        }
        let order = policy.order();
        prop_assert_eq!(order.len(), block_in.len(), "{}", name);
        let known: BTreeSet<u32> = order.iter().map(|(frame, _)| frame.0).collect();
        prop_assert!(known.iter().eq(block_in.keys()), "{}", name);
    }
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    #[test]
    fn every_policy_knows_its_frames_whatever_is_busy_or_empty(
        sizes in [1u32..30, 1u32..30],
        blocks in super::models::stretches(),
        rng in prop::collection::vec(any::<u32>(), 1..200),
    ) {
        for kind in PolicyKind::all() {
            run(kind, sizes, &blocks, &rng)?;
        }
    }
}
