//! Sizing: estimates the miss ratios of other cache sizes from the accesses to a disk.
//!
//! [`Shards`] samples block accesses and estimates the LRU miss-ratio [`Curve`] in at most 1 MB, at
//! the cost of one hash for most accesses. [`Timeline`] counts the blocks used since a given use,
//! for sampled and exact curves. Sizes are in cache blocks. A [`Sampler`] tracks the sectors of its
//! blocks, while [`Shards`] treats each block as completely cached. Each disk has a [`Live`].

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
