//! Tests of the disk array model. Its I/Os per second and latencies match the calibration values
//! and the data sheets, and change with seeks, rotation, RAID level and caches as expected.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use super::*;

const GB: u64 = 1_000_000_000;
const MS: u64 = 1_000_000;

fn array() -> ArrayModel {
    ArrayModel::new(ArrayConfig::raid5_of_four_7200(200 * GB))
}

/// Runs a closed loop with `depth` requests in flight, `count` in total. Returns (requests per
/// second, mean ns).
fn closed_loop(
    array: &mut ArrayModel,
    depth: usize,
    count: u64,
    mut next: impl FnMut(u64) -> (Access, u64, u64),
) -> (f64, f64) {
    let mut under_way = BinaryHeap::new();
    let (mut now, mut waited) = (0, 0);
    for i in 0..count {
        if under_way.len() == depth {
            let Reverse(done) = under_way.pop().unwrap();
            now = done;
        }
        let (op, offset, len) = next(i);
        let done = array.submit(now, op, offset, len);
        assert!(done > now, "nothing is instantaneous");
        waited += done - now;
        under_way.push(Reverse(done));
    }
    let end = under_way.into_iter().map(|Reverse(done)| done).max().unwrap();
    (count as f64 * 1e9 / end as f64, waited as f64 / count as f64)
}

