//! Removal of disks and of dirty data without help from the backing (`hob disk remove
//! --discard-dirty`, `hob cache discard-dirty`).
//!
//! Neither command sends a request to the backing. A disk that is removed is *abandoned*: its
//! clients are disconnected, and requests that wait for its backing fail within about a second. A
//! disk that is not removed keeps its backing. Requests that have waited longer than 1.5 s fail, so
//! that no request is in flight when the cache is changed.
//!
//! Requests inside the kernel (a file on a hung filesystem) or inside a library cannot be
//! cancelled. If the disk has such requests, hob abandons the disk even if the command does not
//! remove it: the disk goes offline, and hob opens it again after the last such request has ended.
//! Until then hob does not reuse the disk's id, the disk's file stays locked, and the memory of
//! those requests stays in use.

use std::time::Duration;

use hob_control::{OnClients, Size};
use hob_engine::command::{CacheChange, CommandError, Discard, Mode, Segment};
use hob_engine::units::{DiskId, SECTOR_BYTES};
use hob_storage::pool::OwnerId;
use tokio::time::{Instant, sleep, timeout};

use super::Disks;
use crate::api_error::{ApiError, Result, conflict};
use crate::background::spawn;
use crate::cluster::Release;
use crate::services::flash;
use crate::services::registry::{DiskEntry, DiskPhase, Inner, JOURNAL_LOST, OPENING};
use crate::shard_api::{Gone, ShardError, ShardHandle};
use crate::state::{CacheSpec, JournalSpec};

/// Maximum time that the removal of a disk waits for the disk's backing. After this time, hob fails
/// the requests to the backing and removes the disk.
const LEAVE_MAX: Duration = Duration::from_secs(30);

/// Pause between two attempts to remove a disk from a shard that has refused the removal.
const REMOVE_EVERY: Duration = Duration::from_secs(5);

/// Interval of the log lines while a shard refuses to remove a disk.
const LOG_EVERY: Duration = Duration::from_secs(60);

/// Maximum time to wait for an unmount. A longer unmount continues in the background.
const UNMOUNT_MAX: Duration = Duration::from_secs(2);

/// Maximum number of attempts to drop a cache. A write that began after the previous attempt may
/// make data dirty again.
const DISABLE_TRIES: usize = 3;

impl Disks {
    /// Closes a disk and removes it from its shard. If the backing does not answer in time, fails
    /// the requests to the backing and then removes the disk.
    pub(in crate::services) async fn leave_shard(
        &self,
        name: &str,
        shard: &ShardHandle,
        id: DiskId,
    ) -> Result<Gone, ShardError> {
        self.leave_in_time(name, shard, id, shard.remove_disk(id)).await
    }

    /// Does the same as [`leave_shard`](Self::leave_shard), and also saves the disk's dirty
    /// bitmaps.
    pub(super) async fn leave_shard_with_bitmaps(
        &self,
        name: &str,
        shard: &ShardHandle,
        id: DiskId,
    ) -> Result<Gone, ShardError> {
        self.leave_in_time(name, shard, id, self.exports.take_from_shard(name, shard, id)).await
    }

    /// Waits for the removal of a disk from its shard. If the backing does not answer in time,
    /// fails the requests to the backing and then removes the disk.
    async fn leave_in_time(
        &self,
        name: &str,
        shard: &ShardHandle,
        id: DiskId,
        removal: impl Future<Output = Result<Gone, ShardError>>,
    ) -> Result<Gone, ShardError> {
        tokio::pin!(removal);
        let gone = match timeout(LEAVE_MAX, &mut removal).await {
            Ok(gone) => gone?,
            Err(_) => {
                tracing::warn!(
                    "disk {name}: its backing does not answer; hob stops waiting for it and removes the disk"
                );
                self.registry.inner().abandoned.insert(id, name.to_owned());
                shard.abandon(id);
                removal.await?
            }
        };
        let mut inner = self.registry.inner();
        if !gone.is_closing {
            inner.abandoned.remove(&id);
        }
        if gone.is_unanswered
            && let Ok(disk) = inner.disk_mut(name)
        {
            disk.note_unanswered();
        }
        Ok(gone)
    }

