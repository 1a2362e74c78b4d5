//! Destaging: decides which dirty data is written to the backing, and when, and marks this data as
//! clean afterwards.
//!
//! Jobs transfer sectors (`jobs.rs`), then the backing is flushed, then the journal records the
//! sectors as clean. Sectors that a guest writes again before this record stay dirty. An *epoch* is
//! an age group of dirty data: all blocks that became dirty in one period. Older epochs are
//! destaged first. The period is half the dirty-age limit or, if write order is kept, the time
//! between two flushes of the guest.

use std::ops::RangeInclusive;

use super::Engine;
use super::destager::{Epochs, half_age_ns};
use super::jobs::JobKind;
use crate::cache::Cache;
use crate::command::{CacheConfig, CommandError, Copies, Destage, Layout, Mode};
use crate::index::parts::ALL_UNITS;
use crate::io::IoError;
use crate::range_locks::{Kind, Range};
use crate::units::{BlockNo, DiskId, FrameNo, Instant, SECTOR_BYTES};

/// Number of sectors written to the backing after which the backing is flushed, even if more dirty
/// data remains. A small cache has a lower limit.
const UNFLUSHED_MAX: u64 = 8192;

/// Time after which the backing is flushed for destaged data if no request waits for this flush,
/// nanoseconds. A flush after each transfer would cost the backing more than the transfer itself.
const FLUSH_NS_MAX: u64 = 1_000_000_000;

/// Maximum number of concurrent transfers of one disk, in four situations: the guest also uses the
/// backing, the guest uses only flash, the guest is idle, and destaging is urgent. Many concurrent
/// transfers make a hard disk fast: with many queued writes in ascending order, it passes over the
/// gaps between them instead of seeking.
const TRANSFERS: [u32; 4] = [1, 2, 8, 64];

/// Number of sectors in transfer at which no further transfer starts, in the same four situations
/// as [`TRANSFERS`].
const TRANSFERRED: [u64; 4] = [1, 256, 1024, u64::MAX];

/// Minimum pause of the destager after a failure, nanoseconds. The pause doubles with each further
/// failure.
const REST_NS_MIN: u64 = 100_000_000;
const REST_NS_MAX: u64 = 10_000_000_000;

impl Cache {
    /// Returns the number of sectors to which [`Cache::full_permille`] applies: the sectors for
    /// first copies. If second copies are on a peer and the peer has fewer sectors, the sectors for
    /// second copies.
    fn sectors(&self) -> u64 {
        match self.config.copies {
            Copies::Peer if self.second_sectors() > 0 => {
                self.first_sectors().min(self.second_sectors()).max(1)
            }
            _ => self.first_sectors().max(1),
        }
    }

    /// Returns the dirty sectors in per mille of the cache's capacity. Segments that are being
    /// vacated count neither for the dirty sectors nor for the capacity.
    pub(super) fn dirty_permille(&self) -> u64 {
        self.permille(self.index.staying_dirty())
    }

    /// Returns the share of the cache's capacity, in per mille, that may be dirty. When this share
    /// is reached, writes to uncached blocks go to the backing; in a split cache, also writes to
    /// data that is not dirty.
    pub(super) fn full_permille(&self) -> u64 {
        match self.config.layout {
            Layout::Unified => self.config.destage.full_permille.into(),
            Layout::Split { read_permille } => 1000u64.saturating_sub(read_permille.into()),
        }
    }

    fn permille(&self, dirty: u64) -> u64 {
        let copies = if self.config.copies == Copies::TwoOfAll { 2 } else { 1 };
        dirty * copies * 1000 / self.sectors()
    }
}

impl Engine {
    /// Records that the blocks of these sectors have become dirty.
    pub(super) fn note_dirty(&mut self, now: Instant, disk_id: DiskId, first: u64, end: u64) {
        let disk = self.disk_mut(disk_id);
        let cache = disk.cache.as_mut().expect("dirty data is in a cache");
        disk.destager.keep_order(cache.config.destage.order);
        let epoch = match Epochs::of(&cache.config.destage) {
            Epochs::Flushes => disk.destager.flushes,
            Epochs::Time(half) => (now.0 / half) as u32,
            Epochs::One => 0,
        };
        for block in first >> cache.block_shift()..=(end - 1) >> cache.block_shift() {
            let block = BlockNo(block as u32);
            if disk.destager.add(block, epoch) {
                cache.forget_use(block);
            }
            if !cache.leaving().is_empty()
                && cache.index.find(block).is_some_and(|frame| cache.index.leaves(frame))
            {
                disk.destager.leaving.insert(block);
            }
        }
        self.wake(disk_id);
    }

