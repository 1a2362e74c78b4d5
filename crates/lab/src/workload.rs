//! Generates synthetic disk I/O: offsets by a Zipf distribution, and reads or writes.
//!
//! A workload is an iterator of [`Access`]es. The same seed gives the same accesses. A workload has
//! no times: the driver chooses rate and queue depth. Offsets and lengths are in bytes and
//! multiples of the request size.

use crate::prng::{Prng, splitmix64};
pub use hob_trace::Op;

/// One request to a disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Access {
    /// Offset of the first byte.
    pub offset: u64,
    /// Length in bytes.
    pub len: u32,
    /// Operation of the request: read or write.
    pub op: Op,
}

/// Configuration of a workload.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct WorkloadConfig {
    /// Number of bytes that the accesses cover, from offset 0. A remainder smaller than a request
    /// is not used.
    pub footprint_bytes: u64,
    /// Size of each request, bytes.
    pub request_bytes: u32,
    /// Skew of the Zipf distribution of the accesses, 0 or more: the k-th most popular location has a
    /// probability proportional to `1 / k^theta`. Popular locations are scattered over the disk. 0 is
    /// uniform, and disks of VMs have a skew of about 0.8–1.2.
    pub theta: f64,
    /// Share of requests that are reads, per mille. The other requests are writes.
    pub read_permille: u16,
    /// Seed of the random numbers.
    pub seed: u64,
}

/// An endless iterator of accesses.
#[derive(Clone, Debug)]
pub struct Workload {
    request_bytes: u32,
    read_permille: u16,
    law: Zipf,
    scatter: Scatter,
    dice: Prng,
}

impl Workload {
    /// Creates the workload, before its first access.
    ///
    /// # Panics
    /// Panics if the footprint is smaller than a request, the share of reads exceeds 1000 ‰, or the
    /// skew is negative or not a number.
    pub fn new(config: &WorkloadConfig) -> Self {
        assert!(config.request_bytes > 0, "requests have a size");
        assert!(config.read_permille <= 1000, "shares are thousandths");
        let blocks = config.footprint_bytes / u64::from(config.request_bytes);
        assert!(blocks > 0, "the footprint holds at least one request");
        let WorkloadConfig { request_bytes, read_permille, theta, seed, .. } = *config;
        let (law, scatter) = (Zipf::new(blocks, theta), Scatter::new(blocks, seed));
        Workload { request_bytes, read_permille, law, scatter, dice: Prng::new(seed) }
    }
}

impl Iterator for Workload {
    type Item = Access;

    fn next(&mut self) -> Option<Access> {
        let block = self.scatter.place(self.law.rank(&mut self.dice));
        let reads = self.dice.below(1000) < u64::from(self.read_permille);
        let op = if reads { Op::Read } else { Op::Write };
        Some(Access { offset: block * u64::from(self.request_bytes), len: self.request_bytes, op })
    }
}

/// Zipf distribution over ranks `0..n`: rank `k` has a probability proportional to `1 / (k +
/// 1)^theta`.
///
/// The numbers are exact and need constant memory and time, by rejection-inversion (Hörmann and
/// Derflinger, "Rejection-inversion to generate variates from monotone discrete distributions", ACM
/// TOMACS 1996).
#[derive(Clone, Debug)]
pub struct Zipf {
    n: f64,
    theta: f64,
    /// Integral of the hat function of the rejection method up to the first rank. `area_last` is
    /// the integral up to the last rank.
    area_first: f64,
    area_last: f64,
    /// Maximum distance between a candidate and its real-valued origin at which the candidate is
    /// accepted without a test.
    shortcut: f64,
}

impl Zipf {
    /// Creates the distribution over `n` ranks. A `theta` of 0 is uniform.
    ///
    /// # Panics
    /// Panics if `n` is 0, or if the skew is negative or not a number.
    pub fn new(n: u64, theta: f64) -> Self {
        assert!(n > 0, "a Zipf distribution has at least one item");
        assert!(theta >= 0.0 && theta.is_finite(), "the skew is {theta}, and must be a number from 0");
        let mut law = Zipf { n: n as f64, theta, area_first: 0.0, area_last: 0.0, shortcut: 0.0 };
        law.area_first = law.area(1.5) - 1.0;
        law.area_last = law.area(law.n + 0.5);
        law.shortcut = 2.0 - law.area_inverse(law.area(2.5) - law.weight(2.0));
        law
    }

    /// Returns a random rank.
    pub fn rank(&self, dice: &mut Prng) -> u64 {
        loop {
            let area = self.area_last + dice.unit() * (self.area_first - self.area_last);
            let x = self.area_inverse(area);
            let k = x.round().clamp(1.0, self.n);
            if k - x <= self.shortcut || area >= self.area(k + 0.5) - self.weight(k) {
                return k as u64 - 1;
            }
        }
    }

    fn weight(&self, x: f64) -> f64 {
        (-self.theta * x.ln()).exp()
    }

    /// Returns the integral of the weight: `(x^(1-θ) - 1) / (1-θ)`, which is `ln x` at θ = 1.
    fn area(&self, x: f64) -> f64 {
        let log = x.ln();
        let exponent = (1.0 - self.theta) * log;
        if exponent.abs() < 1e-8 { log * (1.0 + exponent / 2.0) } else { log * exponent.exp_m1() / exponent }
    }

