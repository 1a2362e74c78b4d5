//! This host's cluster.

use std::sync::Arc;

use axum::Router;
use axum::extract::{Path, State};
use axum::routing::{get, post};
use hob_control::{Cluster, ClusterDisk, ClusterHost, ClusterTake, Disk, Problem};

use super::extract::{Answer, Body};
use crate::daemon::manager::Manager;

type App = State<Arc<Manager>>;

/// The paths of this file.
pub(super) fn routes() -> Router<Arc<Manager>> {
    Router::new()
        .route("/v1/cluster", get(cluster))
        .route("/v1/cluster/hosts", get(hosts))
        .route("/v1/cluster/disks", get(disks))
        .route("/v1/cluster/disks/{disk}/take", post(take))
}

/// How this host is, as a member of its cluster.
#[utoipa::path(
    get,
    path = "/v1/cluster",
    operation_id = "cluster",
    responses((status = 200, body = Cluster), (status = "4XX", body = Problem))
)]
pub(super) async fn cluster(State(manager): App) -> Answer<Cluster> {
    manager.cluster_view().into()
}

/// All members of the cluster.
#[utoipa::path(
    get,
    path = "/v1/cluster/hosts",
    operation_id = "cluster_hosts",
    responses((status = 200, body = Vec<ClusterHost>), (status = "4XX", body = Problem), (status = "5XX", body = Problem))
)]
pub(super) async fn hosts(State(manager): App) -> Answer<Vec<ClusterHost>> {
    manager.cluster_hosts().await.into()
}

/// All disks that any host of the cluster has or had.
#[utoipa::path(
    get,
    path = "/v1/cluster/disks",
    operation_id = "cluster_disks",
    responses((status = 200, body = Vec<ClusterDisk>), (status = "4XX", body = Problem), (status = "5XX", body = Problem))
)]
pub(super) async fn disks(State(manager): App) -> Answer<Vec<ClusterDisk>> {
    manager.cluster_disks().await.into()
}

/// Takes a disk, which this host is to serve, now; by force although data of it that is in the flash of a host that is gone is lost then.
#[utoipa::path(
    post,
    path = "/v1/cluster/disks/{disk}/take",
    operation_id = "cluster_take",
    params(("disk" = String, Path, description = "The disk")),
    request_body = ClusterTake,
    responses((status = 200, body = Disk), (status = "4XX", body = Problem), (status = "5XX", body = Problem))
)]
pub(super) async fn take(
    State(manager): App,
    Path(disk): Path<String>,
    Body(ClusterTake { force }): Body<ClusterTake>,
) -> Answer<Disk> {
    manager.cluster_take(disk, force).await.into()
}
