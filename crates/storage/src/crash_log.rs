//! The memory of a cache's crash log ([`hob_engine::journal::SurvivingMemory`]): a mapped file on a
//! tmpfs, which outlives a killed daemon but not a restart of the host.
//!
//! The files are in `/dev/shm`, or in the directory that the environment variable
//! `HOB_CRASH_LOG_DIR` names. Each cache has one file of 272 KiB, named after the cache. A closed
//! cache needs no crash log. When a cache is closed, the engine only marks the file as unneeded.
//! [`SurvivingFile::remove_if_ended`] removes the file after the daemon has saved that the cache is
//! closed. If the daemon is killed before that, the next daemon still expects the file.
//!
//! Why `unsafe`: a shared mapping is the only memory that keeps each byte written to it when the
//! process is killed, without a system call for each write.
#![allow(unsafe_code)]

use std::ffi::OsString;
use std::fs::{File, Metadata};
use std::io::{self, Read};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use hob_engine::journal::{CRASH_LOG_BYTES, SurvivingMemory};
use rustix::fs::{FallocateFlags, Mode, OFlags};
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};

/// Environment variable with the directory of the files.
pub const DIRECTORY_VARIABLE: &str = "HOB_CRASH_LOG_DIR";

const DIRECTORY_DEFAULT: &str = "/dev/shm";

/// Environment variable that replaces the kernel's boot id. Tests that simulate a power cut set it.
pub const BOOT_VARIABLE: &str = "HOB_BOOT_ID";

const BOOT_FILE: &str = "/proc/sys/kernel/random/boot_id";

/// Returns the id of the kernel's current boot, a UUID. A crash log that existed earlier in the
/// same boot must still exist. `None` if the kernel does not report the id.
pub fn boot_id() -> Option<u128> {
    let text = std::env::var(BOOT_VARIABLE).or_else(|_| std::fs::read_to_string(BOOT_FILE)).ok()?;
    u128::from_str_radix(&text.trim().replace('-', ""), 16).ok()
}

/// The mapped crash log file of one cache.
#[derive(Debug)]
pub struct CrashLogFile {
    map: NonNull<u8>,
    file: SurvivingFile,
}

/// Name and identity of a file that must stay in its directory while hob uses it.
#[derive(Clone, Debug)]
pub struct SurvivingFile {
    path: PathBuf,
    /// Device number and inode of the file.
    identity: (u64, u64),
    /// True if the last write to the file failed.
    is_failing: Arc<AtomicBool>,
    /// True if the cache was closed or removed, so that the file is not needed any more.
    has_ended: Arc<AtomicBool>,
}

