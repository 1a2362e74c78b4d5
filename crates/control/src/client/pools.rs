//! Client methods for the daemon, its health, pools, remote flash and swap areas.

use hyper::Method;

use super::{Client, ClientError, percent_encode};
use crate::{
    ConfigApplied, ConfigApply, ConfigDiff, DeviceAdd, DevicePatch, DiskLoad, Health, OnDirty, Peers,
    PlannedPoolChange, Pool, PoolChanged, PoolCreate, Preview, Swap, SwapChanged, SwapCreate, SwapPatch,
    Version,
};

impl Client {
    /// Returns the differences between hob.toml and the running daemon.
    pub async fn config_diff(&self) -> Result<ConfigDiff, ClientError> {
        self.get("/v1/config/diff").await
    }

    /// Applies hob.toml to the running daemon.
    pub async fn config_apply(&self, apply: ConfigApply) -> Result<ConfigApplied, ClientError> {
        self.send(Method::POST, "/v1/config/apply", Some(&apply)).await
    }

    /// Returns the version of the daemon and of its API.
    pub async fn version(&self) -> Result<Version, ClientError> {
        self.get("/v1/version").await
    }

    /// Current problems.
    pub async fn health(&self) -> Result<Health, ClientError> {
        self.get("/v1/health").await
    }

    /// Returns the counters of each disk.
    pub async fn load(&self) -> Result<Vec<DiskLoad>, ClientError> {
        self.get("/v1/load").await
    }

    /// Returns all pools.
    pub async fn pools(&self) -> Result<Vec<Pool>, ClientError> {
        self.get("/v1/pools").await
    }

    /// Returns one pool.
    pub async fn pool(&self, pool: &str) -> Result<Pool, ClientError> {
        self.get(&pool_path(pool)).await
    }

    /// Creates a pool. The daemon refuses to overwrite dirty data of another pool, unless `dirty`
    /// allows that.
    pub async fn pool_create(&self, create: &PoolCreate, dirty: OnDirty) -> Result<PoolChanged, ClientError> {
        self.send(Method::POST, &format!("/v1/pools{}", dirty.query()), Some(create)).await
    }

    /// Removes a pool that has no caches.
    pub async fn pool_remove(&self, pool: &str) -> Result<PoolChanged, ClientError> {
        self.delete(&pool_path(pool)).await
    }

    /// Adds a flash device to a pool. The daemon refuses to overwrite dirty data of another pool,
    /// unless `dirty` allows that.
    pub async fn device_add(
        &self,
        pool: &str,
        add: &DeviceAdd,
        dirty: OnDirty,
    ) -> Result<PoolChanged, ClientError> {
        self.send(Method::POST, &format!("{}/devices{}", pool_path(pool), dirty.query()), Some(add)).await
    }

    /// Allows or forbids new segments on a pool's device.
    pub async fn device_set(
        &self,
        pool: &str,
        path: &str,
        patch: &DevicePatch,
    ) -> Result<PoolChanged, ClientError> {
        self.send(Method::PATCH, &device_path(pool, path), Some(patch)).await
    }

    /// Returns the effects of a change of a pool without making the change.
    pub async fn pool_preview(&self, pool: &str, change: &PlannedPoolChange) -> Result<Preview, ClientError> {
        self.send(Method::POST, &format!("{}/preview", pool_path(pool)), Some(change)).await
    }

    /// Removes a device from a pool. The daemon refuses if dirty data may be lost, unless `dirty`
    /// allows that.
    pub async fn device_remove(
        &self,
        pool: &str,
        path: &str,
        dirty: OnDirty,
    ) -> Result<PoolChanged, ClientError> {
        let discard = if dirty == OnDirty::Discard { "&discard_dirty=true" } else { "" };
        self.delete(&format!("{}{discard}", device_path(pool, path))).await
    }

    /// Frees the flash of a persistent cache without a disk. The data in the cache is lost.
    pub async fn orphan_discard(
        &self,
        pool: &str,
        owner: &str,
        dirty: OnDirty,
    ) -> Result<PoolChanged, ClientError> {
        let path = format!("{}/orphans/{}{}", pool_path(pool), percent_encode(owner), dirty.query());
        self.delete(&path).await
    }

    /// Returns the flash that the daemon's host exports to other hosts, and the remote flash that
    /// it uses.
    pub async fn peers(&self) -> Result<Peers, ClientError> {
        self.get("/v1/peers").await
    }

    /// Ends a flash lease; with `forget`, the borrower may request another flash lease.
    pub async fn flash_lease_end(&self, borrower: &str, forget: bool) -> Result<Vec<String>, ClientError> {
        let path = format!("/v1/loans/{}/end?forget={forget}", percent_encode(borrower));
        self.send(Method::POST, &path, None::<&()>).await
    }

    /// Returns the swap areas of the daemon's host.
    pub async fn swaps(&self) -> Result<Vec<Swap>, ClientError> {
        self.get("/v1/swap").await
    }

    /// Returns one swap area.
    pub async fn swap(&self, name: &str) -> Result<Swap, ClientError> {
        self.get(&swap_path(name)).await
    }

    /// Creates a swap area in a pool.
    pub async fn swap_create(&self, create: &SwapCreate) -> Result<SwapChanged, ClientError> {
        self.send(Method::POST, "/v1/swap", Some(create)).await
    }

    /// Turns a swap area on or off.
    pub async fn swap_set(&self, name: &str, patch: &SwapPatch) -> Result<SwapChanged, ClientError> {
        self.send(Method::PATCH, &swap_path(name), Some(patch)).await
    }

    /// Removes a swap area and returns its flash to the pool.
    pub async fn swap_remove(&self, name: &str) -> Result<SwapChanged, ClientError> {
        self.send(Method::DELETE, &swap_path(name), None::<&()>).await
    }
}

fn pool_path(pool: &str) -> String {
    format!("/v1/pools/{}", percent_encode(pool))
}

fn device_path(pool: &str, path: &str) -> String {
    format!("{}/devices?path={}", pool_path(pool), percent_encode(path))
}

fn swap_path(name: &str) -> String {
    format!("/v1/swap/{}", percent_encode(name))
}
