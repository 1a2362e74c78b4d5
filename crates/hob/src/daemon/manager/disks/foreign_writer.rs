//! A backing that somebody else has taken over: whoever broke its lock may write it, so nothing that flash holds of it counts any more.
//!
//! The shard has refused everything since it heard of that. Here it is kept that the cache is not to be believed any more: the other may have
//! changed anything, and no look at some of it would tell. In a cluster, the generation that is kept says so already, and it knows of those who
//! only adopted what is dirty. Then the rings are made void, unless they have dirty data, which nobody but the operator may give up; and
//! the disk goes offline. It is opened again every few seconds. That succeeds when the other has gone, and it begins with an empty cache; with
//! dirty data it is refused until that was given up.

use hob_engine::units::DiskId;
use hob_storage::pool::OwnerId;

use super::Disks;
use crate::daemon::manager::api_error::ApiError;
use crate::daemon::state::JournalSpec;

impl Disks {
    /// See the module's text.
    pub(in crate::daemon::manager) async fn backing_lost(&self, id: DiskId) {
        let backing = {
            let inner = self.registry.inner();
            let Some(disk) = inner.disks.values().find(|disk| disk.id == id) else { return };
            disk.wanted.backing.clone()
        };
        let error = ApiError::conflict(format!("somebody else has taken {backing} over")).hint(
            "only one program may write a disk: stop the other one; the disk is then opened again by itself",
        );
        self.lost(id, error).await;
    }

    /// A disk whose shard refuses everything already, because somebody else has it.
    pub(in crate::daemon::manager) async fn lost(&self, id: DiskId, mut error: ApiError) {
        let (name, spec, flash, shard, is_coming) = {
            let inner = self.registry.inner();
            let Some(disk) = inner.disks.values().find(|disk| disk.id == id) else { return };
            let Ok(shard) = disk.shard() else { return };
            let spec = disk.cache().cloned();
            let pool = spec.as_ref().and_then(|spec| inner.pool(&spec.pool).ok());
            let flash = pool.map(|pool| pool.flash.clone());
            (disk.wanted.name.clone(), spec, flash, shard, disk.recovering.is_some())
        };
        let dirty = shard.stats(id).await.map_or(u64::MAX, |stats| stats.sectors_dirty);
        let journal = spec.and_then(|spec| spec.journal);
        if journal.is_some() && self.peers.cluster().is_none() {
            self.keep_foreign(&name).await;
        }
        match (journal, flash) {
            // What is dirty in it is not known yet. It is looked at when the disk is opened again.
            _ if is_coming => {}
            (Some(_), _) if dirty > 0 => {
                error = error.hint(format!(
                    "its cache has dirty data: save it with 'hob cache export-dirty {name} FILE', then discard it with 'hob cache discard-dirty {name} --yes'"
                ));
            }
            (Some(journal), Some(flash)) => {
                if let Err(error) = flash.make_void(OwnerId(journal.owner.0), u32::MAX).await {
                    tracing::error!(
                        "{name}: cannot record that its cache is outdated; the next start may trust the cache: {error}"
                    );
                }
            }
            _ => {}
        }
        self.take_offline(&name, &error).await;
    }

    /// Keeps that nothing of a disk in flash counts from now on.
    async fn keep_foreign(&self, name: &str) {
        {
            let mut inner = self.registry.inner();
            let disk = inner.disk_mut(name).ok();
            let Some(journal) = disk.and_then(|disk| disk.wanted.cache.as_mut()?.journal.as_mut()) else {
                return;
            };
            journal.foreign = true;
        }
        if let Err(error) = self.registry.save().await {
            tracing::error!(
                "{name}: cannot record that another program had the disk; a restart may trust the outdated cache: {error}"
            );
        }
    }

    /// What flash had of a disk is given up, if somebody else has had it: the next cache is one of this disk again. Before that is served.
    pub(in crate::daemon::manager) async fn forget_foreign(&self, name: &str) -> Result<(), ApiError> {
        {
            let mut inner = self.registry.inner();
            let cache = inner.disk_mut(name)?.wanted.cache.as_mut();
            let foreign = cache.and_then(|spec| spec.journal.as_mut()).filter(|journal| journal.foreign);
            let Some(journal) = foreign else { return Ok(()) };
            // What may be on devices that are away is nobody's from now on.
            *journal = JournalSpec::new();
        }
        self.registry.save_first().await
    }
}
