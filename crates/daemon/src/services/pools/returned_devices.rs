//! Releases outdated segments on a device that was missing and is back.
//!
//! A cache that is opened without a device writes a new journal ring. The next recovery uses only
//! that ring, so the cache's segments on the missing device are outdated and are released when the
//! device returns. The segments of a cache that is not in use stay, because this cache may still be
//! recovered from them.

use hob_engine::units::DeviceId;
use hob_storage::pool::OwnerId;

use super::Pools;
use crate::services::registry::{CLEARING, DiskEntry, DiskPhase, GUARD_EVERY};

/// Maximum number of attempts to release the outdated segments before a device is removed.
const TRIES_MAX: u32 = 20;

impl Pools {
    /// Records that a device was missing and is back. Devices on other hosts are formatted again.
    pub(super) fn note_returned(&self, pool: &str, device: DeviceId) {
        if let Ok(entry) = self.registry.inner().pool_mut(pool) {
            let mut devices = entry.devices.iter().filter(|it| it.peer.is_none());
            let is_here = devices.any(|it| it.ids.is_some_and(|ids| ids.in_pool == device));
            if is_here && !entry.returned.contains(&device) {
                entry.returned.push(device);
            }
        }
    }

    /// Releases the segments of ended caches on a device that is back. The shards have not opened
    /// the device yet, so no cache uses one of its segments.
    pub(super) async fn release_ended_on(&self, pool: &str, device: DeviceId) {
        let (flash, ended) = {
            let inner = self.registry.inner();
            let Ok(entry) = inner.pool(pool) else { return };
            let known = inner.known_owners();
            let ended = inner.ended.of_pool(pool).into_iter().filter(|owner| !known.contains(owner));
            (entry.flash.clone(), ended.collect::<Vec<OwnerId>>())
        };
        for owner in ended {
            if let Err(error) = flash.release_outdated(device, owner, u32::MAX, Vec::new()).await {
                tracing::warn!("pool {pool}: {error}");
            }
        }
    }

    /// Releases outdated segments on returned devices: those that a cache had before its device was
    /// missing, and no longer uses. Returns false if a cache is being changed or recovered, so that
    /// the caller must try again.
    pub(in crate::services) async fn release_outdated(&self, pool: &str) -> bool {
        let (returned, disks) = {
            let inner = self.registry.inner();
            let Ok(entry) = inner.pool(pool) else { return true };
            if entry.returned.is_empty() {
                return true;
            }
            let is_user = |disk: &&DiskEntry| {
                disk.cache().is_some_and(|spec| spec.pool == pool && spec.journal.is_some())
            };
            let users = inner.disks.values().filter(is_user);
            (entry.returned.clone(), users.map(|disk| disk.wanted.name.clone()).collect::<Vec<_>>())
        };
        let mut is_done = true;
        for disk in disks {
            is_done &= self.release_outdated_of(pool, &disk, &returned).await;
        }
        if is_done && let Ok(entry) = self.registry.inner().pool_mut(pool) {
            entry.returned.retain(|device| !returned.contains(device));
        }
        self.refresh_owners(pool).await;
        is_done
    }

    /// Calls `release_outdated`, and repeats the call for a few seconds while a cache is being
    /// changed or recovered.
    pub(super) async fn release_outdated_patiently(&self, pool: &str) {
        for _ in 0..TRIES_MAX {
            if self.release_outdated(pool).await {
                return;
            }
            tokio::time::sleep(GUARD_EVERY).await;
        }
    }

    async fn release_outdated_of(&self, pool: &str, name: &str, returned: &[DeviceId]) -> bool {
        {
            // The recovery of an offline disk's cache releases its outdated segments.
            let inner = self.registry.inner();
            let Ok(disk) = inner.disk(name) else { return true };
            if !matches!(disk.phase, DiskPhase::Online(_)) {
                return disk.busy.is_none();
            }
        }
        let Ok(_guard) = self.registry.guard_disk(name, CLEARING) else { return false };
        let (flash, owner, ring, in_use) = {
            let inner = self.registry.inner();
            let (Ok(entry), Ok(disk)) = (inner.pool(pool), inner.disk(name)) else { return true };
            if disk.recovering.is_some() {
                return false;
            }
            let journal = disk.cache().filter(|spec| spec.pool == pool).and_then(|spec| spec.journal);
            let (Some(journal), DiskPhase::Online(_)) = (journal, &disk.phase) else { return true };
            let mut in_use = [&disk.held[..], &disk.apart[..], &disk.ring[..]].concat();
            // Lost segments stay allocated until their device is removed.
            in_use.extend(entry.devices.iter().flat_map(|device| &device.lost));
            // A disk that is served without its cache does not use the cache's data any more. If the
            // device has a newer ring, the saved state is older than the device.
            let ring = if disk.has_cache { journal.written } else { journal.ring.saturating_add(1) };
            (entry.flash.clone(), OwnerId(journal.owner.0), ring, entry.in_pool(&in_use))
        };
        for device in returned {
            match flash.release_outdated(*device, owner, ring, in_use.clone()).await {
                Ok((Some(0), _)) => {}
                Ok((Some(segments), _)) => tracing::info!(
                    "pool {pool}: {segments} outdated segments of the cache of {name} are free on the \
                     device that is back"
                ),
                Ok((None, _)) => tracing::warn!(
                    "pool {pool}: the device that is back has newer segments of the cache of {name} than \
                     hob's state knows; these segments stay allocated"
                ),
                Err(error) => {
                    tracing::warn!("pool {pool}: {error}");
                    return false;
                }
            }
        }
        true
    }
}
