//! Compares curves with simulations of one size each, and samples with exact curves.

use std::collections::BTreeSet;

use hob_engine::sizing::{Curve, SAMPLES_MAX};
use hob_engine::units::SECTOR_BYTES;
use proptest::prelude::*;

use super::stack::Stack;
use super::steps::Steps;
use super::*;
use crate::prng::Prng;

fn record(op: Op, offset: u64, len: u32) -> Record {
    Record { at_ns: 0, offset, len, op, disk: 0 }
}

/// Returns the exact LRU miss-ratio curve of block accesses with weights.
fn exact_accesses(accesses: impl IntoIterator<Item = (u64, u32)>) -> Result<Curve> {
    let mut stack = Stack::new(0);
    let mut hits = Steps::default();
    let mut total = 0;
    for (block, weight) in accesses {
        let member = stack.enter(block)?;
        total += u64::from(weight);
        hits.add(stack.distance(member), i64::from(weight));
        stack.touch(member);
    }
    Ok(hits.finish().miss_curve(total))
}

/// An LRU cache of one size, implemented directly from the documentation of the exact curves.
struct Naive {
    blocks_max: usize,
    sectors_per_block: u64,
    mode: Mode,
    /// Least recently used first: block, valid sectors, dirty sectors.
    blocks: Vec<(u64, BTreeSet<u64>, BTreeSet<u64>)>,
    at: At,
}

impl Naive {
    fn new(blocks: u64, block_bytes: u64, mode: Mode) -> Self {
        let at = At { blocks, ..At::default() };
        let sectors_per_block = block_bytes / SECTOR_BYTES;
        Naive { blocks_max: blocks as usize, sectors_per_block, mode, blocks: Vec::new(), at }
    }

    fn block(&mut self, sector: u64) -> Option<&mut (u64, BTreeSet<u64>, BTreeSet<u64>)> {
        let block = sector / self.sectors_per_block;
        self.blocks.iter_mut().find(|(other, ..)| *other == block)
    }

    /// Uses the blocks of these sectors.
    fn touch(&mut self, sectors: &[u64]) {
        for sector in sectors {
            let block = sector / self.sectors_per_block;
            let cached = match self.blocks.iter().position(|(other, ..)| *other == block) {
                Some(at) => self.blocks.remove(at),
                None => (block, BTreeSet::new(), BTreeSet::new()),
            };
            self.blocks.push(cached);
        }
    }

    fn make_room(&mut self) {
        while self.blocks.len() > self.blocks_max {
            let (_, _, dirty) = self.blocks.remove(0);
            self.destage(dirty.len() as u64);
        }
    }

    fn destage(&mut self, sectors: u64) {
        self.at.backing_writes += u64::from(sectors > 0);
        self.at.backing_write_bytes += sectors * SECTOR_BYTES;
    }

    fn request(&mut self, record: &Record) {
        let len = u64::from(record.len);
        let end = record.offset + len;
        let touched: Vec<u64> = (record.offset / SECTOR_BYTES..end.div_ceil(SECTOR_BYTES)).collect();
        let is_whole = |s: &u64| s * SECTOR_BYTES >= record.offset && (s + 1) * SECTOR_BYTES <= end;
        match record.op {
            Op::Read => {
                let invalid: Vec<u64> = touched
                    .iter()
                    .copied()
                    .filter(|s| !self.block(*s).is_some_and(|(_, valid, _)| valid.contains(s)))
                    .collect();
                if invalid.is_empty() {
                    self.at.read_hits += 1;
                    self.at.read_hit_bytes += len;
                } else {
                    self.at.backing_reads += 1;
                    self.at.backing_read_bytes += len;
                }
                self.at.flash_write_bytes += invalid.len() as u64 * SECTOR_BYTES;
                self.touch(&touched);
                touched.iter().for_each(|s| {
                    self.block(*s).unwrap().1.insert(*s);
                });
            }
            Op::Write if self.mode == Mode::WriteAround => {
                self.at.backing_writes += 1;
                self.at.backing_write_bytes += len;
                self.invalidate(&touched);
            }
            Op::Write => self.write(len, &touched, is_whole),
            Op::Discard => {
                for s in &touched {
                    if self.block(*s).is_some_and(|(_, _, dirty)| dirty.remove(s)) {
                        self.at.absorbed_bytes += SECTOR_BYTES;
                    }
                }
                self.invalidate(&touched);
            }
            Op::Flush => {}
        }
        self.make_room();
    }

