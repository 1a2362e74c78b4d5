//! Decides which pauses of flash devices are logged, and which are only counted.
//!
//! hob logs one warning per hour and device, and one at the end of each pause of [`LONG`] or more.
//! The metric `hob_device_stalls` counts every pause.

use std::time::{Duration, Instant};

/// Time after a logged pause in which further pauses are only counted.
const QUIET: Duration = Duration::from_secs(3600);
/// Minimum length of a pause that is always logged when it ends, because no working device pauses
/// so long.
const LONG: Duration = Duration::from_secs(10);

/// The pauses of one flash device. Several shards may report the same pause.
#[derive(Debug, Default)]
pub(in crate::services) struct Stalls {
    /// Number of pauses since the daemon started.
    pub(in crate::services) count: u64,
    /// Start of the current pause, and whether it was logged.
    since: Option<(Instant, bool)>,
    logged: Option<Instant>,
}

impl Stalls {
    /// Records that a shard waits for the device. Returns true if this is to be logged.
    pub(in crate::services) fn begin(&mut self, now: Instant) -> bool {
        if self.since.is_some() {
            return false;
        }
        self.count += 1;
        let is_logged = self.logged.is_none_or(|logged| now.duration_since(logged) >= QUIET);
        if is_logged {
            self.logged = Some(now);
        }
        self.since = Some((now, is_logged));
        is_logged
    }

    /// Records that the device answers again. Returns the length of the pause if it is to be
    /// logged.
    pub(in crate::services) fn end(&mut self, now: Instant) -> Option<Duration> {
        let (since, is_logged) = self.since.take()?;
        let length = now.duration_since(since);
        (is_logged || length >= LONG).then_some(length)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_pause_an_hour_is_logged_and_all_are_counted() {
        let mut stalls = Stalls::default();
        let start = Instant::now();
        let at = |seconds| start + Duration::from_secs(seconds);
        assert!(stalls.begin(at(0)));
        assert!(!stalls.begin(at(0)), "a second shard sees the same pause");
        assert_eq!(stalls.end(at(2)), Some(Duration::from_secs(2)));
        assert_eq!(stalls.end(at(2)), None);
        assert!(!stalls.begin(at(60)));
        assert_eq!(stalls.end(at(61)), None);
        assert!(!stalls.begin(at(70)));
        assert_eq!(stalls.end(at(90)), Some(Duration::from_secs(20)), "a long pause is always logged");
        assert!(stalls.begin(at(3600)));
        assert_eq!(stalls.count, 4);
    }
}
