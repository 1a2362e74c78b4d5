//! `hob lab share TRACE…`: compares ways to divide one pool between the disks of traces. The option
//! `--share` of `hob lab sim`, `mrc`, `advise` and `figures` runs the same comparison.

#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;

use anyhow::{bail, ensure};
use clap::Args;
use hob_control::Size;
use hob_engine::admission::Admission;
use hob_engine::policy::PolicyKind;
use hob_engine::units::{BLOCK_BYTES_MAX, BLOCK_BYTES_MIN};
use hob_lab::share::{Host, Plan, Pool, Row, Share, csv};
use hob_trace::{FormatInfo, Record, merged_files};
use serde::Serialize;

use super::sim::{CacheSize, one_policy, processors};
use super::{
    Bad, Source, bytes, formats, interruption, percent, read_all, remarks, runs_bar, show_runs, write_if,
};
use crate::Global;
use crate::output::{print, table, with_notes};

const SECOND_NS: u64 = 1_000_000_000;

/// Maximum number of segments of the pool. The search for the best fixed division takes time in
/// proportion to the square of the number of segments.
const SEGMENTS_MAX: u64 = 20_000;

/// Compare ways to divide one pool between several disks: equal parts, the daemon's choice, one LRU
/// for all disks, and the best fixed parts
///
/// Each disk of each trace is a disk of one host, and the traces of all disks begin at the same
/// time.
#[derive(Debug, Args)]
pub(crate) struct ShareArgs {
    /// The traces; a trace with several disks counts as several
    #[arg(value_name = "TRACE", required = true)]
    traces: Vec<PathBuf>,
    /// Capacities of the pool, absolute or as a share of the bytes that all disks access
    #[arg(long, value_name = "SIZE|PERCENT", value_delimiter = ',', default_value = "5%,10%,20%")]
    size: Vec<CacheSize>,
    #[command(flatten)]
    pool: PoolArgs,
    #[command(flatten)]
    ways: Ways,
    /// Number of parallel simulations [default: one for each processor]
    #[arg(long, value_name = "N")]
    threads: Option<usize>,
    /// Write all results to this file, comma-separated
    #[arg(long, value_name = "FILE")]
    csv: Option<PathBuf>,
}

/// Option `--share`, the same in all commands that have it.
#[derive(Debug, Args)]
pub(super) struct Ways {
    /// Ways to divide one pool between all disks of the traces: static, auto, one-lru or optimum; see
    /// 'hob lab share'
    #[arg(long, value_name = "WAY", value_delimiter = ',')]
    pub(super) share: Vec<Share>,
}

/// Traces and divisions of a command that reads one trace unless `--share` is given.
#[derive(Debug, Args)]
pub(super) struct Division {
    /// With --share: more traces, whose disks use the same pool
    #[arg(value_name = "TRACE", requires = "share")]
    pub(super) more: Vec<PathBuf>,
    #[command(flatten)]
    pub(super) ways: Ways,
}

impl Division {
    /// Returns true if the user gave the option `--share`.
    pub(super) fn is_wanted(&self) -> bool {
        !self.ways.share.is_empty()
    }

    /// Returns a comparison of ways to divide pools of these sizes, with the default policy and
    /// admission. The traces `more` are read with the options of the first trace.
    pub(super) fn comparison<'a>(
        &self,
        first: &Source,
        sizes: &'a [CacheSize],
        block_bytes: u64,
    ) -> Comparison<'a> {
        let more = self.more.iter().map(|trace| Source { trace: trace.clone(), ..first.clone() });
        Comparison {
            sources: std::iter::once(first.clone()).chain(more).collect(),
            duration: None,
            sizes,
            segment_bytes: SEGMENT_BYTES.max(block_bytes),
            block_bytes,
            policy: PolicyKind::default(),
            admission: Admission::default(),
            shares: self.ways.share.clone(),
            threads: None,
            target_hit: None,
            csv: None,
        }
    }
}

