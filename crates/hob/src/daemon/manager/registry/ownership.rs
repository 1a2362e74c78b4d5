//! Whether a disk is this host's, by the record of its migrations and by what its cluster says.

use hob_engine::command::Mode;
use hob_engine::migration::{Record, Session};

use super::{ClusterWait, Registry};
use crate::daemon::manager::api_error::ApiError;

impl Registry {
    /// Is a disk this host's, once it is taken? Not one that is on its way here, has gone elsewhere, or has no owner.
    pub(in crate::daemon::manager) fn owns(&self, name: &str) -> bool {
        let is_ours = matches!(self.record_of(name), Some(Record::Owner { .. } | Record::Leaving(_)));
        is_ours && !self.needs_no_owner(name)
    }

    /// Nobody writes it: every host may serve it.
    pub(in crate::daemon::manager) fn needs_no_owner(&self, name: &str) -> bool {
        self.inner().disk(name).is_ok_and(|disk| disk.wanted.read_only)
    }

    /// What the state says of a disk, by its name.
    pub(in crate::daemon::manager) fn record_of(&self, name: &str) -> Option<Record> {
        let inner = self.inner();
        if let Ok(disk) = inner.disk(name) {
            let never_moved = Record::Owner { generation: 0, attempts: 0 };
            return Some(disk.wanted.migration.as_ref().map_or(never_moved, |spec| spec.record.record()));
        }
        let gone = inner.gone.iter().find(|gone| gone.name == name)?;
        Some(Record::Gone(Session { generation: gone.generation, attempt: gone.attempt }))
    }

    /// The generation that is kept with what flash has of a disk, and whether anything may be dirty.
    pub(in crate::daemon::manager) fn wish(&self, name: &str) -> Result<(Option<u64>, bool), ApiError> {
        let inner = self.inner();
        let disk = inner.disk(name)?;
        let dirty = disk.cache().is_some_and(|spec| spec.mode == Mode::WriteBack);
        Ok((disk.wanted.generation, dirty))
    }

    /// Could it not be had because another host of the cluster serves it?
    pub(in crate::daemon::manager) fn is_served_elsewhere(&self, name: &str) -> bool {
        self.inner().disk(name).is_ok_and(|disk| disk.cluster_wait == ClusterWait::Served)
    }
}
