//! The old host of an ordered move: releases the disk, or migrates it to the new host.

use std::sync::Arc;
use std::time::Duration;

use hob_control::{CarryMode, ClusterMoveState, MigrationStart, MigrationState, OnClients, Size, Switch};
use hob_engine::migration::{Order as MigrationOrder, Record};
use hob_engine::units::DiskId;
use tokio::time::Instant;

use super::super::registry::{ClusterWait, DiskPhase, MOVING};
use super::Moves;
use super::lost;
use crate::api_error::{ApiError, Result, conflict, failed};
use crate::cluster::{Cluster, Order, OrderFound};
use crate::shard_api::ShardHandle;
use crate::state::JournalSpec;

/// Maximum time for the other host to report whether it can serve the disk.
const WELCOME_MAX: Duration = Duration::from_secs(20);

/// Time after which all other hosts are assumed to have seen the order.
const SEEN_AFTER: Duration = Duration::from_millis(2500);

/// Maximum time for the other host to acquire the disk. After this time, the disk stays on this
/// host.
const TAKEN_MAX: Duration = Duration::from_secs(40);

/// Maximum time without an answer of etcd before a move fails.
const SILENCE_MAX: Duration = Duration::from_secs(10);

/// Maximum time that a move waits until a migrated disk has become a tombstone.
const ENDED_MAX: Duration = Duration::from_secs(10);

/// Interval between two reads of an order, or of the progress of a migration.
const LOOK_EVERY: Duration = Duration::from_millis(500);

/// An order that this host executes.
struct Work {
    cluster: Arc<Cluster>,
    disk: String,
    order: Order,
    revision: u64,
}

impl Work {
    /// Writes the progress of the order to etcd, unless the order was cancelled in the meantime.
    async fn say(&mut self, state: ClusterMoveState, note: Option<String>) -> Result<()> {
        if self.order.state == state && self.order.note == note {
            return self.read().await.map(drop);
        }
        let order = Order { state, note, ..self.order.clone() };
        match self.cluster.put_order(&self.disk, &order, Some(self.revision)).await {
            Ok(Some(revision)) => {
                (self.order, self.revision) = (order, revision);
                Ok(())
            }
            Ok(None) => self.read().await.map(drop),
            // The write may have succeeded.
            Err(_) => {
                tokio::time::sleep(LOOK_EVERY).await;
                let found = self.find().await?;
                if found.order == order {
                    (self.order, self.revision) = (order, found.revision);
                    return Ok(());
                }
                self.read().await.map(drop)
            }
        }
    }

    async fn find(&self) -> Result<OrderFound> {
        let until = Instant::now() + SILENCE_MAX;
        let found = loop {
            match self.cluster.order_of(&self.disk).await {
                Ok(found) => break found,
                Err(error) if Instant::now() > until => return Err(lost(error)),
                Err(_) => tokio::time::sleep(LOOK_EVERY).await,
            }
        };
        found.filter(|found| found.order.id == self.order.id).ok_or_else(|| {
            ApiError::conflict(
                "the move was cancelled: the other host has left the cluster, or another move was requested",
            )
        })
    }

    /// Reads the order's state. A cancelled order is an error.
    async fn read(&mut self) -> Result<ClusterMoveState> {
        let found = self.find().await?;
        (self.order, self.revision) = (found.order, found.revision);
        match self.order.state {
            ClusterMoveState::Failed => Err(ApiError::conflict(
                self.order.note.clone().unwrap_or_else(|| "the move was cancelled".to_owned()),
            )),
            state => Ok(state),
        }
    }

    /// Waits until the order has the state `wanted`. Fails if the order was cancelled, or after
    /// `wait_max`.
    async fn wait_for(&mut self, wanted: ClusterMoveState, wait_max: Duration) -> Result<()> {
        let until = Instant::now() + wait_max;
        while self.read().await? != wanted {
            if Instant::now() > until {
                let (to, seconds) = (&self.order.to, wait_max.as_secs());
                return Err(failed!("{to} has not answered within {seconds} s"));
            }
            // Without an answer of etcd the members are unknown.
            let hosts = self.cluster.hosts().await.unwrap_or_default();
            if !hosts.is_empty() && !hosts.iter().any(|host| host.name == self.order.to) {
                return Err(conflict!("{} has left the cluster", self.order.to));
            }
            tokio::time::sleep(LOOK_EVERY).await;
        }
        Ok(())
    }
}

