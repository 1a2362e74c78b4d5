//! The journal of one cache at work: records become pages, pages become durable.
//!
//! Whoever needs something durable waits for the next *round*: all records so far in pages, the pages written to
//! every copy of the ring, then a flush of each device that was written since the last one. All who came before a round
//! began are served by it. Full pages are written without waiting for a round. docs/decisions/0006 has the rules.

use std::collections::{BTreeMap, BTreeSet};

use super::stranded::WAIT_NS_MAX;
use super::{Active, Engine, Owner, Phase};
use crate::cache::Cache;
use crate::claims::Range;
use crate::command::{Copies, Event, NewRing};
use crate::index::Index;
use crate::io::{IoError, IoOp, Target};
use crate::journal::{Change, PAGE_BYTES, Writer};
use crate::units::{DeviceId, DiskId, FrameNo, Instant};

/// Pages in one I/O at most.
const RUN_PAGES_MAX: u64 = 16;

/// What is recorded is durable within this time, though nobody waits for it.
const COMMIT_NS_MAX: u64 = 1_000_000_000;

/// A copy of the ring is given up after so many failed writes of one run of pages; the journal after so many
/// failed flushes.
const TRIES_MAX: u8 = 3;

/// A page run or a flush in flight.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum JournalIo {
    /// Pages from `first` on, of one copy.
    Pages { first: u64, copy: u8, tries: u8 },
    /// A flush of a device, for the round.
    Flush { tries: u8 },
}

/// See the module's text.
pub(super) struct Journal {
    pub(super) writer: Writer,
    ring: NewRing,
    segment_bytes: u64,
    /// Copies that cannot be written any more.
    lost: Vec<bool>,
    /// Runs of pages being written, by their first page: how many copies are outstanding.
    in_flight: BTreeMap<u64, u8>,
    /// Devices written since they were flushed.
    written: BTreeSet<DeviceId>,
    /// Of these, those whose last flush failed, though nothing depended on them alone. Dirty data gets no checksum in the
    /// journal when it is overwritten, and without one nobody knows which copy is right: none is written meanwhile.
    pub(super) spared: BTreeSet<DeviceId>,
    /// Something was recorded or written that a guest's flush must make durable.
    pub(super) urgent: bool,
    /// Marks of zones that no page has yet, and the page that has the newest.
    unsealed_marks: bool,
    marks_in: u64,
    /// The last page known to be durable.
    durable: u64,
    waiting: Vec<u32>,
    /// Unproven sectors that have been overwritten since the last proof, and are not being overwritten.
    rewritten: BTreeSet<u64>,
    /// Somebody is waiting who is not among them.
    asked: bool,
    /// Sectors that are not dirty any more, though the durable journal may say so.
    releases: Vec<u64>,
    round: Option<Round>,
    /// When the oldest record that is not durable was made.
    oldest: Option<Instant>,
    /// Nothing can be recorded any more.
    pub(super) dead: bool,
    /// Since when, if it was in service.
    lost_at: Option<Instant>,
}

/// A commit under way.
struct Round {
    /// The last page it makes durable.
    upto: u64,
    waiters: Vec<u32>,
    releases: Vec<u64>,
    /// Flushes in flight; `None` while pages are being written.
    flushes: Option<u32>,
    /// A guest's flush would have to wait for it.
    urgent: bool,
}

impl Journal {
    pub(super) fn new(writer: Writer, ring: NewRing, segment_bytes: u64) -> Journal {
        Journal {
            writer,
            lost: vec![false; ring.copies.len()],
            ring,
            segment_bytes,
            in_flight: BTreeMap::new(),
            written: BTreeSet::new(),
            spared: BTreeSet::new(),
            urgent: false,
            unsealed_marks: false,
            marks_in: 0,
            durable: 0,
            waiting: Vec::new(),
            rewritten: BTreeSet::new(),
            asked: false,
            releases: Vec::new(),
            round: None,
            oldest: None,
            dead: false,
            lost_at: None,
        }
    }

