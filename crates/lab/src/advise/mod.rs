//! Computes from a trace of a disk which cache the disk should get.
//!
//! Each stage uses the results of the previous stage:
//!
//! 1. the profile of the trace, and a sample if the trace is large (see `input.rs`);
//! 2. LRU miss-ratio curves for each block size. The curves give the highest possible hit ratio,
//!    the knee, and the size that reaches the target;
//! 3. simulations of caches near this size with the daemon's policies, block sizes and admissions.
//!    The properties are varied one at a time (see `candidates.rs`) and then together (see
//!    `joint_choice.rs`);
//! 4. exact simulations of the best caches (the finalists) over the whole trace, and replays of a
//!    part of the trace in virtual time with models of backing and flash. Hits, flash writes and
//!    mean latency select the cache, and latency and wear select the write mode (see `mode.rs`);
//! 5. simulations of alternatives to the chosen cache, for comparison.
//!
//! If a cache does not help, the advice says so. The same trace and options give the same advice.
//! Sizes are in bytes, times in nanoseconds, and ratios from 0 to 1. Discards remove cached data,
//! and flushes take time in the replays. The latencies of discards and flushes do not count.

mod candidates;
mod curves;
mod devices;
mod input;
mod joint_choice;
mod latency;
mod live;
mod mode;
mod page;
mod reporter;
mod sentences;
#[cfg(test)]
mod tests;
mod text;

use anyhow::Result;
use hob_engine::admission::Admission;
use hob_engine::granularity::Fill;
use serde::Serialize;

use candidates::Trials;
use curves::{BlockCurve, Start};
use hob_trace::profile::Profile;
use input::CollectedTrace;
use joint_choice::{Around, Costs};
use latency::Uncached;
use reporter::Reporter;

pub use candidates::{Setting, Trial};
pub use devices::{Backing, Endurance, Flash};
pub use input::Material;
pub use joint_choice::RunnerUp;
pub(crate) use latency::has_arrivals;
pub use latency::{Latency, Timing};
pub use live::{
    Confidence, Live, LiveAdvice, LiveCache, LiveCurve, LiveOptions, LiveRecent, LiveRecommendation, live,
    live_text,
};
pub use mode::ModeChoice;
pub use page::page;
pub use text::text;

/// Default target: this share of the hit ratio of an unlimited cache.
const TARGET_OF_BEST: f64 = 0.9;
/// Minimum hit ratio at which a cache is worthwhile.
const HIT_RATIO_MIN: f64 = 0.05;
/// Hit ratios that differ by less than this count as equal.
const POINT: f64 = 0.01;

/// Goals and devices of the user.
#[derive(Clone, Debug)]
pub struct Options {
    /// Name of the trace.
    pub trace: String,
    /// Hit ratio to reach. The default is 90 % of the hit ratio of an unlimited cache.
    pub target_hit: Option<f64>,
    /// Backing of the disk.
    pub backing: Backing,
    /// Flash device of the cache.
    pub flash: Flash,
    /// Write endurance of the flash.
    pub endurance: Endurance,
    /// Number of simulation threads.
    pub threads: usize,
    /// Maximum number of sectors that the sample touches. A trace with fewer sectors, or with few
    /// regions of 256 KiB, is used completely.
    pub touches_max: u64,
}

impl Default for Options {
    fn default() -> Options {
        Options {
            trace: "the trace".to_owned(),
            target_hit: None,
            backing: Backing::default(),
            flash: Flash::default(),
            endurance: Endurance::default(),
            threads: 2,
            touches_max: 1_500_000,
        }
    }
}

/// Answer to the question whether a cache is worthwhile.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Verdict {
    /// A cache is worthwhile.
    Cache,
    /// A cache is not worthwhile: the disk has too few reads or too few repeated reads.
    #[default]
    NoCache,
}

