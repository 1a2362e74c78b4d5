//! Adjusts a disk's cache on its shard to the configuration: allocates and releases segments,
//! applies settings, and moves data off devices.
//!
//! A change of a persistent cache's segments, block size or layout needs a new ring for the cache's
//! journal ([`Pools::restructure`]). The engine refuses changes that would lose dirty data. After
//! such a refusal, the cache is drained and the change repeated. For a change that only releases
//! segments, hob destages only the dirty data in these segments, and writes of guests continue to
//! go to flash.

use std::collections::BTreeSet;

use hob_control::{DeviceState, Size};
use hob_engine::command::{CacheChange, CommandError, DataSegment, Enable, Mode, NewRing, Segment, Vacate};
use hob_engine::units::{DeviceId, DiskId};

use super::Pools;
use super::caches::no_cache;
use super::rings::{journal_room, ring_segments};
use crate::api_error::{ApiError, Result};
use crate::cache_settings::engine_config;
use crate::services::flash::Wanted;
use crate::services::registry::ENLARGING;
use crate::services::registry::{DiskEntry, DiskPhase};
use crate::shard_api::{ShardError, ShardHandle};
use crate::state::JournalSpec;

/// How hob handles an allocation of more space than the pool has free.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::services) enum AllocationRule {
    /// Refuse the request, and change nothing.
    Exactly,
    /// Use the space that the pool has free.
    AsFarAsPossible,
}

impl Pools {
    /// Adjusts a disk's cache to the configuration: its size on flash, its replicas on a peer, and
    /// its memory tier. Returns notes about differences that remain, for example because the pool
    /// has too little space. The cache of an offline disk is created when the disk comes online.
    /// The caller holds the disk's operation guard.
    pub(in crate::services) async fn fit_cache(
        &self,
        name: &str,
        rule: AllocationRule,
    ) -> Result<Vec<String>> {
        let mut notes = self.fit_flash(name, rule).await?;
        notes.extend(self.fit_peer(name).await?);
        notes.extend(self.fit_memory(name).await?);
        Ok(notes)
    }

