//! Exports as files. hob mounts them when a disk comes online, and unmounts them before the disk is
//! closed.
//!
//! When a disk or an export is added and its file cannot be mounted, hob refuses the addition.
//! Later failures do not stop the disk: hob serves it without the file, shows the reason, and
//! retries the mount every few seconds.
//!
//! hob reports a file that another program has unmounted, moved or covered, and does not mount the
//! file again by itself: an operator may have unmounted it on purpose, or the host shuts down.
//!
//! A file that a program has open prevents the removal of its disk and its export. When the daemon
//! stops, it does not wait for such a program: the daemon unmounts the file, and the program
//! receives errors.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use hob_control::OnClients;
use hob_engine::io::Promote;

use super::ExportService;
use crate::api_error::{ApiError, ErrorKind, Result, conflict, invalid};
use crate::mount::{Mount, MountError, MountIdentity, MountState, UsedFile, check_path, clear_stale};
use crate::services::flash;
use crate::services::registry::{DiskEntry, DiskPhase, Inner};
use crate::shard_api::FileRights;
use crate::state::DiskState;

/// Maximum time that the daemon, when it stops, waits for writes of programs to mapped files.
const UNMOUNT_MAX: Duration = Duration::from_secs(10);

/// State of an export's file.
#[derive(Debug, Default)]
pub(in crate::services) struct FileEntry {
    /// The mount, while the file is mounted.
    pub(in crate::services) mount: Option<Mount>,
    /// Reason why the file is not mounted.
    pub(in crate::services) reason: Option<String>,
    /// State of the mount when hob last read the table of mounts.
    state: MountState,
}

impl FileEntry {
    /// Records the state of the mount with this identity. Returns true if the state has changed.
    /// Ignores a mount that was replaced by another one.
    pub(in crate::services) fn note_mount_state(
        &mut self,
        identity: &Arc<MountIdentity>,
        state: MountState,
    ) -> bool {
        let is_same = self.mount.as_ref().is_some_and(|mount| Arc::ptr_eq(mount.identity(), identity));
        is_same && std::mem::replace(&mut self.state, state) != self.state
    }
}

impl DiskState {
    /// Returns the FUSE files of a disk as pairs of export name and path. The file of the disk's
    /// own export comes first.
    pub(in crate::services) fn files(&self) -> impl Iterator<Item = (&str, &str)> {
        let own = self.fuse.as_deref().map(|path| (self.name.as_str(), path));
        let further =
            self.exports.iter().filter_map(|export| Some((export.name.as_str(), export.fuse.as_deref()?)));
        own.into_iter().chain(further)
    }
}

impl Inner {
    /// Returns the name of the disk that is served as the file at `path`.
    pub(in crate::services) fn disk_with_file(&self, path: &str) -> Option<&str> {
        let has_it = |disk: &&DiskEntry| disk.wanted.files().any(|(_, file)| file == path);
        self.disks.values().find(has_it).map(|disk| disk.wanted.name.as_str())
    }

    /// Returns the backings of all disks and the devices of all pools.
    fn used_files(&self) -> Vec<UsedFile> {
        let backings = self.disks.values().map(|disk| UsedFile {
            what: format!("the backing of the disk {}", disk.wanted.name),
            path: disk.wanted.backing.as_str().into(),
        });
        let devices = self.pools.iter().flat_map(|(name, pool)| {
            pool.devices.iter().map(move |device| UsedFile {
                what: format!("a device of the pool {name}"),
                path: device.path.clone(),
            })
        });
        backings.chain(devices).collect()
    }
}

impl DiskEntry {
    /// Returns why a file of the disk is not mounted; `None` if all are mounted.
    pub(in crate::services) fn files_reason(&self) -> Option<String> {
        let say = |(export, file): (&String, &FileEntry)| {
            let reason = file.reason.as_ref()?;
            let is_own = *export == self.wanted.name;
            Some(if is_own { reason.clone() } else { format!("export {export}: {reason}") })
        };
        let reasons: Vec<String> = self.files.iter().filter_map(say).collect();
        (!reasons.is_empty()).then(|| reasons.join("; "))
    }

