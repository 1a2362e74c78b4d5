//! `hob lab sim TRACE`: simulates every combination of policy, admission, block size and cache
//! size.

mod report;

use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::atomic::Ordering;

use anyhow::{Context, bail, ensure};
use clap::Args;
use hob_control::{FlashWritesChange, Size};
use hob_engine::admission::Admission;
use hob_engine::command::{Layout, Mode};
use hob_engine::granularity::Fill;
use hob_engine::policy::{POLICIES, PolicyKind};
use hob_engine::preset::{Preset, preset};
use hob_lab::belady::NextUses;
use hob_lab::sim::{Point, grid};
use hob_trace::blocks::Blocks;
use hob_trace::profile::Profiler;
use hob_trace::{Op, Record};

use super::feed::bar;
use super::share::{Comparison, Division, compare};
use super::{Source, interruption, remarks, write_if};
use crate::Global;
use crate::output::{print, with_notes};
use report::{OPTIMUM, Report, Row, csv, draw, show};

/// Maximum number of combinations per run.
const POINTS_MAX: usize = 10_000;
/// Number of blocks below which the results of a sampled cache are inaccurate.
const SAMPLED_BLOCKS_FEW: f64 = 256.0;

/// Simulate caches on a trace: hit ratios, flash writes and backing I/O of every combination
///
/// With --share: compares divisions of one pool, as 'hob lab share' does, with one policy, admission and block size.
#[derive(Debug, Args)]
pub(crate) struct Sim {
    #[command(flatten)]
    source: Source,
    /// Policies; 'all' for all policies, 'optimum' for Belady's bound
    #[arg(long, value_name = "NAME", value_delimiter = ',', default_value = "s3-fifo")]
    policy: Vec<String>,
    /// Cache sizes, absolute or as a share of the bytes that the trace accesses
    #[arg(
        long,
        value_name = "SIZE|PERCENT",
        value_delimiter = ',',
        default_value = "0.1%,1%,5%,10%,20%,50%"
    )]
    size: Vec<CacheSize>,
    /// Sizes of a cache block
    #[arg(long, value_name = "SIZE", value_delimiter = ',', default_value = "4K")]
    block_size: Vec<Size>,
    /// Admissions: auto, or always, while-free, nth-access:N, ghost, each with
    /// +not-sequential:BYTES, +while-filling:PERCENT% and +reads-only
    #[arg(long, value_name = "ADMISSION", value_delimiter = ',', default_value = "always")]
    admission: Vec<Admission>,
    /// Fill granularities: sectors, block or auto
    #[arg(long, value_name = "NAME", value_delimiter = ',', default_value = "sectors")]
    fill: Vec<Fill>,
    /// Flash write budgets: '1 DWPD', '500G/day', '5 years at 600 TBW' or off. DWPD are relative to the
    /// size of the cache. The times of the trace count
    #[arg(long, value_name = "BUDGET", value_delimiter = ',', default_value = "off")]
    flash_writes: Vec<FlashWritesChange>,
    /// Use policy, admission and fill granularity of a preset whose layout is unified; see docs/presets.md. The
    /// simulation treats all writes as write-through, whatever the preset's mode
    #[arg(long, value_name = "NAME", conflicts_with_all = ["policy", "admission", "fill", "share"])]
    preset: Option<String>,
    /// Track only this share of the blocks, in caches smaller by the same factor
    #[arg(long, value_name = "SHARE", default_value_t = 1.0, conflicts_with = "share")]
    sample: f64,
    #[command(flatten)]
    division: Division,
    /// Number of threads [default: one for each processor]
    #[arg(long, value_name = "N")]
    threads: Option<usize>,
    /// Write all results to this file, comma-separated
    #[arg(long, value_name = "FILE")]
    csv: Option<PathBuf>,
    /// Draw block hits against size into this file, as SVG
    #[arg(long, value_name = "FILE", conflicts_with = "share")]
    picture: Option<PathBuf>,
}

/// Size of a simulated cache.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum CacheSize {
    Bytes(u64),
    /// Fraction of the trace's footprint: 0.1 is a tenth.
    Share(f64),
}

impl FromStr for CacheSize {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.strip_suffix('%') {
            Some(percent) => match percent.trim().parse::<f64>() {
                Ok(percent) if percent > 0.0 && percent <= 1000.0 => Ok(CacheSize::Share(percent / 100.0)),
                _ => Err(format!("'{text}' is not a share: write it like 10%")),
            },
            None => {
                text.parse::<Size>().map(|size| CacheSize::Bytes(size.bytes())).map_err(|e| e.to_string())
            }
        }
    }
}

