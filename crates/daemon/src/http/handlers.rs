//! API endpoints of pools and disks. The handlers convert requests; the services decide.

use std::sync::Arc;

use axum::body::Body as HttpBody;
use axum::extract::{Path, State};
use axum::http::header::{CACHE_CONTROL, CONTENT_TYPE};
use axum::response::{IntoResponse, Response};
use hob_control::{
    AdoptCache, Cache, CacheEnable, CachePatch, Device, DeviceAdd, DevicePatch, Disk, DiskAdd, DiskChanged,
    DiskPatch, DiskResize, DiskStats, DrainFor, EventReport, Explanation, ExportDirty, OnClients, OnDirty,
    PlannedChange, PlannedPoolChange, Pool, PoolChanged, PoolCreate, PoolPatch, Preview, Problem, Version,
};
use serde::Deserialize;
use utoipa::IntoParams;

use super::endpoints::endpoints;
use super::extract::{Answer, Form};
use super::trace::TraceBody;
use crate::api_error::{Result, invalid};
use crate::services::Services;

type App = State<Arc<Services>>;

endpoints! { services;
    /// Returns the versions of the daemon and of its API.
    get "/v1/version"
    version() -> Version {
        Ok(services.observe.version())
    }

    /// Returns all pools.
    get "/v1/pools"
    pools() -> Vec<Pool> {
        Ok(services.observe.pools())
    }

    /// Creates a pool. Refused without `discard_dirty=true` if a device has or may have dirty data of
    /// another pool's caches.
    post "/v1/pools"
    pool_create(; ?dirty: WhatOfDirty; create: PoolCreate) -> PoolChanged, "4XX", "5XX" {
        services.pools.pool_create(create, on_dirty(dirty.discard_dirty)).await
    }

    /// Returns a pool.
    get "/v1/pools/{pool}"
    pool(pool = "pool": "Its name") -> Pool, 404 {
        services.observe.pool(&pool)
    }

    /// Changes the settings of a pool.
    patch "/v1/pools/{pool}"
    pool_set(pool = "pool": "The pool"; patch: PoolPatch) -> PoolChanged, "4XX", "5XX" {
        services.pools.pool_set(pool, patch).await
    }

    /// Removes a pool that no cache uses.
    delete "/v1/pools/{pool}"
    pool_remove(pool = "pool": "Its name") -> PoolChanged, "4XX", "5XX" {
        services.pools.pool_remove(pool).await
    }

    /// Returns a pool's devices.
    get "/v1/pools/{pool}/devices"
    devices(pool = "pool": "The pool") -> Vec<Device>, 404 {
        services.observe.pool(&pool).map(|pool| pool.devices)
    }

    /// Adds a device to a pool. Refused without `discard_dirty=true` if the device has or may have
    /// dirty data of another pool's caches.
    post "/v1/pools/{pool}/devices"
    device_add(pool = "pool": "The pool"; ?dirty: WhatOfDirty; add: DeviceAdd) -> PoolChanged, "4XX", "5XX" {
        services.pools.device_add(pool, add, on_dirty(dirty.discard_dirty)).await
    }

    /// Returns the effects of a pool change on caches and dirty data, without making the change.
    post "/v1/pools/{pool}/preview"
    pool_preview(pool = "pool": "The pool"; change: PlannedPoolChange) -> Preview, "4XX", "5XX" {
        services.disks.pool_preview(&pool, &change).await
    }

    /// Returns all disks.
    get "/v1/disks"
    disks() -> Vec<Disk> {
        Ok(services.observe.disks())
    }

    /// Adds a disk and serves it.
    post "/v1/disks"
    disk_add(; add: DiskAdd) -> DiskChanged, "4XX", "5XX" {
        services.disks.disk_add(add).await
    }

    /// Returns a disk.
    get "/v1/disks/{disk}"
    disk(disk = "disk": "Its name") -> Disk, 404 {
        services.pools.refresh_dirty(&disk).await;
        services.observe.disk(&disk)
    }

    /// Returns the effects of a change on cached data, dirty data and clients, without making the
    /// change.
    post "/v1/disks/{disk}/preview"
    preview(disk = "disk": "The disk"; change: PlannedChange) -> Preview, "4XX", "5XX" {
        services.disks.preview(&disk, &change).await
    }

    /// Starts to drain a disk's dirty data to its backing; clean data stays in flash. The disk
    /// shows the progress. The drain continues until it is complete or stopped. Repeating the
    /// request is harmless.
    post "/v1/disks/{disk}/drain"
    drain(disk = "disk": "The disk"; ?purpose: Purpose) -> DiskChanged, "4XX", "5XX" {
        services.pools.drain_for(disk, purpose.operation()?).await
    }

    /// Changes a disk's own settings while it is served. Requests that already wait for the backing
    /// follow the new limit too. A change of the access or the datastore closes the disk and opens it
    /// again; it is refused while clients are connected.
    patch "/v1/disks/{disk}"
    disk_patch(disk = "disk": "The disk"; patch: DiskPatch) -> DiskChanged, "4XX", "5XX" {
        services.disks.disk_patch(disk, patch).await
    }

    /// Grows a disk while it is served, to the size of its backing. With a size, a raw file is
    /// enlarged first.
    post "/v1/disks/{disk}/resize"
    disk_resize(disk = "disk": "The disk"; resize: DiskResize) -> DiskChanged, "4XX", "5XX" {
        services.disks.disk_resize(disk, resize).await
    }

    /// Reports an event of a disk's VM: its cache is drained or emptied, or stays as it is. A drain
    /// continues after the response; the disk shows its progress.
    post "/v1/disks/{disk}/events"
    disk_event(disk = "disk": "The disk"; report: EventReport) -> DiskChanged, "4XX", "5XX" {
        let EventReport { event, discard_dirty } = report;
        let change = PlannedChange::Event { event };
        services.disks.check_discard(&disk, &change, discard_dirty).await?;
        services.disks.disk_event(disk, event).await
    }

    /// Stops a drain before it is complete.
    delete "/v1/disks/{disk}/drain"
    drain_stop(disk = "disk": "The disk") -> DiskChanged, "4XX", "5XX" {
        services.pools.drain_stop(disk).await
    }

    /// Writes the dirty data of an offline disk to a sparse file on the daemon's host. The file
    /// `PATH.map` beside it lists the dirty ranges: `data OFFSET BYTES` if the file has the data, and
    /// `lost OFFSET BYTES` if flash cannot return the data.
    post "/v1/disks/{disk}/cache/export-dirty"
    export_dirty(disk = "disk": "The disk"; export: ExportDirty) -> DiskChanged, "4XX", "5XX" {
        services.disks.export_dirty(disk, export).await
    }

    /// Gives an offline disk a cache that belongs to no disk, with its dirty data. The disk comes
    /// online if the cache fits its backing.
    post "/v1/disks/{disk}/cache/adopt"
    cache_adopt(disk = "disk": "The disk"; adopt: AdoptCache) -> DiskChanged, "4XX", "5XX" {
        services.disks.cache_adopt(disk, adopt.owner).await
    }

    /// Returns a disk's cache; null if it has none.
    get "/v1/disks/{disk}/cache"
    cache(disk = "disk": "The disk") -> Option<Cache>, 404 {
        services.pools.refresh_dirty(&disk).await;
        services.observe.disk(&disk).map(|disk| disk.cache)
    }

    /// Gives a disk a cache.
    put "/v1/disks/{disk}/cache"
    cache_enable(disk = "disk": "The disk"; enable: CacheEnable) -> DiskChanged, "4XX", "5XX" {
        services.pools.cache_enable(disk, enable).await
    }

    /// Changes the size or settings of a cache.
    patch "/v1/disks/{disk}/cache"
    cache_patch(disk = "disk": "The disk"; patch: CachePatch) -> DiskChanged, "4XX", "5XX" {
        services.pools.cache_patch(disk, patch).await
    }

    /// Empties a cache.
    post "/v1/disks/{disk}/cache/clear"
    cache_clear(disk = "disk": "The disk") -> DiskChanged, "4XX", "5XX" {
        services.pools.cache_clear(disk).await
    }

    /// Returns a disk's statistics.
    get "/v1/disks/{disk}/stats"
    stats(disk = "disk": "The disk") -> DiskStats, "4XX", "5XX" {
        services.observe.stats(&disk).await
    }

    /// Explains why a disk's I/O is, or is not, served from flash.
    get "/v1/disks/{disk}/explain"
    explain(disk = "disk": "The disk") -> Explanation, "4XX", "5XX" {
        services.observe.explain(&disk).await
    }

    /// Switches allocation from a device on or off. Segments in use on the device stay.
    patch "/v1/pools/{pool}/devices"
    device_set(pool = "pool": "The pool"; ?device: WhichDevice; patch: DevicePatch)
        -> PoolChanged, "4XX", "5XX" {
        services.pools.device_set(pool, device.path, patch).await
    }

    /// Removes a device from a pool. Caches on it move to other devices, or shrink. Refused without
    /// `discard_dirty=true` if the device is offline and may have dirty data of an offline disk.
    delete "/v1/pools/{pool}/devices"
    device_remove(pool = "pool": "The pool"; ?removal: DeviceRemoval) -> PoolChanged, "4XX", "5XX" {
        let DeviceRemoval { path, discard_dirty } = removal;
        let change = PlannedPoolChange::RemoveDevice { path: path.clone() };
        services.disks.check_pool_discard(&pool, &change, discard_dirty).await?;
        services.pools.device_remove(pool, path).await
    }

    /// Removes a disk after draining its dirty data. The backing keeps its data.
    delete "/v1/disks/{disk}"
    disk_remove(disk = "disk": "Its name"; ?removal: Removal) -> DiskChanged, "4XX", "5XX" {
        let clients = if removal.force { OnClients::Disconnect } else { OnClients::Refuse };
        services.disks.check_unused(&disk, clients).await?;
        services.disks.disk_remove_from(disk, on_dirty(removal.discard_dirty), clients).await
    }

    /// Discards dirty data: acknowledged writes are lost. For an offline disk the whole cache is
    /// discarded. Refused without `discard_dirty=true` while data is or may be dirty.
    post "/v1/disks/{disk}/cache/discard-dirty"
    discard_dirty(disk = "disk": "The disk"; ?dirty: WhatOfDirty) -> DiskChanged, "4XX", "5XX" {
        services.disks.check_discard(&disk, &PlannedChange::DiscardDirty, dirty.discard_dirty).await?;
        services.disks.discard_dirty(disk).await
    }

    /// Frees the space of a persistent cache that belongs to no disk. The data in the cache is lost.
    /// Refused without `discard_dirty=true` while the cache has or may have dirty data.
    delete "/v1/pools/{pool}/orphans/{owner}"
    orphan_discard(
        pool = "pool": "The pool", owner = "owner": "32 hexadecimal digits, as shown by the pool";
        ?dirty: WhatOfDirty
    ) -> PoolChanged, "4XX", "5XX" {
        let change = PlannedPoolChange::DiscardOrphan { owner: owner.clone() };
        services.disks.check_pool_discard(&pool, &change, dirty.discard_dirty).await?;
        services.disks.orphan_discard(pool, owner).await
    }

    /// Removes a disk's cache after draining its dirty data.
    delete "/v1/disks/{disk}/cache"
    cache_disable(disk = "disk": "The disk"; ?dirty: WhatOfDirty) -> DiskChanged, "4XX", "5XX" {
        services.disks.cache_disable(disk, on_dirty(dirty.discard_dirty)).await
    }
}

