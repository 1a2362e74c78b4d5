//! Requests that wait for a new journal after the old one was lost.
//!
//! When a journal can no longer be written, its ring stays on flash, and recovery after a crash
//! would use this ring. So the following rules hold until the daemon provides a new journal ring,
//! or removes the cache and records the removal:
//!
//! - No change is sent to the backing, because recovery after a crash would replace the change by
//!   older dirty data of the journal ring, or hide it by older clean data.
//! - No change is reported as durable, and no flush is answered.
//!
//! Reads and destaging continue. If the journal ring does not durably record a sector as dirty, it
//! may describe older, clean data of the sector. Such a dirty sector is destaged only after the
//! daemon has recorded that recovery must not use clean data of the journal ring (`LossRecorded`).
//! Waiting requests release their range locks, so that the destager can work. Only one kind of
//! change is still sent to the backing: a write that reached flash in part, because reads must not
//! return the partly written data. The reply to such a write waits for the new journal. Waiting
//! requests fail after [`WAIT_NS_MAX`] without a new journal, and later requests fail immediately.

use super::backed::RESENDS_MAX;
use super::disk::Disk;
use super::partial::Edges;
use super::{Active, Engine, Phase};
use crate::command::Event;
use crate::io::IoError;
use crate::outcome::Outcome;
use crate::range_locks::Kind;
use crate::units::{DiskId, Instant, SECTOR_BYTES};

/// Time limit for the daemon to provide a new journal ring, or to drain and remove the cache,
/// nanoseconds.
pub(super) const WAIT_NS_MAX: u64 = 30_000_000_000;

/// Requests of one disk that wait for a new journal.
#[derive(Default)]
pub(super) struct AwaitingJournal {
    /// Writes, discards and zeroings that have not begun.
    changes: Vec<u32>,
    /// Requests whose I/O is done but perhaps not durable.
    unanswered: Vec<u32>,
}

impl AwaitingJournal {
    pub(super) fn is_empty(&self) -> bool {
        self.changes.is_empty() && self.unanswered.is_empty()
    }
}

impl Engine {
    /// Makes a write, discard or zeroing wait for a new journal, if the disk's journal was lost.
    /// Returns false if the caller may send the change to the backing, and true if the change waits
    /// or has failed.
    pub(super) fn await_journal(&mut self, now: Instant, slot: u32) -> bool {
        let Active { request, failed, .. } = self.requests[slot];
        let Some(lost_at) = self.journal_mut(request.disk).and_then(|journal| journal.lost_at()) else {
            return false;
        };
        if failed {
            return false;
        }
        if now - lost_at >= WAIT_NS_MAX {
            self.end_written(now, slot, Err(IoError::Failed));
            return true;
        }
        self.forget_edges(slot);
        let runnable = &mut self.runnable;
        self.range_locks.leave(slot, |granted| runnable.push_back(granted));
        self.disk_mut(request.disk).awaiting_journal.changes.push(slot);
        true
    }

    /// Makes the reply to a request wait for a new journal, because the request's I/O is done but
    /// cannot be made durable. Fails the request if no journal was lost, or if the loss was at
    /// least [`WAIT_NS_MAX`] ago.
    pub(super) fn leave_unanswered(&mut self, now: Instant, slot: u32) {
        let Active { request, range, .. } = self.requests[slot];
        let lost_at = self.journal_mut(request.disk).and_then(|journal| journal.lost_at());
        if lost_at.is_none_or(|lost_at| now - lost_at >= WAIT_NS_MAX) {
            return self.end_written(now, slot, Err(IoError::Failed));
        }
        if range.first < range.end {
            let runnable = &mut self.runnable;
            self.range_locks.leave(slot, |granted| runnable.push_back(granted));
            self.requests[slot].range.end = range.first;
        }
        self.disk_mut(request.disk).awaiting_journal.unanswered.push(slot);
    }

