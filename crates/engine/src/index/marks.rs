//! Flags of the sectors of a persistent cache: whether a sector is dirty, what the durable journal
//! records about the sector, and whether the checksum is unknown.

use std::collections::{BTreeMap, BTreeSet};

use super::bitmap::Bitmap;
use super::{Index, NO_FRAME};
use crate::units::{BlockNo, FrameNo};

/// Flags of the sectors of a cache with a journal.
#[derive(Clone, Debug)]
pub(super) struct Marks {
    /// Valid sectors whose data the backing does not have.
    pub(super) dirty: Bitmap,
    /// Sectors that the durable journal may record as dirty. Data of another block must not replace
    /// these sectors. New data of the same block may overwrite only those without a recorded
    /// checksum.
    pub(super) held: Bitmap,
    /// Sectors that the durable journal records as dirty without a checksum.
    pub(super) unproven: Bitmap,
    /// Frames that a request has used since the last [`Index::take_use`] for the frame.
    pub(super) used: Bitmap,
    pub(super) dirty_sectors: u64,
    /// Number of dirty sectors in segments that are being vacated, included in `dirty_sectors`.
    pub(super) dirty_leaving: u64,
    /// Sectors of unknown checksum, because the journal had no checksum of them when the cache was
    /// recovered. hob computes a sector's checksum when it next reads the sector.
    pub(super) unknown: BTreeSet<u64>,
    /// For each incomplete dirty sector of the disk, the 512-byte units that flash has
    /// (`parts.rs`).
    pub(super) parts: BTreeMap<u64, u8>,
    /// For each frame with a first copy, the frame with its second copy. `first_of` is the reverse.
    pub(super) second_of: BTreeMap<FrameNo, FrameNo>,
    pub(super) first_of: BTreeMap<FrameNo, FrameNo>,
}

impl Marks {
    /// Returns the memory use in bytes. Trees count as 1.5 times the size of their entries.
    pub(super) fn bytes(&self) -> u64 {
        let frames = (self.second_of.len() + self.first_of.len()) * size_of::<(FrameNo, FrameNo)>();
        let trees = (frames + self.unknown.len() * size_of::<u64>()) * 3 / 2;
        3 * self.dirty.bytes() + self.used.bytes() + trees as u64
    }
}

impl Index {
    /// Returns true if the index has flags of sectors.
    pub(crate) fn keeps_marks(&self) -> bool {
        self.marks.is_some()
    }

    /// Adds the flags of a persistent cache's sectors to an index that has none.
    pub(crate) fn keep_marks(&mut self) {
        let sectors = self.sums.len() as u64;
        self.marks.get_or_insert_with(|| {
            Box::new(Marks {
                dirty: Bitmap::new(sectors),
                held: Bitmap::new(sectors),
                dirty_sectors: 0,
                dirty_leaving: 0,
                unproven: Bitmap::new(sectors),
                used: Bitmap::new(sectors >> self.block_shift),
                unknown: BTreeSet::new(),
                parts: BTreeMap::new(),
                second_of: BTreeMap::new(),
                first_of: BTreeMap::new(),
            })
        });
    }

    /// Returns the number of dirty sectors.
    #[inline]
    pub(crate) fn dirty_sectors(&self) -> u64 {
        self.marks.as_ref().map_or(0, |marks| marks.dirty_sectors)
    }

    #[inline]
    pub(crate) fn is_dirty(&self, sector: u64) -> bool {
        self.marks.as_ref().is_some_and(|marks| marks.dirty.get(sector))
    }

    /// Returns how many of these sectors are dirty.
    #[inline]
    pub(crate) fn count_dirty(&self, first: u64, count: u64) -> u64 {
        self.marks.as_ref().map_or(0, |marks| marks.dirty.count(first, count))
    }

    /// Marks a valid sector dirty.
    pub(crate) fn set_dirty(&mut self, sector: u64) {
        debug_assert!(self.is_valid(sector));
        let frame = FrameNo((sector >> self.block_shift) as u32);
        let marks = self.marks.as_mut().expect("only a persistent cache has dirty data");
        if !marks.dirty.get(sector) {
            marks.dirty.set(sector);
            // Second copies are not counted.
            if !marks.first_of.contains_key(&frame) {
                marks.dirty_sectors += 1;
                let leaves = self.leaving.as_ref().is_some_and(|leaving| leaving.has(frame.0));
                marks.dirty_leaving += u64::from(leaves);
            }
        }
    }

