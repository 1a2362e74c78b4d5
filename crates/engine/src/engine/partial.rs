//! Writes that cover their first or last sector only partly. These sectors, the *edges* of the
//! write, are read and merged.
//!
//! An edge is read into a buffer of the engine. Then the bytes that the guest did not write are
//! copied next to the bytes that the guest wrote. The request's buffer then has whole sectors, and
//! the write continues as if the guest had sent these whole sectors (docs/decisions/0041). The
//! request's range lock covers whole sectors from before the read until the end of the write, so no
//! other request changes an edge in between. When a request releases its range lock, hob drops the
//! merged bytes.
//!
//! | the edge | write-back | write-through |
//! |---|---|---|
//! | partly written a short time ago | in memory (`recent_edges.rs`) | the same |
//! | dirty, or cached and clean | read from flash | read from flash |
//! | not cached, or unreadable on flash | incomplete, or read from the backing | not merged |
//! | unreadable on flash and on the backing | the write bypasses the cache | not merged |
//!
//! Under write-back, flash also takes an edge of which only some 512-byte units are known, and the
//! sector is then *incomplete* (`incomplete.rs`, docs/decisions/0072). The backing is read only if the
//! cache has too many incomplete sectors, or if the write does not consist of whole units.
//!
//! Under write-through, a write invalidates an edge that is not merged.
//!
//! If a disk's size is not a multiple of a sector, its last sector is never merged and never dirty
//! (`growth.rs`).

use super::destage_buffers::DestageBuffer;
use super::jobs::{Job, JobKind, Step};
use super::{Active, Engine, Owner, Pending, Phase};
use crate::cache::push_run;
use crate::command::Mode;
use crate::directory::whole_sectors;
use crate::index::parts::ALL_UNITS;
use crate::io::{BufferCopy, BufferSlice, CopyEnd, IoError, IoOp, Target};
use crate::range_locks::Range;
use crate::units::{Instant, SECTOR_BYTES};

/// Possible sources of the data of a partly covered sector.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum EdgeSource {
    /// The cache, if it holds the sector.
    Flash,
    /// The cache, or else the backing.
    FlashOrBacking,
}

/// State of the first or last sector of a write. A completely covered sector needs no merge.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Edge {
    /// The sector has not been read.
    #[default]
    Unread,
    /// The request's buffer holds the whole sector.
    Merged,
    /// The request's buffer holds these units of the sector, and only these units are written to
    /// flash.
    Units(u8),
    /// The sector could not be read.
    Unreadable,
}

/// The first and the last sector of one write.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Edges {
    pub(super) head: Edge,
    pub(super) tail: Edge,
    /// Number of jobs that are reading the write's first and last sector.
    jobs: u8,
    /// Number of edges that become incomplete sectors when the write to flash in progress ends.
    pub(super) new_parts: u8,
}

impl Active {
    /// Returns whether the first and the last sector are partly covered.
    pub(super) fn partial_edges(&self) -> (bool, bool) {
        let end = self.request.offset + self.request.len;
        (!self.request.offset.is_multiple_of(SECTOR_BYTES), !end.is_multiple_of(SECTOR_BYTES))
    }

    /// Returns the sectors that a write's buffer holds completely: the first, and one past the
    /// last.
    pub(super) fn held_sectors(&self) -> (u64, u64) {
        let (first, end) = whole_sectors(self.request.offset, self.request.len);
        let first = if self.edges.head == Edge::Merged { self.range.first } else { first };
        let end = if self.edges.tail == Edge::Merged { self.range.end } else { end };
        (first, first.max(end))
    }

    /// Returns true if flash can take all sectors of the write from the write's buffer.
    pub(super) fn is_for_flash(&self) -> bool {
        self.edges_by_sector().all(|(_, edge)| matches!(edge, Edge::Merged | Edge::Units(_)))
    }

