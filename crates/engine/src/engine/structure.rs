//! Structural changes of a persistent cache, which its journal must record: a new journal ring, a
//! clean close, a discard of all dirty data, and the permanent end of the cache. A *zone* is one of
//! at most 4096 parts of a disk. Its *bypass mark* in the journal means that writes may have
//! changed the zone on the backing without a change of the cache.
//!
//! Every structural change begins when the cache is quiesced, and requests wait until the change is
//! complete. Except before a discard, the backing is flushed first, so that no zone needs its
//! bypass mark any more. The changes are:
//! - A *new journal ring* consists of a complete dump, a flush, and a page that names the journal
//!   ring. After a recovery, the tail of the recovered ring is written again first (`rewrite.rs`).
//!   Until that page is durable, the old journal ring is valid. If writing fails, the cache stays
//!   as it was.
//! - A *clean close* records the current state and ends with a closing page. If the disk is being
//!   removed and its backing cannot be flushed, the closing page is left out. The next recovery
//!   then works as after a crash.
//! - A *discard* records that dirty data is dropped. A discard does not use the backing, which may
//!   have failed. So zones keep their bypass marks.
//! - A *final end* sets the bypass marks of all zones: recovery will use no clean data although the
//!   journal ring still exists. A final end succeeds even if the backing cannot be flushed.

mod ending;

use super::Engine;
use super::destager::Epochs;
use super::disk::Disk;
use super::records::Journal;
use crate::cache::Cache;
use crate::command::{
    CacheChange, CacheConfig, CommandError, DataSegment, Discard, Enable, Mode, NewRing, Role, Segment,
};
use crate::index::Index;
use crate::journal::{Change, Descriptor, PAGE_BYTES, Recovered, Writer, ZONES, ring_pages_min};
use crate::units::{BlockNo, CommandId, DiskId, Instant, SECTOR_BYTES};

/// Maximum number of runs of dump pages in flight.
const RUNS_MAX: usize = 4;

/// Maximum number of attempts to flush the backing before a structural change.
const FLUSHES_MAX: u8 = 5;

/// A structural change in progress.
pub(super) struct Opening {
    command: Option<CommandId>,
    kind: Kind,
    stage: Stage,
    /// The cache before the change, and its journal.
    pub(super) old: Option<(Cache, Option<Box<Journal>>)>,
    /// Segments that are released if the change succeeds.
    released: Vec<Segment>,
    /// True if the old journal ring is lost if the change fails.
    pub(super) distrusted: bool,
    /// True if the old journal ring lost a copy during the change.
    pub(super) has_lost_copy: bool,
    /// Sectors of the disk whose clean copies the old cache must drop if it is restored.
    forget: Vec<(u64, u64)>,
}

impl Opening {
    /// Returns true if the change writes a new journal ring, which is valid only when it is
    /// complete.
    pub(super) fn makes_ring(&self) -> bool {
        self.kind == Kind::Ring
    }

    /// Returns true if only the change itself may seal pages and begin commits, because flash must
    /// not have a valid new journal ring yet.
    pub(super) fn controls_pages(&self) -> bool {
        self.makes_ring() && self.stage != Stage::LastCommit
    }

    /// Returns true if flash may have a complete new journal ring, also if its last write failed.
    pub(super) fn may_be_valid(&self) -> bool {
        self.makes_ring() && self.stage == Stage::LastCommit
    }

