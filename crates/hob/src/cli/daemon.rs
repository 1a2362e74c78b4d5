//! `hob daemon`: many disks, from a configuration file, changed live.

use std::path::PathBuf;

use clap::Args;

use super::Global;
use crate::daemon::config::Config;

/// Serve many disks; changed live with the other commands
#[derive(Debug, Args)]
pub(crate) struct Daemon {
    /// Configuration file
    #[arg(long, value_name = "FILE", default_value = "/etc/hob/hob.toml")]
    config: PathBuf,
}

pub(super) fn run(args: &Daemon, global: &Global) -> anyhow::Result<()> {
    let mut config = Config::load(&args.config)?;
    global.say_in(&mut config.control);
    crate::daemon::run(crate::daemon::Plan::of_config(config)?)
}
