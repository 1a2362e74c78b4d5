//! `GET /metrics`: the daemon's metrics, for Prometheus and compatible programs.
//!
//! [`METRICS`] lists them. A [`Page`] is filled with the metrics of the daemon, then of the pools,
//! then of one disk after the other. So the counters of only one disk are in memory at a time. The
//! page is written as Prometheus text format 0.0.4 or as OpenMetrics 1.0.
//!
//! # Number of series
//! A disk has about 105 series, and 25 more for each outcome that has occurred: [`BOUNDS`] buckets
//! and three others. With more than [`DISKS_FINE_MAX`] disks, each disk has only one histogram
//! instead. Guests cannot choose a label value.

mod docs;
mod process;
mod table;

use std::fmt::Write as _;

use hob_control::{
    BackingState, CacheState, Cluster, Datastore, DeviceState, Disk, DiskQos, DiskState, HealthProblem, Pool,
    ProblemKind,
};
use hob_engine::histogram::Histogram;
use hob_engine::outcome::OUTCOMES;
use hob_engine::stats::{self, DiskStats};

use crate::hardware::DeviceCounts;
pub use docs::page as docs_page;
pub(crate) use process::Process;
use table::MetricContext;
pub(crate) use table::{Kind, METRICS, Metric, Source};

/// Number of buckets of a latency histogram, without the last bucket, which has no upper bound.
pub(crate) const BOUNDS: usize = 22;

/// Upper bound of the first bucket in nanoseconds, as a power of two. Each further bound is twice
/// the previous one. All bounds are also bounds of the engine's buckets, so every count is exact.
const FIRST_LOG2_NS: u32 = 12;

/// Initial capacity of a page in bytes.
const PAGE_BYTES: usize = 16 << 10;

/// Up to this number of disks, each outcome of each disk has a histogram, unless configured
/// otherwise: 20 MB of text at most.
pub(crate) const DISKS_FINE_MAX: usize = 256;

/// Text format of the metrics.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Form {
    #[default]
    Prometheus,
    /// OpenMetrics 1.0.
    OpenMetrics,
}

/// Granularity of latency histograms.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Latencies {
    /// One histogram for each outcome that has occurred.
    PerOutcome,
    /// One histogram per disk for all requests; its label `class` is `all`.
    PerDisk,
}

impl Latencies {
    /// Returns one histogram per outcome for up to [`DISKS_FINE_MAX`] disks, and one per disk for
    /// more disks.
    pub(crate) fn for_disks(disks: usize) -> Latencies {
        if disks <= DISKS_FINE_MAX { Latencies::PerOutcome } else { Latencies::PerDisk }
    }
}

/// Metrics of the daemon as a whole.
#[derive(Debug)]
pub(crate) struct Daemon {
    pub(crate) process: Process,
    /// State of the cluster membership, if there is one.
    pub(crate) cluster: Option<Cluster>,
    pub(crate) problems: Vec<HealthProblem>,
    /// For each shard, whether it answers.
    pub(crate) shards: Vec<bool>,
    /// Time to collect all values, in seconds.
    pub(crate) gathered_seconds: f64,
    /// Number of online disks whose statistics are missing.
    pub(crate) disks_missing: usize,
}

/// The page while it is filled: the lines of each metric, in the order of [`METRICS`].
#[derive(Debug)]
pub(crate) struct Page {
    form: Form,
    latencies: Latencies,
    bodies: Vec<String>,
}

impl Page {
    pub(crate) fn new(form: Form, latencies: Latencies) -> Page {
        Page { form, latencies, bodies: vec![String::new(); METRICS.len()] }
    }

    fn each(&mut self, mut write: impl FnMut(&Metric, &mut String)) {
        for (metric, body) in METRICS.iter().zip(&mut self.bodies) {
            write(metric, body);
        }
    }

    /// Adds the metrics of the daemon. Called once.
    pub(crate) fn add_daemon(&mut self, daemon: &Daemon) {
        self.each(|metric, body| match metric.source {
            Source::Daemon(value) => sample(body, metric, &[], value(daemon)),
            Source::Cluster(value) => {
                if let Some(cluster) = &daemon.cluster {
                    sample(body, metric, &[], value(cluster));
                }
            }
            Source::Build => sample(body, metric, &[env!("CARGO_PKG_VERSION")], 1.0),
            Source::Shards => {
                for (number, answers) in daemon.shards.iter().enumerate() {
                    sample(body, metric, &[&number.to_string()], f64::from(u8::from(*answers)));
                }
            }
            Source::Problems => {
                for kind in ProblemKind::ALL {
                    let count = daemon.problems.iter().filter(|problem| problem.kind == kind).count();
                    sample(body, metric, &[kind.name()], count as f64);
                }
            }
            _ => {}
        });
    }

