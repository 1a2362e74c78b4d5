//! Measures latencies of a trace in virtual time. The trace runs through the real engine on
//! modelled devices, without and with a cache.
//!
//! Requests arrive at the trace's times divided by the pace, whether or not earlier requests have
//! completed. Requests are sent one at a time if the trace has no times or the user asks for this.
//! The run with the cache and the run without it get the same requests. The results are also given
//! as a series of intervals, and each interval is the same part of the trace in both runs. With a
//! warm-up, the whole trace is run once before the measurement.
//!
//! Requests with times do not wait for slow devices. If the backing is too slow, queues grow until
//! the end of the trace. The latencies then depend more on the length of the trace than on the
//! devices. A run with too slow devices is marked as overloaded.
//!
//! Percentiles have three significant digits, or two in the series; means and maxima are exact.
//! Requests that the engine refuses are included only in the class of refused requests. Requests
//! above the engine's maximum length are left out.
//!
//! Units: bytes and nanoseconds of virtual time. Names ending in `_s` are in seconds.

#[cfg(test)]
mod tests;

use std::collections::BTreeMap;

use anyhow::{Result, anyhow, bail, ensure};
use hdrhistogram::Histogram;
use hob_engine::REQUEST_BYTES_MAX;
use hob_engine::io::Op;
use hob_engine::outcome::{OUTCOMES, Outcome};
use hob_engine::stats::{DeviceIoStats, DiskStats};
use hob_engine::units::SECTOR_BYTES;
use hob_world::replay::{Ask, CacheSetup, Replay, Run, Served, Setup};
use serde::Serialize;

use crate::advise::{Backing, Flash, Material, has_arrivals};
use crate::generate::run::ask;
use crate::replay::{Pace, Schedule};
use hob_trace::Record;

/// Maximum number of intervals of a series.
pub const INTERVALS_MAX: usize = 200;
/// Maximum duration of a trace at its pace: a hundred years. A warm-up doubles the duration, and
/// virtual time overflows after 584 years.
const SPAN_NS_MAX: u64 = 100 * 31_557_600_000_000_000;
/// Number of requests between two progress reports.
const REQUESTS_A_REPORT: u64 = 4096;
/// A run is overloaded if three conditions hold. First, more than one in this many requests waited
/// because the engine was full.
const WAITED_SHARE: u64 = 100;
/// Second, the time from the last arrival to the end of the run is longer than the trace's duration
/// divided by this number.
const TAIL_SHARE: u64 = 20;
/// Third, the time from the last arrival to the end of the run is longer than this, nanoseconds.
const TAIL_NS_MIN: u64 = 1_000_000_000;

/// Settings of the runs.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// Cache of the second run. With `None`, there is no second run.
    pub cache: Option<CacheSetup>,
    /// Backing of the disk.
    pub backing: Backing,
    /// Flash device of the cache.
    pub flash: Flash,
    /// Pace of the requests. [`Pace::Asap`] sends one request at a time. `None` means as recorded,
    /// or one at a time if the trace has no times.
    pub pace: Option<Pace>,
    /// True to run the trace once before the measurement, in both runs.
    pub warm: bool,
}

/// Arrival times of the requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Arrivals {
    /// Requests arrive at the trace's times, divided by the pace.
    Timed,
    /// Requests are sent one at a time.
    OneAtATime,
}

/// Latencies of one class of requests, in nanoseconds. A class has all requests, all reads, all
/// writes, or the requests with the same outcome.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Class {
    /// Name of the class: `all`, `reads`, `writes`, or a class of [`OUTCOMES`].
    pub class: &'static str,
    /// Number of requests.
    pub requests: u64,
    /// Mean latency.
    pub mean_ns: u64,
    /// Median latency.
    pub p50_ns: u64,
    /// 90th percentile of the latencies.
    pub p90_ns: u64,
    /// 99th percentile of the latencies.
    pub p99_ns: u64,
    /// 99.9th percentile of the latencies.
    pub p999_ns: u64,
    /// Maximum latency.
    pub max_ns: u64,
}

/// Number and size of the I/Os of one device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct DeviceIo {
    /// Number of I/Os.
    pub ios: u64,
    /// Number of bytes read from the device.
    pub read_bytes: u64,
    /// Number of bytes written to the device.
    pub write_bytes: u64,
}