impl SurvivingFile {
    pub(crate) fn of(path: &Path, file: &File) -> io::Result<SurvivingFile> {
        let found = file.metadata()?;
        let identity = (found.dev(), found.ino());
        let path = path.to_owned();
        Ok(SurvivingFile { path, identity, is_failing: Arc::default(), has_ended: Arc::default() })
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Records whether the last write to the file failed. Returns the earlier value.
    pub(crate) fn set_failing(&self, is_failing: bool) -> bool {
        self.is_failing.swap(is_failing, Relaxed)
    }

    /// Removes the file if the cache of this crash log was closed or removed. Returns true in this
    /// case, even if the file cannot be removed.
    pub fn remove_if_ended(&self) -> bool {
        let has_ended = self.has_ended.load(Relaxed);
        if has_ended {
            let _ = std::fs::remove_file(&self.path);
        }
        has_ended
    }

    /// Returns the reason why another process would not find the records that this process writes
    /// to the file. Returns `None` if another process would find them.
    pub fn problem(&self) -> Option<String> {
        let path = self.path.display();
        if self.is_failing.load(Relaxed) {
            return Some(format!("{path} cannot be written"));
        }
        match std::fs::symlink_metadata(&self.path) {
            Ok(found) if (found.dev(), found.ino()) != self.identity => {
                Some(format!("{path} was replaced by another file"))
            }
            Ok(found) if found.mode() & 0o077 != 0 => Some(format!("other users have access to {path}")),
            Ok(_) => None,
            Err(error) if error.kind() == io::ErrorKind::NotFound => Some(format!("{path} was removed")),
            Err(error) => Some(format!("{path}: {error}")),
        }
    }
}

/// Returns the directory of files that outlive a killed daemon but not a restart of the host.
pub(crate) fn directory() -> PathBuf {
    let chosen = std::env::var_os(DIRECTORY_VARIABLE).filter(|directory| !directory.is_empty());
    chosen.unwrap_or_else(|| OsString::from(DIRECTORY_DEFAULT)).into()
}

/// Returns the path of a cache's crash log.
fn path_of(cache: &[u8; 16]) -> PathBuf {
    directory().join(format!("hob-{:032x}", u128::from_le_bytes(*cache)))
}

/// Opens a file that only this user can have written. With [`OFlags::CREATE`], the file of another
/// user is removed first.
pub(crate) fn open(path: &Path, flags: OFlags) -> io::Result<File> {
    let mut flags = flags | OFlags::NOFOLLOW | OFlags::CLOEXEC | OFlags::NONBLOCK;
    if flags.contains(OFlags::CREATE) && remove_foreign(path) {
        flags |= OFlags::EXCL;
    }
    let opened = rustix::fs::open(path, flags, Mode::RUSR | Mode::WUSR).map_err(|errno| {
        let error = io::Error::from(errno);
        io::Error::new(error.kind(), format!("{}: {error}", path.display()))
    });
    let file = File::from(opened?);
    let found = file.metadata()?;
    if !is_own_file(&found) || found.mode() & 0o077 != 0 {
        let reason = "another user owns this file or has access to it; remove it";
        return Err(io::Error::other(format!("{}: {reason}", path.display())));
    }
    Ok(file)
}

fn is_own_file(found: &Metadata) -> bool {
    found.is_file() && found.uid() == rustix::process::geteuid().as_raw()
}

/// Removes a file that another user has created at this path, because any user can create files in
/// `/dev/shm`. Returns true if the path is free afterwards.
fn remove_foreign(path: &Path) -> bool {
    match std::fs::symlink_metadata(path) {
        Ok(found) if !is_own_file(&found) => {
            let removed = std::fs::remove_file(path);
            let result = removed.as_ref().map_or_else(ToString::to_string, |()| "hob removed it".to_owned());
            tracing::warn!("{} is not a file of this user: {result}", path.display());
            removed.is_ok()
        }
        _ => false,
    }
}

/// Removes a new file for which there is no memory. Returns the error with the path.
pub(crate) fn without_room(path: &Path, error: io::Error) -> io::Error {
    if std::fs::metadata(path).is_ok_and(|found| found.len() == 0) {
        let _ = std::fs::remove_file(path);
    }
    io::Error::new(error.kind(), format!("{}: {error}", path.display()))
}

impl CrashLogFile {
    /// Opens a cache's crash log, which keeps the content of an earlier daemon. Creates the file if
    /// it does not exist.
    ///
    /// # Errors
    /// Returns the system's error, or an error if another user can write to the file.
    pub fn open(cache: &[u8; 16]) -> io::Result<CrashLogFile> {
        let path = path_of(cache);
        let file = open(&path, OFlags::RDWR | OFlags::CREATE)?;
        let identity = SurvivingFile::of(&path, &file)?;
        // A write to a page without memory would kill the daemon.
        let room = rustix::fs::fallocate(&file, FallocateFlags::empty(), 0, CRASH_LOG_BYTES as u64);
        room.map_err(|errno| without_room(&path, errno.into()))?;
        // SAFETY: this is a new mapping at an address that the kernel chooses, so it overlaps no
        // existing memory.
        let map = unsafe {
            mmap(
                std::ptr::null_mut(),
                CRASH_LOG_BYTES,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::SHARED,
                &file,
                0,
            )?
        };
        Ok(CrashLogFile {
            map: NonNull::new(map.cast()).expect("mmap never returns address 0"),
            file: identity,
        })
    }

    /// Returns the name and identity of the file.
    pub fn file(&self) -> SurvivingFile {
        self.file.clone()
    }
}

/// Removes the crash log, if it exists, of a cache that was discarded while no process used the
/// cache.
pub fn remove(cache: &[u8; 16]) {
    let path = path_of(cache);
    match std::fs::remove_file(&path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            tracing::warn!("cannot remove the crash log of a discarded cache: {}: {error}", path.display());
        }
        _ => {}
    }
}

pub(crate) fn read(cache: &[u8; 16]) -> Option<Vec<u8>> {
    let path = path_of(cache);
    let mut bytes = Vec::with_capacity(CRASH_LOG_BYTES);
    let done = open(&path, OFlags::RDONLY)
        .and_then(|file| file.take(CRASH_LOG_BYTES as u64).read_to_end(&mut bytes));
    match done {
        Ok(_) => Some(bytes),
        Err(error) if error.kind() == io::ErrorKind::NotFound => None,
        Err(error) => {
            tracing::warn!("cannot read a crash log: {error}");
            None
        }
    }
}

impl SurvivingMemory for CrashLogFile {
    fn write(&mut self, offset: usize, bytes: &[u8]) {
        assert!(offset <= CRASH_LOG_BYTES && bytes.len() <= CRASH_LOG_BYTES - offset, "outside the log");
        // SAFETY: the range is inside the mapping, which nothing else refers to, and `bytes` is
        // other memory.
        unsafe {
            std::ptr::copy_nonoverlapping(bytes.as_ptr(), self.map.as_ptr().add(offset), bytes.len());
        }
        // The entry is in memory before the caller acknowledges the write.
        std::sync::atomic::compiler_fence(std::sync::atomic::Ordering::SeqCst);
    }

