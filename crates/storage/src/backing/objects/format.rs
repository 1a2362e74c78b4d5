//! Encodes and decodes manifests and map pages as in docs/FORMAT.md, and the names of objects.
//!
//! Integers are little-endian. Everything that was read is validated before use: a correct checksum
//! does not make the content valid. The code that encodes and decodes objects performs no I/O.

use super::owner::Owner;
use crate::fields::{array_at, is_sealed, put, seal, u32_at, u64_at};
use crate::pool::Uuid;

const MANIFEST_MAGIC: &[u8; 8] = b"hob-objm";
const PAGE_MAGIC: &[u8; 8] = b"hob-objp";
/// Version of manifests and pages.
const VERSION: u32 = 1;

/// Number of objects that one map page describes.
pub(super) const PAGE_ENTRIES: usize = 4096;
/// Maximum number of changes that a manifest contains in addition to its pages.
pub(super) const CHANGES_MAX: usize = 2048;
/// Maximum number of objects of a disk.
pub(super) const OBJECTS_MAX: u64 = 1 << 24;
/// Smallest object, bytes.
pub(super) const OBJECT_BYTES_MIN: u64 = 64 << 10;
/// Largest object, bytes.
pub(super) const OBJECT_BYTES_MAX: u64 = 64 << 20;
/// Unit of disk sizes, bytes.
pub(super) const SIZE_UNIT: u64 = 512;

/// Offset of the checksum of a manifest or page.
const CRC_AT: usize = 0x0C;
/// Offset of a manifest's page table.
const TABLE_AT: usize = 0x100;
/// Offset of a page's entries.
const ENTRIES_AT: usize = 0x40;
/// Maximum length of a manifest, bytes. Longer manifests are not read.
pub(super) const MANIFEST_BYTES_MAX: usize =
    TABLE_AT + 8 * (OBJECTS_MAX as usize / PAGE_ENTRIES) + 16 * CHANGES_MAX;
/// Size of a map page, bytes.
pub(super) const PAGE_BYTES: usize = ENTRIES_AT + 8 * PAGE_ENTRIES;

const CLOSED: u64 = 1;
const LEFTOVERS: u64 = 2;
const STAYS: u64 = 4;

/// Bits of a generation that number the generations of one epoch.
const COUNT_BITS: u32 = 40;
/// Largest valid epoch.
pub(super) const EPOCH_MAX: u64 = (1 << (64 - COUNT_BITS)) - 1;

/// Limit of manifest numbers and generations. The limit is never reached, so there is always a next
/// number.
const NUMBER_MAX: u64 = 1 << 62;

/// Version of an object's content, different from all earlier and later versions. 0 means that
/// there is no object.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct Generation(pub(super) u64);

impl Generation {
    /// The object does not exist, and its range reads as zeroes.
    pub(super) const ABSENT: Generation = Generation(0);

    /// Returns the `count`th generation of an epoch, from 1.
    pub(super) fn new(epoch: u64, count: u64) -> Generation {
        assert!(epoch <= EPOCH_MAX && count > 0 && count < 1 << COUNT_BITS, "generations do not run out");
        Generation(epoch << COUNT_BITS | count)
    }

    /// Returns the epoch of the writer that created this version of an object.
    pub(super) fn epoch(self) -> u64 {
        self.0 >> COUNT_BITS
    }

    /// Returns the number of this generation within its epoch, from 1.
    pub(super) fn count(self) -> u64 {
        self.0 & ((1 << COUNT_BITS) - 1)
    }

    pub(super) fn is_absent(self) -> bool {
        self == Generation::ABSENT
    }

    fn is_sound(self, epoch: u64) -> bool {
        self.is_absent() || self.epoch() <= epoch && self.0 & ((1 << COUNT_BITS) - 1) != 0
    }
}

/// Properties of the disk that never change.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Shape {
    pub(super) uuid: Uuid,
    pub(super) size_bytes: u64,
    pub(super) object_bytes: u64,
}

