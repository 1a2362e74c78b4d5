//! One disk's cache on flash: its [`Directory`], and the positions of its frames on flash. A frame
//! is the place of one block. The directory decides which block is in which frame. The cache's
//! segments determine the device and offset of each frame.

use std::collections::BTreeSet;
use std::ops::{Deref, DerefMut};

use crate::admission::Admission;
use crate::command::{CacheConfig, CommandError, Copies, DataSegment, Destage, Layout, Mode};
use crate::directory::{Directory, Refusal};
use crate::granularity::Fill;
use crate::index::{Leaving, SegmentPlaces};
use crate::policy::PolicyKind;
use crate::units::{BLOCK_BYTES_MAX, BLOCK_BYTES_MIN, BlockNo, DeviceId, FrameNo, SECTOR_BYTES};

/// A range of cache sectors that is contiguous on flash. Cache sectors are numbered through all
/// frames, as in [`Index::first_sector`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Extent {
    pub(crate) sector: u64,
    pub(crate) count: u64,
    pub(crate) device: DeviceId,
    /// Byte offset on the device.
    pub(crate) offset: u64,
}

/// An extent on flash, and the sector of the request's buffer that corresponds to its start.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct FlashRun {
    pub(crate) extent: Extent,
    pub(crate) buffer_sector: u64,
}

/// Appends an extent to a list of runs. If the extent continues the last run on flash and in the
/// buffer, that run is extended instead.
#[inline]
pub(crate) fn push_run(runs: &mut Vec<FlashRun>, extent: Extent, buffer_sector: u64) {
    if let Some(FlashRun { extent: last, buffer_sector: start }) = runs.last_mut()
        && last.sector + last.count == extent.sector
        && last.device == extent.device
        && last.offset + last.count * SECTOR_BYTES == extent.offset
        && *start + last.count == buffer_sector
    {
        last.count += extent.count;
    } else {
        runs.push(FlashRun { extent, buffer_sector });
    }
}

pub(crate) struct Cache {
    pub(crate) config: CacheConfig,
    pub(crate) segments: Vec<DataSegment>,
    directory: Directory,
    segment_shift: u32,
    /// Number of segments for first copies (`firsts`), and number of segments for second copies
    /// only (`seconds`). Segments that are being vacated are not counted.
    firsts: usize,
    seconds: usize,
    /// Segments that the cache will release soon, in ascending order.
    leaving: Vec<DataSegment>,
}

impl Deref for Cache {
    type Target = Directory;
    #[inline]
    fn deref(&self) -> &Directory {
        &self.directory
    }
}

impl DerefMut for Cache {
    #[inline]
    fn deref_mut(&mut self) -> &mut Directory {
        &mut self.directory
    }
}

impl Cache {
    /// Creates an empty cache for a disk of `disk_bytes`.
    pub(crate) fn new(
        config: CacheConfig,
        segments: Vec<DataSegment>,
        disk_bytes: u64,
    ) -> Result<Cache, CommandError> {
        let block_bytes = u64::from(config.block_bytes);
        let workable = block_bytes.is_power_of_two()
            && (BLOCK_BYTES_MIN..=BLOCK_BYTES_MAX).contains(&block_bytes)
            && config.segment_bytes.is_power_of_two()
            && config.segment_bytes >= block_bytes
            && disk_bytes.div_ceil(block_bytes) <= 1 << 32;
        if segments.is_empty() {
            return Err(CommandError::TooSmall);
        }
        let frames = (segments.len() as u64).checked_mul(config.segment_bytes / block_bytes.max(1));
        match frames {
            Some(frames) if workable && frames < u64::from(u32::MAX) => {
                let block_shift = (block_bytes / SECTOR_BYTES).ilog2();
                let mut cache = Cache {
                    directory: Directory::new(frames as u32, block_shift, config.policy, config.admission),
                    segment_shift: (config.segment_bytes / SECTOR_BYTES).ilog2(),
                    config,
                    firsts: 0,
                    seconds: 0,
                    segments,
                    leaving: Vec::new(),
                };
                cache.directory.set_fill(config.fill);
                cache.count_segments();
                cache.set_places();
                Ok(cache)
            }
            _ => Err(CommandError::Unworkable),
        }
    }

