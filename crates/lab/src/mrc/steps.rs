//! A step function of the cache size, built from the sizes at which the value changes.

use hob_engine::sizing::Curve;

use super::stack::NEVER;

const CHUNK: usize = 512;

/// Collects the changes of a step function's value by cache size. Adjacent sizes share a chunk of
/// memory. Chunks without changes use no memory.
#[derive(Debug, Default)]
pub(super) struct Steps {
    chunks: Vec<Option<Box<[i64; CHUNK]>>>,
}

impl Steps {
    /// Adds `amount` to the value at `size` and all larger sizes. A `size` of `NEVER` has no
    /// effect.
    #[inline]
    pub(super) fn add(&mut self, size: u32, amount: i64) {
        if size == NEVER {
            return;
        }
        let (chunk, at) = (size as usize / CHUNK, size as usize % CHUNK);
        if chunk >= self.chunks.len() {
            self.chunks.resize_with(chunk + 1, || None);
        }
        self.chunks[chunk].get_or_insert_with(|| Box::new([0; CHUNK]))[at] += amount;
    }

    /// Returns the sizes at which the value changes, with the amounts.
    fn changes(&self) -> impl Iterator<Item = (u64, i64)> + '_ {
        let chunks = self.chunks.iter().enumerate();
        let chunks = chunks.filter_map(|(i, chunk)| chunk.as_ref().map(|chunk| (i, chunk)));
        let all = chunks.flat_map(|(i, chunk)| (i * CHUNK..).zip(chunk.iter()));
        all.filter(|(_, amount)| **amount != 0).map(|(size, amount)| (size as u64, *amount))
    }

    pub(super) fn finish(self) -> Values {
        let mut sum = 0;
        let values = self.changes().map(|(size, amount)| {
            sum += amount;
            (size, u64::try_from(sum).expect("the value is never negative"))
        });
        Values(values.collect())
    }
}

/// A step function of the cache size.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Values(Vec<(u64, u64)>);

impl Values {
    /// Returns the value for a cache of `blocks` blocks.
    pub(super) fn at(&self, blocks: u64) -> u64 {
        let next = self.0.partition_point(|(size, _)| *size <= blocks);
        next.checked_sub(1).map_or(0, |i| self.0[i].1)
    }

    /// Returns the miss ratio by cache size. The step function has the number of hits, and `total`
    /// is the number of accesses.
    pub(super) fn miss_curve(&self, total: u64) -> Curve {
        let mut before = 0;
        Curve::from_distances(
            total,
            self.0.iter().map(|&(size, sum)| {
                let hits = sum - before;
                before = sum;
                (size, hits)
            }),
        )
    }

    /// Returns the smallest size above which the value does not change.
    pub(super) fn end(&self) -> u64 {
        self.0.last().map_or(0, |(size, _)| *size)
    }
}
