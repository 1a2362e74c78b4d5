//! Seeded random number generator: the only source of randomness in a simulated history.

/// SplitMix64 generator (Steele, Lea, Flood: "Fast splittable pseudorandom number generators",
/// OOPSLA 2014).
#[derive(Clone, Debug)]
pub struct SimRng(u64);

impl SimRng {
    /// Creates a generator. Equal seeds give equal random numbers.
    pub fn new(seed: u64) -> Self {
        SimRng(seed ^ 0x686f_6220_776f_726c)
    }

    /// Returns a random 64-bit number.
    pub fn roll(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        scatter(self.0)
    }

    /// Returns a random number from 0 to `n` − 1. `n` must not be 0.
    pub fn below(&mut self, n: u64) -> u64 {
        ((u128::from(self.roll()) * u128::from(n)) >> 64) as u64
    }

    /// Returns a random number from `low` to `high`, both inclusive.
    pub fn between(&mut self, low: u64, high: u64) -> u64 {
        low + self.below(high - low + 1)
    }

    /// Returns true with a probability of `permille` / 1000.
    pub fn chance(&mut self, permille: u32) -> bool {
        permille > 0 && self.below(1000) < u64::from(permille)
    }

    /// Returns a random element of the slice.
    pub fn pick<T: Copy>(&mut self, from: &[T]) -> T {
        from[self.below(from.len() as u64) as usize]
    }

    /// Returns a random duration in nanoseconds. Most values are near `mean`, and some are much
    /// larger.
    pub fn latency(&mut self, mean: u64) -> u64 {
        let base = self.between(mean / 4, mean + mean / 2);
        if self.chance(50) { base * self.between(2, 20) } else { base }
    }
}

/// Returns the SplitMix64 finalizer of `x`, which scatters the bits.
pub fn scatter(mut x: u64) -> u64 {
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_seed_one_sequence_within_bounds() {
        let (mut a, mut b) = (SimRng::new(7), SimRng::new(7));
        for _ in 0..1000 {
            assert_eq!(a.roll(), b.roll());
            assert!(a.below(3) < 3);
            assert!((5..=6).contains(&a.between(5, 6)));
            b = a.clone();
        }
        assert!(!a.chance(0) && a.chance(1000));
    }
}
