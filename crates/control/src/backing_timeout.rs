//! How long requests of a disk wait for its backing: `500ms`, `30s`, `2m`, `1h` or `forever`.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use crate::text::text_type;

/// Longest backing timeout that can be set, milliseconds: one day. Set `forever` for a longer one.
const LIMIT_MS_MAX: u64 = 86_400_000;

/// Suffixes of durations, largest unit first, with their length in milliseconds.
const UNITS: [(&str, u64); 4] = [("h", 3_600_000), ("m", 60_000), ("s", 1_000), ("ms", 1)];

/// How long a disk's requests wait for its backing before they fail: a duration such as `30s`, or
/// `forever`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BackingTimeout {
    /// Requests wait until the backing returns.
    Forever,
    /// Requests wait for this time, counted from the start of an outage.
    Limit(Duration),
}

text_type!(BackingTimeout, "A duration from 100ms to 24h, such as 500ms, 30s, 2m or 1h, or forever");

/// A text is not a valid [`BackingTimeout`].
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "'{0}' is not a backing timeout; write a duration from 100ms to 24h, like 500ms, 30s, 2m or 1h, or forever"
)]
pub struct BackingTimeoutError(String);

impl FromStr for BackingTimeout {
    type Err = BackingTimeoutError;

    fn from_str(text: &str) -> Result<BackingTimeout, BackingTimeoutError> {
        if text == "forever" {
            return Ok(BackingTimeout::Forever);
        }
        let digits = text.bytes().take_while(u8::is_ascii_digit).count();
        let (number, unit) = text.split_at(digits);
        let factor = UNITS.into_iter().find(|(name, _)| *name == unit).map(|(_, factor)| factor);
        let millis =
            number.parse().ok().zip(factor).and_then(|(number, factor)| u64::checked_mul(number, factor));
        millis
            .filter(|millis| (100..=LIMIT_MS_MAX).contains(millis))
            .map(|millis| BackingTimeout::Limit(Duration::from_millis(millis)))
            .ok_or_else(|| BackingTimeoutError(text.to_owned()))
    }
}

impl fmt::Display for BackingTimeout {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let BackingTimeout::Limit(limit) = self else { return f.write_str("forever") };
        let millis = limit.as_millis() as u64;
        let (unit, factor) =
            UNITS.into_iter().find(|(_, factor)| millis.is_multiple_of(*factor)).unwrap_or(("ms", 1));
        write!(f, "{}{unit}", millis / factor)
    }
}

/// Change of a disk's backing timeout: a [`BackingTimeout`], or `default` for the daemon's timeout.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BackingTimeoutChange {
    /// The disk uses the daemon's backing timeout.
    Default,
    /// The disk gets its own backing timeout.
    Set(BackingTimeout),
}

text_type!(
    BackingTimeoutChange,
    "A duration from 100ms to 24h, such as 500ms, 30s, 2m or 1h, or forever, or default"
);

impl FromStr for BackingTimeoutChange {
    type Err = BackingTimeoutError;

    fn from_str(text: &str) -> Result<BackingTimeoutChange, BackingTimeoutError> {
        if text == "default" {
            return Ok(BackingTimeoutChange::Default);
        }
        text.parse().map(BackingTimeoutChange::Set)
    }
}

impl fmt::Display for BackingTimeoutChange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            BackingTimeoutChange::Default => f.write_str("default"),
            BackingTimeoutChange::Set(timeout) => timeout.fmt(f),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_and_forever_are_read_and_printed_in_the_largest_exact_unit() {
        for (text, printed) in [
            ("500ms", "500ms"),
            ("2s", "2s"),
            ("90s", "90s"),
            ("120s", "2m"),
            ("24h", "24h"),
            ("forever", "forever"),
        ] {
            let timeout: BackingTimeout = text.parse().unwrap();
            assert_eq!(timeout.to_string(), printed);
            assert_eq!(printed.parse(), Ok(timeout));
            let json = serde_json::to_string(&timeout).unwrap();
            assert_eq!(serde_json::from_str::<BackingTimeout>(&json).unwrap(), timeout);
        }
        assert_eq!("90s".parse(), Ok(BackingTimeout::Limit(Duration::from_secs(90))));
    }

    #[test]
    fn a_change_is_a_limit_or_the_default() {
        for (text, change) in [
            ("default", BackingTimeoutChange::Default),
            ("forever", BackingTimeoutChange::Set(BackingTimeout::Forever)),
        ] {
            assert_eq!(text.parse(), Ok(change));
            assert_eq!(serde_json::to_string(&change).unwrap(), format!("\"{text}\""));
        }
        assert!("Default".parse::<BackingTimeoutChange>().is_err());
        assert!("default".parse::<BackingTimeout>().is_err(), "a limit itself has no default");
    }

    #[test]
    fn other_texts_are_refused_with_what_to_write_instead() {
        for text in
            ["", "30", "s", "0s", "99ms", "25h", "-1s", "1.5s", "30 s", "Forever", "99999999999999999999h"]
        {
            let error = text.parse::<BackingTimeout>().unwrap_err().to_string();
            assert!(error.contains(&format!("'{text}'")) && error.contains("forever"), "{error}");
        }
    }
}
