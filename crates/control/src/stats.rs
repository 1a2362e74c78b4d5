//! Counters of one disk since it was added, or since they were reset.
//!
//! `iops_*` and `*_mean` are floating-point; counts and nanoseconds are integers. Field names are
//! part of the API: fields are added, not renamed.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::{CacheState, RecentReads, Size};

/// All statistics of one disk.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct DiskStats {
    /// Name of the disk.
    pub disk: String,
    /// Time since the disk came online or its statistics were last reset, nanoseconds.
    pub elapsed_ns: u64,
    /// State of the disk's cache.
    pub cache: CacheState,
    /// Number of requests of all kinds.
    pub requests: u64,
    /// Number of reads.
    pub reads: u64,
    /// Number of writes.
    pub writes: u64,
    /// Bytes that guests have read.
    pub read_bytes: u64,
    /// Bytes that guests have written.
    pub write_bytes: u64,
    /// Percentage of reads that flash served completely.
    pub hit_percent: f64,
    /// Percentage of reads that memory above flash served completely.
    #[serde(default)]
    pub memory_hit_percent: f64,
    /// The disk's most recent reads.
    #[serde(default)]
    pub recent: RecentReads,
    /// Mean number of requests per second during `elapsed_ns`.
    pub iops_mean: f64,
    /// Number of requests in the busiest second.
    pub iops_max: f64,
    /// Mean length of a request, KiB.
    pub kib_per_io_mean: f64,
    /// Largest length of a request, KiB.
    pub kib_per_io_max: f64,
    /// Mean latency of requests, nanoseconds.
    pub latency_mean_ns: u64,
    /// Longest latency of a request, nanoseconds.
    pub latency_max_ns: u64,
    /// Mean latency of flash I/O, nanoseconds.
    pub cache_io_latency_mean_ns: u64,
    /// Mean latency of backing I/O, nanoseconds.
    pub disk_io_latency_mean_ns: u64,
    /// Flash I/Os that have ended.
    pub cache_ios: u64,
    /// Number of evicted blocks, and of the requests that evicted them.
    pub evictions: Evictions,
    /// Flash I/Os that failed.
    pub flash_errors: u64,
    /// Backing I/Os that failed.
    pub backing_errors: u64,
    /// Number of sectors read from flash whose checksum did not match. For a clean sector, hob uses
    /// the backing's data instead. Dirty data without another copy is lost.
    pub checksum_mismatches: u64,
    /// Number of blocks that fit the cache.
    pub blocks: u64,
    /// Number of blocks that hold data.
    pub blocks_cached: u64,
    /// Number of cached sectors (4 KiB).
    pub sectors_valid: u64,
    /// Write mode of the cache.
    #[serde(default)]
    pub mode: String,
    /// Bytes of dirty data in the cache.
    #[serde(default)]
    pub dirty_bytes: u64,
    /// Dirty bytes that flash cannot return any more, included in `dirty_bytes`.
    #[serde(default)]
    pub dirty_lost_bytes: u64,
    /// Bytes read from the backing.
    #[serde(default)]
    pub backing_read_bytes: u64,
    /// For a clone that shares its parent's cached blocks: bytes that the parent's disk served
    /// instead of the backing.
    #[serde(default)]
    pub shared_read_bytes: u64,
    /// Bytes written from flash to the backing.
    #[serde(default)]
    pub destaged_bytes: u64,
    /// Present rate of destaging, bytes per second.
    #[serde(default)]
    pub destage_rate_bytes: u64,
    /// Failed writes from flash to the backing. hob retries them.
    #[serde(default)]
    pub destage_errors: u64,
    /// Bytes of journal written to flash, including copies.
    #[serde(default)]
    pub journal_bytes: u64,
    /// Bytes written to flash as replicas of other data.
    #[serde(default)]
    pub second_copy_bytes: u64,
    /// Cached bytes that are not served until they are compared with the backing.
    #[serde(default)]
    pub unverified_bytes: u64,
    /// Unverified bytes that the cache had when it was recovered; 0 after all of them were
    /// compared.
    #[serde(default)]
    pub to_verify_bytes: u64,
    /// Cached bytes that were compared with the backing after a restart and were equal.
    #[serde(default)]
    pub verified_bytes: u64,
    /// Cached bytes that were compared with the backing after a restart, differed, and were
    /// dropped.
    #[serde(default)]
    pub stale_bytes: u64,
    /// Whether a drain is in progress.
    #[serde(default)]
    pub draining: bool,
    /// Block size of the cache; 0 without a cache.
    pub block_size: Size,
    /// What a cache with `policy` or `admission` set to `auto` has chosen.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub choice: Option<CacheChoice>,
    /// Memory of the cache's index, bytes.
    pub index_bytes: u64,
    /// Size of the memory tier above the cache, bytes.
    #[serde(default)]
    pub memory_bytes: u64,
    /// Bytes of the memory tier that hold data.
    #[serde(default)]
    pub memory_held_bytes: u64,
    /// Bytes read ahead into the memory tier.
    #[serde(default)]
    pub read_ahead_bytes: u64,
    /// Bytes that read misses brought into the cache in addition to those that guests read.
    #[serde(default)]
    pub extra_read_bytes: u64,
    /// Number of times that guests used a block whose data was in the cache only because of
    /// additional reads (setting `fill`).
    #[serde(default)]
    pub extra_blocks_used: u64,
    /// Writes that were sent to the backing in one I/O with other writes.
    #[serde(default)]
    pub writes_merged: u64,
    /// Memory of the memory tier's index, bytes.
    #[serde(default)]
    pub memory_index_bytes: u64,
    /// Counters of each outcome in a fixed order, including outcomes that never happened.
    pub outcomes: Vec<OutcomeStats>,
    /// The statistics that vSphere Flash Read Cache has, under the same names.
    pub vsphere: VsphereStats,
}

