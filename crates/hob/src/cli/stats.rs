//! `hob stats [DISK]`: figures.

use clap::Args;
use hob_control::{DiskState, DiskStats, OutcomeStats};

use super::Global;
use super::output::{duration, numbers, pairs, print, table, with_notes, word, words};
use super::remote::ask;

/// Show what became of each request, and the statistics of vSphere Flash Read Cache
#[derive(Debug, Args)]
pub(crate) struct Stats {
    /// The disk; all disks that are online if absent
    disk: Option<String>,
}

pub(super) fn run(args: &Stats, global: &Global) -> anyhow::Result<()> {
    if let Some(disk) = &args.disk {
        let stats = ask(global, async |client| client.stats(disk).await)?;
        return print(global.output, &stats, show);
    }
    let (all, notes) = ask(global, async |client| {
        let (mut all, mut notes) = (Vec::new(), Vec::new());
        for disk in client.disks().await? {
            match disk.state {
                DiskState::Online => match client.stats(&disk.name).await {
                    Ok(stats) => all.push(stats),
                    Err(error) => notes.push(format!("{}: {error}", disk.name)),
                },
                state => notes.push(format!("{} is {}", disk.name, word(&state))),
            }
        }
        Ok((all, notes))
    })?;
    print(global.output, &all, |all| {
        with_notes(all.iter().map(show).collect::<Vec<_>>().join("\n\n"), &notes)
    })
}

fn show(stats: &DiskStats) -> String {
    let facts = pairs([
        ("disk", stats.disk.clone()),
        ("cache", word(&stats.cache)),
        ("counting for", duration(stats.elapsed_ns)),
        ("requests", format!("{} ({} reads, {} writes)", stats.requests, stats.reads, stats.writes)),
        ("flash served", format!("{:.1} % of reads", stats.hit_percent)),
        ("checksum mismatches", stats.checksum_mismatches.to_string()),
        ("index memory", hob_control::Size(stats.index_bytes).human()),
    ]);
    let columns = [
        words("CLASS"),
        words("REASON"),
        numbers("COUNT"),
        numbers("SHARE"),
        numbers("MEAN"),
        numbers("P50"),
        numbers("P99"),
    ];
    let row = |outcome: &OutcomeStats| {
        vec![
            outcome.class.clone(),
            outcome.reason.clone(),
            outcome.count.to_string(),
            format!("{:.2} %", outcome.percent),
            duration(outcome.latency.mean_ns),
            duration(outcome.latency.p50_ns),
            duration(outcome.latency.p99_ns),
        ]
    };
    let outcomes = table(&columns, stats.outcomes.iter().filter(|outcome| outcome.count > 0).map(row));
    format!("{facts}\n\n{outcomes}\n\n{}", pairs(stats.vsphere.rows()))
}
