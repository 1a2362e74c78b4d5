//! Drains: starting, observing and stopping the transfer of a cache's dirty data to the backing.
//!
//! A drain holds the operation guard of its disk: until the drain ends, hob refuses other changes
//! of this disk. A drain continues when its caller has disconnected. A drain ends when the cache
//! has no dirty data, when a command stops the drain, or when the drain fails. If the drain was
//! stopped or failed, hob reports the reason. The amount of dirty data is read once a second. A
//! drain begins only when the backing answers and takes writes ([`waiting`]).

mod tasks;
mod waiting;

use std::collections::BTreeMap;
use std::time::Duration;

use hob_control::{Dirty, DiskChanged, DrainFor, Size, Verification};
use hob_engine::command::{CacheChange, CommandError, Copies, Mode, Vacate};
use hob_engine::stats::DiskStats;
use hob_engine::units::{DeviceId, DiskId, SECTOR_BYTES};
use tokio::time::Instant;
use tracing::Instrument as _;

use super::Pools;
use super::caches::no_cache;
use crate::api_error::{ApiError, Result, conflict};
use crate::background::spawn;
use crate::cache_settings::engine_config;
use crate::services::observe::STATS_MAX;
use crate::services::registry::{DRAINING, SHRINKING, is_own_work};
use crate::services::registry::{DiskEntry, DiskPhase};
use crate::shard_api::{ShardError, ShardHandle};
use waiting::{Modes, PendingDrain};

/// Interval between two reads of the amount of dirty data.
pub(in crate::services) const LOOK_EVERY: Duration = Duration::from_secs(1);

/// Maximum time that a command which shows a disk waits for the present amount of dirty data.
const SHOWN_MAX: Duration = Duration::from_millis(500);

/// If a drain ends within this time, the command reports that the drain is finished.
const SOON: Duration = Duration::from_millis(200);

/// Time without progress after which the backing is reported as stuck.
const STUCK_AFTER: Duration = Duration::from_secs(5);

/// Time without progress after which no rate and no remaining time are reported.
const STILL_AFTER: Duration = Duration::from_secs(3);

/// Name of the task that stops a drain, in the list of tasks.
const STOP_TASK: &str = "drain --stop";

/// Weight of the newest second in the transfer rate.
const NEWEST: f64 = 0.3;

/// The amount of a cache's dirty data when hob last read it, and the state of the cache's drain.
#[derive(Debug, Default)]
pub(in crate::services) struct Watch {
    seen: Option<Seen>,
    /// True while a query to the shard is outstanding.
    asking: bool,
    /// Reason why the latest drain ended early.
    ended: Option<String>,
    /// The drain for which a change of the disk waits.
    pending_drain: Option<PendingDrain>,
}

#[derive(Clone, Copy, Debug)]
struct Seen {
    at: Instant,
    dirty_bytes: u64,
    lost_bytes: u64,
    destaged_bytes: u64,
    errors: u64,
    draining: bool,
    /// Write mode in effect.
    mode: Mode,
    /// Transfer rate in bytes per second, as a moving average.
    rate: f64,
    /// Time at which the amount of destaged data increased last.
    moved: Instant,
    /// True if the latest write or flush of the backing failed, and dirty data waits for the next
    /// attempt.
    failing: bool,
    verification: Option<Verification>,
}

impl Pools {
    /// Starts a drain of dirty data to the backing, or continues a drain that is in progress. The
    /// list of tasks shows `operation`, which will follow the drain.
    pub(crate) async fn drain_for(&self, disk: String, operation: DrainFor) -> Result<DiskChanged> {
        let (service, what) = (self.clone(), operation.task());
        self.tasks.run(what, disk.clone(), async move { service.begin_drain(&disk, what).await }).await
    }

    /// Starts or continues a drain that no other operation follows.
    #[cfg(test)]
    pub(in crate::services) async fn drain(&self, disk: String) -> Result<DiskChanged> {
        self.drain_for(disk, DrainFor::Drain).await
    }

    /// Stops a drain.
    pub(crate) async fn drain_stop(&self, disk: String) -> Result<DiskChanged> {
        let service = self.clone();
        self.tasks.run(STOP_TASK, disk.clone(), async move { service.stop_drain(&disk).await }).await
    }

