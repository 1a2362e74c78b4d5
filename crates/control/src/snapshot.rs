//! API types for the daemon's complete state at one moment. `GET /v1/events` sends a snapshot every
//! second.
//!
//! Counters do not decrease while a disk is online. Clients compute rates from two snapshots and
//! the time between them.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::{Cluster, Datastore, Disk, DiskQos, Health, Pool, Task, Version};

/// One event of `GET /v1/events`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Snapshot {
    /// Time of the snapshot, milliseconds since 1970.
    pub at_ms: u64,
    /// Version of the daemon.
    pub version: Version,
    /// Current problems.
    pub health: Health,
    /// All pools, by name.
    pub pools: Vec<PoolNow>,
    /// All disks, by name.
    pub disks: Vec<DiskNow>,
    /// All datastores, by name. Absent if a shard did not answer in time.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub datastores: Option<Vec<Datastore>>,
    /// Cluster membership of this host. Absent if the host is in no cluster.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cluster: Option<Cluster>,
    /// Changes that continue in the background, and changes that ended after the daemon had
    /// answered their request.
    #[serde(default)]
    pub tasks: Vec<Task>,
}

/// A pool and the counters of its devices.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct PoolNow {
    /// The pool, as in `GET /v1/pools`.
    pub pool: Pool,
    /// Counters of each of the pool's devices, in the same order; null if unknown.
    pub devices: Vec<Option<DeviceFigures>>,
}

/// Counters of a flash device since it was opened.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct DeviceFigures {
    /// Completed reads, writes and flushes of the device.
    pub ios: u64,
    /// Number of I/Os that failed.
    pub errors: u64,
    /// Bytes read from the device.
    pub read_bytes: u64,
    /// Bytes written to the device, including journals.
    pub written_bytes: u64,
    /// Reads, writes and flushes of the device that are in flight.
    pub in_flight: u64,
}

/// A disk, with its shares, reservation, limits and counters.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct DiskNow {
    /// The disk, as in `GET /v1/disks`.
    pub disk: Disk,
    /// Shares, reservation and limits of the disk, as in `GET /v1/qos`. Absent if the disk was
    /// added or removed at that moment.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub qos: Option<DiskQos>,
    /// Counters of the disk. Absent while the disk is offline or its shard does not answer.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub figures: Option<DiskFigures>,
}

/// Counters of a disk since it came online.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct DiskFigures {
    /// Time since the disk came online or its statistics were last reset, nanoseconds.
    pub elapsed_ns: u64,
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
    /// Number of requests for each outcome that has happened, in the order of docs/outcomes.md.
    pub outcomes: Vec<OutcomeFigures>,
    /// Latency histogram. Each entry has a bucket's upper bound, nanoseconds, and its number of
    /// requests. Empty buckets are left out; shortest latency first.
    pub latency: Vec<[u64; 2]>,
    /// I/O to flash.
    pub flash: IoFigures,
    /// I/O to the backing.
    pub backing: IoFigures,
    /// Size of the disk's cache without its journal, bytes.
    pub cache_bytes: u64,
    /// Bytes of cache blocks that hold data, included in `cache_bytes`.
    pub used_bytes: u64,
    /// Bytes of dirty data in the cache.
    pub dirty_bytes: u64,
    /// Bytes written from flash to the backing.
    pub destaged_bytes: u64,
    /// Whether a drain is in progress.
    pub is_draining: bool,
}

/// Number and latency of the requests with one outcome.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct OutcomeFigures {
    /// Class of the outcome; see docs/outcomes.md.
    pub class: String,
    /// Reason within the class; empty if the class is the whole reason.
    pub reason: String,
    /// Number of requests with this outcome.
    pub count: u64,
    /// Sum of the latencies of the requests with this outcome, nanoseconds.
    pub latency_sum_ns: u64,
}

/// I/O of a disk to memory, flash or the backing.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct IoFigures {
    /// Number of I/Os that ended.
    pub ios: u64,
    /// Number of I/Os that failed.
    pub errors: u64,
    /// Units as counted by shares and limits: 32 KiB by default, at least one for each I/O.
    pub units: u64,
    /// Total time that the I/Os waited in the scheduler, nanoseconds.
    pub waited_ns: u64,
    /// Total latency of the I/Os after the scheduler, nanoseconds.
    pub total_ns: u64,
    /// Total bytes that the I/Os read.
    pub read_bytes: u64,
    /// Total bytes that the I/Os wrote.
    pub write_bytes: u64,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn absent_values_are_not_written() {
        let figures = DiskFigures { latency: vec![[511, 2]], ..DiskFigures::default() };
        let text = serde_json::to_string(&figures).unwrap();
        assert!(text.contains(r#""latency":[[511,2]]"#), "{text}");
        assert_eq!(serde_json::from_str::<DiskFigures>(&text).unwrap(), figures);
    }
}
