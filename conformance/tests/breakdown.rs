//! A split cache and a unified cache under continuous writes, in real time. With the preset `vsan`,
//! the write rate falls to the rate of the backing when the write buffer is full. With the preset
//! `zbs` and the same amount of flash, the write rate does not fall. The devices are scaled down: a
//! backing of at most some megabytes per second, and a cache of at most 96 MiB.

use std::time::{Duration, Instant};

use conformance::data::{Noise, noise_file};
use conformance::store::Store;
use conformance::{MIB, Scratch, Serve};

/// A load that writes each part of a disk once.
struct Load {
    /// Size of the disk, bytes.
    size: u64,
    /// Size of the cache.
    cache: &'static str,
    /// Rate of the backing, bytes per second.
    rate: u64,
    /// Length of a write, bytes.
    write: u64,
    /// Distance from one write to the next, in writes. The distance and the number of writes have
    /// no common factor.
    stride: u64,
    /// Number of the first and of the last writes whose rate is compared.
    part: u64,
}

const SEQUENTIAL: Load =
    Load { size: 64 * MIB, cache: "96M", rate: 3 * MIB, write: 256 << 10, stride: 1, part: 32 };
/// No write is near the preceding one, so none can be merged with it.
const RANDOM: Load =
    Load { size: 11 * MIB, cache: "24M", rate: MIB / 2, write: 4096, stride: 1237, part: 384 };

impl Load {
    fn writes(&self) -> u64 {
        self.size / self.write
    }
}

/// Rates of a part, bytes per second.
#[derive(Debug)]
struct Rates {
    all: f64,
    /// Rate without the slowest quarter of the writes, because the host of the test may stall.
    without_stalls: f64,
}

impl Rates {
    fn of(mut times: Vec<Duration>, write: u64) -> Rates {
        times.sort_unstable();
        let rate = |times: &[Duration]| {
            (times.len() as u64 * write) as f64 / times.iter().sum::<Duration>().as_secs_f64()
        };
        Rates { all: rate(&times), without_stalls: rate(&times[..times.len() * 3 / 4]) }
    }
}

/// Results of a run.
#[derive(Debug)]
struct Run {
    first: Rates,
    last: Rates,
    /// Number of writes that flash took.
    to_flash: u64,
}

/// Writes the disk through a cache with this preset.
#[track_caller]
fn written(load: &Load, preset: &str, more: &[(&str, &str)]) -> Run {
    let scratch = Scratch::new();
    std::fs::create_dir(scratch.path("disks")).unwrap();
    noise_file(&scratch.path("disks/disk"), load.size, 7);
    let (disks, bits) = (format!("dir={}", scratch.text("disks")), format!("rate={}", load.rate * 8));
    let store = Store::start(&scratch.path("store.sock"), &["--filter=rate", "file", &disks, &bits]);
    let serve = Serve::disk(&store.backing("disk"))
        .arg("--pool", &scratch.text("pool"))
        .arg("--size", load.cache)
        .arg("--preset", preset);
    let serve = more.iter().fold(serve, |serve, (name, value)| serve.arg(name, value));
    let hob = serve.start(&scratch);
    let mut client = hob.connect();
    let data = Noise::new(1).bytes(load.write as usize);
    let writes = load.writes();
    let mut part = |from: u64, to: u64| {
        let timed = |number: u64| {
            let offset = number * load.stride % writes * load.write;
            let began = Instant::now();
            client.write(offset, &data).expect("a write");
            began.elapsed()
        };
        Rates::of((from..to).map(timed).collect(), load.write)
    };
    let first = part(0, load.part);
    part(load.part, writes - load.part);
    let last = part(writes - load.part, writes);
    let to_flash = hob.stats().reason("write", "to-flash");
    // Kills hob, because a normal stop would wait until the backing has all dirty data.
    hob.kill();
    Run { first, last, to_flash }
}

/// Checks that the rate of a load falls with the split cache, which at least `bypassed_min` writes
/// bypass, and does not fall with the unified cache.
#[track_caller]
fn check(load: &Load, bypassed_min: u64) {
    let rate = load.rate as f64;
    let split = written(load, "vsan", &[]);
    let bypassed = load.writes() - split.to_flash;
    assert!(bypassed >= bypassed_min, "{bypassed} writes bypassed the full buffer: {split:?}");
    // While the test's host stalls, nbdkit's filter saves up a burst of two seconds.
    assert!(split.last.all <= 4.0 * rate, "the backing is no faster than that: {split:?}");
    assert!(
        split.last.all < 0.5 * split.first.without_stalls,
        "the rate falls when the buffer is full: {split:?}"
    );
    // One copy, as in the preset vsan: the pool has one device.
    let unified = written(load, "zbs", &[("--copies", "1")]);
    assert_eq!(unified.to_flash, load.writes(), "all writes go to flash: {unified:?}");
    let last = unified.last.without_stalls;
    assert!(last >= 2.0 * split.last.all, "no fall: {unified:?}, {split:?}");
    assert!(last >= 2.0 * rate, "not the rate of the backing: {unified:?}");
}

#[test]
fn the_split_cache_breaks_down_and_the_unified_cache_does_not() {
    check(&SEQUENTIAL, SEQUENTIAL.writes().div_ceil(10));
}

/// The destaging of one small write makes room for the next write, so only a few writes find the
/// write buffer full.
#[test]
fn small_random_writes_break_the_split_cache_down_and_not_the_unified_one() {
    check(&RANDOM, 1);
}
