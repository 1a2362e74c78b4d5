//! Vacating: destages the dirty data of some segments of a write-back cache, while guests' writes
//! go to the other segments.
//!
//! The segments are selected once, at the start. No new data becomes dirty in these segments: their
//! free frames are not allocated, and a clean block that a guest writes moves to another segment. A
//! block that is already dirty is written in place and destaged before all others. The command ends
//! when the segments have no dirty data and a flush of the backing has succeeded since the command
//! began. So the change that removes the segments afterwards needs the backing only for a short
//! time.
//!
//! A block that is written again and again may never be clean after a flush of the backing. When
//! few blocks are left and the backing has just been flushed, writes to these blocks wait for the
//! next flush. The wait takes [`INSIST_NS`] at most.

use super::Engine;
use super::disk::Disk;
use crate::command::{CommandError, DataSegment, Vacate};
use crate::range_locks::Kind;
use crate::units::{CommandId, DiskId, Instant};

/// Maximum time that a write waits for the next flush of the backing, nanoseconds.
const INSIST_NS: u64 = 1_000_000_000;

/// Writes wait for the flush only if at most this many blocks are left.
const INSIST_BLOCKS_MAX: usize = 256;

/// The vacating command in progress.
pub(super) struct Vacating {
    command: CommandId,
    /// True if the backing was flushed since the command began.
    is_proved: bool,
    /// Time until which writes to dirty blocks in the vacated segments wait.
    insists_until: Option<Instant>,
    waiters: Vec<u32>,
}

impl Engine {
    /// Starts to destage the dirty data of some segments of a disk's cache. `None` means that the
    /// end is reported later.
    pub(super) fn vacate(
        &mut self,
        id: DiskId,
        command: CommandId,
        which: Vacate,
    ) -> Option<Result<(), CommandError>> {
        let disk = self.disk_mut(id);
        let Some(cache) = &mut disk.cache else { return Some(Err(CommandError::NoCache)) };
        if disk.vacating.is_some() || disk.draining.is_some() {
            return Some(Err(CommandError::Stopped));
        }
        let leaving = match which {
            Vacate::Emptiest(count) if count as usize >= cache.segments.len() => {
                return Some(Err(CommandError::TooSmall));
            }
            Vacate::Emptiest(count) => cache.segments_to_give(count as usize),
            Vacate::Device(device) => {
                let is_there = |segment: &&DataSegment| segment.place.device == device;
                cache.segments.iter().filter(is_there).copied().collect()
            }
        };
        // A structural change in progress replaces the cache.
        if disk.journal.is_none() || disk.opening.is_some() || leaving.is_empty() {
            return Some(Ok(()));
        }
        cache.set_leaving(leaving);
        disk.destager.leaving = cache.blocks_to_leave(&disk.lost);
        disk.vacating =
            Some(Vacating { command, is_proved: false, insists_until: None, waiters: Vec::new() });
        self.wake(id);
        None
    }

    /// Stops vacating and keeps all segments. A command in progress ends with this error.
    pub(super) fn stop_vacating(&mut self, id: DiskId, error: CommandError) {
        let disk = self.disk_mut(id);
        disk.destager.leaving.clear();
        if let Some(cache) = disk.cache.as_mut().filter(|cache| !cache.leaving().is_empty()) {
            cache.set_leaving(Vec::new());
        }
        self.end_vacating(id, Err(error));
    }

    /// Ends the command in progress, if there is one. The segments stay marked as being vacated.
    pub(super) fn end_vacating(&mut self, id: DiskId, result: Result<(), CommandError>) {
        self.end_insisting(id);
        if let Some(vacating) = self.disk_mut(id).vacating.take() {
            self.done(vacating.command, id, result.map(|()| Vec::new()));
        }
    }

    /// Returns true if a write to a dirty block in a segment that is being vacated has to wait now.
    pub(super) fn insists(&self, now: Instant, id: DiskId) -> bool {
        let vacating = self.disk(id).vacating.as_ref();
        vacating.and_then(|vacating| vacating.insists_until).is_some_and(|until| now < until)
    }

