//! Reads the size of a backing while it is served. Another program, or hob itself, may have
//! enlarged the backing.
//!
//! hob can enlarge only raw files, and shrinks nothing.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};

use rustix::fs::{FileType, SeekFrom};
use rustix::io::Errno;

/// Reads the size of an open backing without its I/O ring. Do not use it on the shard's thread: a
/// network filesystem may be slow.
#[derive(Clone, Debug)]
pub struct SizeProbe(Kind);

#[derive(Clone, Debug)]
enum Kind {
    /// A file, whose size the operating system reports.
    File(Weak<OwnedFd>),
    /// Size that the server reported, bytes.
    Told(Arc<AtomicU64>),
    /// Driver that reads the size from the server.
    Asked(Weak<dyn Measured>),
}

/// A backing that can read its present size.
pub(super) trait Measured: Send + Sync {
    /// Returns the present size of the backing, bytes.
    fn size_bytes(&self) -> io::Result<u64>;
}

impl SizeProbe {
    pub(super) fn of_file(file: &Arc<OwnedFd>) -> SizeProbe {
        SizeProbe(Kind::File(Arc::downgrade(file)))
    }

    pub(super) fn told(size_bytes: &Arc<AtomicU64>) -> SizeProbe {
        SizeProbe(Kind::Told(size_bytes.clone()))
    }

    pub(super) fn asked<M: Measured + 'static>(backing: &Arc<M>) -> SizeProbe {
        let backing = Arc::downgrade(backing);
        SizeProbe(Kind::Asked(backing))
    }

    /// Returns the present size of the backing, bytes.
    ///
    /// # Errors
    /// Returns a system error, or `BADF` if the backing was closed.
    pub fn size_bytes(&self) -> io::Result<u64> {
        match &self.0 {
            Kind::File(file) => {
                let file = file.upgrade().ok_or(Errno::BADF)?;
                // No code uses the position of the descriptor.
                Ok(rustix::fs::seek(&*file, SeekFrom::End(0))?)
            }
            Kind::Told(size_bytes) => Ok(size_bytes.load(Ordering::Relaxed)),
            Kind::Asked(backing) => backing.upgrade().ok_or(Errno::BADF)?.size_bytes(),
        }
    }

    /// Returns true if the backing is a raw file, which [`grow`](Self::grow) can enlarge.
    pub fn is_file(&self) -> bool {
        let Kind::File(file) = &self.0 else { return false };
        let status = file.upgrade().and_then(|file| rustix::fs::fstat(&*file).ok());
        status.is_some_and(|status| FileType::from_raw_mode(status.st_mode) == FileType::RegularFile)
    }

    /// Enlarges a raw file to at least `size_bytes`, durably. The new part reads as zeroes and is
    /// not allocated.
    ///
    /// # Errors
    /// Returns a system error, or `OPNOTSUPP` if the backing is not a raw file.
    pub fn grow(&self, size_bytes: u64) -> io::Result<()> {
        let (true, Kind::File(file)) = (self.is_file(), &self.0) else { return Err(Errno::OPNOTSUPP.into()) };
        let file = file.upgrade().ok_or(Errno::BADF)?;
        if self.size_bytes()? < size_bytes {
            rustix::fs::ftruncate(&*file, size_bytes)?;
        }
        Ok(rustix::fs::fsync(&*file)?)
    }
}
