//! Balancing of caches that keep two copies on this host and therefore need segments on two
//! devices.
//!
//! When a device is removed, its caches move to other devices. When the device returns, all
//! segments of a cache are on the devices that stayed. A replica then has no space on another
//! device, so the cache accepts no more dirty data. Balancing exchanges some segments of the cache
//! for segments on other devices. Balancing first writes the dirty data of the emptiest segments to
//! the backing and releases these segments.

use std::collections::BTreeMap;
use std::time::Duration;

use hob_control::Size;
use hob_engine::command::{CacheChange, Copies, DataSegment, NewRing};
use hob_engine::units::DeviceId;
use hob_storage::pool::OwnerId;
use tokio::time::Instant;

use super::Pools;
use super::allocation::places;
use crate::api_error::Result;
use crate::services::registry::SPREADING;
use crate::services::registry::{DiskEntry, DiskPhase, Inner};

/// hob balances a cache only if at least 1/`SHARE_MIN` of the cache's segments has to move.
const SHARE_MIN: u64 = 8;

/// Time after which hob tries to balance a cache again although the last attempt changed nothing.
/// An attempt changes nothing if the cache's emptiest segments, which it exchanges, are already on
/// the other devices.
const VAIN_AFTER: Duration = Duration::from_secs(600);

/// Segments of a cache that must move from one device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::services) struct Surplus {
    /// The device's id on the shards.
    pub(in crate::services) device: DeviceId,
    pub(in crate::services) segments: u64,
}

impl Pools {
    /// Moves segments of those caches in a pool that have replicas on this host, if the pool has
    /// space. Afterwards, no device has much more than half of the segments of a cache.
    pub(in crate::services) async fn spread_copies(&self, pool: &str) {
        let lopsided: Vec<(String, Surplus)> = {
            let inner = self.registry.inner();
            let in_pool = |disk: &&DiskEntry| disk.cache().is_some_and(|spec| spec.pool == pool);
            let disks = inner.disks.values().filter(in_pool);
            disks
                .filter_map(|disk| {
                    let surplus = disk.surplus()?;
                    let is_now =
                        |(vain, at): (Surplus, Instant)| vain == surplus && at.elapsed() < VAIN_AFTER;
                    let is_vain = disk.vain_spread.is_some_and(is_now);
                    let room = inner.room_besides(pool, surplus.device);
                    (room > 0 && !is_vain).then(|| (disk.wanted.name.clone(), surplus))
                })
                .collect()
        };
        for (name, surplus) in lopsided {
            let Ok(_guard) = self.registry.guard_disk(&name, SPREADING) else { continue };
            match self.spread(&name, surplus).await {
                Ok(0) => {}
                Ok(moved) => {
                    if let Ok(disk) = self.registry.inner().disk_mut(&name) {
                        let left = disk.surplus().filter(|left| {
                            left.device == surplus.device && left.segments >= surplus.segments
                        });
                        disk.vain_spread = left.map(|left| (left, Instant::now()));
                    }
                    tracing::info!(
                        "disk {name}: {} of its cache moved to another device",
                        Size(moved).human()
                    )
                }
                Err(error) => {
                    tracing::warn!("disk {name}: cannot balance its cache over two devices: {error}")
                }
            }
        }
    }

    /// Exchanges segments on one device for segments on others. Returns the number of bytes
    /// exchanged.
    async fn spread(&self, name: &str, surplus: Surplus) -> Result<u64> {
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
        let allocated = flash.allocate_besides(owner, surplus.segments, in_pool).await?;
        let segments = self.registry.inner().pool_mut(&spec.pool)?.note_allocated(allocated);
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

    /// Releases as many of the cache's segments as `segments` has, and uses `segments` instead.
    async fn exchange(&self, name: &str, held: u64, segments: &[DataSegment]) -> Result<()> {
        let count = segments.len() as u64;
        let pool =
            self.registry.inner().disk(name)?.cache().map(|spec| spec.pool.clone()).unwrap_or_default();
        let released = self.shrink(name, held - count, count as u32).await?;
        self.give_back(name, &pool, &released).await;
        let grow = |ring: &Option<NewRing>| CacheChange::Grow(segments.to_vec(), ring.clone());
        let released = self.restructure(name, held, grow).await?;
        self.give_back(name, &pool, &released).await;
        self.registry.inner().disk_mut(name)?.held.extend(places(segments));
        Ok(())
    }
}

impl DiskEntry {
    /// Returns the number of segments that must move to another device to make space for replicas,
    /// and the device on which they are. Returns `None` if no segments must move.
    pub(in crate::services) fn surplus(&self) -> Option<Surplus> {
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
    // A single segment cannot be divided between two devices, and a small imbalance does not
    // matter.
    (segments > 0 && segments * SHARE_MIN >= total).then_some(Surplus { device, segments })
}

impl Inner {
    /// Returns the number of free segments on the pool's other local devices.
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
