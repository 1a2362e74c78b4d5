//! Simulated content of devices and buffers: one tag per unit of 512 bytes, instead of the bytes.
//!
//! A tag identifies the write that wrote the tag, and the target unit of that write. Checkers can
//! thus recognize stale, misplaced and invented data. Zeroed units have the tag [`ZERO`].

use crate::rng::scatter;

/// Size of a unit in bytes. A unit is the smallest part of a device that is written atomically.
pub const UNIT_BYTES: u64 = 512;

/// Number of units ([`UNIT_BYTES`]) per sector.
pub const SECTOR_UNITS: usize = (hob_engine::units::SECTOR_BYTES / UNIT_BYTES) as usize;

/// Simulated content of one unit: a number in place of the unit's 512 bytes.
pub type Tag = u64;

/// Tag of a zeroed unit.
pub const ZERO: Tag = 0;

/// Returns the tag that a change writes to a unit of a disk. `serial` is the number of the change,
/// from 1.
pub fn tag(serial: u32, disk: u8, unit: u32) -> Tag {
    assert!(serial > 0 && serial < 1 << 30 && unit < 1 << 24);
    u64::from(serial) << 32 | u64::from(disk) << 24 | u64::from(unit)
}

/// Returns the number of the change that wrote this tag, if the tag was written to this unit of
/// this disk.
pub fn serial(tag: Tag, disk: u8, unit: u32) -> Option<u32> {
    (tag as u32 == u32::from(disk) << 24 | unit && tag != ZERO).then_some((tag >> 32) as u32)
}

/// Returns a tag that no change writes.
pub fn garbage(seed: u64) -> Tag {
    scatter(seed) | 1 << 63
}

/// Returns true if no change can have written this tag.
pub fn is_garbage(tag: Tag) -> bool {
    tag >> 63 == 1
}

/// Content of journal pages. Unlike other content, journal pages are kept as bytes here. The
/// simulated device stores a tag for each unit of a page, which refers to the unit's bytes.
#[derive(Debug, Default)]
pub struct Written {
    units: Vec<Box<[u8]>>,
}

/// Bit in the tags of units that were written as bytes. Garbage tags may have this bit too.
const AS_BYTES: Tag = 1 << 62;

impl Written {
    /// Returns tags for these bytes. The length must be a multiple of the unit size.
    pub fn tags(&mut self, bytes: &[u8]) -> Vec<Tag> {
        assert!(bytes.len().is_multiple_of(UNIT_BYTES as usize));
        let mut tag = |unit: &[u8]| {
            if unit.iter().all(|byte| *byte == 0) {
                return ZERO;
            }
            self.units.push(unit.into());
            AS_BYTES | (self.units.len() as u64 - 1)
        };
        bytes.chunks(UNIT_BYTES as usize).map(&mut tag).collect()
    }

    /// Returns the bytes of units with these tags. Unknown tags give arbitrary but fixed bytes.
    pub fn bytes(&self, tags: &[Tag]) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(tags.len() * UNIT_BYTES as usize);
        for tag in tags {
            match tag {
                &ZERO => bytes.resize(bytes.len() + UNIT_BYTES as usize, 0),
                tag if tag >> 62 == 1 => bytes.extend(&self.units[(tag ^ AS_BYTES) as usize]),
                tag => {
                    let words = (0..UNIT_BYTES / 8).flat_map(|i| scatter(tag.wrapping_add(i)).to_le_bytes());
                    bytes.extend(words);
                }
            }
        }
        bytes
    }
}

/// Returns the modelled CRC-32C of each sector.
pub fn sums(tags: &[Tag]) -> Vec<u32> {
    tags.chunks(SECTOR_UNITS)
        .map(|sector| sector.iter().fold(17, |sum, tag| scatter(sum ^ tag.wrapping_mul(0x9e37_79b9))) as u32)
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_come_back_and_foreign_units_are_noise() {
        let mut written = Written::default();
        let page: Vec<u8> = (0..1024u32).flat_map(|n| (n % 512).to_le_bytes()).collect();
        let mut tags = written.tags(&page);
        assert_eq!(written.bytes(&tags), page);
        assert_eq!(written.tags(&[0; 512]), [ZERO]);
        tags[2] = tag(1, 0, 2);
        let torn = written.bytes(&tags);
        assert_eq!(torn, written.bytes(&tags));
        assert!(torn[..1024] == page[..1024] && torn[1024..1536] != page[1024..1536]);
        assert_ne!(written.bytes(&[garbage(1)]), written.bytes(&[garbage(2)]));
    }
}