    fn write(&mut self, len: u64, touched: &[u64], is_whole: impl Fn(&u64) -> bool) {
        let (whole, parts): (Vec<u64>, Vec<u64>) = touched.iter().copied().partition(is_whole);
        let whole_bytes = whole.len() as u64 * SECTOR_BYTES;
        if self.mode == Mode::WriteThrough {
            self.at.backing_writes += 1;
            self.at.backing_write_bytes += len;
        } else {
            for s in &parts {
                if self.block(*s).is_some_and(|(_, _, dirty)| dirty.remove(s)) {
                    self.destage(1);
                }
            }
            self.at.backing_writes += parts.len() as u64;
            self.at.backing_write_bytes += len - whole_bytes;
        }
        self.invalidate(&parts);
        self.at.write_hits += u64::from(!whole.is_empty() && whole.iter().all(|s| self.block(*s).is_some()));
        self.at.flash_write_bytes += whole_bytes;
        self.touch(&whole);
        for s in whole {
            let write_back = self.mode == Mode::WriteBack;
            let (_, valid, dirty) = self.block(s).unwrap();
            valid.insert(s);
            if write_back && !dirty.insert(s) {
                self.at.absorbed_bytes += SECTOR_BYTES;
            }
        }
    }

    fn invalidate(&mut self, sectors: &[u64]) {
        for s in sectors {
            if let Some((_, valid, _)) = self.block(*s) {
                valid.remove(s);
            }
        }
    }

    /// Returns the result that the trace would have if it ended now.
    fn end(&self) -> At {
        let mut end = Naive { blocks: self.blocks.clone(), at: self.at, blocks_max: 0, ..*self };
        end.make_room();
        end.at
    }
}

fn ops() -> impl Strategy<Value = Op> {
    prop_oneof![5 => Just(Op::Read), 4 => Just(Op::Write), 1 => Just(Op::Discard), 1 => Just(Op::Flush)]
}

/// Returns requests for whole sectors and for parts of sectors of a small disk.
fn requests() -> impl Strategy<Value = Vec<Record>> {
    let aligned = (0u64..40, 1u32..12).prop_map(|(sector, count)| (sector * 4096, count * 4096));
    let broken = (0u64..320, 1u32..60).prop_map(|(part, count)| (part * 512, count * 512));
    let one = (ops(), prop_oneof![2 => aligned, 1 => broken]);
    prop::collection::vec(one, 1..50).prop_map(|all| {
        all.into_iter()
            .map(
                |(op, (offset, len))| {
                    if op == Op::Flush { record(op, 0, 0) } else { record(op, offset, len) }
                },
            )
            .collect()
    })
}

