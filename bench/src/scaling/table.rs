//! Results of a part of the benchmark, as Markdown tables, JSON and charts.

use std::fmt;

use hob_lab::picture::{Axis, Curve, CurveChart, Unit, curves};
use serde_json::{Map, Value, json};

/// A column of a part's results.
#[derive(Debug)]
pub(super) struct Column {
    /// Name in JSON.
    pub(super) key: &'static str,
    /// Name in tables and charts.
    pub(super) name: &'static str,
    pub(super) unit: Unit,
}

/// Creates a column.
pub(super) const fn column(key: &'static str, name: &'static str, unit: Unit) -> Column {
    Column { key, name, unit }
}

/// A chart with some columns as curves over the first column.
#[derive(Debug)]
pub(super) struct Chart {
    /// Name of the file.
    pub(super) file: &'static str,
    pub(super) title: &'static str,
    /// Name of the vertical axis.
    pub(super) axis: &'static str,
    /// Keys of the columns, which have the same unit.
    pub(super) keys: &'static [&'static str],
}

/// Creates a chart.
pub(super) const fn chart(
    file: &'static str,
    title: &'static str,
    axis: &'static str,
    keys: &'static [&'static str],
) -> Chart {
    Chart { file, title, axis, keys }
}

/// Form of a part's results.
#[derive(Debug)]
pub(super) struct Layout {
    /// Name of the part in JSON.
    pub(super) part: &'static str,
    pub(super) title: &'static str,
    /// The first column is the size or number that the part varies.
    pub(super) columns: &'static [Column],
    /// Keys of the columns of each printed table, in addition to the first column.
    pub(super) tables: &'static [&'static [&'static str]],
    pub(super) charts: &'static [Chart],
    /// True if the horizontal axis of charts is logarithmic.
    pub(super) is_log: bool,
}

/// Results of a part.
#[derive(Debug)]
pub(super) struct Table {
    layout: &'static Layout,
    rows: Vec<Vec<Option<f64>>>,
    notes: Vec<String>,
}

impl Layout {
    /// Returns the position of a column. The test of all layouts checks the keys.
    fn position(&self, key: &str) -> usize {
        self.columns.iter().position(|column| column.key == key).expect("layouts name existing columns")
    }
}

impl Table {
    /// Creates a table without rows.
    pub(super) fn new(layout: &'static Layout) -> Self {
        Self { layout, rows: Vec::new(), notes: Vec::new() }
    }

    /// Adds a row with a value for each column; `None` if there is no result.
    pub(super) fn row(&mut self, values: impl IntoIterator<Item = Option<f64>>) {
        let values: Vec<Option<f64>> = values.into_iter().collect();
        assert_eq!(values.len(), self.layout.columns.len(), "a value for each column");
        self.rows.push(values);
    }

    /// Adds a remark that is printed below the tables.
    pub(super) fn note(&mut self, text: String) {
        println!("{text}");
        self.notes.push(text);
    }

    fn cell(&self, row: &[Option<f64>], column: usize) -> String {
        let unit = self.layout.columns[column].unit;
        // Pages separate thousands with commas.
        row[column].map_or("–".to_owned(), |value| unit.text(value).replace('\u{2009}', ","))
    }

    /// Returns all results as JSON.
    pub(super) fn json(&self) -> Value {
        let row = |row: &Vec<Option<f64>>| -> Map<String, Value> {
            let columns = self.layout.columns.iter().zip(row);
            columns.map(|(column, value)| (column.key.to_owned(), json!(value))).collect()
        };
        let rows: Vec<_> = self.rows.iter().map(row).collect();
        json!({ "part": self.layout.part, "rows": rows, "notes": self.notes })
    }

    /// Returns the charts as SVG, each with the name of its file.
    pub(super) fn charts(&self) -> Vec<(&'static str, String)> {
        self.layout.charts.iter().map(|chart| (chart.file, self.chart(chart))).collect()
    }

