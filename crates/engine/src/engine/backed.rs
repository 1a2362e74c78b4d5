//! What a disk's backing holds durably, and who was told of acknowledged changes that it may have lost.
//!
//! # Storage contract
//! A flush that fails tells that any subset of the writes since the last successful flush may be lost, and the
//! error may have been delivered only once. A later flush that succeeds says nothing about them. (`fsync` on Linux;
//! Rebello et al., "Can Applications Recover from fsync Failures?", USENIX ATC 2020.) The same holds for a backing
//! that reports a restart. Each such moment is a *doubt*.
//!
//! # Invariant
//! - A dirty sector becomes clean only after a backing flush that began after its write ended, and succeeded, with no
//!   doubt since that write was sent. Until then the journal calls it dirty.
//! - A guest's flush succeeds only if each change acknowledged before is durable on flash, or was covered by such a
//!   flush, or its loss was reported to this session before.
//!
//! A doubt makes destaged sectors dirty again. Changes of guests that bypassed flash cannot be repeated, so every session
//! gets one failed flush, as with Linux's `errseq_t`: each session remembers the last failure that it was told of, and
//! a session that begins later hears of one that no guest was told of. A change in flight at a doubt is sent again before it
//! is acknowledged. The cache forgets its clean copies of the changes in doubt: reads show what the backing has.

use std::collections::BTreeMap;

use super::Engine;
use crate::command::Event;
use crate::io::IoError;
use crate::range_locks::Range;
use crate::units::{DiskId, Instant, RequestId, SessionId};

/// Ranges of changes that are remembered one by one; with more of them, the whole disk counts as changed.
const RANGES_MAX: usize = 1024;

/// Most failures that are kept for guests without a session.
const INHERITED_MAX: u32 = 64;

/// A change is sent again after so many doubts; then it fails.
pub(super) const RESENDS_MAX: u8 = 3;

/// See the module's text.
pub(super) struct Backed {
    /// Writes to the backing that ended.
    pub(super) writes: u64,
    /// How many of them a successful flush covers.
    pub(super) flushed: u64,
    /// The value of `writes` at the end of the last change of a guest that bypassed flash.
    pub(super) bypassed: u64,
    /// Failed flushes of the backing, and losses that it reported.
    pub(super) doubts: u64,
    /// Those of them that put changes of guests in doubt, and discards.
    failures: u64,
    /// How many of these are discards of dirty data, which the daemon knows of.
    discards: u64,
    /// The value of `writes` at the last of these.
    failed_upto: u64,
    /// Failures owed to guests whose sessions have ended, at most [`INHERITED_MAX`]. Each goes to the first flush of a session that began
    /// afterwards: usually the same guest, connected again.
    inherited: u32,
    /// What each session was told. Sessions that are not here were told of nothing.
    sessions: BTreeMap<SessionId, Told>,
    /// Where guests changed the backing, past flash, since a flush that is under way began, with its mark; and before that.
    newer: Ranges,
    older: Ranges,
    older_upto: Option<u64>,
}

/// What a session was told.
#[derive(Clone, Copy)]
struct Told {
    /// The last failure.
    failures: u64,
    /// It may be told of a failure that another session was not told of.
    may_inherit: bool,
}

/// Sectors of a disk.
#[derive(Default)]
struct Ranges {
    list: Vec<(u64, u64)>,
    is_everything: bool,
}

impl Ranges {
    fn is_empty(&self) -> bool {
        self.list.is_empty() && !self.is_everything
    }

    fn insert(&mut self, first: u64, end: u64) {
        let has_room = self.list.len() < RANGES_MAX;
        match self.list.last_mut() {
            _ if self.is_everything => {}
            Some((_, before)) if *before == first => *before = end,
            Some(last) if last.0 <= first && end <= last.1 => {}
            _ if has_room => self.list.push((first, end)),
            _ => *self = Ranges { list: Vec::new(), is_everything: true },
        }
    }

    fn append(&mut self, other: Ranges) {
        self.is_everything |= other.is_everything;
        other.list.into_iter().for_each(|(first, end)| self.insert(first, end));
    }
}

impl Backed {
    pub(super) fn new() -> Backed {
        Backed {
            // Changes made before the engine had the disk may not be durable either.
            writes: 1,
            flushed: 0,
            bypassed: 1,
            doubts: 0,
            failures: 0,
            discards: 0,
            failed_upto: 0,
            inherited: 0,
            sessions: BTreeMap::new(),
            newer: Ranges { list: Vec::new(), is_everything: true },
            older: Ranges::default(),
            older_upto: None,
        }
    }