    /// Starts a drain as the task `what`.
    async fn begin_drain(&self, name: &str, what: &'static str) -> Result<DiskChanged> {
        {
            let inner = self.registry.inner();
            let disk = inner.disk(name)?;
            let spec = disk.cache().ok_or_else(|| no_cache(name))?;
            disk.shard()?;
            if disk.busy == Some(DRAINING) {
                drop(inner);
                return self.observe.disk_changed(name, vec!["the drain continues".to_owned()]);
            }
            if spec.journal.is_none() || !disk.has_cache {
                drop(inner);
                let note = "this cache can have no dirty data: the backing has all data";
                return self.observe.disk_changed(name, vec![note.to_owned()]);
            }
        }
        let guard = self.registry.guard_disk_for_command(name, DRAINING).await?;
        let (shard, id) = self.registry.shard_of(name)?;
        let (service, of) = (self.clone(), name.to_owned());
        let (task, began) = (self.tasks.begin(what, name.to_owned()), Instant::now());
        let drain = async move {
            let result = service.drain_while_answering(&of, &shard, id, None).await;
            service.look(&of, &shard, id).await;
            match &result {
                // The reply to the client already shows that the drain is finished.
                Ok(()) if began.elapsed() < SOON => task.forget(),
                Ok(()) => task.end(Ok(())),
                Err(ShardError::Command(CommandError::Stopped)) => task.end_cancelled(),
                Err(error) => task.end(Err(error.to_string())),
            }
            service.note_drained(&of, result);
            drop(guard);
        };
        let drain = spawn(drain.in_current_span());
        let is_done = tokio::time::timeout(SOON, drain).await.is_ok();
        if !is_done {
            let (shard, id) = self.registry.shard_of(name)?;
            self.look(name, &shard, id).await;
        }
        let waits = self
            .registry
            .inner()
            .disk(name)?
            .watch
            .waiting_reason()
            .map(|why| format!("the drain waits: {why}"));
        self.observe.disk_changed(name, waits.into_iter().collect())
    }

    async fn stop_drain(&self, name: &str) -> Result<DiskChanged> {
        let (shard, id) = self.registry.shard_of(name)?;
        self.registry.inner().disk(name)?.cache().ok_or_else(|| no_cache(name))?;
        let mut notes = Vec::new();
        self.note_stopped(name);
        match self.stop_drain_of(name, &shard, id).await {
            Ok(()) => {}
            Err(ShardError::Command(CommandError::NoCache | CommandError::NoJournal)) => {
                notes.push("there was no drain".to_owned());
            }
            Err(error) => return Err(error.into()),
        }
        self.look(name, &shard, id).await;
        self.observe.disk_changed(name, notes)
    }

    fn note_drained(&self, name: &str, result: Result<(), ShardError>) {
        let ended = match result {
            Ok(()) => {
                tracing::info!("disk {name}: drained; the backing has all data");
                None
            }
            Err(ShardError::Command(CommandError::Stopped)) => Some("the drain was stopped".to_owned()),
            Err(_) if self.tasks.is_closing() => Some("hob is ending".to_owned()),
            Err(error) => Some(error.to_string()),
        };
        if let Some(why) = &ended {
            tracing::warn!("disk {name}: its drain ended early: {why}");
        }
        if let Ok(disk) = self.registry.inner().disk_mut(name) {
            disk.watch.ended = ended;
        }
    }

    /// Switches the cache to write-through and drains it. The caller holds the disk's operation
    /// guard, and sets the write mode afterwards ([`Pools::tune`]). While the backing does not
    /// answer, writes of guests wait for the backing, or fail.
    pub(in crate::services) async fn clean(&self, name: &str, shard: &ShardHandle, id: DiskId) -> Result<()> {
        let Some(modes) = self.modes_of_drain(name)? else { return Ok(()) };
        let drained = match shard.change_cache(id, modes.through).await {
            Ok(_) => shard.change_cache(id, CacheChange::Drain).await.map(drop),
            Err(error) => Err(error),
        };
        self.cleaned(name, drained)
    }

    /// Waits until the backing answers and takes writes. Then switches the cache to write-through
    /// and drains it with [`Pools::clean`]. The cache keeps its write mode during the wait. After
    /// an error, the cache has the configured mode.
    pub(in crate::services) async fn clean_while_answering(
        &self,
        name: &str,
        shard: &ShardHandle,
        id: DiskId,
    ) -> Result<(), ApiError> {
        let Some(modes) = self.modes_of_drain(name)? else { return Ok(()) };
        let drained = self.drain_while_answering(name, shard, id, Some(&modes)).await;
        self.cleaned(name, drained)
    }

