//! Changes how long requests of a disk wait for its backing, while the disk is served.

use std::time::Duration;

use hob_control::BackingTimeout;
use hob_storage::backing::WAIT_FOREVER;

use super::Disks;
use crate::api_error::Result;
use crate::services::registry::Inner;

impl Disks {
    pub(super) fn set_backing_timeout(&self, name: &str, timeout: Option<BackingTimeout>) -> Result<()> {
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
