//! Contents that test guests write: 512 bytes that identify disk, unit and version. A *unit* is 512
//! bytes of a disk. The *version* is the number of the write to this unit, from 1 on.
//!
//! Every word of a unit depends on the disk, the unit number, the version and the run. The test
//! thus recognizes torn, misplaced, stale and foreign contents.

/// Size of a unit in bytes: the smallest atomic write of a disk.
pub const UNIT: usize = 512;

/// Magic number: the letters "hob tort".
const MAGIC: u64 = 0x7472_6f74_2062_6f68;

/// Identifies the disk and the run that wrote a unit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Origin {
    /// Number of the run or round. Contents of other runs are foreign.
    pub run: u64,
    /// Number of the disk.
    pub disk: u64,
}

/// Content that a test guest found in a unit of 512 bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Found {
    /// Only zeroes.
    Zeroes,
    /// The content that a guest wrote to a unit, perhaps to another unit or disk.
    Stamp {
        /// Number of the disk to which the content was written.
        disk: u64,
        /// Number of the unit to which the content was written.
        unit: u64,
        /// Number of the write to that unit, from 1 on.
        version: u32,
    },
    /// Image header that guests write to raw disks.
    Header,
    /// Content that no guest of this run wrote, with its first bytes.
    Garbage([u8; 16]),
}

/// Returns the 512 bytes that write number `version` of unit `unit` leaves there.
#[must_use]
pub fn stamp(origin: Origin, unit: u64, version: u32) -> [u8; UNIT] {
    let mut bytes = [0; UNIT];
    let head = [origin.run ^ MAGIC, origin.disk, unit, u64::from(version)];
    let base = scatter(origin.run ^ origin.disk << 56 ^ unit << 32 ^ u64::from(version));
    for (at, word) in bytes.chunks_exact_mut(8).enumerate() {
        let value = head.get(at).copied().unwrap_or_else(|| scatter(base.wrapping_add(at as u64)));
        word.copy_from_slice(&value.to_le_bytes());
    }
    bytes
}

/// Identifies these 512 bytes: the guest write of run `run` that wrote them, or other content.
#[must_use]
pub fn identify(run: u64, bytes: &[u8]) -> Found {
    if bytes.iter().all(|byte| *byte == 0) {
        return Found::Zeroes;
    }
    let word = |at: usize| u64::from_le_bytes(bytes[at * 8..][..8].try_into().expect("eight bytes"));
    let (disk, unit, version) = (word(1), word(2), word(3) as u32);
    if word(0) == run ^ MAGIC && bytes == stamp(Origin { run, disk }, unit, version) {
        return Found::Stamp { disk, unit, version };
    }
    if bytes == image_header() {
        return Found::Header;
    }
    Found::Garbage(bytes[..16].try_into().expect("sixteen bytes"))
}

/// Returns the header of a qcow2 image of 1 MiB, version 2, without a backing file. A guest may
/// write this header to a raw disk, and the disk must stay raw.
#[must_use]
pub fn image_header() -> [u8; UNIT] {
    let mut bytes = [0; UNIT];
    bytes[..4].copy_from_slice(b"QFI\xfb");
    bytes[4..8].copy_from_slice(&2_u32.to_be_bytes());
    bytes[20..24].copy_from_slice(&16_u32.to_be_bytes()); // 64 KiB clusters
    bytes[24..32].copy_from_slice(&(1_u64 << 20).to_be_bytes());
    bytes[36..40].copy_from_slice(&1_u32.to_be_bytes()); // entries of the L1 table
    bytes[40..48].copy_from_slice(&0x3_0000_u64.to_be_bytes());
    bytes[48..56].copy_from_slice(&0x1_0000_u64.to_be_bytes());
    bytes[56..60].copy_from_slice(&1_u32.to_be_bytes());
    bytes
}

/// Returns the SplitMix64 finalizer of a word (Steele, Lea and Flood, OOPSLA 2014).
fn scatter(mut word: u64) -> u64 {
    word = (word ^ (word >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    word = (word ^ (word >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    word ^ (word >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn units_are_identified() {
        let origin = Origin { run: 7, disk: 2 };
        let one = stamp(origin, 3, 9);
        assert_eq!(identify(7, &one), Found::Stamp { disk: 2, unit: 3, version: 9 });
        assert!(matches!(identify(8, &one), Found::Garbage(_)), "another run wrote it");
        assert_eq!(identify(7, &[0; UNIT]), Found::Zeroes);
        assert_eq!(identify(7, &image_header()), Found::Header);
        let mut torn = one;
        torn[256..].copy_from_slice(&stamp(origin, 3, 10)[256..]);
        assert!(matches!(identify(7, &torn), Found::Garbage(_)), "half of another version");
    }
}
