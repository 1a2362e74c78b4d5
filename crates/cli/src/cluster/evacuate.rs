//! `hob cluster evacuate [HOST]`: moves every disk of a host to other hosts, a few at a time.
//!
//! The progress is in etcd, so an interrupted command continues when it is run again. Moved disks
//! are no longer on the host, and the command watches moves in progress instead of ordering them
//! again.

use std::collections::VecDeque;
use std::io::Write as _;

use anyhow::bail;
use clap::Args;
use hob_control::client::{Client, ClientError};
use hob_control::{AdvisedStay, CarryMode, ClusterAdvice, ClusterMove, ClusterMoveStart, ClusterMoveState};
use serde::Serialize;

use super::super::Global;
use super::super::migrate::carry;
use super::super::output::{print, table};
use super::super::remote::{converse, explain};
use super::super::watch::Watch;
use super::moves::{COPIED, look};

/// Move every disk of a host to other hosts, a few at a time, as 'hob cluster advise --leaving
/// HOST' plans
///
/// Disks in use stay, except with --in-use. The command fails if a disk stays; run the command
/// again to continue.
#[derive(Debug, Args)]
pub(crate) struct Evacuate {
    /// The host to evacuate [default: the host of the daemon]
    host: Option<String>,
    /// Show the planned moves, and move nothing
    #[arg(long)]
    dry_run: bool,
    /// Number of disks that move at the same time
    #[arg(long, value_name = "DISKS", default_value_t = 2, value_parser = clap::value_parser!(u8).range(1..=8))]
    at_once: u8,
    /// How the caches of the disks move [default: drop, or copy if the disk is in use]
    #[arg(long, value_parser = carry(COPIED))]
    cache: Option<CarryMode>,
    /// Maximum rate at which each cache is copied, bytes a second
    #[arg(long, value_name = "BYTES")]
    bandwidth: Option<hob_control::Size>,
    /// Also move disks in use: each moves when its VM is migrated
    #[arg(long = "in-use", alias = "machines")]
    in_use: bool,
}

/// The result of `hob cluster evacuate`, as `-o json` prints it.
#[derive(Debug, Default, Serialize)]
struct Outcome {
    host: String,
    /// The planned moves.
    plan: Vec<Step>,
    /// Completed moves.
    moved: Vec<ClusterMove>,
    /// Disks that have not moved, with the reasons.
    stays: Vec<AdvisedStay>,
}

/// A planned move of a disk.
#[derive(Clone, Debug, Serialize)]
struct Step {
    disk: String,
    to: String,
    /// Expected percentage of hits on the new host, with a cache of the present size as far as
    /// there is space.
    hit_percent_at_once: f64,
    hit_percent: f64,
    users: u64,
}

pub(super) fn run(args: &Evacuate, global: &Global) -> anyhow::Result<()> {
    let outcome = converse(global, async |client| evacuate(args, &client).await)?;
    print(global.output, &outcome, |outcome| text(outcome, args.dry_run))?;
    match outcome.stays.len() {
        0 => Ok(()),
        _ if args.dry_run => Ok(()),
        1 => bail!("{} stays on {}", outcome.stays[0].disk, outcome.host),
        count => bail!("{count} disks stay on {}", outcome.host),
    }
}

