//! Detects that a golden image changes while clones of it are served (docs/decisions/0071).
//!
//! A golden image must not change. File locks keep QEMU and other hob daemons from changing the
//! image, but not every program. So hob compares the files of each parent's disk every few seconds
//! with their state when the disk was opened. After a change the clones read their parent's data
//! through their own backings, until the disk is opened again.
//!
//! After a pause of the process, and after the end of a program that serves the files, a shard
//! requires a check. The shard sends no reads to the parent's disk until the daemon has compared
//! the files again.

use std::collections::BTreeSet;
use std::convert::Infallible;
use std::io;
use std::path::PathBuf;
use std::time::Duration;

use hob_engine::units::DiskId;
use hob_storage::backing::{Format, ImageFile, image_state};
use tokio::task::JoinSet;

use super::super::Disks;
use crate::services::flash::blocking;
use crate::services::registry::{DiskEntry, DiskPhase, Inner};
use crate::state::{FileSpec, FormatName};

/// Interval between two checks of the files of parents' disks.
const LOOK_EVERY: Duration = Duration::from_secs(2);

/// The files of a parent's disk, and the name that their content had when the disk was opened.
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

    /// Compares the files with their state when the disk was opened.
    async fn compare(self) -> (Look, Files) {
        let Look { path, format, below, .. } = &self;
        let (path, format, below) = (path.clone(), *format, below.clone());
        let found = blocking(move || image_state(&path, format, &below)).await;
        let files = match found {
            Ok(Ok(state)) if state == self.constant => Files::Unchanged,
            Ok(Ok(_)) => Files::Changed("they were written or replaced".to_owned()),
            Ok(Err(error)) if error.kind() == io::ErrorKind::TimedOut => Files::Unknown,
            Ok(Err(error)) if error.kind() == io::ErrorKind::NotFound => {
                Files::Changed(format!("one of them was renamed or removed ({error})"))
            }
            Ok(Err(error)) => Files::Changed(error.to_string()),
            Err(_) => Files::Unknown,
        };
        (self, files)
    }
}

/// State of the files of a parent's disk.
#[derive(Debug, PartialEq, Eq)]
enum Files {
    /// The files are as they were when the parent's disk was opened.
    Unchanged,
    /// The files have changed. The text describes the change.
    Changed(String),
    /// The state is unknown, because the filesystem of the files hangs.
    Unknown,
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
    /// Checks the parents of clones every few seconds, until the future is dropped.
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
        let mut all: JoinSet<_> = looks.into_iter().map(Look::compare).collect();
        while let Some(found) = all.join_next().await {
            if let Ok((look, Files::Changed(what))) = found {
                self.end_sharing(&look, &what);
            }
        }
    }

    /// Compares the files of a parent because the shard of the parent's disk requires a check.
    /// Tells the shard when the files are known to be unchanged.
    pub(in crate::services) async fn check_parent(self, parent: DiskId, check: u64) {
        loop {
            let (look, shard) = {
                let inner = self.registry.inner();
                let Some(disk) = inner.disks.values().find(|disk| disk.id == parent) else { return };
                let (Ok(shard), Some(_)) = (disk.shard(), &disk.constant) else { return };
                (Look::of(disk), shard)
            };
            // A snapshot has no files that can change.
            let Some(look) = look else { return shard.parent_checked(parent, check) };
            match look.compare().await {
                (_, Files::Unchanged) => return shard.parent_checked(parent, check),
                (look, Files::Changed(what)) => return self.end_sharing(&look, &what),
                (_, Files::Unknown) => tokio::time::sleep(LOOK_EVERY).await,
            }
        }
    }

    /// Ends the use of a parent whose files have changed.
    fn end_sharing(&self, look: &Look, what: &str) {
        let mut inner = self.registry.inner();
        let Ok(disk) = inner.disk_mut(&look.name) else { return };
        if disk.id != look.id || disk.constant.as_ref() != Some(&look.constant) {
            return;
        }
        disk.constant = None;
        drop(inner);
        tracing::error!(
            "disk {}: a golden image must not change while clones use it, and its files did: {what}. \
             From now on each clone reads them itself. The changes can damage the filesystems of the clones",
            look.name
        );
        self.link_parents();
    }
}
