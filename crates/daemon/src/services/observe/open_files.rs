//! Detects files of pools and backings, and files below images, that were removed, renamed or
//! replaced while hob has them open. hob continues to use the open file, but would find another
//! file, or no file, when it opens the path again. So `hob health` reports these files. The same
//! check detects files of pools that were truncated, because hob would refuse them, and raw files
//! that are shorter than their disks. Also detects files of disks (FUSE) that another program has
//! unmounted, moved or covered.
//!
//! Only one check of all paths is in progress at a time, so a filesystem that hangs also delays the
//! check of files on other filesystems.

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use hob_control::Size;
use hob_engine::units::DeviceId;
use hob_storage::backing::Format;

use super::Observe;
use crate::hardware::{Backing, FileNumber, Monitor, file_number};
use crate::mount::{MountIdentity, MountTable};
use crate::services::registry::DiskPhase;

/// Interval between two checks of the paths of open files.
pub(in crate::services) const FILES_EVERY: Duration = Duration::from_secs(5);

/// Results of the checks of the files that hob has open.
#[derive(Debug, Default)]
pub(super) struct OpenFiles {
    /// The files that are not at their paths, by subject of the health problem and path.
    missing: BTreeMap<(String, PathBuf), Missing>,
    /// True while a thread checks the paths, which may hang.
    is_asked: bool,
}

/// A file that is not at its path.
#[derive(Debug)]
struct Missing {
    opening: Opening,
    problem: String,
}

/// A file that hob has open.
#[derive(Debug)]
struct OpenFile {
    subject: String,
    path: PathBuf,
    opening: Opening,
    /// Identifies the file that hob opened at the path.
    file: FileNumber,
    /// Minimum length of the file, bytes; 0 if hob does not know it.
    bytes_min: u64,
}

/// A file of a disk (FUSE) that hob has mounted.
#[derive(Debug)]
struct MountedFile {
    disk: String,
    export: String,
    path: PathBuf,
    identity: Arc<MountIdentity>,
}

/// Distinguishes one opening of a path from a later opening of the same path.
#[derive(Debug)]
enum Opening {
    /// The opening of a pool's device, by the device's id on the shards. Each opening gets a new
    /// id.
    Device(DeviceId),
    /// The opening of a backing, by its monitor. Each opening has its own monitor.
    Backing(Weak<Monitor>),
    /// The opening of a file below an image, by the monitor of the image. hob opens the file
    /// together with the image.
    LowerFile(Weak<Monitor>),
}

impl Opening {
    fn is_same(&self, other: &Opening) -> bool {
        match (self, other) {
            (Opening::Device(one), Opening::Device(other)) => one == other,
            (Opening::Backing(one), Opening::Backing(other))
            | (Opening::LowerFile(one), Opening::LowerFile(other)) => one.ptr_eq(other),
            _ => false,
        }
    }

    fn problem(&self, path: &Path, what: &str) -> String {
        let path = path.display();
        match self {
            Opening::Device(_) => format!(
                "the file {path} of the pool {what} while hob uses it; hob uses the open file until it \
                 restarts, and then loses the dirty data in it. Rename it back if it exists, or drain the disks \
                 with caches in the pool ('hob drain') before hob restarts"
            ),
            Opening::Backing(_) => format!(
                "its backing file {path} {what} while hob uses it; hob uses the open file until it closes the \
                 disk, and the data of a deleted file is lost then. Rename it back if it exists, or copy the data \
                 of the disk before hob restarts"
            ),
            Opening::LowerFile(_) => format!(
                "the file {path} below its image {what} while hob uses it; hob uses the open file until it closes \
                 the disk, and then opens the file at the path, which may have other data. Rename it back if it \
                 exists, or copy the data of the disk before hob restarts"
            ),
        }
    }

