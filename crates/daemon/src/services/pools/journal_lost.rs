//! Handles a cache whose journal cannot be written any more. Until the cache has a new journal or
//! is removed, changes of its disk wait, and fail after half a minute. First the state file records
//! the loss of the journal, so that recovery after a crash does not use the clean data that this
//! journal describes. Then the following actions are tried repeatedly, the cheapest first:
//!
//! 1. a new journal on devices other than the failed one;
//! 2. after a drain, a new journal, because the contents of the failed device no longer matter;
//! 3. a new cache in place of the old one. The state file records this first, so that the old data
//!    is never used again. Without space for a new cache, the disk continues without one.
//!
//! The cache of an offline disk that its shard could not remove only gets a new journal, and is
//! then closed.
//!
//! Unreadable dirty data is not discarded here. Only a command discards it (`hob cache
//! discard-dirty`).

use std::time::Duration;

use hob_engine::command::{CacheChange, Copies, Segment};
use hob_engine::units::{DeviceId, DiskId};

use super::Pools;
use super::allocation::AllocationRule;
use super::caches::no_cache;
use super::rings::release_owner;
use crate::api_error::{ApiError, Result};
use crate::services::registry::{DiskEntry, DiskPhase, PoolEntry};
use crate::services::registry::{GUARD_EVERY, JOURNAL_LOST};
use crate::shard_api::ShardHandle;
use crate::state::JournalSpec;

/// Pause between two attempts.
const RETRY_EVERY: Duration = Duration::from_secs(2);

/// Pause between two attempts to replace a journal that lost one of two copies.
const COPY_RETRY_EVERY: Duration = Duration::from_secs(30);

impl Pools {
    /// Replaces the lost journal of a disk's cache.
    pub(in crate::services) async fn replace_journal(&self, id: DiskId) {
        let Some((_, lost)) = self.ring_of(id) else { return };
        // The task with the disk's operation guard may wait for a drain, which waits for this
        // record.
        while let Some((name, _)) = self.ring_of(id) {
            let Err(error) = self.record_loss(&name, id).await else { break };
            tracing::error!("disk {name}: the loss of its journal could not be recorded: {error}");
            tokio::time::sleep(RETRY_EVERY).await;
        }
        loop {
            // A concurrent change of the disk may provide a new journal or remove the cache.
            let Some((name, ring)) = self.ring_of(id) else { return };
            if !lost.iter().any(|segment| ring.contains(segment)) {
                return self.journal_is_back(&name);
            }
            if let Some(_guard) = self.registry.guard_patiently(&name, "given a new journal").await {
                match self.try_to_replace(&name).await {
                    Ok(()) => return self.journal_is_back(&name),
                    Err(error) => tracing::error!(
                        "disk {name}: cannot create a new journal for its cache: {error}; trying again every 2 s"
                    ),
                }
            }
            tokio::time::sleep(RETRY_EVERY).await;
        }
    }

    /// Replaces a journal of which one of two copies is lost. hob no longer writes the lost copy,
    /// so that copy becomes outdated. If only the outdated copy were present at the next start,
    /// recovery would take it for the newest journal. This function does not replace a copy on a
    /// peer, because that copy is replaced together with the replicas of dirty data
    /// (`replicas.rs`).
    pub(in crate::services) async fn replace_journal_copy(&self, id: DiskId) {
        let Some(lost) = self.ring_in_service(id).await else { return };
        loop {
            let Some((name, ring)) = self.ring_of(id) else { return };
            let copies = self.registry.inner().disk(&name).ok().and_then(|disk| Some(disk.cache()?.copies));
            if copies == Some(Copies::Peer) || !lost.iter().any(|segment| ring.contains(segment)) {
                return;
            }
            // Health reports the missing copy until there is a new journal.
            if let Ok(disk) = self.registry.inner().disk_mut(&name) {
                disk.ring_copies = disk.ring_copies.min(1);
            }
            if let Some(_guard) = self.registry.guard_patiently(&name, "given a new journal").await {
                match self.renew_ring(&name).await {
                    Ok(()) => {
                        return tracing::info!(
                            "disk {name}: its cache has a new journal instead of an incomplete one"
                        );
                    }
                    Err(error) => tracing::warn!(
                        "disk {name}: a copy of its journal cannot be written any more, and a new journal cannot \
                         be made: {error}; trying again every {} s",
                        COPY_RETRY_EVERY.as_secs()
                    ),
                }
            }
            tokio::time::sleep(COPY_RETRY_EVERY).await;
        }
    }

