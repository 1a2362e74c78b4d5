//! The virtio block device (virtio 1.2, section 5.2): features, configuration space, requests.
//!
//! # Units
//! virtio counts in sectors of 512 bytes, whatever block size the device announces. All other code
//! of hob counts in bytes.

use std::ops::BitOr;

use hob_engine::REQUEST_BYTES_MAX;
use hob_engine::io::{Durability, IoError, Op, Zeroing};

/// Size of a virtio sector in bytes, independent of the announced block size.
const SECTOR: u64 = 512;

/// Maximum number of queues per device.
pub const QUEUES_MAX: u16 = 64;

/// Announced maximum of data segments per request: 128 descriptors of a queue minus header and
/// status.
const SEGMENTS_MAX: u32 = 126;

/// Maximum length of a discard or write-zeroes request, bytes. The device passes such a request to
/// the engine in pieces.
const RANGE_BYTES_MAX: u64 = 1 << 30;

/// Size of a request's header in bytes.
pub(super) const HEADER_BYTES: usize = 16;

/// Size of the range in a discard or write-zeroes request, bytes.
pub(super) const RANGE_BYTES: usize = 16;

/// Size of a device's id string in bytes.
pub(super) const ID_BYTES: usize = 20;

/// Bytes of virtio's configuration space that are defined. The bytes after them read as zeroes.
const CONFIG_BYTES: usize = 60;

/// Maximum size of the configuration space that a client may read, in bytes.
const CONFIG_SPACE_BYTES: usize = 256;

/// A set of virtio's feature bits.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Features(pub u64);

impl Features {
    /// Feature: the configuration space contains the maximum number of segments.
    const SEG_MAX: Features = Features(1 << 2);
    /// Feature: the device refuses writes.
    const RO: Features = Features(1 << 5);
    const BLK_SIZE: Features = Features(1 << 6);
    /// Feature: the driver sends flushes. Without this feature, each write is durable when it is
    /// answered.
    pub const FLUSH: Features = Features(1 << 9);
    const TOPOLOGY: Features = Features(1 << 10);
    const MQ: Features = Features(1 << 12);
    /// Feature: the device accepts discards.
    pub const DISCARD: Features = Features(1 << 13);
    const WRITE_ZEROES: Features = Features(1 << 14);
    /// Feature of vhost, not of virtio: changes of guest memory are logged.
    pub const LOG_ALL: Features = Features(1 << 26);
    const INDIRECT_DESC: Features = Features(1 << 28);
    /// Feature: driver and device set an index at which they want a notification.
    pub const EVENT_IDX: Features = Features(1 << 29);
    /// Feature of vhost-user, not of virtio: the protocol has optional features.
    pub const PROTOCOL: Features = Features(1 << 30);
    const VERSION_1: Features = Features(1 << 32);

    /// Returns true if this set contains all of `other`.
    pub fn contains(self, other: Features) -> bool {
        self.0 & other.0 == other.0
    }
}

impl BitOr for Features {
    type Output = Features;
    fn bitor(self, other: Features) -> Features {
        Features(self.0 | other.0)
    }
}

/// Properties of a disk, as announced to the guest.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Info {
    /// Size of the disk, bytes.
    pub size_bytes: u64,
    /// True if the device refuses writes and other changes.
    pub read_only: bool,
    /// Offsets and lengths of requests are multiples of this many bytes; a power of two, at least
    /// 512.
    pub block_bytes: u32,
    /// True if the backing supports discards.
    pub can_discard: bool,
    /// Id string for the guest. Only its first 20 bytes are used.
    pub name: String,
}

impl Info {
    /// Returns the features that the device offers.
    pub fn features(&self) -> Features {
        let all = Features::SEG_MAX
            | Features::BLK_SIZE
            | Features::FLUSH
            | Features::TOPOLOGY
            | Features::MQ
            | Features::INDIRECT_DESC
            | Features::EVENT_IDX
            | Features::PROTOCOL
            | Features::LOG_ALL
            | Features::VERSION_1;
        match self.read_only {
            true => all | Features::RO,
            false if self.can_discard => all | Features::WRITE_ZEROES | Features::DISCARD,
            false => all | Features::WRITE_ZEROES,
        }
    }

    /// Returns a part of the configuration space; `None` outside of it.
    pub fn config(&self, offset: u32, len: u32) -> Option<Vec<u8>> {
        let mut space = [0; CONFIG_SPACE_BYTES];
        space[..CONFIG_BYTES].copy_from_slice(&self.config_space());
        let end = offset.checked_add(len)? as usize;
        space.get(offset as usize..end).map(<[u8]>::to_vec)
    }

