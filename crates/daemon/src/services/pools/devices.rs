//! Pools and their devices: creating, opening, adding, removing.

use std::path::{Path, PathBuf};

use hob_control::{
    Admission as Chosen, DeviceAdd, DevicePatch, DeviceState, OnDirty, PoolChanged, PoolCreate, Size,
    SwapChanged, check_name,
};
use hob_engine::units::DeviceId;
use hob_storage::pool::{Admission, DeviceInfo, DeviceSpec, Overwrite, default_segment_bytes};

use super::device_returns::DevicePath;
use super::foreign::check_overwritten;
use super::unknown_devices::{UNKNOWN_REASON, unknown_device};
use super::{PoolWrites, Pools, Sharing};
use crate::api_error::{ApiError, Result, conflict, failed, invalid, not_found};
use crate::services::flash::{Flash, Opened};
use crate::services::observe::REMOVE_DEVICE;
use crate::services::registry::{DeviceEntry, Inner, OPENING, POOLS_MAX, PoolEntry};
use crate::state::{CacheOwner, PeerState};

impl Pools {
    /// Removes a swap area and gives its space to caches that are smaller than configured.
    pub(crate) async fn swap_remove(&self, name: String) -> Result<SwapChanged> {
        let service = self.clone();
        self.tasks
            .run("swap remove", name.clone(), async move {
                let (pool, mut notes) = service.swap.remove(&name).await?;
                if let Some(pool) = pool {
                    notes.extend(service.top_up(&pool).await);
                }
                service.registry.save().await?;
                Ok(SwapChanged { swap: None, notes })
            })
            .await
    }

    /// Creates a pool. With `force`, a device may have dirty data of another pool only if `dirty`
    /// is [`OnDirty::Discard`]. `device_add` has the same rule.
    pub(crate) async fn pool_create(&self, create: PoolCreate, dirty: OnDirty) -> Result<PoolChanged> {
        let service = self.clone();
        self.tasks
            .run("pool create", create.name.clone(), async move { service.create(create, dirty).await })
            .await
    }

    /// Removes a pool. Refuses if the pool has caches or swap areas.
    pub(crate) async fn pool_remove(&self, pool: String) -> Result<PoolChanged> {
        let service = self.clone();
        self.tasks.run("pool remove", pool.clone(), async move { service.remove_pool(&pool).await }).await
    }

    pub(crate) async fn device_add(
        &self,
        pool: String,
        add: DeviceAdd,
        dirty: OnDirty,
    ) -> Result<PoolChanged> {
        let service = self.clone();
        self.tasks
            .run("pool add-device", pool.clone(), async move { service.add_device(&pool, add, dirty).await })
            .await
    }

    /// Switches allocation from a device on or off.
    pub(crate) async fn device_set(
        &self,
        pool: String,
        path: String,
        patch: DevicePatch,
    ) -> Result<PoolChanged> {
        let service = self.clone();
        self.tasks
            .run("pool set-device", pool.clone(), async move {
                service.set_device(&pool, Path::new(&path), patch).await
            })
            .await
    }

    pub(crate) async fn device_remove(&self, pool: String, path: String) -> Result<PoolChanged> {
        let service = self.clone();
        self.tasks
            .run(
                REMOVE_DEVICE,
                pool.clone(),
                async move { service.remove_device(&pool, Path::new(&path)).await },
            )
            .await
    }

    /// Creates a pool. Waits for the result without a time limit, unlike `pool_create`.
    pub(in crate::services) async fn create(
        &self,
        create: PoolCreate,
        dirty: OnDirty,
    ) -> Result<PoolChanged> {
        self.registry.inner().check_new_pool(&create)?;
        let segment_bytes = segment_bytes(&create);
        let PoolCreate { name, devices, size, force, flash_writes, segment_size: _ } = create;
        if force {
            check_overwritten(&devices, dirty).await?;
        }
        let specs = devices.into_iter().map(|path| device_spec(path, size)).collect();
        let opened = Flash::create(name.clone(), specs, segment_bytes, overwrite(force)).await?;
        self.take_pool_in(&name, opened, Known::default()).await?;
        self.restore_flash_writes(&name, flash_writes).await;
        self.registry.inner().pools_removed.retain(|removed| *removed != name);
        tracing::info!("pool {name} is ready");
        self.registry.save().await?;
        self.pool_changed(&name, Vec::new())
    }

