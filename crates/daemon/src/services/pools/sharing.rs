//! Shared caches: caches without a size of their own divide the rest of their pool, and hob chooses
//! their sizes (docs/decisions/0056).
//!
//! Every [`REPARTITION_EVERY`], hob *repartitions* each pool with shared caches: it asks the pool's
//! partitioner ([`hob_engine::partition`]) for the sizes with the highest benefit, and resizes the
//! caches towards these sizes. The caches that release segments are resized first, then the caches
//! that receive segments. A resize here is the same operation as the command `hob cache resize`. So
//! after a crash at any step, the cache has either the old or the new size.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use hob_control::{SharedCache, SharedCapacity, SharedLimits, Size};
use hob_engine::command::Mode;
use hob_engine::partition::{DiskCounts, Limits, Member, PERIOD_NS, Partitioner, Status};
use hob_engine::sizing::BlockSizing;
use hob_engine::units::{DeviceId, DiskId, Instant};
use tokio::time::Instant as Clock;

use super::Pools;
use super::allocation::AllocationRule;
use super::miss_cost::MissCost;
use super::rings::ring_segments;
use crate::api_error::{Result, conflict};
use crate::background::spawn;
use crate::services::flash::blocking;
use crate::services::registry::{
    DeviceEntry, DiskEntry, DiskPhase, Inner, PoolEntry, REPARTITIONING, is_own_work,
};
use crate::shard_api::{CountsAsked, ShardHandle};
use crate::state::{CacheSpec, JournalSpec, SharedSize};

/// Time between two repartitionings of a pool.
pub(in crate::services) const REPARTITION_EVERY: Duration = Duration::from_nanos(PERIOD_NS);

/// Maximum time in which a cache writes dirty data to its backing to release segments. Afterwards
/// the cache keeps its size until a later repartitioning.
const RELEASE_MAX: Duration = Duration::from_secs(3);

/// Interval between two checks whether the daemon's own work on a disk has ended.
const BUSY_EVERY: Duration = Duration::from_millis(20);

/// Maximum time to wait until other changes of a pool have ended. There is a limit because such a
/// change may itself wait for a hung device.
const TURN_MAX: Duration = Duration::from_secs(10);

/// Maximum number of disks in one query to a shard, so that the shard's guest requests wait only
/// briefly.
const ASKED_MAX: usize = 16;

/// The latest miss-ratio curve of each disk, and the disk's number of reads when the curve was
/// computed.
type Curves = BTreeMap<DiskId, (u64, BlockSizing)>;

/// The recent cost of a miss of each disk.
type MissCosts = BTreeMap<DiskId, MissCost>;

/// Division of one pool among its shared caches.
#[derive(Debug)]
pub(in crate::services) struct Sharing {
    began: Clock,
    /// The partitioner of the pool; `None` before the first repartitioning, and while a
    /// repartitioning uses it.
    partitioner: Option<Partitioner>,
    /// The latest miss-ratio curves; empty while a repartitioning uses them.
    curves: Curves,
    /// The recent cost of a miss of each disk; empty while a repartitioning updates the costs.
    miss_costs: MissCosts,
    /// True during a repartitioning.
    is_running: bool,
    /// Locked while space is allocated for a cache, so that the space for journals is not promised
    /// twice.
    turn: Arc<tokio::sync::Mutex<()>>,
    /// Number of segments that caches released to others since the daemon started.
    moved: u64,
    /// Dirty bytes that were destaged while segments were released.
    destaged_bytes: u64,
}

impl Default for Sharing {
    fn default() -> Sharing {
        Sharing {
            began: Clock::now(),
            partitioner: None,
            curves: Curves::new(),
            miss_costs: MissCosts::new(),
            is_running: false,
            turn: Arc::default(),
            moved: 0,
            destaged_bytes: 0,
        }
    }
}

/// A shared cache at the start of a repartitioning.
struct Participant {
    name: String,
    id: DiskId,
    segments: u64,
    dirty_segments: u64,
    limits: Limits,
    miss_cost_ns: u64,
    reads: u64,
}

