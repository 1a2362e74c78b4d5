//! Commits of one cache's journal: packs records into pages and makes the pages durable.
//!
//! A request that needs durability waits for the next commit. When a commit begins, it packs all
//! existing records into pages. The commit writes these pages to every copy of the journal ring.
//! Then the commit flushes each device that was written since the last commit. A commit covers all
//! requests that arrived before it began. Full pages are written without waiting for a commit, and
//! so are pages that a guest's flush will soon need. The rules are in
//! docs/decisions/0006-write-back.md.

use super::awaiting_journal::WAIT_NS_MAX;
use super::disk::Disk;
use super::records::{Commit, Journal};
use super::structure::Opening;
use super::{Engine, Owner, Phase};
use crate::command::{Copies, Event};
use crate::io::{IoError, IoOp, Target};
use crate::journal::{SurvivingMemory, Writer};
use crate::range_locks::Range;
use crate::units::{DeviceId, DiskId, FrameNo, Instant};

/// Number of failed writes of one run of pages after which a copy of the journal ring is abandoned.
/// A failed flush is not retried: a later success is no evidence about earlier writes
/// (`backed.rs`).
const TRIES_MAX: u8 = 3;

/// A journal I/O in flight.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum JournalIo {
    /// A write of pages to one copy of the journal ring; `first` is the first page.
    Pages { first: u64, copy: u8, tries: u8 },
    /// A flush of a device for the commit in progress.
    Flush,
}

impl Disk {
    /// Removes the crash log of a cache that was closed or removed.
    pub(super) fn forget_crash_log(&mut self) {
        if let Some(mut memory) = self.surviving.take() {
            memory.remove();
        }
    }

    /// Copies the journal records that are not yet in a written page to the memory that outlives
    /// the process. Returns false if this memory lacks room for some of them, so that recovery
    /// might miss a record after the process is killed. Without such memory, returns true.
    pub(super) fn save_records(&mut self) -> bool {
        let Some(journal) = &mut self.journal else { return true };
        match &mut self.surviving {
            Some(memory) => journal.writer.save_records(&mut **memory),
            None => {
                journal.writer.forget_log();
                true
            }
        }
    }
}

impl Opening {
    /// Handles a failed flush of a device for the old cache, which is restored if the change fails.
    /// The old cache has no I/O in flight. `depends` is true if the new cache depends on the flush.
    fn distrust_old(&mut self, device: DeviceId, depends: bool) {
        let Some((cache, Some(journal))) = &mut self.old else { return };
        if journal.written.contains(&device) || depends && journal.uses(device, cache) {
            let lost_before = journal.lost.clone();
            self.distrusted |= !journal.exclude(device, cache, false);
            self.has_lost_copy |= journal.lost != lost_before;
        }
    }
}

impl Engine {
    /// Gives the engine memory for a disk's crash log ([`crate::journal::SurvivingMemory`]).
    /// Without this memory, acknowledged writes that are not flushed are lost if the process is
    /// killed. Returns false if there is no such disk.
    pub fn keep_records(&mut self, disk: DiskId, memory: Box<dyn SurvivingMemory>) -> bool {
        let Some(Some(disk)) = self.disks.get_mut(disk.0 as usize) else { return false };
        disk.surviving = Some(memory);
        true
    }

    /// Makes a request wait until all journal records and flash writes so far are durable.
    /// `Engine::committed` resumes the request.
    pub(super) fn commit(&mut self, slot: u32) {
        let disk = self.requests[slot].request.disk;
        let journal = self.journal_mut(disk).expect("only persistent caches commit");
        journal.waiting.push(slot);
        self.wake(disk);
    }

    pub(super) fn journal_mut(&mut self, disk: DiskId) -> Option<&mut Journal> {
        self.disk_mut(disk).journal.as_deref_mut()
    }

    /// Starts all journal work of a disk's cache that can begin now: packing records, page writes
    /// and flushes.
    pub(super) fn pump_journal(&mut self, now: Instant, disk: DiskId) {
        loop {
            let it = self.disk_mut(disk);
            let controls_pages = it.opening.as_ref().is_some_and(|opening| opening.controls_pages());
            let copies = it.cache.as_ref().map_or(Copies::One, |cache| cache.config.copies);
            let Some((journal, index)) = it.journal_and_index() else { return };
            if journal.dead {
                return self.fail_waiters(now, disk);
            }
            // A page that is sealed here could make the new ring valid before its last commit.
            if controls_pages && journal.round.is_none() {
                return;
            }
            if journal.round.is_none() {
                journal.prove_quiet(now, index);
            }
            match &journal.round {
                None if journal.is_due(now) => {
                    journal.record_rewritten(now, index, copies);
                    // First pack all records. If the ring is full, pack as many records as fit;
                    // another commit packs the rest.
                    let mut needs_page = journal.unsealed_marks || journal.unsealed_names;
                    let more = |writer: &Writer| std::mem::take(&mut needs_page) || writer.pending() > 0;
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
                None if journal.foresees_round() => {
                    journal.record_rewritten(now, index, copies);
                    let Some((first, bytes)) = journal.seal_ahead(index) else { return };
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
                        self.flush_device(now, disk, *device);
                    }
                    if devices.is_empty() {
                        self.end_round(now, disk);
                    }
                }
            }
        }
    }

