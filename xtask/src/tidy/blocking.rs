//! Checks that no code on a shard's thread makes a system call that may block while a file system
//! hangs.

use super::source::code_only;
use super::{none, sources};

/// Sources whose code, except tests and [`ELSEWHERE`], runs on a shard.
const ON_SHARDS: [&str; 18] = [
    "crates/frontends/src/",
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
    "crates/storage/src/crash_log.rs",
    "crates/storage/src/flash.rs",
    "crates/storage/src/pool/",
    "crates/storage/src/ring/mod.rs",
    "crates/storage/src/ring/uring.rs",
    "crates/storage/src/unflushed_mark.rs",
];

/// Exceptions from [`ON_SHARDS`]: sources whose code never runs on a shard, and the threads on
/// which the code runs.
const OFF_SHARDS: [(&str, &str); 4] = [
    ("crates/storage/src/pool/device.rs", "on threads of the daemon that open and change pools"),
    ("crates/storage/src/pool/device_check.rs", "on threads of the daemon that open pools"),
    ("crates/storage/src/pool/returned.rs", "on threads of the daemon that open and change pools"),
    ("crates/storage/src/pool/table.rs", "on threads of the daemon that open and change pools"),
];

/// Calls in sources of [`ON_SHARDS`] that do not run on a shard, or that do not wait. Each entry
/// has the source (its path below crates/storage/src, or its full path), the call, the number of
/// times that the call occurs, and the reason why the call is harmless.
const ELSEWHERE: [(&str, &str, usize, &str); 44] = [
    ("backing/evidence.rs", "rustix::fs::fstat", 4, "while the disk is opened, and on threads of the daemon"),
    ("backing/evidence.rs", "std::fs::", 1, "reads /proc"),
    ("backing/file/holes.rs", "rustix::fs::open", 1, "while the disk is opened"),
    ("backing/file/holes.rs", "rustix::fs::fallocate", 2, "while the disk is opened"),
    ("backing/file/holes.rs", ".metadata()", 1, "while the disk is opened"),
    (
        "backing/file/probe.rs",
        "rustix::io::pread",
        1,
        "on the backing's helper thread, and while the disk is opened",
    ),
    ("backing/file/probe.rs", "rustix::fs::seek", 2, "on the backing's helper thread"),
    (
        "backing/file/probe.rs",
        ".metadata()",
        1,
        "on the backing's helper thread, and while the disk is opened",
    ),
    ("backing/file/stale.rs", "OpenOptions", 1, "on the backing's helper thread"),
    ("backing/file/stale.rs", ".metadata()", 1, "on the backing's helper thread"),
    ("backing/nbd/connect.rs", "UnixStream::connect", 1, "on the thread that connects"),
    ("backing/nbd/connect.rs", "TcpStream::connect", 1, "on the thread that connects"),
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
    ("backing/qemu_nbd/child.rs", "UnixStream::connect", 1, "on the thread that connects to the child"),
    ("backing/qemu_nbd/child_dirs.rs", "rustix::fs::flock", 2, "at the start of the daemon, without waiting"),
    ("backing/qemu_nbd/child_dirs.rs", "File::open", 2, "at the start of the daemon"),
    ("backing/qemu_nbd/node.rs", "std::fs::", 1, "while the disk is opened"),
    ("backing/qemu_nbd/read_locks.rs", "OpenOptions", 1, "while the disk is opened"),
    ("backing/qemu_nbd/sandbox.rs", "OpenOptions", 1, "while a child is started"),
    ("backing/qemu_nbd/sandbox.rs", ".metadata()", 1, "while a child is started"),
    ("crash_log.rs", "std::fs::", 8, "examines and removes files of /dev/shm; reads /proc"),
    ("crash_log.rs", "rustix::fs::open", 1, "opens a file of /dev/shm"),
    ("crash_log.rs", "rustix::fs::fallocate", 1, "reserves memory in /dev/shm"),
    ("crash_log.rs", ".metadata()", 2, "examines a file of /dev/shm"),
    ("pool/foreign.rs", "std::fs::", 1, "on threads of the daemon that open pools"),
    ("pool/mod.rs", "std::fs::", 2, "on threads of the daemon that create pools"),
    ("pool/other_data.rs", ".read_at(", 1, "on threads of the daemon that create pools"),
    ("pool/reader.rs", ".read_exact_at(", 1, "on threads of the daemon that read caches"),
    ("unflushed_mark.rs", "std::fs::", 2, "finds and removes a file of /dev/shm"),
    ("unflushed_mark.rs", ".write_all_at(", 3, "writes two bytes in /dev/shm"),
    (
        "crates/frontends/src/vhost_user/inflight.rs",
        "rustix::fs::fstat",
        1,
        "on the thread of the vhost-user socket",
    ),
    ("crates/frontends/src/vhost_user/inflight.rs", "rustix::fs::ftruncate", 1, "enlarges a file in memory"),
    (
        "crates/frontends/src/vhost_user/memory.rs",
        "rustix::fs::fstat",
        3,
        "on the thread of the vhost-user socket",
    ),
    ("crates/frontends/src/vhost_user/session.rs", "std::fs::", 2, "reads /proc"),
];

