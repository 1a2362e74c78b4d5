//! Requests that wait for a new journal after the old one was lost.
//!
//! A journal that cannot be written any more leaves the ring on flash as it is. After a crash
//! recovery would use it. So until the owner has provided a new ring, or has removed the cache and
//! recorded that,
//!
//! - no change is sent to the backing, because dirty data of the ring would replace it, or clean
//!   data would hide it;
//! - no change is reported as durable, and no flush is answered.
//!
//! Reads and destaging continue, since the backing may have newer data than the ring. But where the
//! ring does not durably call data dirty, it may describe older, clean data: that data is destaged
//! only after the owner has recorded that no clean data of the ring counts (`LossRecorded`). Waiting
//! requests release their range locks, so that the destager can work. Only a write that was partly
//! written to flash is sent to the backing, because the flash content must not be read; its reply
//! waits too. Requests fail after [`WAIT_NS_MAX`] without a new journal, and later ones fail
//! immediately.

use super::backed::RESENDS_MAX;
use super::partial::Edges;
use super::{Active, Engine, Phase};
use crate::io::IoError;
use crate::outcome::Outcome;
use crate::range_locks::Kind;
use crate::units::{DiskId, Instant, SECTOR_BYTES};

/// An owner has that long to find room for a new ring, or to drain the cache and take it away; nanoseconds.
pub(super) const WAIT_NS_MAX: u64 = 30_000_000_000;

/// See the module's text.
#[derive(Default)]
pub(super) struct AwaitingJournal {
    /// Changes that have not begun.
    changes: Vec<u32>,
    /// Requests that are done, but not durable for all that is known.
    unanswered: Vec<u32>,
}

impl AwaitingJournal {
    pub(super) fn is_empty(&self) -> bool {
        self.changes.is_empty() && self.unanswered.is_empty()
    }
}

impl Engine {
    /// A change is to go to the backing. True if that may not be now: it waits, or has failed.
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
        self.requests[slot].forget_edges();
        let runnable = &mut self.runnable;
        self.range_locks.leave(slot, |granted| runnable.push_back(granted));
        self.disk_mut(request.disk).awaiting_journal.changes.push(slot);
        true
    }

    /// The request's I/O is done but cannot be made durable: its reply waits.
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

    /// Resumes the waiting requests: everything is recorded in a new ring, or the cache is gone.
    pub(super) fn resume_awaiting_journal(&mut self, now: Instant, id: DiskId) {
        let AwaitingJournal { changes, unanswered } = std::mem::take(&mut self.disk_mut(id).awaiting_journal);
        for slot in changes {
            let range = self.requests[slot].range;
            if self.range_locks.acquire(slot, range, Kind::Change, Kind::Change) {
                self.runnable.push_back(slot);
            }
        }
        for slot in unanswered {
            match self.requests[slot].phase {
                Phase::CommitThenFlush => self.flush_committed(now, slot, Ok(())),
                _ if !self.is_believed(slot) && self.requests[slot].outcome != Outcome::WriteBack => {
                    self.repeat_unanswered(now, slot);
                }
                _ => self.end_written(now, slot, Ok(())),
            }
        }
    }

    /// Sends a change to the backing again that the backing may have lost before it was
    /// acknowledged.
    fn repeat_unanswered(&mut self, now: Instant, slot: u32) {
        let Active { request, range, resends, edges, .. } = &mut self.requests[slot];
        // Without a range lock other requests may have changed the edges.
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

    /// Fails the waiting requests: no new journal was provided in time.
    pub(super) fn fail_awaiting_journal(&mut self, now: Instant, id: DiskId) {
        let AwaitingJournal { changes, unanswered } = std::mem::take(&mut self.disk_mut(id).awaiting_journal);
        for slot in changes.into_iter().chain(unanswered) {
            let active = &mut self.requests[slot];
            // The lock was released already.
            active.range.end = active.range.first;
            self.end_written(now, slot, Err(IoError::Failed));
        }
    }
}
