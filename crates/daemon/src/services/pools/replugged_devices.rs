//! Fenced devices that were removed from this host and are back, for example after a cable was
//! connected again.
//!
//! hob uses such a device again without a command, and formats it first: its content is never used.
//! The conditions are that
//!
//! * the path of the device leads to another file or block device than the open one, or to the same
//!   block device that has appeared again. A device that stayed in its place would fail again;
//! * the superblock there is that of the fenced device, so that no other data is overwritten;
//! * no cache, orphan or swap area has a segment on the fenced device any more, and its allocation
//!   was not switched off by command.

use std::path::PathBuf;
use std::time::Duration;

use hob_control::{Admission, DeviceState};
use hob_engine::units::DeviceId;
use hob_storage::Appearance;
use hob_storage::pool::{DeviceSpec, Overwrite, Uuid, appearance_at, superblock_uuid};

use super::Pools;
use crate::api_error::Result;
use crate::services::flash::{blocking, check_devices_answer};
use crate::services::registry::{DeviceEntry, DeviceIds, Inner, REPLUGGING};

/// Maximum time for the answer of the filesystem with the device's path.
const ANSWER_MAX: Duration = Duration::from_secs(5);

/// A fenced device that no cache uses.
#[derive(Clone, Debug)]
struct FencedDevice {
    path: PathBuf,
    ids: DeviceIds,
    uuid: String,
    appearance: Appearance,
}

impl FencedDevice {
    /// Returns the device's UUID if the device was removed from the host and is back.
    fn uuid_if_back(&self) -> Option<Uuid> {
        let now = appearance_at(&self.path, ANSWER_MAX)?;
        if now == self.appearance {
            return None;
        }
        superblock_uuid(&self.path).filter(|uuid| uuid.to_string() == self.uuid)
    }
}

impl Pools {
    /// Returns the pools with fenced devices of this host.
    pub(in crate::services) fn with_fenced(&self) -> Vec<String> {
        let inner = self.registry.inner();
        let is_fenced = |device: &DeviceEntry| device.state == DeviceState::Fenced && device.peer.is_none();
        let pools = inner.pools.iter().filter(|(_, pool)| pool.devices.iter().any(is_fenced));
        pools.map(|(name, _)| name.clone()).collect()
    }

    /// Formats the fenced devices of a pool that are back, and uses them again.
    pub(in crate::services) async fn reuse_replugged(&self, pool: &str) {
        let fenced = self.registry.inner().unused_fenced(pool);
        let mut is_any = false;
        for device in fenced {
            let path = device.path.clone();
            let looked = device.clone();
            let Ok(Some(uuid)) = blocking(move || looked.uuid_if_back()).await else { continue };
            if let Err(error) = check_devices_answer(vec![path.clone()]).await {
                tracing::debug!("pool {pool}: {error}");
                continue;
            }
            let Ok(guard) = self.registry.guard_pool(pool, REPLUGGING) else { continue };
            let is_unused = self.registry.inner().unused_fenced(pool).iter().any(|it| it.ids == device.ids);
            if !is_unused {
                continue;
            }
            match self.format_again(pool, &device, uuid).await {
                Ok(()) => {
                    is_any = true;
                    tracing::info!(
                        "pool {pool}: the fenced device {} was removed from the host and is back; hob has formatted it \
                         and uses it again",
                        path.display()
                    );
                }
                Err(error) => {
                    tracing::warn!(
                        "pool {pool}: {} is back and cannot be used again: {error}",
                        path.display()
                    );
                }
            }
            drop(guard);
        }
        if is_any {
            self.top_up(pool).await;
            if let Err(error) = self.registry.save().await {
                tracing::warn!("pool {pool}: {error}");
            }
        }
    }

    /// Removes a fenced device from the pool, and adds it again as an empty device. The caller holds
    /// the pool's operation guard.
    async fn format_again(&self, pool: &str, device: &FencedDevice, uuid: Uuid) -> Result<()> {
        self.swap.check_none(pool, Some(&device.path))?;
        let flash = self.registry.inner().pool(pool)?.flash.clone();
        for shard in &self.registry.shards {
            shard.remove_device(device.ids.on_shards).await?;
        }
        let lost = {
            let mut inner = self.registry.inner();
            let entry = inner.pool_mut(pool)?;
            let lost = entry.by_shard_id(device.ids.on_shards).map(|it| std::mem::take(&mut it.lost));
            let lost = entry.in_pool(&lost.unwrap_or_default());
            if let Some(it) = entry.by_shard_id(device.ids.on_shards) {
                (it.ids, it.state) = (None, DeviceState::Offline);
                it.reason = Some("it was fenced, and is being formatted".to_owned());
            }
            entry.returned.retain(|id| *id != device.ids.in_pool);
            lost
        };
        flash.remove_device(device.ids.in_pool, lost).await?;
        self.note_next_device(pool).await?;
        let spec = DeviceSpec { path: device.path.clone(), size_bytes: None };
        let added = flash.add_device(spec, Overwrite::Device(uuid)).await;
        if added.is_err() {
            self.forget_next_device(pool).await?;
        }
        let (id, devices) = added?;
        let pool_uuid = flash.uuid().await?;
        self.connect_new_device(pool, id, devices).await?;
        self.registry.inner().pool_mut(pool)?.uuid = pool_uuid;
        Ok(())
    }
}

impl Inner {
    /// Returns the fenced devices of a pool that have no segment in use.
    fn unused_fenced(&self, pool: &str) -> Vec<FencedDevice> {
        let Ok(entry) = self.pool(pool) else { return Vec::new() };
        let is_used = |id: DeviceId| {
            let mut segments =
                self.disks.values().flat_map(|disk| disk.held.iter().chain(&disk.apart).chain(&disk.ring));
            segments.any(|segment| segment.device == id)
        };
        let unused = |device: &DeviceEntry| {
            let free = device.free_segments + device.lost.len() as u64;
            let is_empty = device.segments <= free;
            let ids = device.ids.filter(|ids| is_empty && !is_used(ids.on_shards))?;
            let (path, uuid) = (device.path.clone(), device.uuid.clone()?);
            Some(FencedDevice { path, ids, uuid, appearance: device.appearance? })
        };
        let fenced = entry.devices.iter().filter(|device| {
            let is_local = device.peer.is_none();
            device.state == DeviceState::Fenced && is_local && device.admission == Admission::In
        });
        fenced.filter_map(unused).collect()
    }
}
