//! Recovery: reads a persistent cache's journal from flash and rebuilds its index.
//!
//! This module reads the journal's pages, and `hob_engine::journal` interprets them. Another thread
//! reads a ring twice, in runs of up to 1 MiB, while the calling thread interprets the pages. After
//! that, the daemon reads and checksums the sectors of the journal tail that the journal alone
//! cannot confirm, several at a time. The recovery writes nothing to flash. The engine that opens
//! the recovered cache writes a new journal ring, and a crash before the new ring is complete
//! changes nothing.
//!
//! # Failures
//! If a run cannot be read, its pages are read one by one. An unreadable page counts as missing. If
//! a page differs in the second reading, recovery leaves this page out and reads the ring again.
//! The recovery tolerates 16 such pages, and fails at the next one. If segments are missing because
//! their device is missing, the journal shows what is lost. But if a journal's only copy is on a
//! missing device, the cache seems to have no journal. So call `recover` only if all devices of the
//! pool are present, or the operator decided to continue without the missing ones.

mod pages;
mod tail;

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use hob_engine::command::DataSegment;
use hob_engine::journal::{PAGE_BYTES, Plan, Recovered, Replay, ReplayError, Ring, Survey};
use hob_engine::units::DeviceId;

use super::reader::Devices;
use super::{OwnerId, Pool, PoolError, RingOnFlash};
use crate::crash_log;
use pages::{Run, read_runs, runs_of_copy, runs_of_pages};

/// Maximum number of pages that differ in the second reading before recovery fails.
const CHANGED_PAGES_MAX: usize = 16;

/// Result of the recovery of a persistent cache.
#[derive(Debug)]
pub enum Found {
    /// The cache has no valid journal, so it holds no data.
    Nothing(RecoveredPool),
    /// The recovered index of a valid journal. Frames are numbered by the order of the data
    /// segments in `RecoveredPool`.
    Recovered(Box<Recovered>, RecoveredPool),
    /// The journal is damaged. The content of a damaged journal cannot be trusted, so dirty data
    /// cannot be distinguished from clean data.
    Damaged {
        /// Number of the journal ring that was read.
        ring: u32,
        /// Description of the damage for users.
        what: String,
        /// Segments of the cache that were found.
        remains: RecoveredPool,
    },
}

/// Segments of a persistent cache.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RecoveredPool {
    /// Data segments of the cache, by number.
    pub data: Vec<DataSegment>,
    /// Journal rings of the cache, newest first. Old rings are released when a new journal ring is
    /// in use.
    pub rings: Vec<RingOnFlash>,
    /// Remote devices that failed during the recovery and were treated as empty.
    pub unread: Vec<DeviceId>,
}

impl Found {
    /// Returns the segments of the cache, whatever the result of the recovery.
    pub fn remains(&self) -> &RecoveredPool {
        match self {
            Found::Nothing(remains) | Found::Recovered(_, remains) | Found::Damaged { remains, .. } => {
                remains
            }
        }
    }
}

/// Reason why a cache cannot be recovered.
#[derive(Debug, thiserror::Error)]
pub enum RecoverError {
    /// An error of the pool.
    #[error(transparent)]
    Pool(#[from] PoolError),
    /// Pages of the journal differ at each reading.
    #[error(
        "ring {ring} reads differently each time; a device of the pool is failing. Try again, or \
        remove the cache with its data"
    )]
    Unsteady {
        /// Number of the journal ring.
        ring: u32,
    },
    /// A system resource, such as a thread, is missing.
    #[error("cannot read the journal: {0}")]
    System(#[from] std::io::Error),
}

struct Progress<F> {
    report: F,
    done_bytes: u64,
    all_bytes: u64,
}

impl<F: FnMut(u64, u64)> Progress<F> {
    fn expect(&mut self, bytes: u64) {
        self.all_bytes += bytes;
        (self.report)(self.done_bytes, self.all_bytes);
    }

    fn advance(&mut self, bytes: u64) {
        self.done_bytes += bytes;
        (self.report)(self.done_bytes, self.all_bytes);
    }
}

