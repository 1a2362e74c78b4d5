//! Chooses block size, policy, admission and size of a cache together, so that the cache needs as
//! little flash as possible.
//!
//! The search starts from the cache that `candidates.rs` found property by property. All
//! combinations of policy and admission are simulated with the block size and the size of that
//! cache. The best few of them are simulated with several block sizes and cache sizes. For each
//! combination, the smallest size that reaches the target counts. The combination that needs the
//! least flash in five years wins. Worn-out flash must be replaced, so a cache with many flash
//! writes needs more flash than its size. At the end, each property of the winner is compared with
//! its alternatives while the other properties stay unchanged. This gives the runners-up.

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
/// Number of times to narrow the smallest sufficient size.
const NARROWED: u32 = 2;
/// Number of combinations of policy and admission that are kept for their hits, and number that are
/// kept for their few flash writes.
const PAIRS_KEPT: usize = 2;
/// Combinations with this many fewer hits than the best one are not tried with other sizes.
const HITS_BEHIND_MAX: f64 = 5.0 * POINT;
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

    /// Returns the flash that the cache takes for five years, bytes: its size, and as much again
    /// each time that its writes wear out flash of its size.
    pub(super) fn flash_bytes(&self, trial: &Trial) -> f64 {
        let years = WARRANTY_YEARS * DAYS_A_YEAR;
        let written = trial.flash_write_bytes as f64 / self.days * years;
        let size = trial.setting.cache_bytes;
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

/// The best alternative to a property of the chosen cache.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct RunnerUp {
    /// Property that differs: size, block size, policy, admission or mode.
    pub property: &'static str,
    /// Value of the property.
    pub value: String,
    /// Cache with this value, and its results.
    #[serde(flatten)]
    pub trial: Trial,
    /// Mean latency of all requests, nanoseconds; `None` if it cannot be estimated.
    pub mean_ns: Option<u64>,
}

/// Returns the jointly chosen cache.
pub(super) fn choose(
    trials: &Trials<'_, '_>,
    first: Setting,
    costs: &Costs,
    (target, size_max, block_bytes_max): (f64, u64, u32),
) -> Result<Setting> {
    let pairs = pairs(trials, first, costs)?;
    let blocks = [first.block_bytes / 2, first.block_bytes, first.block_bytes * 2];
    let blocks = blocks.into_iter().filter(|block| (4096..=block_bytes_max).contains(block));
    let mut sizes: Vec<u64> =
        SIZES.map(|part| rounded(first.cache_bytes as f64 * part).min(rounded(size_max as f64))).to_vec();
    sizes.push(first.cache_bytes);
    sizes.sort_unstable();
    sizes.dedup();
    let combinations: Vec<Setting> = blocks
        .flat_map(|block_bytes| pairs.iter().map(move |pair| Setting { block_bytes, ..*pair }))
        .collect();
    let settings = combinations
        .iter()
        .flat_map(|setting| sizes.iter().map(|size| Setting { cache_bytes: *size, ..*setting }));
    let results = trials.run(&settings.collect::<Vec<_>>())?;
    let most = results.iter().map(|trial| trial.read_hit_ratio).fold(0.0, f64::max);
    let enough = target.min(most) - POINT / 2.0;
    let smallest: Vec<&Trial> = results
        .chunks(sizes.len())
        .filter_map(|of| of.iter().find(|trial| trial.read_hit_ratio >= enough))
        .collect();
    let chosen = cheapest(&smallest, costs).expect("the one with the most hits reaches them");
    let almost: Vec<&Trial> =
        results.iter().filter(|trial| trial.setting.cache_bytes <= chosen.setting.cache_bytes).collect();
    let chosen = candidates::sparing_of(chosen, almost.into_iter(), enough - candidates::SPARING_LOSS);
    narrowed(trials, chosen, chosen.read_hit_ratio.min(enough), &sizes)
}

/// Returns the combinations of policy and admission that are tried with other sizes.
fn pairs(trials: &Trials<'_, '_>, first: Setting, costs: &Costs) -> Result<Vec<Setting>> {
    let admissions = ADMISSIONS.map(|form| form.parse::<Admission>().expect("these are admissions"));
    let settings: Vec<Setting> = serving()
        .flat_map(|policy| admissions.map(|admission| Setting { policy, admission, ..first }))
        .collect();
    let results = trials.run(&settings)?;
    let most = results.iter().map(|trial| trial.read_hit_ratio).fold(0.0, f64::max);
    let mut good: Vec<&Trial> =
        results.iter().filter(|trial| trial.read_hit_ratio >= most - HITS_BEHIND_MAX).collect();
    good.sort_by(|a, b| b.read_hit_ratio.total_cmp(&a.read_hit_ratio));
    let mut kept: Vec<Setting> = good.iter().take(PAIRS_KEPT).map(|trial| trial.setting).collect();
    good.sort_by(|a, b| costs.flash_bytes(a).total_cmp(&costs.flash_bytes(b)));
    kept.extend(good.iter().take(PAIRS_KEPT).map(|trial| trial.setting));
    kept.push(first);
    let mut unique: Vec<Setting> = Vec::new();
    kept.into_iter().for_each(|setting| {
        if !unique.contains(&setting) {
            unique.push(setting);
        }
    });
    Ok(unique)
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

/// Returns the smallest size of the chosen cache that reaches `enough`, between the tried sizes.
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
    let admissions = ADMISSIONS.map(|form| form.parse::<Admission>().expect("these are admissions"));
    for change in 0.. {
        let blocks = (12..=block_bytes_max.ilog2()).map(|shift| 1 << shift);
        let policies: Vec<PolicyKind> = serving().collect();
        let settings = (policies.iter().map(|policy| Setting { policy: *policy, ..setting }))
            .chain(admissions.map(|admission| Setting { admission, ..setting }))
            .chain(blocks.map(|block_bytes| Setting { block_bytes, ..setting }));
        let mut results = trials.run(&settings.collect::<Vec<_>>())?;
        let own = results.iter().find(|trial| trial.setting == setting).expect("it is one of them").clone();
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
    let writes = trial.flash_write_bytes as f64 / own.flash_write_bytes.max(1) as f64;
    (hits >= 0.0 && writes < 0.9) || (hits > POINT && writes <= 1.0)
}

/// Returns the best other value of a property: of the values whose hit ratios are within a point of
/// the best one, the value with the fewest flash writes.
pub(super) fn runner_up<'a>(chosen: &Trial, trials: &'a [Trial]) -> Option<&'a Trial> {
    let others: Vec<Trial> = trials.iter().filter(|trial| trial.setting != chosen.setting).cloned().collect();
    let picked = (!others.is_empty()).then(|| candidates::pick(&others, 0.0).setting)?;
    trials.iter().find(|trial| trial.setting == picked)
}
