//! Parses numbers and columns of text formats. If a text is invalid, the functions return the
//! reason. They never guess a value.

use std::borrow::Cow;

use super::Op;

/// Reason why an entry of a trace is invalid.
pub(super) type Reason = Cow<'static, str>;

/// Maximum number of characters of an invalid field that a message quotes.
const QUOTED_CHARS_MAX: usize = 40;

fn quoted(text: &str) -> String {
    let shown: String = text.chars().take(QUOTED_CHARS_MAX).collect();
    let more = if shown.len() < text.len() { "…" } else { "" };
    format!("'{}{more}'", shown.escape_debug())
}

/// Parses a whole number. `what` is the name of the number in messages.
pub(super) fn number(text: &str, what: &str) -> Result<u64, Reason> {
    digits(text).map_err(|problem| problem.reason(text, what))
}

/// Parses a number of units of `unit` bytes and returns bytes.
pub(super) fn bytes(text: &str, unit: u64, what: &str) -> Result<u64, Reason> {
    let count = number(text, what)?;
    count.checked_mul(unit).ok_or_else(|| Problem::TooLarge.reason(text, what))
}

/// Converts a number of units of `unit` bytes to bytes.
pub(super) fn scaled(count: u64, unit: u64, what: &str) -> Result<u64, Reason> {
    count.checked_mul(unit).ok_or_else(|| format!("{what} is too large: {count} times {unit} bytes").into())
}

/// Parses a time in units of `unit_ns` with an optional fraction, and returns nanoseconds.
/// `unit_ns` is at most one second.
pub(super) fn time_ns(text: &str, unit_ns: u64) -> Result<u64, Reason> {
    let (whole, fraction) = text.split_once('.').unwrap_or((text, ""));
    let parse = || {
        let whole = digits(if whole.is_empty() && !fraction.is_empty() { "0" } else { whole })?;
        let nanos = whole.checked_mul(unit_ns).ok_or(Problem::TooLarge)?;
        if fraction.is_empty() {
            return Ok(nanos);
        }
        if !fraction.bytes().all(|byte| byte.is_ascii_digit()) {
            return Err(Problem::NoNumber);
        }
        // Nine decimals of a second are nanoseconds; more decimals are dropped.
        let kept = &fraction[..fraction.len().min(9)];
        let part = digits(kept)? * unit_ns / 10_u64.pow(kept.len() as u32);
        nanos.checked_add(part).ok_or(Problem::TooLarge)
    };
    parse().map_err(|problem: Problem| problem.reason(text, "the time"))
}

enum Problem {
    NoNumber,
    Negative,
    TooLarge,
}

impl Problem {
    fn reason(&self, text: &str, what: &str) -> Reason {
        let is = match self {
            _ if text.is_empty() => return format!("{what} is missing").into(),
            Problem::NoNumber => "no number",
            Problem::Negative => "negative",
            Problem::TooLarge => "too large",
        };
        format!("{what} is {is}: {}", quoted(text)).into()
    }
}

fn digits(text: &str) -> Result<u64, Problem> {
    let mut value = 0_u64;
    if text.is_empty() {
        return Err(Problem::NoNumber);
    }
    for byte in text.bytes() {
        if !byte.is_ascii_digit() {
            let negative =
                text.strip_prefix('-').is_some_and(|rest| rest.starts_with(|c: char| c.is_ascii_digit()));
            return Err(if negative { Problem::Negative } else { Problem::NoNumber });
        }
        let next = value.checked_mul(10).and_then(|tens| tens.checked_add(u64::from(byte - b'0')));
        value = next.ok_or(Problem::TooLarge)?;
    }
    Ok(value)
}

/// Parses an operation: R, W, D (discard) or F (flush), or a whole word such as "read". Case does
/// not matter.
pub(super) fn operation(text: &str) -> Result<Op, Reason> {
    let words = [("read", Op::Read), ("write", Op::Write), ("discard", Op::Discard), ("flush", Op::Flush)];
    let known =
        |(word, _): &&(&str, Op)| text.eq_ignore_ascii_case(word) || text.eq_ignore_ascii_case(&word[..1]);
    match words.iter().find(known) {
        Some((_, op)) => Ok(*op),
        None if text.is_empty() => Err("the operation is missing".into()),
        None => Err(format!("the operation is unknown: {}", quoted(text)).into()),
    }
}

