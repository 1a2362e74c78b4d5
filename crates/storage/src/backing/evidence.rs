//! Evidence that a backing is unchanged: a number that stays equal as long as no program writes to
//! the backing (docs/decisions/0033).
//!
//! A file has evidence only on filesystems where each write, also through a mapping, immediately
//! updates timestamps from this host's clock. Network filesystems and FUSE do not qualify, because
//! they use other clocks or cached attributes. tmpfs and ZFS do not qualify, because of writes
//! through mappings.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, OnceLock, Weak};
use std::time::Duration;

use rustix::fs::Stat;
use rustix::time::{ClockId, clock_gettime};

use super::identity;

/// `f_type` of filesystems with reliable timestamps: ext2 to ext4, XFS, Btrfs, F2FS, bcachefs.
const FILESYSTEMS: [u64; 5] = [0xef53, 0x5846_5342, 0x9123_683e, 0xf2f5_2010, 0xca45_1a4e];

/// Minimum age of a timestamp that proves that a file is unchanged. The kernel's clock for
/// timestamps advances in ticks of 1 to 10 ms, so a younger timestamp could hide a later change.
const SETTLED_NS: i128 = 100_000_000;

/// Hash of a backing's state. Two equal tokens mean that no program changed the backing between
/// their computations. The hash guards against mistakes, not against forgery.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ChangeToken(pub u128);

impl ChangeToken {
    pub(super) fn of(sentence: &str) -> ChangeToken {
        let hash = identity::hash(sentence);
        ChangeToken(u128::from_le_bytes(*hash.first_chunk().expect("32 bytes")))
    }
}

/// Times of a file's last changes by the clock of this host, nanoseconds since 1970.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ChangeTimes {
    /// Time of the last change of the content (mtime). Programs can set this time.
    pub modified_ns: u64,
    /// Time of the last change of the content, or of attributes such as owner and name (ctime).
    pub changed_ns: u64,
}

impl ChangeTimes {
    fn of(file: impl AsFd) -> Option<ChangeTimes> {
        let (modified, changed) = times(&rustix::fs::fstat(file).ok()?);
        let since_1970 = |ns: i128| u64::try_from(ns.max(0)).unwrap_or(u64::MAX);
        Some(ChangeTimes { modified_ns: since_1970(modified), changed_ns: since_1970(changed) })
    }

    /// Returns the later one of the times.
    pub fn latest_ns(self) -> u64 {
        self.modified_ns.max(self.changed_ns)
    }
}

/// Detects changes of an open backing. Do not use it on the shard's thread, because the filesystem
/// may be slow.
#[derive(Clone, Debug)]
pub struct ChangeDetector(Kind);

#[derive(Clone, Debug)]
enum Kind {
    File(Weak<OwnedFd>),
    /// The file of this kind of detector stays open and locked, so that no other program can have
    /// changed it.
    KeptOpen(Arc<OwnedFd>),
    Said(ChangeToken),
}

impl ChangeDetector {
    /// Returns the change detector of a file whose filesystem [has reliable
    /// timestamps](has_timestamps).
    pub(super) fn of_file(file: &Arc<OwnedFd>) -> ChangeDetector {
        ChangeDetector(Kind::File(Arc::downgrade(file)))
    }

    /// Returns the change detector of a backing that counts its own changes.
    pub(super) fn said(evidence: ChangeToken) -> ChangeDetector {
        ChangeDetector(Kind::Said(evidence))
    }

    /// Keeps the backing open and locked until the detector is dropped. So no other writer can
    /// change it before the evidence is read.
    pub fn keep_open(self) -> ChangeDetector {
        match self.0 {
            Kind::File(file) => ChangeDetector(file.upgrade().map_or(Kind::File(file), Kind::KeptOpen)),
            other => ChangeDetector(other),
        }
    }

    /// Returns the hash of the backing's present state. Returns `None` if the state is unknown, or
    /// if the last change is too recent.
    pub fn evidence(&self) -> Option<ChangeToken> {
        match &self.0 {
            Kind::File(file) => settled(&file.upgrade()?),
            Kind::KeptOpen(file) => settled(file),
            Kind::Said(evidence) => Some(*evidence),
        }
    }

