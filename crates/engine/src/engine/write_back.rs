//! Executes writes, discards and zeroing on a disk with a persistent cache. They go to flash, or to
//! the backing with a record in the journal.
//!
//! | the range of the request | action |
//! |---|---|
//! | whole sectors, mode write-back, free frames | written to flash |
//! | the same, some sectors partly covered | these sectors are merged first (`partial.rs`) |
//! | partly covered dirty sectors that cannot be merged | these sectors are destaged first |
//! | part of a long run while too much data is dirty | written to the backing (`bulk.rs`) |
//! | over dirty sectors | backing change, backing flush, `Drop` records, reply |
//! | all others | the bypass marks of the zones are committed, then as in a volatile cache |
//!
//! If the durable journal describes the data that a write to flash overwrites, a commit comes
//! first (`overwrite.rs`). Sectors are destaged first under the request's own range lock.

use std::collections::BTreeSet;

use super::bulk::Bulk;
use super::disk::Disk;
use super::jobs::JobKind;
use super::partial::EdgeSource;
use super::{Active, Engine, Pending, Phase};
use crate::admission::AdmissionEffect;
use crate::cache::push_run;
use crate::command::{Copies, Layout, Mode, Role};
use crate::directory::Departure;
use crate::index::parts::ALL_UNITS;
use crate::io::{Durability, IoError, IoOp, Op, Target};
use crate::journal::Writer;
use crate::outcome::Outcome;
use crate::range_locks::Range;
use crate::units::{DiskId, FrameNo, Instant, SECTOR_BYTES};

/// Time without writes after which a zone's bypass mark is removed, nanoseconds.
const ZONE_QUIET_NS: u64 = 5_000_000_000;

impl Disk {
    /// Returns the mode that currently applies to writes. A write-back cache writes through while
    /// it is drained, has no working journal, or lacks the peer for its second copies.
    pub(super) fn mode_in_effect(&self) -> Option<Mode> {
        let cache = self.cache.as_ref()?;
        let journal = self.journal.as_deref().filter(|journal| !journal.dead && journal.spared.is_empty());
        // A second copy on a peer is useful only if the peer also has a copy of the journal, which
        // describes the second copy.
        let is_mirrored = journal.is_some_and(|journal| journal.ring.copies.len() > 1);
        let has_seconds = cache.config.copies != Copies::Peer || is_mirrored && cache.second_sectors() > 0;
        Some(match cache.config.mode {
            Mode::WriteBack if journal.is_none() || self.draining.is_some() || !has_seconds => {
                Mode::WriteThrough
            }
            mode => mode,
        })
    }

    /// Sets the bypass marks of zones whose data on the backing may not be durable yet.
    /// [`Engine::pump_zones`] removes them after a flush.
    pub(super) fn mark_unflushed(&mut self, now: Instant, zones: &BTreeSet<usize>) {
        let Some(journal) = self.journal.as_mut().filter(|journal| !journal.dead) else { return };
        for zone in zones {
            journal.mark(*zone);
            let (_, writes, since) = self.zones.entry(*zone).or_default();
            (*writes, *since) = (self.backed.writes, now);
        }
        if !zones.is_empty() {
            self.zones_due.get_or_insert(now + ZONE_QUIET_NS);
        }
    }
}

impl Engine {
    /// Handles a change that has its range lock, on a disk whose cache has a journal.
    pub(super) fn change_persistent(&mut self, now: Instant, slot: u32) {
        let Active { request, range, failed, .. } = self.requests[slot];
        if !failed && self.goes_to_flash(slot) {
            if self.breaks_order(request.disk, range.first, range.end, false) {
                return self.wait_for_order(now, slot);
            }
            if self.bypasses_as_bulk(now, slot) {
                return self.change_past_cache(now, slot);
            }
            if self.leave_segments(now, slot) || self.write_to_flash(now, slot) {
                return;
            }
            self.record_gone(now, request.disk);
        }
        self.change_past_cache(now, slot);
    }

    fn goes_to_flash(&self, slot: u32) -> bool {
        let Active { request, .. } = self.requests[slot];
        let disk = self.disk(request.disk);
        let mode = disk.mode_in_effect();
        let sectors = disk.cache.as_ref().map_or(0, |cache| cache.first_sectors());
        let is_write = matches!(request.op, Op::Write(_)) || self.requests[slot].is_zeroes_for_flash(sectors);
        mode == Some(Mode::WriteBack) && is_write && self.may_be_whole(slot)
    }

