//! Maps array addresses to positions on disks, for each RAID level.

use super::{ArrayConfig, Level};

/// A contiguous range of bytes on one disk of the array.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Chunk {
    /// Index of the disk. In a mirrored array, index of the first disk of the pair.
    pub(super) disk: usize,
    /// First byte of the chunk on the disk.
    pub(super) position: u64,
    /// Length in bytes, at most the stripe chunk size.
    pub(super) len: u64,
}

/// Splits a range of array addresses at stripe chunk boundaries.
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

/// Returns the parity bytes that change if these chunks of one row are written.
pub(super) fn parity_of(config: &ArrayConfig, row_parts: &[Chunk]) -> Chunk {
    let first = row_parts.iter().map(|part| part.position).min().expect("a write has at least one chunk");
    let end = row_parts.iter().map(|part| part.position + part.len).max().unwrap_or(first);
    let row = first / config.stripe_bytes;
    Chunk { disk: parity_disk(row, config.disks as u64) as usize, position: first, len: end - first }
}

/// Returns the disk with the parity of a row. Parity rotates from the last disk to the first.
fn parity_disk(row: u64, disks: u64) -> u64 {
    disks - 1 - row % disks
}