    /// Adds an opened pool to the daemon, so that caches can use it. Devices of the pool that the
    /// saved state does not know are listed as missing: they were added after this state was saved,
    /// and may have dirty data.
    pub(in crate::services) async fn take_pool_in(
        &self,
        name: &str,
        opened: Opened,
        known: Known<'_>,
    ) -> Result<()> {
        let Known { out, peers, device_ids } = known;
        let chosen = |path: &PathBuf| if out.contains(path) { Chosen::Out } else { Chosen::In };
        let Opened { flash, uuid, segment_bytes, devices, offline } = opened;
        for (path, reason) in &offline {
            tracing::error!("pool {name}: {} is offline: {reason}", path.display());
        }
        let offline = offline.into_iter().map(|(path, reason)| {
            let reason = unknown_device(&path).map_or(reason, |_| UNKNOWN_REASON.to_owned());
            let chosen = chosen(&path);
            let peer = peers.iter().find(|peer| peer.path == path).cloned();
            DeviceEntry { peer, ..DeviceEntry::offline(path, reason, chosen) }
        });
        let now = flash.device_ids().await?;
        let entry = PoolEntry {
            flash,
            device_ids: device_ids.unwrap_or(now),
            uuid,
            segment_bytes,
            devices: offline.collect(),
            returned: Vec::new(),
            owners: Vec::new(),
            orphans: std::collections::BTreeMap::new(),
            orphans_before: Vec::new(),
            is_unseen: false,
            busy: Some(OPENING),
            leaving_disk: None,
            sharing: Sharing::default(),
            flash_writes: PoolWrites::default(),
        };
        {
            let mut inner = self.registry.inner();
            if inner.pools.contains_key(name) {
                return Err(conflict!("a pool '{name}' already exists"));
            }
            inner.pools.insert(name.to_owned(), entry);
        }
        for info in &devices {
            if let Err(error) = self.connect_device(name, info, chosen(&info.path)).await {
                tracing::error!("pool {name}: {} is offline: {error}", info.path.display());
                self.close_device(name, info.id).await;
                let chosen = chosen(&info.path);
                let entry = DeviceEntry::offline(info.path.clone(), error.problem.error, chosen);
                let peer = peers.iter().find(|peer| peer.path == info.path).cloned();
                let entry = DeviceEntry { peer, ..entry };
                self.registry.inner().pool_mut(name)?.devices.push(entry);
            }
        }
        self.registry.inner().pool_mut(name)?.note_device_ids(name, now);
        // An ended cache without segments is forgotten. Therefore segments are released only if the
        // owners of all segments are known.
        if self.refresh_owners(name).await {
            self.release_ended(name).await;
        }
        self.swap.refresh(name).await;
        self.registry.inner().pool_mut(name)?.busy = None;
        Ok(())
    }

