//! API handlers for this host's cluster.

use hob_control::{
    Cluster, ClusterAdvice, ClusterDisk, ClusterHost, ClusterMove, ClusterMoveStart, ClusterTake, Disk,
};
use serde::Deserialize;

use super::endpoints::endpoints;
use super::extract::Form;

endpoints! { services;
    /// Returns this host's state as a member of its cluster.
    get "/v1/cluster"
    cluster() -> Cluster, "4XX" {
        services.cluster.view()
    }

    /// Returns all members of the cluster.
    get "/v1/cluster/hosts"
    cluster_hosts() -> Vec<ClusterHost>, "4XX", "5XX" {
        services.cluster.hosts().await
    }

    /// Returns all disks that a host of the cluster has or had.
    get "/v1/cluster/disks"
    cluster_disks() -> Vec<ClusterDisk>, "4XX", "5XX" {
        services.cluster.disks().await
    }

    /// Acquires a disk now that this host is configured to serve. With `force`, even if dirty data
    /// in the flash of a failed host is lost.
    post "/v1/cluster/disks/{disk}/take"
    cluster_take(disk = "disk": "The disk"; take: ClusterTake) -> Disk, "4XX", "5XX" {
        services.cluster.take(disk, take.force).await
    }

    /// Moves a disk from its current owner to another host of the cluster.
    post "/v1/cluster/disks/{disk}/move"
    cluster_move(disk = "disk": "The disk"; start: ClusterMoveStart) -> ClusterMove, "4XX", "5XX" {
        services.moves.order(disk, start).await
    }

    /// Cancels the move of a disk, if it is not too late.
    delete "/v1/cluster/disks/{disk}/move"
    cluster_move_cancel(disk = "disk": "The disk") -> ClusterMove, "4XX", "5XX" {
        services.moves.cancel(&disk).await
    }

    /// Returns all current and recent moves of disks.
    get "/v1/cluster/moves"
    cluster_moves() -> Vec<ClusterMove>, "4XX", "5XX" {
        services.moves.all().await
    }

    /// Returns placement advice: hosts with unused flash, and disks that should move.
    get "/v1/cluster/advice"
    cluster_advice(; ?query: Leaving) -> ClusterAdvice, "4XX", "5XX" {
        services.cluster.advice(query.leaving.as_deref()).await
    }
}

/// Query parameters of `GET /v1/cluster/advice`.
#[derive(Debug, Deserialize, utoipa::IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
struct Leaving {
    /// Host that is to be emptied: the advice moves all its disks to other hosts.
    #[serde(default)]
    leaving: Option<String>,
}

impl Form for Leaving {
    const ALLOWED: &'static str = "the only parameter of this request is leaving, for example ?leaving=host1";
}
