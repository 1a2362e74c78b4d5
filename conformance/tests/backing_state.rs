//! The state of a backing is visible within 5 seconds in every output of hob that shows the state
//! of a disk: for a server that hangs, and for a server that fails.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use conformance::data::noise_file;
use conformance::nbd_client::CMD_READ;
use conformance::process::Process;
use conformance::scratch::wait_until;
use conformance::{Hob, MIB, Scratch, Serve};
use rustix::process::Signal;
use serde_json::Value;

/// Maximum time until a state is visible.
const VISIBLE_MAX: Duration = Duration::from_secs(5);

/// Maximum time until a state is visible if the host of the test stalls.
const STALL_MAX: Duration = Duration::from_secs(60);
/// Number of attempts to see all states within [`VISIBLE_MAX`].
const ATTEMPTS: u32 = 4;

fn json(hob: &Hob, args: &[&str]) -> Value {
    let output = hob.try_ctl(&[args, &["-o", "json"]].concat());
    serde_json::from_str(&output.stdout).unwrap_or_else(|e| panic!("{args:?}: {e}: {}", output.all()))
}

/// Returns the kinds of problems of backings that `hob health` lists. The host of the test may have
/// other problems.
fn problems(hob: &Hob) -> Vec<String> {
    let health = json(hob, &["health"]);
    let problems = health["problems"].as_array().expect("a list").iter();
    let of_backings = problems.filter_map(|problem| {
        let kind = problem["kind"].as_str().expect("a kind");
        let is_found = kind.starts_with("backing-");
        assert!(!is_found || problem["subject"] == "disk", "{problem}");
        is_found.then(|| kind.to_owned())
    });
    of_backings.collect()
}

/// Waits until `hob health` lists exactly these problems of backings, and returns the time that this
/// took.
#[track_caller]
fn seen(hob: &Hob, what: &str, expected: &[&str]) -> Duration {
    let start = Instant::now();
    wait_until(what, STALL_MAX, || problems(hob) == expected);
    start.elapsed()
}

/// Returns the body of a response of the control API.
#[track_caller]
fn get(hob: &Hob, path: &str) -> String {
    let socket = hob.control().strip_prefix("unix:").expect("a Unix socket");
    let mut stream = UnixStream::connect(socket).expect("the control socket");
    write!(stream, "GET {path} HTTP/1.1\r\nHost: hob\r\nConnection: close\r\n\r\n").unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).expect("an answer");
    answer
}

/// Checks that every output with the state of a disk shows `state`, and that `hob health` lists the
/// problem `kind`.
#[track_caller]
fn is_everywhere(hob: &Hob, state: &str, kind: &str, words: &str) {
    let healthz = get(hob, "/healthz");
    assert!(healthz.starts_with("HTTP/1.1 503") && healthz.contains(kind), "{healthz}");
    assert_eq!(json(hob, &["disk", "show", "disk"])["backing_state"]["state"], state);
    for command in [&["disk", "show", "disk"][..], &["disk", "list"], &["explain", "disk"]] {
        let text = hob.ctl(command);
        assert!(text.contains(words), "{command:?}: {text}");
    }
    let load: Value = serde_json::from_str(get(hob, "/v1/load").split_once("\r\n\r\n").unwrap().1).unwrap();
    assert_eq!(load[0]["backing_state"]["state"], state, "{load}");
    let metrics = get(hob, "/metrics");
    for (name, value) in [(state, 1), ("connected", 0)] {
        let line = format!("\nhob_disk_backing_state{{disk=\"disk\",state=\"{name}\"}} {value}\n");
        assert!(metrics.contains(&line), "{line}\n{metrics}");
    }
}

/// Lets the server hang and fail, and checks all outputs. Returns how long health took to show a
/// busy server that hangs, an idle server that hangs (half of this time), and a failed server. The
/// last value is the longest time until health showed that a server was back.
#[track_caller]
fn hang_and_die(scratch: &Scratch, hob: &Hob, server: &mut Process) -> [Duration; 4] {
    let mut client = hob.connect();
    client.read(0, 4096).unwrap();
    seen(hob, "no problem", &[]);
    wait_until("a connected backing", STALL_MAX, || {
        json(hob, &["disk", "show", "disk"])["backing_state"]["state"] == "connected"
    });

    server.signal(Signal::STOP);
    client.send(0, CMD_READ, MIB, 4096, &[]).unwrap();
    let hang = seen(hob, "the hang in health", &["backing-slow"]);
    is_everywhere(hob, "slow", "backing-slow", "answers slowly");
    let shown = json(hob, &["disk", "show", "disk"]);
    assert!(shown["backing_state"]["oldest_request_ms"].as_u64() > Some(2000), "{shown}");
    // hob's own request to the idle server may wait too.
    assert!(shown["backing_state"]["waiting_requests"].as_u64() >= Some(1), "{shown}");
    server.signal(Signal::CONT);
    assert_eq!(client.receive().unwrap().error, 0);
    client.take(&mut [0; 4096]).unwrap();
    let after_hang = seen(hob, "health after the hang", &[]);

    // The guest requests nothing. hob asks an idle server after two seconds, and the answer is late
    // after two more.
    server.signal(Signal::STOP);
    let idle_hang = seen(hob, "the hang of an idle server", &["backing-slow"]);
    server.signal(Signal::CONT);
    let after_idle_hang = seen(hob, "health after the idle hang", &[]);

    // The disk receives no requests: the lost connection alone changes the state.
    server.kill();
    let death = seen(hob, "the death in health", &["backing-unreachable"]);
    client.send(0, CMD_READ, 2 * MIB, 4096, &[]).unwrap();
    wait_until("the request that waits", STALL_MAX, || {
        json(hob, &["disk", "show", "disk"])["backing_state"]["waiting_requests"] == 1
    });
    is_everywhere(hob, "reconnecting", "backing-unreachable", "reconnecting for ");
    let shown = json(hob, &["disk", "show", "disk"]);
    assert!(shown["backing_state"]["last_error"].as_str().is_some_and(|why| !why.is_empty()), "{shown}");
    *server = scratch.serve_image("disk.img");
    assert_eq!(client.receive().unwrap().error, 0);
    client.take(&mut [0; 4096]).unwrap();
    let after_death = seen(hob, "health after the return", &[]);
    [hang, idle_hang / 2, death, after_hang.max(after_idle_hang).max(after_death)]
}

/// On a host that stalls, each state is visible in time in at least one attempt.
#[test]
fn a_backing_that_hangs_or_dies_is_visible_within_five_seconds_until_it_is_back() {
    let scratch = Scratch::new();
    noise_file(&scratch.path("disk.img"), 8 * MIB, 1);
    let mut server = scratch.serve_image("disk.img");
    let hob = Serve::disk(&scratch.backing_uri()).start(&scratch);
    let mut shortest = [Duration::MAX; 4];
    for _ in 0..ATTEMPTS {
        let took = hang_and_die(&scratch, &hob, &mut server);
        shortest.iter_mut().zip(took).for_each(|(shortest, took)| *shortest = took.min(*shortest));
        if shortest.iter().all(|took| *took < VISIBLE_MAX) {
            break;
        }
    }
    assert!(shortest.iter().all(|took| *took < VISIBLE_MAX), "{shortest:?}");
    hob.stop();
}
