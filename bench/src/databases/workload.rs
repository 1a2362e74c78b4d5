//! Workloads of the database benchmark. The result of each workload is a rate, where higher is
//! better, or a latency.

use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};

use super::disk::Disk;
use super::flushes;
use crate::shell;
use Better::{Less, More};

/// Amount of data and duration of the workloads.
pub(crate) struct Scale {
    pub(crate) disk_bytes: u64,
    pub(crate) cache_bytes: u64,
    /// Memory limit of the processes and their page cache, bytes.
    pub(crate) memory_bytes: u64,
    /// Scale factor of pgbench; each unit has about 15 MB.
    pub(crate) pgbench_scale: u32,
    /// Number of RocksDB keys, with values of 400 bytes.
    rocksdb_keys: u32,
    /// Number of copies of the source tree that are unpacked one after the other.
    copies: u32,
    pub(super) seconds: u32,
}

const MIB: u64 = 1 << 20;

impl Scale {
    pub(crate) fn quick() -> Self {
        Self {
            disk_bytes: 1024 * MIB,
            cache_bytes: 512 * MIB,
            memory_bytes: 80 * MIB,
            pgbench_scale: 8,
            rocksdb_keys: 20_000,
            copies: 1,
            seconds: 2,
        }
    }

    /// Returns a smaller scale than [`full`](Self::full), with a few seconds per result. The data
    /// is still larger than the page cache.
    pub(crate) fn short(seconds: u32) -> Self {
        Self {
            disk_bytes: 3072 * MIB,
            cache_bytes: 1536 * MIB,
            memory_bytes: 128 * MIB,
            pgbench_scale: 20,
            rocksdb_keys: 150_000,
            copies: 1,
            seconds,
        }
    }

    pub(crate) fn full(seconds: u32) -> Self {
        Self {
            disk_bytes: 8192 * MIB,
            cache_bytes: 4096 * MIB,
            memory_bytes: 256 * MIB,
            pgbench_scale: 80,
            rocksdb_keys: 1_000_000,
            copies: 5,
            seconds,
        }
    }
}

/// Kind of a result: the higher or the lower value is better.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Better {
    More,
    Less,
}

/// Maximum number of warm-up runs of a workload on a disk.
const WARM_UPS_MAX: u32 = 20;

/// Increase of the rate up to which a warm-up run counts as equal to the best one before.
const STEADY: f64 = 1.05;

/// A workload of the benchmark.
pub(crate) struct Workload {
    pub(crate) name: &'static str,
    pub(crate) unit: &'static str,
    pub(crate) better: Better,
    /// True if the workload only reads. Its first runs load the cache.
    pub(crate) reads_only: bool,
    pub(crate) run: fn(&mut Disk, &Scale) -> Result<f64>,
}

impl Workload {
    /// Runs the workload on a disk whose cache may be empty. Repeats a workload that only reads until
    /// its rate no longer rises, because its results are those of a steady state. Returns the last
    /// rate.
    pub(crate) fn warm_up(&self, disk: &mut Disk, scale: &Scale) -> Result<f64> {
        let mut last = (self.run)(disk, scale)?;
        let (mut best, mut steady_runs) = (last, 0);
        for _ in 1..WARM_UPS_MAX {
            if !self.reads_only || steady_runs == 2 {
                break;
            }
            last = (self.run)(disk, scale)?;
            steady_runs = if last > best * STEADY { 0 } else { steady_runs + 1 };
            best = best.max(last);
        }
        Ok(last)
    }
}

pub(crate) const SELECT_ONLY: &str = "PostgreSQL, select-only";
pub(crate) const TPC_B: &str = "PostgreSQL, TPC-B";
pub(crate) const FILL_RANDOM: &str = "RocksDB, fillrandom";
pub(crate) const UNPACK: &str = "unpack a source tree, sync";
pub(crate) const FLUSHES: &str = "flush beside writes, p99";

pub(crate) const WORKLOADS: [Workload; 7] = [
    Workload { reads_only: true, ..rate(SELECT_ONLY, "transactions/s", select_only) },
    rate(TPC_B, "transactions/s", tpc_b),
    Workload { better: Less, ..rate(FLUSHES, "µs", flushes::p99) },
    rate(FILL_RANDOM, "operations/s", fill_random),
    Workload { reads_only: true, ..rate("RocksDB, readrandom", "operations/s", read_random) },
    rate(UNPACK, "files/s", unpack),
    rate("git add and commit, sync", "files/s", git),
];

const fn rate(name: &'static str, unit: &'static str, run: fn(&mut Disk, &Scale) -> Result<f64>) -> Workload {
    Workload { name, unit, better: More, reads_only: false, run }
}

fn select_only(disk: &mut Disk, scale: &Scale) -> Result<f64> {
    pgbench(disk, scale, &["--select-only"])
}

fn tpc_b(disk: &mut Disk, scale: &Scale) -> Result<f64> {
    pgbench(disk, scale, &[])
}

