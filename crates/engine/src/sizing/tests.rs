//! Compares sizing with slow and obvious models.

use proptest::prelude::*;

use super::shards::scatter;
use super::*;
use crate::io::{Durability, Op, PayloadMemory, Promote, Request};
use crate::units::{BufferId, DiskId, Instant, RequestId};

/// Simulates LRU with a plain stack. Returns for each access the smallest cache size with which the
/// access hits.
fn distances(blocks: impl IntoIterator<Item = u64>) -> Vec<Option<u64>> {
    let mut stack: Vec<u64> = Vec::new();
    let mut distance_of = |block| {
        let depth = stack.iter().rev().position(|other| *other == block);
        if let Some(depth) = depth {
            stack.remove(stack.len() - 1 - depth);
        }
        stack.push(block);
        depth.map(|depth| depth as u64 + 1)
    };
    blocks.into_iter().map(&mut distance_of).collect()
}

fn curve_of(points: &[(u64, f64)]) -> Curve {
    Curve::new(points.iter().map(|&(blocks, miss_ratio)| CurvePoint { blocks, miss_ratio }).collect())
}

proptest! {
    #[test]
    fn a_timeline_keeps_order_and_ranks(steps in prop::collection::vec((0u32..70, 0u8..8), 0..2000)) {
        let mut line = Timeline::new(8);
        let mut room = 8;
        let mut slots = vec![None; 70];
        let mut model: Vec<u32> = Vec::new();
        for (member, what) in steps {
            if let Some(slot) = slots[member as usize].take() {
                let at = model.iter().position(|other| *other == member).unwrap();
                prop_assert_eq!(line.younger(slot) as usize, model.len() - 1 - at);
                model.remove(at);
                line.remove(slot);
            }
            if what > 0 {
                if line.len() == room {
                    room *= 2;
                    line = line.with_room(room, |member, slot| slots[member as usize] = Some(slot));
                }
                let slot = line.push(member, |member, slot| slots[member as usize] = Some(slot));
                slots[member as usize] = Some(slot);
                model.push(member);
            }
            prop_assert_eq!(line.len() as usize, model.len());
            prop_assert_eq!(line.oldest(), model.first().map(|&m| (m, slots[m as usize].unwrap())));
        }
    }

    #[test]
    fn with_every_block_a_sample_the_curve_is_exact(
        accesses in prop::collection::vec((0u64..200, 0u32..4), 1..1500), by_size in any::<bool>(),
    ) {
        let mut shards = if by_size { Shards::fixed_size(256) } else { Shards::fixed_rate(1.0, 1000) };
        accesses.iter().for_each(|&(block, weight)| shards.access(block << 20, weight));
        let total: u64 = accesses.iter().map(|&(_, weight)| u64::from(weight)).sum();
        let distances = distances(accesses.iter().map(|&(block, _)| block));
        let curve = shards.curve();
        for size in 0..=201 {
            let hit = |distance: &Option<u64>| distance.is_some_and(|distance| distance <= size);
            let hits: u64 =
                distances.iter().zip(&accesses).filter(|(d, _)| hit(d)).map(|(_, a)| u64::from(a.1)).sum();
            let misses = if total == 0 { 1.0 } else { 1.0 - hits as f64 / total as f64 };
            prop_assert!((curve.miss_ratio_at(size) - misses).abs() < 1e-9, "at {}: {:?}", size, curve);
        }
    }

    #[test]
    fn a_size_for_a_hit_ratio_is_the_smallest(
        falls in prop::collection::vec((1u64..50, 0u32..20), 1..30), hit_ratio in 0.0..1.0,
    ) {
        let mut points = vec![(0, 1.0)];
        for (across, down) in falls {
            let (blocks, miss_ratio) = points[points.len() - 1];
            points.push((blocks + across, f64::max(0.0, miss_ratio - f64::from(down) / 100.0)));
        }
        let curve = curve_of(&points);
        let end = points[points.len() - 1].0;
        let slow = (0..=end).find(|blocks| 1.0 - curve.miss_ratio_at(*blocks) >= hit_ratio);
        prop_assert_eq!(curve.size_for(hit_ratio), slow);
        for (blocks, miss_ratio) in points {
            prop_assert!(curve.size_for(1.0 - miss_ratio).is_some_and(|found| found <= blocks));
        }
    }
}

#[test]
fn curves_are_read_between_their_points() {
    let curve = curve_of(&[(0, 1.0), (10, 0.5), (19, 0.5), (20, 0.25)]);
    let read = [0, 5, 10, 15, 19, 20, u64::MAX].map(|blocks| curve.miss_ratio_at(blocks));
    assert_eq!(read, [1.0, 0.75, 0.5, 0.5, 0.5, 0.25, 0.25]);
    assert_eq!([0.0, 0.25, 0.5, 0.6, 0.75].map(|hits| curve.size_for(hits)), [0, 5, 10, 20, 20].map(Some));
    assert_eq!(curve.size_for(0.76), None);
    assert_eq!(curve_of(&[(0, 1.0)]).miss_ratio_at(7), 1.0);
}

