//! `hob top` and `hob health`: tables for scripts, and a terminal that is restored at the end.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use conformance::data::noise_file;
use conformance::hob::{Serve, binary};
use conformance::process::Output;
use conformance::scratch::wait_until;
use conformance::{Hob, MIB, Scratch, Tool};
use serde_json::Value;

const SIZE: u64 = 4 * MIB;

/// Maximum time until something is shown.
const SHOWN_MAX: Duration = Duration::from_secs(60);

fn start(scratch: &Scratch) -> Hob {
    noise_file(&scratch.path("disk.img"), SIZE, 9);
    Serve::disk(&scratch.text("disk.img")).cached(&scratch.path("pool"), "16M", "4K").start(scratch)
}

/// Runs `work` while a client reads without a pause.
fn under_load<T>(hob: &Hob, work: impl FnOnce() -> T) -> T {
    let (mut client, enough) = (hob.connect(), AtomicBool::new(false));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut at = 0;
            while !enough.load(Ordering::Relaxed) {
                client.read(at, 4096).expect("a read");
                at = (at + 4096) % SIZE;
            }
        });
        let result = work();
        enough.store(true, Ordering::Relaxed);
        result
    })
}

#[test]
fn top_shows_the_current_activity_in_one_table() {
    let scratch = Scratch::new();
    let hob = start(&scratch);
    let (json, table) = under_load(&hob, || {
        let mut json = Value::Null;
        // The load may get no processor for longer than the interval.
        wait_until("requests in an interval", SHOWN_MAX, || {
            json = hob.json(&["top", "--once", "--interval", "0.5"]);
            json[0]["iops"].as_f64().is_some_and(|iops| iops > 10.0)
        });
        (json, hob.ctl(&["top", "-b", "--interval", "0.5", "--sort", "disk"]))
    });
    let disk = &json[0];
    assert_eq!((disk["disk"].as_str(), disk["state"].as_str()), (Some("disk"), Some("write-through")));
    let (iops, bytes) = (disk["iops"].as_f64().unwrap(), disk["read_bytes"].as_f64().unwrap());
    // Both values come from the same requests.
    assert!((bytes / iops - 4096.0).abs() < 1.0, "{disk}");
    let (mean, p99) = (disk["latency_mean_ns"].as_u64().unwrap(), disk["latency_p99_ns"].as_u64().unwrap());
    assert!(mean > 0 && p99 > 0 && mean < 60_000_000_000, "{disk}");
    let lines: Vec<&str> = table.lines().collect();
    assert!(lines.len() == 2 && lines[0].starts_with("DISK") && lines[1].starts_with("disk"), "{table}");
    // There is no load any more.
    let idle: Value = hob.json(&["top", "-b", "--interval", "0.2"]);
    assert_eq!((idle[0]["iops"].as_f64(), &idle[0]["latency_p99_ns"]), (Some(0.0), &Value::Null));
    hob.stop();
}

/// Runs `hob top` on its own terminal, and ends it with these keys or this signal after `seconds`.
fn on_a_terminal(hob: &Hob, end: End, seconds: u32) -> Output {
    let (before, keys) = match end {
        End::Keys(keys) => (String::new(), keys),
        End::Signal(signal) => (format!("timeout --foreground -s {signal} {seconds} "), ""),
    };
    let top = format!("{before} {} top --interval 0.1 --control {}", binary().display(), hob.control());
    let command = format!("stty cols 120 rows 24; {top}");
    let typed =
        format!("(sleep {seconds}; printf '{keys}'; sleep {seconds}) | script -qec \"$COMMAND\" /dev/null");
    Tool::new("sh").args(["-c", &typed]).env("COMMAND", command).env("TERM", "xterm-256color").output()
}

/// The end of a `hob top` on a terminal.
#[derive(Debug, Clone, Copy)]
enum End {
    Keys(&'static str),
    Signal(&'static str),
}

#[test]
fn the_terminal_is_given_back_however_it_ends() {
    let scratch = Scratch::new();
    let hob = start(&scratch);
    // "nnq" ends with the key q, and octal 003 is Control-C.
    for what in [End::Keys("nnq"), End::Keys("\\003"), End::Signal("TERM"), End::Signal("HUP")] {
        let mut screen = String::new();
        // On a busy host, the screen may not be drawn yet after a second.
        for seconds in [1, 5, 20] {
            if !screen.contains("no problems") {
                screen = on_a_terminal(&hob, what, seconds).stdout;
            }
        }
        assert!(screen.contains("no problems"), "{what:?}: {screen:?}");
        let (enter, leave) = ("\x1b[?1049h", "\x1b[?1049l");
        let (begun, ended) = (screen.find(enter), screen.rfind(leave));
        assert!(begun.is_some() && ended > begun, "{what:?}: {screen:?}");
        let cursor = (screen.rfind("\x1b[?25h"), screen.rfind("\x1b[?25l"));
        assert!(cursor.0 > cursor.1, "{what:?} leaves no cursor: {screen:?}");
    }
    hob.stop();
}

#[test]
fn without_a_terminal_or_a_daemon_it_fails_with_a_message() {
    let scratch = Scratch::new();
    let hob = start(&scratch);
    let refused = hob.try_ctl(&["top"]);
    assert!(!refused.success() && refused.stderr.contains("--once"), "{}", refused.all());
    // A slow disk of the host is a problem as long as it is slow.
    wait_until("no problems", SHOWN_MAX, || {
        let health = hob.try_ctl(&["health"]);
        health.success() && health.stdout == "no problems\n"
    });
    hob.stop();
    let nobody = format!("unix:{}", scratch.text("nobody.sock"));
    let refused = conformance::hob::command(&["top", "--once", "--control", &nobody]);
    assert!(!refused.success() && refused.stderr.contains("cannot reach"), "{}", refused.all());
}

#[test]
fn a_daemon_that_is_not_in_order_is_a_status_for_scripts() {
    let scratch = Scratch::new();
    let config = format!(
        "state_dir = \"{}\"\n[control]\nlisten = [\"unix:{}\"]\n[[disk]]\nname = \"mail\"\nbacking = \"{}\"\n",
        scratch.text("state"),
        scratch.text("ctl.sock"),
        scratch.text("nothing.img"),
    );
    scratch.write_config(config);
    let daemon = scratch.start_daemon();
    let health = daemon.try_ctl(&["health"]);
    assert_eq!(health.status.and_then(|status| status.code()), Some(1));
    assert!(health.stdout.contains("disk-offline  mail") && health.stderr.is_empty(), "{}", health.all());
    let json = daemon.try_ctl(&["health", "-o", "json"]).stdout;
    assert_eq!(serde_json::from_str::<Value>(&json).unwrap()["problems"][0]["kind"], "disk-offline");
    let top: Value = daemon.json(&["top", "-b"]);
    assert_eq!((top[0]["state"].as_str(), &top[0]["iops"]), (Some("offline"), &Value::Null));
    daemon.stop();
}
