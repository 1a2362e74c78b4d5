//! Decides which pauses of flash devices are logged, and which are only counted.
//!
//! hob logs a pause once, when it ends and its length is known: at most one warning per hour and
//! device. Only a pause of [`LONG`] or more is logged earlier, and its end is logged too. The
//! metric `hob_device_stalls` counts every pause.

use std::time::Duration;

use tokio::time::Instant;

/// Time after a logged pause in which further short pauses are only counted.
const QUIET: Duration = Duration::from_secs(3600);
/// A pause of this length is always logged, even before it ends, because no working device pauses
/// so long.
const LONG: Duration = Duration::from_secs(5);

/// The pauses of one flash device. Several shards may report the same pause.
#[derive(Debug, Default)]
pub(in crate::services) struct Stalls {
    /// Number of pauses since the daemon started.
    pub(in crate::services) count: u64,
    current: Option<Pause>,
    /// End of the last short pause that was logged.
    logged: Option<Instant>,
}

#[derive(Debug)]
struct Pause {
    began: Instant,
    /// Whether the log has a warning about this pause.
    is_warned: bool,
}

/// The end of a pause that is to be logged, with the length of the pause.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum PauseEnd {
    /// The log has no message about this pause yet.
    Unreported(Duration),
    /// The log has a warning about this pause.
    Reported(Duration),
}

impl Stalls {
    /// Records that a shard waits for the device, and has waited for `waited` already. Returns the
    /// time after which to call [`overdue`](Self::overdue); `None` if this pause was already
    /// recorded.
    pub(super) fn begin(&mut self, now: Instant, waited: Duration) -> Option<Duration> {
        if self.current.is_some() {
            return None;
        }
        self.count += 1;
        let began = now.checked_sub(waited).unwrap_or(now);
        self.current = Some(Pause { began, is_warned: false });
        Some(LONG.saturating_sub(waited))
    }

    /// Returns the length of the current pause so far, if it is long and no warning was logged.
    pub(super) fn overdue(&mut self, now: Instant) -> Option<Duration> {
        let pause = self.current.as_mut().filter(|pause| !pause.is_warned)?;
        let length = now.duration_since(pause.began);
        pause.is_warned = length >= LONG;
        pause.is_warned.then_some(length)
    }

    /// Records that the device answers again. Returns the end of the pause if this end must be
    /// logged.
    pub(super) fn end(&mut self, now: Instant) -> Option<PauseEnd> {
        let Pause { began, is_warned } = self.current.take()?;
        let length = now.duration_since(began);
        if is_warned {
            return Some(PauseEnd::Reported(length));
        }
        let is_quiet = self.logged.is_some_and(|logged| now.duration_since(logged) < QUIET);
        if is_quiet && length < LONG {
            return None;
        }
        self.logged = Some(now);
        Some(PauseEnd::Unreported(length))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOTICED: Duration = Duration::from_secs(1);

    fn seconds(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    #[test]
    fn one_short_pause_an_hour_is_logged_with_its_whole_length_and_all_are_counted() {
        let mut stalls = Stalls::default();
        let start = Instant::now() + seconds(100);
        let at = |after| start + seconds(after);
        assert_eq!(stalls.begin(at(0), NOTICED), Some(LONG - NOTICED));
        assert_eq!(stalls.begin(at(0), NOTICED), None, "a second shard sees the same pause");
        assert_eq!(stalls.end(at(2)), Some(PauseEnd::Unreported(seconds(3))));
        assert_eq!(stalls.end(at(2)), None);
        assert!(stalls.begin(at(60), NOTICED).is_some());
        assert_eq!(stalls.end(at(61)), None, "within the hour");
        assert!(stalls.begin(at(3603), NOTICED).is_some());
        assert_eq!(stalls.end(at(3604)), Some(PauseEnd::Unreported(seconds(2))));
        assert_eq!(stalls.count, 3);
    }

    #[test]
    fn a_long_pause_is_always_logged_before_and_at_its_end() {
        let mut stalls = Stalls::default();
        let start = Instant::now() + seconds(100);
        let at = |after| start + seconds(after);
        assert_eq!(stalls.overdue(at(0)), None, "there is no pause");
        for begin in [0, 60] {
            assert!(stalls.begin(at(begin), NOTICED).is_some());
            assert_eq!(stalls.overdue(at(begin + 3)), None);
            assert_eq!(stalls.overdue(at(begin + 4)), Some(LONG));
            assert_eq!(stalls.overdue(at(begin + 5)), None, "once");
            assert_eq!(stalls.end(at(begin + 19)), Some(PauseEnd::Reported(seconds(20))));
        }
        assert!(stalls.begin(at(100), NOTICED).is_some());
        assert_eq!(stalls.end(at(102)), Some(PauseEnd::Unreported(seconds(3))), "a short pause after it");
        assert!(stalls.begin(at(110), NOTICED).is_some());
        let unseen = Some(PauseEnd::Unreported(seconds(7)));
        assert_eq!(stalls.end(at(116)), unseen, "the check of its length was late");
    }
}
