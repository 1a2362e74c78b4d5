//! The ownership service (docs/decisions/0019): acquires a disk in the cluster before the disk is
//! served, records in etcd whether the disk may have dirty data, and releases the disk.
//!
//! Without a cluster, every host owns its disks, and the functions here do nothing. The service
//! owns the known [`Orders`] to move disks, because an order decides which host may acquire a disk.

mod orders;

use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use hob_engine::command::Mode;
use hob_engine::migration::Record;

use super::peer_access::PeerAccess;
use super::pools::Pools;
use super::registry::{ClusterWait, DiskEntry, DiskPhase, Registry, SaveObserver};
use crate::api_error::{ApiError, Result, conflict, failed};
use crate::background::spawn;
use crate::cluster::{Cluster, OtherOwner, Release, TakeError, Took};
pub(super) use orders::{Orders, PROMISED_MAX};

/// Pause between two attempts to record a change in etcd.
const RETRY_EVERY: Duration = Duration::from_secs(1);

service! {
    /// The ownership service; see the module.
    #[derive(Debug)]
    pub(super) struct Ownership {
        registry: Arc<Registry>,
        pools: Pools,
        peers: Arc<PeerAccess>,
    } with {
        orders: Orders,
    }
}

impl Ownership {
    /// Returns the known orders to move disks.
    pub(super) fn orders(&self) -> &Orders {
        &self.orders
    }

    pub(super) fn cluster(&self) -> Option<&Arc<Cluster>> {
        self.peers.cluster()
    }

    pub(super) fn cluster_or_refuse(&self) -> Result<&Arc<Cluster>> {
        self.cluster().ok_or_else(|| {
            ApiError::conflict("this host is not in a cluster")
                .hint("add a [cluster] table with the addresses of etcd to hob.toml; see docs/CLUSTER.md")
        })
    }

    /// Returns this host's cluster, if a disk needs an owner there; `None` without a cluster, or
    /// for a read-only disk.
    pub(super) fn cluster_of(&self, name: &str) -> Option<&Arc<Cluster>> {
        self.cluster().filter(|_| !self.registry.needs_no_owner(name))
    }

