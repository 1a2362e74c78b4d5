//! Detects pauses in which this process did not run: it was stopped (SIGSTOP), its cgroup was
//! frozen, or its host had no processor for it.
//!
//! A thread notes the time every [`BEAT`]. If the thread could not run for longer than
//! [`PAUSE_MIN`], the whole process counts as paused. Shorter pauses are not detected.

use std::io;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant, SystemTime};

/// Interval at which the thread notes the time.
const BEAT: Duration = Duration::from_millis(100);

/// Shortest pause that is detected.
const PAUSE_MIN: Duration = Duration::from_secs(1);

/// A time during which this process did not run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Pause {
    /// Latest time at which the process certainly ran before the pause, by the host's clock.
    pub(crate) began: SystemTime,
    /// Earliest time at which the process certainly ran again.
    pub(crate) ended: Instant,
}

/// The latest beat and the latest pause.
struct Beats {
    has_thread: bool,
    last: Option<(Instant, SystemTime)>,
    pause: Option<Pause>,
}

impl Beats {
    const fn new() -> Beats {
        Beats { has_thread: false, last: None, pause: None }
    }

    /// Records that the process runs at this time.
    fn beat(&mut self, now: Instant, time: SystemTime) {
        if let Some((before, began)) = self.last
            && now.saturating_duration_since(before) > PAUSE_MIN
        {
            self.pause = Some(Pause { began, ended: now });
        }
        self.last = Some((now, time));
    }
}

static BEATS: Mutex<Beats> = Mutex::new(Beats::new());

fn beats() -> MutexGuard<'static, Beats> {
    BEATS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Starts to watch for pauses of this process, until its end.
///
/// # Errors
/// Returns an error if the thread cannot be started.
pub(crate) fn watch() -> io::Result<()> {
    let mut beats = beats();
    if beats.has_thread {
        return Ok(());
    }
    std::thread::Builder::new().name("hob-pauses".into()).spawn(|| {
        loop {
            std::thread::sleep(BEAT);
            self::beats().beat(Instant::now(), SystemTime::now());
        }
    })?;
    beats.beat(Instant::now(), SystemTime::now());
    beats.has_thread = true;
    Ok(())
}

/// Returns the latest pause since [`watch`] was called, including a pause that has just ended and
/// that the thread has not noted yet.
pub(crate) fn last_pause() -> Option<Pause> {
    let mut beats = beats();
    beats.beat(Instant::now(), SystemTime::now());
    beats.pause
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_beat_is_a_pause_from_the_last_one_on() {
        let (start, time) = (Instant::now(), SystemTime::UNIX_EPOCH);
        let mut beats = Beats::new();
        let mut beat = |ms| {
            let at = Duration::from_millis(ms);
            beats.beat(start + at, time + at);
            beats.pause
        };
        assert_eq!(beat(100_000), None, "nothing is known about the time before the first beat");
        assert_eq!(beat(100_100), None);
        assert_eq!(beat(101_100), None, "a delay, but no pause");
        let pause = Pause {
            began: time + Duration::from_millis(101_100),
            ended: start + Duration::from_millis(103_000),
        };
        assert_eq!(beat(103_000), Some(pause));
        assert_eq!(beat(103_100), Some(pause));
    }
}
