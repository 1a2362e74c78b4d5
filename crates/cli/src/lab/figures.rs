//! `hob lab figures [NAME…]`: repeats published measurements; writes a page, pictures and tables to
//! a directory.

use std::path::PathBuf;

use anyhow::{bail, ensure};
use clap::Args;
use clap::builder::PossibleValuesParser;
use hob_lab::figures::{FIGURES, FigureReport, Line, Options, Published, Report, Size, run as run_figures};
use hob_lab::page::Check;
use indicatif::{ProgressBar, ProgressStyle};

use super::interruption;
use super::sim::processors;
use crate::Global;
use crate::output::{numbers, print, table, with_notes, words};

/// Repeat published measurements of other caches, with hob's engine on modelled devices
///
/// Writes index.html and, for each figure, a picture and a table. The exit code is 1 if a check fails. A difference whose reason a
/// measurement confirms is no failure. The last table lists all published results and their state.
#[derive(Debug, Args)]
pub(crate) struct Figures {
    /// Compute only these figures [default: all]
    #[arg(value_name = "NAME", value_parser = PossibleValuesParser::new(FIGURES.iter().map(|figure| figure.name)))]
    names: Vec<String>,
    /// Directory of the page and its files; created if absent
    #[arg(long, value_name = "DIR", default_value = "hob-figures")]
    out: PathBuf,
    /// Number of parallel runs [default: one for each processor]
    #[arg(long, value_name = "N")]
    threads: Option<usize>,
    /// Run for seconds only, with workloads too small for meaningful checks
    #[arg(long)]
    quick: bool,
}

pub(super) fn run(args: &Figures, global: &Global) -> anyhow::Result<()> {
    let threads = args.threads.unwrap_or_else(processors);
    ensure!(threads > 0, "--threads 0 runs nothing");
    let quick = if args.quick { " --quick" } else { "" };
    let options = Options {
        out: args.out.clone(),
        threads,
        size: if args.quick { Size::Quick } else { Size::Full },
        made_by: format!("Made by hob {}: hob lab figures{quick}", env!("CARGO_PKG_VERSION")),
    };
    let stop = interruption()?;
    let style = "{bar:40} {pos} of {len} runs, {msg} requests, {elapsed}";
    let bar = ProgressBar::new(0).with_style(ProgressStyle::with_template(style)?);
    let report = run_figures(&args.names, &options, &stop, |progress| {
        bar.set_length(progress.runs_total as u64);
        bar.set_position(progress.runs as u64);
        bar.set_message(progress.requests.to_string());
    });
    bar.finish_and_clear();
    let report = report?;
    print(global.output, &report, show)?;
    match report.count(Check::Fails) {
        0 => Ok(()),
        fails => bail!("{fails} of {} checks fail: {}", checks(&report), failed_lines(&report).join("; ")),
    }
}

/// Returns the number of all checks.
fn checks(report: &Report) -> usize {
    [Check::Holds, Check::Differs, Check::Fails].map(|check| report.count(check)).iter().sum()
}

fn failed_lines(report: &Report) -> Vec<String> {
    let figures = report.figures.iter();
    let lines = figures.flat_map(|figure| figure.lines.iter().map(move |line| (figure.name, line)));
    let failed = lines.filter(|(_, line)| line.check == Some(Check::Fails));
    failed.map(|(name, line)| format!("{name}, {}", line.what)).collect()
}

fn show(report: &Report) -> String {
    let columns = [
        words("FIGURE"),
        words("WHAT"),
        numbers("PUBLISHED"),
        numbers("MEASURED"),
        words("MUST BE"),
        words("CHECK"),
    ];
    let text = table(&columns, report.figures.iter().flat_map(rows));
    let figures = report.figures.iter();
    let mut notes: Vec<String> = figures
        .flat_map(|figure| figure.notes.iter().map(move |note| format!("{}: {note}", figure.name)))
        .collect();
    notes.push(format!(
        "{} of {} checks hold, {} differ for a confirmed reason; {} requests in {:.0} s; the page is {}",
        report.count(Check::Holds),
        checks(report),
        report.count(Check::Differs),
        report.requests,
        report.elapsed_s,
        report.page.display()
    ));
    let columns = [words("PUBLISHED RESULT"), words("FIGURE"), words("STATE")];
    let state = |published: &Published| {
        let figure = published.figure.unwrap_or("–");
        vec![published.result.to_owned(), figure.to_owned(), published.state()]
    };
    let states = table(&columns, report.published.iter().map(state));
    format!("{}\n{states}", with_notes(text, &notes))
}

/// Returns one row per line; only the first row names the figure.
fn rows(figure: &FigureReport) -> Vec<Vec<String>> {
    if let Some(why) = figure.waits_for {
        let missing = || "–".to_owned();
        let check = Check::Open.text().to_owned();
        return vec![vec![
            figure.name.to_owned(),
            why.to_owned(),
            missing(),
            missing(),
            String::new(),
            check,
        ]];
    }
    let row = |(index, line): (usize, &Line)| {
        vec![
            if index == 0 { figure.name.to_owned() } else { String::new() },
            line.what.clone(),
            line.published_text(),
            line.measured_text(),
            line.expected.clone(),
            line.check.map_or("", Check::text).to_owned(),
        ]
    };
    figure.lines.iter().enumerate().map(row).collect()
}
