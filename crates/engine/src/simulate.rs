//! Simulates a cache without time and without I/O, and counts hits, fills and their cost.
//!
//! The simulation uses the same directory as the daemon's caches. It answers each request as the
//! engine does when requests arrive one at a time and nothing fails. A test compares the simulation
//! with the engine request by request. The simulated cache is in write-through mode.

use crate::admission::{Admission, AdmissionEffect, Run};
use crate::chooser::{CacheAccess, Choice};
use crate::directory::{Directory, Placed, Refusal, whole_sectors};
use crate::flash_budget::limit::Limit;
use crate::flash_budget::{Allowance, Counts};
use crate::granularity::Fill;
use crate::outcome::Outcome;
use crate::policy::PolicyKind;
use crate::units::{BLOCK_BYTES_MAX, BLOCK_BYTES_MIN, BlockNo, FrameNo, SECTOR_BYTES};

/// Settings of a simulated cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SimConfig {
    /// Number of blocks of the cache, from 1 to 2³² − 2.
    pub blocks: u32,
    /// Size of a block in bytes: a power of two from 4 KiB to 1 MiB.
    pub block_bytes: u32,
    /// Replacement policy.
    pub policy: PolicyKind,
    /// Admission rule.
    pub admission: Admission,
    /// Fill granularity.
    pub fill: Fill,
}

/// Error for an invalid configuration: no block, or blocks of an unsupported size.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Unworkable;

/// Counts of requests and their cost.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SimStats {
    /// Number of read requests.
    pub reads: u64,
    /// Total bytes of all read requests.
    pub read_bytes: u64,
    /// Number of read requests whose sectors were all valid.
    pub read_hits: u64,
    /// Bytes of the read requests that hit.
    pub read_hit_bytes: u64,
    /// Total number of blocks that read requests touch. A block counts once for each request that
    /// touches it.
    pub read_blocks: u64,
    /// Number of touched blocks whose touched part was completely valid, whether or not the request
    /// hit.
    pub read_block_hits: u64,
    /// Number of read requests that missed although some of their sectors were valid.
    pub partial_misses: u64,
    /// Number of read requests that missed and filled less than their whole range.
    pub not_admitted: u64,
    /// Number of write requests.
    pub writes: u64,
    /// Total bytes of all write requests.
    pub write_bytes: u64,
    /// Number of write requests whose first block already had a frame.
    pub write_hits: u64,
    /// Bytes written to flash: fills and copies of writes.
    pub flash_write_bytes: u64,
    /// Bytes read from the backing in addition to those that guests read.
    pub extra_read_bytes: u64,
    /// Bytes that were not written to flash because of a flash write budget.
    pub budget_refused_bytes: u64,
    /// Number of blocks with data that were evicted.
    pub evictions: u64,
}

impl SimStats {
    /// Returns the hit ratio of reads, 0 to 1; 0 without reads.
    pub fn read_hit_ratio(&self) -> f64 {
        ratio(self.read_hits, self.reads)
    }

    /// Returns the hit ratio of read bytes, 0 to 1; 0 without reads.
    pub fn read_hit_byte_ratio(&self) -> f64 {
        ratio(self.read_hit_bytes, self.read_bytes)
    }

    /// Returns the hit ratio of read blocks, 0 to 1; 0 without reads. Simulators of block accesses report
    /// this ratio.
    pub fn read_block_hit_ratio(&self) -> f64 {
        ratio(self.read_block_hits, self.read_blocks)
    }

    /// Returns the number of requests that went to the backing: reads that missed, and every write.
    pub fn backing_ios(&self) -> u64 {
        self.reads - self.read_hits + self.writes
    }
}

fn ratio(part: u64, whole: u64) -> f64 {
    if whole == 0 { 0.0 } else { part as f64 / whole as f64 }
}

/// What the lookup of a request found in the simulated cache.
#[derive(Clone, Copy, Default)]
struct Found {
    /// Number of valid sectors.
    valid: u64,
    /// Number of blocks that the request touches.
    blocks: u64,
    /// Number of touched blocks whose touched part is completely valid.
    whole_blocks: u64,
}

/// A simulated cache. Offsets and lengths are in bytes, and offsets are below 2³² blocks.
pub struct CacheSim {
    config: SimConfig,
    directory: Directory,
    stats: SimStats,
    /// The cache's part of a flash write budget.
    allowance: Option<Allowance>,
    counts: Counts,
    /// Cache sectors of the current request's blocks. The memory is reused from call to call.
    found: Vec<Option<u64>>,
}

