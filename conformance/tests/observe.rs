//! Monitoring: Prometheus reads hob's metrics, systemd is notified when hob is ready, and logs can
//! be followed.

use std::io::{Read, Write};
use std::os::unix::net::{UnixDatagram, UnixStream};
use std::sync::mpsc;
use std::time::Duration;

use conformance::data::{Noise, noise_file};
use conformance::hob::Serve;
use conformance::scratch::wait_until;
use conformance::{Hob, MIB, Scratch, Tool};
use serde_json::Value;

const SIZE: u64 = 8 * MIB;

/// Maximum time until a line is in the log.
const LOG_MAX: Duration = Duration::from_secs(60);

/// Maximum time between two notifications for systemd.
const HEARD_MAX: Duration = Duration::from_secs(60);

/// Serves a disk with a write-back cache and a memory tier, so that all metrics change.
fn serve(scratch: &Scratch) -> Serve {
    noise_file(&scratch.path("disk.img"), SIZE, 7);
    Serve::disk(&scratch.text("disk.img"))
        .cached(&scratch.path("pool"), "32M", "4K")
        .arg("--mode", "write-back")
        .arg("--ram", "4M")
}

/// Reads, reads again, writes and flushes.
fn load(hob: &Hob) {
    let mut client = hob.connect();
    for _ in 0..2 {
        for at in (0..SIZE).step_by(1 << 20) {
            client.read(at, 64 << 10).unwrap();
        }
    }
    client.write(0, &Noise::new(1).bytes(128 << 10)).unwrap();
    client.flush().unwrap();
}

/// Returns the status line with the headers, and the body, of a response of the control API.
#[track_caller]
fn get(hob: &Hob, path: &str, headers: &str) -> (String, String) {
    let socket = hob.control().strip_prefix("unix:").expect("a Unix socket");
    let mut stream = UnixStream::connect(socket).expect("the control socket");
    write!(stream, "GET {path} HTTP/1.1\r\nHost: hob\r\nConnection: close\r\n{headers}\r\n").unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).expect("an answer");
    let (head, body) = answer.split_once("\r\n\r\n").expect("a head and a body");
    assert!(!head.to_ascii_lowercase().contains("transfer-encoding: chunked"), "{head}");
    (head.to_owned(), body.to_owned())
}

/// Returns the value in the only line of a page that begins with `line`.
#[track_caller]
fn value(page: &str, line: &str) -> f64 {
    let found: Vec<&str> = page.lines().filter_map(|l| l.strip_prefix(line)?.strip_prefix(' ')).collect();
    assert_eq!(found.len(), 1, "{line}: {found:?}\n{page}");
    found[0].parse().unwrap_or_else(|e| panic!("{line} {}: {e}", found[0]))
}

/// Prometheus' own checker accepts the metrics, and they have the expected values.
#[test]
fn prometheus_takes_the_metrics() {
    let scratch = Scratch::new();
    let hob = serve(&scratch).start(&scratch);
    load(&hob);
    for path in ["/metrics", "/metrics?latency=disk"] {
        let (head, page) = get(&hob, path, "");
        assert!(head.starts_with("HTTP/1.1 200"), "{head}");
        std::fs::write(scratch.path("page"), &page).unwrap();
        let command = format!(
            "{} check metrics < {}",
            conformance::tool::find("promtool").display(),
            scratch.text("page")
        );
        let output = Tool::new("sh").args(["-c", &command]).output();
        assert!(output.success() && output.all().trim().is_empty(), "{}\n{page}", output.all());
    }
    let stats = || -> Value { hob.json(&["stats", "disk"]) };
    let journal = |stats: &Value| stats["journal_bytes"].as_f64();
    let (mut page, mut shown) = (String::new(), stats());
    // hob writes the journal also between two requests of the API.
    wait_until("metrics and counters of the same time", LOG_MAX, || {
        let before = journal(&shown);
        page = get(&hob, "/metrics", "").1;
        shown = stats();
        before > Some(0.0) && before == journal(&shown)
    });
    let stats = shown;
    for (line, field) in [
        ("hob_disk_reads_total{disk=\"disk\"}", "reads"),
        ("hob_disk_writes_total{disk=\"disk\"}", "writes"),
        ("hob_disk_read_bytes_total{disk=\"disk\"}", "read_bytes"),
        ("hob_cache_journal_written_bytes_total{disk=\"disk\"}", "journal_bytes"),
    ] {
        let shown = value(&page, line);
        assert!(shown > 0.0 && shown == stats[field].as_f64().unwrap(), "{line} {shown}, {}", stats[field]);
    }
    // The reads of the second round were served from memory or flash, and every request is in one
    // histogram.
    let requests = "hob_disk_requests_total{disk=\"disk\",";
    let durations = "hob_disk_request_duration_seconds_count{disk=\"disk\",";
    let sum = |prefix: &str| -> f64 {
        let lines = page.lines().filter(|line| line.starts_with(prefix));
        lines.map(|line| line.rsplit(' ').next().unwrap().parse::<f64>().unwrap()).sum()
    };
    assert_eq!(sum(requests), stats["requests"].as_f64().unwrap());
    assert_eq!(sum(durations), sum(requests));
    let device = format!("{{pool=\"default\",device=\"{}\"}}", scratch.text("pool"));
    // Metrics of fills, writes and the journal.
    assert!(value(&page, &format!("hob_device_written_bytes_total{device}")) > 640.0 * 1024.0);
    assert_eq!(value(&page, &format!("hob_device_io_errors_total{device}")), 0.0);
    assert!(value(&page, "hob_cache_dirty_bytes{disk=\"disk\"}") <= 128.0 * 1024.0);
    hob.stop();
}

