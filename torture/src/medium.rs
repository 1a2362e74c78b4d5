//! A test medium with a volatile write cache: memory that never loses flushed data and may lose
//! other data.

use std::collections::BTreeMap;

use conformance::data::Noise;

use crate::stamp::UNIT;

/// Defects of a test medium. Each defect shows whether the checks notice a violation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum Sabotage {
    /// Flushes and FUA make no data durable.
    LyingFlush,
    /// One write in 64 is acknowledged and dropped.
    LostWrite,
    /// One write in 64 goes to an address 4 KiB higher.
    MisplacedWrite,
    /// One write in 64 does not change its last 512 bytes.
    TornWrite,
    /// One read in 64 has one bit inverted.
    CorruptRead,
    /// One read in 64 returns zeroes.
    ZeroRead,
}

/// A test medium; see the module documentation.
#[derive(Debug)]
pub struct Medium {
    durable: Vec<u8>,
    /// Units of 512 bytes that were written and not flushed, by number.
    cached: BTreeMap<u64, [u8; UNIT]>,
    noise: Noise,
    /// Defect of the medium, if any.
    pub sabotage: Option<Sabotage>,
}

impl Medium {
    /// Creates a medium of `bytes` zero bytes.
    #[must_use]
    pub fn new(bytes: u64, seed: u64) -> Self {
        let durable = vec![0; bytes as usize];
        Self { durable, cached: BTreeMap::new(), noise: Noise::new(seed), sabotage: None }
    }

    /// Returns the size of the medium, bytes.
    #[must_use]
    pub fn len(&self) -> u64 {
        self.durable.len() as u64
    }

    /// Returns true if the size of the medium is 0.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.durable.is_empty()
    }

    fn cheats(&mut self, how: Sabotage) -> bool {
        self.sabotage == Some(how) && self.noise.below(64) == 0
    }

    /// Changes the size of the medium. New bytes are durable zeroes.
    pub fn resize(&mut self, bytes: u64) {
        self.durable.resize((bytes as usize).next_multiple_of(UNIT), 0);
        let end = self.durable.len() / UNIT;
        self.cached.retain(|unit, _| *unit < end as u64);
    }

    /// Writes bytes at any offset. With `durable`, the data does not stay in the volatile cache.
    pub fn write_bytes(&mut self, offset: u64, data: &[u8], durable: bool) {
        let unit = UNIT as u64;
        let first = offset / unit * unit;
        let end = (offset + data.len() as u64).next_multiple_of(unit);
        let mut whole = self.read(first, (end - first) as usize);
        let at = (offset - first) as usize;
        whole[at..at + data.len()].copy_from_slice(data);
        self.write(first, &whole, durable);
    }

    /// Reads bytes at any offset.
    pub fn read_bytes(&mut self, offset: u64, bytes: usize) -> Vec<u8> {
        let unit = UNIT as u64;
        let first = offset / unit * unit;
        let end = (offset + bytes as u64).next_multiple_of(unit);
        let whole = self.read(first, (end - first) as usize);
        let at = (offset - first) as usize;
        whole[at..at + bytes].to_vec()
    }

    /// Reads a range of whole 512-byte units.
    pub fn read(&mut self, offset: u64, bytes: usize) -> Vec<u8> {
        let at = offset as usize;
        let mut data = self.durable[at..at + bytes].to_vec();
        let (first, end) = (offset / UNIT as u64, (offset + bytes as u64) / UNIT as u64);
        for (unit, cached) in self.cached.range(first..end) {
            let at = ((unit - first) as usize) * UNIT;
            data[at..at + UNIT].copy_from_slice(cached);
        }
        if self.cheats(Sabotage::CorruptRead) {
            let at = self.noise.below(bytes as u64) as usize;
            data[at] ^= 1;
        }
        if self.cheats(Sabotage::ZeroRead) {
            data.fill(0);
        }
        data
    }

    /// Writes whole units. With `durable`, the data does not stay in the volatile cache.
    pub fn write(&mut self, offset: u64, data: &[u8], durable: bool) {
        if self.cheats(Sabotage::LostWrite) {
            return;
        }
        let mut offset = offset;
        let mut data = data;
        if self.cheats(Sabotage::MisplacedWrite) && offset + 4096 + data.len() as u64 <= self.len() {
            offset += 4096;
        }
        if self.cheats(Sabotage::TornWrite) {
            data = &data[..data.len() - UNIT];
        }
        for (unit, bytes) in (offset / UNIT as u64..).zip(data.chunks_exact(UNIT)) {
            self.cached.insert(unit, bytes.try_into().expect("a unit"));
        }
        if durable && self.sabotage != Some(Sabotage::LyingFlush) {
            let (first, end) = (offset / UNIT as u64, (offset + data.len() as u64) / UNIT as u64);
            let units: Vec<u64> = self.cached.range(first..end).map(|(unit, _)| *unit).collect();
            units.into_iter().for_each(|unit| self.store(unit));
        }
    }

    fn store(&mut self, unit: u64) {
        if let Some(bytes) = self.cached.remove(&unit) {
            let at = unit as usize * UNIT;
            self.durable[at..at + UNIT].copy_from_slice(&bytes);
        }
    }

    /// Makes all data durable, unless flushes have a defect.
    pub fn flush(&mut self) {
        if self.sabotage != Some(Sabotage::LyingFlush) {
            self.flush_honestly();
        }
    }

    /// Makes all data durable, even if flushes have a defect.
    pub fn flush_honestly(&mut self) {
        let units: Vec<u64> = self.cached.keys().copied().collect();
        units.into_iter().for_each(|unit| self.store(unit));
    }

    /// Loses unflushed data, except a random part that becomes durable. Returns the number of lost
    /// units of 512 bytes.
    pub fn lose(&mut self) -> usize {
        let kept_of_16 = self.noise.below(12);
        let units: Vec<u64> = self.cached.keys().copied().collect();
        for unit in units {
            if self.noise.below(16) < kept_of_16 {
                self.store(unit);
            }
        }
        let lost = self.cached.len();
        self.cached.clear();
        lost
    }

    /// Returns the number of unflushed 512-byte units.
    #[must_use]
    pub fn unflushed(&self) -> usize {
        self.cached.len()
    }

    /// Returns the durable content of the medium.
    #[must_use]
    pub fn durable(&self) -> &[u8] {
        &self.durable
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_flushed_units_are_sure_to_survive() {
        let mut medium = Medium::new(1 << 20, 1);
        medium.write(4096, &[1; 8192], false);
        medium.flush();
        medium.write(512, &[3; 512], true);
        medium.write(4096, &[2; 65536], false);
        assert_eq!(medium.read(4096, 1024), [2; 1024]);
        let lost = medium.lose();
        assert!(lost > 0);
        assert_eq!(medium.read(512, 512), [3; 512], "written with FUA");
        let after = medium.read(4096, 8192);
        assert!(after.chunks(512).all(|unit| unit == [1; 512] || unit == [2; 512]));
        let zeroes = medium
            .read(4096, 65536)
            .chunks(512)
            .filter(|unit| *unit == [1; 512] || *unit == [0; 512])
            .count();
        assert_eq!(zeroes, lost);
    }

    #[test]
    fn a_lying_flush_makes_nothing_durable() {
        let mut medium = Medium::new(1 << 20, 1);
        medium.sabotage = Some(Sabotage::LyingFlush);
        medium.write(0, &[1; 65536], true);
        medium.flush();
        assert_eq!(medium.unflushed(), 128);
    }
}
