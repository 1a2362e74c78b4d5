//! `cargo xtask bench lab` measures the lab's simulation speed, and compares its miss ratios with
//! those of libCacheSim.
//!
//! The trace has twenty million reads of 4 KiB over a million blocks with a Zipf distribution
//! (exponent 1), in hob's format. The caches have 1 % and 10 % of the touched blocks. Each cache is
//! simulated alone in one thread, including the time to read the trace. The reference values were
//! measured earlier with libCacheSim on a similar host and another random trace. If the reference
//! speed is a range, the lower value applies to the small cache, which has more misses.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail, ensure};
use serde_json::{Value, json};

use super::{hob, median};
use crate::shell;

/// libCacheSim's results for a policy, for caches of 1 % and 10 %: speed in million requests per
/// second, and miss ratios.
struct Reference {
    policy: &'static str,
    speeds: Option<[f64; 2]>,
    /// Required ratio of hob's speed to libCacheSim's speed.
    times: f64,
    misses: Option<[f64; 2]>,
}

const REFERENCES: [Reference; 11] = [
    Reference { policy: "fifo", speeds: Some([3.7, 3.7]), times: 4.0, misses: None },
    Reference { policy: "lru", speeds: Some([2.7, 3.6]), times: 4.0, misses: Some([0.422, 0.230]) },
    Reference { policy: "s3-fifo", speeds: Some([2.0, 2.0]), times: 4.0, misses: Some([0.343, 0.189]) },
    Reference { policy: "clock", speeds: Some([4.0, 4.0]), times: 3.0, misses: None },
    Reference { policy: "arc", speeds: Some([3.5, 3.5]), times: 3.0, misses: Some([0.346, 0.193]) },
    Reference { policy: "sieve", speeds: Some([5.0, 6.7]), times: 3.0, misses: Some([0.345, 0.191]) },
    Reference { policy: "wtinylfu", speeds: Some([1.7, 2.7]), times: 3.0, misses: Some([0.344, 0.187]) },
    Reference { policy: "2q", speeds: Some([2.0, 2.0]), times: 3.0, misses: Some([0.357, 0.200]) },
    Reference { policy: "clock2qplus", speeds: Some([2.0, 2.0]), times: 3.0, misses: None },
    Reference { policy: "lirs", speeds: Some([1.25, 1.25]), times: 3.0, misses: Some([0.346, 0.193]) },
    Reference { policy: "optimum", speeds: None, times: 0.0, misses: Some([0.287, 0.134]) },
];

/// Policies without a reference value. The benchmark measures these policies, but requires no
/// result.
const OTHERS: [&str; 3] = ["lfu", "larc", "two-level-lru"];
const SHARES: [&str; 2] = ["1%", "10%"];
/// Maximum difference between a miss ratio and its reference value, which comes from another random
/// trace.
const MISSES_OFF_MAX: f64 = 0.01;

#[derive(Debug, clap::Args)]
pub(crate) struct Arguments {
    /// Write all results to this JSON file
    #[arg(long)]
    json: Option<PathBuf>,
    /// Number of rounds; the best round counts, because other programs only slow a run down
    #[arg(long, default_value_t = 3)]
    rounds: u32,
    /// Number of requests; with fewer requests, the results only show that the benchmark works
    #[arg(long, default_value_t = 20_000_000)]
    requests: u64,
    /// Directory for the trace [default: memory]
    #[arg(long, default_value = "/dev/shm")]
    dir: PathBuf,
    /// hob binary to measure [default: HOB_BIN, or a new release build]
    #[arg(long)]
    hob: Option<PathBuf>,
    /// Fail if a required value is missed
    #[arg(long)]
    strict: bool,
}

/// Measurements of one policy, by cache size.
#[derive(Default)]
struct Measured {
    /// Million requests per second, by round.
    speeds: [Vec<f64>; 2],
    misses: [f64; 2],
    bytes_per_block: f64,
}

