//! Journals of persistent caches: the allocation of their rings, and the segments of closed caches.

use hob_control::Size;
use hob_engine::command::{CacheChange, Copies, NewRing, Segment};
use hob_engine::journal::{PAGE_BYTES, ring_pages_min};
use hob_storage::crash_log;
use hob_storage::pool::OwnerId;

use super::Pools;
use super::caches::no_cache;
use crate::api_error::{ApiError, ErrorKind, Result};
use crate::services::flash::RingCopies;
use crate::services::registry::COPYING;
use crate::services::registry::Inner;
use crate::state::{BootId, CacheOwner, CacheSpec, JournalSpec};

impl Pools {
    /// Allocates the next journal ring of a disk for a cache of `data_segments`. Returns `None` for
    /// a volatile cache. The segments are recorded in the disk's entry.
    pub(in crate::services) async fn new_ring(
        &self,
        name: &str,
        data_segments: u64,
    ) -> Result<(Option<NewRing>, Vec<Segment>)> {
        let (flash, pool, journal, identity, copies, segments, avoid, opening) = {
            let mut inner = self.registry.inner();
            let spec = inner.disk(name)?.cache().cloned().ok_or_else(|| no_cache(name))?;
            let entry = inner.pool(&spec.pool)?;
            let avoid = inner.disk(name)?.devices_of_lost_journal(entry);
            let data_segments = data_segments + inner.disk(name)?.apart.len() as u64;
            let entry = inner.pool(&spec.pool)?;
            let (flash, segments) =
                (entry.flash.clone(), ring_segments(&spec, data_segments, entry.segment_bytes));
            let disk = inner.disk_mut(name)?;
            let Some(journal) = disk.wanted.cache.as_mut().and_then(|spec| spec.journal.as_mut()) else {
                return Ok((None, Vec::new()));
            };
            // The number is saved before the ring is used, because ring numbers must never be
            // reused, not even after a crash.
            journal.ring += 1;
            journal.note_use(BootId::current());
            let (journal, copies) = (*journal, ring_places(spec.copies));
            (flash, spec.pool.clone(), journal, disk.identity, copies, segments, avoid, !disk.has_cache)
        };
        let owner = OwnerId(journal.owner.0);
        let allocated = match self.registry.save_first().await {
            Ok(()) => flash.allocate_ring(owner, journal.ring, copies, segments, avoid, opening).await,
            Err(error) => Err(error),
        };
        if let Err(error) = &allocated {
            self.note_unused_ring(name, journal.ring).await;
            let mut inner = self.registry.inner();
            let free = inner.pool(&pool)?.free_segments();
            let is_for_recovered = opening && error.kind == ErrorKind::Conflict;
            inner.disk_mut(name)?.too_few_for_journal = is_for_recovered.then_some(free);
        }
        let ((number, ring), devices) = allocated.map_err(|error| {
            if error.kind != ErrorKind::Conflict {
                return error;
            }
            let what = format!("there is no space for the journal of {name}: {}", error.problem.error);
            ApiError { kind: error.kind, problem: hob_control::Problem::new(what) }
                .hint("make the cache smaller, or add a device")
        })?;
        if number > journal.ring {
            // Flash had rings with higher numbers than the saved state.
            if let Some(of) = self.registry.inner().disk_mut(name)?.wanted.cache.as_mut() {
                of.journal.iter_mut().for_each(|of| of.ring = number);
            }
            self.registry.save_first().await?;
        }
        let mut inner = self.registry.inner();
        let entry = inner.pool_mut(&pool)?;
        entry.refresh(&devices);
        let known = |segment| entry.on_shards(segment).expect("rings lie on devices that the shards know");
        let copies: Vec<Vec<Segment>> =
            ring.into_iter().map(|copy| copy.into_iter().map(known).collect()).collect();
        let room = copies.concat();
        let disk = inner.disk_mut(name)?;
        disk.too_few_for_journal = None;
        disk.ring.extend(&room);
        disk.ring_copies = copies.len();
        let cache = journal.owner.0.to_le_bytes();
        Ok((Some(NewRing { cache, number, identity, copies }), room))
    }

