//! Tests of the check of hob.toml, with files that have many mistakes: the check finds each mistake
//! in one pass, and names its line.

use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use super::super::{Config, ConfigError};
use crate::state::{DiskState, PoolState, State};
use crate::tls::tests::{Authority, make_fifo, write_secret};
use hob_control::Size;

fn lines(error: &ConfigError) -> Vec<String> {
    error.to_string().lines().map(str::to_owned).collect()
}

/// Checks that the error consists of the expected findings. For each finding, `expected` has the
/// line's number and a part of the message.
fn assert_found(error: &ConfigError, expected: &[(usize, &str)]) {
    let found = lines(error);
    for (line, part) in expected {
        let start = format!("line {line}: ");
        assert!(
            found.iter().any(|finding| finding.starts_with(&start) && finding.contains(part)),
            "line {line}: {part}\n{error}"
        );
    }
    assert_eq!(found.len(), expected.len(), "{error}");
}

const MISTAKES: &str = r#"
listen = ["unix:/run/hob/nbd.sock"]
socket_mode = "rw"
[[pool]]
name = "p"
devices = ["/a", "b", "/a"]
[[disk]]
name = "one"
backing = "/one.img"
vhost_user = "/run/hob/nbd.sock"
[disk.cache]
pool = "p"
size = "64M"
mode = "nonsense"
block_size = "3K"
dirty_start = 200
policy = "best"
[[disk]]
name = "two"
backing = ""
qos = { shares = "many" }
cache = { pool = "p", size = "0", admission = "sometimes" }
[[disk.export]]
name = "one"
[limits]
flash_errors_max = 0
"#;

#[test]
fn every_mistake_is_found_in_one_pass_with_its_line() {
    let error = Config::parse(MISTAKES).unwrap_err();
    assert_found(
        &error,
        &[
            (3, "socket_mode"),
            (6, "'b' is not an absolute path"),
            (6, "it already has the device /a"),
            (10, "listen.0 and vhost_user of disk one both use /run/hob/nbd.sock"),
            (14, "nonsense"),
            (15, "block_size = 3K: the value must be a power of two"),
            (16, "dirty_start = 200"),
            (17, "the policy 'best' does not exist"),
            (20, "disk two: the disk needs a backing"),
            (21, "shares are low, normal, high"),
            (22, "sometimes"),
            (24, "[[disk.export]] 'one' appears twice: disks and exports need different names"),
            (26, "limits.flash_errors_max = 0"),
        ],
    );
}

#[test]
fn unknown_keys_and_wrong_types_do_not_hide_each_other() {
    let text = "shard = 2\nring = \"best\"\n[[pool]]\nname = \"p\"\ndevices = [\"/a\"]\nsise = \"1G\"\n[[disk]]\n\
                name = \"a\"\n[[disk]]\nname = \"b\"\nbacking = \"/b\"\nread_only = \"yes\"\n";
    let error = Config::parse(text).unwrap_err();
    assert_found(
        &error,
        &[(1, "shard"), (2, "best"), (6, "sise"), (7, "missing field `backing`"), (12, "string \"yes\"")],
    );
    // A setting with an invalid value is not reported as missing, and causes no second mistake.
    let text = "[control]\nlisten = [\"tcp:h:1\"]\ntls = { cert = \"/c\", key = \"/k\" }\n[[control.token]]\nfile = \"/t\"\n\
                role = \"god\"\n";
    assert_found(&Config::parse(text).unwrap_err(), &[(6, "god")]);
    // An unknown key hides no other mistake.
    let text = "shard = 2\n[limits]\nconnections_max = 0\n";
    assert_found(&Config::parse(text).unwrap_err(), &[(1, "shard"), (3, "limits.connections_max = 0")]);
}

#[test]
fn a_stripe_size_is_a_multiple_of_4_kib() {
    let disk = |size| format!("[[disk]]\nname = \"a\"\nbacking = \"/a\"\nstripe = \"{size}\"\n");
    let what = "disk a: stripe = 6K: the value must be a multiple of 4K up to 16M";
    assert_found(&Config::parse(&disk("6K")).unwrap_err(), &[(4, what)]);
    Config::parse(&disk("192K")).unwrap();
}

#[test]
fn every_syntax_error_is_found() {
    let error = Config::parse("shards = \nlisten = [\n").unwrap_err();
    assert!(lines(&error).iter().all(|line| line.starts_with("line ")), "{error}");
    assert!(error.to_string().contains("line 1"), "{error}");
}

fn disk_with_cache(pool: &str) -> String {
    format!("[[disk]]\nname = \"a\"\nbacking = \"/a\"\ncache = {{ pool = \"{pool}\", size = \"64M\" }}\n")
}

