//! Computes quantiles, mean and variation of 64-bit values in a fixed table with sixteen buckets
//! per power of two.

const SUB_BITS: u32 = 4;
const SUB: usize = 1 << SUB_BITS;
const BUCKETS: usize = SUB * (64 - SUB_BITS as usize + 1);

#[derive(Debug)]
pub(super) struct Quantiles {
    counts: Box<[u64; BUCKETS]>,
    count: u64,
    max: u64,
    mean: f64,
    /// Sum of squared distances from the mean (Welford's algorithm).
    squares: f64,
}

impl Default for Quantiles {
    fn default() -> Self {
        Quantiles { counts: Box::new([0; BUCKETS]), count: 0, max: 0, mean: 0.0, squares: 0.0 }
    }
}

fn bucket_of(value: u64) -> usize {
    if value < SUB as u64 {
        return value as usize;
    }
    let shift = value.ilog2() - SUB_BITS;
    SUB * (shift as usize + 1) + (value >> shift) as usize % SUB
}

/// Returns the largest value of a bucket.
fn upper_of(bucket: usize) -> u64 {
    if bucket < SUB {
        return bucket as u64;
    }
    let shift = (bucket / SUB - 1) as u32;
    let first = (SUB + bucket % SUB) as u64;
    (first << shift) + ((1 << shift) - 1)
}

impl Quantiles {
    pub(super) fn add(&mut self, value: u64) {
        self.counts[bucket_of(value)] += 1;
        self.count += 1;
        self.max = self.max.max(value);
        let distance = value as f64 - self.mean;
        self.mean += distance / self.count as f64;
        self.squares += distance * (value as f64 - self.mean);
    }

    pub(super) fn max(&self) -> u64 {
        self.max
    }

    pub(super) fn mean(&self) -> f64 {
        self.mean
    }

    /// Returns the standard deviation divided by the mean, or 0 if the mean is 0.
    pub(super) fn variation(&self) -> f64 {
        if self.mean == 0.0 { 0.0 } else { (self.squares / self.count as f64).sqrt() / self.mean }
    }

    /// Returns an upper bound of the `q` quantile, or 0 if there are no values.
    pub(super) fn quantile(&self, q: f64) -> u64 {
        let rank = ((self.count as f64 * q).ceil() as u64).max(1);
        let mut seen = 0;
        for (bucket, count) in self.counts.iter().enumerate() {
            seen += count;
            if seen >= rank {
                return upper_of(bucket).min(self.max);
            }
        }
        self.max
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buckets_join_without_gaps_and_hold_their_values() {
        for bucket in 0..BUCKETS {
            assert_eq!(bucket_of(upper_of(bucket)), bucket);
            if bucket + 1 < BUCKETS {
                assert_eq!(bucket_of(upper_of(bucket) + 1), bucket + 1);
            }
        }
        assert_eq!(upper_of(BUCKETS - 1), u64::MAX);
    }

    #[test]
    fn quantiles_are_close_and_the_spread_is_right() {
        let mut found = Quantiles::default();
        (1..=1_000_u64).rev().for_each(|n| found.add(n * 1_000));
        for (q, exact) in [(0.5, 500_000.0), (0.9, 900_000.0), (0.99, 990_000.0)] {
            let ratio = found.quantile(q) as f64 / exact;
            assert!((1.0..1.0625).contains(&ratio), "{q}: {ratio}");
        }
        assert_eq!(found.quantile(1.0), 1_000_000);
        assert!((found.mean() - 500_500.0).abs() < 1e-3);
        // The variation of a uniform distribution is 1/√3.
        assert!((found.variation() - 0.5768).abs() < 1e-3, "{}", found.variation());
        assert_eq!(Quantiles::default().quantile(0.5), 0);
    }
}
