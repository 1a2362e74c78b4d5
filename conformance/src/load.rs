//! The blocks that the load of a migrating guest writes and verifies. Each block of 4 KiB contains
//! its number and the count of its writes. The rest of the block is computed from these two
//! numbers.
//!
//! This code is fast in an emulated guest and in a debug build: a block is copied from a table, and
//! comparing takes one call.

use std::fs::File;
use std::io::Write;
use std::path::Path;

use crate::data::Noise;

/// Bytes of a block.
pub const BLOCK_BYTES: usize = 4096;

/// Bytes before the noise: the block's number and its version.
const HEADER_BYTES: usize = 16;

/// Number of possible starts of a block's noise in the table.
const STARTS: u64 = 65_521;

/// The noise that blocks are made of.
#[derive(Debug)]
pub struct Pattern(Vec<u8>);

impl Default for Pattern {
    fn default() -> Self {
        Self::new()
    }
}

impl Pattern {
    /// Creates the pattern, which is the same in the guest and in the test.
    #[must_use]
    pub fn new() -> Self {
        Self(Noise::new(0x11FE).bytes(STARTS as usize + BLOCK_BYTES))
    }

    /// Returns the noise of a block.
    fn noise(&self, block: u64, version: u64) -> &[u8] {
        // Adjacent blocks and successive versions start far from each other.
        let start = (block.wrapping_mul(40_503).wrapping_add(version.wrapping_mul(7_919)) % STARTS) as usize;
        &self.0[start..start + BLOCK_BYTES - HEADER_BYTES]
    }

    /// Sets `out` to the block's bytes after `version` writes.
    pub fn fill(&self, block: u64, version: u64, out: &mut [u8; BLOCK_BYTES]) {
        out[..8].copy_from_slice(&block.to_le_bytes());
        out[8..HEADER_BYTES].copy_from_slice(&version.to_le_bytes());
        out[HEADER_BYTES..].copy_from_slice(self.noise(block, version));
    }

    /// Returns which version of the block `bytes` are.
    ///
    /// # Errors
    /// Returns a description of the bytes if they are no version of the block.
    pub fn version(&self, block: u64, bytes: &[u8; BLOCK_BYTES]) -> Result<u64, String> {
        let (number, version) = (word(&bytes[..8]), word(&bytes[8..HEADER_BYTES]));
        if number != block {
            return Err(format!("block {block} says that it is {number}"));
        }
        if bytes[HEADER_BYTES..] != *self.noise(block, version) {
            return Err(format!("block {block} is not what version {version} was"));
        }
        Ok(version)
    }
}

fn word(bytes: &[u8]) -> u64 {
    u64::from_le_bytes(bytes.try_into().expect("eight bytes"))
}

/// Creates `path` with `blocks` blocks that were never written.
///
/// # Panics
/// Panics if the file cannot be written.
#[track_caller]
pub fn image(path: &Path, blocks: u64) {
    let pattern = Pattern::new();
    let mut file = std::io::BufWriter::new(File::create(path).expect("a file in the scratch directory"));
    let mut bytes = [0; BLOCK_BYTES];
    for block in 0..blocks {
        pattern.fill(block, 0, &mut bytes);
        file.write_all(&bytes).expect("room in the scratch directory");
    }
    file.flush().expect("room in the scratch directory");
}

/// Checks the raw image at `path` after the load: every block is whole, and the image has as many writes
/// as the guest's `console` reports.
///
/// # Panics
/// Panics if a block is damaged, or a write is missing.
#[track_caller]
pub fn check_image(path: &Path, console: &str) {
    let bytes = std::fs::read(path).expect("the image is there");
    let pattern = Pattern::new();
    let (blocks, _) = bytes.as_chunks::<BLOCK_BYTES>();
    let versions = blocks.iter().zip(0..).map(|(b, n)| pattern.version(n, b).expect("a whole block"));
    let sum: u64 = versions.sum();
    assert!(console.contains(&format!(" writes={sum} wrong=0 failed=0")), "{sum} writes arrived:\n{console}");
}

#[cfg(test)]
mod tests {
    use super::{BLOCK_BYTES, Pattern};

    #[test]
    fn a_block_is_known_again_and_nothing_else_is_taken_for_it() {
        let pattern = Pattern::new();
        let mut bytes = [0; BLOCK_BYTES];
        for (block, version) in [(0, 0), (7, 3), (u64::MAX, u64::MAX)] {
            pattern.fill(block, version, &mut bytes);
            assert_eq!(pattern.version(block, &bytes), Ok(version));
            assert!(pattern.version(block.wrapping_add(1), &bytes).is_err());
            bytes[BLOCK_BYTES - 1] ^= 1;
            assert!(pattern.version(block, &bytes).is_err());
        }
    }

    /// A torn block is no valid version.
    #[test]
    fn torn_blocks_are_seen() {
        let pattern = Pattern::new();
        let (mut old, mut new) = ([0; BLOCK_BYTES], [0; BLOCK_BYTES]);
        pattern.fill(9, 4, &mut old);
        pattern.fill(9, 5, &mut new);
        new[BLOCK_BYTES / 2..].copy_from_slice(&old[BLOCK_BYTES / 2..]);
        assert!(pattern.version(9, &new).is_err());
    }
}
