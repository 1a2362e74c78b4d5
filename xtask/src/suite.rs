//! Builds and runs the black-box tests, and decides which test files run in parallel.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread;

use anyhow::{Context, Result, bail};

use crate::shell;

/// Test files that mostly wait, for example for leases to end or for slow stores. Files of one row
/// run in parallel, without other tests: a lease must not end because an emulated guest uses the
/// CPUs. All other files run one after the other.
const WAITING: [&[&str]; 2] =
    [&["cluster", "qos_hosts", "peer"], &["adopt", "cluster_moves", "dead_backing"]];

/// Number of parallel tests in each waiting file, usually more than the number of processors.
const WAITING_THREADS: &str = "--test-threads=3";

/// Test files of crates that mostly wait for slow servers. They run beside the other tests of crates.
const WAITING_OF_CRATES: [&str; 6] =
    ["backing_file", "backing_nbd", "backing_objects", "backing_s3", "pool", "remote"];

/// Test files that need a hob of their own: with an optional feature, or a release binary.
const APART: [&str; 2] = ["nbd_psk", "stale_file"];

/// Features of the tests and of hob's debug build: TLS by OpenSSL with pre-shared keys, Ceph RBD
/// images, and object stores in clouds.
const FEATURES: &str = "hob/psk,hob/rbd,hob/objects-cloud";

/// Returns a cargo command for all packages with all features. If each step selected its own
/// packages, cargo would build the libraries once for each selection. Clippy is the compiler, so
/// that lints need no second build.
pub(crate) fn cargo_all(command: &str) -> Command {
    let mut cargo = shell::cargo(&[command, "--workspace", "--features", FEATURES]);
    cargo.env("RUSTC_WORKSPACE_WRAPPER", "clippy-driver");
    cargo
}

/// Builds all tests and debug binaries, and returns the path of hob. Warnings are errors.
pub(crate) fn build_debug() -> Result<PathBuf> {
    shell::run_without_warnings(cargo_all("build").arg("--all-targets"))?;
    Ok(shell::target_dir()?.join("debug/hob"))
}

/// Returns the cargo command that runs some test targets.
pub(crate) fn cargo_test(targets: &[&str]) -> Command {
    let mut command = cargo_all("test");
    command.arg("--no-fail-fast").args(targets);
    command
}

/// Runs the tests of every crate except xtask. They need no binary of hob. Test files are named, so
/// files of conformance must have other names.
pub(crate) fn crates() -> Result<()> {
    let test = || cargo_test(&["--exclude", "xtask"]);
    let waiting = thread::spawn(move || {
        shell::run_tests(test().args(WAITING_OF_CRATES.iter().flat_map(|file| ["--test", file])))
    });
    let mut computing = BTreeSet::new();
    for dir in fs::read_dir(shell::root().join("crates"))?.collect::<Result<Vec<_>, _>>()? {
        let tests = dir.path().join("tests");
        if tests.is_dir() {
            computing.extend(files(&tests)?);
        }
    }
    computing.extend(files(&shell::root().join("torture/tests"))?);
    let of_conformance = files(&shell::root().join("conformance/tests"))?;
    if let Some(file) = of_conformance.iter().find(|file| computing.contains(file.as_str())) {
        bail!("conformance/tests/{file}.rs needs another name: a crate has a test file with this name");
    }
    computing.retain(|file| !WAITING_OF_CRATES.contains(&file.as_str()));
    let targets = computing.iter().flat_map(|file| ["--test", file]);
    let results = [
        shell::run_tests(test().args(["--lib", "--bins"]).args(targets)),
        shell::run_tests(test().arg("--doc")),
        waiting.join().expect("a run that does not panic"),
    ];
    all_of(results)
}

/// Returns one error for all errors.
fn all_of(results: impl IntoIterator<Item = Result<()>>) -> Result<()> {
    let failed: Vec<String> = results.into_iter().filter_map(|it| Some(format!("{:#}", it.err()?))).collect();
    if !failed.is_empty() {
        bail!("{}", failed.join("\n"));
    }
    Ok(())
}

/// Runs all tests against the release binary, except those of optional features.
pub(crate) fn all() -> Result<()> {
    let files = files(&shell::root().join("conformance/tests"))?;
    let is_waiting = |file: &str| WAITING.iter().any(|row| row.contains(&file));
    if let Some(absent) = WAITING.concat().into_iter().find(|file| !files.iter().any(|it| it == file)) {
        bail!("conformance/tests has no {absent}.rs");
    }
    let busy: Vec<&str> =
        files.iter().filter(|file| !is_waiting(file)).flat_map(|file| ["--test", file]).collect();
    let mut results = vec![against_release(&busy, &[])];
    WAITING.iter().for_each(|row| results.extend(beside_each_other(row)));
    all_of(results)
}

/// Runs these test files in parallel. The output lines of the files are mixed. The returned results
/// have the failures.
fn beside_each_other(files: &[&'static str]) -> Vec<Result<()>> {
    let run = |file| move || against_release(&["--test", file, "--", WAITING_THREADS], &[]);
    let threads: Vec<_> = files.iter().map(|file| thread::spawn(run(*file))).collect();
    threads.into_iter().map(|thread| thread.join().expect("a run that does not panic")).collect()
}

/// Runs these test targets against the release binary.
pub(crate) fn against_release(targets: &[&str], environment: &[(&str, &str)]) -> Result<()> {
    let mut command = cargo_test(targets);
    shell::run_tests(command.env("HOB_BIN", hob()?).envs(environment.iter().copied()))
}

/// Returns the path of the release binary.
pub(crate) fn hob() -> Result<PathBuf> {
    Ok(shell::target_dir()?.join("release/hob"))
}

/// Returns the names of the test files in a directory, without [`APART`].
fn files(dir: &Path) -> Result<Vec<String>> {
    let entries = fs::read_dir(dir).with_context(|| format!("read {}", dir.display()))?;
    let names = entries.filter_map(|entry| entry.ok()?.file_name().into_string().ok());
    let mut files: Vec<String> = names
        .filter_map(|name| Some(name.strip_suffix(".rs")?.to_owned()))
        .filter(|name| !APART.contains(&name.as_str()))
        .collect();
    files.sort();
    Ok(files)
}