impl CacheSim {
    /// Creates an empty cache.
    pub fn new(config: &SimConfig) -> Result<CacheSim, Unworkable> {
        let SimConfig { blocks, block_bytes, policy, admission, fill } = *config;
        let bytes = u64::from(block_bytes);
        let sized = bytes.is_power_of_two() && (BLOCK_BYTES_MIN..=BLOCK_BYTES_MAX).contains(&bytes);
        if !sized || blocks == 0 || blocks == u32::MAX {
            return Err(Unworkable);
        }
        let block_shift = (bytes / SECTOR_BYTES).ilog2();
        let mut directory = Directory::new(blocks, block_shift, policy, admission);
        directory.set_fill(fill);
        Ok(CacheSim {
            config: *config,
            directory,
            stats: SimStats::default(),
            allowance: None,
            counts: Counts::default(),
            found: Vec::new(),
        })
    }

    /// Returns the counts since the simulated cache was created.
    pub fn stats(&self) -> SimStats {
        self.stats
    }

    /// Returns the policy and admission that an automatic cache uses, and the reasons.
    pub fn choice(&self) -> Option<Choice> {
        self.directory.choice()
    }

    /// Sets the cache's part of a flash write budget.
    pub fn allow_flash_writes(&mut self, allowance: Option<Allowance>) {
        self.allowance = allowance;
        self.directory.note_allowance(allowance.as_ref());
        self.limit_writes();
    }

    /// Returns the counts of the flash writes that count against a budget.
    pub fn flash_counts(&self) -> Counts {
        self.counts
    }

    /// Counts what the current request wrote, and sets the limit for the next one.
    fn count_writes(&mut self) {
        let Counts { clean, borrowed, refused, .. } = self.directory.charged();
        self.counts.written += clean;
        self.counts.clean += clean;
        self.counts.borrowed += borrowed;
        self.counts.refused += refused;
        self.stats.budget_refused_bytes += refused;
        self.limit_writes();
    }

    fn limit_writes(&mut self) {
        let counts = self.counts;
        self.directory.set_limit(self.allowance.map(|allowance| Limit::new(&allowance, counts)));
    }

    /// Returns the memory use of the cache's index, policy and admission, bytes.
    pub fn bytes(&self) -> u64 {
        self.directory.bytes()
    }

    /// Changes the number of segments of `segment_blocks` blocks each. The segments with the fewest
    /// blocks are removed first. Of full segments, the coldest are removed first. The blocks of the
    /// other segments stay in the cache, in their order of use. Returns the number of dropped
    /// blocks.
    ///
    /// # Panics
    /// Panics if the cache does not consist of whole segments, or if `segments` is 0 or too large.
    pub fn resize(&mut self, segment_blocks: u32, segments: u32) -> u64 {
        assert!(self.config.blocks.is_multiple_of(segment_blocks) && segments > 0);
        let coldest = self.directory.coldest_groups(segment_blocks, |_| false);
        let mut leaves = vec![false; coldest.len()];
        coldest.iter().take(leaves.len().saturating_sub(segments as usize)).for_each(|&i| leaves[i] = true);
        // New numbers of the remaining segments.
        let numbers: Vec<u32> = leaves
            .iter()
            .scan(0, |next, leaves| Some(std::mem::replace(next, *next + u32::from(!leaves))))
            .collect();
        self.config.blocks = segments.checked_mul(segment_blocks).expect("few enough blocks");
        let SimConfig { blocks, policy, admission, fill, .. } = self.config;
        let mut directory = Directory::new(blocks, self.directory.block_shift(), policy, admission);
        directory.set_fill(fill);
        let (mut kept, mut dropped) = (Vec::new(), 0);
        for (frame, heat) in self.directory.order() {
            let segment = (frame.0 / segment_blocks) as usize;
            if leaves[segment] {
                dropped += 1;
            } else {
                let to = numbers[segment] * segment_blocks + frame.0 % segment_blocks;
                kept.push((frame, FrameNo(to), heat));
            }
        }
        directory.adopt(&self.directory, kept, Vec::new());
        self.directory = directory;
        dropped
    }

