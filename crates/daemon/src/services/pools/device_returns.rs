//! Decides when a fenced device has returned, so that hob may use it again (docs/decisions/0073).
//!
//! A device counts as removed if a check of it has failed since the fence, or if its former
//! descriptors fail although it answers. It has returned when all checks have succeeded for
//! [`WAIT_MIN`]. Each attempt to use the device again doubles this time,
//! up to [`WAIT_MAX`].

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

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

/// The checks of one device since it was fenced.
#[derive(Debug)]
pub(super) struct ReturnWatch {
    /// UUID in the superblock of the device.
    uuid: String,
    /// Reason of the fence.
    reason: String,
    phase: Phase,
    is_checked: bool,
    /// True if the device was removed from the host, or did not answer.
    was_away: bool,
    /// Time of the first of the latest successful checks; `None` if the last check failed.
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
            reason,
            phase: Phase::Fenced,
            is_checked: false,
            was_away: false,
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
    pub(super) fn note_answer(&mut self, answer: Result<(), String>, now: Instant) -> bool {
        match answer {
            Ok(()) => {
                let since = *self.answers_since.get_or_insert(now);
                self.obstacle = None;
                self.was_away && now.duration_since(since) >= self.wait()
            }
            Err(why) => {
                self.was_away = true;
                self.answers_since = None;
                self.obstacle = Some(why);
                false
            }
        }
    }

    /// Returns true if it is unknown whether the device was removed from the host.
    pub(super) fn may_be_reconnected(&self) -> bool {
        !self.was_away && self.phase == Phase::Fenced
    }

    /// Records that the device was removed from the host and connected again.
    pub(super) fn note_reconnection(&mut self) {
        self.was_away = true;
    }

    /// Records why hob does not use the device yet, although it has returned.
    pub(super) fn note_obstacle(&mut self, why: String) {
        self.obstacle = Some(why);
    }

    /// Records that hob has closed the device.
    pub(super) fn note_closed(&mut self) {
        self.phase = Phase::Closed;
    }

    /// Records that the device could not be used again. `uuid` is the UUID that the device got if
    /// hob had formatted it already.
    pub(super) fn note_failure(&mut self, why: String, uuid: Option<String>, now: Instant) {
        self.attempts = self.attempts.saturating_add(1);
        (self.last_attempt, self.answers_since, self.obstacle) = (Some(now), None, Some(why));
        if let Some(uuid) = uuid {
            self.uuid = uuid;
        }
    }

    /// Records that the device is in use again.
    pub(super) fn note_return(&mut self, now: Instant) {
        self.attempts = self.attempts.saturating_add(1);
        (self.phase, self.last_attempt, self.obstacle) = (Phase::InUse, Some(now), None);
    }

    /// Describes the state of the device for `hob health`; `None` if the device is in use.
    pub(super) fn status(&self, device: &DevicePath) -> Option<String> {
        let DevicePath { pool, path } = device;
        let (reason, wait) = (&self.reason, self.wait().as_secs());
        let remove = format!("'hob pool remove-device {pool} {}'", path.display());
        let status = match (&self.obstacle, self.answers_since) {
            _ if self.phase == Phase::InUse => return None,
            (Some(why), Some(_)) => format!("has returned, but is not used again yet: {why}"),
            (Some(why), None) => format!(
                "is not usable: {why}; hob formats the former device and uses it again after it has answered for \
                 {wait} s; {remove} removes it from the pool"
            ),
            (None, Some(_)) if self.was_away => format!(
                "answers again; hob formats it and uses it again after it has answered for {wait} s; \
                 {remove} removes it from the pool"
            ),
            (None, _) => format!(
                "has answered all checks since then, so it counts as failing and does not return by itself; \
                 remove it from the pool with {remove}"
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

    fn away() -> Result<(), String> {
        Err("no such file".to_owned())
    }

    #[test]
    fn a_device_returns_when_it_was_away_and_has_answered_for_a_minute() {
        let start = Instant::now();
        let at = |after| start + seconds(after);
        let mut watch = watch();
        assert!(!watch.note_answer(away(), at(0)));
        assert!(!watch.note_answer(Ok(()), at(10)));
        assert!(!watch.note_answer(Ok(()), at(69)));
        assert!(!watch.note_answer(away(), at(70)), "it flickers");
        assert!(!watch.note_answer(Ok(()), at(80)));
        assert!(watch.note_answer(Ok(()), at(140)));
    }

    #[test]
    fn a_device_that_always_answers_does_not_return() {
        let start = Instant::now();
        let mut watch = watch();
        assert!((0..10_000).all(|minute| !watch.note_answer(Ok(()), start + seconds(60 * minute))));
    }

    #[test]
    fn a_device_whose_descriptors_fail_returns() {
        let start = Instant::now();
        let mut watch = watch();
        assert!(!watch.note_answer(Ok(()), start) && watch.may_be_reconnected());
        watch.note_reconnection();
        assert!(!watch.may_be_reconnected());
        assert!(watch.note_answer(Ok(()), start + seconds(60)));
    }

    #[test]
    fn each_attempt_doubles_the_wait_until_the_device_has_worked_for_a_day() {
        let start = Instant::now();
        let mut watch = watch();
        let mut now = start;
        let mut waits = Vec::new();
        for attempt in 0..14 {
            watch.note_answer(away(), now);
            watch.note_answer(Ok(()), now);
            waits.push(watch.wait().as_secs());
            now += watch.wait();
            assert!(watch.note_answer(Ok(()), now), "{waits:?}");
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
        watch.note_answer(Ok(()), now);
        has(&watch, "remove it from the pool with 'hob pool remove-device p /a'");
        watch.note_answer(away(), now);
        has(
            &watch,
            "no such file; hob formats the former device and uses it again after it has answered for 60 s",
        );
        watch.note_answer(Ok(()), now);
        has(&watch, "answers again");
        watch.note_obstacle("vm has data on it".to_owned());
        has(&watch, "has returned, but is not used again yet: vm has data on it");
        watch.note_failure("it is busy".to_owned(), None, now);
        has(
            &watch,
            "it is busy; hob formats the former device and uses it again after it has answered for 120 s",
        );
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
        returns.with(&device, |watch| watch.note_answer(away(), now));
        fence("uuid");
        assert_eq!(returns.with(&device, |watch| watch.was_away), Some(true));
        returns.end_check(&device);
        assert_eq!(returns.idle(), std::slice::from_ref(&device));
        returns.with(&device, |watch| watch.note_return(now));
        assert!(returns.idle().is_empty() && returns.begin_check(&device).is_none());
        fence("another");
        assert_eq!(returns.begin_check(&device).as_deref(), Some("another"));
        assert_eq!(returns.with(&device, |watch| (watch.was_away, watch.attempts)), Some((false, 1)));
        returns.forget(&device);
        assert!(returns.begin_check(&device).is_none());
    }
}
