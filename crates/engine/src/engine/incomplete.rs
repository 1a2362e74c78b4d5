//! Dirty sectors of which flash has only some 512-byte units (docs/decisions/0072).
//!
//! If a write covers a sector partly, and neither memory nor flash has the sector, the write does
//! not wait for the backing: flash takes only the bytes that the guest wrote. Further writes add
//! units. The journal records which units of the sector flash has (`index/parts.rs`).
//!
//! | event | an incomplete sector |
//! |---|---|
//! | a write to flash | gets the units of this write, and may become complete |
//! | a failed write to flash | keeps its earlier units; the bytes of the write are sent to the backing |
//! | a read | is completed: the backing is read, and the units are copied over that data |
//! | a change that goes to the backing | is destaged first, like other dirty sectors that the change covers partly |
//! | destaging | its units are written to the backing; after a flush it leaves the cache |
//!
//! So no read is answered from an incomplete sector alone.

use super::destage_buffers::DestageBuffer;
use super::disk::Disk;
use super::jobs::{Job, JobKind, Step};
use super::partial::Edge;
use super::records::Journal;
use super::{Active, Engine, Owner, Pending, Phase};
use crate::cache::push_run;
use crate::index::Index;
use crate::index::parts::{ALL_UNITS, PARTS_MAX, UNIT_BYTES, unit_runs};
use crate::io::{BufferCopy, CopyEnd, IoError, IoOp};
use crate::range_locks::Range;
use crate::units::{BlockNo, Instant, SECTOR_BYTES};

/// Returns the byte ranges of the disk that a transfer writes to the backing: all of `start..end`, or
/// the given units of the sector at `start`.
pub(super) fn bytes_to_destage(units: u8, start: u64, end: u64) -> Vec<(u64, u64)> {
    match units {
        ALL_UNITS => vec![(start, end)],
        _ => unit_runs(units).map(|part| (start + part.start, start + part.end)).collect(),
    }
}

impl Active {
    /// Returns the units of a sector that this change covers completely.
    pub(super) fn written_units(&self, sector: u64) -> u8 {
        let start = sector * SECTOR_BYTES;
        let from = self.request.offset.saturating_sub(start).div_ceil(UNIT_BYTES);
        let end = (self.request.offset + self.request.len - start).min(SECTOR_BYTES) / UNIT_BYTES;
        (from..end).fold(0, |units, unit| units | 1 << unit)
    }

    /// Returns true if a change consists of whole units.
    pub(super) fn has_whole_units(&self) -> bool {
        (self.request.offset | self.request.len).is_multiple_of(UNIT_BYTES)
    }

    /// Returns the units of a disk's sector that this write stores on flash.
    fn delivered_units(&self, sector: u64) -> u8 {
        let found = self.edges_by_sector().find(|(edge, _)| *edge == sector);
        match found {
            Some((_, Edge::Units(units))) => units,
            _ => ALL_UNITS,
        }
    }

    /// Forgets which units of its partly covered sectors the change could store on flash, because
    /// the change goes to the backing instead.
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

    /// Returns true if the cache has so many incomplete sectors that they are destaged before other
    /// data.
    pub(super) fn has_many_parts(&self) -> bool {
        self.incomplete_sectors() as usize > PARTS_MAX / 2
    }

    /// Returns a block with an incomplete sector that is to be destaged before other data.
    pub(super) fn next_part(&self) -> Option<BlockNo> {
        let cache = self.cache.as_ref().filter(|_| self.has_many_parts())?;
        let block = |(at, ..): (u64, u64, u8)| BlockNo((at >> cache.block_shift()) as u32);
        cache.index.parts().map(block).find(|block| self.destager.is_to_do(*block))
    }
}

impl Engine {
    fn incomplete_sectors_max(&self) -> u32 {
        self.limits.incomplete_sectors_max.min(PARTS_MAX as u32)
    }

    pub(super) fn is_incomplete(&self, range: Range) -> bool {
        self.disk(range.disk).part_in(range).is_some()
    }

    /// Returns the units of a sector that flash has.
    pub(super) fn units_on_flash(&self, sector: Range) -> u8 {
        let cache = self.disk(sector.disk).cache.as_ref();
        let found = cache.and_then(|cache| {
            let span = cache.spans(sector.first, sector.end).next()?;
            Some(cache.index.units(cache.find(span)?))
        });
        found.unwrap_or(ALL_UNITS)
    }

    /// Returns true if a write must not be merged with an incomplete sector, because the write
    /// covers a unit partly.
    pub(super) fn splits_units(&self, slot: u32) -> bool {
        let active = &self.requests[slot];
        let disk = active.range.disk;
        let is_part = |first| self.is_incomplete(Range { disk, first, end: first + 1 });
        !active.has_whole_units() && active.edges_by_sector().any(|(sector, _)| is_part(sector))
    }

    /// Prepares a write to store its partly covered sectors as incomplete sectors, if they are
    /// neither in memory nor on flash. Does nothing if the cache may have no more incomplete
    /// sectors.
    pub(super) fn leave_edges_incomplete(&mut self, now: Instant, slot: u32) {
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
        let (range, last) = (active.range, active.range.end - 1);
        let continues = missing.contains(&last);
        let active = &mut self.requests[slot];
        for sector in missing {
            let edge = Edge::Units(active.written_units(sector));
            let (head, tail) = active.partial_edges();
            if head && sector == active.range.first {
                active.edges.head = edge;
            }
            if tail && sector == last {
                active.edges.tail = edge;
            }
        }
        if continues {
            self.fill_ahead_of_writes(now, range);
        }
    }

