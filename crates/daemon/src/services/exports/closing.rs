//! Closing a disk on its shard, so that its cache and its dirty bitmaps are valid when the disk is
//! opened again by this daemon process or the next one.
//!
//! A cache is also closed if its backing fails or does not answer. Then its journal has no mark of
//! a clean close, and the cache is recovered as after a crash, but all records are on flash. So the
//! next start needs no crash log for this cache. hob first saves in the state file that no crash
//! log is needed, and then removes the crash log. If the daemon is killed between the two steps,
//! the crash log is left, which is harmless.

use std::time::Duration;

use hob_engine::units::DiskId;
use tokio::time::timeout;

use super::ExportService;
use crate::services::flash::blocking;
use crate::services::registry::{DiskEntry, DiskPhase};
use crate::shard_api::{Gone, ShardError, ShardHandle};
use crate::state::Closed;

/// Maximum time that hob waits for the close of a backing's file if it records no evidence that the
/// backing is unchanged.
const RELEASE_MAX: Duration = Duration::from_secs(1);

impl ExportService {
    /// Closes a disk, removes it from its shard, and records the backing's present state. If the
    /// backing is still in this state when the disk is opened again, the cache is valid. The disk
    /// is offline afterwards, for the reason `why`. The backing is closed when this function
    /// returns. The caller has removed the disk's exports.
    pub(in crate::services) async fn close_on_shard(
        &self,
        name: &str,
        shard: &ShardHandle,
        id: DiskId,
        why: &str,
    ) -> Result<Gone, ShardError> {
        // These statistics must be read now, because the shard drops them when it closes the disk.
        let unverified = shard.stats(id).await.map_or(u64::MAX, |stats| stats.sectors_unverified);
        let mut gone = self.take_from_shard(name, shard, id).await?;
        // The detector keeps the backing open and locked.
        let evidence = match gone.witness.take() {
            Some(witness) if unverified == 0 && !gone.is_unflushed => {
                blocking(move || witness.evidence_at_end()).await.ok().flatten()
            }
            Some(witness) => {
                // The backing may not answer.
                let _ = timeout(RELEASE_MAX, blocking(move || drop(witness))).await;
                None
            }
            None => None,
        };
        let mut inner = self.registry.inner();
        let Ok(disk) = inner.disk_mut(name) else { return Ok(gone) };
        disk.phase = DiskPhase::Offline(why.to_owned());
        if disk.recovering.is_some() {
            // The cache was not recovered yet and is unchanged on flash.
            return Ok(gone);
        }
        let measure = disk.measure.as_ref();
        let is_permitted = |evidence| measure.is_some_and(|measure| measure.permits(evidence));
        // Without a cache in service, no cache matches the backing's present state.
        let evidence = evidence.filter(|evidence| disk.has_cache && is_permitted(*evidence));
        if let Some(journal) = disk.wanted.cache.as_mut().and_then(|spec| spec.journal.as_mut()) {
            journal.evidence = evidence;
            let mark = gone.changed;
            journal.closed =
                mark.map(|mark| Closed { size_bytes: mark.size_bytes, modified_ns: mark.modified_ns });
            if gone.is_unflushed {
                tracing::warn!(
                    "disk {name}: its cache is closed without a flush of its backing, which fails or does not \
                     answer; dirty data stays in the cache"
                );
            } else {
                tracing::info!("disk {name}: its cache is closed");
            }
        }
        Ok(gone)
    }
}

impl DiskEntry {
    /// Records that recovery of the closed cache of the disk needs no crash log, although its
    /// journal is not marked as closed. Returns true if the state must be saved, which the caller
    /// does before it removes the crash log.
    pub(in crate::services) fn expect_no_crash_log(&mut self) -> bool {
        // Without a cache in service, the crash log of an earlier daemon is still there.
        if !self.has_cache || self.recovering.is_some() {
            return false;
        }
        let journal = self.wanted.cache.as_mut().and_then(|spec| spec.journal.as_mut());
        journal.is_some_and(|journal| journal.used.take().is_some())
    }
}
