//! Drains that wait until the backing takes writes. While a drain waits, write-back stays in
//! effect.
//!
//! During a drain, writes of guests go to the backing. If the backing did not answer, these writes
//! would wait, and fail after the disk's `backing_timeout`. If the backing answered with errors,
//! these writes would fail at once. So a drain begins only while the backing answers, and not while
//! writes of dirty data to the backing fail. If one of these conditions ends during the drain, hob
//! stops the drain and restores the write mode. hob drains again when the backing answers and takes
//! dirty data again.

use std::time::Duration;

use hob_engine::command::{CacheChange, CommandError, Destage};
use hob_engine::stats::DiskStats;
use hob_engine::units::DiskId;
use tokio::time::{Instant, sleep};

use super::{Pools, Watch, failed_writes};
use crate::cache_settings::engine_config;
use crate::services::registry::Registry;
use crate::shard_api::{ShardError, ShardHandle};

/// Interval between two checks whether the backing answers.
const CHECK_EVERY: Duration = Duration::from_millis(200);

/// Maximum age of dirty data, milliseconds, while a drain waits because writes to the backing fail.
/// The cache then repeats these writes even if its settings destage nothing.
const RETRY_AGE_MS: u64 = 1000;

/// If writes of dirty data have succeeded and none has failed for this time, the drain begins. The
/// time includes a flush of the backing, which may fail too.
const PROVEN_AFTER: Duration = Duration::from_secs(2);

/// Two changes of a cache's write mode: one before a drain, and one after a drain that did not
/// complete.
pub(super) struct Modes {
    /// Switches the cache to write-through before the drain.
    pub(super) through: CacheChange,
    /// Restores the configured mode if the drain does not complete.
    pub(super) back: CacheChange,
}

/// Two changes of a cache's destaging: one before a wait for a backing that refuses writes, and one
/// after the wait.
struct Retries {
    /// Makes the cache repeat failed writes of dirty data, in its configured write mode.
    often: CacheChange,
    /// Restores the configured destaging.
    back: CacheChange,
}

/// A drain for which a change of the disk waits.
#[derive(Debug, Default)]
pub(super) struct PendingDrain {
    /// Reason why the drain waits; `None` while the backing takes writes.
    waits: Option<String>,
    /// True if this drain must stop.
    is_stopped: bool,
}

#[cfg(test)]
impl PendingDrain {
    /// Creates the record of a drain that waits for the reason `why`.
    pub(super) fn waiting(why: &str) -> PendingDrain {
        PendingDrain { waits: Some(why.to_owned()), is_stopped: false }
    }
}

/// Removes the [`PendingDrain`] of a disk when the future of the drain ends or is dropped.
struct PendingDrainGuard<'a> {
    registry: &'a Registry,
    name: &'a str,
}

impl Drop for PendingDrainGuard<'_> {
    fn drop(&mut self) {
        if let Ok(disk) = self.registry.inner().disk_mut(self.name) {
            disk.watch.pending_drain = None;
        }
    }
}

impl Watch {
    /// Returns the reason why a drain waits for the backing, or `None` if no drain waits.
    pub(in crate::services) fn waiting_reason(&self) -> Option<&str> {
        self.pending_drain.as_ref()?.waits.as_deref()
    }

    /// Returns true if a change of the disk waits for a drain.
    pub(in crate::services) fn has_pending_drain(&self) -> bool {
        self.pending_drain.is_some()
    }
}

impl Pools {
    /// Drains a cache while its backing answers and takes writes. The caller holds the disk's
    /// operation guard.
    ///
    /// # Errors
    /// Returns `Stopped` if the drain was stopped ([`Pools::stop_drain_of`]), or an error of the
    /// drain. After an error, the configured write mode is in effect again.
    pub(super) async fn drain_while_answering(
        &self,
        name: &str,
        shard: &ShardHandle,
        id: DiskId,
        modes: Option<&Modes>,
    ) -> Result<(), ShardError> {
        if let Ok(disk) = self.registry.inner().disk_mut(name) {
            disk.watch.pending_drain = Some(PendingDrain::default());
        }
        let _guard = PendingDrainGuard { registry: &self.registry, name };
        loop {
            self.until_backing_answers(name).await?;
            self.until_backing_takes_writes(name, shard, id).await?;
            let ended = self.try_drain(name, shard, id, modes).await;
            if let (None | Some(Err(_)), Some(modes)) = (&ended, modes) {
                // The error of a cache without segments is ignored, because this cache has no mode.
                let _ = shard.change_cache(id, modes.back.clone()).await;
            }
            if let Some(result) = ended {
                return result;
            }
        }
    }

    /// Stops the drain of a disk, even if the drain waits for the backing.
    pub(in crate::services) async fn stop_drain_of(
        &self,
        name: &str,
        shard: &ShardHandle,
        id: DiskId,
    ) -> Result<(), ShardError> {
        if let Ok(disk) = self.registry.inner().disk_mut(name)
            && let Some(drain) = &mut disk.watch.pending_drain
        {
            drain.is_stopped = true;
        }
        shard.change_cache(id, CacheChange::StopDrain).await.map(drop)
    }

    /// Waits until the backing answers.
    async fn until_backing_answers(&self, name: &str) -> Result<(), ShardError> {
        let mut is_logged = false;
        while let Some(why) = self.check_backing(name, None)? {
            if !std::mem::replace(&mut is_logged, true) {
                log_wait(name, &why);
            }
            sleep(CHECK_EVERY).await;
        }
        Ok(())
    }

