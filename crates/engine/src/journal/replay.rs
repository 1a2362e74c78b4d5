//! Second reading of a journal ring: builds the index of the cache from the pages. A *record*
//! describes one change of sectors. The *dump*, which extends over several pages, describes the
//! state of all frames.
//!
//! Records up to the last known commit are all valid. Later records are the *journal tail*: their
//! pages may have reached flash before the data that they describe. That data may also have been
//! overwritten since.
//!
//! | record in the tail | condition | effect |
//! |---|---|---|
//! | *set*, dirty | the data on flash has the record's checksum | applied |
//! | *set*, dirty | the sector is unreadable or on a missing device, or the process was killed | applied; the data is lost |
//! | *set*, dirty | the data on flash has a different checksum than the record | the sector stays as it was; it is *undone* |
//! | *set*, clean | the frame holds the block | applied |
//! | *clean* | the frame holds the block | applied; drops undone sectors in the frame |
//! | *drop* | the frame holds the block | applied |
//! | *unproven* | the frame holds the block, and the sector is dirty | applied |
//! | *part* | | ignored |
//! | *set* clean, *clean*, *drop* | the sector is undone in the frame | also drops an older copy |
//!
//! An *applied* record has the same effect as a record before the last known commit.
//!
//! The *part* records of a page list all sectors that were incomplete when the page was sealed.
//! *Part* records apply to the frames that the same page dumps. All other changes of units are in
//! *set* records.
//!
//! The older copy in the last row of the table is in another frame, and the undone *set* record
//! would have replaced it. The record in the last row shows that the backing has newer data than
//! this copy.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use super::format::{FailedSegments, FrameState, Kind, Page, Record, Zones, zone_shift};
use super::proof::{Proof, probes};
use super::{Plan, Recovered, Summary, ZONES};
use crate::index::restore::{Copy, Restoring};
use crate::units::{BlockNo, DeviceId, FrameNo, SECTOR_BYTES};

/// Reason why a journal ring cannot be replayed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ReplayError {
    /// A page changed between the two readings.
    Changed {
        /// Sequence number of the page.
        sequence: u64,
    },
    /// The journal describes segments of a different size.
    SegmentBytes {
        /// Segment size in the journal, bytes.
        expected: u64,
    },
    /// No data segment is present.
    NoSegments,
    /// Two segments have the same ordinal.
    SegmentTwice(u32),
    /// The journal describes more frames than an index can have, or frames that are in no segment.
    Senseless,
}

impl fmt::Display for ReplayError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ReplayError::Changed { sequence } => {
                write!(f, "journal page {sequence} changed while it was read")
            }
            ReplayError::SegmentBytes { expected } => {
                write!(f, "the journal describes segments of {expected} bytes")
            }
            ReplayError::NoSegments => write!(f, "none of the cache's data segments is present"),
            ReplayError::SegmentTwice(ordinal) => write!(f, "two data segments have the ordinal {ordinal}"),
            ReplayError::Senseless => write!(f, "the journal describes impossible frames"),
        }
    }
}

impl std::error::Error for ReplayError {}