    /// Returns the changes of the write mode before a drain, and after a drain that did not
    /// complete. Returns `None` if no data can be dirty.
    fn modes_of_drain(&self, name: &str) -> Result<Option<Modes>, ApiError> {
        let inner = self.registry.inner();
        let disk = inner.disk(name)?;
        let spec = disk.cache().ok_or_else(|| no_cache(name))?;
        if !disk.has_cache || spec.journal.is_none() {
            return Ok(None);
        }
        let config = engine_config(spec, inner.pool(&spec.pool)?.segment_bytes)?;
        let tune = |mode| CacheChange::Tune(mode, config.destage, config.copies);
        Ok(Some(Modes { through: tune(Mode::WriteThrough), back: tune(config.mode) }))
    }

    /// Records the result of the drain that precedes a change. If the drain failed, returns the API
    /// error.
    fn cleaned(&self, name: &str, drained: Result<(), ShardError>) -> Result<(), ApiError> {
        match &drained {
            // The cache has lost all its segments, so no data can be dirty.
            Err(ShardError::Command(CommandError::NoCache)) => return Ok(()),
            result => self.note_drained(name, result.clone()),
        }
        drained.map_err(|error| match error {
            ShardError::Command(CommandError::Stopped) => {
                conflict!("the drain of {name} was stopped, so nothing was changed")
            }
            error => ApiError::from(error),
        })
    }

    /// Drains the segments that are to be released, while writes stay on flash. Waits while the
    /// backing does not answer, until an operator stops the drain. The caller holds the disk's
    /// operation guard.
    pub(in crate::services) async fn vacate(
        &self,
        name: &str,
        shard: &ShardHandle,
        id: DiskId,
        which: Vacate,
    ) -> Result<()> {
        let busy = {
            let mut inner = self.registry.inner();
            let disk = inner.disk_mut(name)?;
            let busy = disk.busy;
            // If the daemon itself began the operation that holds the guard, the command waits for
            // the end of this operation.
            if !busy.is_some_and(is_own_work) {
                disk.busy = Some(SHRINKING);
            }
            busy
        };
        let emptied = shard.change_cache(id, CacheChange::Vacate(which)).await;
        if let Ok(disk) = self.registry.inner().disk_mut(name) {
            disk.busy = busy;
        }
        match emptied {
            Ok(_) => Ok(()),
            Err(ShardError::Command(CommandError::Stopped)) => Err(conflict!(
                "the change of {name}'s cache was stopped before dirty data was on the backing, so nothing was changed"
            )),
            Err(error) => Err(error.into()),
        }
    }

    /// Queries the dirty data of every cache that can have dirty data.
    pub(in crate::services) fn look_at_dirty(&self) {
        let mut by_shard: Vec<(ShardHandle, Vec<(String, DiskId)>)> = Vec::new();
        for (name, disk) in &mut self.registry.inner().disks {
            let can_be_dirty = disk.has_cache && disk.cache().is_some_and(|spec| spec.journal.is_some());
            let DiskPhase::Online(shard) = &disk.phase else { continue };
            if !can_be_dirty || disk.watch.asking {
                continue;
            }
            let looked_at = (name.clone(), disk.id);
            match by_shard.iter_mut().find(|(other, _)| other.is_same(shard)) {
                Some((_, disks)) => disks.push(looked_at),
                None => by_shard.push((shard.clone(), vec![looked_at])),
            }
            disk.watch.asking = true;
        }
        for (shard, disks) in by_shard {
            let service = self.clone();
            spawn(async move { service.look_at_disks(&shard, disks).await });
        }
    }

    /// Reads the amount of dirty data of these disks from their shard, several disks at a time.
    /// Replicas that are complete are announced afterwards, because etcd may answer slowly.
    async fn look_at_disks(&self, shard: &ShardHandle, disks: Vec<(String, DiskId)>) {
        let mut doubled: BTreeMap<&str, DeviceId> = BTreeMap::new();
        for some in disks.chunks(STATS_MAX) {
            let peers: Vec<_> = some.iter().map(|(name, _)| self.peer_device_of(name)).collect();
            let ids = some.iter().map(|(_, id)| *id).collect();
            // A shard that does not answer is reported elsewhere.
            let Ok(all) = shard.stats_of(ids).await else { break };
            let mut inner = self.registry.inner();
            for (((name, id), peer), stats) in some.iter().zip(peers).zip(all) {
                let (Some(stats), Ok(disk)) = (stats, inner.disk_mut(name)) else { continue };
                if disk.id != *id {
                    continue;
                }
                disk.watch.note(&stats, Instant::now());
                doubled.extend(peer.filter(|_| stats.doubled).map(|peer| (name.as_str(), peer)));
            }
        }
        for (name, _) in &disks {
            if let Some(peer) = doubled.get(name.as_str()) {
                let (service, name, peer) = (self.clone(), name.clone(), *peer);
                spawn(async move {
                    service.say_doubled(&name, peer).await;
                    service.note_looked_at(&name);
                });
            } else {
                self.note_looked_at(name);
            }
        }
    }

