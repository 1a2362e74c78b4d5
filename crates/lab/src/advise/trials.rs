//! Simulations of caches one might choose, and the choice.
//!
//! The choice is greedy, one property after the other, each by simulation with the ones before: the policy with the
//! smallest size that reaches the target, then the largest block, then the admission that writes least to flash;
//! hit ratios within a point count as equal. It is not the optimum of all combinations, which would cost
//! hundreds of simulations to gain what the next day's load takes away again.

use std::cell::RefCell;

use anyhow::{Result, ensure};
use hob_engine::admission::Admission;
use hob_engine::policy::PolicyKind;
use serde::{Serialize, Serializer};

use super::curves::Start;
use super::material::{Held, Sample, Slices};
use super::{POINT, Progress};
use crate::sim::{self, Point, Simulated};

/// From one size to the next, as long as a policy reaches the target.
const SMALLER: f64 = 0.7;
const LARGER: f64 = 1.25;
/// Times that a cache is enlarged because a sample promised too much.
const ENLARGED_MAX: u32 = 3;
/// Smaller sizes to try: down to a twelfth of what LRU needs.
const STEPS_MAX: u32 = 7;
/// Sizes to try between one that is too small and one that is not.
const BETWEEN: [f64; 3] = [0.25, 0.5, 0.75];
/// Sizes to show, in parts of the chosen one.
const SIZES_SHOWN: [f64; 5] = [0.25, 0.5, 1.0, 2.0, 4.0];
/// Flash writes nearer than this are the same.
const WRITES_ALIKE: f64 = 1.02;
/// Other sizes are simulated over the whole trace if it touches no more sectors.
const WHOLE_TOUCHES_MAX: u64 = 20_000_000;
/// Of all work, where simulations begin and end.
pub(super) const SHARES: (f64, f64) = (0.3, 0.8);
/// Nothing smaller can be given.
const CACHE_BYTES_MIN: u64 = 1 << 20;
/// What is tried besides letting everything in.
const ADMISSIONS: [&str; 6] = [
    "always",
    "always+not-sequential:512K",
    "nth-access:2",
    "nth-access:2+not-sequential:512K",
    "ghost",
    "ghost+not-sequential:512K",
];

/// A cache.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Setting {
    /// Its size; whole blocks of it are used.
    pub cache_bytes: u64,
    /// Its blocks.
    pub block_bytes: u32,
    /// Replacement.
    #[serde(serialize_with = "policy_name")]
    pub policy: PolicyKind,
    /// What may come in.
    #[serde(serialize_with = "admission_form")]
    pub admission: Admission,
}

fn policy_name<S: Serializer>(policy: &PolicyKind, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_str(policy.info().name)
}

fn admission_form<S: Serializer>(admission: &Admission, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_str(admission)
}

/// A cache, and what it does with the trace.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Trial {
    /// The cache.
    #[serde(flatten)]
    pub setting: Setting,
    /// Reads that are served from flash.
    pub read_hit_ratio: f64,
    /// Bytes of these, of all bytes read.
    pub read_hit_byte_ratio: f64,
    /// Bytes written to flash over the trace.
    pub flash_write_bytes: u64,
    /// Memory for index, policy and admission.
    pub memory_bytes: u64,
}

/// What simulations need.
pub(super) struct Trials<'a, 'b> {
    sample: &'a Sample<'a>,
    held: &'a Held,
    threads: usize,
    progress: RefCell<(&'a mut Progress<'b>, f64)>,
}

/// The choice, and what it was chosen from.
pub(super) struct Chosen {
    pub(super) setting: Setting,
    pub(super) policies: Vec<Trial>,
    pub(super) admissions: Vec<Trial>,
}

impl<'a, 'b> Trials<'a, 'b> {
    pub(super) fn new(
        sample: &'a Sample<'a>,
        held: &'a Held,
        threads: usize,
        progress: &'a mut Progress<'b>,
    ) -> Self {
        Trials { sample, held, threads, progress: RefCell::new((progress, SHARES.0)) }
    }

    /// Simulates caches on the sample.
    fn run(&self, settings: &[Setting]) -> Result<Vec<Trial>> {
        self.run_on(self.sample, settings)
    }

    /// Simulates a cache on the whole trace.
    pub(super) fn exactly(&self, setting: Setting) -> Result<Trial> {
        Ok(self.run_on(&self.held.whole(), &[setting])?.remove(0))
    }

