//! Content of a page section: paragraphs, notes, commands, tables and figures.

use super::line;
use crate::markup::escaped;

/// Length of a cell's text in bytes above which its column becomes wider, even if the table must
/// then scroll.
const LONG: usize = 30;

/// Result of a check, shown as a sign and a word.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Check {
    /// The result is as expected.
    Holds,
    /// The result differs from the expected one, and a measurement confirmed the reason.
    Differs,
    /// The result differs from the expected one, and no measured reason is known.
    Fails,
    /// No check: the result follows from an input.
    ByConstruction,
    /// The check was not done, or is not possible yet.
    Open,
}

impl Check {
    /// Returns the verdict of a test.
    pub fn of(passed: bool) -> Check {
        if passed { Check::Holds } else { Check::Fails }
    }

    /// Returns sign and word as the page shows them.
    pub fn text(self) -> &'static str {
        match self {
            Check::Holds => "✔ holds",
            Check::Differs => "≠ differs, explained",
            Check::Fails => "✘ fails",
            Check::ByConstruction => "= by construction",
            Check::Open => "– not yet",
        }
    }

    /// Returns the result as a word for programs and style sheets.
    pub(crate) fn word(self) -> &'static str {
        match self {
            Check::Holds => "holds",
            Check::Differs => "differs",
            Check::Fails => "fails",
            Check::ByConstruction => "by-construction",
            Check::Open => "open",
        }
    }

    pub(super) fn html(self) -> String {
        format!("<span class=\"check {}\">{}</span>", self.word(), self.text())
    }
}

/// A cell of a table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Cell {
    /// Text, left-aligned.
    Text(String),
    /// A number with its unit, formatted and right-aligned.
    Number(String),
    /// Result of a check.
    Check(Check),
    /// An unknown value, shown as a right-aligned en dash.
    Missing,
}

impl Cell {
    /// Creates a cell with text.
    pub fn text(text: impl Into<String>) -> Cell {
        Cell::Text(text.into())
    }

    /// Creates a cell with a formatted number.
    pub fn number(text: impl Into<String>) -> Cell {
        Cell::Number(text.into())
    }

    /// Creates a cell with the result of a check.
    pub fn check(check: Check) -> Cell {
        Cell::Check(check)
    }

    fn html(&self) -> String {
        match self {
            Cell::Text(text) | Cell::Number(text) => escaped(text),
            Cell::Check(check) => check.html(),
            Cell::Missing => "–".to_owned(),
        }
    }

    fn is_number(&self) -> bool {
        matches!(self, Cell::Number(_) | Cell::Missing)
    }
}

/// A table. The first cell of each row is the row's name.
#[derive(Clone, Debug)]
pub struct Table {
    caption: String,
    heads: Vec<String>,
    rows: Vec<Vec<Cell>>,
    csv: Option<String>,
    is_copyable: bool,
}

impl Table {
    /// Creates a table with these column heads. The head of a column of numbers is right-aligned
    /// too.
    pub fn new<H: Into<String>>(heads: impl IntoIterator<Item = H>) -> Table {
        let heads = heads.into_iter().map(Into::into).collect();
        Table { caption: String::new(), heads, rows: Vec::new(), csv: None, is_copyable: false }
    }

    /// Returns the table with a caption above it.
    pub fn caption(self, caption: impl Into<String>) -> Table {
        Table { caption: caption.into(), ..self }
    }

    /// Returns the table with one more row.
    ///
    /// # Panics
    /// Panics if the number of cells differs from the number of columns.
    pub fn row(mut self, cells: impl IntoIterator<Item = Cell>) -> Table {
        let cells: Vec<Cell> = cells.into_iter().collect();
        assert_eq!(cells.len(), self.heads.len(), "a row has a cell for each column");
        self.rows.push(cells);
        self
    }

    /// Returns the table with a link to a CSV file of its numbers; see [`Figure::csv`].
    pub fn csv(self, path: impl Into<String>) -> Table {
        Table { csv: Some(path.into()), ..self }
    }

    /// Returns the table with its content as text below it, which one click selects. Tabs separate
    /// the columns, as spreadsheets expect.
    pub fn copyable(self) -> Table {
        Table { is_copyable: true, ..self }
    }

