//! The pool: the flash devices of this host, cut into segments that caches own.
//!
//! A pool belongs to a control thread. Its calls read and write devices and wait for them, which is
//! rare: caches come, go and change size. Shards get descriptors of their own ([`Pool::file`])
//! and do cache I/O without it. The bytes on the devices are specified in `docs/FORMAT.md`.
//!
//! # Rules
//! * A segment has one owner; who owns it is on its device before [`Pool::allocate`] returns.
//! * Segments of volatile caches are free when a pool is opened: their contents died with the index.
//! * A device with somebody else's data on it is refused, unless told otherwise.
//! * All devices of a pool have segments of one size. A device's id is its ordinal and stays for
//!   as long as it belongs to the pool.

mod device;
mod error;
mod format;
mod table;

#[cfg(test)]
mod tests;

use std::os::fd::OwnedFd;
use std::path::PathBuf;

use hob_engine::command::Segment;
use hob_engine::units::DeviceId;

pub(crate) use device::is_memory_filesystem;
use device::{Device, OpenDevice};
pub use device::{DeviceSpec, Overwrite};
pub use error::PoolError;
use format::{Entry, Superblock, SuperblockFlags};
pub use format::{FORMAT_VERSION, OwnerId, Uuid, device_bytes_for};

use crate::ring::FdClass;

/// Size of segments when nobody says otherwise, bytes.
pub const SEGMENT_BYTES_DEFAULT: u64 = 16 << 20;

/// Smallest segment, bytes: a cache block must fit.
pub const SEGMENT_BYTES_MIN: u64 = 1 << 20;

/// Largest segment, bytes.
pub const SEGMENT_BYTES_MAX: u64 = 1 << 30;

/// A device's descriptor for a shard; see [`Flash::attach`](crate::flash::Flash::attach).
#[derive(Debug)]
pub struct FlashFile {
    /// Open for reading and writing.
    pub file: OwnedFd,
    /// How the ring should treat it.
    pub class: FdClass,
}

/// Do a segment's contents outlive the daemon?
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Lifetime {
    /// No: it is free when the pool is opened.
    Volatile,
    /// Yes: it stays its owner's.
    Persistent,
}

/// Does a device get new segments?
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Admission {
    /// Yes.
    In,
    /// No; segments in use stay.
    Out,
}

/// A device as others may see it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceInfo {
    /// Its id.
    pub id: DeviceId,
    /// Where it is.
    pub path: PathBuf,
    /// Its own name, from its superblock.
    pub uuid: Uuid,
    /// Bytes of the file or block device.
    pub size_bytes: u64,
    /// Segments it has.
    pub segments: u64,
    /// Segments without owner.
    pub free_segments: u64,
    /// Does it get new ones?
    pub admission: Admission,
    /// How it is accessed: `direct`, `buffered` or `memory`.
    pub access: &'static str,
}

/// The flash devices of this host.
#[derive(Debug)]
pub struct Pool {
    name: String,
    uuid: Uuid,
    segment_bytes: u64,
    next_ordinal: u16,
    devices: Vec<Device>,
    /// Which device gets the next segment.
    turn: usize,
}

impl Pool {
    /// Makes a pool of `devices`. Files that do not exist are created.
    ///
    /// # Errors
    /// [`PoolError`]; files made on the way are removed again.
    pub fn create(
        name: &str,
        devices: &[DeviceSpec],
        segment_bytes: u64,
        overwrite: Overwrite,
    ) -> Result<Pool, PoolError> {
        let reason = if name.is_empty() || name.len() > format::NAME_BYTES_MAX {
            Some(format!("a pool's name has 1 to {} bytes", format::NAME_BYTES_MAX))
        } else if !format::is_segment_size(segment_bytes) {
            Some(format!("a segment is a power of two from 1 MiB to 1 GiB, not {segment_bytes} bytes"))
        } else if devices.is_empty() {
            Some("a pool needs at least one device".to_owned())
        } else {
            None
        };
        if let Some(reason) = reason {
            return Err(PoolError::Unworkable { reason });
        }
        let mut pool = Pool {
            name: name.to_owned(),
            uuid: new_uuid(),
            segment_bytes,
            next_ordinal: 0,
            devices: Vec::new(),
            turn: 0,
        };
        for device in devices {
            if let Err(error) = pool.add_device(device, overwrite) {
                for made in &pool.devices {
                    let _ = made.open.wipe();
                    made.open.made().map(std::fs::remove_file);
                }
                return Err(error);
            }
        }
        Ok(pool)
    }

