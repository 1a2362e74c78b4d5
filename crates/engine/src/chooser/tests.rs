//! Compares caches with the setting `auto` with caches that use one candidate only, on workloads
//! that suit different candidates.

use super::*;
use crate::SimStats;

const BLOCK: u64 = SECTOR_BYTES;

fn config(blocks: u32, policy: &str, admission: &str) -> SimConfig {
    SimConfig {
        blocks,
        block_bytes: BLOCK as u32,
        policy: PolicyKind::from_name(policy).expect("known"),
        admission: admission.parse().expect("known"),
        fill: Fill::Sectors,
    }
}

/// Returns a generator of pseudo-random numbers below `n`, the same in each run.
fn rng(seed: u64) -> impl FnMut(u64) -> u64 {
    let mut state = seed;
    move |n| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) % n
    }
}

fn played(config: &SimConfig, blocks: &[u64]) -> CacheSim {
    let mut cache = CacheSim::new(config).unwrap_or_else(|_| panic!("workable"));
    blocks.iter().for_each(|block| _ = cache.read(block * BLOCK, BLOCK));
    cache
}

fn hits(stats: SimStats) -> f64 {
    100.0 * stats.read_hit_ratio()
}

/// Runs blocks through `auto` and through each candidate. Returns the hit ratio of `auto`, and
/// those of the candidates, percent.
fn compared(frames: u32, blocks: &[u64]) -> (f64, Vec<f64>) {
    let auto = played(&config(frames, "auto", "auto"), blocks);
    let alone =
        |(policy, admission): &(&str, &str)| hits(played(&config(frames, policy, admission), blocks).stats());
    (hits(auto.stats()), CANDIDATES.iter().map(alone).collect())
}

/// Returns a working set that moves all the time, for which only recency matters.
fn moving(accesses: u64, width: u64) -> Vec<u64> {
    let mut rng = rng(7);
    (0..accesses).map(|at| 1_000_000 + at / 4 + rng(width)).collect()
}

/// Returns reads in a loop that is larger than the cache, over blocks that are not adjacent.
fn looping(accesses: u64, length: u64) -> Vec<u64> {
    (0..accesses).map(|at| at % length * 37).collect()
}

#[test]
fn fixed_settings_have_no_chooser() {
    let config = config(1000, "lru", "ghost");
    assert!(Chooser::new(1000, 0, config.policy, config.admission).is_none());
    assert_eq!(CacheSim::new(&config).unwrap_or_else(|_| panic!("workable")).choice(), None);
}

#[test]
fn each_setting_can_be_chosen_alone() {
    let auto = PolicyKind::from_name("auto").expect("known");
    let lru = PolicyKind::from_name("lru").expect("known");
    let admission = |text: &str| text.parse::<Admission>().expect("known");
    let policies = combinations(1000, auto, admission("nth-access:3")).expect("a choice");
    assert!(policies.len() > 1 && policies.iter().all(|found| found.admission == admission("nth-access:3")));
    let admissions = combinations(1000, lru, admission("auto")).expect("a choice");
    assert!(admissions.len() > 1 && admissions.iter().all(|found| found.policy == lru));
    let huge = combinations(FRAMES_MAX_TO_REORDER + 1, auto, admission("auto")).expect("a choice");
    assert!(huge.iter().all(|found| found.policy == huge[0].policy), "the frames keep their order");
}

#[test]
fn the_best_candidate_is_adopted_on_either_kind_of_workload() {
    for (name, blocks) in [("moving", moving(400_000, 1500)), ("loop", looping(400_000, 3000))] {
        let (auto, alone) = compared(2000, &blocks);
        let best = alone.iter().copied().fold(0.0, f64::max);
        let worst = alone.iter().copied().fold(100.0, f64::min);
        assert!(best - worst > 10.0, "{name}: the candidates differ: {alone:?}");
        assert!(best - auto < 3.0, "{name}: {auto} of {alone:?}");
    }
}

#[test]
fn a_change_of_phase_is_followed() {
    let blocks = [looping(200_000, 3000), moving(100_000, 1500)].concat();
    let mut cache = played(&config(2000, "auto", "auto"), &blocks[..200_000]);
    // Accesses of ten cache sizes, to detect the workload and to fill the cache.
    blocks[200_000..220_000].iter().for_each(|block| _ = cache.read(block * BLOCK, BLOCK));
    let before = cache.stats();
    blocks[220_000..].iter().for_each(|block| _ = cache.read(block * BLOCK, BLOCK));
    let after = cache.stats();
    let ratio = (after.read_hits - before.read_hits) as f64 / (after.reads - before.reads) as f64;
    let (_, alone) = compared(2000, &blocks[220_000..]);
    let best = alone.iter().copied().fold(0.0, f64::max);
    assert!(100.0 * ratio > best - 5.0, "{} of {alone:?}", 100.0 * ratio);
}

