//! Tests the computed positions in latency charts, and the required content of their SVG files.

use super::*;
use crate::picture::scale::count_text;
use crate::prng::Prng;
use crate::workload::{Workload, WorkloadConfig};

/// Returns a synthetic run: `hits` of 1000 requests take tens of microseconds, and the others tens
/// of milliseconds.
fn run(count: u64, gap_ns: u64, hits: impl Fn(u64) -> u64, known: bool, seed: u64) -> Vec<Sample> {
    let mut dice = Prng::new(seed);
    (0..count)
        .map(|i| {
            let hit = dice.below(1000) < hits(i);
            let wobble = (dice.unit() + dice.unit() + dice.unit()) / 1.5;
            let latency = if hit { 55_000.0 * wobble.exp() } else { 9e6 * (wobble * 1.6).exp() };
            Sample { at_ns: i * gap_ns, latency_ns: latency as u64, hit: known.then_some(hit) }
        })
        .collect()
}

fn three_phases(known: bool) -> [Vec<Sample>; 3] {
    let cold = |i: u64| 820 * i / (i + 900);
    [
        run(4_500, 1_700_000, |_| 0, false, 1),
        run(4_500, 1_100_000, cold, known, 2),
        run(9_000, 380_000, |_| 890, known, 3),
    ]
}

fn drawn(samples: &[Vec<Sample>; 3]) -> String {
    let text = ChartText::new("A slow disk, without and with hob", "8 KiB reads, Zipf 1.0, depth 32");
    let names = ["no cache", "cold pass", "warm pass"];
    let notes = ["straight to the disk", "the cache fills", "89 % hits"];
    let phases = [0, 1, 2].map(|i| Phase { name: names[i], samples: &samples[i], note: notes[i] });
    render(&text, &phases).unwrap()
}

/// `HOB_PICTURES=dir cargo test -p hob-lab pictures` keeps the files there for inspection.
#[test]
fn pictures_are_small_and_have_a_description() {
    for known in [false, true] {
        let svg = drawn(&three_phases(known));
        assert!(svg.len() < 500_000, "{} bytes", svg.len());
        for word in ["no cache", "cold pass", "warm pass", "10 ms", "100 µs", "89 % hits", "</svg>"] {
            assert!(svg.contains(word), "{word}");
        }
        assert_eq!(svg.contains(">\nhits\n"), known);
        if let Some(dir) = std::env::var_os("HOB_PICTURES") {
            let name = if known { "hits.svg" } else { "phases.svg" };
            std::fs::write(Path::new(&dir).join(name), svg).unwrap();
            let narrow = [run(16_000, 1_700_000, |_| 0, false, 1), run(4_000, 800_000, |_| 500, known, 2)];
            let [slow, cold] = narrow;
            let svg = drawn(&[slow, cold, run(16_000, 60_000, |_| 999, known, 3)]);
            std::fs::write(Path::new(&dir).join(format!("narrow-{name}")), svg).unwrap();
        }
    }
}

#[test]
fn hundreds_of_thousands_of_requests_make_no_larger_file() {
    let samples = [run(300_000, 10_000, |_| 500, true, 4), run(10, 1_000, |_| 0, true, 5), vec![]];
    assert!(drawn(&samples).len() < 500_000);
}

#[test]
fn odd_runs_are_drawn_and_empty_ones_refused() {
    let zero = Sample { at_ns: 0, latency_ns: 0, hit: None };
    let huge = Sample { at_ns: 1 << 60, latency_ns: 1 << 60, hit: None };
    for samples in [vec![zero], vec![huge], vec![zero, huge]] {
        drawn(&[samples, vec![], vec![]]);
    }
    let empty = [Phase { name: "nothing", samples: &[], note: "" }];
    let error = render(&ChartText::new("", ""), &empty).unwrap_err();
    assert!(error.to_string().contains("no phase has a request"));
}

