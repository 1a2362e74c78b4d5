//! Compares allocations with dynamic programming, and runs a pool in virtual time.

use proptest::prelude::*;

use super::*;
use crate::sizing::CurvePoint;

const SEGMENT_BYTES: u64 = 1 << 20;
const BLOCK_BYTES: u64 = 4096;
const SEGMENT_BLOCKS: u64 = SEGMENT_BYTES / BLOCK_BYTES;

fn total(bidders: &[Bidder], sizes: &[u64]) -> f64 {
    bidders.iter().zip(sizes).map(|(bidder, size)| bidder.value_at(*size)).sum()
}

/// Returns the highest total value of any sizes within the limits, by dynamic programming.
fn optimum(capacity: u64, bidders: &[Bidder]) -> f64 {
    let mut best = vec![0.0; capacity as usize + 1];
    for bidder in bidders {
        let value = |have: usize, size: u64| -> f64 { best[have - size as usize] + bidder.value_at(size) };
        best = (0..best.len())
            .map(|have| {
                let sizes = bidder.least..=bidder.most.min(have as u64);
                sizes.map(|size| value(have, size)).fold(f64::NEG_INFINITY, f64::max)
            })
            .collect();
    }
    best[capacity as usize]
}

/// Returns values that rise in steps: by `up` after `across` more segments.
fn stepped(steps: &[(u64, u32)]) -> impl Fn(u64) -> f64 + use<> {
    let steps = steps.to_vec();
    move |size| {
        let mut at = 0;
        let reached = |(across, up): &(u64, u32)| {
            at += across;
            if at <= size { f64::from(*up) } else { 0.0 }
        };
        steps.iter().map(reached).sum()
    }
}

fn sloped(slopes: &[u32]) -> impl Fn(u64) -> f64 + use<> {
    let mut slopes = slopes.to_vec();
    slopes.sort_unstable_by(|a, b| b.cmp(a));
    move |size| slopes.iter().take(size as usize).map(|up| f64::from(*up)).sum()
}

proptest! {
    #[test]
    fn concave_values_are_divided_optimally(
        disks in prop::collection::vec((prop::collection::vec(0u32..50, 1..40), 0u64..4, 0u64..40), 1..6),
        capacity in 20u64..64,
    ) {
        let bidders: Vec<Bidder> = disks
            .iter()
            .map(|(slopes, least, more)| Bidder::new(*least, least + more, sloped(slopes)))
            .collect();
        let sizes = allocate(capacity, &bidders);
        prop_assert!(sizes.iter().sum::<u64>() <= capacity);
        for (bidder, size) in bidders.iter().zip(&sizes) {
            prop_assert!((bidder.least..=bidder.most).contains(size));
        }
        prop_assert!((total(&bidders, &sizes) - optimum(capacity, &bidders)).abs() < 1e-6);
    }

    /// Disks with loops: the hull of a curve promises hits that only a whole step of the curve
    /// adds.
    #[test]
    fn steps_are_divided_nearly_optimally(
        disks in prop::collection::vec(prop::collection::vec((1u64..20, 0u32..50), 1..6), 1..6),
        capacity in 1u64..64,
    ) {
        let bidders: Vec<Bidder> =
            disks.iter().map(|steps| Bidder::new(0, 63, stepped(steps))).collect();
        let sizes = allocate(capacity, &bidders);
        prop_assert!(sizes.iter().sum::<u64>() <= capacity);
        let largest_hull_edge = bidders
            .iter()
            .flat_map(|bidder| (0..63).map(|size| bidder.value_at(size + 1) - bidder.value_at(size)))
            .fold(0.0, f64::max);
        let lost = optimum(capacity, &bidders) - total(&bidders, &sizes);
        prop_assert!(lost <= 6.0 * largest_hull_edge + 1e-6, "{} lost", lost);
        // Never worse than half of the optimum.
        prop_assert!(2.0 * total(&bidders, &sizes) >= optimum(capacity, &bidders) - 1e-6, "{} lost", lost);
    }
}

