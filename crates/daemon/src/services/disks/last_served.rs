//! The record of when hob last served each disk with a persistent cache, and the detection of later
//! changes of a disk's backing by another program (docs/decisions/0033).
//!
//! After hob was killed, another program may have changed a backing, for example an operator who
//! restored a backup. hob must not write dirty data over such a backing. hob's own writes are not
//! later than its last record plus [`MARGIN_NS`].

use std::collections::BTreeSet;
use std::convert::Infallible;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime};

use super::Disks;
use super::file_questions::ask_all;
use crate::hardware::{ChangeDetector, ChangeTimes};
use crate::services::flash::blocking;
use crate::services::registry::{DiskEntry, DiskPhase, Registry};
use crate::state::{CacheOwner, LastServed, Served};

/// Interval at which hob records the served disks.
const RECORD_EVERY: Duration = Duration::from_secs(2);

/// Maximum time that hob waits for the modification times of the backings' files.
const TIMES_MAX: Duration = Duration::from_secs(5);

/// A change of a backing later than hob's last record plus this time, in nanoseconds, was made by
/// another program. A power cut loses the records of the last half minute, and a busy host delays
/// records.
const MARGIN_NS: u64 = 120_000_000_000;

/// Maximum time by which the timestamp of a write can be earlier than a record that was made before
/// the write, nanoseconds. The kernel's clock for timestamps ticks every 1 to 10 ms.
const TICK_NS: u64 = 100_000_000;

/// A change of a backing after hob last served its disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::services) struct LaterChange {
    served_ns: u64,
    changed_ns: u64,
    /// True if a program has set the file's modification time to an earlier time. Restoring a
    /// backup with its file times does this.
    is_set_back: bool,
}

impl LaterChange {
    /// Returns the change by another program after `served`, if the file's times prove such a
    /// change. A record of an earlier journal ring proves nothing: an older version of hob, which
    /// keeps no records, may have served the disk later.
    fn of(served: Served, ring: u32, times: ChangeTimes) -> Option<LaterChange> {
        let is_later = |at_ns: u64| at_ns > served.at_ns.saturating_add(MARGIN_NS);
        // ctime alone also changes with owner, permissions and names. hob's own writes after the
        // record are later than the record.
        let is_other = times.modified_ns != served.modified_ns;
        let is_older = times.modified_ns < served.at_ns.saturating_sub(TICK_NS);
        let is_set_back = is_other && is_older && is_later(times.changed_ns);
        let is_changed = is_set_back || is_later(times.modified_ns);
        let changed_ns = if is_set_back { times.changed_ns } else { times.modified_ns };
        (served.ring == ring && is_changed).then_some(LaterChange {
            served_ns: served.at_ns,
            changed_ns,
            is_set_back,
        })
    }

    /// Returns the change as a sentence without a period.
    pub(super) fn reason(self) -> String {
        let what = if self.is_set_back {
            "the modification time of its backing was set to an earlier time"
        } else {
            "its backing was changed"
        };
        // The times alone do not distinguish these cases.
        let or = if self.is_set_back {
            "; hob cannot distinguish this from a power cut that lost the file's times after a change of its owner or \
            permissions"
        } else {
            ""
        };
        let (changed, served) = (utc(self.changed_ns), utc(self.served_ns));
        format!(
            "{what} by another program at {changed}; hob last served the disk at {served}, and ended without closing \
             its cache{or}"
        )
    }
}

/// A disk for which hob records when it was last served.
struct ServedDisk {
    owner: CacheOwner,
    ring: u32,
    witness: ChangeDetector,
}

impl ServedDisk {
    /// Returns the disk if it has a persistent cache.
    fn of(disk: &DiskEntry) -> Option<ServedDisk> {
        let journal = disk.cache()?.journal?;
        let witness = disk.measure.as_ref()?.witness.clone()?;
        Some(ServedDisk { owner: journal.owner, ring: journal.ring, witness })
    }

