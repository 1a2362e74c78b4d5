//! Runs figures: first all simulations in parallel in a few threads, then the evaluations.
//!
//! Each simulation is single-threaded and deterministic, so the results do not depend on the number
//! of threads. After an interruption no file is written.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Instant;

use anyhow::{Context, Result, bail, ensure};
use serde::Serialize;

use super::case::{Case, Measured, play, scale_of};
use super::{FIGURES, FigureInfo, Findings, Fitted, Line, PUBLISHED, Published, Size, Work, publish};
use crate::jobs::run_all;
use crate::page::Check;

/// Options of the figures.
#[derive(Clone, Debug)]
pub struct Options {
    /// Output directory of the page and its files. The directory is created if it is missing, and
    /// existing files are replaced.
    pub out: PathBuf,
    /// Number of parallel simulations, at least one.
    pub threads: usize,
    /// Length of the workloads.
    pub size: Size,
    /// Command and version that the page prints as its origin.
    pub made_by: String,
}

/// Progress of running the figures.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Progress {
    /// Number of completed simulations.
    pub runs: usize,
    /// Total number of simulations.
    pub runs_total: usize,
    /// Number of requests so far, including warm-ups.
    pub requests: u64,
}

/// Report of all figures.
#[derive(Clone, Debug, Serialize)]
pub struct Report {
    /// Reports of the figures, in the order of [`FIGURES`].
    pub figures: Vec<FigureReport>,
    /// All published results of the sources, and the figures that reproduce them.
    pub published: &'static [Published],
    /// Path of the HTML page.
    pub page: PathBuf,
    /// Real time that all simulations and evaluations took, seconds.
    pub elapsed_s: f64,
    /// Number of requests, including warm-ups.
    pub requests: u64,
}

/// Report of one figure.
#[derive(Clone, Debug, Serialize)]
pub struct FigureReport {
    /// Name of the figure in [`FIGURES`].
    pub name: &'static str,
    /// Title of the figure in one line.
    pub title: &'static str,
    /// Publication that has the published result.
    pub source: &'static str,
    /// The published result.
    pub published: &'static str,
    /// Method by which hob reproduces the result.
    pub method: &'static str,
    /// Result of all checks. The figure fails if any line fails, and otherwise differs if any line
    /// differs. The figure is open if it cannot be measured yet.
    pub check: Check,
    /// Inputs that were fitted to published results.
    pub fitted: &'static [Fitted],
    /// Reason why the figure cannot be measured yet; `None` if it was measured.
    pub waits_for: Option<&'static str>,
    /// Divisor of footprint, cache and warm-up of the workload; `None` for a figure without a
    /// workload.
    pub scale: Option<u64>,
    /// Published and measured values.
    pub lines: Vec<Line>,
    /// Limits of the measurement, and reasons of differences.
    pub notes: Vec<String>,
    /// Names of the figure's picture and table in the output directory.
    pub files: Vec<String>,
    /// Picture of the figure as SVG.
    #[serde(skip)]
    pub(super) picture: String,
}

impl Report {
    /// Returns the number of lines with this result.
    pub fn count(&self, check: Check) -> usize {
        let lines = self.figures.iter().flat_map(|figure| &figure.lines);
        lines.filter(|line| line.check == Some(check)).count()
    }
}

