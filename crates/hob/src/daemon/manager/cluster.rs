//! Disks of a cluster: acquiring them before they are opened, acquiring them again after the lease
//! has expired, releasing and losing them (docs/decisions/0019).
//!
//! Without a cluster, the functions here do nothing.

use std::sync::Arc;
use std::time::Duration;

use hob_control::{Cluster as View, ClusterDisk, ClusterHost, ClusterPool, Disk};
use hob_engine::command::Mode;
use hob_engine::migration::Record;

use super::api_error::ApiError;
use super::disks::Open;
use super::disks::RecoveringCache;
use super::leave::Ending;
use super::registry::ClusterWait;
use super::{DiskPhase, Manager};
use crate::daemon::cluster::{Cluster, OtherOwner, TakeError, Took};

/// Interval at which waiting disks, and disks to acquire again, are checked.
const LOOK_EVERY: Duration = Duration::from_secs(1);

/// Maximum time to release a disk when the daemon ends. After that no further disk is released.
const END_MAX: Duration = Duration::from_secs(2);

/// Number of checks between two searches for disks without dirty data.
const TIDY_LOOKS: u32 = 5;

/// Number of checks between two reads of all orders while etcd sends notifications and there are no
/// orders.
const ORDERS_LOOKS: u32 = 15;

/// Number of checks between two publications of placement data.
const TELL_LOOKS: u32 = 12;

impl super::DiskEntry {
    /// Returns true if the disk is offline because of its state in the cluster. The cluster's
    /// watcher decides when to try again.
    pub(super) fn waits_for_cluster(&self) -> bool {
        matches!(self.phase, DiskPhase::Offline(_)) && self.cluster_wait != ClusterWait::No
    }
}

impl Manager {
    /// Makes this host serve its disks as a member of a cluster. Must precede opening any disk.
    pub(crate) fn set_cluster(&self, cluster: Arc<Cluster>) {
        self.peers.set_cluster(cluster);
    }

    pub(super) fn cluster(&self) -> Option<&Arc<Cluster>> {
        self.peers.cluster()
    }

    pub(super) fn cluster_or_refuse(&self) -> Result<&Arc<Cluster>, ApiError> {
        self.cluster().ok_or_else(|| {
            ApiError::conflict("this host is not in a cluster").hint(
                "add a [cluster] table with the addresses of etcd to hob.toml; see \
                    docs/CLUSTER.md",
            )
        })
    }

    /// Returns this host's state as a cluster member.
    pub(crate) fn cluster_view(&self) -> Result<View, ApiError> {
        Ok(self.cluster_or_refuse()?.view())
    }

    /// Returns all members.
    pub(crate) async fn cluster_hosts(&self) -> Result<Vec<ClusterHost>, ApiError> {
        self.cluster_or_refuse()?.hosts().await.map_err(|error| ApiError::failed(error.to_string()))
    }

    /// Returns all disks that a host of the cluster has or had.
    pub(crate) async fn cluster_disks(&self) -> Result<Vec<ClusterDisk>, ApiError> {
        self.cluster_or_refuse()?.disks().await.map_err(|error| ApiError::failed(error.to_string()))
    }

    /// Acquires a disk that another host had. With `force`, discards data that only that host has.
    pub(crate) async fn cluster_take(self: &Arc<Self>, disk: String, force: bool) -> Result<Disk, ApiError> {
        let cluster = self.cluster_or_refuse()?;
        let is_offline = matches!(self.inner().disk(&disk)?.phase, DiskPhase::Offline(_));
        if !is_offline {
            return self.observe.disk(&disk);
        }
        if force {
            cluster.force(&disk);
        }
        let manager = self.clone();
        self.tasks
            .run("cluster take", disk.clone(), async move {
                loop {
                    manager.disks.bring_online(&disk).await;
                    if manager.inner().disk(&disk)?.cluster_wait != ClusterWait::Settles {
                        return manager.observe.disk(&disk);
                    }
                    tokio::time::sleep(LOOK_EVERY).await;
                }
            })
            .await
    }