/// Backing whose code runs on a shard, except the function that opens the file.
const FILE_BACKING: &str = "crates/storage/src/backing/file.rs";
const FILE_OPENING: &str = "\nfn open_file(";

/// Calls that open, examine, change or flush a file, or that wait for a connection. The operations
/// of io_uring have other names. `rustix::fs::fstat` is also the beginning of `fstatfs` and
/// `fstatvfs`.
const CALLS: [&str; 35] = [
    "std::fs::",
    "rustix::fs::seek",
    "rustix::fs::stat(",
    STATX,
    "rustix::fs::statfs",
    "rustix::fs::statvfs",
    "rustix::fs::fstat",
    "rustix::fs::open",
    "rustix::fs::fallocate",
    "rustix::fs::ftruncate",
    "rustix::fs::fsync",
    "rustix::fs::fdatasync",
    "rustix::fs::flock",
    "rustix::io::pread",
    "rustix::io::pwrite",
    "File::create",
    "File::open",
    "File::options",
    "OpenOptions",
    ".metadata()",
    ".read_at(",
    ".write_at(",
    ".read_exact_at(",
    ".write_all_at(",
    ".seek(",
    ".set_len(",
    ".sync_all(",
    ".sync_data(",
    "UnixStream::connect",
    "TcpStream::connect",
    "libc::lseek",
    "libc::fallocate",
    "libc::ftruncate",
    "libc::pread",
    "libc::pwrite",
];

/// Returns the part of a source's code that runs on a shard.
fn on_shard(path: &str, code: &str) -> String {
    if path != FILE_BACKING {
        return code.to_owned();
    }
    let (before, opening) = code.split_once(FILE_OPENING).expect("the file is opened");
    let (_, after) = opening.split_once("\n}\n").expect("a function ends");
    format!("{before}\n{after}")
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
        let path =
            if path.starts_with("crates/") { path.into() } else { format!("crates/storage/src/{path}") };
        let source = sources.iter().find(|source| source.path == path);
        let found = source.map(|source| relevant(&path, &source.text).matches(call).count());
        assert_eq!(found, Some(count), "{path}: {call} ({reason})");
    }
    for (path, reason) in OFF_SHARDS {
        let source = sources.iter().find(|source| source.path == path);
        let found = source.map_or(0, |source| calls_in(path, &source.text).len());
        assert!(found > 0 && ON_SHARDS.iter().any(|on| path.starts_with(on)), "{path} ({reason})");
    }
}

#[test]
fn shards_make_no_system_call_that_waits_for_a_filesystem() {
    let runs_on_shard = |path: &str| {
        let is_test = path.ends_with("tests.rs") || path.contains("/tests/");
        let is_off = OFF_SHARDS.iter().any(|(off, _)| *off == path);
        !is_test && !is_off && (path == FILE_BACKING || ON_SHARDS.iter().any(|on| path.starts_with(on)))
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
    let backing = "\nfn open_file() {\n    File::open()\n}\n\nimpl FileBacking {\n    x.metadata()\n}\n";
    assert_eq!(calls_in(FILE_BACKING, backing), [format!("{FILE_BACKING}: .metadata()")]);
    let reader = format!("{backing}\nimpl Reader for FileReader {{\n    x.read_exact_at(bytes, 0)\n}}\n");
    assert_eq!(calls_in(FILE_BACKING, &reader).len(), 2);
    for call in [
        "rustix::fs::fstatfs(x)",
        "rustix::fs::fstatvfs(x)",
        "rustix::fs::statvfs(x)",
        "rustix::fs::ftruncate(x, 0)",
        "x.set_len(0)",
        "rustix::io::pread(x, bytes, 0)",
        "x.read_exact_at(bytes, 0)",
        "x.write_all_at(bytes, 0)",
        "UnixStream::connect(path)",
    ] {
        for path in ["crates/frontends/src/fuse/mod.rs", "crates/storage/src/pool/remote.rs"] {
            assert_eq!(calls_in(path, &format!("fn a() {{ {call}; }}")).len(), 1, "{path}: {call}");
        }
    }
}
