//! How a ring is made, and why it may not be.

use std::io;

use crate::buffers::ARENA_BYTES_DEFAULT;

/// Which engine moves the bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum RingKind {
    /// io_uring, or threads where the system has none.
    #[default]
    Auto,
    /// io_uring or an error.
    IoUring,
    /// Threads and epoll.
    Threads,
}

/// Settings of a ring.
#[derive(Clone, Debug)]
pub struct RingConfig {
    /// Which engine.
    pub kind: RingKind,
    /// Entries of the submission queue. More operations than that may be in flight.
    pub entries: u32,
    /// Memory for payload, bytes; at most 1 GiB less [`ZEROES_BYTES`](super::ZEROES_BYTES) and
    /// [`JOURNAL_ROOM_BYTES`](super::JOURNAL_ROOM_BYTES).
    pub arena_bytes: usize,
    /// Most threads of [`RingKind::Threads`].
    pub threads_max: usize,
}

impl Default for RingConfig {
    fn default() -> RingConfig {
        RingConfig { kind: RingKind::Auto, entries: 1024, arena_bytes: ARENA_BYTES_DEFAULT, threads_max: 16 }
    }
}

/// Why there is no ring.
#[derive(Debug, thiserror::Error)]
pub enum RingError {
    /// The system refuses io_uring.
    #[error(
        "io_uring is not available ({0}); allow it (sysctl kernel.io_uring_disabled, seccomp) or use the thread pool"
    )]
    NoUring(#[source] io::Error),
    /// Memory, descriptors or threads are lacking.
    #[error("cannot set up a ring with {arena_bytes} bytes of buffers: {source}")]
    Resources {
        /// What was asked for.
        arena_bytes: usize,
        /// The system's answer.
        source: io::Error,
    },
}
