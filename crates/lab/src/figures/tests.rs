//! Tests that every figure runs, that its files are written, and that its checks hold.

use std::fs;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use super::*;
use crate::generate::GeneratorInfo;
use crate::markup::judge::flaw;
use crate::page::Check;

fn options(dir: &tempfile::TempDir, threads: usize) -> Options {
    Options { out: dir.path().join("made/here"), threads, size: Size::Quick, made_by: "a <test>".to_owned() }
}

fn made(names: &[&str], options: &Options) -> Result<Report> {
    let names: Vec<String> = names.iter().map(|&name| name.to_owned()).collect();
    run(&names, options, &Arc::default(), |_| {})
}

#[test]
fn every_figure_runs_and_is_written() {
    let dir = tempfile::tempdir().unwrap();
    let options = options(&dir, 2);
    let mut told = Vec::new();
    let report = run(&[], &options, &Arc::default(), |progress| told.push(progress)).unwrap();
    assert!(told.is_sorted_by_key(|progress| (progress.runs, progress.requests)));
    assert_eq!(told.last().unwrap().runs, told.last().unwrap().runs_total);
    let html = fs::read_to_string(&report.page).unwrap();
    assert_eq!(flaw(&html), None);
    assert_eq!(report.figures.len(), FIGURES.len());
    let mut files = vec!["index.html".to_owned()];
    for figure in &report.figures {
        assert!(html.contains(&crate::markup::escaped(figure.title)), "{}", figure.name);
        files.extend(figure.files.iter().cloned());
        if figure.waits_for.is_some() {
            assert_eq!((figure.check, figure.files.len()), (Check::Open, 0));
            continue;
        }
        assert!(!figure.lines.is_empty() && figure.lines.iter().any(|line| line.check.is_some()));
        let svg = fs::read_to_string(options.out.join(format!("{}.svg", figure.name))).unwrap();
        assert_eq!(flaw(&svg), None);
        assert!(!svg.contains("no data") && html.contains(svg.trim_end()), "{}", figure.name);
        let csv = fs::read_to_string(options.out.join(format!("{}.csv", figure.name))).unwrap();
        assert_eq!(csv.lines().count(), figure.lines.len() + 1);
        assert!(!csv.contains("NaN") && !csv.contains("inf"), "{csv}");
        let is_replaced = figure.scale.is_some() && figure.name != "statistics";
        assert_eq!(figure.method.contains("replaces the original"), is_replaced, "{}", figure.name);
    }
    let mut left: Vec<String> = fs::read_dir(&options.out)
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    files.sort();
    left.sort();
    assert_eq!(files, left, "and nothing else is left behind");
    for check in [Check::Holds, Check::Differs, Check::Fails, Check::ByConstruction] {
        let cells = html.matches(&format!("<td><span class=\"check {}\">", check.word())).count();
        assert_eq!(report.count(check), cells, "{check:?}");
    }
    for figure in &report.figures {
        for line in &figure.lines {
            assert!(line.published.is_none() || line.check.is_some(), "{}: {}", figure.name, line.what);
            assert_eq!(line.check == Some(Check::Differs), !line.reason.is_empty(), "{}", line.what);
        }
    }
    lab_page_is_current(&report);
}

/// Compares the generated tables of docs/LAB.md. Quick runs have the same checks as full runs but
/// other values, so the differences are not compared.
fn lab_page_is_current(report: &Report) {
    let page = include_str!("../../../../docs/LAB.md");
    for figure in report.figures.iter().filter(|figure| figure.waits_for.is_none()) {
        let [name, fitted, checks, _] = super::docs::row(figure);
        let row = format!("| {name} | {fitted} | {checks} | ");
        assert!(page.contains(&row), "docs/LAB.md lacks this row; run the example figures:\n{row}");
    }
    assert!(
        page.contains(&state_table()),
        "docs/LAB.md has another table of results; it must be:\n{}",
        state_table()
    );
}

