//! Sizing: what a cache of another size would have done, learnt from the accesses of the one that runs.
//!
//! [`Shards`] watches block accesses and estimates the LRU miss-ratio [`Curve`] in at most 1 MB, at the price of one
//! hash for most accesses; [`Timeline`] is the order-statistic structure under it, and under exact curves. Sizes are
//! cache blocks. A [`Sampler`] knows the sectors of its blocks; to [`Shards`] a block counts as cached whole. [`Live`] is what each
//! disk has.

mod buckets;
mod curve;
mod live;
mod samples;
mod shards;
#[cfg(test)]
mod tests;
mod timeline;

pub use curve::{Curve, CurveError, CurvePoint};
pub use live::{BLOCK_SIZES, BlockSizing, Live, Recent, SAMPLES as LIVE_SAMPLES, Seen, Sizing, WINDOW_READS};
pub use shards::{SAMPLES_MAX, Sampler, Shards};
pub use timeline::Timeline;
