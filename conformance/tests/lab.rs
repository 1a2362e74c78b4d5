//! The daemon behaves as the lab predicts: `hob lab sim`, and a served disk to which `hob replay`
//! sends the same trace, have the same hits, misses and evictions, for every policy of the daemon.
//! The lab's own results are consistent too.
//!
//! The daemon answers a miss or a write first and fills flash later. The simulation fills at once.
//! Blocks of a fill in flight cannot be evicted, so a request before the fill's end may evict
//! another block, and on a slow disk this is frequent. A flush does not wait for fills, and a pause
//! is unreliable. But a request for the same sectors waits for the fill, so in the trace such a
//! request follows every fill:
//!
//! * A read is repeated. The second read waits for the first read's fill, hits, and leaves nothing in
//!   flight.
//! * A write of whole sectors is followed by a read of these sectors, for the same reason.
//! * A write of a part of a sector leaves that sector invalid. A trim in this sector waits and
//!   changes nothing.
//!
//! Both sides process this trace without changes. At depth 1, timing cannot change the results.

use std::fmt::Write;
use std::path::Path;
use std::thread;

use conformance::data::{Noise, empty_file};
use conformance::stats::Stats;
use conformance::{MIB, Scratch, Serve, hob};
use serde_json::Value;

const SIZE: u64 = 32 * MIB;
const SECTOR: u64 = 4096;
/// Number of requests, including those that only wait for others.
const REQUESTS: usize = 2_500;

/// Caches: size and block size as on the command line. The sizes are whole segments, so the daemon
/// rounds nothing.
const CACHES: [(&str, &str); 3] = [("4M", "4K"), ("8M", "16K"), ("8M", "64K")];

/// Counts that the daemon and the lab both have.
#[derive(Debug, PartialEq, Eq)]
struct Counts {
    reads: u64,
    hits: u64,
    partial_misses: u64,
    misses: u64,
    not_admitted: u64,
    writes: u64,
    evicted_blocks: u64,
}

impl Counts {
    fn simulated(row: &Value) -> Counts {
        let number = |name: &str| row[name].as_u64().unwrap_or_else(|| panic!("{name} in {row}"));
        let (reads, hits) = (number("reads"), number("read_hits"));
        let (partial_misses, not_admitted) = (number("partial_misses"), number("not_admitted"));
        Counts {
            reads,
            hits,
            partial_misses,
            misses: reads - hits - partial_misses - not_admitted,
            not_admitted,
            writes: number("writes"),
            evicted_blocks: number("evictions"),
        }
    }

    fn served(stats: &Stats) -> Counts {
        let number = |name: &str| stats.number(name).unwrap_or_else(|| panic!("{name}")) as u64;
        for class in ["cache-off", "flash-error", "backing-error", "refused"] {
            assert_eq!(stats.class(class), 0, "{class}: {}", stats.text());
        }
        Counts {
            reads: number("reads"),
            hits: stats.class("hit"),
            partial_misses: stats.class("partial-miss"),
            misses: stats.class("miss-filled"),
            not_admitted: stats.class("miss-not-admitted"),
            writes: stats.class("write"),
            evicted_blocks: stats.evicted_blocks(),
        }
    }
}

/// Writes a trace of reads, writes and trims of 512 bytes to 128 KiB: hot spots, a repeated scan,
/// and random requests, each followed by a request that waits for it.
fn trace(path: &Path) {
    trace_with(path, PartialWrites::Some);
}

/// Whether the trace has writes of parts of sectors.
#[derive(Clone, Copy, PartialEq, Eq)]
enum PartialWrites {
    Some,
    None,
}

fn trace_with(path: &Path, partial_writes: PartialWrites) {
    let (mut noise, mut scan) = (Noise::new(0x1ab), 0);
    let mut requests = Vec::new();
    while requests.len() < REQUESTS {
        // Half of the requests are whole sectors, as with most guests.
        let unit = [512, SECTOR][noise.below(2) as usize];
        let (offset, len) = match noise.below(10) {
            0..6 => {
                // The first of 192 hot spots are hotter.
                let spot = noise.below(192).min(noise.below(192));
                let len = (1 + noise.below(16 * 1024 / unit)) * unit;
                (spot * 163 * 1024 / unit * unit + noise.below(4) * unit, len)
            }
            6..8 => {
                let (offset, len) = (20 * MIB + scan, 32 * 1024);
                scan = (scan + len) % (6 * MIB);
                (offset, len)
            }
            _ => {
                let len = (1 + noise.below(128 * 1024 / unit)) * unit;
                (noise.below((SIZE - len) / unit) * unit, len)
            }
        };
        let end = offset + len;
        match noise.below(100) {
            0..55 => requests.extend([('R', offset, len); 2]),
            55..95 if partial_writes == PartialWrites::None => {
                let (first, end) = (offset / SECTOR * SECTOR, end.next_multiple_of(SECTOR));
                requests.extend([('W', first, end - first), ('R', offset, len)]);
            }
            55..95 => {
                let partly = [(offset, offset), (end, end - 512)];
                let partly = partly.into_iter().find(|(edge, _)| !edge.is_multiple_of(SECTOR));
                let waiting = partly.map_or(('R', offset, len), |(_, within)| ('D', within, 512));
                requests.extend([('W', offset, len), waiting]);
            }
            _ => requests.push(('D', offset, len)),
        }
    }
    let mut lines = String::from("ts_us,op,offset,size\n");
    for (i, (op, offset, len)) in requests.into_iter().take(REQUESTS).enumerate() {
        writeln!(lines, "{i},{op},{offset},{len}").unwrap();
    }
    std::fs::write(path, lines).unwrap();
}

