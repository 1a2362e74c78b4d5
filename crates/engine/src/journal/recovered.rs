//! A cache that was recovered from its journal, with queries and changes before its use.

use super::format::SECTORS_MAX;
use crate::index::Index;
use crate::index::parts::unit_runs;
use crate::regions::Regions;
use crate::units::{FrameNo, SECTOR_BYTES};

/// A cache recovered from its journal: its index, and its summary.
#[derive(Clone, Debug)]
pub struct Recovered {
    pub(crate) index: Index,
    /// Dirty cache sectors that the journal does not record as durable.
    pub(super) tail: Vec<u64>,
    pub(super) parted: Vec<u64>,
    /// One segment of each device that failed a flush, as an index into the ordinals that
    /// [`Replay`](super::Replay) was given.
    pub(crate) failed_segments: Vec<u32>,
    /// State of the journal, and counts of what the recovery found.
    pub summary: Summary,
    pub(super) block_shift: u32,
    pub(super) segment_frames: u32,
}

/// State of a recovered journal, and counts of what the recovery found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Summary {
    /// Number of the journal ring.
    pub ring: u32,
    /// True if the cache was closed cleanly.
    pub clean: bool,
    /// True if a crash log continued the journal, and has no missing entry. Without such a crash
    /// log, unflushed writes may be lost if the process was killed.
    pub is_logged: bool,
    /// Number of valid sectors.
    pub sectors_valid: u64,
    /// Number of dirty sectors.
    pub sectors_dirty: u64,
    /// Number of sectors whose last write before the crash did not completely reach flash, and was
    /// not flushed.
    pub sectors_undone: u64,
    /// Number of sectors whose two copies differed and for which no commit shows which copy is
    /// correct. For each of these sectors, recovery has chosen one of the copies.
    pub sectors_parted: u64,
    /// Number of clean sectors that were dropped, because writes to the backing near them may have
    /// been in progress.
    pub sectors_distrusted: u64,
    /// Number of dirty sectors in missing segments. Their data is lost unless the segments return.
    pub sectors_missing: u64,
    /// Size of the cached disk in bytes.
    pub disk_bytes: u64,
    /// The daemon's identifier of the backing.
    pub identity: [u8; 32],
    /// Size of a cache block in bytes.
    pub block_bytes: u32,
}

/// A dirty sector of a recovered cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DirtySector {
    /// Number of the sector on the disk.
    pub sector: u64,
    /// Position of the first copy on flash.
    pub place: FlashSector,
    /// Position of the second copy on flash, if there is a second copy.
    pub second: Option<FlashSector>,
    /// The 512-byte units that flash has of the sector: bit *n* for the bytes from 512 *n* on. The
    /// other bytes on flash have no meaning; the backing has them.
    pub units: u8,
}

/// Position of a sector on flash.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FlashSector {
    /// Segment, as an index into the ordinals that [`Replay`](super::Replay) was given.
    pub segment: u32,
    /// Sector in the segment.
    pub sector: u64,
    /// CRC-32C of the sector, if it is known.
    pub sum: Option<u32>,
}

impl DirtySector {
    /// Returns the parts of the sector, in bytes from its start, that flash has.
    pub fn dirty_bytes(&self) -> impl Iterator<Item = std::ops::Range<u64>> + use<> {
        unit_runs(self.units)
    }
}

impl Recovered {
    /// Returns up to `count` clean sectors of the disk and their checksums, spread evenly over the
    /// cache.
    pub fn samples(&self, count: usize) -> Vec<(u64, u32)> {
        let is_clean = |sector: &u64| self.index.is_valid(*sector) && !self.index.is_dirty(*sector);
        let clean = || {
            let frames = (0..self.index.frames()).map(FrameNo);
            let firsts = frames.filter(|frame| self.index.first_of(*frame).is_none());
            firsts.flat_map(|frame| self.sectors(frame)).filter(is_clean)
        };
        let total = clean().count();
        let wanted = count.min(total);
        // Returns true at the first position of each of `wanted` equal parts.
        let begins_part = |i: usize| (i as u128 * wanted as u128) / total as u128;
        clean()
            .enumerate()
            .filter(|(i, _)| wanted > 0 && (*i == 0 || begins_part(*i) != begins_part(*i - 1)))
            .map(|(_, sector)| (self.disk_sector(sector), self.index.sum(sector)))
            .collect()
    }

