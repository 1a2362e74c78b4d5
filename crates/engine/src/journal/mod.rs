//! The journal of a persistent cache: what its pages say, and how an index is made of them again.
//!
//! docs/FORMAT.md has the bytes, docs/decisions/0006 the reasons. Pure: pages come in as bytes and go out as bytes.
//! Writing: [`Writer`]. Reading: [`Survey`] looks at every page of a ring and finds out which count;
//! [`Replay`] applies those, and names the sectors that have to be proved; the end is a [`Recovered`].

mod crc;
mod format;
mod recovered;
mod replay;
mod survey;
mod writer;

#[cfg(test)]
mod tests;

pub use recovered::{DirtySector, FlashSector, Recovered, Summary};
pub use replay::{Replay, ReplayError};
pub use survey::{Plan, Ring, Survey};
pub use writer::ring_pages_min;
pub(crate) use writer::{Change, Descriptor, Moved, Writer};

/// Bytes of a page.
pub const PAGE_BYTES: usize = 4096;

/// Change records in a page at most: the rest of it moves the dump on.
pub const CHANGES_MAX: usize = 54;

/// Zones of a disk at most.
pub const ZONES: usize = 4096;
