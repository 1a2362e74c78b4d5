//! Encodes and decodes journal pages; docs/FORMAT.md specifies their bytes.
//!
//! [`PageBuilder`] writes a page. [`Page::read`] refuses invalid pages: it checks the magic, the
//! checksum, and then every number, so that all records and frames of a valid page are in range.
//! All integers are little-endian.

use super::crc::Crc;
use super::{CHANGES_MAX, FAILED_DEVICES_MAX, PAGE_BYTES, ZONES};
use crate::index::parts::ALL_UNITS;
use crate::units::SECTOR_BYTES;

const MAGIC: [u8; 4] = *b"hobJ";

const MAGIC_AT: usize = 0x00;
const CRC_AT: usize = 0x04;
const SEQUENCE_AT: usize = 0x08;
const CACHE_AT: usize = 0x10;
const RING_AT: usize = 0x20;
const BLOCK_SHIFT_AT: usize = 0x24;
const FLAGS_AT: usize = 0x25;
const CHANGES_AT: usize = 0x26;
const COMMITTED_AT: usize = 0x28;
const DUMP_BEGIN_AT: usize = 0x30;
const DISK_BYTES_AT: usize = 0x38;
const IDENTITY_AT: usize = 0x40;
const SEGMENT_FRAMES_AT: usize = 0x60;
const DUMP_RUNS_AT: usize = 0x64;
const DUMP_END_AT: usize = 0x68;
const FAILED_SEGMENTS_AT: usize = 0x70;
const ZONES_AT: usize = 0x80;
/// Offset of the change records in a page, bytes.
const RECORDS_AT: usize = 0x280;

pub(super) const RECORD_BYTES: usize = 16;
/// Size of the header of a run of frames in bytes.
pub(super) const RUN_BYTES: usize = 8;
/// Minimum size of the dump in each page, bytes.
pub(super) const DUMP_BYTES_MIN: usize = PAGE_BYTES - RECORDS_AT - CHANGES_MAX * RECORD_BYTES;

const FLAG_CLEAN: u8 = 1;
const SET_DIRTY: u8 = 1;
const SET_SECOND: u8 = 2;
/// Flag of a *set* record that has the units of an incomplete sector instead of a number of
/// sectors.
const SET_UNITS: u8 = 4;
const NO_BLOCK: u32 = u32::MAX;
const FRAME_VALID: u8 = 1;
const FRAME_DIRTY: u8 = 2;
const FRAME_UNPROVEN: u8 = 4;
const FRAME_SECOND: u8 = 0x80;

/// Base-2 logarithm of the number of sectors in the largest block.
pub(super) const BLOCK_SHIFT_MAX: u32 = 8;
/// Number of sectors in the largest block.
pub(super) const SECTORS_MAX: usize = 1 << BLOCK_SHIFT_MAX;

/// A set of zones, one bit each.
pub(super) type Zones = [u8; ZONES / 8];

/// Devices that failed a flush: the ordinal of one data segment on each device, plus 1. Unused entries
/// are 0.
pub(super) type FailedSegments = [u32; FAILED_DEVICES_MAX];

/// Returns the base-2 logarithm of a zone's length in bytes.
pub(super) fn zone_shift(disk_bytes: u64) -> u32 {
    disk_bytes.div_ceil(ZONES as u64).max(1 << 20).next_power_of_two().trailing_zeros()
}

/// Returns the size of a frame in a dump with all its sectors valid, bytes.
pub(super) fn frame_bytes_max(block_shift: u32) -> usize {
    let sectors = 1usize << block_shift;
    let state = if block_shift == 0 { 0 } else { 3 * sectors.div_ceil(8) };
    4 + 1 + state + 4 * sectors
}

/// Content of a journal page besides its records and its dump.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Header {
    pub(super) sequence: u64,
    pub(super) cache: [u8; 16],
    pub(super) ring: u32,
    pub(super) block_shift: u32,
    pub(super) clean: bool,
    pub(super) committed: u64,
    pub(super) dump_begin: u64,
    pub(super) dump_end: u64,
    pub(super) disk_bytes: u64,
    pub(super) identity: [u8; 32],
    pub(super) segment_frames: u32,
    pub(super) failed_segments: FailedSegments,
    pub(super) zones: Zones,
}

