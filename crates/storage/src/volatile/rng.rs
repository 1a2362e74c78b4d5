//! Random number generator of the power-cut layer: splitmix64 (Steele, Lea and Flood, "Fast
//! splittable pseudorandom number generators", OOPSLA 2014). The generator is small, and uniform
//! enough for random choices.

/// Random numbers that depend only on the seed.
#[derive(Debug)]
pub(crate) struct SimRng(u64);

impl SimRng {
    /// Creates a generator with a seed.
    pub(crate) fn new(seed: u64) -> SimRng {
        SimRng(seed)
    }

    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut word = self.0;
        word = (word ^ (word >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        word = (word ^ (word >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        word ^ (word >> 31)
    }

    /// Returns a number in `0..bound`.
    pub(crate) fn below(&mut self, bound: usize) -> usize {
        assert!(bound > 0, "nothing lies below zero");
        (self.next() % bound as u64) as usize
    }

    /// Returns true with probability 1 / `times`.
    pub(crate) fn once_in(&mut self, times: usize) -> bool {
        self.below(times) == 0
    }

    pub(crate) fn shuffle<T>(&mut self, items: &mut [T]) {
        for at in (1..items.len()).rev() {
            items.swap(at, self.below(at + 1));
        }
    }
}
