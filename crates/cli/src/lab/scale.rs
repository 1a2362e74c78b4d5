//! `hob lab scale`: simulates many hosts on one shared store, and measures whether each disk gets
//! its entitlement on every host.

use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::bail;
use clap::Args;
use hob_lab::picture::{Axis, Curve, CurveChart, Unit, curves};
use hob_lab::scale::{Knowledge, Outcome, Scale, play};
use indicatif::{ProgressBar, ProgressStyle};
use serde::Serialize;

use super::{interruption, write_if};
use crate::Global;
use crate::output::{print, table};

/// Number of I/Os that the store serves at once per host. With [`SERVICE_NS`], this gives 1 250
/// I/Os per second and host.
const SERVERS_A_HOST: usize = 8;
/// Time that the store takes for one I/O, nanoseconds.
const SERVICE_NS: u64 = 6_400_000;

/// Latency above which hosts throttle, nanoseconds.
const THRESHOLD_NS: u64 = 15_000_000;

/// Time until all hosts know a report, nanoseconds: one write and one read.
const DELAY_NS: u64 = 20_000_000;

/// Seconds of virtual time before the measurement.
const WARM_S: u64 = 30;

/// Simulate many hosts on one shared store, and measure whether disks get their entitlement
///
/// The store grows with the number of hosts. Disks differ in shares, reservations, limits and
/// demand, and are spread unevenly. Three runs for each number of hosts: unthrottled; each host
/// throttled by its own latency ('hob datastore set --throttle auto'); and hosts of a cluster,
/// which report to each other.
#[derive(Debug, Args)]
pub(crate) struct ScaleArgs {
    /// Numbers of hosts
    #[arg(long, value_name = "N", value_delimiter = ',', default_value = "1,2,4,8,16,32,64",
          value_parser = clap::value_parser!(u32).range(1..=1024))]
    hosts: Vec<u32>,
    /// Mean number of disks per host
    #[arg(long, value_name = "N", default_value_t = 156, value_parser = clap::value_parser!(u32).range(1..=4096))]
    disks_per_host: u32,
    /// Seconds of virtual time to measure, after 30 seconds of warm-up
    #[arg(long, value_name = "S", default_value_t = 60, value_parser = clap::value_parser!(u64).range(1..=3600))]
    seconds: u64,
    /// Interval of a host's reports to the cluster, milliseconds
    #[arg(long, value_name = "MS", default_value_t = 1000, value_parser = clap::value_parser!(u64).range(50..=4000))]
    every_ms: u64,
    /// Draw the deviation of disks from their entitlement into this file, as SVG
    #[arg(long, value_name = "FILE")]
    picture: Option<PathBuf>,
}

#[derive(Debug, Serialize)]
struct Report {
    seconds: u64,
    every_ms: u64,
    rows: Vec<Row>,
}

#[derive(Debug, Serialize)]
struct Row {
    hosts: u32,
    disks: u32,
    hosts_know: &'static str,
    /// Rate in units per second.
    rate: f64,
    latency_ms: f64,
    /// Deviation relative to the entitlement.
    error_p50: f64,
    error_p95: f64,
    error_p99: f64,
    reservations: usize,
    reservations_missed: usize,
    reports_per_s: f64,
    deliveries_per_s: f64,
}

impl Row {
    fn new(scale: &Scale, hosts_know: &'static str, outcome: &Outcome) -> Row {
        Row {
            hosts: scale.hosts as u32,
            disks: scale.disks as u32,
            hosts_know,
            rate: outcome.rate,
            latency_ms: outcome.latency_ms,
            error_p50: outcome.error_at(50),
            error_p95: outcome.error_at(95),
            error_p99: outcome.error_at(99),
            reservations: outcome.reserved,
            reservations_missed: outcome.missed,
            reports_per_s: outcome.reports,
            deliveries_per_s: outcome.deliveries,
        }
    }
}

pub(super) fn run(args: &ScaleArgs, global: &Global) -> anyhow::Result<()> {
    let stop = interruption()?;
    let every_ns = args.every_ms * 1_000_000;
    let kinds = [
        ("unthrottled", Knowledge::Unthrottled),
        ("latency", Knowledge::Latency),
        ("reports", Knowledge::Reports { every_ns, delay_ns: DELAY_NS }),
    ];
    let plan: Vec<_> = args.hosts.iter().flat_map(|hosts| kinds.map(|kind| (*hosts, kind))).collect();
    let style = ProgressStyle::with_template("{bar:40} {percent:>3} %  {msg}")?;
    let bar = ProgressBar::new(plan.iter().map(|(hosts, _)| u64::from(*hosts)).sum()).with_style(style);
    let mut rows = Vec::new();
    for (hosts, (name, knowledge)) in plan {
        bar.set_message(format!("{hosts} hosts, {name}"));
        let scale = Scale {
            hosts: hosts as usize,
            disks: (hosts * args.disks_per_host) as usize,
            servers: hosts as usize * SERVERS_A_HOST,
            service_ns: SERVICE_NS,
            threshold_ns: THRESHOLD_NS,
            knowledge,
            warm_s: WARM_S,
            seconds: args.seconds,
            seed: 1,
        };
        rows.push(Row::new(&scale, name, &play(&scale, || check(&stop))?));
        bar.inc(u64::from(hosts));
    }
    bar.finish_and_clear();
    let report = Report { seconds: args.seconds, every_ms: args.every_ms, rows };
    write_if(args.picture.as_ref(), || draw(&report))?;
    print(global.output, &report, show)
}

pub(super) fn check(stop: &AtomicBool) -> anyhow::Result<()> {
    if stop.load(Ordering::Relaxed) {
        bail!("interrupted");
    }
    Ok(())
}

fn show(report: &Report) -> String {
    let columns = "HOSTS:|DISKS:|HOSTS KNOW|UNITS/S:|LATENCY MS:|ERROR P50 %:|P95 %:|P99 %:|\
        RESERVATIONS MISSED:|REPORTS/S:|DELIVERIES/S:";
    let percent = |part: f64| format!("{:.1}", part * 100.0);
    let row = |row: &Row| {
        vec![
            row.hosts.to_string(),
            row.disks.to_string(),
            row.hosts_know.to_owned(),
            format!("{:.0}", row.rate),
            format!("{:.1}", row.latency_ms),
            percent(row.error_p50),
            percent(row.error_p95),
            percent(row.error_p99),
            format!("{} of {}", row.reservations_missed, row.reservations),
            format!("{:.0}", row.reports_per_s),
            format!("{:.0}", row.deliveries_per_s),
        ]
    };
    table(columns, report.rows.iter().map(row))
}

fn draw(report: &Report) -> String {
    let mut chart = CurveChart::new(
        "Deviation of disks from their entitlement, by number of hosts that share a datastore",
        Axis::new("hosts", Unit::Count).log(),
        Axis::new("deviation of 95 % of the disks, at most", Unit::Percent).log(),
    )
    .subtitle(format!("{} s of virtual time; reports every {} ms", report.seconds, report.every_ms));
    for (name, words) in [
        ("unthrottled", "unthrottled"),
        ("latency", "throttled by own latency"),
        ("reports", "throttled by reports"),
    ] {
        let rows = report.rows.iter().filter(|row| row.hosts_know == name);
        let points = rows.map(|row| (f64::from(row.hosts), row.error_p95)).collect();
        chart = chart.curve(Curve::new(words, points).dots());
    }
    curves(&chart)
}
