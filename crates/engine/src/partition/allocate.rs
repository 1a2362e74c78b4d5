//! Computes how to divide a pool's segments among its caches, so that the total value of the cache
//! sizes is as high as possible. The parent module defines the value of a cache size.
//!
//! The value of a cache's size is interpolated between the points of a fixed grid. The *upper hull*
//! of a cache's values is the lowest concave curve that is nowhere below them. Greedy allocation
//! repeatedly takes the step of a hull that has the highest gain per segment. Greedy allocation is
//! optimal for concave values. The last hull edge may not fit, and inside an edge the true value is
//! lower (a loop of reads hits only when all of it fits). So the remainder goes to the steps with
//! the highest true gain per segment (lookahead: Qureshi and Patt, "Utility-based cache
//! partitioning", MICRO 2006). A small cache with a high gain per segment may leave too little for
//! a large one. So the result is compared with the allocation that begins with the cache of the
//! highest value, as in the greedy approximation of the knapsack problem.

use std::sync::LazyLock;

/// Size up to which every number of segments is a grid point.
const FINE: u64 = 64;
/// Largest grid point, segments.
const LARGEST: u64 = 1 << 30;
/// Maximum number of steps in which the remainder is assigned.
const REMAINDER_STEPS_MAX: usize = 32;

/// The cache sizes whose values are computed, in segments, ascending. Steps above [`FINE`] are 1/32
/// of the size.
pub(super) static GRID: LazyLock<Vec<u64>> = LazyLock::new(|| {
    let coarse = std::iter::successors(Some(FINE), |size| Some(size + size / 32));
    (0..FINE).chain(coarse.take_while(|size| *size < LARGEST)).chain([LARGEST]).collect()
});

/// A cache that takes part in an allocation.
#[derive(Clone, Debug)]
pub struct Bidder {
    /// Smallest size, segments.
    pub least: u64,
    /// Largest size, segments; at least `least`.
    pub most: u64,
    /// Value of each size in [`GRID`]; no value is lower than that of a smaller size. The list is
    /// empty if no size has a value.
    pub(super) values: Vec<f64>,
}

impl Bidder {
    /// Creates a bidder. `value` returns the value of a size, and never decreases with the size.
    pub fn new(least: u64, most: u64, value: impl Fn(u64) -> f64) -> Bidder {
        Bidder { least, most, values: GRID.iter().map(|size| value(*size)).collect() }
    }

    /// Returns the value of a size.
    pub fn value_at(&self, size: u64) -> f64 {
        interpolate(&self.values, size)
    }

    /// Returns the sizes `from` and `to`, and all sizes of [`GRID`] between them, ascending.
    fn sizes(from: u64, to: u64) -> impl Iterator<Item = u64> {
        let first = GRID.partition_point(|size| *size <= from);
        let end = GRID.partition_point(|size| *size < to).max(first);
        let last = (to > from).then_some(to);
        std::iter::once(from).chain(GRID[first..end].iter().copied()).chain(last)
    }

    /// Returns the upper concave hull of the values of the sizes from `least` to `most`, but at
    /// most to `least + spare`.
    fn hull(&self, spare: u64) -> Vec<(u64, f64)> {
        let mut hull: Vec<(u64, f64)> = Vec::new();
        for size in Self::sizes(self.least, self.most.min(self.least.saturating_add(spare))) {
            let next = (size, self.value_at(size));
            while let [.., a, b] = hull[..]
                && slope(a, b) <= slope(b, next)
            {
                hull.pop();
            }
            hull.push(next);
        }
        hull
    }

    /// Returns the best size from `least` to `least + spare`, but at most `most`: the smallest one
    /// that has the highest value of these sizes.
    fn best_size(&self, spare: u64) -> u64 {
        let most = self.most.min(self.least.saturating_add(spare));
        let best = self.value_at(most);
        Self::sizes(self.least, most).find(|size| self.value_at(*size) >= best).unwrap_or(most)
    }
}

/// Returns the value of a size between grid points.
pub(super) fn interpolate(values: &[f64], size: u64) -> f64 {
    let Some(last) = values.last() else { return 0.0 };
    let next = GRID.partition_point(|point| *point <= size);
    let (Some(&right), Some(&right_value)) = (GRID.get(next), values.get(next)) else { return *last };
    let (left, left_value) = (GRID[next - 1], values[next - 1]);
    left_value + (right_value - left_value) * (size - left) as f64 / (right - left) as f64
}

fn slope(a: (u64, f64), b: (u64, f64)) -> f64 {
    (b.1 - a.1) / (b.0 - a.0) as f64
}