proptest! {
    /// Compares after each request, so that each request's outcome is compared.
    #[test]
    fn curves_agree_with_a_simulation_of_every_size(records in requests(), shift in 0u32..4, mode in 0usize..3) {
        let mode = [Mode::WriteThrough, Mode::WriteBack, Mode::WriteAround][mode];
        let block_bytes = SECTOR_BYTES << shift;
        let mut caches: Vec<Naive> = (1..=53).map(|blocks| Naive::new(blocks, block_bytes, mode)).collect();
        for end in 1..=records.len() {
            let curves = exact(records[..end].iter().copied(), block_bytes, mode).unwrap();
            for cache in &mut caches {
                cache.request(&records[end - 1]);
                prop_assert_eq!(curves.at(cache.at.blocks), cache.end(), "after {} requests", end);
            }
            let (totals, last) = (curves.totals(), curves.at(u64::MAX));
            prop_assert_eq!(last, At { blocks: u64::MAX, ..curves.at(curves.blocks_max()) });
            let misses = match totals.reads {
                0 => 1.0,
                reads => 1.0 - last.read_hits as f64 / reads as f64,
            };
            prop_assert!((curves.read_misses().miss_ratio_at(u64::MAX) - misses).abs() < 1e-9);
        }
    }

    #[test]
    fn block_curves_agree_with_a_plain_stack(
        accesses in prop::collection::vec((0u64..90, 0u32..3), 1..600), spread in 0u32..50,
    ) {
        let accesses: Vec<(u64, u32)> =
            accesses.into_iter().map(|(block, weight)| (block << spread, weight)).collect();
        let curve = exact_accesses(accesses.iter().copied()).unwrap();
        let total: u64 = accesses.iter().map(|(_, weight)| u64::from(*weight)).sum();
        let mut stack: Vec<u64> = Vec::new();
        let mut hits = vec![0; 92];
        for (block, weight) in accesses {
            if let Some(at) = stack.iter().position(|other| *other == block) {
                hits[stack.len() - at] += u64::from(weight);
                stack.remove(at);
            }
            stack.push(block);
        }
        let mut misses = total;
        for (size, hits) in (0..).zip(hits) {
            misses -= hits;
            let ratio = if total == 0 { 1.0 } else { misses as f64 / total as f64 };
            prop_assert!((curve.miss_ratio_at(size) - ratio).abs() < 1e-9);
        }
    }
}

#[test]
fn only_requested_sectors_become_valid() {
    // A 4 KiB miss into a 64 KiB block, then another part of the block, then the first part again.
    let reads = [0u64, 8192, 0].map(|offset| record(Op::Read, offset, 4096));
    let curves = exact(reads, 65536, Mode::WriteThrough).unwrap();
    assert_eq!(curves.at(1).read_hits, 1);
    assert_eq!(curves.at(1).flash_write_bytes, 8192);
    assert_eq!(curves.totals().blocks, 1);
    // If the cache filled whole blocks, the later reads would be hits.
    let blocks = exact_accesses(accesses(reads, 65536, Mode::WriteThrough).unwrap()).unwrap();
    assert!((blocks.miss_ratio_at(1) - 1.0 / 3.0).abs() < 1e-9);
}

#[test]
fn without_a_cache_everything_goes_to_the_backing() {
    let trace = [record(Op::Write, 0, 8192), record(Op::Write, 0, 4096), record(Op::Read, 0, 4096)];
    for mode in [Mode::WriteThrough, Mode::WriteBack, Mode::WriteAround] {
        let at = exact(trace, 4096, mode).unwrap().at(0);
        assert_eq!((at.read_hits, at.absorbed_bytes, at.flash_write_bytes), (0, 0, 0));
        assert_eq!((at.backing_reads, at.backing_writes, at.backing_write_bytes), (1, 2, 12288));
    }
    let at = exact(trace, 4096, Mode::WriteBack).unwrap().at(2);
    assert_eq!(
        (at.read_hits, at.absorbed_bytes, at.backing_writes, at.backing_write_bytes),
        (1, 4096, 2, 8192)
    );
}

#[test]
fn disks_do_not_meet_and_their_ends_are_no_trap() {
    let read = |disk, offset| Record { disk, ..record(Op::Read, offset, 4096) };
    let trace = (0..1000).flat_map(|disk| [read(disk, 0), read(disk, (1 << 63) - 4096)]);
    let curves = exact(trace.clone().chain(trace.clone()), 4096, Mode::WriteThrough).unwrap();
    assert_eq!(curves.totals().blocks, 2000);
    assert_eq!((curves.at(1999).read_hits, curves.at(2000).read_hits), (0, 2000));
    let last = Record { len: u32::MAX, ..read(0, u64::MAX - 4096) };
    assert_eq!(exact([last], 4096, Mode::WriteThrough).unwrap().at(1).backing_reads, 1);
}

