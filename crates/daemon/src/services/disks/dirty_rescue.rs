//! Discards dirty data that cannot or need not be written to the backing, and caches whose disk no
//! longer exists.

use hob_control::{DiskChanged, OnDirty, PoolChanged, Size};
use hob_engine::command::{CacheChange, Discard, Mode};
use hob_engine::units::SECTOR_BYTES;
use hob_storage::pool::OwnerId;

use super::Disks;
use crate::api_error::{ApiError, Result, conflict};
use crate::services::pools::no_cache;
use crate::services::pools::release_owner;
use crate::services::registry::DiskPhase;
use crate::state::{CacheOwner, JournalSpec};

/// State of a cache after its dirty data was discarded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::services) enum Afterwards {
    /// The cache stays in use. Guests may have relied on the discarded data.
    GoesOn,
    /// The cache stays in use, and no guest relies on the discarded data, because the disk was
    /// reverted to a snapshot.
    Reverted,
    /// The cache is removed next, so no new data may become dirty.
    TakenAway,
}

impl Disks {
    pub(crate) async fn cache_disable(&self, disk: String, dirty: OnDirty) -> Result<DiskChanged> {
        let service = self.clone();
        self.tasks
            .run("cache disable", disk.clone(), async move { service.disable(&disk, dirty).await })
            .await
    }

    async fn disable(&self, name: &str, dirty: OnDirty) -> Result<DiskChanged> {
        let guard = match dirty {
            OnDirty::Drain => self.registry.guard_disk_for_command(name, "changed").await?,
            OnDirty::Discard => self.pools.guard_to_discard(name, "changed").await?,
        };
        let spec = self.registry.inner().disk(name)?.cache().cloned().ok_or_else(|| no_cache(name))?;
        let mut notes = Vec::new();
        if dirty == OnDirty::Discard {
            notes.extend(self.discard(name, Afterwards::TakenAway).await?);
        }
        self.check_given_up(name)?;
        match dirty {
            OnDirty::Drain => self.pools.drain_and_take_cache(name).await?,
            OnDirty::Discard => self.pools.take_discarded_cache(name).await?,
        }
        {
            let mut inner = self.registry.inner();
            let disk = inner.disk_mut(name)?;
            disk.wanted.cache = None;
            disk.cache_reason = None;
        }
        tracing::info!("disk {name}: its cache is removed");
        let changed = self.pools.finish_disk(name, guard, notes).await?;
        self.pools.forget_owner(&spec).await;
        Ok(changed)
    }

    /// Discards the dirty data of a disk's cache. If the disk is offline, discards the whole cache.
    pub(crate) async fn discard_dirty(&self, disk: String) -> Result<DiskChanged> {
        self.give_dirty_up(disk, Afterwards::GoesOn).await
    }

    /// Discards the dirty data of a disk's cache as a task; `afterwards` is not
    /// [`Afterwards::TakenAway`].
    pub(in crate::services) async fn give_dirty_up(
        &self,
        disk: String,
        afterwards: Afterwards,
    ) -> Result<DiskChanged> {
        let service = self.clone();
        self.tasks
            .run("cache discard-dirty", disk.clone(), async move {
                let guard = service.pools.guard_to_discard(&disk, "changed").await?;
                let notes = service.discard(&disk, afterwards).await?;
                let changed = service.pools.finish_disk(&disk, guard, notes).await?;
                let is_to_open = {
                    let inner = service.registry.inner();
                    matches!(inner.disk(&disk)?.phase, DiskPhase::Offline(_)) && !inner.is_abandoned(&disk)
                };
                if is_to_open {
                    service.bring_online(&disk).await;
                    return service.observe.disk_changed(&disk, changed.notes);
                }
                Ok(changed)
            })
            .await
    }

    /// Discards dirty data like `discard_dirty`, for a caller that holds the disk's operation
    /// guard.
    pub(in crate::services) async fn discard(
        &self,
        name: &str,
        afterwards: Afterwards,
    ) -> Result<Vec<String>> {
        let (spec, is_online) = {
            let inner = self.registry.inner();
            let disk = inner.disk(name)?;
            let spec = disk.cache().cloned().ok_or_else(|| no_cache(name))?;
            (spec, matches!(disk.phase, DiskPhase::Online(_)))
        };
        self.check_discardable(name)?;
        let Some(journal) = spec.journal else {
            return Ok(vec!["this cache can have no dirty data: the backing has all data".to_owned()]);
        };
        self.exports.all_is_changed(name, "dirty data of its cache was discarded").await?;
        if !is_online {
            return self.discard_offline(name, &spec.pool, journal).await;
        }
        let (shard, id) = self.registry.shard_of(name)?;
        let dirty = shard.stats(id).await?.sectors_dirty * SECTOR_BYTES;
        if afterwards == Afterwards::TakenAway {
            let destage = spec.destage.engine();
            shard.change_cache(id, CacheChange::Tune(Mode::WriteThrough, destage, spec.copies)).await?;
        }
        let discard = if afterwards == Afterwards::Reverted { Discard::Silent } else { Discard::Told };
        self.pools.record_discard_first(name, id).await?;
        if !self.pools.discard_on_shard(name, (&shard, id), discard).await? {
            return self.discard_abandoned(name).await;
        }
        self.pools.look(name, &shard, id).await;
        if dirty == 0 {
            return Ok(vec!["there was no dirty data, so nothing is lost".to_owned()]);
        }
        tracing::warn!("{name}: {} of dirty data was discarded by command", Size(dirty).human());
        Ok(vec![format!("{} of dirty data is lost", Size(dirty).human())])
    }

