//! The effect of a change on a disk's cache and its dirty data, before the change is made.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::{CachePatch, LifeEvent, Size};

/// `POST /v1/disks/{disk}/preview`: a change that is not made.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(tag = "change", rename_all = "kebab-case", deny_unknown_fields)]
pub enum PlannedChange {
    /// Remove the disk.
    Remove {
        /// Lose its dirty data instead of draining it.
        #[serde(default)]
        discard_dirty: bool,
    },
    /// Take its cache away.
    Disable {
        /// Lose its dirty data instead of draining it.
        #[serde(default)]
        discard_dirty: bool,
    },
    /// Empty its cache.
    Clear,
    /// Lose its dirty data.
    DiscardDirty,
    /// Report an event of its guest.
    Event {
        /// The event.
        event: LifeEvent,
    },
    /// Change its cache.
    Set {
        /// How.
        patch: Box<CachePatch>,
    },
}

/// `POST /v1/pools/{pool}/preview`: a change of a pool that is not made.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(tag = "change", rename_all = "kebab-case", deny_unknown_fields)]
pub enum PlannedPoolChange {
    /// Take a device out of it.
    RemoveDevice {
        /// The device's path.
        path: String,
    },
    /// Free the room of a persistent cache that belongs to no disk.
    DiscardOrphan {
        /// Its owner, 32 hexadecimal digits.
        owner: String,
    },
}

/// The effects of a change.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Preview {
    /// A sentence for each effect. Empty if no data is lost and no client is disconnected.
    pub effects: Vec<String>,
    /// Cached data that goes.
    pub cached: Size,
    /// Dirty data that is lost.
    pub dirty_lost: Size,
    /// Dirty data may be lost, and the amount is unknown.
    pub dirty_unknown: bool,
    /// Clients and guests that are disconnected.
    pub clients: u64,
}

impl Preview {
    /// Returns true if acknowledged data is or may be lost.
    pub fn loses_dirty(&self) -> bool {
        self.dirty_lost > Size(0) || self.dirty_unknown
    }
}

/// What happens to connected clients when a disk is removed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum OnClients {
    /// The disk stays.
    #[default]
    Refuse,
    /// They are disconnected.
    Disconnect,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn changes_have_names() {
        for (change, text) in [
            (PlannedChange::Clear, r#"{"change":"clear"}"#),
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
    }
}
