//! Checksums: one CRC-32C (Castagnoli) per sector of 4 KiB.

use hob_engine::units::SECTOR_BYTES;

/// Replaces the contents of `sums` with the checksums of the sectors of `bytes`, whose length is a
/// multiple of the sector size. Allocates only until `sums` is as long as it ever gets.
pub fn sector_sums(bytes: &[u8], sums: &mut Vec<u32>) {
    assert!(bytes.len().is_multiple_of(SECTOR_BYTES as usize), "whole sectors only");
    sums.clear();
    sums.extend(bytes.chunks_exact(SECTOR_BYTES as usize).map(crc32c::crc32c));
}
