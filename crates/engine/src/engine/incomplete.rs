//! Dirty sectors of which flash has only some 512-byte units (docs/decisions/0072).
//!
//! A write that covers a sector partly, and finds it neither in memory nor on flash, does not wait
//! for the backing: flash takes what the guest wrote. Further writes add units. The journal records
//! which units are there (`index/parts.rs`).
//!
//! | event | an incomplete sector |
//! |---|---|
//! | a write to flash | has the units of both, and may be complete then |
//! | a read | waits until the sector is destaged, then reads the backing |
//! | a change that goes to the backing | is destaged first, as other partly covered dirty sectors |
//! | destaging | its units are written to the backing; after a flush it leaves the cache |
//!
//! So no read is ever answered from an incomplete sector. A read that waits fails if the sector
//! cannot be destaged.

use super::disk::Disk;
use super::partial::Edge;
use super::records::Journal;
use super::{Active, Engine, Phase};
use crate::command::Copies;
use crate::index::Index;
use crate::index::parts::{ALL_UNITS, PARTS_MAX, UNIT_BYTES, unit_runs};
use crate::io::{IoError, Op};
use crate::outcome::Outcome;
use crate::range_locks::{Kind, Range};
use crate::units::{BlockNo, DiskId, Instant, SECTOR_BYTES};

/// A read that waits until the incomplete sectors of its range are destaged. It has no range lock.
#[derive(Clone, Copy, Debug)]
pub(super) struct PartWaiter {
    slot: u32,
    range: Range,
}

impl Active {
    /// Returns the units of one of its sectors that a change covers completely.
    pub(super) fn written_units(&self, sector: u64) -> u8 {
        let start = sector * SECTOR_BYTES;
        let from = self.request.offset.saturating_sub(start).div_ceil(UNIT_BYTES);
        let end = (self.request.offset + self.request.len - start).min(SECTOR_BYTES) / UNIT_BYTES;
        (from..end).fold(0, |units, unit| units | 1 << unit)
    }

    /// Returns true if a change consists of whole units.
    fn has_whole_units(&self) -> bool {
        (self.request.offset | self.request.len).is_multiple_of(UNIT_BYTES)
    }

    /// Returns the units of a disk's sector that a write to flash delivers.
    fn delivered_units(&self, sector: u64) -> u8 {
        let found = self.edges_by_sector().find(|(edge, _)| *edge == sector);
        match found {
            Some((_, Edge::Units(units))) => units,
            _ => ALL_UNITS,
        }
    }

    /// Returns the number of sectors that a write leaves incomplete.
    pub(super) fn parts(&self) -> u32 {
        self.edges_by_sector().filter(|(_, edge)| matches!(edge, Edge::Units(_))).count() as u32
    }

    /// Forgets units that only flash can take, before the change goes to the backing.
    pub(super) fn forget_units(&mut self) {
        for edge in [&mut self.edges.head, &mut self.edges.tail] {
            if matches!(edge, Edge::Units(_)) {
                *edge = Edge::Unread;
            }
        }
    }
}

impl Disk {
    /// Returns the number of incomplete sectors, including those of writes in progress.
    fn incomplete_sectors(&self) -> u32 {
        let there = self.cache.as_ref().map_or(0, |cache| cache.index.parts_count() as u32);
        there + self.parts_in_flight
    }

    /// Returns the first incomplete sector of this range.
    #[inline]
    pub(super) fn part_in(&self, range: Range) -> Option<u64> {
        self.cache.as_ref()?.index.part_in(range.first, range.end)
    }

    /// Returns true if reads wait for incomplete sectors, or the cache has many of them. They are then
    /// destaged before other data.
    pub(super) fn wants_parts_gone(&self) -> bool {
        !self.part_waiters.is_empty() || self.incomplete_sectors() as usize > PARTS_MAX / 2
    }