    /// Adds a pool and its devices, with their counters as far as known.
    pub(crate) fn add_pool(&mut self, pool: &Pool, counts: &[Option<DeviceCounts>]) {
        self.each(|metric, body| match metric.source {
            Source::Pool(value) => sample(body, metric, &[&pool.name], value(pool)),
            Source::SharedCapacity(value) => {
                if let Some(shared) = &pool.shared {
                    sample(body, metric, &[&pool.name], value(shared));
                }
            }
            Source::Device(value) => {
                for device in &pool.devices {
                    sample(body, metric, &[&pool.name, &device.path], value(device));
                }
            }
            Source::DeviceIo(value) => {
                for (device, counts) in pool.devices.iter().zip(counts) {
                    if let Some(counts) = counts {
                        sample(body, metric, &[&pool.name, &device.path], value(counts));
                    }
                }
            }
            Source::DeviceStates => {
                for device in &pool.devices {
                    let labels = [pool.name.as_str(), &device.path];
                    let all = DeviceState::ALL.map(DeviceState::name);
                    states(body, metric, &labels, device.state.name(), &all);
                }
            }
            _ => {}
        });
    }

    /// Adds a disk, with its statistics if it is online.
    pub(crate) fn add_disk(&mut self, disk: &Disk, stats: Option<&DiskStats>) {
        let latencies = self.latencies;
        self.each(|metric, body| {
            add_view(body, metric, disk);
            if let Some(stats) = stats {
                add_figures(body, metric, disk, stats);
                if matches!(metric.source, Source::Latency) {
                    add_latencies(body, metric, latencies, &disk.name, stats);
                }
            }
        });
    }

    /// Adds the entitlements of disks, and the datastores.
    pub(crate) fn add_qos(&mut self, disks: &[DiskQos], datastores: &[Datastore]) {
        self.each(|metric, body| match metric.source {
            Source::Qos(value) => {
                for disk in disks {
                    value(disk).into_iter().for_each(|value| sample(body, metric, &[&disk.disk], value));
                }
            }
            Source::Datastore(value) => {
                for store in datastores {
                    value(store).into_iter().for_each(|value| sample(body, metric, &[&store.name], value));
                }
            }
            _ => {}
        });
    }

    /// Returns the text of the whole page.
    pub(crate) fn finish(self) -> String {
        let length: usize = self.bodies.iter().map(String::len).sum();
        let mut text = String::with_capacity(PAGE_BYTES + length);
        for (metric, body) in METRICS.iter().zip(&self.bodies) {
            if body.is_empty() {
                continue;
            }
            let (name, kind) = (self.form.family(metric), self.form.kind(metric.kind));
            let _ = write!(text, "# HELP {name} {}\n# TYPE {name} {kind}\n{body}", metric.help);
        }
        if self.form == Form::OpenMetrics {
            text.push_str("# EOF\n");
        }
        text
    }
}

impl Form {
    /// Returns the format that an `Accept` header asks for.
    pub(crate) fn accepted(header: &str) -> Form {
        let wants = |part: &str| part.trim().starts_with("application/openmetrics-text");
        if header.split(',').any(wants) { Form::OpenMetrics } else { Form::Prometheus }
    }

    pub(crate) fn media_type(self) -> &'static str {
        match self {
            Form::Prometheus => "text/plain; version=0.0.4; charset=utf-8",
            Form::OpenMetrics => "application/openmetrics-text; version=1.0.0; charset=utf-8",
        }
    }

    /// Returns the family name of a metric, which OpenMetrics writes without the suffix of its
    /// kind.
    fn family(self, metric: &Metric) -> String {
        match self {
            Form::Prometheus => metric.sample_name(),
            Form::OpenMetrics => metric.name.to_owned(),
        }
    }

    fn kind(self, kind: Kind) -> &'static str {
        match (kind, self) {
            (Kind::Counter, _) => "counter",
            (Kind::Histogram, _) => "histogram",
            (Kind::Info, Form::OpenMetrics) => "info",
            (Kind::Gauge | Kind::Info, _) => "gauge",
        }
    }
}

