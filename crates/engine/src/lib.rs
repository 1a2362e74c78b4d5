//! The cache engine: makes every decision of the cache, and performs no I/O. It uses no clock,
//! random numbers or threads.
//!
//! [`Engine`] is a state machine: requests, completions, commands and timeouts go in through
//! `handle_*`; I/O, replies and events come out of `poll_*`. Its caller performs the I/O and
//! provides the time. The caller is the loop of a *shard* (one thread of the daemon with its
//! disks), a simulation, or the lab. Comments in this crate call the caller *the daemon*.
//!
//! Terms of this crate:
//! * A *sector* is 4 KiB of a disk: the unit of validity and checksums.
//! * A *block* is the unit in which a cache fills and evicts. A *frame* is the place of one block
//!   in a cache.
//! * A *segment* is the unit in which a pool allocates flash to caches.
//! * A *session* is one client's use of a disk, from connection to disconnection. In the module
//!   `migration`, a session is one attempt to hand a disk over.
//! * The *journal* of a persistent cache records its index in a ring of pages on flash (a *journal
//!   ring*).
//!
//! docs/GLOSSARY.md has all terms.

pub mod admission;
mod cache;
pub mod chooser;
pub mod cluster;
pub mod command;
mod device;
mod directory;
mod engine;
pub mod flash_budget;
pub mod flush_order;
pub mod gather;
pub mod granularity;
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
