//! One line of the result table of a figure (a published measurement that hob reproduces):
//! description, published value, measured value, expected value, result and reason.

use serde::{Serialize, Serializer};

use crate::page::{Cell, Check};
use crate::picture::Unit;

/// A published or measured value: a number, a range or words.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(untagged)]
pub enum Quantity {
    /// A number in the unit of the line.
    Number(f64),
    /// A range between two numbers.
    Span(f64, f64),
    /// A value in words.
    Words(String),
}

impl From<f64> for Quantity {
    fn from(value: f64) -> Quantity {
        Quantity::Number(value)
    }
}

impl From<(f64, f64)> for Quantity {
    fn from((low, high): (f64, f64)) -> Quantity {
        Quantity::Span(low, high)
    }
}

impl From<&str> for Quantity {
    fn from(words: &str) -> Quantity {
        Quantity::Words(words.to_owned())
    }
}

impl Quantity {
    /// Returns the value as text for users.
    pub fn text(&self, unit: Unit) -> String {
        match self {
            Quantity::Number(value) => unit.text(*value),
            Quantity::Span(low, high) => format!("{} – {}", unit.text(*low), unit.text(*high)),
            Quantity::Words(words) => words.clone(),
        }
    }

    /// Returns the value for programs: plain numbers, or "576..608" for a range.
    fn plain(&self) -> String {
        match self {
            Quantity::Number(value) => value.to_string(),
            Quantity::Span(low, high) => format!("{low}..{high}"),
            Quantity::Words(words) => words.clone(),
        }
    }
}

/// One line of the result table of a figure.
#[derive(Clone, Debug, Serialize)]
pub struct Line {
    /// Description of the value that the line compares; the first cell of the line.
    pub what: String,
    /// Unit of the published and the measured value.
    #[serde(serialize_with = "unit_word")]
    pub unit: Unit,
    /// Published value, if the source has one.
    pub published: Option<Quantity>,
    /// The measured value.
    pub measured: Quantity,
    /// Expected value; empty without a check. For a result by construction, the input from which
    /// the result follows.
    pub expected: String,
    /// Result of the check; `None` for a line without a check.
    pub check: Option<Check>,
    /// Measured reason of a difference from the published value; empty unless the check is
    /// [`Check::Differs`].
    pub reason: String,
}

impl Line {
    /// Creates a line without published value and check.
    pub(super) fn new(what: impl Into<String>, unit: Unit, measured: impl Into<Quantity>) -> Line {
        let (what, measured) = (what.into(), measured.into());
        Line {
            what,
            unit,
            published: None,
            measured,
            expected: String::new(),
            check: None,
            reason: String::new(),
        }
    }

    /// Returns the line with the published value.
    pub(super) fn published(self, value: impl Into<Quantity>) -> Line {
        Line { published: Some(value.into()), ..self }
    }

    /// Returns the line with the expected value and the result of the check.
    pub(super) fn check(self, expected: impl Into<String>, holds: bool) -> Line {
        Line { expected: expected.into(), check: Some(Check::of(holds)), ..self }
    }

    /// Returns the line with a check that the measured number is within these inclusive bounds.
    pub(super) fn within(self, low: f64, high: f64) -> Line {
        let expected = Quantity::Span(low, high).text(self.unit);
        let holds = matches!(self.measured, Quantity::Number(value) if (low..=high).contains(&value));
        self.check(expected, holds)
    }

    /// Returns the line with a check that the measured number differs from the published number by
    /// at most this share of the published number.
    ///
    /// # Panics
    /// Panics if the published value is not a number.
    pub(super) fn near(self, share: f64) -> Line {
        let Some(Quantity::Number(published)) = self.published else { panic!("{}: no number", self.what) };
        self.within(published * (1.0 - share), published * (1.0 + share))
    }

    /// Returns the line without a check: its value is *by construction*, because it follows from
    /// this input.
    pub(super) fn by_construction(self, input: &str) -> Line {
        Line { expected: format!("follows from {input}"), check: Some(Check::ByConstruction), ..self }
    }

    /// Returns the line with a reason for its difference, if its check fails and measurements
    /// confirm the reason. Without the confirmation, the check still fails.
    pub(super) fn explained(self, is_confirmed: bool, reason: impl Into<String>) -> Line {
        match self.check {
            Some(Check::Fails) if is_confirmed => {
                Line { check: Some(Check::Differs), reason: reason.into(), ..self }
            }
            _ => self,
        }
    }