    /// Unmounts a disk's files like [`hide_file`](Self::hide_file), but waits at most
    /// [`UNMOUNT_MAX`]. The unmount waits for the writes of programs that have mapped a file, and
    /// these writes may wait for the backing. Fails if a file is open, unless clients may be
    /// disconnected.
    pub(in crate::services) async fn hide_file_soon(&self, name: &str, clients: OnClients) -> Result<()> {
        match timeout(UNMOUNT_MAX, self.exports.hide_file(name, OnClients::Refuse)).await {
            Ok(Err(error)) if clients == OnClients::Refuse => Err(error),
            Ok(_) => Ok(()),
            Err(_) => {
                tracing::warn!(
                    "disk {name}: the unmount of its file takes long and continues in the background"
                );
                Ok(())
            }
        }
    }

    /// Removes a disk from its shard and discards its dirty data. The caller then removes the disk
    /// from the daemon.
    pub(in crate::services) async fn take_abandoned(&self, name: &str) -> Result<Vec<String>> {
        let (shard, id) = self.registry.shard_of(name)?;
        self.note_end_of_cache(name).await?;
        self.exports.table().remove_disk(name).await;
        self.registry.inner().disk_mut(name)?.phase = DiskPhase::Removing;
        let dirty = self.leave_backing(name, &shard, id).await?;
        let lost = dirty.filter(|dirty| *dirty > Size(0));
        Ok(lost.map(|lost| format!("{} of dirty data is lost", lost.human())).into_iter().collect())
    }