    /// Makes a change wait, without its range lock, until older data is on the backing. If another
    /// host owns the disk, this host does not destage the older data, so the change fails.
    fn wait_for_order(&mut self, now: Instant, slot: u32) {
        let disk = self.requests[slot].request.disk;
        if self.disk(disk).ownership.role == Role::Away {
            return self.end_change(now, slot, Err(IoError::ShuttingDown));
        }
        self.forget_edges(slot);
        let runnable = &mut self.runnable;
        self.range_locks.leave(slot, |granted| runnable.push_back(granted));
        self.disk_mut(disk).destager.order_waiters.push(slot);
        self.wake(disk);
    }

    /// Moves the blocks of a write out of segments that are being vacated, without copying their
    /// contents. Returns true if the write has to wait.
    fn leave_segments(&mut self, now: Instant, slot: u32) -> bool {
        let Active { request, range, .. } = self.requests[slot];
        let insists = self.insists(now, request.disk);
        let Engine { disks, range_locks, .. } = self;
        let disk = disks[request.disk.0 as usize].as_mut().expect("disks outlive their requests");
        if disk.cache.as_ref().is_none_or(|cache| cache.leaving().is_empty()) {
            return false;
        }
        let lost = std::mem::take(&mut disk.lost);
        let (mut evicted, mut commits, mut waits) = (0, false, false);
        if let Ok(cache) = disk.serving() {
            let shift = cache.block_shift();
            let is_busy = |first, end| range_locks.is_busy(&Range { disk: request.disk, first, end });
            for span in cache.spans(range.first, range.end) {
                let Some(sector) = cache.find(span) else { continue };
                if !cache.index.leaves(FrameNo((sector >> shift) as u32)) {
                    continue;
                }
                let first = u64::from(span.block.0) << shift;
                let whole = Range { disk: request.disk, first, end: first + (1 << shift) };
                match cache.depart(sector, range_locks.is_shared(slot, &whole), is_busy) {
                    Departure::To(_, gone) => evicted += gone,
                    Departure::AfterCommit => commits = true,
                    Departure::Stays => waits |= insists && cache.block_is_to_leave(span.block, &lost),
                }
            }
        }
        disk.lost = lost;
        if evicted > 0 {
            disk.record_eviction(now, evicted);
        }
        self.record_gone(now, request.disk);
        if waits {
            self.wait_for_vacating(slot);
        } else if commits {
            self.requests[slot].phase = Phase::CommitThenChange;
            self.commit(slot);
        }
        waits || commits
    }

