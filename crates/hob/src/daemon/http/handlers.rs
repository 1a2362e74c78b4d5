//! API handlers, one function per method and path. The handlers convert requests. The manager
//! decides.

use std::sync::Arc;

use axum::body::Body as HttpBody;
use axum::extract::rejection::QueryRejection;
use axum::extract::{Path, Query, State};
use axum::http::StatusCode;
use axum::http::header::{CACHE_CONTROL, CONTENT_TYPE};
use axum::response::{IntoResponse, Response};
use hob_control::{
    Cache, CacheEnable, CachePatch, Device, DeviceAdd, DevicePatch, Disk, DiskAdd, DiskChanged, DiskPatch,
    DiskResize, DiskStats, EventReport, Explanation, ExportDirty, OnClients, OnDirty, PlannedChange,
    PlannedPoolChange, Pool, PoolChanged, PoolCreate, Preview, Problem, Version,
};
use serde::Deserialize;
use utoipa::IntoParams;

use super::extract::{Answer, Body};
use super::trace::TraceBody;
use crate::daemon::manager::Manager;

type App = State<Arc<Manager>>;

/// Returns the OpenAPI document.
pub(super) async fn openapi() -> impl IntoResponse {
    ([(CONTENT_TYPE, "application/json")], super::openapi_json())
}

/// Returns the versions of the daemon and of its API.
#[utoipa::path(get, path = "/v1/version", responses((status = 200, body = Version)))]
pub(super) async fn version(State(manager): App) -> Answer<Version> {
    Answer::Yes(manager.observe.version())
}

/// Returns all pools.
#[utoipa::path(get, path = "/v1/pools", responses((status = 200, body = Vec<Pool>)))]
pub(super) async fn pools(State(manager): App) -> Answer<Vec<Pool>> {
    Answer::Yes(manager.observe.pools())
}

/// Creates a pool.
#[utoipa::path(
    post,
    path = "/v1/pools",
    request_body = PoolCreate,
    responses((status = 200, body = PoolChanged), (status = "4XX", body = Problem), (status = "5XX", body = Problem))
)]
pub(super) async fn pool_create(State(manager): App, Body(create): Body<PoolCreate>) -> Answer<PoolChanged> {
    manager.pools.pool_create(create).await.into()
}

/// Returns a pool.
#[utoipa::path(
    get,
    path = "/v1/pools/{pool}",
    params(("pool" = String, Path, description = "Its name")),
    responses((status = 200, body = Pool), (status = 404, body = Problem))
)]
pub(super) async fn pool(State(manager): App, Path(pool): Path<String>) -> Answer<Pool> {
    manager.observe.pool(&pool).into()
}

/// Removes a pool without caches and swap areas.
#[utoipa::path(
    delete,
    path = "/v1/pools/{pool}",
    params(("pool" = String, Path, description = "Its name")),
    responses((status = 200, body = PoolChanged), (status = "4XX", body = Problem), (status = "5XX", body = Problem))
)]
pub(super) async fn pool_remove(State(manager): App, Path(pool): Path<String>) -> Answer<PoolChanged> {
    manager.pools.pool_remove(pool).await.into()
}

/// Returns a pool's devices.
#[utoipa::path(
    get,
    path = "/v1/pools/{pool}/devices",
    params(("pool" = String, Path, description = "The pool")),
    responses((status = 200, body = Vec<Device>), (status = 404, body = Problem))
)]
pub(super) async fn devices(State(manager): App, Path(pool): Path<String>) -> Answer<Vec<Device>> {
    manager.observe.pool(&pool).map(|pool| pool.devices).into()
}

/// Adds a device to a pool.
#[utoipa::path(
    post,
    path = "/v1/pools/{pool}/devices",
    params(("pool" = String, Path, description = "The pool")),
    request_body = DeviceAdd,
    responses((status = 200, body = PoolChanged), (status = "4XX", body = Problem), (status = "5XX", body = Problem))
)]
pub(super) async fn device_add(
    State(manager): App,
    Path(pool): Path<String>,
    Body(add): Body<DeviceAdd>,
) -> Answer<PoolChanged> {
    manager.pools.device_add(pool, add).await.into()
}

/// Returns the effects of a pool change on caches and dirty data, without making the change.
#[utoipa::path(
    post,
    path = "/v1/pools/{pool}/preview",
    params(("pool" = String, Path, description = "The pool")),
    request_body = PlannedPoolChange,
    responses((status = 200, body = Preview), (status = "4XX", body = Problem), (status = "5XX", body = Problem))
)]
pub(super) async fn pool_preview(
    State(manager): App,
    Path(pool): Path<String>,
    Body(change): Body<PlannedPoolChange>,
) -> Answer<Preview> {
    manager.disks.pool_preview(&pool, &change).await.into()
}

