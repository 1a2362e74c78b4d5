//! Writes the report of all figures: an HTML page, and the picture and table of each figure as
//! separate files.
//!
//! Each file is first written under a temporary name, and the page is written last, so a partial
//! page never exists.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result};

use super::Size;
use super::line::CSV_HEAD;
use super::run::{FigureReport, Options, Report};
use crate::page::{Card, Cell, Check, Figure, Page, Section, Table};
use crate::picture::Unit;

pub(super) const PAGE: &str = "index.html";

pub(super) fn csv_name(figure: &str) -> String {
    format!("{figure}.csv")
}

pub(super) fn svg_name(figure: &str) -> String {
    format!("{figure}.svg")
}

/// Writes all files of the report into the output directory, which must exist.
pub(super) fn write(report: &Report, options: &Options) -> Result<()> {
    for figure in report.figures.iter().filter(|figure| figure.waits_for.is_none()) {
        place(&options.out, &svg_name(figure.name), &figure.picture)?;
        place(&options.out, &csv_name(figure.name), &csv(figure))?;
    }
    place(&options.out, PAGE, &page(report, options).render())
}

/// Writes a file into the directory. The file appears when it is complete.
pub(crate) fn place(dir: &Path, name: &str, text: &str) -> Result<()> {
    let (path, unfinished) = (dir.join(name), dir.join(format!("{name}.tmp")));
    fs::write(&unfinished, text)
        .and_then(|()| fs::rename(&unfinished, &path))
        .with_context(|| format!("cannot write {}", path.display()))
}

fn csv(figure: &FigureReport) -> String {
    let rows = figure.lines.iter().map(|line| line.csv());
    let mut text = std::iter::once(CSV_HEAD.to_owned()).chain(rows).collect::<Vec<String>>().join("\n");
    text.push('\n');
    text
}

fn page(report: &Report, options: &Options) -> Page {
    let [holds, differs, fails] =
        [Check::Holds, Check::Differs, Check::Fails].map(|check| report.count(check));
    let checks = holds + differs + fails;
    let open = report.figures.iter().filter(|figure| figure.check == Check::Open).count();
    let verdict = match fails {
        0 => format!(
            "{holds} of {checks} checks hold. The other {differs} differ, and a measurement confirms each reason."
        ),
        _ => format!(
            "{fails} of {checks} checks fail, {differs} differ for a confirmed reason, and {holds} hold."
        ),
    };
    let mut page = Page::new("hob: published figures, measured again")
        .lead(verdict)
        .lead(
            "This page compares published results of other caches with results of hob under the same kind of load. \
             hob's own engine runs in virtual time, on models of the sources' devices. So the results are the same on \
             every host.",
        )
        .lead(
            "The sources' traces and benchmarks are not available, so generators with the published characteristics \
             replace them. Each section names the inputs that were fitted to published results. If the result of a \
             line follows from an input, the line is called 'by construction' and is not a check.",
        )
        .card(
            Card::new("checks that hold", format!("{holds} of {checks}")).check(Check::of(fails == 0)),
        )
        .card(Card::new("differ, explained", differs.to_string()))
        .card(Card::new("not measured", open.to_string()).note("their sections say why"))
        .card(
            Card::new("time taken", Unit::Seconds.text(report.elapsed_s))
                .note(format!("{} requests", Unit::Count.text(report.requests as f64))),
        );
    if options.size == Size::Quick {
        page = page.lead("This is a quick run: its workloads are too small for meaningful checks.");
    }
    for figure in &report.figures {
        page = page.section(section(figure));
    }
    page.section(systems(report)).made_by(&options.made_by)
}

/// Returns the table of all published results, and the figures that reproduce them.
fn systems(report: &Report) -> Section {
    let heads = ["published", "figure", "state"];
    let table = report.published.iter().fold(Table::new(heads), |table, published| {
        let figure = published.figure.map_or(Cell::Missing, Cell::text);
        table.row([Cell::text(published.result), figure, Cell::text(published.state())])
    });
    Section::new("All published results").table(table)
}

fn section(figure: &FigureReport) -> Section {
    let section = Section::new(figure.title)
        .check(figure.check)
        .paragraph(format!("Published in {}: {}", figure.source, figure.published));
    if let Some(why) = figure.waits_for {
        return section.note(format!("Not yet: {why}."));
    }
    let mut section = section.paragraph(figure.method).note(scale(figure));
    if !figure.fitted.is_empty() {
        let inputs = figure.fitted.iter().map(|fitted| format!("{} to {}", fitted.input, fitted.to));
        section = section.note(format!("Fitted: {}.", inputs.collect::<Vec<String>>().join("; ")));
    }
    section = figure.notes.iter().fold(section, |section, note| section.note(note));
    let heads = ["", "published", "measured", "must be", "check"];
    let table = figure.lines.iter().fold(Table::new(heads), |table, line| table.row(line.cells()));
    let picture = Figure::new(&figure.picture, format!("{}: published and measured", figure.name));
    section.figure(picture).table(table.csv(csv_name(figure.name)))
}

/// Describes by how much a figure's workload was scaled down.
fn scale(figure: &FigureReport) -> String {
    match figure.scale {
        None => "Scale: none. No size is scaled down.".to_owned(),
        Some(1) => "Scale: 1. Footprint, cache and warm-up are not scaled down.".to_owned(),
        Some(scale) => format!(
            "Scale: 1/{scale}. Footprint, cache and warm-up are divided by {scale}, so the cache holds the same share \
             of the data; block and request sizes, rates and devices are not scaled."
        ),
    }
}
