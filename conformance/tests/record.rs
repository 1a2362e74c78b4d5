//! `hob record`: the trace of a disk has exactly the requests that its guest sent.

use std::path::Path;
use std::time::Duration;

use conformance::data::noise_file;
use conformance::nbd_client::{CMD_CACHE, Client};
use conformance::process::{Output, Process};
use conformance::scratch::wait_for;
use conformance::trace::{Request, Trace};
use conformance::{Hob, MIB, Scratch, Serve};
use rustix::process::Signal;

const SIZE: u64 = 16 * MIB;
const WAIT_MAX: Duration = Duration::from_secs(60);

fn stage() -> (Scratch, Hob) {
    let scratch = Scratch::new();
    noise_file(&scratch.path("disk.img"), SIZE, 90);
    let hob =
        Serve::disk(&scratch.text("disk.img")).cached(&scratch.path("pool"), "8M", "4K").start(&scratch);
    (scratch, hob)
}

/// Starts a recording of the disk and waits until it has begun.
#[track_caller]
fn record(scratch: &Scratch, hob: &Hob, options: &[&str]) -> Process {
    hob.record(&scratch.path("trace"), &[&["-o", "json"], options].concat())
}

/// Starts a recording of the disk, and does not wait until it has begun.
#[track_caller]
fn start(scratch: &Scratch, hob: &Hob, options: &[&str]) -> Process {
    hob.start_record(&scratch.path("trace"), &[&["-o", "json"], options].concat())
}

#[track_caller]
fn end(mut recording: Process) -> serde_json::Value {
    report(&recording.finish(WAIT_MAX))
}

#[track_caller]
fn report(output: &Output) -> serde_json::Value {
    assert!(output.success(), "{:?}: {}", output.status, output.all());
    serde_json::from_str(&output.stdout).unwrap_or_else(|e| panic!("{e}: {}", output.stdout))
}

/// Sends a request of every kind, also unusual ones, and returns the expected records.
fn send(client: &mut Client) -> Vec<Request> {
    let mut sent = Vec::new();
    let mut note = |op, offset, len| sent.push(Request { op, offset, len });
    for i in 0..40_u32 {
        let (offset, len) = (u64::from(i) * 70_000 / 512 * 512, (i % 9 + 1) * 1536);
        match i % 4 {
            0 | 1 => {
                client.read(offset, len).unwrap();
                note('R', offset, len);
            }
            2 => {
                client.write(offset, &vec![i as u8; len as usize]).unwrap();
                note('W', offset, len);
            }
            _ => {
                client.flush().unwrap();
                note('F', 0, 0);
            }
        }
    }
    // This request is longer than hob's largest I/O.
    client.trim(MIB, 12 << 20).unwrap();
    note('D', MIB, 12 << 20);
    client.write_zeroes(4096, 8192).unwrap();
    note('D', 4096, 8192);
    // A hint transfers no data, and refused requests do not reach the disk.
    client.call(0, CMD_CACHE, 0, 1 << 20, &[]).unwrap();
    client.read(SIZE, 512).unwrap_err();
    client.read(SIZE - 512, 512).unwrap();
    note('R', SIZE - 512, 512);
    sent
}

#[track_caller]
fn check(trace: &Path, sent: &[Request]) -> Trace {
    let trace = Trace::read(trace);
    assert_eq!(trace.requests, sent);
    assert!(trace.at_ns.is_sorted(), "times go up");
    assert_eq!((trace.records, trace.dropped), (sent.len() as u64, 0), "the header says so");
    trace
}

#[test]
fn the_trace_has_all_requests_until_ctrl_c() {
    let (scratch, hob) = stage();
    let mut client = hob.connect();
    client.read(0, 4096).unwrap();
    let mut recording = record(&scratch, &hob, &[]);
    let sent = send(&mut client);
    recording.signal(Signal::INT);
    let report = end(recording);
    check(&scratch.path("trace"), &sent);
    assert_eq!(report["requests"], sent.len());
    assert_eq!((&report["dropped"], &report["ended"]), (&0.into(), &"interrupted".into()));
    // The recording has ended, and a new recording starts empty.
    client.read(0, 4096).unwrap();
    wait_for("the end of the recording", || !hob.is_recorded());
    let mut recording = record(&scratch, &hob, &[]);
    let again = send(&mut hob.connect());
    recording.signal(Signal::TERM);
    end(recording);
    check(&scratch.path("trace"), &again);
    hob.stop();
}

