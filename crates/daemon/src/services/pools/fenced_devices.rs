//! Uses a fenced device again after it was removed from the host and has returned
//! (docs/decisions/0073). [`super::device_returns`] decides when a device has returned.
//!
//! The content of the device is outdated, because the caches continued without the device. So hob
//! formats the device, as if an operator had removed it from the pool and added it again.

use std::path::Path;
use std::time::Duration;

use hob_control::DeviceState;
use hob_engine::command::Segment;
use hob_engine::units::DeviceId;
use hob_storage::pool::{Admission, FormerSuperblock};
use tokio::time::Instant;

use super::Pools;
use super::device_absence::FormerDevice;
use super::device_returns::{CheckResult, DevicePath, FormerDescriptors};
use super::devices::no_device;
use crate::api_error::{ApiError, ErrorKind, Result, conflict};
use crate::background::spawn;
use crate::services::flash::{Flash, answer_max, blocking, check_device_returned};
use crate::services::registry::{DeviceEntry, DeviceIds, OPENING};

/// Interval between two checks of a fenced device.
pub(in crate::services) const RETURN_EVERY: Duration = Duration::from_secs(10);

/// Number of attempts to open a device that hob has just closed, and the pause between two of them.
/// The kernel closes the descriptors of shards, which lock the device, a moment later.
const OPEN_TRIES: u32 = 20;
const OPEN_EVERY: Duration = Duration::from_millis(250);

impl Pools {
    /// Starts the checks of a device of this host that was fenced for this reason.
    pub(super) fn watch_fenced(&self, device: DeviceId, reason: String) {
        let found = {
            let mut inner = self.registry.inner();
            let found = inner.device_on_shards(device).filter(|(_, entry)| entry.peer.is_none());
            found.and_then(|(pool, entry)| {
                let uuid = entry.uuid.clone()?;
                Some((DevicePath { pool, path: entry.path.clone() }, uuid))
            })
        };
        if let Some((device, uuid)) = found {
            self.returns.note_fence(device, uuid, reason, Instant::now());
            self.look_at_fenced();
        }
    }

    /// Starts a check of each fenced device. The checks run on threads that may block.
    pub(in crate::services) fn look_at_fenced(&self) {
        for device in self.returns.idle() {
            if self.is_unused(&device) {
                let service = self.clone();
                spawn(async move { service.check_fenced(&device).await });
            } else {
                self.returns.forget(&device);
            }
        }
    }

    /// Returns true if a pool still has the device, and does not use it.
    fn is_unused(&self, device: &DevicePath) -> bool {
        let inner = self.registry.inner();
        let Ok(entry) = inner.pool(&device.pool) else { return false };
        let mut same = entry.devices.iter().filter(|it| it.path == device.path && it.peer.is_none());
        same.any(|it| matches!(it.state, DeviceState::Fenced | DeviceState::Offline))
    }

    /// Checks a fenced device, and uses the device again if it has returned.
    async fn check_fenced(&self, device: &DevicePath) {
        let Some(uuid) = self.returns.begin_check(device) else { return };
        let result = self.check(device, uuid).await;
        let needs_descriptors = self.returns.with(device, |watch| watch.needs_descriptors()) == Some(true);
        if result == CheckResult::Answers && needs_descriptors {
            let descriptors = self.former_descriptors(device).await;
            self.returns.with(device, |watch| watch.note_descriptors(descriptors));
        }
        let now = Instant::now();
        if self.returns.with(device, |watch| watch.note_result(result, now)) == Some(true) {
            self.use_again(device).await;
        }
        self.show_return(device);
        self.returns.end_check(device);
    }

    /// Checks whether the former device is at its path and answers.
    async fn check(&self, device: &DevicePath, uuid: String) -> CheckResult {
        let why = match self.former_superblock(device).await {
            None => "hob does not know yet which superblock it wrote to the device last".to_owned(),
            Some(former) => match check_device_returned(device.path.clone(), former).await {
                Ok(()) => return CheckResult::Answers,
                Err(error) => error.problem.error,
            },
        };
        let is_away = self.is_away(device, uuid).await;
        if is_away { CheckResult::Away(why) } else { CheckResult::Failed(why) }
    }