/// Returns a random block number below `width`. Low numbers are much more likely.
fn skewed(rng: &mut impl FnMut(u64) -> u64, width: u64) -> u64 {
    rng(width) * rng(width) / width * rng(width) / width
}

/// Runs reads (true) and writes (false) of single blocks.
fn played_mixed(config: &SimConfig, requests: &[(bool, u64)]) -> CacheSim {
    let mut cache = CacheSim::new(config).unwrap_or_else(|_| panic!("workable"));
    for (is_read, block) in requests {
        _ = if *is_read { cache.read(block * BLOCK, BLOCK) } else { cache.write(block * BLOCK, BLOCK) };
    }
    cache
}

#[test]
fn written_blocks_that_are_never_read_do_not_enter_the_cache() {
    let mut rng = rng(5);
    let log = (0..200_000).map(|at| (false, 1_000_000 + at * 37));
    let requests: Vec<(bool, u64)> =
        log.flat_map(|write| [write, (true, skewed(&mut rng, 20_000) * 3)]).collect();
    let auto = played_mixed(&config(2000, "auto", "auto"), &requests);
    let reads: Vec<(bool, u64)> = requests.iter().copied().filter(|(is_read, _)| *is_read).collect();
    let alone = played_mixed(&config(2000, "auto", "auto"), &reads);
    let (auto, alone) = (auto.stats(), alone.stats());
    assert!(auto.flash_write_bytes < alone.flash_write_bytes * 11 / 10, "{auto:?}, {alone:?}");
    assert!(hits(auto) > hits(alone) - 1.0, "{auto:?}, {alone:?}");
}

#[test]
fn written_blocks_that_are_read_enter_the_cache() {
    let mut rng = rng(5);
    let requests: Vec<(bool, u64)> =
        (0..400_000).map(|_| (rng(5) == 0, skewed(&mut rng, 20_000) * 3)).collect();
    let auto = played_mixed(&config(2000, "auto", "auto"), &requests);
    let choice = auto.choice().expect("automatic");
    assert!(!choice.current.admission.reads_only, "{choice:?}");
    let alone = |at: usize| {
        let (policy, admission) = CANDIDATES[at];
        hits(played_mixed(&config(2000, policy, admission), &requests).stats())
    };
    let (reads_only, all) = (alone(0), alone(1));
    assert!(all > reads_only + 1.0, "{all} and {reads_only}");
    assert!(hits(auto.stats()) > all - 1.5, "{} of {all}", hits(auto.stats()));
}

/// Runs reads through `auto` and through each candidate. Returns the hit ratios of the reads `from`
/// and later, percent.
fn compared_from(frames: u32, blocks: &[u64], from: usize) -> (f64, Vec<f64>) {
    let late = |policy: &str, admission: &str| {
        let mut cache = played(&config(frames, policy, admission), &blocks[..from]);
        let before = cache.stats();
        blocks[from..].iter().for_each(|block| _ = cache.read(block * BLOCK, BLOCK));
        let after = cache.stats();
        100.0 * (after.read_hits - before.read_hits) as f64 / (after.reads - before.reads) as f64
    };
    let alone = CANDIDATES.iter().map(|(policy, admission)| late(policy, admission)).collect();
    (late("auto", "auto"), alone)
}

#[test]
fn a_drop_of_the_hit_ratio_leads_to_a_change_within_two_cache_sizes() {
    let blocks = [looping(100_000, 3000), moving(60_000, 1500)].concat();
    let mut cache = played(&config(2000, "auto", "auto"), &blocks[..100_000]);
    let ghost = cache.choice().expect("automatic").current;
    blocks[100_000..104_000].iter().for_each(|block| _ = cache.read(block * BLOCK, BLOCK));
    let choice = cache.choice().expect("automatic");
    assert!(choice.current != ghost && choice.phase == Phase::Changed, "{choice:?}");
    let (auto, alone) = compared_from(2000, &blocks, 106_000);
    let best = alone.iter().copied().fold(0.0, f64::max);
    assert!(best - alone[0] > 10.0 && auto > best - 5.0, "{auto} of {alone:?}");
}

#[test]
fn a_loop_and_then_skewed_reads_are_followed() {
    let mut rng = rng(9);
    let skewed: Vec<u64> = (0..60_000).map(|_| 500_000 + skewed(&mut rng, 20_000) * 3).collect();
    let blocks = [looping(100_000, 3000), skewed].concat();
    // One cache size after the change.
    let (auto, alone) = compared_from(2000, &blocks, 102_000);
    let best = alone.iter().copied().fold(0.0, f64::max);
    assert!(auto > best - 5.0, "{auto} of {alone:?}");
}

