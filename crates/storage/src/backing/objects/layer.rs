//! A layer: writes to one object that are not in the object store yet. The bytes of the layer
//! replace the object's previous content; the other bytes of the object stay.
//!
//! Units are 512 bytes; offsets are bytes within the object.

use std::ops::Range;

use super::format::SIZE_UNIT;

const UNIT: usize = SIZE_UNIT as usize;

/// A set of 512-byte units.
#[derive(Clone, Debug, Default)]
struct Units {
    words: Vec<u64>,
    count: usize,
}

impl Units {
    fn has(&self, unit: usize) -> bool {
        self.words[unit / 64] >> (unit % 64) & 1 != 0
    }

    fn add(&mut self, units: Range<usize>) {
        for unit in units {
            let word = &mut self.words[unit / 64];
            self.count += usize::from(*word >> (unit % 64) & 1 == 0);
            *word |= 1 << (unit % 64);
        }
    }
}

/// Writes to one object that are not in the object store yet.
#[derive(Clone, Debug)]
pub(super) struct Layer {
    len: usize,
    /// Bytes of the object; empty until the first write.
    bytes: Vec<u8>,
    valid: Units,
    /// Whether bytes that were not written read as zeroes, regardless of the object's previous
    /// content.
    over_zeroes: bool,
    /// Whether the object must exist even if it is zero.
    keep: bool,
}

impl Layer {
    /// Creates an empty layer for an object of `len` bytes.
    pub(super) fn new(len: usize) -> Layer {
        assert!(len > 0 && len.is_multiple_of(UNIT), "objects are whole units");
        let valid = Units { words: vec![0; (len / UNIT).div_ceil(64)], count: 0 };
        Layer { len, bytes: Vec::new(), valid, over_zeroes: false, keep: false }
    }

    /// Creates a layer that makes the whole object zero.
    pub(super) fn zeroes(len: usize) -> Layer {
        Layer { over_zeroes: true, ..Layer::new(len) }
    }

    /// Requires that the object exists even if it is zero.
    pub(super) fn keep(&mut self) {
        self.keep = true;
    }

    /// Returns true if the object's previous content is not needed.
    pub(super) fn is_whole(&self) -> bool {
        self.over_zeroes || self.valid.count == self.len / UNIT
    }

    /// Returns true if all bytes of the object were written.
    pub(super) fn is_full(&self) -> bool {
        self.valid.count == self.len / UNIT
    }

    pub(super) fn write(&mut self, at: usize, data: &[u8]) {
        let units = units(at, data.len());
        self.room()[at..at + data.len()].copy_from_slice(data);
        self.valid.add(units);
    }

    pub(super) fn zero(&mut self, at: usize, len: usize) {
        let units = units(at, len);
        if !(self.over_zeroes && self.bytes.is_empty()) {
            self.room()[at..at + len].fill(0);
            self.valid.add(units);
        }
    }

    fn room(&mut self) -> &mut [u8] {
        if self.bytes.is_empty() {
            // Zeroed memory takes no space until it is written.
            self.bytes = vec![0; self.len];
        }
        &mut self.bytes
    }

    /// Returns the unit at this byte, if it was written.
    fn unit(&self, at: usize) -> Option<&[u8]> {
        if self.valid.has(at / UNIT) {
            return Some(&self.bytes[at..at + UNIT]);
        }
        self.over_zeroes.then_some(&[0; UNIT])
    }

    /// Adds the writes of an older layer below the writes of this layer.
    pub(super) fn put_under(&mut self, older: &Layer) {
        self.keep |= older.keep;
        if self.over_zeroes {
            return;
        }
        for at in (0..self.len).step_by(UNIT) {
            if older.valid.has(at / UNIT) && !self.valid.has(at / UNIT) {
                self.write(at, &older.bytes[at..at + UNIT]);
            }
        }
        // Bytes that neither layer has are zero; later writes are over them.
        self.over_zeroes = older.over_zeroes;
    }

    /// Returns all bytes of the object, with `base` as its previous content. `None` means zeroes,
    /// or that no previous content is needed.
    pub(super) fn over(&self, base: Option<&[u8]>) -> Vec<u8> {
        let mut bytes = base.map_or_else(|| vec![0; self.len], <[u8]>::to_vec);
        assert!(bytes.len() == self.len, "the base has the object's length");
        for at in (0..self.len).step_by(UNIT) {
            if let Some(unit) = self.unit(at) {
                bytes[at..at + UNIT].copy_from_slice(unit);
            }
        }
        bytes
    }

    pub(super) fn keeps(&self) -> bool {
        self.keep
    }

    /// Returns the object's bytes, if all of them were written.
    pub(super) fn full(&self) -> Option<&[u8]> {
        self.is_full().then_some(&self.bytes)
    }
}