    /// Acquires a disk in the cluster before this host opens the disk.
    pub(super) async fn take(&self, cluster: &Cluster, name: &str) -> Result<Took> {
        if let Some(to) = self.orders.promised(name, cluster.own_name()) {
            cluster.try_later(name);
            return Err(conflict!("the disk is being moved to {to}")
                .hint("if that host does not acquire the disk, this host acquires it again"));
        }
        let (known, dirty) = self.registry.wish(name)?;
        let taken = cluster.take(name, known, dirty).await;
        if let Ok(disk) = self.registry.inner().disk_mut(name) {
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
    pub(super) async fn take_arrived(&self, name: &str) -> Result<()> {
        let Some(cluster) = self.cluster_of(name) else { return Ok(()) };
        let taken = match self.take(cluster, name).await? {
            Took::Taken(taken) => taken,
            Took::FailoverCandidate(to_adopt) => {
                cluster.leave_adopting(name).await;
                let why = format!("{} failed and has dirty data of the disk", to_adopt.from.name);
                return Err(ApiError::conflict(why).hint("start that host again"));
            }
        };
        let (shard, id) = self.registry.shard_of(name)?;
        shard.set_lease(id, taken.clock)?;
        // The data that this host has pulled is valid, whichever host owned the disk before. So the
        // generation is recorded here as for a disk that this host owned before. The caller saves
        // the generation together with the migration record.
        self.registry.inner().disk_mut(name)?.wanted.generation = Some(taken.generation);
        Ok(())
    }

    /// Releases a disk that migrated to another host, so that the other host can acquire it.
    pub(super) fn give_back_departed(self: &Arc<Self>, name: &str) {
        let Some(cluster) = self.cluster().cloned() else { return };
        let (registry, name) = (self.registry.clone(), name.to_owned());
        spawn(async move {
            // The loop ends if the disk is acquired again.
            while matches!(registry.record_of(&name), Some(Record::Away { .. })) {
                let (known, _) = registry.wish(&name).unwrap_or((None, false));
                // The disk was drained before it left this host. Its ownership record may still
                // announce dirty data, if etcd or this host was down after the disk left.
                match cluster.give_up(&name, known, Release::AtOnce).await {
                    Ok(()) => return,
                    Err(why) => tracing::warn!("disk {name}: cannot release it in the cluster yet: {why}"),
                }
                tokio::time::sleep(RETRY_EVERY).await;
            }
        });
    }

    /// Returns the identity of this host's cluster, for other hosts.
    pub(super) fn cluster_identity(&self) -> Option<String> {
        self.cluster().and_then(|cluster| cluster.identity())
    }

    /// Refuses a disk of another cluster, and a disk without a cluster if this host has one.
    pub(super) fn check_cluster(&self, theirs: Option<&str>) -> Result<()> {
        let ours = self.cluster_identity();
        match (self.cluster().is_some(), theirs) {
            (false, None) => Ok(()),
            (false, Some(_)) => {
                Err(ApiError::conflict("the disk belongs to a cluster, and this host is not in a cluster")
                    .hint("use the same [cluster] in hob.toml on this host"))
            }
            (true, None) => {
                Err(ApiError::conflict("the disk belongs to no cluster, and this host is in a cluster")
                    .hint("use the same [cluster] in hob.toml on the other host"))
            }
            (true, Some(theirs)) if ours.as_deref() == Some(theirs) => Ok(()),
            (true, Some(_)) => Err(ApiError::conflict("the disk belongs to another cluster than this host")),
        }
    }

    /// Records in etcd that disks may have dirty data, before any data becomes dirty.
    async fn mark_dirty(&self) -> Result<()> {
        let Some(cluster) = self.cluster() else { return Ok(()) };
        let names: Vec<String> = {
            let inner = self.registry.inner();
            let writes_back = |disk: &&DiskEntry| {
                matches!(disk.phase, DiskPhase::Online(_))
                    && disk.cache().is_some_and(|spec| spec.mode == Mode::WriteBack)
            };
            inner.disks.values().filter(writes_back).map(|disk| disk.wanted.name.clone()).collect()
        };
        for name in names {
            self.pools.forget_copies_of_others(&name).await?;
            if cluster.stays_marked(&name).await == Some(false) {
                cluster.mark(&name).await.map_err(|why| {
                    failed!("cannot record in etcd that {name} may have dirty data on this host: {why}").hint(
                        "write-back starts only after etcd has this record; try again when etcd answers",
                    )
                })?;
            }
        }
        Ok(())
    }

    /// Records in etcd that a disk may have dirty data, before write-back continues after a
    /// cancelled migration. Retries without a time limit.
    pub(super) async fn mark_kept(&self, name: &str) -> Result<()> {
        let Some(cluster) = self.cluster().filter(|_| self.registry.owns(name)) else { return Ok(()) };
        let mut is_said = false;
        while let Err(why) = cluster.mark(name).await {
            self.registry.shard_of(name)?;
            if !std::mem::replace(&mut is_said, true) {
                tracing::warn!(
                    "disk {name}: the cache writes through until etcd records that the disk may \
                    have dirty data: {why}"
                );
            }
            tokio::time::sleep(RETRY_EVERY).await;
        }
        Ok(())
    }

    /// Records in etcd that a disk has no dirty data any more, so that other hosts may acquire it.
    /// `is_drained` returns true if a migration that holds the operation guard has drained the
    /// disk.
    pub(super) async fn unmark_if_clean(&self, name: &str, is_drained: impl Fn() -> bool) {
        let Some(cluster) = self.cluster() else { return };
        let writes_through = || self.registry.wish(name).is_ok_and(|(_, dirty)| !dirty);
        if !writes_through() || cluster.is_marked(name).await != Some(true) {
            return;
        }
        // The guard prevents a change of the cache's mode during this function. If a migration
        // holds the guard, it has drained the disk, and would record a return to write-back before
        // it made the change.
        let guard = self.registry.guard_disk(name, "looked at").ok();
        let is_clean = || writes_through() && (guard.is_some() || is_drained());
        let Ok((shard, id)) = self.registry.shard_of(name) else { return };
        if is_clean()
            && shard.stats(id).await.is_ok_and(|stats| stats.sectors_dirty == 0)
            && let Err(why) = cluster.unmark(name, is_clean).await
        {
            tracing::debug!("{name}: {why}");
        }
    }
}

impl SaveObserver for Ownership {
    fn before_save(&self) -> Pin<Box<dyn Future<Output = Result<()>> + Send + '_>> {
        Box::pin(self.mark_dirty())
    }
}

pub(super) fn refuse(error: TakeError) -> ApiError {
    match error {
        TakeError::OtherOwner { why, hint, .. } => ApiError::conflict(why).hint(hint),
        TakeError::Unknown(why) => ApiError::failed(why).hint("hob retries by itself"),
    }
}
