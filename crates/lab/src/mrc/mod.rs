//! Miss-ratio curves: what an LRU cache of any size would have done with a trace, from one pass over it.
//!
//! Three depths, for caches of one block size:
//!
//! * [`exact`]: whole requests against sectors, as the engine serves them. A read hits when all its sectors are valid;
//!   a miss makes the requested sectors valid and no others; writes follow a [`Mode`]. Also what goes to and from
//!   flash and the backing.
//! * [`exact_blocks`]: block accesses only, each block cached whole (Olken, "Efficient methods for calculating the
//!   success function of fixed space replacement policies", 1981). What [`shards`] estimates.
//! * [`shards`]: the estimate from a sample of the blocks ([`hob_engine::sizing`]).
//!
//! All disks of a trace share one cache. Sizes are cache blocks. Flushes do nothing. Memory is in proportion to the
//! blocks touched; a trace with more than [`SECTORS_MAX`] sectors in its blocks is refused by the exact ones.

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

/// What a write does to the cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Mode {
    /// It goes to the backing and into the cache.
    WriteThrough,
    /// It goes into the cache, and to the backing when its block leaves.
    WriteBack,
    /// It goes to the backing; what the cache holds of it becomes invalid.
    WriteAround,
}

/// The curves of caches with blocks of `block_bytes`.
///
/// # Errors
/// A block size that is no power of two from 4 KiB to 1 MiB; a trace of too many sectors.
pub fn exact(records: impl IntoIterator<Item = Record>, block_bytes: u64, mode: Mode) -> Result<Curves> {
    let mut requests = requests::Requests::new(checked_shift(block_bytes)?, mode);
    for record in records {
        requests.add(&record)?;
    }
    Ok(requests.finish())
}

/// The read miss ratio by blocks: each block of a read is an access, and hits when the block is cached. Blocks come
/// into the cache as `mode` says.
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

/// The LRU miss-ratio curve of accesses: blocks, and what each access weighs.
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

/// Shows `shards` the accesses that [`exact_blocks`] counts. Its curve estimates that one.
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

/// The block accesses of a trace: reads weigh 1; writes that come into the cache weigh nothing.
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

/// One number for a block of one of the trace's disks. Block numbers have at most 52 bits; the disk scatters the upper
/// ones, and the lower ones as well, so that no two disks of a real trace meet.
fn key(disk: u16, block: u64) -> u64 {
    block ^ u64::from(disk).wrapping_mul(0x9e37_79b9_7f4a_7c15)
}
