//! A file that a control thread reads and writes in place, waiting for it: superblocks and tables.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use hob_engine::io::Durability;

use super::VolatileFile;
use crate::failing;

/// What a write leaves that is made to fail, bytes.
const TORN_BYTES: usize = 512;

/// A file, through the power-cut layer if that is on.
#[derive(Debug)]
pub(crate) struct ControlFile {
    file: File,
    path: PathBuf,
    volatile: Option<Arc<VolatileFile>>,
}

impl ControlFile {
    /// Takes the file at `path`, which is open for reading and writing.
    ///
    /// # Errors
    /// The layer is on and cannot open the file once more.
    pub(crate) fn new(file: File, path: &Path) -> io::Result<ControlFile> {
        let volatile = super::volatile(&file)?;
        Ok(ControlFile { file, path: path.to_owned(), volatile })
    }

    /// The file itself, for whatever neither reads nor writes.
    pub(crate) fn file(&self) -> &File {
        &self.file
    }

    /// Is the layer on?
    pub(crate) fn is_volatile(&self) -> bool {
        self.volatile.is_some()
    }

    /// As [`FileExt::read_exact_at`].
    ///
    /// # Errors
    /// The file's.
    pub(crate) fn read_exact_at(&self, bytes: &mut [u8], offset: u64) -> io::Result<()> {
        match &self.volatile {
            Some(volatile) => volatile.read(offset, bytes),
            None => self.file.read_exact_at(bytes, offset),
        }
    }

    /// As [`FileExt::write_all_at`].
    ///
    /// # Errors
    /// The file's.
    pub(crate) fn write_all_at(&self, bytes: &[u8], offset: u64) -> io::Result<()> {
        let failed = failing::before_change(&self.path);
        if failed.is_err() {
            self.file.write_all_at(&bytes[..TORN_BYTES.min(bytes.len())], offset)?;
            return failed;
        }
        match &self.volatile {
            Some(volatile) => volatile.write(offset, bytes, Durability::Volatile),
            None => self.file.write_all_at(bytes, offset),
        }
    }

    /// As [`File::sync_data`].
    ///
    /// # Errors
    /// The file's.
    pub(crate) fn sync_data(&self) -> io::Result<()> {
        failing::before_change(&self.path)?;
        match &self.volatile {
            Some(volatile) => volatile.flush(),
            None => self.file.sync_data(),
        }
    }
}