    /// Returns which files of the disk another program has unmounted, moved or covered, and what to
    /// do; `None` if there are none.
    pub(in crate::services) fn displaced_files(&self) -> Option<String> {
        let say = |(export, path): (&str, &str)| {
            let file = self.files.get(export).filter(|file| file.mount.is_some())?;
            let is_own = export == self.wanted.name;
            let named = match is_own {
                true => format!("its file {path}"),
                false => format!("the file {path} of the export {export}"),
            };
            let advice = match &file.state {
                MountState::Moved(to) => format!("rename the directory back, or unmount {}", to.display()),
                MountState::Covered => format!("unmount that file system ('umount {path}')"),
                _ if is_own => format!(
                    "'hob disk set {export} --fuse \"\"' and then 'hob disk set {export} --fuse {path}' \
                     mount it again"
                ),
                _ => "remove the export and add it again to mount the file".to_owned(),
            };
            Some(format!("{}; {advice}", file.state.problem(&named)?))
        };
        let all: Vec<String> = self.wanted.files().filter_map(say).collect();
        (!all.is_empty()).then(|| all.join("; "))
    }

    /// Removes all mounts from the disk's entry and returns them, by export. Dropping a mount
    /// unmounts the file.
    pub(in crate::services) fn take_mounts(&mut self) -> BTreeMap<String, Mount> {
        let take = |(export, file): (&String, &mut FileEntry)| Some((export.clone(), file.mount.take()?));
        self.files.iter_mut().filter_map(take).collect()
    }
}

impl ExportService {
    /// Checks whether an export may use this path as its file.
    pub(in crate::services) fn check_file(&self, path: &str) -> Result<()> {
        check_path(path).map_err(|what| invalid!("{path} cannot be a disk's file: {what}"))?;
        let inner = self.registry.inner();
        let mut files = inner.disks.values().flat_map(|disk| disk.wanted.files());
        match files.find(|(_, known)| *known == path) {
            Some((export, _)) => Err(conflict!("{path} is the file of {export}")),
            None => Ok(()),
        }
    }

    /// Unmounts the files of this disk that an earlier daemon left mounted and no process serves,
    /// because such a mount may hide the disk's backing.
    pub(in crate::services) async fn clear_stale_file(&self, name: &str) -> Result<()> {
        let stale: Vec<PathBuf> = {
            let inner = self.registry.inner();
            let files = inner.disk(name)?.wanted.files();
            // A file inherited from the previous process is not stale: programs that use it wait
            // for this daemon.
            files
                .filter(|(export, path)| !self.has_left_file(export, path))
                .map(|(_, path)| path.into())
                .collect()
        };
        flash::blocking(move || stale.iter().for_each(|path: &PathBuf| clear_stale(path))).await
    }

    /// Mounts all missing files of an online disk, and connects its block device. The caller holds
    /// the disk's operation guard. Tries all files and the device, and returns the first error.
    pub(in crate::services) async fn show_file(&self, name: &str) -> Result<()> {
        let wanted: Vec<(String, String)> = {
            let inner = self.registry.inner();
            let files = inner.disk(name)?.wanted.files();
            files.map(|(export, path)| (export.to_owned(), path.to_owned())).collect()
        };
        let mut first = Ok(());
        for (export, path) in wanted {
            first = first.and(self.show_export(name, &export, &path).await);
        }
        first.and(self.show_device(name).await)
    }

    /// Mounts the file of one export at `path`.
    pub(in crate::services) async fn show_export(&self, name: &str, export: &str, path: &str) -> Result<()> {
        let result = self.mount_file(name, export, path).await;
        if let Ok(disk) = self.registry.inner().disk_mut(name) {
            let file = disk.files.entry(export.to_owned()).or_default();
            file.reason = result.as_ref().err().map(|error| error.problem.error.clone());
        }
        result
    }