    fn config_space(&self) -> [u8; CONFIG_BYTES] {
        let mut space = [0; CONFIG_BYTES];
        let mut put = |at: usize, bytes: &[u8]| space[at..at + bytes.len()].copy_from_slice(bytes);
        let range_sectors = (RANGE_BYTES_MAX / SECTOR) as u32;
        put(0, &(self.size_bytes / SECTOR).to_le_bytes());
        put(12, &SEGMENTS_MAX.to_le_bytes());
        put(20, &self.block_bytes.to_le_bytes());
        // The topology has blocks of 4 KiB, aligned with the disk, because smaller requests are
        // slow.
        let per_page = 4096u32.div_ceil(self.block_bytes);
        put(24, &[per_page.trailing_zeros() as u8, 0]);
        put(26, &(per_page as u16).to_le_bytes());
        put(28, &per_page.to_le_bytes());
        // Write-back cache: the driver must flush.
        put(32, &[1]);
        put(34, &QUEUES_MAX.to_le_bytes());
        put(36, &range_sectors.to_le_bytes());
        put(40, &1u32.to_le_bytes());
        put(44, &(self.block_bytes.max(4096) / SECTOR as u32).to_le_bytes());
        put(48, &range_sectors.to_le_bytes());
        put(52, &1u32.to_le_bytes());
        put(56, &[1]);
        space
    }

    /// Returns the device's id string for the guest.
    pub(super) fn id(&self) -> [u8; ID_BYTES] {
        let mut id = [0; ID_BYTES];
        let name = self.name.as_bytes();
        let len = name.len().min(ID_BYTES);
        id[..len].copy_from_slice(&name[..len]);
        id
    }
}

/// Status byte in the answer to a virtio request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(super) enum Status {
    Ok = 0,
    IoError = 1,
    Unsupported = 2,
}

impl From<IoError> for Status {
    fn from(error: IoError) -> Status {
        match error {
            IoError::Unsupported => Status::Unsupported,
            IoError::Failed
            | IoError::NoSpace
            | IoError::Invalid
            | IoError::ReadOnly
            | IoError::ShuttingDown
            | IoError::NotCached => Status::IoError,
        }
    }
}

/// A driver's request whose header and lengths are valid.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Wanted {
    /// A request for the engine.
    Engine { op: Op, offset: u64, len: u64 },
    /// The device's id string.
    Id,
}

/// Decodes a driver's request. `readable` is the number of bytes after the header that the device
/// may read, and `writable` the number before the status that it may write. `range` is the start of
/// the readable bytes, if they are long enough.
pub(super) fn understand(
    header: [u8; HEADER_BYTES],
    data: (u64, u64),
    range: Option<[u8; RANGE_BYTES]>,
    info: &Info,
    acked: Features,
) -> Result<Wanted, Status> {
    let (kind, rest) = header.split_first_chunk::<4>().expect("sixteen bytes");
    let sector = u64::from_le_bytes(*rest.last_chunk::<8>().expect("twelve bytes"));
    let (readable, writable) = data;
    let durability = if acked.contains(Features::FLUSH) { Durability::Volatile } else { Durability::Durable };
    let (op, offset, len) = match u32::from_le_bytes(*kind) {
        0 => (Op::Read, sector.checked_mul(SECTOR), writable),
        1 => (Op::Write(durability), sector.checked_mul(SECTOR), readable),
        4 => return Ok(Wanted::Engine { op: Op::Flush, offset: 0, len: 0 }),
        // The specification fixes the id's length. A longer answer is neither written nor logged.
        8 if (readable, writable) == (0, ID_BYTES as u64) => return Ok(Wanted::Id),
        8 => return Err(Status::IoError),
        11 | 13 => {
            let range = range.filter(|_| readable == RANGE_BYTES as u64).ok_or(Status::IoError)?;
            let range = Range::decode(range);
            let zeroing = if range.may_unmap { Zeroing::MayUnmap } else { Zeroing::KeepAllocated };
            let op = match u32::from_le_bytes(*kind) {
                11 if range.flags != 0 => return Err(Status::Unsupported),
                11 => Op::Discard(durability),
                _ if range.flags & !1 != 0 => return Err(Status::Unsupported),
                _ => Op::WriteZeroes(durability, zeroing),
            };
            if range.sectors > RANGE_BYTES_MAX / SECTOR {
                return Err(Status::IoError);
            }
            (op, range.first.checked_mul(SECTOR), range.sectors * SECTOR)
        }
        _ => return Err(Status::Unsupported),
    };
    let offset = offset.ok_or(Status::IoError)?;
    let is_whole = (offset | len).is_multiple_of(u64::from(info.block_bytes));
    let fits = offset.checked_add(len).is_some_and(|end| end <= info.size_bytes);
    let moves_at_once = !op.has_buffer() || len <= REQUEST_BYTES_MAX;
    if len == 0 || !is_whole || !fits || !moves_at_once || (op.modifies() && info.read_only) {
        return Err(Status::IoError);
    }
    Ok(Wanted::Engine { op, offset, len })
}

struct Range {
    first: u64,
    sectors: u64,
    flags: u32,
    may_unmap: bool,
}

