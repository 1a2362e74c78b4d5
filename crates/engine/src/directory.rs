//! The content of a cache and its replacement: index, admission and policy, independent of where the frames
//! lie. The daemon's caches and simulations use this one type.

mod nodes;

use nodes::Nodes;

use crate::admission::{Admission, AdmissionEffect, Gate, Run};
use crate::index::Index;
use crate::policy::{Candidate, Policy, PolicyKind};
use crate::units::{BlockNo, FrameNo, SECTOR_BYTES, sector_ceil};

/// A part of one block, in sectors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Span {
    pub(crate) block: BlockNo,
    /// First sector inside the block.
    pub(crate) first: u64,
    pub(crate) count: u64,
}

/// Why a block got no frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Refusal {
    /// It belongs to a sequential run.
    Sequential,
    /// Admission or the policy requires another use first.
    Unproven,
    /// No block can be evicted: the candidates are in use, or admission allows none.
    NoBlock,
}

/// A block's new frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Placed {
    /// The cache sector at which the span starts.
    pub(crate) sector: u64,
    /// Number of blocks with data that were evicted: 0 or 1.
    pub(crate) evicted: u64,
}

/// Where a block goes that is to become dirty in a segment that leaves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Departure {
    /// It becomes dirty where it is: it is dirty in part, in use, or there is no other room.
    Stays,
    /// The durable journal may call it dirty: first a commit.
    AfterCommit,
    /// To this cache sector, at the cost of so many blocks with data.
    To(u64, u64),
}

pub(crate) struct Directory {
    pub(crate) index: Index,
    policy: Box<dyn Policy>,
    nodes: Nodes,
    gate: Gate,
    block_shift: u32,
    /// Frames of a cache with a journal that blocks have left, until they are taken for the journal.
    gone: Vec<(FrameNo, BlockNo)>,
}

impl Directory {
    /// Creates an empty directory of `frames` frames (1 … 2³² − 2) of `1 << block_shift` sectors each.
    pub(crate) fn new(frames: u32, block_shift: u32, policy: PolicyKind, admission: Admission) -> Directory {
        Directory {
            index: Index::new(frames, block_shift),
            policy: (policy.info().build)(frames),
            nodes: Nodes::default(),
            gate: Gate::new(admission, frames),
            block_shift,
            gone: Vec::new(),
        }
    }

    /// Returns the memory used, bytes.
    pub(crate) fn bytes(&self) -> u64 {
        self.index.bytes() + self.policy.bytes() + self.nodes.bytes() + self.gate.bytes()
    }

    /// Splits a range of the disk's sectors at block boundaries.
    #[inline]
    pub(crate) fn spans(&self, first: u64, end: u64) -> impl Iterator<Item = Span> + use<> {
        let shift = self.block_shift;
        let mut at = first;
        std::iter::from_fn(move || {
            (at < end).then(|| {
                let block = at >> shift;
                let stop = end.min((block + 1) << shift);
                let span =
                    Span { block: BlockNo(block as u32), first: at - (block << shift), count: stop - at };
                at = stop;
                span
            })
        })
    }

    /// Returns the cache sector at which a span starts, if its block has a frame.
    #[inline]
    pub(crate) fn find(&self, span: Span) -> Option<u64> {
        self.index.find(span.block).map(|frame| self.index.first_sector(frame) + span.first)
    }

    /// Records a read or write of the disk's sectors `first..end`, before the look-up.
    #[inline]
    pub(crate) fn observe(&mut self, first: u64, end: u64) -> Run {
        self.gate.observe(first, end)
    }

    /// Returns true if clean data is never evicted for new data.
    pub(crate) fn only_while_free(&self) -> bool {
        self.gate.only_while_free()
    }

    /// Reports to the policy that a request used the block of this cache sector.
    #[inline]
    pub(crate) fn touch(&mut self, sector: u64) {
        let frame = FrameNo((sector >> self.block_shift) as u32);
        self.policy.hit(self.nodes.node(frame));
        self.index.note_use(frame);
    }

    /// Reports to the policy that a request used the blocks of these cache sectors, each once.
    #[inline]
    pub(crate) fn touch_all(&mut self, sector: u64, count: u64) {
        let last = sector + count - 1;
        for frame in sector >> self.block_shift..=last >> self.block_shift {
            let frame = FrameNo(frame as u32);
            self.policy.hit(self.nodes.node(frame));
            self.index.note_use(frame);
        }
    }

    /// Ensures that the block of `span` has a frame, for a request that brings its data. An existing frame
    /// counts as used; otherwise a new one is allocated.
    #[inline]
    pub(crate) fn bring(
        &mut self,
        span: Span,
        found: Option<u64>,
        (run, effect): (Run, AdmissionEffect),
        is_busy: impl Fn(u64, u64) -> bool,
    ) -> Result<Placed, Refusal> {
        match found {
            Some(sector) => {
                self.touch(sector);
                Ok(Placed { sector, evicted: 0 })
            }
            None => self.place(span, (run, effect), is_busy),
        }
    }