/// Compares ways to divide one pool between the disks of the traces (option `--share`).
fn divide(args: &Sim, global: &Global) -> anyhow::Result<()> {
    let ([policy], [admission], [block_size]) =
        (args.policy.as_slice(), args.admission.as_slice(), args.block_size.as_slice())
    else {
        bail!("with --share, pass only one policy, one admission and one block size");
    };
    ensure!(args.fill == [Fill::Sectors], "--share simulates only --fill sectors");
    ensure!(args.flash_writes == [FlashWritesChange::Off], "--share does not simulate --flash-writes");
    let comparison = Comparison {
        policy: one_policy(policy)?,
        admission: *admission,
        threads: args.threads,
        csv: args.csv.as_deref(),
        ..args.division.comparison(&args.source, &args.size, block_size.bytes())
    };
    compare(&comparison, global)
}

pub(super) fn run(args: &Sim, global: &Global) -> anyhow::Result<()> {
    if args.division.is_wanted() {
        return divide(args, global);
    }
    let wanted = Wanted::parse(args)?;
    let stop = interruption()?;
    let counted = if wanted.needs_footprint(args) { Some(count(args, &stop)?) } else { None };
    let footprint_bytes = counted.map(|(bytes, _)| bytes);
    let points = wanted.points(args, footprint_bytes)?;

    let mut blocks = args.source.open_blocks()?;
    let bar = bar(counted.map(|(_, requests)| requests))?;
    let threads = args.threads.unwrap_or_else(processors);
    ensure!(threads > 0, "--threads 0 is not possible; pass at least 1");
    let began = std::time::Instant::now();
    let mut requests = 0;
    let simulated = grid(&mut blocks, &points, threads, |count| {
        requests = count;
        bar.set_position(count);
        !stop.load(Ordering::Relaxed)
    })?;
    let seconds = began.elapsed().as_secs_f64();
    bar.finish_and_clear();
    ensure!(!stop.load(Ordering::Relaxed), "interrupted after {requests} requests");
    ensure!(requests > 0, "{} has no requests", args.source.trace.display());
    let mut notes = blocks.reader().map(remarks).unwrap_or_default();
    notes.extend(few_blocks(&points));

    let mut results: Vec<Row> = simulated.iter().map(|result| Row::new(result, footprint_bytes)).collect();
    if wanted.optimum {
        results.extend(optimum(args, footprint_bytes)?);
    }
    let out_of_reach = results.iter().map(|row| row.out_of_reach).max().unwrap_or(0);
    notes.extend(wanted.preset.and_then(not_simulated));
    if out_of_reach > 0 {
        notes.push(format!("{out_of_reach} requests are beyond 2^32 blocks and were left out"));
    }
    let trace = args.source.trace.display().to_string();
    let report = Report { trace, footprint_bytes, requests, sample: args.sample, seconds, results, notes };
    write_if(args.csv.as_ref(), || csv(&report.results))?;
    write_if(args.picture.as_ref(), || draw(&report))?;
    print(global.output, &report, |report| with_notes(show(report), &report.notes))
}

/// The simulations that the command line asks for, checked.
struct Wanted {
    policies: Vec<PolicyKind>,
    admissions: Vec<Admission>,
    fills: Vec<Fill>,
    optimum: bool,
    preset: Option<&'static Preset>,
}

impl Wanted {
    fn parse(args: &Sim) -> anyhow::Result<Wanted> {
        let mut wanted = Wanted {
            policies: vec![],
            admissions: args.admission.clone(),
            fills: args.fill.clone(),
            optimum: false,
            preset: None,
        };
        if let Some(name) = &args.preset {
            let row = preset(name)?;
            if row.layout != Layout::Unified {
                bail!(
                    "'{name}' is a split cache, which the simulation does not support; use 'hob lab \
                    latency --preset {name}', or pass policy and admission"
                );
            }
            wanted.policies.extend(PolicyKind::from_name(row.policy));
            wanted.admissions = vec![row.admission];
            wanted.fills = vec![row.fill];
            wanted.preset = Some(row);
            return Ok(wanted);
        }
        for name in &args.policy {
            match name.as_str() {
                "all" => {
                    wanted.policies.extend(PolicyKind::all());
                    wanted.optimum = true;
                }
                OPTIMUM | "belady" => wanted.optimum = true,
                name => wanted.policies.push(PolicyKind::from_name(name).with_context(|| unknown(name))?),
            }
        }
        Ok(wanted)
    }