    fn note_looked_at(&self, name: &str) {
        if let Ok(disk) = self.registry.inner().disk_mut(name) {
            disk.watch.asking = false;
        }
    }

    /// Updates the recorded amount of a disk's dirty data before a command shows the disk. The last
    /// regular update can be a second old. Does not wait longer than [`SHOWN_MAX`] for the shard,
    /// which may hang.
    pub(crate) async fn refresh_dirty(&self, name: &str) {
        let (shard, id) = {
            let inner = self.registry.inner();
            let Ok(disk) = inner.disk(name) else { return };
            let DiskPhase::Online(shard) = &disk.phase else { return };
            if !disk.has_cache {
                return;
            }
            (shard.clone(), disk.id)
        };
        let Ok(Ok(stats)) = tokio::time::timeout(SHOWN_MAX, shard.stats(id)).await else { return };
        if let Ok(disk) = self.registry.inner().disk_mut(name) {
            disk.watch.note(&stats, Instant::now());
        }
    }

    /// Reads the amount of one disk's dirty data from its shard, and updates rate and progress.
    pub(in crate::services) async fn look(&self, name: &str, shard: &ShardHandle, id: DiskId) {
        let peer = self.peer_device_of(name);
        let Ok(stats) = shard.stats(id).await else { return };
        if let Ok(disk) = self.registry.inner().disk_mut(name) {
            disk.watch.note(&stats, Instant::now());
        }
        if let Some(peer) = peer.filter(|_| stats.doubled) {
            self.say_doubled(name, peer).await;
        }
    }
}

impl Watch {
    /// Deletes the recorded amount of dirty data and the reason why the latest drain ended, because
    /// the cache was removed.
    pub(super) fn forget(&mut self) {
        (self.seen, self.ended) = (None, None);
    }

    fn note(&mut self, stats: &DiskStats, now: Instant) {
        let before = self.seen.filter(|seen| seen.destaged_bytes <= stats.destaged_bytes);
        let mut seen = Seen {
            at: now,
            dirty_bytes: stats.sectors_dirty * SECTOR_BYTES,
            lost_bytes: stats.sectors_lost * SECTOR_BYTES,
            destaged_bytes: stats.destaged_bytes,
            errors: stats.destage_errors,
            draining: stats.draining,
            mode: stats.mode,
            rate: 0.0,
            moved: now,
            failing: stats.destage_failing,
            verification: (stats.sectors_unverified > 0).then(|| Verification {
                left: Size(stats.sectors_unverified * SECTOR_BYTES),
                total: Size(stats.sectors_to_verify.max(stats.sectors_unverified) * SECTOR_BYTES),
            }),
        };
        if let Some(before) = before {
            let seconds = now.duration_since(before.at).as_secs_f64();
            let moved = stats.destaged_bytes - before.destaged_bytes;
            if seconds < 0.1 {
                // The time since the last reading is too short for computing a rate.
                seen =
                    Seen { at: before.at, destaged_bytes: before.destaged_bytes, rate: before.rate, ..seen };
            } else {
                let newest = moved as f64 / seconds;
                let first = before.rate == 0.0;
                seen.rate = if first { newest } else { NEWEST * newest + (1.0 - NEWEST) * before.rate };
                if seen.rate < 1.0 {
                    seen.rate = 0.0;
                }
            }
            if moved == 0 && seen.dirty_bytes > 0 {
                seen.moved = before.moved;
            }
        }
        self.seen = Some(seen);
    }

    /// Returns the transfer rate to the backing in bytes per second.
    pub(in crate::services) fn rate(&self) -> u64 {
        self.seen.map_or(0, |seen| seen.rate as u64)
    }

    /// Returns the reason why dirty data that should be written now does not reach the backing.
    pub(in crate::services) fn stuck(&self, draining: bool, now: Instant) -> Option<String> {
        let seen = self.seen?;
        let silence = now.duration_since(seen.moved);
        if seen.failing {
            Some(failed_writes(seen.errors))
        } else if (draining || seen.draining) && seen.dirty_bytes > 0 && silence >= STUCK_AFTER {
            Some(format!("the backing has completed no write for {} s", silence.as_secs()))
        } else {
            None
        }
    }

    /// Returns the write mode in effect, as last observed.
    pub(in crate::services) fn mode(&self) -> Option<Mode> {
        self.seen.map(|seen| seen.mode)
    }

