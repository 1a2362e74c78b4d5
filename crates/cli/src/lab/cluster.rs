//! `hob lab cluster`: simulates many hosts and one etcd: the load on etcd, and how long disks of
//! killed hosts are offline.

use std::path::PathBuf;

use clap::Args;
use hob_lab::picture::{Axis, Curve, CurveChart, Unit, curves};
use hob_lab::scale::owners::{EtcdCosts, Outcome, Owners, Pacing, Traffic, play};
use indicatif::{ProgressBar, ProgressStyle};
use serde::Serialize;

use super::scale::check;
use super::{interruption, write_if};
use crate::Global;
use crate::output::{print, table};

const SECOND_NS: u64 = 1_000_000_000;

/// Time that a member of etcd 3.4 with four cores takes for a request over its JSON gateway, in
/// microseconds: a quarter of the measured processor time (docs/LAB.md).
const REQUEST_US: u64 = 190;
/// Additional time that etcd takes for a change, nanoseconds.
const CHANGE_NS: u64 = 110_000;
/// Additional time that etcd takes for each key that a request reads, nanoseconds.
const KEY_NS: u64 = 11_000;
/// Additional time that etcd takes for a notification, nanoseconds.
const NEWS_NS: u64 = 33_000;
/// Assumed time until a majority of etcd's members has stored a change, nanoseconds.
const COMMIT_NS: u64 = 5_000_000;
/// Network latency between a host and etcd in one direction, nanoseconds.
const WAY_NS: u64 = 300_000;

/// Seconds until the load on etcd is steady when hosts poll.
const POLL_WARM_S: u64 = 6;
const POLL_STEADY_S: u64 = 6;
/// Seconds until the load on etcd is steady when hosts watch etcd, which then read all keys about
/// once a minute.
const WATCH_WARM_S: u64 = 75;
const WATCH_STEADY_S: u64 = 60;

/// Maximum time in seconds that the model waits for a disk.
const AFTER_S: u64 = 30;

/// Simulate many hosts that share an etcd: the load on etcd, and how long disks of killed hosts are
/// offline
///
/// One host serves each disk, and some other hosts are also configured with the disk. There are
/// three runs for each number of hosts. In the run `poll`, each host asks etcd once a second about
/// every disk that it waits for, and one host is killed. In the first run `watch`, the hosts watch
/// etcd, as hob does, and one host is killed. In the second run `watch`, a quarter of the hosts is
/// killed. Backings and caches are not simulated.
#[derive(Debug, Args)]
pub(crate) struct ClusterArgs {
    /// Numbers of hosts
    #[arg(long, value_name = "N", value_delimiter = ',', default_value = "2,4,8,16,32,64",
          value_parser = clap::value_parser!(u32).range(2..=256))]
    hosts: Vec<u32>,
    /// Number of disks per host
    #[arg(long, value_name = "N", default_value_t = 156, value_parser = clap::value_parser!(u32).range(1..=1024))]
    disks_per_host: u32,
    /// Number of hosts that can serve each disk
    #[arg(long, value_name = "N", default_value_t = 24, value_parser = clap::value_parser!(u32).range(2..=256))]
    known_by: u32,
    /// Lease of a host, seconds
    #[arg(long, value_name = "S", default_value_t = 10, value_parser = clap::value_parser!(u64).range(3..=600))]
    lease_seconds: u64,
    /// Time after the end of a lease before another host takes the disks, seconds
    #[arg(long, value_name = "S", default_value_t = 5, value_parser = clap::value_parser!(u64).range(0..=30))]
    settle_seconds: u64,
    /// Time that etcd takes for a request, microseconds
    #[arg(long, alias = "question-us", value_name = "US", default_value_t = REQUEST_US,
          value_parser = clap::value_parser!(u64).range(1..=100_000))]
    request_us: u64,
    /// Draw the load on etcd into this file, as SVG
    #[arg(long, value_name = "FILE")]
    picture: Option<PathBuf>,
    /// Draw how long disks are offline into this file, as SVG
    #[arg(long, alias = "away-picture", value_name = "FILE")]
    offline_picture: Option<PathBuf>,
}

