//! Pool devices on other hosts (docs/decisions/0022).
//!
//! If a lending host fails or does not answer, hob stops using the leased flash in two steps. First
//! hob removes the replicas on that flash from the ownership records in etcd. Then hob lets I/O to
//! the remote device fail. When the lending host answers again, hob formats the device again and
//! makes new replicas of the dirty data.

use std::time::Duration;

use hob_control::{DeviceState, Peers, PoolChanged, RemoteFlash, Size};
use hob_engine::command::Segment;
use hob_engine::units::DeviceId;
use hob_storage::pool::{DeviceSpec, Overwrite};

use super::Pools;
use crate::api_error::{ApiError, Result, conflict};
use crate::services::registry::{DiskEntry, LENDING_AGAIN};
use crate::state::PeerState;

/// Pause between two attempts to remove a replica from an ownership record.
const SAY_EVERY: Duration = Duration::from_millis(500);

impl Pools {
    pub(in crate::services) fn lenders_of(&self, pool: &str) -> Vec<PeerState> {
        let inner = self.registry.inner();
        let Ok(entry) = inner.pool(pool) else { return Vec::new() };
        entry.devices.iter().filter_map(|device| device.peer.clone()).collect()
    }

    /// Adds flash of another host to a pool.
    pub(in crate::services) async fn borrow(
        &self,
        pool: &str,
        to: &str,
        size: Option<Size>,
    ) -> Result<PoolChanged> {
        let size = size.ok_or_else(|| ApiError::invalid("pass --size, the size of the remote flash"))?;
        let path = self.remote_flash.socket_for(to)?;
        let guard = self.registry.guard_pool_for_command(pool, "changed").await?;
        {
            let inner = self.registry.inner();
            inner.check_device_is_new(&path)?;
            if inner.pool(pool)?.devices.iter().any(|device| device.peer.is_some()) {
                return Err(conflict!("pool {pool} already has remote flash; a pool can have one peer"));
            }
        }
        let to = PeerState { path: path.clone(), host: to.to_owned(), size };
        self.remote_flash.open_socket(&to)?;
        if let Err(error) = self.remote_flash.ask_lease(&to).await {
            self.remote_flash.close_socket(&path);
            return Err(error);
        }
        if let Err(error) = self.add_peer_device(pool, &to).await {
            self.remote_flash.give_back(&to).await;
            self.remote_flash.close_socket(&path);
            return Err(error);
        }
        drop(guard);
        tracing::info!("pool {pool}: {size} of remote flash at {} added", to.host);
        let notes = self.top_up(pool).await;
        self.registry.save().await?;
        self.pool_changed(pool, notes)
    }

    /// Returns the flash that this host lends and borrows.
    pub(crate) fn peers(&self) -> Peers {
        let lent = self.remote_flash.lent();
        let inner = self.registry.inner();
        let mut borrowed = Vec::new();
        for (pool, entry) in &inner.pools {
            for device in &entry.devices {
                let Some(to) = &device.peer else { continue };
                let on_it = |disk: &&DiskEntry| {
                    let has =
                        |segment: &Segment| device.ids.is_some_and(|ids| ids.on_shards == segment.device);
                    disk.apart.iter().any(has)
                };
                borrowed.push(RemoteFlash {
                    pool: pool.clone(),
                    peer: to.host.clone(),
                    path: device.path.to_string_lossy().into_owned(),
                    size: to.size,
                    state: device.state,
                    reason: device.reason.clone(),
                    disks: inner.disks.values().filter(on_it).map(|disk| disk.wanted.name.clone()).collect(),
                });
            }
        }
        Peers { lent, borrowed }
    }

    /// Abandons a remote device whose lending host does not answer, after its replicas were removed
    /// from the ownership records.
    pub(in crate::services) async fn peer_silent(&self, device: DeviceId) {
        {
            let mut inner = self.registry.inner();
            if !inner.given_up.insert(device) {
                return;
            }
        }
        let _word = self.copy_words.lock().await;
        for name in self.disks_at(device) {
            while let Err(error) = self.say_copy_is_gone(&name).await {
                tracing::warn!(
                    "disk {name}: its ownership record may still name the replica on a peer that does not answer, so its writes wait: {error}"
                );
                tokio::time::sleep(SAY_EVERY).await;
            }
        }
        let flash = {
            let mut inner = self.registry.inner();
            let found = inner.device_on_shards(device).and_then(|(pool, entry)| Some((pool, entry.ids?)));
            found.map(|(pool, ids)| (inner.pools[&pool].flash.clone(), ids))
        };
        if let Some((flash, ids)) = flash {
            flash.give_up(ids.in_pool).await;
        }
        for shard in &self.registry.shards {
            shard.give_up_device(device);
        }
    }