impl Participant {
    /// Returns the input of the partitioner for this cache; `None` if there is no miss-ratio curve
    /// of the disk.
    fn member<'a>(&self, curves: &'a Curves) -> Option<Member<'a>> {
        let (_, block) = curves.get(&self.id)?;
        Some(Member {
            disk: self.id,
            segments: self.segments,
            dirty_segments: self.dirty_segments,
            limits: self.limits,
            miss_cost_ns: self.miss_cost_ns,
            reads: self.reads,
            accesses: block.accesses,
            curve: &block.curve,
            block_bytes: block.block_bytes,
        })
    }
}

impl Pools {
    /// Starts to repartition each pool with shared caches whose previous repartitioning has ended.
    pub(in crate::services) fn repartition(&self) {
        let pools: Vec<String> = {
            let mut inner = self.registry.inner();
            let shared = inner.disks.values().filter_map(|disk| disk.cache()).filter(|s| s.shared.is_some());
            let pools: BTreeSet<String> = shared.map(|spec| spec.pool.clone()).collect();
            let begins = |name: &String| {
                let entry = inner.pools.get_mut(name);
                entry.is_some_and(|entry| !std::mem::replace(&mut entry.sharing.is_running, true))
            };
            pools.into_iter().filter(begins).collect()
        };
        for pool in pools {
            let service = self.clone();
            spawn(async move {
                if let Err(error) = service.round(&pool).await {
                    tracing::warn!("pool {pool}: cannot divide it among its shared caches: {error}");
                }
                if let Ok(entry) = service.registry.inner().pool_mut(&pool) {
                    entry.sharing.is_running = false;
                }
            });
        }
    }

    /// Chooses the sizes of a pool's shared caches and resizes them.
    pub(in crate::services) async fn round(&self, pool: &str) -> Result<()> {
        let (mut curves, mut miss_costs) = {
            let mut inner = self.registry.inner();
            let sharing = &mut inner.pool_mut(pool)?.sharing;
            (std::mem::take(&mut sharing.curves), std::mem::take(&mut sharing.miss_costs))
        };
        let participants = self.participants(pool, &mut curves, &mut miss_costs).await;
        let (mut partitioner, now, capacity) = {
            let mut inner = self.registry.inner();
            let spare = inner.journal_spare(pool);
            let entry = inner.pool_mut(pool)?;
            let held: u64 = participants.iter().map(|cache| cache.segments).sum();
            let capacity = entry.free_segments_beyond(spare) + held;
            let sharing = &mut entry.sharing;
            sharing.miss_costs = miss_costs;
            let now = Instant(u64::try_from(sharing.began.elapsed().as_nanos()).unwrap_or(u64::MAX));
            let partitioner = sharing.partitioner.take();
            (partitioner.unwrap_or_else(|| Partitioner::new(entry.segment_bytes)), now, capacity)
        };
        let (partitioner, curves, participants, repartition) = blocking(move || {
            let members: Vec<Member<'_>> =
                participants.iter().filter_map(|cache| cache.member(&curves)).collect();
            let repartition = partitioner.round(now, capacity, &members);
            (partitioner, curves, participants, repartition)
        })
        .await?;
        {
            let mut inner = self.registry.inner();
            let members = participants.iter().filter(|cache| curves.contains_key(&cache.id));
            for (cache, status) in members.zip(&repartition.members) {
                if let Ok(disk) = inner.disk_mut(&cache.name) {
                    disk.sharing = *status;
                }
            }
            let sharing = &mut inner.pool_mut(pool)?.sharing;
            (sharing.partitioner, sharing.curves) = (Some(partitioner), curves);
        }
        let mut moved = 0;
        for change in &repartition.changes {
            let Some(cache) = participants.iter().find(|cache| cache.id == change.disk) else { continue };
            match self.resize_shared(&cache.name, change.to).await {
                Ok(now) => moved += change.from.saturating_sub(now),
                Err(error) => tracing::debug!("disk {}: its cache keeps its size: {error}", cache.name),
            }
        }
        if !repartition.changes.is_empty() {
            self.registry.inner().pool_mut(pool)?.sharing.moved += moved;
            self.registry.save().await?;
        }
        Ok(())
    }

