//! Blocks that a read miss brings into the cache beside the blocks that the guest read.
//!
//! Extra blocks have a limited share of the frames. When the share is full, a new extra block
//! replaces another extra block. The policy does not know the extra blocks, so that it decides as
//! in a cache that is a little smaller. When a guest uses an extra block, admission decides whether
//! the block becomes an ordinary one.
//!
//! With the setting `auto`, the uses of extra blocks are counted. While there are few uses, extra
//! blocks are filled only in every [`SAMPLE`]th region of the disk on average, to detect a change
//! of the workload.

use super::{Directory, FirstToEvict, Placed, Refusal, Span};
use crate::admission::{AdmissionEffect, Run};
use crate::granularity::Fill;
use crate::index::hash;
use crate::units::{BlockNo, FrameNo};

/// A miss fills the cache back to a multiple of 2^`SHIFT_BEFORE` sectors, and forward to a multiple
/// of 2^`SHIFT_AFTER` sectors. Guests use the sectors after a request more often than those before
/// it.
const SHIFT_BEFORE: u32 = 2;
const SHIFT_AFTER: u32 = 4;
/// Maximum share of the frames for extra blocks, percent. Shares of 3 % and 20 % had fewer hits on
/// real traces.
const FRAMES_PERCENT: u64 = 15;
/// Maximum share of the frames for extra blocks while guests use few extra blocks, percent.
const SAMPLE_FRAMES_PERCENT: u64 = 1;
/// Minimum number of uses of extra blocks, as a percentage of the number of added extra blocks.
/// With fewer uses, only sampled regions get extra blocks.
const USES_PERCENT_MIN: u64 = 15;
/// While guests use few extra blocks, one of this number of regions gets extra blocks.
const SAMPLE: u64 = 16;
/// Base-2 logarithm of the number of sectors in a region.
const REGION_SHIFT: u32 = 8;
/// Minimum number of added blocks between two decisions.
const ADDED_MIN: u64 = 32;

/// The extra blocks of a cache.
#[derive(Debug, Default)]
pub(super) struct Extra {
    fill: Fill,
    pub(super) frames: FirstToEvict,
    /// Number of added extra blocks (`added`) and number of their uses (`uses`). Older counts lose
    /// weight.
    added: u64,
    uses: u64,
    /// Number of blocks to add until `has_few_uses` is decided again.
    added_until_decision: u64,
    has_few_uses: bool,
    /// Number of uses since the last [`Directory::take_extra_uses`].
    new_uses: u64,
}

impl Extra {
    pub(super) fn set(&mut self, fill: Fill) {
        if self.fill != fill {
            let frames = std::mem::take(&mut self.frames);
            *self = Extra { fill, frames, new_uses: self.new_uses, ..Extra::default() };
        }
    }

    /// Takes over the counts of another cache, if that cache has the same fill granularity.
    pub(super) fn follow(&mut self, other: &Extra) {
        if self.fill == other.fill {
            (self.added, self.uses, self.new_uses) = (other.added, other.uses, other.new_uses);
            (self.added_until_decision, self.has_few_uses) = (other.added_until_decision, other.has_few_uses);
        }
    }

    /// Returns the maximum number of extra blocks in a cache of `frames` frames.
    pub(super) fn frames_max(&self, frames: u32) -> u32 {
        let percent = match self.fill {
            Fill::Sectors => return 0,
            Fill::Auto if self.has_few_uses => SAMPLE_FRAMES_PERCENT,
            Fill::Block | Fill::Auto => FRAMES_PERCENT,
        };
        ((u64::from(frames) * percent / 100) as u32).max(1)
    }

    /// Returns the sectors that a miss of the sectors `first..end` may fill.
    pub(super) fn unit(&self, first: u64, end: u64, block_shift: u32) -> (u64, u64) {
        let has_extra = match self.fill {
            Fill::Sectors => false,
            Fill::Block => true,
            // Uses of single sectors in a block are not counted.
            Fill::Auto => block_shift < SHIFT_AFTER && (!self.has_few_uses || is_sampled(first)),
        };
        if !has_extra {
            return (first, end);
        }
        let (before, after) = (block_shift.max(SHIFT_BEFORE), block_shift.max(SHIFT_AFTER));
        (first >> before << before, end.div_ceil(1 << after) << after)
    }

