//! fio's nbd engine writes and verifies at depth 32 while the cache is resized, cleared, switched
//! off and on, and given another block size, and while the pool gains and loses a device.

use std::time::{Duration, Instant};

use conformance::data::empty_file;
use conformance::{Hob, MIB, Scratch, Serve, Tool};

const SIZE: u64 = 128 * MIB;
const RUNS: u32 = 3;

/// All changes that a cache in use must support, in an order in which each is valid after the
/// previous one.
fn changes(extra: &str) -> Vec<Vec<String>> {
    [
        "cache resize disk 8M",
        "cache clear disk",
        "cache set disk --ram 4M",
        "cache resize disk 96M",
        "cache set disk --block-size 64K",
        "cache disable disk",
        "cache enable disk --pool default --size 48M --block-size 8K --policy lru",
        &format!("pool add-device default {extra}"),
        "cache resize disk 120M",
        "cache set disk --ram 16M",
        "cache set disk --policy s3-fifo",
        "cache clear disk",
        &format!("pool remove-device default {extra}"),
        "cache set disk --ram 1M",
        "cache set disk --block-size 4K",
        "cache set disk --ram 0",
    ]
    .iter()
    .map(|line| line.split(' ').map(str::to_owned).collect())
    .collect()
}

/// fio writes the first `size` bytes in requests of at most `largest` bytes, and verifies them.
fn fio(hob: &Hob, seed: u32, size: u64, largest: &str) -> Tool {
    Tool::new("fio")
        .args(["--name=verify", "--ioengine=nbd", "--uri", &hob.uri()])
        .args(["--rw=randwrite", &format!("--bsrange=512-{largest}"), "--blockalign=512", "--iodepth=32"])
        .args(["--size", &size.to_string(), "--serialize_overlap=1"])
        .args(["--verify=crc32c", "--do_verify=1", "--verify_fatal=1", "--verify_backlog=256"])
        .args([&format!("--randseed={seed}"), "--allrandrepeat=0", "--output-format=terse"])
        .limit(Duration::from_secs(600))
}

/// Runs fio on the whole disk to its end, and calls `step` repeatedly meanwhile.
#[track_caller]
fn run_with(hob: &Hob, seed: u32, step: impl FnMut()) {
    run(fio(hob, seed, SIZE, "1M"), step);
}

#[track_caller]
fn run(fio: Tool, mut step: impl FnMut()) {
    let mut process = fio.start();
    let start = Instant::now();
    while process.poll().is_none() {
        assert!(start.elapsed() < Duration::from_secs(600), "fio does not end");
        step();
        std::thread::sleep(Duration::from_millis(40));
    }
    let output = process.finish(Duration::ZERO);
    assert!(output.success(), "fio: {}", output.all());
    assert!(!output.all().contains("verify:"), "fio: {}", output.all());
}

/// Promise 2 under every change of a cache in use: no error, and each verified byte is correct.
#[test]
fn live_changes_are_invisible() {
    let scratch = Scratch::new();
    empty_file(&scratch.path("disk.img"), SIZE);
    // The pool must have space for the largest of these sizes.
    let hob =
        Serve::disk(&scratch.text("disk.img")).cached(&scratch.path("pool"), "128M", "4K").start(&scratch);
    empty_file(&scratch.path("extra"), 96 * MIB);
    let changes = changes(&scratch.text("extra"));
    let mut done = 0;
    let mut seed = 1;
    // At least this many runs of fio, and more until every change has happened twice.
    while seed <= RUNS || done < 2 * changes.len() {
        run_with(&hob, seed, || {
            let change: Vec<&str> = changes[done % changes.len()].iter().map(String::as_str).collect();
            hob.ctl(&change);
            done += 1;
        });
        seed += 1;
        assert!(seed < 40, "only {done} changes in {seed} runs of fio");
    }
    println!("{done} changes under {} runs of fio", seed - 1);
    hob.stop();
}

#[test]
fn an_unchanged_cache_verifies() {
    let scratch = Scratch::new();
    empty_file(&scratch.path("disk.img"), SIZE);
    let hob =
        Serve::disk(&scratch.text("disk.img")).cached(&scratch.path("pool"), "32M", "16K").start(&scratch);
    run_with(&hob, 77, || {});
    hob.stop();
}

/// fio's verification reads sequentially, so hob reads ahead while other runs write.
#[test]
fn a_cache_with_memory_verifies() {
    let scratch = Scratch::new();
    empty_file(&scratch.path("disk.img"), SIZE);
    let serve = Serve::disk(&scratch.text("disk.img")).cached(&scratch.path("pool"), "32M", "4K");
    let hob = serve.arg("--ram", "4M").arg("--mode", "write-back").start(&scratch);
    run_with(&hob, 79, || {});
    // Small requests to a small range: many of them share blocks, and find them in memory.
    run(fio(&hob, 80, 8 * MIB, "8K"), || {});
    assert!(hob.stats().reason("hit", "memory") > 0, "{}", hob.stats().text());
    hob.stop();
}

#[test]
fn a_disk_without_a_cache_verifies_over_tcp() {
    let scratch = Scratch::new();
    empty_file(&scratch.path("disk.img"), SIZE);
    let hob = Serve::disk(&scratch.text("disk.img")).tcp().start(&scratch);
    run_with(&hob, 78, || {});
    hob.stop();
}
