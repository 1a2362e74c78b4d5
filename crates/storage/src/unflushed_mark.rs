//! Marks disks whose unflushed changes are only in the memory of this process or of its `qemu-nbd`.
//! So the next daemon knows the disks whose changes were lost when these processes were killed.
//!
//! Each such disk has a file in the [directory of the crash logs](crate::crash_log). The first byte
//! is the number of guests whose acknowledged changes would be lost, or that have not received a
//! report of an earlier loss. The second byte is the part of this number that needs a report even
//! if the `qemu-nbd` of a killed process has stored its changes. So a report is not forgotten if
//! `hob serve`, which saves no other state, is killed again before the report. The shard writes the
//! bytes before it acknowledges a change. A restart of the host removes the file, and also ends the
//! guests, so they need no report. A disk that is closed cleanly has no file.

use std::fs::File;
use std::io::{self, Read};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use rustix::fs::OFlags;

use crate::crash_log::{self, SurvivingFile};

/// The file that marks one disk as having unflushed changes in memory.
#[derive(Debug)]
pub struct UnflushedMark {
    open: File,
    file: SurvivingFile,
    counts: [u8; 2],
}

/// Returns the path of a disk's mark.
pub(crate) fn path_of(backing: &[u8; 16]) -> PathBuf {
    crash_log::directory().join(format!("hob-unflushed-{:032x}", u128::from_le_bytes(*backing)))
}

/// Returns the number of guests whose acknowledged changes a killed daemon lost. Returns 0 if the
/// last daemon closed the disk, or if the host was restarted since then. Returns 1 if the mark's
/// file is empty.
///
/// # Errors
/// Returns the system's error, or an error if another user can write to the mark.
pub fn guests_with_losses(backing: &[u8; 16]) -> io::Result<u32> {
    let mut guests = [0];
    match crash_log::open(&path_of(backing), OFlags::RDONLY) {
        Ok(mut file) => file.read(&mut guests).map(|bytes| if bytes == 0 { 1 } else { guests[0].into() }),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(0),
        Err(error) => Err(error),
    }
}

/// Reduces the numbers of a mark, after the `qemu-nbd` of a killed process has stored its changes:
/// only guests that need a report even then stay in the mark. A missing mark stays missing.
///
/// # Errors
/// Returns the system's error, or an error if another user can write to the mark.
pub(crate) fn note_stored(path: &Path) -> io::Result<()> {
    rewrite(path, |[_, unreported]| [unreported; 2])
}

/// Makes the number of guests in the mark of an earlier process permanent: [`note_stored`] does not
/// reduce it. Call this function before the path of the mark is recorded for a new `qemu-nbd`.
///
/// # Errors
/// Returns the system's error, or an error if another user can write to the mark.
pub(crate) fn keep(backing: &[u8; 16]) -> io::Result<()> {
    rewrite(&path_of(backing), |[guests, _]| [guests; 2])
}

/// Changes the numbers of a mark, if the mark exists and has numbers.
fn rewrite(path: &Path, change: impl FnOnce([u8; 2]) -> [u8; 2]) -> io::Result<()> {
    let mut file = match crash_log::open(path, OFlags::RDWR) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        opened => opened?,
    };
    let mut counts = [0; 2];
    match file.read(&mut counts)? {
        0 => Ok(()),
        _ => file.write_all_at(&change(counts), 0),
    }
}

/// Returns true if a disk has no mark: it was closed, the host has restarted, or the mark was
/// deleted.
pub fn is_missing(backing: &[u8; 16]) -> bool {
    std::fs::symlink_metadata(path_of(backing)).is_err_and(|error| error.kind() == io::ErrorKind::NotFound)
}

impl UnflushedMark {
    /// Creates the mark of a disk without unflushed changes, in place of the mark of an earlier
    /// daemon. `backing` is [`Driver::memory_id`](crate::backing::Driver::memory_id).
    ///
    /// # Errors
    /// Returns the system's error, or an error if another user can write to the mark.
    pub fn create(backing: &[u8; 16]) -> io::Result<UnflushedMark> {
        let path = path_of(backing);
        let open = crash_log::open(&path, OFlags::RDWR | OFlags::CREATE)?;
        open.write_all_at(&[0, 0], 0).map_err(|error| crash_log::without_room(&path, error))?;
        let file = SurvivingFile::of(&path, &open)?;
        Ok(UnflushedMark { open, file, counts: [0, 0] })
    }

