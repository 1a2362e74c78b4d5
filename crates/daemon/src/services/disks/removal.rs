//! Removes disks: writes their dirty data to the backing or discards it, and removes them from
//! their shard.

use hob_control::{DiskChanged, OnClients, OnDirty};

use super::Disks;
use super::dirty_rescue::Afterwards;
use crate::api_error::Result;
use crate::cluster::Release;
use crate::services::flash;
use crate::services::pools::REMOVING;
use crate::services::registry::{DiskPhase, OperationGuard};
use crate::shard_api::Gone;

impl Disks {
    /// Removes a disk, unless a program has one of its files open.
    pub(crate) async fn disk_remove(&self, disk: String, dirty: OnDirty) -> Result<DiskChanged> {
        self.disk_remove_from(disk, dirty, OnClients::Refuse).await
    }

    /// Removes a disk. If its dirty data is discarded, `clients` decides whether programs that have
    /// the disk's files open lose these files. Without a discard, open files prevent the removal.
    pub(crate) async fn disk_remove_from(
        &self,
        disk: String,
        dirty: OnDirty,
        clients: OnClients,
    ) -> Result<DiskChanged> {
        let (service, name) = (self.clone(), disk.clone());
        let removal = async move { service.remove(&disk, dirty, clients).await };
        self.tasks.run("disk remove", name, removal).await
    }

    async fn remove(&self, name: &str, dirty: OnDirty, clients: OnClients) -> Result<DiskChanged> {
        if let Some(changed) = self.owner()?.remove_absent(name.to_owned()).await? {
            return Ok(changed);
        }
        self.check_no_clones(name)?;
        let guard = match dirty {
            OnDirty::Drain => self.registry.guard_disk_for_command(name, REMOVING).await?,
            OnDirty::Discard => match self.pools.guard_to_discard(name, REMOVING).await {
                // An earlier removal of this disk has completed while this one waited.
                Err(_) if self.registry.inner().disk(name).is_err() => {
                    return Ok(DiskChanged { disk: None, notes: Vec::new() });
                }
                guard => guard?,
            },
        };
        // A clone may have been added while the removal waited for the guard.
        self.check_no_clones(name)?;
        match dirty {
            OnDirty::Drain => self.exports.hide_file(name, clients).await?,
            OnDirty::Discard => self.hide_file_soon(name, clients).await?,
        }
        let removed = self.remove_hidden(name, dirty, guard).await;
        if removed.is_err() && self.registry.inner().disk(name).is_ok_and(|disk| disk.shard().is_ok()) {
            // The disk and its file stay.
            let _ = self.exports.show_file(name).await;
        }
        removed
    }

    async fn remove_hidden(&self, name: &str, dirty: OnDirty, guard: OperationGuard) -> Result<DiskChanged> {
        let cache = self.registry.inner().disk(name)?.cache().cloned();
        let is_online = self.registry.inner().disk(name)?.shard().is_ok();
        let mut notes = match (dirty, is_online) {
            (OnDirty::Discard, true) => {
                let notes = self.take_abandoned(name).await?;
                // Programs that have the disk's file open receive errors from now on.
                self.exports.hide_file_at_end(name).await;
                self.exports.drop_device(name).await;
                notes
            }
            _ => self.take_with_its_data(name, dirty).await?,
        };
        self.leave_disk(name).await;
        {
            let mut inner = self.registry.inner();
            let removed = inner.disks.remove(name);
            let owed = removed.map_or(0, |disk| disk.wanted.flush_failures_owed);
            if owed > 0 {
                let guests = if owed == 1 { "1 guest has".to_owned() } else { format!("{owed} guests have") };
                let note = format!(
                    "acknowledged writes may be lost, and {guests} not got a failed flush that \
                    reports the loss. No guest gets this report if the disk is added again, so \
                    check the filesystems of the guests"
                );
                tracing::warn!("disk {name}: {note}");
                notes.push(note);
            }
            inner.caches_refused.remove(name);
            if inner.defined.contains(name) {
                inner.disks_removed.push(name.to_owned());
            }
        }
        drop(guard);
        tracing::info!("disk {name} is removed");
        self.registry.save().await?;
        self.exports.forget_bitmaps(name).await;
        if let Some(spec) = &cache {
            self.pools.forget_owner(spec).await;
        }
        self.link_parents();
        self.drop_idle_parents();
        self.qos.drop_unused_datastores();
        Ok(DiskChanged { disk: None, notes })
    }

    /// Releases this host's ownership of a disk in the cluster. The disk's cache is not needed any
    /// more.
    pub(super) async fn leave_disk(&self, name: &str) {
        let Some(cluster) = self.peers.cluster() else { return };
        let (known, _) = self.registry.wish(name).unwrap_or((None, false));
        let release = self.registry.inner().release_of(name, cluster.settle());
        if release == Release::AfterSettling {
            tracing::warn!(
                "disk {name}: its backing may still execute requests of this host; other hosts can acquire it \
                after settle_seconds"
            );
        }
        if let Err(why) = cluster.give_up(name, known, release).await {
            tracing::warn!(
                "disk {name}: cannot release it in the cluster: {why}; its ownership lock ends with the \
                 lease of this host"
            );
        }
    }

    /// Returns false if a disk has no dirty data.
    async fn has_dirty(&self, name: &str) -> bool {
        let Ok((shard, id)) = self.registry.shard_of(name) else { return true };
        !shard.stats(id).await.is_ok_and(|stats| stats.sectors_dirty == 0)
    }

    /// Removes a disk from its shard, and first writes the disk's dirty data to the backing. The
    /// caller then removes the disk from the daemon. Dirty data of an offline disk may be
    /// discarded.
    async fn take_with_its_data(&self, name: &str, dirty: OnDirty) -> Result<Vec<String>> {
        let mut notes = Vec::new();
        let cache = self.registry.inner().disk(name)?.cache().cloned();
        if dirty == OnDirty::Discard && cache.as_ref().is_some_and(|spec| spec.journal.is_some()) {
            notes.extend(self.discard(name, Afterwards::TakenAway).await?);
        }
        self.check_given_up(name)?;
        if cache.as_ref().is_some_and(|spec| spec.journal.is_some()) {
            // A persistent cache is drained while the disk is still served. Without dirty data, the
            // removal needs no backing.
            match self.has_dirty(name).await {
                true => self.pools.drain_and_take_cache(name).await?,
                false => self.pools.take_cache(name).await?,
            }
        }
        self.exports.table().remove_disk(name).await;
        let (shard, id) = {
            let mut inner = self.registry.inner();
            let disk = inner.disk_mut(name)?;
            let shard = match std::mem::replace(&mut disk.phase, DiskPhase::Removing) {
                DiskPhase::Online(shard) => Some(shard),
                _ => None,
            };
            (shard, disk.id)
        };
        if let Some(shard) = shard {
            let owed = self.registry.inner().disk(name)?.wanted.flush_failures_owed;
            let gone = self.leave_shard(name, &shard, id).await.unwrap_or_else(|error| {
                tracing::warn!("{name}: {error}");
                Gone { failures_owed: owed, ..Gone::default() }
            });
            let Gone { released, memory, failures_owed, .. } = gone;
            self.registry.inner().disk_mut(name)?.set_owed(failures_owed);
            flash::blocking(move || drop(memory)).await?;
            let free = self.pools.let_go(name, &released, |_| true);
            if let Some(spec) = &cache {
                self.registry.give_back(&spec.pool, &free).await;
            }
        }
        Ok(notes)
    }
}
