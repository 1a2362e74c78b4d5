//! The cache engine: makes every decision of the cache. It uses no I/O, clock, random numbers or threads.
//!
//! [`Engine`] is a state machine: requests, completions, commands and timeouts go in through `handle_*`;
//! I/O, replies and events come out of `poll_*`. Its caller performs the I/O and provides the time.
//! The caller is the daemon's shard loop, a simulation, or the lab. Comments in this crate call it
//! *the daemon*.

pub mod admission;
mod cache;
pub mod chooser;
pub mod cluster;
pub mod command;
mod device;
mod directory;
mod engine;
pub mod gather;
pub mod granules;
pub mod histogram;
mod index;
pub mod io;
pub mod journal;
mod memory;
pub mod migration;
pub mod outcome;
pub mod partition;
pub mod placement;
pub mod policy;
pub mod preset;
pub mod qos;
mod range_locks;
pub mod regions;
pub mod shares;
mod simulate;
pub mod sizing;
mod slab;
pub mod stats;
pub mod units;
pub mod vscsi;

pub use engine::{DISKS_MAX, Engine, Limits, REQUEST_BYTES_MAX};
pub use simulate::{CacheSim, SimConfig, SimStats, Unworkable};
