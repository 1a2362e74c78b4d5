//! Descriptors that a ring keeps.

use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Arc;

use super::workers::Gate;
use crate::volatile::VolatileFile;

/// What a descriptor is, and thereby how its operations are done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FdClass {
    /// A file or block device on something that takes its time.
    File,
    /// A file whose filesystem may block whoever starts an operation, such as FUSE and NFS: the kernel's workers do all of it.
    Foreign,
    /// A file whose bytes are memory (tmpfs, ramfs): read and written at once, by the caller.
    Memory,
    /// A file or block device that the power-cut layer has been given: the ring carries out its I/O itself, through the
    /// layer's cache, in any order. For tests; see [`volatile`](crate::volatile).
    Volatile,
    /// A stream socket or pipe.
    Socket,
    /// A character device whose messages its user reads and writes itself, without waiting: the ring says when one is
    /// there, and nothing else.
    Device,
    /// An eventfd, which somebody else has too.
    Event,
}

/// A descriptor that a ring keeps. Cheap to copy; valid until [`Ring::detach`](super::Ring::detach).
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
    /// Asked before each change.
    pub(super) gate: Option<Arc<dyn Gate>>,
    pub(super) generation: u16,
    pub(super) in_flight: u32,
    pub(super) detached: bool,
    /// Registered with the kernel under its index.
    pub(super) fixed: bool,
    /// An eventfd that nothing can be written to without waiting.
    pub(super) patient: bool,
    /// The last receive left bytes behind.
    pub(super) more_to_receive: bool,
}

impl FdEntry {
    pub(super) fn raw(&self) -> i32 {
        self.file.as_ref().expect("an entry in use has a file").as_raw_fd()
    }
}
