//! Checks that no code on a shard's thread makes a system call that may block while a file system
//! hangs.

use super::source::code_only;
use super::{none, sources};

/// Sources whose code, except tests, runs on a shard.
const ON_SHARDS: [&str; 3] =
    ["crates/daemon/src/shard/", "crates/storage/src/ring/mod.rs", "crates/storage/src/ring/uring.rs"];

/// Backing whose methods run on a shard. Functions outside its methods run where the backing is
/// opened, or on its helper thread.
const FILE_BACKING: &str = "crates/storage/src/backing/file.rs";

/// Calls that open, examine, change or flush a file. The operations of io_uring have other names.
const CALLS: [&str; 18] = [
    "std::fs::",
    "rustix::fs::seek",
    "rustix::fs::stat(",
    STATX,
    "rustix::fs::fstat",
    "rustix::fs::open",
    "rustix::fs::fallocate",
    "rustix::fs::fsync",
    "rustix::fs::fdatasync",
    "rustix::fs::flock",
    "File::open",
    "OpenOptions",
    ".metadata()",
    ".seek(",
    ".sync_all(",
    ".sync_data(",
    "libc::lseek",
    "libc::fallocate",
];

/// Returns the part of a source's code that runs on a shard.
fn on_shard(path: &str, code: &str) -> String {
    if path != FILE_BACKING {
        return code.to_owned();
    }
    let blocks = ["\nimpl FileBacking {", "\nimpl Driver for FileBacking {"];
    let block = |start: &str| {
        let rest = &code[code.find(start).expect("the backing has both blocks")..];
        rest[..rest.find("\n}\n").expect("a block ends")].to_owned()
    };
    blocks.map(block).concat()
}

/// A `statx` call for cached attributes does not wait for the file system.
const STATX: &str = "rustix::fs::statx(";
const KNOWN_ALREADY: &str = "STATX_DONT_SYNC";

fn calls_in(path: &str, text: &str) -> Vec<String> {
    let code = on_shard(path, &code_only(text));
    let waits = |call: &str| {
        let harmless = if call == STATX { code.matches(KNOWN_ALREADY).count() } else { 0 };
        code.matches(call).count() > harmless
    };
    let found = CALLS.iter().filter(|call| waits(call));
    found.map(|call| format!("{path}: {call}")).collect()
}

#[test]
fn shards_make_no_system_call_that_waits_for_a_filesystem() {
    let runs_on_shard = |path: &str| {
        let is_test = path.ends_with("tests.rs") || path.contains("/tests/");
        !is_test && (path == FILE_BACKING || ON_SHARDS.iter().any(|on| path.starts_with(on)))
    };
    let sources = sources();
    let checked: Vec<_> = sources.iter().filter(|source| runs_on_shard(&source.path)).collect();
    assert!(checked.len() > 10, "sources have moved: {}", checked.len());
    let broken: Vec<String> =
        checked.iter().flat_map(|source| calls_in(&source.path, &source.text)).collect();
    none("system calls that may block a shard; use the ring or the backing's helper thread", &broken);
}

#[test]
fn calls_are_found_where_they_count() {
    let call = "fn a() { rustix::fs::seek(file, at); } // OpenOptions";
    assert_eq!(calls_in("crates/daemon/src/shard/mod.rs", call).len(), 1);
    let known = "fn a() { rustix::fs::statx(file, name, AtFlags::STATX_DONT_SYNC, SIZE); }";
    assert!(calls_in("crates/daemon/src/shard/mod.rs", known).is_empty());
    let one_of_two = format!("{known} fn b() {{ rustix::fs::statx(file, name, AtFlags::empty(), SIZE); }}");
    assert_eq!(calls_in("crates/daemon/src/shard/mod.rs", &one_of_two).len(), 1);
    let backing = "\nimpl FileBacking {\n    x.metadata()\n}\n\nimpl Driver for FileBacking {\n}\n\nfn open() { File::open() }\n";
    assert_eq!(calls_in(FILE_BACKING, backing), [format!("{FILE_BACKING}: .metadata()")]);
}
