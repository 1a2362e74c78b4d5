//! Takes a device of a pool into use again after the device has failed and returned
//! (docs/decisions/0073).
//!
//! The content of the device is older than the caches, which continued without the device. So the
//! device is formatted, and gets a new id and a new UUID.

use std::collections::HashSet;
use std::ops::RangeInclusive;
use std::path::Path;

use hob_engine::command::Segment;
use hob_engine::units::DeviceId;

use super::device::{Device, OpenDevice};
use super::format::{Entry, Superblock};
use super::segments::segment_at;
use super::{Pool, PoolError, Uuid};

/// The superblock that this process wrote last to a device that has failed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FormerSuperblock {
    device_uuid: Uuid,
    /// Generations of the last superblock that was written, and of the last one that hob tried to
    /// write.
    generations: RangeInclusive<u64>,
}

impl FormerSuperblock {
    fn of(device: &Device) -> FormerSuperblock {
        let superblock = &device.superblock;
        FormerSuperblock {
            device_uuid: superblock.device_uuid,
            generations: superblock.generation..=device.generation_tried,
        }
    }

    /// Returns why a device of this size with the superblock `found` is not as this process left
    /// it; `None` if it is.
    pub(super) fn difference(&self, found: &Superblock, size_bytes: u64) -> Option<&'static str> {
        if found.device_uuid != self.device_uuid {
            Some("is another device than before")
        } else if found.device_bytes != size_bytes {
            Some("has another size than before")
        } else if !self.generations.contains(&found.generation) {
            Some("has another superblock than this host has written, so another host may use it")
        } else {
            None
        }
    }
}

impl Pool {
    /// Returns the superblock that this process wrote last to a device.
    ///
    /// # Errors
    /// Returns `NoSuchDevice`.
    pub fn former_superblock(&self, id: DeviceId) -> Result<FormerSuperblock, PoolError> {
        Ok(FormerSuperblock::of(&self.devices[self.position(id)?]))
    }

    /// Closes a device that has failed, and leaves its content unchanged. `lost` are segments that
    /// their caches do not use any more. Returns the device's last superblock.
    ///
    /// # Errors
    /// Returns `DeviceBusy` if other segments of the device are in use, or `NoSuchDevice`.
    pub fn close_failed(&mut self, id: DeviceId, lost: &[Segment]) -> Result<FormerSuperblock, PoolError> {
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
        Ok(FormerSuperblock::of(&self.devices.remove(at)))
    }

    /// Formats a device that the pool has closed, and adds the device to the pool again.
    ///
    /// # Errors
    /// Returns `Unworkable` if another device is at `path`, or if the size or the superblock of the
    /// device has changed; otherwise a [`PoolError`] like [`Pool::add_device`].
    pub fn add_returned(&mut self, path: &Path, former: &FormerSuperblock) -> Result<DeviceId, PoolError> {
        let (open, superblock) = open_former(path, former)?;
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
    pub fn of_returned(path: &Path, former: &FormerSuperblock, device_ids: u16) -> Result<Pool, PoolError> {
        let (open, superblock) = open_former(path, former)?;
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

/// Opens and locks a device that still has its former superblock.
fn open_former(path: &Path, former: &FormerSuperblock) -> Result<(OpenDevice, Superblock), PoolError> {
    let open = OpenDevice::open(path)?;
    let superblock = compare(&open, former)?;
    // The kernel may report a failed write of the former descriptors once more.
    let _ = open.control.sync_data();
    Ok((open, superblock))
}

/// Returns the superblock of a device if it is the former one.
fn compare(open: &OpenDevice, former: &FormerSuperblock) -> Result<Superblock, PoolError> {
    // The page cache may have old pages while another program has the block device open, also after
    // another host has written to the device.
    let (superblock, _) = open.read_superblock_directly()?;
    match former.difference(&superblock, open.size_bytes) {
        Some(difference) => {
            Err(PoolError::Unworkable { reason: format!("{} {difference}", open.path.display()) })
        }
        None => Ok(superblock),
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Admission, DeviceSpec, Overwrite, SEGMENT_BYTES_MIN, device_bytes_for};
    use super::*;

    /// The two descriptors of a device are those of different files, as if the page cache had old
    /// pages.
    #[test]
    fn the_last_comparison_does_not_use_the_page_cache() {
        let dir = tempfile::tempdir_in("/var/tmp").unwrap();
        let [cached, present] = ["cached", "present"].map(|name| dir.path().join(name));
        let size_bytes = Some(device_bytes_for(SEGMENT_BYTES_MIN, SEGMENT_BYTES_MIN));
        let spec = DeviceSpec { path: cached.clone(), size_bytes };
        let pool = Pool::create("p", &[spec], SEGMENT_BYTES_MIN, Overwrite::Refuse).unwrap();
        let former = pool.former_superblock(DeviceId(0)).unwrap();
        drop(pool);
        std::fs::copy(&cached, &present).unwrap();
        let mut other = Pool::open(std::slice::from_ref(&present)).unwrap();
        other.set_admission(DeviceId(0), Admission::Out).unwrap();
        drop(other);
        let mut open = OpenDevice::open(&cached).unwrap();
        compare(&open, &former).unwrap();
        open.data = OpenDevice::open(&present).unwrap().data;
        let error = compare(&open, &former).unwrap_err().to_string();
        assert!(error.contains("another host may use it"), "{error}");
    }
}