    /// Evicts clean blocks until a read can insert a block without exceeding the read cache's
    /// share. Applies only to a cache with the layout `split`. Returns the number of evicted
    /// blocks.
    #[inline]
    pub(crate) fn keep_to_read_share(&mut self, is_busy: impl Fn(u64, u64) -> bool) -> Result<u64, Refusal> {
        let Layout::Split { read_permille } = self.config.layout else { return Ok(0) };
        let share = (self.first_sectors() >> self.block_shift()) * u64::from(read_permille) / 1000;
        let mut dirty = self.index.dirty_sectors().div_ceil(1 << self.block_shift());
        if self.config.copies == Copies::Peer {
            // Second copies do not count against the read cache's share.
            dirty += self.index.seconds();
        }
        let mut gone = 0;
        while self.index.blocks_holding_data() - dirty.min(self.index.blocks_holding_data()) >= share.max(1) {
            if self.only_while_free() {
                return Err(Refusal::NoBlock);
            }
            match self.evict(&is_busy) {
                Some(evicted) => gone += evicted,
                None => break,
            }
        }
        Ok(gone)
    }

    /// Changes settings of the cache that do not affect its contents.
    pub(crate) fn tune(&mut self, mode: Mode, destage: Destage, copies: Copies) {
        (self.config.mode, self.config.destage, self.config.copies) = (mode, destage, copies);
        self.set_places();
    }

    /// Changes policy and admission, and keeps the contents. Takes time proportional to the number
    /// of blocks.
    pub(crate) fn replace(&mut self, policy: PolicyKind, admission: Admission) {
        if (self.config.policy, self.config.admission) != (policy, admission) {
            (self.config.policy, self.config.admission) = (policy, admission);
            self.directory.set_combination(policy, admission);
        }
    }

    /// Changes the fill granularity, and keeps the contents.
    pub(crate) fn set_fill(&mut self, fill: Fill) {
        self.config.fill = fill;
        self.directory.set_fill(fill);
    }

    /// Replaces the empty index by a recovered index of the same size.
    pub(crate) fn restore(&mut self, index: crate::index::Index) {
        self.directory.restore(index);
        self.set_places();
    }

    fn count_segments(&mut self) {
        let stays = |segment: &&DataSegment| self.leaving.binary_search(segment).is_err();
        let staying = self.segments.iter().filter(stays);
        let (seconds, firsts): (Vec<&DataSegment>, Vec<_>) =
            staying.partition(|segment| segment.seconds_only);
        (self.firsts, self.seconds) = (firsts.len(), seconds.len());
    }

    /// Returns the segments that are being vacated.
    pub(crate) fn leaving(&self) -> &[DataSegment] {
        &self.leaving
    }

    /// Marks these segments as being vacated, so that new dirty data goes to other segments. An
    /// empty list means that no segment is being vacated.
    pub(crate) fn set_leaving(&mut self, mut leaving: Vec<DataSegment>) {
        leaving.sort_unstable();
        self.leaving = leaving;
        self.count_segments();
        let segments: Vec<bool> =
            self.segments.iter().map(|segment| self.leaving.binary_search(segment).is_ok()).collect();
        let frame_shift = self.segment_shift - self.block_shift();
        let leaving =
            (!self.leaving.is_empty()).then_some(Leaving { segments, frame_shift, is_all: self.firsts == 0 });
        self.directory.index.set_leaving(leaving);
    }

    /// Returns the segments that the cache releases if it must release `count` segments. If exactly
    /// `count` segments are being vacated, the result is these segments. Otherwise, the result is
    /// the emptiest segments.
    pub(crate) fn segments_to_give(&self, count: usize) -> Vec<DataSegment> {
        if self.leaving.len() == count { self.leaving.clone() } else { self.emptiest_segments(count) }
    }

