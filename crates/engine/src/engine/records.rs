//! Creates the records of one cache's journal, and tracks which of them are durable. `commit.rs`
//! makes records durable.

use std::collections::{BTreeMap, BTreeSet};

use super::overwrite::Overwrites;
use crate::cache::Cache;
use crate::command::{DataSegment, NewRing};
use crate::index::Index;
use crate::index::parts::ALL_UNITS;
use crate::journal::{Change, PAGE_BYTES, Writer};
use crate::units::{DeviceId, Instant};

/// Maximum number of journal pages in one I/O.
const RUN_PAGES_MAX: u64 = 16;

/// Maximum time until a record is durable if no request waits for it, nanoseconds.
const COMMIT_NS_MAX: u64 = 1_000_000_000;

/// The journal of one cache.
pub(super) struct Journal {
    pub(super) writer: Writer,
    pub(super) ring: NewRing,
    pub(super) segment_bytes: u64,
    /// For each copy of the journal ring, true if the copy cannot be written any more.
    pub(super) lost: Vec<bool>,
    /// Runs of journal pages that are being written. The key is the number of a run's first page,
    /// and the value is the number of copies in flight.
    pub(super) in_flight: BTreeMap<u64, u8>,
    /// Devices written since their last flush.
    pub(super) written: BTreeSet<DeviceId>,
    /// Devices whose last flush failed, but whose data has copies on other devices. Dirty data that
    /// is overwritten in place has no checksum in the journal. Without a checksum, recovery cannot
    /// tell which copy is correct. So no dirty data is overwritten while this set is not empty.
    pub(super) spared: BTreeSet<DeviceId>,
    /// True if a record or data was written that a guest's flush must make durable.
    pub(super) urgent: bool,
    /// True if a zone's bypass mark was set after the last journal page was sealed: no page
    /// contains the mark yet.
    pub(super) unsealed_marks: bool,
    /// True if a device failed a flush that no page names yet.
    pub(super) unsealed_names: bool,
    /// The page that names all devices that failed a flush.
    names_in: u64,
    /// Number of the newest journal page with a bypass mark that the preceding page does not have.
    pub(super) marks_in: u64,
    /// True if a change went to the backing before the bypass mark of its zone was durable. No clean
    /// data is recorded until all marks are durable.
    pub(super) has_unawaited_marks: bool,
    /// Number of the last durable page.
    pub(super) durable: u64,
    pub(super) waiting: Vec<u32>,
    pub(super) overwrites: Overwrites,
    /// Dirty cache sectors that must be written again before the journal ring is complete.
    pub(super) rewrite: Vec<u64>,
    /// True if the next commit must begin immediately, although no request in `waiting` needs the
    /// commit.
    pub(super) asked: bool,
    /// Sectors that are no longer dirty, although the durable journal may record them as dirty.
    pub(super) releases: BTreeSet<u64>,
    pub(super) round: Option<Commit>,
    pub(super) schedule: CommitSchedule,
    /// Time of the oldest record that is not durable.
    pub(super) oldest: Option<Instant>,
    /// True if the journal cannot record anything any more.
    pub(super) dead: bool,
    /// True if the daemon has recorded that recovery must not use clean data of this journal ring.
    pub(super) loss_recorded: bool,
    /// True if the daemon has recorded that recovery must discard dirty data of this journal ring.
    pub(super) discard_recorded: bool,
    /// True if the engine has reported that a discard of dirty data waits until the daemon has
    /// recorded the discard.
    pub(super) discard_reported: bool,
    /// True if an excluded device has completed a flush successfully. The device is used again when
    /// no data is dirty.
    pub(super) mends: bool,
    /// True if a flush of a device failed, and dirty data or a write in flight has no good copy on
    /// another device. This data is destaged before a new journal ring records it as dirty.
    pub(super) distrusted: bool,
    /// Time at which the journal was lost, if it had been in service.
    pub(super) lost_at: Option<Instant>,
}

/// A commit in progress.
pub(super) struct Commit {
    /// Last page that the commit makes durable.
    pub(super) upto: u64,
    pub(super) waiters: Vec<u32>,
    pub(super) releases: BTreeSet<u64>,
    /// Sectors whose *unproven* record the commit makes durable.
    pub(super) unproven: BTreeSet<u64>,
    /// Number of flushes in flight; `None` while pages are being written.
    pub(super) flushes: Option<u32>,
    /// True if a guest's flush that arrives now would have to wait for this commit.
    pub(super) urgent: bool,
}

