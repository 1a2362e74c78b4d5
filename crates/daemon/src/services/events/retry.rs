//! Retries of offline disks, devices, files and lending hosts.

use hob_control::DeviceState;

use super::Events;
use crate::background::spawn;
use crate::services::registry::{DeviceEntry, DiskEntry, DiskPhase};

impl Events {
    /// For each object that is offline or incomplete, starts an attempt to open or complete the
    /// object.
    pub(super) fn retry(&self) {
        self.disks.link_parents();
        self.disks.drop_idle_parents();
        self.qos.drop_unused_datastores();
        self.pools.read_orphans();
        let (disks, pools, returned, roomy, lenders) = {
            let inner = self.registry.inner();
            inner.stop_needless_drains();
            let now = tokio::time::Instant::now();
            let offline = inner.disks.iter().filter(|(_, disk)| {
                matches!(disk.phase, DiskPhase::Offline(_))
                    && !disk.waits_for_cluster()
                    && disk.retry_after.is_none_or(|at| at <= now)
                    && !inner.is_abandoned(&disk.wanted.name)
            });
            let disks: Vec<String> = offline.map(|(name, _)| name.clone()).collect();
            let sick = inner
                .pools
                .iter()
                .filter(|(_, pool)| pool.devices.iter().any(|device| device.state == DeviceState::Offline));
            let pools: Vec<String> = sick.map(|(name, _)| name.clone()).collect();
            let returned = inner.pools.iter().filter(|(_, pool)| !pool.returned.is_empty());
            let returned: Vec<String> = returned.map(|(name, _)| name.clone()).collect();
            let roomy = inner.pools.iter().filter(|(_, pool)| pool.free_segments() > 0);
            let roomy: Vec<String> = roomy.map(|(name, _)| name.clone()).collect();
            let is_gone = |device: &DeviceEntry| {
                device.peer.is_some() && matches!(device.state, DeviceState::Fenced | DeviceState::Offline)
            };
            let lenders = inner.pools.iter().filter(|(_, pool)| pool.devices.iter().any(is_gone));
            let lenders: Vec<String> = lenders.map(|(name, _)| name.clone()).collect();
            (disks, pools, returned, roomy, lenders)
        };
        // Each attempt has its own task, so that a hung one does not delay others. The operation
        // guard prevents concurrent attempts.
        for name in disks {
            let disks = self.disks.clone();
            spawn(async move { disks.bring_online(&name).await });
        }
        for name in pools {
            let service = self.clone();
            spawn(async move { service.retry_pool(&name).await });
        }
        for name in returned {
            let pools = self.pools.clone();
            spawn(async move { pools.release_outdated(&name).await });
        }
        for name in lenders {
            let pools = self.pools.clone();
            spawn(async move { pools.offer_again(&name).await });
        }
        for device in self.pools.fenced_in_use() {
            let pools = self.pools.clone();
            spawn(async move { pools.flee(device).await });
        }
        for name in self.exports.without_file() {
            spawn(self.exports.clone().show_file_again(name));
        }
        let remote_flash = self.remote_flash.clone();
        spawn(async move { remote_flash.free_ended().await });
        // A cache that was being changed when space became free missed the notification of the free
        // space.
        for name in roomy {
            let pools = self.pools.clone();
            spawn(async move { pools.top_up(&name).await });
        }
    }

    /// Tries to open the missing devices of a pool. If a device has returned, opens the offline
    /// disks with caches in the pool, because they may have waited for the device.
    pub(in crate::services) async fn retry_pool(&self, pool: &str) {
        if !self.pools.retry_devices(pool).await {
            return;
        }
        let disks: Vec<String> = {
            let inner = self.registry.inner();
            let waits = |disk: &DiskEntry| {
                matches!(disk.phase, DiskPhase::Offline(_))
                    && disk.cache().is_some_and(|spec| spec.pool == pool)
                    && !disk.waits_for_cluster()
                    && !inner.is_abandoned(&disk.wanted.name)
            };
            inner.disks.iter().filter(|(_, disk)| waits(disk)).map(|(name, _)| name.clone()).collect()
        };
        for name in disks {
            let disks = self.disks.clone();
            spawn(async move { disks.bring_online(&name).await });
        }
    }
}
