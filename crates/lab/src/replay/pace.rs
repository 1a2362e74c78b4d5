//! Computes the times at which the requests of a trace are sent.

use std::fmt;
use std::str::FromStr;

use anyhow::{Result, bail};

/// Pace of a replay: the speed at which the requests of the trace are sent.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub enum Pace {
    /// Requests are sent at their recorded times.
    #[default]
    Original,
    /// The recorded times are divided by this factor. A factor below 1 slows the replay down.
    Times(f64),
    /// Requests are sent as fast as the target replies. No request has a due time or is late.
    Asap,
}

/// Range of allowed factors of [`Pace::Times`].
const FACTORS: std::ops::RangeInclusive<f64> = 1e-3..=1e6;

impl FromStr for Pace {
    type Err = anyhow::Error;

    fn from_str(text: &str) -> Result<Pace> {
        match text {
            "original" => return Ok(Pace::Original),
            "asap" => return Ok(Pace::Asap),
            _ => {}
        }
        let factor = text.strip_prefix(['x', '×']).and_then(|factor| factor.parse::<f64>().ok());
        match factor {
            Some(factor) if FACTORS.contains(&factor) => Ok(Pace::Times(factor)),
            Some(_) => bail!("'{text}' is too slow or too fast; write a factor from x0.001 to x1000000"),
            None => bail!("'{text}' is not a speed; write original, asap, or a factor like x10 or x0.5"),
        }
    }
}

impl fmt::Display for Pace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Pace::Original => f.write_str("original"),
            Pace::Times(factor) => write!(f, "x{factor}"),
            Pace::Asap => f.write_str("asap"),
        }
    }
}

/// Converts times of a trace to times of its replay, in nanoseconds from the start of the replay.
/// The first request is due immediately, and times never decrease.
#[derive(Clone, Debug)]
pub(crate) struct Schedule {
    pace: Pace,
    first_ns: Option<u64>,
    last_due_ns: u64,
}

impl Schedule {
    pub(crate) fn new(pace: Pace) -> Schedule {
        Schedule { pace, first_ns: None, last_due_ns: 0 }
    }

    pub(crate) fn due_ns(&mut self, at_ns: u64) -> u64 {
        let since_first = at_ns.saturating_sub(*self.first_ns.get_or_insert(at_ns));
        let due_ns = match self.pace {
            Pace::Original => since_first,
            Pace::Times(factor) => (since_first as f64 / factor) as u64,
            Pace::Asap => 0,
        };
        self.last_due_ns = self.last_due_ns.max(due_ns);
        self.last_due_ns
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paces_are_read_and_printed() {
        for (text, pace) in [
            ("original", Pace::Original),
            ("asap", Pace::Asap),
            ("x10", Pace::Times(10.0)),
            ("x0.5", Pace::Times(0.5)),
        ] {
            assert_eq!(text.parse::<Pace>().unwrap(), pace);
            assert_eq!(pace.to_string(), text);
        }
        assert_eq!("×2".parse::<Pace>().unwrap(), Pace::Times(2.0));
        for wrong in ["", "fast", "10", "x", "x0", "x-1", "xNaN", "xinf", "x1e9", "10x"] {
            let said = wrong.parse::<Pace>().unwrap_err().to_string();
            assert!(said.contains("write") && said.contains(wrong), "{said}");
        }
    }

    #[test]
    fn the_first_is_due_at_once_and_none_before_its_predecessor() {
        let at = [5_000, 5_000, 7_000, 6_500, 15_000, 1_000, 16_000];
        for (pace, expected) in [
            (Pace::Original, [0, 0, 2_000, 2_000, 10_000, 10_000, 11_000]),
            (Pace::Times(10.0), [0, 0, 200, 200, 1_000, 1_000, 1_100]),
            (Pace::Times(0.5), [0, 0, 4_000, 4_000, 20_000, 20_000, 22_000]),
            (Pace::Asap, [0; 7]),
        ] {
            let mut schedule = Schedule::new(pace);
            assert_eq!(at.map(|at_ns| schedule.due_ns(at_ns)), expected, "{pace}");
        }
    }

    #[test]
    fn no_time_is_too_long() {
        let mut schedule = Schedule::new(Pace::Times(0.001));
        assert_eq!((schedule.due_ns(0), schedule.due_ns(u64::MAX)), (0, u64::MAX));
    }
}
