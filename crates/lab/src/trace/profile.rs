//! What a trace is like: how much of what, how large, how scattered, how often again, and when.
//!
//! One pass, bounded memory: [`footprint`](Footprint) is exact up to some 1.8 million pieces of 2 MiB that were touched
//! (150 MB of memory; 3.5 TiB where requests lie densely, 7 GiB where each sector lies alone) and an estimate from a
//! sample beyond. Reads and writes count; discards and flushes are only numbered. A *sector* is 4 KiB, a *touch* one
//! request's use of one sector.

mod arrivals;
mod footprint;
mod quantiles;

use std::collections::{HashMap, VecDeque};

use serde::Serialize;

use super::{Op, Record};
use arrivals::ArrivalCounter;
use footprint::SectorSet;
use quantiles::Quantiles;

pub use arrivals::{ARRIVAL_BUCKETS_MAX, ArrivalBucket, Arrivals};

/// Bytes of a sector.
pub const SECTOR_BYTES: u64 = 4096;
/// A request that begins where one of this many before it ended is sequential.
const STREAMS: usize = 16;
/// Request sizes that are counted one by one.
const SIZES_MAX: usize = 1 << 16;

/// A trace summed up.
#[derive(Clone, Debug, Serialize)]
pub struct Profile {
    /// All requests.
    pub requests: u64,
    /// Reads.
    pub reads: u64,
    /// Writes.
    pub writes: u64,
    /// Discards.
    pub discards: u64,
    /// Flushes.
    pub flushes: u64,
    /// Reads among reads and writes, %.
    pub read_percent: f64,
    /// Bytes read.
    pub bytes_read: u64,
    /// Bytes written.
    pub bytes_written: u64,
    /// Disks with at least one request.
    pub disks: u32,
    /// From the first request to the last, nanoseconds.
    pub duration_ns: u64,
    /// What was read or written at all.
    pub footprint: Footprint,
    /// Request sizes.
    pub sizes: Sizes,
    /// How much follows something.
    pub sequential: Sequential,
    /// Requests over time.
    pub arrivals: Arrivals,
    /// Times between requests.
    pub gaps: Gaps,
}

/// The sectors that were read or written.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Footprint {
    /// Different sectors.
    pub sectors: u64,
    /// The same in bytes.
    pub bytes: u64,
    /// Sectors times requests.
    pub touches: u64,
    /// Touches of a sector that was touched before, %.
    pub reuse_percent: f64,
    /// Whether `sectors` is estimated from a sample of the disks' ranges.
    pub estimated: bool,
    /// The share of ranges in that sample; 1 when exact.
    pub sample_rate: f64,
}

/// Sizes of reads and writes.
#[derive(Clone, Debug, Serialize)]
pub struct Sizes {
    /// Mean, bytes.
    pub mean_bytes: f64,
    /// The commonest size; 0 without requests. Of the first 65,536 sizes where there are more.
    pub dominant_bytes: u32,
    /// Requests of that size, %.
    pub dominant_percent: f64,
    /// Counts by power of two, without the empty ones at either end.
    pub buckets: Vec<SizeBucket>,
}

/// Requests of `from_bytes` to just below its double.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct SizeBucket {
    /// A power of two.
    pub from_bytes: u64,
    /// Reads.
    pub reads: u64,
    /// Writes.
    pub writes: u64,
}

/// Reads and writes that begin where one of the last 16 ended, on the same disk.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Sequential {
    /// Of requests, %.
    pub requests_percent: f64,
    /// Of bytes, %.
    pub bytes_percent: f64,
}

/// Times between one request and the next, nanoseconds. Quantiles are at most 6 % too high.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Gaps {
    /// Mean.
    pub mean_ns: f64,
    /// Standard deviation over mean: about 1 for independent requests, more for bursts. 0 where the mean is 0.
    pub variation: f64,
    /// Half are shorter.
    pub p50_ns: u64,
    /// 90 % are shorter.
    pub p90_ns: u64,
    /// 99 % are shorter.
    pub p99_ns: u64,
    /// The longest.
    pub max_ns: u64,
}

impl Profile {
    /// The profile of all records, or the first error among them.
    pub fn of(records: impl IntoIterator<Item = anyhow::Result<Record>>) -> anyhow::Result<Profile> {
        let mut profiler = Profiler::default();
        for record in records {
            profiler.add(&record?);
        }
        Ok(profiler.finish())
    }
}

/// Makes a profile, record by record. Records should come in order of time; what goes back counts as a gap of 0.
#[derive(Debug)]
pub struct Profiler {
    counts: [u64; 4],
    bytes: [u64; 4],
    disks: Box<[u64; 1024]>,
    sectors: SectorSet,
    sizes: HashMap<u32, u64>,
    buckets: [SizeBucket; 33],
    ends: VecDeque<(u16, u64)>,
    sequential: u64,
    sequential_bytes: u64,
    arrivals: ArrivalCounter,
    gaps: Quantiles,
    last_ns: Option<u64>,
}

