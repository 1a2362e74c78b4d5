//! `hob lab mrc TRACE`: miss-ratio curves, which give the miss ratio of an LRU cache of every size,
//! from one pass per block size.
//!
//! Sizes in the table are fractions of the *footprint*: the bytes of all blocks that were cached at
//! least once.

mod render;

use std::path::PathBuf;

use anyhow::{Context, bail, ensure};
use clap::{Args, ValueEnum};
use hob_control::Size;
use hob_engine::policy::PolicyKind;
use hob_engine::sizing::{Curve, SAMPLES_MAX, Shards};
use hob_lab::mrc::{self, At, Curves, Mode};
use serde::Serialize;

use super::feed::{Fed, Feed};
use super::share::{Comparison, Division, compare};
use super::sim::CacheSize;
use super::{Source, interruption, write_if};
use crate::Global;
use crate::output::{print, with_notes};

/// Number of requests above which a trace is sampled unless `--exact` is given.
const EXACT_REQUESTS_MAX: u64 = 8_000_000;
/// Maximum number of samples at a fixed rate. This number of samples needs 0.9 GB of memory.
const FIXED_RATE_SAMPLES_MAX: f64 = (1u64 << 24) as f64;
/// Minimum number of samples for a smooth curve.
const SAMPLES_FEW: u32 = 1024;
/// Cache sizes of the table, as fractions of the footprint.
const SHARES: [f64; 7] = [0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0];
/// Number of curve points in the CSV and in the picture for each doubling of the size.
const POINTS_A_DOUBLING: f64 = 16.0;

/// Compute miss-ratio curves: the hits of an LRU cache of every size
///
/// Exact curves count whole requests and their sectors. Curves of sampled blocks (SHARDS) count single blocks, have only
/// hits of reads, and need a megabyte of memory. With --share: prints the read hits of LRU caches that divide one pool,
/// for pools of up to the number of bytes that all disks access.
#[derive(Debug, Args)]
pub(crate) struct Mrc {
    #[command(flatten)]
    source: Source,
    /// Sizes of a cache block
    #[arg(long, value_name = "SIZE", value_delimiter = ',', default_value = "4K")]
    block_size: Vec<Size>,
    /// Write mode of the cache
    #[arg(long, value_enum, default_value_t, conflicts_with = "share")]
    mode: Writes,
    /// Track every block, also in traces of more than 8 million requests, where the default is
    /// --samples 16384
    #[arg(long, conflicts_with_all = ["sample", "samples", "share"])]
    exact: bool,
    /// Track only this share of the blocks, like 0.01
    #[arg(long, value_name = "RATE", conflicts_with_all = ["samples", "share"], value_parser = rate)]
    sample: Option<f64>,
    /// Track at most this number of blocks
    #[arg(
        long,
        value_name = "N",
        value_parser = clap::value_parser!(u32).range(1..=i64::from(SAMPLES_MAX)),
        conflicts_with = "share"
    )]
    samples: Option<u32>,
    /// Hit ratio of reads; the command shows the smallest cache that reaches this ratio
    #[arg(long, value_name = "PERCENT", default_value = "90%", value_parser = target, conflicts_with = "share")]
    target_hit: f64,
    #[command(flatten)]
    division: Division,
    /// Write the curves to this file, comma-separated
    #[arg(long, value_name = "FILE")]
    csv: Option<PathBuf>,
    /// Draw the curves into this file, as SVG
    #[arg(long, value_name = "FILE", conflicts_with = "share")]
    picture: Option<PathBuf>,
}

/// Write mode of the cache.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum, Serialize)]
enum Writes {
    /// A write goes to the backing and into the cache.
    #[default]
    #[value(name = "write-through")]
    #[serde(rename = "write-through")]
    Through,
    /// A write goes into the cache, and to the backing when its block is evicted.
    #[value(name = "write-back")]
    #[serde(rename = "write-back")]
    Back,
    /// A write goes to the backing, and the cached data of its range is invalidated.
    #[value(name = "write-around")]
    #[serde(rename = "write-around")]
    Around,
}

impl From<Writes> for Mode {
    fn from(mode: Writes) -> Mode {
        match mode {
            Writes::Through => Mode::WriteThrough,
            Writes::Back => Mode::WriteBack,
            Writes::Around => Mode::WriteAround,
        }
    }
}