/// Predicts the next flush of a guest: after as many writes as before the last flush. The engine
/// writes the journal pages just before the predicted flush. If the prediction is right, the guest
/// waits only for the flush of the device.
#[derive(Default)]
pub(super) struct CommitSchedule {
    /// Number of writes to flash between the last two commits, if exactly one request waited for
    /// the last commit. Otherwise 0, so that no flush is predicted.
    before: u32,
    /// Number of writes to flash since the last commit began.
    since: u32,
    /// True if pages were written in advance of the next flush. Pages are written in advance only
    /// once per flush, so a wrong prediction costs one page.
    is_ahead: bool,
}

impl CommitSchedule {
    /// Records a write to flash.
    pub(super) fn wrote(&mut self) {
        self.since = self.since.saturating_add(1);
    }

    /// Records the start of a commit.
    fn round(&mut self, waiters: usize) {
        let before = if waiters == 1 { self.since } else { 0 };
        *self = CommitSchedule { before, since: 0, is_ahead: false };
    }

    /// Returns true if the guest is expected to flush now.
    fn is_due(&self) -> bool {
        self.before > 0 && self.since == self.before && !self.is_ahead
    }
}

/// Returns the ordinal of a data segment on a device; `None` if the cache has none there.
fn segment_on(device: DeviceId, cache: &Cache) -> Option<u32> {
    cache.segments.iter().find(|segment| segment.place.device == device).map(|segment| segment.ordinal)
}

impl Journal {
    pub(super) fn new(writer: Writer, ring: NewRing, segment_bytes: u64) -> Journal {
        Journal {
            writer,
            lost: vec![false; ring.copies.len()],
            ring,
            segment_bytes,
            in_flight: BTreeMap::new(),
            written: BTreeSet::new(),
            spared: BTreeSet::new(),
            urgent: false,
            unsealed_marks: false,
            unsealed_names: false,
            names_in: 0,
            marks_in: 0,
            has_unawaited_marks: false,
            durable: 0,
            waiting: Vec::new(),
            overwrites: Overwrites::default(),
            rewrite: Vec::new(),
            asked: false,
            releases: BTreeSet::new(),
            round: None,
            schedule: CommitSchedule::default(),
            oldest: None,
            dead: false,
            loss_recorded: false,
            discard_recorded: false,
            discard_reported: false,
            mends: false,
            distrusted: false,
            lost_at: None,
        }
    }

    /// Excludes a device that failed a flush, and the copy of the journal ring on it. If dirty data
    /// has no copy on another device, sets `distrusted`. `has_single_writes` is true if writes of
    /// one copy are in flight: a part of their data may be lost already. Returns true if the journal
    /// can still be used.
    pub(super) fn exclude(&mut self, device: DeviceId, cache: &Cache, has_single_writes: bool) -> bool {
        let is_excluded = |at: DeviceId| at == device || self.spared.contains(&at);
        let on_it: Vec<_> =
            cache.segments.iter().filter(|segment| is_excluded(segment.place.device)).copied().collect();
        for (copy, lost) in self.ring.copies.iter().zip(&mut self.lost) {
            *lost |= copy.iter().any(|segment| segment.device == device);
        }
        let is_written_once = has_single_writes && cache.is_on(device);
        let is_new = !self.spared.contains(&device);
        let is_kept = !is_written_once && !cache.would_lose_dirty(&on_it) && self.spare(device, cache);
        self.distrusted |= !is_kept;
        let goes_on = is_kept && !self.dead && self.lost.contains(&false);
        if goes_on && is_new {
            (self.unsealed_names, self.urgent) = (true, true);
            // A ring that is being created gets the name in the page that makes the ring valid. An
            // additional commit could make the ring valid too early.
            self.asked |= self.writer.exists();
        }
        goes_on
    }

    /// Returns true if a durable page names all devices that failed a flush. Before that, a power
    /// failure makes recovery trust the data on such a device.
    pub(super) fn has_durable_names(&self) -> bool {
        !self.unsealed_names && self.names_in <= self.durable
    }

    /// Returns true if the journal ring or the cache has segments on a device.
    pub(super) fn uses(&self, device: DeviceId, cache: &Cache) -> bool {
        cache.is_on(device) || self.segments().any(|segment| segment.device == device)
    }

