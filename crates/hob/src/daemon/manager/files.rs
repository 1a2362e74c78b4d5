//! Disks as files: mounted when a disk comes online, unmounted before it goes.
//!
//! A disk that is to be a file and cannot be is refused where it is added. From then on it is served without the file where the file
//! cannot be mounted (a disk has other ways in), says why, and is tried again every few seconds.
//!
//! A file that somebody has open keeps its disk: removing the disk is refused. The end of the daemon waits for nobody; the file goes from its path,
//! and who has it open gets errors.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use super::flash;
use super::refusal::{Kind, Refusal};
use super::{Life, Manager};
use crate::daemon::mount::{Mount, MountError, check_path, clear_stale};

/// How long the end of the daemon waits for what programs have written to a mapped file.
const UNMOUNT_MAX: Duration = Duration::from_secs(10);

impl Manager {
    /// Can a disk be that file?
    pub(super) fn check_file(&self, path: &str) -> Result<(), Refusal> {
        check_path(path)
            .map_err(|what| Refusal::invalid(format!("{path} cannot be a disk's file: {what}")))?;
        let inner = self.inner();
        match inner.disks.values().find(|disk| disk.wanted.fuse.as_deref() == Some(path)) {
            Some(disk) => Err(Refusal::conflict(format!("{path} is the file of {}", disk.wanted.name))),
            None => Ok(()),
        }
    }

    /// Takes away what an earlier daemon left: the disk's backing may lie below.
    pub(super) async fn clear_stale_file(&self, name: &str) -> Result<(), Refusal> {
        let Some(path) = self.inner().disk(name)?.wanted.fuse.clone() else { return Ok(()) };
        if self.has_left_file(name, &path) {
            // It is not stale, and whoever looks at it waits for this daemon.
            return Ok(());
        }
        flash::blocking(move || clear_stale(&PathBuf::from(path))).await
    }

    /// Mounts the file of a disk that is online, if it is to have one and has not. The caller has claimed the disk.
    pub(super) async fn show_file(&self, name: &str) -> Result<(), Refusal> {
        let result = self.mount_file(name).await;
        if let Ok(disk) = self.inner().disk_mut(name) {
            disk.file_reason = result.as_ref().err().map(|refusal| refusal.problem.error.clone());
        }
        result
    }

    async fn mount_file(&self, name: &str) -> Result<(), Refusal> {
        let (path, backing, size, read_only, id, shard) = {
            let inner = self.inner();
            let disk = inner.disk(name)?;
            let Some(path) = disk.wanted.fuse.clone() else { return Ok(()) };
            if disk.mount.is_some() {
                return Ok(());
            }
            let export = self.exports.get(name);
            let read_only = export.map_or(disk.wanted.read_only, |export| export.info.read_only);
            (path, disk.wanted.backing.clone(), disk.size_bytes, read_only, disk.id, disk.shard()?)
        };
        if let Some(file) = self.take_left_file(name, &path, size, read_only).await? {
            shard.attach_file(id, file.device, file.attributes, read_only)?;
            self.inner().disk_mut(name)?.mount = Some(file.mount);
            tracing::info!("{name} is the file {path} still");
            return Ok(());
        }
        let (at, of) = (PathBuf::from(&path), name.to_owned());
        let mounted = flash::blocking(move || Mount::new(&at, &of, size, read_only, &backing)).await?;
        let (mount, connection) = mounted.map_err(refuse)?;
        // Until it is the shard's, whoever looks at the file waits.
        shard.attach_file(id, connection.device, connection.file, read_only)?;
        self.inner().disk_mut(name)?.mount = Some(mount);
        tracing::info!("{name} is the file {path}");
        Ok(())
    }

    /// Tries again to mount a file that could not be mounted.
    pub(super) async fn show_file_again(self: Arc<Self>, name: String) {
        let Ok(_claim) = self.claim_disk(&name, "mounted") else { return };
        let before = self.inner().disk(&name).ok().and_then(|disk| disk.file_reason.clone());
        if let Err(refusal) = self.show_file(&name).await
            && before.as_ref() != Some(&refusal.problem.error)
        {
            tracing::error!("{name} is no file: {refusal}");
        }
    }

    /// Disks that are online and should be files, and are not.
    pub(super) fn without_file(&self) -> Vec<String> {
        let inner = self.inner();
        let is_without = |disk: &&super::DiskEntry| {
            matches!(disk.life, Life::Online(_)) && disk.file_reason.is_some() && disk.busy.is_none()
        };
        inner.disks.values().filter(is_without).map(|disk| disk.wanted.name.clone()).collect()
    }

    /// Unmounts a disk's file, unless it is open.
    pub(super) async fn hide_file(&self, name: &str) -> Result<(), Refusal> {
        let Some(mut mount) = self.inner().disk_mut(name)?.mount.take() else { return Ok(()) };
        let (mount, result) = flash::blocking(move || {
            let result = mount.unmount();
            (mount, result)
        })
        .await?;
        if let Err(error) = result {
            self.inner().disk_mut(name)?.mount = Some(mount);
            return Err(refuse(error));
        }
        Ok(())
    }

    /// Unmounts a disk's file when the disk or the daemon ends, whoever has it open.
    pub(super) async fn hide_file_at_end(&self, name: &str) {
        let Some(mut mount) = self.inner().disk_mut(name).ok().and_then(|disk| disk.mount.take()) else {
            return;
        };
        let of = name.to_owned();
        let unmount = flash::blocking(move || {
            if let Err(error) = mount.unmount() {
                tracing::warn!("{of}: {error}; whoever has it open gets errors from now on");
            }
            // What could not be unmounted is detached.
            drop(mount);
        });
        if tokio::time::timeout(UNMOUNT_MAX, unmount).await.is_err() {
            tracing::warn!("the file of {name} was not unmounted within {} s", UNMOUNT_MAX.as_secs());
        }
    }

    /// The same for all of them.
    pub(super) async fn hide_files_at_end(&self) {
        // Those whose disks have never come.
        drop(self.leave_left_files());
        let names: Vec<String> = {
            let inner = self.inner();
            let mounted = inner.disks.values().filter(|disk| disk.mount.is_some());
            mounted.map(|disk| disk.wanted.name.clone()).collect()
        };
        for name in names {
            self.hide_file_at_end(&name).await;
        }
    }
}

/// Which reaction an error asks for.
fn refuse(error: MountError) -> Refusal {
    let kind = match error {
        MountError::Unfit { .. } => Kind::Invalid,
        MountError::InUse { .. } => Kind::Conflict,
        MountError::System { .. } => Kind::Failed,
    };
    let refusal = Refusal { kind, problem: hob_control::Problem::new(error.to_string()) };
    match error {
        MountError::InUse { path, .. } => refusal.hint(format!(
            "'fuser -vm {path}' and 'losetup -a' tell who has it; 'findmnt {path}' what is mounted",
            path = path.display()
        )),
        _ => refusal,
    }
}
