//! Mounted files that the program before has left. They stay as they are; each is taken over when its disk is online, if it is still
//! to be the same file. Those that no disk is to have any more are unmounted.

use std::collections::{BTreeMap, BTreeSet};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::{MutexGuard, PoisonError};

use hob_frontends::fuse::Attributes;

use super::ExportService;
use crate::daemon::manager::api_error::ApiError;
use crate::daemon::manager::flash::blocking;
use crate::daemon::manager::registry::DiskEntry;
use crate::daemon::mount::Mount;

/// A mounted file that the program before has left.
#[derive(Debug)]
pub(crate) struct InheritedFile {
    /// Where it is mounted.
    pub(crate) path: PathBuf,
    /// /dev/fuse. It is closed before the mount is dropped: then nobody waits for answers any more.
    pub(crate) device: OwnedFd,
    /// The mount. Dropping it takes it away.
    pub(crate) mount: Mount,
    /// As programs see it.
    pub(crate) attributes: Attributes,
    /// Changes are refused.
    pub(crate) read_only: bool,
}

impl ExportService {
    /// Lets go of all mounts and leaves them as they are: of which export, where, and whether the file below was made for it.
    pub(crate) fn leave_mounts(&self) -> Vec<(String, PathBuf, bool)> {
        let mut inner = self.0.registry.inner();
        let mounted = inner.disks.values_mut().flat_map(DiskEntry::take_mounts);
        let leave = |(export, mount): (String, Mount)| {
            let (path, made) = mount.leave();
            (export, path, made)
        };
        mounted.map(leave).collect()
    }

    /// Takes over what the program before has left, before anything is started.
    pub(crate) fn inherit_files(&self, files: impl IntoIterator<Item = (String, InheritedFile)>) {
        self.inherited().extend(files);
    }

    fn inherited(&self) -> MutexGuard<'_, BTreeMap<String, InheritedFile>> {
        self.0.inherited.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Files that were left and whose disks have not come since, by export, for the next program.
    pub(crate) fn leave_left_files(&self) -> Vec<(String, InheritedFile)> {
        std::mem::take(&mut *self.inherited()).into_iter().collect()
    }

    /// Was an export's file left mounted?
    pub(in crate::daemon::manager) fn has_left_file(&self, export: &str, path: &str) -> bool {
        self.inherited().get(export).is_some_and(|file| file.path == Path::new(path))
    }

    /// An export's file, if it was left and can stay as it is. If not, it is taken away.
    pub(in crate::daemon::manager) async fn take_left_file(
        &self,
        export: &str,
        path: &str,
        size: u64,
        read_only: bool,
    ) -> Result<Option<InheritedFile>, ApiError> {
        let Some(file) = self.inherited().remove(export) else { return Ok(None) };
        if file.path == Path::new(path) && file.attributes.size <= size && file.read_only == read_only {
            return Ok(Some(file));
        }
        tracing::warn!(
            "{export} is no longer the same file; programs that have the old file open get errors from now on"
        );
        blocking(move || drop(file)).await?;
        Ok(None)
    }

    /// Takes away files of disks and exports that there are not any more.
    pub(crate) async fn drop_unwanted_files(&self) {
        let known: BTreeSet<String> = {
            let inner = self.0.registry.inner();
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
            tracing::warn!("{export} is not the file {} any more", file.path.display());
            drop(file);
        }
    }
}
