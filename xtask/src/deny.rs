//! Checks the licences and sources of the crates in hob with cargo-deny, by the rules of `deny.toml`.
//!
//! cargo-deny's database of security advisories is a git repository, which a build host may not
//! reach, so advisories are checked only on request.

use anyhow::Result;

use crate::shell;

/// Options of the command.
#[derive(Debug, clap::Args)]
pub(crate) struct Arguments {
    /// Also check security advisories, which are downloaded
    #[arg(long)]
    advisories: bool,
}

/// Checks that need nothing but the crates.
const CHECKS: [&str; 3] = ["licenses", "bans", "sources"];

pub(crate) fn run(arguments: &Arguments) -> Result<()> {
    shell::install_cargo_command("deny")?;
    let mut deny = shell::cargo(&["deny", "--locked", "check"]);
    deny.args(CHECKS);
    if arguments.advisories {
        deny.arg("advisories");
    }
    shell::run(&mut deny)
}
