//! `GET /metrics`: what the daemon counts, for Prometheus and what reads the same text.
//!
//! [`METRICS`] says what there is. A [`Page`] is filled with the daemon, its pools and its disks one by one, so that no
//! more than one disk's figures are held at a time, and is written in one of two forms: Prometheus' text format 0.0.4, or
//! OpenMetrics 1.0 for who asks for that.
//!
//! # How many series
//! Per disk about 105, and 25 for each outcome that has happened: [`BOUNDS`] buckets and three more. With more than
//! [`DISKS_FINE_MAX`] disks there is one histogram per disk instead. There are no labels that guests choose.

mod docs;
mod process;
mod table;

use std::fmt::Write as _;

use hob_control::{BackingState, Cluster, Datastore, Disk, DiskQos, HealthProblem, Pool, ProblemKind};
use hob_engine::histogram::Histogram;
use hob_engine::outcome::OUTCOMES;
use hob_engine::stats::{self, DiskStats};

use crate::daemon::hardware::DeviceCounts;
pub(crate) use docs::page as docs_page;
pub(crate) use process::Process;
use table::{CACHE_STATES, DEVICE_STATES, DISK_STATES, MetricContext};
pub(crate) use table::{Kind, METRICS, Metric, Source};

/// Buckets of a histogram of latencies, without the one that has no bound.
pub(crate) const BOUNDS: usize = 22;

/// The first one is of requests that took less than that many nanoseconds, as a power of two; each further one is twice
/// as wide. All of them are bounds of the engine's own buckets, so that every count is exact.
const FIRST_LOG2_NS: u32 = 12;

/// Bytes of text for which a page has room at first.
const PAGE_BYTES: usize = 16 << 10;

/// Disks up to which there is a histogram for each of their outcomes, unless somebody wants more or fewer: 20 MB of text at the
/// very most.
pub(crate) const DISKS_FINE_MAX: usize = 256;

/// The text's form.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Form {
    /// Prometheus' text format 0.0.4.
    #[default]
    Prometheus,
    /// OpenMetrics 1.0.
    OpenMetrics,
}

/// How finely latencies are told apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Latencies {
    /// One histogram for each outcome that has happened.
    PerOutcome,
    /// One for all requests of a disk; its class is `all`.
    PerDisk,
}

impl Latencies {
    /// What suits so many disks.
    pub(crate) fn for_disks(disks: usize) -> Latencies {
        if disks <= DISKS_FINE_MAX { Latencies::PerOutcome } else { Latencies::PerDisk }
    }
}

/// What is said of the daemon as a whole.
#[derive(Debug)]
pub(crate) struct Daemon {
    /// Its process.
    pub(crate) process: Process,
    /// As a member of a cluster, if it is in one.
    pub(crate) cluster: Option<Cluster>,
    /// What is wrong.
    pub(crate) problems: Vec<HealthProblem>,
    /// For each shard: does it answer?
    pub(crate) shards: Vec<bool>,
    /// How long it took to gather all this, seconds.
    pub(crate) gathered_seconds: f64,
    /// Disks online that did not say their figures.
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
    /// An empty one.
    pub(crate) fn new(form: Form, latencies: Latencies) -> Page {
        Page { form, latencies, bodies: vec![String::new(); METRICS.len()] }
    }

    fn each(&mut self, mut write: impl FnMut(&Metric, &mut String)) {
        for (metric, body) in METRICS.iter().zip(&mut self.bodies) {
            write(metric, body);
        }
    }

    /// Adds the daemon. Called once.
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

    /// Adds a pool and its devices, with what each has done if that is known.
    pub(crate) fn add_pool(&mut self, pool: &Pool, counts: &[Option<DeviceCounts>]) {
        self.each(|metric, body| match metric.source {
            Source::Pool(value) => sample(body, metric, &[&pool.name], value(pool)),
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
                    states(body, metric, &labels, device.state, &DEVICE_STATES);
                }
            }
            _ => {}
        });
    }

    /// Adds a disk, with its figures if it is online.
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

    /// Adds what disks are due, and datastores.
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

    /// The whole text.
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
    /// The form that an `Accept` header asks for.
    pub(crate) fn accepted(header: &str) -> Form {
        let wants = |part: &str| part.trim().starts_with("application/openmetrics-text");
        if header.split(',').any(wants) { Form::OpenMetrics } else { Form::Prometheus }
    }

    /// The media type that it is announced with.
    pub(crate) fn media_type(self) -> &'static str {
        match self {
            Form::Prometheus => "text/plain; version=0.0.4; charset=utf-8",
            Form::OpenMetrics => "application/openmetrics-text; version=1.0.0; charset=utf-8",
        }
    }

    /// The name above a metric's values: OpenMetrics has it without the suffix of its kind.
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
        (Source::DiskStates, _) => states(body, metric, &[name], disk.state, &DISK_STATES),
        (Source::Backing(value), _) => {
            if let Some(state) = &disk.backing_state {
                sample(body, metric, &[name], value(state));
            }
        }
        (Source::BackingStates, _) => {
            if let Some(state) = &disk.backing_state {
                let all = BackingState::NAMES.map(|name| (name, name));
                states(body, metric, &[name], state.name(), &all);
            }
        }
        (Source::Cache(value), Some(cache)) => sample(body, metric, &[name], value(cache)),
        (Source::CacheStates, Some(cache)) => states(body, metric, &[name], cache.state, &CACHE_STATES),
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

/// One value.
fn sample(body: &mut String, metric: &Metric, labels: &[&str], value: f64) {
    let name = metric.sample_name();
    line(body, &name, metric.source.labels(), labels, value);
}

/// One value for each state: 1 for the one it is.
fn states<S: PartialEq>(body: &mut String, metric: &Metric, labels: &[&str], is: S, all: &[(S, &str)]) {
    for (state, word) in all {
        sample(body, metric, &[labels, &[*word]].concat(), f64::from(u8::from(*state == is)));
    }
}

/// Requests that took up to each bound, the sum of all latencies, and their number.
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

/// The largest latency of each bucket, nanoseconds.
pub(crate) fn bounds_ns() -> impl Iterator<Item = u64> {
    (FIRST_LOG2_NS..).take(BOUNDS).map(|log| (1 << log) - 1)
}

/// `name{label="value",…} value`. Labels that have no value in `values` do not stand there.
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
