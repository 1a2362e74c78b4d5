//! Writes the tables of docs/LAB.md: for each figure its fitted inputs, checks and differences, and
//! the state of all published results.

use std::fmt::Write;

use super::run::{FigureReport, Report};
use super::{Line, PUBLISHED};
use crate::page::Check;

/// Maximum length of a line of text.
const LINE_CHARS_MAX: usize = 100;

/// Text in docs/LAB.md before the table that [`state_table`] returns.
const SYSTEMS: &str = "\
The number after § names the published system: §1 vSphere Flash Read Cache, §2 EMC FAST Cache, §3 vSAN 7, §4 SmartX ZBS beside vSAN,
§5 vSphere Storage I/O Control.

";

/// Returns the generated section of docs/LAB.md as Markdown: a table of the figures, the reasons of
/// differences, and [`state_table`]. The report must be of all figures at full size.
pub fn section(report: &Report) -> String {
    let [holds, differs, fails] =
        [Check::Holds, Check::Differs, Check::Fails].map(|check| report.count(check));
    let mut text = format!(
        "Of {} checks {holds} hold, {differs} differ for a confirmed reason, and {fails} fail.\n\n",
        holds + differs + fails
    );
    text += "| figure | fitted inputs | checks | differences |\n|---|---|---|---|\n";
    for figure in report.figures.iter().filter(|figure| figure.waits_for.is_none()) {
        let [name, fitted, checks, differences] = row(figure);
        writeln!(text, "| {name} | {fitted} | {checks} | {differences} |")
            .expect("a string takes everything");
    }
    text + "\n" + &reasons(report) + "\n" + SYSTEMS + &state_table()
}

/// Returns the reasons of all differences as a Markdown list.
fn reasons(report: &Report) -> String {
    let mut text = String::new();
    for figure in &report.figures {
        for line in figure.lines.iter().filter(|line| line.check == Some(Check::Differs)) {
            text += &item(&format!("`{}`, {}: {}", figure.name, line.what, line.reason));
        }
    }
    text
}

/// Returns an item of a Markdown list with lines of at most 100 characters.
fn item(text: &str) -> String {
    let mut lines = vec!["-".to_owned()];
    for word in text.split(' ') {
        let line = lines.last_mut().expect("there is a line");
        match line.chars().count() + 1 + word.chars().count() <= LINE_CHARS_MAX {
            true => *line = format!("{line} {word}"),
            false => lines.push(format!("  {word}")),
        }
    }
    lines.join("\n") + "\n"
}

/// Returns the table of all published results and their state as Markdown.
pub fn state_table() -> String {
    let mut text = String::from("| published result | figure | state |\n|---|---|---|\n");
    for published in PUBLISHED {
        let figure = published.figure.map_or("–".to_owned(), |name| format!("`{name}`"));
        writeln!(text, "| {} | {figure} | {} |", published.result, published.state())
            .expect("a string takes everything");
    }
    text
}

/// Returns the cells of a figure's row: name, fitted inputs, checks, and differences with failed
/// checks.
pub(super) fn row(figure: &FigureReport) -> [String; 4] {
    let fitted = figure.fitted.iter().map(|fitted| format!("`{}` to {}", fitted.input, fitted.to));
    let is_check = |line: &&Line| matches!(line.check, Some(Check::Holds | Check::Differs | Check::Fails));
    let checks = figure.lines.iter().filter(is_check).map(|line| line.what.clone());
    let differences = figure.lines.iter().filter_map(difference);
    let joined = |cells: Vec<String>| if cells.is_empty() { "–".to_owned() } else { cells.join("; ") };
    [
        format!("`{}`", figure.name),
        joined(fitted.collect()),
        joined(checks.collect()),
        joined(differences.collect()),
    ]
}

fn difference(line: &Line) -> Option<String> {
    let word = match line.check {
        Some(Check::Differs) => "explained",
        Some(Check::Fails) => "fails",
        _ => return None,
    };
    let (published, measured) = (line.published_text(), line.measured_text());
    Some(format!("{} ({word}): published {published}, hob {measured}", line.what))
}
