//! Durability of a disk's backing, and reports to guests that acknowledged changes may be lost.
//!
//! # Storage contract
//! After a failed flush, any subset of the writes since the last successful flush may be lost. The
//! backing may report the error only once. A later successful flush is no evidence that those
//! writes are durable. (`fsync` on Linux; Rebello et al., "Can Applications Recover from fsync
//! Failures?", USENIX ATC 2020.) The same holds for a backing that reports a restart. A failed
//! flush, or a loss that the backing reports, is called a *possible loss* here.
//!
//! A *session* is the use of a disk by one client: from the connection (NBD, vhost-user or an
//! opened FUSE file) to its end. Each session learns of a possible loss by one failed flush.
//!
//! # Invariant
//! - A dirty sector becomes clean only after a successful backing flush that began after the write
//!   of the sector to the backing ended. No possible loss may have occurred since that write was
//!   sent. Until the sector becomes clean, the journal records it as dirty.
//! - A guest's flush succeeds only if each earlier acknowledged change is durable on flash, was
//!   covered by a flush of the backing, or was already reported as lost to the guest's session.
//!
//! A change *bypasses flash* if it goes to the backing and is never dirty data on flash. Flash may
//! have a clean copy of the changed data. In write-through, all changes bypass flash.
//!
//! After a possible loss, destaged sectors become dirty again. hob has no copy of guests' changes
//! that bypassed flash and cannot repeat them, so every session gets one failed flush. Linux
//! reports writeback errors in the same way (`errseq_t`). hob remembers for each session the last
//! failure that was reported to the session. A flush that began before the end of the last possibly
//! lost change fails too. The failure of such a flush does not count as a report, because its error
//! says nothing about that change. If a guest disconnects before it receives the report, a later
//! session receives it. The failure of a flush whose client is disconnected does not count as a
//! report. A session that begins while another session has not received its report receives one
//! too. The two sessions may belong to the same guest, whose old connection hob still considers
//! open. hob passes on only the reports of sessions that changed data: if a client only read or
//! flushed, no later session receives its report. If a possible loss occurs while a change is in
//! flight, hob sends that change again before it acknowledges it. The cache invalidates its clean
//! copies of possibly lost changes, so reads return the backing's data.

use std::collections::BTreeMap;

use super::Engine;
use crate::command::Event;
use crate::io::IoError;
use crate::range_locks::Range;
use crate::regions::Regions;
use crate::units::{DiskId, Instant, RequestId, SECTOR_BYTES, SessionId};

/// Maximum number of ranges in the list of guests' changes that bypassed flash. Beyond that number,
/// hob stores only which regions of the disk changed.
const RANGES_MAX: usize = 1024;

/// Maximum number of unreported failures that hob remembers for guests whose sessions have ended.
const INHERITED_MAX: u32 = 64;

/// Maximum number of times that a change is sent to the backing again after a possible loss. After
/// that, the change fails.
pub(super) const RESENDS_MAX: u8 = 3;

/// Initial value of `writes`. This one write represents all changes that were made before the disk
/// was added. These changes are perhaps not durable either.
const WRITES_BEFORE: u64 = 1;

