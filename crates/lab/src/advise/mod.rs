//! Advice: which cache a disk should get, worked out from a trace of it.
//!
//! Stages, each from what the one before found:
//!
//! 1. the profile of the trace, and a sample of it where it is large (see `material.rs`);
//! 2. LRU miss-ratio curves for each block size: what is attainable, the knee, the size for the target;
//! 3. simulations around that size, of every policy that the daemon has, of block sizes, of admissions;
//! 4. the chosen cache simulated exactly, over the whole trace: the figures of the recommendation;
//! 5. a part of the trace in virtual time, on models of backing and flash: latencies; and what flash has to endure.
//!
//! A disk that a cache does not help is told so. The same trace and options give the same advice. Sizes are bytes,
//! times nanoseconds, ratios 0 to 1. Discards and flushes are followed, but nothing is advised because of them.

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

/// Of the reads that could be hits, the share that is aimed at unless the user says otherwise.
const TARGET_OF_BEST: f64 = 0.9;
/// Below this, hits are too few to be worth a cache.
const HIT_RATIO_MIN: f64 = 0.05;
/// Hit ratios nearer than this are the same for people.
const POINT: f64 = 0.01;

/// What is wanted, and what there is.
#[derive(Clone, Debug)]
pub struct Options {
    /// What the trace is called.
    pub trace: String,
    /// Read hit ratio to reach; otherwise 90 % of the best that a cache of any size reaches.
    pub target_hit: Option<f64>,
    /// What the disk lies on.
    pub backing: Backing,
    /// What the cache will lie on.
    pub flash: Flash,
    /// What the flash is rated for.
    pub endurance: Endurance,
    /// Admissions that can be set in a daemon; others are tried too, but not recommended. Never empty.
    pub admissions: Vec<Admission>,
    /// Threads that simulate.
    pub threads: usize,
    /// Sectors touched by the sample; a trace that touches fewer is used whole.
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

/// Is a cache worth it?
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Verdict {
    /// Yes.
    Cache,
    /// No: too few reads, or too few of them come again.
    NoCache,
}

/// The advice.
#[derive(Clone, Debug, Serialize)]
pub struct Advice {
    /// What the trace is called.
    pub trace: String,
    /// Is a cache worth it?
    pub verdict: Verdict,
    /// The advice in a sentence or two.
    pub summary: String,
    /// What to type; empty when there is nothing to do. Disk and pool are the user's to fill in.
    pub command: String,
    /// Why this one, a sentence each.
    pub why: Vec<String>,
    /// What the advice does not cover or may be wrong about, a sentence each.
    pub caveats: Vec<String>,
    /// The recommended cache, simulated over the whole trace.
    pub recommendation: Option<Recommendation>,
    /// What was aimed at.
    pub target: Target,
    /// The knee of the curve for the advised block size: beyond it, more cache buys little.
    pub knee: Option<SizePoint>,
    /// What block sizes do, smallest first.
    pub block_sizes: Vec<BlockSize>,
    /// Other sizes of the recommended cache.
    pub sizes: Vec<Trial>,
    /// Policies at the recommended size and block size, best first.
    pub policies: Vec<Trial>,
    /// Admissions of the recommended cache.
    pub admissions: Vec<Trial>,
    /// What writing back would save.
    pub write_back: Option<WriteBack>,
    /// Expected latencies.
    pub latency: Option<Latency>,
    /// What the flash has to endure.
    pub wear: Option<Wear>,
    /// How much of the trace the tables are worked out from; the recommendation's own figures are from all of it.
    pub sample_rate: f64,
    /// The trace.
    pub profile: Profile,
}

/// What to do.
#[derive(Clone, Debug, Serialize)]
pub struct Recommendation {
    /// The cache and what it did with the whole trace.
    #[serde(flatten)]
    pub cache: Trial,
    /// The preset to start from.
    pub preset: &'static str,
    /// What happens to writes.
    pub mode: &'static str,
    /// Share of what the trace touches.
    pub of_footprint: f64,
}

/// A hit ratio to reach.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Target {
    /// Share of the reads.
    pub read_hit_ratio: f64,
    /// Whether the user named it.
    pub is_given: bool,
    /// What a cache without bounds reaches: all reads but first ones.
    pub best_read_hit_ratio: f64,
}

/// A size and what it reaches.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct SizePoint {
    /// The cache.
    pub cache_bytes: u64,
    /// Share of the reads.
    pub read_hit_ratio: f64,
}

/// What LRU does with blocks of one size.
#[derive(Clone, Debug, Serialize)]
pub struct BlockSize {
    /// The block.
    pub block_bytes: u64,
    /// The smallest cache that reaches the target.
    pub target_bytes: Option<u64>,
    /// The knee of its curve.
    pub knee: Option<SizePoint>,
    /// Hits of reads at the recommended cache size (at the target's size where none is recommended).
    pub read_hit_ratio: f64,
    /// The curve: sizes, and hits of reads.
    pub curve: Vec<SizePoint>,
}

/// What a cache of the recommended size that writes back would do, by LRU.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct WriteBack {
    /// Share of the written bytes that are overwritten in time and never reach the backing.
    pub absorbed_ratio: f64,
    /// Share of the backing's writes that it saves; writing back in whole blocks can save more than bytes.
    pub writes_saved_ratio: f64,
}

/// What the flash has to endure.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Wear {
    /// Bytes written to flash each day, at the trace's pace.
    pub flash_write_bytes_per_day: f64,
    /// Times the cache's own size each day.
    pub cache_writes_per_day: f64,
    /// The rating.
    pub endurance: String,
    /// Bytes it allows in all.
    pub endurance_bytes: f64,
    /// Years until then, if the device writes no more than it is told to.
    pub life_years: f64,
    /// How large a device with a rating in drive writes a day must be to last five years.
    pub device_bytes: Option<f64>,
}

/// Told how far the work is: the stage in a word or two, and the share of all work, 0 to 1. Ends it by returning false.
pub type Progress<'a> = dyn FnMut(&str, f64) -> bool + 'a;

/// What to do with the disk whose trace this is.
///
/// # Errors
/// No read and no write; a trace spread over more than 4 TiB; `progress` ended it.
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
        // What no cache reaches cannot be aimed at; the words say so.
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
