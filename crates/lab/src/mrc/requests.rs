//! Whole requests against sectors: Olken's stack, and for each sector the smallest cache that still has it.
//!
//! A block is in an LRU cache of c blocks as long as each of its stack distances is at most c. So a sector
//! that was made valid is still valid in exactly the caches that are at least as large as the largest stack
//! distance of its block since then. That maximum is kept for each sector. A second one since its last
//! write tells from which size on it is dirty in write-back. One pass then gives every size at once, as the
//! stack does for whole blocks.
//!
//! A request is judged by the cache's content when it arrives, and its own blocks do not evict each other.
//! Discards and partly covered sectors make sectors invalid; they use no block.

use anyhow::Result;
use hob_engine::units::SECTOR_BYTES;

use super::curves::{Curves, Totals};
use super::stack::{NEVER, Stack};
use super::steps::Steps;
use super::{Mode, SECTOR_SHIFT, key};
use crate::trace::{Op, Record};

/// A part of one block.
#[derive(Clone, Copy, Debug)]
struct Span {
    block: u64,
    /// First sector inside the block.
    first: u32,
    count: u32,
}

/// A span whose block has a number, and the position of its sectors in the arrays.
#[derive(Clone, Copy, Debug)]
struct Place {
    number: u32,
    first: usize,
    end: usize,
}

/// Computes the curves.
pub(super) struct Requests {
    /// log2 of the sectors in a block.
    shift: u32,
    mode: Mode,
    stack: Stack,
    /// Per sector: the smallest cache in which it is valid.
    valid_from: Vec<u32>,
    /// Per sector, in write-back: the smallest cache in which it is dirty.
    dirty_from: Vec<u32>,
    /// Per block, in write-back: the smallest cache in which any of its sectors is dirty.
    block_dirty_from: Vec<u32>,
    totals: Totals,
    read_hits: Steps,
    read_hit_bytes: Steps,
    read_valid_sectors: Steps,
    write_hits: Steps,
    absorbed_sectors: Steps,
    destages: Steps,
    /// The request's places.
    places: Vec<Place>,
}

impl Requests {
    /// Creates the state for blocks of `1 << shift` sectors.
    pub(super) fn new(shift: u32, mode: Mode) -> Self {
        Requests {
            shift,
            mode,
            stack: Stack::new(shift),
            valid_from: Vec::new(),
            dirty_from: Vec::new(),
            block_dirty_from: Vec::new(),
            totals: Totals::default(),
            read_hits: Steps::default(),
            read_hit_bytes: Steps::default(),
            read_valid_sectors: Steps::default(),
            write_hits: Steps::default(),
            absorbed_sectors: Steps::default(),
            destages: Steps::default(),
            places: Vec::new(),
        }
    }

    pub(super) fn add(&mut self, record: &Record) -> Result<()> {
        match (record.op, self.mode) {
            (Op::Read, _) => self.read(record),
            (Op::Write, mode) => {
                self.totals.writes += 1;
                self.totals.write_bytes += u64::from(record.len);
                match mode {
                    Mode::WriteAround => self.invalidate(record.disk, covered(record)),
                    Mode::WriteThrough | Mode::WriteBack => self.write(record)?,
                }
                Ok(())
            }
            (Op::Discard, _) => {
                self.discard(record);
                Ok(())
            }
            (Op::Flush, _) => Ok(()),
        }
    }

    pub(super) fn finish(mut self) -> Curves {
        // Data that is still dirty is destaged.
        self.block_dirty_from.iter().for_each(|from| self.destages.add(*from, 1));
        self.totals.blocks = self.stack.len();
        Curves {
            block_bytes: SECTOR_BYTES << self.shift,
            mode: self.mode,
            totals: self.totals,
            read_hits: self.read_hits.finish(),
            read_hit_bytes: self.read_hit_bytes.finish(),
            read_valid_sectors: self.read_valid_sectors.finish(),
            write_hits: self.write_hits.finish(),
            absorbed_sectors: self.absorbed_sectors.finish(),
            destages: self.destages.finish(),
        }
    }

    fn read(&mut self, record: &Record) -> Result<()> {
        let sectors = covered(record);
        self.enter(record.disk, sectors)?;
        self.totals.reads += 1;
        self.totals.read_bytes += u64::from(record.len);
        self.totals.read_sectors += sectors.1 - sectors.0;
        let mut hit_from = 1;
        for place in &self.places {
            for from in &mut self.valid_from[place.first..place.end] {
                hit_from = hit_from.max(*from);
                self.read_valid_sectors.add(*from, 1);
                *from = 1;
            }
        }
        self.read_hits.add(hit_from, 1);
        self.read_hit_bytes.add(hit_from, i64::from(record.len));
        self.touch();
        Ok(())
    }

