//! Compares the curve that each disk measures while it is served with the exact curve from a trace
//! of the same requests. The two curves differ by at most 0.01 on average and by at most 0.02 at
//! any size. If a few blocks have most of the accesses, the difference is larger for small caches,
//! because the estimate depends on which of these blocks are in the sample. Any sample of this size
//! has this error.
//!
//! The exact curve is for whole requests and sectors. The measured curve counts a read once for
//! each block that it touches, so reads are cut at block boundaries before the exact curve is
//! computed.

use hob_engine::io::{Durability, Op as EngineOp};
use hob_engine::policy::PolicyKind;
use hob_engine::sizing::{BlockSizing, Curve, Sizing};
use hob_lab::generate::GeneratorInfo;
use hob_lab::mrc::{self, Mode};
use hob_lab::prng::Prng;
use hob_trace::{Op, Record};
use hob_world::replay::{Ask, CacheSetup, Replay, Setup};
use hob_world::service::FixedModel;

const OFF_MAX: f64 = 0.02;
const OFF_MEAN_MAX: f64 = 0.01;
/// Maximum difference for small caches, for loads with a few very hot blocks.
const OFF_HOT_MAX: f64 = 0.035;
/// Minimum size at which curves are compared: the default size of a segment, which is the smallest
/// possible cache.
const BYTES_MIN: u64 = 16 << 20;
/// Number of sizes per doubling at which curves are compared.
const SIZES: u32 = 400;

fn ask(record: &Record) -> Ask {
    let op = match record.op {
        Op::Read => EngineOp::Read,
        Op::Write => EngineOp::Write(Durability::Volatile),
        Op::Discard => EngineOp::Discard(Durability::Volatile),
        Op::Flush => EngineOp::Flush,
    };
    Ask { disk: 0, op, offset: record.offset, len: u64::from(record.len), tag: 0 }
}

/// Serves the requests in virtual time, and returns the disk's measurements.
fn served(records: &[Record], disk_bytes: u64) -> Sizing {
    let cache = CacheSetup::volatile(64 << 20, 4096, PolicyKind::default());
    let device = FixedModel::new(100_000, 100_000, 32);
    let setup = Setup::one_disk(disk_bytes, Some(cache), device.clone(), device);
    let mut replay = Replay::new(setup).unwrap();
    let run = replay.open(records.iter().map(|record| (record.at_ns, ask(record))), |_| {});
    assert_eq!(run.requests, records.len() as u64);
    replay.sizing(0).unwrap()
}

/// Returns the requests, cut at block boundaries.
fn cut(records: &[Record], block_bytes: u64) -> impl Iterator<Item = Record> {
    records.iter().flat_map(move |record| {
        let end = record.offset + u64::from(record.len);
        let blocks =
            record.offset / block_bytes..end.div_ceil(block_bytes).max(record.offset / block_bytes + 1);
        blocks.map(move |block| {
            let first = record.offset.max(block * block_bytes);
            let last = end.min((block + 1) * block_bytes);
            Record { offset: first, len: (last - first) as u32, ..*record }
        })
    })
}

/// Returns the maximum and the average difference of curves from [`BYTES_MIN`] on. The average is
/// over evenly spaced sizes up to the size above which the curve is constant, as in the SHARDS
/// paper.
fn apart(exact: &Curve, live: &BlockSizing) -> (f64, f64) {
    let end = exact.points().last().unwrap().blocks;
    let off = |blocks: &u64| (exact.miss_ratio_at(*blocks) - live.curve.miss_ratio_at(*blocks)).abs();
    let is_large = |blocks: &u64| blocks * live.block_bytes >= BYTES_MIN;
    let doubling = |i| (end as f64).powf(f64::from(i) / f64::from(SIZES - 1)).round() as u64;
    let most = (0..SIZES).map(doubling).filter(is_large).map(|blocks| off(&blocks)).fold(0.0, f64::max);
    let even = (1..=u64::from(SIZES)).map(|i| end * i / u64::from(SIZES));
    (most, even.map(|blocks| off(&blocks)).sum::<f64>() / f64::from(SIZES))
}

fn check(name: &str, records: &[Record], sizing: &Sizing, off_max: f64) {
    assert!(sizing.bytes <= 1_000_000, "{name}: {} bytes", sizing.bytes);
    for live in &sizing.block_sizes {
        let exact = mrc::exact(cut(records, live.block_bytes), live.block_bytes, Mode::WriteThrough).unwrap();
        let (most, mean) = apart(&exact.read_misses(), live);
        let blocks = live.block_bytes;
        println!("{name}, {blocks}: {most:.4} apart at most, {mean:.4} on average, rate {:.3}", live.rate);
        assert_eq!(live.accesses, exact.totals().reads, "{name}, {blocks}");
        assert!(most <= off_max, "{name}, {blocks}: {most}");
        assert!(mean <= OFF_MEAN_MAX, "{name}, {blocks}: {mean} on average");
        let touched = live.blocks as f64 / exact.totals().blocks as f64;
        assert!((touched - 1.0).abs() < 0.05, "{name}, {blocks}: {touched} of the blocks that were touched");
    }
}

fn generated(name: &str, settings: &[&str]) -> (Vec<Record>, u64) {
    let experiment = GeneratorInfo::find(name).unwrap().experiment(settings).unwrap();
    let disk = experiment.disks[0];
    (experiment.into_records(1_000_000).filter(|record| record.disk == 0).collect(), disk)
}

/// Returns requests of many kinds: requests for parts of sectors, requests for many blocks, and
/// discards. Some of the requests go to the same locations again and again.
fn awkward() -> (Vec<Record>, u64) {
    const DISK: u64 = 16 << 30;
    let mut dice = Prng::new(77);
    let records = (0..150_000).map(|i| {
        let op = match dice.below(20) {
            0 => Op::Discard,
            1 => Op::Flush,
            2..7 => Op::Write,
            _ => Op::Read,
        };
        let len = match dice.below(4) {
            0 => 512 * (1 + dice.below(16)),
            1 => 4096 << dice.below(7),
            _ => 4096,
        };
        let span = if dice.below(3) == 0 { DISK } else { 256 << 20 };
        let unit = if dice.below(10) == 0 { 512 } else { 4096 };
        let offset = dice.below((span - len) / unit) * unit;
        let (offset, len) = if op == Op::Flush { (0, 0) } else { (offset, len as u32) };
        Record { at_ns: i * 50_000, offset, len, op, disk: 0 }
    });
    (records.collect(), DISK)
}

#[test]
fn the_live_curve_is_near_the_exact_one_of_the_same_requests() {
    let loads = [
        ("proxy", OFF_MAX, generated("proxy", &["scale=50", "requests=150000"])),
        ("hm", OFF_MAX, generated("hm", &[])),
        ("awkward", OFF_MAX, awkward()),
        ("zipf 0.8", OFF_HOT_MAX, generated("zipf", &["requests=200000", "footprint=2G", "theta=0.8"])),
        ("zipf 1.1", OFF_HOT_MAX, generated("zipf", &["requests=200000", "footprint=1G", "theta=1.1"])),
    ];
    for (name, off_max, (mut records, disk_bytes)) in loads {
        records.truncate(250_000);
        let sizing = served(&records, disk_bytes);
        let rate = sizing.block_sizes[0].rate;
        assert!(rate < 0.2, "{name}: no sample is taken at a rate of {rate}");
        check(name, &records, &sizing, off_max);
    }
}
