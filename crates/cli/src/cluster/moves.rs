//! `hob cluster move DISK --to HOST`: orders, watches and cancels a move.
//!
//! The hosts move the disk, and this command only shows the progress. If interrupted, the command
//! prints that the move continues, and exits.

use anyhow::bail;
use clap::Args;
use hob_control::client::Client;
use hob_control::{
    CarryMode, ClusterDiskState, ClusterMove, ClusterMoveStart, ClusterMoveState, PlannedChange, Size,
};

use super::super::Global;
use super::super::confirmation::DryRun;
use super::super::migrate::carry;
use super::super::output::print;
use super::super::remote::{converse, explain};
use super::super::watch::Watch;

/// Move a disk from its current owner to another host of the cluster, or show the progress of a
/// move
///
/// If no VM uses the disk and --cache is not given, the owner drains and closes the disk, and the
/// other host opens it with an empty cache. Otherwise the disk is migrated as by 'hob migrate'.
/// Both hosts then need TLS on their control APIs, and the other host needs an address in
/// [cluster].
#[derive(Debug, Args)]
pub(crate) struct Move {
    /// The disk
    disk: String,
    /// Name of the host that gets the disk
    #[arg(long, value_name = "HOST")]
    to: Option<String>,
    /// How the cache moves [default: drop, or copy if the disk is in use]
    #[arg(long, value_parser = carry(COPIED), requires = "to")]
    cache: Option<CarryMode>,
    /// Pool on the other host [default: the pool of the same name, or the only pool]
    #[arg(long, requires = "to")]
    pool: Option<String>,
    /// Maximum rate at which the cache is copied, bytes a second
    #[arg(long, value_name = "BYTES", requires = "to")]
    bandwidth: Option<Size>,
    /// Request the move, and do not wait for its end
    #[arg(long, requires = "to")]
    no_wait: bool,
    /// Show what would happen to the cache, and move nothing
    #[arg(long, requires = "to")]
    dry_run: bool,
    /// Cancel the move
    #[arg(long, conflicts_with = "to")]
    cancel: bool,
}

/// Meaning of `--cache copy`.
pub(super) const COPIED: &str = "Copy the cache, hottest data first";

pub(super) fn run(args: &Move, global: &Global) -> anyhow::Result<()> {
    let disk = &args.disk;
    let shown = converse(global, async |client| {
        if args.cancel {
            return client.cluster_move_cancel(disk).await.map_err(explain);
        }
        let Some(to) = args.to.clone() else { return find(&client.with_liveness_check(), disk).await };
        let start =
            ClusterMoveStart { to, cache: args.cache, pool: args.pool.clone(), bandwidth: args.bandwidth };
        announce(&client, disk, args.cache, args.dry_run).await?;
        let mut shown = client.cluster_move(disk, &start).await.map_err(explain)?;
        let mut watch = Watch::new()?;
        while !args.no_wait && !shown.state.is_over() {
            watch.show("", &sentence(&shown));
            let goes_on = || {
                format!(
                    "the move of {disk} continues; 'hob cluster move {disk}' shows the progress, \
                    'hob cluster move {disk} --cancel' cancels it"
                )
            };
            shown = watch.wait(look(&client, &shown), goes_on).await?;
        }
        watch.end();
        if shown.state == ClusterMoveState::Failed {
            bail!("{}", sentence(&shown));
        }
        Ok(shown)
    })?;
    print(global.output, &shown, sentence)
}

/// Shows what happens to the cache of a moving disk.
async fn announce(
    client: &Client,
    disk: &str,
    cache: Option<CarryMode>,
    dry_run: bool,
) -> anyhow::Result<()> {
    let is_kept = match cache {
        Some(cache) => matches!(cache, CarryMode::Copy | CarryMode::Remote),
        // The cache is copied if the disk is in use.
        None => {
            let remove = PlannedChange::Remove { discard_dirty: false };
            client.preview(disk, &remove).await.is_ok_and(|preview| preview.clients > 0)
        }
    };
    DryRun::new(dry_run).announce_move(client, disk, is_kept).await.map(drop)
}

async fn find(client: &Client, disk: &str) -> anyhow::Result<ClusterMove> {
    let moves = client.cluster_moves().await.map_err(explain)?;
    let found = moves.into_iter().find(|one| one.disk == disk);
    found.ok_or_else(|| {
        anyhow::anyhow!("{disk} is not being moved; 'hob cluster move {disk} --to HOST' moves it")
    })
}

/// Returns the progress of a move. If etcd has no order for the move any more, the move has ended.
/// The result then depends on which host owns the disk.
pub(super) async fn look(client: &Client, before: &ClusterMove) -> anyhow::Result<ClusterMove> {
    let moves = client.cluster_moves().await.map_err(explain)?;
    if let Some(found) = moves.into_iter().find(|one| one.disk == before.disk && one.id == before.id) {
        return Ok(found);
    }
    let disks = client.cluster_disks().await.map_err(explain)?;
    let held = disks.iter().find(|disk| disk.name == before.disk && disk.state == ClusterDiskState::Held);
    let (state, note) = match held {
        Some(disk) if disk.host == before.to => (ClusterMoveState::Done, None),
        Some(disk) => {
            (ClusterMoveState::Failed, Some(format!("the order is gone, and {} has the disk", disk.host)))
        }
        None => (ClusterMoveState::Failed, Some("the order is gone, and no host has the disk".to_owned())),
    };
    Ok(ClusterMove { state, note, ..before.clone() })
}

/// Describes the progress in a sentence.
pub(super) fn sentence(shown: &ClusterMove) -> String {
    use ClusterMoveState::*;
    let ClusterMove { disk, from, to, state, note, .. } = shown;
    let note = note.as_deref();
    let with = |text: String| note.map_or(text.clone(), |note| format!("{text}: {note}"));
    match state {
        Asked => format!("{disk} has an order to move to {to}; its owner has not read the order yet"),
        Offered => format!("{disk} moves from {from} to {to}; {to} checks whether it can serve the disk"),
        Welcome => format!("{disk} moves from {from} to {to}; {to} can serve the disk"),
        Leaving => with(format!("{disk} moves from {from} to {to}")),
        Given => format!("{disk} was released by {from}; {to} acquires it"),
        Done => format!("{disk} is at {to}"),
        Failed => with(format!("{disk} was not moved to {to}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_state_is_a_sentence() {
        use ClusterMoveState::*;
        for state in [Asked, Offered, Welcome, Leaving, Given, Done, Failed] {
            let shown = ClusterMove {
                disk: "web".into(),
                id: "1".into(),
                from: "a".into(),
                to: "b".into(),
                state,
                cache: None,
                note: Some("because".into()),
            };
            let text = sentence(&shown);
            assert!(text.contains("web") && text.contains('b'), "{text}");
            assert_eq!(text.contains("because"), matches!(state, Leaving | Failed), "{text}");
        }
    }
}