/// Results of one interval of the trace.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Interval {
    /// Start of the interval, seconds since the start of the run. `None` if requests were sent one
    /// at a time.
    pub start_s: Option<f64>,
    /// Number of requests before the interval.
    pub first_request: u64,
    /// Number of requests in the interval, without refused requests.
    pub requests: u64,
    /// Mean latency, nanoseconds.
    pub mean_ns: Option<u64>,
    /// 99th percentile of the latencies, nanoseconds.
    pub p99_ns: Option<u64>,
    /// Share of all reads that flash served completely.
    pub read_hit_ratio: Option<f64>,
}

/// Results of replaying the trace once, with or without a cache.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Played {
    /// Latencies of all requests, without refused requests.
    pub all: Class,
    /// Latencies of reads.
    pub reads: Option<Class>,
    /// Latencies of writes.
    pub writes: Option<Class>,
    /// Latencies by class of outcome, in the order of [`OUTCOMES`].
    pub classes: Vec<Class>,
    /// Share of all reads that flash served completely.
    pub read_hit_ratio: Option<f64>,
    /// I/O of the flash device, including cache fills.
    pub flash: DeviceIo,
    /// I/O of the backing.
    pub backing: DeviceIo,
    /// Number of dirty bytes in the cache when the last request ends.
    pub dirty_bytes: u64,
    /// Number of requests that waited because the engine was full.
    pub waited: u64,
    /// Maximum number of requests in the engine.
    pub in_flight_max: u32,
    /// Time from the first request to the end of the last I/O, nanoseconds.
    pub elapsed_ns: u64,
    /// True if the devices were too slow for the pace.
    pub is_overloaded: bool,
    /// Latency over time.
    pub series: Vec<Interval>,
}

/// Results of the run without a cache, and of the run with the cache.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Latencies {
    /// Number of measured requests per run.
    pub requests: u64,
    /// Number of requests that were left out because the trace has more than the maximum.
    pub left_out: u64,
    /// Number of requests that were left out because they exceed the engine's maximum length.
    pub too_long: u64,
    /// Arrival times of the requests.
    pub arrivals: Arrivals,
    /// Time from the first arrival to the last at the chosen pace, seconds. `None` if requests were
    /// sent one at a time.
    pub span_s: Option<f64>,
    /// True if the trace was run once before the measurement.
    pub is_warm: bool,
    /// Description of the backing.
    pub backing: String,
    /// Description of the flash device.
    pub flash: &'static str,
    /// Results without a cache.
    pub without: Played,
    /// Results with the cache.
    pub with: Option<Played>,
    /// Remarks on the results, one sentence each.
    pub notes: Vec<String>,
}

/// Runs the collected trace. `progress` gets the current stage and the completed share of all work,
/// and returns `false` to cancel.
///
/// # Errors
/// Returns an error if the trace has no request, the cache is invalid, the trace takes too long at
/// this pace, or `progress` cancelled the work.
pub fn measure(
    material: Material,
    options: &Options,
    progress: &mut dyn FnMut(&str, f64) -> bool,
) -> Result<Latencies> {
    let held = material.finish()?;
    let arrivals = match options.pace {
        Some(Pace::Asap) => Arrivals::OneAtATime,
        Some(_) if held.profile.duration_ns > 0 => Arrivals::Timed,
        None if has_arrivals(&held) => Arrivals::Timed,
        _ => Arrivals::OneAtATime,
    };
    let mut schedule = Schedule::new(options.pace.unwrap_or_default());
    let fits = |record: &&Record| u64::from(record.len) <= REQUEST_BYTES_MAX;
    let asks: Vec<(u64, Ask)> = held
        .records
        .iter()
        .filter(fits)
        .map(|record| (schedule.due_ns(record.at_ns), ask(*record)))
        .collect();
    let too_long = (held.records.len() - asks.len()) as u64;
    let span_ns = asks.last().map_or(0, |(due_ns, _)| *due_ns);
    ensure!(
        !asks.is_empty(),
        "all requests are longer than {REQUEST_BYTES_MAX} bytes, the maximum length that the engine serves"
    );
    ensure!(
        arrivals == Arrivals::OneAtATime || span_ns <= SPAN_NS_MAX,
        "the trace lasts longer than a hundred years at this pace: choose a faster pace, or --pace asap"
    );
    let passes = (1 + u64::from(options.cache.is_some())) * (1 + u64::from(options.warm));
    let requests = asks.len() as u64;
    let total = passes * requests;
    let mut stage = Stage { report: progress, done: 0, total, is_stopped: false };
    let player = Player {
        asks: marked(asks, arrivals, span_ns),
        span_bytes: held.span_bytes,
        span_ns,
        arrivals,
        options,
    };
    let without = player.play(None, &mut stage)?;
    let with = options.cache.map(|cache| player.play(Some(cache), &mut stage)).transpose()?;
    let mut answer = Latencies {
        requests,
        left_out: held.left_out,
        too_long,
        arrivals,
        span_s: (arrivals == Arrivals::Timed).then_some(span_ns as f64 / 1e9),
        is_warm: options.warm,
        backing: options.backing.describe(),
        flash: options.flash.describe(),
        without,
        with,
        notes: Vec::new(),
    };
    answer.notes = notes(&answer, options, held.is_moved);
    Ok(answer)
}

