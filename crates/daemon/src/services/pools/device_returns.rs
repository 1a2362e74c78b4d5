//! Decides when a fenced device has returned, so that hob may use it again (docs/decisions/0073).
//!
//! A device counts as removed if a check since the fence has found that it was away. It also counts
//! as removed while its former descriptors fail at each check although it answers. A single read
//! error does not show that a device was removed. A removed device has returned when all checks have
//! succeeded for [`WAIT_MIN`]. Each attempt to use the device again doubles this time, up to
//! [`WAIT_MAX`].

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use hob_storage::pool::FormerSuperblock;
use tokio::time::Instant;

/// Time for which a device must answer before the first attempt to use it again.
const WAIT_MIN: Duration = Duration::from_secs(60);

/// Maximum of this time. After a device has worked for so long, the time is [`WAIT_MIN`] again.
const WAIT_MAX: Duration = Duration::from_secs(24 * 3600);

/// A device of a pool on this host.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct DevicePath {
    pub(super) pool: String,
    pub(super) path: PathBuf,
}

/// The fenced devices of this host, and those that have returned since hob started.
#[derive(Clone, Debug, Default)]
pub(super) struct DeviceReturns(Arc<Mutex<BTreeMap<DevicePath, ReturnWatch>>>);

impl DeviceReturns {
    /// Records that a device was fenced for a reason such as "fenced after 16 failed I/Os". Has no
    /// effect if the fence is known.
    pub(super) fn note_fence(&self, device: DevicePath, uuid: String, reason: String, now: Instant) {
        let mut watches = self.lock();
        match watches.get_mut(&device) {
            Some(watch) if watch.phase == Phase::Fenced && watch.uuid == uuid => {}
            Some(watch) => *watch = watch.after_fence(uuid, reason, now),
            None => _ = watches.insert(device, ReturnWatch::new(uuid, reason)),
        }
    }

    /// Forgets a device that was removed from its pool.
    pub(super) fn forget(&self, device: &DevicePath) {
        self.lock().remove(device);
    }

    /// Returns the devices that hob does not use, and that are not being checked.
    pub(super) fn idle(&self) -> Vec<DevicePath> {
        let watches = self.lock();
        let idle = watches.iter().filter(|(_, it)| it.phase != Phase::InUse && !it.is_checked);
        idle.map(|(device, _)| device.clone()).collect()
    }

    /// Returns true if hob has closed the device in order to format it.
    pub(super) fn is_closed(&self, device: &DevicePath) -> bool {
        self.with(device, |watch| watch.phase == Phase::Closed).unwrap_or_default()
    }

    /// Begins a check of the device, and returns the device's UUID; `None` if the device is in use
    /// or is being checked.
    pub(super) fn begin_check(&self, device: &DevicePath) -> Option<String> {
        self.with(device, |watch| {
            let begins = watch.phase != Phase::InUse && !watch.is_checked;
            watch.is_checked |= begins;
            begins.then(|| watch.uuid.clone())
        })?
    }

    /// Ends a check of the device.
    pub(super) fn end_check(&self, device: &DevicePath) {
        self.with(device, |watch| watch.is_checked = false);
    }

    /// Applies `change` to the watch of a device; returns `None` for an unknown device.
    pub(super) fn with<T>(
        &self,
        device: &DevicePath,
        change: impl FnOnce(&mut ReturnWatch) -> T,
    ) -> Option<T> {
        self.lock().get_mut(device).map(change)
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<DevicePath, ReturnWatch>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// How far a device has returned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    /// The device is fenced, and open in the pool.
    Fenced,
    /// hob has closed the device in order to format it.
    Closed,
    /// The device has returned.
    InUse,
}

/// Result of a check of a fenced device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum CheckResult {
    /// The former device is at its path, and answers.
    Answers,
    /// The former device is not at its path, or does not answer. The text is the error of the check.
    Away(String),
    /// The check failed with this error, and it is unknown whether the device was removed.
    Failed(String),
}

/// Result of a read through the descriptors that a device had before it was fenced.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum FormerDescriptors {
    /// The read works, or has not ended yet.
    Work,
    Fail,
}