#[test]
fn fitted_inputs_are_those_that_the_generators_name() {
    for figure in FIGURES {
        let Work::Play { cases, .. } = figure.work else { continue };
        for case in cases(Size::Quick) {
            let parameters = (GeneratorInfo::find(case.generator).unwrap().parameters)();
            for parameter in parameters.iter().filter(|parameter| parameter.about.contains("(fitted")) {
                let is_named = figure
                    .fitted
                    .iter()
                    .any(|fitted| fitted.input.split(", ").any(|input| input == parameter.name));
                assert!(is_named, "{}: {} is fitted", figure.name, parameter.name);
            }
        }
    }
}

#[test]
fn checks_that_do_not_depend_on_the_workload_pass() {
    let dir = tempfile::tempdir().unwrap();
    let report = made(&["metadata-memory", "statistics"], &options(&dir, 1)).unwrap();
    let counts = [Check::Holds, Check::Differs, Check::Fails].map(|check| report.count(check));
    assert_eq!(counts, [5, 1, 0], "{report:?}");
    assert_eq!(report.figures[0].name, "statistics", "in the table's order");
    assert_eq!(report.figures[0].lines[0].measured, Quantity::Number(131_072.0));
}

#[test]
fn threads_do_not_change_the_numbers() {
    let dir = tempfile::tempdir().unwrap();
    let csv = |threads| {
        let options = options(&dir, threads);
        made(&["block-size", "dss"], &options).unwrap();
        ["block-size.csv", "dss.csv"].map(|name| fs::read_to_string(options.out.join(name)).unwrap())
    };
    assert_eq!(csv(1), csv(3));
}

#[test]
fn a_figure_without_a_name_in_the_table_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let options = options(&dir, 1);
    let error = made(&["dss", "dds"], &options).unwrap_err().to_string();
    assert!(error.starts_with(
        "there is no figure dds; the figures are hm-latency, proxy-latency, block-size, dss, dss-types"
    ));
    assert!(!options.out.exists());
}

#[test]
fn an_interrupted_run_writes_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let options = options(&dir, 2);
    let stop = Arc::new(AtomicBool::new(false));
    let names = ["calibration".to_owned(), "statistics".to_owned()];
    let full = Options { size: Size::Full, ..options.clone() };
    let error = run(&names, &full, &stop, |_| stop.store(true, Ordering::Relaxed)).unwrap_err();
    assert_eq!(error.to_string(), "interrupted; nothing was written");
    assert_eq!(fs::read_dir(&options.out).unwrap().count(), 0);
}

#[test]
fn every_case_is_a_plan_at_a_stated_scale_and_only_figures_that_compare_disks_have_several() {
    for size in [Size::Full, Size::Quick] {
        for figure in FIGURES {
            let Work::Play { cases, .. } = figure.work else { continue };
            let scales: Vec<u64> = cases(size).iter().map(|case| case::scale_of(&case.settings)).collect();
            assert!(scales.windows(2).all(|pair| pair[0] == pair[1]), "{}: one scale a figure", figure.name);
            for case in cases(size) {
                let experiment =
                    GeneratorInfo::find(case.generator).unwrap().experiment(&case.settings).unwrap();
                // Other figures use the statistics of the first disk as those of the run.
                let compares_disks = matches!(figure.name, "sioc" | "write-neighbour");
                let is_one = experiment.disks.len() == 1 || case.on_one_disk;
                assert_eq!(is_one, !compares_disks, "{}", figure.name);
            }
        }
    }
}

#[test]
fn names_are_file_names_and_differ() {
    for (index, figure) in FIGURES.iter().enumerate() {
        assert!(figure.name.chars().all(|c| c.is_ascii_lowercase() || c == '-'), "{}", figure.name);
        assert!(FIGURES[..index].iter().all(|other| other.name != figure.name), "{}", figure.name);
        assert_eq!(FigureInfo::find(figure.name).unwrap().title, figure.title);
    }
}
