//! Recovery of a persistent cache after a restart: reading its journal, comparing it with the
//! backing, and using, emptying or refusing the cache.
//!
//! During recovery the disk is offline, or is already served ([`recovering`](super::recovering)). A
//! refused cache stays unchanged until an operator decides ([`fencing`](super::fencing)).

use std::sync::{Arc, Mutex};
use std::time::Duration;

use hob_control::Size;
use hob_engine::command::{CacheChange, DataSegment, Enable, Mode, NewRing};
use hob_engine::journal::{Plan, Recovered};
use hob_engine::preset::Verify;
use hob_engine::regions::Regions;
use hob_engine::units::SECTOR_BYTES;
use hob_storage::pool::OwnerId;
use hob_storage::pool::recovery::{Found, RecoveredPool};
use tokio::sync::oneshot;
use tokio::time::Instant;

use super::Disks;
use super::comparison::{Mismatch, Source, changed_since, compare, same_backing};
use super::fencing::{Changed, Same, Verdict};
use super::flash_content::{Content, Decision, Empty, Expected, Lack, judge as judge_content};
use super::last_served::LaterChange;
use super::recovery_memory::Reservation;
use crate::api_error::{ApiError, Result, conflict};
use crate::cache_settings::engine_config;
use crate::hardware::BackingInfo;
use crate::host_memory::HostMemory;
use crate::services::flash::blocking;
use crate::services::pools::{CacheMemory, Restructure, places};
use crate::services::registry::{DeviceEntry, DiskPhase};
use crate::state::{BootId, CacheSpec, JournalSpec};
use crate::watchdog::contained;

/// Minimum time before a refused cache is read again.
pub(super) const RETRY_MIN: Duration = Duration::from_secs(5);

/// The wait before hob reads a refused cache again, as a multiple of the time that the last reading
/// took.
const RETRY_TIMES: u32 = 20;

/// A recovered cache that passed all checks.
pub(in crate::services) struct Kept {
    pub(super) recovered: Box<Recovered>,
    /// Highest number of a journal ring of the cache when the recovery started.
    pub(super) upto: u32,
    /// Data segments of the cache with the shards' device ids, in the order of the frame numbers.
    data: Vec<DataSegment>,
    /// The same data segments with the pool's device ids.
    pub(super) in_pool: Vec<DataSegment>,
    /// The reserved memory for the recovery and for the index of the cache.
    memory: Reservation,
}

/// The recovery of a cache, while its journal is being read.
pub(in crate::services) struct Reading {
    pub(super) spec: CacheSpec,
    /// Maximum number of data segments of the cache.
    pub(super) data_segments: u64,
    journal: JournalSpec,
    began: Instant,
    /// Reason why all data of the cache is invalid: another host or program has used the disk since
    /// this host served it last. `None` if only this host has used the disk.
    pub(in crate::services) foreign: Option<String>,
    /// Name of the host that has written the cache's dirty data from its replica to the backing;
    /// `None` if no host has.
    pub(in crate::services) outdated_by: Option<String>,
    /// The change of the backing after hob last served the disk, if there was one.
    pub(super) later: Option<LaterChange>,
    /// Devices of the pool that are missing.
    missing: Vec<String>,
    /// The reserved memory for the recovery and for the index of the cache.
    memory: Reservation,
    /// Highest number of a journal ring of the cache when the recovery started.
    pub(in crate::services) upto: u32,
    /// Receives the result of the first pass over the journal.
    pub(in crate::services) surveyed: oneshot::Receiver<Surveyed>,
    found: oneshot::Receiver<Result<Found>>,
}

/// Result of the first pass over a journal.
pub(in crate::services) struct Surveyed {
    identity: [u8; 32],
    disk_bytes: u64,
    clean: bool,
    ring: u32,
    is_logged: bool,
    /// Regions that may have dirty data. Some of them may have none.
    pub(in crate::services) doubtful: Regions,
}

impl Reading {
    /// Returns true if flash may hold data that the backing lacks. If flash has a newer journal
    /// ring than the saved state names, the state is older than flash. The mode in the state then
    /// proves nothing.
    pub(in crate::services) fn may_be_dirty(&self) -> bool {
        let is_older = is_newer_than_state(self.upto, self.journal);
        self.outdated_by.is_none() && (is_older || allows_dirty(&self.spec, self.journal))
    }

