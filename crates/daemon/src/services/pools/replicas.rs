//! Replicas of dirty data on a peer host: allocates segments for these replicas, and records
//! whether all dirty data has a replica (docs/decisions/0022).

use hob_engine::command::{CacheChange, Copies, NewRing, Segment};
use hob_engine::units::DeviceId;
use hob_storage::pool::OwnerId;

use super::Pools;
use super::allocation::places;
use super::rings::ring_segments;
use crate::api_error::Result;
use crate::services::registry::{DiskEntry, DiskPhase};
use crate::state::CacheSpec;

impl Pools {
    /// Allocates space on a peer for the replica of a disk's cache, if a replica is configured and
    /// has no space yet. The caller holds the disk's operation guard.
    pub(in crate::services) async fn fit_peer(&self, name: &str) -> Result<Vec<String>> {
        let (spec, owner, flash, held, ring) = {
            let inner = self.registry.inner();
            let disk = inner.disk(name)?;
            let Some(spec) = disk.cache().filter(|_| disk.lacks_peer()) else { return Ok(Vec::new()) };
            let Some(journal) = spec.journal else { return Ok(Vec::new()) };
            let entry = inner.pool(&spec.pool)?;
            if !entry.has_peer() {
                return Ok(vec![format!(
                    "pool {} has no working remote flash now: writes go to the backing until the \
                     pool has one",
                    spec.pool
                )]);
            }
            let held = disk.held.len() as u64;
            let ring = ring_segments(spec, 2 * held, entry.segment_bytes);
            (spec.clone(), OwnerId(journal.owner.0), entry.flash.clone(), held, ring)
        };
        // Each cache needs space for two journal rings, because an old and a new ring exist at the
        // same time while the ring is replaced.
        let allocated = flash.allocate_seconds(owner, held, 2 * ring).await?;
        let segments = self.registry.inner().pool_mut(&spec.pool)?.note_allocated(allocated);
        if segments.is_empty() {
            return Ok(vec![format!(
                "the remote flash of pool {} has no space for a replica of {name}: writes go to the backing",
                spec.pool
            )]);
        }
        let got = segments.len() as u64;
        let grow = |ring: &Option<NewRing>| CacheChange::Grow(segments.clone(), ring.clone());
        match self.restructure(name, held + got, grow).await {
            Ok(released) => {
                self.registry.inner().disk_mut(name)?.apart = places(&segments);
                self.give_back(name, &spec.pool, &released).await;
                tracing::info!("disk {name}: space for its replica allocated on a peer");
                Ok(Vec::new())
            }
            Err(error) => {
                self.registry.give_back(&spec.pool, &places(&segments)).await;
                Err(error.into())
            }
        }
    }

    /// Removes a cache's replica and journal copy from a peer's device. The caller holds the disk's
    /// operation guard.
    pub(in crate::services) async fn leave_peer(&self, name: &str, device: DeviceId) -> Result<()> {
        let (pool, held, leaves_data) = {
            let inner = self.registry.inner();
            let disk = inner.disk(name)?;
            let on_it = |segments: &[Segment]| segments.iter().any(|segment| segment.device == device);
            let Some(spec) = disk.cache().filter(|_| on_it(&disk.apart) || on_it(&disk.ring)) else {
                return Ok(());
            };
            (spec.pool.clone(), disk.held.len() as u64, on_it(&disk.apart))
        };
        self.registry.inner().disk_mut(name)?.leaves_peer = true;
        let left = self.leave_peer_now(name, device, &pool, held, leaves_data).await;
        self.registry.inner().disk_mut(name)?.leaves_peer = false;
        left
    }

    async fn leave_peer_now(
        &self,
        name: &str,
        device: DeviceId,
        pool: &str,
        held: u64,
        leaves_data: bool,
    ) -> Result<()> {
        {
            let _word = self.copy_words.lock().await;
            self.say_copy_is_gone(name).await?;
        }
        let leave = |ring: &Option<NewRing>| match leaves_data {
            true => CacheChange::Leave(device, Vec::new(), ring.clone()),
            false => CacheChange::Shrink(0, ring.clone()),
        };
        let released = self.restructure(name, held, leave).await?;
        let free = self.let_go(name, &released, |segment| segment.device == device);
        self.registry.give_back(pool, &free).await;
        Ok(())
    }

