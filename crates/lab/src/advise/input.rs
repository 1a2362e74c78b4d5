//! Input of the advice: the trace's requests in memory in one address space, and a sample of the
//! requests.
//!
//! Requests stay in memory because they are used many times. If the trace has too many requests,
//! the advice uses only the first ones and says so. If a trace has several disks or addresses
//! beyond 4 TiB, the touched chunks of 1 MiB are renumbered without gaps, in order. Renumbering
//! does not affect caches, but it shortens seeks of the backing.
//!
//! The *sample* consists of 256 KiB regions, chosen by a hash of the region's position. The
//! sampling method is spatially hashed sampling (Waldspurger et al., "Efficient MRC construction
//! with SHARDS", USENIX FAST 2015). A request inside one region is sampled completely or not at
//! all. So sampling splits no request into a hit and a miss, at any block size up to 256 KiB. A
//! cache that is smaller by the sampling rate represents the real cache. If the sample by chance
//! has too many or too few hot regions, its number of reads differs from the number that the
//! sampling rate suggests. As in SHARDS-adj, the advice counts the difference as hits.

use std::borrow::Cow;
use std::collections::BTreeSet;

use anyhow::{Result, ensure};
use hob_engine::REQUEST_BYTES_MAX;
use hob_engine::units::SECTOR_BYTES;

use crate::prng::splitmix64;
use hob_trace::blocks::Blocks;
use hob_trace::profile::{Profile, Profiler};
use hob_trace::{Op, Record};

/// Traces with addresses above this number of bytes are renumbered.
const SPAN_BYTES_MAX: u64 = 4 << 40;
/// Base-2 logarithm of the chunk size. Renumbering moves whole chunks, and a chunk is at least as
/// large as any block.
const CHUNK_SHIFT: u32 = 20;
/// Size of a sampled region, bytes. The advice considers block sizes up to this size.
pub(super) const REGION_BYTES: u64 = 256 << 10;
/// Minimum number of regions in the sample of the advice.
const REGIONS_MIN: usize = 16;
/// Number of regions below which the results of a sample are inaccurate.
const REGIONS_FEW: usize = 128;
/// Factor by which a sample with too few regions is enlarged.
const SAMPLE_ENLARGED: u64 = 2;
/// Number of records per in-memory block of a trace.
const RECORDS_A_BLOCK: usize = 1 << 13;

/// Collects the requests of a trace.
#[derive(Debug)]
pub struct Material {
    records: Vec<Record>,
    requests_max: usize,
    left_out: u64,
    profiler: Profiler,
}

/// The collected trace.
#[derive(Debug)]
pub(crate) struct CollectedTrace {
    pub(crate) records: Vec<Record>,
    pub(crate) profile: Profile,
    /// Number of requests that were left out because the trace has more than the maximum.
    pub(crate) left_out: u64,
    /// End of the last request, rounded up to 1 MiB, bytes.
    pub(crate) span_bytes: u64,
    /// True if the addresses were renumbered.
    pub(crate) is_moved: bool,
}

impl Material {
    /// Creates an empty collection of at most `requests_max` requests of 24 bytes each. Memory is
    /// allocated as needed.
    pub fn new(requests_max: usize) -> Material {
        Material { records: Vec::new(), requests_max, left_out: 0, profiler: Profiler::default() }
    }

    /// Adds the next request, in order of time. Requests above the maximum are only counted.
    pub fn add(&mut self, record: &Record) {
        if self.records.len() == self.requests_max {
            self.left_out += 1;
            return;
        }
        self.profiler.add(record);
        self.records.push(*record);
    }

    pub(crate) fn finish(self) -> Result<CollectedTrace> {
        let Material { mut records, left_out, profiler, .. } = self;
        let profile = profiler.finish();
        ensure!(
            profile.reads + profile.writes > 0,
            "the trace has no read and no write: there is nothing to advise on"
        );
        let end = |record: &Record| record.offset + u64::from(record.len);
        let is_moved = profile.disks > 1 || records.iter().map(end).max() > Some(SPAN_BYTES_MAX);
        if is_moved {
            move_together(&mut records)?;
        }
        records.iter_mut().for_each(|record| record.disk = 0);
        let last = records.iter().map(end).max().unwrap_or(0);
        let span_bytes = last.next_multiple_of(1 << CHUNK_SHIFT).max(1 << CHUNK_SHIFT);
        Ok(CollectedTrace { records, profile, left_out, span_bytes, is_moved })
    }
}