    /// When it was lost, if it was.
    pub(super) fn lost_at(&self) -> Option<Instant> {
        self.lost_at
    }

    /// Adds a record. When it is durable, the sector `release` is held no longer, unless it is dirty then.
    pub(super) fn record(&mut self, now: Instant, change: Change, release: Option<u64>) {
        if self.dead {
            return;
        }
        self.writer.push(change);
        self.releases.extend(release);
        self.oldest.get_or_insert(now);
    }

    /// Marks a zone.
    pub(super) fn mark(&mut self, zone: usize) {
        self.writer.mark(zone);
        self.unsealed_marks = true;
    }

    /// Are there marks that are not durable?
    pub(super) fn marks_pending(&self) -> bool {
        self.unsealed_marks || self.marks_in > self.durable
    }

    /// Is there something that a guest's flush has to wait for?
    pub(super) fn needs_commit(&self) -> bool {
        self.urgent || self.round.as_ref().is_some_and(|round| round.urgent)
    }

    /// Is a round under way?
    pub(super) fn has_round(&self) -> bool {
        self.round.is_some()
    }

    /// Runs of pages being written.
    pub(super) fn runs_in_flight(&self) -> usize {
        self.in_flight.len()
    }

    /// Sectors from `sector` on have been filled, and are valid. They are clean, but for second copies of what is dirty: either copy
    /// may be the one that stays.
    pub(super) fn record_filled(&mut self, now: Instant, index: &mut Index, sector: u64, sums: &[u32]) {
        for (at, sum) in (sector..).zip(sums) {
            let ((frame, block, inside), sum) = (index.locate(at), *sum);
            let first = index.of_second(at);
            let dirty = first.is_some_and(|first| index.is_dirty(first));
            if dirty {
                index.set_dirty(at);
                index.set_held(at, true);
            }
            let change = Change::Set { frame, block, sector: inside, sum, dirty, second: first.is_some() };
            self.record(now, change, None);
        }
    }

    /// The backing durably has what a sector holds.
    pub(super) fn clean_sector(&mut self, now: Instant, index: &mut Index, sector: u64) {
        let (frame, block, first) = index.locate(sector);
        let change = if index.is_unproven(sector) {
            let (sum, second) = (index.sum(sector), index.first_of(frame).is_some());
            Change::Set { frame, block, sector: first, sum, dirty: false, second }
        } else {
            Change::Clean { frame, block, first, count: 1 }
        };
        self.record(now, change, Some(sector));
        index.clear_dirty(sector, 1);
    }

    /// An unproven sector is being overwritten.
    pub(super) fn overwrites(&mut self, sector: u64) {
        self.rewritten.remove(&sector);
    }

    /// An unproven sector has been overwritten.
    pub(super) fn overwrote(&mut self, sector: u64) {
        self.rewritten.insert(sector);
    }

    /// Before a commit that somebody waits for: where there are two copies, a checksum has to tell which of them is right.
    fn prove_rewritten(&mut self, now: Instant, index: &mut Index) {
        let rewritten = std::mem::take(&mut self.rewritten);
        let is_first =
            |sector: &u64| index.of_second(*sector).is_none_or(|first| !rewritten.contains(&first));
        // The two copies of a sector side by side: see `Writer`.
        let firsts: Vec<u64> = rewritten.iter().copied().filter(is_first).collect();
        for first in firsts {
            let second = index.second_sector(first).filter(|second| rewritten.contains(second));
            for sector in [Some(first), second].into_iter().flatten() {
                if index.is_dirty(sector) && index.is_unproven(sector) && !index.is_sum_unknown(sector) {
                    self.prove_sector(now, index, sector);
                }
            }
        }
    }

    /// Records what evictions took out of frames: a crash must not bring it back when the backing has changed.
    pub(super) fn record_gone(&mut self, now: Instant, cache: &mut Cache) {
        for (frame, block) in cache.take_gone() {
            // Of the last block, as much as there is of the disk: a page that speaks of more is refused.
            let count = self.writer.sectors_of(block);
            self.record(now, Change::Drop { frame, block, first: 0, count }, None);
        }
    }

