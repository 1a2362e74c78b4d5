//! Disks of a cluster that wait at a host for their turn, and come by migration before that: the disk that waits gives way to the one that comes,
//! and is there again if it does not.

use std::sync::Arc;
use std::time::Duration;

use hob_engine::command::Mode;
use hob_engine::migration::{Record, Session};
use hob_storage::pool::OwnerId;

use super::super::registry::ClusterWait;
use super::super::{DiskEntry, DiskPhase, Inner, Manager};
use crate::daemon::state::JournalSpec;

/// Attempts to open a disk that waits end within that time.
const IDLE_MAX: Duration = Duration::from_secs(5);

/// Pause between two looks.
const LOOK_EVERY: Duration = Duration::from_millis(50);

impl Manager {
    /// Does the disk of that name merely wait for its cluster, so that it may come in another way? Whose it is, the cluster says.
    pub(super) fn gives_way(&self, name: &str) -> bool {
        !self.is_migrating(name) && self.waits_for_cluster(name)
    }

    /// The same, whatever is under way.
    pub(super) fn waits_for_cluster(&self, name: &str) -> bool {
        if self.cluster().is_none() {
            return false;
        }
        let record = self.record_of(name);
        let inner = self.inner();
        inner.disk(name).is_ok_and(|disk| match (&disk.phase, record) {
            (DiskPhase::Offline(_), Some(Record::Owner { .. })) => {
                disk.cluster_wait != ClusterWait::No && !inner.may_have_dirty(disk)
            }
            (DiskPhase::Away(_), Some(Record::Away { taken, .. })) => taken,
            _ => false,
        })
    }

    /// What was recorded of a disk besides the one that waits.
    pub(super) fn record_besides(&self, name: &str, lineage: &str) -> Option<Record> {
        let inner = self.inner();
        let gone = inner.gone.iter().find(|gone| gone.name == name && gone.lineage == lineage)?;
        Some(Record::Gone(Session { generation: gone.generation, attempt: gone.attempt }))
    }

    /// A disk that did not come waits again if it waited before.
    pub(super) fn wait_for_cluster_again(self: &Arc<Self>, name: &str) {
        let Some(mut waited) = self.inner().waited.remove(name) else { return };
        // What flash had of it made room for what was to come.
        (waited.migration, waited.generation) = (None, None);
        if let Some(cache) = waited.cache.as_mut().filter(|cache| cache.journal.is_some()) {
            cache.journal = Some(JournalSpec::new());
        }
        if let Err(error) = self.disks.enter(waited, None) {
            return tracing::warn!("{name} does not wait here any more: {error}");
        }
        if let Ok(disk) = self.inner().disk_mut(name) {
            disk.cluster_wait = ClusterWait::Yes;
        }
    }

    /// Waits until nobody tries to open a disk that waits.
    pub(super) async fn let_rest(self: &Arc<Self>, name: &str) {
        let until = tokio::time::Instant::now() + IDLE_MAX;
        while self.gives_way(name)
            && self.inner().disk(name).is_ok_and(|disk| disk.busy.is_some())
            && tokio::time::Instant::now() < until
        {
            tokio::time::sleep(LOOK_EVERY).await;
        }
    }
}

impl Inner {
    /// Flash still has segments of a cache that wrote back.
    fn may_have_dirty(&self, disk: &DiskEntry) -> bool {
        let Some(spec) = disk.cache().filter(|spec| spec.mode == Mode::WriteBack) else { return false };
        let Some(journal) = spec.journal else { return false };
        let has = |owners: &[(OwnerId, u64)]| {
            owners.iter().any(|(owner, count)| owner.0 == journal.owner.0 && *count > 0)
        };
        self.pools.get(&spec.pool).is_none_or(|pool| has(&pool.owners))
    }
}
