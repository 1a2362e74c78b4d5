//! Finds out whether a filesystem can make holes in files.

use std::fs::{File, Metadata};
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use hob_engine::units::SECTOR_BYTES;
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;

use super::PUNCH;

/// Assumed maximum growth of an unlocked file by other programs while hob tries to make a hole
/// behind the file's end, bytes. hob makes the hole this far behind the end of the file.
const UNLOCKED_GROWTH_MAX_BYTES: u64 = 1 << 40;

/// Returns true if hob can make holes in an open file. `is_locked` means that no other program
/// writes the file.
pub(super) fn can_punch(file: &File, path: &Path, metadata: &Metadata, is_locked: bool) -> bool {
    can_punch_beside(path, metadata).unwrap_or_else(|| can_punch_in(file, metadata, is_locked))
}

/// Makes a hole in an unnamed file of the same filesystem, so that the file itself does not change.
/// Returns `None` if the unnamed file cannot be created.
fn can_punch_beside(path: &Path, metadata: &Metadata) -> Option<bool> {
    let folder = path.canonicalize().ok()?.parent()?.to_owned();
    let flags = OFlags::TMPFILE | OFlags::RDWR | OFlags::CLOEXEC;
    let unnamed = File::from(rustix::fs::open(folder, flags, Mode::RUSR | Mode::WUSR).ok()?);
    let is_same = unnamed.metadata().ok()?.dev() == metadata.dev();
    is_same.then(|| may_punch(rustix::fs::fallocate(&unnamed, PUNCH, 0, SECTOR_BYTES)))
}

/// Makes a hole behind the end of the file, where there is no data that the hole could delete.
fn can_punch_in(file: &File, metadata: &Metadata, is_locked: bool) -> bool {
    let grows_max = if is_locked { 0 } else { UNLOCKED_GROWTH_MAX_BYTES };
    let beyond = metadata.len().next_multiple_of(SECTOR_BYTES) + grows_max;
    let can_punch = may_punch(rustix::fs::fallocate(file, PUNCH, beyond, SECTOR_BYTES));
    if let (true, Ok(modified)) = (is_locked, metadata.modified()) {
        // The hole changes the file. The change must not look like another program's change if hob
        // ends before it has recorded the time. If the time cannot be restored, the change looks
        // like another program's change, and hob drops clean data unnecessarily. Without the lock,
        // other programs may change the file now.
        let _ = file.set_modified(modified);
    }
    can_punch
}

/// Returns true unless the result of making a hole means that the file system cannot make holes.
/// After any other error, the next attempt may succeed. If the result is false, clients that
/// connected before hob knew the result may still send discards.
fn may_punch(result: Result<(), Errno>) -> bool {
    let unsupported = [Errno::OPNOTSUPP, Errno::NOSYS, Errno::INVAL, Errno::PERM, Errno::NODEV];
    result.err().is_none_or(|error| !unsupported.contains(&error))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_an_unsupported_operation_disables_discards() {
        assert!(may_punch(Ok(())));
        for error in [Errno::NOMEM, Errno::IO, Errno::NOSPC, Errno::INTR] {
            assert!(may_punch(Err(error)), "{error}");
        }
        for error in [Errno::OPNOTSUPP, Errno::NOSYS] {
            assert!(!may_punch(Err(error)), "{error}");
        }
    }

    #[test]
    fn the_file_keeps_its_timestamps_size_and_data() {
        let dir = tempfile::tempdir_in("/var/tmp").unwrap();
        let path = dir.path().join("disk.img");
        std::fs::write(&path, [1; 8192]).unwrap();
        let open = || File::options().read(true).write(true).open(&path).unwrap();
        let before = open().metadata().unwrap();
        std::thread::sleep(std::time::Duration::from_millis(20));
        let beside = can_punch_beside(&path, &before);
        let after = open().metadata().unwrap();
        assert_eq!((after.mtime_nsec(), after.ctime_nsec()), (before.mtime_nsec(), before.ctime_nsec()));
        let inside = can_punch_in(&open(), &before, true);
        assert!(beside.is_none_or(|beside| beside == inside), "{beside:?} beside, {inside} inside");
        let after = open().metadata().unwrap();
        assert_eq!((after.mtime_nsec(), after.len()), (before.mtime_nsec(), before.len()));
        assert_eq!(std::fs::read(&path).unwrap(), [1; 8192]);
        assert_eq!(dir.path().read_dir().unwrap().count(), 1);
    }
}