    /// Returns the times of the last changes of a file. `None` if the backing is no file, or is
    /// closed.
    pub fn times(&self) -> Option<ChangeTimes> {
        match &self.0 {
            Kind::File(file) => ChangeTimes::of(&file.upgrade()?),
            Kind::KeptOpen(file) => ChangeTimes::of(file),
            Kind::Said(_) => None,
        }
    }

    /// Returns the hash of the backing's present state; `None` if the state is unknown. Waits
    /// first, if the latest change is too recent. The backing must not change during the wait.
    pub fn evidence_at_end(&self) -> Option<ChangeToken> {
        self.evidence().or_else(|| {
            std::thread::sleep(Duration::from_nanos(SETTLED_NS as u64) * 5 / 4);
            self.evidence()
        })
    }
}

/// Returns the hash of the state of a file that was just opened, for comparison with the recorded
/// hash.
pub(super) fn at_opening(file: impl AsFd) -> Option<ChangeToken> {
    let status = rustix::fs::fstat(&file).ok()?;
    if has_timestamps(file) { of_status(&status) } else { None }
}

/// Returns the times of a file that was just opened, if its filesystem has reliable timestamps.
pub(super) fn times_at_opening(file: impl AsFd) -> Option<ChangeTimes> {
    let times = ChangeTimes::of(&file)?;
    has_timestamps(file).then_some(times)
}

/// Returns true if the file's filesystem has reliable timestamps. Waits while a network filesystem
/// does not answer, so call this function only while a disk is opened.
pub(super) fn has_timestamps(file: impl AsFd) -> bool {
    rustix::fs::fstatfs(file).is_ok_and(|system| FILESYSTEMS.contains(&(system.f_type as u64 & 0xffff_ffff)))
}

fn settled(file: impl AsFd) -> Option<ChangeToken> {
    let status = rustix::fs::fstat(file).ok()?;
    let now = clock_gettime(ClockId::Realtime);
    let now = ns(now.tv_sec, now.tv_nsec);
    let (modified, changed) = times(&status);
    if modified.max(changed) + SETTLED_NS <= now { of_status(&status) } else { None }
}

fn times(status: &Stat) -> (i128, i128) {
    // The types of the fields differ between architectures.
    #[allow(clippy::unnecessary_cast, clippy::cast_lossless, reason = "see above")]
    let times = (
        ns(status.st_mtime as i64, status.st_mtime_nsec as i64),
        ns(status.st_ctime as i64, status.st_ctime_nsec as i64),
    );
    times
}

fn ns(seconds: i64, nanoseconds: i64) -> i128 {
    i128::from(seconds) * 1_000_000_000 + i128::from(nanoseconds)
}

fn of_status(status: &Stat) -> Option<ChangeToken> {
    let (modified, changed) = times(status);
    let (inode, device, bytes) = (status.st_ino, status.st_dev, status.st_size);
    let boot = boot_id()?;
    Some(ChangeToken::of(&format!(
        "file {inode} on {device}, {bytes} bytes, mtime {modified}, ctime {changed}, boot {boot}"
    )))
}

/// Returns the id of the host's present boot; `None` if the kernel does not provide it. Evidence is
/// valid until the next boot, because after a power failure a file can have new data and an old
/// timestamp.
fn boot_id() -> Option<&'static str> {
    static ID: OnceLock<Option<String>> = OnceLock::new();
    let read = || {
        let text = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").ok()?;
        Some(text.trim().to_owned()).filter(|text| !text.is_empty())
    };
    ID.get_or_init(read).as_deref()
}

#[cfg(test)]
mod tests {
    use std::fs::{File, FileTimes, OpenOptions};
    use std::io::{Seek, SeekFrom, Write};
    use std::path::Path;
    use std::time::Duration;

    use super::*;

    fn evidence(path: &Path) -> ChangeToken {
        of_status(&rustix::fs::fstat(File::open(path).unwrap()).unwrap()).unwrap()
    }

