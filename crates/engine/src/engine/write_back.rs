//! Executes writes, discards and zeroing on a disk with a persistent cache. These requests go to
//! flash, or to the backing with a record in the journal.
//!
//! | the range of the request | action |
//! |---|---|
//! | whole sectors, mode write-back, free frames | written to flash |
//! | the same, some sectors partly covered | these sectors are merged first (`partial.rs`) |
//! | partly covered dirty sectors that cannot be merged | these sectors are destaged first |
//! | part of a long run while too much data is dirty | written to the backing (`bulk.rs`) |
//! | over dirty sectors | backing change, backing flush, `Drop` records, reply |
//! | all others | the bypass marks of the zones are committed (`zones.rs`), then as in a volatile cache |
//!
//! If the durable journal describes the data that a write to flash overwrites, a commit comes first
//! (`overwrite.rs`). Partly covered dirty sectors are destaged under the request's own range lock.

use super::disk::Disk;
use super::jobs::JobKind;
use super::partial::EdgeSource;
use super::{Active, Engine, Phase};
use crate::admission::AdmissionEffect;
use crate::cache::push_run;
use crate::command::{Copies, Layout, Mode, Role};
use crate::directory::Departure;
use crate::io::{Durability, IoError, IoOp, Op};
use crate::outcome::Outcome;
use crate::range_locks::Range;
use crate::units::{DiskId, FrameNo, Instant};

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

    /// Makes a change wait, without its range lock, because the cache keeps the order of writes. A
    /// write to flash waits until the older epochs of its blocks are on the backing. A change that
    /// bypasses the cache waits until all dirty data of the disk is on the backing, except dirty
    /// data that flash has lost. If another host owns the disk, this host does not destage the older
    /// data, so the change fails.
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
    pub(super) fn record_gone(&mut self, now: Instant, disk: DiskId) {
        let disk = self.disk_mut(disk);
        if let (Some(cache), Some(journal)) = (&mut disk.cache, &mut disk.journal) {
            journal.record_gone(now, cache);
        }
    }

    /// Answers a change whose data has reached its destination.
    pub(super) fn end_written(&mut self, now: Instant, slot: u32, result: Result<(), IoError>) {
        let request = self.requests[slot].request;
        if result.is_err() {
            self.requests[slot].outcome = Outcome::DirtyLost;
        } else if request.op.is_durable_change() {
            // The guest may rely on this write being older than all later writes.
            self.disk_mut(request.disk).destager.flush_point();
        }
        self.reply(now, slot, result);
        self.finish(slot);
    }

    /// Sends a change (a write, a write of zeroes or a discard) to the backing, even if flash has
    /// valid data for the change's range.
    pub(super) fn change_past_cache(&mut self, now: Instant, slot: u32) {
        let Active { request, range, failed, .. } = self.requests[slot];
        if self.disk(request.disk).holds {
            return self.hold(slot);
        }
        if self.disk(request.disk).destager.is_writing(range.first, range.end) {
            // If the change were sent now, the backing could execute the transfer's write after the
            // change.
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

    /// Handles a change that replaces dirty data and is now durable on the backing. Drops the
    /// replaced dirty data, commits the journal if necessary, and answers the request.
    pub(super) fn dirty_replaced(&mut self, now: Instant, slot: u32) {
        let journal = &self.disk(self.requests[slot].request.disk).journal;
        if journal.as_ref().is_some_and(|journal| journal.dead) && self.end_answered(slot) {
            // A dead journal cannot record that the data is dropped, and a restart would restore the
            // data. So hob skips the discard, and the data stays.
            return;
        }
        self.drop_sectors(now, slot, |_| true);
        self.requests[slot].over_dirty = false;
        if self.end_answered(slot) {
            return;
        }
        let disk = self.disk_mut(self.requests[slot].request.disk);
        // After a crash, recovery must not undo a change on the backing by restoring the dirty data
        // that the change replaced.
        let is_kept = disk.save_records();
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
}
