//! Locks a file against other writers: a second hob, and QEMU.
//!
//! # Two locks
//! `flock` excludes another hob, of any version. QEMU and its tools use open-file-description locks
//! on single bytes (`block/file-posix.c`). A lock on byte 100 + N means that a process uses
//! permission N. A lock on byte 200 + N means that a process does not permit others to use
//! permission N. hob takes the same locks, so that QEMU refuses a file that hob serves, and vice
//! versa. All these locks are read locks. A process takes its own locks first, and then looks for
//! conflicting locks of other processes.
#![allow(unsafe_code)]

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::Path;
use std::time::{Duration, Instant};

use hob_engine::command::Access;
use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;

use crate::backing::below::BelowLocks;

/// Longest wait for a lock. After a process was killed, its files stay locked until the kernel has
/// removed its io_uring. A restarted daemon must not fail because of such a lock.
const PATIENCE: Duration = Duration::from_secs(3);

/// Longest wait for a lock that no process of this host holds any more: the I/O of a killed process
/// may take seconds on a slow disk. This time is shorter than the time that a client waits for a
/// command.
const KILLED_PATIENCE: Duration = Duration::from_secs(8);

/// Pause between two attempts to take a lock.
const PAUSE: Duration = Duration::from_millis(10);

/// First lock byte of the permissions in use, QEMU's `RAW_LOCK_PERM_BASE`.
const USED: i64 = 100;

/// First lock byte of the permissions that are not shared, QEMU's `RAW_LOCK_SHARED_BASE`.
const UNSHARED: i64 = 200;

/// Bit number of QEMU's permission `BLK_PERM_CONSISTENT_READ`.
const READ: i64 = 0;
/// Bit number of QEMU's permission `BLK_PERM_WRITE`.
const WRITE: i64 = 1;
/// Bit number of QEMU's permission `BLK_PERM_RESIZE`.
const RESIZE: i64 = 3;

/// Reason why hob could not lock a file.
#[derive(Debug, thiserror::Error)]
pub(crate) enum LockError {
    /// Another hob process has the file open.
    #[error("another process holds the file's lock")]
    InUse,
    /// QEMU has the file open. The text names the conflicting permission.
    #[error("QEMU or one of its tools has the file open and does not share it (image lock \"{0}\")")]
    Qemu(&'static str),
    /// An error of the operating system.
    #[error("{0}")]
    System(#[from] Errno),
}

impl From<LockError> for io::Error {
    fn from(error: LockError) -> io::Error {
        match error {
            LockError::InUse => Errno::WOULDBLOCK.into(),
            LockError::System(errno) => errno.into(),
            error @ LockError::Qemu(_) => io::Error::new(io::ErrorKind::WouldBlock, error),
        }
    }
}

/// Takes an exclusive lock against other hob processes. Waits briefly for a process that is just
/// ending, and for a child process of a killed hob, which has hob's files open until it executes
/// its own program.
///
/// # Errors
/// Returns `WOULDBLOCK` if another process keeps the lock.
pub fn lock_exclusive(file: impl AsFd) -> Result<(), Errno> {
    let begun = Instant::now();
    loop {
        match flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Err(Errno::WOULDBLOCK) if may_end(file.as_fd(), begun) => std::thread::sleep(PAUSE),
            result => return result,
        }
    }
}

/// Returns true if a wait for a `flock` that began at `begun` should continue: for [`PATIENCE`], or
/// for [`KILLED_PATIENCE`] if no process of this host holds the lock any more.
fn may_end(file: BorrowedFd<'_>, begun: Instant) -> bool {
    let waited = begun.elapsed();
    waited < PATIENCE || waited < KILLED_PATIENCE && !is_held_by_a_process(file)
}

/// Returns true if a process of this host holds a `flock` of the file, or if the kernel does not
/// say.
fn is_held_by_a_process(file: BorrowedFd<'_>) -> bool {
    let Ok(status) = rustix::fs::fstat(file) else { return true };
    let Ok(locks) = std::fs::read_to_string("/proc/locks") else { return true };
    let mut holders = locks.lines().filter_map(|line| holder(line, status.st_ino));
    holders.any(|pid| Path::new("/proc").join(pid).exists())
}

/// Returns the process id in a line of `/proc/locks` if the line is the `flock` of a file with this
/// inode number. Processes that only wait for a lock have other lines.
fn holder(line: &str, inode: u64) -> Option<&str> {
    let mut words = line.split_whitespace();
    let (_, kind) = (words.next()?, words.next()?);
    let (pid, file) = (words.nth(2)?, words.next()?);
    let is_of_file = file.rsplit(':').next()?.parse() == Ok(inode);
    (kind == "FLOCK" && is_of_file).then_some(pid)
}

/// Whether a process uses a whole file or a part of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Share {
    /// The process uses the whole file.
    Whole,
    /// The process uses a part of the file, for example through a partition. Processes with other
    /// parts do not conflict.
    Part,
}

