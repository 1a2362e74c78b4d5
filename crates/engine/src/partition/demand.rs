//! A disk's recent demand: the reads per second, and the share of them that each cache size would
//! serve (the *curve*).
//!
//! The rate follows the load within seconds. A part of the mean rate of the last minutes remains as
//! a minimum, so that a disk that pauses does not lose its data at once. The shape of the curve
//! also changes more slowly than the rate, because few accesses contain little information about
//! the shape. While the disk is idle, the curve does not change.

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

    /// Returns the limits and values of a cache for an allocation of `capacity` segments. `cost`
    /// applies if the cache's own cost of a miss is unknown.
    pub(super) fn bidder(&self, member: &Member<'_>, capacity: u64, cost: f64) -> Bidder {
        let cost = if member.miss_cost_ns == 0 { cost } else { member.miss_cost_ns as f64 };
        let weight = self.rate() * cost * f64::from(member.limits.shares) / self.accesses.max(1.0);
        let (least, most) = match member.limits.pinned {
            true => (member.segments, member.segments),
            false => {
                let most = member.limits.max.min(capacity);
                let dirty = member.dirty_segments.min(member.segments);
                (member.limits.min.max(dirty).min(most), most)
            }
        };
        Bidder { least, most, values: self.hits.iter().map(|hits| hits * weight).collect() }
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
