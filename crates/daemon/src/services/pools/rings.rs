//! Journals of persistent caches: the allocation of their rings, and the segments of closed caches.

use hob_control::Size;
use hob_engine::command::{CacheChange, Copies, NewRing, Segment};
use hob_engine::journal::{PAGE_BYTES, ring_pages_min};
use hob_storage::crash_log;
use hob_storage::pool::OwnerId;

use super::Pools;
use super::caches::no_cache;
use crate::api_error::{ApiError, ErrorKind};
use crate::services::flash::RingCopies;
use crate::services::registry::COPYING;
use crate::services::registry::Inner;
use crate::state::{BootId, CacheSpec, JournalSpec};

impl Pools {
    /// Allocates the next journal ring of a disk for a cache of `data_segments`. Returns `None` for
    /// a volatile cache. The segments are recorded in the disk's entry.
    pub(in crate::services) async fn new_ring(
        &self,
        name: &str,
        data_segments: u64,
    ) -> Result<(Option<NewRing>, Vec<Segment>), ApiError> {
        let (flash, pool, journal, identity, copies, segments, avoid) = {
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
            // A ring number is never reused, so it is saved before its use.
            journal.ring += 1;
            journal.note_use(BootId::current());
            (flash, spec.pool.clone(), *journal, disk.identity, ring_places(spec.copies), segments, avoid)
        };
        self.registry.save_first().await?;
        let owner = OwnerId(journal.owner.0);
        let ((number, ring), devices) =
            flash.allocate_ring(owner, journal.ring, copies, segments, avoid).await.map_err(|error| {
                if error.kind != ErrorKind::Conflict {
                    return error;
                }
                let what = format!("there is no space for the journal of {name}: {}", error.problem.error);
                ApiError { kind: error.kind, problem: hob_control::Problem::new(what) }
                    .hint("make the cache smaller by this amount, or add a device")
            })?;
        let mut inner = self.registry.inner();
        let entry = inner.pool_mut(&pool)?;
        entry.refresh(&devices);
        let known = |segment| entry.on_shards(segment).expect("rings lie on devices that the shards know");
        let copies: Vec<Vec<Segment>> =
            ring.into_iter().map(|copy| copy.into_iter().map(known).collect()).collect();
        let room = copies.concat();
        let disk = inner.disk_mut(name)?;
        disk.ring.extend(&room);
        disk.ring_copies = copies.len();
        if let Some(journal) = disk.wanted.cache.as_mut().and_then(|spec| spec.journal.as_mut()) {
            journal.ring = number;
        }
        let cache = journal.owner.0.to_le_bytes();
        Ok((Some(NewRing { cache, number, identity, copies }), room))
    }

    /// Adds missing second copies of journals in a pool, if there is now a device for them.
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
    pub(in crate::services) async fn renew_ring(&self, name: &str) -> Result<(), ApiError> {
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
        let free = self.let_go(name, &released, |_| false);
        self.registry.give_back(&pool, &free).await;
        Ok(())
    }

    /// Returns a note about the space that a journal takes.
    pub(in crate::services) fn about_journal(&self, name: &str) -> Result<Option<String>, ApiError> {
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
        Ok(Some(format!(
            "its journal takes {} of pool {} in addition{mirrored}; a change of the cache's size \
            needs the same space again for a moment",
            Size(bytes),
            spec.pool
        )))
    }

    /// Frees all segments of an owner without a disk. The caller has discarded the owner's cache
    /// before.
    pub(in crate::services) async fn forget_owner(&self, spec: &CacheSpec) {
        let Some(journal) = spec.journal else { return };
        let flash = match self.registry.inner().pool(&spec.pool) {
            Ok(entry) => entry.flash.clone(),
            Err(_) => return,
        };
        if let Err(error) = release_owner(&flash, journal).await {
            tracing::warn!("pool {}: {error}", spec.pool);
        }
        self.refresh_owners(&spec.pool).await;
    }

    /// Updates the owners of persistent caches in a pool and the free space.
    pub(in crate::services) async fn refresh_owners(&self, pool: &str) {
        let Ok(flash) = self.registry.inner().pool(pool).map(|entry| entry.flash.clone()) else { return };
        match flash.owners().await {
            Ok((owners, devices)) => {
                if let Ok(entry) = self.registry.inner().pool_mut(pool) {
                    entry.owners = owners;
                    entry.refresh(&devices);
                }
            }
            Err(error) => tracing::warn!("pool {pool}: {error}"),
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
    /// Returns the owner ids of all configured caches.
    pub(in crate::services) fn known_owners(&self) -> Vec<OwnerId> {
        let journals = self.disks.values().filter_map(|disk| disk.cache()?.journal);
        journals.map(|journal| OwnerId(journal.owner.0)).collect()
    }
}

/// Frees all segments of a persistent cache that no disk uses, and removes its crash log.
pub(in crate::services) async fn release_owner(
    flash: &crate::services::flash::Flash,
    journal: JournalSpec,
) -> Result<(), ApiError> {
    let segments = flash.segments_of(OwnerId(journal.owner.0)).await?;
    if !segments.is_empty() {
        flash.release(segments).await?;
    }
    crash_log::remove(&journal.owner.0.to_le_bytes());
    Ok(())
}

/// Returns the number of journal copies, which equals that of dirty data.
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
