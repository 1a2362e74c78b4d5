//! Miss ratios on Zipf-distributed requests.

use super::*;
use crate::admission::Admission;
use crate::granularity::Fill;
use crate::index::hash;
use crate::{CacheSim, SimConfig};

/// Requests for blocks by a Zipf law of exponent 1. The popular blocks are scattered over the disk.
struct Zipf {
    /// Probability of the first blocks, cumulative.
    cumulated: Vec<f64>,
    drawn: u64,
}

impl Zipf {
    fn new(blocks: u32) -> Self {
        let mut sum = 0.0;
        let mut cumulated: Vec<f64> = (1..=blocks)
            .map(|rank| {
                sum += 1.0 / f64::from(rank);
                sum
            })
            .collect();
        cumulated.iter_mut().for_each(|chance| *chance /= sum);
        Zipf { cumulated, drawn: 0 }
    }
}

impl Iterator for Zipf {
    type Item = BlockNo;

    fn next(&mut self) -> Option<BlockNo> {
        self.drawn += 1;
        let bits = hash(BlockNo(self.drawn as u32)) ^ hash(BlockNo((self.drawn >> 32) as u32 + 77));
        let rng = (bits >> 11) as f64 / (1u64 << 53) as f64;
        let rank = self.cumulated.partition_point(|chance| *chance <= rng);
        Some(BlockNo((hash(BlockNo(rank as u32)) >> 32) as u32))
    }
}

/// Reads a sequence of blocks through a simulated cache; returns the miss ratio.
fn miss_ratio(policy: PolicyKind, blocks: u32, requests: &[BlockNo]) -> f64 {
    let config =
        SimConfig { blocks, block_bytes: 4096, policy, admission: Admission::default(), fill: Fill::Sectors };
    let mut sim = CacheSim::new(&config).expect("workable");
    requests.iter().for_each(|block| _ = sim.read(u64::from(block.0) * 4096, 4096));
    1.0 - sim.stats().read_hit_ratio()
}

/// Policies that count uses must miss less than LRU, which is their purpose. `cargo xtask bench
/// lab` compares the ratios of larger sequences with published ones.
#[test]
fn policies_that_count_uses_beat_lru() {
    let requests: Vec<BlockNo> = Zipf::new(20_000).take(400_000).collect();
    for frames in [200, 2000] {
        let ratio = |name| miss_ratio(PolicyKind::from_name(name).expect("known"), frames, &requests);
        let lru = ratio("lru");
        assert!(ratio("clock") < lru - 0.005, "clock, {frames} frames");
        for name in ["sieve", "lfu", "wtinylfu", "clock2qplus", "s3-fifo"] {
            assert!(ratio(name) < lru - 0.03, "{name}, {frames} frames: {} against {lru}", ratio(name));
        }
    }
}
