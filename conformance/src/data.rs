//! Test data: reproducible noise, files of noise, and comparisons. A failed comparison reports the
//! first difference, and does not print the compared data.

use std::fs::File;
use std::io::{Read, Write};
use std::path::Path;

/// A small generator (SplitMix64): the same seed gives the same numbers on every machine.
#[derive(Debug, Clone)]
pub struct Noise(u64);

impl Noise {
    /// Creates a generator with the seed `seed`.
    #[must_use]
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// Returns the next 64 bits.
    pub fn next_u64(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Returns a number in `0..limit`.
    pub fn below(&mut self, limit: u64) -> u64 {
        self.next_u64() % limit
    }

    /// Fills `out` with noise.
    pub fn fill(&mut self, out: &mut [u8]) {
        // Tests fill gigabytes in a build without optimization, in which an iterator needs several
        // function calls per word, and an index needs none.
        let (words, rest) = out.as_chunks_mut::<8>();
        let mut at = 0;
        while at < words.len() {
            words[at] = self.next_u64().to_le_bytes();
            at += 1;
        }
        if !rest.is_empty() {
            rest.copy_from_slice(&self.next_u64().to_le_bytes()[..rest.len()]);
        }
    }

    /// Returns `len` bytes of noise.
    #[must_use]
    pub fn bytes(&mut self, len: usize) -> Vec<u8> {
        let mut out = vec![0; len];
        self.fill(&mut out);
        out
    }
}

/// Returns `len` bytes, in which these numbers repeat in little-endian.
#[must_use]
pub fn repeated(numbers: &[u64], len: usize) -> Vec<u8> {
    let once = numbers.iter().map(|number| number.to_le_bytes()).collect::<Vec<_>>().concat();
    // In a build without optimization, an iterator over all bytes takes a hundred times as long.
    let mut bytes = once.repeat(len.div_ceil(once.len()));
    bytes.truncate(len);
    bytes
}

/// Creates the file `path` with `len` bytes of noise and without holes.
///
/// # Panics
/// Panics if the file cannot be written.
#[track_caller]
pub fn noise_file(path: &Path, len: u64, seed: u64) {
    let mut noise = Noise::new(seed);
    let mut file = File::create(path).unwrap_or_else(|e| panic!("create {}: {e}", path.display()));
    let mut buffer = vec![0; 1 << 20];
    let mut left = len;
    while left > 0 {
        let now = left.min(buffer.len() as u64) as usize;
        noise.fill(&mut buffer[..now]);
        file.write_all(&buffer[..now]).unwrap_or_else(|e| panic!("write {}: {e}", path.display()));
        left -= now as u64;
    }
}

/// Creates the file `path`, which is one hole of `len` bytes.
///
/// # Panics
/// Panics if the file cannot be created.
#[track_caller]
pub fn empty_file(path: &Path, len: u64) {
    let file = File::create(path).unwrap_or_else(|e| panic!("create {}: {e}", path.display()));
    file.set_len(len).unwrap_or_else(|e| panic!("size {}: {e}", path.display()));
}

/// Checks that two files hold the same bytes.
///
/// # Panics
/// Panics if the files differ. The message has the first offset at which they differ.
#[track_caller]
pub fn assert_same_file(left: &Path, right: &Path) {
    let mut a = File::open(left).unwrap_or_else(|e| panic!("open {}: {e}", left.display()));
    let mut b = File::open(right).unwrap_or_else(|e| panic!("open {}: {e}", right.display()));
    let (mut x, mut y) = (vec![0; 1 << 20], vec![0; 1 << 20]);
    let mut offset = 0_u64;
    loop {
        let (n, m) = (read_full(&mut a, &mut x), read_full(&mut b, &mut y));
        assert_same(&x[..n], &y[..m], offset, &format!("{} and {}", left.display(), right.display()));
        if n == 0 {
            return;
        }
        offset += n as u64;
    }
}

/// Checks that two slices are equal; `offset` is their position on the disk.
///
/// # Panics
/// Panics if the data differs. The message has the first disk offset at which it differs.
#[track_caller]
pub fn assert_same(left: &[u8], right: &[u8], offset: u64, what: &str) {
    if left == right {
        return;
    }
    let at = left.iter().zip(right).position(|(a, b)| a != b).unwrap_or(left.len().min(right.len()));
    panic!(
        "{what} differ at byte {}: lengths {} and {}, bytes {:02x?} and {:02x?}",
        offset + at as u64,
        left.len(),
        right.len(),
        &left[at..left.len().min(at + 16)],
        &right[at..right.len().min(at + 16)],
    );
}

fn read_full(file: &mut File, buffer: &mut [u8]) -> usize {
    let mut have = 0;
    while have < buffer.len() {
        match file.read(&mut buffer[have..]).expect("read a scratch file") {
            0 => break,
            n => have += n,
        }
    }
    have
}

#[cfg(test)]
mod tests {
    use super::Noise;

    #[test]
    fn bytes_are_those_of_the_words() {
        let mut words = Noise::new(7);
        let expected: Vec<u8> = (0..3).flat_map(|_| words.next_u64().to_le_bytes()).take(20).collect();
        assert_eq!(Noise::new(7).bytes(20), expected);
    }
}
