//! Opens files with O_DIRECT if their filesystem supports it.

use std::fs::File;
use std::io;

/// Opens a file with O_DIRECT. Returns `None` only if the filesystem does not support O_DIRECT.
/// Every other failure is an error, so that a temporary lack of descriptors does not lead to
/// buffered I/O.
pub(crate) fn open_direct(open: impl Fn(i32) -> io::Result<File>) -> io::Result<Option<File>> {
    match open(libc::O_DIRECT) {
        Ok(file) => Ok(Some(file)),
        Err(error) if is_unsupported(&error) => Ok(None),
        Err(error) => Err(error),
    }
}

/// Returns true if an error means that the filesystem has no O_DIRECT. The error is EINVAL
/// according to open(2); network filesystems also return EOPNOTSUPP.
fn is_unsupported(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::EINVAL | libc::EOPNOTSUPP))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_filesystem_without_o_direct_makes_io_buffered() {
        for errno in [libc::EINVAL, libc::EOPNOTSUPP] {
            let opened = open_direct(|_| Err(io::Error::from_raw_os_error(errno)));
            assert!(opened.is_ok_and(|file| file.is_none()), "{errno}");
        }
        let others = [
            libc::EMFILE,
            libc::ENFILE,
            libc::ENOMEM,
            libc::EACCES,
            libc::EPERM,
            libc::EBUSY,
            libc::EIO,
            libc::ENOENT,
            libc::ESTALE,
            libc::EINTR,
            libc::ETIMEDOUT,
        ];
        for errno in others {
            let opened = open_direct(|_| Err(io::Error::from_raw_os_error(errno)));
            assert_eq!(opened.unwrap_err().raw_os_error(), Some(errno));
        }
    }

    #[test]
    fn the_flag_is_passed_on() {
        let file = tempfile::tempfile().unwrap();
        let opened = open_direct(|flags| {
            assert_eq!(flags, libc::O_DIRECT);
            file.try_clone()
        });
        assert!(opened.unwrap().is_some());
    }
}