    /// Starts a write to flash, or the commit that must precede the write. Returns false if there
    /// are not enough free frames.
    fn write_to_flash(&mut self, now: Instant, slot: u32) -> bool {
        let Active { request, range, run, .. } = self.requests[slot];
        let Engine { disks, range_locks, runs, requests, .. } = self;
        let disk = disks[request.disk.0 as usize].as_mut().expect("disks outlive their requests");
        let Ok(cache) = disk.serving() else { return false };
        let is_split = cache.config.layout != Layout::Unified;
        let is_full = cache.dirty_permille() >= cache.full_permille();
        let is_busy = |first, end| range_locks.is_busy(&Range { disk: request.disk, first, end });
        runs.clear();
        let (mut evicted, mut buffer_sector) = (0, 0);
        let mut seconds = Vec::new();
        for span in cache.spans(range.first, range.end) {
            let found = cache.find(span);
            // The write buffer of a split cache has its own frames, so writing to blocks of the
            // read cache frees none of them.
            let is_new = |sector| is_split && cache.index.count_dirty(sector, span.count) < span.count;
            if is_full && found.is_none_or(is_new) {
                return false;
            }
            let Ok(placed) = cache.bring(span, found, (run, AdmissionEffect::Dirty), is_busy) else {
                requests[slot].not_admitted = true;
                return false;
            };
            evicted += placed.evicted;
            push_run(runs, cache.extent(placed.sector, span.count), buffer_sector);
            // An existing second copy must be updated together with the first copy.
            if cache.config.copies != Copies::One || cache.index.second_sector(placed.sector).is_some() {
                let (second, gone) = cache.double(placed.sector, is_busy);
                evicted += gone;
                let Some(second) = second else { return false };
                seconds.push((cache.extent(second, span.count), buffer_sector));
            }
            buffer_sector += span.count;
        }
        for (extent, buffer_sector) in seconds {
            push_run(runs, extent, buffer_sector);
        }
        if evicted > 0 {
            disk.record_eviction(now, evicted);
        }
        self.record_gone(now, request.disk);
        if !self.take_zeroes(slot) || self.splits_units(slot) {
            return false;
        }
        if !self.requests[slot].has_whole_units() {
            // Sectors that were incomplete when they were merged have left the cache since.
            self.requests[slot].forget_units();
        }
        self.leave_edges_incomplete(now, slot);
        if self.read_edges(now, slot, EdgeSource::FlashOrBacking) {
            return true;
        }
        if !self.requests[slot].is_for_flash() {
            return false;
        }
        if self.must_commit_first(now, slot) {
            self.requests[slot].phase = Phase::CommitThenChange;
            self.commit(slot);
            return true;
        }
        if !self.begin_parts(slot) {
            return self.read_edges(now, slot, EdgeSource::FlashOrBacking);
        }
        let disk = self.disks[request.disk.0 as usize].as_mut().expect("disks outlive their requests");
        disk.destager.cut(range.first, range.end);
        let (journal, index) = disk.journal_and_index().expect("the cache was just written");
        for extent in self.runs.iter().map(|run| run.extent) {
            for sector in extent.sector..extent.sector + extent.count {
                assert!(journal.may_overwrite(index, sector), "a commit records an overwrite first");
                if index.is_unproven(sector) {
                    journal.overwrites.begin(sector);
                }
                if !index.is_dirty(sector) {
                    index.clear_valid(sector, 1);
                }
            }
        }
        disk.flash_writes += 1;
        self.recent_edges.forget(request.disk, range.first, range.end);
        self.requests[slot].phase = Phase::FlashWrite;
        self.place_zeroes(slot);
        self.issue_runs(now, slot, IoOp::Write(Durability::Volatile));
        true
    }

    /// Records evictions in the journal.
    fn record_gone(&mut self, now: Instant, disk: DiskId) {
        let disk = self.disk_mut(disk);
        if let (Some(cache), Some(journal)) = (&mut disk.cache, &mut disk.journal) {
            journal.record_gone(now, cache);
        }
    }

    /// Handles the end of one flash write of a request.
    pub(super) fn flash_write_done(
        &mut self,
        now: Instant,
        slot: u32,
        io: &Pending,
        result: Result<(), IoError>,
        sums: &[u32],
    ) {
        let Active { request, range, pending, .. } = self.requests[slot];
        let Target::Flash(device) = io.target else { panic!("a flash write has a flash target") };
        let journal = self.journal_mut(request.disk).expect("changes wait for flash I/O");
        journal.wrote(device);
        if result.is_ok() {
            assert_eq!(sums.len() as u64, io.sectors, "one checksum for each sector written");
            self.requests[slot].written.extend((io.sector..).zip(sums.iter().copied()));
        } else {
            self.record_lapsed(now, request.disk, io.sector..io.sector + io.sectors);
            self.forget_part_sums(request.disk, io.sector..io.sector + io.sectors);
            self.requests[slot].failed = true;
        }
        if pending > 0 {
            return;
        }
        self.record_written(now, slot);
        self.end_parts(slot);
        self.note_dirty(now, request.disk, range.first, range.end);
        self.disk_mut(request.disk).flash_writes -= 1;
        if self.requests[slot].failed {
            return self.change_past_cache(now, slot);
        }
        self.keep_recent_edges(slot);
        self.give_back_zeroes(slot);
        self.requests[slot].outcome = Outcome::WriteBack;
        // If the process is killed, a guest that reconnects expects the acknowledged write to be
        // there.
        let is_dead = self.disk(request.disk).journal.as_ref().is_some_and(|journal| journal.dead);
        if request.op.is_durable_change() || is_dead || !self.disk_mut(request.disk).save_records() {
            self.requests[slot].phase = Phase::CommitThenReply;
            self.commit(slot);
        } else {
            self.end_written(now, slot, Ok(()));
        }
    }

