//! `cargo xtask torture` runs the fault injection test against the release binary. See
//! docs/TORTURE.md.

use anyhow::Result;
use clap::Args;

use crate::{shell, suite};

#[derive(Debug, Args)]
pub(crate) struct Arguments {
    /// Test the debug build instead of the release build
    #[arg(long)]
    debug: bool,
    /// Options of the test program: --minutes M, --seed S, ...; `-- --help` lists them
    #[arg(trailing_var_arg = true, allow_hyphen_values = true, value_name = "OPTION")]
    options: Vec<String>,
}

/// Builds hob and the test program, and runs the test.
pub(crate) fn run(arguments: &Arguments) -> Result<()> {
    let profile: &[&str] = if arguments.debug { &[] } else { &["--release"] };
    shell::run(&mut shell::cargo(&[&["build", "-p", "hob"], profile].concat()))?;
    let hob = if arguments.debug { shell::target_dir()?.join("debug/hob") } else { suite::release()? };
    let mut command = shell::cargo(&["run", "--quiet", "-p", "torture", "--"]);
    shell::run(command.args(&arguments.options).env("HOB_BIN", hob))
}
