//! `cargo xtask simulate` runs many simulated histories of the engine on all cores. See
//! docs/SIMULATION.md.

use anyhow::Result;
use clap::{Args, ValueEnum};

use crate::shell;

#[derive(Debug, Args)]
pub(crate) struct Arguments {
    /// Number of histories
    #[arg(long, value_name = "N", default_value_t = 100_000)]
    seeds: u64,
    /// First seed
    #[arg(long, value_name = "S", default_value_t = 0)]
    from: u64,
    /// Stop after this time; 0 means after all seeds
    #[arg(long, value_name = "M", default_value_t = 0)]
    minutes: u64,
    /// Kind of histories
    #[arg(long, value_enum, default_value_t = Kind::Lives)]
    kind: Kind,
    /// Number of guest requests per history
    #[arg(long, value_name = "R", default_value_t = 200)]
    requests: u32,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum Kind {
    /// Persistent caches and write-back, with crashes and restarts
    Lives,
    /// Persistent caches with restarts and memory tiers
    Memory,
    /// Persistent caches with restarts, shares, limits and throttles
    Qos,
    /// Persistent caches with restarts and growing disks
    Growth,
    /// Persistent caches with restarts and backings that change silently while no engine runs
    Silent,
    /// Persistent caches with restarts, where misses also bring data into the cache that no guest requested
    Fill,
    /// Persistent caches with restarts and without device faults
    Sound,
    /// Persistent caches with restarts, where the only device faults are failed flushes of flash
    Flaky,
    /// Persistent caches with restarts, where journals lose one of two copies and another device fails
    /// later
    Copies,
    /// Volatile caches without restarts
    Single,
    /// Hosts that migrate a disk over an unreliable network
    Hosts,
    /// Hosts of a cluster that decide through etcd which host serves a disk
    Cluster,
    /// All kinds, one after the other, with the same number of histories each
    All,
}

/// Builds an optimized simulation and runs it.
pub(crate) fn run(arguments: &Arguments) -> Result<()> {
    if !matches!(arguments.kind, Kind::All) {
        return run_kind(arguments, arguments.kind, arguments.seeds);
    }
    let kinds = Kind::value_variants().iter().filter(|kind| !matches!(kind, Kind::All));
    let each = arguments.seeds.div_ceil(kinds.clone().count() as u64);
    for kind in kinds {
        println!("{}:", name(*kind));
        run_kind(arguments, *kind, each)?;
    }
    Ok(())
}

fn run_kind(arguments: &Arguments, kind: Kind, seeds: u64) -> Result<()> {
    let numbers =
        [arguments.from, seeds, arguments.minutes, u64::from(arguments.requests)].map(|n| n.to_string());
    let kind = name(kind);
    let mut words =
        vec!["run", "--release", "--quiet", "-p", "hob-world", "--example", "simulate", "--", &kind];
    words.extend(numbers.iter().map(String::as_str));
    shell::run(&mut shell::cargo(&words))
}

fn name(kind: Kind) -> String {
    kind.to_possible_value().expect("no kind is skipped").get_name().to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The simulation prints its kinds of histories in the command that replays a seed.
    #[test]
    fn every_kind_of_the_simulation_is_known() {
        let program = include_str!("../../crates/world/examples/simulate.rs");
        let (_, usage) = program.split_once("usage: simulate ").unwrap();
        let mut printed: Vec<&str> = usage.split(' ').next().unwrap().split('|').collect();
        let kinds = Kind::value_variants().iter().filter(|kind| !matches!(kind, Kind::All));
        let mut known: Vec<String> = kinds.map(|kind| name(*kind)).collect();
        printed.sort_unstable();
        known.sort_unstable();
        assert_eq!(printed, known);
    }
}