/// Returns the value that `choices` has for a text.
pub(super) fn choice<T: Copy>(text: &str, what: &str, choices: &[(&str, T)]) -> Result<T, Reason> {
    let found = choices.iter().find(|(word, _)| *word == text).map(|(_, value)| *value);
    found.ok_or_else(|| format!("{what} is unknown: {}", quoted(text)).into())
}

/// Splits a line into trimmed columns: exactly `N`, or more if `more` allows this.
pub(super) fn columns<const N: usize>(line: &str, separator: char, more: More) -> Result<[&str; N], Reason> {
    collect(line.split(separator).map(str::trim), more)
}

/// Splits a line at white space into exactly `N` columns, or more if `more` allows this.
pub(super) fn words<const N: usize>(line: &str, more: More) -> Result<[&str; N], Reason> {
    collect(line.split_whitespace(), more)
}

/// Whether a line may have more columns than the parser uses.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum More {
    Allowed,
    Refused,
}

fn collect<'a, const N: usize>(
    mut parts: impl Iterator<Item = &'a str>,
    more: More,
) -> Result<[&'a str; N], Reason> {
    let mut found = [""; N];
    for (n, place) in found.iter_mut().enumerate() {
        *place = parts.next().ok_or_else(|| Reason::from(format!("{n} columns instead of {N}")))?;
    }
    if more == More::Refused && parts.next().is_some() {
        return Err(format!("more than {N} columns").into());
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_keep_nanoseconds_and_refuse_invalid_input() {
        for (text, unit, nanos) in [
            ("0", 1, 0),
            ("1456095145.133076001", 1_000_000_000, 1_456_095_145_133_076_001),
            ("223.412", 1_000_000, 223_412_000),
            (".5", 1_000_000_000, 500_000_000),
            ("7.", 1_000, 7_000),
            ("128166385295514663", 100, 12_816_638_529_551_466_300),
            ("0.0000000019", 1_000_000_000, 1),
        ] {
            assert_eq!(time_ns(text, unit), Ok(nanos), "{text}");
        }
        for (text, reason) in [
            ("", "the time is missing"),
            ("-1", "the time is negative: '-1'"),
            ("-0.5", "the time is negative: '-0.5'"),
            ("1.-5", "the time is no number: '1.-5'"),
            (".", "the time is no number: '.'"),
            ("1e9", "the time is no number: '1e9'"),
            ("18446744073709551616", "the time is too large: '18446744073709551616'"),
            ("18446744074", "the time is too large: '18446744074'"),
            ("nan", "the time is no number: 'nan'"),
        ] {
            assert_eq!(time_ns(text, 1_000_000_000).unwrap_err(), reason);
        }
    }

    #[test]
    fn invalid_numbers_operations_and_columns_are_described() {
        assert_eq!(number("18446744073709551615", "the offset"), Ok(u64::MAX));
        assert_eq!(number("-4096", "the offset").unwrap_err(), "the offset is negative: '-4096'");
        assert_eq!(number("+4", "the offset").unwrap_err(), "the offset is no number: '+4'");
        assert_eq!(
            bytes("36028797018963968", 512, "the offset").unwrap_err().split(':').next().unwrap(),
            "the offset is too large"
        );
        assert_eq!(operation("Write"), Ok(Op::Write));
        assert_eq!(operation("r"), Ok(Op::Read));
        assert_eq!(operation("X").unwrap_err(), "the operation is unknown: 'X'");
        let long = "\u{1b}".repeat(100);
        assert!(operation(&long).unwrap_err().len() < 300);
        assert_eq!(columns("a, b ,c", ',', More::Refused), Ok(["a", "b", "c"]));
        assert_eq!(columns::<2>("a", ',', More::Refused).unwrap_err(), "1 columns instead of 2");
        assert_eq!(words::<1>(" a b", More::Refused).unwrap_err(), "more than 1 columns");
        assert_eq!(words(" a\tb ", More::Allowed), Ok(["a"]));
    }
}
