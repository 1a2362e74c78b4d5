//! API types that show the effect of a change on a disk's cache and dirty data, before the change
//! is made.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::{CachePatch, DeviceAdd, DiskPatch, LifeEvent, PoolCreate, Size};

/// `POST /v1/disks/{disk}/preview`: a planned change of a disk.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(tag = "change", rename_all = "kebab-case", deny_unknown_fields)]
pub enum PlannedChange {
    /// Remove the disk.
    Remove {
        /// Discard the disk's dirty data instead of draining it.
        #[serde(default)]
        discard_dirty: bool,
    },
    /// Remove the disk's cache.
    Disable {
        /// Discard the disk's dirty data instead of draining it.
        #[serde(default)]
        discard_dirty: bool,
    },
    /// Empty the disk's cache.
    Clear,
    /// Discard the disk's dirty data.
    DiscardDirty,
    /// Tell hob about an event of the disk's VM, such as a snapshot (`hob disk event`), which may
    /// drain or empty the cache.
    Event {
        /// The event to report.
        event: LifeEvent,
    },
    /// Close the disk and open it again, with another access mode or datastore.
    Reopen,
    /// Change settings of the disk's cache.
    Set {
        /// The settings that change.
        patch: Box<CachePatch>,
    },
    /// Change settings of the disk.
    SetDisk {
        /// The settings that change.
        patch: Box<DiskPatch>,
    },
}

/// `POST /v1/pools/{pool}/preview`: a planned change of a pool.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(tag = "change", rename_all = "kebab-case", deny_unknown_fields)]
pub enum PlannedPoolChange {
    /// Create the pool from these devices, or add these devices to the pool, and overwrite their
    /// data.
    UseDevices {
        /// The devices' paths.
        paths: Vec<String>,
    },
    /// Create the pool.
    Create {
        /// The new pool.
        create: Box<PoolCreate>,
    },
    /// Add a device to the pool.
    AddDevice {
        /// The device to add.
        add: Box<DeviceAdd>,
    },
    /// Remove a device from the pool.
    RemoveDevice {
        /// The device's path.
        path: String,
    },
    /// Free the flash of a persistent cache that belongs to no disk.
    DiscardOrphan {
        /// Owner id of the orphan cache, 32 hexadecimal digits.
        owner: String,
    },
}

/// Effects of a planned change.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Preview {
    /// One sentence for each effect. Empty if no data is lost and no client is disconnected.
    pub effects: Vec<String>,
    /// Amount of cached data that the change drops.
    pub cached: Size,
    /// Amount of dirty data that the change loses.
    pub dirty_lost: Size,
    /// Whether the change may lose an unknown amount of dirty data.
    pub dirty_unknown: bool,
    /// Number of clients and guests that the change disconnects.
    pub clients: u64,
    /// Process ids of the NBD clients on Unix sockets that the change disconnects, in the daemon's
    /// process id namespace. Other clients, and clients outside this namespace, are left out.
    #[serde(default)]
    pub client_pids: Vec<u32>,
}

impl Preview {
    /// Returns true if the change loses, or may lose, acknowledged data.
    pub fn loses_dirty(&self) -> bool {
        self.dirty_lost > Size(0) || self.dirty_unknown
    }
}

/// How connected clients are handled when a disk is removed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum OnClients {
    /// hob refuses to remove a disk that has connected clients.
    #[default]
    Refuse,
    /// The clients are disconnected.
    Disconnect,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn changes_have_names() {
        for (change, text) in [
            (PlannedChange::Clear, r#"{"change":"clear"}"#),
            (PlannedChange::Reopen, r#"{"change":"reopen"}"#),
            (PlannedChange::Remove { discard_dirty: true }, r#"{"change":"remove","discard_dirty":true}"#),
            (
                PlannedChange::Event { event: LifeEvent::SnapshotRevert },
                r#"{"change":"event","event":"snapshot-revert"}"#,
            ),
        ] {
            assert_eq!(serde_json::to_string(&change).unwrap(), text);
            assert_eq!(serde_json::from_str::<PlannedChange>(text).unwrap(), change);
        }
        let remove = PlannedPoolChange::RemoveDevice { path: "/dev/sdb".into() };
        let text = r#"{"change":"remove-device","path":"/dev/sdb"}"#;
        assert_eq!(serde_json::to_string(&remove).unwrap(), text);
        let set = r#"{"change":"set","patch":{"mode":"write-back"}}"#;
        assert!(matches!(serde_json::from_str(set).unwrap(), PlannedChange::Set { .. }));
        let set = r#"{"change":"set-disk","patch":{"stripe":8192}}"#;
        assert!(matches!(serde_json::from_str(set).unwrap(), PlannedChange::SetDisk { .. }));
        let create = r#"{"change":"create","create":{"name":"p","devices":["/dev/sdb"]}}"#;
        assert!(matches!(serde_json::from_str(create).unwrap(), PlannedPoolChange::Create { .. }));
    }
}
