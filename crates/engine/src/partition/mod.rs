//! Divides a pool's shared segments among caches by the hits that each would gain or lose. The
//! caches that share these segments are the *members*.
//!
//! [`Partitioner::round`] repartitions the pool every [`PERIOD_NS`]. Its inputs are each disk's
//! counts and miss-ratio curve since the disk was opened, or since the curves were last cleared
//! ([`crate::sizing`]). From the differences to the previous repartitioning, the function derives a
//! recent curve and a recent rate of reads per disk. The value of a cache size is rate × hit ratio
//! × cost of a miss × shares. [`allocate`] finds the sizes with the highest total value, and the
//! function returns the changes towards these sizes.
//!
//! Changes are bounded, because each one drops cached data and rebuilds an index:
//! - free segments are assigned at once;
//! - segments of another cache count only after the misses of the disk have filled the larger
//!   cache, and only if the hit ratio rises by more than the error of the curve;
//! - segments move only if the total value rises by more than [`GAIN_MIN`];
//! - a cache changes by at least 1/[`CHANGE_MIN_PART`] of its size;
//! - a repartitioning moves at most 1/[`MOVE_MAX_PART`] of the capacity between caches, or
//!   1/[`MOVE_LARGE_PART`] if the gain is more than [`GAIN_LARGE`] times the loss.
//!
//! Sizes are in segments. A cache's limits (`min`, the size of its dirty data, `max`, and `pinned`)
//! take precedence over values. See `docs/decisions/0056-shared-capacity.md`.

mod allocate;
mod demand;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;

pub use allocate::{Bidder, allocate};
use demand::Demand;

use crate::sizing::{BlockSizing, Curve};
use crate::stats::DeviceIoStats;
use crate::units::{DiskId, Instant};

/// Time between two repartitionings, nanoseconds.
pub const PERIOD_NS: u64 = 2_000_000_000;

/// Minimum rise of the total value for which segments move, as a share of the current value.
pub const GAIN_MIN: f64 = 0.05;

/// Minimum rise of the total value if the caches that release segments lose at most
/// [`IDLE_LOSS_MAX`] of the gain.
const IDLE_GAIN_MIN: f64 = 0.02;

/// Maximum loss of a cache that counts as idle, as a share of what other caches gain.
const IDLE_LOSS_MAX: f64 = 0.02;

/// Minimum change of a cache, as a part of its size: one in this number.
pub const CHANGE_MIN_PART: u64 = 16;

/// Maximum capacity that a repartitioning takes from caches, as a part of the whole: one in this
/// number.
pub const MOVE_MAX_PART: u64 = 6;

/// Maximum capacity that a repartitioning takes from caches if the gain is large, as a part of the
/// whole: one in this number.
pub const MOVE_LARGE_PART: u64 = 3;

/// Ratio of gain to loss above which a gain is large.
pub const GAIN_LARGE: f64 = 2.0;

/// Shares of a cache whose settings specify none, as in QoS.
pub const SHARES_DEFAULT: u32 = 1000;

/// Limits of one cache's size, and the cache's shares.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Smallest size, segments.
    pub min: u64,
    /// Largest size, segments.
    pub max: u64,
    /// Factor by which the value of the cache's hits is multiplied; at least 1.
    pub shares: u32,
    /// True if the cache's size must not change.
    pub pinned: bool,
}

impl Default for Limits {
    fn default() -> Limits {
        Limits { min: 1, max: u64::MAX, shares: SHARES_DEFAULT, pinned: false }
    }
}

/// A cache that shares the capacity.
#[derive(Clone, Copy, Debug)]
pub struct Member<'a> {
    /// The disk that the cache belongs to.
    pub disk: DiskId,
    /// Number of segments that the cache has.
    pub segments: u64,
    /// Number of segments that the cache's dirty data needs.
    pub dirty_segments: u64,
    /// Limits of the cache.
    pub limits: Limits,
    /// Time that a hit saves, nanoseconds; 0 if unknown.
    pub miss_cost_ns: u64,
    /// Number of reads of the disk since it was opened, or since its miss-ratio curves were last
    /// cleared. The rate of reads is computed from this number and not from `accesses`, because a
    /// read that misses costs one latency, however many blocks it touches.
    pub reads: u64,
    /// Number of accesses that the curve describes. A read is one access to each block that it
    /// touches.
    pub accesses: u64,
    /// Miss-ratio curve of these accesses.
    pub curve: &'a Curve,
    /// Size of the blocks whose accesses the curve describes, bytes.
    pub block_bytes: u64,
}