/// Durability of the data on one disk's backing, and the failures that were reported to guests.
pub(super) struct Backed {
    /// Size of the disk, bytes.
    pub(super) disk_bytes: u64,
    /// Number of completed writes to the backing.
    pub(super) writes: u64,
    /// Number of completed writes that a successful flush of the backing covers.
    pub(super) flushed: u64,
    /// Value of `writes` at the end of the latest guest change that bypassed flash.
    pub(super) bypassed: u64,
    /// Number of failed flushes of the backing, plus the number of losses that the backing
    /// reported.
    pub(super) doubts: u64,
    /// Number of events that must be reported to guests: failed flushes and losses that affected
    /// changes of guests, and discards of dirty data.
    failures: u64,
    /// Number of the `failures` that are not reported to the daemon's own sessions: discards of
    /// dirty data, and failures from before the disk was added.
    discards: u64,
    /// Value of `writes` at the last failed flush or reported loss.
    failed_upto: u64,
    /// Value of `bypassed` at the last failure that must be reported to guests.
    failed_bypassed: u64,
    /// Number of unreported failures of guests whose sessions have ended, at most
    /// [`INHERITED_MAX`]. Each is reported by the first flush of a session that began later, which
    /// is usually the same guest after a reconnect. A session that began after the failure, but
    /// before such a guest's session ended, also receives a report. If that session has not changed
    /// data, the failure remains in this number for a later session.
    inherited: u32,
    /// True if one inherited failure belongs to an unknown session, whose changes may be lost. That
    /// session may still be open.
    inherits_unknown: bool,
    /// For each session that ended with unflushed changes that bypassed flash, the value of
    /// `bypassed` at the end of the session. At most [`INHERITED_MAX`] entries.
    absent: Vec<u64>,
    /// The session that last changed data.
    last_changer: Option<SessionId>,
    /// For each session, the failures that were reported to it. A session without an entry has
    /// received no report.
    sessions: BTreeMap<SessionId, Told>,
    /// Ranges that guests changed on the backing, bypassing flash. `newer` has the changes since
    /// the flush in progress began, and `older` has the earlier changes.
    newer: Ranges,
    older: Ranges,
    older_upto: Option<u64>,
}

/// Failures that were reported to a session.
#[derive(Clone, Copy)]
struct Told {
    /// Number of failures that concerned the session when it last received a report or, without a
    /// report, when it began.
    failures: u64,
    /// True if a failure of an earlier session may be reported to this session.
    may_inherit: bool,
    /// True if a guest with an unreported failure was disconnected when this session began. A
    /// report to this session then counts as the report to that guest. Otherwise a report to this
    /// session counts only if the session has changed data. A session that only reads, such as a
    /// backup, is not the guest that reconnects.
    counts: bool,
    /// True if the session has changed data since it began.
    has_changed: bool,
    /// True if the client is disconnected. No client receives the replies to its requests in flight.
    has_left: bool,
}

/// A set of sectors of a disk: a list of ranges, or regions of the disk if the list is too long.
#[derive(Default)]
struct Ranges {
    list: Vec<(u64, u64)>,
    /// Regions of the disk, in place of a list that is too long.
    regions: Option<Box<Regions>>,
    is_everything: bool,
}

impl Ranges {
    fn is_empty(&self) -> bool {
        self.list.is_empty() && self.regions.is_none() && !self.is_everything
    }

    /// Returns the set of all sectors of a disk of any size.
    fn everything() -> Ranges {
        Ranges { is_everything: true, ..Ranges::default() }
    }

    fn insert(&mut self, first: u64, end: u64, disk_bytes: u64) {
        if self.is_everything {
            return;
        }
        if let Some(regions) = &mut self.regions {
            if regions.disk_bytes() < disk_bytes {
                **regions = regions.grown(disk_bytes);
            }
            return regions.insert(first, end);
        }
        match self.list.last_mut() {
            Some((_, before)) if *before == first => *before = end,
            Some(last) if last.0 <= first && end <= last.1 => {}
            _ => self.list.push((first, end)),
        }
        if self.list.len() > RANGES_MAX {
            let mut regions = Regions::new(disk_bytes);
            self.list.drain(..).for_each(|(first, end)| regions.insert(first, end));
            self.regions = Some(Box::new(regions));
        }
    }

    fn append(&mut self, other: Ranges, disk_bytes: u64) {
        self.is_everything |= other.is_everything;
        other.to_list(disk_bytes).into_iter().for_each(|(first, end)| self.insert(first, end, disk_bytes));
    }

