//! The expected content of a disk: its initial content, and everything that a guest has written since.

use std::collections::BTreeSet;
use std::path::Path;

use crate::data::Noise;
use crate::nbd_client::Client;

/// The content; see the module documentation.
#[derive(Debug)]
pub struct Written {
    data: Vec<u8>,
    places: BTreeSet<usize>,
    noise: Noise,
}

impl Written {
    /// Unit of reads and writes.
    pub const PIECE: usize = 16 << 10;

    /// Creates `bytes` of noise that no guest has written.
    #[must_use]
    pub fn new(seed: u64, bytes: u64) -> Self {
        let mut noise = Noise::new(seed);
        Self { data: noise.bytes(bytes as usize), places: BTreeSet::new(), noise }
    }

    /// Returns the whole content.
    #[must_use]
    pub fn data(&self) -> &[u8] {
        &self.data
    }

    /// Returns the offsets that the guest has written.
    #[must_use]
    pub fn places(&self) -> &BTreeSet<usize> {
        &self.places
    }

    /// Returns the present content of a piece.
    #[must_use]
    pub fn piece(&self, at: usize) -> &[u8] {
        &self.data[at..at + Self::PIECE]
    }

    /// Returns true if a file has exactly this content.
    ///
    /// # Panics
    /// Panics if the file cannot be read.
    #[must_use]
    #[track_caller]
    pub fn is_in(&self, file: &Path) -> bool {
        std::fs::read(file).expect("the file is there") == self.data
    }

    /// Writes one piece of noise.
    ///
    /// # Panics
    /// Panics if a write fails.
    #[track_caller]
    pub fn write(&mut self, client: &mut Client, at: usize) {
        let bytes = self.noise.bytes(Self::PIECE);
        client.write(at as u64, &bytes).expect("a write");
        self.data[at..at + Self::PIECE].copy_from_slice(&bytes);
        self.places.insert(at);
    }

    /// Writes `count` pieces at random in the first `span` bytes of the disk.
    ///
    /// # Panics
    /// Panics if a write fails.
    #[track_caller]
    pub fn write_some(&mut self, client: &mut Client, count: usize, span: u64) {
        for _ in 0..count {
            let at = self.noise.below(span / Self::PIECE as u64) as usize * Self::PIECE;
            self.write(client, at);
        }
    }

    /// Reads and checks one piece.
    ///
    /// # Panics
    /// Panics if a read fails or returns other bytes.
    #[track_caller]
    pub fn read(&self, client: &mut Client, at: usize) {
        let bytes = client.read(at as u64, Self::PIECE as u32).expect("a read");
        assert!(bytes == self.piece(at), "other bytes at {at}");
    }

    /// Reads and checks the first bytes of the disk.
    ///
    /// # Panics
    /// Panics if a read fails or returns other bytes.
    #[track_caller]
    pub fn read_all(&self, client: &mut Client, span: u64) {
        (0..span as usize).step_by(Self::PIECE).for_each(|at| self.read(client, at));
    }
}