    /// Makes a write wait for the next flush of the backing, without its range lock.
    pub(super) fn wait_for_vacating(&mut self, slot: u32) {
        let id = self.requests[slot].request.disk;
        self.forget_edges(slot);
        let runnable = &mut self.runnable;
        self.range_locks.leave(slot, |granted| runnable.push_back(granted));
        let vacating = self.disk_mut(id).vacating.as_mut().expect("writes wait for the flush");
        vacating.waiters.push(slot);
        self.wake(id);
    }

    fn end_insisting(&mut self, id: DiskId) {
        let Some(vacating) = &mut self.disk_mut(id).vacating else { return };
        vacating.insists_until = None;
        for slot in std::mem::take(&mut vacating.waiters) {
            let range = self.requests[slot].range;
            if self.range_locks.acquire(slot, range, Kind::Change, Kind::Change) {
                self.runnable.push_back(slot);
            }
        }
    }

    /// Handles the end of a flush of the backing. The destaged data that the flush covered is clean
    /// now.
    pub(super) fn vacating_flushed(&mut self, now: Instant, id: DiskId, is_durable: bool) {
        self.end_insisting(id);
        let disk = self.disk_mut(id);
        let Some(vacating) = &mut disk.vacating else { return };
        vacating.is_proved |= is_durable;
        disk.forget_vacated();
        let disk = self.disk_mut(id);
        let few = (1..=INSIST_BLOCKS_MAX).contains(&disk.destager.leaving.len());
        if let Some(vacating) = disk.vacating.as_mut().filter(|_| is_durable && few) {
            vacating.insists_until = Some(now + INSIST_NS);
        }
    }

    /// Ends the vacating command if it is complete or can no longer be completed.
    pub(super) fn check_vacated(&mut self, now: Instant, id: DiskId) {
        let disk = self.disk_mut(id);
        let Some(vacating) = &disk.vacating else { return };
        let (is_proved, until) = (vacating.is_proved, vacating.insists_until);
        if until.is_some_and(|until| until <= now) {
            self.end_insisting(id);
        } else {
            disk.destager.wake_at = disk.destager.wake_at.into_iter().chain(until).min();
        }
        let disk = self.disk_mut(id);
        if disk.holds || !disk.forget_vacated() {
            return;
        }
        if !is_proved {
            let may = !disk.destager.is_flushing && disk.destager.rest_until.is_none();
            if may && self.flush_backing(now, id) {
                self.disk_mut(id).destager.begin_flush();
            }
            return;
        }
        let cache = disk.cache.as_ref().expect("a cache is being emptied");
        let is_lost = cache.has_dirty(cache.leaving());
        self.end_vacating(id, if is_lost { Err(CommandError::Lost) } else { Ok(()) });
    }

    /// Resumes writes that have waited for the maximum time.
    pub(super) fn end_late_insisting(&mut self, now: Instant, id: DiskId) {
        let vacating = self.disk(id).vacating.as_ref();
        if vacating.and_then(|vacating| vacating.insists_until).is_some_and(|until| until <= now) {
            self.end_insisting(id);
        }
    }
}

impl Vacating {
    pub(super) fn deadline(&self) -> Option<Instant> {
        self.insists_until
    }
}

impl Disk {
    /// Returns true if blocks in vacated segments are destaged before all others. Returns false if
    /// write order is kept, because older data must then be destaged first.
    pub(super) fn destages_leaving(&self) -> bool {
        let ordered = self.cache.as_ref().is_some_and(|cache| cache.config.destage.ordered);
        self.vacating.is_some() && !ordered && !self.destager.leaving.is_empty()
    }

    /// Removes blocks from the vacating set that need not be destaged any more. Returns true if the
    /// set is then empty.
    fn forget_vacated(&mut self) -> bool {
        let Some(cache) = &self.cache else { return false };
        let leaving = &mut self.destager.leaving;
        loop {
            while let Some(block) = leaving.first().copied() {
                if cache.block_is_to_leave(block, &self.lost) {
                    return false;
                }
                leaving.pop_first();
            }
            *leaving = cache.blocks_to_leave(&self.lost);
            if leaving.is_empty() {
                return true;
            }
        }
    }
}
