//! Locks the files of a read-only image against writers, in addition to `qemu-nbd`.
//!
//! `qemu-nbd` does not lock the raw files below an image against writers, and an image without a
//! running `qemu-nbd` is not locked at all. Clones share cached data of the image's files, so hob
//! holds locks of its own. These locks do not exclude other readers.

use std::fs::{File, OpenOptions};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use hob_engine::command::Access;

use super::super::below::open_error;
use super::super::{OpenError, path};
use super::node::Image;
use crate::lock::lock_image;

/// The locks of an image's files, held until this value is dropped.
#[derive(Debug)]
pub(super) struct ReadLocks {
    _files: Vec<File>,
}

impl ReadLocks {
    /// Locks the image and all regular files below it. Waits briefly for a process that is just
    /// ending.
    ///
    /// # Errors
    /// Returns an error if a program has one of the files open for writing, or if a file cannot be
    /// opened. After an error, no lock is kept.
    pub(super) fn take(image: &Image) -> Result<ReadLocks, OpenError> {
        let below = image.files.iter().map(|file| file.path.as_path());
        let mut files = Vec::new();
        for path in std::iter::once(image.path.as_path()).chain(below) {
            files.extend(lock(path)?);
        }
        Ok(ReadLocks { _files: files })
    }
}

/// Locks a file. Returns `None` for a block device, which clones do not share.
fn lock(path: &Path) -> Result<Option<File>, OpenError> {
    if !path::check(path)?.is_file() {
        return Ok(None);
    }
    let open = OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK).open(path);
    let file = open.map_err(|source| OpenError::System { path: path.into(), source })?;
    lock_image(&file, Access::ReadOnly).map_err(|error| open_error(path.into(), error))?;
    Ok(Some(file))
}

#[cfg(test)]
mod tests {
    use super::super::super::{Format, ImageFile, Role};
    use rustix::fs::{FlockOperation, flock};

    use super::*;

    #[test]
    fn all_files_of_an_image_are_locked_against_writers_only() {
        let dir = tempfile::tempdir().unwrap();
        let file = |name: &str| {
            let path = dir.path().join(name);
            std::fs::write(&path, [0; 4096]).unwrap();
            path
        };
        let (top, middle, bottom) = (file("top"), file("middle"), file("bottom"));
        let layer = |path: &Path, format| ImageFile { path: path.into(), format, role: Role::Backing };
        let image = Image {
            path: top.clone(),
            format: Format::Qcow2,
            files: vec![layer(&middle, Format::Qcow2), layer(&bottom, Format::Raw)],
        };
        let locks = ReadLocks::take(&image).unwrap();
        let is_free =
            |path: &Path| flock(File::open(path).unwrap(), FlockOperation::NonBlockingLockExclusive).is_ok();
        for path in [&top, &middle, &bottom] {
            assert!(!is_free(path), "{}", path.display());
        }
        // Another disk may read the same files.
        drop(ReadLocks::take(&image).unwrap());
        drop(locks);
        let writer = File::open(&bottom).unwrap();
        flock(&writer, FlockOperation::NonBlockingLockExclusive).unwrap();
        let error = ReadLocks::take(&image).unwrap_err();
        assert!(error.to_string().contains("bottom"), "{error}");
        assert!(is_free(&top) && is_free(&middle), "no lock is kept after a refusal");
    }
}