    fn write_copy(&self, out: &mut String) {
        let text = |cell: &Cell| match cell {
            Cell::Text(text) | Cell::Number(text) => escaped(&text.replace(['\t', '\n'], " ")),
            Cell::Check(check) => check.word().to_owned(),
            Cell::Missing => String::new(),
        };
        line(out, format_args!("<details><summary>Table as text, to copy</summary>"));
        let heads: Vec<String> = self.heads.iter().map(|head| escaped(head)).collect();
        line(out, format_args!("<pre class=\"copy\" tabindex=\"0\">{}", heads.join("\t")));
        for row in &self.rows {
            line(out, format_args!("{}", row.iter().map(text).collect::<Vec<_>>().join("\t")));
        }
        line(out, format_args!("</pre></details>"));
    }

    fn write(&self, out: &mut String, section: &str) {
        let name = if self.caption.is_empty() { section.to_owned() } else { escaped(&self.caption) };
        scroll(out, &format!("table: {name}"));
        line(out, format_args!("<table>"));
        if !self.caption.is_empty() {
            line(out, format_args!("<caption>{}</caption>", escaped(&self.caption)));
        }
        let numbers = |column: usize| {
            let cells = || self.rows.iter().map(|row| &row[column]);
            cells().all(Cell::is_number) && cells().any(|cell| matches!(cell, Cell::Number(_)))
        };
        let head = |(column, head): (usize, &String)| {
            let class = if numbers(column) { " class=\"number\"" } else { "" };
            format!("<th scope=\"col\"{class}>{}</th>", escaped(head))
        };
        let heads: String = self.heads.iter().enumerate().map(head).collect();
        line(out, format_args!("<thead><tr>{heads}</tr></thead>\n<tbody>"));
        for row in &self.rows {
            let cells: String =
                row.iter().enumerate().map(|(column, cell)| cell_html(column, cell)).collect();
            line(out, format_args!("<tr>{cells}</tr>"));
        }
        line(out, format_args!("</tbody>\n</table>\n</div>"));
        if self.is_copyable {
            self.write_copy(out);
        }
        if let Some(path) = &self.csv {
            line(out, format_args!("<p>{}</p>", csv_link(path)));
        }
    }
}

fn cell_html(column: usize, cell: &Cell) -> String {
    let class = match cell {
        _ if cell.is_number() => " class=\"number\"",
        Cell::Text(text) if text.len() > LONG => " class=\"long\"",
        _ => "",
    };
    match column {
        0 => format!("<th scope=\"row\"{class}>{}</th>", cell.html()),
        _ => format!("<td{class}>{}</td>", cell.html()),
    }
}

/// A picture with a caption.
#[derive(Clone, Debug)]
pub struct Figure {
    svg: String,
    caption: String,
    csv: Option<String>,
}

impl Figure {
    /// Creates a figure. The text of `svg` goes into the page without escaping, so it must come
    /// from [`crate::picture`].
    ///
    /// # Panics
    /// Panics if `svg` is not an SVG element.
    pub fn new(svg: impl Into<String>, caption: impl Into<String>) -> Figure {
        let svg = svg.into();
        assert!(svg.starts_with("<svg ") && svg.trim_end().ends_with("</svg>"), "a figure is an SVG element");
        Figure { svg, caption: caption.into(), csv: None }
    }

    /// Returns the figure with a link to a CSV file of its numbers. The path is relative to the
    /// page, and special characters in it are encoded.
    pub fn csv(self, path: impl Into<String>) -> Figure {
        Figure { csv: Some(path.into()), ..self }
    }

    fn write(&self, out: &mut String) {
        line(out, format_args!("<figure>"));
        let name = if self.caption.is_empty() { "no caption".to_owned() } else { escaped(&self.caption) };
        scroll(out, &format!("figure: {name}"));
        line(out, format_args!("{}\n</div>", self.svg.trim_end()));
        let link = self.csv.as_deref().map(csv_link).unwrap_or_default();
        if !self.caption.is_empty() || !link.is_empty() {
            line(out, format_args!("<figcaption>{} {link}</figcaption>", escaped(&self.caption)));
        }
        line(out, format_args!("</figure>"));
    }
}