#[test]
fn the_knee_is_where_more_buys_little() {
    let knee = |points: &[(u64, f64)]| curve_of(points).knee().map(|point| point.blocks);
    assert_eq!(knee(&[(0, 1.0), (100, 0.2), (1000, 0.1)]), Some(100));
    // A loop: no hits until the whole loop fits.
    assert_eq!(knee(&[(0, 1.0), (499, 1.0), (500, 0.01)]), Some(500));
    // A loop, and many blocks with few uses.
    assert_eq!(knee(&[(0, 1.0), (99, 1.0), (100, 0.3), (5000, 0.25)]), Some(100));
    // Two working sets; the second is worth its blocks.
    assert_eq!(knee(&[(0, 1.0), (10, 0.9), (299, 0.9), (300, 0.1), (10_000, 0.05)]), Some(300));
    assert_eq!(knee(&[(0, 1.0)]), None);
}

#[test]
fn a_fixed_size_keeps_its_size_and_adapts_its_rate() {
    let mut shards = Shards::fixed_size(SAMPLES_MAX);
    let bytes = shards.bytes();
    assert!(bytes <= 1_000_000, "{bytes} bytes");
    for block in 0..2_000_000u64 {
        shards.access(block * 3, 1);
        assert!(shards.samples() <= SAMPLES_MAX);
        assert!(block < u64::from(SAMPLES_MAX) || shards.samples() > SAMPLES_MAX / 8 * 7 - 100);
    }
    assert_eq!(shards.bytes(), bytes);
    let kept = shards.rate() * 2_000_000.0;
    assert!((kept / f64::from(shards.samples()) - 1.0).abs() < 0.02, "{kept} for {}", shards.samples());
}

#[test]
fn a_fixed_rate_samples_its_share_of_any_extent() {
    for (start, stride) in
        [(0, 1), (1 << 40, 1), (77, 8), (5, 64), (9, 4096), (3, 1 << 20), (0, 4181), (1, 6765)]
    {
        let mut shards = Shards::fixed_rate(0.01, 1 << 40);
        (0..100_000).for_each(|i| shards.access(start + i * stride, 1));
        let off = f64::from(shards.samples()) / 1000.0 - 1.0;
        assert!(off.abs() < 0.1, "{} samples at stride {stride}", shards.samples());
    }
}

#[test]
fn a_fixed_rate_is_bounded_by_the_largest_cache_of_interest() {
    let mut shards = Shards::fixed_rate(0.1, 10_000);
    // A loop that fits and one that does not.
    for _ in 0..20 {
        (0..5000).for_each(|block| shards.access(block, 1));
    }
    (0..20 * 5000).for_each(|i| shards.access(1_000_000 + i % 50_000, 1));
    assert_eq!(shards.samples(), 1000);
    assert!(shards.bytes() < 300_000, "{} bytes", shards.bytes());
    let curve = shards.curve();
    assert!((curve.miss_ratio_at(5_050) - 0.525).abs() < 0.02, "{:?}", curve.knee());
    assert!((curve.miss_ratio_at(10_000) - 0.525).abs() < 0.02);
}

#[test]
fn the_same_accesses_give_the_same_curve() {
    let run = |seed: Option<u64>| {
        let mut shards = Shards::fixed_size(500);
        if let Some(seed) = seed {
            shards = shards.with_seed(seed);
        }
        (0..200_000u64).for_each(|i| shards.access(scatter(i) % (1 + i % 20_000), 1 + (i % 3) as u32));
        shards.curve()
    };
    assert_eq!(run(None), run(None));
    assert_eq!(run(Some(4)), run(Some(4)));
    assert_ne!(run(Some(4)), run(Some(5)));
}

#[test]
fn few_blocks_are_sampled_more_closely() {
    let mut shards = Shards::fixed_rate(0.01, 1 << 40).with_samples_min(1000);
    let mut seen = 0;
    let expected =
        [(500u64, 500..=500u32), (20_000, 850..=1000), (90_000, 850..=1000), (500_000, 4950..=5050)];
    for (blocks, samples) in expected {
        (seen..blocks).for_each(|block| shards.access(block, 1));
        seen = blocks;
        assert!(samples.contains(&shards.samples()), "{} of {blocks}", shards.samples());
    }
    assert_eq!(shards.rate(), Shards::fixed_rate(0.01, 1).rate());
}