    /// Saves that a ring was never in use. Otherwise, if a device is missing at the next start, hob
    /// would wait for this ring.
    pub(super) async fn note_unused_ring(&self, name: &str, number: u32) {
        if let Ok(disk) = self.registry.inner().disk_mut(name) {
            let journal = disk.wanted.cache.as_mut().and_then(|spec| spec.journal.as_mut());
            journal.into_iter().for_each(|journal| journal.unused = journal.unused.max(number));
        }
        if let Err(error) = self.registry.save().await {
            tracing::debug!("{name}: the number of an unused ring cannot be saved: {error}");
        }
    }

    /// Adds missing second copies of journals in a pool, if the pool now has a device for these
    /// copies.
    pub(in crate::services) async fn mirror_again(&self, pool: &str) {
        let lacking: Vec<String> = {
            let inner = self.registry.inner();
            let Ok(context) = inner.context(pool) else { return };
            let lacks = |disk: &&crate::services::registry::DiskEntry| {
                // Either two local copies, or one local copy and one on a peer.
                let can = |spec: &CacheSpec| match spec.copies {
                    Copies::Peer => !disk.apart.is_empty() && context.devices > 0 && context.peers > 0,
                    _ => context.devices > 1,
                };
                disk.lacks_copies() && disk.cache().is_some_and(|spec| spec.pool == pool && can(spec))
            };
            inner.disks.values().filter(lacks).map(|disk| disk.wanted.name.clone()).collect()
        };
        for name in lacking {
            let Ok(_guard) = self.registry.guard_disk(&name, COPYING) else { continue };
            match self.renew_ring(&name).await {
                Ok(()) => tracing::info!("disk {name}: its journal has a copy on another device again"),
                Err(error) => {
                    tracing::warn!("disk {name}: cannot add a copy of its journal on another device: {error}")
                }
            }
        }
    }

    /// Gives the cache a new journal ring with the configured number of copies.
    pub(in crate::services) async fn renew_ring(&self, name: &str) -> Result<()> {
        let (pool, segments) = {
            let inner = self.registry.inner();
            let disk = inner.disk(name)?;
            let spec = disk.cache().ok_or_else(|| no_cache(name))?;
            if !disk.has_cache || spec.journal.is_none() {
                return Ok(());
            }
            (spec.pool.clone(), disk.held.len() as u64)
        };
        let renew = |ring: &Option<NewRing>| CacheChange::Shrink(0, ring.clone());
        let released = self.restructure(name, segments, renew).await?;
        self.give_back(name, &pool, &released).await;
        Ok(())
    }

    /// Returns a note for users about the space of a disk's journal; `None` if its cache has no
    /// journal ring.
    pub(in crate::services) fn about_journal(&self, name: &str) -> Result<Option<String>> {
        let inner = self.registry.inner();
        let disk = inner.disk(name)?;
        let (Some(spec), false) = (disk.cache(), disk.ring.is_empty()) else { return Ok(None) };
        let bytes = disk.ring.len() as u64 * inner.pool(&spec.pool)?.segment_bytes;
        let copies = disk.ring_copies;
        let mirrored = match (copies, spec.copies) {
            (2, Copies::Peer) => ", half of it on the peer",
            (2, _) => ", in two copies on different devices",
            _ => "",
        };
        let lack = if inner.has_next_ring_space(spec, disk.held.len() as u64) {
            ""
        } else {
            ", which the pool does not have: after a restart, the cache's dirty data must be written to the \
             backing before the disk is served, and the cache starts empty"
        };
        Ok(Some(format!(
            "its journal takes {} of pool {} in addition{mirrored}; a change of the cache's size, or a restart of \
            hob, needs the same space again for a moment{lack}",
            Size(bytes),
            spec.pool
        )))
    }

