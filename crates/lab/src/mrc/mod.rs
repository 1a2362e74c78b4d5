//! Computes miss-ratio curves: the results of LRU caches of all sizes, from one pass over a trace.
//!
//! There are two levels of detail:
//!
//! * [`exact`] handles whole requests on sectors, as the engine does. A read is a hit if all its
//!   sectors are valid in the cache. A miss makes exactly the requested sectors valid. Writes
//!   follow a [`Mode`]. The result includes the traffic of flash and backing.
//! * [`shards`] handles accesses to blocks, which are cached as a whole (Olken, "Efficient methods
//!   for calculating the success function of fixed space replacement policies", 1981). It estimates
//!   the result from a sample of the blocks ([`hob_engine::sizing`]).
//!
//! All disks of a trace share one cache. Cache sizes are in blocks. Flushes have no effect. Memory
//! is proportional to the number of touched blocks. [`exact`] refuses a trace with more than
//! [`SECTORS_MAX`] sectors in its blocks.

mod curves;
mod requests;
mod stack;
mod steps;
#[cfg(test)]
mod tests;

use anyhow::{Result, ensure};
use hob_engine::sizing::Shards;
use hob_engine::units::{BLOCK_BYTES_MAX, BLOCK_BYTES_MIN};

pub use curves::{At, Curves, Totals};
pub use stack::SECTORS_MAX;

use hob_trace::{Op, Record};

/// Write mode: the effect of a write on the cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Mode {
    /// The write goes to the backing and the cache.
    WriteThrough,
    /// The write goes to the cache. The data goes to the backing when its block is evicted.
    WriteBack,
    /// The write goes to the backing, and cached data of its range becomes invalid.
    WriteAround,
}

/// Returns the miss-ratio curves of caches with blocks of `block_bytes` bytes.
///
/// # Errors
/// Returns an error if the block size is not a power of two from 4 KiB to 1 MiB, or if the trace
/// has too many sectors.
pub fn exact(records: impl IntoIterator<Item = Record>, block_bytes: u64, mode: Mode) -> Result<Curves> {
    let mut requests = requests::Requests::new(checked_shift(block_bytes)?, mode);
    for record in records {
        requests.add(&record)?;
    }
    Ok(requests.finish())
}

/// Passes the block accesses of a trace to `shards`, whose curve estimates the read miss ratio by
/// blocks. Each block of a read is one access. The access is a hit if the block is cached. `mode`
/// determines whether writes add blocks to the cache.
///
/// # Errors
/// Returns an error if the block size is not a power of two from 4 KiB to 1 MiB.
pub fn shards(
    records: impl IntoIterator<Item = Record>,
    block_bytes: u64,
    mode: Mode,
    mut shards: Shards,
) -> Result<Shards> {
    accesses(records, block_bytes, mode)?.for_each(|(block, weight)| shards.access(block, weight));
    Ok(shards)
}

/// Returns the block accesses of a trace. Reads have weight 1, and writes that enter the cache have
/// weight 0.
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

/// Base-2 logarithm of the sector size in bytes.
const SECTOR_SHIFT: u32 = 12;

/// Returns the base-2 logarithm of the number of sectors in a block.
fn checked_shift(block_bytes: u64) -> Result<u32> {
    ensure!(
        block_bytes.is_power_of_two() && (BLOCK_BYTES_MIN..=BLOCK_BYTES_MAX).contains(&block_bytes),
        "the block size {block_bytes} is invalid: it must be a power of two from 4096 to 1048576 bytes"
    );
    Ok(block_bytes.ilog2() - SECTOR_SHIFT)
}

/// Returns a key for a block of a disk. Block numbers have at most 52 bits. The function hashes the
/// disk number into all bits of the key, so that keys of different disks do not collide in real
/// traces.
fn key(disk: u16, block: u64) -> u64 {
    block ^ u64::from(disk).wrapping_mul(0x9e37_79b9_7f4a_7c15)
}
