//! The lab: measures and draws the effect of caches on disks.
//!
//! Workloads are generated, sent through a real NBD connection, summarized, and turned into pictures and
//! reports. The lab may read the clock, use threads and fail with `anyhow`; only the binary and xtask
//! depend on it.

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
pub mod share;
pub mod sim;
pub mod summary;
pub mod trace;
pub mod workload;
