//! The lab: what a cache does for a disk, tried out and drawn.
//!
//! Workloads are made here, driven through a real NBD connection, summed up and turned into pictures and reports. The
//! lab may read the clock, use threads and fail with `anyhow`; nothing but the binary and xtask depends on it.

pub mod advise;
pub mod belady;
mod clock;
pub mod driver;
pub mod figures;
pub mod generate;
pub mod latency;
mod markup;
pub mod mrc;
pub mod page;
pub mod picture;
pub mod prng;
pub mod replay;
pub mod scale;
pub mod sim;
pub mod summary;
pub mod trace;
pub mod workload;
