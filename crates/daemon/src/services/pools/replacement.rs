//! Checks that precede a change which removes a cache and creates it again, such as a change of its
//! persistence. The pool must have space for the new cache and its journal, and this host must have
//! memory for the index. If a check fails, hob refuses the change and keeps the old cache.

use hob_control::Size;

use super::Pools;
use super::caches::owner_of;
use super::rings::{journal_room, ring_segments};
use crate::api_error::{ApiError, Result, conflict};
use crate::services::flash::{Wanted, no_room};
use crate::services::registry::{DiskEntry, DiskPhase, Inner};
use crate::state::CacheSpec;

/// Maximum number of requests to the shared caches of a pool for space. Each request may return
/// less than was asked for.
const REQUESTS_MAX: u32 = 3;

/// Space for a cache that is to replace the present one, in segments.
#[derive(Clone, Copy, Debug)]
struct Space {
    /// Number of segments that the new cache needs.
    needed: u64,
    /// Number of segments that are free when the present cache has been removed.
    free: u64,
    /// Number of segments that shared caches can release.
    shared: u64,
    /// True if segments for the journals of other caches also stay free.
    has_spare: bool,
}

impl Pools {
    /// Makes room for a change of a disk's cache: the shared caches of the pool release space for
    /// the new cache before the present one is removed. Refuses a change that
    /// [`Inner::check_change`] refuses.
    pub(super) async fn prepare_change(&self, name: &str, wanted: &CacheSpec) -> Result<()> {
        if self.registry.inner().check_change(name, wanted)? == 0 {
            return Ok(());
        }
        let _turn = self.turn(&wanted.pool).await;
        for _ in 0..REQUESTS_MAX {
            let missing = self.registry.inner().check_change(name, wanted)?;
            if missing == 0 {
                return Ok(());
            }
            let free = self.free_beyond_journals(&wanted.pool);
            self.make_room(&wanted.pool, free + missing).await;
        }
        let inner = self.registry.inner();
        if inner.check_change(name, wanted)? == 0 {
            return Ok(());
        }
        let space = Space { shared: 0, ..inner.space_to_replace(name, wanted)? };
        Err(space.refusal(inner.pool(&wanted.pool)?.segment_bytes))
    }
}

impl Inner {
    /// Refuses a change after which a disk's cache would not fit in the pool, if the change
    /// enlarges or replaces the cache. Also refuses a change after which the index of the cache
    /// would not fit in memory. Returns the number of segments that shared caches must release
    /// first for a new cache.
    pub(in crate::services) fn check_change(&self, name: &str, wanted: &CacheSpec) -> Result<u64> {
        let disk = self.disk(name)?;
        let (Some(before), true, DiskPhase::Online(_)) = (disk.cache(), disk.has_cache, &disk.phase) else {
            return Ok(0);
        };
        let segment_bytes = self.pool(&wanted.pool)?.segment_bytes;
        let held = disk.held.len() as u64;
        let grows = wanted.size > before.size && wanted.shared.is_none();
        if grows || before.block_size != wanted.block_size {
            let segments = if grows { wanted.size.bytes().div_ceil(segment_bytes) } else { held };
            self.check_index(name, wanted, segments, Some((before, held)), segment_bytes)?;
        }
        if owner_of(before) == owner_of(wanted) {
            if grows && before.shared.is_none() {
                let missing = wanted.size.bytes().div_ceil(segment_bytes).saturating_sub(held);
                self.check_growth(name, &wanted.pool, held, missing)?;
            }
            return Ok(0);
        }
        let space = self.space_to_replace(name, wanted)?;
        if space.needed > space.free + space.shared {
            return Err(space.refusal(segment_bytes));
        }
        Ok(space.needed.saturating_sub(space.free))
    }

    /// Refuses to grow a cache of a fixed size by `missing` segments, if the pool does not have
    /// them even after its shared caches have released segments.
    fn check_growth(&self, name: &str, pool: &str, held: u64, missing: u64) -> Result<()> {
        let entry = self.pool(pool)?;
        let spare = match self.has_shared(pool) {
            true => self.journal_spare(pool),
            false => self.next_ring_segments(pool, Some((name, held + missing))),
        };
        let free = entry.free_segments_beyond(spare);
        let shared: u64 =
            self.disks.values().filter_map(|disk| disk.spare_segments(pool, entry.segment_bytes)).sum();
        if missing <= free + shared {
            return Ok(());
        }
        Err(no_room(free, Wanted { least: missing, most: missing, spare }, entry.segment_bytes))
    }

    /// Returns the space for a cache that replaces the present cache of a disk.
    fn space_to_replace(&self, name: &str, wanted: &CacheSpec) -> Result<Space> {
        let (pool, disk) = (&wanted.pool, self.disk(name)?);
        let entry = self.pool(pool)?;
        let released = [&disk.held[..], &disk.ring[..]].concat();
        let size = wanted.size.bytes().div_ceil(entry.segment_bytes);
        // A shared cache can be smaller than the present one.
        let data = wanted.shared.map_or(size, |limits| limits.in_segments(entry.segment_bytes).min.min(size));
        let two_rings = journal_room(wanted, entry.segment_bytes) / entry.segment_bytes;
        let others: Vec<&DiskEntry> = self.disks.values().filter(|other| other.wanted.name != name).collect();
        let is_shared = |other: &&DiskEntry| {
            other.cache().is_some_and(|spec| spec.pool == *pool && spec.shared.is_some())
        };
        let free = entry.free_segments_after(&released, 0);
        if wanted.shared.is_none() && !others.iter().any(is_shared) {
            let first = ring_segments(wanted, data, entry.segment_bytes);
            let spare = first + first.max(self.next_ring_segments(pool, Some((name, 0))));
            let free = entry.free_segments_after(&released, spare);
            return Ok(Space { needed: data, free, shared: 0, has_spare: spare > 0 });
        }
        // Shared caches usually fill their pool. Therefore space for the journals of all caches
        // must stay free.
        let spare = self.journal_spare_after(pool, free, Some((name, wanted))) + two_rings;
        let shared = others.iter().filter_map(|other| other.spare_segments(pool, entry.segment_bytes)).sum();
        let free = entry.free_segments_after(&released, spare);
        Ok(Space { needed: data, free, shared, has_spare: spare > 0 })
    }
}

impl Space {
    fn refusal(&self, segment_bytes: u64) -> ApiError {
        let size = |segments: u64| Size(segments.saturating_mul(segment_bytes));
        let besides = if self.has_spare { " besides the space for journals" } else { "" };
        conflict!(
            "the pool would have {} free{besides} and {} are needed; nothing was changed",
            size(self.free + self.shared),
            size(self.needed)
        )
        .hint("add a device, make another cache smaller, or choose a smaller size")
    }
}
