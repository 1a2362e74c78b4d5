//! The pool: the flash devices of this host, divided into segments that caches own.
//!
//! A pool belongs to a control thread. The pool's calls read and write devices synchronously. Such
//! calls are rare, for example when a cache is created, removed or resized. Shards have their own
//! descriptors ([`Pool::file`]) and perform cache I/O without the pool. `docs/FORMAT.md` specifies
//! the format of the devices.
//!
//! # Rules
//! * A segment has one owner. The owner is recorded on the device before an `allocate` function
//!   returns.
//! * Segments of volatile caches are free when a pool is opened, because the index of their
//!   contents was lost. Segments of persistent caches and of swap areas belong to their owner until
//!   they are released.
//! * A device with other data is refused, unless overwriting is forced.
//! * All devices of a pool have segments of one size. A device's id is its ordinal, and is constant
//!   while the device belongs to the pool.

mod device;
mod device_check;
mod error;
mod flushes;
mod foreign;
mod format;
mod other_data;
mod reader;
pub mod recovery;
mod remote;
mod returned;
mod segments;
mod swap;
mod table;

#[cfg(test)]
mod tests;

use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

use hob_engine::units::DeviceId;

use device::{Device, OpenDevice};
pub use device::{DeviceSpec, Overwrite, superblock_uuid};
pub use device_check::{check_all_answer, check_answers, check_returned, is_disconnected};
pub use error::PoolError;
pub(crate) use flushes::DeviceFlushes;
pub use foreign::{ForeignCache, caches_on};
use format::{Entry, Features, Kind, Superblock, SuperblockFlags};
pub use format::{FORMAT_VERSION, NAME_BYTES_MAX, OwnerId, Uuid, device_bytes_for, is_segment_size};
pub(crate) use reader::AlignedBuffer;
pub use reader::{SectorCopy, SectorLost, SectorReader};
pub(crate) use remote::RemoteFile;
pub use remote::{REMOTE_EXPORT, RemoteFlash};
pub use returned::FormerSuperblock;
pub use segments::RingOnFlash;
pub use swap::SwapArea;

use crate::filesystem::FileNumber;
use crate::ring::FdClass;

/// Default segment size of large pools in bytes.
pub const SEGMENT_BYTES_DEFAULT: u64 = 16 << 20;

/// Number of segments that a small device should have at least: rings and caches take whole segments.
const SEGMENTS_WANTED: u64 = 64;

/// Returns the default segment size of a pool whose files have `file_bytes` each; `None` for block
/// devices. The size is the largest power of two that is at most a 64th of a file, from
/// [`SEGMENT_BYTES_MIN`] to [`SEGMENT_BYTES_DEFAULT`].
#[must_use]
pub fn default_segment_bytes(file_bytes: Option<u64>) -> u64 {
    let part = file_bytes.map_or(SEGMENT_BYTES_DEFAULT, |bytes| bytes / SEGMENTS_WANTED);
    let power = part.checked_ilog2().map_or(0, |bits| 1 << bits);
    power.clamp(SEGMENT_BYTES_MIN, SEGMENT_BYTES_DEFAULT)
}

/// Minimum segment size in bytes: the largest cache block.
pub const SEGMENT_BYTES_MIN: u64 = 1 << 20;

/// Maximum segment size in bytes.
pub const SEGMENT_BYTES_MAX: u64 = 1 << 30;

/// A device for a shard; see [`Flash::attach`](crate::flash::Flash::attach).
#[derive(Debug)]
#[expect(clippy::large_enum_variant, reason = "one for each device and shard")]
pub enum FlashFile {
    /// A device of this host.
    Here(LocalFlash),
    /// A device of another host.
    Remote(RemoteFlash),
}

impl FlashFile {
    /// Returns the descriptor of a device on this host; `None` for a device on another host.
    pub fn here(self) -> Option<LocalFlash> {
        match self {
            FlashFile::Here(local) => Some(local),
            FlashFile::Remote(_) => None,
        }
    }
}

