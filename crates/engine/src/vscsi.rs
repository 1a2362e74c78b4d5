//! Statistics of one disk's requests in six histograms with the buckets of vscsiStats (Ahmad, "Easy
//! and efficient disk I/O workload characterization in VMware ESX server", IISWC 2007). Each
//! histogram has three versions: all reads and writes, reads only, and writes only.
//!
//! Each version of a histogram ignores requests of other kinds. For example, in the version for
//! reads, the seek distance counts from the previous read, and the number of outstanding requests
//! counts only reads. Only valid reads and writes of a guest are counted; flushes, discards,
//! zeroing and prefetches move no data for the guest. Recording a request takes constant time and
//! allocates no memory. The recorded length and latency of a request are the same in each version.
//! So for these two, the version of all requests is the sum of reads and writes, computed on
//! demand. Units are those of [`Metric::unit`], and bounds are the largest values of their buckets.

mod bucket_search;

use self::bucket_search::BucketSearch;
use crate::io::{Op, Request};
use crate::units::Instant;

/// Size in bytes of the sectors in seek distances.
const SEEK_SECTOR_BYTES: u64 = 512;

/// Number of earlier requests among which the nearest one is searched.
pub const NEAREST_OF: usize = 16;

/// Maximum number of buckets of a histogram.
const BUCKETS_MAX: usize = 28;

const LENGTH: &[i64] = &[
    512, 1024, 2048, 4095, 4096, 8191, 8192, 16_383, 16_384, 32_768, 49_152, 65_535, 65_536, 81_920, 131_072,
    262_144, 524_288,
];
const SEEK: &[i64] = &[
    -500_000, -50_000, -5000, -500, -128, -64, -32, -16, -8, -6, -4, -2, -1, 0, 1, 2, 4, 6, 8, 16, 32, 64,
    128, 500, 5000, 50_000, 500_000,
];
const OUTSTANDING: &[i64] = &[1, 2, 4, 6, 8, 12, 16, 20, 24, 28, 32, 64];
const TIME: &[i64] = &[1, 10, 100, 500, 1000, 5000, 15_000, 30_000, 50_000, 100_000];

static LENGTH_SEARCH: BucketSearch<BUCKETS_MAX> = BucketSearch::new(LENGTH);
static SEEK_SEARCH: BucketSearch<BUCKETS_MAX> = BucketSearch::new(SEEK);
static OUTSTANDING_SEARCH: BucketSearch<BUCKETS_MAX> = BucketSearch::new(OUTSTANDING);
static TIME_SEARCH: BucketSearch<BUCKETS_MAX> = BucketSearch::new(TIME);

/// The quantity that a histogram counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Metric {
    /// Length of a request in bytes.
    Length,
    /// Distance from the last sector of the previous request to the first sector of this request.
    /// The distance is 1 if this request continues the previous one, and negative if it is at a
    /// lower address.
    Seek,
    /// Distance from the last sector of the nearest of the [`NEAREST_OF`] previous requests to the
    /// first sector of this request. Of two equally near requests, the later one counts.
    SeekNearest,
    /// Number of unanswered requests when a request arrives.
    Outstanding,
    /// Time from a request to its answer, in microseconds, rounded up.
    Latency,
    /// Time from the previous request to this request, in microseconds, rounded up.
    Interarrival,
}

/// Name, unit and buckets of one metric: a row of [`METRICS`].
#[derive(Clone, Copy, Debug)]
pub struct MetricInfo {
    /// The metric.
    pub metric: Metric,
    /// Name for users.
    pub name: &'static str,
    /// Unit of the metric's values.
    pub unit: &'static str,
    /// Title for users.
    pub title: &'static str,
    /// The largest value of each bucket except the last, which has no bound.
    pub bounds: &'static [i64],
}

/// Every metric, in the order of the enum.
pub const METRICS: &[MetricInfo] = &[
    MetricInfo {
        metric: Metric::Length,
        name: "length",
        unit: "bytes",
        title: "length of a request",
        bounds: LENGTH,
    },
    MetricInfo {
        metric: Metric::Seek,
        name: "seek",
        unit: "sectors of 512 bytes",
        title: "distance from the previous request",
        bounds: SEEK,
    },
    MetricInfo {
        metric: Metric::SeekNearest,
        name: "seek-nearest",
        unit: "sectors of 512 bytes",
        title: "distance from the nearest of the 16 previous requests",
        bounds: SEEK,
    },
    MetricInfo {
        metric: Metric::Outstanding,
        name: "outstanding",
        unit: "requests",
        title: "other requests in flight when a request arrives",
        bounds: OUTSTANDING,
    },
    MetricInfo {
        metric: Metric::Latency,
        name: "latency",
        unit: "microseconds",
        title: "time from a request to its reply",
        bounds: TIME,
    },
    MetricInfo {
        metric: Metric::Interarrival,
        name: "interarrival",
        unit: "microseconds",
        title: "time since the previous request",
        bounds: TIME,
    },
];