fn add_view(body: &mut String, metric: &Metric, disk: &Disk) {
    let name = disk.name.as_str();
    match (metric.source, &disk.cache) {
        (Source::Disk(value), _) => sample(body, metric, &[name], value(disk)),
        (Source::DiskStates, _) => {
            states(body, metric, &[name], disk.state.name(), &DiskState::ALL.map(DiskState::name));
        }
        (Source::Backing(value), _) => {
            if let Some(state) = &disk.backing_state {
                sample(body, metric, &[name], value(state));
            }
        }
        (Source::BackingStates, _) => {
            if let Some(state) = &disk.backing_state {
                states(body, metric, &[name], state.name(), &BackingState::NAMES);
            }
        }
        (Source::Cache(value), Some(cache)) => sample(body, metric, &[name], value(cache)),
        (Source::CacheStates, Some(cache)) => {
            states(body, metric, &[name], cache.state.name(), &CacheState::ALL.map(CacheState::name));
        }
        (Source::CacheInfo, Some(cache)) => {
            let persistent = if cache.persistent { "yes" } else { "no" };
            let labels =
                [name, &cache.pool, &cache.mode, &cache.policy, &cache.layout, &cache.admission, persistent];
            sample(body, metric, &labels, 1.0);
        }
        _ => {}
    }
}

fn add_figures(body: &mut String, metric: &Metric, disk: &Disk, stats: &DiskStats) {
    let name = disk.name.as_str();
    match (metric.source, &disk.cache) {
        (Source::Stats(value), _) => sample(body, metric, &[name], value(stats)),
        (Source::CacheStats(value), Some(cache)) if stats.cache != stats::CacheState::None => {
            let room = MetricContext { stats, block_bytes: cache.block_size.bytes() };
            sample(body, metric, &[name], value(&room));
        }
        (Source::Outcome(value), _) => {
            for (row, outcome) in OUTCOMES.iter().zip(&stats.outcomes) {
                sample(body, metric, &[name, row.class, row.reason], value(outcome));
            }
        }
        _ => {}
    }
}

fn add_latencies(body: &mut String, metric: &Metric, latencies: Latencies, disk: &str, stats: &DiskStats) {
    match latencies {
        Latencies::PerDisk => histogram(body, metric, &[disk, "all", ""], &stats.latency()),
        Latencies::PerOutcome => {
            let happened = OUTCOMES.iter().zip(&stats.outcomes).filter(|(_, outcome)| outcome.count > 0);
            for (row, outcome) in happened {
                histogram(body, metric, &[disk, row.class, row.reason], &outcome.latency);
            }
        }
    }
}

/// Writes one sample.
fn sample(body: &mut String, metric: &Metric, labels: &[&str], value: f64) {
    let name = metric.sample_name();
    line(body, &name, metric.source.labels(), labels, value);
}

/// Writes one sample per state: 1 for the current state, 0 for others.
fn states(body: &mut String, metric: &Metric, labels: &[&str], is: &str, all: &[&str]) {
    for state in all {
        sample(body, metric, &[labels, &[*state]].concat(), f64::from(u8::from(*state == is)));
    }
}

/// Writes a histogram: the count up to each bound, the sum of all latencies, and their number.
fn histogram(body: &mut String, metric: &Metric, labels: &[&str], latency: &Histogram) {
    let names = metric.source.labels();
    let bucket = format!("{}_bucket", metric.name);
    let mut buckets = latency.buckets().peekable();
    let mut count = 0;
    for bound_ns in bounds_ns() {
        while let Some((_, more)) = buckets.next_if(|(upper_ns, _)| *upper_ns <= bound_ns) {
            count += more;
        }
        let bound = (bound_ns as f64 / 1e9).to_string();
        line(body, &bucket, names, &[labels, &[&bound]].concat(), count as f64);
    }
    line(body, &bucket, names, &[labels, &["+Inf"]].concat(), latency.count() as f64);
    line(body, &format!("{}_sum", metric.name), names, labels, latency.sum_ns() as f64 / 1e9);
    line(body, &format!("{}_count", metric.name), names, labels, latency.count() as f64);
}

/// Returns the upper bound of each bucket in nanoseconds.
pub(crate) fn bounds_ns() -> impl Iterator<Item = u64> {
    (FIRST_LOG2_NS..).take(BOUNDS).map(|log| (1 << log) - 1)
}

/// Writes `name{label="value",…} value`, without the labels that have no value.
fn line(body: &mut String, name: &str, labels: &[&str], values: &[&str], value: f64) {
    body.push_str(name);
    for (index, (label, value)) in labels.iter().zip(values).enumerate() {
        let before = if index == 0 { '{' } else { ',' };
        let _ = write!(body, "{before}{label}=\"");
        for character in value.chars() {
            match character {
                '\\' => body.push_str("\\\\"),
                '"' => body.push_str("\\\""),
                '\n' => body.push_str("\\n"),
                other => body.push(other),
            }
        }
        body.push('"');
    }
    let end = if values.is_empty() { "" } else { "}" };
    let _ = writeln!(body, "{end} {value}");
}

#[cfg(test)]
mod tests;
