//! Checks that no code on a shard's thread makes a system call that may block while a file system
//! hangs.

use super::source::code_only;
use super::{none, sources};

/// Sources whose code, except tests and [`ELSEWHERE`], runs on a shard.
const ON_SHARDS: [&str; 15] = [
    "crates/shard/src/shard_loop/",
    "crates/storage/src/backing/evidence.rs",
    "crates/storage/src/backing/file/",
    "crates/storage/src/backing/helper.rs",
    "crates/storage/src/backing/nbd.rs",
    "crates/storage/src/backing/nbd/",
    "crates/storage/src/backing/objects/",
    "crates/storage/src/backing/overlay/",
    "crates/storage/src/backing/qemu_nbd.rs",
    "crates/storage/src/backing/qemu_nbd/",
    "crates/storage/src/backing/rbd/",
    "crates/storage/src/flash.rs",
    "crates/storage/src/ring/mod.rs",
    "crates/storage/src/ring/uring.rs",
    "crates/storage/src/unflushed_mark.rs",
];

/// Calls of these sources that do not run on a shard, or that do not wait: the source below
/// crates/storage/src, the call, how often it occurs, and why it is harmless.
const ELSEWHERE: [(&str, &str, usize, &str); 27] = [
    ("backing/evidence.rs", "rustix::fs::fstat", 4, "while the disk is opened, and on threads of the daemon"),
    ("backing/evidence.rs", "std::fs::", 1, "reads /proc"),
    ("backing/file/holes.rs", "rustix::fs::open", 1, "while the disk is opened"),
    ("backing/file/holes.rs", "rustix::fs::fallocate", 2, "while the disk is opened"),
    ("backing/file/holes.rs", ".metadata()", 1, "while the disk is opened"),
    ("backing/file/probe.rs", "rustix::fs::seek", 2, "on the backing's helper thread"),
    (
        "backing/file/probe.rs",
        ".metadata()",
        1,
        "on the backing's helper thread, and while the disk is opened",
    ),
    ("backing/file/stale.rs", "OpenOptions", 1, "on the backing's helper thread"),
    ("backing/file/stale.rs", ".metadata()", 1, "on the backing's helper thread"),
    ("backing/nbd/psk.rs", "std::fs::", 1, "on the thread that connects"),
    ("backing/nbd/tls.rs", "std::fs::", 1, "on the thread that connects"),
    ("backing/objects/owner.rs", "std::fs::", 3, "on the thread of the object store; reads /proc"),
    ("backing/objects/location.rs", "std::fs::", 4, "on the thread of the object store"),
    ("backing/objects/location.rs", "File::open", 1, "on the thread of the object store"),
    ("backing/objects/location.rs", ".sync_all(", 1, "on the thread of the object store"),
    ("backing/qemu_nbd.rs", "std::fs::", 2, "while the disk is opened"),
    ("backing/qemu_nbd.rs", "File::open", 1, "while the disk is opened"),
    ("backing/qemu_nbd.rs", ".sync_data(", 1, "while the disk is opened"),
    ("backing/qemu_nbd/child.rs", "std::fs::", 2, "on the thread that connects to the child"),
    ("backing/qemu_nbd/child.rs", "File::open", 1, "on the thread that waits for the child"),
    ("backing/qemu_nbd/child_dirs.rs", "rustix::fs::flock", 2, "at the start of the daemon, without waiting"),
    ("backing/qemu_nbd/child_dirs.rs", "File::open", 2, "at the start of the daemon"),
    ("backing/qemu_nbd/node.rs", "std::fs::", 1, "while the disk is opened"),
    ("backing/qemu_nbd/read_locks.rs", "OpenOptions", 1, "while the disk is opened"),
    ("backing/qemu_nbd/sandbox.rs", "OpenOptions", 1, "while a child is started"),
    ("backing/qemu_nbd/sandbox.rs", ".metadata()", 1, "while a child is started"),
    ("unflushed_mark.rs", "std::fs::", 2, "finds and removes a file of /dev/shm"),
];

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

/// Returns the number of times that [`ELSEWHERE`] allows a call in a source.
fn allowed(path: &str, call: &str) -> usize {
    let path = path.strip_prefix("crates/storage/src/").unwrap_or(path);
    let entry = ELSEWHERE.iter().find(|(source, name, ..)| (*source, *name) == (path, call));
    entry.map_or(0, |(_, _, count, _)| *count)
}

/// Returns the code of a source that may run on a shard: without imports and tests.
fn relevant(path: &str, text: &str) -> String {
    let code = code_only(text);
    // Tests are the last part of a source.
    let code = code.split("#[cfg(test)]\nmod tests {").next().unwrap_or_default();
    let lines = code.lines().filter(|line| !line.starts_with("use "));
    on_shard(path, &lines.flat_map(|line| [line, "\n"]).collect::<String>())
}

fn calls_in(path: &str, text: &str) -> Vec<String> {
    let code = relevant(path, text);
    let waits = |call: &str| {
        let harmless = if call == STATX { code.matches(KNOWN_ALREADY).count() } else { 0 };
        code.matches(call).count() > harmless + allowed(path, call)
    };
    let found = CALLS.iter().filter(|call| waits(call));
    found.map(|call| format!("{path}: {call}")).collect()
}

#[test]
fn every_exception_is_needed() {
    let sources = sources();
    for (path, call, count, reason) in ELSEWHERE {
        let path = format!("crates/storage/src/{path}");
        let source = sources.iter().find(|source| source.path == path);
        let found = source.map(|source| relevant(&path, &source.text).matches(call).count());
        assert_eq!(found, Some(count), "{path}: {call} ({reason})");
    }
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
    assert_eq!(calls_in("crates/shard/src/shard_loop/mod.rs", call).len(), 1);
    let known = "fn a() { rustix::fs::statx(file, name, AtFlags::STATX_DONT_SYNC, SIZE); }";
    assert!(calls_in("crates/shard/src/shard_loop/mod.rs", known).is_empty());
    let one_of_two = format!("{known} fn b() {{ rustix::fs::statx(file, name, AtFlags::empty(), SIZE); }}");
    assert_eq!(calls_in("crates/shard/src/shard_loop/mod.rs", &one_of_two).len(), 1);
    let opening = "use std::fs::File;\nfn a() { std::fs::metadata(path); }\n";
    assert!(calls_in("crates/storage/src/backing/qemu_nbd.rs", opening).is_empty());
    assert_eq!(calls_in("crates/storage/src/backing/nbd.rs", opening).len(), 1);
    assert_eq!(calls_in("crates/storage/src/backing/qemu_nbd.rs", &opening.repeat(3)).len(), 1);
    let backing = "\nimpl FileBacking {\n    x.metadata()\n}\n\nimpl Driver for FileBacking {\n}\n\nfn open() { File::open() }\n";
    assert_eq!(calls_in(FILE_BACKING, backing), [format!("{FILE_BACKING}: .metadata()")]);
}
