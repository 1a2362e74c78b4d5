//! Data of other programs anywhere in a file that is to become a pool device. hob overwrites such a
//! file only with --force.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

use rustix::fs::{SeekFrom, seek};
use rustix::io::Errno;

use super::format::{PAGE_BYTES, PAGE_MAGIC};

/// Maximum number of bytes that are read. A file with more allocated data counts as used, even if
/// it begins with zeroes.
const READ_BYTES_MAX: u64 = 256 << 20;

/// Length of one read, bytes.
const RUN_BYTES: usize = 1 << 20;

/// Returns a description of the data in a file; `None` if the file has only holes, zeroes, and the
/// segment table of a pool whose creation was interrupted.
pub(super) fn data_in(file: &File, size_bytes: u64) -> io::Result<Option<String>> {
    let mut run = vec![0; RUN_BYTES];
    let (mut at, mut left) = (0, READ_BYTES_MAX);
    while let Some((start, end)) = next_extent(file, at, size_bytes)? {
        at = start / PAGE_BYTES as u64 * PAGE_BYTES as u64;
        while at < end {
            if left == 0 {
                let read = READ_BYTES_MAX >> 20;
                return Ok(Some(format!(
                    "more than {read} MiB of allocated data, of which the first {read} MiB are zeroes"
                )));
            }
            let bytes = run.len().min(usize::try_from(size_bytes - at).unwrap_or(usize::MAX));
            let bytes = bytes
                .min(usize::try_from((end - at).next_multiple_of(PAGE_BYTES as u64)).unwrap_or(usize::MAX));
            let got = file.read_at(&mut run[..bytes], at)?;
            if got == 0 {
                return Ok(None);
            }
            let mut pages = (at..).step_by(PAGE_BYTES).zip(run[..got].chunks(PAGE_BYTES));
            if let Some((offset, _)) = pages.find(|(_, page)| !is_empty(page)) {
                return Ok(Some(format!("unknown data at byte {offset}")));
            }
            at += got as u64;
            left = left.saturating_sub(got as u64);
        }
    }
    Ok(None)
}

fn is_empty(page: &[u8]) -> bool {
    page.starts_with(&PAGE_MAGIC) || is_zero(page)
}

/// Returns true if all bytes are zero: the first one is, and each other one equals the byte before.
/// This comparison is one call, which is fast in a build without optimization too.
pub(super) fn is_zero(bytes: &[u8]) -> bool {
    bytes.split_first().is_none_or(|(first, rest)| *first == 0 && *rest == bytes[..rest.len()])
}

/// Returns the next range of a file at or after `from` that is not a hole.
fn next_extent(file: &File, from: u64, size_bytes: u64) -> io::Result<Option<(u64, u64)>> {
    if from >= size_bytes {
        return Ok(None);
    }
    let start = match seek(file, SeekFrom::Data(from)) {
        Ok(start) => start,
        Err(Errno::NXIO) => return Ok(None),
        // The filesystem does not know its holes.
        Err(Errno::INVAL | Errno::OPNOTSUPP) => return Ok(Some((from, size_bytes))),
        Err(errno) => return Err(errno.into()),
    };
    let end = seek(file, SeekFrom::Hole(start)).unwrap_or(size_bytes);
    Ok(Some((start, end.clamp(start + 1, size_bytes.max(start + 1)))))
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    #[test]
    fn data_is_found_wherever_it_is() {
        let file = tempfile::tempfile().unwrap();
        file.set_len(64 * MIB).unwrap();
        assert_eq!(data_in(&file, 64 * MIB).unwrap(), None);
        file.write_all_at(&[0; 8192], 5 * MIB).unwrap();
        file.write_all_at(&PAGE_MAGIC, MIB).unwrap();
        assert_eq!(data_in(&file, 64 * MIB).unwrap(), None, "zeroes and a table");
        file.write_all_at(&[7], 40 * MIB + 5000).unwrap();
        assert_eq!(
            data_in(&file, 64 * MIB).unwrap(),
            Some(format!("unknown data at byte {}", 40 * MIB + 4096))
        );
        file.set_len(512 * MIB).unwrap();
        file.write_all_at(&[0; 4096], 40 * MIB + 4096).unwrap();
        let zeroes = vec![0; MIB as usize];
        (0..257).for_each(|at| file.write_all_at(&zeroes, (100 + at) * MIB).unwrap());
        assert!(data_in(&file, 512 * MIB).unwrap().is_some_and(|what| what.contains("more than 256 MiB")));
    }

    #[test]
    fn a_byte_that_is_not_zero_is_found_at_each_position() {
        for len in 0..20 {
            let mut bytes = vec![0; len];
            assert!(is_zero(&bytes), "{len} zeroes");
            for at in 0..len {
                bytes[at] = 1;
                assert!(!is_zero(&bytes), "byte {at} of {len}");
                bytes[at] = 0;
            }
            assert!(len == 0 || !is_zero(&vec![1; len]), "{len} ones");
        }
    }

    #[test]
    fn a_file_that_ends_in_a_page_is_read_to_its_end() {
        let file = tempfile::tempfile().unwrap();
        file.write_all_at(&[0; 5000], 0).unwrap();
        assert_eq!(data_in(&file, 5000).unwrap(), None);
        file.write_all_at(&[1], 4999).unwrap();
        assert_eq!(data_in(&file, 5000).unwrap(), Some("unknown data at byte 4096".to_owned()));
    }
}
