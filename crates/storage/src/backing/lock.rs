//! Locks against other writers, usable on any thread.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Weak;

use hob_engine::command::Access;

use super::below::BelowLocks;
use super::qemu_nbd;
use super::rbd;

/// Takes and releases the lock of an open backing. Dropping this value does not release the lock.
/// Closing the backing releases the lock, even if this value still exists.
#[derive(Clone, Debug)]
pub struct Lock(Locked);

/// The locked object.
#[derive(Clone, Debug)]
enum Locked {
    File {
        file: Weak<OwnedFd>,
        access: Access,
        /// Locks of the files below a block device.
        below: Option<Weak<BelowLocks>>,
    },
    Child(qemu_nbd::ImageLock),
    Image(rbd::ImageLock),
}

impl Lock {
    pub(super) fn of_file(file: Weak<OwnedFd>, access: Access, below: Option<Weak<BelowLocks>>) -> Lock {
        Lock(Locked::File { file, access, below })
    }

    pub(super) fn of_child(image: qemu_nbd::ImageLock) -> Lock {
        Lock(Locked::Child(image))
    }

    pub(super) fn of_image(image: rbd::ImageLock) -> Lock {
        Lock(Locked::Image(image))
    }

    /// Takes the lock. Waits briefly, in case another process is releasing it. Do not call it on
    /// the shard's thread.
    ///
    /// # Errors
    /// Returns `WOULDBLOCK` if another process has the lock, `BADF` if the backing was closed, or
    /// another error of the system.
    pub fn take(&self) -> io::Result<()> {
        match &self.0 {
            Locked::File { file, access, below } => {
                let file = file.upgrade().ok_or_else(|| io::Error::from(rustix::io::Errno::BADF))?;
                crate::lock::lock_image(&*file, *access).map_err(io::Error::from)?;
                let Some(below) = below.as_ref().and_then(Weak::upgrade) else { return Ok(()) };
                below.take(*access).map_err(|(path, error)| {
                    let _ = crate::lock::unlock_image(&*file);
                    let error = io::Error::from(error);
                    io::Error::new(error.kind(), format!("{}: {error}", path.display()))
                })
            }
            Locked::Child(image) => image.take(),
            Locked::Image(image) => image.take(),
        }
    }

    /// Releases the lock. Another host may write the backing afterwards.
    pub fn release(&self) -> io::Result<()> {
        match &self.0 {
            Locked::File { file, below, .. } => {
                if let Some(below) = below.as_ref().and_then(Weak::upgrade) {
                    below.release();
                }
                let Some(file) = file.upgrade() else { return Ok(()) };
                crate::lock::unlock_image(&*file).map_err(io::Error::from)
            }
            Locked::Child(image) => {
                image.release();
                Ok(())
            }
            Locked::Image(image) => image.release(),
        }
    }
}