impl Moves {
    /// Executes the owner's part of an order to its end.
    pub(super) async fn leave_by_order(self: Arc<Self>, cluster: Arc<Cluster>, found: OrderFound) {
        let OrderFound { disk, order, revision, .. } = found;
        let order = Order { from: cluster.own_name().to_owned(), ..order };
        let mut work = Work { cluster, disk, order, revision };
        let to = work.order.to.clone();
        tracing::info!("disk {}: moving it to {to}, as requested in the cluster", work.disk);
        let left = self.leave_as_ordered(&mut work).await;
        self.end(&work.disk);
        if let Err(error) = left {
            tracing::warn!("disk {}: its move to {to} failed: {error}", work.disk);
            // If the order was cancelled, the host that cancelled it has recorded the end.
            if !work.order.state.is_over() {
                let why = error.to_string();
                let Work { cluster, disk, order, revision } = work;
                let found = OrderFound { disk, order, revision, is_ours: true };
                super::end(&cluster, found, ClusterMoveState::Failed, &why).await;
            }
        }
    }

    async fn leave_as_ordered(self: &Arc<Self>, work: &mut Work) -> Result<()> {
        let hosts = work.cluster.hosts().await.map_err(lost)?;
        let to = hosts.into_iter().find(|host| host.name == work.order.to);
        let to = to.ok_or_else(|| conflict!("{} has left the cluster", work.order.to))?;
        let (shard, id) = self.registry.shard_of(&work.disk)?;
        let has_cache = self.registry.inner().disk(&work.disk)?.cache().is_some();
        let carry = match (work.order.cache, shard.users(id).await?) {
            (None | Some(CarryMode::Drop), 0) => None,
            // The disk has no cache to move.
            (Some(_), 0) if !has_cache => None,
            (mode, _) => Some(mode.unwrap_or_default()),
        };
        match carry {
            None => self.leave_alone(work, &shard, id).await,
            Some(mode) => {
                let address = to.address.ok_or_else(|| {
                    conflict!(
                        "{} is in use, or its cache is to be copied, and the address of the control \
                        API of {} is unknown",
                        work.disk,
                        to.name
                    )
                    .hint(format!(
                        "set address in [cluster] of hob.toml on {}, and TLS as in \
                        docs/MIGRATION.md, or disconnect the clients of the disk",
                        to.name
                    ))
                })?;
                self.leave_by_migration(work, mode, address).await
            }
        }
    }

    /// Moves a disk without clients: drains, closes and releases it.
    async fn leave_alone(self: &Arc<Self>, work: &mut Work, shard: &ShardHandle, id: DiskId) -> Result<()> {
        let name = work.disk.clone();
        let guard = self.registry.guard_disk_for_command(&name, MOVING).await?;
        let plan = self.plan(work, String::new(), CarryMode::Drop)?;
        work.order.cache = Some(CarryMode::Drop);
        work.order.arrival = Some(Box::new(self.migrations.arrival(&name, &plan)?));
        work.say(ClusterMoveState::Offered, None).await?;
        let offered = Instant::now();
        work.wait_for(ClusterMoveState::Welcome, WELCOME_MAX).await?;
        work.say(ClusterMoveState::Leaving, None).await?;
        self.exports.hide_file(&name, OnClients::Refuse).await?;
        let closed = self.close_to_leave(work, shard, id, offered).await;
        let given = match closed {
            Ok(()) => self.hand_on(work).await,
            Err(error) => {
                // The disk is still served with its cache.
                if let Err(error) = self.pools.tune(&name, shard, id).await {
                    tracing::warn!("{name}: {error}");
                }
                self.disks.fit_opened(&name).await;
                let _ = self.exports.show_file(&name).await;
                return Err(error);
            }
        };
        drop(guard);
        let taken = match given {
            Ok(()) => work.wait_for(ClusterMoveState::Done, TAKEN_MAX).await,
            Err(error) => Err(error),
        };
        // If the other host failed to acquire the disk, this host waits for the disk like all other
        // hosts, and soon acquires it again.
        self.ownership.orders().give(&name, None);
        taken
    }

