//! The page of metrics: its format, its values, and its limits.

use std::collections::BTreeSet;

use hob_control::{
    Admission, BackingState, Cache, CacheFlashWrites, Device, DeviceState, DiskState, Qos, Size,
};
use hob_engine::Engine;
use hob_engine::Limits;
use hob_engine::command::{Access, Command, DiskConfig};
use hob_engine::units::{CommandId, DatastoreId, DiskId, Instant};

use super::*;

fn disk(name: &str) -> Disk {
    Disk {
        name: name.to_owned(),
        state: DiskState::Online,
        backing: "/vm.img".to_owned(),
        backing_state: Some(BackingState::Connected),
        size: Size(1 << 30),
        ..Disk::default()
    }
}

/// Returns statistics of a disk without any requests.
fn stats() -> DiskStats {
    let mut engine = Engine::new(Limits::default());
    let config = DiskConfig { size_bytes: 1 << 20, access: Access::ReadWrite, datastore: DatastoreId(0) };
    engine.handle_command(Instant(0), CommandId(1), DiskId(0), Command::AddDisk(config));
    engine.stats(Instant(1), DiskId(0)).expect("a disk")
}

fn page(form: Form, latencies: Latencies, disks: &[(&str, &DiskStats)]) -> String {
    let mut page = Page::new(form, latencies);
    for (name, stats) in disks {
        page.add_disk(&disk(name), Some(stats));
    }
    page.finish()
}

/// Returns the value in the only line that begins with `line`.
fn value(text: &str, line: &str) -> f64 {
    let found: Vec<&str> = text.lines().filter_map(|l| l.strip_prefix(line)?.strip_prefix(' ')).collect();
    assert_eq!(found.len(), 1, "{line}: {found:?}\n{text}");
    found[0].parse().unwrap()
}

#[test]
fn the_table_keeps_to_the_rules_of_names() {
    let mut names = BTreeSet::new();
    for metric in METRICS {
        assert!(names.insert(metric.sample_name()), "{} twice", metric.name);
        let plain = |c: char| c.is_ascii_lowercase() || c == '_';
        assert!(metric.name.chars().all(plain), "{}", metric.name);
        assert!(["hob_", "process_"].iter().any(|prefix| metric.name.starts_with(prefix)));
        for suffix in ["_total", "_info", "_sum", "_count", "_bucket"] {
            assert!(!metric.name.ends_with(suffix), "{} ends like another kind", metric.name);
        }
        assert!(metric.help.ends_with('.') && !metric.help.contains(['\\', '\n', '"']), "{}", metric.name);
        assert_eq!(metric.kind == Kind::Histogram, matches!(metric.source, Source::Latency));
    }
}

#[test]
fn every_bound_is_one_of_the_engine_and_counts_exactly() {
    let mut latency = Histogram::default();
    let mut values = Vec::new();
    for bound in bounds_ns() {
        values.extend([bound - 1, bound, bound + 1, bound / 2 + bound / 4]);
    }
    values.extend([0, 1, u64::MAX / 2]);
    values.iter().for_each(|value| latency.record(*value));
    let metric = METRICS.iter().find(|metric| metric.kind == Kind::Histogram).unwrap();
    let mut family = Family::new(metric);
    family.histogram(&Labels::of_disk("d"), ["hit", ""], &latency, &bound_labels());
    let text = family.lines;
    for bound in bounds_ns() {
        let up_to = values.iter().filter(|value| **value <= bound).count();
        let le = bound as f64 / 1e9;
        let line = format!("{}_bucket{{disk=\"d\",class=\"hit\",reason=\"\",le=\"{le}\"}}", metric.name);
        assert_eq!(value(&text, &line), up_to as f64, "{line}");
    }
    let labels = "{disk=\"d\",class=\"hit\",reason=\"\"";
    let all = values.len() as f64;
    assert_eq!(value(&text, &format!("{}_bucket{labels},le=\"+Inf\"}}", metric.name)), all);
    assert_eq!(value(&text, &format!("{}_count{labels}}}", metric.name)), all);
    let sum = value(&text, &format!("{}_sum{labels}}}", metric.name));
    assert!((sum - latency.sum_ns() as f64 / 1e9).abs() < 1e-6, "{sum}");
    assert_eq!(text.lines().count(), BOUNDS + 3);
}