    /// Returns the problem of a file that has `bytes` bytes and should have at least `bytes_min`.
    fn short(&self, path: &Path, bytes: u64, bytes_min: u64) -> String {
        let path = path.display();
        match self {
            Opening::Device(_) => format!(
                "the file {path} of the pool was truncated to {} while hob uses it; data past the end of the \
                 file is lost, and hob refuses the file after a restart. Drain the disks with caches in the pool \
                 ('hob drain'), and enlarge the file to its earlier size ('truncate -s') before hob restarts",
                Size(bytes).human()
            ),
            Opening::Backing(_) | Opening::LowerFile(_) => format!(
                "its backing file {path} has shrunk from {bytes_min} to {bytes} bytes. Data past its end is lost, \
                 and I/O there fails until you restore the size with 'truncate --size={bytes_min}'"
            ),
        }
    }
}

/// Result of looking up a path in the filesystem.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Found {
    /// A regular file, and its length in bytes.
    File(FileNumber, u64),
    Nothing,
    /// The path leads to something other than a regular file, or an error prevented the check.
    Unknown,
}

impl Found {
    /// Asks the filesystem which file is at a path. The filesystem may hang.
    fn at(path: &Path) -> Found {
        match std::fs::metadata(path) {
            Ok(metadata) => {
                let file = file_number(&metadata);
                file.map_or(Found::Unknown, |file| Found::File(file, metadata.len()))
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => Found::Nothing,
            Err(_) => Found::Unknown,
        }
    }
}

impl OpenFiles {
    /// Returns the problems for health: subject and reason.
    pub(super) fn problems(&self) -> Vec<(String, String)> {
        self.missing.iter().map(|((subject, _), it)| (subject.clone(), it.problem.clone())).collect()
    }

    /// Compares all open files with the files that are at their paths now.
    fn note(&mut self, found: Vec<(OpenFile, Found)>) {
        let mut before = std::mem::take(&mut self.missing);
        for (OpenFile { subject, path, opening, file, bytes_min }, found) in found {
            let key = (subject, path);
            let known = before.remove(&key).filter(|known| known.opening.is_same(&opening));
            let problem = match found {
                Found::File(present, bytes) if present == file && bytes >= bytes_min => continue,
                Found::File(present, bytes) if present == file => opening.short(&key.1, bytes, bytes_min),
                Found::File(..) => opening.problem(&key.1, "was replaced by another file"),
                Found::Nothing => opening.problem(&key.1, "was removed or renamed"),
                Found::Unknown => {
                    self.missing.extend(known.map(|known| (key, known)));
                    continue;
                }
            };
            if known.is_none() {
                tracing::warn!("{}: {problem}", key.0);
            }
            self.missing.insert(key, Missing { opening, problem });
        }
    }
}

impl Observe {
    /// Checks the paths of all open files for health, on a thread that may block.
    pub(in crate::services) fn look_at_open_files(&self) {
        if std::mem::replace(&mut self.open_files().is_asked, true) {
            return;
        }
        let service = self.clone();
        tokio::task::spawn_blocking(move || {
            service.check_mounts();
            service.check_open_files();
            service.open_files().is_asked = false;
        });
    }

    /// Detects files of disks that another program has unmounted, moved or covered.
    fn check_mounts(&self) {
        // The table of mounts is read after the list, so that it has each mount of the list.
        let mounted = self.mounted_files();
        if mounted.is_empty() {
            return;
        }
        let table = match MountTable::read() {
            Ok(table) => table,
            Err(error) => {
                tracing::debug!("cannot read the table of mounts: {error}");
                return;
            }
        };
        let mut inner = self.registry.inner();
        for MountedFile { disk, export, path, identity } in mounted {
            let Ok(entry) = inner.disk_mut(&disk) else { continue };
            let Some(file) = entry.files.get_mut(&export) else { continue };
            let state = table.state(&path, &identity);
            let problem = state.problem(&format!("the file {}", path.display()));
            if file.note_mount_state(&identity, state)
                && let Some(problem) = problem
            {
                tracing::warn!("disk {disk}: {problem} (see 'hob health')");
            }
        }
    }

