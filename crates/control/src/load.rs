//! Counters of disks: two responses and the time between them give rates.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::{BackingState, Bucket, CacheState, DiskState};

/// One disk in the answer to `GET /v1/load`. Counts begin when the disk comes online.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct DiskLoad {
    /// Name of the disk.
    pub disk: String,
    /// Whether it is served.
    pub state: DiskState,
    /// State of its backing. Absent while the disk is not served.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub backing_state: Option<BackingState>,
    /// State of its cache.
    pub cache: CacheState,
    /// Write mode of its cache; empty without one.
    pub mode: String,
    /// Whether the counters are valid. If false, they are all 0: the disk is offline, or its shard
    /// did not answer.
    pub is_counted: bool,
    /// Counting for so long, nanoseconds.
    pub elapsed_ns: u64,
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
    /// Reads that flash served whole.
    pub read_hits: u64,
    /// Reads that memory above flash served whole.
    pub memory_hits: u64,
    /// Requests that are not answered yet.
    pub in_flight: u64,
    /// Latencies of all requests together, nanoseconds.
    pub latency_sum_ns: u64,
    /// Latency histogram: buckets that are not empty, shortest latency first.
    pub latency: Vec<Bucket>,
    /// Room of its blocks, bytes.
    pub cache_bytes: u64,
    /// Bytes of blocks with data, part of the above.
    pub used_bytes: u64,
    /// Bytes that only flash has.
    pub dirty_bytes: u64,
    /// A drain is under way.
    pub is_draining: bool,
}
