//! Reads the journal of a persistent cache, and reports after the first pass whether the cache fits
//! its backing.

use std::sync::Arc;

use hob_engine::command::Mode;
use hob_engine::journal::Plan;
use hob_engine::preset::Verify;
use hob_engine::regions::Regions;
use hob_storage::pool::OwnerId;
use hob_storage::pool::recovery::Found;
use tokio::sync::oneshot;
use tokio::time::Instant;

use super::Disks;
use super::comparison::{changed_since, same_backing};
use super::fencing::{Changed, Same};
use super::last_served::LaterChange;
use super::recovery_memory::Reservation;
use super::refusal::no_memory;
use crate::api_error::{ApiError, Result};
use crate::hardware::BackingInfo;
use crate::host_memory::HostMemory;
use crate::services::pools::CacheMemory;
use crate::services::registry::DiskPhase;
use crate::state::{BootId, CacheSpec, JournalSpec};
use crate::watchdog::contained;

/// A persistent cache from before the restart, and the resources of its recovery.
pub(super) struct SavedCache {
    pub(super) spec: CacheSpec,
    pub(super) journal: JournalSpec,
    /// Reason why all data of the cache is invalid: another host or program has used the disk since
    /// this host served it last. `None` if only this host has used the disk.
    pub(super) foreign: Option<String>,
    /// Name of the host that has written the cache's dirty data from its replica to the backing;
    /// `None` if no host has.
    pub(super) outdated_by: Option<String>,
    /// The change of the backing after hob last served the disk, if there was one.
    pub(super) later: Option<LaterChange>,
    /// Highest number of a journal ring of the cache when the recovery started.
    pub(super) upto: u32,
    pub(super) began: Instant,
    /// The reserved memory for the recovery and for the index of the cache.
    pub(super) memory: Reservation,
}

/// The recovery of a cache, while its journal is being read.
pub(super) struct Reading {
    pub(super) cache: SavedCache,
    /// Maximum number of data segments of the cache.
    pub(super) data_segments: u64,
    /// Devices of the pool that are missing.
    pub(super) missing: Vec<String>,
    /// Receives the result of the first pass over the journal.
    pub(super) surveyed: oneshot::Receiver<Surveyed>,
    pub(super) found: oneshot::Receiver<Result<Found>>,
}

/// Result of the first pass over a journal.
pub(super) struct Surveyed {
    identity: [u8; 32],
    disk_bytes: u64,
    clean: bool,
    ring: u32,
    is_logged: bool,
    /// Regions that may have dirty data. Some of them may have none.
    pub(super) doubtful: Regions,
}

impl Reading {
    /// Returns true if flash may hold data that the backing lacks. If flash has a newer journal
    /// ring than the saved state names, the state is older than flash. The mode in the state then
    /// proves nothing.
    pub(super) fn may_be_dirty(&self) -> bool {
        let SavedCache { spec, journal, outdated_by, upto, .. } = &self.cache;
        let is_older = is_newer_than_state(*upto, *journal);
        outdated_by.is_none() && (is_older || allows_dirty(spec, *journal))
    }

    /// Returns true if all devices are present and the cache has a journal.
    pub(super) fn is_complete(&self) -> bool {
        self.missing.is_empty() && self.cache.journal.ring > 0
    }

    /// Returns true if the cache belongs to this backing, the backing is unchanged, and no
    /// acknowledged write may be lost, according to the first pass.
    pub(super) fn fits(&self, surveyed: &Surveyed, info: &BackingInfo) -> bool {
        let SavedCache { spec, journal, foreign, later, .. } = &self.cache;
        let is_unchanged = match changed_since(surveyed.clean, *journal, info, *later) {
            Changed::Yes => false,
            Changed::Later => spec.verify == Verify::Trust,
            Changed::No | Changed::Unknown => true,
        };
        is_unchanged
            && foreign.is_none()
            && !is_newer_than_state(surveyed.ring, *journal)
            && (surveyed.is_logged || !expects_crash_log(*journal, surveyed.ring, surveyed.clean))
            && same_backing(info, surveyed.disk_bytes, &surveyed.identity) != Same::No
    }
}

impl Disks {
    /// Starts to read the journal of a disk's persistent cache.
    pub(super) async fn begin_recovery(&self, name: &str, spec: &CacheSpec) -> Result<Reading> {
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
        let foreign = journal.foreign.then(|| "another program or host has used the disk".to_owned());
        let cache = SavedCache {
            spec: spec.clone(),
            journal,
            foreign,
            outdated_by: None,
            later: None,
            upto,
            began,
            memory,
        };
        Ok(Reading { cache, data_segments, missing, surveyed, found })
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
}

/// Returns true if the cache may hold dirty data. Only write-back creates dirty data, and
/// write-back needs a journal. hob saves the mode durably before write-back starts, and after a
/// drain that ends write-back. Also returns true if the last mode is unknown, as after `hob serve`,
/// which saves no state.
pub(super) fn allows_dirty(spec: &CacheSpec, journal: JournalSpec) -> bool {
    (spec.mode == Mode::WriteBack || journal.mode_unknown) && journal.ring > 0
}

/// Returns true if the saved state is older than this journal ring. hob saves the number of a ring
/// before it writes the first page of the ring. Returns false for `hob serve`, which saves no
/// state.
pub(super) fn is_newer_than_state(ring: u32, journal: JournalSpec) -> bool {
    ring > journal.ring && !journal.mode_unknown
}

/// Returns true if hob was killed in this boot of the host while it used this journal ring, so that
/// a crash log was left.
pub(super) fn expects_crash_log(journal: JournalSpec, ring: u32, is_clean: bool) -> bool {
    !is_clean && journal.expects_crash_log(BootId::current(), ring)
}
