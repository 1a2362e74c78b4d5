//! Health of devices: stalled and fenced devices, and caches that leave a failed device.

use std::time::Duration;

use hob_control::DeviceState;
use hob_engine::command::Segment;
use hob_engine::units::DeviceId;
use hob_storage::pool::Admission;
use tokio::time::Instant;

use super::Pools;
use super::stalls::PauseEnd;
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

    /// Moves persistent caches away from a failed device. Dirty data is read from its replica
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
                            Some(format!("it is on a failed device: {}", error.problem.error));
                    }
                }
            }
        }
    }

    /// Stops allocation from a device after errors, and moves persistent caches away from it. A
    /// device of this host may return ([`super::fenced_devices`]).
    pub(in crate::services) fn fence(&self, device: DeviceId, errors: u32) {
        let reason = match self.registry.inner().is_peer(device) {
            true => "the lending host does not answer; hob creates replicas again when it does".to_owned(),
            false => format!("fenced after {errors} failed I/Os"),
        };
        self.note_health(device, DeviceState::Fenced, &reason);
        self.watch_fenced(device, reason);
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
        let waited = inner.flash_stall_max;
        let Some((pool, entry)) = inner.device_on_shards(device) else { return };
        // A device stays fenced until it is removed or formatted.
        if entry.state == DeviceState::Fenced {
            return;
        }
        entry.state = state;
        entry.reason = (!reason.is_empty()).then(|| reason.to_owned());
        let path = entry.path.display();
        match state {
            DeviceState::Online => {
                let end = entry.stalls.end(Instant::now());
                let count = entry.stalls.count;
                match end {
                    None => {}
                    Some(PauseEnd::Unreported(length)) => tracing::warn!(
                        "pool {pool}: {path} did not answer for at least {:.1} s, and answers again; \
                        pauses since hob started: {count}; within the hour, hob does not log further \
                        short pauses, but counts them (metric hob_device_stalls)",
                        length.as_secs_f64()
                    ),
                    Some(PauseEnd::Reported(length)) => tracing::info!(
                        "pool {pool}: {path} answers again after at least {:.1} s; pauses since hob \
                        started: {count}",
                        length.as_secs_f64()
                    ),
                }
            }
            DeviceState::Stalled => {
                if let Some(left) = entry.stalls.begin(Instant::now(), waited) {
                    let service = self.clone();
                    spawn(async move {
                        tokio::time::sleep(left).await;
                        service.warn_of_long_pause(device);
                    });
                }
            }
            _ => tracing::error!("pool {pool}: {path}: {reason} (see 'hob health')"),
        }
    }

    /// Logs a warning if the device has not answered for a long time.
    fn warn_of_long_pause(&self, device: DeviceId) {
        let mut inner = self.registry.inner();
        let Some((pool, entry)) = inner.device_on_shards(device) else { return };
        if entry.state != DeviceState::Stalled {
            return;
        }
        let Some(length) = entry.stalls.overdue(Instant::now()) else { return };
        let (path, length) = (entry.path.display(), length.as_secs_f64());
        let reason = entry.reason.as_deref().unwrap_or("the device does not answer in time");
        tracing::warn!("pool {pool}: {path}: no answer for at least {length:.1} s: {reason}");
    }

    /// Sets the time after which a flash I/O is overdue: `flash_stall_ms_max` of `[limits]`.
    pub(crate) fn set_flash_stall_max(&self, limit: Duration) {
        self.registry.inner().flash_stall_max = limit;
    }
}