    /// Makes all shards open a device, and allows allocation on it if configured. After a failure
    /// no shard has the device. The caller must then close the device in the pool, because an open
    /// device would block the next attempt.
    pub(in crate::services) async fn connect_device(
        &self,
        pool: &str,
        info: &DeviceInfo,
        chosen: Chosen,
    ) -> Result<()> {
        let (id, flash) = {
            let mut inner = self.registry.inner();
            (inner.new_device_id()?, inner.pool(pool)?.flash.clone())
        };
        if info.access == "buffered" {
            tracing::warn!(
                "pool {pool}: I/O of {} goes through the page cache, because its filesystem does \
                not support O_DIRECT",
                info.path.display()
            );
        }
        for (number, shard) in self.registry.shards.iter().enumerate() {
            let added = match flash.file(info.id).await {
                Ok(file) => shard.add_device(id, Box::new(file)).await.map_err(ApiError::from),
                Err(error) => Err(error),
            };
            if let Err(error) = added {
                for shard in &self.registry.shards[..number] {
                    // A shard that has ended has no device.
                    let _ = shard.remove_device(id).await;
                }
                return Err(error);
            }
        }
        {
            let peer = self.remote_flash.lender_at(&info.path);
            let mut inner = self.registry.inner();
            let devices = &mut inner.pool_mut(pool)?.devices;
            let entry = DeviceEntry { peer, ..DeviceEntry::online(info, id, chosen) };
            devices.retain(|device| unknown_device(&device.path) != Some(info.id));
            match devices.iter_mut().find(|device| device.path == info.path) {
                Some(device) => *device = entry,
                None => devices.push(entry),
            }
        }
        self.admit(pool, &flash, info.id).await?;
        Ok(())
    }

    /// Makes all shards open a newly formatted device. After a failure, removes the device from the
    /// pool.
    pub(in crate::services) async fn connect_new_device(
        &self,
        pool: &str,
        id: DeviceId,
        devices: Vec<DeviceInfo>,
    ) -> Result<()> {
        let info = devices.into_iter().find(|device| device.id == id);
        let info = info.ok_or_else(|| ApiError::failed("the new device went offline again"))?;
        let connected = self.connect_device(pool, &info, Chosen::In).await;
        if connected.is_ok() {
            let mut inner = self.registry.inner();
            let entry = inner.pool_mut(pool)?;
            entry.device_ids = entry.device_ids.max(id.0 + 1);
        } else {
            let flash = self.registry.inner().pool(pool)?.flash.clone();
            if let Err(error) = flash.remove_device(id, Vec::new()).await {
                tracing::warn!(
                    "pool {pool}: cannot remove the new device {} after an error: {error}",
                    info.path.display()
                );
            }
        }
        connected
    }

    /// Closes a device that the shards do not know. The contents of the device are kept.
    pub(super) async fn close_device(&self, pool: &str, id: DeviceId) {
        let Ok(flash) = self.registry.inner().pool(pool).map(|entry| entry.flash.clone()) else { return };
        if let Err(error) = flash.close_device(id).await {
            tracing::warn!("pool {pool}: {error}");
        }
    }

    /// Allows or forbids the allocation of new segments on a device. Allocation is forbidden if an
    /// operator has switched it off, or if hob has fenced the device after errors. Returns false if
    /// the device cannot store the setting.
    async fn admit(&self, pool: &str, flash: &Flash, id: DeviceId) -> Result<bool> {
        loop {
            let admission = self.registry.inner().pool(pool)?.admission(id);
            let devices = flash.set_admission(id, admission).await?;
            self.registry.refresh(pool, &devices);
            // hob may have fenced the device in the meantime, which changes the allowed allocation.
            if self.registry.inner().pool(pool)?.admission(id) == admission {
                return Ok(devices.iter().any(|device| device.id == id && device.admission == admission));
            }
        }
    }

    async fn add_device(&self, pool: &str, add: DeviceAdd, dirty: OnDirty) -> Result<PoolChanged> {
        if let Some(to) = add.peer {
            return self.borrow(pool, &to, add.size).await;
        }
        if add.force {
            check_overwritten(std::slice::from_ref(&add.path), dirty).await?;
        }
        let guard = self.registry.guard_pool_for_command(pool, "changed").await?;
        let flash = {
            let inner = self.registry.inner();
            inner.check_new_device(pool, Path::new(&add.path))?;
            inner.pool(pool)?.flash.clone()
        };
        let spec = device_spec(add.path, add.size);
        let path = spec.path.clone();
        if !add.force && self.connect_known_device(pool, &path).await? {
            drop(guard);
            self.release_outdated(pool).await;
            self.refresh_owners(pool).await;
            self.swap.refresh(pool).await;
            tracing::info!("pool {pool}: {}, which belongs to it, is online", path.display());
            let mut notes = vec!["the device belongs to the pool; its content is kept".to_owned()];
            notes.extend(self.top_up(pool).await);
            self.registry.save().await?;
            return self.pool_changed(pool, notes);
        }
        self.note_next_device(pool).await?;
        let added = flash.add_device(spec, overwrite(add.force)).await;
        if added.is_err() {
            self.forget_next_device(pool).await?;
        }
        let (id, devices) = added?;
        let uuid = flash.uuid().await?;
        self.connect_new_device(pool, id, devices).await?;
        self.registry.inner().pool_mut(pool)?.uuid = uuid;
        drop(guard);
        tracing::info!("pool {pool}: device {} added", path.display());
        let notes = self.top_up(pool).await;
        self.registry.save().await?;
        self.pool_changed(pool, notes)
    }

