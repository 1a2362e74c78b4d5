//! A seeded random number generator: the only source of randomness in a history.

/// SplitMix64 (Steele, Lea, Flood: "Fast splittable pseudorandom number generators", OOPSLA 2014).
#[derive(Clone, Debug)]
pub struct SimRng(u64);

impl SimRng {
    /// Creates a generator; equal seeds give equal numbers.
    pub fn new(seed: u64) -> Self {
        SimRng(seed ^ 0x686f_6220_776f_726c)
    }

    /// Returns any number.
    pub fn roll(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        scatter(self.0)
    }

    /// Returns a number in 0 … `n` − 1; `n` is not 0.
    pub fn below(&mut self, n: u64) -> u64 {
        ((u128::from(self.roll()) * u128::from(n)) >> 64) as u64
    }

    /// Returns a number in `low` … `high`, both inclusive.
    pub fn between(&mut self, low: u64, high: u64) -> u64 {
        low + self.below(high - low + 1)
    }

    /// Returns true `permille` times in a thousand.
    pub fn chance(&mut self, permille: u32) -> bool {
        permille > 0 && self.below(1000) < u64::from(permille)
    }

    /// Returns one of these values.
    pub fn pick<T: Copy>(&mut self, from: &[T]) -> T {
        from[self.below(from.len() as u64) as usize]
    }

    /// Returns a duration around `mean`, nanoseconds: usually near it, sometimes far above.
    pub fn latency(&mut self, mean: u64) -> u64 {
        let base = self.between(mean / 4, mean + mean / 2);
        if self.chance(50) { base * self.between(2, 20) } else { base }
    }
}

/// The finalizer of SplitMix64.
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
