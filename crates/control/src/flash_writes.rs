//! API types of a pool's flash write budget.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Deserializer, Serialize};
use utoipa::ToSchema;

use crate::Size;
use crate::text::text_type;

const DAYS_A_YEAR: f64 = 365.0;

/// Largest number of drive writes per day that a budget can have.
const DWPD_MAX: f64 = 1000.0;
const YEARS_MAX: f64 = 100.0;
const TERABYTES_MAX: f64 = 1e6;

/// Largest budget, bytes a day.
const BYTES_PER_DAY_MAX: f64 = (1u64 << 60) as f64;

/// A flash write budget, as users write it: `1 DWPD`, `500G/day`, or `5 years at 600 TBW`.
///
/// DWPD is the number of times a day that the caches may write as many bytes as the pool's devices
/// have. TBW is the number of terabytes (10¹² bytes) that the caches may write to all devices of
/// the pool together.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum FlashWrites {
    /// A number of drive writes per day.
    DriveWritesPerDay(f64),
    /// A number of bytes a day.
    BytesPerDay(Size),
    /// A number of terabytes that may be written to the pool within a number of years.
    Endurance {
        /// Number of years.
        years: f64,
        /// Number of terabytes that may be written.
        terabytes: f64,
    },
}

// All numbers are finite.
impl Eq for FlashWrites {}

/// A text that is no flash write budget.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("'{0}' is no flash write budget; write it like '1 DWPD', '500G/day' or '5 years at 600 TBW'")]
pub struct FlashWritesParseError(String);

impl FlashWrites {
    /// Returns the budget of a pool whose devices have `pool_bytes`, bytes a day; at least 1.
    pub fn bytes_per_day(self, pool_bytes: u64) -> u64 {
        let bytes = match self {
            FlashWrites::DriveWritesPerDay(times) => times * pool_bytes as f64,
            FlashWrites::BytesPerDay(size) => size.bytes() as f64,
            FlashWrites::Endurance { years, terabytes } => terabytes * 1e12 / (years * DAYS_A_YEAR),
        };
        bytes.clamp(1.0, BYTES_PER_DAY_MAX) as u64
    }
}

impl fmt::Display for FlashWrites {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            FlashWrites::DriveWritesPerDay(times) => write!(f, "{times} DWPD"),
            FlashWrites::BytesPerDay(size) => write!(f, "{size}/day"),
            FlashWrites::Endurance { years, terabytes } => {
                let unit = if *years == 1.0 { "year" } else { "years" };
                write!(f, "{years} {unit} at {terabytes} TBW")
            }
        }
    }
}

impl FromStr for FlashWrites {
    type Err = FlashWritesParseError;

    fn from_str(text: &str) -> Result<FlashWrites, FlashWritesParseError> {
        let lower = text.trim().to_ascii_lowercase();
        let number = |text: &str, max: f64| {
            text.trim().parse::<f64>().ok().filter(|number| *number > 0.0 && *number <= max)
        };
        let endurance = |years: &str, rest: &str| {
            let years = years.trim_end();
            let years = years.strip_suffix("years").or_else(|| years.strip_suffix("year"))?;
            let terabytes = rest.trim().strip_suffix("tbw")?;
            Some(FlashWrites::Endurance {
                years: number(years, YEARS_MAX)?,
                terabytes: number(terabytes, TERABYTES_MAX)?,
            })
        };
        let parsed = if let Some(times) = lower.strip_suffix("dwpd") {
            number(times, DWPD_MAX).map(FlashWrites::DriveWritesPerDay)
        } else if let Some((size, unit)) = lower.split_once('/') {
            let size = size.parse::<Size>().ok().filter(|size| (1..=1 << 60).contains(&size.bytes()));
            size.filter(|_| unit.trim() == "day").map(FlashWrites::BytesPerDay)
        } else {
            lower.split_once(" at ").and_then(|(years, rest)| endurance(years, rest))
        };
        parsed.ok_or_else(|| FlashWritesParseError(text.to_owned()))
    }
}

text_type!(
    FlashWrites,
    "A flash write budget: `1 DWPD`, `500G/day` or `5 years at 600 TBW`.",
    ["1 DWPD", "500G/day", "5 years at 600 TBW"]
);

/// New flash write budget of a pool: a budget, or `off`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FlashWritesChange {
    /// The pool has no flash write budget.
    Off,
    /// The pool gets this flash write budget.
    Set(FlashWrites),
}

impl FlashWritesChange {
    /// Returns the budget after the change.
    pub fn budget(self) -> Option<FlashWrites> {
        match self {
            FlashWritesChange::Off => None,
            FlashWritesChange::Set(budget) => Some(budget),
        }
    }
}

