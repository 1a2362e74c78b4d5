//! Ways out for dirty data that cannot or need not go to the backing: it is given up, or the cache of a disk that is not
//! there any more is.

use hob_control::{DiskChanged, OnDirty, PoolChanged, Size};
use hob_engine::command::{CacheChange, Discard, Mode};
use hob_engine::units::SECTOR_BYTES;

use super::Disks;
use crate::daemon::manager::api_error::ApiError;
use crate::daemon::manager::pools::no_cache;
use crate::daemon::manager::pools::release_owner;
use crate::daemon::manager::registry::DiskPhase;
use crate::daemon::state::{CacheOwner, JournalSpec};

/// What becomes of a cache whose dirty data was discarded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::daemon::manager) enum Afterwards {
    /// It goes on as before.
    GoesOn,
    /// The same, and no guest counts on that data any more: its disk was put back to a snapshot.
    Reverted,
    /// It is taken away, so nothing shall become dirty any more.
    TakenAway,
}

impl Disks {
    /// Takes a cache away.
    pub(crate) async fn cache_disable(&self, disk: String, dirty: OnDirty) -> Result<DiskChanged, ApiError> {
        let service = self.clone();
        self.tasks
            .run("cache disable", disk.clone(), async move { service.disable(&disk, dirty).await })
            .await
    }

    async fn disable(&self, name: &str, dirty: OnDirty) -> Result<DiskChanged, ApiError> {
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
            OnDirty::Drain => self.pools.take_cache(name).await?,
            OnDirty::Discard => self.pools.take_discarded_cache(name).await?,
        }
        {
            let mut inner = self.registry.inner();
            let disk = inner.disk_mut(name)?;
            disk.wanted.cache = None;
            disk.cache_reason = None;
        }
        tracing::info!("{name} has no cache any more");
        let changed = self.pools.finish_disk(name, guard, notes).await?;
        self.pools.forget_owner(&spec).await;
        Ok(changed)
    }

    /// Gives up what is dirty in a cache. Of a cache that is refused, everything is given up.
    pub(crate) async fn discard_dirty(&self, disk: String) -> Result<DiskChanged, ApiError> {
        self.give_dirty_up(disk, Afterwards::GoesOn).await
    }

    /// The same; `afterwards` is not [`Afterwards::TakenAway`].
    pub(in crate::daemon::manager) async fn give_dirty_up(
        &self,
        disk: String,
        afterwards: Afterwards,
    ) -> Result<DiskChanged, ApiError> {
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

    /// As `discard_dirty`; the caller holds the operation guard of the disk.
    pub(in crate::daemon::manager) async fn discard(
        &self,
        name: &str,
        afterwards: Afterwards,
    ) -> Result<Vec<String>, ApiError> {
        let (spec, is_online) = {
            let inner = self.registry.inner();
            let disk = inner.disk(name)?;
            let spec = disk.cache().cloned().ok_or_else(|| no_cache(name))?;
            (spec, matches!(disk.phase, DiskPhase::Online(_)))
        };
        let Some(journal) = spec.journal else {
            return Ok(vec!["nothing can be dirty in this cache: the backing has everything".to_owned()]);
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
        if !self.pools.discard_on_shard(name, (&shard, id), discard).await? {
            return self.discard_abandoned(name).await;
        }
        self.pools.look(name, &shard, id).await;
        tracing::warn!("{name}: {} of dirty data was discarded by command", Size(dirty).human());
        Ok(vec![format!("{} that only flash had is lost", Size(dirty).human())])
    }

    /// The cache is forgotten as a whole: whatever it held, the disk begins again with what its backing has.
    async fn discard_offline(
        &self,
        name: &str,
        pool: &str,
        journal: JournalSpec,
    ) -> Result<Vec<String>, ApiError> {
        let flash = self.registry.inner().pool(pool)?.flash.clone();
        release_owner(&flash, journal).await?;
        {
            let mut inner = self.registry.inner();
            let disk = inner.disk_mut(name)?;
            disk.retry_after = None;
            if let Some(spec) = disk.wanted.cache.as_mut() {
                // What may be on devices that are away is nobody's from now on.
                spec.journal = Some(JournalSpec::new());
            }
        }
        self.registry.save().await?;
        self.pools.refresh_owners(pool).await;
        tracing::warn!("{name}: its cache was discarded by command, with what was dirty in it");
        Ok(vec!["what only flash had is lost; the cache starts empty".to_owned()])
    }

    /// Refuses to give up a cache of which nobody knows whether it holds dirty data.
    pub(in crate::daemon::manager) fn check_given_up(&self, name: &str) -> Result<(), ApiError> {
        let inner = self.registry.inner();
        let disk = inner.disk(name)?;
        let DiskPhase::Offline(_) = &disk.phase else { return Ok(()) };
        match disk.cache().and_then(|spec| spec.journal) {
            // It never had a ring, so it holds nothing.
            Some(journal) if journal.ring > 0 => Err(ApiError::conflict(format!(
                "{name} is offline, and its cache may hold data that is not on the backing"
            ))
            .hint(format!(
                "'hob disk show {name}' shows the reason; repair the disk, save its dirty data with 'hob cache export-dirty {name} FILE', or discard it with --discard-dirty"
            ))),
            _ => Ok(()),
        }
    }

    /// Frees the room of a persistent cache that belongs to no disk.
    pub(crate) async fn orphan_discard(&self, pool: String, owner: String) -> Result<PoolChanged, ApiError> {
        let service = self.clone();
        self.tasks
            .run(
                "pool discard-orphan",
                pool.clone(),
                async move { service.discard_orphan(&pool, &owner).await },
            )
            .await
    }

    async fn discard_orphan(&self, pool: &str, owner: &str) -> Result<PoolChanged, ApiError> {
        // What is no owner at all is told first, whatever is being done to the pool.
        let _: CacheOwner = owner.parse().map_err(ApiError::invalid)?;
        let guard = self.registry.guard_pool(pool, "changed")?;
        let (owner, flash) = {
            let inner = self.registry.inner();
            (inner.orphan(pool, owner)?, inner.pool(pool)?.flash.clone())
        };
        let journal = JournalSpec { owner, ..JournalSpec::new() };
        release_owner(&flash, journal).await?;
        drop(guard);
        self.pools.refresh_owners(pool).await;
        tracing::warn!("pool {pool}: the cache {owner}, which belonged to no disk, was discarded by command");
        let notes = self.pools.top_up(pool).await;
        Ok(PoolChanged { pool: Some(self.observe.pool(pool)?), notes })
    }
}
