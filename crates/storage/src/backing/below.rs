//! Objects below a block device: the file of a loop device, and the disk of a partition.
//!
//! The kernel's locks of a loop device and of its file are independent. So hob could open the loop
//! device for one disk and its file for another disk. hob therefore also locks the file. Partitions
//! need no such lock: while a block device is open exclusively, the kernel refuses to open its
//! partitions or its disk exclusively.

use std::fs::{self, File, OpenOptions};
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};

use hob_engine::command::Access;

use super::OpenError;
use super::identity::SYS_BLOCK;
use crate::device_number;
pub use crate::lock::Share;
use crate::lock::{LockError, lock_share};

/// Maximum number of objects that are looked for below a block device. The limit ends the search if
/// the devices form a cycle.
const DEPTH_MAX: usize = 16;

/// A file or block device that contains the data of another block device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Object {
    /// The file or block device of a loop device.
    Path(PathBuf),
    /// The disk of a partition, by its device number.
    Device(u64),
}

/// Returns the objects below a block device from top to bottom. The [`Share`] of an object says
/// whether the device uses the whole object or only a part of it. `number` is the device number.
pub fn below(number: u64) -> Vec<(Object, Share)> {
    below_in(Path::new(SYS_BLOCK), number)
}

fn below_in(sys: &Path, mut number: u64) -> Vec<(Object, Share)> {
    let mut found = Vec::new();
    let mut share = Share::Whole;
    while found.len() < DEPTH_MAX {
        let Ok(directory) = sys.join(device_number::text(number)).canonicalize() else { break };
        let read = |file: &str| fs::read_to_string(directory.join(file)).ok();
        if read("partition").is_some() {
            let disk = directory.parent().and_then(|disk| fs::read_to_string(disk.join("dev")).ok());
            let Some(disk) = disk.as_deref().and_then(device_number::parse) else { break };
            share = Share::Part;
            found.push((Object::Device(disk), share));
            number = disk;
            continue;
        }
        let Some(file) = read("loop/backing_file") else { break };
        let file = PathBuf::from(file.trim_end_matches('\n'));
        let is_zero = |file: &str| read(file).is_none_or(|text| text.trim() == "0");
        if !is_zero("loop/offset") || !is_zero("loop/sizelimit") {
            share = Share::Part;
        }
        found.push((Object::Path(file.clone()), share));
        // Only files below `/dev` are examined, because other files may be on a filesystem that
        // hangs.
        let device =
            Some(&file).filter(|file| file.starts_with("/dev")).and_then(|file| fs::metadata(file).ok());
        match device {
            Some(device) if device.file_type().is_block_device() => number = device.rdev(),
            _ => break,
        }
    }
    found
}

/// The locks of the files below a block device.
#[derive(Debug)]
pub(crate) struct BelowLocks {
    number: u64,
    held: Mutex<Vec<File>>,
}

impl BelowLocks {
    /// Returns the locks for the block device with this device number. No file is locked yet.
    pub(crate) fn of(number: u64) -> BelowLocks {
        BelowLocks { number, held: Mutex::default() }
    }

    /// Locks the files below the device.
    ///
    /// # Errors
    /// Returns the path of a file, and the reason, if the file cannot be locked because another
    /// process has it open. After an error, no lock is kept.
    pub(crate) fn take(&self, access: Access) -> Result<(), (PathBuf, LockError)> {
        let mut taken = Vec::new();
        for (object, share) in below(self.number) {
            let Object::Path(path) = object else { continue };
            // If the file was deleted or renamed, no other disk can use it under this name.
            if super::path::check(&path).is_err() {
                continue;
            }
            let file = OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK).open(&path);
            let Ok(file) = file else { continue };
            lock_share(&file, access, share).map_err(|error| (path, error))?;
            taken.push(file);
        }
        *self.held() = taken;
        Ok(())
    }

    pub(crate) fn release(&self) {
        self.held().clear();
    }

    fn held(&self) -> MutexGuard<'_, Vec<File>> {
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Converts the error of a lock on `path` into the error of opening a backing.
pub(super) fn open_error(path: PathBuf, error: LockError) -> OpenError {
    match error {
        LockError::InUse => OpenError::InUse { path },
        LockError::Qemu(permission) => OpenError::InUseByQemu { path, permission },
        LockError::System(errno) => OpenError::System { path, source: errno.into() },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn loop_devices_and_partitions_lead_to_what_they_are_on() {
        let sys = tempfile::tempdir().unwrap();
        let device = |directory: &str, files: &[(&str, &str)]| {
            for (file, text) in files {
                let path = sys.path().join(directory).join(file);
                fs::create_dir_all(path.parent().unwrap()).unwrap();
                fs::write(path, text).unwrap();
            }
        };
        let find = |major, minor| below_in(sys.path(), rustix::fs::makedev(major, minor));
        assert!(find(8, 0).is_empty());
        device("8:0", &[("dev", "8:0\n"), ("sda1/partition", "1\n"), ("sda1/dev", "8:1\n")]);
        std::os::unix::fs::symlink("8:0/sda1", sys.path().join("8:1")).unwrap();
        let disk = Object::Device(rustix::fs::makedev(8, 0));
        assert!(find(8, 0).is_empty());
        assert_eq!(find(8, 1), [(disk, Share::Part)]);
        let whole = [("loop/backing_file", "/srv/a b\n"), ("loop/offset", "0\n"), ("loop/sizelimit", "0\n")];
        device("7:0", &whole);
        let file = Object::Path("/srv/a b".into());
        assert_eq!(find(7, 0), [(file.clone(), Share::Whole)]);
        device("7:1", &[("loop/backing_file", "/srv/a b\n"), ("loop/offset", "1048576\n")]);
        assert_eq!(find(7, 1), [(file.clone(), Share::Part)]);
        device("7:0", &[("dev", "7:0\n"), ("loop0p1/partition", "1\n")]);
        std::os::unix::fs::symlink("7:0/loop0p1", sys.path().join("259:0")).unwrap();
        let disk = Object::Device(rustix::fs::makedev(7, 0));
        assert_eq!(find(259, 0), [(disk, Share::Part), (file, Share::Part)]);
    }
}
