//! Builds and runs the black-box tests, and decides which test files run in parallel.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread;

use anyhow::{Context, Result, bail};

use crate::executables::{self, Executable, Queue};
use crate::shell;

/// Number of black-box test files that run at the same time, beside one of [`EMULATED`], or one more
/// after the last of those. Such a file uses half a processor on average: most tests wait for
/// processes and sockets.
pub(crate) const AT_ONCE: usize = 2;

/// Number of test files of crates that run at the same time, in addition to one file of
/// [`WAITING_OF_CRATES`].
const CRATES_AT_ONCE: usize = 2;

/// Black-box test files in which emulated guests compute nearly all the time. One of these files runs
/// at a time: guests of several files get too little of two processors.
const EMULATED: [&str; 3] = ["attach", "host_device", "vhost_user"];

/// Other black-box test files that take half a minute or longer. These files start first. Otherwise
/// the last of them would run alone at the end.
const LONG: [&str; 18] = [
    "postgres",
    "live_migration",
    "container",
    "migrate",
    "older_state",
    "discard",
    "shrink",
    "lab",
    "reconnect",
    "kill_write_back",
    "golden_images",
    "returned_flash",
    "selftest",
    "warm_restart",
    "upgrade",
    "libvirt",
    "attach_started",
    "bench_scaling",
];

/// Black-box test files that mostly wait, for example for leases to end or for slow stores. These
/// files run without other tests: a lease must not end because an emulated guest uses the CPUs, and
/// the sizes of shared caches follow the load.
const WAITING: [&str; 7] =
    ["cluster", "shared", "qos_hosts", "cluster_moves", "adopt", "dead_backing", "peer"];

/// Number of parallel tests in each waiting file, usually more than the number of processors.
const WAITING_THREADS: &str = "--test-threads=3";

/// Test files of crates that mostly wait for slow servers. These files run at the same time as the
/// other tests of crates.
const WAITING_OF_CRATES: [&str; 8] = [
    "backing_file",
    "backing_images",
    "backing_nbd",
    "backing_nbd_shutdown",
    "backing_objects",
    "backing_s3",
    "pool",
    "remote",
];

/// Test executables of crates that take minutes. These executables start first.
const LONG_OF_CRATES: [&str; 7] =
    ["hob_lab", "hob_daemon", "injection", "histories", "hob_engine", "sabotage", "lives"];

/// Test files that move data. These tests run a second time without io_uring.
const RING_TESTS: [&str; 6] = ["nbdcopy", "nbd_tls", "qemu_io", "history", "fio_verify", "cold_warm"];

/// Test files of the torture harness that start hob, the longest first. These files belong to
/// the torture step.
pub(crate) const TORTURE: [&str; 5] =
    ["hung_file", "losing_flash", "failed_flash", "stale_file", "volatile_backing"];

/// Black-box test files that other steps or commands run, besides [`TORTURE`].
const APART: [&str; 2] = ["nbd_psk", "attach_quick_start"];

/// hob's optional features: TLS by OpenSSL with pre-shared keys, and object stores in clouds.
pub(crate) const FEATURES: &str = "hob/psk,hob/objects-cloud";

/// Returns a cargo command for all packages. If each step selected its own packages, cargo would
/// build the libraries once for each selection. Clippy is the compiler, so that lints need no second
/// build.
pub(crate) fn cargo_all(command: &str) -> Command {
    let mut cargo = shell::cargo(&[command, "--workspace"]);
    cargo.env("RUSTC_WORKSPACE_WRAPPER", "clippy-driver");
    cargo
}

/// Builds all programs and tests. Warnings are errors.
pub(crate) fn build_all() -> Result<()> {
    shell::run_without_warnings(cargo_all("build").arg("--all-targets"))
}

/// Builds a program of the workspace, and returns its path. Warnings are errors. The program is a
/// debug build, which has more checks than a release build and is built sooner.
pub(crate) fn build_program(name: &str, features: &str) -> Result<PathBuf> {
    // With a test among the targets, cargo adds the features of libraries that only tests need, as in
    // `build_all`. Libraries are then built once.
    let mut cargo = cargo_all("build");
    cargo.args(["--bin", name, "--test", "nbd_psk", "--features", features]);
    shell::run_without_warnings(&mut cargo)?;
    Ok(shell::target_dir()?.join("debug").join(name))
}