    /// Returns true if all devices are present and the cache has a journal.
    pub(in crate::services) fn is_complete(&self) -> bool {
        self.missing.is_empty() && self.journal.ring > 0
    }

    /// Returns true if the cache belongs to this backing, the backing is unchanged, and no
    /// acknowledged write may be lost, according to the first pass.
    pub(in crate::services) fn fits(&self, surveyed: &Surveyed, info: &BackingInfo) -> bool {
        let is_unchanged = match changed_since(surveyed.clean, self.journal, info, self.later) {
            Changed::Yes => false,
            Changed::Later => self.spec.verify == Verify::Trust,
            Changed::No | Changed::Unknown => true,
        };
        is_unchanged
            && self.foreign.is_none()
            && !is_newer_than_state(surveyed.ring, self.journal)
            && (surveyed.is_logged || !expects_crash_log(self.journal, surveyed.ring, surveyed.clean))
            && same_backing(info, surveyed.disk_bytes, &surveyed.identity) != Same::No
    }
}

impl Disks {
    /// Starts to read the journal of a disk's persistent cache.
    pub(in crate::services) async fn begin_recovery(&self, name: &str, spec: &CacheSpec) -> Result<Reading> {
        let journal = spec.journal.ok_or_else(|| ApiError::failed("its cache has no journal"))?;
        let began = Instant::now();
        let (flash, missing, data_segments, memory) = {
            let inner = self.registry.inner();
            let entry = inner.pool(&spec.pool)?;
            let owned = entry.owners.iter().find(|(owner, _)| owner.0 == journal.owner.0);
            let most = spec.size.bytes().div_ceil(entry.segment_bytes);
            // The segments of an owner include its journal.
            let segments = owned.map_or(0, |(_, segments)| *segments).min(most);
            let needs = CacheMemory::new(spec, segments, entry.segment_bytes);
            let memory = self.recovery_memory.reserve(HostMemory::look(), needs);
            let memory = memory.map_err(|error| no_memory(name, &error))?;
            let missing = entry.devices.iter().filter(|device| device.ids.is_none());
            let missing: Vec<String> = missing.map(|device| device.path.display().to_string()).collect();
            (entry.flash.clone(), missing, segments, memory)
        };
        let reader = Arc::new(());
        self.registry.inner().disk_mut(name)?.journal_reader = Arc::downgrade(&reader);
        let (first, surveyed) = oneshot::channel();
        let (both, found) = oneshot::channel();
        let upto = match flash.recovery(OwnerId(journal.owner.0)).await {
            Ok((recovery, upto)) => {
                let (service, of) = (self.clone(), name.to_owned());
                let report = move |done: u64, all: u64| service.note_recovery(&of, done, all);
                let mut first = Some(first);
                let tell = move |plan: &Plan| {
                    let surveyed = Surveyed {
                        identity: plan.identity,
                        disk_bytes: plan.disk_bytes,
                        clean: plan.clean,
                        ring: plan.ring,
                        is_logged: plan.is_logged,
                        doubtful: plan.doubtful.clone(),
                    };
                    first.take().map(|first| first.send(surveyed));
                };
                tokio::task::spawn_blocking(move || {
                    let found = contained(|| recovery.run(report, tell));
                    drop(reader);
                    // The caller may have stopped waiting.
                    let _ = both.send(found.map_err(|error| ApiError::failed(error.to_string())));
                });
                upto
            }
            Err(error) => {
                let _ = both.send(Err(error));
                0
            }
        };
        Ok(Reading {
            spec: spec.clone(),
            data_segments,
            journal,
            began,
            foreign: journal.foreign.then(|| "another program or host has used the disk".to_owned()),
            outdated_by: None,
            later: None,
            missing,
            memory,
            upto,
            surveyed,
            found,
        })
    }

