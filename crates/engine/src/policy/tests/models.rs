//! Comparing a policy with a slow and obvious model of its definition, request for request.

use proptest::prelude::*;

use super::Replay;

/// A whole cache, written down without a thought for speed.
pub(super) trait Model {
    /// True on a hit.
    fn access(&mut self, block: u32) -> bool;
}

/// Takes a block out of a list; false if it was not there.
pub(super) fn take(list: &mut Vec<u32>, block: u32) -> bool {
    let place = list.iter().position(|b| *b == block);
    place.map(|i| list.remove(i)).is_some()
}

/// The policy hits exactly where the model does.
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

/// Stretches of random, skewed, looping and scanning requests, for caches of some tens of frames.
pub(super) fn requests() -> impl Strategy<Value = Vec<u32>> {
    let random = (0u32..40, 1u32..50, prop::collection::vec(any::<u32>(), 1..80))
        .prop_map(|(base, span, dice)| dice.into_iter().map(|die| base + die % span).collect::<Vec<u32>>());
    // The product of two dice is small most of the time.
    let skewed = prop::collection::vec((0u32..12, 0u32..12), 1..120)
        .prop_map(|dice| dice.into_iter().map(|(a, b)| a * b).collect());
    let looping = (0u32..40, 1u32..40, 2usize..5)
        .prop_map(|(base, span, rounds)| (base..base + span).cycle().take(span as usize * rounds).collect());
    let scan = (1000u32..1400, 1u32..60).prop_map(|(base, span)| (base..base + span).collect());
    let stretch = prop_oneof![random, skewed, looping, scan];
    prop::collection::vec(stretch, 1..10).prop_map(|stretches| stretches.concat())
}