/// Admission rule of the simulation and of the daemon. The daemon's default depends on the mode.
const ADMISSION: &str = "always";

/// Returns every policy of the daemon, from its error message for a policy that does not exist.
fn policies() -> Vec<String> {
    let output = hob::command(&["serve", "--policy", "?"]);
    let (_, list) =
        output.stderr.split_once("possible values: ").unwrap_or_else(|| panic!("{}", output.all()));
    let (list, _) = list.split_once(']').unwrap();
    let names: Vec<String> = list.split(", ").map(str::to_owned).collect();
    assert!(names.len() >= 3 && names.iter().any(|name| name == "s3-fifo"), "{names:?}");
    names
}

fn predict(trace: &str, policy: &str, (size, block_size): (&str, &str)) -> Counts {
    let args = [
        "lab",
        "sim",
        trace,
        "--policy",
        policy,
        "--admission",
        ADMISSION,
        "--size",
        size,
        "--block-size",
        block_size,
        "-o",
        "json",
    ];
    let output = hob::command(&args);
    assert!(output.success(), "{args:?}: {}", output.all());
    let report: Value = serde_json::from_str(&output.stdout).unwrap();
    Counts::simulated(&report["results"][0])
}

fn serve(scratch: &Scratch, trace: &str, policy: &str, (size, block_size): (&str, &str)) -> Counts {
    let (disk, pool) = (scratch.path("disk.img"), scratch.path("pool"));
    // The content of the disk does not matter here; other tests check the content.
    empty_file(&disk, SIZE);
    let _ = std::fs::remove_file(&pool);
    let hob = Serve::disk(&scratch.text("disk.img"))
        .cached(&pool, size, block_size)
        .arg("--policy", policy)
        .arg("--admission", ADMISSION)
        .arg("--fill", "sectors")
        .start(scratch);
    let uri = hob.uri();
    let args = ["replay", trace, "--target", &uri, "--pace", "asap", "--depth", "1", "--allow-writes"];
    let output = hob::command(&[&args[..], &["-o", "json"]].concat());
    assert!(output.success(), "{args:?}: {}", output.all());
    let report: Value = serde_json::from_str(&output.stdout).unwrap();
    assert_eq!((&report["answered"], &report["errors"]), (&REQUESTS.into(), &0.into()), "{report}");
    let counts = Counts::served(&hob.stats());
    hob.stop();
    counts
}

fn check(policy: &str) {
    let scratch = Scratch::new();
    trace(&scratch.path("trace.csv"));
    let file = scratch.text("trace.csv");
    for cache in CACHES {
        let predicted = predict(&file, policy, cache);
        let what = format!("{policy}, {} in blocks of {}", cache.0, cache.1);
        // The trace is useful: all compared events happen, and not only for the second requests.
        let Counts { reads, hits, partial_misses, misses, evicted_blocks, .. } = predicted;
        assert!(
            hits > reads / 2 && misses.min(evicted_blocks).min(partial_misses) >= 50,
            "{what}: {predicted:?}"
        );
        assert_eq!(serve(&scratch, &file, policy, cache), predicted, "{what}: served, and predicted");
    }
}

#[test]
fn the_daemon_matches_the_labs_prediction() {
    let policies = policies();
    thread::scope(|scope| {
        let checks: Vec<_> = policies.iter().map(|policy| scope.spawn(move || check(policy))).collect();
        for (policy, check) in policies.iter().zip(checks) {
            assert!(check.join().is_ok(), "{policy}: see above");
        }
    });
}

