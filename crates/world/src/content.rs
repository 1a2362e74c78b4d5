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
    assert!(serial > 0 && serial < 1 << 30 && unit < 1 << 24);
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

/// Is it something that nobody wrote?
pub fn is_garbage(tag: Tag) -> bool {
    tag >> 63 == 1
}

/// Contents that were given as bytes: the pages of journals. Each unit of them has a tag.
#[derive(Debug, Default)]
pub struct Written {
    units: Vec<Box<[u8]>>,
}

/// Tags of units that were given as bytes have this bit; no other tag but garbage may.
const AS_BYTES: Tag = 1 << 62;

impl Written {
    /// Tags for these bytes, whole units.
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

    /// What units with these tags would read as: what is not known here is any bytes, always the same.
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

/// What storage would compute as CRC-32C of these bytes: one checksum for each sector.
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
