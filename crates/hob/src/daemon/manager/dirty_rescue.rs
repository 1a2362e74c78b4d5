//! Ways out for dirty data that cannot or need not go to the backing: it is given up, or the cache of a disk that is not
//! there any more is.

use std::sync::Arc;

use hob_control::{DiskChanged, PoolChanged, Size};
use hob_engine::command::{CacheChange, Discard, Mode};
use hob_engine::units::SECTOR_BYTES;

use super::api_error::ApiError;
use super::caches::no_cache;
use super::persist::release_owner;
use super::{DiskPhase, Manager};
use crate::daemon::state::{CacheOwner, JournalSpec};

/// What becomes of a cache whose dirty data was discarded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Afterwards {
    /// It goes on as before.
    GoesOn,
    /// The same, and no guest counts on that data any more: its disk was put back to a snapshot.
    Reverted,
    /// It is taken away, so nothing shall become dirty any more.
    TakenAway,
}

impl Manager {
    /// Gives up what is dirty in a cache. Of a cache that is refused, everything is given up.
    pub(crate) async fn discard_dirty(self: &Arc<Self>, disk: String) -> Result<DiskChanged, ApiError> {
        self.give_dirty_up(disk, Afterwards::GoesOn).await
    }

    /// The same; `afterwards` is not [`Afterwards::TakenAway`].
    pub(super) async fn give_dirty_up(
        self: &Arc<Self>,
        disk: String,
        afterwards: Afterwards,
    ) -> Result<DiskChanged, ApiError> {
        let manager = self.clone();
        self.change("cache discard-dirty", disk.clone(), async move {
            let guard = manager.guard_to_discard(&disk, "changed").await?;
            let notes = manager.discard(&disk, afterwards).await?;
            let changed = manager.finish_disk(&disk, guard, notes).await?;
            let is_to_open = {
                let inner = manager.inner();
                matches!(inner.disk(&disk)?.phase, DiskPhase::Offline(_)) && !inner.is_abandoned(&disk)
            };
            if is_to_open {
                manager.bring_online(&disk).await;
                return manager.disk_changed(&disk, changed.notes);
            }
            Ok(changed)
        })
        .await
    }

    /// As `discard_dirty`; the caller holds the operation guard of the disk.
    pub(super) async fn discard(
        self: &Arc<Self>,
        name: &str,
        afterwards: Afterwards,
    ) -> Result<Vec<String>, ApiError> {
        let (spec, is_online) = {
            let inner = self.inner();
            let disk = inner.disk(name)?;
            let spec = disk.cache().cloned().ok_or_else(|| no_cache(name))?;
            (spec, matches!(disk.phase, DiskPhase::Online(_)))
        };
        let Some(journal) = spec.journal else {
            return Ok(vec!["nothing can be dirty in this cache: the backing has everything".to_owned()]);
        };
        self.all_is_changed(name, "dirty data of its cache was discarded").await?;
        if !is_online {
            return self.discard_offline(name, &spec.pool, journal).await;
        }
        let (shard, id) = self.shard_of(name)?;
        let dirty = shard.stats(id).await?.sectors_dirty * SECTOR_BYTES;
        if afterwards == Afterwards::TakenAway {
            let destage = spec.destage.engine();
            shard.change_cache(id, CacheChange::Tune(Mode::WriteThrough, destage, spec.copies)).await?;
        }
        let discard = if afterwards == Afterwards::Reverted { Discard::Silent } else { Discard::Told };
        if !self.discard_on_shard(name, (&shard, id), discard).await? {
            return self.discard_abandoned(name).await;
        }
        self.look(name, &shard, id).await;
        tracing::warn!("{name}: {} of dirty data was discarded by command", Size(dirty).human());
        Ok(vec![format!("{} that only flash had is lost", Size(dirty).human())])
    }

    /// The cache is forgotten as a whole: whatever it held, the disk begins again with what its backing has.
    async fn discard_offline(
        self: &Arc<Self>,
        name: &str,
        pool: &str,
        journal: JournalSpec,
    ) -> Result<Vec<String>, ApiError> {
        let flash = self.inner().pool(pool)?.flash.clone();
        release_owner(&flash, journal).await?;
        {
            let mut inner = self.inner();
            let disk = inner.disk_mut(name)?;
            disk.retry_after = None;
            if let Some(spec) = disk.wanted.cache.as_mut() {
                // What may be on devices that are away is nobody's from now on.
                spec.journal = Some(JournalSpec::new());
            }
        }
        self.save().await?;
        self.refresh_owners(pool).await;
        tracing::warn!("{name}: its cache was discarded by command, with what was dirty in it");
        Ok(vec!["what only flash had is lost; the cache starts empty".to_owned()])
    }

    /// Refuses to give up a cache of which nobody knows whether it holds dirty data.
    pub(super) fn check_given_up(&self, name: &str) -> Result<(), ApiError> {
        let inner = self.inner();
        let disk = inner.disk(name)?;
        let DiskPhase::Offline(_) = &disk.phase else { return Ok(()) };
        match disk.cache().and_then(|spec| spec.journal) {
            // It never had a ring, so it holds nothing.
            Some(journal) if journal.ring > 0 => Err(ApiError::conflict(format!(
                "{name} is offline, and its cache may hold data that is not on the backing"
            ))
            .hint(format!(
                "'hob disk show {name}' says why; bring the disk back, save that data with 'hob cache export-dirty {name} FILE', or give it up with \
                 --discard-dirty"
            ))),
            _ => Ok(()),
        }
    }

    /// Frees the room of a persistent cache that belongs to no disk.
    pub(crate) async fn orphan_discard(
        self: &Arc<Self>,
        pool: String,
        owner: String,
    ) -> Result<PoolChanged, ApiError> {
        let manager = self.clone();
        self.change("pool discard-orphan", pool.clone(), async move {
            manager.discard_orphan(&pool, &owner).await
        })
        .await
    }

    async fn discard_orphan(self: &Arc<Self>, pool: &str, owner: &str) -> Result<PoolChanged, ApiError> {
        // What is no owner at all is told first, whatever is being done to the pool.
        let _: CacheOwner = owner.parse().map_err(ApiError::invalid)?;
        let guard = self.guard_pool(pool, "changed")?;
        let (owner, flash) = {
            let inner = self.inner();
            (inner.orphan(pool, owner)?, inner.pool(pool)?.flash.clone())
        };
        let journal = JournalSpec { owner, ..JournalSpec::new() };
        release_owner(&flash, journal).await?;
        drop(guard);
        self.refresh_owners(pool).await;
        tracing::warn!("pool {pool}: the cache {owner}, which belonged to no disk, was discarded by command");
        let notes = self.top_up(pool).await;
        Ok(PoolChanged { pool: Some(self.pool(pool)?), notes })
    }
}