    /// Records that sectors hold nothing, whatever the index says.
    pub(super) fn record_void(&mut self, now: Instant, index: &Index, sectors: std::ops::Range<u64>) {
        for sector in sectors {
            let (frame, block, first) = index.locate(sector);
            self.record(now, Change::Drop { frame, block, first, count: 1 }, None);
        }
    }

    /// May the durable journal call sectors dirty that are not?
    pub(super) fn has_releases(&self) -> bool {
        let in_round = self.round.as_ref().is_some_and(|round| !round.releases.is_empty());
        !self.dead && (in_round || !self.releases.is_empty())
    }

    /// Lets the next round begin at once.
    pub(super) fn ask(&mut self) {
        self.asked = true;
    }

    /// Is a dirty sector durably recorded as such?
    pub(super) fn is_committed(&self, index: &Index, sector: u64) -> bool {
        let (frame, _, inside) = index.locate(sector);
        self.writer.is_committed(frame, inside)
    }

    /// Records the checksum of a dirty sector of which the journal has none.
    pub(super) fn prove_sector(&mut self, now: Instant, index: &mut Index, sector: u64) {
        self.record_dirty(now, index, sector);
        index.set_unproven(sector, false);
    }

    /// Records that a dirty sector has the checksum that the index knows.
    pub(super) fn record_dirty(&mut self, now: Instant, index: &Index, sector: u64) {
        let (frame, block, inside) = index.locate(sector);
        let (sum, second) = (index.sum(sector), index.first_of(frame).is_some());
        self.record(now, Change::Set { frame, block, sector: inside, sum, dirty: true, second }, None);
    }

    /// Gives up what a sector holds, if anything.
    pub(super) fn drop_sector(&mut self, now: Instant, index: &mut Index, sector: u64) {
        if !index.is_valid(sector) {
            return;
        }
        let (frame, block, first) = index.locate(sector);
        let release = index.is_held(sector).then_some(sector);
        self.record(now, Change::Drop { frame, block, first, count: 1 }, release);
        index.clear_valid(sector, 1);
    }

    /// Data was written to a device.
    pub(super) fn wrote(&mut self, device: DeviceId) {
        self.written.insert(device);
    }

    /// Is nothing under way, and nobody waiting?
    pub(super) fn is_idle(&self) -> bool {
        self.round.is_none() && self.in_flight.is_empty() && self.waiting.is_empty()
    }

    /// The segments of all copies of its ring.
    pub(super) fn segments(&self) -> impl Iterator<Item = crate::command::Segment> {
        self.ring.copies.iter().flatten().copied()
    }

    /// Is a round to begin?
    fn is_due(&self, now: Instant) -> bool {
        self.asked
            || !self.waiting.is_empty()
            || self.writer.wants_commit()
            || self.deadline().is_some_and(|at| at <= now)
    }

    /// When it wants to be looked at.
    pub(super) fn deadline(&self) -> Option<Instant> {
        if self.dead || self.round.is_some() { None } else { self.oldest.map(|at| at + COMMIT_NS_MAX) }
    }

    /// Seals pages that go into one I/O: at most [`RUN_PAGES_MAX`], not past the end of the ring or of a segment.
    pub(super) fn seal_run(
        &mut self,
        index: &Index,
        mut more: impl FnMut(&Writer) -> bool,
    ) -> Option<(u64, Vec<u8>)> {
        let mut bytes = Vec::new();
        let mut first = None;
        while more(&self.writer) && !self.writer.must_wait() {
            let sequence = self.writer.seal(index, &mut bytes);
            let first = *first.get_or_insert(sequence);
            if std::mem::take(&mut self.unsealed_marks) {
                self.marks_in = sequence;
            }
            let next = self.writer.page_number(sequence + 1);
            let ends = next == 0 || (next * PAGE_BYTES as u64).is_multiple_of(self.segment_bytes);
            if ends || sequence + 1 - first == RUN_PAGES_MAX {
                break;
            }
        }
        first.map(|first| (first, bytes))
    }