/// Result of one attempt to read one journal ring.
enum Outcome {
    Unfinished,
    Damaged(String),
    Recovered(Box<Recovered>),
    /// A page differs in the second reading. The values are the index of the journal's copy, and
    /// the number of the page.
    Changed(usize, u64),
}

/// Recovers a persistent cache. `progress` is called with the number of bytes read and the number
/// of bytes to read, as far as known.
///
/// # Errors
/// Returns a [`RecoverError`]. A cache without any data left is not an error.
pub fn recover(pool: &Pool, owner: OwnerId, progress: impl FnMut(u64, u64)) -> Result<Found, RecoverError> {
    Recovery::of(pool, owner)?.run(progress, |_| ())
}

/// A prepared recovery. The pool can be used until and during the recovery, but the owner's
/// segments must not be released.
#[derive(Debug)]
pub struct Recovery {
    owner: OwnerId,
    devices: Devices,
    remains: RecoveredPool,
    segment_bytes: u64,
}

impl Recovery {
    /// Prepares the recovery of an owner's segments in the pool.
    ///
    /// # Errors
    /// Returns the system's error if descriptors are lacking.
    pub fn of(pool: &Pool, owner: OwnerId) -> Result<Recovery, PoolError> {
        let remains =
            RecoveredPool { data: pool.data_of(owner), rings: pool.rings_of(owner), unread: Vec::new() };
        Ok(Recovery { owner, devices: Devices::of(pool)?, remains, segment_bytes: pool.segment_bytes() })
    }

    /// Runs the recovery. `progress` is called with the number of bytes read and the number of
    /// bytes to read, as far as known. `surveyed` is called with the result of the first reading of
    /// a whole journal ring, perhaps several times.
    ///
    /// # Errors
    /// Returns a [`RecoverError`]. A cache without data is not an error.
    pub fn run(
        self,
        progress: impl FnMut(u64, u64),
        mut surveyed: impl FnMut(&Plan),
    ) -> Result<Found, RecoverError> {
        let Recovery { owner, devices, remains, segment_bytes } = self;
        let mut progress = Progress { report: progress, done_bytes: 0, all_bytes: 0 };
        let cache = Cache { owner, devices: &devices, data: &remains.data, segment_bytes };
        let seen = |remains: &RecoveredPool| RecoveredPool { unread: devices.unread(), ..remains.clone() };
        for ring in &remains.rings {
            let mut excluded = BTreeSet::new();
            loop {
                devices.take_failed();
                match cache.read_ring(ring, &excluded, &mut progress, &mut surveyed)? {
                    // Without an unreadable page, the ring was being created when the daemon ended.
                    Outcome::Unfinished => match devices.take_failed() {
                        None => break,
                        Some((path, error)) => {
                            let what = format!(
                                "pages of the journal cannot be read from {}: {error}",
                                path.display()
                            );
                            return Ok(Found::Damaged { ring: ring.number, what, remains: seen(&remains) });
                        }
                    },
                    Outcome::Damaged(what) => {
                        return Ok(Found::Damaged { ring: ring.number, what, remains: seen(&remains) });
                    }
                    Outcome::Recovered(recovered) => return Ok(Found::Recovered(recovered, seen(&remains))),
                    Outcome::Changed(..) if excluded.len() >= CHANGED_PAGES_MAX => {
                        return Err(RecoverError::Unsteady { ring: ring.number });
                    }
                    Outcome::Changed(copy, page) => {
                        tracing::warn!(
                            ring = ring.number,
                            copy,
                            page,
                            "a page of a journal reads differently the second time"
                        );
                        excluded.insert((copy, page));
                    }
                }
            }
        }
        Ok(Found::Nothing(seen(&remains)))
    }
}

/// The devices and segments to read from.
struct Cache<'a> {
    owner: OwnerId,
    devices: &'a Devices,
    data: &'a [DataSegment],
    segment_bytes: u64,
}

