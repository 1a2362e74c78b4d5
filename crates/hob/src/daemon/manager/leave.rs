//! Ending so that the next program can go on. From the moment at which the end is certain nothing is changed any more.

use std::sync::Arc;
use std::time::Duration;

use hob_engine::units::DiskId;
use tokio::task::JoinSet;

use super::api_error::ApiError;
use super::flash::blocking;
use super::{DiskEntry, DiskPhase, ExportService, Manager};
use crate::daemon::shard_api::ShardHandle;
use crate::daemon::state::Closed;

/// How long closing a cache may take when the daemon ends.
const CLOSE_MAX: Duration = Duration::from_secs(30);

/// A drain at the end of the daemon is given up when nothing has reached the backing for that long.
const STUCK_MAX: Duration = Duration::from_secs(30);

/// How the end goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Ending {
    /// What is dirty stays in the caches that keep it.
    Plain,
    /// What is dirty goes to the backings first, as far as they take it.
    Drain,
    /// Another program goes on at once.
    HandOver,
}

impl Manager {
    /// Lets nothing be changed from now on. Refused while something is.
    pub(crate) fn begin_leaving(&self) -> Result<(), ApiError> {
        let mut inner = self.inner();
        // One that is offline is only tried again and again.
        let online = inner.disks.iter().filter(|(_, disk)| !matches!(disk.phase, DiskPhase::Offline(_)));
        let disks = online.filter_map(|(name, disk)| Some((name, disk.busy?)));
        let pools = inner.pools.iter().filter_map(|(name, pool)| Some((name, pool.busy?)));
        if let Some((name, doing)) = disks.chain(pools).next() {
            return Err(
                ApiError::conflict(format!("{name} is being {doing}")).hint("try again when that is done")
            );
        }
        inner.leaving = true;
        Ok(())
    }

    /// Makes what guests wrote durable on every backing. The next program does not know what was written and not flushed, so it could not
    /// report a loss.
    ///
    /// # Errors
    /// The name of a disk that could not be flushed, and why.
    pub(crate) async fn flush_all(&self) -> Result<(), String> {
        let disks: Vec<(String, ShardHandle, DiskId)> = {
            let inner = self.inner();
            let online = inner.disks.iter().filter(|(_, disk)| !disk.wanted.read_only);
            online
                .filter_map(|(name, disk)| match &disk.phase {
                    DiskPhase::Online(shard) => Some((name.clone(), shard.clone(), disk.id)),
                    _ => None,
                })
                .collect()
        };
        let mut flushes = JoinSet::new();
        for (name, shard, id) in disks {
            flushes.spawn(async move { (name, shard.flush(id).await) });
        }
        while let Some(flushed) = flushes.join_next().await {
            if let Ok((name, Err(error))) = flushed {
                return Err(format!("disk {name}: its backing could not be flushed: {error}"));
            }
        }
        Ok(())
    }

    /// Stays after all.
    pub(crate) fn stay(&self) {
        self.inner().leaving = false;
    }

    /// Brings every persistent cache to rest, and dirty bitmaps, and keeps what is needed to believe it next time. New clients are not
    /// let in any more.
    pub(crate) async fn close(self: &Arc<Self>, ending: Ending) {
        self.stop_migrations();
        let disks: Vec<String> = {
            let inner = self.inner();
            let is_open = |disk: &&DiskEntry| {
                matches!(disk.phase, DiskPhase::Online(_)) || ExportService::has_bitmaps(disk)
            };
            inner.disks.values().filter(is_open).map(|disk| disk.wanted.name.clone()).collect()
        };
        let mut closing = tokio::task::JoinSet::new();
        for name in disks {
            let manager = self.clone();
            closing.spawn(async move {
                if ending == Ending::Drain {
                    manager.drain_at_end(&name).await;
                }
                if ending != Ending::HandOver {
                    manager.exports.hide_file_at_end(&name).await;
                }
                if tokio::time::timeout(CLOSE_MAX, manager.close_disk(&name)).await.is_err() {
                    tracing::warn!(
                        "{name} was not closed within {} s; its cache will be recovered from its journal",
                        CLOSE_MAX.as_secs()
                    );
                }
            });
        }
        while closing.join_next().await.is_some() {}
        if ending != Ending::HandOver {
            self.exports.hide_files_at_end().await;
        }
        if let Err(error) = self.save().await {
            tracing::error!("{error}");
        }
    }

    async fn close_disk(self: &Arc<Self>, name: &str) {
        let Ok((shard, id)) = self.shard_of(name) else { return };
        self.exports.table().remove_disk(name);
        // There are no more later.
        let unverified = shard.stats(id).await.map_or(u64::MAX, |stats| stats.sectors_unverified);
        match self.exports.take_from_shard(name, &shard, id).await {
            Ok(gone) => {
                let evidence = match gone.witness {
                    Some(witness) if unverified == 0 => {
                        blocking(move || witness.evidence_at_end()).await.ok().flatten()
                    }
                    _ => None,
                };
                let mut inner = self.inner();
                let Ok(disk) = inner.disk_mut(name) else { return };
                disk.phase = DiskPhase::Offline("the daemon is ending".to_owned());
                let had_cache = disk.has_cache;
                let mark = gone
                    .changed
                    .map(|mark| Closed { size_bytes: mark.size_bytes, modified_ns: mark.modified_ns });
                if disk.recovering.is_some() {
                    // It was not there yet, and is on flash as it was.
                    return;
                }
                if let Some(journal) = disk.wanted.cache.as_mut().and_then(|spec| spec.journal.as_mut()) {
                    // Of a cache that was not in service, the evidence says nothing.
                    let evidence = evidence.filter(|_| had_cache);
                    (journal.closed, journal.evidence) = (mark, evidence);
                    tracing::info!("the cache of {name} is closed");
                }
            }
            Err(error) => tracing::warn!("{name} was not closed: {error}"),
        }
    }

    /// Drains a disk for as long as something moves.
    async fn drain_at_end(self: &Arc<Self>, name: &str) {
        let Ok((shard, id)) = self.shard_of(name) else { return };
        let clean = self.pools.clean(name, &shard, id);
        tokio::pin!(clean);
        let (mut moved, mut at) = (u64::MAX, tokio::time::Instant::now());
        loop {
            tokio::select! {
                result = &mut clean => {
                    match result {
                        Ok(()) => {
                            if let Ok(disk) = self.inner().disk_mut(name) {
                                disk.drained_at_end = true;
                            }
                        }
                        Err(error) => tracing::warn!("{name} keeps dirty data in its cache: {error}"),
                    }
                    return;
                }
                () = tokio::time::sleep(super::pools::LOOK_EVERY) => {}
            }
            let destaged = shard.stats(id).await.map_or(moved, |stats| stats.destaged_bytes);
            if destaged != moved {
                (moved, at) = (destaged, tokio::time::Instant::now());
            } else if at.elapsed() >= STUCK_MAX {
                tracing::warn!(
                    "the drain of {name} made no progress for {} s; its dirty data stays in the cache",
                    STUCK_MAX.as_secs()
                );
                return;
            }
        }
    }
}
