//! The lab's random number generator. The generator's numbers depend only on the seed.
//!
//! The generator is xoshiro256++ (Blackman and Vigna, "Scrambled linear pseudorandom number
//! generators", ACM TOMS 2021). As its authors advise, splitmix64 (Steele, Lea and Flood, "Fast
//! splittable pseudorandom number generators", OOPSLA 2014) initializes the state. The generator is
//! not suitable for secrets.

/// xoshiro256++ random number generator.
#[derive(Clone, Debug)]
pub struct Prng {
    state: [u64; 4],
}

impl Prng {
    /// Creates a generator. Different seeds, also adjacent ones, give unrelated numbers.
    pub fn new(seed: u64) -> Self {
        let mut counter = seed;
        Prng { state: std::array::from_fn(|_| splitmix64(&mut counter)) }
    }

    /// Returns the next 64 random bits.
    pub fn next_u64(&mut self) -> u64 {
        let [a, b, c, d] = &mut self.state;
        let result = a.wrapping_add(*d).rotate_left(23).wrapping_add(*a);
        let shifted = *b << 17;
        *c ^= *a;
        *d ^= *b;
        *b ^= *c;
        *a ^= *d;
        *c ^= shifted;
        *d = d.rotate_left(45);
        result
    }

    /// Returns a uniform random number in `[0, 1)`, in steps of 2⁻⁵³.
    pub fn unit(&mut self) -> f64 {
        (self.next_u64() >> 11) as f64 / (1u64 << 53) as f64
    }

    /// Returns a uniform random number in `0..bound` without bias (Lemire, "Fast random integer
    /// generation in an interval", 2019).
    ///
    /// # Panics
    /// Panics if `bound` is zero.
    pub fn below(&mut self, bound: u64) -> u64 {
        assert!(bound > 0, "the bound of a random number must be above zero");
        let unfair = bound.wrapping_neg() % bound;
        loop {
            let product = u128::from(self.next_u64()) * u128::from(bound);
            if product as u64 >= unfair {
                return (product >> 64) as u64;
            }
        }
    }
}

/// Advances the counter by one step of splitmix64 and returns its output.
pub(crate) fn splitmix64(counter: &mut u64) -> u64 {
    *counter = counter.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let mut word = *counter;
    word = (word ^ (word >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    word = (word ^ (word >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    word ^ (word >> 31)
}

/// Returns incompressible bytes without repetition. The bytes are the same in every call.
pub(crate) fn noise(len: usize) -> Vec<u8> {
    let mut dice = Prng::new(0);
    let mut bytes: Vec<u8> = (0..len.div_ceil(8)).flat_map(|_| dice.next_u64().to_le_bytes()).collect();
    bytes.truncate(len);
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn splitmix64_gives_its_published_sequence() {
        let mut counter = 1_234_567;
        let words: [u64; 3] = std::array::from_fn(|_| splitmix64(&mut counter));
        assert_eq!(words, [6_457_827_717_110_365_317, 3_203_168_211_198_807_973, 9_817_491_932_198_370_423]);
    }

    #[test]
    fn xoshiro_gives_its_published_sequence() {
        let mut dice = Prng { state: [1, 2, 3, 4] };
        let words: [u64; 4] = std::array::from_fn(|_| dice.next_u64());
        assert_eq!(words, [41_943_041, 58_720_359, 3_588_806_011_781_223, 3_591_011_842_654_386]);
    }

    #[test]
    fn bounded_numbers_are_even_and_units_average_a_half() {
        let mut dice = Prng::new(7);
        let mut counts = [0u32; 7];
        let mut sum = 0.0;
        for _ in 0..70_000 {
            counts[dice.below(7) as usize] += 1;
            sum += dice.unit();
        }
        assert!(counts.iter().all(|&count| count.abs_diff(10_000) < 400), "{counts:?}");
        assert!((sum / 70_000.0 - 0.5).abs() < 0.01);
    }
}