impl Metric {
    /// Returns the metric's row of [`METRICS`].
    pub fn info(self) -> &'static MetricInfo {
        &METRICS[self as usize]
    }

    /// Returns the unit of the metric's values.
    pub fn unit(self) -> &'static str {
        self.info().unit
    }

    /// Returns the search among the metric's bounds.
    #[inline(always)]
    fn search(self) -> &'static BucketSearch<BUCKETS_MAX> {
        match self {
            Metric::Length => &LENGTH_SEARCH,
            Metric::Seek | Metric::SeekNearest => &SEEK_SEARCH,
            Metric::Outstanding => &OUTSTANDING_SEARCH,
            Metric::Latency | Metric::Interarrival => &TIME_SEARCH,
        }
    }
}

/// Class of counted requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Class {
    /// Reads and writes.
    All,
    /// Reads.
    Reads,
    /// Writes.
    Writes,
}

/// Every class, in the order of the enum, with its name for users.
pub const CLASSES: [(Class, &str); 3] =
    [(Class::All, "all"), (Class::Reads, "reads"), (Class::Writes, "writes")];

impl Class {
    fn of(op: Op) -> Option<Class> {
        match op {
            Op::Read => Some(Class::Reads),
            Op::Write(_) => Some(Class::Writes),
            _ => None,
        }
    }
}

/// One histogram of a class of requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Distribution {
    metric: Metric,
    counts: [u64; BUCKETS_MAX],
    sum: i128,
    min: i64,
    max: i64,
}

impl Distribution {
    fn new(metric: Metric) -> Distribution {
        Distribution { metric, counts: [0; BUCKETS_MAX], sum: 0, min: i64::MAX, max: i64::MIN }
    }

    /// Adds a value. `search` is that of the metric.
    #[inline]
    fn record_among(&mut self, search: &BucketSearch<BUCKETS_MAX>, value: i64) {
        self.counts[search.bucket_of(value)] += 1;
        self.sum += i128::from(value);
        self.min = self.min.min(value);
        self.max = self.max.max(value);
    }

    fn plus(mut self, other: &Distribution) -> Distribution {
        self.counts.iter_mut().zip(other.counts).for_each(|(count, more)| *count += more);
        self.sum += other.sum;
        self.min = self.min.min(other.min);
        self.max = self.max.max(other.max);
        self
    }

    /// Returns the metric of the histogram.
    pub fn metric(&self) -> Metric {
        self.metric
    }

    /// Returns the number of values.
    pub fn count(&self) -> u64 {
        self.counts.iter().sum()
    }

    /// Returns the smallest value.
    pub fn min(&self) -> Option<i64> {
        (self.count() > 0).then_some(self.min)
    }

    /// Returns the largest value.
    pub fn max(&self) -> Option<i64> {
        (self.count() > 0).then_some(self.max)
    }

    /// Returns the mean.
    pub fn mean(&self) -> Option<f64> {
        (self.count() > 0).then(|| self.sum as f64 / self.count() as f64)
    }

    /// Returns every bucket, including empty ones: its largest value (`None` for the last bucket)
    /// and its count.
    pub fn buckets(&self) -> impl Iterator<Item = (Option<i64>, u64)> + '_ {
        let bounds = self.metric.info().bounds;
        let bounds = bounds.iter().copied().map(Some).chain([None]);
        bounds.zip(self.counts.iter().copied())
    }
}

/// State of the requests of one class.
#[derive(Clone, Copy, Debug)]
struct Stream {
    distributions: [Distribution; METRICS.len()],
    /// Last sectors of the previous requests. While there are fewer requests, the first one fills
    /// the missing entries.
    last_sectors: [i64; NEAREST_OF],
    /// Index of the latest request in `last_sectors`. Earlier ones come before it, cyclically.
    latest: usize,
    /// Arrival time of the previous request.
    arrived: Option<Instant>,
    outstanding: u32,
}

impl Stream {
    fn new() -> Stream {
        Stream {
            distributions: std::array::from_fn(|i| Distribution::new(METRICS[i].metric)),
            last_sectors: [0; NEAREST_OF],
            latest: 0,
            arrived: None,
            outstanding: 0,
        }
    }