/// Advice for the disk of a trace.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Advice {
    /// Name of the trace.
    pub trace: String,
    /// Answer to the question whether a cache is worthwhile.
    pub verdict: Verdict,
    /// The advice in one or two sentences.
    pub summary: String,
    /// Command that the user should run; empty if no change is needed. The user adds the names of
    /// disk and pool.
    pub command: String,
    /// Reasons for the advice, one sentence each.
    pub why: Vec<String>,
    /// Limits and possible errors of the advice, one sentence each.
    pub caveats: Vec<String>,
    /// Recommended cache, simulated over the whole trace.
    pub recommendation: Option<Recommendation>,
    /// Target hit ratio.
    pub target: Target,
    /// Knee of the curve for the recommended block size: a larger cache adds few hits.
    pub knee: Option<SizePoint>,
    /// Results by block size, smallest block size first.
    pub block_sizes: Vec<BlockSize>,
    /// The recommended cache, and caches of other sizes with the best policy for each size;
    /// smallest first.
    pub sizes: Vec<Trial>,
    /// Results of all policies at the recommended size and block size, best first.
    pub policies: Vec<Trial>,
    /// Results for other admissions of the recommended cache.
    pub admissions: Vec<Trial>,
    /// The best alternative for each property of the recommended cache.
    pub runners_up: Vec<RunnerUp>,
    /// The second-best combination of policy, admission and block size, with write-through.
    pub second_choice: Option<RunnerUp>,
    /// The recommended write-through cache with the fill granularity of its preset. All other
    /// results are results of caches that fill only the sectors of a miss.
    pub preset_fill: Option<Trial>,
    /// A write-through cache of the recommended size and block size with the policy and admission
    /// of the presets. These settings let the daemon choose policy and admission while it serves
    /// the cache.
    pub preset_choice: Option<Trial>,
    /// Write-back compared with write-through; `None` if hardly anything is written.
    pub mode: Option<ModeChoice>,
    /// Writes to the backing that a write-back cache saves.
    pub write_back: Option<WriteBack>,
    /// Expected latencies.
    pub latency: Option<Latency>,
    /// Wear of the flash.
    pub wear: Option<Wear>,
    /// Sampling rate of the simulations for the tables. The numbers of the recommendation itself
    /// come from the whole trace.
    pub sample_rate: f64,
    /// Profile of the trace.
    pub profile: Profile,
}

/// Recommended configuration of the cache.
#[derive(Clone, Debug, Serialize)]
pub struct Recommendation {
    /// Recommended cache and its results for the whole trace.
    #[serde(flatten)]
    pub cache: Trial,
    /// The best cache with write-through. The alternatives in the report are compared with this
    /// cache.
    pub write_through: Trial,
    /// Preset from which the recommended configuration starts.
    pub preset: &'static str,
    /// Recommended write mode.
    pub mode: &'static str,
    /// Recommended size relative to the data that the trace touches.
    pub of_footprint: f64,
}

/// Hit ratio that the cache should reach.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Target {
    /// Target hit ratio: share of the reads.
    pub read_hit_ratio: f64,
    /// True if the user chose the target.
    pub is_given: bool,
    /// Hit ratio of an unlimited cache: only first reads miss.
    pub best_read_hit_ratio: f64,
}

impl Target {
    /// Returns the target that the user gave, or the default.
    fn new(best: f64, given: Option<f64>) -> Target {
        Target {
            // A target that no cache reaches is lowered, and the advice says so.
            read_hit_ratio: given.unwrap_or(best * TARGET_OF_BEST).min(best),
            is_given: given.is_some(),
            best_read_hit_ratio: best,
        }
    }
}

/// A cache size and its hit ratio.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct SizePoint {
    /// Size of the cache, bytes.
    pub cache_bytes: u64,
    /// Share of the reads that are hits.
    pub read_hit_ratio: f64,
}

/// Results of an LRU cache with one block size.
#[derive(Clone, Debug, Serialize)]
pub struct BlockSize {
    /// Block size, bytes.
    pub block_bytes: u64,
    /// Size of the smallest cache that reaches the target, bytes.
    pub target_bytes: Option<u64>,
    /// Knee of the curve of this block size.
    pub knee: Option<SizePoint>,
    /// Hit ratio of reads at the recommended cache size, or at `target_bytes` if no cache is
    /// recommended.
    pub read_hit_ratio: f64,
    /// Points of the curve: cache sizes with their read hit ratios.
    pub curve: Vec<SizePoint>,
}

