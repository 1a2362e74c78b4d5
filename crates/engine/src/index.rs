//! Which block lies in which frame, which of its sectors are valid, and what their checksums are.
//!
//! Memory per 4 KiB block: 4 B block number, 4 B checksum, 1 bit validity, 5.3 B hash table; in a persistent
//! cache 4 bits more. Frames in no use form a list through the block numbers they do not have.

mod bitmap;
mod free;
pub(crate) mod restore;
mod table;

use std::collections::{BTreeMap, BTreeSet};

use bitmap::Bitmap;
use free::FreeFrames;
pub(crate) use free::Places;
use table::Table;
pub(crate) use table::hash;

use crate::units::{BlockNo, FrameNo};

const NO_FRAME: u32 = u32::MAX;

/// What is known of the sectors of a cache with a journal.
#[derive(Clone, Debug)]
struct Marks {
    /// Valid, and not on the backing.
    dirty: Bitmap,
    /// May be dirty in the durable journal: what lies there is not to be replaced by another block's data, and to be
    /// overwritten only where it is unproven.
    held: Bitmap,
    /// Dirty in the durable journal, without a checksum.
    unproven: Bitmap,
    /// Frames used since somebody asked.
    used: Bitmap,
    dirty_sectors: u64,
    /// Of unknown checksum until they are read: unproven when the cache was recovered.
    unknown: BTreeSet<u64>,
    /// Frames that hold a second copy, by the frame that holds the first, and the other way round.
    second_of: BTreeMap<FrameNo, FrameNo>,
    first_of: BTreeMap<FrameNo, FrameNo>,
}

impl Marks {
    /// Memory; of trees, half as much again as their entries take.
    fn bytes(&self) -> u64 {
        let frames = (self.second_of.len() + self.first_of.len()) * size_of::<(FrameNo, FrameNo)>();
        let trees = (frames + self.unknown.len() * size_of::<u64>()) * 3 / 2;
        3 * self.dirty.bytes() + self.used.bytes() + trees as u64
    }
}

/// The index of one cache.
#[derive(Clone, Debug)]
pub(crate) struct Index {
    table: Table,
    /// Per frame: its block, or the next free frame.
    block_of: Vec<u32>,
    free: FreeFrames,
    /// Per sector of every frame.
    valid: Bitmap,
    sums: Vec<u32>,
    /// Of a persistent cache. Without bits in a volatile one.
    marks: Option<Box<Marks>>,
    /// log2 of the sectors in a block.
    block_shift: u32,
    used: u32,
    sectors_valid: u64,
    blocks_holding_data: u64,
}

impl Index {
    /// An empty index of `frames` frames (1 … 2³² − 2) of `1 << block_shift` sectors each.
    pub(crate) fn new(frames: u32, block_shift: u32) -> Self {
        assert!(frames > 0 && frames < NO_FRAME);
        let sectors = (frames as usize) << block_shift;
        // The low frames are handed out first: while a cache fills, its data stays together.
        let mut free = FreeFrames::none();
        let mut block_of = vec![NO_FRAME; frames as usize];
        (0..frames).for_each(|frame| free.push_last(&mut block_of, frame));
        Index {
            table: Table::new(frames),
            block_of,
            free,
            valid: Bitmap::new(sectors as u64),
            sums: vec![0; sectors],
            marks: None,
            block_shift,
            used: 0,
            sectors_valid: 0,
            blocks_holding_data: 0,
        }
    }

    pub(crate) fn frames(&self) -> u32 {
        self.block_of.len() as u32
    }

    pub(crate) fn sectors_in_block(&self) -> usize {
        1 << self.block_shift
    }

    /// Is a frame in no use?
    #[inline]
    pub(crate) fn has_free(&self) -> bool {
        !self.free.is_empty()
    }

    /// Frames that stand for a block.
    #[cfg(test)]
    pub(crate) fn used(&self) -> u32 {
        self.used
    }

    pub(crate) fn sectors_valid(&self) -> u64 {
        self.sectors_valid
    }

    /// Blocks with at least one valid sector.
    pub(crate) fn blocks_holding_data(&self) -> u64 {
        self.blocks_holding_data
    }

    /// Bytes of memory.
    pub(crate) fn bytes(&self) -> u64 {
        let words = self.block_of.capacity() + self.sums.capacity();
        self.table.bytes()
            + (words * 4) as u64
            + self.valid.bytes()
            + self.marks.as_ref().map_or(0, |marks| marks.bytes())
    }

    /// The frame of a block.
    #[inline]
    pub(crate) fn find(&self, block: BlockNo) -> Option<FrameNo> {
        self.table.find(hash(block), |frame| self.block(frame) == block)
    }

