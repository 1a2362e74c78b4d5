//! How large a backing is while it is served: somebody may have made it larger, or may ask us to.
//!
//! Refuses to make anything but a raw file larger, and to make anything smaller.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};

use rustix::fs::{FileType, SeekFrom};
use rustix::io::Errno;

/// Measures an open backing besides the ring that serves it. Not for the shard's thread: a file on the network may take its time.
#[derive(Clone, Debug)]
pub struct SizeProbe(Kind);

#[derive(Clone, Debug)]
enum Kind {
    /// The system knows.
    File(Weak<OwnedFd>),
    /// The other side told, bytes.
    Told(Arc<AtomicU64>),
    /// Whoever serves it is asked.
    Asked(Weak<dyn Measured>),
}

/// A backing that says how large it is when it is asked.
pub(super) trait Measured: Send + Sync {
    /// Bytes.
    fn size_bytes(&self) -> io::Result<u64>;
}

impl SizeProbe {
    pub(super) fn of_file(file: &Arc<OwnedFd>) -> SizeProbe {
        SizeProbe(Kind::File(Arc::downgrade(file)))
    }

    pub(super) fn told(size_bytes: &Arc<AtomicU64>) -> SizeProbe {
        SizeProbe(Kind::Told(size_bytes.clone()))
    }

    #[cfg_attr(not(any(feature = "rbd", test)), expect(dead_code, reason = "only images are asked"))]
    pub(super) fn asked<M: Measured + 'static>(backing: &Arc<M>) -> SizeProbe {
        let backing = Arc::downgrade(backing);
        SizeProbe(Kind::Asked(backing))
    }

    /// How large it is now, bytes.
    ///
    /// # Errors
    /// Whatever the system says; `BADF` of a backing that was closed.
    pub fn size_bytes(&self) -> io::Result<u64> {
        match &self.0 {
            Kind::File(file) => {
                let file = file.upgrade().ok_or(Errno::BADF)?;
                // Nobody uses the descriptor's position.
                Ok(rustix::fs::seek(&*file, SeekFrom::End(0))?)
            }
            Kind::Told(size_bytes) => Ok(size_bytes.load(Ordering::Relaxed)),
            Kind::Asked(backing) => backing.upgrade().ok_or(Errno::BADF)?.size_bytes(),
        }
    }

    /// Is it a raw file, which [`grow`](Self::grow) can make larger?
    pub fn is_file(&self) -> bool {
        let Kind::File(file) = &self.0 else { return false };
        let status = file.upgrade().and_then(|file| rustix::fs::fstat(&*file).ok());
        status.is_some_and(|status| FileType::from_raw_mode(status.st_mode) == FileType::RegularFile)
    }

    /// Makes a raw file at least that large, durably. What is new reads as zeroes and takes no room yet.
    ///
    /// # Errors
    /// Whatever the system says; `OPNOTSUPP` of what is no raw file.
    pub fn grow(&self, size_bytes: u64) -> io::Result<()> {
        let (true, Kind::File(file)) = (self.is_file(), &self.0) else { return Err(Errno::OPNOTSUPP.into()) };
        let file = file.upgrade().ok_or(Errno::BADF)?;
        if self.size_bytes()? < size_bytes {
            rustix::fs::ftruncate(&*file, size_bytes)?;
        }
        Ok(rustix::fs::fsync(&*file)?)
    }
}
