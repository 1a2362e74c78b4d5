//! Writes that cover their first or last sector in part: these sectors, the *edges* of the write, are read and merged.
//!
//! An edge is read into a lent buffer, and the bytes that the guest did not write are copied next to its own. The request's
//! buffer then holds whole sectors, and the write goes on as if the guest had sent them (docs/decisions/0041). The request's
//! claim covers whole sectors from before the read until the end of the write, so nobody changes an edge in between. Who
//! gives the claim up forgets what was merged.
//!
//! | the edge | write-back | write-through |
//! |---|---|---|
//! | dirty, or cached and clean | read from flash | read from flash |
//! | not cached, or flash fails | read from the backing | left as it is: the write drops it |
//! | nothing can be read | the write goes past the cache | the same |
//!
//! The last sector of a disk whose size is no multiple of a sector is never merged and never dirty (`growth.rs`).

use super::jobs::{Job, JobKind, Step};
use super::{Active, Engine, Owner, Pending, Phase};
use crate::cache::push_run;
use crate::command::Mode;
use crate::directory::whole_sectors;
use crate::io::{BufferCopy, BufferSlice, CopyEnd, IoError, IoOp, Op, Target};
use crate::range_locks::Range;
use crate::units::{Instant, SECTOR_BYTES};

/// Where edges may be read from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum EdgeSource {
    /// The cache, if it holds them.
    Flash,
    /// The cache, or else the backing.
    FlashOrBacking,
}

/// What is known of one edge of a write. Nothing is asked of an edge that is a whole sector.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Edge {
    /// It has not been read.
    #[default]
    Unread,
    /// The buffer holds the whole sector.
    Merged,
    /// It could not be read.
    Unreadable,
}

/// The edges of one write.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Edges {
    head: Edge,
    tail: Edge,
    /// Jobs that read them.
    jobs: u8,
}

impl Active {
    /// Is the first sector covered in part, and is the last one?
    fn partial_edges(&self) -> (bool, bool) {
        let end = self.request.offset + self.request.len;
        (!self.request.offset.is_multiple_of(SECTOR_BYTES), !end.is_multiple_of(SECTOR_BYTES))
    }

    /// Sectors that the buffer of a write holds as a whole: first, and one past the last.
    pub(super) fn held_sectors(&self) -> (u64, u64) {
        let (first, end) = whole_sectors(self.request.offset, self.request.len);
        let first = if self.edges.head == Edge::Merged { self.range.first } else { first };
        let end = if self.edges.tail == Edge::Merged { self.range.end } else { end };
        (first, first.max(end))
    }

    /// Does the buffer of a write hold all of its sectors as a whole?
    pub(super) fn is_whole(&self) -> bool {
        self.held_sectors() == (self.range.first, self.range.end)
    }

    /// Does a write send more to the backing than the guest's bytes? Flash may have lost, or the write is to replace, what is dirty
    /// in the rest of its edges.
    pub(super) fn sends_edges(&self) -> bool {
        let is_merged = self.edges.head == Edge::Merged || self.edges.tail == Edge::Merged;
        is_merged && (self.failed || self.over_dirty)
    }

    /// The claim is given up, so that the edges may change. What flash may have lost of them is in the buffer alone, and stays.
    pub(super) fn forget_edges(&mut self) {
        if !self.failed {
            self.edges = Edges::default();
        }
    }
}

impl Engine {
    /// Can flash take all sectors of a write, once its edges are merged?
    pub(super) fn may_be_whole(&self, slot: u32) -> bool {
        let Active { request, range, edges, .. } = &self.requests[slot];
        let is_readable = edges.head != Edge::Unreadable && edges.tail != Edge::Unreadable;
        is_readable && range.end * SECTOR_BYTES <= self.disk(request.disk).config.size_bytes
    }

