//! Divides the workers of an I/O ring among the files of backings. The workers are threads of the
//! kernel for io_uring, and threads of this process without io_uring.
//!
//! Each operation on a file of a hanging filesystem keeps a worker. Without a common limit, the
//! files of one filesystem could keep all workers of the kernel, and the flushes of all other files
//! and of the flash devices would wait. Without io_uring, a file that hangs could make this process
//! start a thread for each request. [`Shares`] divides the workers as the shard divides its other
//! resources: each file has a guaranteed part. The other workers are shared: one file may occupy at
//! most as many of them as are free afterwards. The same limit applies to all files of one
//! filesystem together.

use hob_engine::shares::Shares;
use hob_engine::units::{DatastoreId, DiskId};

use super::uring;

/// Number of the kernel's workers that operations on files of backings may occupy. The others are
/// left for flash devices. A file whose guaranteed part is zero may always occupy one worker, so
/// more than 192 files may exceed this number.
pub(crate) const WORKERS_FOR_FILES: u64 = uring::WORKERS_MAX as u64 * 3 / 4;

/// Maximum number of the kernel's workers that operations on one file may occupy.
pub(crate) const WORKERS_PER_FILE_MAX: usize = 64;

/// Number of threads that operations on files of backings may occupy without io_uring, as a
/// multiple of the maximum of one file. A file whose guaranteed part is zero may always occupy one
/// thread. Flash devices have threads in addition.
const THREADS_MULTIPLE: u64 = 16;

/// Number of a backing's file on its I/O ring. No two open files of a ring have the same number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct FileNumber(u32);

impl FileNumber {
    /// Returns the number under which [`Shares`] knows the file.
    fn id(self) -> DiskId {
        DiskId(self.0)
    }
}

/// The files of backings that use an I/O ring, and the workers that they may occupy.
#[derive(Debug)]
pub(crate) struct WorkerShares {
    shares: Shares,
    /// Maximum number of workers that operations on one file may occupy.
    per_file_max: usize,
    /// Device number and number of files of each filesystem. The index is the filesystem's number
    /// in `shares`. An entry without files is reused.
    filesystems: Vec<(u64, usize)>,
    /// Number of file numbers that were ever used.
    numbers: u32,
    /// File numbers that are not in use.
    free: Vec<u32>,
}

impl WorkerShares {
    /// Divides the kernel's workers of io_uring.
    pub(super) fn of_kernel() -> WorkerShares {
        WorkerShares::new(WORKERS_FOR_FILES, WORKERS_PER_FILE_MAX)
    }

    /// Divides the threads of an I/O ring without io_uring.
    pub(super) fn of_threads(per_file_max: usize) -> WorkerShares {
        WorkerShares::new(THREADS_MULTIPLE * per_file_max as u64, per_file_max)
    }

    fn new(workers: u64, per_file_max: usize) -> WorkerShares {
        WorkerShares {
            shares: Shares::new(workers),
            per_file_max,
            filesystems: Vec::new(),
            numbers: 0,
            free: Vec::new(),
        }
    }

    /// Adds a file. `device` is the device number of its filesystem, or of the block device.
    pub(crate) fn join(&mut self, device: u64) -> FileNumber {
        let filesystems = &mut self.filesystems;
        let known = filesystems.iter().position(|(number, files)| *number == device && *files > 0);
        let index = known.or_else(|| filesystems.iter().position(|(_, files)| *files == 0));
        let index = index.unwrap_or_else(|| {
            filesystems.push((device, 0));
            filesystems.len() - 1
        });
        filesystems[index] = (device, filesystems[index].1 + 1);
        let filesystem = u16::try_from(index).expect("at most as many filesystems as descriptors");
        let number = self.free.pop().unwrap_or_else(|| {
            self.numbers += 1;
            self.numbers - 1
        });
        let file = FileNumber(number);
        self.shares.join(file.id(), DatastoreId(filesystem));
        file
    }

    /// Removes a file that has no operations any more.
    pub(crate) fn leave(&mut self, file: FileNumber) {
        self.set_occupied(file, 0);
        self.shares.leave(file.id());
        let DatastoreId(filesystem) = self.shares.datastore(file.id());
        self.filesystems[usize::from(filesystem)].1 -= 1;
        self.free.push(file.0);
    }

    /// Records how many workers the operations on a file may occupy now.
    pub(crate) fn set_occupied(&mut self, file: FileNumber, workers: usize) {
        let (before, workers) = (self.shares.held(file.id()), workers as u64);
        if workers > before {
            self.shares.take(file.id(), workers - before);
        } else if workers < before {
            self.shares.give_back(file.id(), before - workers);
        }
    }

    /// Returns true if another operation on a file may occupy a worker. If the result is false, an
    /// operation on this file is in flight, and the backing calls this function again when that
    /// operation has ended.
    pub(crate) fn may_occupy(&self, file: FileNumber) -> bool {
        match self.shares.held(file.id()) {
            0 => true,
            held => held < self.per_file_max as u64 && self.shares.may_take(file.id(), 1),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Lets a file occupy as many workers as it may. Returns their number.
    fn fill(shares: &mut WorkerShares, file: FileNumber) -> usize {
        let mut occupied = 0;
        while shares.may_occupy(file) {
            occupied += 1;
            shares.set_occupied(file, occupied);
        }
        occupied
    }

    #[test]
    fn the_files_of_a_hung_filesystem_leave_workers_for_all_others() {
        for files in [1, 16, 17, 100, 400] {
            let mut shares = WorkerShares::of_kernel();
            let hung: Vec<_> = (0..files).map(|_| shares.join(1)).collect();
            let other = shares.join(2);
            let occupied: Vec<_> = hung.iter().map(|file| fill(&mut shares, *file)).collect();
            assert!(occupied.iter().all(|workers| (1..=WORKERS_PER_FILE_MAX).contains(workers)));
            let occupied: usize = occupied.iter().sum();
            assert!(occupied + 200 <= uring::WORKERS_MAX as usize, "{files} files: {occupied}");
            if files <= 100 {
                assert_eq!(fill(&mut shares, other), WORKERS_PER_FILE_MAX, "{files} files");
            }
        }
    }

    #[test]
    fn the_files_of_a_hung_filesystem_leave_threads_for_all_others() {
        const EACH: usize = 16;
        for files in [1, 16, 17, 60] {
            let mut shares = WorkerShares::of_threads(EACH);
            let hung: Vec<_> = (0..files).map(|_| shares.join(1)).collect();
            let other = shares.join(2);
            let occupied: usize = hung.iter().map(|file| fill(&mut shares, *file)).sum();
            assert!(occupied <= THREADS_MULTIPLE as usize * EACH * 5 / 8, "{files} files: {occupied}");
            assert_eq!(fill(&mut shares, other), EACH, "{files} files");
        }
    }

    #[test]
    fn a_file_that_leaves_returns_its_workers_and_its_number() {
        let mut shares = WorkerShares::of_kernel();
        let files: Vec<_> = (0..40).map(|filesystem| shares.join(filesystem)).collect();
        for file in &files {
            fill(&mut shares, *file);
        }
        for file in &files {
            shares.leave(*file);
        }
        assert_eq!(shares.shares.free(), WORKERS_FOR_FILES);
        let again = shares.join(99);
        assert!(files.contains(&again));
        assert_eq!((shares.filesystems.len(), fill(&mut shares, again)), (40, WORKERS_PER_FILE_MAX));
    }
}
