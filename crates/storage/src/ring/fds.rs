//! Descriptors of an I/O ring: attaching and detaching them.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use super::op::{Op, Work};
use super::worker_shares::FileNumber;
use super::workers::{FileGate, Gate};
use super::{Driver, Ring, volatile};
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

/// A descriptor attached to an I/O ring. The handle is valid until [`Ring::detach`].
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
    /// The file's write cache in the power-cut layer, for class [`FdClass::Volatile`].
    pub(super) volatile: Option<Arc<VolatileFile>>,
    /// Gate that must be open when a change of the file's content starts. Changes fail while the
    /// gate is closed.
    pub(super) gate: Option<FileGate>,
    pub(super) generation: u16,
    pub(super) in_flight: u32,
    pub(super) detached: bool,
    /// Whether the descriptor is registered with the kernel under its index.
    pub(super) fixed: bool,
    /// Whether every attempt on the descriptor may block. This is so for a blocking eventfd, and
    /// for a file with a gate on an unknown filesystem.
    pub(super) patient: bool,
    /// Whether the socket was shut down.
    pub(super) is_shut: bool,
    /// Whether the last receive left bytes in the socket.
    pub(super) more_to_receive: bool,
}

impl FdEntry {
    pub(super) fn raw(&self) -> i32 {
        self.file.as_ref().expect("an entry in use has a file").as_raw_fd()
    }
}

impl Ring {
    /// Attaches a descriptor. A socket is made blocking, so that its operations wait in the I/O
    /// ring.
    ///
    /// # Panics
    /// Panics if the ring has more than 65 535 descriptors, which exceeds the system's usual limit.
    /// Also panics for a [`FdClass::Volatile`] that the power-cut layer does not know.
    pub fn attach(&mut self, file: impl Into<Arc<OwnedFd>>, class: FdClass) -> Fd {
        let file = file.into();
        if class == FdClass::Socket {
            // io_uring does not wait for descriptors that are marked as non-blocking.
            let _ = rustix::io::ioctl_fionbio(&file, false);
        }
        // Non-blocking attempts always fail on a blocking eventfd.
        let patient = class == FdClass::Event
            && rustix::fs::fcntl_getfl(&file)
                .is_ok_and(|flags| !flags.contains(rustix::fs::OFlags::NONBLOCK));
        let index = self.free_fds.pop().unwrap_or_else(|| {
            self.fds.push(FdEntry {
                file: None,
                class,
                volatile: None,
                gate: None,
                generation: 0,
                in_flight: 0,
                detached: true,
                fixed: false,
                patient: false,
                is_shut: false,
                more_to_receive: false,
            });
            u16::try_from(self.fds.len() - 1).expect("at most 65 535 descriptors")
        });
        let volatile = (class == FdClass::Volatile).then(|| volatile::of(&file));
        let fixed = match &mut self.driver {
            Driver::Uring(_) if volatile.is_some() => false,
            Driver::Uring(uring) => uring.register(index, file.as_raw_fd()),
            Driver::Threads(threads) => threads.register(index),
        };
        let entry = &mut self.fds[usize::from(index)];
        entry.file = Some(file);
        entry.class = class;
        entry.volatile = volatile;
        entry.gate = None;
        entry.detached = false;
        entry.fixed = fixed;
        entry.patient = patient;
        entry.is_shut = false;
        entry.more_to_receive = false;
        Fd { index, generation: entry.generation }
    }

    /// Detaches a descriptor. The descriptor is closed when its last operation has ended. A socket
    /// needs [`Ring::shutdown`] first.
    pub fn detach(&mut self, fd: Fd) {
        let entry = self.entry_mut(fd);
        entry.detached = true;
        if entry.in_flight == 0 {
            self.close(fd.index);
        }
    }

    /// Shuts a socket down in both directions: its operations complete, early or with an error. For
    /// a [`FdClass::Device`], ends the wait for messages.
    pub fn shutdown(&mut self, fd: Fd) {
        if self.entry_mut(fd).class == FdClass::Device {
            return self.end_waits(fd);
        }
        let entry = self.entry_mut(fd);
        entry.is_shut = true;
        let file = entry.file.as_ref().expect("an entry in use has a file");
        let _ = rustix::net::shutdown(file, rustix::net::Shutdown::Both);
    }

    /// Cancels a [`Ring::recv`] that waits for bytes. The receive completes with -ECANCELED, or
    /// with bytes that arrived before. No byte is lost.
    pub fn cancel_recv(&mut self, fd: Fd) {
        self.entry_mut(fd);
        match &mut self.driver {
            Driver::Threads(threads) => threads.cancel_receive(fd.index),
            Driver::Uring(uring) => {
                let receives = |op: &Op| op.fd == fd && matches!(op.work, Work::Recv(_));
                let waiting = self.ops.iter().enumerate().filter(|(_, op)| receives(op));
                waiting.for_each(|(index, _)| uring.cancel(index as u32));
            }
        }
    }

    /// Ends all waits for a device or an event.
    pub(super) fn end_waits(&mut self, fd: Fd) {
        match &mut self.driver {
            Driver::Threads(threads) => threads.cancel(fd.index),
            Driver::Uring(uring) => {
                let waits = |op: &Op| matches!(op.work, Work::Readable | Work::AwaitEvent | Work::Signal);
                let waiting = self.ops.iter().enumerate().filter(|(_, op)| op.fd == fd && waits(op));
                waiting.for_each(|(index, _)| uring.cancel(index as u32));
            }
        }
    }

    /// Sets a gate: changes of a file start only while `gate` is open. The gate is checked just
    /// before each system call. A change that a closed gate blocks ends with -ECANCELED. Changes
    /// that would block in the kernel are made by threads of this process. io_uring's workers would
    /// start them at an unknown time, without a check. A system call that has started is not
    /// stopped. The number of changes of `file` in system calls that may block is limited, over all
    /// its descriptors; see [`RingConfig::file_threads_max`](super::RingConfig::file_threads_max).
    ///
    /// The gate has no effect on [`FdClass::Memory`] and [`FdClass::Volatile`], because other hosts
    /// do not share these files.
    pub(crate) fn set_gate(&mut self, fd: Fd, file: FileNumber, gate: Arc<dyn Gate>) {
        let entry = self.entry_mut(fd);
        entry.gate = Some(FileGate { file, gate });
        // For a file of this class, a kernel worker of io_uring makes even attempts that do not
        // block. A kernel worker checks no gate, so this process's own threads make the changes.
        entry.patient |= entry.class == FdClass::Foreign;
    }

    /// Returns the attached descriptor itself, for example to set options.
    pub fn borrow(&self, fd: Fd) -> BorrowedFd<'_> {
        let entry = &self.fds[usize::from(fd.index)];
        assert!(entry.generation == fd.generation && !entry.detached, "this descriptor was detached");
        entry.file.as_ref().expect("an entry in use has a file").as_fd()
    }

    pub(super) fn entry_mut(&mut self, fd: Fd) -> &mut FdEntry {
        let entry = &mut self.fds[usize::from(fd.index)];
        assert!(entry.generation == fd.generation && !entry.detached, "this descriptor was detached");
        entry
    }

    pub(super) fn close(&mut self, index: u16) {
        let entry = &mut self.fds[usize::from(index)];
        match &mut self.driver {
            Driver::Uring(uring) if entry.fixed => uring.unregister(index),
            Driver::Uring(_) => {}
            Driver::Threads(threads) => threads.unregister(index, entry.raw()),
        }
        entry.file = None;
        entry.volatile = None;
        entry.generation = entry.generation.wrapping_add(1);
        self.free_fds.push(index);
    }
}