    /// Returns the sectors that a write covers partly, with the state of each. A change without a
    /// buffer has none.
    pub(super) fn edges_by_sector(&self) -> impl Iterator<Item = (u64, Edge)> + use<> {
        let (head, tail) = if self.payload().is_some() { self.partial_edges() } else { (false, false) };
        let (first, last) = (self.range.first, self.range.end - 1);
        let head = head.then_some((first, self.edges.head));
        let tail = (tail && (head.is_none() || last > first)).then_some((last, self.edges.tail));
        head.into_iter().chain(tail)
    }

    /// Records that a sector is merged. Returns the memory copies to make for the bytes that the
    /// guest did not write. `from` returns the source of the bytes from an offset in the sector on.
    /// The source has only the 512-byte units in `units`.
    pub(super) fn merge_edge(
        &mut self,
        sector: Range,
        units: u8,
        from: impl Fn(u64) -> CopyEnd,
    ) -> Vec<BufferCopy> {
        let merged = match units | self.written_units(sector.first) {
            ALL_UNITS => Edge::Merged,
            units => Edge::Units(units),
        };
        let (head, tail) = self.partial_edges();
        let (id, offset) = self.payload().expect("the change has a buffer");
        let sector_at = (sector.first - self.range.first) * SECTOR_BYTES;
        let copy = |start: u64, end: u64| {
            let to = CopyEnd::Buffer { id, offset: offset + (sector_at + start) as u32 };
            BufferCopy { from: from(start), to, len: (end - start) as u32 }
        };
        let mut copies = Vec::new();
        if head && sector.first == self.range.first {
            copies.push(copy(0, self.request.offset % SECTOR_BYTES));
            self.edges.head = merged;
        }
        if tail && sector.end == self.range.end {
            copies.push(copy((self.request.offset + self.request.len) % SECTOR_BYTES, SECTOR_BYTES));
            self.edges.tail = merged;
        }
        copies
    }

    /// Returns true if a change sends whole edges to the backing, including the bytes that the
    /// guest did not write. The backing needs these bytes if flash may have lost them, or if the
    /// dirty sectors are dropped from flash because the write replaces them.
    pub(super) fn sends_edges(&self) -> bool {
        let is_merged = self.edges.head == Edge::Merged || self.edges.tail == Edge::Merged;
        is_merged && (self.failed || self.over_dirty)
    }

    /// Forgets the merged edges, because the range lock is released and the sectors may change.
    /// Bytes that flash may have lost stay in the buffer, because no other place has them.
    fn forget_edges(&mut self) {
        if !self.failed {
            self.edges = Edges::default();
        }
    }
}

impl Engine {
    /// Forgets the merged edges of a change that releases its range lock. If the change is a zero
    /// write, also releases its buffer of zeroes.
    pub(super) fn forget_edges(&mut self, slot: u32) {
        self.requests[slot].forget_edges();
        if !self.requests[slot].failed {
            self.give_back_zeroes(slot);
        }
    }

    /// Returns true if flash can take all sectors of a write after its edges are merged.
    pub(super) fn may_be_whole(&self, slot: u32) -> bool {
        let Active { request, range, edges, .. } = &self.requests[slot];
        let is_readable = edges.head != Edge::Unreadable && edges.tail != Edge::Unreadable;
        is_readable && range.end * SECTOR_BYTES <= self.disk(request.disk).config.size_bytes
    }