    /// Marks sectors clean. Returns how many were dirty.
    pub(crate) fn clear_dirty(&mut self, first: u64, count: u64) -> u64 {
        let frame = FrameNo((first >> self.block_shift) as u32);
        let Some(marks) = &mut self.marks else { return 0 };
        let before = marks.dirty.count(first, count);
        if before > 0 {
            marks.dirty.clear(first, count);
            if !marks.first_of.contains_key(&frame) {
                marks.dirty_sectors -= before;
                let leaves = self.leaving.as_ref().is_some_and(|leaving| leaving.has(frame.0));
                marks.dirty_leaving -= if leaves { before } else { 0 };
            }
            marks.unproven.clear(first, count);
            if !marks.unknown.is_empty() {
                (first..first + count).for_each(|sector| _ = marks.unknown.remove(&sector));
            }
            // Both copies of a sector share one entry, which is removed with the first copy.
            if !marks.parts.is_empty() && !marks.first_of.contains_key(&frame) {
                self.forget_units(first, count);
            }
        }
        before
    }

    /// Returns true if the durable journal records this sector as dirty without a checksum.
    #[inline]
    pub(crate) fn is_unproven(&self, sector: u64) -> bool {
        self.marks.as_ref().is_some_and(|marks| marks.unproven.get(sector))
    }

    /// Sets whether the durable journal lacks a checksum of this dirty sector.
    pub(crate) fn set_unproven(&mut self, sector: u64, unproven: bool) {
        let marks = self.marks.as_mut().expect("only a persistent cache has dirty data");
        match unproven {
            true => marks.unproven.set(sector),
            false => marks.unproven.clear(sector, 1),
        }
    }

    /// Records that the journal has the checksums of all dirty sectors whose checksum is known.
    pub(crate) fn prove_known(&mut self) {
        for sector in self.unproven_sectors() {
            if !self.is_sum_unknown(sector) {
                self.set_unproven(sector, false);
            }
        }
    }

    /// Marks the checksum of this sector unknown until it is read or written.
    pub(crate) fn forget_sum(&mut self, sector: u64) {
        self.marks.as_mut().expect("only a persistent cache has dirty data").unknown.insert(sector);
    }

    /// Returns true if the checksum of this sector is unknown.
    pub(crate) fn is_sum_unknown(&self, sector: u64) -> bool {
        self.marks.as_ref().is_some_and(|marks| marks.unknown.contains(&sector))
    }

    /// Returns true if a sector has this checksum. An unknown checksum is set to `sum` and matches.
    #[inline]
    pub(crate) fn matches(&mut self, sector: u64, sum: u32) -> bool {
        if let Some(marks) = &mut self.marks
            && !marks.unknown.is_empty()
            && marks.unknown.remove(&sector)
        {
            self.sums[sector as usize] = sum;
        }
        self.sum(sector) == sum
    }

    /// Returns true if a sector's checksum is known and equals `sum`.
    #[inline]
    pub(crate) fn is_known_as(&self, sector: u64, sum: u32) -> bool {
        !self.is_sum_unknown(sector) && self.sum(sector) == sum
    }

    /// Returns true if new data of the same block may overwrite a sector.
    #[inline]
    pub(crate) fn may_overwrite(&self, sector: u64) -> bool {
        self.marks.as_ref().is_none_or(|marks| !marks.held.get(sector) || marks.unproven.get(sector))
    }

    #[inline]
    pub(crate) fn is_held(&self, sector: u64) -> bool {
        self.marks.as_ref().is_some_and(|marks| marks.held.get(sector))
    }

    /// Records that a request used a frame.
    #[inline]
    pub(crate) fn note_use(&mut self, frame: FrameNo) {
        if let Some(marks) = &mut self.marks {
            marks.used.set(frame.0.into());
        }
    }

    /// Returns true if a frame was used since the last call for this frame.
    pub(crate) fn take_use(&mut self, frame: FrameNo) -> bool {
        let Some(marks) = &mut self.marks else { return false };
        let was_used = marks.used.get(frame.0.into());
        marks.used.clear(frame.0.into(), 1);
        was_used
    }

