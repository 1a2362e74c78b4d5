//! Caches with two copies on this host need segments on two devices: what lies on one device only is spread again.
//!
//! When a device is removed, a cache moves to the others. When it returns, every segment of the cache is in use on the one that stayed, and
//! a second copy has nowhere to go, so that nothing becomes dirty any more. Some of its segments are exchanged for segments elsewhere. The
//! emptiest are given up first; dirty data in them goes to the backing.

use std::collections::BTreeMap;

use hob_control::Size;
use hob_engine::command::{CacheChange, Copies, DataSegment, NewRing};
use hob_engine::units::DeviceId;
use hob_storage::pool::OwnerId;

use super::Pools;
use super::allocation::places;
use crate::daemon::manager::api_error::ApiError;
use crate::daemon::manager::registry::SPREADING;
use crate::daemon::manager::registry::{DiskEntry, DiskPhase, Inner};

/// A cache is spread again when this share of its segments has to move, one in so many.
const SHARE_MIN: u64 = 8;

/// Segments that a cache has too many of on one device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::daemon::manager) struct Surplus {
    /// The device, as the shards call it.
    pub(in crate::daemon::manager) device: DeviceId,
    /// So many.
    pub(in crate::daemon::manager) segments: u64,
}

impl Pools {
    /// Spreads the caches of a pool over its devices where second copies need that and there is room.
    pub(in crate::daemon::manager) async fn spread_copies(&self, pool: &str) {
        let lopsided: Vec<(String, Surplus)> = {
            let inner = self.registry.inner();
            let in_pool = |disk: &&DiskEntry| disk.cache().is_some_and(|spec| spec.pool == pool);
            let disks = inner.disks.values().filter(in_pool);
            disks
                .filter_map(|disk| {
                    let surplus = disk.surplus()?;
                    let room = inner.room_besides(pool, surplus.device);
                    (room > 0).then(|| (disk.wanted.name.clone(), surplus))
                })
                .collect()
        };
        for (name, surplus) in lopsided {
            let Ok(_guard) = self.registry.guard_disk(&name, SPREADING) else { continue };
            match self.spread(&name, surplus).await {
                Ok(0) => {}
                Ok(moved) => {
                    tracing::info!("the cache of {name}: {} moved to another device", Size(moved).human())
                }
                Err(error) => tracing::warn!("the cache of {name} stays on one device: {error}"),
            }
        }
    }

    /// Exchanges segments on one device for segments elsewhere. Returns the bytes that were exchanged.
    async fn spread(&self, name: &str, surplus: Surplus) -> Result<u64, ApiError> {
        let (spec, owner, flash, in_pool, segment_bytes, held) = {
            let inner = self.registry.inner();
            let disk = inner.disk(name)?;
            let Some(spec) = disk.cache().cloned() else { return Ok(0) };
            let Some(journal) = spec.journal else { return Ok(0) };
            let entry = inner.pool(&spec.pool)?;
            let ids = entry.devices.iter().filter_map(|device| device.ids);
            let Some(ids) = ids.into_iter().find(|ids| ids.on_shards == surplus.device) else { return Ok(0) };
            let held = disk.held.len() as u64;
            (
                spec.clone(),
                OwnerId(journal.owner.0),
                entry.flash.clone(),
                ids.in_pool,
                entry.segment_bytes,
                held,
            )
        };
        let (segments, devices) = flash.allocate_besides(owner, surplus.segments, in_pool).await?;
        let segments: Vec<DataSegment> = {
            let mut inner = self.registry.inner();
            let entry = inner.pool_mut(&spec.pool)?;
            entry.refresh(&devices);
            let known = |segment: DataSegment| {
                let place =
                    entry.on_shards(segment.place).expect("segments come from devices that the shards know");
                DataSegment { place, ..segment }
            };
            segments.into_iter().map(known).collect()
        };
        let count = segments.len() as u64;
        if count == 0 {
            return Ok(0);
        }
        let exchanged = self.exchange(name, held, &segments).await;
        if let Err(error) = exchanged {
            self.registry.give_back(&spec.pool, &places(&segments)).await;
            return Err(error);
        }
        Ok(count * segment_bytes)
    }

    /// Gives up as many segments as these are, and uses these instead.
    async fn exchange(&self, name: &str, held: u64, segments: &[DataSegment]) -> Result<(), ApiError> {
        let count = segments.len() as u64;
        let pool =
            self.registry.inner().disk(name)?.cache().map(|spec| spec.pool.clone()).unwrap_or_default();
        let released = self.shrink(name, held - count, count as u32).await?;
        let free = self.let_go(name, &released, |_| false);
        self.registry.give_back(&pool, &free).await;
        let grow = |ring: &Option<NewRing>| CacheChange::Grow(segments.to_vec(), ring.clone());
        let released = self.restructure(name, held, grow).await?;
        let free = self.let_go(name, &released, |_| false);
        self.registry.give_back(&pool, &free).await;
        self.registry.inner().disk_mut(name)?.held.extend(places(segments));
        Ok(())
    }
}

impl DiskEntry {
    /// Segments that have to lie elsewhere for second copies to find room; none if they find it.
    pub(in crate::daemon::manager) fn surplus(&self) -> Option<Surplus> {
        let spec = self.cache()?;
        let doubles = matches!(spec.copies, Copies::TwoOfDirty | Copies::TwoOfAll) && spec.journal.is_some();
        let is_there =
            matches!(self.phase, DiskPhase::Online(_)) && self.has_cache && self.recovering.is_none();
        (doubles && is_there).then(|| surplus_of(self.held.iter().map(|segment| segment.device)))?
    }
}

fn surplus_of(held: impl Iterator<Item = DeviceId>) -> Option<Surplus> {
    let mut counts: BTreeMap<DeviceId, u64> = BTreeMap::new();
    held.for_each(|device| *counts.entry(device).or_default() += 1);
    let total: u64 = counts.values().sum();
    let (device, most) = counts.into_iter().max_by_key(|(_, count)| *count)?;
    let segments = most.saturating_sub(total.div_ceil(2));
    // One segment cannot be on two devices, and a few more or less are no matter.
    (segments > 0 && segments * SHARE_MIN >= total).then_some(Surplus { device, segments })
}

impl Inner {
    /// Free segments on a pool's other devices of this host.
    fn room_besides(&self, pool: &str, device: DeviceId) -> u64 {
        let Ok(entry) = self.pool(pool) else { return 0 };
        let others = entry.devices.iter().filter(|other| {
            other.peer.is_none()
                && other.gives_segments()
                && other.ids.is_some_and(|ids| ids.on_shards != device)
        });
        others.map(|other| other.free_segments).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn surplus(counts: &[u64]) -> Option<u64> {
        let each = counts.iter().enumerate();
        let held = each.flat_map(|(device, count)| (0..*count).map(move |_| DeviceId(device as u16)));
        surplus_of(held).map(|surplus| surplus.segments)
    }

    #[test]
    fn half_of_a_cache_is_elsewhere() {
        for (counts, segments) in [
            (&[8][..], Some(4)),
            (&[7][..], Some(3)),
            (&[2][..], Some(1)),
            (&[1][..], None),
            (&[4, 4][..], None),
            (&[5, 4][..], None),
            (&[6, 2][..], Some(2)),
            (&[3, 3, 2][..], None),
            (&[9, 7][..], None),
            (&[][..], None),
        ] {
            assert_eq!(surplus(counts), segments, "{counts:?}");
        }
    }
}
