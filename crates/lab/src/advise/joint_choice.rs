//! Chooses block size, policy, admission and size of the cache together. The choice depends on the
//! amount of flash that a cache takes and on the latency that it gives.
//!
//! The search has three stages. Each stage simulates fewer caches, on a larger part of the trace,
//! than the stage before:
//!
//! 1. A coarse grid simulates all combinations of policy, admission, block size and a few sizes on a
//!    small part of the trace.
//! 2. The best few combinations are simulated on the sample with more sizes, together with the
//!    cache that `candidates.rs` found property by property. For each combination, only the
//!    smallest size that reaches the target is compared.
//! 3. The finalists, which take the least flash for five years, are simulated over the whole trace
//!    and replayed in virtual time. The finalist with the smallest product of flash and mean latency
//!    wins (`mod.rs` has the replays). Write-back is tried with all finalists too (see `mode.rs`).
//!
//! Worn-out flash must be replaced, so a cache with many flash writes takes more flash than its
//! size. At the end, each property of the winner is compared with its alternatives while the other
//! properties stay unchanged. The best alternatives are the runners-up of the report.

use anyhow::Result;
use hob_engine::admission::Admission;
use hob_engine::policy::PolicyKind;
use serde::Serialize;

use super::candidates::{self, ADMISSIONS, Setting, Trial, Trials, rounded, serving};
use super::devices::{DAYS_A_YEAR, Endurance, WARRANTY_YEARS};
use super::input::CollectedTrace;
use super::{POINT, latency};

/// Sizes to try with each combination, relative to the size of the first choice.
const SIZES: [f64; 4] = [0.6, 0.8, 1.0, 1.25];
/// Sizes to try between a size that is too small and a sufficient one.
const BETWEEN: [f64; 3] = [0.25, 0.5, 0.75];
/// Number of times that the search divides the interval between the largest insufficient and the
/// smallest sufficient size.
const NARROWED: u32 = 2;
/// Sizes of the coarse grid, relative to the size of the first choice.
const COARSE_SIZES: [f64; 2] = [0.6, 1.0];
/// Block sizes of the coarse grid, bytes.
const COARSE_BLOCKS: [u32; 4] = [4 << 10, 16 << 10, 64 << 10, 256 << 10];
/// Maximum difference by which a combination of the coarse grid may miss the target hit ratio. The
/// coarse grid uses a small part of the trace, whose errors are larger than those of the sample.
const COARSE_LOSS: f64 = 2.0 * POINT;
/// Number of combinations of the coarse grid that are kept because they take the least flash.
/// `KEPT_FOR_HITS` is the number of those that are kept because they have the most hits.
const KEPT_FOR_FLASH: usize = 8;
const KEPT_FOR_HITS: usize = 3;
/// Number of combinations that are simulated over the whole trace.
const FINALISTS: usize = 3;
/// Amounts of flash that differ by at most this factor count as equal.
const COST_ALIKE: f64 = 1.05;
/// Maximum number of changes of one property after the joint choice.
const CHANGES_MAX: u32 = 3;

/// Converts flash writes into the flash that a cache takes.
#[derive(Clone, Copy, Debug)]
pub(super) struct Costs {
    endurance: Endurance,
    /// Duration of the trace in days. A trace without times or with evenly spaced requests counts as
    /// one day, because the spacing is probably not that of the recorded system.
    days: f64,
}

impl Costs {
    pub(super) fn new(held: &CollectedTrace, endurance: Endurance) -> Costs {
        let seconds = latency::seconds(held).filter(|_| latency::has_arrivals(held));
        Costs { endurance, days: seconds.map_or(1.0, |seconds| seconds / 86_400.0) }
    }

    /// Returns the flash that the cache takes for five years, bytes: the size of the cache, plus
    /// this size again each time that the cache's writes wear out the flash.
    pub(super) fn flash_bytes(&self, trial: &Trial) -> f64 {
        self.flash_bytes_of(trial.setting.cache_bytes, trial.flash_write_bytes as f64)
    }

    /// Returns the flash that a cache of `size` bytes takes for five years, bytes.
    /// `flash_write_bytes` is the number of bytes written to the cache during the trace.
    pub(super) fn flash_bytes_of(&self, size: u64, flash_write_bytes: f64) -> f64 {
        let years = WARRANTY_YEARS * DAYS_A_YEAR;
        let written = flash_write_bytes / self.days * years;
        size as f64 * (1.0 + written / self.endurance.bytes(size))
    }
}

/// The alternatives to a cache: all values of one property while the other properties stay
/// unchanged.
pub(super) struct Around {
    pub(super) cache: Trial,
    pub(super) policies: Vec<Trial>,
    pub(super) admissions: Vec<Trial>,
    pub(super) blocks: Vec<Trial>,
}

