//! Adds disks: checks the request, creates the entry of the disk, and removes the entry again if
//! the disk cannot be served.

use hob_control::{DiskAdd, DiskChanged, Size, check_name};
use hob_storage::device_name::DeviceName;
use hob_storage::pool::OwnerId;

use super::Disks;
use super::image::image_asked;
use super::opening::Open;
use crate::api_error::{ApiError, Result, conflict, invalid};
use crate::services::flash;
use crate::services::registry::{ADDING, DISKS_MAX, DiskEntry, OperationGuard};
use crate::state::{DiskState, ShareSpec};
use crate::stripe;
use crate::vhost_user::check_path;

/// Maximum length of a backing specification, in bytes.
pub(in crate::services) const BACKING_CHARS_MAX: usize = 4096;

/// Returns the error for a backing specification that is empty or longer than
/// [`BACKING_CHARS_MAX`].
pub(in crate::services) fn no_backing(backing: &str) -> ApiError {
    match backing.len() {
        0 => ApiError::invalid("a disk needs a backing: a path or an nbd:// URI"),
        bytes => invalid!(
            "the path or URI of the backing has {bytes} bytes; hob accepts at most {BACKING_CHARS_MAX} bytes"
        ),
    }
}

impl Disks {
    pub(crate) async fn disk_add(&self, add: DiskAdd) -> Result<DiskChanged> {
        let service = self.clone();
        self.tasks.run("disk add", add.name.clone(), async move { service.add(add).await }).await
    }

    /// Adds a disk and serves it. Waits for the result without a time limit, unlike `disk_add`.
    pub(in crate::services) async fn add(&self, add: DiskAdd) -> Result<DiskChanged> {
        let name = add.name.clone();
        check_name(&name).map_err(|error| invalid!("'{name}' cannot be a disk's name: {error}"))?;
        if add.backing.is_empty() || add.backing.len() > BACKING_CHARS_MAX {
            return Err(no_backing(&add.backing));
        }
        if let Some(datastore) = &add.datastore {
            check_name(datastore)
                .map_err(|error| invalid!("'{datastore}' cannot be a datastore's name: {error}"))?;
        }
        if let Some(path) = &add.fuse {
            self.exports.check_file(path)?;
        }
        if let Some(path) = &add.vhost_user {
            check_path(path).map_err(ApiError::invalid)?;
        }
        let share_parent = share_of(add.share_parent, add.parent_cache)?;
        let image = Some(image_asked(&add.backing, add.format.as_deref())?);
        let path = std::path::PathBuf::from(&add.backing);
        let wanted = DiskState {
            share_parent,
            image,
            backing_timeout: add.backing_timeout,
            stripe: stripe::chosen(add.stripe).map_err(ApiError::invalid)?,
            datastore: add.datastore,
            fuse: add.fuse,
            device: add.device,
            vhost_user: add.vhost_user,
            unlocked: add.unlocked,
            ..DiskState::new(name.clone(), add.backing, add.read_only)
        };
        let cache = match &add.adopt_cache {
            Some(owner) => Some(self.cache_to_adopt(&wanted, owner).await?),
            None => None,
        };
        let about_timeout = wanted.backing_timeout_note();
        let mut changed = self.add_state(DiskState { cache, ..wanted }).await?;
        changed.notes.extend(about_timeout);
        changed.notes.extend(flash::blocking(move || DeviceName::of(&path).note(&path)).await?);
        Ok(changed)
    }

    /// Adds a disk with these settings and serves it. The settings may name an existing persistent
    /// cache.
    pub(in crate::services) async fn add_state(&self, wanted: DiskState) -> Result<DiskChanged> {
        let name = wanted.name.clone();
        let has_device = wanted.device;
        let guard = self
            .enter(wanted, Some(ADDING))?
            .ok_or_else(|| ApiError::failed("internal error: the disk has no operation guard"))?;
        if has_device && let Err(error) = self.exports.clear_stale_device(&name).await {
            self.drop_arriving(&name).await;
            return Err(error);
        }
        let notes = match self.open_by_owner(&name, Open::WithCache).await {
            Ok((notes, _)) => notes,
            // The disk stays added, although it is not served now. It comes online when the other
            // host releases it.
            Err(error) if self.registry.is_served_elsewhere(&name) => {
                self.note_offline(&name, &error);
                self.registry.inner().disks_removed.retain(|removed| *removed != name);
                return self
                    .pools
                    .finish_disk(&name, guard, vec![format!("the disk is not served on this host: {error}")])
                    .await;
            }
            Err(error) => {
                self.drop_arriving(&name).await;
                return Err(error);
            }
        };
        if let Err(error) = self.exports.show_file(&name).await {
            self.take_back(&name).await;
            return Err(error);
        }
        self.registry.inner().disks_removed.retain(|removed| *removed != name);
        self.pools.finish_disk(&name, guard, notes).await
    }

