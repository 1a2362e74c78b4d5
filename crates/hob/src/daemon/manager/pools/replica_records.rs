//! What etcd is told of second copies of dirty data in the flash of other hosts, and of loans to them (docs/decisions/0023).
//!
//! The rule on which everything rests: while a title says that somebody has a second copy, nothing is acknowledged that the copy lacks. So it is said
//! after the copy is complete, and taken back, for certain, before anything goes on without it. Without a cluster nothing here does anything.

use super::Pools;
use crate::daemon::manager::api_error::ApiError;
use crate::daemon::manager::registry::DiskPhase;

impl Pools {
    /// The title of `disk` says no more that anybody else has a second copy: in effect when this returns. An error means that this is
    /// not certain; then nothing may go on without the copy yet, and it is to be asked again.
    pub(in crate::daemon::manager) async fn say_copy_is_gone(&self, disk: &str) -> Result<(), ApiError> {
        let Some(cluster) = self.peers.cluster() else { return Ok(()) };
        // Of a disk that is not served nothing is acknowledged, and whoever opens it takes the word away first.
        if !self.registry.inner().disk(disk).is_ok_and(|disk| matches!(disk.phase, DiskPhase::Online(_))) {
            return Ok(());
        }
        // Nor of one that is shown here and belongs to another host, or to none, unless it is held still, or already: whoever takes it takes
        // the word away too.
        if !self.registry.owns(disk) && cluster.is_marked(disk).await.is_none() {
            return Ok(());
        }
        cluster.forget_copy(disk).await.map_err(|why| {
            ApiError::failed(format!("etcd was not told that the second copy of {disk} is gone: {why}"))
                .hint("changes wait until etcd has the record; hob retries")
        })
    }

    /// The title of `disk` says from now on that member `host` has, in that loan, a second copy of everything dirty. To be said again and again
    /// while it is so: whenever a disk is taken or a cache begins to write back, the title begins without it. False where nothing is said: there
    /// is no cluster, the disk is not held, or nothing of it can be dirty.
    pub(in crate::daemon::manager) async fn say_copy_is_current(
        &self,
        disk: &str,
        host: &str,
        loan: &str,
    ) -> Result<bool, ApiError> {
        let Some(cluster) = self.peers.cluster() else { return Ok(false) };
        let Some(cache) = self.journal_owner(disk) else { return Ok(false) };
        cluster.note_copy(disk, host, loan, &cache).await.map_err(|why| {
            ApiError::failed(format!("etcd was not told that {host} has a second copy of {disk}: {why}"))
        })
    }

    /// A title that names the copy of a cache which the disk has no more says nothing of what it has now.
    pub(in crate::daemon::manager) async fn forget_copies_of_others(
        &self,
        disk: &str,
    ) -> Result<(), ApiError> {
        let Some(cluster) = self.peers.cluster() else { return Ok(()) };
        let copied = cluster.copied_cache(disk).await;
        if copied.is_some() && copied != self.journal_owner(disk) {
            self.say_copy_is_gone(disk).await?;
        }
        Ok(())
    }

    /// As a title names a cache.
    fn journal_owner(&self, disk: &str) -> Option<String> {
        let inner = self.registry.inner();
        let journal = inner.disk(disk).ok()?.cache()?.journal?;
        Some(journal.owner.to_string())
    }
}
