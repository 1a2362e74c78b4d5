//! Changes: the backing has them before the guest is told, and flash never holds what they replace.

use super::partial::EdgeSource;
use super::{Active, Engine, Phase};
use crate::io::{Durability, IoError, IoOp, Op};
use crate::outcome::Outcome;
use crate::units::Instant;

impl Engine {
    /// Starts a change whose claim is granted. What flash holds of the range is invalid from here
    /// on; nobody reads it meanwhile, for the claim is exclusive.
    pub(super) fn start_change(&mut self, now: Instant, slot: u32) {
        // It may begin anew, and the cache that had what it was to replace be gone.
        self.requests[slot].over_dirty = false;
        let disk = self.disk(self.requests[slot].request.disk);
        if disk.holds {
            return self.hold(slot);
        }
        if !self.passes_recovering(now, slot) {
            return;
        }
        self.forget_in_memory(slot);
        let Active { request, range, .. } = self.requests[slot];
        let disk = self.disk_mut(request.disk);
        disk.ownership.note_change(range.first, range.end);
        let (doubts, is_persistent) = (disk.backed.doubts, disk.journal.is_some());
        self.requests[slot].doubts = doubts;
        if is_persistent {
            return self.change_persistent(now, slot);
        }
        if self.read_edges(now, slot, EdgeSource::Flash) {
            return;
        }
        self.invalidate(slot);
        self.change_backing(now, slot);
    }

    /// Sends a change to the backing, perhaps together with others.
    pub(super) fn change_backing(&mut self, now: Instant, slot: u32) {
        self.requests[slot].phase = Phase::BackingChange;
        if self.follows_another(slot) {
            return;
        }
        let op = match self.requests[slot].request.op {
            Op::Write(_) => return self.write_alone(now, slot),
            Op::Discard(_) => IoOp::Discard,
            Op::WriteZeroes(_, zeroing) => IoOp::WriteZeroes(zeroing),
            other => panic!("{other:?} changes nothing"),
        };
        self.issue_backing(now, slot, op);
    }

    pub(super) fn start_flush(&mut self, now: Instant, slot: u32) {
        let disk_id = self.requests[slot].request.disk;
        let disk = self.disk_mut(disk_id);
        if disk.holds {
            return self.hold(slot);
        }
        if !self.passes_recovering(now, slot) {
            return;
        }
        let disk = self.disk_mut(disk_id);
        let Some(journal) = &disk.journal else { return self.flush_request(now, slot) };
        disk.destager.flush_point();
        if journal.dead || journal.needs_commit() {
            self.requests[slot].phase = Phase::CommitThenFlush;
            return self.commit(slot);
        }
        self.flush_committed(now, slot, Ok(()));
    }

    /// What flash holds is durable. The backing is flushed if a change of a guest bypassed flash since it was last.
    pub(super) fn flush_committed(&mut self, now: Instant, slot: u32, result: Result<(), IoError>) {
        let disk = self.disk(self.requests[slot].request.disk);
        if result.is_err() {
            return self.end_written(now, slot, result);
        }
        if disk.backed.needs_flush() {
            return self.flush_request(now, slot);
        }
        self.end_flush(now, slot, Outcome::FlushCommitted, Ok(()));
    }

    /// Answers a flush. It fails if its session was not told of a loss before.
    fn end_flush(&mut self, now: Instant, slot: u32, outcome: Outcome, result: Result<(), IoError>) {
        let request = self.requests[slot].request;
        let is_owed = self.disk_mut(request.disk).backed.tell(request.id.session());
        if is_owed {
            self.report_owed(request.disk);
        }
        let result = if is_owed { result.and(Err(IoError::Failed)) } else { result };
        self.requests[slot].outcome = if result.is_ok() { outcome } else { Outcome::BackingError };
        self.reply(now, slot, result);
        self.finish(slot);
    }

    /// Flushes the backing for a request.
    pub(super) fn flush_request(&mut self, now: Instant, slot: u32) {
        let Active { request, .. } = self.requests[slot];
        let backed = &mut self.disk_mut(request.disk).backed;
        let (mark, doubts) = (backed.begin_flush(), backed.doubts);
        self.requests[slot].flush_mark = mark;
        if !request.op.modifies() {
            self.requests[slot].doubts = doubts;
        }
        self.requests[slot].phase = Phase::BackingFlush;
        self.issue_backing(now, slot, IoOp::Flush);
    }