    /// Begins to read the edges of a write that have not been read, as far as `source` has them. The write begins anew when
    /// they are there. False if there is nothing to wait for.
    pub(super) fn read_edges(&mut self, now: Instant, slot: u32, source: EdgeSource) -> bool {
        let active = &self.requests[slot];
        let Active { request, range, edges, .. } = *active;
        let (head, tail) = active.partial_edges();
        if !matches!(request.op, Op::Write(_)) || !head && !tail {
            return false;
        }
        let first = (head && edges.head == Edge::Unread).then_some(range.first);
        let last = (tail && edges.tail == Edge::Unread).then_some(range.end - 1);
        let mut is_waiting = false;
        // One more than there are, so that a job that ends at once does not let the write go on.
        self.requests[slot].edges.jobs = 1;
        for sector in first.into_iter().chain(last.filter(|last| first != Some(*last))) {
            let edge = Range { disk: request.disk, first: sector, end: sector + 1 };
            if source == EdgeSource::Flash && !self.is_in_flash(edge) {
                continue;
            }
            self.requests[slot].edges.jobs += 1;
            if !self.transfer(now, JobKind::ReadEdge(slot, source), edge) {
                self.requests[slot].edges.jobs -= 1;
                is_waiting = source == EdgeSource::FlashOrBacking;
            }
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

    /// Does flash hold this sector of a disk, may it be read there now, and is it of use? A clean sector is of none in a mode that
    /// does not copy writes to flash.
    fn is_in_flash(&self, edge: Range) -> bool {
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

    /// A job has a buffer for an edge: it is read from the best place that has it.
    pub(super) fn start_edge(&mut self, now: Instant, job: u32) {
        let Job { disk: id, range, buffer, kind, step, .. } = self.jobs[job];
        let JobKind::ReadEdge(_, source) = kind else { panic!("{kind:?} reads no edge") };
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
                    self.jobs[job].step = if is_dirty { Step::EdgeDirty } else { Step::EdgeClean };
                    push_run(&mut self.runs, cache.extent(sector, 1), buffer.first_sector());
                }
            }
        }
        if !self.runs.is_empty() {
            return self.issue_runs_of(now, Owner::Job(job), id, buffer.id, IoOp::Read);
        }
        self.jobs[job].step = Step::EdgeBacking;
        if source == EdgeSource::Flash {
            return self.end_job(now, job, Err(IoError::Failed));
        }
        self.jobs[job].doubts = self.disk(id).backed.doubts;
        let at = (range.first * SECTOR_BYTES, SECTOR_BYTES);
        let slice = Some(BufferSlice { id: buffer.id, offset: buffer.offset, len: SECTOR_BYTES as u32 });
        self.issue(now, Owner::Job(job), id, Target::Backing(id), IoOp::Read, at, slice, 0);
    }

    /// An edge is there, or is not.
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
                    // It became clean meanwhile, and its second copy went.
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

    /// Copies what the guest did not write of a sector next to what it wrote.
    fn merge_edge(&mut self, job: u32) {
        let Job { range, buffer, kind, .. } = self.jobs[job];
        let JobKind::ReadEdge(slot, _) = kind else { panic!("{kind:?} reads no edge") };
        let buffer = buffer.expect("a transfer has a buffer");
        let Engine { requests, copy_out, .. } = self;
        let active = &mut requests[slot];
        let (head, tail) = active.partial_edges();
        let (request, sectors) = (active.request, active.range);
        let id = request.buffer.expect("writes have one");
        let sector_at = (range.first - sectors.first) * SECTOR_BYTES;
        let mut copy = |from: u64, end: u64| {
            let from_end = CopyEnd::Buffer { id: buffer.id, offset: buffer.offset + from as u32 };
            let to = CopyEnd::Buffer { id, offset: (sector_at + from) as u32 };
            copy_out.push_back(BufferCopy { from: from_end, to, len: (end - from) as u32 });
        };
        if head && range.first == sectors.first {
            copy(0, request.offset % SECTOR_BYTES);
            active.edges.head = Edge::Merged;
        }
        if tail && range.end == sectors.end {
            copy((request.offset + request.len) % SECTOR_BYTES, SECTOR_BYTES);
            active.edges.tail = Edge::Merged;
        }
    }

    /// A job that read an edge of a request ended. After the last one the request begins anew.
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