    /// Does a guest's flush have to wait for the backing?
    pub(super) fn needs_flush(&self) -> bool {
        self.bypassed > self.flushed
    }

    /// A change of a guest ended on the backing. Sectors `first..end` need a flush; an empty range is durable already.
    pub(super) fn note_bypass(&mut self, first: u64, end: u64) {
        self.writes += 1;
        if first < end {
            self.bypassed = self.writes;
            self.newer.insert(first, end);
        }
    }

    /// A flush of the backing begins. Returns the count of writes that it covers.
    pub(super) fn begin_flush(&mut self) -> u64 {
        if self.older_upto.is_none() {
            self.older = std::mem::take(&mut self.newer);
            self.older_upto = Some(self.writes);
        }
        self.writes
    }

    /// A flush that covers `upto` writes succeeded, and there was no doubt since it began.
    pub(super) fn end_flush(&mut self, upto: u64) {
        assert!(upto <= self.writes, "a flush covers writes that ended before it");
        self.flushed = self.flushed.max(upto);
        if self.older_upto.is_some_and(|older| older <= upto) {
            (self.older, self.older_upto) = (Ranges::default(), None);
        }
    }

    /// Writes since the last successful flush are in doubt. Guests are to be told if there are changes of theirs among them that no
    /// earlier doubt concerned.
    fn doubt(&mut self) -> bool {
        self.doubts += 1;
        // They stay in doubt until a flush that begins from now on succeeds: the next doubt may take what this one left.
        let newer = std::mem::take(&mut self.newer);
        self.newer = std::mem::take(&mut self.older);
        self.newer.append(newer);
        self.older_upto = None;
        let is_new = self.bypassed > self.flushed.max(self.failed_upto);
        if is_new {
            self.failures += 1;
            self.failed_upto = self.writes;
            if self.sessions.keys().all(|session| session.is_daemon()) {
                self.inherited = self.inherited.max(1);
            }
        }
        is_new
    }

    /// Acknowledged changes that only flash had are given up. The sessions that there are now are told; those that begin later never
    /// counted on them. What the backing had of them before is not durable there.
    pub(super) fn give_up(&mut self) {
        self.failures += 1;
        self.discards += 1;
        self.failed_upto = self.writes;
        self.bypassed = self.writes;
    }

    /// Is there a failure that a session was not told of? It is told now.
    pub(super) fn tell(&mut self, session: SessionId) -> bool {
        if !self.owes(session) {
            return false;
        }
        let own = self.owes_own(session);
        let told = Told { failures: self.failures_for(session), may_inherit: false };
        let began = self.sessions.insert(session, told).is_some();
        // A session that never began is one of those that were counted when there was none.
        if !session.is_daemon() && (!own || !began) {
            self.inherited = self.inherited.saturating_sub(1);
        }
        true
    }

    fn owes(&self, session: SessionId) -> bool {
        let may_inherit = self.sessions.get(&session).is_some_and(|told| told.may_inherit);
        self.owes_own(session) || may_inherit && self.inherited > 0
    }

    /// Did a failure occur during a session that it was not told of?
    fn owes_own(&self, session: SessionId) -> bool {
        self.failures_for(session) > self.sessions.get(&session).map_or(0, |told| told.failures)
    }

    /// Failures that concern a session.
    fn failures_for(&self, session: SessionId) -> u64 {
        if session.is_daemon() { self.failures - self.discards } else { self.failures }
    }

    fn begin_session(&mut self, session: SessionId) {
        let may_inherit = !session.is_daemon() && self.inherited > 0;
        self.sessions.insert(session, Told { failures: self.failures_for(session), may_inherit });
    }

    fn end_session(&mut self, session: SessionId) {
        let owed = self.owes_own(session);
        if self.sessions.remove(&session).is_some() && owed {
            self.inherited = (self.inherited + 1).min(INHERITED_MAX);
        }
    }

    /// Number of guests that have not been told of a failure.
    pub(super) fn owed_failures(&self) -> u32 {
        let guests = self.sessions.keys().filter(|session| !session.is_daemon());
        self.inherited + guests.filter(|session| self.owes_own(**session)).count() as u32
    }
}