    /// Saves in the state file that the dirty data of a lost journal ring is discarded. The shard
    /// waits for this record before it discards the data. The journal still describes the data as
    /// dirty.
    pub(in crate::services) async fn record_discard(&self, id: DiskId, ring: u32) {
        while let Some((name, _)) = self.ring_of(id) {
            let Err(error) = self.try_to_record_discard(&name, id, ring).await else { return };
            tracing::error!("disk {name}: the discard of its dirty data could not be recorded: {error}");
            tokio::time::sleep(RETRY_EVERY).await;
        }
    }

    async fn try_to_record_discard(&self, name: &str, id: DiskId, ring: u32) -> Result<()> {
        {
            let mut inner = self.registry.inner();
            let spec = inner.disk_mut(name)?.wanted.cache.as_mut().ok_or_else(|| no_cache(name))?;
            let Some(journal) = &mut spec.journal else { return Ok(()) };
            // If the last write of a new ring failed, flash may have this ring with the same dirty
            // data, although hob kept the old ring.
            journal.discarded_ring = journal.discarded_ring.max(ring).max(journal.unused);
        }
        self.registry.save_first().await?;
        let (shard, _) = self.registry.shard_of(name)?;
        shard.change_cache(id, CacheChange::DiscardRecorded(ring)).await?;
        Ok(())
    }

    /// If the journal of a disk's cache is lost, saves that the cache's dirty data is discarded.
    /// The caller does this before the discard, so that the command fails if the save fails.
    pub(in crate::services) async fn record_discard_first(&self, name: &str, id: DiskId) -> Result<()> {
        let lost = {
            let inner = self.registry.inner();
            let disk = inner.disk(name)?;
            let is_lost = disk.cache_reason.as_deref() == Some(JOURNAL_LOST);
            disk.cache().filter(|_| is_lost).and_then(|spec| spec.journal).map(|journal| journal.written)
        };
        match lost {
            Some(ring) => self.try_to_record_discard(name, id, ring).await,
            None => Ok(()),
        }
    }

    /// Gives a new journal to the cache of an offline disk that its shard still has as `id`. The
    /// shard could not close the cache, because its journal is lost. The cache is not drained,
    /// because hob may not use the disk's backing any more. The caller holds the operation guard.
    pub(in crate::services) async fn replace_journal_of_kept(
        &self,
        name: &str,
        shard: &ShardHandle,
        id: DiskId,
    ) -> Result<()> {
        let (pool, segments, copies) = {
            let mut inner = self.registry.inner();
            let disk = inner.disk_mut(name)?;
            let pool = disk.cache().filter(|spec| spec.journal.is_some()).map(|spec| spec.pool.clone());
            let pool = pool.filter(|_| disk.has_cache).ok_or_else(|| no_cache(name))?;
            // The new journal must not be on the devices of the lost one.
            disk.cache_reason = Some(JOURNAL_LOST.to_owned());
            (pool, disk.held.len() as u64, disk.ring_copies)
        };
        self.record_loss_of(name, shard, id).await?;
        let (ring, room) = self.new_ring(name, segments).await?;
        let number = ring.as_ref().map_or(0, |ring| ring.number);
        let made = match self.say_before(name, ring.as_ref()).await {
            Ok(()) => {
                let renewed = shard.change_cache(id, CacheChange::Shrink(0, ring)).await;
                renewed.map_err(ApiError::from)
            }
            Err(error) => Err(error),
        };
        match made {
            Ok(released) => {
                self.note_written(name, number).await;
                self.give_back(name, &pool, &released).await;
                self.journal_is_back(name);
                Ok(())
            }
            Err(error) => {
                self.note_unused_ring(name, number).await;
                if let Ok(disk) = self.registry.inner().disk_mut(name) {
                    disk.ring_copies = copies;
                }
                self.give_back(name, &pool, &room).await;
                Err(error)
            }
        }
    }

    async fn record_loss(&self, name: &str, id: DiskId) -> Result<()> {
        let (shard, _) = self.registry.shard_of(name)?;
        self.record_loss_of(name, &shard, id).await
    }

    /// Saves that the journal was lost. The journal may describe older, clean data at positions
    /// where the backing receives newer data from now on.
    async fn record_loss_of(&self, name: &str, shard: &ShardHandle, id: DiskId) -> Result<()> {
        let number = {
            let mut inner = self.registry.inner();
            let spec = inner.disk_mut(name)?.wanted.cache.as_mut().ok_or_else(|| no_cache(name))?;
            let Some(journal) = &mut spec.journal else { return Ok(()) };
            journal.lost_ring = journal.ring;
            journal.ring
        };
        self.registry.save_first().await?;
        shard.change_cache(id, CacheChange::LossRecorded(number)).await?;
        Ok(())
    }

