//! Belady's optimum: the minimum number of misses of any replacement policy, computed with
//! knowledge of future requests.
//!
//! The algorithm evicts the block whose next use is furthest in the future (Belady: "A study of
//! replacement algorithms for a virtual-storage computer", IBM Systems Journal 1966). If this is
//! the block of the current request, the block is not admitted. The bound thus also applies to
//! policies that refuse admission. A cache that must admit every block misses a little more.
//!
//! Every use is a use of one whole block. The caller chooses the uses whose misses count, for
//! example reads. The optimum keeps a block only for a later use that counts, because other uses,
//! such as writes, need no cached block.
//!
//! A read of several blocks is a hit only if all of them are cached. The optimum of reads of
//! several blocks is not known. [`NextUses::by_request`] gives an upper bound of their hits: a read
//! counts as a hit if its block with the oldest last use is cached. For reads of single blocks the
//! bound is the optimum.
//!
//! Time: O(n log n) for n requests and each cache size, where the logarithm has base 64. Memory: 4
//! bytes per request, and about 30 bytes per distinct block while the next uses are computed. After
//! that, each cache size in progress needs an eighth of a byte per request. A trace of the maximum
//! 2³² − 1 requests takes 18 GB for one cache size.

use std::collections::HashMap;
use std::ops::Range;

use anyhow::ensure;

/// Value in place of a request number for a block without a later use. All request numbers are
/// lower.
const NEVER: u32 = u32::MAX;

/// The number of the next use of the same block, for each use of a block in a trace.
#[derive(Debug)]
pub struct NextUses {
    next: Vec<u32>,
    /// One bit per request: true if a miss of the request counts.
    counts: Vec<u64>,
    counted: u64,
    distinct: u64,
}

impl NextUses {
    /// Computes the next uses of the requested blocks. `keys` has a number that identifies the
    /// block of each request, in the order of the requests.
    ///
    /// # Errors
    /// Returns an error for 2³² requests or more.
    pub fn new(keys: impl IntoIterator<Item = u64>) -> anyhow::Result<NextUses> {
        Self::counting(keys.into_iter().map(|key| (key, true)))
    }

    /// Computes the next uses of the requested blocks. `uses` has the number of the requested block
    /// and a flag for each request, in order. The flag is true if a miss of the request counts.
    ///
    /// # Errors
    /// Returns an error for 2³² requests or more.
    pub fn counting(uses: impl IntoIterator<Item = (u64, bool)>) -> anyhow::Result<NextUses> {
        let mut building = Building::default();
        uses.into_iter().try_for_each(|(key, is_counted)| building.add(key, is_counted))?;
        Ok(building.finish())
    }

    /// Computes the next uses for requests of adjacent blocks. `requests` has the blocks and a flag
    /// for each request, in order. The flag is true for a read. A read counts once: as a use of
    /// that one of its blocks whose last use is the oldest. The misses of this block are a lower
    /// bound of the read's misses.
    ///
    /// # Errors
    /// Returns an error if the requests use 2³² blocks or more.
    pub fn by_request(requests: impl IntoIterator<Item = (Range<u64>, bool)>) -> anyhow::Result<NextUses> {
        let mut building = Building::default();
        for (blocks, is_read) in requests {
            let last_use =
                |block: &u64| building.last_use.get(block).map(|last| i64::from(*last)).unwrap_or(-1);
            let oldest = blocks.clone().min_by_key(last_use);
            // The block with the oldest last use is added first, so that the bound does not assume
            // that the request's other blocks are cached with it.
            if let Some(oldest) = oldest {
                building.add(oldest, is_read)?;
            }
            blocks.filter(|block| Some(*block) != oldest).try_for_each(|block| building.add(block, false))?;
        }
        Ok(building.finish())
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

    fn is_counted(&self, request: u32) -> bool {
        self.counts[request as usize / 64] >> (request % 64) & 1 == 1
    }

    /// Returns the minimum number of counted misses with a cache of `blocks` blocks.
    pub fn misses(&self, blocks: u64) -> u64 {
        // The cache is a set of times: the next uses of its blocks. Each time belongs to one block,
        // so a request is a hit exactly if the time of this request is in the set. Blocks without a
        // next use, and blocks whose next use does not count, are never in the set, because they
        // cannot become a counted hit.
        let mut cached = Moments::new(self.next.len());
        let (mut held, mut misses) = (0u64, 0);
        for (now, next) in (0..).zip(&self.next) {
            if cached.remove(now) {
                held -= 1;
            } else {
                misses += u64::from(self.is_counted(now));
            }
            if *next != NEVER && self.is_counted(*next) {
                cached.insert(*next);
                held += 1;
                if held > blocks {
                    let furthest = cached.last().expect("the cache is not empty");
                    cached.remove(furthest);
                    held -= 1;
                }
            }
        }
        misses
    }

    /// Returns the miss ratio of the counted requests for each cache size in `sizes`, in blocks.
    /// The ratio of an empty trace is 0.
    pub fn miss_ratios(&self, sizes: &[u64]) -> Vec<f64> {
        let requests = self.counted.max(1) as f64;
        sizes.iter().map(|blocks| self.misses(*blocks) as f64 / requests).collect()
    }
}

/// Next uses of the requests that were added so far.
#[derive(Default)]
struct Building {
    next: Vec<u32>,
    counts: Vec<u64>,
    counted: u64,
    last_use: HashMap<u64, u32>,
}

impl Building {
    fn add(&mut self, key: u64, is_counted: bool) -> anyhow::Result<()> {
        let now = self.next.len();
        ensure!(
            now < NEVER as usize,
            "Belady's optimum takes {NEVER} requests at most: cut the trace or sample its blocks"
        );
        if let Some(last) = self.last_use.insert(key, now as u32) {
            self.next[last as usize] = now as u32;
        }
        if now.is_multiple_of(64) {
            self.counts.push(0);
        }
        *self.counts.last_mut().expect("each 64 requests have a word") |= u64::from(is_counted) << (now % 64);
        self.counted += u64::from(is_counted);
        self.next.push(NEVER);
        Ok(())
    }

    fn finish(self) -> NextUses {
        let Building { next, counts, counted, last_use } = self;
        NextUses { next, counts, counted, distinct: last_use.len() as u64 }
    }
}

/// A set of times below a bound, with fast access to the last time. The lowest level of the set is
/// a bitmap of the times. Each bit of a higher level tells whether one word of the level below is
/// non-zero. The highest level is a single word.
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
