//! The time that requests of a disk wait for its backing, changed while the disk is served.

use std::time::Duration;

use hob_control::{BackingTimeout, BackingTimeoutChange, DiskChanged, DiskPatch};
use hob_storage::backing::WAIT_FOREVER;

use super::Disks;
use crate::api_error::ApiError;
use crate::services::registry::Inner;

impl Disks {
    /// Changes the settings of a disk.
    pub(crate) async fn disk_patch(&self, disk: String, patch: DiskPatch) -> Result<DiskChanged, ApiError> {
        let service = self.clone();
        self.tasks.run("disk set", disk.clone(), async move { service.patch_disk(&disk, patch).await }).await
    }

    async fn patch_disk(&self, name: &str, patch: DiskPatch) -> Result<DiskChanged, ApiError> {
        if patch == DiskPatch::default() {
            return Err(ApiError::invalid(format!("disk {name}: the request names no setting"))
                .hint("name one, for example --backing-timeout 2m or --backing-timeout forever"));
        }
        let guard = self.registry.guard_disk_for_command(name, "changed").await?;
        match patch.locked {
            Some(true) => self.lock_backing(name).await?,
            Some(false) => self.unlock_backing(name).await?,
            None => {}
        }
        match patch.backing_timeout {
            Some(BackingTimeoutChange::Default) => self.set_backing_timeout(name, None)?,
            Some(BackingTimeoutChange::Set(timeout)) => self.set_backing_timeout(name, Some(timeout))?,
            None => {}
        }
        self.pools.finish_disk(name, guard, Vec::new()).await
    }

    fn set_backing_timeout(&self, name: &str, timeout: Option<BackingTimeout>) -> Result<(), ApiError> {
        let (shard, id) = {
            let mut inner = self.registry.inner();
            let disk = inner.disk_mut(name)?;
            disk.wanted.backing_timeout = timeout;
            (disk.shard().ok(), disk.id)
        };
        if let Some(shard) = shard {
            shard.set_wait_max(id, self.wait_max_of(timeout));
        }
        Ok(())
    }

    /// Returns how long requests of a disk wait for its backing: the disk's own limit, or the
    /// daemon's if the disk has none.
    pub(super) fn wait_max_of(&self, own: Option<BackingTimeout>) -> Duration {
        own.map_or(self.backing_options.wait_max, wait_max)
    }
}

impl Inner {
    /// Returns the backing timeout in effect for a disk. `own` is the disk's own setting, if it has
    /// one.
    pub(in crate::services) fn backing_timeout_in_effect(
        &self,
        own: Option<BackingTimeout>,
    ) -> BackingTimeout {
        own.unwrap_or(match self.wait_max {
            WAIT_FOREVER => BackingTimeout::Forever,
            limit => BackingTimeout::Limit(limit),
        })
    }
}

/// Converts a limit of the API into the duration that the storage crate takes.
pub(crate) fn wait_max(timeout: BackingTimeout) -> Duration {
    match timeout {
        BackingTimeout::Limit(limit) => limit,
        BackingTimeout::Forever => WAIT_FOREVER,
    }
}