    /// Adjusts the size of the disk's cache on flash to the configuration. This is the first step
    /// of [`fit_cache`](Self::fit_cache).
    pub(super) async fn fit_flash(&self, name: &str, rule: AllocationRule) -> Result<Vec<String>> {
        let (shard, id, spec, config, has_cache, have) = {
            let inner = self.registry.inner();
            let disk = inner.disk(name)?;
            let Some(spec) = disk.cache().cloned() else { return Ok(Vec::new()) };
            let DiskPhase::Online(shard) = &disk.phase else {
                return Ok(vec![format!("{name} is offline; its cache is created when the disk is online")]);
            };
            let config = engine_config(&spec, inner.pool(&spec.pool)?.segment_bytes)?;
            (shard.clone(), disk.id, spec, config, disk.has_cache, disk.held.len() as u64)
        };
        let target = spec.size.bytes().div_ceil(config.segment_bytes);
        if have > target {
            let surplus = u32::try_from(have - target)
                .map_err(|_| ApiError::invalid("the change is larger than the index supports"))?;
            let released = self.shrink(name, target, surplus).await?;
            self.give_back(name, &spec.pool, &released).await;
        }
        let missing = target.saturating_sub(have);
        if missing == 0 {
            self.registry.inner().disk_mut(name)?.cache_reason = None;
            return Ok(Vec::new());
        }
        let least = if rule == AllocationRule::Exactly { missing } else { 0 };
        let before = Some((&spec, have)).filter(|_| has_cache);
        self.registry.inner().check_index(name, &spec, have + least, before, config.segment_bytes)?;
        let _turn = self.turn(&spec.pool).await;
        let has_shared = self.registry.inner().has_shared(&spec.pool);
        // A new cache also needs space for its journal.
        let journal = match has_cache {
            true => 0,
            false => journal_room(&spec, config.segment_bytes) / config.segment_bytes,
        };
        if has_shared && (spec.shared.is_none() || least > 0) {
            self.make_room(&spec.pool, missing + journal).await;
        }
        {
            let inner = self.registry.inner();
            let most = have + missing.min(inner.pool(&spec.pool)?.free_segments());
            inner.check_index(name, &spec, most, before, config.segment_bytes)?;
        }
        let spare = if has_shared {
            // Shared caches usually fill their pool. Therefore space for the journals of all caches
            // must stay free.
            self.registry.inner().journal_spare(&spec.pool) + journal
        } else {
            let first = if has_cache { 0 } else { ring_segments(&spec, target, config.segment_bytes) };
            first + self.registry.inner().next_ring_segments(&spec.pool, Some((name, target)))
        };
        let segments = self.registry.take_room(&spec, id, Wanted { least, most: missing, spare }).await?;
        let got = segments.len() as u64;
        if got > 0 {
            let grown = if has_cache {
                self.grow(name, have + got, &segments).await
            } else {
                self.enable_empty(name, &segments).await
            };
            match grown {
                Ok(released) => {
                    // The released segments include the previous journal ring.
                    self.give_back(name, &spec.pool, &released).await;
                }
                Err(error) => {
                    self.registry.give_back(&spec.pool, &places(&segments)).await;
                    return Err(error);
                }
            }
        }
        drop(shard);
        let mut inner = self.registry.inner();
        let disk = inner.disk_mut(name)?;
        disk.held.extend(places(&segments));
        disk.has_cache |= got > 0;
        disk.cache_reason = None;
        if got == missing || spec.shared.is_some() {
            let held = disk.held.len() as u64;
            if held == 0 {
                // A shared cache has no size of its own to compare with.
                disk.cache_reason = Some(format!("pool {} has no space for it", spec.pool));
            }
            inner.set_shared_size(name, held);
            return Ok(Vec::new());
        }
        let room = Size(disk.held.len() as u64 * config.segment_bytes);
        let besides = if spare > 0 { " besides the space for journals" } else { "" };
        let reason = format!("pool {} has space for only {room} of {}{besides}", spec.pool, spec.size);
        disk.cache_reason = Some(reason.clone());
        Ok(vec![format!("{reason}; the cache grows when there is space")])
    }

    async fn grow(&self, name: &str, segments_after: u64, more: &[DataSegment]) -> Result<Vec<Segment>> {
        let grow = |ring: &Option<NewRing>| CacheChange::Grow(more.to_vec(), ring.clone());
        match self.restructure(name, segments_after, grow).await {
            // A fence took the last segments of the cache, so a new cache is created.
            Err(error) if error.is(CommandError::NoCache) => self.enable_empty(name, more).await,
            result => Ok(result?),
        }
    }

    /// Creates an empty cache for a disk on the disk's shard.
    async fn enable_empty(&self, name: &str, segments: &[DataSegment]) -> Result<Vec<Segment>> {
        let config = {
            let inner = self.registry.inner();
            let spec = inner.disk(name)?.cache().ok_or_else(|| no_cache(name))?;
            engine_config(spec, inner.pool(&spec.pool)?.segment_bytes)?
        };
        let enable = |ring: &Option<NewRing>| {
            CacheChange::Enable(Box::new(Enable {
                config,
                segments: segments.to_vec(),
                journal: ring.clone(),
                recovered: None,
            }))
        };
        Ok(self.restructure(name, segments.len() as u64, enable).await?)
    }

    /// Applies the configured block size and layout to a disk's cache, which is empty afterwards.
    pub(in crate::services) async fn configure(&self, name: &str) -> Result<()> {
        let (pool, config, segments) = {
            let inner = self.registry.inner();
            let disk = inner.disk(name)?;
            let spec = disk.cache().ok_or_else(|| no_cache(name))?;
            // A cache without segments is created again when the pool has space.
            if !disk.has_cache || disk.held.is_empty() {
                return Ok(());
            }
            let config = engine_config(spec, inner.pool(&spec.pool)?.segment_bytes)?;
            (spec.pool.clone(), config, disk.held.len() as u64)
        };
        let configure = |ring: &Option<NewRing>| CacheChange::Configure(config, ring.clone());
        let released = self.restructure(name, segments, configure).await?;
        self.give_back(name, &pool, &released).await;
        Ok(())
    }