impl Default for Profiler {
    fn default() -> Self {
        Self::new(footprint::CHUNKS_MAX)
    }
}

impl Profiler {
    fn new(chunks_max: usize) -> Profiler {
        let bucket = |n: usize| SizeBucket { from_bytes: 1_u64 << n, reads: 0, writes: 0 };
        Profiler {
            counts: [0; 4],
            bytes: [0; 4],
            disks: Box::new([0; 1024]),
            sectors: SectorSet::new(chunks_max),
            sizes: HashMap::new(),
            buckets: std::array::from_fn(bucket),
            ends: VecDeque::with_capacity(STREAMS + 1),
            sequential: 0,
            sequential_bytes: 0,
            arrivals: ArrivalCounter::default(),
            gaps: Quantiles::default(),
            last_ns: None,
        }
    }

    /// Counts a record.
    pub fn add(&mut self, record: &Record) {
        let Record { at_ns, offset, len, op, disk } = *record;
        self.counts[op as usize] += 1;
        self.bytes[op as usize] += u64::from(len);
        self.disks[usize::from(disk >> 6)] |= 1 << (disk & 63);
        if let Some(last) = self.last_ns {
            self.gaps.add(at_ns.saturating_sub(last));
        }
        self.last_ns = Some(self.last_ns.unwrap_or(0).max(at_ns));
        self.arrivals.add(record);
        if !matches!(op, Op::Read | Op::Write) || len == 0 {
            return;
        }
        let end = offset + u64::from(len);
        self.sectors.touch(disk, offset / SECTOR_BYTES, (end - 1) / SECTOR_BYTES);
        self.add_size(len, op);
        match self.ends.iter().position(|last| *last == (disk, offset)) {
            Some(n) => {
                self.sequential += 1;
                self.sequential_bytes += u64::from(len);
                self.ends.remove(n);
            }
            None if self.ends.len() == STREAMS => drop(self.ends.pop_front()),
            None => {}
        }
        self.ends.push_back((disk, end));
    }

    fn add_size(&mut self, len: u32, op: Op) {
        let bucket = &mut self.buckets[len.ilog2() as usize];
        *if op == Op::Read { &mut bucket.reads } else { &mut bucket.writes } += 1;
        if let Some(count) = self.sizes.get_mut(&len) {
            *count += 1;
        } else if self.sizes.len() < SIZES_MAX {
            self.sizes.insert(len, 1);
        }
    }

    /// The profile of what was counted.
    pub fn finish(self) -> Profile {
        let [reads, writes, discards, flushes] = self.counts;
        let [bytes_read, bytes_written, ..] = self.bytes;
        let (moves, moved) = (reads + writes, bytes_read + bytes_written);
        // Of equally common sizes the smaller one.
        let dominant = self.sizes.iter().max_by_key(|(size, count)| (**count, std::cmp::Reverse(**size)));
        let (dominant_bytes, dominant_count) = dominant.map_or((0, 0), |(size, count)| (*size, *count));
        let used = |bucket: &SizeBucket| bucket.reads + bucket.writes > 0;
        let first = self.buckets.iter().position(used).unwrap_or(0);
        let end = self.buckets.iter().rposition(used).map_or(0, |last| last + 1);
        Profile {
            requests: self.counts.iter().sum(),
            reads,
            writes,
            discards,
            flushes,
            read_percent: percent(reads, moves),
            bytes_read,
            bytes_written,
            disks: self.disks.iter().map(|word| word.count_ones()).sum(),
            duration_ns: self.arrivals.duration_ns(),
            footprint: self.sectors.footprint(),
            sizes: Sizes {
                mean_bytes: if moves == 0 { 0.0 } else { moved as f64 / moves as f64 },
                dominant_bytes,
                dominant_percent: percent(dominant_count, moves),
                buckets: self.buckets[first..end.max(first)].to_vec(),
            },
            sequential: Sequential {
                requests_percent: percent(self.sequential, moves),
                bytes_percent: percent(self.sequential_bytes, moved),
            },
            arrivals: self.arrivals.finish(),
            gaps: Gaps {
                mean_ns: self.gaps.mean(),
                variation: self.gaps.variation(),
                p50_ns: self.gaps.quantile(0.5),
                p90_ns: self.gaps.quantile(0.9),
                p99_ns: self.gaps.quantile(0.99),
                max_ns: self.gaps.max(),
            },
        }
    }
}

/// `part` of `whole` in percent; 0 of nothing.
fn percent(part: u64, whole: u64) -> f64 {
    if whole == 0 { 0.0 } else { part as f64 / whole as f64 * 100.0 }
}

#[cfg(test)]
mod tests;