/// Returns the remarks on the results.
fn notes(answer: &Latencies, options: &Options, is_moved: bool) -> Vec<String> {
    let mut notes = Vec::new();
    if answer.left_out > 0 {
        notes.push(format!(
            "the trace is cut: {} requests after the first {} were left out",
            answer.left_out,
            answer.requests + answer.too_long
        ));
    }
    if answer.too_long > 0 {
        let mib = REQUEST_BYTES_MAX >> 20;
        notes.push(format!("{} requests longer than {mib} MiB were left out", answer.too_long));
    }
    if is_moved {
        notes.push(
            "several disks or addresses beyond 4 TiB were moved together on one disk: simulated seeks are too short"
                .to_owned(),
        );
    }
    if answer.arrivals == Arrivals::OneAtATime && options.pace != Some(Pace::Asap) {
        notes.push(
            "the trace does not say when requests arrived: they were sent one at a time, so latencies do not \
             include queueing"
                .to_owned(),
        );
    }
    let slower = format!(
        "latencies grow with the trace's length; try --pace x{}, or --pace asap for one at a time",
        slower_pace(answer, options)
    );
    let with = answer.with.as_ref();
    match (answer.without.is_overloaded, with.map(|with| with.is_overloaded)) {
        (true, Some(false)) => notes.push(format!(
            "without the cache the backing is overloaded, and with the cache it is not: in the run without it, {slower}"
        )),
        (true, _) => notes.push(format!("the backing is overloaded: {slower}")),
        (false, Some(true)) => notes.push(format!("with the cache the flash is overloaded: {slower}")),
        (false, _) => {}
    }
    if let Some(dirty_bytes) = with.map(|with| with.dirty_bytes).filter(|bytes| *bytes > 0) {
        let mib = dirty_bytes.div_ceil(1 << 20);
        notes.push(format!(
            "{mib} MiB of written data were not on the backing yet when the last request ended"
        ));
    }
    let refused = |played: &Played| {
        let row = played.classes.iter().find(|row| row.class == Outcome::Refused.info().class);
        row.map_or(0, |row| row.requests)
    };
    let refused = refused(&answer.without).max(with.map_or(0, refused));
    if refused > 0 {
        notes.push(format!("{refused} requests were refused; the other rows do not include them"));
    }
    notes
}

/// Returns a slower pace for an overloaded run, rounded to one digit. The pace is a tenth of the
/// current pace, because a trace has bursts. If half of the mean rate of the slowest run is less,
/// this rate determines the pace.
fn slower_pace(answer: &Latencies, options: &Options) -> f64 {
    let now = if let Some(Pace::Times(factor)) = options.pace { factor } else { 1.0 };
    let elapsed_ns = answer.with.iter().chain([&answer.without]).map(|run| run.elapsed_ns).max().unwrap_or(0);
    let span_ns = answer.span_s.unwrap_or(0.0) * 1e9;
    let pace = now * (span_ns / elapsed_ns.max(1) as f64 / 2.0).min(0.1);
    let digit = 10_f64.powf(pace.max(0.001).log10().floor());
    // Dividing by a whole number avoids trailing digits.
    let digits = (pace / digit).floor().max(1.0);
    if digit < 1.0 { digits / (1.0 / digit).round() } else { digits * digit }
}

