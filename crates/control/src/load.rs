//! What disks have done so far, in few figures: two answers and the time between them give rates.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::{BackingState, Bucket, CacheState, DiskState};

/// One disk in the answer to `GET /v1/load`. Counts begin when the disk comes online.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct DiskLoad {
    /// Which disk.
    pub disk: String,
    /// Is it served?
    pub state: DiskState,
    /// Is its backing connected, and does it answer? Absent while the disk is not served.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub backing_state: Option<BackingState>,
    /// What its cache is doing.
    pub cache: CacheState,
    /// What its cache does with writes; empty without one.
    pub mode: String,
    /// Are there figures? All that follow are 0 if not: the disk is offline, or its shard did not answer.
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
    /// How many requests took how long: buckets that hold something, shortest first.
    pub latency: Vec<Bucket>,
    /// Room of its blocks, bytes.
    pub cache_bytes: u64,
    /// Of these, bytes of blocks that hold data.
    pub used_bytes: u64,
    /// Bytes that only flash has.
    pub dirty_bytes: u64,
    /// A drain is under way.
    pub is_draining: bool,
}