    /// Counts the sectors that a write to flash will make incomplete. Returns false if the cache
    /// would then have too many incomplete sectors. In this case the write reads these sectors from
    /// the backing.
    pub(super) fn begin_parts(&mut self, slot: u32) -> bool {
        let (active, most) = (&self.requests[slot], self.incomplete_sectors_max());
        let disk = self.disk(active.range.disk);
        let is_new = |(sector, edge): &(u64, Edge)| {
            let part = Range { first: *sector, end: sector + 1, ..active.range };
            matches!(edge, Edge::Units(_)) && disk.part_in(part).is_none()
        };
        let new = active.edges_by_sector().filter(is_new).count() as u32;
        let has_room = new == 0 || disk.incomplete_sectors() + new <= most;
        let id = active.range.disk;
        match has_room {
            true => {
                self.requests[slot].edges.new_parts = new as u8;
                self.disk_mut(id).parts_in_flight += new;
            }
            false => self.requests[slot].forget_units(),
        }
        has_room
    }

    /// Stops counting the incomplete sectors of a write to flash as sectors of a write in progress.
    /// The write has ended, and the index counts these sectors now.
    pub(super) fn end_parts(&mut self, slot: u32) {
        let new = std::mem::take(&mut self.requests[slot].edges.new_parts);
        let id = self.requests[slot].range.disk;
        self.disk_mut(id).parts_in_flight -= u32::from(new);
    }

    /// Reads the incomplete sectors of a read request from flash, from sector `next` on, one after
    /// the other. Copies the units of these sectors into the request's buffer, where they replace
    /// data from the backing. Then ends the read.
    pub(super) fn read_units(&mut self, now: Instant, slot: u32, next: u64) {
        let range = self.requests[slot].range;
        let Some(first) = self.disk(range.disk).part_in(Range { first: next, ..range }) else {
            return self.overlay(now, slot);
        };
        self.requests[slot].phase = Phase::Units(first);
        let part = Range { first, end: first + 1, ..range };
        if !self.transfer(now, JobKind::ReadUnits(slot), part) {
            self.disk_mut(range.disk).edge_waiters.push(slot);
        }
    }

    /// Starts a job that has received its buffer: reads an incomplete sector from flash. If the
    /// sector has left the cache meanwhile, reads nothing: the read's data from the backing already
    /// includes the sector's units.
    pub(super) fn start_units(&mut self, now: Instant, job: u32) {
        let Job { disk: id, range, buffer, .. } = self.jobs[job];
        let mut buffer = buffer.expect("a transfer has a buffer");
        self.destage_buffers.shorten(&mut buffer, SECTOR_BYTES);
        self.jobs[job].buffer = Some(buffer);
        let disk = self.disks[id.0 as usize].as_mut().expect("disks outlive their jobs");
        self.runs.clear();
        let found = disk.cache.as_ref().filter(|cache| cache.index.part_in(range.first, range.end).is_some());
        let Some(cache) = found else { return self.end_job(now, job, Ok(())) };
        for span in cache.spans(range.first, range.end) {
            let sector = cache.find(span).expect("an incomplete sector has a frame");
            self.jobs[job].units = cache.index.units(sector);
            push_run(&mut self.runs, cache.extent(sector, 1), buffer.first_sector());
        }
        disk.jobs += 1;
        self.jobs[job].step = Step::UnitsRead;
        self.issue_runs_of(now, Owner::Job(job), id, buffer.id, IoOp::Read);
    }

    /// Handles the end of an I/O that reads an incomplete sector for a read.
    pub(super) fn units_io_done(
        &mut self,
        now: Instant,
        job: u32,
        slot: u32,
        io: &Pending,
        result: Result<(), IoError>,
        sums: &[u32],
    ) {
        let Job { disk: id, range, buffer, units, .. } = self.jobs[job];
        self.jobs[job].failed |= !self.check_dirty(now, id, io, result, sums);
        if self.jobs[job].pending > 0 {
            return;
        }
        if self.jobs[job].failed {
            return self.end_job(now, job, Err(IoError::Failed));
        }
        let DestageBuffer { id, offset, .. } = buffer.expect("a transfer has a buffer");
        let (into, start) = self.requests[slot].payload().expect("a read has a buffer");
        let start = start + ((range.first - self.requests[slot].range.first) * SECTOR_BYTES) as u32;
        self.copy_out.extend(unit_runs(units).map(|part| {
            let inside = part.start as u32;
            BufferCopy {
                from: CopyEnd::Buffer { id, offset: offset + inside },
                to: CopyEnd::Buffer { id: into, offset: start + inside },
                len: (part.end - part.start) as u32,
            }
        }));
        self.end_job(now, job, Ok(()));
    }

    /// Handles the end of a job that read an incomplete sector for a read.
    pub(super) fn units_read(&mut self, now: Instant, slot: u32, sector: u64, result: Result<(), IoError>) {
        match result {
            Ok(()) => self.read_units(now, slot, sector + 1),
            Err(_) => self.dirty_unread(now, slot),
        }
    }
}

impl Journal {
    /// Records which units of a sector a write has stored, for the given copies of the sector. The
    /// checksums are recorded too, so that recovery can tell whether flash has the units. The next
    /// overwrite of the sector waits for the commit of this record.
    pub(super) fn record_units(&mut self, now: Instant, index: &mut Index, units: u8, copies: &[u64]) {
        let Some(first) = copies.first() else { return };
        if index.units(*first) != units {
            index.set_units(*first, units);
            copies.iter().for_each(|sector| self.prove_sector(now, index, *sector));
        }
    }
}

impl Active {
    /// Groups, by disk sector, the cache sectors that this write has overwritten in place. Each
    /// group has the units that the write stored.
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
