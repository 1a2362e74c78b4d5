//! Waits until a given time with a precision of a few microseconds.
//!
//! A sleeping thread wakes 50 to 100 µs late, because the kernel coalesces timers and an idle
//! processor needs time to wake. A wait therefore sleeps until [`AWAKE_NS`] before its end, and
//! then yields the processor repeatedly until the time is reached. Times are nanoseconds since the
//! start of the clock.

use std::thread;
use std::time::{Duration, Instant};

/// Interval at which a waiting thread checks whether it should stop.
pub(crate) const STOP_POLL: Duration = Duration::from_millis(50);

/// Length of the last part of a wait, in which the thread does not sleep, nanoseconds.
pub(crate) const AWAKE_NS: u64 = 100_000;

/// A clock that can wait.
pub(crate) trait Clock {
    /// Returns the nanoseconds since the start of the clock.
    fn now_ns(&self) -> u64;
    /// Sleeps for at least `ns` nanoseconds.
    fn sleep(&self, ns: u64);
    /// Yields the processor for as short as possible.
    fn pause(&self);
}

/// The real, monotonic clock.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RealClock(Instant);

impl RealClock {
    pub(crate) fn start() -> RealClock {
        RealClock(Instant::now())
    }
}

impl Clock for RealClock {
    fn now_ns(&self) -> u64 {
        u64::try_from(self.0.elapsed().as_nanos()).unwrap_or(u64::MAX)
    }

    fn sleep(&self, ns: u64) {
        thread::sleep(Duration::from_nanos(ns));
    }

    fn pause(&self) {
        thread::yield_now();
    }
}

/// Waits until `due_ns`. Returns false if `halted` returned true before that time.
pub(crate) fn wait_until(clock: &impl Clock, due_ns: u64, halted: &impl Fn() -> bool) -> bool {
    let nap_ns = STOP_POLL.as_nanos() as u64;
    loop {
        let left_ns = due_ns.saturating_sub(clock.now_ns());
        if left_ns == 0 {
            return true;
        }
        if halted() {
            return false;
        }
        match left_ns.saturating_sub(AWAKE_NS) {
            0 => clock.pause(),
            sleep_ns => clock.sleep(sleep_ns.min(nap_ns)),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;

    /// A test clock that sleeps longer than requested, as real clocks do. The test clock counts its
    /// operations.
    #[derive(Default)]
    struct FakeClock {
        now_ns: Cell<u64>,
        oversleep_ns: u64,
        pause_ns: u64,
        sleeps: Cell<u64>,
        pauses: Cell<u64>,
    }

    impl Clock for FakeClock {
        fn now_ns(&self) -> u64 {
            self.now_ns.get()
        }

        fn sleep(&self, ns: u64) {
            self.now_ns.set(self.now_ns.get() + ns + self.oversleep_ns);
            self.sleeps.set(self.sleeps.get() + 1);
        }

        fn pause(&self) {
            self.now_ns.set(self.now_ns.get() + self.pause_ns);
            self.pauses.set(self.pauses.get() + 1);
        }
    }

    #[test]
    fn a_wait_ends_on_time_though_sleeps_do_not() {
        for (oversleep_ns, pause_ns) in [(0, 500), (60_000, 500), (99_000, 2_000)] {
            for due_ns in [0, 1, 99_999, 100_000, 5_000_000, 49_999_999, 3_600_000_000_000] {
                let clock = FakeClock { oversleep_ns, pause_ns, ..FakeClock::default() };
                assert!(wait_until(&clock, due_ns, &|| false));
                let late_ns = clock.now_ns() - due_ns;
                assert!(late_ns < pause_ns, "{late_ns} ns late for {due_ns}, asleep for {oversleep_ns} more");
                assert!(clock.pauses.get() <= 100_000 / pause_ns + 1, "it sleeps where it can");
            }
        }
    }

    #[test]
    fn the_past_is_not_waited_for() {
        let clock = FakeClock { now_ns: Cell::new(1_000), ..FakeClock::default() };
        assert!(wait_until(&clock, 999, &|| true));
        assert_eq!((clock.sleeps.get(), clock.pauses.get()), (0, 0));
    }

    #[test]
    fn a_stop_is_noticed_within_one_nap() {
        let clock = FakeClock { pause_ns: 500, ..FakeClock::default() };
        let halted = || clock.now_ns() >= 1_000_000_000;
        assert!(!wait_until(&clock, 3_600_000_000_000, &halted));
        assert!(clock.now_ns() <= 1_050_000_000, "{}", clock.now_ns());
    }

    /// Checks the real clock with bounds that hold on a loaded host.
    #[test]
    fn a_real_wait_is_not_too_short_and_not_absurdly_long() {
        let clock = RealClock::start();
        for step in 1..=20 {
            let due_ns = step * 3_000_000;
            assert!(wait_until(&clock, due_ns, &|| false));
            assert!(clock.now_ns() >= due_ns);
        }
        assert!(clock.now_ns() < 30_000_000_000, "{}", clock.now_ns());
    }
}
