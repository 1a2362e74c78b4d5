//! Recovery of a persistent cache after a restart: reading its journal, comparing it with the
//! backing, and using, emptying or refusing the cache.
//!
//! During recovery the disk waits, or is already served ([`recovering`](super::recovering)). A
//! refused cache stays unchanged until an operator decides ([`fencing`](super::fencing)).

use std::sync::Mutex;
use std::time::Duration;

use hob_control::Size;
use hob_engine::command::{CacheChange, DataSegment, Enable, Mode, NewRing};
use hob_engine::journal::{Plan, Recovered};
use hob_engine::regions::Regions;
use hob_engine::units::SECTOR_BYTES;
use hob_storage::pool::OwnerId;
use hob_storage::pool::recovery::Found;
use tokio::sync::oneshot;
use tokio::time::Instant;

use super::Disks;
use super::comparison::{Source, changed_since, compare, same_backing};
use super::fencing::{Changed, Same, Verdict};
use crate::api_error::ApiError;
use crate::cache_settings::engine_config;
use crate::hardware::BackingInfo;
use crate::services::flash::blocking;
use crate::services::pools::{Restructure, places};
use crate::services::registry::{DeviceEntry, DiskPhase};
use crate::state::{BootId, CacheSpec, JournalSpec};
use crate::watchdog::contained;

/// Minimum time before a refused cache is read again.
const RETRY_MIN: Duration = Duration::from_secs(5);

/// The wait before a refused cache is read again, as a multiple of the time that reading it took.
const RETRY_TIMES: u32 = 20;

/// A recovered cache that passed all checks.
pub(in crate::services) struct Kept {
    recovered: Box<Recovered>,
    /// The highest ring number when the recovery started.
    upto: u32,
    /// Data segments of the cache with the shards' device ids, in the order of the frame numbers.
    data: Vec<DataSegment>,
}

/// A journal that is being read.
pub(in crate::services) struct Reading {
    spec: CacheSpec,
    journal: JournalSpec,
    began: Instant,
    /// Set if another host or program has used the disk since this host served it last, which
    /// invalidates all data of the cache. Contains the reason.
    pub(in crate::services) foreign: Option<String>,
    /// Set if a host has written the cache's dirty data to the backing from its replica. Contains
    /// the name of that host.
    pub(in crate::services) outdated_by: Option<String>,
    /// Devices of the pool that are missing.
    missing: Vec<String>,
    /// The highest ring number when the recovery started.
    pub(in crate::services) upto: u32,
    /// Receives the result of the first pass over the journal.
    pub(in crate::services) surveyed: oneshot::Receiver<Surveyed>,
    found: oneshot::Receiver<Result<Found, ApiError>>,
}

/// Result of the first pass over a journal.
pub(in crate::services) struct Surveyed {
    identity: [u8; 32],
    disk_bytes: u64,
    clean: bool,
    ring: u32,
    is_logged: bool,
    /// Superset of the regions that may be dirty.
    pub(in crate::services) doubtful: Regions,
}

impl Reading {
    /// Returns true if flash may hold data that the backing lacks.
    pub(in crate::services) fn may_be_dirty(&self) -> bool {
        self.outdated_by.is_none() && may_be_dirty(&self.spec, self.journal)
    }

    /// Returns true if all devices are present and the cache has a journal.
    pub(in crate::services) fn is_complete(&self) -> bool {
        self.missing.is_empty() && self.journal.ring > 0
    }

    /// Returns true if the cache belongs to this backing, the backing is unchanged, and no
    /// acknowledged write may be lost, according to the first pass.
    pub(in crate::services) fn fits(&self, surveyed: &Surveyed, info: &BackingInfo) -> bool {
        self.foreign.is_none()
            && (surveyed.is_logged || !expects_crash_log(self.journal, surveyed.ring, surveyed.clean))
            && same_backing(info, surveyed.disk_bytes, &surveyed.identity) != Same::No
            && changed_since(surveyed.clean, self.journal, info) != Changed::Yes
    }
}