/// Kind of a change record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// A sector is valid. `units` are the 512-byte units of the sector that flash has
    /// (`index/parts.rs`).
    Set {
        sum: u32,
        dirty: bool,
        second: bool,
        units: u8,
    },
    Clean,
    Drop,
    Unproven,
    /// The units of an incomplete dirty sector when the page was sealed. On a page, *part* records
    /// follow the records of changes.
    Part {
        units: u8,
    },
}

/// A change record. A frame number is the ordinal of the frame's segment times the number of frames
/// per segment, plus the position in the segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Record {
    pub(super) kind: Kind,
    /// First sector inside the block.
    pub(super) first: u8,
    /// Number of sectors, 1 to 256; always 1 for a *set* or *part* record.
    pub(super) count: u16,
    pub(super) frame: u32,
    pub(super) block: u32,
}

impl Record {
    /// Returns the bytes of the record in a page.
    pub(super) fn bytes(&self) -> [u8; RECORD_BYTES] {
        let count = self.count.checked_sub(1).expect("a record has sectors") as u8;
        let (kind, flags, count, sum) = match self.kind {
            Kind::Set { sum, dirty, second, units } => {
                let flags = if dirty { SET_DIRTY } else { 0 } | if second { SET_SECOND } else { 0 };
                match units {
                    ALL_UNITS => (1, flags, count, sum),
                    _ => (1, flags | SET_UNITS, units, sum),
                }
            }
            Kind::Clean => (2, 0, count, 0),
            Kind::Drop => (3, 0, count, 0),
            Kind::Unproven => (4, 0, count, 0),
            Kind::Part { units } => (5, 0, units, 0),
        };
        let mut bytes = [0; RECORD_BYTES];
        bytes[..4].copy_from_slice(&[kind, flags, self.first, count]);
        bytes[4..8].copy_from_slice(&self.frame.to_le_bytes());
        bytes[8..12].copy_from_slice(&self.block.to_le_bytes());
        bytes[12..].copy_from_slice(&sum.to_le_bytes());
        bytes
    }

    /// Returns the first sector of the disk that the record describes.
    pub(super) fn disk_sector(&self, block_shift: u32) -> u64 {
        (u64::from(self.block) << block_shift) + u64::from(self.first)
    }

    /// Decodes a record; returns `None` if the bytes are not a valid record.
    pub(super) fn read(bytes: &[u8; RECORD_BYTES]) -> Option<Record> {
        let (flags, count) = (bytes[1], u16::from(bytes[3]) + 1);
        let (dirty, second) = (flags & SET_DIRTY != 0, flags & SET_SECOND != 0);
        let some_units = Some(bytes[3]).filter(|units| !matches!(*units, 0 | ALL_UNITS));
        let set = |units| Kind::Set { sum: u32_at(bytes, 12), dirty, second, units };
        let (kind, count) = match bytes[0] {
            1 if flags & SET_UNITS != 0 => (set(some_units.filter(|_| dirty)?), 1),
            1 if count > 1 => return None,
            1 => (set(ALL_UNITS), 1),
            2 => (Kind::Clean, count),
            3 => (Kind::Drop, count),
            4 => (Kind::Unproven, count),
            5 => (Kind::Part { units: some_units? }, 1),
            _ => return None,
        };
        Some(Record { kind, first: bytes[2], count, frame: u32_at(bytes, 4), block: u32_at(bytes, 8) })
    }
}

/// One bit for each sector of a block.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct SectorBits([u64; SECTORS_MAX / 64]);

impl SectorBits {
    pub(super) fn get(&self, sector: usize) -> bool {
        self.0[sector / 64] >> (sector % 64) & 1 == 1
    }

    pub(super) fn set(&mut self, sector: usize) {
        self.0[sector / 64] |= 1 << (sector % 64);
    }

    fn is_empty(&self) -> bool {
        self.0 == [0; SECTORS_MAX / 64]
    }

