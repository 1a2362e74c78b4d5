//! What a disk must hold: what it held in the beginning, and whatever a guest has written since.

use std::collections::BTreeSet;
use std::path::Path;

use crate::data::Noise;
use crate::nbd_client::Client;

/// See the module's text.
#[derive(Debug)]
pub struct Written {
    data: Vec<u8>,
    places: BTreeSet<usize>,
    noise: Noise,
}

impl Written {
    /// Unit of reads and writes.
    pub const PIECE: usize = 16 << 10;

    /// So many bytes of noise, of which the guest has written none.
    #[must_use]
    pub fn new(seed: u64, bytes: u64) -> Self {
        let mut noise = Noise::new(seed);
        Self { data: noise.bytes(bytes as usize), places: BTreeSet::new(), noise }
    }

    /// All of it.
    #[must_use]
    pub fn data(&self) -> &[u8] {
        &self.data
    }

    /// Where the guest has written, each place once.
    #[must_use]
    pub fn places(&self) -> &BTreeSet<usize> {
        &self.places
    }

    /// What stands there now.
    #[must_use]
    pub fn piece(&self, at: usize) -> &[u8] {
        &self.data[at..at + Self::PIECE]
    }

    /// Whether a file holds all of it, and nothing else.
    ///
    /// # Panics
    /// When it cannot be read.
    #[must_use]
    #[track_caller]
    pub fn is_in(&self, file: &Path) -> bool {
        std::fs::read(file).expect("the file is there") == self.data
    }

    /// Writes one piece of noise.
    ///
    /// # Panics
    /// When that fails.
    #[track_caller]
    pub fn write(&mut self, client: &mut Client, at: usize) {
        let bytes = self.noise.bytes(Self::PIECE);
        client.write(at as u64, &bytes).expect("a write");
        self.data[at..at + Self::PIECE].copy_from_slice(&bytes);
        self.places.insert(at);
    }

    /// Writes so many pieces anywhere in the first bytes of the disk.
    ///
    /// # Panics
    /// When that fails.
    #[track_caller]
    pub fn write_some(&mut self, client: &mut Client, count: usize, span: u64) {
        for _ in 0..count {
            let at = self.noise.below(span / Self::PIECE as u64) as usize * Self::PIECE;
            self.write(client, at);
        }
    }

    /// Reads one piece.
    ///
    /// # Panics
    /// When that fails, or brings other bytes.
    #[track_caller]
    pub fn read(&self, client: &mut Client, at: usize) {
        let bytes = client.read(at as u64, Self::PIECE as u32).expect("a read");
        assert!(bytes == self.piece(at), "other bytes at {at}");
    }

    /// Reads the first bytes of the disk.
    ///
    /// # Panics
    /// When that fails, or brings other bytes.
    #[track_caller]
    pub fn read_all(&self, client: &mut Client, span: u64) {
        (0..span as usize).step_by(Self::PIECE).for_each(|at| self.read(client, at));
    }
}
