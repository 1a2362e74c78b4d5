//! Miss-ratio curves: the results of LRU caches of all sizes for a trace, from one pass over it.
//!
//! Three levels of detail, for caches of one block size:
//!
//! * [`exact`]: whole requests against sectors, as the engine serves them. A read hits if all its sectors are valid;
//!   a miss makes exactly the requested sectors valid; writes follow a [`Mode`]. Also the traffic of flash and backing.
//! * [`exact_blocks`]: only block accesses, with blocks cached as a whole (Olken, "Efficient methods for calculating the
//!   success function of fixed space replacement policies", 1981). [`shards`] estimates this result.
//! * [`shards`]: the estimate from a sample of the blocks ([`hob_engine::sizing`]).
//!
//! All disks of a trace share one cache. Sizes are cache blocks. Flushes have no effect. Memory is
//! proportional to the blocks touched; the exact functions refuse a trace with more than [`SECTORS_MAX`]
//! sectors in its blocks.

mod curves;
mod requests;
mod stack;
mod steps;
#[cfg(test)]
mod tests;

use anyhow::{Result, ensure};
use hob_engine::sizing::{Curve, Shards};
use hob_engine::units::{BLOCK_BYTES_MAX, BLOCK_BYTES_MIN};

pub use curves::{At, Curves, Totals};
pub use stack::SECTORS_MAX;

use crate::trace::{Op, Record};
use stack::Stack;
use steps::Steps;

/// Effect of a write on the cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Mode {
    /// Written to the backing and the cache.
    WriteThrough,
    /// Written to the cache, and to the backing when its block is evicted.
    WriteBack,
    /// Written to the backing; cached data of its range becomes invalid.
    WriteAround,
}

/// Returns the curves of caches with blocks of `block_bytes`.
///
/// # Errors
/// A block size that is no power of two from 4 KiB to 1 MiB; a trace with too many sectors.
pub fn exact(records: impl IntoIterator<Item = Record>, block_bytes: u64, mode: Mode) -> Result<Curves> {
    let mut requests = requests::Requests::new(checked_shift(block_bytes)?, mode);
    for record in records {
        requests.add(&record)?;
    }
    Ok(requests.finish())
}

/// Returns the read miss ratio by blocks: each block of a read is an access, and hits if the block is
/// cached. Blocks enter the cache as `mode` says.
///
/// # Errors
/// As for [`exact`].
pub fn exact_blocks(
    records: impl IntoIterator<Item = Record>,
    block_bytes: u64,
    mode: Mode,
) -> Result<Curve> {
    exact_accesses(accesses(records, block_bytes, mode)?)
}

/// Returns the LRU miss-ratio curve of accesses: blocks with their weights.
///
/// # Errors
/// More than [`SECTORS_MAX`] blocks.
pub fn exact_accesses(accesses: impl IntoIterator<Item = (u64, u32)>) -> Result<Curve> {
    let mut stack = Stack::new(0);
    let mut hits = Steps::default();
    let mut total = 0;
    for (block, weight) in accesses {
        let member = stack.enter(block)?;
        total += u64::from(weight);
        hits.add(stack.distance(member), i64::from(weight));
        stack.touch(member);
    }
    Ok(hits.finish().miss_curve(total))
}

/// Passes the accesses of [`exact_blocks`] to `shards`, whose curve is an estimate of that one.
///
/// # Errors
/// A block size that is no power of two from 4 KiB to 1 MiB.
pub fn shards(
    records: impl IntoIterator<Item = Record>,
    block_bytes: u64,
    mode: Mode,
    mut shards: Shards,
) -> Result<Shards> {
    accesses(records, block_bytes, mode)?.for_each(|(block, weight)| shards.access(block, weight));
    Ok(shards)
}

/// Returns the block accesses of a trace: reads have weight 1, writes that enter the cache weight 0.
fn accesses(
    records: impl IntoIterator<Item = Record>,
    block_bytes: u64,
    mode: Mode,
) -> Result<impl Iterator<Item = (u64, u32)>> {
    let shift = checked_shift(block_bytes)? + SECTOR_SHIFT;
    Ok(records.into_iter().flat_map(move |record| {
        let weight = match (record.op, mode) {
            (Op::Read, _) => Some(1),
            (Op::Write, Mode::WriteThrough | Mode::WriteBack) => Some(0),
            _ => None,
        };
        let first = record.offset >> shift;
        let end = match weight {
            Some(_) if record.len > 0 => {
                (record.offset.saturating_add(u64::from(record.len) - 1) >> shift) + 1
            }
            _ => first,
        };
        (first..end).map(move |block| (key(record.disk, block), weight.unwrap_or(0)))
    }))
}

/// log2 of a sector's bytes.
const SECTOR_SHIFT: u32 = 12;

/// log2 of the sectors in a block.
fn checked_shift(block_bytes: u64) -> Result<u32> {
    ensure!(
        block_bytes.is_power_of_two() && (BLOCK_BYTES_MIN..=BLOCK_BYTES_MAX).contains(&block_bytes),
        "a block of {block_bytes} bytes: block sizes are powers of two from 4096 to 1048576"
    );
    Ok(block_bytes.ilog2() - SECTOR_SHIFT)
}

/// Returns a number for a block of one of the trace's disks. Block numbers have at most 52 bits; the disk
/// number is hashed into the upper and the lower ones, so that disks of real traces do not collide.
fn key(disk: u16, block: u64) -> u64 {
    block ^ u64::from(disk).wrapping_mul(0x9e37_79b9_7f4a_7c15)
}
