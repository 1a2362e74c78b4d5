//! `hob lab share TRACE…`: compares ways to divide one pool between the disks of traces. The option
//! `--share` of `hob lab sim`, `mrc` and `advise` runs the same comparison for one trace.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::{Context, bail, ensure};
use clap::Args;
use hob_control::Size;
use hob_engine::admission::Admission;
use hob_engine::policy::PolicyKind;
use hob_lab::picture::Unit;
use hob_lab::share::{self, Host, Pool, Share, Shared};
use hob_lab::trace::{FormatInfo, Record};
use indicatif::ProgressBar;
use serde::Serialize;

use super::sim::{CacheSize, unknown};
use super::{Bad, Source, formats, interruption, percent, read_all, remarks, write};
use crate::Global;
use crate::output::{numbers, print, table, with_notes, words};

const SECOND_NS: u64 = 1_000_000_000;

/// Maximum number of segments of the pool, because the best fixed division takes time in proportion
/// to its square.
const SEGMENTS_MAX: u64 = 20_000;

/// Compare ways to divide one pool between several disks: equal parts, the daemon's choice, one LRU
/// for all disks, and the best fixed parts
///
/// Each disk of each trace is a disk of one host, and all begin at the same time.
#[derive(Debug, Args)]
pub(crate) struct ShareArgs {
    /// The traces; a trace with several disks counts as several
    #[arg(value_name = "TRACE", required = true)]
    traces: Vec<PathBuf>,
    /// Format of the traces [default: detected]; 'hob lab formats' describes the formats
    #[arg(long, value_parser = formats(), hide_possible_values = true)]
    format: Option<&'static FormatInfo>,
    /// Scale the times of each disk, so that each lasts so many seconds
    #[arg(long, value_name = "SECONDS", value_parser = clap::value_parser!(u64).range(1..))]
    duration: Option<u64>,
    /// Capacities of the pool, absolute or as a share of the bytes that all disks access
    #[arg(long, value_name = "SIZE|PERCENT", value_delimiter = ',', default_value = "5%,10%,20%")]
    size: Vec<CacheSize>,
    /// Unit of the division
    #[arg(long, value_name = "SIZE", default_value = "1M")]
    segment_size: Size,
    /// Size of a cache block
    #[arg(long, value_name = "SIZE", default_value = "4K")]
    block_size: Size,
    /// Policy of the caches; the one LRU for all disks has its own
    #[arg(long, value_name = "NAME", default_value = "s3-fifo")]
    policy: String,
    /// Admission of the caches
    #[arg(long, value_name = "ADMISSION", default_value = "always")]
    admission: Admission,
    /// Ways to divide the pool: static, auto, one-lru or optimum [default: all]
    #[arg(long, value_name = "WAY", value_delimiter = ',')]
    share: Vec<Share>,
    /// Write every figure to this file, comma-separated
    #[arg(long, value_name = "FILE")]
    csv: Option<PathBuf>,
}

/// A comparison of divisions, as a command asks for it.
pub(super) struct Comparison<'a> {
    pub(super) sources: Vec<Source>,
    /// Duration to which the times of each disk are scaled, seconds.
    pub(super) duration: Option<u64>,
    pub(super) sizes: &'a [CacheSize],
    pub(super) segment_bytes: u64,
    pub(super) block_bytes: u64,
    pub(super) policy: PolicyKind,
    pub(super) admission: Admission,
    /// Ways to compare; all if empty.
    pub(super) shares: &'a [Share],
    /// Share of the reads to serve from flash, if a pool size is to be recommended. With 0, nine
    /// tenths of the highest share that was measured.
    pub(super) target_hit: Option<f64>,
    pub(super) csv: Option<&'a Path>,
}

/// Unit of the division for the option `--share` of other commands.
pub(super) const SEGMENT_BYTES: u64 = 1 << 20;

/// The recommended pool.
#[derive(Clone, Debug, Serialize)]
struct Recommended {
    target_hit_ratio: f64,
    /// The smallest measured pool that reaches the target; `None` if none does.
    pool: Option<Row>,
}

/// A row of the result.
#[derive(Clone, Debug, Serialize)]
struct Row {
    /// Way to divide the capacity.
    division: &'static str,
    cache_bytes: u64,
    /// Capacity as a fraction of the bytes that the disks access.
    cache_share: f64,
    read_hit_ratio: f64,
    flash_write_bytes: u64,
    /// Bytes that moved from one cache to another.
    moved_bytes: u64,
    /// Cached bytes that were dropped with moved segments.
    dropped_bytes: u64,
    /// Size of each cache at the end, in bytes.
    sizes: Vec<u64>,
}

