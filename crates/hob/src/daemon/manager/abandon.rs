//! Disks and dirty data that are given up whether the backing answers or not (`hob disk remove --discard-dirty`, `hob cache discard-dirty`).
//!
//! Neither asks the backing for anything. A disk that is removed is *abandoned*: its clients are disconnected, and what waits for its backing fails
//! within about a second. A disk that stays goes on with its backing: requests that wait for that longer than [`GRACE`] fail, so that
//! nothing is in flight when the cache is changed. Requests in the kernel (a file on a filesystem that hangs) or in a library cannot be
//! called back; then this disk is abandoned too, goes offline, and comes back when the last of them has ended. Until then its id is not used
//! again, its file stays locked, and the memory of those requests stays out of use.

use std::sync::Arc;
use std::time::Duration;

use hob_control::{OnClients, Size};
use hob_engine::command::{CacheChange, CommandError, Discard, Mode, Segment};
use hob_engine::units::{DiskId, SECTOR_BYTES};
use tokio::time::{Instant, sleep, timeout};

use super::api_error::ApiError;
use super::drain::DRAINING;
use super::events::CLAIM_EVERY;
use super::migration::MIGRATING;
use super::operation_guard::OperationGuard;
use super::{DiskPhase, Inner, Manager, flash};
use crate::daemon::shard_api::{Gone, ShardError, ShardHandle};
use crate::daemon::state::JournalSpec;

/// Requests have that long to end by themselves.
const GRACE: Duration = Duration::from_millis(1500);

/// Pause between two times at which what waits fails: a request may ask the backing again when its first I/O has failed.
const EXPIRE_EVERY: Duration = Duration::from_millis(250);

/// A change that takes longer than this does not end by failing requests: they cannot be called back.
const DISCARD_MAX: Duration = Duration::from_millis(3500);

/// Changes under way are waited for that long.
const CLAIM_MAX: Duration = Duration::from_secs(4);

/// A disk that is removed waits that long for its backing, if that was not given up.
const LEAVE_MAX: Duration = Duration::from_secs(30);

/// What is being done to a disk that is removed.
pub(super) const REMOVING: &str = "removed";

/// Files are unmounted within that time, or in the background.
const UNMOUNT_MAX: Duration = Duration::from_secs(2);

/// A request that began later may make data dirty once more.
const DISABLE_TRIES: usize = 3;

impl Manager {
    /// Takes the operation guard of a disk for a change that gives its dirty data up. Ends what waits for the backing, which may be dead: a drain, other changes.
    pub(super) async fn guard_to_discard(
        self: &Arc<Self>,
        name: &str,
        doing: &'static str,
    ) -> Result<OperationGuard, ApiError> {
        let began = Instant::now();
        loop {
            let error = match self.guard_disk(name, doing) {
                Ok(guard) => return Ok(guard),
                Err(error) => error,
            };
            let (busy, online) = {
                let inner = self.inner();
                let disk = inner.disk(name)?;
                (disk.busy, disk.shard().ok().map(|shard| (shard, disk.id)))
            };
            let waited = began.elapsed();
            let Some((shard, id)) = online else { return Err(error) };
            if busy == Some(MIGRATING) || waited >= CLAIM_MAX {
                return Err(error);
            }
            if busy == Some(DRAINING) || waited >= GRACE {
                let _ = timeout(CLAIM_EVERY, shard.change_cache(id, CacheChange::StopDrain)).await;
            }
            if waited >= GRACE {
                shard.expire_requests(id);
            }
            if waited >= 2 * GRACE && doing == REMOVING {
                // The other change may wait for requests that cannot be called back.
                self.inner().abandoned.insert(id, name.to_owned());
                shard.abandon(id);
            }
            sleep(CLAIM_EVERY).await;
        }
    }