/// Builds hob without and with its optional features for the black-box tests. A feature adds a crate
/// to the binary, so only the binary is built twice.
pub(crate) fn build_hob() -> Result<()> {
    for (features, to) in [("", plain()?), (FEATURES, with_features()?)] {
        let from = build_program("hob", features)?;
        // A running hob still uses the old file, so the file is removed and not overwritten.
        let _ = fs::remove_file(&to);
        fs::copy(&from, &to)
            .with_context(|| format!("cannot copy {} to {}", from.display(), to.display()))?;
    }
    Ok(())
}

/// Returns the path of the debug binary without optional features.
pub(crate) fn plain() -> Result<PathBuf> {
    Ok(shell::target_dir()?.join("debug/hob-plain"))
}

/// Returns the path of the debug binary with all optional features.
pub(crate) fn with_features() -> Result<PathBuf> {
    Ok(shell::target_dir()?.join("debug/hob-features"))
}

/// Returns the cargo command that runs some test targets.
pub(crate) fn cargo_test(targets: &[&str]) -> Command {
    let mut command = cargo_all("test");
    command.arg("--no-fail-fast").args(targets);
    command
}

/// Returns the executables of these test files, in this order.
fn test_files(files: &[&str]) -> Result<Vec<Executable>> {
    let targets: Vec<&str> = files.iter().flat_map(|file| ["--test", file]).collect();
    let mut executables = executables::compile(cargo_test(&targets))?;
    executables.sort_by_key(|it| files.iter().position(|file| *file == it.name));
    Ok(executables)
}

/// Runs the tests of every crate except xtask. These tests need no binary of hob. Test files of
/// conformance must have other names than those of crates.
pub(crate) fn crates() -> Result<()> {
    let mut of_crates = BTreeSet::new();
    for dir in fs::read_dir(shell::root().join("crates"))?.collect::<Result<Vec<_>, _>>()? {
        let tests = dir.path().join("tests");
        if tests.is_dir() {
            of_crates.extend(files(&tests)?);
        }
    }
    of_crates.extend(files(&shell::root().join("torture/tests"))?);
    let of_conformance = files(&shell::root().join("conformance/tests"))?;
    if let Some(file) = of_conformance.iter().find(|file| of_crates.contains(file.as_str())) {
        bail!("conformance/tests/{file}.rs needs another name: a crate has a test file with this name");
    }
    let targets = of_crates.iter().flat_map(|file| ["--test", file]);
    let test = || cargo_test(&["--exclude", "xtask"]);
    let mut command = test();
    command.args(["--lib", "--bins"]).args(targets);
    let (waiting, mut computing): (Vec<_>, Vec<_>) = executables::compile(command)?
        .into_iter()
        .partition(|it| WAITING_OF_CRATES.contains(&it.name.as_str()));
    computing.sort_by_key(|it| LONG_OF_CRATES.iter().position(|name| *name == it.name).unwrap_or(usize::MAX));
    let waiting = thread::spawn(move || executables::run(&waiting, 1, &[], &[]));
    let results = [
        executables::run(&computing, CRATES_AT_ONCE, &[], &[]),
        shell::run_tests(test().arg("--doc")),
        waiting.join().expect("a run that does not panic"),
    ];
    all_of(results)
}

/// Combines all errors into one error.
fn all_of(results: impl IntoIterator<Item = Result<()>>) -> Result<()> {
    let failed: Vec<String> = results.into_iter().filter_map(|it| Some(format!("{:#}", it.err()?))).collect();
    if !failed.is_empty() {
        bail!("{}", failed.join("\n"));
    }
    Ok(())
}