    fn needs_footprint(&self, args: &Sim) -> bool {
        args.size.iter().any(|size| matches!(size, CacheSize::Share(_)))
    }

    fn points(&self, args: &Sim, footprint_bytes: Option<u64>) -> anyhow::Result<Vec<Point>> {
        let mut points = Vec::new();
        for policy in &self.policies {
            for (admission, fill) in
                self.admissions.iter().flat_map(|it| self.fills.iter().map(move |fill| (it, fill)))
            {
                for block_size in &args.block_size {
                    for (size, writes) in args
                        .size
                        .iter()
                        .flat_map(|it| args.flash_writes.iter().map(move |writes| (it, writes)))
                    {
                        let block_bytes = u32::try_from(block_size.bytes()).unwrap_or(u32::MAX);
                        let cache_bytes = size.bytes(footprint_bytes, block_bytes);
                        points.push(Point {
                            policy: *policy,
                            admission: *admission,
                            fill: *fill,
                            block_bytes,
                            cache_bytes,
                            flash_writes: writes.budget().map(|budget| budget.bytes_per_day(cache_bytes)),
                            sample_rate: args.sample,
                        });
                    }
                }
            }
        }
        ensure!(points.len() <= POINTS_MAX, "{} combinations are more than {POINTS_MAX}", points.len());
        Ok(points)
    }
}

/// Returns a remark if results are inaccurate, because a cache simulated on a sample has fewer than
/// [`SAMPLED_BLOCKS_FEW`] blocks.
fn few_blocks(points: &[Point]) -> Option<String> {
    let blocks =
        |point: &Point| (point.cache_bytes / u64::from(point.block_bytes.max(1))) as f64 * point.sample_rate;
    let sampled = points.iter().filter(|point| point.sample_rate < 1.0).map(blocks);
    let fewest = sampled.filter(|count| *count < SAMPLED_BLOCKS_FEW).min_by(f64::total_cmp)?;
    Some(format!(
        "the smallest sampled cache has {fewest:.0} blocks: results of fewer than {SAMPLED_BLOCKS_FEW} blocks are \
         inaccurate; --sample with a larger share has more blocks"
    ))
}

/// Properties of a preset that are not simulated.
fn not_simulated(row: &Preset) -> Option<String> {
    let Preset { name, mode, .. } = row;
    (*mode != Mode::WriteThrough).then(|| {
        format!(
            "{name} is a {mode} cache, and writes were counted as write-through: its policy and \
            admission decide as in that mode, but the simulation has no replicas and no dirty \
            data; 'hob lab latency --preset {name}' simulates these too"
        )
    })
}

fn unknown(name: &str) -> String {
    format!("there is no policy '{name}'; there are {}, {OPTIMUM} and all", policy_names())
}

fn policy_names() -> String {
    POLICIES.iter().map(|row| row.name).collect::<Vec<_>>().join(", ")
}

/// Returns the policy with this name for the option `--share`. This option compares ways to divide
/// a pool, and simulates only one policy.
///
/// # Errors
/// Returns an error for `all`, for `optimum`, and for a name that is not the name of a policy.
pub(super) fn one_policy(name: &str) -> anyhow::Result<PolicyKind> {
    if matches!(name, "all" | "belady" | OPTIMUM) {
        bail!(
            "divisions of a pool are compared with one policy, not with '{name}': pass one of {}",
            policy_names()
        );
    }
    let unknown = || format!("there is no policy '{name}'; there are {}", policy_names());
    PolicyKind::from_name(name).with_context(unknown)
}

impl CacheSize {
    /// Returns the size in bytes. A fraction of the footprint is rounded to whole blocks, at least
    /// one.
    pub(super) fn bytes(self, footprint_bytes: Option<u64>, block_bytes: u32) -> u64 {
        match self {
            CacheSize::Bytes(bytes) => bytes,
            CacheSize::Share(share) => {
                let bytes = footprint_bytes.expect("shares have the footprint counted") as f64 * share;
                let blocks = (bytes / f64::from(block_bytes.max(1))).round().max(1.0);
                blocks as u64 * u64::from(block_bytes)
            }
        }
    }
}

pub(super) fn processors() -> usize {
    std::thread::available_parallelism().map_or(1, std::num::NonZero::get)
}