    /// Opens a pool with the devices at `paths`: all those that can be had, at least one. Segments of
    /// volatile caches become free.
    ///
    /// # Errors
    /// [`PoolError`], when any of the devices is not of this pool, or not usable.
    pub fn open(paths: &[PathBuf]) -> Result<Pool, PoolError> {
        let mut pool: Option<Pool> = None;
        for path in paths {
            let mut device = Device::load(OpenDevice::open(path)?)?;
            let superblock = &device.superblock;
            let pool = pool.get_or_insert_with(|| Pool {
                name: superblock.name.clone(),
                uuid: superblock.pool_uuid,
                segment_bytes: superblock.segment_bytes,
                next_ordinal: 0,
                devices: Vec::new(),
                turn: 0,
            });
            if superblock.pool_uuid != pool.uuid || superblock.segment_bytes != pool.segment_bytes {
                return Err(PoolError::OtherPool {
                    path: path.clone(),
                    found: format!("{} ({})", superblock.name, superblock.pool_uuid),
                    expected: format!("{} ({})", pool.name, pool.uuid),
                });
            }
            if pool.devices.iter().any(|other| other.superblock.ordinal == superblock.ordinal) {
                let reason =
                    format!("{} is a copy of another device of the pool; leave one out", path.display());
                return Err(PoolError::Unworkable { reason });
            }
            pool.next_ordinal = pool.next_ordinal.max(superblock.next_ordinal);
            for segment in 0..device.table.entries().len() {
                if let Entry::Owned { lifetime: Lifetime::Volatile, .. } = device.table.entries()[segment] {
                    device.table.set(segment, Entry::Free);
                }
            }
            device.store_table()?;
            pool.devices.push(device);
        }
        pool.ok_or_else(|| PoolError::Unworkable { reason: "a pool is opened by naming its devices".into() })
    }

    /// Takes a device into the pool. The file is created when there is none.
    ///
    /// # Errors
    /// [`PoolError`]; a file made on the way is removed again.
    pub fn add_device(&mut self, spec: &DeviceSpec, overwrite: Overwrite) -> Result<DeviceId, PoolError> {
        let open = OpenDevice::create(spec)?;
        let path = open.made();
        let added = self.add_open_device(open, overwrite);
        if let (Err(_), Some(path)) = (&added, path) {
            let _ = std::fs::remove_file(path);
        }
        added
    }

    fn add_open_device(&mut self, open: OpenDevice, overwrite: Overwrite) -> Result<DeviceId, PoolError> {
        let Some(layout) = format::Layout::fitting(open.size_bytes, self.segment_bytes) else {
            let needed = device_bytes_for(self.segment_bytes, self.segment_bytes);
            return Err(PoolError::TooSmall { path: open.path.clone(), bytes: open.size_bytes, needed });
        };
        if overwrite == Overwrite::Refuse {
            open.refuse_foreign()?;
        }
        let ordinal = self.next_ordinal;
        let Some(next_ordinal) = ordinal.checked_add(1) else {
            let reason = "a pool can be given 65 535 devices in its life; make a new pool".to_owned();
            return Err(PoolError::Unworkable { reason });
        };
        let superblock = Superblock {
            generation: 0,
            pool_uuid: self.uuid,
            device_uuid: new_uuid(),
            ordinal,
            next_ordinal,
            flags: SuperblockFlags::default(),
            device_bytes: open.size_bytes,
            segment_bytes: self.segment_bytes,
            layout,
            name: self.name.clone(),
        };
        // The others learn first which ordinal is taken: a crash here wastes a number, no more.
        for device in &mut self.devices {
            device.superblock.next_ordinal = next_ordinal;
            if let Err(error) = device.store_superblock() {
                tracing::warn!(%error, "a device of the pool did not learn of its new sibling");
            }
        }
        self.next_ordinal = next_ordinal;
        self.devices.push(Device::format(open, superblock)?);
        Ok(DeviceId(ordinal))
    }

