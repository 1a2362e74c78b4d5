//! Units and ids as types.
//!
//! Offsets and lengths in the engine's interface are bytes in `u64`. Caches internally count
//! sectors and blocks.

use std::fmt;
use std::ops::{Add, Sub};

/// Bytes in a sector, the unit of validity and checksums, and the alignment of every flash
/// transfer.
pub const SECTOR_BYTES: u64 = 4096;

/// Smallest cache block, bytes.
pub const BLOCK_BYTES_MIN: u64 = SECTOR_BYTES;

/// Largest cache block, bytes.
pub const BLOCK_BYTES_MAX: u64 = 1 << 20;

/// A point in time, in nanoseconds since an origin that the caller chose. The origin is never
/// wall-clock time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Instant(pub u64);

impl Instant {
    /// Returns the nanoseconds from `earlier` to `self`; 0 if `earlier` is later.
    pub fn nanos_since(self, earlier: Instant) -> u64 {
        self.0.saturating_sub(earlier.0)
    }
}

impl Add<u64> for Instant {
    type Output = Instant;
    /// Adds `nanos`, saturating.
    fn add(self, nanos: u64) -> Instant {
        Instant(self.0.saturating_add(nanos))
    }
}

impl Sub for Instant {
    type Output = u64;
    fn sub(self, earlier: Instant) -> u64 {
        self.nanos_since(earlier)
    }
}

macro_rules! id {
    ($(#[$doc:meta])* $name:ident($inner:ty)) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub struct $name(pub $inner);
        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "{}", self.0)
            }
        }
    };
}

id!(
    /// A disk of one engine. The caller chooses the id and does not reuse it while the disk exists.
    DiskId(u32)
);
id!(
    /// A flash device of the pool. The caller chooses the id.
    DeviceId(u16)
);
id!(
    /// A datastore: storage that the backings of several disks share, such as an array or a server.
    /// The caller chooses the ids from 0 on.
    DatastoreId(u16)
);
id!(
    /// A guest request in flight. The front end chooses the id, and the reply repeats it. The high
    /// 32 bits are the session.
    RequestId(u64)
);
id!(
    /// A session: one connection, file or vhost-user device. The caller chooses the number and may
    /// reuse it after the session ended.
    SessionId(u32)
);
id!(
    /// An I/O that the engine issued and that has not completed.
    IoId(u32)
);
id!(
    /// A payload buffer of the shard. The engine never reads its content.
    BufferId(u32)
);
id!(
    /// A command in progress. The sender chooses the id.
    CommandId(u64)
);
id!(
    /// Number of a block on its disk: byte offset divided by the block size.
    BlockNo(u32)
);
id!(
    /// Number of a frame, the room for one block in a cache.
    FrameNo(u32)
);

/// Rounds bytes down to a sector boundary.
pub const fn sector_floor(bytes: u64) -> u64 {
    bytes & !(SECTOR_BYTES - 1)
}

/// Rounds bytes up to a sector boundary. `bytes` is at most `u64::MAX - 4095`.
pub const fn sector_ceil(bytes: u64) -> u64 {
    (bytes + SECTOR_BYTES - 1) & !(SECTOR_BYTES - 1)
}