    /// Handles the end of all flash writes of a request. The records of a sector's two copies are
    /// made only now, next to each other. A crash must not leave a record of one copy whose twin
    /// was not written, because that copy may be the bad one.
    fn record_written(&mut self, now: Instant, slot: u32) {
        let Active { request, failed, .. } = self.requests[slot];
        let mut written = std::mem::take(&mut self.requests[slot].written);
        let Engine { disks, requests, .. } = self;
        let disk = disks[request.disk.0 as usize].as_mut().expect("disks outlive their requests");
        written.iter().for_each(|(sector, _)| _ = disk.lost.remove(sector));
        let (journal, index) = disk.journal_and_index().expect("changes wait for flash I/O");
        journal.urgent = true;
        journal.schedule.wrote();
        let is_second = |frame| index.first_of(frame).is_some();
        written.sort_unstable_by_key(|(sector, _)| {
            let (frame, block, inside) = index.locate(*sector);
            (block, inside, is_second(frame))
        });
        if failed {
            // This copy was overwritten in place and differs from the intended data. So its own
            // checksum is recorded, to identify its content.
            let is_written = |sector: u64| written.iter().any(|(other, _)| *other == sector);
            for (sector, sum) in &written {
                let twin = index.second_sector(*sector).or(index.of_second(*sector));
                if let Some(twin) = twin.filter(|twin| index.is_unproven(*twin) && !is_written(*twin)) {
                    index.set_valid(twin, *sum);
                }
            }
        }
        let active = &requests[slot];
        let rewritten = if failed { Vec::new() } else { active.rewritten_units(index, &written) };
        for (sector, sum) in written {
            if index.is_unproven(sector) {
                index.set_valid(sector, sum);
                journal.overwrites.end(now, sector);
            } else if failed {
                journal.record_void(now, index, sector..sector + 1);
            } else {
                index.set_valid(sector, sum);
                index.set_dirty(sector);
                index.set_held(sector, true);
                active.note_units(index, sector);
                journal.record_dirty(now, index, sector);
            }
        }
        for (units, sectors) in rewritten {
            journal.record_units(now, index, units, &sectors);
        }
    }

    /// Records that clean sectors have unknown content after a failed flash write.
    fn record_lapsed(&mut self, now: Instant, disk: DiskId, sectors: std::ops::Range<u64>) {
        let (journal, index) = self.disk_mut(disk).journal_and_index().expect("changes wait for flash I/O");
        let void = sectors.filter(|sector| !index.is_valid(*sector));
        void.for_each(|sector| journal.record_void(now, index, sector..sector + 1));
    }

    /// Accepts any content of incomplete sectors whose overwrite failed. The bytes of their units are the
    /// same before and after it.
    fn forget_part_sums(&mut self, disk: DiskId, sectors: std::ops::Range<u64>) {
        let (_, index) = self.disk_mut(disk).journal_and_index().expect("changes wait for flash I/O");
        let is_part = |sector: &u64| index.is_unproven(*sector) && index.units(*sector) != ALL_UNITS;
        let parts: Vec<u64> = sectors.filter(is_part).collect();
        parts.into_iter().for_each(|sector| index.forget_sum(sector));
    }

    /// Answers a change whose data has reached its destination.
    pub(super) fn end_written(&mut self, now: Instant, slot: u32, result: Result<(), IoError>) {
        let request = self.requests[slot].request;
        if result.is_err() {
            self.requests[slot].outcome = Outcome::DirtyLost;
        } else if request.op.is_durable_change() {
            // The guest may rely on this write being older than all that follows.
            self.disk_mut(request.disk).destager.flush_point();
        }
        self.reply(now, slot, result);
        self.finish(slot);
    }

