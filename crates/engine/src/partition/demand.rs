//! A disk's recent demand: the reads per second, and the share of them that each cache size would
//! serve (the *curve*).
//!
//! The rate follows the load within seconds. A part of the mean rate of the last minutes remains as
//! a minimum, so that a disk that pauses does not lose its data at once. The shape of the curve
//! also changes more slowly than the rate, because few accesses contain little information about
//! the shape. While the disk is idle, the curve does not change.
//!
//! Segments that a cache receives are empty. So a larger size has its value only after the misses
//! of the disk have filled the cache, and only as long as the load lasts. A gain that is within the
//! error of the curve has no value.

use super::allocate::{Bidder, GRID, interpolate};
use super::{CHANGE_MIN_PART, Member, Status};

/// Time after which a read has half of its weight in a disk's present rate of reads, nanoseconds.
const RATE_HALF_NS: f64 = 10e9;
/// Time after which a read has half of its weight in a disk's usual rate of reads, nanoseconds.
const USUAL_HALF_NS: f64 = 600e9;
/// Lower limit of a disk's rate, as a part of its usual rate.
const USUAL_PART: f64 = 0.25;
/// Time after which an access has half of its weight in a disk's curve, nanoseconds. The time
/// between two repartitionings does not count if the disk was idle.
const CURVE_HALF_NS: f64 = 300e9;
/// Number of recent accesses up to which the weight of earlier accesses is not reduced.
const ACCESSES_MIN: f64 = 4096.0;
/// Minimum growth of a disk's hit ratio for which its cache grows at the cost of others. The curve
/// is an estimate from a sample of the blocks, and its error has this order of magnitude.
const HIT_RATIO_GAIN_MIN: f64 = 0.01;
/// Limits of the time for which a load is expected to last, nanoseconds.
const HORIZON_NS: (f64, f64) = (300e9, 3600e9);

/// Recent demand of one disk.
#[derive(Clone, Debug, Default)]
pub(super) struct Demand {
    /// Counts at the previous repartitioning: reads, accesses, and hits at each grid point.
    /// `seen_hits` is empty before the first repartitioning.
    seen_reads: u64,
    seen_accesses: u64,
    seen_hits: Vec<f64>,
    /// Present and usual rate of reads per second.
    present_rate: f64,
    usual_rate: f64,
    /// Number of recent accesses (`accesses`), and for each grid point the number of hits among
    /// them (`hits`).
    accesses: f64,
    hits: Vec<f64>,
    /// Mean number of reads that fill a segment if all of them miss.
    segment_reads: f64,
}

impl Demand {
    /// Updates the demand with the member's counts at a repartitioning, `elapsed_ns` after the
    /// previous one.
    pub(super) fn update(&mut self, elapsed_ns: u64, segment_bytes: u64, member: &Member<'_>) {
        let blocks = |segments: u64| segments.saturating_mul(segment_bytes) / member.block_bytes;
        let total = member.accesses as f64;
        let hits: Vec<f64> =
            GRID.iter().map(|size| total * (1.0 - member.curve.miss_ratio_at(blocks(*size)))).collect();
        if member.accesses < self.seen_accesses || self.seen_hits.is_empty() {
            // The disk's counters were reset; the learnt demand stays.
            (self.seen_reads, self.seen_accesses) = (0, 0);
            self.seen_hits = vec![0.0; GRID.len()];
        }
        let accesses = (member.accesses - self.seen_accesses) as f64;
        let reads = member.reads.saturating_sub(self.seen_reads) as f64;
        let elapsed = elapsed_ns as f64;
        let mean = |before: f64, half_ns: f64| {
            let keeps = 0.5f64.powf(elapsed / half_ns);
            before * keeps + reads / (elapsed / 1e9) * (1.0 - keeps)
        };
        self.present_rate = mean(self.present_rate, RATE_HALF_NS);
        self.usual_rate = mean(self.usual_rate, USUAL_HALF_NS);
        self.segment_reads = blocks(1) as f64 * member.reads as f64 / total.max(1.0);
        if accesses > 0.0 {
            let ages = self.accesses > ACCESSES_MIN;
            let keeps = if ages { 0.5f64.powf(elapsed / CURVE_HALF_NS) } else { 1.0 };
            self.hits.resize(GRID.len(), 0.0);
            self.accesses = self.accesses * keeps + accesses;
            let mut below = 0.0;
            for (i, hits_now) in hits.iter().enumerate() {
                // Estimates of past hits change a little when the sample changes, so the curve is
                // kept monotone.
                let more = (hits_now - self.seen_hits[i]).clamp(0.0, accesses);
                below = f64::max(self.hits[i] * keeps + more, below).min(self.accesses);
                self.hits[i] = below;
            }
        }
        (self.seen_reads, self.seen_accesses) = (member.reads, member.accesses);
        self.seen_hits = hits;
    }

