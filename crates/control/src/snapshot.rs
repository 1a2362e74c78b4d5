//! Everything that a screen shows of a daemon, as of one moment: what `GET /v1/events` sends once a second.
//!
//! Counts only grow while a disk is online; two snapshots and the time between them give rates.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::{Cluster, Datastore, Disk, DiskQos, Health, Pool, Task, Version};

/// One event of `GET /v1/events`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Snapshot {
    /// When it was taken, milliseconds since 1970.
    pub at_ms: u64,
    /// Version of the daemon.
    pub version: Version,
    /// Current problems.
    pub health: Health,
    /// All pools, by name.
    pub pools: Vec<PoolNow>,
    /// All disks, by name.
    pub disks: Vec<DiskNow>,
    /// All datastores, by name; absent when a shard did not say in time.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub datastores: Option<Vec<Datastore>>,
    /// This host as a member of its cluster; absent if it is in none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cluster: Option<Cluster>,
    /// Changes that continue in the background, and those that ended after their request was answered.
    #[serde(default)]
    pub tasks: Vec<Task>,
}

/// A pool, and what its devices have done.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct PoolNow {
    /// The pool, as in `GET /v1/pools`.
    pub pool: Pool,
    /// For each of its devices, in that order; null while that is not known.
    pub devices: Vec<Option<DeviceFigures>>,
}

/// Counters of a flash device since it was opened.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct DeviceFigures {
    /// Reads, writes and flushes that ended.
    pub ios: u64,
    /// Failed I/Os among them.
    pub errors: u64,
    /// Bytes read.
    pub read_bytes: u64,
    /// Bytes written, journals included.
    pub written_bytes: u64,
    /// Reads, writes and flushes that have not ended.
    pub in_flight: u64,
}

/// A disk with its entitlement and counters.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct DiskNow {
    /// The disk, as in `GET /v1/disks`.
    pub disk: Disk,
    /// Its entitlement, as in `GET /v1/qos`; absent if the disk was added or removed at that
    /// moment.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub qos: Option<DiskQos>,
    /// Its counters; absent while it is offline or its shard does not answer.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub figures: Option<DiskFigures>,
}

/// Counters of a disk since it came online.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct DiskFigures {
    /// Counting for so long, nanoseconds.
    pub elapsed_ns: u64,
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
    /// Requests by what became of them: outcomes that have happened, in the order of docs/outcomes.md.
    pub outcomes: Vec<OutcomeFigures>,
    /// Latency histogram: the upper bound of a bucket in nanoseconds, and its number of requests.
    /// Empty buckets are left out; shortest latency first.
    pub latency: Vec<[u64; 2]>,
    /// I/O to flash.
    pub flash: IoFigures,
    /// I/O to the backing.
    pub backing: IoFigures,
    /// Room of the cache's blocks, bytes.
    pub cache_bytes: u64,
    /// Bytes of blocks with data, part of the above.
    pub used_bytes: u64,
    /// Bytes that only flash has.
    pub dirty_bytes: u64,
    /// Bytes written from flash to the backing.
    pub destaged_bytes: u64,
    /// A drain is under way.
    pub is_draining: bool,
}

/// Requests of one outcome.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct OutcomeFigures {
    /// Class of the outcome; see docs/outcomes.md.
    pub class: String,
    /// The reason inside the class; empty where the class says it all.
    pub reason: String,
    /// Requests.
    pub count: u64,
    /// Their latencies together, nanoseconds.
    pub latency_sum_ns: u64,
}

/// I/O of a disk to one kind of place.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct IoFigures {
    /// That ended.
    pub ios: u64,
    /// Failed I/Os among them.
    pub errors: u64,
    /// Units, as shares and limits count them: 32 KiB by default, at least one for each I/O.
    pub units: u64,
    /// For how long they waited for their turn, together, nanoseconds.
    pub waited_ns: u64,
    /// Their latencies after that, together, nanoseconds.
    pub total_ns: u64,
    /// Bytes read.
    pub read_bytes: u64,
    /// Bytes written.
    pub write_bytes: u64,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_absent_is_not_written() {
        let figures = DiskFigures { latency: vec![[511, 2]], ..DiskFigures::default() };
        let text = serde_json::to_string(&figures).unwrap();
        assert!(text.contains(r#""latency":[[511,2]]"#), "{text}");
        assert_eq!(serde_json::from_str::<DiskFigures>(&text).unwrap(), figures);
    }
}
