//! A compact list of a cache's content. Its pages are in order of heat, hottest first.
//!
//! A list is a sequence of *pages*. Inside a page, ranges are in the order of the disk, so that
//! they can be joined and the distances between them are short. A page has no length field, so the
//! sender transmits its length:
//!
//! | bytes | content |
//! |---|---|
//! | varint | number of ranges in the page, at most [`RANGES_MAX`] |
//! | two varints for each range | distance from the previous range; length, at least 1 |
//!
//! Distances and lengths are in sectors. The distance counts from the end of the previous range, or
//! from sector 0 for the first range. A varint is little-endian with seven bits per byte. The
//! highest bit is set in all bytes but the last. A varint has at most ten bytes.

/// Maximum number of ranges per page.
pub const RANGES_MAX: usize = 4096;

/// Error for a malformed page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Nonsense;

/// Encodes one page of sector ranges `first..end`, in any order. Overlapping and adjacent ranges
/// are joined. Panics if there are more than [`RANGES_MAX`] ranges.
pub fn encode(ranges: &[(u64, u64)]) -> Vec<u8> {
    assert!(ranges.len() <= RANGES_MAX);
    let mut sorted: Vec<(u64, u64)> = ranges.iter().copied().filter(|(first, end)| first < end).collect();
    sorted.sort_unstable();
    let mut joined: Vec<(u64, u64)> = Vec::new();
    for (first, end) in sorted {
        match joined.last_mut() {
            Some((_, last)) if first <= *last => *last = end.max(*last),
            _ => joined.push((first, end)),
        }
    }
    let mut bytes = Vec::with_capacity(4 * joined.len() + 2);
    put(&mut bytes, joined.len() as u64);
    let mut at = 0;
    for (first, end) in joined {
        put(&mut bytes, first - at);
        put(&mut bytes, end - first);
        at = end;
    }
    bytes
}

/// Decodes the ranges of a page, in the order of the disk, for a disk of `disk_sectors` sectors.
pub fn decode(mut bytes: &[u8], disk_sectors: u64) -> Result<Vec<(u64, u64)>, Nonsense> {
    let count = take(&mut bytes)?;
    if count > RANGES_MAX as u64 || count * 2 > bytes.len() as u64 {
        return Err(Nonsense);
    }
    let mut ranges = Vec::with_capacity(count as usize);
    let mut at: u64 = 0;
    for _ in 0..count {
        let first = at.checked_add(take(&mut bytes)?).ok_or(Nonsense)?;
        let sectors = take(&mut bytes)?;
        let end = first.checked_add(sectors).ok_or(Nonsense)?;
        if sectors == 0 || end > disk_sectors {
            return Err(Nonsense);
        }
        ranges.push((first, end));
        at = end;
    }
    if bytes.is_empty() { Ok(ranges) } else { Err(Nonsense) }
}

fn put(bytes: &mut Vec<u8>, mut value: u64) {
    while value >= 0x80 {
        bytes.push(value as u8 | 0x80);
        value >>= 7;
    }
    bytes.push(value as u8);
}

fn take(bytes: &mut &[u8]) -> Result<u64, Nonsense> {
    let mut value = 0;
    for shift in (0..64).step_by(7) {
        let (byte, rest) = bytes.split_first().ok_or(Nonsense)?;
        *bytes = rest;
        let bits = u64::from(byte & 0x7f);
        if bits << shift >> shift != bits {
            return Err(Nonsense);
        }
        value |= bits << shift;
        if byte & 0x80 == 0 {
            return Ok(value);
        }
    }
    Err(Nonsense)
}