    /// Reads the index entry of an offset that will be accessed soon, so that the CPU caches it.
    /// The call changes nothing. The caller must use the meaningless result, so that the read is
    /// not optimized away.
    #[inline]
    pub fn peek(&self, offset: u64) -> u32 {
        let span = self.directory.spans(offset / SECTOR_BYTES, offset / SECTOR_BYTES + 1).next();
        self.directory.index.peek(span.map_or(BlockNo(0), |span| span.block))
    }

    /// Handles a read of `len` ≥ 1 bytes.
    #[inline]
    pub fn read(&mut self, offset: u64, len: u64) -> Outcome {
        let (first, end) = (offset / SECTOR_BYTES, (offset + len).div_ceil(SECTOR_BYTES));
        let run = self.directory.observe(first, end, CacheAccess::Read);
        self.read_sectors((first, end), len, run)
    }

    /// Handles a read of the sectors `first..end` that is part of a sequential run of `run_bytes`
    /// bytes.
    pub(crate) fn read_of_run(&mut self, first: u64, end: u64, run_bytes: u64) {
        let run = self.directory.judge(run_bytes);
        self.read_sectors((first, end), (end - first) * SECTOR_BYTES, run);
    }

    #[inline]
    fn read_sectors(&mut self, (first, end): (u64, u64), len: u64, run: Run) -> Outcome {
        self.stats.reads += 1;
        self.stats.read_bytes += len;
        let Found { valid, blocks, whole_blocks } = self.look_up(first, end);
        self.stats.read_blocks += blocks;
        self.stats.read_block_hits += whole_blocks;
        if valid == end - first {
            self.stats.read_hits += 1;
            self.stats.read_hit_bytes += len;
            let found = self.found.iter().map(|sector| sector.expect("hits were found"));
            found.for_each(|sector| self.directory.touch(sector, run));
            return Outcome::Hit;
        }
        self.stats.partial_misses += u64::from(valid > 0);
        let extra = self.directory.extra_ranges(first, end, run, u64::MAX);
        let locked = [(first, end), extra[0], extra[1]];
        let before = self.stats.flash_write_bytes;
        let filled = self.fill((first, end), &locked, (run, AdmissionEffect::Clean));
        // A miss that writes nothing to flash releases its range immediately.
        let is_filling = self.stats.flash_write_bytes > before;
        self.fill_extra(extra, if is_filling { &locked } else { &locked[1..] });
        if self.allowance.is_some() {
            self.count_writes();
        }
        match filled {
            Err(refusal) => {
                self.stats.not_admitted += 1;
                refusal.into()
            }
            Ok(()) if valid > 0 => Outcome::PartialMiss,
            Ok(()) => Outcome::MissFilled,
        }
    }

    /// Fills sectors around a read miss. Blocks in the ranges `locked` must not be evicted.
    fn fill_extra(&mut self, ranges: [(u64, u64); 2], locked: &[(u64, u64)]) {
        let CacheSim { directory, stats, .. } = self;
        let is_busy = |first, end| is_locked(locked, first, end);
        for (from, to) in ranges {
            if from < to {
                stats.extra_read_bytes += (to - from) * SECTOR_BYTES;
            }
            for span in directory.spans(from, to) {
                let found = directory.find(span);
                let Ok(Placed { sector, evicted }) = directory.place_extra(span, found, is_busy) else {
                    continue;
                };
                stats.evictions += evicted;
                stats.flash_write_bytes += span.count * SECTOR_BYTES;
                directory.charge_extra(span.count);
                (sector..sector + span.count).for_each(|sector| directory.index.set_valid(sector, 0));
            }
        }
    }

    /// Handles a write of `len` ≥ 1 bytes.
    #[inline]
    pub fn write(&mut self, offset: u64, len: u64) -> Outcome {
        let (first, end) = (offset / SECTOR_BYTES, (offset + len).div_ceil(SECTOR_BYTES));
        let run = self.directory.observe(first, end, CacheAccess::Write);
        self.write_sectors((first, end), (offset, len), (run, AdmissionEffect::CleanWrite))
    }

    /// Handles a write of the sectors `first..end` that is part of a sequential run of `run_bytes`
    /// bytes.
    pub(crate) fn write_of_run(&mut self, first: u64, end: u64, run_bytes: u64, effect: AdmissionEffect) {
        let run = self.directory.judge(run_bytes);
        let bytes = (first * SECTOR_BYTES, (end - first) * SECTOR_BYTES);
        self.write_sectors((first, end), bytes, (run, effect));
    }

    /// Admits all dirty data, as a cache with the admission `auto` does.
    pub(crate) fn admit_dirty(&mut self) {
        self.directory.admit_dirty();
    }