    /// Returns true if hob may write to the disk's backing.
    fn is_in_use(disk: &&DiskEntry) -> bool {
        matches!(disk.phase, DiskPhase::Online(_)) || disk.offline_drain.is_some()
    }

    /// Returns the entry that says that hob serves the disk now. `at_ns` is the current time, or
    /// the time of the backing's last change if that is later. Returns `None` if the backing has no
    /// reliable timestamps.
    fn record(&self) -> Option<(CacheOwner, Served)> {
        // A write after this moment is later than the record, whatever the file's times show.
        let now_ns = now_ns();
        let times = self.witness.times()?;
        // The clock may have been set back since the file was changed.
        let at_ns = now_ns.max(times.latest_ns());
        Some((self.owner, Served { ring: self.ring, at_ns, modified_ns: times.modified_ns }))
    }
}

/// The file that records when hob last served each disk. hob reads the file when the record is
/// first used.
#[derive(Debug, Default)]
pub(super) struct Record {
    recorded: Mutex<Recorded>,
    /// Caches for which the times of the backing's file could not be read within [`TIMES_MAX`].
    hanging: Arc<Mutex<BTreeSet<CacheOwner>>>,
}

#[derive(Debug, Default)]
struct Recorded {
    file: Option<LastServed>,
    /// True if the last write of the file failed.
    is_failing: bool,
}

impl Record {
    fn lock(&self) -> MutexGuard<'_, Recorded> {
        self.recorded.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Runs `questions`, functions that read the state of a backing's file, on few threads, and
    /// returns their results. A file whose filesystem hangs is left out. Later calls also leave the
    /// file out until its filesystem has answered, so that the file does not occupy many threads.
    pub(super) async fn ask<T, F>(&self, questions: Vec<(CacheOwner, F)>) -> Vec<T>
    where
        T: Send + 'static,
        F: FnOnce() -> Option<T> + Send + 'static,
    {
        let (mut asked, mut states) = (Vec::new(), Vec::new());
        for (owner, question) in questions {
            if lock(&self.hanging).contains(&owner) {
                continue;
            }
            // True while a thread waits for the file.
            let is_waiting = Arc::new(AtomicBool::new(false));
            states.push((owner, is_waiting.clone()));
            let all_hanging = self.hanging.clone();
            asked.push(move || {
                is_waiting.store(true, Ordering::Relaxed);
                let answer = question();
                // The flag is set and the entry removed under one lock, so that the caller cannot
                // stop waiting for this question between the two steps.
                let mut hanging = lock(&all_hanging);
                is_waiting.store(false, Ordering::Relaxed);
                hanging.remove(&owner);
                answer
            });
        }
        let answers = ask_all(asked, TIMES_MAX).await;
        let mut hanging = lock(&self.hanging);
        let waiting = states.into_iter().filter(|(_, is_waiting)| is_waiting.load(Ordering::Relaxed));
        hanging.extend(waiting.map(|(owner, _)| owner));
        answers.into_iter().flatten().flatten().collect()
    }
}

fn lock(owners: &Mutex<BTreeSet<CacheOwner>>) -> MutexGuard<'_, BTreeSet<CacheOwner>> {
    owners.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Recorded {
    /// Returns the file; `None` without a state directory. May block.
    fn file(&mut self, registry: &Registry) -> Option<&mut LastServed> {
        if self.file.is_none() {
            self.file = registry.directory().map(|directory| LastServed::read(&directory));
        }
        self.file.as_mut()
    }

    /// Records that disks were served. Forgets caches that are not in `known`. May block.
    fn note(&mut self, registry: &Registry, served: Vec<(CacheOwner, Served)>, known: &BTreeSet<CacheOwner>) {
        let Some(file) = self.file(registry) else { return };
        for (owner, served) in served {
            file.note(owner, served);
        }
        file.retain(|owner| known.contains(&owner));
        let written = file.write();
        if let Err(error) = &written
            && !self.is_failing
        {
            tracing::warn!(
                "cannot record that disks are served: {error}; if hob is killed now, disks with dirty data may \
                 stay offline at the next start, because hob takes its own writes for those of another program"
            );
        }
        self.is_failing = written.is_err();
    }
}