#[test]
fn it_ends_by_number_and_by_time() {
    let (scratch, hob) = stage();
    let mut client = hob.connect();
    let recording = record(&scratch, &hob, &["--requests", "7"]);
    let sent = send(&mut client);
    let report = end(recording);
    check(&scratch.path("trace"), &sent[..7]);
    assert_eq!(report["ended"], "requests");
    // On a busy host, a short recording may end before the client has sent its request.
    for seconds in [2, 10, 30_u64] {
        wait_for("the end of the recording", || !hob.is_recorded());
        let mut recording = start(&scratch, &hob, &["--seconds", &seconds.to_string()]);
        wait_for("the recording or its end", || hob.is_recorded() || recording.poll().is_some());
        client.read(512, 1024).unwrap();
        let report = end(recording);
        let ns = seconds * 1_000_000_000;
        assert_eq!((&report["ended"], &report["elapsed_ns"]), (&"seconds".into(), &ns.into()));
        if report["requests"] == 1 {
            let trace = check(&scratch.path("trace"), &[Request { op: 'R', offset: 512, len: 1024 }]);
            assert!(trace.at_ns[0] < ns);
            hob.stop();
            return;
        }
    }
    panic!("no recording has the request");
}

#[test]
fn it_ends_with_the_disk_and_with_the_daemon() {
    let (scratch, hob) = stage();
    let recording = record(&scratch, &hob, &[]);
    let sent = send(&mut hob.connect());
    hob.ctl(&["disk", "remove", "disk"]);
    let report = end(recording);
    check(&scratch.path("trace"), &sent);
    assert_eq!(report["ended"], "disk-removed");
    hob.stop();

    // The daemon sends recorded requests several times a second, unless the host is busy.
    for pause in [1, 10, 30] {
        let (scratch, hob) = stage();
        let mut recording = record(&scratch, &hob, &[]);
        let sent = send(&mut hob.connect());
        wait_for("all requests in the recording", || hob.disk()["recording"]["requests"] == sent.len());
        std::thread::sleep(Duration::from_secs(pause));
        hob.kill();
        let output = recording.finish(WAIT_MAX);
        assert!(!output.success() && output.stderr.contains("complete up to then"), "{}", output.all());
        let trace = Trace::read(&scratch.path("trace"));
        assert_eq!(trace.requests, sent[..trace.requests.len()]);
        if trace.requests.len() == sent.len() {
            check(&scratch.path("trace"), &sent);
            return;
        }
    }
    panic!("no recording has all requests before the kill");
}

#[test]
fn a_second_recording_and_wrong_ones_are_refused() {
    let (scratch, hob) = stage();
    let mut recording = record(&scratch, &hob, &[]);
    let other = scratch.text("other");
    for (args, mentions) in
        [(["record", "disk", "--out", &other], "already"), (["record", "floppy", "--out", &other], "floppy")]
    {
        let output = hob.try_ctl(&args);
        assert!(!output.success() && output.stderr.contains(mentions), "{args:?}: {}", output.all());
        assert!(!scratch.path("other").exists(), "{args:?} left a file");
    }
    let sent = send(&mut hob.connect());
    recording.signal(Signal::INT);
    end(recording);
    check(&scratch.path("trace"), &sent);
    let nowhere = scratch.text("no/such/trace");
    let output = hob.try_ctl(&["record", "disk", "--out", &nowhere]);
    assert!(!output.success() && output.stderr.contains("no/such/trace"), "{}", output.all());
    hob.stop();
}

#[test]
fn text_says_the_same() {
    let (scratch, hob) = stage();
    let mut recording = record(&scratch, &hob, &["--format", "csv"]);
    let sent = send(&mut hob.connect());
    recording.signal(Signal::INT);
    end(recording);
    let text = std::fs::read_to_string(scratch.path("trace")).unwrap();
    let mut lines = text.lines();
    assert_eq!(lines.next(), Some("ts_us,op,offset,size"));
    let found: Vec<String> = lines.map(|line| line.split_once(',').unwrap().1.to_owned()).collect();
    let expected: Vec<String> = sent.iter().map(|r| format!("{},{},{}", r.op, r.offset, r.len)).collect();
    assert_eq!(found, expected);
    hob.stop();
}
