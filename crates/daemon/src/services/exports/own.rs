//! Changes of the vhost-user socket and of the file of a disk's own export, while the disk is
//! served.
//!
//! The new socket exists before the old one is removed. A socket to which a guest is connected and
//! a file that a program has open stay, and the change is refused. The caller holds the disk's
//! operation guard and saves the settings.

use super::ExportService;
use super::additional::open_gateway;
use crate::api_error::ApiError;
use crate::services::flash;
use crate::vhost_user::{Failing, check_path};

impl ExportService {
    /// Gives a disk another vhost-user socket; `None` removes the present socket. The socket of an
    /// offline disk is created when the disk comes online.
    pub(in crate::services) async fn set_socket(
        &self,
        disk: &str,
        path: Option<&str>,
    ) -> Result<(), ApiError> {
        let before = self.registry.inner().disk(disk)?.wanted.vhost_user.clone();
        if before.as_deref() == path {
            return Ok(());
        }
        let gateway = match (path, self.table.get(disk)) {
            (Some(path), Some(own)) => {
                let opened = open_gateway(self.socket_at(path), disk, &own, Failing::Refuse).await;
                let cannot = |error: std::io::Error| {
                    ApiError::failed(format!("{disk}: cannot open the vhost-user socket {path}: {error}"))
                };
                Some(opened.map_err(cannot)?)
            }
            _ => None,
        };
        let (table, of) = (self.table.clone(), disk.to_owned());
        if !flash::blocking(move || table.replace_vhost_user(&of, gateway)).await? {
            let socket = before.unwrap_or_default();
            return Err(ApiError::conflict(format!(
                "{disk}: a guest is connected to the vhost-user socket {socket}, which stays"
            ))
            .hint("stop the guest, and repeat the change"));
        }
        match path {
            Some(path) => tracing::info!("disk {disk}: its vhost-user socket is {path} now"),
            None => tracing::info!("disk {disk}: its vhost-user socket is removed"),
        }
        self.registry.inner().disk_mut(disk)?.wanted.vhost_user = path.map(str::to_owned);
        Ok(())
    }

    /// Mounts a disk as another file; `None` removes the file. The file of an offline disk is
    /// mounted when the disk comes online. If the new file cannot be mounted, the disk keeps the
    /// present file.
    pub(in crate::services) async fn set_file(&self, disk: &str, path: Option<&str>) -> Result<(), ApiError> {
        let before = self.registry.inner().disk(disk)?.wanted.fuse.clone();
        if before.as_deref() == path {
            return Ok(());
        }
        if let Some(path) = path {
            self.check_file(path)?;
        }
        self.check_no_left_file(disk, |export| export == disk)?;
        self.hide_export(disk, disk).await?;
        self.note_file(disk, path)?;
        let (Some(path), Some(_)) = (path, self.table.get(disk)) else { return Ok(()) };
        let shown = self.show_export(disk, disk, path).await;
        if shown.is_err() {
            self.note_file(disk, before.as_deref())?;
            if let Some(before) = &before
                && let Err(error) = self.show_export(disk, disk, before).await
            {
                tracing::error!("disk {disk}: its file {before} is missing: {error}");
            }
        }
        shown
    }

    /// Records the path at which hob mounts the disk's own export as a file; `None` for no file.
    fn note_file(&self, disk: &str, path: Option<&str>) -> Result<(), ApiError> {
        let mut inner = self.registry.inner();
        let entry = inner.disk_mut(disk)?;
        entry.wanted.fuse = path.map(str::to_owned);
        entry.files.remove(disk);
        Ok(())
    }

    /// Checks the path of a new vhost-user socket, or of a new file.
    pub(in crate::services) fn check_paths(
        &self,
        disk: &str,
        socket: Option<&str>,
        file: Option<&str>,
    ) -> Result<(), ApiError> {
        if let Some(path) = socket {
            check_path(path).map_err(ApiError::invalid)?;
        }
        let present = self.registry.inner().disk(disk)?.wanted.fuse.clone();
        match file.filter(|path| present.as_deref() != Some(*path)) {
            Some(path) => self.check_file(path),
            None => Ok(()),
        }
    }
}
