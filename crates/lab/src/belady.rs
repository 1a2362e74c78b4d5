//! Belady's optimum: the minimum number of misses of any replacement policy, computed with
//! knowledge of future requests.
//!
//! The algorithm evicts the block whose next use is furthest in the future (Belady: "A study of
//! replacement algorithms for a virtual-storage computer", IBM Systems Journal 1966). If this is
//! the block of the current request, the block is not admitted. The bound thus also applies to
//! policies that refuse admission. A cache that must admit every block misses a little more.
//!
//! Every request uses one whole block. The caller chooses the requests whose misses count, for
//! example reads.
//!
//! Time: O(n log n) for n requests and each cache size, where the logarithm has base 64. Memory: 4
//! bytes per request, and about 30 bytes per distinct block while the next uses are computed. After
//! that, each cache size in progress needs an eighth of a byte per request. A trace of the maximum
//! 2³² − 1 requests takes 18 GB for one cache size.

use std::collections::HashMap;

use anyhow::ensure;

/// Marks a block without a later use. Request numbers are lower.
const NEVER: u32 = u32::MAX;

/// For each request of a trace, the number of the next request that uses the same block.
#[derive(Debug)]
pub struct NextUses {
    next: Vec<u32>,
    /// One bit per request: true if a miss of the request counts.
    counts: Vec<u64>,
    counted: u64,
    distinct: u64,
}

impl NextUses {
    /// Computes the next uses of the requested blocks, given in order. The keys are any numbers
    /// that identify blocks.
    ///
    /// # Errors
    /// Returns an error for 2³² requests or more.
    pub fn new(keys: impl IntoIterator<Item = u64>) -> anyhow::Result<NextUses> {
        Self::counting(keys.into_iter().map(|key| (key, true)))
    }

    /// Computes the next uses like [`new`](Self::new), with a flag per request that is true if its
    /// miss counts.
    ///
    /// # Errors
    /// Returns an error for 2³² requests or more.
    pub fn counting(uses: impl IntoIterator<Item = (u64, bool)>) -> anyhow::Result<NextUses> {
        let mut next: Vec<u32> = Vec::new();
        let (mut counts, mut counted) = (Vec::new(), 0);
        let mut last_use: HashMap<u64, u32> = HashMap::new();
        for (key, is_counted) in uses {
            ensure!(
                next.len() < NEVER as usize,
                "Belady's optimum takes {NEVER} requests at most: cut the trace or sample its blocks"
            );
            if let Some(last) = last_use.insert(key, next.len() as u32) {
                next[last as usize] = next.len() as u32;
            }
            if next.len().is_multiple_of(64) {
                counts.push(0);
            }
            *counts.last_mut().expect("a word for each 64") |= u64::from(is_counted) << (next.len() % 64);
            counted += u64::from(is_counted);
            next.push(NEVER);
        }
        Ok(NextUses { next, counts, counted, distinct: last_use.len() as u64 })
    }

    /// Returns the number of requests in the trace.
    pub fn requests(&self) -> u64 {
        self.next.len() as u64
    }

    /// Returns the number of requests whose misses count.
    pub fn counted(&self) -> u64 {
        self.counted
    }

    /// Returns the number of distinct blocks.
    pub fn distinct(&self) -> u64 {
        self.distinct
    }

    /// Returns the number of counted misses with a cache of `blocks` blocks. The replacement is
    /// optimal for all requests.
    pub fn misses(&self, blocks: u64) -> u64 {
        // The cache is a set of times: the next uses of its blocks. A time belongs to one block, so
        // a request is a hit exactly if its own time is in the set. Blocks without a later use are
        // never in the set.
        let mut cached = Moments::new(self.next.len());
        let (mut held, mut misses) = (0u64, 0);
        for (now, next) in (0..).zip(&self.next) {
            if cached.remove(now) {
                held -= 1;
            } else {
                misses += self.counts[now as usize / 64] >> (now % 64) & 1;
            }
            if *next != NEVER {
                cached.insert(*next);
                held += 1;
                if held > blocks {
                    let furthest = cached.last().expect("it holds something");
                    cached.remove(furthest);
                    held -= 1;
                }
            }
        }
        misses
    }

    /// Returns the miss ratio of the counted requests at each of these cache sizes, in blocks. The
    /// ratio of an empty trace is 0.
    pub fn miss_ratios(&self, sizes: &[u64]) -> Vec<f64> {
        let requests = self.counted.max(1) as f64;
        sizes.iter().map(|blocks| self.misses(*blocks) as f64 / requests).collect()
    }
}

/// A set of times below a bound, with fast access to the last time. The set is a bitmap, with a
/// bitmap of its non-empty words above it, and so on up to a single word.
struct Moments {
    /// Bitmaps from the times themselves up to the single word.
    levels: Vec<Vec<u64>>,
}

impl Moments {
    fn new(bound: usize) -> Self {
        let mut levels = vec![vec![0; bound.div_ceil(64).max(1)]];
        while let Some(top) = levels.last()
            && top.len() > 1
        {
            levels.push(vec![0; top.len().div_ceil(64)]);
        }
        Moments { levels }
    }

    fn insert(&mut self, moment: u32) {
        let mut at = moment as usize;
        for level in &mut self.levels {
            let word = &mut level[at / 64];
            let was_empty = *word == 0;
            *word |= 1 << (at % 64);
            if !was_empty {
                return;
            }
            at /= 64;
        }
    }

    /// Removes a time. Returns false if the set did not have it.
    fn remove(&mut self, moment: u32) -> bool {
        let mut at = moment as usize;
        if self.levels[0][at / 64] >> (at % 64) & 1 == 0 {
            return false;
        }
        for level in &mut self.levels {
            let word = &mut level[at / 64];
            *word &= !(1 << (at % 64));
            if *word != 0 {
                break;
            }
            at /= 64;
        }
        true
    }

    fn last(&self) -> Option<u32> {
        let mut at = 0;
        for level in self.levels.iter().rev() {
            at = at * 64 + level[at].checked_ilog2()? as usize;
        }
        Some(at as u32)
    }
}

#[cfg(test)]
mod tests;