/// Runs the named figures, or all figures if `names` is empty, and writes page, pictures and
/// tables.
///
/// `progress` is called at intervals on the caller's thread. Setting `stop` cancels the work.
///
/// # Errors
/// Returns an error if a name is unknown, the directory cannot be written, or `stop` was set. In
/// these cases no file is written.
pub fn run(
    names: &[String],
    options: &Options,
    stop: &Arc<AtomicBool>,
    mut progress: impl FnMut(Progress),
) -> Result<Report> {
    let figures = chosen(names)?;
    // An unusable directory is reported now and not after minutes of work.
    std::fs::create_dir_all(&options.out)
        .with_context(|| format!("cannot create the directory {}", options.out.display()))?;
    let began = Instant::now();
    let requests = Arc::new(AtomicU64::new(0));
    let cases: Vec<Vec<Case>> = figures.iter().map(|figure| cases_of(figure, options.size)).collect();
    let measured = play_all(&cases, options.threads, stop, &requests, &mut progress)?;
    let mut reports = Vec::with_capacity(figures.len());
    for ((figure, cases), runs) in figures.into_iter().zip(&cases).zip(&measured) {
        reports.push(report_on(figure, cases, runs)?);
    }
    ensure!(!stop.load(Ordering::Relaxed), "interrupted; nothing was written");
    let report = Report {
        figures: reports,
        published: PUBLISHED,
        page: options.out.join(publish::PAGE),
        elapsed_s: began.elapsed().as_secs_f64(),
        requests: requests.load(Ordering::Relaxed),
    };
    publish::write(&report, options)?;
    Ok(report)
}

/// Returns the named figures in the order of [`FIGURES`], each once.
fn chosen(names: &[String]) -> Result<Vec<&'static FigureInfo>> {
    for name in names {
        FigureInfo::find(name)?;
    }
    let is_chosen = |figure: &&FigureInfo| names.is_empty() || names.iter().any(|name| name == figure.name);
    Ok(FIGURES.iter().filter(is_chosen).collect())
}

fn cases_of(figure: &FigureInfo, size: Size) -> Vec<Case> {
    match figure.work {
        Work::Play { cases, .. } => cases(size),
        Work::NotYet(_) => vec![],
    }
}

/// Runs all cases. The results have the order of the cases.
fn play_all(
    cases: &[Vec<Case>],
    threads: usize,
    stop: &Arc<AtomicBool>,
    requests: &Arc<AtomicU64>,
    progress: &mut impl FnMut(Progress),
) -> Result<Vec<Vec<Measured>>> {
    let jobs: Vec<&Case> = cases.iter().flatten().collect();
    let runs_total = jobs.len();
    let count = || requests.load(Ordering::Relaxed);
    let results = run_all(
        &jobs,
        threads,
        stop,
        |case| play(case, stop, requests),
        |runs| progress(Progress { runs, runs_total, requests: count() }),
    );
    let Some(results) = results else { bail!("interrupted; nothing was written") };
    let mut results = results.into_iter();
    cases.iter().map(|cases| results.by_ref().take(cases.len()).collect()).collect()
}

fn report_on(figure: &'static FigureInfo, cases: &[Case], runs: &[Measured]) -> Result<FigureReport> {
    let Findings { lines, mut notes, picture } = match figure.work {
        Work::Play { judge, .. } => judge(runs).with_context(|| figure.name)?,
        Work::NotYet(_) => Findings { lines: vec![], notes: vec![], picture: String::new() },
    };
    let has = |check| lines.iter().any(|line| line.check == Some(check));
    let check = match () {
        () if figure.waits_for().is_some() => Check::Open,
        () if has(Check::Fails) => Check::Fails,
        () if has(Check::Differs) => Check::Differs,
        () => Check::Holds,
    };
    let differing = lines.iter().filter(|line| line.check == Some(Check::Differs));
    notes.extend(differing.map(|line| format!("{}: {}", line.what, line.reason)));
    let files = match figure.work {
        Work::Play { .. } => vec![publish::svg_name(figure.name), publish::csv_name(figure.name)],
        Work::NotYet(_) => vec![],
    };
    Ok(FigureReport {
        name: figure.name,
        title: figure.title,
        source: figure.source,
        published: figure.published,
        method: figure.method,
        check,
        fitted: figure.fitted,
        waits_for: figure.waits_for(),
        scale: cases.first().map(|case| scale_of(&case.settings)),
        lines,
        notes,
        files,
        picture,
    })
}