#[test]
fn pools_and_storage_policies_are_those_of_the_file_and_those_of_the_state() {
    let config = Config::parse(&format!(
        "{}[[disk]]\nname = \"b\"\nbacking = \"/b\"\nqos = {{ policy = \"gold\" }}\n",
        disk_with_cache("fast")
    ))
    .unwrap();
    let error = config.check_with(&State::default()).unwrap_err();
    assert_found(&error, &[(4, "there is no pool 'fast'"), (8, "no storage policy 'gold'")]);
    let pool = PoolState {
        name: "fast".into(),
        devices: vec!["/nvme".into()],
        segment_size: Size(16 << 20),
        ..PoolState::default()
    };
    let kept = State { pools: vec![pool], ..State::default() };
    assert_found(&config.check_with(&kept).unwrap_err(), &[(8, "no storage policy 'gold'")]);
    let broken = config.error_at("tls", &anyhow::anyhow!("the certificate is broken"));
    let error = config.refuse(vec![broken]).unwrap_err();
    assert_eq!(lines(&error), ["the certificate is broken"]);
}

#[test]
fn a_cache_that_its_pool_cannot_have_is_an_error() {
    let text = "[[pool]]\nname = \"p\"\ndevices = [\"/x\"]\n[[disk]]\nname = \"a\"\nbacking = \"/a\"\n\
                cache = { pool = \"p\", size = \"64M\", mode = \"write-back\", copies = \"2-dirty\" }\n";
    let error = Config::parse(text).unwrap().check_with(&State::default()).unwrap_err();
    assert_found(&error, &[(7, "two copies need two flash devices")]);
}

#[test]
fn two_disks_on_one_file_are_an_error_however_it_is_called() {
    let dir = tempfile::tempdir().unwrap();
    let (file, link) = (dir.path().join("a.img"), dir.path().join("b.img"));
    std::fs::write(&file, "data").unwrap();
    std::os::unix::fs::symlink(&file, &link).unwrap();
    let disk = |name: &str, backing: &std::path::Path, more: &str| {
        format!("[[disk]]\nname = \"{name}\"\nbacking = \"{}\"\n{more}", backing.display())
    };
    let check = |text: String, state: &State| Config::parse(&text).unwrap().check_with(state);
    let both = disk("a", &file, "") + &disk("b", &link, "");
    let error = check(both, &State::default()).unwrap_err();
    assert_found(&error, &[(6, "disk a and disk b are on the same file")]);
    let readers = disk("a", &file, "read_only = true\n") + &disk("b", &link, "read_only = true\n");
    check(readers, &State::default()).unwrap();
    let one_writes = disk("a", &file, "read_only = true\n") + &disk("b", &link, "");
    check(one_writes, &State::default()).unwrap_err();
    let kept = DiskState::new("kept".into(), link.display().to_string(), false);
    let kept = State { disks: vec![kept], ..State::default() };
    assert_found(&check(disk("a", &file, ""), &kept).unwrap_err(), &[(3, "disk kept")]);
    let pool = format!("[[pool]]\nname = \"p\"\ndevices = [\"{}\"]\n", link.display());
    let error = check(disk("a", &file, "") + &pool, &State::default()).unwrap_err();
    assert_found(&error, &[(3, "pool 'p' and disk a are on the same file")]);
}

#[test]
fn a_part_conflicts_with_the_whole_and_not_with_another_part() {
    use super::{DataLocation, Identity, LocationIndex};
    let overlap = |one: &DataLocation, other: &DataLocation| {
        let mut index = LocationIndex::default();
        index.add(7, one);
        index.overlapping(other).contains(&7)
    };
    let file = || Identity::File(1, 2);
    let disk = DataLocation::of(file());
    let over_it = DataLocation { whole: vec![Identity::Device(7), file()], part: vec![] };
    let part = |device| DataLocation { whole: vec![Identity::Device(device)], part: vec![file()] };
    assert!(overlap(&disk, &disk) && overlap(&disk, &over_it) && overlap(&over_it, &disk));
    assert!(overlap(&disk, &part(8)) && overlap(&part(8), &disk) && overlap(&part(8), &over_it));
    assert!(!overlap(&part(8), &part(9)) && overlap(&part(8), &part(8)));
    assert!(!overlap(&disk, &DataLocation::of(Identity::File(1, 3))));
}

#[test]
fn a_disk_has_at_most_16_additional_exports() {
    let exports = |count: usize| -> String {
        let export = |at| format!("[[disk.export]]\nname = \"e{at}\"\n");
        let exports: String = (0..count).map(export).collect();
        format!("[[disk]]\nname = \"a\"\nbacking = \"/a\"\n{exports}")
    };
    Config::parse(&exports(16)).unwrap();
    let error = Config::parse(&exports(17)).unwrap_err();
    assert!(error.to_string().contains("it has 17 additional exports, and 16 is the maximum"), "{error}");
}

