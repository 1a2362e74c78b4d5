//! Compares the engine's histograms with counts from a list of all requests. The test compares
//! every bucket of each metric, for all requests, for reads and for writes. It takes only the
//! bounds of the buckets from the engine.

use hob_engine::io::{Durability, Op};
use hob_engine::policy::PolicyKind;
use hob_engine::vscsi::{CLASSES, Class, METRICS, Metric};
use hob_world::flash_model::{FlashConfig, FlashModel};
use hob_world::replay::{Ask, CacheSetup, Replay, Served, Setup};
use hob_world::rng::SimRng;
use hob_world::service::FixedModel;

const GIB: u64 = 1 << 30;
const WRITE: Op = Op::Write(Durability::Volatile);

/// Returns the values of a metric, computed from the whole list.
fn values(list: &[&Served], metric: Metric) -> Vec<i128> {
    let first = |served: &Served| i128::from(served.ask.offset / 512);
    let last = |served: &Served| i128::from((served.ask.offset + served.ask.len - 1) / 512);
    let micros = |ns: u64| i128::from(ns / 1000 + u64::from(!ns.is_multiple_of(1000)));
    let each = |at: usize| -> Option<i128> {
        let served = list[at];
        let before = at.checked_sub(1).map(|before| list[before]);
        match metric {
            Metric::Length => Some(i128::from(served.ask.len)),
            Metric::Seek => before.map(|before| first(served) - last(before)),
            Metric::SeekNearest => list[at.saturating_sub(16)..at]
                .iter()
                .rev()
                .map(|before| first(served) - last(before))
                .min_by_key(|distance| distance.abs()),
            Metric::Outstanding => {
                let unanswered = |other: &&&Served| other.at.0 + other.latency_ns > served.at.0;
                Some(list[..at].iter().filter(unanswered).count() as i128)
            }
            Metric::Latency => Some(micros(served.latency_ns)),
            Metric::Interarrival => before.map(|before| micros(served.at.0 - before.at.0)),
        }
    };
    (0..list.len()).filter_map(each).collect()
}

fn counts(values: &[i128], bounds: &[i64]) -> Vec<u64> {
    let mut counts = vec![0; bounds.len() + 1];
    for value in values {
        let mut bucket = 0;
        while bucket < bounds.len() && *value > i128::from(bounds[bucket]) {
            bucket += 1;
        }
        counts[bucket] += 1;
    }
    counts
}

/// Returns requests of many kinds: in bursts and after pauses, sequential and random, small and
/// large, near and far, and requests that the engine does not count.
fn requests(count: u32) -> Vec<(u64, Ask)> {
    let mut rng = SimRng::new(17);
    let (mut at, mut next) = (0, [0_u64; 3]);
    let made = (0..count).map(|tag| {
        let longest = 40_000_000 >> rng.below(6);
        at += match rng.below(4) {
            0 => 0,
            1 => rng.below(2_000),
            2 => rng.below(300_000),
            _ => rng.below(longest),
        };
        let op = match rng.below(20) {
            0 => Op::Flush,
            1 => Op::Discard(Durability::Volatile),
            2 => Op::Prefetch,
            3..8 => WRITE,
            _ => Op::Read,
        };
        let len = match rng.below(3) {
            0 => 4096,
            1 => 512 * rng.between(1, 20),
            _ => 512 << rng.below(12),
        };
        let reader = rng.below(3) as usize;
        let offset = match rng.below(3) {
            0 => next[reader],
            1 => (next[reader] + 512 * rng.below(2000)).saturating_sub(512 * rng.below(2000)),
            _ => rng.below(2 * GIB) / 512 * 512,
        };
        let offset = offset.min(2 * GIB - len);
        next[reader] = (offset + len) % GIB;
        let (offset, len) = if op == Op::Flush { (0, 0) } else { (offset, len) };
        (at, Ask { disk: 0, op, offset, len, tag })
    });
    made.collect()
}

#[test]
fn histograms_match_the_list_of_requests() {
    let cache = CacheSetup::volatile(64 << 20, 4096, PolicyKind::default());
    let flash = FlashModel::new(FlashConfig::sata_ssd());
    let backing = FixedModel::new(2_000_000, 5_000_000, 8);
    let mut replay = Replay::new(Setup::one_disk(2 * GIB, Some(cache), flash, backing)).unwrap();
    let mut answers = Vec::new();
    let run = replay.open(requests(20_000), |served| answers.push(*served));
    assert_eq!(run.waited, 0, "each request arrives in the engine when it arrives");
    answers.sort_by_key(|served| served.ask.tag);

    let histograms = replay.histograms(0).unwrap();
    let mut used = 0;
    for (class, name) in CLASSES {
        let is_one = |served: &&Served| match served.ask.op {
            Op::Read => class != Class::Writes,
            Op::Write(_) => class != Class::Reads,
            _ => false,
        };
        let list: Vec<&Served> = answers.iter().filter(is_one).collect();
        for row in METRICS {
            let values = values(&list, row.metric);
            let found = histograms.get(class, row.metric);
            let expected = counts(&values, row.bounds);
            let buckets: Vec<u64> = found.buckets().map(|(_, count)| count).collect();
            assert_eq!(buckets, expected, "{} of {name}", row.name);
            let (min, max) = (values.iter().min().unwrap(), values.iter().max().unwrap());
            assert_eq!(
                (found.min().unwrap().into(), found.max().unwrap().into()),
                (*min, *max),
                "{}",
                row.name
            );
            let mean = values.iter().sum::<i128>() as f64 / values.len() as f64;
            assert!(
                (found.mean().unwrap() - mean).abs() < 1e-6 * mean.abs().max(1.0),
                "{} of {name}",
                row.name
            );
            used += buckets.iter().filter(|count| **count > 0).count();
        }
    }
    let all: usize = 3 * METRICS.iter().map(|row| row.bounds.len() + 1).sum::<usize>();
    assert!(used * 10 > all * 7, "{used} of {all} buckets are put to the test");
}