    /// Returns the ranges as `first..end`, limited to a disk of `disk_bytes` bytes.
    fn to_list(&self, disk_bytes: u64) -> Vec<(u64, u64)> {
        let sectors = disk_bytes.div_ceil(SECTOR_BYTES);
        if self.is_everything {
            return vec![(0, sectors)];
        }
        let regions = self.regions.iter().flat_map(|regions| regions.ranges());
        self.list.iter().copied().chain(regions.map(|(first, end)| (first, end.min(sectors)))).collect()
    }
}

impl Backed {
    pub(super) fn new(disk_bytes: u64) -> Backed {
        Backed {
            disk_bytes,
            writes: WRITES_BEFORE,
            flushed: 0,
            bypassed: WRITES_BEFORE,
            doubts: 0,
            failures: 0,
            discards: 0,
            failed_upto: 0,
            failed_bypassed: 0,
            inherited: 0,
            inherits_unknown: false,
            absent: Vec::new(),
            last_changer: None,
            sessions: BTreeMap::new(),
            newer: Ranges::everything(),
            older: Ranges::default(),
            older_upto: None,
        }
    }

    /// Returns true if a guest's flush has to wait for a flush of the backing.
    pub(super) fn needs_flush(&self) -> bool {
        self.bypassed > self.flushed
    }

    /// Records the end of a guest's change on the backing. Sectors `first..end` need a flush. An
    /// empty range means that the change is already durable.
    pub(super) fn note_bypass(&mut self, first: u64, end: u64) {
        self.writes += 1;
        if first < end {
            self.bypassed = self.writes;
            self.newer.insert(first, end, self.disk_bytes);
        }
    }

    /// Records the reply to a guest's change that bypassed flash and ended earlier. A flush that began
    /// before this reply says nothing about the change, so its failure must not count as a report.
    pub(super) fn note_late_reply(&mut self) {
        if self.needs_flush() {
            self.writes += 1;
            self.bypassed = self.writes;
        }
    }

    /// Records the start of a backing flush. Returns the number of writes that the flush covers.
    pub(super) fn begin_flush(&mut self) -> u64 {
        if self.older_upto.is_none() {
            self.older = std::mem::take(&mut self.newer);
            self.older_upto = Some(self.writes);
        }
        self.writes
    }

    /// Records the success of a backing flush that covers `upto` writes. The caller has checked
    /// that since this flush began, no other flush has failed and no loss was reported.
    pub(super) fn end_flush(&mut self, upto: u64) {
        assert!(upto <= self.writes, "a flush covers writes that ended before it");
        self.flushed = self.flushed.max(upto);
        self.absent.retain(|mark| *mark > upto);
        if self.older_upto.is_some_and(|older| older <= upto) {
            (self.older, self.older_upto) = (Ranges::default(), None);
        }
    }

    /// Marks the writes since the last successful flush as possibly lost. Returns true if a loss
    /// must be reported to guests: some of their changes may be lost, and no earlier failure covers
    /// these changes.
    fn doubt(&mut self) -> bool {
        self.doubts += 1;
        // The writes stay in doubt until a later flush succeeds: the next loss may affect writes
        // that survived this loss.
        let newer = std::mem::take(&mut self.newer);
        self.newer = std::mem::take(&mut self.older);
        self.newer.append(newer, self.disk_bytes);
        self.older_upto = None;
        let is_new = self.bypassed > self.flushed.max(self.failed_upto);
        if is_new {
            self.failures += 1;
            self.failed_upto = self.writes;
            self.failed_bypassed = self.bypassed;
            let absent = std::mem::take(&mut self.absent).len() as u32;
            self.inherited = (self.inherited + absent).min(INHERITED_MAX);
            let mut guests = self.sessions.iter().filter(|(session, _)| !session.is_daemon());
            if absent == 0 && !guests.any(|(_, told)| told.has_changed) {
                self.inherits_unknown |= self.inherited == 0;
                self.inherited = self.inherited.max(1);
            }
        }
        is_new
    }

    /// Records that a session has changed data.
    pub(super) fn note_changer(&mut self, session: SessionId) {
        if self.last_changer == Some(session) {
            return;
        }
        if let Some(told) = self.sessions.get_mut(&session) {
            (told.has_changed, self.last_changer) = (true, Some(session));
        }
    }