    /// Counts an added block of a cache of `frames` frames.
    pub(super) fn note_added(&mut self, frames: u32) {
        self.added += 1;
        self.added_until_decision = self.added_until_decision.saturating_sub(1);
        if self.added_until_decision > 0 {
            return;
        }
        self.has_few_uses = self.added >= ADDED_MIN && self.uses * 100 < self.added * USES_PERCENT_MIN;
        // Guests use a block some time after it was added. So older counts are halved and not
        // dropped.
        (self.added, self.uses) = (self.added / 2, self.uses / 2);
        self.added_until_decision = u64::from(self.frames_max(frames) / 2).max(ADDED_MIN);
    }

    /// Counts a use of an extra block.
    pub(super) fn note_use(&mut self) {
        self.uses += 1;
        self.new_uses += 1;
    }
}

impl Directory {
    /// Handles the use of an extra block. If admission accepts the block, it becomes an ordinary
    /// block.
    #[cold]
    pub(super) fn touch_extra(&mut self, frame: FrameNo, run: Run) {
        self.extra.note_use();
        let block = self.index.block(frame);
        let room = self.room();
        let is_admitted = run == Run::Other
            && self.gate.admit(block, AdmissionEffect::Clean, room)
            && self.policy.admit(block);
        if is_admitted {
            self.extra.frames.remove(frame);
            self.policy.insert(self.nodes.node(frame), block);
        }
    }

    /// Changes the fill granularity. Extra blocks stay in the cache.
    pub(crate) fn set_fill(&mut self, fill: Fill) {
        self.extra.set(fill);
    }

    /// Returns the number of uses of extra blocks since the last call.
    #[inline]
    pub(crate) fn take_extra_uses(&mut self) -> u64 {
        std::mem::take(&mut self.extra.new_uses)
    }

    /// Counts the blocks of an extra read that took too long as added blocks. These blocks do not
    /// enter the cache, so they lower the ratio of uses to added blocks.
    pub(crate) fn note_late_extra(&mut self, first: u64, end: u64) {
        let frames = self.index.frames();
        self.spans(first, end).for_each(|_| self.extra.note_added(frames));
    }

    /// Returns the uncached sectors to fill before and after the sectors `first..end` of a read
    /// miss. The disk has `sectors` sectors. Either range may be empty.
    pub(crate) fn extra_ranges(&self, first: u64, end: u64, run: Run, sectors: u64) -> [(u64, u64); 2] {
        let (unit_first, unit_end) = match run {
            Run::Sequential => (first, end),
            Run::Other if !self.allows_extra(first) => (first, end),
            Run::Other => self.extra.unit(first, end, self.block_shift),
        };
        let is_cached = |at: &u64| {
            let mut spans = self.spans(*at, *at + 1);
            let found = spans.next().and_then(|span| self.find(span));
            found.is_some_and(|sector| self.index.is_valid(sector))
        };
        let from = (unit_first..first).rev().find(is_cached).map_or(unit_first, |at| at + 1);
        let unit_end = unit_end.min(sectors).max(end);
        let to = (end..unit_end).find(is_cached).unwrap_or(unit_end);
        [(from, first), (end, to)]
    }

    /// Returns true if the flash write budget permits extra data next to this sector.
    pub(crate) fn allows_extra(&self, sector: u64) -> bool {
        let block = BlockNo((sector >> self.block_shift) as u32);
        self.limit.as_ref().is_none_or(|limit| limit.allows_extra(block))
    }

    /// Ensures that the block of an extra `span`, which guests will soon write, has a frame.
    /// `found` is the cache sector of the span if the block has a frame already. The policy and
    /// admission treat the block like a written block.
    pub(crate) fn place_for_writes(
        &mut self,
        span: Span,
        found: Option<u64>,
        is_busy: impl Fn(u64, u64) -> bool,
    ) -> Result<Placed, Refusal> {
        if self.limit.as_ref().is_some_and(|limit| !limit.covers(span.count)) {
            return Err(Refusal::FlashBudget);
        }
        self.bring(span, found, (Run::Other, AdmissionEffect::Dirty), is_busy)
    }

