//! Thins out samples without changing the look of a chart, and computes the medians of time
//! intervals.

use crate::summary::Sample;

/// Number of the slowest requests that a chart always shows, even if other requests are left out.
const SLOWEST_KEPT: usize = 24;

/// Returns about `max` samples at regular intervals, and the slowest samples. If there are fewer
/// samples, all are returned.
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

/// Returns the median latency of each time interval as start, end and median, nanoseconds. The
/// value is `None` for an interval without requests.
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

/// Returns the points with at most four points per pixel column: first, lowest, highest and last.
/// The points must be sorted by x.
pub(super) fn columns(points: &[(f64, f64)]) -> Vec<(f64, f64)> {
    let mut kept: Vec<(f64, f64)> = Vec::new();
    for column in points.chunk_by(|a, b| a.0.floor() == b.0.floor()) {
        if column.len() <= 4 {
            kept.extend_from_slice(column);
            continue;
        }
        let by_height = |a: &usize, b: &usize| column[*a].1.total_cmp(&column[*b].1);
        let lowest = (0..column.len()).min_by(by_height);
        let highest = (0..column.len()).max_by(by_height);
        let mut chosen: Vec<usize> =
            [Some(0), lowest, highest, Some(column.len() - 1)].into_iter().flatten().collect();
        chosen.sort_unstable();
        chosen.dedup();
        kept.extend(chosen.into_iter().map(|index| column[index]));
    }
    kept
}