    /// Returns true if a device that failed a check was removed from the host, or does not answer.
    async fn is_away(&self, device: &DevicePath, uuid: String) -> bool {
        let former = {
            let inner = self.registry.inner();
            let entry = inner.pools.get(&device.pool);
            let found = entry.and_then(|entry| {
                let fenced = entry.devices.iter().find(|it| it.path == device.path)?;
                Some((fenced.file, fenced.segments * entry.segment_bytes))
            });
            let (file, segment_bytes) = found.unwrap_or_default();
            FormerDevice { path: device.path.clone(), uuid, file, segment_bytes }
        };
        blocking(move || former.is_away(answer_max())).await.unwrap_or_default()
    }

    /// Returns the pool of a fenced device and the ids of the device, if the device is still open.
    fn open_device(&self, device: &DevicePath) -> Option<(Flash, DeviceIds)> {
        let inner = self.registry.inner();
        let entry = inner.pools.get(&device.pool)?;
        let fenced = entry.devices.iter().find(|it| it.path == device.path)?;
        Some((entry.flash.clone(), fenced.ids?))
    }

    /// Returns the last superblock that this process wrote to a fenced device, or the one that an
    /// earlier check has found if the pool's lock is not free. Another superblock shows that another
    /// host has used the device.
    async fn former_superblock(&self, device: &DevicePath) -> Option<FormerSuperblock> {
        // hob may have written the superblock again since the last check.
        if let Some((flash, ids)) = self.open_device(device)
            && let Some(former) = flash.former_superblock_if_free(ids.in_pool).await
        {
            self.returns.with(device, |watch| watch.note_former(former));
        }
        self.returns.with(device, |watch| watch.former()).flatten()
    }

    /// Reads through the former descriptors of a device that answers. If the device was removed from
    /// the host and connected again, they fail.
    async fn former_descriptors(&self, device: &DevicePath) -> FormerDescriptors {
        let found = self.open_device(device);
        let Some((flash, ids)) = found else { return FormerDescriptors::Work };
        match flash.is_disconnected(ids.in_pool, device.path.clone()).await {
            true => FormerDescriptors::Fail,
            false => FormerDescriptors::Work,
        }
    }

    /// Shows the state of a fenced device in `hob health`.
    fn show_return(&self, device: &DevicePath) {
        let Some(status) = self.returns.with(device, |watch| watch.status(device)).flatten() else { return };
        let mut inner = self.registry.inner();
        let Ok(entry) = inner.pool_mut(&device.pool) else { return };
        let mut same = entry.devices.iter_mut().filter(|it| it.path == device.path);
        if let Some(entry) = same.find(|it| matches!(it.state, DeviceState::Fenced | DeviceState::Offline)) {
            entry.reason = Some(status);
        }
    }

    /// Formats a device that has returned, and gives its space to the caches.
    async fn use_again(&self, device: &DevicePath) {
        let DevicePath { pool, path } = device;
        let guard = match self.registry.guard_pool(pool, OPENING) {
            Ok(guard) => guard,
            Err(error) => return self.note_obstacle(device, &error),
        };
        if !self.returns.is_closed(device) {
            match self.close_fenced(pool, path).await {
                Ok(Some(former)) => _ = self.returns.with(device, |watch| watch.note_former(former)),
                Ok(None) => {}
                Err(error) => return self.note_obstacle(device, &error),
            }
            self.returns.with(device, |watch| watch.note_closed());
        }
        let Some(former) = self.returns.with(device, |watch| watch.former()).flatten() else { return };
        if let Err((error, formatted)) = self.format_returned(pool, path, former).await {
            let path = path.display();
            tracing::warn!("pool {pool}: {path} answers again, but hob cannot use it: {error}");
            let why = error.problem.error;
            self.returns.with(device, |watch| watch.note_failure(why, formatted, Instant::now()));
            return;
        }
        self.returns.with(device, |watch| watch.note_return(Instant::now()));
        drop(guard);
        tracing::info!("pool {pool}: {} has returned, and is in use again, formatted", path.display());
        self.top_up(pool).await;
        if let Err(error) = self.registry.save().await {
            tracing::error!("pool {pool}: {error}");
        }
    }

    fn note_obstacle(&self, device: &DevicePath, error: &ApiError) {
        self.returns.with(device, |watch| watch.note_obstacle(error.to_string()));
    }