/// The JSON output.
#[derive(Debug, Serialize)]
struct Report {
    disks: u16,
    requests: usize,
    footprint_bytes: u64,
    results: Vec<Row>,
    #[serde(skip_serializing_if = "Option::is_none")]
    recommended: Option<Recommended>,
}

pub(super) fn run(args: &ShareArgs, global: &Global) -> anyhow::Result<()> {
    let source = |trace: &PathBuf| Source {
        trace: trace.clone(),
        format: args.format,
        disk: None,
        on_bad: Bad::Skip,
        page_size: None,
    };
    let comparison = Comparison {
        sources: args.traces.iter().map(source).collect(),
        duration: args.duration,
        sizes: &args.size,
        segment_bytes: args.segment_size.bytes(),
        block_bytes: args.block_size.bytes(),
        policy: PolicyKind::from_name(&args.policy).with_context(|| unknown(&args.policy))?,
        admission: args.admission,
        shares: &args.share,
        target_hit: None,
        csv: args.csv.as_deref(),
    };
    compare(&comparison, global)
}

/// Runs a comparison and prints its results.
pub(super) fn compare(comparison: &Comparison<'_>, global: &Global) -> anyhow::Result<()> {
    let Comparison { segment_bytes, policy, admission, .. } = *comparison;
    let block_bytes = u32::try_from(comparison.block_bytes).unwrap_or(u32::MAX);
    let shares = if comparison.shares.is_empty() { &Share::ALL } else { comparison.shares };
    ensure!(
        block_bytes > 0 && segment_bytes > 0 && segment_bytes.is_multiple_of(block_bytes.into()),
        "a segment is a whole number of blocks"
    );
    let stop = interruption()?;
    let (host, notes) = host(comparison, &stop)?;
    let footprint_bytes = host.footprint(block_bytes.into());
    let bar = ProgressBar::new((comparison.sizes.len() * shares.len()) as u64);
    let mut results = Vec::new();
    for size in comparison.sizes {
        let bytes = size.bytes(Some(footprint_bytes), block_bytes);
        let segments = bytes.div_ceil(segment_bytes).max(host.disks().into());
        if segments > SEGMENTS_MAX {
            bail!("a pool of {segments} segments is too large; choose a larger --segment-size");
        }
        let pool = Pool { segments: segments as u32, segment_bytes, block_bytes, policy, admission };
        for way in shares {
            let shared = share::play(&host, &pool, *way)?;
            ensure!(!stop.load(Ordering::Relaxed), "interrupted after {} results", results.len());
            results.push(Row::new(&shared, &pool, footprint_bytes));
            bar.set_position(results.len() as u64);
        }
    }
    bar.finish_and_clear();
    let recommended = comparison.target_hit.map(|target| recommended(&results, target));
    let (disks, requests) = (host.disks(), host.records().len());
    let report = Report { disks, requests, footprint_bytes, results, recommended };
    if let Some(path) = comparison.csv {
        write(path, &csv(&report.results))?;
    }
    print(global.output, &report, |report| with_notes(show(report), &notes))
}

/// Returns the smallest pool that reaches the target, or nine tenths of the highest hit ratio with a
/// target of 0.
fn recommended(rows: &[Row], target: f64) -> Recommended {
    let most = rows.iter().map(|row| row.read_hit_ratio).fold(0.0, f64::max);
    let target_hit_ratio = if target > 0.0 { target } else { 0.9 * most };
    let enough = rows.iter().filter(|row| row.read_hit_ratio >= target_hit_ratio);
    Recommended { target_hit_ratio, pool: enough.min_by_key(|row| row.cache_bytes).cloned() }
}

/// Reads all traces as the disks of one host.
fn host(comparison: &Comparison<'_>, stop: &AtomicBool) -> anyhow::Result<(Host, Vec<String>)> {
    let mut host = Host::default();
    let mut notes = Vec::new();
    for source in &comparison.sources {
        let mut reader = source.open()?;
        let mut disks: BTreeMap<u16, Vec<Record>> = BTreeMap::new();
        read_all(&mut reader, stop, |record| {
            disks.entry(record.disk).or_default().push(*record);
            Ok(())
        })?;
        let duration = comparison.duration.map(|seconds| seconds.saturating_mul(SECOND_NS));
        for records in disks.values() {
            host.add(records, duration)?;
        }
        let trace = source.trace.display();
        notes.extend(remarks(&reader).into_iter().map(|remark| format!("{trace}: {remark}")));
    }
    ensure!(host.disks() > 0, "the traces have no request");
    host.sort();
    Ok((host, notes))
}