    async fn mount_file(&self, name: &str, export: &str, path: &str) -> Result<()> {
        let (used, size, rights, id, shard) = {
            let inner = self.registry.inner();
            let disk = inner.disk(name)?;
            if disk.files.get(export).is_some_and(|file| file.mount.is_some()) {
                return Ok(());
            }
            let rights = self.rights(disk, export);
            (inner.used_files(), disk.size_bytes, rights, disk.id, disk.shard()?)
        };
        let read_only = rights.read_only;
        if let Some(file) = self.take_left_file(export, path, size, read_only).await? {
            shard.attach_file(id, file.device, file.attributes, rights)?;
            self.keep_mount(name, export, file.mount)?;
            tracing::info!("export {export}: its file {path} was taken over from the previous daemon");
            return Ok(());
        }
        let (at, of) = (PathBuf::from(path), export.to_owned());
        let mounted = flash::blocking(move || Mount::new(&at, &of, size, read_only, &used)).await?;
        let (mount, connection) = mounted.map_err(refuse)?;
        // Accesses to the file wait until the shard has the file.
        shard.attach_file(id, connection.device, connection.file, rights)?;
        self.keep_mount(name, export, mount)?;
        tracing::info!("export {export}: mounted as the file {path}");
        Ok(())
    }

    fn keep_mount(&self, name: &str, export: &str, mount: Mount) -> Result<()> {
        let mut inner = self.registry.inner();
        let file = inner.disk_mut(name)?.files.entry(export.to_owned()).or_default();
        (file.mount, file.state) = (Some(mount), MountState::AtPath);
        Ok(())
    }

    /// Returns the access rights of an export's file.
    fn rights(&self, disk: &DiskEntry, export: &str) -> FileRights {
        let spec = disk.wanted.exports.iter().find(|spec| spec.name == export);
        // The backing may be read-only although the export is not.
        let offered = self.table.get(&disk.wanted.name);
        let read_only = disk.wanted.read_only
            || spec.is_some_and(|spec| spec.read_only)
            || offered.is_some_and(|offered| offered.info.read_only);
        let passes_by = spec.is_some_and(|spec| spec.no_promote);
        let promote = if passes_by { Promote::Never } else { Promote::Usual };
        FileRights { export: export.to_owned(), read_only, promote }
    }

    /// Retries to mount files that could not be mounted.
    pub(in crate::services) async fn show_file_again(self, name: String) {
        let Ok(_guard) = self.registry.guard_disk(&name, "mounted") else { return };
        let reasons = |disk: &DiskEntry| (disk.files_reason(), disk.device_reason());
        let reason = || self.registry.inner().disk(&name).ok().map(reasons);
        let before = reason();
        if let Err(error) = self.show_file(&name).await
            && before != reason()
        {
            tracing::error!("disk {name}: its file or block device is missing: {error}");
        }
    }

    /// Returns the online disks that lack a file, or may lack their block device.
    pub(in crate::services) fn without_file(&self) -> Vec<String> {
        let inner = self.registry.inner();
        let is_without = |disk: &&DiskEntry| {
            let lacks_one = disk.files.values().any(|file| file.reason.is_some()) || disk.lacks_device();
            matches!(disk.phase, DiskPhase::Online(_)) && lacks_one && disk.busy.is_none()
        };
        inner.disks.values().filter(is_without).map(|disk| disk.wanted.name.clone()).collect()
    }

    /// Unmounts all files of a disk, unless one of them is in use, and removes its block device.
    /// `device_users` decides what happens if programs use the device.
    pub(in crate::services) async fn hide_file(&self, name: &str, device_users: OnClients) -> Result<()> {
        self.hide_device(name, device_users).await?;
        let exports: Vec<String> = self.registry.inner().disk(name)?.files.keys().cloned().collect();
        for export in exports {
            if let Err(error) = self.hide_export(name, &export).await {
                // The disk stays, and its other files are mounted again.
                let _ = self.show_file(name).await;
                return Err(error);
            }
        }
        Ok(())
    }

