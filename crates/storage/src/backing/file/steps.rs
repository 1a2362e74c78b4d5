//! I/Os of a file that consist of several operations, or that may have to be repeated.

use hob_engine::io::{BufferSlice, Io, IoError, IoOp, Zeroing};
use hob_engine::units::{Instant, SECTOR_BYTES};
use rustix::fs::FallocateFlags;

use super::{Attached, FileBacking, Life, RETRY_NS, SEVERAL};
use crate::ring::{Gate as _, Ring, ZEROES_BYTES};

pub(super) const PUNCH: FallocateFlags = FallocateFlags::PUNCH_HOLE.union(FallocateFlags::KEEP_SIZE);

const ZERO: FallocateFlags = FallocateFlags::ZERO_RANGE.union(FallocateFlags::KEEP_SIZE);

/// An I/O that consists of several operations.
#[derive(Clone, Copy, Debug)]
pub(super) struct Several {
    pub(super) io: Io,
    pub(super) step: Step,
    /// Number of the I/O's operations in the I/O ring.
    pub(super) in_flight: u32,
    pub(super) result: Result<(), IoError>,
    /// Whether the lease gate or a stale file handle stopped one of the I/O's operations.
    pub(super) stopped: bool,
    /// Time at which the I/O fails if it is still stopped.
    pub(super) deadline: Instant,
}

/// Step of an I/O that consists of several operations.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Step {
    /// Transferring the parts of an unaligned read or write.
    Parts,
    /// Discarding a range by punching a hole.
    Discard,
    /// Zeroing a range by punching a hole, which frees the range.
    Punch,
    /// Zeroing a range that stays allocated, if the filesystem supports that.
    ZeroRange,
    /// Flushing the file.
    Flush,
    /// Writing zeroes. The value is the offset up to which zeroes are written or being written.
    Zeroes(u64),
}

impl FileBacking {
    pub(super) fn start_several(&mut self, ring: &mut Ring, now: Instant, io: &Io, step: Step) {
        let deadline = self.stale.deadline(now, self.wait_ns);
        let several = Several { io: *io, step, in_flight: 0, result: Ok(()), stopped: false, deadline };
        let slot = match self.free.pop() {
            Some(slot) => {
                self.several[slot as usize] = several;
                slot
            }
            None => {
                self.several.push(several);
                self.several.len() as u32 - 1
            }
        };
        if self.stale.is_stale() {
            return self.stop(now, slot);
        }
        self.run_step(ring, slot);
    }

    /// Starts the operations of the current step of a slot's I/O.
    pub(super) fn run_step(&mut self, ring: &mut Ring, slot: u32) {
        let Several { io, step, .. } = self.several[slot as usize];
        let index = SEVERAL | slot;
        let Attached { buffered, tokens, .. } = self.attached();
        let fallocate = |ring: &mut Ring, mode: FallocateFlags| {
            ring.fallocate(tokens.token(index), buffered, mode.bits() as i32, io.offset, io.len);
            1
        };
        let count = match step {
            Step::Parts => {
                let slice = io.slice.expect("a transfer has a slice");
                self.transfer_parts(ring, index, io.op, io.offset, slice)
            }
            Step::Flush => {
                ring.fsync(tokens.token(index), buffered);
                1
            }
            Step::Discard | Step::Punch => fallocate(ring, PUNCH),
            Step::ZeroRange => fallocate(ring, ZERO),
            Step::Zeroes(from) => {
                // In the zero buffer, a part starts at its offset in its 4 KiB sector.
                let lead = (from % SECTOR_BYTES) as u32;
                let len = (io.offset + io.len - from).min(u64::from(ZEROES_BYTES - lead)) as u32;
                let slice = BufferSlice { offset: lead, len, ..ring.zeroes(ZEROES_BYTES) };
                self.several[slot as usize].step = Step::Zeroes(from + u64::from(len));
                self.transfer_parts(ring, index, io.op, from, slice)
            }
        };
        self.several[slot as usize].in_flight = count;
    }

    /// Handles an I/O that the lease gate or a stale file handle stopped. The whole I/O is retried
    /// later. The I/O fails if its deadline has passed, if the backing was revoked, or if the
    /// backing is being closed.
    pub(super) fn stop(&mut self, now: Instant, slot: u32) {
        let Several { io, deadline, .. } = self.several[slot as usize];
        let error = match self.is_lost || self.life != Life::Open {
            true => IoError::ShuttingDown,
            false if deadline <= now => IoError::Failed,
            false => {
                if self.stopped.is_empty() {
                    self.retry_at = now + RETRY_NS;
                }
                return self.stopped.push(slot);
            }
        };
        self.free.push(slot);
        self.finish(io.id, Err(error));
    }

    /// Handles the end of all operations of a step: starts the I/O's next step, or ends the I/O.
    pub(super) fn end_step(&mut self, ring: &mut Ring, now: Instant, slot: u32) {
        let Several { io, step, result, stopped, .. } = self.several[slot as usize];
        if stopped {
            return self.stop(now, slot);
        }
        if self.is_lost || self.life != Life::Open {
            self.free.push(slot);
            return self.finish(io.id, Err(IoError::ShuttingDown));
        }
        let end = io.offset + io.len;
        let next = match (step, result) {
            (Step::Zeroes(to), Ok(())) if to < end => Some(Step::Zeroes(to)),
            (Step::Punch, Err(IoError::Unsupported)) => Some(Step::ZeroRange),
            (Step::ZeroRange, Err(IoError::Unsupported)) if !is_fast(io.op) => Some(Step::Zeroes(io.offset)),
            _ => None,
        };
        if let Some(step) = next {
            let several = &mut self.several[slot as usize];
            (several.step, several.result) = (step, Ok(()));
            return self.run_step(ring, slot);
        }
        // A discard is only a hint. So a discard succeeds even if the file does not support it.
        let granted = step == Step::Discard && result == Err(IoError::Unsupported);
        self.free.push(slot);
        self.finish(io.id, if granted { Ok(()) } else { result });
    }

    /// Retries the I/Os that the lease gate or a stale file handle stopped. If the gate is still
    /// closed or the handle is still stale, the I/Os whose deadline has passed fail, and the others
    /// wait on.
    pub(super) fn retry_stopped(&mut self, ring: &mut Ring, now: Instant) {
        let is_open = self.gate.as_ref().is_none_or(|gate| gate.is_open()) && !self.stale.is_stale();
        for slot in std::mem::take(&mut self.stopped) {
            if !is_open {
                self.stop(now, slot);
                continue;
            }
            let several = &mut self.several[slot as usize];
            (several.step, several.result, several.stopped) = (first_step(several.io.op), Ok(()), false);
            self.run_step(ring, slot);
        }
        self.resume(ring, now);
    }
}

/// Returns the first step of an I/O that consists of several operations.
pub(super) fn first_step(op: IoOp) -> Step {
    match op {
        IoOp::Discard => Step::Discard,
        IoOp::WriteZeroes(Zeroing::MayUnmap | Zeroing::FastMayUnmap) => Step::Punch,
        IoOp::WriteZeroes(_) => Step::ZeroRange,
        IoOp::Flush => Step::Flush,
        _ => Step::Parts,
    }
}

/// Returns true if zeroing must be faster than writing data, or fail.
fn is_fast(op: IoOp) -> bool {
    matches!(op, IoOp::WriteZeroes(Zeroing::FastMayUnmap | Zeroing::FastKeepAllocated))
}
