//! Recovery of a persistent cache after a restart: comparing it with the backing, and using,
//! emptying or refusing the cache.
//!
//! Before, hob reads the journal of the cache ([`journal_reading`](super::journal_reading)). A
//! cache that passes all checks is put into service ([`kept_cache`](super::kept_cache)). During
//! recovery the disk is offline, or is already served ([`recovering`](super::recovering)). A refused
//! cache stays unchanged until an operator decides ([`fencing`](super::fencing)).

use std::time::Duration;

use hob_control::Size;
use hob_engine::command::DataSegment;
use hob_engine::journal::Recovered;
use hob_engine::units::SECTOR_BYTES;
use hob_storage::pool::recovery::{Found, RecoveredPool};
use tokio::time::Instant;

use super::Disks;
use super::comparison::{Mismatch, Source, compare};
use super::fencing::Verdict;
use super::flash_content::{Content, Decision, Empty, Expected, judge as judge_content};
use super::journal_reading::{Reading, SavedCache, allows_dirty, expects_crash_log, is_newer_than_state};
use super::kept_cache::Kept;
use super::refusal::{refused, refused_content, refused_later, refused_without_devices};
use crate::api_error::{ApiError, Result};
use crate::services::flash::blocking;
use crate::services::registry::DeviceEntry;
use crate::state::CacheSpec;

/// Minimum time before a refused cache is read again.
pub(super) const RETRY_MIN: Duration = Duration::from_secs(5);

/// The wait before hob reads a refused cache again, as a multiple of the time that the last reading
/// took.
const RETRY_TIMES: u32 = 20;

impl Disks {
    /// Reads a disk's persistent cache, compares it with the backing, and decides whether the cache
    /// may be used.
    pub(super) async fn recover(
        &self,
        name: &str,
        reading: Reading,
        source: Source,
    ) -> Result<(Source, Option<Kept>, Vec<String>)> {
        let began = reading.cache.began;
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
        let Reading { cache, mut missing, found, .. } = reading;
        let spec = &cache.spec;
        let found =
            match found.await.unwrap_or_else(|_| Err(ApiError::failed("its recovery ended unexpectedly"))) {
                Ok(found) => found,
                Err(_) if may_be_dirty && !missing.is_empty() && self.has_no_device(&spec.pool) => {
                    return Err(refused_without_devices(&spec.pool, &missing));
                }
                Err(error) if may_be_dirty && !self.is_given_up(&cache) => {
                    return Err(refused(name, &format!("its cache cannot be read: {}", error.problem.error)));
                }
                Err(error) => {
                    self.pools.forget_owner(spec).await;
                    let note = format!("its cache cannot be read ({}) and starts empty", error.problem.error);
                    return Ok((source, None, vec![note]));
                }
            };
        missing.extend(self.unread_devices(&spec.pool, &found));
        let expected = Expected {
            journal: cache.journal,
            may_be_dirty,
            was_write_back: allows_dirty(spec, cache.journal),
            lacks_device: !missing.is_empty(),
        };
        let decision = judge_content(&expected, Content::of(&found));
        let (recovered, remains) = match (decision, found) {
            (Decision::Use, Found::Recovered(recovered, remains)) => (recovered, remains),
            (Decision::Refuse(lack), found) => {
                return Err(refused_content(name, &spec.pool, lack, &missing, &damage_of(&found)));
            }
            (Decision::StartEmpty(empty), found) => {
                let note = self.start_empty(name, spec, empty, &damage_of(&found)).await?;
                return Ok((source, None, note.into_iter().collect()));
            }
            (Decision::Use, _) => unreachable!("only a journal is used"),
        };
        let lacks_device = !missing.is_empty();
        let mut recovery = Recovery { cache, may_be_dirty, lacks_device, remains, notes: Vec::new() };
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
        let Recovery { cache, may_be_dirty, remains, mut notes, .. } = recovery;
        let SavedCache { spec, journal, foreign, later, upto, began, memory, .. } = cache;
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
    fn is_given_up(&self, cache: &SavedCache) -> bool {
        let inner = self.registry.inner();
        cache.journal.ended && inner.pool(&cache.spec.pool).is_ok_and(|entry| entry.devices.is_empty())
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
}

/// A cache with a valid journal, before it is compared with the backing.
struct Recovery {
    cache: SavedCache,
    may_be_dirty: bool,
    /// True if a device of the pool is missing.
    lacks_device: bool,
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
        if is_newer_than_state(summary.ring, self.cache.journal) {
            self.note(
                "the daemon's saved state is older than its cache, so hob treats the cache as after a crash of the host",
            );
            (self.cache.journal.closed, self.cache.journal.evidence) = (None, None);
            self.cache.later = None;
        } else {
            self.may_be_dirty =
                self.cache.outdated_by.is_none() && allows_dirty(&self.cache.spec, self.cache.journal);
        }
        if summary.ring <= self.cache.journal.lost_ring {
            self.note("its journal could not be written any more; clean data in its cache is dropped");
            recovered = changed(recovered, Recovered::drop_clean).await?;
        }
        if recovered.summary.sectors_dirty > 0 && summary.ring <= self.cache.journal.discarded_ring {
            self.note(format!(
                "{} of dirty data in its cache was discarded by command, when its journal could not be written any more",
                bytes(recovered.summary.sectors_dirty)
            ));
            recovered = changed(recovered, Recovered::discard_dirty).await?;
        }
        if recovered.summary.sectors_dirty > 0 && !self.may_be_dirty {
            let outdated = bytes(recovered.summary.sectors_dirty);
            self.note(match &self.cache.outdated_by {
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
        if self.remains.rings.first().is_none_or(|ring| ring.number < self.cache.journal.ring) {
            // The evidence that the backing is unchanged was recorded for an earlier journal ring.
            self.cache.journal.evidence = None;
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

/// Returns the size of `sectors` sectors as text for users.
pub(super) fn bytes(sectors: u64) -> String {
    Size(sectors * SECTOR_BYTES).human()
}
