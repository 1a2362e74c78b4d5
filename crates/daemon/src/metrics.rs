//! `GET /metrics`: the daemon's metrics, for Prometheus and compatible programs.
//!
//! [`METRICS`] lists them. A [`Page`] is filled with the metrics of the daemon, then of the pools,
//! then of one disk after the other. So the counters of only one disk are in memory at a time. The
//! page is written as Prometheus text format 0.0.4 or as OpenMetrics 1.0.
//!
//! # Number of series
//! A disk without a cache has about 100 series, and 25 more for each outcome that has occurred:
//! [`BOUNDS`] buckets and three others. With more than [`DISKS_FINE_MAX`] disks, each disk has at
//! most one histogram, and only those outcomes that have occurred or are failures. An idle disk
//! then has at most 5 KiB of text. Guests cannot choose a label value.

mod docs;
mod process;
mod table;

use std::fmt::Write as _;

use hob_control::{
    BackingState, Cache, CacheState, Cluster, Datastore, DeviceState, Disk, DiskQos, DiskState,
    HealthProblem, Pool, ProblemKind,
};
use hob_engine::histogram::Histogram;
use hob_engine::outcome::{OUTCOMES, OutcomeInfo};
use hob_engine::stats::{self, DiskStats, OutcomeStats};

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

/// Room for the two lines above the samples of each metric, bytes.
const HEAD_BYTES: usize = 256;

/// Classes of the outcomes of requests that failed, or that flash could not serve. These outcomes
/// always have a value, so that Prometheus sees the increase from 0 to the first failure.
const FAILURES: [&str; 3] = ["flash-error", "backing-error", "refused"];

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
    /// One histogram per disk for all requests; its label `class` is `all`. Of the outcomes, only
    /// failures and those that have occurred have values.
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
    families: Vec<Family>,
    /// The label values of the bounds of a histogram.
    bounds: Vec<String>,
}

/// The lines of one metric.
#[derive(Debug)]
struct Family {
    metric: &'static Metric,
    /// Name of the samples, without the suffixes of a histogram.
    name: String,
    lines: String,
}

/// The first labels of a sample as text, such as `{disk="web"`, without the closing brace. They
/// name the object, and are escaped once for all of its samples.
#[derive(Debug, Default)]
struct Labels {
    text: String,
    count: usize,
}

impl Labels {
    fn new<const N: usize>(labels: [(&str, &str); N]) -> Labels {
        let mut text = String::new();
        for (index, (name, value)) in labels.into_iter().enumerate() {
            push_label(&mut text, index, name, value);
        }
        Labels { text, count: N }
    }

    fn of_disk(name: &str) -> Labels {
        Labels::new([("disk", name)])
    }
}

impl Page {
    pub(crate) fn new(form: Form, latencies: Latencies) -> Page {
        let families = METRICS.iter().map(Family::new).collect();
        Page { form, latencies, families, bounds: bound_labels() }
    }

    /// Adds the metrics of the daemon. Called once.
    pub(crate) fn add_daemon(&mut self, daemon: &Daemon) {
        let none = Labels::default();
        for family in &mut self.families {
            match family.metric.source {
                Source::Daemon(value) => family.sample(&none, &[], value(daemon)),
                Source::Cluster(value) => {
                    if let Some(cluster) = &daemon.cluster {
                        family.sample(&none, &[], value(cluster));
                    }
                }
                Source::Build => family.sample(&none, &[env!("CARGO_PKG_VERSION")], 1.0),
                Source::Shards => {
                    for (number, answers) in daemon.shards.iter().enumerate() {
                        family.sample(&none, &[&number.to_string()], f64::from(u8::from(*answers)));
                    }
                }
                Source::Problems => {
                    for kind in ProblemKind::ALL {
                        let count = daemon.problems.iter().filter(|problem| problem.kind == kind).count();
                        family.sample(&none, &[kind.name()], count as f64);
                    }
                }
                _ => {}
            }
        }
    }

    /// Adds a pool and its devices, with their counters as far as known.
    pub(crate) fn add_pool(&mut self, pool: &Pool, counts: &[Option<DeviceCounts>]) {
        let labels = Labels::new([("pool", pool.name.as_str())]);
        for family in &mut self.families {
            match family.metric.source {
                Source::Pool(value) => family.sample(&labels, &[], value(pool)),
                Source::SharedCapacity(value) => {
                    if let Some(shared) = &pool.shared {
                        family.sample(&labels, &[], value(shared));
                    }
                }
                Source::Device(value) => {
                    for device in &pool.devices {
                        family.sample(&labels, &[&device.path], value(device));
                    }
                }
                Source::DeviceIo(value) => {
                    for (device, counts) in pool.devices.iter().zip(counts) {
                        if let Some(counts) = counts {
                            family.sample(&labels, &[&device.path], value(counts));
                        }
                    }
                }
                Source::DeviceStates => {
                    for device in &pool.devices {
                        let labels =
                            Labels::new([("pool", pool.name.as_str()), ("device", device.path.as_str())]);
                        family.states(&labels, device.state.name(), &DeviceState::ALL.map(DeviceState::name));
                    }
                }
                _ => {}
            }
        }
    }

