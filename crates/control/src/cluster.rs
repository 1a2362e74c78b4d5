//! A cluster of hosts that agree which host serves which disk.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::Size;

/// `GET /v1/cluster`: this host, as a member.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Cluster {
    /// Its state.
    pub state: ClusterState,
    /// This host's name.
    pub host: String,
    /// Tells it from others that ever had the name.
    pub id: String,
    /// Members of etcd that it asks.
    pub etcd: Vec<String>,
    /// Prefix of all keys in etcd.
    pub prefix: String,
    /// Length of its lease.
    pub lease_seconds: u64,
    /// How much longer it may acknowledge anything unless it hears of etcd, milliseconds.
    pub left_ms: u64,
    /// Disks that it holds.
    pub disks_held: u64,
    /// Why it is not a member, or what went wrong last.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub why: Option<String>,
}

/// How a host is, as a member of its cluster.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum ClusterState {
    /// It has a lease.
    Member,
    /// It has none: its disks are not served.
    Joining,
    /// Its lease may have ended: what its disks answer is held until it knows.
    Suspended,
}

/// Part of `GET /v1/cluster/hosts`: a member.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ClusterHost {
    /// Its name.
    pub name: String,
    /// Tells it from others that ever had the name.
    pub id: String,
    /// Address of its control API.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub address: Option<String>,
    /// Version of its hob.
    pub version: String,
    /// Its pools.
    pub pools: Vec<ClusterPool>,
    /// Disks that it holds.
    pub disks: u64,
}

/// A pool of a member.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ClusterPool {
    /// Its name.
    pub name: String,
    /// Room for caches.
    pub size: Size,
    /// Unused flash, part of the above.
    pub free: Size,
}

/// Part of `GET /v1/cluster/disks`: a disk that some host has or had.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ClusterDisk {
    /// Its name, one for all hosts.
    pub name: String,
    /// Its state.
    pub state: ClusterDiskState,
    /// The host that has the disk, or had it last.
    pub host: String,
    /// How often it changed hands.
    pub generation: u64,
    /// Data that is not on the backing may be in that host's flash.
    pub dirty: bool,
    /// The host whose flash has a second copy of all dirty data.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub copy: Option<String>,
}

/// How a disk is, for all hosts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum ClusterDiskState {
    /// A host holds it.
    Held,
    /// A host holds it and brings its second copy of what another one had dirty to the backing. It is not served so far.
    Adopted,
    /// Its host gave it back.
    Free,
    /// Its host vanished.
    Vanished,
}

/// `POST /v1/cluster/disks/{disk}/take`
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields, default)]
pub struct ClusterTake {
    /// Even if data of it that is in another host's flash is lost by this.
    pub force: bool,
}