    fn is_within(&self, other: &SectorBits) -> bool {
        self.0.iter().zip(&other.0).all(|(mine, theirs)| mine & !theirs == 0)
    }

    fn byte(&self, at: usize) -> u8 {
        (self.0[at / 8] >> (at % 8 * 8)) as u8
    }

    /// Decodes the bits of a block of `sectors` sectors. Returns `None` if a bit beyond these
    /// sectors is set.
    fn read(bytes: &[u8], sectors: usize) -> Option<SectorBits> {
        let mut bits = SectorBits::default();
        for (at, byte) in bytes.iter().enumerate() {
            bits.0[at / 8] |= u64::from(*byte) << (at % 8 * 8);
        }
        let excess = if sectors < 64 { bits.0[0] >> sectors } else { 0 };
        (excess == 0).then_some(bits)
    }
}

/// State of a frame in a dump.
#[derive(Clone, Debug)]
pub(super) struct FrameState {
    pub(super) block: u32,
    pub(super) second: bool,
    pub(super) valid: SectorBits,
    pub(super) dirty: SectorBits,
    pub(super) unproven: SectorBits,
    /// Checksums of the sectors; undefined for invalid sectors.
    pub(super) sums: [u32; SECTORS_MAX],
}

impl FrameState {
    pub(super) fn new() -> FrameState {
        FrameState {
            block: NO_BLOCK,
            second: false,
            valid: SectorBits::default(),
            dirty: SectorBits::default(),
            unproven: SectorBits::default(),
            sums: [0; SECTORS_MAX],
        }
    }

    /// Resets the state to that of a frame without valid sectors.
    pub(super) fn clear(&mut self, block: u32, second: bool) {
        self.block = block;
        self.second = second;
        self.valid = SectorBits::default();
        self.dirty = SectorBits::default();
        self.unproven = SectorBits::default();
    }

    pub(super) fn is_empty(&self) -> bool {
        self.block == NO_BLOCK || self.valid.is_empty()
    }

    /// Returns true if any sector is dirty.
    pub(super) fn has_dirty(&self) -> bool {
        !self.dirty.is_empty()
    }

    /// Returns true if all valid sectors are below `sectors`.
    fn ends_within(&self, sectors: u16) -> bool {
        let word = |at: u16| match sectors.saturating_sub(64 * at) {
            0 => 0,
            64.. => u64::MAX,
            some => (1 << some) - 1,
        };
        self.valid.is_within(&SectorBits([word(0), word(1), word(2), word(3)]))
    }

    /// Appends the frame's bytes to `out`.
    fn write(&self, block_shift: u32, out: &mut Vec<u8>) {
        if self.is_empty() {
            out.extend(NO_BLOCK.to_le_bytes());
            return;
        }
        out.extend(self.block.to_le_bytes());
        let second = if self.second { FRAME_SECOND } else { 0 };
        let sectors = 1usize << block_shift;
        if block_shift == 0 {
            let dirty = if self.dirty.get(0) { FRAME_DIRTY } else { 0 };
            let unproven = if self.unproven.get(0) { FRAME_UNPROVEN } else { 0 };
            out.push(second | FRAME_VALID | dirty | unproven);
        } else {
            out.push(second);
            for bits in [&self.valid, &self.dirty, &self.unproven] {
                out.extend((0..sectors.div_ceil(8)).map(|at| bits.byte(at)));
            }
        }
        for sector in (0..sectors).filter(|sector| self.valid.get(*sector)) {
            out.extend(self.sums[sector].to_le_bytes());
        }
    }