    #[inline(always)]
    fn record(&mut self, metric: Metric, value: i64) {
        self.distributions[metric as usize].record_among(metric.search(), value);
    }

    fn arrive(&mut self, now: Instant, offset: u64, len: u64) {
        // Disks end below 2⁶³ bytes, so the conversion cannot overflow.
        let first = (offset / SEEK_SECTOR_BYTES) as i64;
        let last = ((offset + len - 1) / SEEK_SECTOR_BYTES) as i64;
        match self.arrived.replace(now) {
            Some(before) => {
                self.record(Metric::Seek, first - self.last_sectors[self.latest]);
                self.record(Metric::SeekNearest, self.nearest(first));
                self.record(Metric::Interarrival, micros(now - before));
                self.latest = (self.latest + 1) % NEAREST_OF;
                self.last_sectors[self.latest] = last;
            }
            None => self.last_sectors = [last; NEAREST_OF],
        }
        self.record(Metric::Outstanding, i64::from(self.outstanding));
        self.outstanding += 1;
    }

    /// Returns the distance from the nearest of the last sectors to `first`. Among equally near
    /// sectors, that of the latest request counts.
    fn nearest(&self, first: i64) -> i64 {
        let age_of = |index: usize| self.latest.wrapping_sub(index) % NEAREST_OF;
        // Distance and age in one number: distances are below 2⁵⁵.
        let number = |(index, last): (usize, &i64)| {
            (first - last).unsigned_abs() * NEAREST_OF as u64 + age_of(index) as u64
        };
        let least = self.last_sectors.iter().enumerate().map(number).fold(u64::MAX, u64::min);
        first - self.last_sectors[age_of(least as usize)]
    }

    fn answer(&mut self) {
        assert!(self.outstanding > 0, "only a counted request is answered");
        self.outstanding -= 1;
    }
}

/// Converts nanoseconds to microseconds, rounded up, so that a time within a bound does not exceed
/// the bound.
fn micros(nanos: u64) -> i64 {
    nanos.div_ceil(1000) as i64
}

/// All histograms of one disk's requests.
#[derive(Clone, Debug)]
pub struct Histograms {
    streams: [Stream; CLASSES.len()],
    since: Instant,
}

impl Histograms {
    /// Creates empty histograms, counting from `now` on.
    pub fn new(now: Instant) -> Histograms {
        Histograms { streams: [Stream::new(); CLASSES.len()], since: now }
    }

    /// Records the arrival of a request that will be answered.
    pub fn arrive(&mut self, now: Instant, request: &Request) {
        if let Some(class) = Class::of(request.op) {
            self.streams[Class::All as usize].arrive(now, request.offset, request.len);
            let of_class = &mut self.streams[class as usize];
            of_class.arrive(now, request.offset, request.len);
            of_class.record(Metric::Length, request.len as i64);
        }
    }

    /// Removes a request that the engine returns to the front end without a reply.
    pub fn go_back(&mut self, op: Op) {
        if let Some(class) = Class::of(op) {
            self.streams[Class::All as usize].answer();
            self.streams[class as usize].answer();
        }
    }

    /// Adds a request again, because the front end repeats a request that was returned without a
    /// reply.
    pub fn come_back(&mut self, op: Op) {
        if let Some(class) = Class::of(op) {
            self.streams[Class::All as usize].outstanding += 1;
            self.streams[class as usize].outstanding += 1;
        }
    }

    /// Records the answer to a request.
    pub fn answer(&mut self, latency_ns: u64, op: Op) {
        if let Some(class) = Class::of(op) {
            self.streams[Class::All as usize].answer();
            let of_class = &mut self.streams[class as usize];
            of_class.answer();
            of_class.record(Metric::Latency, micros(latency_ns));
        }
    }

    /// Resets the histograms. Outstanding requests stay outstanding, and are counted when they are
    /// answered.
    pub fn reset(&mut self, now: Instant) {
        for stream in &mut self.streams {
            *stream = Stream { outstanding: stream.outstanding, ..Stream::new() };
        }
        self.since = now;
    }

    /// Returns one of the histograms.
    pub fn get(&self, class: Class, metric: Metric) -> Distribution {
        let of = |class: Class| self.streams[class as usize].distributions[metric as usize];
        match (class, metric) {
            (Class::All, Metric::Length | Metric::Latency) => of(Class::Reads).plus(&of(Class::Writes)),
            _ => of(class),
        }
    }

    /// Returns the time from which the histograms count requests.
    pub fn since(&self) -> Instant {
        self.since
    }
}

#[cfg(test)]
mod tests;