    /// Returns true if a write would reach the backing before older data, although the cache's
    /// settings keep the order of writes. `first` and `end` are the range of disk sectors that the
    /// write changes. If `past_the_cache` is true, the write goes directly to the backing.
    /// Otherwise it goes to flash, where it replaces the data of these sectors.
    pub(super) fn breaks_order(&self, disk: DiskId, first: u64, end: u64, past_the_cache: bool) -> bool {
        let disk = self.disk(disk);
        let Some(cache) = disk.cache.as_ref().filter(|cache| cache.config.destage.ordered) else {
            return false;
        };
        if past_the_cache {
            // Data that cannot be read from flash cannot be destaged.
            return cache.index.dirty_sectors() > disk.lost.len() as u64;
        }
        let destager = &disk.destager;
        cache.spans(first, end).any(|span| match destager.epoch(span.block) {
            Some(epoch) => epoch < destager.flushes,
            None => {
                let found = cache.find(span).map(|sector| sector - span.first);
                let goes = |sector| cache.index.is_dirty(sector) && !disk.lost.contains(&sector);
                let on_its_way = found.is_some_and(|at| (at..at + (1 << cache.block_shift())).any(goes));
                on_its_way && destager.front < destager.flushes
            }
        })
    }

    /// Starts the transfers that are needed now, and flushes the backing after completed transfers.
    pub(super) fn pump_destage(&mut self, now: Instant, id: DiskId) {
        self.end_late_insisting(now, id);
        while !self.disk(id).holds
            && let Some(slot) = self.disk_mut(id).edge_waiters.pop()
        {
            self.resume(now, slot);
            if self.disk(id).edge_waiters.last() == Some(&slot) {
                break;
            }
        }
        loop {
            let disk = self.disk_mut(id);
            if disk.journal.is_none() || disk.holds {
                return;
            }
            disk.destager.rest_until.take_if(|until| *until <= now);
            disk.destager.wake_at = disk.destager.rest_until;
            let newest = disk.due_epoch(now);
            let has_part = !disk.is_ordered() && disk.next_part().is_some();
            if newest.is_none() && !disk.destages_leaving() && !has_part {
                // The flush of destaged data may be waiting for the end of the pause.
                disk.destager.wake_at = disk.next_age().into_iter().chain(disk.destager.rest_until).min();
                break;
            }
            let hurry = disk.hurry();
            let is_enough = disk.destager.transfers >= TRANSFERS[hurry]
                || disk.destager.moving >= TRANSFERRED[hurry]
                || disk.destager.is_flushing && disk.destager.written.len() as u64 >= disk.unflushed_max();
            // After a failure, destaged data is flushed first, so that another failure does not
            // keep it dirty.
            let flush_first =
                disk.destager.failures > 0 && !disk.destager.written.is_empty() && !disk.destager.is_flushing;
            if is_enough || disk.destager.rest_until.is_some() || flush_first {
                break;
            }
            let Some(range) = disk.next_range(id, newest) else {
                if newest.is_some() && disk.destager.is_looking() {
                    disk.destager.wake_at = Some(now);
                }
                break;
            };
            if disk.is_fresh(JobKind::Destage, range) {
                disk.journal.as_mut().expect("checked above").ask();
                disk.destager.cursor = disk
                    .cache
                    .as_ref()
                    .map_or(BlockNo(0), |cache| BlockNo((range.first >> cache.block_shift()) as u32));
                self.put_back(id, range);
                break;
            }
            // A transfer whose sectors are no longer dirty ends immediately.
            self.disk_mut(id).destager.begin_transfer(range.end - range.first);
            if !self.transfer(now, JobKind::Destage, range) {
                let destager = &mut self.disk_mut(id).destager;
                destager.end_transfer(range.end - range.first);
                let waits_until = destager.stripe_wait_until.filter(|end| *end > now);
                destager.wake_at = destager.wake_at.into_iter().chain(waits_until).min();
                self.put_back(id, range);
                break;
            }
        }
        let disk = self.disk_mut(id);
        let destager = &disk.destager;
        let may = !destager.written.is_empty() && !destager.is_flushing && destager.rest_until.is_none();
        let flush_at = disk.flush_at(now).filter(|_| may);
        if flush_at.is_some_and(|at| at <= now) {
            if self.flush_backing(now, id) {
                self.disk_mut(id).destager.begin_flush();
            }
        } else {
            disk.destager.wake_at = disk.destager.wake_at.into_iter().chain(flush_at).min();
        }
        let disk = self.disk(id);
        let dirty = disk.cache.as_ref().map_or(0, |cache| cache.index.dirty_sectors());
        if disk.destager.is_done() && dirty <= disk.lost.len() as u64 {
            self.end_order_wait(id);
        }
        self.check_drained(id);
        self.check_vacated(now, id);
        self.pump_zones(now, id);
    }

