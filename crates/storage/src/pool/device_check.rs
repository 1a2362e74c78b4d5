//! Checks that a flash device answers, before the device is opened. Opening a device that hangs
//! would wait without limit.

use std::fs::{File, OpenOptions};
use std::io::{self, Seek, SeekFrom};
use std::os::fd::OwnedFd;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

use super::AlignedBuffer;
use super::format::{PAGE_BYTES, SUPERBLOCK_OFFSETS, Superblock};
use super::returned::FormerSuperblock;
use crate::direct::open_direct;
use crate::time_limit::within;

/// Number of bytes that the check reads, and their alignment: enough for every device's direct I/O.
const READ_BYTES: usize = 4096;

/// First byte of the page that is read through the former descriptors of a device.
/// [`check_returned`] reads the page too, so that an unreadable page does not look like unusable
/// descriptors.
const PAGE_OF_DESCRIPTORS: u64 = SUPERBLOCK_OFFSETS[1] + PAGE_BYTES as u64;

/// Reads the start of a device, without the page cache if possible, and flushes the device. Returns
/// an error if the device has not answered within `limit`. An error of the device counts as an
/// answer, because opening the device reports it.
///
/// A killed process leaves data that the device has not made durable. Without the flush, a power
/// failure could undo data after a recovery has read and used it.
///
/// # Errors
/// Returns a sentence for users if the device does not answer in time.
pub fn check_answers(path: &Path, limit: Duration) -> Result<(), String> {
    match within(path, limit, read_and_flush) {
        Some(_) => Ok(()),
        None => Err(format!(
            "{} has not answered a read and a flush within {} s",
            path.display(),
            limit.as_secs()
        )),
    }
}

/// Like [`check_answers`], for several devices at the same time. Returns the answers in the order
/// of the paths.
pub fn check_all_answer(paths: &[PathBuf], limit: Duration) -> Vec<Result<(), String>> {
    std::thread::scope(|scope| {
        let asked: Vec<_> =
            paths.iter().map(|path| scope.spawn(move || check_answers(path, limit))).collect();
        let ended = |_| Err("an internal thread ended unexpectedly".to_owned());
        asked.into_iter().map(|asked| asked.join().unwrap_or_else(ended)).collect()
    })
}

/// Checks that a device of a pool that failed has returned: the device at `path` has its former
/// superblock and size, and answers reads of a few pages at its start and its end, without the
/// page cache if possible.
///
/// # Errors
/// Returns a sentence for users if the device has not returned, or does not answer within `limit`.
pub fn check_returned(path: &Path, former: &FormerSuperblock, limit: Duration) -> Result<(), String> {
    let former = former.clone();
    match within(path, limit, move |path| compare_identity(path, &former)) {
        Some(Ok(compared)) => compared,
        Some(Err(error)) => Err(format!("{}: {error}", path.display())),
        None => Err(format!("{} has not answered a read within {} s", path.display(), limit.as_secs())),
    }
}

/// Returns true if a read through `file` fails, which was opened before the device at `path` failed.
/// If the device answers at its path, it was removed from the host and connected again: the kernel
/// does not connect it to former descriptors. Returns false if the read does not end within `limit`.
pub fn is_disconnected(path: &Path, file: OwnedFd, limit: Duration) -> bool {
    let read = move |_: &Path| {
        let mut page = AlignedBuffer::new(PAGE_BYTES);
        Ok(File::from(file).read_exact_at(page.bytes_mut(), PAGE_OF_DESCRIPTORS).is_err())
    };
    // An error of `within` is a lack of threads, which says nothing about the device.
    matches!(within(path, limit, read), Some(Ok(true)))
}

fn compare_identity(path: &Path, former: &FormerSuperblock) -> io::Result<Result<(), String>> {
    let refuse = |fault: &str| Ok(Err(format!("{} {fault}", path.display())));
    // A file is also opened for writing, to notice a read-only filesystem. A block device is not:
    // udev examines a device after each close for writing.
    let is_file = std::fs::metadata(path)?.is_file();
    let open = |flags| OpenOptions::new().read(true).write(is_file).custom_flags(flags).open(path);
    let file = match open_direct(open)? {
        Some(file) => file,
        None => open(0)?,
    };
    let size_bytes = (&file).seek(SeekFrom::End(0))?;
    let page_bytes = PAGE_BYTES as u64;
    if size_bytes < SUPERBLOCK_OFFSETS[1] + page_bytes {
        return refuse("has another size than before");
    }
    let mut page = AlignedBuffer::new(PAGE_BYTES);
    let mut newest: Option<Superblock> = None;
    for offset in SUPERBLOCK_OFFSETS {
        file.read_exact_at(page.bytes_mut(), offset)?;
        if let Ok(superblock) = Superblock::decode(page.bytes())
            && newest.as_ref().is_none_or(|other| other.generation < superblock.generation)
        {
            newest = Some(superblock);
        }
    }
    let Some(superblock) = newest else { return refuse("has no superblock of a hob pool any more") };
    if let Some(difference) = former.difference(&superblock, size_bytes) {
        return refuse(difference);
    }
    file.read_exact_at(page.bytes_mut(), PAGE_OF_DESCRIPTORS)?;
    file.read_exact_at(page.bytes_mut(), (size_bytes / page_bytes - 1) * page_bytes)?;
    Ok(Ok(()))
}

fn read_and_flush(path: &Path) -> io::Result<()> {
    let mut bytes = vec![0; 2 * READ_BYTES];
    let aligned = bytes.as_ptr().align_offset(READ_BYTES);
    let place = &mut bytes[aligned..aligned + READ_BYTES];
    let direct = OpenOptions::new().read(true).custom_flags(libc::O_DIRECT).open(path);
    let file = match direct {
        Ok(file) if file.read_at(place, 0).is_ok() => file,
        _ => {
            let file = File::open(path)?;
            file.read_at(place, 0)?;
            file
        }
    };
    file.sync_data().inspect_err(|error| {
        tracing::warn!(
            "{}: hob could not flush this device before it recovers the caches: {error}; after a power failure, hob \
             may treat clean data as dirty again",
            path.display()
        );
    })
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

    #[test]
    fn several_devices_that_hang_take_the_time_of_one() {
        let directory = tempfile::tempdir().unwrap();
        let pipes: Vec<PathBuf> = (0..4).map(|at| directory.path().join(format!("pipe{at}"))).collect();
        let mode = rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR;
        for pipe in &pipes {
            rustix::fs::mknodat(rustix::fs::CWD, pipe, rustix::fs::FileType::Fifo, mode, 0).unwrap();
        }
        let began = std::time::Instant::now();
        let limit = Duration::from_secs(5);
        let answers = check_all_answer(&pipes, limit);
        assert!(answers.iter().all(Result::is_err), "{answers:?}");
        assert!(began.elapsed() < 3 * limit, "{:?}", began.elapsed());
        pipes.iter().for_each(|pipe| drop(OpenOptions::new().write(true).open(pipe).unwrap()));
    }
}