/// Settings of the caches of one pool, and of the traces of its disks.
#[derive(Debug, Args)]
pub(super) struct PoolArgs {
    /// Format of the traces [default: detected]; 'hob lab formats' describes the formats
    #[arg(long, value_parser = formats(), hide_possible_values = true)]
    format: Option<&'static FormatInfo>,
    /// Scale the request times of each disk, so that the requests of each disk last this number of seconds
    #[arg(long, value_name = "SECONDS", value_parser = clap::value_parser!(u64).range(1..))]
    duration: Option<u64>,
    /// Unit of the division [default: 1M]
    #[arg(long, value_name = "SIZE")]
    segment_size: Option<Size>,
    /// Size of a cache block [default: 4K]
    #[arg(long, value_name = "SIZE")]
    block_size: Option<Size>,
    /// Policy of the caches; the way one-lru always has the policy LRU [default: s3-fifo]
    #[arg(long, value_name = "NAME")]
    policy: Option<String>,
    /// Admission of the caches [default: always]
    #[arg(long, value_name = "ADMISSION")]
    admission: Option<Admission>,
}

impl PoolArgs {
    pub(super) fn given(&self) -> Option<&'static str> {
        let PoolArgs { format, duration, segment_size, block_size, policy, admission } = self;
        let given = [
            ("--format", format.is_some()),
            ("--duration", duration.is_some()),
            ("--segment-size", segment_size.is_some()),
            ("--block-size", block_size.is_some()),
            ("--policy", policy.is_some()),
            ("--admission", admission.is_some()),
        ];
        given.into_iter().find(|(_, is_given)| *is_given).map(|(option, _)| option)
    }

    pub(super) fn comparison<'a>(
        &self,
        traces: &[PathBuf],
        sizes: &'a [CacheSize],
        shares: &[Share],
    ) -> anyhow::Result<Comparison<'a>> {
        let source = |trace: &PathBuf| Source {
            trace: trace.clone(),
            format: self.format,
            disk: None,
            on_bad: Bad::Skip,
            page_size: None,
        };
        Ok(Comparison {
            sources: traces.iter().map(source).collect(),
            duration: self.duration,
            sizes,
            segment_bytes: self.segment_size.map_or(SEGMENT_BYTES, |size| size.bytes()),
            block_bytes: self.block_size.map_or(BLOCK_BYTES, |size| size.bytes()),
            policy: one_policy(self.policy.as_deref().unwrap_or("s3-fifo"))?,
            admission: self.admission.unwrap_or_default(),
            shares: shares.to_vec(),
            threads: None,
            target_hit: None,
            csv: None,
        })
    }
}

/// Input of a comparison of ways to divide a pool: traces, pool sizes, and cache settings.
pub(super) struct Comparison<'a> {
    pub(super) sources: Vec<Source>,
    /// Duration to which the times of each disk are scaled, seconds.
    pub(super) duration: Option<u64>,
    pub(super) sizes: &'a [CacheSize],
    pub(super) segment_bytes: u64,
    pub(super) block_bytes: u64,
    pub(super) policy: PolicyKind,
    pub(super) admission: Admission,
    /// Ways to divide the pool that are compared; all ways if empty.
    pub(super) shares: Vec<Share>,
    /// Number of parallel simulations; one for each processor if `None`.
    pub(super) threads: Option<usize>,
    /// Target for the recommended pool size: share of the reads that flash serves. `None` for no
    /// recommendation; 0 for nine tenths of the highest measured share.
    pub(super) target_hit: Option<f64>,
    pub(super) csv: Option<&'a Path>,
}

/// Default segment size, bytes. A pool is divided between disks in whole segments.
const SEGMENT_BYTES: u64 = 1 << 20;
/// Default size of a cache block, bytes.
pub(super) const BLOCK_BYTES: u64 = 4096;

/// The recommended pool.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Recommended {
    target_hit_ratio: f64,
    /// The smallest measured pool that reaches the target; `None` if none does.
    pool: Option<Row>,
}

/// The JSON output.
#[derive(Debug, Serialize)]
pub(super) struct Report {
    disks: u16,
    pub(super) requests: usize,
    pub(super) footprint_bytes: u64,
    pub(super) results: Vec<Row>,
    #[serde(skip_serializing_if = "Option::is_none")]
    recommended: Option<Recommended>,
    /// Remarks about the traces and the sizes.
    pub(super) notes: Vec<String>,
    /// Path of the page, if one was written.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) page: Option<PathBuf>,
}