fn rate(text: &str) -> Result<f64, String> {
    match text.parse() {
        Ok(rate) if rate > 0.0 && rate <= 1.0 => Ok(rate),
        _ => Err("a rate is above 0 and at most 1, like 0.01".to_owned()),
    }
}

fn target(text: &str) -> Result<f64, String> {
    match text.strip_suffix('%').map(|percent| percent.trim().parse::<f64>()) {
        Some(Ok(percent)) if percent > 0.0 && percent <= 100.0 => Ok(percent / 100.0),
        _ => Err("a hit ratio is above 0% and at most 100%, like 90%".to_owned()),
    }
}

/// The JSON output.
#[derive(Debug, Serialize)]
struct Report {
    trace: String,
    requests: u64,
    mode: Writes,
    /// Target of the recommendation: fraction of reads, 0 to 1.
    target_hit_ratio: f64,
    curves: Vec<CurveReport>,
    /// Time for reading and counting, in seconds.
    seconds: f64,
    /// Remarks about the trace and the accuracy of the curves.
    notes: Vec<String>,
}

/// The curve of one block size.
#[derive(Debug, Serialize)]
struct CurveReport {
    block_bytes: u64,
    /// Bytes of all blocks that were cached; an estimate if blocks were sampled.
    footprint_bytes: u64,
    /// The sampled blocks; `None` for an exact curve.
    sampled: Option<Sampled>,
    /// Cache size above which more space brings few more hits; `None` if no cache has a hit.
    knee: Option<SizeReport>,
    /// The smallest cache that reaches the target; `None` if no cache does.
    target: Option<SizeReport>,
    /// The hit ratio of the largest useful cache.
    read_hit_ratio_max: f64,
    /// Results for some fractions of the footprint.
    rows: Vec<Row>,
    /// Results for sizes from one block up to the last size at which the hit ratio changes.
    #[serde(skip)]
    points: Vec<Row>,
}

#[derive(Clone, Copy, Debug, Serialize)]
struct Sampled {
    blocks: u32,
    /// Fraction of all blocks that were sampled at the end.
    rate: f64,
}

#[derive(Clone, Copy, Debug, Serialize)]
struct SizeReport {
    cache_bytes: u64,
    read_hit_ratio: f64,
}

/// Results for one cache size.
#[derive(Clone, Copy, Debug, Serialize)]
struct Row {
    cache_bytes: u64,
    /// Size as a fraction of the footprint.
    cache_share: f64,
    /// Fraction of read requests served whole from flash; with sampling, fraction of the blocks of
    /// reads.
    read_hit_ratio: f64,
    /// Results that only exact curves have.
    #[serde(flatten)]
    exact: Option<Exact>,
}

#[derive(Clone, Copy, Debug, Serialize)]
struct Exact {
    /// Fraction of read bytes served from flash.
    byte_hit_ratio: f64,
    /// Fraction of write requests whose blocks were all in the cache.
    write_hit_ratio: f64,
    /// Written bytes that never reach the backing.
    absorbed_bytes: u64,
    flash_write_bytes: u64,
    backing_ios: u64,
}

/// Compares divisions of a pool of LRU caches between the disks of the trace.
fn divide(args: &Mrc, global: &Global) -> anyhow::Result<()> {
    let [block_size] = args.block_size.as_slice() else { bail!("with --share, pass only one block size") };
    let sizes = SHARES.map(CacheSize::Share);
    let comparison = Comparison {
        policy: PolicyKind::from_name("lru").context("there is LRU")?,
        csv: args.csv.as_deref(),
        ..args.division.comparison(&args.source, &sizes, block_size.bytes())
    };
    compare(&comparison, global)
}

