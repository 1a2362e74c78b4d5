//! Reads and prefetches. Memory or flash serves a read if every sector of the read is valid there.
//! If any sector is not valid there, the backing serves the whole read.

use super::{Active, Engine, Pending, Phase};
use crate::cache::push_run;
use crate::command::{Mode, Role};
use crate::index::Index;
use crate::index::parts::ALL_UNITS;
use crate::io::{IoError, IoOp, Op, PayloadMemory, Request};
use crate::memory::Ahead;
use crate::outcome::Outcome;
use crate::range_locks::{Kind, Range};
use crate::units::Instant;

/// Where a read gets its data.
enum Source {
    /// Memory holds all data of the read.
    Memory,
    /// Flash holds every sector of the read; `Engine::runs` has the locations.
    Flash,
    /// The backing serves the read. The field is the outcome if no error occurs.
    Backing(Outcome),
}

impl Engine {
    /// Locks a new read's sectors, and starts the read if no other request conflicts. The lock of a
    /// read that may fill flash, or that bypasses a persistent cache, has the kind `Fill`. Two
    /// overlapping locks of this kind conflict, so such a read waits for earlier reads of this
    /// kind. The lock of any other read has the kind `Read`, and waits only for changes. So a read
    /// that bypasses a volatile cache does not wait for a fill on slow flash. A read from memory or
    /// flash that has to wait may find its sectors invalid later, so it waits with the kind `Fill`.
    pub(super) fn enter_read(&mut self, now: Instant, slot: u32) {
        let source = self.source(slot);
        let is_persistent = self.disk(self.requests[slot].request.disk).journal.is_some();
        let (kind, waiting) = match source {
            // A read into guest memory never fills flash.
            _ if self.is_direct(slot) => (Kind::Read, Kind::Read),
            Source::Memory | Source::Flash => (Kind::Read, Kind::Fill),
            // Read-ahead is already reading this data.
            Source::Backing(_) if self.requests[slot].seen.expected => (Kind::Fill, Kind::Fill),
            Source::Backing(outcome) if outcome.would_fill() => (Kind::Fill, Kind::Fill),
            // The lock must also exclude the destager, which writes to the backing.
            Source::Backing(_) if is_persistent => (Kind::Fill, Kind::Fill),
            Source::Backing(_) => (Kind::Read, Kind::Read),
        };
        let Active { request, range, .. } = self.requests[slot];
        if waiting == Kind::Fill && self.is_extra_read(range, kind) {
            let takes = matches!(source, Source::Backing(Outcome::MissFilled)) && may_take_extra(&request);
            self.make_way(now, range, takes);
        }
        if self.range_locks.acquire(slot, range, kind, waiting) {
            self.serve_read(now, slot, source);
        }
    }

    /// Starts a read after its range lock was granted.
    pub(super) fn start_read(&mut self, now: Instant, slot: u32) {
        if let Phase::Units(next) = self.requests[slot].phase {
            return self.read_units(now, slot, next);
        }
        if self.requests[slot].phase == Phase::LockThenBacking {
            if self.may_read(now, slot) {
                self.begin_backing_read(now, slot);
            }
            return;
        }
        let source = self.source(slot);
        self.serve_read(now, slot, source);
    }

    /// Finds the source of a read. Changes nothing but `runs`.
    fn source(&mut self, slot: u32) -> Source {
        if self.is_in_memory(slot) {
            return Source::Memory;
        }
        let Active { request, range, .. } = self.requests[slot];
        let role = self.disk(request.disk).ownership.role;
        if role == Role::Standby && request.op == Op::Read {
            return Source::Backing(Outcome::BypassStandby);
        }
        let Engine { disks, runs, .. } = self;
        let disk = disks[request.disk.0 as usize].as_mut().expect("disks outlive their requests");
        let cache = match disk.serving() {
            Ok(cache) => cache,
            Err(outcome) => return Source::Backing(outcome),
        };
        if cache.config.mode == Mode::PassThrough {
            return Source::Backing(Outcome::BypassMode);
        }
        runs.clear();
        let (mut valid, mut servable, mut buffer_sector) = (0, 0, 0);
        for span in cache.spans(range.first, range.end) {
            if let Some(sector) = cache.find(span) {
                valid += cache.index.count_valid(sector, span.count);
                servable += cache.index.count_servable(sector, span.count);
                push_run(runs, cache.extent(sector, span.count), buffer_sector);
            }
            buffer_sector += span.count;
        }
        let is_incomplete = cache.index.part_in(range.first, range.end).is_some();
        if servable == range.end - range.first && !is_incomplete {
            Source::Flash
        } else if servable < valid {
            Source::Backing(Outcome::BypassUnverified)
        } else if request.passes_by() {
            Source::Backing(Outcome::BypassNoPromote)
        } else {
            Source::Backing(if valid > 0 { Outcome::PartialMiss } else { Outcome::MissFilled })
        }
    }

