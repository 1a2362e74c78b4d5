//! Dirty bitmaps on stable storage: one small file each, in the format of docs/FORMAT.md.
//!
//! A file is written completely under a temporary name, synced, and renamed, so it is complete or
//! absent. Before a bitmap starts to record, its file is *removed* ([`remove`]). An existing file
//! therefore has all changes up to the time when its disk was last closed. Without a file, the
//! changes are unknown.
//!
//! Files that [`write()`] did not write are refused. Offsets and lengths are in bytes, integers are
//! little-endian.

use std::fs::File;
use std::io::{self, Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use hob_engine::granules::{GRANULES_MAX, Granules};

use crate::backing::ChangeMark;
use crate::failing;
use crate::fields::{array_at, is_sealed, put, seal, u32_at, u64_at};

const MAGIC: &[u8; 8] = b"hob-dbmp";
const VERSION: u32 = 1;
const CRC: usize = 0x0C;
const DISK_BYTES: usize = 0x10;
const GRANULE_BYTES: usize = 0x18;
const IDENTITY: usize = 0x20;
const HAS_MARK: usize = 0x40;
const MARK_BYTES: usize = 0x48;
const MARK_TIME: usize = 0x50;
const HEADER_BYTES: usize = 0x80;

/// Maximum size of a bitmap's file in bytes.
const FILE_BYTES_MAX: u64 = HEADER_BYTES as u64 + GRANULES_MAX / 8;

/// A stored bitmap.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Kept {
    /// The granules of the disk that changed.
    pub granules: Granules,
    /// Identity of the disk's backing.
    pub identity: [u8; 32],
    /// Time of the backing's last change; `None` if unknown.
    pub changed: Option<ChangeMark>,
}

