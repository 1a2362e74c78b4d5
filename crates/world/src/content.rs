//! What devices and buffers hold: a tag for each unit of 512 bytes, in place of the bytes.
//!
//! A tag names the change that wrote it and the unit it was written for, so stale, misplaced and
//! invented data are told apart. Zeroed units hold [`ZERO`].

use crate::dice::scatter;

/// Bytes in a unit, the smallest thing that is written whole.
pub const UNIT_BYTES: u64 = 512;

/// Units in a sector.
pub const SECTOR_UNITS: usize = (hob_engine::units::SECTOR_BYTES / UNIT_BYTES) as usize;

/// The content of one unit.
pub type Tag = u64;

/// What a zeroed unit holds.
pub const ZERO: Tag = 0;

/// What a change (`serial`, 1 and up) writes to a unit of a disk.
pub fn tag(serial: u32, disk: u8, unit: u32) -> Tag {
    assert!(serial > 0 && unit < 1 << 24);
    u64::from(serial) << 32 | u64::from(disk) << 24 | u64::from(unit)
}

/// The change that wrote this tag, if it was written for that unit of that disk.
pub fn serial(tag: Tag, disk: u8, unit: u32) -> Option<u32> {
    (tag as u32 == u32::from(disk) << 24 | unit && tag != ZERO).then_some((tag >> 32) as u32)
}

/// Something that nobody wrote.
pub fn garbage(seed: u64) -> Tag {
    scatter(seed) | 1 << 63
}

/// What storage would compute as CRC-32C of these bytes: one checksum for each sector.
pub fn sums(tags: &[Tag]) -> Vec<u32> {
    tags.chunks(SECTOR_UNITS)
        .map(|sector| sector.iter().fold(17, |sum, tag| scatter(sum ^ tag.wrapping_mul(0x9e37_79b9))) as u32)
        .collect()
}
