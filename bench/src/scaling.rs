//! `cargo xtask bench scaling` measures how hob's speed, CPU time, memory and recovery depend on
//! the size of the cache, the number of disks and connections, the dirty data and the block size.
//!
//! Each row starts a new daemon with a generated hob.toml in a scratch directory. Backings are
//! sparse files, and only the part of a cache that the load uses is filled. The load comes from
//! fio's NBD engine. IOPS and CPU time are medians of the rounds.

mod flash;
mod host;
mod layouts;
mod parts;
mod table;

use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use clap::ValueEnum;
use serde_json::json;

use self::table::Table;
use crate::shell::{self, Interrupt};

const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;
const TIB: u64 = 1 << 40;

#[derive(Debug, clap::Args)]
pub(crate) struct Arguments {
    /// Write all results to this JSON file
    #[arg(long)]
    json: Option<PathBuf>,
    /// Draw the charts of each part into this directory
    #[arg(long, value_name = "DIRECTORY")]
    plots: Option<PathBuf>,
    /// Measure few small sizes for fractions of a second, to test the benchmark itself
    #[arg(long)]
    quick: bool,
    /// Number of rounds of each load
    #[arg(long, default_value_t = 3)]
    rounds: u32,
    /// Duration of each round, seconds
    #[arg(long, default_value_t = 4)]
    seconds: u32,
    /// Directory on a disk for backings and pools [default: the target directory]
    #[arg(long)]
    dir: Option<PathBuf>,
    /// hob binary to measure [default: HOB_BIN, or a new release build]
    #[arg(long)]
    hob: Option<PathBuf>,
    /// Run only these parts of the benchmark
    #[arg(long, value_enum, value_delimiter = ',')]
    only: Vec<Which>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Which {
    /// Caches of 1 GiB to 1 TiB: hits, memory and restarts
    CacheSize,
    /// 1 to 1,000 disks that share a pool: hits, memory, idle CPU time and metrics
    Disks,
    /// 1 to 64 connections with the same total queue depth
    Connections,
    /// Write-back with dirty data in 0 to 75 % of the cache
    DirtyFraction,
    /// Cache blocks of 4 KiB to 256 KiB
    BlockSize,
}

impl Which {
    fn measure(self, bench: &Bench) -> Result<Table> {
        match self {
            Which::CacheSize => parts::cache_size(bench),
            Which::Disks => parts::disks(bench),
            Which::Connections => parts::connections(bench),
            Which::DirtyFraction => parts::dirty_fraction(bench),
            Which::BlockSize => parts::block_size(bench),
        }
    }
}

/// Sizes and durations of the measurements.
#[derive(Debug)]
struct Scale {
    rounds: u32,
    /// Duration of a round.
    time: Duration,
    /// Duration of the measurement of idle CPU time.
    idle: Duration,
    /// Pause before the first measurement of new, idle disks.
    settle: Duration,
    /// Pause between two passes that fill caches which share a pool.
    share_pause: Duration,
    /// Maximum number of passes that fill a cache.
    warm_passes_max: u32,
    /// Data that the load uses, bytes.
    working_set: u64,
    /// Dirty data at a restart, bytes.
    dirty: u64,
    /// Cache of the parts that do not vary its size, bytes.
    cache: u64,
    caches: &'static [u64],
    disks: &'static [u32],
    connections: &'static [u32],
    /// Dirty data, percent of the cache.
    dirty_percents: &'static [u64],
    blocks: &'static [u64],
}

impl Scale {
    fn full(rounds: u32, seconds: u32) -> Self {
        Self {
            rounds: rounds.max(1),
            time: Duration::from_secs(u64::from(seconds.max(1))),
            idle: Duration::from_secs(5),
            settle: Duration::from_secs(5),
            share_pause: Duration::from_secs(3),
            warm_passes_max: 16,
            working_set: 512 * MIB,
            dirty: 64 * MIB,
            cache: GIB,
            caches: &[GIB, 4 * GIB, 16 * GIB, 64 * GIB, 256 * GIB, TIB],
            disks: &[1, 10, 100, 1000],
            connections: &[1, 4, 16, 64],
            dirty_percents: &[0, 25, 50, 75],
            blocks: &[4 * KIB, 16 * KIB, 64 * KIB, 256 * KIB],
        }
    }

    fn quick() -> Self {
        Self {
            rounds: 1,
            time: Duration::from_millis(300),
            idle: Duration::from_millis(300),
            settle: Duration::from_millis(200),
            share_pause: Duration::ZERO,
            warm_passes_max: 1,
            working_set: 16 * MIB,
            dirty: 2 * MIB,
            cache: 64 * MIB,
            caches: &[64 * MIB, 128 * MIB],
            disks: &[1, 10],
            connections: &[1, 4],
            dirty_percents: &[0, 50],
            blocks: &[4 * KIB, 64 * KIB],
        }
    }
}

/// Parameters of all parts.
struct Bench {
    hob: PathBuf,
    dir: PathBuf,
    scale: Scale,
    interrupt: Interrupt,
}

impl Bench {
    /// Waits, unless Ctrl-C interrupts the benchmark.
    fn pause(&self, time: Duration) -> Result<()> {
        let begun = Instant::now();
        while begun.elapsed() < time {
            self.interrupt.check()?;
            thread::sleep(Duration::from_millis(20));
        }
        Ok(())
    }
}

pub(crate) fn run(arguments: &Arguments) -> Result<()> {
    super::require(&["fio", "setpriv"])?;
    let bench = Bench {
        hob: super::hob(arguments.hob.as_deref())?,
        dir: arguments.dir.clone().map_or_else(shell::target_dir, Ok)?,
        scale: match arguments.quick {
            true => Scale::quick(),
            false => Scale::full(arguments.rounds, arguments.seconds),
        },
        interrupt: Interrupt::listen()?,
    };
    let wanted = |which: &Which| arguments.only.is_empty() || arguments.only.contains(which);
    let mut tables = Vec::new();
    for which in Which::value_variants().iter().copied().filter(wanted) {
        let table = which.measure(&bench);
        // Ctrl-C also ends hob and fio, whose errors are not the cause.
        bench.interrupt.check()?;
        let table = table?;
        println!("\n{table}");
        if let Some(plots) = &arguments.plots {
            draw(&table, plots)?;
        }
        tables.push(table.json());
    }
    let cpus = std::thread::available_parallelism().map_or(0, std::num::NonZero::get);
    let kernel = std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
    let all = json!({ "bench": "scaling", "quick": arguments.quick, "rounds": bench.scale.rounds,
        "seconds": bench.scale.time.as_secs_f64(), "cpus": cpus, "kernel": kernel.trim(), "parts": tables });
    super::write_json(arguments.json.as_deref(), &all)
}

/// Writes the charts of a part to files in `directory`.
fn draw(table: &Table, directory: &Path) -> Result<()> {
    std::fs::create_dir_all(directory).with_context(|| format!("create {}", directory.display()))?;
    for (name, chart) in table.charts() {
        let file = directory.join(name);
        std::fs::write(&file, chart).with_context(|| format!("write {}", file.display()))?;
        println!("chart: {}", file.display());
    }
    Ok(())
}
