//! Computes exact curves for whole requests with Olken's LRU stack. For each sector, the
//! computation keeps the smallest cache size in which the sector is still valid.
//!
//! A block stays in an LRU cache of c blocks while its stack distances are at most c. For each
//! sector, the computation keeps the largest stack distance of the sector's block since the sector
//! became valid. The sector is still valid in all caches of at least that many blocks. A second
//! maximum, counted from the sector's last write, gives the smallest cache size in which the sector
//! is dirty in write-back. One pass over the trace thus gives the results of all sizes.
//!
//! The cache's content at the arrival of a request decides between hit and miss. The blocks of one
//! request do not evict each other. Discards and partial writes make sectors invalid and do not
//! count as uses of the block.

use anyhow::Result;
use hob_engine::units::SECTOR_BYTES;

use super::curves::{Curves, Totals};
use super::stack::{NEVER, Stack};
use super::steps::Steps;
use super::{Mode, SECTOR_SHIFT, key};
use hob_trace::{Op, Record};

/// A range of sectors in one block.
#[derive(Clone, Copy, Debug)]
struct Span {
    block: u64,
    /// First sector of the range inside the block.
    first: u32,
    count: u32,
}

/// A range of sectors in a block that the stack has numbered, and the position of these sectors in
/// the arrays of the state.
#[derive(Clone, Copy, Debug)]
struct Place {
    number: u32,
    first: usize,
    end: usize,
}

/// State of the computation of exact curves.
pub(super) struct Requests {
    /// Base-2 logarithm of the number of sectors in a block.
    shift: u32,
    mode: Mode,
    stack: Stack,
    /// Smallest cache size in which each sector is valid, in blocks.
    valid_from: Vec<u32>,
    /// Smallest cache size in which each sector is dirty, in blocks. Only in write-back.
    dirty_from: Vec<u32>,
    /// Smallest cache size in which any sector of a block is dirty, by block. Only in write-back.
    block_dirty_from: Vec<u32>,
    totals: Totals,
    read_hits: Steps,
    read_hit_bytes: Steps,
    read_valid_sectors: Steps,
    write_hits: Steps,
    absorbed_sectors: Steps,
    destages: Steps,
    /// Sector ranges of the current request.
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
        // Data that is dirty at the end of the trace is destaged.
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

    /// Handles the sectors that a write covers partly: dirty sectors are destaged first, and then
    /// all these sectors become invalid.
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

    /// Makes sectors of known blocks invalid, and remembers their ranges.
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

    /// Marks these sectors as clean.
    fn clean(&mut self, place: Place) {
        self.dirty_from[place.first..place.end].fill(NEVER);
        let block = self.sectors_of(place.number);
        let from = self.dirty_from[block].iter().copied().min().expect("blocks have sectors");
        self.block_dirty_from[place.number as usize] = from;
    }

    /// Finds the ranges of sectors in blocks that are about to be used.
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

    /// Updates the state of a block's sectors at a use of the block. Caches that were too small to
    /// keep the block since its last use have dropped its sectors and destaged the dirty ones.
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

    /// Marks the request's blocks as most recently used.
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

/// Returns the sectors that a request touches.
fn covered(record: &Record) -> (u64, u64) {
    let first = record.offset >> SECTOR_SHIFT;
    let end = record.offset.saturating_add(u64::from(record.len)).div_ceil(SECTOR_BYTES);
    (first, end.max(first))
}

/// Returns the sectors that a request covers completely. The range is empty if its end is not above
/// its start.
fn whole(record: &Record) -> (u64, u64) {
    let end = record.offset.saturating_add(u64::from(record.len));
    (record.offset.div_ceil(SECTOR_BYTES), end >> SECTOR_SHIFT)
}

/// Splits a range of sectors at block boundaries.
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
