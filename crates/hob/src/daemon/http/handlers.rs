//! One function per method and path. They translate; the manager decides.

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

/// The OpenAPI document.
pub(super) async fn openapi() -> impl IntoResponse {
    ([(CONTENT_TYPE, "application/json")], super::openapi_json())
}

/// Who answers?
#[utoipa::path(get, path = "/v1/version", responses((status = 200, body = Version)))]
pub(super) async fn version(State(manager): App) -> Answer<Version> {
    Answer::Yes(manager.observe.version())
}

/// All pools.
#[utoipa::path(get, path = "/v1/pools", responses((status = 200, body = Vec<Pool>)))]
pub(super) async fn pools(State(manager): App) -> Answer<Vec<Pool>> {
    Answer::Yes(manager.observe.pools())
}

/// Makes a pool.
#[utoipa::path(
    post,
    path = "/v1/pools",
    request_body = PoolCreate,
    responses((status = 200, body = PoolChanged), (status = "4XX", body = Problem), (status = "5XX", body = Problem))
)]
pub(super) async fn pool_create(State(manager): App, Body(create): Body<PoolCreate>) -> Answer<PoolChanged> {
    manager.pools.pool_create(create).await.into()
}

/// One pool.
#[utoipa::path(
    get,
    path = "/v1/pools/{pool}",
    params(("pool" = String, Path, description = "Its name")),
    responses((status = 200, body = Pool), (status = 404, body = Problem))
)]
pub(super) async fn pool(State(manager): App, Path(pool): Path<String>) -> Answer<Pool> {
    manager.observe.pool(&pool).into()
}

/// Removes a pool that no cache uses.
#[utoipa::path(
    delete,
    path = "/v1/pools/{pool}",
    params(("pool" = String, Path, description = "Its name")),
    responses((status = 200, body = PoolChanged), (status = "4XX", body = Problem), (status = "5XX", body = Problem))
)]
pub(super) async fn pool_remove(State(manager): App, Path(pool): Path<String>) -> Answer<PoolChanged> {
    manager.pools.pool_remove(pool).await.into()
}

/// A pool's devices.
#[utoipa::path(
    get,
    path = "/v1/pools/{pool}/devices",
    params(("pool" = String, Path, description = "The pool")),
    responses((status = 200, body = Vec<Device>), (status = 404, body = Problem))
)]
pub(super) async fn devices(State(manager): App, Path(pool): Path<String>) -> Answer<Vec<Device>> {
    manager.observe.pool(&pool).map(|pool| pool.devices).into()
}

/// Gives a pool another device.
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

/// Says what a change of a pool would do to caches and dirty data, without making it.
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

/// Which device of a pool.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(super) struct WhichDevice {
    /// Its path.
    path: String,
}

/// Lets a device give new segments, or no more of them. Segments in use on it stay.
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

/// Which device is removed.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(super) struct DeviceRemoval {
    /// Its path.
    path: String,
    /// Dirty data on a device that is away is lost. Without this, such a device stays while a disk may need it.
    #[serde(default)]
    discard_dirty: bool,
}

/// Takes a device out of a pool. Caches on it move to other devices, or get smaller. Refused without
/// `discard_dirty=true` if the device is away and may hold dirty data of a disk that is offline.
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
    let problem = Problem::new(format!("say which device: {method} …/devices?path=/dev/nvme0n1"));
    Answer::No(StatusCode::BAD_REQUEST, problem)
}

/// All disks.
#[utoipa::path(get, path = "/v1/disks", responses((status = 200, body = Vec<Disk>)))]
pub(super) async fn disks(State(manager): App) -> Answer<Vec<Disk>> {
    Answer::Yes(manager.observe.disks())
}

/// Serves a disk.
#[utoipa::path(
    post,
    path = "/v1/disks",
    request_body = DiskAdd,
    responses((status = 200, body = DiskChanged), (status = "4XX", body = Problem), (status = "5XX", body = Problem))
)]
pub(super) async fn disk_add(State(manager): App, Body(add): Body<DiskAdd>) -> Answer<DiskChanged> {
    manager.disks.disk_add(add).await.into()
}

/// One disk.
#[utoipa::path(
    get,
    path = "/v1/disks/{disk}",
    params(("disk" = String, Path, description = "Its name")),
    responses((status = 200, body = Disk), (status = 404, body = Problem))
)]
pub(super) async fn disk(State(manager): App, Path(disk): Path<String>) -> Answer<Disk> {
    manager.observe.disk(&disk).into()
}

/// What becomes of data that only flash has.
#[derive(Debug, Default, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(super) struct WhatOfDirty {
    /// It is lost instead of drained: acknowledged writes are undone.
    #[serde(default)]
    discard_dirty: bool,
}

/// What becomes of dirty data, and of clients, when a disk is removed.
#[derive(Debug, Default, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(super) struct Removal {
    /// Dirty data is lost instead of drained: acknowledged writes are undone.
    #[serde(default)]
    discard_dirty: bool,
    /// Clients and guests that are connected are disconnected. Without this, the disk stays.
    #[serde(default)]
    force: bool,
}

