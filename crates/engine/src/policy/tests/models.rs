//! Compares policies with models: a policy and a slow, simple implementation of its definition have
//! the same hits for the same requests.

use proptest::prelude::*;

use super::*;

/// A whole cache: index and policy together.
pub(super) trait Model {
    /// Accesses a block; returns true on a hit.
    fn access(&mut self, block: u32) -> bool;

    /// Tells the model which block the policy evicted, for models whose definition leaves a choice.
    fn learn(&mut self, _gone: u32) {}
}

/// Returns requests like those of disks: hot spots, loops, scans and random blocks, one after the
/// other. At most about 900, so that the stamps of a ghost do not repeat.
fn requests() -> impl Strategy<Value = Vec<u32>> {
    let part = (0u32..4, 0u32..300, 1u32..90, 1usize..120, any::<u32>()).prop_map(
        |(kind, base, span, count, seed)| -> Vec<u32> {
            let rng = |i: usize| crate::index::hash(BlockNo(seed ^ i as u32)) as u32;
            let block = |i: usize| match kind {
                0 => base + rng(i) % span,
                1 => base + i as u32 % span,
                2 => base + i as u32,
                // Small numbers more often than large ones, with immediate repetitions from time to
                // time.
                _ => base + (rng(i / 2) % span) * (rng(i / 2 + 1000) % span) / span,
            };
            (0..count).map(block).collect()
        },
    );
    prop::collection::vec(part, 1..14).prop_map(|parts| parts.concat())
}

/// Runs thousands of request sequences through `policy` and `model`, both created for a number of
/// frames.
pub(super) fn compare<M: Model>(policy: impl Fn(u32) -> Box<dyn Policy>, model: impl Fn(u32) -> M) {
    let config = ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(2000) };
    let run = |(frames, blocks): (u32, Vec<u32>)| {
        let mut replay = Replay::with(policy(frames), frames);
        let mut model = model(frames);
        for (at, block) in blocks.into_iter().enumerate() {
            let before = replay.holds();
            let hit = replay.access(block);
            let gone = before.into_iter().find(|block| !replay.frame_of.contains_key(block));
            prop_assert_eq!(model.access(block), hit, "request {} of block {}", at, block);
            if let Some(gone) = gone {
                model.learn(gone);
            }
        }
        Ok(())
    };
    let mut runner = prop::test_runner::TestRunner::new_with_rng(
        config,
        prop::test_runner::TestRng::deterministic_rng(prop::test_runner::RngAlgorithm::ChaCha),
    );
    if let Err(error) = runner.run(&(1u32..130, requests()), run) {
        panic!("{error}");
    }
}

/// Removes a block from a list; returns false if the list does not have it.
pub(super) fn take(list: &mut Vec<u32>, block: u32) -> bool {
    let place = list.iter().position(|b| *b == block);
    place.map(|i| list.remove(i)).is_some()
}

/// Checks that the policy has the same hits as the model.
pub(super) fn agree(
    name: &str,
    frames: u32,
    mut model: impl Model,
    blocks: &[u32],
) -> Result<(), TestCaseError> {
    let mut replay = Replay::new(name, frames);
    for (i, block) in blocks.iter().enumerate() {
        let hits = (replay.access(*block), model.access(*block));
        prop_assert_eq!(hits.0, hits.1, "request {} of {:?}, {} frames", i, blocks, frames);
    }
    Ok(())
}

/// Returns sequences of random, skewed, looping and scanning requests, for caches of some tens of
/// frames.
pub(super) fn stretches() -> impl Strategy<Value = Vec<u32>> {
    let random = (0u32..40, 1u32..50, prop::collection::vec(any::<u32>(), 1..80))
        .prop_map(|(base, span, rng)| rng.into_iter().map(|die| base + die % span).collect::<Vec<u32>>());
    // The product of two random numbers is usually small.
    let skewed = prop::collection::vec((0u32..12, 0u32..12), 1..120)
        .prop_map(|rng| rng.into_iter().map(|(a, b)| a * b).collect());
    let looping = (0u32..40, 1u32..40, 2usize..5)
        .prop_map(|(base, span, rounds)| (base..base + span).cycle().take(span as usize * rounds).collect());
    let scan = (1000u32..1400, 1u32..60).prop_map(|(base, span)| (base..base + span).collect());
    let stretch = prop_oneof![random, skewed, looping, scan];
    prop::collection::vec(stretch, 1..10).prop_map(|stretches| stretches.concat())
}

#[test]
fn empty_frames_leave_at_once() {
    for name in ["clock", "sieve", "lfu", "wtinylfu", "clock2qplus"] {
        let mut replay = Replay::new(name, 20);
        replay.run((0..20).chain(0..20).chain(5..30));
        for left in (1..=20).rev() {
            let mut looks = 0;
            let frame = replay.policy.evict(&mut |_| {
                looks += 1;
                Candidate::Empty
            });
            assert!(frame.is_some() && looks == 1, "{name}");
            assert_eq!(replay.policy.order().len(), left - 1, "{name}");
        }
        assert_eq!(replay.policy.evict(&mut |_| Candidate::Empty), None, "{name}");
    }
}

/// Frames that were emptied keep no state. (W-TinyLFU continues to count requests, which is not
/// state of a frame.)
#[test]
fn a_drained_cache_is_like_a_new_one() {
    for name in ["clock", "sieve", "lfu", "clock2qplus"] {
        let mut drained = Replay::new(name, 40);
        drained.run((0..40).chain(0..40));
        while drained.policy.evict(&mut |_| Candidate::Empty).is_some() {}
        drained.frame_of.clear();
        drained.block_in.fill(None);
        let mut new = Replay::new(name, 40);
        for step in 0..3000 {
            let rng = crate::index::hash(BlockNo(step)) as u32;
            let block = 1000 + rng % 60 * (rng >> 16) % 60;
            assert_eq!(drained.access(block), new.access(block), "{name}, step {step}");
        }
    }
}

/// Eviction may fail after a block was admitted, and then no block is inserted. Frames are added
/// and removed while others are busy. No frame is lost or offered twice.
#[test]
fn frames_are_kept_track_of_while_some_are_busy() {
    for kind in PolicyKind::all() {
        let name = kind.info().name;
        for frames in [1, 2, 3, 10, 50, 130] {
            let mut replay = Replay::new(name, frames);
            for step in 0..4000u32 {
                let rng = crate::index::hash(BlockNo(step)) as u32;
                if step % 7 == 0 {
                    let share = rng % 4;
                    let holds = replay.holds().into_iter();
                    replay.busy =
                        holds.filter(|b| crate::index::hash(BlockNo(*b)) % 3 < share.into()).collect();
                }
                replay.access((rng >> 8) % (2 * frames));
                let mut order: Vec<u32> = replay.policy.order().iter().map(|(frame, _)| frame.0).collect();
                order.sort_unstable();
                let mut used: Vec<u32> = replay.frame_of.values().map(|frame| frame.0).collect();
                used.sort_unstable();
                assert_eq!(order, used, "{name}, {frames} frames, step {step}");
            }
        }
    }
}