/// Returns the number of bytes that a trace accesses at least once, and the number of its requests.
fn count(args: &Sim, stop: &std::sync::atomic::AtomicBool) -> anyhow::Result<(u64, u64)> {
    if args.source.trace == Path::new("-") {
        bail!("standard input cannot be read twice: give sizes in bytes instead of shares of the footprint");
    }
    let mut blocks = args.source.open_blocks()?;
    let bar = bar(None)?;
    bar.set_message("counting the bytes that the trace accesses");
    let mut profiler = Profiler::default();
    let mut requests = 0;
    loop {
        let block = blocks.next_block()?;
        if block.is_empty() {
            break;
        }
        block.iter().for_each(|record| profiler.add(record));
        requests += block.len() as u64;
        bar.set_position(requests);
        ensure!(!stop.load(Ordering::Relaxed), "interrupted after {requests} requests");
    }
    bar.finish_and_clear();
    ensure!(requests > 0, "{} has no requests", args.source.trace.display());
    Ok((profiler.finish().footprint.bytes, requests))
}

/// Computes Belady's bound of the read hits and of the block hits. Writes bring blocks into the
/// cache, but only reads are counted.
fn optimum(args: &Sim, footprint: Option<u64>) -> anyhow::Result<Vec<Row>> {
    let mut rows = Vec::new();
    for block_size in &args.block_size {
        let block_bytes = block_size.bytes();
        let mut blocks = args.source.open_blocks()?;
        let mut requests = Vec::new();
        loop {
            let block = blocks.next_block()?;
            if block.is_empty() {
                break;
            }
            requests.extend(block.iter().map(|record| (touched(record, block_bytes), record.op == Op::Read)));
        }
        let sizes: Vec<u64> =
            args.size.iter().map(|size| size.bytes(footprint, block_bytes as u32)).collect();
        let counts: Vec<u64> = sizes.iter().map(|bytes| bytes / block_bytes).collect();
        let reads = NextUses::by_request(requests.iter().cloned())?.miss_ratios(&counts);
        let uses =
            requests.into_iter().flat_map(|(blocks, is_read)| blocks.map(move |block| (block, is_read)));
        let each = NextUses::counting(uses)?.miss_ratios(&counts);
        for ((cache_bytes, reads), each) in sizes.into_iter().zip(reads).zip(each) {
            rows.push(Row::optimum(block_bytes as u32, cache_bytes, footprint, (reads, each)));
        }
    }
    Ok(rows)
}

fn touched(record: &Record, block_bytes: u64) -> std::ops::Range<u64> {
    match record.op {
        Op::Read | Op::Write => {
            record.offset / block_bytes..(record.offset + u64::from(record.len)).div_ceil(block_bytes)
        }
        Op::Discard | Op::Flush => 0..0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_bytes_or_shares() {
        assert_eq!("10%".parse(), Ok(CacheSize::Share(0.1)));
        assert_eq!("0.5 %".parse(), Ok(CacheSize::Share(0.005)));
        assert_eq!("2G".parse(), Ok(CacheSize::Bytes(2 << 30)));
        for bad in ["", "%", "-1%", "0%", "nan%", "x", "5000%"] {
            assert!(bad.parse::<CacheSize>().is_err(), "{bad}");
        }
    }

    #[test]
    fn a_sampled_cache_of_few_blocks_is_reported() {
        let point = |cache_bytes, sample_rate| Point {
            policy: PolicyKind::default(),
            admission: Admission::default(),
            fill: Fill::Sectors,
            block_bytes: 4096,
            cache_bytes,
            flash_writes: None,
            sample_rate,
        };
        let remark = few_blocks(&[point(1 << 30, 0.01), point(40 << 20, 0.01), point(80 << 20, 0.01)]);
        assert!(remark.unwrap().contains("has 102 blocks"));
        assert_eq!(few_blocks(&[point(1 << 30, 0.01), point(4096, 1.0)]), None);
    }

    #[test]
    fn divisions_are_compared_with_one_policy() {
        assert!(one_policy("s3-fifo").is_ok());
        for name in ["all", "optimum", "nonsense"] {
            let error = one_policy(name).unwrap_err().to_string();
            assert!(error.contains(&format!("'{name}'")) && error.contains("s3-fifo"), "{error}");
            assert!(!error.contains("and all"), "{error}");
        }
    }

    #[test]
    fn a_share_is_whole_blocks_and_one_at_least() {
        assert_eq!(CacheSize::Share(0.1).bytes(Some(1 << 20), 4096), 26 * 4096);
        assert_eq!(CacheSize::Share(0.001).bytes(Some(4096), 65536), 65536);
        assert_eq!(CacheSize::Bytes(12345).bytes(None, 4096), 12345);
    }
}
