//! Drain of a recovered cache for whose next journal ring the pool has no space
//! (docs/decisions/0051).
//!
//! Without a ring, the cache cannot record changes, so its disk cannot be served with the cache.
//! hob writes the dirty data to the backing before it serves the disk, and then removes the cache
//! from flash. The disk then gets an empty cache. The journal of the empty cache gets the space of
//! the old journal.
//!
//! | step | effect of an interruption after it |
//! |---|---|
//! | save that the recorded backing state is invalid | the cache is recovered and drained again |
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
use tokio::time::Instant;

use super::Disks;
use super::dirty::Dirty;
use super::kept_cache::Kept;
use super::recover::RETRY_MIN;
use super::to_backing::{DirtyPass, write_to_backing};
use crate::api_error::{ApiError, Result, open_error};
use crate::cluster::Taken;
use crate::hardware::{Backing, BackingInfo};
use crate::services::flash::blocking;
use crate::services::pools::no_cache;
use crate::services::registry::{DiskEntry, Inner, PoolEntry};

impl Disks {
    /// Returns true if the disk's recovered cache must be drained before the disk is served: the
    /// last attempt to use the cache found no space for its journal, and the pool's free space has
    /// not grown since then. Returns false for a read-only disk, whose cache waits for space.
    pub(super) fn needs_offline_drain(&self, name: &str) -> bool {
        let inner = self.registry.inner();
        inner.disk(name).is_ok_and(|disk| inner.lacks_journal_space(disk) && !disk.wanted.read_only)
    }

    /// Writes the dirty data of a recovered cache to the backing, and removes the cache from flash.
    /// The caller holds the operation guard of the offline disk, and has closed the backing. `info`
    /// describes the backing with which the cache was compared.
    pub(super) async fn drain_offline(
        &self,
        name: &str,
        kept: Kept,
        info: &BackingInfo,
        taken: Option<&Taken>,
    ) -> Result<()> {
        let (stop, began) = (Arc::new(AtomicBool::new(false)), Instant::now());
        self.registry.inner().disk_mut(name)?.offline_drain = Some(stop.clone());
        let drained = self.drain_and_free(name, kept, info, taken, &stop).await;
        let mut inner = self.registry.inner();
        let disk = inner.disk_mut(name)?;
        disk.offline_drain = None;
        if drained.is_err() && !stop.load(Ordering::Relaxed) {
            disk.retry_after = Some(Instant::now() + began.elapsed().max(RETRY_MIN));
        }
        drained
    }

    async fn drain_and_free(
        &self,
        name: &str,
        kept: Kept,
        info: &BackingInfo,
        taken: Option<&Taken>,
        stop: &Arc<AtomicBool>,
    ) -> Result<()> {
        let Kept { recovered, upto, in_pool, .. } = kept;
        let spec = self.registry.inner().disk(name)?.cache().cloned().ok_or_else(|| no_cache(name))?;
        let journal = spec.journal.ok_or_else(|| no_cache(name))?;
        let flash = self.registry.inner().pool(&spec.pool)?.flash.clone();
        let bytes = recovered.summary.sectors_dirty * SECTOR_BYTES;
        if bytes > 0 {
            tracing::warn!(
                "disk {name}: pool {} has no space for the journal of its recovered cache; hob writes the cache's \
                 dirty data ({}) to the backing before it serves the disk",
                spec.pool,
                Size(bytes).human()
            );
            let reader = flash
                .read(|pool| SectorReader::new(pool).map_err(|error| ApiError::failed(error.to_string())))
                .await?;
            let dirty = Dirty::of_recovered(recovered, in_pool, reader);
            self.write_dirty(name, dirty, bytes, info, taken, stop).await?;
        }
        self.pools.note_end(&spec).await?;
        flash.make_void(OwnerId(journal.owner.0), upto).await?;
        self.free_cache_of_offline(name, &spec.pool, journal).await?;
        self.registry.inner().disk_mut(name)?.too_few_for_journal = None;
        Ok(())
    }

    /// Opens the backing and writes `bytes` of dirty data to it.
    async fn write_dirty(
        &self,
        name: &str,
        mut dirty: Dirty,
        bytes: u64,
        info: &BackingInfo,
        taken: Option<&Taken>,
        stop: &Arc<AtomicBool>,
    ) -> Result<()> {
        let wanted = self.registry.inner().disk(name)?.wanted.clone();
        let options = self.open_options(name, &wanted).await?;
        let backing = blocking(move || Backing::open(&wanted.backing, Access::ReadWrite, &options)).await?;
        let backing = backing.map_err(|error| open_error(&error))?;
        // For a moment the backing was not locked, so another program may have changed it.
        let state = |info: &BackingInfo| (info.identity, info.size_bytes, info.times);
        if state(backing.info()) != state(info) {
            return Err(ApiError::failed("its backing was changed by another program"));
        }
        if let Some(spec) = self.registry.inner().disk_mut(name)?.wanted.cache.as_mut() {
            // From now on, the backing is not in the recorded state.
            spec.journal.iter_mut().for_each(|it| (it.closed, it.evidence) = (None, None));
        }
        self.registry.save_first().await?;
        self.record_service(name).await;
        let lease = taken.map(|taken| taken.clock.clone());
        let (registry, disk, stop) = (self.registry.clone(), name.to_owned(), stop.clone());
        blocking(move || {
            let doing = "is being written to the backing, because its pool has no space for its journal";
            let mut pass = DirtyPass::new(&registry, &disk, "its cache", doing, bytes);
            let may_go_on = || !stop.load(Ordering::Relaxed);
            write_to_backing(&mut dirty, backing, lease.as_ref(), &may_go_on, |range| pass.advance(range))
        })
        .await?
    }
}

impl Inner {
    /// Stops the drains of offline disks whose pools have space for their journals now. The next
    /// attempts to open these disks keep their caches.
    pub(in crate::services) fn stop_needless_drains(&self) {
        for disk in self.disks.values().filter(|disk| !self.lacks_journal_space(disk)) {
            disk.offline_drain.iter().for_each(|stop| stop.store(true, Ordering::Relaxed));
        }
    }

    /// Returns true if the last attempt to use the disk's cache found no space for its journal, and
    /// the pool's free space has not grown since then.
    fn lacks_journal_space(&self, disk: &DiskEntry) -> bool {
        let free = disk.cache().and_then(|spec| self.pool(&spec.pool).ok()).map(PoolEntry::free_segments);
        disk.too_few_for_journal.zip(free).is_some_and(|(before, now)| now <= before)
    }

    /// Stops the drain of an offline disk. Returns false if the disk is not being drained.
    pub(in crate::services) fn stop_offline_drain(&self, name: &str) -> bool {
        let drain = self.disk(name).ok().and_then(|disk| disk.offline_drain.as_ref());
        drain.map(|stop| stop.store(true, Ordering::Relaxed)).is_some()
    }
}
