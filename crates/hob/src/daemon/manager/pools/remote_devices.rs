//! Devices of pools that are flash of other hosts (docs/decisions/0022).
//!
//! A lender that is silent, or fails, is given up in an order that no one may change: first the ownership records in etcd stop to name
//! what it has, then its I/Os fail. When it is back, the device is made again, and dirty data gets second copies again.

use std::time::Duration;

use hob_control::{Borrowed, DeviceState, Peers, PoolChanged, Size};
use hob_engine::command::Segment;
use hob_engine::units::DeviceId;
use hob_storage::pool::{DeviceSpec, Overwrite};

use super::Pools;
use crate::daemon::manager::api_error::ApiError;
use crate::daemon::manager::registry::DiskEntry;
use crate::daemon::state::PeerState;

/// Pause between two tries to have the cluster know that a copy is gone.
const SAY_EVERY: Duration = Duration::from_millis(500);

impl Pools {
    /// What a pool has borrowed.
    pub(in crate::daemon::manager) fn lenders_of(&self, pool: &str) -> Vec<PeerState> {
        let inner = self.registry.inner();
        let Ok(entry) = inner.pool(pool) else { return Vec::new() };
        entry.devices.iter().filter_map(|device| device.peer.clone()).collect()
    }

    /// Takes flash of another host into a pool.
    pub(in crate::daemon::manager) async fn borrow(
        &self,
        pool: &str,
        to: &str,
        size: Option<Size>,
    ) -> Result<PoolChanged, ApiError> {
        let size =
            size.ok_or_else(|| ApiError::invalid("say how much of the peer's flash is wanted: --size"))?;
        let path = self.remote_flash.socket_for(to)?;
        let guard = self.registry.guard_pool(pool, "changed")?;
        {
            let inner = self.registry.inner();
            inner.check_device_is_new(&path)?;
            if inner.pool(pool)?.devices.iter().any(|device| device.peer.is_some()) {
                return Err(ApiError::conflict(format!(
                    "pool {pool} has a peer already; a second copy is at one"
                )));
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
        tracing::info!("pool {pool} has {size} at {}", to.host);
        let notes = self.top_up(pool).await;
        self.registry.save().await?;
        self.pool_changed(pool, notes)
    }

    /// What this host lends and borrows.
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
                borrowed.push(Borrowed {
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

    /// A lender does not answer: nobody is to believe what it has, and then it is given up.
    pub(in crate::daemon::manager) async fn peer_silent(&self, device: DeviceId) {
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
                    "{name}: writes wait, because etcd may still record the replica on a silent peer: {error}"
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

    /// Disks of which a device has anything.
    fn disks_at(&self, device: DeviceId) -> Vec<String> {
        let inner = self.registry.inner();
        let on_it = |disk: &&DiskEntry| disk.apart.iter().chain(&disk.ring).any(|it| it.device == device);
        inner.disks.values().filter(on_it).map(|disk| disk.wanted.name.clone()).collect()
    }

    /// Makes the devices anew that are on hosts which were gone, where those are back.
    pub(in crate::daemon::manager) async fn offer_again(&self, pool: &str) {
        let mut there = Vec::new();
        for to in self.gone_lenders(pool).into_iter().map(|(to, _)| to) {
            // Whoever does not answer must not keep the pool from others meanwhile.
            match self.remote_flash.ask_lease_once(&to).await {
                Some(Ok(_)) => there.push(to),
                Some(Err(error)) => {
                    tracing::debug!("pool {pool}: {} does not lend yet: {error}", to.host)
                }
                None => {}
            }
        }
        if there.is_empty() {
            return;
        }
        let Ok(guard) = self.registry.guard_pool(pool, "given a peer's device again") else { return };
        let mut back = false;
        for (to, ids) in self.gone_lenders(pool).into_iter().filter(|(to, _)| there.contains(to)) {
            match self.make_anew(pool, &to, ids).await {
                Ok(()) => {
                    tracing::info!("pool {pool}: {} lends again", to.host);
                    back = true;
                }
                Err(error) => tracing::warn!("pool {pool}: {} cannot be used yet: {error}", to.host),
            }
        }
        drop(guard);
        if back {
            self.top_up(pool).await;
        }
    }

    /// The devices of a pool that are to be made anew when their hosts are back: nothing of them is needed.
    fn gone_lenders(
        &self,
        pool: &str,
    ) -> Vec<(PeerState, Option<crate::daemon::manager::registry::DeviceIds>)> {
        let inner = self.registry.inner();
        let Ok(entry) = inner.pool(pool) else { return Vec::new() };
        let all_there = inner.disks.values().all(|disk| disk.is_settled_in(pool));
        let is_used = |ids: crate::daemon::manager::registry::DeviceIds| {
            let mut all = inner.disks.values().flat_map(|disk| disk.apart.iter().chain(&disk.ring));
            all.any(|segment| segment.device == ids.on_shards)
        };
        let gone = entry.devices.iter().filter(|device| match device.state {
            DeviceState::Fenced => !device.ids.is_some_and(is_used),
            // What is there may be needed for a cache that is not there yet.
            DeviceState::Offline => all_there,
            _ => false,
        });
        gone.filter_map(|device| Some((device.peer.clone()?, device.ids))).collect()
    }

    async fn make_anew(
        &self,
        pool: &str,
        to: &PeerState,
        ids: Option<crate::daemon::manager::registry::DeviceIds>,
    ) -> Result<(), ApiError> {
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

    /// Formats what a lender has, and gives it to the shards.
    pub(in crate::daemon::manager) async fn add_peer_device(
        &self,
        pool: &str,
        to: &PeerState,
    ) -> Result<(), ApiError> {
        let flash = self.registry.inner().pool(pool)?.flash.clone();
        let spec = DeviceSpec { path: to.path.clone(), size_bytes: None };
        let (id, devices) = flash.add_device(spec, Overwrite::Force).await?;
        self.connect_new_device(pool, id, devices).await
    }
}

impl crate::daemon::manager::registry::Inner {
    /// Is it a device on another host?
    pub(in crate::daemon::manager) fn is_peer(&mut self, device: DeviceId) -> bool {
        self.device_on_shards(device).is_some_and(|(_, entry)| entry.peer.is_some())
    }
}

impl crate::daemon::manager::registry::PoolEntry {
    /// Does a peer lend to it now?
    pub(in crate::daemon::manager) fn has_peer(&self) -> bool {
        self.devices.iter().any(|device| {
            device.peer.is_some() && device.state == DeviceState::Online && device.gives_segments()
        })
    }
}
