//! Estimates latencies. A window of the trace runs through the real engine in virtual time, without
//! and with the cache.
//!
//! The window is the end of the trace, and the requests before the window warm the cache. The
//! warm-up requests rarely fill a large cache, so hits and misses are measured separately. The
//! expected latency is the mean of both, weighted with the hit ratio over the whole trace.
//!
//! Requests arrive at their times in the trace. If the trace has no times, or the backing is too
//! slow for the trace, requests are sent one at a time. The result then has service times but no
//! queueing times.

use anyhow::{Result, anyhow};
use hob_engine::REQUEST_BYTES_MAX;
use hob_engine::io::Op;
use hob_engine::outcome::Outcome;
use hob_world::replay::{CacheSetup, Replay, Served, Setup};
use serde::Serialize;

use super::material::Held;
use super::{Options, Trial};
use crate::generate::run::ask;
use crate::trace::Record;

const WINDOW_MAX: usize = 50_000;
/// Maximum number of requests that warm the cache before the measured requests.
const WARM_MAX: usize = 150_000;
/// The backing is overloaded if reads are this many times slower than one at a time, and if it needs
/// more than the trace's time for the requests one at a time.
const OVERLOAD: f64 = 10.0;
/// A trace has no times if the times between its requests vary less than this. The times of such a
/// trace are request numbers.
const VARIATION_MIN: f64 = 0.01;

/// Arrival times of the measured requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Timing {
    /// Requests arrive at their times in the trace.
    Original,
    /// Requests are sent one at a time because the trace has no times.
    OneAtATimeNoTimes,
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
pub(crate) fn seconds(held: &Held) -> Option<f64> {
    let profile = &held.profile;
    let has_times = profile.duration_ns > 0 && profile.gaps.variation > VARIATION_MIN;
    has_times.then_some(profile.duration_ns as f64 / 1e9)
}

/// Sums of the latencies of hits and misses.
#[derive(Clone, Copy, Debug, Default)]
struct Reads {
    hits: (u64, u64),
    misses: (u64, u64),
    /// Time from the first request to the last reply, nanoseconds.
    elapsed_ns: u64,
}

impl Reads {
    fn add(&mut self, served: &Served) {
        if served.ask.op != Op::Read || served.outcome == Outcome::Refused {
            return;
        }
        let (count, sum) = if served.outcome == Outcome::Hit { &mut self.hits } else { &mut self.misses };
        *count += 1;
        *sum += served.latency_ns;
    }

    fn mean(&self) -> Option<f64> {
        mean((self.hits.0 + self.misses.0, self.hits.1 + self.misses.1))
    }
}

fn mean((count, sum): (u64, u64)) -> Option<f64> {
    (count > 0).then(|| sum as f64 / count as f64)
}

/// Returns the expected latencies, or `None` if the window has no suitable reads.
pub(super) fn expected(held: &Held, options: &Options, cache: &Trial) -> Result<Option<Latency>> {
    let (warm, window) = window(&held.records);
    let play = |cache, timing| play(held, options, cache, (warm, window), timing);
    let alone = play(None, Timing::OneAtATimeNoTimes)?;
    let Some(alone_ns) = alone.mean() else { return Ok(None) };
    let (mut without, mut timing) = (alone, Timing::OneAtATimeNoTimes);
    if seconds(held).is_some() {
        (without, timing) = (play(None, Timing::Original)?, Timing::Original);
        // Bursts also make queues. A backing that serves the requests one at a time in less than
        // their time in the trace is not overloaded.
        let asked_ns =
            window.last().map_or(0, |last| last.at_ns) - window.first().map_or(0, |first| first.at_ns);
        let is_slow = without.mean().is_none_or(|ns| ns > alone_ns * OVERLOAD);
        if is_slow && alone.elapsed_ns > asked_ns {
            (without, timing) = (alone, Timing::OneAtATimeOverload);
        }
    }
    let with = play(Some(cache), timing)?;
    let (Some(without_ns), Some(hit_ns)) = (without.mean(), mean(with.hits)) else { return Ok(None) };
    let miss_ns = mean(with.misses).unwrap_or(without_ns);
    let with_ns = cache.read_hit_ratio * hit_ns + (1.0 - cache.read_hit_ratio) * miss_ns;
    Ok(Some(Latency {
        without_ns: without_ns as u64,
        with_ns: with_ns as u64,
        hit_ns: hit_ns as u64,
        miss_ns: miss_ns as u64,
        timing,
        requests: window.len() as u64,
        warmup: warm.len() as u64,
        backing: options.backing.describe(),
        flash: options.flash.describe().to_owned(),
    }))
}

/// Returns the warm-up requests and the measured requests.
fn window(records: &[Record]) -> (&[Record], &[Record]) {
    let (before, window) = records.split_at(records.len() - (records.len() / 2).clamp(1, WINDOW_MAX));
    (&before[before.len() - before.len().min(WARM_MAX)..], window)
}

fn play(
    held: &Held,
    options: &Options,
    cache: Option<&Trial>,
    (warm, window): (&[Record], &[Record]),
    timing: Timing,
) -> Result<Reads> {
    let setup = cache.map(|cache| {
        let setting = &cache.setting;
        let mut cache = CacheSetup::volatile(setting.cache_bytes, setting.block_bytes, setting.policy);
        cache.config.admission = setting.admission;
        cache
    });
    let backing = options.backing.model(held.span_bytes);
    let setup = Setup::one_disk(held.span_bytes, setup, options.flash.model(), backing);
    let mut replay = Replay::new(setup).map_err(|error| anyhow!("cannot set up the replay: {error}"))?;
    let mut reads = Reads::default();
    if cache.is_some() {
        run(&mut replay, warm, timing, |_| {});
    }
    let began = replay.now();
    run(&mut replay, window, timing, |served| reads.add(served));
    reads.elapsed_ns = replay.now() - began;
    Ok(reads)
}

fn run(replay: &mut Replay, records: &[Record], timing: Timing, served: impl FnMut(&Served)) {
    let start_ns = records.first().map_or(0, |record| record.at_ns);
    let fits = |record: &&Record| u64::from(record.len) <= REQUEST_BYTES_MAX;
    let asks = records.iter().filter(fits).map(|record| (record.at_ns - start_ns, ask(*record)));
    if timing == Timing::Original {
        replay.open(asks, served);
        return;
    }
    let mut asks = asks;
    replay.closed(1, |_, _| asks.next().map(|(_, ask)| (0, ask)), served);
}