    /// A word from where a search for this block starts.
    #[inline]
    pub(crate) fn peek(&self, block: BlockNo) -> u32 {
        self.table.peek(hash(block))
    }

    /// The block in a frame that is in use.
    #[inline]
    pub(crate) fn block(&self, frame: FrameNo) -> BlockNo {
        BlockNo(self.block_of[frame.0 as usize])
    }

    /// Puts a block that has no frame into a free one; `None` when none is free.
    pub(crate) fn insert(&mut self, block: BlockNo) -> Option<FrameNo> {
        debug_assert!(self.find(block).is_none());
        let frame = FrameNo(self.free.pop(&self.block_of)?);
        self.place(block, frame);
        Some(frame)
    }

    /// The segments lie at these places: the second copy of a block lies at another than the first.
    pub(crate) fn set_places(&mut self, places: Places) {
        let frames = self.free.drain(&self.block_of);
        self.free = FreeFrames::with_places(places);
        frames.into_iter().for_each(|frame| self.free.push_last(&mut self.block_of, frame));
    }

    /// Do second copies lie where no other block does? Then no eviction makes room for one.
    pub(crate) fn are_seconds_apart(&self) -> bool {
        self.free.are_seconds_apart()
    }

    /// Gives the block in this frame a second frame, at another place. `None` when none is free there.
    pub(crate) fn insert_second(&mut self, first: FrameNo) -> Option<FrameNo> {
        let second = FrameNo(self.free.pop_apart(&self.block_of, first.0)?);
        self.block_of[second.0 as usize] = self.block_of[first.0 as usize];
        self.pair(first, second);
        Some(second)
    }

    /// One of two frames of a block keeps the second copy.
    pub(crate) fn pair(&mut self, first: FrameNo, second: FrameNo) {
        let marks = self.marks.as_mut().expect("only a persistent cache has second copies");
        assert!(
            marks.second_of.insert(first, second).is_none() && marks.first_of.insert(second, first).is_none()
        );
    }

    /// Frames for second copies.
    pub(crate) fn seconds(&self) -> u64 {
        self.marks.as_ref().map_or(0, |marks| marks.second_of.len() as u64)
    }

    /// Frees the second frame of a block. Its sectors must be invalid.
    pub(crate) fn remove_second(&mut self, second: FrameNo) {
        let marks = self.marks.as_mut().expect("only a persistent cache has second copies");
        let first = marks.first_of.remove(&second).expect("it is a second copy");
        marks.second_of.remove(&first);
        // Second copies are made in the order of their blocks, and go in that order: the next ones find them side by side.
        self.free.push_last(&mut self.block_of, second.0);
    }

    /// Frees the frame of this sector if it is for a second copy and holds nothing.
    pub(crate) fn free_second_if_empty(&mut self, sector: u64) {
        let frame = FrameNo((sector >> self.block_shift) as u32);
        let (first, count) = (self.first_sector(frame), 1 << self.block_shift);
        if self.first_of(frame).is_some()
            && self.count_valid(first, count) == 0
            && !self.any_held(first, count)
        {
            self.remove_second(frame);
        }
    }

    /// The sector of the second copy of this one, if its block has one.
    #[inline]
    pub(crate) fn second_sector(&self, sector: u64) -> Option<u64> {
        let frame = FrameNo((sector >> self.block_shift) as u32);
        let second = self.second_of(frame)?;
        Some(self.first_sector(second) + (sector - self.first_sector(frame)))
    }

    /// The sector of which this one is the second copy.
    pub(crate) fn of_second(&self, sector: u64) -> Option<u64> {
        let frame = FrameNo((sector >> self.block_shift) as u32);
        let first = self.first_of(frame)?;
        Some(self.first_sector(first) + (sector - self.first_sector(frame)))
    }

    /// Takes blocks over from another index with the same block size into this empty one, each from
    /// a frame there to a frame here, which may be the second copy of what is in another. They come in the order of
    /// the frames here.
    pub(crate) fn adopt(
        &mut self,
        other: &Index,
        moves: impl Iterator<Item = (FrameNo, FrameNo, Option<FrameNo>)>,
    ) {
        assert!(self.used == 0 && self.block_shift == other.block_shift);
        let frames = self.frames();
        self.free.drain(&self.block_of);
        let mut next = 0;
        for (from, to, first) in moves {
            (next..to.0).for_each(|frame| self.free.push_last(&mut self.block_of, frame));
            next = to.0 + 1;
            match first {
                None => self.place(other.block(from), to),
                Some(first) => {
                    self.block_of[to.0 as usize] = other.block(from).0;
                    self.pair(first, to);
                }
            }
            for i in 0..1 << self.block_shift {
                let sector = other.first_sector(from) + i;
                if other.is_valid(sector) {
                    let to = self.first_sector(to) + i;
                    self.set_valid(to, other.sum(sector));
                    self.adopt_marks(other, sector, to);
                }
            }
        }
        (next..frames).for_each(|frame| self.free.push_last(&mut self.block_of, frame));
        self.recount_dirty();
    }