    fn area_inverse(&self, area: f64) -> f64 {
        // Rounding may move the argument just below the pole of the logarithm.
        let scaled = (area * (1.0 - self.theta)).max(-1.0);
        let log =
            if scaled.abs() < 1e-8 { area * (1.0 - scaled / 2.0) } else { area * scaled.ln_1p() / scaled };
        log.exp()
    }
}

/// Random permutation of `0..n` without a table. A Feistel network over the next power of four is
/// applied repeatedly until the result is inside the range (Black and Rogaway, "Ciphers with
/// arbitrary finite domains", CT-RSA 2002).
#[derive(Clone, Debug)]
pub struct Scatter {
    n: u64,
    half_bits: u32,
    keys: [u64; 4],
}

impl Scatter {
    /// Creates the permutation of `0..n` for this seed.
    ///
    /// # Panics
    /// Panics if `n` is 0 or larger than 2^62.
    pub fn new(n: u64, seed: u64) -> Self {
        assert!(n > 0 && n <= 1 << 62, "{n} places cannot be shuffled");
        let half_bits = n.next_power_of_two().ilog2().div_ceil(2).max(1);
        let mut counter = seed ^ 0x7363_6174_7465_7221;
        Scatter { n, half_bits, keys: std::array::from_fn(|_| splitmix64(&mut counter)) }
    }

    /// Returns the location of a rank. Different ranks have different locations.
    pub fn place(&self, rank: u64) -> u64 {
        assert!(rank < self.n, "rank {rank} of {}", self.n);
        let mut word = self.round_trip(rank);
        while word >= self.n {
            word = self.round_trip(word);
        }
        word
    }

    fn round_trip(&self, word: u64) -> u64 {
        let mask = (1u64 << self.half_bits) - 1;
        let (mut left, mut right) = (word >> self.half_bits, word & mask);
        for key in self.keys {
            let mut mixed = right ^ key;
            (left, right) = (right, (left ^ splitmix64(&mut mixed)) & mask);
        }
        left << self.half_bits | right
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(theta: f64) -> WorkloadConfig {
        WorkloadConfig {
            footprint_bytes: 8192 * 1000,
            request_bytes: 8192,
            theta,
            read_permille: 700,
            seed: 1,
        }
    }

    /// Compares the frequency of each rank with the frequency that the law predicts, by the
    /// chi-squared statistic.
    #[test]
    fn zipf_frequencies_follow_the_law() {
        for (theta, n) in [(0.0, 50), (0.5, 100), (0.9, 1000), (1.0, 1000), (1.2, 300), (2.5, 20), (1.0, 1)] {
            let law = Zipf::new(n, theta);
            let mut dice = Prng::new(42);
            let draws = 400_000;
            let mut counts = vec![0u64; n as usize];
            for _ in 0..draws {
                counts[law.rank(&mut dice) as usize] += 1;
            }
            let weights: Vec<f64> = (1..=n).map(|k| (k as f64).powf(-theta)).collect();
            let total: f64 = weights.iter().sum();
            let chi_squared: f64 = counts
                .iter()
                .zip(&weights)
                .map(|(&count, weight)| {
                    let expected = weight / total * f64::from(draws);
                    (count as f64 - expected).powi(2) / expected
                })
                .sum();
            // Mean n − 1, deviation √(2(n − 1)): five deviations are never exceeded by chance.
            let freedom = (n - 1) as f64;
            assert!(
                chi_squared <= freedom + 5.0 * (2.0 * freedom).sqrt(),
                "θ {theta}, n {n}: {chi_squared:.0}"
            );
        }
    }

    #[test]
    fn zipf_stays_in_range_over_a_huge_disk() {
        let law = Zipf::new(1 << 40, 1.0);
        let mut dice = Prng::new(3);
        assert!((0..100_000).all(|_| law.rank(&mut dice) < 1 << 40));
    }

    #[test]
    fn scatter_moves_every_rank_to_a_place_of_its_own() {
        for n in [1, 2, 3, 17, 256, 1000, 4097] {
            let scatter = Scatter::new(n, 9);
            let mut seen = vec![false; n as usize];
            for rank in 0..n {
                assert!(!std::mem::replace(&mut seen[scatter.place(rank) as usize], true), "{rank} of {n}");
            }
        }
    }

    #[test]
    fn hot_blocks_are_not_neighbours() {
        let scatter = Scatter::new(1_000_000, 5);
        let mut hot: Vec<u64> = (0..100).map(|rank| scatter.place(rank)).collect();
        hot.sort_unstable();
        assert!(hot.windows(2).filter(|pair| pair[1] - pair[0] == 1).count() <= 1);
        assert!(hot[0] < 100_000 && hot[99] > 900_000, "spread over the whole disk");
    }

    #[test]
    fn a_seed_is_a_workload_and_another_seed_another() {
        for theta in [0.0, 1.0] {
            let list =
                |seed| Workload::new(&WorkloadConfig { seed, ..config(theta) }).take(500).collect::<Vec<_>>();
            assert_eq!(list(1), list(1));
            assert_ne!(list(1), list(2));
        }
    }

    #[test]
    fn accesses_stay_inside_and_keep_their_shares() {
        let list: Vec<Access> = Workload::new(&config(0.9)).take(50_000).collect();
        assert!(list.iter().all(|access| access.offset + 8192 <= 8192 * 1000 && access.offset % 8192 == 0));
        let reads = list.iter().filter(|access| access.op == Op::Read).count();
        assert!(reads.abs_diff(35_000) < 500, "{reads} of 50000");
    }
}
