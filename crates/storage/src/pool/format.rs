//! Encodes and decodes the format of a pool device, version 1, as specified in `docs/FORMAT.md`.
//!
//! The format code accesses no file. All numbers are little-endian; offsets and lengths are in
//! bytes. Data from a device is validated before it is used.

use std::fmt;

use super::{SEGMENT_BYTES_MAX, SEGMENT_BYTES_MIN};
use crate::fields::{array_at, is_sealed, put, seal, u32_at, u64_at};

/// Version of the device format that this hob reads and writes.
pub const FORMAT_VERSION: u32 = 1;

/// Size of a superblock, and of a page of the segment table, in bytes.
pub(super) const PAGE_BYTES: usize = 4096;

/// Offsets of the two copies of the superblock on a pool device, bytes.
pub(super) const SUPERBLOCK_OFFSETS: [u64; 2] = [0, (1 << 20) - PAGE_BYTES as u64];

/// Offset of the segment table on a pool device, bytes.
const TABLE_OFFSET: u64 = 1 << 20;

/// Alignment of the distance between the two copies of the segment table, bytes. The alignment is
/// larger than a torn write of a flash device.
const COPY_ALIGNMENT: u64 = 64 << 10;

/// Alignment of the first segment's offset, bytes.
const DATA_ALIGNMENT: u64 = 1 << 20;

/// Number of entries in a table page.
pub(super) const ENTRIES_PER_PAGE: u64 = 126;

/// Maximum number of segments per device. The maximum number of segments limits the memory that a
/// superblock can make hob allocate.
pub(super) const SEGMENTS_MAX: u64 = 1 << 24;

/// Maximum length of a pool's name in bytes.
pub const NAME_BYTES_MAX: usize = 63;

const MAGIC: [u8; 8] = *b"hob-pool";
pub(super) const PAGE_MAGIC: [u8; 4] = *b"hobT";

/// Offsets of the fields in a superblock.
mod superblock_at {
    pub(super) const MAGIC: usize = 0x00;
    pub(super) const VERSION: usize = 0x08;
    pub(super) const CRC: usize = 0x0C;
    pub(super) const GENERATION: usize = 0x10;
    pub(super) const POOL_UUID: usize = 0x18;
    pub(super) const DEVICE_UUID: usize = 0x28;
    pub(super) const ORDINAL: usize = 0x38;
    pub(super) const NEXT_ORDINAL: usize = 0x3A;
    pub(super) const FLAGS: usize = 0x3C;
    pub(super) const DEVICE_BYTES: usize = 0x40;
    pub(super) const SEGMENT_BYTES: usize = 0x48;
    pub(super) const SEGMENTS: usize = 0x50;
    pub(super) const TABLE_OFFSET: usize = 0x58;
    pub(super) const TABLE_PAGES: usize = 0x60;
    pub(super) const DATA_OFFSET: usize = 0x68;
    pub(super) const FEATURES_REQUIRED: usize = 0x70;
    pub(super) const NAME_BYTES: usize = 0x80;
    pub(super) const NAME: usize = 0x81;
}

/// Offsets of the fields in a page of the segment table.
mod page_at {
    pub(super) const MAGIC: usize = 0x00;
    pub(super) const CRC: usize = 0x04;
    pub(super) const GENERATION: usize = 0x08;
    pub(super) const DEVICE_UUID: usize = 0x10;
    pub(super) const INDEX: usize = 0x20;
    pub(super) const COUNT: usize = 0x24;
    pub(super) const ENTRIES: usize = 0x40;
}

/// Offsets of the fields in an entry of a table page.
mod entry_at {
    pub(super) const OWNER: usize = 0x00;
    pub(super) const ORDINAL: usize = 0x10;
    pub(super) const KIND: usize = 0x14;
    pub(super) const RING: usize = 0x18;
    pub(super) const COPY: usize = 0x1C;
    pub(super) const BYTES: usize = 0x20;
}