    /// Where page number `number` of a copy lies.
    fn place(&self, copy: usize, number: u64) -> (DeviceId, u64) {
        let at = number * PAGE_BYTES as u64;
        let segment = self.ring.copies[copy][(at / self.segment_bytes) as usize];
        (segment.device, segment.offset + at % self.segment_bytes)
    }
}

impl Engine {
    /// Keeps a request until everything recorded and written so far is durable; `Engine::committed` goes on with it.
    pub(super) fn commit(&mut self, slot: u32) {
        let disk = self.requests[slot].request.disk;
        let journal = self.journal_mut(disk).expect("only persistent caches commit");
        journal.waiting.push(slot);
        self.wake(disk);
    }

    pub(super) fn journal_mut(&mut self, disk: DiskId) -> Option<&mut Journal> {
        self.disk_mut(disk).journal.as_deref_mut()
    }

    /// Does what the journal of a disk's cache can do now.
    pub(super) fn pump_journal(&mut self, now: Instant, disk: DiskId) {
        loop {
            let it = self.disk_mut(disk);
            let is_twofold = it.cache.as_ref().is_some_and(|cache| cache.config.copies != Copies::One);
            let Some((journal, index)) = it.journal_and_index() else { return };
            if journal.dead {
                return self.fail_waiters(now, disk);
            }
            match &journal.round {
                None if journal.is_due(now) => {
                    if is_twofold && !journal.waiting.is_empty() {
                        journal.prove_rewritten(now, index);
                    }
                    // All records first; a ring that is full takes as many as it can, and another round follows.
                    let mut marks = journal.unsealed_marks;
                    let more = |writer: &Writer| std::mem::take(&mut marks) || writer.pending() > 0;
                    if let Some((first, bytes)) = journal.seal_run(index, more) {
                        self.write_pages(now, disk, first, bytes);
                        continue;
                    }
                    journal.begin_round();
                }
                None if journal.writer.has_full_page() => {
                    let run = journal.seal_run(index, Writer::has_full_page);
                    let Some((first, bytes)) = run else { return };
                    self.write_pages(now, disk, first, bytes);
                }
                None => return,
                Some(round) => {
                    let upto = round.upto;
                    if round.flushes.is_some()
                        || journal.in_flight.keys().next().is_some_and(|at| *at <= upto)
                    {
                        return;
                    }
                    let devices = std::mem::take(&mut journal.written);
                    journal.round.as_mut().expect("matched").flushes = Some(devices.len() as u32);
                    for device in &devices {
                        self.flush_device(now, disk, *device, 1);
                    }
                    if devices.is_empty() {
                        self.end_round(now, disk);
                    }
                }
            }
        }
    }

    /// Writes sealed pages to every copy that can be written.
    pub(super) fn write_pages(&mut self, now: Instant, disk: DiskId, first: u64, bytes: Vec<u8>) {
        let journal = self.journal_mut(disk).expect("it sealed them");
        let copies: Vec<u8> =
            (0..journal.lost.len()).filter(|i| !journal.lost[*i]).map(|i| i as u8).collect();
        journal.in_flight.insert(first, copies.len() as u8);
        for copy in copies {
            self.write_pages_to(now, disk, JournalIo::Pages { first, copy, tries: 1 }, bytes.clone());
        }
    }

    fn write_pages_to(&mut self, now: Instant, disk: DiskId, io: JournalIo, bytes: Vec<u8>) {
        let JournalIo::Pages { first, copy, .. } = io else { panic!("pages are written") };
        let journal = self.journal_mut(disk).expect("it sealed them");
        let (device, offset) = journal.place(usize::from(copy), journal.writer.page_number(first));
        let len = bytes.len() as u64;
        self.disk_mut(disk).stats.journal_bytes += len;
        let id = self.issue(
            now,
            Owner::Journal(io),
            disk,
            Target::Flash(device),
            IoOp::WriteJournal,
            (offset, len),
            None,
            0,
        );
        self.pages.insert(id, bytes);
        let serial = self.serial;
        self.devices.get(device).issued(id, serial, now);
    }

