//! The memory tier above the cache serves repeated reads, never returns data from before a write, and
//! is changed under load.

use std::time::Duration;

use conformance::data::{assert_same, noise_file};
use conformance::{Hob, MIB, Scratch, Serve, Tool};

const SIZE: u64 = 16 * MIB;
const REQUEST: u64 = 16 << 10;

fn serve(scratch: &Scratch, ram: &str) -> Hob {
    noise_file(&scratch.path("disk.img"), SIZE, 77);
    Serve::disk(&scratch.text("disk.img"))
        .cached(&scratch.path("pool"), "32M", "4K")
        .arg("--ram", ram)
        .arg("--fill", "sectors")
        .start(scratch)
}

fn from_memory(hob: &Hob) -> u64 {
    let stats = hob.stats();
    stats.reason("hit", "memory") + stats.reason("hit", "prefetched")
}

/// Returns `n` requests of which none continues another.
fn scattered(n: u64) -> impl Iterator<Item = u64> {
    (0..n).map(|i| i * 7919 % (SIZE / REQUEST / 2) * 2 * REQUEST)
}

#[test]
fn the_second_read_is_served_from_memory() {
    let scratch = Scratch::new();
    let hob = serve(&scratch, "4M");
    let image = scratch.read("disk.img");
    let mut client = hob.connect();
    for pass in 0..2 {
        let before = from_memory(&hob);
        for at in scattered(100) {
            let data = client.read(at, REQUEST as u32).unwrap();
            assert_same(&data, &image[at as usize..(at + REQUEST) as usize], at, "the disk and its backing");
        }
        let served = from_memory(&hob) - before;
        assert_eq!(served, pass * 100, "pass {pass}: {}", hob.stats().text());
    }
    let stats = hob.stats();
    assert_eq!(stats.hits(), 0, "flash was not asked: {}", stats.text());
    assert_eq!(stats.number("memory_hit_percent"), Some(50.0));
    assert_eq!(stats.number("memory_bytes"), Some(4.0 * MIB as f64));
    hob.stop();
}

#[test]
fn a_sequential_reader_finds_its_data_read_ahead() {
    for ring in ["io_uring", "threads"] {
        // If the host's disk is slow at times, hob has no buffer for read-ahead at times.
        let is_enough = |_| prefetched(ring) >= SIZE / REQUEST - 16;
        assert!((0..5).any(is_enough), "{ring}: not enough was read ahead, see the counters above");
    }
}

/// Reads a new disk sequentially, and returns the number of reads that were served from memory.
#[track_caller]
fn prefetched(ring: &str) -> u64 {
    let scratch = Scratch::new();
    let image = scratch.noise("disk.img", SIZE, 77);
    let serve = Serve::disk(&scratch.text("disk.img")).cached(&scratch.path("pool"), "32M", "4K");
    let hob = serve.ring(ring).arg("--ram", "8M").start(&scratch);
    let mut client = hob.connect();
    for at in (0..SIZE).step_by(REQUEST as usize) {
        let data = client.read(at, REQUEST as u32).unwrap();
        assert_same(&data, &image[at as usize..(at + REQUEST) as usize], at, "the disk and its backing");
    }
    let stats = hob.stats();
    eprintln!("{ring}: {} reads: {}", SIZE / REQUEST, stats.text());
    let ahead = stats.number("read_ahead_bytes").unwrap();
    assert!(ahead <= SIZE as f64, "nothing is read twice: {ahead}");
    hob.stop();
    stats.reason("hit", "prefetched")
}

/// Promise 2: a read returns the latest acknowledged write: for a part of a page, over a page's
/// boundary, and without memory.
#[test]
fn writes_are_in_memory_when_they_are_acknowledged() {
    let scratch = Scratch::new();
    let hob = serve(&scratch, "4M");
    let mut image = scratch.read("disk.img");
    let mut client = hob.connect();
    for (i, at) in scattered(60).enumerate() {
        client.read(at, REQUEST as u32).unwrap();
        let len = [512, 4096, 6000 / 512 * 512, 16 << 10][i % 4];
        let offset = at + [0, 512, 4096, 1024][i / 4 % 4];
        let len = len.min((SIZE - offset) as usize);
        let data = vec![i as u8 + 1; len];
        client.write(offset, &data).unwrap();
        image[offset as usize..offset as usize + len].copy_from_slice(&data);
        let seen = client.read(at, REQUEST as u32).unwrap();
        assert_same(&seen, &image[at as usize..(at + REQUEST) as usize], at, "the disk and what was written");
    }
    assert!(from_memory(&hob) > 0, "{}", hob.stats().text());
    hob.ctl(&["cache", "set", "disk", "--ram", "0"]);
    for at in scattered(60) {
        let seen = client.read(at, REQUEST as u32).unwrap();
        assert_same(&seen, &image[at as usize..(at + REQUEST) as usize], at, "the disk and what was written");
    }
    hob.stop();
}

/// Writes that wait for the backing at the same time are sent together, and are on the backing when
/// they are acknowledged.
#[test]
fn sequential_writes_are_merged_and_verify() {
    let scratch = Scratch::new();
    let hob = serve(&scratch, "4M");
    let fio = Tool::new("fio")
        .args(["--name=merge", "--ioengine=nbd", "--uri", &hob.uri()])
        .args(["--rw=write", "--bs=4k", "--iodepth=32", "--size", &SIZE.to_string()])
        .args(["--verify=crc32c", "--do_verify=1", "--verify_fatal=1", "--output-format=terse"])
        .limit(Duration::from_secs(120));
    let output = fio.output();
    assert!(output.success() && !output.all().contains("verify:"), "fio: {}", output.all());
    let stats = hob.stats();
    let merged = stats.number("writes_merged").unwrap();
    assert!(merged > 0.0, "{}", stats.text());
    let mut client = hob.connect();
    let disk = client.read(0, SIZE as u32).unwrap();
    hob.stop();
    assert_same(&disk, &scratch.read("disk.img"), 0, "the disk and its backing");
}

#[test]
fn invalid_sizes_are_refused_in_one_line() {
    let scratch = Scratch::new();
    let hob = serve(&scratch, "1M");
    for (size, part) in [("1K", "0 or at least 1 MiB"), ("1000T", "more than half of this host")] {
        let output = hob.try_ctl(&["cache", "set", "disk", "--ram", size]);
        assert!(!output.success() && output.all().contains(part), "{size}: {}", output.all());
    }
    assert!(hob.ctl(&["disk", "show", "disk"]).contains("1 MiB"), "it has what it had");
    let output = hob.try_ctl(&["cache", "resize", "disk", "65536T"]);
    let said = output.all();
    assert!(!output.success() && said.contains("the index of a cache of"), "{said}");
    assert!(said.contains("384 TiB of memory") && said.contains("this host allows"), "{said}");
    hob.stop();
}
