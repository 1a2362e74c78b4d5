//! Reaction to another program that has taken over a disk's backing. The program broke the lock of
//! the backing and may write to it, so the cache is no longer valid.
//!
//! After the takeover, the shard refuses all requests of the disk. No check of the cache could find
//! all changes of the backing. So a daemon without a cluster saves that the cache is invalid. In a
//! cluster, the saved generation of the disk already shows that another host has used the disk. The
//! generation also shows whether the other host, in a failover, only wrote this host's dirty data
//! to the backing.
//!
//! If the cache has no dirty data, hob then invalidates its journal on flash, and saves that the
//! cache is clean: the disk may move back to this host without a decision of an operator. A cache
//! with dirty data keeps its journal, because only an operator may discard dirty data. The disk
//! goes offline, and the daemon tries to open it every few seconds. An attempt succeeds after the
//! other program has ended, and the cache then starts empty. With dirty data the disk stays offline
//! until that data is discarded.

use std::time::Duration;

use hob_engine::stats::DiskStats;
use hob_engine::units::DiskId;
use hob_storage::pool::OwnerId;
use tokio::time::timeout;

use super::Disks;
use crate::api_error::{ApiError, Result, conflict};
use crate::background::spawn;
use crate::services::flash::Flash;
use crate::services::registry::CLEARING;
use crate::state::JournalSpec;

/// Maximum time that a disk which goes offline waits for its pool. An operation of the pool may
/// wait for a device that hangs, and must not delay other disks.
const POOL_WAIT_MAX: Duration = Duration::from_millis(200);

impl Disks {
    /// Takes a disk offline whose backing was taken over by another program. If the backing was
    /// lost for another reason, `why` describes the reason.
    pub(in crate::services) async fn backing_lost(&self, id: DiskId, why: Option<String>) {
        let backing = {
            let inner = self.registry.inner();
            let Some(disk) = inner.disks.values().find(|disk| disk.id == id) else { return };
            disk.wanted.backing.clone()
        };
        let error = match why {
            Some(why) => conflict!("{why}, so hob does not use the backing {backing} any more").hint(
                "check the file; hob opens the file again by itself, and discards the data that it has \
                 cached",
            ),
            None => conflict!("another program has taken over the backing {backing}").hint(
                "a disk can have only one writer: stop the other program; the disk then comes online by itself",
            ),
        };
        self.lost(id, error).await;
    }

    /// Takes a disk offline whose shard already refuses all requests, because another program or
    /// host has taken the backing over.
    pub(in crate::services) async fn lost(&self, id: DiskId, mut error: ApiError) {
        let (name, spec, flash, shard, is_coming) = {
            let inner = self.registry.inner();
            let Some(disk) = inner.disks.values().find(|disk| disk.id == id) else { return };
            let Ok(shard) = disk.shard() else { return };
            let spec = disk.cache().cloned();
            let pool = spec.as_ref().and_then(|spec| inner.pool(&spec.pool).ok());
            let flash = pool.map(|pool| pool.flash.clone());
            (disk.wanted.name.clone(), spec, flash, shard, disk.recovering.is_some())
        };
        let stats = shard.stats(id).await;
        let is_clean = stats.as_ref().is_ok_and(|stats| has_no_dirty_data(stats));
        let dirty = stats.map_or(u64::MAX, |stats| stats.sectors_dirty);
        let journal = spec.and_then(|spec| spec.journal);
        if let Ok(disk) = self.registry.inner().disk_mut(&name) {
            // A disk that waits for the cluster gives way to a migration if it has no dirty data.
            // Flash is not read for this, because a device that hangs would delay the next steps.
            disk.lost_dirty = journal.map(|journal| (journal.owner, dirty > 0 || is_coming));
            if is_clean {
                disk.note_clean_cache();
            }
        }
        if journal.is_some() && self.peers.cluster().is_none() {
            self.keep_foreign(&name).await;
        }
        match (journal, flash) {
            // The amount of dirty data is unknown until the disk is opened again.
            _ if is_coming => {}
            (Some(_), _) if dirty > 0 => {
                error = error.hint(format!(
                    "its cache has dirty data: save it with 'hob cache export-dirty {name} FILE', then discard it with 'hob cache discard-dirty {name} --yes'"
                ));
            }
            (Some(journal), Some(flash)) => {
                return self.lose_clean(&name, &error, OwnerId(journal.owner.0), flash).await;
            }
            _ => {}
        }
        self.take_offline(&name, &error).await;
    }

    /// Takes a lost disk without dirty data offline, and invalidates its cache on flash. If the
    /// pool is in use for long, because one of its devices hangs, the cache is invalidated later.
    /// The disk is not opened before.
    async fn lose_clean(&self, name: &str, error: &ApiError, owner: OwnerId, flash: Flash) {
        self.save_clean(name).await;
        let guard = self.registry.guard_disk(name, CLEARING);
        let disk = name.to_owned();
        let invalidate = async move {
            if let Err(error) = flash.make_void(owner, u32::MAX).await {
                tracing::error!(
                    "disk {disk}: cannot invalidate its cache on flash, which may be outdated when the disk is opened again: {error}"
                );
            }
        };
        match guard {
            Ok(guard) => {
                self.take_offline(name, error).await;
                wait_briefly(async move {
                    invalidate.await;
                    drop(guard);
                })
                .await;
            }
            // Another operation may open the disk as soon as it is offline.
            Err(_) => {
                invalidate.await;
                self.take_offline(name, error).await;
            }
        }
    }

    /// Saves that a lost disk had no dirty data. Without a cluster, this is not needed.
    async fn save_clean(&self, name: &str) {
        if self.peers.cluster().is_some()
            && let Err(error) = self.registry.save().await
        {
            tracing::warn!(
                "disk {name}: cannot record that its cache has no dirty data, so the disk may not move back to \
                 this host after a restart: {error}"
            );
        }
    }

    /// Saves that a disk's data on flash is invalid.
    async fn keep_foreign(&self, name: &str) {
        {
            let mut inner = self.registry.inner();
            let disk = inner.disk_mut(name).ok();
            let Some(journal) = disk.and_then(|disk| disk.wanted.cache.as_mut()?.journal.as_mut()) else {
                return;
            };
            journal.foreign = true;
        }
        if let Err(error) = self.registry.save().await {
            tracing::error!(
                "disk {name}: cannot record that its cache is outdated, so it may be used after a \
                 restart: {error}"
            );
        }
    }

    /// Discards the cache of a disk that another program or host has used, before the disk is
    /// served.
    pub(in crate::services) async fn forget_foreign(&self, name: &str) -> Result<()> {
        {
            let mut inner = self.registry.inner();
            let cache = inner.disk_mut(name)?.wanted.cache.as_mut();
            let foreign = cache.and_then(|spec| spec.journal.as_mut()).filter(|journal| journal.foreign);
            let Some(journal) = foreign else { return Ok(()) };
            // Data of this cache on devices that are missing now must not be used later.
            *journal = JournalSpec::new();
        }
        self.registry.save_first().await
    }
}

/// Returns true if a cache has no dirty data, also not on devices that are missing now and may
/// return.
pub(in crate::services) fn has_no_dirty_data(stats: &DiskStats) -> bool {
    stats.sectors_dirty == 0 && stats.sectors_lost == 0
}

/// Runs work on a pool in the background, and waits for its end for at most [`POOL_WAIT_MAX`].
pub(super) async fn wait_briefly(work: impl Future<Output = ()> + Send + 'static) {
    let _ = timeout(POOL_WAIT_MAX, spawn(work)).await;
}