    fn serve_read(&mut self, now: Instant, slot: u32, source: Source) {
        if !self.may_read(now, slot) {
            return;
        }
        match source {
            Source::Memory if !self.is_direct(slot) => self.serve_from_memory(now, slot),
            Source::Flash => self.serve_from_flash(now, slot),
            Source::Memory => self.decline(slot),
            Source::Backing(_) if self.is_direct(slot) => self.decline(slot),
            Source::Backing(Outcome::MissFilled) if self.take_extra(now, slot) => {}
            Source::Backing(outcome) => {
                let Active { request, range, seen, .. } = self.requests[slot];
                if seen.expected {
                    self.missed_ahead(request.disk, Ahead { first: range.first, end: range.end });
                }
                self.requests[slot].outcome = outcome;
                if outcome == Outcome::BypassUnverified {
                    self.verify_soon(request.disk, range.first);
                }
                if matches!(request.op, Op::Prefetch | Op::Pull) && !outcome.would_fill() {
                    // A prefetch that cannot fill the cache is answered with success, because a
                    // prefetch delivers no data.
                    self.reply(now, slot, Ok(()));
                    self.finish(slot);
                } else {
                    self.enter_backing(now, slot);
                }
            }
        }
    }

    /// Reads the backing under a range lock that excludes the destager and other reads. If the
    /// destager made a sector clean during the read, the read would return old data from the
    /// backing, so the destager has to wait. The lock also excludes other reads of the backing,
    /// because they would fetch the same data again. A read of a disk with a persistent cache takes
    /// this lock even if the cache cannot be used now. When the lock is granted, the cache may be
    /// usable again.
    fn enter_backing(&mut self, now: Instant, slot: u32) {
        let Active { request, range, outcome, .. } = self.requests[slot];
        if self.is_cached_only(slot) {
            self.reply(now, slot, Err(IoError::NotCached));
            return self.finish(slot);
        }
        let needs_lock = outcome.would_fill() || self.disk(request.disk).journal.is_some();
        if !needs_lock || !self.range_locks.only_reads(slot) {
            return self.begin_backing_read(now, slot);
        }
        self.requests[slot].phase = Phase::LockThenBacking;
        let runnable = &mut self.runnable;
        self.range_locks.leave(slot, |granted| runnable.push_back(granted));
        self.make_way(now, range, false);
        if self.range_locks.acquire(slot, range, Kind::Fill, Kind::Fill) {
            self.begin_backing_read(now, slot);
        }
    }

    fn serve_from_flash(&mut self, now: Instant, slot: u32) {
        let active = &mut self.requests[slot];
        active.outcome = Outcome::Hit;
        active.phase = Phase::FlashRead;
        let Active { request, run, .. } = *active;
        let Engine { disks, runs, .. } = self;
        let disk = disks[request.disk.0 as usize].as_mut().expect("disks outlive their requests");
        active.doubts = disk.backed.doubts;
        let cache = disk.cache.as_mut().expect("a hit has a cache");
        // The lookup already found the blocks, so the index is not searched again.
        let used = if request.passes_by() { &[][..] } else { &runs[..] };
        for extent in used.iter().map(|run| run.extent) {
            cache.touch_all(extent.sector, extent.count, run);
        }
        if matches!(request.op, Op::Prefetch | Op::Pull) {
            self.reply(now, slot, Ok(()));
            self.finish(slot);
            return;
        }
        self.issue_runs(now, slot, IoOp::Read);
    }

