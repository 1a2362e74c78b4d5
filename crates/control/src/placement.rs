//! Disks that change their host within a cluster, and where they had better be.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::{CarryMode, Size};

/// `POST /v1/cluster/disks/{disk}/move`
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct ClusterMoveStart {
    /// The host that is to have it, by its name in the cluster.
    pub to: String,
    /// What happens to its cache. By default it is copied while clients use the disk, and left
    /// behind otherwise.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cache: Option<CarryMode>,
    /// The pool there; the one of the same name, or the only one, if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pool: Option<String>,
    /// Bytes a second that the cache takes on its way, at most.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bandwidth: Option<Size>,
}

/// A disk on its way to another host, or one that was not long ago.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ClusterMove {
    /// The disk.
    pub disk: String,
    /// Tells this move from others of the disk.
    pub id: String,
    /// The host that has or had it; empty until that host has seen the order.
    pub from: String,
    /// The host that is to have it.
    pub to: String,
    /// How far it is.
    pub state: ClusterMoveState,
    /// What happens to its cache; absent until that is decided.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cache: Option<CarryMode>,
    /// What the move waits for, or why it failed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub note: Option<String>,
}

/// How far a disk's move is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum ClusterMoveState {
    /// The host that has it has not seen the order.
    Asked,
    /// The other host is asked whether it can take it.
    Offered,
    /// It can.
    Welcome,
    /// Dirty data is written to the backing, or the cache is copied to the other host.
    Leaving,
    /// Nobody has it, and the other host is to take it.
    Given,
    /// The other host has it.
    Done,
    /// The disk stays where it was, or another host took it.
    Failed,
}

impl ClusterMoveState {
    /// Nothing more happens.
    pub fn is_over(self) -> bool {
        self >= ClusterMoveState::Done
    }
}

/// `GET /v1/cluster/advice`: where flash is to spare, and which disks had better be elsewhere. Hits are those of LRU caches.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct ClusterAdvice {
    /// All members that have reported.
    pub hosts: Vec<AdvisedHost>,
    /// Their disks.
    pub disks: Vec<AdvisedDisk>,
    /// Moves, in the order in which to make them.
    pub moves: Vec<AdvisedMove>,
    /// Disks that should go, and cannot, or not without more: why.
    pub stays: Vec<AdvisedStay>,
    /// Reads a second that flash serves, by the curves, with the caches that there are.
    pub hits_now: f64,
    /// The same, if each host's flash were divided well among the disks that it has.
    pub hits_here: f64,
    /// The same after the moves.
    pub hits_then: f64,
    /// Reads a second, all disks together.
    pub reads: f64,
    /// Caveats, as sentences.
    pub caveats: Vec<String>,
}

/// A host, as far as flash is concerned.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct AdvisedHost {
    /// Its name.
    pub name: String,
    /// Flash for caches.
    pub flash: Size,
    /// Unused flash, part of the above.
    pub free: Size,
    /// Flash that is unused, or used with little benefit.
    pub to_spare: Size,
    /// Disks that it serves.
    pub disks: u64,
    /// Requests a second.
    pub load: f64,
    /// Share of the reads that its flash serves, by the curves, percent.
    pub hit_percent: f64,
    /// The same after the moves, percent.
    pub hit_percent_then: f64,
}

/// A disk, as far as flash is concerned.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct AdvisedDisk {
    /// Its name.
    pub name: String,
    /// The host that serves it.
    pub host: String,
    /// Clients, machines and recordings that use it.
    pub users: u64,
    /// Reads a second.
    pub reads: f64,
    /// Its cache; 0 if it has none.
    pub cache: Size,
    /// Reads that are served from flash or memory since counting began, percent.
    pub hit_percent_measured: f64,
    /// By the curve, with the cache that it has, percent.
    pub hit_percent: f64,
    /// The smallest cache that serves nearly all that any could.
    pub useful: Size,
    /// The cache that it should have where it is.
    pub cache_here: Size,
    /// By the curve, with that one, percent.
    pub hit_percent_here: f64,
    /// The host that should serve it.
    pub host_then: String,
    /// The cache that it should have there.
    pub cache_then: Size,
    /// By the curve, with that one, percent.
    pub hit_percent_then: f64,
}

/// A move that is recommended.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct AdvisedMove {
    /// Name of the disk.
    pub disk: String,
    /// The host that serves it.
    pub from: String,
    /// The host that should serve it.
    pub to: String,
    /// By the curve, with the cache that it has, percent.
    pub hit_percent: f64,
    /// With as much of that as is free there, once it is filled, percent.
    pub hit_percent_at_once: f64,
    /// When the other host's flash is divided as advised, percent.
    pub hit_percent_then: f64,
    /// Reads a second that flash serves more, all disks together, when flash is divided as advised.
    pub gain: f64,
}

/// A disk that should go and stays.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct AdvisedStay {
    /// Name of the disk.
    pub disk: String,
    /// Why.
    pub why: String,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_order_needs_a_host_and_refuses_what_it_does_not_know() {
        let start: ClusterMoveStart = serde_json::from_str(r#"{"to":"b","cache":"heat-map"}"#).unwrap();
        assert_eq!((start.to.as_str(), start.cache), ("b", Some(CarryMode::HeatMap)));
        for wrong in ["{}", r#"{"to":"b","cash":"drop"}"#] {
            assert!(serde_json::from_str::<ClusterMoveStart>(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn what_is_over_is_done_or_failed() {
        use ClusterMoveState::*;
        let over: Vec<bool> =
            [Asked, Offered, Welcome, Leaving, Given, Done, Failed].map(ClusterMoveState::is_over).to_vec();
        assert_eq!(over, [false, false, false, false, false, true, true]);
    }
}