/// Locks a disk's file against other hobs and QEMU. Waits briefly for a process that is just
/// ending. Several processes may read the file. A writer excludes all others.
pub(crate) fn lock_image(file: impl AsFd, access: Access) -> Result<(), LockError> {
    lock_share(file, access, Share::Whole)
}

/// Locks a file as [`lock_image`] does, or with [`Share::Part`] only against processes that use the
/// whole file.
pub(crate) fn lock_share(file: impl AsFd, access: Access, share: Share) -> Result<(), LockError> {
    let begun = Instant::now();
    loop {
        match try_lock_image(file.as_fd(), access, share) {
            Err(LockError::InUse) if may_end(file.as_fd(), begun) => std::thread::sleep(PAUSE),
            Err(LockError::Qemu(_)) if begun.elapsed() < PATIENCE => std::thread::sleep(PAUSE),
            result => return result,
        }
    }
}

/// Releases the locks that [`lock_image`] took.
pub(crate) fn unlock_image(file: impl AsFd) -> Result<(), Errno> {
    let qemu = unlock_bytes(file.as_fd());
    flock(&file, FlockOperation::Unlock).and(qemu)
}

fn try_lock_image(file: BorrowedFd<'_>, access: Access, share: Share) -> Result<(), LockError> {
    let (operation, used, unshared): (_, &[i64], &[i64]) = match (access, share) {
        (Access::ReadWrite, Share::Whole) => {
            (FlockOperation::NonBlockingLockExclusive, &[READ, WRITE, RESIZE], &[WRITE, RESIZE])
        }
        (Access::ReadOnly, Share::Whole) => {
            (FlockOperation::NonBlockingLockShared, &[READ], &[WRITE, RESIZE])
        }
        (Access::ReadWrite, Share::Part) => {
            (FlockOperation::NonBlockingLockShared, &[READ, WRITE], &[RESIZE])
        }
        (Access::ReadOnly, Share::Part) => (FlockOperation::NonBlockingLockShared, &[READ], &[RESIZE]),
    };
    match flock(file, operation) {
        Err(Errno::WOULDBLOCK) => return Err(LockError::InUse),
        result => result?,
    }
    let locked = lock_for_qemu(file, used, unshared);
    if locked.is_err() {
        let _ = unlock_image(file);
    }
    locked
}

fn lock_for_qemu(file: BorrowedFd<'_>, used: &[i64], unshared: &[i64]) -> Result<(), LockError> {
    let bytes = used.iter().map(|bit| USED + bit).chain(unshared.iter().map(|bit| UNSHARED + bit));
    for byte in bytes {
        match set_byte(file, byte, 1, libc::F_RDLCK) {
            Err(Errno::INVAL | Errno::NOSYS | Errno::NOTSUP | Errno::NOLCK) => {
                tracing::warn!(
                    "the filesystem has no byte-range locks, so QEMU cannot detect that hob serves one of its files"
                );
                return Ok(());
            }
            result => result?,
        }
    }
    let name = |bit| {
        if bit == RESIZE {
            "resize"
        } else if bit == WRITE {
            "write"
        } else {
            "consistent read"
        }
    };
    let others = used.iter().map(|bit| (UNSHARED + bit, *bit));
    let others = others.chain(unshared.iter().map(|bit| (USED + bit, *bit)));
    for (byte, bit) in others {
        if is_locked_by_others(file, byte)? {
            return Err(LockError::Qemu(name(bit)));
        }
    }
    Ok(())
}

/// Locks of a file or block device, and of the files below it. Programs that write to a disk
/// without opening a backing take these locks. Dropping this value releases the locks.
#[derive(Debug)]
pub struct PathLock {
    _file: File,
    _below: Option<BelowLocks>,
}