/// The best alternative to the chosen cache that differs in one property.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct RunnerUp {
    /// Property that differs: size, block size, policy or admission, or `combination` for the
    /// second-best combination of all of them.
    pub property: &'static str,
    /// Value that the alternative has for this property.
    pub value: String,
    /// The alternative and its results.
    #[serde(flatten)]
    pub trial: Trial,
    /// Mean latency of all requests, nanoseconds; `None` if it cannot be estimated.
    pub mean_ns: Option<u64>,
}

/// Returns the finalists, best first. A finalist is the smallest sufficient cache with its
/// combination of policy, admission and block size.
pub(super) fn choose(
    trials: &Trials<'_, '_>,
    first: Setting,
    costs: &Costs,
    (target, size_max, block_bytes_max): (f64, u64, u32),
) -> Result<Vec<Setting>> {
    let combinations = combinations(trials, first, costs, (target, block_bytes_max))?;
    let mut sizes: Vec<u64> =
        SIZES.map(|part| rounded(first.cache_bytes as f64 * part).min(rounded(size_max as f64))).to_vec();
    sizes.push(first.cache_bytes);
    sizes.sort_unstable();
    sizes.dedup();
    let settings = combinations
        .iter()
        .flat_map(|setting| sizes.iter().map(|size| Setting { cache_bytes: *size, ..*setting }));
    let results = trials.run(&settings.collect::<Vec<_>>())?;
    let most = results.iter().map(|trial| trial.read_hit_ratio).fold(0.0, f64::max);
    let enough = target.min(most) - POINT / 2.0;
    let mut smallest: Vec<&Trial> = results
        .chunks(sizes.len())
        .filter_map(|of| of.iter().find(|trial| trial.read_hit_ratio >= enough))
        .collect();
    let chosen = cheapest(&smallest, costs).expect("the one with the most hits reaches them");
    let almost: Vec<&Trial> =
        results.iter().filter(|trial| trial.setting.cache_bytes <= chosen.setting.cache_bytes).collect();
    let chosen = candidates::sparing_of(chosen, almost.into_iter(), enough - candidates::SPARING_LOSS);
    smallest.retain(|trial| !is_same_combination(&trial.setting, &chosen.setting));
    smallest.sort_by(|a, b| costs.flash_bytes(a).total_cmp(&costs.flash_bytes(b)));
    std::iter::once(chosen)
        .chain(smallest)
        .take(FINALISTS)
        .map(|trial| narrowed(trials, trial, trial.read_hit_ratio.min(enough), &sizes))
        .collect()
}

/// Returns true if two caches are equal or differ only in size.
pub(super) fn is_same_combination(a: &Setting, b: &Setting) -> bool {
    Setting { cache_bytes: b.cache_bytes, ..*a } == *b
}

/// Returns the combinations of policy, admission and block size that are tried with several sizes:
/// the first choice, the first choice with blocks of half and twice the size, and the best of the
/// coarse grid.
fn combinations(
    trials: &Trials<'_, '_>,
    first: Setting,
    costs: &Costs,
    (target, block_bytes_max): (f64, u32),
) -> Result<Vec<Setting>> {
    let is_block = |block_bytes: &u32| (4096..=block_bytes_max).contains(block_bytes);
    let blocks = [first.block_bytes, first.block_bytes / 2, first.block_bytes * 2];
    let mut kept: Vec<Setting> =
        blocks.into_iter().filter(is_block).map(|block_bytes| Setting { block_bytes, ..first }).collect();
    for setting in best_of_grid(&trials.run_coarsely(&grid(first, block_bytes_max))?, costs, target) {
        if !kept.iter().any(|other| is_same_combination(other, &setting)) {
            kept.push(setting);
        }
    }
    Ok(kept)
}

/// Returns the coarse grid: all combinations of policy, admission and block size, each with all
/// sizes, smallest first.
fn grid(first: Setting, block_bytes_max: u32) -> Vec<Setting> {
    let admissions = ADMISSIONS.map(|form| form.parse::<Admission>().expect("the admissions are valid"));
    let mut settings = Vec::new();
    for policy in serving() {
        for admission in admissions {
            for block_bytes in COARSE_BLOCKS.into_iter().filter(|block| *block <= block_bytes_max) {
                settings.extend(COARSE_SIZES.map(|part| {
                    let cache_bytes = rounded(first.cache_bytes as f64 * part);
                    Setting { cache_bytes, block_bytes, policy, admission }
                }));
            }
        }
    }
    settings
}