/// The descriptor of a device on this host.
#[derive(Debug)]
pub struct LocalFlash {
    /// Descriptor of the device, open for reading and writing.
    pub file: OwnedFd,
    /// How the I/O ring accesses the device.
    pub class: FdClass,
    /// Flushes of the device by all shards.
    pub(crate) flushes: DeviceFlushes,
}

/// Whether new segments are allocated on a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Admission {
    /// New segments are allocated on the device.
    In,
    /// No new segments are allocated; segments in use stay.
    Out,
}

/// Properties of a pool device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceInfo {
    /// Id of the device.
    pub id: DeviceId,
    /// Path of the device.
    pub path: PathBuf,
    /// UUID of the device, from its superblock.
    pub uuid: Uuid,
    /// Size of the file or block device in bytes.
    pub size_bytes: u64,
    /// Number of segments.
    pub segments: u64,
    /// Number of free segments.
    pub free_segments: u64,
    /// Whether new segments are allocated on the device.
    pub admission: Admission,
    /// How the device is accessed: `direct`, `buffered`, `memory` or `remote`. A remote device is
    /// on another host and stores only replicas.
    pub access: &'static str,
    /// Device and inode number of the device's regular file when it was opened; `None` for other
    /// devices.
    pub file: Option<FileNumber>,
}

/// The flash devices of this host.
#[derive(Debug)]
pub struct Pool {
    name: String,
    uuid: Uuid,
    segment_bytes: u64,
    next_ordinal: u16,
    devices: Vec<Device>,
    /// Index of the device on which the next segment of a volatile cache is allocated.
    turn: usize,
}

impl Pool {
    /// Creates a pool of `devices`. Files that do not exist are created.
    ///
    /// # Errors
    /// Returns a [`PoolError`]. After an error, the files that the call created are removed.
    pub fn create(
        name: &str,
        devices: &[DeviceSpec],
        segment_bytes: u64,
        overwrite: Overwrite,
    ) -> Result<Pool, PoolError> {
        let reason = if name.is_empty() || name.len() > format::NAME_BYTES_MAX {
            Some(format!("the name of a pool must have 1 to {} bytes", format::NAME_BYTES_MAX))
        } else if !format::is_segment_size(segment_bytes) {
            Some(format!(
                "the segment size must be a power of two from 1 MiB to 1 GiB, not {}",
                error::in_units(segment_bytes)
            ))
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

    /// Opens a pool with the available devices at `paths`, at least one. Segments of volatile
    /// caches become free.
    ///
    /// # Errors
    /// Returns a [`PoolError`] if a device does not belong to the pool, or is not usable.
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
            pool.check_sibling(superblock, path)?;
            pool.next_ordinal = pool.next_ordinal.max(superblock.next_ordinal);
            for segment in 0..device.table.entries().len() {
                if let Entry::Owned { kind: Kind::Volatile, .. } = device.table.entries()[segment] {
                    device.table.set(segment, Entry::Free);
                }
            }
            device.store_table()?;
            pool.devices.push(device);
        }
        pool.ok_or_else(|| PoolError::Unworkable {
            reason: "name at least one device of the pool to open it".into(),
        })
    }

    /// Adds devices of the same pool that were opened later.
    ///
    /// # Errors
    /// Returns `OtherPool` if `late` belongs to another pool, or `Unworkable` for a copy of a
    /// device that is present already. In both cases `late` is closed.
    pub fn join(&mut self, late: Pool) -> Result<(), PoolError> {
        for device in &late.devices {
            self.check_sibling(&device.superblock, &device.open.path)?;
        }
        self.next_ordinal = self.next_ordinal.max(late.next_ordinal);
        self.devices.extend(late.devices);
        Ok(())
    }