impl Cache<'_> {
    /// Reads some pages of a journal ring for the first time. Calls `advance` with the number of
    /// bytes of each read.
    fn survey(
        &self,
        runs: &[Run],
        excluded: &BTreeSet<(usize, u64)>,
        mut survey: Survey,
        mut advance: impl FnMut(u64),
    ) -> std::io::Result<Survey> {
        read_runs(self.devices, runs, |run, place, page| {
            let number = run.first_page + place;
            if let Some(page) = page.filter(|_| !excluded.contains(&(run.copy, number))) {
                survey.page(run.copy, number, page);
            }
            if place == 0 {
                advance(run.bytes());
            }
            true
        })?;
        Ok(survey)
    }

    fn read_ring<F: FnMut(u64, u64)>(
        &self,
        ring: &RingOnFlash,
        excluded: &BTreeSet<(usize, u64)>,
        progress: &mut Progress<F>,
        surveyed: &mut impl FnMut(&Plan),
    ) -> Result<Outcome, RecoverError> {
        let pages = ring.copies[0].len() as u64 * self.segment_bytes / PAGE_BYTES as u64;
        let runs: Vec<Run> = (0..ring.copies.len())
            .flat_map(|copy| runs_of_copy(copy, &ring.copies[copy], self.segment_bytes))
            .collect();
        progress.expect(bytes_of(&runs));
        let new = || Survey::new(self.owner.0.to_le_bytes(), ring.number, ring.copies.len(), pages);
        // Interpreting the pages takes longer than reading them. So two threads share this work,
        // each with both copies of its pages.
        let (mine, others): (Vec<Run>, Vec<Run>) =
            runs.into_iter().partition(|run| run.first_page < pages / 2);
        let (read_by_other, mut noted) = (AtomicU64::new(0), 0);
        let survey = std::thread::scope(|scope| {
            let other =
                || self.survey(&others, excluded, new(), |bytes| _ = read_by_other.fetch_add(bytes, Relaxed));
            let other = std::thread::Builder::new().name("hob-recovery".into()).spawn_scoped(scope, other)?;
            let mut survey = self.survey(&mine, excluded, new(), |bytes| {
                let others = read_by_other.load(Relaxed);
                progress.advance(bytes + others - std::mem::replace(&mut noted, others));
            })?;
            survey.merge(other.join().expect("it does not panic")?);
            Ok::<_, std::io::Error>(survey)
        })?;
        progress.advance(bytes_of(&others) - noted);
        let plan = match survey.finish() {
            Ring::Unfinished => return Ok(Outcome::Unfinished),
            Ring::Damaged { missing } => {
                return Ok(Outcome::Damaged(format!("page {missing} of the journal is on a missing device")));
            }
            Ring::Whole(mut plan) => {
                // A killed daemon leaves the newest records in memory.
                if let Some(log) = crash_log::read(&self.owner.0.to_le_bytes()) {
                    plan.continue_with(&log);
                }
                plan
            }
        };
        surveyed(&plan);
        let runs = runs_of_pages(plan.reads(), &ring.copies, self.segment_bytes);
        progress.expect(bytes_of(&runs));
        let present: Vec<_> =
            self.data.iter().map(|segment| (segment.ordinal, segment.place.device)).collect();
        let mut replay = match Replay::new(plan, self.segment_bytes, &present) {
            Ok(replay) => replay,
            Err(error) => return Ok(Outcome::Damaged(error.to_string())),
        };
        let mut stopped = None;
        read_runs(self.devices, &runs, |run, place, page| {
            stopped = match page.map(|page| replay.page(page)) {
                Some(Ok(())) => None,
                None | Some(Err(ReplayError::Changed { .. })) => {
                    Some(Outcome::Changed(run.copy, run.first_page + place))
                }
                Some(Err(error)) => Some(Outcome::Damaged(error.to_string())),
            };
            if place == 0 {
                progress.advance(run.bytes());
            }
            stopped.is_none()
        })?;
        if let Some(outcome) = stopped {
            return Ok(outcome);
        }
        let sums = tail::sums(self.devices, self.data, &replay.to_prove())?;
        Ok(Outcome::Recovered(Box::new(replay.finish(&sums))))
    }
}

fn bytes_of(runs: &[Run]) -> u64 {
    runs.iter().map(Run::bytes).sum()
}
