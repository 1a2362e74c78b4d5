//! The cluster service: opens the disks that this host acquires, acquires them again after the
//! lease has expired, and releases them at the daemon's end (docs/decisions/0019).
//!
//! [`failover`] makes this host the owner of a disk whose replica it has, and [`placement`]
//! publishes and reads the data for placement advice. The `ownership` service, on a lower layer,
//! acquires one disk; this service decides when. If this host is in no cluster, this service only
//! opens disks.

mod failover;
mod placement;

use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use hob_control::{Cluster as View, ClusterDisk, ClusterHost, ClusterPool, Disk, DiskChanged};

use super::disks::{DiskOwner, Disks, Open, Opened};
use super::ending::Ending;
use super::migration::Migrations;
use super::moves::Moves;
use super::observe::Observe;
use super::ownership::{Ownership, refuse};
use super::registry::{ClusterWait, DiskPhase, Registry};
use super::remote_flash::RemoteFlash;
use super::tasks::Tasks;
use crate::api_error::{ApiError, Result};
use crate::background::spawn;
use crate::cluster::{Cluster, Release, TakeError, Took};
use placement::Rates;

/// Interval at which this host checks the disks that wait for the cluster, and the disks that it
/// must acquire again.
const LOOK_EVERY: Duration = Duration::from_secs(1);

/// Maximum time to release a disk when the daemon ends. If a release takes longer, the daemon ends
/// without releasing the remaining disks.
const END_MAX: Duration = Duration::from_secs(2);

/// Number of checks, one each [`LOOK_EVERY`], between two searches for disks that have no dirty
/// data any more.
const TIDY_LOOKS: u32 = 5;

/// Number of checks between two reads of all orders to move disks. This number applies while etcd
/// notifies this host of orders and the latest read found none. Otherwise each check reads the
/// orders.
const ORDERS_LOOKS: u32 = 15;

/// Number of checks between two publications of placement data.
const TELL_LOOKS: u32 = 12;

service! {
    /// The cluster service; see the module.
    #[derive(Debug)]
    pub(crate) struct ClusterService {
        registry: Arc<Registry>,
        tasks: Tasks,
        observe: Observe,
        remote_flash: RemoteFlash,
        disks: Disks,
        ownership: Arc<Ownership>,
        migrations: Arc<Migrations>,
        moves: Arc<Moves>,
    } with {
        rates: Rates,
    }
}

impl ClusterService {
    /// Returns this host's state as a cluster member.
    pub(crate) fn view(&self) -> Result<View> {
        Ok(self.ownership.cluster_or_refuse()?.view())
    }

    pub(crate) async fn hosts(&self) -> Result<Vec<ClusterHost>> {
        self.ownership.cluster_or_refuse()?.hosts().await.map_err(|error| ApiError::failed(error.to_string()))
    }

    /// Returns all disks that a host of the cluster has or had.
    pub(crate) async fn disks(&self) -> Result<Vec<ClusterDisk>> {
        self.ownership.cluster_or_refuse()?.disks().await.map_err(|error| ApiError::failed(error.to_string()))
    }

    /// Acquires a disk whose last owner is another host. With `force`, discards data that only the
    /// other host has.
    pub(crate) async fn take(self: &Arc<Self>, disk: String, force: bool) -> Result<Disk> {
        let cluster = self.ownership.cluster_or_refuse()?;
        let is_offline = matches!(self.registry.inner().disk(&disk)?.phase, DiskPhase::Offline(_));
        if !is_offline {
            return self.observe.disk(&disk);
        }
        if force {
            cluster.force(&disk);
        }
        let service = self.clone();
        self.tasks
            .run("cluster take", disk.clone(), async move {
                loop {
                    service.disks.bring_online(&disk).await;
                    if service.registry.inner().disk(&disk)?.cluster_wait != ClusterWait::Settles {
                        return service.observe.disk(&disk);
                    }
                    tokio::time::sleep(LOOK_EVERY).await;
                }
            })
            .await
    }

    /// Opens a disk's backing, assigns the disk to a shard and offers it to clients. In a cluster,
    /// acquires the disk first. The caller holds the operation guard of the offline disk. See
    /// `Disks::open_owned`.
    async fn open_disk(self: &Arc<Self>, name: &str, when: Open) -> Result<Opened> {
        let Some(cluster) = self.ownership.cluster_of(name) else {
            return self.disks.open_owned(name, when, None).await;
        };
        let taken = match self.ownership.take(cluster, name).await? {
            Took::Taken(taken) => taken,
            Took::FailoverCandidate(to_adopt) => match self.adopt(cluster, name, to_adopt).await {
                Ok(taken) => taken,
                Err(error) => {
                    cluster.leave_adopting(name).await;
                    return Err(error);
                }
            },
        };
        let opened = self.disks.open_owned(name, when, Some(&taken)).await;
        if opened.is_err() {
            let release = self.registry.inner().release_of(name, cluster.settle());
            cluster.leave(name, &taken, release).await;
        }
        opened
    }

    /// Handles changes of this host's lease, disks that this host waits for, and orders to move
    /// disks, until the future is dropped.
    pub(crate) async fn tend(self: Arc<Self>) {
        let Some(cluster) = self.ownership.cluster().cloned() else { return std::future::pending().await };
        tokio::join!(cluster.hear(), self.tend_disks_of(&cluster));
    }

