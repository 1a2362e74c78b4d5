//! Replicas in the ownership records of etcd: which remote flash holds a complete replica of a
//! disk's dirty data (docs/decisions/0023).
//!
//! The basic rule: while an ownership record names a replica, every acknowledged write is in that
//! replica. So the record names a replica only after the replica is complete. The record stops
//! naming the replica before any write continues without it. If this host is in no cluster, the
//! functions of this file do nothing.

use super::Pools;
use crate::api_error::{Result, failed};
use crate::services::registry::DiskPhase;

impl Pools {
    /// Removes the replica from the ownership record of `disk`. An error means that the record may
    /// still name the replica. Then no write may continue without the replica, and the caller must
    /// try again.
    pub(in crate::services) async fn say_copy_is_gone(&self, disk: &str) -> Result<()> {
        let Some(cluster) = self.peers.cluster() else { return Ok(()) };
        // hob acknowledges no write of a disk that it does not serve. The next host that opens this
        // disk removes the replica from the record before it serves the disk.
        if !self.registry.inner().disk(disk).is_ok_and(|disk| matches!(disk.phase, DiskPhase::Online(_))) {
            return Ok(());
        }
        // This host also acknowledges no write of a disk that another host or no host owns, unless
        // this host has the disk's ownership lock.
        if !self.registry.owns(disk) && cluster.is_marked(disk).await.is_none() {
            return Ok(());
        }
        cluster.forget_copy(disk).await.map_err(|why| {
            failed!("cannot remove the replica of {disk} from etcd: {why}")
                .hint("writes wait until this succeeds; hob tries again")
        })
    }

    /// Records in etcd that member `host` has a replica of all dirty data of `disk` in this flash
    /// lease. The caller repeats this regularly, because the record starts without a replica when
    /// the disk is acquired or write-back starts. Returns false if there is no cluster, this host
    /// does not have the disk's ownership lock, or no data can be dirty.
    pub(in crate::services) async fn say_copy_is_current(
        &self,
        disk: &str,
        host: &str,
        loan: &str,
    ) -> Result<bool> {
        let Some(cluster) = self.peers.cluster() else { return Ok(false) };
        let Some(cache) = self.journal_owner(disk) else { return Ok(false) };
        cluster
            .note_copy(disk, host, loan, &cache)
            .await
            .map_err(|why| failed!("cannot record in etcd that {host} has a replica of {disk}: {why}"))
    }

    /// Removes a replica of an earlier cache from the disk's ownership record.
    pub(in crate::services) async fn forget_copies_of_others(&self, disk: &str) -> Result<()> {
        let Some(cluster) = self.peers.cluster() else { return Ok(()) };
        let copied = cluster.copied_cache(disk).await;
        if copied.is_some() && copied != self.journal_owner(disk) {
            self.say_copy_is_gone(disk).await?;
        }
        Ok(())
    }

    /// Returns the id of the disk's cache as used in ownership records.
    fn journal_owner(&self, disk: &str) -> Option<String> {
        let inner = self.registry.inner();
        let journal = inner.disk(disk).ok()?.cache()?.journal?;
        Some(journal.owner.to_string())
    }
}