/// Returns the requests, each tagged with the number of its interval.
fn marked(mut asks: Vec<(u64, Ask)>, arrivals: Arrivals, span_ns: u64) -> Vec<(u64, Ask)> {
    let count = asks.len();
    let intervals = INTERVALS_MAX.min(count) as u128;
    for (index, (due_ns, ask)) in asks.iter_mut().enumerate() {
        let (at, end) = match arrivals {
            Arrivals::Timed => (u128::from(*due_ns), u128::from(span_ns) + 1),
            Arrivals::OneAtATime => (index as u128, count as u128),
        };
        ask.tag = (at * intervals / end) as u32;
    }
    asks
}

/// Progress of all runs together.
struct Stage<'a> {
    report: &'a mut dyn FnMut(&str, f64) -> bool,
    done: u64,
    total: u64,
    is_stopped: bool,
}

impl Stage<'_> {
    /// Counts a request of the current run, and reports the progress. Returns false if the caller
    /// cancelled the work.
    fn goes_on(&mut self, what: &str) -> bool {
        if self.done.is_multiple_of(REQUESTS_A_REPORT) {
            self.is_stopped |= !(self.report)(what, self.done as f64 / self.total as f64);
        }
        self.done += 1;
        !self.is_stopped
    }
}

/// The trace and the settings of a measurement: the same for the run with the cache and for the run
/// without it.
struct Player<'a> {
    asks: Vec<(u64, Ask)>,
    span_bytes: u64,
    span_ns: u64,
    arrivals: Arrivals,
    options: &'a Options,
}

impl Player<'_> {
    fn play(&self, cache: Option<CacheSetup>, stage: &mut Stage<'_>) -> Result<Played> {
        let Options { backing, flash, warm, .. } = *self.options;
        let what = if cache.is_some() { "with the cache" } else { "without the cache" };
        let setup = Setup::one_disk(self.span_bytes, cache, flash.model(), backing.model(self.span_bytes));
        let mut replay = Replay::new(setup).map_err(|error| anyhow!("cannot set up the cache: {error}"))?;
        if warm {
            self.run(&mut replay, stage, "warming up", |_| {});
            replay.reset_stats();
        }
        let mut tally = Tally::new(self.asks.last().map_or(0, |(_, ask)| ask.tag as usize + 1));
        let run = self.run(&mut replay, stage, what, |served| tally.add(served));
        if stage.is_stopped {
            bail!("interrupted");
        }
        let stats = replay.stats(0).expect("there is one disk");
        Ok(self.summed_up(&tally, run, &stats))
    }

    fn run(
        &self,
        replay: &mut Replay,
        stage: &mut Stage<'_>,
        what: &str,
        served: impl FnMut(&Served),
    ) -> Run {
        let mut asks = self.asks.iter().copied().take_while(|_| stage.goes_on(what));
        match self.arrivals {
            Arrivals::Timed => replay.open(asks, served),
            Arrivals::OneAtATime => replay.closed(1, |_, _| asks.next().map(|(_, ask)| (0, ask)), served),
        }
    }

    fn summed_up(&self, tally: &Tally, run: Run, stats: &DiskStats) -> Played {
        let io = |stats: &DeviceIoStats| DeviceIo {
            ios: stats.ios,
            read_bytes: stats.read_bytes,
            write_bytes: stats.write_bytes,
        };
        let elapsed_ns = run.ended - run.began;
        let tail_ns = elapsed_ns.saturating_sub(self.span_ns);
        let is_late = tail_ns > TAIL_NS_MIN && tail_ns > self.span_ns / TAIL_SHARE;
        let is_full = run.waited > run.requests / WAITED_SHARE;
        let of = |class| Some(tally.ops.get(class)?.class(class));
        Played {
            all: tally.all.class("all"),
            reads: of("reads"),
            writes: of("writes"),
            classes: OUTCOMES
                .chunk_by(|one, next| one.class == next.class)
                .filter_map(|rows| Some(tally.classes.get(rows[0].class)?.class(rows[0].class)))
                .collect(),
            read_hit_ratio: ratio(tally.hits.iter().sum(), tally.reads.iter().sum()),
            flash: io(&stats.flash),
            backing: io(&stats.backing),
            dirty_bytes: stats.sectors_dirty * SECTOR_BYTES,
            waited: run.waited,
            in_flight_max: run.in_flight_max,
            elapsed_ns,
            is_overloaded: self.arrivals == Arrivals::Timed && (is_late || is_full),
            series: self.series(tally),
        }
    }

    fn series(&self, tally: &Tally) -> Vec<Interval> {
        let mut first = 0;
        let count = tally.intervals.len();
        let interval = |(index, sum): (usize, &Sum)| {
            let came = self.asks[first..].partition_point(|(_, ask)| ask.tag as usize <= index);
            let first_request = first as u64;
            first += came;
            let start_s = self.span_ns as f64 / 1e9 * index as f64 / count as f64;
            let some = !sum.histogram.is_empty();
            Interval {
                start_s: (self.arrivals == Arrivals::Timed).then_some(start_s),
                first_request,
                requests: sum.histogram.len(),
                mean_ns: some.then(|| sum.mean_ns()),
                p99_ns: some.then(|| sum.quantile_ns(0.99)),
                read_hit_ratio: ratio(tally.hits[index], tally.reads[index]),
            }
        };
        tally.intervals.iter().enumerate().map(interval).collect()
    }
}

