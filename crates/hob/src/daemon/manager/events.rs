//! Handling of shard events, and periodic retries.

use std::sync::Arc;
use std::time::Duration;

use hob_control::{DeviceState, Size};
use hob_engine::command::Segment;
use hob_engine::units::{DeviceId, DiskId, SECTOR_BYTES};
use hob_storage::pool::Admission;
use tokio::sync::mpsc::UnboundedReceiver;

use super::observe::{COUNT_EVERY, JUDGE_EVERY};
use super::pools::LOOK_EVERY;
use super::qos::AGREE_EVERY;
use super::registry::JOURNAL_LOST;
use super::{DiskPhase, Manager};
use crate::daemon::shard_api::ShardEvent;

/// Interval between two attempts to open offline objects.
const RETRY_EVERY: Duration = Duration::from_secs(5);

impl Manager {
    /// Handles shard events and retries offline objects, until dropped.
    pub(crate) async fn tend(self: Arc<Self>, mut events: UnboundedReceiver<ShardEvent>) {
        let mut retry = tokio::time::interval(RETRY_EVERY);
        retry.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        let mut look = tokio::time::interval(LOOK_EVERY);
        look.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        let mut agree = tokio::time::interval(AGREE_EVERY);
        agree.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        let mut judge = tokio::time::interval(JUDGE_EVERY);
        judge.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        let mut count = tokio::time::interval(COUNT_EVERY);
        count.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        let evidence = self.disks.clone().record_evidence();
        tokio::pin!(evidence);
        loop {
            tokio::select! {
                never = &mut evidence => match never {},
                event = events.recv() => match event {
                    Some(event) => self.handle_event(event),
                    None => return,
                },
                _ = retry.tick() => self.retry(),
                _ = look.tick() => self.pools.look_at_dirty(),
                _ = judge.tick() => self.observe.judge(),
                _ = count.tick() => self.observe.count_mismatches(),
                _ = agree.tick() => self.agree_on_datastores(),
            }
        }
    }

    fn retry(self: &Arc<Self>) {
        self.disks.link_parents();
        self.disks.drop_idle_parents();
        let (disks, pools, roomy, lenders) = {
            let inner = self.inner();
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
            let roomy = inner.pools.iter().filter(|(_, pool)| pool.free_segments() > 0);
            let roomy: Vec<String> = roomy.map(|(name, _)| name.clone()).collect();
            let is_gone = |device: &super::DeviceEntry| {
                device.peer.is_some() && matches!(device.state, DeviceState::Fenced | DeviceState::Offline)
            };
            let lenders = inner.pools.iter().filter(|(_, pool)| pool.devices.iter().any(is_gone));
            let lenders: Vec<String> = lenders.map(|(name, _)| name.clone()).collect();
            (disks, pools, roomy, lenders)
        };
        // Each attempt has its own task, so that a hung one does not delay others. The operation
        // guard prevents concurrent attempts.
        for name in disks {
            let manager = self.clone();
            tokio::spawn(async move { manager.disks.bring_online(&name).await });
        }
        for name in pools {
            let manager = self.clone();
            tokio::spawn(async move { manager.pools.retry_devices(&name).await });
        }
        for name in lenders {
            let manager = self.clone();
            tokio::spawn(async move { manager.pools.offer_again(&name).await });
        }
        for device in self.fenced_in_use() {
            let manager = self.clone();
            tokio::spawn(async move { manager.flee(device).await });
        }
        for name in self.exports.without_file() {
            tokio::spawn(self.exports.clone().show_file_again(name));
        }
        let manager = self.clone();
        tokio::spawn(async move { manager.remote_flash.free_ended().await });
        // A cache that was being changed when space became free missed the notification.
        for name in roomy {
            let manager = self.clone();
            tokio::spawn(async move { manager.pools.top_up(&name).await });
        }
    }