    /// Reads a disk's persistent cache, compares it with the backing, and decides whether the cache
    /// may be used.
    pub(in crate::services) async fn recover(
        &self,
        name: &str,
        reading: Reading,
        source: Source,
    ) -> Result<(Source, Option<Kept>, Vec<String>)> {
        let began = reading.began;
        let result = self.recover_now(name, reading, source).await;
        if let Err(error) = &result {
            tracing::debug!("{name}: {error}");
            let pause = (began.elapsed() * RETRY_TIMES).max(RETRY_MIN);
            self.registry.inner().disk_mut(name)?.retry_after = Some(Instant::now() + pause);
        }
        result
    }

    async fn recover_now(
        &self,
        name: &str,
        reading: Reading,
        source: Source,
    ) -> Result<(Source, Option<Kept>, Vec<String>)> {
        let may_be_dirty = reading.may_be_dirty();
        let Reading {
            spec,
            journal,
            began,
            foreign,
            outdated_by,
            later,
            mut missing,
            memory,
            upto,
            found,
            ..
        } = reading;
        let found =
            match found.await.unwrap_or_else(|_| Err(ApiError::failed("its recovery ended unexpectedly"))) {
                Ok(found) => found,
                Err(_) if may_be_dirty && !missing.is_empty() && self.has_no_device(&spec.pool) => {
                    return Err(refused_without_devices(&spec.pool, &missing));
                }
                Err(error) if may_be_dirty && !self.is_given_up(&spec, journal) => {
                    return Err(refused(name, &format!("its cache cannot be read: {}", error.problem.error)));
                }
                Err(error) => {
                    self.pools.forget_owner(&spec).await;
                    let note = format!("its cache cannot be read ({}) and starts empty", error.problem.error);
                    return Ok((source, None, vec![note]));
                }
            };
        missing.extend(self.unread_devices(&spec.pool, &found));
        let expected = Expected {
            journal,
            may_be_dirty,
            was_write_back: allows_dirty(&spec, journal),
            lacks_device: !missing.is_empty(),
        };
        let decision = judge_content(&expected, Content::of(&found));
        let (recovered, remains) = match (decision, found) {
            (Decision::Use, Found::Recovered(recovered, remains)) => (recovered, remains),
            (Decision::Refuse(lack), found) => {
                return Err(refused_content(name, &spec.pool, lack, &missing, &damage_of(&found)));
            }
            (Decision::StartEmpty(empty), found) => {
                let note = self.start_empty(name, &spec, empty, &damage_of(&found)).await?;
                return Ok((source, None, note.into_iter().collect()));
            }
            (Decision::Use, _) => unreachable!("only a journal is used"),
        };
        let lacks_device = !missing.is_empty();
        let mut recovery = Recovery {
            spec,
            journal,
            may_be_dirty,
            lacks_device,
            outdated_by,
            foreign,
            later,
            began,
            memory,
            upto,
            remains,
            notes: Vec::new(),
        };
        let recovered = recovery.adjust(recovered).await?;
        self.compare_and_use(name, recovery, recovered, source).await
    }