/// Results of a write-back cache of the recommended size, with LRU.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct WriteBack {
    /// Share of the written bytes that never reach the backing, because they are overwritten before
    /// destaging.
    pub absorbed_ratio: f64,
    /// Share of the backing's writes that write-back saves. Destaging whole blocks can save more
    /// writes than bytes.
    pub writes_saved_ratio: f64,
}

/// Wear of the flash.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Wear {
    /// Bytes written to flash per day, at the trace's rate.
    pub flash_write_bytes_per_day: f64,
    /// Bytes written to flash per day, divided by the cache's size.
    pub cache_writes_per_day: f64,
    /// Endurance rating of the flash.
    pub endurance: String,
    /// Total number of bytes that the endurance rating allows.
    pub endurance_bytes: f64,
    /// Expected life of the flash in years, if only the cache writes to the device.
    pub life_years: f64,
    /// Size of a device with a rating in drive writes per day that lasts five years, bytes.
    pub device_bytes: Option<f64>,
}

impl Wear {
    /// Returns the wear of the flash of a cache to which this number of bytes is written per day.
    fn new(endurance: Endurance, cache_bytes: u64, per_day: f64) -> Wear {
        let endurance_bytes = endurance.bytes(cache_bytes);
        Wear {
            flash_write_bytes_per_day: per_day,
            cache_writes_per_day: per_day / cache_bytes.max(1) as f64,
            endurance: endurance.to_string(),
            endurance_bytes,
            life_years: endurance_bytes / per_day.max(1.0) / devices::DAYS_A_YEAR,
            device_bytes: endurance.device_bytes(per_day),
        }
    }
}

/// Progress callback. The arguments are the current stage in a few words and the completed share of
/// all work, 0 to 1. The callback returns false to cancel the work.
pub type Progress<'a> = dyn FnMut(&str, f64) -> bool + 'a;

