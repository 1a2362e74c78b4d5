//! API types for quality of service: shares, limits and reservations of disks; storage policies
//! (named sets of them); and datastores. I/O is counted in units of 32 KiB by default. Each I/O
//! counts as at least one unit.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::Size;

/// Shares, reservation and limits of a disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Qos {
    /// Relative share of the datastore's I/O that the disk gets while disks compete for it: low is
    /// 500, normal 1000, high 2000.
    #[serde(default = "Qos::shares_default")]
    pub shares: u32,
    /// Units of I/O per second that the datastore guarantees to the disk; 0 for none.
    #[serde(default)]
    pub reservation: u32,
    /// Maximum units of I/O per second that the disk may use of its datastore.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub limit: Option<u32>,
    /// Maximum bytes per second that the disk may use of its datastore.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bytes_limit: Option<Size>,
    /// Maximum units of I/O per second that the disk may use of each flash device.
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

/// `PATCH /v1/disks/{disk}/qos` and `PUT /v1/storage-policies/{policy}`. Absent fields keep their
/// value or the default.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct QosPatch {
    /// For a disk: use this storage policy, and follow its changes. An empty name keeps the current
    /// values and leaves the policy.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub policy: Option<String>,
    /// `low`, `normal`, `high` or a number.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub shares: Option<String>,
    /// Guaranteed units of I/O per second; 0 for none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reservation: Option<u32>,
    /// Maximum units of I/O per second; 0 for no limit.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub limit: Option<u32>,
    /// Maximum bytes per second; 0 for no limit.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bytes_limit: Option<Size>,
    /// Maximum units of I/O per second of each flash device; 0 for no limit.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub flash_limit: Option<u32>,
}

/// Shares, reservation and limits of one disk, and the name of its datastore.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct DiskQos {
    /// The disk.
    pub disk: String,
    /// Datastore of the disk's backing. Absent until the backing was opened for the first time.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub datastore: Option<String>,
    /// The storage policy that the disk follows, if any.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub policy: Option<String>,
    /// Shares, reservation and limits of the disk.
    #[serde(flatten)]
    pub qos: Qos,
    /// Remarks about the change.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub notes: Vec<String>,
}

/// A storage policy: named shares, reservation and limits for several disks.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct StoragePolicy {
    /// Name of the storage policy.
    pub name: String,
    /// Shares, reservation and limits of each disk that follows the policy.
    #[serde(flatten)]
    pub qos: Qos,
    /// Names of the disks that follow the policy.
    pub disks: Vec<String>,
    /// Remarks about the change.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub notes: Vec<String>,
}

/// The storage that several backings share and compete for.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Datastore {
    /// Name of the datastore.
    pub name: String,
    /// Throttling of the datastore: `off`; `auto` (throttle above `latency_ms`); `knee` (as `auto`,
    /// with a measured latency); or `depth:N` (at most N I/Os at once).
    pub control: String,
    /// With `auto`: latency above which the datastore is throttled, milliseconds. With `knee`: the
    /// same until the knee is known.
    pub latency_ms: u32,
    /// Configured capacity of the datastore in units per second, if set.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub capacity: Option<u32>,
    /// Highest rate measured while the datastore was throttled, units per second; 0 if never
    /// measured.
    pub peak: u32,
    /// Sum of the reservations of the datastore's disks, units per second.
    pub reserved: u32,
    /// Disks whose backings are on the datastore.
    pub disks: Vec<String>,
    /// Number of I/Os that the datastore may have in flight. Absent while the datastore is not
    /// throttled.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub window: Option<u32>,
    /// Number of I/Os of the datastore in flight that count towards the window.
    pub in_flight: u32,
    /// Number of I/Os that the scheduler delays.
    pub waiting: u64,
    /// Smoothed latency while the datastore was throttled, nanoseconds; 0 if never measured.
    pub latency_ns: u64,
    /// With `knee`: latency above which more load adds little throughput, nanoseconds. Absent until
    /// it is known.
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
    /// With `auto`: latency above which the datastore is throttled, milliseconds. With `knee`: the
    /// same until the knee is known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub latency_ms: Option<u32>,
    /// Capacity for reservations, units per second; 0 means the highest measured rate.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub capacity: Option<u32>,
}
