//! Counters of all disks. Clients compute rates from two responses and the time between them.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::{BackingState, Bucket, CacheState, DiskState};

/// One disk in the response to `GET /v1/load`. Counting starts when the disk comes online.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct DiskLoad {
    /// Name of the disk.
    pub disk: String,
    /// Whether the disk is served.
    pub state: DiskState,
    /// State of the disk's backing. Absent while the disk is not served.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub backing_state: Option<BackingState>,
    /// State of the disk's cache.
    pub cache: CacheState,
    /// Write mode of the disk's cache; empty without a cache.
    pub mode: String,
    /// Whether the disk's counters are valid. If false, all counters are 0: the disk is offline, or
    /// its shard did not answer.
    pub is_counted: bool,
    /// Time since the disk came online or its statistics were last reset, nanoseconds.
    pub elapsed_ns: u64,
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
    /// Reads that flash served completely.
    pub read_hits: u64,
    /// Reads that memory above flash served completely.
    pub memory_hits: u64,
    /// Requests of the disk that are not answered yet.
    pub in_flight: u64,
    /// Sum of the latencies of the disk's requests, nanoseconds.
    pub latency_sum_ns: u64,
    /// Latency histogram of the disk: non-empty buckets, shortest latency first.
    pub latency: Vec<Bucket>,
    /// Size of the disk's cache without its journal, bytes.
    pub cache_bytes: u64,
    /// Bytes of cache blocks that hold data, included in `cache_bytes`.
    pub used_bytes: u64,
    /// Bytes of dirty data in the cache.
    pub dirty_bytes: u64,
    /// Whether the disk is being drained.
    pub is_draining: bool,
}