#[test]
fn values_of_one_metric_stand_together_below_its_type() {
    let (mut one, two) = (stats(), stats());
    one.outcomes[0].count = 3;
    one.outcomes[0].latency.record(5_000);
    for form in [Form::Prometheus, Form::OpenMetrics] {
        let text = page(form, Latencies::PerOutcome, &[("a", &one), ("b", &two)]);
        let mut current = String::new();
        let mut seen = BTreeSet::new();
        for line in text.lines().filter(|line| *line != "# EOF" && !line.starts_with("# HELP")) {
            if let Some(rest) = line.strip_prefix("# TYPE ") {
                current = rest.split(' ').next().unwrap().to_owned();
                assert!(seen.insert(current.clone()), "{current} twice");
            } else {
                assert!(line.starts_with(&current), "{line} below {current}");
            }
        }
        assert_eq!(text.ends_with("# EOF\n"), form == Form::OpenMetrics);
    }
    let (old, new) = (Form::Prometheus, Form::OpenMetrics);
    let of = |form| page(form, Latencies::PerOutcome, &[("a", &one)]);
    assert!(of(old).contains("# TYPE hob_disk_reads_total counter\nhob_disk_reads_total{disk=\"a\"} 0\n"));
    assert!(of(new).contains("# TYPE hob_disk_reads counter\nhob_disk_reads_total{disk=\"a\"} 0\n"));
}

#[test]
fn no_more_series_than_promised() {
    let mut full = stats();
    for outcome in &mut full.outcomes {
        outcome.count = 1;
        outcome.latency.record(5_000);
    }
    let series = |latencies, stats: &DiskStats| {
        let text = page(Form::Prometheus, latencies, &[("a", stats)]);
        text.lines().filter(|line| !line.starts_with('#')).count()
    };
    assert_eq!(Latencies::for_disks(DISKS_FINE_MAX), Latencies::PerOutcome);
    assert_eq!(Latencies::for_disks(DISKS_FINE_MAX + 1), Latencies::PerDisk);
    let none = series(Latencies::PerOutcome, &stats());
    assert!(none <= 110, "{none}");
    assert_eq!(series(Latencies::PerOutcome, &full), none + OUTCOMES.len() * (BOUNDS + 3));
    assert_eq!(series(Latencies::PerDisk, &full), none + BOUNDS + 3);
    let failures = OUTCOMES.iter().filter(|row| is_failure(row)).count();
    let idle = series(Latencies::PerDisk, &stats());
    assert_eq!(idle, none - 2 * (OUTCOMES.len() - failures), "number and bytes of each outcome");
}

/// Returns a disk with an active persistent cache.
fn cached_disk(name: &str) -> Disk {
    let text = |text: &str| text.to_owned();
    let cache = Cache {
        pool: text("flash"),
        state: CacheState::Active,
        persistent: true,
        mode: text("write-back"),
        policy: text("s3-fifo"),
        layout: text("mirror"),
        admission: text("always"),
        block_size: Size(4096),
        ..Cache::default()
    };
    Disk { cache: Some(cache), ..disk(name) }
}

#[test]
fn an_idle_disk_among_many_has_little_text() {
    let mut idle = stats();
    idle.cache = stats::CacheState::Active;
    let bytes = |names: &[String]| {
        let mut page = Page::new(Form::Prometheus, Latencies::PerDisk);
        names.iter().for_each(|name| page.add_disk(&cached_disk(name), Some(&idle)));
        page.finish().len()
    };
    let names: Vec<String> = (0..101).map(|number| format!("virtual-disk-{number:03}")).collect();
    let each = (bytes(&names) - bytes(&names[..1])) / 100;
    assert!(each <= 5 << 10, "{each} bytes for each disk");
}