    /// Opens a disk's backing, assigns the disk to a shard and offers it to clients. In a cluster,
    /// acquires the disk first. The caller holds the operation guard of the offline disk. See
    /// `Disks::open_owned`.
    pub(super) async fn open_disk(
        self: &Arc<Self>,
        name: &str,
        when: Open,
    ) -> Result<(Vec<String>, Option<RecoveringCache>), ApiError> {
        let Some(cluster) = self.cluster().filter(|_| !self.needs_no_owner(name)) else {
            return self.disks.open_owned(name, when, None).await;
        };
        let taken = match self.take_disk(cluster, name).await? {
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
            cluster.leave(name, &taken).await;
        }
        opened
    }

    async fn take_disk(&self, cluster: &Cluster, name: &str) -> Result<Took, ApiError> {
        if let Some(to) = self.moves.promised(name, cluster.own_name()) {
            cluster.try_later(name);
            return Err(ApiError::conflict(format!("the disk is being moved to {to}"))
                .hint("if that host does not acquire the disk, this host acquires it again"));
        }
        let (known, dirty) = self.wish(name)?;
        let taken = cluster.take(name, known, dirty).await;
        if let Ok(disk) = self.inner().disk_mut(name) {
            disk.cluster_wait = match &taken {
                Ok(_) => ClusterWait::No,
                Err(TakeError::OtherOwner { how: OtherOwner::Served, .. }) => ClusterWait::Served,
                Err(TakeError::OtherOwner { how: OtherOwner::Settling, .. }) => ClusterWait::Settles,
                Err(_) => ClusterWait::Yes,
            };
        }
        taken.map_err(refuse)
    }

    /// Acquires a disk that migrated from another host of the cluster, before it is served.
    pub(super) async fn take_arrived(&self, name: &str) -> Result<(), ApiError> {
        let Some(cluster) = self.cluster().filter(|_| !self.needs_no_owner(name)) else { return Ok(()) };
        let taken = match self.take_disk(cluster, name).await? {
            Took::Taken(taken) => taken,
            Took::FailoverCandidate(to_adopt) => {
                cluster.leave_adopting(name).await;
                let why = format!("{} failed and has dirty data of the disk", to_adopt.from.name);
                return Err(ApiError::conflict(why).hint("start that host again"));
            }
        };
        let (shard, id) = self.shard_of(name)?;
        shard.set_lease(id, taken.clock)?;
        // The pulled data is valid, whichever host had the disk before. This is saved together with
        // the record.
        self.inner().disk_mut(name)?.wanted.generation = Some(taken.generation);
        Ok(())
    }

    /// Releases a disk that migrated to another host, which waits to acquire it.
    pub(super) fn give_back_departed(self: &Arc<Self>, name: &str) {
        let Some(cluster) = self.cluster().cloned() else { return };
        let (manager, name) = (self.clone(), name.to_owned());
        tokio::spawn(async move {
            // The loop ends if the disk is acquired again.
            while matches!(manager.record_of(&name), Some(Record::Away { .. })) {
                let (known, _) = manager.wish(&name).unwrap_or((None, false));
                // The disk was drained before it left this host. Its ownership record may still
                // announce dirty data, if etcd or this host was down since.
                match cluster.give_up(&name, known).await {
                    Ok(()) => return,
                    Err(why) => tracing::warn!("disk {name}: cannot release it in the cluster yet: {why}"),
                }
                tokio::time::sleep(LOOK_EVERY).await;
            }
        });
    }

    /// Returns the identity of this host's cluster, for other hosts.
    pub(super) fn cluster_identity(&self) -> Option<String> {
        self.cluster().and_then(|cluster| cluster.identity())
    }