/// Policy and admission that hob has chosen for a cache, because one of them is `auto`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct CacheChoice {
    /// Policy in use.
    pub policy: String,
    /// Admission in use.
    pub admission: String,
    /// `filling`: the cache has not been full yet; `changed`: the choice is new, and the contents
    /// are still those of the previous choice; otherwise `warm`.
    pub phase: String,
    /// Number of times that the choice has changed.
    pub changes: u64,
    /// All candidates with their expected results, including the choice.
    pub candidates: Vec<CacheCandidate>,
}

/// A combination of policy and admission that hob simulates beside a cache, on a sample of the
/// disk.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct CacheCandidate {
    /// Replacement policy of the combination.
    pub policy: String,
    /// Admission rule of the combination.
    pub admission: String,
    /// Expected percentage of reads that hit.
    pub hit_percent: f64,
    /// Expected bytes written to flash per 100 bytes that guests read or write.
    pub flash_write_percent: f64,
}

/// Blocks that a cache evicted to make room.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Evictions {
    /// Number of requests that caused evictions.
    pub operations: u64,
    /// Total number of evicted blocks.
    pub blocks: u64,
    /// Time of the last eviction, nanoseconds after the disk came online or its statistics were
    /// last reset.
    pub last_operation_at_ns: u64,
    /// Number of blocks evicted by the last request that evicted any.
    pub last_blocks: u64,
}

/// Number and latencies of the requests with one outcome.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct OutcomeStats {
    /// `hit`, `partial-miss`, `miss-filled`, `miss-not-admitted`, `write`, `bypass`, `cache-off`,
    /// `flash-error`, `backing-error` or `refused`.
    pub class: String,
    /// Reason within the class; empty if the class is the whole reason.
    pub reason: String,
    /// Number of requests with this outcome.
    pub count: u64,
    /// Total length of the requests with this outcome, bytes.
    pub bytes: u64,
    /// Percentage of all requests of the disk.
    pub percent: f64,
    /// Latencies from request to reply.
    pub latency: Latency,
}

/// Distribution of the latencies of requests.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Latency {
    /// Mean latency, nanoseconds.
    pub mean_ns: u64,
    /// Median latency, nanoseconds.
    pub p50_ns: u64,
    /// 99th percentile of the latency, nanoseconds.
    pub p99_ns: u64,
    /// 99.9th percentile of the latency, nanoseconds.
    pub p999_ns: u64,
    /// Longest latency, nanoseconds.
    pub max_ns: u64,
    /// Non-empty buckets of the latency histogram, shortest latency first.
    pub buckets: Vec<Bucket>,
}

/// One bucket of a latency histogram.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Bucket {
    /// Upper bound of the bucket, nanoseconds.
    pub up_to_ns: u64,
    /// Number of requests in the bucket.
    pub count: u64,
}

macro_rules! vsphere {
    ($($(#[doc = $doc:literal])* $field:ident $name:tt $type:ty)*) => {
        /// The statistics that vSphere Flash Read Cache has, under the same names. Latencies are in
        /// microseconds, as in vSphere.
        #[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
        pub struct VsphereStats {
            $($(#[doc = $doc])* #[serde(rename = $name)] pub $field: $type,)*
        }

        impl VsphereStats {
            /// Returns the name and the formatted value of each statistic, in order.
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
    /// Percentage of reads that flash served completely.
    cache_hit_percentage "vFlash:cacheHitPercentage" f64
    /// Number of flash I/Os.
    total_cache_ios "vFlash:totalCacheIOs" u64
    /// Mean latency of flash I/O, µs.
    mean_cache_io_latency "vFlash:meanCacheIOLatency" f64
    /// Mean latency of backing I/O, µs.
    mean_disk_io_latency "vFlash:meanDiskIOLatency" f64
    /// Number of guest requests.
    total_ios "totalIOs" u64
    /// Mean number of requests per second.
    mean_iops "meanIOPS" f64
    /// Number of requests in the busiest second.
    max_iops "maxIOPS" f64
    /// Mean request length, KB of 1024 bytes.
    mean_kb_per_io "meanKBPerIO" f64
    /// Largest request length, KB of 1024 bytes.
    max_kb_per_io "maxKBPerIO" f64
    /// Mean latency of guest requests, µs.
    mean_io_latency "meanIOLatency" f64
    /// Longest latency of a guest request, µs.
    max_io_latency "maxIOLatency" f64
    /// Time of the last eviction, µs after the disk came online or its statistics were last reset.
    evict_last_op_time "Evict:lastOpTime" f64
    /// Number of blocks evicted by the last request that evicted any.
    evict_num_blocks_last_op "Evict:numBlocksLastOp" u64
    /// Mean number of blocks evicted per request, over the requests that evicted any.
    evict_avg_num_blocks_per_op "Evict:avgNumBlocksPerOp" f64
    /// Percentage of the cache's blocks that hold data.
    cache_usage_percentage "vFlash:cacheUsagePercentage" f64
    /// Flash I/Os that failed.
    failed_flash_ios "vFlash:numFailedFlashIOs" u64
    /// Backing I/Os that failed.
    failed_disk_ios "vFlash:numFailedDiskIOs" u64
    /// Number of blocks that fit the cache.
    num_blocks "numBlocks" u64
    /// Number of blocks that hold data.
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