    /// Returns the name and identity of the file.
    pub fn file(&self) -> &SurvivingFile {
        &self.file
    }

    /// Records the number of guests whose acknowledged changes are not flushed, or that have not
    /// received a report of a loss. `unreported` is the part of them that needs a report even if a
    /// `qemu-nbd` of this process stores its changes after a kill of this process.
    pub fn set(&mut self, guests: u32, unreported: u32) {
        let counts = [guests, unreported.min(guests)].map(|count| u8::try_from(count).unwrap_or(u8::MAX));
        if counts != self.counts {
            // The page exists since the mark was created, so a tmpfs does not refuse this.
            let written = self.open.write_all_at(&counts, 0);
            let was_failing = self.file.set_failing(written.is_err());
            match written {
                Ok(()) => self.counts = counts,
                Err(error) if !was_failing => {
                    let path = self.file.path().display();
                    tracing::warn!("{path}: {error}; if hob is killed, writes may be lost without a report");
                }
                Err(_) => {}
            }
        }
    }

    /// Returns true if the number of guests in the mark is not 0.
    pub fn has_guests(&self) -> bool {
        self.counts[0] > 0
    }

    /// Removes the mark of a disk that is closed.
    pub fn remove(self) {
        let _ = std::fs::remove_file(self.file.path());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mark_is_there_for_the_next_process_until_it_is_removed_or_created_again() {
        let backing = (u128::from(std::process::id()) << 64 | 0x6d61_726b).to_le_bytes();
        assert_eq!((guests_with_losses(&backing).unwrap(), is_missing(&backing)), (0, true));
        let mut mark = UnflushedMark::create(&backing).unwrap();
        mark.set(3, 0);
        drop(mark);
        assert!(!is_missing(&backing));
        assert_eq!(guests_with_losses(&backing).unwrap(), 3);
        let mut mark = UnflushedMark::create(&backing).unwrap();
        assert_eq!(guests_with_losses(&backing).unwrap(), 0);
        mark.set(1000, 0);
        assert_eq!(guests_with_losses(&backing).unwrap(), 255);
        mark.remove();
        assert_eq!(guests_with_losses(&backing).unwrap(), 0);
        let mark = UnflushedMark::create(&backing).unwrap();
        mark.open.set_len(0).unwrap();
        assert_eq!(guests_with_losses(&backing).unwrap(), 1);
        mark.remove();
    }

    /// The `qemu-nbd` of a killed process has stored its changes. Reports of earlier losses are
    /// still needed, also if the next process is killed before it has reported them.
    #[test]
    fn stored_changes_are_not_reported_and_earlier_losses_are() {
        let backing = (u128::from(std::process::id()) << 64 | 0x7374).to_le_bytes();
        let path = path_of(&backing);
        note_stored(&path).unwrap();
        keep(&backing).unwrap();
        assert!(is_missing(&backing), "a missing mark stays missing");
        let mut mark = UnflushedMark::create(&backing).unwrap();
        mark.set(3, 1);
        note_stored(&path).unwrap();
        assert_eq!(guests_with_losses(&backing).unwrap(), 1);
        mark.set(2, 0);
        keep(&backing).unwrap();
        note_stored(&path).unwrap();
        assert_eq!(guests_with_losses(&backing).unwrap(), 2);
        mark.set(3, 0);
        note_stored(&path).unwrap();
        assert_eq!((guests_with_losses(&backing).unwrap(), is_missing(&backing)), (0, false));
        // A mark of an earlier version has one byte.
        std::fs::write(&path, [4]).unwrap();
        note_stored(&path).unwrap();
        assert_eq!(guests_with_losses(&backing).unwrap(), 0);
        mark.remove();
    }

    #[test]
    fn a_mark_that_cannot_be_written_is_a_problem_until_it_can() {
        let backing = (u128::from(std::process::id()) << 64 | 0x726f).to_le_bytes();
        let mut mark = UnflushedMark::create(&backing).unwrap();
        let writable = std::mem::replace(&mut mark.open, File::open(mark.file.path()).unwrap());
        mark.set(1, 0);
        assert!(mark.file().problem().is_some() && !mark.has_guests());
        mark.open = writable;
        mark.set(1, 0);
        assert!(mark.file().problem().is_none() && mark.has_guests());
        mark.remove();
    }
}
