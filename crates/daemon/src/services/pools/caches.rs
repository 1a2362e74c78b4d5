//! Commands that change caches: each command changes the configuration in the disk's entry, and
//! then adjusts the cache on the disk's shard.
//!
//! hob saves the state that it needs after a crash in this order. It saves that a cache is
//! persistent before it writes the cache's journal. It saves the mode write-back before the cache
//! uses this mode. It saves the end of write-back after the drain.

use hob_control::{CacheEnable, CachePatch, DiskChanged};
use hob_engine::command::{CacheChange, Copies, Mode};
use hob_engine::units::DiskId;

use super::Pools;
use super::allocation::AllocationRule;
use crate::api_error::{ApiError, Result, conflict};
use crate::cache_settings::{CacheContext, changed_spec, engine_config, new_spec};
use crate::services::registry::{Inner, OperationGuard};
use crate::shard_api::ShardHandle;
use crate::state::{CacheOwner, CacheSpec, JournalSpec};

impl Pools {
    /// Releases the operation guard, saves the configuration, and returns the disk's view.
    pub(in crate::services) async fn finish_disk(
        &self,
        name: &str,
        guard: OperationGuard,
        notes: Vec<String>,
    ) -> Result<DiskChanged> {
        drop(guard);
        self.registry.save().await?;
        self.observe.disk_changed(name, notes)
    }

    pub(crate) async fn cache_enable(&self, disk: String, e: CacheEnable) -> Result<DiskChanged> {
        let service = self.clone();
        self.tasks.run("cache enable", disk.clone(), async move { service.enable(&disk, e).await }).await
    }

    /// Changes a cache's size or settings.
    pub(crate) async fn cache_patch(&self, disk: String, p: CachePatch) -> Result<DiskChanged> {
        let service = self.clone();
        self.tasks.run("cache set", disk.clone(), async move { service.patch(&disk, p).await }).await
    }

    pub(crate) async fn cache_clear(&self, disk: String) -> Result<DiskChanged> {
        let service = self.clone();
        self.tasks.run("cache clear", disk.clone(), async move { service.clear(&disk).await }).await
    }

    /// Gives a disk a cache. Waits for the result without a time limit, unlike `cache_enable`.
    pub(in crate::services) async fn enable(&self, name: &str, enable: CacheEnable) -> Result<DiskChanged> {
        let guard = self.registry.guard_disk_for_command(name, "given a cache").await?;
        let (spec, mut notes) = {
            let mut inner = self.registry.inner();
            let context = inner.context(&enable.pool)?;
            let (spec, notes) = new_spec(enable.pool, enable.size, &enable.settings, context)?;
            inner.check_memory(name, &spec)?;
            let disk = inner.disk_mut(name)?;
            if disk.wanted.unlocked {
                return Err(conflict!(
                    "the backing of {name} is not locked, so another program may write to it"
                )
                .hint("'hob attach' locks the backing when QEMU has released it"));
            }
            if disk.cache().is_some() {
                return Err(conflict!("{name} has a cache already")
                    .hint("change it with 'hob cache resize' or 'hob cache set'"));
            }
            disk.wanted.cache = Some(spec.clone());
            inner.caches_refused.remove(name);
            (spec, notes)
        };
        let fitted = match self.keep_first(&spec).await {
            Ok(()) => self.fit_new(name, AllocationRule::Exactly).await,
            Err(error) => Err(error),
        };
        match fitted {
            Ok(more) => notes.extend(more),
            Err(error) => {
                self.registry.inner().disk_mut(name)?.wanted.cache = None;
                self.keep_first(&spec).await?;
                self.forget_owner(&spec).await;
                return Err(error);
            }
        }
        notes.extend(self.about_journal(name)?);
        tracing::info!(
            "{name} has a {} cache of {} in blocks of {} ({}, {})",
            if spec.journal.is_some() { "persistent" } else { "volatile" },
            spec.size,
            spec.block_size,
            spec.mode,
            spec.policy
        );
        self.finish_disk(name, guard, notes).await
    }

    /// Creates a disk's cache as configured, or not at all. If a step fails, the shard may already
    /// have a cache with data. Therefore this function removes the incomplete cache before it
    /// returns the error. If the removal fails, the incomplete cache and its configuration stay.
    async fn fit_new(&self, name: &str, rule: AllocationRule) -> Result<Vec<String>> {
        let error = match self.fit_cache(name, rule).await {
            Err(error) => error,
            fitted => return fitted,
        };
        match self.take_cache(name).await {
            Ok(()) => Err(error),
            Err(stays) => {
                tracing::warn!(
                    "disk {name}: creating its cache failed, and the incomplete cache \
                    could not be removed: {stays}"
                );
                Ok(vec![format!("{error}; a part of the cache exists, and 'hob cache disable' removes it")])
            }
        }
    }

