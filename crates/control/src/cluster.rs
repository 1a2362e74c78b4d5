//! API types for a cluster: hosts that agree which host serves which disk.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::Size;

/// `GET /v1/cluster`: cluster membership of this host.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Cluster {
    /// Membership state of this host.
    pub state: ClusterState,
    /// This host's name.
    pub host: String,
    /// Random identity of this member. The identity differs from earlier members of the same name.
    pub id: String,
    /// Endpoints of the etcd members that this host uses.
    pub etcd: Vec<String>,
    /// Prefix of all etcd keys of the cluster.
    pub prefix: String,
    /// Length of this host's lease, seconds.
    pub lease_seconds: u64,
    /// Milliseconds until this host must stop acknowledging requests, unless etcd renews its lease.
    pub left_ms: u64,
    /// Number of disks that this host owns.
    pub disks_held: u64,
    /// Why this host is not a member of the cluster, or the last error.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub why: Option<String>,
}

/// Cluster membership state of a host.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum ClusterState {
    /// The host has a lease.
    Member,
    /// The host has no lease, and its disks are not served.
    Joining,
    /// The host's lease may have expired. Replies to its disks' clients wait until the lease is
    /// confirmed.
    Suspended,
}

/// A member of the cluster, in `GET /v1/cluster/hosts`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ClusterHost {
    /// Name of the host.
    pub name: String,
    /// Random identity of the member. The identity differs from earlier members of the same name.
    pub id: String,
    /// Address of the member's control API.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub address: Option<String>,
    /// The member's version of hob.
    pub version: String,
    /// Pools of the host.
    pub pools: Vec<ClusterPool>,
    /// Number of disks that the member owns.
    pub disks: u64,
}

/// A pool of a member.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ClusterPool {
    /// Name of the pool.
    pub name: String,
    /// Space for caches in the pool.
    pub size: Size,
    /// Unused flash, included in `size`.
    pub free: Size,
}

/// A disk in `GET /v1/cluster/disks`. Some host owns or owned the disk.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ClusterDisk {
    /// Name of the disk, the same on all hosts.
    pub name: String,
    /// State of the disk in the cluster.
    pub state: ClusterDiskState,
    /// The host that owns the disk, or owned it last.
    pub host: String,
    /// Number of times that the disk changed its owner.
    pub generation: u64,
    /// Whether the flash of `host` may have data that is not on the backing.
    pub dirty: bool,
    /// The host whose flash has a replica of all dirty data of the disk.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub copy: Option<String>,
}

/// Cluster-wide state of a disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum ClusterDiskState {
    /// A host owns the disk.
    Held,
    /// A host took the disk over, and writes its replica of the dirty data to the backing. The disk
    /// is not served yet.
    Adopted,
    /// The owner released the disk.
    Free,
    /// The owner failed, and no other host owns the disk yet.
    Vanished,
}

/// `POST /v1/cluster/disks/{disk}/take`
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields, default)]
pub struct ClusterTake {
    /// Take the disk even if dirty data in another host's flash is lost.
    pub force: bool,
}
