//! A latency histogram of fixed size. Each power of two has eight buckets, so a quantile is at most
//! 12.5 % too high. Values are in nanoseconds, from 256 ns (smaller values count as 256 ns) to 137
//! s.

const SUB_BITS: u32 = 3;
const SUB: usize = 1 << SUB_BITS;
const LOW_BITS: u32 = 8;
const HIGH_BITS: u32 = 37;
const BUCKETS: usize = (HIGH_BITS - LOW_BITS) as usize * SUB + 1;

/// A histogram of latencies.
#[derive(Clone, Debug)]
pub struct Histogram {
    counts: Box<[u64; BUCKETS]>,
    count: u64,
    sum: u64,
    max: u64,
}

impl Default for Histogram {
    fn default() -> Self {
        Histogram { counts: Box::new([0; BUCKETS]), count: 0, sum: 0, max: 0 }
    }
}

impl Histogram {
    /// Adds one latency to the histogram.
    #[inline]
    pub fn record(&mut self, nanos: u64) {
        self.counts[bucket_of(nanos)] += 1;
        self.count += 1;
        self.sum = self.sum.saturating_add(nanos);
        self.max = self.max.max(nanos);
    }

    /// Adds all latencies of another histogram.
    pub fn merge(&mut self, other: &Histogram) {
        for (mine, theirs) in self.counts.iter_mut().zip(other.counts.iter()) {
            *mine += theirs;
        }
        self.count += other.count;
        self.sum = self.sum.saturating_add(other.sum);
        self.max = self.max.max(other.max);
    }

    /// Returns the number of values.
    pub fn count(&self) -> u64 {
        self.count
    }

    /// Returns the sum of all values, nanoseconds.
    pub fn sum_ns(&self) -> u64 {
        self.sum
    }

    /// Returns the mean of the values, nanoseconds; 0 without values.
    pub fn mean_ns(&self) -> u64 {
        self.sum.checked_div(self.count).unwrap_or(0)
    }

    /// Returns the largest value, nanoseconds.
    pub fn max_ns(&self) -> u64 {
        self.max
    }

    /// Returns an upper bound of the `q` quantile (0 to 1), nanoseconds; 0 without values.
    pub fn quantile_ns(&self, q: f64) -> u64 {
        let rank = ((q.clamp(0.0, 1.0) * self.count as f64).ceil() as u64).max(1);
        let mut seen = 0;
        for (upper, count) in self.buckets() {
            seen += count;
            if seen >= rank {
                return upper.min(self.max);
            }
        }
        0
    }

    /// Returns the buckets that are not empty: the largest value of each (nanoseconds), and its
    /// count.
    pub fn buckets(&self) -> impl Iterator<Item = (u64, u64)> + '_ {
        self.counts
            .iter()
            .enumerate()
            .filter(|(_, count)| **count > 0)
            .map(|(i, count)| (upper_of(i), *count))
    }
}

#[inline]
fn bucket_of(nanos: u64) -> usize {
    let nanos = nanos.max(1 << LOW_BITS);
    let log = nanos.ilog2();
    if log >= HIGH_BITS {
        return BUCKETS - 1;
    }
    let sub = (nanos >> (log - SUB_BITS)) as usize & (SUB - 1);
    (log - LOW_BITS) as usize * SUB + sub
}

fn upper_of(bucket: usize) -> u64 {
    if bucket == BUCKETS - 1 {
        return u64::MAX;
    }
    let log = (bucket / SUB) as u32 + LOW_BITS;
    let sub = (bucket % SUB) as u64;
    ((SUB as u64 + sub + 1) << (log - SUB_BITS)) - 1
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_value_lies_in_its_bucket() {
        for value in (0..37).flat_map(|bits| [(1u64 << bits), (1 << bits) + 1, (2 << bits) - 1]) {
            let bucket = bucket_of(value);
            assert!(value <= upper_of(bucket), "{value} above bucket {bucket}");
            if bucket > 0 {
                assert!(value > upper_of(bucket - 1), "{value} below bucket {bucket}");
            }
        }
        assert_eq!(bucket_of(u64::MAX), BUCKETS - 1);
    }

    #[test]
    fn quantiles_are_within_an_eighth() {
        let mut histogram = Histogram::default();
        for value in 1..=100_000u64 {
            histogram.record(value * 1000);
        }
        for q in [0.01, 0.5, 0.9, 0.99, 0.999] {
            let exact = q * 100_000_000.0;
            let got = histogram.quantile_ns(q) as f64;
            assert!(got >= exact && got <= exact * 1.13, "q {q}: {got} for {exact}");
        }
        assert_eq!(histogram.quantile_ns(1.0), 100_000_000);
        assert_eq!(Histogram::default().quantile_ns(0.5), 0);
    }
}
