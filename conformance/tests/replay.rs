//! `hob replay`: a recorded trace is sent to another disk, which receives the same requests.
//! Dangerous replays are refused. A replay that ends early reports what it did.

use std::process::Command;
use std::time::Duration;

use conformance::data::{assert_same, noise_file};
use conformance::nbd_client::Client;
use conformance::process::Process;
use conformance::scratch::wait_for;
use conformance::trace::{Request, Trace};
use conformance::{Hob, MIB, Scratch, Serve, hob};
use rustix::process::Signal;
use serde_json::Value;

const SIZE: u64 = 16 * MIB;

/// Maximum number of replays in which the host may delay the first request.
const ATTEMPTS_MAX: u32 = 5;

fn stage() -> (Scratch, Hob) {
    let scratch = Scratch::new();
    noise_file(&scratch.path("disk.img"), SIZE, 91);
    let hob = Serve::disk(&scratch.text("disk.img")).start(&scratch);
    (scratch, hob)
}

/// Records the disk while `work` runs.
#[track_caller]
fn recorded(scratch: &Scratch, hob: &Hob, work: impl FnOnce()) -> Trace {
    let mut recording = hob.record(&scratch.path("trace"), &[]);
    work();
    recording.signal(Signal::INT);
    let output = recording.finish(Duration::from_secs(60));
    assert!(output.success(), "{}", output.all());
    let trace = Trace::read(&scratch.path("trace"));
    assert_eq!(trace.dropped, 0);
    trace
}

fn work(client: &mut Client) {
    for i in 0..60_u32 {
        let (offset, len) = (u64::from(i) * 90_112, (i % 7 + 1) * 4096);
        match i % 5 {
            0..=2 => drop(client.read(offset, len).unwrap()),
            3 => client.write(offset, &vec![i as u8; len as usize]).unwrap(),
            _ => client.flush().unwrap(),
        }
        std::thread::sleep(Duration::from_millis(2));
    }
    client.trim(8 * MIB, 1 << 20).unwrap();
}

#[track_caller]
fn replay(args: &[&str]) -> Value {
    let output = hob::command(&[&["replay", "-o", "json"], args].concat());
    assert!(output.success(), "{args:?}: {}", output.all());
    serde_json::from_str(&output.stdout).unwrap_or_else(|e| panic!("{e}: {}", output.stdout))
}

#[track_caller]
fn refused(args: &[&str], mentions: &str) {
    let output = hob::command(&[&["replay"], args].concat());
    let said: Vec<&str> = output.stderr.lines().filter(|line| line.starts_with("hob: ")).collect();
    assert!(!output.success() && said.len() == 1, "{args:?}: {}", output.all());
    assert!(said[0].contains(mentions), "{args:?}: {}", said[0]);
}

#[test]
fn a_replayed_recording_is_recorded_the_same() {
    let (from, one) = stage();
    let (to, two) = stage();
    let first = recorded(&from, &one, || work(&mut one.connect()));
    assert_eq!(first.requests.len(), 61);
    let (trace, uri) = (from.text("trace"), two.uri());
    for (pace, depth) in [("original", "1"), ("x4", "1"), ("asap", "1"), ("original", "64")] {
        let is_paced = |_| {
            let mut report = Value::Null;
            let second = recorded(&to, &two, || {
                let more = ["--pace", pace, "--depth", depth, "--allow-writes"];
                report = replay(&[&[trace.as_str(), "--target", &uri][..], &more].concat());
            });
            assert_eq!(second.requests, first.requests, "{pace}, depth {depth}");
            assert_eq!((&report["answered"], &report["errors"]), (&61.into(), &0.into()), "{report}");
            assert_eq!(report["lateness"].is_null(), pace == "asap", "{report}");
            let span = |trace: &Trace| trace.at_ns.last().unwrap() - trace.at_ns[0];
            let factor = if pace == "x4" { 4 } else { 1 };
            eprintln!("{pace}: {} ns of {} ns", span(&second), span(&first));
            pace == "asap" || span(&second) >= span(&first) / factor / 2
        };
        // Requests are not sent early. On a busy host, the disk may receive the first of them late.
        assert!((0..ATTEMPTS_MAX).any(is_paced), "{pace}, depth {depth}: requests are early, see above");
    }
    one.stop();
    two.stop();
}

#[test]
fn a_replay_changes_nothing_without_permission() {
    let (from, one) = stage();
    recorded(&from, &one, || work(&mut one.connect()));
    let (trace, uri) = (from.text("kept"), one.uri());
    std::fs::copy(from.path("trace"), &trace).unwrap();
    let before = from.read("disk.img");
    let seen = recorded(&from, &one, || {
        refused(&[&trace, "--target", &uri], "--allow-writes");
        refused(&[&trace, "--target", &from.text("disk.img")], "--allow-writes");
    });
    assert_eq!(seen.requests, []);
    one.stop();
    assert_same(&from.read("disk.img"), &before, 0, "the disk before and after");
}

