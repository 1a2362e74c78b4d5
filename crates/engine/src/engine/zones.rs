//! Zones of the disk and their bypass marks.
//!
//! Before a change of a zone bypasses the cache, hob sets the zone's bypass mark in the journal.
//! The mark stays until the change is durable on the backing. After a crash, recovery uses no clean
//! cached data of zones with a mark. Reads of these zones then get the backing's data, whether or
//! not the backing lost a part of the changes (docs/decisions/0006-write-back.md).

use std::collections::BTreeSet;

use super::bulk::Bulk;
use super::disk::Disk;
use super::{Active, Engine, Phase};
use crate::io::{Durability, IoError, Op};
use crate::journal::Writer;
use crate::range_locks::Range;
use crate::units::{DiskId, Instant, SECTOR_BYTES};

/// Time without writes after which a zone's bypass mark is removed, nanoseconds.
const ZONE_QUIET_NS: u64 = 5_000_000_000;

impl Disk {
    /// Sets the bypass marks of zones whose data on the backing may not be durable yet.
    /// [`Engine::pump_zones`] removes these marks after a flush.
    pub(super) fn mark_unflushed(&mut self, now: Instant, zones: &BTreeSet<usize>) {
        let Some(journal) = self.journal.as_mut().filter(|journal| !journal.dead) else { return };
        for zone in zones {
            journal.mark(*zone);
            let (_, writes, since) = self.zones.entry(*zone).or_default();
            (*writes, *since) = (self.backed.writes, now);
        }
        if !zones.is_empty() {
            self.zones_due.get_or_insert(now + ZONE_QUIET_NS);
        }
    }
}

impl Engine {
    /// Counts the request as a writer of its zones, and sets the bypass marks that these zones
    /// lack. Returns true if bypass marks, of these or other zones, are not durable yet. The caller
    /// must then commit the journal before it sends the write to the backing. A lost journal gets
    /// no marks and needs no commit.
    ///
    /// Invariant: while the backing has a change that it may lose, recovery uses no clean data of
    /// the changed sectors. Either the bypass mark is durable, or the journal has no such data.
    /// Having no such data means that the sectors are neither in the index nor in any state of the
    /// journal that a crash may leave. No fill records the sectors before the mark is durable. If
    /// the journal has no such data, the change does not wait for a commit, which may need a device
    /// that does not answer.
    pub(super) fn mark_zones(&mut self, now: Instant, slot: u32) -> bool {
        let Active { request, range, .. } = self.requests[slot];
        self.record_gone(now, request.disk);
        let zones = self.zones_of(slot);
        let disk = self.disk_mut(request.disk);
        let journal = disk.journal.as_mut().expect("the cache is persistent");
        let mut new = false;
        for zone in zones {
            disk.zones.entry(zone).or_default().0 += 1;
            if !journal.dead && !journal.writer.is_marked(zone) {
                journal.mark(zone);
                new = true;
            }
        }
        // A mark that another request has just set may not be durable yet either.
        let waits = new || !journal.dead && journal.marks_pending();
        self.requests[slot].zoned = true;
        if !waits || self.journal_may_have(range) || !self.commits_stall(request.disk) {
            return waits;
        }
        let journal = self.journal_mut(request.disk).expect("the cache is persistent");
        journal.has_unawaited_marks = true;
        journal.ask();
        self.wake(request.disk);
        false
    }

    /// Returns true if recovery after a crash now might use data of these sectors from the journal:
    /// the cache has these sectors, or the record that the cache dropped them is not durable.
    fn journal_may_have(&self, range: Range) -> bool {
        let disk = self.disk(range.disk);
        let (Some(cache), Some(journal)) = (&disk.cache, &disk.journal) else { return true };
        let has = |sector| cache.index.is_valid(sector) || cache.index.is_held(sector);
        !journal.writer.exists()
            || cache.spans(range.first, range.end).any(|span| {
                let mut found = cache.find(span).into_iter().flat_map(|first| first..first + span.count);
                journal.writer.has_undurable_drop(span.block) || found.any(has)
            })
    }