    /// Returns true if a sector must be moved, because it is dirty and readable and its segment is
    /// being vacated. `lost` contains the unreadable sectors.
    fn is_to_leave(&self, sector: u64, lost: &BTreeSet<u64>) -> bool {
        self.index.is_dirty(sector) && !lost.contains(&self.index.of_second(sector).unwrap_or(sector))
    }

    /// Returns true if the block has readable dirty sectors in a segment that is being vacated.
    pub(crate) fn block_is_to_leave(&self, block: BlockNo, lost: &BTreeSet<u64>) -> bool {
        let Some(frame) = self.index.find(block) else { return false };
        let frames = [Some(frame), self.index.second_of(frame)];
        frames.into_iter().flatten().filter(|frame| self.index.is_leaving(*frame)).any(|frame| {
            let first = self.index.first_sector(frame);
            (first..first + (1 << self.block_shift())).any(|sector| self.is_to_leave(sector, lost))
        })
    }

    /// Returns all blocks with readable dirty sectors in segments that are being vacated. Takes
    /// time proportional to the sectors of these segments.
    pub(crate) fn blocks_to_leave(&self, lost: &BTreeSet<u64>) -> BTreeSet<BlockNo> {
        let mut blocks = BTreeSet::new();
        for (i, segment) in self.segments.iter().enumerate() {
            if self.leaving.binary_search(segment).is_ok() {
                let first = (i as u64) << self.segment_shift;
                let dirty = self.index.dirty_in(first, first + (1 << self.segment_shift));
                blocks.extend(
                    dirty.filter(|sector| self.is_to_leave(*sector, lost)).map(|at| self.index.locate(at).1),
                );
            }
        }
        blocks
    }

    /// Returns true if these segments have dirty data that has no valid copy in other segments.
    pub(crate) fn would_lose_dirty(&self, leaving: &[DataSegment]) -> bool {
        let leaves = self.is_in(leaving);
        self.index.all_dirty().into_iter().any(|sector| {
            if self.index.of_second(sector).is_some() || !leaves(sector) {
                return false;
            }
            let other = self.index.second_sector(sector).filter(|other| self.index.is_valid(*other));
            other.is_none_or(&leaves)
        })
    }

    /// Returns true if these segments hold first or second copies of dirty data.
    pub(crate) fn has_dirty(&self, segments: &[DataSegment]) -> bool {
        let is_there = self.is_in(segments);
        self.index.all_dirty().into_iter().any(is_there)
    }

    /// Returns the devices that hold first or second copies of dirty data.
    pub(crate) fn dirty_devices(&self) -> BTreeSet<DeviceId> {
        let shift = self.segment_shift;
        let device = |sector: u64| self.segments[(sector >> shift) as usize].place.device;
        self.index.all_dirty().into_iter().map(device).collect()
    }

    /// Returns a function that tests whether a cache sector is in one of these segments.
    fn is_in(&self, segments: &[DataSegment]) -> impl Fn(u64) -> bool {
        let there: Vec<bool> = self.segments.iter().map(|segment| segments.contains(segment)).collect();
        let shift = self.segment_shift;
        move |sector| there[(sector >> shift) as usize]
    }

    /// Tells the index on which device each segment is, if the cache has second copies. Also tells
    /// the index which segments are for second copies only.
    fn set_places(&mut self) {
        let key = |segment: &DataSegment| (segment.seconds_only, segment.place.device);
        let mut devices: Vec<(bool, DeviceId)> = self.segments.iter().map(key).collect();
        devices.sort_unstable();
        devices.dedup();
        let firsts = devices.iter().filter(|(seconds_only, _)| !seconds_only).count();
        let apart = self.config.copies == Copies::Peer;
        let matters = apart || firsts < devices.len() || self.config.copies != Copies::One && firsts > 1;
        if !matters || devices.len() > 256 {
            return;
        }
        let place =
            |segment: &DataSegment| devices.binary_search(&key(segment)).expect("it is among them") as u8;
        let places = SegmentPlaces {
            of_segments: self.segments.iter().map(place).collect(),
            frame_shift: self.segment_shift - self.block_shift(),
            count: devices.len(),
            firsts,
            apart,
        };
        self.directory.index.set_places(places);
    }