/// Reads the budget of a new pool. `off` means none.
pub(crate) fn budget_or_off<'de, D: Deserializer<'de>>(
    deserializer: D,
) -> Result<Option<FlashWrites>, D::Error> {
    Option::<FlashWritesChange>::deserialize(deserializer).map(|it| it.and_then(FlashWritesChange::budget))
}

impl fmt::Display for FlashWritesChange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            FlashWritesChange::Off => f.write_str("off"),
            FlashWritesChange::Set(budget) => budget.fmt(f),
        }
    }
}

impl FromStr for FlashWritesChange {
    type Err = String;

    fn from_str(text: &str) -> Result<FlashWritesChange, String> {
        match text.trim() {
            "off" => Ok(FlashWritesChange::Off),
            _ => text
                .parse()
                .map(FlashWritesChange::Set)
                .map_err(|error| format!("{error}, or 'off' for no budget")),
        }
    }
}

text_type!(
    FlashWritesChange,
    "A flash write budget, as in the pool's settings, or `off`.",
    ["1 DWPD", "off"]
);

/// Flash writes of a pool's caches.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, serde::Deserialize, ToSchema)]
pub struct FlashWritesUsage {
    /// The budget, as it was set; absent without a budget.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub budget: Option<FlashWrites>,
    /// The budget in bytes a day; 0 without a budget.
    pub bytes_per_day: Size,
    /// Bytes that caches wrote to flash in the last 24 hours: data, both copies, and journals.
    pub written_day: Size,
    /// Seconds that `written_day` covers: fewer than a day if hob has counted for less time.
    pub covered_seconds: u64,
    /// Bytes that caches wrote to flash since the daemon started.
    pub written: Size,
    /// Part of `written` that hob never refuses because of a budget: all writes except copies of
    /// clean data.
    pub unrefusable: Size,
    /// Bytes that caches did not write to flash since the daemon started, because of the budget.
    pub refused: Size,
    /// Unused budget that caches can still write.
    pub saved: Size,
    /// Bytes that caches wrote beyond the budget. hob subtracts them from the budget of the
    /// following time.
    pub debt: Size,
    /// Bytes that caches wrote beyond the budget to fill free blocks. Later budget that hob cannot
    /// save, because a day's budget is saved already, reduces this number.
    pub loan: Size,
}

/// A cache's part of its pool's flash write budget.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, serde::Deserialize, ToSchema)]
pub struct CacheFlashWrites {
    /// The cache's part of the budget, bytes a day. Budget that other caches do not use is added.
    pub part: Size,
    /// Unused budget of the cache; negative for a debt.
    pub saved: i64,
    /// How much the budget limits admission: 0 if not at all, 100 if no copy of clean data is
    /// written to flash.
    pub pressure_percent: u8,
    /// Bytes that the cache wrote to flash since the disk was added: data, both copies, and journal.
    pub written: Size,
    /// Bytes that the cache did not write to flash because of the budget.
    pub refused: Size,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn budgets_are_written_in_three_ways() {
        for (text, shown, bytes) in [
            ("1 DWPD", "1 DWPD", 1 << 40),
            ("0.5dwpd", "0.5 DWPD", 1 << 39),
            ("500G/day", "500G/day", 500 << 30),
            (" 64 MiB / day ", "64M/day", 64 << 20),
            ("5 years at 1825 TBW", "5 years at 1825 TBW", 1_000_000_000_000),
            ("1 year at 365tbw", "1 year at 365 TBW", 1_000_000_000_000),
        ] {
            let budget: FlashWrites = text.parse().unwrap();
            assert_eq!(
                (budget.to_string().as_str(), budget.bytes_per_day(1 << 40)),
                (shown, bytes),
                "{text}"
            );
            assert_eq!(shown.parse(), Ok(budget));
            let json = serde_json::to_string(&budget).unwrap();
            assert_eq!(serde_json::from_str::<FlashWrites>(&json).unwrap(), budget);
        }
    }

    #[test]
    fn nothing_else_is_a_budget() {
        for text in [
            "",
            "1",
            "500G",
            "500G/hour",
            "0 DWPD",
            "-1 DWPD",
            "nan DWPD",
            "inf DWPD",
            "0/day",
            "off",
            "5 years",
            "0 years at 600 TBW",
            "5 years at 0 TBW",
            "5 days at 600 TBW",
            "16E/day",
        ] {
            let error = text.parse::<FlashWrites>().unwrap_err().to_string();
            assert!(error.contains("5 years at 600 TBW") && !error.contains('\n'), "{error}");
        }
        assert_eq!("off".parse(), Ok(FlashWritesChange::Off));
        assert!("on".parse::<FlashWritesChange>().unwrap_err().contains("'off'"));
    }
}