    async fn set_device(&self, pool: &str, path: &Path, patch: DevicePatch) -> Result<PoolChanged> {
        let DevicePatch { admission } = patch;
        let guard = self.registry.guard_pool_for_command(pool, "changed").await?;
        let (flash, ids, before) = {
            let mut inner = self.registry.inner();
            let entry = inner.pool_mut(pool)?;
            let flash = entry.flash.clone();
            let device = entry.device_mut(path).ok_or_else(|| no_device(pool, path))?;
            if device.state == DeviceState::Fenced {
                let path = path.display();
                return Err(conflict!("{path} is fenced, so its allocation stays off")
                    .hint(format!("remove it from the pool with 'hob pool remove-device {pool} {path}'")));
            }
            (flash, device.ids, std::mem::replace(&mut device.admission, admission))
        };
        if let Some(ids) = ids
            && !self.admit(pool, &flash, ids.in_pool).await?
        {
            if let Some(device) = self.registry.inner().pool_mut(pool)?.device_mut(path) {
                device.admission = before;
            }
            return Err(failed!("cannot store the setting on {}; see the daemon's log", path.display()));
        }
        drop(guard);
        let mut notes = Vec::new();
        if before == admission {
            notes.push("the device already had this setting".to_owned());
        } else {
            let now = if admission == Chosen::In { "has allocation on" } else { "has allocation off" };
            tracing::info!("pool {pool}: {} {now}", path.display());
        }
        let gives = |device: &DeviceEntry| device.admission == Chosen::In && device.ids.is_some();
        if !self.registry.inner().pool(pool)?.devices.iter().any(gives) {
            notes.push(format!(
                "all devices of pool {pool} are now missing or have allocation off, so no cache can be created or grow. At a \
                 start of hob, only caches with write-back get a new journal"
            ));
        }
        notes.extend(self.top_up(pool).await);
        self.registry.save().await?;
        self.pool_changed(pool, notes)
    }

    async fn remove_device(&self, pool: &str, path: &Path) -> Result<PoolChanged> {
        let guard = self.registry.guard_pool_for_command(pool, "changed").await?;
        self.swap.check_none(pool, Some(path))?;
        let (flash, ids) = {
            let inner = self.registry.inner();
            let entry = inner.pool(pool)?;
            let device = entry.devices.iter().find(|device| device.path == path);
            (entry.flash.clone(), device.ok_or_else(|| no_device(pool, path))?.ids)
        };
        let mut notes = Vec::new();
        if let Some(ids) = ids {
            self.release_outdated_patiently(pool).await;
            let devices = flash.set_admission(ids.in_pool, Admission::Out).await?;
            self.registry.refresh(pool, &devices);
            match self.empty_device(pool, ids.on_shards).await {
                Ok(more) => notes.extend(more),
                Err(error) => {
                    self.admit(pool, &flash, ids.in_pool).await?;
                    return Err(error);
                }
            }
            for shard in &self.registry.shards {
                shard.remove_device(ids.on_shards).await?;
            }
            let lost = {
                let mut inner = self.registry.inner();
                let entry = inner.pool_mut(pool)?;
                let lost = entry.by_shard_id(ids.on_shards).map(|device| std::mem::take(&mut device.lost));
                entry.in_pool(&lost.unwrap_or_default())
            };
            flash.remove_device(ids.in_pool, lost).await?;
        }
        if let Some(to) = self.remote_flash.lender_at(path) {
            self.remote_flash.give_back(&to).await;
            self.remote_flash.close_socket(path);
        }
        let device = DevicePath { pool: pool.to_owned(), path: path.to_owned() };
        {
            let mut inner = self.registry.inner();
            let entry = inner.pool_mut(pool)?;
            entry.devices.retain(|device| device.path != path);
            entry.returned.retain(|id| ids.is_none_or(|ids| ids.in_pool != *id));
            // A fenced device that hob has closed had no journal of a cache.
            if ids.is_none() && !self.returns.is_closed(&device) {
                inner.give_journals_up(pool);
            }
            let entry = inner.pool_mut(pool)?;
            if entry.devices.is_empty() {
                (entry.uuid, entry.device_ids) = (None, 0);
                notes.push(format!("pool {pool} has no device left"));
            }
        }
        self.returns.forget(&device);
        drop(guard);
        tracing::info!("pool {pool}: device {} removed", path.display());
        // Caches that lost segments with a fenced device may find space elsewhere.
        self.top_up(pool).await;
        self.registry.save().await?;
        self.pool_changed(pool, notes)
    }

