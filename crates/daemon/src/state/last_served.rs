//! The file `last-served` of the state directory: when hob last served each disk with a persistent
//! cache (docs/decisions/0033).
//!
//! This file is rewritten in place every two seconds and never synced, so it costs almost nothing.
//! It has one line of text for each cache: the owner id, the number of the journal ring, the time
//! of the record, and the mtime of the disk's file. Both times are nanoseconds since 1970. Lines
//! have a fixed length that divides a sector, so a power cut leaves no line with parts of two
//! records.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs::File;
use std::io::{self, Read as _};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use super::CacheOwner;

/// Name of the file in the state directory.
const FILE: &str = "last-served";

/// Length of a line in bytes.
const LINE_BYTES: usize = 128;

/// Maximum number of bytes that are read: four times the lines of all disks.
const FILE_BYTES_MAX: u64 = 1 << 20;

/// When hob served a disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Served {
    /// Number of the cache's journal ring at that time.
    pub(crate) ring: u32,
    /// Nanoseconds since 1970: the time of the host, or of the last change of the disk's file if
    /// that is later because the clock was set back.
    pub(crate) at_ns: u64,
    /// Last change of the content of the disk's file (mtime), nanoseconds since 1970.
    pub(crate) modified_ns: u64,
}

/// The content of the file `last-served`.
#[derive(Debug)]
pub(crate) struct LastServed {
    path: PathBuf,
    caches: BTreeMap<CacheOwner, Served>,
}

impl LastServed {
    /// Reads the file of a state directory. Malformed lines are ignored, and an unreadable file is
    /// empty.
    pub(crate) fn read(directory: &Path) -> LastServed {
        let path = directory.join(FILE);
        let mut bytes = Vec::new();
        let read = File::open(&path).and_then(|file| file.take(FILE_BYTES_MAX).read_to_end(&mut bytes));
        if let Err(error) = read
            && error.kind() != io::ErrorKind::NotFound
        {
            tracing::warn!(
                "cannot read {}: {error}; hob may not notice backings that were changed after it was killed",
                path.display()
            );
        }
        let mut caches = BTreeMap::new();
        for (owner, served) in String::from_utf8_lossy(&bytes).lines().filter_map(parsed) {
            // A write that a power cut interrupted may have left a cache with two lines.
            let known: &mut Served = caches.entry(owner).or_insert(served);
            if known.at_ns < served.at_ns {
                *known = served;
            }
        }
        LastServed { path, caches }
    }

    /// Returns when hob last served the disk with this cache.
    pub(crate) fn of(&self, owner: CacheOwner) -> Option<Served> {
        self.caches.get(&owner).copied()
    }

    /// Records that hob serves the disk with this cache.
    pub(crate) fn note(&mut self, owner: CacheOwner, served: Served) {
        self.caches.insert(owner, served);
    }

    /// Forgets the caches for which `is_known` returns false.
    pub(crate) fn retain(&mut self, is_known: impl Fn(CacheOwner) -> bool) {
        self.caches.retain(|owner, _| is_known(*owner));
    }

    pub(crate) fn write(&self) -> io::Result<()> {
        let mut text = String::with_capacity(self.caches.len() * LINE_BYTES);
        for (owner, Served { ring, at_ns, modified_ns }) in &self.caches {
            let _ = writeln!(text, "{owner} {ring:>10} {at_ns:>20} {modified_ns:>62}");
        }
        let mut options = File::options();
        let file = options.write(true).create(true).truncate(false).mode(0o600).open(&self.path)?;
        file.write_all_at(text.as_bytes(), 0)?;
        // The file is not truncated before the write: a power cut could then leave an empty file.
        if file.metadata()?.len() != text.len() as u64 {
            file.set_len(text.len() as u64)?;
        }
        Ok(())
    }
}

fn parsed(line: &str) -> Option<(CacheOwner, Served)> {
    let mut words = line.split_ascii_whitespace();
    let owner = words.next()?.parse().ok()?;
    let ring = words.next()?.parse().ok()?;
    let [at_ns, modified_ns] = [words.next()?, words.next()?].map(|word| word.parse().ok());
    let served = Served { ring, at_ns: at_ns?, modified_ns: modified_ns? };
    words.next().is_none().then_some((owner, served))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_is_read_back_in_lines_of_one_length() {
        let directory = tempfile::tempdir().unwrap();
        let mut served = LastServed::read(directory.path());
        let (one, other) = (CacheOwner(1 << 127), CacheOwner(u128::MAX));
        assert_eq!(served.of(one), None);
        let at = |ring, at_ns| Served { ring, at_ns, modified_ns: at_ns / 2 };
        served.note(one, at(0, 1));
        served.note(other, at(u32::MAX, i64::MAX as u64));
        served.write().unwrap();
        let path = directory.path().join(FILE);
        let text = std::fs::read_to_string(&path).unwrap();
        assert!(text.lines().count() == 2 && text.lines().all(|line| line.len() + 1 == LINE_BYTES), "{text}");
        let mut served = LastServed::read(directory.path());
        assert_eq!(served.of(one), Some(at(0, 1)));
        assert_eq!(served.of(other), Some(at(u32::MAX, i64::MAX as u64)));
        // The cache was removed.
        served.retain(|owner| owner == other);
        served.write().unwrap();
        assert_eq!(std::fs::metadata(&path).unwrap().len(), LINE_BYTES as u64);
        let served = LastServed::read(directory.path());
        assert_eq!((served.of(one), served.of(other).map(|served| served.ring)), (None, Some(u32::MAX)));
    }

    #[test]
    fn damaged_lines_are_ignored_and_the_latest_of_two_counts() {
        let directory = tempfile::tempdir().unwrap();
        let owner = "f".repeat(32);
        let lines = ["", "\0\0\0", &owner, &format!("{owner} 3 4"), &format!("{owner} 3 4 x"), "1 2 3 4"];
        let good = [format!("{owner} 7 50 1"), format!("{owner} 8 70 2"), format!("{owner} 7 60 3")];
        let text = format!("{}\n{}\n{}", lines.join("\n"), good.join("\n"), &owner[..9]);
        std::fs::write(directory.path().join(FILE), text).unwrap();
        let served = LastServed::read(directory.path());
        assert_eq!(served.of(CacheOwner(u128::MAX)), Some(Served { ring: 8, at_ns: 70, modified_ns: 2 }));
        assert_eq!(served.caches.len(), 1);
    }
}
