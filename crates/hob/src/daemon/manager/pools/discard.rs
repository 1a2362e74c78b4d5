//! Dirty data that is given up whether the backing answers or not: the part that concerns the cache. What becomes of the disk is in
//! [`abandon`](crate::daemon::manager).

use std::time::Duration;

use hob_engine::command::{CacheChange, CommandError, Discard};
use hob_engine::units::DiskId;
use tokio::time::{Instant, sleep, timeout};

use super::Pools;
use crate::daemon::manager::api_error::ApiError;
use crate::daemon::manager::registry::{DRAINING, GUARD_EVERY, MIGRATING, OperationGuard};
use crate::daemon::shard_api::{ShardError, ShardHandle};

/// Requests have that long to end by themselves.
const GRACE: Duration = Duration::from_millis(1500);

/// Pause between two times at which what waits fails: a request may ask the backing again when its first I/O has failed.
const EXPIRE_EVERY: Duration = Duration::from_millis(250);

/// A change that takes longer than this does not end by failing requests: they cannot be called back.
const DISCARD_MAX: Duration = Duration::from_millis(3500);

/// Changes under way are waited for that long.
const GUARD_MAX: Duration = Duration::from_secs(4);

/// What is being done to a disk that is removed.
pub(in crate::daemon::manager) const REMOVING: &str = "removed";

impl Pools {
    /// Takes the operation guard of a disk for a change that gives its dirty data up. Ends what waits for the backing, which may be dead: a drain, other changes.
    pub(in crate::daemon::manager) async fn guard_to_discard(
        &self,
        name: &str,
        doing: &'static str,
    ) -> Result<OperationGuard, ApiError> {
        let began = Instant::now();
        loop {
            let error = match self.registry.guard_disk(name, doing) {
                Ok(guard) => return Ok(guard),
                Err(error) => error,
            };
            let (busy, online) = {
                let inner = self.registry.inner();
                let disk = inner.disk(name)?;
                (disk.busy, disk.shard().ok().map(|shard| (shard, disk.id)))
            };
            let waited = began.elapsed();
            let Some((shard, id)) = online else { return Err(error) };
            if busy == Some(MIGRATING) || waited >= GUARD_MAX {
                return Err(error);
            }
            if busy == Some(DRAINING) || waited >= GRACE {
                let _ = timeout(GUARD_EVERY, shard.change_cache(id, CacheChange::StopDrain)).await;
            }
            if waited >= GRACE {
                shard.expire_requests(id);
            }
            if waited >= 2 * GRACE && doing == REMOVING {
                // The other change may wait for requests that cannot be called back.
                self.registry.inner().abandoned.insert(id, name.to_owned());
                shard.abandon(id);
            }
            sleep(GUARD_EVERY).await;
        }
    }

    /// Gives up what is dirty in the cache of a disk that stays in use. False: requests cannot be called back, and nothing was changed yet.
    pub(in crate::daemon::manager) async fn discard_on_shard(
        &self,
        name: &str,
        (shard, id): (&ShardHandle, DiskId),
        discard: Discard,
    ) -> Result<bool, ShardError> {
        let change = shard.change_cache(id, CacheChange::DiscardDirty(discard));
        match timeout(DISCARD_MAX, expiring(name, shard, id, change)).await {
            Ok(Ok(_)) | Ok(Err(ShardError::Command(CommandError::NoCache))) => Ok(true),
            Ok(Err(error)) => Err(error),
            Err(_) => Ok(false),
        }
    }

    /// Takes the cache of a disk away whose dirty data was given up. Requests that wait for the backing fail.
    pub(in crate::daemon::manager) async fn take_discarded_cache(&self, name: &str) -> Result<(), ApiError> {
        let Ok((shard, id)) = self.registry.shard_of(name) else { return self.take_cache(name).await };
        expiring(name, &shard, id, self.take_cache(name)).await
    }
}

/// Waits for a change. Once it has taken longer than [`GRACE`], requests that wait for the disk's backing fail, again and again.
async fn expiring<T>(name: &str, shard: &ShardHandle, id: DiskId, change: impl Future<Output = T>) -> T {
    tokio::pin!(change);
    let mut wait = GRACE;
    loop {
        if let Ok(result) = timeout(wait, &mut change).await {
            return result;
        }
        if wait == GRACE {
            tracing::warn!(
                "{name}: requests that wait for the backing fail, because dirty data is discarded"
            );
        }
        wait = EXPIRE_EVERY;
        shard.expire_requests(id);
    }
}
