//! Counters of one disk since it was added, or since they were reset.
//!
//! `iops_*` and `*_mean` are floating-point; counts and nanoseconds are integers. Field names are
//! part of the API: fields are added, not renamed.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::{CacheState, RecentReads, Size};

/// All figures of one disk.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct DiskStats {
    /// Name of the disk.
    pub disk: String,
    /// Counting for so long, nanoseconds.
    pub elapsed_ns: u64,
    /// State of its cache.
    pub cache: CacheState,
    /// Requests of every kind.
    pub requests: u64,
    /// Reads.
    pub reads: u64,
    /// Writes.
    pub writes: u64,
    /// Bytes read.
    pub read_bytes: u64,
    /// Bytes written.
    pub write_bytes: u64,
    /// Share of all reads that flash served whole, percent.
    pub hit_percent: f64,
    /// Share of all reads that memory above flash served whole, percent.
    #[serde(default)]
    pub memory_hit_percent: f64,
    /// The latest of the reads.
    #[serde(default)]
    pub recent: RecentReads,
    /// Requests a second, mean over the whole time.
    pub iops_mean: f64,
    /// Requests in the busiest second.
    pub iops_max: f64,
    /// Mean length, KiB.
    pub kib_per_io_mean: f64,
    /// Largest length, KiB.
    pub kib_per_io_max: f64,
    /// Mean latency of requests, nanoseconds.
    pub latency_mean_ns: u64,
    /// Longest latency of a request, nanoseconds.
    pub latency_max_ns: u64,
    /// Mean latency of flash I/O, nanoseconds.
    pub cache_io_latency_mean_ns: u64,
    /// Mean latency of backing I/O, nanoseconds.
    pub disk_io_latency_mean_ns: u64,
    /// I/Os to flash.
    pub cache_ios: u64,
    /// Blocks that gave way.
    pub evictions: Evictions,
    /// Flash I/Os that failed.
    pub flash_errors: u64,
    /// Backing I/Os that failed.
    pub backing_errors: u64,
    /// Sectors whose checksum did not match; each was repaired from the backing.
    pub checksum_mismatches: u64,
    /// Blocks that the cache has room for.
    pub blocks: u64,
    /// Blocks with data.
    pub blocks_cached: u64,
    /// Sectors (4 KiB) with data.
    pub sectors_valid: u64,
    /// Write mode of the cache.
    #[serde(default)]
    pub mode: String,
    /// Bytes that only flash has.
    #[serde(default)]
    pub dirty_bytes: u64,
    /// Part of the dirty bytes that flash cannot deliver any more.
    #[serde(default)]
    pub dirty_lost_bytes: u64,
    /// Bytes read from the backing.
    #[serde(default)]
    pub backing_read_bytes: u64,
    /// For a clone that shares blocks of its parent: bytes that the parent's disk served instead of
    /// the backing.
    #[serde(default)]
    pub shared_read_bytes: u64,
    /// Bytes written from flash to the backing.
    #[serde(default)]
    pub destaged_bytes: u64,
    /// The same for each second at present.
    #[serde(default)]
    pub destage_rate_bytes: u64,
    /// Writes from flash to the backing that failed; they are tried again.
    #[serde(default)]
    pub destage_errors: u64,
    /// Bytes of journal written to flash, all copies.
    #[serde(default)]
    pub journal_bytes: u64,
    /// Bytes written to flash a second time, as second copies.
    #[serde(default)]
    pub second_copy_bytes: u64,
    /// Bytes in flash that are not served before they were compared with the backing.
    #[serde(default)]
    pub unverified_bytes: u64,
    /// How many there were when the cache was recovered; 0 when none is left.
    #[serde(default)]
    pub to_verify_bytes: u64,
    /// Bytes that were compared with the backing after a restart, and equal.
    #[serde(default)]
    pub verified_bytes: u64,
    /// Bytes that were compared with the backing after a restart, differed, and were dropped.
    #[serde(default)]
    pub stale_bytes: u64,
    /// A drain is under way.
    #[serde(default)]
    pub draining: bool,
    /// Cache block; 0 without a cache.
    pub block_size: Size,
    /// Memory of the cache's index, bytes.
    pub index_bytes: u64,
    /// Memory above the cache, bytes.
    #[serde(default)]
    pub memory_bytes: u64,
    /// Part of it with data, bytes.
    #[serde(default)]
    pub memory_held_bytes: u64,
    /// Bytes read ahead into it.
    #[serde(default)]
    pub read_ahead_bytes: u64,
    /// Writes that went to the backing in one I/O with others.
    #[serde(default)]
    pub writes_merged: u64,
    /// Memory of its index, bytes.
    #[serde(default)]
    pub memory_index_bytes: u64,
    /// One entry per outcome that exists, in a fixed order, also those that never happened.
    pub outcomes: Vec<OutcomeStats>,
    /// The statistics of vSphere Flash Read Cache under their names there.
    pub vsphere: VsphereStats,
}