    /// Returns the shared caches of a pool whose sizes can be chosen, and updates the curves and
    /// the costs of a miss of their disks.
    async fn participants(
        &self,
        pool: &str,
        curves: &mut Curves,
        miss_costs: &mut MissCosts,
    ) -> Vec<Participant> {
        let mut by_shard: Vec<(ShardHandle, Vec<(Participant, CountsAsked)>)> = Vec::new();
        let segment_bytes = {
            let inner = self.registry.inner();
            let Ok(entry) = inner.pool(pool) else { return Vec::new() };
            for disk in inner.disks.values() {
                let Some(spec) = disk.cache().filter(|spec| spec.pool == pool) else { continue };
                let (Some(limits), DiskPhase::Online(shard)) = (spec.shared, &disk.phase) else { continue };
                if disk.recovering.is_some() {
                    continue;
                }
                let mut limits = limits.in_segments(entry.segment_bytes);
                let disk_segments = disk.size_bytes.div_ceil(entry.segment_bytes);
                limits.max = limits.max.min(disk_segments.max(limits.min));
                // A cache keeps its size while a command changes it.
                limits.pinned |= disk.busy.is_some_and(|busy| !is_own_work(busy));
                let cache = Participant {
                    name: disk.wanted.name.clone(),
                    id: disk.id,
                    segments: disk.held.len() as u64,
                    dirty_segments: 0,
                    limits,
                    miss_cost_ns: 0,
                    reads: 0,
                };
                let asked = CountsAsked {
                    id: disk.id,
                    known_reads: curves.get(&disk.id).map(|(reads, _)| *reads),
                    block_bytes: spec.block_size.bytes(),
                };
                match by_shard.iter_mut().find(|(other, _)| other.is_same(shard)) {
                    Some((_, caches)) => caches.push((cache, asked)),
                    None => by_shard.push((shard.clone(), vec![(cache, asked)])),
                }
            }
            entry.segment_bytes
        };
        let mut participants = Vec::new();
        for (shard, caches) in by_shard {
            let (caches, asked): (Vec<Participant>, Vec<CountsAsked>) = caches.into_iter().unzip();
            let mut counts = Vec::with_capacity(caches.len());
            let asked_at = Clock::now();
            for some in asked.chunks(ASKED_MAX) {
                // A shard that does not answer is reported elsewhere.
                let Ok(more) = shard.disk_counts(some.to_vec()).await else { break };
                counts.extend(more);
            }
            for (cache, counts) in caches.into_iter().zip(counts) {
                let Some(DiskCounts { reads, dirty_bytes, backing, flash, curve }) = counts else { continue };
                let miss_cost_ns = miss_costs.entry(cache.id).or_default().update(&backing, &flash);
                if let Some(curve) = curve {
                    curves.insert(cache.id, (reads, curve));
                }
                if let Ok(disk) = self.registry.inner().disk_mut(&cache.name)
                    && disk.id == cache.id
                {
                    disk.quality.note_flash_ios(flash.ios, asked_at);
                }
                let dirty_segments = dirty_bytes.div_ceil(segment_bytes);
                participants.push(Participant { dirty_segments, miss_cost_ns, reads, ..cache });
            }
        }
        let present: BTreeSet<DiskId> = participants.iter().map(|cache| cache.id).collect();
        curves.retain(|id, _| present.contains(id));
        miss_costs.retain(|id, _| present.contains(id));
        participants
    }

    /// Waits until no other change allocates space of a pool for a cache or a new journal. The
    /// result excludes other changes until it is dropped. After [`TURN_MAX`] returns `None`.
    pub(in crate::services) async fn turn(&self, pool: &str) -> Option<tokio::sync::OwnedMutexGuard<()>> {
        let turn = self.registry.inner().pool(pool).ok()?.sharing.turn.clone();
        tokio::time::timeout(TURN_MAX, turn.lock_owned()).await.ok()
    }