/// Results of a comparison.
pub(super) struct Compared {
    pub(super) report: Report,
    /// Time from the first to the last request, nanoseconds.
    pub(super) duration_ns: u64,
}

pub(super) fn run(args: &ShareArgs, global: &Global) -> anyhow::Result<()> {
    let comparison = args.pool.comparison(&args.traces, &args.size, &args.ways.share)?;
    compare(&Comparison { threads: args.threads, csv: args.csv.as_deref(), ..comparison }, global)
}

/// Runs a comparison and prints its results.
pub(super) fn compare(comparison: &Comparison<'_>, global: &Global) -> anyhow::Result<()> {
    let stop = interruption()?;
    let Compared { report, .. } = simulate(comparison, &stop)?;
    write_if(comparison.csv, || csv(&report.results))?;
    print(global.output, &report, |report| with_notes(show(report), &report.notes))
}

/// Reads the traces of a comparison and simulates it.
pub(super) fn simulate(comparison: &Comparison<'_>, stop: &AtomicBool) -> anyhow::Result<Compared> {
    let Comparison { segment_bytes, block_bytes, .. } = *comparison;
    ensure!(
        block_bytes.is_power_of_two() && (BLOCK_BYTES_MIN..=BLOCK_BYTES_MAX).contains(&block_bytes),
        "a block size is a power of two from 4 KiB to 1 MiB, not {block_bytes} bytes"
    );
    ensure!(
        segment_bytes > 0 && segment_bytes.is_multiple_of(block_bytes),
        "a segment is a whole number of blocks, not {segment_bytes} bytes"
    );
    let threads = comparison.threads.unwrap_or_else(processors);
    ensure!(threads > 0, "--threads 0 is not possible; pass at least 1");
    let (host, mut notes) = host(comparison, stop)?;
    let footprint_bytes = host.footprint(block_bytes);
    let pools = pools(comparison, footprint_bytes, host.disks(), &mut notes)?;
    let shares = ways(&comparison.shares);
    let plan = Plan { host: &host, footprint_bytes, pools: &pools, shares: &shares, threads };
    let bar = runs_bar()?;
    let results = plan.run(stop, |progress| show_runs(&bar, progress));
    bar.finish_and_clear();
    let results = results?;
    let recommended = comparison.target_hit.map(|target| recommended(&results, target));
    let (disks, requests) = (host.disks(), host.records().len());
    let duration_ns = host.records().last().map_or(0, |record| record.at_ns);
    let report = Report { disks, requests, footprint_bytes, results, recommended, notes, page: None };
    Ok(Compared { report, duration_ns })
}

/// Returns the given ways to divide a pool without duplicates, or all ways if `shares` is empty.
fn ways(shares: &[Share]) -> Vec<Share> {
    let wanted: &[Share] = if shares.is_empty() { &Share::ALL } else { shares };
    let mut ways = Vec::new();
    for share in wanted {
        if !ways.contains(share) {
            ways.push(*share);
        }
    }
    ways
}

/// Returns the pools to simulate, without duplicates. Adds a note if a pool was enlarged to one
/// segment for each disk.
fn pools(
    comparison: &Comparison<'_>,
    footprint_bytes: u64,
    disks: u16,
    notes: &mut Vec<String>,
) -> anyhow::Result<Vec<Pool>> {
    let Comparison { segment_bytes, policy, admission, .. } = *comparison;
    let (block_bytes, disks) = (comparison.block_bytes as u32, u64::from(disks));
    let (mut pools, mut is_enlarged) = (Vec::<Pool>::new(), false);
    for size in comparison.sizes {
        let wanted = size.bytes(Some(footprint_bytes), block_bytes).div_ceil(segment_bytes);
        is_enlarged |= wanted < disks;
        let segments = wanted.max(disks);
        if segments > SEGMENTS_MAX {
            bail!("a pool of {segments} segments is too large; choose a larger --segment-size");
        }
        let segments = segments as u32;
        if pools.iter().all(|pool| pool.segments != segments) {
            pools.push(Pool { segments, segment_bytes, block_bytes, policy, admission });
        }
    }
    if is_enlarged {
        notes.push(format!(
            "a pool has at least one segment of {} for each disk, so smaller pools were enlarged; 'hob lab share' \
             has --segment-size",
            Size(segment_bytes)
        ));
    }
    Ok(pools)
}