    /// Empties a disk's cache on its shard.
    pub(in crate::services) async fn empty(&self, name: &str) -> Result<()> {
        let (pool, segments) = {
            let inner = self.registry.inner();
            let disk = inner.disk(name)?;
            let spec = disk.cache().ok_or_else(|| no_cache(name))?;
            (spec.pool.clone(), disk.held.len() as u64)
        };
        let clear = |ring: &Option<NewRing>| CacheChange::Clear(ring.clone());
        let released = self.restructure(name, segments, clear).await?;
        self.give_back(name, &pool, &released).await;
        Ok(())
    }

    /// Removes a cache from the shard with [`Pools::take_cache`]. Drains a write-back cache first,
    /// but only while the backing answers. So writes of guests never wait for a backing that does
    /// not answer.
    pub(in crate::services) async fn drain_and_take_cache(&self, name: &str) -> Result<(), ApiError> {
        let online = {
            let inner = self.registry.inner();
            let disk = inner.disk(name)?;
            let writes_back = disk.cache().is_some_and(|spec| spec.mode == Mode::WriteBack);
            if disk.has_cache && disk.holds_any() && writes_back {
                Some((disk.shard()?, disk.id))
            } else {
                None
            }
        };
        let Some((shard, id)) = online else { return self.take_cache(name).await };
        // The cache must be clean before the saved state says that the cache has ended.
        self.clean_while_answering(name, &shard, id).await?;
        let taken = self.take_cache(name).await;
        if taken.is_err() {
            self.tune(name, &shard, id).await?;
        }
        taken
    }

    /// Removes a cache from the shard, after its dirty data was written to the backing. The daemon
    /// keeps the cache's configuration.
    pub(in crate::services) async fn take_cache(&self, name: &str) -> Result<()> {
        let (shard, id) = {
            let inner = self.registry.inner();
            let disk = inner.disk(name)?;
            let (true, Some(_)) = (disk.has_cache, disk.cache()) else { return Ok(()) };
            (disk.shard()?, disk.id)
        };
        let mut former = self.abandon_rings(name, &shard, id).await?;
        let saved = if former.is_some() { self.registry.save_first().await } else { Ok(()) };
        let result = match saved {
            Ok(()) => self.take_from_shard(name, &shard, id, &mut former).await,
            error => error,
        };
        if result.is_err() && former.is_some() {
            // The shard still has the cache. The cache stays drained until the state file names its
            // journal again.
            self.put_journal(name, former)?;
            self.registry.save().await?;
            self.tune(name, &shard, id).await?;
        }
        result
    }

    /// Removes a drained cache from the shard. The caller has replaced the cache's journal id in
    /// the saved configuration. `former` is the journal that the cache still uses; this function
    /// may give that journal a new ring. If the removal fails, the caller restores `former` in the
    /// configuration before writes go to flash again.
    pub(super) async fn take_replaced_cache(
        &self,
        name: &str,
        shard: &ShardHandle,
        id: DiskId,
        former: &mut Option<JournalSpec>,
    ) -> Result<()> {
        if !self.registry.inner().disk(name)?.has_cache {
            return Ok(());
        }
        self.take_from_shard(name, shard, id, former).await
    }

    /// Sets the journal of a disk's cache in the configuration. Returns the previous one.
    pub(in crate::services) fn put_journal(
        &self,
        name: &str,
        journal: Option<JournalSpec>,
    ) -> Result<Option<JournalSpec>> {
        let mut inner = self.registry.inner();
        let spec = inner.disk_mut(name)?.wanted.cache.as_mut().ok_or_else(|| no_cache(name))?;
        Ok(std::mem::replace(&mut spec.journal, journal))
    }