    /// Sends a change to the backing, even if flash has valid data of the range.
    pub(super) fn change_past_cache(&mut self, now: Instant, slot: u32) {
        let Active { request, range, failed, .. } = self.requests[slot];
        if self.disk(request.disk).holds {
            return self.hold(slot);
        }
        if self.disk(request.disk).destager.is_writing(range.first, range.end) {
            // The backing could carry out the transfer's write last.
            self.forget_edges(slot);
            return self.disk_mut(request.disk).destager.write_waiters.push(slot);
        }
        if self.await_journal(now, slot) {
            return;
        }
        self.requests[slot].forget_units();
        // The backing zeroes only the bytes of a zero write. If flash may have lost the other bytes
        // of the write's edges, the whole sectors are written to the backing as data instead.
        if !request.op.has_buffer() && !self.requests[slot].sends_edges() {
            self.forget_edges(slot);
            self.give_back_zeroes(slot);
        }
        self.requests[slot].doubts = self.disk(request.disk).backed.doubts;
        // A partly completed flash write must not be readable, so the write continues immediately,
        // even before older data.
        if !failed && self.breaks_order(request.disk, range.first, range.end, true) {
            return self.wait_for_order(now, slot);
        }
        if !failed && self.read_edges(now, slot, EdgeSource::Flash) {
            return;
        }
        let (whole_first, whole_end) = self.requests[slot].held_sectors();
        let disk = self.disk_mut(request.disk);
        let cache = disk.cache.as_ref().expect("the cache is persistent");
        let mut dirty_edge = None;
        let mut over_dirty = false;
        for span in cache.spans(range.first, range.end) {
            let Some(sector) = cache.find(span) else { continue };
            let start = (u64::from(span.block.0) << cache.block_shift()) + span.first;
            for i in 0..span.count {
                if cache.index.is_dirty(sector + i) {
                    over_dirty = true;
                    let moved = disk.destager.is_moved(start + i);
                    if !moved && !(whole_first..whole_end).contains(&(start + i)) {
                        dirty_edge = Some(start + i);
                    }
                }
            }
        }
        self.requests[slot].over_dirty |= over_dirty;
        let fresh = dirty_edge.is_some_and(|at| {
            let edge = Range { disk: request.disk, first: at, end: at + 1 };
            self.disk(request.disk).is_fresh(JobKind::Edges(slot), edge)
        });
        if fresh && self.disk(request.disk).journal.as_ref().is_some_and(|journal| journal.dead) {
            // Without a journal the units of an incomplete sector cannot be destaged yet, and the
            // backing must not get the change before them.
            return self.end_change(now, slot, Err(IoError::Failed));
        }
        if fresh {
            self.requests[slot].phase = Phase::CommitThenChange;
            return self.commit(slot);
        }
        if let Some(first) = dirty_edge {
            self.requests[slot].phase = Phase::Edges;
            let edge = Range { disk: request.disk, first, end: first + 1 };
            if !self.transfer(now, JobKind::Edges(slot), edge) {
                self.disk_mut(request.disk).edge_waiters.push(slot);
            }
            return;
        }
        self.answer_discard(now, slot);
        if self.mark_zones(now, slot) {
            self.requests[slot].phase = Phase::CommitThenThrough;
            return self.commit(slot);
        }
        self.go_through(now, slot);
    }

    /// Handles the end of destaging a request's partly covered dirty sectors. On success, these
    /// sectors are on the backing. An error means that flash could not be read or the backing could
    /// not be written.
    pub(super) fn edges_destaged(
        &mut self,
        now: Instant,
        slot: u32,
        read: bool,
        result: Result<(), IoError>,
    ) {
        match result {
            Ok(()) => self.change_past_cache(now, slot),
            Err(error) => {
                let outcome = if read { Outcome::BackingError } else { Outcome::DirtyLost };
                self.requests[slot].outcome = outcome;
                self.reply(now, slot, Err(error));
                self.finish(slot);
            }
        }
    }

    /// Sends a change to the backing. If the change needs a bypass mark, the caller has made the
    /// mark durable in the journal before.
    pub(super) fn go_through(&mut self, now: Instant, slot: u32) {
        let Active { request, range, .. } = self.requests[slot];
        self.recent_edges.forget(request.disk, range.first, range.end);
        self.disk_mut(request.disk).destager.cut(range.first, range.end);
        self.drop_sectors(now, slot, |is_dirty| !is_dirty);
        self.change_backing(now, slot);
    }