    pub(super) fn handle_event(self: &Arc<Self>, event: ShardEvent) {
        match event {
            ShardEvent::Fenced { device, errors } => self.fence(device, errors),
            ShardEvent::Lost { disk, segments } => {
                let mut inner = self.inner();
                let Some(entry) = inner.disks.values_mut().find(|entry| entry.id == disk) else { return };
                let count = entry.held.len();
                entry.held.retain(|segment| !segments.contains(segment));
                entry.ring.retain(|segment| !segments.contains(segment));
                let lost = count - entry.held.len();
                let name = entry.wanted.name.clone();
                entry.cache_reason = Some(match entry.held.len() {
                    0 => "all flash of the cache is fenced after errors".to_owned(),
                    left => format!(
                        "the cache lost {lost} of its {count} segments with a fenced device, and \
                        has {left} left"
                    ),
                });
                for segment in segments {
                    inner.note_lost(segment);
                }
                tracing::error!(
                    "disk {name}: its cache lost {lost} of its {count} segments with a fenced device"
                );
            }
            ShardEvent::Stalled(device) if self.inner().is_peer(device) => {
                self.note_health(
                    device,
                    DeviceState::Stalled,
                    "the lending host does not answer in time, and writes wait for it",
                );
            }
            ShardEvent::Stalled(device) => {
                self.note_health(
                    device,
                    DeviceState::Stalled,
                    "the device does not answer in time, and caches bypass it",
                );
            }
            ShardEvent::PeerSilent(device) => {
                // A short pause of the device may only have been counted so far.
                tracing::error!(
                    device = device.0,
                    "the host that lends a remote flash device does not answer; hob stops using the \
                    device"
                );
                self.note_health(
                    device,
                    DeviceState::Stalled,
                    "the lending host does not answer, and hob stops using the device",
                );
                let manager = self.clone();
                tokio::spawn(async move { manager.pools.peer_silent(device).await });
            }
            ShardEvent::Resumed(device) => self.note_health(device, DeviceState::Online, ""),
            ShardEvent::DirtyLost { disk, sectors } => {
                let lost = Size(sectors * SECTOR_BYTES);
                self.note_cache(
                    disk,
                    &format!(
                        "{lost} of dirty data cannot be read from flash; reads of it fail until the \
                        data is written again, or discarded with 'hob cache discard-dirty'"
                    ),
                );
            }
            ShardEvent::ChangeWaits(disk) if self.note_wanted(disk) => {}
            ShardEvent::ChangeWaits(disk) => {
                let manager = self.clone();
                tokio::spawn(async move { manager.disks.let_changes_pass(disk).await });
            }
            ShardEvent::WritesInDoubt(disk) => {
                let inner = self.inner();
                let Some(entry) = inner.disks.values().find(|entry| entry.id == disk) else { return };
                let name = &entry.wanted.name;
                tracing::error!(
                    "disk {name}: its backing failed a flush or restarted, so acknowledged writes may be lost; the next \
                     flush of each client fails once; check the backing and the guest's filesystem"
                );
            }
            ShardEvent::FailuresOwed { disk, count } => self.note_owed(disk, count),
            ShardEvent::BackingLost(disk) => {
                let manager = self.clone();
                tokio::spawn(async move { manager.disks.backing_lost(disk).await });
            }
            ShardEvent::BackingClosed(disk) => self.disks.backing_closed(disk),
            ShardEvent::JournalLost(disk) => {
                self.note_cache(disk, JOURNAL_LOST);
                let manager = self.clone();
                tokio::spawn(async move { manager.pools.replace_journal(disk).await });
            }
        }
    }

    /// Returns fenced devices with segments of persistent caches that no operation is moving yet.
    fn fenced_in_use(&self) -> Vec<DeviceId> {
        let inner = self.inner();
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
    /// on another device, or from the failed device while it is readable. Volatile caches leave the
    /// device by themselves.
    async fn flee(self: &Arc<Self>, device: DeviceId) {
        let on_it = |segments: &[Segment]| segments.iter().any(|segment| segment.device == device);
        let names: Vec<String> = {
            let inner = self.inner();
            let concerned = inner.disks.values().filter(|disk| {
                let is_persistent = disk.cache().is_some_and(|spec| spec.journal.is_some());
                is_persistent && (on_it(&disk.held) || on_it(&disk.apart) || on_it(&disk.ring))
            });
            concerned.map(|disk| disk.wanted.name.clone()).collect()
        };
        for name in names {
            let Some(_guard) = self.guard_patiently(&name, "moved off a failed device").await else {
                tracing::warn!(
                    "disk {name}: another change is in progress; hob moves the cache off \
                    the failed device afterwards"
                );
                continue;
            };
            match self.pools.leave_device(&name, device).await {
                Ok(notes) => notes.iter().for_each(|note| tracing::warn!("{note}")),
                Err(error) => {
                    tracing::error!("disk {name}: cannot move its cache away from a failed device: {error}");
                    if let Ok(disk) = self.inner().disk_mut(&name) {
                        disk.cache_reason =
                            Some(format!("it lies on a failed device: {}", error.problem.error));
                    }
                }
            }
        }
    }

    /// Records and logs a problem of a disk's cache.
    fn note_cache(&self, disk: DiskId, reason: &str) {
        let mut inner = self.inner();
        let Some(entry) = inner.disks.values_mut().find(|entry| entry.id == disk) else { return };
        tracing::error!("the cache of {}: {reason}", entry.wanted.name);
        entry.cache_reason = Some(reason.to_owned());
    }

    fn fence(self: &Arc<Self>, device: DeviceId, errors: u32) {
        let reason = match self.inner().is_peer(device) {
            true => "the lending host does not answer; hob creates replicas again when it \
                does"
                .to_owned(),
            false => format!("fenced after {errors} failed I/Os; remove it from the pool"),
        };
        self.note_health(device, DeviceState::Fenced, &reason);
        let mut inner = self.inner();
        let Some((name, entry)) = inner.device_on_shards(device) else { return };
        let Some(ids) = entry.ids else { return };
        let flash = inner.pools[&name].flash.clone();
        drop(inner);
        let manager = self.clone();
        tokio::spawn(async move {
            if let Ok(devices) = flash.set_admission(ids.in_pool, Admission::Out).await {
                manager.refresh(&name, &devices);
            }
            manager.flee(device).await;
        });
    }

    fn note_health(&self, device: DeviceId, state: DeviceState, reason: &str) {
        let mut inner = self.inner();
        let Some((pool, entry)) = inner.device_on_shards(device) else { return };
        // A fence stays until the device is removed.
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
