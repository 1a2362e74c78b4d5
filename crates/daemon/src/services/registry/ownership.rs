//! Tells whether this host owns a disk, according to the disk's migration record and the cluster.

use hob_engine::command::Mode;
use hob_engine::migration::{Record, Session};

use super::{ClusterWait, DiskEntry, DiskPhase, Registry};
use crate::api_error::Result;

impl Registry {
    /// Returns true if this host may own the disk: its migration record names this host as the
    /// owner. Returns false for incoming disks, migrated disks, and read-only disks, which have no
    /// owner.
    pub(in crate::services) fn owns(&self, name: &str) -> bool {
        let is_ours = matches!(self.record_of(name), Some(Record::Owner { .. } | Record::Leaving(_)));
        is_ours && !self.needs_no_owner(name)
    }

    /// Returns the disks that this host serves as their owner.
    pub(in crate::services) fn served(&self) -> Vec<String> {
        let online: Vec<String> = {
            let inner = self.inner();
            let online = inner.disks.values().filter(|disk| matches!(disk.phase, DiskPhase::Online(_)));
            online.map(|disk| disk.wanted.name.clone()).collect()
        };
        online.into_iter().filter(|name| self.owns(name)).collect()
    }

    /// Returns true if the disk is read-only, so that every host may serve it.
    pub(in crate::services) fn needs_no_owner(&self, name: &str) -> bool {
        self.inner().disk(name).is_ok_and(|disk| disk.wanted.read_only)
    }

    /// Returns the migration record of a disk from the state.
    pub(in crate::services) fn record_of(&self, name: &str) -> Option<Record> {
        let inner = self.inner();
        if let Ok(disk) = inner.disk(name) {
            let never_moved = Record::Owner { generation: 0, attempts: 0 };
            return Some(disk.wanted.migration.as_ref().map_or(never_moved, |spec| spec.record.record()));
        }
        let gone = inner.gone.iter().find(|gone| gone.name == name)?;
        Some(Record::Gone(Session { generation: gone.generation, attempt: gone.attempt }))
    }

    /// Returns the generation saved with the disk's data in flash, and whether this data may be
    /// dirty.
    pub(in crate::services) fn wish(&self, name: &str) -> Result<(Option<u64>, bool)> {
        let inner = self.inner();
        let disk = inner.disk(name)?;
        let dirty = disk.cache().is_some_and(|spec| spec.mode == Mode::WriteBack);
        Ok((disk.wanted.generation, dirty))
    }

    /// Returns true if the disk could not be acquired because another host of the cluster serves
    /// it.
    pub(in crate::services) fn is_served_elsewhere(&self, name: &str) -> bool {
        self.inner().disk(name).is_ok_and(|disk| disk.cluster_wait == ClusterWait::Served)
    }
}

impl DiskEntry {
    /// Returns true if the disk is offline because of its state in the cluster. The cluster's
    /// watcher decides when to try again.
    pub(in crate::services) fn waits_for_cluster(&self) -> bool {
        matches!(self.phase, DiskPhase::Offline(_)) && self.cluster_wait != ClusterWait::No
    }
}