#[test]
fn wrong_blocks_and_endless_traces_are_refused() {
    for block_bytes in [0, 512, 4097, 12288, 2 << 20] {
        let error = exact([], block_bytes, Mode::WriteBack).unwrap_err().to_string();
        assert!(error.contains("must be a power of two"), "{error}");
        let full = Shards::fixed_size(16);
        assert!(shards([], block_bytes, Mode::WriteBack, full).is_err());
    }
    let mut stack = Stack::new(20);
    (0..SECTORS_MAX >> 20).for_each(|block| assert!(stack.enter(block).is_ok()));
    assert!(stack.enter(1 << 40).unwrap_err().to_string().contains("sampled curve"));
    assert!(stack.enter(0).is_ok());
}

/// Returns the mean absolute difference of two curves over 100 sizes up to `blocks`.
fn mean_error(exact: &Curve, estimate: &Curve, blocks: u64) -> f64 {
    let error = |i| {
        let size = blocks * i / 100;
        (exact.miss_ratio_at(size) - estimate.miss_ratio_at(size)).abs()
    };
    (1..=100).map(error).sum::<f64>() / 100.0
}

/// Returns Zipf(`skew`) requests over scattered blocks.
fn zipf(blocks: u64, skew: f64, count: usize) -> Vec<u64> {
    let mut sum = 0.0;
    let sums: Vec<f64> = (1..=blocks)
        .map(|rank| {
            sum += (rank as f64).powf(-skew);
            sum
        })
        .collect();
    let mut dice = Prng::new(11);
    let mut rank = || {
        let at = dice.unit() * sum;
        sums.partition_point(|s| *s < at) as u64
    };
    (0..count).map(|_| rank() * 7919 % 1_000_003).collect()
}

/// Returns extents of up to 32 blocks, read repeatedly in the same order.
fn extents_in_a_loop(blocks: u64, count: usize) -> Vec<u64> {
    let mut dice = Prng::new(12);
    let mut one_pass = Vec::new();
    while (one_pass.len() as u64) < blocks {
        let start = dice.below(1 << 28);
        one_pass.extend(start..start + 1 + dice.below(32));
    }
    one_pass.into_iter().cycle().take(count).collect()
}

/// Returns two hot sets, a loop and a scan, interleaved.
fn mixed(count: usize) -> Vec<u64> {
    let (hot, warm) = (zipf(100_000, 0.9, count), extents_in_a_loop(60_000, count));
    let mut dice = Prng::new(13);
    let mut scan = 1u64 << 40;
    let pick = |(hot, warm)| match dice.below(10) {
        0..5 => hot,
        5..8 => warm + (1 << 30),
        8 => (1 << 35) + dice.below(5000),
        _ => {
            scan += 1;
            scan
        }
    };
    hot.into_iter().zip(warm).map(pick).collect()
}

#[test]
fn a_hundredth_of_the_blocks_is_enough() {
    let streams = [
        ("zipf 0.8", zipf(200_000, 0.8, 1_000_000)),
        ("zipf 1.0", zipf(300_000, 1.0, 1_000_000)),
        ("loop", extents_in_a_loop(200_000, 900_000)),
        ("mixed", mixed(1_000_000)),
    ];
    for (name, stream) in streams {
        let blocks = stream.iter().collect::<BTreeSet<_>>().len() as u64;
        assert!(blocks > 100_000, "{name}: {blocks} blocks");
        let accesses = || stream.iter().map(|block| (*block, 1));
        let exact = exact_accesses(accesses()).unwrap();
        let error_of = |mut shards: Shards| {
            accesses().for_each(|(block, weight)| shards.access(block, weight));
            assert!(shards.bytes() <= 1_000_000, "{name}: {} bytes", shards.bytes());
            mean_error(&exact, &shards.curve(), blocks)
        };
        // A single selection of samples may be inaccurate; none may be far off, and the average
        // must be good.
        let errors: Vec<f64> =
            (0..10).map(|seed| error_of(Shards::fixed_rate(0.01, 1 << 40).with_seed(seed))).collect();
        let mean = errors.iter().sum::<f64>() / errors.len() as f64;
        assert!(mean < 0.01, "{name}: {errors:?}");
        assert!(errors.iter().all(|error| *error < 0.025), "{name}: {errors:?}");
        let error = error_of(Shards::fixed_rate(0.01, 1 << 40).with_samples_min(4096));
        assert!(error < 0.01, "{name}: {error} with at least 4096 samples");
        let error = error_of(Shards::fixed_size(SAMPLES_MAX));
        assert!(error < 0.005, "{name}: {error} with {SAMPLES_MAX} samples");
    }
}

