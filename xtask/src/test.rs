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

use crate::{dashboard, packages, shell, suite, torture};

/// How long each fuzz target runs, in seconds.
const FUZZ_SECONDS: u32 = 20;

/// How many of them run at a time: each keeps one core busy.
const FUZZ_AT_ONCE: usize = 2;

/// How long faults are injected into the running daemon.
const TORTURE_MINUTES: &str = "2";

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
    /// The release binary
    Build,
    /// Order in the house: file lengths, crate directions, generated pages …
    Tidy,
    /// Black-box tests with real clients
    Conformance,
    /// The black-box tests that move data, on the ring of threads
    Ring,
    /// Two minutes of fault injection against the release binary
    Torture,
    /// The dashboard's bundle, and its tests in a browser
    Dashboard,
    /// hob with its features `psk` and `rbd`, and the black-box tests of `psk`
    Psk,
    /// The black-box tests of feature `rbd`, on Ceph clusters of their own, while the next step runs
    Rbd,
    /// Twenty seconds of each fuzz target
    Fuzz,
}

impl Step {
    const ALL: [Self; 13] = [
        Self::Install,
        Self::Fmt,
        Self::Clippy,
        Self::Unit,
        Self::Build,
        Self::Tidy,
        Self::Conformance,
        Self::Ring,
        Self::Torture,
        Self::Dashboard,
        Self::Psk,
        Self::Rbd,
        Self::Fuzz,
    ];

    fn name(self) -> &'static str {
        match self {
            Self::Install => "packages",
            Self::Fmt => "format",
            Self::Clippy => "clippy",
            Self::Unit => "tests",
            Self::Build => "release build",
            Self::Tidy => "tidy",
            Self::Conformance => "conformance",
            Self::Ring => "conformance on threads",
            Self::Torture => "torture",
            Self::Dashboard => "dashboard",
            Self::Psk => "feature psk",
            Self::Rbd => "feature rbd",
            Self::Fuzz => "fuzz",
        }
    }

    /// Can others run meanwhile?
    fn sleeps(self) -> bool {
        self == Self::Rbd
    }

    /// Runs it; says how long that took, and what came of it. `hob` is the release binary, if it is of this run.
    fn timed(self, hob: Option<&Path>) -> (Duration, Result<()>) {
        let start = Instant::now();
        let result = self.run(hob);
        (start.elapsed(), result)
    }

    fn run(self, hob: Option<&Path>) -> Result<()> {
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
            Self::Build => cargo(&["build", "--release", "-p", "hob"]),
            Self::Tidy => {
                let mut command = suite::cargo_test(&["--bin", "xtask"]);
                // Where this run has built none, it builds one for itself.
                command.envs(hob.map(|hob| ("HOB_BUILT", hob)));
                shell::run_tests(&mut command)
            }
            Self::Conformance => suite::all(),
            Self::Ring => {
                let targets: Vec<&str> = RING_TESTS.into_iter().flat_map(|file| ["--test", file]).collect();
                suite::against_release(&targets, &[("HOB_RING", "threads")])
            }
            Self::Torture => torture::harness(&suite::hob()?, &["--minutes", TORTURE_MINUTES]),
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
        let wants_binary =
            |s: &Step| matches!(s, Step::Conformance | Step::Ring | Step::Torture | Step::Dashboard);
        let needed = step == Step::Build && arguments.only.iter().any(wants_binary);
        let refused = step == Step::Install && arguments.no_install;
        (all || needed || arguments.only.contains(&step)) && !refused
    };
    let mut summary: Vec<(Step, Duration, Result<()>)> = Vec::new();
    let begun = Instant::now();
    let (mut beside, mut hob) = (None, None);
    for step in Step::ALL.into_iter().filter(|&step| wanted(step)) {
        println!("\n=== {} ===", step.name());
        if step.sleeps() {
            // It waits for others most of its time. Its lines stand between theirs; what failed stands at the end.
            beside = Some((step, std::thread::spawn(move || step.timed(None))));
            continue;
        }
        let (took, result) = step.timed(hob.as_deref());
        if step == Step::Build && result.is_ok() {
            hob = Some(suite::hob()?);
        }
        summary.push((step, took, result));
    }
    if let Some((step, thread)) = beside {
        let (took, result) = thread.join().expect("a step that does not panic");
        summary.push((step, took, result));
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
    println!("{:<24} {:>7.1} s", "together", begun.elapsed().as_secs_f64());
    let failed: Vec<&str> = summary.iter().filter(|(.., r)| r.is_err()).map(|(s, ..)| s.name()).collect();
    if !failed.is_empty() {
        bail!("failed: {}", failed.join(", "));
    }
    Ok(())
}

/// hob with what no default build has: TLS by OpenSSL with keys that both sides know, and Ceph RBD images. One build for both, in the profile
/// of tests, whose binary is not the one that the other steps look at.
const FEATURES: [&str; 4] = ["-p", "hob", "--features", "psk,rbd"];

/// Builds that, and says where it is. With its tests, whose libraries are built in another way than those of a binary alone: the binary
/// takes the same.
fn build_with_features() -> Result<PathBuf> {
    shell::run(&mut shell::cargo(&[&["build", "--bins", "--tests"], &FEATURES[..]].concat()))?;
    Ok(shell::target_dir()?.join("debug/hob"))
}

fn psk() -> Result<()> {
    let cargo = |args: &[&str]| shell::run(&mut shell::cargo(args));
    cargo(&[&["clippy"], &FEATURES[..], &["--all-targets", "--", "-D", "warnings"]].concat())?;
    // Before its tests: then the binary and they are built at the same time.
    let hob = build_with_features()?;
    shell::run_tests(&mut shell::cargo(&[&["test"], &FEATURES[..], &["psk"]].concat()))?;
    shell::run_tests(suite::cargo_test(&["--test", "nbd_psk"]).env("HOB_BIN", hob))
}

/// The black-box tests of RBD images, each with a cluster of four processes.
fn rbd() -> Result<()> {
    let hob = build_with_features()?;
    let mut command = suite::cargo_test(&["--test", "rbd", "--", "--test-threads=3"]);
    shell::run_tests(command.env("HOB_BIN", hob))
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
        // It only starts others: to optimize it takes longer than all it does.
        shell::run(&mut shell::cargo(&["install", "cargo-fuzz", "--locked", "--debug"]))?;
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
