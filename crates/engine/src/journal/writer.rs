//! Writes a journal: turns changes into pages, and keeps all data in the journal ring that recovery
//! needs.
//!
//! # Duties of the caller
//!
//! - A change is pushed ([`Writer::push`]) after the index shows the change. A *set* is pushed
//!   after its data was written, but not necessarily flushed.
//! - [`Writer::committed`] is called for a page when the page, all earlier pages, and all data
//!   written before it was sealed are durable.
//! - A dirty sector is *pinned* from the push of its *set* record on, because a dump may include
//!   the sector before its record is in a page. The sector stays pinned until a record that makes
//!   it clean, or drops it, is committed.
//! - The *sets* of a dirty sector's two copies are pushed one after the other, first copy first.
//! - Dirty data stays in its frame, because dumps include pushed changes that no page has yet. If a
//!   block moved between frames, the pages that survive a crash might show the block in neither
//!   frame.
//! - Dirty data is destaged, and an *unproven* record (checksum unknown) is pushed, only when the
//!   *set* record of the data is committed ([`Writer::is_committed`]). Otherwise a crash could
//!   leave pages with a checksum that does not match flash any more, or the backing could be newer
//!   than data that the journal records as clean. An *unproven* record `after_set` needs no commit,
//!   because the sector was durably unproven before: if its *set* record is undone, the sector is
//!   unproven again.
//! - [`Writer::save_records`] is called before a write is acknowledged without a commit, and
//!   before a sealed page is written.
//! - Dropped clean data, including evictions, is recorded before the bypass mark of its zone is
//!   removed.
//!
//! # Why the ring is long enough
//!
//! Let a dump take at most P pages, and let at most U pages be sealed and not committed. A
//! committed page *C* names the newest dump that was complete at the last commit before *C*. That
//! commit is at most U pages before *C*. The next dump had not ended then, so the named dump began
//! less than 2P pages before that commit. The page to be sealed next is at most U pages after *C*.
//! So recovery never needs a page that was sealed more than 2P + 2U pages ago.

use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, VecDeque};

use super::crash_log::{CrashLog, SurvivingMemory};
use super::format::{
    DUMP_BYTES_MIN, FailedSegments, FrameState, Header, Kind, PageBuilder, RUN_BYTES, Record, Zones,
    frame_bytes_max, sectors_of_block, zone_shift,
};
use super::{CHANGES_MAX, FAILED_DEVICES_MAX, ZONES};
use crate::index::Index;
use crate::units::{BlockNo, FrameNo};

/// Maximum number of incomplete sectors that a page can list. The remaining records of the page are
/// reserved for changes that must be in the same page, such as the records of a sector's two
/// copies.
const PARTS_LISTED_MAX: usize = CHANGES_MAX - 4;

/// Maximum number of sealed pages that are not committed, in any ring; small rings allow fewer.
const UNCOMMITTED_MAX: u64 = 256;

/// A change to record. Frame numbers are those in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Change {
    /// A sector is valid with this checksum.
    Set {
        frame: FrameNo,
        block: BlockNo,
        /// Position of the sector inside the block.
        sector: u8,
        sum: u32,
        dirty: bool,
        /// True if the sector is in the second copy of its block.
        second: bool,
        /// Units that flash has of the sector.
        units: u8,
    },
    /// The sectors became clean.
    Clean { frame: FrameNo, block: BlockNo, first: u8, count: u16 },
    /// The sectors became invalid.
    Drop { frame: FrameNo, block: BlockNo, first: u8, count: u16 },
    /// The sectors stay dirty, and their checksums become unknown.
    Unproven {
        frame: FrameNo,
        block: BlockNo,
        first: u8,
        count: u16,
        /// True if the sector was unproven before, and the *set* record just before this record has
        /// its newest checksum. The two records are in one page.
        after_set: bool,
    },
}

/// Properties of the cache that a journal ring describes.
#[derive(Clone, Debug)]
pub(crate) struct Descriptor {
    pub(crate) cache: [u8; 16],
    pub(crate) ring: u32,
    /// Base-2 logarithm of the number of sectors in a block.
    pub(crate) block_shift: u32,
    pub(crate) disk_bytes: u64,
    pub(crate) identity: [u8; 32],
    /// Number of frames per segment, a power of two.
    pub(crate) segment_frames: u32,
    /// Ordinals of the segments, in the order of memory.
    pub(crate) ordinals: Vec<u32>,
}

