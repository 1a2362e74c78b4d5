//! `cargo xtask test` runs the checks that developers run before a commit and CI runs after it.
//!
//! Each step runs even if an earlier step failed, so that one run reports all failures. The summary
//! at the end lists the steps with their durations.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use clap::ValueEnum;

use crate::{dashboard, packages, shell, suite};

/// Duration of each fuzz target, seconds.
const FUZZ_SECONDS: u32 = 10;

/// Number of fuzz targets that run in parallel. Each uses one core.
const FUZZ_AT_ONCE: usize = 2;

/// Compiler flags of cargo-fuzz 0.13: coverage for libFuzzer, the address sanitizer, and assertions.
const FUZZ_FLAGS: [&str; 11] = [
    "--cfg fuzzing",
    "-Cpasses=sancov-module",
    "-Cllvm-args=-sanitizer-coverage-level=4",
    "-Cllvm-args=-sanitizer-coverage-inline-8bit-counters",
    "-Cllvm-args=-sanitizer-coverage-pc-table",
    "-Cllvm-args=-sanitizer-coverage-trace-compares",
    "-Cllvm-args=-simplifycfg-branch-fold-threshold=0",
    "-Cllvm-args=-sanitizer-coverage-stack-depth",
    "-Zsanitizer=address",
    "-Cdebug-assertions",
    "-Ccodegen-units=1",
];

/// Duration of the fault injection test, minutes.
const TORTURE_MINUTES: &str = "2";

#[derive(Debug, clap::Args)]
pub(crate) struct Arguments {
    /// Do not install missing packages
    #[arg(long)]
    no_install: bool,
    /// Run only these steps
    #[arg(long, value_enum, value_delimiter = ',')]
    only: Vec<Step>,
}

/// The steps, in the order in which they start.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Step {
    /// Install missing packages, in parallel with the builds
    Install,
    /// Check the format with cargo fmt
    Fmt,
    /// Build everything, and check it with clippy; warnings are errors
    Clippy,
    /// Build hob without and with optional features for the black-box tests
    Build,
    /// Run the tests of every crate, in parallel with the next steps
    Unit,
    /// Run the tidy tests: file lengths, crate dependencies, generated pages and other rules
    Tidy,
    /// Run the black-box tests with real clients
    Conformance,
    /// Run the black-box tests that move data without io_uring
    Ring,
    /// Run two minutes of fault injection, and test stale file handles
    Torture,
    /// Run the black-box tests of RBD images on temporary Ceph clusters, in parallel with the next
    /// steps
    Rbd,
    /// Check the dashboard's bundle, and run its tests in a browser
    Dashboard,
    /// Run the black-box tests of the feature `psk`
    Psk,
    /// Run each fuzz target for ten seconds, after the tests of the crates and in parallel with the
    /// other steps
    Fuzz,
}

/// Order of a step in relation to other steps.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Lane {
    /// The next step waits for this one.
    Front,
    /// The next step starts without waiting for this one.
    Beside,
    /// The next steps start without waiting for this one, but steps that need the installed packages
    /// wait.
    Install,
    /// The steps of this lane mostly use the processor. They run one after the other, with a lower
    /// priority than the black-box tests, which wait more than they compute. The first step of the
    /// lane starts the whole lane.
    Background,
}

/// Niceness of the steps in the background. The other steps have the niceness 0.
const BACKGROUND_NICE: i32 = 10;

/// A step with its duration and result.
type Ended = (Step, Duration, Result<()>);