    /// Prepares the release of a disk: drains the disk, lets no client connect any more, and checks
    /// that no client is connected.
    async fn close_to_leave(
        self: &Arc<Self>,
        work: &mut Work,
        shard: &ShardHandle,
        id: DiskId,
        offered: Instant,
    ) -> Result<()> {
        let name = work.disk.clone();
        self.drain_to_leave(work, shard, id).await?;
        tokio::time::sleep_until(offered + SEEN_AFTER).await;
        // From here on no client can connect.
        self.exports.table().remove_disk(&name).await;
        let users = shard.users(id).await?;
        if users > 0 || work.read().await.is_err() {
            self.disks.offer_again(&name).await?;
            work.read().await?;
            return Err(conflict!("a client connected to {name} during the move")
                .hint("request the move again, so that hob migrates the disk, or disconnect its clients"));
        }
        Ok(())
    }

    /// Drains dirty data and removes the cache. Reports the progress, and ends if the order is
    /// cancelled.
    async fn drain_to_leave(
        self: &Arc<Self>,
        work: &mut Work,
        shard: &ShardHandle,
        id: DiskId,
    ) -> Result<()> {
        let name = work.disk.clone();
        let draining = self.pools.drain_and_take_cache(&name);
        tokio::pin!(draining);
        loop {
            tokio::select! {
                drained = &mut draining => return drained,
                () = tokio::time::sleep(Duration::from_secs(1)) => {}
            }
            self.pools.look(&name, shard, id).await;
            let dirty = self.observe.disk(&name)?.cache.and_then(|cache| cache.dirty);
            let left = dirty.map_or(Size(0), |dirty| dirty.size);
            let note = format!("{} of dirty data is not on the backing yet", left.human());
            if let Err(error) = work.say(ClusterMoveState::Leaving, Some(note)).await {
                let _ = self.pools.stop_drain_of(&name, shard, id).await;
                let _ = draining.await;
                return Err(error);
            }
        }
    }

    /// Closes the disk and releases its ownership, so that the other host can acquire it.
    async fn hand_on(self: &Arc<Self>, work: &mut Work) -> Result<()> {
        let (name, to) = (work.disk.clone(), work.order.to.clone());
        self.ownership.orders().give(&name, Some(&to));
        let reason = conflict!("the disk is being moved to {to}");
        // The disk is offline only because it moves, which is not a failure.
        self.registry.inner().disk_mut(&name)?.cluster_wait = ClusterWait::Served;
        self.disks.take_offline(&name, &reason).await;
        // The cache of a disk that its shard keeps is in use.
        self.registry.inner().check_left_by_shard(&name)?;
        self.wait_again(&name).await?;
        let release = self.registry.inner().release_of(&name, work.cluster.settle());
        work.cluster
            .give_back(&name, false, release)
            .await
            .map_err(|why| failed!("cannot release the disk in the cluster: {why}"))?;
        work.say(ClusterMoveState::Given, None).await
    }

    /// Makes a released disk, which has no data on flash, wait for the cluster, like a disk that
    /// another host owns.
    async fn wait_again(self: &Arc<Self>, name: &str) -> Result<()> {
        let spec = {
            let mut inner = self.registry.inner();
            let disk = inner.disk_mut(name)?;
            (disk.has_cache, disk.lock, disk.memory) = (false, None, None);
            disk.cluster_wait = ClusterWait::Served;
            disk.wanted.generation = None;
            disk.wanted.cache.clone()
        };
        if let Some(spec) = spec.filter(|spec| spec.journal.is_some()) {
            self.pools.forget_owner(&spec).await;
            if let Some(cache) = self.registry.inner().disk_mut(name)?.wanted.cache.as_mut() {
                cache.journal = Some(JournalSpec::new());
            }
        }
        self.registry.save().await
    }

