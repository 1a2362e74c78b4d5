//! `hob histogram`: the daemon's counts equal those of a trace of the same run, bucket by bucket.
//!
//! A trace has no replies, so it gives only the number of latencies and of outstanding requests.
//! Its times are taken slightly later than the engine's times, so the comparison of gaps allows a
//! difference.

use std::time::Duration;

use conformance::data::noise_file;
use conformance::nbd_client::Client;
use conformance::trace::Trace;
use conformance::{MIB, Scratch, Serve};
use rustix::process::Signal;
use serde_json::Value;

const SIZE: u64 = 64 * MIB;
/// Number of requests of each client.
const REQUESTS: u64 = 600;
/// Maximum difference between the engine's time and the recorder's time of a request, microseconds.
const CLOCKS_APART_US: i64 = 20_000;
/// Number of gaps with a larger difference: the host may stall between the two times of a request.
const STALLS_MAX: u64 = 12;

/// Sends requests of every kind and length, sequential and random, without and with pauses.
fn load(client: &mut Client, seed: u64) {
    let mut state = seed;
    let mut dice = |n: u64| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) % n
    };
    let mut next = 0;
    for i in 0..REQUESTS {
        let len =
            [512, 4096, 1536, 8192, 16_384, 65_536, 49_152, 131_072, 700_000 / 512 * 512][dice(9) as usize];
        let offset = match dice(3) {
            0 => next,
            1 => next + 512 * dice(200),
            _ => 512 * dice(SIZE / 512),
        };
        let offset = offset.min(SIZE - len);
        next = (offset + len) % SIZE;
        match dice(10) {
            0 => client.flush().unwrap(),
            1 => client.trim(offset, len as u32).unwrap(),
            2..5 => client.write(offset, &vec![i as u8; len as usize]).unwrap(),
            _ => drop(client.read(offset, len as u32).unwrap()),
        }
        if i % 40 == 0 {
            std::thread::sleep(Duration::from_millis([2, 8, 20, 70, 200][dice(5) as usize]));
        }
    }
}

/// Returns the values of a metric according to the trace, for reads, writes or both.
fn values(trace: &Trace, class: &str, metric: &str) -> Vec<i64> {
    let is_one = |op: char| match class {
        "all" => op == 'R' || op == 'W',
        "reads" => op == 'R',
        _ => op == 'W',
    };
    let both = trace.requests.iter().zip(&trace.at_ns);
    let list: Vec<_> = both.filter(|(request, _)| is_one(request.op)).collect();
    let ends: Vec<i64> = list
        .iter()
        .map(|(request, _)| ((request.offset + u64::from(request.len) - 1) / 512) as i64)
        .collect();
    let mut values = Vec::new();
    for (i, (request, at)) in list.iter().enumerate() {
        let first = (request.offset / 512) as i64;
        match metric {
            "length" => values.push(i64::from(request.len)),
            "seek" if i > 0 => values.push(first - ends[i - 1]),
            "seek-nearest" if i > 0 => {
                let mut nearest = first - ends[i - 1];
                for end in ends[i.saturating_sub(16)..i].iter().rev() {
                    if (first - end).abs() < nearest.abs() {
                        nearest = first - end;
                    }
                }
                values.push(nearest);
            }
            "interarrival" if i > 0 => values.push(((*at - list[i - 1].1) / 1000) as i64),
            _ => {}
        }
    }
    values
}

/// Returns the upper bounds and counts of a histogram.
fn buckets(histogram: &Value) -> Vec<(i64, u64)> {
    let buckets = histogram["buckets"].as_array().unwrap();
    let bound = |bucket: &Value| bucket["up_to"].as_i64().unwrap_or(i64::MAX);
    buckets.iter().map(|bucket| (bound(bucket), bucket["count"].as_u64().unwrap())).collect()
}

fn check(trace: &Trace, histogram: &Value) {
    let (class, metric) = (histogram["class"].as_str().unwrap(), histogram["metric"].as_str().unwrap());
    let found = buckets(histogram);
    let values = values(trace, class, metric);
    let count = histogram["count"].as_u64().unwrap();
    assert_eq!(found.iter().map(|(_, count)| count).sum::<u64>(), count, "{metric} of {class}");
    let at_most = |bound: i64| values.iter().filter(|value| **value <= bound).count() as u64;
    match metric {
        "latency" | "outstanding" => {
            assert_eq!(count, crate::values(trace, class, "length").len() as u64, "{metric} of {class}");
            assert!(metric == "latency" || histogram["max"] == 1 || class != "all", "two clients wait");
        }
        "interarrival" => {
            assert_eq!(count, values.len() as u64, "{metric} of {class}");
            let mut sum = 0;
            for (bound, count) in found {
                sum += count;
                let low = at_most(bound.saturating_sub(CLOCKS_APART_US)).saturating_sub(STALLS_MAX);
                let high = at_most(bound.saturating_add(CLOCKS_APART_US)) + STALLS_MAX;
                assert!((low..=high).contains(&sum), "{sum} gaps up to {bound} of {class}: {low} to {high}");
            }
        }
        _ => {
            let mut below = 0;
            for (bound, count) in found {
                let expected = at_most(bound) - below;
                assert_eq!(count, expected, "{metric} of {class} up to {bound}");
                below += expected;
            }
            assert_eq!(histogram["min"].as_i64(), values.iter().copied().min(), "{metric} of {class}");
            assert_eq!(histogram["max"].as_i64(), values.iter().copied().max(), "{metric} of {class}");
        }
    }
}

#[test]
fn the_daemons_histograms_match_its_trace() {
    let scratch = Scratch::new();
    noise_file(&scratch.path("disk.img"), SIZE, 91);
    let hob =
        Serve::disk(&scratch.text("disk.img")).cached(&scratch.path("pool"), "32M", "4K").start(&scratch);
    let (mut one, mut two) = (hob.connect(), hob.connect());
    // Requests before the reset are not in the histograms, and requests before the recording are
    // not in the trace.
    one.read(MIB, 4096).unwrap();
    let before = hob.ctl(&["histogram", "disk", "--reset", "--kind", "length"]);
    assert!(before.contains("≤ 4096") && before.contains("100.0 %"), "{before}");

    let mut recording = hob.record(&scratch.path("trace"), &[]);
    std::thread::scope(|scope| {
        scope.spawn(|| load(&mut one, 1));
        load(&mut two, 2);
    });
    recording.signal(Signal::INT);
    let ended = recording.finish(Duration::from_secs(60));
    assert!(ended.success(), "{}", ended.all());
    let trace = Trace::read(&scratch.path("trace"));
    assert_eq!((trace.requests.len() as u64, trace.dropped), (2 * REQUESTS, 0));

    let csv = scratch.text("histograms.csv");
    let found = hob.json(&["histogram", "disk", "--csv", &csv]);
    let histograms = found["histograms"].as_array().unwrap();
    assert_eq!(histograms.len(), 18, "six metrics of three classes");
    histograms.iter().for_each(|histogram| check(&trace, histogram));

    let lines: usize = histograms.iter().map(|histogram| buckets(histogram).len()).sum();
    let csv = std::fs::read_to_string(csv).unwrap();
    assert_eq!(csv.lines().count(), 1 + lines);
    assert_eq!(csv, hob.ctl(&["histogram", "disk", "--csv", "-"]));
    let text = hob.ctl(&["histogram", "disk", "--class", "writes"]);
    assert!(text.matches('█').count() > 100 && text.contains("seek-nearest"), "{text}");
    hob.stop();
}
