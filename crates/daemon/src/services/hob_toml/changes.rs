//! Changes that resolve differences between hob.toml and the running configuration.

use hob_control::{
    CacheEnable, CachePatch, DatastorePatch, DeviceAdd, DiskAdd, DiskPatch, OnClients, OnDirty,
    PlannedPoolChange, PoolCreate, PoolPatch, QosPatch,
};

use super::HobToml;
use crate::api_error::Result;
use crate::config::DiskEntry;

/// A change that resolves a difference.
#[derive(Clone, Debug)]
pub(super) enum Change {
    CreatePool(PoolCreate),
    AddDevice(String, DeviceAdd),
    RemoveDevice(String, String),
    RemovePool(String),
    PatchPool(String, PoolPatch),
    AddDisk(Box<DiskEntry>),
    RemoveDisk(String),
    EnableCache(String, CacheEnable),
    DisableCache(String),
    MoveCache(String, CacheEnable),
    PatchCache(String, Box<CachePatch>),
    AddExport(String, hob_control::Export),
    /// Removes an export with these settings.
    RemoveExport(String, hob_control::Export),
    ReplaceExport {
        disk: String,
        before: hob_control::Export,
        wanted: hob_control::Export,
    },
    PatchDisk(String, DiskPatch),
    Qos(String, QosPatch),
    Policy(String, QosPatch),
    RemovePolicy(String),
    Datastore(String, DatastorePatch),
}

impl Change {
    /// Returns true if the change concerns shares, reservations, or the throttling of a datastore.
    pub(super) fn changes_qos(&self) -> bool {
        match self {
            Change::Qos(..) | Change::Policy(..) | Change::Datastore(..) => true,
            Change::AddDisk(disk) => disk.qos.is_some(),
            _ => false,
        }
    }

    /// Returns true if the change concerns the backing timeout of a disk.
    pub(super) fn changes_timeout(&self) -> bool {
        match self {
            Change::PatchDisk(_, patch) => patch.backing_timeout.is_some(),
            Change::AddDisk(disk) => disk.backing_timeout.is_some(),
            _ => false,
        }
    }
}

impl HobToml {
    pub(super) async fn make(&self, change: Change) -> Result<()> {
        match change {
            Change::CreatePool(pool) => self.create_pool(&pool).await,
            Change::AddDevice(pool, add) => self.pools.device_add(pool, add, OnDirty::Drain).await.map(drop),
            Change::RemoveDevice(pool, path) => {
                let change = PlannedPoolChange::RemoveDevice { path: path.clone() };
                self.disks.check_pool_discard(&pool, &change, false).await?;
                self.pools.device_remove(pool, path).await.map(drop)
            }
            Change::PatchPool(pool, patch) => self.pools.pool_set(pool, patch).await.map(drop),
            Change::RemovePool(pool) => self.pools.pool_remove(pool).await.map(drop),
            Change::AddDisk(disk) => {
                self.add_defined((*disk).clone()).await?;
                self.complete_defined(*disk).await
            }
            Change::RemoveDisk(disk) => {
                self.disks.check_unused(&disk, OnClients::Refuse).await?;
                self.disks.disk_remove(disk, OnDirty::Drain).await.map(drop)
            }
            Change::EnableCache(disk, enable) => self.pools.cache_enable(disk, enable).await.map(drop),
            Change::DisableCache(disk) => self.disks.cache_disable(disk, OnDirty::Drain).await.map(drop),
            Change::MoveCache(disk, enable) => {
                self.disks.cache_disable(disk.clone(), OnDirty::Drain).await?;
                self.pools.cache_enable(disk, enable).await.map(drop)
            }
            Change::PatchCache(disk, patch) => self.pools.cache_patch(disk, *patch).await.map(drop),
            Change::AddExport(disk, export) => self.disks.export_add(disk, export).await.map(drop),
            Change::RemoveExport(disk, export) => self.disks.export_remove(disk, export.name).await.map(drop),
            Change::ReplaceExport { disk, before, wanted } => {
                self.disks.export_remove(disk.clone(), before.name).await?;
                self.disks.export_add(disk, wanted).await.map(drop)
            }
            Change::PatchDisk(disk, patch) => self.disks.disk_patch(disk, patch).await.map(drop),
            Change::Qos(disk, patch) => self.qos.set(disk, patch).await.map(drop),
            Change::Policy(name, patch) => self.qos.policy_set(name, patch).await.map(drop),
            Change::RemovePolicy(name) => self.qos.policy_remove(name).await.map(drop),
            Change::Datastore(name, patch) => {
                // No disk may use the datastore yet.
                let _use = self.qos.datastore_id(&name, false)?;
                self.qos.datastore_set(name, patch).await.map(drop)
            }
        }
    }

    /// Adds a disk from hob.toml with its exports. [`complete_defined`](Self::complete_defined)
    /// makes the rest.
    pub(super) async fn add_defined(&self, disk: DiskEntry) -> Result<()> {
        let DiskEntry {
            name,
            backing,
            format,
            read_only,
            cache: _,
            share_parent,
            parent_cache,
            backing_timeout,
            stripe,
            datastore,
            vhost_user,
            exports,
            fuse,
            device,
            qos: _,
        } = disk;
        let add = DiskAdd {
            name: name.clone(),
            backing,
            format,
            read_only,
            backing_timeout,
            stripe,
            datastore,
            fuse,
            device,
            vhost_user,
            share_parent,
            parent_cache,
            unlocked: false,
            adopt_cache: None,
        };
        self.disks.disk_add(add).await?;
        for export in exports {
            self.disks.export_add(name.clone(), export).await?;
        }
        Ok(())
    }

    /// Gives a disk from hob.toml, which was added, its QoS settings and its cache.
    pub(super) async fn complete_defined(&self, disk: DiskEntry) -> Result<()> {
        if let Some(qos) = disk.qos {
            self.qos.set(disk.name.clone(), qos).await?;
        }
        if let Some(cache) = disk.cache {
            self.pools.cache_enable(disk.name, cache).await?;
        }
        Ok(())
    }
}