impl WhatOfDirty {
    fn read(query: Result<Query<WhatOfDirty>, QueryRejection>) -> Result<OnDirty, Problem> {
        match query {
            Ok(Query(WhatOfDirty { discard_dirty: true })) => Ok(OnDirty::Discard),
            Ok(_) => Ok(OnDirty::Drain),
            Err(_) => Err(Problem::new("the only parameter here is ?discard_dirty=true")),
        }
    }
}

/// Stops serving a disk, once its dirty data has reached the backing. The backing keeps its data.
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
        let problem = Problem::new("the only parameters here are ?discard_dirty=true and ?force=true");
        return Answer::No(StatusCode::BAD_REQUEST, problem);
    };
    let clients = if force { OnClients::Disconnect } else { OnClients::Refuse };
    if let Err(error) = manager.disks.check_unused(&disk, clients).await {
        return Answer::from(Err(error));
    }
    let dirty = if discard_dirty { OnDirty::Discard } else { OnDirty::Drain };
    manager.disks.disk_remove_from(disk, dirty, clients).await.into()
}

/// Says what a change would do to cached data, dirty data and clients, without making it.
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

/// Begins to bring a disk's dirty data to its backing; clean data stays in flash. The disk shows how far it is. Goes on
/// until it is done, or stopped; asking again does no harm.
#[utoipa::path(
    post,
    path = "/v1/disks/{disk}/drain",
    params(("disk" = String, Path, description = "The disk")),
    responses((status = 200, body = DiskChanged), (status = "4XX", body = Problem), (status = "5XX", body = Problem))
)]
pub(super) async fn drain(State(manager): App, Path(disk): Path<String>) -> Answer<DiskChanged> {
    manager.pools.drain(disk).await.into()
}

/// Changes a disk's own settings while it is served. Requests that wait for the backing already follow the new limit too.
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

/// Lets a disk be larger while it is served: as large as its backing is now, or a raw file is made as large as is said.
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

/// Reports what happened to a disk's machine: its cache is drained or emptied, or stays as it is. A drain goes on after the answer;
/// the disk shows how far it is.
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

/// Stops a drain before it is done.
#[utoipa::path(
    delete,
    path = "/v1/disks/{disk}/drain",
    params(("disk" = String, Path, description = "The disk")),
    responses((status = 200, body = DiskChanged), (status = "4XX", body = Problem), (status = "5XX", body = Problem))
)]
pub(super) async fn drain_stop(State(manager): App, Path(disk): Path<String>) -> Answer<DiskChanged> {
    manager.pools.drain_stop(disk).await.into()
}

/// Gives up what is dirty: acknowledged writes are lost. Of a disk that is offline, the whole cache is given up. Refused without
/// `discard_dirty=true` while anything is dirty, or may be.
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

/// Writes what is dirty in the cache of a disk that is offline into a sparse file on the daemon's host. Beside it,
/// `PATH.map` says which ranges count, in lines `data OFFSET BYTES` and `lost OFFSET BYTES`.
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

/// Frees the room of a persistent cache that belongs to no disk. What is in it is lost. Refused without
/// `discard_dirty=true` while anything is dirty in it, or may be.
#[utoipa::path(
    delete,
    path = "/v1/pools/{pool}/orphans/{owner}",
    params(
        ("pool" = String, Path, description = "The pool"),
        ("owner" = String, Path, description = "32 hexadecimal digits, as the pool shows them"),
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

/// A disk's cache; null if it has none.
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

/// Changes size or settings of a cache.
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

/// Takes a disk's cache away, once its dirty data has reached the backing.
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

/// A disk's figures.
#[utoipa::path(
    get,
    path = "/v1/disks/{disk}/stats",
    params(("disk" = String, Path, description = "The disk")),
    responses((status = 200, body = DiskStats), (status = "4XX", body = Problem), (status = "5XX", body = Problem))
)]
pub(super) async fn stats(State(manager): App, Path(disk): Path<String>) -> Answer<DiskStats> {
    manager.observe.stats(&disk).await.into()
}

/// Why a disk's I/O is, or is not, served from flash.
#[utoipa::path(
    get,
    path = "/v1/disks/{disk}/explain",
    params(("disk" = String, Path, description = "The disk")),
    responses((status = 200, body = Explanation), (status = "4XX", body = Problem), (status = "5XX", body = Problem))
)]
pub(super) async fn explain(State(manager): App, Path(disk): Path<String>) -> Answer<Explanation> {
    manager.observe.explain(&disk).await.into()
}

/// Records a disk's requests as they come, until the client or the disk goes. A disk has one recording at a time.
///
/// The answer is a stream of frames: a head of 24 bytes (u64 nanoseconds for which the recording has lasted, u64
/// requests dropped so far because the client was too slow, u32 count of records, u8 1 for the last frame, 3 zeroes)
/// and that many records of 24 bytes (u64 nanoseconds from the start, u64 first byte, u32 bytes, u8 0 read, 1 write, 2
/// discard or zeroes, 3 flush, 3 zeroes), all little-endian. Frames come several times a second, also without records.
#[utoipa::path(
    get,
    path = "/v1/disks/{disk}/trace",
    params(("disk" = String, Path, description = "The disk")),
    responses(
        (status = 200, description = "Frames without end", content_type = "application/octet-stream", body = Vec<u8>),
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