    /// Resumes the waiting requests after a new journal ring has recorded the whole cache, or after
    /// the cache was removed.
    pub(super) fn resume_awaiting_journal(&mut self, now: Instant, id: DiskId) {
        let AwaitingJournal { changes, unanswered } = std::mem::take(&mut self.disk_mut(id).awaiting_journal);
        for slot in changes {
            let range = self.requests[slot].range;
            if self.range_locks.acquire(slot, range, Kind::Change, Kind::Change) {
                self.runnable.push_back(slot);
            }
        }
        // The flushes began before the other requests are acknowledged.
        let (flushes, changes): (Vec<u32>, Vec<u32>) =
            unanswered.into_iter().partition(|slot| self.requests[*slot].phase == Phase::CommitThenFlush);
        flushes.into_iter().for_each(|slot| self.flush_committed(now, slot, Ok(())));
        for slot in changes {
            if !self.is_believed(slot) && self.requests[slot].outcome != Outcome::WriteBack {
                self.repeat_unanswered(now, slot);
            } else {
                self.end_late(now, slot);
            }
        }
    }

    /// Acknowledges a change whose I/O ended earlier, and whose reply waited for a commit or a new
    /// journal.
    pub(super) fn end_late(&mut self, now: Instant, slot: u32) {
        let Active { request, outcome, .. } = self.requests[slot];
        if outcome != Outcome::WriteBack {
            self.disk_mut(request.disk).backed.note_late_reply();
        }
        self.end_written(now, slot, Ok(()));
    }

    /// Sends a change to the backing again. hob has not acknowledged the change to the guest yet,
    /// and the backing may have lost it.
    fn repeat_unanswered(&mut self, now: Instant, slot: u32) {
        let Active { request, range, resends, edges, .. } = &mut self.requests[slot];
        // The range lock was released, so other requests may have changed the partly covered
        // sectors.
        *edges = Edges::default();
        if *resends == RESENDS_MAX {
            return self.end_written(now, slot, Err(IoError::Failed));
        }
        *resends += 1;
        range.end = (request.offset + request.len).div_ceil(SECTOR_BYTES);
        let range = *range;
        if self.range_locks.acquire(slot, range, Kind::Change, Kind::Change) {
            self.runnable.push_back(slot);
        }
    }

    /// Fails requests whose change was lost together with the discarded dirty data.
    pub(super) fn fail_unanswered(&mut self, now: Instant, id: DiskId) {
        for slot in std::mem::take(&mut self.disk_mut(id).awaiting_journal.unanswered) {
            self.end_written(now, slot, Err(IoError::Failed));
        }
    }

    /// Fails the requests that wait for a new journal, because the daemon did not provide one in
    /// time.
    pub(super) fn fail_awaiting_journal(&mut self, now: Instant, id: DiskId) {
        let AwaitingJournal { changes, unanswered } = std::mem::take(&mut self.disk_mut(id).awaiting_journal);
        for slot in changes.into_iter().chain(unanswered) {
            let active = &mut self.requests[slot];
            // The request has already released its range lock.
            active.range.end = active.range.first;
            self.end_written(now, slot, Err(IoError::Failed));
        }
    }

    /// Reports to the daemon, only once, that a discard of dirty data waits until the daemon has
    /// recorded the discard.
    pub(super) fn ask_for_record(&mut self, id: DiskId) {
        let journal = self.journal_mut(id).expect("a persistent cache has a journal");
        if !std::mem::replace(&mut journal.discard_reported, true) {
            let ring = journal.ring.number;
            self.event_out.push_back(Event::DiscardUnrecorded(id, ring));
        }
    }
}

impl Disk {
    /// Records that recovery must not use clean data of journal rings up to this number, including
    /// the journal ring that is restored if the current change fails.
    pub(super) fn record_loss(&mut self, upto: u32) {
        let old = self.opening.as_deref_mut().and_then(|opening| opening.old.as_mut());
        let old_journal = old.and_then(|(_, journal)| journal.as_deref_mut());
        for journal in self.journal.as_deref_mut().into_iter().chain(old_journal) {
            journal.loss_recorded |= journal.ring.number <= upto;
        }
    }

    /// Records that recovery must discard dirty data of journal rings up to this number.
    pub(super) fn record_discard(&mut self, upto: u32) {
        if let Some(journal) = self.journal.as_deref_mut() {
            journal.discard_recorded |= journal.ring.number <= upto;
        }
    }

    pub(super) fn is_discard_recorded(&self) -> bool {
        self.journal.as_ref().is_some_and(|journal| journal.discard_recorded)
    }
}
