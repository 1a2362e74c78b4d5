//! Common parts of workload generators: arrival times, request sizes, hot spots, and ranges of
//! parameters.

use std::ops::RangeInclusive;

use super::parameters::Bytes;
use crate::prng::{Prng, splitmix64};
use crate::workload::{Scatter, Zipf};
use hob_trace::Op;

pub(super) const SECTOR: u64 = 4096;

/// Permitted range of shares, per cent.
pub(super) const PERCENT: RangeInclusive<f64> = 0.0..=100.0;
/// Permitted range of the number of requests per second.
pub(super) const RATE: RangeInclusive<f64> = 0.001..=1e9;
/// Permitted range of the exponent of Zipf's law.
pub(super) const THETA: RangeInclusive<f64> = 0.0..=5.0;
/// Permitted range of the number of warm-up requests per hot spot or block.
pub(super) const WARMUP: RangeInclusive<f64> = 0.0..=1000.0;
/// Permitted range of lengths of time, seconds.
pub(super) const SECONDS: RangeInclusive<f64> = 0.0..=1e7;
/// Permitted range of the pauses of a client, microseconds.
pub(super) const THINK_US: RangeInclusive<u64> = 0..=1_000_000_000;
/// Permitted range of the number of clients.
pub(super) const CLIENTS: RangeInclusive<u64> = 1..=1 << 16;
/// Permitted range of request sizes, up to the engine's maximum. Request sizes are whole sectors.
pub(super) const REQUEST: RangeInclusive<Bytes> = Bytes(SECTOR)..=Bytes(16 << 20);
/// Permitted range of footprints: at most 2⁵⁰ bytes, so that arithmetic on offsets cannot
/// overflow.
pub(super) const FOOTPRINT: RangeInclusive<Bytes> = Bytes(1 << 20)..=Bytes(1 << 50);

/// Times of independent arrivals, with exponentially distributed gaps of variable mean.
#[derive(Clone, Debug)]
pub(super) struct Arrivals {
    at_ns: f64,
}

impl Arrivals {
    pub(super) fn new() -> Self {
        Arrivals { at_ns: 0.0 }
    }

    /// Returns the time of the next request at this rate per second. Times never decrease.
    pub(super) fn next(&mut self, per_s: f64, dice: &mut Prng) -> u64 {
        self.at_ns += -(1.0 - dice.unit()).ln() * 1e9 / per_s;
        self.at_ns as u64
    }

    pub(super) fn now_s(&self) -> f64 {
        self.at_ns / 1e9
    }
}

/// Returns a read with a probability of `read_percent` %, or else a write.
pub(super) fn draw_op(read_percent: f64, dice: &mut Prng) -> Op {
    if dice.unit() * 100.0 < read_percent { Op::Read } else { Op::Write }
}

/// Returns a random request size: one of two adjacent powers of two, in whole sectors, with mean
/// `mean`.
pub(super) fn draw_size(mean: u64, dice: &mut Prng) -> u32 {
    let low = SECTOR << (mean / SECTOR).max(1).ilog2();
    let share_high = mean.saturating_sub(low) as f64 / low as f64;
    (if dice.unit() < share_high { 2 * low } else { low }) as u32
}

/// Divides a number of bytes by the scale, and rounds down to multiples of `unit`, at least one.
pub(super) fn scaled(bytes: Bytes, scale: u64, unit: u64) -> u64 {
    (bytes.0 / scale / unit).max(1) * unit
}

/// Checks that a request consists of whole sectors.
pub(super) fn check_sectors(name: &str, bytes: Bytes) -> Result<(), String> {
    if bytes.0.is_multiple_of(SECTOR) {
        return Ok(());
    }
    Err(format!("{name}={bytes}: expected a multiple of 4KiB"))
}

/// Size of a slot, bytes. A slot is an aligned range of the disk with at most one hot spot.
pub(super) const SLOT_BYTES: u64 = 32 << 10;

/// Hot spots: small extents scattered over a disk, with Zipf popularity. Each spot has a fixed
/// position and length, so all requests to a spot have the same offset and length.
#[derive(Clone, Debug)]
pub(super) struct HotSpots {
    popularity: Zipf,
    slots: Scatter,
    small_percent: f64,
    seed: u64,
}

impl HotSpots {
    /// Creates `spots` hot spots on a disk of `disk_bytes` bytes. `small_percent` % of the spots
    /// have 4 KiB. The others have 8 or 16 KiB.
    pub(super) fn new(
        spots: u64,
        disk_bytes: u64,
        theta: f64,
        small_percent: f64,
        seed: u64,
    ) -> Result<Self, String> {
        let slots = disk_bytes / SLOT_BYTES;
        if spots == 0 || spots > slots {
            let most = Bytes(disk_bytes);
            return Err(format!(
                "spots={spots}: expected 1 to {slots} on a disk of {most}, one in each 32KiB"
            ));
        }
        let (popularity, slots) = (Zipf::new(spots, theta), Scatter::new(slots, seed));
        Ok(HotSpots { popularity, slots, small_percent, seed })
    }

    /// Returns offset and length of a random hot spot. Popular spots are more likely.
    pub(super) fn draw(&self, dice: &mut Prng) -> (u64, u32) {
        let spot = self.popularity.rank(dice);
        let mut counter = self.seed ^ spot.wrapping_mul(0x9e37_79b9_7f4a_7c15);
        let (size_die, place_die) = (splitmix64(&mut counter), splitmix64(&mut counter));
        let unit = (size_die >> 11) as f64 / (1u64 << 53) as f64;
        let sectors = match unit * 100.0 < self.small_percent {
            true => 1,
            false => 2 << (size_die & 1),
        };
        let within_slot = place_die % (SLOT_BYTES / SECTOR - sectors + 1) * SECTOR;
        (self.slots.place(spot) * SLOT_BYTES + within_slot, (sectors * SECTOR) as u32)
    }
}
