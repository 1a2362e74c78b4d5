//! Effects of guest life-cycle events on a disk's cache, as listed in the table
//! `hob_control::EVENTS`.

use hob_control::{DiskChanged, DrainFor, Effect, LifeEvent};

use super::Disks;
use super::dirty_rescue::Afterwards;
use crate::api_error::Result;
use crate::services::registry::DiskPhase;

impl Disks {
    /// Handles a life-cycle event of the guest. A drain that the event requires has started when
    /// this function returns. The API client waits for the end of the drain.
    pub(crate) async fn disk_event(&self, disk: String, event: LifeEvent) -> Result<DiskChanged> {
        let (name, has_cache, is_persistent) = {
            let inner = self.registry.inner();
            let entry = inner.disk(&disk)?;
            let cache = entry.cache();
            (event.info().name, cache.is_some(), cache.is_some_and(|spec| spec.journal.is_some()))
        };
        tracing::info!("{disk}: {name}");
        if event == LifeEvent::SnapshotRevert {
            self.exports.all_is_changed(&disk, "the backing was reverted to a snapshot").await?;
        }
        if !has_cache {
            return self.observe.disk_changed(&disk, vec!["it has no cache".to_owned()]);
        }
        let effect = if is_persistent { event.info().of_persistent } else { event.info().of_volatile };
        match effect {
            Effect::Nothing => self.observe.disk_changed(&disk, vec!["its cache does not change".to_owned()]),
            Effect::Drain => self.pools.drain_for(disk, DrainFor::DiskEvent).await,
            Effect::Empty => self.pools.cache_clear(disk).await,
            Effect::Discard => {
                let discarded = self.give_dirty_up(disk.clone(), Afterwards::Reverted).await?;
                if matches!(self.registry.inner().disk(&disk)?.phase, DiskPhase::Offline(_)) {
                    // The whole cache of an offline disk was discarded, so nothing is left to clear.
                    return Ok(discarded);
                }
                let changed = self.pools.cache_clear(disk).await?;
                Ok(DiskChanged { notes: discarded.notes, ..changed })
            }
        }
    }
}