    /// Returns the published value as text for users.
    pub fn published_text(&self) -> String {
        self.published.as_ref().map_or("–".to_owned(), |value| value.text(self.unit))
    }

    /// Returns the measured value as text for users.
    pub fn measured_text(&self) -> String {
        self.measured.text(self.unit)
    }

    /// Returns the table cells of the line for the HTML page.
    pub(super) fn cells(&self) -> [Cell; 5] {
        let published = match &self.published {
            Some(Quantity::Words(words)) => Cell::text(words),
            Some(value) => Cell::number(value.text(self.unit)),
            None => Cell::Missing,
        };
        let measured = match &self.measured {
            Quantity::Words(words) => Cell::text(words),
            value => Cell::number(value.text(self.unit)),
        };
        let check = self.check.map_or(Cell::text(""), Cell::check);
        [Cell::text(&self.what), published, measured, Cell::text(&self.expected), check]
    }

    /// Returns a row of the CSV with the columns of [`CSV_HEAD`].
    pub(super) fn csv(&self) -> String {
        let published = self.published.as_ref().map_or(String::new(), Quantity::plain);
        let check = self.check.map_or("", Check::word);
        let measured = self.measured.plain();
        let cells = [&self.what, word(self.unit), &published, &measured, &self.expected, check, &self.reason];
        let cells: Vec<String> = cells.iter().map(|cell| quoted(cell)).collect();
        cells.join(",")
    }
}

pub(super) const CSV_HEAD: &str = "what,unit,published,measured,expected,check,reason";

/// Returns a CSV cell, quoted if necessary.
pub(crate) fn quoted(cell: &str) -> String {
    if cell.contains([',', '"', '\n', '\r']) {
        return format!("\"{}\"", cell.replace('"', "\"\""));
    }
    cell.to_owned()
}

fn word(unit: Unit) -> &'static str {
    match unit {
        Unit::Count => "count",
        Unit::Percent => "ratio",
        Unit::Times => "times",
        Unit::Bytes => "bytes",
        Unit::BytesPerSecond => "bytes/s",
        Unit::Seconds => "s",
    }
}

fn unit_word<S: Serializer>(unit: &Unit, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_str(word(*unit))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bounds_are_kept_or_not() {
        let line =
            |value: f64| Line::new("speed-up, DSS", Unit::Times, value).published(1.83).within(1.6, 2.2);
        assert_eq!([1.59, 1.6, 2.2, 2.21, f64::NAN].map(|value| line(value).check), {
            use Check::{Fails, Holds};
            [Fails, Holds, Holds, Fails, Fails].map(Some)
        });
        assert_eq!(line(1.9).csv(), "\"speed-up, DSS\",times,1.83,1.9,1.6 × – 2.2 ×,holds,");
        assert_eq!(line(1.9).published_text(), "1.83 ×");
    }

    #[test]
    fn only_a_confirmed_reason_explains_a_failed_check() {
        let line = |value: f64| Line::new("ratio", Unit::Percent, value).published(1.0).near(0.1);
        let check = |value, is_confirmed| line(value).explained(is_confirmed, "slower disks").check.unwrap();
        assert_eq!(check(0.5, true), Check::Differs);
        assert_eq!(check(0.5, false), Check::Fails);
        assert_eq!(check(0.95, true), Check::Holds);
        assert_eq!(line(0.95).explained(true, "slower disks").reason, "");
        assert_eq!(line(0.5).explained(true, "slower disks").reason, "slower disks");
        let given = Line::new("mix", Unit::Percent, 0.24).by_construction("read-percent");
        assert_eq!(given.csv(), "mix,ratio,,0.24,follows from read-percent,by-construction,");
    }

    #[test]
    fn spans_and_words_are_values_too() {
        let line = Line::new("reads a second", Unit::Count, 590.0).published((576.0, 608.0));
        assert_eq!(line.csv(), "reads a second,count,576..608,590,,,");
        let line = Line::new("order", Unit::Count, "rising").check("rising", true);
        assert_eq!((line.published_text().as_str(), line.measured_text().as_str()), ("–", "rising"));
    }
}
