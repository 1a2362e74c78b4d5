//! `cargo xtask bench databases` measures databases and file workloads on a slow backing, with and
//! without a cache.
//!
//! Each workload runs on four disks: hob without a cache, with preset `vfrc`, with preset `auto`,
//! and a file on the local flash without hob. The backing answers reads and writes after 4 ms; in a
//! second set, flushes take 50 ms. The data of the backing is in memory, because a backing on the
//! local flash would use a part of the flash's bandwidth. The disks of hob are files (FUSE); ext4 is
//! on a loop device with direct I/O. A control group limits the page cache to less than the data.
//! All disks of a set exist at the same time. Each round measures every workload on every disk, one
//! after the other, in a rotating order. Results are medians of the rounds. A first round warms the
//! caches and is not counted; it repeats workloads that only read until their rates no longer rise.

mod acceptance;
mod disk;
mod flushes;
mod table;
mod workload;

use std::ops::RangeInclusive;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use conformance::Delays;

use self::acceptance::{Acceptance, criteria};
use self::disk::{Disk, Way};
use self::table::{Measured, Table};
use self::workload::{Scale, WORKLOADS, Workload};
use super::data_path::scratch;
use crate::shell::{self, Interrupt};

const PROGRAMS: [&str; 8] =
    ["psql", "db_bench", "git", "tar", "mkfs.ext4", "losetup", "setpriv", "/usr/lib/postgresql/*"];

#[derive(Debug, clap::Args)]
pub(crate) struct Arguments {
    /// Write all results to this JSON file
    #[arg(long)]
    json: Option<PathBuf>,
    /// Draw a chart of each set into this directory
    #[arg(long, value_name = "DIRECTORY")]
    pictures: Option<PathBuf>,
    /// Run one short round on little data, to test the benchmark itself
    #[arg(long)]
    quick: bool,
    /// Use less data and a few seconds per result: about 15 minutes on an idle host
    #[arg(long, conflicts_with = "quick")]
    short: bool,
    /// Number of rounds that count
    #[arg(long, default_value_t = 3)]
    rounds: u32,
    /// Duration of each database run, seconds [default: 30, or 4 with --short]
    #[arg(long)]
    seconds: Option<u32>,
    /// Directory on local flash for disks and pools [default: the target directory]
    #[arg(long)]
    dir: Option<PathBuf>,
    /// Directory for the data of the backings, which needs up to three times the size of a disk
    #[arg(long, value_name = "DIRECTORY", default_value = "/dev/shm")]
    backing_dir: PathBuf,
    /// Measure only the workloads whose name contains this text
    #[arg(long, value_name = "TEXT")]
    only: Option<String>,
    /// hob binary to measure [default: HOB_BIN, or a new release build]
    #[arg(long)]
    hob: Option<PathBuf>,
}

/// A set of disks with the latencies of their backing.
struct Set {
    name: &'static str,
    file: &'static str,
    flush_ms: u64,
}

const SETS: [Set; 2] = [
    Set { name: "backing 4 ms", file: "databases-4ms.svg", flush_ms: 0 },
    Set { name: "backing 4 ms, flush 50 ms", file: "databases-flush-50ms.svg", flush_ms: 50 },
];

pub(crate) fn run(arguments: &Arguments) -> Result<()> {
    super::require(&PROGRAMS)?;
    if !rustix::process::geteuid().is_root() {
        bail!("this bench mounts file systems and limits memory; run it as root");
    }
    let hob = super::hob(arguments.hob.as_deref())?;
    let dir = arguments.dir.clone().map_or_else(shell::target_dir, Ok)?;
    let seconds = |usual| arguments.seconds.unwrap_or(usual).max(1);
    let scale = match arguments {
        Arguments { quick: true, .. } => Scale::quick(),
        Arguments { short: true, .. } => Scale::short(seconds(4)),
        _ => Scale::full(seconds(30)),
    };
    let rounds = if arguments.quick { 1 } else { arguments.rounds.max(1) };
    let workloads = chosen(arguments.only.as_deref())?;
    let interrupt = Interrupt::listen()?;
    let mut tables = Vec::new();
    for set in &SETS {
        let (scratch, backings) = (scratch(&dir)?, scratch(&arguments.backing_dir)?);
        // The database's user must have access to the mount points.
        shell::run(std::process::Command::new("chmod").arg("0711").arg(scratch.path()))?;
        let ms = Duration::from_millis;
        let delays = Delays { read: ms(4), write: ms(4), flush: ms(set.flush_ms) };
        println!("{}", set.name);
        let mut disks = Vec::new();
        for way in Way::ALL {
            interrupt.check()?;
            let dir = scratch.path().join(way.key());
            let backing = backings.path().join(way.key());
            disks.push(Disk::new(way, &hob, &dir, &backing, delays, &scale)?);
        }
        // A short run has no warm-up round.
        let first = u32::from(arguments.quick);
        let table = measure(set, &mut disks, &workloads, &scale, first..=rounds, &interrupt)?;
        println!("\n{table}");
        if let Some(pictures) = &arguments.pictures {
            let file = pictures.join(set.file);
            std::fs::write(&file, table.picture()).with_context(|| format!("write {}", file.display()))?;
            println!("picture: {}", file.display());
        }
        tables.push(table);
    }
    let [usual, slow_flush] = &tables[..] else { bail!("there is a table for each set") };
    let criteria = criteria(usual, slow_flush);
    println!("{}", Acceptance(&criteria));
    let sets: Vec<_> = tables.iter().map(Table::json).collect();
    let all = serde_json::json!({"sets": sets, "acceptance": Acceptance(&criteria).json()});
    super::write_json(arguments.json.as_deref(), &all)
}

/// Returns the workloads whose name contains `text`, or all of them. A workload may need the files of
/// the one before it: `git` needs the unpacked tree, and `readrandom` the keys of `fillrandom`.
fn chosen(text: Option<&str>) -> Result<Vec<&'static Workload>> {
    let is_chosen = |workload: &&Workload| text.is_none_or(|text| workload.name.contains(text));
    let chosen: Vec<_> = WORKLOADS.iter().filter(is_chosen).collect();
    if chosen.is_empty() {
        let names: Vec<_> = WORKLOADS.iter().map(|workload| workload.name).collect();
        bail!("no workload has this text in its name; the workloads are: {}", names.join("; "));
    }
    Ok(chosen)
}

/// Measures all rounds. Round 0 warms the caches and is not counted.
fn measure(
    set: &Set,
    disks: &mut [Disk],
    workloads: &[&Workload],
    scale: &Scale,
    rounds: RangeInclusive<u32>,
    interrupt: &Interrupt,
) -> Result<Table> {
    let (mut runs, counted) = (Vec::new(), *rounds.end());
    for round in rounds {
        for workload in workloads {
            for turn in 0..disks.len() {
                interrupt.check()?;
                let at = (turn + round as usize) % disks.len();
                let disk = &mut disks[at];
                let run =
                    if round == 0 { workload.warm_up(disk, scale) } else { (workload.run)(disk, scale) };
                let rate = run.with_context(|| format!("{} on {}", workload.name, disk.way.name()))?;
                let note = if round == 0 { "warm-up" } else { "" };
                println!(
                    "{:<28} {:<14} {rate:>10.1} {} {note}",
                    workload.name,
                    disk.way.name(),
                    workload.unit
                );
                if round > 0 {
                    runs.push(Measured { workload: workload.name, way: disk.way, rate });
                }
            }
        }
    }
    Ok(Table { set: set.name, rounds: counted, runs })
}
