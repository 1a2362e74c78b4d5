//! A split cache and a unified cache under continuous writes, in real time. With the preset `vsan`,
//! the write rate falls to the rate of the backing when the write buffer is full. With the preset
//! `zbs` and the same amount of flash, the write rate does not fall. The devices are scaled down: a
//! backing of some megabytes per second, and a cache of 96 MiB.

use std::time::{Duration, Instant};

use conformance::data::{Noise, noise_file};
use conformance::store::Store;
use conformance::{MIB, Scratch, Serve};

/// Size of the disk, which is written once from the start to the end.
const SIZE: u64 = 64 * MIB;
/// Rate of the backing, bytes per second.
const RATE: u64 = 3 * MIB;
const WRITE: u64 = 256 << 10;
/// Bytes of the first and of the last part whose rate is compared.
const PART: u64 = 8 * MIB;

/// Rates of a part, bytes per second.
#[derive(Debug)]
struct Rates {
    all: f64,
    /// Without the slowest quarter of the writes: the host of the test may stall.
    without_stalls: f64,
}

impl Rates {
    fn of(mut times: Vec<Duration>) -> Rates {
        times.sort_unstable();
        let rate = |times: &[Duration]| {
            (times.len() as u64 * WRITE) as f64 / times.iter().sum::<Duration>().as_secs_f64()
        };
        Rates { all: rate(&times), without_stalls: rate(&times[..times.len() * 3 / 4]) }
    }
}

/// Results of a run.
#[derive(Debug)]
struct Run {
    first: Rates,
    last: Rates,
    /// Share of the writes that flash took.
    to_flash: f64,
}

/// Writes the disk through a cache with this preset.
#[track_caller]
fn written(preset: &str, more: &[(&str, &str)]) -> Run {
    let scratch = Scratch::new();
    std::fs::create_dir(scratch.path("disks")).unwrap();
    noise_file(&scratch.path("disks/disk"), SIZE, 7);
    let (disks, bits) = (format!("dir={}", scratch.text("disks")), format!("rate={}", RATE * 8));
    let store = Store::start(&scratch.path("store.sock"), &["--filter=rate", "file", &disks, &bits]);
    let serve = Serve::disk(&store.backing("disk"))
        .arg("--pool", &scratch.text("pool"))
        .arg("--size", "96M")
        .arg("--preset", preset);
    let serve = more.iter().fold(serve, |serve, (name, value)| serve.arg(name, value));
    let hob = serve.start(&scratch);
    let mut client = hob.connect();
    let data = Noise::new(1).bytes(WRITE as usize);
    let mut part = |from: u64, to: u64| {
        let timed = |offset| {
            let began = Instant::now();
            client.write(offset, &data).expect("a write");
            began.elapsed()
        };
        Rates::of((from..to).step_by(WRITE as usize).map(timed).collect())
    };
    let first = part(0, PART);
    part(PART, SIZE - PART);
    let last = part(SIZE - PART, SIZE);
    let to_flash = hob.stats().reason("write", "to-flash") as f64 / (SIZE / WRITE) as f64;
    // The backing takes a while to get all dirty data, which no test needs.
    hob.kill();
    Run { first, last, to_flash }
}

#[test]
fn the_split_cache_breaks_down_and_the_unified_cache_does_not() {
    let split = written("vsan", &[]);
    assert!(split.to_flash < 0.9, "no write bypassed the full buffer: {split:?}");
    assert!(split.last.all <= 2.0 * RATE as f64, "the backing is no faster than that: {split:?}");
    assert!(
        split.last.all < 0.5 * split.first.without_stalls,
        "the rate falls when the buffer is full: {split:?}"
    );
    // One copy, as in the preset vsan: the pool has one device.
    let unified = written("zbs", &[("--copies", "1")]);
    assert_eq!(unified.to_flash, 1.0, "all writes go to flash: {unified:?}");
    let last = unified.last.without_stalls;
    assert!(last >= 2.0 * split.last.all, "no fall: {unified:?}, {split:?}");
    assert!(last >= 2.0 * RATE as f64, "not the rate of the backing: {unified:?}");
}