#[test]
fn the_words_of_the_caller_are_escaped() {
    let samples = [Sample { at_ns: 0, latency_ns: 1000, hit: None }];
    let phases = [Phase { name: "<b>", samples: &samples, note: "a & b" }];
    let svg = render(&ChartText::new("\"x\" < y", ""), &phases).unwrap();
    assert!(svg.contains("&lt;b&gt;") && svg.contains("a &amp; b") && !svg.contains("<b>"));
}

#[test]
fn the_file_is_written_where_asked() {
    let path = std::env::temp_dir().join(format!("hob-picture-{}.svg", std::process::id()));
    let samples = [Sample { at_ns: 0, latency_ns: 1000, hit: None }];
    let phases = [Phase { name: "one", samples: &samples, note: "" }];
    latency_over_time(&path, &ChartText::new("t", "s"), &phases).unwrap();
    assert!(std::fs::read_to_string(&path).unwrap().starts_with("<svg"));
    std::fs::remove_file(&path).unwrap();
    assert!(latency_over_time(Path::new("/nowhere/x.svg"), &ChartText::new("t", "s"), &phases).is_err());
}

#[test]
fn latencies_are_written_with_three_digits() {
    let table = [
        (0, "0 ns"),
        (999, "999 ns"),
        (1_000, "1 µs"),
        (1_234, "1.23 µs"),
        (10_000, "10 µs"),
        (51_340_000, "51.3 ms"),
        (321_400, "321 µs"),
        (999_499, "999 µs"),
        (999_500, "1 ms"),
        (1_000_000_000, "1 s"),
        (2_500_000_000, "2.50 s"),
    ];
    for (ns, text) in table {
        assert_eq!(latency_text(ns), text);
    }
    assert_eq!(
        [count_text(608.4), count_text(12_345.0), count_text(1e6)],
        ["608", "12\u{2009}345", "1\u{2009}000\u{2009}000"]
    );
}

#[test]
fn axes_place_their_ends_and_label_round_values() {
    let latency = LatencyAxis::new(45_000, 88_000_000, 500, 100);
    assert_eq!(latency.decades().collect::<Vec<_>>(), [10_000, 100_000, 1_000_000, 10_000_000, 100_000_000]);
    assert_eq!((latency.y(10_000), latency.y(1_000_000), latency.y(100_000_000)), (500, 300, 100));
    let time = TimeAxis::new(17_000_000_000, 0, 1700);
    let labels: Vec<String> = time.ticks().into_iter().map(|(_, label)| label).collect();
    assert_eq!(labels, ["0", "2", "4", "6", "8", "10", "12", "14", "16"]);
    assert_eq!((time.x(0), time.x(1_000_000_000), time.x(u64::MAX)), (0, 100, 1700));
    assert_eq!(TimeAxis::new(300_000_000, 0, 10).unit(), "milliseconds");
}

#[test]
fn medians_are_those_of_their_buckets() {
    let sample = |at_ns, latency_ns| Sample { at_ns, latency_ns, hit: None };
    let samples = [sample(0, 5), sample(1, 9), sample(2, 7), sample(25, 40), sample(39, 3)];
    let medians = thin::medians(&samples, 40, 4);
    assert_eq!(medians, [Some((0, 10, 7)), None, Some((20, 30, 40)), Some((30, 40, 3))]);
}

#[test]
fn thinning_keeps_the_slowest() {
    let config = WorkloadConfig {
        footprint_bytes: 1 << 30,
        request_bytes: 4096,
        theta: 0.0,
        read_permille: 1000,
        seed: 8,
    };
    let samples: Vec<Sample> = Workload::new(&config)
        .take(10_000)
        .zip(0..)
        .map(|(access, at_ns)| Sample { at_ns, latency_ns: access.offset, hit: None })
        .collect();
    let kept = thin::thinned(&samples, 100);
    assert!((100..=124).contains(&kept.len()));
    let slowest = samples.iter().map(|sample| sample.latency_ns).max();
    assert_eq!(kept.iter().map(|sample| sample.latency_ns).max(), slowest);
    assert_eq!(thin::thinned(&samples[..50], 100).len(), 50);
}
