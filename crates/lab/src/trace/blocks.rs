//! Records some thousand at a time, so that what follows them runs over slices.

use std::io::Read;

use anyhow::Result;

use super::{Record, binary};

/// Records of a made-up or decoded trace that travel together.
const RECORDS_A_BLOCK: usize = 1 << 13;

/// A trace, read block by block.
pub trait Blocks {
    /// The next records, in order; none at the end.
    ///
    /// # Errors
    /// The trace cannot be read on.
    fn next_block(&mut self) -> Result<&[Record]>;
}

impl<R: Read> Blocks for binary::Reader<R> {
    fn next_block(&mut self) -> Result<&[Record]> {
        self.read_block()
    }
}

/// Any iterator's records as blocks.
#[derive(Debug)]
pub struct Gathered<I> {
    records: I,
    block: Vec<Record>,
}

impl<I: Iterator<Item = Result<Record>>> Gathered<I> {
    /// Blocks of these records.
    pub fn new(records: I) -> Self {
        Gathered { records, block: Vec::with_capacity(RECORDS_A_BLOCK) }
    }
}

impl<I: Iterator<Item = Result<Record>>> Blocks for Gathered<I> {
    fn next_block(&mut self) -> Result<&[Record]> {
        self.block.clear();
        for record in self.records.by_ref().take(RECORDS_A_BLOCK) {
            self.block.push(record?);
        }
        Ok(&self.block)
    }
}
