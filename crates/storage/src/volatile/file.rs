//! A file with a write cache that a kill discards.
//!
//! Written data stays in memory until a flush, in *unflushed units* of 512 bytes. Reads return this
//! data. A flush writes all unflushed units to the file, in pieces and in any order. A durable
//! write writes only its own range to the file. In addition, each write sends random unflushed
//! units to the file immediately: all units of the write, some of them, or none, and sometimes
//! units of older writes. So a kill leaves any subset of the unflushed data, torn at 512 bytes.
//!
//! "In the file" means in the kernel: a kill does not affect data there, and the tests never cut
//! the real power.

use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::sync::Mutex;

use hob_engine::io::Durability;
use rustix::fs::FallocateFlags;

use super::{Flushes, SimRng, lock, step};

/// Size of a device's atomic write, bytes.
pub(crate) const UNIT_BYTES: u64 = 512;

const PAGE_BYTES: u64 = 4096;

const PAGE_UNITS: u64 = PAGE_BYTES / UNIT_BYTES;

/// Maximum number of unflushed units per file. If there are more, all of them are written to the
/// file, as a device does when its cache is full.
const HELD_UNITS_MAX: usize = (64 << 20) / UNIT_BYTES as usize;

/// Maximum number of pages from which a write chooses older unflushed units to write to the file
/// too.
const STRAY_PAGES: usize = 32;

/// The unflushed units of one 4 KiB page of the file.
struct Page {
    /// One bit per 512-byte unit that is in the write cache and not in the file yet.
    held: u8,
    bytes: Box<[u8; PAGE_BYTES as usize]>,
}

struct Cache {
    /// Pages with unflushed units, by page number.
    pages: BTreeMap<u64, Page>,
    held: usize,
    rng: SimRng,
}

/// A file and its write cache, which a kill discards.
pub(crate) struct VolatileFile {
    file: File,
    flushes: Flushes,
    cache: Mutex<Cache>,
}

impl std::fmt::Debug for VolatileFile {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("VolatileFile").field("file", &self.file).finish_non_exhaustive()
    }
}

impl VolatileFile {
    /// Creates a volatile file. `file` must be readable and writable at any offset and length.
    pub(crate) fn new(file: File, seed: u64, flushes: Flushes) -> VolatileFile {
        let cache = Cache { pages: BTreeMap::new(), held: 0, rng: SimRng::new(seed) };
        VolatileFile { file, flushes, cache: Mutex::new(cache) }
    }

    /// Reads the data that was written last.
    ///
    /// # Errors
    /// Returns the file's error, or `UnexpectedEof` if the range extends beyond the end of the
    /// file.
    pub(crate) fn read(&self, offset: u64, bytes: &mut [u8]) -> io::Result<()> {
        step();
        let cache = lock(&self.cache);
        self.file.read_exact_at(bytes, offset)?;
        cache.patch(offset, bytes);
        Ok(())
    }

    /// Writes `bytes`. A durable write is completely in the file when this function returns. After
    /// a volatile write, the file has all units of the write, some of them, or none. The write
    /// cache has the other units. If flushes are ignored, every write is volatile.
    ///
    /// # Errors
    /// Returns the file's error.
    pub(crate) fn write(&self, offset: u64, bytes: &[u8], durability: Durability) -> io::Result<()> {
        step();
        let mut guard = lock(&self.cache);
        let cache = &mut *guard;
        cache.hold(&self.file, offset, bytes)?;
        let units = offset / UNIT_BYTES..(offset + bytes.len() as u64).div_ceil(UNIT_BYTES);
        if durability == Durability::Durable && self.flushes == Flushes::Honest {
            return cache.let_through(&self.file, units.collect());
        }
        let lucky = cache.lucky(units);
        cache.let_through(&self.file, lucky)?;
        if cache.held > HELD_UNITS_MAX {
            let all = cache.all();
            cache.let_through(&self.file, all)?;
        }
        Ok(())
    }