/// Returns the advice for the disk of this trace.
///
/// # Errors
/// Returns an error if the trace has no read and no write, if it touches more than 4 TiB, or if
/// `progress` cancelled the work.
pub fn advise(material: Material, options: &Options, progress: &mut Progress<'_>) -> Result<Advice> {
    let held = material.finish()?;
    let sample = held.sample_of_many_regions(options.touches_max);
    let reporter = Reporter::new(progress);
    reporter.start("miss-ratio curves", (0.05, 0.3))?;
    let curves = curves::by_block_size(&sample, options.threads, &reporter)?;
    let unlimited = candidates::unlimited(&sample, options.threads, &reporter)?;
    // An unlimited cache has more hits than the curves if partial writes keep the rest of a block
    // valid.
    let best = curves.iter().map(BlockCurve::best).fold(unlimited, f64::max);
    let target = Target::new(best, options.target_hit);
    let (trace, profile) = (options.trace.clone(), held.profile.clone());
    let mut advice = Advice { trace, target, sample_rate: sample.rate, profile, ..Advice::default() };
    advice.caveats.extend(sample.caveat());
    let start = curves::start(&curves, target.read_hit_ratio).or_else(|| {
        // In the curves, a partial write makes its sectors invalid. So the curves may show no hits
        // although a real cache has some.
        let (cache_bytes, block_bytes) = (held.profile.footprint.bytes, 4096);
        (unlimited > 0.0).then_some(Start { block_bytes, cache_bytes, block_bytes_max: block_bytes })
    });
    let Some(start) = start else {
        advice.block_sizes = curves.iter().map(|curve| curve.report(target.read_hit_ratio, 0)).collect();
        return Ok(sentences::refusing(advice, &held));
    };
    if target.best_read_hit_ratio < HIT_RATIO_MIN {
        let report = |curve: &BlockCurve<'_>| curve.report(target.read_hit_ratio, start.cache_bytes);
        advice.block_sizes = curves.iter().map(report).collect();
        advice.write_back = curves::write_back(&sample, start.block_bytes, start.cache_bytes, &reporter)?;
        return Ok(sentences::refusing(advice, &held));
    }

    reporter.start("simulations", (0.3, 0.8))?;
    let trials = Trials::new(&sample, &held, options.threads, &reporter);
    let costs = Costs::new(&held, options.endurance);
    let first = candidates::choose(&trials, &start, target.read_hit_ratio)?;
    let block_bytes_max = start.block_bytes_max as u32;
    let limits = (target.read_hit_ratio, start.cache_bytes.max(first.cache_bytes), block_bytes_max);
    let uncached = latency::uncached(&held, options, &reporter)?;
    let settings = joint_choice::choose(&trials, first, &costs, limits)?;
    let finalists =
        finalists(&trials, &held, options, (settings.as_slice(), target.read_hit_ratio), uncached.as_ref())?;
    let best = joint_choice::best_finalist(&finalists, &costs);
    let around = joint_choice::around(&trials, finalists[best].0.setting, block_bytes_max)?;
    let cache = candidates::settled(&trials, around.cache.setting, target.read_hit_ratio)?;
    let setting = cache.setting;
    let curve = curves.iter().find(|curve| curve.block_bytes == u64::from(setting.block_bytes));
    advice.knee = curve.and_then(BlockCurve::knee);
    advice.sizes = candidates::sizes(&trials, &cache, advice.knee.map(|knee| knee.cache_bytes))?;
    let report = |curve: &BlockCurve<'_>| curve.report(target.read_hit_ratio, setting.cache_bytes);
    advice.block_sizes = curves.iter().map(report).collect();
    let block_bytes = u64::from(setting.block_bytes);
    advice.write_back = curves::write_back(&sample, block_bytes, setting.cache_bytes, &reporter)?;
    advice.runners_up = runners_up(&trials, &advice.sizes, &around, &cache)?;
    advice.second_choice = second_choice(&finalists, &setting, &costs);
    let for_write_back = match mode::has_writes(&held) {
        true => with_write_back(&trials, &cache, &finalists)?,
        false => vec![],
    };
    let fill = mode::preset().fill;
    advice.preset_fill = (fill != Fill::Sectors).then(|| trials.filling(setting, fill)).transpose()?;
    advice.preset_choice = Some(trials.exactly(mode::preset_choice(setting))?);
    reporter.start("latencies", (0.8, 1.0))?;
    advice.wear = wear(&held, options, setting.cache_bytes, cache.flash_write_bytes as f64);
    let timing = uncached.as_ref().map(|uncached| uncached.timing);
    let expected = uncached
        .map(|uncached| latency::expected(&held, options, &cache, &uncached, &reporter))
        .transpose()?;
    if let Some((latency, means)) = expected.flatten() {
        let through = (&cache, &means, latency.timing);
        advice.mode = mode::choose(&held, options, &costs, &for_write_back, through, &reporter)?;
        advice.latency = Some(latency);
    }
    let timing = timing.filter(|_| advice.latency.is_some());
    for other in &mut advice.runners_up {
        let measured = |timing| latency::measured(&held, options, &other.trial, false, timing, &reporter);
        other.mean_ns = timing.map(measured).transpose()?.map(|means| means.all_ns);
    }
    (advice.policies, advice.admissions) = (around.policies, around.admissions);
    let (mut preset, mut mode) = ("vfrc", "write-through");
    let (write_through, mut cache) = (cache.clone(), cache);
    if let Some(back) = advice.mode.as_ref().filter(|mode| mode.is_write_back) {
        (preset, mode) = ("auto", "write-back");
        cache = back.cache.clone();
        advice.latency.iter_mut().for_each(|latency| latency.all_with_ns = back.back_ns);
        advice.wear = back.wear.clone();
    }
    let of_footprint = cache.setting.cache_bytes as f64 / held.profile.footprint.bytes.max(1) as f64;
    advice.recommendation = Some(Recommendation { cache, write_through, preset, mode, of_footprint });
    advice.verdict = Verdict::Cache;
    reporter.start("done", (1.0, 1.0))?;
    Ok(sentences::recommending(advice, &held, options))
}

