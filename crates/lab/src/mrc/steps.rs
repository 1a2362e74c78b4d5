//! A quantity by cache size, gathered from the sizes at which it changes.

use hob_engine::sizing::Curve;

use super::stack::NEVER;

const CHUNK: usize = 512;

/// Changes by size, while they are gathered. Sizes near each other share a chunk; where nothing changes there is
/// none.
#[derive(Debug, Default)]
pub(super) struct Steps {
    chunks: Vec<Option<Box<[i64; CHUNK]>>>,
}

impl Steps {
    /// From this size on it is `amount` more. `NEVER` is no size.
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

    /// The sizes at which it changes, and by how much.
    fn changes(&self) -> impl Iterator<Item = (u64, i64)> + '_ {
        let chunks = self.chunks.iter().enumerate();
        let chunks = chunks.filter_map(|(i, chunk)| chunk.as_ref().map(|chunk| (i, chunk)));
        let all = chunks.flat_map(|(i, chunk)| (i * CHUNK..).zip(chunk.iter()));
        all.filter(|(_, amount)| **amount != 0).map(|(size, amount)| (size as u64, *amount))
    }

    /// Its values.
    pub(super) fn finish(self) -> Values {
        let mut sum = 0;
        let values = self.changes().map(|(size, amount)| {
            sum += amount;
            (size, u64::try_from(sum).expect("no more is taken away than was there"))
        });
        Values(values.collect())
    }
}

/// A quantity by cache size.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Values(Vec<(u64, u64)>);

impl Values {
    /// Its value for a cache of that many blocks.
    pub(super) fn at(&self, blocks: u64) -> u64 {
        let next = self.0.partition_point(|(size, _)| *size <= blocks);
        next.checked_sub(1).map_or(0, |i| self.0[i].1)
    }

    /// The share of `total` that these hits leave, by size.
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

    /// The same in another unit.
    pub(super) fn scaled(&self, by: u64) -> Values {
        Values(self.0.iter().map(|(size, value)| (*size, value * by)).collect())
    }

    /// The smallest size from which on nothing changes.
    pub(super) fn end(&self) -> u64 {
        self.0.last().map_or(0, |(size, _)| *size)
    }
}