const KIND_FREE: u32 = 0;
const KIND_DATA_VOLATILE: u32 = 1;
const KIND_DATA_PERSISTENT: u32 = 2;
const KIND_RING: u32 = 3;
const KIND_SWAP: u32 = 4;

/// Maximum number of copies of a journal ring.
pub(super) const RING_COPIES_MAX: u8 = 2;

/// A random 128-bit identifier.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Uuid(pub [u8; 16]);

impl fmt::Display for Uuid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (at, byte) in self.0.iter().enumerate() {
            if matches!(at, 4 | 6 | 8 | 10) {
                f.write_str("-")?;
            }
            write!(f, "{byte:02x}")?;
        }
        Ok(())
    }
}

impl fmt::Debug for Uuid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// Id of the cache or swap area that owns a segment: a UUID or a hash, chosen by the caller, never
/// 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct OwnerId(pub u128);

/// Flags of a device, one bit each.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct SuperblockFlags(pub(super) u32);

impl SuperblockFlags {
    /// Flag: no new segments are allocated on the device.
    pub(super) const OUT: SuperblockFlags = SuperblockFlags(1);
}

/// Features that hob must support to open a device, one bit each.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Features(pub(super) u64);

impl Features {
    /// The pool has or had persistent caches, with journal rings.
    pub(super) const JOURNAL: Features = Features(1);
    /// The pool has or had swap areas.
    pub(super) const SWAP: Features = Features(2);
    /// The pool has or had journal rings that may list incomplete sectors.
    pub(super) const INCOMPLETE_SECTORS: Features = Features(4);

    pub(super) const fn contains(self, other: Features) -> bool {
        self.0 & other.0 == other.0
    }

    pub(super) const fn with(self, other: Features) -> Features {
        Features(self.0 | other.0)
    }
}

/// Features that this version of hob supports.
const FEATURES_KNOWN: Features = Features::JOURNAL.with(Features::SWAP).with(Features::INCOMPLETE_SECTORS);

/// The superblock of a device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Superblock {
    pub(super) generation: u64,
    pub(super) pool_uuid: Uuid,
    pub(super) device_uuid: Uuid,
    pub(super) ordinal: u16,
    /// First ordinal that no device of the pool has or had.
    pub(super) next_ordinal: u16,
    pub(super) flags: SuperblockFlags,
    pub(super) device_bytes: u64,
    pub(super) segment_bytes: u64,
    pub(super) layout: Layout,
    pub(super) features: Features,
    pub(super) name: String,
}

/// Reason why a page is not a valid superblock.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum NotSuperblock {
    /// The page has no signature of hob.
    Foreign,
    /// The superblock has a version or a feature that this hob does not know.
    Newer(String),
    Damaged(&'static str),
}

/// Positions of the segment table and the segments on a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Layout {
    pub(super) segments: u64,
    pub(super) table_offset: u64,
    pub(super) table_pages: u64,
    pub(super) data_offset: u64,
}

impl Layout {
    /// Returns the layout of a device with `segments` segments.
    pub(super) fn new(segments: u64) -> Layout {
        let table_pages = segments.div_ceil(ENTRIES_PER_PAGE);
        let table_end = TABLE_OFFSET + 2 * copy_bytes(table_pages);
        let data_offset = table_end.next_multiple_of(DATA_ALIGNMENT);
        Layout { segments, table_offset: TABLE_OFFSET, table_pages, data_offset }
    }

    /// Returns the layout with as many segments as fit on the device; `None` if none fits.
    pub(super) fn fitting(device_bytes: u64, segment_bytes: u64) -> Option<Layout> {
        let mut segments = (device_bytes / segment_bytes).min(SEGMENTS_MAX);
        while segments > 0 {
            let layout = Layout::new(segments);
            let end = layout.data_offset + segments * segment_bytes;
            if end <= device_bytes {
                return Some(layout);
            }
            segments -= (end - device_bytes).div_ceil(segment_bytes).min(segments);
        }
        None
    }

