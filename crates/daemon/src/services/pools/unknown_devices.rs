//! Devices of a pool that hob knows under another path, or not at all. hob does not know a device
//! if the saved state was lost, or replaced by a copy from before the device was added to the pool
//! (docs/decisions/0064).

use std::path::{Path, PathBuf};

use hob_control::Admission as Chosen;
use hob_engine::units::DeviceId;

use super::Pools;
use crate::api_error::{ApiError, Result};
use crate::services::registry::{DeviceEntry, Inner, PoolEntry};

/// Reason why a device that is listed without its path is offline.
pub(super) const UNKNOWN_REASON: &str = "hob's state does not know this device of the pool, which may have dirty data; \
     'hob pool add-device' connects it, and 'hob pool remove-device' removes it from the pool";

/// Prefix of the path with which hob lists a device of the pool that the saved state does not know.
/// The device's id follows. The real path of the device is unknown.
const UNKNOWN_DEVICE: &str = "/unknown-device-";

/// Returns the id of a device that is listed in the pool without its path.
pub(super) fn unknown_device(path: &Path) -> Option<DeviceId> {
    path.to_str()?.strip_prefix(UNKNOWN_DEVICE)?.parse().ok().map(DeviceId)
}

impl Pools {
    /// Saves that the pool gives out one more device id, before the pool does so. So if hob crashes
    /// after it has added the device, the device does not count as unknown at the next start: no
    /// cache has used it.
    pub(super) async fn note_next_device(&self, pool: &str) -> Result<()> {
        let flash = self.registry.inner().pool(pool)?.flash.clone();
        let next = flash.device_ids().await? + 1;
        {
            let mut inner = self.registry.inner();
            let entry = inner.pool_mut(pool)?;
            entry.device_ids = entry.device_ids.max(next);
        }
        self.registry.save_first().await
    }

    /// Saves the number of device ids that the pool has given out, after no device was added.
    pub(super) async fn forget_next_device(&self, pool: &str) -> Result<()> {
        let flash = self.registry.inner().pool(pool)?.flash.clone();
        let ids = flash.device_ids().await?;
        self.registry.inner().pool_mut(pool)?.device_ids = ids;
        self.registry.save().await
    }

    /// Connects a device of the pool that hob knows under another path, or that hob
    /// does not know. Returns false if the pool lacks no device, or if this device does not belong
    /// to the pool.
    pub(super) async fn connect_known_device(&self, pool: &str, path: &Path) -> Result<bool> {
        let (flash, uuid, missing) = {
            let inner = self.registry.inner();
            let entry = inner.pool(pool)?;
            let missing = entry.devices.iter().filter(|it| it.ids.is_none() && it.peer.is_none());
            let missing: Vec<PathBuf> = missing.map(|device| device.path.clone()).collect();
            (entry.flash.clone(), entry.uuid.clone(), missing)
        };
        if missing.is_empty() || uuid.is_none() {
            return Ok(false);
        }
        let Ok(devices) = flash.open_late(path.to_owned(), uuid).await else { return Ok(false) };
        let Some(info) = devices.iter().find(|device| device.path == path) else { return Ok(false) };
        let connected = match self.rename_device(pool, &missing, info.id, path) {
            Ok(chosen) => {
                self.release_ended_on(pool, info.id).await;
                self.connect_device(pool, info, chosen).await
            }
            Err(error) => Err(error),
        };
        if let Err(error) = connected {
            self.close_device(pool, info.id).await;
            return Err(error);
        }
        self.note_returned(pool, info.id);
        let ids = flash.device_ids().await?;
        let mut inner = self.registry.inner();
        let entry = inner.pool_mut(pool)?;
        entry.note_device_ids(pool, ids);
        Ok(true)
    }

    /// Gives the entry of a missing device its new path, and returns its configured allocation. An
    /// entry that lists a device without its path is not changed: hob removes this entry when it
    /// connects the device.
    fn rename_device(&self, pool: &str, missing: &[PathBuf], id: DeviceId, path: &Path) -> Result<Chosen> {
        let (unknown, known): (Vec<&PathBuf>, Vec<&PathBuf>) =
            missing.iter().partition(|path| unknown_device(path).is_some());
        if unknown.iter().any(|path| unknown_device(path) == Some(id)) {
            return Ok(Chosen::In);
        }
        let mut inner = self.registry.inner();
        let entry = inner.pool_mut(pool)?;
        let is_open = |id: &u16| {
            entry.devices.iter().filter_map(|device| device.ids).any(|ids| ids.in_pool == DeviceId(*id))
        };
        let absent: Vec<u16> = (0..entry.device_ids).filter(|id| !is_open(id)).collect();
        match known[..] {
            // The entry of a device without a path may have another id if the state was lost.
            [] => Ok(Chosen::In),
            // No device was removed from the pool, so this is the missing one.
            [before] if absent == [id.0] => {
                let Some(device) = entry.devices.iter_mut().find(|device| device.path == *before) else {
                    return Ok(Chosen::In);
                };
                device.path = path.to_owned();
                tracing::info!("pool {pool}: {} is {} now", before.display(), path.display());
                Ok(device.admission)
            }
            _ => {
                let names: Vec<String> = known.iter().map(|path| path.display().to_string()).collect();
                let names = names.join(", ");
                let why = format!(
                    "the device belongs to pool {pool}, but hob cannot tell whether it is {names} or was removed \
                     from the pool before"
                );
                Err(ApiError::conflict(why).hint(
                    "give it its former path again, for example with a symbolic link, or pass --force to overwrite it",
                ))
            }
        }
    }
}

impl Inner {
    /// Returns a pool with devices that the saved state does not know, and these devices. The saved
    /// state is then older than the pool, so a cache in this state may not be the newest cache of
    /// its disk.
    pub(in crate::services) fn unknown_devices(&self) -> Option<(String, String)> {
        let unknown = |entry: &PoolEntry| {
            let devices = entry.devices.iter().map(|device| &device.path);
            let unknown = devices.filter(|path| unknown_device(path).is_some());
            unknown.map(|path| path.display().to_string()).collect::<Vec<_>>().join(", ")
        };
        let mut pools = self.pools.iter().map(|(pool, entry)| (pool.clone(), unknown(entry)));
        pools.find(|(_, devices)| !devices.is_empty())
    }
}

impl PoolEntry {
    /// Lists as missing the devices that the pool got after the state was saved. `ids` is the
    /// number of device ids that the pool has given out.
    pub(super) fn note_device_ids(&mut self, pool: &str, ids: u16) {
        let is_open = |id: &u16| {
            self.devices.iter().filter_map(|device| device.ids).any(|ids| ids.in_pool == DeviceId(*id))
        };
        let mut unknown: Vec<u16> = (self.device_ids..ids).filter(|id| !is_open(id)).collect();
        if self.device_ids == 0 {
            // Without a saved state, the ids of missing devices are unknown.
            let offline = self.devices.iter().filter(|device| device.ids.is_none()).count();
            unknown.drain(..offline.min(unknown.len()));
        }
        for id in unknown {
            let path = PathBuf::from(format!("{UNKNOWN_DEVICE}{id}"));
            tracing::error!(
                "pool {pool} has a device that hob's state does not know, listed as {}: connect it with 'hob pool \
                 add-device {pool} PATH', or remove it from the pool with 'hob pool remove-device \
                 {pool} {}'",
                path.display(),
                path.display()
            );
            self.devices.push(DeviceEntry::offline(path, UNKNOWN_REASON.to_owned(), Chosen::In));
        }
        self.device_ids = self.device_ids.max(ids);
    }
}
