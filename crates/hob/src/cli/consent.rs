//! `--dry-run` and `--yes`: what a command would do to cached and dirty data is said before it is done.

use std::io::Write as _;

use clap::Args;
use hob_control::client::Client;
use hob_control::{OnDirty, PlannedChange, Preview};

use super::DryRun;
use super::remote::explain;

/// Of commands that may empty a cache.
#[derive(Clone, Copy, Debug, Args)]
pub(super) struct Rehearsal {
    /// Say what would be done, and change nothing
    #[arg(long)]
    dry_run: bool,
}

/// Of commands that may lose dirty data.
#[derive(Clone, Copy, Debug, Args)]
pub(super) struct Consent {
    #[command(flatten)]
    rehearsal: Rehearsal,
    /// Do not ask for confirmation: lose dirty data where the command does so
    #[arg(long)]
    yes: bool,
}

impl Rehearsal {
    /// Says what the change will do. Ends the command here if that is all.
    pub(super) async fn announce(
        self,
        client: &Client,
        disk: &str,
        change: &PlannedChange,
    ) -> anyhow::Result<Preview> {
        let preview = client.preview(disk, change).await.map_err(explain)?;
        for effect in &preview.effects {
            // Nobody is left to be told when stderr is closed.
            let _ = writeln!(std::io::stderr(), "{effect}");
        }
        if !self.dry_run {
            return Ok(preview);
        }
        if preview.effects.is_empty() {
            let _ = writeln!(std::io::stderr(), "{disk}: no cached or dirty data is lost");
        }
        Err(DryRun.into())
    }
}

impl Consent {
    /// Says what the change will do, and refuses to lose dirty data without `--yes`.
    pub(super) async fn preview(
        self,
        client: &Client,
        disk: &str,
        change: &PlannedChange,
    ) -> anyhow::Result<Preview> {
        let preview = self.rehearsal.announce(client, disk, change).await?;
        let is_asked_for = matches!(
            change,
            PlannedChange::Remove { discard_dirty: true }
                | PlannedChange::Disable { discard_dirty: true }
                | PlannedChange::DiscardDirty
        );
        if (is_asked_for || preview.loses_dirty()) && !self.yes {
            anyhow::bail!("{disk}: dirty data would be lost; say --yes to lose it; nothing was changed");
        }
        Ok(preview)
    }

    /// The same, as what the daemon is to be told.
    pub(super) async fn check(
        self,
        client: &Client,
        disk: &str,
        change: &PlannedChange,
    ) -> anyhow::Result<OnDirty> {
        self.preview(client, disk, change).await?;
        Ok(if self.yes { OnDirty::Discard } else { OnDirty::Drain })
    }
}
