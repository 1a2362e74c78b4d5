//! Output of commands: plain tables for people, JSON for programs.

use std::borrow::Cow;
use std::io::{self, Write};

use comfy_table::{CellAlignment, Table, presets};
use hob_control::without_error_numbers;
use serde::Serialize;
use serde_json::Value;

/// Output format of a command.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Format {
    /// A table for people.
    #[default]
    Table,
    /// JSON for programs.
    Json,
}

/// Writing to standard output failed. A reader that closed the pipe is not an error.
#[derive(Debug, thiserror::Error)]
#[error("cannot write to standard output: {0}")]
pub(super) struct StdoutError(pub(super) io::Error);

/// Prints `value` as JSON, or as text through `table`.
pub(super) fn print<T: Serialize + ?Sized>(
    format: Format,
    value: &T,
    table: impl FnOnce(&T) -> String,
) -> anyhow::Result<()> {
    let mut text = match format {
        Format::Json => serde_json::to_string_pretty(value)?,
        Format::Table => printable(&table(value)).into_owned(),
    };
    if !text.ends_with('\n') {
        text.push('\n');
    }
    write(without_error_numbers(&text).as_bytes())
}

/// Prints bytes as they are.
pub(super) fn write(bytes: &[u8]) -> anyhow::Result<()> {
    let mut stdout = io::stdout().lock();
    stdout.write_all(bytes).and_then(|()| stdout.flush()).map_err(|error| StdoutError(error).into())
}

/// Writes a line to standard output.
pub(super) fn line(text: &str) -> anyhow::Result<()> {
    write(format!("{text}\n").as_bytes())
}

/// Writes a line to stderr, for people. Errors are ignored: stderr may be closed.
pub(super) fn tell(text: &str) {
    let _ = writeln!(io::stderr(), "{}", printable(&without_error_numbers(text)));
}

/// Replaces control characters except line feeds and tabs by escapes, because a terminal obeys
/// them. They may come from a VM (QMP), from another host, or from the name of a file.
pub(super) fn printable(text: &str) -> Cow<'_, str> {
    let is_unsafe = |c: char| c.is_control() && c != '\n' && c != '\t';
    if !text.contains(is_unsafe) {
        return text.into();
    }
    let mut plain = String::with_capacity(text.len());
    for c in text.chars() {
        match is_unsafe(c) {
            true => plain.extend(c.escape_default()),
            false => plain.push(c),
        }
    }
    plain.into()
}

/// Standard error for the log, which names system errors without their numbers. Errors are ignored:
/// the program continues without a log.
pub(super) struct LogWriter;

impl Write for LogWriter {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        // The log calls this function once for each line.
        let line = String::from_utf8_lossy(bytes);
        let _ = io::stderr().write_all(without_error_numbers(&line).as_bytes());
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Formats a table without lines: headings and cells, two spaces apart. `columns` has the headings,
/// separated by `|`. A colon after a heading marks a column of numbers, which is aligned right.
pub(super) fn table(columns: &str, rows: impl IntoIterator<Item = Vec<String>>) -> String {
    let mut table = Table::new();
    table.load_style(presets::NOTHING);
    table.set_header(columns.split('|').map(|heading| heading.trim_end_matches(':')));
    table.add_rows(rows);
    for (column, heading) in table.column_iter_mut().zip(columns.split('|')) {
        let alignment = if heading.ends_with(':') { CellAlignment::Right } else { CellAlignment::Left };
        column.set_padding((0, 2)).set_cell_alignment(alignment);
    }
    table.trim_fmt()
}

/// Formats rows as CSV: a line with the names of the columns, which are separated by commas, and a
/// line for each row. A cell has the row's JSON field with the name of the column; it is empty if
/// there is no value.
pub(super) fn csv<T: Serialize>(columns: &str, rows: impl IntoIterator<Item = T>) -> String {
    let mut text = format!("{columns}\n");
    for row in rows {
        let row = serde_json::to_value(row).expect("rows are plain data");
        let cells: Vec<String> = columns.split(',').map(|column| cell(&row[column])).collect();
        text += &cells.join(",");
        text.push('\n');
    }
    text
}

fn cell(value: &Value) -> String {
    match value {
        Value::Null => String::new(),
        Value::String(text) => text.clone(),
        // A whole number has no fraction here, but has one in JSON.
        Value::Number(number) if number.is_f64() => {
            number.as_f64().map_or_else(String::new, |number| number.to_string())
        }
        other => other.to_string(),
    }
}

/// Formats names and values, one pair per line.
pub(super) fn pairs<'a>(pairs: impl IntoIterator<Item = (&'a str, String)>) -> String {
    let mut table = Table::new();
    table.load_style(presets::NOTHING);
    table.add_rows(pairs.into_iter().map(|(name, value)| vec![name.to_owned(), value]));
    for column in table.column_iter_mut() {
        column.set_padding((0, 2));
    }
    table.trim_fmt()
}

/// Appends the notes of a change to a text.
pub(super) fn with_notes(mut text: String, notes: &[String]) -> String {
    for note in notes {
        if !text.is_empty() {
            text.push('\n');
        }
        text.push_str("note: ");
        text.push_str(note);
    }
    text
}

/// Returns an enum value as its JSON word.
pub(super) fn word<T: Serialize>(value: &T) -> String {
    match serde_json::to_value(value) {
        Ok(Value::String(word)) => word,
        _ => String::new(),
    }
}

/// Formats nanoseconds in a suitable unit: `870 ns`, `12.5 µs`, `3.21 ms`, `1.50 s`.
pub(super) fn duration(nanos: u64) -> String {
    let (value, unit) = match nanos {
        0..1_000 => return format!("{nanos} ns"),
        1_000..1_000_000 => (nanos as f64 / 1e3, "µs"),
        1_000_000..1_000_000_000 => (nanos as f64 / 1e6, "ms"),
        _ => (nanos as f64 / 1e9, "s"),
    };
    match value {
        100.0.. => format!("{value:.0} {unit}"),
        10.0.. => format!("{value:.1} {unit}"),
        _ => format!("{value:.2} {unit}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_terminal_gets_no_control_characters() {
        assert!(matches!(printable("é\tweb\n"), Cow::Borrowed("é\tweb\n")));
        assert_eq!(printable("a\u{1b}[31m\u{7}b\r\u{9b}"), "a\\u{1b}[31m\\u{7}b\\r\\u{9b}");
    }

    #[test]
    fn tables_are_plain_and_aligned() {
        let text = table(
            "NAME|COUNT:",
            [vec!["a".to_owned(), "1".to_owned()], vec!["long".to_owned(), "1000".to_owned()]],
        );
        assert_eq!(text, "NAME  COUNT\na         1\nlong   1000");
        assert_eq!(table("NAME", []), "NAME");
    }

    #[test]
    fn cells_of_csv_have_the_fields_of_their_columns() {
        let row = serde_json::json!({"name": "a", "ratio": 1.0, "small": 0.25, "count": 7, "none": null});
        let text = csv("count,name,ratio,small,none,absent", [row]);
        assert_eq!(text, "count,name,ratio,small,none,absent\n7,a,1,0.25,,\n");
    }

    #[test]
    fn durations_have_three_digits() {
        for (nanos, text) in [
            (0, "0 ns"),
            (999, "999 ns"),
            (1_500, "1.50 µs"),
            (12_500, "12.5 µs"),
            (321_000, "321 µs"),
            (3_210_000, "3.21 ms"),
            (1_500_000_000, "1.50 s"),
        ] {
            assert_eq!(duration(nanos), text);
        }
    }
}
