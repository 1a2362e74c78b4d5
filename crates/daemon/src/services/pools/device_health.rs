//! Health of devices: stalled and fenced devices, and caches that leave a failed device.

use hob_control::DeviceState;
use hob_engine::command::Segment;
use hob_engine::units::DeviceId;
use hob_storage::pool::Admission;

use super::Pools;
use crate::background::spawn;
use crate::services::registry::DiskPhase;

impl Pools {
    /// Returns fenced devices with segments of persistent caches that no operation is moving yet.
    pub(in crate::services) fn fenced_in_use(&self) -> Vec<DeviceId> {
        let inner = self.registry.inner();
        let idle = inner
            .disks
            .values()
            .filter(|disk| disk.busy.is_none() && matches!(disk.phase, DiskPhase::Online(_)));
        let used: Vec<DeviceId> = idle
            .flat_map(|disk| disk.held.iter().chain(&disk.apart).chain(&disk.ring))
            .map(|segment| segment.device)
            .collect();
        let devices = inner.pools.values().flat_map(|pool| &pool.devices);
        let fenced =
            devices.filter(|device| device.state == DeviceState::Fenced).filter_map(|device| device.ids);
        fenced.map(|ids| ids.on_shards).filter(|id| used.contains(id)).collect()
    }

    /// Moves persistent caches away from a failed device. Dirty data is read from its second copy
    /// on another device, or from the failed device while it is readable. The engine removes
    /// volatile caches from the device without this function.
    pub(in crate::services) async fn flee(&self, device: DeviceId) {
        let on_it = |segments: &[Segment]| segments.iter().any(|segment| segment.device == device);
        let names: Vec<String> = {
            let inner = self.registry.inner();
            let concerned = inner.disks.values().filter(|disk| {
                let is_persistent = disk.cache().is_some_and(|spec| spec.journal.is_some());
                is_persistent && (on_it(&disk.held) || on_it(&disk.apart) || on_it(&disk.ring))
            });
            concerned.map(|disk| disk.wanted.name.clone()).collect()
        };
        for name in names {
            let Some(_guard) = self.registry.guard_patiently(&name, "moved off a failed device").await else {
                tracing::warn!(
                    "disk {name}: another change is in progress; hob moves the cache off \
                    the failed device afterwards"
                );
                continue;
            };
            match self.leave_device(&name, device).await {
                Ok(notes) => notes.iter().for_each(|note| tracing::warn!("{note}")),
                Err(error) => {
                    tracing::error!("disk {name}: cannot move its cache away from a failed device: {error}");
                    if let Ok(disk) = self.registry.inner().disk_mut(&name) {
                        disk.cache_reason =
                            Some(format!("it lies on a failed device: {}", error.problem.error));
                    }
                }
            }
        }
    }

    /// Stops allocation from a device after errors, and moves persistent caches away from it.
    pub(in crate::services) fn fence(&self, device: DeviceId, errors: u32) {
        let reason = match self.registry.inner().is_peer(device) {
            true => "the lending host does not answer; hob creates replicas again when it does".to_owned(),
            false => format!("fenced after {errors} failed I/Os; remove it from the pool"),
        };
        self.note_health(device, DeviceState::Fenced, &reason);
        let mut inner = self.registry.inner();
        let Some((name, entry)) = inner.device_on_shards(device) else { return };
        let Some(ids) = entry.ids else { return };
        let flash = inner.pools[&name].flash.clone();
        drop(inner);
        let service = self.clone();
        spawn(async move {
            if let Ok(devices) = flash.set_admission(ids.in_pool, Admission::Out).await {
                service.registry.refresh(&name, &devices);
            }
            service.flee(device).await;
        });
    }

    /// Records and logs the state of a device.
    pub(in crate::services) fn note_health(&self, device: DeviceId, state: DeviceState, reason: &str) {
        let mut inner = self.registry.inner();
        let Some((pool, entry)) = inner.device_on_shards(device) else { return };
        // A device stays fenced until it is removed.
        if entry.state == DeviceState::Fenced {
            return;
        }
        entry.state = state;
        entry.reason = (!reason.is_empty()).then(|| reason.to_owned());
        let path = entry.path.display();
        match state {
            DeviceState::Online => {
                if let Some(pause) = entry.stalls.end(std::time::Instant::now()) {
                    let (count, pause) = (entry.stalls.count, pause.as_millis());
                    tracing::info!(
                        "pool {pool}: {path} answers again, {pause} ms after hob noticed the pause; \
                        pauses since hob started: {count}; hob does not log further pauses within \
                        the hour, but counts them (metric hob_device_stalls)"
                    );
                }
            }
            DeviceState::Stalled => {
                if entry.stalls.begin(std::time::Instant::now()) {
                    tracing::warn!("pool {pool}: {path}: {reason}");
                }
            }
            _ => tracing::error!("pool {pool}: {path}: {reason}"),
        }
    }
}