#[test]
fn with_equal_hits_the_flash_is_spared() {
    // No block is read twice.
    let blocks: Vec<u64> = (0..100_000).map(|at| at * 37).collect();
    let auto = played(&config(2000, "auto", "auto"), &blocks).stats();
    let always = played(&config(2000, "s3-fifo", "always"), &blocks).stats();
    assert!(auto.flash_write_bytes * 10 < always.flash_write_bytes, "{auto:?}");
}

#[test]
fn miniatures_count_whole_requests() {
    let blocks = 100_000;
    let config = config(blocks, "auto", "auto");
    let mut cache = CacheSim::new(&config).unwrap_or_else(|_| panic!("workable"));
    let mut rng = rng(3);
    for _ in 0..1_500_000 {
        cache.read(rng(12_000) * 16 * BLOCK, 16 * BLOCK);
    }
    let choice = cache.choice().expect("automatic");
    assert_eq!(choice.phase, Phase::Warm);
    let before = cache.stats();
    for _ in 0..300_000 {
        cache.read(rng(12_000) * 16 * BLOCK, 16 * BLOCK);
    }
    let after = cache.stats();
    let real = (after.read_hits - before.read_hits) as f64 / (after.reads - before.reads) as f64;
    let said = choice.alternatives.iter().find(|row| row.combination == choice.current).expect("listed");
    assert!((real - said.hit_ratio).abs() < 0.08, "{real} is not {}", said.hit_ratio);
}

#[test]
fn the_miniatures_are_small() {
    let bytes = |frames| {
        let config = config(frames, "auto", "auto");
        Chooser::new(frames, 0, config.policy, config.admission).expect("automatic").bytes()
    };
    assert!(bytes(4 << 20) <= 400 << 10, "{}", bytes(4 << 20));
    // Half a percent of 24 bytes per block of a cache of 16 GiB.
    assert!(bytes(4 << 20) * 200 <= (4 << 20) * 24, "{}", bytes(4 << 20));
}

/// Reads `blocks` through a simulated cache, one each second, with a flash write budget of
/// `per_day` blocks a day.
fn played_with_budget(config: &SimConfig, blocks: &[u64], per_day: u64) -> CacheSim {
    use crate::flash_budget::{FlashBudget, Member, ROUND_NS, Settings};
    use crate::units::{DiskId, Instant};
    let settings = Settings { bytes_per_day: per_day * BLOCK, pool_bytes: u64::from(config.blocks) * BLOCK };
    let mut budget = FlashBudget::new(Instant(0), settings);
    let mut cache = CacheSim::new(config).unwrap_or_else(|_| panic!("workable"));
    for (second, block) in (0..).zip(blocks) {
        let now = Instant(second * 1_000_000_000);
        if now.0.is_multiple_of(ROUND_NS) {
            let member = Member { disk: DiskId(0), weight: 1, counts: cache.flash_counts() };
            cache.allow_flash_writes(budget.round(now, 0, &[member]).pop());
        }
        cache.read(block * BLOCK, BLOCK);
    }
    cache
}

/// `always` has the most hits on this working set, and writes a block for every fourth access.
#[test]
fn a_budget_overrides_the_choice_of_the_candidate_with_the_most_hits() {
    let blocks = moving(600_000, 1500);
    let config = config(2000, "auto", "auto");
    let without = played(&config, &blocks);
    let chosen = |cache: &CacheSim| cache.choice().expect("automatic").current.admission;
    assert_eq!(chosen(&without).popularity, Popularity::Always);
    // Seven days of budget for a tenth of the accesses.
    let with = played_with_budget(&config, &blocks, 8640);
    assert_ne!(chosen(&with).popularity, Popularity::Always, "{:?}", with.choice());
    assert!(with.stats().flash_write_bytes <= (8 * 8640 + 2000) * BLOCK, "{:?}", with.stats());
    // A budget for everything changes nothing.
    let plenty = played_with_budget(&config, &blocks, 86_400);
    assert_eq!(chosen(&plenty).popularity, Popularity::Always, "{:?}", plenty.choice());
    assert_eq!(plenty.stats().budget_refused_bytes, 0);
}

#[test]
fn a_cache_with_a_budget_has_stricter_candidates_in_the_same_memory_bound() {
    let config = config(2000, "auto", "auto");
    let cache = played_with_budget(&config, &looping(20_000, 3000), 8640);
    let candidates = cache.choice().expect("automatic").alternatives;
    assert_eq!(candidates.len(), CANDIDATES.len() + BUDGET_CANDIDATES.len());
    let auto = PolicyKind::from_name("auto").expect("known");
    let mut chooser = Chooser::new(1 << 20, 0, auto, config.admission).expect("automatic");
    chooser.note_allowance(Some(&crate::flash_budget::Allowance::default()));
    assert!(chooser.bytes() < 600 << 10, "{}", chooser.bytes());
}
