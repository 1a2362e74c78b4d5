//! A miss-ratio curve: for each cache size, the share of accesses that the cache would miss.

/// A point of a [`Curve`].
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct CurvePoint {
    /// Size of the cache, blocks.
    pub blocks: u64,
    /// Misses per access, from 0 to 1.
    pub miss_ratio: f64,
}

/// Error for points that are not a valid curve.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CurveError(&'static str);

impl std::error::Error for CurveError {}

impl std::fmt::Display for CurveError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "the points are not a miss-ratio curve: {}", self.0)
    }
}

/// The miss ratio as a function of the cache size. The ratio never rises with the size. The curve
/// is linear between two points and constant after the last one. Two points whose sizes differ by
/// one block represent a step of the curve.
#[derive(Clone, Debug, PartialEq)]
pub struct Curve {
    points: Vec<CurvePoint>,
}

impl Curve {
    /// Creates the curve through these points. The first is the miss ratio without a cache.
    ///
    /// # Panics
    /// Panics if there is no point at 0 blocks, if sizes do not rise, if ratios rise, or if a ratio
    /// is not between 0 and 1.
    pub fn new(points: Vec<CurvePoint>) -> Self {
        Curve::checked(points).unwrap_or_else(|CurveError(why)| panic!("{why}"))
    }

    /// Creates a curve as [`new`](Self::new) does, from points that may be invalid.
    ///
    /// # Errors
    /// Returns an error if [`new`](Self::new) would panic.
    pub fn checked(points: Vec<CurvePoint>) -> Result<Self, CurveError> {
        if points.first().is_none_or(|first| first.blocks > 0) {
            return Err(CurveError("the first point must be at cache size 0"));
        }
        if !points.iter().all(|point| (0.0..=1.0).contains(&point.miss_ratio)) {
            return Err(CurveError("a miss ratio must be from 0 to 1"));
        }
        let falls =
            |pair: &[CurvePoint]| pair[0].blocks < pair[1].blocks && pair[0].miss_ratio >= pair[1].miss_ratio;
        match points.windows(2).all(falls) {
            true => Ok(Curve { points }),
            false => Err(CurveError("cache sizes must rise, and miss ratios must not rise")),
        }
    }

    /// Returns a curve through some of this curve's points. At any size, its miss ratio differs
    /// from this curve's by at most `off_max`.
    pub fn thinned(&self, off_max: f64) -> Curve {
        let mut kept = vec![self.points[0]];
        // Range of slopes from the last kept point that pass close enough to all later points.
        let mut slopes = (f64::NEG_INFINITY, f64::INFINITY);
        for pair in self.points.windows(2) {
            let slope = |from: CurvePoint, off: f64| {
                (pair[1].miss_ratio + off - from.miss_ratio) / (pair[1].blocks - from.blocks) as f64
            };
            let mut from = kept[kept.len() - 1];
            if !(slopes.0..=slopes.1).contains(&slope(from, 0.0)) {
                from = pair[0];
                kept.push(from);
                slopes = (f64::NEG_INFINITY, f64::INFINITY);
            }
            slopes = (slopes.0.max(slope(from, -off_max)), slopes.1.min(slope(from, off_max)));
        }
        kept.extend(self.points[1..].last());
        Curve { points: kept }
    }

    /// Creates the curve of `total` accesses (or bytes, or any weight). For each `(distance,
    /// weight)`, accesses of this weight hit in caches of at least `distance` blocks. Distances
    /// rise and are at least 1. Without accesses the ratio is 1.
    pub fn from_distances(total: u64, distances: impl IntoIterator<Item = (u64, u64)>) -> Self {
        let mut builder = Builder::new();
        let mut misses = total;
        for (distance, weight) in distances {
            misses = misses.checked_sub(weight).expect("no more hits than accesses");
            builder.drop_to(distance - 1, distance, misses as f64 / total as f64);
        }
        builder.finish()
    }

    /// Returns the points of the curve with rising sizes; the first is at 0 blocks.
    pub fn points(&self) -> &[CurvePoint] {
        &self.points
    }

    /// Returns the miss ratio of a cache of `blocks` blocks.
    pub fn miss_ratio_at(&self, blocks: u64) -> f64 {
        let next = self.points.partition_point(|point| point.blocks <= blocks);
        let left = self.points[next - 1];
        match self.points.get(next) {
            Some(right) => {
                let part = (blocks - left.blocks) as f64 / (right.blocks - left.blocks) as f64;
                left.miss_ratio + part * (right.miss_ratio - left.miss_ratio)
            }
            None => left.miss_ratio,
        }
    }

