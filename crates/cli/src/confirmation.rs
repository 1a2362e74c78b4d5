//! `--dry-run` and `--yes`: showing the effects of a command on cached and dirty data before its
//! execution.

use std::io::Write as _;

use clap::Args;
use hob_control::client::Client;
use hob_control::{DiskState, OnDirty, PlannedChange, PlannedPoolChange, Preview};

use super::DryRunEnded;
use super::remote::explain;

/// Options of commands that may empty a cache.
#[derive(Clone, Copy, Debug, Args)]
pub(super) struct DryRun {
    /// Show the changes, and change nothing
    #[arg(long)]
    dry_run: bool,
}

/// Options of commands that may lose dirty data.
#[derive(Clone, Copy, Debug, Args)]
pub(super) struct Confirmation {
    #[command(flatten)]
    rehearsal: DryRun,
    /// Do not ask for confirmation: accept that dirty data is lost
    #[arg(long)]
    yes: bool,
}

impl DryRun {
    pub(super) fn new(dry_run: bool) -> DryRun {
        DryRun { dry_run }
    }

    /// Returns true if the command only shows the changes.
    pub(super) fn is_dry_run(self) -> bool {
        self.dry_run
    }

    /// Shows the effects of a change. With `--dry-run` the command ends here.
    pub(super) async fn announce(
        self,
        client: &Client,
        disk: &str,
        change: &PlannedChange,
    ) -> anyhow::Result<Preview> {
        let preview = client.preview(disk, change).await.map_err(explain)?;
        self.say(disk, preview)
    }

    /// Shows the effects of moving a disk to another host, with or without its cached data.
    pub(super) async fn announce_move(
        self,
        client: &Client,
        disk: &str,
        is_kept: bool,
    ) -> anyhow::Result<Preview> {
        if is_kept {
            return self.say(disk, Preview::default());
        }
        let here = client.disk(disk).await.ok().filter(|disk| disk.state == DiskState::Online);
        if let Some(here) = here {
            if here.cache.is_none() {
                return self.say(disk, Preview::default());
            }
            return self.announce(client, disk, &PlannedChange::Disable { discard_dirty: false }).await;
        }
        let effect = format!("{disk}: its cache on its owner is emptied; the owner knows the amount of data");
        self.say(disk, Preview { effects: vec![effect], ..Preview::default() })
    }

    /// Prints the effects. With `--dry-run` the command ends here.
    pub(super) fn say(self, subject: &str, preview: Preview) -> anyhow::Result<Preview> {
        for effect in &preview.effects {
            // stderr may be closed; this is not an error.
            let _ = writeln!(std::io::stderr(), "{effect}");
        }
        if !self.dry_run {
            return Ok(preview);
        }
        if preview.effects.is_empty() {
            let _ = writeln!(std::io::stderr(), "{subject}: no cached or dirty data is lost");
        }
        Err(DryRunEnded.into())
    }
}

impl Confirmation {
    pub(super) fn rehearsal(self) -> DryRun {
        self.rehearsal
    }

    /// Returns true if the command only shows the changes.
    pub(super) fn is_dry_run(self) -> bool {
        self.rehearsal.is_dry_run()
    }

    /// Shows the effects of a change, and refuses to lose dirty data without `--yes`. A disk or a
    /// cache is never removed with its dirty data without `--yes`.
    pub(super) async fn preview(
        self,
        client: &Client,
        disk: &str,
        change: &PlannedChange,
    ) -> anyhow::Result<Preview> {
        let preview = self.rehearsal.announce(client, disk, change).await?;
        let is_asked_for = matches!(
            change,
            PlannedChange::Remove { discard_dirty: true } | PlannedChange::Disable { discard_dirty: true }
        );
        if (is_asked_for || preview.loses_dirty()) && !self.yes {
            anyhow::bail!(refusal(disk, &preview));
        }
        Ok(preview)
    }

    /// Refuses to lose dirty data in the flash of a host that does not answer, without `--yes`.
    pub(super) fn check_elsewhere(self, disk: &str, host: &str) -> anyhow::Result<()> {
        let effect = format!(
            "{disk}: dirty data in the flash of {host} is lost: writes that were acknowledged to \
            the guest are undone; the amount is unknown on this host"
        );
        self.check_unknown(disk, effect)
    }