impl Engine {
    /// A session, see [`RequestId::session`], begins to use a disk. Its flushes report the losses of acknowledged changes from
    /// now on, and an earlier one that a guest without a session was not told of.
    pub fn begin_session(&mut self, disk: DiskId, session: SessionId) {
        if let Some(Some(disk)) = self.disks.get_mut(disk.0 as usize) {
            disk.backed.begin_session(session);
        }
    }

    /// A session ended. What it was not told of is kept for a session that begins later. Sessions that end because their disk is
    /// removed stay: the last flush of the backing may fail too, see [`Event::FailuresOwed`].
    pub fn end_session(&mut self, disk: DiskId, session: SessionId) {
        let disk = self.disks.get_mut(disk.0 as usize).and_then(Option::as_mut);
        if let Some(disk) = disk.filter(|disk| disk.removing.is_none()) {
            disk.backed.end_session(session);
        }
    }

    /// Takes over failures that guests of a disk were not told of before it was added ([`Event::FailuresOwed`]).
    pub fn owe_failures(&mut self, disk: DiskId, count: u32) {
        if let Some(Some(disk)) = self.disks.get_mut(disk.0 as usize)
            && count > 0
        {
            disk.backed.failures += 1;
            disk.backed.inherited = count.min(INHERITED_MAX);
        }
    }

    /// Will the next flush of a session fail because acknowledged changes of the disk may be lost?
    pub fn owes_failure(&self, disk: DiskId, session: SessionId) -> bool {
        let disk = self.disks.get(disk.0 as usize).and_then(Option::as_ref);
        disk.is_some_and(|disk| disk.backed.owes(session))
    }

    /// The backing may have lost acknowledged writes that no successful flush covers. To be called before the
    /// completions that storage reports afterwards.
    pub fn handle_loss(&mut self, now: Instant, disk: DiskId) {
        if self.disks.get(disk.0 as usize).is_some_and(Option::is_some) {
            self.doubt(now, disk);
            self.run(now);
        }
    }

    /// A flush of the backing failed, or it reported a loss.
    pub(super) fn doubt(&mut self, now: Instant, id: DiskId) {
        let disk = self.disk_mut(id);
        let destaged = disk.destager.take_moved();
        let is_new = disk.backed.doubt();
        if !disk.backed.newer.is_empty() {
            // A reader of a bitmap may have seen what is lost.
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

    /// Reports how many guests have not been told of a failure. The daemon keeps the number over a crash.
    pub(super) fn report_owed(&mut self, id: DiskId) {
        let backed = &self.disk(id).backed;
        if backed.failures > 0 {
            let count = backed.owed_failures();
            self.event_out.push_back(Event::FailuresOwed { disk: id, count });
        }
    }

    /// Forgets the clean copies of the changes in doubt. Reads of them that are under way find their checksums gone, and ask the backing.
    fn forget_changes(&mut self, now: Instant, id: DiskId) {
        let disk = self.disk_mut(id);
        let sectors = disk.config.size_bytes.div_ceil(crate::units::SECTOR_BYTES);
        let ranges = &disk.backed.newer;
        let list = if ranges.is_everything { vec![(0, sectors)] } else { ranges.list.clone() };
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

    /// Is the success of a request's flush or change of the backing believed? Not if there was a doubt since it began.
    pub(super) fn is_believed(&self, slot: u32) -> bool {
        let active = &self.requests[slot];
        active.doubts == self.disk(active.request.disk).backed.doubts
    }

    /// Begins a change anew after a doubt: the backing may have lost a part of it, or the dirty data that it covers in part.
    pub(super) fn change_again(&mut self, now: Instant, slot: u32) {
        let range = self.requests[slot].range;
        if self.requests[slot].resends == RESENDS_MAX {
            return self.end_change(now, slot, Err(IoError::Failed));
        }
        self.requests[slot].resends += 1;
        self.requests[slot].forget_edges();
        self.put_back(range.disk, range);
        self.runnable.push_back(slot);
    }
}

impl RequestId {
    /// The session that asked: its high 32 bits. A connection, a file, a guest's device, or the daemon itself.
    pub fn session(self) -> SessionId {
        SessionId((self.0 >> 32) as u32)
    }
}

impl SessionId {
    /// Set in sessions of the daemon itself: telling them of a failure tells no guest.
    pub const DAEMON_BIT: u32 = 1 << 29;

    fn is_daemon(self) -> bool {
        self.0 & SessionId::DAEMON_BIT != 0
    }
}