impl Disks {
    /// Records every two seconds which disks are served, until the future is dropped.
    pub(in crate::services) async fn record_served_disks(self) -> Infallible {
        loop {
            self.record_served_disks_now().await;
            tokio::time::sleep(RECORD_EVERY).await;
        }
    }

    pub(in crate::services) async fn record_served_disks_now(&self) {
        let disks: Vec<ServedDisk> = {
            let inner = self.registry.inner();
            inner.disks.values().filter(ServedDisk::is_in_use).filter_map(ServedDisk::of).collect()
        };
        self.record(disks).await;
    }

    /// Records that a disk is served, before its guests can change the backing.
    pub(super) async fn record_service(&self, name: &str) {
        let disk = self.registry.inner().disks.get(name).and_then(ServedDisk::of);
        self.record(disk.into_iter().collect()).await;
    }

    async fn record(&self, disks: Vec<ServedDisk>) {
        if disks.is_empty() {
            return;
        }
        let question = |disk: ServedDisk| (disk.owner, move || disk.record());
        let served = self.last_served.ask(disks.into_iter().map(question).collect()).await;
        if served.is_empty() {
            return;
        }
        let known: BTreeSet<CacheOwner> = {
            let inner = self.registry.inner();
            let journals = inner.disks.values().filter_map(|disk| disk.cache()?.journal);
            journals.map(|journal| journal.owner).collect()
        };
        let (record, registry) = (self.last_served.clone(), self.registry.clone());
        if let Err(error) = blocking(move || record.lock().note(&registry, served, &known)).await {
            tracing::warn!("{error}");
        }
    }

    /// Returns the change of a disk's backing after hob last served the disk, if the file times at
    /// the opening (`times`) prove such a change.
    pub(super) async fn later_change(&self, name: &str, times: Option<ChangeTimes>) -> Option<LaterChange> {
        let times = times?;
        let disk = self.registry.inner().disks.get(name).and_then(ServedDisk::of)?;
        let (record, registry) = (self.last_served.clone(), self.registry.clone());
        let compare = move || {
            let served = record.lock().file(&registry)?.of(disk.owner)?;
            LaterChange::of(served, disk.ring, times)
        };
        blocking(compare).await.ok()?
    }
}

fn now_ns() -> u64 {
    let since_1970 = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since_1970.as_nanos()).unwrap_or(u64::MAX)
}

