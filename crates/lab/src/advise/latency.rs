//! Estimates latencies. A window of the trace runs through the real engine in virtual time, without
//! and with the cache.
//!
//! The window is the end of the trace, and the requests before the window warm the cache. The
//! warm-up requests rarely fill a large cache, so hits and misses are measured separately. The
//! expected latency is the mean of both, weighted with the hit ratio over the whole trace.
//!
//! Requests arrive at their times in the trace. Requests are sent one at a time if the trace has no
//! times, if its times are evenly spaced, or if the backing is too slow for the trace. The
//! resulting latencies then do not include queueing times.

use anyhow::{Result, anyhow};
use hob_engine::REQUEST_BYTES_MAX;
use hob_engine::io::Op;
use hob_engine::outcome::Outcome;
use hob_world::replay::{CacheSetup, Replay, Served, Setup};
use serde::Serialize;

use super::input::{CollectedTrace, count_touching};
use super::reporter::Reporter;
use super::{Options, Trial, mode};
use crate::generate::run::ask;
use hob_trace::Record;

/// Maximum number of measured requests, and maximum number of sectors that they touch. The
/// simulation time depends on the number of sectors, so a large request takes as much time as many
/// small ones.
const WINDOW_MAX: (usize, u64) = (50_000, 400_000);
/// Maximum number of requests that warm the cache before the measurement, and maximum number of
/// sectors that they touch.
const WARM_MAX: (usize, u64) = (150_000, 1_200_000);
/// Latency factor of an overloaded backing. A backing counts as overloaded if two conditions hold.
/// Reads at the trace's times take more than this many times as long as reads sent one at a time.
/// All requests together, sent one at a time, take longer than in the trace.
const OVERLOAD: f64 = 10.0;
/// Minimum variation of the times between requests (standard deviation divided by mean) for
/// latencies at the trace's times. If the variation is smaller, the requests are evenly spaced.
const VARIATION_MIN: f64 = 0.01;
/// Intervals that indicate request numbers instead of times, nanoseconds. If all requests of a
/// trace are one of these intervals apart, the trace counts as a trace without times.
const UNITS_NS: [u64; 4] = [1, 1_000, 1_000_000, 1_000_000_000];

/// Arrival times of the measured requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Timing {
    /// Requests arrive at their times in the trace.
    Original,
    /// Requests are sent one at a time because the trace has no times.
    OneAtATimeNoTimes,
    /// Requests are sent one at a time because they are evenly spaced in the trace.
    OneAtATimeEven,
    /// Requests are sent one at a time because even the backing without a cache is too slow for the
    /// trace.
    OneAtATimeOverload,
}

/// Mean latencies of reads, nanoseconds.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Latency {
    /// Mean read latency without a cache.
    pub without_ns: u64,
    /// Mean read latency with the recommended cache. Hits and misses are weighted with the hit
    /// ratio over the whole trace.
    pub with_ns: u64,
    /// Mean latency of reads from flash.
    pub hit_ns: u64,
    /// Mean latency of reads that the cache could not serve.
    pub miss_ns: u64,
    /// Mean latency of all reads and writes without a cache.
    pub all_without_ns: u64,
    /// Mean latency of all reads and writes with the recommended cache and its write mode.
    pub all_with_ns: u64,
    /// Arrival times of the measured requests.
    pub timing: Timing,
    /// Number of measured requests.
    pub requests: u64,
    /// Number of requests that warmed the cache before the measurement.
    pub warmup: u64,
    /// Description of the modelled backing.
    pub backing: String,
    /// Description of the modelled flash device.
    pub flash: String,
}

/// Returns the duration of the trace in seconds, or `None` if the trace has no times.
pub(crate) fn seconds(held: &CollectedTrace) -> Option<f64> {
    let profile = &held.profile;
    let is_unit = |unit: &u64| (profile.gaps.mean_ns / *unit as f64 - 1.0).abs() < VARIATION_MIN;
    let are_numbers = profile.gaps.variation <= VARIATION_MIN && UNITS_NS.iter().any(is_unit);
    (profile.duration_ns > 0 && !are_numbers).then_some(profile.duration_ns as f64 / 1e9)
}

/// Returns true if requests can arrive at their times in the trace: the trace has times, and the
/// times are not evenly spaced.
pub(crate) fn has_arrivals(held: &CollectedTrace) -> bool {
    held.profile.duration_ns > 0 && held.profile.gaps.variation > VARIATION_MIN
}

/// Sums of latencies: number of requests and nanoseconds.
#[derive(Clone, Copy, Debug, Default)]
struct Sums {
    hits: (u64, u64),
    misses: (u64, u64),
    writes: (u64, u64),
    /// Bytes written to flash for the measured requests.
    flash_write_bytes: u64,
    /// Time from the first request to the last reply, nanoseconds.
    elapsed_ns: u64,
}