/// The writer of one ring of a journal.
#[derive(Debug)]
pub(crate) struct Writer {
    of: Descriptor,
    pages: u64,
    pub(super) limits: Limits,
    pending: VecDeque<Change>,
    /// Sectors that became dirty, with the number of the change, until that change is committed.
    /// For each sector, `newest` has the number of the last change in this list.
    fresh: VecDeque<(u64, (FrameNo, u8))>,
    newest: BTreeMap<(FrameNo, u8), u64>,
    /// Drops of data that are not committed yet: the number of the change, and the block. Successive
    /// drops of one block share an entry, which has the number of the last drop. A block can have
    /// several entries, and `drops_of` counts them.
    dropped: VecDeque<(u64, BlockNo)>,
    drops_of: BTreeMap<BlockNo, u32>,
    /// Number of changes that were pushed, and number of changes that are in sealed pages.
    pushed: u64,
    recorded: u64,
    sealed: u64,
    committed: u64,
    /// For each sealed page that is not committed: the first page of the dump that the page names,
    /// and the number of changes recorded up to the page.
    uncommitted: VecDeque<(u64, u64)>,
    /// First page of the dump that the newest committed page names; 0 while the journal ring is not
    /// valid yet.
    keep_from: u64,
    /// Next frame to dump, and the page in which this dump began.
    cursor: u32,
    dump_begin: u64,
    /// First and last pages of dumps that are complete and not committed.
    complete: VecDeque<(u64, u64)>,
    /// First and last page of the newest committed dump, or zeroes.
    named: (u64, u64),
    failed_segments: FailedSegments,
    /// Entries of `failed_segments` to remove, each with the number of changes that must be
    /// recorded before.
    unnames: VecDeque<(u64, u32)>,
    zones: Zones,
    /// Zones whose bypass marks will be removed, each with the number of changes that must be
    /// recorded before.
    unmarks: VecDeque<(u64, usize)>,
    closing: bool,
    /// The crash log; absent while recovery would not find this ring.
    crash_log: Option<CrashLog>,
    scratch: Box<FrameState>,
}

/// Limits of the pages and of the journal ring.
#[derive(Clone, Copy, Debug)]
pub(super) struct Limits {
    /// Maximum number of changes in a page.
    pub(super) changes: usize,
    /// Maximum number of frames in a page. Tests use small values to get dumps of many pages.
    pub(super) frames: u32,
    /// Maximum number of sealed pages that are not committed.
    pub(super) uncommitted: u64,
}

/// Returns the maximum number of pages of a dump.
fn dump_pages_max(frames: u64, block_shift: u32, segment_frames: u64) -> u64 {
    // The number of frames that fit into any page depends on segment borders. `n` consecutive
    // frames are in at most `runs(n)` segments.
    let runs = |n: u64| if n < 2 { n } else { n.min((n - 2) / segment_frames + 2) };
    let bytes = |n: u64| n * frame_bytes_max(block_shift) as u64 + runs(n) * RUN_BYTES as u64;
    let mut n = DUMP_BYTES_MIN as u64 / frame_bytes_max(block_shift) as u64;
    while bytes(n) > DUMP_BYTES_MIN as u64 {
        n -= 1;
    }
    assert!(n > 0, "every page dumps a frame");
    frames.div_ceil(n)
}

/// Returns the number of pages that each copy of a journal ring needs for this many frames. With
/// that number, the journal ring always holds a complete dump. `block_bytes` and `segment_bytes`
/// are powers of two.
pub fn ring_pages_min(frames: u64, block_bytes: u32, segment_bytes: u64) -> u64 {
    let block_shift = (block_bytes / crate::units::SECTOR_BYTES as u32).trailing_zeros();
    let dump = dump_pages_max(frames, block_shift, (segment_bytes / u64::from(block_bytes)).max(1));
    2 * dump + 2 * (dump / 8).clamp(8, UNCOMMITTED_MAX)
}