    fn flush_device(&mut self, now: Instant, disk: DiskId, device: DeviceId, tries: u8) {
        let owner = Owner::Journal(JournalIo::Flush { tries });
        let id = self.issue(now, owner, disk, Target::Flash(device), IoOp::Flush, (0, 0), None, 0);
        let serial = self.serial;
        self.devices.get(device).issued(id, serial, now);
    }

    /// A page run or a flush ended.
    pub(super) fn journal_io_done(
        &mut self,
        now: Instant,
        disk: DiskId,
        io: JournalIo,
        target: Target,
        bytes: Option<Vec<u8>>,
        result: Result<(), IoError>,
    ) {
        let Target::Flash(device) = target else { panic!("journals are on flash") };
        match (io, result) {
            (JournalIo::Pages { first, copy, tries }, Err(_)) if tries < TRIES_MAX => {
                let again = JournalIo::Pages { first, copy, tries: tries + 1 };
                return self.write_pages_to(now, disk, again, bytes.expect("pages have bytes"));
            }
            (JournalIo::Flush { tries }, Err(_)) if tries < TRIES_MAX => {
                return self.flush_device(now, disk, device, tries + 1);
            }
            (JournalIo::Pages { first, copy, .. }, result) => {
                let journal = self.journal_mut(disk).expect("in flight");
                match result {
                    Ok(()) => _ = journal.written.insert(device),
                    Err(_) => journal.lost[usize::from(copy)] = true,
                }
                let outstanding = journal.in_flight.get_mut(&first).expect("in flight");
                *outstanding -= 1;
                if *outstanding == 0 {
                    journal.in_flight.remove(&first);
                }
                if journal.lost.iter().all(|lost| *lost) {
                    self.lose_journal(now, disk);
                }
            }
            (JournalIo::Flush { .. }, result) => {
                let spared = result.is_err() && self.spare_device(disk, device);
                if result.is_err() && !spared {
                    self.lose_journal(now, disk);
                }
                let journal = self.journal_mut(disk).expect("in flight");
                if spared {
                    // The next round tries again.
                    journal.spared.insert(device);
                    journal.written.insert(device);
                } else {
                    journal.spared.remove(&device);
                }
                let round = journal.round.as_mut().expect("a flush belongs to a round");
                let left = round.flushes.as_mut().expect("a flush is in flight");
                *left -= 1;
                if *left == 0 && !journal.dead {
                    self.end_round(now, disk);
                } else if *left == 0 {
                    let round = journal.round.take().expect("matched");
                    journal.waiting.extend(round.waiters);
                }
            }
        }
        self.wake(disk);
        self.unsettled.push(disk);
    }

    /// Everything the round was to make durable is.
    fn end_round(&mut self, now: Instant, disk: DiskId) {
        let Engine { disks, claims, .. } = self;
        let it = disks[disk.0 as usize].as_mut().expect("disks outlive their I/O");
        let (journal, index) = it.journal_and_index().expect("it had a round");
        let Round { upto, waiters, releases, .. } = journal.round.take().expect("it had a round");
        journal.writer.committed(upto);
        journal.durable = upto;
        let shift = index.block_shift();
        for sector in releases {
            if index.is_dirty(sector) {
                continue;
            }
            index.set_held(sector, false);
            // What is empty may be about to be filled.
            let first = u64::from(index.block(FrameNo((sector >> shift) as u32)).0) << shift;
            if !claims.is_busy(&Range { disk, first, end: first + (1 << shift) }) {
                index.free_second_if_empty(sector);
            }
        }
        for slot in waiters {
            self.committed(now, slot, Ok(()));
        }
        self.wake(disk);
        // A round that had nothing to write ends without I/O, and may be what a change of the cache waits for.
        self.unsettled.push(disk);
    }

