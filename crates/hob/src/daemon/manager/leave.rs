//! Ending so that the next program can go on, and going on where the program before has ended.
//!
//! From the moment at which the end is certain nothing is changed any more. Mounted files stay as they are; the next manager
//! takes each when its disk is online, if it is still to be the same file, and takes away those that nobody wants.

use std::collections::{BTreeMap, BTreeSet};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::{Arc, MutexGuard, PoisonError};

use hob_engine::units::DiskId;
use hob_frontends::fuse::Attributes;
use tokio::task::JoinSet;

use super::api_error::ApiError;
use super::flash::blocking;
use super::{DiskEntry, DiskPhase, Inner, Manager};
use crate::daemon::mount::Mount;
use crate::daemon::shard_api::ShardHandle;

/// How the end goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Ending {
    /// What is dirty stays in the caches that keep it.
    Plain,
    /// What is dirty goes to the backings first, as far as they take it.
    Drain,
    /// Another program goes on at once.
    HandOver,
}

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

impl Manager {
    /// Lets nothing be changed from now on. Refused while something is.
    pub(crate) fn begin_leaving(&self) -> Result<(), ApiError> {
        let mut inner = self.inner();
        // One that is offline is only tried again and again.
        let online = inner.disks.iter().filter(|(_, disk)| !matches!(disk.phase, DiskPhase::Offline(_)));
        let disks = online.filter_map(|(name, disk)| Some((name, disk.busy?)));
        let pools = inner.pools.iter().filter_map(|(name, pool)| Some((name, pool.busy?)));
        if let Some((name, doing)) = disks.chain(pools).next() {
            return Err(
                ApiError::conflict(format!("{name} is being {doing}")).hint("try again when that is done")
            );
        }
        inner.leaving = true;
        Ok(())
    }

    /// Makes what guests wrote durable on every backing. The next program does not know what was written and not flushed, so it could not
    /// report a loss.
    ///
    /// # Errors
    /// The name of a disk that could not be flushed, and why.
    pub(crate) async fn flush_all(&self) -> Result<(), String> {
        let disks: Vec<(String, ShardHandle, DiskId)> = {
            let inner = self.inner();
            let online = inner.disks.iter().filter(|(_, disk)| !disk.wanted.read_only);
            online
                .filter_map(|(name, disk)| match &disk.phase {
                    DiskPhase::Online(shard) => Some((name.clone(), shard.clone(), disk.id)),
                    _ => None,
                })
                .collect()
        };
        let mut flushes = JoinSet::new();
        for (name, shard, id) in disks {
            flushes.spawn(async move { (name, shard.flush(id).await) });
        }
        while let Some(flushed) = flushes.join_next().await {
            if let Ok((name, Err(error))) = flushed {
                return Err(format!("disk {name}: its backing could not be flushed: {error}"));
            }
        }
        Ok(())
    }

    /// Stays after all.
    pub(crate) fn stay(&self) {
        self.inner().leaving = false;
    }

    /// Lets go of all mounts and leaves them as they are: of which export, where, and whether the file below was made for it.
    pub(crate) fn leave_mounts(&self) -> Vec<(String, PathBuf, bool)> {
        let mut inner = self.inner();
        let mounted = inner.disks.values_mut().flat_map(DiskEntry::take_mounts);
        let leave = |(export, mount): (String, Mount)| {
            let (path, made) = mount.leave();
            (export, path, made)
        };
        mounted.map(leave).collect()
    }

    /// Takes over what the program before has left, before anything is started.
    pub(crate) fn inherit_files(&self, files: impl IntoIterator<Item = (String, InheritedFile)>) {
        self.left_files().extend(files);
    }

    fn left_files(&self) -> MutexGuard<'_, BTreeMap<String, InheritedFile>> {
        self.left_files.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Files that were left and whose disks have not come since, by export, for the next program.
    pub(crate) fn leave_left_files(&self) -> Vec<(String, InheritedFile)> {
        std::mem::take(&mut *self.left_files()).into_iter().collect()
    }

    /// Was an export's file left mounted?
    pub(super) fn has_left_file(&self, export: &str, path: &str) -> bool {
        self.left_files().get(export).is_some_and(|file| file.path == Path::new(path))
    }

    /// An export's file, if it was left and can stay as it is. If not, it is taken away.
    pub(super) async fn take_left_file(
        &self,
        export: &str,
        path: &str,
        size: u64,
        read_only: bool,
    ) -> Result<Option<InheritedFile>, ApiError> {
        let Some(file) = self.left_files().remove(export) else { return Ok(None) };
        if file.path == Path::new(path) && file.attributes.size <= size && file.read_only == read_only {
            return Ok(Some(file));
        }
        tracing::warn!(
            "{export} is not the file any more that it was; whoever has that open gets errors from now on"
        );
        blocking(move || drop(file)).await?;
        Ok(None)
    }

    /// Takes away files of disks and exports that there are not any more.
    pub(crate) async fn drop_unwanted_files(self: &Arc<Self>) {
        let known: BTreeSet<String> = {
            let inner = self.inner();
            let files = inner.disks.values().flat_map(|disk| disk.wanted.files());
            files.map(|(export, _)| export.to_owned()).collect()
        };
        let unwanted = {
            let mut files = self.left_files();
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

impl Inner {
    /// May something be changed?
    pub(super) fn check_stays(&self) -> Result<(), ApiError> {
        match self.leaving {
            false => Ok(()),
            true => Err(ApiError::conflict("hob is being upgraded").hint("try again in a moment")),
        }
    }
}
