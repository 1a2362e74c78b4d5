//! Discards a cache's dirty data without help from the backing. The module `disks::abandon` does
//! the same for a disk that is removed.

use std::pin::Pin;
use std::time::Duration;

use hob_engine::command::{CacheChange, CommandError, Discard};
use hob_engine::units::DiskId;
use tokio::time::{Instant, sleep, timeout};

use super::Pools;
use crate::api_error::{ApiError, Result, conflict};
use crate::services::registry::{DRAINING, GUARD_EVERY, MIGRATING, OperationGuard};
use crate::shard_api::{ShardError, ShardHandle};

/// Time for which requests that wait for the backing may still complete, before hob fails these
/// requests.
const GRACE: Duration = Duration::from_millis(1500);

/// After [`GRACE`], interval at which hob fails all requests that wait for the backing. One pass is
/// not enough: a request may send another I/O to the backing after its first I/O has failed.
const EXPIRE_EVERY: Duration = Duration::from_millis(250);

/// Time after which a change counts as blocked by requests that cannot be cancelled.
const DISCARD_MAX: Duration = Duration::from_millis(3500);

/// Maximum time to wait for other changes of the disk to end.
const GUARD_MAX: Duration = Duration::from_secs(4);

/// A discard that waits for flash checks at this interval whether the flash answers again.
const LOOK_EVERY: Duration = Duration::from_secs(1);

/// Interval of the log lines while a discard waits for flash that does not answer.
const LOG_EVERY: Duration = Duration::from_secs(60);

/// Name of the operation that removes a disk.
pub(in crate::services) const REMOVING: &str = "removed";

impl Pools {
    /// Takes a disk's operation guard to discard its dirty data. Ends other operations that wait
    /// for the backing, such as a drain, because the backing may never answer.
    pub(in crate::services) async fn guard_to_discard(
        &self,
        name: &str,
        doing: &'static str,
    ) -> Result<OperationGuard> {
        let began = Instant::now();
        loop {
            let error = match self.registry.guard_disk(name, doing) {
                Ok(guard) => return Ok(guard),
                Err(error) => error,
            };
            let (busy, drains, online, silent) = {
                let inner = self.registry.inner();
                let disk = inner.disk(name)?;
                let drains = disk.busy == Some(DRAINING) || disk.watch.has_pending_drain();
                let online = disk.shard().ok().map(|shard| (shard, disk.id));
                (disk.busy, drains, online, inner.silent_flash(name))
            };
            let error = match (busy, &silent) {
                (Some(busy), Some(flash)) if busy != DRAINING && busy != MIGRATING => {
                    waits_for_flash(name, busy, flash)
                }
                _ => error,
            };
            let waited = began.elapsed();
            if waited < GUARD_MAX && self.registry.inner().stop_offline_drain(name) {
                sleep(GUARD_EVERY).await;
                continue;
            }
            let Some((shard, id)) = online else { return Err(error) };
            if busy == Some(MIGRATING) || waited >= GUARD_MAX {
                return Err(error);
            }
            if drains || waited >= GRACE {
                let _ = timeout(GUARD_EVERY, self.stop_drain_of(name, &shard, id)).await;
            }
            if waited >= GRACE {
                shard.expire_requests(id);
            }
            if waited >= 2 * GRACE && doing == REMOVING && silent.is_none() {
                // The operation that holds the guard may wait for requests to the backing that
                // cannot be cancelled.
                self.registry.inner().abandoned.insert(id, name.to_owned());
                shard.abandon(id);
            }
            sleep(GUARD_EVERY).await;
        }
    }

    /// Discards the dirty data of a disk that stays in use. Returns false, without a change, if
    /// requests to the backing cannot be cancelled. Waits while flash of the cache does not answer,
    /// because the shard can forget dirty data only with a write to the journal.
    pub(in crate::services) async fn discard_on_shard(
        &self,
        name: &str,
        (shard, id): (&ShardHandle, DiskId),
        discard: Discard,
    ) -> Result<bool, ShardError> {
        let change = shard.change_cache(id, CacheChange::DiscardDirty(discard));
        tokio::pin!(change);
        let done = loop {
            if let Ok(done) = timeout(DISCARD_MAX, expiring(name, shard, id, change.as_mut())).await {
                break done;
            }
            if self.registry.inner().silent_flash(name).is_none() {
                return Ok(false);
            }
            if let Some(done) = self.while_flash_is_silent(name, change.as_mut()).await {
                break done;
            }
        };
        match done {
            Ok(_) | Err(ShardError::Command(CommandError::NoCache)) => Ok(true),
            Err(error) => Err(error),
        }
    }

    /// Waits for the end of a change of a disk while flash of its cache does not answer. Returns
    /// `None` if the flash answers first.
    async fn while_flash_is_silent<T>(
        &self,
        name: &str,
        mut change: Pin<&mut impl Future<Output = T>>,
    ) -> Option<T> {
        let mut logged: Option<Instant> = None;
        loop {
            let flash = self.registry.inner().silent_flash(name)?;
            if logged.is_none_or(|logged| logged.elapsed() >= LOG_EVERY) {
                tracing::warn!(
                    "disk {name}: discarding its dirty data waits for {flash}, which does not answer"
                );
                logged = Some(Instant::now());
            }
            if let Ok(done) = timeout(LOOK_EVERY, change.as_mut()).await {
                return Some(done);
            }
        }
    }

    /// Removes a disk's cache whose dirty data the caller has discarded. Requests that wait for the
    /// backing fail.
    pub(in crate::services) async fn take_discarded_cache(&self, name: &str) -> Result<()> {
        let Ok((shard, id)) = self.registry.shard_of(name) else { return self.take_cache(name).await };
        expiring(name, &shard, id, self.take_cache(name)).await
    }
}

/// Returns the error for a command that hob refuses because another change of the disk waits for
/// flash.
fn waits_for_flash(name: &str, busy: &str, flash: &str) -> ApiError {
    conflict!("{name} is being {busy}, and its flash device {flash} does not answer").hint(
        "repeat the command when the device answers or fails; disconnect a device that never answers \
        again, or restart the daemon without it",
    )
}

/// Waits for the end of a change in which a disk's dirty data is discarded. After [`GRACE`],
/// repeatedly fails the requests that wait for the disk's backing.
async fn expiring<T>(name: &str, shard: &ShardHandle, id: DiskId, change: impl Future<Output = T>) -> T {
    tokio::pin!(change);
    let mut wait = GRACE;
    loop {
        if let Ok(result) = timeout(wait, &mut change).await {
            return result;
        }
        if wait == GRACE {
            tracing::warn!(
                "disk {name}: failing the requests that wait for its backing, because its dirty data is being discarded"
            );
        }
        wait = EXPIRE_EVERY;
        shard.expire_requests(id);
    }
}
