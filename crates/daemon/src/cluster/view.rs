//! The view of the cluster for operators.

use std::sync::Arc;

use hob_control::etcd::EtcdError;
use hob_control::{Cluster as View, ClusterDisk, ClusterDiskState, ClusterHost, ClusterState};
use hob_engine::cluster::{Member, OwnershipRecord};
use tokio::sync::Mutex as AsyncMutex;

use super::{Cluster, DiskMembership, LIST_MAX, lock};
use crate::lease_clock::now;

impl Cluster {
    /// Returns this host's state as a member.
    pub(crate) fn view(&self) -> View {
        let membership = self.membership.borrow().clone();
        let left_ns = membership.as_ref().map_or(0, |membership| membership.clock.left_ns(now()));
        let held = |place: &Arc<AsyncMutex<DiskMembership>>| {
            // A disk in use by another task is counted next time.
            place.try_lock().is_ok_and(|place| place.title.is_some())
        };
        View {
            state: match (&membership, left_ns) {
                (None, _) => ClusterState::Joining,
                (Some(_), 0) => ClusterState::Suspended,
                _ => ClusterState::Member,
            },
            host: self.me.name.clone(),
            id: self.me.id.clone(),
            etcd: self.etcd.endpoints().iter().map(ToString::to_string).collect(),
            prefix: self.config.prefix.clone(),
            lease_seconds: self.config.lease_seconds,
            left_ms: left_ns / 1_000_000,
            disks_held: lock(&self.places).values().filter(|place| held(place)).count() as u64,
            why: self.keeping.trouble(),
        }
    }

    /// Returns all members by name.
    pub(crate) async fn hosts(&self) -> Result<Vec<ClusterHost>, EtcdError> {
        let mut hosts = self.names.hosts(&self.etcd, LIST_MAX).await?;
        for (_, _, by) in self.names.disks(&self.etcd, LIST_MAX).await? {
            let by = by.and_then(|by| hosts.iter_mut().find(|host| host.id == by.id));
            by.into_iter().for_each(|host| host.disks += 1);
        }
        Ok(hosts)
    }

    /// Returns all disks that have or had an owner, by name.
    pub(crate) async fn disks(&self) -> Result<Vec<ClusterDisk>, EtcdError> {
        let disk = |(name, title, by): (String, OwnershipRecord, Option<Member>)| ClusterDisk {
            name,
            state: match (&by, title.taken) {
                (Some(by), _) if title.adopts.is_some() || by.id != title.member.id => {
                    ClusterDiskState::Adopted
                }
                (Some(_), _) => ClusterDiskState::Held,
                (None, false) => ClusterDiskState::Free,
                (None, true) => ClusterDiskState::Vanished,
            },
            copy: title.copy.map(|copy| copy.member.name),
            host: by.unwrap_or(title.member).name,
            generation: title.generation,
            dirty: title.dirty,
        };
        Ok(self.names.disks(&self.etcd, LIST_MAX).await?.into_iter().map(disk).collect())
    }
}