impl PathLock {
    /// Locks a file or a block device against hob, QEMU, and mounting.
    ///
    /// # Errors
    /// Returns an error that names the file if another program has the file open, or if the system
    /// reports an error.
    pub fn take(path: &Path, access: Access) -> io::Result<PathLock> {
        let named = |path: &Path, error: io::Error| {
            io::Error::new(error.kind(), format!("{}: {error}", path.display()))
        };
        let kind = std::fs::metadata(path).map_err(|error| named(path, error))?.file_type();
        // For a block device, exclusive means that it is not mounted.
        let exclusive = if kind.is_block_device() { libc::O_EXCL } else { 0 };
        let open = OpenOptions::new().read(true).custom_flags(exclusive | libc::O_NONBLOCK).open(path);
        let file = open.map_err(|error| named(path, error))?;
        lock_image(&file, access).map_err(|error| named(path, explain(error)))?;
        let below = match kind.is_block_device() {
            true => Some(BelowLocks::of(file.metadata()?.rdev())),
            false => None,
        };
        if let Some(below) = &below {
            below.take(access).map_err(|(path, error)| named(&path, explain(error)))?;
        }
        Ok(PathLock { _file: file, _below: below })
    }
}

/// Converts a lock error without losing its text.
fn explain(error: LockError) -> io::Error {
    match error {
        LockError::System(errno) => errno.into(),
        error => io::Error::new(io::ErrorKind::WouldBlock, error),
    }
}

fn unlock_bytes(file: BorrowedFd<'_>) -> Result<(), Errno> {
    set_byte(file, USED, 2 * (UNSHARED - USED), libc::F_UNLCK)
}

fn set_byte(file: BorrowedFd<'_>, first: i64, len: i64, kind: i32) -> Result<(), Errno> {
    let mut lock = byte_lock(first, len, kind);
    // SAFETY: `fcntl` reads one `flock`, which lives on this stack. rustix has no locks of this
    // kind.
    let result = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_OFD_SETLK, &raw mut lock) };
    if result == 0 { Ok(()) } else { Err(last_errno()) }
}

fn is_locked_by_others(file: BorrowedFd<'_>, byte: i64) -> Result<bool, Errno> {
    let mut lock = byte_lock(byte, 1, libc::F_WRLCK);
    // SAFETY: `fcntl` reads and writes one `flock`, which lives on this stack. rustix has no locks
    // of this kind.
    let result = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_OFD_GETLK, &raw mut lock) };
    if result == 0 { Ok(i32::from(lock.l_type) != libc::F_UNLCK) } else { Err(last_errno()) }
}

fn byte_lock(first: i64, len: i64, kind: i32) -> libc::flock {
    libc::flock {
        l_type: kind as libc::c_short,
        l_whence: libc::SEEK_SET as libc::c_short,
        l_start: first,
        l_len: len,
        l_pid: 0,
    }
}