    /// Gives a drained cache another journal ring, which can record the end of the cache. If the
    /// configuration has a new journal id already, the new ring belongs to the `former` journal,
    /// which the running cache still uses. If the removal of the cache then fails, the cache
    /// continues with the former journal, so the caller must put this journal back into the saved
    /// state.
    pub(in crate::services) async fn renew_ring_of(
        &self,
        name: &str,
        former: &mut Option<JournalSpec>,
    ) -> Result<()> {
        if former.is_none() {
            return self.renew_ring(name).await;
        }
        let next = self.put_journal(name, *former)?;
        let renewed = self.renew_ring(name).await;
        *former = self.put_journal(name, next)?;
        renewed?;
        self.registry.save_first().await
    }

    /// Drains a cache and replaces its journal id, if one of its journal rings is on a failed
    /// device. The caller saves the new id, so that recovery ignores the old rings. Without the new
    /// id, the device might refuse to record the end of the cache, and work again after the next
    /// start. Recovery would then write old dirty data over newer data of the backing. Returns the
    /// former journal.
    async fn abandon_rings(
        &self,
        name: &str,
        shard: &ShardHandle,
        id: DiskId,
    ) -> Result<Option<JournalSpec>> {
        {
            let inner = self.registry.inner();
            let disk = inner.disk(name)?;
            let devices = inner.pools.values().flat_map(|pool| &pool.devices);
            let failed = devices.filter(|device| device.state != DeviceState::Online);
            let failed: Vec<DeviceId> =
                failed.filter_map(|device| device.ids).map(|ids| ids.on_shards).collect();
            let is_persistent = disk.cache().is_some_and(|spec| spec.journal.is_some());
            if !is_persistent || !disk.ring.iter().any(|segment| failed.contains(&segment.device)) {
                return Ok(None);
            }
        }
        self.clean(name, shard, id).await?;
        let mut inner = self.registry.inner();
        let spec = inner.disk_mut(name)?.wanted.cache.as_mut().ok_or_else(|| no_cache(name))?;
        Ok(spec.journal.replace(JournalSpec::new()))
    }

    async fn take_from_shard(
        &self,
        name: &str,
        shard: &ShardHandle,
        id: DiskId,
        former: &mut Option<JournalSpec>,
    ) -> Result<()> {
        let spec = self.registry.inner().disk(name)?.cache().cloned().ok_or_else(|| no_cache(name))?;
        self.note_end(&spec).await?;
        let taken = self.take_whole_cache(name, &spec.pool, shard, id, former).await;
        if taken.is_err() && self.note_in_use(name) {
            self.registry.save().await?;
        }
        taken
    }

    /// Records that a persistent cache whose removal failed is still in use. Returns false if the
    /// shard has no such cache any more.
    fn note_in_use(&self, name: &str) -> bool {
        let mut inner = self.registry.inner();
        let Ok(disk) = inner.disk_mut(name) else { return false };
        let has_cache = disk.has_cache;
        let journal = disk.wanted.cache.as_mut().and_then(|spec| spec.journal.as_mut());
        journal.filter(|_| has_cache).map(|journal| journal.ended = false).is_some()
    }

    async fn take_whole_cache(
        &self,
        name: &str,
        pool: &str,
        shard: &ShardHandle,
        id: DiskId,
        former: &mut Option<JournalSpec>,
    ) -> Result<()> {
        let mut result = shard.change_cache(id, CacheChange::Disable).await;
        if result == Err(ShardError::Command(CommandError::Dirty)) {
            self.clean(name, shard, id).await?;
            result = shard.change_cache(id, CacheChange::Disable).await;
            // If the journal id was replaced, the caller tunes the cache after it has saved the
            // former journal.
            if result.is_err() && former.is_none() {
                self.tune(name, shard, id).await?;
            }
        }
        if result == Err(ShardError::Command(CommandError::JournalFailed)) {
            // A journal on other devices can record the end of the cache.
            self.renew_ring_of(name, former).await?;
            result = shard.change_cache(id, CacheChange::Disable).await;
        }
        let released = match result {
            // The cache has already lost all its segments.
            Err(ShardError::Command(CommandError::NoCache)) => Vec::new(),
            result => result?,
        };
        let free = self.let_go(name, &released, |_| true);
        {
            let mut inner = self.registry.inner();
            let disk = inner.disk_mut(name)?;
            disk.has_cache = false;
            disk.watch.forget();
        }
        self.registry.give_back(pool, &free).await;
        self.fit_memory(name).await.map(drop)
    }

