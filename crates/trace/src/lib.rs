//! Reads and writes traces: requests to a disk with their times.
//!
//! [`open`] reads any format of the table [`FORMATS`], compressed or not, as a stream of
//! [`Record`]s. Memory is limited for any file to one line, a window of records for sorting, and
//! the names of the disks. All data is checked before it becomes a record. Invalid data is counted,
//! and the options determine whether it is skipped or fatal. [`binary`] and [`csv`] also write
//! traces, and [`profile`] summarizes a trace. Times are in nanoseconds since the first record;
//! offsets and lengths are in bytes.

pub mod binary;
pub mod blocks;
pub mod csv;
mod decompress;
mod disks;
mod fields;
mod formats;
mod input;
mod open;
mod per_cpu;
pub mod profile;
mod seal;
#[cfg(test)]
mod tests;
mod window;

pub use decompress::Compression;
pub use formats::{FORMATS, FormatInfo};
pub use input::Place;
pub use open::{
    Limits, OnBad, OpenOptions, Skipped, SkippedEntry, TraceReader, is_present, merged_files, open,
    open_stream,
};

/// Maximum offset and maximum end of a request, bytes. The largest possible disk has 2⁶³ bytes.
pub const DISK_BYTES_MAX: u64 = 1 << 63;

/// Operation of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Op {
    /// Reads data.
    Read,
    /// Writes data.
    Write,
    /// Discards or zeroes the content of a range.
    Discard,
    /// Makes earlier writes durable. Offset and length are 0.
    Flush,
}

/// One request of a trace.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Record {
    /// Time since the start of the trace, nanoseconds.
    pub at_ns: u64,
    /// Offset on the disk in bytes, below 2⁶³.
    pub offset: u64,
    /// Length in bytes; at least 1, except for a flush.
    pub len: u32,
    /// Operation of the request.
    pub op: Op,
    /// Number of the request's disk in the trace. A trace of one disk has only disk 0.
    pub disk: u16,
}

impl Record {
    /// Checks that offset and length are valid. Returns the reason if one is invalid.
    pub fn check(&self) -> Result<(), &'static str> {
        if self.op == Op::Flush {
            return if self.offset == 0 && self.len == 0 { Ok(()) } else { Err("a flush with a range") };
        }
        check_range(self.offset, u64::from(self.len))
    }
}

/// Checks that a request other than a flush may have this range. Returns the reason if not.
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