impl Step {
    fn name(self) -> &'static str {
        match self {
            Self::Install => "packages",
            Self::Fmt => "format",
            Self::Clippy => "build and lint",
            Self::Unit => "tests",
            Self::Build => "hob",
            Self::Tidy => "tidy",
            Self::Conformance => "conformance",
            Self::Ring => "conformance on threads",
            Self::Torture => "torture",
            Self::Dashboard => "dashboard",
            Self::Psk => "feature psk",
            Self::Rbd => "rbd",
            Self::Fuzz => "fuzz",
        }
    }

    /// Returns how the step runs beside the next ones.
    fn lane(self) -> Lane {
        match self {
            Self::Install => Lane::Install,
            // A cluster mostly waits for other processes.
            Self::Rbd => Lane::Beside,
            Self::Unit | Self::Fuzz => Lane::Background,
            _ => Lane::Front,
        }
    }

    /// Returns true if the step runs hob.
    fn needs_hob(self) -> bool {
        use Step::{Conformance, Dashboard, Psk, Rbd, Ring, Tidy, Torture};
        matches!(self, Tidy | Conformance | Ring | Torture | Dashboard | Psk | Rbd)
    }

    /// Returns true if the step needs packages that builds do not need.
    fn needs_packages(self) -> bool {
        !matches!(self, Self::Install | Self::Fmt | Self::Clippy | Self::Build)
    }

    fn timed(self) -> Ended {
        let start = Instant::now();
        let result = self.run();
        (self, start.elapsed(), result)
    }

    fn run(self) -> Result<()> {
        let cargo = |args: &[&str]| shell::run(&mut shell::cargo(args));
        match self {
            Self::Install => packages::install(),
            Self::Fmt => cargo(&["fmt", "--all", "--check"]),
            Self::Clippy => suite::build_all(),
            Self::Unit => suite::crates(),
            Self::Build => suite::build_hob(),
            Self::Tidy => {
                let mut command = suite::cargo_test(&["--bin", "xtask"]);
                shell::run_tests(command.env("HOB_BUILT", suite::plain()?))
            }
            Self::Conformance => suite::all(),
            Self::Ring => suite::without_ring(),
            Self::Torture => {
                suite::against_plain(&suite::TORTURE, suite::AT_ONCE, &[], &[])?;
                let mut command = Command::new(suite::build_program("torture", "")?);
                shell::run(command.args(["--minutes", TORTURE_MINUTES]).env("HOB_BIN", suite::plain()?))
            }
            Self::Dashboard => dashboard::run(),
            Self::Psk => psk(),
            Self::Rbd => rbd(),
            Self::Fuzz => fuzz(),
        }
    }
}

pub(crate) fn run(arguments: &Arguments) -> Result<()> {
    let wanted = |step: Step| {
        let all = arguments.only.is_empty();
        let needed = step == Step::Build && arguments.only.iter().any(|it| it.needs_hob());
        let refused = step == Step::Install && arguments.no_install;
        (all || needed || arguments.only.contains(&step)) && !refused
    };
    let begun = Instant::now();
    let mut summary: Vec<Ended> = Vec::new();
    let mut beside: Vec<(Step, JoinHandle<Ended>)> = Vec::new();
    let ended = |(_, thread): (Step, JoinHandle<Ended>)| thread.join().expect("a step that does not panic");
    let mut installing: Option<(Step, JoinHandle<Ended>)> = None;
    let mut background: Option<JoinHandle<Vec<Ended>>> = None;
    for step in Step::value_variants().iter().copied().filter(|&step| wanted(step)) {
        if step.needs_packages() {
            summary.extend(installing.take().map(ended));
        }
        // The output of steps that run at the same time is mixed. Their failures are printed at the
        // end.
        match step.lane() {
            Lane::Front => {
                println!("\n=== {} ===", step.name());
                summary.push(step.timed());
            }
            Lane::Beside => {
                println!("\n=== {} ===", step.name());
                beside.push((step, thread::spawn(move || step.timed())));
            }
            Lane::Install => {
                println!("\n=== {} ===", step.name());
                // If this fails, the installation of all packages reports it.
                let _ = packages::install_for_builds();
                installing = Some((step, thread::spawn(move || step.timed())));
            }
            Lane::Background if background.is_none() => {
                let steps: Vec<Step> = Step::value_variants()
                    .iter()
                    .copied()
                    .filter(|&step| step.lane() == Lane::Background && wanted(step))
                    .collect();
                background = Some(thread::spawn(|| in_background(steps)));
            }
            Lane::Background => {}
        }
    }
    summary.extend(installing.into_iter().chain(beside).map(ended));
    summary.extend(background.into_iter().flat_map(|it| it.join().expect("steps that do not panic")));
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
    println!("{:<24} {:>7.1} s", "together", begun.elapsed().as_secs_f64());
    let failed: Vec<&str> = summary.iter().filter(|(.., r)| r.is_err()).map(|(s, ..)| s.name()).collect();
    if !failed.is_empty() {
        bail!("failed: {}", failed.join(", "));
    }
    Ok(())
}