    /// Makes a change that needs a new journal ring: allocates the ring if the cache has a journal,
    /// drains the cache if necessary, and sends `change` to the shard. The cache then has
    /// `segments_after` data segments. Returns the released segments.
    pub(in crate::services) async fn restructure(
        &self,
        name: &str,
        segments_after: u64,
        change: impl Fn(&Option<NewRing>) -> CacheChange + Send,
    ) -> Result<Vec<Segment>, Restructure> {
        self.restructure_after(name, segments_after, None, change).await
    }

    /// Releases `count` segments of a disk's cache, so that `segments_after` remain. Returns the
    /// released segments.
    pub(in crate::services) async fn shrink(
        &self,
        name: &str,
        segments_after: u64,
        count: u32,
    ) -> Result<Vec<Segment>, Restructure> {
        let shrink = |ring: &Option<NewRing>| CacheChange::Shrink(count, ring.clone());
        let vacates = (count > 0).then_some(Vacate::Emptiest(count));
        self.restructure_after(name, segments_after, vacates, shrink).await
    }

    /// Makes a change like `restructure`. If the change only releases some segments (`vacates`),
    /// hob destages only the dirty data in these segments, and writes of guests continue to go to
    /// flash.
    async fn restructure_after(
        &self,
        name: &str,
        segments_after: u64,
        vacates: Option<Vacate>,
        change: impl Fn(&Option<NewRing>) -> CacheChange + Send,
    ) -> Result<Vec<Segment>, Restructure> {
        let (shard, id, pool, copies, writes_back) = {
            let inner = self.registry.inner();
            let disk = inner.disk(name)?;
            let spec = disk.cache().ok_or_else(|| no_cache(name))?;
            let writes_back = spec.mode == Mode::WriteBack && spec.journal.is_some() && disk.has_cache;
            (disk.shard()?, disk.id, spec.pool.clone(), disk.ring_copies, writes_back)
        };
        // Segments of a removed device may be lost already; the engine knows which segments are
        // lost.
        if let Some(which @ Vacate::Emptiest(_)) = vacates.filter(|_| writes_back) {
            self.vacate(name, &shard, id, which).await?;
        }
        let result = self.restructure_with_ring(name, segments_after, vacates, (&shard, id), &change).await;
        if result.is_err() && vacates.is_some() {
            // The drain is stopped, and the cache keeps its segments.
            let _ = shard.change_cache(id, CacheChange::StopDrain).await;
        }
        let Err((error, room)) = result else { return result.map_err(|(error, _)| error) };
        tracing::debug!("{name}: {error:?}");
        let free = self.let_go(name, &room, |_| false);
        if let Ok(disk) = self.registry.inner().disk_mut(name) {
            disk.ring_copies = copies;
        }
        self.registry.give_back(&pool, &free).await;
        Err(error)
    }

    /// Allocates the journal ring and makes the change. An error includes the segments of the
    /// unused journal ring.
    async fn restructure_with_ring(
        &self,
        name: &str,
        segments_after: u64,
        vacates: Option<Vacate>,
        (shard, id): (&ShardHandle, DiskId),
        change: &(impl Fn(&Option<NewRing>) -> CacheChange + Send),
    ) -> Result<Vec<Segment>, (Restructure, Vec<Segment>)> {
        let (ring, room) =
            self.new_ring(name, segments_after).await.map_err(|error| (error.into(), vec![]))?;
        let mut result = match self.say_before(name, ring.as_ref()).await {
            Ok(()) => shard.change_cache(id, change(&ring)).await.map_err(Restructure::from),
            Err(error) => Err(error.into()),
        };
        let is_dirty = |result: &Result<_, Restructure>| {
            result.as_ref().is_err_and(|error| error.is(CommandError::Dirty))
        };
        if let Some(which) = vacates {
            while is_dirty(&result) {
                result = match self.vacate(name, shard, id, which).await {
                    Ok(()) => shard.change_cache(id, change(&ring)).await.map_err(Restructure::from),
                    Err(error) => Err(error.into()),
                };
            }
        } else if is_dirty(&result) {
            result = self.restructure_clean(name, shard, id, change(&ring)).await.map_err(Restructure::from);
        }
        if let Some(ring) = &ring {
            match &result {
                Ok(_) => self.note_written(name, ring.number).await,
                Err(_) => self.note_unused_ring(name, ring.number).await,
            }
        }
        result.map_err(|error| (error, room))
    }