    /// Returns true if a drain was in progress when last observed.
    pub(in crate::services) fn is_draining(&self) -> bool {
        self.seen.is_some_and(|seen| seen.draining)
    }

    fn view(&self, draining: bool, now: Instant) -> Dirty {
        let Some(seen) = self.seen else {
            let (size, lost, rate) = (Size(0), Size(0), Size(0));
            let why = self.waiting_reason().map(str::to_owned).or_else(|| self.ended.clone());
            return Dirty { size, lost, draining, rate, eta_seconds: None, why };
        };
        let draining = draining || seen.draining;
        // When the drain makes no progress, the moving average falls only slowly.
        let moves = self.waiting_reason().is_none() && now.duration_since(seen.moved) < STILL_AFTER;
        let rate = if moves { seen.rate } else { 0.0 };
        let eta = match seen.dirty_bytes {
            0 => Some(0),
            bytes if rate > 0.0 => Some((bytes as f64 / rate).ceil() as u64),
            _ => None,
        };
        let why = if seen.lost_bytes > 0 {
            Some(format!(
                "{} of the dirty data cannot be read from flash; 'hob cache discard-dirty' discards it",
                Size(seen.lost_bytes).human()
            ))
        } else if let Some(why) = self.waiting_reason() {
            Some(why.to_owned())
        } else if let Some(why) = self.stuck(draining, now) {
            Some(why)
        } else if draining {
            None
        } else {
            self.ended
                .as_ref()
                .filter(|_| seen.dirty_bytes > 0)
                .map(|why| format!("the last drain ended early: {why}"))
        };
        Dirty {
            size: Size(seen.dirty_bytes),
            lost: Size(seen.lost_bytes),
            draining,
            rate: Size(rate as u64),
            eta_seconds: eta,
            why,
        }
    }
}

impl DiskEntry {
    /// Returns the latest observed progress of verifying the cache against the backing.
    pub(in crate::services) fn verification(&self) -> Option<Verification> {
        self.watch.seen?.verification.filter(|_| matches!(self.phase, DiskPhase::Online(_)) && self.has_cache)
    }

    /// Returns the latest observed amount of dirty data, or `None` if the cache can have no dirty
    /// data or is not in service.
    pub(in crate::services) fn dirty(&self) -> Option<Dirty> {
        self.cache()?.journal?;
        // The dirty data of an offline disk is unknown.
        if !self.has_cache || !matches!(self.phase, DiskPhase::Online(_)) {
            return None;
        }
        let now = Instant::now();
        let mut dirty = self.watch.view(self.busy == Some(DRAINING), now);
        let silent = self.silent_backing();
        if silent.is_some() && dirty.size > Size(0) {
            (dirty.rate, dirty.eta_seconds) = (Size(0), None);
        }
        if self.pushes() {
            dirty.why = dirty.why.or(silent).or_else(|| self.watch.stuck(true, now));
        }
        Some(dirty)
    }

    /// Returns true if an operation in progress waits until dirty data of the disk is on the
    /// backing.
    pub(in crate::services) fn pushes(&self) -> bool {
        matches!(self.busy, Some(DRAINING | SHRINKING)) || self.watch.has_pending_drain()
    }

    /// Returns the write mode in effect and its reason, if it differs from the configured mode.
    pub(in crate::services) fn mode_in_effect(&self) -> Option<String> {
        let spec = self.cache().filter(|_| self.has_cache)?;
        let (wanted, copies) = (spec.mode, spec.copies);
        let mode = self.watch.mode().filter(|mode| wanted == Mode::WriteBack && *mode != wanted)?;
        if !matches!(self.phase, DiskPhase::Online(_)) {
            return None;
        }
        let until = match (self.watch.is_draining(), self.busy) {
            (true, _) => "until the drain ends",
            (false, Some(_)) => "until the change of the cache ends",
            (false, None) => until_complete(copies),
        };
        Some(format!("{mode} {until}"))
    }
}

/// Returns the report that writes of dirty data to the backing failed.
fn failed_writes(count: u64) -> String {
    let plural = if count == 1 { "" } else { "s" };
    format!("{count} write{plural} to the backing failed; hob retries them")
}

/// Returns the condition, as text for users, under which a cache uses write-back again. Before
/// that, the cache cannot keep dirty data safely.
fn until_complete(copies: Copies) -> &'static str {
    match copies {
        Copies::One => "until its journal is complete again",
        _ => "until its journal and its second copies are complete again",
    }
}

#[cfg(test)]
mod tests;
