//! Changes of a disk's settings and exports while it is served (`hob disk set`, `hob export`, and
//! hob.toml).
//!
//! The access and the datastore are fixed while a disk is open. A change of the access or the
//! datastore closes the disk and opens it again ([`reopening`](super::reopening)).

use hob_control::{BackingTimeoutChange, DiskChanged, DiskPatch, Export, OnClients, Size, check_name};

use super::Disks;
use super::reopening::OpenSettings;
use crate::api_error::ApiError;
use crate::stripe;

/// Whether a change of settings closes the disk and opens it again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Reopening {
    Needed,
    NotNeeded,
}

impl Disks {
    pub(crate) async fn disk_patch(&self, disk: String, patch: DiskPatch) -> Result<DiskChanged, ApiError> {
        let service = self.clone();
        self.tasks.run("disk set", disk.clone(), async move { service.patch_disk(&disk, patch).await }).await
    }

    async fn patch_disk(&self, name: &str, patch: DiskPatch) -> Result<DiskChanged, ApiError> {
        check_not_empty(name, &patch)?;
        let guard = self.registry.guard_disk_for_command(name, "changed").await?;
        match self.change_settings(name, patch).await {
            Ok(notes) => self.pools.finish_disk(name, guard, notes).await,
            Err(error) => {
                drop(guard);
                // Settings that were changed before the failure stay changed.
                if let Err(unsaved) = self.registry.save().await {
                    tracing::warn!("disk {name}: {unsaved}");
                }
                Err(error)
            }
        }
    }

    /// Checks the whole request, and then makes the changes. The caller holds the disk's operation
    /// guard.
    async fn change_settings(&self, name: &str, patch: DiskPatch) -> Result<Vec<String>, ApiError> {
        self.check_patch(name, &patch)?;
        let changes_opening = patch.read_only.is_some() || patch.datastore.is_some();
        let wanted = self.open_settings(name, &patch)?;
        let DiskPatch { backing_timeout, stripe, locked, device, vhost_user, fuse, .. } = patch;
        let (socket, file) = (vhost_user.as_deref().and_then(set_value), fuse.as_deref().and_then(set_value));
        match locked {
            Some(true) => self.lock_backing(name).await?,
            Some(false) => self.unlock_backing(name).await?,
            None => {}
        }
        match backing_timeout {
            Some(BackingTimeoutChange::Default) => self.set_backing_timeout(name, None)?,
            Some(BackingTimeoutChange::Set(timeout)) => self.set_backing_timeout(name, Some(timeout))?,
            None => {}
        }
        let mut notes = Vec::new();
        if backing_timeout.is_some() {
            notes.extend(self.registry.inner().disk(name)?.wanted.backing_timeout_note());
        }
        if let Some(size) = stripe {
            self.set_stripe(name, chosen_stripe(size)?)?;
        }
        if vhost_user.is_some() {
            self.exports.set_socket(name, socket).await?;
        }
        if fuse.is_some() {
            self.exports.set_file(name, file).await?;
        }
        if changes_opening {
            notes.extend(self.reopen_with(name, &wanted).await?);
        }
        if let Some(wanted) = device {
            self.set_device(name, wanted).await?;
        }
        Ok(notes)
    }

    /// Offers a disk to clients under another name.
    pub(crate) async fn export_add(&self, disk: String, export: Export) -> Result<DiskChanged, ApiError> {
        let service = self.clone();
        self.tasks
            .run("export add", disk.clone(), async move {
                service.exports.add(&disk, export).await?;
                service.observe.disk_changed(&disk, Vec::new())
            })
            .await
    }

    /// Removes an export and closes the connections of its clients.
    pub(crate) async fn export_remove(&self, disk: String, export: String) -> Result<DiskChanged, ApiError> {
        let service = self.clone();
        self.tasks
            .run("export remove", disk.clone(), async move {
                service.exports.remove(&disk, export).await?;
                service.observe.disk_changed(&disk, Vec::new())
            })
            .await
    }