/// The exact curve and the sampled curve process the same accesses, for any writes and block size.
#[test]
fn samples_of_a_trace_estimate_its_block_curve() {
    let mut dice = Prng::new(5);
    let trace: Vec<Record> = (0..100_000)
        .map(|_| {
            let op = if dice.below(3) == 0 { Op::Write } else { Op::Read };
            let hot = dice.below(4) > 0;
            let offset = dice.below(if hot { 20_000 } else { 200_000 }) * 8192;
            Record { disk: dice.below(2) as u16, ..record(op, offset, 4096 << dice.below(4)) }
        })
        .collect();
    for (block_bytes, mode) in [(4096, Mode::WriteAround), (16384, Mode::WriteBack)] {
        let exact = exact_accesses(accesses(trace.iter().copied(), block_bytes, mode).unwrap()).unwrap();
        let all = shards(trace.iter().copied(), block_bytes, mode, Shards::fixed_rate(1.0, 1 << 40)).unwrap();
        let some = shards(trace.iter().copied(), block_bytes, mode, Shards::fixed_size(SAMPLES_MAX)).unwrap();
        let blocks = exact.points()[exact.points().len() - 1].blocks;
        assert!(mean_error(&exact, &all.curve(), blocks) < 0.001, "every block, rounded to buckets");
        assert!(mean_error(&exact, &some.curve(), blocks) < 0.01, "{} samples", some.samples());
        assert!(some.rate() < 0.5);
    }
}

/// Uses real traces if there are any: `HOB_TRACES` names a folder of `.csv` or `.csv.zst` files
/// with the header `ts_us,op,offset,size`.
#[test]
fn real_traces_agree_with_their_samples() {
    let Some(folder) = std::env::var_os("HOB_TRACES") else {
        println!("skipped: HOB_TRACES names no folder of traces");
        return;
    };
    let mut paths: Vec<_> = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    paths.sort();
    for path in paths {
        let name = path.file_name().unwrap().to_string_lossy().into_owned();
        let text = if name.ends_with(".csv.zst") {
            let output = std::process::Command::new("zstd").arg("-dc").arg(&path).output().unwrap();
            String::from_utf8(output.stdout).unwrap()
        } else if name.ends_with(".csv") {
            std::fs::read_to_string(&path).unwrap()
        } else {
            continue;
        };
        let parse = |line: &str| {
            let fields: Vec<&str> = line.trim().split(',').collect();
            let op = if fields[1] == "R" { Op::Read } else { Op::Write };
            record(op, fields[2].parse().unwrap(), fields[3].parse().unwrap())
        };
        let trace: Vec<Record> = text.lines().skip(1).map(parse).collect();
        let accesses = || trace.iter().flat_map(|r| (covered_blocks(r)).map(|block| (block, 1)));
        let blocks = accesses().map(|(block, _)| block).collect::<BTreeSet<_>>().len() as u64;
        let exact = exact_accesses(accesses()).unwrap();
        let mut close = Shards::fixed_rate(0.01, 1 << 40).with_samples_min(4096);
        accesses().for_each(|(block, weight)| close.access(block, weight));
        let error = mean_error(&exact, &close.curve(), blocks);
        println!("{name}: {blocks} blocks, {} samples, mean error {error:.4}", close.samples());
        assert!(blocks < 100_000 || error < 0.01, "{name}: {error}");
    }
}

fn covered_blocks(record: &Record) -> std::ops::Range<u64> {
    record.offset / 4096..(record.offset + u64::from(record.len)).div_ceil(4096)
}