    /// Decodes a frame. Returns its length in bytes, or `None` if it is malformed.
    fn read(&mut self, bytes: &[u8], block_shift: u32) -> Option<usize> {
        let block = u32::from_le_bytes(*bytes.first_chunk()?);
        self.clear(block, false);
        if block == NO_BLOCK {
            return Some(4);
        }
        let flags = *bytes.get(4)?;
        self.second = flags & FRAME_SECOND != 0;
        if block_shift == 0 {
            return self.read_single(flags, &bytes[5..]);
        }
        let mut at = 5;
        let sectors = 1usize << block_shift;
        let len = sectors.div_ceil(8);
        for bits in [&mut self.valid, &mut self.dirty, &mut self.unproven] {
            *bits = SectorBits::read(bytes.get(at..at + len)?, sectors)?;
            at += len;
        }
        if !self.dirty.is_within(&self.valid) || !self.unproven.is_within(&self.dirty) {
            return None;
        }
        for sector in 0..sectors {
            if self.valid.get(sector) {
                self.sums[sector] = u32::from_le_bytes(*bytes.get(at..)?.first_chunk()?);
                at += 4;
            }
        }
        Some(at)
    }

    /// Decodes the rest of a frame that has one sector. This function is a fast path, because a
    /// dump can have millions of such frames.
    fn read_single(&mut self, flags: u8, rest: &[u8]) -> Option<usize> {
        let bit = |mask| u64::from(flags & mask != 0);
        let (valid, dirty, unproven) = (bit(FRAME_VALID), bit(FRAME_DIRTY), bit(FRAME_UNPROVEN));
        if dirty > valid || unproven > dirty {
            return None;
        }
        (self.valid.0[0], self.dirty.0[0], self.unproven.0[0]) = (valid, dirty, unproven);
        if valid == 0 {
            return Some(5);
        }
        self.sums[0] = u32::from_le_bytes(*rest.first_chunk()?);
        Some(9)
    }
}

/// A journal page that passed all checks.
#[derive(Debug)]
pub(super) struct Page<'a> {
    pub(super) header: Header,
    bytes: &'a [u8],
    pub(super) crc: u32,
    changes: usize,
    runs: usize,
}

impl<'a> Page<'a> {
    /// Decodes a page. Returns `None` if the page is malformed. During the checks, callbacks report
    /// the first frame of each run, and all frames of the dump. The page may turn out to be invalid
    /// after these reports.
    pub(super) fn read(
        bytes: &'a [u8],
        run: impl FnMut(u32),
        frame: impl FnMut(u32, &FrameState),
    ) -> Option<Page<'a>> {
        let crc = Page::sound_checksum(bytes)?;
        let header = Header::read(bytes)?;
        let changes = usize::from(u16_at(bytes, CHANGES_AT));
        let runs = usize::from(u16_at(bytes, DUMP_RUNS_AT));
        if changes > CHANGES_MAX {
            return None;
        }
        let page = Page { header, bytes, crc, changes, runs };
        page.walk_records(|_| ())?;
        page.walk_dump(&mut FrameState::new(), run, frame)?;
        Some(page)
    }

    /// Returns the page's checksum if its length, magic and checksum are correct.
    pub(super) fn sound_checksum(bytes: &[u8]) -> Option<u32> {
        if bytes.len() != PAGE_BYTES || bytes[MAGIC_AT..][..4] != MAGIC {
            return None;
        }
        let crc = u32_at(bytes, CRC_AT);
        (crc == checksum(bytes)).then_some(crc)
    }

    /// Calls `each` with the change records, in order.
    pub(super) fn records(&self, each: impl FnMut(Record)) {
        self.walk_records(each).expect("`Page::read` checked the records");
    }

    /// Calls `each` with the dumped frames, in order.
    pub(super) fn dump(&self, state: &mut FrameState, each: impl FnMut(u32, &FrameState)) {
        self.walk_dump(state, |_| (), each).expect("`Page::read` checked the dump");
    }

    fn walk_records(&self, mut each: impl FnMut(Record)) -> Option<()> {
        let (records, _) = self.bytes[RECORDS_AT..].as_chunks::<RECORD_BYTES>();
        for bytes in &records[..self.changes] {
            let record = Record::read(bytes)?;
            if u16::from(record.first) + record.count > self.header.sectors_of(record.block) {
                return None;
            }
            each(record);
        }
        Some(())
    }

    fn walk_dump(
        &self,
        state: &mut FrameState,
        mut run_begins: impl FnMut(u32),
        mut each: impl FnMut(u32, &FrameState),
    ) -> Option<()> {
        let mut rest = &self.bytes[RECORDS_AT + self.changes * RECORD_BYTES..];
        let segment_frames = self.header.segment_frames;
        for _ in 0..self.runs {
            let (run, frames) = rest.split_first_chunk::<RUN_BYTES>()?;
            let (first, count) = (u32_at(run, 0), u32_at(run, 4));
            if count == 0 || count > segment_frames - first % segment_frames {
                return None;
            }
            rest = frames;
            run_begins(first);
            for i in 0..count {
                let len = state.read(rest, self.header.block_shift)?;
                rest = rest.get(len..)?;
                if state.block != NO_BLOCK {
                    let sectors = self.header.sectors_of(state.block);
                    if sectors >> self.header.block_shift == 0 && !state.ends_within(sectors) {
                        return None;
                    }
                }
                each(first + i, state);
            }
        }
        Some(())
    }
}