    /// Returns the offset of a copy (0 or 1) of a table page.
    pub(super) fn page_offset(&self, page: u64, copy: u8) -> u64 {
        self.table_offset + u64::from(copy) * copy_bytes(self.table_pages) + page * PAGE_BYTES as u64
    }
}

/// Returns the size of one copy of the segment table in bytes.
fn copy_bytes(table_pages: u64) -> u64 {
    (table_pages * PAGE_BYTES as u64).next_multiple_of(COPY_ALIGNMENT)
}

/// Returns the size in bytes of a device that has space for `cache_bytes` of caches.
pub fn device_bytes_for(cache_bytes: u64, segment_bytes: u64) -> u64 {
    let layout = Layout::new(cache_bytes.div_ceil(segment_bytes).max(1));
    layout.data_offset + layout.segments * segment_bytes
}

impl Superblock {
    pub(super) fn encode(&self) -> Vec<u8> {
        use superblock_at as at;
        let mut bytes = vec![0; PAGE_BYTES];
        put(&mut bytes, at::MAGIC, &MAGIC);
        put(&mut bytes, at::VERSION, &FORMAT_VERSION.to_le_bytes());
        put(&mut bytes, at::GENERATION, &self.generation.to_le_bytes());
        put(&mut bytes, at::POOL_UUID, &self.pool_uuid.0);
        put(&mut bytes, at::DEVICE_UUID, &self.device_uuid.0);
        put(&mut bytes, at::ORDINAL, &self.ordinal.to_le_bytes());
        put(&mut bytes, at::NEXT_ORDINAL, &self.next_ordinal.to_le_bytes());
        put(&mut bytes, at::FLAGS, &self.flags.0.to_le_bytes());
        put(&mut bytes, at::DEVICE_BYTES, &self.device_bytes.to_le_bytes());
        put(&mut bytes, at::SEGMENT_BYTES, &self.segment_bytes.to_le_bytes());
        put(&mut bytes, at::SEGMENTS, &self.layout.segments.to_le_bytes());
        put(&mut bytes, at::TABLE_OFFSET, &self.layout.table_offset.to_le_bytes());
        put(&mut bytes, at::TABLE_PAGES, &self.layout.table_pages.to_le_bytes());
        put(&mut bytes, at::DATA_OFFSET, &self.layout.data_offset.to_le_bytes());
        put(&mut bytes, at::FEATURES_REQUIRED, &self.features.0.to_le_bytes());
        assert!(self.name.len() <= NAME_BYTES_MAX, "the pool checked its name");
        put(&mut bytes, at::NAME_BYTES, &[self.name.len() as u8]);
        put(&mut bytes, at::NAME, self.name.as_bytes());
        seal(&mut bytes, at::CRC);
        bytes
    }

