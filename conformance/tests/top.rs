//! `hob top` and `hob health`: tables for scripts, and a terminal that is restored at the end.

use std::sync::atomic::{AtomicBool, Ordering};

use conformance::data::noise_file;
use conformance::hob::{Serve, binary};
use conformance::process::Output;
use conformance::{Hob, MIB, Scratch, Tool};
use serde_json::Value;

const SIZE: u64 = 4 * MIB;

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
        let json = hob.ctl(&["top", "--once", "--interval", "0.5", "-o", "json"]);
        (json, hob.ctl(&["top", "-b", "--interval", "0.5", "--sort", "disk"]))
    });
    let json: Value = serde_json::from_str(&json).expect("JSON");
    let disk = &json[0];
    assert_eq!((disk["disk"].as_str(), disk["state"].as_str()), (Some("disk"), Some("write-through")));
    let (iops, bytes) = (disk["iops"].as_f64().unwrap(), disk["read_bytes"].as_f64().unwrap());
    assert!(iops > 10.0, "{disk}");
    // Both values come from the same requests.
    assert!((bytes / iops - 4096.0).abs() < 1.0, "{disk}");
    let (mean, p99) = (disk["latency_mean_ns"].as_u64().unwrap(), disk["latency_p99_ns"].as_u64().unwrap());
    assert!(mean > 0 && p99 > 0 && mean < 60_000_000_000, "{disk}");
    let lines: Vec<&str> = table.lines().collect();
    assert!(lines.len() == 2 && lines[0].starts_with("DISK") && lines[1].starts_with("disk"), "{table}");
    // There is no load any more.
    let idle: Value =
        serde_json::from_str(&hob.ctl(&["top", "-b", "-o", "json", "--interval", "0.2"])).unwrap();
    assert_eq!((idle[0]["iops"].as_f64(), &idle[0]["latency_p99_ns"]), (Some(0.0), &Value::Null));
    hob.stop();
}

/// Runs `hob top` on its own terminal with these keys; `before` precedes the command.
fn on_a_terminal(hob: &Hob, before: &str, keys: &str) -> Output {
    let top = format!("{before} {} top --interval 0.1 --control {}", binary().display(), hob.control());
    let command = format!("stty cols 120 rows 24; {top}");
    // The keys are sent after the screen was drawn some times.
    let typed = format!("(sleep 1; printf '{keys}'; sleep 1) | script -qec \"$COMMAND\" /dev/null");
    Tool::new("sh").args(["-c", &typed]).env("COMMAND", command).env("TERM", "xterm-256color").output()
}

#[test]
fn the_terminal_is_given_back_however_it_ends() {
    let scratch = Scratch::new();
    let hob = start(&scratch);
    for (before, keys, what) in [
        ("", "nnq", "q"),
        ("", "\\003", "control-C"),
        ("timeout --foreground -s TERM 1 ", "", "SIGTERM"),
        ("timeout --foreground -s HUP 1 ", "", "SIGHUP"),
    ] {
        let output = on_a_terminal(&hob, before, keys);
        let screen = &output.stdout;
        let (enter, leave) = ("\x1b[?1049h", "\x1b[?1049l");
        let (begun, ended) = (screen.find(enter), screen.rfind(leave));
        assert!(begun.is_some() && ended > begun, "{what}: {screen:?}");
        assert!(screen.contains("no problems"), "{what}: {screen:?}");
        let cursor = (screen.rfind("\x1b[?25h"), screen.rfind("\x1b[?25l"));
        assert!(cursor.0 > cursor.1, "{what} leaves no cursor: {screen:?}");
    }
    hob.stop();
}

#[test]
fn without_a_terminal_or_a_daemon_it_fails_with_a_message() {
    let scratch = Scratch::new();
    let hob = start(&scratch);
    let refused = hob.try_ctl(&["top"]);
    assert!(!refused.success() && refused.stderr.contains("--once"), "{}", refused.all());
    let health = hob.try_ctl(&["health"]);
    assert!(health.success() && health.stdout == "no problems\n", "{}", health.all());
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
    std::fs::write(scratch.path("hob.toml"), config).unwrap();
    let daemon = conformance::Daemon::start(&scratch.path("hob.toml"), &scratch.path("ctl.sock"));
    let health = daemon.try_ctl(&["health"]);
    assert_eq!(health.status.and_then(|status| status.code()), Some(1));
    assert!(health.stdout.contains("disk-offline  mail") && health.stderr.is_empty(), "{}", health.all());
    let json = daemon.try_ctl(&["health", "-o", "json"]).stdout;
    assert_eq!(serde_json::from_str::<Value>(&json).unwrap()["problems"][0]["kind"], "disk-offline");
    let top: Value = serde_json::from_str(&daemon.ctl(&["top", "-b", "-o", "json"])).unwrap();
    assert_eq!((top[0]["state"].as_str(), &top[0]["iops"]), (Some("offline"), &Value::Null));
    daemon.stop();
}