    /// Starts to read the unread edges of a write from `source`. The write starts again when its
    /// edges are read. Returns false if there is nothing to wait for.
    pub(super) fn read_edges(&mut self, now: Instant, slot: u32, source: EdgeSource) -> bool {
        self.merge_recent_edges(slot);
        let active = &self.requests[slot];
        let Active { request, range, edges, .. } = *active;
        let (head, tail) = active.partial_edges();
        if active.payload().is_none() || !head && !tail {
            return false;
        }
        let first = (head && edges.head == Edge::Unread).then_some(range.first);
        let last = (tail && edges.tail == Edge::Unread).then_some(range.end - 1);
        let mut is_waiting = false;
        // The count starts at one, so that a job that ends immediately does not resume the write.
        self.requests[slot].edges.jobs = 1;
        for sector in first.into_iter().chain(last.filter(|last| first != Some(*last))) {
            let edge = Range { disk: request.disk, first: sector, end: sector + 1 };
            if source == EdgeSource::Flash && (!self.is_in_flash(edge) || self.is_incomplete(edge)) {
                continue;
            }
            self.requests[slot].edges.jobs += 1;
            if !self.transfer(now, JobKind::ReadEdge(slot, source), edge) {
                self.requests[slot].edges.jobs -= 1;
                is_waiting = source == EdgeSource::FlashOrBacking;
            }
        }
        // The guest waits for the edges, so they are read before the sectors that follow the write.
        if last.is_some() && source == EdgeSource::FlashOrBacking && !is_waiting {
            self.fill_ahead_of_writes(now, range);
        }
        let active = &mut self.requests[slot];
        active.edges.jobs -= 1;
        let is_reading = active.edges.jobs > 0;
        if is_reading || is_waiting {
            active.phase = Phase::Edges;
        }
        if is_waiting && !is_reading {
            self.disk_mut(request.disk).edge_waiters.push(slot);
        }
        is_reading || is_waiting
    }

    /// Returns true if reading this edge from flash is possible now and useful. Reading a clean
    /// sector is not useful in a mode that does not copy writes to flash.
    pub(super) fn is_in_flash(&self, edge: Range) -> bool {
        let disk = self.disk(edge.disk);
        let Ok(cache) = disk.looked_up() else { return false };
        let copies_writes = matches!(cache.config.mode, Mode::WriteThrough | Mode::WriteBack);
        let is_within = edge.end * SECTOR_BYTES <= disk.config.size_bytes;
        is_within
            && cache.spans(edge.first, edge.end).any(|span| {
                let found = cache.find(span);
                let is_of_use = |sector| copies_writes || cache.index.is_dirty(sector);
                found.is_some_and(|sector| cache.index.count_servable(sector, 1) == 1 && is_of_use(sector))
            })
    }

    /// Reads a partly covered sector into the job's buffer, from flash or from the backing.
    pub(super) fn start_edge(&mut self, now: Instant, job: u32) {
        let Job { disk: id, range, buffer, kind, step, .. } = self.jobs[job];
        let JobKind::ReadEdge(_, source) = kind else { panic!("{kind:?} does not read an edge") };
        let mut buffer = buffer.expect("a transfer has a buffer");
        self.destage_buffers.shorten(&mut buffer, SECTOR_BYTES);
        self.jobs[job].buffer = Some(buffer);
        let disk = self.disks[id.0 as usize].as_mut().expect("disks outlive their jobs");
        disk.jobs += u32::from(step == Step::Waiting);
        self.runs.clear();
        if let Some(cache) = &disk.cache {
            for span in cache.spans(range.first, range.end) {
                let Some(sector) = cache.find(span) else { continue };
                if cache.index.count_servable(sector, 1) == 1 {
                    let is_dirty = cache.index.is_dirty(sector);
                    self.jobs[job].units = cache.index.units(sector);
                    self.jobs[job].step = if is_dirty { Step::EdgeDirty } else { Step::EdgeClean };
                    push_run(&mut self.runs, cache.extent(sector, 1), buffer.first_sector());
                }
            }
        }
        if !self.runs.is_empty() {
            return self.issue_runs_of(now, Owner::Job(job), id, buffer.id, IoOp::Read);
        }
        self.jobs[job].step = Step::EdgeBacking;
        self.jobs[job].units = ALL_UNITS;
        if source == EdgeSource::Flash {
            return self.end_job(now, job, Err(IoError::Failed));
        }
        self.jobs[job].doubts = self.disk(id).backed.doubts;
        let at = (range.first * SECTOR_BYTES, SECTOR_BYTES);
        let slice = Some(BufferSlice { id: buffer.id, offset: buffer.offset, len: SECTOR_BYTES as u32 });
        self.issue(now, Owner::Job(job), id, Target::Backing(id), IoOp::Read, at, slice, 0);
    }

