//! Units of numbers in charts, and the formatting of numbers.

use super::scale::{count_text, latency_text};

const KIB: f64 = 1024.0;
const BINARY: [&str; 7] = ["B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];
const LARGE: [(f64, &str); 4] = [(1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M")];
const MINUTE: f64 = 60.0;
const HOUR: f64 = 3600.0;
const DAY: f64 = 86_400.0;

/// Unit of the numbers of an axis or a bar.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unit {
    /// A count without a unit. The name of the axis tells what is counted.
    Count,
    /// A ratio from 0 to 1, written as 0 % to 100 %.
    Percent,
    /// A factor, written as "2.1 ×".
    Times,
    /// A number of bytes, written in KiB, MiB or GiB.
    Bytes,
    /// A rate in bytes per second.
    BytesPerSecond,
    /// A time in seconds, written in ns to days.
    Seconds,
}

impl Unit {
    /// Formats the number with three digits and the unit.
    ///
    /// ```
    /// use hob_lab::picture::Unit;
    /// assert_eq!(Unit::Bytes.text(3.5 * 1024.0 * 1024.0), "3.5 MiB");
    /// assert_eq!(Unit::Percent.text(0.894), "89.4 %");
    /// assert_eq!(Unit::Seconds.text(0.0021), "2.10 ms");
    /// ```
    pub fn text(self, value: f64) -> String {
        if !value.is_finite() {
            return "–".to_owned();
        }
        if value < 0.0 {
            return format!("−{}", self.text(-value));
        }
        match self {
            Unit::Count => count(value),
            Unit::Percent => format!("{} %", digits(value * 100.0)),
            Unit::Times => format!("{} ×", digits(value)),
            Unit::Bytes => bytes(value),
            Unit::BytesPerSecond => format!("{}/s", bytes(value)),
            Unit::Seconds => seconds(value),
        }
    }

    /// Returns the label of a tick. The number of decimals fits the `step` between ticks, and the
    /// unit fits the largest value `most`.
    pub(super) fn label(self, value: f64, step: f64, most: f64) -> String {
        if value == 0.0 {
            return if self == Unit::Percent { "0 %".to_owned() } else { "0".to_owned() };
        }
        if value < 0.0 {
            return format!("−{}", self.label(-value, step, most));
        }
        match self {
            Unit::Count => match LARGE.into_iter().find(|&(size, _)| most >= size) {
                Some((size, letter)) => format!("{} {letter}", stepped(value / size, step / size)),
                None => stepped(value, step),
            },
            Unit::Percent => format!("{} %", stepped(value * 100.0, step * 100.0)),
            Unit::Times => format!("{} ×", stepped(value, step)),
            Unit::Bytes | Unit::BytesPerSecond => self.text(value),
            Unit::Seconds => {
                let (size, name) = time_unit(most);
                format!("{} {name}", stepped(value / size, step / size))
            }
        }
    }
}

/// Returns the unit of time for labels of values up to `most` seconds: its length in seconds and
/// its name.
pub(super) fn time_unit(most: f64) -> (f64, &'static str) {
    match most {
        _ if most < 2e-6 => (1e-9, "ns"),
        _ if most < 2e-3 => (1e-6, "µs"),
        _ if most < 2.0 => (1e-3, "ms"),
        _ if most <= 3.0 * MINUTE => (1.0, "s"),
        _ if most <= 3.0 * HOUR => (MINUTE, "min"),
        _ if most <= 3.0 * DAY => (HOUR, "h"),
        _ => (DAY, "d"),
    }
}

fn seconds(value: f64) -> String {
    match value {
        _ if value > 0.0 && value < 1e-9 => format!("{value:.1e} s"),
        _ if value < 1000.0 => latency_text((value * 1e9).round() as u64),
        _ if value < 3.0 * HOUR => format!("{} min", digits(value / MINUTE)),
        _ if value < 3.0 * DAY => format!("{} h", digits(value / HOUR)),
        _ => format!("{} d", digits(value / DAY)),
    }
}

fn bytes(value: f64) -> String {
    let (mut value, mut power) = (value, 0);
    // The value 1023.6 would be rounded to 1024.
    while value >= 1023.5 && power + 1 < BINARY.len() {
        value /= KIB;
        power += 1;
    }
    format!("{} {}", digits(value), BINARY[power])
}

fn count(value: f64) -> String {
    match LARGE.into_iter().find(|&(size, _)| value >= size * 0.9995) {
        Some((size, letter)) => format!("{} {letter}", digits(value / size)),
        None => digits(value),
    }
}

/// Formats a value with three digits, or more for whole numbers, and without trailing zeros.
fn digits(value: f64) -> String {
    if value >= 99.95 {
        return if value < 1e15 { count_text(value.round()) } else { format!("{value:.3e}") };
    }
    if value > 0.0 && value < 0.001 {
        return format!("{value:.1e}");
    }
    let places = match value {
        _ if value >= 9.995 => 1,
        _ if value >= 0.9995 => 2,
        _ if value >= 0.09995 => 3,
        _ => 4,
    };
    trimmed(format!("{value:.places$}"))
}

/// Formats digits with thousands separators.
fn apart(whole: &str) -> String {
    whole.parse().map_or(whole.to_owned(), count_text)
}

/// Formats a value with as many decimals as the round step between labels needs.
fn stepped(value: f64, step: f64) -> String {
    let places = (-step.log10() - 1e-9).ceil().clamp(0.0, 12.0) as usize;
    if value >= 1e15 || (value < 1e-12 && value > 0.0) {
        return format!("{value:.1e}");
    }
    // A step such as 2.5 needs one decimal more than the power of ten from which it is made.
    let places = places + usize::from((step * 10f64.powi(places as i32)).fract().abs() > 0.01);
    let text = trimmed(format!("{value:.places$}"));
    match text.split_once('.') {
        Some((whole, part)) => format!("{}.{part}", apart(whole)),
        None => apart(&text),
    }
}

fn trimmed(text: String) -> String {
    if text.contains('.') { text.trim_end_matches('0').trim_end_matches('.').to_owned() } else { text }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_written_as_people_do() {
        let table = [
            (Unit::Count, 0.0, "0"),
            (Unit::Count, 7.0, "7"),
            (Unit::Count, 0.125, "0.125"),
            (Unit::Count, 12_345.4, "12\u{2009}345"),
            (Unit::Count, 999_600.0, "1 M"),
            (Unit::Count, 2_340_000.0, "2.34 M"),
            (Unit::Count, -12.5, "−12.5"),
            (Unit::Percent, 0.0, "0 %"),
            (Unit::Percent, 1.0, "100 %"),
            (Unit::Percent, 0.00042, "0.042 %"),
            (Unit::Times, 2.126, "2.13 ×"),
            (Unit::Bytes, 512.0, "512 B"),
            (Unit::Bytes, 4096.0, "4 KiB"),
            (Unit::Bytes, 1_048_575.0, "1 MiB"),
            (Unit::Bytes, 3.2 * KIB * KIB * KIB, "3.2 GiB"),
            (Unit::BytesPerSecond, 100.0 * KIB * KIB, "100 MiB/s"),
            (Unit::Seconds, 0.0, "0 ns"),
            (Unit::Seconds, 0.25, "250 ms"),
            (Unit::Seconds, 5400.0, "90 min"),
            (Unit::Seconds, 604_800.0, "7 d"),
            (Unit::Seconds, f64::NAN, "–"),
        ];
        for (unit, value, text) in table {
            assert_eq!(unit.text(value), text, "{unit:?} {value}");
        }
        for value in [1e-300, 1e-12, 1e24, 1e300, f64::MAX, f64::MIN] {
            for unit in [Unit::Count, Unit::Percent, Unit::Times, Unit::Bytes, Unit::Seconds] {
                assert!(unit.text(value).len() < 40, "{unit:?} {value}: {}", unit.text(value));
            }
        }
    }
}
