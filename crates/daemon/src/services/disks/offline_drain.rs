//! Drain of a recovered cache for whose next journal ring the pool has no space
//! (docs/decisions/0051).
//!
//! Without a ring, the cache cannot record changes, so its disk cannot be served with the cache.
//! hob writes the dirty data to the backing before it serves the disk, and then removes the cache
//! from flash. The disk gets an empty cache, whose journal has the space of the old one.
//!
//! | step | effect of an interruption after it |
//! |---|---|
//! | save that the recorded state of the backing means nothing any more | the cache is recovered and drained again |
//! | write every dirty sector to the backing, then flush the backing | as after the previous step |
//! | save that the cache has ended, and invalidate its journal rings | the cache starts empty |
//! | free the segments of the cache | the cache starts empty |
//!
//! A command that discards the dirty data, and the end of the daemon, stop the drain.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use hob_control::Size;
use hob_engine::command::Access;
use hob_engine::units::SECTOR_BYTES;
use hob_storage::pool::{OwnerId, SectorReader};

use super::Disks;
use super::dirty::Dirty;
use super::recover::Kept;
use super::to_backing::{DirtyPass, write_to_backing};
use crate::api_error::{ApiError, Result, open_error};
use crate::cluster::Taken;
use crate::hardware::Backing;
use crate::services::flash::blocking;
use crate::services::pools::no_cache;
use crate::services::registry::{Inner, PoolEntry};

impl Disks {
    /// Returns true if the disk's recovered cache must be drained before the disk is served: the last
    /// attempt to use the cache found no space for its journal, and the pool has not got more since.
    /// The cache of a read-only disk waits for space.
    pub(super) fn needs_offline_drain(&self, name: &str) -> bool {
        let inner = self.registry.inner();
        let Ok(disk) = inner.disk(name) else { return false };
        let free = disk.cache().and_then(|spec| inner.pool(&spec.pool).ok()).map(PoolEntry::free_segments);
        let lacks = disk.too_few_for_journal.zip(free).is_some_and(|(before, now)| now <= before);
        lacks && !disk.wanted.read_only
    }

    /// Writes the dirty data of a recovered cache to the backing, and removes the cache from flash.
    /// The caller holds the operation guard of the offline disk, and has closed the backing.
    pub(super) async fn drain_offline(&self, name: &str, kept: Kept, taken: Option<&Taken>) -> Result<()> {
        let stop = Arc::new(AtomicBool::new(false));
        self.registry.inner().disk_mut(name)?.offline_drain = Some(stop.clone());
        let drained = self.drain_to_backing(name, kept, taken, stop).await;
        self.registry.inner().disk_mut(name)?.offline_drain = None;
        drained
    }

    async fn drain_to_backing(
        &self,
        name: &str,
        kept: Kept,
        taken: Option<&Taken>,
        stop: Arc<AtomicBool>,
    ) -> Result<()> {
        let Kept { recovered, upto, in_pool, .. } = kept;
        let bytes = recovered.summary.sectors_dirty * SECTOR_BYTES;
        let (wanted, pool, flash) = {
            let mut inner = self.registry.inner();
            let spec = inner.disk_mut(name)?.wanted.cache.as_mut().ok_or_else(|| no_cache(name))?;
            if let Some(journal) = &mut spec.journal {
                (journal.closed, journal.evidence) = (None, None);
            }
            let pool = spec.pool.clone();
            (inner.disk(name)?.wanted.clone(), pool.clone(), inner.pool(&pool)?.flash.clone())
        };
        let journal = wanted.cache.as_ref().and_then(|spec| spec.journal).ok_or_else(|| no_cache(name))?;
        self.registry.save_first().await?;
        tracing::warn!(
            "disk {name}: pool {pool} has no space for the journal of its recovered cache; hob writes the cache's \
             dirty data ({}) to the backing before it serves the disk",
            Size(bytes).human()
        );
        if bytes > 0 {
            self.record_service(name).await;
            let reader = flash
                .read(|pool| SectorReader::new(pool).map_err(|error| ApiError::failed(error.to_string())))
                .await?;
            let options = self.open_options(name, &wanted).await?;
            let lease = taken.map(|taken| taken.clock.clone());
            let (registry, disk) = (self.registry.clone(), name.to_owned());
            blocking(move || {
                let backing = Backing::open(&wanted.backing, Access::ReadWrite, &options)
                    .map_err(|error| open_error(&error))?;
                let mut dirty = Dirty::of_recovered(recovered, in_pool, reader);
                let doing = "is being written to the backing, because its pool has no space for its journal";
                let mut pass = DirtyPass::new(&registry, &disk, "its cache", doing, bytes);
                let may_go_on = || !stop.load(Ordering::Relaxed);
                write_to_backing(&mut dirty, backing, lease.as_ref(), &may_go_on, |range| pass.advance(range))
            })
            .await??;
        }
        self.pools.note_end(&wanted.cache.ok_or_else(|| no_cache(name))?).await?;
        flash.make_void(OwnerId(journal.owner.0), upto).await?;
        self.free_cache_of_offline(name, &pool, journal).await?;
        self.registry.inner().disk_mut(name)?.too_few_for_journal = None;
        Ok(())
    }
}

impl Inner {
    /// Stops the drain of an offline disk. Returns false if the disk is not being drained.
    pub(in crate::services) fn stop_offline_drain(&self, name: &str) -> bool {
        let drain = self.disk(name).ok().and_then(|disk| disk.offline_drain.as_ref());
        drain.map(|stop| stop.store(true, Ordering::Relaxed)).is_some()
    }
}
