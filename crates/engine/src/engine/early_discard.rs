//! Discards that are acknowledged before the backing has them (docs/decisions/0044).
//!
//! Under write-back, a short discard is acknowledged as soon as it may be sent to the backing. The
//! discard keeps its range lock until it ends. So no later request sees the range before the
//! discard, and no later write is discarded.
//!
//! A discard is a hint, so hob may skip it. hob abandons an acknowledged discard after a crash, or
//! after a failure of the backing or the journal. If hob would have to send an acknowledged discard
//! a second time, it abandons the discard instead. The range then has its old content or the
//! content of the backing. Reads of the range have waited for the end of the discard, so guests do
//! not see a change of this content. A drain waits for acknowledged discards, because another host
//! may write the disk afterwards.

use super::{Active, Engine, Phase};
use crate::command::Mode;
use crate::io::{Durability, Op};
use crate::outcome::Outcome;
use crate::units::Instant;

/// Maximum number of acknowledged discards of one disk that the backing does not have yet. Further
/// discards wait for the backing.
pub(super) const DISCARDS_MAX: u32 = 64;

/// The acknowledged discards of one disk may use at most 1/`SLOTS_PART` of the request slots of the
/// engine, which all its disks share.
const SLOTS_PART: u32 = 8;

/// Maximum length of a discard that is acknowledged early, bytes. Longer discards keep the backing
/// busy for a long time, so guests should wait for their completion and not queue many of them.
const BYTES_MAX: u64 = 1 << 20;

impl Engine {
    /// Acknowledges a discard that is about to be sent to the backing and waits for nothing else.
    /// Does nothing for other requests.
    pub(super) fn answer_discard(&mut self, now: Instant, slot: u32) {
        let Active { request, is_answered, .. } = self.requests[slot];
        let is_short = request.op == Op::Discard(Durability::Volatile) && request.len <= BYTES_MAX;
        let discards_max = DISCARDS_MAX.min(self.limits.requests_max / SLOTS_PART);
        let disk = self.disk_mut(request.disk);
        let has_room = disk.answered_discards < discards_max;
        if is_answered || !is_short || !has_room || disk.mode_in_effect() != Some(Mode::WriteBack) {
            return;
        }
        disk.answered_discards += 1;
        self.requests[slot].outcome = Outcome::BypassZeroing;
        self.reply(now, slot, Ok(()));
        self.requests[slot].is_answered = true;
    }

    /// Ends a discard that was acknowledged before. Returns false for other requests. Dirty data
    /// that the discard did not replace is destaged.
    pub(super) fn end_answered(&mut self, slot: u32) -> bool {
        let Active { range, over_dirty, is_answered, .. } = self.requests[slot];
        if !is_answered {
            return false;
        }
        if over_dirty {
            self.put_back(range.disk, range);
        }
        // Reads can see the end of the discard when it finishes. A recovery after a kill must then
        // know that dirty data before the discard is on the backing.
        let disk = self.disk_mut(range.disk);
        if !disk.save_records() && disk.journal.as_ref().is_some_and(|journal| !journal.dead) {
            self.requests[slot].phase = Phase::CommitThenReply;
            self.commit(slot);
        } else {
            self.finish_answered(slot);
        }
        true
    }

    /// Finishes a discard that was acknowledged before.
    pub(super) fn finish_answered(&mut self, slot: u32) {
        let disk = self.requests[slot].request.disk;
        self.finish(slot);
        // A drain may have waited for this discard.
        self.wake(disk);
    }
}