/// Clients that ask for OpenMetrics receive it.
#[test]
fn openmetrics_ends_as_it_must() {
    let scratch = Scratch::new();
    let hob = serve(&scratch).start(&scratch);
    let (head, page) = get(&hob, "/metrics", "Accept: application/openmetrics-text; version=1.0.0\r\n");
    assert!(head.to_ascii_lowercase().contains("content-type: application/openmetrics-text"), "{head}");
    assert!(page.ends_with("\n# EOF\n") && page.contains("# TYPE hob_disk_reads counter\n"), "{page}");
    hob.stop();
}

/// Prometheus accepts the example files.
#[test]
fn prometheus_takes_the_alerts_and_the_configuration() {
    let examples = concat!(env!("CARGO_MANIFEST_DIR"), "/../dashboard/prometheus");
    Tool::new("promtool").args(["check", "rules", &format!("{examples}/alerts.yml")]).run();
    Tool::new("promtool").args(["check", "config", "--syntax-only", &format!("{examples}/scrape.yml")]).run();
}

/// Returns the kinds of problems of `hob health` for which there is an alert, with its name.
fn alerts_of_problems(rules: &str) -> Vec<(String, String)> {
    let mut alert = "";
    let mut found = Vec::new();
    for line in rules.lines().map(str::trim) {
        alert = line.strip_prefix("- alert: ").unwrap_or(alert);
        if let Some(rest) = line.strip_prefix("expr: hob_health_problems{kind=\"") {
            let kind = rest.split('"').next().unwrap_or_default();
            found.push((kind.to_owned(), alert.to_owned()));
        }
    }
    found
}

/// Each alert for a kind of problem fires within 80 minutes while there is such a problem, and does
/// not fire without one.
#[test]
fn prometheus_alerts_on_each_problem_of_health() {
    let rules = concat!(env!("CARGO_MANIFEST_DIR"), "/../dashboard/prometheus/alerts.yml");
    let alerts = alerts_of_problems(&std::fs::read_to_string(rules).unwrap());
    assert!(alerts.len() > 10, "{alerts:?}");
    let mut tests = format!("rule_files: ['{rules}']\nevaluation_interval: 1m\ntests:\n");
    for (kind, alert) in &alerts {
        for problems in [1, 0] {
            let expected = match problems {
                0 => "[]".to_owned(),
                _ => format!("[{{labels: '{{alertname=\"{alert}\"}}', value: 1}}]"),
            };
            tests += &format!(
                "  - interval: 1m\n    input_series:\n      \
                 - series: 'hob_health_problems{{job=\"hob\", instance=\"a\", kind=\"{kind}\"}}'\n        \
                 values: '{problems}+0x90'\n    promql_expr_test:\n      \
                 - expr: count by (alertname) (ALERTS{{alertstate=\"firing\"}})\n        \
                 eval_time: 80m\n        exp_samples: {expected}\n"
            );
        }
    }
    let scratch = Scratch::new();
    std::fs::write(scratch.path("tests.yml"), tests).unwrap();
    Tool::new("promtool").args(["test", "rules", &scratch.text("tests.yml")]).run();
}

