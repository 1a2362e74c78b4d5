//! `hob demo`: a pool, a slow disk and a client, in a minute.

use clap::Args;

/// Show what a cache does, on this machine, within a minute
#[derive(Debug, Args)]
pub(crate) struct Demo {}

pub(crate) fn run(_args: Demo) -> anyhow::Result<()> {
    anyhow::bail!("the demo is not built yet")
}