/// Returns the i-th offset of a random walk over the array, a multiple of `len` bytes.
fn scattered(i: u64, len: u64, capacity: u64) -> u64 {
    let mut word = (i + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    word = (word ^ (word >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    word = (word ^ (word >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    (word ^ (word >> 31)) % (capacity / len) * len
}

fn random(op: Access, depth: usize) -> f64 {
    closed_loop(&mut array(), depth, 20_000, |i| (op, scattered(i, 8192, 200 * GB), 8192)).0
}

#[test]
fn random_reads_at_depth_meet_the_oracle_calibration() {
    for depth in [32, 64, 128, 256] {
        let iops = random(Access::Read, depth);
        assert!((560.0..=620.0).contains(&iops), "{iops:.0} IOPS at depth {depth}");
    }
    let best = random(Access::Read, 64);
    assert!((576.0..=608.0).contains(&best), "{best:.0} IOPS at depth 64");
}

#[test]
fn random_reads_one_at_a_time_cost_a_seek_and_half_a_rotation() {
    let (iops, mean) =
        closed_loop(&mut array(), 1, 20_000, |i| (Access::Read, scattered(i, 8192, 200 * GB), 8192));
    assert!((75.0..=85.0).contains(&iops), "{iops:.1} IOPS");
    assert!((mean / 1e6 - 12.85).abs() < 0.3, "8.5 + 4.16 ms and a little: {:.2} ms", mean / 1e6);
}

#[test]
fn throughput_never_falls_as_the_queue_grows() {
    let depths = [1, 2, 4, 8, 16, 32, 64];
    let iops = depths.map(|depth| random(Access::Read, depth));
    assert!(iops.is_sorted(), "{iops:?}");
}

#[test]
fn without_an_elevator_depth_gains_only_the_other_disks() {
    let config = ArrayConfig { queue_gain: QueueGain::FCFS, ..ArrayConfig::raid5_of_four_7200(200 * GB) };
    let (iops, _) = closed_loop(&mut ArrayModel::new(config), 64, 20_000, |i| {
        (Access::Read, scattered(i, 8192, 200 * GB), 8192)
    });
    assert!((270.0..=320.0).contains(&iops), "four disks of about 78: {iops:.0}");
}

#[test]
fn sequential_reads_run_at_the_media_rate() {
    for (start, at_least) in [(0, 80.0), (199 * GB, 40.0)] {
        let (rate, _) = closed_loop(&mut array(), 4, 2_000, |i| (Access::Read, start + i * 262_144, 262_144));
        let per_disk = rate * 262_144.0 / 1e6 / 4.0;
        assert!((at_least..=150.0).contains(&per_disk), "{per_disk:.0} MB/s per disk from {start}");
    }
}

#[test]
fn sequential_whole_row_writes_run_at_tens_of_megabytes_per_disk() {
    let row = 3 * (64 << 10);
    let per_disk = |depth| {
        let (rate, _) = closed_loop(&mut array(), depth, 2_000, |i| (Access::Write, i * row, row));
        rate * row as f64 / 1e6 / 4.0
    };
    // A single writer misses a rotation per row; several writers keep the disks streaming most of
    // the time.
    assert!((4.0..=8.0).contains(&per_disk(1)), "{:.0} MB/s per disk at depth 1", per_disk(1));
    assert!((25.0..=130.0).contains(&per_disk(4)), "{:.0} MB/s per disk at depth 4", per_disk(4));
    assert!((60.0..=130.0).contains(&per_disk(16)), "{:.0} MB/s per disk at depth 16", per_disk(16));
}

#[test]
fn a_small_write_is_four_disk_ios_and_a_whole_row_only_writes() {
    let mut small = array();
    small.submit(0, Access::Write, 40 * GB, 8192);
    assert_eq!(small.disk_ios(), (2, 2));
    let mut row = array();
    row.submit(0, Access::Write, 0, 3 * (64 << 10));
    assert_eq!(row.disk_ios(), (0, 4));
}

#[test]
fn random_small_writes_reach_a_quarter_of_the_reads() {
    let ratio = random(Access::Write, 64) / random(Access::Read, 64);
    assert!((0.2..=0.3).contains(&ratio), "{ratio:.3}");
    let (_, mean) =
        closed_loop(&mut array(), 1, 5_000, |i| (Access::Write, scattered(i, 8192, 200 * GB), 8192));
    assert!(
        (18.0..=27.0).contains(&(mean / 1e6)),
        "two positionings, one after the other: {:.1} ms",
        mean / 1e6
    );
}

#[test]
fn a_write_cache_answers_at_once_until_it_is_full() {
    let cache = WriteCache { bytes_max: 1 << 20, latency_ns: 200_000 };
    let mut config = ArrayConfig::raid5_of_four_7200(200 * GB);
    config.write_cache = Some(cache);
    let mut array = ArrayModel::new(config);
    let latencies: Vec<u64> =
        (0..1000).map(|i| array.submit(0, Access::Write, scattered(i, 8192, 200 * GB), 8192)).collect();
    let room = (cache.bytes_max / 8192) as usize;
    assert!(latencies[..room].iter().all(|&ns| ns == cache.latency_ns));
    assert!(latencies[room..].iter().all(|&ns| ns > cache.latency_ns));
    assert!(*latencies.last().unwrap() > 1000 * MS, "a full cache runs at the pace of the disks");
}

#[test]
fn a_mirror_reads_from_both_and_writes_to_both() {
    let config = ArrayConfig { level: Level::Raid1, disks: 2, ..ArrayConfig::raid5_of_four_7200(100 * GB) };
    let mut mirror = ArrayModel::new(config.clone());
    mirror.submit(0, Access::Write, 0, 4096);
    assert_eq!(mirror.disk_ios(), (0, 2));
    let (two, _) = closed_loop(&mut ArrayModel::new(config), 2, 4_000, |i| {
        (Access::Read, scattered(i, 4096, 100 * GB), 4096)
    });
    assert!(two > 140.0, "two disks serve two readers: {two:.0}");
}

#[test]
fn every_byte_of_a_row_lies_once_on_a_disk_that_is_not_its_parity() {
    let config = ArrayConfig::raid5_of_four_7200(1 << 30);
    for row in 0..8u64 {
        let row_bytes = 3 * config.stripe_bytes;
        let parts: Vec<Chunk> = chunks(&config, row * row_bytes, row_bytes).collect();
        let parity = raid::parity_of(&config, &parts);
        let mut disks: Vec<usize> = parts.iter().map(|part| part.disk).chain([parity.disk]).collect();
        disks.sort_unstable();
        assert_eq!(disks, [0, 1, 2, 3], "row {row}");
        assert!(parts.iter().all(|part| part.position == row * config.stripe_bytes));
    }
}

#[test]
fn seeks_average_to_the_data_sheet() {
    let drives = [
        (DriveConfig::enterprise_sata_7200(), 8.5, 16..18),
        (DriveConfig::sas_10k(), 3.8, 7..8),
        (DriveConfig::sas_15k(), 3.4, 6..8),
    ];
    for (drive, average_ms, full_stroke_ms) in drives {
        let steps = 10_000;
        let mean: f64 = (0..steps)
            .map(|i| (f64::from(i) + 0.5) / f64::from(steps))
            .map(|d| drive.seek.seek_ns(d) as f64 * 2.0 * (1.0 - d) / f64::from(steps))
            .sum();
        assert!((mean / 1e6 - average_ms).abs() < 0.05, "{:.3} ms", mean / 1e6);
        assert_eq!(drive.seek.seek_ns(0.0), 0);
        assert!(full_stroke_ms.contains(&(drive.seek.seek_ns(1.0) / MS)), "{drive:?}");
        assert!(drive.seek.seek_ns(1e-6) < MS, "track to track");
    }
}

/// Compares random 4 KB reads of one drive, one at a time, with the usual ratings of its class.
#[test]
fn one_drive_meets_the_ratings_of_its_class() {
    let drives = [
        (7_200, DriveConfig::enterprise_sata_7200(), 75.0..=90.0),
        (10_000, DriveConfig::sas_10k(), 110.0..=150.0),
        (15_000, DriveConfig::sas_15k(), 175.0..=210.0),
    ];
    for (rpm, drive, rating) in drives {
        let four = ArrayConfig::raid5_of_four_7200(300 * GB);
        let config = ArrayConfig { disks: 1, rpm, level: Level::Raid0, drive, controller_ns: 0, ..four };
        let (iops, _) = closed_loop(&mut ArrayModel::new(config), 1, 20_000, |i| {
            (Access::Read, scattered(i, 4096, 300 * GB), 4096)
        });
        assert!(rating.contains(&iops), "{rpm} rpm: {iops:.0} IOPS");
    }
}

#[test]
fn a_desktop_array_takes_bursts_of_writes_in_memory() {
    let size = 100 * GB;
    let mean_ms = |config| {
        let mut array = ArrayModel::new(config);
        let writes = (0..2_000u64).map(|i| {
            let at = i * 250_000;
            array.submit(at, Access::Write, scattered(i, 12_288, size), 12_288) - at
        });
        writes.sum::<u64>() as f64 / 2e9
    };
    let (plain, cached) = (ArrayConfig::raid5_of_five_15k(size), ArrayConfig::raid5_of_five_15k_vdi(size));
    assert!(mean_ms(plain) > 100.0, "4000 writes a second are too many for five disks");
    assert!(mean_ms(cached) < 0.5);
}

#[test]
fn the_same_calls_give_the_same_times() {
    let run = || {
        let mut array = array();
        (0..5_000)
            .map(|i| {
                let op = [Access::Read, Access::Write, Access::Flush][(i % 3) as usize];
                array.submit(i * 100_000, op, scattered(i, 4096, 200 * GB), 4096)
            })
            .collect::<Vec<u64>>()
    };
    assert_eq!(run(), run());
}

#[test]
fn requests_that_straddle_the_last_byte_are_refused_and_the_last_byte_is_not() {
    let mut array = array();
    array.submit(0, Access::Read, 200 * GB - 1, 1);
    let beyond = std::panic::catch_unwind(move || array.submit(0, Access::Read, 200 * GB - 1, 2));
    assert!(beyond.is_err());
}

#[test]
fn a_small_array_is_as_slow_as_a_large_one() {
    let small = 256 << 20;
    let mut array = ArrayModel::new(ArrayConfig::raid5_of_four_7200(small));
    let (iops, _) = closed_loop(&mut array, 64, 20_000, |i| (Access::Read, scattered(i, 8192, small), 8192));
    assert!((560.0..=620.0).contains(&iops), "{iops:.0} IOPS");
}

fn with_memory() -> ArrayConfig {
    let cache = ReadCache { bytes: 1 << 30, latency_ns: 200_000, prefetch_bytes: 512 << 10 };
    ArrayConfig { read_cache: Some(cache), ..ArrayConfig::raid5_of_four_7200(200 * GB) }
}

#[test]
fn recent_data_is_read_from_memory_while_it_fits() {
    let mut array = ArrayModel::new(with_memory());
    let cold = array.submit(0, Access::Read, 80 * GB, 8192);
    assert!(cold > 4 * MS);
    assert_eq!(array.submit(cold, Access::Read, 80 * GB, 4096), cold + 200_000);
    let written = array.submit(cold, Access::Write, 8 * GB, 4096);
    assert_eq!(array.submit(written, Access::Read, 8 * GB, 4096), written + 200_000);
    let mut now = written;
    for i in 0..(1 << 30) / (1 << 20) {
        now = array.submit(now, Access::Read, i << 20, 1 << 20);
    }
    assert!(array.submit(now, Access::Read, 80 * GB, 8192) > now + MS, "a gigabyte later it is gone");
}

/// A drive's own read-ahead is sufficient for one stream; sixteen streams need the controller's
/// read-ahead.
#[test]
fn streams_are_read_ahead_of() {
    let small_reads = |config| {
        let (rate, _) = closed_loop(&mut ArrayModel::new(config), 16, 20_000, |i| {
            (Access::Read, i % 16 * 10 * GB + i / 16 * 8192, 8192)
        });
        rate
    };
    let (plain, ahead) = (small_reads(ArrayConfig::raid5_of_four_7200(200 * GB)), small_reads(with_memory()));
    assert!(ahead > 4.0 * plain, "{ahead:.0} against {plain:.0} a second");
    assert!(ahead * 8192.0 < 4.0 * 130e6, "no faster than the media: {ahead:.0} a second");
}