/// Returns the OpenAPI document.
pub(super) async fn openapi() -> impl IntoResponse {
    ([(CONTENT_TYPE, "application/json")], super::openapi_json())
}

/// Selects a device of a pool.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
struct WhichDevice {
    /// Path of the device.
    path: String,
}

impl Form for WhichDevice {
    const ALLOWED: &'static str = "name the device: PATCH …/devices?path=/dev/nvme0n1";
}

/// Selects the device to remove.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
struct DeviceRemoval {
    /// Path of the device.
    path: String,
    /// Lose dirty data on a missing device. Otherwise, such a device stays while a disk may need
    /// it.
    #[serde(default)]
    discard_dirty: bool,
}

impl Form for DeviceRemoval {
    const ALLOWED: &'static str = "name the device: DELETE …/devices?path=/dev/nvme0n1";
}

/// Selects what happens to dirty data.
#[derive(Debug, Default, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
struct WhatOfDirty {
    /// Discard dirty data instead of draining it: acknowledged writes are lost.
    #[serde(default)]
    discard_dirty: bool,
}

impl Form for WhatOfDirty {
    const ALLOWED: &'static str = "the only parameter of this request is ?discard_dirty=true";
}

/// The operation for which a disk is drained.
#[derive(Debug, Default, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
struct Purpose {
    /// Operation that the client makes after the drain. The list of tasks shows it.
    #[serde(default)]
    operation: String,
}

