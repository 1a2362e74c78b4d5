//! API handlers for this host's cluster.

use std::sync::Arc;

use axum::Router;
use axum::extract::{Path, Query, State};
use axum::routing::{get, post};
use hob_control::{
    Cluster, ClusterAdvice, ClusterDisk, ClusterHost, ClusterMove, ClusterMoveStart, ClusterTake, Disk,
    Problem,
};
use serde::Deserialize;

use super::extract::{Answer, Body};
use crate::daemon::manager::Manager;

type App = State<Arc<Manager>>;

/// Returns the routes of this file.
pub(super) fn routes() -> Router<Arc<Manager>> {
    Router::new()
        .route("/v1/cluster", get(cluster))
        .route("/v1/cluster/hosts", get(hosts))
        .route("/v1/cluster/disks", get(disks))
        .route("/v1/cluster/disks/{disk}/take", post(take))
        .route("/v1/cluster/disks/{disk}/move", post(start_move).delete(cancel_move))
        .route("/v1/cluster/moves", get(moves))
        .route("/v1/cluster/advice", get(advice))
}

/// Returns this host's state as a member of its cluster.
#[utoipa::path(
    get,
    path = "/v1/cluster",
    operation_id = "cluster",
    responses((status = 200, body = Cluster), (status = "4XX", body = Problem))
)]
pub(super) async fn cluster(State(manager): App) -> Answer<Cluster> {
    manager.cluster.view().into()
}

/// Returns all members of the cluster.
#[utoipa::path(
    get,
    path = "/v1/cluster/hosts",
    operation_id = "cluster_hosts",
    responses((status = 200, body = Vec<ClusterHost>), (status = "4XX", body = Problem), (status = "5XX", body = Problem))
)]
pub(super) async fn hosts(State(manager): App) -> Answer<Vec<ClusterHost>> {
    manager.cluster.hosts().await.into()
}

/// Returns all disks that a host of the cluster has or had.
#[utoipa::path(
    get,
    path = "/v1/cluster/disks",
    operation_id = "cluster_disks",
    responses((status = 200, body = Vec<ClusterDisk>), (status = "4XX", body = Problem), (status = "5XX", body = Problem))
)]
pub(super) async fn disks(State(manager): App) -> Answer<Vec<ClusterDisk>> {
    manager.cluster.disks().await.into()
}

/// Acquires a disk now that this host is configured to serve. With `force`, even if dirty data in
/// the flash of a failed host is lost.
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
    manager.cluster.take(disk, force).await.into()
}

/// Moves a disk from its current owner to another host of the cluster.
#[utoipa::path(
    post,
    path = "/v1/cluster/disks/{disk}/move",
    operation_id = "cluster_move",
    params(("disk" = String, Path, description = "The disk")),
    request_body = ClusterMoveStart,
    responses((status = 200, body = ClusterMove), (status = "4XX", body = Problem), (status = "5XX", body = Problem))
)]
pub(super) async fn start_move(
    State(manager): App,
    Path(disk): Path<String>,
    Body(start): Body<ClusterMoveStart>,
) -> Answer<ClusterMove> {
    manager.moves.order(disk, start).await.into()
}

/// Cancels the move of a disk, if it is not too late.
#[utoipa::path(
    delete,
    path = "/v1/cluster/disks/{disk}/move",
    operation_id = "cluster_move_cancel",
    params(("disk" = String, Path, description = "The disk")),
    responses((status = 200, body = ClusterMove), (status = "4XX", body = Problem), (status = "5XX", body = Problem))
)]
pub(super) async fn cancel_move(State(manager): App, Path(disk): Path<String>) -> Answer<ClusterMove> {
    manager.moves.cancel(&disk).await.into()
}

/// Returns all current and recent moves of disks.
#[utoipa::path(
    get,
    path = "/v1/cluster/moves",
    operation_id = "cluster_moves",
    responses((status = 200, body = Vec<ClusterMove>), (status = "4XX", body = Problem), (status = "5XX", body = Problem))
)]
pub(super) async fn moves(State(manager): App) -> Answer<Vec<ClusterMove>> {
    manager.moves.all().await.into()
}

/// Parameters of the placement advice.
#[derive(Debug, Deserialize, utoipa::IntoParams)]
#[serde(deny_unknown_fields)]
pub(super) struct Leaving {
    /// Host that all disks are to leave.
    #[serde(default)]
    leaving: Option<String>,
}

/// Returns placement advice: hosts with unused flash, and disks that should move.
#[utoipa::path(
    get,
    path = "/v1/cluster/advice",
    operation_id = "cluster_advice",
    params(Leaving),
    responses((status = 200, body = ClusterAdvice), (status = "4XX", body = Problem), (status = "5XX", body = Problem))
)]
pub(super) async fn advice(
    State(manager): App,
    Query(Leaving { leaving }): Query<Leaving>,
) -> Answer<ClusterAdvice> {
    manager.cluster.advice(leaving.as_deref()).await.into()
}
