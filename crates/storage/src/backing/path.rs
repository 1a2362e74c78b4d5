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
    let file_type = type_of(path)?;
    if file_type.is_file() || file_type.is_block_device() {
        return Ok(file_type);
    }
    let what = path.display().to_string();
    Err(OpenError::Unfit {
        what,
        reason: format!("the path leads to {}, not to a file or a block device", noun(file_type)),
    })
}

/// Checks that a path leads to a regular file, before a certificate, a key or a token is read from
/// it: reading a FIFO or a socket could wait forever.
///
/// # Errors
/// Returns an [`OpenError`] for a file of another type, for a file that cannot be opened, and for a
/// path whose filesystem does not answer within a second.
pub fn check_regular_file(path: &Path) -> Result<(), OpenError> {
    let file_type = type_of(path)?;
    if file_type.is_file() { Ok(()) } else { Err(not_regular(path, file_type)) }
}

/// Returns the error for a path that leads to a file of this type, and must lead to a regular file.
pub(super) fn not_regular(path: &Path, file_type: FileType) -> OpenError {
    OpenError::Unfit {
        what: path.display().to_string(),
        reason: format!("the path leads to {}, not to a regular file", noun(file_type)),
    }
}

fn type_of(path: &Path) -> Result<FileType, OpenError> {
    within(path, ANSWER_MAX, look)
        .ok_or_else(|| OpenError::Unresponsive { path: path.into(), seconds: ANSWER_MAX.as_secs() })?
        .map_err(|source| OpenError::System { path: path.into(), source })
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
        _ if file_type.is_block_device() => "a block device",
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
            let error = check_regular_file(path).unwrap_err().to_string();
            assert!(error.ends_with(&format!("leads to {noun}, not to a regular file")), "{error}");
        }
        assert!(matches!(check(&dir.path().join("none")), Err(OpenError::System { .. })));
        assert!(matches!(check_regular_file(&dir.path().join("none")), Err(OpenError::System { .. })));
        let file = dir.path().join("file");
        std::fs::write(&file, b"x").unwrap();
        assert!(check(&file).unwrap().is_file());
        check_regular_file(&file).unwrap();
    }
}
