//! Measurements against other programs, one file per bench and a few for what they share.

mod data_path;
mod fio;
mod report;
mod server;

use anyhow::Result;
use clap::Subcommand;

#[derive(Debug, Subcommand)]
pub(crate) enum Bench {
    /// The path of the data when every read is a hit: hob against qemu-nbd, nbdkit and the bare file
    DataPath(data_path::Arguments),
}

pub(crate) fn run(bench: &Bench) -> Result<()> {
    match bench {
        Bench::DataPath(arguments) => data_path::run(arguments),
    }
}
