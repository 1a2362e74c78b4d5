//! Allocation and release of segments of a pool for caches. Translation between the two ids of a
//! device: its id in the pool and its id on the shards.

use std::path::PathBuf;

use hob_control::{Admission, DeviceState};
use hob_engine::command::{DataSegment, Segment};
use hob_engine::units::{DeviceId, DiskId};
use hob_storage::pool::{self, DeviceInfo, OwnerId};

use super::{DeviceEntry, DeviceIds, Inner, PoolEntry, Registry};
use crate::api_error::{ApiError, Result};
use crate::services::flash::{Owner, Wanted};
use crate::services::pools::Stalls;
use crate::state::CacheSpec;

impl Registry {
    /// Allocates segments of the pool for the data of a disk's cache. Returns the segments with the
    /// device ids of the shards.
    pub(in crate::services) async fn take_room(
        &self,
        spec: &CacheSpec,
        disk: DiskId,
        wanted: Wanted,
    ) -> Result<Vec<DataSegment>> {
        let pool = &spec.pool;
        let flash = self.inner().pool(pool)?.flash.clone();
        let owner = match &spec.journal {
            Some(journal) => Owner::Persistent(OwnerId(journal.owner.0)),
            // Volatile segments have no meaning after the daemon ends, so this owner id only has to
            // be unique within the daemon.
            None => Owner::Volatile(OwnerId(1 << 64 | u128::from(disk.0))),
        };
        let allocated = flash.allocate(owner, wanted).await?;
        Ok(self.inner().pool_mut(pool)?.note_allocated(allocated))
    }

    /// Releases segments that no cache uses.
    pub(in crate::services) async fn give_back(&self, pool: &str, segments: &[Segment]) {
        if segments.is_empty() {
            return;
        }
        let (flash, in_pool) = {
            let inner = self.inner();
            let Ok(entry) = inner.pool(pool) else { return };
            (entry.flash.clone(), entry.in_pool(segments))
        };
        match flash.release(in_pool).await {
            Ok(devices) => self.refresh(pool, &devices),
            Err(error) => tracing::warn!("pool {pool}: {error}"),
        }
    }

    /// Records the state of a pool's devices after an operation.
    pub(in crate::services) fn refresh(&self, pool: &str, devices: &[DeviceInfo]) {
        if let Ok(entry) = self.inner().pool_mut(pool) {
            entry.refresh(devices);
        }
    }
}

impl PoolEntry {
    /// Updates the pool's device entries with the state of these devices.
    pub(in crate::services) fn refresh(&mut self, devices: &[DeviceInfo]) {
        for info in devices {
            let mine =
                self.devices.iter_mut().find(|device| device.ids.is_some_and(|ids| ids.in_pool == info.id));
            if let Some(device) = mine {
                device.segments = info.segments;
                device.free_segments = info.free_segments;
                device.access = info.access;
            }
        }
    }

    /// Updates the pool's device entries after an allocation of segments. Returns the allocated
    /// segments with the device ids of the shards.
    pub(in crate::services) fn note_allocated(
        &mut self,
        (segments, devices): (Vec<DataSegment>, Vec<DeviceInfo>),
    ) -> Vec<DataSegment> {
        self.refresh(&devices);
        let known = |segment: DataSegment| {
            let place =
                self.on_shards(segment.place).expect("segments come from devices that the shards know");
            DataSegment { place, ..segment }
        };
        segments.into_iter().map(known).collect()
    }

    /// Returns the number of free segments on local devices that allow allocation.
    pub(in crate::services) fn free_segments(&self) -> u64 {
        self.free_segments_beyond(0)
    }

    /// Returns the number of free segments on local devices that allow allocation, minus `spare`
    /// segments for each device.
    pub(in crate::services) fn free_segments_beyond(&self, spare: u64) -> u64 {
        self.free_segments_after(&[], spare)
    }

    /// Returns the result that `free_segments_beyond` would have if a cache had released the
    /// segments `released` (with the device ids of the shards).
    pub(in crate::services) fn free_segments_after(&self, released: &[Segment], spare: u64) -> u64 {
        let here = self.usable().filter(|device| device.peer.is_none() && device.gives_segments());
        let free = here.map(|device| {
            let id = device.ids.map(|ids| ids.on_shards);
            let more = released.iter().filter(|segment| Some(segment.device) == id).count() as u64;
            (device.free_segments + more).saturating_sub(spare)
        });
        free.sum()
    }