impl Shape {
    /// Checks the properties. The error is a text for users.
    pub(super) fn check(&self) -> Result<(), String> {
        let Shape { size_bytes, object_bytes, .. } = *self;
        if !object_bytes.is_power_of_two() || !(OBJECT_BYTES_MIN..=OBJECT_BYTES_MAX).contains(&object_bytes) {
            return Err(format!(
                "the object size must be a power of two from 64 KiB to 64 MiB, not {object_bytes} bytes"
            ));
        }
        if size_bytes == 0 || !size_bytes.is_multiple_of(SIZE_UNIT) {
            return Err(format!("the size must be a positive multiple of 512 bytes, not {size_bytes} bytes"));
        }
        if size_bytes.div_ceil(object_bytes) > OBJECTS_MAX {
            return Err(format!(
                "{size_bytes} bytes are more than 2^24 objects of {object_bytes}: choose larger objects"
            ));
        }
        Ok(())
    }

    pub(super) fn objects(&self) -> u64 {
        self.size_bytes.div_ceil(self.object_bytes)
    }

    pub(super) fn pages(&self) -> usize {
        self.objects().div_ceil(PAGE_ENTRIES as u64) as usize
    }

    /// Returns the length of an object, bytes. All objects have the same length except the last.
    pub(super) fn object_len(&self, index: u64) -> usize {
        (self.size_bytes - index * self.object_bytes).min(self.object_bytes) as usize
    }
}

/// The record of one flush point, or of a change of the owner.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Manifest {
    pub(super) shape: Shape,
    pub(super) sequence: u64,
    pub(super) epoch: u64,
    /// Number of manifests that changed the disk's content.
    pub(super) content: u64,
    /// Whether the owner has closed the disk.
    pub(super) closed: bool,
    /// Whether the object store may contain unreferenced objects.
    pub(super) leftovers: bool,
    /// Whether the manifest must never be deleted, because it fences an earlier writer.
    pub(super) stays: bool,
    pub(super) owner: Owner,
    pub(super) pages: Vec<Generation>,
    /// Changed objects since the map pages were written, by index.
    pub(super) changes: Vec<(u64, Generation)>,
}

impl Manifest {
    pub(super) fn encode(&self) -> Vec<u8> {
        assert!(self.pages.len() == self.shape.pages() && self.changes.len() <= CHANGES_MAX);
        let mut bytes = vec![0; TABLE_AT + 8 * self.pages.len() + 16 * self.changes.len()];
        put(&mut bytes, 0x00, MANIFEST_MAGIC);
        put(&mut bytes, 0x08, &VERSION.to_le_bytes());
        put(&mut bytes, 0x10, &self.sequence.to_le_bytes());
        put(&mut bytes, 0x18, &self.shape.uuid.0);
        put(&mut bytes, 0x28, &self.shape.size_bytes.to_le_bytes());
        put(&mut bytes, 0x30, &self.shape.object_bytes.to_le_bytes());
        put(&mut bytes, 0x38, &self.epoch.to_le_bytes());
        put(&mut bytes, 0x40, &self.content.to_le_bytes());
        let flag = |is, bit| if is { bit } else { 0 };
        let flags = flag(self.closed, CLOSED) | flag(self.leftovers, LEFTOVERS) | flag(self.stays, STAYS);
        put(&mut bytes, 0x48, &flags.to_le_bytes());
        put(&mut bytes, 0x58, &(self.pages.len() as u32).to_le_bytes());
        put(&mut bytes, 0x5C, &(self.changes.len() as u32).to_le_bytes());
        self.owner.put(&mut bytes[0x60..TABLE_AT]);
        let words = self.pages.iter().map(|page| page.0);
        let words = words.chain(self.changes.iter().flat_map(|(index, generation)| [*index, generation.0]));
        for (at, word) in words.enumerate() {
            put(&mut bytes, TABLE_AT + 8 * at, &word.to_le_bytes());
        }
        seal(&mut bytes, CRC_AT);
        bytes
    }