    /// Returns the mounted files of all disks.
    fn mounted_files(&self) -> Vec<MountedFile> {
        let mut all = Vec::new();
        for (disk, entry) in &self.registry.inner().disks {
            for (export, file) in &entry.files {
                let Some(mount) = &file.mount else { continue };
                all.push(MountedFile {
                    disk: disk.clone(),
                    export: export.clone(),
                    path: mount.path().to_owned(),
                    identity: Arc::clone(mount.identity()),
                });
            }
        }
        all
    }

    /// Checks the paths of all open files for health. May hang with a filesystem.
    pub(in crate::services) fn check_open_files(&self) {
        let files = self.files_in_use().into_iter();
        let found = files.map(|file| {
            let found = Found::at(&file.path);
            (file, found)
        });
        let found: Vec<(OpenFile, Found)> = found.collect();
        self.open_files().note(found);
    }

    /// Returns the paths of pools and backings that are open on this host.
    fn files_in_use(&self) -> Vec<OpenFile> {
        let inner = self.registry.inner();
        let mut files = Vec::new();
        for (pool, entry) in &inner.pools {
            for device in entry.devices.iter().filter(|device| device.peer.is_none()) {
                let (Some(ids), Some(file)) = (device.ids, device.file) else { continue };
                files.push(OpenFile {
                    subject: format!("{pool} {}", device.path.display()),
                    path: device.path.clone(),
                    opening: Opening::Device(ids.on_shards),
                    file,
                    bytes_min: device.segments.saturating_mul(entry.segment_bytes),
                });
            }
        }
        for (name, disk) in &inner.disks {
            if let Some(measure) = &disk.measure
                && matches!(disk.phase, DiskPhase::Online(_))
                && Backing::is_path(&disk.wanted.backing)
            {
                if let Some(file) = measure.info.file {
                    let is_raw = disk.wanted.format_name().is_some_and(|name| name == Format::Raw.name());
                    files.push(OpenFile {
                        subject: name.clone(),
                        path: PathBuf::from(&disk.wanted.backing),
                        opening: Opening::Backing(Arc::downgrade(&measure.monitor)),
                        file,
                        bytes_min: if is_raw { disk.size_bytes } else { 0 },
                    });
                }
                files.extend(measure.info.lower_files.iter().map(|(path, file)| OpenFile {
                    subject: name.clone(),
                    path: path.clone(),
                    opening: Opening::LowerFile(Arc::downgrade(&measure.monitor)),
                    file: *file,
                    bytes_min: 0,
                }));
            }
        }
        files
    }

    /// Locks and returns the results of the latest check of the open files.
    pub(super) fn open_files(&self) -> MutexGuard<'_, OpenFiles> {
        self.open_files.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_reported_until_it_is_back_or_another_one_is_open() {
        let mut files = OpenFiles::default();
        let mut note = |id, found| {
            let (subject, path) = ("p /flash".to_owned(), PathBuf::from("/flash"));
            let (opening, file) = (Opening::Device(DeviceId(id)), (1, 6 + u64::from(id)));
            let file = OpenFile { subject, path, opening, file, bytes_min: 4096 };
            files.note(vec![(file, found)]);
            files.problems().pop().map(|(_, reason)| reason)
        };
        assert_eq!(note(1, Found::Unknown), None);
        let removed = note(1, Found::Nothing).unwrap();
        assert!(removed.contains("/flash of the pool was removed or renamed"), "{removed}");
        assert!(note(1, Found::Unknown).is_some(), "the path cannot be checked");
        let replaced = note(1, Found::File((1, 8), 4096)).unwrap();
        assert!(replaced.contains("was replaced by another file"), "{replaced}");
        assert_eq!(note(1, Found::File((1, 7), 8192)), None);
        let truncated = note(1, Found::File((1, 7), 1024)).unwrap();
        assert!(truncated.contains("/flash of the pool was truncated to 1 KiB"), "{truncated}");
        assert_eq!(note(1, Found::File((1, 7), 4096)), None);
        assert!(note(1, Found::Nothing).is_some());
        assert_eq!(note(2, Found::Unknown), None, "hob opened another file");
        assert_eq!(note(2, Found::File((1, 8), 4096)), None);
    }
}
