//! Client methods for the daemon, its health, pools, remote flash and swap areas.

use super::requests::requests;
use crate::{
    ConfigApplied, ConfigApply, ConfigDiff, DeviceAdd, DevicePatch, DiskLoad, Health, OnDirty, Peers,
    PlannedPoolChange, Pool, PoolChanged, PoolCreate, PoolPatch, Preview, Swap, SwapChanged, SwapCreate,
    SwapPatch, Version,
};

requests! {
    /// Returns the differences between hob.toml and the running daemon.
    config_diff() -> ConfigDiff: GET "/v1/config/diff";
    /// Applies hob.toml to the running daemon.
    config_apply(apply: ConfigApply) -> ConfigApplied: POST "/v1/config/apply", &apply;
    /// Returns the version of the daemon and of its API.
    version() -> Version: GET "/v1/version";
    /// Returns the current problems of the daemon.
    health() -> Health: GET "/v1/health";
    /// Returns the counters of each disk.
    load() -> Vec<DiskLoad>: GET "/v1/load";
    /// Returns all pools.
    pools() -> Vec<Pool>: GET "/v1/pools";
    /// Returns one pool.
    pool[pool]() -> Pool: GET "/v1/pools/{pool}";
    /// Creates a pool. The daemon refuses to overwrite dirty data of another pool, unless `dirty`
    /// allows that.
    pool_create(create: &PoolCreate, dirty: OnDirty) -> PoolChanged:
        POST "/v1/pools{}" (dirty.query()), create;
    /// Changes the settings of a pool.
    pool_set[pool](patch: &PoolPatch) -> PoolChanged: PATCH "/v1/pools/{pool}", patch;
    /// Removes a pool that has no caches.
    pool_remove[pool]() -> PoolChanged: DELETE "/v1/pools/{pool}";
    /// Adds a flash device to a pool. The daemon refuses to overwrite dirty data of another pool,
    /// unless `dirty` allows that.
    device_add[pool](add: &DeviceAdd, dirty: OnDirty) -> PoolChanged:
        POST "/v1/pools/{pool}/devices{}" (dirty.query()), add;
    /// Allows or forbids new segments on a pool's device.
    device_set[pool, path](patch: &DevicePatch) -> PoolChanged:
        PATCH "/v1/pools/{pool}/devices?path={path}", patch;
    /// Returns the effects of a change of a pool without making the change.
    pool_preview[pool](change: &PlannedPoolChange) -> Preview: POST "/v1/pools/{pool}/preview", change;
    /// Removes a device from a pool. The daemon refuses if dirty data may be lost, unless `dirty`
    /// allows that.
    device_remove[pool, path](dirty: OnDirty) -> PoolChanged:
        DELETE "/v1/pools/{pool}/devices?path={path}{}"
            (if dirty == OnDirty::Discard { "&discard_dirty=true" } else { "" });
    /// Frees the flash of a persistent cache without a disk. The data in the cache is lost.
    orphan_discard[pool, owner](dirty: OnDirty) -> PoolChanged:
        DELETE "/v1/pools/{pool}/orphans/{owner}{}" (dirty.query());
    /// Returns the flash that the daemon's host exports to other hosts, and the remote flash that
    /// it uses.
    peers() -> Peers: GET "/v1/peers";
    /// Ends a flash lease; with `forget`, the borrower may request another flash lease.
    flash_lease_end[borrower](forget: bool) -> Vec<String>:
        POST "/v1/loans/{borrower}/end?forget={forget}";
    /// Returns the swap areas of the daemon's host.
    swaps() -> Vec<Swap>: GET "/v1/swap";
    /// Returns one swap area.
    swap[name]() -> Swap: GET "/v1/swap/{name}";
    /// Creates a swap area in a pool.
    swap_create(create: &SwapCreate) -> SwapChanged: POST "/v1/swap", create;
    /// Turns a swap area on or off.
    swap_set[name](patch: &SwapPatch) -> SwapChanged: PATCH "/v1/swap/{name}", patch;
    /// Removes a swap area and returns its flash to the pool.
    swap_remove[name]() -> SwapChanged: DELETE "/v1/swap/{name}";
}