/// The checks of one device since it was fenced.
#[derive(Debug)]
pub(super) struct ReturnWatch {
    /// UUID in the superblock of the device.
    uuid: String,
    /// The last superblock that this process wrote to the device; `None` before the first check.
    former: Option<FormerSuperblock>,
    /// Reason of the fence.
    reason: String,
    phase: Phase,
    is_checked: bool,
    /// True if a check has found that the device was away.
    was_away: bool,
    /// True if the former descriptors failed at the last check, at which the device answered.
    is_reconnected: bool,
    /// Time of the first of the latest successful checks; `None` if the last check did not succeed.
    answers_since: Option<Instant>,
    /// Error of the last check, or reason why the device is not used although it has returned.
    obstacle: Option<String>,
    /// Number of attempts to use the device again since it last worked for [`WAIT_MAX`], and the
    /// time of the last one.
    attempts: u32,
    last_attempt: Option<Instant>,
}

impl ReturnWatch {
    fn new(uuid: String, reason: String) -> ReturnWatch {
        ReturnWatch {
            uuid,
            former: None,
            reason,
            phase: Phase::Fenced,
            is_checked: false,
            was_away: false,
            is_reconnected: false,
            answers_since: None,
            obstacle: None,
            attempts: 0,
            last_attempt: None,
        }
    }

    /// Returns the watch of the same device after another fence.
    fn after_fence(&self, uuid: String, reason: String, now: Instant) -> ReturnWatch {
        let is_recent = self.last_attempt.is_some_and(|at| now.duration_since(at) < WAIT_MAX);
        let attempts = if is_recent { self.attempts } else { 0 };
        ReturnWatch {
            attempts,
            last_attempt: self.last_attempt,
            is_checked: self.is_checked,
            ..ReturnWatch::new(uuid, reason)
        }
    }

    /// Returns how long the device must answer before the next attempt.
    fn wait(&self) -> Duration {
        WAIT_MIN.saturating_mul(1_u32.checked_shl(self.attempts).unwrap_or(u32::MAX)).min(WAIT_MAX)
    }

    /// Records the result of a check. Returns true if the device has returned.
    pub(super) fn note_result(&mut self, result: CheckResult, now: Instant) -> bool {
        self.was_away |= matches!(result, CheckResult::Away(_));
        match result {
            CheckResult::Answers => {
                let since = *self.answers_since.get_or_insert(now);
                self.obstacle = None;
                self.was_removed() && now.duration_since(since) >= self.wait()
            }
            CheckResult::Away(why) | CheckResult::Failed(why) => {
                self.answers_since = None;
                self.obstacle = Some(why);
                false
            }
        }
    }

    fn was_removed(&self) -> bool {
        self.was_away || self.is_reconnected
    }

    /// Returns true if only the former descriptors can show that the device was removed.
    pub(super) fn needs_descriptors(&self) -> bool {
        !self.was_away && self.phase == Phase::Fenced
    }

    /// Records a read through the former descriptors of a device that answers. The time for which
    /// the device must answer begins when the descriptors begin to fail.
    pub(super) fn note_descriptors(&mut self, descriptors: FormerDescriptors) {
        let fail = descriptors == FormerDescriptors::Fail;
        if fail != self.is_reconnected {
            (self.is_reconnected, self.answers_since) = (fail, None);
        }
    }

    /// Records why hob does not use the device yet, although it has returned.
    pub(super) fn note_obstacle(&mut self, why: String) {
        self.obstacle = Some(why);
    }

    /// Returns the last superblock that this process wrote to the device, if it is known.
    pub(super) fn former(&self) -> Option<FormerSuperblock> {
        self.former.clone()
    }

    /// Records the last superblock that this process wrote to the device.
    pub(super) fn note_former(&mut self, former: FormerSuperblock) {
        self.former = Some(former);
    }

    /// Records that hob has closed the device.
    pub(super) fn note_closed(&mut self) {
        self.phase = Phase::Closed;
    }

    /// Records that the device could not be used again. `formatted` has the UUID and the superblock
    /// that the device got if hob had formatted it already.
    pub(super) fn note_failure(
        &mut self,
        why: String,
        formatted: Option<(String, FormerSuperblock)>,
        now: Instant,
    ) {
        self.attempts = self.attempts.saturating_add(1);
        (self.last_attempt, self.answers_since, self.obstacle) = (Some(now), None, Some(why));
        if let Some((uuid, former)) = formatted {
            (self.uuid, self.former) = (uuid, Some(former));
        }
    }

    /// Records that the device is in use again, unless it was fenced during its return.
    pub(super) fn note_return(&mut self, now: Instant) {
        self.attempts = self.attempts.saturating_add(1);
        self.last_attempt = Some(now);
        if self.phase == Phase::Closed {
            (self.phase, self.obstacle) = (Phase::InUse, None);
        }
    }