#[derive(Debug, Serialize)]
struct Report {
    known_by: u32,
    lease_seconds: u64,
    settle_seconds: u64,
    request_us: u64,
    rows: Vec<Row>,
}

/// Requests to etcd per second.
#[derive(Debug, Serialize)]
struct Requests {
    requests: f64,
    renewals: f64,
    reads: f64,
    transactions: f64,
    notifications: f64,
    bytes: f64,
}

impl From<Traffic> for Requests {
    fn from(traffic: Traffic) -> Requests {
        let requests = traffic.questions();
        let Traffic { renewals, looks: reads, takes: transactions, news: notifications, bytes } = traffic;
        Requests { requests, renewals, reads, transactions, notifications, bytes }
    }
}

#[derive(Debug, Serialize)]
struct Row {
    hosts: u32,
    disks: u32,
    method: &'static str,
    killed: u32,
    steady: Requests,
    /// Requests in the busiest second after the kill.
    busiest: Requests,
    disks_offline: usize,
    disks_acquired: usize,
    /// Seconds until this fraction of the disks was acquired; none if some were not.
    offline_p50_s: Option<f64>,
    offline_p99_s: Option<f64>,
    offline_max_s: Option<f64>,
    transactions_per_disk: f64,
    leases_lost: usize,
    longest_request_ms: f64,
}

impl Row {
    fn new(owners: &Owners, method: &'static str, outcome: &Outcome) -> Row {
        let offline = |percent| outcome.away_at(percent).map(|ns| ns as f64 / 1e9);
        Row {
            hosts: owners.hosts as u32,
            disks: owners.disks as u32,
            method,
            killed: owners.killed as u32,
            steady: outcome.steady.into(),
            busiest: outcome.busiest.into(),
            disks_offline: outcome.orphans,
            disks_acquired: outcome.away_ns.len(),
            offline_p50_s: offline(50),
            offline_p99_s: offline(99),
            offline_max_s: offline(100),
            transactions_per_disk: outcome.takes_a_disk,
            leases_lost: outcome.leases_lost,
            longest_request_ms: outcome.longest_ns as f64 / 1e6,
        }
    }
}

/// How hosts learn that a disk is free: each host asks etcd again and again.
const POLL: &str = "poll";
/// How hosts learn that a disk is free: etcd notifies the hosts.
const WATCH: &str = "watch";

pub(super) fn run(args: &ClusterArgs, global: &Global) -> anyhow::Result<()> {
    let stop = interruption()?;
    let plan: Vec<Owners> = args.hosts.iter().flat_map(|hosts| plan(args, *hosts)).collect();
    let style = ProgressStyle::with_template("{bar:40} {percent:>3} %  {msg}")?;
    let bar = ProgressBar::new(plan.iter().map(|owners| owners.hosts as u64).sum()).with_style(style);
    let mut rows = Vec::new();
    for owners in plan {
        let method = if owners.pacing == Pacing::Looks { POLL } else { WATCH };
        bar.set_message(format!("{} hosts that {method}, {} killed", owners.hosts, owners.killed));
        rows.push(Row::new(&owners, method, &play(&owners, || check(&stop))?));
        bar.inc(owners.hosts as u64);
    }
    bar.finish_and_clear();
    let ClusterArgs { known_by, lease_seconds, settle_seconds, request_us, .. } = *args;
    let report = Report { known_by, lease_seconds, settle_seconds, request_us, rows };
    write_if(args.picture.as_ref(), || draw_requests(&report))?;
    write_if(args.offline_picture.as_ref(), || draw_offline(&report))?;
    print(global.output, &report, show)
}