    /// Refuses a disk of another cluster, and a disk without a cluster if this host has one.
    pub(super) fn check_cluster(&self, theirs: Option<&str>) -> Result<(), ApiError> {
        let ours = self.cluster_identity();
        match (self.cluster().is_some(), theirs) {
            (false, None) => Ok(()),
            (false, Some(_)) => Err(ApiError::conflict(
                "the disk belongs to a cluster, and this host is not in a \
                    cluster",
            )
            .hint("use the same [cluster] in hob.toml on this host")),
            (true, None) => {
                Err(ApiError::conflict("the disk belongs to no cluster, and this host is in a cluster")
                    .hint("use the same [cluster] in hob.toml on the other host"))
            }
            (true, Some(theirs)) if ours.as_deref() == Some(theirs) => Ok(()),
            (true, Some(_)) => Err(ApiError::conflict("the disk belongs to another cluster than this host")),
        }
    }

    /// Records in etcd that disks may have dirty data, before any data becomes dirty.
    pub(super) async fn mark_dirty(&self) -> Result<(), ApiError> {
        let Some(cluster) = self.cluster() else { return Ok(()) };
        let names: Vec<String> = {
            let inner = self.inner();
            let writes_back = |disk: &&super::DiskEntry| {
                matches!(disk.phase, DiskPhase::Online(_))
                    && disk.cache().is_some_and(|spec| spec.mode == Mode::WriteBack)
            };
            inner.disks.values().filter(writes_back).map(|disk| disk.wanted.name.clone()).collect()
        };
        for name in names {
            self.pools.forget_copies_of_others(&name).await?;
            if cluster.stays_marked(&name).await == Some(false) {
                cluster.mark(&name).await.map_err(|why| {
                    ApiError::failed(format!(
                        "cannot record in etcd that {name} may have dirty data \
                        on this host: {why}"
                    ))
                    .hint(
                        "write-back starts only after etcd has this record; try again when \
                            etcd answers",
                    )
                })?;
            }
        }
        Ok(())
    }

    /// Records in etcd that a disk may have dirty data, before write-back continues after a
    /// cancelled migration. Retries without a time limit.
    pub(super) async fn mark_kept(&self, name: &str) -> Result<(), ApiError> {
        let Some(cluster) = self.cluster().filter(|_| self.owns(name)) else { return Ok(()) };
        let mut is_said = false;
        while let Err(why) = cluster.mark(name).await {
            self.shard_of(name)?;
            if !std::mem::replace(&mut is_said, true) {
                tracing::warn!(
                    "disk {name}: the cache writes through until etcd records that the disk may \
                    have dirty data: {why}"
                );
            }
            tokio::time::sleep(LOOK_EVERY).await;
        }
        Ok(())
    }