    /// Writes all unflushed units to the file.
    ///
    /// # Errors
    /// Returns the error of the file.
    pub(crate) fn flush(&self) -> io::Result<()> {
        step();
        match self.flushes {
            Flushes::Honest => self.settle(),
            Flushes::Ignored => Ok(()),
        }
    }

    /// Writes all unflushed data to the file, even if [`VolatileFile::flush`] ignores flushes.
    ///
    /// # Errors
    /// Returns the file's error.
    pub(crate) fn settle(&self) -> io::Result<()> {
        let mut cache = lock(&self.cache);
        let all = cache.all();
        cache.let_through(&self.file, all)
    }

    /// Calls fallocate(2). The effect of fallocate is in the file immediately, as on some devices.
    ///
    /// # Errors
    /// Returns the file's error. After an error, the units stay unflushed.
    pub(crate) fn fallocate(&self, mode: FallocateFlags, offset: u64, len: u64) -> io::Result<()> {
        step();
        let mut cache = lock(&self.cache);
        // The range may cover the first and the last unit in part.
        let end = offset + len;
        let edges = [offset / UNIT_BYTES, end / UNIT_BYTES];
        cache.let_through(&self.file, edges.to_vec())?;
        rustix::fs::fallocate(&self.file, mode, offset, len)?;
        if mode.intersects(FallocateFlags::PUNCH_HOLE | FallocateFlags::ZERO_RANGE) {
            cache.forget(offset.div_ceil(UNIT_BYTES)..end / UNIT_BYTES);
        }
        Ok(())
    }

    /// Returns the number of unflushed units, which a kill would lose.
    #[cfg(test)]
    pub(crate) fn held(&self) -> usize {
        lock(&self.cache).held
    }

    /// Simulates the kill: discards all unflushed units.
    #[cfg(test)]
    pub(crate) fn cut(&self) {
        let mut cache = lock(&self.cache);
        cache.pages.clear();
        cache.held = 0;
    }
}

impl Cache {
    /// Overwrites parts of `bytes`, which were read from the file at `offset`, with newer data in
    /// the write cache.
    fn patch(&self, offset: u64, bytes: &mut [u8]) {
        let end = offset + bytes.len() as u64;
        for (number, page) in self.pages.range(offset / PAGE_BYTES..end.div_ceil(PAGE_BYTES)) {
            for unit in (0..PAGE_UNITS).filter(|unit| page.held & 1 << unit != 0) {
                let start = number * PAGE_BYTES + unit * UNIT_BYTES;
                let (from, to) = (start.max(offset), (start + UNIT_BYTES).min(end));
                if from < to {
                    let source = &page.bytes[(from % PAGE_BYTES) as usize..][..(to - from) as usize];
                    bytes[(from - offset) as usize..(to - offset) as usize].copy_from_slice(source);
                }
            }
        }
    }

    /// Adds a write to the cache, as unflushed units.
    fn hold(&mut self, file: &File, offset: u64, bytes: &[u8]) -> io::Result<()> {
        let end = offset + bytes.len() as u64;
        let mut at = offset;
        while at < end {
            let start = at / UNIT_BYTES * UNIT_BYTES;
            let to = (start + UNIT_BYTES).min(end);
            let mut unit = [0; UNIT_BYTES as usize];
            if to - at < UNIT_BYTES {
                file.read_exact_at(&mut unit, start)?;
                self.patch(start, &mut unit);
            }
            unit[(at - start) as usize..(to - start) as usize]
                .copy_from_slice(&bytes[(at - offset) as usize..(to - offset) as usize]);
            self.keep(start / UNIT_BYTES, &unit);
            at = to;
        }
        Ok(())
    }

