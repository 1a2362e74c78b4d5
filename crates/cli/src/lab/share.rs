//! `hob lab share TRACE…`: compares ways to divide one pool between the disks of traces.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::{Context, bail, ensure};
use clap::Args;
use hob_control::Size;
use hob_engine::admission::Admission;
use hob_engine::policy::PolicyKind;
use hob_lab::picture::Unit;
use hob_lab::share::{self, Host, Pool, Shared};
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
    /// Write every figure to this file, comma-separated
    #[arg(long, value_name = "FILE")]
    csv: Option<PathBuf>,
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
}

pub(super) fn run(args: &ShareArgs, global: &Global) -> anyhow::Result<()> {
    let policy = PolicyKind::from_name(&args.policy).with_context(|| unknown(&args.policy))?;
    let block_bytes = u32::try_from(args.block_size.bytes()).unwrap_or(u32::MAX);
    let segment_bytes = args.segment_size.bytes();
    ensure!(
        block_bytes > 0 && segment_bytes > 0 && segment_bytes.is_multiple_of(block_bytes.into()),
        "a segment is a whole number of blocks"
    );
    let stop = interruption()?;
    let (host, notes) = host(args, &stop)?;
    let footprint_bytes = host.footprint(block_bytes.into());
    let bar = ProgressBar::new((args.size.len() * share::Share::ALL.len()) as u64);
    let mut results = Vec::new();
    for size in &args.size {
        let bytes = size.bytes(Some(footprint_bytes), block_bytes);
        let segments = bytes.div_ceil(segment_bytes).max(host.disks().into());
        if segments > SEGMENTS_MAX {
            bail!("a pool of {segments} segments is too large; choose a larger --segment-size");
        }
        let pool =
            Pool { segments: segments as u32, segment_bytes, block_bytes, policy, admission: args.admission };
        for way in share::Share::ALL {
            let shared = share::play(&host, &pool, way)?;
            ensure!(!stop.load(Ordering::Relaxed), "interrupted after {} results", results.len());
            results.push(Row::new(&shared, &pool, footprint_bytes));
            bar.set_position(results.len() as u64);
        }
    }
    bar.finish_and_clear();
    let report = Report { disks: host.disks(), requests: host.records().len(), footprint_bytes, results };
    if let Some(path) = &args.csv {
        write(path, &csv(&report.results))?;
    }
    print(global.output, &report, |report| with_notes(show(report), &notes))
}

/// Reads all traces as the disks of one host.
fn host(args: &ShareArgs, stop: &AtomicBool) -> anyhow::Result<(Host, Vec<String>)> {
    let mut host = Host::default();
    let mut notes = Vec::new();
    for trace in &args.traces {
        let source = Source {
            trace: trace.clone(),
            format: args.format,
            disk: None,
            on_bad: Bad::Skip,
            page_size: None,
        };
        let mut reader = source.open()?;
        let mut disks: BTreeMap<u16, Vec<Record>> = BTreeMap::new();
        read_all(&mut reader, stop, |record| {
            disks.entry(record.disk).or_default().push(*record);
            Ok(())
        })?;
        let duration = args.duration.map(|seconds| seconds.saturating_mul(SECOND_NS));
        for records in disks.values() {
            host.add(records, duration)?;
        }
        notes.extend(remarks(&reader).into_iter().map(|remark| format!("{}: {remark}", trace.display())));
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
    format!("{text}\n\n{} disks, {} requests, which touch {touched}\n", report.disks, report.requests)
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
