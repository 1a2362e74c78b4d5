//! Little-endian numbers at fixed offsets, and checksums, in the formats of docs/FORMAT.md.

pub(crate) fn put(bytes: &mut [u8], at: usize, value: &[u8]) {
    bytes[at..at + value.len()].copy_from_slice(value);
}

pub(crate) fn array_at<const N: usize>(bytes: &[u8], at: usize) -> [u8; N] {
    bytes[at..at + N].try_into().expect("a slice of N bytes")
}

pub(crate) fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(array_at(bytes, at))
}

pub(crate) fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(array_at(bytes, at))
}

/// Writes the CRC-32C of all bytes to the offset `at`. The checksum's own bytes count as zeroes.
pub(crate) fn seal(bytes: &mut [u8], at: usize) {
    let crc = crc(bytes, at);
    put(bytes, at, &crc.to_le_bytes());
}

/// Returns true if the bytes have the checksum that [`seal`] writes.
pub(crate) fn is_sealed(bytes: &[u8], at: usize) -> bool {
    u32_at(bytes, at) == crc(bytes, at)
}

fn crc(bytes: &[u8], at: usize) -> u32 {
    let before = crc32c::crc32c(&bytes[..at]);
    crc32c::crc32c_append(crc32c::crc32c_append(before, &[0; 4]), &bytes[at + 4..])
}
