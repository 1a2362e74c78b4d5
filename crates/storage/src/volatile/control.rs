//! A file that a control thread reads and writes in place, synchronously: superblocks and segment
//! tables.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use hob_engine::io::Durability;

use super::VolatileFile;
use crate::failing;
use crate::pool::RemoteFile;

/// Number of bytes that a failing write still writes.
const TORN_BYTES: usize = 512;

/// A file, through the power-cut layer if that is on, or a device of another host.
#[derive(Debug)]
pub(crate) enum ControlFile {
    /// A file or device of this host.
    Here(LocalFile),
    /// A device of another host.
    Remote(Arc<RemoteFile>),
}

/// A file of this host.
#[derive(Debug)]
pub(crate) struct LocalFile {
    file: File,
    path: PathBuf,
    volatile: Option<Arc<VolatileFile>>,
}

impl ControlFile {
    /// Wraps the file at `path`, which is open for reading and writing.
    ///
    /// # Errors
    /// Returns an error if the power-cut layer is on and cannot open the file again.
    pub(crate) fn new(file: File, path: &Path) -> io::Result<ControlFile> {
        let volatile = super::volatile(&file)?;
        Ok(ControlFile::Here(LocalFile { file, path: path.to_owned(), volatile }))
    }

    /// Returns the file itself, for uses other than reads and writes; `None` for another host's
    /// device.
    pub(crate) fn file(&self) -> Option<&File> {
        match self {
            ControlFile::Here(local) => Some(&local.file),
            ControlFile::Remote(_) => None,
        }
    }

    /// Returns true if the power-cut layer is on.
    pub(crate) fn is_volatile(&self) -> bool {
        matches!(self, ControlFile::Here(LocalFile { volatile: Some(_), .. }))
    }

    /// Fills `bytes` from `offset` of the file, like [`FileExt::read_exact_at`].
    ///
    /// # Errors
    /// Returns the error of the file.
    pub(crate) fn read_exact_at(&self, bytes: &mut [u8], offset: u64) -> io::Result<()> {
        match self {
            ControlFile::Here(LocalFile { volatile: Some(volatile), .. }) => volatile.read(offset, bytes),
            ControlFile::Here(local) => local.file.read_exact_at(bytes, offset),
            ControlFile::Remote(remote) => remote.read_exact_at(bytes, offset),
        }
    }

    /// Writes all of `bytes` at `offset` of the file, like [`FileExt::write_all_at`].
    ///
    /// # Errors
    /// Returns the error of the file.
    pub(crate) fn write_all_at(&self, bytes: &[u8], offset: u64) -> io::Result<()> {
        let local = match self {
            ControlFile::Here(local) => local,
            ControlFile::Remote(remote) => return remote.write_all_at(bytes, offset),
        };
        let failed = failing::before_change(&local.path);
        if failed.is_err() {
            local.file.write_all_at(&bytes[..TORN_BYTES.min(bytes.len())], offset)?;
            return failed;
        }
        match &local.volatile {
            Some(volatile) => volatile.write(offset, bytes, Durability::Volatile),
            None => local.file.write_all_at(bytes, offset),
        }
    }

    /// Makes all written data durable, like [`File::sync_data`].
    ///
    /// # Errors
    /// Returns the error of the file.
    pub(crate) fn sync_data(&self) -> io::Result<()> {
        let local = match self {
            ControlFile::Here(local) => local,
            ControlFile::Remote(remote) => return remote.sync_data(),
        };
        failing::before_change(&local.path)?;
        match &local.volatile {
            Some(volatile) => volatile.flush(),
            None => local.file.sync_data(),
        }
    }
}