    fn write(&mut self, record: &Record) -> Result<()> {
        let (first, end) = covered(record);
        let (whole_first, whole_end) = whole(record);
        let edges = [(first, whole_first.min(end)), (whole_end.max(whole_first), end)];
        for edge in edges.into_iter().filter(|(first, end)| first < end) {
            self.write_parts(record.disk, edge);
        }
        let whole_sectors = whole_end.saturating_sub(whole_first);
        self.totals.write_sectors += whole_sectors;
        self.totals.write_part_bytes += u64::from(record.len) - whole_sectors * SECTOR_BYTES;
        if whole_sectors == 0 {
            return Ok(());
        }
        self.enter(record.disk, (whole_first, whole_end))?;
        let mut hit_from = 1;
        for place in &self.places {
            hit_from = hit_from.max(self.stack.distance(place.number));
            self.valid_from[place.first..place.end].fill(1);
            if self.mode == Mode::WriteBack {
                for from in &mut self.dirty_from[place.first..place.end] {
                    self.absorbed_sectors.add(*from, 1);
                    *from = 1;
                }
                self.block_dirty_from[place.number as usize] = 1;
            }
        }
        self.write_hits.add(hit_from, 1);
        self.touch();
        Ok(())
    }

    /// Sectors that a write covers in part become invalid; one that is dirty is destaged first.
    fn write_parts(&mut self, disk: u16, sectors: (u64, u64)) {
        self.totals.write_parts += sectors.1 - sectors.0;
        self.invalidate(disk, sectors);
        if self.mode == Mode::WriteBack {
            for place in std::mem::take(&mut self.places) {
                for sector in place.first..place.end {
                    self.destages.add(self.dirty_from[sector], 1);
                }
                self.clean(place);
            }
        }
    }

    fn discard(&mut self, record: &Record) {
        self.invalidate(record.disk, covered(record));
        if self.mode == Mode::WriteBack {
            for place in std::mem::take(&mut self.places) {
                for sector in place.first..place.end {
                    self.absorbed_sectors.add(self.dirty_from[sector], 1);
                }
                self.clean(place);
            }
        }
    }

    /// Finds the places of sectors as far as their blocks were seen, and makes them invalid.
    fn invalidate(&mut self, disk: u16, sectors: (u64, u64)) {
        self.places.clear();
        for span in spans(self.shift, sectors) {
            if let Some(number) = self.stack.find(key(disk, span.block)) {
                let place = self.place(number, span);
                self.age(number);
                self.valid_from[place.first..place.end].fill(NEVER);
                self.places.push(place);
            }
        }
    }

    /// These sectors are dirty no more.
    fn clean(&mut self, place: Place) {
        self.dirty_from[place.first..place.end].fill(NEVER);
        let block = self.sectors_of(place.number);
        let from = self.dirty_from[block].iter().copied().min().expect("blocks have sectors");
        self.block_dirty_from[place.number as usize] = from;
    }

    /// Finds the places of sectors, for blocks that are about to be used.
    fn enter(&mut self, disk: u16, sectors: (u64, u64)) -> Result<()> {
        self.places.clear();
        for span in spans(self.shift, sectors) {
            let number = self.stack.enter(key(disk, span.block))?;
            let sectors = (number as usize + 1) << self.shift;
            if sectors > self.valid_from.len() {
                self.valid_from.resize(sectors, NEVER);
                if self.mode == Mode::WriteBack {
                    self.dirty_from.resize(sectors, NEVER);
                    self.block_dirty_from.push(NEVER);
                }
            }
            self.age(number);
            self.places.push(self.place(number, span));
        }
        Ok(())
    }

    /// Caches too small to hold the block by now have lost its sectors, and destaged those that were dirty.
    fn age(&mut self, number: u32) {
        let distance = self.stack.distance(number);
        let block = self.sectors_of(number);
        self.valid_from[block.clone()].iter_mut().for_each(|from| *from = (*from).max(distance));
        if self.mode == Mode::WriteBack {
            let dirty_from = &mut self.block_dirty_from[number as usize];
            if *dirty_from < distance {
                self.destages.add(*dirty_from, 1);
                self.destages.add(distance, -1);
                *dirty_from = distance;
                self.dirty_from[block].iter_mut().for_each(|from| *from = (*from).max(distance));
            }
        }
    }

    /// The request's blocks become the most recently used ones.
    fn touch(&mut self) {
        self.places.iter().for_each(|place| self.stack.touch(place.number));
    }

    fn sectors_of(&self, number: u32) -> std::ops::Range<usize> {
        (number as usize) << self.shift..(number as usize + 1) << self.shift
    }

    fn place(&self, number: u32, span: Span) -> Place {
        let first = ((number as usize) << self.shift) + span.first as usize;
        Place { number, first, end: first + span.count as usize }
    }
}

/// The sectors that a request touches.
fn covered(record: &Record) -> (u64, u64) {
    let first = record.offset >> SECTOR_SHIFT;
    let end = record.offset.saturating_add(u64::from(record.len)).div_ceil(SECTOR_BYTES);
    (first, end.max(first))
}

/// The sectors that a request covers whole; none when the end is not above the start.
fn whole(record: &Record) -> (u64, u64) {
    let end = record.offset.saturating_add(u64::from(record.len));
    (record.offset.div_ceil(SECTOR_BYTES), end >> SECTOR_SHIFT)
}

/// Splits sectors at block boundaries.
fn spans(shift: u32, (first, end): (u64, u64)) -> impl Iterator<Item = Span> {
    let mut at = first;
    std::iter::from_fn(move || {
        (at < end).then(|| {
            let block = at >> shift;
            let stop = end.min((block + 1) << shift);
            let span = Span { block, first: (at - (block << shift)) as u32, count: (stop - at) as u32 };
            at = stop;
            span
        })
    })
}
