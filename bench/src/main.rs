//! `cargo xtask bench` runs hob's benchmarks. Some of them compare hob with other programs. Each
//! benchmark is one file.

mod data_path;
mod databases;
mod fio;
mod lab;
mod peers;
mod policies;
mod qos;
mod rbd;
mod report;
mod scaling;
mod server;
mod small_writes;
mod traces;
mod vhost;

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, Result, bail};
use clap::{Parser, Subcommand};
use serde_json::Value;
use xtask::{packages, shell};

#[derive(Debug, Parser)]
#[command(name = "cargo xtask bench", about = "Measures hob and other programs", max_term_width = 100)]
struct Arguments {
    #[command(subcommand)]
    bench: Bench,
}

#[derive(Debug, Subcommand)]
enum Bench {
    /// Measure the data path when every read is a hit: hob, qemu-nbd, nbdkit and the bare file
    DataPath(data_path::Arguments),
    /// Measure PostgreSQL, RocksDB and files on a slow backing: without a cache, with two presets,
    /// and on local flash
    Databases(databases::Arguments),
    /// Measure the lab's simulation speed, and compare its miss ratios with libCacheSim
    Lab(lab::Arguments),
    /// Compare a cache of hob with Open CAS, dm-cache, bcache and dm-writecache on real traces: hits and
    /// flash writes
    Peers(peers::Arguments),
    /// Compare hob's caches with every policy, admission and block size on real traces
    Policies(policies::Arguments),
    /// Compare the rates of disks with shares, limits, reservations and throttling with their
    /// entitlements
    Qos(qos::Arguments),
    /// Compare a disk on Ceph RBD, with and without a cache, with librbd on a local cluster
    Rbd(rbd::Arguments),
    /// Measure how speed, CPU time, memory and recovery depend on the cache size, the number of
    /// disks and connections, dirty data and the block size
    Scaling(scaling::Arguments),
    /// Measure small and unaligned changes under write-back on a slow backing
    SmallWrites(small_writes::Arguments),
}

fn main() -> ExitCode {
    let result = match Arguments::parse().bench {
        Bench::DataPath(arguments) => data_path::run(&arguments),
        Bench::Databases(arguments) => databases::run(&arguments),
        Bench::Lab(arguments) => lab::run(&arguments),
        Bench::Peers(arguments) => peers::run(&arguments),
        Bench::Policies(arguments) => policies::run(&arguments),
        Bench::Qos(arguments) => qos::run(&arguments),
        Bench::Rbd(arguments) => rbd::run(&arguments),
        Bench::Scaling(arguments) => scaling::run(&arguments),
        Bench::SmallWrites(arguments) => small_writes::run(&arguments),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("bench: {error:#}");
            ExitCode::FAILURE
        }
    }
}

/// Returns the hob binary to measure: the named one, HOB_BIN, or a new release build.
fn hob(named: Option<&Path>) -> Result<PathBuf> {
    if let Some(path) = named.map(PathBuf::from).or_else(|| std::env::var_os("HOB_BIN").map(PathBuf::from)) {
        return path.canonicalize().with_context(|| format!("find {}", path.display()));
    }
    shell::run(&mut shell::cargo(&["build", "--release", "-p", "hob"]))?;
    Ok(shell::target_dir()?.join("release/hob"))
}

/// Fails if a program that a benchmark needs is missing.
fn require(programs: &[&str]) -> Result<()> {
    let missing: Vec<&str> = programs.iter().copied().filter(|name| !packages::present(name)).collect();
    if !missing.is_empty() {
        bail!("{} not installed; run `cargo xtask install`", missing.join(", "));
    }
    Ok(())
}

/// Writes all results of a benchmark to a JSON file, if one is named.
fn write_json(path: Option<&Path>, results: &Value) -> Result<()> {
    let Some(path) = path else { return Ok(()) };
    let text = serde_json::to_string_pretty(results)?;
    std::fs::write(path, text + "\n").with_context(|| format!("write {}", path.display()))?;
    println!("every figure: {}", path.display());
    Ok(())
}

fn median(values: impl Iterator<Item = f64>) -> Option<f64> {
    let mut values: Vec<f64> = values.collect();
    values.sort_by(f64::total_cmp);
    let middle = values.len() / 2;
    match values.len() {
        0 => None,
        n if n % 2 == 1 => Some(values[middle]),
        _ => Some((values[middle - 1] + values[middle]) / 2.0),
    }
}