/// Returns a time in nanoseconds since 1970 as date and time of day in UTC. The algorithm is
/// `civil_from_days` of H. Hinnant, "chrono-Compatible Low-Level Date Algorithms" (2013).
fn utc(ns: u64) -> String {
    let seconds = ns / 1_000_000_000;
    let (days, second) = (seconds / 86_400, seconds % 86_400);
    // Days since 1 March of the year 0; a cycle of the calendar has 400 years.
    let (cycle, day) = ((days + 719_468) / 146_097, (days + 719_468) % 146_097);
    let year = (day - day / 1_460 + day / 36_524 - day / 146_096) / 365;
    let day_of_year = day - (365 * year + year / 4 - year / 100);
    let month = (5 * day_of_year + 2) / 153;
    let day_of_month = day_of_year - (153 * month + 2) / 5 + 1;
    let month = if month < 10 { month + 3 } else { month - 9 };
    let year = year + cycle * 400 + u64::from(month <= 2);
    let (hours, minutes, seconds) = (second / 3600, second / 60 % 60, second % 60);
    format!("{year:04}-{month:02}-{day_of_month:02} {hours:02}:{minutes:02}:{seconds:02} UTC")
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: u64 = 1_000_000_000;

    #[tokio::test]
    async fn a_file_whose_filesystem_hangs_is_asked_once_and_delays_no_other_one() {
        type Question = Box<dyn FnOnce() -> Option<u32> + Send>;
        let says = |number: u32| -> Question { Box::new(move || Some(number)) };
        let (hung, other) = (CacheOwner(1), CacheOwner(2));
        let record = Record::default();
        let (end, ends) = std::sync::mpsc::channel();
        let hangs: Question = Box::new(move || ends.recv().ok());
        assert!(record.ask(vec![(hung, hangs)]).await.is_empty());
        let mut answers = Vec::new();
        while answers.is_empty() {
            answers = record.ask(vec![(hung, says(3)), (other, says(2))]).await;
        }
        assert_eq!(answers, [2]);
        end.send(1).unwrap();
        while record.ask(vec![(hung, says(3))]).await.is_empty() {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }

    #[test]
    fn only_times_after_the_last_record_and_a_margin_prove_a_change() {
        let modified_ns = 999_990 * SECOND;
        let served = Served { ring: 7, at_ns: 1_000_000 * SECOND, modified_ns };
        let change = |modified: u64, changed: u64, ring| {
            let times = ChangeTimes { modified_ns: modified * SECOND, changed_ns: changed * SECOND };
            LaterChange::of(served, ring, times).map(|later| (later.changed_ns / SECOND, later.is_set_back))
        };
        // hob's own writes, up to the margin.
        assert_eq!(change(999_999, 999_999, 7), None);
        assert_eq!(change(1_000_120, 1_000_120, 7), None);
        assert_eq!(change(1_000_121, 1_000_121, 7), Some((1_000_121, false)));
        // Another owner, or another name.
        assert_eq!(change(999_990, 2_000_000, 7), None);
        assert_eq!(change(1_000_001, 2_000_000, 7), None);
        // A backup that was restored with its old time of modification: before or after the last
        // write of hob.
        assert_eq!(change(5, 1_000_121, 7), Some((1_000_121, true)));
        assert_eq!(change(999_995, 1_000_121, 7), Some((1_000_121, true)));
        // A program set the time of modification forward.
        assert_eq!(change(2_000_000, 1_000_000, 7), Some((2_000_000, false)));
        // The clock was set back: every change looks older.
        assert_eq!(change(900_000, 900_000, 7), None);
        // The disk was served with another journal ring since.
        assert_eq!(change(2_000_000, 2_000_000, 8), None);
        let never = Served { ring: 7, at_ns: u64::MAX, modified_ns };
        let times = ChangeTimes { modified_ns: u64::MAX, changed_ns: u64::MAX };
        assert_eq!(LaterChange::of(never, 7, times), None);
    }

    #[test]
    fn a_reason_names_both_times() {
        let of = |is_set_back| {
            LaterChange { served_ns: 0, changed_ns: 1_709_251_199 * SECOND, is_set_back }.reason()
        };
        let said = of(false);
        assert!(said.starts_with("its backing was changed by another program at 2024-02-29 23:59:59 UTC"));
        assert!(said.contains("last served the disk at 1970-01-01 00:00:00 UTC"), "{said}");
        assert!(!said.contains("power cut"), "{said}");
        let said = of(true);
        assert!(said.contains("was set to an earlier time by another program"), "{said}");
        assert!(
            said.contains("cannot distinguish this from a power cut that lost the file's times"),
            "{said}"
        );
    }

    #[test]
    fn times_are_dates() {
        for (seconds, text) in [
            (951_782_400, "2000-02-29 00:00:00 UTC"),
            (1_704_067_199, "2023-12-31 23:59:59 UTC"),
            (1_740_787_200, "2025-03-01 00:00:00 UTC"),
            (4_107_542_400, "2100-03-01 00:00:00 UTC"),
        ] {
            assert_eq!(utc(seconds * SECOND + 5), text);
        }
    }
}
