//! Helpers for bytes that arrive in pieces: [`Intake`] collects a known number of bytes, [`Reader`]
//! parses them. The caller limits all lengths, in bytes.

use crate::wire::STRING_BYTES_MAX;

/// Collects exactly `need` bytes from input pieces of any size. The caller limits `need`.
#[derive(Clone, Debug)]
pub(crate) struct Intake {
    held: Vec<u8>,
    need: usize,
}

impl Intake {
    pub(crate) fn new(need: usize) -> Self {
        Self { held: Vec::new(), need }
    }

    /// Drops the collected bytes, and starts to collect `need` new ones.
    pub(crate) fn expect(&mut self, need: usize) {
        self.held.clear();
        self.need = need;
    }

    /// Starts to collect `more` bytes after the bytes that are collected already.
    pub(crate) fn expect_more(&mut self, more: usize) {
        self.need += more;
    }

    /// Moves the bytes that are still needed from the front of `rest` to the collected bytes.
    /// Returns true once all needed bytes are collected.
    #[inline]
    pub(crate) fn fill(&mut self, rest: &mut &[u8]) -> bool {
        let wanted = (self.need - self.held.len()).min(rest.len());
        let (taken, left) = rest.split_at(wanted);
        self.held.extend_from_slice(taken);
        *rest = left;
        self.held.len() == self.need
    }

    #[inline]
    pub(crate) fn held(&self) -> &[u8] {
        &self.held
    }

    /// Removes and returns the collected bytes, so that the caller can parse them while its state
    /// changes. `restore` returns the memory for reuse.
    pub(crate) fn take(&mut self) -> Vec<u8> {
        self.need = 0;
        std::mem::take(&mut self.held)
    }

    pub(crate) fn restore(&mut self, mut memory: Vec<u8>) {
        memory.clear();
        self.held = memory;
    }
}

/// Reads big-endian fields from the front of a slice; `None` means that the slice is too short.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    pub(crate) fn new(bytes: &'a [u8]) -> Self {
        Self(bytes)
    }

    #[inline]
    fn array<const N: usize>(&mut self) -> Option<[u8; N]> {
        let (head, tail) = self.0.split_first_chunk::<N>()?;
        self.0 = tail;
        Some(*head)
    }

    #[inline]
    pub(crate) fn u16(&mut self) -> Option<u16> {
        self.array().map(u16::from_be_bytes)
    }

    #[inline]
    pub(crate) fn u32(&mut self) -> Option<u32> {
        self.array().map(u32::from_be_bytes)
    }

    #[inline]
    pub(crate) fn u64(&mut self) -> Option<u64> {
        self.array().map(u64::from_be_bytes)
    }

    pub(crate) fn bytes(&mut self, length: usize) -> Option<&'a [u8]> {
        let (head, tail) = self.0.split_at_checked(length)?;
        self.0 = tail;
        Some(head)
    }

    /// Reads a string with a `u32` length prefix.
    pub(crate) fn counted(&mut self) -> Option<&'a [u8]> {
        let length = self.u32()?;
        self.bytes(usize::try_from(length).ok()?)
    }

    pub(crate) fn rest(self) -> &'a [u8] {
        self.0
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

/// Returns the longest prefix of `text` that fits `bytes_max` and ends at a character boundary.
pub(crate) fn clip(text: &str, bytes_max: usize) -> &str {
    if text.len() <= bytes_max {
        return text;
    }
    let mut end = bytes_max;
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    &text[..end]
}

/// Converts a peer's text for the log: UTF-8, no control characters, limited length.
pub(crate) fn readable(bytes: &[u8]) -> String {
    let text = String::from_utf8_lossy(&bytes[..bytes.len().min(STRING_BYTES_MAX)]);
    text.chars().map(|c| if c.is_control() { ' ' } else { c }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn intake_collects_across_pieces_and_leaves_the_rest() {
        let mut intake = Intake::new(3);
        let mut piece: &[u8] = b"ab";
        assert!(!intake.fill(&mut piece));
        let mut piece: &[u8] = b"cde";
        assert!(intake.fill(&mut piece));
        assert_eq!((intake.held(), piece), (&b"abc"[..], &b"de"[..]));
    }

    #[test]
    fn reader_refuses_to_run_past_the_end() {
        let mut reader = Reader::new(&[0, 0, 0, 9, b'x']);
        assert_eq!(reader.counted(), None);
        assert_eq!(Reader::new(&[1]).u16(), None);
    }

    #[test]
    fn clip_keeps_characters_whole() {
        assert_eq!(clip("aé", 2), "a");
        assert_eq!(clip("aé", 3), "aé");
    }
}
