//! Descriptors of a ring.

use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Arc;

use super::workers::Gate;
use crate::volatile::VolatileFile;

/// Kind of a descriptor, which determines how its operations are performed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FdClass {
    /// A file or block device with a latency.
    File,
    /// A file whose filesystem may block the thread that starts an operation, such as FUSE and NFS: the
    /// kernel's workers perform all operations.
    Foreign,
    /// A file in memory (tmpfs, ramfs): read and written synchronously by the calling thread.
    Memory,
    /// A file or block device under the power-cut layer: the ring performs its I/O itself, through the
    /// layer's cache, in any order. For tests; see [`volatile`](crate::volatile).
    Volatile,
    /// A stream socket or pipe.
    Socket,
    /// A character device whose messages the ring's user reads and writes directly, without waiting: the
    /// ring only reports that one is available.
    Device,
    /// An eventfd that another process shares.
    Event,
}

/// A descriptor attached to a ring. Cheap to copy; valid until [`Ring::detach`](super::Ring::detach).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Fd {
    pub(super) index: u16,
    pub(super) generation: u16,
}

/// A descriptor's entry in the ring's table.
#[derive(Debug)]
pub(super) struct FdEntry {
    pub(super) file: Option<Arc<OwnedFd>>,
    pub(super) class: FdClass,
    /// The cache of a [`FdClass::Volatile`].
    pub(super) volatile: Option<Arc<VolatileFile>>,
    /// Checked before each change.
    pub(super) gate: Option<Arc<dyn Gate>>,
    pub(super) generation: u16,
    pub(super) in_flight: u32,
    pub(super) detached: bool,
    /// Registered with the kernel under its index.
    pub(super) fixed: bool,
    /// A blocking eventfd: attempts to write to it may wait.
    pub(super) patient: bool,
    /// The last receive left bytes in the socket.
    pub(super) more_to_receive: bool,
}

impl FdEntry {
    pub(super) fn raw(&self) -> i32 {
        self.file.as_ref().expect("an entry in use has a file").as_raw_fd()
    }
}