impl Disks {
    /// Starts to read the journal of a disk's persistent cache.
    pub(in crate::services) async fn begin_recovery(
        &self,
        name: &str,
        spec: &CacheSpec,
    ) -> Result<Reading, ApiError> {
        let journal = spec.journal.ok_or_else(|| ApiError::failed("its cache has no journal"))?;
        let began = Instant::now();
        let (flash, missing) = {
            let inner = self.registry.inner();
            let entry = inner.pool(&spec.pool)?;
            let missing = entry.devices.iter().filter(|device| device.ids.is_none());
            (entry.flash.clone(), missing.map(|device| device.path.display().to_string()).collect::<Vec<_>>())
        };
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
            journal,
            began,
            foreign: journal.foreign.then(|| "another program or host has used the disk".to_owned()),
            outdated_by: None,
            missing,
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
    ) -> Result<(Source, Option<Kept>, Vec<String>), ApiError> {
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
    ) -> Result<(Source, Option<Kept>, Vec<String>), ApiError> {
        let matters = reading.may_be_dirty();
        let Reading { spec, mut journal, began, foreign, outdated_by, mut missing, upto, found, .. } =
            reading;
        let spec = &spec;
        let found = found.await.unwrap_or_else(|_| {
            Err(ApiError::failed(
                "an internal task ended \
            unexpectedly",
            ))
        });
        let found = match found {
            Ok(found) => found,
            Err(error) if matters => {
                return Err(refused(name, &format!("its cache cannot be read: {}", error.problem.error)));
            }
            Err(error) => {
                self.pools.forget_owner(spec).await;
                let why = error.problem.error;
                return Ok((
                    source,
                    None,
                    vec![format!("its cache cannot be read ({why}) and starts empty")],
                ));
            }
        };
        // A device that failed during the recovery was read as if it were empty.
        if let Ok(entry) = self.registry.inner().pool(&spec.pool) {
            let unread = &found.remains().unread;
            let is_unread =
                |device: &&DeviceEntry| device.ids.is_some_and(|ids| unread.contains(&ids.in_pool));
            let devices = entry.devices.iter().filter(is_unread);
            missing.extend(devices.map(|device| device.path.display().to_string()));
        }
        if matters && !missing.is_empty() {
            self.check_missing(name, spec, journal, &found, &missing)?;
        }
        let (mut recovered, remains) = match found {
            Found::Recovered(recovered, remains) => (recovered, remains),
            Found::Nothing(remains) => {
                let is_new = remains.rings.is_empty() && remains.data.is_empty();
                if !is_new {
                    self.exports.all_is_changed(name, "no data of its cache could be recovered").await?;
                }
                self.pools.forget_owner(spec).await;
                let note = "no data of its cache could be recovered, and the cache starts \
                    empty"
                    .to_owned();
                return Ok((source, None, if is_new { Vec::new() } else { vec![note] }));
            }
            Found::Damaged { what, .. } if matters => {
                return Err(refused(name, &format!("the journal of its cache is damaged ({what})")));
            }
            Found::Damaged { what, .. } => {
                self.pools.forget_owner(spec).await;
                let note = format!("the journal of its cache is damaged ({what}); the cache starts empty");
                return Ok((source, None, vec![note]));
            }
        };
        let mut notes = Vec::new();
        if recovered.summary.ring <= journal.lost_ring {
            notes
                .push("its journal could not be written any more; clean data in its cache is dropped".into());
            recovered = blocking(move || {
                recovered.drop_clean();
                recovered
            })
            .await?;
        }
        if recovered.summary.sectors_dirty > 0 && !matters {
            let outdated = bytes(recovered.summary.sectors_dirty);
            notes.push(match outdated_by {
                Some(by) => format!(
                    "{outdated} of dirty data in its cache are outdated and dropped: {by} took over \
                    their second copy and wrote them to the backing"
                ),
                // Flash held the record of the drain that ended write-back, and the backing was
                // written after that drain.
                None => format!(
                    "its flash lost the end of its journal, which describes {outdated} as dirty; \
                    they were written to the backing when write-back ended, and are dropped"
                ),
            });
            recovered = blocking(move || {
                recovered.discard_dirty();
                recovered
            })
            .await?;
        }
        let known_bytes = recovered.summary.disk_bytes;
        if remains.rings.first().is_none_or(|ring| ring.number < journal.ring) {
            // The evidence belongs to an earlier ring.
            journal.evidence = None;
        }
        let (source, mut recovered, verdict, why) =
            compare(source, recovered, journal, spec.verify, foreign).await?;
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
            if summary.clean { "closed cleanly" } else { "not closed" }
        );
        self.registry.inner().disk_mut(name)?.quality.recovered(summary.clean);
        let is_logged = summary.is_logged || !expects_crash_log(journal, summary.ring, summary.clean);
        if matters && !is_logged && verdict != Verdict::Refuse {
            notes.push(self.note_lost_records(name).await?);
        }
        match verdict {
            Verdict::Refuse => Err(refused(
                name,
                &format!("{why}, and {} of its cache are dirty", bytes(summary.sectors_dirty)),
            )),
            Verdict::Empty => {
                self.exports.all_is_changed(name, &why).await?;
                self.pools.forget_owner(spec).await;
                notes.push(format!("{why}; its cache starts empty"));
                Ok((source, None, notes))
            }
            Verdict::Believe | Verdict::Verify => {
                if verdict == Verdict::Verify {
                    recovered = blocking(move || {
                        recovered.distrust_clean();
                        recovered
                    })
                    .await?;
                    tracing::info!(
                        "the cache of {name}: it is unknown whether the backing changed; {} are \
                        compared with the backing before they are served",
                        bytes(recovered.sectors_unverified())
                    );
                }
                let inner = self.registry.inner();
                let entry = inner.pool(&spec.pool)?;
                let on_shards = |segment: DataSegment| {
                    let place = entry.on_shards(segment.place)?;
                    Some(DataSegment { place, ..segment })
                };
                let data: Option<Vec<_>> = remains.data.into_iter().map(on_shards).collect();
                let data = data.ok_or_else(|| ApiError::failed("a device of the pool went offline again"))?;
                Ok((source, Some(Kept { recovered, upto, data }), notes))
            }
        }
    }

    /// With missing devices, accepts only the newest journal if it needs none of them.
    fn check_missing(
        &self,
        name: &str,
        spec: &CacheSpec,
        journal: JournalSpec,
        found: &Found,
        missing: &[String],
    ) -> Result<(), ApiError> {
        let is_whole = match found {
            Found::Recovered(recovered, remains) => {
                let newest = remains.rings.first().map_or(0, |ring| ring.number);
                newest >= journal.ring && recovered.summary.sectors_missing == 0
            }
            _ => false,
        };
        if is_whole || !may_be_dirty(spec, journal) {
            return Ok(());
        }
        let devices = missing.join(", ");
        Err(refused(
            name,
            &format!("{devices} of pool {} is missing, and may have dirty data of its cache", spec.pool),
        ))
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

    /// Gives a shard's disk the recovered cache. The caller holds the operation guard of the disk.
    pub(in crate::services) async fn enable_kept(&self, name: &str, kept: Kept) -> Result<(), Restructure> {
        let Kept { recovered, upto, data } = kept;
        let (was_block_bytes, ring) = (recovered.summary.block_bytes, recovered.summary.ring);
        let is_verified = recovered.sectors_unverified() == 0;
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
                // The backing changes from now on. This is saved together with the number of the
                // new ring.
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
        self.pools.restructure(name, data.len() as u64, enable).await?;
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

/// Returns true if the cache may hold dirty data. Only write-back creates dirty data, and
/// write-back needs a journal. The mode is saved durably before write-back starts and after a drain
/// has ended it. Without a saved mode the answer is unknown.
fn may_be_dirty(spec: &CacheSpec, journal: JournalSpec) -> bool {
    (spec.mode == Mode::WriteBack || journal.mode_unknown) && journal.ring > 0
}

/// Returns true if hob was killed in this boot of the host while it used this journal ring, so that
/// a crash log was left.
fn expects_crash_log(journal: JournalSpec, ring: u32, is_clean: bool) -> bool {
    !is_clean && journal.expects_crash_log(BootId::current(), ring)
}

fn refused(name: &str, why: &str) -> ApiError {
    ApiError::conflict(why).hint(format!(
        "restore the backing, or save the dirty data with 'hob cache export-dirty {name} FILE' and discard it with 'hob cache discard-dirty {name} --yes'"
    ))
}

fn bytes(sectors: u64) -> String {
    Size(sectors * SECTOR_BYTES).human()
}
