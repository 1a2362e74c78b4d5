//! Detects that a golden image changes while clones of it are served (docs/decisions/0071).
//!
//! A golden image must not change. Locks exclude QEMU and other hobs, but not every program. So hob
//! compares the files of each parent's disk every few seconds with their state when the disk was
//! opened. After a change the clones read their parent's data through their own backings, until the
//! disk is opened again.

use std::collections::BTreeSet;
use std::convert::Infallible;
use std::io;
use std::path::PathBuf;
use std::time::Duration;

use hob_engine::units::DiskId;
use hob_storage::backing::{Format, ImageFile, image_state};
use tokio::task::JoinSet;

use super::super::Disks;
use crate::services::registry::{DiskEntry, DiskPhase, Inner};
use crate::state::{FileSpec, FormatName};

/// Interval between two checks of the files of parents' disks.
const LOOK_EVERY: Duration = Duration::from_secs(2);

/// The files of a parent's disk, and the name of their content when the disk was opened.
struct Look {
    name: String,
    id: DiskId,
    constant: String,
    path: PathBuf,
    format: Format,
    below: Vec<ImageFile>,
}

impl Look {
    /// Returns the files of a parent's disk to check; `None` if the disk is not online, or has no
    /// files.
    fn of(disk: &DiskEntry) -> Option<Look> {
        let DiskPhase::Online(_) = &disk.phase else { return None };
        let image = disk.wanted.image.as_ref()?;
        let FormatName(format) = image.format?;
        Some(Look {
            name: disk.wanted.name.clone(),
            id: disk.id,
            constant: disk.constant.clone()?,
            path: PathBuf::from(&disk.wanted.backing),
            format,
            below: image.files.iter().flatten().map(FileSpec::file).collect(),
        })
    }

    /// Returns a description of how the files have changed since the disk was opened; `None` if
    /// they have not.
    async fn change(self) -> Option<(Look, String)> {
        let look = tokio::task::spawn_blocking(move || {
            let found = image_state(&self.path, self.format, &self.below);
            (self, found)
        });
        match look.await.ok()? {
            (look, Ok(state)) if state == look.constant => None,
            (look, Ok(_)) => Some((look, "they were written or replaced".to_owned())),
            // The filesystem hangs, so nothing is known.
            (_, Err(error)) if error.kind() == io::ErrorKind::TimedOut => None,
            (look, Err(error)) if error.kind() == io::ErrorKind::NotFound => {
                Some((look, format!("one of them was renamed or removed ({error})")))
            }
            (look, Err(error)) => Some((look, error.to_string())),
        }
    }
}

impl Inner {
    /// Returns the files to check of all disks that clones use.
    fn looks(&self) -> Vec<Look> {
        let constant_of = |disk: &DiskEntry| disk.parent.as_ref()?.constant.clone();
        let used: BTreeSet<String> = self.disks.values().filter_map(constant_of).collect();
        self.disks.values().filter_map(Look::of).filter(|look| used.contains(&look.constant)).collect()
    }
}

impl Disks {
    /// Checks the parents of clones every few seconds, until dropped.
    pub(in crate::services) async fn watch_parents(self) -> Infallible {
        loop {
            tokio::time::sleep(LOOK_EVERY).await;
            self.check_parents().await;
        }
    }

    /// Checks the parents of clones once. Clones no longer read from a parent's disk whose files
    /// have changed.
    pub(in crate::services) async fn check_parents(&self) {
        let looks = self.registry.inner().looks();
        let mut all: JoinSet<_> = looks.into_iter().map(Look::change).collect();
        let mut is_changed = false;
        while let Some(found) = all.join_next().await {
            let Ok(Some((look, what))) = found else { continue };
            let mut inner = self.registry.inner();
            let Ok(disk) = inner.disk_mut(&look.name) else { continue };
            if disk.id == look.id && disk.constant.as_ref() == Some(&look.constant) {
                disk.constant = None;
                is_changed = true;
                tracing::error!(
                    "disk {}: a golden image must not change while clones use it, and its files did: \
                     {what}. From now on each clone reads them itself. The changes can damage the \
                     filesystems of the clones",
                    look.name
                );
            }
        }
        if is_changed {
            self.link_parents();
        }
    }
}
