//! `hob lab latency TRACE`: latencies of a trace without and with a cache, in virtual time.

use std::path::PathBuf;

use clap::Args;
use hob_control::Size;
use hob_daemon::simulated_cache;
use hob_engine::command::{Copies, Layout, Mode};
use hob_lab::advise::{Backing, Flash};
use hob_lab::latency::{Class, Interval, Latencies, Options, Played, measure};
use hob_lab::picture::{Axis, Curve, CurveChart, Unit, curves};
use hob_lab::replay::Pace;
use hob_world::replay::{CacheSetup, segment_bytes};
use serde::Serialize;

use super::{Source, bytes, interruption, percent, read_material, with_progress, write_if};
use crate::Global;
use crate::output::{self, duration, pairs, print, table, with_notes};
use crate::settings::Settings;

/// Maximum number of requests of one run. This number of requests needs 3.2 GB of memory.
const REQUESTS_MAX: i64 = 50_000_000;

/// Play a trace in virtual time and report its latencies, without a cache and with one
///
/// hob's engine serves the requests of the trace on models of backing and flash. A trace of days
/// needs only seconds. Reports percentiles of the latency, also for each outcome, and the latency
/// over time. The cache has the settings that the daemon would choose for the same options. A cache
/// with two copies has two flash devices of the given type.
#[derive(Debug, Args)]
pub(crate) struct Latency {
    #[command(flatten)]
    source: Source,
    /// Size of the cache, including replicas
    #[arg(long, required_unless_present = "no_cache")]
    size: Option<Size>,
    /// Simulate only without a cache
    #[arg(long, conflicts_with_all = ["size", "settings", "flash"])]
    no_cache: bool,
    #[command(flatten)]
    settings: Settings,
    /// Type of the backing: 7.2k-raid5, 10k-raid5, 15k-raid5, ceph, nfs, cloud-general,
    /// cloud-provisioned or fixed:READ_MS,WRITE_MS [default: 7.2k-raid5]
    #[arg(long)]
    backing: Option<Backing>,
    /// Type of the cache's flash: sata, pcie, sata-current, nvme4 or nvme5 [default: sata]
    #[arg(long)]
    flash: Option<Flash>,
    /// Times at which requests are sent: original, a factor like x10 or x0.5, or asap for one at a
    /// time [default: original; asap for a trace without times]
    #[arg(long)]
    pace: Option<Pace>,
    /// Play the trace once before measuring
    #[arg(long)]
    warm: bool,
    /// Maximum number of requests to use, from the trace's start; a million requests need 65 MB of
    /// memory
    #[arg(long, value_name = "N", default_value_t = 2_000_000, value_parser = clap::value_parser!(u32).range(1..=REQUESTS_MAX))]
    limit: u32,
    /// Write latency over time to this file, comma-separated
    #[arg(long, value_name = "FILE")]
    csv: Option<PathBuf>,
    /// Draw latency over time into this file, as SVG
    #[arg(long, value_name = "FILE")]
    picture: Option<PathBuf>,
}

/// Returns the cache with the daemon's settings.
fn cache(size: Size, settings: Settings) -> anyhow::Result<CacheSetup> {
    let settings = hob_control::CacheSettings::from(settings);
    if settings.ram.is_some_and(|ram| ram.bytes() > 0) {
        anyhow::bail!("the model has no memory tier: omit --ram");
    }
    // The segment size depends on the block size, which a preset may define.
    let (config, _) = simulated_cache(size, &settings, segment_bytes(u64::MAX, 0))?;
    let segment_bytes = segment_bytes(size.bytes(), config.block_bytes);
    let (config, journal) = simulated_cache(size, &settings, segment_bytes)?;
    Ok(CacheSetup { bytes: size.bytes(), config, journal })
}

/// The result, with its parameters.
#[derive(Debug, Serialize)]
struct Report {
    trace: String,
    pace: Option<String>,
    cache: Option<CacheReport>,
    #[serde(flatten)]
    latencies: Latencies,
}

#[derive(Debug, Serialize)]
struct CacheReport {
    bytes: u64,
    block_bytes: u64,
    policy: &'static str,
    mode: &'static str,
    persistent: bool,
    layout: String,
    admission: String,
    copies: &'static str,
}

impl CacheReport {
    fn new(cache: &CacheSetup) -> CacheReport {
        let config = &cache.config;
        CacheReport {
            bytes: cache.bytes,
            block_bytes: config.block_bytes.into(),
            policy: config.policy.info().name,
            mode: config.mode.name(),
            persistent: cache.journal,
            layout: config.layout.to_string(),
            admission: config.admission.to_string(),
            copies: config.copies.name(),
        }
    }

    /// Describes the cache in sentences, without default settings.
    fn text(&self, flash: &str) -> String {
        let (size, block) = (Size(self.bytes), Size(self.block_bytes));
        let twice = if self.copies == Copies::One.name() { "" } else { "two devices, each " };
        let mut parts =
            vec![format!("{size} on {twice}{flash}"), format!("blocks of {block}"), self.policy.to_owned()];
        let unusual = [
            (self.mode, Mode::default().name()),
            (self.admission.as_str(), "always"),
            (self.layout.as_str(), &Layout::default().to_string()),
        ];
        parts.extend(unusual.iter().filter(|(is, usual)| is != usual).map(|(is, _)| (*is).to_owned()));
        if self.copies != Copies::One.name() {
            parts.push(format!("copies {}", self.copies));
        }
        parts.join(", ")
    }
}