    /// Excludes a device that failed a flush, and names it in all later pages of the journal ring.
    /// Returns false if the pages cannot name another device.
    pub(super) fn spare(&mut self, device: DeviceId, cache: &Cache) -> bool {
        if segment_on(device, cache).is_some_and(|segment| !self.writer.name_failed(segment)) {
            return false;
        }
        self.spared.insert(device);
        // The next commit flushes the device again.
        self.written.insert(device);
        true
    }

    /// Uses an excluded device again. No dirty data and no write in progress depends on the flush
    /// that failed.
    pub(super) fn trust_again(&mut self, device: DeviceId, cache: Option<&Cache>) {
        self.spared.remove(&device);
        if let Some(segment) = cache.and_then(|cache| segment_on(device, cache)) {
            self.writer.unname_failed(segment);
        }
    }

    /// Keeps those devices excluded that the old journal excluded after a failed flush. A new
    /// journal ring does not make the data on these devices durable. So until the cache's dirty
    /// data is destaged, only the copies on other devices count. Unflushed writes to other devices
    /// depend on the next flush, as before.
    pub(super) fn take_over_spared(&mut self, old: &Journal, cache: &Cache) {
        let uses = |device: &DeviceId| cache.segments.iter().any(|segment| segment.place.device == *device);
        self.written.extend(old.written.iter().copied().filter(uses));
        if cache.index.dirty_sectors() == 0 {
            return;
        }
        let is_spared = |segment: &&DataSegment| old.spared.contains(&segment.place.device);
        let on_spared: Vec<_> = cache.segments.iter().filter(is_spared).copied().collect();
        // The other copies may have been on a device that leaves the cache.
        self.distrusted |= cache.would_lose_dirty(&on_spared);
        for device in old.spared.iter().copied().filter(uses) {
            self.distrusted |= !self.spare(device, cache);
        }
        self.mends = old.mends && !self.spared.is_empty();
    }

    /// Returns the time at which the journal was lost; `None` if it was not lost.
    pub(super) fn lost_at(&self) -> Option<Instant> {
        self.lost_at
    }

    /// Adds a record. Once the record is durable, the sector `release` may be reused, unless the
    /// sector is dirty at that time.
    pub(super) fn record(&mut self, now: Instant, change: Change, release: Option<u64>) {
        if self.dead {
            if matches!(change, Change::Set { dirty: true, .. }) {
                // This record never becomes durable, so from now on `is_committed` returns false
                // for the sector.
                self.writer.push(change);
            }
            return;
        }
        self.writer.push(change);
        self.releases.extend(release);
        self.oldest.get_or_insert(now);
    }

    /// Sets the bypass mark of a zone.
    pub(super) fn mark(&mut self, zone: usize) {
        self.writer.mark(zone);
        self.unsealed_marks = true;
    }

    /// Returns true if a bypass mark was set that no durable journal page contains yet.
    pub(super) fn marks_pending(&self) -> bool {
        self.unsealed_marks || self.marks_in > self.durable
    }

    /// Returns true if recovery would find all records. While a new ring is created, recovery finds
    /// only the old one.
    pub(super) fn is_all_durable(&self) -> bool {
        let has_all = self.oldest.is_none() && self.writer.pending() == 0 && self.has_durable_names();
        !self.dead && self.writer.exists() && has_all && self.is_idle()
    }

    /// Returns true if a guest's flush that arrives now must wait for a commit.
    pub(super) fn needs_commit(&self) -> bool {
        self.urgent || self.round.as_ref().is_some_and(|round| round.urgent)
    }

    /// Returns true if a commit is in progress.
    pub(super) fn has_round(&self) -> bool {
        self.round.is_some()
    }

    /// Returns the number of page runs being written.
    pub(super) fn runs_in_flight(&self) -> usize {
        self.in_flight.len()
    }