    /// Returns the number of usable segments on local devices.
    pub(in crate::services) fn segments(&self) -> u64 {
        self.usable().filter(|device| device.peer.is_none()).map(|device| device.segments).sum()
    }

    fn usable(&self) -> impl Iterator<Item = &DeviceEntry> {
        self.devices
            .iter()
            .filter(|device| matches!(device.state, DeviceState::Online | DeviceState::Stalled))
    }

    /// Returns the devices with allocation switched off by command.
    pub(in crate::services) fn chosen_out(&self) -> impl Iterator<Item = &DeviceEntry> {
        self.devices.iter().filter(|device| device.admission == Admission::Out)
    }

    /// Returns whether the pool may allocate from the device with this pool id.
    pub(in crate::services) fn admission(&self, id: DeviceId) -> pool::Admission {
        let mut mine = self.devices.iter().filter(|device| device.ids.is_some_and(|ids| ids.in_pool == id));
        let gives = mine.any(DeviceEntry::gives_segments);
        if gives { pool::Admission::In } else { pool::Admission::Out }
    }

    pub(in crate::services) fn by_shard_id(&mut self, id: DeviceId) -> Option<&mut DeviceEntry> {
        self.devices.iter_mut().find(|device| device.ids.is_some_and(|ids| ids.on_shards == id))
    }

    /// Translates a segment's device id into that of the shards; `None` if the shards do not know
    /// the device.
    pub(in crate::services) fn on_shards(&self, segment: Segment) -> Option<Segment> {
        let mut ids = self.devices.iter().filter_map(|device| device.ids);
        let device = ids.find(|ids| ids.in_pool == segment.device)?.on_shards;
        Some(Segment { device, ..segment })
    }

    /// Translates the device ids of segments into those of the pool. Leaves out removed devices.
    pub(in crate::services) fn in_pool(&self, segments: &[Segment]) -> Vec<Segment> {
        let translate = |segment: &Segment| {
            let mut ids = self.devices.iter().filter_map(|device| device.ids);
            let device = ids.find(|ids| ids.on_shards == segment.device)?.in_pool;
            Some(Segment { device, ..*segment })
        };
        segments.iter().filter_map(translate).collect()
    }
}

impl Inner {
    /// Returns an id for the shards that no device has had.
    pub(in crate::services) fn new_device_id(&mut self) -> Result<DeviceId> {
        let id = DeviceId(self.next_device);
        self.next_device = self.next_device.checked_add(1).ok_or_else(|| {
            ApiError::failed(
                "this daemon has opened 65 535 devices, which is the maximum; restart the daemon",
            )
        })?;
        Ok(id)
    }

    /// Records that a cache has lost this segment of a fenced device, which must not be allocated
    /// again.
    pub(in crate::services) fn note_lost(&mut self, segment: Segment) {
        if let Some((_, device)) = self.device_on_shards(segment.device) {
            device.lost.push(segment);
        }
    }

    /// Returns the pool and the device with this id on the shards.
    pub(in crate::services) fn device_on_shards(
        &mut self,
        id: DeviceId,
    ) -> Option<(String, &mut DeviceEntry)> {
        self.pools
            .iter_mut()
            .find_map(|(name, pool)| pool.by_shard_id(id).map(|device| (name.clone(), device)))
    }
}

impl DeviceEntry {
    /// Returns the entry of a device that is open.
    pub(in crate::services) fn online(
        info: &DeviceInfo,
        on_shards: DeviceId,
        admission: Admission,
    ) -> DeviceEntry {
        DeviceEntry {
            ids: Some(DeviceIds { in_pool: info.id, on_shards }),
            state: DeviceState::Online,
            reason: None,
            segments: info.segments,
            free_segments: info.free_segments,
            access: info.access,
            uuid: Some(info.uuid.to_string()),
            file: info.file,
            ..DeviceEntry::offline(info.path.clone(), String::new(), admission)
        }
    }

    /// Returns the entry of a device that is not open, for this reason.
    pub(in crate::services) fn offline(path: PathBuf, reason: String, admission: Admission) -> DeviceEntry {
        DeviceEntry {
            path,
            ids: None,
            state: DeviceState::Offline,
            reason: Some(reason),
            admission,
            segments: 0,
            free_segments: 0,
            access: "",
            uuid: None,
            file: None,
            peer: None,
            lost: Vec::new(),
            stalls: Stalls::default(),
        }
    }

    /// Returns true if caches may get new segments of the device, once it is open.
    pub(in crate::services) fn gives_segments(&self) -> bool {
        self.admission == Admission::In && self.state != DeviceState::Fenced
    }
}