#[test]
fn a_loop_gets_all_of_its_room_or_none() {
    let loop_of = |size: u64, value: u32| Bidder::new(0, 60, stepped(&[(size, value)]));
    assert_eq!(allocate(50, &[loop_of(30, 100), loop_of(30, 90)]), [30, 0]);
    assert_eq!(allocate(60, &[loop_of(30, 100), loop_of(30, 90)]), [30, 30]);
    // A small loop with more hits per segment must not displace a large one with more hits.
    assert_eq!(allocate(13, &[loop_of(1, 3), loop_of(13, 7)]), [0, 13]);
    // The best edge does not fit; two smaller ones do.
    assert_eq!(allocate(20, &[loop_of(30, 300), loop_of(10, 50), loop_of(10, 40)]), [0, 10, 10]);
}

#[test]
fn smallest_sizes_that_do_not_fit_are_cut_in_proportion() {
    let bidders = [10, 30].map(|least| Bidder::new(least, 60, |_| 0.0));
    assert_eq!(allocate(20, &bidders), [5, 15]);
}

/// A disk that reads `working_set` segments uniformly at random.
#[derive(Clone, Copy)]
struct Load {
    rate: u64,
    working_set: u64,
}

struct Disk {
    load: Load,
    accesses: u64,
    /// For each phase of the load, the number of segments that a cache needs for hits, and the
    /// number of accesses.
    phases: Vec<(u64, u64)>,
    segments: u64,
    limits: Limits,
    cost: u64,
}

impl Disk {
    fn new(rate: u64, working_set: u64) -> Disk {
        let load = Load { rate, working_set };
        Disk { load, accesses: 0, phases: vec![], segments: 0, limits: Limits::default(), cost: 1_000_000 }
    }

    fn with(mut self, limits: Limits) -> Disk {
        self.limits = limits;
        self
    }

    /// Returns the miss-ratio curve of all accesses since the start.
    fn curve(&self) -> Curve {
        let mut sizes: Vec<u64> = self.phases.iter().map(|(size, _)| *size).collect();
        sizes.sort_unstable();
        sizes.dedup();
        let hits = |size: u64| -> f64 {
            let part = |(set, count): &(u64, u64)| *count as f64 * (size as f64 / *set as f64).min(1.0);
            self.phases.iter().map(part).sum()
        };
        let total = self.accesses.max(1) as f64;
        let point = |size: u64| CurvePoint {
            blocks: size * SEGMENT_BLOCKS,
            miss_ratio: (1.0 - hits(size) / total).clamp(0.0, 1.0),
        };
        Curve::new(std::iter::once(0).chain(sizes).map(point).collect())
    }
}

struct Pool {
    now: Instant,
    capacity: u64,
    partitioner: Partitioner,
    disks: Vec<Disk>,
    moved: u64,
}

impl Pool {
    fn new(capacity: u64, disks: impl IntoIterator<Item = Disk>) -> Pool {
        let disks = disks.into_iter().collect();
        Pool { now: Instant(0), capacity, partitioner: Partitioner::new(SEGMENT_BYTES), disks, moved: 0 }
    }

    fn rounds(&mut self, count: usize) -> Repartition {
        (0..count).map(|_| self.round()).last().expect("at least one round")
    }

    fn seconds(&mut self, seconds: u64) {
        self.rounds((seconds * 1_000_000_000 / PERIOD_NS) as usize);
    }

    fn round(&mut self) -> Repartition {
        self.now = self.now + PERIOD_NS;
        for disk in &mut self.disks {
            let more = disk.load.rate * PERIOD_NS / 1_000_000_000;
            disk.accesses += more;
            disk.phases.push((disk.load.working_set, more));
        }
        let curves: Vec<Curve> = self.disks.iter().map(Disk::curve).collect();
        let members: Vec<Member> = (0..)
            .zip(self.disks.iter().zip(&curves))
            .map(|(i, (disk, curve))| Member {
                disk: DiskId(i),
                segments: disk.segments,
                dirty_segments: 0,
                limits: disk.limits,
                miss_cost_ns: disk.cost,
                reads: disk.accesses,
                accesses: disk.accesses,
                curve,
                block_bytes: BLOCK_BYTES,
            })
            .collect();
        let round = self.partitioner.round(self.now, self.capacity, &members);
        for change in &round.changes {
            let disk = &mut self.disks[change.disk.0 as usize];
            assert_eq!(disk.segments, change.from);
            disk.segments = change.to;
            self.moved += change.from.saturating_sub(change.to);
        }
        let used: u64 = self.disks.iter().map(|disk| disk.segments).sum();
        assert!(used <= self.capacity, "{used} of {}", self.capacity);
        round
    }