    /// Writes sealed pages to every writable copy of the journal ring.
    pub(super) fn write_pages(&mut self, now: Instant, disk: DiskId, first: u64, bytes: Vec<u8>) {
        self.disk_mut(disk).save_records();
        let journal = self.journal_mut(disk).expect("the journal sealed these pages");
        let copies: Vec<u8> =
            (0..journal.lost.len()).filter(|i| !journal.lost[*i]).map(|i| i as u8).collect();
        journal.in_flight.insert(first, copies.len() as u8);
        for copy in copies {
            self.write_pages_to(now, disk, JournalIo::Pages { first, copy, tries: 1 }, bytes.clone());
        }
    }

    fn write_pages_to(&mut self, now: Instant, disk: DiskId, io: JournalIo, bytes: Vec<u8>) {
        let JournalIo::Pages { first, copy, .. } = io else { panic!("only page writes are retried") };
        let journal = self.journal_mut(disk).expect("the journal sealed these pages");
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
    }

    fn flush_device(&mut self, now: Instant, disk: DiskId, device: DeviceId) {
        let owner = Owner::Journal(JournalIo::Flush);
        self.issue(now, owner, disk, Target::Flash(device), IoOp::Flush, (0, 0), None, 0);
    }

    /// Handles the end of a journal I/O: a write of pages, or a flush of a device.
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
                return self.write_pages_to(now, disk, again, bytes.expect("a page write has its content"));
            }
            (JournalIo::Pages { first, copy, .. }, result) => {
                let journal = self.journal_mut(disk).expect("the operation is in flight");
                match result {
                    Ok(()) => _ = journal.written.insert(device),
                    Err(_) => journal.lost[usize::from(copy)] = true,
                }
                let loses_one = result.is_err() && journal.lost.contains(&false);
                let outstanding = journal.in_flight.get_mut(&first).expect("the operation is in flight");
                *outstanding -= 1;
                if *outstanding == 0 {
                    journal.in_flight.remove(&first);
                    journal.note_pages_written();
                }
                if journal.lost.iter().all(|lost| *lost) {
                    if let Some(opening) = &mut self.disk_mut(disk).opening {
                        opening.distrusted |= opening.may_be_valid();
                    }
                    self.lose_journal(now, disk);
                }
                if loses_one {
                    self.event_out.push_back(Event::JournalCopyLost(disk));
                }
            }
            (JournalIo::Flush, result) => {
                match result {
                    Ok(()) => self.flushed_device(disk, device),
                    Err(_) => self.distrust_device(now, disk, device),
                }
                let journal = self.journal_mut(disk).expect("the operation is in flight");
                let round = journal.round.as_mut().expect("a flush belongs to a commit");
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

    /// Ends a commit: all records and data that it covers are durable.
    fn end_round(&mut self, now: Instant, disk: DiskId) {
        let Engine { disks, range_locks, .. } = self;
        let it = disks[disk.0 as usize].as_mut().expect("disks outlive their I/O");
        let (journal, index) = it.journal_and_index().expect("a commit is in progress");
        let Commit { upto, waiters, releases, .. } = journal.round.take().expect("a commit is in progress");
        journal.writer.committed(upto);
        journal.durable = upto;
        journal.has_unawaited_marks &= journal.marks_pending();
        let shift = index.block_shift();
        for sector in releases {
            // A later record, which is not durable yet, will release this sector.
            if index.is_dirty(sector) || journal.releases.contains(&sector) {
                continue;
            }
            index.set_held(sector, false);
            // If the range is locked, the empty frame may be the target of a fill that is about to
            // start.
            let first = u64::from(index.block(FrameNo((sector >> shift) as u32)).0) << shift;
            if !range_locks.is_busy(&Range { disk, first, end: first + (1 << shift) }) {
                index.free_second_if_empty(sector);
            }
        }
        let is_named = journal.has_durable_names();
        if !is_named {
            // A device failed its flush in this commit. The next commit writes a page that names it.
            journal.waiting.extend(&waiters);
        }
        for slot in waiters.into_iter().filter(|_| is_named) {
            self.committed(now, slot, Ok(()));
        }
        self.wake(disk);
        // A commit without writes ends without I/O, and a change of the cache may wait for its end.
        self.unsettled.push(disk);
    }

    /// Handles a successful flush of a device. If an earlier flush failed, the device is trusted
    /// again when neither dirty data nor a write in progress depends on it.
    fn flushed_device(&mut self, disk: DiskId, device: DeviceId) {
        let disk = self.disk_mut(disk);
        let dirty = disk.cache.as_ref().map_or(0, |cache| cache.index.dirty_sectors());
        let depends = dirty > 0 || disk.flash_writes > 0;
        let Some(journal) = disk.journal.as_mut().filter(|journal| journal.spared.contains(&device)) else {
            return;
        };
        if !depends {
            journal.trust_again(device, disk.cache.as_ref());
        } else {
            journal.written.insert(device);
        }
        journal.mends = !journal.spared.is_empty();
    }

    /// Handles a failed flush of a device. `asked` is the disk whose commit requested the flush.
    /// Any write of any disk to that device since its last successful flush may be lost.
    pub(super) fn distrust_device(&mut self, now: Instant, asked: DiskId, device: DeviceId) {
        for index in 0..self.disks.len() {
            let id = DiskId(index as u32);
            // The device may already have received a part of a write that is in flight, and may
            // have lost this part with the failed flush.
            let is_writing = self.is_writing_to(id, device);
            let Some(disk) = self.disks[index].as_mut() else { continue };
            let Some(journal) = disk.journal.as_deref_mut() else { continue };
            let cache = disk.cache.as_ref().expect("a cache with a journal");
            let flushes = journal.round.as_ref().is_some_and(|round| round.flushes.is_some());
            let has_flush = (id == asked || flushes) && journal.uses(device, cache);
            let depends = has_flush || is_writing || journal.written.contains(&device);
            if let Some(opening) = &mut disk.opening {
                opening.distrust_old(device, depends);
            }
            if !depends {
                continue;
            }
            let lost_before = journal.lost.clone();
            // Flushes of both devices may fail while the two copies of a write are in flight.
            let is_other_spared = journal.spared.iter().any(|at| *at != device && cache.is_on(*at));
            let is_single = cache.config.copies == Copies::One || is_other_spared;
            let has_single_writes = disk.flash_writes > 0 && is_single || disk.has_old_single_writes;
            let was_dead = journal.dead;
            let is_kept = journal.exclude(device, cache, has_single_writes);
            if !was_dead && journal.lost != lost_before && journal.lost.contains(&false) {
                self.event_out.push_back(Event::JournalCopyLost(id));
            }
            if !is_kept {
                // If the page that makes a new journal ring valid may already be on flash, the old
                // ring cannot be used either.
                if let Some(opening) = disk.opening.as_mut().filter(|_| !was_dead) {
                    opening.distrusted |= opening.may_be_valid();
                }
                self.lose_journal(now, id);
            }
            self.wake(id);
            self.unsettled.push(id);
        }
    }

    /// Returns true if a write of a disk to a device is in flight.
    fn is_writing_to(&self, disk: DiskId, device: DeviceId) -> bool {
        self.ios.iter().any(|io| io.disk == disk && io.is_write && io.target == Target::Flash(device))
    }

    /// Handles a journal that cannot be written any more. The cache accepts no new dirty data, and
    /// existing dirty data is destaged. If the ring that failed is new and not complete yet, the
    /// engine reports no event, because the cache keeps the previous journal ring. The command that
    /// creates the ring reports the failure.
    pub(super) fn lose_journal(&mut self, now: Instant, disk: DiskId) {
        let is_new = self.disk(disk).opening.as_ref().is_some_and(|opening| opening.makes_ring());
        let journal = self.journal_mut(disk).expect("a lost journal still exists");
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

    /// Fails the requests that wait for a lost journal.
    fn fail_waiters(&mut self, now: Instant, disk: DiskId) {
        let journal = self.journal_mut(disk).expect("a lost journal still exists");
        let waited = journal.lost_at.is_some_and(|at| now - at >= WAIT_NS_MAX);
        let waiting = std::mem::take(&mut journal.waiting);
        if !waiting.is_empty() {
            // A change of the cache may have waited for these requests.
            self.unsettled.push(disk);
        }
        for slot in waiting {
            self.committed(now, slot, Err(IoError::Failed));
        }
        if waited {
            self.fail_awaiting_journal(now, disk);
        }
    }

    /// Resumes a request that waited for a commit, or makes it wait for a new journal.
    fn committed(&mut self, now: Instant, slot: u32, result: Result<(), IoError>) {
        match (self.requests[slot].phase, result) {
            (Phase::CommitThenChange, _) => self.runnable.push_back(slot),
            (Phase::CommitThenReply, _) if self.requests[slot].is_answered => self.finish_answered(slot),
            (Phase::CommitThenReply, Ok(())) => self.end_late(now, slot),
            (Phase::CommitThenFlush, Ok(())) => self.flush_committed(now, slot, result),
            (Phase::CommitThenReply | Phase::CommitThenFlush, Err(_)) => self.leave_unanswered(now, slot),
            (Phase::CommitThenThrough, Ok(())) => self.go_through(now, slot),
            (Phase::CommitThenThrough, Err(_)) => {
                self.leave_zones(slot);
                self.runnable.push_back(slot);
            }
            (other, _) => panic!("a request in {other:?} does not wait for a commit"),
        }
    }
}
