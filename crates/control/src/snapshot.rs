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
    /// Who tells it.
    pub version: Version,
    /// What is wrong, if anything is.
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
    /// As `GET /v1/pools` has it.
    pub pool: Pool,
    /// For each of its devices, in that order; null while that is not known.
    pub devices: Vec<Option<DeviceFigures>>,
}

/// What a flash device has done since it was opened.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct DeviceFigures {
    /// Reads, writes and flushes that ended.
    pub ios: u64,
    /// Of these, failed.
    pub errors: u64,
    /// Bytes read.
    pub read_bytes: u64,
    /// Bytes written, journals included.
    pub written_bytes: u64,
    /// Reads, writes and flushes that have not ended.
    pub in_flight: u64,
}

/// A disk, what it is due, and what it has done.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct DiskNow {
    /// As `GET /v1/disks` has it.
    pub disk: Disk,
    /// As `GET /v1/qos` has it; absent if the disk came or went at that moment.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub qos: Option<DiskQos>,
    /// What it has done; absent while it is offline or its shard does not answer.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub figures: Option<DiskFigures>,
}

/// What a disk has done since it came online.
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
    /// How many requests took how long: nanoseconds at most, and their number; buckets that hold something, shortest
    /// first.
    pub latency: Vec<[u64; 2]>,
    /// I/O to flash.
    pub flash: IoFigures,
    /// I/O to the backing.
    pub backing: IoFigures,
    /// Room of the cache's blocks, bytes.
    pub cache_bytes: u64,
    /// Of these, bytes of blocks that hold data.
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
    /// As in docs/outcomes.md.
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
    /// Of these, failed.
    pub errors: u64,
    /// In units, of 32 KiB unless told otherwise, one at least for each, as shares and limits count.
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