    /// Handles a change over dirty data that is now durable on the backing: drops the dirty data
    /// that the change replaced, and then answers the request or commits the journal first.
    pub(super) fn dirty_replaced(&mut self, now: Instant, slot: u32) {
        let journal = &self.disk(self.requests[slot].request.disk).journal;
        if journal.as_ref().is_some_and(|journal| journal.dead) && self.end_answered(slot) {
            // A dead journal cannot record that the data is dropped, and a restart would restore the
            // data. So hob skips the discard, and the data stays.
            return;
        }
        self.drop_sectors(now, slot, |_| true);
        self.requests[slot].over_dirty = false;
        let disk = self.disk_mut(self.requests[slot].request.disk);
        // A change in effect on the backing must not be undone by the dirty data that it replaced.
        let is_kept = disk.save_records();
        if self.end_answered(slot) {
            return;
        }
        let active = &mut self.requests[slot];
        let op = active.request.op;
        active.outcome =
            if matches!(op, Op::Write(_)) { Outcome::WriteNotCopied } else { Outcome::BypassZeroing };
        let disk = self.disk(self.requests[slot].request.disk);
        if op.is_durable_change() || !is_kept || disk.journal.as_ref().is_some_and(|journal| journal.dead) {
            self.requests[slot].phase = Phase::CommitThenReply;
            self.commit(slot);
        } else {
            self.end_written(now, slot, Ok(()));
        }
    }

    /// Drops the cached sectors of a request's range for which `which(is_dirty)` is true.
    fn drop_sectors(&mut self, now: Instant, slot: u32, which: impl Fn(bool) -> bool) {
        let Active { request, range, .. } = self.requests[slot];
        let disk = self.disk_mut(request.disk);
        let (Some(cache), Some(journal)) = (&mut disk.cache, &mut disk.journal) else { return };
        for span in cache.spans(range.first, range.end) {
            let Some(sector) = cache.find(span) else { continue };
            for i in 0..span.count {
                let is_dirty = cache.index.is_dirty(sector + i);
                if which(is_dirty) {
                    let second = cache.index.second_sector(sector + i);
                    journal.drop_sector(now, &mut cache.index, sector + i);
                    second.into_iter().for_each(|at| journal.drop_sector(now, &mut cache.index, at));
                    journal.urgent |= is_dirty;
                    disk.lost.remove(&(sector + i));
                }
            }
        }
    }

    /// Counts the request as a writer of its zones, and sets the bypass marks that these zones
    /// lack. Returns true if bypass marks, of these or other zones, are not durable yet. The caller
    /// must then commit the journal before it sends the write to the backing. A lost journal gets
    /// no marks and needs no commit.
    ///
    /// Invariant: while the backing has a change that it may lose, recovery uses no clean data of the
    /// changed sectors. Either the bypass mark is durable, or the journal has no such data: neither
    /// the index nor a state of the journal that a crash may leave has the sectors, and no fill
    /// records them before the mark is durable. In the second case a change does not wait for a
    /// device that does not answer.
    fn mark_zones(&mut self, now: Instant, slot: u32) -> bool {
        let Active { request, range, .. } = self.requests[slot];
        self.record_gone(now, request.disk);
        let zones = self.zones_of(slot);
        let disk = self.disk_mut(request.disk);
        let journal = disk.journal.as_mut().expect("the cache is persistent");
        let mut new = false;
        for zone in zones {
            disk.zones.entry(zone).or_default().0 += 1;
            if !journal.dead && !journal.writer.is_marked(zone) {
                journal.mark(zone);
                new = true;
            }
        }
        // A mark that another request has just set may not be durable yet either.
        let waits = new || !journal.dead && journal.marks_pending();
        self.requests[slot].zoned = true;
        if !waits || self.journal_may_have(range) || !self.commits_stall(request.disk) {
            return waits;
        }
        let journal = self.journal_mut(request.disk).expect("the cache is persistent");
        journal.has_unawaited_marks = true;
        journal.ask();
        self.wake(request.disk);
        false
    }

    /// Returns true if recovery after a crash now might use data of these sectors from the journal:
    /// the cache has them, or the record that it dropped them is not durable.
    fn journal_may_have(&self, range: Range) -> bool {
        let disk = self.disk(range.disk);
        let (Some(cache), Some(journal)) = (&disk.cache, &disk.journal) else { return true };
        let has = |sector| cache.index.is_valid(sector) || cache.index.is_held(sector);
        !journal.writer.exists()
            || cache.spans(range.first, range.end).any(|span| {
                let mut found = cache.find(span).into_iter().flat_map(|first| first..first + span.count);
                journal.writer.has_undurable_drop(span.block) || found.any(has)
            })
    }

