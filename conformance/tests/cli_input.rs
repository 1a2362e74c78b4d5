//! Wrong command lines and wrong files: hob prints a clear message on standard error, exits with a
//! status other than 0, serves nothing and loses nothing.

use std::path::Path;

use conformance::data::{Noise, assert_same, empty_file, noise_file};
use conformance::process::Output;
use conformance::{MIB, Scratch, Serve, Tool, hob};

/// Checks a refusal: a status other than 0, no panic, and one line on standard error with the
/// reason. A server may have logged other lines before.
#[track_caller]
fn is_clear(what: &str, output: &Output, mentions: &str) {
    let lines: Vec<&str> = output.stderr.lines().filter(|l| !l.trim().is_empty()).collect();
    assert!(output.status.is_some_and(|s| s.code().is_some_and(|c| c != 0)), "{what}: {:?}", output.status);
    let said: Vec<&&str> = lines.iter().filter(|l| l.starts_with("hob: ")).collect();
    assert!(said.len() == 1 && lines.len() <= 4, "{what}: {} lines: {}", lines.len(), output.stderr);
    assert!(!output.all().contains("panicked"), "{what}: {}", output.stderr);
    assert!(said[0].contains(mentions), "{what}: should mention {mentions:?}: {}", output.stderr);
    assert!(!said[0].contains("(os error"), "{what}: {}", output.stderr);
}

#[test]
fn wrong_options_of_serve() {
    let scratch = Scratch::new();
    let disk = scratch.path("disk.img");
    noise_file(&disk, 4 * MIB, 40);
    empty_file(&scratch.path("empty.img"), 0);
    std::fs::create_dir(scratch.path("directory")).unwrap();
    let before = std::fs::read(&disk).unwrap();
    let path = |name: &str| scratch.text(name);
    let (good, pool, socket) = (path("disk.img"), path("pool"), format!("unix:{}", path("x.sock")));
    let nowhere = format!("unix:{}", path("no/such/x.sock"));
    let nbd = format!("nbd+unix:///?socket={}", path("nobody.sock"));
    // Each row: the error, the options, and the words that the message must contain.
    let table: Vec<(&str, Vec<&str>, &str)> = vec![
        ("no disk", vec!["--listen", &socket], "--disk"),
        ("nowhere to listen", vec!["--disk", &good], "--listen"),
        ("an absent disk", vec!["--disk", "/absent/vm.img", "--listen", &socket], "/absent/vm.img"),
        ("an unknown scheme", vec!["--disk", "gopher://x/y", "--listen", &socket], "gopher"),
        ("an unknown place to listen", vec!["--disk", &good, "--listen", "pigeon:7"], "pigeon"),
        ("a port that is none", vec!["--disk", &good, "--listen", "tcp:127.0.0.1:99999"], "99999"),
        ("a socket in an absent directory", vec!["--disk", &good, "--listen", &nowhere], "no/such"),
        (
            "a socket in an absent directory, and a new pool",
            vec!["--disk", &good, "--pool", &pool, "--size", "8M", "--listen", &nowhere],
            "create the directory",
        ),
        ("an unknown option", vec!["--disk", &good, "--listen", &socket, "--turbo"], "--turbo"),
        (
            "a feature that is absent",
            vec!["--disk", "s3://b/p", "--listen", &socket],
            "feature objects-cloud",
        ),
        ("an NBD server that is not there", vec!["--disk", &nbd, "--listen", &socket], "nobody.sock"),
    ];
    for (why, options, mentions) in table {
        let output = hob::command(&[&["serve"], &options[..]].concat());
        is_clear(why, &output, mentions);
    }
    for absent in ["no", "pool"] {
        assert!(!scratch.path(absent).exists(), "no refusal creates {absent}");
    }
    let directory = path("directory");
    let missing = path("no/such/pool");
    // With a pool: the error, the disk, the pool, and the other options.
    let table: Vec<(&str, &str, &str, Vec<&str>, &str)> = vec![
        ("a directory as a disk", &directory, &pool, vec!["--size", "8M"], "directory"),
        ("a directory as a pool", &good, &directory, vec!["--size", "8M"], "directory"),
        ("a pool in an absent directory", &good, &missing, vec!["--size", "8M"], "no/such"),
        ("the disk itself as the pool", &good, &good, vec!["--size", "2M"], "disk.img"),
        ("a size that is no number", &good, &pool, vec!["--size", "plenty"], "plenty"),
        ("an unknown unit", &good, &pool, vec!["--size", "8X"], "8X"),
        ("a size of nothing", &good, &pool, vec!["--size", "0"], "size"),
        ("a size beyond numbers", &good, &pool, vec!["--size", "99999999999T"], "99999999999T"),
        (
            "a block that is no power of two",
            &good,
            &pool,
            vec!["--size", "8M", "--block-size", "12K"],
            "block",
        ),
        ("a block too small", &good, &pool, vec!["--size", "8M", "--block-size", "512"], "block"),
        ("a block too large", &good, &pool, vec!["--size", "8M", "--block-size", "2M"], "block"),
        ("an unknown policy", &good, &pool, vec!["--size", "8M", "--policy", "psychic"], "psychic"),
        ("an unknown ring", &good, &pool, vec!["--size", "8M", "--ring", "of-fire"], "of-fire"),
    ];
    for (why, disk, pool, options, mentions) in table {
        let fixed = ["serve", "--disk", disk, "--pool", pool, "--listen", &socket];
        let output = hob::command(&[&fixed, &options[..]].concat());
        is_clear(why, &output, mentions);
    }
    assert!(!scratch.path("x.sock").exists(), "no refusal leaves a socket");
    assert_same(&std::fs::read(&disk).unwrap(), &before, 0, "the disk before and after");
}

