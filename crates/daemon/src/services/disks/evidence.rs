//! Records evidence that backings are unchanged, while their disks are served. The evidence is a
//! hash of the backing's state, such as the times of its file. After a crash, a cache can be used
//! without verification if its backing still has the recorded hash (docs/decisions/0033).

use std::convert::Infallible;
use std::time::Duration;

use hob_engine::units::DiskId;
use tokio::task::JoinSet;

use super::Disks;
use crate::hardware::{ChangeDetector, ChangeToken};
use crate::services::registry::{DiskEntry, DiskPhase};
use crate::shard_api::ShardHandle;
use crate::state::CacheOwner;

/// Interval at which hob reads from each backing the evidence that the backing is unchanged.
const LOOK_EVERY: Duration = Duration::from_secs(2);

/// A disk whose backing is checked for changes.
struct Look {
    name: String,
    id: DiskId,
    owner: CacheOwner,
    /// Number of the cache's journal ring that the evidence belongs to.
    ring: u32,
    recorded: Option<ChangeToken>,
    witness: ChangeDetector,
    shard: ShardHandle,
}

impl Look {
    fn of(disk: &DiskEntry) -> Option<Look> {
        let DiskPhase::Online(shard) = &disk.phase else { return None };
        let journal = disk.cache()?.journal.filter(|_| disk.has_cache && disk.recovering.is_none())?;
        Some(Look {
            name: disk.wanted.name.clone(),
            id: disk.id,
            owner: journal.owner,
            ring: journal.ring,
            recorded: journal.evidence,
            witness: disk.measure.as_ref()?.witness.clone()?,
            shard: shard.clone(),
        })
    }

    /// Returns the evidence of the backing's present state, if it differs from the recorded
    /// evidence. May block.
    fn new_evidence(self) -> Option<(Look, ChangeToken)> {
        let evidence = self.witness.evidence()?;
        (self.recorded != Some(evidence)).then_some((self, evidence))
    }

    /// Returns the evidence if every sector of the cache is verified. This check comes after the
    /// evidence was read, and locks keep other programs from writing to the backing. So if all
    /// sectors are verified now, they match the backing in the state that the evidence describes.
    async fn if_verified(self, evidence: ChangeToken) -> Option<(Look, ChangeToken)> {
        let is_verified = self.shard.stats(self.id).await.is_ok_and(|stats| stats.sectors_unverified == 0);
        is_verified.then_some((self, evidence))
    }
}

impl Disks {
    /// Records new evidence for all backings every few seconds, until the future is dropped.
    pub(in crate::services) async fn record_evidence(self) -> Infallible {
        loop {
            tokio::time::sleep(LOOK_EVERY).await;
            self.record_evidence_now().await;
        }
    }

    pub(in crate::services) async fn record_evidence_now(&self) {
        let looks: Vec<Look> = self.registry.inner().disks.values().filter_map(Look::of).collect();
        let question = |look: Look| (look.owner, move || look.new_evidence());
        let changed = self.last_served.ask(looks.into_iter().map(question).collect()).await;
        let mut all: JoinSet<_> =
            changed.into_iter().map(|(look, evidence)| look.if_verified(evidence)).collect();
        let mut is_new = false;
        while let Some(found) = all.join_next().await {
            let Ok(Some((look, evidence))) = found else { continue };
            let mut inner = self.registry.inner();
            let Ok(disk) = inner.disk_mut(&look.name) else { continue };
            let is_permitted = disk.measure.as_ref().is_some_and(|measure| measure.permits(evidence));
            let is_same = disk.id == look.id
                && disk.has_cache
                && is_permitted
                && matches!(disk.phase, DiskPhase::Online(_));
            if let Some(journal) = disk.wanted.cache.as_mut().and_then(|spec| spec.journal.as_mut())
                && is_same
                && journal.ring == look.ring
            {
                journal.evidence = Some(evidence);
                is_new = true;
            }
        }
        if is_new && let Err(error) = self.registry.save().await {
            tracing::warn!(
                "cannot save the evidence that backings are unchanged: {error}; after a \
                restart, hob compares caches with their backings"
            );
        }
    }
}
