//! How long requests of a disk wait for its backing, changed while the disk is served.

use std::time::Duration;

use hob_control::{BackingTimeout, DiskChanged, DiskPatch};
use hob_storage::backing::WAIT_FOREVER;

use super::Disks;
use crate::daemon::manager::api_error::ApiError;

impl Disks {
    /// Changes a disk's own settings.
    pub(crate) async fn disk_patch(&self, disk: String, patch: DiskPatch) -> Result<DiskChanged, ApiError> {
        let service = self.clone();
        self.tasks.run("disk set", disk.clone(), async move { service.patch_disk(&disk, patch).await }).await
    }

    async fn patch_disk(&self, name: &str, patch: DiskPatch) -> Result<DiskChanged, ApiError> {
        let Some(timeout) = patch.backing_timeout else {
            return Err(ApiError::invalid(format!("disk {name}: the request names no setting"))
                .hint("name one, for example --backing-timeout 2m or --backing-timeout forever"));
        };
        let guard = self.registry.guard_disk_for_command(name, "changed").await?;
        let (shard, id) = {
            let mut inner = self.registry.inner();
            let disk = inner.disk_mut(name)?;
            disk.wanted.backing_timeout = Some(timeout);
            (disk.shard().ok(), disk.id)
        };
        if let Some(shard) = shard {
            shard.set_wait_max(id, wait_max(Some(timeout), self.backing_options.wait_max));
        }
        self.pools.finish_disk(name, guard, Vec::new()).await
    }
}

/// The time that requests of a disk wait for its backing: `timeout`, or `default` for a disk without the setting.
pub(in crate::daemon::manager) fn wait_max(timeout: Option<BackingTimeout>, default: Duration) -> Duration {
    match timeout {
        None => default,
        Some(BackingTimeout::Limit(limit)) => limit,
        Some(BackingTimeout::Forever) => WAIT_FOREVER,
    }
}
