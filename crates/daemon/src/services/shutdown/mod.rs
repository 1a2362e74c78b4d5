//! The shutdown service: ends the daemon, or hands over to the next daemon process. From the start
//! of the shutdown on, no changes are accepted.

use std::sync::Arc;
use std::time::Duration;

use hob_engine::command::Mode;
use hob_engine::units::DiskId;
use tokio::task::JoinSet;

use super::disks::{Disks, has_no_dirty_data};
use super::ending::Ending;
use super::exports::ExportService;
use super::migration::Migrations;
use super::pools::Pools;
use super::registry::{DiskEntry, DiskPhase, OPENING, Registry};
use super::tasks::Tasks;
use crate::api_error::{Result, conflict};
use crate::shard_api::ShardHandle;

/// Maximum time to close a cache when the daemon ends.
const CLOSE_MAX: Duration = Duration::from_secs(30);

/// Time that a closing disk waits for a backing that does not answer, if all acknowledged writes
/// are in the cache. After this time without progress, a drain at the daemon's end is also
/// abandoned. A connected backing counts as one that does not answer after 5 s.
const SILENT_MAX: Duration = Duration::from_secs(2);

/// Time that a closing disk waits for a backing that does not answer, if acknowledged writes are
/// not in the cache. This time is longer than the 20 s for which requests of a closing disk wait
/// for a lost connection, and shorter than [`CLOSE_MAX`].
const HUNG_MAX: Duration = Duration::from_secs(25);

/// Interval between two checks whether the backing of a closing disk answers.
const CHECK_EVERY: Duration = Duration::from_millis(500);

/// Maximum time that a drain at the daemon's end waits for disks to be opened, and then for the
/// recovery of each cache.
const RECOVERY_MAX: Duration = Duration::from_secs(30);

/// Time without progress after which a drain at the daemon's end is abandoned although the backing
/// answers.
const STUCK_MAX: Duration = Duration::from_secs(30);

service! {
    /// The shutdown service; see the module.
    #[derive(Clone, Debug)]
    pub(crate) struct Shutdown {
        registry: Arc<Registry>,
        tasks: Tasks,
        exports: ExportService,
        pools: Pools,
        disks: Disks,
        migrations: Arc<Migrations>,
    } with {}
}

impl Shutdown {
    /// Stops accepting changes. Fails while a change is in progress.
    pub(crate) fn begin(&self) -> Result<()> {
        let mut inner = self.registry.inner();
        // The next process repeats an attempt to open an offline disk. A disk whose settings are being
        // changed is offline too for a moment.
        let is_retry =
            |disk: &DiskEntry| matches!(disk.phase, DiskPhase::Offline(_)) && disk.busy == Some(OPENING);
        let changing = inner.disks.iter().filter(|(_, disk)| !is_retry(disk));
        let doing = |disk: &DiskEntry| disk.busy.or(disk.changes_qos.then_some("given other shares"));
        let disks = changing.filter_map(|(name, disk)| Some((name, doing(disk)?)));
        let pools = inner.pools.iter().filter_map(|(name, pool)| Some((name, pool.busy?)));
        if let Some((name, doing)) = disks.chain(pools).next() {
            return Err(
                conflict!("{name} is being {doing}").hint("try again when the other operation is complete")
            );
        }
        inner.leaving = true;
        Ok(())
    }

    /// Flushes every backing that hob writes to and that can be flushed, and waits until no other
    /// backing is known to be silent. The next process could not open a disk whose backing does not
    /// answer, although the cache of this process serves the disk.
    ///
    /// # Errors
    /// Returns the name of a disk whose backing did not answer within `wait_max` or could not be
    /// flushed, with the reason.
    pub(crate) async fn check_backings(&self, wait_max: Duration) -> Result<(), String> {
        tokio::try_join!(self.until_none_silent(wait_max), self.flush_all(wait_max))?;
        Ok(())
    }

    /// Waits until no backing is known to be silent. Covers backings that are not flushed, because
    /// their disks are read-only or because they cannot be flushed. Such a backing gets no request
    /// here: it counts as silent only if requests of guests or the connection have shown this.
    async fn until_none_silent(&self, wait_max: Duration) -> Result<(), String> {
        let begun = tokio::time::Instant::now();
        loop {
            let silent = {
                let inner = self.registry.inner();
                inner.disks.iter().find_map(|(name, disk)| Some((name.clone(), disk.silent_backing()?)))
            };
            let Some((name, why)) = silent else { return Ok(()) };
            if begun.elapsed() >= wait_max {
                return Err(unanswered(&name, wait_max, Some(&why)));
            }
            tokio::time::sleep(CHECK_EVERY).await;
        }
    }

