//! Bulk writes under write-back: long sequential runs go directly to the backing while too much
//! data is dirty.
//!
//! Flash absorbs bursts of writes. During a long bulk load, however, the destager has to move data
//! as fast as the guest writes it. Each byte is then also written to flash and read from flash. So
//! a write bypasses the cache if it meets all of these conditions:
//!
//! | condition | reason |
//! |---|---|
//! | its run since the guest's last flush is long | the next flush has to wait for the backing |
//! | the write is not short, covers whole sectors, and has no FUA | small writes are faster on flash |
//! | the destager is running because too much data is dirty | otherwise flash is faster for the guest |
//! | none of its sectors is dirty | a newer version on the backing would have to be flushed first |
//! | write order is not kept | the write would reach the backing before older data |
//! | the backing responds | an outage must not reach the guest while flash has room |
//!
//! A run is long if it has at least `Limits::bulk_run_bytes_min` bytes. A write is short if it has
//! less than a 64th of that number of bytes.
//!
//! A bulk write follows the rules for writes that bypass flash (`write_back.rs`, `backed.rs`),
//! including zones and flushes. If the backing fails, the write goes to flash instead. A bulk write
//! fills only free frames of the cache and evicts no block.

use super::{Active, Engine};
use crate::admission::Streams;
use crate::io::{Durability, IoError, Op, Request};
use crate::units::{DiskId, Instant, SECTOR_BYTES};

/// Time without a completed bulk write after which no further bulk writes are sent to the backing,
/// nanoseconds.
const SILENCE_NS_MAX: u64 = 500_000_000;

/// Minimum length of a bulk write: `Limits::bulk_run_bytes_min` divided by this number.
const RUN_PART: u64 = 64;

/// The bulk writes of one disk.
#[derive(Debug, Default)]
pub(super) struct BulkWrites {
    /// Sequential runs of the guests' writes since their last flush.
    runs: Streams,
    /// Number of bulk writes in flight to the backing.
    in_flight: u32,
    /// Time at which the latest bulk write completed. A bulk write that is sent while no other is
    /// in flight also sets this time.
    progress: Instant,
}

/// Whether a write may bypass the cache as a bulk write, or was sent to the backing as one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Bulk {
    /// The write must not bypass the cache as a bulk write, or its bulk write has ended.
    #[default]
    No,
    /// The write may bypass the cache.
    May,
    /// The write was sent to the backing as a bulk write.
    Sent,
}

impl BulkWrites {
    /// Records a flush of the guest, which ends all runs.
    pub(super) fn flush_point(&mut self) {
        self.runs = Streams::default();
    }

    fn is_silent(&self, now: Instant) -> bool {
        self.in_flight > 0 && now - self.progress > SILENCE_NS_MAX
    }
}

impl Engine {
    /// Returns [`Bulk::May`] if a new request is part of a long sequential run of writes.
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

    /// Returns true if a write that flash has room for must bypass the cache as a bulk write. The
    /// engine then counts the write as sent to the backing.
    pub(super) fn bypasses_as_bulk(&mut self, now: Instant, slot: u32) -> bool {
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

    /// Handles the end or the restart of a bulk write. Returns true if the bulk write failed, so
    /// that the caller writes its data to flash.
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
