//! `cargo xtask test`: what a developer runs before a commit and CI after it.
//!
//! Each step runs even when an earlier one failed, so that one run tells everything; the summary at
//! the end lists them with their durations.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use clap::ValueEnum;

use crate::{dashboard, packages, shell};

/// How long each fuzz target runs, in seconds.
const FUZZ_SECONDS: u32 = 20;

/// How many of them run at a time: each keeps one core busy.
const FUZZ_AT_ONCE: usize = 2;

/// The files of the conformance suite that move data, run once more without io_uring.
const RING_TESTS: [&str; 6] = ["nbdcopy", "nbd_tls", "qemu_io", "history", "fio_verify", "cold_warm"];

#[derive(Debug, clap::Args)]
pub(crate) struct Arguments {
    /// Install no packages, whatever is missing
    #[arg(long)]
    no_install: bool,
    /// Run these steps only
    #[arg(long, value_enum, value_delimiter = ',')]
    only: Vec<Step>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Step {
    /// Install missing packages
    Install,
    /// cargo fmt --check
    Fmt,
    /// clippy, warnings are errors
    Clippy,
    /// Tests of every crate
    Unit,
    /// Order in the house: file lengths, crate directions, generated pages …
    Tidy,
    /// The release binary
    Build,
    /// Black-box tests with real clients
    Conformance,
    /// The black-box tests that move data, on the ring of threads
    Ring,
    /// The dashboard's bundle, and its tests in a browser
    Dashboard,
    /// hob with its feature `psk`, and the black-box tests of that
    Psk,
    /// Twenty seconds of each fuzz target
    Fuzz,
}

impl Step {
    const ALL: [Self; 11] = [
        Self::Install,
        Self::Fmt,
        Self::Clippy,
        Self::Unit,
        Self::Tidy,
        Self::Build,
        Self::Conformance,
        Self::Ring,
        Self::Dashboard,
        Self::Psk,
        Self::Fuzz,
    ];

    fn name(self) -> &'static str {
        match self {
            Self::Install => "packages",
            Self::Fmt => "format",
            Self::Clippy => "clippy",
            Self::Unit => "tests",
            Self::Tidy => "tidy",
            Self::Build => "release build",
            Self::Conformance => "conformance",
            Self::Ring => "conformance on threads",
            Self::Dashboard => "dashboard",
            Self::Psk => "feature psk",
            Self::Fuzz => "fuzz",
        }
    }

    fn run(self) -> Result<()> {
        let cargo = |args: &[&str]| shell::run(&mut shell::cargo(args));
        let tests = |args: &[&str]| shell::run_tests(&mut shell::cargo(args));
        match self {
            Self::Install => packages::install(),
            Self::Fmt => cargo(&["fmt", "--all", "--check"]),
            Self::Clippy => cargo(&["clippy", "--workspace", "--all-targets", "--", "-D", "warnings"]),
            Self::Unit => tests(&[
                "test",
                "--workspace",
                "--exclude",
                "conformance",
                "--exclude",
                "xtask",
                "--no-fail-fast",
            ]),
            Self::Tidy => tests(&["test", "-p", "xtask"]),
            Self::Build => cargo(&["build", "--release", "-p", "hob"]),
            Self::Conformance => conformance(&[], &[]),
            Self::Ring => conformance(&RING_TESTS, &[("HOB_RING", "threads")]),
            Self::Dashboard => dashboard::run(),
            Self::Psk => psk(),
            Self::Fuzz => fuzz(),
        }
    }
}

pub(crate) fn run(arguments: &Arguments) -> Result<()> {
    let wanted = |step: Step| {
        let all = arguments.only.is_empty();
        let wants_binary = |s: &Step| matches!(s, Step::Conformance | Step::Ring | Step::Dashboard);
        let needed = step == Step::Build && arguments.only.iter().any(wants_binary);
        let refused = step == Step::Install && arguments.no_install;
        (all || needed || arguments.only.contains(&step)) && !refused
    };
    let mut summary: Vec<(Step, Duration, Result<()>)> = Vec::new();
    for step in Step::ALL.into_iter().filter(|&step| wanted(step)) {
        println!("\n=== {} ===", step.name());
        let start = Instant::now();
        let result = step.run();
        summary.push((step, start.elapsed(), result));
    }
    for (step, _, result) in &summary {
        if let Err(error) = result {
            println!("\n=== what failed: {} ===\n{error:#}", step.name());
        }
    }
    println!("\n=== summary ===");
    for (step, took, result) in &summary {
        let verdict = if result.is_ok() { "ok" } else { "FAILED" };
        println!("{:<24} {:>7.1} s  {verdict}", step.name(), took.as_secs_f64());
    }
    let total: Duration = summary.iter().map(|(_, took, _)| *took).sum();
    println!("{:<24} {:>7.1} s", "together", total.as_secs_f64());
    let failed: Vec<&str> = summary.iter().filter(|(.., r)| r.is_err()).map(|(s, ..)| s.name()).collect();
    if !failed.is_empty() {
        bail!("failed: {}", failed.join(", "));
    }
    Ok(())
}

