//! Migration to a host that has the same disk configured, and waits until its cluster lets it
//! acquire the disk. The incoming disk replaces the waiting disk. If the migration fails, hob
//! restores the waiting disk.

use std::sync::Arc;
use std::time::Duration;

use hob_engine::command::Mode;
use hob_engine::migration::{Record, Session};
use hob_storage::pool::OwnerId;

use super::super::registry::{ClusterWait, DiskEntry, DiskPhase, Inner, PoolEntry};
use super::Migrations;
use crate::state::JournalSpec;

/// Maximum time to wait for the end of an attempt to open a waiting disk.
const IDLE_MAX: Duration = Duration::from_secs(5);

/// Interval between two checks whether an attempt to open a waiting disk has ended.
const LOOK_EVERY: Duration = Duration::from_millis(50);

impl Migrations {
    /// Returns true if the disk only waits for the cluster and has no migration, so that it may
    /// migrate to this host. The cluster decides which host owns the disk.
    pub(super) fn gives_way(&self, name: &str) -> bool {
        !self.is_migrating(name) && self.waits_for_cluster(name)
    }

    /// Returns true if the disk only waits for the cluster, with or without a migration.
    pub(super) fn waits_for_cluster(&self, name: &str) -> bool {
        if self.ownership.cluster().is_none() {
            return false;
        }
        let record = self.registry.record_of(name);
        let inner = self.registry.inner();
        inner.disk(name).is_ok_and(|disk| match (&disk.phase, record) {
            (DiskPhase::Offline(_), Some(Record::Owner { .. })) => {
                disk.cluster_wait != ClusterWait::No && !inner.may_have_dirty(disk)
            }
            (DiskPhase::Away(_), Some(Record::Away { taken, .. })) => taken,
            _ => false,
        })
    }

    /// Returns true if the disk is offline and waits for the cluster, or may wait for the cluster
    /// after the attempt to open it that is in progress or due.
    pub(super) fn may_wait_for_cluster(&self, name: &str) -> bool {
        let is_tried = |disk: &DiskEntry| disk.busy.is_none() && disk.offline_reason.is_some();
        self.ownership.cluster().is_some()
            && self.registry.inner().disk(name).is_ok_and(|disk| {
                matches!(disk.phase, DiskPhase::Offline(_))
                    && (disk.cluster_wait != ClusterWait::No || !is_tried(disk))
            })
    }

    /// Returns true if the disk is offline and this host's flash may have dirty data of the disk.
    pub(in super::super) fn keeps_dirty(&self, name: &str) -> bool {
        let inner = self.registry.inner();
        inner
            .disk(name)
            .is_ok_and(|disk| matches!(disk.phase, DiskPhase::Offline(_)) && inner.may_have_dirty(disk))
    }

    /// Returns the record that a migration of a disk with this name and lineage to this host was
    /// cancelled; `None` if there is none.
    pub(super) fn record_besides(&self, name: &str, lineage: &str) -> Option<Record> {
        let inner = self.registry.inner();
        let gone = inner.gone.iter().find(|gone| gone.name == name && gone.lineage == lineage)?;
        Some(Record::Gone(Session { generation: gone.generation, attempt: gone.attempt }))
    }

    /// Lets a disk that did not arrive wait for the cluster again, if the disk waited for the
    /// cluster before the migration.
    pub(super) fn wait_for_cluster_again(self: &Arc<Self>, name: &str) {
        let Some(mut waited) = self.registry.inner().waited.remove(name) else { return };
        // The segments of the waiting disk's earlier cache were released for the incoming disk.
        (waited.migration, waited.generation) = (None, None);
        if let Some(cache) = waited.cache.as_mut().filter(|cache| cache.journal.is_some()) {
            cache.journal = Some(JournalSpec::new());
        }
        if let Err(error) = self.disks.enter(waited, None) {
            return tracing::warn!(
                "disk {name}: this host no longer waits for the disk from its cluster: {error}"
            );
        }
        if let Ok(disk) = self.registry.inner().disk_mut(name) {
            disk.cluster_wait = ClusterWait::Yes;
        }
    }

    /// Waits until no attempt to open a waiting disk is in progress.
    pub(super) async fn let_rest(self: &Arc<Self>, name: &str) {
        let until = tokio::time::Instant::now() + IDLE_MAX;
        while self.gives_way(name)
            && self.registry.inner().disk(name).is_ok_and(|disk| disk.busy.is_some())
            && tokio::time::Instant::now() < until
        {
            tokio::time::sleep(LOOK_EVERY).await;
        }
    }
}

impl Inner {
    /// Returns true if flash may have dirty data of the offline disk. If this is not known from the
    /// time when the disk was lost or closed, a write-back cache may have dirty data if the pool
    /// has segments of the cache, or if the pool or one of its devices is absent.
    fn may_have_dirty(&self, disk: &DiskEntry) -> bool {
        let Some(spec) = disk.cache() else { return false };
        // Without a ring, the cache never held data.
        let Some(journal) = spec.journal.filter(|journal| journal.ring > 0) else { return false };
        if let Some((_, is_dirty)) = disk.lost_dirty.filter(|(lost, _)| *lost == journal.owner) {
            return is_dirty;
        }
        if journal.is_known_clean() {
            return false;
        }
        let has = |owners: &[(OwnerId, u64)]| {
            owners.iter().any(|(owner, count)| owner.0 == journal.owner.0 && *count > 0)
        };
        let has_or_misses = |pool: &PoolEntry| !pool.is_whole() || has(&pool.owners);
        spec.mode == Mode::WriteBack && self.pools.get(&spec.pool).is_none_or(has_or_misses)
    }
}