    /// Enters a block into the table.
    fn place(&mut self, block: BlockNo, frame: FrameNo) {
        self.block_of[frame.0 as usize] = block.0;
        self.table.insert(hash(block), frame);
        self.used += 1;
    }

    /// Frees a frame in use. Its sectors must be invalid.
    pub(crate) fn remove(&mut self, frame: FrameNo) {
        debug_assert_eq!(self.count_valid(self.first_sector(frame), 1 << self.block_shift), 0);
        self.table.remove(hash(self.block(frame)), frame);
        self.free.push(&mut self.block_of, frame.0);
        self.used -= 1;
    }

    /// The first of a frame's sectors, in the numbering that the functions below use.
    #[inline]
    pub(crate) fn first_sector(&self, frame: FrameNo) -> u64 {
        u64::from(frame.0) << self.block_shift
    }

    /// How many of the `count` sectors from `first` on are valid.
    #[inline]
    pub(crate) fn count_valid(&self, first: u64, count: u64) -> u64 {
        self.valid.count(first, count)
    }

    #[inline]
    pub(crate) fn is_valid(&self, sector: u64) -> bool {
        self.valid.get(sector)
    }

    #[inline]
    pub(crate) fn sum(&self, sector: u64) -> u32 {
        self.sums[sector as usize]
    }

    /// Makes one sector valid.
    #[inline]
    pub(crate) fn set_valid(&mut self, sector: u64, sum: u32) {
        self.sums[sector as usize] = sum;
        if let Some(marks) = &mut self.marks
            && !marks.unknown.is_empty()
        {
            marks.unknown.remove(&sector);
        }
        if !self.is_valid(sector) {
            if self.block_is_empty(sector) {
                self.blocks_holding_data += 1;
            }
            self.valid.set(sector);
            self.sectors_valid += 1;
        }
    }

    /// Makes sectors of one frame invalid, and so not dirty. Returns how many were valid.
    #[inline]
    pub(crate) fn clear_valid(&mut self, first: u64, count: u64) -> u64 {
        let before = self.count_valid(first, count);
        if before == 0 {
            return 0;
        }
        self.clear_dirty(first, count);
        self.valid.clear(first, count);
        self.sectors_valid -= before;
        if self.block_is_empty(first) {
            self.blocks_holding_data -= 1;
        }
        before
    }

    /// Has the frame of this sector no valid sector?
    #[inline]
    pub(crate) fn block_is_empty(&self, sector: u64) -> bool {
        if self.block_shift == 0 {
            return !self.is_valid(sector);
        }
        !self.valid.any(sector >> self.block_shift << self.block_shift, 1 << self.block_shift)
    }

    /// Can sectors be dirty and held?
    pub(crate) fn keeps_marks(&self) -> bool {
        self.marks.is_some()
    }

    /// From now on sectors can be dirty and held.
    pub(crate) fn keep_marks(&mut self) {
        let sectors = self.sums.len() as u64;
        self.marks.get_or_insert_with(|| {
            Box::new(Marks {
                dirty: Bitmap::new(sectors),
                held: Bitmap::new(sectors),
                dirty_sectors: 0,
                unproven: Bitmap::new(sectors),
                used: Bitmap::new(sectors >> self.block_shift),
                unknown: BTreeSet::new(),
                second_of: BTreeMap::new(),
                first_of: BTreeMap::new(),
            })
        });
    }

    /// Sectors that are dirty.
    #[inline]
    pub(crate) fn dirty_sectors(&self) -> u64 {
        self.marks.as_ref().map_or(0, |marks| marks.dirty_sectors)
    }

    #[inline]
    pub(crate) fn is_dirty(&self, sector: u64) -> bool {
        self.marks.as_ref().is_some_and(|marks| marks.dirty.get(sector))
    }

    /// How many of these sectors are dirty.
    #[inline]
    pub(crate) fn count_dirty(&self, first: u64, count: u64) -> u64 {
        self.marks.as_ref().map_or(0, |marks| marks.dirty.count(first, count))
    }