    /// Puts the blocks of a range back into the destage queue, if they are still dirty and no
    /// transfer writes them.
    pub(super) fn put_back(&mut self, id: DiskId, range: Range) {
        let disk = self.disk_mut(id);
        let (Some(cache), destager) = (&disk.cache, &mut disk.destager) else { return };
        for span in cache.spans(range.first, range.end) {
            let Some(sector) = cache.find(span) else { continue };
            let start = (u64::from(span.block.0) << cache.block_shift()) + span.first;
            let is_lost = |sector| disk.lost.contains(&sector);
            let mut dirty = (0..span.count).filter(|i| cache.index.is_dirty(sector + i));
            if dirty.any(|i| !destager.is_moved(start + i) && !is_lost(sector + i)) {
                destager.hurry(span.block);
            }
        }
    }

    /// Handles the end of a transfer of `range`, a part of `whole`. If `moved` is true, the backing
    /// has the sectors, possibly not durably. The sectors stay dirty if a flush of the backing
    /// failed or the backing reported a loss since the transfer began.
    pub(super) fn transferred(
        &mut self,
        now: Instant,
        id: DiskId,
        (range, whole): (Range, Range),
        moved: bool,
        believed: bool,
        result: Result<(), IoError>,
    ) {
        let disk = self.disk_mut(id);
        if moved {
            disk.backed.writes += 1;
        }
        match result {
            Ok(()) if moved && believed => {
                disk.destager.failures = 0;
                disk.stats.destaged_bytes += (range.end - range.first) * SECTOR_BYTES;
                disk.destager.moved(now, range.first, range.end);
            }
            Ok(()) => {}
            Err(_) => {
                disk.stats.destage_errors += 1;
                disk.rest(now);
            }
        }
        if moved && let Some(blocks) = self.disk(id).blocks_of(range) {
            self.disk_mut(id).destager.end_write(range.first, range.end, blocks);
        }
        self.put_back(id, whole);
        self.wake(id);
    }

    /// Handles the end of a flush of the backing that covers `upto` writes. `believed` is true if
    /// no other flush has failed and no loss was reported since this flush began.
    pub(super) fn backing_flushed(
        &mut self,
        now: Instant,
        id: DiskId,
        upto: u64,
        believed: bool,
        result: Result<(), IoError>,
    ) {
        let disk = self.disk_mut(id);
        disk.destager.is_flushing = false;
        match result {
            Ok(()) if believed => {
                disk.backed.end_flush(upto);
                let flushed = std::mem::take(&mut disk.destager.flushing);
                self.make_clean(now, id, flushed.into_iter());
            }
            Ok(()) => {
                assert!(
                    disk.destager.flushing.is_empty(),
                    "a failed flush makes destaged sectors dirty again"
                );
            }
            Err(_) => {
                disk.stats.destage_errors += 1;
                disk.rest(now);
                self.doubt(now, id);
            }
        }
        self.vacating_flushed(now, id, result.is_ok() && believed);
        self.unsettled.push(id);
        self.end_order_wait(id);
        self.wake(id);
    }

    /// Resumes the requests that waited until older data was on the backing. Each of these requests
    /// locks its range again.
    pub(super) fn end_order_wait(&mut self, id: DiskId) {
        for slot in std::mem::take(&mut self.disk_mut(id).destager.order_waiters) {
            let range = self.requests[slot].range;
            if self.range_locks.acquire(slot, range, Kind::Change, Kind::Change) {
                self.runnable.push_back(slot);
            }
        }
    }

