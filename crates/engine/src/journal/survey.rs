//! First reading of a journal ring: finds the valid pages, the end of the journal, and the start of
//! the second reading. The *last page* is the newest page that names a dump and is preceded by all
//! pages from the start of this dump on.
//!
//! | pages | result |
//! |---|---|
//! | a last page, and no page records a later commit | [`Ring::Whole`] up to the last page |
//! | a page records a later commit than the last page, or a commit without a last page | [`Ring::Damaged`] |
//! | no last page and no commit | [`Ring::Unfinished`] |
//!
//! Pages may arrive in any order and from both copies, and invalid pages are ignored. The survey
//! needs 40 bytes for each page of each copy.
//!
//! The survey also collects the regions of the disk that may be dirty: all regions in which any
//! page records dirty data. The second reading reads the same pages, so it finds no dirty data
//! outside these regions.

use std::collections::BTreeSet;

use super::crash_log;
use super::format::{FrameState, Header, Kind, Page, Record, sectors_of_block};
use crate::regions::Regions;
use crate::units::SECTOR_BYTES;

/// Contents of the header of one journal page, as the first reading saw them.
#[derive(Clone, Copy, Debug)]
struct Seen {
    /// Sequence number; 0 if there is no page.
    sequence: u64,
    committed: u64,
    dump_begin: u64,
    dump_end: u64,
    crc: u32,
    clean: bool,
}

/// The first reading of a journal ring. Call [`page`](Survey::page) for each page, then
/// [`finish`](Survey::finish).
#[derive(Clone, Debug)]
pub struct Survey {
    cache: [u8; 16],
    ring: u32,
    pages: u64,
    /// State of the pages, by copy and page number.
    seen: Vec<Vec<Seen>>,
    /// Header of the newest page. Only fields that are equal in all pages are used.
    newest: Option<Box<Header>>,
    ordinals: BTreeSet<u32>,
    /// Regions that may be dirty; `None` before the first page.
    doubtful: Option<Regions>,
    /// Blocks that the current page records as dirty.
    dirty: Vec<u32>,
}

/// Result of the first reading of a journal ring.
#[derive(Clone, Debug)]
#[expect(clippy::large_enum_variant, reason = "a recovery has one value")]
pub enum Ring {
    /// The journal ring was never completed, so the journal ring with the next lower number is
    /// valid.
    Unfinished,
    /// A durable page is missing.
    Damaged {
        /// Sequence number of a missing page.
        missing: u64,
    },
    /// The journal ring is readable.
    Whole(Plan),
}

/// Pages of a journal ring to read again, and the facts known from the first reading.
#[derive(Clone, Debug)]
pub struct Plan {
    /// Number of the journal ring.
    pub ring: u32,
    /// Size of a cache block in bytes.
    pub block_bytes: u32,
    /// Size of the disk in bytes.
    pub disk_bytes: u64,
    /// The daemon's identifier of the backing.
    pub identity: [u8; 32],
    /// True if the cache was closed cleanly.
    pub clean: bool,
    /// True if a crash log continued the journal, and has no missing entry.
    pub is_logged: bool,
    /// True if a crash log shows that power was not lost, and no record is missing.
    pub(super) was_killed: bool,
    /// Regions that include all dirty data.
    pub doubtful: Regions,
    pub(super) block_shift: u32,
    pub(super) segment_frames: u32,
    /// Sequence numbers of the first and last page to read, the last durable page, and the last
    /// page of the dump.
    pub(super) begin: u64,
    pub(super) end: u64,
    pub(super) committed: u64,
    pub(super) dump_end: u64,
    /// Number of pages of the journal ring.
    pages: u64,
    /// Copy to read and checksum of each page from `begin` on.
    pub(super) chosen: Vec<(u8, u32)>,
    /// Ordinals of all data segments that dumps describe.
    pub(super) ordinals: Vec<u32>,
    cache: [u8; 16],
    /// Records after those of the last page, from the crash log.
    pub(super) logged: Vec<Record>,
}

impl Survey {
    /// Creates a survey of a journal ring of `pages` pages in each of its `copies` copies.
    pub fn new(cache: [u8; 16], ring: u32, copies: usize, pages: u64) -> Survey {
        assert!((1..=2).contains(&copies), "a ring has one or two copies");
        let nothing = Seen { sequence: 0, committed: 0, dump_begin: 0, dump_end: 0, crc: 0, clean: false };
        let seen = vec![vec![nothing; pages as usize]; copies];
        Survey {
            cache,
            ring,
            pages,
            seen,
            newest: None,
            ordinals: BTreeSet::new(),
            doubtful: None,
            dirty: Vec::new(),
        }
    }