/// Selects a device of a pool.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(super) struct WhichDevice {
    /// Path of the device.
    path: String,
}

/// Switches allocation from a device on or off. Segments in use on the device stay.
#[utoipa::path(
    patch,
    path = "/v1/pools/{pool}/devices",
    params(("pool" = String, Path, description = "The pool"), WhichDevice),
    request_body = DevicePatch,
    responses((status = 200, body = PoolChanged), (status = "4XX", body = Problem), (status = "5XX", body = Problem))
)]
pub(super) async fn device_set(
    State(manager): App,
    Path(pool): Path<String>,
    query: Result<Query<WhichDevice>, QueryRejection>,
    Body(patch): Body<DevicePatch>,
) -> Answer<PoolChanged> {
    match query {
        Ok(Query(device)) => manager.pools.device_set(pool, device.path, patch).await.into(),
        Err(_) => no_path("PATCH"),
    }
}

/// Selects the device to remove.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(super) struct DeviceRemoval {
    /// Path of the device.
    path: String,
    /// Lose dirty data on a missing device. Otherwise, such a device stays while a disk may need
    /// it.
    #[serde(default)]
    discard_dirty: bool,
}

/// Removes a device from a pool. Caches on it move to other devices, or shrink. Refused without
/// `discard_dirty=true` if the device is offline and may have dirty data of an offline disk.
#[utoipa::path(
    delete,
    path = "/v1/pools/{pool}/devices",
    params(("pool" = String, Path, description = "The pool"), DeviceRemoval),
    responses((status = 200, body = PoolChanged), (status = "4XX", body = Problem), (status = "5XX", body = Problem))
)]
pub(super) async fn device_remove(
    State(manager): App,
    Path(pool): Path<String>,
    query: Result<Query<DeviceRemoval>, QueryRejection>,
) -> Answer<PoolChanged> {
    let Ok(Query(DeviceRemoval { path, discard_dirty })) = query else { return no_path("DELETE") };
    let change = PlannedPoolChange::RemoveDevice { path: path.clone() };
    if let Err(error) = manager.disks.check_pool_discard(&pool, &change, discard_dirty).await {
        return Answer::from(Err(error));
    }
    manager.pools.device_remove(pool, path).await.into()
}

fn no_path<T>(method: &str) -> Answer<T> {
    let problem = Problem::new(format!("name the device: {method} …/devices?path=/dev/nvme0n1"));
    Answer::No(StatusCode::BAD_REQUEST, problem)
}

/// Returns all disks.
#[utoipa::path(get, path = "/v1/disks", responses((status = 200, body = Vec<Disk>)))]
pub(super) async fn disks(State(manager): App) -> Answer<Vec<Disk>> {
    Answer::Yes(manager.observe.disks())
}

/// Adds a disk and serves it.
#[utoipa::path(
    post,
    path = "/v1/disks",
    request_body = DiskAdd,
    responses((status = 200, body = DiskChanged), (status = "4XX", body = Problem), (status = "5XX", body = Problem))
)]
pub(super) async fn disk_add(State(manager): App, Body(add): Body<DiskAdd>) -> Answer<DiskChanged> {
    manager.disks.disk_add(add).await.into()
}

/// Returns a disk.
#[utoipa::path(
    get,
    path = "/v1/disks/{disk}",
    params(("disk" = String, Path, description = "Its name")),
    responses((status = 200, body = Disk), (status = 404, body = Problem))
)]
pub(super) async fn disk(State(manager): App, Path(disk): Path<String>) -> Answer<Disk> {
    manager.observe.disk(&disk).into()
}

/// Selects what happens to dirty data.
#[derive(Debug, Default, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(super) struct WhatOfDirty {
    /// Discard dirty data instead of draining it: acknowledged writes are lost.
    #[serde(default)]
    discard_dirty: bool,
}

/// Selects what happens to dirty data and to clients when a disk is removed.
#[derive(Debug, Default, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(super) struct Removal {
    /// Discard dirty data instead of draining it: acknowledged writes are lost.
    #[serde(default)]
    discard_dirty: bool,
    /// Disconnect the disk's clients. Otherwise, a disk with clients stays.
    #[serde(default)]
    force: bool,
}