    /// Flushes every backing that hob writes to. The next process does not know which writes are
    /// not flushed, so it could not report their loss.
    ///
    /// # Errors
    /// Returns the name of a disk whose backing could not be flushed within `wait_max`, with the
    /// reason.
    pub(crate) async fn flush_all(&self, wait_max: Duration) -> Result<(), String> {
        let disks: Vec<(String, ShardHandle, DiskId)> = {
            let inner = self.registry.inner();
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
            flushes.spawn(async move { (name, tokio::time::timeout(wait_max, shard.flush(id)).await) });
        }
        while let Some(flushed) = flushes.join_next().await {
            match flushed {
                Ok((name, Ok(Err(error)))) => {
                    return Err(format!("disk {name}: its backing could not be flushed: {error}"));
                }
                Ok((name, Err(_))) => {
                    return Err(unanswered(&name, wait_max, self.silent_backing(&name).as_deref()));
                }
                Ok((_, Ok(Ok(())))) | Err(_) => {}
            }
        }
        Ok(())
    }

    /// Cancels the shutdown: changes are accepted again.
    pub(crate) fn cancel(&self) {
        self.registry.inner().leaving = false;
    }

    /// Closes every persistent cache and dirty bitmap, and saves the evidence that they are valid.
    /// The caller has stopped the listeners of NBD and of the API before, so they accept no new
    /// clients.
    pub(crate) async fn close(&self, ending: Ending) {
        self.migrations.stop();
        if ending == Ending::Drain {
            self.await_openings().await;
        }
        let disks: Vec<String> = {
            let inner = self.registry.inner();
            // The next daemon continues these drains.
            for name in inner.disks.keys() {
                let _was_draining = inner.stop_offline_drain(name);
            }
            let is_open = |disk: &&DiskEntry| {
                matches!(disk.phase, DiskPhase::Online(_)) || ExportService::has_bitmaps(disk)
            };
            inner.disks.values().filter(is_open).map(|disk| disk.wanted.name.clone()).collect()
        };
        let mut closing = tokio::task::JoinSet::new();
        for name in disks {
            let service = self.clone();
            closing.spawn(async move {
                if ending == Ending::Drain {
                    service.drain_at_end(&name).await;
                }
                if ending != Ending::HandOver {
                    service.exports.hide_file_at_end(&name).await;
                }
                if tokio::time::timeout(CLOSE_MAX, service.close_disk(&name)).await.is_err() {
                    tracing::warn!(
                        "disk {name}: not closed within {} s; its cache will be recovered from its journal",
                        CLOSE_MAX.as_secs()
                    );
                    // If the shard still closes the cache before this process ends, the crash log stays.
                    if let Ok(disk) = service.registry.inner().disk_mut(&name) {
                        disk.note_unanswered();
                    }
                }
            });
        }
        // A drain may take hours and changes the backings. So the times when the disks were served
        // are recorded meanwhile.
        tokio::select! {
            never = self.disks.clone().record_served_disks() => match never {},
            () = async { while closing.join_next().await.is_some() {} } => {}
        }
        if ending != Ending::HandOver {
            self.exports.hide_files_at_end().await;
        }
        self.pools.count_flash_writes().await;
        self.pools.keep_flash_writes().await;
        if let Err(error) = self.registry.save().await {
            tracing::error!("{error}");
        }
    }

    /// Waits for disks that are being opened, so that they can be drained. Logs a warning for each
    /// offline disk that may have dirty data and is not drained.
    async fn await_openings(&self) {
        let is_opening =
            |disk: &DiskEntry| matches!(disk.phase, DiskPhase::Offline(_)) && disk.busy.is_some();
        let opened = async {
            while self.registry.inner().disks.values().any(is_opening) {
                tokio::time::sleep(super::pools::LOOK_EVERY).await;
            }
        };
        let _ = tokio::time::timeout(RECOVERY_MAX, opened).await;
        for disk in self.registry.inner().disks.values() {
            if matches!(disk.phase, DiskPhase::Offline(_))
                && disk.cache().is_some_and(|spec| spec.mode == Mode::WriteBack && spec.journal.is_some())
            {
                tracing::warn!(
                    "disk {}: it is not drained, because it is offline; its cache may have dirty data",
                    disk.wanted.name
                );
            }
        }
    }