fn ratio(part: u64, whole: u64) -> Option<f64> {
    (whole > 0).then(|| part as f64 / whole as f64)
}

/// Latencies of one class of requests.
struct Sum {
    histogram: Histogram<u64>,
    total_ns: u128,
    max_ns: u64,
}

impl Sum {
    fn new(digits: u8) -> Sum {
        let histogram = Histogram::new(digits).expect("at most five digits");
        Sum { histogram, total_ns: 0, max_ns: 0 }
    }

    fn add(&mut self, ns: u64) {
        self.histogram.record(ns).expect("the histogram grows automatically");
        self.total_ns += u128::from(ns);
        self.max_ns = self.max_ns.max(ns);
    }

    fn mean_ns(&self) -> u64 {
        self.total_ns.checked_div(u128::from(self.histogram.len())).unwrap_or(0) as u64
    }

    /// Returns a quantile. Values of the histogram are the ends of their ranges, so the result is
    /// limited to the maximum.
    fn quantile_ns(&self, share: f64) -> u64 {
        self.histogram.value_at_quantile(share).min(self.max_ns)
    }

    fn class(&self, class: &'static str) -> Class {
        Class {
            class,
            requests: self.histogram.len(),
            mean_ns: self.mean_ns(),
            p50_ns: self.quantile_ns(0.5),
            p90_ns: self.quantile_ns(0.9),
            p99_ns: self.quantile_ns(0.99),
            p999_ns: self.quantile_ns(0.999),
            max_ns: self.max_ns,
        }
    }
}

/// Sums of the latencies in one run of the trace.
struct Tally {
    all: Sum,
    ops: BTreeMap<&'static str, Sum>,
    classes: BTreeMap<&'static str, Sum>,
    intervals: Vec<Sum>,
    /// Number of reads in each interval. `hits` has the number of these reads that flash served
    /// completely.
    reads: Vec<u64>,
    hits: Vec<u64>,
}

impl Tally {
    fn new(intervals: usize) -> Tally {
        Tally {
            all: Sum::new(3),
            ops: BTreeMap::new(),
            classes: BTreeMap::new(),
            intervals: (0..intervals).map(|_| Sum::new(2)).collect(),
            reads: vec![0; intervals],
            hits: vec![0; intervals],
        }
    }

    fn add(&mut self, served: &Served) {
        let ns = served.latency_ns;
        let named =
            |sums: &mut BTreeMap<_, Sum>, name| sums.entry(name).or_insert_with(|| Sum::new(3)).add(ns);
        named(&mut self.classes, served.outcome.info().class);
        if served.outcome == Outcome::Refused {
            return;
        }
        let interval = served.ask.tag as usize;
        self.all.add(ns);
        self.intervals[interval].add(ns);
        match served.ask.op {
            Op::Read => {
                named(&mut self.ops, "reads");
                self.reads[interval] += 1;
                self.hits[interval] += u64::from(served.outcome == Outcome::Hit);
            }
            Op::Write(_) => named(&mut self.ops, "writes"),
            _ => {}
        }
    }
}
