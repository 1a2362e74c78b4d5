//! The exclusive lock of an open image, taken and released when a disk changes its host.

use std::io;
use std::os::raw::c_int;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};

use super::Image;

/// The lock of an RBD image; see [`Lock`](super::super::Lock). The lock ends when the image is
/// closed.
#[derive(Clone)]
pub(in super::super) struct ImageLock(Weak<Image>);

impl std::fmt::Debug for ImageLock {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("ImageLock").finish_non_exhaustive()
    }
}

impl ImageLock {
    pub(super) fn of(image: &Arc<Image>) -> ImageLock {
        ImageLock(Arc::downgrade(image))
    }

    /// Takes the lock. Waits for the lock of a client that has failed. A running client that keeps
    /// the lock causes an error.
    pub(in super::super) fn take(&self) -> io::Result<()> {
        let image = self.0.upgrade().ok_or_else(|| io::Error::from_raw_os_error(libc::EBADF))?;
        match image.lock() {
            // An image without the feature has no lock to take, as when it is opened.
            Ok(_) => Ok(()),
            Err(error) if [-libc::EROFS, -libc::EBUSY, -libc::EAGAIN].contains(&error) => {
                Err(io::ErrorKind::WouldBlock.into())
            }
            Err(error) => Err(io::Error::from_raw_os_error(-error)),
        }
    }

    /// Releases the lock. The caller ends all I/O before, and writes nothing afterwards, because
    /// librbd would take the lock again.
    pub(in super::super) fn release(&self) -> io::Result<()> {
        let Some(image) = self.0.upgrade() else { return Ok(()) };
        // If the lock is already gone, that is no error.
        if !image.locked.swap(false, Ordering::SeqCst) {
            return Ok(());
        }
        let error: c_int = image.unlock();
        match error {
            0.. => Ok(()),
            _ => {
                image.locked.store(true, Ordering::SeqCst);
                Err(io::Error::from_raw_os_error(-error))
            }
        }
    }
}