    /// Refuses to take a disk of objects from its owner without `--yes`.
    pub(super) fn check_unlock(self, spec: &str, owner: &str) -> anyhow::Result<()> {
        let effect = format!(
            "{spec}: unflushed writes of {owner} are lost, and dirty data of its cache is not \
            written to the disk: writes that were acknowledged to the guest are undone; the amount \
            is unknown"
        );
        self.check_unknown(spec, effect)
    }

    /// Shows that an unknown amount of dirty data is lost, and refuses to lose it without `--yes`.
    fn check_unknown(self, subject: &str, effect: String) -> anyhow::Result<()> {
        let preview = Preview { effects: vec![effect], dirty_unknown: true, ..Preview::default() };
        let preview = self.rehearsal.say(subject, preview)?;
        if !self.yes {
            anyhow::bail!(refusal(subject, &preview));
        }
        Ok(())
    }

    /// Shows and checks what is lost if devices are overwritten. Without `--force` the daemon does
    /// not overwrite devices, so only a dry run needs the preview. The result tells the daemon
    /// whether it may discard dirty data.
    pub(super) async fn check_overwritten(
        self,
        client: &Client,
        pool: &str,
        change: &PlannedPoolChange,
        force: bool,
    ) -> anyhow::Result<OnDirty> {
        if force || self.is_dry_run() {
            return self.check_pool(client, pool, change).await;
        }
        Ok(OnDirty::Drain)
    }

    /// Shows and checks the effects of a change. The result tells the daemon whether to discard or
    /// drain dirty data.
    pub(super) async fn check(
        self,
        client: &Client,
        disk: &str,
        change: &PlannedChange,
    ) -> anyhow::Result<OnDirty> {
        self.preview(client, disk, change).await?;
        Ok(if self.yes { OnDirty::Discard } else { OnDirty::Drain })
    }

    /// Shows the effects of a change of a pool, and refuses to lose dirty data without `--yes`.
    /// Discarding an object by name always requires `--yes`.
    pub(super) async fn check_pool(
        self,
        client: &Client,
        pool: &str,
        change: &PlannedPoolChange,
    ) -> anyhow::Result<OnDirty> {
        let preview = client.pool_preview(pool, change).await.map_err(explain)?;
        let preview = self.rehearsal.say(pool, preview)?;
        let is_asked_for = matches!(change, PlannedPoolChange::DiscardOrphan { .. });
        if (is_asked_for || preview.loses_dirty()) && !self.yes {
            anyhow::bail!("pool {pool}: data would be lost; pass --yes to accept that; nothing was changed");
        }
        Ok(if self.yes { OnDirty::Discard } else { OnDirty::Drain })
    }
}

/// Returns the reason why a change that may lose dirty data needs `--yes`.
fn refusal(disk: &str, preview: &Preview) -> String {
    if preview.loses_dirty() {
        return format!("{disk}: dirty data would be lost; pass --yes to accept that; nothing was changed");
    }
    format!(
        "{disk}: it has no dirty data now, but writes that arrive before the end of the command could be lost. Leave \
         out --discard-dirty, or pass --yes to accept that; nothing was changed"
    )
}

#[cfg(test)]
mod tests {
    use hob_control::Size;

    use super::*;

    #[test]
    fn an_unknown_loss_needs_yes() {
        let consent = |dry_run, yes| Confirmation { rehearsal: DryRun { dry_run }, yes };
        let check = |consent: Confirmation| {
            [consent.check_unlock("s3://bucket/vm", "host b"), consent.check_elsewhere("vm", "host b")]
        };
        for refused in check(consent(false, false)) {
            let error = refused.unwrap_err().to_string();
            assert!(error.contains("would be lost") && error.contains("pass --yes"), "{error}");
        }
        for yes in [false, true] {
            assert!(check(consent(true, yes)).into_iter().all(|it| it.unwrap_err().is::<DryRunEnded>()));
        }
        assert!(check(consent(false, true)).iter().all(Result::is_ok));
    }

    #[test]
    fn only_dirty_data_that_exists_is_said_to_be_lost() {
        let nothing = Preview::default();
        assert!(refusal("vm", &nothing).contains("it has no dirty data now"));
        for loses in [
            Preview { dirty_lost: Size(4096), ..Preview::default() },
            Preview { dirty_unknown: true, ..Preview::default() },
        ] {
            assert!(refusal("vm", &loses).contains("dirty data would be lost"));
        }
    }
}
