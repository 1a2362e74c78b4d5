//! Start, reply and end of every request. `read.rs`, `write.rs` and the files that they name
//! contain the other steps.

use super::bulk::Bulk;
use super::partial::Edges;
use super::{Active, Engine, Phase, REQUEST_BYTES_MAX};
use crate::admission::Run;
use crate::chooser::CacheAccess;
use crate::command::{Access, Role};
use crate::io::{IoError, Op, PayloadMemory, Reply, Request};
use crate::memory::Seen;
use crate::outcome::Outcome;
use crate::range_locks::{Kind, Range};
use crate::units::{Instant, SECTOR_BYTES};

impl Engine {
    /// Starts to serve a request that arrived at `arrived`.
    #[inline]
    pub(super) fn admit(&mut self, now: Instant, arrived: Instant, request: Request) {
        self.slots.take(request.disk, 1);
        let disk = self.disk_mut(request.disk);
        disk.in_flight += 1;
        let was_declined = request.memory == PayloadMemory::DaemonAfterGuest;
        disk.ownership.guests += u32::from(!request.op.is_own());
        if was_declined {
            disk.histograms.come_back(request.op);
        } else if !request.op.is_own() {
            disk.histograms.arrive(arrived, &request);
            if !request.passes_by() {
                disk.sizing.note(&request);
            }
        }
        let range = Range {
            disk: request.disk,
            first: request.offset / SECTOR_BYTES,
            end: (request.offset + request.len).div_ceil(SECTOR_BYTES),
        };
        let (run, seen) =
            if was_declined { (Run::Other, Seen::default()) } else { self.observe(&request, range) };
        let is_guests = !request.passes_by() && !request.op.is_own();
        let bulk = if is_guests { self.observe_bulk(&request) } else { Bulk::No };
        let bypassed = self.disk(request.disk).backed.bypassed;
        let slot = self.requests.insert(Active {
            request,
            arrived,
            range,
            phase: Phase::Waiting,
            pending: 0,
            run,
            seen,
            outcome: Outcome::CacheOff,
            fill_bytes: 0,
            over_dirty: false,
            edges: Edges::default(),
            bulk,
            zeroes: None,
            failed: false,
            shared: Vec::new(),
            written: Vec::new(),
            not_admitted: false,
            is_answered: false,
            zoned: false,
            flush_mark: 0,
            bypassed,
            doubts: 0,
            resends: 0,
        });
        match request.op {
            Op::Flush | Op::DaemonFlush => self.start_flush(now, slot),
            Op::Settle => self.start_settle(now, slot),
            Op::Read | Op::Prefetch | Op::Pull | Op::ReadForPeer => self.enter_read(now, slot),
            Op::Write(_) | Op::Discard(_) | Op::WriteZeroes(..) | Op::Forget => {
                if self.range_locks.acquire(slot, range, Kind::Change, Kind::Change) {
                    self.resume(now, slot);
                }
            }
        }
        // The request has locked its range, so it does not wait for the read-ahead behind it.
        if let Some(ahead) = seen.wanted {
            self.read_ahead(now, request.disk, ahead);
        }
    }

    pub(super) fn check(&self, request: &Request) -> Result<(), IoError> {
        let Some(disk) = self.disks.get(request.disk.0 as usize).and_then(Option::as_ref) else {
            return Err(IoError::ShuttingDown);
        };
        let end = request.offset.checked_add(request.len);
        let fits = end.is_some_and(|end| end <= disk.config.size_bytes);
        let sized = match request.op {
            Op::Flush | Op::Settle | Op::DaemonFlush => request.len == 0,
            _ => (1..=REQUEST_BYTES_MAX).contains(&request.len),
        };
        if disk.removing.is_some() {
            Err(IoError::ShuttingDown)
        } else if !fits || !sized {
            Err(IoError::Invalid)
        } else if request.op.modifies() && disk.config.access == Access::ReadOnly {
            Err(IoError::ReadOnly)
        } else {
            Ok(())
        }
    }

    /// Informs the cache's admission and the memory tier of a new read or write. Returns what
    /// admission and the memory tier detected, such as a sequential run.
    #[inline]
    fn observe(&mut self, request: &Request, range: Range) -> (Run, Seen) {
        let disk = self.disk_mut(request.disk);
        if request.passes_by() || request.op.is_own() || disk.ownership.role != Role::Here {
            return (Run::Other, Seen::default());
        }
        let run = match (request.op, &mut disk.cache) {
            (Op::Read, Some(cache)) => cache.observe(range.first, range.end, CacheAccess::Read),
            (Op::Write(_), Some(cache)) => {
                let access = CacheAccess::of_write(cache.config.mode);
                cache.observe(range.first, range.end, access)
            }
            _ => Run::Other,
        };
        let seen = match (request.op, &mut disk.memory) {
            (Op::Read, Some(memory)) => memory.observe(range.first, range.end),
            _ => Seen::default(),
        };
        (run, seen)
    }

    pub(super) fn refuse(&mut self, now: Instant, request: &Request, error: IoError) {
        if let Some(Some(disk)) = self.disks.get_mut(request.disk.0 as usize) {
            disk.record(now, now, request, Outcome::Refused);
        }
        let Request { id, disk, .. } = *request;
        self.reply_out.push_back(Reply { id, disk, result: Err(error), outcome: Outcome::Refused });
        self.release_out.extend(request.buffer);
    }

    /// Answers a request. The request stays in flight until `finish`.
    pub(super) fn reply(&mut self, now: Instant, slot: u32, result: Result<(), IoError>) {
        assert!(!self.requests[slot].is_answered, "a request has one reply");
        self.keep_in_memory(slot, result);
        let Active { request, arrived, outcome, .. } = &self.requests[slot];
        let reply = Reply { id: request.id, disk: request.disk, result, outcome: *outcome };
        let disk = self.disks[request.disk.0 as usize].as_mut().expect("disks outlive their requests");
        disk.note_change(request);
        if request.op.modifies() {
            disk.content_changes += 1;
            disk.backed.note_changer(request.id.session());
        }
        disk.record(now, *arrived, request, *outcome);
        if !request.op.is_own() {
            disk.histograms.answer(now - *arrived, request.op);
        }
        let is_hit = *outcome == Outcome::Hit || outcome.is_from_memory();
        if request.op == Op::Read && is_hit && !request.passes_by() {
            disk.sizing.hit();
        }
        self.reply_out.push_back(reply);
    }

    /// Ends an answered request, and releases its range lock and its buffer.
    pub(super) fn finish(&mut self, slot: u32) {
        self.give_back_zeroes(slot);
        let Active { request, range, phase, pending, fill_bytes, is_answered, .. } = self.requests[slot];
        assert_eq!(pending, 0, "a request ends with I/O in flight");
        self.requests.free(slot);
        if range.first < range.end {
            let runnable = &mut self.runnable;
            self.range_locks.leave(slot, |granted| runnable.push_back(granted));
        }
        self.fill_bytes -= fill_bytes;
        self.filling -= u32::from(phase == Phase::Fill);
        self.release_out.extend(request.buffer);
        self.slots.give_back(request.disk, 1);
        let disk = self.disk_mut(request.disk);
        disk.in_flight -= 1;
        disk.ownership.guests -= u32::from(!request.op.is_own());
        disk.answered_discards -= u32::from(is_answered);
        if let Some(cache) = &mut disk.cache {
            disk.stats.extra_blocks_used += cache.take_extra_uses();
        }
        self.unsettled.push(request.disk);
    }
}