    /// Returns true if a device that a commit of the disk's journal may need does not answer.
    fn commits_stall(&mut self, id: DiskId) -> bool {
        let Engine { disks, devices, .. } = self;
        let disk = disks[id.0 as usize].as_ref().expect("disks outlive their requests");
        let of_ring = disk.journal.iter().flat_map(|journal| journal.segments());
        let of_data = disk.cache.iter().flat_map(|cache| cache.segments.iter().map(|segment| segment.place));
        of_ring.chain(of_data).any(|segment| devices.get(segment.device).is_stalled())
    }

    /// Restarts waiting changes that may go to the backing without a commit of the journal, while a
    /// device delays these commits.
    pub(super) fn retry_unneeded_commits(&mut self, id: DiskId) {
        if !self.commits_stall(id) {
            return;
        }
        let Some(journal) = &self.disk(id).journal else { return };
        let in_round = journal.round.iter().flat_map(|round| &round.waiters);
        let goes = |slot: &&u32| {
            let active = &self.requests[**slot];
            // An acknowledged discard that starts again would be abandoned.
            let waits = active.phase == Phase::CommitThenThrough && !active.is_answered;
            waits && !self.journal_may_have(active.range)
        };
        let again: Vec<u32> = journal.waiting.iter().chain(in_round).filter(goes).copied().collect();
        let journal = self.journal_mut(id).expect("just seen");
        journal.waiting.retain(|slot| !again.contains(slot));
        if let Some(round) = &mut journal.round {
            round.waiters.retain(|slot| !again.contains(slot));
        }
        for slot in again {
            self.leave_zones(slot);
            self.runnable.push_back(slot);
        }
    }

    /// Stops counting the request as a writer of its zones, because it sent no write to the
    /// backing.
    pub(super) fn leave_zones(&mut self, slot: u32) {
        self.requests[slot].zoned = false;
        let (zones, disk) = (self.zones_of(slot), self.requests[slot].request.disk);
        let disk = self.disk_mut(disk);
        for zone in zones {
            disk.zones.get_mut(&zone).expect("the zone was counted before").0 -= 1;
        }
    }

    fn zones_of(&self, slot: u32) -> std::ops::RangeInclusive<usize> {
        let Active { request, range, .. } = &self.requests[slot];
        let size = self.disk(request.disk).config.size_bytes;
        let zone = |sector: u64| Writer::zone_of(size, sector * SECTOR_BYTES);
        zone(range.first)..=zone(range.end - 1)
    }

    /// Handles the end of a change of the backing, with success or an error.
    pub(super) fn backing_changed(&mut self, now: Instant, slot: u32, result: Result<(), IoError>) {
        let Active { request, range, zoned, bulk, .. } = self.requests[slot];
        let needs_flush = match result {
            Ok(()) => request.op != Op::Write(Durability::Durable),
            // A failed bulk write is written to flash instead.
            Err(_) => bulk != Bulk::Sent,
        };
        let disk = self.disk_mut(request.disk);
        disk.backed.note_bypass(range.first, if needs_flush { range.end } else { range.first });
        if !zoned {
            return;
        }
        self.requests[slot].zoned = false;
        let zones = self.zones_of(slot);
        let disk = self.disk_mut(request.disk);
        for zone in zones {
            let (in_flight, writes, since) = disk.zones.get_mut(&zone).expect("the zone was counted before");
            *in_flight -= 1;
            (*writes, *since) = (disk.backed.writes, now);
        }
        disk.zones_due.get_or_insert(now + ZONE_QUIET_NS);
    }

    /// Removes the bypass marks of zones that had no recent writes and whose data is durable on the
    /// backing.
    pub(super) fn pump_zones(&mut self, now: Instant, id: DiskId) {
        let disk = self.disk_mut(id);
        if disk.holds || disk.zones_due.is_none_or(|due| due > now) {
            return;
        }
        let Some(journal) = &mut disk.journal else { return };
        let flushed = disk.backed.flushed;
        let mut unflushed = false;
        disk.zones.retain(|zone, (in_flight, writes, since)| {
            let quiet = *in_flight == 0 && now - *since >= ZONE_QUIET_NS;
            unflushed |= quiet && *writes > flushed;
            let done = quiet && *writes <= flushed;
            if done {
                journal.writer.unmark(*zone);
            }
            !done
        });
        disk.zones_due = (!disk.zones.is_empty()).then(|| now + ZONE_QUIET_NS);
        if unflushed && !disk.destager.is_flushing() && self.flush_backing(now, id) {
            self.disk_mut(id).destager.begin_flush();
        }
    }
}
