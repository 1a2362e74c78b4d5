//! Directory of a cache: index, admission and replacement policy, without positions on flash. The
//! daemon's caches and the simulations use this type.
//!
//! A *frame* is the place of one block in the cache. *Admission* decides whether a block gets a
//! frame. The *policy* selects the block to evict. If the settings of a cache say `auto`, a
//! [`Chooser`] selects its policy and admission, which together are a [`Combination`].

mod extra;
mod first_to_evict;
mod nodes;

use extra::Extra;
use first_to_evict::FirstToEvict;
use nodes::Nodes;

use crate::admission::{Admission, AdmissionEffect, Gate, Popularity, Room, Run};
use crate::chooser::{CacheAccess, Choice, Chooser, Combination};
use crate::flash_budget::limit::{Limit, Place, Verdict, is_refusable};
use crate::flash_budget::{Allowance, Counts};
use crate::index::Index;
use crate::policy::{Candidate, Policy, PolicyKind};
use crate::units::{BlockNo, FrameNo, SECTOR_BYTES, sector_ceil};

/// A part of one block, in sectors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Span {
    pub(crate) block: BlockNo,
    /// First sector of the span inside the block.
    pub(crate) first: u64,
    pub(crate) count: u64,
}

/// Reason why a block got no frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Refusal {
    /// The request belongs to a sequential run.
    Sequential,
    /// Admission or the policy requires another access first.
    Unproven,
    /// No block can be evicted: the candidates are in use, or admission does not permit their
    /// eviction.
    NoBlock,
    /// The flash write budget of the pool is used up, or requires more accesses first.
    FlashBudget,
}

/// Result of allocating a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Placed {
    /// Cache sector at which the span starts.
    pub(crate) sector: u64,
    /// Number of evicted blocks with data. More than one block is evicted if the frames of the
    /// first evicted blocks are reserved for second copies.
    pub(crate) evicted: u64,
}

/// Whether a block leaves a segment that is being vacated, when a write makes the block dirty.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Departure {
    /// The block stays in the segment that is being vacated, and becomes dirty there. The block is
    /// already partly dirty or in use, or no other frame is free.
    Stays,
    /// The durable journal may record the block as dirty, so the block may move only after the next
    /// commit.
    AfterCommit,
    /// The block moves. The fields are the cache sector of the new frame, and the number of evicted
    /// blocks with data.
    To(u64, u64),
}

pub(crate) struct Directory {
    pub(crate) index: Index,
    policy: Box<dyn Policy>,
    nodes: Nodes,
    gate: Gate,
    /// Chooser of a cache whose policy or admission is `auto`.
    chooser: Option<Box<Chooser>>,
    /// True if admission applies to clean data only. A write that is not admitted waits for the
    /// backing, so `auto` admits all dirty data.
    admits_dirty: bool,
    block_shift: u32,
    /// Frames whose blocks are evicted before all others. The policy does not know these blocks.
    first_to_evict: FirstToEvict,
    /// Blocks that read misses brought into the cache beside the blocks that guests read. The
    /// policy does not know these blocks.
    extra: Extra,
    /// Limit of the flash writes of the current request; `None` without a flash write budget.
    limit: Option<Limit>,
    /// Bytes of clean data that the current request copied to flash without a limit.
    unlimited: u64,
    /// Frames that blocks have left, with those blocks. Recorded for caches with a journal, until
    /// `take_gone`.
    gone: Vec<(FrameNo, BlockNo)>,
}

impl Directory {
    /// Creates an empty directory of `frames` frames (1 to 2³² − 2), each with `1 << block_shift`
    /// sectors.
    pub(crate) fn new(frames: u32, block_shift: u32, policy: PolicyKind, admission: Admission) -> Directory {
        let chooser = Chooser::new(frames, block_shift, policy, admission);
        let admits_dirty = admission.popularity == Popularity::Auto;
        let given = Combination { policy, admission };
        let Combination { policy, admission } = chooser.as_ref().map_or(given, Chooser::current);
        Directory {
            index: Index::new(frames, block_shift),
            policy: build(frames, policy, admission),
            nodes: Nodes::default(),
            gate: Gate::new(admission, frames),
            chooser: chooser.map(Box::new),
            admits_dirty,
            block_shift,
            first_to_evict: FirstToEvict::default(),
            extra: Extra::default(),
            limit: None,
            unlimited: 0,
            gone: Vec::new(),
        }
    }