/// Reads from offset `at` of the object: copies to `out` the units that the layers have, newest
/// layer first. The other units are missing. Returns the byte range of `out` that covers all
/// missing units, and the byte offset of each missing unit in `out`. Returns `None` if no unit is
/// missing.
pub(super) fn look(layers: &[&Layer], at: usize, out: &mut [u8]) -> Option<(Range<usize>, Vec<usize>)> {
    assert!(at.is_multiple_of(UNIT) && out.len().is_multiple_of(UNIT), "whole units are read");
    let mut missing = Vec::new();
    for start in (0..out.len()).step_by(UNIT) {
        match layers.iter().find_map(|layer| layer.unit(at + start)) {
            Some(unit) => out[start..start + UNIT].copy_from_slice(unit),
            None => missing.push(start),
        }
    }
    let (first, last) = (*missing.first()?, *missing.last()?);
    Some((first..last + UNIT, missing))
}

/// Copies to `out` the 512-byte units that no layer has. The object store returned `bytes` for the
/// byte range that [`look`] returned. `missing` has the byte offset of each missing unit in `out`.
pub(super) fn fill(out: &mut [u8], missing: &[usize], bytes: &[u8]) {
    let first = missing[0];
    for start in missing {
        out[*start..start + UNIT].copy_from_slice(&bytes[start - first..start - first + UNIT]);
    }
}

pub(super) fn is_zero(bytes: &[u8]) -> bool {
    let (words, rest) = bytes.as_chunks::<64>();
    words.iter().all(|word| *word == [0; 64]) && rest.iter().all(|byte| *byte == 0)
}

fn units(at: usize, len: usize) -> Range<usize> {
    assert!(at.is_multiple_of(UNIT) && len.is_multiple_of(UNIT), "whole units are written");
    at / UNIT..(at + len) / UNIT
}

#[cfg(test)]
mod tests {
    use super::*;

    const LEN: usize = 70 * UNIT;

    fn look_at(layers: &[&Layer], units: Range<usize>) -> (Vec<u8>, Vec<usize>) {
        let mut out = vec![9; units.len() * UNIT];
        let missing = look(layers, units.start * UNIT, &mut out).map_or(Vec::new(), |(_, missing)| missing);
        let firsts = out.iter().step_by(UNIT).copied().collect();
        (firsts, missing.iter().map(|start| start / UNIT).collect())
    }

    #[test]
    fn newer_layers_lie_over_older_ones() {
        let (mut older, mut newer) = (Layer::new(LEN), Layer::new(LEN));
        older.write(0, &[1; 4 * UNIT]);
        newer.write(2 * UNIT, &[2; UNIT]);
        newer.zero(3 * UNIT, UNIT);
        assert_eq!(look_at(&[&newer, &older], 1..6), (vec![1, 2, 0, 9, 9], vec![3, 4]));
        newer.put_under(&older);
        assert_eq!(look_at(&[&newer], 1..6), (vec![1, 2, 0, 9, 9], vec![3, 4]));
        assert!(!newer.is_whole());
        let base = vec![7; LEN];
        let whole = newer.over(Some(&base));
        let firsts: Vec<u8> = whole.iter().step_by(UNIT).take(6).copied().collect();
        assert_eq!(firsts, [1, 1, 2, 0, 7, 7]);
    }

    #[test]
    fn over_zeroes_the_base_does_not_count() {
        let mut layer = Layer::zeroes(LEN);
        assert!(layer.is_whole() && is_zero(&layer.over(None)) && !layer.is_full());
        layer.zero(0, UNIT);
        assert!(layer.bytes.is_empty(), "zeroes over zeroes take no memory");
        layer.write(69 * UNIT, &[3; UNIT]);
        assert!(!is_zero(&layer.over(None)));
        assert_eq!(look_at(&[&layer], 68..70), (vec![0, 3], vec![]));
        let mut older = Layer::new(LEN);
        older.write(0, &[5; LEN]);
        layer.put_under(&older);
        assert_eq!(look_at(&[&layer], 0..1), (vec![0], vec![]), "what is older is gone");
    }

    #[test]
    fn a_layer_over_one_of_zeroes_is_over_zeroes() {
        let (older, mut newer) = (Layer::zeroes(LEN), Layer::new(LEN));
        newer.write(UNIT, &[4; UNIT]);
        newer.put_under(&older);
        assert!(newer.is_whole());
        assert_eq!(look_at(&[&newer], 0..3), (vec![0, 4, 0], vec![]));
    }

    #[test]
    fn kept_zeroes_are_needed() {
        let mut layer = Layer::zeroes(LEN);
        layer.keep();
        assert!(layer.keeps());
        let mut newer = Layer::new(LEN);
        newer.put_under(&layer);
        assert!(newer.keeps());
    }

    #[test]
    fn zeroes_are_recognised_at_both_ends() {
        let mut bytes = vec![0; 130];
        assert!(is_zero(&bytes) && is_zero(&[]));
        for at in [0, 63, 64, 129] {
            bytes[at] = 1;
            assert!(!is_zero(&bytes));
            bytes[at] = 0;
        }
    }
}