/// The replay of a journal ring. Call [`page`](Replay::page) for each of [`Plan::reads`], then
/// [`to_prove`](Replay::to_prove), then [`finish`](Replay::finish).
#[derive(Debug)]
pub struct Replay {
    pub(super) plan: Plan,
    /// For each segment, its ordinal and the number of its first frame in memory; missing segments
    /// are last.
    segments: Vec<(u32, u32)>,
    /// Device of each present segment, in the order of memory.
    devices: Vec<DeviceId>,
    /// Number of frames in present segments.
    pub(super) frames: u32,
    pub(super) restoring: Restoring,
    /// Sequence number of the next page.
    next: u64,
    /// Number of frames that the dump has described so far. `dumped_min` is the required minimum.
    dumped: u64,
    dumped_min: u64,
    /// Records of the journal tail, with frame numbers as in memory.
    tail: Vec<Record>,
    zones: Zones,
    /// Devices that failed a flush, as the newest page names them.
    failed_segments: FailedSegments,
    scratch: Box<FrameState>,
    /// Cache sectors whose checksums must be verified, in ascending order.
    doubtful: Vec<u64>,
    /// Dirty sectors of the disk without a recorded checksum whose two copies differ.
    pub(super) parted: Vec<u64>,
    /// Disk sectors without a proved checksum, each with a checksum that was committed before the
    /// last one.
    pub(super) superseded: BTreeSet<(u64, u32)>,
    /// Blocks of the current page, and frames of the page's records; `look_ahead` reuses the
    /// memory.
    ahead: (Vec<BlockNo>, Vec<FrameNo>),
}

impl Replay {
    /// Creates the replay of a plan (the result of the first reading). `present` has the ordinal and
    /// the device of all present data segments, in the order of memory.
    pub fn new(plan: Plan, segment_bytes: u64, present: &[(u32, DeviceId)]) -> Result<Replay, ReplayError> {
        let (ordinals, devices): (Vec<u32>, Vec<DeviceId>) = present.iter().copied().unzip();
        let segment_frames = plan.segment_frames;
        let expected = u64::from(segment_frames) * u64::from(plan.block_bytes);
        if segment_bytes != expected {
            return Err(ReplayError::SegmentBytes { expected });
        }
        if ordinals.is_empty() {
            return Err(ReplayError::NoSegments);
        }
        let mut sorted = ordinals.clone();
        sorted.sort_unstable();
        if let Some(twice) = sorted.windows(2).find(|pair| pair[0] == pair[1]) {
            return Err(ReplayError::SegmentTwice(twice[0]));
        }
        let absent: Vec<u32> =
            plan.ordinals.iter().copied().filter(|ordinal| sorted.binary_search(ordinal).is_err()).collect();
        // A dump describes every frame, so a page with false segments causes no large allocation.
        let dumped_min = absent.len() as u64 * u64::from(segment_frames);
        let entries_max = plan.chosen.len() as u64 * (super::PAGE_BYTES / 4) as u64;
        let all = (ordinals.len() + absent.len()) as u64 * u64::from(segment_frames);
        if dumped_min > entries_max || all >= u64::from(u32::MAX) {
            return Err(ReplayError::Senseless);
        }
        let places = ordinals.iter().chain(&absent).enumerate();
        let mut segments: Vec<_> = places.map(|(i, ordinal)| (*ordinal, i as u32 * segment_frames)).collect();
        segments.sort_unstable();
        Ok(Replay {
            segments,
            devices,
            frames: ordinals.len() as u32 * segment_frames,
            restoring: Restoring::new(all as u32, plan.block_shift),
            next: plan.begin,
            dumped: 0,
            dumped_min,
            tail: Vec::new(),
            zones: [0; ZONES / 8],
            failed_segments: FailedSegments::default(),
            scratch: Box::new(FrameState::new()),
            doubtful: Vec::new(),
            parted: Vec::new(),
            superseded: BTreeSet::new(),
            ahead: (Vec::new(), Vec::new()),
            plan,
        })
    }