    fn run_on(&self, sample: &Sample<'_>, settings: &[Setting]) -> Result<Vec<Trial>> {
        let points: Vec<Point> = settings.iter().map(|setting| point(setting, sample.rate)).collect();
        let mut progress = self.progress.borrow_mut();
        let (tell, share) = &mut *progress;
        let mut goes_on = true;
        let results = sim::grid(&mut Slices(&sample.records), &points, self.threads, |_| {
            goes_on = tell("simulations", *share);
            goes_on
        })?;
        ensure!(goes_on, "interrupted");
        // How many runs it takes is not known: each gets a tenth of what is left.
        *share += (SHARES.1 - *share) / 10.0;
        Ok(settings.iter().zip(results).map(|(setting, result)| trial(*setting, &result, sample)).collect())
    }
}

/// What a sample promised, made true: the cache simulated over the whole trace, and enlarged as long as it has fewer
/// hits than it should.
pub(super) fn settled(trials: &Trials<'_, '_>, setting: Setting, target: f64) -> Result<Trial> {
    let mut cache = trials.exactly(setting)?;
    for _ in 0..ENLARGED_MAX {
        if trials.sample.rate == 1.0 || cache.read_hit_ratio >= target - POINT {
            break;
        }
        let cache_bytes = rounded(cache.setting.cache_bytes as f64 * LARGER);
        cache = trials.exactly(Setting { cache_bytes, ..setting })?;
    }
    Ok(cache)
}

fn point(setting: &Setting, rate: f64) -> Point {
    let Setting { cache_bytes, block_bytes, policy, admission } = *setting;
    let blocks = (cache_bytes / u64::from(block_bytes)) as f64 * rate;
    let cache_bytes = (blocks.round() as u64).max(1) * u64::from(block_bytes);
    Point { policy, admission, block_bytes, cache_bytes, sample_rate: 1.0 }
}

fn trial(setting: Setting, simulated: &Simulated, sample: &Sample<'_>) -> Trial {
    let scaled = |count: u64| (count as f64 / sample.rate) as u64;
    Trial {
        setting,
        read_hit_ratio: sample.corrected(simulated.stats.read_hit_ratio()),
        read_hit_byte_ratio: sample.corrected(simulated.stats.read_hit_byte_ratio()),
        flash_write_bytes: scaled(simulated.stats.flash_write_bytes),
        memory_bytes: scaled(simulated.memory_bytes),
    }
}

/// Rounds up to a size people can type: 1/64 exact, whole MiB.
pub(super) fn rounded(bytes: f64) -> u64 {
    let bytes = (bytes as u64).max(CACHE_BYTES_MIN);
    bytes.next_multiple_of((1 << bytes.ilog2() >> 6).max(CACHE_BYTES_MIN))
}

/// The policies the daemon has.
fn serving() -> impl Iterator<Item = PolicyKind> {
    PolicyKind::all().filter(|policy| policy.info().serves)
}

/// Chooses; see the module's text.
pub(super) fn choose(
    trials: &Trials<'_, '_>,
    start: &Start,
    target: f64,
    served: &[Admission],
) -> Result<Chosen> {
    let block_bytes = start.block_bytes as u32;
    let (setting, mut policies) = choose_policy(trials, start, target, served[0])?;
    let setting = choose_block(trials, setting, start.block_bytes_max as u32)?;
    if setting.block_bytes != block_bytes {
        let others = policies.iter().map(|trial| Setting { policy: trial.setting.policy, ..setting });
        policies = trials.run(&others.collect::<Vec<_>>())?;
    }
    policies.sort_by(|a, b| b.read_hit_ratio.total_cmp(&a.read_hit_ratio));
    let (setting, admissions) = choose_admission(trials, setting, served)?;
    Ok(Chosen { setting, policies, admissions })
}