impl Writer {
    /// Creates the writer of a journal ring of `pages` pages, at least [`ring_pages_min`].
    pub(crate) fn new(of: Descriptor, pages: u64) -> Writer {
        let segment_frames = u64::from(of.segment_frames);
        assert!(of.segment_frames.is_power_of_two());
        let frames = of.ordinals.len() as u64 * segment_frames;
        let dump = dump_pages_max(frames, of.block_shift, segment_frames);
        let uncommitted = (pages.saturating_sub(2 * dump) / 2).min(UNCOMMITTED_MAX);
        assert!(uncommitted >= 2, "a ring of {pages} pages is too short for {frames} frames");
        let fits = |ordinal: &u32| (u64::from(*ordinal) + 1) * segment_frames <= 1 << 32;
        assert!(of.ordinals.iter().all(fits), "frames on flash are numbered with 32 bits");
        Writer {
            of,
            pages,
            limits: Limits { changes: CHANGES_MAX, frames: u32::MAX, uncommitted },
            pending: VecDeque::new(),
            fresh: VecDeque::new(),
            newest: BTreeMap::new(),
            dropped: VecDeque::new(),
            drops_of: BTreeMap::new(),
            pushed: 0,
            recorded: 0,
            sealed: 0,
            committed: 0,
            uncommitted: VecDeque::new(),
            keep_from: 0,
            cursor: 0,
            dump_begin: 0,
            complete: VecDeque::new(),
            named: (0, 0),
            failed_segments: [0; FAILED_DEVICES_MAX],
            unnames: VecDeque::new(),
            zones: [0; ZONES / 8],
            unmarks: VecDeque::new(),
            closing: false,
            crash_log: None,
            scratch: Box::new(FrameState::new()),
        }
    }

    /// Makes the ring shorter than the daemon uses, for tests.
    #[cfg(test)]
    pub(super) fn set_pages(&mut self, pages: u64) {
        self.pages = pages;
    }

    /// Adds a change.
    pub(crate) fn push(&mut self, change: Change) {
        self.pushed += 1;
        if let Change::Set { frame, sector, dirty: true, .. } = change {
            self.fresh.push_back((self.pushed, (frame, sector)));
            self.newest.insert((frame, sector), self.pushed);
        }
        if let Change::Drop { block, .. } = change {
            self.note_drop(block);
        }
        self.pending.push_back(change);
    }

    /// Drops all pending changes before the first dump of a new ring begins. The dump shows the
    /// index after these changes.
    pub(crate) fn forget_before_dump(&mut self) {
        assert!(self.sealed == 0, "the ring has no page");
        self.pending.clear();
        self.recorded = self.pushed;
    }

    /// Records that the last change drops data of a block.
    fn note_drop(&mut self, block: BlockNo) {
        match self.dropped.back_mut() {
            // The sectors of a block are dropped one after the other.
            Some((number, last)) if *last == block => *number = self.pushed,
            _ => {
                self.dropped.push_back((self.pushed, block));
                *self.drops_of.entry(block).or_default() += 1;
            }
        }
    }

    /// Returns true if recovery might still find data of a block that was dropped, because not all
    /// records of drops are durable.
    pub(crate) fn has_undurable_drop(&self, block: BlockNo) -> bool {
        self.drops_of.contains_key(&block)
    }

    /// Returns true if the last record that made this sector dirty is durable, and the sector's
    /// data too.
    pub(crate) fn is_committed(&self, frame: FrameNo, sector: u8) -> bool {
        !self.newest.contains_key(&(frame, sector))
    }

    /// Returns the number of changes that are not in a page yet.
    pub(crate) fn pending(&self) -> usize {
        self.pending.len()
    }

    /// Returns the number of further changes that fit into the last page of the pending changes.
    pub(crate) fn room_in_page(&self) -> usize {
        self.limits.changes - self.pending.len() % self.limits.changes
    }

    /// Returns true if the pending changes fill a page.
    pub(crate) fn has_full_page(&self) -> bool {
        self.pending.len() >= self.limits.changes
    }

    /// Returns the number of the last change pushed.
    #[cfg(test)]
    pub(crate) fn pushed(&self) -> u64 {
        self.pushed
    }

    /// Returns the number of the last change in a sealed page. All earlier changes are in sealed
    /// pages too.
    #[cfg(test)]
    pub(crate) fn recorded(&self) -> u64 {
        self.recorded
    }

    /// Returns the sequence number of the last sealed page, or 0.
    pub(crate) fn sealed(&self) -> u64 {
        self.sealed
    }

    /// Returns the page number in the journal ring for a sequence number.
    pub(crate) fn page_number(&self, sequence: u64) -> u64 {
        sequence % self.pages
    }

    /// Returns true if every frame has been dumped at least once.
    pub(crate) fn first_dump_done(&self) -> bool {
        self.named.1 > 0 || !self.complete.is_empty()
    }