    /// Discards the dirty data of a disk whose backing requests cannot be cancelled, and takes the
    /// disk offline.
    pub(in crate::services) async fn discard_abandoned(&self, name: &str) -> Result<Vec<String>> {
        let (shard, id) = self.registry.shard_of(name)?;
        self.note_end_of_cache(name).await?;
        let error = ApiError::failed("requests to its backing hang, and cannot be cancelled")
            .hint("the disk is opened again when the hanging requests have ended");
        self.exports.table().remove_disk(name).await;
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
            "{lost} of dirty data is lost; the disk is offline until requests that hang at its \
            backing have ended"
        )])
    }

    /// Saves in the state file that a disk's cache has ended. Otherwise hob could use the cache's
    /// journal after a restart, although the journal may describe discarded data as dirty. If the
    /// state file cannot be saved, the disk stays in use, so that the operator can repeat the
    /// command.
    async fn note_end_of_cache(&self, name: &str) -> Result<()> {
        let (spec, before) = {
            let mut inner = self.registry.inner();
            let disk = inner.disk_mut(name)?;
            let (has_cache, reason) = (disk.has_cache, disk.cache_reason.as_deref());
            let has_lost_journal = reason == Some(JOURNAL_LOST);
            let Some(spec) = disk.wanted.cache.as_mut().filter(|_| has_cache) else { return Ok(()) };
            let Some(journal) = spec.journal.as_mut() else { return Ok(()) };
            let before = journal.discarded_ring;
            if has_lost_journal {
                journal.discarded_ring = journal.ring;
            }
            (spec.clone(), before)
        };
        let noted = self.pools.note_end(&spec).await;
        if noted.is_err()
            && let Ok(disk) = self.registry.inner().disk_mut(name)
            && let Some(journal) = disk.wanted.cache.as_mut().and_then(|spec| spec.journal.as_mut())
        {
            journal.discarded_ring = before;
        }
        noted
    }

    /// Abandons the backing of a disk, drops the disk's cache, and removes the disk from its shard.
    /// The caller has saved that the cache has ended. Returns the amount of dirty data, if the disk
    /// could have dirty data. If the shard refuses the removal, the disk goes offline, and the
    /// removal from the shard is repeated in the background.
    async fn leave_backing(&self, name: &str, shard: &ShardHandle, id: DiskId) -> Result<Option<Size>> {
        let (spec, has_cache) = {
            let mut inner = self.registry.inner();
            inner.abandoned.insert(id, name.to_owned());
            let disk = inner.disk(name)?;
            (disk.cache().cloned(), disk.has_cache)
        };
        shard.abandon(id);
        tracing::warn!("disk {name}: requests to its backing are abandoned");
        let mut dirty = None;
        let mut dropped = None;
        if let Some(spec) = spec.as_ref().filter(|spec| has_cache && spec.journal.is_some()) {
            let sectors = shard.stats(id).await.map_or(0, |stats| stats.sectors_dirty);
            dirty = Some(Size(sectors * SECTOR_BYTES));
            let through = CacheChange::Tune(Mode::WriteThrough, spec.destage.engine(), spec.copies);
            if let Err(error) = shard.change_cache(id, through).await {
                tracing::debug!("{name}: {error}");
            }
            dropped = self.drop_cache(name, shard, id).await;
        }
        let gone = match self.leave_shard(name, shard, id).await {
            Ok(gone) => gone,
            Err(error @ (ShardError::Gone | ShardError::Command(CommandError::NoSuchDisk))) => {
                tracing::error!("disk {name}: its shard cannot remove it: {error}");
                Gone::default()
            }
            Err(error) => {
                return Err(self.stay_on_shard(name, shard, id, spec, dropped, error).await);
            }
        };
        let mut released = dropped.unwrap_or_default();
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

    /// Takes a disk offline that its shard has refused to remove, and repeats the removal from the
    /// shard. `dropped` has the segments of the disk's cache if hob could drop the cache. Otherwise
    /// the shard still uses these segments, so they stay reserved. Returns the error for the
    /// caller.
    async fn stay_on_shard(
        &self,
        name: &str,
        shard: &ShardHandle,
        id: DiskId,
        spec: Option<CacheSpec>,
        dropped: Option<Vec<Segment>>,
        refusal: ShardError,
    ) -> ApiError {
        tracing::error!("disk {name}: its shard refuses to remove it: {refusal}; hob tries again every 5 s");
        if let (Some(spec), Some(dropped)) = (spec, dropped) {
            let free = self.pools.let_go(name, &dropped, |_| true);
            if let Ok(disk) = self.registry.inner().disk_mut(name) {
                (disk.has_cache, disk.memory) = (false, None);
            }
            self.registry.give_back(&spec.pool, &free).await;
        }
        self.exports.hide_file_at_end(name).await;
        self.note_offline(name, &ApiError::from(refusal));
        self.remove_kept_disk(name, shard, id);
        left_by_shard(name)
    }

    /// Drops the cache of an abandoned disk. Returns its segments, or `None` if the shard still has
    /// the cache.
    async fn drop_cache(&self, name: &str, shard: &ShardHandle, id: DiskId) -> Option<Vec<Segment>> {
        // The state file says that the cache has ended, so the content of its journal does not
        // matter.
        let recorded = shard.change_cache(id, CacheChange::DiscardRecorded(u32::MAX)).await;
        tracing::debug!("{name}: {recorded:?}");
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
            Ok(released) => Some(released),
            Err(ShardError::Command(CommandError::NoCache)) => Some(Vec::new()),
            Err(error) => {
                tracing::warn!(
                    "disk {name}: its dirty data could not be discarded first, so its cache is removed with the disk: {error}"
                );
                None
            }
        }
    }

    /// Repeats the removal of a disk from its shard until it succeeds. The shard has refused the
    /// removal, for example because the journal of the disk's cache cannot be closed. The shard
    /// still uses the id `id` for the disk. So the disk's entry in the registry, which the caller
    /// takes offline, gets another id. If the entry still exists after the removal, hob opens the
    /// disk again.
    pub(super) fn remove_kept_disk(&self, name: &str, shard: &ShardHandle, id: DiskId) {
        let new_id = {
            let mut inner = self.registry.inner();
            // No other disk may get the id that the shard uses.
            let new_id = inner.new_disk_id();
            inner.abandoned.insert(id, name.to_owned());
            let journal = inner.disk(name).ok().and_then(|disk| disk.cache()?.journal);
            inner.kept_by_shard.insert(id, journal.map(|journal| OwnerId(journal.owner.0)));
            if let Ok(disk) = inner.disk_mut(name) {
                disk.id = new_id;
            }
            new_id
        };
        if self.peers.cluster().is_some() {
            // The caller may release the disk in the cluster. The shard must not use the backing of a
            // disk that another host may acquire.
            shard.lose(id);
        }
        let (service, name, shard) = (self.clone(), name.to_owned(), shard.clone());
        spawn(async move { service.repeat_removal(&name, &shard, id, new_id).await });
    }

    async fn repeat_removal(&self, name: &str, shard: &ShardHandle, id: DiskId, new_id: DiskId) {
        let mut logged: Option<Instant> = None;
        let (guard, is_same, gone) = loop {
            sleep(REMOVE_EVERY).await;
            let guard = self.registry.guard_disk(name, OPENING).ok();
            let (is_removed, is_same) = {
                let inner = self.registry.inner();
                let disk = inner.disk(name);
                (disk.is_err(), disk.is_ok_and(|disk| disk.id == new_id) && inner.is_offline(name))
            };
            if guard.is_none() && !is_removed {
                continue;
            }
            let mut left = match is_same {
                true => self.leave_shard_with_bitmaps(name, shard, id).await,
                false => self.leave_shard(name, shard, id).await,
            };
            let mut cause = None;
            if is_same && matches!(left, Err(ShardError::Command(CommandError::JournalFailed))) {
                // A cache whose journal is lost can be closed only after it has a new one.
                match self.pools.replace_journal_of_kept(name, shard, id).await {
                    Ok(()) => left = self.leave_shard_with_bitmaps(name, shard, id).await,
                    Err(error) => {
                        cause = Some(format!("its journal is lost and hob has no new one: {error}"))
                    }
                }
            }
            match left {
                Ok(gone) => break (guard, is_same, gone),
                Err(ShardError::Gone | ShardError::Command(CommandError::NoSuchDisk)) => {
                    let mut inner = self.registry.inner();
                    inner.abandoned.remove(&id);
                    inner.kept_by_shard.remove(&id);
                    return;
                }
                Err(error) if logged.is_none_or(|logged| logged.elapsed() >= LOG_EVERY) => {
                    logged = Some(Instant::now());
                    let cause = cause.unwrap_or_else(|| error.to_string());
                    tracing::warn!(
                        "disk {name}: its cache cannot be closed, so its shard cannot remove it: {cause}; hob tries \
                         again every {} s. If the cause remains, restart the daemon",
                        REMOVE_EVERY.as_secs()
                    );
                }
                Err(_) => {}
            }
        };
        self.registry.inner().kept_by_shard.remove(&id);
        let is_closing = gone.is_closing;
        let released = match is_same {
            true => self.release_closed(name, gone).await,
            false => flash::blocking(move || drop(gone)).await,
        };
        if let Err(error) = released {
            tracing::warn!("disk {name}: {error}");
        }
        drop(guard);
        // If the shard still has the backing open, `backing_closed` opens the disk later.
        if is_same && !is_closing {
            self.bring_online(name).await;
        }
    }

    /// Opens a disk again, if it is offline, after the last request to its abandoned backing has
    /// ended.
    pub(in crate::services) fn backing_closed(&self, id: DiskId) {
        let Some(name) = self.registry.inner().abandoned.remove(&id) else { return };
        tracing::info!("disk {name}: the last request to its abandoned backing has ended");
        if self.registry.inner().is_offline(&name) {
            let service = self.clone();
            spawn(async move { service.bring_online(&name).await });
        }
    }
}

