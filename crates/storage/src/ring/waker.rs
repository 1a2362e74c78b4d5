//! Wakes a sleeping ring from another thread, with at most one system call per sleep.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::event::{EventfdFlags, eventfd};

/// Makes [`Ring::submit_and_wait`](super::Ring::submit_and_wait) return. Data that was published
/// before `wake` is visible to the I/O ring's thread after `submit_and_wait` has returned.
#[derive(Clone, Debug)]
pub struct Waker {
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    event: OwnedFd,
    /// Whether a wake was requested that the I/O ring has not seen yet.
    called: AtomicBool,
}

impl Waker {
    pub(super) fn new() -> io::Result<Waker> {
        let event = eventfd(0, EventfdFlags::CLOEXEC)?;
        Ok(Waker { shared: Arc::new(Shared { event, called: AtomicBool::new(false) }) })
    }

    /// Wakes the I/O ring, now or the next time it would sleep.
    pub fn wake(&self) {
        if !self.shared.called.swap(true, Ordering::AcqRel) {
            self.signal();
        }
    }

    /// Writes to the eventfd without checking the flag. The ring must be reading the eventfd.
    pub(super) fn signal(&self) {
        // The write fails only if 2⁶⁴ − 2 calls are unread.
        let _ = rustix::io::write(&self.shared.event, &1u64.to_ne_bytes());
    }

    /// Returns true if a wake was requested since the last `take`.
    pub(super) fn take(&self) -> bool {
        self.shared.called.load(Ordering::Acquire) && self.shared.called.swap(false, Ordering::AcqRel)
    }

    pub(super) fn event(&self) -> BorrowedFd<'_> {
        self.shared.event.as_fd()
    }
}
