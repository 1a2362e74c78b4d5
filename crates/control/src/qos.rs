//! Who gets how much where many disks share something: shares, limits and reservations of disks, named sets of them, and
//! datastores. I/O is counted in units, of 32 KiB unless told otherwise, one at least for each.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::Size;

/// What a disk is due.
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

/// `PATCH /v1/disks/{disk}/qos` and `PUT /v1/storage-policies/{policy}`: what is absent stays as it is, or as it is by default.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct QosPatch {
    /// Of a disk: have what that storage policy says, now and when it changes. An empty name: keep it as it is, for itself.
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

/// What one disk is due, and where.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct DiskQos {
    /// The disk.
    pub disk: String,
    /// What its backing lies on; absent while it has never been opened.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub datastore: Option<String>,
    /// The storage policy that says so, if one does.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub policy: Option<String>,
    /// What it is due.
    #[serde(flatten)]
    pub qos: Qos,
    /// Notes about what was done.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub notes: Vec<String>,
}

/// A named set of rules that disks share.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct StoragePolicy {
    /// Its name.
    pub name: String,
    /// What its disks are due, each.
    #[serde(flatten)]
    pub qos: Qos,
    /// Disks that have it.
    pub disks: Vec<String>,
}

/// What several backings lie on, and so compete for.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Datastore {
    /// Its name.
    pub name: String,
    /// `off`; `auto`, throttled when it is late; `knee`, the same, and when it is late is measured; or `depth:N`, so many I/Os at once.
    pub control: String,
    /// When it is late, under `auto`, milliseconds; under `knee` as long as the knee is not known.
    pub latency_ms: u32,
    /// Units a second that it can do, where that was said.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub capacity: Option<u32>,
    /// The most units a second that it has been seen to do under control; 0 if nobody looked.
    pub peak: u32,
    /// Reservations of its disks, together.
    pub reserved: u32,
    /// Its disks.
    pub disks: Vec<String>,
    /// I/Os that may be in it at once; absent while it is not throttled.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub window: Option<u32>,
    /// I/Os in it that the window counts.
    pub in_flight: u32,
    /// I/Os that wait for their turn.
    pub waiting: u64,
    /// Its latency under control, smoothed, nanoseconds; 0 if nobody looked.
    pub latency_ns: u64,
    /// Under `knee`: the latency from which on more load brings hardly more throughput, nanoseconds, once it is known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub knee_ns: Option<u64>,
}

/// `PATCH /v1/datastores/{datastore}`: what is absent stays.
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
