//! `hob completions SHELL`: completion scripts.

use clap::Args;
use clap_complete::Shell;

use super::output::write;

/// Print a completion script for a shell
#[derive(Debug, Args)]
pub(crate) struct Completions {
    /// Name of the shell
    #[arg(value_enum)]
    shell: Shell,
}

pub(super) fn run(args: &Completions) -> anyhow::Result<()> {
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut super::clap_command(), "hob", &mut script);
    write(&script)
}