/// Runs all black-box tests except those of other steps.
pub(crate) fn all() -> Result<()> {
    let files = files(&shell::root().join("conformance/tests"))?;
    let named = [&WAITING[..], &EMULATED[..], &LONG[..]].concat();
    if let Some(absent) = named.iter().find(|file| !files.iter().any(|it| it == *file)) {
        bail!("conformance/tests has no {absent}.rs");
    }
    let short = files.iter().map(String::as_str).filter(|file| !named.contains(file));
    let usual: Vec<&str> = LONG.into_iter().chain(short).collect();
    // The container image has all features.
    let with_features = with_features()?;
    let bench = build_program("bench", "")?;
    let environment = [("HOB_FEATURES_BIN", with_features.as_path()), ("HOB_BENCH_BIN", bench.as_path())];
    all_of([
        queues_against_plain(&[(&EMULATED, 1), (&usual, AT_ONCE)], &[], &environment),
        against_plain(&WAITING, AT_ONCE, &[WAITING_THREADS], &[]),
    ])
}

/// Runs the black-box test files that move data without io_uring.
pub(crate) fn without_ring() -> Result<()> {
    against_plain(&RING_TESTS, AT_ONCE, &[], &[("HOB_RING", Path::new("threads"))])
}

/// Runs these black-box test files against hob without optional features, `at_once` at the same time.
pub(crate) fn against_plain(
    files: &[&str],
    at_once: usize,
    arguments: &[&str],
    environment: &[(&str, &Path)],
) -> Result<()> {
    queues_against_plain(&[(files, at_once)], arguments, environment)
}

/// Runs lists of black-box test files against hob without optional features, as
/// [`executables::run_queues`] does. The number of a list is that of its files that run at the same
/// time.
fn queues_against_plain(
    lists: &[(&[&str], usize)],
    arguments: &[&str],
    environment: &[(&str, &Path)],
) -> Result<()> {
    let hob = plain()?;
    let environment = [&[("HOB_BIN", hob.as_path())], environment].concat();
    let all: Vec<&str> = lists.iter().flat_map(|(files, _)| files.iter().copied()).collect();
    // The executables have the order of the files.
    let mut rest = test_files(&all)?;
    let mut queues = Vec::new();
    for (files, at_once) in lists {
        let is_in_list = |it: &Executable| files.contains(&it.name.as_str());
        let (executables, others): (Vec<_>, Vec<_>) = rest.into_iter().partition(is_in_list);
        queues.push((executables, *at_once));
        rest = others;
    }
    let queues: Vec<Queue<'_>> =
        queues.iter().map(|(executables, at_once)| Queue { executables, at_once: *at_once }).collect();
    executables::run_queues(&queues, arguments, &environment)
}

/// Returns the path of the release binary.
pub(crate) fn release() -> Result<PathBuf> {
    Ok(shell::target_dir()?.join("release/hob"))
}

/// Returns the names of the test files in a directory, without those of other steps.
fn files(dir: &Path) -> Result<Vec<String>> {
    let entries = fs::read_dir(dir).with_context(|| format!("cannot read {}", dir.display()))?;
    let names = entries.filter_map(|entry| entry.ok()?.file_name().into_string().ok());
    let mut files: Vec<String> = names
        .filter_map(|name| Some(name.strip_suffix(".rs")?.to_owned()))
        .filter(|name| !APART.iter().chain(&TORTURE).any(|apart| apart == name))
        .collect();
    files.sort();
    Ok(files)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_black_box_test_file_is_in_two_lists() {
        let named = [&WAITING[..], &EMULATED[..], &LONG[..], &APART[..]].concat();
        assert_eq!(named.iter().collect::<BTreeSet<_>>().len(), named.len(), "{named:?}");
    }

    /// The tests of crates run before hob is built, so a test that starts hob would start an old one.
    #[test]
    fn torture_tests_that_start_hob_run_in_the_torture_step() {
        let tests = shell::root().join("torture/tests");
        for name in files(&tests).unwrap() {
            let text = fs::read_to_string(tests.join(format!("{name}.rs"))).unwrap();
            assert!(!text.contains("conformance::hob"), "{name} is not in TORTURE");
        }
        for name in TORTURE {
            assert!(tests.join(format!("{name}.rs")).is_file(), "{name}");
        }
    }
}