#[test]
fn failures_and_outcomes_that_occurred_have_values_among_many_disks() {
    for class in FAILURES {
        assert!(OUTCOMES.iter().any(|row| row.class == class), "{class}");
    }
    let mut some = stats();
    some.outcomes[0].count = 3;
    some.outcomes[0].latency.record(5_000);
    let text = page(Form::Prometheus, Latencies::PerDisk, &[("a", &some), ("b", &stats())]);
    let first = format!("class=\"{}\",reason=\"{}\"}}", OUTCOMES[0].class, OUTCOMES[0].reason);
    assert_eq!(value(&text, &format!("hob_disk_requests_total{{disk=\"a\",{first}")), 3.0);
    assert!(!text.contains(&format!("hob_disk_requests_total{{disk=\"b\",{first}")), "{text}");
    let failed = "class=\"backing-error\",reason=\"\"}";
    assert_eq!(value(&text, &format!("hob_disk_requests_total{{disk=\"b\",{failed}")), 0.0);
    let all = "class=\"all\",reason=\"\"}";
    let count = |disk: &str| format!("hob_disk_request_duration_seconds_count{{disk=\"{disk}\",{all}");
    assert_eq!(value(&text, &count("a")), 1.0);
    assert!(!text.contains(&count("b")), "{text}");
}

#[test]
fn features_that_a_disk_does_not_use_have_no_values() {
    let of = |disk: &Disk, stats: &DiskStats| {
        let mut page = Page::new(Form::Prometheus, Latencies::PerOutcome);
        page.add_disk(disk, Some(stats));
        page.finish()
    };
    let mut figures = stats();
    figures.cache = stats::CacheState::Active;
    let features = [
        "hob_memory_bytes",
        "hob_memory_read_ahead_bytes_total",
        "hob_shared_read_bytes_total",
        "hob_cache_destaged_bytes_total",
        "hob_cache_dirty_lost_bytes",
        "hob_cache_flash_budget_pressure",
    ];
    let mut with_cache = cached_disk("a");
    with_cache.cache.as_mut().unwrap().persistent = false;
    let text = of(&with_cache, &figures);
    assert_eq!(value(&text, "hob_cache_dirty_bytes{disk=\"a\"}"), 0.0);
    for name in features {
        assert!(!text.contains(name), "{name}\n{text}");
    }
    let mut with_all = Disk { parent: Some("golden".to_owned()), ..cached_disk("a") };
    with_all.cache.as_mut().unwrap().flash_writes = Some(CacheFlashWrites {
        part: Size(1),
        saved: 0,
        pressure_percent: 25,
        written: Size(0),
        refused: Size(0),
    });
    figures.memory_bytes = 4096;
    let text = of(&with_all, &figures);
    for name in features {
        assert!(text.contains(&format!("\n{name}{{disk=\"a\"}} ")), "{name}\n{text}");
    }
    assert_eq!(value(&text, "hob_cache_flash_budget_pressure{disk=\"a\"}"), 0.25);
}

#[test]
fn values_are_the_shortest_decimals() {
    for (value, expected) in [
        (0.0, "0"),
        (7.0, "7"),
        (-3.0, "-3"),
        (0.25, "0.25"),
        (1e15, "1000000000000000"),
        (u64::MAX as f64, "18446744073709552000"),
    ] {
        let mut text = String::new();
        push_value(&mut text, value);
        assert_eq!(text, format!(" {expected}\n"));
    }
}

#[test]
fn labels_are_escaped() {
    let device = Device {
        path: "/a \"b\"\\\nc".to_owned(),
        state: DeviceState::Stalled,
        reason: None,
        peer: None,
        admission: Admission::In,
        size: Size(8),
        free: Size(4),
        io: None,
        stalls: 3,
    };
    let pool = Pool {
        name: "p".to_owned(),
        segment_size: Size(1),
        size: Size(8),
        free: Size(4),
        devices: vec![device],
        ..Pool::default()
    };
    let mut page = Page::new(Form::Prometheus, Latencies::PerOutcome);
    page.add_pool(&pool, &[Some(DeviceCounts { errors: 7, ..DeviceCounts::default() })]);
    let text = page.finish();
    let labels = r#"{pool="p",device="/a \"b\"\\\nc""#;
    assert_eq!(value(&text, &format!("hob_device_free_bytes{labels}}}")), 4.0);
    assert_eq!(value(&text, &format!("hob_device_io_errors_total{labels}}}")), 7.0);
    assert_eq!(value(&text, &format!("hob_device_state{labels},state=\"stalled\"}}")), 1.0);
    assert_eq!(value(&text, &format!("hob_device_state{labels},state=\"online\"}}")), 0.0);
}

