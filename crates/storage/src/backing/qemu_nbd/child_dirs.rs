//! The directories of child processes, and the removal of directories that a killed hob left.
//!
//! Each directory is locked while the hob process that created it runs. A directory without a lock
//! is a leftover of a killed hob, if it is older than [`AGE_MIN`] or names a mark. A `qemu-nbd`
//! that uses the directory may still run, lock an image and have unflushed changes.
//!
//! The directory of a writable image names the image's [mark](crate::unflushed_mark). `qemu-nbd`
//! removes its socket when it ends by itself, after it has flushed and closed the image. A killed
//! `qemu-nbd` leaves its socket. So if a leftover has no socket, the changes of its image are
//! stored, and the mark is reduced. In all other cases the mark stays, and the next opening of the
//! image reports the loss to guests.

use std::fs::{self, DirBuilder, File};
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, symlink};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::fs::FlockOperation;
use rustix::process::{Pid, Signal};

use crate::unflushed_mark;

/// Start of the directories' names. The rest is 16 hexadecimal digits. The directories of earlier
/// versions of hob have no `image-` in their names and are never locked. hob does not remove them,
/// because without a lock it cannot know whether they are in use.
const PREFIX: &str = "hob-image-";

/// Minimum age of a leftover that names no mark. A younger directory may be in use, but not locked
/// yet.
const AGE_MIN: Duration = Duration::from_secs(1);

/// Longest time that the `qemu-nbd` processes in leftovers have to end by themselves. Until then
/// their images are locked.
const END_MAX: Duration = Duration::from_secs(10);

/// Pause between two checks whether processes have ended, or another hob has removed a leftover.
const CHECK_PAUSE: Duration = Duration::from_millis(20);

/// Name of the socket in a directory.
const SOCKET: &str = "socket";

/// Name of the symbolic link to the mark of the image.
const MARK: &str = "mark";

/// Name of a symbolic link in a leftover that a hob process removes.
const REMOVER: &str = "remover";

/// A locked directory that only this user can enter. Dropping it removes it.
#[derive(Debug)]
pub(super) struct PrivateDirectory {
    path: PathBuf,
    _lock: File,
}

impl PrivateDirectory {
    /// Creates a directory for sockets.
    pub(super) fn create() -> io::Result<PrivateDirectory> {
        let mut random = [0; 8];
        rustix::rand::getrandom(&mut random, rustix::rand::GetRandomFlags::empty())?;
        let path = base().join(format!("{PREFIX}{:016x}", u64::from_ne_bytes(random)));
        DirBuilder::new().mode(0o700).create(&path)?;
        let lock = File::open(&path)?;
        rustix::fs::flock(&lock, FlockOperation::NonBlockingLockExclusive)?;
        Ok(PrivateDirectory { path, _lock: lock })
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the path of the socket.
    pub(super) fn socket(&self) -> PathBuf {
        self.path.join(SOCKET)
    }

    /// Records the path of the mark of the image that a child has opened for writing.
    pub(super) fn name_mark(&self, mark: &Path) -> io::Result<()> {
        // A symbolic link needs no space for data, and never has an incomplete path.
        match symlink(std::path::absolute(mark)?, self.path.join(MARK)) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => Err(error),
            _ => Ok(()),
        }
    }
}

impl Drop for PrivateDirectory {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.path);
    }
}

fn base() -> PathBuf {
    let runtime = std::env::var_os("XDG_RUNTIME_DIR").map(PathBuf::from).filter(|path| path.is_dir());
    runtime.unwrap_or_else(std::env::temp_dir)
}

/// Removes the directories that a killed hob of this user left, and ends the `qemu-nbd` processes
/// that use them. A process that does not end within [`END_MAX`] is killed. Reduces the marks of
/// the images whose changes are stored. Call this function before an image is opened. Errors are
/// ignored: the images of these processes stay locked, and their marks stay.
pub fn remove_leftovers() {
    let Ok(entries) = fs::read_dir(base()) else { return };
    let mut found: Vec<_> =
        entries.flatten().map(|entry| entry.path()).filter(|path| is_ours(path)).collect();
    let deadline = Instant::now() + END_MAX;
    loop {
        let (mut leftovers, mut others) = (Vec::new(), Vec::new());
        for path in found {
            let Ok(lock) = File::open(&path) else { continue };
            if rustix::fs::flock(&lock, FlockOperation::NonBlockingLockExclusive).is_ok() {
                let _ = symlink(REMOVER, path.join(REMOVER));
                leftovers.push((path, lock));
            } else if is_there(&path.join(REMOVER)) {
                others.push(path);
            }
        }
        if !leftovers.is_empty() {
            end_servers(&leftovers, deadline);
        }
        for (path, _lock) in &leftovers {
            settle(path);
            let _ = fs::remove_dir_all(path);
        }
        if others.is_empty() || Instant::now() >= deadline {
            return;
        }
        // Another hob that starts at the same time removes these, unless it is killed. Their images
        // may be locked until then.
        found = others;
        std::thread::sleep(CHECK_PAUSE);
    }
}