    /// Records that hob discards dirty sectors. Later reads of these sectors return the data that
    /// the backing has, which may not be durable.
    pub(super) fn note_given_up(&mut self, sectors: impl Iterator<Item = u64>) {
        sectors.for_each(|sector| self.newer.insert(sector, sector + 1, self.disk_bytes));
    }

    /// Records the discard of acknowledged changes that only flash had. Current sessions get a
    /// report. Later sessions get no report, because they never relied on these changes. The older
    /// data that the backing has for the same ranges may not be durable.
    pub(super) fn give_up(&mut self) {
        self.failures += 1;
        self.discards += 1;
        self.failed_upto = self.writes;
        self.bypassed = self.writes;
        self.failed_bypassed = self.bypassed;
    }

    /// Returns true if a flush of the session must fail because of a failure that was not reported
    /// to the session. `bypassed` is the value of [`Backed::bypassed`] when the flush began. A
    /// flush that began before the end of the last possibly lost change does not count as a report.
    /// The change may be one of another session: a flush covers the changes of all sessions,
    /// because one guest may have several connections (NBD's `CAN_MULTI_CONN`).
    pub(super) fn tell(&mut self, session: SessionId, bypassed: u64) -> bool {
        if !self.owes(session) {
            return false;
        }
        if self.sessions.get(&session).is_some_and(|told| told.has_left) {
            return true;
        }
        let own = self.owes_own(session);
        if own && bypassed < self.failed_bypassed {
            return true;
        }
        let inherits = self.may_inherit(session);
        let counts = self.sessions.get(&session).is_some_and(|told| told.counts);
        let has_changed = self.has_changed(session);
        let failures = self.failures_for(session);
        let told = Told { failures, may_inherit: false, counts, has_changed, has_left: false };
        self.sessions.insert(session, told);
        let was_counted = inherits && (counts || has_changed) || self.inherits_unknown && !has_changed;
        if !session.is_daemon() && was_counted {
            self.inherited = self.inherited.saturating_sub(1);
            self.inherits_unknown &= self.inherited > 0 && !own;
        }
        true
    }

    fn owes(&self, session: SessionId) -> bool {
        self.owes_own(session) || self.may_inherit(session)
    }

    /// Returns true if the session began while other sessions, open or ended, had not received the
    /// report of a failure. The session may belong to a guest of one of these other sessions, so it
    /// receives one report.
    fn may_inherit(&self, session: SessionId) -> bool {
        self.sessions.get(&session).is_some_and(|told| told.may_inherit)
    }

    /// Returns true if a failure occurred during the session and was not reported to it.
    fn owes_own(&self, session: SessionId) -> bool {
        self.failures_for(session) > self.sessions.get(&session).map_or(0, |told| told.failures)
    }

    /// Returns the number of failures that concern a session.
    fn failures_for(&self, session: SessionId) -> u64 {
        if session.is_daemon() { self.failures - self.discards } else { self.failures }
    }

    fn begin_session(&mut self, session: SessionId) {
        // A session that still owes its guest a report may be an old connection of the guest that
        // begins this session. The guest would flush here, and never on the old connection.
        let may_inherit = !session.is_daemon() && self.owed_failures() > 0;
        let failures = self.failures_for(session);
        let counts = may_inherit && self.inherited > 0;
        let told = Told { failures, may_inherit, counts, has_changed: false, has_left: false };
        self.sessions.insert(session, told);
        self.last_changer = None;
    }

    fn leave_session(&mut self, session: SessionId) {
        if let Some(told) = self.sessions.get_mut(&session) {
            told.has_left = true;
        }
    }

    fn end_session(&mut self, session: SessionId) {
        let owed = self.owes_own(session);
        let Some(Told { has_changed: true, .. }) = self.sessions.remove(&session) else { return };
        if owed {
            self.inherited = (self.inherited + 1).min(INHERITED_MAX);
        } else if self.bypassed > self.flushed.max(self.failed_upto)
            && self.absent.len() < INHERITED_MAX as usize
        {
            self.absent.push(self.bypassed);
        }
    }

