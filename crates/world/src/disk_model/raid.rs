//! Which disk holds which bytes: array addresses to positions on disks, for each RAID level.

use super::{ArrayConfig, Level};

/// A run of bytes on one disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Chunk {
    /// Index of the disk; with mirrors, of the pair's first disk.
    pub(super) disk: usize,
    /// First byte on that disk.
    pub(super) position: u64,
    /// Bytes, never more than a stripe.
    pub(super) len: u64,
}

/// Cuts a range of the array at stripe borders.
pub(super) fn chunks(config: &ArrayConfig, offset: u64, len: u64) -> impl Iterator<Item = Chunk> + use<> {
    let (stripe, columns, level) = (config.stripe_bytes, config.data_chunks_per_row() as u64, config.level);
    let disks = config.disks as u64;
    let (mut at, end) = (offset, offset + len);
    std::iter::from_fn(move || {
        if at >= end {
            return None;
        }
        let (row, column, within) = (at / stripe / columns, at / stripe % columns, at % stripe);
        let len = (stripe - within).min(end - at);
        let disk = match level {
            Level::Raid0 => column,
            Level::Raid1 => column * 2,
            Level::Raid5 => column + u64::from(column >= parity_disk(row, disks)),
        };
        at += len;
        Some(Chunk { disk: disk as usize, position: row * stripe + within, len })
    })
}

/// The parity bytes that change with these chunks of one row: from the first byte touched in any chunk to the last.
pub(super) fn parity_of(config: &ArrayConfig, row_parts: &[Chunk]) -> Chunk {
    let first = row_parts.iter().map(|part| part.position).min().expect("a write has at least one chunk");
    let end = row_parts.iter().map(|part| part.position + part.len).max().unwrap_or(first);
    let row = first / config.stripe_bytes;
    Chunk { disk: parity_disk(row, config.disks as u64) as usize, position: first, len: end - first }
}

/// Parity walks from the last disk to the first, a disk a row.
fn parity_disk(row: u64, disks: u64) -> u64 {
    disks - 1 - row % disks
}