/// The conformance suite, or the named files of it, against the release binary.
fn conformance(files: &[&str], environment: &[(&str, &str)]) -> Result<()> {
    let hob = shell::target_dir()?.join("release/hob");
    let mut command = shell::cargo(&["test", "-p", "conformance", "--no-fail-fast"]);
    for file in files {
        command.args(["--test", file]);
    }
    command.env("HOB_BIN", hob).envs(environment.iter().copied());
    shell::run_tests(&mut command)
}

/// What no default build has: TLS by OpenSSL with keys that both sides know. In the profile of tests, whose binary is not the one that
/// the other steps look at.
fn psk() -> Result<()> {
    let feature = ["-p", "hob", "--features", "psk"];
    let cargo = |args: &[&str]| shell::run(&mut shell::cargo(args));
    cargo(&[&["clippy"], &feature[..], &["--all-targets", "--", "-D", "warnings"]].concat())?;
    shell::run_tests(&mut shell::cargo(&[&["test"], &feature[..], &["psk"]].concat()))?;
    cargo(&[&["build"], &feature[..]].concat())?;
    let mut command = shell::cargo(&["test", "-p", "conformance", "--features", "psk", "--test", "nbd_psk"]);
    shell::run_tests(command.env("HOB_BIN", shell::target_dir()?.join("debug/hob")))
}

/// A short run of every fuzz target. The sanitizer wants an unstable compiler flag, which
/// RUSTC_BOOTSTRAP lets the stable compiler take.
fn fuzz() -> Result<()> {
    let dir = shell::root().join("fuzz");
    let targets = fuzz_targets(&dir)?;
    if targets.is_empty() {
        bail!("fuzz/fuzz_targets holds no target");
    }
    if !shell::cargo(&["fuzz", "--version"]).output().is_ok_and(|o| o.status.success()) {
        println!("cargo-fuzz is absent: installing it with cargo");
        shell::run(&mut shell::cargo(&["install", "cargo-fuzz", "--locked"]))?;
    }
    shell::run(shell::cargo(&["fuzz", "build"]).env("RUSTC_BOOTSTRAP", "1"))?;
    for some in targets.chunks(FUZZ_AT_ONCE) {
        let runs = some.iter().map(|target| fuzz_run(&dir, target)).collect::<Result<Vec<_>>>()?;
        shell::run_together(runs)?;
    }
    Ok(())
}

/// The run of one target, with the corpus that grows, and then, when the target has one, the corpus that is kept in the repository.
fn fuzz_run(dir: &Path, target: &str) -> Result<Command> {
    let mut command = shell::cargo(&["fuzz", "run", target]);
    fs::create_dir_all(dir.join("corpus").join(target)).context("make the corpus")?;
    command.arg(format!("fuzz/corpus/{target}"));
    if dir.join("seeds").join(target).is_dir() {
        command.arg(format!("fuzz/seeds/{target}"));
    }
    let limit = format!("-max_total_time={FUZZ_SECONDS}");
    command.args(["--", &limit, "-verbosity=0", "-print_final_stats=1"]).env("RUSTC_BOOTSTRAP", "1");
    Ok(command)
}

fn fuzz_targets(dir: &Path) -> Result<Vec<String>> {
    let folder = dir.join("fuzz_targets");
    let entries = fs::read_dir(&folder).with_context(|| format!("read {}", folder.display()))?;
    let paths = entries.filter_map(|entry| Some(entry.ok()?.path()));
    let sources = paths.filter(|path: &PathBuf| path.extension().is_some_and(|e| e == "rs"));
    let mut names: Vec<String> =
        sources.filter_map(|path| Some(path.file_stem()?.to_str()?.to_owned())).collect();
    names.sort();
    Ok(names)
}
