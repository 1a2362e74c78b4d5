//! The connection state of a backing, for threads other than the shard's.
//!
//! The shard's thread updates a [`Monitor`] with every request that it starts or ends. Other
//! threads read the monitor without calling the shard, so a shard or backing that hangs does not
//! delay them. Ages are computed when they are read, so that they are always current.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant as Clock};

use hob_engine::io::BufferSlice;
use hob_engine::units::{Instant, IoId};

/// A backing is slow while its oldest request has waited longer than this.
pub const SLOW_AFTER: Duration = Duration::from_secs(2);

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
    /// The connection to the backing is lost, and hob tries to connect again.
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
    /// Number of times that the connection was lost or was there again.
    connection_changes: AtomicU64,
}

/// Period without a connection to the backing.
#[derive(Clone, Debug)]
struct Outage {
    since: Clock,
    error: String,
    is_final: bool,
}

impl Default for Monitor {
    fn default() -> Monitor {
        Monitor {
            origin: OnceLock::new(),
            oldest_ns: AtomicU64::new(NONE),
            asked_ns: AtomicU64::new(NONE),
            waiting: AtomicU64::new(0),
            outage: Mutex::default(),
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
            _ => Condition::Connected,
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

    /// Returns how often the connection was lost or was there again. While the number stays equal,
    /// the server is the same process.
    pub fn connection_changes(&self) -> u64 {
        self.connection_changes.load(Ordering::Relaxed)
    }

    /// Records that the shard's time is `now` at this moment.
    pub(super) fn set_time(&self, now: Instant) {
        let clock = Clock::now();
        let _ = self.origin.set(clock.checked_sub(Duration::from_nanos(now.0)).unwrap_or(clock));
    }

    fn outage(&self) -> MutexGuard<'_, Option<Outage>> {
        self.outage.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Requests in flight to one backing, oldest first, on the shard's thread. Each start or end of a
/// request updates a [`Monitor`].
#[derive(Debug, Default)]
pub(super) struct InFlight {
    requests: std::collections::VecDeque<(IoId, Instant, Option<BufferSlice>)>,
}

impl InFlight {
    /// Records the start of a request that moves these bytes.
    pub(super) fn begin(&mut self, monitor: &Monitor, id: IoId, slice: Option<BufferSlice>, now: Instant) {
        self.requests.push_back((id, now, slice));
        self.publish(monitor);
    }

    /// Records the end of a request.
    pub(super) fn end(&mut self, monitor: &Monitor, id: IoId) {
        // Requests end roughly in the order in which they began, so this one is near the front.
        if let Some(at) = self.requests.iter().position(|(known, ..)| *known == id) {
            self.requests.remove(at);
        }
        self.publish(monitor);
    }

    pub(super) fn is_empty(&self) -> bool {
        self.requests.is_empty()
    }

    /// Removes all requests from the monitor, and returns them.
    pub(super) fn give_up(
        &mut self,
        monitor: &Monitor,
    ) -> impl Iterator<Item = (IoId, Option<BufferSlice>)> + use<> {
        let requests = std::mem::take(&mut self.requests);
        self.publish(monitor);
        requests.into_iter().map(|(id, _, slice)| (id, slice))
    }

    fn publish(&self, monitor: &Monitor) {
        let oldest_ns = self.requests.front().map_or(NONE, |(_, at, _)| at.0);
        monitor.oldest_ns.store(oldest_ns, Ordering::Relaxed);
        monitor.waiting.store(self.requests.len() as u64, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND_NS: u64 = 1_000_000_000;

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
        requests.begin(&monitor, IoId(7), None, Instant(5 * SECOND_NS));
        requests.begin(&monitor, IoId(8), None, Instant(6 * SECOND_NS));
        requests.begin(&monitor, IoId(9), None, Instant(7 * SECOND_NS));
        assert_eq!(monitor.condition_at(at(2000)), Condition::Connected);
        let slow = |oldest_ms, waiting| Condition::Slow { oldest: Duration::from_millis(oldest_ms), waiting };
        assert_eq!(monitor.condition_at(at(2001)), slow(2001, 3));
        requests.end(&monitor, IoId(8));
        assert_eq!(monitor.condition_at(at(4000)), slow(4000, 2), "the oldest one is still there");
        requests.end(&monitor, IoId(7));
        assert_eq!(monitor.condition_at(at(4000)), Condition::Connected, "the next one is 2 s old");
        assert_eq!(monitor.condition_at(at(9500)), slow(7500, 1));
        requests.end(&monitor, IoId(9));
        assert_eq!(monitor.condition_at(at(9500)), Condition::Connected);
    }

    #[test]
    fn an_outage_lasts_from_its_first_note_until_there_is_a_connection() {
        let (monitor, mut requests, _) = attached();
        requests.begin(&monitor, IoId(1), None, Instant(5 * SECOND_NS));
        monitor.note_outage(Duration::from_secs(3), "the server closed the connection");
        monitor.note_outage(Duration::ZERO, "Connection refused");
        let Condition::Reconnecting { outage, error, waiting } = monitor.condition() else {
            panic!("{:?}", monitor.condition())
        };
        assert!(outage >= Duration::from_secs(3), "{outage:?}");
        assert_eq!((error.as_str(), waiting), ("Connection refused", 1), "the last error counts");
        requests.end(&monitor, IoId(1));
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
