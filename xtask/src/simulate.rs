//! `cargo xtask simulate`: many simulated histories of the engine, on all cores. See docs/SIMULATION.md.

use anyhow::Result;
use clap::{Args, ValueEnum};

use crate::shell;

#[derive(Debug, Args)]
pub(crate) struct Arguments {
    /// Histories to live
    #[arg(long, value_name = "N", default_value_t = 100_000)]
    seeds: u64,
    /// First seed
    #[arg(long, value_name = "S", default_value_t = 0)]
    from: u64,
    /// Stop after that long; 0: when all seeds are done
    #[arg(long, value_name = "M", default_value_t = 0)]
    minutes: u64,
    /// What histories contain
    #[arg(long, value_enum, default_value_t = Kind::Lives)]
    kind: Kind,
    /// Guest requests of one history
    #[arg(long, value_name = "R", default_value_t = 200)]
    requests: u32,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum Kind {
    /// Persistent caches and write-back, over crashes and restarts
    Lives,
    /// The same, with memory above every cache
    Memory,
    /// The same, with shares, limits and windows
    Qos,
    /// The same, with disks that get larger
    Growth,
    /// The same, with backings that change silently while no engine runs
    Silent,
    /// Lives without faults of devices
    Sound,
    /// The same, but flash devices fail flushes
    Flaky,
    /// Volatile caches, one life of the engine
    Single,
    /// Hosts that hand a disk over, across a bad network
    Hosts,
    /// Hosts that agree through etcd on who serves a disk
    Cluster,
}

/// Builds the simulation with optimisation and runs it.
pub(crate) fn run(arguments: &Arguments) -> Result<()> {
    let kind = match arguments.kind {
        Kind::Lives => "lives",
        Kind::Memory => "memory",
        Kind::Qos => "qos",
        Kind::Growth => "growth",
        Kind::Silent => "silent",
        Kind::Sound => "sound",
        Kind::Flaky => "flaky",
        Kind::Single => "single",
        Kind::Hosts => "hosts",
        Kind::Cluster => "cluster",
    };
    let numbers = [arguments.from, arguments.seeds, arguments.minutes, u64::from(arguments.requests)]
        .map(|n| n.to_string());
    let mut words =
        vec!["run", "--release", "--quiet", "-p", "hob-world", "--example", "simulate", "--", kind];
    words.extend(numbers.iter().map(String::as_str));
    shell::run(&mut shell::cargo(&words))
}