#[test]
fn reads_alone_and_a_part_alone() {
    let (from, one) = stage();
    let all = recorded(&from, &one, || work(&mut one.connect()));
    let trace = from.text("kept");
    std::fs::copy(from.path("trace"), &trace).unwrap();
    let uri = one.uri();
    let reads: Vec<Request> = all.requests.iter().copied().filter(|it| it.op == 'R').collect();
    let seen = recorded(&from, &one, || {
        let report = replay(&[&trace, "--target", &uri, "--pace", "asap", "--depth", "1", "--reads-only"]);
        assert_eq!((&report["answered"], &report["left_out"]), (&reads.len().into(), &25.into()), "{report}");
        assert_eq!(report["classes"].as_array().unwrap().len(), 1);
    });
    assert_eq!(seen.requests, reads);
    let seen = recorded(&from, &one, || {
        let rest = ["--depth", "1", "--limit", "9", "--pace", "asap", "--allow-writes"];
        replay(&[&[&trace, "--target", &uri][..], &rest].concat());
    });
    assert_eq!(seen.requests, all.requests[..9]);
    one.stop();
}

#[test]
fn a_smaller_target_is_refused_or_folded() {
    let (from, one) = stage();
    recorded(&from, &one, || {
        let mut client = one.connect();
        client.read(0, 4096).unwrap();
        client.read(10 * MIB, 8192).unwrap();
    });
    let trace = from.text("trace");
    noise_file(&from.path("small.img"), 4 * MIB, 92);
    let small = from.text("small.img");
    refused(&[&trace, "--target", &small], "10485760");
    let report = replay(&[&trace, "--target", &small, "--wrap"]);
    assert_eq!((&report["answered"], &report["errors"]), (&2.into(), &0.into()), "{report}");
    one.stop();
}

#[test]
fn an_interrupted_or_failed_replay_reports_its_results() {
    let (scratch, hob) = stage();
    let lines: String = (0..100).map(|i| format!("{},R,{},4096\n", i * 1_000, i * 4096)).collect();
    std::fs::write(scratch.path("slow.csv"), format!("ts_us,op,offset,size\n{lines}3600000000,R,0,4096\n"))
        .unwrap();
    let start = || {
        let mut command = Command::new(hob::binary());
        command.args(["replay", &scratch.text("slow.csv"), "--target", &hob.uri(), "-o", "json"]);
        let reads = || hob.stats().number("reads").unwrap();
        let before = reads();
        let replay = Process::start("hob replay", &mut command).unwrap();
        wait_for("the first hundred", || reads() >= before + 100.0);
        replay
    };
    let mut replay = start();
    replay.signal(Signal::INT);
    let output = replay.finish(Duration::from_secs(60));
    assert!(output.success(), "an interrupted replay is no failure: {}", output.all());
    let report: Value = serde_json::from_str(&output.stdout).unwrap();
    assert_eq!((&report["answered"], &report["interrupted"]), (&100.into(), &true.into()), "{report}");
    assert!(report["lateness"]["max_ns"].is_u64() && report["classes"][0]["p999_ns"].is_u64(), "{report}");

    let mut replay = start();
    hob.kill();
    let output = replay.finish(Duration::from_secs(60));
    assert!(!output.success() && output.stderr.contains("stopped after 100 requests"), "{}", output.all());
    let report: Value = serde_json::from_str(&output.stdout).unwrap();
    assert_eq!((&report["answered"], &report["interrupted"]), (&100.into(), &false.into()), "{report}");
}

#[test]
fn invalid_input_is_refused_with_one_line() {
    let scratch = Scratch::new();
    noise_file(&scratch.path("disk.img"), MIB, 93);
    std::fs::write(scratch.path("t.csv"), "ts_us,op,offset,size\n0,R,0,512\n").unwrap();
    let (trace, disk, absent) = (scratch.text("t.csv"), scratch.text("disk.img"), scratch.text("absent"));
    let nbd = format!("nbd+unix:///?socket={}", scratch.text("nobody.sock"));
    refused(&[&absent, "--target", &disk], "absent");
    refused(&[&trace, "--target", &absent], "absent");
    refused(&[&trace, "--target", &nbd], "nobody.sock");
    refused(&[&trace, "--target", "gopher://x/y"], "gopher");
    refused(&[&trace, "--target", &disk, "--depth", "0"], "depth");
    refused(&[&trace, "--target", &disk, "--pace", "allegro"], "allegro");
    refused(&[&trace, "--target", &disk, "--from", "60"], "no request");
    refused(&["-", "--target", &disk], "standard input");
    refused(&[&trace, "--target", scratch.dir().to_str().unwrap()], "directory");
}
