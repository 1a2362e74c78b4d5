//! API types for the hit ratios that a disk would have with caches of other sizes.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::Size;

/// Miss-ratio curves of a disk, estimated from a sample of its blocks during `elapsed_ns`. The
/// curves are those of LRU caches that admit every read and write.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct DiskCurve {
    /// Name of the disk.
    pub disk: String,
    /// Time since the disk came online or its curves were last reset, nanoseconds.
    pub elapsed_ns: u64,
    /// Number of reads.
    pub reads: u64,
    /// Total length of the reads, bytes.
    pub read_bytes: u64,
    /// Percentage of reads served entirely from flash or memory.
    pub hit_percent: f64,
    /// Number of writes.
    pub writes: u64,
    /// Total length of the writes, bytes.
    pub write_bytes: u64,
    /// The disk's most recent reads.
    #[serde(default)]
    pub recent: RecentReads,
    /// Memory that the estimation uses, bytes.
    pub memory_bytes: u64,
    /// The disk's present cache; null if it has none.
    pub cache: Option<CurveCache>,
    /// One curve for each of several block sizes, smallest size first.
    pub block_sizes: Vec<BlockCurve>,
}

/// Figures of a disk's recent reads: the last 16,384 to 32,768 reads, or all reads if there are
/// fewer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct RecentReads {
    /// Number of recent reads; fewer after a start or a reset.
    pub reads: u64,
    /// Percentage of the recent reads that flash or memory served completely.
    pub hit_percent: f64,
    /// Estimated percentage of recent reads of data that had not been read or written since the
    /// last start or reset. A high value can mean that the cache is still warming up.
    pub first_percent: f64,
    /// Total bytes of the recent reads.
    #[serde(default)]
    pub read_bytes: u64,
    /// Bytes written since the first of the recent reads.
    #[serde(default)]
    pub write_bytes: u64,
    /// Number of reads in the latest complete interval of at least a minute and 1000 reads; 0
    /// before the first one has ended. Reads of a warm-up leave this interval sooner than they
    /// leave the recent reads.
    #[serde(default)]
    pub latest_reads: u64,
    /// Percentage of the latest reads that flash or memory served completely.
    #[serde(default)]
    pub latest_hit_percent: f64,
}

/// Size and hit ratio of a disk's present cache.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct CurveCache {
    /// Size of the disk's present cache, bytes.
    pub size: Size,
    /// Block size of the cache.
    pub block_size: Size,
    /// Replacement policy of the cache.
    pub policy: String,
    /// Write mode of the cache.
    pub mode: String,
    /// Hit percentage of an LRU cache of this size according to the miss-ratio curve. The curve is
    /// the one with the largest block size up to the cache's.
    pub expected_hit_percent: f64,
}

/// Miss-ratio curve of a disk for one block size.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct BlockCurve {
    /// Block size of the curve.
    pub block_size: Size,
    /// Number of reads; a read counts once for each block that it touches. The curve's ratios are
    /// shares of this number.
    pub accesses: u64,
    /// Number of sampled blocks.
    pub samples: u64,
    /// Sampled blocks as a fraction of all blocks, 0 to 1.
    pub sample_rate: f64,
    /// Estimated bytes of all blocks that were read or written.
    pub footprint_bytes: u64,
    /// Points of the miss-ratio curve: sizes increase from 0, ratios do not increase. Values
    /// between two points are interpolated linearly.
    pub points: Vec<CurvePoint>,
}

/// A point of a miss-ratio curve.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct CurvePoint {
    /// Size of the cache, bytes.
    pub cache_bytes: u64,
    /// Fraction of the accesses that miss, 0 to 1.
    pub miss_ratio: f64,
}