    /// Adds a page of one copy. Unreadable pages are not added.
    pub fn page(&mut self, copy: usize, number: u64, bytes: &[u8]) {
        if let Some(twin) = self.twin(copy, number, bytes) {
            // The other copy has the same bytes, so this copy adds no information.
            self.seen[copy][number as usize] = twin;
            return;
        }
        let mut runs = Vec::new();
        let dirty = &mut self.dirty;
        dirty.clear();
        let note_dirty = |_, state: &FrameState| {
            if state.has_dirty() {
                dirty.push(state.block);
            }
        };
        let Some(page) = Page::read(bytes, |first| runs.push(first), note_dirty) else { return };
        let header = &page.header;
        let ours = header.cache == self.cache && header.ring == self.ring;
        let slot = self.seen.get_mut(copy).and_then(|seen| seen.get_mut(number as usize));
        let Some(slot) = slot.filter(|_| ours && header.sequence % self.pages == number) else { return };
        *slot = Seen {
            sequence: header.sequence,
            committed: header.committed,
            dump_begin: header.dump_begin,
            dump_end: header.dump_end,
            crc: page.crc,
            clean: header.clean,
        };
        for first in runs {
            self.ordinals.insert(first / header.segment_frames);
        }
        self.note_doubtful(&page);
        if self.newest.as_ref().is_none_or(|newest| newest.sequence < header.sequence) {
            self.newest = Some(Box::new(page.header));
        }
    }

    /// Returns the state of the same page in the other copy of the journal ring, if both have equal
    /// bytes.
    fn twin(&self, copy: usize, number: u64, bytes: &[u8]) -> Option<Seen> {
        let others = self.seen.get(1usize.checked_sub(copy)?)?;
        let twin = others.get(number as usize).filter(|twin| twin.sequence > 0)?;
        (Page::sound_checksum(bytes) == Some(twin.crc)).then_some(*twin)
    }

    /// Adds the regions that a valid page describes as dirty to `doubtful`, the regions that may have
    /// dirty data.
    fn note_doubtful(&mut self, page: &Page<'_>) {
        let header = &page.header;
        let doubtful = self.doubtful.get_or_insert_with(|| Regions::new(header.disk_bytes));
        if doubtful.disk_bytes() != header.disk_bytes {
            // Pages with different disk sizes are rejected by the second reading.
            doubtful.insert_all();
            return;
        }
        let shift = header.block_shift;
        for block in self.dirty.drain(..) {
            doubtful.insert(u64::from(block) << shift, (u64::from(block) + 1) << shift);
        }
        page.records(|record| {
            if let Some((first, end)) = record.dirty_range(shift) {
                doubtful.insert(first, end);
            }
        });
    }

    /// Merges the result of another survey of the same ring, so that two threads can each survey a
    /// part of the pages.
    pub fn merge(&mut self, other: Survey) {
        assert!((self.cache, self.ring, self.pages) == (other.cache, other.ring, other.pages), "one ring");
        for (seen, others) in self.seen.iter_mut().flatten().zip(other.seen.into_iter().flatten()) {
            if others.sequence > 0 {
                *seen = others;
            }
        }
        self.ordinals.extend(other.ordinals);
        let sequence = |newest: &Option<Box<Header>>| newest.as_ref().map_or(0, |header| header.sequence);
        if sequence(&self.newest) < sequence(&other.newest) {
            self.newest = other.newest;
        }
        match (&mut self.doubtful, other.doubtful) {
            (Some(doubtful), Some(others)) => doubtful.insert_those_of(&others),
            (doubtful, others) => *doubtful = doubtful.take().or(others),
        }
    }