    /// Follows the state of the host's lease in etcd, until dropped.
    pub(crate) async fn tend_cluster(self: Arc<Self>) {
        let Some(cluster) = self.cluster().cloned() else { return std::future::pending().await };
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
                    self.look_at_moves(cluster);
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
                    self.look_at_moves(cluster);
                }
                self.open_waiting(cluster);
            }
            cluster.set_pools(self.cluster_pools());
            if has_lease && looks % TELL_LOOKS == TELL_LOOKS / 4 {
                let (manager, cluster) = (self.clone(), cluster.clone());
                tokio::spawn(async move { manager.tell_cluster(&cluster).await });
            }
            if has_lease && looks.is_multiple_of(TIDY_LOOKS) {
                self.unmark_clean(cluster).await;
            }
        }
    }

    /// Returns the information about pools that this host publishes.
    pub(crate) fn cluster_pools(&self) -> Vec<ClusterPool> {
        let pool =
            |pool: hob_control::Pool| ClusterPool { name: pool.name, size: pool.size, free: pool.free };
        self.observe.pools().into_iter().map(pool).collect()
    }

    /// Acquires the served disks again that were acquired under an expired lease in etcd.
    async fn take_all_again(self: &Arc<Self>, cluster: &Arc<Cluster>) {
        let mut going = tokio::task::JoinSet::new();
        for name in self.served() {
            if cluster.is_held(&name).await {
                continue;
            }
            let (manager, cluster) = (self.clone(), cluster.clone());
            going.spawn(async move { manager.take_again(&cluster, &name).await });
        }
        while going.join_next().await.is_some() {}
    }

    /// Returns the disks that this host serves as their owner.
    pub(super) fn served(&self) -> Vec<String> {
        let online: Vec<String> = {
            let inner = self.inner();
            let online = inner.disks.values().filter(|disk| matches!(disk.phase, DiskPhase::Online(_)));
            online.map(|disk| disk.wanted.name.clone()).collect()
        };
        online.into_iter().filter(|name| self.owns(name)).collect()
    }

    async fn take_again(self: &Arc<Self>, cluster: &Cluster, name: &str) {
        let (Ok((known, dirty)), Ok((shard, id))) = (self.wish(name), self.shard_of(name)) else { return };
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

    /// Tries to acquire the waiting disks for which the watcher suggests an attempt.
    fn open_waiting(self: &Arc<Self>, cluster: &Cluster) {
        let waiting: Vec<String> = {
            let inner = self.inner();
            let waiting = inner.disks.values().filter(|disk| disk.waits_for_cluster());
            waiting.map(|disk| disk.wanted.name.clone()).collect()
        };
        for name in cluster.to_try(&waiting) {
            let manager = self.clone();
            tokio::spawn(async move { manager.disks.bring_online(&name).await });
        }
    }

    /// Records in etcd which disks have no dirty data any more, so that other hosts may acquire
    /// them.
    async fn unmark_clean(self: &Arc<Self>, cluster: &Cluster) {
        for name in self.served() {
            self.unmark_if_clean(cluster, &name).await;
        }
    }

    /// Records in etcd that a disk was drained for its migration. If this host then fails, other
    /// hosts may acquire the disk. If etcd does not answer, a later check repeats this.
    pub(super) fn unmark_drained(self: &Arc<Self>, name: &str) {
        let Some(cluster) = self.cluster().cloned() else { return };
        let (manager, name) = (self.clone(), name.to_owned());
        tokio::spawn(async move { manager.unmark_if_clean(&cluster, &name).await });
    }

    async fn unmark_if_clean(self: &Arc<Self>, cluster: &Cluster, name: &str) {
        let writes_through = || self.wish(name).is_ok_and(|(_, dirty)| !dirty);
        if !writes_through() || cluster.is_marked(name).await != Some(true) {
            return;
        }
        // The guard prevents a change of the mode meanwhile. A migration that holds the guard has
        // drained the disk, and records a return to write-back first.
        let guard = self.guard_disk(name, "looked at").ok();
        let is_clean = || writes_through() && (guard.is_some() || self.is_drained_to_leave(name));
        let Ok((shard, id)) = self.shard_of(name) else { return };
        if is_clean()
            && shard.stats(id).await.is_ok_and(|stats| stats.sectors_dirty == 0)
            && let Err(why) = cluster.unmark(name, is_clean).await
        {
            tracing::debug!("{name}: {why}");
        }
    }

    /// Gives up the ownership of all disks when the daemon ends. The caller stops serving the disks
    /// before.
    pub(crate) async fn leave_cluster(self: &Arc<Self>, ending: Ending) {
        let Some(cluster) = self.cluster() else { return };
        let goes_on = ending == Ending::HandOver;
        if !goes_on {
            let names: Vec<String> = self.inner().disks.keys().cloned().collect();
            for name in names {
                let dirty = self.wish(&name).is_ok_and(|(_, dirty)| dirty);
                let is_drained = self.inner().disk(&name).is_ok_and(|disk| disk.drained_at_end);
                let given = tokio::time::timeout(END_MAX, cluster.give_back(&name, dirty && !is_drained));
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

pub(super) fn refuse(error: TakeError) -> ApiError {
    match error {
        TakeError::OtherOwner { why, hint, .. } => ApiError::conflict(why).hint(hint),
        TakeError::Unknown(why) => ApiError::failed(why).hint("hob retries by itself"),
    }
}