#[test]
fn values_of_a_wrong_type_are_named_without_rust_types() {
    let disk = "[[disk]]\nname = \"d\"\nbacking = \"/d\"\n";
    let pool = "[[pool]]\nname = \"p\"\ndevices = [\"/p\"]\n";
    let nbd = "[[nbd]]\nlisten = \"tcp:h:1\"\n";
    let mut texts: Vec<String> = Vec::new();
    for value in ["7", "[7]", "\"x\"", "-1", "true", "18446744073709551616"] {
        for key in [
            "state_dir",
            "socket_mode",
            "ring",
            "shards",
            "drain_on_shutdown",
            "control",
            "migrate",
            "peers",
            "cluster",
            "limits",
            "pool",
            "disk",
            "storage_policy",
            "datastore",
            "nbd",
            "allow",
        ] {
            texts.push(format!("{key} = {value}"));
        }
        for key in [
            "read_only",
            "cache",
            "parent_cache",
            "backing_timeout",
            "stripe",
            "export",
            "qos",
            "cache.pool",
            "cache.dirty_start",
            "cache.dirty_age_max",
            "cache.persistent",
            "cache.shares",
            "qos.limit",
        ] {
            texts.push(format!("{disk}{key} = {value}"));
        }
        for key in ["size", "segment_size", "devices", "flash_writes"] {
            texts.push(format!("{pool}{key} = {value}"));
        }
        for key in ["connections_max", "buffer_bytes_max", "flash_errors_max", "backing_wait_ms_max"] {
            texts.push(format!("[limits]\n{key} = {value}"));
        }
        for key in ["listen", "token", "client", "tls", "token_file"] {
            texts.push(format!("[control]\n{key} = {value}"));
        }
        texts.push(format!("{nbd}tls = {value}"));
        texts.push(format!("[[control.token]]\nfile = \"/t\"\nrole = {value}"));
        texts.push(format!("[[datastore]]\nname = \"s\"\ncapacity = {value}"));
    }
    let is_rust = |word: &str| {
        let is_primitive = ["struct", "enum", "usize", "u8", "u16", "u32", "u64", "i64", "i128", "u128"];
        let capitals = word.chars().filter(char::is_ascii_uppercase).count();
        let is_type = capitals > 1 && word.starts_with(|c: char| c.is_ascii_uppercase());
        is_primitive.contains(&word)
            || is_type && !word.ends_with("iB") && word.contains(|c: char| c.is_ascii_lowercase())
    };
    for text in texts {
        // Some of the values are valid.
        let Err(error) = Config::parse(&text) else { continue };
        let error = error.to_string();
        let named = error.split(|c: char| !c.is_ascii_alphanumeric()).find(|word| is_rust(word));
        assert_eq!(named, None, "{text}: {error}");
    }
    for (text, part) in [
        (format!("{disk}cache = 7"), "line 4: invalid type: integer `7`, expected a table"),
        (format!("{disk}qos = 7"), "line 4: invalid type: integer `7`, expected a table"),
        ("control = 7".to_owned(), "line 1: invalid type: integer `7`, expected a table"),
        (format!("{nbd}tls = 7"), "line 3: invalid type: integer `7`, expected a table"),
        ("shards = \"two\"".to_owned(), "expected an integer from 0 to "),
        (
            "[limits]\nbuffer_bytes_max = \"1M\"".to_owned(),
            "buffer_bytes_max = 1M: the value must be 64M to ",
        ),
    ] {
        let error = Config::parse(&text).unwrap_err().to_string();
        assert!(error.contains(part), "{text}: {error}");
    }
}

#[test]
fn a_missing_certificate_is_named_once_with_its_line() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("hob.toml");
    let text = format!(
        "state_dir = \"{}\"\n[[nbd]]\nlisten = \"tcp:127.0.0.1:45003\"\n\
         tls = {{ cert = \"/missing\", key = \"/missing\" }}\n",
        dir.path().display()
    );
    std::fs::write(&path, text).unwrap();
    let error = crate::Plan::check_config(&Config::load(&path).unwrap()).unwrap_err().to_string();
    assert!(error.contains("hob.toml:4: ") && error.contains("/missing"), "{error}");
    assert_eq!(error.matches("No such file").count(), 1, "{error}");
}