/// Hot blocks that are not sampled must be distinguished from sampled blocks with one use.
#[test]
fn unsampled_hot_blocks_are_accounted_for() {
    // One block, not sampled, has a third of the accesses; the others are used once.
    let mut shards = Shards::fixed_rate(0.01, 1 << 30);
    (0..600_000u64).for_each(|i| shards.access(if i % 3 == 0 { 12_345 } else { 1_000_000 + i }, 1));
    let missed = shards.curve().miss_ratio_at(1000);
    assert!((missed - 2.0 / 3.0).abs() < 0.02, "{missed}");
    // No block is used twice: no seed may show hits.
    for seed in 0..20 {
        let mut shards = Shards::fixed_rate(0.01, 1 << 30).with_seed(seed);
        (0..100_000u64).for_each(|i| shards.access(i * 999, 1));
        assert!(shards.curve().miss_ratio_at(u64::MAX) > 0.97, "seed {seed}");
    }
}

proptest! {
    #[test]
    fn a_thinned_curve_is_near_at_every_size(
        falls in prop::collection::vec((1u64..40, 0u32..60), 1..120), off_max in 0.0..0.1,
    ) {
        let mut points = vec![(0, 1.0)];
        for (across, down) in falls {
            let (blocks, miss_ratio) = points[points.len() - 1];
            points.push((blocks + across, f64::max(0.0, miss_ratio - f64::from(down) / 2000.0)));
        }
        let curve = curve_of(&points);
        let thin = curve.thinned(off_max);
        prop_assert!(Curve::checked(thin.points().to_vec()).is_ok());
        prop_assert!(thin.points().iter().all(|point| curve.points().contains(point)));
        for blocks in 0..=points[points.len() - 1].0 + 1 {
            let off = thin.miss_ratio_at(blocks) - curve.miss_ratio_at(blocks);
            prop_assert!(off.abs() <= off_max + 1e-9, "{} off at {}", off, blocks);
        }
    }

    /// If every block is sampled and its sectors are tracked, the curve has the miss ratio of an
    /// LRU cache of each size.
    #[test]
    fn sectors_are_followed_as_a_cache_does(
        accesses in prop::collection::vec((0u64..12, 0usize..4, 1usize..5, 0u8..4), 1..400),
    ) {
        let mut sampler = Sampler::<4>::fixed_size(64);
        for (block, first, count, what) in &accesses {
            let sectors = *first..(first + count).min(4);
            match what {
                0 => sampler.invalidate(*block, sectors),
                1 => sampler.access_sectors(*block, sectors, 0),
                _ => sampler.access_sectors(*block, sectors, 1),
            }
        }
        let curve = sampler.curve();
        let reads = accesses.iter().filter(|access| access.3 > 1).count();
        for size in 1..=13_u64 {
            let mut cache = PlainCache { blocks: Vec::new(), size: size as usize };
            let hits = accesses.iter().filter(|access| cache.access(access)).count();
            let misses = if reads == 0 { 1.0 } else { 1.0 - hits as f64 / reads as f64 };
            prop_assert!((curve.miss_ratio_at(size) - misses).abs() < 1e-9, "at {}: {} of {}", size, hits, reads);
        }
    }
}

/// An LRU cache of blocks with four sectors, most recently used last.
struct PlainCache {
    blocks: Vec<(u64, [bool; 4])>,
    size: usize,
}

impl PlainCache {
    /// Returns true if the access was a read that hit.
    fn access(&mut self, (block, first, count, what): &(u64, usize, usize, u8)) -> bool {
        let sectors = *first..(first + count).min(4);
        let at = self.blocks.iter().position(|(other, _)| other == block);
        if *what == 0 {
            if let Some(at) = at {
                self.blocks[at].1[sectors].fill(false);
            }
            return false;
        }
        let (_, mut valid) = at.map_or((*block, [false; 4]), |at| self.blocks.remove(at));
        let is_hit = valid[sectors.clone()].iter().all(|valid| *valid);
        valid[sectors].fill(true);
        if self.blocks.len() == self.size {
            self.blocks.remove(0);
        }
        self.blocks.push((*block, valid));
        *what > 1 && is_hit
    }
}

#[test]
fn points_from_elsewhere_are_looked_at() {
    let checked = |points: &[(u64, f64)]| {
        let points = points.iter().map(|&(blocks, miss_ratio)| CurvePoint { blocks, miss_ratio }).collect();
        Curve::checked(points).map(|curve| curve.points().len()).map_err(|error| error.to_string())
    };
    assert_eq!(checked(&[(0, 1.0), (5, 1.0), (6, 0.0)]), Ok(3));
    for points in
        [&[][..], &[(1, 1.0)], &[(0, 1.5)], &[(0, f64::NAN)], &[(0, 0.5), (1, 0.6)], &[(0, 1.0), (0, 0.5)]]
    {
        assert!(checked(points).unwrap_err().contains("not a miss-ratio curve"), "{points:?}");
    }
}