    /// Reads the backing for a request, and starts extra fills if the cache may get more data than
    /// the guest reads.
    fn begin_backing_read(&mut self, now: Instant, slot: u32) {
        self.read_backing(now, slot);
        let Active { request, range, run, outcome, .. } = self.requests[slot];
        if may_fill_more(&request, outcome) {
            self.fill_extra(now, range, run);
        }
    }

    fn read_backing(&mut self, now: Instant, slot: u32) {
        self.requests[slot].phase = Phase::BackingRead;
        self.requests[slot].shared.clear();
        self.issue_backing(now, slot, IoOp::Read);
    }

    /// Handles the end of a flash read. If flash delivered a sector with a wrong checksum or not at
    /// all, the whole request is read again. A read from the backing then repairs flash. The
    /// affected clean sectors become invalid at once.
    pub(super) fn flash_read_done(
        &mut self,
        now: Instant,
        slot: u32,
        io: &Pending,
        result: Result<(), IoError>,
        sums: &[u32],
    ) {
        if self.is_direct(slot) {
            return self.direct_read_done(now, slot, io, result, sums);
        }
        let disk_id = self.requests[slot].request.disk;
        let disk = self.disks[disk_id.0 as usize].as_mut().expect("disks outlive their requests");
        let index = &mut disk.cache.as_mut().expect("changes wait for flash I/O").index;
        let mut give_up = |index: &mut Index, sector| match &mut disk.journal {
            _ if index.is_dirty(sector) => {}
            Some(journal) => journal.drop_sector(now, index, sector),
            None => _ = index.clear_valid(sector, 1),
        };
        // Dirty sectors stay valid, because the backing has older data. After the read of the
        // backing, they are read again from flash into their places in the buffer.
        if result.is_err() {
            (io.sector..io.sector + io.sectors).for_each(|sector| give_up(index, sector));
            self.requests[slot].outcome = Outcome::FlashFailed;
        } else {
            assert_eq!(sums.len() as u64, io.sectors, "one checksum for each sector read");
            for (sector, sum) in (io.sector..).zip(sums) {
                if !index.matches(sector, *sum) {
                    give_up(index, sector);
                    disk.stats.checksum_mismatches += 1;
                    self.requests[slot].outcome = Outcome::ChecksumMismatch;
                }
            }
        }
        let Active { pending, outcome, .. } = self.requests[slot];
        if pending > 0 {
            return;
        }
        if outcome == Outcome::Hit {
            self.reply(now, slot, Ok(()));
            self.finish(slot);
        } else {
            self.unsettled.push(disk_id);
            self.read_again(now, slot);
        }
    }

    /// Reads a range again after its read from flash failed. If all sectors of the range are dirty,
    /// hob reads flash again, including the second copies of wrong sectors. In this case hob does
    /// not read the backing, which may not answer.
    fn read_again(&mut self, now: Instant, slot: u32) {
        let range = self.requests[slot].range;
        let has_dirty = self.find_dirty(range, 0);
        let sectors: u64 = self.runs.iter().map(|run| run.extent.count).sum();
        if has_dirty && sectors == range.end - range.first {
            self.requests[slot].phase = Phase::Overlay;
            return self.issue_runs(now, slot, IoOp::Read);
        }
        self.enter_backing(now, slot);
    }

    pub(super) fn backing_read_done(
        &mut self,
        now: Instant,
        slot: u32,
        result: Result<(), IoError>,
        sums: &[u32],
    ) {
        if result.is_err() {
            self.requests[slot].outcome = Outcome::BackingError;
            self.reply(now, slot, result);
            self.finish(slot);
            return;
        }
        let range = self.requests[slot].range;
        if self.is_believed(slot) {
            self.compare_with_backing(now, range, sums);
        }
        self.read_units(now, slot, range.first);
    }

    /// Reads a range's dirty sectors, except incomplete ones, from flash into the request's buffer,
    /// where they replace older data from the backing. Then ends the read.
    pub(super) fn overlay(&mut self, now: Instant, slot: u32) {
        if self.find_dirty(self.requests[slot].range, 0) {
            self.requests[slot].phase = Phase::Overlay;
            return self.issue_runs(now, slot, IoOp::Read);
        }
        self.end_backing_read(now, slot);
    }