/// systemd is notified when guests are served, then regularly that hob runs, and when it stops.
#[test]
fn systemd_is_notified() {
    let scratch = Scratch::new();
    let systemd = UnixDatagram::bind(scratch.path("notify")).unwrap();
    let (sender, notifications) = mpsc::channel();
    // The socket's queue holds ten messages, and hob drops those that do not fit.
    std::thread::spawn(move || {
        let mut buffer = [0; 1024];
        while let Ok(length) = systemd.recv(&mut buffer) {
            if sender.send(String::from_utf8_lossy(&buffer[..length]).into_owned()).is_err() {
                return;
            }
        }
    });
    let hear = || notifications.recv_timeout(HEARD_MAX).expect("hob sends another notification");
    let hob = serve(&scratch)
        .env("NOTIFY_SOCKET", &scratch.text("notify"))
        .env("WATCHDOG_USEC", "2000000")
        .start(&scratch);
    assert_eq!(hear(), "READY=1\nSTATUS=1 disk online");
    hob.connect().read(0, 4096).expect("a disk that is ready is served");
    // The status line changes with the disk's health, for example if the host's disk is slow.
    let hear_other = || std::iter::repeat_with(&hear).find(|what| !what.starts_with("STATUS="));
    for _ in 0..5 {
        assert_eq!(hear_other().as_deref(), Some("WATCHDOG=1"));
    }
    hob.stop();
    let end = std::iter::repeat_with(&hear).find(|what| what != "WATCHDOG=1" && !what.starts_with("STATUS="));
    assert_eq!(end.as_deref(), Some("STOPPING=1\nSTATUS=ending"));
}

/// Each line of the log is JSON, and all lines of one API request have its name, including later
/// lines of background work.
#[test]
fn the_log_can_be_followed_by_a_requests_name() {
    let scratch = Scratch::new();
    let hob = serve(&scratch).arg("--log-format", "json").start(&scratch);
    load(&hob);
    let socket = hob.control().strip_prefix("unix:").unwrap();
    let mut stream = UnixStream::connect(socket).unwrap();
    let request = "POST /v1/disks/disk/drain HTTP/1.1\r\nHost: hob\r\nConnection: close\r\n\
                   Content-Length: 0\r\nX-Request-Id: ops-17\r\n\r\n";
    stream.write_all(request.as_bytes()).unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    assert!(answer.starts_with("HTTP/1.1 200") && answer.contains("x-request-id: ops-17\r\n"), "{answer}");
    let lines = || -> Vec<Value> {
        let text = hob.process.stderr();
        let whole = text.rsplit_once('\n').map_or("", |(whole, _)| whole);
        whole.lines().map(|l| serde_json::from_str(l).unwrap_or_else(|e| panic!("{l}: {e}"))).collect()
    };
    let named = |part: &str| {
        lines().into_iter().any(|line| {
            line["span"]["id"] == "ops-17" && line["message"].as_str().unwrap_or_default().contains(part)
        })
    };
    wait_until("the request is in the log", LOG_MAX, || named("answered"));
    wait_until("the drain's end is in the log, by the request that began it", LOG_MAX, || {
        named("drained; the backing has all data")
    });
    assert!(
        lines().iter().any(|line| line["status"] == 200 && line["span"]["path"] == "/v1/disks/disk/drain")
    );
    hob.stop();
}

/// The HTTP status is sufficient for a monitor.
#[test]
fn health_is_a_status() {
    let scratch = Scratch::new();
    let hob = serve(&scratch).start(&scratch);
    // A slow disk of the host is a problem as long as it is slow.
    wait_until("a good status", LOG_MAX, || {
        let (head, body) = get(&hob, "/healthz", "");
        head.starts_with("HTTP/1.1 200") && body == "ok\n"
    });
    wait_until("a good status in JSON", LOG_MAX, || {
        let (_, body) = get(&hob, "/v1/health", "");
        serde_json::from_str::<Value>(&body).unwrap()["status"] == "ok"
    });
    hob.stop();
}