    fn has_changed(&self, session: SessionId) -> bool {
        self.sessions.get(&session).is_some_and(|told| told.has_changed)
    }

    /// Returns the number of guests that have acknowledged changes which exist only in the backing
    /// and which no flush covers. The result is at least one if there are such changes.
    pub(super) fn guests_at_risk(&self) -> u32 {
        if self.bypassed <= self.flushed.max(WRITES_BEFORE) {
            return 0;
        }
        let guests = self.sessions.iter().filter(|(session, told)| !session.is_daemon() && told.has_changed);
        (self.absent.len() + guests.count()).max(1) as u32
    }

    /// Returns the number of guests that changed data and have not received a report of a failure.
    pub(super) fn owed_failures(&self) -> u32 {
        let guests = self.sessions.iter().filter(|(session, told)| !session.is_daemon() && told.has_changed);
        self.inherited + guests.filter(|(session, _)| self.owes_own(**session)).count() as u32
    }
}

impl Engine {
    /// Begins a session (see [`RequestId::session`]) on a disk. If acknowledged changes may be lost
    /// later, a flush of the session fails. A flush of a guest's session also fails if another
    /// guest that changed data has not received the report of an earlier loss. The session of that
    /// other guest may be open or ended.
    pub fn begin_session(&mut self, disk: DiskId, session: SessionId) {
        if let Some(Some(disk)) = self.disks.get_mut(disk.0 as usize) {
            disk.backed.begin_session(session);
        }
    }

    /// Records that the client of a session is disconnected, while some of its requests may be in
    /// flight. If a flush among these requests fails, this does not count as a report, because no
    /// client receives the reply. The session ends when all of these requests have ended.
    pub fn leave_session(&mut self, disk: DiskId, session: SessionId) {
        if let Some(Some(disk)) = self.disks.get_mut(disk.0 as usize) {
            disk.backed.leave_session(session);
        }
    }

    /// Ends a session. A failure that was not reported to the session is kept for a later session.
    /// Does nothing while the disk is being removed: the last flush of the backing may fail too, and
    /// then the session counts in [`Event::FailuresOwed`].
    pub fn end_session(&mut self, disk: DiskId, session: SessionId) {
        let disk = self.disks.get_mut(disk.0 as usize).and_then(Option::as_mut);
        if let Some(disk) = disk.filter(|disk| disk.removing.is_none()) {
            disk.backed.end_session(session);
        }
    }

    /// Restores failures that were not reported to guests of a disk before the disk was added
    /// ([`Event::FailuresOwed`]).
    pub fn owe_failures(&mut self, disk: DiskId, count: u32) {
        if let Some(Some(disk)) = self.disks.get_mut(disk.0 as usize)
            && count > 0
        {
            disk.backed.failures += 1;
            // The daemon's own sessions began later and lost no data.
            disk.backed.discards += 1;
            disk.backed.inherited = count.min(INHERITED_MAX);
        }
    }

    /// Returns the number of guests of a disk that lose acknowledged changes if the backing loses
    /// its unflushed data now. Zero if hob still has all of these changes on flash. `None` for a
    /// removed disk, whose last flush may have failed.
    pub fn guests_at_risk(&self, disk: DiskId) -> Option<u32> {
        let disk = self.disks.get(disk.0 as usize).and_then(Option::as_ref);
        disk.map(|disk| disk.backed.guests_at_risk())
    }

    /// Returns the number of guests that changed data of a disk and have not received a report that
    /// acknowledged changes may be lost. Zero for a disk that does not exist.
    pub fn failures_owed(&self, disk: DiskId) -> u32 {
        let disk = self.disks.get(disk.0 as usize).and_then(Option::as_ref);
        disk.map_or(0, |disk| disk.backed.owed_failures())
    }

