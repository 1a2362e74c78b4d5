//! The lab measures and draws the effect of caches on disks.
//!
//! The lab generates workloads, sends them through a real NBD connection, summarizes the results,
//! and draws pictures and reports. The lab may read the clock, use threads and return `anyhow`
//! errors. Only the hob binary and xtask depend on the lab.

pub mod advise;
pub mod belady;
mod clock;
pub mod driver;
pub mod figures;
pub mod generate;
mod jobs;
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
pub mod workload;