fn pgbench(disk: &mut Disk, scale: &Scale, more: &[&str]) -> Result<f64> {
    disk.forget_page_cache()?;
    let mut postgres = disk.postgres.take().context("a database")?;
    postgres.start();
    disk.group.take(postgres.pid())?;
    let client = postgres.client("pgbench").args(["--no-vacuum", "--client=8", "--jobs=2"]);
    let client = client.args(["--time", &scale.seconds.to_string()]).args(more).arg("postgres");
    let printed = client.limit(Duration::from_secs(u64::from(scale.seconds) + 120)).run();
    postgres.stop();
    disk.postgres = Some(postgres);
    number_after(&printed, "tps = ").with_context(|| format!("pgbench printed no rate: {printed}"))
}

fn fill_random(disk: &mut Disk, scale: &Scale) -> Result<f64> {
    let database = disk.path("rocksdb");
    let _ = std::fs::remove_dir_all(&database);
    disk.forget_page_cache()?;
    db_bench(disk, scale, "fillrandom", &[])
}

fn read_random(disk: &mut Disk, scale: &Scale) -> Result<f64> {
    disk.forget_page_cache()?;
    let seconds = format!("--duration={}", scale.seconds);
    db_bench(disk, scale, "readrandom", &["--use_existing_db=1", "--threads=4", &seconds])
}

fn db_bench(disk: &Disk, scale: &Scale, benchmark: &str, more: &[&str]) -> Result<f64> {
    let mut command = disk.group.command("db_bench");
    command.arg(format!("--benchmarks={benchmark}")).arg(format!("--db={}", disk.path("rocksdb").display()));
    command
        .arg(format!("--num={}", scale.rocksdb_keys))
        .args(["--value_size=400", "--compression_type=none"]);
    command.args(["--write_buffer_size=8388608", "--cache_size=8388608", "--bloom_bits=10"]);
    let printed = shell::output(command.args(more))?;
    let line = printed.lines().find(|line| line.starts_with(benchmark));
    let rate = line.and_then(|line| number_after(line, "micros/op "));
    rate.with_context(|| format!("db_bench printed no rate: {printed}"))
}

/// Returns hob's source tree as a tar file outside the measured disk.
fn sources() -> Result<tempfile::NamedTempFile> {
    let file = tempfile::NamedTempFile::new()?;
    let mut command = Command::new("tar");
    command.arg("-cf").arg(file.path()).arg("-C").arg(shell::root());
    shell::output(command.args(["crates", "conformance", "docs", "xtask", "dashboard/src"]))?;
    Ok(file)
}

fn unpack(disk: &mut Disk, scale: &Scale) -> Result<f64> {
    let (tree, tar) = (disk.path("tree"), sources()?);
    let _ = std::fs::remove_dir_all(&tree);
    disk.forget_page_cache()?;
    let start = Instant::now();
    for copy in 0..scale.copies {
        let to = tree.join(copy.to_string());
        std::fs::create_dir_all(&to)?;
        shell::output(Command::new("tar").arg("-xf").arg(tar.path()).arg("-C").arg(&to))?;
        sync(disk)?;
    }
    Ok(files(disk)? / start.elapsed().as_secs_f64())
}

/// Measures git on the source tree that an earlier workload unpacked.
fn git(disk: &mut Disk, _: &Scale) -> Result<f64> {
    let tree = disk.path("tree");
    let _ = std::fs::remove_dir_all(tree.join(".git"));
    disk.forget_page_cache()?;
    let start = Instant::now();
    let git = |args: &[&str]| {
        let mut command = disk.group.command("git");
        command.args(["-c", "user.name=bench", "-c", "user.email=bench@localhost"]);
        shell::output(command.args(["-c", "gc.auto=0", "-C"]).arg(&tree).args(args))
    };
    git(&["init", "--quiet"])?;
    git(&["add", "--all"])?;
    git(&["commit", "--quiet", "--message", "all"])?;
    git(&["status", "--short"])?;
    sync(disk)?;
    Ok(files(disk)? / start.elapsed().as_secs_f64())
}

fn sync(disk: &Disk) -> Result<()> {
    shell::output(Command::new("sync").arg("--file-system").arg(disk.path("tree"))).map(|_| ())
}

/// Returns the number of unpacked files.
fn files(disk: &Disk) -> Result<f64> {
    let mut find = Command::new("find");
    find.arg(disk.path("tree")).args(["-name", ".git", "-prune", "-o", "-type", "f", "-print"]);
    Ok(shell::output(&mut find)?.lines().count() as f64)
}

/// Returns the number that follows `before` in a text.
fn number_after(text: &str, before: &str) -> Option<f64> {
    text.split_once(before)?.1.split_whitespace().next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_are_found_in_what_programs_print() {
        assert_eq!(number_after("latency = 3 ms\ntps = 958.25 (without …)", "tps = "), Some(958.25));
        let line = "fillrandom   :      40.629 micros/op 24612 ops/sec 1.2 seconds 30000 operations;";
        assert_eq!(number_after(line, "micros/op "), Some(24612.0));
        assert_eq!(number_after("tps = none", "tps = "), None);
    }
}