    /// Moves all caches from a device without allocation to other devices.
    async fn empty_device(&self, pool: &str, device: DeviceId) -> Result<Vec<String>> {
        let on_it = |segments: &[hob_engine::command::Segment]| segments.iter().any(|s| s.device == device);
        let disks: Vec<String> = {
            let inner = self.registry.inner();
            inner
                .disks
                .values()
                .filter(|disk| on_it(&disk.held) || on_it(&disk.apart) || on_it(&disk.ring))
                .map(|disk| disk.wanted.name.clone())
                .collect()
        };
        // The guards of all disks are taken before the first move: if a disk is busy, hob refuses
        // the command instead of moving only some caches.
        let guards = disks.iter().map(|disk| self.registry.guard_disk(disk, "moved to another device"));
        let guards = guards.collect::<Result<Vec<_>, _>>()?;
        let mut notes = Vec::new();
        for (disk, _guard) in disks.iter().zip(guards) {
            self.registry.inner().pool_mut(pool)?.leaving_disk = Some(disk.clone());
            let moved = self.leave_device(disk, device).await;
            self.registry.inner().pool_mut(pool)?.leaving_disk = None;
            notes.extend(moved?);
        }
        let mut inner = self.registry.inner();
        let entry = inner.pool_mut(pool)?.by_shard_id(device);
        let taken = entry.map_or(0, |entry| entry.segments - entry.free_segments - entry.lost.len() as u64);
        if taken > 0 {
            // A concurrent change allocated segments before allocation was switched off, or a cache of
            // an offline disk or of no disk has segments.
            return Err(ApiError::conflict(
                "the device has segments of a cache that is being changed, is offline, or belongs to no disk",
            )
            .hint(format!("try again; 'hob health' and 'hob pool show {pool}' list such caches")));
        }
        Ok(notes)
    }

