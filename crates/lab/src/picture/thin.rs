//! Fewer dots with the same look, and the medians of time buckets.

use crate::summary::Sample;

/// The slowest requests are what people look for; this many survive any thinning.
const SLOWEST_KEPT: usize = 24;

/// At most `max` samples (a few more for the slowest): all of them when they are few, else every so-manieth.
pub(super) fn thinned(samples: &[Sample], max: usize) -> Vec<Sample> {
    if samples.len() <= max {
        return samples.to_vec();
    }
    let mut kept: Vec<Sample> =
        (0..max as u128).map(|i| samples[(i * samples.len() as u128 / max as u128) as usize]).collect();
    let mut slowest = samples.to_vec();
    let rest = slowest.len().saturating_sub(SLOWEST_KEPT);
    slowest.select_nth_unstable_by_key(rest, |sample| sample.latency_ns);
    kept.extend_from_slice(&slowest[rest..]);
    kept
}

/// Per bucket of equal time: (start, end, median latency), nanoseconds; `None` where nothing was sent.
pub(super) fn medians(samples: &[Sample], span_ns: u64, buckets: u64) -> Vec<Option<(u64, u64, u64)>> {
    let width = span_ns.div_ceil(buckets).max(1);
    let mut latencies = vec![Vec::new(); buckets as usize];
    for sample in samples {
        latencies[(sample.at_ns / width).min(buckets - 1) as usize].push(sample.latency_ns);
    }
    let median = |(index, mut bucket): (usize, Vec<u64>)| {
        let middle = bucket.len().checked_sub(1)? / 2;
        let (_, &mut median, _) = bucket.select_nth_unstable(middle);
        let start = index as u64 * width;
        Some((start, (start + width).min(span_ns), median))
    };
    latencies.into_iter().enumerate().map(median).collect()
}
