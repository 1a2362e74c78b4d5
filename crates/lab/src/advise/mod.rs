//! Advice: which cache a disk should get, computed from a trace of it.
//!
//! Stages, each using the results of the one before:
//!
//! 1. the profile of the trace, and a sample of it if it is large (see `material.rs`);
//! 2. LRU miss-ratio curves for each block size: attainable hits, the knee, the size for the target;
//! 3. simulations around that size, of every policy of the daemon, of block sizes, of admissions;
//! 4. an exact simulation of the chosen cache over the whole trace: the figures of the recommendation;
//! 5. a part of the trace in virtual time, with models of backing and flash: latencies, and the wear of the
//!    flash.
//!
//! If a cache does not help, the advice says so. The same trace and options give the same advice. Sizes are
//! bytes, times nanoseconds, ratios 0 to 1. Discards and flushes are simulated, but do not affect the
//! advice.

mod curves;
mod devices;
mod latency;
mod live;
mod material;
mod page;
#[cfg(test)]
mod tests;
mod text;
mod trials;
mod words;

use anyhow::{Result, bail};
use hob_engine::admission::Admission;
use serde::Serialize;

use crate::trace::profile::Profile;
use curves::BlockCurve;
use material::Held;
use trials::Trials;

pub use devices::{Backing, Endurance, Flash};
pub(crate) use latency::seconds;
pub use latency::{Latency, Timing};
pub use live::{
    Confidence, Live, LiveAdvice, LiveCache, LiveCurve, LiveOptions, LiveRecent, LiveRecommendation, live,
    live_text,
};
pub use material::Material;
pub use page::page;
pub use text::text;
pub use trials::{Setting, Trial};

/// Default target: this share of the attainable hit ratio.
const TARGET_OF_BEST: f64 = 0.9;
/// Below this hit ratio a cache is not worthwhile.
const HIT_RATIO_MIN: f64 = 0.05;
/// Hit ratios that differ by less than this count as equal.
const POINT: f64 = 0.01;

/// The user's goals and devices.
#[derive(Clone, Debug)]
pub struct Options {
    /// Name of the trace.
    pub trace: String,
    /// Hit ratio to reach; default: 90 % of the best that a cache of any size reaches.
    pub target_hit: Option<f64>,
    /// Storage of the disk.
    pub backing: Backing,
    /// Storage of the cache.
    pub flash: Flash,
    /// Endurance of the flash.
    pub endurance: Endurance,
    /// Admissions that a daemon supports; others are tried too, but not recommended. Never empty.
    pub admissions: Vec<Admission>,
    /// Number of simulation threads.
    pub threads: usize,
    /// Maximum number of sectors that the sample touches; a trace with fewer is used whole.
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
            admissions: vec![Admission::default()],
            threads: 2,
            touches_max: 2_500_000,
        }
    }
}

/// Whether a cache is worthwhile.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Verdict {
    /// Yes.
    Cache,
    /// No: too few reads, or too few repeated ones.
    NoCache,
}

/// The advice.
#[derive(Clone, Debug, Serialize)]
pub struct Advice {
    /// Name of the trace.
    pub trace: String,
    /// Whether a cache is worthwhile.
    pub verdict: Verdict,
    /// The advice in a sentence or two.
    pub summary: String,
    /// The command to type; empty if there is nothing to do. The user fills in disk and pool.
    pub command: String,
    /// Reasons, a sentence each.
    pub why: Vec<String>,
    /// Limits and possible errors of the advice, a sentence each.
    pub caveats: Vec<String>,
    /// The recommended cache, simulated over the whole trace.
    pub recommendation: Option<Recommendation>,
    /// The target.
    pub target: Target,
    /// The knee of the curve for the advised block size: beyond it, more cache adds few hits.
    pub knee: Option<SizePoint>,
    /// Results for block sizes, smallest first.
    pub block_sizes: Vec<BlockSize>,
    /// Other sizes of the recommended cache.
    pub sizes: Vec<Trial>,
    /// Policies at the recommended size and block size, best first.
    pub policies: Vec<Trial>,
    /// Admissions of the recommended cache.
    pub admissions: Vec<Trial>,
    /// Savings of write-back.
    pub write_back: Option<WriteBack>,
    /// Expected latencies.
    pub latency: Option<Latency>,
    /// Wear of the flash.
    pub wear: Option<Wear>,
    /// Sampling rate of the tables; the recommendation's own figures are from the whole trace.
    pub sample_rate: f64,
    /// Profile of the trace.
    pub profile: Profile,
}

