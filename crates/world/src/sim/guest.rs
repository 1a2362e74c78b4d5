//! Simulated guests: their requests to a disk and their queue depth.

use hob_engine::io::{Durability, Op, Zeroing};

use crate::content::UNIT_BYTES;
use crate::rng::SimRng;

/// One guest of one disk.
#[derive(Debug)]
pub(super) struct Guest {
    pub(super) disk: usize,
    pub(super) in_flight: u32,
    /// True if the event queue has a turn of this guest, in which it may send requests.
    pub(super) is_due: bool,
    /// Number of successive guest requests that the engine refused for lack of room, at most 16.
    pub(super) handed_back: u32,
    /// Maximum number of guest requests in flight.
    pub(super) depth: u32,
    /// Size of the guest's disk, units of 512 bytes.
    pub(super) units: u64,
    /// First 512-byte units of the ranges to which most guest requests go.
    hot: Vec<u64>,
    /// Share of the guest's requests that change data, per mille.
    change: u32,
    cold: u32,
    /// Share of the guest's requests that are flushes, per mille.
    pub(super) flush: u32,
    /// Guest requests start at multiples of this number of 512-byte units.
    align: u64,
    /// Maximum length of most guest requests, units of 512 bytes. Rare requests are longer.
    units_max: u64,
    /// The guest's sequential stream, if it has one.
    pub(super) stream: Option<Stream>,
}

/// Sequential stream: each request starts where the preceding one ended.
#[derive(Clone, Copy, Debug)]
pub(super) struct Stream {
    pub(super) writes: bool,
    /// First 512-byte unit of the next request of the stream.
    pub(super) at: u64,
    /// Length of each request of the stream, units of 512 bytes.
    pub(super) count: u64,
}

impl Guest {
    pub(super) fn draw(disk: usize, units: u32, rng: &mut SimRng) -> Self {
        let units = u64::from(units);
        Guest {
            disk,
            in_flight: 0,
            is_due: false,
            handed_back: 0,
            depth: rng.pick(&[1, 4, 16, 64]),
            units,
            hot: (0..rng.between(1, 6)).map(|_| rng.below(units)).collect(),
            change: rng.pick(&[20, 20, 250, 500, 900]),
            cold: rng.pick(&[20, 20, 200, 900]),
            flush: 30,
            align: rng.pick(&[1, 8, 8, 16]),
            units_max: rng.pick(&[8, 16, 64, 256]),
            stream: None,
        }
    }

    /// Returns the next guest request: operation, offset in bytes, length in bytes. Some of the
    /// guest's requests are invalid.
    pub(super) fn ask(&mut self, rng: &mut SimRng) -> (Op, u64, u64) {
        if let Some(stream) = &mut self.stream
            && rng.chance(700)
        {
            if stream.at >= self.units || rng.chance(20) {
                stream.at = rng.below(self.units) / self.align * self.align;
            }
            let (at, count) = (stream.at, stream.count.min(self.units - stream.at));
            stream.at += count;
            let op = if stream.writes { Op::Write(Durability::Volatile) } else { Op::Read };
            return (op, at * UNIT_BYTES, count * UNIT_BYTES);
        }
        let op = self.op(rng);
        if op == Op::Flush {
            return (op, 0, 0);
        }
        let units_max = match rng.below(400) {
            0 => 8192,
            1..8 => 2048,
            _ => self.units_max,
        };
        let near = rng.pick(&self.hot) + rng.below(24);
        let start = if rng.chance(self.cold) { rng.below(self.units) } else { near };
        let start = start.min(self.units - 1) / self.align * self.align;
        let count = rng.between(1, units_max).next_multiple_of(self.align).min(self.units - start);
        let (offset, len) = (start * UNIT_BYTES, count * UNIT_BYTES);
        match rng.below(500) {
            0 => (op, offset, 0),
            1 => (op, self.units * UNIT_BYTES - len + UNIT_BYTES, len),
            2 => (op, u64::MAX - 511, u64::MAX - 1),
            _ => (op, offset, len),
        }
    }

    fn op(&self, rng: &mut SimRng) -> Op {
        let durability = if rng.chance(200) { Durability::Durable } else { Durability::Volatile };
        if rng.chance(self.flush) {
            return Op::Flush;
        }
        if !rng.chance(self.change) {
            return if rng.chance(50) { Op::Prefetch } else { Op::Read };
        }
        let zeroing =
            [Zeroing::MayUnmap, Zeroing::KeepAllocated, Zeroing::FastMayUnmap, Zeroing::FastKeepAllocated];
        match rng.below(20) {
            0 => Op::Discard(durability),
            1 => Op::WriteZeroes(durability, rng.pick(&zeroing)),
            _ => Op::Write(durability),
        }
    }
}
