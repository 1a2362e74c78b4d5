//! Blocking reads of flash, for recovery and for exporting dirty data.
//!
//! The reader uses the descriptors of the caches' data, which are O_DIRECT if possible. So it reads
//! the device's content and not the host's page cache. The reader writes nothing.

use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use hob_engine::command::{DataSegment, Segment};
use hob_engine::journal::{DirtySector, FlashSector};
use hob_engine::units::{DeviceId, SECTOR_BYTES};
use rustix::io::Errno;

use super::device::Data;
use super::{Pool, PoolError, RemoteFile};
use crate::checksum::sector_sums;
use crate::ring::read_now;
use crate::volatile::{self, VolatileFile};

/// Memory alignment for O_DIRECT, bytes.
const ALIGNMENT: usize = 4096;

/// A buffer that is aligned for O_DIRECT reads.
#[derive(Debug)]
pub(crate) struct AlignedBuffer {
    memory: Vec<u8>,
    skip: usize,
    len: usize,
}

impl AlignedBuffer {
    pub(crate) fn new(len: usize) -> AlignedBuffer {
        let memory = vec![0; len + ALIGNMENT];
        let skip = memory.as_ptr().align_offset(ALIGNMENT);
        AlignedBuffer { memory, skip, len }
    }

    pub(crate) fn bytes(&self) -> &[u8] {
        &self.memory[self.skip..][..self.len]
    }

    pub(crate) fn bytes_mut(&mut self) -> &mut [u8] {
        &mut self.memory[self.skip..][..self.len]
    }
}

/// A pool device that is open for reading.
#[derive(Debug)]
enum Source {
    Here(OwnedFd, Option<Arc<VolatileFile>>),
    /// Device on another host. The flag says whether a read failed.
    Remote(Arc<RemoteFile>, AtomicBool),
}

/// Devices of a pool, open for reading, independent of the pool's lock.
#[derive(Debug)]
pub(super) struct Devices {
    sources: Vec<(DeviceId, Source, PathBuf)>,
    /// Path and error of the last failed read of a device of this host.
    failed: Mutex<Option<(PathBuf, Errno)>>,
}

impl Devices {
    pub(super) fn of(pool: &Pool) -> Result<Devices, PoolError> {
        let files = pool.devices.iter().map(|device| {
            let source = match &device.open.data {
                Data::Remote(remote) => Source::Remote(remote.clone(), AtomicBool::new(false)),
                Data::Here(file, _) => {
                    let file = file.try_clone().map_err(|e| device.open.system("open it once more", e))?;
                    let volatile = volatile::known(&file);
                    Source::Here(file, volatile)
                }
            };
            Ok((DeviceId(device.superblock.ordinal), source, device.open.path.clone()))
        });
        let sources = files.collect::<Result<_, PoolError>>()?;
        Ok(Devices { sources, failed: Mutex::new(None) })
    }

    /// Reads `bytes`, an aligned buffer, from `offset` on.
    pub(super) fn read(&self, device: DeviceId, offset: u64, bytes: &mut [u8]) -> Result<(), Errno> {
        let found = self.sources.iter().find(|(id, ..)| *id == device);
        let (_, source, path) = found.ok_or(Errno::NODEV)?;
        let note = |error: Errno| {
            *self.failed.lock().unwrap_or_else(PoisonError::into_inner) = Some((path.clone(), error));
            error
        };
        match source {
            Source::Here(file, None) => read_now(file, offset, bytes).map_err(note),
            Source::Here(_, Some(volatile)) => {
                volatile.read(offset, bytes).map_err(volatile::errno).map_err(note)
            }
            Source::Remote(remote, is_unread) => remote.read_exact_at(bytes, offset).map_err(|error| {
                is_unread.store(true, Ordering::Relaxed);
                Errno::from_io_error(&error).unwrap_or(Errno::IO)
            }),
        }
    }

    /// Returns path and error of the last failed read of a device of this host; `None` if no read
    /// failed since the previous call.
    pub(super) fn take_failed(&self) -> Option<(PathBuf, Errno)> {
        self.failed.lock().unwrap_or_else(PoisonError::into_inner).take()
    }

    /// Returns the remote devices of which a read failed, perhaps because the other host does not
    /// lend them any more.
    pub(super) fn unread(&self) -> Vec<DeviceId> {
        let is_unread = |source: &Source| match source {
            Source::Remote(_, is_unread) => is_unread.load(Ordering::Relaxed),
            Source::Here(..) => false,
        };
        self.sources.iter().filter(|(_, source, _)| is_unread(source)).map(|(id, ..)| *id).collect()
    }
}

/// Position of a copy of a sector, and its checksum.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SectorCopy {
    /// The data segment that has this copy.
    pub place: Segment,
    /// Index of the sector in its segment.
    pub sector: u64,
    /// CRC-32C of the sector; `None` if it is unknown and any content is accepted.
    pub sum: Option<u32>,
}

/// Reason why a sector cannot be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SectorLost {
    /// The read of each copy failed: an I/O error, or the device is missing.
    #[error("the read of every copy of the sector on flash failed")]
    Unreadable,
    /// At least one copy was read, and each copy that was read has a wrong checksum.
    #[error("the sector on flash has a wrong checksum")]
    Wrong,
}

/// Reads single sectors of caches that are not in use by a shard.
#[derive(Debug)]
pub struct SectorReader {
    devices: Devices,
    buffer: AlignedBuffer,
    sums: Vec<u32>,
}

impl SectorReader {
    /// Creates a reader of the devices that `pool` has now.
    ///
    /// # Errors
    /// Returns the system's error if descriptors are lacking.
    pub fn new(pool: &Pool) -> Result<SectorReader, PoolError> {
        let buffer = AlignedBuffer::new(SECTOR_BYTES as usize);
        Ok(SectorReader { devices: Devices::of(pool)?, buffer, sums: Vec::new() })
    }

    /// Reads a dirty sector of a cache with these data segments.
    ///
    /// # Errors
    /// Returns the same errors as [`SectorReader::read`].
    pub fn read_dirty(&mut self, data: &[DataSegment], sector: &DirtySector) -> Result<&[u8], SectorLost> {
        let copy = |at: FlashSector| SectorCopy {
            place: data[at.segment as usize].place,
            sector: at.sector,
            sum: at.sum,
        };
        match sector.second {
            Some(second) => self.read(&[copy(sector.place), copy(second)]),
            None => self.read(&[copy(sector.place)]),
        }
    }

    /// Reads the first of a sector's copies that is readable and has the right checksum.
    ///
    /// # Errors
    /// Returns [`SectorLost`] if no copy is usable.
    pub fn read(&mut self, copies: &[SectorCopy]) -> Result<&[u8], SectorLost> {
        let mut lost = SectorLost::Unreadable;
        for copy in copies {
            let offset = copy.place.offset + copy.sector * SECTOR_BYTES;
            if self.devices.read(copy.place.device, offset, self.buffer.bytes_mut()).is_err() {
                continue;
            }
            sector_sums(self.buffer.bytes(), &mut self.sums);
            if copy.sum.is_none_or(|sum| self.sums == [sum]) {
                return Ok(self.buffer.bytes());
            }
            lost = SectorLost::Wrong;
        }
        Err(lost)
    }
}
