//! A backing that somebody else has taken over: whoever broke its lock may write it, so nothing that flash holds of it counts any more.
//!
//! The shard has refused everything since it heard of that. Here the cache's rings are made void, unless they have dirty data, which nobody
//! but the operator may give up; and the disk goes offline. It is opened again every few seconds, which succeeds when the other has gone,
//! and then it begins with an empty cache.

use std::sync::Arc;

use hob_engine::units::DiskId;
use hob_storage::pool::OwnerId;

use super::Manager;
use super::refusal::Refusal;

impl Manager {
    /// See the module's text.
    pub(super) async fn backing_lost(self: &Arc<Self>, id: DiskId) {
        let backing = {
            let inner = self.inner();
            let Some(disk) = inner.disks.values().find(|disk| disk.id == id) else { return };
            disk.wanted.backing.clone()
        };
        let refusal = Refusal::conflict(format!("somebody else has taken {backing} over"))
            .hint("one disk has one writer: end the other one; the disk comes back by itself then");
        self.lost(id, refusal).await;
    }

    /// A disk whose shard refuses everything already, because somebody else has it.
    pub(super) async fn lost(self: &Arc<Self>, id: DiskId, mut refusal: Refusal) {
        let (name, spec, flash, shard) = {
            let inner = self.inner();
            let Some(disk) = inner.disks.values().find(|disk| disk.id == id) else { return };
            let Ok(shard) = disk.shard() else { return };
            let spec = disk.cache().cloned();
            let pool = spec.as_ref().and_then(|spec| inner.pool(&spec.pool).ok());
            let flash = pool.map(|pool| pool.flash.clone());
            (disk.wanted.name.clone(), spec, flash, shard)
        };
        let dirty = shard.stats(id).await.map_or(u64::MAX, |stats| stats.sectors_dirty);
        let journal = spec.and_then(|spec| spec.journal);
        match (journal, flash) {
            (Some(_), _) if dirty > 0 => {
                refusal = refusal.hint(format!(
                    "its cache has data that is not on the backing: save it with 'hob cache export-dirty {name} FILE', \
                     and give it up with 'hob cache discard-dirty {name} --yes'"
                ));
            }
            (Some(journal), Some(flash)) => {
                if let Err(refusal) = flash.make_void(OwnerId(journal.owner.0), u32::MAX).await {
                    tracing::error!("{name}: its cache may be believed when it is opened again: {refusal}");
                }
            }
            _ => {}
        }
        self.take_offline(&name, &refusal).await;
    }
}