#[test]
fn wrong_commands() {
    let scratch = Scratch::new();
    let nobody = format!("unix:{}", scratch.text("nobody.sock"));
    let absent = scratch.text("absent.toml");
    std::fs::write(scratch.path("bad.toml"), "this is = = not toml").unwrap();
    let bad = scratch.text("bad.toml");
    let table: Vec<(&str, Vec<&str>, &str)> = vec![
        ("an unknown command", vec!["brew"], "brew"),
        ("nobody at the control socket", vec!["stats", "--control", &nobody], "nobody.sock"),
        ("a configuration that is absent", vec!["daemon", "--config", &absent], "absent.toml"),
        ("a configuration that is no TOML", vec!["daemon", "--config", &bad], "bad.toml"),
        ("an unknown output", vec!["stats", "--control", &nobody, "-o", "song"], "song"),
    ];
    for (why, args, mentions) in table {
        is_clear(why, &hob::command(&args), mentions);
    }
}

/// Promise 5: the API refuses wrong commands, and the disk is still served.
#[test]
fn wrong_commands_to_a_running_server() {
    let scratch = Scratch::new();
    noise_file(&scratch.path("disk.img"), 8 * MIB, 41);
    let hob =
        Serve::disk(&scratch.text("disk.img")).cached(&scratch.path("pool"), "16M", "4K").start(&scratch);
    let mut client = hob.connect();
    let absent = scratch.text("absent");
    let table: Vec<(&str, Vec<&str>, &str)> = vec![
        ("an unknown disk", vec!["stats", "floppy"], "floppy"),
        ("an unknown disk's reasons", vec!["explain", "floppy"], "floppy"),
        ("an unknown disk's cache", vec!["cache", "resize", "floppy", "8M"], "floppy"),
        ("a cache larger than the pool", vec!["cache", "resize", "disk", "9T"], "9"),
        ("a cache of nothing", vec!["cache", "resize", "disk", "0"], "size"),
        ("a size that is no number", vec!["cache", "resize", "disk", "much"], "much"),
        ("an unknown policy", vec!["cache", "set", "disk", "--policy", "psychic"], "psychic"),
        ("a block of 3 KiB", vec!["cache", "set", "disk", "--block-size", "3K"], "block"),
        ("a device of no pool", vec!["pool", "remove-device", "default", &absent], "absent"),
        ("an unknown pool", vec!["pool", "show", "swimming"], "swimming"),
        (
            "a pool for nobody",
            vec!["cache", "enable", "floppy", "--pool", "default", "--size", "4M"],
            "floppy",
        ),
    ];
    for (why, args, mentions) in table {
        is_clear(why, &hob.try_ctl(&args), mentions);
        client.read(0, 4096).unwrap_or_else(|e| panic!("after {why}: {e}"));
    }
    hob.stop();
}

/// Without `--force`, hob refuses the file and leaves it unchanged; with `--force`, hob uses it.
#[track_caller]
fn refused_unless_forced(scratch: &Scratch, pool: &Path) {
    noise_file(&scratch.path("disk.img"), 8 * MIB, 42);
    let before = std::fs::read(pool).unwrap();
    let serve = Serve::disk(&scratch.text("disk.img")).cached(pool, "16M", "4K");
    let output = serve.refused(scratch);
    is_clear("somebody else's device", &output, "--force");
    assert_same(&std::fs::read(pool).unwrap(), &before, 0, "the refused file before and after");
    let hob = serve.flag("--force").start(scratch);
    hob.connect().read(0, MIB as u32).unwrap();
    hob.stop();
}

#[test]
fn a_filesystem_is_not_taken_for_a_pool() {
    let scratch = Scratch::new();
    empty_file(&scratch.path("ext4"), 64 * MIB);
    Tool::new("mkfs.ext4").args(["-q", "-F", &scratch.text("ext4")]).run();
    refused_unless_forced(&scratch, &scratch.path("ext4"));
}

#[test]
fn swap_space_is_not_taken_for_a_pool() {
    let scratch = Scratch::new();
    empty_file(&scratch.path("swap"), 64 * MIB);
    Tool::new("mkswap").arg(scratch.text("swap")).run();
    refused_unless_forced(&scratch, &scratch.path("swap"));
}

#[test]
fn unknown_bytes_are_not_taken_for_a_pool() {
    let scratch = Scratch::new();
    std::fs::write(scratch.path("noise"), Noise::new(6).bytes(64 << 20)).unwrap();
    refused_unless_forced(&scratch, &scratch.path("noise"));
}

#[test]
fn a_pool_in_use_is_not_taken_twice() {
    let (one, two) = (Scratch::new(), Scratch::new());
    for scratch in [&one, &two] {
        noise_file(&scratch.path("disk.img"), 8 * MIB, 43);
    }
    let pool = one.path("pool");
    let first = Serve::disk(&one.text("disk.img")).cached(&pool, "16M", "4K").start(&one);
    let output = Serve::disk(&two.text("disk.img")).cached(&pool, "16M", "4K").refused(&two);
    is_clear("a pool in use", &output, "pool");
    let image = one.read("disk.img");
    for _ in 0..2 {
        assert_same(&first.connect().read(0, 8 << 20).unwrap(), &image, 0, "the first server's disk");
    }
    first.stop();
}
