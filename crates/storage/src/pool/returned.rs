//! Takes a device of a pool into use again after the device has failed and returned
//! (docs/decisions/0073).
//!
//! The content of the device is older than the caches, which continued without the device. So the
//! device is formatted, and gets a new id and a new UUID.

use std::collections::HashSet;
use std::path::Path;

use hob_engine::command::Segment;
use hob_engine::units::DeviceId;

use super::device::OpenDevice;
use super::format::{Entry, Superblock};
use super::segments::segment_at;
use super::{Pool, PoolError};

impl Pool {
    /// Closes a device that has failed, and leaves its content unchanged. `lost` are segments that
    /// their caches do not use any more.
    ///
    /// # Errors
    /// Returns `DeviceBusy` if other segments of the device are in use, or `NoSuchDevice`.
    pub fn close_failed(&mut self, id: DeviceId, lost: &[Segment]) -> Result<(), PoolError> {
        let at = self.position(id)?;
        let device = &self.devices[at];
        let lost: HashSet<&Segment> = lost.iter().collect();
        let entries = device.table.entries().iter().enumerate();
        let taken = entries.filter(|(_, entry)| **entry != Entry::Free);
        let used = taken.filter(|(index, _)| !lost.contains(&segment_at(device, *index)));
        let segments = used.count() as u64;
        if segments > 0 {
            return Err(PoolError::DeviceBusy { device: id, segments });
        }
        self.devices.remove(at);
        Ok(())
    }

    /// Formats a device that the pool has closed, and adds the device to the pool again. `uuid` is
    /// the former UUID of the device.
    ///
    /// # Errors
    /// Returns `Unworkable` if another device is at `path`, or if the size of the device has
    /// changed; otherwise a [`PoolError`] like [`Pool::add_device`].
    pub fn add_returned(&mut self, path: &Path, uuid: &str) -> Result<DeviceId, PoolError> {
        let (open, superblock) = open_former(path, uuid)?;
        self.check_sibling(&superblock, path)?;
        open.reserve()?;
        self.add_open_device(open)
    }

    /// Opens a pool with only this device, like [`Pool::add_returned`]. The pool keeps its name and
    /// its UUID. `device_ids` is the number of device ids that the pool has given out as far as the
    /// caller knows. The device does not know the ids that were given out while it was away.
    ///
    /// # Errors
    /// Returns the same errors as [`Pool::add_returned`].
    pub fn of_returned(path: &Path, uuid: &str, device_ids: u16) -> Result<Pool, PoolError> {
        let (open, superblock) = open_former(path, uuid)?;
        let mut pool = Pool {
            name: superblock.name,
            uuid: superblock.pool_uuid,
            segment_bytes: superblock.segment_bytes,
            next_ordinal: superblock.next_ordinal.max(device_ids),
            devices: Vec::new(),
            turn: 0,
        };
        open.reserve()?;
        pool.add_open_device(open)?;
        Ok(pool)
    }
}

/// Opens and locks the device with this former UUID.
fn open_former(path: &Path, uuid: &str) -> Result<(OpenDevice, Superblock), PoolError> {
    let open = OpenDevice::open(path)?;
    let (superblock, _) = open.read_superblock()?;
    let fault = if superblock.device_uuid.to_string() != uuid {
        "is another device than before"
    } else if superblock.device_bytes != open.size_bytes {
        "has another size than before"
    } else {
        // The kernel may report a failed write of the former descriptors once more.
        let _ = open.control.sync_data();
        return Ok((open, superblock));
    };
    Err(PoolError::Unworkable { reason: format!("{} {fault}", path.display()) })
}