    /// Describes the state of the device for `hob health`; `None` if the device is in use.
    pub(super) fn status(&self, device: &DevicePath) -> Option<String> {
        let DevicePath { pool, path } = device;
        let (reason, wait) = (&self.reason, self.wait().as_secs());
        let remove = format!("'hob pool remove-device {pool} {}'", path.display());
        let status = match (&self.obstacle, self.answers_since) {
            _ if self.phase == Phase::InUse => return None,
            (Some(why), Some(_)) => format!("has returned, but is not used again yet: {why}"),
            (Some(why), None) if !self.was_removed() => format!(
                "failed a check: {why}; that does not show that the device was removed from the host, so hob does \
                 not format it; connect it again, or remove it from the pool with {remove}"
            ),
            (Some(why), None) => format!(
                "is not usable: {why}; hob formats the former device and uses it again after it has answered for \
                 {wait} s; {remove} removes it from the pool"
            ),
            (None, Some(_)) if self.was_removed() => format!(
                "answers again; hob formats it and uses it again after it has answered for {wait} s; \
                 {remove} removes it from the pool"
            ),
            (None, _) => format!(
                "answers and was not removed from the host since then, so it counts as failing and does not \
                 return by itself; remove it from the pool with {remove}"
            ),
        };
        Some(format!("{reason}; the device {status}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn seconds(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    fn watch() -> ReturnWatch {
        ReturnWatch::new("uuid".to_owned(), "fenced".to_owned())
    }

    fn away() -> CheckResult {
        CheckResult::Away("no such file".to_owned())
    }

    fn failed() -> CheckResult {
        CheckResult::Failed("input/output error".to_owned())
    }

    #[test]
    fn a_device_returns_when_it_was_away_and_has_answered_for_a_minute() {
        let start = Instant::now();
        let at = |after| start + seconds(after);
        let mut watch = watch();
        assert!(!watch.note_result(away(), at(0)));
        assert!(!watch.note_result(CheckResult::Answers, at(10)));
        assert!(!watch.note_result(CheckResult::Answers, at(69)));
        assert!(!watch.note_result(away(), at(70)), "it flickers");
        assert!(!watch.note_result(CheckResult::Answers, at(80)));
        assert!(watch.note_result(CheckResult::Answers, at(140)));
    }

    #[test]
    fn a_device_that_always_answers_does_not_return() {
        let start = Instant::now();
        let mut watch = watch();
        for minute in 0..10_000 {
            assert!(!watch.note_result(CheckResult::Answers, start + seconds(60 * minute)));
        }
    }

    #[test]
    fn a_device_with_read_errors_does_not_return_before_it_was_removed() {
        let start = Instant::now();
        let at = |after| start + seconds(after);
        let mut watch = watch();
        assert!(!watch.note_result(failed(), at(0)));
        for after in [10, 80, 100_000] {
            assert!(!watch.note_result(CheckResult::Answers, at(after)));
        }
        assert!(!watch.note_result(away(), at(100_010)));
        assert!(!watch.note_result(CheckResult::Answers, at(100_020)));
        assert!(!watch.note_result(failed(), at(100_030)), "it flickers");
        assert!(!watch.note_result(CheckResult::Answers, at(100_090)));
        assert!(watch.note_result(CheckResult::Answers, at(100_150)));
    }

    /// Checks a device that answers, and reads through its former descriptors.
    fn check(watch: &mut ReturnWatch, descriptors: FormerDescriptors, now: Instant) -> bool {
        assert!(watch.needs_descriptors());
        watch.note_descriptors(descriptors);
        watch.note_result(CheckResult::Answers, now)
    }

    #[test]
    fn a_device_whose_descriptors_fail_returns() {
        let start = Instant::now();
        let mut watch = watch();
        for after in (0..60).step_by(10) {
            assert!(!check(&mut watch, FormerDescriptors::Fail, start + seconds(after)), "{after}");
        }
        assert!(check(&mut watch, FormerDescriptors::Fail, start + seconds(60)));
        watch.note_closed();
        assert!(!watch.needs_descriptors() && watch.was_removed());
    }

    /// The descriptors of a device that was removed never work again.
    #[test]
    fn a_device_whose_descriptors_fail_once_does_not_return() {
        let start = Instant::now();
        let mut watch = watch();
        for check_number in 0..100 {
            let fails = check_number % 6 > 0;
            let descriptors = if fails { FormerDescriptors::Fail } else { FormerDescriptors::Work };
            let now = start + seconds(10 * check_number);
            assert!(!check(&mut watch, descriptors, now), "{check_number}");
        }
    }

    #[test]
    fn each_attempt_doubles_the_wait_until_the_device_has_worked_for_a_day() {
        let start = Instant::now();
        let mut watch = watch();
        let mut now = start;
        let mut waits = Vec::new();
        for attempt in 0..14 {
            watch.note_result(away(), now);
            watch.note_result(CheckResult::Answers, now);
            waits.push(watch.wait().as_secs());
            now += watch.wait();
            assert!(watch.note_result(CheckResult::Answers, now), "{waits:?}");
            watch.note_closed();
            match attempt % 2 {
                0 => watch.note_return(now),
                _ => watch.note_failure("it is busy".to_owned(), None, now),
            }
            watch = watch.after_fence("uuid".to_owned(), "fenced".to_owned(), now);
        }
        assert_eq!(waits[..5], [60, 120, 240, 480, 960]);
        assert!(waits[..6].iter().sum::<u64>() > 3600, "five returns within an hour");
        assert_eq!(waits[11..], [86_400; 3]);
        watch.note_return(now);
        let watch = watch.after_fence("uuid".to_owned(), "fenced".to_owned(), now + WAIT_MAX);
        assert_eq!(watch.wait(), WAIT_MIN);
    }

    #[test]
    fn the_status_says_what_happens_next() {
        let now = Instant::now();
        let device = DevicePath { pool: "p".to_owned(), path: "/a".into() };
        let mut watch = watch();
        let has = |watch: &ReturnWatch, part: &str| {
            let status = watch.status(&device).unwrap();
            assert!(status.starts_with("fenced; the device ") && status.contains(part), "{status}");
        };
        watch.note_result(CheckResult::Answers, now);
        has(&watch, "remove it from the pool with 'hob pool remove-device p /a'");
        watch.note_result(failed(), now);
        has(&watch, "failed a check: input/output error; that does not show that the device was removed");
        has(&watch, "connect it again, or remove it from the pool with 'hob pool remove-device p /a'");
        watch.note_result(away(), now);
        has(
            &watch,
            "no such file; hob formats the former device and uses it again after it has answered for 60 s",
        );
        watch.note_result(CheckResult::Answers, now);
        has(&watch, "answers again");
        watch.note_obstacle("vm has data on it".to_owned());
        has(&watch, "has returned, but is not used again yet: vm has data on it");
        watch.note_failure("it is busy".to_owned(), None, now);
        has(
            &watch,
            "it is busy; hob formats the former device and uses it again after it has answered for 120 s",
        );
        watch.note_closed();
        watch.note_return(now);
        assert_eq!(watch.status(&device), None);
    }

    #[test]
    fn a_fence_that_is_known_changes_nothing() {
        let now = Instant::now();
        let returns = DeviceReturns::default();
        let device = DevicePath { pool: "p".to_owned(), path: "/a".into() };
        let fence =
            |uuid: &str| returns.note_fence(device.clone(), uuid.to_owned(), "fenced".to_owned(), now);
        fence("uuid");
        assert_eq!(returns.begin_check(&device).as_deref(), Some("uuid"));
        assert_eq!((returns.begin_check(&device), returns.idle()), (None, vec![]));
        returns.with(&device, |watch| watch.note_result(away(), now));
        fence("uuid");
        assert_eq!(returns.with(&device, |watch| watch.was_away), Some(true));
        returns.end_check(&device);
        assert_eq!(returns.idle(), std::slice::from_ref(&device));
        returns.with(&device, |watch| {
            watch.note_closed();
            watch.note_return(now);
        });
        assert!(returns.idle().is_empty() && returns.begin_check(&device).is_none());
        fence("another");
        assert_eq!(returns.begin_check(&device).as_deref(), Some("another"));
        assert_eq!(returns.with(&device, |watch| (watch.was_away, watch.attempts)), Some((false, 1)));
        returns.forget(&device);
        assert!(returns.begin_check(&device).is_none());
    }

    #[test]
    fn a_device_that_is_fenced_during_its_return_is_watched() {
        let now = Instant::now();
        let returns = DeviceReturns::default();
        let device = DevicePath { pool: "p".to_owned(), path: "/a".into() };
        returns.note_fence(device.clone(), "uuid".to_owned(), "fenced".to_owned(), now);
        returns.with(&device, ReturnWatch::note_closed);
        returns.note_fence(device.clone(), "formatted".to_owned(), "fenced".to_owned(), now);
        returns.with(&device, |watch| watch.note_return(now));
        assert_eq!(returns.begin_check(&device).as_deref(), Some("formatted"));
        assert_eq!(returns.with(&device, |watch| watch.attempts), Some(1));
    }
}