    /// Decodes a superblock from `bytes`, one page.
    pub(super) fn decode(bytes: &[u8]) -> Result<Superblock, NotSuperblock> {
        use superblock_at as at;
        if bytes.len() != PAGE_BYTES || bytes[at::MAGIC..at::VERSION] != MAGIC {
            return Err(NotSuperblock::Foreign);
        }
        if !is_sealed(bytes, at::CRC) {
            return Err(NotSuperblock::Damaged("the superblock's checksum is wrong"));
        }
        let version = u32_at(bytes, at::VERSION);
        if version != FORMAT_VERSION {
            return Err(NotSuperblock::Newer(format!("format version {version}")));
        }
        let features = Features(u64_at(bytes, at::FEATURES_REQUIRED));
        if !FEATURES_KNOWN.contains(features) {
            let unknown = features.0 & !FEATURES_KNOWN.0;
            return Err(NotSuperblock::Newer(format!("features {unknown:#x}")));
        }
        let name_bytes = usize::from(bytes[at::NAME_BYTES]);
        let name = bytes[at::NAME..].get(..name_bytes).filter(|_| name_bytes <= NAME_BYTES_MAX);
        let name = name.and_then(|name| std::str::from_utf8(name).ok());
        let superblock = Superblock {
            generation: u64_at(bytes, at::GENERATION),
            pool_uuid: Uuid(array_at(bytes, at::POOL_UUID)),
            device_uuid: Uuid(array_at(bytes, at::DEVICE_UUID)),
            ordinal: u16::from_le_bytes(array_at(bytes, at::ORDINAL)),
            next_ordinal: u16::from_le_bytes(array_at(bytes, at::NEXT_ORDINAL)),
            flags: SuperblockFlags(u32_at(bytes, at::FLAGS)),
            device_bytes: u64_at(bytes, at::DEVICE_BYTES),
            segment_bytes: u64_at(bytes, at::SEGMENT_BYTES),
            layout: Layout {
                segments: u64_at(bytes, at::SEGMENTS),
                table_offset: u64_at(bytes, at::TABLE_OFFSET),
                table_pages: u64_at(bytes, at::TABLE_PAGES),
                data_offset: u64_at(bytes, at::DATA_OFFSET),
            },
            features,
            name: name.ok_or(NotSuperblock::Damaged("the pool's name is not valid text"))?.to_owned(),
        };
        superblock.check().map_err(NotSuperblock::Damaged)?;
        Ok(superblock)
    }

    /// Validates the superblock's numbers, because a correct checksum does not make them valid.
    fn check(&self) -> Result<(), &'static str> {
        let Layout { segments, table_offset, table_pages, data_offset } = self.layout;
        let page = PAGE_BYTES as u64;
        if !is_segment_size(self.segment_bytes) {
            return Err("the segment size is not a power of two in range");
        }
        if segments == 0 || segments > SEGMENTS_MAX || table_pages != segments.div_ceil(ENTRIES_PER_PAGE) {
            return Err("the number of segments is out of range");
        }
        if table_offset < TABLE_OFFSET
            || !table_offset.is_multiple_of(page)
            || !data_offset.is_multiple_of(page)
        {
            return Err("a region has a wrong offset");
        }
        // From here on nothing can overflow, because `segments` and `segment_bytes` are bounded.
        let table_end = table_offset.checked_add(2 * copy_bytes(table_pages));
        let data_end = data_offset.checked_add(segments * self.segment_bytes);
        if !(table_end.is_some_and(|end| end <= data_offset)
            && data_end.is_some_and(|end| end <= self.device_bytes))
        {
            return Err("regions overlap or exceed the device");
        }
        if self.ordinal >= self.next_ordinal {
            return Err("the device's ordinal is invalid");
        }
        Ok(())
    }
}

/// Returns true if a segment size is valid: a power of two, [`SEGMENT_BYTES_MIN`] to
/// [`SEGMENT_BYTES_MAX`].
pub fn is_segment_size(bytes: u64) -> bool {
    bytes.is_power_of_two() && (SEGMENT_BYTES_MIN..=SEGMENT_BYTES_MAX).contains(&bytes)
}

/// An entry of the segment table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Entry {
    Free,
    Owned {
        owner: OwnerId,
        /// Position among the owner's segments of this kind. For a journal ring: position in the
        /// journal ring's copy.
        ordinal: u32,
        kind: Kind,
    },
}

/// Purpose of a segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// Data of a volatile cache. The segment becomes free when the pool is opened.
    Volatile,
    /// Data of a persistent cache. When the cache got the segment, the cache had no journal ring
    /// with a number above `since`.
    Data { since: u32 },
    /// Part of a copy of a persistent cache's journal ring.
    Ring { number: u32, copy: u8 },
    /// Part of a swap area of `of` consecutive segments.
    Swap { of: u32 },
}

/// Header of a segment table page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct PageHeader {
    pub(super) generation: u64,
    pub(super) device_uuid: Uuid,
    pub(super) index: u32,
}

