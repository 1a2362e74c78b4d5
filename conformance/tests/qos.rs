//! Shares, limits and reservations for users: set, shown, saved and refused; and a limit that is
//! measured.

use std::time::{Duration, Instant};

use conformance::data::noise_file;
use conformance::nbd_client::Client;
use conformance::scratch::wait_for;
use conformance::{MIB, Scratch};

struct Stage {
    scratch: Scratch,
}

impl Stage {
    /// Creates two disks on one datastore.
    fn new() -> Self {
        let scratch = Scratch::new();
        let mut config = String::new();
        for disk in ["db", "scratch"] {
            noise_file(&scratch.path(&format!("{disk}.img")), MIB, 7);
            config += &format!(
                "[[disk]]\nname = \"{disk}\"\ndatastore = \"array\"\nbacking = \"{}\"\n",
                scratch.text(&format!("{disk}.img"))
            );
        }
        scratch.configure(&config);
        Self { scratch }
    }
}

#[test]
fn qos_settings_are_shown_and_survive_a_restart() {
    let stage = Stage::new();
    let daemon = stage.scratch.start_daemon();
    daemon.ctl(&["qos", "policy", "set", "gold", "--shares", "high", "--reservation", "200"]);
    daemon.ctl(&["qos", "set", "db", "--policy", "gold"]);
    daemon.ctl(&["qos", "set", "scratch", "--limit", "100", "--bytes-limit", "2M", "--flash-limit", "5000"]);
    daemon.tell("datastore set array --throttle auto --latency-ms 12 --capacity 900");
    let shown = [["qos", "show"].as_slice(), &["qos", "policy", "list"], &["datastore", "list"]];
    let before = shown.map(|args| daemon.json(args));
    assert_eq!(before[0][0]["policy"], "gold");
    assert_eq!((&before[0][0]["shares"], &before[0][0]["reservation"]), (&2000.into(), &200.into()));
    assert_eq!((&before[0][1]["limit"], &before[0][1]["flash_limit"]), (&100.into(), &5000.into()));
    assert_eq!(before[1][0]["disks"][0], "db");
    let store = &before[2][0];
    assert_eq!((&store["name"], &store["control"]), (&"array".into(), &"auto".into()));
    assert_eq!((&store["capacity"], &store["reserved"]), (&900.into(), &200.into()));
    let table = daemon.ctl(&["qos", "show"]);
    assert!(table.contains("gold") && table.contains("2 MiB"), "{table}");
    daemon.stop();
    let daemon = stage.scratch.start_daemon();
    assert_eq!(shown.map(|args| daemon.json(args)), before);
}

#[test]
fn shares_of_hob_toml_without_effect_are_reported_at_the_start() {
    let stage = Stage::new();
    let config = stage.scratch.path("hob.toml");
    let text = std::fs::read_to_string(&config).unwrap();
    // The last table of the file is a disk.
    std::fs::write(&config, text + "qos = { shares = \"high\" }\n").unwrap();
    let daemon = stage.start();
    wait_until("the report in the log", Duration::from_secs(60), || {
        daemon.process.stderr().contains("set array --throttle auto")
    });
    let policy = ["qos", "policy", "set", "gold", "--shares", "high"];
    assert!(!daemon.ctl(&policy).contains("note: "), "no disk follows the policy");
    daemon.ctl(&["qos", "set", "db", "--policy", "gold"]);
    let said = daemon.ctl(&policy);
    assert!(said.contains("note: shares and reservations have no effect yet"), "{said}");
}

#[test]
fn invalid_requests_are_refused_with_one_line_and_the_numbers() {
    let stage = Stage::new();
    let daemon = stage.scratch.start_daemon();
    daemon.ctl(&["datastore", "set", "array", "--capacity", "500"]);
    daemon.ctl(&["qos", "set", "db", "--reservation", "300"]);
    for (args, said) in [
        (
            &["qos", "set", "scratch", "--reservation", "201"][..],
            "501 units a second, and it has a configured capacity of 500",
        ),
        (&["qos", "set", "scratch", "--shares", "highest"], "low, normal, high or 1 to"),
        (&["qos", "set", "scratch", "--policy", "none"], "no storage policy 'none'"),
        (&["qos", "set", "none", "--shares", "low"], "no disk 'none'"),
        (&["qos", "set", "db", "--limit", "299"], "below the reservation of 300"),
        (&["qos", "policy", "set", "../x", "--shares", "low"], "cannot be a storage policy's name"),
        (&["datastore", "set", "array", "--capacity", "299"], "reservations of 300"),
        (&["datastore", "set", "array", "--throttle", "depth:0"], "off, auto, knee or depth"),
        (&["datastore", "set", "other", "--throttle", "auto"], "no datastore 'other'"),
    ] {
        let output = daemon.try_ctl(args);
        assert!(!output.success(), "{args:?} was accepted");
        assert!(output.stderr.contains(said), "{args:?}: {}", output.stderr);
        assert_eq!(output.stderr.lines().count(), 1, "{args:?}: {}", output.stderr);
    }
    assert_eq!(daemon.json(&["qos", "show", "db"])["reservation"], 300);
}

/// Measures times, but only as bounds that a slow machine cannot violate.
#[test]
fn a_limit_is_kept_on_the_backing_and_not_on_hits() {
    const READS: u64 = 64;
    let stage = Stage::new();
    let daemon = stage.scratch.start_daemon();
    daemon.tell(&format!("pool create fast {} --size 16M --segment-size 1M", stage.scratch.text("flash")));
    let cache = "cache enable scratch --pool fast --size 4M --block-size 4K --fill sectors";
    daemon.ctl(&cache.split(' ').collect::<Vec<_>>());
    daemon.ctl(&["qos", "set", "scratch", "--limit", "40"]);
    let mut client = stage.scratch.connect("scratch");
    let read_all = |client: &mut Client| {
        let start = Instant::now();
        for sector in 0..READS {
            client.read(sector * 4096, 4096).unwrap();
        }
        start.elapsed()
    };
    // 40 a second, after a burst of a tenth of a second's limit.
    let cold = read_all(&mut client);
    assert!(cold >= Duration::from_millis((READS - 5) * 1000 / 40 - 100), "{READS} misses took {cold:?}");
    // On a busy host, hits may take long too, and flash may not have everything after one pass.
    wait_for("hits that are faster than misses", || {
        let before = daemon.stats("scratch").hits();
        let warm = read_all(&mut client);
        daemon.stats("scratch").hits() - before == READS && warm < cold
    });
}