    /// Records that the sectors from `sector` on were filled and are valid. The sectors are clean,
    /// except second copies of dirty data. A second copy of dirty data is dirty too, because the
    /// first copy may be lost.
    pub(super) fn record_filled(&mut self, now: Instant, index: &mut Index, sector: u64, sums: &[u32]) {
        for (at, sum) in (sector..).zip(sums) {
            let ((frame, block, inside), sum) = (index.locate(at), *sum);
            let first = index.of_second(at);
            let dirty = first.is_some_and(|first| index.is_dirty(first));
            if dirty {
                index.set_dirty(at);
                index.set_held(at, true);
            }
            let units = if dirty { index.units(at) } else { ALL_UNITS };
            let second = first.is_some();
            let change = Change::Set { frame, block, sector: inside, sum, dirty, second, units };
            self.record(now, change, None);
        }
    }

    /// Records that the backing durably has a sector's data.
    pub(super) fn clean_sector(&mut self, now: Instant, index: &mut Index, sector: u64) {
        let (frame, block, first) = index.locate(sector);
        let change = if index.is_unproven(sector) {
            let (sum, second) = (index.sum(sector), index.first_of(frame).is_some());
            Change::Set { frame, block, sector: first, sum, dirty: false, second, units: ALL_UNITS }
        } else {
            Change::Clean { frame, block, first, count: 1 }
        };
        self.record(now, change, Some(sector));
        index.clear_dirty(sector, 1);
    }

    /// Records which blocks evictions have removed from frames. Without these records, a crash
    /// would bring back the data of evicted blocks although the backing has changed since.
    pub(super) fn record_gone(&mut self, now: Instant, cache: &mut Cache) {
        for (frame, block) in cache.take_gone() {
            // Only the part of the last block that is inside the disk is recorded, because recovery
            // rejects a page that records more.
            let count = self.writer.sectors_of(block);
            self.record(now, Change::Drop { frame, block, first: 0, count }, None);
        }
    }

    /// Records that sectors are invalid, regardless of the index.
    pub(super) fn record_void(&mut self, now: Instant, index: &Index, sectors: std::ops::Range<u64>) {
        for sector in sectors {
            let (frame, block, first) = index.locate(sector);
            self.record(now, Change::Drop { frame, block, first, count: 1 }, None);
        }
    }

    /// Returns true if the durable journal may record clean sectors as dirty.
    pub(super) fn has_releases(&self) -> bool {
        let in_round = self.round.as_ref().is_some_and(|round| !round.releases.is_empty());
        !self.dead && (in_round || !self.releases.is_empty())
    }

    /// Requests an immediate commit.
    pub(super) fn ask(&mut self) {
        self.asked = true;
    }

    /// Returns true if a dirty sector is durably recorded as dirty.
    pub(super) fn is_committed(&self, index: &Index, sector: u64) -> bool {
        let (frame, _, inside) = index.locate(sector);
        self.writer.is_committed(frame, inside)
    }

    /// Returns true if a dirty sector may be destaged. If the journal does not durably record the
    /// sector as dirty, recovery after a crash might use older, clean data for it.
    pub(super) fn may_destage(&self, index: &Index, sector: u64) -> bool {
        self.dead && self.loss_recorded || self.is_committed(index, sector)
    }

    /// Records the checksum of a dirty sector whose checksum the journal does not have.
    pub(super) fn prove_sector(&mut self, now: Instant, index: &mut Index, sector: u64) {
        self.record_dirty(now, index, sector);
        index.set_unproven(sector, false);
    }

    /// Records a dirty sector with the checksum from the index.
    pub(super) fn record_dirty(&mut self, now: Instant, index: &Index, sector: u64) {
        let (frame, block, inside) = index.locate(sector);
        let (sum, second) = (index.sum(sector), index.first_of(frame).is_some());
        let units = index.units(sector);
        self.record(now, Change::Set { frame, block, sector: inside, sum, dirty: true, second, units }, None);
    }

    /// Drops a sector's data if the sector is valid.
    pub(super) fn drop_sector(&mut self, now: Instant, index: &mut Index, sector: u64) {
        if !index.is_valid(sector) {
            return;
        }
        let (frame, block, first) = index.locate(sector);
        let release = index.is_held(sector).then_some(sector);
        self.record(now, Change::Drop { frame, block, first, count: 1 }, release);
        index.clear_valid(sector, 1);
    }

    /// Records the end of a page write.
    pub(super) fn note_pages_written(&mut self) {
        let first_unwritten = self.in_flight.keys().next();
        self.writer.pages_written(first_unwritten.map_or(self.writer.sealed(), |first| first - 1));
    }

    /// Records that data was written to a device.
    pub(super) fn wrote(&mut self, device: DeviceId) {
        self.written.insert(device);
    }

