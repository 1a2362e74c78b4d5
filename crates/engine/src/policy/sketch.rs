//! Estimates how often each block was accessed: a count-min sketch of 4-bit counters, four for each
//! block, with conservative update (only a block's least counters rise). Cormode, Muthukrishnan:
//! "An improved data stream summary: the count-min sketch and its applications", J. Algorithms 55,
//! 2005; Estan, Varghese: "New directions in traffic measurement and accounting", SIGCOMM 2002.
//!
//! A block's four counters are in one cache line, one in each of the line's four rows of 32
//! counters. To halve all counters, the sketch only increments a number, and each line halves its
//! counters when it is next accessed. The number of halvings is stored modulo 256, so 256 halvings
//! without an access to a line are lost. Hashes of different blocks may collide, so an estimate can
//! be too high, but never too low.

use crate::index::hash;
use crate::units::BlockNo;

/// Number of bits of a counter. After this many halvings, any count is zero.
pub(crate) const COUNT_BITS: u32 = 4;
/// The largest value of a counter.
pub(crate) const COUNT_MAX: u8 = (1 << COUNT_BITS) - 1;
const ROWS: usize = 4;
const WORDS: usize = 8;
/// For each 4-bit counter, the bits that stay when it is shifted right by one.
const HALVES: u64 = 0x7777_7777_7777_7777;

/// The counters in one cache line: two words for each row.
#[derive(Clone, Copy, Debug)]
#[repr(align(64))]
struct Line([u64; WORDS]);

#[derive(Debug)]
pub(crate) struct Sketch {
    lines: Vec<Line>,
    /// For each line, how many times its counts were halved, modulo 256.
    halvings_done: Vec<u8>,
    halvings: u8,
}

impl Sketch {
    /// Creates a sketch of `lines` cache lines, at least one.
    pub(crate) fn new(lines: u32) -> Self {
        let lines = lines.max(1) as usize;
        Sketch { lines: vec![Line([0; WORDS]); lines], halvings_done: vec![0; lines], halvings: 0 }
    }

    /// Counts an access to a block.
    pub(crate) fn add(&mut self, block: BlockNo) {
        let (line, places) = self.locate(block);
        let least = places.iter().map(|place| place.count(line)).min().expect("a sketch has rows");
        if least < COUNT_MAX {
            places.iter().for_each(|place| place.raise(line, least + 1));
        }
    }

    /// Returns the estimated number of accesses to a block, at most [`COUNT_MAX`].
    pub(crate) fn estimate(&mut self, block: BlockNo) -> u8 {
        let (line, places) = self.locate(block);
        places.iter().map(|place| place.count(line)).min().expect("a sketch has rows")
    }

    /// Raises the estimate of a block to `count` if it is lower.
    pub(crate) fn raise(&mut self, block: BlockNo, count: u8) {
        let (line, places) = self.locate(block);
        places.iter().for_each(|place| place.raise(line, count));
    }

    /// Halves every count, rounding down.
    pub(crate) fn halve(&mut self) {
        self.halvings = self.halvings.wrapping_add(1);
    }

    pub(crate) fn bytes(&self) -> u64 {
        (self.lines.capacity() * size_of::<Line>() + self.halvings_done.capacity()) as u64
    }

    /// Returns a block's line, after halving its counts as often as is overdue, and the positions
    /// of its counters.
    fn locate(&mut self, block: BlockNo) -> (&mut Line, [Place; ROWS]) {
        let hash = hash(block);
        let number = (((hash >> 32) * self.lines.len() as u64) >> 32) as usize;
        let line = &mut self.lines[number];
        let missed = self.halvings.wrapping_sub(self.halvings_done[number]);
        if missed != 0 {
            for _ in 0..missed.min(COUNT_BITS as u8) {
                line.0.iter_mut().for_each(|word| *word = *word >> 1 & HALVES);
            }
            self.halvings_done[number] = self.halvings;
        }
        let places = std::array::from_fn(|row| {
            // Each row uses five bits of the hash: one of two words, and one of 16 counters in the
            // word.
            let bits = (hash >> (5 * row)) as u32 & 31;
            Place { word: 2 * row + (bits / 16) as usize, shift: 4 * (bits % 16) }
        });
        (line, places)
    }
}

/// One counter in a line.
struct Place {
    word: usize,
    shift: u32,
}

impl Place {
    fn count(&self, line: &Line) -> u8 {
        (line.0[self.word] >> self.shift) as u8 & COUNT_MAX
    }

    fn raise(&self, line: &mut Line, count: u8) {
        let more = count.saturating_sub(self.count(line));
        line.0[self.word] += u64::from(more) << self.shift;
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    #[test]
    fn counts_exactly_while_blocks_do_not_meet() {
        let mut sketch = Sketch::new(1 << 14);
        let mut counts = BTreeMap::<u32, u8>::new();
        let mut rng = 1;
        for step in 0..20_000 {
            rng = hash(BlockNo(rng)) as u32;
            let block = rng % 199;
            match step % 5 {
                4 => {
                    let count = (rng >> 16) as u8 & COUNT_MAX;
                    sketch.raise(BlockNo(block), count);
                    let known = counts.entry(block).or_default();
                    *known = (*known).max(count);
                }
                _ => {
                    sketch.add(BlockNo(block));
                    let known = counts.entry(block).or_default();
                    *known = (*known + 1).min(COUNT_MAX);
                }
            }
            if step % 700 == 0 {
                sketch.halve();
                counts.values_mut().for_each(|count| *count /= 2);
            }
            assert_eq!(sketch.estimate(BlockNo(block)), counts[&block], "step {step}");
        }
    }

    #[test]
    fn never_counts_too_low_and_seldom_too_high() {
        // 3000 blocks in 50 lines: two counters for each.
        let mut sketch = Sketch::new(50);
        for block in (0..3000).chain(0..300).chain(0..300) {
            sketch.add(BlockNo(block));
        }
        let excess = |block: u32, sketch: &mut Sketch| {
            let times = if block < 300 { 3 } else { 1 };
            sketch.estimate(BlockNo(block)).checked_sub(times).expect("never too low")
        };
        let wrong = (0..3000).filter(|block| excess(*block, &mut sketch) > 1).count();
        assert!(wrong < 150, "{wrong} of 3000 more than one too high");
    }
}
