//! Every key of hob.toml is compared with the running daemon: a change of its value is a
//! difference.
//!
//! The keys come from docs/config.md, which is generated from the types of the configuration. So a
//! new key fails this test until the comparison has it.

use std::collections::BTreeSet;

use hob_control::ConfigRemedy;

use super::config::{Filed, text};
use super::recovery::{COMMITTED, read, sectors};
use super::*;
use crate::state::ShareSpec;

/// A hob.toml in which the tests replace `DIR`, `SIZE` and `LARGER`.
const BASE: &str = r#"state_dir = "DIR/state"
[[storage_policy]]
name = "gold"
qos = { shares = "low" }
[[datastore]]
name = "array"
throttle = "auto"
[[pool]]
name = "p"
devices = ["DIR/a", "DIR/b"]
size = SIZE
segment_size = "1M"
[[pool]]
name = "q"
devices = ["DIR/c"]
size = SIZE
segment_size = "1M"
[[disk]]
name = "vm"
backing = "DIR/vm.img"
qos = { shares = "high" }
cache = { pool = "p", size = "4M", mode = "write-back" }
[[disk.export]]
name = "vm-b"
read_only = true
"#;

/// The expected result of changing a value in hob.toml.
enum Expected {
    /// A difference in this object and setting.
    Difference(&'static str, ConfigRemedy),
    /// An error in the file.
    Refused,
}

use ConfigRemedy::{Apply, ApplyWithYes, Command};
use Expected::{Difference, Refused};

/// A section, a key, the part of the file that is replaced, its replacement, and the result. A
/// replacement that begins with `+` is added after the part.
type Row = (&'static str, &'static str, &'static str, &'static str, Expected);

/// Parts of the file that are replaced.
const DISK: &str = r#"qos = { shares = "high" }"#;
const CACHE: &str = r#"cache = { pool = "p", size = "4M", mode = "write-back" }"#;
const MODE: &str = r#"mode = "write-back""#;
const SIZED: &str = r#"size = "4M", "#;
const EXPORT: &str = "read_only = true";
const SEGMENTS: &str = r#"segment_size = "1M""#;
const STORE: &str = r#"throttle = "auto""#;
const POLICY: &str = r#"qos = { shares = "low" }"#;

const ROWS: &[Row] = &[
    ("[[disk]]", "name", r#"name = "vm""#, r#"name = "new""#, Difference("disk new", Apply)),
    ("[[disk]]", "backing", "vm.img", "other.img", Difference("disk vm: backing", Command)),
    ("[[disk]]", "format", DISK, r#"+format = "qcow2""#, Difference("disk vm: format", Command)),
    ("[[disk]]", "read_only", DISK, "+read_only = true", Difference("disk vm: read_only", Apply)),
    ("[[disk]]", "cache", CACHE, "", Difference("disk vm: cache", ApplyWithYes)),
    ("[[disk]]", "share_parent", DISK, "+share_parent = true", Difference("disk vm: share_parent", Command)),
    (
        "[[disk]]",
        "parent_cache",
        DISK,
        "+share_parent = true\nparent_cache = \"4M\"",
        Difference("disk vm: parent_cache", Command),
    ),
    (
        "[[disk]]",
        "backing_timeout",
        DISK,
        r#"+backing_timeout = "30s""#,
        Difference("disk vm: backing_timeout", Apply),
    ),
    ("[[disk]]", "stripe", DISK, r#"+stripe = "192K""#, Difference("disk vm: stripe", Apply)),
    ("[[disk]]", "datastore", DISK, r#"+datastore = "array""#, Difference("disk vm: datastore", Apply)),
    (
        "[[disk]]",
        "vhost_user",
        DISK,
        r#"+vhost_user = "DIR/vm.sock""#,
        Difference("disk vm: vhost_user", Apply),
    ),
    (
        "[[disk]]",
        "export",
        "[[disk.export]]",
        "[[disk.export]]\nname = \"vm-c\"\n[[disk.export]]",
        EXPORT_ADDED,
    ),
    ("[[disk]]", "fuse", DISK, r#"+fuse = "DIR/vm-file""#, Difference("disk vm: fuse", Apply)),
    ("[[disk]]", "device", DISK, "+device = true", Difference("disk vm: device", Apply)),
    ("[[disk]]", "qos", DISK, r#"qos = { shares = "low" }"#, QOS),
    (
        "[disk.cache]",
        "pool",
        r#"pool = "p""#,
        r#"pool = "q""#,
        Difference("disk vm: cache.pool", ApplyWithYes),
    ),
    ("[disk.cache]", "size", SIZED, r#"size = "6M", "#, Difference("disk vm: cache.size", Apply)),
    (
        "[disk.cache]",
        "preset",
        MODE,
        r#"+preset = "vsan""#,
        Difference("disk vm: cache.layout", ApplyWithYes),
    ),
    (
        "[disk.cache]",
        "block_size",
        MODE,
        r#"+block_size = "8K""#,
        Difference("disk vm: cache.block_size", ApplyWithYes),
    ),
    ("[disk.cache]", "policy", MODE, r#"+policy = "lru""#, Difference("disk vm: cache.policy", Apply)),
    ("[disk.cache]", "mode", MODE, r#"mode = "write-around""#, Difference("disk vm: cache.mode", Apply)),
    (
        "[disk.cache]",
        "persistent",
        MODE,
        r#"mode = "write-through", persistent = false"#,
        Difference("disk vm: cache.persistent", ApplyWithYes),
    ),
    (
        "[disk.cache]",
        "layout",
        MODE,
        r#"+layout = "split:70""#,
        Difference("disk vm: cache.layout", ApplyWithYes),
    ),
    (
        "[disk.cache]",
        "admission",
        MODE,
        r#"+admission = "always""#,
        Difference("disk vm: cache.admission", Apply),
    ),
    ("[disk.cache]", "fill", MODE, r#"+fill = "block""#, Difference("disk vm: cache.fill", Apply)),
    (
        "[disk.cache]",
        "destage_order",
        MODE,
        r#"+destage_order = "coldest""#,
        Difference("disk vm: cache.destage_order", Apply),
    ),
    (
        "[disk.cache]",
        "dirty_start",
        MODE,
        "+dirty_start = 20",
        Difference("disk vm: cache.dirty_start", Apply),
    ),
    ("[disk.cache]", "dirty_stop", MODE, "+dirty_stop = 3", Difference("disk vm: cache.dirty_stop", Apply)),
    ("[disk.cache]", "dirty_full", MODE, "+dirty_full = 80", Difference("disk vm: cache.dirty_full", Apply)),
    (
        "[disk.cache]",
        "dirty_age_max",
        MODE,
        "+dirty_age_max = 7",
        Difference("disk vm: cache.dirty_age_max", Apply),
    ),
    ("[disk.cache]", "copies", MODE, r#"+copies = "2-dirty""#, Difference("disk vm: cache.copies", Apply)),
    ("[disk.cache]", "ordered", MODE, "+ordered = true", Difference("disk vm: cache.ordered", Apply)),
    ("[disk.cache]", "verify", MODE, r#"+verify = "trust""#, Difference("disk vm: cache.verify", Apply)),
    ("[disk.cache]", "ram", MODE, r#"+ram = "64M""#, Difference("disk vm: cache.ram", Apply)),
    ("[disk.cache]", "shared", SIZED, "shared = true, ", Difference("disk vm: cache.size", Apply)),
    ("[disk.cache]", "min", SIZED, r#"min = "1M", "#, Difference("disk vm: cache.min", Apply)),
    ("[disk.cache]", "max", SIZED, r#"max = "8M", "#, Difference("disk vm: cache.max", Apply)),
    ("[disk.cache]", "shares", SIZED, "shares = 7, ", Difference("disk vm: cache.shares", Apply)),
    ("[disk.cache]", "pin", SIZED, "pin = true, ", Difference("disk vm: cache.pin", Apply)),
    ("[[disk.export]]", "name", r#"name = "vm-b""#, r#"name = "vm-c""#, EXPORT_ADDED),
    ("[[disk.export]]", "read_only", EXPORT, "read_only = false", EXPORT_CHANGED),
    ("[[disk.export]]", "no_promote", EXPORT, "+no_promote = true", EXPORT_CHANGED),
    ("[[disk.export]]", "fuse", EXPORT, r#"+fuse = "DIR/export-file""#, EXPORT_CHANGED),
    ("[[disk.export]]", "vhost_user", EXPORT, r#"+vhost_user = "DIR/export.sock""#, EXPORT_CHANGED),
    ("[disk.qos]", "policy", DISK, r#"qos = { policy = "gold" }"#, QOS),
    ("[disk.qos]", "shares", DISK, r#"qos = { shares = "normal" }"#, QOS),
    ("[disk.qos]", "reservation", DISK, "qos = { reservation = 10 }", QOS),
    ("[disk.qos]", "limit", DISK, "qos = { limit = 100 }", QOS),
    ("[disk.qos]", "bytes_limit", DISK, r#"qos = { bytes_limit = "10M" }"#, QOS),
    ("[disk.qos]", "flash_limit", DISK, "qos = { flash_limit = 100 }", QOS),
    ("[[pool]]", "name", r#"name = "q""#, r#"name = "r""#, Difference("pool r", Apply)),
    ("[[pool]]", "devices", r#""DIR/b"]"#, r#""DIR/b", "DIR/d"]"#, Difference("pool p: devices", Apply)),
    ("[[pool]]", "size", "size = SIZE", "size = LARGER", Difference("pool p: size", Command)),
    (
        "[[pool]]",
        "segment_size",
        SEGMENTS,
        r#"segment_size = "2M""#,
        Difference("pool p: segment_size", Command),
    ),
    ("[[pool]]", "force", SEGMENTS, "+force = true", Difference("pool p: force", Command)),
    (
        "[[pool]]",
        "flash_writes",
        SEGMENTS,
        r#"+flash_writes = "1 DWPD""#,
        Difference("pool p: flash_writes", Apply),
    ),
    ("[[datastore]]", "name", r#"name = "array""#, r#"name = "san""#, Difference("datastore san", Apply)),
    ("[[datastore]]", "throttle", STORE, r#"throttle = "knee""#, DATASTORE),
    ("[[datastore]]", "latency_ms", STORE, "+latency_ms = 50", DATASTORE),
    ("[[datastore]]", "capacity", STORE, "+capacity = 100", DATASTORE),
    (
        "[[storage_policy]]",
        "name",
        r#"name = "gold""#,
        r#"name = "silver""#,
        Difference("storage-policy silver", Apply),
    ),
    ("[[storage_policy]]", "qos", POLICY, "qos = { limit = 100 }", GOLD),
    ("[storage_policy.qos]", "policy", POLICY, r#"qos = { policy = "gold" }"#, Refused),
    ("[storage_policy.qos]", "shares", POLICY, r#"qos = { shares = "normal" }"#, GOLD),
    ("[storage_policy.qos]", "reservation", POLICY, "qos = { reservation = 10 }", GOLD),
    ("[storage_policy.qos]", "limit", POLICY, "qos = { limit = 100 }", GOLD),
    ("[storage_policy.qos]", "bytes_limit", POLICY, r#"qos = { bytes_limit = "10M" }"#, GOLD),
    ("[storage_policy.qos]", "flash_limit", POLICY, "qos = { flash_limit = 100 }", GOLD),
];

const EXPORT_ADDED: Expected = Difference("disk vm: export", Apply);
const EXPORT_CHANGED: Expected = Difference("disk vm: export", ApplyWithYes);
const QOS: Expected = Difference("disk vm: qos", Apply);
const DATASTORE: Expected = Difference("datastore array", Apply);
const GOLD: Expected = Difference("storage-policy gold: qos", Apply);

/// Returns the sections and keys of hob.toml that docs/config.md lists. The section of the top
/// level is empty.
fn reference() -> BTreeSet<(String, String)> {
    let page = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/config.md");
    let page = std::fs::read_to_string(page).unwrap();
    let (mut keys, mut section) = (BTreeSet::new(), String::new());
    for line in page.lines() {
        let quoted = |start: &str| line.strip_prefix(start).and_then(|rest| rest.split('`').next());
        if let Some(name) = quoted("## `") {
            section = name.to_owned();
        } else if let Some(key) = quoted("| `") {
            keys.insert((section.clone(), key.to_owned()));
        }
    }
    keys
}

/// Returns the key of the top level to which a section belongs.
fn top<'a>(section: &'a str, key: &'a str) -> &'a str {
    let name = section.trim_matches(['[', ']']);
    if name.is_empty() { key } else { name.split('.').next().unwrap_or(name) }
}

#[test]
fn a_change_of_each_key_of_hob_toml_is_a_difference() {
    run(async |bench| {
        bench.image("vm.img", 64);
        let directory = bench.dir.path().display().to_string();
        let size = hob_storage::pool::device_bytes_for(16 * MIB, SEGMENT);
        let fill = |text: &str| {
            let text = text.replace("DIR", &directory).replace("SIZE", &size.to_string());
            text.replace("LARGER", &(2 * size).to_string())
        };
        let filed = Filed::start(bench, &fill(BASE)).await;
        assert_eq!(filed.diff().await, []);
        for (section, key, from, to, expected) in ROWS {
            assert!(BASE.contains(*from), "{section} {key}");
            let to = match to.strip_prefix('+') {
                Some(more) if *from == MODE => format!("{from}, {more}"),
                Some(more) => format!("{from}\n{more}"),
                None => (*to).to_owned(),
            };
            filed.write(&fill(&BASE.replacen(*from, &to, 1)));
            let share = (*key == "parent_cache").then_some(ShareSpec { cache: None, disk: None });
            filed.bench.services.registry.inner().disk_mut("vm").unwrap().wanted.share_parent = share;
            match expected {
                Difference(what, by) => {
                    let found = filed.diff().await;
                    assert!(found.contains(&((*what).to_owned(), *by)), "{section} {key}: {found:?}");
                }
                Refused => {
                    let diff = filed.bench.services.hob_toml.diff().await;
                    assert!(diff.is_err(), "{section} {key}: {diff:?}");
                }
            }
        }
    });
}

#[test]
fn the_rows_above_and_the_settings_of_the_daemon_are_all_keys() {
    let objects = ["disk", "pool", "datastore", "storage_policy"];
    let is_of_object = |section: &str| !section.is_empty() && objects.contains(&top(section, ""));
    let all = reference();
    assert!(all.len() > 100, "{all:?}");
    let of_objects: BTreeSet<(String, String)> =
        all.iter().filter(|(section, _)| is_of_object(section)).cloned().collect();
    let tested: BTreeSet<(String, String)> =
        ROWS.iter().map(|(section, key, ..)| ((*section).to_owned(), (*key).to_owned())).collect();
    assert_eq!(of_objects, tested, "every key of an object needs a row");
    let settings = Config::parse("").unwrap().daemon_settings();
    let of_daemon: BTreeSet<&str> = settings.iter().flat_map(|(keys, _)| keys.split(", ")).collect();
    for (section, key) in all.iter().filter(|(section, _)| !is_of_object(section)) {
        let top = top(section, key);
        assert!(of_daemon.contains(top) || objects.contains(&top), "{top} is not compared ({section} {key})");
    }
}

/// Settings of the daemon itself: a change of a key below them is a difference too.
#[test]
fn a_change_of_a_setting_of_the_daemon_is_a_difference() {
    let tls = "tls = { cert = \"/c\", key = \"/k\"";
    let nbd = format!("[[nbd]]\nlisten = \"tcp:h:1\"\n{tls} }}\n");
    let control = format!("[control]\nlisten = [\"unix:/a\"]\n{tls} }}\n");
    let settings =
        |text: &str| Config::parse(text).unwrap_or_else(|error| panic!("{text}: {error}")).daemon_settings();
    for (key, before, after) in [
        ("state_dir", "state_dir = \"/a\"\n".to_owned(), "state_dir = \"/b\"\n".to_owned()),
        ("listen", String::new(), "listen = [\"unix:/a\"]\n".to_owned()),
        ("nbd", nbd.clone(), nbd.replace("\"/k\" }", "\"/k\", required = false }")),
        ("nbd", nbd.clone(), nbd.replace("tcp:h:1", "tcp:h:2")),
        ("shards", String::new(), "shards = 2\n".to_owned()),
        ("control", control.clone(), control.replace("\"/k\" }", "\"/other\" }")),
        ("control", control.clone(), format!("{control}socket_group = \"hob\"\n")),
        ("control", control.clone(), format!("{control}token_file = \"/t\"\n")),
        ("limits", String::new(), "[limits]\nflash_stall_ms_max = 2000\n".to_owned()),
    ] {
        let (before, after) = (settings(&before), settings(&after));
        let differing: Vec<&str> =
            before.iter().zip(&after).filter(|(a, b)| a != b).map(|((key, _), _)| *key).collect();
        assert_eq!(differing, [key]);
    }
}

/// The patch of a setting that keeps the data must not change the settings that empty the cache.
#[test]
fn without_yes_no_other_change_empties_a_cache() {
    run(async |bench| {
        bench.image("vm.img", 64);
        let cache = |more: &str| format!("cache = {{ pool = \"p\", size = \"4M\", {more} }}");
        let persistent = "persistent = true";
        let first = text(&bench, &cache(persistent), "");
        let filed = Filed::start(bench, &first).await;
        read(&filed.bench, 0..100);
        tokio::time::sleep(COMMITTED).await;
        let shown = || filed.bench.services.observe.disk("vm").unwrap().cache.unwrap();
        for (emptying, key) in [
            ("persistent = true, block_size = \"16K\"", "block_size"),
            ("persistent = true, layout = \"split:50\"", "layout"),
            ("persistent = false", "persistent"),
        ] {
            for other in ["policy = \"lru\"", "mode = \"write-around\"", "dirty_full = 90"] {
                let before = shown();
                let changed = text(&filed.bench, &cache(&format!("{emptying}, {other}")), "");
                filed.write(&changed);
                let applied = filed.apply(false).await;
                let left = format!("disk vm: cache.{key}: ");
                assert_eq!(
                    (applied.done.len(), applied.failed.len(), applied.left.len()),
                    (1, 0, 1),
                    "{applied:?}"
                );
                assert!(applied.left[0].starts_with(&left), "{applied:?}");
                // A reload makes the same changes.
                filed.reload(&first).await;
                filed.reload(&changed).await;
                let after = shown();
                assert_eq!(
                    (after.block_size, &after.layout, after.persistent),
                    (before.block_size, &before.layout, before.persistent),
                    "{emptying}, {other}"
                );
                assert_eq!(sectors(&filed.bench).await, (100, 0), "{emptying}, {other}");
                filed.reload(&first).await;
            }
        }
        assert_eq!(filed.diff().await, []);
    });
}

/// Write-back needs a journal, so this mode empties a volatile cache.
#[test]
fn write_back_for_a_volatile_cache_needs_yes() {
    run(async |bench| {
        bench.image("vm.img", 64);
        let cache = |more: &str| format!("cache = {{ pool = \"p\", size = \"4M\"{more} }}");
        let first = text(&bench, &cache(""), "");
        let filed = Filed::start(bench, &first).await;
        read(&filed.bench, 0..100);
        tokio::time::sleep(COMMITTED).await;
        let write_back = ", mode = \"write-back\", dirty_full = 90";
        filed.write(&text(&filed.bench, &cache(write_back), ""));
        let applied = filed.apply(false).await;
        let done = ["disk vm: cache.dirty_full: the setting is changed while the cache is in use".to_owned()];
        assert_eq!((&applied.done[..], applied.failed.len()), (&done[..], 0), "{applied:?}");
        let mode = applied.left.iter().any(|what| what.starts_with("disk vm: cache.mode: "));
        assert!(mode && sectors(&filed.bench).await == (100, 0), "{applied:?}");
        let applied = filed.apply(true).await;
        assert_eq!((applied.failed.len(), filed.diff().await), (0, Vec::new()), "{applied:?}");
    });
}