    /// Returns the dirty sectors, in the order of their positions on the disk.
    pub fn dirty(&self) -> impl Iterator<Item = DirtySector> + use<'_> {
        let is_dirty =
            |frame: &FrameNo| self.index.count_dirty(self.index.first_sector(*frame), self.per_block()) > 0;
        let mut firsts: Vec<FrameNo> = (0..self.index.frames())
            .map(FrameNo)
            .filter(is_dirty)
            .map(|frame| self.index.first_of(frame).unwrap_or(frame))
            .collect();
        firsts.sort_unstable_by_key(|frame| (self.index.block(*frame), *frame));
        firsts.dedup();
        firsts.into_iter().flat_map(move |frame| {
            (0..self.per_block()).filter_map(move |i| {
                let place = |frame| self.flash_sector(self.index.first_sector(frame) + i);
                let copies = [Some(frame), self.index.second_of(frame)];
                let mut places = copies.into_iter().flatten().filter_map(place);
                let sector = self.disk_sector(self.index.first_sector(frame) + i);
                let units = self.index.units(self.index.first_sector(frame) + i);
                Some(DirtySector { sector, place: places.next()?, second: places.next(), units })
            })
        })
    }

    /// Returns the dirty sectors of the disk whose two copies differed and for which no commit
    /// shows which copy is correct. Recovery chose one of the copies, which is the wrong one if its
    /// device damaged the data.
    pub fn parted(&self) -> &[u64] {
        &self.parted
    }

    /// Removes and returns the dirty cache sectors that flash may lose at a power failure.
    pub(crate) fn take_tail(&mut self) -> Vec<u64> {
        std::mem::take(&mut self.tail)
    }

    /// Drops all clean sectors.
    pub fn drop_clean(&mut self) {
        self.index.retain(|_, dirty| dirty);
        self.count();
    }

    /// Marks clean sectors as unverified, because the backing may have changed. Unverified sectors
    /// are served only after a comparison with the backing.
    pub fn distrust_clean(&mut self) {
        self.index.distrust_clean();
        self.count();
    }

    /// Returns the number of sectors that must be compared with the backing.
    pub fn sectors_unverified(&self) -> u64 {
        self.index.unverified_sectors()
    }

    /// Drops all sectors in these regions of the disk.
    pub fn drop_regions(&mut self, regions: &Regions) {
        self.index.retain(|sector, _| !regions.contains(sector));
        self.count();
    }

    /// Adapts the index to a disk that has grown to `disk_bytes`, so that a cache of the new size
    /// can use it. A partial sector at the old end is dropped, because the backing has its data.
    pub fn grow(&mut self, disk_bytes: u64) {
        let before = std::mem::replace(&mut self.summary.disk_bytes, disk_bytes);
        assert!(before <= disk_bytes, "disks do not shrink");
        if before < disk_bytes && !before.is_multiple_of(SECTOR_BYTES) {
            let end = before / SECTOR_BYTES;
            self.index.retain(|sector, _| sector != end);
            self.count();
        }
    }

    /// Drops all dirty sectors, so that acknowledged writes are lost.
    pub fn discard_dirty(&mut self) {
        self.index.retain(|_, dirty| !dirty);
        self.count();
    }

    fn count(&mut self) {
        self.summary.sectors_valid = self.index.sectors_valid();
        self.summary.sectors_dirty = self.index.dirty_sectors();
    }

    fn per_block(&self) -> u64 {
        1 << self.block_shift
    }

    fn sectors(&self, frame: FrameNo) -> std::ops::Range<u64> {
        debug_assert!(self.per_block() <= SECTORS_MAX as u64);
        let first = self.index.first_sector(frame);
        first..first + self.per_block()
    }

    /// Returns the disk sector of a used cache sector.
    fn disk_sector(&self, sector: u64) -> u64 {
        let block = self.index.block(FrameNo((sector >> self.block_shift) as u32));
        (u64::from(block.0) << self.block_shift) + sector % self.per_block()
    }

    /// Returns the position of a cache sector, if it is dirty.
    fn flash_sector(&self, sector: u64) -> Option<FlashSector> {
        let per_segment = u64::from(self.segment_frames) << self.block_shift;
        self.index.is_dirty(sector).then(|| FlashSector {
            segment: (sector / per_segment) as u32,
            sector: sector % per_segment,
            sum: (!self.index.is_sum_unknown(sector)).then(|| self.index.sum(sector)),
        })
    }
}