pub(super) fn run(args: &Mrc, global: &Global) -> anyhow::Result<()> {
    if args.division.is_wanted() {
        return divide(args, global);
    }
    ensure!(
        args.source.trace.as_os_str() != "-" || args.block_size.len() == 1,
        "standard input cannot be read twice: give one block size"
    );
    let stop = interruption()?;
    let began = std::time::Instant::now();
    let (mut curves, mut requests, mut notes) = (Vec::new(), None, Vec::new());
    for Size(block_bytes) in &args.block_size {
        let pass = Pass { args, block_bytes: *block_bytes, length: requests, stop: &stop };
        let (curve, fed) = pass.run(&mut notes)?;
        curves.push(curve);
        if requests.replace(fed.count).is_none() {
            notes.extend(fed.remarks);
        }
    }
    notes.dedup();
    let report = Report {
        trace: args.source.trace.display().to_string(),
        requests: requests.unwrap_or(0),
        mode: args.mode,
        target_hit_ratio: args.target_hit,
        curves,
        seconds: began.elapsed().as_secs_f64(),
        notes,
    };
    write_if(args.csv.as_ref(), || render::csv(&report))?;
    write_if(args.picture.as_ref(), || render::draw(&report))?;
    print(global.output, &report, |report| with_notes(render::show(report), &report.notes))
}

/// One pass through the trace, for one block size.
struct Pass<'a> {
    args: &'a Mrc,
    block_bytes: u64,
    /// Number of requests in the trace, if already counted.
    length: Option<u64>,
    stop: &'a std::sync::atomic::AtomicBool,
}

impl Pass<'_> {
    fn run(&self, notes: &mut Vec<String>) -> anyhow::Result<(CurveReport, Fed)> {
        let Mrc { exact, sample, samples, .. } = *self.args;
        let shards = match (sample, samples) {
            (Some(rate), _) => Shards::fixed_rate(rate, (FIXED_RATE_SAMPLES_MAX / rate) as u64),
            (None, Some(samples)) => Shards::fixed_size(samples),
            (None, None) => {
                // Standard input cannot be read twice.
                let limited = !exact && self.args.source.trace.as_os_str() != "-";
                let limit = if limited { EXACT_REQUESTS_MAX } else { u64::MAX };
                if self.length.is_none_or(|length| length <= limit) {
                    let (curves, fed) = self.exact(limit)?;
                    if !fed.is_cut {
                        return Ok((self.report_exact(&curves), fed));
                    }
                }
                notes.push(format!(
                    "more than {EXACT_REQUESTS_MAX} requests: the curve is from a sample of the \
                    blocks; --exact uses all blocks"
                ));
                Shards::fixed_size(SAMPLES_MAX)
            }
        };
        let mut feed = self.feed(u64::MAX)?;
        let shards = mrc::shards(&mut feed, self.block_bytes, self.args.mode.into(), shards)?;
        let fed = feed.finish()?;
        notes.extend(few_samples(&shards, self.block_bytes));
        Ok((self.report_sampled(&shards), fed))
    }

    fn exact(&self, limit: u64) -> anyhow::Result<(Curves, Fed)> {
        let mut feed = self.feed(limit)?;
        let curves = mrc::exact(&mut feed, self.block_bytes, self.args.mode.into())?;
        Ok((curves, feed.finish()?))
    }

    fn feed(&self, limit: u64) -> anyhow::Result<Feed<'_>> {
        let message = format!("blocks of {}", Size(self.block_bytes));
        Feed::open(&self.args.source, limit, self.length, message, self.stop)
    }

    fn report_exact(&self, curves: &Curves) -> CurveReport {
        let footprint = curves.totals().blocks;
        let row = |blocks| {
            let at = curves.at(blocks);
            let read_hit_ratio = ratio(at.read_hits, curves.totals().reads);
            self.row(footprint, blocks, read_hit_ratio, Some(Exact::new(&at, curves)))
        };
        self.report(&curves.read_misses(), footprint, curves.blocks_max(), None, row)
    }

    fn report_sampled(&self, shards: &Shards) -> CurveReport {
        let footprint = (f64::from(shards.samples()) / shards.rate()).round() as u64;
        let curve = shards.curve();
        let row = |blocks| self.row(footprint, blocks, 1.0 - curve.miss_ratio_at(blocks), None);
        let last = curve.points().last().map_or(1, |point| point.blocks);
        let sampled = Sampled { blocks: shards.samples(), rate: shards.rate() };
        self.report(&curve, footprint, last, Some(sampled), row)
    }

    fn report(
        &self,
        reads: &Curve,
        footprint: u64,
        blocks_max: u64,
        sampled: Option<Sampled>,
        row: impl Fn(u64) -> Row,
    ) -> CurveReport {
        let size = |blocks| SizeReport {
            cache_bytes: blocks * self.block_bytes,
            read_hit_ratio: 1.0 - reads.miss_ratio_at(blocks),
        };
        let mut shares: Vec<u64> =
            SHARES.iter().map(|share| ((footprint as f64 * share).round() as u64).max(1)).collect();
        shares.dedup();
        CurveReport {
            block_bytes: self.block_bytes,
            footprint_bytes: footprint * self.block_bytes,
            sampled,
            knee: reads.knee().map(|knee| size(knee.blocks)),
            target: reads.size_for(self.args.target_hit).map(size),
            read_hit_ratio_max: 1.0 - reads.miss_ratio_at(u64::MAX),
            rows: shares.into_iter().map(&row).collect(),
            points: sizes(blocks_max.max(footprint)).map(&row).collect(),
        }
    }

    fn row(&self, footprint: u64, blocks: u64, read_hit_ratio: f64, exact: Option<Exact>) -> Row {
        let cache_share = ratio(blocks, footprint);
        Row { cache_bytes: blocks * self.block_bytes, cache_share, read_hit_ratio, exact }
    }
}