    /// Returns true if recovery would find this journal ring. The result never changes back to
    /// false.
    pub(crate) fn exists(&self) -> bool {
        self.keep_from > 0
    }

    /// Returns true if pages must be committed before another page may be sealed.
    pub(crate) fn must_wait(&self) -> bool {
        let uncommitted = self.sealed - self.committed;
        match (self.first_dump_done(), self.exists()) {
            (false, _) => false,
            // The page that names the first dump is sealed only when that dump is durable, and
            // later pages only when this page is durable. If the page were lost and a later one
            // kept, the journal ring would look damaged.
            (true, false) => uncommitted > 0,
            (true, true) => uncommitted >= self.limits.uncommitted,
        }
    }

    /// Returns true if a commit should start now, so that requests will not have to wait for it.
    pub(crate) fn wants_commit(&self) -> bool {
        self.first_dump_done() && self.sealed - self.committed >= self.limits.uncommitted / 2
    }

    /// Appends one page to `out`, with as many pending changes and as much of the dump as fit.
    /// Returns the page's sequence number.
    pub(crate) fn seal(&mut self, index: &Index, out: &mut Vec<u8>) -> u64 {
        assert!(!self.must_wait(), "a page is sealed before others are committed");
        assert_eq!(u64::from(index.frames()), self.frames());
        let sequence = self.sealed + 1;
        // Page numbers repeat. Recovery never needs the overwritten page, even if this write fails.
        let overwritten = sequence.saturating_sub(self.pages);
        assert!(overwritten < self.keep_from.max(1), "page {overwritten} is overwritten, and needed");

        self.log_pending();
        let taken = self.changes_in_page(CHANGES_MAX - index.parts_count().min(PARTS_LISTED_MAX));
        self.recorded += taken as u64;
        if let Some(log) = &mut self.crash_log {
            log.page(sequence, self.recorded);
        }
        while self.unmarks.front().is_some_and(|(after, _)| *after <= self.recorded) {
            let (_, zone) = self.unmarks.pop_front().expect("there is one");
            self.zones[zone / 8] &= !(1 << (zone % 8));
        }
        while self.unnames.front().is_some_and(|(after, _)| *after <= self.recorded) {
            let (_, entry) = self.unnames.pop_front().expect("there is one");
            self.failed_segments.iter_mut().filter(|named| **named == entry).for_each(|named| *named = 0);
        }
        let mut page = PageBuilder::new(&self.header(sequence, taken == self.pending.len()), out);
        for change in self.pending.drain(..taken) {
            page.record(&self.of.record(&change));
        }
        assert!(index.parts_count() <= PARTS_LISTED_MAX, "a page lists all incomplete sectors");
        for (_, sector, units) in index.parts() {
            let (frame, block, first) = index.locate(sector);
            let (kind, frame) = (Kind::Part { units }, self.of.number(frame));
            page.record(&Record { kind, first, count: 1, frame, block: block.0 });
        }
        if self.cursor == 0 {
            self.dump_begin = sequence;
        }
        let stop = index.frames().min(self.cursor.saturating_add(self.limits.frames));
        while self.cursor < stop {
            let frame = FrameNo(self.cursor);
            self.scratch.show(index, frame, self.of.block_shift);
            if !page.frame(self.of.number(frame), &self.scratch) {
                break;
            }
            self.cursor += 1;
        }
        page.finish();
        if self.cursor == index.frames() {
            self.cursor = 0;
            self.complete.push_back((self.dump_begin, sequence));
        }
        self.sealed = sequence;
        self.uncommitted.push_back((self.named.0, self.recorded));
        sequence
    }

    /// Returns the number of changes in the next page, at most `room`. The *sets* of a dirty
    /// sector's two copies stay in one page, because a crash that leaves one of two pages must not
    /// leave one of two copies. An *unproven* record stays in the page of the *set* records that it
    /// follows. Without the *unproven* record, recovery would expect the checksum of a sector that
    /// may have been overwritten.
    fn changes_in_page(&self, room: usize) -> usize {
        let most = self.pending.len().min(self.limits.changes).min(room);
        let begins = |at: &usize| match self.pending.get(*at) {
            Some(Change::Unproven { after_set, .. }) => !after_set,
            Some(Change::Set { dirty: true, second: true, .. }) => {
                !matches!(self.pending[at - 1], Change::Set { dirty: true, second: false, .. })
            }
            _ => true,
        };
        (1..=most).rev().find(begins).unwrap_or(most)
    }