    /// Checks that a superblock belongs to this pool, and to none of the devices that the pool has
    /// open.
    fn check_sibling(&self, superblock: &Superblock, path: &Path) -> Result<(), PoolError> {
        if superblock.pool_uuid != self.uuid || superblock.segment_bytes != self.segment_bytes {
            return Err(PoolError::OtherPool {
                path: path.into(),
                found: format!("{} ({})", superblock.name, superblock.pool_uuid),
                expected: format!("{} ({})", self.name, self.uuid),
            });
        }
        if self.devices.iter().any(|other| other.superblock.ordinal == superblock.ordinal) {
            let reason = format!("{} is a copy of another device of the pool; leave one out", path.display());
            return Err(PoolError::Unworkable { reason });
        }
        Ok(())
    }

    /// Adds a device to the pool. The file is created if it does not exist.
    ///
    /// # Errors
    /// Returns a [`PoolError`]. After an error, a file that the call created is removed.
    pub fn add_device(&mut self, spec: &DeviceSpec, overwrite: Overwrite) -> Result<DeviceId, PoolError> {
        let open = OpenDevice::create(spec, overwrite)?;
        let path = open.made();
        let added = self.add_open_device(open);
        if let (Err(_), Some(path)) = (&added, path) {
            let _ = std::fs::remove_file(path);
        }
        added
    }

    fn add_open_device(&mut self, open: OpenDevice) -> Result<DeviceId, PoolError> {
        let Some(layout) = format::Layout::fitting(open.size_bytes, self.segment_bytes) else {
            let needed = device_bytes_for(self.segment_bytes, self.segment_bytes);
            return Err(PoolError::TooSmall { path: open.path.clone(), bytes: open.size_bytes, needed });
        };
        open.refuse_in_use()?;
        let ordinal = self.next_ordinal;
        let Some(next_ordinal) = ordinal.checked_add(1) else {
            let reason =
                "the pool had 65 535 devices already, the maximum in its lifetime; create a new pool"
                    .to_owned();
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
            features: self.features(),
            name: self.name.clone(),
        };
        // The other devices first record that the ordinal is used. If hob crashes after that, only
        // an ordinal is wasted.
        for device in &mut self.devices {
            device.superblock.next_ordinal = next_ordinal;
            if let Err(error) = device.store_superblock() {
                tracing::warn!(%error, "a device of the pool could not record that the pool has a new device");
            }
        }
        self.next_ordinal = next_ordinal;
        self.devices.push(Device::format(open, superblock)?);
        Ok(DeviceId(ordinal))
    }

    /// Removes a device without segments in use from the pool, and wipes its superblock.
    ///
    /// # Errors
    /// Returns `DeviceBusy` if the device has segments, or `NoSuchDevice`. A device that cannot be
    /// wiped is removed without an error.
    pub fn remove_device(&mut self, id: DeviceId) -> Result<(), PoolError> {
        let at = self.position(id)?;
        let table = &self.devices[at].table;
        let segments = table.entries().len() as u64 - table.free();
        if segments > 0 {
            return Err(PoolError::DeviceBusy { device: id, segments });
        }
        let device = self.devices.remove(at);
        if let Err(error) = device.open.give_up() {
            tracing::warn!(%error, "the superblock of the removed device could not be wiped");
        }
        Ok(())
    }

    /// Closes a device and leaves its content unchanged, so that it can be opened and added again.
    pub fn close_device(&mut self, id: DeviceId) -> Result<(), PoolError> {
        let at = self.position(id)?;
        self.devices.remove(at);
        Ok(())
    }

    /// Allows or forbids the allocation of new segments on a device.
    ///
    /// # Errors
    /// Returns `NoSuchDevice`, or an error of the device. After an error, allocation is forbidden
    /// until the pool is opened again.
    pub fn set_admission(&mut self, id: DeviceId, admission: Admission) -> Result<(), PoolError> {
        let at = self.position(id)?;
        let device = &mut self.devices[at];
        let out = SuperblockFlags(device.superblock.flags.0 | SuperblockFlags::OUT.0);
        device.superblock.flags = match admission {
            Admission::In => SuperblockFlags(out.0 & !SuperblockFlags::OUT.0),
            Admission::Out => out,
        };
        // A device that cannot record the change is probably failing. So allocation on it is
        // forbidden, whichever setting was requested.
        device.store_superblock().inspect_err(|_| device.superblock.flags = out)
    }