/// The smallest size at which a policy reaches the target, and the policy there.
fn choose_policy(
    trials: &Trials<'_, '_>,
    start: &Start,
    target: f64,
    admission: Admission,
) -> Result<(Setting, Vec<Trial>)> {
    let enough = target - POINT / 2.0;
    let block_bytes = start.block_bytes as u32;
    let all_at = |cache_bytes: u64| {
        let setting = |policy| Setting { cache_bytes, block_bytes, policy, admission };
        trials.run(&serving().map(setting).collect::<Vec<_>>())
    };
    // LRU reaches it at the first size, but for rounding and what a sample leaves uncertain.
    let mut size = rounded(start.cache_bytes as f64);
    let mut at_size = all_at(size)?;
    if best(&at_size) < enough {
        size = rounded(size as f64 * LARGER);
        at_size = all_at(size)?;
    }
    let mut too_small = size;
    for _ in 0..STEPS_MAX {
        if size == CACHE_BYTES_MIN {
            break;
        }
        // Rounding up must not end up where it began.
        let smaller = rounded(size as f64 * SMALLER).min(size - CACHE_BYTES_MIN);
        let trials = all_at(smaller)?;
        too_small = smaller;
        if best(&trials) < enough {
            break;
        }
        (size, at_size) = (smaller, trials);
    }
    let setting = pick(&at_size, enough).setting;
    let between = BETWEEN.map(|part| rounded(too_small as f64 + part * (size - too_small) as f64));
    let settings = between.map(|cache_bytes| Setting { cache_bytes, ..setting });
    let reached = trials.run(&settings)?.into_iter().find(|trial| trial.read_hit_ratio >= enough);
    if let Some(smaller) = reached.filter(|smaller| smaller.setting.cache_bytes < size) {
        at_size = all_at(smaller.setting.cache_bytes)?;
    }
    Ok((pick(&at_size, enough).setting, at_size))
}

fn best(trials: &[Trial]) -> f64 {
    trials.iter().map(|trial| trial.read_hit_ratio).fold(0.0, f64::max)
}

/// Of those within a point of the best, and with `enough` hits if any has, what writes least to flash; among equals
/// the first.
fn pick(trials: &[Trial], enough: f64) -> &Trial {
    let best = best(trials);
    let least_hits = (best - POINT).max(enough.min(best));
    let good: Vec<&Trial> = trials.iter().filter(|trial| trial.read_hit_ratio >= least_hits).collect();
    let least = good.iter().map(|trial| trial.flash_write_bytes).min().expect("the best is good");
    let alike = |trial: &&&Trial| trial.flash_write_bytes as f64 <= least as f64 * WRITES_ALIKE;
    good.iter().find(alike).expect("the least is alike")
}

/// The largest block that is as good as the best.
fn choose_block(trials: &Trials<'_, '_>, setting: Setting, block_bytes_max: u32) -> Result<Setting> {
    let sizes = (12..=block_bytes_max.ilog2()).map(|shift| 1 << shift);
    let settings: Vec<Setting> = sizes.map(|block_bytes| Setting { block_bytes, ..setting }).collect();
    let results = trials.run(&settings)?;
    let least = best(&results) - POINT / 2.0;
    let good = results.iter().rfind(|trial| trial.read_hit_ratio >= least);
    Ok(good.expect("the best is good").setting)
}

/// Of what can be set, the admission that writes least to flash for as many hits; and all of them.
fn choose_admission(
    trials: &Trials<'_, '_>,
    setting: Setting,
    served: &[Admission],
) -> Result<(Setting, Vec<Trial>)> {
    let admissions = ADMISSIONS.map(|form| form.parse::<Admission>().expect("these are admissions"));
    let results = trials.run(&admissions.map(|admission| Setting { admission, ..setting }))?;
    let can_be_set = |trial: &&Trial| served.contains(&trial.setting.admission);
    let settable: Vec<Trial> = results.iter().filter(can_be_set).cloned().collect();
    let setting = if settable.is_empty() { setting } else { pick(&settable, 0.0).setting };
    Ok((setting, results))
}

/// The chosen cache in other sizes, smallest first.
pub(super) fn sizes(
    trials: &Trials<'_, '_>,
    setting: Setting,
    knee_bytes: Option<u64>,
) -> Result<Vec<Trial>> {
    let parts = SIZES_SHOWN.map(|part| setting.cache_bytes as f64 * part);
    let most = trials.held.profile.footprint.bytes as f64 * 1.1;
    let small_enough = |bytes: &f64| *bytes <= most.max(setting.cache_bytes as f64);
    let shown = parts.into_iter().filter(small_enough).map(rounded);
    let mut sizes: Vec<u64> = shown.chain(knee_bytes.map(|bytes| rounded(bytes as f64))).collect();
    sizes.sort_unstable();
    sizes.dedup();
    let settings: Vec<Setting> =
        sizes.into_iter().map(|cache_bytes| Setting { cache_bytes, ..setting }).collect();
    match trials.held.profile.footprint.touches {
        0..=WHOLE_TOUCHES_MAX => trials.run_on(&trials.held.whole(), &settings),
        _ => trials.run(&settings),
    }
}