    /// Refuses a request with no or invalid settings, or for an unknown disk. Changes nothing.
    pub(super) fn check_patch(&self, name: &str, patch: &DiskPatch) -> Result<(), ApiError> {
        check_not_empty(name, patch)?;
        patch.stripe.map(chosen_stripe).transpose()?;
        if let Some(store) = patch.datastore.as_deref().and_then(set_value) {
            check_name(store).map_err(|error| {
                ApiError::invalid(format!("'{store}' cannot be a datastore's name: {error}"))
            })?;
        }
        let socket = patch.vhost_user.as_deref().and_then(set_value);
        self.exports.check_paths(name, socket, patch.fuse.as_deref().and_then(set_value))
    }

    /// Refuses a request that closes the disk and opens it again, if this is not possible now.
    /// Changes nothing.
    pub(super) async fn check_open_settings(
        &self,
        name: &str,
        patch: &DiskPatch,
    ) -> Result<Reopening, ApiError> {
        let wanted = self.open_settings(name, patch)?;
        let before = OpenSettings::of(&self.registry.inner().disk(name)?.wanted);
        if before == wanted {
            return Ok(Reopening::NotNeeded);
        }
        self.check_reopen(name, &before, &wanted).await?;
        Ok(Reopening::Needed)
    }

    /// Returns the settings that are fixed while the disk is open, as they are after the change.
    fn open_settings(&self, name: &str, patch: &DiskPatch) -> Result<OpenSettings, ApiError> {
        let mut wanted = OpenSettings::of(&self.registry.inner().disk(name)?.wanted);
        wanted.read_only = patch.read_only.unwrap_or(wanted.read_only);
        if let Some(store) = &patch.datastore {
            wanted.datastore = set_value(store).map(str::to_owned);
        }
        Ok(wanted)
    }

    fn set_stripe(&self, name: &str, chosen: Option<Size>) -> Result<(), ApiError> {
        let mut inner = self.registry.inner();
        let disk = inner.disk_mut(name)?;
        disk.wanted.stripe = chosen;
        if let (Ok(shard), Some(measure)) = (disk.shard(), &disk.measure) {
            shard.set_stripe(disk.id, stripe::for_shard(chosen, &measure.info));
        }
        Ok(())
    }

    async fn set_device(&self, name: &str, wanted: bool) -> Result<(), ApiError> {
        if self.registry.inner().disk(name)?.wanted.device == wanted {
            return Ok(());
        }
        if !wanted {
            self.exports.hide_device(name, OnClients::Refuse).await?;
            self.registry.inner().disk_mut(name)?.wanted.device = false;
            return Ok(());
        }
        self.exports.clear_stale_device(name).await?;
        self.registry.inner().disk_mut(name)?.wanted.device = true;
        let shown = self.exports.show_device(name).await;
        if shown.is_err() {
            let mut inner = self.registry.inner();
            let disk = inner.disk_mut(name)?;
            (disk.wanted.device, disk.device) = (false, Default::default());
        }
        shown
    }
}

/// Refuses a request without a setting.
fn check_not_empty(name: &str, patch: &DiskPatch) -> Result<(), ApiError> {
    if *patch != DiskPatch::default() {
        return Ok(());
    }
    Err(ApiError::invalid(format!("disk {name}: the request names no setting"))
        .hint("name one, for example --backing-timeout 2m or --device on"))
}

/// Returns the stripe size that an operator has chosen; `None` for the detected size.
fn chosen_stripe(size: Size) -> Result<Option<Size>, ApiError> {
    stripe::chosen(Some(size)).map_err(ApiError::invalid)
}

/// Returns the new value of a setting; `None` for an empty text, which removes the setting.
fn set_value(text: &str) -> Option<&str> {
    Some(text).filter(|text| !text.is_empty())
}
