//! Locks against other writers, usable on any thread.

use std::io;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::Weak;

use hob_engine::command::Access;
use rustix::fs::{FileType, Stat, fstat, stat};

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

    /// Returns true if `path` leads to the open file or block device, and not to another one that was put
    /// there later. Also returns true for other backings, and if the backing was closed.
    ///
    /// # Errors
    /// Returns the error of the system if nothing is at `path`.
    pub fn is_at(&self, path: &Path) -> io::Result<bool> {
        let Locked::File { file, .. } = &self.0 else { return Ok(true) };
        let Some(file) = file.upgrade() else { return Ok(true) };
        Ok(is_same(&fstat(&*file)?, &stat(path)?))
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

/// Returns true if `one` and `other` describe the same file or the same block device.
fn is_same(one: &Stat, other: &Stat) -> bool {
    let is_device = |found: &Stat| FileType::from_raw_mode(found.st_mode) == FileType::BlockDevice;
    match (is_device(one), is_device(other)) {
        (true, true) => one.st_rdev == other.st_rdev,
        (false, false) => (one.st_dev, one.st_ino) == (other.st_dev, other.st_ino),
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use std::fs::{self, File};
    use std::sync::Arc;

    use super::*;

    #[test]
    fn another_file_at_the_path_of_an_open_file_is_noticed() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("image");
        let file = Arc::new(OwnedFd::from(File::create(&path).unwrap()));
        let lock = Lock::of_file(Arc::downgrade(&file), Access::ReadWrite, None);
        assert!(lock.is_at(&path).unwrap());
        let renamed = dir.path().join("renamed");
        fs::rename(&path, &renamed).unwrap();
        assert_eq!(lock.is_at(&path).unwrap_err().kind(), io::ErrorKind::NotFound);
        assert!(lock.is_at(&renamed).unwrap());
        File::create(&path).unwrap();
        assert!(!lock.is_at(&path).unwrap());
        drop(file);
        assert!(lock.is_at(&path).unwrap(), "the backing was closed");
    }
}
