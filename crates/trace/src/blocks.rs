//! Reads the records of a trace in *record blocks*. A record block is a slice of a few thousand
//! consecutive records.

use std::fs::File;
use std::io::{Read, Seek};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

use super::{OpenOptions, Record, TraceReader, binary, open};

/// Number of records in a record block of a generated or decoded trace.
const RECORDS_A_BLOCK: usize = 1 << 13;

/// A trace whose records are read in record blocks: slices of a few thousand consecutive records.
pub trait Blocks {
    /// Returns the next record block, or an empty slice at the end of the trace.
    ///
    /// # Errors
    /// Returns an error if the trace cannot be read any further.
    fn next_block(&mut self) -> Result<&[Record]>;
}

impl<R: Read> Blocks for binary::Reader<R> {
    fn next_block(&mut self) -> Result<&[Record]> {
        self.read_block()
    }
}

/// Groups the records of an iterator into record blocks.
#[derive(Debug)]
pub struct Gathered<I> {
    records: I,
    block: Vec<Record>,
}

impl<I> Gathered<I> {
    /// Returns the iterator that provides the records.
    pub fn source(&self) -> &I {
        &self.records
    }
}

impl<I: Iterator<Item = Result<Record>>> Gathered<I> {
    /// Creates an object that groups the records of this iterator into record blocks.
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

/// A trace file that is read in record blocks. A trace in hob's binary format is read faster than
/// traces in all other formats, which use a [`TraceReader`].
#[derive(Debug)]
pub enum TraceBlocks {
    /// The path of an uncompressed trace in hob's binary format, and its reader for all disks.
    Binary(PathBuf, binary::Reader<File>),
    /// A trace in any other format.
    Other(Box<Gathered<TraceReader>>),
}

impl TraceBlocks {
    /// Opens a trace file, like [`open`](super::open).
    ///
    /// # Errors
    /// Returns the same errors as [`open`](super::open).
    pub fn open(path: &Path, options: &OpenOptions) -> Result<TraceBlocks> {
        let is_plain = options.disk.is_none() && options.format.is_none() && path != Path::new("-");
        if is_plain && path.is_file() {
            let mut file = File::open(path).with_context(|| format!("cannot open {}", path.display()))?;
            let mut magic = [0; binary::MAGIC.len()];
            if file.read_exact(&mut magic).is_ok() && magic == binary::MAGIC {
                file.rewind().with_context(|| cannot(path))?;
                let reader = binary::Reader::new(file).with_context(|| cannot(path))?;
                return Ok(TraceBlocks::Binary(path.to_owned(), reader));
            }
        }
        Ok(TraceBlocks::Other(Box::new(Gathered::new(open(path, options)?))))
    }

    /// Returns the reader with its counts of skipped records. Returns `None` for hob's binary
    /// format, which skips no records.
    pub fn reader(&self) -> Option<&TraceReader> {
        match self {
            TraceBlocks::Binary(..) => None,
            TraceBlocks::Other(gathered) => Some(gathered.source()),
        }
    }

    /// Returns a sentence about what is missing at the end of a truncated trace in hob's binary
    /// format. Returns `None` for a complete trace or another format.
    pub fn truncation(&self) -> Option<String> {
        match self {
            TraceBlocks::Binary(_, reader) => reader.truncation(),
            TraceBlocks::Other(_) => None,
        }
    }
}

fn cannot(path: &Path) -> String {
    format!("cannot read {}", path.display())
}

impl Blocks for TraceBlocks {
    fn next_block(&mut self) -> Result<&[Record]> {
        match self {
            TraceBlocks::Binary(path, reader) => reader.next_block().with_context(|| cannot(path)),
            TraceBlocks::Other(gathered) => gathered.next_block(),
        }
    }
}
