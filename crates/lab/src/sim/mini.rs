//! Selects the blocks that a miniature simulation includes.

use crate::prng::splitmix64;
use hob_trace::Record;

/// A sample of the blocks, the same in each run.
#[derive(Clone, Copy, Debug)]
pub(super) struct Sample {
    /// A block is in the sample if its hash is below this threshold.
    threshold: u64,
    block_bytes: u64,
}

impl Sample {
    pub(super) fn new(rate: f64, block_bytes: u32) -> Sample {
        Sample { threshold: (rate * u64::MAX as f64) as u64, block_bytes: u64::from(block_bytes) }
    }

    /// Returns the parts of a request in sampled blocks, one part per block.
    pub(super) fn parts(self, record: &Record) -> impl Iterator<Item = Record> + use<> {
        let Record { offset, len, .. } = *record;
        let (record, end, size) = (*record, offset + u64::from(len), self.block_bytes);
        (offset / size..end.div_ceil(size)).filter(move |block| self.follows(*block)).map(move |block| {
            let first = offset.max(block * size);
            let last = end.min((block + 1) * size);
            Record { offset: first, len: (last - first) as u32, ..record }
        })
    }

    /// Returns true if the block is in the sample. The hash differs from the engine's index hash,
    /// because otherwise the sample would fill only one end of the index.
    fn follows(self, block: u64) -> bool {
        let mut counter = block ^ 0x6d69_6e69_6174_7572;
        splitmix64(&mut counter) < self.threshold
    }
}