    /// Makes a valid sector dirty.
    pub(crate) fn set_dirty(&mut self, sector: u64) {
        debug_assert!(self.is_valid(sector));
        let frame = FrameNo((sector >> self.block_shift) as u32);
        let marks = self.marks.as_mut().expect("only a persistent cache has dirty data");
        if !marks.dirty.get(sector) {
            marks.dirty.set(sector);
            // Second copies are not counted.
            marks.dirty_sectors += u64::from(!marks.first_of.contains_key(&frame));
        }
    }

    /// Makes sectors clean. Returns how many were dirty.
    pub(crate) fn clear_dirty(&mut self, first: u64, count: u64) -> u64 {
        let frame = FrameNo((first >> self.block_shift) as u32);
        let Some(marks) = &mut self.marks else { return 0 };
        let before = marks.dirty.count(first, count);
        if before > 0 {
            marks.dirty.clear(first, count);
            marks.dirty_sectors -= if marks.first_of.contains_key(&frame) { 0 } else { before };
            marks.unproven.clear(first, count);
            if !marks.unknown.is_empty() {
                (first..first + count).for_each(|sector| _ = marks.unknown.remove(&sector));
            }
        }
        before
    }

    /// Is this sector dirty without a checksum in the durable journal?
    #[inline]
    pub(crate) fn is_unproven(&self, sector: u64) -> bool {
        self.marks.as_ref().is_some_and(|marks| marks.unproven.get(sector))
    }

    /// The durable journal has no checksum of this dirty sector, or has one again.
    pub(crate) fn set_unproven(&mut self, sector: u64, unproven: bool) {
        let marks = self.marks.as_mut().expect("only a persistent cache has dirty data");
        match unproven {
            true => marks.unproven.set(sector),
            false => marks.unproven.clear(sector, 1),
        }
    }

    /// Nobody knows the checksum of this sector before it is read or written.
    pub(crate) fn forget_sum(&mut self, sector: u64) {
        self.marks.as_mut().expect("only a persistent cache has dirty data").unknown.insert(sector);
    }

    /// Is the checksum of this sector known to nobody?
    pub(crate) fn is_sum_unknown(&self, sector: u64) -> bool {
        self.marks.as_ref().is_some_and(|marks| marks.unknown.contains(&sector))
    }

    /// Has a sector this checksum? One of unknown checksum has any, and has this one from now on.
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

    /// Is this known to be a sector's checksum? Learns nothing.
    #[inline]
    pub(crate) fn is_known_as(&self, sector: u64, sum: u32) -> bool {
        !self.is_sum_unknown(sector) && self.sum(sector) == sum
    }

    /// May new data of its own block be written over a sector?
    #[inline]
    pub(crate) fn may_overwrite(&self, sector: u64) -> bool {
        self.marks.as_ref().is_none_or(|marks| !marks.held.get(sector) || marks.unproven.get(sector))
    }

    /// The frame with the second copy of what this one holds.
    #[inline]
    pub(crate) fn second_of(&self, frame: FrameNo) -> Option<FrameNo> {
        self.marks.as_ref()?.second_of.get(&frame).copied()
    }

    /// The frame of which this one holds the second copy.
    pub(crate) fn first_of(&self, frame: FrameNo) -> Option<FrameNo> {
        self.marks.as_ref()?.first_of.get(&frame).copied()
    }

    #[inline]
    pub(crate) fn is_held(&self, sector: u64) -> bool {
        self.marks.as_ref().is_some_and(|marks| marks.held.get(sector))
    }

    /// A request used a frame.
    #[inline]
    pub(crate) fn note_use(&mut self, frame: FrameNo) {
        if let Some(marks) = &mut self.marks {
            marks.used.set(frame.0.into());
        }
    }

    /// Was a frame used since this was asked last?
    pub(crate) fn take_use(&mut self, frame: FrameNo) -> bool {
        let Some(marks) = &mut self.marks else { return false };
        let was_used = marks.used.get(frame.0.into());
        marks.used.clear(frame.0.into(), 1);
        was_used
    }

    /// Is any of these sectors held?
    #[inline]
    pub(crate) fn any_held(&self, first: u64, count: u64) -> bool {
        self.marks.as_ref().is_some_and(|marks| marks.held.any(first, count))
    }

    /// The durable journal says that a sector is dirty, or that it is not.
    pub(crate) fn set_held(&mut self, sector: u64, held: bool) {
        let marks = self.marks.as_mut().expect("only a persistent cache holds sectors");
        match held {
            true => marks.held.set(sector),
            false => marks.held.clear(sector, 1),
        }
    }