/// Reason why a stored bitmap cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum BitmapError {
    /// A system call failed.
    #[error("{0}")]
    Io(#[from] io::Error),
    /// The file is damaged.
    #[error("the bitmap is damaged: {0}")]
    Damaged(&'static str),
    /// The file's version is unknown.
    #[error("the bitmap has version {0}, and this version of hob reads version {VERSION}")]
    Version(u32),
}

/// Replaces the stored bitmap atomically. The new bitmap is on stable storage when this function
/// returns.
pub fn write(path: &Path, kept: &Kept) -> io::Result<()> {
    // Names of bitmaps never begin with a dot.
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let temporary = path.with_file_name(format!(".{name}.new"));
    failing::before_change(path)?;
    let mut file = File::options().write(true).create(true).truncate(true).mode(0o600).open(&temporary)?;
    file.write_all(&encode(kept))?;
    file.sync_all()?;
    std::fs::rename(&temporary, path)?;
    sync_directory_of(path)
}

/// Reads the stored bitmap; `None` if it has no file.
pub fn read(path: &Path) -> Result<Option<Kept>, BitmapError> {
    let file = match File::open(path) {
        Err(none) if none.kind() == io::ErrorKind::NotFound => return Ok(None),
        opened => opened?,
    };
    let mut bytes = Vec::new();
    file.take(FILE_BYTES_MAX + 1).read_to_end(&mut bytes)?;
    decode(&bytes).map(Some)
}

/// Removes the bitmap's file durably. A missing file is not an error.
pub fn remove(path: &Path) -> io::Result<()> {
    failing::before_change(path)?;
    none_is_well(std::fs::remove_file(path))?;
    // Sync also if there was no file: an earlier attempt may have removed it, and failed to sync.
    none_is_well(sync_directory_of(path))
}

fn none_is_well(done: io::Result<()>) -> io::Result<()> {
    match done {
        Err(none) if none.kind() == io::ErrorKind::NotFound => Ok(()),
        done => done,
    }
}

fn sync_directory_of(path: &Path) -> io::Result<()> {
    failing::before_change(path)?;
    File::open(path.parent().unwrap_or(Path::new("/")))?.sync_all()
}

fn encode(kept: &Kept) -> Vec<u8> {
    let words = kept.granules.words();
    let mut bytes = vec![0; HEADER_BYTES + 8 * words.len()];
    let mut put = |at: usize, what: &[u8]| put(&mut bytes, at, what);
    put(0, MAGIC);
    put(8, &VERSION.to_le_bytes());
    put(DISK_BYTES, &kept.granules.disk_bytes().to_le_bytes());
    put(GRANULE_BYTES, &kept.granules.granule_bytes().to_le_bytes());
    put(IDENTITY, &kept.identity);
    if let Some(mark) = kept.changed {
        put(HAS_MARK, &1u32.to_le_bytes());
        put(MARK_BYTES, &mark.size_bytes.to_le_bytes());
        put(MARK_TIME, &mark.modified_ns.to_le_bytes());
    }
    for (at, word) in (HEADER_BYTES..).step_by(8).zip(words) {
        put(at, &word.to_le_bytes());
    }
    seal(&mut bytes, CRC);
    bytes
}

fn decode(bytes: &[u8]) -> Result<Kept, BitmapError> {
    let damaged = |what| Err(BitmapError::Damaged(what));
    if bytes.len() < HEADER_BYTES || bytes[..8] != *MAGIC {
        return damaged("the file is not a bitmap of hob");
    }
    let version = u32_at(bytes, 8);
    if version != VERSION {
        return Err(BitmapError::Version(version));
    }
    if !is_sealed(bytes, CRC) {
        return damaged("its checksum is wrong");
    }
    let (words, rest) = bytes[HEADER_BYTES..].as_chunks::<8>();
    let words = words.iter().map(|word| u64::from_le_bytes(*word)).collect();
    let granules = Granules::from_words(u64_at(bytes, DISK_BYTES), u64_at(bytes, GRANULE_BYTES), words);
    let (Some(granules), true) = (granules, rest.is_empty()) else {
        return damaged("its sizes are inconsistent");
    };
    let changed = (u32_at(bytes, HAS_MARK) & 1 == 1).then(|| ChangeMark {
        size_bytes: u64_at(bytes, MARK_BYTES),
        modified_ns: u64_at(bytes, MARK_TIME).cast_signed(),
    });
    Ok(Kept { granules, identity: array_at(bytes, IDENTITY), changed })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample() -> Kept {
        let mut granules = Granules::new(70 * 65536 - 512, 65536).unwrap();
        granules.insert(65536, 1);
        granules.insert(69 * 65536, 1);
        let identity = std::array::from_fn(|at| at as u8);
        Kept { granules, identity, changed: Some(ChangeMark { size_bytes: 4_586_496, modified_ns: -2 }) }
    }

    /// Version 1 must remain readable: hob has to read files of earlier versions.
    #[test]
    fn the_golden_file_is_read() {
        let text = concat!(
            "686f622d64626d7001000000b24c27ff00fe4500000000000000010000000000",
            "000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f",
            "010000000000000000fc450000000000feffffffffffffff0000000000000000",
            "0000000000000000000000000000000000000000000000000000000000000000",
            "02000000000000002000000000000000"
        );
        let bytes = encode(&sample());
        let hex: String = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
        assert_eq!(hex, text);
        assert_eq!(decode(&bytes).unwrap(), sample());
    }

    #[test]
    fn written_bitmaps_are_read_back() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("b");
        assert!(read(&path).unwrap().is_none());
        for kept in [sample(), Kept { changed: None, ..sample() }] {
            write(&path, &kept).unwrap();
            assert_eq!(read(&path).unwrap().unwrap(), kept);
        }
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1, "nothing else is left");
        remove(&path).unwrap();
        remove(&path).unwrap();
        assert!(read(&path).unwrap().is_none());
    }

    #[test]
    fn an_unsynced_removal_is_synced_by_the_next_attempt() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("b");
        write(&path, &sample()).unwrap();
        for _ in 0..2 {
            let failure = failing::fail(dir.path(), 2, failing::Failing::Once);
            remove(&path).unwrap_err();
            assert!(failure.has_struck() && read(&path).unwrap().is_none());
        }
        remove(&path).unwrap();
        remove(&dir.path().join("none/b")).unwrap();
    }

    #[test]
    fn whatever_is_damaged_is_noticed() {
        let bytes = encode(&sample());
        for at in 0..bytes.len() {
            let mut damaged = bytes.clone();
            damaged[at] ^= 1;
            assert!(decode(&damaged).is_err(), "byte {at}");
        }
        for len in 0..bytes.len() {
            assert!(decode(&bytes[..len]).is_err(), "{len} bytes");
        }
        assert!(decode(&[&bytes[..], &[0; 8]].concat()).is_err());
    }

    /// A correct checksum does not make the content valid.
    #[test]
    fn invalid_values_are_refused() {
        let altered = |at: usize, what: u64| {
            let mut bytes = encode(&sample());
            bytes[at..at + 8].copy_from_slice(&what.to_le_bytes());
            seal(&mut bytes, CRC);
            decode(&bytes)
        };
        for (at, what) in [
            (DISK_BYTES, u64::MAX),
            (DISK_BYTES, 0),
            (GRANULE_BYTES, 0),
            (GRANULE_BYTES, 3 << 12),
            (GRANULE_BYTES, u64::MAX),
            (GRANULE_BYTES, 4096),
            (HEADER_BYTES + 8, 1 << 6),
        ] {
            assert!(matches!(altered(at, what), Err(BitmapError::Damaged(_))), "{what} at {at}");
        }
        assert!(altered(HEADER_BYTES + 8, 1 << 5).is_ok());
    }
}
