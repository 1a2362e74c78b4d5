//! The black-box tests: how they are built, and which of their files run beside each other.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread;

use anyhow::{Context, Result, bail};

use crate::shell;

/// Files whose tests mostly wait: for leases to end, for hosts to settle, for a store that is slow. Those of a row run beside each other and
/// beside nothing else, as a lease must not end because a machine is emulated. All others run one after the other.
const WAITING: [&[&str]; 2] =
    [&["cluster", "qos_hosts", "peer"], &["adopt", "cluster_moves", "dead_backing"]];

/// Tests at a time of each of those: more than there are processors, usually.
const WAITING_THREADS: &str = "--test-threads=3";

/// What hob's features have tests of, by the file: these want a hob that is built with them.
const OF_FEATURES: [&str; 1] = ["nbd_psk"];

/// Some of its targets. xtask is named for what it makes cargo choose: then the libraries are those that xtask itself was built with, and
/// none is built twice.
pub(crate) fn cargo_test(targets: &[&str]) -> Command {
    shell::cargo(&[&["test", "-p", "conformance", "-p", "xtask", "--no-fail-fast"], targets].concat())
}

/// All of it but what features have, against the release binary.
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

/// These files at once. Their lines stand between each other's; what failed stands in the results.
fn beside_each_other(files: &[&'static str]) -> Vec<Result<()>> {
    let run = |file| move || against_release(&["--test", file, "--", WAITING_THREADS], &[]);
    let threads: Vec<_> = files.iter().map(|file| thread::spawn(run(*file))).collect();
    threads.into_iter().map(|thread| thread.join().expect("a run that does not panic")).collect()
}

/// These of its targets, against the release binary.
pub(crate) fn against_release(targets: &[&str], environment: &[(&str, &str)]) -> Result<()> {
    let mut command = cargo_test(targets);
    shell::run_tests(command.env("HOB_BIN", hob()?).envs(environment.iter().copied()))
}

/// The release binary.
pub(crate) fn hob() -> Result<PathBuf> {
    Ok(shell::target_dir()?.join("release/hob"))
}

/// Its files, by name, without those of features.
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
