//! `hob lab figures [NAME…]`: repeats published measurements; writes a page, pictures and tables to
//! a directory. `hob lab figures TRACE…` compares divisions of one pool between the disks of
//! traces.

mod divisions;

use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};

use anyhow::{bail, ensure};
use clap::Args;
use clap::builder::{OsStringValueParser, PossibleValue, TypedValueParser};
use hob_lab::figures::{FIGURES, FigureReport, Line, Options, Published, Report, Size, run as run_figures};
use hob_lab::page::Check;
use hob_trace::is_present;

use super::share::{PoolArgs, Ways};
use super::sim::{CacheSize, processors};
use super::{interruption, runs_bar, show_runs};
use crate::Global;
use crate::output::{print, table, with_notes};

/// Repeat published measurements of other caches, with hob's engine on modelled devices; or compare
/// divisions of one pool between the disks of traces
///
/// Without traces: writes index.html and, for each figure, a picture and a table. The exit code is 1 if a check fails.
/// A check does not fail if a second measurement confirms the stated reason why the result differs from the published
/// one. The last table lists all published results and their state.
///
/// With traces: writes divisions.html, with the read hits of each disk for each way of --share and each size of the
/// pool, the difference to the best fixed parts, and the capacity of each disk over time with 'auto'.
#[derive(Debug, Args)]
pub(crate) struct Figures {
    /// Compute only these figures [default: all]; or use these traces. A trace with several disks counts as several
    #[arg(value_name = "NAME|TRACE", value_parser = SubjectParser)]
    subjects: Vec<Subject>,
    /// Directory of the page and its files; created if absent
    #[arg(long, value_name = "DIR", default_value = "hob-figures")]
    out: PathBuf,
    /// Number of parallel runs [default: one for each processor]
    #[arg(long, value_name = "N")]
    threads: Option<usize>,
    /// Run for seconds only, with workloads too small for meaningful checks
    #[arg(long, conflicts_with = "share")]
    quick: bool,
    #[command(flatten)]
    ways: Ways,
    /// Capacities of the pool, absolute or as a share of the bytes that all disks access [default: 1%,5%,10%,20%]
    #[arg(long, value_name = "SIZE|PERCENT", value_delimiter = ',')]
    size: Vec<CacheSize>,
    #[command(flatten)]
    pool: PoolArgs,
}

/// Argument of `hob lab figures`: a figure or a trace.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Subject {
    /// Name of a figure.
    Figure(&'static str),
    /// Path of a trace.
    Trace(PathBuf),
}

impl Subject {
    /// Parses the name of a figure or the path of a trace. A word that names a figure is never a
    /// trace: a trace file of this name needs another path, such as `./dss`.
    fn parse(text: OsString) -> Result<Subject, String> {
        if let Some(figure) = FIGURES.iter().find(|figure| figure.name == text) {
            return Ok(Subject::Figure(figure.name));
        }
        if is_present(Path::new(&text)) {
            return Ok(Subject::Trace(text.into()));
        }
        let names: Vec<&str> = FIGURES.iter().map(|figure| figure.name).collect();
        Err(format!("no figure and no trace file has this name; the figures are {}", names.join(", ")))
    }
}

/// Parses a [`Subject`]. Completions and help have the names of the figures.
#[derive(Clone, Debug)]
struct SubjectParser;

impl TypedValueParser for SubjectParser {
    type Value = Subject;

    fn parse_ref(
        &self,
        command: &clap::Command,
        arg: Option<&clap::Arg>,
        value: &OsStr,
    ) -> Result<Subject, clap::Error> {
        OsStringValueParser::new().try_map(Subject::parse).parse_ref(command, arg, value)
    }

    fn possible_values(&self) -> Option<Box<dyn Iterator<Item = PossibleValue> + '_>> {
        Some(Box::new(FIGURES.iter().map(|figure| PossibleValue::new(figure.name))))
    }
}

impl Figures {
    /// Returns the names of figures and the paths of traces.
    fn split(&self) -> (Vec<String>, Vec<PathBuf>) {
        let (mut names, mut traces) = (Vec::new(), Vec::new());
        for subject in &self.subjects {
            match subject {
                Subject::Figure(name) => names.push((*name).to_owned()),
                Subject::Trace(path) => traces.push(path.clone()),
            }
        }
        (names, traces)
    }

