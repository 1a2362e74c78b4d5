//! The journal of a persistent cache: what its pages say, and how an index is made of them again.
//!
//! docs/FORMAT.md has the bytes, docs/decisions/0006 the reasons. Pure: pages come in as bytes and go out as bytes.
//! Writing: [`Writer`]. Reading: [`Survey`] looks at every page of a ring and finds out which count;
//! [`Replay`] applies those, and names the sectors that have to be proved; the end is a [`Recovered`].

mod crc;
mod format;
mod writer;

use crate::index::Index;
pub use writer::ring_pages_min;
#[allow(unused_imports, reason = "for the engine's flow")]
pub(crate) use writer::{Change, Descriptor, Moved, Writer};

/// Bytes of a page.
pub const PAGE_BYTES: usize = 4096;

/// Change records in a page at most: the rest of it moves the dump on.
pub const CHANGES_MAX: usize = 54;

/// Zones of a disk at most.
pub const ZONES: usize = 4096;

/// What an earlier journal tells of a cache: its index, and what is to be known of it.
#[derive(Clone, Debug)]
pub struct Recovered {
    pub(crate) index: Index,
    /// What was found.
    pub summary: Summary,
}

/// A recovered cache in figures.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Summary {
    /// The cache was closed cleanly.
    pub clean: bool,
    /// Sectors that hold data.
    pub sectors_valid: u64,
    /// Of these, not on the backing.
    pub sectors_dirty: u64,
    /// Sectors whose last write before the crash did not reach flash whole, and were not flushed.
    pub sectors_undone: u64,
    /// Clean sectors given up because the backing was being written near them.
    pub sectors_distrusted: u64,
    /// Bytes of the disk that the cache was of.
    pub disk_bytes: u64,
    /// What the daemon knew its backing by.
    pub identity: [u8; 32],
    /// Cache block, bytes.
    pub block_bytes: u32,
}