    /// Every change of a file changes the evidence, even if the program that changes the file sets
    /// its timestamps back.
    #[test]
    fn no_change_leaves_the_evidence_as_it_was() {
        type Change = fn(&Path);
        let changes: [(&str, Change); 7] = [
            ("one sector is written", |path| write(path, 4096, &[1; 512])),
            ("and the time of the modification is set back", |path| {
                let before = std::fs::metadata(path).unwrap();
                write(path, 4096, &[2; 512]);
                let times = FileTimes::new().set_modified(before.modified().unwrap());
                OpenOptions::new().write(true).open(path).unwrap().set_times(times).unwrap();
                assert_eq!(std::fs::metadata(path).unwrap().modified().unwrap(), before.modified().unwrap());
            }),
            ("the same bytes are written", |path| write(path, 0, &[0; 512])),
            ("the file is truncated and written again", |path| std::fs::write(path, [3; 8192]).unwrap()),
            ("it is copied over", |path| {
                let other = path.with_extension("other");
                std::fs::write(&other, [4; 8192]).unwrap();
                std::fs::copy(&other, path).unwrap();
            }),
            ("another file takes its name", |path| {
                let other = path.with_extension("other");
                std::fs::write(&other, [5; 8192]).unwrap();
                std::fs::rename(&other, path).unwrap();
            }),
            ("a hole is punched", |path| {
                let file = OpenOptions::new().write(true).open(path).unwrap();
                let how = rustix::fs::FallocateFlags::PUNCH_HOLE | rustix::fs::FallocateFlags::KEEP_SIZE;
                rustix::fs::fallocate(file, how, 0, 4096).unwrap();
            }),
        ];
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("disk");
        std::fs::write(&path, [0; 8192]).unwrap();
        for (what, change) in changes {
            let before = evidence(&path);
            assert_eq!(before, evidence(&path), "looking is no change");
            wait_for_tick(directory.path());
            change(&path);
            assert_ne!(before, evidence(&path), "{what}");
        }
    }

    /// A program can set the time of the content's last change (mtime), but not the time of the
    /// last change of the file (ctime).
    #[test]
    fn each_change_moves_one_of_the_times_forward() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("disk");
        std::fs::write(&path, [0; 8192]).unwrap();
        let open = || OpenOptions::new().write(true).open(&path).unwrap();
        let times = || ChangeTimes::of(open()).unwrap();
        let before = times();
        assert!(before.modified_ns > 0 && before.latest_ns() >= before.modified_ns, "{before:?}");
        wait_for_tick(directory.path());
        write(&path, 4096, &[1; 512]);
        let written = times();
        assert!(written.modified_ns > before.modified_ns, "{before:?}, {written:?}");
        wait_for_tick(directory.path());
        open().set_modified(std::time::UNIX_EPOCH + Duration::from_secs(1)).unwrap();
        let set_back = times();
        assert_eq!(set_back.modified_ns, 1_000_000_000);
        assert!(set_back.changed_ns > written.latest_ns(), "{written:?}, {set_back:?}");
        let detector = ChangeDetector(Kind::KeptOpen(Arc::new(open().into())));
        assert_eq!(detector.times(), Some(set_back));
        assert_eq!(ChangeDetector::said(ChangeToken(1)).times(), None);
    }

    /// A change soon after another one might have the same timestamps, so young timestamps are no
    /// evidence.
    #[test]
    fn a_young_timestamp_is_no_evidence() {
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(&[0; 4096]).unwrap();
        assert_eq!(settled(&file), None);
        let later = ChangeDetector(Kind::KeptOpen(Arc::new(file.into())));
        assert!(later.evidence_at_end().is_some());
    }

    fn write(path: &Path, offset: u64, bytes: &[u8]) {
        let mut file = OpenOptions::new().write(true).open(path).unwrap();
        file.seek(SeekFrom::Start(offset)).unwrap();
        file.write_all(bytes).unwrap();
    }

    /// Waits until the filesystem's clock has moved on.
    fn wait_for_tick(directory: &Path) {
        let probe = directory.join("probe");
        std::fs::write(&probe, [0]).unwrap();
        let first = std::fs::metadata(&probe).unwrap().modified().unwrap();
        for _ in 0..1000 {
            std::thread::sleep(Duration::from_millis(1));
            std::fs::write(&probe, [0]).unwrap();
            if std::fs::metadata(&probe).unwrap().modified().unwrap() > first {
                return;
            }
        }
        panic!("the filesystem's clock stands still");
    }
}
