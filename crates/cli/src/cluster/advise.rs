//! `hob cluster advise`: hosts with spare flash, and disks that should move to other hosts.

use clap::Args;
use hob_control::{AdvisedDisk, AdvisedHost, ClusterAdvice};

use super::super::Global;
use super::super::output::{print, table};
use super::super::remote::ask;

/// Show hosts with spare flash, and disks that should move to other hosts, from the miss-ratio curves of all disks
#[derive(Debug, Args)]
pub(crate) struct Advise {
    /// Show advice for moving all disks off this host
    #[arg(long, value_name = "HOST")]
    leaving: Option<String>,
}

pub(super) fn run(args: &Advise, global: &Global) -> anyhow::Result<()> {
    let advice = ask(global, async |client| client.cluster_advice(args.leaving.as_deref()).await)?;
    print(global.output, &advice, text)
}

fn percent(value: f64) -> String {
    format!("{value:.1} %")
}

fn text(advice: &ClusterAdvice) -> String {
    let mut out = hosts(&advice.hosts);
    if !advice.disks.is_empty() {
        out.push_str(&format!("\n\n{}", disks(&advice.disks)));
    }
    if advice.moves.is_empty() {
        out.push_str("\n\nNo move is worthwhile.");
    } else {
        out.push_str("\n\nMoves\n");
        out.push_str(&moves(advice));
        for one in &advice.moves {
            out.push_str(&format!("\n  hob cluster move {} --to {}", one.disk, one.to));
        }
    }
    let resizes = resizes(advice);
    if !resizes.is_empty() {
        out.push_str("\n\nRecommended cache sizes, after the moves\n");
        out.push_str(&resizes.join("\n"));
    }
    if !advice.stays.is_empty() {
        out.push_str("\n\nStay\n");
        let rows = advice.stays.iter().map(|stay| format!("  {}: {}", stay.disk, stay.why));
        out.push_str(&rows.collect::<Vec<_>>().join("\n"));
    }
    if advice.reads > 0.0 {
        let part = |hits: f64| percent(100.0 * hits / advice.reads);
        out.push_str(&format!(
            "\n\nOf {:.0} reads/s, flash serves {} with the present caches. It would serve {} with the best \
            division of each host's flash, and {} after the moves.",
            advice.reads,
            part(advice.hits_now),
            part(advice.hits_here),
            part(advice.hits_then)
        ));
    }
    for caveat in &advice.caveats {
        out.push_str(&format!("\n{caveat}"));
    }
    out
}

fn hosts(hosts: &[AdvisedHost]) -> String {
    let columns = "HOST|DISKS:|REQ/S:|FLASH:|FREE:|TO SPARE:|HITS:|THEN:";
    let row = |host: &AdvisedHost| {
        vec![
            host.name.clone(),
            host.disks.to_string(),
            format!("{:.0}", host.load),
            host.flash.human(),
            host.free.human(),
            host.to_spare.human(),
            percent(host.hit_percent),
            percent(host.hit_percent_then),
        ]
    };
    table(columns, hosts.iter().map(row))
}

fn disks(disks: &[AdvisedDisk]) -> String {
    let columns = "DISK|HOST|READS/S:|CACHE:|HITS:|USEFUL:|BEST HERE:|HITS:|BETTER AT|WITH:|HITS:";
    let row = |disk: &AdvisedDisk| {
        let moves = disk.host != disk.host_then;
        let then = |text: String| if moves { text } else { "-".to_owned() };
        vec![
            disk.name.clone(),
            disk.host.clone(),
            format!("{:.0}", disk.reads),
            disk.cache.human(),
            percent(disk.hit_percent),
            disk.useful.human(),
            disk.cache_here.human(),
            percent(disk.hit_percent_here),
            then(disk.host_then.clone()),
            then(disk.cache_then.human()),
            then(percent(disk.hit_percent_then)),
        ]
    };
    table(columns, disks.iter().map(row))
}

fn moves(advice: &ClusterAdvice) -> String {
    let columns = "DISK|FROM|TO|HITS NOW:|AT ONCE:|DIVIDED WELL:|GAIN, READS/S:";
    table(
        columns,
        advice.moves.iter().map(|one| {
            vec![
                one.disk.clone(),
                one.from.clone(),
                one.to.clone(),
                percent(one.hit_percent),
                percent(one.hit_percent_at_once),
                percent(one.hit_percent_then),
                format!("{:.0}", one.gain),
            ]
        }),
    )
}

/// Lists commands that resize caches to their advised sizes. Sizes that differ by at most a tenth
/// from the present sizes are left out. A larger cache is listed only if it raises the disk's hit
/// ratio by more than one percentage point. A smaller cache is listed only if the advice as a whole
/// raises the hits of all disks by more than 1 %.
fn resizes(advice: &ClusterAdvice) -> Vec<String> {
    /// Minimum increase of a disk's hit ratio, percentage points.
    const WORTH: f64 = 1.0;
    let is_other = |disk: &&AdvisedDisk| {
        let (now, then) = (disk.cache.bytes() as f64, disk.cache_then.bytes() as f64);
        let shrinks = then < 0.9 * now && advice.hits_then > advice.hits_now * 1.01;
        disk.cache.bytes() > 0
            && disk.cache_then.bytes() >> 20 > 0
            && (shrinks || (then > 1.1 * now && disk.hit_percent_then > disk.hit_percent + WORTH))
    };
    let mib = |bytes: u64| format!("{}M", bytes >> 20);
    let line =
        |disk: &AdvisedDisk| format!("  hob cache resize {} {}", disk.name, mib(disk.cache_then.bytes()));
    advice.disks.iter().filter(is_other).map(line).collect()
}

#[cfg(test)]
mod tests {
    use hob_control::{AdvisedMove, AdvisedStay, Size};

    use super::*;

    #[test]
    fn advice_names_hosts_moves_sizes_and_remaining_disks() {
        let disk = AdvisedDisk {
            name: "web".into(),
            host: "a".into(),
            users: 0,
            reads: 100.0,
            cache: Size(16 << 20),
            hit_percent_measured: 20.0,
            hit_percent: 20.0,
            useful: Size(64 << 20),
            cache_here: Size(16 << 20),
            hit_percent_here: 20.0,
            host_then: "b".into(),
            cache_then: Size(64 << 20),
            hit_percent_then: 90.0,
        };
        let one = AdvisedMove {
            disk: "web".into(),
            from: "a".into(),
            to: "b".into(),
            hit_percent: 20.0,
            hit_percent_at_once: 20.0,
            hit_percent_then: 90.0,
            gain: 70.0,
        };
        let mut advice = ClusterAdvice {
            hosts: vec![],
            disks: vec![disk],
            moves: vec![one],
            stays: vec![AdvisedStay { disk: "db".into(), why: "it moves".into() }],
            hits_now: 20.0,
            hits_here: 20.0,
            hits_then: 90.0,
            reads: 100.0,
            caveats: vec!["Mind.".into()],
        };
        let said = text(&advice);
        for part in [
            "hob cluster move web --to b",
            "hob cache resize web 64M",
            "db: it moves",
            "90.0 % after",
            "Mind.",
        ] {
            assert!(said.contains(part), "{part}: {said}");
        }
        advice.moves.clear();
        assert!(text(&advice).contains("No move is worthwhile"));
    }
}