    /// Takes a device without segments in use out of the pool and wipes its superblock.
    ///
    /// # Errors
    /// `DeviceBusy`, `NoSuchDevice`. A device that cannot even be wiped is taken out all the same.
    pub fn remove_device(&mut self, id: DeviceId) -> Result<(), PoolError> {
        let at = self.position(id)?;
        let table = &self.devices[at].table;
        let segments = table.entries().len() as u64 - table.free();
        if segments > 0 {
            return Err(PoolError::DeviceBusy { device: id, segments });
        }
        let device = self.devices.remove(at);
        if let Err(error) = device.open.wipe() {
            tracing::warn!(%error, "the removed device still carries its old superblock");
        }
        Ok(())
    }

    /// Lets a device have new segments, or no more of them.
    ///
    /// # Errors
    /// `NoSuchDevice`, or the device's own.
    pub fn set_admission(&mut self, id: DeviceId, admission: Admission) -> Result<(), PoolError> {
        let at = self.position(id)?;
        let device = &mut self.devices[at];
        let old = device.superblock.flags;
        device.superblock.flags = match admission {
            Admission::In => SuperblockFlags(old.0 & !SuperblockFlags::OUT.0),
            Admission::Out => SuperblockFlags(old.0 | SuperblockFlags::OUT.0),
        };
        device.store_superblock().inspect_err(|_| device.superblock.flags = old)
    }

    /// Gives `count` free segments to `owner`, from all devices that are in, in turn.
    ///
    /// # Errors
    /// `Full`, or a device's own.
    pub fn allocate(
        &mut self,
        owner: OwnerId,
        lifetime: Lifetime,
        count: u64,
    ) -> Result<Vec<Segment>, PoolError> {
        let free = self.free_segments();
        if count > free {
            return Err(PoolError::Full { wanted: count, free });
        }
        let first = self.segments_of(owner).len() as u32;
        let mut segments = Vec::with_capacity(count as usize);
        for ordinal in (first..).take(count as usize) {
            let device = self.next_device();
            let segment = device.table.find_free().expect("the device has a free segment");
            device.table.set(segment, Entry::Owned { owner, ordinal, lifetime });
            segments.push(segment_at(device, segment));
        }
        if let Err(error) = self.store_tables() {
            // What was not written is free again; what was is freed as soon as its device lets us.
            let _ = self.release(&segments);
            return Err(error);
        }
        Ok(segments)
    }

    fn next_device(&mut self) -> &mut Device {
        let count = self.devices.len();
        let start = self.turn;
        let usable = |at: &usize| admits(&self.devices[*at]) && self.devices[*at].table.free() > 0;
        let at = (start..start + count).map(|at| at % count).find(usable).expect("there are free segments");
        self.turn = at + 1;
        &mut self.devices[at]
    }

    fn store_tables(&mut self) -> Result<(), PoolError> {
        self.devices.iter_mut().try_for_each(Device::store_table)
    }