    /// Records sectors whose clean copies are wrong. If the change fails, the old cache drops these
    /// copies too.
    pub(super) fn forget_if_abandoned(&mut self, ranges: &[(u64, u64)]) {
        // A backing that hangs may report the same loss again and again.
        if !self.forget.ends_with(ranges) {
            self.forget.extend_from_slice(ranges);
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Ring,
    Close,
    Void,
    Discard(Discard),
}

impl Kind {
    /// Returns true if the backing must be flushed before this change. `tries` is the number of
    /// attempts to flush the backing so far. A new journal ring and a clean close record which data
    /// is clean, so they need the flush. The removal of a cache succeeds even if the flush fails,
    /// because such a cache has no dirty data. The backing of another host's disk is not flushed. A
    /// discard does not need the backing.
    fn flushes(self, tries: u8, role: Role) -> bool {
        match self {
            Kind::Ring | Kind::Close => true,
            Kind::Void => tries == 0 && role != Role::Away,
            Kind::Discard(_) => false,
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    /// The backing is being flushed. The fields are the number of writes that the flush covers, and
    /// the number of attempts.
    FlushBacking(u64, u8),
    /// The journal tail of a recovered cache is being written again.
    Rewrite,
    /// The dump of a new journal ring is being written.
    Dump,
    /// The dump is being made durable.
    DumpCommit,
    /// All records before a clean close are being made durable. Recovery trusts a closing page and
    /// does not check the pages before this page. So these pages must be durable before the closing
    /// page is written.
    CloseCommit,
    /// The last page is being made durable.
    LastCommit,
}

impl Engine {
    /// Starts the first pending change of a disk if it concerns a persistent cache and the cache is
    /// quiesced. Returns false if no change is pending, or if the caller may apply the change now
    /// because no journal is involved.
    pub(super) fn settle_persistent(&mut self, now: Instant, id: DiskId) -> bool {
        let disk = self.disk_mut(id);
        if disk.opening.is_some() {
            return true;
        }
        let Some((_, change)) = disk.changes.front() else { return false };
        let brings_journal = matches!(change, CacheChange::Enable(enable) if enable.journal.is_some());
        let grows_disk = matches!(change, CacheChange::GrowDisk(..));
        if disk.journal.is_none() && !brings_journal && !grows_disk {
            return false;
        }
        disk.holds = true;
        if disk.journal.is_none() && grows_disk {
            return !disk.is_at_rest();
        }
        if disk.is_at_rest() {
            let (command, change) = disk.changes.pop_front().expect("checked above");
            if change.empties_memory() {
                disk.empty_memory();
            }
            if let Err(error) = self.begin_change(now, id, command, change) {
                self.end_change_of_structure(id, command, Err(error));
            }
        } else if disk.journal.as_ref().is_some_and(|journal| journal.dead) {
            self.apply_entitlement(now, id);
        }
        true
    }

    fn begin_change(
        &mut self,
        now: Instant,
        id: DiskId,
        command: Option<CommandId>,
        change: CacheChange,
    ) -> Result<(), CommandError> {
        if !self.destage_buffers.is_any() && makes_dirty(&change) {
            return Err(CommandError::Unworkable);
        }
        let Engine { disks, devices, .. } = self;
        let disk = disks[id.0 as usize].as_mut().expect("checked above");
        let mut size = disk.config.size_bytes;
        let Some(cache) = &disk.cache else {
            let CacheChange::Enable(enable) = change else { return Err(CommandError::NoCache) };
            return self.open_first(now, id, command, *enable);
        };
        if cache.index.dirty_sectors() > 0 {
            let is_gone = |segment: &DataSegment| devices.get(segment.place.device).is_fenced();
            let (gone, given): (Vec<_>, Vec<_>) = cache.given_up_by(&change).into_iter().partition(is_gone);
            if cache.would_lose_dirty(&gone) || cache.has_dirty(&given) {
                return Err(CommandError::Dirty);
            }
        }
        if let CacheChange::Tune(mode, destage, copies) = change {
            disk.tune(mode, destage, copies);
            self.end_change_of_structure(id, command, Ok(Vec::new()));
            return Ok(());
        }
        if let CacheChange::Replace(policy, admission) = change {
            disk.cache.as_mut().expect("matched").replace(policy, admission);
            self.end_change_of_structure(id, command, Ok(Vec::new()));
            return Ok(());
        }
        if let CacheChange::Fill(fill) = change {
            disk.cache.as_mut().expect("matched").set_fill(fill);
            self.end_change_of_structure(id, command, Ok(Vec::new()));
            return Ok(());
        }
        let kind = match change {
            CacheChange::Close => Some(Kind::Close),
            CacheChange::DiscardDirty(discard) => Some(Kind::Discard(discard)),
            CacheChange::Disable => Some(Kind::Void),
            _ => None,
        };
        if let Some(kind) = kind {
            self.begin_opening(now, id, command, kind, None, vec![]);
            return Ok(());
        }
        let (new, ring) = match change {
            CacheChange::Enable(_) => return Err(CommandError::CacheExists),
            CacheChange::Clear(ring) => (persistent(cache.config, cache.segments.clone(), size)?, ring),
            CacheChange::Configure(config, ring) => {
                if config.segment_bytes != cache.config.segment_bytes {
                    return Err(CommandError::Unworkable);
                }
                (persistent(config, cache.segments.clone(), size)?, ring)
            }
            CacheChange::Grow(more, ring) => {
                if more.is_empty() {
                    return Err(CommandError::TooSmall);
                }
                (cache.relocated([cache.segments.clone(), more].concat(), size)?, ring)
            }
            CacheChange::Shrink(count, ring) => {
                if count as usize >= cache.segments.len() {
                    return Err(CommandError::TooSmall);
                }
                let leaving = cache.segments_to_give(count as usize);
                let stay = cache.segments.iter().filter(|segment| !leaving.contains(segment));
                (cache.relocated(stay.copied().collect(), size)?, ring)
            }
            CacheChange::Leave(device, replacements, ring) => {
                let stay = cache.segments.iter().filter(|segment| segment.place.device != device);
                let segments: Vec<DataSegment> = stay.copied().chain(replacements).collect();
                (cache.relocated(segments, size)?, ring)
            }
            CacheChange::GrowDisk(size_bytes, ring) => {
                disk.may_grow(size_bytes)?;
                let mut same = cache.relocated(cache.segments.clone(), size_bytes)?;
                same.forget_end(size);
                size = size_bytes;
                (same, ring)
            }
            CacheChange::Close | CacheChange::DiscardDirty(_) | CacheChange::Disable => {
                panic!("these changes have no ring")
            }
            CacheChange::Expect(_)
            | CacheChange::Tune(..)
            | CacheChange::Replace(..)
            | CacheChange::Fill(_)
            | CacheChange::Drain
            | CacheChange::StopDrain
            | CacheChange::Vacate(_)
            | CacheChange::LossRecorded(_)
            | CacheChange::DiscardRecorded(_) => panic!("these do not wait"),
        };
        let distrusted = disk.journal.as_ref().is_some_and(|journal| journal.distrusted);
        if distrusted && cache.index.dirty_sectors() > 0 {
            return Err(CommandError::Dirty);
        }
        let ring = ring.ok_or(CommandError::NoJournal)?;
        let mut journal = new_journal(&new, size, ring)?;
        journal.take_over_spared(disk.journal.as_ref().expect("the cache is persistent"), &new);
        if journal.distrusted {
            return Err(CommandError::Dirty);
        }
        let kept: Vec<Segment> = new.segments.iter().map(|segment| segment.place).collect();
        let before = cache.segments.iter().map(|segment| segment.place).filter(|place| !kept.contains(place));
        let old_ring = disk.journal.as_ref().expect("the cache is persistent").segments();
        let released = before.chain(old_ring).collect();
        self.begin_opening(now, id, command, Kind::Ring, Some((new, journal)), released);
        Ok(())
    }

    fn open_first(
        &mut self,
        now: Instant,
        id: DiskId,
        command: Option<CommandId>,
        enable: Enable,
    ) -> Result<(), CommandError> {
        let disk = self.disk_mut(id);
        let size = disk.config.size_bytes;
        let Enable { config, segments, journal, recovered } = enable;
        let ring = journal.expect("the cache is persistent");
        let mut cache = persistent(config, segments, size)?;
        let (mut rewrite, mut failed) = (Vec::new(), Vec::new());
        if let Some(mut recovered) = recovered {
            rewrite = recovered.take_tail();
            failed = std::mem::take(&mut recovered.failed_segments);
            if let Some(recovering) = &disk.recovering {
                recovering.forget_changed(&mut recovered);
            }
            cache.take_over(recovered, size)?;
        }
        let mut journal = new_journal(&cache, size, ring)?;
        journal.rewrite = rewrite;
        if cache.index.dirty_sectors() > 0 {
            for segment in failed {
                _ = journal.spare(cache.segments[segment as usize].place.device, &cache);
            }
        }
        self.begin_opening(now, id, command, Kind::Ring, Some((cache, journal)), Vec::new());
        Ok(())
    }

    fn begin_opening(
        &mut self,
        now: Instant,
        id: DiskId,
        command: Option<CommandId>,
        kind: Kind,
        new: Option<(Cache, Journal)>,
        released: Vec<Segment>,
    ) {
        let disk = self.disk_mut(id);
        let mut old = None;
        if let Some((cache, journal)) = new {
            old = disk.cache.replace(cache).map(|cache| (cache, disk.journal.take()));
            disk.journal = Some(Box::new(journal));
        }
        let stage = Stage::FlushBacking(disk.backed.writes, 0);
        disk.opening = Some(Box::new(Opening {
            command,
            kind,
            stage,
            old,
            released,
            distrusted: false,
            has_lost_copy: false,
            forget: vec![],
        }));
        disk.holds = true;
        self.wake(id);
        self.pump_structure(now, id);
    }

    /// Continues a structural change as far as possible now.
    pub(super) fn pump_structure(&mut self, now: Instant, id: DiskId) {
        loop {
            let disk = self.disk_mut(id);
            let Some(Opening { kind, stage, .. }) = disk.opening.as_deref() else { return };
            let (kind, stage) = (*kind, *stage);
            disk.destager.rest_until.take_if(|until| *until <= now);
            if disk.journal.as_ref().is_some_and(|journal| journal.dead) {
                if disk.journal_in_flight > 0 || stage == Stage::Rewrite && disk.flash_in_flight > 0 {
                    return;
                }
                return match kind {
                    // No data is dirty, and the daemon records that the cache has ended.
                    Kind::Void => self.complete(now, id, kind),
                    Kind::Discard(discard) if disk.is_discard_recorded() => {
                        disk.discard(now, discard);
                        self.complete(now, id, kind)
                    }
                    Kind::Discard(_) => self.ask_for_record(id),
                    _ => self.abandon(now, id, CommandError::JournalFailed),
                };
            }
            let next = match stage {
                Stage::FlushBacking(upto, tries)
                    if disk.backed.flushed >= upto
                        || !kind.flushes(tries, disk.ownership.role) && !disk.destager.is_flushing() =>
                {
                    // A commit may have become necessary during the flush of the backing.
                    if !disk.journal.as_ref().expect("a persistent cache has a journal").is_idle() {
                        return self.pump_journal(now, id);
                    }
                    // If the change fails, the old ring still has the zones' bypass marks.
                    if kind != Kind::Ring && (disk.backed.flushed >= upto || kind == Kind::Void) {
                        disk.zones.clear();
                    }
                    self.prepare(now, id, kind)
                }
                Stage::FlushBacking(upto, tries) => {
                    if disk.destager.is_flushing() {
                        return;
                    }
                    let leaves = kind == Kind::Close && disk.removing.is_some();
                    // A backing that another host owns is not flushed.
                    let is_in_vain = tries == FLUSHES_MAX || leaves && disk.ownership.role == Role::Away;
                    match (is_in_vain, leaves) {
                        // A failed flush made the cache drop clean sectors, and these records must
                        // be written first.
                        (true, _)
                            if !disk
                                .journal
                                .as_ref()
                                .expect("a persistent cache has a journal")
                                .is_idle() =>
                        {
                            return self.pump_journal(now, id);
                        }
                        (true, false) => return self.abandon(now, id, CommandError::BackingFailed),
                        (true, true) => self.leave_unclean(now, id),
                        (false, true) if disk.destager.rest_until.is_some() => return,
                        (false, _) if !self.flush_backing(now, id) => return,
                        (false, _) => {
                            self.disk_mut(id).destager.begin_flush();
                            Stage::FlushBacking(upto, tries + 1)
                        }
                    }
                }
                Stage::Rewrite => {
                    if !self.rewrite_tail(now, id) {
                        return;
                    }
                    // The new journal ring has no older checksums, and nothing is written to flash
                    // now. So its dump records all known checksums.
                    let (journal, index) =
                        self.disk_mut(id).journal_and_index().expect("the new cache and its journal exist");
                    index.prove_known();
                    journal.writer.forget_before_dump();
                    Stage::Dump
                }
                Stage::Dump => match self.dump(now, id) {
                    true => Stage::DumpCommit,
                    false => return,
                },
                Stage::DumpCommit => {
                    if !disk.journal.as_ref().expect("the journal is being created").is_idle() {
                        return self.pump_journal(now, id);
                    }
                    self.finish_last(now, id);
                    Stage::LastCommit
                }
                Stage::CloseCommit | Stage::LastCommit => {
                    let journal = disk.journal.as_mut().expect("the journal is being closed");
                    if !journal.is_idle() {
                        return self.pump_journal(now, id);
                    }
                    // Once a new ring is valid, the crash log must belong to it. So its change is
                    // complete at once, and a later commit records the rest.
                    let is_recorded = match kind {
                        Kind::Ring => journal.writer.exists(),
                        _ => journal.writer.pending() == 0 && journal.has_durable_names(),
                    };
                    if is_recorded && stage == Stage::LastCommit {
                        return self.complete(now, id, kind);
                    }
                    if is_recorded {
                        journal.writer.set_clean();
                    }
                    self.finish_last(now, id);
                    if is_recorded { Stage::LastCommit } else { stage }
                }
            };
            if let Some(opening) = self.disk_mut(id).opening.as_deref_mut() {
                opening.stage = next;
            }
        }
    }

    /// Starts the change after the backing was flushed, or needs no flush.
    fn prepare(&mut self, now: Instant, id: DiskId, kind: Kind) -> Stage {
        let disk = self.disk_mut(id);
        if let Kind::Discard(discard) = kind {
            disk.discard(now, discard);
        }
        let (journal, index) = disk.journal_and_index().expect("a persistent cache has a journal");
        if kind == Kind::Ring {
            return Stage::Rewrite;
        }
        match kind {
            Kind::Void => (0..ZONES).for_each(|zone| journal.writer.mark(zone)),
            Kind::Discard(_) => {}
            Kind::Close | Kind::Ring => {
                prove(now, journal, index);
                (0..ZONES).for_each(|zone| journal.writer.unmark(zone));
            }
        }
        self.finish_last(now, id);
        if kind == Kind::Close { Stage::CloseCommit } else { Stage::LastCommit }
    }

    /// Closes a cache whose backing could not be flushed. The disk is removed although the flush
    /// failed, because otherwise its removal would never end. The current state is recorded without
    /// a closing page. So zones keep their bypass marks, and the next recovery drops the clean data
    /// in these zones.
    fn leave_unclean(&mut self, now: Instant, id: DiskId) -> Stage {
        let (journal, index) =
            self.disk_mut(id).journal_and_index().expect("a persistent cache has a journal");
        prove(now, journal, index);
        self.finish_last(now, id);
        Stage::LastCommit
    }

    /// Writes the remaining records as at least one page, and starts a commit.
    fn finish_last(&mut self, now: Instant, id: DiskId) {
        let mut one = true;
        loop {
            let (journal, index) =
                self.disk_mut(id).journal_and_index().expect("a persistent cache has a journal");
            if !one && journal.writer.pending() == 0 {
                break;
            }
            let more = |writer: &Writer| std::mem::take(&mut one) || writer.pending() > 0;
            let Some((first, bytes)) = journal.seal_run(index, more) else { break };
            self.write_pages(now, id, first, bytes);
        }
        self.journal_mut(id).expect("a persistent cache has a journal").begin_round();
        self.pump_journal(now, id);
    }

    /// Writes dump pages. Returns true when all of them are written and their commit has begun.
    fn dump(&mut self, now: Instant, id: DiskId) -> bool {
        loop {
            let disk = self.disk_mut(id);
            let done = disk.journal.as_ref().is_some_and(|journal| journal.writer.first_dump_done());
            let devices = disk.cache.as_ref().filter(|_| done).map(Cache::dirty_devices).unwrap_or_default();
            let (journal, index) = disk.journal_and_index().expect("the journal is being created");
            if journal.has_round() {
                self.pump_journal(now, id);
                return false;
            }
            if journal.writer.first_dump_done() {
                // The commit makes the data durable that the dump records as dirty. Checksums tell
                // later whether flash has the clean data.
                devices.into_iter().for_each(|device| journal.wrote(device));
                journal.begin_round();
                self.pump_journal(now, id);
                return true;
            }
            if journal.runs_in_flight() >= RUNS_MAX {
                return false;
            }
            match journal.seal_run(index, |writer| !writer.first_dump_done()) {
                Some((first, bytes)) => self.write_pages(now, id, first, bytes),
                None => journal.begin_round(),
            }
        }
    }
}

impl Disk {
    /// Discards the cache's dirty data. The backing may have received a part of the discarded data.
    /// A later read may put this part into the cache as clean data, and then the backing may still
    /// lose it. Bypass marks make recovery drop such clean data.
    fn discard(&mut self, now: Instant, discard: Discard) {
        self.note_everything();
        let (journal, index) = self.journal_and_index().expect("only a persistent cache has dirty data");
        let is_any = index.dirty_sectors() > 0;
        let dropped = drop_dirty(now, journal, index);
        if self.backed.writes > self.backed.flushed {
            let size = self.config.size_bytes;
            let zones = dropped.iter().map(|sector| Writer::zone_of(size, sector * SECTOR_BYTES));
            self.mark_unflushed(now, &zones.collect());
        }
        self.backed.note_given_up(dropped.into_iter());
        if is_any && discard == Discard::Told {
            self.backed.give_up();
        }
    }

    /// Restarts the destager with the current dirty data. Sectors that flash failed to deliver are
    /// retried.
    fn restart_destager(&mut self) {
        self.lost.clear();
        let epochs = self.cache.as_ref().map_or(Epochs::One, |cache| Epochs::of(&cache.config.destage));
        let dirty: Vec<BlockNo> = self.cache.iter().flat_map(|cache| cache.index.dirty_blocks()).collect();
        self.destager.restart(epochs, dirty.into_iter());
    }

    /// Returns true if the cache is quiesced, so that its structure may change. No flash I/O or
    /// journal I/O may be in flight. No change of the backing may be in flight either, because a
    /// new journal ring has no bypass marks for such a change.
    pub(super) fn is_at_rest(&self) -> bool {
        let journal = self.journal.as_ref().is_none_or(|journal| journal.is_idle());
        journal
            && self.backing_in_flight == 0
            && self.flash_in_flight == 0
            && self.journal_in_flight == 0
            && self.jobs == 0
    }
}

/// Returns true if the cache can have dirty data after this change. An engine without a destage
/// buffer refuses such a change.
fn makes_dirty(change: &CacheChange) -> bool {
    match change {
        CacheChange::Enable(enable) => {
            let is_dirty = |recovered: &Recovered| recovered.summary.sectors_dirty > 0;
            enable.config.mode == Mode::WriteBack || enable.recovered.as_ref().is_some_and(is_dirty)
        }
        CacheChange::Configure(config, _) => config.mode == Mode::WriteBack,
        CacheChange::Tune(mode, ..) => *mode == Mode::WriteBack,
        _ => false,
    }
}

/// Creates an empty cache that can have a journal.
fn persistent(
    config: CacheConfig,
    segments: Vec<DataSegment>,
    disk_bytes: u64,
) -> Result<Cache, CommandError> {
    let mut cache = Cache::new(config, segments, disk_bytes)?;
    cache.index.keep_marks();
    Ok(cache)
}

/// Records the checksums that are missing from the journal.
fn prove(now: Instant, journal: &mut Journal, index: &mut Index) {
    for sector in index.unproven_sectors() {
        if !index.is_sum_unknown(sector) {
            journal.prove_sector(now, index, sector);
        }
    }
}

/// Drops all dirty sectors. Returns their positions on the disk.
fn drop_dirty(now: Instant, journal: &mut Journal, index: &mut Index) -> Vec<u64> {
    let dirty = index.all_dirty();
    let shift = index.block_shift();
    let drop = |sector| {
        let (frame, block, first) = index.locate(sector);
        journal.record(now, Change::Drop { frame, block, first, count: 1 }, Some(sector));
        index.clear_valid(sector, 1);
        (u64::from(block.0) << shift) + u64::from(first)
    };
    dirty.into_iter().map(drop).collect()
}

fn new_journal(cache: &Cache, disk_bytes: u64, ring: NewRing) -> Result<Journal, CommandError> {
    let CacheConfig { block_bytes, segment_bytes, .. } = cache.config;
    let segment_frames = segment_bytes / u64::from(block_bytes);
    let lens: Vec<usize> = ring.copies.iter().map(Vec::len).collect();
    let pages = lens.first().map_or(0, |len| *len as u64 * (segment_bytes / PAGE_BYTES as u64));
    let highest = cache.segments.iter().map(|segment| u64::from(segment.ordinal) + 1).max().unwrap_or(0);
    let mut ordinals: Vec<u32> = cache.segments.iter().map(|segment| segment.ordinal).collect();
    let descriptor = Descriptor {
        cache: ring.cache,
        ring: ring.number,
        block_shift: cache.block_shift(),
        disk_bytes,
        identity: ring.identity,
        segment_frames: segment_frames as u32,
        ordinals: ordinals.clone(),
    };
    ordinals.sort_unstable();
    let blocks = disk_bytes.div_ceil(u64::from(block_bytes));
    let workable = blocks <= u64::from(u32::MAX)
        && (1..=2).contains(&lens.len())
        && lens.iter().all(|len| *len == lens[0])
        && pages >= ring_pages_min(u64::from(cache.index.frames()), block_bytes, segment_bytes)
        && highest * segment_frames < u64::from(u32::MAX)
        && ordinals.windows(2).all(|pair| pair[0] != pair[1]);
    if !workable {
        return Err(CommandError::Unworkable);
    }
    Ok(Journal::new(Writer::new(descriptor, pages), ring, segment_bytes))
}

impl Cache {
    /// Returns the segments whose content this change drops. Their dirty data is destaged first,
    /// even if there is a second copy, because that copy may turn out unreadable. Data of a fenced
    /// device cannot be destaged.
    fn given_up_by(&self, change: &CacheChange) -> Vec<DataSegment> {
        match change {
            CacheChange::Tune(..)
            | CacheChange::Replace(..)
            | CacheChange::Fill(_)
            | CacheChange::Expect(_)
            | CacheChange::LossRecorded(_)
            | CacheChange::DiscardRecorded(_)
            | CacheChange::Grow(..)
            | CacheChange::GrowDisk(..)
            | CacheChange::DiscardDirty(_)
            | CacheChange::Close
            | CacheChange::Enable(_) => Vec::new(),
            CacheChange::Shrink(count, _) if (*count as usize) < self.segments.len() => {
                self.segments_to_give(*count as usize)
            }
            CacheChange::Leave(device, ..) => {
                self.segments.iter().filter(|segment| segment.place.device == *device).copied().collect()
            }
            _ => self.segments.clone(),
        }
    }

    /// Fills a new cache with the contents of a recovered cache that has the same segments.
    fn take_over(&mut self, recovered: Recovered, disk_bytes: u64) -> Result<(), CommandError> {
        let fits = recovered.summary.disk_bytes == disk_bytes
            && recovered.summary.block_bytes == self.config.block_bytes
            && recovered.index.frames() == self.index.frames();
        if !fits {
            return Err(CommandError::Unworkable);
        }
        self.restore(recovered.index);
        Ok(())
    }
}
