//! `cargo xtask bench scaling --quick` measures each part on little data, and Ctrl-C ends it without
//! remains.
//!
//! `HOB_BENCH_BIN` names the benchmark program. Without this variable, the tests run the program that
//! cargo has built in the directory of the tests.

use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use conformance::Scratch;
use conformance::hob::binary;
use conformance::process::Process;
use conformance::scratch::{text, wait_for};
use rustix::process::Signal;
use serde_json::Value;

/// Maximum time of a quick run with a debug build of hob, on busy processors.
const QUICK_MAX: Duration = Duration::from_secs(400);

/// The parts, each with its numbers of rows and of charts in a quick run.
const PARTS: [(&str, usize, usize); 5] = [
    ("cache-size", 2, 4),
    ("disks", 2, 4),
    ("connections", 2, 2),
    ("dirty-fraction", 2, 2),
    ("block-size", 2, 2),
];

/// Returns the benchmark program.
#[track_caller]
fn bench() -> PathBuf {
    let named = std::env::var_os("HOB_BENCH_BIN").map(PathBuf::from);
    let built = || {
        // A test program is in TARGET/PROFILE/deps/.
        let me = std::env::current_exe().expect("the test knows its own path");
        me.ancestors().nth(2).expect("a directory of builds").join("bench")
    };
    let path = named.unwrap_or_else(built);
    assert!(
        path.is_file(),
        "{} does not exist; run cargo build -p bench, or set HOB_BENCH_BIN",
        path.display()
    );
    path
}

/// Starts a quick run with its files in the directory `data` of `scratch`.
#[track_caller]
fn start(scratch: &Scratch, options: &[&str]) -> Process {
    let mut command = Command::new(bench());
    command.args(["scaling", "--quick", "--hob", &text(&binary()), "--dir", &scratch.text("data")]);
    Process::start("bench", command.args(options)).unwrap_or_else(|e| panic!("start the benchmark: {e}"))
}

/// Checks that a run has removed all of its files.
#[track_caller]
fn assert_nothing_remains(scratch: &Scratch) {
    let remains: Vec<_> = std::fs::read_dir(scratch.path("data")).unwrap().flatten().collect();
    assert!(remains.is_empty(), "{remains:?}");
}

#[test]
fn a_quick_run_measures_each_part() {
    let scratch = Scratch::new();
    let options = ["--json", &scratch.text("all.json"), "--plots", &scratch.text("plots")];
    let output = start(&scratch, &options).finish(QUICK_MAX);
    assert!(output.success(), "{}", output.all());
    let all: Value = serde_json::from_slice(&std::fs::read(scratch.path("all.json")).unwrap()).unwrap();
    let parts = all["parts"].as_array().expect("a list of parts");
    assert_eq!(parts.len(), PARTS.len(), "{all}");
    for (part, (name, rows, charts)) in parts.iter().zip(PARTS) {
        assert_eq!(part["part"], name);
        let measured = part["rows"].as_array().expect("a list of rows");
        assert_eq!(measured.len(), rows, "{part}");
        for row in measured {
            let iops = if name == "dirty-fraction" { ["read_iops", "write_iops"] } else { ["iops"; 2] };
            assert!(iops.iter().all(|key| row[key].as_f64() > Some(0.0)), "{row}");
        }
        let drawn: Vec<String> = std::fs::read_dir(scratch.path("plots"))
            .unwrap()
            .filter_map(|entry| entry.unwrap().file_name().into_string().ok())
            .filter(|file| file.starts_with(&format!("scaling-{name}-")) && file.ends_with(".svg"))
            .collect();
        assert_eq!(drawn.len(), charts, "{drawn:?}");
    }
    let sizes = parts[0]["rows"].as_array().unwrap();
    let keys = ["resident_bytes", "killed_reply_s", "killed_recovered_s", "killed_peak_bytes"];
    assert!(keys.iter().all(|key| sizes[1][key].as_f64() > Some(0.0)), "{}", sizes[1]);
    let disks = parts[1]["rows"].as_array().unwrap();
    let metrics = |row: &Value| row["metrics_bytes"].as_f64();
    assert!(metrics(&disks[1]) > metrics(&disks[0]), "{}", parts[1]);
    let dirty = parts[3]["rows"].as_array().unwrap();
    assert!(
        dirty[0]["dirty"].as_f64() < Some(0.01) && dirty[1]["dirty"].as_f64() > Some(0.4),
        "{}",
        parts[3]
    );
    assert!(output.stdout.contains("| cache | IOPS | CPU per I/O | hits |"), "{}", output.stdout);
    assert_nothing_remains(&scratch);
}

#[test]
fn an_interrupted_run_leaves_nothing() {
    let scratch = Scratch::new();
    let mut process = start(&scratch, &["--only", "cache-size"]);
    wait_for("the first load", || process.poll().is_some() || process.stdout().contains("warming"));
    process.signal(Signal::INT);
    let output = process.finish(QUICK_MAX);
    assert!(output.status.is_some_and(|status| !status.success()), "{}", output.all());
    assert!(output.stderr.contains("bench: interrupted"), "{}", output.all());
    assert_nothing_remains(&scratch);
}
