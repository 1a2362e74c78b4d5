//! Requests that a lost journal keeps waiting.
//!
//! What the ring on flash says when its journal cannot be written any more stays so: after a crash it would be believed. Until
//! the owner has brought a new ring, or has taken the cache away and recorded that, therefore
//!
//! - no change begins that goes to the backing: dirty data of the ring would replace it, or clean data hide it;
//! - nothing that was changed is called durable, and no flush is answered.
//!
//! Reads go on, and so does destaging: the backing may have what the ring calls dirty. So that the destager gets at it, requests wait
//! without their claims. Only a write that flash took in part goes on, for what is there of it must not be seen; it is not answered either. If nothing happens within [`WAIT_NS_MAX`] they fail, and so do those that come later.

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

    /// What a request asked for is done, and cannot be made durable.
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

    /// Everything is recorded in a new ring, or there is no cache any more: who waited goes on.
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

    /// Begins a change of the backing anew that the backing may have lost before it was answered.
    fn repeat_unanswered(&mut self, now: Instant, slot: u32) {
        let Active { request, range, resends, edges, .. } = &mut self.requests[slot];
        // It had no claim: others may have changed them.
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

    /// What is dirty has been given up, and with it what could not be made durable.
    pub(super) fn fail_unanswered(&mut self, now: Instant, id: DiskId) {
        for slot in std::mem::take(&mut self.disk_mut(id).awaiting_journal.unanswered) {
            self.end_written(now, slot, Err(IoError::Failed));
        }
    }

    /// Nobody came: they fail.
    pub(super) fn fail_awaiting_journal(&mut self, now: Instant, id: DiskId) {
        let AwaitingJournal { changes, unanswered } = std::mem::take(&mut self.disk_mut(id).awaiting_journal);
        for slot in changes.into_iter().chain(unanswered) {
            let active = &mut self.requests[slot];
            // Its claim was left already.
            active.range.end = active.range.first;
            self.end_written(now, slot, Err(IoError::Failed));
        }
    }
}