/// Returns the best combinations of a coarse grid: those that take the least flash at the smallest
/// size that reaches the target, and those with the most hits at the largest size.
fn best_of_grid(results: &[Trial], costs: &Costs, target: f64) -> Vec<Setting> {
    let most = results.iter().map(|trial| trial.read_hit_ratio).fold(0.0, f64::max);
    let enough = target.min(most) - COARSE_LOSS;
    let combinations = results.chunks(COARSE_SIZES.len());
    let mut smallest: Vec<&Trial> = combinations
        .clone()
        .filter_map(|of| of.iter().find(|trial| trial.read_hit_ratio >= enough))
        .collect();
    smallest.sort_by(|a, b| costs.flash_bytes(a).total_cmp(&costs.flash_bytes(b)));
    let mut largest: Vec<&Trial> = combinations.filter_map(<[Trial]>::last).collect();
    largest.sort_by(|a, b| b.read_hit_ratio.total_cmp(&a.read_hit_ratio));
    let kept = smallest.into_iter().take(KEPT_FOR_FLASH).chain(largest.into_iter().take(KEPT_FOR_HITS));
    kept.map(|trial| trial.setting).collect()
}

/// Returns the index of the best finalist, from their results over the whole trace and their mean
/// latencies. The first finalist stays the best unless another finalist has a clearly smaller
/// product of flash and latency. A finalist that writes ten times as much as the first one is not
/// considered.
pub(super) fn best_finalist(finalists: &[(Trial, u64)], costs: &Costs) -> usize {
    let value = |(trial, mean_ns): &(Trial, u64)| costs.flash_bytes(trial) * (*mean_ns).max(1) as f64;
    let (first, first_value) = (&finalists[0].0, value(&finalists[0]));
    let is_better = |finalist: &(Trial, u64)| {
        let writes = finalist.0.flash_write_bytes as f64 * candidates::SPARING_PART;
        value(finalist) * COST_ALIKE < first_value
            && writes < first.flash_write_bytes as f64
            && finalist.0.read_hit_ratio >= first.read_hit_ratio - POINT
    };
    let better = (1..finalists.len()).filter(|index| is_better(&finalists[*index]));
    better.min_by(|a, b| value(&finalists[*a]).total_cmp(&value(&finalists[*b]))).unwrap_or(0)
}

/// Returns the trial that takes the least flash. Among trials with equal amounts, the one with the
/// most hits wins, and then the one with the least memory.
fn cheapest<'a>(candidates: &[&'a Trial], costs: &Costs) -> Option<&'a Trial> {
    let cost = |trial: &Trial| costs.flash_bytes(trial);
    let least = candidates.iter().map(|trial| cost(trial)).min_by(f64::total_cmp)?;
    let alike: Vec<&Trial> =
        candidates.iter().copied().filter(|trial| cost(trial) <= least * COST_ALIKE).collect();
    let most = alike.iter().map(|trial| trial.read_hit_ratio).fold(0.0, f64::max);
    alike
        .into_iter()
        .filter(|trial| trial.read_hit_ratio >= most - POINT / 2.0)
        .min_by_key(|trial| trial.memory_bytes)
}

/// Tries sizes of the chosen cache between the sizes tried so far. Returns the cache with the
/// smallest size whose hit ratio reaches `enough`.
fn narrowed(trials: &Trials<'_, '_>, chosen: &Trial, enough: f64, sizes: &[u64]) -> Result<Setting> {
    let mut setting = chosen.setting;
    let smaller = sizes.iter().rfind(|size| **size < setting.cache_bytes);
    let mut too_small = smaller.copied().unwrap_or(setting.cache_bytes / 2);
    for _ in 0..NARROWED {
        let gap = (setting.cache_bytes - too_small) as f64;
        let between = BETWEEN.map(|part| rounded(too_small as f64 + part * gap));
        let results = trials.run(&between.map(|cache_bytes| Setting { cache_bytes, ..setting }))?;
        let largest = setting.cache_bytes;
        for trial in results.iter().rev() {
            let size = trial.setting.cache_bytes;
            if trial.read_hit_ratio >= enough {
                setting.cache_bytes = size.min(largest);
            } else {
                too_small = too_small.max(size.min(largest));
                break;
            }
        }
        if setting.cache_bytes <= too_small {
            break;
        }
    }
    Ok(setting)
}