    /// Returns the policy and admission that an automatic cache uses, and the reasons.
    pub(crate) fn choice(&self) -> Option<Choice> {
        self.chooser.as_ref().map(|chooser| chooser.choice())
    }

    /// Changes policy and admission, or lets a [`Chooser`] select them. Contents and eviction order
    /// stay, but usage counts are lost. Takes time proportional to the number of frames.
    pub(crate) fn set_combination(&mut self, policy: PolicyKind, admission: Admission) {
        self.chooser = Chooser::new(self.index.frames(), self.block_shift, policy, admission).map(Box::new);
        self.admits_dirty = admission.popularity == Popularity::Auto;
        let given = Combination { policy, admission };
        let combination = self.chooser.as_ref().map_or(given, |chooser| chooser.current());
        self.use_combination(combination);
    }

    /// Admits all dirty data, as a cache with the admission `auto` does.
    pub(crate) fn admit_dirty(&mut self) {
        self.admits_dirty = true;
    }

    /// Takes over the policy and admission that the [`Chooser`] of `other` has selected. Does
    /// nothing unless both caches have a [`Chooser`].
    pub(crate) fn follow(&mut self, other: &Directory) {
        if let (Some(chooser), Some(other)) = (&mut self.chooser, &other.chooser) {
            chooser.start_with(other.current());
            let Combination { policy, admission } = chooser.current();
            self.policy = build(self.index.frames(), policy, admission);
            self.gate.set(admission, self.index.frames());
        }
    }

    fn use_combination(&mut self, Combination { policy, admission }: Combination) {
        let frames = self.index.frames();
        let order = self.policy.order();
        self.policy = build(frames, policy, admission);
        order.into_iter().for_each(|(node, _)| self.policy.restore(node, 0));
        self.gate.set(admission, frames);
    }

    #[cold]
    fn choose(&mut self) {
        let has_room = self.index.has_free();
        let Some(chooser) = &mut self.chooser else { return };
        let before = chooser.current();
        match chooser.compare(has_room) {
            Some(new) if new.policy == before.policy => self.gate.set(new.admission, self.index.frames()),
            Some(new) => self.use_combination(new),
            None => {}
        }
    }