    /// Refuses to discard the cache of an offline disk while a shard still uses this cache.
    /// Otherwise another cache could get segments to which the shard still writes.
    pub(super) fn check_discardable(&self, name: &str) -> Result<()> {
        let inner = self.registry.inner();
        let disk = inner.disk(name)?;
        match disk.cache().is_none() || matches!(disk.phase, DiskPhase::Online(_)) {
            true => Ok(()),
            false => inner.check_left_by_shard(name),
        }
    }

    /// Discards the whole cache of an offline disk. The disk then comes online with an empty cache
    /// and the backing's data.
    async fn discard_offline(&self, name: &str, pool: &str, journal: JournalSpec) -> Result<Vec<String>> {
        let spec = self.registry.inner().disk(name)?.cache().cloned();
        if let Some(spec) = &spec {
            self.pools.note_end(spec).await?;
        }
        self.free_cache_of_offline(name, pool, journal).await?;
        tracing::warn!("disk {name}: its cache and all dirty data in it were discarded by command");
        Ok(vec!["all dirty data is lost; the cache starts empty".to_owned()])
    }

    /// Frees the segments of an offline disk's cache. The caller has saved that the cache has
    /// ended. The disk then comes online with an empty cache.
    pub(super) async fn free_cache_of_offline(
        &self,
        name: &str,
        pool: &str,
        journal: JournalSpec,
    ) -> Result<()> {
        let flash = self.registry.inner().pool(pool)?.flash.clone();
        release_owner(&flash, journal).await?;
        {
            let mut inner = self.registry.inner();
            let disk = inner.disk_mut(name)?;
            disk.retry_after = None;
            if let Some(spec) = disk.wanted.cache.as_mut() {
                // Data of this cache on devices that are missing now must not be used later.
                spec.journal = Some(JournalSpec::new());
            }
        }
        self.registry.save().await?;
        self.pools.refresh_owners(pool).await;
        Ok(())
    }

    /// Refuses to remove an offline disk whose cache may have dirty data.
    pub(in crate::services) fn check_given_up(&self, name: &str) -> Result<()> {
        let inner = self.registry.inner();
        let disk = inner.disk(name)?;
        let DiskPhase::Offline(_) = &disk.phase else { return Ok(()) };
        match disk.cache().and_then(|spec| spec.journal) {
            // Without a ring, the cache never held data.
            Some(journal) if journal.ring > 0 => Err(conflict!("{name} is offline, and its cache may have dirty data"
            )
            .hint(format!(
                "'hob disk show {name}' shows the reason; repair the disk, save its dirty data with 'hob cache export-dirty {name} FILE', or discard it with --discard-dirty"
            ))),
            _ => Ok(()),
        }
    }

    /// Frees the space of a persistent cache that belongs to no disk.
    pub(crate) async fn orphan_discard(&self, pool: String, owner: String) -> Result<PoolChanged> {
        let service = self.clone();
        self.tasks
            .run(
                "pool discard-orphan",
                pool.clone(),
                async move { service.discard_orphan(&pool, &owner).await },
            )
            .await
    }

    async fn discard_orphan(&self, pool: &str, owner: &str) -> Result<PoolChanged> {
        // An invalid owner is reported first, even while the pool is busy.
        let _: CacheOwner = owner.parse().map_err(ApiError::invalid)?;
        let guard = self.registry.guard_pool_for_command(pool, "changed").await?;
        let (owner, flash) = {
            let inner = self.registry.inner();
            (inner.orphan(pool, owner)?, inner.pool(pool)?.flash.clone())
        };
        // A device that is missing now may have segments of this cache, and may return later.
        self.registry.inner().ended.add(OwnerId(owner.0), pool);
        self.registry.save_first().await?;
        let journal = JournalSpec { owner, ..JournalSpec::new() };
        release_owner(&flash, journal).await?;
        drop(guard);
        self.pools.refresh_owners(pool).await;
        tracing::warn!("pool {pool}: the cache {owner}, which belongs to no disk, was discarded by command");
        let notes = self.pools.top_up(pool).await;
        Ok(PoolChanged { pool: Some(self.observe.pool(pool)?), notes })
    }
}