/// Returns the alternatives to each property of a cache. A cache that has neither more hits nor
/// fewer writes than an alternative is replaced by the alternative.
pub(super) fn around(trials: &Trials<'_, '_>, setting: Setting, block_bytes_max: u32) -> Result<Around> {
    let mut setting = setting;
    let admissions = ADMISSIONS.map(|form| form.parse::<Admission>().expect("the admissions are valid"));
    for change in 0.. {
        let blocks = (12..=block_bytes_max.ilog2()).map(|shift| 1 << shift);
        let policies: Vec<PolicyKind> = serving().collect();
        let settings = (policies.iter().map(|policy| Setting { policy: *policy, ..setting }))
            .chain(admissions.map(|admission| Setting { admission, ..setting }))
            .chain(blocks.map(|block_bytes| Setting { block_bytes, ..setting }));
        let mut results = trials.run(&settings.collect::<Vec<_>>())?;
        let own =
            results.iter().find(|trial| trial.setting == setting).expect("the setting was tried").clone();
        let better = results.iter().filter(|trial| dominates(trial, &own));
        let better = better.max_by(|a, b| a.read_hit_ratio.total_cmp(&b.read_hit_ratio));
        if let Some(better) = better.filter(|_| change < CHANGES_MAX) {
            setting = better.setting;
            continue;
        }
        let blocks = results.split_off(policies.len() + admissions.len());
        let admissions = results.split_off(policies.len());
        results.sort_by(|a, b| b.read_hit_ratio.total_cmp(&a.read_hit_ratio));
        return Ok(Around { cache: own, policies: results, admissions, blocks });
    }
    unreachable!("the number of changes is limited")
}

/// Returns true if `trial` has at least as many hits as `own` and clearly fewer flash writes, or
/// clearly more hits and no more flash writes.
fn dominates(trial: &Trial, own: &Trial) -> bool {
    let hits = trial.read_hit_ratio - own.read_hit_ratio;
    let (writes, own_writes) = (trial.flash_write_bytes as f64, own.flash_write_bytes as f64);
    (hits >= 0.0 && writes < own_writes * 0.9) || (hits > POINT && writes <= own_writes)
}

/// Returns the best alternative value of a property. Among the alternatives whose hit ratios are
/// within one point of the best alternative, the value with the fewest flash writes wins.
pub(super) fn runner_up<'a>(chosen: &Trial, trials: &'a [Trial]) -> Option<&'a Trial> {
    let others: Vec<Trial> = trials.iter().filter(|trial| trial.setting != chosen.setting).cloned().collect();
    let picked = (!others.is_empty()).then(|| candidates::pick(&others, 0.0).setting)?;
    trials.iter().find(|trial| trial.setting == picked)
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    fn first() -> Setting {
        Setting { cache_bytes: 100 * MIB, ..Trial::made_up(0.0, 0).setting }
    }

    #[test]
    fn the_grid_has_all_combinations_of_all_properties() {
        let settings = grid(first(), 256 << 10);
        let combinations = serving().count() * ADMISSIONS.len() * COARSE_BLOCKS.len();
        assert_eq!(settings.len(), combinations * COARSE_SIZES.len());
        for (index, setting) in settings.iter().enumerate() {
            assert!(!settings[..index].contains(setting), "{setting:?} is there twice");
        }
        assert!(grid(first(), 64 << 10).iter().all(|setting| setting.block_bytes <= 64 << 10));
    }

    #[test]
    fn a_cache_that_writes_nothing_to_flash_is_no_alternative_to_itself() {
        let trial = Trial::made_up;
        assert!(!dominates(&trial(0.5, 0), &trial(0.5, 0)));
        assert!(dominates(&trial(0.52, 0), &trial(0.5, 0)) && dominates(&trial(0.5, 89), &trial(0.5, 100)));
        assert!(!dominates(&trial(0.52, 1), &trial(0.5, 0)) && !dominates(&trial(0.5, 95), &trial(0.5, 100)));
    }

    /// Only one combination reaches the target, and no change of a single property of the first
    /// choice has more hits than the first choice.
    #[test]
    fn a_combination_that_differs_in_all_properties_is_kept() {
        let wanted = Setting {
            cache_bytes: 60 * MIB,
            block_bytes: 64 << 10,
            policy: PolicyKind::from_name("lfu").unwrap(),
            admission: "ghost".parse().unwrap(),
        };
        let trial = |setting: Setting| {
            let read_hit_ratio = if is_same_combination(&setting, &wanted) { 0.8 } else { 0.5 };
            Trial { setting, ..Trial::made_up(read_hit_ratio, 0) }
        };
        let results: Vec<Trial> = grid(first(), 256 << 10).into_iter().map(trial).collect();
        let costs = Costs { endurance: Endurance::default(), days: 1.0 };
        let kept = best_of_grid(&results, &costs, 0.75);
        assert_eq!(kept[0], wanted);
        assert!(kept.len() <= KEPT_FOR_FLASH + KEPT_FOR_HITS);
    }
}