    async fn restructure_clean(
        &self,
        name: &str,
        shard: &ShardHandle,
        id: DiskId,
        change: CacheChange,
    ) -> Result<Vec<Segment>, ShardError> {
        if let Err(error) = self.clean_while_answering(name, shard, id).await {
            tracing::warn!("{name}: {error}");
            return Err(ShardError::Command(CommandError::Dirty));
        }
        let result = shard.change_cache(id, change).await;
        // After success and after failure, writes use the configured mode again.
        if let Err(error) = self.tune(name, shard, id).await {
            tracing::warn!("{name}: {error}");
        }
        result
    }

    /// Moves a disk's cache from a device to others, as far as there is space. The caller holds the
    /// disk's operation guard. Returns a note if the cache has become smaller.
    pub(in crate::services) async fn leave_device(
        &self,
        name: &str,
        device: DeviceId,
    ) -> Result<Vec<String>> {
        if self.registry.inner().is_peer(device) {
            self.leave_peer(name, device).await?;
            return Ok(Vec::new());
        }
        let (id, spec, all, leaving) = {
            let inner = self.registry.inner();
            let disk = inner.disk(name)?;
            let on_it = |segments: &[Segment]| segments.iter().filter(|s| s.device == device).count();
            let leaving = on_it(&disk.held);
            let (true, Some(spec)) = (leaving + on_it(&disk.ring) > 0, disk.cache()) else {
                return Ok(Vec::new());
            };
            disk.shard()?;
            (disk.id, spec.clone(), disk.held.len(), leaving)
        };
        let pool = &spec.pool;
        // The change needs a new journal ring.
        let spare = self.registry.inner().journal_spare(pool);
        let wanted = Wanted { least: 0, most: leaving as u64, spare };
        let replacements = self.registry.take_room(&spec, id, wanted).await.unwrap_or_else(|error| {
            tracing::warn!("pool {pool}: {error}");
            Vec::new()
        });
        let got = replacements.len();
        if all == leaving && got == 0 {
            self.drain_and_take_cache(name).await?;
            self.leave_old_journal(name).await?;
        } else {
            let after = (all - leaving + got) as u64;
            // If only the journal is on the device, the data stays in place.
            let leave = |ring: &Option<NewRing>| match leaving {
                0 => CacheChange::Shrink(0, ring.clone()),
                _ => CacheChange::Leave(device, replacements.clone(), ring.clone()),
            };
            let vacates = (leaving > 0).then_some(Vacate::Device(device));
            match self.restructure_after(name, after, vacates, leave).await {
                Ok(released) => {
                    let free = self.let_go(name, &released, |segment| segment.device == device);
                    self.registry.inner().disk_mut(name)?.held.extend(places(&replacements));
                    self.registry.give_back(pool, &free).await;
                }
                // A fence has taken the segments already.
                Err(error) if error.is(CommandError::NoCache) => {
                    self.registry.give_back(pool, &places(&replacements)).await;
                    self.take_cache(name).await?;
                    self.leave_old_journal(name).await?;
                    return Ok(Vec::new());
                }
                Err(error) => {
                    self.registry.give_back(pool, &places(&replacements)).await;
                    return Err(error.into());
                }
            }
        }
        let mut inner = self.registry.inner();
        let segment_bytes = inner.pool(pool)?.segment_bytes;
        let disk = inner.disk_mut(name)?;
        if got == leaving {
            return Ok(Vec::new());
        }
        let room = Size(disk.held.len() as u64 * segment_bytes);
        let wanted = disk.cache().map_or(Size(0), |spec| spec.size);
        disk.cache_reason = Some(format!("pool {pool} has space for only {room} of {wanted}"));
        let less = Size((leaving - got) as u64 * segment_bytes);
        Ok(vec![format!("the cache of {name} is {less} smaller until pool {pool} has space again")])
    }