    /// Applies the next page.
    pub fn page(&mut self, bytes: &[u8]) -> Result<(), ReplayError> {
        let sequence = self.next;
        assert!(sequence <= self.plan.end, "the plan has no further page");
        let (_, crc) = self.plan.chosen[(sequence - self.plan.begin) as usize];
        let is_dumped = sequence <= self.plan.dump_end;
        let (blocks, frames) = &mut self.ahead;
        blocks.clear();
        frames.clear();
        let page = Page::read(
            bytes,
            |_| (),
            |_, state| {
                if is_dumped {
                    blocks.push(BlockNo(state.block));
                }
            },
        );
        let page = page
            .filter(|page| page.header.sequence == sequence && page.crc == crc)
            .ok_or(ReplayError::Changed { sequence })?;
        if !self.plan.is_of(&page) {
            return Err(ReplayError::Senseless);
        }
        self.next += 1;
        self.look_ahead(&page);
        let mut all_known = true;
        let (segments, segment_frames) = (&self.segments, self.plan.segment_frames);
        let (restoring, tail) = (&mut self.restoring, &mut self.tail);
        let in_tail = sequence > self.plan.committed;
        let mut parts = Vec::new();
        page.records(|record| match place(segments, segment_frames, record.frame) {
            _ if let Kind::Part { units } = record.kind => {
                parts.push((record.disk_sector(self.plan.block_shift), units));
            }
            Some(frame) if in_tail => tail.push(Record { frame, ..record }),
            Some(frame) => apply(restoring, &Record { frame, ..record }),
            None => all_known = false,
        });
        if is_dumped {
            let dumped = &mut self.dumped;
            page.dump(&mut self.scratch, |number, state| {
                *dumped += 1;
                match place(segments, segment_frames, number) {
                    Some(frame) => {
                        restoring.show(FrameNo(frame), state);
                        if state.has_dirty() {
                            restoring.set_parts(BlockNo(state.block), &parts);
                        }
                    }
                    None => all_known = false,
                }
            });
        }
        if sequence == self.plan.dump_end && self.dumped < self.dumped_min {
            return Err(ReplayError::Senseless);
        }
        self.zones = page.header.zones;
        self.failed_segments = page.header.failed_segments;
        if all_known { Ok(()) } else { Err(ReplayError::Senseless) }
    }

    /// Reads all index entries that a page is about to change. In a large index, each of these
    /// reads is a miss in the CPU's caches. The reads do not depend on each other, so the misses
    /// overlap, which saves a third of the time of a replay.
    fn look_ahead(&mut self, page: &Page<'_>) {
        let (blocks, frames) = &mut self.ahead;
        page.records(|record| {
            blocks.push(BlockNo(record.block));
            frames.extend(place(&self.segments, self.plan.segment_frames, record.frame).map(FrameNo));
        });
        let mut seen = blocks.iter().fold(0, |seen, block| seen ^ self.restoring.touch_block(*block));
        seen = frames.iter().fold(seen, |seen, frame| seen ^ self.restoring.touch_frame(*frame));
        std::hint::black_box(seen);
    }

    /// Returns the cache sectors to read, in ascending order: the sectors that *set* records of the
    /// journal tail call dirty, sectors whose two copies may differ, and samples of their segments.
    fn find_doubtful(&self) -> Vec<u64> {
        let index = self.restoring.index();
        let unproven = self.tail.iter().filter(|record| record.kind == Kind::Unproven);
        let mut open: Vec<u64> = unproven
            .flat_map(|record| self.sector(record)..self.sector(record) + u64::from(record.count))
            .chain(index.unproven_sectors())
            .filter(|sector| self.has_twin(*sector))
            .collect();
        open.extend(probes(index, &open, self.sectors_in_segment()));
        let sets = self.tail.iter().filter(|record| is_dirty_set(record));
        let mut sectors: Vec<u64> = sets.map(|record| self.sector(record)).chain(open).collect();
        sectors.retain(|sector| *sector < self.sectors());
        sectors.sort_unstable();
        sectors.dedup();
        sectors
    }

    /// Returns true if the other copy of the block also has this sector.
    fn has_twin(&self, sector: u64) -> bool {
        self.restoring.twin(sector).is_some_and(|(_, twin)| self.restoring.index().is_valid(twin))
    }