    /// Adds a disk, with its statistics if it is online.
    pub(crate) fn add_disk(&mut self, disk: &Disk, stats: Option<&DiskStats>) {
        let labels = Labels::of_disk(&disk.name);
        for family in &mut self.families {
            family.add_view(&labels, disk);
            let Some(stats) = stats else { continue };
            family.add_figures(&labels, disk, stats);
            match family.metric.source {
                Source::Outcome(value) => family.add_outcomes(&labels, value, self.latencies, stats),
                Source::Latency => family.add_latencies(&labels, self.latencies, stats, &self.bounds),
                _ => {}
            }
        }
    }

    /// Adds the entitlements of disks, and the datastores.
    pub(crate) fn add_qos(&mut self, disks: &[DiskQos], datastores: &[Datastore]) {
        let of_disks: Vec<Labels> = disks.iter().map(|disk| Labels::of_disk(&disk.disk)).collect();
        for family in &mut self.families {
            match family.metric.source {
                Source::Qos(value) => {
                    for (labels, disk) in of_disks.iter().zip(disks) {
                        value(disk).into_iter().for_each(|value| family.sample(labels, &[], value));
                    }
                }
                Source::Datastore(value) => {
                    for store in datastores {
                        let labels = Labels::new([("datastore", store.name.as_str())]);
                        value(store).into_iter().for_each(|value| family.sample(&labels, &[], value));
                    }
                }
                _ => {}
            }
        }
    }

