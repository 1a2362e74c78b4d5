//! Summarizes a trace: numbers and sizes of requests, footprint, reuse, sequential requests, and
//! arrival times.
//!
//! The profile needs one pass and limited memory. [`footprint`](Footprint) is exact up to about 1.8
//! million touched chunks of 2 MiB, and above that an estimate from a sample. The exact part needs
//! 150 MB of memory. The exact footprint can cover 3.5 TiB of dense requests, or 7 GiB of isolated
//! sectors. Footprint, sizes and sequential requests include only reads and writes. Discards and
//! flushes are included only in the numbers of requests and in the arrival times. A *sector* has 4
//! KiB. A *touch* is the use of one sector by one request.

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

/// Size of a sector, bytes.
pub const SECTOR_BYTES: u64 = 4096;
/// Maximum number of sequential streams that the profile follows at a time, on all disks together.
/// A request is sequential if it begins where the newest request of one of these streams ended.
const STREAMS: usize = 16;
/// Maximum number of distinct request sizes that are counted individually.
const SIZES_MAX: usize = 1 << 16;

/// Summary of a trace.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Profile {
    /// Number of all requests.
    pub requests: u64,
    /// Number of reads.
    pub reads: u64,
    /// Number of writes.
    pub writes: u64,
    /// Number of discards.
    pub discards: u64,
    /// Number of flushes.
    pub flushes: u64,
    /// Share of reads among reads and writes, per cent.
    pub read_percent: f64,
    /// Total length of the reads, bytes.
    pub bytes_read: u64,
    /// Total length of the writes, bytes.
    pub bytes_written: u64,
    /// Number of disks with at least one request.
    pub disks: u32,
    /// Time from the first request to the last, nanoseconds.
    pub duration_ns: u64,
    /// Sectors that were read or written.
    pub footprint: Footprint,
    /// Sizes of reads and writes.
    pub sizes: Sizes,
    /// Sequential reads and writes.
    pub sequential: Sequential,
    /// Requests over time.
    pub arrivals: Arrivals,
    /// Times between requests.
    pub gaps: Gaps,
}

/// Sectors that were read or written.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Footprint {
    /// Number of distinct sectors.
    pub sectors: u64,
    /// Size of the distinct sectors, bytes.
    pub bytes: u64,
    /// Number of touches: one per request and sector.
    pub touches: u64,
    /// Share of touches whose sector was touched before, per cent.
    pub reuse_percent: f64,
    /// True if `sectors` is an estimate from a sample.
    pub estimated: bool,
    /// Sampling rate of the estimate; 1 if `sectors` is exact.
    pub sample_rate: f64,
}

/// Sizes of reads and writes.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Sizes {
    /// Mean size, bytes.
    pub mean_bytes: f64,
    /// Most common size, bytes; 0 without requests. Only the first 65,536 distinct sizes are
    /// considered.
    pub dominant_bytes: u32,
    /// Share of requests with the most common size, per cent.
    pub dominant_percent: f64,
    /// Counts by powers of two, without empty buckets at both ends.
    pub buckets: Vec<SizeBucket>,
}

/// Counts of requests with sizes from `from_bytes` to just below twice as much.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct SizeBucket {
    /// Lower end of the sizes, a power of two, bytes.
    pub from_bytes: u64,
    /// Number of reads.
    pub reads: u64,
    /// Number of writes.
    pub writes: u64,
}

/// Reads and writes that begin where an earlier request of the disk ended. Only the 16 newest ends
/// of all disks together are remembered. If a request begins at a remembered end, hob remembers the
/// end of this request instead.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Sequential {
    /// Share of sequential requests, per cent.
    pub requests_percent: f64,
    /// Share of bytes in sequential requests, per cent.
    pub bytes_percent: f64,
}

/// Times between successive requests, nanoseconds. Quantiles are at most 6 % too high.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Gaps {
    /// Mean time between requests.
    pub mean_ns: f64,
    /// Standard deviation divided by the mean. The value is about 1 for independent requests and
    /// higher for bursts. The value is 0 if the mean is 0.
    pub variation: f64,
    /// Median time between requests.
    pub p50_ns: u64,
    /// 90th percentile of the times between requests.
    pub p90_ns: u64,
    /// 99th percentile of the times between requests.
    pub p99_ns: u64,
    /// Longest time between requests.
    pub max_ns: u64,
}

impl Profile {
    /// Returns the profile of all records, or the first error.
    pub fn of(records: impl IntoIterator<Item = anyhow::Result<Record>>) -> anyhow::Result<Profile> {
        let mut profiler = Profiler::default();
        for record in records {
            profiler.add(&record?);
        }
        Ok(profiler.finish())
    }
}

/// Computes a profile, record by record. Records should be in order of time. A record with an
/// earlier time than the previous one counts as a gap of 0.
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

    /// Returns the profile of all counted records.
    pub fn finish(self) -> Profile {
        let [reads, writes, discards, flushes] = self.counts;
        let [bytes_read, bytes_written, ..] = self.bytes;
        let (moves, moved) = (reads + writes, bytes_read + bytes_written);
        // The smaller one of equally common sizes wins.
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

/// Returns `part` of `whole` in per cent, or 0 if `whole` is 0.
fn percent(part: u64, whole: u64) -> f64 {
    if whole == 0 { 0.0 } else { part as f64 / whole as f64 * 100.0 }
}

#[cfg(test)]
mod tests;