    /// Abandons a device on another host: hob neither reads nor writes it, and allocates no
    /// segments on it.
    ///
    /// # Errors
    /// Returns `NoSuchDevice` if the pool has no such device.
    pub fn give_up(&mut self, id: DeviceId) -> Result<(), PoolError> {
        let at = self.position(id)?;
        let device = &mut self.devices[at];
        device.superblock.flags = SuperblockFlags(device.superblock.flags.0 | SuperblockFlags::OUT.0);
        if let device::Data::Remote(remote) = &device.open.data {
            remote.give_up();
        }
        Ok(())
    }

    /// Returns the features required to open this pool.
    fn features(&self) -> Features {
        self.devices.iter().fold(Features::default(), |all, device| all.with(device.superblock.features))
    }

    /// Records a required feature on every device that lacks it.
    fn require(&mut self, feature: Features) -> Result<(), PoolError> {
        let all: Vec<usize> = (0..self.devices.len()).collect();
        self.require_on(&all, feature)
    }

    /// Records a required feature on each of these devices that lacks the feature.
    fn require_on(&mut self, devices: &[usize], feature: Features) -> Result<(), PoolError> {
        for at in devices {
            let device = &mut self.devices[*at];
            let old = device.superblock.features;
            if !old.contains(feature) {
                device.superblock.features = old.with(feature);
                device.store_superblock().inspect_err(|_| device.superblock.features = old)?;
            }
        }
        Ok(())
    }

    /// Returns the number of free segments on this host's devices with allocation on.
    pub fn free_segments(&self) -> u64 {
        self.free_segments_beyond(0)
    }

    /// Returns the number of free segments as [`free_segments`](Self::free_segments) does, but does
    /// not count `spare` free segments of each device.
    pub fn free_segments_beyond(&self, spare: u64) -> u64 {
        let devices = self.devices.iter().filter(|device| admits_all(device));
        devices.map(|device| device.table.free().saturating_sub(spare)).sum()
    }

    /// Returns the pool's name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns the number of device ids that the pool has given out, also to devices that were
    /// removed. Every device of the pool has a smaller id.
    pub fn device_ids(&self) -> u16 {
        self.next_ordinal
    }

    /// Returns the pool's UUID.
    pub fn uuid(&self) -> Uuid {
        self.uuid
    }

    /// Returns the segment size in bytes.
    pub fn segment_bytes(&self) -> u64 {
        self.segment_bytes
    }

    /// Returns the devices, by id.
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
            file: device.open.file,
        };
        let mut devices: Vec<DeviceInfo> = self.devices.iter().map(info).collect();
        devices.sort_by_key(|device| device.id);
        devices
    }

    /// Returns a descriptor of a device, for a shard.
    ///
    /// # Errors
    /// Returns `NoSuchDevice`, or the system's error if descriptors are lacking.
    pub fn file(&self, id: DeviceId) -> Result<FlashFile, PoolError> {
        let device = &self.devices[self.position(id)?];
        device.clone_data()
    }

    fn position(&self, id: DeviceId) -> Result<usize, PoolError> {
        let found = self.devices.iter().position(|device| device.superblock.ordinal == id.0);
        found.ok_or(PoolError::NoSuchDevice { device: id })
    }
}

fn admits(device: &Device) -> bool {
    device.superblock.flags.0 & SuperblockFlags::OUT.0 == 0
}

/// Returns true if allocation is on and the device is on this host, so that data of every kind can
/// be allocated on it.
fn admits_all(device: &Device) -> bool {
    admits(device) && !device.is_remote()
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