    async fn try_to_replace(&self, name: &str) -> Result<()> {
        let Err(error) = self.renew_ring(name).await else { return Ok(()) };
        tracing::warn!("disk {name}: its cache is drained before it gets a new journal, because: {error}");
        let (shard, id) = self.registry.shard_of(name)?;
        self.clean(name, &shard, id).await?;
        if let Err(error) = self.renew_ring(name).await {
            tracing::warn!("disk {name}: its cache is replaced by an empty one, because: {error}");
            return self.replace_cache(name, &shard, id).await;
        }
        // The drain has switched off write-back.
        self.tune(name, &shard, id).await
    }

    /// Removes a drained cache, whatever its journal says, and creates a new cache. Write-back
    /// stays off until the saved state names the journal in service: dirty data must not belong to
    /// a cache that the next daemon does not know.
    async fn replace_cache(&self, name: &str, shard: &ShardHandle, id: DiskId) -> Result<()> {
        let (old, pool) = {
            let mut inner = self.registry.inner();
            let disk = inner.disk_mut(name)?;
            let spec = disk.wanted.cache.as_mut().ok_or_else(|| no_cache(name))?;
            let Some(journal) = spec.journal.replace(JournalSpec::new()) else { return Ok(()) };
            (journal, spec.pool.clone())
        };
        let mut former = Some(old);
        let gone = match self.registry.save_first().await {
            Ok(()) => self.take_replaced_cache(name, shard, id, &mut former).await,
            error => error,
        };
        if let Err(error) = gone {
            // The old cache is still in place, perhaps with a later ring.
            self.put_journal(name, former)?;
            self.registry.save().await?;
            self.tune(name, shard, id).await?;
            return Err(error);
        }
        let flash = self.registry.inner().pool(&pool)?.flash.clone();
        if let Err(error) = release_owner(&flash, old).await {
            tracing::warn!("pool {pool}: cannot release all segments of disk {name}: {error}");
        }
        self.refresh_owners(&pool).await;
        if let Err(error) = self.fit_cache(name, AllocationRule::AsFarAsPossible).await {
            let reason =
                format!("its journal could not be written, and a new cache could not be created: {error}");
            tracing::error!("disk {name}: it continues without a cache: {reason}");
            self.registry.inner().disk_mut(name)?.cache_reason = Some(reason);
        }
        self.registry.save().await
    }

    /// Returns the name of an online disk and the journal ring of its cache; `None` if the disk is
    /// not online or its cache has no journal.
    fn ring_of(&self, id: DiskId) -> Option<(String, Vec<Segment>)> {
        let inner = self.registry.inner();
        let disk = inner.disks.values().find(|disk| disk.id == id)?;
        let is_there = disk.has_cache && matches!(disk.phase, DiskPhase::Online(_));
        is_there.then(|| (disk.wanted.name.clone(), disk.ring.clone()))
    }

    /// Returns the journal ring of a disk's cache. A new or recovered cache may lose a copy of its
    /// first journal before the cache is in service. So this function waits until the operation in
    /// progress ends.
    async fn ring_in_service(&self, id: DiskId) -> Option<Vec<Segment>> {
        loop {
            if let Some((_, ring)) = self.ring_of(id) {
                return Some(ring);
            }
            if !self.registry.inner().disks.values().any(|disk| disk.id == id && disk.busy.is_some()) {
                return None;
            }
            tokio::time::sleep(GUARD_EVERY).await;
        }
    }

    fn journal_is_back(&self, name: &str) {
        tracing::info!("disk {name}: its cache has a working journal again");
        if let Ok(disk) = self.registry.inner().disk_mut(name)
            && disk.cache_reason.as_deref() == Some(JOURNAL_LOST)
        {
            disk.cache_reason = None;
        }
    }
}

impl DiskEntry {
    /// Returns the pool ids of the devices on which the journal could not be written.
    pub(in crate::services) fn devices_of_lost_journal(&self, pool: &PoolEntry) -> Vec<DeviceId> {
        if self.cache_reason.as_deref() != Some(JOURNAL_LOST) {
            return Vec::new();
        }
        let ids = pool.devices.iter().filter_map(|device| device.ids);
        let has_ring = |id: DeviceId| self.ring.iter().any(|segment| segment.device == id);
        ids.filter(|ids| has_ring(ids.on_shards)).map(|ids| ids.in_pool).collect()
    }
}
