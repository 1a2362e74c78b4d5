//! Descriptors of an I/O ring.

use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Arc;

use super::workers::Gate;
use crate::volatile::VolatileFile;

/// Class of a descriptor. The class determines how the I/O ring performs operations on the
/// descriptor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FdClass {
    /// A file or block device whose I/O takes time.
    File,
    /// A file whose filesystem may block the thread that starts an operation, such as FUSE and NFS.
    /// The kernel's workers perform all operations.
    Foreign,
    /// A file in memory (tmpfs, ramfs). The calling thread reads and writes it synchronously.
    Memory,
    /// A file of the power-cut layer, for tests: the I/O ring performs its I/O through the layer's
    /// cache, in any order; see [`volatile`](crate::volatile).
    Volatile,
    /// A stream socket or pipe.
    Socket,
    /// A character device whose messages the I/O ring's user reads and writes directly. The I/O
    /// ring only reports that a message is available.
    Device,
    /// An eventfd that another thread or process shares.
    Event,
}

/// A descriptor attached to an I/O ring. The handle is valid until
/// [`Ring::detach`](super::Ring::detach).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Fd {
    pub(super) index: u16,
    pub(super) generation: u16,
}

/// A descriptor's entry in the I/O ring's table.
#[derive(Debug)]
pub(super) struct FdEntry {
    pub(super) file: Option<Arc<OwnedFd>>,
    pub(super) class: FdClass,
    /// Cache of a file with class [`FdClass::Volatile`].
    pub(super) volatile: Option<Arc<VolatileFile>>,
    /// Gate that is checked before each change of the file.
    pub(super) gate: Option<Arc<dyn Gate>>,
    pub(super) generation: u16,
    pub(super) in_flight: u32,
    pub(super) detached: bool,
    /// Whether the descriptor is registered with the kernel under its index.
    pub(super) fixed: bool,
    /// Whether the descriptor is a blocking eventfd, to which writes may block.
    pub(super) patient: bool,
    /// Whether the last receive left bytes in the socket.
    pub(super) more_to_receive: bool,
}

impl FdEntry {
    pub(super) fn raw(&self) -> i32 {
        self.file.as_ref().expect("an entry in use has a file").as_raw_fd()
    }
}