    /// A device does not make anything durable. True if nothing depends on it alone: the ring has another copy, and so has
    /// all dirty data, or gets it before anybody is told.
    fn spare_device(&mut self, disk: DiskId, device: DeviceId) -> bool {
        let Engine { disks, requests, .. } = self;
        let on_its_way = |active: &&Active| active.phase == Phase::FlashWrite && active.request.disk == disk;
        let written: Vec<Range> = requests.iter().filter(on_its_way).map(|active| active.range).collect();
        let disk = disks[disk.0 as usize].as_mut().expect("disks outlive their I/O");
        let (Some(cache), Some(journal)) = (&disk.cache, &mut disk.journal) else { return false };
        let on_it: Vec<_> =
            cache.segments.iter().filter(|segment| segment.place.device == device).copied().collect();
        for (copy, lost) in journal.ring.copies.iter().zip(&mut journal.lost) {
            *lost |= copy.iter().any(|segment| segment.device == device);
        }
        let is_written = |at| written.iter().any(|range| (range.first..range.end).contains(&at));
        !journal.lost.iter().all(|lost| *lost) && !cache.would_lose_dirty(&on_it, is_written)
    }

    /// The journal cannot be written: no more dirty data, and what there is goes to the backing. That a ring which is being
    /// made fails says its command: the cache has the one before it still.
    fn lose_journal(&mut self, now: Instant, disk: DiskId) {
        let is_new = self.disk(disk).opening.as_ref().is_some_and(|opening| opening.makes_ring());
        let journal = self.journal_mut(disk).expect("it is lost");
        if !std::mem::replace(&mut journal.dead, true) {
            if journal.round.as_ref().is_some_and(|round| round.flushes.is_none()) {
                let round = journal.round.take().expect("matched");
                journal.waiting.extend(round.waiters);
            }
            if !is_new {
                journal.lost_at = Some(now);
                self.event_out.push_back(Event::JournalLost(disk));
            }
        }
    }

    /// Tells those who wait for a journal that is lost.
    fn fail_waiters(&mut self, now: Instant, disk: DiskId) {
        let journal = self.journal_mut(disk).expect("it is lost");
        let waited = journal.lost_at.is_some_and(|at| now - at >= WAIT_NS_MAX);
        let waiting = std::mem::take(&mut journal.waiting);
        if !waiting.is_empty() {
            // A change may have waited for them.
            self.unsettled.push(disk);
        }
        for slot in waiting {
            self.committed(now, slot, Err(IoError::Failed));
        }
        if waited {
            self.fail_stranded(now, disk);
        }
    }

    /// A request that waited for a commit goes on, or waits for another journal.
    fn committed(&mut self, now: Instant, slot: u32, result: Result<(), IoError>) {
        match (self.requests[slot].phase, result) {
            (Phase::CommitThenChange, _) => self.runnable.push_back(slot),
            (Phase::CommitThenReply, Ok(())) => self.end_written(now, slot, result),
            (Phase::CommitThenFlush, Ok(())) => self.flush_committed(now, slot, result),
            (Phase::CommitThenReply | Phase::CommitThenFlush, Err(_)) => self.leave_unanswered(now, slot),
            (Phase::CommitThenThrough, Ok(())) => self.go_through(now, slot),
            (Phase::CommitThenThrough, Err(_)) => {
                self.leave_zones(slot);
                self.runnable.push_back(slot);
            }
            (other, _) => panic!("a request in {other:?} waits for a commit"),
        }
    }
}

impl Journal {
    /// All records are in pages, unless the ring is full: then those who wait go on waiting.
    pub(super) fn begin_round(&mut self) {
        let complete = self.writer.pending() == 0 && !self.unsealed_marks;
        let urgent = self.urgent;
        let waiters = if complete { std::mem::take(&mut self.waiting) } else { Vec::new() };
        let releases = if complete { std::mem::take(&mut self.releases) } else { Vec::new() };
        self.asked = false;
        if complete {
            self.oldest = None;
            self.urgent = false;
        }
        self.round = Some(Round { upto: self.writer.sealed(), waiters, releases, flushes: None, urgent });
    }
}