    /// Returns true if the session's next flush will fail because acknowledged changes of the disk
    /// may be lost.
    pub fn owes_failure(&self, disk: DiskId, session: SessionId) -> bool {
        let disk = self.disks.get(disk.0 as usize).and_then(Option::as_ref);
        disk.is_some_and(|disk| disk.backed.owes(session))
    }

    /// Handles a loss that the backing reported: acknowledged writes that no successful flush
    /// covers may be missing. Call this function before the completions that storage reports after
    /// the loss.
    pub fn handle_loss(&mut self, now: Instant, disk: DiskId) {
        if self.disks.get(disk.0 as usize).is_some_and(Option::is_some) {
            self.doubt(now, disk);
            self.run(now);
        }
    }

    /// Handles a failed flush of the backing, or a loss that the backing reported.
    pub(super) fn doubt(&mut self, now: Instant, id: DiskId) {
        let disk = self.disk_mut(id);
        let destaged = disk.destager.take_moved();
        let is_new = disk.backed.doubt();
        if !disk.backed.newer.is_empty() {
            // The reader of a dirty bitmap may have read the lost data.
            disk.note_everything();
        }
        for sector in destaged {
            self.put_back(id, Range { disk: id, first: sector, end: sector + 1 });
        }
        self.forget_changes(now, id);
        if is_new {
            self.event_out.push_back(Event::WritesInDoubt(id));
            self.report_owed(id);
        }
        self.wake(id);
    }

    /// Reports to the daemon how many guests have not received a report of a failure. The daemon
    /// stores the number.
    pub(super) fn report_owed(&mut self, id: DiskId) {
        let backed = &self.disk(id).backed;
        if backed.failures > 0 {
            let count = backed.owed_failures();
            self.event_out.push_back(Event::FailuresOwed { disk: id, count });
        }
    }

    /// Invalidates the clean cached copies of changes that the backing may have lost. A read in
    /// progress may still return a cached copy, as if the read had ended before the loss. Neither
    /// memory nor flash keeps the data of such a read.
    fn forget_changes(&mut self, now: Instant, id: DiskId) {
        let disk = self.disk_mut(id);
        let list = disk.backed.newer.to_list(disk.config.size_bytes);
        if let Some(opening) = &mut disk.opening {
            opening.forget_if_abandoned(&list);
        }
        for (first, end) in list {
            if let Some(memory) = &mut self.disk_mut(id).memory {
                memory.invalidate(first, end);
            }
            self.drop_clean(now, id, first, end);
        }
    }

    /// Returns true if no flush failed and no loss was reported since the request's flush or change
    /// of the backing began.
    pub(super) fn is_believed(&self, slot: u32) -> bool {
        let active = &self.requests[slot];
        active.doubts == self.disk(active.request.disk).backed.doubts
    }

    /// Sends a change to the backing again, because the first write may be lost. The backing may
    /// have lost part of the change, or part of the dirty data that the change covers partly.
    pub(super) fn change_again(&mut self, now: Instant, slot: u32) {
        if self.end_answered(slot) {
            return;
        }
        let range = self.requests[slot].range;
        if self.requests[slot].resends == RESENDS_MAX {
            return self.end_change(now, slot, Err(IoError::Failed));
        }
        self.requests[slot].resends += 1;
        self.forget_edges(slot);
        self.put_back(range.disk, range);
        self.runnable.push_back(slot);
    }
}

impl RequestId {
    /// Returns the session that sent the request: the high 32 bits of the id. A session is a
    /// connection, a file, a vhost-user device, or the daemon itself.
    pub fn session(self) -> SessionId {
        SessionId((self.0 >> 32) as u32)
    }
}

impl SessionId {
    /// Bit that is set in sessions of the daemon itself. A report to such a session does not count
    /// as a report to a guest.
    pub const DAEMON_BIT: u32 = 1 << 29;

    fn is_daemon(self) -> bool {
        self.0 & SessionId::DAEMON_BIT != 0
    }
}