    /// Decodes the manifest with the number `sequence`. The error is a text for users.
    pub(super) fn decode(bytes: &[u8], sequence: u64) -> Result<Manifest, String> {
        check(bytes, MANIFEST_MAGIC, TABLE_AT)?;
        let shape = Shape {
            uuid: Uuid(array_at(bytes, 0x18)),
            size_bytes: u64_at(bytes, 0x28),
            object_bytes: u64_at(bytes, 0x30),
        };
        shape.check()?;
        if u64_at(bytes, 0x10) != sequence {
            return Err(format!(
                "its number is {}, and its name has the number {sequence}",
                u64_at(bytes, 0x10)
            ));
        }
        if u64_at(bytes, 0x50) != 0 {
            return Err("it has features that this hob does not support: use a newer version".into());
        }
        let (epoch, flags) = (u64_at(bytes, 0x38), u64_at(bytes, 0x48));
        let (pages, changes) = (u32_at(bytes, 0x58) as usize, u32_at(bytes, 0x5C) as usize);
        let has_next = sequence.max(u64_at(bytes, 0x40)) <= NUMBER_MAX;
        if !has_next || epoch == 0 || epoch > EPOCH_MAX || pages != shape.pages() || changes > CHANGES_MAX {
            return Err("its numbers are invalid".into());
        }
        if bytes.len() != TABLE_AT + 8 * pages + 16 * changes {
            return Err(format!("its length of {} bytes is invalid", bytes.len()));
        }
        let word = |at: usize| u64_at(bytes, TABLE_AT + 8 * at);
        let manifest = Manifest {
            shape,
            sequence,
            epoch,
            content: u64_at(bytes, 0x40),
            closed: flags & CLOSED != 0,
            leftovers: flags & LEFTOVERS != 0,
            stays: flags & STAYS != 0,
            owner: Owner::take(&bytes[0x60..TABLE_AT])?,
            pages: (0..pages).map(|at| Generation(word(at))).collect(),
            changes: (0..changes)
                .map(|at| (word(pages + 2 * at), Generation(word(pages + 2 * at + 1))))
                .collect(),
        };
        let ascend = manifest.changes.is_sorted_by(|(first, _), (second, _)| first < second);
        let inside = manifest.changes.last().is_none_or(|(index, _)| *index < shape.objects());
        let generations =
            manifest.pages.iter().chain(manifest.changes.iter().map(|(_, generation)| generation));
        if !ascend || !inside || !generations.into_iter().all(|generation| generation.is_sound(epoch)) {
            return Err("its changes or generations are invalid".into());
        }
        Ok(manifest)
    }
}

/// Returns the encoded bytes of a map page.
pub(super) fn encode_page(
    shape: &Shape,
    page: usize,
    generation: Generation,
    entries: &[Generation; PAGE_ENTRIES],
) -> Vec<u8> {
    let mut bytes = vec![0; PAGE_BYTES];
    put(&mut bytes, 0x00, PAGE_MAGIC);
    put(&mut bytes, 0x08, &VERSION.to_le_bytes());
    put(&mut bytes, 0x10, &shape.uuid.0);
    put(&mut bytes, 0x20, &(page as u32).to_le_bytes());
    put(&mut bytes, 0x28, &generation.0.to_le_bytes());
    for (at, entry) in entries.iter().enumerate() {
        put(&mut bytes, ENTRIES_AT + 8 * at, &entry.0.to_le_bytes());
    }
    seal(&mut bytes, CRC_AT);
    bytes
}

/// Decodes a map page. The error is a text for users.
pub(super) fn decode_page(
    bytes: &[u8],
    shape: &Shape,
    page: usize,
    generation: Generation,
) -> Result<Box<[Generation; PAGE_ENTRIES]>, String> {
    check(bytes, PAGE_MAGIC, PAGE_BYTES)?;
    let is_it = array_at(bytes, 0x10) == shape.uuid.0
        && u32_at(bytes, 0x20) as usize == page
        && u64_at(bytes, 0x28) == generation.0;
    if !is_it || bytes.len() != PAGE_BYTES {
        return Err("it is a different page, or a page of another disk".into());
    }
    let mut entries = Box::new([Generation::ABSENT; PAGE_ENTRIES]);
    for (at, entry) in entries.iter_mut().enumerate() {
        *entry = Generation(u64_at(bytes, ENTRIES_AT + 8 * at));
        let inside = ((page * PAGE_ENTRIES + at) as u64) < shape.objects();
        if !entry.is_sound(generation.epoch()) || !inside && !entry.is_absent() {
            return Err("its generations are invalid".into());
        }
    }
    Ok(entries)
}