/// One pass over all sizes gives the same results as a simulation of each size.
#[test]
fn a_miss_ratio_curve_goes_through_every_lru_simulation() {
    let scratch = Scratch::new();
    let (trace, curve) = (scratch.text("t.csv"), scratch.text("curve.csv"));
    // Whether a partly written sector is merged depends on the cache size, which a curve from one
    // pass cannot consider.
    trace_with(&scratch.path("t.csv"), PartialWrites::None);
    let sizes = ["256K", "1M", "4M", "16M"];
    for block_size in ["4K", "64K"] {
        let common = [&trace, "--block-size", block_size, "-o", "json", "--csv", &curve];
        json(&[&["lab", "mrc", "--exact"], &common[..]].concat());
        let text = std::fs::read_to_string(&curve).unwrap();
        let mut rows = text.lines().map(|line| line.split(',').collect::<Vec<_>>());
        let head = rows.next().unwrap();
        let rows: Vec<Vec<&str>> = rows.collect();
        let size_list = sizes.join(",");
        let sim = json(&[&["lab", "sim", "--policy", "lru", "--size", &size_list], &common[..5]].concat());
        for point in sim["results"].as_array().unwrap() {
            let size = point["cache_bytes"].to_string();
            let row = rows.iter().find(|row| row[1] == size).unwrap_or_else(|| panic!("{size} in {text}"));
            for name in ["read_hit_ratio", "byte_hit_ratio", "flash_write_bytes", "backing_ios"] {
                let column = head.iter().position(|column| *column == name).unwrap();
                let (curve, sim): (f64, f64) = (row[column].parse().unwrap(), point[name].as_f64().unwrap());
                assert!((curve - sim).abs() < 1e-9, "{name}, {size}, blocks of {block_size}: {curve}, {sim}");
            }
        }
    }
}

#[test]
fn a_generated_trace_has_the_requested_parameters() {
    let scratch = Scratch::new();
    let (trace, lines, picture) = (scratch.text("t.trace"), scratch.text("t.csv"), scratch.text("rate.svg"));
    let settings = ["requests=20000", "footprint=32MiB", "read-percent=75", "seed=7"];
    let generate = |out: &str, to: &str| {
        let args = [&["lab", "generate", "zipf"], &settings[..], &["--out", out, "--to", to]].concat();
        hob::command(&args)
    };
    assert!(generate(&trace, "binary").success() && generate(&lines, "csv").success());
    let again = generate(&trace, "binary");
    assert!(!again.success() && again.stderr.contains("--force"), "{}", again.all());
    let mut profiles =
        [&trace, &lines].map(|file| json(&["lab", "info", file, "--picture", &picture, "-o", "json"]));
    for profile in &mut profiles {
        assert_eq!(profile["requests"], 20_000, "{profile}");
        assert!((profile["read_percent"].as_f64().unwrap() - 75.0).abs() < 2.0, "{profile}");
        assert!(profile["footprint"]["bytes"].as_u64().unwrap() <= 32 * MIB, "{profile}");
        // CSV has whole microseconds.
        for name in ["trace", "format", "disk_names", "gaps", "arrivals", "duration_ns"] {
            profile[name] = Value::Null;
        }
    }
    assert_eq!(profiles[0], profiles[1]);
    assert!(std::fs::read_to_string(&picture).unwrap().starts_with("<svg "));

    let exact = json(&["lab", "mrc", &trace, "-o", "json"]);
    let sampled = json(&["lab", "mrc", &trace, "--samples", "4096", "-o", "json"]);
    let ratios = |report: &Value| -> Vec<f64> {
        let rows = report["curves"][0]["rows"].as_array().unwrap();
        rows.iter().map(|row| row["read_hit_ratio"].as_f64().unwrap()).collect()
    };
    // The lab reports that a curve of some eighty sampled blocks is inaccurate.
    let few = json(&["lab", "mrc", &trace, "--sample", "0.01", "-o", "json"]);
    for (report, warns) in [(&exact, false), (&sampled, false), (&few, true)] {
        let notes = report["notes"].as_array().unwrap();
        let warning = notes.iter().any(|note| note.as_str().unwrap().contains("the curve is inaccurate"));
        assert_eq!(warning, warns, "{notes:?}");
    }
    let (exact, sampled) = (ratios(&exact), ratios(&sampled));
    assert!(exact.len() == 7 && exact.is_sorted() && exact[6] > 0.5, "{exact:?}");
    let error = exact.iter().zip(&sampled).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
    assert!(error < 0.05, "{exact:?}, {sampled:?}");

    let list = json(&["lab", "generate", "-o", "json"]);
    for name in list.as_array().unwrap().iter().map(|generator| generator["name"].as_str().unwrap()) {
        let args = ["lab", "generate", name, "scale=1000", "--requests", "300", "--out", &lines, "--force"];
        let output = hob::command(&args);
        assert!(output.success() && output.stderr.starts_with("300 requests"), "{name}: {}", output.all());
    }
}

#[track_caller]
fn json(args: &[&str]) -> Value {
    let output = hob::command(args);
    assert!(output.success(), "{args:?}: {}", output.all());
    serde_json::from_str(&output.stdout).unwrap_or_else(|e| panic!("{e}: {}", output.stdout))
}
