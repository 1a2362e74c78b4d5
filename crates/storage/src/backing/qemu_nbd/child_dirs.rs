//! The directories of child processes, and the removal of directories that a killed hob left.
//!
//! Each directory is locked while the hob process that created it runs. A directory older than
//! [`AGE_MIN`] without a lock is a leftover of a killed hob. A `qemu-nbd` that uses the directory
//! may still run and lock an image.

use std::fs::{self, DirBuilder, File};
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::fs::FlockOperation;
use rustix::process::{Pid, Signal};

/// Start of the directories' names. The rest is 16 hexadecimal digits. The directories of earlier
/// versions of hob have no `image-` in their names and are never locked. hob does not remove them,
/// because without a lock it cannot know whether they are in use.
const PREFIX: &str = "hob-image-";

/// Minimum age of a leftover. A younger directory may be in use, but not locked yet.
const AGE_MIN: Duration = Duration::from_secs(1);

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

/// Removes the directories that a killed hob of this user left, and kills the `qemu-nbd` processes
/// that use them. Errors are ignored: the images of these processes stay locked.
pub fn remove_leftovers() {
    let Ok(entries) = fs::read_dir(base()) else { return };
    for path in entries.flatten().map(|entry| entry.path()).filter(|path| is_ours(path)) {
        let Ok(lock) = File::open(&path) else { continue };
        if rustix::fs::flock(&lock, FlockOperation::NonBlockingLockExclusive).is_err() {
            continue;
        }
        for pid in servers_in(&path) {
            tracing::warn!(
                "killing qemu-nbd process {}, which a killed hob process left",
                pid.as_raw_nonzero()
            );
            let _ = rustix::process::kill_process(pid, Signal::KILL);
        }
        let _ = fs::remove_dir_all(&path);
    }
}

/// Returns true for a directory that a hob process of this user created at least [`AGE_MIN`] ago.
fn is_ours(path: &Path) -> bool {
    let name = path.file_name().and_then(|name| name.to_str()).and_then(|name| name.strip_prefix(PREFIX));
    let is_named = name.is_some_and(|rest| rest.len() == 16 && rest.bytes().all(|b| b.is_ascii_hexdigit()));
    is_named
        && fs::symlink_metadata(path).is_ok_and(|metadata| {
            let age = metadata.modified().ok().and_then(|time| time.elapsed().ok()).unwrap_or_default();
            metadata.is_dir() && metadata.uid() == rustix::process::getuid().as_raw() && age >= AGE_MIN
        })
}

/// Returns the `qemu-nbd` processes with a path in this directory in their command line.
fn servers_in(directory: &Path) -> Vec<Pid> {
    let part = directory.as_os_str().as_bytes();
    let Ok(processes) = fs::read_dir("/proc") else { return Vec::new() };
    let ids = processes.flatten().filter_map(|entry| entry.file_name().to_str()?.parse::<i32>().ok());
    let is_server = |id: &i32| {
        let line = fs::read(format!("/proc/{id}/cmdline")).unwrap_or_default();
        line.starts_with(b"qemu-nbd\0") && line.windows(part.len()).any(|window| window == part)
    };
    ids.filter(is_server).filter_map(Pid::from_raw).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_directory_is_locked_while_it_is_in_use() {
        let directory = PrivateDirectory::create().unwrap();
        let lock = File::open(directory.path()).unwrap();
        assert!(rustix::fs::flock(&lock, FlockOperation::NonBlockingLockExclusive).is_err());
        assert!(servers_in(directory.path()).is_empty());
        let path = directory.path().to_owned();
        assert!(!is_ours(&path), "it is too young");
        drop(directory);
        assert!(!path.exists());
        for other in ["hob-image-0123", "hob-image-0123456789abcdeg", "hob-0123456789abcdef", "other"] {
            assert!(!is_ours(&base().join(other)), "{other}");
        }
    }
}