/// Simulates the finalists over the whole trace. The second value of each result is the mean latency
/// of all requests with write-through, nanoseconds; 0 if it cannot be estimated.
fn finalists(
    trials: &Trials<'_, '_>,
    held: &CollectedTrace,
    options: &Options,
    (settings, target): (&[Setting], f64),
    uncached: Option<&Uncached>,
) -> Result<Vec<(Trial, u64)>> {
    let mut finalists = Vec::with_capacity(settings.len());
    for setting in settings {
        let trial = candidates::settled(trials, *setting, target)?;
        let mean_ns = match uncached {
            Some(uncached) => {
                latency::measured(held, options, &trial, false, uncached.timing, trials.reporter)?.all_ns
            }
            None => 0,
        };
        finalists.push((trial, mean_ns));
    }
    Ok(finalists)
}

/// Among the finalists that differ from the chosen cache in more than their size, returns the one
/// that needs the least flash in five years, wear included.
fn second_choice(finalists: &[(Trial, u64)], chosen: &Setting, costs: &Costs) -> Option<RunnerUp> {
    let others =
        finalists.iter().filter(|(trial, _)| !joint_choice::is_same_combination(&trial.setting, chosen));
    let flash = |(trial, _): &&(Trial, u64)| costs.flash_bytes(trial);
    let (trial, mean_ns) = others.min_by(|a, b| flash(a).total_cmp(&flash(b)))?;
    Some(RunnerUp {
        property: "combination",
        value: sentences::described(&trial.setting),
        trial: trial.clone(),
        mean_ns: Some(*mean_ns).filter(|ns| *ns > 0),
    })
}

/// Returns the caches to try with write-back: the chosen cache, and the chosen cache and all
/// finalists with an admission that accepts all writes.
fn with_write_back(
    trials: &Trials<'_, '_>,
    chosen: &Trial,
    finalists: &[(Trial, u64)],
) -> Result<Vec<Trial>> {
    let mut caches = vec![chosen.clone()];
    for trial in std::iter::once(chosen).chain(finalists.iter().map(|(trial, _)| trial)) {
        let setting = Setting { admission: Admission::default(), ..trial.setting };
        if !caches.iter().any(|cache| cache.setting == setting) {
            caches.push(trials.exactly(setting)?);
        }
    }
    Ok(caches)
}

/// Returns the best alternative for each property of the recommended cache, without its latency.
fn runners_up(
    trials: &Trials<'_, '_>,
    sizes: &[Trial],
    around: &Around,
    cache: &Trial,
) -> Result<Vec<RunnerUp>> {
    let own = |trial: &&Trial| trial.setting.cache_bytes == cache.setting.cache_bytes;
    let position = sizes.iter().position(|trial| own(&trial)).unwrap_or(0);
    let smaller = position.checked_sub(1).and_then(|position| sizes.get(position));
    let text = |trial: &Trial, property| match property {
        "size" => sentences::bytes(trial.setting.cache_bytes),
        "block size" => sentences::bytes(trial.setting.block_bytes.into()),
        "policy" => trial.setting.policy.info().name.to_owned(),
        _ => trial.setting.admission.to_string(),
    };
    let found = [
        ("size", smaller.or(sizes.get(position + 1))),
        ("block size", joint_choice::runner_up(&around.cache, &around.blocks)),
        ("policy", joint_choice::runner_up(&around.cache, &around.policies)),
        ("admission", joint_choice::runner_up(&around.cache, &around.admissions)),
    ];
    let mut runners_up = Vec::new();
    for (property, trial) in found {
        let Some(trial) = trial else { continue };
        let cache_bytes =
            if property == "size" { trial.setting.cache_bytes } else { cache.setting.cache_bytes };
        let trial = trials.exactly(Setting { cache_bytes, ..trial.setting })?;
        runners_up.push(RunnerUp { property, value: text(&trial, property), trial, mean_ns: None });
    }
    Ok(runners_up)
}

/// Returns the wear of the flash of a cache to which this number of bytes is written during the
/// trace; `None` if the trace has no times.
fn wear(held: &CollectedTrace, options: &Options, cache_bytes: u64, flash_write_bytes: f64) -> Option<Wear> {
    let days = latency::seconds(held)? / 86_400.0;
    Some(Wear::new(options.endurance, cache_bytes, flash_write_bytes / days))
}
