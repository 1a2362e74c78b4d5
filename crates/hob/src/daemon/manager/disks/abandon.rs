//! Disks and dirty data that are given up whether the backing answers or not (`hob disk remove --discard-dirty`, `hob cache discard-dirty`).
//!
//! Neither asks the backing for anything. A disk that is removed is *abandoned*: its clients are disconnected, and what waits for its backing fails
//! within about a second. A disk that stays goes on with its backing: requests that wait for that longer than 1.5 s fail, so that
//! nothing is in flight when the cache is changed. Requests in the kernel (a file on a filesystem that hangs) or in a library cannot be
//! called back; then this disk is abandoned too, goes offline, and comes back when the last of them has ended. Until then its id is not used
//! again, its file stays locked, and the memory of those requests stays out of use.

use std::time::Duration;

use hob_control::{OnClients, Size};
use hob_engine::command::{CacheChange, CommandError, Discard, Mode, Segment};
use hob_engine::units::{DiskId, SECTOR_BYTES};
use tokio::time::timeout;

use super::Disks;
use crate::daemon::manager::api_error::ApiError;
use crate::daemon::manager::flash;
use crate::daemon::manager::registry::{DiskPhase, Inner};
use crate::daemon::shard_api::{Gone, ShardError, ShardHandle};
use crate::daemon::state::JournalSpec;

/// A disk that is removed waits that long for its backing, if that was not given up.
const LEAVE_MAX: Duration = Duration::from_secs(30);

/// Files are unmounted within that time, or in the background.
const UNMOUNT_MAX: Duration = Duration::from_secs(2);

/// A request that began later may make data dirty once more.
const DISABLE_TRIES: usize = 3;

impl Disks {
    /// Takes a disk from its shard. A backing that does not let it go is abandoned.
    pub(in crate::daemon::manager) async fn leave_shard(
        &self,
        name: &str,
        shard: &ShardHandle,
        id: DiskId,
    ) -> Result<Gone, ShardError> {
        let removal = shard.remove_disk(id);
        tokio::pin!(removal);
        let gone = match timeout(LEAVE_MAX, &mut removal).await {
            Ok(gone) => gone?,
            Err(_) => {
                tracing::warn!(
                    "{name}: the backing does not answer; closing it without waiting for its requests"
                );
                self.registry.inner().abandoned.insert(id, name.to_owned());
                shard.abandon(id);
                removal.await?
            }
        };
        if !gone.is_closing {
            self.registry.inner().abandoned.remove(&id);
        }
        Ok(gone)
    }

    /// Unmounts a disk's files as [`hide_file`](Self::hide_file) does, but does not wait for long: what programs have written to a mapped file may
    /// wait for the backing. One that is open keeps the disk, unless clients are to be disconnected.
    pub(in crate::daemon::manager) async fn hide_file_soon(
        &self,
        name: &str,
        clients: OnClients,
    ) -> Result<(), ApiError> {
        match timeout(UNMOUNT_MAX, self.exports.hide_file(name)).await {
            Ok(Err(error)) if clients == OnClients::Refuse => Err(error),
            Ok(_) => Ok(()),
            Err(_) => {
                tracing::warn!("{name}: its file is unmounted in the background");
                Ok(())
            }
        }
    }

    /// Takes a disk that is to be removed from its shard, without its dirty data.
    pub(in crate::daemon::manager) async fn take_abandoned(
        &self,
        name: &str,
    ) -> Result<Vec<String>, ApiError> {
        let (shard, id) = self.registry.shard_of(name)?;
        self.exports.table().remove_disk(name);
        self.registry.inner().disk_mut(name)?.phase = DiskPhase::Removing;
        let dirty = self.leave_backing(name, &shard, id).await?;
        Ok(dirty.map(|dirty| format!("{} that only flash had is lost", dirty.human())).into_iter().collect())
    }