    /// Returns the first option that only comparisons of traces have.
    fn option_of_traces(&self) -> Option<&'static str> {
        let share = (!self.ways.share.is_empty()).then_some("--share");
        let size = (!self.size.is_empty()).then_some("--size");
        share.or(size).or_else(|| self.pool.given())
    }
}

pub(super) fn run(args: &Figures, global: &Global) -> anyhow::Result<()> {
    let threads = args.threads.unwrap_or_else(processors);
    ensure!(threads > 0, "--threads 0 is not possible; pass at least 1");
    let (names, traces) = args.split();
    if let Some(trace) = traces.first() {
        if let Some(name) = names.first() {
            bail!("{} is a trace and {name} a figure; run one command for each kind", trace.display());
        }
        ensure!(!args.quick, "--quick applies to published figures, not to traces");
        return divisions::run(args, &traces, threads, global);
    }
    if let Some(option) = args.option_of_traces() {
        bail!("{option} needs traces: 'hob lab figures TRACE… {option} …'");
    }
    published(args, &names, threads, global)
}

fn published(args: &Figures, names: &[String], threads: usize, global: &Global) -> anyhow::Result<()> {
    let quick = if args.quick { " --quick" } else { "" };
    let options = Options {
        out: args.out.clone(),
        threads,
        size: if args.quick { Size::Quick } else { Size::Full },
        made_by: format!("Made by hob {}: hob lab figures{quick}", env!("CARGO_PKG_VERSION")),
    };
    let stop = interruption()?;
    let bar = runs_bar()?;
    let report = run_figures(names, &options, &stop, |progress| show_runs(&bar, progress));
    bar.finish_and_clear();
    let report = report?;
    print(global.output, &report, show)?;
    match report.count(Check::Fails) {
        0 => Ok(()),
        fails => bail!("{fails} of {} checks fail: {}", checks(&report), failed_lines(&report).join("; ")),
    }
}

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
    let columns = "FIGURE|WHAT|PUBLISHED:|MEASURED:|MUST BE|CHECK";
    let text = table(columns, report.figures.iter().flat_map(rows));
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
    let columns = "PUBLISHED RESULT|FIGURE|STATE";
    let state = |published: &Published| {
        let figure = published.figure.unwrap_or("–");
        vec![published.result.to_owned(), figure.to_owned(), published.state()]
    };
    let states = table(columns, report.published.iter().map(state));
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

#[cfg(test)]
mod tests {
    use super::*;

    pub(super) fn parse(line: &str) -> anyhow::Result<Figures> {
        use clap::FromArgMatches;

        let matches = Figures::augment_args(clap::Command::new("figures"))
            .try_get_matches_from(std::iter::once("figures").chain(line.split_whitespace()))?;
        Ok(Figures::from_arg_matches(&matches)?)
    }

    #[test]
    fn figures_and_traces_are_told_apart() {
        let directory = tempfile::tempdir().unwrap();
        let trace = directory.path().join("dss");
        std::fs::write(&trace, "").unwrap();
        let path = trace.display();
        let (names, traces) = parse(&format!("dss {path} dvdstore")).unwrap().split();
        assert_eq!((names, traces), (vec!["dss".to_owned(), "dvdstore".to_owned()], vec![trace.clone()]));
        let error = parse("dds").unwrap_err().to_string();
        assert!(
            error.contains("no figure and no trace file has this name; the figures are hm-latency"),
            "{error}"
        );
    }

    #[test]
    fn options_that_would_be_ignored_are_refused() {
        let directory = tempfile::tempdir().unwrap();
        let trace = directory.path().join("t.csv");
        std::fs::write(&trace, "ts_us,op,offset,size\n0,R,0,4096\n").unwrap();
        let (trace, out) = (trace.display(), directory.path().join("out"));
        for (line, part) in [
            (format!("dss {trace}"), "run one command for each kind"),
            (format!("{trace} --quick"), "--quick"),
            (format!("{trace} --threads 0"), "--threads 0"),
            ("dss --share auto".to_owned(), "--share needs traces"),
            ("dss --size 5%".to_owned(), "--size needs traces"),
            ("--block-size 4K".to_owned(), "--block-size needs traces"),
        ] {
            let args = parse(&format!("{line} --out {}", out.display())).unwrap();
            let error = run(&args, &Global::default()).unwrap_err().to_string();
            assert!(error.contains(part) && !error.contains('\n'), "{line}: {error}");
            assert!(!out.exists(), "{line}");
        }
    }
}