pub(super) fn run(args: &Latency, global: &Global) -> anyhow::Result<()> {
    let cache = args.size.map(|size| cache(size, args.settings.clone())).transpose()?;
    let stop = interruption()?;
    let (material, remarks) = read_material(&args.source, args.limit, &stop)?;
    let options = Options {
        cache,
        backing: args.backing.unwrap_or_default(),
        flash: args.flash.unwrap_or_default(),
        pace: args.pace,
        warm: args.warm,
    };
    let bar = "{bar:40} {percent:>3} %  {msg}  {eta} left";
    let mut latencies = with_progress(bar, &stop, |progress| measure(material, &options, progress))?;
    latencies.notes.extend(remarks);
    let report = Report {
        trace: args.source.trace.display().to_string(),
        pace: args.pace.map(|pace| pace.to_string()),
        cache: cache.as_ref().map(CacheReport::new),
        latencies,
    };
    write_if(args.csv.as_ref(), || csv(&report.latencies))?;
    write_if(args.picture.as_ref(), || draw(&report))?;
    print(global.output, &report, |report| with_notes(show(report), &report.latencies.notes))
}

fn runs(latencies: &Latencies) -> impl Iterator<Item = (&'static str, &Played)> {
    [("without", &latencies.without)].into_iter().chain(latencies.with.iter().map(|with| ("with", with)))
}

fn show(report: &Report) -> String {
    let latencies = &report.latencies;
    [facts(report), classes(latencies), devices(latencies)].join("\n\n") + "\n"
}

fn facts(report: &Report) -> String {
    let Latencies { requests, span_s, is_warm, backing, flash, .. } = &report.latencies;
    let arrivals = match (span_s, &report.pace) {
        (None, _) => "one at a time".to_owned(),
        (Some(span_s), pace) => {
            let pace = pace.as_ref().map_or("original", String::as_str);
            format!("over {}, pace {pace}", Unit::Seconds.text(*span_s))
        }
    };
    let warm = if *is_warm { ", after the trace was played once" } else { "" };
    let mut facts = vec![
        ("trace", report.trace.clone()),
        ("requests", format!("{requests} {arrivals}{warm}")),
        ("backing", backing.clone()),
    ];
    if let Some(cache) = &report.cache {
        facts.push(("cache", cache.text(flash)));
    }
    pairs(facts)
}

fn classes(latencies: &Latencies) -> String {
    let columns = "CACHE|REQUESTS|COUNT:|MEAN:|P50:|P90:|P99:|P99.9:|MAX:";
    let mut rows = Vec::new();
    for (name, run) in runs(latencies) {
        let ops = [Some(&run.all), run.reads.as_ref(), run.writes.as_ref()];
        // Without a cache, all requests have the same outcome.
        let outcomes = if name == "with" { run.classes.as_slice() } else { &[] };
        rows.extend(ops.into_iter().flatten().chain(outcomes).map(|class| row(name, class)));
    }
    table(columns, rows)
}

fn row(name: &str, class: &Class) -> Vec<String> {
    let Class { class, requests, mean_ns, p50_ns, p90_ns, p99_ns, p999_ns, max_ns } = *class;
    let times = [mean_ns, p50_ns, p90_ns, p99_ns, p999_ns, max_ns].map(duration);
    [name.to_owned(), class.to_owned(), requests.to_string()].into_iter().chain(times).collect()
}

fn devices(latencies: &Latencies) -> String {
    let columns = "CACHE|READ HITS %:|FLASH I/O:|READ:|WRITTEN:|BACKING I/O:|READ:|WRITTEN:|IN FLIGHT:|\
        WAITED:";
    let row = |(name, run): (&str, &Played)| {
        let mut cells = vec![name.to_owned(), run.read_hit_ratio.map_or("-".to_owned(), percent)];
        for io in [run.flash, run.backing] {
            cells.extend([io.ios.to_string(), bytes(io.read_bytes), bytes(io.write_bytes)]);
        }
        cells.extend([run.in_flight_max.to_string(), run.waited.to_string()]);
        cells
    };
    table(columns, runs(latencies).map(row))
}

/// Returns one CSV line per interval and run. Values of an interval without requests are empty.
fn csv(latencies: &Latencies) -> String {
    #[derive(Serialize)]
    struct Line<'a> {
        cache: &'a str,
        #[serde(flatten)]
        interval: &'a Interval,
    }
    let lines = runs(latencies)
        .flat_map(|(cache, run)| run.series.iter().map(move |interval| Line { cache, interval }));
    output::csv("cache,start_s,first_request,requests,mean_ns,p99_ns,read_hit_ratio", lines)
}

/// Draws the mean and the 99th percentile of both runs over time. If requests arrived one at a
/// time, the position in the trace replaces the time.
fn draw(report: &Report) -> String {
    let latencies = &report.latencies;
    let x = match latencies.span_s {
        Some(_) => Axis::new("time", Unit::Seconds),
        None => Axis::new("requests before", Unit::Count),
    };
    let cache = report.cache.as_ref();
    let cache = cache.map_or(String::new(), |cache| format!(", with {}", cache.text(latencies.flash)));
    let mut chart = CurveChart::new("Latency over time", x, Axis::new("latency", Unit::Seconds).log())
        .subtitle(format!(
            "{}, {} requests on {}{cache}",
            report.trace, latencies.requests, latencies.backing
        ));
    for (name, run) in runs(latencies) {
        let points = |of: fn(&Interval) -> Option<u64>| {
            let y = move |interval: &Interval| of(interval).map_or(f64::NAN, |ns| ns as f64 / 1e9);
            let x = |interval: &Interval| interval.start_s.unwrap_or(interval.first_request as f64);
            run.series.iter().map(|interval| (x(interval), y(interval))).collect()
        };
        chart = chart
            .curve(Curve::new(format!("p99 {name} cache"), points(|interval| interval.p99_ns)))
            .curve(Curve::new(format!("mean {name} cache"), points(|interval| interval.mean_ns)));
    }
    curves(&chart)
}