    /// Returns the limits and values of a cache for an allocation of `capacity` segments, of which
    /// `free` are in no cache. `cost` applies if the cache's own cost of a miss is unknown.
    pub(super) fn bidder(&self, member: &Member<'_>, (capacity, free): (u64, u64), cost: f64) -> Bidder {
        let cost = if member.miss_cost_ns == 0 { cost } else { member.miss_cost_ns as f64 };
        let all_reads = self.rate() * cost * f64::from(member.limits.shares);
        let weight = all_reads / self.accesses.max(1.0);
        let mut values: Vec<f64> = self.hits.iter().map(|hits| hits * weight).collect();
        self.discount_growth(&mut values, member.segments + free, all_reads);
        let (least, most) = match member.limits.pinned {
            true => (member.segments, member.segments),
            false => {
                let most = member.limits.max.min(capacity);
                let dirty = member.dirty_segments.min(member.segments);
                (member.limits.min.max(dirty).min(most), most)
            }
        };
        Bidder { least, most, values }
    }

    /// Reduces the values of the sizes above `size`, for which a cache takes segments from others.
    /// The gain of a size counts only after the misses have filled a cache of this size, and until
    /// the end of the horizon. A gain of less than [`HIT_RATIO_GAIN_MIN`] does not count.
    /// `all_reads` is the value of a cache that serves all reads.
    fn discount_growth(&self, values: &mut [f64], size: u64, all_reads: f64) {
        // Values are interpolated, so the value of the next size of the grid stays as well.
        let next = GRID.partition_point(|point| *point < size);
        let Some(&kept) = values.get(next) else { return };
        let misses = self.present_rate * (1.0 - self.hit_ratio(GRID[next]));
        let horizon_ns = self.horizon_ns();
        let mut best = kept;
        for (value, point) in values.iter_mut().zip(GRID.iter()).skip(next + 1) {
            let fill_ns = *point as f64 * self.segment_reads / misses * 1e9;
            let gain = (*value - kept) * (1.0 - fill_ns / horizon_ns).max(0.0);
            if gain >= HIT_RATIO_GAIN_MIN * all_reads {
                best = best.max(kept + gain);
            }
            *value = best;
        }
    }

    /// Returns the time for which the present load is expected to last: the time for which it has
    /// lasted so far, within [`HORIZON_NS`]. This time follows from the usual rate, which
    /// approaches the present rate with its half-life.
    fn horizon_ns(&self) -> f64 {
        let part = (self.usual_rate / self.present_rate).min(1.0);
        (-USUAL_HALF_NS * (1.0 - part).log2()).clamp(HORIZON_NS.0, HORIZON_NS.1)
    }

    /// Returns the misses per second of a cache of `segments` segments.
    pub(super) fn misses(&self, segments: u64) -> f64 {
        self.rate() * (1.0 - self.hit_ratio(segments))
    }

    fn rate(&self) -> f64 {
        self.present_rate.max(self.usual_rate * USUAL_PART)
    }

    fn hit_ratio(&self, segments: u64) -> f64 {
        interpolate(&self.hits, segments) / self.accesses.max(1.0)
    }

    /// Returns the findings about a cache of `segments` segments whose best size is `target`.
    /// `part` is the size that each cache would have if all had equal sizes.
    pub(super) fn status(&self, segments: u64, target: u64, part: u64) -> Status {
        let hit_ratio = self.hit_ratio(segments);
        let larger = segments + (segments / CHANGE_MIN_PART).max(1);
        Status {
            target,
            rate: self.present_rate,
            hit_ratio,
            more_hits: self.present_rate * (self.hit_ratio(larger) - hit_ratio),
            gained_hits: self.present_rate * (hit_ratio - self.hit_ratio(part)),
        }
    }
}