/// Returns the chunks that a request touches, numbered across all disks.
fn chunks(record: &Record) -> std::ops::Range<u64> {
    let disk = u64::from(record.disk) << (64 - CHUNK_SHIFT);
    let end = (record.offset + u64::from(record.len)).div_ceil(1 << CHUNK_SHIFT);
    disk | (record.offset >> CHUNK_SHIFT)..disk | end
}

fn move_together(records: &mut [Record]) -> Result<()> {
    let chunks_max = (SPAN_BYTES_MAX >> CHUNK_SHIFT) as usize;
    let mut known: Vec<u64> = Vec::new();
    let mut sorted = 0;
    for record in records.iter() {
        let new = chunks(record).filter(|chunk| known.last() != Some(chunk));
        let new: Vec<u64> = new.collect();
        known.extend(new);
        // Sorting only after the size has doubled keeps memory proportional to the number of
        // distinct chunks.
        if known.len() > 2 * sorted + (1 << 20) {
            known.sort_unstable();
            known.dedup();
            sorted = known.len();
            ensure!(
                sorted <= chunks_max,
                "the trace is spread over more than 4 TiB; take one disk of it with --disk"
            );
        }
    }
    known.sort_unstable();
    known.dedup();
    ensure!(
        known.len() <= chunks_max,
        "the trace is spread over more than 4 TiB; take one disk of it with --disk"
    );
    for record in records.iter_mut().filter(|record| record.len > 0) {
        let first = chunks(record).start;
        let place = known.binary_search(&first).expect("every chunk is known") as u64;
        record.offset = (place << CHUNK_SHIFT) | (record.offset & ((1 << CHUNK_SHIFT) - 1));
    }
    Ok(())
}

/// A part of the trace that represents the whole trace.
#[derive(Clone, Debug)]
pub(super) struct Sample<'a> {
    pub(super) records: Cow<'a, [Record]>,
    /// Share of the regions that the sample has; 1 for the whole trace.
    pub(super) rate: f64,
    /// Number of reads in the sample, divided by the number expected from the rate.
    pub(super) correction: f64,
}

impl CollectedTrace {
    pub(super) fn whole(&self) -> Sample<'_> {
        Sample { records: Cow::Borrowed(&self.records), rate: 1.0, correction: 1.0 }
    }

    /// Returns a sample that touches about `touches_max` sectors at most, or more if it would have
    /// fewer than [`REGIONS_MIN`] regions.
    pub(super) fn sample_of_many_regions(&self, touches_max: u64) -> Sample<'_> {
        let mut touches_max = touches_max.max(1);
        loop {
            let sample = self.sample(touches_max);
            if sample.rate == 1.0 || sample.regions(REGIONS_MIN) == REGIONS_MIN {
                return sample;
            }
            touches_max = touches_max.saturating_mul(SAMPLE_ENLARGED);
        }
    }

    /// Returns a sample that touches about `touches_max` sectors at most.
    pub(super) fn sample(&self, touches_max: u64) -> Sample<'_> {
        let touches = self.profile.footprint.touches;
        if touches <= touches_max {
            return self.whole();
        }
        let rate = touches_max as f64 / touches as f64;
        let threshold = (rate * u64::MAX as f64) as u64;
        let (mut records, mut reads, mut sampled_reads) = (Vec::new(), 0_u64, 0_u64);
        for part in self.records.iter().filter(|record| record.len > 0).flat_map(parts) {
            let is_read = u64::from(part.op == Op::Read);
            reads += is_read;
            let mut place = (part.offset / REGION_BYTES) ^ 0x6164_7669_7365_5f31;
            if splitmix64(&mut place) < threshold {
                sampled_reads += is_read;
                records.push(part);
            }
        }
        let expected = reads as f64 * rate;
        let correction = if sampled_reads == 0 { 1.0 } else { sampled_reads as f64 / expected };
        Sample { records: Cow::Owned(records), rate, correction }
    }
}