    /// Returns the sectors to read from flash; their checksums decide which records of the journal
    /// tail are valid. Each entry is the segment, as an index into the ordinals, and the sector in
    /// that segment.
    pub fn to_prove(&mut self) -> Vec<(u32, u64)> {
        let logged = std::mem::take(&mut self.plan.logged);
        let (segments, segment_frames) = (&self.segments, self.plan.segment_frames);
        self.tail.extend(logged.into_iter().map_while(|record| {
            place(segments, segment_frames, record.frame).map(|frame| Record { frame, ..record })
        }));
        let per_segment = self.sectors_in_segment();
        self.doubtful = self.find_doubtful();
        self.doubtful.iter().map(|sector| ((sector / per_segment) as u32, sector % per_segment)).collect()
    }

    /// Finishes the replay. `sums` has the CRC-32C of the flash content of each sector of
    /// [`to_prove`](Replay::to_prove), or `None` if a sector is unreadable.
    pub fn finish(mut self, sums: &[Option<u32>]) -> Recovered {
        assert!(self.next > self.plan.end, "all pages were read");
        let devices = std::mem::take(&mut self.devices);
        let doubtful = std::mem::take(&mut self.doubtful);
        let failed_segments = self.find_failed_segments();
        let failed_devices = failed_segments.iter().map(|segment| devices[*segment as usize]).collect();
        let mut proof = Proof::new(doubtful, sums, self.sectors_in_segment(), &devices, &failed_devices);
        let sectors_undone = self.apply_tail(|sector| proof.sum(sector));
        proof.judge(self.restoring.index());
        // A clean sector that has a different checksum on flash is dropped now, and would otherwise
        // be dropped by a later read.
        for (sector, sum) in proof.all() {
            let index = self.restoring.index();
            if index.is_valid(sector) && !index.is_dirty(sector) && sum != Some(index.sum(sector)) {
                self.restoring.clear(sector, 1);
            }
        }
        self.prefer_what_is_there(&proof);
        let sectors_distrusted = if self.plan.clean { 0 } else { self.distrust() };
        let sectors_missing = self.reconcile(&proof);
        // The second call handles sectors whose checksum has just become known.
        self.prefer_what_is_there(&proof);
        let index = self.restoring.finish(self.frames);
        let summary = Summary {
            ring: self.plan.ring,
            clean: self.plan.clean,
            is_logged: self.plan.is_logged,
            sectors_valid: index.sectors_valid(),
            sectors_dirty: index.dirty_sectors(),
            sectors_undone,
            sectors_parted: self.parted.len() as u64,
            sectors_distrusted,
            sectors_missing,
            disk_bytes: self.plan.disk_bytes,
            identity: self.plan.identity,
            block_bytes: self.plan.block_bytes,
        };
        // Sectors of one copy without a recorded checksum may not be durable either.
        let read: BTreeSet<u64> =
            proof.all().map(|(sector, _)| sector).chain(index.unproven_sectors()).collect();
        let tail = read.into_iter().filter(|sector| index.is_dirty(*sector)).collect();
        Recovered {
            index,
            tail,
            parted: self.parted,
            failed_segments,
            summary,
            block_shift: self.plan.block_shift,
            segment_frames: self.plan.segment_frames,
        }
    }

    /// Returns the present segments by which the newest page names devices that failed a flush.
    fn find_failed_segments(&self) -> Vec<u32> {
        let named = self.failed_segments.iter().filter_map(|entry| entry.checked_sub(1));
        named
            .filter_map(|ordinal| self.segments.binary_search_by_key(&ordinal, |(its, _)| *its).ok())
            .map(|at| self.segments[at].1)
            .filter(|first_frame| *first_frame < self.frames)
            .map(|first_frame| first_frame / self.plan.segment_frames)
            .collect()
    }

