//! Miss ratios on Zipf-distributed requests, beside those that others have measured.

use super::*;
use crate::admission::Admission;
use crate::index::hash;
use crate::{CacheSim, SimConfig};

/// Requests for blocks by a Zipf law of exponent 1, most popular first scattered over the disk.
struct Zipf {
    /// The chance of a block among the first so many.
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
        let dice = (bits >> 11) as f64 / (1u64 << 53) as f64;
        let rank = self.cumulated.partition_point(|chance| *chance <= dice);
        Some(BlockNo((hash(BlockNo(rank as u32)) >> 32) as u32))
    }
}

/// Reads a stream of blocks through a simulated cache.
fn miss_ratio(policy: PolicyKind, blocks: u32, requests: &[BlockNo]) -> f64 {
    let config = SimConfig { blocks, block_bytes: 4096, policy, admission: Admission::default() };
    let mut sim = CacheSim::new(&config).expect("workable");
    requests.iter().for_each(|block| _ = sim.read(u64::from(block.0) * 4096, 4096));
    1.0 - sim.stats().read_hit_ratio()
}

/// Against libCacheSim's figures for 20 million requests over a million blocks, caches of 1 % and 10 % of the
/// blocks touched; its stream was another. Where it gave none, a policy must at least beat lru.
#[test]
#[ignore = "takes a minute"]
fn miss_ratios_are_those_of_others() {
    let figures = [
        ("lru", 0.422, 0.230),
        ("arc", 0.346, 0.193),
        ("lirs", 0.346, 0.193),
        ("s3-fifo", 0.343, 0.189),
        ("sieve", 0.345, 0.191),
        ("wtinylfu", 0.344, 0.187),
        ("2q", 0.357, 0.200),
    ];
    let requests: Vec<BlockNo> = Zipf::new(1_000_000).take(20_000_000).collect();
    let touched = requests.iter().collect::<BTreeSet<_>>().len() as u32;
    for kind in PolicyKind::all() {
        let name = kind.info().name;
        let one = miss_ratio(kind, touched / 100, &requests);
        let ten = miss_ratio(kind, touched / 10, &requests);
        println!("{name:12} {one:.4} {ten:.4}");
        if let Some((_, one_told, ten_told)) = figures.iter().find(|(told, ..)| *told == name) {
            assert!((one - one_told).abs() < 0.01 && (ten - ten_told).abs() < 0.01, "{name}: {one} {ten}");
        }
    }
}

/// The same at a hundredth of the size: what every policy here is for.
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