/// Returns true if some version of hob wrote these bytes as a manifest, and they are undamaged.
pub(super) fn is_intact_manifest(bytes: &[u8]) -> bool {
    bytes.len() >= TABLE_AT && bytes.starts_with(MANIFEST_MAGIC) && is_sealed(bytes, CRC_AT)
}

fn check(bytes: &[u8], magic: &[u8; 8], at_least: usize) -> Result<(), String> {
    if bytes.len() < at_least || !bytes.starts_with(magic) {
        return Err("hob did not write this".into());
    }
    if !is_sealed(bytes, CRC_AT) {
        return Err("it is damaged: its checksum does not match".into());
    }
    match u32_at(bytes, 0x08) {
        VERSION => Ok(()),
        newer => Err(format!("format version {newer} is unknown: use a newer version of hob")),
    }
}

/// Folders of manifests, pages and data, below the disk's prefix.
pub(super) const FOLDERS: [&str; 3] = ["manifest", "pages", "data"];

/// Name of an object of the disk, below the disk's prefix.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) enum Name {
    Manifest(u64),
    /// A map page: its number, and its generation.
    Page(u32, Generation),
    /// An object with data of the disk: its index, and its generation.
    Data(u64, Generation),
}

impl Name {
    /// Parses an object's name; `None` if it is not a name that hob uses.
    pub(super) fn parse(text: &str) -> Option<Name> {
        let hex = |text: &str, digits: usize| {
            let is_hex =
                text.len() == digits && text.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'));
            if is_hex { u64::from_str_radix(text, 16).ok() } else { None }
        };
        let (folder, name) = text.split_once('/')?;
        if folder == "manifest" {
            return hex(name, 16).map(Name::Manifest);
        }
        let (index, generation) = name.split_once('.')?;
        let (index, generation) = (hex(index, 8)?, Generation(hex(generation, 16)?));
        match folder {
            "pages" => Some(Name::Page(index as u32, generation)),
            "data" => Some(Name::Data(index, generation)),
            _ => None,
        }
    }
}

impl std::fmt::Display for Name {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Name::Manifest(sequence) => write!(f, "manifest/{sequence:016x}"),
            Name::Page(page, generation) => write!(f, "pages/{page:08x}.{:016x}", generation.0),
            Name::Data(index, generation) => write!(f, "data/{index:08x}.{:016x}", generation.0),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn manifest() -> Manifest {
        let shape = Shape { uuid: Uuid([7; 16]), size_bytes: 5000 << 16, object_bytes: 64 << 10 };
        Manifest {
            shape,
            sequence: 42,
            epoch: 3,
            content: 9,
            closed: false,
            leftovers: true,
            stays: true,
            owner: Owner::test("here", 77),
            pages: vec![Generation::new(2, 1), Generation::ABSENT],
            changes: vec![(0, Generation::new(3, 1)), (4999, Generation::ABSENT)],
        }
    }

    #[test]
    fn manifests_come_back() {
        let manifest = manifest();
        assert_eq!(Manifest::decode(&manifest.encode(), 42), Ok(manifest));
    }

    #[test]
    fn damaged_manifests_are_detected() {
        let whole = manifest().encode();
        assert!(Manifest::decode(&whole, 43).is_err());
        assert!(is_intact_manifest(&whole));
        for at in 0..whole.len() {
            let mut bytes = whole.clone();
            bytes[at] ^= 0x10;
            assert!(Manifest::decode(&bytes, 42).is_err(), "byte {at}");
            assert!(Manifest::decode(&whole[..at], 42).is_err(), "{at} bytes");
            assert!(!is_intact_manifest(&bytes) && !is_intact_manifest(&whole[..at]), "{at}");
        }
    }