    /// Closes a fenced device in the pool and in the shards, and returns its last superblock. Refuses
    /// if a cache may need data on the device. The caller holds the pool's operation guard.
    async fn close_fenced(&self, pool: &str, path: &Path) -> Result<Option<FormerSuperblock>> {
        self.swap.check_none(pool, Some(path))?;
        let (flash, ids) = {
            let inner = self.registry.inner();
            let entry = inner.pool(pool)?;
            let mut fenced = entry.devices.iter().filter(|it| it.state == DeviceState::Fenced);
            let ids = fenced.find(|it| it.path == path).and_then(|it| it.ids);
            let ids = ids.ok_or_else(|| no_device(pool, path))?;
            let on_it = |segments: &[Segment]| segments.iter().any(|it| it.device == ids.on_shards);
            let users = inner.disks.values();
            let users = users.filter(|disk| on_it(&disk.held) || on_it(&disk.apart) || on_it(&disk.ring));
            let users: Vec<&str> = users.map(|disk| disk.wanted.name.as_str()).collect();
            if !users.is_empty() {
                return Err(conflict!("the caches of these disks have data on it: {}", users.join(", "))
                    .hint(
                        "hob moves the data off as far as possible; a restart of hob reads the rest from the \
                         device, and 'hob cache discard-dirty' discards it",
                    ));
            }
            (entry.flash.clone(), ids)
        };
        let devices = flash.set_admission(ids.in_pool, Admission::Out).await?;
        self.registry.refresh(pool, &devices);
        let lost = {
            let mut inner = self.registry.inner();
            let entry = inner.pool_mut(pool)?;
            let device = entry.by_shard_id(ids.on_shards).ok_or_else(|| no_device(pool, path))?;
            let (taken, lost) = (device.segments - device.free_segments, device.lost.clone());
            if taken > lost.len() as u64 {
                return Err(conflict!("it has segments of a cache that is offline or belongs to no disk")
                    .hint(format!("'hob health' and 'hob pool show {pool}' list such caches")));
            }
            entry.in_pool(&lost)
        };
        self.note_next_device(pool).await?;
        let former = flash.close_failed(ids.in_pool, lost).await?;
        {
            let mut inner = self.registry.inner();
            let entry = inner.pool_mut(pool)?;
            entry.returned.retain(|id| *id != ids.in_pool);
            if let Some(device) = entry.by_shard_id(ids.on_shards) {
                let (path, admission) = (device.path.clone(), device.admission);
                *device = DeviceEntry::offline(path, "hob formats it".to_owned(), admission);
            }
        }
        for shard in &self.registry.shards {
            // A shard that has ended has no device.
            let _ = shard.remove_device(ids.on_shards).await;
        }
        Ok(former)
    }

    /// Formats a closed device, and makes all shards open it. An error includes the new UUID and
    /// superblock of the device if the device was formatted.
    async fn format_returned(
        &self,
        pool: &str,
        path: &Path,
        former: FormerSuperblock,
    ) -> Result<(), (ApiError, Option<(String, FormerSuperblock)>)> {
        let before = |error: ApiError| (error, None);
        let (flash, chosen, ids) = {
            let inner = self.registry.inner();
            let entry = inner.pool(pool).map_err(before)?;
            let device = entry.devices.iter().find(|device| device.path == path);
            let device = device.ok_or_else(|| before(no_device(pool, path)))?;
            // `note_next_device` has counted the id that the device gets.
            (entry.flash.clone(), device.admission, entry.device_ids.saturating_sub(1))
        };
        let mut tries = 1..OPEN_TRIES;
        let (id, devices) = loop {
            match flash.add_returned(path.to_owned(), former.clone(), ids).await {
                Err(error) if error.kind == ErrorKind::Conflict && tries.next().is_some() => {
                    tokio::time::sleep(OPEN_EVERY).await;
                }
                added => break added.map_err(before)?,
            }
        };
        let info = devices.into_iter().find(|device| device.id == id);
        let info = info.ok_or_else(|| before(ApiError::failed("the device went offline again")))?;
        if let Err(error) = self.connect_device(pool, &info, chosen).await {
            let former = flash.former_superblock(id).await.ok();
            self.close_device(pool, id).await;
            return Err((error, former.map(|former| (info.uuid.to_string(), former))));
        }
        if let Ok(entry) = self.registry.inner().pool_mut(pool) {
            entry.device_ids = entry.device_ids.max(id.0 + 1);
        }
        Ok(())
    }
}