    /// Returns the result after all pages were added.
    pub fn finish(self) -> Ring {
        let mut found: Vec<(u8, Seen)> = Vec::new();
        for (copy, seen) in self.seen.iter().enumerate() {
            found.extend(seen.iter().filter(|seen| seen.sequence > 0).map(|seen| (copy as u8, *seen)));
        }
        found.sort_unstable_by_key(|(copy, seen)| (seen.sequence, *copy));
        found.dedup_by_key(|(_, seen)| seen.sequence);

        let mut end = None;
        let mut first_in_row = 0;
        for (i, (_, seen)) in found.iter().enumerate() {
            if i == 0 || found[i - 1].1.sequence + 1 != seen.sequence {
                first_in_row = i;
            }
            if seen.dump_begin > 0 && found[first_in_row].1.sequence <= seen.dump_begin {
                end = Some(i);
            }
        }
        let durable = found.iter().map(|(_, seen)| seen.committed).max().unwrap_or(0);
        let last = end.map_or(0, |end| found[end].1.sequence);
        if durable > last {
            return Ring::Damaged { missing: missing(&found, durable) };
        }
        match (end, self.newest, self.doubtful) {
            (Some(end), Some(newest), Some(doubtful)) => Ring::Whole(Plan::new(
                &found[..=end],
                &newest,
                self.pages,
                self.ordinals.into_iter().collect(),
                doubtful,
            )),
            _ => Ring::Unfinished,
        }
    }
}

/// Returns the sequence number of the last missing page up to `durable`.
fn missing(found: &[(u8, Seen)], durable: u64) -> u64 {
    let mut at = durable;
    while at > 0 && found.binary_search_by_key(&at, |(_, seen)| seen.sequence).is_ok() {
        at -= 1;
    }
    at
}

impl Record {
    /// Returns the sectors of the disk that the record describes as dirty.
    fn dirty_range(&self, block_shift: u32) -> Option<(u64, u64)> {
        let is_dirty = matches!(self.kind, Kind::Set { dirty: true, .. } | Kind::Unproven);
        let first = self.disk_sector(block_shift);
        is_dirty.then_some((first, first + u64::from(self.count)))
    }
}

impl Plan {
    /// Creates the plan of a readable ring. `found` ends with the last valid page.
    fn new(found: &[(u8, Seen)], header: &Header, pages: u64, ordinals: Vec<u32>, doubtful: Regions) -> Plan {
        let (_, last) = found[found.len() - 1];
        let count = (last.sequence - last.dump_begin + 1) as usize;
        let chosen = found[found.len() - count..].iter().map(|(copy, seen)| (*copy, seen.crc)).collect();
        Plan {
            ring: header.ring,
            block_bytes: (SECTOR_BYTES << header.block_shift) as u32,
            disk_bytes: header.disk_bytes,
            identity: header.identity,
            clean: last.clean,
            is_logged: false,
            was_killed: false,
            doubtful,
            block_shift: header.block_shift,
            segment_frames: header.segment_frames,
            begin: last.dump_begin,
            end: last.sequence,
            committed: last.committed,
            dump_end: last.dump_end,
            pages,
            chosen,
            ordinals,
            cache: header.cache,
            logged: Vec::new(),
        }
    }

    /// Continues the journal with the records of a crash log, if the log belongs to this journal
    /// ring. A crash log exists only if the host has not lost power since it was written.
    pub fn continue_with(&mut self, log: &[u8]) {
        let found = crash_log::records_after(log, &self.cache, self.ring, self.end);
        // A process that is killed just after the ring became valid has logged nothing in this ring.
        let is_new = self.begin == 1 && self.committed <= self.dump_end;
        self.is_logged = found.as_ref().map_or(is_new, |found| !found.has_gap);
        self.was_killed = found.as_ref().is_some_and(|found| !found.has_gap);
        self.continue_with_records(found.map_or(Vec::new(), |found| found.records));
    }

    /// Returns true if the crash log has records that make no sector dirty, such as a record of
    /// sectors that became clean or invalid. A power failure undoes these records until a new
    /// journal ring is complete.
    pub fn relies_on_crash_log(&self) -> bool {
        self.logged.iter().any(|record| record.dirty_range(self.block_shift).is_none())
    }

    pub(super) fn continue_with_records(&mut self, records: Vec<Record>) {
        let fits = |record: &Record| {
            let sectors = sectors_of_block(self.disk_bytes, self.block_shift, record.block);
            u16::from(record.first) + record.count <= sectors
        };
        self.logged = records.into_iter().take_while(fits).collect();
        for record in &self.logged {
            if let Some((first, end)) = record.dirty_range(self.block_shift) {
                self.doubtful.insert(first, end);
            }
        }
        // If the log has records, the cache was used after its journal was closed.
        self.clean &= self.logged.is_empty();
    }

    /// Returns the pages that [`Replay`](super::Replay) needs, in the required order: copy and page
    /// number.
    pub fn reads(&self) -> impl Iterator<Item = (usize, u64)> + use<'_> {
        let sequences = self.begin..=self.end;
        sequences.zip(&self.chosen).map(|(sequence, (copy, _))| (usize::from(*copy), sequence % self.pages))
    }
}
