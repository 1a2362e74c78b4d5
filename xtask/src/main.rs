//! `cargo xtask` runs all tasks of developers and CI. Each command has its own module, except
//! `install` (`packages.rs`) and `bench`, which starts another package.

mod config_reference;
mod dashboard;
mod deb;
mod deny;
mod docs;
mod faults;
mod mutants;
mod readers;
mod simulate;
mod suite;
mod test;
mod third_party;
mod tidy;
mod torture;

use std::os::unix::process::CommandExt;
use std::process::ExitCode;

use clap::{Parser, Subcommand};
use xtask::{executables, packages, shell};

#[derive(Debug, Parser)]
#[command(name = "cargo xtask", about = "Tests and measures hob", max_term_width = 100)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Run format check, clippy, all tests, the conformance suite with real clients, and a short
    /// fuzz run
    Test(test::Arguments),
    /// Install the Debian packages that the conformance suite and the benchmarks need
    Install,
    /// Simulate histories of the engine until one violates a guarantee
    Simulate(simulate::Arguments),
    /// Inject faults into a running hob, and check every byte
    Torture(torture::Arguments),
    /// Change the engine at one place at a time, and check that a test fails
    Mutants(mutants::Arguments),
    /// Write docs/config.md and packaging/hob.toml.5 from the types of hob.toml
    ConfigReference,
    /// Write docs/FAULT_TESTS.md, the index from faults to tests
    Faults,
    /// Build the Debian package with cargo-deb
    Deb(deb::Arguments),
    /// Check the licences and sources of the crates in hob with cargo-deny
    Deny(deny::Arguments),
    /// List the third-party crates in hob: their licences, and a bill of materials (CycloneDX)
    ThirdParty(third_party::Arguments),
    /// Build the documentation site with mdBook
    Docs(docs::Arguments),
    /// Draw random sentences for a comprehension test by readers who do not know the code
    Readers(readers::Arguments),
    /// Run the tidy tests, or print statistics of the sources
    Tidy(tidy::Arguments),
    /// Run benchmarks against other programs
    #[command(disable_help_flag = true)]
    Bench {
        /// Arguments of the benchmark program
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        arguments: Vec<String>,
    },
}

fn main() -> ExitCode {
    let result = match Arguments::parse().command {
        Command::Test(arguments) => test::run(&arguments),
        Command::Install => packages::install(),
        Command::Simulate(arguments) => simulate::run(&arguments),
        Command::Torture(arguments) => torture::run(&arguments),
        Command::Mutants(arguments) => mutants::run(&arguments),
        Command::ConfigReference => config_reference::run(),
        Command::Faults => faults::run(),
        Command::Deb(arguments) => deb::run(&arguments),
        Command::Deny(arguments) => deny::run(&arguments),
        Command::ThirdParty(arguments) => third_party::run(&arguments),
        Command::Docs(arguments) => docs::run(&arguments),
        Command::Readers(arguments) => readers::run(&arguments),
        Command::Tidy(arguments) => tidy::run(&arguments),
        Command::Bench { arguments } => {
            // The benchmarks are compiled with optimization, because servers would wait for a slow
            // load generator.
            let mut bench = shell::cargo(&["run", "--quiet", "--release", "--package", "bench", "--"]);
            Err(bench.args(arguments).exec().into())
        }
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("xtask: {error:#}");
            ExitCode::FAILURE
        }
    }
}
