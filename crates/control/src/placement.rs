//! API types for moves of disks within a cluster, and for placement advice.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::{CarryMode, Size};

/// `POST /v1/cluster/disks/{disk}/move`
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct ClusterMoveStart {
    /// Cluster name of the host that will own the disk.
    pub to: String,
    /// How the disk's cache is handled. By default it is copied if clients use the disk, and
    /// dropped otherwise.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cache: Option<CarryMode>,
    /// Pool of the receiving host. If absent: the pool of the same name, or the only one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pool: Option<String>,
    /// Largest rate at which the cache is copied, bytes per second.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bandwidth: Option<Size>,
}

/// A move of a disk to another host, in progress or ended recently.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ClusterMove {
    /// The disk.
    pub disk: String,
    /// Random identity of this move.
    pub id: String,
    /// The host that owned the disk before the move; empty until that host has seen the order to
    /// move.
    pub from: String,
    /// The host that will own the disk.
    pub to: String,
    /// State of the move.
    pub state: ClusterMoveState,
    /// How the disk's cache is handled; absent until the owner has decided.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cache: Option<CarryMode>,
    /// Reason why the move waits or failed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub note: Option<String>,
}

/// State of the move of a disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum ClusterMoveState {
    /// The owner of the disk has not seen the order to move.
    Asked,
    /// The owner asks the receiving host whether that host can take the disk.
    Offered,
    /// The receiving host can take the disk.
    Welcome,
    /// The owner writes dirty data to the backing, or the cache is copied to the receiving host.
    Leaving,
    /// No host owns the disk; the receiving host will take ownership.
    Given,
    /// The receiving host owns the disk.
    Done,
    /// The disk stayed at its owner, or a third host took it.
    Failed,
}

impl ClusterMoveState {
    /// Returns true if the move has ended.
    pub fn is_over(self) -> bool {
        self >= ClusterMoveState::Done
    }
}

/// `GET /v1/cluster/advice`: unused flash of each host, and better hosts for disks. Hit ratios are
/// those of LRU caches.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct ClusterAdvice {
    /// All members that have reported their figures.
    pub hosts: Vec<AdvisedHost>,
    /// Disks of all members that have reported.
    pub disks: Vec<AdvisedDisk>,
    /// Recommended moves, in the order in which to make them.
    pub moves: Vec<AdvisedMove>,
    /// Disks that should move but cannot, or not without another action, and the reason.
    pub stays: Vec<AdvisedStay>,
    /// Reads per second that flash serves with the present caches, according to the miss-ratio
    /// curves.
    pub hits_now: f64,
    /// Reads per second that flash would serve if each host divided its flash well among its
    /// present disks.
    pub hits_here: f64,
    /// Reads per second that flash would serve after the recommended moves.
    pub hits_then: f64,
    /// Guest reads per second, the sum over all disks in `disks`.
    pub reads: f64,
    /// Limits and possible errors of the advice, as sentences.
    pub caveats: Vec<String>,
}

/// One host of the cluster in the placement advice: its flash and its load.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct AdvisedHost {
    /// Name of the host.
    pub name: String,
    /// Size of the host's flash for caches.
    pub flash: Size,
    /// Unused flash, included in `flash`.
    pub free: Size,
    /// Flash of the host that is unused, or used with little benefit.
    pub to_spare: Size,
    /// Number of disks that the host serves.
    pub disks: u64,
    /// Requests per second of the host's disks.
    pub load: f64,
    /// Percentage of reads that the host's flash serves, according to the miss-ratio curves.
    pub hit_percent: f64,
    /// Percentage of reads that the host's flash would serve after the recommended moves.
    pub hit_percent_then: f64,
}

/// Cache and load of a disk.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct AdvisedDisk {
    /// Name of the disk.
    pub name: String,
    /// The host that serves the disk.
    pub host: String,
    /// Number of NBD clients, guests and recordings that use the disk.
    pub users: u64,
    /// Reads per second of the disk.
    pub reads: f64,
    /// Size of the disk's cache; 0 if it has none.
    pub cache: Size,
    /// Measured percentage of the disk's reads that flash or memory served.
    pub hit_percent_measured: f64,
    /// Hit percentage of the disk with its present cache, according to its miss-ratio curve.
    pub hit_percent: f64,
    /// Smallest cache with nearly the best possible hit ratio for the disk.
    pub useful: Size,
    /// Recommended size of the disk's cache on its present host.
    pub cache_here: Size,
    /// Hit percentage of the disk with a cache of size `cache_here`, according to its miss-ratio
    /// curve.
    pub hit_percent_here: f64,
    /// The host that should serve the disk.
    pub host_then: String,
    /// Recommended size of the disk's cache on the recommended host.
    pub cache_then: Size,
    /// Hit percentage of the disk with a cache of size `cache_then`, according to its miss-ratio
    /// curve.
    pub hit_percent_then: f64,
}

/// A recommended move of a disk.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct AdvisedMove {
    /// Name of the disk.
    pub disk: String,
    /// The host that serves the disk now.
    pub from: String,
    /// The host that should serve the disk.
    pub to: String,
    /// Hit percentage of the disk with its present cache, according to its miss-ratio curve.
    pub hit_percent: f64,
    /// Hit percentage with the part of the present cache that fits the destination's free flash,
    /// once that part is filled.
    pub hit_percent_at_once: f64,
    /// Hit percentage of the disk once the destination's flash is divided as recommended.
    pub hit_percent_then: f64,
    /// Additional reads per second that flash serves, over all disks, once flash is divided as
    /// recommended.
    pub gain: f64,
}

/// A disk that should move to another host but cannot.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct AdvisedStay {
    /// Name of the disk.
    pub disk: String,
    /// Why the advice does not move the disk.
    pub why: String,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_order_needs_a_host_and_refuses_unknown_fields() {
        let start: ClusterMoveStart = serde_json::from_str(r#"{"to":"b","cache":"heat-map"}"#).unwrap();
        assert_eq!((start.to.as_str(), start.cache), ("b", Some(CarryMode::HeatMap)));
        for wrong in ["{}", r#"{"to":"b","cash":"drop"}"#] {
            assert!(serde_json::from_str::<ClusterMoveStart>(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn a_finished_move_is_done_or_failed() {
        use ClusterMoveState::*;
        let over: Vec<bool> =
            [Asked, Offered, Welcome, Leaving, Given, Done, Failed].map(ClusterMoveState::is_over).to_vec();
        assert_eq!(over, [false, false, false, false, false, true, true]);
    }
}