    /// What a sector of a frame in use is called in a journal: the frame, its block, and the sector inside it.
    #[inline]
    pub(crate) fn locate(&self, sector: u64) -> (FrameNo, BlockNo, u8) {
        let frame = FrameNo((sector >> self.block_shift) as u32);
        (frame, self.block(frame), (sector - self.first_sector(frame)) as u8)
    }

    /// log2 of the sectors in a block.
    #[inline]
    pub(crate) fn block_shift(&self) -> u32 {
        self.block_shift
    }

    /// The sectors that the durable journal has no checksum of.
    pub(crate) fn unproven_sectors(&self) -> Vec<u64> {
        self.marks.as_ref().map_or_else(Vec::new, |marks| marks.unproven.ones().collect())
    }

    /// The sectors that are dirty.
    pub(crate) fn all_dirty(&self) -> Vec<u64> {
        self.marks.as_ref().map_or_else(Vec::new, |marks| marks.dirty.ones().collect())
    }

    /// The journal is new: it says of all that is dirty, and of nothing else, that it is dirty.
    pub(crate) fn hold_dirty(&mut self) {
        let marks = self.marks.as_mut().expect("only a persistent cache has a journal");
        marks.held = marks.dirty.clone();
    }

    /// The blocks with dirty sectors.
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

    /// Takes the marks of a frame's sectors over from another index.
    fn adopt_marks(&mut self, other: &Index, from: u64, to: u64) {
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

    /// Must the frame of this sector stay as it is, for dirty data that is or may be there?
    #[inline]
    pub(crate) fn is_pinned(&self, frame: FrameNo) -> bool {
        let Some(marks) = &self.marks else { return false };
        let pins = |frame| {
            let (first, count) = (self.first_sector(frame), 1 << self.block_shift);
            marks.held.any(first, count) || marks.dirty.any(first, count)
        };
        pins(frame) || marks.second_of.get(&frame).is_some_and(|second| pins(*second))
    }

    /// Counts dirty sectors anew: pairs have become known.
    pub(crate) fn recount_dirty(&mut self) {
        let Some(marks) = &mut self.marks else { return };
        let shift = self.block_shift;
        let counts = |sector: &u64| !marks.first_of.contains_key(&FrameNo((sector >> shift) as u32));
        marks.dirty_sectors = marks.dirty.ones().filter(counts).count() as u64;
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn behaves_like_a_map(frames in 1u32..40, shift in 0u32..3,
            steps in prop::collection::vec((0u32..60, any::<bool>(), 0u64..4), 0..400)) {
            let mut index = Index::new(frames, shift);
            let mut model: BTreeMap<u32, (FrameNo, BTreeMap<u64, u32>)> = BTreeMap::new();
            for (step, (block, grow, sector)) in steps.into_iter().enumerate() {
                let sector = sector % (1 << shift);
                match (model.contains_key(&block), grow) {
                    (false, _) => match index.insert(BlockNo(block)) {
                        Some(frame) => { model.insert(block, (frame, BTreeMap::new())); }
                        None => prop_assert_eq!(model.len(), frames as usize),
                    },
                    (true, true) => {
                        let (frame, sectors) = model.get_mut(&block).unwrap();
                        index.set_valid(index.first_sector(*frame) + sector, step as u32);
                        sectors.insert(sector, step as u32);
                    }
                    (true, false) => {
                        let (frame, _) = model.remove(&block).unwrap();
                        index.clear_valid(index.first_sector(frame), 1 << shift);
                        index.remove(frame);
                    }
                }
                prop_assert_eq!(index.used() as usize, model.len());
                for block in 0..60 {
                    prop_assert_eq!(index.find(BlockNo(block)), model.get(&block).map(|(frame, _)| *frame));
                }
                let valid: usize = model.values().map(|(_, s)| s.len()).sum();
                prop_assert_eq!(index.sectors_valid(), valid as u64);
                let holding = model.values().filter(|(_, s)| !s.is_empty()).count();
                prop_assert_eq!(index.blocks_holding_data(), holding as u64);
                for (frame, sectors) in model.values() {
                    for (sector, sum) in sectors {
                        prop_assert_eq!(index.sum(index.first_sector(*frame) + sector), *sum);
                    }
                }
            }
        }
    }

    #[test]
    fn low_frames_come_first() {
        let mut index = Index::new(4, 0);
        let frames: Vec<_> = (0..5).map(|b| index.insert(BlockNo(b * 77)).map(|f| f.0)).collect();
        assert_eq!(frames, [Some(0), Some(1), Some(2), Some(3), None]);
    }
}
