//! Whether a flash device answers. Opening a hung device would wait for it without limit.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::time::Duration;

use crate::answer::answer;

/// Bytes that are read, and their alignment: enough for every device's direct I/O.
const READ_BYTES: usize = 4096;

/// Reads the start of a device, past the page cache where that is possible. Returns an error if the
/// device has not answered within `limit`. Every answer is good, also an error: opening the device
/// reports that.
///
/// # Errors
/// A sentence for users.
pub fn check_answers(path: &Path, limit: Duration) -> Result<(), String> {
    match answer(path, limit, read_start) {
        Some(_) => Ok(()),
        None => Err(format!("{} has not answered a read within {} s", path.display(), limit.as_secs())),
    }
}

fn read_start(path: &Path) -> io::Result<()> {
    let mut bytes = vec![0; 2 * READ_BYTES];
    let aligned = bytes.as_ptr().align_offset(READ_BYTES);
    let place = &mut bytes[aligned..aligned + READ_BYTES];
    let direct = OpenOptions::new().read(true).custom_flags(libc::O_DIRECT).open(path);
    if direct.and_then(|file| file.read_at(place, 0)).is_ok() {
        return Ok(());
    }
    File::open(path)?.read_at(place, 0).map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pipe_without_a_writer_does_not_answer_and_a_missing_file_does() {
        let directory = tempfile::tempdir().unwrap();
        let pipe = directory.path().join("pipe");
        rustix::fs::mknodat(
            rustix::fs::CWD,
            &pipe,
            rustix::fs::FileType::Fifo,
            rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR,
            0,
        )
        .unwrap();
        let error = check_answers(&pipe, Duration::from_millis(200)).unwrap_err();
        assert!(error.contains("has not answered"), "{error}");
        // Lets the thread end.
        drop(OpenOptions::new().write(true).open(&pipe).unwrap());
        let limit = Duration::from_secs(30);
        assert_eq!(check_answers(&directory.path().join("missing"), limit), Ok(()));
        std::fs::write(directory.path().join("device"), [0; 100]).unwrap();
        assert_eq!(check_answers(&directory.path().join("device"), limit), Ok(()));
    }
}