    /// Shrinks a pool's shared caches until `wanted` segments are free, as far as the limits of
    /// these caches permit. Does nothing if these caches cannot release enough segments.
    pub(super) async fn make_room(&self, pool: &str, wanted: u64) {
        let mut donors: Vec<(bool, String, u64, u64)> = {
            let inner = self.registry.inner();
            let Ok(entry) = inner.pool(pool) else { return };
            let donors = inner.disks.values().filter_map(|disk| {
                let surplus = disk.spare_segments(pool, entry.segment_bytes)?;
                let destages = disk.cache()?.mode == Mode::WriteBack;
                Some((destages, disk.wanted.name.clone(), disk.held.len() as u64, surplus))
            });
            donors.collect()
        };
        let mut left: u64 = donors.iter().map(|(.., surplus)| surplus).sum();
        if wanted > left + self.free_beyond_journals(pool) {
            return;
        }
        // Caches that must write to their backings to release segments come last.
        donors.sort();
        for (_, name, held, surplus) in donors {
            let missing = wanted.saturating_sub(self.free_beyond_journals(pool));
            if missing == 0 {
                return;
            }
            // Each cache releases a part in proportion to the segments that it can release.
            let part = (u128::from(missing) * u128::from(surplus)).div_ceil(u128::from(left.max(1)));
            let part = (part as u64).min(surplus);
            left = left.saturating_sub(surplus);
            if let Err(error) = self.shrink_patiently(&name, held - part).await {
                tracing::debug!("disk {name}: its cache keeps its size: {error}");
            }
        }
    }

    /// Returns the number of free segments of a pool, without those for journals.
    pub(super) fn free_beyond_journals(&self, pool: &str) -> u64 {
        let inner = self.registry.inner();
        let spare = inner.journal_spare(pool);
        inner.pool(pool).map_or(0, |entry| entry.free_segments_beyond(spare))
    }

    /// Waits until the daemon's own operations on a shared cache have ended, and then shrinks the
    /// cache to `segments`. The cache may already be smaller by then.
    async fn shrink_patiently(&self, name: &str, segments: u64) -> Result<()> {
        let end = Clock::now() + RELEASE_MAX;
        while self.registry.inner().disk(name)?.busy.is_some_and(is_own_work) && Clock::now() < end {
            tokio::time::sleep(BUSY_EVERY).await;
        }
        let held = self.registry.inner().disk(name)?.held.len() as u64;
        if held > segments { self.resize_shared(name, segments).await.map(drop) } else { Ok(()) }
    }

    /// Resizes a shared cache to `segments`, as far as there is space. Returns the size of the
    /// cache after that, in segments.
    async fn resize_shared(&self, name: &str, segments: u64) -> Result<u64> {
        let _guard = self.registry.guard_disk(name, REPARTITIONING)?;
        let (shard, id, pool, held) = {
            let mut inner = self.registry.inner();
            let disk = inner.disk_mut(name)?;
            let (shard, id, held) = (disk.shard()?, disk.id, disk.held.len() as u64);
            let pool = disk.cache().filter(|spec| spec.shared.is_some()).map(|spec| spec.pool.clone());
            let pool = pool.ok_or_else(|| conflict!("the cache of {name} is not shared"))?;
            inner.set_shared_size(name, segments);
            (shard, id, pool, held)
        };
        let destaged = async || shard.stats(id).await.map_or(0, |stats| stats.destaged_bytes);
        let before = if segments < held { destaged().await } else { 0 };
        // The future is boxed, because it is part of a future of `fit_flash`, which calls
        // `make_room`.
        let mut resized = Box::pin(self.fit_flash(name, AllocationRule::AsFarAsPossible));
        let result = loop {
            tokio::select! {
                result = &mut resized => break result,
                () = tokio::time::sleep(RELEASE_MAX) => {
                    // The backing is slow or does not answer, so the cache keeps its segments.
                    let _ = self.stop_drain_of(name, &shard, id).await;
                }
            }
        };
        let after = if segments < held { destaged().await } else { 0 };
        let mut inner = self.registry.inner();
        let now = inner.disk(name)?.held.len() as u64;
        inner.set_shared_size(name, now);
        inner.pool_mut(&pool)?.sharing.destaged_bytes += after.saturating_sub(before);
        result.map(|_| now)
    }
}