    /// Allocates a frame for the block of `span`, which has none, if admission allows it. Evicts if
    /// necessary; `is_busy` says whether I/O on a range of the disk's sectors is in flight.
    #[inline]
    fn place(
        &mut self,
        span: Span,
        (run, effect): (Run, AdmissionEffect),
        is_busy: impl Fn(u64, u64) -> bool,
    ) -> Result<Placed, Refusal> {
        if run == Run::Sequential {
            return Err(Refusal::Sequential);
        }
        if self.index.takes_nothing() {
            return Err(Refusal::NoBlock);
        }
        // Both are asked: each learns from what it is asked.
        let popular = self.gate.admit(span.block, effect, self.index.has_free());
        if !(popular && self.policy.admit(span.block)) && effect != AdmissionEffect::Pulled {
            let waits_for_room = self.gate.only_while_free() && !popular;
            return Err(if waits_for_room { Refusal::NoBlock } else { Refusal::Unproven });
        }
        let mut evicted = 0;
        let frame = match self.index.insert(span.block) {
            Some(frame) => frame,
            // An evicted block may free a frame that is for replicas only.
            None => loop {
                evicted += self.evict(&is_busy).ok_or(Refusal::NoBlock)?;
                if let Some(frame) = self.index.insert(span.block) {
                    break frame;
                }
            },
        };
        self.policy.insert(self.nodes.node(frame), span.block);
        Ok(Placed { sector: self.index.first_sector(frame) + span.first, evicted })
    }

    /// Allocates a second frame for the block at this cache sector if it has none, evicting others for it.
    /// Returns the second copy's sector, and how many blocks with data were evicted.
    pub(crate) fn double(&mut self, sector: u64, is_busy: impl Fn(u64, u64) -> bool) -> (Option<u64>, u64) {
        // Blocks that arrived together lie side by side on one device, in runs of hundreds, and are evicted
        // in that order too. Frames that were freed without use are allocated to the next blocks.
        const TRIES: u32 = 512;
        let mut evicted = 0;
        for _ in 0..TRIES {
            if let Some(second) = self.index.second_sector(sector) {
                return (Some(second), evicted);
            }
            let frame = FrameNo((sector >> self.block_shift) as u32);
            if self.index.insert_second(frame).is_none() {
                if self.index.are_seconds_apart() {
                    break;
                }
                match self.evict(&is_busy) {
                    Some(gone) => evicted += gone,
                    None => break,
                }
            }
        }
        (self.index.second_sector(sector), evicted)
    }

    /// Frees one frame. Returns how many blocks with data were evicted: 0 or 1.
    pub(crate) fn evict(&mut self, is_busy: impl Fn(u64, u64) -> bool) -> Option<u64> {
        let (index, nodes, shift) = (&self.index, &self.nodes, self.block_shift);
        let node = self.policy.evict(&mut |node| {
            let frame = nodes.frame(node);
            let block = index.block(frame);
            let first = u64::from(block.0) << shift;
            if index.is_pinned(frame) || is_busy(first, first + (1 << shift)) {
                Candidate::Busy
            } else if index.block_is_empty(index.first_sector(frame)) {
                Candidate::Empty
            } else {
                Candidate::Block(block)
            }
        })?;
        let frame = self.nodes.frame(node);
        let block = self.index.block(frame);
        self.drop_second(frame);
        let valid = self.empty(frame);
        self.index.remove(frame);
        self.gate.evicted(block);
        Some(u64::from(valid > 0))
    }

    /// Makes a frame's sectors invalid. Returns how many were valid.
    fn empty(&mut self, frame: FrameNo) -> u64 {
        let valid = self.index.clear_valid(self.index.first_sector(frame), 1 << self.block_shift);
        if self.index.keeps_marks() && valid > 0 {
            self.gone.push((frame, self.index.block(frame)));
        }
        valid
    }

    /// Gives up the second copy of the block in this frame, if it has one.
    fn drop_second(&mut self, frame: FrameNo) {
        if let Some(second) = self.index.second_of(frame) {
            self.empty(second);
            self.index.remove_second(second);
        }
    }