    /// Applies the records of the journal tail. Returns the number of undone sectors.
    fn apply_tail(&mut self, on_flash: impl Fn(u64) -> Option<u32>) -> u64 {
        // Frame of the undone *set* record, keyed by disk sector and copy.
        let mut undone: BTreeMap<(u64, bool), u32> = BTreeMap::new();
        let shift = self.plan.block_shift;
        let disk_sector = |record: &Record, i: u16| (u64::from(record.block) << shift) + u64::from(i);
        let tail = std::mem::take(&mut self.tail);
        // A copy that reached flash proves the content of the other copy, which may be damaged.
        let proofs = tail.iter().filter_map(|record| match record.kind {
            Kind::Set { sum, dirty: true, .. } if on_flash(self.sector(record)) == Some(sum) => {
                Some((disk_sector(record, u16::from(record.first)), sum))
            }
            _ => None,
        });
        let proved: BTreeSet<(u64, u32)> = proofs.collect();
        let mut superseded = BTreeSet::new();
        for record in tail {
            if let Kind::Set { sum, dirty: true, second, .. } = record.kind {
                let key = (disk_sector(&record, u16::from(record.first)), second);
                if proved.contains(&(key.0, sum)) || self.is_damaged(&record, on_flash(self.sector(&record)))
                {
                    undone.remove(&key);
                    apply(&mut self.restoring, &record);
                } else {
                    undone.insert(key, record.frame);
                    // The sector was overwritten again. Its last committed checksum still shows that a
                    // copy with an older one is wrong.
                    let sector = self.sector(&record);
                    let is_there = self.restoring.block(FrameNo(record.frame)) == Some(BlockNo(record.block));
                    if is_there && self.restoring.index().is_unproven(sector) {
                        superseded.insert((key.0, self.restoring.index().sum(sector)));
                        superseded.remove(&(key.0, sum));
                        self.restoring.note_last_sum(sector, sum);
                    }
                }
                continue;
            }
            if record.kind != Kind::Unproven {
                let first = u16::from(record.first);
                for i in first..first + record.count {
                    for (second, copy) in [(false, Copy::First), (true, Copy::Second)] {
                        let key = (disk_sector(&record, i), second);
                        if undone.get(&key) == Some(&record.frame) {
                            undone.remove(&key);
                            self.forget(BlockNo(record.block), copy, i);
                        }
                    }
                }
            }
            if self.restoring.block(FrameNo(record.frame)) == Some(BlockNo(record.block)) {
                apply(&mut self.restoring, &record);
            }
        }
        self.superseded = superseded;
        undone.len() as u64
    }

    /// Returns true if the data of a *set* record of the tail has reached flash, although the
    /// sector has different content (`found`), is unreadable, or is on a missing device. The dirty
    /// data of the record is then lost, and the record is not undone: reads of the sector fail.
    fn is_damaged(&self, record: &Record, found: Option<u32>) -> bool {
        let frame = FrameNo(record.frame);
        let is_rewritten = self.restoring.block(frame) == Some(BlockNo(record.block))
            && self.restoring.index().is_unproven(self.sector(record));
        // The data is written before its record is made. So a killed process leaves no record whose
        // data is not on flash.
        !is_rewritten && (found.is_none() || self.plan.was_killed)
    }

    /// Invalidates a sector in one copy of a block.
    fn forget(&mut self, block: BlockNo, copy: Copy, sector: u16) {
        if let Some(frame) = self.restoring.find(block, copy) {
            let first = self.restoring.index().first_sector(frame);
            self.restoring.clear(first + u64::from(sector), 1);
        }
    }

    /// Drops clean sectors in zones that have a bypass mark. Returns the number of dropped sectors.
    fn distrust(&mut self) -> u64 {
        if self.zones == [0; ZONES / 8] {
            return 0;
        }
        let (shift, zone_shift) = (self.plan.block_shift, zone_shift(self.plan.disk_bytes));
        let mut given_up = 0;
        for frame in (0..self.frames).map(FrameNo) {
            let Some(block) = self.restoring.block(frame) else { continue };
            let zone = ((u64::from(block.0) * (SECTOR_BYTES << shift)) >> zone_shift) as usize;
            if self.zones[zone / 8] >> (zone % 8) & 1 == 0 {
                continue;
            }
            let first = self.restoring.index().first_sector(frame);
            for sector in first..first + (1 << shift) {
                if self.restoring.index().is_valid(sector) && !self.restoring.index().is_dirty(sector) {
                    self.restoring.clear(sector, 1);
                    given_up += 1;
                }
            }
        }
        given_up
    }