    /// Takes segments back. Segments of devices that are gone are ignored.
    ///
    /// # Errors
    /// A device's own; the segments count as free nevertheless.
    ///
    /// # Panics
    /// If one of them is free already or no segment at all.
    pub fn release(&mut self, segments: &[Segment]) -> Result<(), PoolError> {
        for segment in segments {
            let Ok(at) = self.position(segment.device) else { continue };
            let device = &mut self.devices[at];
            let layout = device.superblock.layout;
            let distance =
                segment.offset.checked_sub(layout.data_offset).expect("segments lie behind the table");
            assert!(distance.is_multiple_of(self.segment_bytes), "{segment:?} is where no segment starts");
            let index = (distance / self.segment_bytes) as usize;
            assert!(device.table.entries()[index] != Entry::Free, "{segment:?} is free already");
            device.table.set(index, Entry::Free);
        }
        // Every device is tried, the first error is told.
        self.devices.iter_mut().map(Device::store_table).fold(Ok(()), Result::and)
    }

    /// The segments of one owner, in its order.
    pub fn segments_of(&self, owner: OwnerId) -> Vec<Segment> {
        let mut found = Vec::new();
        for device in &self.devices {
            for (index, entry) in device.table.entries().iter().enumerate() {
                match entry {
                    Entry::Owned { owner: other, ordinal, .. } if *other == owner => {
                        found.push((*ordinal, segment_at(device, index)));
                    }
                    _ => {}
                }
            }
        }
        found.sort_unstable_by_key(|(ordinal, _)| *ordinal);
        found.into_iter().map(|(_, segment)| segment).collect()
    }

    /// Free segments on devices that are in.
    pub fn free_segments(&self) -> u64 {
        self.devices.iter().filter(|device| admits(device)).map(|device| device.table.free()).sum()
    }

    /// The pool's name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The pool's UUID.
    pub fn uuid(&self) -> Uuid {
        self.uuid
    }

    /// Bytes of every segment.
    pub fn segment_bytes(&self) -> u64 {
        self.segment_bytes
    }

    /// The devices, by id.
    pub fn devices(&self) -> Vec<DeviceInfo> {
        let info = |device: &Device| DeviceInfo {
            id: DeviceId(device.superblock.ordinal),
            path: device.open.path.clone(),
            uuid: device.superblock.device_uuid,
            size_bytes: device.open.size_bytes,
            segments: device.superblock.layout.segments,
            free_segments: device.table.free(),
            admission: if admits(device) { Admission::In } else { Admission::Out },
            access: device.open.access,
        };
        let mut devices: Vec<DeviceInfo> = self.devices.iter().map(info).collect();
        devices.sort_by_key(|device| device.id);
        devices
    }

    /// A descriptor of a device, for a shard.
    ///
    /// # Errors
    /// `NoSuchDevice`, or the system's when there are no descriptors left.
    pub fn file(&self, id: DeviceId) -> Result<FlashFile, PoolError> {
        let device = &self.devices[self.position(id)?];
        let file = device.clone_data().map_err(|e| device.open.system("open it once more", e))?;
        Ok(FlashFile { file, class: device.open.class })
    }

    fn position(&self, id: DeviceId) -> Result<usize, PoolError> {
        let found = self.devices.iter().position(|device| device.superblock.ordinal == id.0);
        found.ok_or(PoolError::NoSuchDevice { device: id })
    }
}

fn admits(device: &Device) -> bool {
    device.superblock.flags.0 & SuperblockFlags::OUT.0 == 0
}

fn segment_at(device: &Device, index: usize) -> Segment {
    let superblock = &device.superblock;
    Segment {
        device: DeviceId(superblock.ordinal),
        offset: superblock.layout.data_offset + index as u64 * superblock.segment_bytes,
    }
}

fn new_uuid() -> Uuid {
    let mut bytes = [0; 16];
    let filled = rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty());
    assert_eq!(filled, Ok(16), "the kernel has random bytes");
    // RFC 9562, version 4.
    bytes[6] = bytes[6] & 0x0F | 0x40;
    bytes[8] = bytes[8] & 0x3F | 0x80;
    Uuid(bytes)
}