    async fn patch(&self, name: &str, patch: CachePatch) -> Result<DiskChanged> {
        let guard = self.registry.guard_disk_for_command(name, "changed").await?;
        let (before, wanted, mut notes) = {
            let inner = self.registry.inner();
            let before = inner.disk(name)?.cache().cloned().ok_or_else(|| no_cache(name))?;
            let context = inner.context(&before.pool)?;
            let (wanted, notes) = changed_spec(&before, patch.size, &patch.settings, context)?;
            if wanted.ram != before.ram {
                inner.check_memory(name, &wanted)?;
            }
            (before, wanted, notes)
        };
        // Nothing is emptied or released for a change that cannot be made.
        self.prepare_change(name, &wanted).await?;
        if wanted == before {
            notes.push("the cache already had these settings".to_owned());
        }
        let resized = CacheSpec { size: wanted.size, shared: wanted.shared, ..before.clone() };
        if resized != before {
            self.want(name, &resized)?;
            match self.fit_cache(name, AllocationRule::Exactly).await {
                Ok(more) => notes.extend(more),
                Err(error) => {
                    self.want(name, &before)?;
                    return Err(error);
                }
            }
        }
        // Replicas on a peer are removed in a first step, which changes nothing else of the cache.
        // The disk's ownership record must stop naming the replica before the cache accepts a write
        // without a replica. The first step keeps the block size, because a journal ring for
        // another block size could not describe the present cache.
        let alone = CacheSpec { copies: wanted.copies, ..resized.clone() };
        let leaves_peer = resized.copies == Copies::Peer && wanted.copies != Copies::Peer;
        let start = if leaves_peer { alone } else { resized.clone() };
        for (before, wanted) in [(&resized, &start), (&start, &wanted)] {
            if before != wanted {
                self.reconfigure(name, before, wanted, &mut notes).await?;
            }
        }
        notes.extend(self.fit_memory(name).await?);
        if wanted.journal.is_some() && resized.journal.is_none() {
            notes.extend(self.about_journal(name)?);
        }
        self.finish_disk(name, guard, notes).await
    }

    /// Changes the settings of a cache. Removes or empties the cache only if one of these settings
    /// requires that. After a failure, restores the earlier settings.
    async fn reconfigure(
        &self,
        name: &str,
        before: &CacheSpec,
        wanted: &CacheSpec,
        notes: &mut Vec<String>,
    ) -> Result<()> {
        let is_online = {
            let inner = self.registry.inner();
            inner.check_reconfiguration(name, before, wanted)?;
            inner.disk(name)?.shard().is_ok()
        };
        let leaves_write_back = before.mode == Mode::WriteBack && wanted.mode != Mode::WriteBack;
        if leaves_write_back {
            let (shard, id) = self.registry.shard_of(name)?;
            self.clean_while_answering(name, &shard, id).await?;
        }
        if owner_of(before) != owner_of(wanted) {
            self.note_end(before).await?;
        }
        self.want(name, wanted)?;
        if !is_online {
            // With the new settings, the disk may be opened now.
            self.registry.inner().disk_mut(name)?.retry_after = None;
        }
        let done = self.reconfigure_to(name, before, wanted, before.structure() != wanted.structure()).await;
        if let Err(error) = done {
            let mut before = before.clone();
            if owner_of(&before) != owner_of(wanted) && !self.registry.inner().disk(name)?.has_cache {
                // The old cache is no longer on flash, so the restored settings need a new journal
                // id.
                before.journal = before.journal.map(|_| JournalSpec::new());
            }
            self.want(name, &before)?;
            // The saved state must not say that the cache has no dirty data when writes go to flash
            // again.
            self.registry.save_first().await?;
            if let Ok((shard, id)) = self.registry.shard_of(name) {
                self.tune(name, &shard, id).await?;
            }
            return Err(error);
        }
        if before.structure() != wanted.structure() {
            notes.push("the cache starts empty".to_owned());
            let held = self.registry.inner().disk(name)?.held.len() as u64;
            if !self.registry.inner().has_next_ring_space(wanted, held) {
                notes.extend(self.about_journal(name)?);
            }
        }
        Ok(())
    }

