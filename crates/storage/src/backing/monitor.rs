//! The connection state of a backing, for threads other than the shard's.
//!
//! The shard's thread updates a [`Monitor`] with every request that it starts or ends. Other
//! threads read the monitor without calling the shard, so a shard or backing that hangs does not
//! delay them. Ages are computed when they are read, so that they are always current.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant as Clock};

use hob_engine::io::{BufferSlice, Io, IoError, IoOp};
use hob_engine::units::{Instant, IoId};

/// A backing is slow while its oldest request has waited longer than this.
pub const SLOW_AFTER: Duration = Duration::from_secs(2);

/// A backing counts as failing until this time has passed without a failed request.
pub const FAILING_FOR: Duration = Duration::from_secs(60);

/// Value of `oldest_ns` while no request is in flight.
const NONE: u64 = u64::MAX;

/// The connection state of a backing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Condition {
    /// The backing is connected, and no request has waited longer than [`SLOW_AFTER`].
    Connected,
    /// The backing is connected, and its oldest request has waited longer than [`SLOW_AFTER`].
    Slow {
        /// Age of the oldest request in flight to the backing.
        oldest: Duration,
        /// Number of requests in flight.
        waiting: u64,
    },
    /// The backing is connected, and answered a request with an error within [`FAILING_FOR`].
    Failing {
        /// Time since the first error of the present series of errors.
        since: Duration,
        /// Number of failed requests within the last minute.
        last_minute: u64,
        /// Operation and error of the request that failed last.
        error: String,
    },
    /// The connection to the backing is lost, or an object store fails all calls, and hob tries
    /// again.
    Reconnecting {
        /// Length of the backing's outage so far.
        outage: Duration,
        /// Why the connection to the backing was lost, or why the last attempt to connect failed.
        error: String,
        /// Number of requests that wait for the backing.
        waiting: u64,
    },
    /// The connection to the backing is lost for good, and every request fails.
    Failed {
        /// Length of the backing's outage so far.
        outage: Duration,
        /// Why hob does not use the backing again.
        error: String,
    },
}

/// Shared connection state of one backing.
#[derive(Debug)]
pub struct Monitor {
    /// Clock reading that corresponds to the shard's time 0, set when the backing is attached.
    origin: OnceLock<Clock>,
    /// Start of the oldest request in flight, in nanoseconds of the shard's time, or [`NONE`].
    oldest_ns: AtomicU64,
    /// Time of hob's own unanswered question to an idle server, in nanoseconds of the shard's time,
    /// or [`NONE`].
    asked_ns: AtomicU64,
    /// Number of requests in flight.
    waiting: AtomicU64,
    outage: Mutex<Option<Outage>>,
    failures: Mutex<Option<Failures>>,
    /// Number of times that the connection was lost or restored.
    connection_changes: AtomicU64,
}

/// Period without a connection to the backing.
#[derive(Clone, Debug)]
struct Outage {
    since: Clock,
    error: String,
    is_final: bool,
}

/// A series of requests that the backing answered with an error. The series ends when no request
/// has failed for [`FAILING_FOR`].
#[derive(Debug)]
struct Failures {
    since: Clock,
    /// Failed requests of the last minute: a second, counted from `since`, and the number of
    /// requests that failed in this second.
    counts: VecDeque<(u64, u64)>,
    last: Clock,
    operation: IoOp,
    error: IoError,
}

impl Failures {
    fn count(&mut self, now: Clock) {
        let second = now.saturating_duration_since(self.since).as_secs();
        match self.counts.back_mut() {
            Some((at, count)) if *at == second => *count += 1,
            _ => self.counts.push_back((second, 1)),
        }
        while self.counts.front().is_some_and(|(at, _)| at + FAILING_FOR.as_secs() <= second) {
            self.counts.pop_front();
        }
    }

    fn is_over(&self, now: Clock) -> bool {
        now.saturating_duration_since(self.last) >= FAILING_FOR
    }

    fn condition(&self, now: Clock) -> Condition {
        let since = now.saturating_duration_since(self.since);
        let is_recent = |at: u64| at + FAILING_FOR.as_secs() > since.as_secs();
        let recent = self.counts.iter().filter(|(at, _)| is_recent(*at));
        let error = format!("{}: {}", operation_name(self.operation), error_name(self.error));
        Condition::Failing { since, last_minute: recent.map(|(_, count)| count).sum(), error }
    }
}

fn operation_name(operation: IoOp) -> &'static str {
    match operation {
        IoOp::Read => "read",
        IoOp::Write(_) | IoOp::WriteJournal => "write",
        IoOp::Flush => "flush",
        IoOp::Discard => "discard",
        IoOp::WriteZeroes(_) => "write-zeroes",
    }
}