    /// Prepares the use of a new journal ring. Call this function before the cache uses the ring.
    /// If no copy of the new ring will be on the peer, this function removes the peer's replica
    /// from the disk's ownership record in etcd. [`Pools::say_doubled`] records a replica again
    /// when the replica is complete and has the newest ring.
    pub(in crate::services) async fn say_before(&self, name: &str, ring: Option<&NewRing>) -> Result<()> {
        let Some(ring) = ring else { return Ok(()) };
        {
            let mut inner = self.registry.inner();
            let is_far = ring.copies.iter().flatten().any(|segment| inner.is_peer(segment.device));
            // A disk that never had a replica does not need etcd.
            if is_far || !inner.disk(name)?.copy_said {
                return Ok(());
            }
        }
        let _word = self.copy_words.lock().await;
        self.say_copy_is_gone(name).await
    }

    /// Returns the remote device that holds a disk's replica.
    pub(in crate::services) fn peer_device_of(&self, name: &str) -> Option<DeviceId> {
        self.registry.inner().disk(name).ok()?.apart.first().map(|segment| segment.device)
    }

    /// Records the replica on this device in the disk's ownership record, if the newest journal
    /// ring also has a copy on this device. The engine has just reported that the replica is
    /// complete.
    pub(in crate::services) async fn say_doubled(&self, name: &str, device: DeviceId) {
        let _word = self.copy_words.lock().await;
        let word = {
            let mut inner = self.registry.inner();
            let is_given_up = inner.given_up.contains(&device);
            let Ok(disk) = inner.disk_mut(name) else { return };
            let is_there = disk.apart.iter().any(|segment| segment.device == device) && disk.has_far_ring();
            if !is_there || disk.leaves_peer || is_given_up {
                return;
            }
            disk.copy_said = true;
            inner.pools.values().flat_map(|pool| &pool.devices).find_map(|entry| {
                let is_it = entry.ids.is_some_and(|ids| ids.on_shards == device);
                Some((entry.peer.clone().filter(|_| is_it)?, entry.uuid.clone()?))
            })
        };
        let Some((to, uuid)) = word else { return };
        let lender = self.remote_flash.lease_at(&to.path).map(|lease| lease.lender);
        if let Some(lender) = lender
            && let Err(error) = self.say_copy_is_current(name, &lender, &uuid).await
        {
            tracing::debug!("disk {name}: cannot record its replica at {lender} in etcd yet: {error}");
        }
    }
}

impl DiskEntry {
    /// Returns true if the cache should have a replica on a peer, and no flash of the peer is
    /// allocated for the replica.
    pub(in crate::services) fn lacks_peer(&self) -> bool {
        let wants = self.cache().is_some_and(|spec| spec.copies == Copies::Peer && spec.journal.is_some());
        let is_there =
            matches!(self.phase, DiskPhase::Online(_)) && self.has_cache && self.recovering.is_none();
        wants && is_there && !self.held.is_empty() && self.apart.is_empty()
    }

    /// Returns true if the newest journal ring has a copy on a peer.
    fn has_far_ring(&self) -> bool {
        self.cache().is_some_and(|spec| spec.copies == Copies::Peer) && self.ring_copies == 2
    }

    /// Returns true if the cache has any segments.
    pub(in crate::services) fn holds_any(&self) -> bool {
        !self.held.is_empty() || !self.apart.is_empty()
    }

    /// Returns true if the disk has no cache in the pool, or all of the cache is available.
    pub(in crate::services) fn is_settled_in(&self, pool: &str) -> bool {
        let keeps = |spec: &&CacheSpec| spec.pool == pool && spec.journal.is_some();
        self.cache().filter(keeps).is_none()
            || matches!(self.phase, DiskPhase::Online(_)) && self.has_cache && self.recovering.is_none()
    }
}