    /// Sets `runs` to the flash locations of a range's dirty sectors, except incomplete ones.
    /// `buffer_sector` is the position of the range in the buffer. Returns false if `runs` is
    /// empty.
    pub(super) fn find_dirty(&mut self, range: Range, mut buffer_sector: u64) -> bool {
        let Engine { disks, runs, .. } = self;
        let disk = disks[range.disk.0 as usize].as_mut().expect("disks outlive their requests");
        runs.clear();
        let Some(cache) = disk.cache.as_ref().filter(|cache| cache.index.dirty_sectors() > 0) else {
            return false;
        };
        for span in cache.spans(range.first, range.end) {
            if let Some(sector) = cache.find(span) {
                let goes = |at| cache.index.is_dirty(at) && cache.index.units(at) == ALL_UNITS;
                for i in (0..span.count).filter(|i| goes(sector + i)) {
                    push_run(runs, cache.extent(sector + i, 1), buffer_sector + i);
                }
            }
            buffer_sector += span.count;
        }
        !runs.is_empty()
    }

    /// Handles the end of a flash read of dirty data into a buffer that already has older data from
    /// the backing.
    pub(super) fn overlay_done(
        &mut self,
        now: Instant,
        slot: u32,
        io: &Pending,
        result: Result<(), IoError>,
        sums: &[u32],
    ) {
        let disk = self.requests[slot].request.disk;
        self.requests[slot].failed |= !self.check_dirty(now, disk, io, result, sums);
        let Active { pending, failed, .. } = self.requests[slot];
        if pending > 0 {
            return;
        }
        match failed {
            true => self.dirty_unread(now, slot),
            false => self.end_backing_read(now, slot),
        }
    }

    /// Continues a read after flash failed to deliver some of the read's dirty data.
    pub(super) fn dirty_unread(&mut self, now: Instant, slot: u32) {
        if self.is_range_lost(slot) {
            self.requests[slot].outcome = Outcome::DirtyLost;
            self.reply(now, slot, Err(IoError::Failed));
            return self.finish(slot);
        }
        // The data became clean during the read and its second copy was removed, so the backing
        // has the data now.
        self.requests[slot].failed = false;
        match self.range_locks.only_reads(slot) {
            true => self.enter_backing(now, slot),
            false => self.read_backing(now, slot),
        }
    }

    /// Returns true if a request's range has dirty data that flash did not deliver.
    fn is_range_lost(&self, slot: u32) -> bool {
        let Active { request, range, .. } = self.requests[slot];
        let disk = self.disk(request.disk);
        let Some(cache) = disk.cache.as_ref().filter(|_| !disk.lost.is_empty()) else { return false };
        cache.spans(range.first, range.end).any(|span| {
            let found = cache.find(span);
            found.is_some_and(|sector| disk.lost.range(sector..sector + span.count).next().is_some())
        })
    }

    fn end_backing_read(&mut self, now: Instant, slot: u32) {
        let is_shared = self.is_all_shared(slot);
        let has_shared = !self.requests[slot].shared.is_empty();
        self.disk_mut(self.requests[slot].request.disk).is_reading_shared = has_shared;
        let filled = if is_shared { Err(Outcome::BypassShared) } else { self.fill(now, slot) };
        if let Err(why) = filled {
            // A flash error stays the outcome even if the repair of flash has to wait.
            let outcome = &mut self.requests[slot].outcome;
            let is_uncached = is_shared && *outcome == Outcome::CacheOff;
            if is_uncached || matches!(outcome, Outcome::MissFilled | Outcome::PartialMiss) {
                *outcome = why;
            }
        }
        self.reply(now, slot, Ok(()));
        self.finish_unless_filling(slot);
    }
}

/// Returns true if a miss may start extra fills of data that the guest did not read. A retry of a
/// read into guest memory must not start extra fills, because hob does not know whether this read
/// is part of a sequential run.
fn may_fill_more(request: &Request, outcome: Outcome) -> bool {
    let is_miss = matches!(outcome, Outcome::MissFilled | Outcome::PartialMiss);
    is_miss && may_take_extra(request) && request.memory == PayloadMemory::Daemon
}

/// Returns true if a miss may get its data from an extra read.
pub(super) fn may_take_extra(request: &Request) -> bool {
    request.op == Op::Read && !request.passes_by()
}