impl Sums {
    fn add(&mut self, served: &Served) {
        let (count, sum) = match served.ask.op {
            _ if served.outcome == Outcome::Refused => return,
            Op::Read if served.outcome == Outcome::Hit => &mut self.hits,
            Op::Read => &mut self.misses,
            Op::Write(_) => &mut self.writes,
            _ => return,
        };
        *count += 1;
        *sum += served.latency_ns;
    }

    fn reads(&self) -> (u64, u64) {
        (self.hits.0 + self.misses.0, self.hits.1 + self.misses.1)
    }

    /// Returns the means. `hit_ratio` is the hit ratio over the whole trace, or `None` without a
    /// cache.
    fn means(&self, held: &CollectedTrace, hit_ratio: Option<f64>) -> Means {
        let measured = mean(self.reads()).unwrap_or(0.0);
        let miss_ns = mean(self.misses).unwrap_or(measured);
        let hit_ns = mean(self.hits).unwrap_or(measured);
        let read_ns = hit_ratio.map_or(measured, |ratio| ratio * hit_ns + (1.0 - ratio) * miss_ns);
        let write_ns = mean(self.writes).unwrap_or(0.0);
        let (reads, writes) = (held.profile.reads as f64, held.profile.writes as f64);
        let all_ns = (read_ns * reads + write_ns * writes) / (reads + writes).max(1.0);
        let (read_ns, hit_ns, miss_ns) = (read_ns as u64, hit_ns as u64, miss_ns as u64);
        let flash_write_bytes = self.flash_write_bytes;
        Means { read_ns, hit_ns, miss_ns, all_ns: all_ns as u64, flash_write_bytes }
    }
}

/// Mean latencies with one cache, nanoseconds.
#[derive(Clone, Copy, Debug)]
pub(super) struct Means {
    pub(super) read_ns: u64,
    pub(super) hit_ns: u64,
    pub(super) miss_ns: u64,
    /// Mean latency of all reads and writes.
    pub(super) all_ns: u64,
    /// Bytes written to flash for the measured requests.
    pub(super) flash_write_bytes: u64,
}

fn mean((count, sum): (u64, u64)) -> Option<f64> {
    (count > 0).then(|| sum as f64 / count as f64)
}

/// Latencies without a cache, and the arrival times with which they were measured.
pub(super) struct Uncached {
    sums: Sums,
    pub(super) timing: Timing,
}

/// Measures the latencies without a cache, or returns `None` if the window has no reads.
pub(super) fn uncached(
    held: &CollectedTrace,
    options: &Options,
    reporter: &Reporter<'_>,
) -> Result<Option<Uncached>> {
    let (warm, window) = window(&held.records);
    let play = |timing| play(held, options, None, (warm, window), timing, reporter);
    let alone = play(Timing::OneAtATimeNoTimes)?;
    let Some(alone_ns) = mean(alone.reads()) else { return Ok(None) };
    let (mut sums, mut timing) = (alone, Timing::OneAtATimeNoTimes);
    if !has_arrivals(held) && seconds(held).is_some() {
        timing = Timing::OneAtATimeEven;
    }
    if has_arrivals(held) {
        (sums, timing) = (play(Timing::Original)?, Timing::Original);
        // Long queues can also come from bursts. A backing is not overloaded if it serves the
        // requests, sent one at a time, faster than they arrive in the trace.
        let asked_ns =
            window.last().map_or(0, |last| last.at_ns) - window.first().map_or(0, |first| first.at_ns);
        let is_slow = mean(sums.reads()).is_none_or(|ns| ns > alone_ns * OVERLOAD);
        if is_slow && alone.elapsed_ns > asked_ns {
            (sums, timing) = (alone, Timing::OneAtATimeOverload);
        }
    }
    Ok(Some(Uncached { sums, timing }))
}

/// Returns the expected latencies, or `None` if no read of the window hits. The second value has
/// the mean latencies with `cache` in write-through mode.
pub(super) fn expected(
    held: &CollectedTrace,
    options: &Options,
    cache: &Trial,
    uncached: &Uncached,
    reporter: &Reporter<'_>,
) -> Result<Option<(Latency, Means)>> {
    let (warm, window) = window(&held.records);
    let timing = uncached.timing;
    let with = play(held, options, Some((cache, false)), (warm, window), timing, reporter)?;
    if with.hits.0 == 0 {
        return Ok(None);
    }
    let (without, with) = (uncached.sums.means(held, None), with.means(held, Some(cache.read_hit_ratio)));
    let latency = Latency {
        without_ns: without.read_ns,
        with_ns: with.read_ns,
        hit_ns: with.hit_ns,
        miss_ns: with.miss_ns,
        all_without_ns: without.all_ns,
        all_with_ns: with.all_ns,
        timing,
        requests: window.len() as u64,
        warmup: warm.len() as u64,
        backing: options.backing.describe(),
        flash: options.flash.describe().to_owned(),
    };
    Ok(Some((latency, with)))
}

