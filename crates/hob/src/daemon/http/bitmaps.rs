//! API handlers for dirty bitmaps.

use std::sync::Arc;

use axum::extract::{Path, State};
use hob_control::{BitmapAdd, BitmapMerge, BitmapRotate, Bitmaps, Problem};

use super::extract::{Answer, Body};
use crate::daemon::manager::Manager;

type App = State<Arc<Manager>>;

/// Returns all bitmaps of a disk.
#[utoipa::path(
    get,
    path = "/v1/disks/{disk}/bitmaps",
    operation_id = "bitmaps",
    params(("disk" = String, Path, description = "The disk")),
    responses((status = 200, body = Bitmaps), (status = "4XX", body = Problem), (status = "5XX", body = Problem))
)]
pub(super) async fn list(State(manager): App, Path(disk): Path<String>) -> Answer<Bitmaps> {
    manager.exports.bitmaps(disk).await.into()
}

/// Adds a bitmap to a disk, which records from now on.
#[utoipa::path(
    post,
    path = "/v1/disks/{disk}/bitmaps",
    operation_id = "bitmap_add",
    params(("disk" = String, Path, description = "The disk")),
    request_body = BitmapAdd,
    responses((status = 200, body = Bitmaps), (status = "4XX", body = Problem), (status = "5XX", body = Problem))
)]
pub(super) async fn add(
    State(manager): App,
    Path(disk): Path<String>,
    Body(add): Body<BitmapAdd>,
) -> Answer<Bitmaps> {
    manager.exports.bitmap_add(disk, add).await.into()
}

/// Removes a bitmap of a disk.
#[utoipa::path(
    delete,
    path = "/v1/disks/{disk}/bitmaps/{bitmap}",
    operation_id = "bitmap_remove",
    params(
        ("disk" = String, Path, description = "The disk"),
        ("bitmap" = String, Path, description = "Name of the bitmap")
    ),
    responses((status = 200, body = Bitmaps), (status = "4XX", body = Problem), (status = "5XX", body = Problem))
)]
pub(super) async fn remove(
    State(manager): App,
    Path((disk, bitmap)): Path<(String, String)>,
) -> Answer<Bitmaps> {
    manager.exports.bitmap_remove(disk, bitmap).await.into()
}

/// Clears a bitmap of a disk.
#[utoipa::path(
    post,
    path = "/v1/disks/{disk}/bitmaps/{bitmap}/clear",
    operation_id = "bitmap_clear",
    params(
        ("disk" = String, Path, description = "The disk"),
        ("bitmap" = String, Path, description = "Name of the bitmap")
    ),
    responses((status = 200, body = Bitmaps), (status = "4XX", body = Problem), (status = "5XX", body = Problem))
)]
pub(super) async fn clear(
    State(manager): App,
    Path((disk, bitmap)): Path<(String, String)>,
) -> Answer<Bitmaps> {
    manager.exports.bitmap_clear(disk, bitmap).await.into()
}

/// Freezes the content of a bitmap under another name, and lets the bitmap continue empty. No
/// change is lost in between.
#[utoipa::path(
    post,
    path = "/v1/disks/{disk}/bitmaps/{bitmap}/rotate",
    operation_id = "bitmap_rotate",
    params(
        ("disk" = String, Path, description = "The disk"),
        ("bitmap" = String, Path, description = "Name of a bitmap that records")
    ),
    request_body = BitmapRotate,
    responses((status = 200, body = Bitmaps), (status = "4XX", body = Problem), (status = "5XX", body = Problem))
)]
pub(super) async fn rotate(
    State(manager): App,
    Path((disk, bitmap)): Path<(String, String)>,
    Body(rotate): Body<BitmapRotate>,
) -> Answer<Bitmaps> {
    manager.exports.bitmap_rotate(disk, bitmap, rotate).await.into()
}

/// Merges a bitmap into a recording one and removes it, for example after a failed backup.
#[utoipa::path(
    post,
    path = "/v1/disks/{disk}/bitmaps/{bitmap}/merge",
    operation_id = "bitmap_merge",
    params(
        ("disk" = String, Path, description = "The disk"),
        ("bitmap" = String, Path, description = "Name of the bitmap")
    ),
    request_body = BitmapMerge,
    responses((status = 200, body = Bitmaps), (status = "4XX", body = Problem), (status = "5XX", body = Problem))
)]
pub(super) async fn merge(
    State(manager): App,
    Path((disk, bitmap)): Path<(String, String)>,
    Body(merge): Body<BitmapMerge>,
) -> Answer<Bitmaps> {
    manager.exports.bitmap_merge(disk, bitmap, merge).await.into()
}