    /// Compares a valid cache with the backing, and decides whether the cache may be used.
    async fn compare_and_use(
        &self,
        name: &str,
        recovery: Recovery,
        recovered: Box<Recovered>,
        source: Source,
    ) -> Result<(Source, Option<Kept>, Vec<String>)> {
        let Recovery {
            spec,
            journal,
            may_be_dirty,
            foreign,
            later,
            began,
            memory,
            upto,
            remains,
            mut notes,
            ..
        } = recovery;
        let known_bytes = recovered.summary.disk_bytes;
        let (source, mut recovered, verdict, Mismatch { why, can_be_trusted }) =
            compare(source, recovered, journal, spec.verify, foreign, later).await?;
        let summary = recovered.summary;
        if summary.disk_bytes > known_bytes {
            let (before, now) = (Size(known_bytes), Size(summary.disk_bytes));
            notes.push(format!("its backing had {before} when its cache was in use, and has {now} now"));
        }
        tracing::info!(
            "the cache of {name} was recovered in {} ms: {} of data, {} of it dirty, {}",
            began.elapsed().as_millis(),
            bytes(summary.sectors_valid),
            bytes(summary.sectors_dirty),
            if summary.clean { "closed cleanly" } else { "not closed cleanly" }
        );
        self.registry.inner().disk_mut(name)?.quality.recovered(summary.clean);
        let is_logged = summary.is_logged || !expects_crash_log(journal, summary.ring, summary.clean);
        if may_be_dirty && !is_logged && verdict != Verdict::Refuse {
            notes.push(self.note_lost_records(name).await?);
        }
        match verdict {
            Verdict::Refuse => {
                let why = format!("{why}, and {} of its cache are dirty", bytes(summary.sectors_dirty));
                return Err(if can_be_trusted { refused_later(name, &why) } else { refused(name, &why) });
            }
            Verdict::Empty => {
                self.exports.all_is_changed(name, &why).await?;
                self.pools.forget_owner(&spec).await;
                notes.push(format!("{why}; its cache starts empty"));
                return Ok((source, None, notes));
            }
            Verdict::Verify => {
                recovered = changed(recovered, Recovered::distrust_clean).await?;
                tracing::info!(
                    "the cache of {name}: it is unknown whether the backing changed; {} are \
                    compared with the backing before they are served",
                    bytes(recovered.sectors_unverified())
                );
            }
            Verdict::Believe => {}
        }
        let inner = self.registry.inner();
        let entry = inner.pool(&spec.pool)?;
        let on_shards = |segment: DataSegment| {
            let place = entry.on_shards(segment.place)?;
            Some(DataSegment { place, ..segment })
        };
        let in_pool = remains.data;
        let data: Option<Vec<_>> = in_pool.iter().copied().map(on_shards).collect();
        let data = data.ok_or_else(|| ApiError::failed("a device of the pool went offline again"))?;
        Ok((source, Some(Kept { recovered, upto, data, in_pool, memory }), notes))
    }

    /// Returns true if an operator removed the last device of the cache's pool, and so the cache.
    fn is_given_up(&self, spec: &CacheSpec, journal: JournalSpec) -> bool {
        journal.ended && self.registry.inner().pool(&spec.pool).is_ok_and(|entry| entry.devices.is_empty())
    }

    fn has_no_device(&self, pool: &str) -> bool {
        let inner = self.registry.inner();
        inner.pool(pool).is_ok_and(|entry| entry.devices.iter().all(|device| device.ids.is_none()))
    }

    /// Returns the devices that failed during the recovery, which were read as if they were empty.
    fn unread_devices(&self, pool: &str, found: &Found) -> Vec<String> {
        let unread = &found.remains().unread;
        let inner = self.registry.inner();
        let Ok(entry) = inner.pool(pool) else { return Vec::new() };
        let is_unread = |device: &&DeviceEntry| device.ids.is_some_and(|ids| unread.contains(&ids.in_pool));
        entry.devices.iter().filter(is_unread).map(|device| device.path.display().to_string()).collect()
    }

    /// Discards a cache whose data cannot or need not be used, so that it starts empty. Returns a
    /// note for the operator.
    async fn start_empty(
        &self,
        name: &str,
        spec: &CacheSpec,
        empty: Empty,
        damage: &str,
    ) -> Result<Option<String>> {
        if empty == Empty::NoData {
            self.exports.all_is_changed(name, "no data of its cache could be recovered").await?;
        }
        self.pools.forget_owner(spec).await;
        Ok(match empty {
            Empty::IsNew => None,
            Empty::NoData => {
                Some("no data of its cache could be recovered, and the cache starts empty".into())
            }
            Empty::Outdated => {
                Some("flash has only an outdated journal of its cache, which starts empty".into())
            }
            Empty::Damaged => {
                Some(format!("the journal of its cache is damaged ({damage}); the cache starts empty"))
            }
        })
    }

    fn note_recovery(&self, name: &str, done: u64, all: u64) {
        let percent = (u128::from(done) * 100).checked_div(u128::from(all)).unwrap_or(0);
        let reason = format!("it is being recovered, {percent} % of its journal is read");
        let mut inner = self.registry.inner();
        let Ok(disk) = inner.disk_mut(name) else { return };
        match &mut disk.phase {
            DiskPhase::Online(_) if disk.recovering.is_some() => disk.cache_reason = Some(reason),
            DiskPhase::Offline(known) => *known = format!("its cache is not available yet: {reason}"),
            _ => {}
        }
    }