    fn chart(&self, chart: &Chart) -> String {
        let columns = self.layout.columns;
        let x = Axis::new(columns[0].name, columns[0].unit);
        let x = if self.layout.is_log { x.log() } else { x };
        let y = Axis::new(chart.axis, columns[self.layout.position(chart.keys[0])].unit);
        let mut drawn = CurveChart::new(chart.title, x, y).subtitle("cargo xtask bench scaling");
        for key in chart.keys {
            let position = self.layout.position(key);
            let points = self.rows.iter().filter_map(|row| row[0].zip(row[position])).collect();
            drawn = drawn.curve(Curve::new(columns[position].name, points).dots());
        }
        curves(&drawn)
    }
}

impl fmt::Display for Table {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Layout { title, columns, tables, .. } = self.layout;
        writeln!(f, "{title}")?;
        for keys in *tables {
            let shown: Vec<usize> =
                std::iter::once(0).chain(keys.iter().map(|key| self.layout.position(key))).collect();
            let line = |cells: Vec<String>| format!("| {} |", cells.join(" | "));
            writeln!(f, "\n{}", line(shown.iter().map(|&at| columns[at].name.to_owned()).collect()))?;
            writeln!(f, "|{}", "---|".repeat(shown.len()))?;
            for row in &self.rows {
                writeln!(f, "{}", line(shown.iter().map(|&at| self.cell(row, at)).collect()))?;
            }
        }
        for note in &self.notes {
            writeln!(f, "\n{note}")?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    static LAYOUT: Layout = Layout {
        part: "sizes",
        title: "Sizes",
        columns: &[
            column("size", "cache", Unit::Bytes),
            column("iops", "IOPS", Unit::Count),
            column("cpu", "CPU per I/O", Unit::Seconds),
        ],
        tables: &[&["cpu", "iops"], &["iops"]],
        charts: &[Chart { file: "iops.svg", title: "IOPS by size", axis: "IOPS", keys: &["iops"] }],
        is_log: true,
    };

    fn table() -> Table {
        let mut table = Table::new(&LAYOUT);
        table.row([Some(1048576.0), Some(12000.0), None]);
        table.row([Some(2097152.0), Some(90.0), Some(5e-6)]);
        table.note("a note".to_owned());
        table
    }

    #[test]
    fn tables_are_markdown() {
        assert_eq!(
            table().to_string(),
            "Sizes\n\n| cache | CPU per I/O | IOPS |\n|---|---|---|\n| 1 MiB | – | 12,000 |\n\
             | 2 MiB | 5 µs | 90 |\n\n| cache | IOPS |\n|---|---|\n| 1 MiB | 12,000 |\n| 2 MiB | 90 |\n\
             \na note\n"
        );
    }

    #[test]
    fn json_has_every_column_and_charts_have_every_row() {
        let rows = table().json()["rows"].clone();
        assert_eq!(rows[0], json!({ "size": 1048576.0, "iops": 12000.0, "cpu": null }));
        assert_eq!(rows[1]["cpu"], json!(5e-6));
        let charts = table().charts();
        assert_eq!(charts.len(), 1);
        let (file, svg) = &charts[0];
        assert!(*file == "iops.svg" && svg.starts_with("<svg ") && !svg.contains("no data"), "{svg}");
    }

    /// Each layout must have existing keys, tables of at most four columns, and charts of one unit.
    #[test]
    fn layouts_are_complete() {
        for layout in super::super::layouts::ALL {
            let unit = |key: &&str| layout.columns[layout.position(key)].unit;
            for keys in layout.tables {
                assert!(keys.len() <= 3, "{}: {keys:?}", layout.part);
                assert!(keys.iter().all(|key| layout.position(key) > 0), "{}: {keys:?}", layout.part);
            }
            for chart in layout.charts {
                assert!(chart.keys.iter().all(|key| unit(key) == unit(&chart.keys[0])), "{}", chart.file);
                assert!(chart.file.starts_with(&format!("scaling-{}-", layout.part)), "{}", chart.file);
            }
            let printed = |key: &&str| layout.tables.iter().any(|keys| keys.contains(key));
            assert!(layout.columns[1..].iter().all(|column| printed(&column.key)), "{}", layout.part);
        }
    }
}
