//! Drains that wait until the backing answers. While a drain waits, write-back stays in effect.
//!
//! During a drain, writes of guests go to the backing. If the backing did not answer, these writes
//! would wait, and fail after the disk's `backing_timeout`. So a drain begins only while the
//! backing answers. If the backing stops answering during the drain, hob stops the drain and
//! restores the write mode. hob drains again when the backing answers.

use std::time::Duration;

use hob_engine::command::{CacheChange, CommandError};
use hob_engine::units::DiskId;
use tokio::time::sleep;

use super::{Pools, Watch};
use crate::services::registry::Registry;
use crate::shard_api::{ShardError, ShardHandle};

/// Interval between two checks whether the backing answers.
const CHECK_EVERY: Duration = Duration::from_millis(200);

/// Two changes of a cache's write mode: one before a drain, and one after a drain that did not
/// complete.
pub(super) struct Modes {
    /// Switches the cache to write-through before the drain.
    pub(super) through: CacheChange,
    /// Restores the configured mode if the drain does not complete.
    pub(super) back: CacheChange,
}

/// A drain for which a change of the disk waits.
#[derive(Debug, Default)]
pub(super) struct PendingDrain {
    /// Reason why the drain waits; `None` while the backing answers.
    waits: Option<String>,
    /// True if this drain must stop.
    is_stopped: bool,
}

#[cfg(test)]
impl PendingDrain {
    /// Returns a drain that waits for this reason.
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
    /// Drains a cache while its backing answers. The caller holds the disk's operation guard.
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
        while let Some(why) = self.check_backing(name)? {
            if !std::mem::replace(&mut is_logged, true) {
                tracing::warn!("disk {name}: a drain waits, and the cache stays in its mode: {why}");
            }
            sleep(CHECK_EVERY).await;
        }
        Ok(())
    }

    /// Returns why the backing cannot be written to, or `None` if it answers.
    ///
    /// # Errors
    /// Returns an error if the drain should stop, or if the disk is being closed.
    fn check_backing(&self, name: &str) -> Result<Option<String>, ShardError> {
        let mut inner = self.registry.inner();
        let disk = inner.disk_mut(name).map_err(|_| ShardError::Command(CommandError::NoSuchDisk))?;
        let waits = disk.silent_backing();
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

    /// Drains a cache. Returns `None` if hob stopped the drain because the backing does not answer.
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
            // The drain may not have reached the engine yet, so the order to stop the drain is
            // repeated.
            if !matches!(self.check_backing(name), Ok(None)) && !self.tasks.is_closing() {
                is_interrupted = true;
                let _ = shard.change_cache(id, CacheChange::StopDrain).await;
            }
        }
    }
}
