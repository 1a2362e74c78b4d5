//! Segments of a write-back cache are emptied of dirty data while writes go on to the others.
//!
//! The segments are chosen once. Nothing new becomes dirty there: free frames there are not handed out, and a clean block
//! that is written moves to a segment that stays. A block that is dirty already is written where it is, and destaged
//! before all others. When nothing is dirty there, and a flush of the backing has succeeded since the command came, the
//! command ends; then the change that gives the segments back needs the backing for a moment only.
//!
//! A block that is written again and again may never be clean after a flush of the backing. When few blocks are left and
//! the backing has just been flushed, writes to them wait for the next flush, [`INSIST_NS`] at most.

use super::Engine;
use super::disk::Disk;
use crate::command::{CommandError, DataSegment, Vacate};
use crate::range_locks::Kind;
use crate::units::{CommandId, DiskId, Instant};

/// A write waits for so long at most, nanoseconds.
const INSIST_NS: u64 = 1_000_000_000;

/// Writes wait when so many blocks are left, or fewer.
const INSIST_BLOCKS_MAX: usize = 256;

/// The command under way.
pub(super) struct Vacating {
    command: CommandId,
    /// The backing was flushed since it began.
    is_proved: bool,
    /// Until then writes to dirty blocks that leave wait.
    insists_until: Option<Instant>,
    waiters: Vec<u32>,
}

impl Engine {
    /// Begins to empty segments of a disk's cache. `None`: the end is told later.
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
        // What goes on now would end with another cache.
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

    /// All segments stay. Ends the command, if there is one, with this error.
    pub(super) fn stop_vacating(&mut self, id: DiskId, error: CommandError) {
        let disk = self.disk_mut(id);
        disk.destager.leaving.clear();
        if let Some(cache) = disk.cache.as_mut().filter(|cache| !cache.leaving().is_empty()) {
            cache.set_leaving(Vec::new());
        }
        self.end_vacating(id, Err(error));
    }

    /// Ends the command, if there is one. Segments that leave go on doing so.
    pub(super) fn end_vacating(&mut self, id: DiskId, result: Result<(), CommandError>) {
        self.end_insisting(id);
        if let Some(vacating) = self.disk_mut(id).vacating.take() {
            self.done(vacating.command, id, result.map(|()| Vec::new()));
        }
    }

    /// Is a write to a block that leaves and is dirty to wait now?
    pub(super) fn insists(&self, now: Instant, id: DiskId) -> bool {
        let vacating = self.disk(id).vacating.as_ref();
        vacating.and_then(|vacating| vacating.insists_until).is_some_and(|until| now < until)
    }

    /// Lets a write wait, without its claim, for the next flush of the backing.
    pub(super) fn wait_for_vacating(&mut self, slot: u32) {
        let id = self.requests[slot].request.disk;
        self.requests[slot].forget_edges();
        let runnable = &mut self.runnable;
        self.range_locks.leave(slot, |granted| runnable.push_back(granted));
        let vacating = self.disk_mut(id).vacating.as_mut().expect("it insists");
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

    /// A flush of the backing ended, and what it covered is clean.
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

    /// Ends a command that has come to its end, or cannot.
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

    /// Lets writes go on that have waited for long enough.
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
    /// Blocks that leave are destaged before all others? Where write order is kept, everything older goes first.
    pub(super) fn destages_leaving(&self) -> bool {
        let ordered = self.cache.as_ref().is_some_and(|cache| cache.config.destage.ordered);
        self.vacating.is_some() && !ordered && !self.destager.leaving.is_empty()
    }

    /// Forgets blocks that need not be destaged any more for segments to leave. Returns whether there are none left.
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