    /// Unmounts the file of one export, unless a program has the file open.
    pub(in crate::services) async fn hide_export(&self, name: &str, export: &str) -> Result<()> {
        let mount =
            self.registry.inner().disk_mut(name)?.files.get_mut(export).and_then(|file| file.mount.take());
        let Some(mut mount) = mount else { return Ok(()) };
        let (mount, result) = flash::blocking(move || {
            let result = mount.unmount();
            (mount, result)
        })
        .await?;
        if let Err(error) = result {
            self.keep_mount(name, export, mount)?;
            return Err(refuse(error));
        }
        Ok(())
    }

    /// Unmounts a disk's files when the disk is closed or removed, or when the daemon ends, even if
    /// the files are open.
    pub(in crate::services) async fn hide_file_at_end(&self, name: &str) {
        let mounts = self.registry.inner().disk_mut(name).map(DiskEntry::take_mounts).unwrap_or_default();
        if mounts.is_empty() {
            return;
        }
        let unmount = flash::blocking(move || {
            for (export, mut mount) in mounts {
                if let Err(error) = mount.unmount() {
                    tracing::warn!(
                        "export {export}: {error}; programs that have the file open now get errors"
                    );
                }
                // Dropping the mount detaches the file.
                drop(mount);
            }
        });
        if tokio::time::timeout(UNMOUNT_MAX, unmount).await.is_err() {
            tracing::warn!("the files of {name} were not unmounted within {} s", UNMOUNT_MAX.as_secs());
        }
    }

    /// Unmounts the files of all disks when the daemon ends.
    pub(in crate::services) async fn hide_files_at_end(&self) {
        // Dropping the list also unmounts inherited files whose disks never came online.
        drop(self.leave_left_files());
        let names: Vec<String> = {
            let inner = self.registry.inner();
            let is_file = |disk: &&DiskEntry| disk.files.values().any(|file| file.mount.is_some());
            inner.disks.values().filter(is_file).map(|disk| disk.wanted.name.clone()).collect()
        };
        for name in names {
            self.hide_file_at_end(&name).await;
        }
    }
}

fn refuse(error: MountError) -> ApiError {
    let kind = match error {
        MountError::Unfit { .. } => ErrorKind::Invalid,
        MountError::InUse { .. } => ErrorKind::Conflict,
        MountError::System { .. } => ErrorKind::Failed,
    };
    let api_error = ApiError { kind, problem: hob_control::Problem::new(error.to_string()) };
    match error {
        MountError::InUse { path, .. } => api_error.hint(format!(
            "'fuser -vm {path}' and 'losetup -a' show the programs that use the file; 'findmnt {path}' shows the mount",
            path = path.display()
        )),
        _ => api_error,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The table of mounts may be older than a mount that has replaced the one it describes.
    #[test]
    fn the_state_of_a_replaced_mount_is_ignored() {
        let dir = tempfile::tempdir().unwrap();
        let mount = || Mount::left(dir.path().join("vm.img"), false);
        let mut file = FileEntry { mount: Some(mount()), ..FileEntry::default() };
        let first = Arc::clone(file.mount.as_ref().unwrap().identity());
        assert!(file.note_mount_state(&first, MountState::Unmounted));
        assert!(!file.note_mount_state(&first, MountState::Unmounted), "it is logged once");
        assert!(file.note_mount_state(&first, MountState::AtPath));
        file.mount = Some(mount());
        assert!(!file.note_mount_state(&first, MountState::Unmounted));
        file.mount = None;
        assert!(!file.note_mount_state(&first, MountState::Unmounted));
        assert_eq!(file.state, MountState::AtPath);
    }
}