    fn sizes(&self) -> Vec<u64> {
        self.disks.iter().map(|disk| disk.segments).collect()
    }
}

#[test]
fn free_segments_are_handed_out_at_once() {
    let mut pool = Pool::new(100, [Disk::new(1000, 40)]);
    pool.round();
    assert!(pool.sizes()[0] >= 40, "{:?}", pool.sizes());
    // Another disk is added: its curve has no data yet, and it gets the free segments.
    let mut pool = Pool::new(100, [Disk::new(1000, 40).with(Limits { max: 50, ..Limits::default() })]);
    pool.rounds(5);
    let mut scan = Disk::new(1000, u64::MAX);
    scan.load.working_set = 1 << 40;
    pool.disks.push(scan);
    pool.round();
    assert_eq!(pool.sizes(), [40, 60]);
}

#[test]
fn a_busy_disk_takes_over_from_an_idle_one_within_30_seconds() {
    let mut pool = Pool::new(120, [Disk::new(2000, 100), Disk::new(0, 100), Disk::new(100, 10)]);
    pool.seconds(300);
    let before = pool.sizes();
    assert!(before[0] >= 95, "{before:?}");
    assert!(pool.disks[1].segments <= 10, "{before:?}");
    pool.disks[0].load.rate = 0;
    pool.disks[1].load.rate = 2000;
    pool.seconds(30);
    let after = pool.sizes();
    assert!(after[1] >= 90, "{after:?}");
    pool.seconds(120);
    assert!(
        pool.disks[0].segments <= 100 / 8,
        "an idle disk shrinks as far as others gain: {:?}",
        pool.sizes()
    );
    assert!(pool.disks[1].segments >= 95);
    assert!(pool.disks[2].segments >= 9);
}

#[test]
fn a_large_gain_moves_more_of_the_capacity_at_once() {
    let mut pool = Pool::new(46, [420, 420, 0, 0].map(|rate| Disk::new(rate, 24)));
    pool.seconds(300);
    let before = pool.sizes();
    assert!(before[0] + before[1] >= 42, "{before:?}");
    for disk in &mut pool.disks {
        disk.load.rate = 420 - disk.load.rate;
    }
    // 10 s until the new rates are higher than the old ones, and 4 rounds.
    pool.seconds(18);
    let after = pool.sizes();
    assert!(after[2] + after[3] >= 36, "{after:?}");
}

#[test]
fn gains_below_the_error_of_the_curves_move_nothing() {
    let mut pool = Pool::new(100, [Disk::new(1000, 20_000), Disk::new(0, 20_000)]);
    pool.seconds(60);
    let (moved, sizes) = (pool.moved, pool.sizes());
    // The disks are busy by turns, and a cache of the whole pool would have 0.5 % hits.
    for _ in 0..6 {
        for disk in &mut pool.disks {
            disk.load.rate = 1000 - disk.load.rate;
        }
        for i in 0..30 {
            for disk in &mut pool.disks {
                disk.load.working_set = [16_000, 24_000][i % 2];
            }
            pool.round();
        }
    }
    assert_eq!((pool.moved, pool.sizes()), (moved, sizes));
}

#[test]
fn a_cache_grows_only_as_far_as_its_load_lasts_to_fill_it() {
    let mut pool = Pool::new(100, [Disk::new(40, 100), Disk::new(0, 100)]);
    pool.seconds(600);
    assert!(pool.sizes()[0] >= 95, "{:?}", pool.sizes());
    pool.disks[0].load.rate = 0;
    pool.disks[1].load.rate = 40;
    // The misses of the disk fill 10 segments in this time.
    pool.seconds(60);
    assert!(pool.sizes()[1] <= 30, "{:?}", pool.sizes());
    pool.seconds(3600);
    assert!(pool.sizes()[1] >= 85, "{:?}", pool.sizes());
}