/// Returns a size for each bidder. The sum of the sizes is at most `capacity`, and capacity without
/// value for any bidder stays free. If not even the smallest sizes fit, they are reduced in
/// proportion, and the remaining segments go one by one to the bidders whose smallest size has the
/// highest value.
pub fn allocate(capacity: u64, bidders: &[Bidder]) -> Vec<u64> {
    let least: u64 = bidders.iter().fold(0, |sum, bidder| sum.saturating_add(bidder.least));
    if least > capacity {
        let part = |bidder: &Bidder| u128::from(bidder.least) * u128::from(capacity) / u128::from(least);
        let mut sizes: Vec<u64> = bidders.iter().map(|bidder| part(bidder) as u64).collect();
        let mut rest = capacity - sizes.iter().sum::<u64>();
        let mut order: Vec<usize> = (0..bidders.len()).collect();
        order.sort_by(|&a, &b| {
            bidders[b].value_at(bidders[b].least).total_cmp(&bidders[a].value_at(bidders[a].least))
        });
        for i in order {
            let more = rest.min(bidders[i].least - sizes[i]).min(1);
            sizes[i] += more;
            rest -= more;
        }
        return sizes;
    }
    let least_sizes: Vec<u64> = bidders.iter().map(|bidder| bidder.least).collect();
    let greedy = climb(bidders, least_sizes.clone(), capacity - least);
    let gain_alone = |i: &usize| {
        let bidder = &bidders[*i];
        bidder.value_at(bidder.best_size(capacity - least)) - bidder.value_at(bidder.least)
    };
    let Some(best) = (0..bidders.len()).max_by(|a, b| gain_alone(a).total_cmp(&gain_alone(b))) else {
        return greedy;
    };
    let mut sizes = least_sizes;
    sizes[best] = bidders[best].best_size(capacity - least);
    let spare = capacity - sizes.iter().sum::<u64>();
    let other = fill(bidders, sizes, spare);
    let total = |sizes: &[u64]| -> f64 {
        bidders.iter().zip(sizes).map(|(bidder, size)| bidder.value_at(*size)).sum()
    };
    if total(&other) > total(&greedy) { other } else { greedy }
}

/// Allocates spare capacity along the edges of the hulls that fit, and assigns the rest with
/// [`fill`].
fn climb(bidders: &[Bidder], mut sizes: Vec<u64>, mut spare: u64) -> Vec<u64> {
    let mut edges: Vec<(f64, usize, u64)> = Vec::new();
    for (i, bidder) in bidders.iter().enumerate() {
        let hull = bidder.hull(spare);
        edges.extend(hull.windows(2).map(|pair| (slope(pair[0], pair[1]), i, pair[1].0)));
    }
    // The slopes of one bidder fall, so its edges stay in their order.
    edges.sort_by(|a, b| b.0.total_cmp(&a.0).then(a.1.cmp(&b.1)).then(a.2.cmp(&b.2)));
    for (slope, i, to) in edges {
        let width = to - sizes[i];
        if slope <= 0.0 || width > spare {
            break;
        }
        sizes[i] = to;
        spare -= width;
    }
    fill(bidders, sizes, spare)
}

/// Assigns up to `spare` segments in at most [`REMAINDER_STEPS_MAX`] steps, each with the highest
/// gain per segment. Returns the new sizes.
fn fill(bidders: &[Bidder], mut sizes: Vec<u64>, mut spare: u64) -> Vec<u64> {
    for _ in 0..REMAINDER_STEPS_MAX {
        let steps =
            bidders.iter().enumerate().filter_map(|(i, bidder)| best_step(bidder, i, sizes[i], spare));
        let Some((_, i, to)) = steps.max_by(|a, b| a.0.total_cmp(&b.0).then(b.1.cmp(&a.1))) else { break };
        spare -= to - sizes[i];
        sizes[i] = to;
    }
    sizes
}

/// Returns the bidder's step of at most `spare` segments with the highest gain per segment: the
/// gain, the bidder's index, and the new size. Returns `None` if no step has a gain.
fn best_step(bidder: &Bidder, i: usize, from: u64, spare: u64) -> Option<(f64, usize, u64)> {
    let most = bidder.most.min(from.saturating_add(spare));
    let present = (from, bidder.value_at(from));
    let gain = |to: u64| (slope(present, (to, bidder.value_at(to))), i, to);
    let steps = Bidder::sizes(from, most).skip(1).map(gain).filter(|(gain, ..)| *gain > 0.0);
    steps.max_by(|a, b| a.0.total_cmp(&b.0).then(a.2.cmp(&b.2)))
}