/// Opens an HTML box that scrolls sideways if its content is too wide, and that the keyboard can
/// focus.
fn scroll(out: &mut String, name: &str) {
    line(out, format_args!("<div class=\"scroll\" role=\"region\" tabindex=\"0\" aria-label=\"{name}\">"));
}

fn csv_link(path: &str) -> String {
    format!("<a href=\"{}\">{} (CSV)</a>", relative(path), escaped(path))
}

/// Returns the path as a relative URL. The prefix "./" prevents a colon from forming a scheme, and
/// special characters are encoded.
fn relative(path: &str) -> String {
    let byte = |byte: u8| match byte {
        b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'/' | b'-' | b'_' | b'.' | b'~' => {
            (byte as char).to_string()
        }
        _ => format!("%{byte:02X}"),
    };
    let encoded: String = path.trim_start_matches('/').bytes().map(byte).collect();
    format!("./{encoded}")
}

/// A section of the page with a heading.
#[derive(Clone, Debug)]
pub struct Section {
    title: String,
    check: Option<Check>,
    blocks: Vec<Block>,
}

#[derive(Clone, Debug)]
enum Block {
    Paragraph(String),
    Note(String),
    Command(String),
    Table(Table),
    Figure(Figure),
}

impl Section {
    /// Creates an empty section.
    pub fn new(title: impl Into<String>) -> Section {
        Section { title: title.into(), check: None, blocks: Vec::new() }
    }

    /// Returns the section with a verdict beside the heading and in the index.
    pub fn check(self, check: Check) -> Section {
        Section { check: Some(check), ..self }
    }

    /// Returns the section with one more paragraph.
    pub fn paragraph(self, text: impl Into<String>) -> Section {
        self.with(Block::Paragraph(text.into()))
    }

    /// Returns the section with a highlighted paragraph, for example a limit or a warning.
    pub fn note(self, text: impl Into<String>) -> Section {
        self.with(Block::Note(text.into()))
    }

    /// Returns the section with preformatted text of a terminal or file.
    pub fn command(self, text: impl Into<String>) -> Section {
        self.with(Block::Command(text.into()))
    }

    /// Returns the section with one more table.
    pub fn table(self, table: Table) -> Section {
        self.with(Block::Table(table))
    }

    /// Returns the section with one more figure.
    pub fn figure(self, figure: Figure) -> Section {
        self.with(Block::Figure(figure))
    }

    fn with(mut self, block: Block) -> Section {
        self.blocks.push(block);
        self
    }

    /// Returns title and verdict as HTML.
    pub(super) fn heading(&self) -> (String, String) {
        let verdict = self.check.map(|check| format!(" {}", check.html())).unwrap_or_default();
        (escaped(&self.title), verdict)
    }

    pub(super) fn write(&self, out: &mut String, number: usize) {
        let (title, verdict) = self.heading();
        line(out, format_args!("<section id=\"section-{number}\">\n<h2>{title}{verdict}</h2>"));
        for block in &self.blocks {
            match block {
                Block::Paragraph(text) => line(out, format_args!("<p>{}</p>", escaped(text))),
                Block::Note(text) => line(out, format_args!("<p class=\"note-box\">{}</p>", escaped(text))),
                Block::Command(text) => line(out, format_args!("<pre><code>{}</code></pre>", escaped(text))),
                Block::Table(table) => table.write(out, &title),
                Block::Figure(figure) => figure.write(out),
            }
        }
        line(out, format_args!("</section>"));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn links_lead_nowhere_but_to_files_beside_the_page() {
        let table = [
            ("figures/size sweep.csv", "./figures/size%20sweep.csv"),
            ("javascript:alert(1)", "./javascript%3Aalert%281%29"),
            ("//elsewhere.example/x", "./elsewhere.example/x"),
            ("\"><script>é", "./%22%3E%3Cscript%3E%C3%A9"),
            ("a?b#c", "./a%3Fb%23c"),
        ];
        for (path, link) in table {
            assert_eq!(relative(path), link);
        }
    }

    #[test]
    #[should_panic(expected = "a cell for each column")]
    fn a_row_fits_its_table() {
        let _ = Table::new(["a", "b"]).row([Cell::Missing]);
    }

    #[test]
    #[should_panic(expected = "a figure is an SVG element")]
    fn a_figure_is_a_picture() {
        let _ = Figure::new("<script>alert(1)</script>", "");
    }
}