#[test]
fn a_steady_load_does_not_move_segments() {
    let mut pool = Pool::new(100, [Disk::new(1000, 80), Disk::new(900, 60), Disk::new(300, 30)]);
    pool.seconds(120);
    let (moved, sizes) = (pool.moved, pool.sizes());
    for i in 0..300 {
        // A tenth more and less.
        for disk in &mut pool.disks {
            disk.load.rate =
                disk.load.rate * if i % 2 == 0 { 11 } else { 10 } / if i % 2 == 0 { 10 } else { 11 };
        }
        pool.round();
    }
    assert_eq!((pool.moved, pool.sizes()), (moved, sizes));
}

#[test]
fn limits_go_before_values() {
    let limits = |min, max| Limits { min, max, ..Limits::default() };
    let mut pool = Pool::new(
        100,
        [
            Disk::new(1000, 100).with(limits(1, 30)),
            Disk::new(0, 100).with(limits(20, 100)),
            Disk::new(10, 100),
        ],
    );
    pool.seconds(120);
    assert_eq!(pool.sizes(), [30, 20, 50]);
    // A pinned cache keeps its size under any load.
    pool.disks[2].limits.pinned = true;
    pool.disks[2].load.rate = 0;
    pool.disks[0].limits.max = 100;
    pool.seconds(300);
    assert_eq!(pool.sizes(), [30, 20, 50]);
    // New limits are enforced even without a gain.
    pool.disks[2].limits = limits(1, 10);
    pool.disks[1].limits = limits(40, 100);
    pool.seconds(60);
    assert!(pool.sizes()[2] <= 10, "{:?}", pool.sizes());
    assert!(pool.sizes()[1] >= 40);
}

#[test]
fn shares_and_latency_weigh_hits() {
    for (shares, cost) in [(8000, 1_000_000), (1000, 8_000_000)] {
        let mut pool = Pool::new(100, [Disk::new(1000, 90), Disk::new(1000, 90)]);
        pool.disks[1].limits.shares = shares;
        pool.disks[1].cost = cost;
        pool.seconds(120);
        assert!(pool.sizes()[1] >= 85, "{:?}", pool.sizes());
    }
}

#[test]
fn dirty_data_keeps_its_room() {
    let curve = Curve::new(vec![CurvePoint { blocks: 0, miss_ratio: 1.0 }]);
    let busy = Curve::new(vec![
        CurvePoint { blocks: 0, miss_ratio: 1.0 },
        CurvePoint { blocks: 100 * SEGMENT_BLOCKS, miss_ratio: 0.0 },
    ]);
    let member = |disk, segments, dirty_segments, accesses| Member {
        disk: DiskId(disk),
        segments,
        dirty_segments,
        limits: Limits::default(),
        miss_cost_ns: 0,
        reads: accesses,
        accesses,
        curve: if accesses == 0 { &curve } else { &busy },
        block_bytes: BLOCK_BYTES,
    };
    let mut partitioner = Partitioner::new(SEGMENT_BYTES);
    let (mut have, mut now) = (vec![100, 0], Instant(0));
    for i in 1..100 {
        now = now + PERIOD_NS;
        let members = [member(0, have[0], 40, 0), member(1, have[1], 0, i * 1000)];
        for change in partitioner.round(now, 100, &members).changes {
            have[change.disk.0 as usize] = change.to;
        }
    }
    assert_eq!(have, [40, 60]);
}

#[test]
fn five_hundred_disks_take_milliseconds_and_little_memory() {
    let disks = (0..500).map(|i| Disk::new(10 + i, 5 + i % 50));
    let mut pool = Pool::new(4000, disks);
    let round = pool.rounds(20);
    assert_eq!(round.members.len(), 500);
    assert!(pool.sizes().iter().all(|size| *size >= 1));
    assert_eq!(pool.sizes().iter().sum::<u64>(), 4000);
    // Between two rounds, a disk keeps two values for each grid point.
    assert!(allocate::GRID.len() < 700, "{}", allocate::GRID.len());
}