/// Runs these steps one after the other with a low priority, which on Linux belongs to the calling
/// thread and to the threads and processes that it starts.
fn in_background(steps: Vec<Step>) -> Vec<Ended> {
    if let Err(error) = rustix::process::setpriority_process(None, BACKGROUND_NICE) {
        println!("cannot lower the priority: {error}");
    }
    let run = |step: Step| {
        println!("\n=== {} ===", step.name());
        step.timed()
    };
    steps.into_iter().map(run).collect()
}

fn psk() -> Result<()> {
    shell::run_tests(suite::cargo_test(&["--test", "nbd_psk"]).env("HOB_BIN", suite::with_features()?))
}

/// Runs the black-box tests of RBD images. Most of them share a Ceph cluster of four processes.
fn rbd() -> Result<()> {
    let mut command = suite::cargo_test(&["--test", "rbd", "--", "--test-threads=3"]);
    shell::run_tests(command.env("HOB_BIN", suite::plain()?))
}

/// Builds the fuzz targets as `cargo fuzz build` does, without debug information, and runs each for
/// a short time. cargo-fuzz itself is not used, because its build takes a minute. The sanitizer
/// needs an unstable compiler flag, which RUSTC_BOOTSTRAP enables in the stable compiler.
fn fuzz() -> Result<()> {
    let dir = shell::root().join("fuzz");
    let targets = fuzz_targets(&dir)?;
    if targets.is_empty() {
        bail!("fuzz/fuzz_targets has no target");
    }
    let version = shell::output(Command::new("rustc").arg("-vV"))?;
    let host =
        version.lines().find_map(|line| line.strip_prefix("host: ")).context("'rustc -vV' names no host")?;
    // With `--target`, the flags do not apply to build scripts.
    let mut build =
        shell::cargo(&["build", "--manifest-path", "fuzz/Cargo.toml", "--target-dir", "fuzz/target"]);
    build
        .args(["--release", "--target", host])
        .env("RUSTFLAGS", FUZZ_FLAGS.join(" "))
        .env("RUSTC_BOOTSTRAP", "1");
    shell::run(&mut build)?;
    let programs = dir.join("target").join(host).join("release");
    for some in targets.chunks(FUZZ_AT_ONCE) {
        let runs = some.iter().map(|target| fuzz_run(&dir, &programs, target)).collect::<Result<Vec<_>>>()?;
        shell::run_together(runs)?;
    }
    Ok(())
}

/// Returns the command that runs a fuzz target with the growing corpus, and with the corpus of the
/// repository if there is one. An input that fails is written to `fuzz/artifacts`.
fn fuzz_run(dir: &Path, programs: &Path, target: &str) -> Result<Command> {
    let mut command = Command::new(programs.join(target));
    command.current_dir(shell::root());
    for kind in ["corpus", "artifacts"] {
        fs::create_dir_all(dir.join(kind).join(target))
            .with_context(|| format!("cannot create fuzz/{kind}"))?;
    }
    command.arg(format!("fuzz/corpus/{target}"));
    if dir.join("seeds").join(target).is_dir() {
        command.arg(format!("fuzz/seeds/{target}"));
    }
    let (limit, artifacts) =
        (format!("-max_total_time={FUZZ_SECONDS}"), format!("-artifact_prefix=fuzz/artifacts/{target}/"));
    command.args([limit.as_str(), artifacts.as_str(), "-verbosity=0", "-print_final_stats=1"]);
    command.env("ASAN_OPTIONS", "detect_odr_violation=0");
    Ok(command)
}

fn fuzz_targets(dir: &Path) -> Result<Vec<String>> {
    let folder = dir.join("fuzz_targets");
    let entries = fs::read_dir(&folder).with_context(|| format!("cannot read {}", folder.display()))?;
    let paths = entries.filter_map(|entry| Some(entry.ok()?.path()));
    let sources = paths.filter(|path: &PathBuf| path.extension().is_some_and(|e| e == "rs"));
    let mut names: Vec<String> =
        sources.filter_map(|path| Some(path.file_stem()?.to_str()?.to_owned())).collect();
    names.sort();
    Ok(names)
}
