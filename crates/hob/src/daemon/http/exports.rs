//! API handlers for additional exports of disks.

use std::sync::Arc;

use axum::extract::{Path, State};
use hob_control::{DiskChanged, Export, Problem};

use super::extract::{Answer, Body};
use crate::daemon::manager::Manager;

type App = State<Arc<Manager>>;

/// Adds an export to a disk.
#[utoipa::path(
    post,
    path = "/v1/disks/{disk}/exports",
    operation_id = "export_add",
    params(("disk" = String, Path, description = "The disk")),
    request_body = Export,
    responses((status = 200, body = DiskChanged), (status = "4XX", body = Problem), (status = "5XX", body = Problem))
)]
pub(super) async fn add(
    State(manager): App,
    Path(disk): Path<String>,
    Body(export): Body<Export>,
) -> Answer<DiskChanged> {
    manager.disks.export_add(disk, export).await.into()
}

/// Removes an additional export. The export's clients are disconnected.
#[utoipa::path(
    delete,
    path = "/v1/disks/{disk}/exports/{export}",
    operation_id = "export_remove",
    params(
        ("disk" = String, Path, description = "The disk"),
        ("export" = String, Path, description = "Name of the export")
    ),
    responses((status = 200, body = DiskChanged), (status = "4XX", body = Problem), (status = "5XX", body = Problem))
)]
pub(super) async fn remove(
    State(manager): App,
    Path((disk, export)): Path<(String, String)>,
) -> Answer<DiskChanged> {
    manager.disks.export_remove(disk, export).await.into()
}