/// Returns the mean latencies with a cache, measured as [`expected`] does.
pub(super) fn measured(
    held: &CollectedTrace,
    options: &Options,
    cache: &Trial,
    is_write_back: bool,
    timing: Timing,
    reporter: &Reporter<'_>,
) -> Result<Means> {
    let cache_and_mode = Some((cache, is_write_back));
    let sums = play(held, options, cache_and_mode, window(&held.records), timing, reporter)?;
    Ok(sums.means(held, Some(cache.read_hit_ratio)))
}

/// Returns the share of the trace's requests that are measured.
pub(super) fn replayed_share(held: &CollectedTrace) -> f64 {
    window(&held.records).1.len() as f64 / held.records.len() as f64
}

/// Returns the warm-up requests and the measured requests.
fn window(records: &[Record]) -> (&[Record], &[Record]) {
    let last = |records: &[Record], (requests_max, touches_max): (usize, u64)| {
        count_touching(records.iter().rev(), touches_max).min(requests_max)
    };
    let measured = last(records, WINDOW_MAX).min(records.len() / 2).max(1);
    let (before, window) = records.split_at(records.len() - measured);
    (&before[before.len() - last(before, WARM_MAX)..], window)
}

/// Runs the measured requests of the window, after the warm-up requests. The second value of
/// `cache` selects write-back.
fn play(
    held: &CollectedTrace,
    options: &Options,
    cache: Option<(&Trial, bool)>,
    (warm, window): (&[Record], &[Record]),
    timing: Timing,
    reporter: &Reporter<'_>,
) -> Result<Sums> {
    let setup = cache.map(|(cache, is_write_back)| setup(cache, is_write_back));
    let backing = options.backing.model(held.span_bytes);
    let setup = Setup::one_disk(held.span_bytes, setup, options.flash.model(), backing);
    let mut replay = Replay::new(setup).map_err(|error| anyhow!("cannot set up the replay: {error}"))?;
    let mut sums = Sums::default();
    if cache.is_some() {
        run(&mut replay, warm, timing, reporter, |_| {});
    }
    let written = |replay: &Replay| replay.stats(0).map_or(0, |stats| stats.flash.write_bytes);
    let (began, before) = (replay.now(), written(&replay));
    run(&mut replay, window, timing, reporter, |served| sums.add(served));
    reporter.end_run()?;
    sums.elapsed_ns = replay.now() - began;
    sums.flash_write_bytes = written(&replay).saturating_sub(before);
    Ok(sums)
}

fn setup(cache: &Trial, is_write_back: bool) -> CacheSetup {
    let setting = &cache.setting;
    let mut setup = CacheSetup::volatile(setting.cache_bytes, setting.block_bytes, setting.policy);
    setup.config.admission = setting.admission;
    if is_write_back {
        let preset = mode::preset();
        (setup.config.mode, setup.config.destage) = (preset.mode, preset.destage);
        (setup.config.copies, setup.journal) = (preset.copies, preset.persistent);
    }
    setup
}

fn run(
    replay: &mut Replay,
    records: &[Record],
    timing: Timing,
    reporter: &Reporter<'_>,
    served: impl FnMut(&Served),
) {
    let start_ns = records.first().map_or(0, |record| record.at_ns);
    let fits = |record: &&Record| u64::from(record.len) <= REQUEST_BYTES_MAX;
    let records = records.iter().filter(fits).take_while(|_| reporter.next_request());
    let mut asks = records.map(|record| (record.at_ns - start_ns, ask(*record)));
    match timing {
        Timing::Original => replay.open(asks, served),
        _ => replay.closed(1, |_, _| asks.next().map(|(_, ask)| (0, ask)), served),
    };
}

#[cfg(test)]
mod tests {
    use hob_trace::Op;

    use super::*;

    #[test]
    fn the_replayed_requests_are_few_if_they_are_large() {
        let lengths = |len: u32, op: Op, count: usize| {
            let records = vec![Record { at_ns: 0, offset: 0, len, op, disk: 0 }; count];
            let (warm, window) = window(&records);
            (warm.len(), window.len())
        };
        assert_eq!(lengths(4096, Op::Read, 300_000), (150_000, 50_000));
        assert_eq!(lengths(1 << 20, Op::Write, 10_000), (4687, 1562));
        assert_eq!(lengths(1 << 20, Op::Write, 1000), (500, 500));
        assert_eq!(lengths(u32::MAX, Op::Discard, 1000), (500, 500), "discards touch no sectors");
        assert_eq!(lengths(4096, Op::Read, 1), (0, 1));
    }
}