    fn keep(&mut self, unit: u64, bytes: &[u8; UNIT_BYTES as usize]) {
        let (number, bit) = (unit / PAGE_UNITS, 1 << (unit % PAGE_UNITS));
        let page = self.pages.entry(number).or_insert_with(|| Page { held: 0, bytes: Box::new([0; 4096]) });
        self.held += usize::from(page.held & bit == 0);
        page.held |= bit;
        page.bytes[(unit % PAGE_UNITS * UNIT_BYTES) as usize..][..UNIT_BYTES as usize].copy_from_slice(bytes);
    }

    fn is_held(&self, unit: u64) -> bool {
        self.pages.get(&(unit / PAGE_UNITS)).is_some_and(|page| page.held & 1 << (unit % PAGE_UNITS) != 0)
    }

    fn forget(&mut self, units: Range<u64>) {
        for unit in units.start / PAGE_UNITS..units.end.div_ceil(PAGE_UNITS) {
            for unit in (unit * PAGE_UNITS..(unit + 1) * PAGE_UNITS).filter(|unit| units.contains(unit)) {
                self.drop_unit(unit);
            }
        }
    }

    fn drop_unit(&mut self, unit: u64) {
        let (number, bit) = (unit / PAGE_UNITS, 1 << (unit % PAGE_UNITS));
        let Some(page) = self.pages.get_mut(&number) else { return };
        self.held -= usize::from(page.held & bit != 0);
        page.held &= !bit;
        if page.held == 0 {
            self.pages.remove(&number);
        }
    }

    /// Returns the numbers of all unflushed units.
    fn all(&self) -> Vec<u64> {
        let units = |(number, _): (&u64, &Page)| number * PAGE_UNITS..(number + 1) * PAGE_UNITS;
        self.pages.iter().flat_map(units).filter(|unit| self.is_held(*unit)).collect()
    }

    /// Chooses at random which units go to the file immediately, because a real device may write
    /// any cached unit before a flush. `written` are the units of the current write: all, some or
    /// none of them go to the file. Sometimes other units go too.
    fn lucky(&mut self, written: Range<u64>) -> Vec<u64> {
        let mut lucky: Vec<u64> = match self.rng.below(8) {
            0 => written.collect(),
            1 => written.filter(|_| self.rng.once_in(2)).collect(),
            _ => Vec::new(),
        };
        if self.rng.once_in(16) {
            lucky.extend(self.strays());
        }
        lucky
    }

    /// Chooses random unflushed units, of any write, that are written to the file immediately.
    fn strays(&mut self) -> Vec<u64> {
        let Some((&last, _)) = self.pages.last_key_value() else { return Vec::new() };
        let from = self.rng.below(last as usize + 1) as u64;
        let numbers: Vec<u64> =
            self.pages.range(from..).take(STRAY_PAGES).map(|(number, _)| *number).collect();
        let units = numbers.into_iter().flat_map(|number| number * PAGE_UNITS..(number + 1) * PAGE_UNITS);
        units.filter(|_| self.rng.once_in(2)).collect()
    }

    /// Writes those of `units` that are unflushed to the file, in pieces, in any order.
    fn let_through(&mut self, file: &File, mut units: Vec<u64>) -> io::Result<()> {
        units.sort_unstable();
        units.dedup();
        let mut pieces: Vec<Range<u64>> = Vec::new();
        for unit in units {
            if !self.is_held(unit) {
                continue;
            }
            // Most neighbours stay together, as on a device; some are torn.
            match pieces.last_mut() {
                Some(piece) if piece.end == unit && unit - piece.start < 128 && !self.rng.once_in(32) => {
                    piece.end += 1;
                }
                _ => pieces.push(unit..unit + 1),
            }
        }
        self.rng.shuffle(&mut pieces);
        for piece in pieces {
            step();
            let mut bytes = vec![0; ((piece.end - piece.start) * UNIT_BYTES) as usize];
            self.patch(piece.start * UNIT_BYTES, &mut bytes);
            file.write_all_at(&bytes, piece.start * UNIT_BYTES)?;
            piece.for_each(|unit| self.drop_unit(unit));
        }
        Ok(())
    }
}
