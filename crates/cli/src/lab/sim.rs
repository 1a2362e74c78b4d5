//! `hob lab sim TRACE`: simulates every combination of policy, admission, block size and cache
//! size.

use std::fmt;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::atomic::Ordering;

use anyhow::{Context, bail, ensure};
use clap::Args;
use hob_control::Size;
use hob_engine::admission::Admission;
use hob_engine::command::{Layout, Mode};
use hob_engine::granularity::Fill;
use hob_engine::policy::{POLICIES, PolicyKind};
use hob_engine::preset::{Preset, preset};
use hob_lab::belady::NextUses;
use hob_lab::picture::{Axis, Curve, CurveChart, Unit, curves};
use hob_lab::sim::{Point, Simulated, grid};
use hob_lab::trace::blocks::Blocks;
use hob_lab::trace::profile::Profiler;
use hob_lab::trace::{Op, Record};
use serde::ser::Error;
use serde::{Serialize, Serializer};

use super::feed::bar;
use super::{Source, interruption, percent, remarks, write};
use crate::Global;
use crate::output::{numbers, print, table, with_notes, words};

/// Name that selects the bound for all policies.
const OPTIMUM: &str = "optimum";
/// Maximum number of combinations per run.
const POINTS_MAX: usize = 10_000;

/// Simulate caches on a trace: hit ratios, flash writes and backing I/O of every combination
#[derive(Debug, Args)]
pub(crate) struct Sim {
    #[command(flatten)]
    source: Source,
    /// Policies; 'all' for every one, 'optimum' for Belady's bound
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
    /// Use policy, admission and fill granularity of a preset whose layout is unified; see docs/presets.md. The
    /// simulation treats all writes as write-through, whatever the preset's mode
    #[arg(long, value_name = "NAME", conflicts_with_all = ["policy", "admission", "fill"])]
    preset: Option<String>,
    /// Track only this share of the blocks, in caches smaller by the same factor
    #[arg(long, value_name = "SHARE", default_value_t = 1.0)]
    sample: f64,
    /// Number of threads [default: one for each processor]
    #[arg(long, value_name = "N")]
    threads: Option<usize>,
    /// Write every figure to this file, comma-separated
    #[arg(long, value_name = "FILE")]
    csv: Option<PathBuf>,
    /// Draw block hits against size into this file, as SVG
    #[arg(long, value_name = "FILE")]
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

/// A row of the result.
#[derive(Clone, Debug, Default, Serialize)]
struct Row {
    policy: String,
    admission: String,
    fill: String,
    block_bytes: u32,
    cache_bytes: u64,
    /// Size as a fraction of the bytes that the trace accesses, if they were counted.
    cache_share: Option<f64>,
    reads: u64,
    /// Read requests served whole from flash.
    read_hits: u64,
    /// Fraction of read requests served whole from flash.
    read_hit_ratio: f64,
    /// Fraction of read bytes served from flash.
    byte_hit_ratio: f64,
    /// Fraction of blocks that were cached when a read accessed them, including reads that missed
    /// as a whole.
    block_hit_ratio: f64,
    partial_misses: u64,
    not_admitted: u64,
    writes: u64,
    write_hits: u64,
    flash_write_bytes: u64,
    /// Bytes read from the backing beside those that guests read.
    extra_read_bytes: u64,
    backing_ios: u64,
    evictions: u64,
    /// Memory for metadata per block of the cache, in bytes.
    memory_bytes_per_block: f64,
    out_of_reach: u64,
}

/// The JSON output.
#[derive(Debug, Serialize)]
struct Report {
    trace: String,
    footprint_bytes: Option<u64>,
    requests: u64,
    sample: f64,
    /// Time for reading and simulating in seconds, without the pass that counts the footprint.
    seconds: f64,
    #[serde(serialize_with = "without_unknown")]
    results: Vec<Row>,
}

/// Fields that the optimum has. Its other fields are unknown, because the optimum is computed for
/// read hits, and for nothing else.
const KNOWN_OF_OPTIMUM: [&str; 7] =
    ["policy", "admission", "block_bytes", "cache_bytes", "cache_share", "read_hit_ratio", "block_hit_ratio"];

/// Serializes rows, with `null` for unknown values.
fn without_unknown<S: Serializer>(rows: &[Row], serializer: S) -> Result<S::Ok, S::Error> {
    let json = |row: &Row| {
        let mut json = serde_json::to_value(row).map_err(S::Error::custom)?;
        if row.policy == OPTIMUM
            && let Some(fields) = json.as_object_mut()
        {
            let unknown = fields.iter_mut().filter(|(name, _)| !KNOWN_OF_OPTIMUM.contains(&name.as_str()));
            unknown.for_each(|(_, value)| *value = serde_json::Value::Null);
        }
        Ok(json)
    };
    let rows: Vec<serde_json::Value> = rows.iter().map(json).collect::<Result<_, S::Error>>()?;
    rows.serialize(serializer)
}

pub(super) fn run(args: &Sim, global: &Global) -> anyhow::Result<()> {
    let wanted = Wanted::parse(args)?;
    let stop = interruption()?;
    let counted = if wanted.needs_footprint(args) { Some(count(args, &stop)?) } else { None };
    let footprint_bytes = counted.map(|(bytes, _)| bytes);
    let points = wanted.points(args, footprint_bytes)?;

    let mut blocks = args.source.open_blocks()?;
    let bar = bar(counted.map(|(_, requests)| requests))?;
    let threads = args.threads.unwrap_or_else(processors);
    ensure!(threads > 0, "--threads 0 simulates nothing");
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
    ensure!(requests > 0, "there is no request in {}", args.source.trace.display());
    let mut notes = blocks.reader().map(remarks).unwrap_or_default();

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
    let report = Report { trace, footprint_bytes, requests, sample: args.sample, seconds, results };
    if let Some(path) = &args.csv {
        write(path, &csv(&report.results))?;
    }
    if let Some(path) = &args.picture {
        write(path, &draw(&report))?;
    }
    print(global.output, &report, |report| with_notes(show(report), &notes))
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
                    for size in &args.size {
                        let block_bytes = u32::try_from(block_size.bytes()).unwrap_or(u32::MAX);
                        points.push(Point {
                            policy: *policy,
                            admission: *admission,
                            fill: *fill,
                            block_bytes,
                            cache_bytes: size.bytes(footprint_bytes, block_bytes),
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

/// Properties of a preset that are not simulated.
fn not_simulated(row: &Preset) -> Option<String> {
    let Preset { name, mode, .. } = row;
    (*mode != Mode::WriteThrough).then(|| {
        format!(
            "{name} is a {mode} cache, and writes were counted as write-through: its policy and \
            admission decide as in that mode, but the simulation has no second copies and no dirty \
            data; 'hob lab latency --preset {name}' simulates these too"
        )
    })
}

pub(super) fn unknown(name: &str) -> String {
    let names: Vec<&str> = POLICIES.iter().map(|row| row.name).collect();
    format!("there is no policy '{name}'; there are {}, {OPTIMUM} and all", names.join(", "))
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

/// Returns the bytes that a trace accesses, and the number of its requests.
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
    ensure!(requests > 0, "there is no request in {}", args.source.trace.display());
    Ok((profiler.finish().footprint.bytes, requests))
}

/// Computes Belady's bound of the read hits, and that of the block hits: writes fill blocks, reads
/// count.
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

impl Row {
    fn new(result: &Simulated, footprint_bytes: Option<u64>) -> Row {
        let Simulated { point, stats, memory_bytes, out_of_reach } = result;
        let blocks = (point.cache_bytes / u64::from(point.block_bytes)) as f64 * point.sample_rate;
        Row {
            policy: point.policy.info().name.to_owned(),
            admission: point.admission.to_string(),
            fill: point.fill.to_string(),
            block_bytes: point.block_bytes,
            cache_bytes: point.cache_bytes,
            cache_share: footprint_bytes.map(|bytes| point.cache_bytes as f64 / bytes.max(1) as f64),
            reads: stats.reads,
            read_hits: stats.read_hits,
            read_hit_ratio: stats.read_hit_ratio(),
            byte_hit_ratio: stats.read_hit_byte_ratio(),
            block_hit_ratio: stats.read_block_hit_ratio(),
            partial_misses: stats.partial_misses,
            not_admitted: stats.not_admitted,
            writes: stats.writes,
            write_hits: stats.write_hits,
            flash_write_bytes: stats.flash_write_bytes,
            extra_read_bytes: stats.extra_read_bytes,
            backing_ios: stats.backing_ios(),
            evictions: stats.evictions,
            memory_bytes_per_block: *memory_bytes as f64 / blocks.round().max(1.0),
            out_of_reach: *out_of_reach,
        }
    }

    /// The miss ratios are those of reads and of their blocks.
    fn optimum(
        block_bytes: u32,
        cache_bytes: u64,
        footprint: Option<u64>,
        (reads, blocks): (f64, f64),
    ) -> Row {
        Row {
            policy: OPTIMUM.to_owned(),
            admission: "-".to_owned(),
            fill: "-".to_owned(),
            block_bytes,
            cache_bytes,
            cache_share: footprint.map(|bytes| cache_bytes as f64 / bytes.max(1) as f64),
            read_hit_ratio: 1.0 - reads,
            block_hit_ratio: 1.0 - blocks,
            ..Row::default()
        }
    }

    /// Returns `figure`, or a dash for the optimum, which does not have it.
    fn by_request(&self, figure: String) -> String {
        if self.policy == OPTIMUM { "-".to_owned() } else { figure }
    }

    /// Label that distinguishes it from other rows, without its size.
    fn kind(&self, report: &Report) -> String {
        let differs = |of: fn(&Row) -> String| {
            report.results.iter().any(|row| row.policy != OPTIMUM && of(row) != of(&report.results[0]))
        };
        let mut kind = self.policy.clone();
        if self.policy != OPTIMUM && differs(|row| row.admission.clone()) {
            kind = format!("{kind} {}", self.admission);
        }
        if self.policy != OPTIMUM && differs(|row| row.fill.clone()) {
            kind = format!("{kind} {}", self.fill);
        }
        if differs(|row| row.block_bytes.to_string()) {
            kind = format!("{kind} {}", Size(u64::from(self.block_bytes)));
        }
        kind
    }
}

fn show(report: &Report) -> String {
    let columns = [
        words("POLICY"),
        words("ADMISSION"),
        words("FILL"),
        numbers("BLOCK"),
        numbers("CACHE"),
        numbers("SHARE %"),
        numbers("READ HITS %"),
        numbers("BYTE HITS %"),
        numbers("BLOCK HITS %"),
        numbers("FLASH WRITES"),
        numbers("EXTRA READS"),
        numbers("BACKING I/O"),
        numbers("EVICTIONS"),
    ];
    let rows = report.results.iter().map(|row| {
        vec![
            row.policy.clone(),
            row.admission.clone(),
            row.fill.clone(),
            Size(u64::from(row.block_bytes)).to_string(),
            Unit::Bytes.text(row.cache_bytes as f64),
            row.cache_share.map_or("-".to_owned(), percent),
            percent(row.read_hit_ratio),
            row.by_request(percent(row.byte_hit_ratio)),
            percent(row.block_hit_ratio),
            row.by_request(Unit::Bytes.text(row.flash_write_bytes as f64)),
            row.by_request(Unit::Bytes.text(row.extra_read_bytes as f64)),
            row.by_request(row.backing_ios.to_string()),
            row.by_request(row.evictions.to_string()),
        ]
    });
    let mut text = table(&columns, rows);
    let touched = report
        .footprint_bytes
        .map(|bytes| format!(", which touch {}", Unit::Bytes.text(bytes as f64)))
        .unwrap_or_default();
    text.push_str(&format!(
        "\n\n{} requests{touched}; simulated in {:.2} s\n",
        report.requests, report.seconds
    ));
    text
}

/// Columns of the CSV output. They have the names of the fields of [`Row`].
const CSV_COLUMNS: &str = "policy,admission,block_bytes,cache_bytes,cache_share,reads,read_hits,read_hit_ratio,byte_hit_ratio,\
    block_hit_ratio,partial_misses,not_admitted,writes,write_hits,flash_write_bytes,backing_ios,evictions,\
    memory_bytes_per_block,fill,extra_read_bytes";

fn csv(rows: &[Row]) -> String {
    let mut text = format!("{CSV_COLUMNS}\n");
    for row in rows {
        let share = row.cache_share.map(|share| share.to_string()).unwrap_or_default();
        let figures: [&dyn fmt::Display; 20] = [
            &row.policy,
            &row.admission,
            &row.block_bytes,
            &row.cache_bytes,
            &share,
            &row.reads,
            &row.read_hits,
            &row.read_hit_ratio,
            &row.byte_hit_ratio,
            &row.block_hit_ratio,
            &row.partial_misses,
            &row.not_admitted,
            &row.writes,
            &row.write_hits,
            &row.flash_write_bytes,
            &row.backing_ios,
            &row.evictions,
            &row.memory_bytes_per_block,
            &row.fill,
            &row.extra_read_bytes,
        ];
        let is_known = |column: &str| row.policy != OPTIMUM || KNOWN_OF_OPTIMUM.contains(&column);
        let cell = |(column, figure): (&str, &&dyn fmt::Display)| {
            if is_known(column) { figure.to_string() } else { String::new() }
        };
        let cells: Vec<String> = CSV_COLUMNS.split(',').zip(&figures).map(cell).collect();
        text.push_str(&cells.join(","));
        text.push('\n');
    }
    text
}

fn draw(report: &Report) -> String {
    let mut kinds: Vec<(String, Vec<(f64, f64)>)> = Vec::new();
    for row in &report.results {
        let kind = row.kind(report);
        let point = (row.cache_bytes as f64, row.block_hit_ratio);
        match kinds.iter_mut().find(|(name, _)| *name == kind) {
            Some((_, points)) => points.push(point),
            None => kinds.push((kind, vec![point])),
        }
    }
    let mut chart = CurveChart::new(
        "Blocks found in the cache by reads, by cache size",
        Axis::new("cache size", Unit::Bytes).log(),
        Axis::new("block hits", Unit::Percent),
    )
    .subtitle(format!("{}, {} requests", report.trace, report.requests));
    for (name, mut points) in kinds {
        points.sort_by(|a, b| a.0.total_cmp(&b.0));
        chart = chart.curve(Curve::new(name, points).dots());
    }
    curves(&chart)
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
    fn unknown_values_of_the_optimum_are_null_and_empty() {
        let rows =
            [Row::optimum(4096, 1 << 20, Some(4 << 20), (0.5, 0.4)), Row { evictions: 7, ..Row::default() }];
        assert_eq!(csv(&rows[..1]).lines().nth(1), Some("optimum,-,4096,1048576,0.25,,,0.5,,0.6,,,,,,,,,,"));
        let results = rows.to_vec();
        let report = Report {
            trace: "t".into(),
            footprint_bytes: None,
            requests: 1,
            sample: 1.0,
            seconds: 0.1,
            results,
        };
        let json = serde_json::to_value(&report).unwrap();
        assert_eq!(json["results"][0]["read_hit_ratio"], 0.5);
        assert_eq!((&json["results"][0]["byte_hit_ratio"], &json["results"][0]["evictions"]), {
            (&serde_json::Value::Null, &serde_json::Value::Null)
        });
        assert_eq!(json["results"][0]["block_hit_ratio"], 0.6);
        assert_eq!(json["results"][1]["evictions"], 7);
    }

    #[test]
    fn a_share_is_whole_blocks_and_one_at_least() {
        assert_eq!(CacheSize::Share(0.1).bytes(Some(1 << 20), 4096), 26 * 4096);
        assert_eq!(CacheSize::Share(0.001).bytes(Some(4096), 65536), 65536);
        assert_eq!(CacheSize::Bytes(12345).bytes(None, 4096), 12345);
    }
}