    /// Marks sectors as clean that are now durable on the backing. `sectors` are sectors of the
    /// disk in ascending order. Sectors that are not dirty any more are skipped.
    fn make_clean(&mut self, now: Instant, id: DiskId, sectors: impl Iterator<Item = u64>) {
        let disk = self.disk_mut(id);
        let Some(CacheConfig { layout, copies, .. }) = disk.cache.as_ref().map(|cache| cache.config) else {
            return;
        };
        let split = layout != Layout::Unified;
        for at in sectors {
            let (Some(cache), Some(journal)) = (&mut disk.cache, &mut disk.journal) else { return };
            let shift = cache.block_shift();
            let span = crate::directory::Span {
                block: BlockNo((at >> shift) as u32),
                first: at & ((1 << shift) - 1),
                count: 1,
            };
            let Some(sector) = cache.find(span).filter(|sector| cache.index.is_dirty(*sector)) else {
                continue;
            };
            disk.lost.remove(&sector);
            let second = cache.index.second_sector(sector);
            // The backing has the other bytes of an incomplete sector.
            let drops = split || cache.index.units(sector) != ALL_UNITS;
            match drops {
                true => journal.drop_sector(now, &mut cache.index, sector),
                false => journal.clean_sector(now, &mut cache.index, sector),
            }
            // A change of the first copy's state also changes the second copy's state, but a change
            // of the second copy does not change the first.
            match (second, copies) {
                (None, _) => {}
                (Some(second), Copies::TwoOfAll) if !drops => {
                    journal.clean_sector(now, &mut cache.index, second);
                }
                (Some(second), _) => journal.drop_sector(now, &mut cache.index, second),
            }
            journal.urgent = true;
        }
    }

    /// Ends a drain if it is complete or can no longer be completed.
    fn check_drained(&mut self, id: DiskId) {
        let disk = self.disk_mut(id);
        let Some(command) = disk.draining else { return };
        let dirty = disk.cache.as_ref().map_or(0, |cache| cache.index.dirty_sectors());
        let lost = disk.lost.len() as u64;
        let is_busy = disk.flash_writes > 0 || disk.answered_discards > 0;
        if is_busy || dirty > lost || !disk.destager.is_idle() {
            return;
        }
        // From now on writes may bypass the cache and replace older dirty data. A crash must not
        // bring this older data back.
        if let Some(journal) = disk.journal.as_mut().filter(|journal| !journal.dead && journal.has_releases())
        {
            return journal.ask();
        }
        disk.draining = None;
        let result = if dirty == 0 { Ok(Vec::new()) } else { Err(CommandError::Lost) };
        self.done(command, id, result);
    }
}

impl super::Disk {
    /// Records that flash delivered a dirty sector after an earlier read error, so that the sector
    /// can be destaged.
    pub(super) fn found_again(&mut self, sector: u64) {
        if !self.lost.is_empty()
            && self.lost.remove(&sector)
            && let Some(cache) = &self.cache
        {
            self.destager.hurry(cache.index.block(FrameNo((sector >> cache.block_shift()) as u32)));
        }
    }

    /// Applies settings of the disk's cache that do not affect its contents.
    pub(super) fn tune(&mut self, mode: Mode, destage: Destage, copies: Copies) {
        let Some(cache) = &mut self.cache else { return };
        let (before, now) = (Epochs::of(&cache.config.destage), Epochs::of(&destage));
        self.has_old_single_writes |= cache.config.copies == Copies::One && self.flash_writes > 0;
        cache.tune(mode, destage, copies);
        if before != now {
            self.destager.renumber(before, now);
        }
    }

    /// Pauses the destager after a failure.
    fn rest(&mut self, now: Instant) {
        let destager = &mut self.destager;
        let rest = REST_NS_MIN << destager.failures.min(10);
        destager.failures += 1;
        destager.rest_until = Some(now + rest.min(REST_NS_MAX));
    }