impl WhatOfDirty {
    fn read(query: Result<Query<WhatOfDirty>, QueryRejection>) -> Result<OnDirty, Problem> {
        match query {
            Ok(Query(WhatOfDirty { discard_dirty: true })) => Ok(OnDirty::Discard),
            Ok(_) => Ok(OnDirty::Drain),
            Err(_) => Err(Problem::new("the only parameter of this request is ?discard_dirty=true")),
        }
    }
}

/// Removes a disk after draining its dirty data. The backing keeps its data.
#[utoipa::path(
    delete,
    path = "/v1/disks/{disk}",
    params(("disk" = String, Path, description = "Its name"), Removal),
    responses((status = 200, body = DiskChanged), (status = "4XX", body = Problem), (status = "5XX", body = Problem))
)]
pub(super) async fn disk_remove(
    State(manager): App,
    Path(disk): Path<String>,
    query: Result<Query<Removal>, QueryRejection>,
) -> Answer<DiskChanged> {
    let Ok(Query(Removal { discard_dirty, force })) = query else {
        let problem = Problem::new(
            "the only parameters of this request are ?discard_dirty=true and \
            ?force=true",
        );
        return Answer::No(StatusCode::BAD_REQUEST, problem);
    };
    let clients = if force { OnClients::Disconnect } else { OnClients::Refuse };
    if let Err(error) = manager.disks.check_unused(&disk, clients).await {
        return Answer::from(Err(error));
    }
    let dirty = if discard_dirty { OnDirty::Discard } else { OnDirty::Drain };
    manager.disks.disk_remove_from(disk, dirty, clients).await.into()
}

/// Returns the effects of a change on cached data, dirty data and clients, without making the
/// change.
#[utoipa::path(
    post,
    path = "/v1/disks/{disk}/preview",
    params(("disk" = String, Path, description = "The disk")),
    request_body = PlannedChange,
    responses((status = 200, body = Preview), (status = "4XX", body = Problem), (status = "5XX", body = Problem))
)]
pub(super) async fn preview(
    State(manager): App,
    Path(disk): Path<String>,
    Body(change): Body<PlannedChange>,
) -> Answer<Preview> {
    manager.disks.preview(&disk, &change).await.into()
}

/// Starts to drain a disk's dirty data to its backing; clean data stays in flash. The disk shows
/// the progress. The drain continues until it is complete or stopped. Repeating the request is
/// harmless.
#[utoipa::path(
    post,
    path = "/v1/disks/{disk}/drain",
    params(("disk" = String, Path, description = "The disk")),
    responses((status = 200, body = DiskChanged), (status = "4XX", body = Problem), (status = "5XX", body = Problem))
)]
pub(super) async fn drain(State(manager): App, Path(disk): Path<String>) -> Answer<DiskChanged> {
    manager.pools.drain(disk).await.into()
}

/// Changes a disk's own settings while it is served. Requests that already wait for the backing
/// follow the new limit too.
#[utoipa::path(
    patch,
    path = "/v1/disks/{disk}",
    params(("disk" = String, Path, description = "The disk")),
    request_body = DiskPatch,
    responses((status = 200, body = DiskChanged), (status = "4XX", body = Problem), (status = "5XX", body = Problem))
)]
pub(super) async fn disk_patch(
    State(manager): App,
    Path(disk): Path<String>,
    Body(patch): Body<DiskPatch>,
) -> Answer<DiskChanged> {
    manager.disks.disk_patch(disk, patch).await.into()
}

/// Grows a disk while it is served, to the size of its backing. With a size, a raw file is enlarged
/// first.
#[utoipa::path(
    post,
    path = "/v1/disks/{disk}/resize",
    params(("disk" = String, Path, description = "The disk")),
    request_body = DiskResize,
    responses((status = 200, body = DiskChanged), (status = "4XX", body = Problem), (status = "5XX", body = Problem))
)]
pub(super) async fn disk_resize(
    State(manager): App,
    Path(disk): Path<String>,
    Body(resize): Body<DiskResize>,
) -> Answer<DiskChanged> {
    manager.disks.disk_resize(disk, resize).await.into()
}

/// Reports an event of a disk's VM: its cache is drained or emptied, or stays as it is. A drain
/// continues after the response. The disk shows its progress.
#[utoipa::path(
    post,
    path = "/v1/disks/{disk}/events",
    params(("disk" = String, Path, description = "The disk")),
    request_body = EventReport,
    responses((status = 200, body = DiskChanged), (status = "4XX", body = Problem), (status = "5XX", body = Problem))
)]
pub(super) async fn disk_event(
    State(manager): App,
    Path(disk): Path<String>,
    Body(report): Body<EventReport>,
) -> Answer<DiskChanged> {
    let EventReport { event, discard_dirty } = report;
    if let Err(error) =
        manager.disks.check_discard(&disk, &PlannedChange::Event { event }, discard_dirty).await
    {
        return Answer::from(Err(error));
    }
    manager.disks.disk_event(disk, event).await.into()
}