    /// If the latest write of dirty data to the backing failed, waits until such writes succeed.
    /// The cache keeps its write mode during the wait.
    async fn until_backing_takes_writes(
        &self,
        name: &str,
        shard: &ShardHandle,
        id: DiskId,
    ) -> Result<(), ShardError> {
        // If the shard does not answer, the drain reports that.
        let Ok(stats) = shard.stats(id).await else { return Ok(()) };
        let Some(why) = refusal(&stats) else { return Ok(()) };
        let Some(retries) = self.retries_of(name) else { return Ok(()) };
        log_wait(name, &why);
        shard.change_cache(id, retries.often).await?;
        let waited = self.until_writes_succeed(name, shard, id, (stats.destaged_bytes, why)).await;
        // The error of a cache without segments is ignored, because this cache has no settings.
        let _ = shard.change_cache(id, retries.back).await;
        waited
    }

    /// Waits until no dirty data is left, or until dirty data has been written to the backing and
    /// no such write has failed for [`PROVEN_AFTER`]. `destaged` is the number of bytes that had
    /// been written when the wait began, and `why` is the reason of the wait.
    async fn until_writes_succeed(
        &self,
        name: &str,
        shard: &ShardHandle,
        id: DiskId,
        (destaged, mut why): (u64, String),
    ) -> Result<(), ShardError> {
        let mut succeeding_since: Option<Instant> = None;
        loop {
            let Ok(stats) = shard.stats(id).await else { return Ok(()) };
            let refused = refusal(&stats);
            let is_refused = refused.is_some();
            why = refused.unwrap_or(why);
            let is_silent = self.check_backing(name, Some(why.clone()))?.as_ref() != Some(&why);
            if is_refused || is_silent || stats.destaged_bytes <= destaged {
                succeeding_since = None;
            } else {
                succeeding_since = succeeding_since.or_else(|| Some(Instant::now()));
            }
            let is_clean = stats.sectors_dirty <= stats.sectors_lost;
            if is_clean || succeeding_since.is_some_and(|since| since.elapsed() >= PROVEN_AFTER) {
                return Ok(());
            }
            sleep(CHECK_EVERY).await;
        }
    }

    /// Returns the changes of a cache's destaging before and after a wait for a backing that
    /// refuses writes. Returns `None` if the disk has no cache.
    fn retries_of(&self, name: &str) -> Option<Retries> {
        let inner = self.registry.inner();
        let spec = inner.disk(name).ok()?.cache()?;
        let config = engine_config(spec, inner.pool(&spec.pool).ok()?.segment_bytes).ok()?;
        let tune = |destage| CacheChange::Tune(config.mode, destage, config.copies);
        let often = Destage { dirty_age_ms_max: RETRY_AGE_MS, ..config.destage };
        Some(Retries { often: tune(often), back: tune(config.destage) })
    }

    /// Returns why the drain must wait: the backing does not answer, or it refuses writes for the
    /// reason `refusal`. Returns `None` if the drain need not wait.
    ///
    /// # Errors
    /// Returns an error if the drain should stop, or if the disk is being closed.
    fn check_backing(&self, name: &str, refusal: Option<String>) -> Result<Option<String>, ShardError> {
        let mut inner = self.registry.inner();
        let disk = inner.disk_mut(name).map_err(|_| ShardError::Command(CommandError::NoSuchDisk))?;
        let waits = disk.silent_backing().or(refusal);
        let drain = disk.watch.pending_drain.get_or_insert_default();
        if drain.is_stopped {
            return Err(ShardError::Command(CommandError::Stopped));
        }
        drain.waits.clone_from(&waits);
        if waits.is_some() && self.tasks.is_closing() {
            return Err(ShardError::Command(CommandError::Removing));
        }
        Ok(waits)
    }

    /// Drains a cache. Returns `None` if hob stopped the drain because the backing does not answer
    /// or refuses writes.
    async fn try_drain(
        &self,
        name: &str,
        shard: &ShardHandle,
        id: DiskId,
        modes: Option<&Modes>,
    ) -> Option<Result<(), ShardError>> {
        let drain = async {
            if let Some(modes) = modes {
                shard.change_cache(id, modes.through.clone()).await?;
            }
            shard.change_cache(id, CacheChange::Drain).await.map(drop)
        };
        tokio::pin!(drain);
        let mut is_interrupted = false;
        loop {
            tokio::select! {
                result = &mut drain => {
                    let is_stopped = result == Err(ShardError::Command(CommandError::Stopped));
                    // If an operator has stopped the drain too, the next attempt notices that.
                    return (!is_stopped || !is_interrupted).then_some(result);
                }
                () = sleep(CHECK_EVERY) => {}
            }
            let refused = shard.stats(id).await.ok().and_then(|stats| refusal(&stats));
            // The drain may not have reached the engine yet, so the order to stop the drain is
            // repeated.
            if !matches!(self.check_backing(name, refused), Ok(None)) && !self.tasks.is_closing() {
                is_interrupted = true;
                let _ = shard.change_cache(id, CacheChange::StopDrain).await;
            }
        }
    }
}

/// Returns why the backing refuses dirty data, or `None` if the latest write of dirty data to the
/// backing succeeded.
fn refusal(stats: &DiskStats) -> Option<String> {
    stats.destage_failing.then(|| failed_writes(stats.destage_errors))
}

fn log_wait(name: &str, why: &str) {
    tracing::warn!("disk {name}: a drain waits, and the cache stays in its mode: {why}");
}