/// Returns the smallest pool that reaches the target hit ratio. If `target` is 0, the target is
/// nine tenths of the highest measured hit ratio.
fn recommended(rows: &[Row], target: f64) -> Recommended {
    let most = rows.iter().map(|row| row.read_hit_ratio).fold(0.0, f64::max);
    let target_hit_ratio = if target > 0.0 { target } else { 0.9 * most };
    let enough = rows.iter().filter(|row| row.read_hit_ratio >= target_hit_ratio);
    Recommended { target_hit_ratio, pool: enough.min_by_key(|row| row.cache_bytes).cloned() }
}

/// Reads all traces as the disks of one host.
fn host(comparison: &Comparison<'_>, stop: &AtomicBool) -> anyhow::Result<(Host, Vec<String>)> {
    let mut host = Host::default();
    let (sources, mut notes) = distinct(&comparison.sources)?;
    for (source, file) in sources.iter().zip(file_names(&sources)) {
        let mut reader = source.open()?;
        let mut disks: BTreeMap<u16, Vec<Record>> = BTreeMap::new();
        read_all(&mut reader, stop, |record| {
            disks.entry(record.disk).or_default().push(*record);
            Ok(())
        })?;
        let trace = source.trace.display();
        ensure!(!disks.is_empty(), "{trace} has no requests");
        let duration = comparison.duration.map(|seconds| seconds.saturating_mul(SECOND_NS));
        for (number, records) in &disks {
            let disk = reader.disks().get(usize::from(*number)).cloned();
            let disk = disk.unwrap_or_else(|| number.to_string());
            let name = match (disks.len(), sources.len()) {
                (1, _) => file.clone(),
                (_, 1) => disk,
                _ => format!("{file}:{disk}"),
            };
            host.add(name, records, duration)?;
        }
        notes.extend(remarks(&reader).into_iter().map(|remark| format!("{trace}: {remark}")));
    }
    host.sort();
    Ok((host, notes))
}

/// Returns the traces without duplicates, and a remark about each duplicate. A per-CPU file of
/// blktrace is a duplicate if another source opens all per-CPU files of the same trace.
fn distinct(sources: &[Source]) -> anyhow::Result<(Vec<Source>, Vec<String>)> {
    let (mut seen, mut kept, mut notes) = (BTreeSet::new(), Vec::new(), Vec::new());
    for source in sources {
        let files = merged_files(&source.trace)?;
        if files.is_empty() || seen.insert(files) {
            kept.push(source.clone());
        } else {
            notes.push(format!(
                "{}: skipped, because this per-CPU file was already merged with the others",
                source.trace.display()
            ));
        }
    }
    Ok((kept, notes))
}

/// Returns the names of the trace files without directories, or the whole paths if these names are
/// not unique.
fn file_names(sources: &[Source]) -> Vec<String> {
    let path = |source: &Source| source.trace.display().to_string();
    let name = |source: &Source| {
        let name = source.trace.file_name().unwrap_or(source.trace.as_os_str());
        name.to_string_lossy().into_owned()
    };
    let names: Vec<String> = sources.iter().map(name).collect();
    let are_unique = names.iter().collect::<BTreeSet<_>>().len() == names.len();
    if are_unique { names } else { sources.iter().map(path).collect() }
}

fn show(report: &Report) -> String {
    let columns = "DIVISION|POOL:|SHARE %:|READ HITS %:|FLASH WRITES:|MOVED:|DROPPED:";
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
    let text = table(columns, report.results.iter().map(row));
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
    let sizes: Vec<String> = pool.sizes.iter().map(|size| bytes(*size)).collect();
    format!(
        "\nA pool of {} divided by '{}' is the smallest of these that serves {target} % of the reads. The caches \
         have {} at the end.\n",
        bytes(pool.cache_bytes),
        pool.division,
        sizes.join(", ")
    )
}