/// Blocks that gave way to others.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Evictions {
    /// Requests that made blocks leave.
    pub operations: u64,
    /// Blocks that gave way in all.
    pub blocks: u64,
    /// When the last one happened, nanoseconds after counting began.
    pub last_operation_at_ns: u64,
    /// Blocks that gave way in the last operation.
    pub last_blocks: u64,
}

/// Counters of one outcome.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct OutcomeStats {
    /// `hit`, `partial-miss`, `miss-filled`, `miss-not-admitted`, `write`, `bypass`, `cache-off`,
    /// `flash-error`, `backing-error` or `refused`.
    pub class: String,
    /// The reason inside the class; empty where the class says it all.
    pub reason: String,
    /// Requests.
    pub count: u64,
    /// Their bytes.
    pub bytes: u64,
    /// Percentage of all requests.
    pub percent: f64,
    /// From request to reply.
    pub latency: Latency,
}

/// A distribution of latencies.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Latency {
    /// Mean, nanoseconds.
    pub mean_ns: u64,
    /// Half are at most this, nanoseconds.
    pub p50_ns: u64,
    /// 99 % are at most this, nanoseconds.
    pub p99_ns: u64,
    /// 99.9 % are at most this, nanoseconds.
    pub p999_ns: u64,
    /// Longest, nanoseconds.
    pub max_ns: u64,
    /// Non-empty buckets, shortest first.
    pub buckets: Vec<Bucket>,
}

/// One bucket of a histogram.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Bucket {
    /// Its upper bound, nanoseconds.
    pub up_to_ns: u64,
    /// Requests in it.
    pub count: u64,
}

macro_rules! vsphere {
    ($($(#[doc = $doc:literal])* $field:ident $name:tt $type:ty)*) => {
        /// The statistics of vSphere Flash Read Cache under their names there. Latencies are in
        /// microseconds, as they are there.
        #[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
        pub struct VsphereStats {
            $($(#[doc = $doc])* #[serde(rename = $name)] pub $field: $type,)*
        }

        impl VsphereStats {
            /// Name and value of each, in order; values as tables show them.
            pub fn rows(&self) -> Vec<(&'static str, String)> {
                vec![$(($name, Show::show(&self.$field)),)*]
            }
        }
    };
}

trait Show {
    fn show(&self) -> String;
}

impl Show for u64 {
    fn show(&self) -> String {
        self.to_string()
    }
}

impl Show for f64 {
    fn show(&self) -> String {
        format!("{self:.2}")
    }
}

vsphere! {
    /// Share of reads that came whole from flash, percent.
    cache_hit_percentage "vFlash:cacheHitPercentage" f64
    /// Flash I/Os.
    total_cache_ios "vFlash:totalCacheIOs" u64
    /// Mean latency of flash I/O, µs.
    mean_cache_io_latency "vFlash:meanCacheIOLatency" f64
    /// Mean latency of backing I/O, µs.
    mean_disk_io_latency "vFlash:meanDiskIOLatency" f64
    /// Guest requests.
    total_ios "totalIOs" u64
    /// Mean requests a second.
    mean_iops "meanIOPS" f64
    /// Requests in the busiest second.
    max_iops "maxIOPS" f64
    /// Mean request length, KB of 1024 bytes.
    mean_kb_per_io "meanKBPerIO" f64
    /// Largest request length, KB of 1024 bytes.
    max_kb_per_io "maxKBPerIO" f64
    /// Mean latency of guest requests, µs.
    mean_io_latency "meanIOLatency" f64
    /// Longest latency of a guest request, µs.
    max_io_latency "maxIOLatency" f64
    /// When the last eviction happened, µs after counting began.
    evict_last_op_time "Evict:lastOpTime" f64
    /// Blocks that gave way in the last eviction.
    evict_num_blocks_last_op "Evict:numBlocksLastOp" u64
    /// Mean blocks that gave way in one eviction.
    evict_avg_num_blocks_per_op "Evict:avgNumBlocksPerOp" f64
    /// Share of the blocks that hold data, percent.
    cache_usage_percentage "vFlash:cacheUsagePercentage" f64
    /// Flash I/Os that failed.
    failed_flash_ios "vFlash:numFailedFlashIOs" u64
    /// Backing I/Os that failed.
    failed_disk_ios "vFlash:numFailedDiskIOs" u64
    /// Blocks that the cache has.
    num_blocks "numBlocks" u64
    /// Blocks that hold data.
    num_blocks_currently_cached "numBlocksCurrentlyCached" u64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn vsphere_names_stand_in_the_json_and_in_the_rows() {
        let stats =
            VsphereStats { num_blocks: 131_072, cache_hit_percentage: 85.123, ..VsphereStats::default() };
        let json = serde_json::to_value(&stats).unwrap();
        assert_eq!(json["numBlocks"], 131_072);
        assert_eq!(json["vFlash:cacheHitPercentage"], 85.123);
        assert!(stats.rows().contains(&("numBlocks", "131072".to_owned())));
        assert!(stats.rows().contains(&("vFlash:cacheHitPercentage", "85.12".to_owned())));
        assert_eq!(json.as_object().unwrap().len(), stats.rows().len());
    }
}