impl Inner {
    /// Returns true if an abandoned backing of the disk still has requests in flight.
    pub(in crate::services) fn is_abandoned(&self, name: &str) -> bool {
        self.abandoned.values().any(|of| of == name)
    }

    /// Refuses to open an offline disk, or to use its cache on flash, while a shard that has
    /// refused to remove the disk still has it.
    pub(in crate::services) fn check_left_by_shard(&self, name: &str) -> Result<()> {
        let is_kept = self.kept_by_shard.keys().any(|id| self.abandoned.get(id).is_some_and(|of| of == name));
        if is_kept { Err(left_by_shard(name)) } else { Ok(()) }
    }

    fn is_offline(&self, name: &str) -> bool {
        self.disk(name).is_ok_and(|disk| matches!(disk.phase, DiskPhase::Offline(_)))
    }

    /// Returns when other hosts may acquire a closed disk that this host releases. Other hosts must
    /// wait if the backing may still execute requests of this host that are younger than `settle`.
    /// A change that failed with EIO counts as such a request, because kernels and servers also
    /// return EIO after a timeout. Opening and closing the disk again does not prove that the
    /// request has ended.
    pub(in crate::services) fn release_of(&self, name: &str, settle: Duration) -> Release {
        let since = self.disk(name).ok().and_then(|disk| disk.unanswered_since);
        match self.is_abandoned(name) || since.is_some_and(|since| since.elapsed() < settle) {
            true => Release::AfterSettling,
            false => Release::AtOnce,
        }
    }
}

/// Returns the error for the use of an offline disk's cache while a shard still has the disk.
fn left_by_shard(name: &str) -> ApiError {
    conflict!("{name} is offline, but its cache is still open: the cache could not be closed").hint(
        "repeat the command later, or restart the daemon: hob tries every 5 s to give the cache a new journal and to \
         close it; the log has the reason if that fails",
    )
}

impl DiskEntry {
    /// Records that the backing of the disk, which is closed now, may still execute requests of
    /// this host.
    pub(in crate::services) fn note_unanswered(&mut self) {
        self.unanswered_since = Some(Instant::now());
    }
}