#[test]
fn openmetrics_is_served_on_request() {
    for (header, form) in [
        ("", Form::Prometheus),
        ("text/plain;version=0.0.4", Form::Prometheus),
        ("application/openmetrics-text;version=1.0.0,text/plain;q=0.5", Form::OpenMetrics),
        ("text/plain;q=0.5, application/openmetrics-text", Form::OpenMetrics),
    ] {
        assert_eq!(Form::accepted(header), form, "{header}");
    }
}

/// Returns the names of hob's metrics that a text contains.
fn names_in(text: &str) -> BTreeSet<&str> {
    let is_part = |c: char| c.is_ascii_lowercase() || c == '_';
    let words = text.split(|c: char| !is_part(c));
    words.filter(|word| word.starts_with("hob_") || word.starts_with("process_")).collect()
}

/// Returns every possible name of a sample, without its labels.
fn sample_names() -> BTreeSet<String> {
    let names = |metric: &'static Metric| match metric.kind {
        Kind::Histogram => ["_bucket", "_sum", "_count"].map(|end| format!("{}{end}", metric.name)).to_vec(),
        _ => vec![metric.sample_name()],
    };
    METRICS.iter().flat_map(names).collect()
}

#[test]
fn the_dashboard_the_alerts_and_the_documentation_use_existing_metrics() {
    let dashboard = include_str!("../../../../dashboard/grafana/hob.json");
    let json: serde_json::Value = serde_json::from_str(dashboard).unwrap();
    let panels = json["panels"].as_array().unwrap();
    let targets = panels.iter().filter_map(|panel| panel["targets"].as_array()).flatten();
    let asked: String = targets.map(|target| target["expr"].as_str().unwrap().to_owned() + "\n").collect();
    let known = sample_names();
    for (text, least) in [
        (asked.as_str(), 30),
        (include_str!("../../../../dashboard/prometheus/alerts.yml"), 8),
        (docs_page().split_once("## Example queries").unwrap().1, 8),
    ] {
        let names = names_in(text);
        assert!(names.len() >= least, "{names:?}");
        let unknown: Vec<&&str> = names.iter().filter(|name| !known.contains(**name)).collect();
        assert!(unknown.is_empty(), "no such metrics: {unknown:?}");
    }
    // Dashboard variables also contain queries.
    let variables = json["templating"]["list"].to_string();
    assert!(names_in(&variables).into_iter().all(|name| known.contains(name)), "{variables}");
}

#[test]
fn panels_do_not_overlap_and_each_has_an_id_of_its_own() {
    let json: serde_json::Value =
        serde_json::from_str(include_str!("../../../../dashboard/grafana/hob.json")).unwrap();
    let (mut ids, mut cells) = (BTreeSet::new(), BTreeSet::new());
    for panel in json["panels"].as_array().unwrap() {
        assert!(ids.insert(panel["id"].as_u64().unwrap()), "{panel}");
        let side = |name: &str| panel["gridPos"][name].as_u64().unwrap();
        for (x, y) in (side("x")..side("x") + side("w")).flat_map(|x| {
            let rows = side("y")..side("y") + side("h");
            rows.map(move |y| (x, y))
        }) {
            assert!(x < 24 && cells.insert((x, y)), "{} at {x}, {y}", panel["title"]);
        }
    }
}

#[test]
fn the_alerts_know_the_kinds_of_problems() {
    let alerts = include_str!("../../../../dashboard/prometheus/alerts.yml");
    for (_, rest) in alerts.match_indices("kind=\"").map(|(at, found)| alerts.split_at(at + found.len())) {
        let kind = rest.split('"').next().unwrap();
        assert!(ProblemKind::ALL.iter().any(|known| known.name() == kind), "{kind}");
    }
    let of_devices = DeviceState::ALL.map(DeviceState::name);
    let of_backings = BackingState::NAMES;
    for (metric, known) in
        [("hob_device_state", of_devices.as_slice()), ("hob_disk_backing_state", of_backings.as_slice())]
    {
        let asked: Vec<&str> = alerts.split(&format!("{metric}{{state=")).skip(1).collect();
        assert!(!asked.is_empty(), "no alert asks for {metric}");
        for state in asked.iter().flat_map(|rest| rest.split('"').nth(1).unwrap().split('|')) {
            assert!(known.contains(&state), "{metric}: {state}");
        }
    }
    let expressions = alerts.matches("_state{state=").count();
    let known = ["hob_device_state{", "hob_disk_backing_state{", "hob_disk_state{"];
    assert_eq!(expressions, known.iter().map(|name| alerts.matches(name).count()).sum::<usize>());
}