    /// Returns the smallest cache, in blocks, whose hit ratio is at least `hit_ratio`. Returns
    /// `None` if no cache reaches it.
    pub fn size_for(&self, hit_ratio: f64) -> Option<u64> {
        let wanted = 1.0 - hit_ratio;
        // `1 − (1 − x)` may differ from `x`, but a ratio taken from this curve must be found again.
        let reaches = |miss_ratio: f64| miss_ratio <= wanted || 1.0 - miss_ratio >= hit_ratio;
        let next = self.points.partition_point(|point| !reaches(point.miss_ratio));
        let right = self.points.get(next)?;
        let Some(left) = next.checked_sub(1).map(|i| self.points[i]) else { return Some(right.blocks) };
        let part = (left.miss_ratio - wanted) / (left.miss_ratio - right.miss_ratio);
        let estimate = left.blocks + (part * (right.blocks - left.blocks) as f64).floor() as u64;
        let mut blocks = estimate.clamp(left.blocks + 1, right.blocks);
        while blocks < right.blocks && !reaches(self.miss_ratio_at(blocks)) {
            blocks += 1;
        }
        Some(blocks)
    }

    /// Returns the knee: the size beyond which more cache adds few hits. The knee is the point
    /// furthest below the chord from no cache to the smallest cache with the lowest miss ratio.
    /// Both axes are scaled to that range (Satopää et al., "Finding a 'Kneedle' in a haystack",
    /// 2011). A curve that is never below its chord, such as the single cliff of a loop, has its
    /// knee at the chord's end. Returns `None` if no size has any hit.
    pub fn knee(&self) -> Option<CurvePoint> {
        let first = self.points[0];
        let lowest = self.points[self.points.len() - 1].miss_ratio;
        let end = self.points[self.points.partition_point(|point| point.miss_ratio > lowest)];
        if end.blocks == 0 {
            return None;
        }
        let below_chord = |point: &CurvePoint| {
            let across = point.blocks as f64 / end.blocks as f64;
            let up = (point.miss_ratio - lowest) / (first.miss_ratio - lowest);
            1.0 - across - up
        };
        let candidates = self.points.iter().filter(|point| point.blocks > 0 && point.blocks <= end.blocks);
        let best = candidates
            .map(|point| (below_chord(point), *point))
            .fold((0.0, end), |best, next| if next.0 > best.0 { next } else { best });
        Some(best.1)
    }
}

/// Builds a curve from its decreases, in ascending order of size.
pub(super) struct Builder {
    points: Vec<CurvePoint>,
}

impl Builder {
    pub(super) fn new() -> Self {
        Builder { points: vec![CurvePoint { blocks: 0, miss_ratio: 1.0 }] }
    }

    /// Adds a linear decrease to `miss_ratio` from size `from` (or the last point, if that is
    /// larger) to size `to`. If `miss_ratio` is above the last point's ratio, the last point's
    /// ratio is used.
    pub(super) fn drop_to(&mut self, from: u64, to: u64, miss_ratio: f64) {
        let last = self.points[self.points.len() - 1];
        let miss_ratio = miss_ratio.clamp(0.0, last.miss_ratio);
        if miss_ratio == last.miss_ratio || to <= last.blocks {
            return;
        }
        if from > last.blocks {
            self.points.push(CurvePoint { blocks: from, miss_ratio: last.miss_ratio });
        }
        self.points.push(CurvePoint { blocks: to, miss_ratio });
    }

    /// Adds a decrease to `miss_ratio` from size 0 (or the last point) to size `to`. From size 0,
    /// the ratio falls by the same amount for each doubling of the size.
    pub(super) fn drop_by_logarithm(&mut self, to: u64, miss_ratio: f64) {
        if self.points.len() == 1 {
            let between: Vec<u64> = (0..64).map(|bit| 1 << bit).take_while(|blocks| *blocks < to).collect();
            let part = (miss_ratio - 1.0) / (between.len() + 1) as f64;
            for (i, blocks) in between.iter().enumerate() {
                self.drop_to(0, *blocks, 1.0 + part * (i + 1) as f64);
            }
        }
        self.drop_to(0, to, miss_ratio);
    }

    pub(super) fn finish(self) -> Curve {
        Curve::new(self.points)
    }
}