impl Row {
    fn new(shared: &Shared, pool: &Pool, footprint_bytes: u64) -> Row {
        let cache_bytes = u64::from(pool.segments) * pool.segment_bytes;
        Row {
            division: shared.share.name(),
            cache_bytes,
            cache_share: cache_bytes as f64 / footprint_bytes.max(1) as f64,
            read_hit_ratio: shared.read_hit_ratio(),
            flash_write_bytes: shared.flash_write_bytes(),
            moved_bytes: shared.moved * pool.segment_bytes,
            dropped_bytes: shared.dropped * u64::from(pool.block_bytes),
            sizes: shared.segments.iter().map(|count| u64::from(*count) * pool.segment_bytes).collect(),
        }
    }
}

fn show(report: &Report) -> String {
    let columns = [
        words("DIVISION"),
        numbers("POOL"),
        numbers("SHARE %"),
        numbers("READ HITS %"),
        numbers("FLASH WRITES"),
        numbers("MOVED"),
        numbers("DROPPED"),
    ];
    let bytes = |bytes: u64| Unit::Bytes.text(bytes as f64);
    let row = |row: &Row| {
        vec![
            row.division.to_owned(),
            bytes(row.cache_bytes),
            percent(row.cache_share),
            percent(row.read_hit_ratio),
            bytes(row.flash_write_bytes),
            bytes(row.moved_bytes),
            bytes(row.dropped_bytes),
        ]
    };
    let text = table(&columns, report.results.iter().map(row));
    let touched = bytes(report.footprint_bytes);
    let mut text =
        format!("{text}\n\n{} disks, {} requests, which touch {touched}\n", report.disks, report.requests);
    if let Some(recommended) = &report.recommended {
        text.push_str(&advice(recommended));
    }
    text
}

/// Returns the recommendation as a sentence, with the size of each disk's cache.
fn advice(recommended: &Recommended) -> String {
    let target = percent(recommended.target_hit_ratio);
    let Some(pool) = &recommended.pool else {
        return format!("\nNone of these pools serves {target} % of the reads.\n");
    };
    let bytes = |bytes: u64| Unit::Bytes.text(bytes as f64);
    let sizes: Vec<String> = pool.sizes.iter().map(|size| bytes(*size)).collect();
    format!(
        "\nA pool of {} divided by '{}' is the smallest of these that serves {target} % of the reads. The caches \
         have {} at the end.\n",
        bytes(pool.cache_bytes),
        pool.division,
        sizes.join(", ")
    )
}

fn csv(rows: &[Row]) -> String {
    let mut text = String::from(
        "division,cache_bytes,cache_share,read_hit_ratio,flash_write_bytes,moved_bytes,dropped_bytes\n",
    );
    for row in rows {
        let Row { division, cache_bytes, cache_share, read_hit_ratio, .. } = row;
        let Row { flash_write_bytes, moved_bytes, dropped_bytes, .. } = row;
        text.push_str(&format!(
            "{division},{cache_bytes},{cache_share},{read_hit_ratio},{flash_write_bytes},{moved_bytes},{dropped_bytes}\n"
        ));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(division: &'static str, cache_bytes: u64, read_hit_ratio: f64) -> Row {
        Row {
            division,
            cache_bytes,
            cache_share: 0.1,
            read_hit_ratio,
            flash_write_bytes: 0,
            moved_bytes: 0,
            dropped_bytes: 0,
            sizes: vec![cache_bytes / 2; 2],
        }
    }

    #[test]
    fn the_smallest_pool_that_reaches_the_target_is_recommended() {
        let rows = [row("static", 4 << 20, 0.4), row("auto", 4 << 20, 0.6), row("auto", 8 << 20, 0.65)];
        let pool = recommended(&rows, 0.0).pool.unwrap();
        assert_eq!((pool.division, pool.cache_bytes), ("auto", 4 << 20));
        assert_eq!(recommended(&rows, 0.62).pool.unwrap().cache_bytes, 8 << 20);
        assert!(advice(&recommended(&rows, 0.62)).contains("4 MiB, 4 MiB at the end"));
        assert!(advice(&recommended(&rows, 0.9)).contains("None of these pools"));
    }
}