impl Form for Purpose {
    const ALLOWED: &'static str =
        "the only parameter of this request is operation, for example ?operation=cache-disable";
}

impl Purpose {
    /// Returns the operation; a plain drain without the parameter.
    fn operation(&self) -> Result<DrainFor> {
        if self.operation.is_empty() {
            return Ok(DrainFor::Drain);
        }
        DrainFor::of_name(&self.operation).ok_or_else(|| {
            invalid!(
                "there is no operation '{}' after a drain; the operations are drain, cache-set, cache-disable, \
                 disk-remove, disk-event and detach",
                self.operation
            )
        })
    }
}

/// Selects what happens to dirty data and to clients when a disk is removed.
#[derive(Debug, Default, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
struct Removal {
    /// Discard dirty data instead of draining it: acknowledged writes are lost.
    #[serde(default)]
    discard_dirty: bool,
    /// Disconnect the disk's clients. Otherwise, a disk with clients stays.
    #[serde(default)]
    force: bool,
}

impl Form for Removal {
    const ALLOWED: &'static str =
        "the only parameters of this request are ?discard_dirty=true and ?force=true";
}

/// Returns what happens to dirty data.
fn on_dirty(discard_dirty: bool) -> OnDirty {
    if discard_dirty { OnDirty::Discard } else { OnDirty::Drain }
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
pub(super) async fn trace(State(services): App, Path(disk): Path<String>) -> Response {
    match services.observe.record(&disk).await {
        Ok(recording) => {
            let headers = [(CONTENT_TYPE, "application/octet-stream"), (CACHE_CONTROL, "no-store")];
            (headers, HttpBody::new(TraceBody::new(recording))).into_response()
        }
        Err(error) => Answer::<()>::from(Err(error)).into_response(),
    }
}