    /// A block is to become dirty at this cache sector, and the segment of one of its frames leaves: brings it to a segment that
    /// stays, without its contents. `is_used` says whether another request uses the block now, `is_busy` whether any does
    /// of a range.
    pub(crate) fn depart(
        &mut self,
        sector: u64,
        is_used: bool,
        is_busy: impl Fn(u64, u64) -> bool,
    ) -> Departure {
        let frame = FrameNo((sector >> self.block_shift) as u32);
        let frames = [Some(frame), self.index.second_of(frame)];
        let is_dirty = |frame: &FrameNo| {
            self.index.count_dirty(self.index.first_sector(*frame), 1 << self.block_shift) > 0
        };
        let nowhere = self.index.takes_nothing() && self.index.is_leaving(frame);
        if is_used || nowhere || frames.iter().flatten().any(is_dirty) {
            return Departure::Stays;
        }
        if self.index.is_pinned(frame) {
            return Departure::AfterCommit;
        }
        if !self.index.is_leaving(frame) {
            self.drop_second(frame);
            return Departure::To(sector, 0);
        }
        let mut evicted = 0;
        let to = loop {
            if let Some(to) = self.index.take_free() {
                break to;
            }
            match self.evict(&is_busy) {
                Some(gone) => evicted += gone,
                None => return Departure::Stays,
            }
        };
        self.drop_second(frame);
        self.empty(frame);
        self.index.rehome(frame, to);
        self.nodes.exchange(frame, to);
        Departure::To(self.index.first_sector(to) + (sector - self.index.first_sector(frame)), evicted)
    }

    /// The frames that blocks have left since this was asked last.
    #[inline]
    pub(crate) fn take_gone(&mut self) -> std::vec::Drain<'_, (FrameNo, BlockNo)> {
        self.gone.drain(..)
    }

    /// Returns true if this block of a cache with a journal was used since the last call, or is hot.
    pub(crate) fn was_used(&mut self, block: BlockNo) -> bool {
        let Some(frame) = self.index.find(block) else { return false };
        self.index.take_use(frame) || self.policy.is_hot(self.nodes.node(frame))
    }

    /// Ignores uses of this block up to now.
    pub(crate) fn forget_use(&mut self, block: BlockNo) {
        if let Some(frame) = self.index.find(block) {
            self.index.take_use(frame);
        }
    }

    /// log2 of the sectors in a block.
    #[inline]
    pub(crate) fn block_shift(&self) -> u32 {
        self.block_shift
    }

    /// Invalidates the cached data of the disk's sectors `first..end`.
    #[inline]
    pub(crate) fn invalidate(&mut self, first: u64, end: u64) {
        let mut runs = self.cached_runs(first, end);
        while let Some((sector, count)) = runs.next(self) {
            self.index.clear_valid(sector, count);
        }
    }

    /// Returns a walk over the frames of the disk's sectors `first..end`. Its number of steps is at most
    /// the number of blocks in the range or of frames in the cache, whichever is smaller. So a huge disk
    /// with a small cache is walked quickly.
    pub(crate) fn cached_runs(&self, first: u64, end: u64) -> CachedRuns {
        let blocks = end.saturating_sub(first) >> self.block_shift;
        let by_frame = blocks > u64::from(self.index.frames());
        CachedRuns { first, end, at: if by_frame { 0 } else { first }, by_frame }
    }

    /// Replaces the empty index by a recovered one. The order of use is unknown.
    pub(crate) fn restore(&mut self, index: Index) {
        assert!(index.frames() == self.index.frames() && index.block_shift() == self.block_shift);
        self.index = index;
        self.index.recount_dirty();
        let index = &self.index;
        let holds = |frame: &FrameNo| {
            !index.block_is_empty(index.first_sector(*frame)) && index.first_of(*frame).is_none()
        };
        (0..index.frames()).map(FrameNo).filter(holds).for_each(|frame| self.policy.restore(frame, 0));
    }

    /// Returns frames that hold data, with their heat, coldest first.
    pub(crate) fn order(&self) -> impl Iterator<Item = (FrameNo, u8)> {
        let index = &self.index;
        let holds_data = |(frame, _): &(FrameNo, u8)| !index.block_is_empty(index.first_sector(*frame));
        let frames = self.policy.order().into_iter().map(|(node, heat)| (self.nodes.frame(node), heat));
        frames.filter(holds_data)
    }

    /// Returns the groups of `frames_per_group` frames in the order in which the cache gives them away:
    /// the emptiest first, then full ones, the coldest first; of equals the last. A group that is full to
    /// 7/8 counts as full. `stays` are groups that go last. O(blocks).
    pub(crate) fn coldest_groups(&self, frames_per_group: u32, stays: impl Fn(usize) -> bool) -> Vec<usize> {
        let count = self.index.frames().div_ceil(frames_per_group) as usize;
        // Number of blocks, and sum of their places in the order of use.
        let mut groups = vec![(0, 0u64); count];
        for (place, (frame, _)) in (1..).zip(self.order()) {
            let (blocks, heat) = &mut groups[(frame.0 / frames_per_group) as usize];
            *blocks += 1;
            *heat += place;
        }
        let full = frames_per_group - frames_per_group / 8;
        let mut order: Vec<usize> = (0..count).rev().collect();
        order.sort_by_key(|&i| (stays(i), groups[i].0.min(full), groups[i].1));
        order
    }

    /// Moves blocks into this empty directory, with their contents and their place in the order: `(from,
    /// to, heat)`, coldest first. `seconds` are frames with second copies: `(from, to, frame of the first
    /// copy)`.
    pub(crate) fn adopt(
        &mut self,
        other: &Directory,
        firsts: Vec<(FrameNo, FrameNo, u8)>,
        seconds: Vec<(FrameNo, FrameNo, FrameNo)>,
    ) {
        firsts.iter().for_each(|(_, to, heat)| self.policy.restore(*to, *heat));
        let firsts = firsts.into_iter().map(|(from, to, _)| (from, to, None));
        let seconds = seconds.into_iter().map(|(from, to, first)| (from, to, Some(first)));
        let mut moves: Vec<_> = firsts.chain(seconds).collect();
        moves.sort_unstable_by_key(|(_, to, _)| *to);
        self.index.adopt(&other.index, moves.into_iter());
    }
}

