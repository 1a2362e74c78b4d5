//! Traces: the requests to a disk, with their times.
//!
//! [`open`] reads any format of the table [`FORMATS`], compressed or not, as a stream of [`Record`]s.
//! Memory is bounded for any file: a line, a window of records for sorting, the names of the disks. Data is
//! checked before it becomes a record; invalid data is counted, and skipped or fatal, as the options say.
//! [`binary`] and [`csv`] also write, and [`profile`] summarizes a trace. Times are nanoseconds from the
//! first record, offsets and lengths bytes.

pub mod binary;
pub mod blocks;
pub mod csv;
mod decompress;
mod disks;
mod fields;
mod formats;
mod input;
mod open;
pub mod profile;
#[cfg(test)]
mod tests;
mod window;

pub use decompress::Compression;
pub use formats::{FORMATS, FormatInfo};
pub use input::Place;
pub use open::{Limits, OnBad, OpenOptions, Skipped, SkippedEntry, TraceReader, open, open_stream};

/// Maximum of offsets and ends of requests: the largest disk, 2⁶³ bytes.
pub const DISK_BYTES_MAX: u64 = 1 << 63;

/// Operation of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Op {
    /// Data is read.
    Read,
    /// Data is written.
    Write,
    /// The range's content is discarded or zeroed.
    Discard,
    /// Earlier writes are made durable. Offset and length are 0.
    Flush,
}

/// One request of a trace.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Record {
    /// Nanoseconds since the trace's start.
    pub at_ns: u64,
    /// First byte on the disk; below 2⁶³.
    pub offset: u64,
    /// Length in bytes; at least 1, except for a flush.
    pub len: u32,
    /// The operation.
    pub op: Op,
    /// Its disk in the trace; 0 if there is only one.
    pub disk: u16,
}

impl Record {
    /// Whether offset and length are what they are said to be above; says what is not.
    pub fn check(&self) -> Result<(), &'static str> {
        if self.op == Op::Flush {
            return if self.offset == 0 && self.len == 0 { Ok(()) } else { Err("a flush with a range") };
        }
        check_range(self.offset, u64::from(self.len))
    }
}

/// Whether a request that is no flush may cover this range; says why not.
fn check_range(offset: u64, len: u64) -> Result<(), &'static str> {
    if len == 0 {
        Err("the length is 0")
    } else if len > u64::from(u32::MAX) {
        Err("the length is 4 GiB or more")
    } else if offset >= DISK_BYTES_MAX {
        Err("the offset is 2^63 or more")
    } else if offset + len > DISK_BYTES_MAX {
        Err("the request ends beyond 2^63")
    } else {
        Ok(())
    }
}