fn error_name(error: IoError) -> &'static str {
    match error {
        IoError::NoSpace => "no space left (ENOSPC)",
        IoError::ReadOnly => "the backing is read-only (EPERM)",
        _ => "I/O error (EIO)",
    }
}

impl Default for Monitor {
    fn default() -> Monitor {
        Monitor {
            origin: OnceLock::new(),
            oldest_ns: AtomicU64::new(NONE),
            asked_ns: AtomicU64::new(NONE),
            waiting: AtomicU64::new(0),
            outage: Mutex::default(),
            failures: Mutex::default(),
            connection_changes: AtomicU64::new(0),
        }
    }
}

impl Monitor {
    /// Returns the present connection state of the backing.
    pub fn condition(&self) -> Condition {
        self.condition_at(Clock::now())
    }

    fn condition_at(&self, now: Clock) -> Condition {
        let is_asked = self.asked_ns.load(Ordering::Relaxed) != NONE;
        let waiting = self.waiting.load(Ordering::Relaxed) + u64::from(is_asked);
        if let Some(Outage { since, error, is_final }) = self.outage().clone() {
            let outage = now.saturating_duration_since(since);
            return match is_final {
                true => Condition::Failed { outage, error },
                false => Condition::Reconnecting { outage, error, waiting },
            };
        }
        match self.oldest_age(now) {
            Some(oldest) if oldest > SLOW_AFTER => Condition::Slow { oldest, waiting },
            _ => {
                let failures = self.failures();
                let present = failures.as_ref().filter(|failures| !failures.is_over(now));
                present.map_or(Condition::Connected, |failures| failures.condition(now))
            }
        }
    }

    /// Returns the age of the oldest request in flight.
    fn oldest_age(&self, now: Clock) -> Option<Duration> {
        let oldest_ns = self.oldest_ns.load(Ordering::Relaxed).min(self.asked_ns.load(Ordering::Relaxed));
        let began = self.origin.get()?.checked_add(Duration::from_nanos(oldest_ns));
        (oldest_ns != NONE).then(|| now.saturating_duration_since(began.unwrap_or(now)))
    }

    /// Records a lost connection or a failed attempt to connect. `before_now` is the time since the
    /// last reply. If an outage was recorded earlier, its start does not change.
    pub fn note_outage(&self, before_now: Duration, error: &str) {
        let mut outage = self.outage();
        let now = Clock::now();
        if outage.is_none() {
            self.connection_changes.fetch_add(1, Ordering::Relaxed);
        }
        let since = outage.as_ref().map_or(now.checked_sub(before_now).unwrap_or(now), |outage| outage.since);
        *outage = Some(Outage { since, error: error.to_owned(), is_final: false });
    }

    /// Records that hob does not use the backing again, with the reason.
    pub fn note_failed(&self, error: &str) {
        self.note_outage(Duration::ZERO, error);
        if let Some(outage) = self.outage().as_mut() {
            outage.is_final = true;
        }
    }

    /// Returns true if the connection to the backing is lost.
    pub(super) fn is_disconnected(&self) -> bool {
        self.outage().is_some()
    }

    /// Records that the connected backing answered a request with an error.
    pub fn note_failure(&self, operation: IoOp, error: IoError) {
        self.note_failure_at(Clock::now(), operation, error);
    }

    fn note_failure_at(&self, now: Clock, operation: IoOp, error: IoError) {
        let mut failures = self.failures();
        let before = failures.take().filter(|failures| !failures.is_over(now));
        let start = || Failures { since: now, counts: VecDeque::new(), last: now, operation, error };
        let mut present = before.unwrap_or_else(start);
        present.count(now);
        *failures = Some(Failures { last: now, operation, error, ..present });
    }

    /// Records that hob asks an idle server whether it still answers. This question counts as a
    /// request.
    pub(super) fn note_question(&self, now: Instant) {
        self.asked_ns.store(now.0, Ordering::Relaxed);
    }

    /// Records that the server answered the question, or that hob does not wait for the answer any
    /// more.
    pub(super) fn note_answer(&self) {
        self.asked_ns.store(NONE, Ordering::Relaxed);
    }