    /// Takes a disk from its shard. A backing that does not let it go is abandoned.
    pub(super) async fn leave_shard(
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
                tracing::warn!("{name}: its backing does not answer; it is left without waiting for it");
                self.inner().abandoned.insert(id, name.to_owned());
                shard.abandon(id);
                removal.await?
            }
        };
        if !gone.is_closing {
            self.inner().abandoned.remove(&id);
        }
        Ok(gone)
    }

    /// Unmounts a disk's files as [`hide_file`](Self::hide_file) does, but does not wait for long: what programs have written to a mapped file may
    /// wait for the backing. One that is open keeps the disk, unless clients are to be disconnected.
    pub(super) async fn hide_file_soon(
        self: &Arc<Self>,
        name: &str,
        clients: OnClients,
    ) -> Result<(), ApiError> {
        match timeout(UNMOUNT_MAX, self.hide_file(name)).await {
            Ok(Err(error)) if clients == OnClients::Refuse => Err(error),
            Ok(_) => Ok(()),
            Err(_) => {
                tracing::warn!("{name}: its file is unmounted in the background");
                Ok(())
            }
        }
    }

    /// Gives up what is dirty in the cache of a disk that stays in use. False: requests cannot be called back, and nothing was changed yet.
    pub(super) async fn discard_on_shard(
        &self,
        name: &str,
        (shard, id): (&ShardHandle, DiskId),
        discard: Discard,
    ) -> Result<bool, ShardError> {
        let change = shard.change_cache(id, CacheChange::DiscardDirty(discard));
        match timeout(DISCARD_MAX, expiring(name, shard, id, change)).await {
            Ok(Ok(_)) | Ok(Err(ShardError::Command(CommandError::NoCache))) => Ok(true),
            Ok(Err(error)) => Err(error),
            Err(_) => Ok(false),
        }
    }

    /// Takes the cache of a disk away whose dirty data was given up. Requests that wait for the backing fail.
    pub(super) async fn take_discarded_cache(self: &Arc<Self>, name: &str) -> Result<(), ApiError> {
        let Ok((shard, id)) = self.shard_of(name) else { return self.take_cache(name).await };
        expiring(name, &shard, id, self.take_cache(name)).await
    }

    /// Takes a disk that is to be removed from its shard, without its dirty data.
    pub(super) async fn take_abandoned(self: &Arc<Self>, name: &str) -> Result<Vec<String>, ApiError> {
        let (shard, id) = self.shard_of(name)?;
        self.exports.remove_disk(name);
        self.inner().disk_mut(name)?.phase = DiskPhase::Removing;
        let dirty = self.leave_backing(name, &shard, id).await?;
        Ok(dirty.map(|dirty| format!("{} that only flash had is lost", dirty.human())).into_iter().collect())
    }

    /// Gives up what is dirty, and takes the disk offline: requests to its backing cannot be called back.
    pub(super) async fn discard_abandoned(self: &Arc<Self>, name: &str) -> Result<Vec<String>, ApiError> {
        let (shard, id) = self.shard_of(name)?;
        let error = ApiError::failed("requests to its backing hang, and cannot be cancelled")
            .hint("the disk is opened again when they have ended");
        self.exports.remove_disk(name);
        let pool = {
            let mut inner = self.inner();
            let new_id = inner.new_disk_id();
            let disk = inner.disk_mut(name)?;
            disk.id = new_id;
            disk.cache().map(|spec| (spec.clone(), spec.pool.clone()))
        };
        self.note_offline(name, &error);
        let dirty = self.leave_backing(name, &shard, id).await?;
        self.hide_file_at_end(name).await;
        if let Some((spec, pool)) = pool {
            if let Some(spec) = self.inner().disk_mut(name)?.wanted.cache.as_mut() {
                spec.journal = Some(JournalSpec::new());
            }
            self.save().await?;
            self.forget_owner(&spec).await;
            self.refresh_owners(&pool).await;
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
        self: &Arc<Self>,
        name: &str,
        shard: &ShardHandle,
        id: DiskId,
    ) -> Result<Option<Size>, ApiError> {
        let (spec, has_cache) = {
            let mut inner = self.inner();
            inner.abandoned.insert(id, name.to_owned());
            let disk = inner.disk(name)?;
            (disk.cache().cloned(), disk.has_cache)
        };
        shard.abandon(id);
        tracing::warn!("{name}: it leaves its backing without waiting for it");
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
                tracing::error!("{name}: its shard does not let it go: {error}");
                Gone::default()
            }
        };
        let Gone { released: more, memory, failures_owed, .. } = gone;
        if let Ok(disk) = self.inner().disk_mut(name) {
            disk.wanted.flush_failures_owed = failures_owed;
        }
        released.extend(more);
        flash::blocking(move || drop(memory)).await?;
        let free = self.let_go(name, &released, |_| true);
        {
            let mut inner = self.inner();
            let disk = inner.disk_mut(name)?;
            (disk.has_cache, disk.memory) = (false, None);
        }
        if let Some(spec) = &spec {
            self.give_back(&spec.pool, &free).await;
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
                tracing::warn!("{name}: its cache is taken away with it: {error}");
                Vec::new()
            }
        }
    }

    /// The last request of an abandoned backing has ended.
    pub(super) fn backing_closed(self: &Arc<Self>, id: DiskId) {
        let Some(name) = self.inner().abandoned.remove(&id) else { return };
        tracing::info!("{name}: the last request to the backing that it left has ended");
        if matches!(
            self.inner().disk(&name).map(|disk| matches!(disk.phase, DiskPhase::Offline(_))),
            Ok(true)
        ) {
            let manager = self.clone();
            tokio::spawn(async move { manager.bring_online(&name).await });
        }
    }
}

impl Inner {
    /// Does a backing that this disk left still have requests of it?
    pub(super) fn is_abandoned(&self, name: &str) -> bool {
        self.abandoned.values().any(|of| of == name)
    }
}

/// Waits for a change. Once it has taken longer than [`GRACE`], requests that wait for the disk's backing fail, again and again.
async fn expiring<T>(name: &str, shard: &ShardHandle, id: DiskId, change: impl Future<Output = T>) -> T {
    tokio::pin!(change);
    let mut wait = GRACE;
    loop {
        if let Ok(result) = timeout(wait, &mut change).await {
            return result;
        }
        if wait == GRACE {
            tracing::warn!("{name}: requests that wait for its backing fail now: its dirty data is given up");
        }
        wait = EXPIRE_EVERY;
        shard.expire_requests(id);
    }
}
