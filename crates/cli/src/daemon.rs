//! `hob daemon`: serves many disks from a configuration file, which commands can change while it
//! runs.

use std::path::PathBuf;

use clap::Args;
use hob_daemon::{Config, Plan};

use super::sockets::Sockets;
use super::{Global, output};

/// Serve many disks, which other commands can change while the daemon runs
#[derive(Debug, Args)]
pub(crate) struct Daemon {
    /// Configuration file
    #[arg(long, value_name = "FILE", default_value = "/etc/hob/hob.toml")]
    config: PathBuf,
    /// Check whether the daemon could start, without changing anything: read the configuration, the
    /// files that it names and the saved state, and exit
    #[arg(long)]
    check: bool,
    #[command(flatten)]
    sockets: Sockets,
}

pub(super) fn run(args: &Daemon, global: &Global) -> anyhow::Result<()> {
    let complete = |config: &mut Config| {
        global.say_in(&mut config.control);
        config.set_sockets(args.sockets.clone().into());
    };
    if args.check {
        let mut config = Config::load(&args.config)?;
        complete(&mut config);
        Plan::check_config(&config)?;
        return output::write(format!("{}\n", hob_daemon::can_take_over()).as_bytes());
    }
    hob_daemon::run(Plan::of_file(&args.config, complete)?)
}