    /// Creates the entry of a disk that is not open yet. Takes its operation guard if `busy` names
    /// an operation.
    pub(in crate::services) fn enter(
        &self,
        wanted: DiskState,
        busy: Option<&'static str>,
    ) -> Result<Option<OperationGuard>> {
        let name = wanted.name.clone();
        let mut inner = self.registry.inner();
        inner.check_stays()?;
        inner.check_export_name(&name)?;
        wanted.exports.iter().try_for_each(|export| inner.check_export_name(&export.name))?;
        if let Some(disk) = inner.disk_with_file(&wanted.backing) {
            return Err(conflict!(
                "cannot add a disk on {}: hob serves the disk {disk} as this file",
                wanted.backing
            )
            .hint(format!("use the backing of {disk}, after removing that disk")));
        }
        if let Some(journal) = wanted.cache.as_ref().and_then(|spec| spec.journal)
            && inner.known_owners().contains(&OwnerId(journal.owner.0))
        {
            return Err(conflict!("the cache {} belongs to another disk", journal.owner));
        }
        if inner.disks.len() >= DISKS_MAX {
            return Err(conflict!("cannot add a disk: hob serves at most {DISKS_MAX} disks"));
        }
        let entry = DiskEntry { id: inner.new_disk_id(), wanted, busy, ..DiskEntry::default() };
        inner.disks.insert(name.clone(), entry);
        drop(inner);
        Ok(busy.map(|_| self.registry.guard_new_disk(&name)))
    }

    /// Removes a disk that was just added, because a later part of the same request failed.
    async fn take_back(&self, name: &str) {
        self.exports.table().remove_disk(name).await;
        // The entry must not unmount a file when it is dropped under the registry's lock.
        self.exports.hide_file_at_end(name).await;
        self.exports.drop_device(name).await;
        if let Ok((shard, id)) = self.registry.shard_of(name)
            && let Err(error) = self.leave_shard(name, &shard, id).await
        {
            tracing::warn!("{name}: {error}");
            // No other disk may get the id.
            self.remove_kept_disk(name, &shard, id);
        }
        self.exports.forget_bitmaps(name).await;
        self.leave_disk(name).await;
        self.drop_arriving(name).await;
    }

    /// Saves a disk that is being added with a persistent cache. The caller does this before
    /// clients may write to the disk, so that the saved state names each cache that has dirty data.
    pub(in crate::services) async fn save_arriving(&self, name: &str) -> Result<()> {
        {
            let mut inner = self.registry.inner();
            let disk = inner.disk_mut(name)?;
            let is_persistent = disk.cache().is_some_and(|spec| spec.journal.is_some());
            if !disk.is_arriving() || !is_persistent {
                return Ok(());
            }
            disk.is_saved_early = true;
        }
        self.registry.save_first().await
    }

    /// Removes the entry of a disk that could not be added. If the disk was to adopt an orphan, the
    /// cache is an orphan again.
    pub(in crate::services) async fn drop_arriving(&self, name: &str) {
        let is_saved = {
            let mut inner = self.registry.inner();
            let Some(disk) = inner.disks.remove(name) else { return };
            if let Some(journal) = disk.cache().and_then(|spec| spec.journal) {
                inner.ended.forget(OwnerId(journal.owner.0));
            }
            disk.is_saved_early
        };
        if is_saved && let Err(error) = self.registry.save().await {
            tracing::error!("disk {name}: it could not be added, but the saved state still has it: {error}");
        }
    }
}

/// Returns the setting to share a clone's parent; `None` if sharing is not requested.
fn share_of(share_parent: bool, cache: Option<Size>) -> Result<Option<ShareSpec>> {
    match (share_parent, cache) {
        (false, Some(_)) => Err(ApiError::invalid(
            "a cache size for the parent is only possible if the disk shares its parent",
        )
        .hint("also pass --share-parent, or set share_parent = true")),
        (false, None) => Ok(None),
        (true, cache) => Ok(Some(ShareSpec { cache, disk: None })),
    }
}