/// Returns the sectors that a write covers completely: first, and one past the last. A sector that it
/// covers in part would have to be read first: it stays invalid.
pub(crate) fn whole_sectors(offset: u64, len: u64) -> (u64, u64) {
    let first = sector_ceil(offset) / SECTOR_BYTES;
    (first, first.max((offset + len) / SECTOR_BYTES))
}

/// A walk over frames; see [`Directory::cached_runs`]. It borrows nothing, so that the caller may change
/// the returned sectors.
pub(crate) struct CachedRuns {
    first: u64,
    end: u64,
    /// The next disk sector, or the next frame.
    at: u64,
    by_frame: bool,
}

impl CachedRuns {
    /// Returns the next run: its first cache sector, and the number of sectors. Not all of them need be valid.
    pub(crate) fn next(&mut self, directory: &Directory) -> Option<(u64, u64)> {
        if self.by_frame { self.next_frame(&directory.index) } else { self.next_block(directory) }
    }

    fn next_block(&mut self, directory: &Directory) -> Option<(u64, u64)> {
        while let Some(span) = directory.spans(self.at, self.end).next() {
            self.at += span.count;
            if let Some(sector) = directory.find(span) {
                return Some((sector, span.count));
            }
        }
        None
    }

    fn next_frame(&mut self, index: &Index) -> Option<(u64, u64)> {
        let shift = index.sectors_in_block().trailing_zeros();
        // The bitmap of valid sectors leads to the frames in use.
        while let Some(valid) = index.next_valid(self.at << shift) {
            let (frame, block, _) = index.locate(valid);
            self.at = u64::from(frame.0) + 1;
            let block_first = u64::from(block.0) << shift;
            let from = self.first.max(block_first);
            let to = self.end.min(block_first + (1 << shift));
            if from < to && index.first_of(frame).is_none() {
                return Some((index.first_sector(frame) + from - block_first, to - from));
            }
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_large_range_is_walked_by_frame_with_the_same_result_as_by_address() {
        let mut directory =
            Directory::new(8, 2, PolicyKind::all().next().expect("there are policies"), Admission::default());
        // Blocks 1, 500 and 2^30, of four sectors each, with some sectors valid.
        for (frame_block, valid) in [(1, 0..4), (500, 2..3), (1 << 30, 1..3)] {
            let frame = directory.index.insert(BlockNo(frame_block)).expect("a frame is free");
            let first = directory.index.first_sector(frame);
            valid.for_each(|i| directory.index.set_valid(first + i, 7));
        }
        let walk = |by_frame, (first, end)| {
            let mut runs = directory.cached_runs(first, end);
            (runs.by_frame, runs.at) = (by_frame, if by_frame { 0 } else { first });
            let mut found: Vec<_> = std::iter::from_fn(|| runs.next(&directory)).collect();
            found.sort_unstable();
            found
        };
        // The limits cut the first block and the second.
        for range in [(5, 2002), (0, 4), (8, 8), (4, 2004)] {
            assert_eq!(walk(true, range), walk(false, range), "sectors {range:?}");
        }
        assert_eq!(walk(true, (5, 2002)).iter().map(|(_, count)| count).sum::<u64>(), 3 + 2);

        let disk_sectors = 1 << 34;
        assert!(
            directory.cached_runs(0, disk_sectors).by_frame,
            "2^32 steps would block the shard for seconds"
        );
        directory.invalidate(0, disk_sectors);
        assert_eq!(directory.index.sectors_valid(), 0);
    }
}
