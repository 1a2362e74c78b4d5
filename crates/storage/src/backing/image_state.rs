//! Gives the content of a read-only image a name. By this name, the clones of the image and the
//! disk that serves the image find each other (docs/decisions/0071).
//!
//! The name consists of the identity, the size and the times of the last changes of each file of
//! the image. A changed or replaced file gives another name. The rules are those of the evidence
//! that a backing is unchanged (docs/decisions/0033), with one exception: files of all filesystems
//! have a name. On a network filesystem a change by another host can become visible late, so on
//! such a filesystem only the locks of the files exclude other writers immediately.

use std::fs::Metadata;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::time::{Duration, SystemTime};

use super::{Format, ImageFile, Role, identity};
use crate::time_limit::within;

/// Longest wait for a file's filesystem to answer. If many clones of one file are opened at the
/// same time, their queries of the filesystem run one after the other.
const ANSWER_MAX: Duration = Duration::from_secs(5);

/// Minimum age of the last change. The kernel's clock for timestamps advances in ticks of 1 to 10
/// ms, so a younger timestamp could hide a later change.
const SETTLED: Duration = Duration::from_millis(100);

/// `f_type` of filesystems whose inode numbers are permanent: ext2 to ext4, XFS, Btrfs, F2FS,
/// bcachefs, ZFS, NFS, tmpfs, overlayfs.
const PERMANENT_INODES: [u64; 9] = [
    0xef53,
    0x5846_5342,
    0x9123_683e,
    0xf2f5_2010,
    0xca45_1a4e,
    0x2fc1_2fc1,
    0x6969,
    0x0102_1994,
    0x794c_7630,
];

/// Why a file has no permanent name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Nameless {
    /// The file's filesystem did not record when the file was created. With a creation time, the
    /// file's permanent name would begin with `start`.
    NoCreationTime {
        /// Beginning of the permanent name: the file's inode number.
        start: String,
    },
    /// Another reason, as a text whose subject is the file, such as "is not a regular file".
    Other(String),
}

/// Returns a text that distinguishes a file from another file that later has the same path. The
/// text does not depend on the file's content, and stays the same when the host restarts.
///
/// # Errors
/// Returns the reason if the file has no permanent name.
pub fn permanent_name(path: &Path) -> Result<String, Nameless> {
    match within(path, ANSWER_MAX, |path| Ok(permanent_name_of(path))) {
        Some(Ok(named)) => named,
        Some(Err(error)) => Err(Nameless::Other(format!("cannot be examined: {error}"))),
        None => Err(Nameless::Other("is on a filesystem that does not answer".to_owned())),
    }
}

fn permanent_name_of(path: &Path) -> Result<String, Nameless> {
    let failed = |error: io::Error| Nameless::Other(format!("cannot be examined: {error}"));
    let system = rustix::fs::statfs(path).map_err(|errno| failed(errno.into()))?;
    let metadata = std::fs::metadata(path).map_err(failed)?;
    if !metadata.is_file() {
        return Err(Nameless::Other("is not a regular file".to_owned()));
    }
    if !PERMANENT_INODES.contains(&(system.f_type as u64 & 0xffff_ffff)) {
        return Err(Nameless::Other("is on a filesystem without permanent inode numbers".to_owned()));
    }
    let start = format!("inode {} created at ", metadata.ino());
    let born = metadata.created().ok().and_then(|at| at.duration_since(SystemTime::UNIX_EPOCH).ok());
    match born {
        Some(born) => Ok(format!("{start}{}.{:09}", born.as_secs(), born.subsec_nanos())),
        None => Err(Nameless::NoCreationTime { start }),
    }
}

/// Returns the name of the present content of an image that consists of `image` and the files
/// `below` it. Waits up to 0.1 s after a recent change. Do not call it on the shard's thread.
///
/// # Errors
/// Returns an error that names the file if a file is missing, is not a regular file, or is on a
/// filesystem that does not answer within five seconds (`TimedOut`).
pub fn image_state(image: &Path, format: Format, below: &[ImageFile]) -> io::Result<String> {
    let mut name = file_state(image, format.name())?;
    for file in below {
        let role = match file.role {
            Role::Backing => file.format.name(),
            Role::Data => "data",
        };
        name = format!("{name}; {}", file_state(&file.path, role)?);
    }
    Ok(name)
}

