//! Disks as block devices of this host ([`host_device`](crate::host_device)): created when a disk
//! comes online, removed with the disk.
//!
//! The kernel's connection is one of the shard's NBD connections. A device stays when the daemon
//! ends or the disk goes offline: its requests wait until the disk is served again, for an hour at
//! most. If the connection is lost, the task that retries failed mounts of files also connects the
//! device again.

use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::{Arc, Weak};
use std::time::Duration;

use hob_control::OnClients;
use hob_nbd::server::handshake::Negotiated;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use super::ExportService;
use crate::api_error::{ApiError, ErrorKind, Result, conflict};
use crate::exports::Export;
use crate::host_device::{self, DeviceError, HostDevice, path_of};
use crate::services::flash;
use crate::services::registry::DiskEntry;
use crate::shard_api::Transport;

/// Maximum time to look for programs that use a device. A device whose disk is offline may not
/// answer.
const USERS_MAX: Duration = Duration::from_secs(10);

/// State of a disk's block device.
#[derive(Debug, Default)]
pub(in crate::services) struct DeviceEntry {
    /// Permit of the kernel's connection to the shard. The permit is dropped when the connection
    /// ends.
    connection: Weak<OwnedSemaphorePermit>,
    /// Reason why the device is missing or not connected.
    reason: Option<String>,
}

impl DiskEntry {
    /// Returns the path of the disk's device, if it should have one.
    pub(in crate::services) fn device_path(&self) -> Option<String> {
        self.wanted.device.then(|| path_of(&self.wanted.name).display().to_string())
    }

    /// Returns why the disk's device is missing.
    pub(in crate::services) fn device_reason(&self) -> Option<String> {
        self.device.reason.clone()
    }

    /// Returns true if the disk should have a block device, and this process has no open connection
    /// to the kernel for it. After an upgrade, the kernel may still have an earlier connection.
    pub(super) fn lacks_device(&self) -> bool {
        self.wanted.device && self.device.connection.strong_count() == 0
    }
}

impl ExportService {
    /// Creates the device of an online disk, or connects an existing device again. Does nothing for
    /// a disk without a device.
    pub(in crate::services) async fn show_device(&self, name: &str) -> Result<()> {
        let result = self.connect_device(name).await;
        if let Ok(disk) = self.registry.inner().disk_mut(name) {
            disk.device.reason = result.as_ref().err().map(|error| error.problem.error.clone());
        }
        result
    }

    async fn connect_device(&self, name: &str) -> Result<()> {
        if !self.registry.inner().disk(name)?.lacks_device() {
            return Ok(());
        }
        // The device of an offline disk is created when the disk comes online.
        let Some(export) = self.table.get(name) else { return Ok(()) };
        let negotiated = Negotiated {
            export: name.to_owned(),
            info: export.info.clone(),
            structured_replies: false,
            base_allocation: false,
            contexts: Vec::new(),
        };
        let device = HostDevice {
            name: name.to_owned(),
            identifier: self.device_identifier(name)?,
            size_bytes: export.info.size_bytes,
            block_bytes: export.info.block_size_min,
            flags: negotiated.transmission_flags().0,
        };
        let of = device.clone();
        let connected = flash::blocking(move || host_device::connect(&of)).await?;
        // The kernel may still have the connection that an upgrade handed over.
        if let Some(socket) = connected.map_err(refuse)? {
            self.attach_kernel(name, export, negotiated, socket)?;
        }
        // The disk may have grown while no daemon ran.
        flash::blocking(move || host_device::resize(&device)).await?.map_err(refuse)
    }

    /// Attaches the kernel's connection to the shard of a disk.
    fn attach_kernel(
        &self,
        name: &str,
        export: Export,
        negotiated: Negotiated,
        socket: OwnedFd,
    ) -> Result<()> {
        let permit = Arc::new(Semaphore::new(1)).try_acquire_owned().expect("the semaphore is new");
        let permit = Arc::new(permit);
        let connection = Arc::downgrade(&permit);
        let attachment = (Transport::Kernel, permit);
        export.shard.attach(export.disk, socket, negotiated, Vec::new(), export.promote, attachment)?;
        self.registry.inner().disk_mut(name)?.device.connection = connection;
        tracing::info!("disk {name}: connected to the block device {}", path_of(name).display());
        Ok(())
    }

    /// Returns the identifier by which the kernel knows the disk's device.
    fn device_identifier(&self, name: &str) -> Result<String> {
        let state = self.bitmaps.as_deref().and_then(Path::parent).ok_or_else(|| {
            conflict!("disk {name} cannot be a block device: this daemon keeps no state")
                .hint("use 'hob daemon' with a state directory")
        })?;
        Ok(host_device::identifier_of(state, name))
    }

    /// Removes a device that an earlier disk of this name left behind. Fails if a program uses the
    /// device.
    pub(in crate::services) async fn clear_stale_device(&self, name: &str) -> Result<()> {
        let Ok(identifier) = self.device_identifier(name) else { return Ok(()) };
        let of = name.to_owned();
        match flash::blocking(move || host_device::remove_unused(&of, &identifier)).await? {
            Err(error @ DeviceError::InUse { .. }) => {
                Err(conflict!("an earlier disk {name} left its block device: {error}")
                    .hint("end its users, or add the disk under another name"))
            }
            removed => removed.map_err(refuse),
        }
    }

    /// Removes a disk's device. Fails if programs use the device, unless `users` allows to
    /// disconnect them.
    pub(in crate::services) async fn hide_device(&self, name: &str, users: OnClients) -> Result<()> {
        if !self.registry.inner().disk(name)?.wanted.device {
            return Ok(());
        }
        let (of, identifier) = (name.to_owned(), self.device_identifier(name)?);
        let removal = flash::blocking(move || match users {
            OnClients::Refuse => host_device::remove_unused(&of, &identifier),
            OnClients::Disconnect => host_device::remove_used(&of, &identifier),
        });
        let removed = tokio::time::timeout(USERS_MAX, removal).await.map_err(|_| {
            conflict!("{} did not answer within {} s", path_of(name).display(), USERS_MAX.as_secs())
                .hint("pass --force to remove it all the same; its users then get errors")
        })??;
        removed.map_err(refuse)?;
        self.registry.inner().disk_mut(name)?.device = DeviceEntry::default();
        Ok(())
    }

    /// Removes the device of a disk that this host no longer serves, even if it is in use.
    pub(in crate::services) async fn drop_device(&self, name: &str) {
        if let Err(error) = self.hide_device(name, OnClients::Disconnect).await {
            tracing::warn!("disk {name}: cannot remove its block device: {error}");
        }
    }

    /// Changes the size of a disk's device after the disk has grown.
    pub(in crate::services) async fn grow_device(&self, name: &str, size_bytes: u64) -> Result<()> {
        if !self.registry.inner().disk(name)?.wanted.device {
            return Ok(());
        }
        let device = HostDevice {
            name: name.to_owned(),
            identifier: self.device_identifier(name)?,
            size_bytes,
            block_bytes: 0,
            flags: 0,
        };
        flash::blocking(move || host_device::resize(&device)).await?.map_err(refuse)
    }
}

fn refuse(error: DeviceError) -> ApiError {
    let in_use = matches!(error, DeviceError::InUse { .. });
    let kind = if in_use { ErrorKind::Conflict } else { ErrorKind::Failed };
    let error = ApiError { kind, ..ApiError::failed(error.to_string()) };
    if in_use { error.hint("end its users; --force of 'hob disk remove' disconnects them") } else { error }
}