    /// Records that the backing is connected.
    pub fn note_connected(&self) {
        if self.outage().take().is_some() {
            self.connection_changes.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Returns how often the connection was lost or restored. While this number stays equal,
    /// the server is the same process.
    pub fn connection_changes(&self) -> u64 {
        self.connection_changes.load(Ordering::Relaxed)
    }

    /// Records that the shard's time is `now` at this moment.
    pub(super) fn set_time(&self, now: Instant) {
        let clock = Clock::now();
        let _ = self.origin.set(clock.checked_sub(Duration::from_nanos(now.0)).unwrap_or(clock));
    }

    fn failures(&self) -> MutexGuard<'_, Option<Failures>> {
        self.failures.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn outage(&self) -> MutexGuard<'_, Option<Outage>> {
        self.outage.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Requests in flight to one backing, oldest first, on the shard's thread. Each start or end of a
/// request updates a [`Monitor`].
#[derive(Debug, Default)]
pub(super) struct InFlight {
    requests: VecDeque<Request>,
}

#[derive(Debug)]
struct Request {
    id: IoId,
    operation: IoOp,
    began: Instant,
    slice: Option<BufferSlice>,
    /// The monitor's number of connection changes when the request began.
    connection_changes: u64,
}

impl Request {
    /// Returns true unless the request leaves the data of the backing as it is.
    fn is_change(&self) -> bool {
        !matches!(self.operation, IoOp::Read | IoOp::Flush)
    }
}

impl InFlight {
    /// Records the start of a request.
    pub(super) fn begin(&mut self, monitor: &Monitor, io: &Io, now: Instant) {
        self.requests.push_back(Request {
            id: io.id,
            operation: io.op,
            began: now,
            slice: io.slice,
            connection_changes: monitor.connection_changes(),
        });
        self.publish(monitor);
    }

    /// Records the end of a request. Returns true if it is a change.
    pub(super) fn end(&mut self, monitor: &Monitor, id: IoId, result: Result<(), IoError>) -> bool {
        // Requests end roughly in the order in which they began. So the request that has ended is
        // near the front of the list.
        let at = self.requests.iter().position(|request| request.id == id);
        let request = at.and_then(|at| self.requests.remove(at));
        if let Some(request) = &request
            && let Err(error @ (IoError::Failed | IoError::NoSpace | IoError::ReadOnly)) = result
            // If the connection has changed since the request or is lost, the request may have
            // failed for this reason, and does not count as a failure of the backing.
            && request.connection_changes == monitor.connection_changes()
            && !monitor.is_disconnected()
        {
            monitor.note_failure(request.operation, error);
        }
        self.publish(monitor);
        request.is_some_and(|request| request.is_change())
    }

    /// Returns true if changes of the backing are in flight.
    pub(super) fn has_changes(&self) -> bool {
        self.requests.iter().any(Request::is_change)
    }

    /// Removes all requests from the monitor, and returns them.
    pub(super) fn give_up(
        &mut self,
        monitor: &Monitor,
    ) -> impl Iterator<Item = (IoId, Option<BufferSlice>)> + use<> {
        let requests = std::mem::take(&mut self.requests);
        self.publish(monitor);
        requests.into_iter().map(|request| (request.id, request.slice))
    }

    fn publish(&self, monitor: &Monitor) {
        let oldest_ns = self.requests.front().map_or(NONE, |request| request.began.0);
        monitor.oldest_ns.store(oldest_ns, Ordering::Relaxed);
        monitor.waiting.store(self.requests.len() as u64, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use hob_engine::io::Target;
    use hob_engine::units::DiskId;

    use super::*;

    const SECOND_NS: u64 = 1_000_000_000;

    fn read(id: u32) -> Io {
        Io {
            id: IoId(id),
            target: Target::Backing(DiskId(0)),
            op: IoOp::Read,
            offset: 0,
            len: 512,
            slice: None,
        }
    }

    #[test]
    fn a_backing_fails_requests_until_a_minute_has_passed_without_an_error() {
        let (monitor, _, start) = attached();
        let at = |seconds| start + Duration::from_secs(seconds);
        let fail = |seconds, error| monitor.note_failure_at(at(seconds), IoOp::Read, error);
        fail(0, IoError::Failed);
        fail(0, IoError::Failed);
        fail(30, IoError::NoSpace);
        let failing = |since, last_minute, error: &str| {
            let (since, error) = (Duration::from_secs(since), format!("read: {error}"));
            Condition::Failing { since, last_minute, error }
        };
        assert_eq!(monitor.condition_at(at(40)), failing(40, 3, "no space left (ENOSPC)"));
        assert_eq!(monitor.condition_at(at(60)), failing(60, 1, "no space left (ENOSPC)"));
        fail(80, IoError::Failed);
        assert_eq!(monitor.condition_at(at(80)), failing(80, 2, "I/O error (EIO)"));
        assert_eq!(monitor.condition_at(at(139)), failing(139, 1, "I/O error (EIO)"));
        assert_eq!(monitor.condition_at(at(140)), Condition::Connected);
        fail(200, IoError::Failed);
        assert_eq!(monitor.condition_at(at(201)), failing(1, 1, "I/O error (EIO)"), "a new failure");
    }

    #[test]
    fn only_errors_that_a_connected_backing_answered_count() {
        let (monitor, mut requests, _) = attached();
        let mut fail = |id, error| {
            requests.begin(&monitor, &read(id), Instant(5 * SECOND_NS));
            requests.end(&monitor, IoId(id), Err(error));
        };
        fail(1, IoError::Unsupported);
        fail(2, IoError::ShuttingDown);
        assert_eq!(monitor.condition(), Condition::Connected);
        monitor.note_outage(Duration::ZERO, "Connection refused");
        fail(3, IoError::Failed);
        monitor.note_connected();
        assert_eq!(monitor.condition(), Condition::Connected);
        fail(4, IoError::Failed);
        assert!(matches!(monitor.condition(), Condition::Failing { last_minute: 1, .. }));
        // A request that fails because the connection was lost while it waited.
        let (monitor, mut requests, _) = attached();
        requests.begin(&monitor, &read(5), Instant(5 * SECOND_NS));
        monitor.note_outage(Duration::ZERO, "Connection refused");
        monitor.note_connected();
        requests.end(&monitor, IoId(5), Err(IoError::Failed));
        assert_eq!(monitor.condition(), Condition::Connected);
    }

    #[test]
    fn a_question_to_an_idle_server_counts_until_it_is_answered() {
        let (monitor, _, now) = attached();
        monitor.note_question(Instant(SECOND_NS));
        let oldest = Duration::from_secs(4);
        assert_eq!(monitor.condition_at(now), Condition::Slow { oldest, waiting: 1 });
        monitor.note_answer();
        assert_eq!(monitor.condition_at(now), Condition::Connected);
    }

    /// A backing attached at the shard's time 5 s, and the clock at that moment.
    fn attached() -> (Monitor, InFlight, Clock) {
        let monitor = Monitor::default();
        monitor.set_time(Instant(5 * SECOND_NS));
        let origin = *monitor.origin.get().unwrap();
        (monitor, InFlight::default(), origin + Duration::from_secs(5))
    }

    #[test]
    fn a_backing_is_slow_while_its_oldest_request_waits_longer_than_the_threshold() {
        let (monitor, mut requests, start) = attached();
        let at = |ms| start + Duration::from_millis(ms);
        assert_eq!(Monitor::default().condition(), Condition::Connected, "not attached yet");
        assert_eq!(monitor.condition_at(at(60_000)), Condition::Connected, "nothing is asked of it");
        requests.begin(&monitor, &read(7), Instant(5 * SECOND_NS));
        requests.begin(&monitor, &read(8), Instant(6 * SECOND_NS));
        requests.begin(&monitor, &read(9), Instant(7 * SECOND_NS));
        assert_eq!(monitor.condition_at(at(2000)), Condition::Connected);
        let slow = |oldest_ms, waiting| Condition::Slow { oldest: Duration::from_millis(oldest_ms), waiting };
        assert_eq!(monitor.condition_at(at(2001)), slow(2001, 3));
        requests.end(&monitor, IoId(8), Ok(()));
        assert_eq!(monitor.condition_at(at(4000)), slow(4000, 2), "the oldest one is still there");
        requests.end(&monitor, IoId(7), Ok(()));
        assert_eq!(monitor.condition_at(at(4000)), Condition::Connected, "the next one is 2 s old");
        assert_eq!(monitor.condition_at(at(9500)), slow(7500, 1));
        requests.end(&monitor, IoId(9), Ok(()));
        assert_eq!(monitor.condition_at(at(9500)), Condition::Connected);
    }

    #[test]
    fn an_outage_lasts_from_its_first_note_until_there_is_a_connection() {
        let (monitor, mut requests, _) = attached();
        requests.begin(&monitor, &read(1), Instant(5 * SECOND_NS));
        monitor.note_outage(Duration::from_secs(3), "the server closed the connection");
        monitor.note_outage(Duration::ZERO, "Connection refused");
        let Condition::Reconnecting { outage, error, waiting } = monitor.condition() else {
            panic!("{:?}", monitor.condition())
        };
        assert!(outage >= Duration::from_secs(3), "{outage:?}");
        assert_eq!((error.as_str(), waiting), ("Connection refused", 1), "the last error counts");
        requests.end(&monitor, IoId(1), Ok(()));
        assert_eq!(monitor.connection_changes(), 1, "one outage");
        monitor.note_connected();
        monitor.note_connected();
        assert_eq!((monitor.condition(), monitor.connection_changes()), (Condition::Connected, 2));
    }

    #[test]
    fn a_backing_that_is_given_up_stays_failed() {
        let (monitor, ..) = attached();
        monitor.note_failed("another disk");
        assert!(matches!(monitor.condition(), Condition::Failed { error, .. } if error == "another disk"));
    }
}