    /// Returns the disks with data on a device.
    fn disks_at(&self, device: DeviceId) -> Vec<String> {
        let inner = self.registry.inner();
        let on_it = |disk: &&DiskEntry| disk.apart.iter().chain(&disk.ring).any(|it| it.device == device);
        inner.disks.values().filter(on_it).map(|disk| disk.wanted.name.clone()).collect()
    }

    /// Formats abandoned remote devices again if their lending hosts answer and no cache needs the
    /// data on them.
    pub(in crate::services) async fn offer_again(&self, pool: &str) {
        let mut there = Vec::new();
        for to in self.gone_lenders(pool).into_iter().map(|(to, _)| to) {
            // A lending host that does not answer must not block the pool for other operations.
            match self.remote_flash.ask_lease_once(&to).await {
                Some(Ok(_)) => there.push(to),
                Some(Err(error)) => {
                    tracing::debug!("pool {pool}: host {} lends no flash yet: {error}", to.host)
                }
                None => {}
            }
        }
        if there.is_empty() {
            return;
        }
        let Ok(guard) = self.registry.guard_pool(pool, LENDING_AGAIN) else { return };
        let mut back = false;
        for (to, ids) in self.gone_lenders(pool).into_iter().filter(|(to, _)| there.contains(to)) {
            match self.make_anew(pool, &to, ids).await {
                Ok(()) => {
                    tracing::info!("pool {pool}: the remote flash of host {} is online again", to.host);
                    back = true;
                }
                Err(error) => tracing::warn!(
                    "pool {pool}: the remote flash of host {} is not usable yet: {error}",
                    to.host
                ),
            }
        }
        drop(guard);
        if back {
            self.top_up(pool).await;
        }
    }

    /// Returns the lending hosts of a pool whose abandoned devices have no data that a cache needs.
    fn gone_lenders(&self, pool: &str) -> Vec<(PeerState, Option<crate::services::registry::DeviceIds>)> {
        let inner = self.registry.inner();
        let Ok(entry) = inner.pool(pool) else { return Vec::new() };
        let all_there = inner.disks.values().all(|disk| disk.is_settled_in(pool));
        let is_used = |ids: crate::services::registry::DeviceIds| {
            let mut all = inner.disks.values().flat_map(|disk| disk.apart.iter().chain(&disk.ring));
            all.any(|segment| segment.device == ids.on_shards)
        };
        let gone = entry.devices.iter().filter(|device| match device.state {
            DeviceState::Fenced => !device.ids.is_some_and(is_used),
            // An offline cache may need the data on the device.
            DeviceState::Offline => all_there,
            _ => false,
        });
        gone.filter_map(|device| Some((device.peer.clone()?, device.ids))).collect()
    }

    async fn make_anew(
        &self,
        pool: &str,
        to: &PeerState,
        ids: Option<crate::services::registry::DeviceIds>,
    ) -> Result<()> {
        let flash = self.registry.inner().pool(pool)?.flash.clone();
        if let Some(ids) = ids {
            for shard in &self.registry.shards {
                shard.remove_device(ids.on_shards).await?;
            }
            let lost = {
                let mut inner = self.registry.inner();
                let entry = inner.pool_mut(pool)?;
                let lost = entry.by_shard_id(ids.on_shards).map(|device| std::mem::take(&mut device.lost));
                let lost = entry.in_pool(&lost.unwrap_or_default());
                if let Some(device) = entry.by_shard_id(ids.on_shards) {
                    (device.ids, device.state) = (None, DeviceState::Offline);
                }
                lost
            };
            flash.remove_device(ids.in_pool, lost).await?;
        }
        self.add_peer_device(pool, to).await
    }

    /// Formats a lending host's flash as a device of the pool, and makes the shards open the
    /// device.
    pub(in crate::services) async fn add_peer_device(&self, pool: &str, to: &PeerState) -> Result<()> {
        let flash = self.registry.inner().pool(pool)?.flash.clone();
        let spec = DeviceSpec { path: to.path.clone(), size_bytes: None };
        self.note_next_device(pool).await?;
        let added = flash.add_device(spec, Overwrite::Force).await;
        if added.is_err() {
            self.forget_next_device(pool).await?;
        }
        let (id, devices) = added?;
        self.connect_new_device(pool, id, devices).await
    }
}

impl crate::services::registry::Inner {
    /// Returns true if the device is on another host.
    pub(in crate::services) fn is_peer(&mut self, device: DeviceId) -> bool {
        self.device_on_shards(device).is_some_and(|(_, entry)| entry.peer.is_some())
    }
}

impl crate::services::registry::PoolEntry {
    /// Returns true if the pool has a working remote device.
    pub(in crate::services) fn has_peer(&self) -> bool {
        self.devices.iter().any(|device| {
            device.peer.is_some() && device.state == DeviceState::Online && device.gives_segments()
        })
    }
}