    /// Returns true if nothing is in progress and no request waits.
    pub(super) fn is_idle(&self) -> bool {
        self.round.is_none() && self.in_flight.is_empty() && self.waiting.is_empty()
    }

    /// Returns the segments of all copies of the journal's ring.
    pub(super) fn segments(&self) -> impl Iterator<Item = crate::command::Segment> {
        self.ring.copies.iter().flatten().copied()
    }

    /// Returns true if a commit must begin.
    pub(super) fn is_due(&self, now: Instant) -> bool {
        self.asked
            || !self.waiting.is_empty()
            || self.writer.wants_commit()
            || self.commit_deadline().is_some_and(|at| at <= now)
    }

    /// Returns true if the pending records should be written to flash now, because a guest's flush
    /// is expected next and would otherwise wait for this write. Returns false while a journal page
    /// is being written.
    pub(super) fn foresees_round(&self) -> bool {
        self.schedule.is_due() && self.in_flight.is_empty() && self.writer.pending() > 0
    }

    /// Returns the time at which the next commit is due. A ring that is being created has no
    /// deadline, because the change that creates it also commits it.
    fn commit_deadline(&self) -> Option<Instant> {
        let may_commit = !self.dead && self.round.is_none() && self.writer.exists();
        self.oldest.filter(|_| may_commit).map(|at| at + COMMIT_NS_MAX)
    }

    /// Returns the time at which the next commit is due, or at which checksums of quiet sectors are
    /// recorded; `None` if neither is planned.
    pub(super) fn deadline(&self) -> Option<Instant> {
        let quiet = if self.dead || self.round.is_some() { None } else { self.overwrites.turn() };
        self.commit_deadline().into_iter().chain(quiet).min()
    }

    /// Seals the pages of one I/O: at most [`RUN_PAGES_MAX`] pages, not beyond the end of the
    /// journal ring or of a segment.
    pub(super) fn seal_run(
        &mut self,
        index: &Index,
        mut more: impl FnMut(&Writer) -> bool,
    ) -> Option<(u64, Vec<u8>)> {
        let mut bytes = Vec::new();
        let mut first = None;
        while more(&self.writer) && !self.writer.must_wait() {
            let sequence = self.writer.seal(index, &mut bytes);
            let first = *first.get_or_insert(sequence);
            if std::mem::take(&mut self.unsealed_marks) {
                self.marks_in = sequence;
            }
            if std::mem::take(&mut self.unsealed_names) {
                self.names_in = sequence;
            }
            let next = self.writer.page_number(sequence + 1);
            let ends = next == 0 || (next * PAGE_BYTES as u64).is_multiple_of(self.segment_bytes);
            if ends || sequence + 1 - first == RUN_PAGES_MAX {
                break;
            }
        }
        first.map(|first| (first, bytes))
    }

    /// Returns the location of a page in one copy of the journal ring.
    pub(super) fn place(&self, copy: usize, number: u64) -> (DeviceId, u64) {
        let at = number * PAGE_BYTES as u64;
        let segment = self.ring.copies[copy][(at / self.segment_bytes) as usize];
        (segment.device, segment.offset + at % self.segment_bytes)
    }

    /// Packs the pending records into pages before the guest's flush that is expected next.
    pub(super) fn seal_ahead(&mut self, index: &Index) -> Option<(u64, Vec<u8>)> {
        self.schedule.is_ahead = true;
        self.seal_run(index, |writer| writer.pending() > 0)
    }

    /// Begins a commit, which packs all records into pages. If the journal ring is full, the
    /// waiting requests keep waiting.
    pub(super) fn begin_round(&mut self) {
        let complete = self.writer.pending() == 0 && !self.unsealed_marks && !self.unsealed_names;
        let urgent = self.urgent;
        self.schedule.round(self.waiting.len());
        let waiters = if complete { std::mem::take(&mut self.waiting) } else { Vec::new() };
        let releases = if complete { std::mem::take(&mut self.releases) } else { BTreeSet::new() };
        let unproven = if complete { self.overwrites.take_pending() } else { BTreeSet::new() };
        let upto = self.writer.sealed();
        self.asked = false;
        if complete {
            self.oldest = None;
            self.urgent = false;
        }
        self.round = Some(Commit { upto, waiters, releases, unproven, flushes: None, urgent });
    }
}
