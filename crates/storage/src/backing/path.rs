//! Checks a path before hob uses it: it must lead to a file or a block device, and its filesystem
//! must answer.
//!
//! A path on a filesystem that hangs (NFS or FUSE without a server) is refused after a second. The
//! opening of a disk checks its path several times, and waits only at the first check.

use std::fs::{FileType, OpenOptions};
use std::io;
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt};
use std::path::Path;
use std::time::Duration;

use super::OpenError;
use crate::time_limit::within;

/// Longest wait for a filesystem to answer.
const ANSWER_MAX: Duration = Duration::from_secs(1);

/// Returns whether a path leads to a regular file or a block device.
///
/// # Errors
/// Returns an [`OpenError`] for a file of another type, such as a FIFO or a directory, and for a
/// path whose filesystem does not answer within a second.
pub(super) fn check(path: &Path) -> Result<FileType, OpenError> {
    let found = within(path, ANSWER_MAX, look);
    let file_type = found
        .ok_or_else(|| OpenError::Unresponsive { path: path.into(), seconds: ANSWER_MAX.as_secs() })?
        .map_err(|source| OpenError::System { path: path.into(), source })?;
    if file_type.is_file() || file_type.is_block_device() {
        return Ok(file_type);
    }
    let what = path.display().to_string();
    Err(OpenError::Unfit {
        what,
        reason: format!("the path leads to {}, not to a file or a block device", noun(file_type)),
    })
}

/// Returns the type of the file at a path. Also opens the file if it is a regular file or a block
/// device, to find out whether its filesystem answers. Opening a FIFO could block.
fn look(path: &Path) -> io::Result<FileType> {
    let file_type = std::fs::metadata(path)?.file_type();
    if file_type.is_file() || file_type.is_block_device() {
        OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK).open(path)?;
    }
    Ok(file_type)
}

fn noun(file_type: FileType) -> &'static str {
    match file_type {
        _ if file_type.is_dir() => "a directory",
        _ if file_type.is_fifo() => "a FIFO",
        _ if file_type.is_socket() => "a socket",
        _ if file_type.is_char_device() => "a character device",
        _ => "of another type",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fifos_directories_and_sockets_are_refused_at_once() {
        let dir = tempfile::tempdir().unwrap();
        let fifo = dir.path().join("fifo");
        rustix::fs::mknodat(rustix::fs::CWD, &fifo, rustix::fs::FileType::Fifo, 0o600.into(), 0).unwrap();
        let socket = dir.path().join("socket");
        let _listener = std::os::unix::net::UnixListener::bind(&socket).unwrap();
        for (path, noun) in [
            (fifo.as_path(), "a FIFO"),
            (dir.path(), "a directory"),
            (&socket, "a socket"),
            (Path::new("/dev/null"), "a character device"),
        ] {
            let error = check(path).unwrap_err().to_string();
            assert!(error.contains(noun), "{error}");
        }
        assert!(matches!(check(&dir.path().join("none")), Err(OpenError::System { .. })));
        let file = dir.path().join("file");
        std::fs::write(&file, b"x").unwrap();
        assert!(check(&file).unwrap().is_file());
    }
}
