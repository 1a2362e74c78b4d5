//! FUSE files inherited from the previous daemon process during an upgrade. Inherited files stay
//! mounted. When a disk comes online, it takes over its inherited file, if the export's file still
//! has the same path. Inherited files without a disk are unmounted.

use std::collections::{BTreeMap, BTreeSet};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::{MutexGuard, PoisonError};

use hob_frontends::fuse::Attributes;

use super::ExportService;
use crate::api_error::{Result, conflict};
use crate::mount::Mount;
use crate::services::flash::blocking;
use crate::services::registry::DiskEntry;

/// A mounted file inherited from the previous daemon process.
#[derive(Debug)]
pub(crate) struct InheritedFile {
    /// Mount point of the file.
    pub(crate) path: PathBuf,
    /// Open descriptor of /dev/fuse. It is closed before the mount is dropped, so that no access to
    /// the file waits for a reply.
    pub(crate) device: OwnedFd,
    /// The mount; dropping it unmounts the file.
    pub(crate) mount: Mount,
    pub(crate) attributes: Attributes,
    /// True if writes are refused.
    pub(crate) read_only: bool,
}

impl ExportService {
    /// Releases all mounts without unmounting them. Returns each export, its mount point, and
    /// whether hob created the file at the mount point.
    pub(crate) fn leave_mounts(&self) -> Vec<(String, PathBuf, bool)> {
        let mut inner = self.registry.inner();
        let mounted = inner.disks.values_mut().flat_map(DiskEntry::take_mounts);
        let leave = |(export, mount): (String, Mount)| {
            let (path, made) = mount.leave();
            (export, path, made)
        };
        mounted.map(leave).collect()
    }

    /// Takes over the mounted files of the previous daemon process. The caller does this before it
    /// opens any disk.
    pub(crate) fn inherit_files(&self, files: impl IntoIterator<Item = (String, InheritedFile)>) {
        self.inherited().extend(files);
    }

    fn inherited(&self) -> MutexGuard<'_, BTreeMap<String, InheritedFile>> {
        self.inherited.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the inherited files whose disks never came online, for the next daemon process.
    pub(crate) fn leave_left_files(&self) -> Vec<(String, InheritedFile)> {
        std::mem::take(&mut *self.inherited()).into_iter().collect()
    }

    /// Returns true if the export's file at `path` was inherited.
    pub(in crate::services) fn has_left_file(&self, export: &str, path: &str) -> bool {
        self.inherited().get(export).is_some_and(|file| file.path == Path::new(path))
    }

    /// Refuses a change of inherited files of an offline disk. Programs may have these files open,
    /// and wait until the disk is served. `is_meant` returns true for the exports whose files
    /// change.
    pub(in crate::services) fn check_no_left_file(
        &self,
        disk: &str,
        is_meant: impl Fn(&str) -> bool,
    ) -> Result<()> {
        let inner = self.registry.inner();
        let mut files = inner.disk(disk)?.wanted.files();
        match files.find(|(export, path)| is_meant(export) && self.has_left_file(export, path)) {
            None => Ok(()),
            Some((_, path)) => Err(conflict!(
                "{disk} is offline, and programs that have its file {path} open wait for the disk"
            )
            .hint(format!(
                "repeat the change when the disk is online; 'hob disk show {disk}' shows the reason"
            ))),
        }
    }

    /// Returns the inherited file of an export if the file is still usable. Otherwise unmounts the
    /// file.
    pub(in crate::services) async fn take_left_file(
        &self,
        export: &str,
        path: &str,
        size: u64,
        read_only: bool,
    ) -> Result<Option<InheritedFile>> {
        let Some(file) = self.inherited().remove(export) else { return Ok(None) };
        if file.path == Path::new(path) && file.attributes.size <= size && file.read_only == read_only {
            return Ok(Some(file));
        }
        tracing::warn!(
            "export {export}: hob unmounts its file, because the file's properties changed; \
            programs that have the file open now get errors"
        );
        blocking(move || drop(file)).await?;
        Ok(None)
    }

    /// Unmounts inherited files whose disk or export no longer exists.
    pub(crate) async fn drop_unwanted_files(&self) {
        let known: BTreeSet<String> = {
            let inner = self.registry.inner();
            let files = inner.disks.values().flat_map(|disk| disk.wanted.files());
            files.map(|(export, _)| export.to_owned()).collect()
        };
        let unwanted = {
            let mut files = self.inherited();
            let (wanted, unwanted): (BTreeMap<_, _>, BTreeMap<_, _>) =
                std::mem::take(&mut *files).into_iter().partition(|(export, _)| known.contains(export));
            *files = wanted;
            unwanted
        };
        for (export, file) in unwanted {
            tracing::warn!(
                "export {export}: hob unmounts its file {}, because the export no longer exists",
                file.path.display()
            );
            drop(file);
        }
    }
}
