//! Bulk writes under write-back: long sequential runs go to the backing directly while too much is dirty.
//!
//! Flash absorbs bursts. During a long bulk load, however, the destager has to move data as fast as the guest writes it, and
//! flash adds a write and a read of each byte. So a write goes past the cache if all of these are true:
//!
//! | condition | reason |
//! |---|---|
//! | its run since the guest's last flush has reached `Limits::bulk_run_bytes_min` | the next flush has to wait for the backing: the run must be worth it |
//! | it has a 64th of that, and is of whole sectors, without FUA | small writes are faster in flash |
//! | the destager is running because too much is dirty | else flash absorbs it |
//! | none of its sectors is dirty | a newer version on the backing would have to be flushed first |
//! | write order is not kept | it would overtake older data |
//! | the backing answers | an outage must not reach the guest while flash has room |
//!
//! The write then is one of those that bypass flash: the rules of `write_back.rs` and `backed.rs` hold for it, zones and flushes
//! included. If the backing fails, it is written to flash after all. Free frames get a copy; nothing is evicted for it.

use super::{Active, Engine};
use crate::admission::Streams;
use crate::io::{Durability, IoError, Op, Request};
use crate::units::{DiskId, Instant, SECTOR_BYTES};

/// While the backing completes no bulk write for so long, no more are sent there.
const SILENCE_NS_MAX: u64 = 500_000_000;

/// A write must have this part of the run that makes it a bulk write.
const RUN_PART: u64 = 64;

/// The bulk writes of one disk.
#[derive(Debug, Default)]
pub(super) struct BulkWrites {
    /// The runs of the guests' writes since they last flushed.
    runs: Streams,
    /// Sent to the backing, and not ended.
    in_flight: u32,
    /// When one ended last, or the first of these was sent.
    progress: Instant,
}

/// What a write is in a sequential run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Bulk {
    /// It is not part of a long run.
    #[default]
    No,
    /// It may go past the cache.
    May,
    /// It has been sent past the cache.
    Sent,
}

impl BulkWrites {
    /// A guest flushed.
    pub(super) fn flush_point(&mut self) {
        self.runs = Streams::default();
    }

    fn is_silent(&self, now: Instant) -> bool {
        self.in_flight > 0 && now - self.progress > SILENCE_NS_MAX
    }
}

impl Engine {
    /// A request arrives: is it part of a long sequential run of writes?
    pub(super) fn observe_bulk(&mut self, request: &Request) -> Bulk {
        let run_bytes_min = self.limits.bulk_run_bytes_min;
        let disk = self.disk_mut(request.disk);
        if disk.journal.is_none() || run_bytes_min == 0 || request.op != Op::Write(Durability::Volatile) {
            return Bulk::No;
        }
        let Request { offset, len, .. } = *request;
        let end = (offset + len).div_ceil(SECTOR_BYTES);
        let run_bytes = disk.bulk.runs.observe(offset / SECTOR_BYTES, end) * SECTOR_BYTES;
        let is_whole = (offset | len).is_multiple_of(SECTOR_BYTES);
        let is_long = run_bytes >= run_bytes_min && len >= run_bytes_min / RUN_PART;
        if is_whole && is_long { Bulk::May } else { Bulk::No }
    }

    /// Does a write that flash could take go past the cache? If so, it counts as sent there.
    pub(super) fn takes_bulk_way(&mut self, now: Instant, slot: u32) -> bool {
        let Active { request, range, bulk, .. } = self.requests[slot];
        if bulk != Bulk::May {
            return false;
        }
        let disk = self.disk_mut(request.disk);
        let Ok(cache) = disk.looked_up() else { return false };
        let is_dirty = |sector, count| cache.index.count_dirty(sector, count) > 0;
        let mut spans = cache.spans(range.first, range.end);
        let has_dirty = spans.any(|span| cache.find(span).is_some_and(|sector| is_dirty(sector, span.count)));
        let has_free = cache.index.has_free();
        let flash_has_room = !disk.destager.running;
        let fails = disk.destager.failures > 0 || disk.bulk.is_silent(now);
        if has_dirty || flash_has_room || fails || cache.config.destage.ordered {
            return false;
        }
        if disk.bulk.in_flight == 0 {
            disk.bulk.progress = now;
        }
        disk.bulk.in_flight += 1;
        disk.stats.bulk_writes += 1;
        let active = &mut self.requests[slot];
        active.bulk = Bulk::Sent;
        active.not_admitted = !has_free;
        true
    }

    /// A change of the backing ended, or begins anew. True if it was a bulk write that failed: flash is to take it.
    pub(super) fn end_bulk(&mut self, now: Instant, slot: u32, result: Result<(), IoError>) -> bool {
        let active = &mut self.requests[slot];
        if active.bulk != Bulk::Sent {
            return false;
        }
        active.bulk = Bulk::No;
        let id: DiskId = active.request.disk;
        let bulk = &mut self.disk_mut(id).bulk;
        bulk.in_flight -= 1;
        if result.is_ok() {
            bulk.progress = now;
        }
        result.is_err()
    }
}