    /// Returns the newest epoch that must be destaged now, or `None`.
    fn due_epoch(&mut self, now: Instant) -> Option<u32> {
        let cache = self.cache.as_ref()?;
        let destage = cache.config.destage;
        let all = self.everything_goes();
        let destager = &mut self.destager;
        let share = cache.permille(cache.index.staying_dirty().saturating_sub(destager.on_their_way()));
        destager.running = share > u64::from(destage.start_permille)
            || destager.running && share > u64::from(destage.stop_permille);
        let oldest = *destager.epochs.keys().next()?;
        if destage.ordered {
            // The next epoch begins when all data of the previous one is durable on the backing.
            let nothing_left = oldest > destager.front && destager.written.is_empty() && destager.is_idle();
            if nothing_left {
                destager.front = oldest;
            }
            let aged = destage.dirty_age_ms_max > 0;
            let vacates = self.vacating.is_some() && !destager.leaving.is_empty();
            return (all || destager.running || aged || vacates).then_some(destager.front);
        }
        if all || destager.running {
            return Some(u32::MAX);
        }
        let now_epoch = (now.0 / half_age_ns(&destage)?) as u32;
        (oldest < now_epoch).then(|| now_epoch - 1)
    }

    fn is_ordered(&self) -> bool {
        self.cache.as_ref().is_some_and(|cache| cache.config.destage.ordered)
    }

    /// Returns true if all dirty data must be destaged.
    fn everything_goes(&self) -> bool {
        self.draining.is_some()
            || self.journal.as_ref().is_some_and(|journal| journal.dead || journal.mends)
            || self.cache.as_ref().is_some_and(|cache| cache.config.mode != Mode::WriteBack)
            || !self.destager.order_waiters.is_empty()
            || self.is_ordered() && self.has_many_parts()
    }

    /// Returns the number of destaged and unflushed sectors at which the backing is flushed. If a
    /// flush of the backing is running at this number, destaging waits for the end of the flush.
    fn unflushed_max(&self) -> u64 {
        self.cache.as_ref().map_or(1, |cache| (cache.sectors() / 16).clamp(1, UNFLUSHED_MAX))
    }

    /// Returns the time at which the backing must be flushed, if a flush is needed.
    fn flush_at(&mut self, now: Instant) -> Option<Instant> {
        let cache = self.cache.as_ref()?;
        let destage = cache.config.destage;
        if self.destager.written.len() as u64 >= self.unflushed_max() {
            return Some(now);
        }
        if self.destager.transfers > 0 {
            return None;
        }
        let is_full = cache.dirty_permille() >= cache.full_permille();
        let patience = half_age_ns(&destage).map_or(FLUSH_NS_MAX, |half| FLUSH_NS_MAX.min(half / 4));
        // Dirty data that is old enough but not yet allowed to be destaged waits for this flush.
        let goes = self.everything_goes() || self.vacating.is_some() || self.has_many_parts();
        if goes || destage.ordered || is_full || self.due_epoch(now).is_some() {
            return Some(now);
        }
        self.destager.written_since.map(|since| since + patience)
    }

    /// Returns true if a job of this kind would destage dirty data of a range, but must first wait
    /// for a journal commit, because the durable journal records none of this data as dirty.
    pub(super) fn is_fresh(&self, kind: JobKind, range: Range) -> bool {
        let (Some(cache), Some(journal)) = (&self.cache, &self.journal) else { return false };
        let mut found = false;
        for span in cache.spans(range.first, range.end) {
            let Some(sector) = cache.find(span) else { continue };
            let start = (u64::from(span.block.0) << cache.block_shift()) + span.first;
            for i in 0..span.count {
                if kind.takes(&self.lost, sector + i)
                    && cache.index.is_dirty(sector + i)
                    && !self.destager.is_moved(start + i)
                {
                    if journal.may_destage(&cache.index, sector + i) {
                        return false;
                    }
                    found = true;
                }
            }
        }
        found
    }

    /// Returns the numbers of the blocks that contain the sectors of a range.
    pub(super) fn blocks_of(&self, range: Range) -> Option<RangeInclusive<u32>> {
        let shift = self.cache.as_ref()?.block_shift();
        Some((range.first >> shift) as u32..=((range.end - 1) >> shift) as u32)
    }

    /// Returns the urgency of destaging: an index of [`TRANSFERS`] and [`TRANSFERRED`].
    fn hurry(&self) -> usize {
        let Some(cache) = &self.cache else { return 0 };
        let destage = cache.config.destage;
        let high =
            u64::from(destage.start_permille.max(destage.full_permille / 2) + destage.full_permille) / 2;
        if self.draining.is_some() || !self.destager.order_waiters.is_empty() || cache.dirty_permille() > high
        {
            3
        } else if self.destages_leaving() || self.has_many_parts() {
            2
        } else if self.backing_in_flight > 0 {
            0
        } else {
            1 + usize::from(self.in_flight == 0)
        }
    }