    /// Gives the recovered cache to its disk, which is already on a shard. The caller holds the
    /// operation guard of the disk.
    pub(in crate::services) async fn enable_kept(&self, name: &str, kept: Kept) -> Result<(), Restructure> {
        let Kept { recovered, upto, data, in_pool: _, memory } = kept;
        let (was_block_bytes, ring) = (recovered.summary.block_bytes, recovered.summary.ring);
        let is_verified = recovered.sectors_unverified() == 0;
        let known = self.registry.inner().disk(name)?.cache().and_then(|spec| spec.journal);
        let (spec, config, flash) = {
            let mut inner = self.registry.inner();
            let (segment_bytes, flash) = {
                let spec = inner.disk(name)?.cache().ok_or_else(|| crate::services::pools::no_cache(name))?;
                let pool = inner.pool(&spec.pool)?;
                (pool.segment_bytes, pool.flash.clone())
            };
            let disk = inner.disk_mut(name)?;
            let Some(spec) = disk.wanted.cache.as_mut() else { return Ok(()) };
            if let Some(journal) = &mut spec.journal {
                // The backing changes from now on, so the recorded state of the closed cache is not
                // valid any more. The state is saved together with the number of the new ring.
                journal.closed = None;
                // The number of an unfinished ring, which is freed, must not be used again.
                journal.ring = journal.ring.max(upto);
                if !is_verified {
                    journal.evidence = None;
                }
            }
            (spec.clone(), engine_config(spec, segment_bytes)?, flash)
        };
        // Only one cache of a pool makes its new ring at a time, so that free space for one ring is
        // enough.
        let _turn = self.pools.turn(&spec.pool).await;
        // A start that was interrupted left an unfinished ring. The pool may have no space for
        // another one.
        if let Some(journal) = spec.journal {
            flash.free_rings_besides(OwnerId(journal.owner.0), ring).await?;
        }
        // The cache starts with the settings that it had when its journal was written. Settings
        // that were changed later are applied afterwards.
        let as_it_was = hob_engine::command::CacheConfig { block_bytes: was_block_bytes, ..config };
        let (segments, recovered) = (data.clone(), Mutex::new(Some(*recovered)));
        let enable = |ring: &Option<NewRing>| {
            CacheChange::Enable(Box::new(Enable {
                config: as_it_was,
                segments: segments.clone(),
                journal: ring.clone(),
                recovered: recovered.lock().ok().and_then(|mut recovered| recovered.take()),
            }))
        };
        let enabled = self.pools.restructure(name, data.len() as u64, enable).await;
        if let (Err(Restructure::Refused(_)), Some(known)) = (&enabled, known) {
            // The shard was not asked, so the backing is still in the recorded state.
            if let Some(spec) = self.registry.inner().disk_mut(name)?.wanted.cache.as_mut() {
                let journals = spec.journal.iter_mut();
                journals.for_each(|it| (it.closed, it.evidence) = (known.closed, known.evidence));
            }
            self.registry.save_first().await?;
        }
        enabled?;
        memory.keep_index();
        {
            let mut inner = self.registry.inner();
            let disk = inner.disk_mut(name)?;
            let (apart, here): (Vec<DataSegment>, Vec<DataSegment>) =
                data.iter().copied().partition(|segment| segment.seconds_only);
            (disk.held, disk.apart) = (places(&here), places(&apart));
            disk.has_cache = true;
            disk.retry_after = None;
            inner.set_shared_size(name, here.len() as u64);
        }
        self.release_leftovers(name, &spec).await;
        if as_it_was.block_bytes != config.block_bytes {
            self.pools.configure(name).await?;
        }
        Ok(())
    }