impl Header {
    fn read(bytes: &[u8]) -> Option<Header> {
        let header = Header {
            sequence: u64_at(bytes, SEQUENCE_AT),
            cache: *bytes[CACHE_AT..].first_chunk()?,
            ring: u32_at(bytes, RING_AT),
            block_shift: u32::from(bytes[BLOCK_SHIFT_AT]),
            clean: bytes[FLAGS_AT] & FLAG_CLEAN != 0,
            committed: u64_at(bytes, COMMITTED_AT),
            dump_begin: u64_at(bytes, DUMP_BEGIN_AT),
            dump_end: u64_at(bytes, DUMP_END_AT),
            disk_bytes: u64_at(bytes, DISK_BYTES_AT),
            identity: *bytes[IDENTITY_AT..].first_chunk()?,
            segment_frames: u32_at(bytes, SEGMENT_FRAMES_AT),
            failed_segments: std::array::from_fn(|i| u32_at(bytes, FAILED_SEGMENTS_AT + 4 * i)),
            zones: *bytes[ZONES_AT..].first_chunk()?,
        };
        // A page names no dump, or a dump that ends at or before the committed sequence number.
        let in_order = match header.dump_begin {
            0 => header.dump_end == 0 && header.committed == 0 && header.sequence > 0,
            begin => begin <= header.dump_end && header.dump_end <= header.committed,
        };
        let blocks = || header.disk_bytes.div_ceil(SECTOR_BYTES << header.block_shift);
        let sound = in_order
            && (header.dump_begin == 0 || header.committed < header.sequence)
            && header.block_shift <= BLOCK_SHIFT_MAX
            && (1..1 << 32).contains(&blocks())
            && header.segment_frames.is_power_of_two();
        sound.then_some(header)
    }

    /// Returns the number of a block's sectors that lie on the disk.
    fn sectors_of(&self, block: u32) -> u16 {
        sectors_of_block(self.disk_bytes, self.block_shift, block)
    }
}

/// Returns the number of a block's sectors that lie on a disk.
pub(super) fn sectors_of_block(disk_bytes: u64, block_shift: u32, block: u32) -> u16 {
    let sectors = disk_bytes.div_ceil(SECTOR_BYTES);
    let before = u64::from(block) << block_shift;
    sectors.saturating_sub(before).min(1 << block_shift) as u16
}

fn u16_at(bytes: &[u8], at: usize) -> u16 {
    u16::from_le_bytes([bytes[at], bytes[at + 1]])
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(bytes[at..][..4].try_into().expect("four bytes"))
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(bytes[at..][..8].try_into().expect("eight bytes"))
}

/// A page that is being written at the end of a vector.
pub(super) struct PageBuilder<'a> {
    out: &'a mut Vec<u8>,
    start: usize,
    block_shift: u32,
    changes: u16,
    runs: u16,
    /// Run of frames that is being written: start in the page, next frame, and length.
    run: Option<(usize, u32, u32)>,
    segment_frames: u32,
}