/// Returns the simulations for this number of hosts.
fn plan(args: &ClusterArgs, hosts: u32) -> Vec<Owners> {
    let looks = Owners {
        hosts: hosts as usize,
        disks: (hosts * args.disks_per_host) as usize,
        known_by: args.known_by as usize,
        killed: 1,
        lease_ns: args.lease_seconds * SECOND_NS,
        settle_ns: args.settle_seconds * SECOND_NS,
        pacing: Pacing::Looks,
        etcd: EtcdCosts {
            question_ns: args.request_us * 1000,
            change_ns: CHANGE_NS,
            key_ns: KEY_NS,
            news_ns: NEWS_NS,
            commit_ns: COMMIT_NS,
            way_ns: WAY_NS,
        },
        warm_s: POLL_WARM_S,
        steady_s: POLL_STEADY_S,
        after_s: AFTER_S,
        seed: 1,
    };
    let news =
        Owners { pacing: Pacing::ClusterEvent, warm_s: WATCH_WARM_S, steady_s: WATCH_STEADY_S, ..looks };
    let quarter = Owners { killed: (hosts / 4) as usize, ..news };
    let mut plan = vec![looks, news];
    plan.extend((quarter.killed > 1).then_some(quarter));
    plan
}

fn show(report: &Report) -> String {
    let columns = "HOSTS:|DISKS:|METHOD|KILLED:|REQUESTS/S:|KB/S:|MAX/S:|KB/S:|OFFLINE P50 S:|P99 S:|MAX S:|\
        TRANSACTIONS/DISK:|LEASES LOST:";
    let kilobytes = |bytes: f64| format!("{:.0}", bytes / 1e3);
    let seconds = |s: Option<f64>| s.map_or_else(|| format!("> {AFTER_S}"), |s| format!("{s:.1}"));
    let row = |row: &Row| {
        vec![
            row.hosts.to_string(),
            row.disks.to_string(),
            row.method.to_owned(),
            row.killed.to_string(),
            format!("{:.0}", row.steady.requests),
            kilobytes(row.steady.bytes),
            format!("{:.0}", row.busiest.requests),
            kilobytes(row.busiest.bytes),
            seconds(row.offline_p50_s),
            seconds(row.offline_p99_s),
            seconds(row.offline_max_s),
            format!("{:.2}", row.transactions_per_disk),
            row.leases_lost.to_string(),
        ]
    };
    table(columns, report.rows.iter().map(row))
}

/// Returns the points of one series: number of hosts, and the value that `of` takes from the row.
fn points(report: &Report, method: &str, of: impl Fn(&Row) -> Option<f64>) -> Vec<(f64, f64)> {
    let rows = report.rows.iter().filter(|row| row.method == method && row.killed == 1);
    rows.filter_map(|row| Some((f64::from(row.hosts), of(row)?))).collect()
}

fn draw_requests(report: &Report) -> String {
    let curve = |name, method, of: fn(&Row) -> f64| {
        Curve::new(name, points(report, method, |row| Some(of(row)))).dots()
    };
    let chart = CurveChart::new(
        "Load of a cluster's hosts on etcd",
        Axis::new("hosts", Unit::Count).log(),
        Axis::new("requests per second", Unit::Count).log(),
    )
    .subtitle(format!(
        "at most {} disks per host, each configured on {} hosts; lease {} s",
        report.rows.iter().map(|row| row.disks / row.hosts).max().unwrap_or(0),
        report.known_by,
        report.lease_seconds
    ))
    .curve(curve("polling", POLL, |row| row.steady.requests))
    .curve(curve("watching, failover", WATCH, |row| row.busiest.requests))
    .curve(curve("watching, steady", WATCH, |row| row.steady.requests));
    curves(&chart)
}

fn draw_offline(report: &Report) -> String {
    let mut chart = CurveChart::new(
        "How long disks of a killed host are offline",
        Axis::new("hosts", Unit::Count).log(),
        Axis::new("seconds", Unit::Count),
    )
    .subtitle(format!(
        "lease {} s, settle time {} s; one host killed",
        report.lease_seconds, report.settle_seconds
    ));
    for (name, method, of) in [
        ("polling: all disks", POLL, (|row| row.offline_max_s) as fn(&Row) -> Option<f64>),
        ("watching: all disks", WATCH, |row| row.offline_max_s),
        ("watching: half of the disks", WATCH, |row| row.offline_p50_s),
    ] {
        chart = chart.curve(Curve::new(name, points(report, method, of)).dots());
    }
    curves(&chart)
}
