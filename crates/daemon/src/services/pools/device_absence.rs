//! Finds out whether a fenced device was removed from the host (docs/decisions/0073).
//!
//! A failed check of the device does not show that: reads of a device with bad sectors fail too.

use std::fs::File;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::time::Duration;

use hob_storage::pool::{check_answers, superblock_uuid};
use rustix::io::Errno;

use crate::hardware::{FileNumber, file_number};

/// Errors of opening a device file whose device the kernel does not have.
const NO_DEVICE: [Errno; 3] = [Errno::NXIO, Errno::NODEV, Errno::NOMEDIUM];

/// Properties of a device before it was fenced.
#[derive(Clone, Debug)]
pub(super) struct FormerDevice {
    pub(super) path: PathBuf,
    /// UUID in the superblock.
    pub(super) uuid: String,
    /// Device and inode number of a regular file, if they are known.
    pub(super) file: Option<FileNumber>,
    /// Size of all segments in bytes.
    pub(super) segment_bytes: u64,
}

impl FormerDevice {
    /// Returns true if the former device is not at its path, or has not answered within `limit`.
    /// Returns false if that is unknown, for example after a read error. Waits for the device.
    pub(super) fn is_away(&self, limit: Duration) -> bool {
        if check_answers(&self.path, limit).is_err() {
            return true;
        }
        let found = match std::fs::metadata(&self.path) {
            Ok(found) => found,
            Err(error) => return error.kind() == ErrorKind::NotFound,
        };
        let is_other_file =
            |file: FileNumber| file_number(&found) != Some(file) || found.len() < self.segment_bytes;
        self.file.is_some_and(is_other_file)
            || has_no_device(&self.path)
            || superblock_uuid(&self.path).is_some_and(|uuid| uuid.to_string() != self.uuid)
    }
}

fn has_no_device(path: &Path) -> bool {
    let is_absence =
        |error: std::io::Error| Errno::from_io_error(&error).is_some_and(|errno| NO_DEVICE.contains(&errno));
    File::open(path).is_err_and(is_absence)
}

#[cfg(test)]
mod tests {
    use hob_storage::pool::{DeviceSpec, Overwrite, Pool, SEGMENT_BYTES_MIN, device_bytes_for};

    use super::*;

    const LIMIT: Duration = Duration::from_secs(60);

    /// Creates a pool with one device, and returns the device.
    fn create(path: &Path) -> FormerDevice {
        let size_bytes = Some(device_bytes_for(4 * SEGMENT_BYTES_MIN, SEGMENT_BYTES_MIN));
        let spec = DeviceSpec { path: path.to_owned(), size_bytes };
        let pool = Pool::create("p", &[spec], SEGMENT_BYTES_MIN, Overwrite::Refuse).unwrap();
        let device = pool.devices().pop().unwrap();
        FormerDevice {
            path: path.to_owned(),
            uuid: device.uuid.to_string(),
            file: device.file,
            segment_bytes: device.segments * SEGMENT_BYTES_MIN,
        }
    }

    #[test]
    fn a_device_is_away_if_another_file_or_nothing_is_at_its_path() {
        let dir = tempfile::tempdir().unwrap();
        let (path, away) = (dir.path().join("a"), dir.path().join("away"));
        let device = create(&path);
        assert!(!device.is_away(LIMIT));
        let file = File::options().write(true).open(&path).unwrap();
        let size = file.metadata().unwrap().len();
        file.set_len(size / 4).unwrap();
        assert!(device.is_away(LIMIT), "the file was truncated");
        file.set_len(size).unwrap();
        std::fs::rename(&path, &away).unwrap();
        assert!(device.is_away(LIMIT));
        std::fs::copy(&away, &path).unwrap();
        assert!(device.is_away(LIMIT), "a copy of the file");
        // For a block device, only the superblock shows that it is another one.
        assert!(!FormerDevice { file: None, ..device.clone() }.is_away(LIMIT));
        std::fs::remove_file(&path).unwrap();
        create(&path);
        assert!(FormerDevice { file: None, ..device }.is_away(LIMIT));
    }

    /// Reads of a directory fail, as those of a device with bad sectors do.
    #[test]
    fn a_read_error_does_not_show_that_a_device_is_away() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a");
        let device = FormerDevice { file: None, ..create(&path) };
        std::fs::remove_file(&path).unwrap();
        std::fs::create_dir(&path).unwrap();
        assert!(!device.is_away(LIMIT));
    }

    #[test]
    fn a_device_file_without_its_device_is_away() {
        let dir = tempfile::tempdir().unwrap();
        // The error of opening a socket is that of opening the file of a missing device.
        let path = dir.path().join("socket");
        let _socket = std::os::unix::net::UnixListener::bind(&path).unwrap();
        assert!(has_no_device(&path));
        assert!(!has_no_device(dir.path()) && !has_no_device(&dir.path().join("missing")));
    }
}