impl<'a> PageBuilder<'a> {
    pub(super) fn new(header: &Header, out: &'a mut Vec<u8>) -> PageBuilder<'a> {
        let start = out.len();
        out.resize(start + RECORDS_AT, 0);
        let page = &mut out[start..];
        page[MAGIC_AT..][..4].copy_from_slice(&MAGIC);
        page[SEQUENCE_AT..][..8].copy_from_slice(&header.sequence.to_le_bytes());
        page[CACHE_AT..][..16].copy_from_slice(&header.cache);
        page[RING_AT..][..4].copy_from_slice(&header.ring.to_le_bytes());
        page[BLOCK_SHIFT_AT] = header.block_shift as u8;
        page[FLAGS_AT] = if header.clean { FLAG_CLEAN } else { 0 };
        page[COMMITTED_AT..][..8].copy_from_slice(&header.committed.to_le_bytes());
        page[DUMP_BEGIN_AT..][..8].copy_from_slice(&header.dump_begin.to_le_bytes());
        page[DUMP_END_AT..][..8].copy_from_slice(&header.dump_end.to_le_bytes());
        page[DISK_BYTES_AT..][..8].copy_from_slice(&header.disk_bytes.to_le_bytes());
        page[IDENTITY_AT..][..32].copy_from_slice(&header.identity);
        page[SEGMENT_FRAMES_AT..][..4].copy_from_slice(&header.segment_frames.to_le_bytes());
        for (i, segment) in header.failed_segments.iter().enumerate() {
            page[FAILED_SEGMENTS_AT + 4 * i..][..4].copy_from_slice(&segment.to_le_bytes());
        }
        page[ZONES_AT..][..ZONES / 8].copy_from_slice(&header.zones);
        let (block_shift, segment_frames) = (header.block_shift, header.segment_frames);
        PageBuilder { out, start, block_shift, changes: 0, runs: 0, run: None, segment_frames }
    }

    /// Adds a record; all records come before the first frame.
    pub(super) fn record(&mut self, record: &Record) {
        assert!(usize::from(self.changes) < CHANGES_MAX && self.runs == 0, "records come first");
        self.changes += 1;
        self.out.extend(record.bytes());
    }

    /// Adds a frame to the dump; returns false if there is no room.
    pub(super) fn frame(&mut self, number: u32, state: &FrameState) -> bool {
        let before = self.out.len();
        let run = match self.run {
            Some((at, next, count)) if next == number && !number.is_multiple_of(self.segment_frames) => {
                (at, number.wrapping_add(1), count + 1)
            }
            _ => {
                self.out.extend(number.to_le_bytes());
                self.out.extend([0; 4]);
                (before, number.wrapping_add(1), 1)
            }
        };
        state.write(self.block_shift, self.out);
        if self.out.len() - self.start > PAGE_BYTES {
            self.out.truncate(before);
            return false;
        }
        if run.0 == before {
            self.runs += 1;
        }
        self.out[run.0 + 4..][..4].copy_from_slice(&run.2.to_le_bytes());
        self.run = Some(run);
        true
    }

    /// Pads the page and adds its checksum.
    pub(super) fn finish(self) {
        self.out.resize(self.start + PAGE_BYTES, 0);
        let page = &mut self.out[self.start..];
        page[CHANGES_AT..][..2].copy_from_slice(&self.changes.to_le_bytes());
        page[DUMP_RUNS_AT..][..2].copy_from_slice(&self.runs.to_le_bytes());
        let crc = checksum(page);
        page[CRC_AT..][..4].copy_from_slice(&crc.to_le_bytes());
    }
}

/// Gives a fuzzer's bytes the correct magic, cache id, ring number 3 and checksum of a page.
pub(super) fn seal_bytes(page: &mut [u8; PAGE_BYTES], cache: &[u8; 16]) {
    page[MAGIC_AT..][..4].copy_from_slice(&MAGIC);
    page[CACHE_AT..][..16].copy_from_slice(cache);
    page[RING_AT..][..4].copy_from_slice(&3u32.to_le_bytes());
    let crc = checksum(page);
    page[CRC_AT..][..4].copy_from_slice(&crc.to_le_bytes());
}

/// Returns the checksum of a page. The bytes of the checksum field count as zeroes.
fn checksum(page: &[u8]) -> u32 {
    Crc::new().add(&page[..CRC_AT]).add(&[0; 4]).add(&page[CRC_AT + 4..]).finish()
}