    /// Records that a cache no longer uses the `released` segments, and that it has lost those of
    /// its segments for which `gone` returns true. Returns the segments that can be allocated
    /// again.
    pub(in crate::services) fn let_go(
        &self,
        name: &str,
        released: &[Segment],
        gone: impl Fn(&Segment) -> bool,
    ) -> Vec<Segment> {
        let released: BTreeSet<&Segment> = released.iter().collect();
        let mut inner = self.registry.inner();
        let Ok(disk) = inner.disk_mut(name) else { return Vec::new() };
        let (mut free, mut lost) = (Vec::new(), Vec::new());
        for list in [&mut disk.held, &mut disk.apart, &mut disk.ring] {
            list.retain(|segment| {
                if released.contains(segment) {
                    free.push(*segment);
                } else if gone(segment) {
                    lost.push(*segment);
                } else {
                    return true;
                }
                false
            });
        }
        for segment in lost {
            inner.note_lost(segment);
        }
        free
    }

    /// Records that a cache no longer uses the `released` segments, and returns them to its pool.
    pub(in crate::services) async fn give_back(&self, name: &str, pool: &str, released: &[Segment]) {
        let free = self.let_go(name, released, |_| false);
        self.registry.give_back(pool, &free).await;
    }

    /// Enlarges the caches of a pool that are smaller than configured, if there is space.
    pub(in crate::services) async fn top_up(&self, pool: &str) -> Vec<String> {
        let short: Vec<String> = {
            let inner = self.registry.inner();
            let Ok(entry) = inner.pool(pool) else { return Vec::new() };
            let is_short = |disk: &&DiskEntry| {
                let spec = disk
                    .cache()
                    .filter(|spec| spec.pool == pool && matches!(disk.phase, DiskPhase::Online(_)));
                spec.is_some_and(|spec| {
                    let wanted = spec.size.bytes().div_ceil(entry.segment_bytes);
                    (disk.held.len() as u64) < wanted || disk.lacks_peer() && entry.has_peer()
                })
            };
            inner.disks.values().filter(is_short).map(|disk| disk.wanted.name.clone()).collect()
        };
        let mut notes = Vec::new();
        for name in short {
            // A concurrent change of the disk adjusts the cache as well.
            let Ok(_guard) = self.registry.guard_disk(&name, ENLARGING) else { continue };
            match self.fit_cache(&name, AllocationRule::AsFarAsPossible).await {
                Ok(more) => notes.extend(more),
                Err(error) => tracing::warn!("disk {name}: cannot enlarge its cache: {error}"),
            }
        }
        self.mirror_again(pool).await;
        self.spread_copies(pool).await;
        notes
    }
}

/// Why a change of a cache with [`Pools::restructure`] failed.
#[derive(Debug, thiserror::Error)]
pub(in crate::services) enum Restructure {
    /// The change failed before hob sent it to the shard.
    #[error(transparent)]
    Refused(#[from] ApiError),
    /// The shard refused the change.
    #[error(transparent)]
    Shard(#[from] ShardError),
}

impl Restructure {
    /// Returns true if the engine refused the change with this `error`.
    pub(in crate::services) fn is(&self, error: CommandError) -> bool {
        matches!(self, Restructure::Shard(ShardError::Command(other)) if *other == error)
    }
}

impl From<Restructure> for ApiError {
    fn from(error: Restructure) -> ApiError {
        match error {
            Restructure::Refused(error) => error,
            Restructure::Shard(error) => error.into(),
        }
    }
}

pub(in crate::services) fn places(segments: &[DataSegment]) -> Vec<Segment> {
    segments.iter().map(|segment| segment.place).collect()
}