pub(crate) fn run(arguments: &Arguments) -> Result<()> {
    let hob = hob(arguments.hob.as_deref())?;
    let interrupt = shell::Interrupt::listen()?;
    let scratch = tempfile::Builder::new()
        .prefix("hob-bench-")
        .tempdir_in(&arguments.dir)
        .with_context(|| format!("make a directory in {}", arguments.dir.display()))?;
    let trace = scratch.path().join("zipf.trace");
    println!("making the trace: {} requests", arguments.requests);
    let count = format!("requests={}", arguments.requests);
    let made = Command::new(&hob)
        .args(["lab", "generate", "zipf", &count, "footprint=3906250K", "--out"])
        .arg(&trace)
        .status()?;
    ensure!(made.success(), "hob lab generate failed");

    // One run for all sizes gives the cache sizes in bytes.
    let first = simulate(&hob, &trace, "fifo", "1%,10%")?;
    let sizes: Vec<String> = first["results"]
        .as_array()
        .context("results")?
        .iter()
        .map(|row| row["cache_bytes"].to_string())
        .collect();
    let mut measured: BTreeMap<&str, Measured> = BTreeMap::new();
    let policies = REFERENCES.iter().filter(|r| r.speeds.is_some()).map(|r| r.policy).chain(OTHERS);
    for round in 0..arguments.rounds.max(1) {
        for policy in policies.clone() {
            for (i, size) in sizes.iter().enumerate() {
                interrupt.check()?;
                let answer = simulate(&hob, &trace, policy, size)?;
                let row = &answer["results"][0];
                let measured = measured.entry(policy).or_default();
                let seconds = answer["seconds"].as_f64().context("seconds")?;
                measured.speeds[i].push(arguments.requests as f64 / seconds / 1e6);
                measured.misses[i] = 1.0 - row["read_hit_ratio"].as_f64().context("a hit ratio")?;
                let bytes = row["memory_bytes_per_block"].as_f64().context("bytes")?;
                measured.bytes_per_block = measured.bytes_per_block.max(bytes);
            }
            println!("round {} of {}: {policy}", round + 1, arguments.rounds.max(1));
        }
    }
    let optimum = simulate(&hob, &trace, "optimum", &sizes.join(","))?;
    let miss = |row: &Value| Some(1.0 - row["block_hit_ratio"].as_f64()?);
    let of_optimum = optimum["results"].as_array().context("results")?.iter().map(miss);
    let misses: Vec<f64> = of_optimum.collect::<Option<_>>().context("ratios")?;
    measured.entry("optimum").or_default().misses = [misses[0], misses[1]];

    let missed = show(&measured);
    let results: Value = measured.iter().map(|(policy, measured)| measured.json(policy)).collect();
    super::write_json(arguments.json.as_deref(), &results)?;
    if arguments.strict && missed > 0 {
        bail!("{missed} bars missed");
    }
    Ok(())
}

fn simulate(hob: &Path, trace: &Path, policy: &str, size: &str) -> Result<Value> {
    let output = Command::new(hob)
        .args(["lab", "sim", "--threads", "1", "-o", "json", "--policy", policy, "--size", size])
        .arg(trace)
        .output()?;
    ensure!(output.status.success(), "hob lab sim: {}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).context("what hob lab sim says")
}

impl Measured {
    /// Returns the best speed, or `None` for the optimum, which is not timed.
    fn best(&self, share: usize) -> Option<f64> {
        self.speeds[share].iter().copied().max_by(f64::total_cmp)
    }

    fn json(&self, policy: &str) -> Value {
        json!({
            "policy": policy,
            "million_requests_a_second": self.speeds,
            "miss_ratios": self.misses,
            "bytes_per_block": self.bytes_per_block,
        })
    }
}

fn speed(speed: Option<f64>) -> String {
    speed.map_or(String::new(), |speed| format!("{speed:.1}"))
}

/// Prints the table and returns the number of missed requirements.
fn show(measured: &BTreeMap<&str, Measured>) -> u32 {
    let mut missed = 0;
    let mut verdict = |good: bool| {
        missed += u32::from(!good);
        if good { "met" } else { "MISSED" }
    };
    println!(
        "\n{:<14} {:>8} {:>8} {:>8} {:>10} {:>8}   {:>7} {:>7} {:>13}   {:>7}",
        "policy", SHARES[0], SHARES[1], "median", "bar", "", "misses", "", "reference", "B/block"
    );
    for (policy, figures) in measured {
        let reference = REFERENCES.iter().find(|reference| reference.policy == *policy);
        let bars = reference.and_then(|r| r.speeds.map(|speeds| speeds.map(|speed| speed * r.times)));
        let fast_enough =
            |bars: [f64; 2]| figures.best(0) >= Some(bars[0]) && figures.best(1) >= Some(bars[1]);
        let speed_verdict = bars.map_or("", |bars| verdict(fast_enough(bars)));
        let [one, ten] = figures.misses;
        let misses = reference.and_then(|r| r.misses);
        let close = |[a, b]: [f64; 2]| (a - one).abs() <= MISSES_OFF_MAX && (b - ten).abs() <= MISSES_OFF_MAX;
        let misses_verdict = misses.map_or("", |misses| verdict(close(misses)));
        let reference = misses.map_or(String::new(), |[a, b]| format!("{a:.3}/{b:.3}"));
        println!(
            "{policy:<14} {:>8} {:>8} {:>8} {:>10} {speed_verdict:>8}   {one:>7.3} {ten:>7.3} {reference:>13} \
             {misses_verdict:<6} {:>7.1}",
            speed(figures.best(0)),
            speed(figures.best(1)),
            speed(median(figures.speeds.iter().flatten().copied())),
            bars.map_or(String::new(), |[one, ten]| format!("{one:.1}/{ten:.1}")),
            figures.bytes_per_block,
        );
    }
    println!("\nmillion requests a second, best of the rounds; caches of 1 % and 10 % of the blocks touched");
    missed
}
