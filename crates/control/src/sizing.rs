//! Hit ratios that caches of other sizes would have for a disk, learnt from its requests.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::Size;

/// Miss-ratio curves of one disk, estimated from a sample of its blocks since counting began. They
/// are those of LRU caches that admit every read and write.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct DiskCurve {
    /// Name of the disk.
    pub disk: String,
    /// Counting for so long, nanoseconds.
    pub elapsed_ns: u64,
    /// Reads.
    pub reads: u64,
    /// Their bytes.
    pub read_bytes: u64,
    /// Percentage of reads served entirely from flash or memory.
    pub hit_percent: f64,
    /// Writes.
    pub writes: u64,
    /// Their bytes.
    pub write_bytes: u64,
    /// The latest of the reads.
    #[serde(default)]
    pub recent: RecentReads,
    /// Memory that this takes, bytes.
    pub memory_bytes: u64,
    /// The cache that the disk has now; null if none.
    pub cache: Option<CurveCache>,
    /// A curve for each of some block sizes, smallest first.
    pub block_sizes: Vec<BlockCurve>,
}

/// The latest reads of a disk, some ten thousands.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct RecentReads {
    /// Reads; fewer after a start or a reset.
    pub reads: u64,
    /// Percentage of these served entirely from flash or memory.
    pub hit_percent: f64,
    /// Percent that asked for data which was never read or written before, estimated. While there are many, a cache is
    /// still being warmed.
    pub first_percent: f64,
}

/// The cache that a disk has.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct CurveCache {
    /// Bytes it has room for.
    pub size: Size,
    /// Its blocks.
    pub block_size: Size,
    /// Its policy.
    pub policy: String,
    /// Write mode.
    pub mode: String,
    /// Hit ratio of an LRU cache of this size according to the curve, percent of reads. The curve
    /// is that of the largest block size up to the cache's.
    pub expected_hit_percent: f64,
}

/// The curve for one block size.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct BlockCurve {
    /// The block.
    pub block_size: Size,
    /// Reads, counted once for each block they touch: the curve's ratios are shares of these.
    pub accesses: u64,
    /// Blocks that are followed.
    pub samples: u64,
    /// Their share of all blocks, 0 to 1.
    pub sample_rate: f64,
    /// Bytes in the different blocks that were read or written, estimated.
    pub footprint_bytes: u64,
    /// The curve: sizes rise from 0, ratios never do. Between two points it runs straight.
    pub points: Vec<CurvePoint>,
}

/// A point of a curve.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct CurvePoint {
    /// The cache.
    pub cache_bytes: u64,
    /// Misses, 0 to 1.
    pub miss_ratio: f64,
}
