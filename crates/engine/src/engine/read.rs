//! Reads and prefetches: all from memory, or all from flash, when every sector is valid there, otherwise all from the
//! backing.

use super::{Active, Engine, Pending, Phase};
use crate::cache::push_run;
use crate::command::{Mode, Role};
use crate::index::Index;
use crate::io::{IoError, IoOp, Op};
use crate::memory::Ahead;
use crate::outcome::Outcome;
use crate::range_locks::{Kind, Range};
use crate::units::Instant;

/// Where a read is to be served from.
enum Source {
    /// Memory holds all of it.
    Memory,
    /// Every sector is valid; `Engine::runs` says where.
    Flash,
    /// The backing; the outcome if all goes well.
    Backing(Outcome),
}

impl Engine {
    /// Claims a new read's sectors and starts it if nothing is in the way. Only a read that would
    /// fill keeps other reads of its sectors waiting; one that bypasses the cache does not wait for a
    /// fill that flash is slow with. One that has to wait may find its sectors gone
    /// afterwards, so it waits as one that would fill.
    pub(super) fn enter_read(&mut self, now: Instant, slot: u32) {
        let source = self.source(slot);
        let is_persistent = self.disk(self.requests[slot].request.disk).journal.is_some();
        let (kind, waiting) = match source {
            // It never fills.
            _ if self.is_direct(slot) => (Kind::Read, Kind::Read),
            Source::Memory | Source::Flash => (Kind::Read, Kind::Fill),
            // It is being read already.
            Source::Backing(_) if self.requests[slot].seen.expected => (Kind::Fill, Kind::Fill),
            Source::Backing(outcome) if outcome.would_fill() => (Kind::Fill, Kind::Fill),
            // The destager writes to the backing.
            Source::Backing(_) if is_persistent => (Kind::Fill, Kind::Fill),
            Source::Backing(_) => (Kind::Read, Kind::Read),
        };
        if self.range_locks.acquire(slot, self.requests[slot].range, kind, waiting) {
            self.serve_read(now, slot, source);
        }
    }

    /// Starts a read that has waited for its claim.
    pub(super) fn start_read(&mut self, now: Instant, slot: u32) {
        if self.requests[slot].phase == Phase::ClaimThenBacking {
            if self.may_read(now, slot) {
                self.read_backing(now, slot);
            }
            return;
        }
        let source = self.source(slot);
        self.serve_read(now, slot, source);
    }

    /// Looks a read up, without side effects but on `runs`.
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
        if servable == range.end - range.first {
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
                    // A hint that cannot be taken: nobody wants the data itself.
                    self.reply(now, slot, Ok(()));
                    self.finish(slot);
                } else {
                    self.enter_backing(now, slot);
                }
            }
        }
    }

    /// Reads the backing. A claim keeps the destager from writing there meanwhile: what it makes clean in the middle of a read
    /// would be in neither. It also keeps others from fetching the same: a read that was to go past a cache, and waited, may find
    /// it back in service.
    fn enter_backing(&mut self, now: Instant, slot: u32) {
        let Active { request, range, outcome, .. } = self.requests[slot];
        if self.is_cached_only(slot) {
            self.reply(now, slot, Err(IoError::NotCached));
            return self.finish(slot);
        }
        let needs_claim = outcome.would_fill() || self.disk(request.disk).journal.is_some();
        if !needs_claim || !self.range_locks.only_reads(slot) {
            return self.read_backing(now, slot);
        }
        self.requests[slot].phase = Phase::ClaimThenBacking;
        let runnable = &mut self.runnable;
        self.range_locks.leave(slot, |granted| runnable.push_back(granted));
        if self.range_locks.acquire(slot, range, Kind::Fill, Kind::Fill) {
            self.read_backing(now, slot);
        }
    }

    fn serve_from_flash(&mut self, now: Instant, slot: u32) {
        let active = &mut self.requests[slot];
        active.outcome = Outcome::Hit;
        active.phase = Phase::FlashRead;
        let request = active.request;
        let Engine { disks, runs, .. } = self;
        let disk = disks[request.disk.0 as usize].as_mut().expect("disks outlive their requests");
        let cache = disk.cache.as_mut().expect("hits have a cache");
        // Where the blocks are is known since the look-up: they need not be found again.
        let used = if request.passes_by() { &[][..] } else { &runs[..] };
        for extent in used.iter().map(|run| run.extent) {
            cache.touch_all(extent.sector, extent.count);
        }
        if matches!(request.op, Op::Prefetch | Op::Pull) {
            self.reply(now, slot, Ok(()));
            self.finish(slot);
            return;
        }
        self.issue_runs(now, slot, IoOp::Read);
    }

    fn read_backing(&mut self, now: Instant, slot: u32) {
        self.requests[slot].phase = Phase::BackingRead;
        self.requests[slot].shared.clear();
        self.issue_backing(now, slot, IoOp::Read);
    }

    /// A wrong or missing sector turns the whole request into a read of the backing, which repairs
    /// flash. The sectors are invalid from here on.
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
        // What is dirty stays: the backing has something older. It is read once more over what the backing delivers.
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
            self.enter_backing(now, slot);
        }
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
        if self.find_dirty(range, 0) {
            self.requests[slot].phase = Phase::Overlay;
            return self.issue_runs(now, slot, IoOp::Read);
        }
        self.end_backing_read(now, slot);
    }

    /// Puts what is dirty of a range into `runs`, for a buffer in which it begins at this sector. False if nothing is.
    pub(super) fn find_dirty(&mut self, range: Range, mut buffer_sector: u64) -> bool {
        let Engine { disks, runs, .. } = self;
        let disk = disks[range.disk.0 as usize].as_mut().expect("disks outlive their requests");
        runs.clear();
        let Some(cache) = disk.cache.as_ref().filter(|cache| cache.index.dirty_sectors() > 0) else {
            return false;
        };
        for span in cache.spans(range.first, range.end) {
            if let Some(sector) = cache.find(span) {
                for i in (0..span.count).filter(|i| cache.index.is_dirty(sector + i)) {
                    push_run(runs, cache.extent(sector + i, 1), buffer_sector + i);
                }
            }
            buffer_sector += span.count;
        }
        !runs.is_empty()
    }

    /// What is dirty has been read over what the backing delivered.
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
        if failed && !self.is_range_lost(slot) {
            // It became clean meanwhile, and its second copy went: the backing has it now.
            self.requests[slot].failed = false;
            return self.read_backing(now, slot);
        }
        if failed {
            self.requests[slot].outcome = Outcome::DirtyLost;
            self.reply(now, slot, Err(IoError::Failed));
            return self.finish(slot);
        }
        self.end_backing_read(now, slot);
    }

    /// Is anything dirty in a request's range that flash did not deliver?
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
        let filled = if is_shared { Err(Outcome::BypassShared) } else { self.fill(now, slot) };
        if let Err(why) = filled {
            // A flash error stays the reason even when the repair has to wait.
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