impl Exact {
    fn new(at: &At, curves: &Curves) -> Exact {
        let totals = curves.totals();
        Exact {
            byte_hit_ratio: ratio(at.read_hit_bytes, totals.read_bytes),
            write_hit_ratio: ratio(at.write_hits, totals.writes),
            absorbed_bytes: at.absorbed_bytes,
            flash_write_bytes: at.flash_write_bytes,
            backing_ios: at.backing_reads + at.backing_writes,
        }
    }
}

/// Returns a remark if the curve is inaccurate because few blocks were sampled.
fn few_samples(shards: &Shards, block_bytes: u64) -> Option<String> {
    (shards.samples() < SAMPLES_FEW && shards.rate() < 1.0).then(|| {
        format!(
            "only {} blocks of {} were sampled: the curve is inaccurate",
            shards.samples(),
            Size(block_bytes)
        )
    })
}

fn ratio(part: u64, whole: u64) -> f64 {
    if whole == 0 { 0.0 } else { part as f64 / whole as f64 }
}

/// Returns sizes from 1 to `last`, evenly spaced on a logarithmic scale and including both ends.
fn sizes(last: u64) -> impl Iterator<Item = u64> {
    let (mut step, mut before, mut done) = (0.0, 0, false);
    std::iter::from_fn(move || {
        while !done {
            let size = (2f64.powf(step / POINTS_A_DOUBLING).round() as u64).min(last);
            step += 1.0;
            done = size == last;
            if size > before {
                before = size;
                return Some(size);
            }
        }
        None
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_are_read_strictly() {
        assert_eq!((rate("0.01"), rate("1")), (Ok(0.01), Ok(1.0)));
        assert_eq!((target("90%"), target("99.5 %")), (Ok(0.9), Ok(0.995)));
        for bad in ["", "0", "-0.1", "1.5", "nan", "1%"] {
            assert!(rate(bad).is_err(), "{bad}");
        }
        for bad in ["", "%", "0%", "101%", "nan%", "0.9"] {
            assert!(target(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn a_curve_of_few_samples_is_reported() {
        let remark = |mut shards: Shards, blocks: u64| {
            (0..blocks).for_each(|block| shards.access(block, 1));
            few_samples(&shards, 4096)
        };
        let few = remark(Shards::fixed_rate(0.01, 1 << 20), 1000).unwrap();
        assert!(few.contains("blocks of 4K were sampled"), "{few}");
        assert_eq!(remark(Shards::fixed_rate(0.5, 1 << 20), 10_000), None);
        assert_eq!(remark(Shards::fixed_size(SAMPLES_MAX), 10), None, "all blocks were sampled");
    }

    #[test]
    fn sizes_rise_from_one_to_the_last() {
        assert_eq!(sizes(1).collect::<Vec<_>>(), [1]);
        assert_eq!(sizes(5).collect::<Vec<_>>(), [1, 2, 3, 4, 5]);
        let many: Vec<u64> = sizes(1 << 40).collect();
        assert_eq!((many[0], many[many.len() - 1]), (1, 1 << 40));
        assert!(many.len() < 640 && many.windows(2).all(|pair| pair[0] < pair[1]));
    }
}