    async fn remove_pool(&self, pool: &str) -> Result<PoolChanged> {
        let guard = self.registry.guard_pool_for_command(pool, "removed").await?;
        self.swap.check_none(pool, None)?;
        self.release_ended(pool).await;
        let (flash, devices) = {
            let inner = self.registry.inner();
            let users = inner.users_of(pool);
            if !users.is_empty() {
                return Err(conflict!("pool {pool} has caches of these disks: {}", users.join(", "))
                    .hint("remove the caches with 'hob cache disable'"));
            }
            let entry = inner.pool(pool)?;
            if let Some((owner, _)) = entry.orphans(&inner).first() {
                let owner = CacheOwner(owner.0);
                return Err(conflict!("pool {pool} has the cache {owner}, which belongs to no disk").hint(
                    format!(
                        "give the cache to a disk with 'hob cache adopt DISK {owner}', or discard its \
                     data with 'hob pool discard-orphan {pool} {owner} --yes'"
                    ),
                ));
            }
            let ids =
                entry.devices.iter().filter_map(|device| Some((device.ids?, entry.in_pool(&device.lost))));
            (entry.flash.clone(), ids.collect::<Vec<_>>())
        };
        for (ids, lost) in devices {
            for shard in &self.registry.shards {
                shard.remove_device(ids.on_shards).await?;
            }
            flash.remove_device(ids.in_pool, lost).await?;
        }
        for to in self.lenders_of(pool) {
            self.remote_flash.give_back(&to).await;
            self.remote_flash.close_socket(&to.path);
        }
        {
            let mut inner = self.registry.inner();
            inner.pools.remove(pool);
            if inner.defined.contains(pool) {
                inner.pools_removed.push(pool.to_owned());
            }
        }
        drop(guard);
        tracing::info!("pool {pool} is removed");
        self.registry.save().await?;
        Ok(PoolChanged { pool: None, notes: Vec::new() })
    }

    /// Tries again to open devices that could not be opened. Returns true if one of them is online
    /// now.
    pub(in crate::services) async fn retry_devices(&self, pool: &str) -> bool {
        let Ok(_guard) = self.registry.guard_pool(pool, OPENING) else { return false };
        let (flash, uuid, offline) = {
            let inner = self.registry.inner();
            let Ok(entry) = inner.pool(pool) else { return false };
            let offline = entry.devices.iter().filter(|device| device.state == DeviceState::Offline);
            // Remote flash is not formatted again while a missing cache may need its contents.
            let settled = inner.disks.values().all(|disk| disk.is_settled_in(pool));
            let offline = offline
                .filter(|device| device.peer.is_none() || !settled)
                .filter(|device| unknown_device(&device.path).is_none());
            let offline: Vec<_> = offline.map(|device| (device.path.clone(), device.admission)).collect();
            (entry.flash.clone(), entry.uuid.clone(), offline)
        };
        let mut back = false;
        for (path, chosen) in offline {
            // The content of a device that was fenced is not used.
            if self.returns.is_closed(&DevicePath { pool: pool.to_owned(), path: path.clone() }) {
                continue;
            }
            if let Some(to) = self.remote_flash.lender_at(&path)
                && self.remote_flash.ask_lease(&to).await.is_err()
            {
                continue;
            }
            let Ok(devices) = flash.open_late(path.clone(), uuid.clone()).await else { continue };
            let Some(info) = devices.iter().find(|device| device.path == path) else { continue };
            self.release_ended_on(pool, info.id).await;
            match self.connect_device(pool, info, chosen).await {
                Ok(()) => {
                    tracing::info!("pool {pool}: device {} is online again", path.display());
                    self.note_returned(pool, info.id);
                    back = true;
                }
                Err(error) => {
                    tracing::warn!("pool {pool}: {} stays offline: {error}", path.display());
                    self.close_device(pool, info.id).await;
                }
            }
        }
        if back {
            if let Ok(ids) = flash.device_ids().await
                && let Ok(entry) = self.registry.inner().pool_mut(pool)
            {
                entry.note_device_ids(pool, ids);
            }
            self.release_outdated(pool).await;
            self.refresh_owners(pool).await;
            self.swap.refresh(pool).await;
            self.top_up(pool).await;
        }
        back
    }

    pub(in crate::services) fn pool_changed(&self, name: &str, notes: Vec<String>) -> Result<PoolChanged> {
        Ok(PoolChanged { pool: Some(self.observe.pool(name)?), notes })
    }
}

impl Flash {
    /// Closes a device and keeps its contents.
    async fn close_device(&self, id: DeviceId) -> Result<()> {
        let closed = self.with(move |place| {
            let Some(pool) = place else { return Ok(()) };
            // A device that was removed is already closed.
            let _ = pool.close_device(id);
            if pool.devices().is_empty() {
                *place = None;
            }
            Ok(())
        });
        closed.await.map(drop)
    }
}

