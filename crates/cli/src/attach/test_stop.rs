//! Stops the command between two steps, so that tests can kill the command or the daemon there.

use rustix::process::{Signal, getpid, kill_process};

/// Name of an environment variable for tests: the number of steps after which the command stops
/// itself with SIGSTOP, or `each` to stop it after each step.
const STOP_AFTER: &str = "HOB_ATTACH_STOP_AFTER";

/// The steps after which the command stops itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum TestStop {
    Never,
    /// The command stops once, after this number of steps.
    After(u32),
    Each,
}

impl TestStop {
    pub(super) fn from_environment() -> TestStop {
        std::env::var(STOP_AFTER).map_or(TestStop::Never, |text| TestStop::parse(&text))
    }

    fn parse(text: &str) -> TestStop {
        match text {
            "each" => TestStop::Each,
            number => number.parse().map_or(TestStop::Never, TestStop::After),
        }
    }

    /// Counts a step. Returns true if the command stops after it.
    pub(super) fn is_due(&mut self) -> bool {
        let left = match self {
            TestStop::Never => return false,
            TestStop::Each => return true,
            TestStop::After(steps) => steps.saturating_sub(1),
        };
        *self = if left == 0 { TestStop::Never } else { TestStop::After(left) };
        left == 0
    }
}

/// Stops this process until it gets SIGCONT.
pub(super) fn stop() {
    let _ = kill_process(getpid(), Signal::STOP);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_command_stops_once_or_after_each_step() {
        for (text, expected) in [
            ("", [false, false, false]),
            ("1", [true, false, false]),
            ("2", [false, true, false]),
            ("each", [true, true, true]),
        ] {
            let mut stop = TestStop::parse(text);
            assert_eq!([(); 3].map(|()| stop.is_due()), expected, "{text}");
        }
    }
}