    /// A correct checksum does not make the content valid.
    #[test]
    fn invalid_content_with_a_valid_checksum_is_detected() {
        let spoil = |change: &dyn Fn(&mut Vec<u8>)| {
            let mut bytes = manifest().encode();
            change(&mut bytes);
            seal(&mut bytes, CRC_AT);
            Manifest::decode(&bytes, 42)
        };
        assert!(spoil(&|_| ()).is_ok());
        for (at, word) in [
            (0x28, 0),           // no size
            (0x28, u64::MAX),    // a size that overflows
            (0x30, 0),           // no objects
            (0x30, 3 << 16),     // no power of two
            (0x38, 0),           // no epoch
            (0x38, 1),           // an epoch before its generations
            (0x40, u64::MAX),    // a content without a next one
            (0x50, 1),           // an unknown feature
            (0x58, 3 | 2 << 32), // another number of pages
            (0x58, 2 | 3 << 32), // another number of changes
            (0x58, u64::MAX),    // very many of both
            (0x100, 1),          // a generation of epoch 0 that counts, but in no order
            (0x110, 4999),       // changes that do not ascend
            (0x120, 5000),       // one past the end
        ] {
            let result = spoil(&|bytes| put(bytes, at, &u64::to_le_bytes(word)));
            if at == 0x100 {
                assert!(result.is_ok(), "epoch 0 is before every other");
            } else {
                assert!(result.is_err(), "{at:#x} = {word:#x}");
            }
        }
        assert!(spoil(&|bytes| bytes.push(0)).is_err());
        let mut newer = manifest().encode();
        put(&mut newer, 0x08, &2u32.to_le_bytes());
        seal(&mut newer, CRC_AT);
        assert!(Manifest::decode(&newer, 42).is_err());
        assert!(is_intact_manifest(&newer), "a newer version of hob wrote it");
        let last = Manifest { sequence: u64::MAX, ..manifest() };
        assert!(Manifest::decode(&last.encode(), u64::MAX).is_err(), "a manifest without a next one");
    }

    #[test]
    fn pages_come_back_and_are_bound_to_their_place() {
        let shape = manifest().shape;
        let generation = Generation::new(3, 8);
        let mut entries = [Generation::ABSENT; PAGE_ENTRIES];
        entries[903] = Generation::new(1, 5);
        let bytes = encode_page(&shape, 1, generation, &entries);
        assert_eq!(*decode_page(&bytes, &shape, 1, generation).unwrap(), entries);
        assert!(decode_page(&bytes, &shape, 0, generation).is_err());
        assert!(decode_page(&bytes, &shape, 1, Generation::new(3, 9)).is_err());
        assert!(decode_page(&bytes[..4096], &shape, 1, generation).is_err());
        let other = Shape { uuid: Uuid([8; 16]), ..shape };
        assert!(decode_page(&bytes, &other, 1, generation).is_err());
        entries[904] = Generation::new(1, 5);
        assert!(decode_page(&encode_page(&shape, 1, generation, &entries), &shape, 1, generation).is_err());
    }

    #[test]
    fn names_come_back_and_others_are_nobodys() {
        for name in [
            Name::Manifest(1),
            Name::Page(3, Generation::new(1, 2)),
            Name::Data(0xFF_FFFF, Generation::new(EPOCH_MAX, 1)),
        ] {
            assert_eq!(Name::parse(&name.to_string()), Some(name));
        }
        for text in [
            "",
            "manifest/",
            "manifest/1",
            "manifest/000000000000000G",
            "manifest/000000000000000A",
            "manifest/0000000000000001#1",
            "data/00000001",
            "data/00000001.1",
            "other/00000001.0000000000000001",
            "data/x/00000001.0000000000000001",
            "data/+0000001.0000000000000001",
        ] {
            assert_eq!(Name::parse(text), None, "{text}");
        }
    }

    #[test]
    fn impossible_shapes_are_detected() {
        let check = |size_bytes, object_bytes| {
            Shape { uuid: Uuid([0; 16]), size_bytes, object_bytes }.check().is_ok()
        };
        assert!(check(512, 4 << 20) && check(64 << 40, 4 << 20));
        assert!(!check(0, 4 << 20) && !check(513, 4 << 20) && !check(1 << 40, 32 << 10));
        assert!(!check(1 << 40, 5 << 20) && !check(1 << 40, 128 << 20));
        assert!(!check((64 << 40) + 512, 4 << 20), "too many objects");
    }
}