    /// Handles the end of an I/O that reads a partly covered sector.
    pub(super) fn edge_io_done(
        &mut self,
        now: Instant,
        job: u32,
        io: &Pending,
        result: Result<(), IoError>,
        sums: &[u32],
    ) {
        let Job { disk: id, range, step, doubts, .. } = self.jobs[job];
        match step {
            Step::EdgeDirty => {
                self.jobs[job].failed |= !self.check_dirty(now, id, io, result, sums);
                if self.jobs[job].pending > 0 {
                    return;
                }
                let failed = std::mem::take(&mut self.jobs[job].failed);
                if failed && self.is_edge_dirty(range) {
                    return self.end_job(now, job, Err(IoError::Failed));
                }
                if failed {
                    // While the job was waiting, the sector became clean and its second copy was
                    // removed.
                    return self.start_edge(now, job);
                }
            }
            Step::EdgeClean => {
                let disk = self.disk_mut(id);
                let index = &mut disk.cache.as_mut().expect("changes wait for flash I/O").index;
                let is_right = result.is_ok() && index.matches(io.sector, sums[0]);
                if !is_right {
                    disk.stats.checksum_mismatches += u64::from(result.is_ok());
                    match &mut disk.journal {
                        Some(journal) => journal.drop_sector(now, index, io.sector),
                        None => _ = index.clear_valid(io.sector, 1),
                    }
                    return self.start_edge(now, job);
                }
            }
            Step::EdgeBacking if result.is_err() => return self.end_job(now, job, result),
            Step::EdgeBacking => {
                self.disk_mut(id).is_reading_shared = io.bytes < SECTOR_BYTES;
                if doubts == self.disk(id).backed.doubts {
                    self.compare_with_backing(now, range, sums);
                }
            }
            step => panic!("I/O of an edge in {step:?}"),
        }
        self.merge_edge(job);
        self.end_job(now, job, Ok(()));
    }

    fn is_edge_dirty(&self, edge: Range) -> bool {
        let Some(cache) = &self.disk(edge.disk).cache else { return false };
        let mut spans = cache.spans(edge.first, edge.end);
        spans.any(|span| cache.find(span).is_some_and(|sector| cache.index.is_dirty(sector)))
    }

    /// Copies the bytes of a sector that the guest did not write next to the bytes that the guest
    /// wrote.
    fn merge_edge(&mut self, job: u32) {
        let Job { range, buffer, kind, units, .. } = self.jobs[job];
        let JobKind::ReadEdge(slot, _) = kind else { panic!("{kind:?} does not read an edge") };
        let DestageBuffer { id, offset, .. } = buffer.expect("a transfer has a buffer");
        let from = |inside: u64| CopyEnd::Buffer { id, offset: offset + inside as u32 };
        self.copy_out.extend(self.requests[slot].merge_edge(range, units, from));
    }

    /// Handles the end of a job that read an edge of a request. After the last such job, the
    /// request starts again.
    pub(super) fn edge_done(&mut self, slot: u32, edge: Range) {
        let (head, tail) = self.requests[slot].partial_edges();
        let Active { range, edges, .. } = &mut self.requests[slot];
        if head && edge.first == range.first && edges.head == Edge::Unread {
            edges.head = Edge::Unreadable;
        }
        if tail && edge.end == range.end && edges.tail == Edge::Unread {
            edges.tail = Edge::Unreadable;
        }
        edges.jobs -= 1;
        if edges.jobs == 0 {
            self.runnable.push_back(slot);
        }
    }
}
