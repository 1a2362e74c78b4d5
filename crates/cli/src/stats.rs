//! `hob stats [DISK]`: statistics of disks.

use clap::Args;
use hob_control::{DiskState, DiskStats, OutcomeStats, Size};

use super::Global;
use super::output::{duration, pairs, print, table, with_notes, word};
use super::remote::ask;

/// Show the number of requests with each outcome, and the statistics of vSphere Flash Read Cache
#[derive(Debug, Args)]
pub(crate) struct Stats {
    /// Name of the disk; all online disks if absent
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

/// Returns additional lines for a persistent cache.
fn write_back(stats: &DiskStats) -> Vec<(&'static str, String)> {
    let draining = if stats.draining { ", draining" } else { "" };
    let rate = Size(stats.destage_rate_bytes).human();
    let mut facts = vec![
        ("dirty", format!("{}{draining}", Size(stats.dirty_bytes).human())),
        ("destaged", format!("{}, {rate}/s now", Size(stats.destaged_bytes).human())),
        ("journal written", Size(stats.journal_bytes).human()),
    ];
    if stats.second_copy_bytes > 0 {
        facts.push(("second copies written", Size(stats.second_copy_bytes).human()));
    }
    if stats.unverified_bytes > 0 {
        let (left, all) = (Size(stats.unverified_bytes).human(), Size(stats.to_verify_bytes).human());
        facts.push(("to be verified", format!("{left} of {all}")));
    }
    if stats.verified_bytes + stats.stale_bytes > 0 {
        facts.push(("verified", Size(stats.verified_bytes).human()));
        facts.push(("stale and dropped", Size(stats.stale_bytes).human()));
    }
    if stats.destage_errors > 0 {
        facts.push(("failed destage writes", stats.destage_errors.to_string()));
    }
    if stats.dirty_lost_bytes > 0 {
        facts.push(("dirty and unreadable", Size(stats.dirty_lost_bytes).human()));
    }
    facts
}

/// Describes the hits of the most recent reads, which exclude the reads of the warm-up.
fn recent(stats: &DiskStats) -> String {
    let recent = &stats.recent;
    match recent.reads {
        0 => "no reads".to_owned(),
        reads => format!("{:.1} % of the last {reads} reads from flash or memory", recent.hit_percent),
    }
}

fn show(stats: &DiskStats) -> String {
    let mut facts = vec![
        ("disk", stats.disk.clone()),
        ("cache", word(&stats.cache)),
        ("counting for", duration(stats.elapsed_ns)),
        ("requests", format!("{} ({} reads, {} writes)", stats.requests, stats.reads, stats.writes)),
        ("flash served", format!("{:.1} % of reads", stats.hit_percent)),
        ("recently", recent(stats)),
        ("checksum mismatches", stats.checksum_mismatches.to_string()),
        ("index memory", Size(stats.index_bytes + stats.memory_index_bytes).human()),
    ];
    if stats.shared_read_bytes > 0 {
        facts.push(("from its parent's disk", Size(stats.shared_read_bytes).human()));
    }
    if stats.extra_read_bytes > 0 {
        let (read, uses) = (Size(stats.extra_read_bytes).human(), stats.extra_blocks_used);
        facts.push(("extra data", format!("{read} read, blocks used {uses} times")));
    }
    if stats.memory_bytes > 0 || stats.memory_hit_percent > 0.0 {
        let (held, all) = (Size(stats.memory_held_bytes).human(), Size(stats.memory_bytes).human());
        facts.push(("read ahead", Size(stats.read_ahead_bytes).human()));
        facts.push(("writes merged", stats.writes_merged.to_string()));
        facts.insert(
            4,
            ("memory served", format!("{:.1} % of reads, from {held} of {all}", stats.memory_hit_percent)),
        );
    }
    if !stats.mode.is_empty() {
        facts.insert(2, ("mode", stats.mode.clone()));
    }
    // A volatile cache has neither a journal nor dirty data.
    if stats.journal_bytes > 0 || stats.dirty_bytes > 0 {
        facts.extend(write_back(stats));
    }
    let facts = pairs(facts);
    let columns = "CLASS|REASON|COUNT:|SHARE:|MEAN:|P50:|P99:";
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
    let outcomes = table(columns, stats.outcomes.iter().filter(|outcome| outcome.count > 0).map(row));
    format!("{facts}\n\n{outcomes}\n\n{}", pairs(stats.vsphere.rows()))
}