/// Returns how many of the first requests touch at most `touches_max` sectors together. Only reads
/// and writes touch sectors. The function treats each request as aligned to sectors, and a request
/// longer than [`REQUEST_BYTES_MAX`] as a request of this length.
pub(super) fn count_touching<'a>(records: impl Iterator<Item = &'a Record>, touches_max: u64) -> usize {
    let mut touches = 0;
    let fits = |record: &&Record| {
        if matches!(record.op, Op::Read | Op::Write) {
            touches += u64::from(record.len).min(REQUEST_BYTES_MAX).div_ceil(SECTOR_BYTES);
        }
        touches <= touches_max
    };
    records.take_while(fits).count()
}

/// Splits a request at region boundaries.
fn parts(record: &Record) -> impl Iterator<Item = Record> + use<> {
    let record = *record;
    let end = record.offset + u64::from(record.len);
    (record.offset / REGION_BYTES..end.div_ceil(REGION_BYTES)).map(move |region| {
        let first = record.offset.max(region * REGION_BYTES);
        let last = end.min((region + 1) * REGION_BYTES);
        Record { offset: first, len: (last - first) as u32, ..record }
    })
}

impl Sample<'_> {
    /// Returns the number of regions that requests touch, at most `regions_max`.
    fn regions(&self, regions_max: usize) -> usize {
        let mut regions = BTreeSet::new();
        let mut numbers = self.records.iter().map(|record| record.offset / REGION_BYTES);
        while regions.len() < regions_max
            && let Some(number) = numbers.next()
        {
            regions.insert(number);
        }
        regions.len()
    }

    /// Returns a caveat if the results are inaccurate because few regions were sampled.
    pub(super) fn caveat(&self) -> Option<String> {
        let regions = self.regions(REGIONS_FEW);
        (self.rate < 1.0 && regions < REGIONS_FEW).then(|| {
            format!(
                "Only {regions} regions of 256 KiB were sampled: the curves and the tables on other sizes, policies \
                 and blocks are inaccurate."
            )
        })
    }

    /// Converts a hit ratio of the sample to a hit ratio of the whole trace.
    pub(super) fn corrected(&self, hit_ratio: f64) -> f64 {
        (1.0 - (1.0 - hit_ratio) * self.correction).clamp(0.0, 1.0)
    }

    /// Converts a hit ratio of the whole trace to a hit ratio of the sample.
    pub(super) fn uncorrected(&self, hit_ratio: f64) -> f64 {
        1.0 - (1.0 - hit_ratio) / self.correction
    }

    /// Returns the number of distinct blocks that requests touch, for each block size in bytes.
    pub(super) fn blocks(&self, sizes: &[u64]) -> Vec<u64> {
        let smallest = sizes[0];
        let covered = |record: &Record| {
            record.offset / smallest..(record.offset + u64::from(record.len)).div_ceil(smallest)
        };
        let moves = self.records.iter().filter(|record| matches!(record.op, Op::Read | Op::Write));
        let mut blocks: Vec<u64> = moves.flat_map(covered).collect();
        blocks.sort_unstable();
        let mut counts = Vec::with_capacity(sizes.len());
        let mut size = smallest;
        for wanted in sizes {
            blocks.iter_mut().for_each(|block| *block /= wanted / size);
            size = *wanted;
            blocks.dedup();
            counts.push(blocks.len() as u64);
        }
        counts
    }
}

/// Records in memory, for functions that read a trace in record blocks: slices of a few thousand
/// records.
pub(super) struct Slices<'a>(pub(super) &'a [Record]);

impl Blocks for Slices<'_> {
    fn next_block(&mut self) -> Result<&[Record]> {
        let (block, rest) = self.0.split_at(self.0.len().min(RECORDS_A_BLOCK));
        self.0 = rest;
        Ok(block)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sample_of_few_regions_is_reported() {
        let mut material = Material::new(usize::MAX);
        for i in 0..6400_u64 {
            let offset = i % 64 * REGION_BYTES;
            material.add(&Record { at_ns: i, offset, len: 4096, op: Op::Read, disk: 0 });
        }
        let held = material.finish().unwrap();
        let half = held.sample_of_many_regions(3200);
        assert_eq!(half.rate, 0.5);
        let regions = half.records.len() / 100;
        assert!(half.caveat().unwrap().contains(&format!("Only {regions} regions")), "{:?}", half.caveat());
        // A sample of less than one region is enlarged.
        assert!(held.sample_of_many_regions(50).rate >= 0.125);
        assert_eq!(held.whole().caveat(), None);
    }
}