    /// Returns a block with an incomplete sector that is to be destaged before other data.
    pub(super) fn next_part(&self) -> Option<BlockNo> {
        let cache = self.cache.as_ref().filter(|_| self.wants_parts_gone())?;
        let awaited = self.part_waiters.iter().map(|waiter| (waiter.range.first, waiter.range.end));
        let of = |(mut at, end): (u64, u64)| {
            std::iter::from_fn(move || {
                let part = cache.index.part_in(at, end)?;
                at = part + 1;
                Some(BlockNo((part >> cache.block_shift()) as u32))
            })
        };
        awaited.chain([(0, u64::MAX)]).flat_map(of).find(|block| self.destager.is_to_do(*block))
    }
}

impl Engine {
    fn incomplete_sectors_max(&self) -> u32 {
        self.limits.incomplete_sectors_max.min(PARTS_MAX as u32)
    }

    pub(super) fn is_incomplete(&self, range: Range) -> bool {
        self.disk(range.disk).part_in(range).is_some()
    }

    /// Returns the units that flash has of one sector, of which it has some.
    pub(super) fn units_on_flash(&self, sector: Range) -> u8 {
        let cache = self.disk(sector.disk).cache.as_ref();
        let found = cache.and_then(|cache| {
            let span = cache.spans(sector.first, sector.end).next()?;
            Some(cache.index.units(cache.find(span)?))
        });
        found.unwrap_or(ALL_UNITS)
    }

    /// Returns true if a write must not be merged with an incomplete sector, because it covers a unit
    /// partly.
    pub(super) fn splits_units(&self, slot: u32) -> bool {
        let active = &self.requests[slot];
        let disk = active.range.disk;
        let is_part = |first| self.is_incomplete(Range { disk, first, end: first + 1 });
        !active.has_whole_units() && active.edges_by_sector().any(|(sector, _)| is_part(sector))
    }

    /// Lets flash take the partly covered sectors that neither memory nor flash has without their
    /// other bytes, if the cache may have more incomplete sectors.
    pub(super) fn leave_edges_incomplete(&mut self, slot: u32) {
        self.merge_recent_edges(slot);
        let active = &self.requests[slot];
        let id = active.range.disk;
        let disk = self.disk(id);
        if !active.has_whole_units() || disk.incomplete_sectors() + 2 > self.incomplete_sectors_max() {
            return;
        }
        let is_missing = |(sector, edge): &(u64, Edge)| {
            let part = Range { disk: id, first: *sector, end: sector + 1 };
            *edge == Edge::Unread && !self.is_in_flash(part)
        };
        let missing: Vec<u64> =
            active.edges_by_sector().filter(is_missing).map(|(sector, _)| sector).collect();
        let active = &mut self.requests[slot];
        for sector in missing {
            let edge = Edge::Units(active.written_units(sector));
            let (head, tail) = active.partial_edges();
            if head && sector == active.range.first {
                active.edges.head = edge;
            }
            if tail && sector + 1 == active.range.end {
                active.edges.tail = edge;
            }
        }
    }

    /// Counts the incomplete sectors of a write to flash. Returns false if there would be too many;
    /// the write then reads these sectors from the backing.
    pub(super) fn begin_parts(&mut self, slot: u32) -> bool {
        let (parts, most) = (self.requests[slot].parts(), self.incomplete_sectors_max());
        let disk = self.disk_mut(self.requests[slot].range.disk);
        let has_room = parts == 0 || disk.incomplete_sectors() + parts <= most;
        match has_room {
            true => disk.parts_in_flight += parts,
            false => self.requests[slot].forget_units(),
        }
        has_room
    }

    /// Returns the byte ranges that a transfer of dirty sectors writes to the backing, up to byte `end`
    /// of the disk: the units of an incomplete sector, or all bytes.
    pub(super) fn bytes_to_destage(&self, range: Range, end: u64) -> Vec<(u64, u64)> {
        let start = range.first * SECTOR_BYTES;
        if !self.is_incomplete(range) {
            return vec![(start, end)];
        }
        let parts = unit_runs(self.units_on_flash(range));
        parts.map(|part| (start + part.start, start + part.end)).collect()
    }

