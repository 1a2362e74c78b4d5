//! `hob man --out DIR`: manual pages, one per command.

use std::path::PathBuf;

use anyhow::Context;
use clap::Args;

/// Write manual pages, one per command
#[derive(Debug, Args)]
pub(crate) struct Man {
    /// Directory for the manual pages; created if absent
    #[arg(long, value_name = "DIR")]
    out: PathBuf,
}

pub(super) fn run(args: &Man) -> anyhow::Result<()> {
    let place = || format!("cannot write manual pages to {}", args.out.display());
    std::fs::create_dir_all(&args.out).with_context(place)?;
    clap_mangen::generate_to(super::clap_command(), &args.out).with_context(place)
}