/// Counts of a disk with a cache, as a repartitioning needs them.
#[derive(Clone, Debug)]
pub struct DiskCounts {
    /// Number of reads of the disk since it was opened, or since its miss-ratio curves were last
    /// cleared.
    pub reads: u64,
    /// Size of the cache's dirty data, bytes.
    pub dirty_bytes: u64,
    /// I/O to the disk's backing since the disk was opened, or its statistics were last reset.
    pub backing: DeviceIoStats,
    /// I/O of the disk's cache to flash in the same time.
    pub flash: DeviceIoStats,
    /// Miss-ratio curve of the reads; absent if the disk was not read since the last
    /// repartitioning.
    pub curve: Option<BlockSizing>,
}

/// A change of one cache's size.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Change {
    /// The disk whose cache changes its size.
    pub disk: DiskId,
    /// Number of segments before the change.
    pub from: u64,
    /// Number of segments after the change.
    pub to: u64,
}

/// Findings of a repartitioning about one cache.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Status {
    /// The size with the highest total value, segments.
    pub target: u64,
    /// Recent number of reads of the disk per second.
    pub rate: f64,
    /// Estimated recent hit ratio at the current size.
    pub hit_ratio: f64,
    /// Estimated additional hits per second with 1/[`CHANGE_MIN_PART`] more capacity, but at least
    /// one more segment.
    pub more_hits: f64,
    /// Estimated hits per second at the current size, minus the estimated hits per second if all
    /// caches had equal sizes.
    pub gained_hits: f64,
}

/// Result of one repartitioning: how the caches of a pool change their sizes.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Repartition {
    /// Changes of sizes: first the caches that release segments, then those that receive segments.
    pub changes: Vec<Change>,
    /// Findings about each cache, in the order of the members.
    pub members: Vec<Status>,
}

/// Divides the shared capacity of one pool among its caches.
#[derive(Clone, Debug)]
pub struct Partitioner {
    segment_bytes: u64,
    last: Option<Instant>,
    demands: BTreeMap<DiskId, Demand>,
}

impl Partitioner {
    /// Creates the partitioner of a pool with segments of this size.
    pub fn new(segment_bytes: u64) -> Partitioner {
        Partitioner { segment_bytes, last: None, demands: BTreeMap::new() }
    }