    /// Returns the number of sectors in present segments.
    fn sectors(&self) -> u64 {
        u64::from(self.frames) << self.plan.block_shift
    }

    fn sectors_in_segment(&self) -> u64 {
        u64::from(self.plan.segment_frames) << self.plan.block_shift
    }

    /// Returns the first cache sector of a record.
    fn sector(&self, record: &Record) -> u64 {
        (u64::from(record.frame) << self.plan.block_shift) + u64::from(record.first)
    }
}

/// Returns the number that a frame has in memory. `number` is the frame's number in the journal.
fn place(segments: &[(u32, u32)], segment_frames: u32, number: u32) -> Option<u32> {
    let at = segments.binary_search_by_key(&(number / segment_frames), |(ordinal, _)| *ordinal).ok()?;
    Some(segments[at].1 + number % segment_frames)
}

fn is_dirty_set(record: &Record) -> bool {
    matches!(record.kind, Kind::Set { dirty: true, .. })
}

/// Applies a record.
fn apply(restoring: &mut Restoring, record: &Record) {
    let (frame, block) = (FrameNo(record.frame), BlockNo(record.block));
    let first = restoring.index().first_sector(frame) + u64::from(record.first);
    let count = u64::from(record.count);
    if let Kind::Set { sum, dirty, second, units } = record.kind {
        restoring.place(frame, block, if second { Copy::Second } else { Copy::First });
        restoring.set(first, sum, dirty);
        restoring.set_units(record.disk_sector(restoring.index().block_shift()), units);
        return;
    }
    if restoring.block(frame) != Some(block) {
        return;
    }
    // A state that is recorded for the first copy also applies to the second copy, whose record may
    // have been lost. A state that is recorded for the second copy does not apply to the first.
    let second = Some(block).filter(|_| restoring.copy(frame) == Copy::First);
    let second = second.and_then(|block| restoring.find(block, Copy::Second));
    let too = second.map(|second| restoring.index().first_sector(second) + u64::from(record.first));
    match record.kind {
        Kind::Clean => {
            [Some(first), too].into_iter().flatten().for_each(|first| restoring.clean(first, count))
        }
        Kind::Drop => {
            [Some(first), too].into_iter().flatten().for_each(|first| restoring.clear(first, count))
        }
        _ => {
            for sector in first..first + count {
                if restoring.index().is_dirty(sector) {
                    restoring.set_unproven(sector);
                }
            }
        }
    }
}

impl Restoring {
    /// Sets a frame to its state in a dump.
    fn show(&mut self, frame: FrameNo, state: &FrameState) {
        if state.is_empty() {
            self.vacate(frame);
            return;
        }
        self.place(frame, BlockNo(state.block), if state.second { Copy::Second } else { Copy::First });
        let sectors = self.index().sectors_in_block();
        let first = self.index().first_sector(frame);
        for i in 0..sectors {
            if !state.valid.get(i) {
                self.clear(first + i as u64, 1);
                continue;
            }
            self.set(first + i as u64, state.sums[i], state.dirty.get(i));
            if state.unproven.get(i) {
                self.set_unproven(first + i as u64);
            }
        }
    }
}

impl Plan {
    /// Returns true if this page belongs to the plan's cache.
    fn is_of(&self, page: &Page<'_>) -> bool {
        let header = &page.header;
        header.block_shift == self.block_shift
            && header.disk_bytes == self.disk_bytes
            && header.identity == self.identity
            && header.segment_frames == self.segment_frames
    }
}