    /// Returns the memory use, bytes.
    pub(crate) fn bytes(&self) -> u64 {
        self.index.bytes()
            + self.policy.bytes()
            + self.nodes.bytes()
            + self.gate.bytes()
            + self.first_to_evict.bytes()
            + self.extra.frames.bytes()
            + self.chooser.as_ref().map_or(0, |chooser| chooser.bytes())
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

    /// Records a read or write of the disk's sectors `first..end`, before the lookup.
    #[inline]
    pub(crate) fn observe(&mut self, first: u64, end: u64, access: CacheAccess) -> Run {
        let Some(chooser) = &mut self.chooser else { return self.gate.observe(first, end) };
        let run_bytes = chooser.observe(first, end, access);
        if chooser.is_due() {
            self.choose();
        }
        self.gate.judge(run_bytes)
    }

    /// Classifies a request by the length of its sequential run, bytes.
    #[inline]
    pub(crate) fn judge(&self, run_bytes: u64) -> Run {
        self.gate.judge(run_bytes)
    }

    /// Returns true if admission never evicts clean data for new data.
    pub(crate) fn only_while_free(&self) -> bool {
        self.gate.only_while_free()
    }

    /// Reports to the policy that a request used the block of this cache sector.
    #[inline]
    pub(crate) fn touch(&mut self, sector: u64, run: Run) {
        self.touch_frame(FrameNo((sector >> self.block_shift) as u32), run);
    }

    /// Reports to the policy that a request used the blocks of these cache sectors. Each block
    /// counts once.
    #[inline]
    pub(crate) fn touch_all(&mut self, sector: u64, count: u64, run: Run) {
        let last = sector + count - 1;
        for frame in sector >> self.block_shift..=last >> self.block_shift {
            self.touch_frame(FrameNo(frame as u32), run);
        }
    }

    #[inline]
    fn touch_frame(&mut self, frame: FrameNo, run: Run) {
        let node = self.nodes.node(frame);
        if self.extra.frames.has(frame) {
            self.touch_extra(frame, run);
        } else if !self.first_to_evict.has(frame) {
            self.policy.hit(node);
        } else if run == Run::Other {
            self.first_to_evict.remove(frame);
            self.policy.insert(node, self.index.block(frame));
        }
        self.index.note_use(frame);
    }

    /// Returns the number of frames in use and whether a frame is free, as admission sees them for
    /// a block outside of sequential runs. Frames of the blocks in `first_to_evict` count as free.
    #[inline]
    fn room(&self) -> Room {
        let Room { has_free, used } = self.index.room();
        let replaceable = self.first_to_evict.count();
        Room { has_free: has_free || replaceable > 0, used: used - replaceable }
    }

    /// Ensures that the block of `span` has a frame for new data. If the block has a frame, reports
    /// an access to the policy. Otherwise allocates a frame.
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
                self.touch(sector, run);
                self.limit_update(span, sector, effect)?;
                Ok(Placed { sector, evicted: 0 })
            }
            None => self.place(span, (run, effect), is_busy),
        }
    }

    /// Allocates a frame for the block of `span`, which has none, if admission permits. Evicts
    /// another block if necessary. `is_busy` returns true if I/O on a range of the disk's sectors
    /// is in flight.
    #[inline]
    fn place(
        &mut self,
        span: Span,
        (run, effect): (Run, AdmissionEffect),
        is_busy: impl Fn(u64, u64) -> bool,
    ) -> Result<Placed, Refusal> {
        let is_sequential = run == Run::Sequential;
        let room = if is_sequential { self.index.room() } else { self.room() };
        let must_admit =
            effect == AdmissionEffect::Pulled || effect == AdmissionEffect::Dirty && self.admits_dirty;
        if is_sequential && !must_admit && !self.gate.is_filling(room) {
            return Err(Refusal::Sequential);
        }
        if self.index.takes_nothing() {
            return Err(Refusal::NoBlock);
        }
        let accesses_min = self.limit_new(span, effect)?;
        // The admission counts each call as an access, so it must be called exactly once for each
        // access.
        let popular = self.gate.admit_after(span.block, effect, room, accesses_min);
        let is_admitted = popular && self.policy.admit(span.block) || must_admit;
        if !is_admitted {
            if !popular && accesses_min > self.gate.accesses() {
                return Err(self.refuse_write(self.sectors_of_new(span)));
            }
            let waits_for_room = self.gate.only_while_free() && !popular;
            return Err(if waits_for_room { Refusal::NoBlock } else { Refusal::Unproven });
        }
        let mut evicted = 0;
        let frame = match self.index.insert(span.block) {
            Some(frame) => frame,
            // Eviction may free a frame that is reserved for replicas, so several evictions can be
            // needed.
            None => loop {
                evicted += self.evict(&is_busy).ok_or(Refusal::NoBlock)?;
                if let Some(frame) = self.index.insert(span.block) {
                    break frame;
                }
            },
        };
        if is_sequential {
            self.first_to_evict.add(frame, self.index.frames());
        } else {
            self.policy.insert(self.nodes.node(frame), span.block);
        }
        Ok(Placed { sector: self.index.first_sector(frame) + span.first, evicted })
    }

    /// Sets the limit of flash writes for the next request.
    #[inline]
    pub(crate) fn set_limit(&mut self, limit: Option<Limit>) {
        self.limit = limit;
        self.unlimited = 0;
    }

    /// Passes a new allowance of flash writes to the chooser, which considers it when it chooses
    /// the admission. Has no effect if the cache has no chooser.
    pub(crate) fn note_allowance(&mut self, allowance: Option<&Allowance>) {
        if let Some(chooser) = &mut self.chooser {
            chooser.note_allowance(allowance);
        }
    }

    /// Counts clean data that will be written to flash against the flash write budget: all copies
    /// of the block that was last brought into the cache.
    #[inline]
    pub(crate) fn charge(&mut self, sectors: u64) {
        match &mut self.limit {
            Some(limit) => limit.charge(sectors),
            None => self.unlimited += sectors * SECTOR_BYTES,
        }
    }

    /// Counts extra data that will be written to flash against the flash write budget.
    #[inline]
    pub(crate) fn charge_extra(&mut self, sectors: u64) {
        match &mut self.limit {
            Some(limit) => limit.charge_extra(sectors),
            None => self.unlimited += sectors * SECTOR_BYTES,
        }
    }

    /// Returns the bytes that were counted against the flash write budget, and the bytes that the
    /// budget refused, since `set_limit`.
    #[inline]
    pub(crate) fn charged(&self) -> Counts {
        let unlimited = Counts { clean: self.unlimited, ..Counts::default() };
        self.limit.as_ref().map_or(unlimited, |limit| limit.counts)
    }

    /// Applies the flash write budget to new data of a block that has a frame. Fails if the budget
    /// refuses the data.
    #[inline]
    fn limit_update(&mut self, span: Span, sector: u64, effect: AdmissionEffect) -> Result<(), Refusal> {
        let Some(limit) = self.limit.as_mut().filter(|_| is_refusable(effect)) else { return Ok(()) };
        let mut missing = span.count - self.index.count_valid(sector, span.count);
        if limit.copies > 1 {
            let second = self.index.second_sector(sector);
            missing += span.count - second.map_or(0, |second| self.index.count_valid(second, span.count));
        }
        if missing > 0 && limit.judge(span.block, effect, missing, Place::Cached) == Verdict::Refused {
            return Err(self.refuse_write(missing));
        }
        Ok(())
    }

    /// Returns the number of accesses that a block without a frame needs under the flash write
    /// budget. Fails if the budget refuses the block.
    #[inline]
    fn limit_new(&mut self, span: Span, effect: AdmissionEffect) -> Result<u8, Refusal> {
        let sectors = self.sectors_of_new(span);
        let Some(limit) = &mut self.limit else { return Ok(1) };
        let place = if self.index.room().has_free { Place::Free } else { Place::Evicts };
        match limit.judge(span.block, effect, sectors, place) {
            Verdict::Accesses(accesses) => Ok(accesses),
            Verdict::Refused => Err(self.refuse_write(sectors)),
        }
    }

    /// Returns the number of sectors that are written to flash if the block of this span gets a
    /// frame, in all copies.
    fn sectors_of_new(&self, span: Span) -> u64 {
        span.count * self.limit.as_ref().map_or(1, |limit| limit.copies)
    }

    fn refuse_write(&mut self, sectors: u64) -> Refusal {
        if let Some(limit) = &mut self.limit {
            limit.refuse(sectors);
        }
        Refusal::FlashBudget
    }

    /// Allocates a second frame for the block at this cache sector if it has none, and evicts other
    /// blocks if necessary. Returns the second copy's sector, and the number of evicted blocks with
    /// data.
    pub(crate) fn double(&mut self, sector: u64, is_busy: impl Fn(u64, u64) -> bool) -> (Option<u64>, u64) {
        // Blocks that arrived together are adjacent on one device, in runs of hundreds, and are
        // evicted in the same order. Frames that were freed without use are allocated to the next
        // blocks.
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

    /// Frees one frame. Returns the number of evicted blocks with data: 0 or 1.
    pub(crate) fn evict(&mut self, is_busy: impl Fn(u64, u64) -> bool) -> Option<u64> {
        let (index, nodes, shift) = (&self.index, &self.nodes, self.block_shift);
        let is_in_use = |frame| {
            let first = u64::from(index.block(frame).0) << shift;
            index.is_pinned(frame) || is_busy(first, first + (1 << shift))
        };
        let frames = index.frames();
        let mut first = self.first_to_evict.take(frames, |frame| !is_in_use(frame));
        if first.is_none() && self.extra.frames.count() > self.extra.frames_max(frames) {
            first = self.extra.frames.take(frames, |frame| !is_in_use(frame));
        }
        let frame = match first {
            Some(frame) => frame,
            None => nodes.frame(self.policy.evict(&mut |node| {
                let frame = nodes.frame(node);
                if is_in_use(frame) {
                    Candidate::Busy
                } else if index.block_is_empty(index.first_sector(frame)) {
                    Candidate::Empty
                } else {
                    Candidate::Block(index.block(frame))
                }
            })?),
        };
        self.gate.evicted(self.index.block(frame));
        Some(self.release(frame))
    }

    /// Frees a frame. Returns the number of evicted blocks with data: 0 or 1.
    fn release(&mut self, frame: FrameNo) -> u64 {
        self.drop_second(frame);
        let valid = self.empty(frame);
        self.index.remove(frame);
        u64::from(valid > 0)
    }

    /// Invalidates a frame's sectors. Returns the number of sectors that were valid.
    fn empty(&mut self, frame: FrameNo) -> u64 {
        let valid = self.index.clear_valid(self.index.first_sector(frame), 1 << self.block_shift);
        if self.index.keeps_marks() && valid > 0 {
            self.gone.push((frame, self.index.block(frame)));
        }
        valid
    }

    /// Drops the second copy of the block in this frame, if it has one.
    fn drop_second(&mut self, frame: FrameNo) {
        if let Some(second) = self.index.second_of(frame) {
            self.empty(second);
            self.index.remove_second(second);
        }
    }

    /// Moves a block, without its contents, out of a segment that is being vacated, before the
    /// block becomes dirty at this cache sector. `is_used` is true if another request uses the
    /// block now. `is_busy` returns true if any request uses a range.
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
        for frames in [&mut self.first_to_evict, &mut self.extra.frames] {
            if frames.remove(frame) {
                frames.add(to, self.index.frames());
            }
        }
        Departure::To(self.index.first_sector(to) + (sector - self.index.first_sector(frame)), evicted)
    }

    /// Returns the frames that blocks have left since the last call.
    #[inline]
    pub(crate) fn take_gone(&mut self) -> std::vec::Drain<'_, (FrameNo, BlockNo)> {
        self.gone.drain(..)
    }

    /// Returns true if this block of a cache with a journal was used since the last call, or if the
    /// policy protects the block ([`Policy::is_hot`](crate::policy::Policy::is_hot)).
    pub(crate) fn was_used(&mut self, block: BlockNo) -> bool {
        let Some(frame) = self.index.find(block) else { return false };
        self.index.take_use(frame)
            || !self.first_to_evict.has(frame)
                && !self.extra.frames.has(frame)
                && self.policy.is_hot(self.nodes.node(frame))
    }

    /// Forgets the previous uses of this block, so that [`was_used`](Self::was_used) ignores them.
    pub(crate) fn forget_use(&mut self, block: BlockNo) {
        if let Some(frame) = self.index.find(block) {
            self.index.take_use(frame);
        }
    }

    /// Returns the base-2 logarithm of the number of sectors in a block.
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

    /// Returns an iterator over the frames of the disk's sectors `first..end`. The number of steps
    /// is the number of blocks in the range or of frames in the cache, whichever is less. So the
    /// iteration is fast for a small cache of a huge disk.
    pub(crate) fn cached_runs(&self, first: u64, end: u64) -> CachedRuns {
        let blocks = end.saturating_sub(first) >> self.block_shift;
        let by_frame = blocks > u64::from(self.index.frames());
        CachedRuns { first, end, at: if by_frame { 0 } else { first }, by_frame }
    }

    /// Replaces the empty index by a recovered index. The order of use is unknown.
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

    /// Returns the frames that hold data, with their usage counts, coldest first.
    pub(crate) fn order(&self) -> impl Iterator<Item = (FrameNo, u8)> {
        let index = &self.index;
        let holds_data = |(frame, _): &(FrameNo, u8)| !index.block_is_empty(index.first_sector(*frame));
        let known = self.policy.order().into_iter().map(|(node, heat)| (self.nodes.frame(node), heat));
        let unknown = self.first_to_evict.iter().chain(self.extra.frames.iter()).map(|frame| (frame, 0));
        unknown.chain(known).filter(holds_data)
    }

    /// Returns the groups of `frames_per_group` frames in the order in which the cache releases
    /// them. Groups with few blocks come first, then full groups, coldest first. Of equally cold
    /// groups, the one with the highest number comes first. A group that is 7/8 full counts as
    /// full. Groups for which `stays` returns true come last. Takes time proportional to the number
    /// of blocks.
    pub(crate) fn coldest_groups(&self, frames_per_group: u32, stays: impl Fn(usize) -> bool) -> Vec<usize> {
        let count = self.index.frames().div_ceil(frames_per_group) as usize;
        // Each entry has the number of blocks, and the sum of their positions in the order of use.
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

    /// Moves blocks into this empty directory, with their contents and their position in the
    /// replacement order. The entries are `(from, to, usage count)`, coldest first. `seconds` are
    /// frames with second copies: `(from, to, frame of the first copy)`.
    pub(crate) fn adopt(
        &mut self,
        other: &Directory,
        firsts: Vec<(FrameNo, FrameNo, u8)>,
        seconds: Vec<(FrameNo, FrameNo, FrameNo)>,
    ) {
        self.extra.follow(&other.extra);
        for (from, to, heat) in &firsts {
            if other.first_to_evict.has(*from) {
                self.first_to_evict.add(*to, self.index.frames());
            } else if other.extra.frames.has(*from) {
                self.extra.frames.add(*to, self.index.frames());
            } else {
                self.policy.restore(*to, *heat);
            }
        }
        let firsts = firsts.into_iter().map(|(from, to, _)| (from, to, None));
        let seconds = seconds.into_iter().map(|(from, to, first)| (from, to, Some(first)));
        let mut moves: Vec<_> = firsts.chain(seconds).collect();
        moves.sort_unstable_by_key(|(_, to, _)| *to);
        self.index.adopt(&other.index, moves.into_iter());
    }
}

fn build(frames: u32, policy: PolicyKind, admission: Admission) -> Box<dyn Policy> {
    match admission.popularity {
        Popularity::Ghost | Popularity::NthAccess(_) => policy.build_beside_admission(frames),
        _ => (policy.info().build)(frames),
    }
}

/// Returns the sectors that a write covers completely: the first, and one past the last. A partly
/// covered sector would have to be read first, so it stays invalid.
pub(crate) fn whole_sectors(offset: u64, len: u64) -> (u64, u64) {
    let first = sector_ceil(offset) / SECTOR_BYTES;
    (first, first.max((offset + len) / SECTOR_BYTES))
}

/// An iterator over frames; see [`Directory::cached_runs`]. The iterator borrows nothing, so the
/// caller may change the returned sectors.
pub(crate) struct CachedRuns {
    first: u64,
    end: u64,
    /// The next disk sector, or the next frame if `by_frame` is true.
    at: u64,
    by_frame: bool,
}

impl CachedRuns {
    /// Returns the next run: its first cache sector, and the number of sectors. Some of these
    /// sectors may be invalid.
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
        // Only frames with valid sectors are visited: the bitmap of valid sectors gives the next
        // one.
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
mod tests;