    /// Gives up what is dirty, and takes the disk offline: requests to its backing cannot be called back.
    pub(in crate::daemon::manager) async fn discard_abandoned(
        &self,
        name: &str,
    ) -> Result<Vec<String>, ApiError> {
        let (shard, id) = self.registry.shard_of(name)?;
        let error = ApiError::failed("requests to its backing hang, and cannot be cancelled")
            .hint("the disk is opened again when the hanging requests have ended");
        self.exports.table().remove_disk(name);
        let pool = {
            let mut inner = self.registry.inner();
            let new_id = inner.new_disk_id();
            let disk = inner.disk_mut(name)?;
            disk.id = new_id;
            disk.cache().map(|spec| (spec.clone(), spec.pool.clone()))
        };
        self.note_offline(name, &error);
        let dirty = self.leave_backing(name, &shard, id).await?;
        self.exports.hide_file_at_end(name).await;
        if let Some((spec, pool)) = pool {
            if let Some(spec) = self.registry.inner().disk_mut(name)?.wanted.cache.as_mut() {
                spec.journal = Some(JournalSpec::new());
            }
            self.registry.save().await?;
            self.pools.forget_owner(&spec).await;
            self.pools.refresh_owners(&pool).await;
        }
        let lost = dirty.unwrap_or(Size(0)).human();
        tracing::warn!("{name}: {lost} of dirty data was discarded by command");
        Ok(vec![format!(
            "{lost} that only flash had is lost; the disk is offline until requests that hang at its backing have ended"
        )])
    }

    /// Abandons a disk and takes it from its shard, with its cache, whose room is free afterwards. Returns how much was dirty, if
    /// something could be.
    async fn leave_backing(
        &self,
        name: &str,
        shard: &ShardHandle,
        id: DiskId,
    ) -> Result<Option<Size>, ApiError> {
        let (spec, has_cache) = {
            let mut inner = self.registry.inner();
            inner.abandoned.insert(id, name.to_owned());
            let disk = inner.disk(name)?;
            (disk.cache().cloned(), disk.has_cache)
        };
        shard.abandon(id);
        tracing::warn!("{name}: closing the backing without waiting for its requests");
        let mut dirty = None;
        let mut released = Vec::new();
        if let Some(spec) = spec.as_ref().filter(|spec| has_cache && spec.journal.is_some()) {
            let sectors = shard.stats(id).await.map_or(0, |stats| stats.sectors_dirty);
            dirty = Some(Size(sectors * SECTOR_BYTES));
            let through = CacheChange::Tune(Mode::WriteThrough, spec.destage.engine(), spec.copies);
            if let Err(error) = shard.change_cache(id, through).await {
                tracing::debug!("{name}: {error}");
            }
            released = self.drop_cache(name, shard, id).await;
        }
        let gone = match self.leave_shard(name, shard, id).await {
            Ok(gone) => gone,
            Err(error) => {
                tracing::error!("{name}: its shard did not close it: {error}");
                Gone::default()
            }
        };
        let Gone { released: more, memory, failures_owed, .. } = gone;
        if let Ok(disk) = self.registry.inner().disk_mut(name) {
            disk.set_owed(failures_owed);
        }
        released.extend(more);
        flash::blocking(move || drop(memory)).await?;
        let free = self.pools.let_go(name, &released, |_| true);
        {
            let mut inner = self.registry.inner();
            let disk = inner.disk_mut(name)?;
            (disk.has_cache, disk.memory) = (false, None);
        }
        if let Some(spec) = &spec {
            self.registry.give_back(&spec.pool, &free).await;
        }
        Ok(dirty)
    }

    /// Drops the cache of an abandoned disk. Returns its segments.
    async fn drop_cache(&self, name: &str, shard: &ShardHandle, id: DiskId) -> Vec<Segment> {
        let mut result = Err(ShardError::Command(CommandError::Dirty));
        for _ in 0..DISABLE_TRIES {
            let discarded = shard.change_cache(id, CacheChange::DiscardDirty(Discard::Silent)).await;
            result = match discarded {
                Ok(_) => shard.change_cache(id, CacheChange::Disable).await,
                error => error,
            };
            if result != Err(ShardError::Command(CommandError::Dirty)) {
                break;
            }
        }
        match result {
            Ok(released) => released,
            Err(ShardError::Command(CommandError::NoCache)) => Vec::new(),
            Err(error) => {
                tracing::warn!("{name}: its cache is removed too: {error}");
                Vec::new()
            }
        }
    }

    /// The last request of an abandoned backing has ended.
    pub(in crate::daemon::manager) fn backing_closed(&self, id: DiskId) {
        let Some(name) = self.registry.inner().abandoned.remove(&id) else { return };
        tracing::info!("{name}: the last request to the abandoned backing has ended");
        if matches!(
            self.registry.inner().disk(&name).map(|disk| matches!(disk.phase, DiskPhase::Offline(_))),
            Ok(true)
        ) {
            let service = self.clone();
            tokio::spawn(async move { service.bring_online(&name).await });
        }
    }
}

impl Inner {
    /// Does a backing that this disk left still have requests of it?
    pub(in crate::daemon::manager) fn is_abandoned(&self, name: &str) -> bool {
        self.abandoned.values().any(|of| of == name)
    }
}