    /// Frees unused segments of a cache: old rings, and leftovers of changes that a crash
    /// interrupted.
    async fn release_leftovers(&self, name: &str, spec: &CacheSpec) {
        let Some(journal) = spec.journal else { return };
        let Ok(flash) = self.registry.inner().pool(&spec.pool).map(|entry| entry.flash.clone()) else {
            return;
        };
        let leftovers = match flash.segments_of(OwnerId(journal.owner.0)).await {
            Ok(all) => {
                let inner = self.registry.inner();
                let (Ok(entry), Ok(disk)) = (inner.pool(&spec.pool), inner.disk(name)) else { return };
                let is_used = |segment: &hob_engine::command::Segment| {
                    [&disk.held, &disk.apart, &disk.ring].iter().any(|list| list.contains(segment))
                };
                all.into_iter()
                    .filter_map(|segment| entry.on_shards(segment))
                    .filter(|s| !is_used(s))
                    .collect::<Vec<_>>()
            }
            Err(error) => return tracing::warn!("pool {}: {error}", spec.pool),
        };
        self.registry.give_back(&spec.pool, &leftovers).await;
    }
}

/// A cache with a valid journal, before it is compared with the backing.
struct Recovery {
    spec: CacheSpec,
    journal: JournalSpec,
    may_be_dirty: bool,
    /// True if a device of the pool is missing.
    lacks_device: bool,
    /// Name of the host that has written the cache's dirty data from its replica to the backing;
    /// `None` if no host has.
    outdated_by: Option<String>,
    foreign: Option<String>,
    later: Option<LaterChange>,
    began: Instant,
    /// The reserved memory for the recovery and for the index of the cache.
    memory: Reservation,
    /// Highest number of a journal ring of the cache when the recovery started.
    upto: u32,
    remains: RecoveredPool,
    /// Notes for the operator.
    notes: Vec<String>,
}

impl Recovery {
    /// Drops recovered data that is outdated according to the saved state.
    async fn adjust(&mut self, mut recovered: Box<Recovered>) -> Result<Box<Recovered>> {
        let summary = recovered.summary;
        if self.may_be_dirty && !self.lacks_device && summary.sectors_missing > 0 {
            self.note(format!(
                "{} of dirty data were on devices that are no longer in the pool, and are lost; reads return the \
                 backing's older data",
                bytes(summary.sectors_missing)
            ));
        }
        if is_newer_than_state(summary.ring, self.journal) {
            self.note(
                "the daemon's saved state is older than its cache, so hob treats the cache as after a crash of the host",
            );
            (self.journal.closed, self.journal.evidence) = (None, None);
            self.later = None;
        } else {
            self.may_be_dirty = self.outdated_by.is_none() && allows_dirty(&self.spec, self.journal);
        }
        if summary.ring <= self.journal.lost_ring {
            self.note("its journal could not be written any more; clean data in its cache is dropped");
            recovered = changed(recovered, Recovered::drop_clean).await?;
        }
        if recovered.summary.sectors_dirty > 0 && summary.ring <= self.journal.discarded_ring {
            self.note(format!(
                "{} of dirty data in its cache was discarded by command, when its journal could not be written any more",
                bytes(recovered.summary.sectors_dirty)
            ));
            recovered = changed(recovered, Recovered::discard_dirty).await?;
        }
        if recovered.summary.sectors_dirty > 0 && !self.may_be_dirty {
            let outdated = bytes(recovered.summary.sectors_dirty);
            self.note(match &self.outdated_by {
                Some(by) => format!(
                    "{outdated} of dirty data in its cache are outdated and dropped, because {by} took over \
                    the disk and wrote this data to the backing from a replica"
                ),
                // Flash held the record of the drain that ended write-back, and the backing was
                // written after that drain.
                None => format!(
                    "its flash lost the newest part of its journal, and the remaining part describes {outdated} as \
                    dirty. This data was written to the backing when write-back ended, so hob drops it"
                ),
            });
            recovered = changed(recovered, Recovered::discard_dirty).await?;
        }
        if self.remains.rings.first().is_none_or(|ring| ring.number < self.journal.ring) {
            // The evidence that the backing is unchanged was recorded for an earlier journal ring.
            self.journal.evidence = None;
        }
        Ok(recovered)
    }

    fn note(&mut self, note: impl Into<String>) {
        self.notes.push(note.into());
    }
}