    /// Handles a write of the sectors `first..end` that only invalidates cached data.
    pub(crate) fn write_around(&mut self, first: u64, end: u64) {
        self.stats.writes += 1;
        self.stats.write_bytes += (end - first) * SECTOR_BYTES;
        self.directory.invalidate(first, end);
    }

    #[inline]
    fn write_sectors(
        &mut self,
        (first, end): (u64, u64),
        (offset, len): (u64, u64),
        admission: (Run, AdmissionEffect),
    ) -> Outcome {
        self.stats.writes += 1;
        self.stats.write_bytes += len;
        let whole = self.merged_sectors(offset, len);
        self.look_up(first, end);
        self.stats.write_hits += u64::from(self.found[0].is_some());
        for (span, sector) in self.directory.spans(first, end).zip(&self.found) {
            if let Some(sector) = sector {
                self.directory.index.clear_valid(*sector, span.count);
            }
        }
        if whole != (first, end) {
            self.look_up(whole.0, whole.1);
        }
        let filled = self.fill(whole, &[(first, end)], admission);
        if self.allowance.is_some() {
            self.count_writes();
        }
        match filled {
            Ok(()) if whole == (first, end) => Outcome::WriteCopied,
            _ => Outcome::WriteNotCopied,
        }
    }

    /// Returns the sectors (`first..end`) whose complete content is known after a write: either the
    /// write covers the whole sector, or the cache has the bytes that the write lacks.
    #[inline]
    fn merged_sectors(&mut self, offset: u64, len: u64) -> (u64, u64) {
        let (first, end) = (offset / SECTOR_BYTES, (offset + len).div_ceil(SECTOR_BYTES));
        let (whole_first, whole_end) = whole_sectors(offset, len);
        let head = if first < whole_first && self.look_up(first, first + 1).valid == 1 {
            first
        } else {
            whole_first
        };
        let tail = if end > whole_end && self.look_up(end - 1, end).valid == 1 { end } else { whole_end };
        (head, head.max(tail))
    }

    /// Handles a discard or zeroing of `len` ≥ 1 bytes.
    pub fn discard(&mut self, offset: u64, len: u64) -> Outcome {
        self.directory.invalidate(offset / SECTOR_BYTES, (offset + len).div_ceil(SECTOR_BYTES));
        Outcome::BypassZeroing
    }

    /// Records the cache sectors of the blocks of sectors `first..end`, in order, and counts the
    /// valid sectors.
    #[inline]
    fn look_up(&mut self, first: u64, end: u64) -> Found {
        self.found.clear();
        let mut found = Found::default();
        for span in self.directory.spans(first, end) {
            let sector = self.directory.find(span);
            let valid = sector.map_or(0, |sector| self.directory.index.count_valid(sector, span.count));
            found.valid += valid;
            found.blocks += 1;
            found.whole_blocks += u64::from(valid == span.count);
            self.found.push(sector);
        }
        found
    }

    /// Fills the sectors that were looked up for a request. Blocks in the ranges `locked` must not
    /// be evicted.
    #[inline]
    fn fill(
        &mut self,
        (first, end): (u64, u64),
        locked: &[(u64, u64)],
        admission: (Run, AdmissionEffect),
    ) -> Result<(), Refusal> {
        let is_busy = |first, end| is_locked(locked, first, end);
        let CacheSim { directory, stats, found, .. } = self;
        let mut result = Ok(());
        for (span, sector) in directory.spans(first, end).zip(found) {
            let brought = if sector.is_none() && result == Err(Refusal::NoBlock) {
                Err(Refusal::NoBlock)
            } else {
                directory.bring(span, *sector, admission, is_busy)
            };
            match brought {
                Ok(Placed { sector, evicted }) => {
                    stats.evictions += evicted;
                    let missing = span.count - directory.index.count_valid(sector, span.count);
                    stats.flash_write_bytes += missing * SECTOR_BYTES;
                    directory.charge(missing);
                    (sector..sector + span.count).for_each(|sector| directory.index.set_valid(sector, 0));
                }
                Err(refusal) => result = Err(refusal),
            }
        }
        result
    }
}

/// Returns true if any of the ranges has one of the sectors `first..end`.
fn is_locked(ranges: &[(u64, u64)], first: u64, end: u64) -> bool {
    ranges.iter().any(|(from, to)| from < to && first < *to && *from < end)
}
