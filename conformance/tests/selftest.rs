//! `hob selftest`: it succeeds, it can fail, and its fault layer is never used by accident.
//!
//! `HOB_KILLS` is the number of power cuts (default 9, one for each setup).

use std::process::Command;
use std::time::{Duration, Instant};

use conformance::hob::binary;
use conformance::process::{Output, Process, alive, descendants};
use conformance::{MIB, Scratch, Serve};
use rustix::process::Signal;
use serde_json::Value;

/// Longer than a power cut takes on any machine.
const CUT_MAX: Duration = Duration::from_secs(60);

fn start(scratch: &Scratch, args: &[&str]) -> Process {
    let mut command = Command::new(binary());
    command.args(["selftest", "--dir", &scratch.text(""), "-o", "json"]).args(args);
    if let Ok(ring) = std::env::var("HOB_RING") {
        command.args(["--ring", &ring]);
    }
    Process::start("hob selftest", &mut command).unwrap_or_else(|e| panic!("start hob: {e}"))
}

fn selftest(scratch: &Scratch, cuts: u32, args: &[&str]) -> Output {
    let count = cuts.to_string();
    start(scratch, &[&["--power-cut", &count], args].concat()).finish(CUT_MAX * (cuts + 1))
}

/// Promise 1 with a device that loses unflushed writes, and promise 2 after each restart.
#[test]
fn power_cuts_lose_nothing_that_was_flushed() {
    let cuts: u32 = std::env::var("HOB_KILLS").ok().map_or(9, |n| n.parse().expect("HOB_KILLS is a number"));
    let scratch = Scratch::new();
    let output = selftest(&scratch, cuts, &[]);
    assert!(output.success(), "{:?}: {}", output.status, output.all());
    let report: Value = serde_json::from_str(&output.stdout).expect("a report in JSON");
    let setups = report["setups"].as_array().expect("setups");
    let sum = |of: &dyn Fn(&Value) -> u64| setups.iter().map(of).sum::<u64>();
    let made = sum(&|setup| {
        ["starting", "checking", "under_load"]
            .iter()
            .map(|phase| setup["cuts"][phase].as_u64().unwrap())
            .sum()
    });
    assert_eq!(made, u64::from(cuts), "{report}");
    for what in ["writes", "fua", "flushes"] {
        assert!(sum(&|setup| setup[what].as_u64().unwrap()) > 0, "no {what}: {report}");
    }
    assert!(sum(&|setup| setup["bytes_checked"].as_u64().unwrap()) > 16 * MIB, "{report}");
    assert_eq!(std::fs::read_dir(scratch.path("")).unwrap().count(), 0, "it leaves files behind");
    println!("{report}");
}

/// The test must be able to fail: on a device that ignores flushes, hob cannot keep its promise.
#[test]
fn a_device_that_ignores_flushes_is_found_out() {
    let scratch = Scratch::new();
    let output = selftest(&scratch, 20, &["--ignore-flushes", "--seed", "7"]);
    assert_eq!(output.status.and_then(|status| status.code()), Some(1), "{}", output.all());
    assert!(output.stderr.contains("FAILED") && output.stderr.contains("durable"), "{}", output.stderr);
    assert!(output.stderr.contains("--seed 7"), "it does not say how to repeat it: {}", output.stderr);
    assert!(std::fs::read_dir(scratch.path("")).unwrap().count() > 0, "the evidence is kept");
}

#[test]
fn ctrl_c_ends_it_and_nothing_is_left() {
    let scratch = Scratch::new();
    let mut process = start(&scratch, &["--power-cut", "100000"]);
    let daemon = daemon_of(&process);
    process.signal(Signal::INT);
    let output = process.finish(CUT_MAX);
    assert!(output.success(), "{}", output.all());
    let report: Value = serde_json::from_str(&output.stdout).expect("a report in JSON");
    assert_eq!(report["interrupted"], true, "{report}");
    assert!(!alive(daemon), "the daemon goes on");
    assert_eq!(std::fs::read_dir(scratch.path("")).unwrap().count(), 0, "it leaves files behind");
}

#[test]
fn a_daemon_whose_tester_is_killed_ends_too() {
    let scratch = Scratch::new();
    let mut process = start(&scratch, &["--power-cut", "100000"]);
    daemon_of(&process);
    let left = descendants(process.pid());
    process.kill();
    let start = Instant::now();
    while left.iter().any(|pid| alive(*pid)) {
        assert!(start.elapsed() < CUT_MAX, "a daemon over a layer that loses data outlives its tester");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Waits until the daemon exists, and returns its process id.
fn daemon_of(process: &Process) -> u32 {
    let start = Instant::now();
    loop {
        if let Some(daemon) = descendants(process.pid()).first() {
            return *daemon;
        }
        assert!(start.elapsed() < CUT_MAX, "no daemon: {}", process.stderr());
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn an_invalid_power_cut_setting_is_refused() {
    let scratch = Scratch::new();
    conformance::data::empty_file(&scratch.path("disk.img"), MIB);
    for value in ["", "1", "1 2 honest 0", &format!("{} 2 honest 0", u32::MAX)] {
        let serve = Serve::disk(&scratch.text("disk.img")).env("HOB_SELFTEST_POWER_CUT", value);
        let output = serve.refused(&scratch);
        assert!(output.stderr.contains("unset it"), "'{value}': {}", output.stderr);
    }
}