/// Encodes a table page with its entries, at most [`ENTRIES_PER_PAGE`].
pub(super) fn encode_page(header: PageHeader, entries: &[Entry]) -> Vec<u8> {
    assert!(entries.len() as u64 <= ENTRIES_PER_PAGE, "entries of one page only");
    let mut bytes = vec![0; PAGE_BYTES];
    put(&mut bytes, page_at::MAGIC, &PAGE_MAGIC);
    put(&mut bytes, page_at::GENERATION, &header.generation.to_le_bytes());
    put(&mut bytes, page_at::DEVICE_UUID, &header.device_uuid.0);
    put(&mut bytes, page_at::INDEX, &header.index.to_le_bytes());
    put(&mut bytes, page_at::COUNT, &(entries.len() as u32).to_le_bytes());
    for (at, entry) in entries.iter().enumerate() {
        let start = page_at::ENTRIES + at * entry_at::BYTES;
        let Entry::Owned { owner, ordinal, kind } = entry else { continue };
        let kind = match kind {
            Kind::Volatile => KIND_DATA_VOLATILE,
            Kind::Data { since } => {
                put(&mut bytes, start + entry_at::RING, &since.to_le_bytes());
                KIND_DATA_PERSISTENT
            }
            Kind::Ring { number, copy } => {
                put(&mut bytes, start + entry_at::RING, &number.to_le_bytes());
                put(&mut bytes, start + entry_at::COPY, &[*copy]);
                KIND_RING
            }
            Kind::Swap { of } => {
                put(&mut bytes, start + entry_at::RING, &of.to_le_bytes());
                KIND_SWAP
            }
        };
        put(&mut bytes, start + entry_at::OWNER, &owner.0.to_le_bytes());
        put(&mut bytes, start + entry_at::ORDINAL, &ordinal.to_le_bytes());
        put(&mut bytes, start + entry_at::KIND, &kind.to_le_bytes());
    }
    seal(&mut bytes, page_at::CRC);
    bytes
}

/// Decodes a table page of `count` entries; `None` if the page is damaged, or if it is not page
/// `index` of this device.
pub(super) fn decode_page(
    bytes: &[u8],
    device_uuid: Uuid,
    index: u32,
    count: u32,
) -> Option<(PageHeader, Vec<Entry>)> {
    if bytes.len() != PAGE_BYTES
        || bytes[page_at::MAGIC..page_at::CRC] != PAGE_MAGIC
        || !is_sealed(bytes, page_at::CRC)
        || u64::from(count) > ENTRIES_PER_PAGE
    {
        return None;
    }
    let header = PageHeader {
        generation: u64_at(bytes, page_at::GENERATION),
        device_uuid: Uuid(array_at(bytes, page_at::DEVICE_UUID)),
        index: u32_at(bytes, page_at::INDEX),
    };
    if header.device_uuid != device_uuid || header.index != index || u32_at(bytes, page_at::COUNT) != count {
        return None;
    }
    let rows = bytes[page_at::ENTRIES..].chunks_exact(entry_at::BYTES).take(count as usize);
    let entries: Option<Vec<Entry>> = rows.map(decode_entry).collect();
    Some((header, entries?))
}

fn decode_entry(bytes: &[u8]) -> Option<Entry> {
    let ring = u32_at(bytes, entry_at::RING);
    let kind = match u32_at(bytes, entry_at::KIND) {
        KIND_FREE => return Some(Entry::Free),
        KIND_DATA_VOLATILE => Kind::Volatile,
        KIND_DATA_PERSISTENT => Kind::Data { since: ring },
        KIND_RING if bytes[entry_at::COPY] < RING_COPIES_MAX => {
            Kind::Ring { number: ring, copy: bytes[entry_at::COPY] }
        }
        KIND_SWAP => Kind::Swap { of: ring },
        _ => return None,
    };
    let owner = OwnerId(u128::from_le_bytes(array_at(bytes, entry_at::OWNER)));
    Some(Entry::Owned { owner, ordinal: u32_at(bytes, entry_at::ORDINAL), kind })
}