    /// Returns the text of the whole page.
    pub(crate) fn finish(self) -> String {
        let length: usize = self.families.iter().map(|family| HEAD_BYTES + family.lines.len()).sum();
        let mut text = String::with_capacity(length);
        for Family { metric, lines, .. } in self.families.iter().filter(|family| !family.lines.is_empty()) {
            let (name, kind) = (self.form.family(metric), self.form.kind(metric.kind));
            let _ = write!(text, "# HELP {name} {}\n# TYPE {name} {kind}\n{lines}", metric.help);
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

impl Family {
    fn new(metric: &'static Metric) -> Family {
        Family { metric, name: metric.sample_name(), lines: String::new() }
    }

    fn add_view(&mut self, labels: &Labels, disk: &Disk) {
        match (self.metric.source, &disk.cache) {
            (Source::Disk(value), _) => self.sample(labels, &[], value(disk)),
            (Source::DiskStates, _) => {
                self.states(labels, disk.state.name(), &DiskState::ALL.map(DiskState::name));
            }
            (Source::Backing(value), _) => {
                if let Some(state) = &disk.backing_state {
                    self.sample(labels, &[], value(state));
                }
            }
            (Source::BackingStates, _) => {
                if let Some(state) = &disk.backing_state {
                    self.states(labels, state.name(), &BackingState::NAMES);
                }
            }
            (Source::Cache(value), Some(cache)) => self.sample(labels, &[], value(cache)),
            (Source::FlashBudget(value), Some(cache)) => {
                if let Some(writes) = &cache.flash_writes {
                    self.sample(labels, &[], value(writes));
                }
            }
            (Source::CacheStates, Some(cache)) => {
                self.states(labels, cache.state.name(), &CacheState::ALL.map(CacheState::name));
            }
            (Source::CacheInfo, Some(cache)) => {
                let persistent = if cache.persistent { "yes" } else { "no" };
                let Cache { pool, mode, policy, layout, admission, .. } = cache;
                self.sample(labels, &[pool, mode, policy, layout, admission, persistent], 1.0);
            }
            _ => {}
        }
    }

    /// Adds a value of a disk's statistics, if the disk uses the feature of this metric.
    fn add_figures(&mut self, labels: &Labels, disk: &Disk, stats: &DiskStats) {
        let value = match (self.metric.source, &disk.cache) {
            (Source::Stats(value), _) => value(stats),
            (Source::Memory(value), _) if stats.memory_bytes > 0 => value(stats),
            (Source::Clone(value), _) if disk.parent.is_some() => value(stats),
            (Source::CacheStats(value), Some(cache)) if stats.cache != stats::CacheState::None => {
                value(&MetricContext { stats, block_bytes: cache.block_size.bytes() })
            }
            (Source::Persistence(value), Some(cache))
                if cache.persistent && stats.cache != stats::CacheState::None =>
            {
                value(stats)
            }
            _ => return,
        };
        self.sample(labels, &[], value);
    }

    fn add_outcomes(
        &mut self,
        labels: &Labels,
        value: fn(&OutcomeStats) -> f64,
        latencies: Latencies,
        stats: &DiskStats,
    ) {
        for (row, outcome) in OUTCOMES.iter().zip(&stats.outcomes) {
            if latencies == Latencies::PerOutcome || outcome.count > 0 || is_failure(row) {
                self.sample(labels, &[row.class, row.reason], value(outcome));
            }
        }
    }

    fn add_latencies(&mut self, labels: &Labels, latencies: Latencies, stats: &DiskStats, bounds: &[String]) {
        let mut happened =
            OUTCOMES.iter().zip(&stats.outcomes).filter(|(_, outcome)| outcome.count > 0).peekable();
        match latencies {
            // A disk without requests has no histogram, like an outcome that has not occurred.
            Latencies::PerDisk if happened.peek().is_none() => {}
            Latencies::PerDisk => {
                let mut all = Histogram::default();
                happened.for_each(|(_, outcome)| all.merge(&outcome.latency));
                self.histogram(labels, ["all", ""], &all, bounds);
            }
            Latencies::PerOutcome => {
                for (row, outcome) in happened {
                    self.histogram(labels, [row.class, row.reason], &outcome.latency, bounds);
                }
            }
        }
    }

    /// Writes one sample. `more` has the values of the metric's labels after those in `labels`.
    fn sample(&mut self, labels: &Labels, more: &[&str], value: f64) {
        self.line("", labels, more, value);
    }

    /// Writes one sample per state: 1 for the current state, 0 for others.
    fn states(&mut self, labels: &Labels, is: &str, all: &[&str]) {
        for state in all {
            self.sample(labels, &[*state], f64::from(u8::from(*state == is)));
        }
    }

    /// Writes a histogram: the count up to each bound, the sum of all latencies, and their number.
    fn histogram(
        &mut self,
        labels: &Labels,
        [class, reason]: [&str; 2],
        latency: &Histogram,
        bounds: &[String],
    ) {
        let mut buckets = latency.buckets().peekable();
        let mut count = 0;
        for (bound_ns, bound) in bounds_ns().zip(bounds) {
            while let Some((_, more)) = buckets.next_if(|(upper_ns, _)| *upper_ns <= bound_ns) {
                count += more;
            }
            self.line("_bucket", labels, &[class, reason, bound], count as f64);
        }
        self.line("_bucket", labels, &[class, reason, "+Inf"], latency.count() as f64);
        self.line("_sum", labels, &[class, reason], latency.sum_ns() as f64 / 1e9);
        self.line("_count", labels, &[class, reason], latency.count() as f64);
    }

    /// Writes `name{label="value",…} value`, without the labels that have no value.
    fn line(&mut self, suffix: &str, labels: &Labels, more: &[&str], value: f64) {
        let names = &self.metric.source.labels()[labels.count..];
        let lines = &mut self.lines;
        lines.push_str(&self.name);
        lines.push_str(suffix);
        lines.push_str(&labels.text);
        for (index, (name, value)) in names.iter().zip(more).enumerate() {
            push_label(lines, labels.count + index, name, value);
        }
        if labels.count + more.len() > 0 {
            lines.push('}');
        }
        push_value(lines, value);
    }
}

fn is_failure(row: &OutcomeInfo) -> bool {
    FAILURES.contains(&row.class)
}

/// Returns the upper bound of each bucket in nanoseconds.
pub(crate) fn bounds_ns() -> impl Iterator<Item = u64> {
    (FIRST_LOG2_NS..).take(BOUNDS).map(|log| (1 << log) - 1)
}

/// Returns the label value of each bound: seconds.
fn bound_labels() -> Vec<String> {
    bounds_ns().map(|bound_ns| (bound_ns as f64 / 1e9).to_string()).collect()
}

/// Writes the label with this index in its sample, with its value escaped.
fn push_label(text: &mut String, index: usize, name: &str, value: &str) {
    text.push(if index == 0 { '{' } else { ',' });
    text.push_str(name);
    text.push_str("=\"");
    let mut rest = value;
    while let Some(at) = rest.find(['\\', '"', '\n']) {
        let (plain, special) = rest.split_at(at);
        text.push_str(plain);
        text.push_str(match special.as_bytes()[0] {
            b'\\' => "\\\\",
            b'"' => "\\\"",
            _ => "\\n",
        });
        rest = &special[1..];
    }
    text.push_str(rest);
    text.push('"');
}

/// Writes a sample's value and ends its line. Most values are integers, whose text is the same as
/// that of the number with a fraction, but takes a tenth of the time.
fn push_value(text: &mut String, value: f64) {
    let whole = value as u64;
    let is_whole = whole < 1 << f64::MANTISSA_DIGITS && whole as f64 == value;
    let _ = if is_whole { writeln!(text, " {whole}") } else { writeln!(text, " {value}") };
}

#[cfg(test)]
mod tests;
