//! Configuration of an I/O ring, and errors of its creation.

use std::io;

use super::workers::WorkerLimits;
use crate::buffers::ARENA_BYTES_DEFAULT;

/// Implementation of an I/O ring.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum RingKind {
    /// io_uring, or threads if io_uring is not available.
    #[default]
    Auto,
    /// io_uring. If io_uring is not available, creating the I/O ring fails.
    IoUring,
    /// Threads and epoll.
    Threads,
}

/// Settings of an I/O ring.
#[derive(Clone, Debug)]
pub struct RingConfig {
    /// Implementation of the I/O ring.
    pub kind: RingKind,
    /// Number of entries of the I/O ring's submission queue. More operations may be in flight.
    pub entries: u32,
    /// Size of the payload memory in bytes; at most 1 GiB less
    /// [`ZEROES_BYTES`](super::ZEROES_BYTES) and [`JOURNAL_ROOM_BYTES`](super::JOURNAL_ROOM_BYTES).
    pub arena_bytes: usize,
    /// Maximum number of threads of [`RingKind::Threads`] that operations on one file occupy. With
    /// both implementations, at most half as many changes of a file with a [`Gate`](super::Gate)
    /// are in system calls that may block.
    pub file_threads_max: usize,
}

impl RingConfig {
    /// Returns the maximum number of changes of a file with a gate that are in system calls that
    /// may block.
    pub(super) fn blocked_changes_max(&self) -> usize {
        (self.file_threads_max / 2).max(1)
    }

    /// Returns the limits of the I/O ring's threads.
    pub(super) fn worker_limits(&self) -> WorkerLimits {
        WorkerLimits { operations_max: self.file_threads_max.max(1), changes_max: self.blocked_changes_max() }
    }
}

impl Default for RingConfig {
    fn default() -> RingConfig {
        RingConfig {
            kind: RingKind::Auto,
            entries: 1024,
            arena_bytes: ARENA_BYTES_DEFAULT,
            file_threads_max: 16,
        }
    }
}

/// Reason why an I/O ring cannot be created.
#[derive(Debug, thiserror::Error)]
pub enum RingError {
    /// The kernel refuses io_uring.
    #[error(
        "io_uring is not available ({0}); allow it (sysctl kernel.io_uring_disabled, seccomp) or use the thread pool"
    )]
    NoUring(#[source] io::Error),
    /// Memory, descriptors or threads are lacking.
    #[error("cannot set up a ring with {arena_bytes} bytes of buffers: {source}")]
    Resources {
        /// Requested size of the payload memory, bytes.
        arena_bytes: usize,
        /// The system's error.
        source: io::Error,
    },
}