/// Changes a recovered cache on a thread that may block, because large indexes take long.
async fn changed(
    mut recovered: Box<Recovered>,
    change: impl FnOnce(&mut Recovered) + Send + 'static,
) -> Result<Box<Recovered>> {
    blocking(move || {
        change(&mut recovered);
        recovered
    })
    .await
}

/// Returns a description of the damage of a journal.
fn damage_of(found: &Found) -> String {
    if let Found::Damaged { what, .. } = found { what.clone() } else { String::new() }
}

/// Returns true if the cache may hold dirty data. Only write-back creates dirty data, and
/// write-back needs a journal. hob saves the mode durably before write-back starts, and after a
/// drain that ends write-back. Also returns true if the last mode is unknown, as after `hob serve`,
/// which saves no state.
fn allows_dirty(spec: &CacheSpec, journal: JournalSpec) -> bool {
    (spec.mode == Mode::WriteBack || journal.mode_unknown) && journal.ring > 0
}

/// Returns true if the saved state is older than this journal ring. hob saves the number of a ring
/// before it writes the first page of the ring. Returns false for `hob serve`, which saves no
/// state.
fn is_newer_than_state(ring: u32, journal: JournalSpec) -> bool {
    ring > journal.ring && !journal.mode_unknown
}

/// Returns true if hob was killed in this boot of the host while it used this journal ring, so that
/// a crash log was left.
fn expects_crash_log(journal: JournalSpec, ring: u32, is_clean: bool) -> bool {
    !is_clean && journal.expects_crash_log(BootId::current(), ring)
}

/// Returns the error for a cache that may have had dirty data, and whose data or journal on flash
/// is not complete.
fn refused_content(name: &str, pool: &str, lack: Lack, missing: &[String], damage: &str) -> ApiError {
    let why = lack.reason(pool, missing, damage);
    if lack == Lack::Device {
        return refused_until(name, &why, "the device");
    }
    if !lack.may_return() {
        return refused(name, &why);
    }
    ApiError::conflict(why).hint(format!(
        "restore the device with the newest data, or discard the data of the cache with 'hob \
         cache discard-dirty {name} --yes'"
    ))
}

/// Returns the error for a cache in a pool without any present device.
fn refused_without_devices(pool: &str, missing: &[String]) -> ApiError {
    let why = format!("its cache cannot be read: no device of pool {pool} is there");
    let (devices, first) = (missing.join(", "), missing.first().map_or("PATH", String::as_str));
    ApiError::conflict(why).hint(format!(
        "restore {devices}, which hob looks for every few seconds, or remove a device and lose its \
         dirty data with 'hob pool remove-device {pool} {first} --yes'"
    ))
}

fn refused(name: &str, why: &str) -> ApiError {
    refused_until(name, why, "the backing")
}

/// Returns the error for a cache whose backing was changed after hob served it last. The change may
/// be the restore of a backup, so hob does not write dirty data over it.
fn refused_later(name: &str, why: &str) -> ApiError {
    ApiError::conflict(why).hint(format!(
        "save the dirty data with 'hob cache export-dirty {name} FILE' and discard it with 'hob cache discard-dirty \
         {name} --yes'; or, if the backing still has the content that hob left there, accept it with 'hob cache set \
         {name} --verify trust', and hob writes the dirty data to it"
    ))
}

/// Returns the error for a cache that hob refuses until an operator restores `what`, for example a
/// device.
fn refused_until(name: &str, why: &str, what: &str) -> ApiError {
    ApiError::conflict(why).hint(format!(
        "restore {what}, or save the dirty data with 'hob cache export-dirty {name} FILE' and discard it with 'hob cache discard-dirty {name} --yes'"
    ))
}

/// Returns the error for a saved cache whose index does not fit in memory.
fn no_memory(name: &str, error: &ApiError) -> ApiError {
    conflict!("its cache cannot be opened: {}", error.problem.error).hint(format!(
        "free memory, and hob opens the disk; or save the dirty data with 'hob cache export-dirty {name} FILE' and \
         discard it with 'hob cache discard-dirty {name} --yes'"
    ))
}

/// Returns the size of `sectors` sectors as text for users.
pub(super) fn bytes(sectors: u64) -> String {
    Size(sectors * SECTOR_BYTES).human()
}