    /// Makes a read wait, without its range lock, until the incomplete sectors of its range are
    /// destaged. Fails the read if that is in vain.
    pub(super) fn wait_for_parts(&mut self, now: Instant, slot: u32) {
        let Active { request, range, failed, .. } = self.requests[slot];
        let disk = self.disk(request.disk);
        let is_lost = disk.cache.as_ref().is_some_and(|cache| {
            let part = |sector| cache.spans(sector, sector + 1).find_map(|span| cache.find(span));
            let mut parts = (range.first..range.end).filter(|at| cache.index.part_in(*at, at + 1).is_some());
            parts.any(|at| part(at).is_some_and(|sector| disk.lost.contains(&sector)))
        });
        let error = match (disk.removing.is_some(), is_lost, failed) {
            (true, ..) => Some((Outcome::Refused, IoError::ShuttingDown)),
            (_, true, _) => Some((Outcome::DirtyLost, IoError::Failed)),
            (.., true) => Some((Outcome::BackingError, IoError::Failed)),
            _ => None,
        };
        let is_hint = matches!(request.op, Op::Prefetch | Op::Pull);
        let error = error.or(self.is_cached_only(slot).then_some((Outcome::PartialMiss, IoError::NotCached)));
        if is_hint || error.is_some() {
            let (outcome, error) = error.unwrap_or((Outcome::PartialMiss, IoError::Failed));
            self.requests[slot].outcome = outcome;
            self.reply(now, slot, if is_hint { Ok(()) } else { Err(error) });
            return self.finish(slot);
        }
        self.requests[slot].phase = Phase::Waiting;
        let runnable = &mut self.runnable;
        self.range_locks.leave(slot, |granted| runnable.push_back(granted));
        self.disk_mut(request.disk).part_waiters.push(PartWaiter { slot, range });
        self.wake(request.disk);
    }

    /// Resumes reads that waited for incomplete sectors: those whose ranges have none any more, or
    /// all. With `failed`, they fail if their ranges still have incomplete sectors.
    pub(super) fn resume_part_waiters(&mut self, id: DiskId, all: bool, failed: bool) {
        let disk = self.disk_mut(id);
        if disk.part_waiters.is_empty() {
            return;
        }
        let waiters = std::mem::take(&mut disk.part_waiters);
        let (go, stay): (Vec<_>, Vec<_>) =
            waiters.into_iter().partition(|waiter| all || disk.part_in(waiter.range).is_none());
        disk.part_waiters = stay;
        for PartWaiter { slot, range } in go {
            self.requests[slot].failed = failed;
            if self.range_locks.acquire(slot, range, Kind::Fill, Kind::Fill) {
                self.runnable.push_back(slot);
            }
        }
    }
}

impl Journal {
    /// Records the units that a write has delivered of one sector, in these copies of it. A copy whose
    /// checksum the durable journal does not have gets a record now, because recovery would not learn
    /// of the units otherwise.
    pub(super) fn record_units(
        &mut self,
        now: Instant,
        index: &mut Index,
        units: u8,
        rewritten: &[u64],
        copies: Copies,
    ) {
        let Some(first) = rewritten.first() else { return };
        if index.units(*first) == units {
            return;
        }
        index.set_units(*first, units);
        rewritten.iter().for_each(|sector| self.record_dirty(now, index, *sector));
        self.stay_unproven(now, index, rewritten, copies);
    }
}

impl Active {
    /// Groups the cache sectors that a write has overwritten in place by sector of the disk, with the
    /// units that the write delivered.
    pub(super) fn rewritten_units(&self, index: &Index, written: &[(u64, u32)]) -> Vec<(u8, Vec<u64>)> {
        let mut groups: Vec<(u64, Vec<u64>)> = Vec::new();
        for (sector, _) in written.iter().filter(|(sector, _)| index.is_unproven(*sector)) {
            let at = index.disk_sector(*sector);
            match groups.last_mut().filter(|(other, _)| *other == at) {
                Some((_, copies)) => copies.push(*sector),
                None => groups.push((at, vec![*sector])),
            }
        }
        groups.into_iter().map(|(at, copies)| (self.delivered_units(at), copies)).collect()
    }

    /// Sets the units of a sector that a write has made dirty.
    pub(super) fn note_units(&self, index: &mut Index, sector: u64) {
        let units = self.delivered_units(index.disk_sector(sector));
        if units != ALL_UNITS || index.parts_count() > 0 {
            index.set_units(sector, units);
        }
    }
}