    async fn tend_disks_of(self: &Arc<Self>, cluster: &Arc<Cluster>) {
        let mut memberships = cluster.memberships();
        let mut look = tokio::time::interval(LOOK_EVERY);
        look.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        let mut looks = 0u32;
        loop {
            let has_lease = memberships.borrow().is_some();
            tokio::select! {
                _ = look.tick() => looks = looks.wrapping_add(1),
                () = cluster.something_to_try(), if has_lease => {
                    self.open_waiting(cluster);
                    continue;
                }
                () = cluster.orders_changed(), if has_lease => {
                    self.moves.look(cluster);
                    continue;
                }
                changed = memberships.changed() => if changed.is_err() {
                    // The daemon is shutting down.
                    return std::future::pending().await;
                },
            }
            let has_lease = memberships.borrow_and_update().is_some();
            if has_lease {
                self.take_all_again(cluster).await;
                let is_told = cluster.hears_of_orders() && self.moves.are_none();
                if !is_told || looks.is_multiple_of(ORDERS_LOOKS) {
                    self.moves.look(cluster);
                }
                self.open_waiting(cluster);
            }
            cluster.set_pools(self.published_pools());
            if has_lease && looks % TELL_LOOKS == TELL_LOOKS / 4 {
                let (service, cluster) = (self.clone(), cluster.clone());
                spawn(async move { service.tell(&cluster).await });
            }
            if has_lease && looks.is_multiple_of(TIDY_LOOKS) {
                self.unmark_clean().await;
            }
        }
    }

    /// Returns the information about pools that this host publishes.
    fn published_pools(&self) -> Vec<ClusterPool> {
        let pool =
            |pool: hob_control::Pool| ClusterPool { name: pool.name, size: pool.size, free: pool.free };
        self.observe.pools().into_iter().map(pool).collect()
    }

    /// Acquires the served disks again after this host's lease has expired.
    async fn take_all_again(self: &Arc<Self>, cluster: &Arc<Cluster>) {
        let mut going = tokio::task::JoinSet::new();
        for name in self.registry.served() {
            if cluster.is_held(&name).await {
                continue;
            }
            let (service, cluster) = (self.clone(), cluster.clone());
            going.spawn(async move { service.take_again(&cluster, &name).await });
        }
        while going.join_next().await.is_some() {}
    }

    async fn take_again(self: &Arc<Self>, cluster: &Cluster, name: &str) {
        let (Ok((known, dirty)), Ok((shard, id))) = (self.registry.wish(name), self.registry.shard_of(name))
        else {
            return;
        };
        match cluster.take_again(name, known, dirty).await {
            Ok(taken) => {
                tracing::info!(
                    "disk {name}: acquired again under a new lease; no other host served it meanwhile"
                );
                if let Err(error) = shard.set_lease(id, taken.clock) {
                    tracing::warn!("{name}: {error}");
                }
            }
            Err(TakeError::Unknown(why)) => {
                tracing::debug!("disk {name}: cannot acquire the disk again yet: {why}")
            }
            Err(error @ TakeError::OtherOwner { .. }) => {
                tracing::error!("disk {name}: lost to another host: {error}");
                shard.lose(id);
                self.disks.lost(id, refuse(error)).await;
            }
        }
    }

    /// Tries to acquire and open the waiting disks for which the cluster watcher suggests an
    /// attempt.
    fn open_waiting(self: &Arc<Self>, cluster: &Cluster) {
        let waiting: Vec<String> = {
            let inner = self.registry.inner();
            let waiting = inner.disks.values().filter(|disk| disk.waits_for_cluster());
            waiting.map(|disk| disk.wanted.name.clone()).collect()
        };
        for name in cluster.to_try(&waiting) {
            let service = self.clone();
            spawn(async move { service.disks.bring_online(&name).await });
        }
    }

    /// Records in etcd which disks have no dirty data any more, so that other hosts may acquire
    /// them.
    async fn unmark_clean(&self) {
        for name in self.registry.served() {
            self.ownership.unmark_if_clean(&name, || self.migrations.is_drained_to_leave(&name)).await;
        }
    }

    /// Releases all disks when the daemon ends, after the shards have stopped serving them.
    pub(crate) async fn leave(self: &Arc<Self>, ending: Ending) {
        let Some(cluster) = self.ownership.cluster() else { return };
        let goes_on = ending == Ending::HandOver;
        if !goes_on {
            let names: Vec<String> = self.registry.inner().disks.keys().cloned().collect();
            for name in names {
                if self.registry.inner().release_of(&name, cluster.settle()) == Release::AfterSettling {
                    tracing::warn!(
                        "disk {name}: not released in the cluster, because its backing may still execute requests \
                         of this host; other hosts can acquire it settle_seconds after the end of this host's lease"
                    );
                    continue;
                }
                let dirty = self.registry.wish(&name).is_ok_and(|(_, dirty)| dirty);
                let is_drained = self.registry.inner().disk(&name).is_ok_and(|disk| disk.drained_at_end);
                let given = tokio::time::timeout(
                    END_MAX,
                    cluster.give_back(&name, dirty && !is_drained, Release::AtOnce),
                );
                if let Err(why) = given.await.unwrap_or_else(|_| Err("etcd does not answer".to_owned())) {
                    tracing::warn!(
                        "disk {name}: cannot release it in the cluster: {why}; other hosts can acquire it when the lease has expired"
                    );
                    break;
                }
            }
        }
        cluster.end(!goes_on).await;
    }
}

impl DiskOwner for ClusterService {
    fn open(
        self: Arc<Self>,
        disk: String,
        when: Open,
    ) -> Pin<Box<dyn Future<Output = Result<Opened>> + Send>> {
        Box::pin(async move { self.open_disk(&disk, when).await })
    }

    fn remove_absent(
        self: Arc<Self>,
        disk: String,
    ) -> Pin<Box<dyn Future<Output = Result<Option<DiskChanged>>> + Send>> {
        Box::pin(async move { self.migrations.remove_absent_disk(&disk).await })
    }
}