    fn remove(&mut self) {
        self.file.has_ended.store(true, Relaxed);
    }
}

// SAFETY: the mapping belongs to no thread.
unsafe impl Send for CrashLogFile {}

impl Drop for CrashLogFile {
    fn drop(&mut self) {
        // SAFETY: this is our own mapping, and no reference to it is left.
        unsafe {
            let _ = munmap(self.map.as_ptr().cast(), CRASH_LOG_BYTES);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn remove_ended(log: &mut CrashLogFile) {
        log.remove();
        assert!(log.file().remove_if_ended());
    }

    #[test]
    fn the_bytes_are_there_for_the_next_process_until_the_log_is_removed() {
        let cache = (u128::from(std::process::id()) << 64 | 0x6861_7368).to_le_bytes();
        let mut log = CrashLogFile::open(&cache).unwrap();
        log.write(CRASH_LOG_BYTES - 4, b"last");
        drop(log);
        assert_eq!(read(&cache).unwrap()[CRASH_LOG_BYTES - 4..], *b"last");
        let mut log = CrashLogFile::open(&cache).unwrap();
        log.write(0, b"first");
        assert_eq!(read(&cache).unwrap()[CRASH_LOG_BYTES - 4..], *b"last");
        assert!(!log.file().remove_if_ended() && read(&cache).is_some(), "its cache is in use");
        log.remove();
        assert!(read(&cache).is_some(), "the close is not saved yet");
        assert!(log.file().remove_if_ended());
        assert_eq!(read(&cache), None);
    }

    #[test]
    fn a_log_that_is_removed_or_replaced_is_a_problem() {
        let cache = (u128::from(std::process::id()) << 64 | 0x676f_6e65).to_le_bytes();
        let mut log = CrashLogFile::open(&cache).unwrap();
        assert_eq!(log.file().problem(), None);
        remove_ended(&mut log);
        assert!(log.file().problem().unwrap().contains("removed"));
        let mut other = CrashLogFile::open(&cache).unwrap();
        assert!(log.file().problem().unwrap().contains("replaced"));
        remove_ended(&mut other);
    }

    #[test]
    fn the_kernel_has_a_boot_id() {
        assert!(boot_id().is_some_and(|id| id > 0));
        assert_eq!(boot_id(), boot_id());
    }

    #[test]
    fn files_that_others_can_write_are_refused() {
        use std::os::unix::fs::PermissionsExt;
        let cache = (u128::from(std::process::id()) << 64 | 0x6f70_656e).to_le_bytes();
        let mut log = CrashLogFile::open(&cache).unwrap();
        std::fs::set_permissions(log.file.path(), std::fs::Permissions::from_mode(0o666)).unwrap();
        assert_eq!(read(&cache), None);
        assert!(CrashLogFile::open(&cache).is_err());
        remove_ended(&mut log);
        std::os::unix::fs::symlink("/etc/passwd", log.file.path()).unwrap();
        assert!(open(log.file.path(), OFlags::RDWR).is_err() && read(&cache).is_none());
        remove_ended(&mut log);
    }

    #[test]
    fn what_another_user_created_is_replaced_by_a_new_log() {
        let cache = (u128::from(std::process::id()) << 64 | 0x7465_6b65).to_le_bytes();
        let path = path_of(&cache);
        let is_private = |log: &CrashLogFile| {
            let found = std::fs::symlink_metadata(&path).unwrap();
            assert!(is_own_file(&found) && found.mode() & 0o077 == 0, "{found:?}");
            assert_eq!(log.file().problem(), None);
        };
        let target = tempfile::NamedTempFile::new().unwrap();
        std::os::unix::fs::symlink(target.path(), &path).unwrap();
        let mut log = CrashLogFile::open(&cache).unwrap();
        is_private(&log);
        assert_eq!(target.as_file().metadata().unwrap().len(), 0);
        remove_ended(&mut log);
        std::fs::create_dir(&path).unwrap();
        assert!(CrashLogFile::open(&cache).is_err(), "it cannot be removed");
        std::fs::remove_dir(&path).unwrap();
        // Only root can create the file of another user, and remove it.
        std::fs::write(&path, [b'x'; CRASH_LOG_BYTES]).unwrap();
        if std::os::unix::fs::chown(&path, Some(65534), None).is_err() {
            return std::fs::remove_file(&path).unwrap();
        }
        let mut log = CrashLogFile::open(&cache).unwrap();
        is_private(&log);
        assert_eq!(read(&cache).unwrap(), vec![0; CRASH_LOG_BYTES], "the other content is not used");
        remove_ended(&mut log);
    }
}