/// Kinds of problems that have no alert for the kind, because the alert for another metric names
/// the object of the problem. Each row has the kind and the expression of that alert.
const ALERTED_BY_OBJECT: [(ProblemKind, &str); 9] = [
    (ProblemKind::ShardSilent, "hob_shard_up == 0"),
    (ProblemKind::DiskOffline, "hob_disk_state{state=\"offline\"} == 1"),
    (ProblemKind::DeviceOffline, "hob_device_state{state=~\"fenced|offline\"} == 1"),
    (ProblemKind::DeviceFenced, "hob_device_state{state=~\"fenced|offline\"} == 1"),
    (ProblemKind::DeviceStalled, "hob_device_state{state=\"stalled\"} == 1"),
    (ProblemKind::DirtyLost, "hob_cache_dirty_lost_bytes > 0"),
    (ProblemKind::BackingUnreachable, "hob_disk_backing_state{state=~\"reconnecting|failed\"} == 1"),
    (ProblemKind::BackingSlow, "hob_disk_backing_state{state=\"slow\"} == 1"),
    (ProblemKind::BackingErrors, "hob_disk_backing_state{state=\"failing\"} == 1"),
];

#[test]
fn each_kind_of_problem_has_one_alert() {
    let alerts = include_str!("../../../../dashboard/prometheus/alerts.yml");
    let expressions: Vec<&str> =
        alerts.lines().filter_map(|line| line.trim().strip_prefix("expr: ")).collect();
    for kind in ProblemKind::ALL {
        let of_kind = format!("hob_health_problems{{kind=\"{}\"}} > 0", kind.name());
        let by_object = ALERTED_BY_OBJECT.iter().find(|(other, _)| *other == kind);
        let wanted = by_object.map_or(of_kind.as_str(), |(_, expression)| *expression);
        let found = expressions.iter().filter(|expression| **expression == wanted).count();
        assert_eq!(found, 1, "{}: {wanted}", kind.name());
        assert!(by_object.is_none() || !expressions.contains(&of_kind.as_str()), "{}", kind.name());
    }
}

#[test]
fn each_alert_has_its_own_name() {
    let alerts = include_str!("../../../../dashboard/prometheus/alerts.yml");
    let names: Vec<&str> = alerts.lines().filter_map(|line| line.trim().strip_prefix("- alert: ")).collect();
    assert!(names.len() > 10, "{names:?}");
    let mut seen = BTreeSet::new();
    assert!(names.iter().all(|name| seen.insert(*name)), "{names:?}");
}

#[test]
fn unlimited_values_have_no_limit_metric() {
    let qos = Qos { limit: Some(500), shares: 2000, ..Qos::default() };
    let due =
        |disk: &str, qos| DiskQos { disk: disk.into(), datastore: None, policy: None, qos, notes: vec![] };
    let store = Datastore {
        name: "array".into(),
        control: "auto".into(),
        latency_ms: 30,
        peak: 900,
        window: Some(12),
        in_flight: 7,
        waiting: 3,
        latency_ns: 30_000_000,
        ..Datastore::default()
    };
    let mut page = Page::new(Form::Prometheus, Latencies::PerOutcome);
    page.add_qos(&[due("a", qos), due("b", Qos::default())], &[store]);
    let text = page.finish();
    assert_eq!(value(&text, "hob_disk_qos_limit_units{disk=\"a\"}"), 500.0);
    assert_eq!(value(&text, "hob_disk_qos_shares{disk=\"b\"}"), 1000.0);
    assert!(!text.contains("hob_disk_qos_limit_units{disk=\"b\"}"), "{text}");
    assert_eq!(value(&text, "hob_datastore_window_ios{datastore=\"array\"}"), 12.0);
    assert_eq!(value(&text, "hob_datastore_latency_seconds{datastore=\"array\"}"), 0.03);
    assert_eq!(value(&text, "hob_datastore_capacity_units{datastore=\"array\"}"), 900.0);
}