    fn header(&self, sequence: u64, nothing_left: bool) -> Header {
        Header {
            sequence,
            cache: self.of.cache,
            ring: self.of.ring,
            block_shift: self.of.block_shift,
            clean: self.closing && nothing_left,
            // A ring that is not valid yet has no durable pages that could be missing.
            committed: if self.named.0 > 0 { self.committed } else { 0 },
            dump_begin: self.named.0,
            dump_end: self.named.1,
            disk_bytes: self.of.disk_bytes,
            identity: self.of.identity,
            segment_frames: self.of.segment_frames,
            failed_segments: self.failed_segments,
            zones: self.zones,
        }
    }

    /// Records in all later pages that a device failed a flush. The ordinal of one of its data
    /// segments identifies the device. Returns false if the pages name [`FAILED_DEVICES_MAX`] other
    /// devices already.
    pub(crate) fn name_failed(&mut self, segment: u32) -> bool {
        let entry = segment + 1;
        self.unnames.retain(|(_, unnamed)| *unnamed != entry);
        if self.failed_segments.contains(&entry) {
            return true;
        }
        let free = self.failed_segments.iter_mut().find(|named| **named == 0);
        free.map(|free| *free = entry).is_some()
    }

    /// Ends the effect of [`name_failed`](Writer::name_failed). The first journal page that does not
    /// name the device follows the records of all changes that were pushed before this call.
    pub(crate) fn unname_failed(&mut self, segment: u32) {
        self.unnames.push_back((self.pushed, segment + 1));
    }

    fn frames(&self) -> u64 {
        self.of.ordinals.len() as u64 * u64::from(self.of.segment_frames)
    }

    /// Records that every page up to this one is durable, and so is the data that was written
    /// before the page was sealed.
    pub(crate) fn committed(&mut self, sequence: u64) {
        assert!(sequence <= self.sealed);
        while self.committed < sequence {
            self.committed += 1;
            let (keep_from, recorded) = self.uncommitted.pop_front().expect("one for each page");
            self.keep_from = keep_from;
            while self.fresh.front().is_some_and(|(change, _)| *change <= recorded) {
                let (change, sector) = self.fresh.pop_front().expect("there is one");
                if self.newest.get(&sector) == Some(&change) {
                    self.newest.remove(&sector);
                }
            }
            while self.dropped.front().is_some_and(|(change, _)| *change <= recorded) {
                let (_, block) = self.dropped.pop_front().expect("there is one");
                if let Entry::Occupied(mut count) = self.drops_of.entry(block) {
                    match *count.get() {
                        1 => _ = count.remove(),
                        _ => *count.get_mut() -= 1,
                    }
                }
            }
        }
        while self.complete.front().is_some_and(|(_, end)| *end <= self.committed) {
            self.named = self.complete.pop_front().expect("there is one");
        }
        if self.exists() && self.crash_log.is_none() {
            assert_eq!(self.committed, self.sealed, "no page is sealed before the ring is valid");
            self.crash_log = Some(CrashLog::new(&self.of.cache, self.of.ring, self.sealed, self.recorded));
        }
    }

    fn log_pending(&mut self) {
        if let Some(log) = &mut self.crash_log {
            let first = self.pushed + 1 - self.pending.len() as u64;
            let of = &self.of;
            let pending = &self.pending;
            log.add(self.pushed, |number| of.record(&pending[(number - first) as usize]));
        }
    }

    /// Records that all pages up to this one are written to every copy of the ring that works.
    pub(crate) fn pages_written(&mut self, sequence: u64) {
        if let Some(log) = &mut self.crash_log {
            log.pages_written(sequence);
        }
    }

    /// Copies to `memory` all records that are in no written page. Returns true if recovery would
    /// find all changes after the process is killed.
    pub(crate) fn save_records(&mut self, memory: &mut dyn SurvivingMemory) -> bool {
        self.log_pending();
        let Some(log) = &mut self.crash_log else { return false };
        log.save(memory);
        log.has_all()
    }

    /// Drops the new entries of the crash log, because there is no memory for a crash log.
    pub(crate) fn forget_log(&mut self) {
        if let Some(log) = &mut self.crash_log {
            log.forget();
        }
    }

    /// Returns the size of the disk in bytes.
    pub(crate) fn disk_bytes(&self) -> u64 {
        self.of.disk_bytes
    }