/// Stops a drain before it is complete.
#[utoipa::path(
    delete,
    path = "/v1/disks/{disk}/drain",
    params(("disk" = String, Path, description = "The disk")),
    responses((status = 200, body = DiskChanged), (status = "4XX", body = Problem), (status = "5XX", body = Problem))
)]
pub(super) async fn drain_stop(State(manager): App, Path(disk): Path<String>) -> Answer<DiskChanged> {
    manager.pools.drain_stop(disk).await.into()
}

/// Discards dirty data: acknowledged writes are lost. For an offline disk the whole cache is
/// discarded. Refused without `discard_dirty=true` while data is or may be dirty.
#[utoipa::path(
    post,
    path = "/v1/disks/{disk}/cache/discard-dirty",
    params(("disk" = String, Path, description = "The disk"), WhatOfDirty),
    responses((status = 200, body = DiskChanged), (status = "4XX", body = Problem), (status = "5XX", body = Problem))
)]
pub(super) async fn discard_dirty(
    State(manager): App,
    Path(disk): Path<String>,
    query: Result<Query<WhatOfDirty>, QueryRejection>,
) -> Answer<DiskChanged> {
    let may_lose = match WhatOfDirty::read(query) {
        Ok(dirty) => dirty == OnDirty::Discard,
        Err(problem) => return Answer::No(StatusCode::BAD_REQUEST, problem),
    };
    if let Err(error) = manager.disks.check_discard(&disk, &PlannedChange::DiscardDirty, may_lose).await {
        return Answer::from(Err(error));
    }
    manager.disks.discard_dirty(disk).await.into()
}

/// Writes the dirty data of an offline disk to a sparse file on the daemon's host. The file
/// `PATH.map` beside it lists the valid ranges, in lines `data OFFSET BYTES` and `lost OFFSET
/// BYTES`.
#[utoipa::path(
    post,
    path = "/v1/disks/{disk}/cache/export-dirty",
    params(("disk" = String, Path, description = "The disk")),
    request_body = ExportDirty,
    responses((status = 200, body = DiskChanged), (status = "4XX", body = Problem), (status = "5XX", body = Problem))
)]
pub(super) async fn export_dirty(
    State(manager): App,
    Path(disk): Path<String>,
    Body(export): Body<ExportDirty>,
) -> Answer<DiskChanged> {
    manager.disks.export_dirty(disk, export).await.into()
}

/// Frees the space of a persistent cache that belongs to no disk. The data in the cache is lost.
/// Refused without `discard_dirty=true` while the cache has or may have dirty data.
#[utoipa::path(
    delete,
    path = "/v1/pools/{pool}/orphans/{owner}",
    params(
        ("pool" = String, Path, description = "The pool"),
        ("owner" = String, Path, description = "32 hexadecimal digits, as shown by the pool"),
        WhatOfDirty
    ),
    responses((status = 200, body = PoolChanged), (status = "4XX", body = Problem), (status = "5XX", body = Problem))
)]
pub(super) async fn orphan_discard(
    State(manager): App,
    Path((pool, owner)): Path<(String, String)>,
    query: Result<Query<WhatOfDirty>, QueryRejection>,
) -> Answer<PoolChanged> {
    let may_lose = match WhatOfDirty::read(query) {
        Ok(dirty) => dirty == OnDirty::Discard,
        Err(problem) => return Answer::No(StatusCode::BAD_REQUEST, problem),
    };
    let change = PlannedPoolChange::DiscardOrphan { owner: owner.clone() };
    if let Err(error) = manager.disks.check_pool_discard(&pool, &change, may_lose).await {
        return Answer::from(Err(error));
    }
    manager.disks.orphan_discard(pool, owner).await.into()
}

/// Returns a disk's cache; null if it has none.
#[utoipa::path(
    get,
    path = "/v1/disks/{disk}/cache",
    params(("disk" = String, Path, description = "The disk")),
    responses((status = 200, body = Option<Cache>), (status = 404, body = Problem))
)]
pub(super) async fn cache(State(manager): App, Path(disk): Path<String>) -> Answer<Option<Cache>> {
    manager.observe.disk(&disk).map(|disk| disk.cache).into()
}