#[test]
fn each_disk_spends_less_than_a_megabyte() {
    let mut live = Live::new(Instant(0));
    let bytes = live.report(Instant(0)).bytes;
    assert!(bytes <= 1_000_000, "{bytes} bytes");
    let request = |op: Op, offset, len| {
        let buffer = op.has_buffer().then_some(BufferId(0));
        Request {
            id: RequestId(0),
            disk: DiskId(0),
            op,
            offset,
            len,
            buffer,
            promote: Promote::Usual,
            memory: PayloadMemory::Daemon,
        }
    };
    for i in 0..300_000 {
        let op =
            [Op::Read, Op::Write(Durability::Volatile), Op::Discard(Durability::Volatile)][i as usize % 3];
        live.note(&request(op, scatter(i) % (1 << 45), 512 + scatter(i ^ 1) % (1 << 18)));
    }
    let report = live.report(Instant(9));
    assert_eq!((report.bytes, report.elapsed_ns), (bytes, 9), "and no more later");
    assert!(
        report
            .block_sizes
            .iter()
            .all(|size| size.samples <= LIVE_SAMPLES && size.samples > LIVE_SAMPLES * 7 / 8 - 9)
    );
}

#[test]
fn a_request_counts_in_each_block_that_it_touches() {
    let mut live = Live::new(Instant(0));
    let mut ask = |op: Op, offset, len| {
        let buffer = op.has_buffer().then_some(BufferId(0));
        live.note(&Request {
            id: RequestId(0),
            disk: DiskId(0),
            op,
            offset,
            len,
            buffer,
            promote: Promote::Usual,
            memory: PayloadMemory::Daemon,
        });
    };
    let write = Op::Write(Durability::Volatile);
    ask(Op::Read, 60 << 10, 8 << 10);
    ask(Op::Read, 60 << 10, 8 << 10);
    // Written in part: not valid. Written completely: valid. Written and discarded: not valid.
    ask(write, (60 << 10) + 512, 512);
    ask(Op::Read, 60 << 10, 512);
    ask(write, (1 << 20) - 512, (8 << 10) + 1024);
    ask(Op::Read, 1 << 20, 8 << 10);
    ask(Op::Read, (1 << 20) - 4096, 4096);
    ask(write, 2 << 20, 4096);
    ask(Op::Discard(Durability::Volatile), 2 << 20, 512);
    ask(Op::Read, 2 << 20, 4096);
    ask(Op::Flush, 0, 0);
    let report = live.report(Instant(0));
    let seen = report.seen;
    assert_eq!((seen.reads, seen.writes, seen.read_bytes), (6, 3, 16_384 + 512 + 8192 + 4096 + 4096));
    let found: Vec<_> = report.block_sizes.iter().map(|size| (size.block_bytes, size.accesses)).collect();
    assert_eq!(found, BLOCK_SIZES.into_iter().zip([9, 8, 8]).collect::<Vec<_>>());
    let misses = report.block_sizes.iter().map(|size| size.curve.miss_ratio_at(100) * size.accesses as f64);
    let misses: Vec<f64> = misses.map(f64::round).collect();
    // Misses: the first read's two sectors, the sector written in part, the one before the written ones,
    // and the discarded one.
    assert_eq!(misses, [5.0, 5.0, 5.0]);
}

/// Warm-up is over when recent reads access no new blocks, whatever the totals are.
#[test]
fn recent_reads_forget_the_warm_up() {
    const BLOCKS: u64 = 1000;
    let mut live = Live::new(Instant(0));
    let note = |live: &mut Live, op: Op, block: u64| {
        live.note(&Request {
            id: RequestId(0),
            disk: DiskId(0),
            op,
            offset: block * 4096,
            len: 4096,
            buffer: Some(BufferId(0)),
            promote: Promote::Usual,
            memory: PayloadMemory::Daemon,
        });
    };
    let read = |live: &mut Live, block: u64| note(live, Op::Read, block);
    (0..BLOCKS).for_each(|block| read(&mut live, block));
    note(&mut live, Op::Write(Durability::Volatile), 0);
    let recent = live.report(Instant(0)).recent;
    assert_eq!((recent.reads, recent.read_hits, recent.first_share), (BLOCKS, 0, 1.0));
    assert_eq!((recent.read_bytes, recent.write_bytes), (BLOCKS * 4096, 4096));
    for i in 0..3 * WINDOW_READS {
        read(&mut live, i % BLOCKS);
        live.hit();
    }
    let report = live.report(Instant(0));
    assert!((WINDOW_READS..2 * WINDOW_READS).contains(&report.recent.reads), "{:?}", report.recent);
    assert_eq!((report.recent.read_hits, report.recent.first_share), (report.recent.reads, 0.0));
    assert_eq!((report.recent.read_bytes, report.recent.write_bytes), (report.recent.reads * 4096, 0));
    assert!(report.seen.read_hits < report.seen.reads);
}