    /// Returns the plan of the migration that carries out the order.
    fn plan(&self, work: &Work, to: String, cache: CarryMode) -> Result<MigrationStart> {
        let inner = self.registry.inner();
        let wanted = &inner.disk(&work.disk)?.wanted;
        if wanted.read_only {
            return Err(ApiError::conflict("a read-only disk has no owner: each host may serve it"));
        }
        Ok(MigrationStart {
            to,
            cache,
            bandwidth: work.order.bandwidth,
            switch: Switch::OnWrite,
            backing: None,
            pool: work.order.pool.clone(),
            vhost_user: wanted.vhost_user.clone(),
            fuse: wanted.fuse.clone(),
        })
    }

    /// Moves a disk by migration, because the cached data moves with the disk or a VM uses the
    /// disk.
    async fn leave_by_migration(
        self: &Arc<Self>,
        work: &mut Work,
        mode: CarryMode,
        address: String,
    ) -> Result<()> {
        let (name, to) = (work.disk.clone(), work.order.to.clone());
        work.order.cache = Some(mode);
        let start = self.plan(work, address, mode)?;
        work.say(
            ClusterMoveState::Leaving,
            Some("the other host was asked whether it can serve the disk".to_owned()),
        )
        .await?;
        self.migrations.migrate(name.clone(), start).await?;
        let mut is_ordered = false;
        let mut is_said = false;
        loop {
            tokio::time::sleep(LOOK_EVERY).await;
            let shown = self.migrations.migration(&name)?;
            let users = match self.registry.shard_of(&name) {
                Ok((shard, id)) => shard.users(id).await.unwrap_or(0),
                Err(_) => 0,
            };
            match shown.state {
                MigrationState::Kept => {
                    return Err(ApiError::conflict(
                        shown.why.unwrap_or_else(|| "the disk stays on this host".to_owned()),
                    ));
                }
                MigrationState::Serving | MigrationState::Over | MigrationState::Away if !is_said => {
                    work.say(ClusterMoveState::Done, None).await?;
                    is_said = true;
                }
                _ => {}
            }
            if matches!(shown.state, MigrationState::Over | MigrationState::Away) {
                return self.wait_as_before(&name, &to).await;
            }
            if shown.warm && users == 0 && !is_ordered && shown.state == MigrationState::Copying {
                is_ordered = self.migrations.order(&name, MigrationOrder::Finish).await.is_ok();
            }
            if is_said {
                continue;
            }
            let note = match (shown.state, users) {
                (MigrationState::Preparing, _) => "dirty data is written to the backing".to_owned(),
                (MigrationState::Copying, _) if !shown.warm => {
                    format!("{} % of the cache is copied", shown.percent)
                }
                (MigrationState::Copying, 1..) => {
                    "the disk waits for the VM: migrate the VM now, or start it on the other host".to_owned()
                }
                (MigrationState::HandingOver, _) => {
                    "the disk is handed over; the other host has not confirmed it yet".to_owned()
                }
                _ => "the other host prepares to receive the disk".to_owned(),
            };
            if let Err(error) = work.say(ClusterMoveState::Leaving, Some(note)).await {
                let _ = self.migrations.order(&name, MigrationOrder::Cancel).await;
                return Err(error);
            }
        }
    }

    /// Prepares for a later return of a migrated disk: its tombstone becomes a disk that waits for
    /// the cluster.
    async fn wait_as_before(self: &Arc<Self>, name: &str, to: &str) -> Result<()> {
        let until = Instant::now() + ENDED_MAX;
        while !self.is_tombstone(name) {
            if Instant::now() > until {
                return Ok(());
            }
            tokio::time::sleep(LOOK_EVERY).await;
        }
        self.migrations.forget(name);
        {
            let mut inner = self.registry.inner();
            let disk = inner.disk_mut(name)?;
            disk.wanted.migration = None;
            disk.phase = DiskPhase::Offline(format!("{to} has it"));
        }
        self.wait_again(name).await
    }

    /// Returns true if the disk has migrated to another host and the migration has ended.
    fn is_tombstone(&self, name: &str) -> bool {
        let is_taken = matches!(self.registry.record_of(name), Some(Record::Away { taken: true, .. }));
        let inner = self.registry.inner();
        is_taken
            && inner
                .disk(name)
                .is_ok_and(|disk| matches!(disk.phase, DiskPhase::Away(_)) && disk.busy.is_none())
    }
}
