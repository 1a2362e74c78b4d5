//! Summarizes the latencies of a run: mean, median, 99th percentile, maximum and requests per
//! second.
//!
//! Percentiles are exact (nearest rank), because all latencies of a run are in memory.

/// One completed request of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sample {
    /// Time of sending, nanoseconds from the start of the run.
    pub at_ns: u64,
    /// Latency of the request, nanoseconds.
    pub latency_ns: u64,
    /// True if flash served the request, `None` if unknown.
    pub hit: Option<bool>,
}

/// Summary of one run. All values of a run without requests are zero.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Summary {
    /// Number of completed requests.
    pub requests: u64,
    /// Arithmetic mean of the latencies, nanoseconds.
    pub mean_ns: u64,
    /// Median of the latencies, nanoseconds.
    pub p50_ns: u64,
    /// 99th percentile of the latencies, nanoseconds.
    pub p99_ns: u64,
    /// Latency of the slowest request, nanoseconds.
    pub max_ns: u64,
    /// Completed requests per second, from the first send to the last completion.
    pub iops: f64,
    /// Hit ratio of the requests for which hit or miss is known, 0 to 1.
    pub hit_ratio: Option<f64>,
}

impl Summary {
    /// Computes the summary of these samples. The order of the samples does not matter.
    pub fn of(samples: &[Sample]) -> Summary {
        let mut latencies: Vec<u64> = samples.iter().map(|sample| sample.latency_ns).collect();
        latencies.sort_unstable();
        let Some(&max_ns) = latencies.last() else { return Summary::default() };
        let sum: u128 = latencies.iter().map(|&ns| u128::from(ns)).sum();
        let start = samples.iter().map(|sample| sample.at_ns).min().unwrap_or(0);
        let end = samples.iter().map(|sample| sample.at_ns + sample.latency_ns).max().unwrap_or(0);
        let known = samples.iter().filter_map(|sample| sample.hit);
        let (hits, judged) = known.fold((0u64, 0u64), |(hits, n), hit| (hits + u64::from(hit), n + 1));
        Summary {
            requests: latencies.len() as u64,
            mean_ns: (sum / latencies.len() as u128) as u64,
            p50_ns: percentile(&latencies, 50),
            p99_ns: percentile(&latencies, 99),
            max_ns,
            iops: if end > start { latencies.len() as f64 * 1e9 / (end - start) as f64 } else { 0.0 },
            hit_ratio: (judged > 0).then(|| hits as f64 / judged as f64),
        }
    }
}

/// Returns a percentile of sorted values by nearest rank: the smallest value that `percent` % of
/// the values do not exceed.
fn percentile(sorted: &[u64], percent: usize) -> u64 {
    let rank = (sorted.len() * percent).div_ceil(100).max(1);
    sorted[rank - 1]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::prng::Prng;

    fn samples(n: u64, seed: u64) -> Vec<Sample> {
        let mut dice = Prng::new(seed);
        (0..n)
            .map(|i| Sample { at_ns: i * 1000, latency_ns: 1 + dice.below(1_000_000), hit: Some(i % 4 != 0) })
            .collect()
    }

    /// Computes a percentile by counting: the least sample that enough samples do not exceed.
    fn by_counting(samples: &[Sample], share: f64) -> u64 {
        let enough = |ns: u64| {
            let below = samples.iter().filter(|sample| sample.latency_ns <= ns).count();
            below as f64 >= share * samples.len() as f64
        };
        samples.iter().map(|sample| sample.latency_ns).filter(|&ns| enough(ns)).min().unwrap()
    }

    #[test]
    fn figures_agree_with_their_definitions() {
        for n in [1, 2, 3, 99, 100, 101, 1000] {
            let samples = samples(n, n);
            let summary = Summary::of(&samples);
            let mean = samples.iter().map(|sample| sample.latency_ns as f64).sum::<f64>() / n as f64;
            assert!((summary.mean_ns as f64 - mean).abs() <= 1.0);
            assert_eq!(summary.p50_ns, by_counting(&samples, 0.50));
            assert_eq!(summary.p99_ns, by_counting(&samples, 0.99));
            assert_eq!(summary.max_ns, by_counting(&samples, 1.0));
            assert_eq!(summary.requests, n);
        }
    }

    #[test]
    fn iops_span_the_first_send_to_the_last_completion() {
        let at = |at_ns, latency_ns| Sample { at_ns, latency_ns, hit: None };
        let summary = Summary::of(&[at(1_000, 500), at(500_001_000, 499_999_000), at(2_000, 700)]);
        assert!((summary.iops - 3.0).abs() < 0.001, "{}", summary.iops);
        assert_eq!(summary.hit_ratio, None);
    }

    #[test]
    fn hits_count_only_where_they_are_known() {
        assert_eq!(Summary::of(&samples(400, 1)).hit_ratio, Some(0.75));
        assert_eq!(Summary::of(&[]), Summary::default());
    }
}
