//! Persistent caches on devices that a command is about to overwrite, and their dirty data. Reading
//! changes nothing on the devices.

use std::io;
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};

use hob_engine::units::SECTOR_BYTES;

use super::device::{Device, OpenDevice};
use super::error::PoolError;
use super::recovery::{Found, Recovery};
use super::{OwnerId, Pool};

/// A persistent cache on devices of a pool.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ForeignCache {
    /// Name of the pool; a path if the device's superblock or segment table is damaged.
    pub pool: String,
    /// Owner of the cache; `None` if the device's superblock or segment table is damaged.
    pub owner: Option<OwnerId>,
    /// Dirty data in bytes; `None` if the journal is damaged, or may be on another device.
    pub dirty_bytes: Option<u64>,
}

/// Returns the persistent caches that devices hold. Devices that do not exist, are in use or belong
/// to no pool hold none.
pub fn caches_on(paths: &[PathBuf]) -> Vec<ForeignCache> {
    let mut caches = Vec::new();
    let mut pools: Vec<Pool> = Vec::new();
    for path in paths {
        match load(path) {
            Ok(Some(device)) => add(device, &mut pools),
            Ok(None) => {}
            Err(PoolError::Damaged { .. } | PoolError::Newer { .. }) => {
                let pool = path.display().to_string();
                caches.push(ForeignCache { pool, owner: None, dirty_bytes: None });
            }
            Err(error) => tracing::debug!(%error, "cannot look for caches on a device"),
        }
    }
    for pool in &pools {
        let of_pool = |owner| ForeignCache {
            pool: pool.name.clone(),
            owner: Some(owner),
            dirty_bytes: dirty_bytes(pool, owner),
        };
        caches.extend(pool.owners().into_iter().map(of_pool));
    }
    caches
}

/// Opens a device; `None` if it does not exist or is on another host.
fn load(path: &Path) -> Result<Option<Device>, PoolError> {
    match std::fs::metadata(path) {
        Ok(found) if found.file_type().is_socket() => Ok(None),
        Ok(_) => OpenDevice::open(path).and_then(Device::load).map(Some),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(source) => Err(PoolError::System { path: path.into(), action: "open it", source }),
    }
}

fn add(device: Device, pools: &mut Vec<Pool>) {
    let (uuid, next_ordinal) = (device.superblock.pool_uuid, device.superblock.next_ordinal);
    if let Some(pool) = pools.iter_mut().find(|pool| pool.uuid == uuid) {
        pool.next_ordinal = pool.next_ordinal.max(next_ordinal);
        pool.devices.push(device);
        return;
    }
    pools.push(Pool {
        name: device.superblock.name.clone(),
        uuid,
        segment_bytes: device.superblock.segment_bytes,
        next_ordinal,
        devices: vec![device],
        turn: 0,
    });
}

fn dirty_bytes(pool: &Pool, owner: OwnerId) -> Option<u64> {
    // The pool counts as incomplete here even if its missing device was removed from the pool
    // earlier. So this check can refuse a harmless change.
    let is_whole = pool.devices.len() == usize::from(pool.next_ordinal);
    match Recovery::of(pool, owner).ok()?.run(|_, _| (), |_| ()) {
        Ok(Found::Recovered(recovered, _)) => Some(recovered.summary.sectors_dirty * SECTOR_BYTES),
        Ok(Found::Nothing(_)) if is_whole => Some(0),
        _ => None,
    }
}