impl Inner {
    /// Accepts that journals and data of the caches in a pool are lost with a missing device. Older
    /// journals of these caches on other devices are outdated. Journals of caches in use are on
    /// present devices.
    fn give_journals_up(&mut self, pool: &str) {
        let unused = self.disks.values_mut().filter(|disk| disk.ring.is_empty());
        let caches = unused.filter_map(|disk| disk.wanted.cache.as_mut());
        let journals = caches.filter(|spec| spec.pool == pool).filter_map(|spec| spec.journal.as_mut());
        journals.for_each(|journal| journal.ended = true);
    }
}

/// The devices of a pool according to the saved state.
#[derive(Clone, Copy, Debug, Default)]
pub(in crate::services) struct Known<'a> {
    /// Devices on which the operator switched allocation off. Caches keep their data on these
    /// devices.
    pub(in crate::services) out: &'a [PathBuf],
    /// Devices on other hosts.
    pub(in crate::services) peers: &'a [PeerState],
    /// Number of device ids that the pool had given out; 0 without a saved state, and `None` if all
    /// its devices are known.
    pub(in crate::services) device_ids: Option<u16>,
}

impl PoolEntry {
    fn device_mut(&mut self, path: &Path) -> Option<&mut DeviceEntry> {
        self.devices.iter_mut().find(|device| device.path == path)
    }
}

impl crate::services::registry::Inner {
    /// Returns the disks with a cache in a pool.
    pub(in crate::services) fn users_of(&self, pool: &str) -> Vec<String> {
        let uses =
            |disk: &&crate::services::registry::DiskEntry| disk.cache().is_some_and(|spec| spec.pool == pool);
        self.disks.values().filter(uses).map(|disk| disk.wanted.name.clone()).collect()
    }

    /// Refuses to create a pool if its name is invalid or in use, if there are too many pools, or
    /// if one of its devices is in use.
    pub(in crate::services) fn check_new_pool(&self, create: &PoolCreate) -> Result<()> {
        let name = &create.name;
        check_name(name).map_err(|error| invalid!("'{name}' cannot be a pool's name: {error}"))?;
        if self.pools.contains_key(name) {
            return Err(conflict!("a pool '{name}' already exists").hint("choose another name"));
        }
        if self.pools.len() >= POOLS_MAX {
            return Err(conflict!("cannot add a pool: hob has at most {POOLS_MAX} pools"));
        }
        create.devices.iter().try_for_each(|path| self.check_device_is_new(Path::new(path)))
    }

    /// Refuses to add a device to an unknown pool, or a device that a pool uses.
    pub(in crate::services) fn check_new_device(&self, pool: &str, path: &Path) -> Result<()> {
        self.pool(pool)?;
        self.check_device_is_new(path)
    }

    pub(in crate::services) fn check_device_is_new(&self, path: &Path) -> Result<()> {
        if !path.is_absolute() {
            return Err(invalid!("{} is not an absolute path", path.display()));
        }
        let mut pools = self.pools.iter();
        let owner = pools.find(|(_, pool)| pool.devices.iter().any(|device| device.path == path));
        match owner {
            Some((name, _)) => Err(conflict!("{} belongs to pool {name} already", path.display())),
            None => Ok(()),
        }
    }
}

pub(in crate::services) fn no_device(pool: &str, path: &Path) -> ApiError {
    not_found!("pool {pool} has no device {}", path.display())
        .hint(format!("'hob pool show {pool}' lists the devices"))
}

pub(in crate::services) fn device_spec(path: String, size: Option<Size>) -> DeviceSpec {
    DeviceSpec { path: path.into(), size_bytes: size.map(Size::bytes) }
}

/// Returns the segment size with which a pool is created.
pub(in crate::services) fn segment_bytes(create: &PoolCreate) -> u64 {
    let by_file = || default_segment_bytes(create.size.map(Size::bytes));
    create.segment_size.map_or_else(by_file, Size::bytes)
}

pub(in crate::services) fn overwrite(force: bool) -> Overwrite {
    if force { Overwrite::Force } else { Overwrite::Refuse }
}