impl Range {
    fn decode(bytes: [u8; RANGE_BYTES]) -> Range {
        let (first, rest) = bytes.split_first_chunk::<8>().expect("sixteen bytes");
        let (sectors, flags) = rest.split_first_chunk::<4>().expect("eight bytes");
        let flags = u32::from_le_bytes([flags[0], flags[1], flags[2], flags[3]]);
        Range {
            first: u64::from_le_bytes(*first),
            sectors: u64::from(u32::from_le_bytes(*sectors)),
            flags,
            may_unmap: flags & 1 != 0,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn info() -> Info {
        let name = "a-disk-with-a-rather-long-name".to_owned();
        Info { size_bytes: 1 << 30, read_only: false, block_bytes: 512, can_discard: true, name }
    }

    fn header(kind: u32, sector: u64) -> [u8; HEADER_BYTES] {
        let mut header = [0; HEADER_BYTES];
        header[..4].copy_from_slice(&kind.to_le_bytes());
        header[8..].copy_from_slice(&sector.to_le_bytes());
        header
    }

    fn range(first: u64, sectors: u32, flags: u32) -> Option<[u8; RANGE_BYTES]> {
        let mut range = [0; RANGE_BYTES];
        range[..8].copy_from_slice(&first.to_le_bytes());
        range[8..12].copy_from_slice(&sectors.to_le_bytes());
        range[12..].copy_from_slice(&flags.to_le_bytes());
        Some(range)
    }

    #[test]
    fn the_configuration_space_has_its_fields_where_drivers_look() {
        let info = info();
        assert_eq!(info.config(0, 8).unwrap(), (1u64 << 21).to_le_bytes());
        assert_eq!(info.config(20, 4).unwrap(), 512u32.to_le_bytes());
        assert_eq!(info.config(24, 4).unwrap(), [3, 0, 8, 0]);
        assert_eq!(info.config(34, 2).unwrap(), QUEUES_MAX.to_le_bytes());
        assert_eq!(info.config(60, 36).unwrap(), [0; 36]);
        assert!(info.config(250, 7).is_none() && info.config(u32::MAX, 2).is_none());
        let large = Info { block_bytes: 4096, ..info };
        assert_eq!(large.config(24, 4).unwrap(), [0, 0, 1, 0]);
    }

    #[test]
    fn requests_become_operations() {
        let volatile = Durability::Volatile;
        let engine = |op, offset, len| Ok(Wanted::Engine { op, offset, len });
        let all = info().features();
        let without_flush = Features(all.0 & !Features::FLUSH.0);
        let none = None;
        for (header, data, range, acked, expected) in [
            (header(0, 8), (0, 4096), none, all, engine(Op::Read, 4096, 4096)),
            (header(1, 1), (512, 0), none, all, engine(Op::Write(volatile), 512, 512)),
            (header(1, 1), (512, 0), none, without_flush, engine(Op::Write(Durability::Durable), 512, 512)),
            (header(4, 0), (0, 0), none, all, engine(Op::Flush, 0, 0)),
            (header(8, 0), (0, 20), none, all, Ok(Wanted::Id)),
            (header(8, 0), (0, 21), none, all, Err(Status::IoError)),
            (header(8, 0), (0, 1 << 30), none, all, Err(Status::IoError)),
            (header(8, 0), (1, 20), none, all, Err(Status::IoError)),
            (header(11, 0), (16, 0), range(8, 8, 0), all, engine(Op::Discard(volatile), 4096, 4096)),
            (header(11, 0), (16, 0), range(8, 8, 1), all, Err(Status::Unsupported)),
            (
                header(13, 0),
                (16, 0),
                range(8, 8, 1),
                all,
                engine(Op::WriteZeroes(volatile, Zeroing::MayUnmap), 4096, 4096),
            ),
            (header(13, 0), (16, 0), range(8, 8, 2), all, Err(Status::Unsupported)),
            (header(13, 0), (16, 0), range(8, u32::MAX, 0), all, Err(Status::IoError)),
            (header(13, 0), (32, 0), range(8, 8, 0), all, Err(Status::IoError)),
            (header(13, 0), (8, 0), none, all, Err(Status::IoError)),
            (header(0, u64::MAX), (0, 512), none, all, Err(Status::IoError)),
            (header(0, (1 << 21) - 1), (0, 1024), none, all, Err(Status::IoError)),
            (header(0, 0), (0, 0), none, all, Err(Status::IoError)),
            (header(0, 0), (0, 100), none, all, Err(Status::IoError)),
            (header(0, 0), (0, REQUEST_BYTES_MAX + 512), none, all, Err(Status::IoError)),
            (header(77, 0), (0, 512), none, all, Err(Status::Unsupported)),
        ] {
            assert_eq!(understand(header, data, range, &info(), acked), expected, "{header:?} {data:?}");
        }
    }

    #[test]
    fn a_read_only_disk_refuses_changes_and_announces_it() {
        let info = Info { read_only: true, ..info() };
        assert!(info.features().contains(Features::RO) && !info.features().contains(Features::DISCARD));
        let write = understand(header(1, 0), (512, 0), None, &info, info.features());
        assert_eq!(write, Err(Status::IoError));
    }
}
