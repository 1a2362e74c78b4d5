//! Sizing: what a cache of another size would have done, learnt from the accesses of the one that runs.
//!
//! [`Shards`] watches block accesses and estimates the LRU miss-ratio [`Curve`] in at most 1 MB, at the price of one
//! hash for most accesses; [`Timeline`] is the order-statistic structure under it, and under exact curves. Sizes are
//! cache blocks. Nothing here knows sectors: a block counts as cached whole.

mod buckets;
mod curve;
mod samples;
mod shards;
#[cfg(test)]
mod tests;
mod timeline;

pub use curve::{Curve, CurvePoint};
pub use shards::{SAMPLES_MAX, Shards};
pub use timeline::Timeline;
