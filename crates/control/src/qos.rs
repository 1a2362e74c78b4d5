//! Quality of service: shares, limits and reservations of disks, storage policies (named sets of
//! them), and datastores. I/O is counted in units of 32 KiB by default. Each I/O counts as one unit
//! at least.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::Size;

/// The entitlement of a disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Qos {
    /// Its part where there is too little for all: low is 500, normal 1000, high 2000.
    #[serde(default = "Qos::shares_default")]
    pub shares: u32,
    /// Units a second of its datastore that it gets whatever others want; 0 for none.
    #[serde(default)]
    pub reservation: u32,
    /// Units a second of its datastore that it does not pass.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub limit: Option<u32>,
    /// Bytes a second of its datastore that it does not pass.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bytes_limit: Option<Size>,
    /// Units a second of each flash device that it does not pass.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub flash_limit: Option<u32>,
}

impl Qos {
    fn shares_default() -> u32 {
        1000
    }
}

impl Default for Qos {
    fn default() -> Qos {
        let shares = Qos::shares_default();
        Qos { shares, reservation: 0, limit: None, bytes_limit: None, flash_limit: None }
    }
}

/// `PATCH /v1/disks/{disk}/qos` and `PUT /v1/storage-policies/{policy}`: absent fields keep their
/// value or the default.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct QosPatch {
    /// For a disk: follow this storage policy, also when it changes. An empty name: keep the
    /// current values without a policy.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub policy: Option<String>,
    /// `low`, `normal`, `high` or a number.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub shares: Option<String>,
    /// Units a second; 0 for none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reservation: Option<u32>,
    /// Units a second; 0 for none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub limit: Option<u32>,
    /// Bytes a second; 0 for none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bytes_limit: Option<Size>,
    /// Units a second of each flash device; 0 for none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub flash_limit: Option<u32>,
}

/// The entitlement of one disk, and its datastore.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct DiskQos {
    /// The disk.
    pub disk: String,
    /// The datastore of its backing; absent while it has never been opened.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub datastore: Option<String>,
    /// The storage policy that says so, if one does.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub policy: Option<String>,
    /// Its entitlement.
    #[serde(flatten)]
    pub qos: Qos,
    /// Remarks about the change.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub notes: Vec<String>,
}

/// A named set of rules that disks share.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct StoragePolicy {
    /// Its name.
    pub name: String,
    /// The entitlement of each of its disks.
    #[serde(flatten)]
    pub qos: Qos,
    /// Disks that have it.
    pub disks: Vec<String>,
}

/// The storage that several backings share and compete for.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Datastore {
    /// Its name.
    pub name: String,
    /// `off`; `auto`: throttle when it is late; `knee`: as `auto`, with a measured latency; or
    /// `depth:N`: N I/Os at once.
    pub control: String,
    /// When it is late, under `auto`, milliseconds; under `knee` as long as the knee is not known.
    pub latency_ms: u32,
    /// Units a second that it can do, where that was said.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub capacity: Option<u32>,
    /// The highest measured rate under control, units per second; 0 if it was never measured.
    pub peak: u32,
    /// Reservations of its disks, together.
    pub reserved: u32,
    /// Its disks.
    pub disks: Vec<String>,
    /// Number of I/Os that may be in flight; absent while it is not throttled.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub window: Option<u32>,
    /// I/Os in it that the window counts.
    pub in_flight: u32,
    /// I/Os that wait for their turn.
    pub waiting: u64,
    /// Smoothed latency under control, nanoseconds; 0 if it was never measured.
    pub latency_ns: u64,
    /// Under `knee`: the latency from which on more load brings hardly more throughput, nanoseconds, once it is known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub knee_ns: Option<u64>,
}

/// `PATCH /v1/datastores/{datastore}`: absent fields keep their value.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct DatastorePatch {
    /// `off`, `auto`, `knee` or `depth:N`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub control: Option<String>,
    /// Under `auto`: above this it is throttled, milliseconds; under `knee` until the knee is known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub latency_ms: Option<u32>,
    /// Units a second that it can do, for reservations; 0: what has been seen.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub capacity: Option<u32>,
}