impl Inner {
    /// Records the size of a shared cache.
    pub(in crate::services) fn set_shared_size(&mut self, name: &str, segments: u64) {
        let Ok(disk) = self.disk(name) else { return };
        let segment_bytes = disk.cache().and_then(|spec| self.pools.get(&spec.pool)).map(|p| p.segment_bytes);
        let (Some(segment_bytes), Ok(disk)) = (segment_bytes, self.disk_mut(name)) else { return };
        if let Some(spec) = disk.wanted.cache.as_mut().filter(|spec| spec.shared.is_some()) {
            spec.size = Size(segments.max(1) * segment_bytes);
        }
    }

    /// Returns the number of segments that must stay free on each device of a pool, for journals. A
    /// resize of a persistent cache writes a new journal ring. When a device is removed, the rings
    /// on this device move to the other devices.
    pub(in crate::services) fn journal_spare(&self, pool: &str) -> u64 {
        let free = self.pool(pool).map_or(0, PoolEntry::free_segments);
        self.journal_spare_after(pool, free, None)
    }

    /// Returns the result that [`journal_spare`](Self::journal_spare) will have when `free`
    /// segments are free and the cache of the disk `removed` has been removed. The removed cache is
    /// to be created again with this configuration.
    pub(super) fn journal_spare_after(
        &self,
        pool: &str,
        free: u64,
        removed: Option<(&str, &CacheSpec)>,
    ) -> u64 {
        let Ok(entry) = self.pool(pool) else { return 0 };
        let mut next = 0;
        let mut by_device: BTreeMap<DeviceId, u64> = BTreeMap::new();
        for disk in self.disks.values() {
            let new = removed.filter(|(name, _)| *name == disk.wanted.name).map(|(_, spec)| spec);
            let spec = new.or_else(|| disk.cache()).filter(|spec| spec.pool == pool);
            let Some(spec) = spec else { continue };
            let (held, ring) = match new {
                Some(_) => (0, 0),
                None => (disk.data_segments(entry.segment_bytes), disk.ring.len()),
            };
            let grows = if spec.shared.is_some() { free } else { 0 };
            next = next.max(ring_segments(spec, held + grows, entry.segment_bytes));
            let ring = disk.ring.iter().take(ring);
            ring.for_each(|segment| *by_device.entry(segment.device).or_default() += 1);
        }
        let has_others = entry.devices.iter().filter(|device| device.peer.is_none()).count() > 1;
        let moving = by_device.into_values().max().filter(|_| has_others).unwrap_or(0);
        next + moving
    }

    /// Returns the number of segments that the next journal ring of a cache in a pool needs at
    /// most. After a restart of hob and at a change of its size, a persistent cache writes its next
    /// ring while it still has the previous one. `grown` names a disk and the number of data
    /// segments that its cache is to have.
    pub(super) fn next_ring_segments(&self, pool: &str, grown: Option<(&str, u64)>) -> u64 {
        let Ok(entry) = self.pool(pool) else { return 0 };
        let next = |disk: &DiskEntry| {
            let spec = disk.cache().filter(|spec| spec.pool == pool)?;
            let grown = grown.filter(|(name, _)| *name == disk.wanted.name).map(|(_, segments)| segments);
            let data = grown.unwrap_or(disk.data_segments(entry.segment_bytes));
            Some(ring_segments(spec, data, entry.segment_bytes))
        };
        self.disks.values().filter_map(next).max().unwrap_or(0)
    }