    async fn reconfigure_to(
        &self,
        name: &str,
        before: &CacheSpec,
        wanted: &CacheSpec,
        is_structural: bool,
    ) -> Result<()> {
        self.keep_first(wanted).await?;
        // If hob starts with an older copy of its state, this copy does not know the new journal
        // ring. That tells recovery that the mode in the copy may be outdated.
        let begins_write_back = before.mode != Mode::WriteBack && wanted.mode == Mode::WriteBack;
        if owner_of(before) != owner_of(wanted) {
            // Volatile and persistent caches share no data.
            self.take_cache(name).await?;
            // A shared cache can be smaller, so that its journal has space.
            let rule = match wanted.shared {
                Some(_) => AllocationRule::AsFarAsPossible,
                None => AllocationRule::Exactly,
            };
            self.fit_new(name, rule).await?;
        } else if is_structural {
            self.configure(name).await?;
        } else if let Ok((shard, id)) = self.registry.shard_of(name) {
            if let Some(peer) = self.peer_device_of(name).filter(|_| wanted.copies != Copies::Peer) {
                self.leave_peer(name, peer).await?;
            } else if before.copies != wanted.copies && wanted.copies != Copies::Peer || begins_write_back {
                self.renew_ring(name).await?;
            }
            self.tune(name, &shard, id).await?;
            self.fit_peer(name).await?;
        }
        Ok(())
    }

    async fn clear(&self, name: &str) -> Result<DiskChanged> {
        let guard = self.registry.guard_disk_for_command(name, "cleared").await?;
        let has_cache = {
            let inner = self.registry.inner();
            inner.check_clear(name)?;
            let disk = inner.disk(name)?;
            disk.has_cache && !disk.held.is_empty()
        };
        if has_cache {
            self.empty(name).await?;
        }
        drop(guard);
        self.observe.disk_changed(name, Vec::new())
    }

    /// Sends the shard those cache settings that can change without emptying the cache.
    pub(in crate::services) async fn tune(&self, name: &str, shard: &ShardHandle, id: DiskId) -> Result<()> {
        let config = {
            let inner = self.registry.inner();
            let disk = inner.disk(name)?;
            let (true, Some(spec)) = (disk.has_cache && disk.holds_any(), disk.cache()) else {
                return Ok(());
            };
            engine_config(spec, inner.pool(&spec.pool)?.segment_bytes)?
        };
        shard.change_cache(id, CacheChange::Tune(config.mode, config.destage, config.copies)).await?;
        shard.change_cache(id, CacheChange::Replace(config.policy, config.admission)).await?;
        shard.change_cache(id, CacheChange::Fill(config.fill)).await?;
        Ok(())
    }

    /// Saves a cache's new configuration before it is applied, if a crash could otherwise lose
    /// data.
    async fn keep_first(&self, spec: &CacheSpec) -> Result<()> {
        if spec.journal.is_some() { self.registry.save_first().await } else { Ok(()) }
    }

    fn want(&self, name: &str, spec: &CacheSpec) -> Result<()> {
        let mut inner = self.registry.inner();
        let cache = &mut inner.disk_mut(name)?.wanted.cache;
        let mut spec = spec.clone();
        if let (Some(known), Some(journal)) =
            (cache.as_ref().and_then(|cache| cache.journal), &mut spec.journal)
            && known.owner == journal.owner
        {
            // Ring numbers only increase, even if other settings are restored.
            *journal = known;
        }
        *cache = Some(spec);
        Ok(())
    }
}

impl Inner {
    /// Refuses to change the settings of an offline disk's cache that may have dirty data.
    pub(in crate::services) fn check_reconfiguration(
        &self,
        name: &str,
        before: &CacheSpec,
        wanted: &CacheSpec,
    ) -> Result<()> {
        // An operator accepts a changed backing by this setting.
        let changes_verify_only = CacheSpec { verify: before.verify, ..wanted.clone() } == *before;
        if self.disk(name)?.shard().is_ok() || before.journal.is_none() || changes_verify_only {
            return Ok(());
        }
        Err(conflict!("{name} is offline, and its cache may hold data that is not on the backing").hint(
            "change the cache when the disk is online, or discard its dirty data with 'hob cache \
            discard-dirty'",
        ))
    }

    /// Refuses to empty the cache of a disk that has no cache or is not served.
    pub(in crate::services) fn check_clear(&self, name: &str) -> Result<()> {
        let disk = self.disk(name)?;
        disk.cache().ok_or_else(|| no_cache(name))?;
        disk.shard().map(drop)
    }

    /// Returns the properties of a pool on which cache settings depend.
    pub(in crate::services) fn context(&self, pool: &str) -> Result<CacheContext> {
        let entry = self.pool(pool)?;
        let gives = entry.devices.iter().filter(|device| device.gives_segments());
        let (peers, devices): (Vec<_>, Vec<_>) = gives.partition(|device| device.peer.is_some());
        Ok(CacheContext { segment_bytes: entry.segment_bytes, devices: devices.len(), peers: peers.len() })
    }
}

pub(in crate::services) fn no_cache(name: &str) -> ApiError {
    conflict!("{name} has no cache").hint("add a cache with 'hob cache enable'")
}

/// Returns the owner id of the cache's segments on flash; `None` for a volatile cache.
pub(super) fn owner_of(spec: &CacheSpec) -> Option<CacheOwner> {
    spec.journal.map(|journal| journal.owner)
}
