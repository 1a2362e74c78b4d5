//! `cargo xtask mutants` checks that a test fails when the engine is changed. cargo-mutants changes
//! one place at a time in the parts of the engine that decide where data is. Each mutant must fail
//! a unit test of the engine or one of a few hundred simulated histories.

use std::path::Path;

use anyhow::{Context, Result, bail};
use clap::Args;

use crate::shell;

/// Source files that are mutated.
const FILES: [&str; 6] = [
    "crates/engine/src/engine/**",
    "crates/engine/src/journal/**",
    "crates/engine/src/index.rs",
    "crates/engine/src/index/**",
    "crates/engine/src/range_locks.rs",
    "crates/engine/src/claims/**",
];

/// Number of simulated histories (`HOB_SEEDS`) in the test with random seeds of
/// crates/world/tests/lives.rs, and in that of crates/world/tests/histories.rs.
const HISTORIES: &str = "300";

/// Modules of the engine whose long tests do not run the mutated files.
const OTHER_TESTS: [&str; 5] = ["chooser::", "partition::", "policy::", "qos::", "vscsi::"];

#[derive(Debug, Args)]
pub(crate) struct Arguments {
    /// Test only every Kth mutant, starting with the Nth: N/K
    #[arg(long, value_name = "N/K")]
    shard: Option<String>,
    /// Mutate only functions whose names match this regular expression
    #[arg(long, value_name = "RE")]
    only: Option<String>,
    /// Leave out the simulated histories, which take most of the time
    #[arg(long)]
    unit_only: bool,
    /// List the mutants without testing them
    #[arg(long)]
    list: bool,
}

/// Runs cargo-mutants and prints the score.
pub(crate) fn run(arguments: &Arguments) -> Result<()> {
    shell::install_cargo_command("mutants")?;
    let out = shell::target_dir()?.join("mutants");
    std::fs::create_dir_all(&out)?;
    let mut command = shell::cargo(&["mutants", "--package", "hob-engine", "--no-shuffle", "--output"]);
    command.arg(&out).env("HOB_SEEDS", HISTORIES);
    // A mutant with warnings still counts as a mutant that compiles.
    command.args(["--cap-lints", "true", "--timeout", "300"]);
    for file in FILES {
        command.args(["--file", file]);
    }
    if let Some(shard) = &arguments.shard {
        command.args(["--shard", shard, "--sharding", "round-robin"]);
    }
    if let Some(only) = &arguments.only {
        command.args(["--re", only]);
    }
    if arguments.list {
        return shell::run(command.arg("--list"));
    }
    command.args(["--test-package", "hob-engine"]);
    let tests: &[&str] =
        if arguments.unit_only { &["--lib"] } else { &["--lib", "--test", "lives", "--test", "histories"] };
    if !arguments.unit_only {
        command.args(["--test-package", "hob-world"]);
    }
    command.arg("--").args(tests);
    // The first failure suffices. The skipped tests do not run the mutated files.
    command.args(["--", "-Zunstable-options", "--fail-fast"]).env("RUSTC_BOOTSTRAP", "1");
    command.args(OTHER_TESTS.iter().flat_map(|name| ["--skip", name]));
    // cargo-mutants fails if a mutant was missed; the score lists the missed mutants.
    let result = shell::run(&mut command);
    score(&out.join("mutants.out"))
        .with_context(|| format!("no results of cargo-mutants, whose run ended with {result:?}"))
}

/// Prints the number of mutants that tests detected, and lists the missed mutants.
fn score(dir: &Path) -> Result<()> {
    let lines = |name: &str| -> Result<Vec<String>> {
        let path = dir.join(name);
        let text =
            std::fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
        Ok(text.lines().map(str::to_owned).collect())
    };
    let (caught, missed) = (lines("caught.txt")?, lines("missed.txt")?);
    let (timeout, unviable) = (lines("timeout.txt")?, lines("unviable.txt")?);
    // A mutant that never ends counts as detected.
    let noticed = caught.len() + timeout.len();
    let viable = noticed + missed.len();
    if viable == 0 {
        bail!("no mutant compiles, so none was tested");
    }
    println!(
        "\ntests detected {noticed} of {viable} mutants ({} by a time limit); {} do not compile",
        timeout.len(),
        unviable.len()
    );
    println!("score: {:.1} %", 100.0 * noticed as f64 / viable as f64);
    for mutant in &missed {
        println!("missed: {mutant}");
    }
    Ok(())
}