    /// Returns the number of a block's sectors that lie on the disk.
    pub(crate) fn sectors_of(&self, block: BlockNo) -> u16 {
        sectors_of_block(self.of.disk_bytes, self.of.block_shift, block.0)
    }

    /// Returns the number of the zone that contains the disk's byte at `offset`.
    pub(crate) fn zone_of(disk_bytes: u64, offset: u64) -> usize {
        debug_assert!(offset < disk_bytes);
        (offset >> zone_shift(disk_bytes)) as usize
    }

    /// Sets the bypass mark of a zone of the disk. The mark means that a write to the zone may have
    /// bypassed the cache. All journal pages from the next one on contain the mark. After a crash,
    /// recovery drops the clean data in zones with a bypass mark.
    pub(crate) fn mark(&mut self, zone: usize) {
        self.unmarks.retain(|(_, unmarked)| *unmarked != zone);
        self.zones[zone / 8] |= 1 << (zone % 8);
    }

    /// Returns true if the zone has a bypass mark that is not being removed.
    pub(crate) fn is_marked(&self, zone: usize) -> bool {
        self.zones[zone / 8] >> (zone % 8) & 1 == 1
            && self.unmarks.iter().all(|(_, unmarked)| *unmarked != zone)
    }

    /// Removes a zone's bypass mark, if the zone has one. The journal page that removes the mark
    /// follows the records of all changes that were pushed before this call.
    pub(crate) fn unmark(&mut self, zone: usize) {
        if self.is_marked(zone) {
            self.unmarks.push_back((self.pushed, zone));
        }
    }

    /// Marks the journal as closed cleanly in the next page after which no change is pending.
    pub(crate) fn set_clean(&mut self) {
        self.closing = true;
    }

    /// Returns the memory used, bytes.
    pub(crate) fn bytes(&self) -> u64 {
        let pending = self.pending.capacity() * size_of::<Change>();
        let fresh = self.fresh.capacity() * 16 + self.newest.len() * 32;
        let drops = self.dropped.capacity() * 16 + self.drops_of.len() * 16;
        let pages = self.uncommitted.capacity() * 16 + self.complete.capacity() * 16;
        let zones = size_of::<Zones>() + (self.unmarks.capacity() + self.unnames.capacity()) * 16;
        let log = self.crash_log.as_ref().map_or(0, CrashLog::bytes);
        (pending
            + fresh
            + drops
            + pages
            + zones
            + log
            + self.of.ordinals.capacity() * 4
            + size_of::<FrameState>()) as u64
    }
}

impl Descriptor {
    /// Returns the number that a frame has in the journal.
    fn number(&self, frame: FrameNo) -> u32 {
        let segment = (frame.0 / self.segment_frames) as usize;
        self.ordinals[segment] * self.segment_frames + frame.0 % self.segment_frames
    }

    fn record(&self, change: &Change) -> Record {
        let (kind, frame, block, first, count) = match *change {
            Change::Set { frame, block, sector, sum, dirty, second, units } => {
                (Kind::Set { sum, dirty, second, units }, frame, block, sector, 1)
            }
            Change::Clean { frame, block, first, count } => (Kind::Clean, frame, block, first, count),
            Change::Drop { frame, block, first, count } => (Kind::Drop, frame, block, first, count),
            Change::Unproven { frame, block, first, count, .. } => {
                (Kind::Unproven, frame, block, first, count)
            }
        };
        assert!(u32::from(first) + u32::from(count) <= 1 << self.block_shift, "sectors of one block");
        Record { kind, first, count, frame: self.number(frame), block: block.0 }
    }
}

impl FrameState {
    /// Copies a frame's state from the index to the state that is dumped next.
    fn show(&mut self, index: &Index, frame: FrameNo, block_shift: u32) {
        let first = index.first_sector(frame);
        if index.block_is_empty(first) {
            self.clear(u32::MAX, false);
            return;
        }
        self.clear(index.block(frame).0, index.first_of(frame).is_some());
        for i in 0..1usize << block_shift {
            let sector = first + i as u64;
            if index.is_valid(sector) {
                self.valid.set(i);
                self.sums[i] = index.sum(sector);
                if index.is_dirty(sector) {
                    self.dirty.set(i);
                }
                if index.is_unproven(sector) {
                    self.unproven.set(i);
                }
            }
        }
    }
}
