//! Changes: the backing has them before the guest is told, and flash never holds what they replace.

use super::{Active, Engine, Phase};
use crate::io::{Durability, IoError, IoOp, Op};
use crate::outcome::Outcome;
use crate::units::Instant;

impl Engine {
    /// Starts a change whose claim is granted. What flash holds of the range is invalid from here
    /// on; nobody reads it meanwhile, for the claim is exclusive.
    pub(super) fn start_change(&mut self, now: Instant, slot: u32) {
        self.invalidate(slot);
        let active = &mut self.requests[slot];
        active.phase = Phase::BackingChange;
        let op = match active.request.op {
            Op::Write(durability) => IoOp::Write(durability),
            Op::Discard(_) => IoOp::Discard,
            Op::WriteZeroes(_, zeroing) => IoOp::WriteZeroes(zeroing),
            other => panic!("{other:?} changes nothing"),
        };
        self.issue_backing(now, slot, op);
    }

    pub(super) fn start_flush(&mut self, now: Instant, slot: u32) {
        self.requests[slot].phase = Phase::BackingFlush;
        self.issue_backing(now, slot, IoOp::Flush);
    }

    pub(super) fn backing_change_done(&mut self, now: Instant, slot: u32, result: Result<(), IoError>) {
        let op = self.requests[slot].request.op;
        match (op, result) {
            (Op::Discard(Durability::Durable) | Op::WriteZeroes(Durability::Durable, _), Ok(())) => {
                self.start_flush(now, slot);
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
        self.end_change(now, slot, result);
    }

    fn end_change(&mut self, now: Instant, slot: u32, result: Result<(), IoError>) {
        let active = &mut self.requests[slot];
        active.outcome = match (active.request.op, result) {
            // "Cannot do that fast" is an answer, not a failure of the backing.
            (Op::Flush, Ok(())) => Outcome::BypassFlush,
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