async fn evacuate(args: &Evacuate, client: &Client) -> anyhow::Result<Outcome> {
    let host = match &args.host {
        Some(host) => host.clone(),
        None => client.cluster().await.map_err(explain)?.host,
    };
    let advice = client.cluster_advice(Some(&host)).await.map_err(explain)?;
    let mut outcome = plan(host, &advice, args.in_use);
    for step in &outcome.plan {
        let is_copied =
            args.cache.map_or(step.users > 0, |cache| matches!(cache, CarryMode::Copy | CarryMode::Remote));
        if !is_copied {
            // stderr may be closed; this is not an error.
            let _ = writeln!(std::io::stderr(), "{}: its cache on {} is emptied", step.disk, outcome.host);
        }
    }
    if args.dry_run {
        return Ok(outcome);
    }
    let mut watch = Watch::new()?;
    let mut going: Vec<ClusterMove> = Vec::new();
    let mut waiting: VecDeque<Step> = outcome.plan.iter().cloned().collect();
    // These moves were ordered earlier, by another run or another operator.
    let known = client.cluster_moves().await.map_err(explain)?;
    for one in known.into_iter().filter(|one| !one.state.is_over()) {
        let is_ours = one.from == outcome.host || waiting.iter().any(|step| step.disk == one.disk);
        if is_ours {
            waiting.retain(|step| step.disk != one.disk);
            outcome.stays.retain(|stay| stay.disk != one.disk);
            going.push(one);
        }
    }
    while !going.is_empty() || !waiting.is_empty() {
        while going.len() < usize::from(args.at_once)
            && let Some(step) = waiting.pop_front()
        {
            match order(args, client, &step).await {
                Ok(one) => going.push(one),
                Err(error) => outcome.stays.push(AdvisedStay { disk: step.disk, why: format!("{error:#}") }),
            }
        }
        watch.show("", &progress(&outcome, &going, waiting.len()));
        let goes_on = || {
            format!(
                "moves in progress continue, and no more are started; 'hob cluster evacuate {}' \
                continues with the rest",
                outcome.host
            )
        };
        let query = async {
            let mut seen = Vec::new();
            for one in &going {
                seen.push(look(client, one).await?);
            }
            anyhow::Ok(seen)
        };
        let seen = watch.wait(query, goes_on).await?;
        going.clear();
        for one in seen {
            match one.state {
                ClusterMoveState::Done => outcome.moved.push(one),
                ClusterMoveState::Failed => outcome.stays.push(AdvisedStay {
                    disk: one.disk,
                    why: one.note.unwrap_or_else(|| "for an unknown reason".to_owned()),
                }),
                _ => going.push(one),
            }
        }
    }
    watch.end();
    Ok(outcome)
}

async fn order(args: &Evacuate, client: &Client, step: &Step) -> anyhow::Result<ClusterMove> {
    let start =
        ClusterMoveStart { to: step.to.clone(), cache: args.cache, pool: None, bandwidth: args.bandwidth };
    client.cluster_move(&step.disk, &start).await.map_err(|error| match error {
        // The error is shown together with the disk.
        ClientError::Refused { problem, .. } => anyhow::anyhow!("{problem}"),
        error => explain(error),
    })
}

fn plan(host: String, advice: &ClusterAdvice, in_use: bool) -> Outcome {
    let mut outcome = Outcome { host, stays: advice.stays.clone(), ..Outcome::default() };
    for one in &advice.moves {
        let users = advice.disks.iter().find(|disk| disk.name == one.disk).map_or(0, |disk| disk.users);
        if users > 0 && !in_use {
            let why = format!(
                "clients use it; disconnect them, or pass --in-use and migrate the VM while 'hob cluster move {} --to {}' waits for it",
                one.disk, one.to
            );
            outcome.stays.push(AdvisedStay { disk: one.disk.clone(), why });
            continue;
        }
        outcome.plan.push(Step {
            disk: one.disk.clone(),
            to: one.to.clone(),
            hit_percent_at_once: one.hit_percent_at_once,
            hit_percent: one.hit_percent,
            users,
        });
    }
    outcome
}

fn progress(outcome: &Outcome, going: &[ClusterMove], waiting: usize) -> String {
    let one = |one: &ClusterMove| match &one.note {
        Some(note) => format!("{} to {} ({note})", one.disk, one.to),
        None => format!("{} to {}", one.disk, one.to),
    };
    let going: Vec<String> = going.iter().map(one).collect();
    let stay = match outcome.stays.len() {
        0 => String::new(),
        count => format!(", {count} stay"),
    };
    format!("{} moved{stay}, {waiting} waiting; being moved: {}", outcome.moved.len(), going.join(", "))
}

fn text(outcome: &Outcome, is_plan: bool) -> String {
    let mut parts = Vec::new();
    if is_plan && !outcome.plan.is_empty() {
        let columns = "DISK|TO|HITS NOW:|THERE:|USERS:";
        let row = |step: &Step| {
            vec![
                step.disk.clone(),
                step.to.clone(),
                format!("{:.1} %", step.hit_percent),
                format!("{:.1} %", step.hit_percent_at_once),
                step.users.to_string(),
            ]
        };
        parts.push(table(columns, outcome.plan.iter().map(row)));
    }
    parts.extend(outcome.moved.iter().map(|one| format!("{} is at {}", one.disk, one.to)));
    parts.extend(outcome.stays.iter().map(|stay| format!("{} stays: {}", stay.disk, stay.why)));
    if parts.is_empty() {
        parts.push(format!("{} has no disk of the cluster", outcome.host));
    }
    parts.join("\n")
}
