//! Writes, discards, zeroing and flushes. On a disk without a persistent cache, the backing has a
//! change before the change is acknowledged, and flash never keeps valid data that the change
//! replaces. Changes on a disk with a persistent cache continue in `write_back.rs`.

use super::partial::EdgeSource;
use super::{Active, Engine, Phase};
use crate::io::{Durability, IoError, IoOp, Op, Request};
use crate::outcome::Outcome;
use crate::units::Instant;

impl Engine {
    /// Starts a write, discard or zeroing after its range lock was granted. Without a persistent
    /// cache, the cached data of the range becomes invalid before the change is sent to the
    /// backing. The lock is exclusive, so no request reads the range before the change has ended.
    pub(super) fn start_change(&mut self, now: Instant, slot: u32) {
        if self.end_answered(slot) {
            return;
        }
        // The change may be started for the second time here, after the cache with the dirty data
        // was removed.
        self.requests[slot].over_dirty = false;
        self.end_bulk(now, slot, Ok(()));
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
        if std::mem::replace(&mut self.requests[slot].doubts, doubts) != doubts {
            // The backing may have lost the partly covered sectors that were read before.
            self.forget_edges(slot);
        }
        if is_persistent {
            return self.change_persistent(now, slot);
        }
        if self.read_edges(now, slot, EdgeSource::Flash) {
            return;
        }
        self.invalidate(slot);
        self.change_backing(now, slot);
    }

    /// Sends a write, discard or zeroing to the backing, possibly merged with adjacent writes.
    pub(super) fn change_backing(&mut self, now: Instant, slot: u32) {
        self.requests[slot].phase = Phase::BackingChange;
        if self.follows_another(slot) {
            return;
        }
        let op = match self.requests[slot].request.op {
            Op::Write(_) => return self.write_alone(now, slot),
            Op::Discard(_) => IoOp::Discard,
            Op::WriteZeroes(..) if self.requests[slot].sends_edges() => IoOp::Write(Durability::Volatile),
            Op::WriteZeroes(_, zeroing) => IoOp::WriteZeroes(zeroing),
            other => panic!("{other:?} is not a change"),
        };
        self.issue_backing(now, slot, op);
    }

    pub(super) fn start_flush(&mut self, now: Instant, slot: u32) {
        let request = self.requests[slot].request;
        let disk = self.disk_mut(request.disk);
        if disk.holds {
            return self.hold(slot);
        }
        if !self.passes_recovering(now, slot) {
            return;
        }
        let disk = self.disk_mut(request.disk);
        let Some(journal) = &disk.journal else { return self.flush_request(now, slot) };
        if !request.op.is_own() {
            disk.destager.flush_point();
            disk.bulk.flush_point();
        }
        if journal.dead || journal.needs_commit() {
            self.requests[slot].phase = Phase::CommitThenFlush;
            return self.commit(slot);
        }
        self.flush_committed(now, slot, Ok(()));
    }

    /// Handles the end of the commit for a flush request: the data on flash is durable now. The
    /// backing is flushed too if a guest's change bypassed flash (see `backed.rs`) since the
    /// backing's last successful flush, or if the request is [`Op::DaemonFlush`]. For example, the
    /// daemon sends this request before it closes a disk and opens it again, because opening needs
    /// a backing that answers.
    pub(super) fn flush_committed(&mut self, now: Instant, slot: u32, result: Result<(), IoError>) {
        let Request { disk, op, .. } = self.requests[slot].request;
        if result.is_err() {
            return self.end_written(now, slot, result);
        }
        if op == Op::DaemonFlush || self.disk(disk).backed.needs_flush() {
            return self.flush_request(now, slot);
        }
        self.end_flush(now, slot, Outcome::FlushCommitted, Ok(()));
    }

    /// Answers a flush. The flush fails if its session has not yet received a report that
    /// acknowledged data may be lost.
    fn end_flush(&mut self, now: Instant, slot: u32, outcome: Outcome, result: Result<(), IoError>) {
        let Active { request, bypassed, .. } = self.requests[slot];
        let is_owed = self.disk_mut(request.disk).backed.tell(request.id.session(), bypassed);
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
        if self.end_bulk(now, slot, result) {
            return self.runnable.push_back(slot);
        }
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

    /// Returns true if the journal must record a change of the backing before the change may be
    /// acknowledged. Without that record, recovery after a crash would restore dirty data that the
    /// change has durably replaced. If only the process is killed, a record in the crash log
    /// suffices. The result is also true if the journal is lost: no record can then keep recovery
    /// from restoring replaced data.
    fn must_commit_answer(&mut self, slot: u32, durability: Durability) -> bool {
        let disk = self.disk_mut(self.requests[slot].request.disk);
        let Some(journal) = &disk.journal else { return false };
        let is_durable = durability == Durability::Durable;
        journal.dead || is_durable && journal.needs_commit() || !disk.save_records()
    }

    fn answer_committed(&mut self, slot: u32, outcome: Outcome) {
        self.requests[slot].outcome = outcome;
        self.requests[slot].phase = Phase::CommitThenReply;
        self.commit(slot);
    }

    pub(super) fn end_change(&mut self, now: Instant, slot: u32, result: Result<(), IoError>) {
        if self.end_answered(slot) {
            return;
        }
        if let Op::Discard(durability) | Op::WriteZeroes(durability, _) = self.requests[slot].request.op
            && result.is_ok()
            && self.must_commit_answer(slot, durability)
        {
            return self.answer_committed(slot, Outcome::BypassZeroing);
        }
        let Active { range, over_dirty, .. } = self.requests[slot];
        if over_dirty {
            // The old dirty data is still valid, and may have been taken out of the destage queue.
            self.put_back(range.disk, range);
            self.wake(range.disk);
        }
        let active = &mut self.requests[slot];
        active.outcome = match (active.request.op, result) {
            // The reply "cannot do that fast" is not a failure of the backing.
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
