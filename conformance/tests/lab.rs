//! The daemon does what the lab predicts: `hob lab sim` and a served disk to which `hob replay` sends the
//! same trace agree on every hit, miss and eviction, for every policy that serves.

use std::fmt::Write;
use std::path::Path;
use std::thread;

use conformance::data::{Noise, empty_file};
use conformance::stats::Stats;
use conformance::{MIB, Scratch, Serve, hob};
use serde_json::Value;

const SIZE: u64 = 32 * MIB;
const REQUESTS: u64 = 3_000;

/// Caches: bytes and block, as the command line takes them. Whole segments, so that the daemon rounds nothing.
const CACHES: [(&str, &str); 3] = [("4M", "4K"), ("8M", "16K"), ("8M", "64K")];

/// Between two requests, microseconds.
///
/// The daemon answers a miss or a write first and fills flash afterwards; the simulation knows no "afterwards". What a
/// fill in flight holds cannot be evicted, so a request that comes before it has ended may push out another block.
/// At depth 1 nothing but time keeps them apart: a flush does not wait for fills, and whatever would
/// (a request for the same sectors) is a use of the block, which a policy remembers. So the replay leaves a gap that
/// is several times as long as a fill takes.
const GAP_US: u64 = 1_000;

/// A replay may still meet a machine too busy for that. One that does not agree is done again with a gap of this many
/// times the length; a difference in what is decided, rather than in when, comes back with it.
const GAP_FACTORS: [u64; 3] = [1, 4, 16];

/// What both count.
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

/// Reads, writes and trims of 512 bytes to 128 KiB: hot spots, a scan that comes round, and requests anywhere.
fn trace(path: &Path, gap_us: u64) {
    let mut noise = Noise::new(0x1ab);
    let mut scan = 0;
    let mut lines = String::from("ts_us,op,offset,size\n");
    for i in 0..REQUESTS {
        let op = match noise.below(100) {
            0..68 => 'R',
            68..96 => 'W',
            _ => 'D',
        };
        // Half of the requests are whole sectors, as most guests send them.
        let unit = [512, 4096][noise.below(2) as usize];
        let (offset, len) = match noise.below(10) {
            0..6 => {
                // Of 96 hot spots the first are hotter.
                let spot = noise.below(96).min(noise.below(96)).min(noise.below(96));
                let len = (1 + noise.below(16 * 1024 / unit)) * unit;
                (spot * 331 * 1024 / unit * unit + noise.below(4) * unit, len)
            }
            6..8 => {
                let len = 32 * 1024;
                let offset = scan;
                scan = (scan + len) % (6 * MIB);
                (20 * MIB + offset, len)
            }
            _ => {
                let len = (1 + noise.below(128 * 1024 / unit)) * unit;
                (noise.below((SIZE - len) / unit) * unit, len)
            }
        };
        writeln!(lines, "{},{op},{offset},{len}", i * gap_us).unwrap();
    }
    std::fs::write(path, lines).unwrap();
}

/// Every policy that the daemon offers, from what it says to one that does not exist.
fn policies() -> Vec<String> {
    let output = hob::command(&["serve", "--policy", "?"]);
    let (_, list) = output.stderr.split_once("possible values: ").unwrap_or_else(|| panic!("{}", output.all()));
    let (list, _) = list.split_once(']').unwrap();
    let names: Vec<String> = list.split(", ").map(str::to_owned).collect();
    assert!(names.len() >= 3 && names.iter().any(|name| name == "s3-fifo"), "{names:?}");
    names
}

fn predict(trace: &str, policy: &str, (size, block_size): (&str, &str)) -> Counts {
    let args = ["lab", "sim", trace, "--policy", policy, "--size", size, "--block-size", block_size, "-o", "json"];
    let output = hob::command(&args);
    assert!(output.success(), "{args:?}: {}", output.all());
    let report: Value = serde_json::from_str(&output.stdout).unwrap();
    Counts::simulated(&report["results"][0])
}

fn serve(scratch: &Scratch, trace: &str, policy: &str, (size, block_size): (&str, &str)) -> Counts {
    let (disk, pool) = (scratch.path("disk.img"), scratch.path("pool"));
    // What the disk holds does not matter here; that guests get it is shown elsewhere.
    empty_file(&disk, SIZE);
    let _ = std::fs::remove_file(&pool);
    let hob = Serve::disk(&scratch.text("disk.img"))
        .cached(&pool, size, block_size)
        .arg("--policy", policy)
        .start(scratch);
    let args = ["replay", trace, "--target", &hob.uri(), "--depth", "1", "--allow-writes", "-o", "json"];
    let output = hob::command(&args);
    assert!(output.success(), "{args:?}: {}", output.all());
    let report: Value = serde_json::from_str(&output.stdout).unwrap();
    assert_eq!((&report["answered"], &report["errors"]), (&REQUESTS.into(), &0.into()), "{report}");
    let counts = Counts::served(&hob.stats());
    hob.stop();
    counts
}

fn check(policy: &str) {
    let scratch = Scratch::new();
    let file = scratch.text("trace.csv");
    for cache in CACHES {
        trace(&scratch.path("trace.csv"), GAP_US);
        let predicted = predict(&file, policy, cache);
        let what = format!("{policy}, {} in blocks of {}", cache.0, cache.1);
        // The trace is worth comparing: everything that is compared happens.
        let Counts { hits, partial_misses, misses, evicted_blocks, .. } = predicted;
        assert!(hits.min(misses).min(evicted_blocks).min(partial_misses) >= 50, "{what}: {predicted:?}");
        let mut served = Vec::new();
        for factor in GAP_FACTORS {
            trace(&scratch.path("trace.csv"), GAP_US * factor);
            served.push(serve(&scratch, &file, policy, cache));
            if served.last() == Some(&predicted) {
                break;
            }
        }
        assert_eq!(served.last(), Some(&predicted), "{what}: served, and predicted; all tries: {served:?}");
        if served.len() > 1 {
            eprintln!("{what}: agreed at try {}: {served:?}", served.len());
        }
    }
}

#[test]
fn the_daemon_does_what_the_lab_predicts() {
    let policies = policies();
    // They mostly wait.
    thread::scope(|scope| {
        let checks: Vec<_> = policies.iter().map(|policy| scope.spawn(move || check(policy))).collect();
        for (policy, check) in policies.iter().zip(checks) {
            assert!(check.join().is_ok(), "{policy}: see above");
        }
    });
}