fn last_errno() -> Errno {
    Errno::from_io_error(&io::Error::last_os_error()).unwrap_or(Errno::IO)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn open(path: &std::path::Path) -> File {
        File::options().read(true).write(true).create(true).truncate(false).open(path).unwrap()
    }

    #[test]
    fn one_writes_or_several_read() {
        let dir = tempfile::tempdir().unwrap();
        let [one, other] = [(); 2].map(|()| open(&dir.path().join("disk")));
        let try_it = |file: &File, access| try_lock_image(file.as_fd(), access, Share::Whole);
        try_it(&one, Access::ReadWrite).unwrap();
        assert!(matches!(try_it(&other, Access::ReadWrite), Err(LockError::InUse)));
        assert!(matches!(try_it(&other, Access::ReadOnly), Err(LockError::InUse)));
        unlock_image(&one).unwrap();
        try_it(&one, Access::ReadOnly).unwrap();
        try_it(&other, Access::ReadOnly).unwrap();
        unlock_image(&one).unwrap();
        assert!(matches!(try_it(&one, Access::ReadWrite), Err(LockError::InUse)));
        unlock_image(&other).unwrap();
        try_it(&one, Access::ReadWrite).unwrap();
    }

    #[test]
    fn the_locks_of_qemu_are_seen_and_nothing_is_kept_after_a_refusal() {
        let dir = tempfile::tempdir().unwrap();
        let [hob, qemu] = [(); 2].map(|()| open(&dir.path().join("disk")));
        let lock = |byte| set_byte(qemu.as_fd(), byte, 1, libc::F_RDLCK).unwrap();
        let try_it = |access| try_lock_image(hob.as_fd(), access, Share::Whole);
        // A guest that writes: QEMU locks its disk like this.
        [USED + READ, USED + WRITE, UNSHARED + WRITE].into_iter().for_each(lock);
        for access in [Access::ReadWrite, Access::ReadOnly] {
            let error = try_it(access).unwrap_err();
            assert!(matches!(error, LockError::Qemu("write")), "{error}");
        }
        assert!(!is_locked_by_others(qemu.as_fd(), USED + READ).unwrap());
        unlock_bytes(qemu.as_fd()).unwrap();
        // An overlay that reads the image.
        [USED + READ, UNSHARED + WRITE, UNSHARED + RESIZE].into_iter().for_each(lock);
        assert!(matches!(try_it(Access::ReadWrite), Err(LockError::Qemu("write"))));
        try_it(Access::ReadOnly).unwrap();
        unlock_image(&hob).unwrap();
        unlock_bytes(qemu.as_fd()).unwrap();
        try_it(Access::ReadWrite).unwrap();
    }

    #[test]
    fn the_holder_of_a_lock_is_found() {
        let line = "7: FLOCK  ADVISORY  WRITE 1234 fe:00:5678 0 EOF";
        assert_eq!((holder(line, 5678), holder(line, 567)), (Some("1234"), None));
        for other in [
            "8: -> FLOCK  ADVISORY  WRITE 1234 fe:00:5678 0 EOF",
            "9: OFDLCK ADVISORY  READ  -1 fe:00:5678 100 101",
            "nonsense",
        ] {
            assert_eq!(holder(other, 5678), None, "{other}");
        }
        let dir = tempfile::tempdir().unwrap();
        let [one, other] = [(); 2].map(|()| open(&dir.path().join("disk")));
        lock_exclusive(&one).unwrap();
        assert!(is_held_by_a_process(other.as_fd()));
        drop(one);
        assert!(!is_held_by_a_process(other.as_fd()));
    }

    /// A process was killed during a slow flush: the file stays locked for a while after the
    /// process ended.
    #[test]
    fn a_lock_of_a_killed_process_is_waited_for() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("disk");
        let file = open(&path);
        // The child of flock(1) has the locked file open too.
        let mut locks = std::process::Command::new("flock").arg(&path).args(["sleep", "5"]).spawn().unwrap();
        while flock(&file, FlockOperation::NonBlockingLockExclusive).is_ok() {
            flock(&file, FlockOperation::Unlock).unwrap();
            std::thread::sleep(PAUSE);
        }
        locks.kill().unwrap();
        locks.wait().unwrap();
        assert!(!is_held_by_a_process(file.as_fd()));
        lock_image(&file, Access::ReadWrite).unwrap();
    }

    #[test]
    fn a_path_is_locked_until_the_lock_is_dropped() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("disk");
        let file = open(&path);
        let lock = PathLock::take(&path, Access::ReadWrite).unwrap();
        let try_it = || try_lock_image(file.as_fd(), Access::ReadWrite, Share::Whole);
        assert!(matches!(try_it(), Err(LockError::InUse)));
        drop(lock);
        try_it().unwrap();
        let refused = PathLock::take(&path, Access::ReadWrite).unwrap_err().to_string();
        assert!(refused.contains("disk") && refused.contains("another process"), "{refused}");
    }

    #[test]
    fn parts_exclude_the_whole_and_not_each_other() {
        let dir = tempfile::tempdir().unwrap();
        let [one, other] = [(); 2].map(|()| open(&dir.path().join("disk")));
        let try_it = |file: &File, share| try_lock_image(file.as_fd(), Access::ReadWrite, share);
        try_it(&one, Share::Part).unwrap();
        try_it(&other, Share::Part).unwrap();
        unlock_image(&other).unwrap();
        assert!(matches!(try_it(&other, Share::Whole), Err(LockError::InUse)));
        // QEMU sees the part too.
        let unshared = lock_for_qemu(other.as_fd(), &[READ], &[WRITE]);
        assert!(matches!(unshared, Err(LockError::Qemu("write"))), "{unshared:?}");
        unlock_image(&other).unwrap();
        unlock_image(&one).unwrap();
        try_it(&other, Share::Whole).unwrap();
        assert!(matches!(try_it(&one, Share::Part), Err(LockError::InUse)));
    }
}
