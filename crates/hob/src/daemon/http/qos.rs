//! API handlers for shares, limits and reservations, storage policies, and datastores.

use std::sync::Arc;

use axum::extract::{Path, State};
use hob_control::{Datastore, DatastorePatch, DiskQos, Problem, QosPatch, StoragePolicy};

use super::extract::{Answer, Body};
use crate::daemon::manager::Manager;

type App = State<Arc<Manager>>;

/// Returns the entitlements of all disks.
#[utoipa::path(get, path = "/v1/qos", operation_id = "qos_list", responses((status = 200, body = Vec<DiskQos>)))]
pub(super) async fn disks(State(manager): App) -> Answer<Vec<DiskQos>> {
    Answer::Yes(manager.qos.disks())
}

/// Returns the entitlement of a disk.
#[utoipa::path(
    get,
    path = "/v1/disks/{disk}/qos",
    operation_id = "qos",
    params(("disk" = String, Path, description = "The disk")),
    responses((status = 200, body = DiskQos), (status = 404, body = Problem))
)]
pub(super) async fn disk(State(manager): App, Path(disk): Path<String>) -> Answer<DiskQos> {
    manager.qos.disk(&disk).into()
}

/// Changes the entitlement of a disk. Reservations above the capacity of its datastore are refused.
#[utoipa::path(
    patch,
    path = "/v1/disks/{disk}/qos",
    operation_id = "qos_set",
    params(("disk" = String, Path, description = "The disk")),
    request_body = QosPatch,
    responses((status = 200, body = DiskQos), (status = "4XX", body = Problem), (status = "5XX", body = Problem))
)]
pub(super) async fn set(
    State(manager): App,
    Path(disk): Path<String>,
    Body(patch): Body<QosPatch>,
) -> Answer<DiskQos> {
    manager.qos.set(disk, patch).await.into()
}

/// Returns all storage policies.
#[utoipa::path(
    get,
    path = "/v1/storage-policies",
    operation_id = "storage_policies",
    responses((status = 200, body = Vec<StoragePolicy>))
)]
pub(super) async fn policies(State(manager): App) -> Answer<Vec<StoragePolicy>> {
    Answer::Yes(manager.qos.policies())
}

/// Creates a storage policy, or changes it for all disks that have it.
#[utoipa::path(
    put,
    path = "/v1/storage-policies/{policy}",
    operation_id = "storage_policy_set",
    params(("policy" = String, Path, description = "Its name")),
    request_body = QosPatch,
    responses((status = 200, body = StoragePolicy), (status = "4XX", body = Problem), (status = "5XX", body = Problem))
)]
pub(super) async fn policy_set(
    State(manager): App,
    Path(policy): Path<String>,
    Body(patch): Body<QosPatch>,
) -> Answer<StoragePolicy> {
    manager.qos.policy_set(policy, patch).await.into()
}

/// Removes a storage policy that no disk has.
#[utoipa::path(
    delete,
    path = "/v1/storage-policies/{policy}",
    operation_id = "storage_policy_remove",
    params(("policy" = String, Path, description = "Its name")),
    responses((status = 200, body = StoragePolicy), (status = "4XX", body = Problem), (status = "5XX", body = Problem))
)]
pub(super) async fn policy_remove(State(manager): App, Path(policy): Path<String>) -> Answer<StoragePolicy> {
    manager.qos.policy_remove(policy).await.into()
}

/// Returns all datastores with their state.
#[utoipa::path(
    get,
    path = "/v1/datastores",
    operation_id = "datastores",
    responses((status = 200, body = Vec<Datastore>), (status = "5XX", body = Problem))
)]
pub(super) async fn datastores(State(manager): App) -> Answer<Vec<Datastore>> {
    manager.qos.datastores().await.into()
}

/// Returns a datastore with its state.
#[utoipa::path(
    get,
    path = "/v1/datastores/{datastore}",
    operation_id = "datastore",
    params(("datastore" = String, Path, description = "Its name")),
    responses((status = 200, body = Datastore), (status = 404, body = Problem))
)]
pub(super) async fn datastore(State(manager): App, Path(datastore): Path<String>) -> Answer<Datastore> {
    manager.qos.datastore(&datastore).await.into()
}

/// Changes the throttling and the capacity of a datastore.
#[utoipa::path(
    patch,
    path = "/v1/datastores/{datastore}",
    operation_id = "datastore_set",
    params(("datastore" = String, Path, description = "Its name")),
    request_body = DatastorePatch,
    responses((status = 200, body = Datastore), (status = "4XX", body = Problem), (status = "5XX", body = Problem))
)]
pub(super) async fn datastore_set(
    State(manager): App,
    Path(datastore): Path<String>,
    Body(patch): Body<DatastorePatch>,
) -> Answer<Datastore> {
    manager.qos.datastore_set(datastore, patch).await.into()
}