    /// Returns the number of sectors in segments for first copies.
    pub(crate) fn first_sectors(&self) -> u64 {
        (self.firsts as u64) << self.segment_shift
    }

    /// Returns the number of sectors in segments for second copies only.
    pub(crate) fn second_sectors(&self) -> u64 {
        (self.seconds as u64) << self.segment_shift
    }

    /// Returns the memory use that depends on the size of the cache, bytes.
    pub(crate) fn bytes(&self) -> u64 {
        self.directory.bytes() + std::mem::size_of_val(self.segments.as_slice()) as u64
    }

    /// Returns the contiguous range of flash that holds `count` cache sectors from `sector` on. The
    /// range is shorter if the segment ends earlier.
    #[inline]
    pub(crate) fn extent(&self, sector: u64, count: u64) -> Extent {
        let segment = self.segments[(sector >> self.segment_shift) as usize].place;
        let inside = sector & ((1 << self.segment_shift) - 1);
        Extent {
            sector,
            count: count.min((1 << self.segment_shift) - inside),
            device: segment.device,
            offset: segment.offset + inside * SECTOR_BYTES,
        }
    }

    /// Returns true if part of the cache is on this device.
    pub(crate) fn is_on(&self, device: DeviceId) -> bool {
        self.segments.iter().any(|segment| segment.place.device == device)
    }

    /// Returns the `count` segments with the fewest blocks. Among segments with equally many
    /// blocks, the last ones are chosen first. Segments for second copies only are chosen last.
    fn emptiest_segments(&self, count: usize) -> Vec<DataSegment> {
        let mut blocks = vec![0u32; self.segments.len()];
        for (frame, _) in self.directory.order() {
            blocks[(self.index.first_sector(frame) >> self.segment_shift) as usize] += 1;
        }
        let mut order: Vec<usize> = (0..self.segments.len()).rev().collect();
        order.sort_by_key(|&i| (self.segments[i].seconds_only, blocks[i]));
        order[..count].iter().map(|&i| self.segments[i]).collect()
    }

    /// Returns this cache with other segments. A block keeps its contents and its position in the
    /// replacement order if one of its copies is in a segment that the cache keeps. All other
    /// blocks are dropped. Takes time proportional to the number of blocks.
    pub(crate) fn relocated(
        &self,
        segments: Vec<DataSegment>,
        disk_bytes: u64,
    ) -> Result<Cache, CommandError> {
        let mut new = Cache::new(self.config, segments, disk_bytes)?;
        new.directory.follow(&self.directory);
        if self.index.keeps_marks() {
            new.index.keep_marks();
        }
        let mut places: Vec<(DataSegment, u64)> =
            new.segments.iter().enumerate().map(|(i, segment)| (*segment, i as u64)).collect();
        places.sort_unstable();
        let frames_per_segment = self.segment_shift - self.block_shift();
        let moved_to = |frame: FrameNo| {
            let segment = self.segments[(frame.0 >> frames_per_segment) as usize];
            let place = places.binary_search_by_key(&segment, |(segment, _)| *segment).ok()?;
            let inside = frame.0 & ((1 << frames_per_segment) - 1);
            Some(FrameNo((places[place].1 << frames_per_segment) as u32 | inside))
        };
        // A block is kept if either of its copies is kept.
        let mut kept = Vec::new();
        let mut seconds = Vec::new();
        for (frame, heat) in self.directory.order() {
            let second =
                self.index.second_of(frame).and_then(|second| moved_to(second).map(|to| (second, to)));
            match (moved_to(frame), second) {
                (Some(to), second) => {
                    kept.push((frame, to, heat));
                    seconds.extend(second.map(|(from, at)| (from, at, to)));
                }
                (None, Some((from, to))) => kept.push((from, to, heat)),
                (None, None) => {}
            }
        }
        new.directory.adopt(&self.directory, kept, seconds);
        new.set_places();
        Ok(new)
    }
}
