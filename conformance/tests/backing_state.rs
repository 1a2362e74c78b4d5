//! The state of a backing is visible within 5 seconds in every output of hob that shows the state
//! of a disk: for a server that hangs, and for a server that fails.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::time::Duration;

use conformance::data::noise_file;
use conformance::nbd_client::CMD_READ;
use conformance::process::Process;
use conformance::scratch::wait_until;
use conformance::{Hob, MIB, Scratch, Serve, Tool};
use rustix::process::Signal;
use serde_json::Value;

/// Maximum time until a state is visible.
const VISIBLE_MAX: Duration = Duration::from_secs(5);

/// Starts an `nbdkit` that serves `disk.img` of the scratch directory at `backing.sock`.
#[track_caller]
fn nbdkit(scratch: &Scratch) -> Process {
    let socket = scratch.path("backing.sock");
    let _ = std::fs::remove_file(&socket);
    let server = Tool::new("nbdkit")
        .args(["--foreground", "--unix", &scratch.text("backing.sock"), "file", &scratch.text("disk.img")])
        .start();
    wait_until("nbdkit's socket", Duration::from_secs(60), || socket.exists());
    server
}

/// Sends SIGSTOP. The signal takes effect with a delay; when this function returns, no thread of
/// the server runs.
#[track_caller]
fn stop(server: &mut Process) {
    server.signal(Signal::STOP);
    let tasks = format!("/proc/{}/task", server.pid());
    wait_until("the stop of every thread", Duration::from_secs(60), || {
        std::fs::read_dir(&tasks).expect("a live process").flatten().all(|task| {
            let stat = std::fs::read_to_string(task.path().join("stat")).unwrap_or_default();
            stat.rsplit_once(')').is_some_and(|(_, rest)| rest.trim_start().starts_with('T'))
        })
    });
}

fn json(hob: &Hob, args: &[&str]) -> Value {
    let output = hob.try_ctl(&[args, &["-o", "json"]].concat());
    serde_json::from_str(&output.stdout).unwrap_or_else(|e| panic!("{args:?}: {e}: {}", output.all()))
}

/// Returns the kinds of problems that `hob health` lists.
fn problems(hob: &Hob) -> Vec<String> {
    let health = json(hob, &["health"]);
    let kinds = health["problems"].as_array().expect("a list").iter().map(|problem| {
        assert_eq!(problem["subject"], "disk", "{problem}");
        problem["kind"].as_str().expect("a kind").to_owned()
    });
    kinds.collect()
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
    for command in [&["disk", "show", "disk"][..], &["explain", "disk"]] {
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

#[test]
fn a_backing_that_hangs_or_dies_is_visible_within_five_seconds_until_it_is_back() {
    let scratch = Scratch::new();
    noise_file(&scratch.path("disk.img"), 8 * MIB, 1);
    let mut server = nbdkit(&scratch);
    let uri = format!("nbd+unix:///?socket={}", scratch.text("backing.sock"));
    let hob = Serve::disk(&uri).start(&scratch);
    let mut client = hob.connect();
    client.read(0, 4096).unwrap();
    assert_eq!(problems(&hob), [""; 0]);
    assert_eq!(json(&hob, &["disk", "show", "disk"])["backing_state"]["state"], "connected");

    stop(&mut server);
    client.send(0, CMD_READ, MIB, 4096, &[]).unwrap();
    wait_until("the hang in health", VISIBLE_MAX, || problems(&hob) == ["backing-slow"]);
    is_everywhere(&hob, "slow", "backing-slow", "answers slowly");
    let shown = json(&hob, &["disk", "show", "disk"]);
    assert!(shown["backing_state"]["oldest_request_ms"].as_u64() > Some(2000), "{shown}");
    // hob's own question to the idle server may wait too.
    assert!(shown["backing_state"]["waiting_requests"].as_u64() >= Some(1), "{shown}");
    server.signal(Signal::CONT);
    assert_eq!(client.receive().unwrap().error, 0);
    client.take(&mut [0; 4096]).unwrap();
    wait_until("health after the hang", VISIBLE_MAX, || problems(&hob).is_empty());

    // The guest requests nothing. hob asks an idle server after two seconds, and the answer is late
    // after two more.
    stop(&mut server);
    wait_until("the hang of an idle server", 2 * VISIBLE_MAX, || problems(&hob) == ["backing-slow"]);
    server.signal(Signal::CONT);
    wait_until("health after the idle hang", VISIBLE_MAX, || problems(&hob).is_empty());

    // The disk receives no requests: the lost connection alone changes the state.
    server.kill();
    wait_until("the death in health", VISIBLE_MAX, || problems(&hob) == ["backing-unreachable"]);
    client.send(0, CMD_READ, 2 * MIB, 4096, &[]).unwrap();
    wait_until("the request that waits", VISIBLE_MAX, || {
        json(&hob, &["disk", "show", "disk"])["backing_state"]["waiting_requests"] == 1
    });
    is_everywhere(&hob, "reconnecting", "backing-unreachable", "reconnecting for ");
    let shown = json(&hob, &["disk", "show", "disk"]);
    assert!(shown["backing_state"]["last_error"].as_str().is_some_and(|why| !why.is_empty()), "{shown}");
    let _server = nbdkit(&scratch);
    assert_eq!(client.receive().unwrap().error, 0);
    client.take(&mut [0; 4096]).unwrap();
    wait_until("health after the return", VISIBLE_MAX, || problems(&hob).is_empty());
    assert_eq!(json(&hob, &["disk", "show", "disk"])["backing_state"]["state"], "connected");
    hob.stop();
}