    /// Ensures that the block of an extra `span` has a frame. `found` is the cache sector of the
    /// span if the block has a frame already. If no frame is free, another block is evicted. This
    /// is another extra block if extra blocks have their full share of the frames, or if admission
    /// accepts blocks only while frames are free. Otherwise the policy chooses the block.
    pub(crate) fn place_extra(
        &mut self,
        span: Span,
        found: Option<u64>,
        is_busy: impl Fn(u64, u64) -> bool,
    ) -> Result<Placed, Refusal> {
        if self.limit.as_ref().is_some_and(|limit| !limit.covers(span.count)) {
            return Err(Refusal::FlashBudget);
        }
        if let Some(sector) = found {
            return Ok(Placed { sector, evicted: 0 });
        }
        let frames = self.index.frames();
        if self.index.takes_nothing() || self.extra.frames_max(frames) == 0 {
            return Err(Refusal::NoBlock);
        }
        let mut evicted = 0;
        let frame = loop {
            if let Some(frame) = self.index.insert(span.block) {
                break frame;
            }
            let is_full = self.extra.frames.count() >= self.extra.frames_max(frames);
            let gone = match is_full || self.gate.only_while_free() {
                true => self.evict_extra(&is_busy),
                false => self.evict(&is_busy),
            };
            evicted += gone.ok_or(Refusal::NoBlock)?;
        };
        self.extra.frames.add(frame, frames);
        self.extra.note_added(frames);
        Ok(Placed { sector: self.index.first_sector(frame) + span.first, evicted })
    }

    /// Frees the frame of an extra block. Returns the number of evicted blocks with data: 0 or 1.
    fn evict_extra(&mut self, is_busy: impl Fn(u64, u64) -> bool) -> Option<u64> {
        let (index, shift) = (&self.index, self.block_shift);
        let frame = self.extra.frames.take(index.frames(), |frame| {
            let first = u64::from(index.block(frame).0) << shift;
            !index.is_pinned(frame) && !is_busy(first, first + (1 << shift))
        })?;
        Some(self.release(frame))
    }
}

/// Returns true if extra blocks are filled in the region of a sector even while few extra blocks
/// are used.
fn is_sampled(sector: u64) -> bool {
    (hash(BlockNo((sector >> REGION_SHIFT) as u32)) >> 32).is_multiple_of(SAMPLE)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn units_are_16_and_64_kib_or_one_block() {
        let mut extra = Extra::default();
        assert_eq!(extra.unit(9, 10, 0), (9, 10));
        extra.set(Fill::Block);
        assert_eq!(extra.unit(9, 10, 0), (8, 16));
        assert_eq!((extra.unit(13, 14, 0), extra.unit(7, 17, 1)), ((12, 16), (4, 32)));
        assert_eq!(extra.unit(17, 18, 4), (16, 32));
        extra.set(Fill::Auto);
        assert_eq!((extra.unit(9, 10, 3), extra.unit(9, 10, 4)), ((8, 16), (9, 10)));
    }

    #[test]
    fn auto_stops_while_few_extra_blocks_are_used_and_starts_again() {
        let mut extra = Extra::default();
        extra.set(Fill::Auto);
        let regions_with_extra = |extra: &Extra| {
            (0..1600u64)
                .filter(|i| extra.unit(i << REGION_SHIFT, (i << REGION_SHIFT) + 1, 0).1 & 7 == 0)
                .count()
        };
        let add = |extra: &mut Extra, used_in: u64| {
            for i in 0..1000 {
                extra.note_added(1000);
                if i % used_in == 0 {
                    extra.note_use();
                }
            }
        };
        add(&mut extra, 5);
        assert_eq!((regions_with_extra(&extra), extra.frames_max(1000)), (1600, 150));
        add(&mut extra, 10);
        assert!((50..150).contains(&regions_with_extra(&extra)));
        assert_eq!(extra.frames_max(1000), 10);
        add(&mut extra, 5);
        assert_eq!(regions_with_extra(&extra), 1600);
    }
}