/// Gives a disk a cache.
#[utoipa::path(
    put,
    path = "/v1/disks/{disk}/cache",
    params(("disk" = String, Path, description = "The disk")),
    request_body = CacheEnable,
    responses((status = 200, body = DiskChanged), (status = "4XX", body = Problem), (status = "5XX", body = Problem))
)]
pub(super) async fn cache_enable(
    State(manager): App,
    Path(disk): Path<String>,
    Body(enable): Body<CacheEnable>,
) -> Answer<DiskChanged> {
    manager.pools.cache_enable(disk, enable).await.into()
}

/// Changes the size or settings of a cache.
#[utoipa::path(
    patch,
    path = "/v1/disks/{disk}/cache",
    params(("disk" = String, Path, description = "The disk")),
    request_body = CachePatch,
    responses((status = 200, body = DiskChanged), (status = "4XX", body = Problem), (status = "5XX", body = Problem))
)]
pub(super) async fn cache_patch(
    State(manager): App,
    Path(disk): Path<String>,
    Body(patch): Body<CachePatch>,
) -> Answer<DiskChanged> {
    manager.pools.cache_patch(disk, patch).await.into()
}

/// Removes a disk's cache after draining its dirty data.
#[utoipa::path(
    delete,
    path = "/v1/disks/{disk}/cache",
    params(("disk" = String, Path, description = "The disk"), WhatOfDirty),
    responses((status = 200, body = DiskChanged), (status = "4XX", body = Problem), (status = "5XX", body = Problem))
)]
pub(super) async fn cache_disable(
    State(manager): App,
    Path(disk): Path<String>,
    query: Result<Query<WhatOfDirty>, QueryRejection>,
) -> Answer<DiskChanged> {
    match WhatOfDirty::read(query) {
        Ok(dirty) => manager.disks.cache_disable(disk, dirty).await.into(),
        Err(problem) => Answer::No(StatusCode::BAD_REQUEST, problem),
    }
}

/// Empties a cache.
#[utoipa::path(
    post,
    path = "/v1/disks/{disk}/cache/clear",
    params(("disk" = String, Path, description = "The disk")),
    responses((status = 200, body = DiskChanged), (status = "4XX", body = Problem), (status = "5XX", body = Problem))
)]
pub(super) async fn cache_clear(State(manager): App, Path(disk): Path<String>) -> Answer<DiskChanged> {
    manager.pools.cache_clear(disk).await.into()
}

/// Returns a disk's statistics.
#[utoipa::path(
    get,
    path = "/v1/disks/{disk}/stats",
    params(("disk" = String, Path, description = "The disk")),
    responses((status = 200, body = DiskStats), (status = "4XX", body = Problem), (status = "5XX", body = Problem))
)]
pub(super) async fn stats(State(manager): App, Path(disk): Path<String>) -> Answer<DiskStats> {
    manager.observe.stats(&disk).await.into()
}

/// Explains why a disk's I/O is, or is not, served from flash.
#[utoipa::path(
    get,
    path = "/v1/disks/{disk}/explain",
    params(("disk" = String, Path, description = "The disk")),
    responses((status = 200, body = Explanation), (status = "4XX", body = Problem), (status = "5XX", body = Problem))
)]
pub(super) async fn explain(State(manager): App, Path(disk): Path<String>) -> Answer<Explanation> {
    manager.observe.explain(&disk).await.into()
}

/// Records a disk's requests until the client disconnects or the disk is removed. A disk has one
/// recording at a time.
///
/// The response is a stream of frames. A frame is a head of 24 bytes (u64 duration of the recording
/// in nanoseconds, u64 requests dropped so far because the client was too slow, u32 count of
/// records, u8 1 for the last frame, 3 zeroes) and that many records of 24 bytes (u64 nanoseconds
/// from the start, u64 first byte, u32 bytes, u8 0 read, 1 write, 2 discard or zeroes, 3 flush, 3
/// zeroes), all little-endian. Frames are sent several times a second, also without records.
#[utoipa::path(
    get,
    path = "/v1/disks/{disk}/trace",
    params(("disk" = String, Path, description = "The disk")),
    responses(
        (status = 200, description = "An endless stream of frames", content_type = "application/octet-stream", body = Vec<u8>),
        (status = "4XX", body = Problem),
        (status = "5XX", body = Problem)
    )
)]
pub(super) async fn trace(State(manager): App, Path(disk): Path<String>) -> Response {
    match manager.observe.record(&disk).await {
        Ok(recording) => {
            let headers = [(CONTENT_TYPE, "application/octet-stream"), (CACHE_CONTROL, "no-store")];
            (headers, HttpBody::new(TraceBody::new(recording))).into_response()
        }
        Err(error) => Answer::<()>::from(Err(error)).into_response(),
    }
}