fn file_state(path: &Path, kind: &str) -> io::Result<String> {
    let because = |error: io::Error| io::Error::new(error.kind(), format!("{}: {error}", path.display()));
    let mut metadata = look(path).map_err(because)?;
    if !is_settled(&metadata) {
        std::thread::sleep(SETTLED * 5 / 4);
        metadata = look(path).map_err(because)?;
    }
    let whose = identity::of_file(kind, &metadata, metadata.len());
    let (modified, changed) = times(&metadata);
    Ok(format!("{whose}, modified at {modified}, changed at {changed}"))
}

fn look(path: &Path) -> io::Result<Metadata> {
    within(path, ANSWER_MAX, attributes).unwrap_or_else(|| {
        Err(io::Error::new(io::ErrorKind::TimedOut, "its filesystem gave no answer in time"))
    })
}

fn attributes(path: &Path) -> io::Result<Metadata> {
    let metadata = std::fs::metadata(path)?;
    if metadata.is_file() {
        return Ok(metadata);
    }
    Err(io::Error::other("it is not a regular file, so hob cannot tell whether it changes"))
}

/// Returns the times of the last modification and of the last change of attributes, nanoseconds.
fn times(metadata: &Metadata) -> (i128, i128) {
    let ns = |seconds: i64, ns: i64| i128::from(seconds) * 1_000_000_000 + i128::from(ns);
    (ns(metadata.mtime(), metadata.mtime_nsec()), ns(metadata.ctime(), metadata.ctime_nsec()))
}

fn is_settled(metadata: &Metadata) -> bool {
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_nanos();
    let (modified, changed) = times(metadata);
    modified.max(changed) + SETTLED.as_nanos() as i128 <= now as i128
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use super::*;

    #[test]
    fn a_change_of_any_file_changes_the_name() {
        let dir = tempfile::tempdir().unwrap();
        let file = |name: &str| {
            let path = dir.path().join(name);
            std::fs::write(&path, [1; 4096]).unwrap();
            path
        };
        let (image, data, base) = (file("image"), file("data"), file("base"));
        let part = |path: &PathBuf, role| ImageFile { path: path.clone(), format: Format::Raw, role };
        let below = [part(&data, Role::Data), part(&base, Role::Backing)];
        let name = || image_state(&image, Format::Qcow2, &below).unwrap();
        let first = name();
        assert_eq!(name(), first);
        let mut seen = vec![first];
        for path in [&image, &data, &base] {
            let before = std::fs::metadata(path).unwrap().modified().unwrap();
            std::fs::write(path, [2; 4096]).unwrap();
            // The test sets the time of the modification back, which must also count as a change.
            let times = std::fs::FileTimes::new().set_modified(before);
            std::fs::OpenOptions::new().write(true).open(path).unwrap().set_times(times).unwrap();
            assert!(!seen.contains(&name()), "{}", path.display());
            seen.push(name());
        }
        // Another file takes the name.
        std::fs::rename(file("other"), &base).unwrap();
        assert!(!seen.contains(&name()));
        // The same bytes in another format are other data.
        assert_ne!(
            image_state(&base, Format::Raw, &[]).unwrap(),
            image_state(&base, Format::Qcow2, &[]).unwrap()
        );
    }

    #[test]
    fn a_permanent_name_changes_only_with_the_file() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("base");
        std::fs::write(&path, [1; 4096]).unwrap();
        let first = permanent_name(&path).expect("this filesystem records when files were created");
        std::fs::write(&path, [2; 8192]).unwrap();
        assert_eq!(permanent_name(&path).as_ref(), Ok(&first), "the content does not count");
        let other = dir.path().join("other");
        std::fs::write(&other, [2; 8192]).unwrap();
        std::fs::rename(&other, &path).unwrap();
        assert_ne!(permanent_name(&path).unwrap(), first);
        assert_eq!(permanent_name(dir.path()), Err(Nameless::Other("is not a regular file".to_owned())));
        for (path, why) in
            [(&*other, "cannot be examined"), (Path::new("/proc/version"), "without permanent")]
        {
            let named = permanent_name(path);
            assert!(matches!(&named, Err(Nameless::Other(text)) if text.contains(why)), "{named:?}");
        }
    }

    #[test]
    fn only_regular_files_have_a_name() {
        let dir = tempfile::tempdir().unwrap();
        let error = image_state(dir.path(), Format::Raw, &[]).unwrap_err().to_string();
        assert!(
            error.contains("not a regular file") && error.contains(dir.path().to_str().unwrap()),
            "{error}"
        );
        let missing = image_state(&dir.path().join("none"), Format::Raw, &[]).unwrap_err();
        assert_eq!(missing.kind(), io::ErrorKind::NotFound);
    }
}