    /// Returns true if a device that a commit of the disk's journal may need does not answer.
    fn commits_stall(&mut self, id: DiskId) -> bool {
        let Engine { disks, devices, .. } = self;
        let disk = disks[id.0 as usize].as_ref().expect("disks outlive their requests");
        let of_ring = disk.journal.iter().flat_map(|journal| journal.segments());
        let of_data = disk.cache.iter().flat_map(|cache| cache.segments.iter().map(|segment| segment.place));
        of_ring.chain(of_data).any(|segment| devices.get(segment.device).is_stalled())
    }

    /// Starts the changes again that wait for a commit which a device delays, and which may go to the
    /// backing without it.
    pub(super) fn retry_unneeded_commits(&mut self, id: DiskId) {
        if !self.commits_stall(id) {
            return;
        }
        let Some(journal) = &self.disk(id).journal else { return };
        let in_round = journal.round.iter().flat_map(|round| &round.waiters);
        let goes = |slot: &&u32| {
            let active = &self.requests[**slot];
            // An acknowledged discard that starts again would be abandoned.
            let waits = active.phase == Phase::CommitThenThrough && !active.is_answered;
            waits && !self.journal_may_have(active.range)
        };
        let again: Vec<u32> = journal.waiting.iter().chain(in_round).filter(goes).copied().collect();
        let journal = self.journal_mut(id).expect("just seen");
        journal.waiting.retain(|slot| !again.contains(slot));
        if let Some(round) = &mut journal.round {
            round.waiters.retain(|slot| !again.contains(slot));
        }
        for slot in again {
            self.leave_zones(slot);
            self.runnable.push_back(slot);
        }
    }

    /// Stops counting the request as a writer of its zones, because it sent no write to the
    /// backing.
    pub(super) fn leave_zones(&mut self, slot: u32) {
        self.requests[slot].zoned = false;
        let (zones, disk) = (self.zones_of(slot), self.requests[slot].request.disk);
        let disk = self.disk_mut(disk);
        for zone in zones {
            disk.zones.get_mut(&zone).expect("the zone was counted before").0 -= 1;
        }
    }

    fn zones_of(&self, slot: u32) -> std::ops::RangeInclusive<usize> {
        let Active { request, range, .. } = &self.requests[slot];
        let size = self.disk(request.disk).config.size_bytes;
        let zone = |sector: u64| Writer::zone_of(size, sector * SECTOR_BYTES);
        zone(range.first)..=zone(range.end - 1)
    }

    /// Handles the end of a change of the backing, with success or an error.
    pub(super) fn backing_changed(&mut self, now: Instant, slot: u32, result: Result<(), IoError>) {
        let Active { request, range, zoned, bulk, .. } = self.requests[slot];
        let needs_flush = match result {
            Ok(()) => request.op != Op::Write(Durability::Durable),
            // A failed bulk write is written to flash instead.
            Err(_) => bulk != Bulk::Sent,
        };
        let disk = self.disk_mut(request.disk);
        disk.backed.note_bypass(range.first, if needs_flush { range.end } else { range.first });
        if !zoned {
            return;
        }
        self.requests[slot].zoned = false;
        let zones = self.zones_of(slot);
        let disk = self.disk_mut(request.disk);
        for zone in zones {
            let (in_flight, writes, since) = disk.zones.get_mut(&zone).expect("the zone was counted before");
            *in_flight -= 1;
            (*writes, *since) = (disk.backed.writes, now);
        }
        disk.zones_due.get_or_insert(now + ZONE_QUIET_NS);
    }

    /// Removes the bypass marks of zones that had no recent writes and whose data is durable on the
    /// backing.
    pub(super) fn pump_zones(&mut self, now: Instant, id: DiskId) {
        let disk = self.disk_mut(id);
        if disk.holds || disk.zones_due.is_none_or(|due| due > now) {
            return;
        }
        let Some(journal) = &mut disk.journal else { return };
        let flushed = disk.backed.flushed;
        let mut unflushed = false;
        disk.zones.retain(|zone, (in_flight, writes, since)| {
            let quiet = *in_flight == 0 && now - *since >= ZONE_QUIET_NS;
            unflushed |= quiet && *writes > flushed;
            let done = quiet && *writes <= flushed;
            if done {
                journal.writer.unmark(*zone);
            }
            !done
        });
        disk.zones_due = (!disk.zones.is_empty()).then(|| now + ZONE_QUIET_NS);
        if unflushed && !disk.destager.is_flushing() && self.flush_backing(now, id) {
            self.disk_mut(id).destager.begin_flush();
        }
    }
}