    /// Gives a new identity to a disk's cache that has no segments any more. So hob never uses
    /// older data of the cache that a missing device may have.
    pub(in crate::services) async fn leave_old_journal(&self, name: &str) -> Result<()> {
        if let Some(spec) = self.registry.inner().disk_mut(name)?.wanted.cache.as_mut() {
            spec.journal = spec.journal.map(|_| JournalSpec::new());
        }
        self.registry.save().await
    }

    /// Saves that the journal ring with this number is complete.
    pub(in crate::services) async fn note_written(&self, name: &str, number: u32) {
        if let Ok(disk) = self.registry.inner().disk_mut(name) {
            let journal = disk.wanted.cache.as_mut().and_then(|spec| spec.journal.as_mut());
            journal.into_iter().for_each(|journal| (journal.written, journal.ended) = (number, false));
        }
        if let Err(error) = self.registry.save().await {
            tracing::warn!("disk {name}: cannot save that its new journal is complete: {error}");
        }
    }

    /// Saves that a cache is about to be removed from flash. After this save, a journal that is
    /// missing after a crash does not count as lost.
    pub(in crate::services) async fn note_end(&self, spec: &CacheSpec) -> Result<()> {
        let Some(JournalSpec { owner, .. }) = spec.journal else { return Ok(()) };
        if !self.registry.inner().set_ended(owner, true) {
            return Ok(());
        }
        let saved = self.registry.save_first().await;
        if saved.is_err() {
            self.registry.inner().set_ended(owner, false);
        }
        saved
    }

    /// Frees all segments of an owner without a disk. The caller has discarded the owner's cache
    /// before.
    pub(in crate::services) async fn forget_owner(&self, spec: &CacheSpec) {
        let Some(journal) = spec.journal else { return };
        if let Err(error) = self.note_end(spec).await {
            // A crash now keeps the disk offline, until the operator discards the cache.
            tracing::warn!("the end of the cache {} cannot be saved: {error}", journal.owner);
        }
        let flash = match self.registry.inner().pool(&spec.pool) {
            Ok(entry) => entry.flash.clone(),
            Err(_) => return,
        };
        if let Err(error) = release_owner(&flash, journal).await {
            tracing::warn!("pool {}: {error}", spec.pool);
        }
        self.refresh_owners(&spec.pool).await;
    }

    /// Frees the segments of ended caches of a pool, which a failed device refused to free before.
    /// The pool was just opened or is being removed, so no cache uses segments of a former owner.
    pub(in crate::services) async fn release_ended(&self, pool: &str) {
        let (flash, ended) = {
            let mut inner = self.registry.inner();
            let inner = &mut *inner;
            let Some(entry) = inner.pools.get(pool) else { return };
            if entry.is_whole() {
                inner.ended.keep_those_of(pool, &entry.owners);
            }
            let is_there = |ended: &OwnerId| entry.owners.iter().any(|(owner, _)| owner == ended);
            let ended: Vec<OwnerId> = inner.ended.of_pool(pool).into_iter().filter(is_there).collect();
            (entry.flash.clone(), ended)
        };
        if ended.is_empty() {
            return;
        }
        for owner in ended {
            let owner = CacheOwner(owner.0);
            match release_owner(&flash, JournalSpec { owner, ..JournalSpec::new() }).await {
                Ok(()) => tracing::info!("pool {pool}: the segments of the ended cache {owner} are free"),
                Err(error) => {
                    tracing::warn!(
                        "pool {pool}: cannot free the segments of the ended cache {owner}: {error}"
                    );
                }
            }
        }
        self.refresh_owners(pool).await;
    }

