//! Closing a disk on its shard, so that its cache and its dirty bitmaps are valid when the disk is
//! opened again by this daemon process or the next one.

use hob_engine::units::DiskId;

use super::ExportService;
use crate::services::flash::blocking;
use crate::services::registry::DiskPhase;
use crate::shard_api::{Gone, ShardError, ShardHandle};
use crate::state::Closed;

impl ExportService {
    /// Takes a disk from its shard, and records the evidence that its cache is valid. The disk is
    /// offline afterwards, for the reason `why`. The backing is closed when this returns. The caller
    /// has removed the disk's exports.
    pub(in crate::services) async fn close_on_shard(
        &self,
        name: &str,
        shard: &ShardHandle,
        id: DiskId,
        why: &str,
    ) -> Result<Gone, ShardError> {
        // This is the last reading of these statistics, because the disk is about to be closed.
        let unverified = shard.stats(id).await.map_or(u64::MAX, |stats| stats.sectors_unverified);
        let mut gone = self.take_from_shard(name, shard, id).await?;
        // The detector keeps the backing open and locked.
        let evidence = match gone.witness.take() {
            Some(witness) if unverified == 0 => {
                blocking(move || witness.evidence_at_end()).await.ok().flatten()
            }
            _ => None,
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
        // Without a cache in service, the evidence is meaningless.
        let evidence = evidence.filter(|evidence| disk.has_cache && is_permitted(*evidence));
        if let Some(journal) = disk.wanted.cache.as_mut().and_then(|spec| spec.journal.as_mut()) {
            journal.evidence = evidence;
            let mark = gone.changed;
            journal.closed =
                mark.map(|mark| Closed { size_bytes: mark.size_bytes, modified_ns: mark.modified_ns });
            tracing::info!("disk {name}: its cache is closed");
        }
        Ok(gone)
    }
}