    /// Returns true if a device of the pool has space for the next journal ring of a cache with
    /// `data_segments`.
    pub(in crate::services) fn has_next_ring_space(&self, spec: &CacheSpec, data_segments: u64) -> bool {
        let Ok(entry) = self.pool(&spec.pool) else { return false };
        let next = ring_segments(spec, data_segments, entry.segment_bytes);
        // The ring of a cache that is opened may be on a device with allocation off.
        let has_space = |device: &DeviceEntry| {
            device.peer.is_none() && device.ids.is_some() && device.free_segments >= next
        };
        entry.devices.iter().any(has_space)
    }

    pub(in crate::services) fn has_shared(&self, pool: &str) -> bool {
        let is_shared =
            |disk: &DiskEntry| disk.cache().is_some_and(|spec| spec.pool == pool && spec.shared.is_some());
        self.disks.values().any(is_shared)
    }

    /// Returns how a pool is divided among its shared caches; `None` without shared caches.
    pub(in crate::services) fn shared_capacity(
        &self,
        pool: &str,
        entry: &PoolEntry,
    ) -> Option<SharedCapacity> {
        let in_pool = |disk: &&DiskEntry| disk.cache().is_some_and(|spec| spec.pool == pool);
        let disks = self.disks.values().filter(in_pool);
        let caches: Vec<SharedCache> =
            disks.filter_map(|disk| disk.shared_cache(entry.segment_bytes)).collect();
        let free = entry.free_segments_beyond(self.journal_spare(pool)) * entry.segment_bytes;
        (!caches.is_empty()).then(|| SharedCapacity {
            size: Size(free + caches.iter().map(|cache| cache.size.bytes()).sum::<u64>()),
            moved: Size(entry.sharing.moved * entry.segment_bytes),
            destaged: Size(entry.sharing.destaged_bytes),
            caches,
        })
    }
}

impl DiskEntry {
    /// Returns the number of data segments of the disk's cache. A cache that is not recovered yet
    /// has at most its configured size.
    fn data_segments(&self, segment_bytes: u64) -> u64 {
        let is_used = |journal: &JournalSpec| journal.ring > 0 && !journal.ended;
        let spec = self.cache().filter(|spec| spec.journal.as_ref().is_some_and(is_used));
        let is_closed = matches!(self.phase, DiskPhase::Offline(_)) || self.recovering.is_some();
        let unknown = spec.filter(|_| is_closed && !self.has_cache);
        unknown.map_or(self.held.len() as u64, |spec| spec.size.bytes().div_ceil(segment_bytes))
    }

    /// Returns the number of segments that the disk's shared cache in this pool can release; `None`
    /// if it releases none.
    pub(super) fn spare_segments(&self, pool: &str, segment_bytes: u64) -> Option<u64> {
        let limits = self.cache().filter(|spec| spec.pool == pool)?.shared?.in_segments(segment_bytes);
        let surplus = (self.held.len() as u64).saturating_sub(limits.min);
        Some(surplus).filter(|surplus| self.has_cache && *surplus > 0 && !limits.pinned)
    }

    /// Returns details of the disk's shared cache; `None` for a cache with a fixed size.
    pub(in crate::services) fn shared_cache(&self, segment_bytes: u64) -> Option<SharedCache> {
        let SharedSize { min, max, shares, pin } = self.cache()?.shared?;
        let Status { target, rate, hit_ratio, more_hits, gained_hits } = self.sharing;
        Some(SharedCache {
            disk: self.wanted.name.clone(),
            size: Size(self.held.len() as u64 * segment_bytes),
            target: Size(target * segment_bytes),
            limits: SharedLimits { min, max, shares, pin },
            reads_per_second: rate.round() as u64,
            hit_permille: (hit_ratio * 1000.0).round() as u32,
            more_hits_per_second: more_hits.round() as u64,
            gained_hits_per_second: gained_hits.round() as i64,
        })
    }
}
