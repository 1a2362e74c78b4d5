//! Belady's optimum: the minimum number of misses of any replacement policy with knowledge of future
//! requests. It is the bound for the policies.
//!
//! Belady: "A study of replacement algorithms for a virtual-storage computer", IBM Systems Journal 1966:
//! the block whose next use is furthest in the future is evicted. Here that may be the block of the present
//! request, which is then not admitted, as with policies that refuse admission. So the bound applies to
//! those policies too (a cache that must admit every block misses a little more).
//!
//! Every request is a use of one whole block. The caller chooses the requests whose misses count, for
//! example reads.
//!
//! Time: O(n log n) for n requests and each cache size; the logarithm's base is 64. Memory: 4 bytes per
//! request; about 30 bytes per distinct block while the next uses are computed; then an eighth of a byte
//! per request for each size in progress. So a trace of 2³² − 1 requests, the maximum, takes 18 GB at one
//! size.

use std::collections::HashMap;

use anyhow::ensure;

/// No later use. Request numbers are lower.
const NEVER: u32 = u32::MAX;

/// The next use of the same block for each request of a trace.
#[derive(Debug)]
pub struct NextUses {
    next: Vec<u32>,
    /// A bit for each request: whether its misses count.
    counts: Vec<u64>,
    counted: u64,
    distinct: u64,
}

impl NextUses {
    /// Creates it from the requested blocks, in order. The keys are any numbers that identify blocks.
    ///
    /// # Errors
    /// If there are 2³² requests or more.
    pub fn new(keys: impl IntoIterator<Item = u64>) -> anyhow::Result<NextUses> {
        Self::counting(keys.into_iter().map(|key| (key, true)))
    }

    /// As [`new`](Self::new), with a flag whether each request's misses count.
    ///
    /// # Errors
    /// If there are 2³² requests or more.
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

    /// Returns the number of requests.
    pub fn requests(&self) -> u64 {
        self.next.len() as u64
    }

    /// Returns the number of requests whose misses count.
    pub fn counted(&self) -> u64 {
        self.counted
    }

    /// Returns the number of different blocks.
    pub fn distinct(&self) -> u64 {
        self.distinct
    }

    /// Returns the counted misses of the replacement that is optimal for all requests, with a cache of
    /// `blocks` blocks.
    pub fn misses(&self, blocks: u64) -> u64 {
        // The cache, as the times of its blocks' next uses. A time belongs to one block, so a request finds
        // its block in the cache exactly if its own time is in the set. Blocks without a later use are
        // never in it.
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

    /// Returns the miss ratio of the counted requests at each of these cache sizes, in blocks. 0 for an
    /// empty trace.
    pub fn miss_ratios(&self, sizes: &[u64]) -> Vec<f64> {
        let requests = self.counted.max(1) as f64;
        sizes.iter().map(|blocks| self.misses(*blocks) as f64 / requests).collect()
    }
}

/// A set of times below a bound, with fast access to the last one: a bitmap, above it a bitmap of its
/// non-empty words, and so on up to a single word.
struct Moments {
    /// From the times themselves upwards.
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

    /// Returns false if it was not present.
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