/// Ends the `qemu-nbd` processes in the directories. Kills those that still run at the deadline.
fn end_servers(leftovers: &[(PathBuf, File)], deadline: Instant) {
    let directories: Vec<&Path> = leftovers.iter().map(|(path, _)| path.as_path()).collect();
    loop {
        let servers = servers_in(&directories);
        let is_late = Instant::now() >= deadline;
        for pid in &servers {
            if is_late {
                tracing::warn!(
                    "killing qemu-nbd process {}, which a killed hob process left",
                    pid.as_raw_nonzero()
                );
            }
            // The kernel has sent SIGTERM when hob was killed, but a starting qemu-nbd ignores it.
            let signal = if is_late { Signal::KILL } else { Signal::TERM };
            let _ = rustix::process::kill_process(*pid, signal);
        }
        if is_late || servers.is_empty() {
            return;
        }
        std::thread::sleep(CHECK_PAUSE);
    }
}

/// Reduces the mark of the image of a leftover, if the last `qemu-nbd` in the directory has ended
/// by itself. Call this function when no `qemu-nbd` can remove its socket any more.
fn settle(directory: &Path) {
    let link = directory.join(MARK);
    let Ok(mark) = fs::read_link(&link) else { return };
    if !is_there(&directory.join(SOCKET))
        && let Err(error) = unflushed_mark::note_stored(&mark)
    {
        tracing::warn!("{error}; guests get a report of lost writes, although no write is lost");
    }
    // If this process is killed while it removes the directory, a missing socket proves nothing.
    let _ = fs::remove_file(link);
}

/// Returns true if the path exists. A symbolic link exists even if its target does not.
fn is_there(path: &Path) -> bool {
    fs::symlink_metadata(path).is_ok()
}

/// Returns true for a directory that a hob process of this user created, and that was locked or was
/// last changed at least [`AGE_MIN`] ago.
fn is_ours(path: &Path) -> bool {
    let name = path.file_name().and_then(|name| name.to_str()).and_then(|name| name.strip_prefix(PREFIX));
    let is_named = name.is_some_and(|rest| rest.len() == 16 && rest.bytes().all(|b| b.is_ascii_hexdigit()));
    is_named
        && fs::symlink_metadata(path).is_ok_and(|metadata| {
            let age = metadata.modified().ok().and_then(|time| time.elapsed().ok()).unwrap_or_default();
            let was_locked = age >= AGE_MIN || is_there(&path.join(MARK));
            metadata.is_dir() && metadata.uid() == rustix::process::getuid().as_raw() && was_locked
        })
}

/// Returns the `qemu-nbd` processes with a path in one of the directories in their command line.
fn servers_in(directories: &[&Path]) -> Vec<Pid> {
    let Ok(processes) = fs::read_dir("/proc") else { return Vec::new() };
    let ids = processes.flatten().filter_map(|entry| entry.file_name().to_str()?.parse::<i32>().ok());
    let is_server = |id: &i32| {
        let line = fs::read(format!("/proc/{id}/cmdline")).unwrap_or_default();
        let has = |part: &[u8]| line.windows(part.len()).any(|window| window == part);
        line.starts_with(b"qemu-nbd\0") && directories.iter().any(|path| has(path.as_os_str().as_bytes()))
    };
    ids.filter(is_server).filter_map(Pid::from_raw).collect()
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn a_directory_is_locked_while_it_is_in_use() {
        let directory = PrivateDirectory::create().unwrap();
        let lock = File::open(directory.path()).unwrap();
        assert!(rustix::fs::flock(&lock, FlockOperation::NonBlockingLockExclusive).is_err());
        assert!(servers_in(&[directory.path()]).is_empty());
        let path = directory.path().to_owned();
        assert!(!is_ours(&path), "it is too young");
        drop(directory);
        assert!(!path.exists());
        for other in ["hob-image-0123", "hob-image-0123456789abcdeg", "hob-0123456789abcdef", "other"] {
            assert!(!is_ours(&base().join(other)), "{other}");
        }
    }

    /// A killed `qemu-nbd` leaves its socket. One that ends by itself removes the socket last.
    #[test]
    fn a_mark_is_reduced_if_the_socket_is_gone_and_the_directory_names_the_mark() {
        let dir = tempfile::tempdir().unwrap();
        let mark = dir.path().join("mark-of-an-image");
        let settled = |has_link: bool, has_socket: bool| {
            fs::write(&mark, [2, 1]).unwrap();
            fs::set_permissions(&mark, fs::Permissions::from_mode(0o600)).unwrap();
            let directory = PrivateDirectory::create().unwrap();
            assert!(!is_ours(directory.path()), "it may not be locked yet");
            if has_link {
                directory.name_mark(&mark).unwrap();
                directory.name_mark(&mark).unwrap();
                assert!(is_ours(directory.path()));
            }
            if has_socket {
                fs::write(directory.socket(), b"").unwrap();
            }
            settle(directory.path());
            // The removal of the directory is interrupted after the socket.
            let _ = fs::remove_file(directory.socket());
            settle(directory.path());
            fs::read(&mark).unwrap()
        };
        assert_eq!(settled(true, false), [1, 1], "nothing is lost");
        assert_eq!(settled(true, true), [2, 1], "the child was killed");
        assert_eq!(settled(false, false), [2, 1], "another image");
    }
}