/// Reading a FIFO would wait for a writer forever.
#[test]
fn a_fifo_as_certificate_or_token_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let (path, fifo) = (dir.path().join("hob.toml"), dir.path().join("fifo"));
    make_fifo(&fifo);
    let fifo = fifo.display();
    let nbd = "[[nbd]]\nlisten = \"tcp:127.0.0.1:45003\"\n";
    let tls = format!("{nbd}tls = {{ cert = \"{fifo}\", key = \"{fifo}\" }}\n");
    let token = format!("[control]\ntoken_file = \"{fifo}\"\n");
    let cluster = format!("[cluster]\netcd = [\"https://127.0.0.1:1\"]\nca = \"{fifo}\"\n");
    for text in [tls, token, cluster] {
        std::fs::write(&path, format!("state_dir = \"{}\"\n{text}", dir.path().display())).unwrap();
        let error = crate::Plan::check_config(&Config::load(&path).unwrap()).unwrap_err().to_string();
        assert!(error.contains("/fifo: the path leads to a FIFO, not to a regular file"), "{error}");
    }
}

/// A daemon reads the files of `[migrate]` only when it connects to another host.
#[test]
fn unusable_files_of_migrate_and_cluster_are_named_with_their_line() {
    let dir = tempfile::tempdir().unwrap();
    let authority = Authority::new();
    let (cert, key) = authority.client_files(dir.path(), "host");
    let ca = authority.file(dir.path());
    let [fifo, exposed, junk] = ["fifo", "exposed", "junk"].map(|name| dir.path().join(name));
    make_fifo(&fifo);
    std::fs::copy(&key, &exposed).unwrap();
    std::fs::set_permissions(&exposed, std::fs::Permissions::from_mode(0o644)).unwrap();
    write_secret(&junk, "no PEM");
    let missing = dir.path().join("missing");
    let path = dir.path().join("hob.toml");
    let check = |table: &str, [cert, key, ca]: [&Path; 3]| {
        let sockets = |name: &str| format!("listen = [\"unix:{}/{name}.sock\"]\n", dir.path().display());
        let text = format!(
            "state_dir = \"{}\"\n{}[control]\n{}{table}\ncert = \"{}\"\nkey = \"{}\"\nca = \"{}\"\n",
            dir.path().display(),
            sockets("nbd"),
            sockets("control"),
            cert.display(),
            key.display(),
            ca.display()
        );
        std::fs::write(&path, text).unwrap();
        let checked = crate::Plan::check_config(&Config::load(&path).unwrap());
        checked.err().map_or_else(String::new, |error| error.to_string())
    };
    for table in ["[migrate]", "[cluster]\netcd = [\"https://127.0.0.1:2379\"]"] {
        assert_eq!(check(table, [&cert, &key, &ca]), "", "{table}");
        for (files, part) in [
            ([&missing, &key, &ca], "missing: No such file"),
            ([&cert, &fifo, &ca], "/fifo: the path leads to a FIFO, not to a regular file"),
            ([&cert, &key, &fifo], "/fifo: the path leads to a FIFO, not to a regular file"),
            ([&cert, &junk, &ca], "junk has no private key in PEM form"),
            ([&cert, &key, &junk], "junk has no certificate in PEM form"),
        ] {
            let error = check(table, files.map(PathBuf::as_path));
            assert!(error.contains("hob.toml:5: ") && error.contains(part), "{table}: {part}: {error}");
            assert_eq!(error.lines().count(), 1, "{error}");
        }
    }
    let error = check("[migrate]", [&cert, &exposed, &ca]);
    assert!(error.contains("every user can read"), "{error}");
}

/// The time of the check must not grow with the square of the number of disks.
#[test]
fn thousands_of_disks_are_checked_in_seconds() {
    const DISKS: usize = 8192;
    const CHECK_MAX: Duration = Duration::from_secs(30);
    let dir = tempfile::tempdir().unwrap();
    let shared = dir.path().join("shared.img");
    std::fs::write(&shared, "").unwrap();
    let disk = |number: usize| match number % 2 {
        0 => format!("[[disk]]\nname = \"d{number}\"\nbacking = \"/missing/of/many/disks/d{number}.img\"\n"),
        _ => {
            let shared = shared.display();
            format!("[[disk]]\nname = \"d{number}\"\nbacking = \"{shared}\"\nread_only = true\n")
        }
    };
    let text: String = (0..DISKS).map(disk).collect();
    let kept = DiskState::new("kept".into(), "/missing/of/many/disks/d8.img".into(), false);
    let state = State { disks: vec![kept], ..State::default() };
    let begun = Instant::now();
    let error = Config::parse(&text).unwrap().check_with(&state).unwrap_err();
    assert!(begun.elapsed() < CHECK_MAX, "{:?}", begun.elapsed());
    assert_found(&error, &[(31, "disk d8 and disk kept are on the same file")]);
}
