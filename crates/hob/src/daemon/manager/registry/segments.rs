//! Segments: taken from pools for caches and given back, and their two names.

use std::path::PathBuf;

use hob_control::{Admission, DeviceState};
use hob_engine::command::{DataSegment, Segment};
use hob_engine::units::{DeviceId, DiskId};
use hob_storage::pool::{self, DeviceInfo, OwnerId};

use super::{DeviceEntry, DeviceIds, Inner, PoolEntry, Registry};
use crate::daemon::manager::api_error::ApiError;
use crate::daemon::manager::flash::Owner;
use crate::daemon::manager::stalls::Stalls;
use crate::daemon::state::CacheSpec;

/// How much room somebody wants.
#[derive(Clone, Copy, Debug)]
pub(in crate::daemon::manager) struct Wanted {
    pub(in crate::daemon::manager) least: u64,
    pub(in crate::daemon::manager) most: u64,
}

impl Registry {
    /// Takes segments of its pool for the data of a disk's cache, as the shards call them.
    pub(in crate::daemon::manager) async fn take_room(
        &self,
        spec: &CacheSpec,
        disk: DiskId,
        wanted: Wanted,
    ) -> Result<Vec<DataSegment>, ApiError> {
        let pool = &spec.pool;
        let flash = self.inner().pool(pool)?.flash.clone();
        let owner = match &spec.journal {
            Some(journal) => Owner::Persistent(OwnerId(journal.owner.0)),
            // Told apart while the daemon runs; volatile segments mean nothing later.
            None => Owner::Volatile(OwnerId(1 << 64 | u128::from(disk.0))),
        };
        let (segments, devices) = flash.allocate(owner, wanted.least, wanted.most).await?;
        let mut inner = self.inner();
        let entry = inner.pool_mut(pool)?;
        entry.refresh(&devices);
        let known = |segment: DataSegment| {
            let place =
                entry.on_shards(segment.place).expect("segments come from devices that the shards know");
            DataSegment { place, ..segment }
        };
        Ok(segments.into_iter().map(known).collect())
    }

    /// Gives segments back that no cache uses.
    pub(in crate::daemon::manager) async fn give_back(&self, pool: &str, segments: &[Segment]) {
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

    /// Notes how a pool's devices are after an operation.
    pub(in crate::daemon::manager) fn refresh(&self, pool: &str, devices: &[DeviceInfo]) {
        if let Ok(entry) = self.inner().pool_mut(pool) {
            entry.refresh(devices);
        }
    }
}

impl PoolEntry {
    /// Takes over figures.
    pub(in crate::daemon::manager) fn refresh(&mut self, devices: &[DeviceInfo]) {
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

    /// Free segments on devices of this host that give them.
    pub(in crate::daemon::manager) fn free_segments(&self) -> u64 {
        let here = self.usable().filter(|device| device.peer.is_none());
        here.filter(|device| device.gives_segments()).map(|device| device.free_segments).sum()
    }

    /// Segments on devices of this host that caches can use.
    pub(in crate::daemon::manager) fn segments(&self) -> u64 {
        self.usable().filter(|device| device.peer.is_none()).map(|device| device.segments).sum()
    }

    fn usable(&self) -> impl Iterator<Item = &DeviceEntry> {
        self.devices
            .iter()
            .filter(|device| matches!(device.state, DeviceState::Online | DeviceState::Stalled))
    }

    /// Devices that were opted out.
    pub(in crate::daemon::manager) fn chosen_out(&self) -> impl Iterator<Item = &DeviceEntry> {
        self.devices.iter().filter(|device| device.admission == Admission::Out)
    }

    /// What the pool is to be told of a device that it calls so.
    pub(in crate::daemon::manager) fn admission(&self, id: DeviceId) -> pool::Admission {
        let mut mine = self.devices.iter().filter(|device| device.ids.is_some_and(|ids| ids.in_pool == id));
        let gives = mine.any(DeviceEntry::gives_segments);
        if gives { pool::Admission::In } else { pool::Admission::Out }
    }

    pub(in crate::daemon::manager) fn by_shard_id(&mut self, id: DeviceId) -> Option<&mut DeviceEntry> {
        self.devices.iter_mut().find(|device| device.ids.is_some_and(|ids| ids.on_shards == id))
    }

    /// As the shards call it; none if they do not know its device.
    pub(in crate::daemon::manager) fn on_shards(&self, segment: Segment) -> Option<Segment> {
        let mut ids = self.devices.iter().filter_map(|device| device.ids);
        let device = ids.find(|ids| ids.in_pool == segment.device)?.on_shards;
        Some(Segment { device, ..segment })
    }

    /// As the pool calls them. Those of devices that have left are left out.
    pub(in crate::daemon::manager) fn in_pool(&self, segments: &[Segment]) -> Vec<Segment> {
        let translate = |segment: &Segment| {
            let mut ids = self.devices.iter().filter_map(|device| device.ids);
            let device = ids.find(|ids| ids.on_shards == segment.device)?.in_pool;
            Some(Segment { device, ..*segment })
        };
        segments.iter().filter_map(translate).collect()
    }
}

impl Inner {
    /// An id for the shards that no device has had.
    pub(in crate::daemon::manager) fn new_device_id(&mut self) -> Result<DeviceId, ApiError> {
        let id = DeviceId(self.next_device);
        self.next_device = self
            .next_device
            .checked_add(1)
            .ok_or_else(|| ApiError::failed("65 535 devices have come and gone; restart the daemon"))?;
        Ok(id)
    }

    /// Notes that a segment is used no more but cannot be given away, as its device is fenced.
    pub(in crate::daemon::manager) fn note_lost(&mut self, segment: Segment) {
        if let Some((_, device)) = self.device_on_shards(segment.device) {
            device.lost.push(segment);
        }
    }

    /// The pool and the device that the shards call so.
    pub(in crate::daemon::manager) fn device_on_shards(
        &mut self,
        id: DeviceId,
    ) -> Option<(String, &mut DeviceEntry)> {
        self.pools
            .iter_mut()
            .find_map(|(name, pool)| pool.by_shard_id(id).map(|device| (name.clone(), device)))
    }
}

impl DeviceEntry {
    /// A device that is open.
    pub(in crate::daemon::manager) fn online(
        info: &DeviceInfo,
        on_shards: DeviceId,
        admission: Admission,
    ) -> DeviceEntry {
        DeviceEntry {
            path: info.path.clone(),
            ids: Some(DeviceIds { in_pool: info.id, on_shards }),
            state: DeviceState::Online,
            reason: None,
            admission,
            segments: info.segments,
            free_segments: info.free_segments,
            access: info.access,
            uuid: Some(info.uuid.to_string()),
            peer: None,
            lost: Vec::new(),
            stalls: Stalls::default(),
        }
    }

    /// A device that is not.
    pub(in crate::daemon::manager) fn offline(
        path: PathBuf,
        reason: String,
        admission: Admission,
    ) -> DeviceEntry {
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
            peer: None,
            lost: Vec::new(),
            stalls: Stalls::default(),
        }
    }

    /// May caches have new segments of it, as soon as it is open?
    pub(in crate::daemon::manager) fn gives_segments(&self) -> bool {
        self.admission == Admission::In && self.state != DeviceState::Fenced
    }
}
