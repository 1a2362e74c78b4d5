//! `hob config …`: differences between hob.toml and what the daemon serves.

use clap::Subcommand;
use hob_control::{ConfigApplied, ConfigApply, ConfigDiff, ConfigRemedy};

use super::output::{print, table, with_notes};
use super::remote::ask;
use super::{Global, NotInOrder};

/// Compare the running daemon with hob.toml, and apply the file
#[derive(Debug, Subcommand)]
pub(crate) enum Config {
    /// Show differences between the running daemon and hob.toml; exit status 0 if there are none
    Diff,
    /// Apply hob.toml to the running daemon. Before a change empties or removes a cache or ends
    /// write-back, the daemon writes the cache's dirty data to the backing
    Apply {
        /// Do not ask for confirmation: also make changes that empty a cache or remove something
        #[arg(long)]
        yes: bool,
        /// Show the changes, and change nothing
        #[arg(long)]
        dry_run: bool,
    },
}

pub(super) fn run(command: Config, global: &Global) -> anyhow::Result<()> {
    match command {
        Config::Diff | Config::Apply { dry_run: true, .. } => {
            let diff = ask(global, async |client| client.config_diff().await)?;
            print(global.output, &diff, show)?;
            if diff.differences.is_empty() { Ok(()) } else { Err(NotInOrder.into()) }
        }
        Config::Apply { yes, dry_run: false } => {
            let applied = ask(global, async |client| client.config_apply(ConfigApply { yes }).await)?;
            print(global.output, &applied, show_applied)?;
            if applied.failed.is_empty() && applied.left.is_empty() { Ok(()) } else { Err(NotInOrder.into()) }
        }
    }
}

fn show(diff: &ConfigDiff) -> String {
    if diff.differences.is_empty() {
        return format!("the daemon matches {}", diff.file);
    }
    let value = |value: &Option<String>| value.clone().unwrap_or_else(|| "-".to_owned());
    let rows = diff.differences.iter().map(|it| {
        let by = match it.by {
            ConfigRemedy::Apply => "apply",
            ConfigRemedy::ApplyWithYes => "apply --yes",
            ConfigRemedy::Reload => "reload",
            ConfigRemedy::Command => "by command",
        };
        vec![it.what(), value(&it.file), value(&it.running), by.to_owned(), it.action.clone()]
    });
    table("WHAT|FILE|DAEMON|HOW|ACTION", rows)
}

fn show_applied(applied: &ConfigApplied) -> String {
    let ConfigApplied { done, failed, left, notes } = applied;
    if done.is_empty() && failed.is_empty() && left.is_empty() {
        return "there is nothing to do".to_owned();
    }
    let lines =
        |word: &str, all: &[String]| all.iter().map(|what| format!("{word} {what}\n")).collect::<String>();
    let text = lines("applied:    ", done) + &lines("not applied:", failed) + &lines("not applied:", left);
    with_notes(text.trim_end().to_owned(), notes)
}
