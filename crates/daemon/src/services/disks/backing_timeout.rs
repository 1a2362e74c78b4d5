//! Changes how long requests of a disk wait for its backing, while the disk is served.

use std::path::Path;
use std::time::Duration;

use hob_control::BackingTimeout;
use hob_storage::backing::{Format, WAIT_FOREVER};

use super::Disks;
use crate::api_error::Result;
use crate::hardware::Backing;
use crate::services::registry::Inner;
use crate::state::DiskState;

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

    /// Returns a note for each disk with a backing timeout of its own that does not apply to its
    /// backing.
    pub(in crate::services) fn timeouts_without_effect(&self) -> Vec<String> {
        let inner = self.registry.inner();
        let disks = inner.disks.iter();
        disks
            .filter_map(|(name, disk)| Some(format!("disk {name}: {}", disk.wanted.backing_timeout_note()?)))
            .collect()
    }

    /// Returns how long requests of a disk wait for its backing: the disk's own limit, or the
    /// daemon's if the disk has none.
    pub(in crate::services) fn wait_max_of(&self, own: Option<BackingTimeout>) -> Duration {
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

impl DiskState {
    /// Returns why the backing timeout does not apply to the disk's backing, or applies only in
    /// some outages. `None` if it applies in all outages.
    pub(in crate::services) fn backing_timeout_reason(&self) -> Option<&'static str> {
        let format = self.image.as_ref().and_then(|image| image.format).map(|name| name.0);
        let format = format.unwrap_or_else(|| Format::assumed(Path::new(&self.backing)));
        match Backing::kind(&self.backing, format).name {
            "rbd" => Some("does not apply to RBD images: requests wait for the Ceph cluster"),
            "file" => Some(
                "does not apply to files and block devices, except while an NFS handle is stale \
                (ESTALE) or the cluster lease of this host is in doubt",
            ),
            _ => None,
        }
    }

    /// Returns a note if the disk has a backing timeout of its own that does not apply to its
    /// backing.
    pub(super) fn backing_timeout_note(&self) -> Option<String> {
        let reason = self.backing_timeout.and(self.backing_timeout_reason())?;
        Some(format!("the backing timeout {reason}"))
    }
}

/// Converts a limit of the API into the duration that the storage crate takes.
pub(crate) fn wait_max(timeout: BackingTimeout) -> Duration {
    match timeout {
        BackingTimeout::Limit(limit) => limit,
        BackingTimeout::Forever => WAIT_FOREVER,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn backings_to_which_the_timeout_does_not_apply_have_a_reason() {
        let reason = |backing: &str| {
            DiskState::new("vm".to_owned(), backing.to_owned(), false).backing_timeout_reason().unwrap_or("")
        };
        assert!(reason("rbd:pool/image").starts_with("does not apply to RBD images"));
        for file in ["/vm.img", "/dev/sdb"] {
            assert!(reason(file).starts_with("does not apply to files and block devices"), "{file}");
        }
        for backing in ["nbd://host/vm", "objects+file:///srv/vm", "/vm.qcow2"] {
            assert_eq!(reason(backing), "", "{backing}");
        }
    }
}
