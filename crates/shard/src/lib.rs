//! Shards: threads that serve the I/O of disks, each with its own I/O ring and cache engine.
//!
//! [`spawn`] starts a shard. [`api`] has the calls to a shard and the events from it.

pub mod api;
pub mod lease_clock;
pub mod request_recorder;
mod shard_loop;

pub use shard_loop::{ShardOptions, spawn};