    /// Decides on the next changes. `capacity` is the number of free segments plus the segments of
    /// all members.
    pub fn round(&mut self, now: Instant, capacity: u64, members: &[Member<'_>]) -> Repartition {
        let elapsed_ns = self.last.map_or(PERIOD_NS, |last| now - last).max(1);
        self.last = Some(now);
        self.demands.retain(|disk, _| members.iter().any(|member| member.disk == *disk));
        for member in members {
            let demand = self.demands.entry(member.disk).or_default();
            demand.update(elapsed_ns, self.segment_bytes, member);
        }
        let have: Vec<u64> = members.iter().map(|member| member.segments).collect();
        let free = capacity.saturating_sub(have.iter().sum());
        let cost = typical_cost(members);
        let bidder = |member: &Member<'_>| self.demands[&member.disk].bidder(member, (capacity, free), cost);
        let bidders: Vec<Bidder> = members.iter().map(bidder).collect();
        let mut targets = allocate(capacity, &bidders);
        keep_what_nobody_values(capacity, &have, &bidders, &mut targets);
        self.share_spare(capacity, members, &bidders, &mut targets);
        let part = capacity / members.len().max(1) as u64;
        let status = |(member, target): (&Member<'_>, &u64)| {
            self.demands[&member.disk].status(member.segments, *target, part)
        };
        let statuses = members.iter().zip(&targets).map(status).collect();
        let sizes = steps(capacity, &have, &targets, &bidders);
        let changed = |(member, to): (&Member<'_>, u64)| {
            (to != member.segments).then_some(Change { disk: member.disk, from: member.segments, to })
        };
        let mut changes: Vec<Change> = members.iter().zip(sizes).filter_map(changed).collect();
        changes.sort_by_key(|change| change.to > change.from);
        Repartition { changes, members: statuses }
    }

    /// Assigns segments that raise the value of no cache to caches that have misses, in proportion
    /// to misses times shares. These segments may help a new working set, which no curve shows
    /// before the working set is read for the second time.
    fn share_spare(&self, capacity: u64, members: &[Member<'_>], bidders: &[Bidder], targets: &mut [u64]) {
        let mut spare = capacity.saturating_sub(targets.iter().sum());
        let weight = |i: usize, target: u64| {
            let demand = &self.demands[&members[i].disk];
            demand.misses(target) * f64::from(members[i].limits.shares)
        };
        for _ in 0..members.len() {
            let open: Vec<(usize, f64)> = (0..members.len())
                .filter(|&i| targets[i] < bidders[i].most)
                .map(|i| (i, weight(i, targets[i])))
                .filter(|(_, weight)| *weight > 0.0)
                .collect();
            let total: f64 = open.iter().map(|(_, weight)| weight).sum();
            let before = spare;
            for (i, weight) in open {
                let part = (before as f64 * weight / total).ceil() as u64;
                let more = part.min(spare).min(bidders[i].most - targets[i]);
                targets[i] += more;
                spare -= more;
            }
            if spare == 0 || spare == before {
                return;
            }
        }
    }
}

/// Returns the mean cost of a miss, over the caches whose cost is known. For caches with few
/// backing I/Os, the partitioner uses this cost.
fn typical_cost(members: &[Member<'_>]) -> f64 {
    let known: Vec<u64> = members.iter().map(|member| member.miss_cost_ns).filter(|cost| *cost > 0).collect();
    match known.len() {
        0 => 1.0,
        count => known.iter().sum::<u64>() as f64 / count as f64,
    }
}

/// Lets caches keep their segments as far as no cache needs them for its target size.
fn keep_what_nobody_values(capacity: u64, have: &[u64], bidders: &[Bidder], targets: &mut [u64]) {
    let mut spare = capacity.saturating_sub(targets.iter().sum());
    for (i, target) in targets.iter_mut().enumerate() {
        let kept = have[i].min(bidders[i].most).saturating_sub(*target).min(spare);
        *target += kept;
        spare -= kept;
    }
}

/// Returns the sizes after this repartitioning, which lead from `have` towards `targets` within the
/// bounds.
fn steps(capacity: u64, have: &[u64], targets: &[u64], bidders: &[Bidder]) -> Vec<u64> {
    let total = |sizes: &[u64]| -> f64 {
        bidders.iter().zip(sizes).map(|(bidder, size)| bidder.value_at(*size)).sum()
    };
    let present = total(have);
    let change = |grows: bool| -> f64 {
        let is_meant = |&i: &usize| (targets[i] > have[i]) == grows;
        let value = |i: usize| (bidders[i].value_at(targets[i]) - bidders[i].value_at(have[i])).abs();
        (0..have.len()).filter(is_meant).map(value).sum()
    };
    let (gain, loss) = (change(true), change(false));
    let is_worth_it =
        gain - loss > GAIN_MIN * present || gain > IDLE_GAIN_MIN * present && loss < gain * IDLE_LOSS_MAX;
    let must_grow = |i: usize| have[i] < bidders[i].least;
    let must_shrink = |i: usize| have[i] > bidders[i].most;
    let is_large = |i: usize| have[i].abs_diff(targets[i]) >= (have[i] / CHANGE_MIN_PART).max(1);
    let slope = |i: usize| {
        let change = (bidders[i].value_at(targets[i]) - bidders[i].value_at(have[i])).abs();
        (change / have[i].abs_diff(targets[i]).max(1) as f64, i)
    };
    let mut receivers: Vec<usize> =
        (0..have.len()).filter(|&i| targets[i] > have[i] && (must_grow(i) || is_large(i))).collect();
    receivers.sort_by(|&a, &b| {
        let order = slope(b).0.total_cmp(&slope(a).0);
        must_grow(b).cmp(&must_grow(a)).then(order).then(a.cmp(&b))
    });
    let mut donors: Vec<usize> =
        (0..have.len()).filter(|&i| targets[i] < have[i] && (must_shrink(i) || is_large(i))).collect();
    donors.sort_by(|&a, &b| {
        must_shrink(b).cmp(&must_shrink(a)).then(slope(a).0.total_cmp(&slope(b).0)).then(a.cmp(&b))
    });
    let mut sizes = have.to_vec();
    let mut free = capacity.saturating_sub(have.iter().sum());
    let missing: u64 = receivers.iter().map(|&i| targets[i] - have[i]).sum();
    let required: u64 =
        receivers.iter().filter(|&&i| must_grow(i)).map(|&i| bidders[i].least - have[i]).sum();
    let wanted = if is_worth_it { missing } else { required };
    let part = if gain > GAIN_LARGE * loss { MOVE_LARGE_PART } else { MOVE_MAX_PART };
    let mut may_take = wanted.saturating_sub(free).min((capacity / part).max(1));
    for i in donors {
        let surplus = have[i] - targets[i];
        let forced = have[i].saturating_sub(bidders[i].most);
        let take = surplus.min(may_take).max(forced);
        sizes[i] -= take;
        free += take;
        may_take = may_take.saturating_sub(take);
    }
    for i in receivers {
        let more = (targets[i] - have[i]).min(free);
        sizes[i] += more;
        free -= more;
    }
    sizes
}