/// The recommended configuration.
#[derive(Clone, Debug, Serialize)]
pub struct Recommendation {
    /// The cache and its results for the whole trace.
    #[serde(flatten)]
    pub cache: Trial,
    /// The preset to start from.
    pub preset: &'static str,
    /// Write mode.
    pub mode: &'static str,
    /// Size relative to the data that the trace touches.
    pub of_footprint: f64,
}

/// A hit ratio to reach.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Target {
    /// Share of the reads.
    pub read_hit_ratio: f64,
    /// True if the user chose it.
    pub is_given: bool,
    /// Hit ratio of an unbounded cache: all reads but first ones.
    pub best_read_hit_ratio: f64,
}

/// A size and its hit ratio.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct SizePoint {
    /// Size of the cache.
    pub cache_bytes: u64,
    /// Share of the reads.
    pub read_hit_ratio: f64,
}

/// Results of LRU with one block size.
#[derive(Clone, Debug, Serialize)]
pub struct BlockSize {
    /// Block size.
    pub block_bytes: u64,
    /// The smallest cache that reaches the target.
    pub target_bytes: Option<u64>,
    /// The knee of its curve.
    pub knee: Option<SizePoint>,
    /// Hit ratio of reads at the recommended cache size (at the target's size without a recommendation).
    pub read_hit_ratio: f64,
    /// The curve: sizes, and hit ratios of reads.
    pub curve: Vec<SizePoint>,
}

/// Results of a write-back cache of the recommended size, with LRU.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct WriteBack {
    /// Share of the written bytes that are overwritten before destaging and never reach the backing.
    pub absorbed_ratio: f64,
    /// Share of the backing's writes that it saves; destaging whole blocks can save more writes than bytes.
    pub writes_saved_ratio: f64,
}

/// Wear of the flash.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Wear {
    /// Bytes written to flash each day, at the trace's rate.
    pub flash_write_bytes_per_day: f64,
    /// The same as a multiple of the cache's size.
    pub cache_writes_per_day: f64,
    /// The rating.
    pub endurance: String,
    /// Total of bytes that it allows.
    pub endurance_bytes: f64,
    /// Expected life in years, if the device writes no more than the cache does.
    pub life_years: f64,
    /// Size of a device with a rating in drive writes per day that lasts five years.
    pub device_bytes: Option<f64>,
}

/// Progress callback: the stage in a word or two, and the share of all work, 0 to 1. Returning false
/// cancels the work.
pub type Progress<'a> = dyn FnMut(&str, f64) -> bool + 'a;