    async fn close_disk(&self, name: &str) {
        self.tasks.close();
        let Ok((shard, id)) = self.registry.shard_of(name) else { return };
        self.exports.table().remove_disk(name).await;
        let closing = self.exports.close_on_shard(name, &shard, id, "the daemon is shutting down");
        tokio::pin!(closing);
        let (begun, mut gives_up) = (tokio::time::Instant::now(), false);
        let closed = loop {
            tokio::select! {
                closed = &mut closing => break closed,
                () = tokio::time::sleep(CHECK_EVERY) => {}
            }
            let silent = self.silent_backing(name);
            let Some(why) = silent.filter(|_| begun.elapsed() >= SILENT_MAX) else { continue };
            if !std::mem::replace(&mut gives_up, true) {
                tracing::warn!(
                    "disk {name}: {why}; the daemon ends without it, but waits up to {} s for a flush of \
                     acknowledged writes that are not in the cache",
                    HUNG_MAX.as_secs()
                );
            }
            if begun.elapsed() < HUNG_MAX {
                shard.stop_waiting(id);
            } else {
                shard.abandon(id);
            }
        };
        let is_flushed = closed.as_ref().is_ok_and(|gone| !gone.is_unflushed);
        if is_flushed
            && let Ok(disk) = self.registry.inner().disk_mut(name)
            && disk.clean_at_end
        {
            disk.note_clean_cache();
        }
        if gives_up
            && !is_flushed
            && let Ok(disk) = self.registry.inner().disk_mut(name)
        {
            disk.note_unanswered();
        }
        if let Err(error) = closed {
            tracing::warn!("disk {name}: cannot close it: {error}");
        }
    }

    /// Returns why a disk's backing does not answer; `None` if it does.
    fn silent_backing(&self, name: &str) -> Option<String> {
        self.registry.inner().disk(name).ok().and_then(DiskEntry::silent_backing)
    }

    /// Waits for the end of the recovery of the disk's cache. Returns false if that takes too long,
    /// or if the backing does not answer.
    async fn is_recovered_in_time(&self, name: &str) -> bool {
        let begun = tokio::time::Instant::now();
        while self.registry.inner().disk(name).is_ok_and(|disk| disk.recovering.is_some()) {
            let is_silent = self.silent_backing(name).is_some();
            let wait_max = if is_silent { SILENT_MAX } else { RECOVERY_MAX };
            if begun.elapsed() >= wait_max {
                return false;
            }
            tokio::time::sleep(CHECK_EVERY).await;
        }
        true
    }

    /// Drains a disk as long as there is progress.
    async fn drain_at_end(&self, name: &str) {
        if !self.is_recovered_in_time(name).await {
            tracing::warn!("disk {name}: its cache was not recovered in time, and may have dirty data");
            return;
        }
        let Ok((shard, id)) = self.registry.shard_of(name) else { return };
        if self.registry.inner().disk(name).is_ok_and(|disk| disk.watch.has_pending_drain()) {
            // The other change would switch write-back on again when it ends.
            tracing::warn!("disk {name}: not drained, because another change waits for its drain");
            return;
        }
        let clean = self.pools.clean(name, &shard, id);
        tokio::pin!(clean);
        let (mut moved, mut at) = (u64::MAX, tokio::time::Instant::now());
        loop {
            tokio::select! {
                result = &mut clean => {
                    match result {
                        Ok(()) => {
                            let stats = shard.stats(id).await;
                            if let Ok(disk) = self.registry.inner().disk_mut(name) {
                                disk.drained_at_end = true;
                                disk.clean_at_end = stats.is_ok_and(|stats| has_no_dirty_data(&stats));
                            }
                        }
                        Err(error) => tracing::warn!("disk {name}: its cache still has dirty data: {error}"),
                    }
                    return;
                }
                () = tokio::time::sleep(CHECK_EVERY) => {}
            }
            let destaged = shard.stats(id).await.map_or(moved, |stats| stats.destaged_bytes);
            if destaged != moved {
                (moved, at) = (destaged, tokio::time::Instant::now());
                continue;
            }
            let silent = self.silent_backing(name);
            let wait_max = if silent.is_some() { SILENT_MAX } else { STUCK_MAX };
            if at.elapsed() >= wait_max {
                let stuck = || format!("its drain made no progress for {} s", STUCK_MAX.as_secs());
                let why = silent.unwrap_or_else(stuck);
                tracing::warn!("disk {name}: {why}; its cache still has dirty data");
                return;
            }
        }
    }
}

/// Returns the message about a backing that did not answer in time, and what is known about it.
fn unanswered(disk: &str, wait_max: Duration, why: Option<&str>) -> String {
    let seconds = wait_max.as_secs();
    let why = why.map_or_else(String::new, |why| format!(" ({why})"));
    format!(
        "disk {disk}: its backing did not answer within {seconds} s{why}; \
         check it with 'hob health', and try again when it answers"
    )
}