    /// Takes the next blocks out of the destage queue: adjacent blocks that fit into one I/O. If
    /// `newest` is `Some`, blocks up to this epoch are eligible. If it is `None`, only blocks in
    /// segments that are being vacated are eligible.
    fn next_range(&mut self, id: DiskId, newest: Option<u32>) -> Option<Range> {
        let leaves = self.destages_leaving();
        let part = if self.is_ordered() { None } else { self.next_part() };
        let (cache, destager) = (self.cache.as_mut()?, &mut self.destager);
        destager.keep_order(cache.config.destage.order);
        let leaving = if leaves { destager.next_leaving() } else { None };
        let BlockNo(block) = match part.or(leaving) {
            Some(block) => block,
            None => destager.next(newest?, |block| cache.was_used(block))?,
        };
        // The disk is divided into windows of one I/O. The range includes adjacent blocks of the
        // same window, so that contiguous dirty data is written in whole stripes.
        let blocks_max = window_blocks(&cache.config, self.stripe_bytes);
        let (mut first, mut end) = (u64::from(block), u64::from(block) + 1);
        let window = first / blocks_max * blocks_max;
        let may_go = |block: u64| {
            let block = BlockNo(block as u32);
            newest.is_some_and(|newest| destager.may_go(block, newest))
                || leaves && destager.is_leaving(block)
        };
        while first > window && may_go(first - 1) {
            first -= 1;
        }
        while end < (window + blocks_max).min(1 << 32) && may_go(end) {
            end += 1;
        }
        for block in first..end {
            destager.take(BlockNo(block as u32));
        }
        destager.cursor = BlockNo(end as u32);
        let shift = cache.block_shift();
        let sectors = self.config.size_bytes.div_ceil(SECTOR_BYTES);
        Some(Range { disk: id, first: first << shift, end: (end << shift).min(sectors) })
    }

    /// Returns the time at which the oldest dirty data must be destaged because of its age. Returns
    /// `None` without dirty data or without an age limit.
    fn next_age(&self) -> Option<Instant> {
        let half = half_age_ns(&self.cache.as_ref()?.config.destage)?;
        let oldest = u64::from(*self.destager.epochs.keys().next()?);
        Some(Instant((oldest + 1) * half))
    }

    /// Returns the time at which the destager must run next, even if no event occurs; `None` if
    /// there is no such time.
    pub(super) fn destage_deadline(&self) -> Option<Instant> {
        self.destager.wake_at
    }
}

/// Returns the number of blocks of the longest window that fits into one I/O and consists of whole
/// stripes. If no such window exists, or the stripe size is unknown (0), returns the number of
/// blocks that fit into one I/O.
fn window_blocks(config: &CacheConfig, stripe_bytes: u32) -> u64 {
    let (block, io) = (u64::from(config.block_bytes), u64::from(config.destage.io_bytes_max));
    let stripe = u64::from(stripe_bytes);
    // A block size is a power of two, so this is the least common multiple of block and stripe.
    let whole = stripe << block.trailing_zeros().saturating_sub(stripe.trailing_zeros());
    match io.checked_div(whole) {
        Some(count) if count > 0 => count * whole / block,
        _ => (io / block).max(1),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::admission::Admission;
    use crate::policy::PolicyKind;

    #[test]
    fn windows_consist_of_whole_stripes_if_these_fit_into_one_io() {
        const KIB: u32 = 1 << 10;
        // Block, stripe and I/O in KiB, and the window in KiB.
        for (block, stripe, io, window) in [
            (4_u32, 0, 1024, 1024_u32),
            (4, 64, 1024, 1024),
            (4, 192, 1024, 960),
            (64, 192, 1024, 960),
            // Every second stripe ends at the end of a block.
            (128, 192, 1024, 768),
            (4, 192, 192, 192),
            (4, 192, 128, 128),
            (4, 4096, 1024, 1024),
            (1024, 192, 1024, 1024),
            (64, 0, 4, 64),
        ] {
            let policy = PolicyKind::from_name("lru").expect("known");
            let mut config = CacheConfig::write_through(block * KIB, 16 << 20, policy, Admission::default());
            config.destage.io_bytes_max = io * KIB;
            let blocks = window_blocks(&config, stripe * KIB);
            assert_eq!(blocks * u64::from(block), u64::from(window), "{block} {stripe} {io}");
        }
    }
}