    pub(super) fn backing_change_done(&mut self, now: Instant, slot: u32, result: Result<(), IoError>) {
        self.send_followers(now, slot);
        self.backing_changed(now, slot, result);
        let Active { request, over_dirty, .. } = self.requests[slot];
        let op = request.op;
        if result.is_ok() && !self.is_believed(slot) {
            return self.change_again(now, slot);
        }
        match (op, result) {
            (_, Ok(())) if over_dirty => self.flush_request(now, slot),
            (Op::Discard(Durability::Durable) | Op::WriteZeroes(Durability::Durable, _), Ok(())) => {
                self.flush_request(now, slot);
            }
            (Op::Write(durability), Ok(())) if self.must_commit_answer(slot, durability) => {
                self.answer_committed(slot, Outcome::WriteNotCopied);
            }
            (Op::Write(_), Ok(())) => {
                let copied = self.fill(now, slot).is_ok();
                self.requests[slot].outcome =
                    if copied { Outcome::WriteCopied } else { Outcome::WriteNotCopied };
                self.reply(now, slot, Ok(()));
                self.finish_unless_filling(slot);
            }
            _ => self.end_change(now, slot, result),
        }
    }

    pub(super) fn backing_flush_done(&mut self, now: Instant, slot: u32, result: Result<(), IoError>) {
        let Active { request, over_dirty, flush_mark, .. } = self.requests[slot];
        let modifies = request.op.modifies();
        match (result, self.is_believed(slot)) {
            (Err(_), _) => self.doubt(now, request.disk),
            (Ok(()), true) => self.disk_mut(request.disk).backed.end_flush(flush_mark),
            (Ok(()), false) if modifies => return self.change_again(now, slot),
            (Ok(()), false) => {}
        }
        match (modifies, result) {
            (false, result) => self.end_flush(now, slot, Outcome::BypassFlush, result),
            (true, Ok(())) if over_dirty => self.dirty_replaced(now, slot),
            (true, result) => self.end_change(now, slot, result),
        }
    }

    /// Has the journal something to say before a change of the backing may be answered? What was dirty in its range before
    /// a durable one, and given up since, would come back after a crash; and so would anything where the journal is lost.
    fn must_commit_answer(&self, slot: u32, durability: Durability) -> bool {
        let disk = self.disk(self.requests[slot].request.disk);
        let durable = durability == Durability::Durable;
        disk.journal.as_ref().is_some_and(|journal| journal.dead || durable && journal.needs_commit())
    }

    fn answer_committed(&mut self, slot: u32, outcome: Outcome) {
        self.requests[slot].outcome = outcome;
        self.requests[slot].phase = Phase::CommitThenReply;
        self.commit(slot);
    }

    pub(super) fn end_change(&mut self, now: Instant, slot: u32, result: Result<(), IoError>) {
        if let Op::Discard(durability) | Op::WriteZeroes(durability, _) = self.requests[slot].request.op
            && result.is_ok()
            && self.must_commit_answer(slot, durability)
        {
            return self.answer_committed(slot, Outcome::BypassZeroing);
        }
        let Active { range, over_dirty, .. } = self.requests[slot];
        if over_dirty {
            // What it was to replace counts still, and was perhaps on its way.
            self.put_back(range.disk, range);
            self.wake(range.disk);
        }
        let active = &mut self.requests[slot];
        active.outcome = match (active.request.op, result) {
            // "Cannot do that fast" is an answer, not a failure of the backing.
            (Op::Discard(_) | Op::WriteZeroes(..), Ok(()) | Err(IoError::Unsupported)) => {
                Outcome::BypassZeroing
            }
            _ => Outcome::BackingError,
        };
        self.reply(now, slot, result);
        self.finish(slot);
    }

    fn invalidate(&mut self, slot: u32) {
        let Active { request, range, .. } = self.requests[slot];
        let Some(cache) = self.disk_mut(request.disk).cache.as_mut() else { return };
        cache.invalidate(range.first, range.end);
    }
}
