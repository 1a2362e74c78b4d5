//! The black-box tests: how they are built, and which test files run in parallel.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread;

use anyhow::{Context, Result, bail};

use crate::shell;

/// Files whose tests mostly wait: for leases to end, for hosts to settle, for a slow store. Those of a row
/// run in parallel, and nothing else runs then: a lease must not end because an emulated guest uses the
/// CPUs. All other files run one after the other.
const WAITING: [&[&str]; 2] =
    [&["cluster", "qos_hosts", "peer"], &["adopt", "cluster_moves", "dead_backing"]];

/// Number of parallel tests of each of those: usually more than there are processors.
const WAITING_THREADS: &str = "--test-threads=3";

/// Test files for hob's optional features: they need a hob with that feature.
const OF_FEATURES: [&str; 1] = ["nbd_psk"];

/// Returns the cargo call for some of its targets. It names xtask because of cargo's feature selection: the
/// libraries are then those of xtask itself, and none is built twice.
pub(crate) fn cargo_test(targets: &[&str]) -> Command {
    shell::cargo(&[&["test", "-p", "conformance", "-p", "xtask", "--no-fail-fast"], targets].concat())
}

/// Runs all tests except those of optional features, against the release binary.
pub(crate) fn all() -> Result<()> {
    let files = files(&shell::root().join("conformance/tests"))?;
    let is_waiting = |file: &str| WAITING.iter().any(|row| row.contains(&file));
    if let Some(absent) = WAITING.concat().into_iter().find(|file| !files.iter().any(|it| it == file)) {
        bail!("conformance/tests has no {absent}.rs");
    }
    let mut busy = vec!["--lib", "--bin", "guest-load"];
    busy.extend(files.iter().filter(|file| !is_waiting(file)).flat_map(|file| ["--test", file]));
    let mut results = vec![against_release(&busy, &[])];
    WAITING.iter().for_each(|row| results.extend(beside_each_other(row)));
    let failed: Vec<String> = results.into_iter().filter_map(|it| Some(format!("{:#}", it.err()?))).collect();
    if !failed.is_empty() {
        bail!("{}", failed.join("\n"));
    }
    Ok(())
}

/// Runs these files in parallel. Their output lines are mixed; the results have the failures.
fn beside_each_other(files: &[&'static str]) -> Vec<Result<()>> {
    let run = |file| move || against_release(&["--test", file, "--", WAITING_THREADS], &[]);
    let threads: Vec<_> = files.iter().map(|file| thread::spawn(run(*file))).collect();
    threads.into_iter().map(|thread| thread.join().expect("a run that does not panic")).collect()
}

/// Runs these targets against the release binary.
pub(crate) fn against_release(targets: &[&str], environment: &[(&str, &str)]) -> Result<()> {
    let mut command = cargo_test(targets);
    shell::run_tests(command.env("HOB_BIN", hob()?).envs(environment.iter().copied()))
}

/// Returns the release binary.
pub(crate) fn hob() -> Result<PathBuf> {
    Ok(shell::target_dir()?.join("release/hob"))
}

/// Returns its test files by name, without those of features.
fn files(dir: &Path) -> Result<Vec<String>> {
    let entries = fs::read_dir(dir).with_context(|| format!("read {}", dir.display()))?;
    let names = entries.filter_map(|entry| entry.ok()?.file_name().into_string().ok());
    let mut files: Vec<String> = names
        .filter_map(|name| Some(name.strip_suffix(".rs")?.to_owned()))
        .filter(|name| !OF_FEATURES.contains(&name.as_str()))
        .collect();
    files.sort();
    Ok(files)
}
