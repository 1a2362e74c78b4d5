//! Runs figures: all runs of all of them side by side in a few threads, then what each shows.
//!
//! A run is single-threaded and deterministic, so the numbers do not depend on how many threads share the work. When
//! it is interrupted nothing is written.

use std::collections::VecDeque;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use serde::Serialize;

use super::case::{Case, Measured, play, scale_of};
use super::{FIGURES, FigureInfo, Findings, Line, Size, Work, publish};
use crate::page::Check;

/// How often progress is told.
const PROGRESS_EVERY: Duration = Duration::from_millis(100);

/// How to run figures.
#[derive(Clone, Debug)]
pub struct Options {
    /// Directory of the page and its files; made when absent. Files of the same names are replaced.
    pub out: PathBuf,
    /// Runs at a time, at least one.
    pub threads: usize,
    /// Of the workloads.
    pub size: Size,
    /// What the page says of how it was made: the command and its version.
    pub made_by: String,
}

/// How far it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Progress {
    /// Runs that have ended.
    pub runs: usize,
    /// All runs.
    pub runs_total: usize,
    /// Requests so far, warm-ups included.
    pub requests: u64,
}

/// What came of it.
#[derive(Clone, Debug, Serialize)]
pub struct Report {
    /// In the order of [`FIGURES`].
    pub figures: Vec<FigureReport>,
    /// The page.
    pub page: PathBuf,
    /// Time it took, seconds.
    pub elapsed_s: f64,
    /// Requests played, warm-ups included.
    pub requests: u64,
}

/// One figure.
#[derive(Clone, Debug, Serialize)]
pub struct FigureReport {
    /// As in [`FIGURES`].
    pub name: &'static str,
    /// One line.
    pub title: &'static str,
    /// Where its numbers were published.
    pub source: &'static str,
    /// What was published.
    pub published: &'static str,
    /// How it is made.
    pub method: &'static str,
    /// Red when one of its lines is; open when it cannot be made yet.
    pub check: Check,
    /// What it waits for, if so.
    pub waits_for: Option<&'static str>,
    /// Footprint, cache and warm-up of the workload were divided by this; none where there was no workload.
    pub scale: Option<u64>,
    /// Published and measured.
    pub lines: Vec<Line>,
    /// Limits, and why a check is red.
    pub notes: Vec<String>,
    /// Names of its picture and table in the page's directory.
    pub files: Vec<String>,
    /// Its picture.
    #[serde(skip)]
    pub(super) picture: String,
}

impl Report {
    /// Checks that hold, and checks that do not.
    pub fn checks(&self) -> (usize, usize) {
        let count = |check| {
            let lines = self.figures.iter().flat_map(|figure| &figure.lines);
            lines.filter(|line| line.check == Some(check)).count()
        };
        (count(Check::Pass), count(Check::Fail))
    }
}

/// Runs the named figures, all of them when none is named, and writes page, pictures and tables.
///
/// `progress` is told now and then, from the caller's thread. `stop` ends the work soon.
///
/// # Errors
/// A name is unknown, the directory cannot be written, or `stop` was set: then nothing is written.
pub fn run(
    names: &[String],
    options: &Options,
    stop: &Arc<AtomicBool>,
    mut progress: impl FnMut(Progress),
) -> Result<Report> {
    let figures = chosen(names)?;
    // Better now than after minutes.
    std::fs::create_dir_all(&options.out)
        .with_context(|| format!("cannot make the directory {}", options.out.display()))?;
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
        page: options.out.join(publish::PAGE),
        elapsed_s: began.elapsed().as_secs_f64(),
        requests: requests.load(Ordering::Relaxed),
    };
    publish::write(&report, options)?;
    Ok(report)
}

/// The named figures in the table's order, each once.
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

/// Plays every run. Results stand as the cases do.
fn play_all(
    cases: &[Vec<Case>],
    threads: usize,
    stop: &Arc<AtomicBool>,
    requests: &Arc<AtomicU64>,
    progress: &mut impl FnMut(Progress),
) -> Result<Vec<Vec<Measured>>> {
    let jobs: VecDeque<(usize, &Case)> = cases.iter().flatten().enumerate().collect();
    let runs_total = jobs.len();
    let (jobs, results) = (Mutex::new(jobs), Mutex::new(Vec::with_capacity(runs_total)));
    // Apart, so that the lock is not held while the job is done.
    let next = || jobs.lock().expect("a run panicked").pop_front();
    let work = || {
        while !stop.load(Ordering::Relaxed)
            && let Some((index, case)) = next()
        {
            let result = play(case, stop, requests);
            results.lock().expect("a run panicked").push((index, result));
        }
    };
    std::thread::scope(|scope| {
        let workers: Vec<_> = (0..threads.clamp(1, runs_total.max(1))).map(|_| scope.spawn(work)).collect();
        loop {
            let is_over = workers.iter().all(|worker| worker.is_finished());
            let runs = results.lock().map_or(0, |results| results.len());
            progress(Progress { runs, runs_total, requests: requests.load(Ordering::Relaxed) });
            if is_over {
                break;
            }
            std::thread::sleep(PROGRESS_EVERY);
        }
        // A run that panicked says so here.
        for worker in workers {
            worker.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        }
    });
    if stop.load(Ordering::Relaxed) {
        bail!("interrupted; nothing was written");
    }
    let mut results = results.into_inner().expect("a run panicked");
    results.sort_by_key(|(index, _)| *index);
    let mut results = results.into_iter().map(|(_, result)| result);
    cases.iter().map(|cases| results.by_ref().take(cases.len()).collect()).collect()
}

fn report_on(figure: &'static FigureInfo, cases: &[Case], runs: &[Measured]) -> Result<FigureReport> {
    let Findings { lines, notes, picture } = match figure.work {
        Work::Play { judge, .. } => judge(runs).with_context(|| figure.name)?,
        Work::NotYet(_) => Findings { lines: vec![], notes: vec![], picture: String::new() },
    };
    let is_red = lines.iter().any(|line| line.check == Some(Check::Fail));
    let check = if figure.waits_for().is_some() { Check::Open } else { Check::of(!is_red) };
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
        waits_for: figure.waits_for(),
        scale: cases.first().map(|case| scale_of(&case.settings)),
        lines,
        notes,
        files,
        picture,
    })
}