    /// Returns true if the durable journal may record any of these sectors as dirty.
    #[inline]
    pub(crate) fn any_held(&self, first: u64, count: u64) -> bool {
        self.marks.as_ref().is_some_and(|marks| marks.held.any(first, count))
    }

    /// Sets whether the durable journal may record a sector as dirty.
    pub(crate) fn set_held(&mut self, sector: u64, held: bool) {
        let marks = self.marks.as_mut().expect("only a persistent cache holds sectors");
        match held {
            true => marks.held.set(sector),
            false => marks.held.clear(sector, 1),
        }
    }

    /// Returns the sectors without a checksum in the durable journal.
    pub(crate) fn unproven_sectors(&self) -> Vec<u64> {
        self.marks.as_ref().map_or_else(Vec::new, |marks| marks.unproven.ones().collect())
    }

    /// Returns the dirty sectors.
    pub(crate) fn all_dirty(&self) -> Vec<u64> {
        self.marks.as_ref().map_or_else(Vec::new, |marks| marks.dirty.ones().collect())
    }

    /// Returns the dirty sectors of `first..end`.
    pub(crate) fn dirty_in(&self, first: u64, end: u64) -> impl Iterator<Item = u64> {
        let mut at = first;
        std::iter::from_fn(move || {
            let dirty = self.marks.as_ref()?.dirty.next_one_before(at, end)?;
            at = dirty + 1;
            Some(dirty)
        })
    }

    /// Sets the flags for a new journal ring, which records exactly the dirty sectors as dirty.
    pub(crate) fn hold_dirty(&mut self) {
        let marks = self.marks.as_mut().expect("only a persistent cache has a journal");
        marks.held = marks.dirty.clone();
    }

    /// Returns the blocks with dirty sectors.
    pub(crate) fn dirty_blocks(&self) -> impl Iterator<Item = BlockNo> {
        let shift = self.block_shift;
        let dirty = self.marks.iter().flat_map(|marks| marks.dirty.ones());
        let mut last = NO_FRAME;
        let dirty = dirty.filter(move |sector| self.first_of(FrameNo((sector >> shift) as u32)).is_none());
        dirty.filter_map(move |sector| {
            let frame = (sector >> shift) as u32;
            (std::mem::replace(&mut last, frame) != frame).then(|| self.block(FrameNo(frame)))
        })
    }

    /// Copies the flags of a frame's sectors from another index.
    pub(super) fn adopt_marks(&mut self, other: &Index, from: u64, to: u64) {
        let (Some(mine), Some(theirs)) = (&mut self.marks, &other.marks) else { return };
        if theirs.dirty.get(from) {
            mine.dirty.set(to);
            mine.held.set(to);
            mine.dirty_sectors += 1;
        }
        if theirs.unproven.get(from) {
            mine.unproven.set(to);
        }
        if theirs.unknown.contains(&from) {
            mine.unknown.insert(to);
        }
    }

    /// Returns true if this frame must not be reused. In that case, a sector of the frame or of its
    /// second copy is dirty, or the durable journal may record such a sector as dirty.
    #[inline]
    pub(crate) fn is_pinned(&self, frame: FrameNo) -> bool {
        let Some(marks) = &self.marks else { return false };
        let pins = |frame| {
            let (first, count) = (self.first_sector(frame), 1 << self.block_shift);
            marks.held.any(first, count) || marks.dirty.any(first, count)
        };
        pins(frame) || marks.second_of.get(&frame).is_some_and(|second| pins(*second))
    }

    /// Counts the dirty sectors again, after a change of the frames that are second copies or that
    /// are being vacated.
    pub(crate) fn recount_dirty(&mut self) {
        let Some(marks) = &mut self.marks else { return };
        let shift = self.block_shift;
        let counts = |sector: &u64| !marks.first_of.contains_key(&FrameNo((sector >> shift) as u32));
        marks.dirty_sectors = marks.dirty.ones().filter(counts).count() as u64;
        let leaving = self.leaving.as_ref();
        let leaves = |sector: &u64| leaving.is_some_and(|leaving| leaving.has((sector >> shift) as u32));
        let there = marks.dirty.ones().filter(counts).filter(leaves).count();
        marks.dirty_leaving = if leaving.is_some() { there as u64 } else { 0 };
    }
}
