//! Files in memory that outlive a killed daemon: crash logs of caches, and marks of unflushed
//! changes. This module opens these files for a shard, and reports missing files to `hob health`.
//!
//! The files are on a tmpfs, so opening and checking them does not wait for a device.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use hob_engine::journal::SurvivingMemory;
use hob_engine::units::DiskId;
use hob_storage::crash_log::{CrashLogFile, DIRECTORY_VARIABLE, SurvivingFile};
use hob_storage::unflushed_mark::UnflushedMark;

/// The crash logs and marks of a shard's disks.
#[derive(Clone, Debug, Default)]
pub(super) struct SurvivingFiles {
    disks: Arc<Mutex<BTreeMap<DiskId, Files>>>,
}

/// The crash log and the mark of one disk, or for each the reason why it could not be opened.
#[derive(Debug, Default)]
struct Files {
    crash_log: Option<Result<SurvivingFile, String>>,
    mark: Option<Result<SurvivingFile, String>>,
}

impl SurvivingFiles {
    fn lock(&self) -> MutexGuard<'_, BTreeMap<DiskId, Files>> {
        self.disks.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Opens the crash log of a disk's cache.
    pub(super) fn open_crash_log(&self, disk: DiskId, cache: &[u8; 16]) -> Option<Box<dyn SurvivingMemory>> {
        if cfg!(test) {
            // Unit tests make no crash logs, because nothing would remove the files.
            return None;
        }
        let opened = CrashLogFile::open(cache).map_err(|error| error.to_string());
        let file = opened.as_ref().map(CrashLogFile::file).map_err(Clone::clone);
        self.lock().entry(disk).or_default().crash_log = Some(file);
        let failed = |error: &String| {
            tracing::warn!(
                "if hob is killed, a write-back cache loses unflushed writes, because there is no memory for \
                 its crash log: {error}; free space in /dev/shm, or set {DIRECTORY_VARIABLE}"
            );
        };
        opened.inspect_err(failed).ok().map(|log| Box::new(log) as Box<dyn SurvivingMemory>)
    }

    /// Removes the crash log of a disk's cache if the engine has closed or removed the cache.
    pub(super) fn remove_ended_crash_log(&self, disk: DiskId) {
        if let Some(files) = self.lock().get_mut(&disk) {
            files.crash_log.take_if(|log| log.as_ref().is_ok_and(SurvivingFile::remove_if_ended));
        }
    }

    /// Creates the mark of a disk whose backing loses unflushed changes if the process is killed.
    pub(super) fn create_mark(&self, disk: DiskId, backing: Option<&[u8; 16]>) -> Option<UnflushedMark> {
        // The id may have belonged to a disk that was removed.
        self.lock().remove(&disk);
        let backing = backing.filter(|_| !cfg!(test))?;
        let created = UnflushedMark::create(backing).map_err(|error| error.to_string());
        let file = created.as_ref().map(|mark| mark.file().clone()).map_err(Clone::clone);
        self.lock().entry(disk).or_default().mark = Some(file);
        let failed = |error: &String| {
            tracing::warn!(
                "if hob is killed, it cannot report lost writes to guests: {error}; free space in /dev/shm, \
                 or set {DIRECTORY_VARIABLE}"
            );
        };
        created.inspect_err(failed).ok()
    }

    /// Returns why the crash log of a disk's cache does not work; `None` if it works.
    pub(super) fn crash_log_problem(&self, disk: DiskId) -> Option<String> {
        problem(self.lock().get(&disk)?.crash_log.as_ref()?)
    }

    /// Returns why the mark of a disk's unflushed changes does not work; `None` if it works.
    pub(super) fn mark_problem(&self, disk: DiskId) -> Option<String> {
        problem(self.lock().get(&disk)?.mark.as_ref()?)
    }
}

fn problem(file: &Result<SurvivingFile, String>) -> Option<String> {
    file.as_ref().map_or_else(|error| Some(error.clone()), SurvivingFile::problem)
}