/// Returns the advice for the disk of this trace.
///
/// # Errors
/// No read and no write; a trace spread over more than 4 TiB; cancelled by `progress`.
pub fn advise(material: Material, options: &Options, progress: &mut Progress<'_>) -> Result<Advice> {
    let held = material.finish()?;
    let sample = held.sample(options.touches_max);
    step(progress, "miss-ratio curves", 0.05)?;
    let curves = curves::by_block_size(&sample, options.threads)?;
    let target = target(&curves, options.target_hit);
    let mut advice = blank(&held, options, target, sample.rate);
    let Some(start) = curves::start(&curves, target.read_hit_ratio) else {
        advice.block_sizes = curves.iter().map(|curve| curve.report(target.read_hit_ratio, 0)).collect();
        return Ok(words::refusing(advice, &held));
    };
    if target.best_read_hit_ratio < HIT_RATIO_MIN {
        let report = |curve: &BlockCurve<'_>| curve.report(target.read_hit_ratio, start.cache_bytes);
        advice.block_sizes = curves.iter().map(report).collect();
        advice.write_back = curves::write_back(&sample, start.block_bytes, start.cache_bytes)?;
        return Ok(words::refusing(advice, &held));
    }

    let trials = Trials::new(&sample, &held, options.threads, progress);
    let chosen = trials::choose(&trials, &start, target.read_hit_ratio, &options.admissions)?;
    let cache = trials::settled(&trials, chosen.setting, target.read_hit_ratio)?;
    let setting = cache.setting;
    let curve = curves.iter().find(|curve| curve.block_bytes == u64::from(setting.block_bytes));
    advice.knee = curve.and_then(BlockCurve::knee);
    advice.sizes = trials::sizes(&trials, setting, advice.knee.map(|knee| knee.cache_bytes))?;
    (advice.policies, advice.admissions) = (chosen.policies, chosen.admissions);
    let report = |curve: &BlockCurve<'_>| curve.report(target.read_hit_ratio, setting.cache_bytes);
    advice.block_sizes = curves.iter().map(report).collect();
    advice.write_back = curves::write_back(&sample, u64::from(setting.block_bytes), setting.cache_bytes)?;
    step(progress, "latencies", trials::SHARES.1)?;
    advice.latency = latency::expected(&held, options, &cache)?;
    advice.wear = wear(&held, options, &cache);
    let of_footprint = setting.cache_bytes as f64 / held.profile.footprint.bytes.max(1) as f64;
    advice.recommendation =
        Some(Recommendation { cache, preset: "vfrc", mode: "write-through", of_footprint });
    advice.verdict = Verdict::Cache;
    step(progress, "done", 1.0)?;
    Ok(words::recommending(advice, &held, options))
}

fn step(progress: &mut Progress<'_>, stage: &str, share: f64) -> Result<()> {
    if !progress(stage, share) {
        bail!("interrupted");
    }
    Ok(())
}

fn target(curves: &[BlockCurve<'_>], given: Option<f64>) -> Target {
    let best = curves.iter().map(BlockCurve::best).fold(0.0, f64::max);
    Target {
        // A target that no cache reaches is lowered; the sentences say so.
        read_hit_ratio: given.unwrap_or(best * TARGET_OF_BEST).min(best),
        is_given: given.is_some(),
        best_read_hit_ratio: best,
    }
}

fn blank(held: &Held, options: &Options, target: Target, sample_rate: f64) -> Advice {
    Advice {
        trace: options.trace.clone(),
        verdict: Verdict::NoCache,
        summary: String::new(),
        command: String::new(),
        why: Vec::new(),
        caveats: Vec::new(),
        recommendation: None,
        target,
        knee: None,
        block_sizes: Vec::new(),
        sizes: Vec::new(),
        policies: Vec::new(),
        admissions: Vec::new(),
        write_back: None,
        latency: None,
        wear: None,
        sample_rate,
        profile: held.profile.clone(),
    }
}

fn wear(held: &Held, options: &Options, cache: &Trial) -> Option<Wear> {
    let days = latency::seconds(held)? / 86_400.0;
    let per_day = cache.flash_write_bytes as f64 / days;
    let endurance_bytes = options.endurance.bytes(cache.setting.cache_bytes);
    Some(Wear {
        flash_write_bytes_per_day: per_day,
        cache_writes_per_day: per_day / cache.setting.cache_bytes as f64,
        endurance: options.endurance.to_string(),
        endurance_bytes,
        life_years: endurance_bytes / per_day.max(1.0) / devices::DAYS_A_YEAR,
        device_bytes: options.endurance.device_bytes(per_day),
    })
}