    /// Updates the owners of persistent caches in a pool and the free space. Returns false if the
    /// owners are unknown.
    pub(in crate::services) async fn refresh_owners(&self, pool: &str) -> bool {
        let Ok(flash) = self.registry.inner().pool(pool).map(|entry| entry.flash.clone()) else {
            return false;
        };
        match flash.owners().await {
            Ok((owners, devices)) => {
                if let Ok(entry) = self.registry.inner().pool_mut(pool) {
                    entry.owners = owners;
                    entry.is_unseen &= !entry.is_whole();
                    entry.refresh(&devices);
                }
                true
            }
            Err(error) => {
                tracing::warn!("pool {pool}: {error}");
                false
            }
        }
    }
}

impl crate::services::registry::DiskEntry {
    /// Returns true if dirty data should have two copies but has one.
    pub(in crate::services) fn lacks_copies(&self) -> bool {
        let wanted =
            self.cache().filter(|spec| spec.journal.is_some()).map_or(0, |spec| ring_copies(spec.copies));
        self.has_cache && !self.ring.is_empty() && self.ring_copies < wanted
    }
}

impl Inner {
    /// Sets whether the removal of an owner's cache has begun. Returns true if this changes the
    /// record of a cache that was in use.
    fn set_ended(&mut self, owner: CacheOwner, ended: bool) -> bool {
        let journals =
            self.disks.values_mut().filter_map(|disk| disk.wanted.cache.as_mut()?.journal.as_mut());
        let changed = journals.filter(|it| it.owner == owner && it.written > 0 && it.ended != ended);
        changed.map(|journal| journal.ended = ended).count() > 0
    }

    /// Returns the owner ids of all configured caches, and of caches of removed disks that a shard
    /// still uses.
    pub(in crate::services) fn known_owners(&self) -> Vec<OwnerId> {
        let journals = self.disks.values().filter_map(|disk| disk.cache()?.journal);
        let kept = self.kept_by_shard.values().copied().flatten();
        journals.map(|journal| OwnerId(journal.owner.0)).chain(kept).collect()
    }
}

/// Frees all segments of a persistent cache, and removes the cache's crash log. The caller has made
/// sure that no disk uses the cache.
pub(in crate::services) async fn release_owner(
    flash: &crate::services::flash::Flash,
    journal: JournalSpec,
) -> Result<()> {
    let segments = flash.segments_of(OwnerId(journal.owner.0)).await?;
    if !segments.is_empty() {
        flash.release(segments).await?;
    }
    crash_log::remove(&journal.owner.0.to_le_bytes());
    Ok(())
}

/// Returns the number of journal copies, which equals the number of copies of dirty data.
fn ring_copies(copies: Copies) -> usize {
    match copies {
        Copies::One => 1,
        Copies::TwoOfDirty | Copies::TwoOfAll | Copies::Peer => 2,
    }
}

/// Returns the location of the journal copies.
fn ring_places(copies: Copies) -> RingCopies {
    match copies {
        Copies::Peer => RingCopies::OneFar,
        copies => RingCopies::Here(ring_copies(copies)),
    }
}

/// Returns the space for a cache's journal in a pool, in bytes: the current ring and the next one.
pub(in crate::services) fn journal_room(spec: &CacheSpec, segment_bytes: u64) -> u64 {
    let data = spec.size.bytes().div_ceil(segment_bytes);
    let here = if spec.copies == Copies::Peer { 1 } else { ring_copies(spec.copies) as u64 };
    2 * ring_segments(spec, data, segment_bytes) * here * segment_bytes
}

/// Returns the number of segments in each copy of a journal ring.
pub(in crate::services) fn ring_segments(spec: &CacheSpec, data_segments: u64, segment_bytes: u64) -> u64 {
    if spec.journal.is_none() {
        return 0;
    }
    let block_bytes = u32::try_from(spec.block_size.bytes()).unwrap_or(u32::MAX);
    let frames = data_segments * (segment_bytes / u64::from(block_bytes)).max(1);
    let pages = ring_pages_min(frames, block_bytes, segment_bytes);
    (pages * PAGE_BYTES as u64).div_ceil(segment_bytes).max(1)
}
